"""Heads of audits that silos sign, and that a server sends to the other silos.

The head of an audit is the hash of its last line. A silo that has signed it cannot deny
it later, and whoever has stored it can tell whether the file was changed or cut short.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from silograph.core.errors import FrameError
from silograph.federation.session.events import Event, EventCallback, What
from silograph.federation.session.identity import NAME, SiloKey, is_signed
from silograph.federation.session.message import Type, facts_body, object_of
from silograph.federation.session.peer import LostError, Peer

PURPOSE = b"silograph audit head 1\0"
SECONDS = 10.0  # for which the server waits for each answer
FIELDS = ("name", "head", "key", "version", "signature")


@dataclass(frozen=True)
class SignedHead:
    """The head of an audit, signed by its silo.

    Attributes:
        name: of the silo.
        head: hash of the last line, in hexadecimal.
        public: key of the silo, 32 bytes.
        version: of the key.
        signature: 64 bytes.
    """

    name: str
    head: str
    public: bytes
    version: int
    signature: bytes

    @property
    def is_valid(self) -> bool:
        """Whether the signature is of this key, silo and head."""
        return is_signed(self.public, self.signature, head_text(self.name, self.head))

    def to_facts(self) -> dict[str, Any]:
        """Return the head as values of JSON."""
        keys = {"key": self.public.hex(), "version": self.version}
        return {"name": self.name, "head": self.head, **keys, "signature": self.signature.hex()}

    @staticmethod
    def of(facts: object) -> "SignedHead":
        """Return the head of values of JSON; raise `FrameError` unless they are one."""
        match facts:
            case {
                "name": str(name),
                "head": str(head),
                "key": str(key),
                "version": int(version),
                "signature": str(signature),
            } if (
                NAME.fullmatch(name)
                and re.fullmatch("[0-9a-f]{64}", head)
                and re.fullmatch("[0-9a-f]{64}", key)
                and re.fullmatch("[0-9a-f]{128}", signature)
                and type(version) is int
                and 0 < version < 2**31
            ):
                signed = bytes.fromhex(key), version, bytes.fromhex(signature)
                return SignedHead(name, head, *signed)
        raise FrameError("expected a signed head of an audit, got something else")


def head_text(name: str, head: str) -> bytes:
    """Return the text that a silo signs."""
    return PURPOSE + name.encode() + b"\0" + head.encode()


@dataclass(frozen=True, eq=False)
class HeadSigner:
    """Signs heads of a silo's audit.

    Attributes:
        name: of the silo.
        key: its own.
        version: of the key.
    """

    name: str
    key: SiloKey
    version: int = 1

    def sign(self, head: str) -> SignedHead:
        """Return a head (64 hexadecimal digits) with the silo's signature."""
        signature = self.key.sign(head_text(self.name, head))
        return SignedHead(self.name, head, self.key.public, self.version, signature)


def read_heads(facts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the valid heads that a server hands on, by silo, as they are written down.

    Raises:
        FrameError: there are none, or one of them is no signed head.
    """
    heads = facts.get("heads")
    if not isinstance(heads, list):
        raise FrameError("expected signed heads of audits, got something else")
    signed = [SignedHead.of(each) for each in heads]
    return {each.name: each.to_facts() for each in signed if each.is_valid}


# --- At the server -------------------------------------------------------------------------------


def share_heads(peers: Mapping[str, Peer], report: EventCallback) -> None:
    """Ask all silos for the signed heads of their audits, and send all of them to each silo.

    Args:
        peers: silos that have agreed to the run.
        report: gets the events; a silo without an audit, or that is gone, is left out.
    """
    for peer in peers.values():
        peer.send(Type.HEAD, facts_body({}))
    heads = []
    for peer in peers.values():
        try:
            signed = SignedHead.of(object_of(peer.answer(Type.DONE, SECONDS)))
            if signed.name != peer.name or not signed.is_valid:
                raise FrameError("expected its own signed head, got another")
        except (LostError, FrameError) as error:
            report(Event(What.NOTE, peer.name, note=f"no audit head of {peer.name}: {error}"))
            continue
        heads.append(signed.to_facts())
    for peer in peers.values():
        peer.send(Type.HEADS, facts_body({"heads": heads}))
    num_silos = 0
    for peer in peers.values():
        try:
            peer.answer(Type.DONE, SECONDS)
            num_silos += 1
        except LostError as error:
            report(Event(What.NOTE, peer.name, note=f"{peer.name} has no audit heads: {error}"))
    note = f"signed heads of {len(heads)} audits are at {num_silos} silos"
    report(Event(What.NOTE, note=note))
