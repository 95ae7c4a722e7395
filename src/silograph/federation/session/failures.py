"""Why silos are not there, how often their answers could not be used, and who is left out."""

from collections import Counter
from collections.abc import Mapping, Sequence

from silograph.core.errors import ProtocolError
from silograph.federation.base import AwayError
from silograph.federation.session.events import Cause

# A stream that ends and a slow silo are no lies: silos come back from both.
COUNTED = (Cause.GARBAGE, Cause.NOT_FINITE, Cause.REFUSED)


class Failures:
    """Knows why silos are not there, and counts their failures.

    Args:
        most: after so many a silo is left out for good; None: it never is.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._counts: Counter[str] = Counter()
        self._left_out: dict[str, str] = {}
        self._reasons: dict[str, str] = {}  # why silos are not there
        self._gone: set[str] = set()  # those of them that may come back

    @property
    def left_out(self) -> Mapping[str, str]:
        """Why silos are left out for good, by their names."""
        return self._left_out

    def add(self, name: str, reason: str, cause: Cause) -> str | None:
        """Take in that a silo was dropped; return why it is left out from here on, if it is."""
        self._reasons[name] = reason
        if cause is Cause.GONE:
            self._gone.add(name)
        self._counts[name] += cause in COUNTED
        if self._most is None or self._counts[name] < self._most or name in self._left_out:
            return None
        self._reasons[name] = self._left_out[name] = (
            f"left out after {self._most} failures, the last one: {reason}"
        )
        return self._left_out[name]

    def unfit(self, name: str, reason: str, cause: Cause) -> None:
        """Take in that a silo is back, but cannot take part."""
        if cause is not Cause.GONE:
            self._reasons[name] = reason
            self._gone.discard(name)

    def back(self, name: str) -> None:
        """Take in that a silo takes part again."""
        self._reasons.pop(name, None)
        self._gone.discard(name)

    def check_back(self, names: Sequence[str], needed: int) -> None:
        """Raise `ProtocolError` where fewer silos than are needed may still come back."""
        if sum(name in self._gone for name in names) < needed:
            lost = "; ".join(f"{n}: {self._reasons[n]}" for n in names if n in self._reasons)
            raise ProtocolError(f"expected silos to come back with their states, got {lost}")

    def of_call(self, op: str, names: Sequence[str], clients: int) -> ProtocolError:
        """Return the error for silos that a call misses which needs all."""
        line = f"expected all silos to answer {op}, whose replies are no sums, got none from "
        return self.lacking(line, names, len(names), clients, summable=False)

    def lacking(
        self, line: str, names: Sequence[str], needed: int, clients: int, *, summable: bool = True
    ) -> ProtocolError:
        """Return the error for silos that are missing.

        Args:
            line: what was expected, for the message.
            names: of the silos that are missing.
            needed: how many of them must come back.
            clients: number of silos of the run.
            summable: whether the run can go on without some of its silos.
        """
        line += "; ".join(f"{name}: {self._reasons.get(name, 'not there')}" for name in names)
        gone = [name for name in names if name in self._gone]
        if len(gone) >= needed:
            return AwayError(line, gone, needed)
        failed = [name for name in names if name not in self._gone]
        return ProtocolError(line + how_to_go_on(failed, clients - len(failed), summable=summable))


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
