"""What a sweep measures and in which order: engines, cells, acceptance lengths (pure, no SGLang)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterable, Optional

METHODS = ("none", "eagle3", "peagle")
K_VALUES = (1, 3, 5, 7, 10)
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)

#: The cells that must exist first: at these concurrencies, and these K.
FIRST_CONCURRENCIES = (1, 8, 64)
FIRST_K = (7, 3)

#: Mean acceptance lengths that the P-EAGLE blog publishes for HumanEval (GPT-OSS-20B, chain drafting).
PUBLISHED_AL: dict[str, dict[int, float]] = {"peagle": {3: 3.02, 7: 3.94}, "eagle3": {3: 2.65, 7: 3.03}}


@dataclass(frozen=True)
class Acceptance:
    """A simulated acceptance length and where it comes from."""

    length: float
    source: str


def _root(value: float, terms: range) -> float:
    """r in (0, 1] with ``sum(r**j for j in terms) == value``."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**j for j in terms) < value else (low, middle)
    return (low + high) / 2


def simulated_acceptance(method: str, k: int) -> Acceptance:
    """The acceptance length to simulate for a method at K.

    Published where the blog has it (K = 3 and 7). Between them linear. Below 3 and above 7 from chances of reaching a
    draft position that fall geometrically: with r from AL(3) = 1 + r + r^2 + r^3, and behind position 3 with q from
    AL(7) - AL(3) = r^3 (q + q^2 + q^3 + q^4).
    """
    published = PUBLISHED_AL[method]
    if k in published:
        return Acceptance(published[k], "published (P-EAGLE blog, HumanEval)")
    if 3 < k < 7:
        length = published[3] + (published[7] - published[3]) * (k - 3) / 4
        return Acceptance(round(length, 3), "interpolated between the published K=3 and K=7")
    r = _root(published[3], range(4))
    if k < 3:
        return Acceptance(round(sum(r**j for j in range(k + 1)), 3), "interpolated below the published K=3")
    q = _root((published[7] - published[3]) / r**3, range(1, 5))
    length = published[7] + r**3 * sum(q**j for j in range(5, k - 2))
    return Acceptance(round(length, 3), "extrapolated beyond the published K=7")


@dataclass(frozen=True)
class EngineSpec:
    """One engine: everything that needs a start of its own.

    Attributes:
        model: Name of the target's shape, or of the real target.
        method: ``none``, ``eagle3`` or ``peagle``.
        k: Drafts per round, 0 without speculation.
        vocab: Draft vocabulary: ``32k`` or ``full`` (``none`` without speculation, ``head`` for real heads).
        preset: Engine arguments: ``default`` or ``blog``.
        acceptance: Simulated acceptance, or None for real acceptance.
    """

    model: str
    method: str
    k: int
    vocab: str
    preset: str
    acceptance: Optional[Acceptance]

    @property
    def name(self) -> str:
        """Readable and unique within a sweep."""
        parts = [self.model, self.preset, self.method]
        return " ".join(parts + ([f"K={self.k}", f"vocab {self.vocab}"] if self.k else []))


def engines(
    model: str, methods: Iterable[str], ks: Iterable[int], vocabs: Iterable[str], preset: str, simulate: bool
) -> list[EngineSpec]:
    """All engines of a sweep, those that matter most first: by vocabulary as given, the K of ``FIRST_K``, then others."""
    methods, ks = list(methods), list(ks)
    ordered = [k for k in FIRST_K if k in ks] + [k for k in ks if k not in FIRST_K]
    found = [EngineSpec(model, "none", 0, "none", preset, None)] if "none" in methods else []
    for vocab in vocabs:
        for k in ordered:
            for method in methods:
                if method != "none":
                    acceptance = simulated_acceptance(method, k) if simulate else None
                    found.append(EngineSpec(model, method, k, vocab, preset, acceptance))
    return found


def ordered_concurrencies(values: Iterable[int]) -> list[int]:
    """The must-have concurrencies first."""
    values = list(values)
    return [c for c in FIRST_CONCURRENCIES if c in values] + [c for c in values if c not in FIRST_CONCURRENCIES]


def prompts_for(concurrency: int) -> int:
    """Requests of one timed batch: the concurrency stays saturated for about three waves, two at the large end."""
    return max(4, (3 if concurrency < 32 else 2) * concurrency)


def cell_key(cell: dict[str, Any]) -> tuple[Any, ...]:
    """What makes a cell the same cell in another run."""
    names = ("model", "preset", "method", "k", "draft_vocab_name", "concurrency", "input_tokens", "output_tokens")
    return tuple(cell[name] for name in (*names, "simulated_acceptance"))


def merged(reports: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Several reports as one; of cells measured twice the last good one counts."""
    reports = list(reports)
    cells: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number, report in enumerate(reports):
        for cell in report["cells"]:
            kept = cells.get(cell_key(cell))
            if kept is None or "error" not in cell or "error" in kept:
                cells[cell_key(cell)] = cell | {"environment_index": cell.get("environment_index", 0) + sum(
                    len(r["environments"]) for r in reports[:number]
                )}  # fmt: skip
    return {
        "environment": reports[0]["environment"],
        "environments": [e for report in reports for e in report["environments"]],
        "settings": [s for report in reports for s in report["settings"]],
        "engines": [e for report in reports for e in report["engines"]],
        "host_sync": [e for report in reports for e in report.get("host_sync", [])],
        "cells": list(cells.values()),
    }
