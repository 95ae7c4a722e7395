"""A server that is stopped by Ctrl-C or SIGTERM: its silos wait for it, and the run continues."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mistakes import raises_code

pytest.importorskip("grpc")
pytest.importorskip("cryptography")

import silograph as sg
from runs import rows_of, same_bits, weights_of
from silograph.core.config import RunConfig
from silograph.core.errors import CheckpointError, ConfigError
from silograph.deploy.server import resume_server, serve
from silograph.deploy.server_settings import ServerSettings
from silograph.experiment.run.result import Result
from silograph.federation.session.attach import format_deadline
from silograph.federation.session.state_store import StateStore
from silograph.graph.graph import Graph
from silos import config_of, federate, folders

PLAIN = ServerSettings("127.0.0.1:0", insecure=True, patience=600)
BASE: dict[str, Any] = {"partition": "random", "rounds": 3, "hidden": 8, "method": "scaffold"}
WAITS = "was stopped: client_00 waits for it for up to 30 s (until 2"
MakeGraph = Callable[..., Graph]


class Stopped:
    """A server that is stopped where `place` is called for the `count`th time, and then goes on.

    Args:
        patch: of the test.
        place: where it is stopped.
        go_on: what is done then; None is nothing.
        count: of calls until it is stopped.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        place: str,
        go_on: Callable[..., Result] | None = None,
        count: int = 1,
    ) -> None:
        self.patch = patch
        self.place = place
        self.go_on = go_on
        self.left = count
        self.address = ""

    def listens(self, address: str) -> None:
        self.address = address

    def run(self, config: RunConfig, venue: ServerSettings, **named: Any) -> Result:
        with self.patch.context() as patch:
            patch.setattr(self.place, self._interrupted(self._there()))
            with pytest.raises(KeyboardInterrupt):
                serve(config, venue, **named)
        if self.go_on is None:
            return None  # type: ignore[return-value] # there is none
        return self.go_on(config, replace(venue, listen=self.address), **named)

    def _there(self) -> Callable[..., Any]:
        found: Any = __import__(self.place.split(".")[0])
        for name in self.place.split(".")[1:]:
            found = getattr(found, name)
        return found  # type: ignore[no-any-return]

    def _interrupted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def stop(*given: Any, **named: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            return real(*given, **named)

        return stop


IN_A_ROUND = "silograph.experiment.run.run.checked_facts"
BEFORE_SILOS_ARE_THERE = "silograph.deploy.server.check_versions"
BEFORE_THERE_IS_A_FOLDER = "silograph.deploy.server.first_snapshot"


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("method", ["scaffold", "label_guided"])
def test_the_run_continues_bit_for_bit(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    graph, out = make_graph(60), tmp_path / "out"
    config = config_of(2, **BASE | {"method": method}, out=str(out))
    silos = folders(graph, config, tmp_path / "silos")

    def again(_: RunConfig, venue: ServerSettings, **named: Any) -> Result:
        assert len(list(tmp_path.glob("silos/*/state/*/agreed.json"))) == 2
        return resume_server(out, venue, **named)

    said: list[str] = []
    server = Stopped(monkeypatch, IN_A_ROUND, again, count=2)
    result = federate(
        silos, config, PLAIN, run=server.run, on_address=server.listens, silo_lines=said
    )
    whole = sg.run(graph, config=replace(config, out=None), block_size=1)
    assert same_bits(weights_of(result), weights_of(whole))
    assert result.ledger.records == whole.ledger.records
    assert rows_of(result) == rows_of(whole)
    assert sum(WAITS in line for line in said) == 1
    assert not any("has no stream to" in line for line in said)  # one line says it
    assert not list(tmp_path.glob("silos/*/state/*"))  # the end of the run is told silos, too


def test_silos_that_do_not_wait(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(2, **BASE, out=str(tmp_path / "out"))
    silos = folders(make_graph(60), config, tmp_path / "silos")
    said: list[str] = []
    server = Stopped(monkeypatch, IN_A_ROUND, count=2)
    federate(silos, config, PLAIN, run=server.run, silo_lines=said, waits=False)
    assert said.count("the server was interrupted") == 2
    assert len(list(tmp_path.glob("silos/*/state/*/agreed.json"))) == 2  # they may be started again


def test_silos_that_have_agreed_to_nothing_wait_for_any_run(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(2, **BASE)
    silos = folders(make_graph(60), config, tmp_path / "silos")
    said: list[str] = []
    server = Stopped(monkeypatch, BEFORE_SILOS_ARE_THERE, serve)
    result = federate(
        silos, config, PLAIN, run=server.run, on_address=server.listens, silo_lines=said
    )
    assert result.stopped == "all 3 rounds"
    assert any(WAITS in line for line in said)


@pytest.mark.parametrize(("place", "out"), [(BEFORE_THERE_IS_A_FOLDER, "out"), (IN_A_ROUND, None)])
def test_silos_do_not_wait_for_a_run_that_nobody_can_continue(
    make_graph: MakeGraph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    out: str | None,
) -> None:
    config = config_of(2, **BASE, out=None if out is None else str(tmp_path / out))
    silos = folders(make_graph(60), config, tmp_path / "silos")
    said: list[str] = []
    federate(silos, config, PLAIN, run=Stopped(monkeypatch, place).run, silo_lines=said)
    assert said.count("the server was interrupted") == 2


def test_a_server_that_does_not_come_back(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be stopped again and again, but a silo waits no longer than after a crash."""
    config = config_of(2, **BASE, out=str(tmp_path / "out"))
    silos = folders(make_graph(60), config, tmp_path / "silos")
    said: list[str] = []
    server = Stopped(monkeypatch, IN_A_ROUND)
    federate(silos, config, PLAIN, run=server.run, silo_lines=said, patience=0.2)
    assert sum("within 0.2 s, got: " in line for line in said if "run failed" not in line) == 2


def test_the_moment_until_which_a_silo_waits() -> None:
    now = time.mktime((2026, 11, 22, 13, 0, 0, 0, 0, -1))
    assert format_deadline(now, 600) == "until 2026-11-22 13:10:00"
    assert format_deadline(now, float("inf")) is None
    assert format_deadline(now, 1e300) is None


def test_a_stop_after_the_end_is_an_end(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(2, **BASE, out=str(tmp_path / "out"))
    silos = folders(make_graph(60), config, tmp_path / "silos")
    said: list[str] = []
    place = "silograph.experiment.run.run.add_report"
    federate(silos, config, PLAIN, run=Stopped(monkeypatch, place).run, silo_lines=said)
    assert said.count("the run is over") == 2
    with raises_code(ConfigError, "completed-run"):
        resume_server(tmp_path / "out", PLAIN)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("latest", [True, False])
def test_a_silo_whose_state_is_damaged_goes_back_one_round(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, latest: bool
) -> None:
    """Both ends have the round before; where one silo lacks that, too, the run is refused."""
    graph, out = make_graph(60), tmp_path / "out"
    config = config_of(2, **BASE | {"rounds": 5}, out=str(out))
    silos = folders(graph, config, tmp_path / "silos")
    real = StateStore.load

    def from_disk(store: StateStore, number: int) -> Any:
        store._recent.clear()  # as after a restart
        store._states.clear()
        return real(store, number)

    def again(_: RunConfig, venue: ServerSettings, **named: Any) -> Result:
        monkeypatch.setattr(StateStore, "load", from_disk)
        damaged = sorted(tmp_path.glob("silos/*/state/*/round-000000003.checkpoint"))[:1]
        assert len(damaged) == 1
        if not latest:
            damaged += sorted(tmp_path.glob("silos/*/state/*/round-000000002.checkpoint"))[1:]
        for file in damaged:
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        return resume_server(out, venue, **named)

    server = Stopped(monkeypatch, IN_A_ROUND, again, count=4)

    def go() -> Result:
        return federate(silos, config, PLAIN, run=server.run, on_address=server.listens)

    if not latest:
        with pytest.raises(CheckpointError, match=r"round-000000003.checkpoint: .*-000000002") as e:
            go()
        assert "\n" not in str(e.value)
        return
    result, whole = go(), sg.run(graph, config=replace(config, out=None), block_size=1)
    assert same_bits(weights_of(result), weights_of(whole))
    assert result.ledger.records == whole.ledger.records
    assert rows_of(result) == rows_of(whole)
