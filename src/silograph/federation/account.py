"""What every engine does around a call: number it, and write down what it cost."""

from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor

from silograph.core.kinds import Kind
from silograph.core.work import Meter
from silograph.federation.frame import Envelope
from silograph.federation.ledger import Direction, Ledger, Record


class Account:
    """Numbers calls and keeps the ledger.

    Args:
        clients: C, all clients of the federation.
        records: of an earlier part of the run.

    Attributes:
        ledger: what calls cost each client.
        executed: operations that were executed here, of all clients, without those of `records`.
    """

    def __init__(self, clients: int, records: Iterable[Record] = ()) -> None:
        self.ledger = Ledger(clients, records)
        self.executed = 0.0
        self._round = 0
        self._step = 0

    def start_round(self, number: int) -> None:
        """Say that the calls from here on belong to this round."""
        self._round, self._step = number, 0

    def open(self, op: str, what: Kind) -> Envelope:
        """Return the envelope of the next call."""
        self._step += 1
        return Envelope(op, what, self._round, self._step)

    def down(self, envelope: Envelope, positions: Tensor, sizes: np.ndarray) -> None:
        """Write down what was sent to the clients at `positions` (k,): frames of (k,) bytes."""
        clients = positions.numpy()
        self._record(envelope, envelope.kind, "down", clients, sizes, np.zeros(clients.shape))

    def up(
        self,
        envelope: Envelope,
        positions: Tensor,
        sizes: np.ndarray,
        counts: np.ndarray,
        meters: Sequence[Meter],
    ) -> None:
        """Write down what came back, and the work.

        Args:
            envelope: of the call.
            positions: (k,) of the clients that replied.
            sizes: (k,) bytes of their frames.
            counts: (k,) bytes of them that are scores of the received weights: evaluation, whatever
                the kind of the call.
            meters: cover the clients in their order.
        """
        found, clients = [meter.summed() for meter in meters], positions.numpy()
        self.executed += sum(executed for _, _, executed in found)
        work = np.concatenate([own for own, _, _ in found])
        self._record(envelope, envelope.kind, "up", clients, sizes - counts, work)
        kinds = {kind for meter in meters for kind in meter.apart}
        if counts.any():
            kinds.add(Kind.EVALUATION)
        for kind in sorted(kinds):
            none = (np.zeros(len(own)) for own, _, _ in found)
            parts = [by.get(kind, zeros) for (_, by, _), zeros in zip(found, none, strict=True)]
            size = counts if kind == Kind.EVALUATION else np.zeros(clients.shape, np.int64)
            self._record(envelope, kind, "up", clients, size, np.concatenate(parts))

    def _record(
        self,
        envelope: Envelope,
        kind: Kind,
        direction: Direction,
        clients: np.ndarray,
        sizes: np.ndarray,
        flops: np.ndarray,
    ) -> None:
        numbers = envelope.round, envelope.step
        self.ledger.append(Record(*numbers, envelope.op, kind, direction, clients, sizes, flops))
