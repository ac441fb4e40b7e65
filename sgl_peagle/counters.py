"""What the plugin counts itself, beside SGLang's acceptance metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Counters:
    """Running totals of one scheduler process, and their Prometheus counters.

    SGLang counts k proposals in every round. After a prefill whose backend cannot draft with masks, k-1 of a
    request's first proposals are filler (the MASK id, which the target never chooses); they are left out here.

    Attributes:
        k: Draft tokens per round.
        labels: Prometheus labels; None where this process exports nothing.
        rounds: Verified rounds, summed over requests.
        accepted: Drafts that the target agreed with.
        filler: Proposals that were no drafts.
    """

    k: int
    labels: dict[str, str] | None = None
    rounds: int = 0
    accepted: int = 0
    filler: int = 0
    _exported: dict[str, Any] = field(default_factory=dict, repr=False)

    def verified(self, num_correct_drafts: list[int]) -> None:
        """One verify batch: correct drafts (0..k) of each request."""
        self.rounds += len(num_correct_drafts)
        self.accepted += sum(num_correct_drafts)
        self._export(
            rounds=len(num_correct_drafts),
            draft_tokens=len(num_correct_drafts) * self.k,
            accepted_draft_tokens=sum(num_correct_drafts),
        )

    def skipped(self, requests: int) -> None:
        """Requests whose first k-1 proposals behind the first are filler."""
        self.filler += requests * (self.k - 1)
        self._export(fallback_draft_tokens=requests * (self.k - 1))

    @property
    def drafts(self) -> int:
        """Real drafts proposed, filler excluded."""
        return max(0, self.rounds * self.k - self.filler)

    @property
    def acceptance_length(self) -> float:
        """Tokens gained per round, bonus included."""
        return 1.0 + self.accepted / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the real drafts."""
        return self.accepted / self.drafts if self.drafts else 0.0

    def _export(self, **amounts: int) -> None:
        if self.labels is None:
            return
        for name, amount in amounts.items():
            self._counter(name).inc(amount)

    def _counter(self, name: str) -> Any:
        if name not in self._exported:
            # Imported late: prometheus_client fixes its multiprocess folder at import, and SGLang sets it at start-up.
            from prometheus_client import Counter

            help_text = {
                "rounds": "Verified rounds, summed over requests.",
                "draft_tokens": "Proposed tokens, filler included.",
                "accepted_draft_tokens": "Draft tokens that the target agreed with.",
                "fallback_draft_tokens": "Proposed tokens that were filler, because the prefill could not draft.",
            }[name]
            counter = Counter(f"sgl_peagle:{name}", help_text, list(self.labels))
            self._exported[name] = counter.labels(**self.labels)
        return self._exported[name]
