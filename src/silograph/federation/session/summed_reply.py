"""A silo's half of secure sums in a session: the reply is stored, masked and sent in steps.

Once the op of a call has run, the silo answers with public keys in place of the reply. The server
then asks for shares, masked values and what unmasks their sum, each once and in order. A call that
comes in between ends the sum, and the stored reply is never sent.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from silograph.core.errors import ProtocolError, mistake
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Shared
from silograph.federation.frame import Envelope
from silograph.federation.program import digest_of_fields
from silograph.federation.secure.protocol import Dealt, Prover, SiloSum
from silograph.federation.secure.sums import SecureSums, layout_of_reply, vector_of
from silograph.federation.secure.wire import (
    dealt_payload,
    holders_of,
    keys_payload,
    masked_payload,
    read_all_keys,
    read_request,
    read_shares,
    revealed_payload,
)
from silograph.federation.session.message import Type
from silograph.federation.session.private_reply import PrivateReplies

STEPS = {Type.SHARE: Kind.SHARES, Type.MASK: None, Type.UNMASK: Kind.MASKS}


def name_of_sum(envelope: Envelope) -> bytes:
    """Return what names a sum within its run."""
    return f"{envelope.round} {envelope.step} {envelope.op}".encode()


class SummedReply:
    """One reply of a silo that is summed.

    Args:
        name: of the silo.
        envelope: of the reply.
        reply: as the op has returned it, checked.
        by: field with the weights of a mean; "" of a sum.
        sums: what was agreed.
        run: names the run.
        inbox: what the silo was called with.
        private: adds the silo's share of noise; None: the reply leaves without.

    Raises:
        ProtocolError: values beyond the bounds of fixed point.
    """

    def __init__(
        self,
        name: str,
        envelope: Envelope,
        reply: Payload,
        by: str,
        sums: SecureSums,
        run: bytes,
        inbox: Payload,
        private: PrivateReplies | None = None,
    ) -> None:
        layout = layout_of_reply(reply, envelope.kind, by, sums.silos)
        self._name, self._envelope = name, envelope
        self._about = name_of_sum(envelope)
        self._reply, self._inbox, self._layout, self._private = reply, inbox, layout, private
        self._values: np.ndarray = vector_of(reply, 0, layout)
        self._silos: list[str] = []
        self._seed = b""  # of the noise
        self._everyone = False  # whether all silos of the sum have dealt shares
        # Keys prove what was asked, too: a server that asks one silo for another encoding, or
        # gives it other weights, could tell its part of the sum from that of the others.
        shared = {n: field for n, field in inbox.items() if isinstance(field, Shared)}
        request = repr((layout, sums.silos)).encode() + digest_of_fields(shared)
        prover = Prover(sums.secret, run + request, is_strict=sums.needs_proofs)
        self._sum = SiloSum(name, self._about, sums.least, prover)
        self._holders: list[str] = []

    def keys(self) -> tuple[Envelope, Payload]:
        """Return the answer to the call: public keys."""
        return replace(self._envelope, kind=Kind.KEYS), keys_payload(self._sum.advertise())

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
            self._silos, keys = read_all_keys(payload, self._name, self._about)
            silos = self._silos
            self._holders = holders_of(self._name, silos, self._about)
            return answer, dealt_payload(self._sum.share(keys, silos))
        if kind is Type.MASK:
            return answer, masked_payload(self._mask(read_shares(payload, self._holders)))
        present, vanished = read_request(payload, self._holders)
        revealed = self._sum.reveal(present, vanished)
        if self._private is not None:
            everyone = self._everyone and not vanished
            self._private.check_reveal(self._envelope.round, self._seed, everyone=everyone)
        return answer, revealed_payload(revealed, self._holders)

    def _mask(self, dealt: Mapping[str, Dealt]) -> np.ndarray:
        """Return masked values, with the silo's share of noise where there is any."""
        if self._private is not None:
            self._everyone = len(dealt) + 1 == len(self._holders)
            noised, self._seed = self._private.with_share(
                self._envelope, self._inbox, self._reply, self._silos
            )
            self._values = vector_of(noised, 0, self._layout)
        return self._sum.mask(self._values, dealt)
