"""The P-EAGLE loss of a batch, whole or in segments of its sequences with gradient accumulation.

A segment holds the rows it owns and, as context, every depth-0 row of its own and earlier segments, recomputed *with*
gradient and without loss. Every key an owned row may see is then there at every layer, so the sum of the segments' gradients
is the whole batch's (up to the order of summation), while the largest segment has n * (1 + (c - 1) / S) rows instead of
n * c. Keys reused without their gradient would not be exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator

import numpy as np
import torch
from torch import Tensor

from sgl_peagle.train.attention import Planner, to_device
from sgl_peagle.train.batches import Batch
from sgl_peagle.train.losses import RowStats, target_loss
from sgl_peagle.train.model import Head
from sgl_peagle.train.rows import Bools, Ints, segment
from sgl_peagle.train.target import States


@dataclass(frozen=True)
class LossSettings:
    """How rows are judged; see :func:`~sgl_peagle.train.losses.target_loss`."""

    lm_head: Tensor
    kind: str = "kl"
    chunk: int = 4096
    compiled: bool = False


def segments_of(batch: Batch, segments: int) -> Iterator[tuple[Ints, Bools]]:
    """Per segment, the rows it holds [R'] (indices, ascending) and which of these it owns [R'] bool."""
    rows = batch.rows
    owner = segment(rows.anchor, rows.depth, segments, batch.positions[rows.document])
    for s in range(segments):
        kept = np.flatnonzero((owner == s) | ((rows.depth == 0) & (owner < s)))
        yield kept, owner[kept] == s


def head_rows(head: Head, batch: Batch, kept: Ints, states: States, planner: Planner) -> Tensor:
    """Rows of a batch through the head.

    Args:
        head: The head.
        batch: The batch.
        kept: [R'] indices of rows, ascending, closed under what they may see.
        states: The target's, of ``batch.tokens``.
        planner: Attention.

    Returns:
        [R', D] float32 before the final norm.
    """
    device = states.aux.device
    rows, state = batch.rows.take(kept), batch.state[kept]
    context = int((kept < batch.context).sum())
    tokens = np.full(len(kept), head.mask_token_id, dtype=np.int64)
    tokens[:context] = batch.tokens.numpy().ravel()[state[:context] + 1]
    hidden = head.hidden_rows(states.aux.index_select(0, to_device(state[:context], device)), len(kept) - context)
    plan = planner(rows, rows, device)
    embedded = head.embed(to_device(tokens, device))
    positions = to_device(rows.anchor + rows.depth, device)
    return head(embedded, hidden, positions, lambda layer, q, k, v: plan(q, k, v))


def loss_and_backward(
    head: Head, batch: Batch, states: States, planner: Planner, loss: LossSettings, segments: int = 1
) -> tuple[Ints, RowStats]:
    """Accumulate the gradient of ``sum of the trained rows' losses / their number`` over the batch.

    The rows were drawn once for the batch; all segments share them and the batch's total weight.

    Returns:
        The depth of every trained row, in the order in which segments met them, and what is known of the rows.
    """
    device, total = states.aux.device, len(batch.trained)
    is_trained = np.zeros(len(batch.rows), dtype=bool)
    is_trained[batch.trained] = True
    depths: list[Ints] = []
    stats: list[RowStats] = []
    for kept, owned in segments_of(batch, segments):
        judged = np.flatnonzero(owned & is_trained[kept])
        if len(judged) == 0:
            continue
        out = head_rows(head, batch, kept, states, planner)
        final = head.final(out.index_select(0, to_device(judged, device)))
        weight = torch.full((len(judged),), 1 / total, device=device)
        teacher = to_device(batch.state[kept[judged]] + 1, device)
        value, row_stats = target_loss(
            final, states.last, teacher, weight, loss.lm_head, kind=loss.kind, chunk=loss.chunk, compiled=loss.compiled
        )
        value.backward()
        depths.append(batch.rows.depth[kept[judged]])
        stats.append(row_stats)
    return np.concatenate(depths), RowStats(*(torch.cat(parts) for parts in zip(*stats)))
