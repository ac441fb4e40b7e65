"""Attention of training rows: the rule of :func:`~sgl_peagle.train.rows.allowed`, with documents kept apart.

Two backends, one result. ``flex`` evaluates the rule inside a compiled FlexAttention kernel and skips blocks of 128 x 128
pairs that hold none: no mask of rows x rows ever exists. ``sdpa`` pads documents of similar length to a common one and
builds a boolean mask for each; it runs anywhere.

A plan is made once per batch and called by every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from sgl_peagle.errors import PEagleError
from sgl_peagle.train.rows import Bools, Cod, Ints, allowed, generator, sample_rows

BLOCK = 128
_SDPA_STEP = 64  # padded lengths are multiples of this: few shapes, and aligned masks
_DOCUMENT = 1 << 24  # anchors are far below: (document, anchor) fits one int64 that sorts like the pair


class Plan(Protocol):
    """Attention among the rows of one batch."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[Rq, heads, dim] from q [Rq, heads, dim] and k, v [Rk, kv_heads, dim], all in one dtype."""


@dataclass(frozen=True)
class Rows:
    """Who the rows are, on the host. Anchors count from 0 in each document.

    Attributes:
        document: [R] int64.
        anchor: [R] int64.
        depth: [R] int64.
    """

    document: Ints
    anchor: Ints
    depth: Ints

    def __len__(self) -> int:
        return len(self.anchor)

    def take(self, index: Ints) -> "Rows":
        """The rows of ``index`` [R'] alone."""
        return Rows(self.document[index], self.anchor[index], self.depth[index])

    @staticmethod
    def cat(parts: "list[Rows]") -> "Rows":
        """All of them, one after the other."""
        names = ("document", "anchor", "depth")
        return Rows(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def to(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """(document, anchor, depth) as tensors of a device."""
        return tuple(to_device(x, device) for x in (self.document, self.anchor, self.depth))  # type: ignore[return-value]


def to_device(array: Any, device: torch.device) -> Tensor:
    """A numpy array or tensor on a device, without waiting for the copy."""
    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _expand(x: Tensor, like: Tensor) -> Tensor:
    """Key or value heads repeated for the query heads that share them (no kernel has to know about groups of 3)."""
    rows, heads, dim = x.shape
    group = like.shape[1] // heads
    return x if group == 1 else x[:, :, None].expand(rows, heads, group, dim).reshape(rows, heads * group, dim)


# -- sdpa -----------------------------------------------------------------------------------------------------------


class _Slots:
    """Rows in padded slots: each group of documents is a matrix [documents, slots] of row indices.

    Args:
        rows: The rows.
        groups: Documents that share a matrix.

    Attributes:
        index: Per group, the row in each slot; 0 in empty ones.
        there: Per group, whether a slot has a row.
        where: [R], the slot of each row, counted through all groups.
    """

    def __init__(self, rows: Rows, groups: "list[list[int]]") -> None:
        order = np.argsort(rows.document, kind="stable")
        documents, counts = np.unique(rows.document, return_counts=True)
        members = dict(zip(documents.tolist(), np.split(order, np.cumsum(counts)[:-1])))
        nobody = np.zeros(0, dtype=np.int64)
        self.index: list[Ints] = []
        self.there: list[Bools] = []
        self.where: Ints = np.zeros(len(rows), dtype=np.int64)
        begin = 0
        for group in groups:
            own = [members.get(document, nobody) for document in group]
            width = -(-max(1, *(len(o) for o in own)) // _SDPA_STEP) * _SDPA_STEP
            index, there = np.zeros((len(group), width), dtype=np.int64), np.zeros((len(group), width), dtype=bool)
            for i, o in enumerate(own):
                index[i, : len(o)], there[i, : len(o)] = o, True
                self.where[o] = begin + i * width + np.arange(len(o))
            self.index.append(index)
            self.there.append(there)
            begin += index.size


def sdpa_plan(queries: Rows, keys: Rows, device: torch.device) -> Plan:
    """A plan of dense masks: [documents, queries, keys] bool for documents of similar length."""
    documents, counts = np.unique(keys.document, return_counts=True)
    # One group per power of two: few kernel calls, at most half of the slots empty.
    sizes = np.maximum(np.ceil(np.log2(counts)), 6)
    members = [documents[sizes == size].tolist() for size in np.unique(sizes)]
    q_slots, k_slots = _Slots(queries, members), _Slots(keys, members)
    q_where = to_device(q_slots.where, device)
    q_rows, k_rows = queries.to(device), keys.to(device)
    groups = []
    for arrays in zip(q_slots.index, k_slots.index, q_slots.there, k_slots.there):
        q_index, k_index, q_there, k_there = (to_device(x, device) for x in arrays)
        q_anchor, q_depth = (x[q_index][:, :, None] for x in q_rows[1:])
        k_anchor, k_depth = (x[k_index][:, None, :] for x in k_rows[1:])
        mask = allowed(q_anchor, q_depth, k_anchor, k_depth) & k_there[:, None, :]
        mask |= ~q_there[:, :, None]  # a query that sees nothing would be NaN
        groups.append((q_index, k_index, mask[:, None]))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v, flat = _expand(k, q), _expand(v, q), []
        for q_index, k_index, mask in groups:
            parts = [
                x.index_select(0, index.flatten()).view(*index.shape, *x.shape[1:]).transpose(1, 2)
                for x, index in ((q, q_index), (k, k_index), (v, k_index))
            ]
            flat.append(F.scaled_dot_product_attention(*parts, attn_mask=mask).transpose(1, 2).flatten(0, 1))
        return torch.cat(flat).index_select(0, q_where)

    return attend


# -- flex -----------------------------------------------------------------------------------------------------------


def block_lists(queries: tuple[Tensor, ...], keys: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Which blocks hold an allowed pair, from the blocks' ranges of documents and anchors alone.

    Args:
        queries: (document, anchor, depth), each [Q] with Q a multiple of :data:`BLOCK`; negative documents are padding.
        keys: The same for the keys, [K].

    Returns:
        (partial, full), both [Q / BLOCK, K / BLOCK] bool: blocks to be masked pair by pair (every block that holds an
        allowed pair and is not full; it may be one that holds none), and blocks all of whose pairs are allowed.
    """
    far = torch.iinfo(torch.int64).max
    q_document, q_anchor, q_depth = (x.view(-1, BLOCK) for x in queries)
    k_document, k_anchor, k_depth = (x.view(-1, BLOCK) for x in keys)
    q_real, k_real = q_document >= 0, k_document >= 0
    q_key, k_key = q_document * _DOCUMENT + q_anchor, k_document * _DOCUMENT + k_anchor

    def least(x: Tensor, where: Tensor) -> Tensor:
        return x.masked_fill(~where, far).amin(1)

    def most(x: Tensor, where: Tensor) -> Tensor:
        return x.masked_fill(~where, -1).amax(1)

    context, q_roll, k_roll = k_real & (k_depth == 0), q_real & (q_depth > 0), k_real & (k_depth > 0)
    first = least(q_document, q_real)
    reaches = (least(k_key, context)[None] <= most(q_key, q_real)[:, None]) & (
        most(k_document, context)[None] >= first[:, None]
    )
    own = (least(k_key, k_roll)[None] <= most(q_key, q_roll)[:, None]) & (
        most(k_key, k_roll)[None] >= least(q_key, q_roll)[:, None]
    )
    one = q_real.all(1) & (first == most(q_document, q_real))
    whole = context.all(1) & (least(k_document, context) == most(k_document, context))
    full = one[:, None] & whole[None] & (most(k_document, context)[None] == first[:, None])
    full &= most(k_key, context)[None] <= least(q_key, q_real)[:, None]
    return (reaches | own) & ~full, full


def block_mask(queries: tuple[Tensor, ...], keys: tuple[Tensor, ...]) -> BlockMask:
    """FlexAttention's mask of padded rows (see :func:`block_lists`); memory (Q / 128) * (K / 128)."""
    q_document, q_anchor, q_depth = queries
    k_document, k_anchor, k_depth = keys

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same = q_document[q] == k_document[k]
        return same & allowed(q_anchor[q], q_depth[q], k_anchor[k], k_depth[k])

    lists: list[Tensor] = []
    for blocks in block_lists(queries, keys):
        lists.append(blocks.sum(-1, dtype=torch.int32)[None, None])
        lists.append(blocks.int().argsort(dim=-1, descending=True, stable=True).int()[None, None])
    return BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=BLOCK, mask_mod=rule, seq_lengths=(len(q_document), len(k_document))
    )


def _padded(rows: Rows, size: int, document: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    fill = size - len(rows)
    parts = ((rows.document, document), (rows.anchor, 0), (rows.depth, 0))
    arrays = [np.concatenate([x, np.full(fill, value, dtype=np.int64)]) for x, value in parts]
    return tuple(to_device(x, device) for x in arrays)  # type: ignore[return-value]


class Flex:
    """Plans for FlexAttention; one compilation per padded shape.

    Args:
        q_step: Queries are padded to a multiple of this (a multiple of 128): the most rows of a batch, so that there
            is one shape, and one compilation.
        k_step: The same for keys.
        dynamic: Compile once for all shapes (a little slower than for one shape).
        compiled: Off only where FlexAttention's slow reference is wanted (tests).
    """

    def __init__(self, q_step: int, k_step: int, *, dynamic: bool = False, compiled: bool = True) -> None:
        self.steps = (q_step, k_step)
        self._kernel: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=dynamic) if compiled else flex_attention

    def __call__(self, queries: Rows, keys: Rows, device: torch.device) -> Plan:
        q_size, k_size = (-(-len(rows) // step) * step for rows, step in zip((queries, keys), self.steps))
        # -1 is never -2: what pads queries sees nothing, what pads keys is seen by nobody.
        mask = block_mask(_padded(queries, q_size, -1, device), _padded(keys, k_size, -2, device))

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows, sizes = len(q), (q_size, k_size, k_size)
            parts = [
                F.pad(x, (0, 0, 0, 0, 0, size - len(x))).transpose(0, 1)[None]
                for x, size in zip((q, _expand(k, q), _expand(v, q)), sizes)
            ]
            return self._kernel(*parts, block_mask=mask)[0].transpose(0, 1)[:rows]

        return attend


Planner = Callable[[Rows, Rows, torch.device], Plan]


def choose(
    name: str, q_step: int, k_step: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Planner, str]:
    """The planner of ``--attention`` and what to tell the user.

    ``auto`` is flex on CUDA, if it compiles for the shapes of this run and agrees with sdpa there; else sdpa.

    Raises:
        PEagleError: ``flex`` was asked for and does not work here.
    """
    if name == "sdpa" or (name == "auto" and device.type != "cuda"):
        return sdpa_plan, "sdpa"
    try:
        flex = Flex(q_step, k_step)
        _try(flex, min(q_step, k_step), heads, kv_heads, dim, dtype, device)
    except Exception as error:  # whatever a compiler can raise
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        if name == "flex":
            raise PEagleError(
                f"FlexAttention does not work here ({reason})", "--attention flex was asked for", "use --attention sdpa"
            ) from error
        return sdpa_plan, f"sdpa, because FlexAttention does not work here ({reason})"
    return flex, "flex"


def _try(flex: Flex, size: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Forward and backward at the run's shape, on a few documents, against sdpa."""
    anchors, depths = sample_rows(np.ones(min(300, size // 8), dtype=bool), Cod(4, 0.7, 0.2), generator(0))
    copies = 2
    rows = Rows(np.repeat(np.arange(copies), len(anchors)), np.tile(anchors, copies), np.tile(depths, copies))
    random = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(len(rows), count, dim, generator=random).to(device, dtype).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    )
    results = []
    for plan in (flex(rows, rows, device), sdpa_plan(rows, rows, device)):
        out = plan(q, k, v)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))])
    for got, want in zip(*results):
        error = (got.float() - want.float()).norm() / want.float().norm()
        if not error < 0.05:
            raise RuntimeError(f"it differs from sdpa by {float(error):.2g}")
