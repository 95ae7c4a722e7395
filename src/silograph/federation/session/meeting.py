"""Before training: silos show themselves, and the server finds out who answers for what."""

import secrets
from collections.abc import Mapping
from dataclasses import replace

from silograph.core.errors import DataError, ProtocolError
from silograph.federation.frame import decode
from silograph.federation.joining.hello_payload import from_payload
from silograph.federation.joining.matching import (
    NONCE_BYTES,
    Agreement,
    Disagreement,
    Hello,
    match,
)
from silograph.federation.session.limits import MOST_HELLO
from silograph.federation.session.message import Type, explain_body, facts_body
from silograph.federation.session.peer import LostError, Peer
from silograph.federation.session.responder import HELLO
from silograph.graph.block.halo import Route


def agree(peers: Mapping[str, Peer], seconds: float | None) -> tuple[Agreement, Route]:
    """Let the silos, in the federation's order, agree on features, labels and edges.

    Raises:
        DataError: they do not; where it is edges, the silo itself has told its people which.
        ProtocolError: a silo does not answer, or shows what no data can give.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    for peer in peers.values():
        peer.send(Type.JOIN, facts_body({"nonce": nonce.hex()}), MOST_HELLO)
    found = match([_hello(name, peer, seconds) for name, peer in peers.items()])
    if found.route is None:
        for each in found.disagreements:
            _explain(peers[each.silo], nonce, each, seconds)
        first = found.disagreements[0]
        raise DataError(f"{first}: {first.silo} itself says which, where it was started")
    return found, found.route


def _hello(name: str, peer: Peer, seconds: float | None) -> Hello:
    try:
        envelope, payload = decode(peer.answer(Type.JOINED, seconds))
        if envelope != HELLO:
            raise ProtocolError(f"expected the hello of a silo, got a frame of {envelope.op}")
        said = from_payload(payload)
    except ProtocolError as error:
        raise ProtocolError(f"{name}: {error}") from None
    return replace(said, name=name)  # the one that it has proved to be


def _explain(peer: Peer, nonce: bytes, about: Disagreement, seconds: float | None) -> None:
    names = {"silo": about.silo, "other": about.other}
    facts = {"nonce": nonce.hex(), **names, "absent": about.absent}
    try:
        peer.send(Type.EXPLAIN, explain_body(facts, about.tags))
        peer.answer(Type.DONE, seconds)
    except LostError:  # what is wrong is told all the same
        return
