"""Acceptance numbers with and without filler."""

from __future__ import annotations

from sgl_peagle.counters import Counters


def test_filler_is_no_draft() -> None:
    counters = Counters(k=4)
    counters.skipped(requests=2)
    counters.verified([1, 0])  # the first rounds after a prefill without masks: one real draft each
    counters.verified([4, 2])
    assert (counters.rounds, counters.accepted, counters.filler, counters.drafts) == (4, 7, 6, 10)
    assert counters.acceptance_length == 1 + 7 / 4
    assert counters.acceptance_rate == 0.7


def test_nothing_counted_yet() -> None:
    counters = Counters(k=4)
    assert counters.acceptance_length == 0 and counters.acceptance_rate == 0 and counters.drafts == 0
