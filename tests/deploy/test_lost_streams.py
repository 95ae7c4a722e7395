"""Streams that are lost before the first round or after the last: the run is as without."""

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
from runs import DiedError, rows_of, same_bits, weights_of
from silograph.core.errors import ProtocolError
from silograph.deploy.server import resume_server
from silograph.deploy.server_settings import ServerSettings
from silograph.deploy.silo import OwnData
from silograph.experiment.run.run import checked_facts
from silograph.federation.matching import Hello
from silograph.federation.session.responder import Responder
from silograph.federation.session.silo_data import Prepared
from silograph.graph.graph import Graph
from silograph.methods import RoundReport
from silos import config_of, federate, folders

PLAIN = ServerSettings("127.0.0.1:0", insecure=True, patience=600)
BASE: dict[str, Any] = {"partition": "random", "rounds": 2, "hidden": 8, "method": "label_guided"}
LOST = "client_01"
MakeGraph = Callable[..., Graph]


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy() as made:
        yield made


class Cutting:
    """Cuts the network of a silo in the middle of a step of its set-up, so many times.

    Args:
        patch: of the test.
        proxy: by which the silo reaches the server.
        step: `hello`, by which it answers JOIN, or `prepare`, by which it answers START.
        times: that the network is cut.
        heals: whether it comes back.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, proxy: Proxy, step: str, times: int = 1, heals: bool = True
    ) -> None:
        self.proxy, self.left, self.heals = proxy, times, heals
        real = getattr(OwnData, step)

        def cut_first(own: OwnData, *args: Any) -> Hello | Prepared:
            if own.silo.name == LOST and self.left:
                self.left -= 1
                proxy.cut(reset=True)
                if self.heals:
                    threading.Timer(0.2, proxy.heal).start()
            answer: Hello | Prepared = real(own, *args)
            return answer

        patch.setattr(OwnData, step, cut_first)


@pytest.mark.parametrize(("step", "times"), [("hello", 1), ("prepare", 1), ("hello", 3)])
def test_a_silo_that_is_lost_in_set_up_is_asked_again(
    make_graph: MakeGraph,
    proxy: Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    step: str,
    times: int,
) -> None:
    graph, config = make_graph(60), config_of(3, **BASE)
    silos = folders(graph, config, tmp_path / "silos")
    cutting = Cutting(monkeypatch, proxy, step, times)

    def reached(folder: Path, address: str) -> str:
        return proxy.address if folder == silos[1] else address

    result = federate(silos, config, PLAIN, on_address=proxy.forward_to, reached=reached)
    whole = sg.run(graph, config=config, block_size=1)
    assert cutting.left == 0
    assert same_bits(weights_of(result), weights_of(whole))
    assert result.ledger.records == whole.ledger.records
    assert rows_of(result) == rows_of(whole)
    assert caplog.text.count(f"round 0 has lost {LOST}: ") == times
    assert caplog.text.count(f"{LOST} is back, before it had any state") == times


def test_a_silo_that_does_not_come_back_in_set_up(
    make_graph: MakeGraph, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others hear why the run ends."""
    config = config_of(3, **BASE)
    silos = folders(make_graph(60), config, tmp_path / "silos")
    Cutting(monkeypatch, proxy, "hello", heals=False)
    lines: list[str] = []
    with pytest.raises(ProtocolError, match=rf"{LOST}: .*; not back within 0\.5 s") as end:
        federate(
            silos,
            config,
            replace(PLAIN, rejoin=0.5),
            silo_lines=lines,
            on_address=proxy.forward_to,
            reached=lambda folder, at: proxy.address if folder == silos[1] else at,
            patience=1.0,
        )
    assert end.value.code == "too-few-silos"  # after which the server's command goes on
    assert lines.count(str(end.value)) == 2


def test_a_silo_that_is_lost_while_a_server_resumes_is_waited_for(
    make_graph: MakeGraph,
    proxy: Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its stream ends while it loads its state."""
    graph, out = make_graph(60), tmp_path / "out"
    config = config_of(3, **BASE | {"rounds": 3}, out=str(out))
    silos = folders(graph, config, tmp_path / "silos")

    def dying(report: RoundReport, clients: int, t: int) -> Any:
        if t == 3:
            raise DiedError
        return checked_facts(report, clients, t)

    with monkeypatch.context() as patch:
        patch.setattr("silograph.experiment.run.run.checked_facts", dying)
        with pytest.raises(DiedError):
            federate(silos, config, PLAIN)
    load, cuts = Responder._load, list[str]()

    def cut_first(own: Responder, number: int) -> None:
        if own._name == LOST and not cuts:
            cuts.append(LOST)
            proxy.cut(reset=True)
            threading.Timer(0.2, proxy.heal).start()
        load(own, number)

    monkeypatch.setattr(Responder, "_load", cut_first)
    result = federate(
        silos,
        config,
        PLAIN,
        run=lambda *_, **named: resume_server(out, PLAIN, **named),
        on_address=proxy.forward_to,
        reached=lambda folder, at: proxy.address if folder == silos[1] else at,
    )
    assert cuts == [LOST]
    assert f"round 2 waits up to 60 s for {LOST}" in caplog.text
    whole = sg.run(graph, config=replace(config, out=None), block_size=1)
    assert same_bits(weights_of(result), weights_of(whole))
    assert result.ledger.records == whole.ledger.records


def test_a_silo_that_is_lost_while_it_gets_the_result_is_waited_for(
    make_graph: MakeGraph,
    proxy: Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also where it has stored the result, and the server does not know."""
    graph, config = make_graph(60), config_of(3, **BASE)
    silos = folders(graph, config, tmp_path / "silos")
    finish, cuts = Responder._finish, list[int]()

    def cut_twice(own: Responder, frame: bytes) -> None:
        if own._name == LOST and len(cuts) < 2:
            cuts.append(len(cuts))
            if len(cuts) == 2:
                finish(own, frame)
            proxy.cut(reset=True)
            threading.Timer(0.2, proxy.heal).start()
            return
        finish(own, frame)

    monkeypatch.setattr(Responder, "_finish", cut_twice)
    result = federate(
        silos,
        config,
        PLAIN,
        keep=True,
        on_address=proxy.forward_to,
        reached=lambda folder, at: proxy.address if folder == silos[1] else at,
    )
    assert cuts == [0, 1]
    assert caplog.text.count(f"the result of the run waits up to 60 s for {LOST}") == 1
    assert "has not taken the result" not in caplog.text
    whole = sg.run(graph, config=config, block_size=1)
    assert result.ledger.records == whole.ledger.records
    assert result.bytes == whole.bytes
    for silo in silos:
        assert len(list((silo / "results").iterdir())) == 1
