"""A federation over gRPC gives what a simulation gives: bits, ledger, rows, scores."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import silograph as sg
from forked import Forked
from mistakes import raises_code
from runs import outcome, rows_of, same_bits, weights_of
from silo_folders import NORTH, SOUTH, folder
from silograph.cli.printing import print_result
from silograph.core.errors import ConfigError, DataError, TrainingError
from silograph.deploy.policy import SiloPolicy
from silograph.deploy.server import ServerSession, SessionState, serve
from silograph.deploy.server_settings import ServerSettings
from silograph.experiment.run.result import Result
from silograph.experiment.run.setup import versions
from silograph.federation.session.events import Cause, Event, What
from silograph.federation.session.peer import LostError, Peer
from silograph.graph.graph import Graph
from silograph.methods import METHODS
from silograph.task.counts import EvaluationLevel
from silos import config_of, federate, folders

MOST = 5
OPTIONS = {"label_guided": {"sample": 30}}
PLAIN = ServerSettings("127.0.0.1:0", insecure=True, patience=600)
BASE: dict[str, Any] = {"partition": "random", "rounds": 2, "hidden": 8, "split": "0.4/0.3/0.3"}


@pytest.fixture(scope="module")
def processes() -> Iterator[list[Forked]]:
    """Processes that take part in one run after the other."""
    command, pipe = [sys.executable, "-m", "silo_process"], subprocess.PIPE
    found = [Forked(command, stdin=pipe, stdout=pipe, text=True) for _ in range(MOST)]
    try:
        for process in found:
            assert process.stdout.readline() == "ready\n"
        yield found
    finally:
        for process in found:
            process.stdin.close()
        for process in found:
            assert process.wait(timeout=600) == 0
            process.stdout.close()


def over_processes(
    processes: list[Forked], graph: Graph, clients: int, path: Path, **options: Any
) -> Result:
    config = config_of(clients, **BASE | options)
    silos = folders(graph, config, path / "silos")

    def report(event: Event) -> None:
        if event.what is What.LISTENING:
            for process, folder in zip(processes, silos, strict=False):
                told = {"address": event.address, "folder": str(folder)}
                assert process.stdin is not None
                process.stdin.write(json.dumps(told) + "\n")
                process.stdin.flush()

    result = serve(config, PLAIN, report=report)
    for process, _ in zip(processes, silos, strict=False):
        assert process.stdout is not None
        assert process.stdout.readline() == "\n"
    return result


def simulated(graph: Graph, clients: int, **options: Any) -> Result:
    return sg.run(graph, config=config_of(clients, **BASE | options), block_size=1)


def assert_same(ours: Result, theirs: Result) -> None:
    assert same_bits(weights_of(ours), weights_of(theirs))
    assert ours.ledger.records == theirs.ledger.records
    assert rows_of(ours) == rows_of(theirs)
    a, b = outcome(ours), outcome(theirs)
    for part in ("test", "val"):  # nobody has the uncut graph
        assert a[part].pop("uncut") is None
        b[part].pop("uncut")
    if (told := a.pop("baseline")) is not None:  # by validation labels; nobody tells others
        assert told["scores"]["auc"] is None
    b.pop("baseline")
    for found in (a, b):  # by the baseline
        found.pop("better_untrained")
    assert a.pop("confusion") is None
    b.pop("confusion")
    assert a.pop("partition") == "silo"
    assert a | {"partition_hash": "", "partition": b["partition"]} == b | {"partition_hash": ""}


ABLE = [name for name, method in METHODS.items() if method.setting.at_server is None]
# Each kind of call and of state; the slow ones are all methods with all numbers of silos.
QUICK = {("fedavg", 2), ("local", 3), ("scaffold", 3), ("label_guided", 3), ("bns", 2)}
QUICK |= {("cagnet", 3), ("fedper", 3), ("fedpub", 3)}


@pytest.mark.law(sample=6)
@pytest.mark.parametrize(
    ("name", "clients"),
    [
        pytest.param(name, k, marks=() if (name, k) in QUICK else pytest.mark.slow)
        for name in ABLE
        for k in (2, 3, MOST)
    ],
)
def test_silo_processes_give_the_bits_and_the_ledger_of_a_simulation(
    processes: list[Forked],
    make_graph: Callable[..., Graph],
    tmp_path: Path,
    name: str,
    clients: int,
) -> None:
    graph, options = make_graph(60), {"method": name, "options": OPTIONS.get(name, {})}
    ours = over_processes(processes, graph, clients, tmp_path, **options)
    assert_same(ours, simulated(graph, clients, **options))


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("name", ["fedavg", "label_guided"])
def test_larger_blocks_differ_by_rounding(
    make_graph: Callable[..., Graph], tmp_path: Path, name: str
) -> None:
    graph, options = make_graph(60), {"method": name, "dtype": "float64"}
    config = config_of(3, **BASE | options)
    ours = federate(folders(graph, config, tmp_path / "silos"), config, PLAIN)
    theirs = sg.run(graph, config=config, block_size=3)
    a, b = weights_of(ours), weights_of(theirs)
    assert a is not None
    assert b is not None
    assert all(torch.allclose(a[k], b[k], rtol=0, atol=1e-10) for k in a)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize(
    "options",
    [
        {"participation": 0.5},
        {"participation": 0.5, "evaluate_clients": "participants"},
        {"aggregator": "median", "participation": 0.7},
        {"model": "gat", "heads": 2},
        {"batch_size": 3, "fanout": "2,2", "keep_optimizer": True},
        {"kernels": "torch", "dtype": "float64"},
        {"method": "label_guided"},
        {"method": "label_guided", "min_nodes_per_row": 2, "min_silos_per_row": 2},
        {"collect": 0.5},
        {"features": "degree"},
    ],
    ids=str,
)
def test_options_reach_the_silos(
    make_graph: Callable[..., Graph], tmp_path: Path, options: dict[str, Any]
) -> None:
    graph, options = make_graph(60, sparse=True), {"method": "fedavg", **options}
    config = config_of(3, **BASE | options)
    ours = federate(folders(graph, config, tmp_path / "silos"), config, PLAIN)
    assert_same(ours, simulated(graph, 3, **options))


def test_silos_without_features_count_their_degrees(
    make_graph: Callable[..., Graph], tmp_path: Path
) -> None:
    """One-hot degrees have a width of their own, so that no silo tells its largest degree."""
    graph = replace(make_graph(60), x=torch.zeros(60, 0))
    config = config_of(3, **BASE | {"method": "fedavg"})
    silos = folders(graph, config, tmp_path / "silos")
    assert not list(tmp_path.glob("silos/*/features.*"))
    config = replace(config, features="onehot-degree")
    ours = federate(silos, config, PLAIN)
    assert_same(ours, simulated(graph, 3, method="fedavg", features="onehot-degree"))
    with pytest.raises(DataError, match="'the federation' without: choose features degree, const"):
        federate(silos, replace(config, features="given"), PLAIN)


def test_a_result_folder_without_a_cut(
    make_graph: Callable[..., Graph], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, out = make_graph(60), tmp_path / "out"
    config = config_of(3, **BASE, out=str(out))
    result = federate(folders(graph, config, tmp_path / "silos"), config, PLAIN)
    files = {path.name for path in out.iterdir()}
    assert {"result.json", "report.html", "model.safetensors", "clients.csv"} <= files
    assert "simulation.json" not in files
    about = json.loads((out / "run.json").read_text(encoding="utf-8"))
    assert about["simulated"] is False
    assert about["dataset"] == {"name": "planted", "features": 7, "classes": 3}
    page = (out / "report.html").read_text(encoding="utf-8")
    assert 'id="cut"' not in page
    assert "client_02" in page
    assert (result.cut, result.test.uncut) == (None, None)
    print_result(replace(result, judged_without=("client_01", "client_02")))
    shown = capsys.readouterr().out
    assert "uncut" not in shown
    assert "judged without the nodes of client_01, client_02: away in that round\n" in shown
    assert sg.run(graph, config=config_of(3, **BASE), out=str(tmp_path / "sim")).cut is not None


def test_silos_that_do_not_fit(make_graph: Callable[..., Graph], tmp_path: Path) -> None:
    config, said = config_of(2, **BASE), list[str]()
    one = folders(make_graph(60), config, tmp_path / "one")[0]
    other = folders(make_graph(60, features=9), config, tmp_path / "other")[1]
    with raises_code(
        DataError, "silos-disagree", what="features", silo="client_01", other="client_00"
    ) as failure:
        federate([one, other], config, PLAIN, silo_lines=said)
    assert said.count(str(failure.value)) == 2


def test_only_the_silo_itself_names_the_nodes_of_an_edge(tmp_path: Path) -> None:
    north, south = folder(tmp_path / "north", NORTH), folder(tmp_path / "south", SOUTH)
    table = "own,silo,remote\nc,south,k2\na,south,k1\n"  # without the last edge
    (north / "cross_edges.csv").write_text(table, encoding="utf-8")
    (tmp_path / "secret").write_bytes(bytes(20))
    said: list[str] = []
    with pytest.raises(DataError) as failure:
        federate([north, south], config_of(2, **BASE | {"split": "public"}), PLAIN, silo_lines=said)
    assert str(failure.value) == (
        "expected both owners of a cross-silo edge to list it, got 1 of south that lead to north, "
        "which does not list them with the same weights: south itself says which, where it was "
        "started"
    )
    (named,) = [line for line in said if "the first is from 'k2' to 'b'" in line]
    assert named.startswith("expected both owners")


def test_silos_without_the_same_secret_are_told_to_look_there(
    make_graph: Callable[..., Graph], tmp_path: Path
) -> None:
    config, said = config_of(2, **BASE), list[str]()
    silos = folders(make_graph(60), config, tmp_path / "silos")
    for number, path in enumerate(silos):
        (path / "secret").write_bytes(bytes([number]) * 32)
    with raises_code(
        DataError, "silos-disagree", what="edges", silo="client_00", other="client_01"
    ):
        federate(silos, config, PLAIN, silo_lines=said, own_secrets=True)
    for other in ("client_00", "client_01"):
        line = (
            f"; as these are all: see first whether {other} has the same secret, or other weights"
        )
        assert sum(each.endswith(line) for each in said) == 1


def test_the_first_of_many_edges_is_named(tmp_path: Path) -> None:
    """More than a thousand disagree: the number is right, and the first is that of the table."""
    edges = "".join(f"{own},south,k{n}\n" for n in range(600) for own in "ba")
    north = folder(tmp_path / "north", NORTH | {"cross_edges.csv": f"own,silo,remote\n{edges}"})
    nodes = "".join(f"k{n},dog,train\n" for n in range(600))
    features = "".join(f"k{n},1,2\n" for n in range(600))
    south = folder(
        tmp_path / "south",
        SOUTH
        | {
            "nodes.csv": f"id,label,split\n{nodes}",
            "features.csv": f"id,size,age\n{features}",
            "cross_edges.csv": "own,silo,remote\n",
        },
    )
    (tmp_path / "secret").write_bytes(bytes(20))
    said: list[str] = []
    config = config_of(2, **BASE | {"split": "public"})
    with raises_code(DataError, "silos-disagree", what="edges", silo="north", other="south"):
        federate([north, south], config, PLAIN, silo_lines=said)
    (named,) = [line for line in said if "the first is" in line]
    assert "got 1200 of north" in named
    assert "the first is from 'b' to 'k0': list it" in named


def test_other_versions_are_refused(
    make_graph: Callable[..., Graph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(2, **BASE)
    silos = folders(make_graph(60), config, tmp_path / "silos")
    old = {**versions(), "silograph": "0.0.1"}
    monkeypatch.setattr("silograph.deploy.silo.versions", lambda: old)
    with raises_code(ConfigError, "other-version", got="0.0.1"):
        federate(silos, config, PLAIN)


def test_other_packages_are_told_of(
    make_graph: Callable[..., Graph],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = config_of(2, **BASE)
    silos = folders(make_graph(60), config, tmp_path / "silos")
    monkeypatch.setattr("silograph.deploy.silo.versions", lambda: {**versions(), "torch": "1.0"})
    federate(silos, config, PLAIN)
    assert "client_01 has torch 1.0, the server" in caplog.text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"method": "centralized"},
            "got centralized, whose server needs the uncut graph",
        ),
        (
            {"method": "llcg"},
            "got llcg, whose server needs nodes of its own",
        ),
        ({"method": "mine.py:M"}, r"expected to import .*/mine\.py, got FileNotFoundError"),
        (
            {"model": "mine.py:M", "hidden": 128},
            r"expected to import .*/mine\.py, got FileNotFoundError",
        ),
        ({"largest_component": True}, "expected silos' own data as they are, got largest_comp"),
        ({"device": "hpu"}, "^device: expected cpu or cuda, on which silos compute, got 'hpu'"),
        ({"method": "fedgraph", "model": "mlp"}, "expected a model that sums over neighbors for"),
        ({"out": "."}, "expected a result folder that does not exist yet"),
        ({"method": "fedais", "model": "gat"}, "expected a model whose sums can be shared, got"),
        ({"method": "fedper", "weights_as": "int4"}, "expected weights_as=exact and weight_rows="),
        ({"method": "label_guided", "min_silos_per_row": 2}, "expected at most 1 for min_silos_p"),
    ],
)
def test_runs_that_silos_cannot_do(options: dict[str, Any], says: str) -> None:
    events: list[Event] = []
    with pytest.raises(ConfigError, match=says):
        serve(config_of(2, **BASE | options), PLAIN, report=events.append)
    assert events == []  # the server has never listened


@pytest.mark.parametrize(
    ("venue", "says"),
    [
        (ServerSettings("127.0.0.1:0"), "expected the server's certificate and key, got none"),
        (ServerSettings("0.0.0.0:0", insecure=True), "expected TLS to 0.0.0.0, got --insecure"),
        (ServerSettings("nowhere", insecure=True), "listen: expected HOST:PORT, got 'nowhere'"),
        (
            ServerSettings("127.0.0.1:0", silos=("a", "a")),
            "silos: expected every silo once, got a, a",
        ),
        (ServerSettings("127.0.0.1:0", silos=("a/b",)), "expected a silo's name of up to 64"),
        (ServerSettings("127.0.0.1:0", least=3), "least: expected 1 to 2 silos, got 3"),
        (
            ServerSettings("127.0.0.1:0", insecure=True, patience=0.1),
            r"expected 2 silos within 0.1 s, got 0 \(none\): start them with silograph silo",
        ),
    ],
)
def test_places_where_no_silo_can_come(venue: ServerSettings, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        serve(config_of(2, **BASE), venue)


def test_a_bound_that_no_update_has_is_refused_before_silos_come() -> None:
    events: list[Event] = []
    line = "^expected a method whose silos answer weights with what these have become, for --max-"
    with pytest.raises(ConfigError, match=line):
        serve(
            config_of(2, **BASE, method="fedais"),
            replace(PLAIN, update_norm=3.0),
            report=events.append,
        )
    assert events == []


class Door:
    """Stands for a hub where silos attach in a given order, some of whom are gone at once."""

    address = "nowhere"

    def __init__(self, coming: list[tuple[str, bool]]) -> None:
        self.coming = [self.attached(name, alive=alive) for name, alive in coming]
        self.said: list[str] = []

    def __call__(self, *_: object) -> "Door":
        return self

    def attached(self, name: str, *, alive: bool) -> Any:
        def send(data: bytes, most: int) -> None:
            self.said.append(name)

        def receive(seconds: float | None) -> bytes:
            raise LostError("gone", Cause.GONE)

        link: Any = SimpleNamespace(alive=alive, send=send, receive=receive, close=lambda: None)
        peer = Peer(name, link, bytes(16))
        return SimpleNamespace(name=name, facts={}, link=link, peer=peer)

    def next(self, seconds: float) -> Any:
        return self.coming.pop(0) if self.coming else None

    def returned(self) -> list[Any]:
        return self.coming

    def close(self) -> None:
        pass


def meeting_at(door: Door, monkeypatch: pytest.MonkeyPatch) -> ServerSession:
    monkeypatch.setattr("silograph.federation.session.hub.Hub", door)
    monkeypatch.setattr("silograph.deploy.server.credentials", lambda venue: None)
    watch: Any = SimpleNamespace(report=lambda event: None)
    return ServerSession(
        config_of(2),
        ServerSettings("x:1", accept_first_keys=True),
        SessionState(bytes(16), {}),
        ("a", "b"),
        watch,
    )


def test_silos_that_are_gone_before_the_others_come_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    door = Door([("a", False), ("b", True), ("a", True)])
    found = meeting_at(door, monkeypatch)._wait_for_silos()
    assert {name: joined.link.alive for name, joined in found.items()} == {"a": True, "b": True}
    door = Door([("a", False), ("b", True)])
    with raises_code(ConfigError, "too-few-silos", expected=2, got=1):
        meeting_at(door, monkeypatch)._wait_for_silos()


def test_silos_that_are_back_but_in_no_round_hear_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    door = Door([("a", True), ("b", True)])
    meeting = meeting_at(door, monkeypatch)
    meeting._wait_for_silos()
    door.coming = [door.attached("b", alive=True)]
    meeting.close("")
    assert door.said == ["a", "b"]


def test_a_failed_run_is_told_to_the_silos(
    make_graph: Callable[..., Graph], tmp_path: Path
) -> None:
    config = config_of(2, **BASE | {"method": "fedavg", "optimizer": "sgd", "lr": 1e30})
    said: list[str] = []
    with pytest.raises(TrainingError) as failure:
        federate(
            folders(make_graph(60), config, tmp_path / "silos"), config, PLAIN, silo_lines=said
        )
    assert said.count(str(failure.value)) == 2


@pytest.mark.parametrize("evaluation", ["none", "counts", "histograms"])
def test_what_leaves_of_an_evaluation_is_what_a_silos_policy_says(
    make_graph: Callable[..., Graph], tmp_path: Path, evaluation: EvaluationLevel
) -> None:
    """One silo of three has the policy; with a least count bits are those of the simulation."""
    config = config_of(3, **BASE | {"evaluation_min_count": 5})
    graph = make_graph(300)
    silos = folders(graph, config, tmp_path / "silos")
    policies = {silos[1]: SiloPolicy(evaluation=evaluation, evaluation_min_count=5)}
    ours = federate(silos, config, PLAIN, policies=policies, keep=True)
    theirs = sg.run(graph, config=config, block_size=1)
    assert same_bits(weights_of(ours), weights_of(theirs))
    accuracies = ours.client_accuracy["server"]
    assert [value is None for value in accuracies] == [False, evaluation == "none", False]
    if evaluation == "histograms":
        assert_same(ours, theirs)
        return
    fewer = {"nodes": 2 if evaluation == "none" else 3, "auc": 2}
    assert ours.scored_clients["server"] == ours.scored_clients["personalized"] == fewer
    assert f"over {fewer['nodes']} of 3" in ours.summary() or evaluation == "counts"
    # The silo itself has all of its own figures.
    (own,) = (silos[1] / "results").glob("*/result.json")
    assert json.loads(own.read_text(encoding="utf-8"))["test"]["server"]["auc"] is not None
