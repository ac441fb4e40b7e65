"""Attention of a drafter window: a few rows per request over a long cached prefix.

SGLang's extend attention is built for prompts. A program there owns one q head and 64 or 128 rows of a request, so
the 2k rows of a window (6 to 14) fill a tenth of its tile, every q head of a group reads the same K/V again, and a
single long request occupies as many programs as it has heads. Here one program owns one *kv* head: the window's rows
times the group's q heads are the tile (14 x 4 = 56 of 64), K/V are read once, and a prefix is split over programs.

Which kernel serves which call: :func:`stock_reason` says why a call must stay with SGLang's kernel, or None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional, Sequence

import torch

#: Most pieces a prefix is cut into; the reduction kernel holds that many partial results of a row at once.
MAX_SPLITS = 32
#: Programs per multiprocessor that a launch aims at: two are resident, so that one computes while the other loads.
PROGRAMS_PER_SM = 2
#: Rows of a program at most: one warp group's matrix instruction, or what float32 products leave registers for.
MAX_BLOCK_M, MAX_BLOCK_M_FLOAT32 = 64, 32
#: Cache types a drafter may have besides its own.
FP8_CACHES = (torch.float8_e4m3fn, torch.float8_e5m2)
COMPUTE_TYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Launch:
    """Shape of a launch, from static information only, so that a captured graph serves every prefix length.

    Attributes:
        splits: Pieces a prefix is cut into at most; short prefixes use fewer (see ``min_chunk``).
        block_m: Tile rows; ``window rows * q heads per kv head`` are dealt out over ``m_blocks`` tiles.
        m_blocks: Programs per (request, kv head, split).
        block_n: Prefix tokens per step.
        min_chunk: Fewest prefix tokens of a split, a multiple of ``block_n``.
        num_warps, num_stages: Triton's.
    """

    splits: int
    block_m: int
    m_blocks: int
    block_n: int
    min_chunk: int
    num_warps: int
    num_stages: int


def plan_launch(
    requests: int, width: int, heads: int, kv_heads: int, head_dim: int, itemsize: int, multiprocessors: int
) -> Launch:
    """The launch for ``requests`` windows of ``width`` rows.

    Args:
        requests: Windows in the batch, padded ones included.
        width: Rows per window.
        heads, kv_heads, head_dim: Of the layer on this rank.
        itemsize: Bytes of a q element.
        multiprocessors: Of the GPU.
    """
    rows = width * (heads // kv_heads)
    half = itemsize <= 2
    block_m = min(MAX_BLOCK_M if half else MAX_BLOCK_M_FLOAT32, max(16, _power_of_two(rows)))
    m_blocks = -(-rows // block_m)
    block_n = _block_n(head_dim, itemsize)
    programs = requests * kv_heads * m_blocks
    splits = max(1, min(MAX_SPLITS, _power_of_two(-(-PROGRAMS_PER_SM * multiprocessors // programs))))
    return Launch(
        splits=splits,
        block_m=block_m,
        m_blocks=m_blocks,
        block_n=block_n,
        min_chunk=block_n,
        num_warps=4,
        num_stages=3 if half else 2,  # the third loads slot numbers ahead of the K and V that they name
    )


def _block_n(head_dim: int, itemsize: int) -> int:
    """64 tokens at head dimension 128 in half precision; fewer where two stages of K and V would not leave shared
    memory for a second program on the multiprocessor."""
    return max(16, min(64, 16384 // (_power_of_two(head_dim) * itemsize)))


def _power_of_two(value: int) -> int:
    """The smallest power of two that is at least ``value``."""
    return 1 << max(0, value - 1).bit_length()


def stock_reason(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    *,
    width: int,
    requests: int,
    causal: bool,
    custom_mask: Optional[torch.Tensor],
    row_counts: Optional[Sequence[int]],
    sliding_window_size: int = -1,
    xai_temperature_len: int = -1,
    sinks: Any = None,
    score_mod: Any = None,
    aux_tensors: Any = None,
) -> Optional[str]:
    """Why this call must stay with SGLang's extend attention, or None if it is a window as :func:`window_attention`
    takes it. Looks at shapes, types and host values only.

    Args:
        q: [R, heads, D].
        k, v: [R, kv_heads, D] of the window rows.
        k_buffer, v_buffer: [slots, kv_heads, D].
        width: Rows of a decode window, 2k.
        requests: Requests of the batch.
        causal: Row j sees rows 0..j only.
        custom_mask: Mask of a draft tree.
        row_counts: Rows of every request as the host knows them, None if it does not.
        sliding_window_size: Below 0: none.
        xai_temperature_len: Below 1: none.
        sinks, score_mod, aux_tensors: Options of other model families.
    """
    if row_counts is None or len(row_counts) != requests or any(n != width for n in row_counts):
        return "the rows per request are not those of a decode window"
    if q.shape[0] != requests * width or k.shape[0] != q.shape[0] or v.shape[0] != q.shape[0]:
        return "the rows are padded"
    if not causal or custom_mask is not None:
        return "the mask is not causal"
    if sliding_window_size >= 0 or xai_temperature_len > 0:
        return "scores depend on the distance"
    if sinks is not None or score_mod is not None or aux_tensors is not None:
        return "the layer has sinks or its own scores"
    if {t.dim() for t in (q, k, v, k_buffer, v_buffer)} != {3} or q.shape[1] % k.shape[1]:
        return "the heads are not grouped"
    if len({t.shape[2] for t in (q, k, v, k_buffer, v_buffer)}) != 1 or q.shape[2] > 256:
        return "K and V have other head dimensions"
    if len({t.shape[1] for t in (k, v, k_buffer, v_buffer)}) != 1:
        return "the cache has other heads"
    if any(t.stride(2) != 1 for t in (q, k, v, k_buffer, v_buffer)):
        return "the heads are strided"
    if q.dtype not in COMPUTE_TYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        return "q, k and v have other types"
    if k_buffer.dtype != v_buffer.dtype or k_buffer.dtype not in (q.dtype, *FP8_CACHES):
        return "the cache has another type"
    return None


def window_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    out: torch.Tensor,
    *,
    width: int,
    scaling: float,
    logit_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Attention of bs windows of ``width`` rows: row j sees its request's cached prefix and window rows 0..j.

    The window's own K/V come from ``k`` and ``v``, never from the cache: mask rows share one padding slot there.
    With a cache in 8 bits, K and V are widened to the type of ``q`` before use. (SGLang's kernel narrows q and the
    softmax weights instead; the results differ by its rounding.)

    Args:
        q: [bs * width, heads, D] bfloat16, float16 or float32.
        k, v: [bs * width, kv_heads, D], the type of ``q``.
        k_buffer, v_buffer: [slots, kv_heads, D], the type of ``q`` or float8.
        kv_indptr: [bs + 1] int32; request i's prefix is ``kv_indices[kv_indptr[i] : kv_indptr[i + 1]]``, maybe empty.
        kv_indices: [at least kv_indptr[-1]] int64 cache slots, oldest token first.
        out: [bs * width, heads, D], written.
        width: Rows per request.
        scaling: Factor of the scores.
        logit_cap: ``c > 0``: scores s become ``c * tanh(s / c)``.
        k_scale, v_scale: Factors of the cached K and V.

    Returns:
        ``out``.
    """
    arguments = (q, k, v, k_buffer, v_buffer, kv_indptr, kv_indices, out)
    options = {
        "width": width, "scaling": scaling, "logit_cap": logit_cap, "k_scale": k_scale, "v_scale": v_scale
    }  # fmt: skip
    if q.is_cuda:
        from sgl_peagle.kernels import window_attention_triton

        return window_attention_triton.window_attention(*arguments, **options)
    return window_attention_reference(*arguments, **options)


def window_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    out: torch.Tensor,
    *,
    width: int,
    scaling: float,
    logit_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Plain torch in float32, one request at a time; see :func:`window_attention`."""
    group = q.shape[1] // k.shape[1]
    bounds = kv_indptr.tolist()
    ones = torch.ones(width, width, dtype=torch.bool, device=q.device)
    for request, (begin, end) in enumerate(zip(bounds, bounds[1:])):
        rows = slice(request * width, (request + 1) * width)
        slots = kv_indices[begin:end].long()
        keys = torch.cat([k_buffer[slots].float() * k_scale, k[rows].float()]).repeat_interleave(group, dim=1)
        values = torch.cat([v_buffer[slots].float() * v_scale, v[rows].float()]).repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), keys) * scaling
        if logit_cap > 0:
            scores = logit_cap * torch.tanh(scores / logit_cap)
        visible = torch.cat([ones.new_ones(width, end - begin), ones.tril()], dim=1)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
    return out
