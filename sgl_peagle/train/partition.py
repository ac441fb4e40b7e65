"""The P-EAGLE loss of a batch, whole or in segments of its sequences with gradient accumulation.

Every rollout belongs to one segment, and every key that it may see is a depth-0 row or its own. Two exact ways to cut:

* ``recompute`` (the paper's): a segment holds the rows it owns and, as context, every depth-0 row of its own and earlier
  segments, computed again *with* gradient and without loss. The largest segment has n * (1 + (c - 1) / S) rows
  instead of n * c; depth-0 rows are run (S + 1) / 2 times.
* ``cached``: depth-0 rows never see a MASK row, so they are run once. Segments hold rollouts alone and read the depth-0 keys and
  values as leaves, which collect the gradient of all segments; it then flows back through the depth-0 rows. The same
  peak, and no row is run twice.

Keys reused *without* their gradient would be neither: see the tests.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Iterator

import numpy as np
import torch
from torch import Tensor

from sgl_peagle.train.attention import Planner, Rows, to_device
from sgl_peagle.train.batches import Batch
from sgl_peagle.train.losses import RowStats, target_loss
from sgl_peagle.train.model import Attend, Head
from sgl_peagle.train.rows import Bools, Ints, segment
from sgl_peagle.train.target import States

PARTITIONS = ("recompute", "cached")


@dataclass(frozen=True)
class LossSettings:
    """How rows are judged; see :func:`~sgl_peagle.train.losses.target_loss`.

    ``refused`` is the factor of a row behind a wrong draft: the text does not go on with what the head drafts at one of the
    rows in front of it, so that an engine throws this row's draft away, whatever it is. Where the drafts in front are right,
    the teacher knows no more than the row: it is asked for the token behind the head's *own* drafts.
    """

    lm_head: Tensor
    kind: str = "kl"
    chunk: int = 4096
    compiled: bool = False
    refused: float = 1.0


def owners(batch: Batch, segments: int) -> Ints:
    """The segment of every row, [R]."""
    rows = batch.rows
    return segment(rows.anchor, rows.depth, segments, batch.positions[rows.document])


def segments_of(batch: Batch, segments: int) -> Iterator[tuple[Ints, Bools]]:
    """Per segment of ``recompute``, the rows it holds [R'] (indices, ascending) and which of these it owns [R'] bool."""
    owner = owners(batch, segments)
    for s in range(segments):
        kept = np.flatnonzero((owner == s) | ((batch.rows.depth == 0) & (owner < s)))
        yield kept, owner[kept] == s


def _through_head(head: Head, batch: Batch, kept: Ints, states: States, attend: Attend) -> Tensor:
    """Rows ``kept`` (ascending) through the head with a given attention, [R', D] float32 before the final norm."""
    device = states.aux.device
    rows, state = batch.rows.take(kept), batch.state[kept]
    context = int((kept < batch.context).sum())
    tokens = np.full(len(kept), head.mask_token_id, dtype=np.int64)
    tokens[:context] = batch.tokens.numpy().ravel()[state[:context] + 1]
    hidden = head.hidden_rows(states.aux.index_select(0, to_device(state[:context], device)), len(kept) - context)
    positions = to_device(rows.anchor + rows.depth, device)
    return head(head.embed(to_device(tokens, device)), hidden, positions, attend)


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
    rows = batch.rows.take(kept)
    plan = planner(rows, rows, states.aux.device)
    return _through_head(head, batch, kept, states, lambda layer, q, k, v: plan(q, k, v))


class _Rollouts:
    """Which rows of a batch an engine would still read, by what the rows in front of them draft.

    A row that is not judged counts as right. Segments come in order, and what stands in front of a row is never in a later one.
    """

    def __init__(self, batch: Batch, device: torch.device) -> None:
        self.right = torch.ones(len(batch.rows), dtype=torch.bool, device=device)
        depth, before = batch.rows.depth, rows_before(batch)
        deeper = [np.flatnonzero(depth == d) for d in range(1, int(depth.max()) + 1)]
        pairs = [index for rows in deeper for index in (rows, before[rows])]
        moved = to_device(np.concatenate(pairs), device).split([len(index) for index in pairs]) if pairs else ()
        self.links = list(zip(moved[::2], moved[1::2]))
        text = batch.tokens.reshape(-1)
        self.labels = to_device(text[np.minimum(batch.state + 2, len(text) - 1)], device)

    def factors(self, index: Tensor, refused: float, guesses: Tensor) -> Tensor:
        """Factors [M] float32 of the rows ``index`` [M], whose drafts [M] are now known: 1, or ``refused``."""
        self.right[index] = guesses == self.labels[index]
        reached = torch.ones_like(self.right)
        for rows, before in self.links:
            reached[rows] = reached[before] & self.right[before]
        return torch.where(reached[index], 1.0, refused)


def rows_before(batch: Batch) -> Ints:
    """[R]: the row one depth less of the same anchor; itself for depth 0."""
    rows, index = batch.rows, np.arange(len(batch.rows), dtype=np.int64)
    first = np.concatenate(([0], np.cumsum(batch.positions)[:-1]))  # of each document among the depth-0 rows
    anchors = first[rows.document] + rows.anchor
    return np.where(rows.depth == 0, index, np.where(rows.depth == 1, anchors, index - 1))


class _Judge:
    """The loss of parts of one batch, and what is known of their rows."""

    def __init__(self, head: Head, batch: Batch, states: States, loss: LossSettings) -> None:
        self.head, self.batch, self.states, self.loss = head, batch, states, loss
        self.trained = np.zeros(len(batch.rows), dtype=bool)
        self.trained[batch.trained] = True
        self.depths: list[Ints] = []
        self.stats: list[RowStats] = []
        self.rollouts = _Rollouts(batch, states.aux.device) if loss.refused < 1 else None

    def __call__(self, out: Tensor, kept: Ints, judged: Ints) -> Tensor:
        """The share of the batch's loss of rows ``kept[judged]``, given their outputs ``out[judged]``."""
        device, batch, loss = out.device, self.batch, self.loss
        final = self.head.final(out.index_select(0, to_device(judged, device)))
        # By the weight of the whole batch, or depths and segments would be weighted anew.
        weight = torch.full((len(judged),), 1 / len(batch.trained), device=device)
        teacher = to_device(batch.state[kept[judged]] + 1, device)
        reweigh = None
        if self.rollouts is not None:
            reweigh = functools.partial(self.rollouts.factors, to_device(kept[judged], device), loss.refused)
        value, stats = target_loss(
            final, self.states.last, teacher, weight, loss.lm_head,
            kind=loss.kind, chunk=loss.chunk, compiled=loss.compiled, reweigh=reweigh,
        )  # fmt: skip
        self.depths.append(batch.rows.depth[kept[judged]])
        self.stats.append(stats)
        return value

    def result(self) -> tuple[Ints, RowStats]:
        return np.concatenate(self.depths), RowStats(*(torch.cat(parts) for parts in zip(*self.stats)))


def loss_and_backward(
    head: Head,
    batch: Batch,
    states: States,
    planner: Planner,
    loss: LossSettings,
    segments: int = 1,
    partition: str = "recompute",
) -> tuple[Ints, RowStats]:
    """Accumulate the gradient of ``sum of the trained rows' losses / their number`` over the batch.

    The rows were drawn once for the batch; all segments share them and the batch's total weight.

    Args:
        head, batch, states, planner, loss: What to compute.
        segments: S; 1 runs the batch as a whole.
        partition: One of :data:`PARTITIONS`.

    Returns:
        The depth of every trained row, in the order in which segments met them, and what is known of the rows.
    """
    judge = _Judge(head, batch, states, loss)
    if segments > 1 and partition == "cached":
        _cached(judge, planner, segments)
        return judge.result()
    for kept, owned in segments_of(batch, segments):
        judged = np.flatnonzero(owned & judge.trained[kept])
        if len(judged):
            judge(head_rows(head, batch, kept, states, planner), kept, judged).backward()
    return judge.result()


def _cached(judge: _Judge, planner: Planner, segments: int) -> None:
    head, batch, states = judge.head, judge.batch, judge.states
    device, context = states.aux.device, np.arange(batch.context)
    context_rows = batch.rows.take(context)
    plan = planner(context_rows, context_rows, device)
    made: list[Tensor] = []  # keys and values of each layer in turn
    leaves: list[Tensor] = []

    def remembering(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made.extend((k, v))
        leaves.extend(x.detach().requires_grad_() for x in (k, v))
        return plan(q, k, v)

    out = _through_head(head, batch, context, states, remembering)
    judged = np.flatnonzero(judge.trained[context])
    value = judge(out, context, judged) if len(judged) else out.sum() * 0
    owner = owners(batch, segments)
    for s in range(segments):
        kept = np.flatnonzero((owner == s) & (batch.rows.depth > 0))
        judged = np.flatnonzero(judge.trained[kept])
        if len(judged):
            attend = _reading(planner, context_rows, batch.rows.take(kept), leaves, device)
            judge(_through_head(head, batch, kept, states, attend), kept, judged).backward()
    reached = [(x, leaf.grad) for x, leaf in zip(made, leaves) if leaf.grad is not None]
    torch.autograd.backward([value, *(x for x, _ in reached)], [None, *(grad for _, grad in reached)])


def _reading(planner: Planner, context: Rows, rows: Rows, leaves: list[Tensor], device: torch.device) -> Attend:
    """Attention of a segment's rollouts to the depth-0 leaves and themselves."""
    plan = planner(rows, Rows.cat([context, rows]), device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = leaves[2 * layer : 2 * layer + 2]
        return plan(q, torch.cat((keys, k)), torch.cat((values, v)))

    return attend
