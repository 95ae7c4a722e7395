"""Defaults: what a run does that is told nothing, and how the config of its result says so.

Optimizer and learning rate belong to the method; the others are fields with one value.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import silograph as sg
from commands import Capture, printed
from mistakes import raises_code
from runs import MakeGraph, outcome, rows_of, same_bits, weights_of
from silograph.aggregation.server_optimizers import (
    ADAM,
    MOMENTUM,
    NONE,
    AdamOptions,
    MomentumOptions,
    ScaleFreeAdam,
    ServerAdam,
    ServerMomentum,
    take_mean,
)
from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError
from silograph.core.resolved_config import ResolvedConfig
from silograph.core.run_file import read_toml
from silograph.experiment.run.result import Result
from silograph.experiment.run.setup import Setup, prepare
from silograph.graph.graph import Graph
from silograph.methods import METHODS
from silograph.methods.base import Needs
from silograph.nn.optim import SGD, Adam, Optimizer

SMALL: dict[str, Any] = {"clients": 4, "partition": "random", "rounds": 3, "hidden": 8}
# Method: the clients' optimizer, its rate, passes in a round, and whether its state outlives it.
# The list is fixed.
UNDECAYED = {"fedais", "fedall", "fedrandom", "fedlocal", "fedpns", "fedais1", "fedais2", "stale"}
WRITTEN_OUT: dict[str, tuple[str, float, int, bool]] = {
    "fedopt": ("sgd", 0.02, 5, False),
    "fedavg": ("adam", 0.01, 1, False),
    "fedacs": ("adam", 0.01, 1, False),
    "fedmf": ("adam", 0.01, 1, False),
    "fedgnn": ("adam", 0.01, 1, False),
    "fesog": ("adam", 0.01, 1, False),
    "fedprox": ("adam", 0.01, 3, False),
    "fedper": ("sgd", 0.02, 5, False),
    "gcfl": ("sgd", 0.1, 10, False),
    "gcflplus": ("sgd", 0.1, 10, False),
    "fedpub": ("adam", 0.01, 1, True),
    "fedsageplus": ("sgd", 0.02, 5, False),
    "fedsage_local": ("sgd", 0.02, 5, False),
    "scaffold": ("sgd", 0.1, 10, False),
    "llcg": ("adam", 0.01, 1, False),
    "label_guided": ("adam", 0.01, 1, True),
    "bns": ("adam", 0.01, 1, True),
    "cagnet": ("adam", 0.01, 1, True),
    "fedgraph": ("sgd", 0.1, 1, False),
    "local": ("adam", 0.01, 1, True),
    "centralized": ("adam", 0.01, 1, True),
    "graphsaint": ("adam", 0.01, 1, True),
    "fedais": ("sgd", 0.01, 2, False),
    "fedall": ("sgd", 0.01, 2, False),
    "fedrandom": ("sgd", 0.01, 2, False),
    "fedlocal": ("sgd", 0.01, 2, False),
    "fedpns": ("sgd", 0.01, 2, False),
    "fedais1": ("sgd", 0.01, 2, False),
    "fedais2": ("sgd", 0.01, 2, False),
    "stale": ("sgd", 0.01, 2, False),
}
OPTIMIZERS: dict[str, Optimizer] = {"sgd": SGD(0.1, 5e-4, 0.0), "adam": Adam(0.01, 5e-4)}
NAMES = ("optimizer", "lr", "local_epochs", "keep_optimizer")


def small(graph: Graph, **options: Any) -> Result:
    return sg.run(graph, **SMALL | options)


def planned(graph: Graph, **options: Any) -> Setup:
    """What `small` trains, before it is trained."""
    return prepare(RunConfig(**SMALL | options), graph)


def training(config: RunConfig | ResolvedConfig) -> tuple[Any, ...]:
    """What of a config was written out for its method."""
    return tuple(getattr(config, name) for name in NAMES)


def assert_same(a: Result, b: Result) -> None:
    assert same_bits(weights_of(a), weights_of(b))
    assert rows_of(a) == rows_of(b)
    assert outcome(a) == outcome(b)
    assert a.config == b.config


# --- from Python ----------------------------------------------------------------------------------


OPTIONS = {
    "server_optimizer.server_lr": 0.01,
    "server_optimizer.server_beta1": 0.9,
    "server_optimizer.server_beta2": 0.99,
    "server_optimizer.server_relative_tau": 0.01,
    "server_optimizer.server_tau": None,
    "model.residual": False,
    "model.input_dropout": 0.0,
    "model.head": "conv",
    "selector.participation": 1.0,
    "selector.budget": None,
    "selector.least_clients": None,
    "selector.least_selections": None,
}


def test_every_method_has_its_defaults() -> None:
    assert set(WRITTEN_OUT) == set(METHODS)
    assert (RunConfig().method, training(RunConfig())) == ("fedopt", (None,) * 4)


def test_a_run_that_is_told_nothing_is_fedopt(make_graph: MakeGraph, setups: list[Setup]) -> None:
    result = small(make_graph())
    config = result.config
    assert (config.method, config.options) == ("fedopt", OPTIONS)
    assert training(config) == WRITTEN_OUT["fedopt"]
    assert setups[0].method is METHODS["fedopt"]
    assert setups[0].method_config.optimizer == SGD(lr=0.02, weight_decay=5e-4, momentum=0.0)
    options = setups[0].parts.server_optimizer.options
    assert options == AdamOptions(0.01, 0.9, 0.99, 0.01, None)
    assert_same(result, small(make_graph(), method="fedopt"))


def test_weight_decay_is_by_method(make_graph: MakeGraph) -> None:
    def decay(method: str, **given: Any) -> float:
        return small(make_graph(), method=method, rounds=1, **given).config.weight_decay

    assert (decay("fedavg"), decay("fedais"), decay("fedais", weight_decay=0.1)) == (5e-4, 0.0, 0.1)
    assert {name for name, m in METHODS.items() if m.needs.weight_decay == 0} == UNDECAYED


def test_the_step_of_the_server() -> None:
    assert ADAM.step(AdamOptions()) == ScaleFreeAdam(0.01, 0.9, 0.99, relative_tau=0.01)
    of_the_paper = AdamOptions(server_tau=1e-5)
    assert ADAM.step(of_the_paper) == ServerAdam(lr=0.005, beta1=0.9, beta2=0.99, tau=1e-5)
    assert MOMENTUM.step(MomentumOptions()) == ServerMomentum(lr=1.0, momentum=0.9)
    assert NONE.step(NONE.options()) is take_mean


def optimizer_of(method: str, name: str, lr: float) -> Optimizer:
    optimizer = OPTIMIZERS[name]
    assert isinstance(optimizer, SGD | Adam)
    decay = 0.0 if method in UNDECAYED else optimizer.weight_decay
    return dataclasses.replace(optimizer, lr=lr, weight_decay=decay)


@pytest.mark.parametrize("method", METHODS)
def test_what_a_method_trains_with_is_written_out(make_graph: MakeGraph, method: str) -> None:
    setup = planned(make_graph(), method=method)
    assert training(setup.config) == WRITTEN_OUT[method]
    optimizer, lr, epochs, keep = WRITTEN_OUT[method]
    assert setup.method_config.optimizer == optimizer_of(method, optimizer, lr)
    assert setup.method_config.keep_optimizer == keep
    assert setup.method_config.schedule.epochs == epochs


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("method", METHODS)
def test_what_was_written_out_makes_the_same_run(make_graph: MakeGraph, method: str) -> None:
    result = small(make_graph(), method=method)
    assert training(result.config) == WRITTEN_OUT[method]
    given = dict(zip(NAMES, WRITTEN_OUT[method], strict=True))
    assert_same(result, small(make_graph(), method=method, **given))
    # A config that was written out makes the same run.
    assert_same(result, sg.run(make_graph(), config=result.config))


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", [name for name, m in METHODS.items() if not m.needs.plain_sgd])
def test_the_learning_rate_follows_the_optimizer(
    make_graph: MakeGraph, method: str, optimizer: str
) -> None:
    setup = planned(make_graph(), method=method, optimizer=optimizer)
    own, rate, *others = WRITTEN_OUT[method]
    if optimizer != own:  # a rate of a method's own goes with its own optimizer
        rate = {"sgd": 0.1, "adam": 0.01}[optimizer]
    assert training(setup.config) == (optimizer, rate, *others)
    assert setup.method_config.optimizer == optimizer_of(method, optimizer, rate)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("method", METHODS)
def test_a_learning_rate_does_not_change_the_optimizer(make_graph: MakeGraph, method: str) -> None:
    config = planned(make_graph(), method=method, lr=0.125).config
    optimizer, _, *others = WRITTEN_OUT[method]
    assert training(config) == (optimizer, 0.125, *others)


def test_a_method_has_a_rate_of_its_own_with_its_own_optimizer(make_graph: MakeGraph) -> None:
    needs = Needs(optimizer="sgd", lr=0.25, local_epochs=4)
    own = dataclasses.replace(METHODS["fedavg"], name="own", needs=needs)
    assert training(small(make_graph(), method=own).config) == ("sgd", 0.25, 4, False)
    given = {"optimizer": "adam", "local_epochs": 2}
    assert training(small(make_graph(), method=own, **given).config) == ("adam", 0.01, 2, False)


def test_momentum_goes_with_the_default(make_graph: MakeGraph, setups: list[Setup]) -> None:
    small(make_graph(), momentum=0.5, lr=0.125)
    assert setups[0].method_config.optimizer == SGD(0.125, 5e-4, 0.5)


def test_fedavg_is_fedopt_that_replaces(make_graph: MakeGraph) -> None:
    """The methods differ in defaults and in the server's step alone."""
    plain = {"server_momentum": 0.0}
    naive = {"optimizer": "adam", "lr": 0.01, "local_epochs": 1, "keep_optimizer": False}
    fedavg = small(make_graph(), method="fedavg", dtype="float64")
    fedopt = small(
        make_graph(), server_optimizer="momentum", options=plain, dtype="float64", **naive
    )
    ours, theirs = weights_of(fedopt), weights_of(fedavg)
    assert ours is not None
    assert theirs is not None
    assert fedopt.best_round == fedavg.best_round
    for name, w in theirs.items():
        assert (ours[name] - w).abs().max() < 1e-12


def test_fedopt_is_fedavg_with_a_server_optimizer(make_graph: MakeGraph) -> None:
    local = {"optimizer": "sgd", "lr": 0.02, "local_epochs": 5}
    fedavg = small(make_graph(), method="fedavg", server_optimizer="adam", **local)
    fedopt = small(make_graph())
    assert same_bits(weights_of(fedavg), weights_of(fedopt))
    assert rows_of(fedavg) == rows_of(fedopt)
    assert dataclasses.replace(fedavg.config, method="fedopt") == fedopt.config


@pytest.mark.parametrize("method", METHODS)
def test_a_server_optimizer_is_used_or_refused(make_graph: MakeGraph, method: str) -> None:
    config = {"method": method, "server_optimizer": "momentum", "clients": 3}
    if METHODS[method].server_step:
        assert planned(make_graph(), **config).method_config.server_optimizer == "momentum"
    else:
        with raises_code(
            ConfigError, "conflicting-options", options=["method", "server_optimizer"]
        ) as caught:
            planned(make_graph(), **config)
        assert method in str(caught.value)


# --- on the command line --------------------------------------------------------------------------

COMMAND = ["run", "g.npz", "--clients", "4", "--partition", "random", "--rounds", "3", "--json"]


def resolved(folder: str) -> dict[str, str]:
    """The config of a run folder with every default written out."""
    same = json.loads(Path(folder, "run.json").read_text(encoding="utf-8"))["same"]
    kinds = ("config ", "option ")
    return {k.removeprefix("config "): v for k, v in same.items() if k.startswith(kinds)}


@pytest.mark.usefixtures("work")
@pytest.mark.parametrize("flags", [[], ["--method", "fedopt"], ["--method", "fedavg"]])
def test_what_a_folder_says_of_a_run_without_further_flags(
    capsys: Capture, flags: list[str]
) -> None:
    method = flags[-1] if flags else "fedopt"
    values = json.loads(printed(capsys, *COMMAND, *flags, "--out", "x"))
    assert values["method"] == method
    given = read_toml("x/config.toml", anew=True)
    assert given["method"] == method
    assert not given.keys() & set(NAMES)  # not given, so that another method has its own
    assert read_toml("x/config.toml").keys() >= set(NAMES)  # but what they were stands there
    config = resolved("x")
    assert config["method"] == repr(method)
    assert [config[name] for name in NAMES] == [repr(value) for value in WRITTEN_OUT[method]]
    others = ("momentum", "weight_decay", "option selector.participation")
    assert [config[name] for name in others] == ["0.0", "0.0005", "1.0"]


@pytest.mark.usefixtures("work")
def test_fedavg_is_the_naive_setting(capsys: Capture) -> None:
    """`--method fedavg` alone is what most papers run: local Adam of rate .01, built anew."""
    short = json.loads(printed(capsys, *COMMAND, "--method", "fedavg", "--out", "short"))
    naive = ["--optimizer", "adam", "--lr", "0.01", "--no-keep-optimizer", "--local-epochs", "1"]
    long = json.loads(printed(capsys, *COMMAND, "--method", "fedavg", *naive, "--out", "long"))
    assert {k: short[k] for k in ("test", "best_round", "bytes", "flops")} == {
        k: long[k] for k in ("test", "best_round", "bytes", "flops")
    }
    same = [json.loads(Path(out, "run.json").read_text())["same"] for out in ("short", "long")]
    assert same[0] == same[1]
    models = [Path(out, "model.safetensors").read_bytes() for out in ("short", "long")]
    assert models[0] == models[1]


@pytest.mark.usefixtures("work")
def test_another_method_over_a_run_file_has_its_own_defaults(capsys: Capture) -> None:
    printed(capsys, *COMMAND, "--out", "first")
    again = ["run", "--config", "first/config.toml", "--json"]
    printed(capsys, *again, "--method", "fedavg", "--out", "second")
    config = resolved("second")
    assert [config[name] for name in NAMES] == ["'adam'", "0.01", "1", "False"]
