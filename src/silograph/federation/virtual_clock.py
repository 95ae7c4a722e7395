"""The virtual clock: what a run would take at clients of given speeds and links.

It is a model and no measurement: a pure function of the ledger, so a seed gives one time, on every
machine and engine. A client needs for a call

    work / speed + (bytes down + bytes up) / bandwidth + latency

and a call takes as long as its slowest client; calls follow each other. What is left out: the
server's own work, links that are shared, clients that are slower at some times than at others, and
everything for evaluation, which a run does to be looked at.

C: clients.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from silograph.core.kinds import Kind
from silograph.federation.ledger import Ledger, Record


@dataclass(frozen=True, eq=False)
class VirtualClock:
    """Speeds and links of all clients.

    Attributes:
        speed: (C,) float64 floating-point operations a second.
        bandwidth: (C,) float64 bytes a second, both directions together.
        latency: (C,) float64 seconds for each call.
    """

    speed: np.ndarray
    bandwidth: np.ndarray
    latency: np.ndarray

    def seconds(self, records: Iterable[Record]) -> float:
        """Return the virtual seconds of calls, one after the other."""
        return float(sum(call.max() for call in self._calls(records)))

    def by_client(self, records: Iterable[Record]) -> np.ndarray:
        """Return the virtual seconds that each client takes by itself, (C,) float64."""
        total = np.zeros(len(self.speed))
        for call in self._calls(records):
            total += call
        return total

    def _calls(self, records: Iterable[Record]) -> Iterator[np.ndarray]:
        """Yield the seconds of each client in every call, (C,)."""
        training = (record for record in records if record.what is not Kind.EVALUATION)
        for _, call in itertools.groupby(training, lambda record: (record.round, record.step)):
            work, sizes = np.zeros(len(self.speed)), np.zeros(len(self.speed))
            called = np.zeros(len(self.speed), dtype=bool)
            for record in call:
                work[record.clients] += record.flops
                sizes[record.clients] += record.bytes
                called[record.clients] = True
            yield work / self.speed + sizes / self.bandwidth + called * self.latency


def records_of_last_round(ledger: Ledger, t: int) -> Sequence[Record]:
    """Return the records of a round, which is the ledger's last; none if it made no call."""
    number = len(ledger)
    while number and ledger.since(number - 1)[0].round == t:
        number -= 1
    return ledger.since(number)
