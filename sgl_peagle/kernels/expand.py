"""From the verify batch (or a prefill batch) to the drafter batch.

Both functions return a :class:`DrafterRows`; the arithmetic is :mod:`sgl_peagle.layout`'s. On a GPU each is one
launch (:mod:`.expand_triton`); the ``_reference`` functions say what the kernels must return, and run elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Sequence

import torch

from sgl_peagle import layout

#: ``DrafterRows.hidden_rows`` value of a row that gets h_shared.
SHARED_HIDDEN = -1


@dataclass(frozen=True)
class DrafterRows:
    """The drafter batch, flat over requests (R rows in all, bs requests).

    Attributes:
        input_ids: [R] int64, token whose embedding the row gets.
        positions: [R] int64, RoPE position. Dead rows count on; nothing reads them.
        cache_locs: [R] int64, KV slot that the row's K/V are written to.
        hidden_rows: [R] int64, row of the target hidden states, or ``SHARED_HIDDEN``.
        sampled_rows: [bs * k] int64, the rows of draft 1..k, request by request.
        starts: [bs] int64, first row of each request.
        lengths: [bs] int64, rows of each request.
        is_mask: [R] bool, mask rows.
        is_dead: [R] bool, rejected rows.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    cache_locs: torch.Tensor
    hidden_rows: torch.Tensor
    sampled_rows: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    is_mask: torch.Tensor
    is_dead: torch.Tensor


def expand_decode(
    predicted: torch.Tensor,
    accept_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    *,
    k: int,
    mask_token_id: int,
    private_mask_slots: bool,
) -> DrafterRows:
    """The 2k-row drafter window of every request after a verify.

    Reads nothing on the host, so it never synchronises.

    Args:
        predicted: [bs * (k+1)] int, the verify step's tokens: entry ``i*(k+1)+j`` for ``j < accept_lens[i]``
            is the token at position ``seq_lens[i] + j + 1``, the last of them the bonus token.
        accept_lens: [bs] int, accept length a of each request, bonus included (1..k+1).
        seq_lens: [bs] int, committed length before the verify.
        req_pool_indices: [bs] int, row of each request in ``req_to_token``.
        req_to_token: [pool rows, width] int, KV slot of each position.
        k: Draft tokens per round.
        mask_token_id: The head's MASK id.
        private_mask_slots: Give masks the slots behind the bonus; otherwise the padding slot.
    """
    expand = _on_gpu().expand_decode if seq_lens.is_cuda else expand_decode_reference
    return expand(
        predicted,
        accept_lens,
        seq_lens,
        req_pool_indices,
        req_to_token,
        k=k,
        mask_token_id=mask_token_id,
        private_mask_slots=private_mask_slots,
    )


def expand_prefill(
    prompt_ids: torch.Tensor,
    tail_tokens: torch.Tensor,
    cache_locs: torch.Tensor,
    *,
    extend_lens: Sequence[int],
    prefix_lens: Sequence[int],
    num_masks: Sequence[int],
    k: int,
    mask_token_id: int,
) -> DrafterRows:
    """Prompt rows shifted left by one, the tail token behind them, then the masks of finishing requests.

    The shape is known on the host, so one index built there serves every gather.

    Args:
        prompt_ids: [T] int, the extend tokens of all requests, flat.
        tail_tokens: [bs] int, the token behind each chunk: the sampled bonus token, or the next prompt token
            for a chunk that is not the last.
        cache_locs: [T] int, KV slots of the prompt rows. Masks always go to the padding slot here, since a
            prompt has no slots behind it.
        extend_lens: [bs] prompt rows of each request (>= 1).
        prefix_lens: [bs] tokens of each request already in the cache.
        num_masks: [bs] mask rows of each request: k-1 behind a last chunk, else 0.
        k: Draft tokens per round. Where a request has fewer than k sampled rows, its last row is repeated.
        mask_token_id: The head's MASK id.
    """
    expand = _on_gpu().expand_prefill if prompt_ids.is_cuda else expand_prefill_reference
    return expand(
        prompt_ids,
        tail_tokens,
        cache_locs,
        extend_lens=extend_lens,
        prefix_lens=prefix_lens,
        num_masks=num_masks,
        k=k,
        mask_token_id=mask_token_id,
    )


def _on_gpu() -> ModuleType:
    """The Triton kernels; importing them takes a GPU process's time only."""
    from sgl_peagle.kernels import expand_triton

    return expand_triton


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on ``device``, without blocking the host."""
    if device.type == "cuda":  # only a pinned source is copied asynchronously
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def ragged_table(
    extend_lens: Sequence[int], prefix_lens: Sequence[int], num_masks: Sequence[int], device: torch.device
) -> torch.Tensor:
    """[5, bs] int64: first row, rows, first prompt token, prompt tokens and prefix length of each request."""
    columns, start, source = [], 0, 0
    for n, prefix, masks in zip(extend_lens, prefix_lens, num_masks, strict=True):
        columns.append((start, n + masks, source, n, prefix))
        start += n + masks
        source += n
    return to_device(torch.tensor(columns, dtype=torch.int64).T.contiguous(), device)


def expand_decode_reference(
    predicted: torch.Tensor,
    accept_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    *,
    k: int,
    mask_token_id: int,
    private_mask_slots: bool,
) -> DrafterRows:
    """Plain torch; see :func:`expand_decode`."""
    bs, width, device = seq_lens.shape[0], layout.window_width(k), seq_lens.device
    j = torch.arange(width, device=device).expand(bs, width)
    a = accept_lens.long().unsqueeze(1)
    real, mask, dead = layout.is_real(j, a), layout.is_mask(j, a, k), layout.is_dead(j, a, k)

    # A real row j < a <= k+1 always has a verify row; clamping only keeps the other rows in bounds.
    verify_row = torch.arange(bs, device=device).unsqueeze(1) * layout.verify_width(k) + j.clamp(max=k)
    input_ids = predicted.long()[verify_row]
    input_ids = torch.where(real, input_ids, torch.where(mask, mask_token_id, 0))
    positions = seq_lens.long().unsqueeze(1) + j

    in_row = positions.clamp(max=req_to_token.shape[1] - 1)
    slots = req_to_token[req_pool_indices.long().unsqueeze(1), in_row].long()
    has_slot = ~dead if private_mask_slots else real
    starts = torch.arange(bs, device=device) * width
    first = layout.first_sampled_row(accept_lens.long())
    sampled = (starts + first).unsqueeze(1) + torch.arange(k, device=device)
    return DrafterRows(
        input_ids=input_ids.reshape(-1),
        positions=positions.reshape(-1),
        cache_locs=torch.where(has_slot, slots, layout.PADDING_SLOT).reshape(-1),
        hidden_rows=torch.where(mask, SHARED_HIDDEN, verify_row).reshape(-1),
        sampled_rows=sampled.reshape(-1),
        starts=starts,
        lengths=torch.full((bs,), width, device=device, dtype=torch.int64),
        is_mask=mask.reshape(-1),
        is_dead=dead.reshape(-1),
    )


def expand_prefill_reference(
    prompt_ids: torch.Tensor,
    tail_tokens: torch.Tensor,
    cache_locs: torch.Tensor,
    *,
    extend_lens: Sequence[int],
    prefix_lens: Sequence[int],
    num_masks: Sequence[int],
    k: int,
    mask_token_id: int,
) -> DrafterRows:
    """Plain torch over a host-built index; see :func:`expand_prefill`."""
    device, num_prompt, bs = prompt_ids.device, prompt_ids.shape[0], len(extend_lens)
    tail, mask_source = num_prompt, num_prompt + bs  # places in [prompt ids | tail tokens | MASK id]
    tokens, hidden, positions, sampled, starts = [], [], [], [], []
    source = start = 0
    draft = torch.arange(k)
    for i, (n, prefix, masks) in enumerate(zip(extend_lens, prefix_lens, num_masks, strict=True)):
        tokens += [torch.arange(source + 1, source + n), torch.tensor([tail + i]), torch.full((masks,), mask_source)]
        hidden += [torch.arange(source, source + n), torch.full((masks,), SHARED_HIDDEN)]
        positions.append(torch.arange(prefix, prefix + n + masks))
        sampled.append((start + n - 1 + draft).clamp(max=start + n + masks - 1))
        starts.append(start)
        source += n
        start += n + masks

    rows = to_device(torch.stack([torch.cat(tokens), torch.cat(hidden), torch.cat(positions)]), device)
    hidden_rows = rows[1]
    pool = torch.cat([prompt_ids.long(), tail_tokens.long(), prompt_ids.new_full((1,), mask_token_id).long()])
    is_mask = hidden_rows == SHARED_HIDDEN
    locs = torch.where(is_mask, layout.PADDING_SLOT, cache_locs.long()[hidden_rows.clamp(min=0)])

    return DrafterRows(
        input_ids=pool[rows[0]],
        positions=rows[2],
        cache_locs=locs,
        hidden_rows=hidden_rows,
        sampled_rows=to_device(torch.cat(sampled), device),
        starts=to_device(torch.tensor(starts), device),
        lengths=to_device(torch.tensor([n + masks for n, masks in zip(extend_lens, num_masks)]), device),
        is_mask=is_mask,
        is_dead=torch.zeros_like(is_mask),
    )
