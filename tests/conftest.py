"""Totals over the whole run, printed at its end."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

# Before anything imports SGLang or torch: SGLang decides at import which device it has, and OpenMP threads that spin
# on a busy machine are slow. Asking torch for a GPU would initialise CUDA, which a fork does not survive.
if not os.path.exists("/dev/nvidia0"):
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

#: What tests add to: generations, rounds compared with the oracle, draft ties, refusals, HTTP requests.
TALLY: Counter[str] = Counter()


#: With this variable every GPU test's outcome and what it printed go to a JSON file (bench/results/gpu-tests.json).
GPU_REPORT = "SGL_PEAGLE_GPU_REPORT"


def _write_gpu_report(terminalreporter, file: Path) -> None:
    sys.path.append(str(Path(__file__).parent.parent / "bench"))
    from environment import environment

    tests = {}
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            if "gpu" in report.keywords:
                said = report.capstdout.splitlines()[-3:]
                crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", "") if outcome == "failed" else ""
                why = {"why": crash[-500:]} if crash else {}
                tests[report.nodeid] = {"outcome": outcome, "seconds": round(report.duration, 1), "printed": said} | why
    file.write_text(json.dumps({"environment": environment(), "tests": dict(sorted(tests.items()))}, indent=1) + "\n")


def pytest_terminal_summary(terminalreporter) -> None:
    if os.environ.get(GPU_REPORT):
        _write_gpu_report(terminalreporter, Path(os.environ[GPU_REPORT]))
    if TALLY:
        terminalreporter.write_line("totals: " + ", ".join(f"{value} {name}" for name, value in sorted(TALLY.items())))
