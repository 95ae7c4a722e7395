"""LLCG is FedAvg and then steps on what the server holds."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import silograph as sg
from mistakes import raises_code
from runs import files_of, run_until
from silograph.core.config import make_config
from silograph.core.errors import ConfigError, DataError
from silograph.core.key import Key
from silograph.core.resolved_config import training_key
from silograph.experiment.resolve.data import make_server_block
from silograph.experiment.run.run import first_snapshot
from silograph.experiment.run.setup import Setup, prepare
from silograph.federation.in_process import InProcess
from silograph.graph.block.block import ClientBlock
from silograph.graph.graph import Graph, Split
from silograph.methods.fedavg import FEDAVG
from silograph.methods.llcg import LLCG, correct, train_at_server
from silograph.nn.mini_batches import Fanout
from silograph.task.counts import node_loss

MakeGraph = Callable[..., Graph]
RUN: dict[str, Any] = {
    "method": "llcg",
    "clients": 4,
    "partition": "random",
    "rounds": 3,
    "hidden": 8,
    "dropout": 0.0,
    "dtype": "float64",
    "kernels": "torch",
}


def setup_of(graph: Graph, **options: Any) -> Setup:
    config = make_config({"dataset": "given", **RUN, "options": options})
    return prepare(config, graph)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("share", "steps", "lr"), [(1.0, 1, None), (0.5, 3, 0.002)])
def test_a_round_is_fedavg_and_then_centralized_steps(
    make_graph: MakeGraph, sparse: bool, share: float, steps: int, lr: float | None
) -> None:
    """Torch's own Adam on the held graph is the oracle; it goes on over two rounds."""
    graph = make_graph(60, sparse=sparse)
    options = {"server_share": share, "correction_steps": steps, "correction_lr": lr}
    setup = setup_of(graph, **{k: v for k, v in options.items() if v is not None})
    cfg, key, held = setup.method_config, training_key(setup.config), setup.server_block
    assert held is not None
    assert len(held.row_key) == round(60 * share)
    state = first_snapshot(setup).state
    assert state.weights is not None
    leaves = {name: w.clone().requires_grad_() for name, w in state.weights.items()}
    rate = 0.01 if lr is None else lr
    adam = torch.optim.Adam(leaves.values(), lr=rate, weight_decay=5e-4)
    rows = held.split.train
    for t in (1, 2):
        averaged, _ = FEDAVG.round(setup.federation, cfg, state, t, key)
        assert averaged.weights is not None
        for name, w in averaged.weights.items():
            leaves[name].data.copy_(w)
        for _ in range(steps):
            adam.zero_grad()
            loss = node_loss(cfg.model.forward(leaves, held)[rows], held.y[rows], "multiclass")
            loss.mean().backward()
            adam.step()
        state, report = LLCG.round(setup.federation, cfg, state, t, key)
        state = correct(cfg, held, state, t, key)
        assert report.train_loss is not None
        assert state.weights is not None
        for name, w in leaves.items():
            torch.testing.assert_close(state.weights[name], w.detach(), rtol=0, atol=1e-10)


def test_a_fanout_is_not_the_servers(make_graph: MakeGraph) -> None:
    """Clients hear one neighbor; the server's step is that of clients that hear all."""
    setup = setup_of(make_graph(60))
    cfg, key = setup.method_config, training_key(setup.config)
    state, held = first_snapshot(setup).state, setup.server_block
    assert state.weights is not None
    assert held is not None
    few = replace(cfg, schedule=replace(cfg.schedule, neighbors=Fanout((1, 1))))
    theirs, _ = train_at_server(few, held, state.weights, {}, key)
    ours, _ = train_at_server(cfg, held, state.weights, {}, key)
    assert all(torch.equal(theirs[name], w) for name, w in ours.items())


def test_clients_never_see_what_the_server_holds(
    make_graph: MakeGraph, setups: list[Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    sg.run(make_graph(40), **RUN)
    setup = setups[0]
    assert setup.server_block is not None
    assert isinstance(setup.federation, InProcess)
    assert setup.federation._host._cfg is setup.method_config
    assert not any(isinstance(value, ClientBlock) for value in vars(setup.method_config).values())


def test_the_held_nodes_are_those_drawn(make_graph: MakeGraph) -> None:
    setup = setup_of(make_graph(60))
    cut = setup.cut
    held = make_server_block(cut, 0.4, Key.of(1))
    assert len(held.row_key) == 24
    whole = make_server_block(cut, 1.0, Key.of(1))
    assert whole.adj.nnz == cut.graph.adj.nnz
    assert torch.equal(whole.split.train, cut.split.train)
    kept = torch.isin(whole.row_key, held.row_key)
    edges = torch.from_numpy(whole.adj.scipy().toarray())[kept][:, kept]
    assert torch.equal(torch.from_numpy(held.adj.scipy().toarray()), edges)
    assert not torch.equal(make_server_block(cut, 0.4, Key.of(2)).row_key, held.row_key)


def test_a_server_without_training_nodes(make_graph: MakeGraph) -> None:
    cut = setup_of(make_graph(40)).cut
    train = torch.zeros(40, dtype=torch.bool)
    train[0] = True
    few = replace(cut, split=Split(train, ~train, torch.zeros(40, dtype=torch.bool)))
    seeds = [seed for seed in range(20) if _fails(few, Key.of(seed))]
    assert seeds
    with raises_code(DataError, "no-training-nodes"):
        make_server_block(few, 0.01, Key.of(seeds[0]))


def _fails(cut: Any, key: Key) -> bool:
    try:
        make_server_block(cut, 0.01, key)
    except DataError:
        return True
    return False


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("kernels", ["torch", "compiled"])
def test_both_tiers_and_a_resumed_run(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    run = RUN | {"kernels": kernels, "dropout": 0.3}
    whole = sg.run(make_graph(60), **run, out=str(tmp_path / "whole"))
    run_until(monkeypatch, make_graph(60), 2, tmp_path / "cut", **run)
    sg.resume(tmp_path / "cut", graph=make_graph(60))
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")
    other = sg.run(make_graph(60), **run | {"kernels": "torch"})
    assert whole.test.server is not None
    assert other.test.server is not None
    assert whole.test.server.loss == pytest.approx(other.test.server.loss, abs=1e-10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server_share": 0.0}, "server_share: input should be greater than 0"),
        ({"correction_steps": 0}, "correction_steps: input should be greater than or equal to 1"),
        ({"correction_lr": -1.0}, "correction_lr: input should be greater than 0"),
    ],
)
def test_options_out_of_range(make_graph: MakeGraph, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sg.run(make_graph(40), **RUN, options=options)
