"""Streams to a hub on which anything can be said."""

import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import grpc

from sessions import TOKEN
from silograph.federation.session.hub import PROTOCOL, Hub, Joined
from silograph.federation.session.identity import SiloKey, signed_text
from silograph.federation.session.message import NO_TOKEN, Message, Type, facts_body, pack, unpack
from silograph.federation.session.wire import OPTIONS, PATH


def until(is_so: Callable[[], bool]) -> None:
    """Wait for what comes for sure."""
    limit = time.monotonic() + 600
    while not is_so():
        assert time.monotonic() < limit
        time.sleep(0.02)


class Raw:
    """A stream on which anything can be said."""

    def __init__(self, hub: Hub, token: bytes = TOKEN) -> None:
        self.token = token
        self.channel = grpc.insecure_channel(hub.address, options=OPTIONS)
        self.out: SimpleQueue[bytes | None] = SimpleQueue()
        self.call = self.channel.stream_stream(PATH)(iter(self.out.get, None))

    def say(self, kind: Type, token: bytes = NO_TOKEN, **facts: Any) -> None:
        self.out.put(pack(Message(kind, token, 0, facts_body(facts))))

    def hear(self) -> Message:
        return unpack(next(self.call))

    def greet(
        self, name: str, key: SiloKey, *, signer: SiloKey | None = None, **other: Any
    ) -> Message:
        """Attach as a silo does and return the server's verdict."""
        said = {"name": name, "key": key.public.hex(), "protocol": PROTOCOL, **other}
        self.say(Type.HELLO, **said)
        nonce = bytes.fromhex(self.hear().facts()["nonce"])
        signature = (signer or key).sign(signed_text(self.token, nonce, name, ""))
        self.say(Type.PROOF, self.token, signature=signature.hex(), host="")
        return self.hear()

    def close(self) -> None:
        self.out.put(None)
        self.call.cancel()
        self.channel.close()


def joined(hub: Hub) -> Joined:
    found = hub.next(600)
    assert found is not None
    return found


def refusal(message: Message) -> str:
    assert message.type is Type.REFUSED
    return str(message.facts()["reason"])
