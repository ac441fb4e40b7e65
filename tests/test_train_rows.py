"""The training layout: toys worked out by hand, and properties over random documents."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_peagle.train.rows import (
    Cod,
    all_rows,
    allowed,
    generator,
    most_rows,
    sample_rows,
    segment,
    supervised,
)

MARKS = np.array([0, 0, 0, 1, 1, 1, 1], dtype=bool)  # x_0 ... x_6 of the toy


def counts(depth: np.ndarray, depths: int) -> list[int]:
    return np.bincount(depth, minlength=depths).tolist()


def test_toy_weights() -> None:
    assert supervised(MARKS, strict=False).tolist() == [False, False, True, True, True, True]
    assert supervised(MARKS, strict=True).tolist() == [False, False, True, True, True, False]


def test_toy_full_layout() -> None:
    anchor, depth = all_rows(6, 3)
    assert counts(depth, 3) == [6, 5, 4]
    see = allowed(anchor[:, None], depth[:, None], anchor[None], depth[None])
    assert see.sum() == 59
    assert [int(see[depth == d].sum()) for d in range(3)] == [21, 20, 18]
    for strict, trained in ((False, 12), (True, 9)):
        assert supervised(MARKS, strict)[anchor + depth].sum() == trained


@pytest.mark.parametrize("ratio, expected", [(0.8, [6, 2, 1]), (0.7, [6, 2, 0]), (1.0, [6, 3, 2])])
def test_toy_cod_counts(ratio: float, expected: list[int]) -> None:
    weight = supervised(MARKS, strict=False)
    found = {tuple(counts(sample_rows(weight, Cod(3, ratio, 0.2), generator(i))[1], 3)) for i in range(40)}
    # With r = 0.8 a draw can leave no neighbour for depth 2 inside V: {3, 5} gives row (2, 2), {5, anything} may not.
    assert max(found) == tuple(expected)
    assert all(row[:2] == tuple(expected[:2]) and row[2] <= expected[2] for row in found)


def test_toy_cod_draw() -> None:
    """The draw {3, 5} at depth 1 leads to the rows of the worked example."""
    weight = supervised(MARKS, strict=False)
    for i in range(100):
        anchor, depth = sample_rows(weight, Cod(3, 0.8, 0.2), generator(i))
        if (anchor + depth)[depth == 1].tolist() == [3, 5]:
            assert anchor.tolist() == [0, 1, 2, 3, 4, 5, 2, 4, 2]
            assert (anchor + depth).tolist() == [0, 1, 2, 3, 4, 5, 3, 5, 4]
            see = allowed(anchor[:, None], depth[:, None], anchor[None], depth[None])
            assert see.sum() == 36
            return
    raise AssertionError("the draw never came up")


def test_long_counts() -> None:
    weight = np.arange(2048) >= 248
    anchor, depth = sample_rows(weight, Cod(8, 0.8, 0.2), generator(1))
    assert counts(depth, 8)[:4] == [2048, 1439, 1150, 920]
    assert counts(sample_rows(weight, Cod(8, 0.7, 0.2), generator(1))[1], 8)[:4] == [2048, 1259, 881, 616]


def test_rows_per_position() -> None:
    assert Cod(8, 0.8, 0.2).rows_per_position == pytest.approx(4.161, abs=1e-3)
    assert Cod(8, 0.7, 0.2).rows_per_position == pytest.approx(3.373, abs=1e-3)
    assert Cod(1).rows_per_position == 1


documents = st.lists(st.booleans(), min_size=2, max_size=60).map(lambda marks: np.array(marks, dtype=bool))
cods = st.builds(Cod, st.integers(1, 9), st.sampled_from([0.5, 0.7, 0.8, 1.0]), st.sampled_from([0.0, 0.2, 1.0]))


@settings(max_examples=150, deadline=None)
@given(documents, cods, st.integers(0, 99), st.booleans())
def test_cod_properties(marks: np.ndarray, cod: Cod, seed: int, strict: bool) -> None:
    weight = supervised(marks, strict)
    n = len(weight)
    anchor, depth = sample_rows(weight, cod, generator(seed))
    again = sample_rows(weight, cod, generator(seed))
    assert np.array_equal(anchor, again[0]) and np.array_equal(depth, again[1])
    rows = set(zip(anchor.tolist(), depth.tolist()))
    assert len(rows) == len(anchor) <= most_rows(n, int(weight.sum()), cod)
    assert {(a, 0) for a in range(n)} <= rows
    for a, d in rows:
        assert a >= 0 and a + d < n and d < cod.depths
        if d:
            assert weight[a + d] and (a, d - 1) in rows  # trained, and a chain without gaps


@settings(max_examples=60, deadline=None)
@given(documents, cods, st.integers(0, 99))
def test_attention_is_the_causal_list_of_an_engine(marks: np.ndarray, cod: Cod, seed: int) -> None:
    """Each row sees positions 0 ... a + d once each: the context up to its anchor, then its own rollout."""
    anchor, depth = sample_rows(supervised(marks), cod, generator(seed))
    see = allowed(anchor[:, None], depth[:, None], anchor[None], depth[None])
    for i, (a, d) in enumerate(zip(anchor, depth)):
        seen = {(int(anchor[j]), int(depth[j])) for j in np.flatnonzero(see[i])}
        assert seen == {(x, 0) for x in range(a + 1)} | {(int(a), x) for x in range(1, d + 1)}
        assert sorted(x + y for x, y in seen) == list(range(a + d + 1))


def table(n: int, depths: int) -> np.ndarray:
    """The rule written out row by row, position-major (index p * K + d), from what a row needs: no formula shared."""
    see = np.zeros((n * depths, n * depths), dtype=bool)
    for p, d in itertools.product(range(n), range(depths)):
        a = p - d
        if a < 0:
            continue
        for context in range(a + 1):
            see[p * depths + d, context * depths] = True
        for own in range(1, d + 1):
            see[p * depths + d, (a + own) * depths + own] = True
    return see


@pytest.mark.parametrize("n, depths", [(6, 3), (12, 4), (9, 1), (5, 8)])
def test_rule_equals_the_position_major_table(n: int, depths: int) -> None:
    anchor, depth = all_rows(n, depths)
    index = (anchor + depth) * depths + depth
    see = allowed(anchor[:, None], depth[:, None], anchor[None], depth[None])
    assert np.array_equal(see, table(n, depths)[np.ix_(index, index)])
    # A longer document's table holds a shorter one's in its corner.
    corner = table(n + 6, depths)[: n * depths, : n * depths]
    assert np.array_equal(corner, table(n, depths))


def test_toy_segments() -> None:
    anchor, depth = all_rows(6, 3)
    for parts, expected in ((2, [(7, 7), (8, 11)]), (3, [(4, 4), (6, 8), (5, 9)]),
                            (6, [(1, 1), (3, 4), (3, 5), (3, 6), (3, 7), (2, 7)])):  # fmt: skip
        owner = segment(anchor, depth, parts, 6)
        found = [(int((owner == s).sum()), int(((owner == s) | ((depth == 0) & (owner < s))).sum())) for s in range(parts)]
        assert found == expected
    assert segment(np.array([2, 2]), np.array([1, 2]), 2, 6).tolist() == [1, 1]
    assert segment(np.array([2]), np.array([0]), 2, 6).tolist() == [0]


@settings(max_examples=60, deadline=None)
@given(documents, cods, st.integers(1, 7), st.integers(0, 9))
def test_segments_hold_every_key(marks: np.ndarray, cod: Cod, parts: int, seed: int) -> None:
    """Owned rows partition all rows, and what an owned row may see is in its segment."""
    weight = supervised(marks)
    anchor, depth = sample_rows(weight, cod, generator(seed))
    owner = segment(anchor, depth, parts, len(weight))
    assert owner.min() >= 0 and owner.max() < parts
    see = allowed(anchor[:, None], depth[:, None], anchor[None], depth[None])
    for s in range(parts):
        held = (owner == s) | ((depth == 0) & (owner <= s))
        assert not see[owner == s][:, ~held].any()
