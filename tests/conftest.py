"""Totals over the whole run, printed at its end."""

from __future__ import annotations

from collections import Counter

#: What tests add to: generations, rounds compared with the oracle, draft ties, refusals, HTTP requests.
TALLY: Counter[str] = Counter()


def pytest_terminal_summary(terminalreporter) -> None:
    if TALLY:
        terminalreporter.write_line("totals: " + ", ".join(f"{value} {name}" for name, value in sorted(TALLY.items())))
