"""What limits the clients of a round: a budget, least clients a round, least selections in total.

Xu et al., "FedACS", 2025, equation 13. All clients of a round cost the same, and what they cost is
known before the round; so limits are about numbers of clients, and are kept before the fact.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from silograph.core.key import Key
from silograph.selection.ranking import drawn


@dataclass(frozen=True)
class SelectionLimits:
    """How many clients the rounds from here on may and must have.

    Attributes:
        clients: N, of the federation.
        least: L, in a round.
        affordable: selections that the budget pays for from here on; None: no budget.
        lacking: selections that are still needed, from here on.
        rounds: that are left.
    """

    clients: int
    least: int
    affordable: int | None
    lacking: int
    rounds: int

    @property
    def most(self) -> int:
        """Clients that the next round may have at most."""
        return self.clients if self.affordable is None else min(self.clients, self.affordable)

    @property
    def most_in_all(self) -> int:
        """Selections that all rounds together may have at most."""
        if self.affordable is None:
            return self.clients * self.rounds
        fitting = min(self.rounds, self.affordable // self.least)
        return min(self.affordable, self.clients * fitting)

    @property
    def can_be_met(self) -> bool:
        """Whether there are rounds of L to N clients that together are enough and not too many."""
        if self.lacking <= 0:
            return True
        fewest = -(-self.lacking // self.clients)
        if self.affordable is None:
            return fewest <= self.rounds
        enough = self.lacking <= self.affordable
        return enough and fewest <= min(self.rounds, self.affordable // self.least)

    def after(self, number: int) -> "SelectionLimits":
        """Return what is left after a round of `number` clients."""
        left = None if self.affordable is None else self.affordable - number
        return replace(self, affordable=left, lacking=self.lacking - number, rounds=self.rounds - 1)

    def number(self, wanted: int) -> int | None:
        """Return the number of clients nearest to `wanted` that keeps the limits.

        None: the round is not started. That is where the budget does not pay for the clients that
        the selector wants; while selections are lacking it gets fewer. Where silos were away and
        selections cannot be met any more, what remains is kept.
        """
        wanted = max(wanted, self.least)
        if self.lacking <= 0:
            return wanted if wanted <= self.most else None
        if self.most < self.least:
            return None
        every = range(self.least, self.most + 1)
        kept = [number for number in every if self.after(number).can_be_met] or [*every]
        return min(kept, key=lambda number: (abs(number - wanted), number))


def resized(chosen: Sequence[str], ids: Sequence[str], number: int, key: Key) -> list[str]:
    """Return `number` clients: some of the chosen ones, or others besides, drawn uniformly."""
    if number <= len(chosen):
        return drawn(chosen, number, key)
    others = drawn([name for name in ids if name not in set(chosen)], number - len(chosen), key)
    both = {*chosen, *others}
    return [name for name in ids if name in both]
