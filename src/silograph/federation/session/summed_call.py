"""The server's half of secure sums in a session; see `summed_reply` for that of a silo."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Shared
from silograph.core.work import Meter
from silograph.federation.frame import Envelope, decode, encode
from silograph.federation.ledger import Account
from silograph.federation.secure.protocol import ServerSum
from silograph.federation.secure.revealed import allowed_silos
from silograph.federation.secure.sums import Layout, reply_of_total
from silograph.federation.secure.totals import check_bounds
from silograph.federation.secure.wire import (
    all_keys_payload,
    holders_of,
    read_confirmed,
    read_dealt,
    read_keys,
    read_masked,
    read_revealed,
    shares_payload,
    states_payload,
    tags_payload,
)
from silograph.federation.session.message import Type, read_reply
from silograph.federation.session.summed_reply import STEPS as ANSWERS
from silograph.federation.session.summed_reply import name_of_sum

STEPS = {
    Type.SHARE: Kind.KEYS,
    Type.MASK: Kind.SHARES,
    Type.CONFIRM: Kind.MASKS,
    Type.UNMASK: Kind.MASKS,
}
AROUND = 2**12  # bytes around a frame of an answer


class SummedCall:
    """Adds up the replies of silos to one call.

    Args:
        answer: envelope of the replies.
        layout: of their values.
        called: the silos.
        earlier: those of each earlier sum of the same call.
    """

    def __init__(
        self,
        answer: Envelope,
        layout: Layout,
        called: Sequence[str],
        earlier: Sequence[frozenset[str]] = (),
    ) -> None:
        self._answer, self._layout = answer, layout
        self._sum = ServerSum(name_of_sum(answer), called=tuple(called))
        self._earlier = list(earlier)
        self._meters: dict[str, Meter] = {}
        self._down: dict[Kind, dict[str, int]] = {Kind.KEYS: {}, Kind.SHARES: {}, Kind.MASKS: {}}
        self._up: dict[Kind, dict[str, int]] = {kind: {} for kind in (*self._down, answer.kind)}

    @property
    def threshold(self) -> int:
        """How many silos must be there to the end."""
        return self._sum.threshold

    @property
    def tolerance(self) -> int:
        """How many silos are not believed about another one."""
        return self._sum.tolerance

    @property
    def present(self) -> list[str]:
        """Silos that have sent masked values."""
        return list(self._sum.present)

    @property
    def most(self) -> int:
        """Bytes that an answer may have."""
        shares = 2**8 * (1 + len(self._sum.keys))  # a row of shares has fewer
        return AROUND + max(8 * self._layout.size, shares)

    def take_keys(self, name: str, body: bytes | memoryview) -> Meter:
        """Take a silo's answer to the call; return its work.

        Raises:
            ProtocolError: it is another one.
        """
        meter, frame = read_reply(body)
        self._sum.add_keys(name, *read_keys(self._read(frame, Kind.KEYS)))
        self._meters[name] = meter
        self._up[Kind.KEYS][name] = len(frame)
        return meter

    def silos_in(self, step: Type) -> list[str]:
        """Return the silos that take part in a step."""
        parts: dict[Type, Iterable[str]] = {
            Type.SHARE: self._sum.keys,
            Type.MASK: self._sum.dealt,
            Type.CONFIRM: self._sum.present,
        }
        return list(parts.get(step, self._sum.confirmed))

    def allowed(self, names: Sequence[str]) -> list[str]:
        """Return whose values may be added up, out of those that are there; nobody's: none may.

        Silos refuse sums of other silos than an earlier one of the same values.
        """
        return allowed_silos(list(names), self._earlier) or []

    def nearest_earlier(self, names: Sequence[str]) -> frozenset[str]:
        """Return the silos of the earlier sum of which the fewest are not there."""
        return min(self._earlier, key=lambda silos: len(silos - set(names)))

    def check_holders(self) -> None:
        """Raise `SumError` where too few silos can help to unmask; see `ServerSum`."""
        self._sum.check_holders()

    @property
    def revealed(self) -> list[str]:
        """Silos that have taken the last step."""
        return list(self._sum.revealed)

    def request(self, step: Type, name: str) -> bytes:
        """Return the message of a step to a silo."""
        silos, seed = self._sum.silos, self._sum.seed
        holders = holders_of(name, silos, seed)
        payload: Payload
        if step is Type.SHARE:
            payload = all_keys_payload(name, silos, self._sum.keys_for(name), seed)
        elif step is Type.MASK:
            payload = shares_payload(self._sum.shares_for(name), holders)
        elif step is Type.CONFIRM:
            payload = states_payload(self._sum.states)
        else:
            payload = tags_payload(self._sum.tags_for(name), holders)
        frame = encode(replace(self._answer, kind=STEPS[step]), payload, 0)
        sizes = self._down[STEPS[step]]
        sizes[name] = sizes.get(name, 0) + len(frame)
        return frame

    def take(self, step: Type, name: str, frame: bytes | memoryview) -> None:
        """Take a silo's answer to a step.

        Raises:
            ProtocolError: it is another one, or wrong.
        """
        holders = holders_of(name, self._sum.silos, self._sum.seed)
        kind = ANSWERS[step] or self._answer.kind
        payload = self._read(frame, kind)
        if step is Type.SHARE:
            with_keys = [recipient for recipient in holders if recipient in self._sum.keys]
            self._sum.add_shares(name, read_dealt(payload, with_keys))
        elif step is Type.MASK:
            self._sum.add_masked(name, read_masked(payload, self._layout.size))
        elif step is Type.CONFIRM:
            self._sum.add_confirmed(name, read_confirmed(payload, holders))
        else:
            revealed = read_revealed(payload, *self._sum.request_for(name), holders)
            self._sum.add_revealed(name, revealed)
        sizes = self._up[kind]
        sizes[name] = sizes.get(name, 0) + len(frame)

    def _read(self, frame: bytes | memoryview, kind: Kind) -> Payload:
        envelope, payload = decode(frame)
        if envelope != replace(self._answer, kind=kind):
            raise ProtocolError(
                f"expected {kind} of the sum of {self._answer.op}, got {envelope.kind} of "
                f"{envelope.op}"
            )
        return payload

    def result(self) -> dict[str, Shared]:
        """Return the reduced reply.

        Raises:
            SumError: see `ServerSum.unmask`.
            ProtocolError: totals that as many silos cannot have.
        """
        total = self._sum.unmask()
        check_bounds(total, self._layout, len(self._sum.present))
        return reply_of_total(total, self._layout)

    def record(self, account: Account, positions: Mapping[str, int]) -> None:
        """Record all messages in the ledger; `positions`: of the silos in the federation."""

        def places(sizes: Mapping[str, int]) -> tuple[Tensor, np.ndarray]:
            own = torch.tensor([positions[name] for name in sizes], dtype=torch.int64)
            return own, np.array(list(sizes.values()), dtype=np.int64)

        own, sizes = places(self._up[self._answer.kind])
        works = [self._meters[name].totals() for name in self._up[self._answer.kind]]
        account.up(self._answer, own, sizes, np.zeros_like(sizes), works)
        for kind, down in self._down.items():
            envelope = replace(self._answer, kind=kind)
            account.down(envelope, *places(down))
            account.answered(envelope, *places(self._up[kind]))
