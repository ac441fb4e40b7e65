"""Plain-torch stand-ins for the ``sgl_kernel`` CPU ops that SGLang 0.5.23 needs for chain drafting.

SGLang's CPU path imports these names from the compiled ``sgl_kernel`` package, whose CPU build needs AMX and is
not on PyPI.  The functions here follow the calling convention of the compiled ops (most write into tensors they
are given) and favour clarity over speed: they are for tests and demos.

Notation: ``bs`` requests, ``W`` verify width (``num_steps + 1``), ``pool_len`` columns of ``req_to_token``.
Integer tensors may be int32 or int64; results are converted to the dtype of the tensor they are written to.
"""

from __future__ import annotations

import ctypes
from typing import Callable, Iterator

import torch
from torch import Tensor

# ``TreeMaskMode`` of the host: the only layout its CPU path asks for (a W x W block per request).
_QLEN_ONLY = 1


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write newly allocated KV slots into the request table.

    Request ``i`` takes the next ``end_offset[i] - start_offset[i]`` slots of ``out_cache_loc``.

    Args:
        req_pool_indices: ``[bs]`` row of each request in ``req_to_token``.
        req_to_token: ``[pool_rows, pool_len]`` int32, written in place.
        start_offset, end_offset: ``[bs]`` half-open column range of each request.
        out_cache_loc: ``[sum of ranges]`` slots, request after request.
        pool_len: number of columns (unused: the tensor knows).

    Host call site: ``srt/mem_cache/allocation.py::assign_req_to_token_pool_func``.
    """
    taken = 0
    for row, start, end in _ranges(req_pool_indices, start_offset, end_offset):
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Read a column range of each request's row: the inverse of :func:`assign_req_to_token_pool_cpu`.

    Args:
        req_pool_indices: ``[bs]`` row of each request in ``req_to_token``.
        req_to_token: ``[pool_rows, pool_len]`` int32.
        start_offset, end_offset: ``[bs]`` half-open column range of each request.
        out_cache_loc: ``[>= sum of ranges]`` int64, filled from the front, request after request.
        pool_len: number of columns (unused: the tensor knows).

    Host call site: ``kernels/ops/speculative/cache_locs.py::assign_extend_cache_locs_func``.
    """
    filled = 0
    for row, start, end in _ranges(req_pool_indices, start_offset, end_offset):
        out_cache_loc[filled : filled + end - start] = req_to_token[row, start:end].to(out_cache_loc.dtype)
        filled += end - start


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the ``topk * num_steps`` slots that follow each request's committed tokens.

    Args:
        req_pool_indices: ``[bs]`` row of each request in ``req_to_token``.
        req_to_token: ``[pool_rows, pool_len]`` int32.
        seq_lens: ``[bs]`` committed tokens, i.e. the first column to read.
        out_cache_loc: ``[bs * topk * num_steps]`` int64, written in place.
        pool_len: number of columns (unused: the tensor knows).

    Host call site: ``kernels/ops/speculative/cache_locs.py::assign_draft_cache_locs_contiguous_func``.
    """
    columns = seq_lens.long().unsqueeze(1) + torch.arange(topk * num_steps)
    slots = req_to_token[req_pool_indices.long().unsqueeze(1), columns]
    out_cache_loc.copy_(slots.flatten().to(out_cache_loc.dtype))


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Describe the draft of each request to the verify step.  Chains only (``topk == 1``).

    Node 0 is the last committed token and node ``j`` its ``j``-th drafted successor, so node ``j`` sees nodes
    ``0..j``, sits at position ``verified_seq_len + j`` and is followed by ``j + 1``; nobody has a sibling.

    Args:
        parent_list, selected_index: the tree shape; a chain needs neither.
        verified_seq_len: ``[bs]`` committed tokens.
        tree_mask: bool ``[bs * W * W]`` or more, written in place from the front.
        positions: int64 ``[bs * W]``, written in place.
        retrive_index: int64 ``[bs, W]``: the flat row of each node, written in place.
        retrive_next_token, retrive_next_sibling: int64 ``[bs, W]``: first child / next sibling, -1 for none.
        draft_token_num: ``W``.
        tree_mask_mode: layout of ``tree_mask``; only QLEN_ONLY, which the host picks on CPU.

    Host call site: ``kernels/ops/speculative/spec_tree.py::build_tree_kernel_efficient_func``.
    """
    if topk != 1:
        raise NotImplementedError(
            f"The reference CPU platform drafts chains only, but speculative_eagle_topk is {topk}. "
            "Set --speculative-eagle-topk 1."
        )
    if int(tree_mask_mode) != _QLEN_ONLY:
        raise NotImplementedError(
            f"The reference CPU platform builds QLEN_ONLY tree masks only, got mode {int(tree_mask_mode)}."
        )
    bs, width = verified_seq_len.shape[0], draft_token_num
    step = torch.arange(width)
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    tree_mask[: bs * width * width] = causal.expand(bs, width, width).flatten()
    positions.copy_((verified_seq_len.long().unsqueeze(1) + step).flatten())
    retrive_index.copy_(torch.arange(bs * width).view(bs, width))
    retrive_next_token.copy_(torch.where(step + 1 < width, step + 1, -1).expand(bs, width))
    retrive_next_sibling.fill_(-1)


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Accept the longest draft prefix that the target's argmax agrees with.  Chains only.

    Draft ``j`` (``candidates[:, j]``, ``j >= 1``) is right if the target predicts it from node ``j - 1``.  With
    ``n`` right drafts the request gains ``n + 1`` tokens: the drafts and the target's own token after them.

    Args:
        predicts: int32 ``[bs * W]``; row ``retrive_index[i, j]`` gets the ``j``-th gained token, others are kept.
        accept_index: int32 ``[bs, max_depth]``; column ``j`` gets the flat row of accepted node ``j``, others are kept.
        accept_token_num: int32 ``[bs]``; gets ``n``.
        candidates: ``[bs, W]`` last committed token, then the drafts.
        retrive_index, retrive_next_token, retrive_next_sibling: as from :func:`build_tree_kernel_efficient_cpu`.
        target_predict: ``[bs, W]`` target argmax at every node.

    Host call site: ``kernels/ops/speculative/spec_tree.py::verify_tree_greedy_func`` (keyword arguments).
    """
    target_predict = target_predict.view(candidates.shape)
    # A path is at most as long as a row of accept_index.
    usable = min(candidates.shape[1], accept_index.shape[1]) - 1
    right = candidates[:, 1 : usable + 1] == target_predict[:, :usable]
    num_right = right.long().cumprod(dim=1).sum(dim=1)

    gained = torch.arange(usable + 1) <= num_right.unsqueeze(1)
    nodes = retrive_index[:, : usable + 1]
    kept = accept_index[:, : usable + 1]
    accept_index[:, : usable + 1] = torch.where(gained, nodes.to(kept.dtype), kept)
    predicts[nodes[gained]] = target_predict[:, : usable + 1][gained].to(predicts.dtype)
    accept_token_num.copy_(num_right)


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int) -> None:
    """Pick the last gained token of each request, the one the next round continues from.

    Args:
        accept_tokens: ``[bs * accept_stride]`` or ``[bs, accept_stride]`` gained tokens, left-aligned per request.
        accept_lens: ``[bs]`` tokens gained, bonus included (so at least 1).
        bonus_tokens: int32 ``[bs]``, written in place.
        accept_stride: columns per request in ``accept_tokens``.

    Host call site: ``kernels/ops/speculative/eagle.py::fill_bonus_tokens_func``.
    """
    last = torch.arange(accept_lens.shape[0]) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Copy KV rows between slots, in every layer: slot ``tgt_loc[i]`` becomes what ``src_loc[i]`` was.

    A chain never moves KV, but the host's pool warms this op up when speculation is on.

    Args:
        data_ptrs: ``[buffers]`` address of each K or V buffer.
        strides: ``[buffers]`` bytes per slot of each buffer.
        tgt_loc, src_loc: ``[n]`` slots.

    Host call site: ``kernels/ops/kvcache/cache_move.py::copy_all_layer_kv_cache_func``.
    """
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for address, stride in zip(data_ptrs.tolist(), strides.tolist()):
        # All reads before any write: a slot may be source and target.
        rows = [ctypes.string_at(address + slot * stride, stride) for slot in sources]
        for slot, row in zip(targets, rows):
            ctypes.memmove(address + slot * stride, row, stride)


def gather_spec_extras(
    indices: Tensor,
    topk_p_buf: Tensor,
    topk_index_buf: Tensor,
    output_tokens_buf: Tensor,
    hidden_states_buf: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gather the rows that the previous round left for this one.  Same signature as the host's Triton helper.

    Args:
        indices: ``[n]`` request rows.
        topk_p_buf: float ``[rows, width]``.
        topk_index_buf: int64 ``[rows, width]``.
        output_tokens_buf: int64 ``[rows]``.
        hidden_states_buf: ``[rows, hidden]`` or None when the algorithm relays no hidden states.

    Host call site: ``srt/managers/overlap_utils.py::FutureMap._resolve_spec_extras`` (overlap scheduling).
    """
    hidden_states = None if hidden_states_buf is None else hidden_states_buf[indices]
    return topk_p_buf[indices], topk_index_buf[indices], output_tokens_buf[indices], hidden_states


def _ranges(rows: Tensor, starts: Tensor, ends: Tensor) -> Iterator[tuple[int, int, int]]:
    return zip(rows.tolist(), starts.tolist(), ends.tolist())


def _tree_only(name: str) -> Callable[..., None]:
    """An op the host imports at module level but calls only for drafts wider than a chain."""

    def unavailable(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(
            f"sgl_kernel.{name} has no stand-in on the reference CPU platform: it serves draft trees or other "
            "algorithms, and this platform drafts chains only. Set --speculative-eagle-topk 1."
        )

    unavailable.__name__ = name
    return unavailable


# What ``from sgl_kernel import ...`` may find.  Names the host imports lazily and never reaches are left out on
# purpose, so that its own ``except ImportError`` fallbacks keep working.
EXPORTS: dict[str, Callable[..., None]] = {
    op.__name__: op
    for op in (
        assign_req_to_token_pool_cpu,
        assign_extend_cache_locs_cpu,
        assign_draft_cache_locs_contiguous_cpu,
        build_tree_kernel_efficient_cpu,
        verify_tree_greedy_cpu,
        fill_bonus_tokens_cpu,
        copy_all_layer_kv_cache_cpu,
        _tree_only("fill_accept_out_cache_loc_cpu"),
    )
}
