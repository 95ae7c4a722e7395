"""A silo's half of secure sums in a session: the reply is stored, masked and sent in steps.

Once the op of a call has run, the silo answers with public keys in place of the reply. The server
then asks for shares, masked values, a confirmation of who is there and what unmasks their sum, each
once and in order. A call that comes in between ends the sum, and the stored reply is never sent.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from silograph.core.errors import ProtocolError, mistake
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Shared
from silograph.federation.frame import Envelope
from silograph.federation.program import digest_of_fields
from silograph.federation.secure.protocol import PRESENT, Dealt, Prover, SiloSum
from silograph.federation.secure.revealed import RevealedSums
from silograph.federation.secure.sums import SecureSums, layout_of_reply, vector_of
from silograph.federation.secure.wire import (
    confirmed_payload,
    dealt_payload,
    holders_of,
    keys_payload,
    masked_payload,
    read_all_keys,
    read_shares,
    read_states,
    read_tags,
    revealed_payload,
)
from silograph.federation.session.message import Type
from silograph.federation.session.private_reply import PrivateReplies

STEPS = {
    Type.SHARE: Kind.SHARES,
    Type.MASK: None,
    Type.CONFIRM: Kind.MASKS,
    Type.UNMASK: Kind.MASKS,
}


def name_of_sum(envelope: Envelope) -> bytes:
    """Return what names a sum within its run."""
    return f"{envelope.round} {envelope.step} {envelope.op}".encode()


@dataclass(frozen=True, eq=False)
class SumContext:
    """How a silo takes part in a sum.

    Attributes:
        name: of the silo.
        run: names the run.
        called: digest of the names of all silos that are called.
        sums: what was agreed.
        history: of the sums that the silo has helped to unmask in the run.
    """

    name: str
    run: bytes
    called: bytes
    sums: SecureSums
    history: RevealedSums


class SummedReply:
    """One reply of a silo that is summed.

    Args:
        context: how the silo takes part.
        envelope: of the reply.
        reply: as the op has returned it, checked.
        by: field with the weights of a mean; "" of a sum.
        inbox: what the silo was called with.
        private: adds the silo's share of noise; None: the reply leaves without.

    Raises:
        ProtocolError: values beyond the bounds of fixed point.
    """

    def __init__(
        self,
        context: SumContext,
        envelope: Envelope,
        reply: Payload,
        by: str,
        inbox: Payload,
        private: PrivateReplies | None = None,
    ) -> None:
        sums = context.sums
        layout = layout_of_reply(reply, envelope.kind, by, sums.silos)
        self._name, self._envelope = context.name, envelope
        self._about = name_of_sum(envelope)
        self._reply, self._inbox, self._layout, self._private = reply, inbox, layout, private
        self._values: np.ndarray = vector_of(reply, 0, layout)
        self._noise_seed = b""
        self._everyone = False  # whether all silos of the sum have dealt shares
        # Keys prove what was asked, too: a server that asks one silo for another encoding, or
        # gives it other weights, could tell its part of the sum from that of the others.
        shared = {n: field for n, field in inbox.items() if isinstance(field, Shared)}
        request = repr((layout, sums.silos)).encode() + digest_of_fields(shared)
        about_run = context.run + context.called + request
        self._sum = SiloSum(
            context.name,
            self._about,
            sums.least,
            Prover(sums.secret, about_run, is_strict=sums.needs_proofs),
            called=context.called,
            history=context.history,
        )
        self._silos: list[str] = []
        self._most_silos = sums.silos
        self._holders: list[str] = []

    def keys(self) -> tuple[Envelope, Payload]:
        """Return the answer to the call: public keys."""
        keys = self._sum.advertise()
        return replace(self._envelope, kind=Kind.KEYS), keys_payload(keys, self._sum.seed)

    def answer(self, kind: Type, envelope: Envelope, payload: Payload) -> tuple[Envelope, Payload]:
        """Take a step; return the answer.

        Raises:
            ProtocolError: a message of another call, or a step out of order.
        """
        if replace(envelope, kind=self._envelope.kind) != self._envelope:
            raise ProtocolError(
                f"expected a step of the sum of {self._envelope.op}, got one of {envelope.op}",
                **mistake("call-not-agreed", envelope.round),
            )
        answer = replace(self._envelope, kind=STEPS[kind] or self._envelope.kind)
        if kind is Type.SHARE:
            self._silos, seed, keys = read_all_keys(payload, self._name)
            if len(self._silos) > self._most_silos:
                raise ProtocolError(
                    f"expected a sum over at most {self._most_silos} silos, as agreed, got one "
                    f"over {len(self._silos)}",
                    **mistake("call-not-agreed", envelope.round),
                )
            self._holders = holders_of(self._name, self._silos, seed)
            return answer, dealt_payload(self._sum.share(keys, self._silos, seed))
        if kind is Type.MASK:
            return answer, masked_payload(self._mask(read_shares(payload, self._holders)))
        if kind is Type.CONFIRM:
            states = read_states(payload, self._silos)
            confirmed = self._sum.confirm(states)
            self._everyone &= all(state == PRESENT for state in states.values())
            return answer, confirmed_payload(confirmed, self._holders)
        revealed = self._sum.reveal(read_tags(payload, self._holders))
        if self._private is not None:
            self._private.check_reveal(
                self._envelope.round, self._noise_seed, everyone=self._everyone
            )
        return answer, revealed_payload(revealed, self._holders)

    def _mask(self, dealt: Mapping[str, Dealt]) -> np.ndarray:
        """Return masked values, with the silo's share of noise where there is any."""
        if self._private is not None:
            self._everyone = len(dealt) + 1 == len(self._holders)
            noised, self._noise_seed = self._private.with_share(
                self._envelope, self._inbox, self._reply, self._silos
            )
            self._values = vector_of(noised, 0, self._layout)
        return self._sum.mask(self._values, dealt)
