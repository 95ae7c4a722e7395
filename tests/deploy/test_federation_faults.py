"""Silos that die, servers that die: what goes on, what resumes, and what is said."""

import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mistakes import raises_code

pytest.importorskip("grpc")
pytest.importorskip("cryptography")

import silograph as sg
from runs import DiedError, rows_of, same_bits, weights_of
from silograph.core.errors import CheckpointError, ConfigError, ProtocolError
from silograph.deploy.server import resume_server, serve
from silograph.deploy.server_settings import ServerSettings
from silograph.experiment.result_files import Row
from silograph.experiment.run.progress import RunFacts
from silograph.experiment.run.result import Result
from silograph.experiment.run.run import checked_facts
from silograph.experiment.run.snapshot import to_checkpoint
from silograph.federation.checkpoint import Checkpoint
from silograph.federation.session.events import What
from silograph.graph.graph import Graph
from silograph.methods import RoundReport
from silos import config_of, federate, folders
from victims import Victim

PLAIN = ServerSettings("127.0.0.1:0", insecure=True, patience=600)
BASE: dict[str, Any] = {"partition": "random", "rounds": 4, "hidden": 8, "method": "scaffold"}
MakeGraph = Callable[..., Graph]


@pytest.fixture
def victims() -> Iterator[Callable[[], Victim]]:
    made: list[Victim] = []

    def make() -> Victim:
        made.append(Victim())
        return made[-1]

    yield make
    for victim in made:
        victim.end()


class AfterRound:
    """Does something after a round, while the run waits."""

    def __init__(self, number: int, do: Callable[[], None]) -> None:
        self.number = number
        self.do = do

    def begin(self, config: Any, facts: RunFacts) -> None:
        pass

    def round(self, row: Row) -> None:
        if row["round"] == self.number:
            self.do()

    def end(self, result: Result) -> None:
        pass


def hit(
    victim: Victim,
    address: str,
    folder: Path,
    number: int,
    at: int = 2,
    then: Callable[[], None] = lambda: None,
) -> threading.Thread:
    """Let a silo take part, and send it a signal in the middle of the first op of a round."""

    def wait_and_hit() -> None:
        victim.hears("attached")
        victim.hears("working")
        victim.signal(number)
        then()

    victim.take_part(address, folder, hang=at)
    thread = threading.Thread(target=wait_and_hit)
    thread.start()
    return thread


def clients_by_round(result: Result) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for record in result.ledger.records:
        if record.direction == "up":
            found.setdefault(record.round, set()).update(record.clients.tolist())
    return found


def test_a_killed_silo_comes_back_with_its_state(
    make_graph: MakeGraph,
    victims: Callable[[], Victim],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = config_of(3, **BASE, out=str(tmp_path / "out"))
    silos = folders(make_graph(60), config, tmp_path / "silos")
    first, second = victims(), victims()
    threads: list[threading.Thread] = []
    address: list[str] = []

    def start(at: str) -> None:
        address.append(at)
        threads.append(hit(first, at, silos[2], signal.SIGKILL))

    def again() -> None:
        second.take_part(address[0], silos[2], hang=99)
        second.hears("attached")

    def run(*given: Any, **named: Any) -> Result:
        return serve(*given, **named, trackers=[AfterRound(2, again)])

    venue = replace(PLAIN, least=2)
    result = federate(silos[:2], config, venue, run=run, on_address=start)
    for thread in threads:
        thread.join()
    second.hears("")
    assert "round 2 has lost client_02: expected an answer, got the end" in caplog.text
    assert "client_02 is back, with its state of round 1" in caplog.text
    everyone = {0, 1, 2}
    assert clients_by_round(result) == {
        0: everyone,
        1: everyone,
        2: {0, 1},
        3: {0, 1},  # round 2 is scored in it, and then the silo comes back
        4: everyone,
    }
    assert [row["participants"] for row in result.rounds] == [3, 2, 2, 3]
    # Rounds 1 and 2 are scored by who trains in rounds 2 and 3.
    assert result.judged_without == (("client_02",) if result.best_round < 3 else ())
    weights = weights_of(result)
    assert weights is not None
    assert all(bool(w.isfinite().all()) for w in weights.values())


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_silo_that_is_started_again_leaves_no_trace(
    make_graph: MakeGraph,
    victims: Callable[[], Victim],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    """All silos are needed: the round is done again with the state that it had written down."""
    graph, second = make_graph(60), victims()
    config = config_of(3, **BASE, out=str(tmp_path / "out"))
    silos = folders(graph, config, tmp_path / "silos")
    threads: list[threading.Thread] = []

    def start(at: str) -> None:
        def then() -> None:
            second.take_part(at, silos[2], hang=99)

        threads.append(hit(victims(), at, silos[2], signal.SIGKILL, number, then))

    result = federate(silos[:2], config, PLAIN, on_address=start)
    for thread in threads:
        thread.join()
    second.hears("attached")
    second.hears("")
    line = f"round {number} waits up to 60 s for client_02, and is done again"
    assert line in caplog.text
    whole = sg.run(graph, config=replace(config, out=None), block_size=1)
    assert same_bits(weights_of(result), weights_of(whole))
    assert result.ledger.records == whole.ledger.records


@pytest.mark.parametrize(
    ("number", "says"),
    [
        pytest.param(signal.SIGKILL, "got the end of the stream: it is gone"),
        # Noticed by keepalive, in about 10 s.
        pytest.param(signal.SIGSTOP, "got the end of the stream", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_needs_all_silos_ends_with_one_line(
    make_graph: MakeGraph,
    victims: Callable[[], Victim],
    tmp_path: Path,
    number: int,
    says: str,
) -> None:
    config, said = config_of(3, **BASE), list[str]()
    silos = folders(make_graph(60), config, tmp_path / "silos")
    victim, threads = victims(), list[threading.Thread]()

    def start(at: str) -> None:
        threads.append(hit(victim, at, silos[2], number))

    with pytest.raises(
        ProtocolError, match=rf"expected at least 3 silos .* got 2; client_02: .*{says}"
    ) as failure:
        federate(silos[:2], config, replace(PLAIN, rejoin=0.0), silo_lines=said, on_address=start)
    for thread in threads:
        thread.join()
    assert said.count(str(failure.value)) == 2


def test_a_silo_that_is_late_is_left_out(
    make_graph: MakeGraph,
    victims: Callable[[], Victim],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Without validation nodes the last round is reported, which the late silo did not see.
    config = config_of(2, **BASE | {"rounds": 2, "split": "0.5/0/0.5"})
    silos = folders(make_graph(60), config, tmp_path / "silos")
    victim = victims()
    venue = replace(PLAIN, least=1, seconds=5.0)
    result = federate(
        silos[:1], config, venue, on_address=lambda at: victim.take_part(at, silos[1], hang=2)
    )
    line = "round 2 has lost client_01: expected its answers of a round within 5 s, got too few"
    assert line in caplog.text
    assert (result.best_round, result.judged_without) == (2, ("client_01",))
    assert result.to_dict()["judged_without"] == ["client_01"]


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("alive", [True, False], ids=["silos wait", "silos start anew"])
@pytest.mark.parametrize("method", ["scaffold", "label_guided"])
def test_a_run_goes_on_after_its_server_died(
    make_graph: MakeGraph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    alive: bool,
) -> None:
    """The server dies in round 3, once the silos have worked in it."""
    graph, out = make_graph(60), tmp_path / "out"
    config = config_of(3, **BASE | {"method": method}, out=str(out))
    silos = folders(graph, config, tmp_path / "silos")
    address: list[str] = []

    def dying(report: RoundReport, clients: int, t: int) -> Any:
        if t == 3:
            raise DiedError
        return checked_facts(report, clients, t)

    def die(*given: Any, **named: Any) -> Result:
        with monkeypatch.context() as patch:
            patch.setattr("silograph.experiment.run.run.checked_facts", dying)
            if alive:  # nobody says goodbye
                patch.setattr("silograph.deploy.server.say_goodbye", lambda *_: None)
            with pytest.raises(DiedError):
                serve(*given, **named)
        return go_on(**named) if alive else None  # type: ignore[return-value]

    def go_on(*_: Any, **named: Any) -> Result:
        at = address[0] if alive else PLAIN.listen
        return resume_server(out, replace(PLAIN, listen=at), **named)

    result = federate(silos, config, PLAIN, run=die, on_address=address.append)
    if not alive:
        for folder in silos:
            assert len(list(folder.glob("state/*/*.checkpoint"))) == 2
        result = federate(silos, config, PLAIN, run=go_on)
    whole = sg.run(graph, config=replace(config, out=None), block_size=1)
    assert same_bits(weights_of(result), weights_of(whole))
    assert result.ledger.records == whole.ledger.records
    assert rows_of(result) == rows_of(whole)
    assert not any(list(folder.glob("state/*")) for folder in silos)
    with raises_code(ConfigError, "completed-run"):
        resume_server(out, PLAIN)


def test_a_server_that_resumes_knows_the_usual_updates(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoints hold the bits of those of a server that never died."""
    graph, config = make_graph(60), config_of(2, **BASE | {"method": "fedavg", "rounds": 3})
    silos = folders(graph, config, tmp_path / "silos")
    told: list[tuple[int, Any]] = []

    def noting(*given: Any) -> Checkpoint:
        found = to_checkpoint(*given)
        told.append((found.round, found.facts["engine"]))
        return found

    def dying(report: RoundReport, clients: int, t: int) -> Any:
        if t == 2:
            raise DiedError
        return checked_facts(report, clients, t)

    monkeypatch.setattr("silograph.experiment.run.run.to_checkpoint", noting)
    federate(silos, replace(config, out=str(tmp_path / "whole")), PLAIN)
    whole, told = told, []
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("silograph.experiment.run.run.checked_facts", dying)
        with pytest.raises(DiedError):
            federate(silos, replace(config, out=str(out)), PLAIN)
    federate(silos, config, PLAIN, run=lambda *_, **named: resume_server(out, PLAIN, **named))
    assert told == whole
    norm, calls = told[-1][1]["usual_updates"]["train"]
    assert (norm > 0, calls) == (True, 3)


def test_what_a_server_cannot_go_on_with(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = make_graph(60)
    with raises_code(ConfigError, "missing-file"):
        resume_server(tmp_path, PLAIN)
    sg.run(graph, config=config_of(2, **BASE), out=str(tmp_path / "sim"))
    (tmp_path / "sim" / "result.json").unlink()
    with pytest.raises(CheckpointError, match=r"expected the silos of the run in .*session"):
        resume_server(tmp_path / "sim", PLAIN)

    config = config_of(2, **BASE, out=str(tmp_path / "out"))
    silos = folders(graph, config, tmp_path / "silos")
    with monkeypatch.context() as patch:
        patch.setattr("silograph.experiment.run.result_folder.ResultFolder.finish", _dies)
        with pytest.raises(DiedError):
            federate(silos, config, PLAIN)
    for path in tmp_path.glob("silos/*/state/*/*"):
        path.unlink()
    said: list[str] = []

    def again(*_: Any, **named: Any) -> Result:
        return resume_server(tmp_path / "out", PLAIN, **named)

    with pytest.raises(CheckpointError, match="expected client_00 to go on, got: "):
        federate(silos, config, PLAIN, run=again, silo_lines=said)
    (silos[0] / "key.pem").unlink()
    with raises_code(ConfigError, "too-few-silos", expected=2, got=1):
        federate(
            silos,
            config,
            PLAIN,
            run=lambda *_, **named: resume_server(
                tmp_path / "out", replace(PLAIN, patience=3.0), **named
            ),
            silo_lines=said,
            patience=1.0,
        )
    assert any("expected the key that client_00 is registered with" in line for line in said)


def test_a_server_says_for_whom_it_waits(
    make_graph: MakeGraph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("silograph.deploy.server.ABSENT_SECONDS", 0.3)
    caplog.set_level("INFO", "silograph")
    config = config_of(2, partition="random", rounds=1, hidden=4)
    silos = folders(make_graph(60), config, tmp_path / "silos")
    settings = replace(PLAIN, patience=2.0, silos=("client_00", "client_01"))
    with raises_code(ConfigError, "too-few-silos", expected=2, got=1, missing=["client_01"]):
        federate(silos[:1], config, settings)
    absent = [vars(each) for each in caplog.records if vars(each).get("event") == What.ABSENT]
    assert {each["room"] for each in absent} == {2}
    assert absent[-1]["silos"] == 1
    assert "client_01" in absent[-1]["note"]
    assert "client_00" not in absent[-1]["note"]


def _dies(*_: Any) -> None:
    raise DiedError
