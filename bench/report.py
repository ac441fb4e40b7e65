"""Tables, plots and the check of the targets from a sweep's result file.

    python bench/report.py sweep.json --out FOLDER        # report.md and PNG plots
    python bench/report.py sweep.json                     # report.md to standard output, no plots

Cells with simulated acceptance are labelled in every row; a ratio or plot that rests on one is, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterable, Optional, Sequence

LABEL = {"none": "no speculation", "eagle3": "EAGLE-3", "peagle": "P-EAGLE"}
COLOR = {"none": "#777777", "eagle3": "#1f77b4", "peagle": "#d62728"}

#: Memory bandwidth behind the drafter's floor (bytes/s), and the launch allowance (ms).
BANDWIDTH, ALLOWANCE_MS = 4.3e12, 0.040

Cell = dict[str, Any]
Group = tuple[str, str, str]


def good(cells: Iterable[Cell]) -> list[Cell]:
    """Cells that were measured."""
    return [cell for cell in cells if "error" not in cell]


def groups(cells: Iterable[Cell]) -> dict[Group, list[Cell]]:
    """Cells by (model, preset, draft vocabulary); those without speculation belong to every vocabulary."""
    cells = list(cells)
    vocabs = defaultdict(set)
    for cell in cells:
        if cell["k"]:
            vocabs[cell["model"], cell["preset"]].add(cell["draft_vocab_name"])
    found: dict[Group, list[Cell]] = defaultdict(list)
    for cell in cells:
        place = (cell["model"], cell["preset"])
        for vocab in [cell["draft_vocab_name"]] if cell["k"] else sorted(vocabs[place]) or ["none"]:
            found[(*place, vocab)].append(cell)
    return dict(found)


def find(cells: Iterable[Cell], method: str, concurrency: int, k: Optional[int] = None) -> Optional[Cell]:
    """The cell of a method at a concurrency: at K, or at the K of the highest throughput."""
    chosen = [
        c for c in good(cells) if c["method"] == method and c["concurrency"] == concurrency and k in (None, c["k"])
    ]  # fmt: skip
    return max(chosen, key=lambda c: c["output_tokens_per_s"], default=None)


def _value(value: Optional[float], digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def acceptance_label(*cells: Cell) -> str:
    """How the acceptance of these cells came about."""
    kinds = []
    for cell in cells:
        if cell["simulated_acceptance"]:
            kinds.append(f"simulated {cell['simulated_acceptance_length']}: {cell['acceptance_source']}")
        else:
            kinds.append("real" if cell["k"] else "no speculation")
    return "; ".join(dict.fromkeys(kinds))


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def cell_table(cells: list[Cell]) -> list[str]:
    """Every cell, one row."""
    header = ("method", "K", "c", "tokens/s", "AL", "ms/round", "draft", "verify", "rest", "acceptance")
    order = {"none": 0, "eagle3": 1, "peagle": 2}
    rows = []
    for cell in sorted(cells, key=lambda c: (order[c["method"]], c["k"], c["concurrency"])):
        start = (LABEL[cell["method"]], str(cell["k"] or "–"), str(cell["concurrency"]))
        if "error" in cell:
            rows.append((*start, "failed: " + cell["error"].replace("|", "/")[:120], *["–"] * 5, acceptance_label(cell)))
            continue
        numbers = [_value(cell.get(n)) for n in ("ms_round", "ms_draft", "ms_verify", "ms_rest")]
        rows.append(
            (*start, _value(cell["output_tokens_per_s"], 1), _value(cell["acceptance_length"], 2), *numbers, acceptance_label(cell))
        )  # fmt: skip
    return _table(header, rows)


def timing_ratios(p: Cell, e: Cell) -> list[float]:
    """Output tokens per second of one cell over another's, timing by timing; none unless one run timed both several times."""
    first, second = (cell.get("output_tokens_per_s_all", ()) for cell in (p, e))
    one_run = p.get("environment_index") == e.get("environment_index")
    return [a / b for a, b in zip(first, second)] if one_run and len(first) == len(second) > 1 else []


def pooled_table(cells: list[Cell]) -> list[str]:
    """The ratios of all timings at the concurrencies where both methods have some: at equal K, and with each at its best K."""
    ks, concurrencies = (sorted({cell[name] for cell in cells if cell["k"]}) for name in ("k", "concurrency"))
    rows = []
    for k in [*ks, None]:
        pairs = [(find(cells, "peagle", c, k), find(cells, "eagle3", c, k)) for c in concurrencies]
        timed = [(p, e, ratios) for p, e in pairs if p and e and (ratios := timing_ratios(p, e))]
        if timed:
            every = [r for *_, ratios in timed for r in ratios]
            rows.append((f"{k or 'each at its best'}", ", ".join(str(p["concurrency"]) for p, *_ in timed),
                         f"**{statistics.geometric_mean(every):.2f}**", f"{min(every):.2f} to {max(every):.2f}",
                         f"{sum(r > 1 for r in every)} of {len(every)}",
                         acceptance_label(*(cell for p, e, _ in timed for cell in (p, e)))))  # fmt: skip
    return _table(("K", "c", "P/E, geometric mean", "range", "above 1", "acceptance"), rows) if rows else []


def ratio_table(cells: list[Cell]) -> list[str]:
    """Output tokens per second of P-EAGLE over EAGLE-3, each at its best K, by concurrency, and that of each timing."""
    header = ("c", "P-EAGLE tokens/s", "best K", "EAGLE-3 tokens/s", "best K", "P/E", "each timing's", "no speculation", "acceptance")
    rows = []
    for c in sorted({cell["concurrency"] for cell in cells}):
        p, e, none = (find(cells, method, c) for method in ("peagle", "eagle3", "none"))
        if p is None or e is None:
            continue
        ratio = p["output_tokens_per_s"] / e["output_tokens_per_s"]
        plain = none and none["output_tokens_per_s"]
        each = ", ".join(f"{r:.2f}" for r in timing_ratios(p, e)) or "–"
        rows.append(
            (str(c), _value(p["output_tokens_per_s"], 1), str(p["k"]), _value(e["output_tokens_per_s"], 1), str(e["k"]),
             f"**{ratio:.2f}**", each, _value(plain, 1), acceptance_label(p, e))
        )  # fmt: skip
    return _table(header, rows) if rows else ["No concurrency has both methods."]


# -- targets ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """One target: what was found, the limit, and whether it is met (None: not measured)."""

    name: str
    found: Optional[float]
    limit: float
    at_most: bool
    note: str = ""

    @property
    def met(self) -> Optional[bool]:
        if self.found is None:
            return None
        return self.found <= self.limit if self.at_most else self.found >= self.limit


def _over(a: Optional[Cell], b: Optional[Cell], name: str) -> Optional[float]:
    if a is None or b is None or not a.get(name) or not b.get(name):
        return None
    return a[name] / b[name]


def _graph_gb(engine: dict[str, Any]) -> Optional[float]:
    """Graph memory of an engine in GB, all phases together."""
    graph = (engine.get("memory_usage") or {}).get("graph")
    if isinstance(graph, dict):
        return sum(value for value in graph.values() if value is not None)
    return graph


def _real_targets(cells: list[Cell]) -> list[Verdict]:
    """Targets of trained heads; those of the 8B shape mean nothing for another target."""
    speed = _over(find(cells, "peagle", 1), find(cells, "eagle3", 1), "output_tokens_per_s")
    found = [Verdict("tokens/s, c=1: P-EAGLE / EAGLE-3, each at its best K", speed, 1.3, False, "real acceptance")]
    three, seven = ({m: find(cells, m, 1, k) for m in ("peagle", "eagle3")} for k in (3, 7))
    ratio = _over(seven["peagle"], seven["eagle3"], "acceptance_length")
    found.append(Verdict("acceptance length, K=7, c=1: P-EAGLE / EAGLE-3", ratio, 1.0, False, "real acceptance"))
    gain: dict[str, Optional[float]] = {
        m: b["acceptance_length"] - a["acceptance_length"] if (a := three[m]) and (b := seven[m]) else None for m in three
    }  # fmt: skip
    ratio = gain["peagle"] / gain["eagle3"] if gain["peagle"] is not None and gain["eagle3"] else None
    return [*found, Verdict("gain in acceptance length from K=3 to K=7: P-EAGLE / EAGLE-3", ratio, 1.0, False, "real acceptance")]


def _simulated_targets(cells: list[Cell], host_sync: Sequence[dict[str, Any]]) -> list[Verdict]:
    """Targets of the 8B shape with dummy weights."""
    label = "simulated acceptance"

    def round_ratio(c: int, k: int, against: int, limit: float) -> Verdict:
        found = _over(find(cells, "peagle", c, k), find(cells, "eagle3", c, against), "ms_round")
        return Verdict(f"ms/round, c={c}: P-EAGLE K={k} / EAGLE-3 K={against}", found, limit, True, label)

    found = [round_ratio(1, 7, 7, 0.80), round_ratio(1, 7, 3, 0.95), round_ratio(64, 7, 7, 0.87), round_ratio(64, 3, 3, 0.95)]
    one = find(cells, "peagle", 1, 7)
    if one is not None and one.get("head_bytes"):
        limit = 1.5 * one["head_bytes"] / BANDWIDTH * 1e3 + ALLOWANCE_MS
        note = f"1.5 x {one['head_bytes'] / 1e9:.2f} GB / 4.3 TB/s + 40 us"
        found.append(Verdict("ms of the draft pass, c=1, K=7 (events, host gaps included)", one.get("ms_draft"), limit, True, note))
        traced = [h for h in host_sync if h.get("method") == "peagle" and h.get("k") == 7 and h.get("gpu")]
        at_one = [h for h in traced if h["concurrency"] == 1]
        busy = at_one[0]["gpu"]["drafter_span"] if at_one else None
        found.append(Verdict("ms of the draft pass, c=1, K=7 (first to last kernel in a trace)", busy, limit, True, note))
    for c, limit in ((1, 1.55), (64, 1.15)):
        ratio = _over(find(cells, "peagle", c), find(cells, "eagle3", c), "output_tokens_per_s")
        found.append(Verdict(f"tokens/s, c={c}: P-EAGLE / EAGLE-3, each at its best K", ratio, limit, False, label))
    return found


def alone(engine: dict[str, Any]) -> bool:
    """Whether nothing else started and captured beside an engine, so that its start time and graph memory mean something."""
    return engine.get("together", 1) == 1


def targets(cells: list[Cell], engines: list[dict[str, Any]], host_sync: list[dict[str, Any]] = ()) -> list[Verdict]:
    """All targets of one group of cells; ``engines`` and ``host_sync`` of the same model, preset and vocabulary."""
    found = _simulated_targets(cells, host_sync) if any(c["dummy_weights"] for c in cells) else _real_targets(cells)
    for k in (3, 7):
        chosen = {m: [e for e in engines if e["method"] == m and e["k"] == k and "error" not in e and alone(e)] for m in ("peagle", "eagle3")}
        p, e = (min(chosen[m], key=lambda x: x["start_s"], default=None) for m in ("peagle", "eagle3"))
        same = p and e and p.get("start_of_method") == e.get("start_of_method") and p.get("start_method") == e.get("start_method")
        note = "" if same or not (p and e) else "starts are not alike (kernel caches, start method)"
        found.append(Verdict(f"start time, K={k}: P-EAGLE / EAGLE-3", p["start_s"] / e["start_s"] if p and e else None, 1.10, True, note))
        memory = [_graph_gb(x) if x else None for x in (p, e)]
        ratio = memory[0] / memory[1] if all(memory) else None
        found.append(Verdict(f"graph memory, K={k}: P-EAGLE / EAGLE-3", ratio, 1.5, True))
    return found


def target_table(verdicts: list[Verdict]) -> list[str]:
    """One row per target."""
    word: Callable[[Verdict], str] = lambda v: {True: "met", False: "**missed**", None: "not measured"}[v.met]
    return _table(
        ("target", "found", "limit", "", "note"),
        [(v.name, _value(v.found), ("≤ " if v.at_most else "≥ ") + _value(v.limit), word(v), v.note or "") for v in verdicts],
    )


# -- other tables -------------------------------------------------------------------------------------------


def engine_table(engines: list[dict[str, Any]]) -> list[str]:
    """Start time and graph memory of every engine."""
    rows = []
    for e in engines:
        if "error" in e:
            rows.append((LABEL[e["method"]], str(e["k"] or "–"), e["vocab"], "failed: " + e["error"][:100].replace("|", "/"), *["–"] * 4))
            continue
        capture = ", ".join(f"{name} {gb}" for name, gb in (e.get("capture_gb") or {}).items())
        nth = f"{e.get('start_method', '')}, no. {e.get('start_of_method', '–')}"
        rows.append((LABEL[e["method"]], str(e["k"] or "–"), e["vocab"], _value(e["start_s"], 1), nth,
                     _value(_graph_gb(e), 2), capture or "–", _value(e.get("first_generation_s"), 1)))  # fmt: skip
    header = ("method", "K", "vocab", "start s", "started by, of its method", "graph GB", "captures as logged, GB", "first generation s")
    return _table(header, rows)


def sync_table(entries: list[dict[str, Any]]) -> list[str]:
    """Host waits per round and the drafter's GPU time, from the profiler."""
    rows = []
    for e in entries:
        start = (LABEL[e["method"]], str(e["k"]), str(e["concurrency"]))
        if "error" in e:
            rows.append((*start, "failed: " + e["error"][:100].replace("|", "/"), *["–"] * 5))
            continue
        gpu, quiet = e.get("gpu") or {}, e["waits_without_stacks"]
        rows.append(
            (*start, _value(quiet["calls_per_round"], 2), json.dumps(quiet["calls"]), json.dumps(quiet["inside_drafter_calls"]),
             _value(gpu.get("drafter_busy")), _value(gpu.get("drafter_span")), str(gpu.get("drafter_kernels_per_round", "–")))
        )  # fmt: skip
    header = ("method", "K", "c", "waits/round", "calls", "inside the drafter", "drafter busy ms", "first to last kernel ms", "kernels")
    lines = _table(header, rows)
    for e in entries:
        for stack in (e.get("waits") or {}).get("stacks", []):
            frames = " ← ".join(stack["frames"])
            lines.append(f"\n* {LABEL[e['method']]} K={e['k']} c={e['concurrency']}: {stack['times']} × `{stack['call']}` from `{frames}`")
    return lines


def document(report: dict[str, Any], plots: Optional[dict[Group, list[str]]] = None) -> str:
    """The whole report in Markdown."""
    lines = ["# Sweep", "", *(f"* {key}: {value}" for key, value in report["environment"].items())]
    if any(cell.get("dummy_weights") for cell in report["cells"]):
        lines += ["", "Models have the shapes named, with dummy weights; acceptance is simulated where a row says so."]
    for (model, preset, vocab), cells in groups(report["cells"]).items():
        def belongs(e: dict[str, Any]) -> bool:
            return e["model"] == model and e["preset"] == preset and e["vocab"] in (vocab, "none")

        engines, syncs = ([e for e in report.get(n, []) if belongs(e)] for n in ("engines", "host_sync"))
        lines += ["", f"## {model}, preset {preset}, draft vocabulary {vocab}", "", "### Targets", ""]
        lines += target_table(targets(cells, engines, syncs))
        lines += ["", "### P-EAGLE against EAGLE-3, each at its best K", "", *ratio_table(cells)]
        if pooled := pooled_table(cells):
            lines += ["", "### Ratios of all timings, at equal K and each at its best", "", *pooled]
        lines += ["", "### All cells", "", "Parts of a round in ms, from a pass of its own.", "", *cell_table(cells)]
        if engines:
            lines += ["", "### Engines", "", *engine_table(engines)]
        if syncs:
            lines += ["", "### Host waits and GPU time of the drafter", "", *sync_table(syncs)]
        for name in (plots or {}).get((model, preset, vocab), []):
            lines += ["", f"![{Path(name).stem}]({name})"]
    return "\n".join(lines) + "\n"


def main(argv: Optional[list[str]] = None) -> int:
    """Write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, help="folder for report.md and plots")
    options = parser.parse_args(argv)
    report = json.loads(options.results.read_text())
    if options.out is None:
        print(document(report))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    sys.path[:0] = [str(Path(__file__).resolve().parent)]
    from report_plots import draw

    plots = {group: draw(group, cells, options.out) for group, cells in groups(report["cells"]).items()}
    (options.out / "report.md").write_text(document(report, plots))
    print(f"{options.out / 'report.md'} and {sum(map(len, plots.values()))} plots")
    return 0


if __name__ == "__main__":
    sys.exit(main())
