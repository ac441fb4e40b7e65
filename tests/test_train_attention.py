"""Both attention backends against the rule, and each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sgl_peagle.train.attention import BLOCK, Flex, Rows, _padded, block_lists, sdpa_plan
from sgl_peagle.train.batches import Batch
from sgl_peagle.train.rows import Cod, allowed
from train_cases import batch_of, documents

CPU = torch.device("cpu")


def pairs(queries: Rows, keys: Rows) -> np.ndarray:
    """[Q, K] bool: the rule and the documents, written out."""
    rule = allowed(queries.anchor[:, None], queries.depth[:, None], keys.anchor[None], keys.depth[None])
    return rule & (queries.document[:, None] == keys.document[None])


def plain(q: Tensor, k: Tensor, v: Tensor, see: np.ndarray) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
    weights = scores.masked_fill(~torch.from_numpy(see), -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def batch(n: int, count: int = 3) -> Batch:
    return batch_of(documents(count, n), Cod(6, 0.8, 0.3))


def later(rows: Rows, step: int) -> Rows:
    return Rows(rows.document, rows.anchor, np.full(len(rows), step))


def cases() -> list[tuple[Rows, Rows]]:
    """Whole batches, and a step of EAGLE-3: other queries than keys."""
    whole = [batch(n).rows for n in (9, 70, 300)]
    first = batch_of(documents(4, 90), Cod(1)).rows
    return [(rows, rows) for rows in whole] + [(later(first, 2), Rows.cat([later(first, d) for d in range(3)]))]


@pytest.mark.parametrize("case", range(4))
@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_backends_compute_the_rule(case: int, backend: str) -> None:
    """Outputs and gradients; FlexAttention by its own (uncompiled) reference, which has no backward pass on a CPU."""
    queries, keys = cases()[case]
    random = torch.Generator().manual_seed(case)
    q, k, v = (
        torch.randn(len(rows), heads, 16, generator=random).requires_grad_()
        for rows, heads in ((queries, 6), (keys, 2), (keys, 2))
    )
    want = plain(q, k, v, pairs(queries, keys))
    if backend == "flex":
        with torch.no_grad():
            out = Flex(256, 384, compiled=False)(queries, keys, CPU)(q, k, v)
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-4)
        return
    out = sdpa_plan(queries, keys, CPU)(q, k, v)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-4)
    mix = torch.randn(want.shape, generator=random)
    for got, expected in zip(*(torch.autograd.grad((x * mix).sum(), (q, k, v)) for x in (out, want))):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("case", range(4))
def test_blocks_hold_every_pair(case: int) -> None:
    """No allowed pair is outside the listed blocks, full blocks are full, and most empty blocks are skipped."""
    queries, keys = cases()[case]
    q_size, k_size = (-(-len(rows) // BLOCK) * BLOCK + BLOCK for rows in (queries, keys))
    partial, full = block_lists(_padded(queries, q_size, -1, CPU), _padded(keys, k_size, -2, CPU))
    see = np.zeros((q_size, k_size), dtype=bool)
    see[: len(queries), : len(keys)] = pairs(queries, keys)
    blocks = torch.from_numpy(see).view(q_size // BLOCK, BLOCK, k_size // BLOCK, BLOCK)
    some, every = blocks.any(3).any(1), blocks.all(3).all(1)
    assert not (partial & full).any()
    assert not (some & ~(partial | full)).any()
    assert not (full & ~every).any()
    assert not partial[-1].any() and not partial[:, -1].any()  # padding costs nothing


def test_long_documents_are_sparse() -> None:
    """Blocks visited grow like the context triangle, not like rows x rows."""
    rows = batch_of(documents(1, 3000), Cod(8, 0.7, 0.2)).rows
    size = -(-len(rows) // BLOCK) * BLOCK
    padded = _padded(rows, size, -1, CPU)
    partial, full = block_lists(padded, padded)
    some = torch.from_numpy(
        np.pad(pairs(rows, rows), (0, size - len(rows)))
    ).view(size // BLOCK, BLOCK, size // BLOCK, BLOCK).any(3).any(1)  # fmt: skip
    assert int((partial | full).sum()) <= 1.1 * int(some.sum()) + 10
    assert int(full.sum()) > 0.5 * int(some.sum())


def test_order_of_a_batch() -> None:
    """Depth-0 rows first; inputs, teachers and weights by position; nothing crosses a document."""
    texts = documents(3, 40)
    made = batch_of(texts, Cod(5, 0.8, 0.2))
    rows = made.rows
    assert (rows.depth[: made.context] == 0).all() and (rows.depth[made.context :] > 0).all()
    assert made.context == sum(d.n for d in texts)
    flat = made.tokens.numpy().ravel()
    for i in range(len(rows)):
        text, p = texts[rows.document[i]], rows.anchor[i] + rows.depth[i]
        assert 0 <= rows.anchor[i] and p < text.n
        assert flat[made.state[i]] == text.tokens[p]
        assert (i in made.trained) == text.weight[p]
