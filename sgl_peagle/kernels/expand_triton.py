"""Kernel 1: the whole drafter batch in one launch. Same contracts as the references in :mod:`.expand`.

Rows are independent, so a program computes a block of them from a handful of integers per request. Everything is
derived from device tensors; the host reads nothing back.
"""

from __future__ import annotations

from typing import Sequence

import torch
import triton
import triton.language as tl

from sgl_peagle import layout
from sgl_peagle.kernels.expand import SHARED_HIDDEN, DrafterRows, ragged_table

_BLOCK_DECODE = 128
_BLOCK_PREFILL = 1024


# Counts and the alignment of small inputs change from batch to batch: specialising on them would compile again in the
# middle of serving.
@triton.jit(
    do_not_specialize=["num_rows", "table_width", "table_stride"],
    do_not_specialize_on_alignment=["predicted", "accept_lens", "seq_lens", "req_pool_indices"],
)
def _decode_kernel(
    predicted,
    accept_lens,
    seq_lens,
    req_pool_indices,
    req_to_token,
    rows,  # [4, num_rows] int64: ids, positions, cache locs, hidden rows
    flags,  # [2, num_rows] uint8: mask, dead
    sampled,  # [bs * K] int64
    starts,  # [bs] int64
    lengths,  # [bs] int64
    num_rows,
    table_width,
    table_stride,
    K: tl.constexpr,
    MASK_ID: tl.constexpr,
    PRIVATE: tl.constexpr,
    SHARED: tl.constexpr,
    PADDING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    WIDTH: tl.constexpr = 2 * K
    VERIFY: tl.constexpr = K + 1
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    request = row // WIDTH
    j = row % WIDTH

    a = tl.load(accept_lens + request, mask=inside, other=1).to(tl.int32)
    length = tl.load(seq_lens + request, mask=inside, other=0).to(tl.int64)
    real = j < a
    is_mask = (j >= a) & (j < a + K - 1)
    dead = j >= a + K - 1

    verify_row = request * VERIFY + tl.minimum(j, K)
    token = tl.load(predicted + verify_row, mask=inside & real, other=0).to(tl.int64)
    token = tl.where(is_mask, MASK_ID, token)
    position = length + j

    has_slot = real
    if PRIVATE:
        has_slot = real | is_mask
    table_row = tl.load(req_pool_indices + request, mask=inside, other=0).to(tl.int64)
    column = tl.minimum(position, table_width - 1)
    slot = tl.load(req_to_token + table_row * table_stride + column, mask=inside & has_slot, other=PADDING)

    tl.store(rows + row, token, mask=inside)
    tl.store(rows + num_rows + row, position, mask=inside)
    tl.store(rows + 2 * num_rows + row, slot.to(tl.int64), mask=inside)
    tl.store(rows + 3 * num_rows + row, tl.where(is_mask, SHARED, verify_row).to(tl.int64), mask=inside)
    tl.store(flags + row, is_mask.to(tl.uint8), mask=inside)
    tl.store(flags + num_rows + row, dead.to(tl.uint8), mask=inside)

    # The first K rows of a window also write the request's K sampled rows, the very first its start and length.
    tl.store(sampled + request * K + j, (request * WIDTH + a - 1 + j).to(tl.int64), mask=inside & (j < K))
    tl.store(starts + request, (request * WIDTH).to(tl.int64), mask=inside & (j == 0))
    tl.store(lengths + request, (row * 0 + WIDTH).to(tl.int64), mask=inside & (j == 0))


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
    """See :func:`sgl_peagle.kernels.expand.expand_decode`."""
    bs, device = seq_lens.shape[0], seq_lens.device
    num_rows = bs * layout.window_width(k)
    rows = torch.empty((4, num_rows), dtype=torch.int64, device=device)
    flags = torch.empty((2, num_rows), dtype=torch.uint8, device=device)
    sampled = torch.empty((bs * k,), dtype=torch.int64, device=device)
    starts = torch.empty((bs,), dtype=torch.int64, device=device)
    lengths = torch.empty((bs,), dtype=torch.int64, device=device)
    _decode_kernel[(triton.cdiv(num_rows, _BLOCK_DECODE),)](
        predicted.contiguous(),
        accept_lens.contiguous(),
        seq_lens.contiguous(),
        req_pool_indices.contiguous(),
        req_to_token,
        rows,
        flags,
        sampled,
        starts,
        lengths,
        num_rows,
        req_to_token.shape[1],
        req_to_token.stride(0),
        K=k,
        MASK_ID=mask_token_id,
        PRIVATE=private_mask_slots,
        SHARED=SHARED_HIDDEN,
        PADDING=layout.PADDING_SLOT,
        BLOCK=_BLOCK_DECODE,
        num_warps=4,
    )
    ids, positions, cache_locs, hidden_rows = rows
    is_mask, is_dead = flags.view(torch.bool)
    return DrafterRows(ids, positions, cache_locs, hidden_rows, sampled, starts, lengths, is_mask, is_dead)


@triton.jit(
    do_not_specialize=["num_rows", "num_requests"],
    do_not_specialize_on_alignment=["prompt_ids", "tail_tokens", "cache_locs"],
)
def _prefill_kernel(
    prompt_ids,
    tail_tokens,
    cache_locs,
    table,  # [5, num_requests] int64, see ragged_table
    rows,  # [4, num_rows] int64: ids, positions, cache locs, hidden rows
    flags,  # [2, num_rows] uint8: mask, dead
    sampled,  # [num_requests * K] int64
    num_rows,
    num_requests,
    K: tl.constexpr,
    MASK_ID: tl.constexpr,
    SHARED: tl.constexpr,
    PADDING: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    request = tl.program_id(0)
    start = tl.load(table + request)
    length = tl.load(table + num_requests + request)
    source = tl.load(table + 2 * num_requests + request)
    prompt = tl.load(table + 3 * num_requests + request)
    prefix = tl.load(table + 4 * num_requests + request)
    tail = tl.load(tail_tokens + request).to(tl.int64)

    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = j < length
    real = j < prompt
    row = start + j
    token = tl.load(prompt_ids + source + j + 1, mask=j < prompt - 1, other=0).to(tl.int64)
    token = tl.where(real, tl.where(j == prompt - 1, tail, token), MASK_ID)
    slot = tl.load(cache_locs + source + j, mask=real, other=PADDING).to(tl.int64)

    tl.store(rows + row, token, mask=inside)
    tl.store(rows + num_rows + row, prefix + j, mask=inside)
    tl.store(rows + 2 * num_rows + row, slot, mask=inside)
    tl.store(rows + 3 * num_rows + row, tl.where(real, source + j, SHARED), mask=inside)
    tl.store(flags + row, (j >= prompt).to(tl.uint8), mask=inside)
    tl.store(flags + num_rows + row, (j < 0).to(tl.uint8), mask=inside)

    if tl.program_id(1) == 0:
        draft = tl.arange(0, BLOCK_K)
        chosen = tl.minimum(start + prompt - 1 + draft, start + length - 1)
        tl.store(sampled + request * K + draft, chosen, mask=draft < K)


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
    """See :func:`sgl_peagle.kernels.expand.expand_prefill`."""
    device, bs = prompt_ids.device, len(extend_lens)
    widths = [n + masks for n, masks in zip(extend_lens, num_masks, strict=True)]
    num_rows = sum(widths)
    table = ragged_table(extend_lens, prefix_lens, num_masks, device)
    rows = torch.empty((4, num_rows), dtype=torch.int64, device=device)
    flags = torch.empty((2, num_rows), dtype=torch.uint8, device=device)
    sampled = torch.empty((bs * k,), dtype=torch.int64, device=device)
    _prefill_kernel[(bs, triton.cdiv(max(widths), _BLOCK_PREFILL))](
        prompt_ids.contiguous(),
        tail_tokens.contiguous(),
        cache_locs.contiguous(),
        table,
        rows,
        flags,
        sampled,
        num_rows,
        bs,
        K=k,
        MASK_ID=mask_token_id,
        SHARED=SHARED_HIDDEN,
        PADDING=layout.PADDING_SLOT,
        BLOCK=_BLOCK_PREFILL,
        BLOCK_K=triton.next_power_of_2(k),
        num_warps=4,
    )
    ids, positions, locs, hidden_rows = rows
    is_mask, is_dead = flags.view(torch.bool)
    return DrafterRows(ids, positions, locs, hidden_rows, sampled, table[0], table[1], is_mask, is_dead)
