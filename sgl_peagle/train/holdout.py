"""What a head would do on held-out documents: agreement with the target by depth, and teacher-forced acceptance.

For a text of the target, L(a) is the number of leading drafts at anchor a that equal x_{a+2}, x_{a+3}, ...; greedy text
makes that what an engine accepts. *Walk* starts at the first answer row and goes on at a + L(a) + 1, like an engine does;
*all anchors* averages over every supervised row: less noise, other weights. Both count the bonus token: 1.0 is no draft.
"""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np
import torch
from torch import Tensor

from sgl_peagle.train import acceptance
from sgl_peagle.train.attention import Planner, to_device
from sgl_peagle.train.batches import Batch, Document, full_batch
from sgl_peagle.train.eagle3 import text_tokens, unroll
from sgl_peagle.train.losses import argmax_rows
from sgl_peagle.train.model import Head
from sgl_peagle.train.partition import head_rows
from sgl_peagle.train.rows import Ints, all_rows
from sgl_peagle.train.target import Target


@torch.no_grad()
def peagle_drafts(head: Head, documents: Sequence[Document], target: Target, planner: Planner, k: int) -> "list[Ints]":
    """Drafts of every anchor of each document, [n, k] int64 (-1 beyond the document)."""
    batch = full_batch(documents, k)
    states = target.read(to_device(batch.tokens, target.lm_head.device))
    out = head_rows(head, batch, np.arange(len(batch.rows)), states, planner)
    return _table(batch, batch.rows.depth, argmax_rows(head.final(out), target.lm_head), k)


@torch.no_grad()
def eagle3_drafts(head: Head, documents: Sequence[Document], target: Target, planner: Planner, k: int) -> "list[Ints]":
    """The same for an autoregressive head, which reads its own guesses from the second draft on."""
    batch = full_batch(documents, 1)
    device = target.lm_head.device
    states = target.read(to_device(batch.tokens, device))
    guesses: list[Tensor] = []

    def tokens_of(step: int, output: Tensor | None) -> Tensor:
        if output is None:
            return to_device(text_tokens(batch, 0), device)
        guesses.append(argmax_rows(head.final(output), target.lm_head))
        return guesses[-1]

    outputs = unroll(head, batch, states, planner, k, tokens_of)
    guesses.append(argmax_rows(head.final(outputs[-1]), target.lm_head))
    tables = [_table(batch, np.full(len(batch.rows), step), guess, k) for step, guess in enumerate(guesses)]
    return [np.max([table[i] for table in tables], axis=0) for i in range(len(documents))]


def _table(batch: Batch, depth: Ints, guess: Tensor, k: int) -> "list[Ints]":
    found = guess.cpu().numpy()
    tables = [np.full((n, k), -1, dtype=np.int64) for n in batch.positions]
    for i, table in enumerate(tables):
        mine = (batch.rows.document == i) & (batch.rows.anchor + depth < batch.positions[i])
        table[batch.rows.anchor[mine], depth[mine]] = found[mine]
    return tables


def accepted(document: Document, drafts: Ints) -> Ints:
    """L(a) of every row, [n] int64, from drafts [n, k]."""
    n, k = drafts.shape
    at = np.arange(n)[:, None] + 2 + np.arange(k)[None]
    inside = at < len(document.tokens)
    hit = inside & (document.tokens[np.where(inside, at, 0)] == drafts)
    return np.cumprod(hit, axis=1).sum(1)


def walk(document: Document, lengths: Ints) -> "list[int]":
    """Tokens gained per round, bonus included, of the rounds an engine would run over the document's answers."""
    answers = acceptance.answers(torch.from_numpy(document.weight))
    return [int(lengths[a]) + 1 for first, last in answers for a in acceptance.walk(lengths, range(first, last + 1))]


def evaluate(
    head: Head, documents: Sequence[Document], target: Target, planner: Planner, k: int, *, method: str, row_budget: int
) -> dict[str, Any]:
    """Measure a head on documents.

    Args:
        k: Drafts per round.
        method: ``peagle`` or ``eagle3``.
        row_budget: Rows that may be run at once.

    Returns:
        ``accuracy``: by depth, agreement with the target's argmax (P-EAGLE: marginal; EAGLE-3: after its own guesses);
        ``walk`` and ``all_anchors``: acceptance length when 1 ... k drafts are served; ``rounds`` of the walk at k.
    """
    drafts_of = peagle_drafts if method == "peagle" else eagle3_drafts
    hits, counts = np.zeros(k), np.zeros(k)
    rounds: list[list[int]] = [[] for _ in range(k)]
    anchors: list[list[Ints]] = [[] for _ in range(k)]
    for group in _groups(documents, k if method == "peagle" else 1, row_budget):
        tables = drafts_of(head, group, target, planner, k)
        best = _target_argmax(group, target)
        for document, drafts, truth in zip(group, tables, best):
            for d in range(k):
                a = np.arange(max(0, document.n - d))
                judged = a[document.weight[a + d]]
                hits[d] += (drafts[judged, d] == truth[judged + d + 1]).sum()
                counts[d] += len(judged)
                lengths = accepted(document, drafts[:, : d + 1])
                rounds[d] += walk(document, lengths)
                anchors[d].append(lengths[document.weight] + 1)
    return {
        "accuracy": (hits / np.maximum(counts, 1)).round(4).tolist(),
        "walk": [round(float(np.mean(r)), 4) for r in rounds],
        "all_anchors": [round(float(np.concatenate(a).mean()), 4) for a in anchors],
        "rounds": len(rounds[-1]),
    }


@torch.no_grad()
def _target_argmax(documents: Sequence[Document], target: Target) -> "list[Ints]":
    batch = full_batch(documents, 1)
    states = target.read(to_device(batch.tokens, target.lm_head.device))
    best = argmax_rows(states.last, target.lm_head).view(batch.tokens.shape).cpu().numpy()
    return [best[i, : len(d.tokens)] for i, d in enumerate(documents)]


def _groups(documents: Sequence[Document], depths: int, row_budget: int) -> "list[list[Document]]":
    """Documents in groups of at most ``row_budget`` rows (a longer one alone), similar lengths together."""
    groups: list[list[Document]] = []
    total = 0
    for document in sorted(documents, key=lambda d: d.n):
        rows = len(all_rows(document.n, depths)[0])
        if not groups or total + rows > row_budget:
            groups.append([])
            total = 0
        groups[-1].append(document)
        total += rows
    return groups
