"""The row and slot arithmetic, against brute force."""

from __future__ import annotations

import itertools
import random

import pytest

from sgl_peagle import backends, layout
from sgl_peagle.errors import PEagleError


@pytest.mark.parametrize("k", range(1, 17))
def test_every_row_is_exactly_one_kind(k: int) -> None:
    for a in range(1, layout.verify_width(k) + 1):
        kinds = [
            (bool(layout.is_real(j, a)), bool(layout.is_mask(j, a, k)), bool(layout.is_dead(j, a, k)))
            for j in range(layout.window_width(k))
        ]
        assert all(sum(kind) == 1 for kind in kinds)
        assert [sum(column) for column in zip(*kinds)] == [a, k - 1, layout.window_width(k) - a - (k - 1)]
        sampled = range(layout.first_sampled_row(a), layout.first_sampled_row(a) + k)
        assert kinds[sampled[0]][0] and all(kinds[j][1] for j in sampled[1:])


def test_window_holds_exactly_the_largest_live_batch() -> None:
    for k in range(1, 17):
        largest = layout.verify_width(k) + layout.prefill_masks(k, finishing=True)
        assert layout.window_width(k) == largest


def _worst_shortfall(k: int, alloc: int, private: bool, overlap: bool, page: int, accepts: list[int]) -> int:
    """Slots missing in a simulated request: SGLang's reservation rule against what the rounds touch.

    The scheduler reserves ``ceil_page(known + 2 * alloc)``; with overlap it does not know the last round's
    result yet. The verify touches s .. s+k, the window's last mask s+a+k-2.
    """
    length = known = allocated = 100
    worst = -(10**9)
    for a in accepts:
        allocated = max(allocated, -(-(known + 2 * alloc) // page) * page)
        touched = length + layout.verify_width(k)
        if private:
            touched = max(touched, length + a + k - 1)
        worst = max(worst, touched - allocated)
        known = length if overlap else length + a
        length += a
    return worst


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("private", [False, True])
def test_allocation_is_enough_and_not_more(private: bool, overlap: bool) -> None:
    for k in range(1, 17):
        plan = layout.slot_plan(k, private)
        chooser = random.Random(k)
        full = [k + 1] * 6
        runs = [full, [1] * 6, *([chooser.choice([1, k + 1]) for _ in range(12)] for _ in range(50))]
        for page in (1, 2, 16):
            assert max(_worst_shortfall(k, plan.alloc, private, overlap, page, run) for run in runs) <= 0
        if overlap and plan.alloc > layout.verify_width(k):
            assert _worst_shortfall(k, plan.alloc - 1, private, overlap, 1, full) > 0, "one slot less must not do"
        # The stock allocation, K+1, is short of K-1 private slots under overlap, and only there.
        stock = _worst_shortfall(k, layout.verify_width(k), private, overlap, 1, full)
        assert (stock == k - 1) if private and overlap else (stock <= 0)
        needed = layout.slots_needed(k, private)
        assert layout.slots_guaranteed(plan.alloc, k, overlap) >= needed


def test_row_width_at_the_context_end() -> None:
    """Replays SGLang's row width and last write position by position."""
    context = 1000
    for alloc, page in itertools.product(range(1, 30), (1, 2, 3, 16, 64)):
        width = context + (4 + alloc if page == 1 else max(4 + alloc, 2 * alloc + page - 1))
        worst = 0
        for end in range(context, context - page - 1, -1):  # every alignment of the last committed length
            last = -(-(end - 4 + 2 * alloc) // page) * page
            worst = max(worst, last - width)
        assert (layout.row_overflow(alloc, page) > 0) == (worst > 0), (alloc, page)
    assert [layout.min_page_size(alloc) for alloc in (1, 8, 9, 20)] == [1, 1, 2, 2]


def test_backend_table_says_what_is_computed() -> None:
    """The thresholds in the documented table of backends follow from the arithmetic."""
    triton, fa3 = backends.drafter_backend("triton", "cuda"), backends.drafter_backend("fa3", "cuda")
    for k in range(1, 17):
        assert triton.plan(k).alloc == k + 1
        assert triton.plan(k).min_page_size == (1 if k <= 7 else 2)
        assert fa3.plan(k).alloc == max(k + 1, -(-(3 * k + 1) // 2))
        assert fa3.plan(k).min_page_size == (1 if k <= 5 else 2)
        assert backends.drafter_backend("torch_native", "cpu").plan(k) == triton.plan(k)
    for row in ("1–7: K+1, 1; from 8: K+1, 2", "1–5: ⌈(3K+1)/2⌉, 1; from 6: same, 2"):
        assert row in backends.__doc__


@pytest.mark.parametrize("name", ["flashinfer", "trtllm_mha"])
def test_unknown_backend_is_refused_by_name(name: str) -> None:
    with pytest.raises(PEagleError, match=name) as error:
        backends.drafter_backend(name, "cuda")
    assert "--speculative-draft-attention-backend triton" in error.value.fix
    with pytest.raises(PEagleError, match="triton"):
        backends.drafter_backend("triton", "cpu")
