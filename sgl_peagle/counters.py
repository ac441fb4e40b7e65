"""What the plugin counts itself, beside SGLang's acceptance metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Running totals of one scheduler process.

    SGLang counts k proposals in every round. After a prefill whose backend cannot draft with masks, k-1 of a
    request's first proposals are filler (the MASK id, which the target never chooses); they are left out here.

    Attributes:
        k: Draft tokens per round.
        rounds: Verified rounds, summed over requests.
        accepted: Drafts that the target agreed with.
        filler: Proposals that were no drafts.
    """

    k: int
    rounds: int = 0
    accepted: int = 0
    filler: int = 0

    def verified(self, num_correct_drafts: list[int]) -> None:
        """One verify batch: correct drafts (0..k) of each request."""
        self.rounds += len(num_correct_drafts)
        self.accepted += sum(num_correct_drafts)

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
