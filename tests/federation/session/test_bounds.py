"""What hostile ends may cost: messages are bounded before they are read, silent streams end."""

import itertools
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

grpc = pytest.importorskip("grpc")
pytest.importorskip("cryptography")

from sessions import TOKEN, table, worker_of  # noqa: E402
from silograph.core.errors import FrameError  # noqa: E402
from silograph.core.key import Key  # noqa: E402
from silograph.core.kinds import Kind  # noqa: E402
from silograph.core.payload import Payload, Ragged, Shared, Stacked, State  # noqa: E402
from silograph.federation.field_specs import SLOTS, Extent, FieldSpec, places  # noqa: E402
from silograph.federation.frame import Envelope, encode  # noqa: E402
from silograph.federation.program import (  # noqa: E402
    Call,
    Program,
    frame_bound,
)
from silograph.federation.session import wire  # noqa: E402
from silograph.federation.session.attach import Attaching, take_part  # noqa: E402
from silograph.federation.session.hub import (  # noqa: E402
    FROM_ONE,
    PROTOCOL,
    WAITING,
    Handshakes,
    say_goodbye,
)
from silograph.federation.session.identity import Register, SiloKey  # noqa: E402
from silograph.federation.session.message import (  # noqa: E402
    MAX_FACTS,
    MAX_MESSAGE_BYTES,
    Type,
    unpack,
)
from silograph.federation.session.peer import (  # noqa: E402  # noqa: E402
    AROUND,
    LongestCall,
    LostError,
    Peer,
    longest_reply,
)
from silograph.federation.session.wire import LEAD, MAGIC, SHORT, cut, whole  # noqa: E402
from silos import running  # noqa: E402
from streams import Raw, joined, refusal, until  # noqa: E402

KEY = Key.of(0)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "CHUNK", 8)
    monkeypatch.setattr(wire, "SHORT", 4)


@pytest.mark.usefixtures("small_chunks")
def test_messages_arrive_as_they_were() -> None:
    rng = random.Random(1)
    sent = [rng.randbytes(n) for n in (0, 1, 7, 8, 9, 15, 16, 17, 64, 65, 1000)]
    travelled = list(cut(sent))
    assert max(map(len, travelled)) <= max(8, LEAD.size)
    assert list(whole(iter(travelled), lambda size: 1000)) == sent
    for most, size in itertools.product((9, 64), (65, 1000)):
        with pytest.raises(FrameError, match=f"of at most {most} bytes, got {size:,}"):
            list(whole(cut([bytes(size)]), dict.fromkeys([size], most).__getitem__))


@pytest.mark.usefixtures("small_chunks")
def test_of_a_message_that_is_too_long_nothing_is_read() -> None:
    taken = []

    def endless() -> Iterator[bytes]:
        yield LEAD.pack(MAGIC, 2**62)
        for number in itertools.count():
            taken.append(number)
            yield bytes(8)

    with pytest.raises(FrameError, match="of at most 99 bytes, got 4,611,686,018,427,387,904"):
        next(whole(endless(), lambda _: 99))
    assert taken == []


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("parts", [[], [b""], [b"1234567"], [b"12345678", b"1"], [b"123456789"]])
def test_chunks_that_are_none(parts: list[bytes]) -> None:
    lead = LEAD.pack(MAGIC, 20)
    with pytest.raises(FrameError, match=r"expected a chunk of (8|4) bytes, got "):
        list(whole(iter([lead, *parts]), lambda _: 99))


def fields(rows: int) -> Payload:
    slots = torch.arange(rows, dtype=torch.int32)
    return {
        "weights/a": Stacked(torch.zeros(1, 3, 2)),
        "n": Stacked(torch.zeros(1, dtype=torch.int64)),
        "slot": Ragged(slots, torch.tensor([0, rows])),
        "rows": Ragged(torch.zeros(rows, 5), torch.tensor([0, rows])),
        "back": Ragged(torch.zeros(3, 2), torch.tensor([0, 3])),
    }


SPECS = {
    "weights/a": FieldSpec(Stacked, (3, 2)),
    "n": FieldSpec(Stacked, (), torch.int64),
    "slot": places(SLOTS),
    "rows": FieldSpec(Ragged, (5,), rows="own/slot"),
    "back": FieldSpec(Ragged, (2,), rows="inbox/asked"),
}
ASKED = {"inbox": {"asked": Ragged(torch.zeros(3), torch.tensor([0, 3]))}}


def nothing(cfg: Any, block: Any, state: State, inbox: Payload, key: Key) -> Any:
    return state, {}


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_the_longest_frame_is_that_of_all_rows(rows: int) -> None:
    extent = Extent(1, torch.float32, {SLOTS: [7]})
    most = frame_bound("nothing", SPECS, extent, ASKED).most
    frame = encode(Envelope("nothing", Kind.WEIGHTS, 1, 1), fields(rows), 0)
    assert most == len(frame) + (7 - rows) * (4 + 5 * 4)
    assert frame_bound("nothing", SPECS, Extent(1, torch.float32, {}), ASKED).most is None
    assert frame_bound("nothing", SPECS, extent).most is None


def test_replies_and_calls_are_bounded_by_the_program() -> None:
    wide = FieldSpec(Shared, (1000, 1000))
    extent = Extent(1, torch.float32, {})
    call = Call(nothing, Kind.WEIGHTS, KEY, {"w": wide}, {"w": FieldSpec(Stacked, (500, 1000))})
    free = Call(nothing, Kind.WEIGHTS, KEY, {}, {"w": FieldSpec(Stacked, (None,))})
    size = frame_bound("nothing", call.reply_specs, extent).most
    assert size is not None
    assert longest_reply(call, {}, extent) == size + AROUND
    assert longest_reply(free, {}, extent) == MAX_MESSAGE_BYTES
    assert longest_reply(Call(nothing, Kind.WEIGHTS, KEY), {}, extent) == SHORT
    longest = LongestCall(Program((), lambda t: call if t == 5 else (), 9, {}), extent)
    assert longest.most(1, 4, {}) == MAX_FACTS
    assert longest.most(4_000_000, 3, {}) == MAX_FACTS  # round 5 is neither this nor the next one
    frame = frame_bound("nothing", call.inbox_specs, extent).most
    assert frame is not None
    assert longest.most(4_000_000, 4, {}) == frame + AROUND


def test_a_long_greeting_is_refused_by_its_first_bytes(hubs: Any, raws: Any) -> None:
    silo = raws(hubs(Register(None, 2)))
    silo.out.put(bytes(wire.CHUNK + 1))
    with pytest.raises(grpc.RpcError) as error:
        next(silo.call)
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_compressed_greeting_is_refused(hubs: Any) -> None:
    hub = hubs(Register(None, 2))
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(hub.address, options=options) as channel:
        call = channel.stream_stream("/silograph.Session/Attach")(
            iter([bytes(2**24)]), compression=grpc.Compression.Gzip
        )
        with pytest.raises(grpc.RpcError) as error:
            next(call)
    refused = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED)
    assert error.value.code() in refused


def test_an_answer_that_is_too_long_names_the_silo_and_is_not_read(hubs: Any, raws: Any) -> None:
    hub = hubs(Register(None, 2))
    silo = raws(hub)
    assert silo.greet("north", SiloKey.new()).type is Type.WELCOME
    peer = Peer("north", joined(hub).link, TOKEN)
    peer.send(Type.CALL, b"", 10**6)
    next(silo.call)
    silo.out.put(LEAD.pack(MAGIC, 2**30))
    with pytest.raises(LostError, match=r"of at most 1,000,000 bytes, got 1,073,741,824"):
        peer.answer(Type.REPLY, 30)
    with pytest.raises(LostError, match="it is gone"):
        peer.answer(Type.REPLY, 30)


def test_an_answer_in_chunks_arrives(hubs: Any, raws: Any) -> None:
    hub = hubs(Register(None, 2))
    silo = raws(hub)
    silo.greet("north", SiloKey.new())
    link = joined(hub).link
    sent = random.Random(2).randbytes(3 * wire.CHUNK + 5)
    link.send(b"ask", len(sent))
    for part in cut([sent]):
        silo.out.put(part)
    assert link.receive(30).data == sent
    link.send(sent, 0)
    assert next(silo.call) == b"ask"
    assert next(whole(silo.call, lambda _: len(sent))) == sent


def test_a_silo_refuses_what_its_program_cannot_send(
    hubs: Any, make_graph: Callable[..., Any], cut_block: Callable[..., Any]
) -> None:
    """Of a server that sends 64 MiB, where the program's messages have less than 1 MiB."""
    block, _ = cut_block(make_graph(20), 2)
    call = Call(nothing, Kind.CONTROL, KEY)
    program = Program((), lambda _: call, 3, {})
    hub, said = hubs(Register(None, 2)), list[str]()
    block = block.take(torch.tensor([0]))
    worker = worker_of(block, None, table(nothing), program=program)
    silo = Attaching(
        *("north", SiloKey.new(), {}, hub.address, None, lambda token: worker, 30.0),
        lambda event: said.append(str(event)),
    )
    with running([lambda: take_part(silo)]):
        link = joined(hub).link
        peer = Peer("north", link, TOKEN)
        peer.ask(Type.START, {}, 30)
        link.send(bytes(2**26), 0)
        again = joined(hub)  # the silo ends the stream, and attaches anew
        say_goodbye({"north": Peer("north", again.link, TOKEN)}, "")
    (line,) = [line for line in said if "tries again" in line]
    assert f"of at most {MAX_FACTS:,} bytes, got {2**26:,}" in line


def test_half_greetings_keep_nobody_out(
    hubs: Any, raws: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """60 streams from the silo's own address that say nothing, or who they are and no more."""
    hub = hubs(Register(("north", "south"), 2))
    known = SiloKey.new()
    assert raws(hub).greet("south", known).type is Type.WELCOME
    handshakes: Handshakes = hub._handshakes
    arrived, place = list[str](), handshakes.place

    def noted(peer: str, end: Callable[[], object]) -> Any:
        arrived.append(peer)
        return place(peer, end)

    monkeypatch.setattr(handshakes, "place", noted)
    silent = [raws(hub) for _ in range(60)]
    for stream in silent[::2]:
        stream.say(Type.HELLO, name="north", key=known.public.hex(), protocol=PROTOCOL)
    # Those that come later than who is greeted next would rightly end that greeting.
    # The server says who has come: a stream that it ends may not hear of it on a busy machine.
    most = FROM_ONE + 1  # one has the place in reserve for the key that it claims
    until(lambda: len(arrived) == len(silent) and len(handshakes._places) <= most)
    for _ in range(3):
        assert raws(hub).greet("north", SiloKey.new()).type in (Type.WELCOME, Type.REFUSED)
    assert raws(hub).greet("south", known).type is Type.WELCOME
    assert {joined(hub).name for _ in range(3)} == {"north", "south"}


def test_who_has_waited_longest_gives_way_where_most_wait() -> None:
    ended: list[str] = []
    keys = {"south": b"s" * 32}
    handshakes = Handshakes(lambda: keys)
    with_places = []

    def wait(peer: str) -> Any:
        entered = handshakes.place(peer, lambda: ended.append(peer))
        with_places.append(entered)
        return entered.__enter__()

    first = wait("ipv4:9.9.9.9:1")
    handshakes.claim(first, keys["south"].hex())
    second = wait("ipv4:9.9.9.9:2")
    handshakes.claim(second, keys["south"].hex())  # the reserve is for one
    assert (first.key, second.key) == (keys["south"], None)
    for port in range(FROM_ONE + 3):
        wait(f"ipv4:1.1.1.1:{port}")
    assert ended == [f"ipv4:1.1.1.1:{port}" for port in range(3)]
    for number in range(WAITING):
        wait(f"ipv4:2.2.2.{number}:1")
    assert "ipv4:9.9.9.9:1" not in ended
    assert len(ended) == 1 + FROM_ONE + 3 + WAITING - WAITING
    for place in with_places:
        place.__exit__(None, None, None)
    assert handshakes._places == []


def test_a_second_process_with_one_key_is_told_so(
    hubs: Any, raws: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="silograph")
    hub, key = hubs(Register(None, 2)), SiloKey.new()
    line = "a second process uses the key of north: the one that was there first goes on"
    assert raws(hub).greet("north", key, process="one").type is Type.WELCOME
    assert raws(hub).greet("north", key, process="two").type is Type.WELCOME  # started anew?
    assert line not in caplog.text
    assert raws(hub).greet("north", key, process="one").type is Type.WELCOME  # no: both are there
    assert line in caplog.text
    assert line in refusal(raws(hub).greet("north", key, process="two"))
    assert raws(hub).greet("north", key, process="one").type is Type.WELCOME
    assert raws(hub).greet("north", key, process="three").type is Type.WELCOME


MEASURED = """
import resource, sys, threading
from silograph.federation.session.hub import Hub
from silograph.federation.session.identity import Register
from silograph.federation.session.message import Type
from silograph.federation.session.peer import LostError, Peer
import torch
hub = Hub("127.0.0.1:0", Register(None, 2), bytes(16), None, 2)
print(hub.address, flush=True)
sys.stdin.readline()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
peer = Peer("north", hub.next(60).link, bytes(16))
print("there", flush=True)
peer.send(Type.CALL, b"", 10**6)
try:
    peer.answer(Type.REPLY, 60)
except LostError as error:
    print(error, flush=True)
sys.stdin.readline()
print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, flush=True)
hub.close()
"""


def test_hostile_ends_do_not_double_the_servers_memory(tmp_path: Path) -> None:
    """A stranger's greeting of 256 MiB, and a silo's reply of as many, sent as one and in chunks.

    Without bounds each costs the server three to six times its size.
    """
    script = tmp_path / "server.py"
    script.write_text(MEASURED)
    server = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        address = server.stdout.readline().strip()
        huge = bytes(2**28)
        options = [("grpc.max_send_message_length", -1)]
        server.stdin.write("measure\n")
        server.stdin.flush()
        for _ in range(3):
            with grpc.insecure_channel(address, options=options) as channel:
                call = channel.stream_stream("/silograph.Session/Attach")(iter([huge]))
                with pytest.raises(grpc.RpcError):
                    next(call)

        class At:
            def __init__(self, address: str) -> None:
                self.address = address

        silo = Raw(At(address), token=bytes(16))  # type: ignore[arg-type]
        silo.greet("north", SiloKey.new())
        assert server.stdout.readline() == "there\n"
        next(silo.call)
        for part in cut([huge]):
            silo.out.put(part)
        assert "of at most 1,000,000 bytes, got 268,435,456" in server.stdout.readline()
        silo.close()
        server.stdin.write("over\n")
        server.stdin.flush()
        before, after = map(int, server.stdout.readline().split())
        assert after < 2 * before
    finally:
        server.kill()
        server.communicate()  # closes its pipes, too


def test_a_message_is_not_copied_where_it_is_read() -> None:
    data = b"SGM1" + bytes([Type.REPLY]) + bytes(24) + b"body"
    body = unpack(bytearray(data)).body
    assert isinstance(body, memoryview)
    assert bytes(body) == b"body"
