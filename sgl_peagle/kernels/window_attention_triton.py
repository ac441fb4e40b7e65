"""Kernel 3: attention of drafter windows, split over the prefix, and the reduction of the splits.

A program is (request, kv head, tile of rows) x split. Tile row ``m`` is window row ``m // group`` of q head
``m % group`` of the kv head's group, so one K/V tile serves all of them. The grid depends on shapes only. How many of
its splits a request uses follows from its prefix length on the device: program ``split`` ends at once if its piece
begins behind the prefix. Split 0 starts with the window itself, where every row sees at least itself, and every
other split that runs has at least one prefix token that all rows see; so no running maximum stays at -inf.

float32 products are three TF32 ones each ("tf32x3", about float32's accuracy): one would be float16's, and real float32
has no matrix instruction. Half precision ignores that option.

A request that uses one split writes its output directly; only longer ones leave partial results (normalised, with
their log-sum-exp in base 2) to the reduction.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Optional

import torch
import triton
import triton.language as tl

from sgl_peagle.kernels.window_attention import MAX_SPLITS, Launch, plan_launch

#: Used where there is no GPU to ask (the interpreter).
_INTERPRETED_MULTIPROCESSORS = 132


@triton.jit
def _scores(raw, scale, LOGIT_CAP: tl.constexpr):
    """Raw products to base-2 scores."""
    LOG2E: tl.constexpr = 1.4426950408889634
    if LOGIT_CAP > 0:
        # tanh(x) = 2 sigmoid(2 x) - 1
        return (2 * tl.sigmoid(2 * (raw * scale / LOGIT_CAP)) - 1) * (LOGIT_CAP * LOG2E)
    return raw * (scale * LOG2E)


@triton.jit
def _chunk_length(prefix, splits, min_chunk, block_n):
    """Prefix tokens per split; both kernels must agree on it."""
    return tl.maximum(tl.cdiv(tl.cdiv(prefix, splits), block_n) * block_n, min_chunk)


# ``splits`` follows the batch size: specialised, a new batch size could compile another variant mid-traffic.
@triton.jit(do_not_specialize=["splits", "min_chunk"])
def _window_kernel(
    q, k, v, k_cache, v_cache, kv_indptr, kv_indices, out, partial, lse, scale, k_scale, v_scale,
    splits, min_chunk,
    q_row, q_head, k_row, k_head, v_row, v_head, kc_slot, kc_head, vc_slot, vc_head, out_row, out_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, LOGIT_CAP: tl.constexpr,
    M_BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    split = tl.program_id(1)
    request = (program // (KV_HEADS * M_BLOCKS)).to(tl.int64)
    kv_head = program // M_BLOCKS % KV_HEADS
    first = tl.load(kv_indptr + request)
    prefix = tl.load(kv_indptr + request + 1) - first
    chunk = _chunk_length(prefix, splits, min_chunk, BLOCK_N)
    begin = split * chunk
    if (split > 0) & (begin >= prefix):
        return
    end = tl.minimum(begin + chunk, prefix)

    m = program % M_BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    live = m < WIDTH * GROUP
    window_row = m // GROUP
    row = request * WIDTH + window_row
    head = kv_head * GROUP + m % GROUP
    d = tl.arange(0, BLOCK_D)
    in_head = d < D
    store = live[:, None] & in_head[None, :]
    queries = tl.load(q + row[:, None] * q_row + head[:, None] * q_head + d[None, :], mask=store, other=0.0)
    dtype = queries.dtype

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if split == 0:
        w = tl.arange(0, BLOCK_W)
        in_window = w < WIDTH
        own = request * WIDTH + w
        keys = tl.load(
            k + own[None, :] * k_row + kv_head * k_head + d[:, None],
            mask=in_window[None, :] & in_head[:, None], other=0.0,
        )  # fmt: skip
        values = tl.load(
            v + own[:, None] * v_row + kv_head * v_head + d[None, :],
            mask=in_window[:, None] & in_head[None, :], other=0.0,
        )  # fmt: skip
        scores = _scores(tl.dot(queries, keys, input_precision="tf32x3"), scale, LOGIT_CAP)
        visible = (w[None, :] <= window_row[:, None]) & in_window[None, :]
        scores = tl.where(visible, scores, float("-inf"))
        top = tl.max(scores, 1)
        weights = tl.exp2(scores - top[:, None])
        total = tl.sum(weights, 1)
        # The whole sum is scaled by v_scale at the end, which is the cache's alone.
        acc = tl.dot(weights.to(dtype), values, input_precision="tf32x3") / v_scale

    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = n < end
        slot = tl.load(kv_indices + first + n, mask=inside, other=0).to(tl.int64)
        keys = tl.load(
            k_cache + slot[None, :] * kc_slot + kv_head * kc_head + d[:, None],
            mask=inside[None, :] & in_head[:, None], other=0.0,
        ).to(dtype)  # fmt: skip
        scores = _scores(tl.dot(queries, keys, input_precision="tf32x3"), scale * k_scale, LOGIT_CAP)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, 1)
        values = tl.load(
            v_cache + slot[:, None] * vc_slot + kv_head * vc_head + d[None, :],
            mask=inside[:, None] & in_head[None, :], other=0.0,
        ).to(dtype)  # fmt: skip
        acc = tl.dot(weights.to(dtype), values, acc * decay[:, None], input_precision="tf32x3")
        top = new_top

    result = acc * (v_scale / total)[:, None]
    if prefix <= chunk:
        target = out + row[:, None] * out_row + head[:, None] * out_head + d[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=store)
    else:
        place = (row * (KV_HEADS * GROUP) + head) * splits + split
        tl.store(partial + place[:, None] * D + d[None, :], result, mask=store)
        tl.store(lse + place, top + tl.log2(total), mask=live)


@triton.jit(do_not_specialize=["splits", "min_chunk", "block_n"])
def _reduce_kernel(
    partial, lse, kv_indptr, out, splits, min_chunk, block_n, out_row, out_head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    request = row // WIDTH
    prefix = tl.load(kv_indptr + request + 1) - tl.load(kv_indptr + request)
    chunk = _chunk_length(prefix, splits, min_chunk, block_n)
    if prefix <= chunk:
        return  # written by its only split
    s = tl.arange(0, BLOCK_S)
    used = s < tl.cdiv(prefix, chunk)
    d = tl.arange(0, BLOCK_D)
    in_head = d < D
    place = (row * HEADS + head) * splits + s
    logs = tl.load(lse + place, mask=used, other=float("-inf"))
    pieces = tl.load(
        partial + place[:, None] * D + d[None, :], mask=used[:, None] & in_head[None, :], other=0.0
    )  # fmt: skip
    weights = tl.exp2(logs - tl.max(logs, 0))
    result = tl.sum(pieces * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + row * out_row + head * out_head + d, result.to(out.dtype.element_ty), mask=in_head)


@lru_cache(maxsize=None)
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


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
    launch: Optional[Launch] = None,
) -> torch.Tensor:
    """See :func:`sgl_peagle.kernels.window_attention.window_attention`; ``launch`` overrides the planned one."""
    (rows, heads, head_dim), kv_heads = q.shape, k.shape[1]
    requests = rows // width
    if launch is None:
        launch = plan_launch(
            requests, width, heads, kv_heads, head_dim, q.element_size(), _multiprocessors(q.device)
        )  # fmt: skip
    splits = launch.splits
    # Not zeroed: the reduction reads what this launch wrote and no more.
    pieces = rows * heads * splits if splits > 1 else 1
    partial = torch.empty(pieces * head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(pieces, dtype=torch.float32, device=q.device)
    block_d = triton.next_power_of_2(head_dim)
    _window_kernel[(requests * kv_heads * launch.m_blocks, splits)](
        q, k, v, k_buffer, v_buffer, kv_indptr, kv_indices, out, partial, lse,
        scaling, k_scale, v_scale, splits, launch.min_chunk,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        k_buffer.stride(0), k_buffer.stride(1), v_buffer.stride(0), v_buffer.stride(1), out.stride(0), out.stride(1),
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, WIDTH=width, D=head_dim, LOGIT_CAP=logit_cap,
        M_BLOCKS=launch.m_blocks, BLOCK_M=launch.block_m, BLOCK_W=max(16, triton.next_power_of_2(width)),
        BLOCK_N=launch.block_n, BLOCK_D=block_d, num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    if splits > 1:
        _reduce_kernel[(rows, heads)](
            partial, lse, kv_indptr, out, splits, launch.min_chunk, launch.block_n, out.stride(0), out.stride(1),
            HEADS=heads, WIDTH=width, D=head_dim, BLOCK_S=MAX_SPLITS, BLOCK_D=block_d, num_warps=4,
        )  # fmt: skip
    return out
