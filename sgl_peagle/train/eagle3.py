"""EAGLE-3's training-time test: the autoregressive head that P-EAGLE is compared with, on the same data and blocks.

Row i of step k = 0 ... T-1 stands at position i + k. Step 0 is the next-token row of the P-EAGLE layout. Step k >= 1 is fed
the text's token x_{i+1+k} and, in place of the target's states, the head's own output for row i of step k - 1, before the
final norm. It sees the step-0 rows up to i and its own earlier steps: with (anchor, depth) = (i, k), the very rule of
P-EAGLE. Gradient flows through the fed-back states and the cached keys. The steps are sequential.
"""

from __future__ import annotations

from typing import Callable

import numpy as np
import torch
from torch import Tensor

from sgl_peagle.train.attention import Planner, Rows, to_device
from sgl_peagle.train.batches import Batch
from sgl_peagle.train.losses import RowStats, target_loss
from sgl_peagle.train.model import Head
from sgl_peagle.train.partition import LossSettings
from sgl_peagle.train.rows import Bools, Ints
from sgl_peagle.train.target import States

#: Weight of step k is this to the power k (EAGLE-3).
DECAY = 0.8

#: (k, outputs of step k - 1 [n, D] or None) -> tokens [n] int64 of step k
TokensOf = Callable[[int, "Tensor | None"], Tensor]


def text_tokens(batch: Batch, step: int) -> Ints:
    """Tokens of all rows at a step, [n] int64: x_{i+1+step}, and 0 beyond the document (such rows carry no loss)."""
    rows = batch.rows
    inside = rows.anchor + step < batch.positions[rows.document]
    index = np.where(inside, batch.state + 1 + step, 0)
    return np.where(inside, batch.tokens.numpy().ravel()[index], 0)


def trained_at(batch: Batch, step: int) -> Bools:
    """Rows judged at a step, [n] bool: position i + step is in the document and supervised."""
    trained = np.zeros(len(batch.rows), dtype=bool)
    trained[batch.trained] = True
    moved = np.zeros_like(trained)
    moved[: len(trained) - step] = trained[step:]  # depth-0 rows of a document follow one another
    return moved & (batch.rows.anchor + step < batch.positions[batch.rows.document])


def unroll(head: Head, batch: Batch, states: States, planner: Planner, steps: int, tokens_of: TokensOf) -> list[Tensor]:
    """Outputs of every step, each [n, D] float32 before the final norm.

    Args:
        head: A head without MASK.
        batch: Depth-0 rows only.
        states: The target's, of ``batch.tokens``.
        planner: Attention.
        steps: T.
        tokens_of: What to feed: the text in training, the head's own guesses in evaluation.
    """
    device, rows = states.aux.device, batch.rows
    hidden = head.project(states.aux.index_select(0, to_device(batch.state, device)))
    keys: list[Tensor] = []
    values: list[Tensor] = []
    seen: list[Rows] = []
    outputs: list[Tensor] = []
    for step in range(steps):
        queries = Rows(rows.document, rows.anchor, np.full(len(rows), step, dtype=np.int64))
        seen.append(queries)
        plan = planner(queries, Rows.cat(seen), device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys.append(k)
            values.append(v)
            return plan(q, torch.cat(keys), torch.cat(values))

        tokens = tokens_of(step, outputs[-1] if outputs else None)
        positions = to_device(rows.anchor + step, device)
        hidden = head(head.embed(tokens), hidden, positions, attend)
        outputs.append(hidden)
    return outputs


def loss_and_backward(
    head: Head, batch: Batch, states: States, planner: Planner, loss: LossSettings, steps: int
) -> tuple[Ints, RowStats]:
    """Gradient of ``sum_k 0.8^k * (mean loss of step k's rows) / sum_k 0.8^k``.

    Returns:
        The step of every judged row, and what is known of the rows.
    """
    device = states.aux.device

    def text(step: int, _: Tensor | None) -> Tensor:
        return to_device(text_tokens(batch, step), device)

    outputs = unroll(head, batch, states, planner, steps, text)
    scale = sum(DECAY**k for k in range(steps))
    final, teachers, weights, depths, rows_of = [], [], [], [], []
    for step, output in enumerate(outputs):
        judged = np.flatnonzero(trained_at(batch, step))
        if len(judged) == 0:
            break  # nor has any later step one
        rows_of.append(to_device(judged, device))
        final.append(head.final(output.index_select(0, rows_of[-1])))
        teachers.append(batch.state[judged] + 1 + step)
        weights.append(np.full(len(judged), DECAY**step / scale / len(judged), dtype=np.float32))
        depths.append(np.full(len(judged), step, dtype=np.int64))

    def reweigh(guesses: Tensor) -> Tensor:
        reached, factors = torch.ones(len(batch.rows), dtype=torch.bool, device=device), []
        for step, (rows, guess) in enumerate(zip(rows_of, guesses.split([len(rows) for rows in rows_of]))):
            factors.append(torch.where(reached[rows], 1.0, loss.refused))
            reached[rows] &= guess == text(step + 1, None)[rows]
        return torch.cat(factors)

    value, stats = target_loss(
        torch.cat(final), states.last, to_device(np.concatenate(teachers), device),
        to_device(np.concatenate(weights), device), loss.lm_head,
        kind=loss.kind, chunk=loss.chunk, compiled=loss.compiled, reweigh=reweigh if loss.refused < 1 else None,
    )  # fmt: skip
    value.backward()
    return np.concatenate(depths), stats
