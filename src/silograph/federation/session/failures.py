"""Silos whose answers cannot be used: how often, why, and who is left out of the run for good."""

from collections import Counter
from collections.abc import Mapping, Sequence

from silograph.federation.session.events import Cause

# A stream that ends and a slow silo are no lies: silos come back from both.
COUNTED = (Cause.GARBAGE, Cause.NOT_FINITE, Cause.REFUSED)


class Failures:
    """Counts the failures of silos.

    Args:
        most: after so many a silo is left out for good; None: it never is.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._counts: Counter[str] = Counter()
        self._left_out: dict[str, str] = {}

    @property
    def left_out(self) -> Mapping[str, str]:
        """Why silos are left out for good, by their names."""
        return self._left_out

    def add(self, name: str, reason: str, cause: Cause) -> str | None:
        """Count a failure; return why the silo is left out from here on, if it is."""
        self._counts[name] += cause in COUNTED
        if self._most is None or self._counts[name] < self._most or name in self._left_out:
            return None
        self._left_out[name] = f"left out after {self._most} failures, the last one: {reason}"
        return self._left_out[name]


def how_to_go_on(names: Sequence[str], others: int, *, summable: bool) -> str:
    """Return how a run can be continued that stops because silos have failed.

    Args:
        names: of the silos that do not come back by themselves.
        others: silos that are left.
        summable: whether the run can go on without some of its silos.
    """
    if not names:
        return ""
    who = " and ".join(names)
    if not summable or not others:
        return f"; every silo is needed here: mend {who}, then resume the run with --resume"
    return f"; to resume the run without {who}: --resume with --least {others}"
