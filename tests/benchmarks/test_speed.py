import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "speed"))

import bench
import peers
import race
import side
import timing
from cells import CPP, KEPT, OURS, PEERS, RACES, REBUILT, VARIANTS, Row, Shape
from floor import Floor, build_floor
from loop import FORMS, PlainLoop, TunedLoop
from page import lines_of, tables

from conftest import MakeGraph
from silograph.core.config import RunConfig, make_config
from silograph.experiment.resolve.data import Cut
from silograph.experiment.run.setup import prepare
from silograph.graph.graph import Graph, Split

SHORT = timing.Plan(data_dir=None, turns=2, seconds=0.0)


def config_of(**options: object) -> RunConfig:
    own = {"clients": 4, "partition": "random", "hidden": 8, "local_epochs": 3, "dropout": 0.0}
    method = {"method": "fedavg", "dtype": "float64", "rounds": 100}
    return make_config({**own, **method, **options})


def without_training_nodes(cut: Cut, client: int) -> Cut:
    """Return the cut with one client's training nodes out of use."""
    train = cut.split.train & (cut.partition.owner != client)
    return replace(cut, split=Split(train, cut.split.val, cut.split.test))


@pytest.fixture
def graph(make_graph: MakeGraph) -> Graph:
    return make_graph(sparse=True)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("form", [None, *FORMS])
@pytest.mark.parametrize("epochs", [1, 3])
def test_loops_train_the_weights_that_silograph_trains(
    graph: Graph, form: str | None, epochs: int
) -> None:
    ours = side.Ours(prepare(config_of(local_epochs=epochs), graph))
    setup = ours.setup
    loop = (
        PlainLoop(setup.cut, setup.config, ours.weights)
        if form is None
        else TunedLoop(setup.cut, setup.config, ours.weights, form)
    )
    previous = None
    for _ in range(3):
        judged, rows = loop.round(), ours.round()
        assert isinstance(rows, list)
        if previous is None:
            assert not rows  # clients score a round's model when the next round begins
        else:
            (row,) = rows
            for part, accuracies in (("val", previous.val), ("test", previous.test)):
                mean = sum(accuracies) / len(accuracies)
                # Accuracies are float32 on the loop's side.
                assert mean == pytest.approx(row[f"{part}_server_accuracy_client_mean"], abs=1e-6)
        previous = judged
    for name, w in ours.weights.items():
        torch.testing.assert_close(loop.weights[name], w, rtol=0, atol=1e-10)


def test_a_client_without_training_nodes_has_no_say(graph: Graph) -> None:
    ours = side.Ours(prepare(config_of(), graph))
    cut = without_training_nodes(ours.setup.cut, 1)
    plain = PlainLoop(cut, ours.setup.config, ours.weights)
    tuned = TunedLoop(cut, ours.setup.config, ours.weights, "dense")
    assert len(plain.round().val) == len(tuned.round().val) == 4
    for name, w in plain.weights.items():
        assert w.isfinite().all()
        torch.testing.assert_close(tuned.weights[name], w, rtol=0, atol=1e-10)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler of C++")
@pytest.mark.parametrize("epochs", [1, 3])
def test_the_round_in_cpp_trains_the_weights_that_silograph_trains(
    graph: Graph, tmp_path: Path, epochs: int
) -> None:
    config = config_of(local_epochs=epochs, hidden=128, dtype="float32")
    ours = side.Ours(prepare(config, graph))
    program = build_floor(tmp_path)
    assert program is not None
    floor = Floor(program, tmp_path, ours.setup.cut, ours.setup.config, ours.weights)
    for _ in range(2):
        floor.round(), ours.round()
    for name, w in floor.weights.items():
        torch.testing.assert_close(w, ours.weights[name], rtol=0, atol=1e-4)
    floor.child.close()


def test_peers_that_are_missing_are_said_to_be(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = make_graph(sparse=True)
    monkeypatch.setattr(race, "graph_of", lambda *_: graph)
    monkeypatch.setattr(peers, "build_floor", lambda _: None)
    monkeypatch.setattr(timing, "TURN_SECONDS", 1e-9)
    row = peers.race_peers(Shape("planted", 4, epochs=1), SHORT)
    assert set(row["seconds_a_round"]) == set(OURS)
    lines = lines_of(next(iter(PEERS)), row)
    assert sum(line.endswith("not measured") for line in lines) == 5
    assert any(KEPT in line for line in lines)


def test_a_side_with_another_optimizer_does_other_work(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = make_graph(sparse=True)
    monkeypatch.setattr(race, "graph_of", lambda *_: graph)
    one, other = (
        race.ours(Shape("planted", 4), SHORT, keep_optimizer=keeps) for keeps in OURS.values()
    )
    with pytest.raises(RuntimeError, match="the sides do not do the same work"):
        race.logits_apart({REBUILT: one, KEPT: other}, REBUILT, one.setup, "float32")


def test_a_run_in_another_process_waits_for_commands() -> None:
    options = {"graph": "digits", "clients": 3, "partition": "random", "rounds": 100, "hidden": 4}
    script = Path(side.__file__).with_name("turns.py")
    child = timing.Child([sys.executable, str(script), json.dumps(options)])
    spent = timing.timed(child, 2)
    assert spent.wall > 0
    assert spent.cpu > 0
    (score,) = child.ask("score 0")
    assert 0 <= score <= 1
    child.close()
    with pytest.raises(ValueError, match="closed file"):
        child.ask("rounds 1")


def test_loops_drop_activations_in_training_only(graph: Graph) -> None:
    setup = prepare(config_of(dropout=0.5), graph)
    start = side.Ours(setup).weights
    with torch.random.fork_rng():
        one, other = (TunedLoop(setup.cut, setup.config, start, "dense") for _ in range(2))
        one.round(), other.round()
        assert not torch.equal(one.weights["1.weight"], other.weights["1.weight"])
        assert one._judge() == one._judge()


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_race_fails_where_a_side_does_other_work(
    graph: Graph, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(race, "graph_of", lambda *_: graph)
    shape = Shape("planted", 4)
    assert set(race.agreement(shape, SHORT, "dense", dtype)) == {"tuned", *VARIANTS}
    monkeypatch.setattr(TunedLoop, "round", lambda _: None)
    with pytest.raises(RuntimeError, match="the sides do not do the same work"):
        race.agreement(shape, SHORT, "dense", dtype)


def test_sides_take_turns_in_changing_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "timed", lambda act, _rounds: act() or timing.Spent(1.0, 2.0))
    seen: list[str] = []
    sides = {name: lambda n=name: seen.append(n) for name in "ab"}
    spent = timing.take_turns(sides, SHORT)
    assert "".join(seen) == "aaabbb" + "ab" + "ba"
    assert [len(turns) for turns in spent.values()] == [2, 2]


def test_a_turn_can_be_as_many_rounds_on_all_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "timed", lambda act, n: act(n) or timing.Spent(1.0, 2.0))
    seen: list[int] = []
    timing.take_turns({"one": seen.append, "other": seen.append}, SHORT, 7)  # type: ignore[dict-item]
    assert seen == [1] * 2 * timing.WARM_UP + [7] * 4


def test_ratios_are_of_neighbors() -> None:
    spent = {
        "loop": [timing.Spent(2.0, 4.0), timing.Spent(6.0, 8.0), timing.Spent(3.0, 3.0)],
        "ours": [timing.Spent(1.0, 1.0), timing.Spent(2.0, 2.0), timing.Spent(3.0, 1.0)],
    }
    # Wall: 2, 3, 1. CPU: 4, 4, 3. Quartiles of three are half way to the median.
    assert timing.ratios(spent, "loop", "ours") == {"wall": [1.5, 2, 2.5], "cpu": [3.5, 4, 4]}


def test_a_cell_is_measured_once_and_shown(
    make_graph: MakeGraph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    graph = make_graph(150, sparse=True)
    monkeypatch.setattr(race, "graph_of", lambda *_: graph)
    monkeypatch.setattr(bench, "LINES", tmp_path / "bench.jsonl")
    monkeypatch.setattr(bench, "PAGE", tmp_path / "bench.md")
    monkeypatch.setattr(timing, "TURN_SECONDS", 1e-9)
    bench.PAGE.write_text(f"before\n{side.MARK}\n{side.MARK}\nafter\n")
    argv = ["bench.py", "--rounds", "2", "--seconds", "0", "--cells", "cora-10", "cora-10-e1"]
    monkeypatch.setattr("sys.argv", argv)
    bench.main()
    bench.main()  # nothing is left to do
    rows = [json.loads(line) for line in bench.LINES.read_text().splitlines()]
    assert [row["cell"] for row in rows] == ["cora-10", "cora-10-e1"]
    assert rows[0]["turns"] == 2
    page = bench.PAGE.read_text()
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert page.count("not measured") == len(bench.CELLS) - 2
    for variant in VARIANTS:
        assert f"| cora-10 | silograph, {variant} |" in page
        assert f"at least {RACES['cora-10'].aims[variant]:g}" in page
    assert "cora-10" in capsys.readouterr().out


def test_every_other_cell_has_its_lines() -> None:
    ratio = {"wall": [1.0, 1.25, 1.5], "cpu": [10.0, 12.34, 20.0]}
    spent = {"wall": 0.5, "cpu": 0.25}
    machine = {"processor": "P", "cores": 2, "load": [0.1, 2.0]}
    rows: dict[str, Row] = {
        "epoch-cora": {"epochs": {"1 epoch, judged": {"ratio": ratio}}},
        "threads-cora-100": {"ratio": ratio},
        "help": {"seconds_a_call": spent},
        "peers-100-e1": {
            "apart": {CPP: 1e-6},
            "seconds_a_round": dict.fromkeys((CPP, *OURS), spent),
            "over_ours": {},
            "over_cpp": {REBUILT: ratio},
            "kept_over_rebuilt": ratio,
        },
        "memory-kept": {"peak_gb": {"rebuilt": 1.0, "kept": 1.5}, "imports_gb": 0.25},
        "before-fedais": {"before": "0", "seconds_a_round": [spent, spent], "ratio": ratio},
        "silos-3": {
            "seconds_a_round": {"silos": spent, "simulation": spent},
            "over": {"simulation": ratio},
        },
        "memory": {"peak_gb": {"compiled": 1.234, "torch": "failed: why"}},
    }
    lines = tables({name: row | machine for name, row in rows.items()}).splitlines()
    assert (
        "| federated over centralized, cora, 100 clients, 1 epoch, judged "
        "| CPU 12.3 (10.0 to 20.0), wall clock 1.25 (1.00 to 1.50) | at most 2.5 |"
    ) in lines
    peer = "cora, 100 clients, 1 epoch"
    clocks = "CPU 12.3 (10.0 to 20.0), wall clock 1.25 (1.00 to 1.50)"
    assert f"| peers-100-e1 | {CPP} | 250.0 | - | - | - | 1e-06 |" in lines
    assert f"| silograph over C++, Adam rebuilt, {peer} | {clocks} | at most 2.6 |" in lines
    assert f"| Adam kept over rebuilt, {peer} | {clocks} | at most 1.8 |" in lines
    what = "peak memory, cora, 100 clients, Adam kept over rebuilt"
    assert f"| {what} | 1.50, imports alone take 0.25 GB | at most 1.2 |" in lines
    what = "fedais, 0 over now, cora, 10 clients, 250 and 250 ms"
    assert f"| {what} | {clocks} | at least 2.5 |" in lines
    what = "round of 3 silos over simulation, cora, CPU 250 and 250 ms"
    assert f"| {what} | {clocks} | at most 3 |" in lines
    assert "| 1 thread over 2, cora-100 | wall clock 1.25 (1.00 to 1.50) | - |" in lines
    assert "| `silograph --help` | CPU 0.25 s, wall clock 0.50 s | CPU under 0.4 s |" in lines
    what = "peak memory, coauthor_cs, 1,000 clients, width 256"
    assert f"| {what}, compiled | 1.23 GB | under 1.5 GB |" in lines
    assert f"| {what}, torch | failed: why | under 1.5 GB |" in lines
    assert lines[-1] == "P, 2 cores; load average 0.1 to 2.0."
