"""What the installed plugin costs an SGLang that does not use it.

    python bench/import_cost.py --out bench/results/import-cost.json

Each repetition is a fresh process that imports what a server imports in any case (SGLang loads plugins earlier than
some of it, but then only the order changes), then times ``load_plugins()`` alone: with the plugin, and with it excluded
by SGLANG_PLUGINS. ``modules_of_other_packages`` are modules that only the plugin brought in.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

from environment import environment, write_report

CODE = """
import sys, time
import sglang.launch_server
import sglang.srt.entrypoints.http_server
from sglang.srt.plugins import load_plugins
before = set(sys.modules)
start = time.perf_counter()
load_plugins()
seconds = time.perf_counter() - start
added = [name for name in set(sys.modules) - before if not name.startswith("sgl_peagle")]
print("RESULT", seconds, len(added))
"""


def measure(plugins: str, repetitions: int) -> tuple[list[float], int]:
    """Seconds that ``load_plugins()`` took in each process, and the modules of other packages it imported."""
    times, added = [], 0
    for _ in range(repetitions):
        env = os.environ | {"SGLANG_PLUGINS": plugins, "HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "0"}
        out = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=True).stdout
        line = next(line for line in out.splitlines() if line.startswith("RESULT"))
        times.append(float(line.split()[1]))
        added = int(line.split()[2])
    return times, added


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    with_plugin, added = measure("sgl_peagle", options.repetitions)
    without, _ = measure("no-such-plugin", options.repetitions)
    best = [min(with_plugin), min(without)]
    report = {
        "environment": environment() | {"machine": platform.machine(), "python": platform.python_version()},
        "load_plugins_ms_with": round(1000 * best[0], 2),
        "load_plugins_ms_without": round(1000 * best[1], 2),
        "added_ms": round(1000 * (best[0] - best[1]), 2),
        "median_added_ms": round(1000 * (statistics.median(with_plugin) - statistics.median(without)), 2),
        "modules_of_other_packages": added,
        "ratio": round(best[0] / best[1], 2),
        "repetitions": options.repetitions,
    }  # fmt: skip
    write_report(options.out, report)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
