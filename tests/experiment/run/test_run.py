"""Laws of `run`: what decides a run, what must not, and what it does to its surroundings."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import silograph as sg
from commands import save
from mistakes import raises_code
from runs import (
    FAST,
    MakeGraph,
    assert_close,
    go,
    outcome,
    rows_of,
    same_bits,
    some_of,
    weights_of,
)
from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError, DataError, PartitionError, TrainingError
from silograph.core.key import Key
from silograph.experiment.resolve.resolve import SimulatedRun, resolve_simulation
from silograph.experiment.run.result import Result
from silograph.experiment.run.run import run
from silograph.experiment.run.setup import Setup, set_up
from silograph.graph.graph import Graph, Split
from silograph.methods import METHODS
from silograph.nn import forward
from silograph.nn.conv import Params
from silograph.nn.model import Model

# --- the same again, and grouping -----------------------------------------------------------------


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_same_config_gives_the_same_bits(
    make_graph: MakeGraph, method: str, dtype: str
) -> None:
    options = {"method": method, "dtype": dtype, "partition": "metis", **some_of(method, 0.5)}
    first, second = (go(make_graph(), **options) for _ in range(2))
    assert same_bits(weights_of(first), weights_of(second))
    assert (weights_of(first) is None) == (METHODS[method].evaluate.view != "server")
    assert rows_of(first) == rows_of(second)
    assert first.test == second.test
    assert first.val == second.val
    assert first.best_round == second.best_round
    assert first.partition_hash == second.partition_hash
    assert first.config == second.config


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("method", ["fedavg", "fedopt", "local"])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_the_result_does_not_depend_on_the_block_size(
    make_graph: MakeGraph, method: str, participation: float
) -> None:
    graph = make_graph(70)
    options = {"clients": 7, "method": method, "participation": participation}
    whole = go(graph, **options)
    assert whole.config.block_size == 7
    for block_size in (1, 3, 50):
        parts = go(graph, **options, block_size=block_size)
        assert_close(parts, whole, 1e-10)
        assert parts.best_round == whole.best_round


def test_the_config_of_a_result_repeats_it(make_graph: MakeGraph) -> None:
    graph = make_graph()
    first = go(graph, seed=3, split_seed=8)
    config = first.config
    seeds = (config.seed, config.partition_seed, config.split_seed, config.init_seed)
    assert seeds == (3, 3, 8, 3)
    assert (config.dataset, config.clients, config.keep_optimizer) == ("planted", 4, False)
    again = run(graph, config=config)
    assert again.config == config
    assert same_bits(weights_of(first), weights_of(again))
    assert rows_of(again) == rows_of(first)


# --- seeds ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Draws:
    """What the seeds decided."""

    cut: str
    split: tuple[tuple[bool, ...], ...]
    init: dict[str, list[Any]]
    training: list[int]


@pytest.fixture
def draws(
    setups: list[Setup], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Draws, Result]]:
    """Return a function that runs and tells what was drawn, and the result."""
    keys: list[int] = []
    starts: list[Params] = []
    drop, init = forward.dropped, Model.init_weights

    def dropped(x: Tensor, share: float, row_key: Tensor, key: Key) -> Tensor:
        keys.append(key.value)
        return drop(x, share, row_key, key)

    def init_weights(model: Model, key: Key, dtype: torch.dtype) -> Params:
        starts.append(init(model, key, dtype))
        return {k: w.clone() for k, w in starts[-1].items()}

    monkeypatch.setattr(forward, "dropped", dropped)
    monkeypatch.setattr(Model, "init_weights", init_weights)

    def drawn(graph: Graph, **options: Any) -> tuple[Draws, Result]:
        keys.clear()
        result = go(graph, kernels="torch", **options)  # compiled draws cannot be watched
        split = setups[-1].cut.split
        masks = tuple(tuple(mask.tolist()) for mask in (split.train, split.val, split.test))
        start = {k: w.tolist() for k, w in starts[-1].items()}
        return Draws(result.partition_hash, masks, start, list(keys)), result

    return drawn


def changed(a: Draws, b: Draws) -> set[str]:
    return {f.name for f in dataclasses.fields(Draws) if getattr(a, f.name) != getattr(b, f.name)}


@pytest.mark.law(sample=6)
@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        ("seed", {"training"}),
        ("partition_seed", {"cut", "split"}),  # a split has its shares in every client
        ("split_seed", {"split"}),
        ("init_seed", {"init"}),
    ],
)
def test_each_seed_changes_its_own_draw_only(
    make_graph: MakeGraph,
    draws: Callable[..., tuple[Draws, Result]],
    seed: str,
    expected: set[str],
) -> None:
    seeds = {"seed": 1, "partition_seed": 2, "split_seed": 3, "init_seed": 4}
    before, old = draws(make_graph(), **seeds)
    after, new = draws(make_graph(), **(seeds | {seed: 9}))
    assert changed(before, after) == expected
    assert not same_bits(weights_of(old), weights_of(new))


def test_a_public_split_follows_neither_the_cut_nor_its_seed(
    make_graph: MakeGraph, draws: Callable[..., tuple[Draws, Result]]
) -> None:
    plain = make_graph()
    place = torch.arange(plain.num_nodes) % 3
    graph = replace(plain, split=Split(place == 0, place == 1, place == 2))
    seeds = {"seed": 1, "partition_seed": 2, "split_seed": 3, "split": "public"}
    before, _ = draws(graph, **seeds)
    assert before.split[0] == tuple((place == 0).tolist())
    assert changed(before, draws(graph, **(seeds | {"partition_seed": 9}))[0]) == {"cut"}
    assert changed(before, draws(graph, **(seeds | {"split_seed": 9}))[0]) == set()


def test_the_seed_stands_for_those_that_are_not_given(
    make_graph: MakeGraph, draws: Callable[..., tuple[Draws, Result]]
) -> None:
    short, _ = draws(make_graph(), seed=5)
    long, _ = draws(make_graph(), seed=5, partition_seed=5, split_seed=5, init_seed=5)
    assert changed(short, long) == set()
    other, _ = draws(make_graph(), seed=6)
    assert changed(short, other) == {"cut", "split", "init", "training"}


def test_training_draws_nothing_but_dropout_and_participants(make_graph: MakeGraph) -> None:
    seeds = {"partition_seed": 2, "split_seed": 3, "init_seed": 4}
    first, second = (go(make_graph(), seed=s, dropout=0.0, **seeds) for s in (1, 9))
    assert same_bits(weights_of(first), weights_of(second))
    assert rows_of(first) == rows_of(second)


# --- around the run -------------------------------------------------------------------------------


def test_torch_threads_are_those_of_the_run_and_then_as_before(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def cut(*given: Any) -> SimulatedRun:
        threads.append(torch.get_num_threads())
        return resolve_simulation(*given)

    def build(run: SimulatedRun) -> Setup:
        threads.append(torch.get_num_threads())
        return set_up(run)

    monkeypatch.setattr("silograph.experiment.resolve.resolve.resolve_simulation", cut)
    monkeypatch.setattr("silograph.experiment.run.run.set_up", build)
    torch.set_num_threads(3)
    go(make_graph(), threads=2)
    assert torch.get_num_threads() == 3
    with pytest.raises(PartitionError, match="clients: expected 1 to 60 "):
        go(make_graph(), threads=2, clients=61)
    assert threads == [2, 2, 2]
    assert torch.get_num_threads() == 3


def test_torch_threads_after_an_error_in_training(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        assert torch.get_num_threads() == 2
        raise KeyboardInterrupt

    monkeypatch.setitem(METHODS, "fedavg", replace(METHODS["fedavg"], round=broken))
    torch.set_num_threads(3)
    with pytest.raises(KeyboardInterrupt):
        go(make_graph(), threads=2)
    assert torch.get_num_threads() == 3


def test_a_run_draws_nothing_from_the_global_generators(make_graph: MakeGraph) -> None:
    before, numpy_before = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
    go(make_graph(), participation=0.5)
    assert torch.equal(torch.get_rng_state(), before)
    assert repr(np.random.get_state()) == repr(numpy_before)  # noqa: NPY002


def test_a_run_leaves_the_graph_as_it_is(make_graph: MakeGraph) -> None:
    graph = make_graph()
    assert isinstance(graph.x, Tensor)
    x, y, edges = graph.x.clone(), graph.y.clone(), graph.edge_index
    go(graph, normalize="row", largest_component=True)
    assert torch.equal(graph.x, x)
    assert torch.equal(graph.y, y)
    assert torch.equal(graph.edge_index, edges)


def test_a_folder_only_where_one_is_asked_for(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = go(make_graph())
    assert result.result_dir is None
    assert result.config.out is None
    assert list(tmp_path.iterdir()) == []
    written = go(make_graph(), out="a/b")
    assert written.result_dir == "a/b"
    assert (tmp_path / "a" / "b" / "result.json").is_file()
    assert outcome(written) == outcome(result)


def test_a_graph_by_path_or_in_memory(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph = make_graph()
    path = tmp_path / "mine.npz"
    assert isinstance(graph.x, Tensor)
    np.savez(path, x=graph.x.numpy(), edge_index=graph.edge_index, y=graph.y, node_id=graph.node_id)
    in_memory = go(graph)
    for given in (path, str(path)):
        result = run(given, **FAST)
        assert result.config.dataset == str(path)
        assert same_bits(weights_of(result), weights_of(in_memory))
    assert same_bits(weights_of(run(dataset=str(path), **FAST)), weights_of(in_memory))
    assert same_bits(weights_of(sg.run(sg.load(path), **FAST)), weights_of(in_memory))


def test_a_config_and_what_replaces_it(make_graph: MakeGraph) -> None:
    config = RunConfig(clients=4, rounds=3, hidden=8, seed=7)
    result = run(make_graph(), config=config, rounds=2, init_seed=1, clients=None)
    chosen = result.config
    assert (chosen.rounds, chosen.hidden, chosen.seed, chosen.init_seed) == (2, 8, 7, 1)
    assert chosen.clients == 10
    assert config == RunConfig(clients=4, rounds=3, hidden=8, seed=7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"roundss": 3}, "unknown option 'roundss': did you mean 'rounds'"),
        ({"method": "fedavgg"}, "unknown method 'fedavgg': did you mean 'fedavg'"),
        ({"partition": "metes"}, "unknown partition 'metes': did you mean 'metis'"),
        ({"model": "gcnn"}, "unknown model 'gcnn': did you mean 'gcn'"),
        (
            {"method": "fedopt", "options": {"server_lrr": 1}},
            "option server_lrr: model gcn, selector uniform and .*: did you mean 'server_lr'",
        ),
        (
            {"options": {"mu": 1}},
            "option mu: method fedavg has no such option, but method fedprox has it",
        ),
        (
            {"momentum": 0.9},
            "expected no momentum with optimizer=adam, got momentum=0.9: use optimizer=sgd",
        ),
        (
            {"device": "gpu"},
            "device: expected a torch device of this machine, such as cpu or cuda:0, got 'gpu'",
        ),
        (
            {"device": "meta"},
            "device: expected a torch device of this machine, such as cpu or cuda:0, got 'meta'",
        ),
        ({"progress": "loud"}, "expected progress live, plain or none, got 'loud'"),
    ],
)
def test_options_that_cannot_be_used(
    make_graph: MakeGraph, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        go(make_graph(), **options)


def test_a_wrong_name_costs_no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> Graph:
        raise AssertionError("loaded")

    monkeypatch.setattr("silograph.graph.datasets.load", load)
    wrong: list[dict[str, Any]] = [{"method": "nosuch"}, {"model": "x"}, {"progress": "x"}]
    for options in wrong:
        with pytest.raises(ConfigError):
            run("digits", **options)


def test_no_training_node_at_all(make_graph: MakeGraph) -> None:
    with raises_code(DataError, "no-training-nodes"):
        go(make_graph(), split="0.01/0.5/0.4")
    graph = make_graph()
    none = torch.zeros(60, dtype=torch.bool)
    empty = replace(graph, split=Split(none, none, ~none))
    with raises_code(DataError, "no-training-nodes"):
        go(empty, split="public")


@pytest.mark.parametrize("mode", ["live", "plain", "none"])
def test_progress_goes_to_standard_error(
    make_graph: MakeGraph, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    go(make_graph(), progress=mode)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert ("val accuracy" in shown.err) == (mode != "none")
    assert shown.err.count("kernels, 4 clients at once, 1 thread\n") == (mode != "none")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected a finite validation loss, got nan in round 1: training diverged; lower"),
        ({"split": "0.5/0/0.5"}, "expected a finite test loss, got nan in round 1: training"),
        ({"eval_every": 9}, "expected a finite training loss, got nan in round 2: training"),
        ({"method": "local"}, "expected a finite validation loss, got nan in round 1: training"),
        (
            {"eval_every": 9, "max_bytes": 1},
            "expected a finite validation loss, got nan in round 1",
        ),
    ],
)
def test_a_run_that_diverges_says_so(
    make_graph: MakeGraph, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    base: dict[str, Any] = {"method": "fedavg", "clients": 3, "partition": "random"}
    base |= {"optimizer": "sgd", "lr": 1e30}
    out = tmp_path / "run"
    with pytest.raises(TrainingError, match=message):
        run(make_graph(), **base | options, rounds=9, out=str(out))
    assert not (out / "result.json").exists()
    if "in round 1" in message:  # nothing to go on from
        assert not out.exists()
    else:
        with pytest.raises(TrainingError, match=message):
            sg.resume(out, graph=make_graph())


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_training_loss_that_is_no_number(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch, loss: float
) -> None:
    fedavg = METHODS["fedavg"]

    def broken(*arguments: Any) -> Any:
        state, report = fedavg.round(*arguments)
        return state, replace(report, train_loss=loss)

    monkeypatch.setitem(METHODS, "fedavg", replace(fedavg, round=broken))
    with raises_code(TrainingError, "diverged", loss="training", got=str(loss)):
        go(make_graph())


# --- what is given --------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [3, 0, False, b"digits", ["digits"], {}, np.eye(3), RunConfig()])
def test_what_is_no_graph(given: Any) -> None:
    with pytest.raises(
        DataError,
        match=f"expected a Graph, or the name or path of one, got {type(given).__name__}: see sg.f",
    ):
        run(given, rounds=1)


@pytest.mark.parametrize("given", [{}, {"rounds": 1}, "run.toml", Path("run.toml"), RunConfig, 0])
def test_what_is_no_config(make_graph: MakeGraph, given: Any) -> None:
    with pytest.raises(
        ConfigError, match=f"expected a RunConfig as config, got {type(given).__name__}: give opt"
    ):
        run(make_graph(), config=given)


def test_no_graph_is_no_digits() -> None:
    """What a function returned by mistake must not train on something else."""
    calls: list[Callable[..., Any]] = [
        sg.run,
        lambda graph: sg.compare(graph, methods=["local"], processes=0),
    ]
    for call in calls:
        with raises_code(ConfigError, "missing-option", option="graph"):
            call(None)
    small: dict[str, Any] = {"rounds": 1, "hidden": 2, "clients": 2, "partition": "random"}
    assert sg.run(None, dataset="digits", **small).config.dataset == "digits"
    assert sg.run(config=RunConfig(**small)).config.dataset == "digits"


def test_an_option_that_the_cut_does_not_read(make_graph: MakeGraph) -> None:
    """Given on purpose it is refused; where another cut goes over a config, it goes."""
    with raises_code(ConfigError, "unread-option", option="favor", part="random"):
        go(make_graph(), favor=10.0)
    other = go(make_graph(), partition="dirichlet", alpha=0.4, rounds=1)
    assert other.config.options["partition.alpha"] == 0.4
    again = sg.run(make_graph(), config=other.config, partition="random")
    assert "partition.alpha" not in again.config.options


def test_the_graph_goes_over_the_dataset_of_config_and_options(
    make_graph: MakeGraph, tmp_path: Path
) -> None:
    path = tmp_path / "mine.npz"
    save(path, make_graph())
    other: dict[str, Any] = {**FAST, "dataset": "nosuch"}
    assert run(make_graph(), **other).config.dataset == "planted"
    assert run(str(path), **other).config.dataset == str(path)
    assert run(path, config=RunConfig(dataset="nosuch"), **FAST).config.dataset == str(path)


def test_a_path_object_is_never_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for load in (sg.load, run):
        with raises_code(DataError, "missing-file"):
            load(Path("digits"))


def test_texts_of_objects_are_short(make_graph: MakeGraph) -> None:
    result = go(make_graph())
    assert repr(result) == result.summary()
    assert len(repr(result)) < 1500
    assert repr(result.model).startswith("TrainedModel(Model(conv='gcn', features=7, ")
    assert len(repr(result.model)) < 300
    graph = make_graph()
    assert repr(graph) == (
        f"Graph('planted', nodes=60, edges={graph.num_edges}, features=7, classes=3, "
        "task='multiclass')"
    )
    sparse = make_graph(200, sparse=True, multilabel=True)
    for value in (result, result.model, graph, sparse):
        assert "tensor" not in repr(value)
    assert len(repr(sparse)) < 200


def test_weights_that_do_not_fit_leave_no_folder(make_graph: MakeGraph, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="memory"):
        run(make_graph(), clients=3, hidden=10**12, out=str(tmp_path / "run"))
    assert list(tmp_path.iterdir()) == []
