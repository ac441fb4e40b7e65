"""The plots of a report (needs matplotlib)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from report import COLOR, LABEL, Cell, Group, acceptance_label, find, good  # noqa: E402


def _caption(cells: list[Cell]) -> str:
    if any(cell["simulated_acceptance"] for cell in cells):
        return "simulated acceptance, dummy weights"
    return "real acceptance"


def _save(figure: Any, folder: Path, name: str) -> str:
    figure.tight_layout()
    figure.savefig(folder / name, dpi=130)
    plt.close(figure)
    return name


def draw(group: Group, cells: list[Cell], folder: Path) -> list[str]:
    """Draw every plot that the cells of a group allow; returns the file names."""
    cells = good(cells)
    prefix = "-".join(group).replace("/", "_")
    title = f"{group[0]}, {group[1]}, draft vocabulary {group[2]} ({_caption(cells)})"
    drawn = [
        _throughput(cells, title, folder, prefix), _best(cells, title, folder, prefix), _ladder(cells, title, folder, prefix),
        _acceptance(cells, title, folder, prefix),
        *(_parts(cells, c, title, folder, prefix) for c in (1, 8, 64)),
    ]  # fmt: skip
    return [name for name in drawn if name]


def _concurrencies(cells: list[Cell]) -> list[int]:
    return sorted({cell["concurrency"] for cell in cells})


def _throughput(cells: list[Cell], title: str, folder: Path, prefix: str) -> str:
    """Tokens per second against concurrency, one panel per K."""
    ks = sorted({cell["k"] for cell in cells if cell["k"]})
    if not ks:
        return ""
    figure, axes = plt.subplots(1, len(ks), figsize=(4 * len(ks), 3.8), sharey=True, squeeze=False)
    for axis, k in zip(axes[0], ks):
        for method in LABEL:
            rows = [(c, find(cells, method, c, 0 if method == "none" else k)) for c in _concurrencies(cells)]
            points = [(c, cell["output_tokens_per_s"]) for c, cell in rows if cell]
            if points:
                axis.plot(*zip(*points), marker="o", color=COLOR[method], label=LABEL[method])
        axis.set(title=f"K = {k}", xlabel="concurrency", xscale="log", yscale="log")
        axis.set_xticks(_concurrencies(cells), [str(c) for c in _concurrencies(cells)])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("output tokens/s")
    axes[0][-1].legend()
    figure.suptitle(title, fontsize=9)
    return _save(figure, folder, f"{prefix}-throughput-by-k.png")


def _best(cells: list[Cell], title: str, folder: Path, prefix: str) -> str:
    """Figures 4 to 6 of the blog: bars at each method's best K, and the ratio above them."""
    pairs = [(c, find(cells, "peagle", c), find(cells, "eagle3", c)) for c in _concurrencies(cells)]
    pairs = [(c, p, e) for c, p, e in pairs if p and e]
    if not pairs:
        return ""
    figure, axis = plt.subplots(figsize=(8, 4.2))
    for number, (c, p, e) in enumerate(pairs):
        for shift, cell in ((-0.2, e), (0.2, p)):
            label = LABEL[cell["method"]] if number == 0 else None
            axis.bar(number + shift, cell["output_tokens_per_s"], 0.38, color=COLOR[cell["method"]], label=label)
            axis.text(number + shift, cell["output_tokens_per_s"], f"K={cell['k']}", ha="center", va="bottom", fontsize=7)
        ratio = p["output_tokens_per_s"] / e["output_tokens_per_s"]
        top = max(p["output_tokens_per_s"], e["output_tokens_per_s"])
        axis.text(number, top * 1.22, f"{ratio:.2f}×", ha="center", fontweight="bold")
    axis.set_xticks(range(len(pairs)), [str(c) for c, *_ in pairs])
    axis.set(xlabel="concurrency", ylabel="output tokens/s (log)", yscale="log")
    axis.set_ylim(top=axis.get_ylim()[1] * 1.4)
    axis.legend()
    axis.set_title("each at its best K: " + title, fontsize=9)
    return _save(figure, folder, f"{prefix}-best-k.png")


def _ladder(cells: list[Cell], title: str, folder: Path, prefix: str) -> str:
    """Figure 1 of the blog: all methods at concurrency 1."""
    rows = [find(cells, method, 1) for method in LABEL]
    rows = [cell for cell in rows if cell]
    if len(rows) < 2:
        return ""
    figure, axis = plt.subplots(figsize=(5, 4))
    for number, cell in enumerate(rows):
        axis.bar(number, cell["output_tokens_per_s"], 0.6, color=COLOR[cell["method"]])
        axis.text(number, cell["output_tokens_per_s"], f"{cell['output_tokens_per_s']:.0f}", ha="center", va="bottom")
    names = [LABEL[c["method"]] + (f"\nK={c['k']}, AL {c['acceptance_length']:.2f}" if c["k"] else "") for c in rows]
    axis.set_xticks(range(len(rows)), names)
    axis.set_ylabel("output tokens/s, concurrency 1")
    axis.set_title(title, fontsize=8)
    return _save(figure, folder, f"{prefix}-concurrency-1.png")


def _acceptance(cells: list[Cell], title: str, folder: Path, prefix: str) -> str:
    """Acceptance length against K, the mean over concurrencies."""
    figure, axis = plt.subplots(figsize=(5, 4))
    any_points = False
    for method in ("eagle3", "peagle"):
        points = []
        for k in sorted({c["k"] for c in cells if c["method"] == method}):
            chosen = [c for c in cells if c["method"] == method and c["k"] == k]
            points.append((k, sum(c["acceptance_length"] for c in chosen) / len(chosen)))
            axis.annotate(acceptance_label(*chosen).split(":")[0], points[-1], fontsize=5, xytext=(2, 4), textcoords="offset points")
        if points:
            any_points = True
            axis.plot(*zip(*points), marker="o", color=COLOR[method], label=LABEL[method])
    if not any_points:
        plt.close(figure)
        return ""
    axis.set(xlabel="K", ylabel="acceptance length as measured")
    axis.legend()
    axis.grid(alpha=0.3)
    axis.set_title(title, fontsize=8)
    return _save(figure, folder, f"{prefix}-acceptance.png")


def _parts(cells: list[Cell], concurrency: int, title: str, folder: Path, prefix: str) -> str:
    """Stacked bars: draft, verify and rest of a round at one concurrency."""
    chosen = [c for c in cells if c["concurrency"] == concurrency and c.get("ms_verify") is not None]
    chosen.sort(key=lambda c: (c["k"], list(LABEL).index(c["method"])))
    if not chosen:
        return ""
    figure, axis = plt.subplots(figsize=(1.0 * len(chosen) + 2.5, 4))
    bottoms = [0.0] * len(chosen)
    for part, color in (("ms_draft", "#ff7f0e"), ("ms_verify", "#2ca02c"), ("ms_rest", "#bbbbbb")):
        values = [max(0.0, c[part]) for c in chosen]
        axis.bar(range(len(chosen)), values, 0.7, bottom=bottoms, color=color, label=part.removeprefix("ms_"))
        bottoms = [a + b for a, b in zip(bottoms, values)]
    for number, total in enumerate(bottoms):
        axis.text(number, total, f"{total:.2f}", ha="center", va="bottom", fontsize=8)
    names = [LABEL[c["method"]].replace(" ", "\n") + (f"\nK={c['k']}" if c["k"] else "") for c in chosen]
    axis.set_xticks(range(len(chosen)), names, fontsize=7)
    axis.set_ylabel(f"ms per round, concurrency {concurrency}")
    axis.legend()
    axis.set_title(title, fontsize=7)
    return _save(figure, folder, f"{prefix}-round-c{concurrency}.png")
