"""The training layout: which rows a document gives, who sees whom, and how a sequence is cut. Pure arithmetic.

A document of n + 1 tokens x_0 ... x_n gives n positions p. A row is a pair (anchor a, depth d) at position p = a + d;
with g_p the target's hidden states after reading x_p and T_p its next-token distribution there::

    depth 0        token x_{p+1}, hidden g_p            (always there: it is context)
    depth >= 1     token MASK,    hidden mask_hidden    (only where sampled)
    both           position p, teacher T_{p+1}, which predicts x_{p+2}

Input, teacher and weight follow from the position; the depth decides what is hidden from a row. COD ("conditional
drop-token", from PARD) keeps ever fewer rows of the deeper depths, as gap-free rollouts. Depth 1 ... K-1 give the drafts
2 ... K of an engine; K = 1 is next-token prediction alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

#: A numpy array or a tensor of ints: the rules below are written with operators that both have.
Array = TypeVar("Array")

#: ``floor`` must not lose a row to 0.7 * 0.7 = 0.48999...
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Cod:
    """How many rows of each depth are trained.

    Attributes:
        depths: K, the number of drafts the head learns (1: next-token rows only).
        ratio: r; depth d keeps the share r**d of the supervised positions ...
        floor: ... but never less than this share.
    """

    depths: int = 8
    ratio: float = 0.7
    floor: float = 0.2

    def keep(self, depth: int) -> float:
        """Share of the supervised positions that depth ``depth`` keeps."""
        return max(self.ratio**depth, self.floor)

    @property
    def rows_per_position(self) -> float:
        """c: rows per position of a document that is supervised throughout (4.16 for K 8, r 0.8)."""
        return sum(self.keep(d) for d in range(self.depths))


def supervised(assistant: Bools, strict: bool = True) -> Bools:
    """Which positions are trained, [n] bool, from the marks of n + 1 tokens.

    Position p is trained where its input x_{p+1} is the target's own token: those are the rows an engine drafts from.
    ``strict`` also asks that the label x_{p+2} be the target's, which drops the row behind the end of the turn.
    """
    weight = assistant[1:].copy()
    if strict:
        weight[:-1] &= assistant[2:]
        weight[-1:] = False  # its label is not in the data
    return weight


def most_rows(n: int, trained: int, cod: Cod) -> int:
    """Upper bound of the rows of a document with n positions, ``trained`` of them supervised (no draw needed)."""
    return n + sum(_size(trained, depth, cod) for depth in range(1, cod.depths))


def _size(trained: int, depth: int, cod: Cod) -> int:
    return int(max(0, trained - depth) * cod.keep(depth) + _ROUNDING)


def generator(*seeds: int) -> np.random.Generator:
    """The generator of (run seed, epoch, sample id): a resumed or re-partitioned run draws the same rows."""
    return np.random.default_rng(list(seeds))


def sample_rows(weight: Bools, cod: Cod, random: np.random.Generator) -> tuple[Ints, Ints]:
    """Draw the rows of one document.

    Args:
        weight: [n] bool, from :func:`supervised`.
        cod: How many.
        random: From :func:`generator`.

    Returns:
        Anchors and depths, both [R] int64: the n depth-0 rows, then depth 1 in the order of positions, and so on.
        A row (a, d) is there only if (a, 1) ... (a, d-1) are, and every anchor is >= 0.
    """
    n, trained = len(weight), int(weight.sum())
    positions = [np.arange(n, dtype=np.int64)]
    pool = np.flatnonzero(weight[1:]).astype(np.int64) + 1  # position 0 has no anchor before it
    for depth in range(1, cod.depths):
        size = _size(trained, depth, cod)
        if size == 0:
            break
        kept = pool if len(pool) <= size else np.sort(random.choice(pool, size, replace=False))
        positions.append(kept)
        following = kept[kept + 1 < n] + 1
        pool = following[weight[following]]
    depths = np.repeat(np.arange(len(positions)), [len(p) for p in positions])
    return np.concatenate(positions) - depths, depths


def all_rows(n: int, depths: int) -> tuple[Ints, Ints]:
    """Every row with a + d < n and d < ``depths``, by depth: the layout of an evaluation."""
    kept = [np.arange(max(0, n - d), dtype=np.int64) for d in range(depths)]
    return np.concatenate(kept), np.repeat(np.arange(depths), [len(a) for a in kept])


def allowed(q_anchor: Any, q_depth: Any, k_anchor: Any, k_depth: Any) -> Any:
    """Whether the query row may see the key row of the same document (broadcasts; arrays or tensors).

    The real context up to its own anchor, and its own rollout up to itself. It never sees a depth-0 row behind its anchor,
    which would leak the answer, nor another rollout. In order of positions that is the causal list an engine runs.
    """
    return ((k_depth == 0) & (k_anchor <= q_anchor)) | ((k_anchor == q_anchor) & (k_depth <= q_depth))


def segment(anchor: Ints, depth: Ints, segments: int, n: Any) -> Ints:
    """Which of ``segments`` segments owns each row of a document with ``n`` positions (``n`` may be an array).

    Depth 0 goes by its position; a rollout as a whole by the position of its first MASK row, so that the keys it needs
    beyond the depth-0 rows always travel with it.
    """
    first = np.where(depth == 0, anchor, anchor + 1)
    return np.clip(first * segments // n, 0, segments - 1)
