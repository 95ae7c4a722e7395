"""Garbage over real streams, after the handshake: a silo that sends it, a server that sends it."""

import logging
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

grpc = pytest.importorskip("grpc")
pytest.importorskip("cryptography")

from sessions import TOKEN, FreeCourse, table, worker_of  # noqa: E402
from silograph.core.key import Key  # noqa: E402
from silograph.core.kinds import Kind  # noqa: E402
from silograph.core.payload import Payload, Shared, Stacked, State  # noqa: E402
from silograph.federation.base import Sum  # noqa: E402
from silograph.federation.frame import Envelope, decode, encode  # noqa: E402
from silograph.federation.session.attach import Attaching, take_part  # noqa: E402
from silograph.federation.session.engine import Session  # noqa: E402
from silograph.federation.session.events import Cause, log_event  # noqa: E402
from silograph.federation.session.hub import (  # noqa: E402
    Hub,
    StreamLink,
    say_goodbye,
)
from silograph.federation.session.identity import Register, SiloKey  # noqa: E402
from silograph.federation.session.message import (  # noqa: E402
    HEADER,
    CallBody,
    Type,
    call_body,
    qualified,
    read_reply,
    unpack,
)
from silograph.federation.session.peer import (  # noqa: E402
    Arrived,
    Limits,
    LostError,
    Peer,
    one_line,
)
from silograph.federation.session.responder import Responder  # noqa: E402
from silograph.graph.block.block import ClientBlock, Route  # noqa: E402
from silos import running  # noqa: E402
from streams import Raw, joined  # noqa: E402

Built = tuple[ClientBlock, Route]
Make = Callable[[bytes, random.Random], bytes]
KEY = Key.of(0)
CASES = 300
HUGE = (b"\xff" * 8, (2**62).to_bytes(8, "little"))
SCALE: Payload = {"scale": Shared(torch.tensor([2.0, 3.0]))}


def count(cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key) -> Any:
    n = state["n"].t + 1 if "n" in state else torch.ones(1)
    return {"n": Stacked(n)}, {"n": Stacked(n), "x": Stacked(n[:, None] * inbox["scale"].t)}


OPS = table(count)


def flipped(data: bytes, rng: random.Random) -> bytes:
    changed, bit = bytearray(data), rng.randrange(8 * len(data))
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def oversized(data: bytes, rng: random.Random) -> bytes:
    """Some eight bytes, that may be a length, become a number that nothing has."""
    start = rng.randrange(HEADER.size, len(data) - 8)
    return data[:start] + rng.choice(HUGE) + data[start + 8 :]


def of_type(data: bytes, rng: random.Random) -> bytes:
    """Another type of message, or one that there is not; END may be said by any server."""
    kind = rng.choice([n for n in range(256) if n not in (data[4], Type.END)])
    return data[:4] + bytes([kind]) + data[5:]


def renumbered(data: bytes, rng: random.Random) -> bytes:
    sequence = rng.choice([0, 1, 2**64 - 1, rng.randrange(2**64)])
    return data[:21] + sequence.to_bytes(8, "little") + data[HEADER.size :]


CHANGES: dict[str, Make] = {
    "flipped bit": flipped,
    "truncated": lambda data, rng: data[: rng.randrange(len(data))],
    "longer": lambda data, rng: data + rng.randbytes(rng.randrange(1, 99)),
    "oversized": oversized,
    "another type": of_type,
    "another number": renumbered,
    "another run": lambda data, rng: data[:5] + rng.randbytes(16) + data[21:],
    "noise": lambda data, rng: rng.randbytes(rng.randrange(200)),
}


class Fuzzer:
    """Attaches as a silo, again and again, and spoils its answers to calls while it is told to."""

    def __init__(self, hub: Hub, worker: Responder) -> None:
        self.change: Callable[[bytes], list[bytes]] = lambda data: [data]
        self._hub, self._worker, self._key = hub, worker, SiloKey.new()
        self.over = False

    def run(self) -> None:
        while not self.over:
            raw = Raw(self._hub)
            try:
                raw.greet("bad", self._key)
                self._worker.attach()
                for data in raw.call:
                    answer = self._worker.answer(data)
                    is_call = unpack(data).type is Type.CALL
                    for each in self.change(answer) if is_call else [answer]:
                        raw.out.put(each)
                    if self._worker.ended is not None:
                        self.over = True
            except grpc.RpcError:  # the server has ended the stream
                pass
            finally:
                raw.close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub("127.0.0.1:0", Register(None, 2), TOKEN, None, room=2)
    yield made
    made.close()


def peer_of(hub: Hub) -> Peer:
    found = joined(hub)
    peer = Peer(found.name, found.link, TOKEN)
    peer.ask(Type.START, {}, 30)
    return peer


def holding(hub: Hub, name: str, worker: Responder) -> Attaching:
    def make(token: bytes) -> Responder:
        assert token == TOKEN
        return worker

    return Attaching(name, SiloKey.new(), {}, hub.address, None, make, 30.0, log_event)


def test_a_silo_that_sends_garbage_is_left_out_and_the_run_goes_on(
    hub: Hub,
    make_graph: Callable[..., Any],
    cut_block: Callable[..., Built],
    caplog: pytest.LogCaptureFixture,
) -> None:
    block, route = cut_block(make_graph(20), 2)
    caplog.set_level(logging.WARNING, logger="silograph")
    workers = [worker_of(block.take(torch.tensor([c])), None, OPS) for c in (0, 1)]
    fuzzer = Fuzzer(hub, workers[1])
    rng, old = random.Random(7), [b""]

    def returned() -> dict[str, Peer]:
        return {} if "bad" in fed.peers else {"bad": peer_of(hub)}

    silo = threading.Thread(target=take_part, args=(holding(hub, "good", workers[0]),))
    silo.start()
    with running([fuzzer.run]):
        peers = {peer.name: peer for peer in (peer_of(hub), peer_of(hub))}
        fed = Session(
            {name: peers[name] for name in ("good", "bad")},
            route,
            OPS,
            FreeCourse(),
            dtype=torch.float32,
            limits=Limits(least=1, seconds=30),
            returned=returned,
        )
        fed.call(count, SCALE, what=Kind.CONTROL, key=KEY)
        for t in range(1, CASES):
            fed.start_round(t)
            how = [*CHANGES, "replayed", "twice", "good"][t % (len(CHANGES) + 3)]

            def change(data: bytes, how: str = how) -> list[bytes]:
                before, old[0] = old[0], data
                match how:
                    case "good":
                        return [data]
                    case "replayed":
                        return [before]
                    case "twice":  # what comes besides is no answer to the next message
                        return [data, data]
                    case _:
                        return [CHANGES[how](data, rng)]

            fuzzer.change, told = change, len(caplog.records)
            n = fed.call(count, SCALE, what=Kind.WEIGHTS, key=KEY, reduce=Sum())["n"].t
            lines = [r.getMessage() for r in caplog.records[told:]]
            dropped = [line for line in lines if line.startswith(f"round {t} has lost bad: ")]
            assert "good" in fed.peers
            assert len(dropped) == ("bad" not in fed.peers)
            assert all("\n" not in line for line in lines)
            if how in ("replayed", "another number", "another run", "noise", "truncated"):
                assert dropped
            if how == "good":
                assert ("bad" in fed.peers) or ": repeated or lost" in dropped[0]
            if dropped:
                assert n == t + 1  # of the other one alone
        fed.start_round(CASES)  # who was dropped last is back, and has heard why
        say_goodbye(fed.peers, "")
        fuzzer.over = True
        hub.close()
    silo.join(600)
    assert not silo.is_alive()
    events = [vars(record) for record in caplog.records]
    lost = [e for e in events if e.get("event") == "dropped" and e["cause"] != "gone"]
    heard = [e["reason"] for e in events if e.get("event") == "dismissed"]
    assert heard == [one_line(e["reason"]) for e in lost] != []


class Spoiling:
    """A link that changes the next message."""

    def __init__(self, link: StreamLink) -> None:
        self._link = link
        self.change: Callable[[bytes], list[bytes]] = lambda data: [data]

    def send(self, data: bytes, most: int) -> None:
        for each in self.change(data):
            self._link.send(each, most)
        self.change = lambda data: [data]

    def receive(self, seconds: float | None) -> Arrived:
        return self._link.receive(seconds)

    def close(self) -> None:
        self._link.close()


def call_of(op: str, t: int) -> bytes:
    frame = encode(Envelope("count", Kind.CONTROL, t, 1), SCALE, 0)
    return call_body(CallBody(op, Key(1), False, frame))


def test_a_server_that_sends_garbage_is_refused_and_the_silo_stays_as_it_was(
    hub: Hub,
    make_graph: Callable[..., Any],
    cut_block: Callable[..., Built],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("silograph.federation.session.attach.SHORTEST_PAUSE", 0.001)
    block, _ = cut_block(make_graph(20), 2)
    worker, ended = worker_of(block.take(torch.tensor([0])), None, OPS), list[str]()
    rng, broken, refused, said = random.Random(3), 0, 0, dict[str, str]()

    def attach() -> tuple[Spoiling, Peer]:
        link = Spoiling(joined(hub).link)
        peer = Peer("north", link, TOKEN)
        peer.ask(Type.START, {}, 30)
        return link, peer

    def answered(peer: Peer) -> dict[str, list[Any]]:
        """Bring the silo back to round 1, and return its answer in round 2."""
        peer.ask(Type.LOAD, {"round": 1}, 30)
        peer.send(Type.CALL, call_of(qualified(count), 2))
        _, frame = read_reply(peer.answer(Type.REPLY, 30))
        return {name: field.t.tolist() for name, field in decode(frame)[1].items()}

    with running([lambda: ended.append(take_part(holding(hub, "north", worker)))]):
        link, peer = attach()
        peer.send(Type.CALL, call_of(qualified(count), 1))
        peer.answer(Type.REPLY, 30)
        peer.ask(Type.KEEP, {"round": 1, "committed": []}, 30)
        known = {"n": [2.0], "x": [[4.0, 6.0]]}
        assert answered(peer) == known
        for case in range(CASES):
            how = [*CHANGES, "unknown op", "repeated"][case % (len(CHANGES) + 2)]
            op = "os:system" if how == "unknown op" else qualified(count)
            if how == "repeated":
                link.change = lambda data: [data, data]
            elif how != "unknown op":
                link.change = lambda data, how=how: [CHANGES[how](data, rng)]  # type: ignore[misc]
            peer.send(Type.CALL, call_of(op, 2))
            try:
                peer.answer(Type.REPLY, 30)
                if how == "repeated":  # the first is answered, the second ends the stream
                    peer.answer(Type.REPLY, 30)
                assert how in ("flipped bit", "oversized")  # it is another call then
            except LostError as error:
                said[how] = str(error)
                broken += error.cause is Cause.GONE
                refused += error.cause is Cause.REFUSED
                if error.cause is Cause.GONE:
                    link, peer = attach()
            assert answered(peer) == known
        say_goodbye({"north": peer}, "")
    assert ended == [""]
    assert said["unknown op"] == "unknown op 'os:system'"
    assert broken > CASES / 4
    assert refused > CASES / 8
