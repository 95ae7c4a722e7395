"""What leaves a silo over real streams: every byte of every method, as it arrives at the server."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")
pytest.importorskip("cryptography")

import silograph as sg
from leaks import OPTIONS, Sent, blocks_of, documented, found_in
from silograph.core.payload import Payload
from silograph.deploy.server_settings import ServerSettings
from silograph.experiment.run.setup import Setup
from silograph.federation.frame import Envelope, decode
from silograph.federation.session.hub import Hub
from silograph.federation.session.message import Message, Type, read_reply, unpack
from silograph.graph.graph import Graph
from silograph.methods import METHODS
from silos import ALLOW, config_of, federate, folders

PLAIN = ServerSettings("127.0.0.1:0", insecure=True, patience=600)
BASE: dict[str, Any] = {"partition": "random", "rounds": 2, "hidden": 8}
ABLE = [name for name, method in METHODS.items() if method.setting.at_server is None]
QUICK = ("scaffold", "label_guided")


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every message that arrives from silos while the test goes."""
    seen: list[bytes] = []
    attach = Hub._attach

    def kept(requests: Iterator[bytes]) -> Iterator[bytes]:
        for data in requests:
            seen.append(data)
            yield data

    def spy(self: Hub, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        return attach(self, kept(requests), context)

    monkeypatch.setattr(Hub, "_attach", spy)
    return seen


def frame_of(message: Message) -> tuple[Envelope, Payload] | None:
    """The frame of a message that has one; others hold facts that everybody may know."""
    match message.type:
        case Type.REPLY:
            return decode(read_reply(message.body)[1])
        case Type.JOINED:
            return decode(message.body)
        case Type.HELLO:
            assert message.facts().keys() == {"versions", "name", "key", "protocol", "process"}
        case Type.PROOF:
            assert message.facts().keys() == {"signature", "host"}
        case _:
            assert message.type is Type.DONE
            told = message.facts()  # how many nodes train, validate and test, after START
            assert told.keys() <= {"nodes"}
            # docs/reference/what_leaves_a_silo.md
            numbers = {"train", "val", "test", "rows", "edges"}
            assert told.get("nodes", {}).keys() <= numbers
    return None


def run(
    graph: Graph, arrived: list[bytes], path: Path, name: str, **options: Any
) -> tuple[Sent, Sent]:
    """Run a method over streams; return the hellos, and the replies, that were sent."""
    config = config_of(3, **BASE, method=name, options=OPTIONS.get(name, {}), **options)
    silos = folders(graph, config, path / "silos")
    result = federate(silos, config, PLAIN, allow=(*ALLOW, name))
    for secret in ((path / "silos" / "secret").read_bytes(), b"PRIVATE KEY"):
        assert not any(secret in data for data in arrived)
    messages = [unpack(data) for data in arrived]
    replies = [m for m in messages if m.type is Type.REPLY]
    up = [record.bytes for record in result.ledger.records if record.direction == "up"]
    size = sum(len(read_reply(m.body)[1]) for m in replies)
    assert size == sum(int(sizes.sum()) for sizes in up)  # nothing went by the ledger
    frames = [found for m in messages if m.type is not Type.REPLY and (found := frame_of(m))]
    return frames, [found for m in replies if (found := frame_of(m))]


@pytest.mark.law(sample=6)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in ABLE]
)
def test_nothing_that_arrives_holds_labels_edges_or_features(
    make_graph: Callable[..., Graph],
    arrived: list[bytes],
    setups: list[Setup],
    tmp_path: Path,
    name: str,
) -> None:
    graph = make_graph(60)
    hellos, replies = run(graph, arrived, tmp_path, name)
    sg.run(graph, config=config_of(3, **BASE, method="local"), block_size=1)  # for its blocks
    assert len(hellos) == 3
    assert found_in([*hellos, *replies], blocks_of(setups[0])) == set()
    kinds = {envelope.kind.value for envelope, fields in replies if fields} - {"evaluation"}
    assert kinds == documented()[name]


def test_features_are_found_where_they_do_arrive(
    make_graph: Callable[..., Graph],
    arrived: list[bytes],
    setups: list[Setup],
    tmp_path: Path,
) -> None:
    graph = make_graph(60)
    _, replies = run(graph, arrived, tmp_path, "fedavg", collect=0.5)
    sg.run(graph, config=config_of(3, **BASE, method="local"), block_size=1)
    assert found_in(replies, blocks_of(setups[0])) == {("features", "features")}
