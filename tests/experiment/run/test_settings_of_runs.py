"""Settings of training in whole runs: rates by round, decay of the first layer, work by part."""

from itertools import pairwise
from typing import Any

import pytest
import torch

import silograph as sg
from remote_runs import finish, lines, remote, setup_of
from runs import MakeGraph, go, of, outcome, rows_of, same_bits
from silograph.core.errors import ConfigError
from silograph.core.setting_values import parse_rate_schedule
from silograph.methods import METHODS
from silograph.nn.backends import TorchBackend
from silograph.nn.conv import Params
from silograph.nn.optim import SGD, Adam, Optimizer

SCHEDULED: dict[str, Any] = {"rounds": 4, "lr_schedule": "step:1:0.5", "warmup_rounds": 2}
SETTINGS: dict[str, Any] = SCHEDULED | {
    "input_dropout": 0.3,
    "decay_layers": "first",
    "weight_decay": 0.05,
}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int]]:
    """The rate of every step that an optimizer takes, and its operations."""
    seen: list[tuple[float, int]] = []

    def spy(kind: type[SGD] | type[Adam]) -> None:
        real = kind.step_

        def step_(self: Any, weights: Params, grads: Params, state: Params) -> None:
            work = sum(self.flops_of(name) * w.numel() for name, w in weights.items())
            seen.append((self.lr, work))
            real(self, weights, grads, state)

        monkeypatch.setattr(kind, "step_", step_)

    spy(SGD)
    spy(Adam)
    return seen


@pytest.mark.law(sample=6)
@pytest.mark.parametrize(
    "method", ["fedavg", "scaffold", "llcg", "gcfl", "fedpub", "fedall", "cagnet", "centralized"]
)
def test_every_method_takes_the_rate_of_the_round(
    make_graph: MakeGraph, steps: list[tuple[float, int]], method: str
) -> None:
    own = {"optimizer": "sgd"} if method == "scaffold" else {}
    go(make_graph(30), method=method, kernels="torch", **SCHEDULED | own)
    rates = parse_rate_schedule("step:1:0.5", 4, 2)
    expected = [0.05 * rates.at(t) for t in range(1, 5)]
    changes = [lr for n, (lr, _) in enumerate(steps) if n == 0 or lr != steps[n - 1][0]]
    assert changes == expected[:1] + [b for a, b in pairwise(expected) if a != b]


def test_settings_that_are_off_change_no_bit(make_graph: MakeGraph) -> None:
    graph = make_graph(40, sparse=True)
    off: dict[str, Any] = {"lr_schedule": "constant", "warmup_rounds": 0, "decay_layers": "all"}
    plain, written = go(graph), go(graph, input_dropout=0.0, **off)
    assert same_bits(of(plain), of(written))
    assert rows_of(plain) == rows_of(written)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("kernels", ["torch", "compiled"])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(
    make_graph: MakeGraph, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    graph = make_graph(40, sparse=True)
    whole = go(graph, kernels=kernels, **SETTINGS)
    from silograph.experiment.run import run as loop

    real, rounds = loop.begin_round, iter(range(10))

    def stopped(*arguments: Any) -> Any:
        if next(rounds) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "begin_round", stopped)
        with pytest.raises(KeyboardInterrupt):
            go(graph, kernels=kernels, out=str(tmp_path / "run"), **SETTINGS)
    again = sg.resume(tmp_path / "run", graph=graph)
    assert same_bits(of(whole), of(again))
    assert rows_of(whole) == rows_of(again)
    assert whole.executed == again.executed
    assert outcome(whole) == outcome(again)


def test_silos_have_the_bits_of_a_simulation(make_graph: MakeGraph) -> None:
    here = setup_of(make_graph(40, sparse=True), METHODS["fedavg"], **SETTINGS)
    ours, theirs = finish(remote(here)[0]), finish(here)
    assert same_bits(of(ours), of(theirs))
    assert rows_of(ours) == rows_of(theirs)
    assert lines(ours.ledger.records) == lines(theirs.ledger.records)
    assert ours.ledger.flops_by_part == theirs.ledger.flops_by_part
    assert ours.ledger.flops_by_part["optimizer"] > 0
    assert ours.executed is None


def test_backends_agree_on_all_settings(make_graph: MakeGraph) -> None:
    for sparse in (False, True):
        graph = make_graph(40, sparse=sparse)
        ours = go(graph, kernels="compiled", **SETTINGS)
        theirs = go(graph, kernels="torch", **SETTINGS)
        for name, w in of(theirs).items():
            torch.testing.assert_close(of(ours)[name], w, rtol=0, atol=1e-10)
        assert ours.flops == theirs.flops
        assert ours.executed == theirs.executed


@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("keep", [False, True])
def test_the_work_that_is_executed_is_that_of_the_steps_taken(
    make_graph: MakeGraph,
    monkeypatch: pytest.MonkeyPatch,
    steps: list[tuple[float, int]],
    keep: bool,
    batch_size: int | None,
) -> None:
    """The oracle counts the parameters that torch's optimizer is given at clients."""
    real = TorchBackend.untouched_rows_after

    def at_the_server(*arguments: Any) -> torch.Tensor:
        number, path = len(steps), real(*arguments)
        del steps[number:]
        return path

    monkeypatch.setattr(TorchBackend, "untouched_rows_after", at_the_server)
    graph = make_graph(40, sparse=True)
    about: dict[str, Any] = {"kernels": "torch", "keep_optimizer": keep, "batch_size": batch_size}
    result = go(graph, **SETTINGS | about)
    parts = result.ledger.flops_by_part
    taken = sum(work for _, work in steps)
    assert result.executed == parts["training"] + parts["evaluation"] + taken
    assert sum(parts.values()) == result.flops
    assert (result.executed == result.flops) == keep


def test_work_does_not_depend_on_how_it_is_executed(make_graph: MakeGraph) -> None:
    graph = make_graph(40, sparse=True)
    small, large = go(graph, block_size=1), go(graph, block_size=4)
    assert small.ledger.flops_by_part == large.ledger.flops_by_part
    assert small.executed is not None
    assert large.executed is not None
    assert small.executed > large.executed  # the path of untouched rows, once for each block


def test_decay_of_the_first_layer_needs_to_know_it(make_graph: MakeGraph) -> None:
    class Own(torch.nn.Module):
        def __init__(self, features: int, outputs: int) -> None:
            super().__init__()
            self.a = torch.nn.Linear(features, outputs)

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.a(x)
            return out

    message = "whose layers are not known, got decay_layers=first: leave it out$"
    with pytest.raises(ConfigError, match=message):
        sg.run(make_graph(30), model=Own, method="fedavg", clients=2, decay_layers="first")


def test_an_optimizer_decays_the_first_layer_alone() -> None:
    made: list[Optimizer] = [SGD(0.1, 0.2, decay_layers="first"), Adam(0.1, decay_layers="first")]
    assert [made[0].flops_of(name) for name in ("0.weight", "0.bias", "1.weight")] == [4, 4, 2]
    assert [made[1].flops_of(name) for name in ("0.weight", "10.weight")] == [12, 12]
