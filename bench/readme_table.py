"""The README's table of a sweep, from its JSON: ``python bench/readme_table.py bench/results/sweep-llama-3.1-8b.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

NAMES = {"none": "no speculation", "eagle3": "EAGLE-3", "peagle": "P-EAGLE"}


def table(report: dict[str, Any]) -> str:
    """One row per method and K, one column group per concurrency: tokens/s and ms per round."""
    cells = [cell for cell in report["cells"] if "error" not in cell]
    levels = sorted({cell["concurrency"] for cell in cells})
    rows: dict[tuple[int, int], dict[int, dict[str, Any]]] = {}
    for cell in cells:
        key = (list(NAMES).index(cell["method"]), cell["k"])
        rows.setdefault(key, {})[cell["concurrency"]] = cell
    heads = [f"c={c}: tok/s · ms/round (draft + verify)" for c in levels]
    lines = ["| method | K | AL | " + " | ".join(heads) + " |", "| --- " * (3 + len(heads)) + "|"]
    for (method, k), found in sorted(rows.items()):
        first = next(iter(found.values()))
        length = f"{first['simulated_acceptance_length']:.2f} simulated" if first["simulated_acceptance"] else (
            "1" if not k else f"{first['acceptance_length']:.2f}"
        )  # fmt: skip
        parts = []
        for level in levels:
            c = found.get(level)
            split = f" ({c['ms_draft']:.2f} + {c['ms_verify']:.2f})" if c and k else ""
            parts.append(f"{c['output_tokens_per_s']:.0f} · {c['ms_round']:.2f}{split}" if c else "–")
        lines.append(f"| {list(NAMES.values())[method]} | {k or '–'} | {length} | " + " | ".join(parts) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())))
