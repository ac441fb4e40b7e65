"""Totals over the whole run, printed at its end."""

from __future__ import annotations

import os
from collections import Counter

# Before anything imports SGLang or torch: SGLang decides at import which device it has, and OpenMP threads that spin
# on a busy machine are slow. Asking torch for a GPU would initialise CUDA, which a fork does not survive.
if not os.path.exists("/dev/nvidia0"):
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

#: What tests add to: generations, rounds compared with the oracle, draft ties, refusals, HTTP requests.
TALLY: Counter[str] = Counter()


def pytest_terminal_summary(terminalreporter) -> None:
    if TALLY:
        terminalreporter.write_line("totals: " + ", ".join(f"{value} {name}" for name, value in sorted(TALLY.items())))
