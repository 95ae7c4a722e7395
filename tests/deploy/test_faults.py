"""Faults of networks, disks, clocks and people: the run goes on, or says what is wrong."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mistakes import raises_code

pytest.importorskip("grpc")
pytest.importorskip("cryptography")

import silograph as sg
from disks import small_disk
from proxy import Proxy
from runs import rows_of, same_bits, weights_of
from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError, ProtocolError, SilographError
from silograph.core.payload import Payload
from silograph.deploy.server import resume_server, serve
from silograph.deploy.server_settings import ServerSettings
from silograph.deploy.silo import Attendance, take_part_in_run
from silograph.experiment.result_files import Row
from silograph.experiment.run.progress import RunFacts
from silograph.experiment.run.result import Result
from silograph.federation.session.engine import Session
from silograph.graph.graph import Graph
from silograph.graph.silos.read import read_silo
from silos import config_of, federate, folders

PLAIN = ServerSettings("127.0.0.1:0", insecure=True, patience=600)
BASE: dict[str, Any] = {"partition": "random", "rounds": 4, "hidden": 8, "method": "scaffold"}
MakeGraph = Callable[..., Graph]


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy() as made:
        yield made


class AfterRound:
    """Does something after a round, while the run waits."""

    def __init__(self, number: int, do: Callable[[], object]) -> None:
        self.number, self.do = number, do

    def begin(self, config: Any, facts: RunFacts) -> None:
        pass

    def round(self, row: Row) -> None:
        if row["round"] == self.number:
            self.do()

    def end(self, result: Result) -> None:
        pass


def assert_as_without(result: Result, graph: Graph, config: RunConfig) -> None:
    """The run has the bits, the ledger and the scores of a simulation."""
    whole = sg.run(graph, config=replace(config, out=None), block_size=1)
    assert same_bits(weights_of(result), weights_of(whole))
    assert result.ledger.records == whole.ledger.records
    assert rows_of(result) == rows_of(whole)


# --- networks ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", ["scaffold", "fedavg", "label_guided"])
def test_a_fifth_of_all_calls_fail(
    make_graph: MakeGraph,
    proxy: Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    """Connections of all silos are reset in one of five calls; who gives up is resumed.

    A round is done again up to three times, and with many calls in a round that is not enough.
    """
    graph, rng = make_graph(60), random.Random(5)
    rounds = 3 if method == "label_guided" else 12
    config = config_of(3, **BASE | {"method": method, "rounds": rounds}, out=str(tmp_path / "out"))
    silos = folders(graph, config, tmp_path / "silos")
    share = 0.2 if method != "label_guided" else 0.02  # of some 60 calls a round
    calls, failed, address = [0], [0], list[str]()
    call = Session.call

    def failing(self: Session, *args: Any, **named: Any) -> Payload:
        calls[0] += 1
        if rng.random() < share:
            failed[0] += 1
            proxy.cut(reset=True)
            threading.Timer(0.05, proxy.heal).start()
        return call(self, *args, **named)

    def on_address(at: str) -> None:
        address.append(at)
        proxy.forward_to(at)

    def run(config: RunConfig, settings: ServerSettings, **named: Any) -> Result:
        try:
            return serve(config, settings, **named)
        except ProtocolError as error:
            lost: SilographError = error
        for _ in range(20):
            try:
                return resume_server(str(config.out), settings, **named)
            except ProtocolError as error:
                lost = error
        raise lost

    monkeypatch.setattr(Session, "call", failing)
    # A server that gives up says goodbye with the reason, and silos end: here it only leaves.
    monkeypatch.setattr("silograph.deploy.server.say_goodbye", lambda *_: None)

    def silo(folder: Path) -> None:
        how = Attendance(
            proxy.address,
            folder / "key.pem",
            folder.parent / "secret",
            insecure=True,
            state=folder / "state",
            patience=3.0,
            allow=("label_guided",),
        )
        while not (tmp_path / "out" / "result.json").exists():
            try:
                take_part_in_run(read_silo(folder), how)
            except SilographError:
                time.sleep(0.1)

    threads = [threading.Thread(target=silo, args=(folder,), daemon=True) for folder in silos]

    def report(event: Any) -> None:
        if event.what == "listening":
            on_address(str(event.address))

    for thread in threads:
        thread.start()
    result = run(config, PLAIN, report=report)
    for thread in threads:
        thread.join(timeout=60)
    monkeypatch.undo()
    assert failed[0] >= 3
    assert failed[0] > 0.5 * share * calls[0]
    assert_as_without(result, graph, config)


@pytest.mark.slow
@pytest.mark.parametrize("reset", [True, False], ids=["reset", "silent"])
@pytest.mark.parametrize("seconds", [1.0, 5.0, 15.0, 60.0])
def test_a_network_that_is_cut_for_some_seconds(
    make_graph: MakeGraph, proxy: Proxy, tmp_path: Path, seconds: float, reset: bool
) -> None:
    graph, config = make_graph(60), config_of(3, **BASE)
    silos = folders(graph, config, tmp_path / "silos")

    def cut() -> None:
        proxy.cut(reset=reset)
        threading.Timer(seconds, proxy.heal).start()

    def run(*given: Any, **named: Any) -> Result:
        return serve(*given, **named, trackers=[AfterRound(2, cut)])

    result = federate(
        silos,
        config,
        replace(PLAIN, rejoin=180.0),
        run=run,
        on_address=proxy.forward_to,
        reached=lambda *_: proxy.address,
        patience=180.0,
    )
    assert_as_without(result, graph, config)


def test_proxies_of_the_environment_are_not_used(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens at the proxy that the environment names."""
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    graph, config = make_graph(60), config_of(2, **BASE | {"rounds": 1})
    silos = folders(graph, config, tmp_path / "silos")
    assert_as_without(federate(silos, config, PLAIN, patience=3.0), graph, config)


def test_a_silo_that_comes_late_is_waited_for(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph, config = make_graph(60), config_of(3, **BASE | {"rounds": 1})
    silos = folders(graph, config, tmp_path / "silos")

    def reached(folder: Path, address: str) -> str:
        time.sleep(2.0 if folder == silos[2] else 0.0)
        return address

    assert_as_without(federate(silos, config, PLAIN, reached=reached), graph, config)


# --- clocks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [-3e8, 3e8], ids=["ten years back", "ten years on"])
def test_a_clock_that_jumps_changes_no_number(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Waits and deadlines go by a clock that does not jump; only times in logs change."""
    graph, config = make_graph(60), config_of(2, **BASE, out=str(tmp_path / "out"))
    silos = folders(graph, config, tmp_path / "silos")
    now, now_ns = time.time, time.time_ns

    def jump() -> None:
        monkeypatch.setattr(time, "time", lambda: now() + seconds)
        monkeypatch.setattr(time, "time_ns", lambda: now_ns() + int(seconds * 1e9))

    def run(*given: Any, **named: Any) -> Result:
        return serve(*given, **named, trackers=[AfterRound(2, jump)])

    result = federate(silos, config, replace(PLAIN, seconds=60.0), run=run)
    monkeypatch.undo()
    assert_as_without(result, graph, config)


# --- two of one kind -----------------------------------------------------------------------------


def test_two_servers_do_not_share_a_folder(make_graph: MakeGraph, tmp_path: Path) -> None:
    out = tmp_path / "out"
    graph, config = make_graph(60), config_of(2, **BASE, out=str(out))
    silos = folders(graph, config, tmp_path / "silos")
    refused: list[str] = []

    def second() -> None:
        with raises_code(ConfigError, "folder-in-use"):
            resume_server(out, PLAIN)
        refused.append("folder-in-use")

    def run(*given: Any, **named: Any) -> Result:
        return serve(*given, **named, trackers=[AfterRound(1, second)])

    result = federate(silos, config, PLAIN, run=run)
    assert refused == ["folder-in-use"]
    assert_as_without(result, graph, config)


# --- disks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["server", "state", "audit"])
def test_a_full_disk_ends_the_run_with_a_reason_and_it_goes_on_once_there_is_room(
    make_graph: MakeGraph, tmp_path: Path, place: str
) -> None:
    """The disk fills in round 2; then there is room again, and the run is resumed."""
    graph = make_graph(60)
    with small_disk(tmp_path / "disk", 2**21) as disk:
        out = disk.path / "out" if place == "server" else tmp_path / "out"
        config = config_of(2, **BASE, out=str(out))
        silos = folders(graph, config, tmp_path / "silos")
        lines: list[str] = []
        how: dict[str, Any] = {}
        if place == "state":
            how["state"] = disk.path / "state"
        if place == "audit":
            how["audit"] = disk.path / "audit.jsonl"

        def run(*given: Any, **named: Any) -> Result:
            return serve(*given, **named, trackers=[AfterRound(2, disk.fill)])

        settings = replace(PLAIN, rejoin=1.0)
        # State and audit on the small disk are those of the first silo.
        own: dict[Path, dict[str, Any]] = {silos[0]: how}
        with pytest.raises((SilographError, OSError)) as failure:
            federate(silos, config, settings, run=run, silo_lines=lines, own=own, patience=5.0)
        text = f"{failure.value} {lines}"
        assert "No space left" in text or "room" in text
        disk.free()
        result = federate(
            silos,
            config,
            settings,
            run=lambda *_, **named: resume_server(out, PLAIN, **named),
            own=own,
            patience=30.0,
        )
        assert_as_without(result, graph, config)


@pytest.mark.parametrize("place", ["server", "state", "audit", "key"])
def test_a_disk_that_cannot_be_written_is_named_before_anything_is_sent(
    make_graph: MakeGraph, tmp_path: Path, place: str
) -> None:
    config = config_of(1, **BASE)
    (silo,) = folders(make_graph(60), config, tmp_path / "silos")
    with small_disk(tmp_path / "disk", 2**20) as disk:
        disk.make_read_only()
        if place == "server":
            with pytest.raises((SilographError, OSError), match="disk"):
                federate((silo,), replace(config, out=str(disk.path / "out")), PLAIN)
            return
        how: dict[str, Any] = {"state": silo / "state", "audit": silo / "audit.jsonl"}
        how |= {"key": silo / "key.pem", place: disk.path / place}
        with raises_code(ConfigError, "unwritable-path"):
            take_part_in_run(
                read_silo(silo), Attendance("127.0.0.1:1", insecure=True, patience=0.0, **how)
            )
