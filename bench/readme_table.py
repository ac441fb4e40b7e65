"""The README's tables, from a sweep's or an acceptance file's JSON: ``python bench/readme_table.py bench/results/NAME.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

#: Answers without loops below which no acceptance length is quoted.
FEW = 5

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


def quotable(cell: dict[str, Any]) -> bool:
    """Whether an acceptance length is of all answers, or of enough without loops."""
    return cell["loops"] == "included" or cell["requests"] >= FEW


def acceptance_table(report: dict[str, Any]) -> str:
    """One row per prompt set and temperature, one column per method and K: acceptance length, in brackets without loops."""
    found: dict[tuple[str, float], dict[tuple[str, int], dict[str, float]]] = {}
    for cell in report["cells"]:
        if cell["context"] == cell["kind"] == "all" and quotable(cell):
            row = found.setdefault((cell["prompts"], cell["temperature"]), {})
            row.setdefault((cell["method"], cell["k"]), {})[cell["loops"]] = cell["acceptance_length"]
    columns = sorted({key for row in found.values() for key in row}, key=lambda key: (key[0] != "peagle", key[1]))
    heads = [f"{NAMES[method]} K={k}" for method, k in columns]
    lines = ["| prompts | T | " + " | ".join(heads) + " |", "| --- " * (2 + len(heads)) + "|"]
    for (prompts, temperature), row in sorted(found.items(), key=lambda item: item[0][1]):
        parts = []
        for column in columns:
            values = row.get(column, {})
            calm = f" ({values['excluded']:.2f})" if "excluded" in values else ""
            parts.append(f"{values['included']:.2f}{calm}" if values else "–")
        lines.append(f"| {prompts} | {temperature:g} | " + " | ".join(parts) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    content = json.loads(Path(sys.argv[1]).read_text())
    print(acceptance_table(content) if "per_position" in content["cells"][0] else table(content))
