"""The network between silos and server: gone for a while, and back."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")
pytest.importorskip("cryptography")

import silograph as sg
from proxy import Proxy
from runs import rows_of, same_bits, weights_of
from silograph.core.errors import ProtocolError
from silograph.core.payload import Payload
from silograph.deploy.server import serve
from silograph.deploy.server_settings import ServerSettings
from silograph.experiment.result_files import Row
from silograph.experiment.run.progress import RunFacts
from silograph.experiment.run.result import Result
from silograph.federation.session.engine import Session
from silograph.federation.session.identity import make_certificates
from silograph.graph.graph import Graph
from silos import config_of, federate, folders, running
from streams import until

PLAIN = ServerSettings("127.0.0.1:0", insecure=True, patience=600)
BASE: dict[str, Any] = {"partition": "random", "rounds": 4, "hidden": 8}
LONG = 20.0  # seconds; longer than keepalive takes to notice
MakeGraph = Callable[..., Graph]


class AfterRounds:
    """Does something after rounds, while the run waits."""

    def __init__(self, todo: dict[int, Callable[[], None]]) -> None:
        self.todo = todo

    def begin(self, config: Any, facts: RunFacts) -> None:
        pass

    def round(self, row: Row) -> None:
        self.todo.get(int(row["round"] or 0), lambda: None)()

    def end(self, result: Result) -> None:
        pass


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy() as made:
        yield made


def through(
    proxy: Proxy,
    graph: Graph,
    path: Path,
    *,
    method: str,
    todo: dict[int, Callable[[], None]],
    venue: ServerSettings = PLAIN,
    all_silos: bool = True,
    silo_lines: list[str] | None = None,
    hidden: int = 8,
    rounds: int = BASE["rounds"],
    **how: Any,
) -> Result:
    """A federation of three of which all silos, or the last one, reach the server by a proxy.

    `todo` is done once a round is scored, which `scaffold` does in the next one.
    """
    config = config_of(3, **BASE | {"method": method, "hidden": hidden, "rounds": rounds})
    silos = folders(graph, config, path / "silos")

    def reached(folder: Path, address: str) -> str:
        return proxy.address if all_silos or folder == silos[-1] else address

    def run(*given: Any, **named: Any) -> Result:
        return serve(*given, **named, trackers=[AfterRounds(todo)])

    return federate(
        silos,
        config,
        venue,
        run=run,
        on_address=proxy.forward_to,
        reached=reached,
        silo_lines=silo_lines,
        **how,
    )


def assert_as_if_nothing_had_been(result: Result, graph: Graph, method: str) -> None:
    whole = sg.run(graph, config=config_of(3, **BASE, method=method), block_size=1)
    assert same_bits(weights_of(result), weights_of(whole))
    assert result.ledger.records == whole.ledger.records
    assert rows_of(result) == rows_of(whole)


def test_a_short_silence_is_not_noticed(
    make_graph: MakeGraph, proxy: Proxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    graph = make_graph(60)

    def be_silent() -> None:
        proxy.cut(reset=False)
        threading.Timer(1.0, proxy.heal).start()

    result = through(proxy, graph, tmp_path, method="scaffold", todo={2: be_silent})
    assert_as_if_nothing_had_been(result, graph, "scaffold")
    assert "has lost" not in caplog.text


@pytest.mark.law(sample=3)
@pytest.mark.parametrize(
    ("method", "number"),
    [
        ("scaffold", 1),  # of set-up
        ("scaffold", 6),
        ("label_guided", 20),
    ],
)
def test_a_round_that_lost_its_network_is_done_again(
    make_graph: MakeGraph,
    proxy: Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
    number: int,
) -> None:
    """It goes in the middle of a round, and comes back once the server waits for its silos."""
    graph, calls, said = make_graph(60), [0], list[str]()
    call = Session.call

    def breaking(self: Session, *args: Any, **named: Any) -> Payload:
        calls[0] += 1
        if calls[0] == number:
            proxy.cut(reset=True)
        return call(self, *args, **named)

    def heal() -> None:
        until(lambda: "waits up to" in caplog.text)
        proxy.heal()

    monkeypatch.setattr(Session, "call", breaking)
    with running([heal]):
        result = through(proxy, graph, tmp_path, method=method, todo={}, silo_lines=said)
    assert_as_if_nothing_had_been(result, graph, method)
    for name in ("client_00", "client_01", "client_02"):
        assert f"has lost {name}: expected an answer, got the end of the" in caplog.text
        assert f"waits up to 60 s for {name}, and is done again" in caplog.text
        assert f"{name} is back, " in caplog.text
        assert any(line.startswith(f"{name} has no stream to 127.0.0.1") for line in said)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["scaffold", "label_guided"])
def test_a_network_that_is_gone_for_long(
    make_graph: MakeGraph,
    proxy: Proxy,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    method: str,
) -> None:
    """Nobody is told: both ends notice by keepalive, and find each other when it is back."""
    graph = make_graph(60)

    def be_gone() -> None:
        proxy.cut(reset=False)
        threading.Timer(LONG, proxy.heal).start()

    result = through(proxy, graph, tmp_path, method=method, todo={2: be_gone})
    assert_as_if_nothing_had_been(result, graph, method)
    assert "round 3 waits up to 60 s for client_01, and is done again" in caplog.text
    assert "client_01 is back, with its state of round 2" in caplog.text


@pytest.mark.parametrize("reset", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_silo_without_network_is_missed_for_a_while(
    make_graph: MakeGraph,
    proxy: Proxy,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    reset: bool,
) -> None:
    """Rounds 3 and 4 go on without it; it takes part again in round 5."""
    said: list[str] = []

    def back() -> None:
        proxy.heal()
        until(lambda: said.count(f"client_02 is attached to {proxy.address}") == 2)

    result = through(
        proxy,
        make_graph(60),
        tmp_path,
        method="scaffold",
        rounds=5,
        todo={1: lambda: proxy.cut(reset=reset), 3: back},
        venue=replace(PLAIN, least=2),
        all_silos=False,
        silo_lines=said,
    )
    took_part: dict[int, set[int]] = {}
    for record in result.ledger.records:
        if record.direction == "up":
            took_part.setdefault(record.round, set()).update(record.clients.tolist())
    few, everyone = {0, 1}, {0, 1, 2}
    assert took_part == {0: everyone, 1: everyone, 2: everyone, 3: few, 4: few, 5: everyone}
    assert "round 3 has lost client_02: expected an answer, got the end of" in caplog.text
    assert "client_02 is back, with its state of round 2" in caplog.text


def test_a_network_that_does_not_come_back(
    make_graph: MakeGraph, proxy: Proxy, tmp_path: Path
) -> None:
    with pytest.raises(
        ProtocolError,
        match=r"expected at least 3 silos to answer .*, got 2; client_02: .*: it is gone; not back "
        r"within 0\.5 s",
    ):
        through(
            proxy,
            make_graph(60),
            tmp_path,
            method="scaffold",
            todo={1: lambda: proxy.cut(reset=True)},
            venue=replace(PLAIN, rejoin=0.5),
            all_silos=False,
            patience=1.0,
        )


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
def test_the_ledger_has_the_bytes_of_the_wire_but_for_a_few_a_message(
    make_graph: MakeGraph, proxy: Proxy, tmp_path: Path, tls: bool
) -> None:
    """What is besides: headers of HTTP/2, gRPC, TLS and messages, the handshake and the config."""
    venue, how = PLAIN, dict[str, Any]()
    if tls:
        make_certificates(tmp_path / "certs", ["127.0.0.1"])
        pair = (tmp_path / "certs" / "server.pem", tmp_path / "certs" / "server.key")
        venue = replace(venue, insecure=False, certificate=pair, accept_first_keys=True)
        how = {"ca": tmp_path / "certs" / "ca.pem"}
    graph = make_graph(60, features=400)
    result = through(
        proxy, graph, tmp_path, method="fedavg", todo={}, venue=venue, hidden=64, **how
    )
    for way, seen in (("down", proxy.down), ("up", proxy.up)):
        records = [record for record in result.ledger.records if record.direction == way]
        frames = sum(int(record.bytes.sum()) for record in records)
        if way == "down":  # the model that silos get in the end stands beside the ledger
            assert result.handed_over_bytes > 0
            frames += result.handed_over_bytes
        messages = sum(len(record.clients) for record in records)
        assert frames > 1_000_000
        assert 0 < seen - frames < 300 * messages + 20_000 * 3 + 0.01 * frames
