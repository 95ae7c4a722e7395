"""Global training is centralized training, on any cut, and the ledger knows what it sends."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import silograph as sg
from mistakes import raises_code
from runs import files_of, run_until
from silograph.core.errors import ConfigError, DataError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Ragged, Shared
from silograph.exchange.passes import gradients
from silograph.experiment.run.setup import Setup
from silograph.federation.frame import frame_sizes
from silograph.federation.in_process import InProcess
from silograph.graph.block.block import make_block
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph, Split
from silograph.graph.partition.partition import make_partition
from silograph.methods.base import MethodConfig
from silograph.methods.label_guided import LABEL_GUIDED, LabelGuidedOptions, draw, step
from silograph.methods.ops import Server
from silograph.nn.fit import Schedule
from silograph.nn.model import Model
from silograph.nn.optim import Adam
from silograph.task.counts import node_loss
from together import KEY, SHARED, cut_of, model_of, train, train_centrally

RUN: dict[str, Any] = {
    "method": "label_guided",
    "clients": 4,
    "partition": "random",
    "rounds": 3,
    "hidden": 8,
    "dtype": "float64",
}

TOGETHER = pytest.mark.parametrize("method", ["label_guided", "bns", "cagnet"])


def config_of(model: Model, **options: object) -> MethodConfig:
    own = LabelGuidedOptions(**options)  # type: ignore[arg-type]
    return MethodConfig(model, Adam(0.01, weight_decay=5e-4), Schedule(1), True, 1.0, own)


@pytest.mark.law(sample=60)
@pytest.mark.parametrize(
    ("clients", "how", "size", "sparse"),
    [
        (1, "random", 1, True),
        (3, "metis", 3, False),
        (7, "random", 2, True),
        (16, "random", 16, False),
    ],
)
@pytest.mark.parametrize("conv", SHARED)
def test_global_training_is_centralized_training(
    make_graph: Callable[..., Graph], conv: str, clients: int, how: str, size: int, sparse: bool
) -> None:
    block, route, uncut = cut_of(make_graph(60, sparse=sparse), clients, how)
    cfg = config_of(model_of(conv))
    losses, weights = train(LABEL_GUIDED, block, route, cfg, size)
    expected, wanted = train_centrally(uncut, cfg)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0, atol=1e-10)
    for name, w in wanted.items():
        torch.testing.assert_close(weights[name], w, rtol=0, atol=1e-10)


def test_gradients_of_several_labels_a_node(make_graph: Callable[..., Graph]) -> None:
    block, route, uncut = cut_of(make_graph(40, multilabel=True), 4, "random")
    model = Model("gcn", 7, 6, 3, 2, 0.0, "multilabel")
    weights = model.init_weights(KEY, torch.float64)
    grads, _ = gradients(InProcess(config_of(model), block, route, 4), model, weights, KEY)
    leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
    rows = uncut.split.train
    loss = node_loss(model.forward(leaves, uncut)[rows], uncut.y[rows], "multilabel").mean()
    for name, g in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
        torch.testing.assert_close(grads[name], g, rtol=0, atol=1e-12)


def test_drawing_every_node_for_certain_changes_nothing(make_graph: Callable[..., Graph]) -> None:
    """A silo of one node draws it for certain, so p = 1 for all."""
    graph = make_graph(12)
    partition = make_partition(graph, "random", clients=12, key=Key.of(0))
    train_rows = torch.arange(12) < 9
    split = Split(train_rows, ~train_rows, torch.zeros(12, dtype=torch.bool))
    assert len(graph.y[train_rows].unique()) == 3
    block, route = make_block(graph, partition, split, torch.float64)
    cfg = config_of(model_of("gcn"))
    expected, wanted = train(LABEL_GUIDED, block, route, cfg, 12, steps=8)
    losses, weights = train(
        LABEL_GUIDED, block, route, config_of(model_of("gcn"), sample=12), 5, steps=8
    )
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0, atol=1e-10)
    for name, w in wanted.items():
        torch.testing.assert_close(weights[name], w, rtol=0, atol=1e-10)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("options", [{"sample": 25}, {"sample": 25, "normalize": "conditional"}])
def test_drawn_training_does_not_depend_on_blocks(
    make_graph: Callable[..., Graph], options: dict[str, object]
) -> None:
    block, route, _ = cut_of(make_graph(60, sparse=True), 5, "random")
    cfg = config_of(model_of("sage"), **options)
    one, wanted = train(LABEL_GUIDED, block, route, cfg, 1, steps=8)
    all_at_once, weights = train(LABEL_GUIDED, block, route, cfg, 5, steps=8)
    torch.testing.assert_close(torch.tensor(one), torch.tensor(all_at_once), rtol=0, atol=1e-10)
    for name, w in wanted.items():
        torch.testing.assert_close(weights[name], w, rtol=0, atol=1e-10)


def test_without_a_drawn_training_node_there_is_no_step(
    make_graph: Callable[..., Graph],
) -> None:
    block, route, _ = cut_of(make_graph(60), 3, "random")
    cfg = config_of(model_of("gcn"), sample=1)
    fed = InProcess(cfg, block, route, 3)
    state = LABEL_GUIDED.init(fed, cfg, cfg.model.init_weights(Key.of(2), torch.float64), KEY)
    seen = set()
    for t in range(1, 30):
        new, report = LABEL_GUIDED.round(fed, cfg, state, t, KEY)
        assert new.weights is not None
        assert state.weights is not None
        stays = all(torch.equal(w, new.weights[name]) for name, w in state.weights.items())
        assert stays == (report.train_loss is None)
        seen.add(stays)
        state = new
    assert seen == {False, True}


def test_bytes_are_those_of_touched_rows(make_graph: Callable[..., Graph]) -> None:
    block, route, _ = cut_of(make_graph(60), 4, "random")
    model = model_of("gcn", dropout=0.0, residual=False)
    cfg = config_of(model)
    fed = InProcess(cfg, block, route, 4)
    weights = model.init_weights(KEY, torch.float64)
    gradients(fed, model, weights, KEY)
    halo, widths, clients = block.halo, (6, 6, 3), block.num_clients
    assert halo.off[-1] == len(route.target)

    def frames(op: str, width: int, off: Tensor, name: str, stage: Payload) -> list[int]:
        rows = Ragged(torch.zeros(int(off[-1]), width, dtype=torch.float64), off)
        sizes: list[int] = frame_sizes(op, {**stage, name: rows}, clients).tolist()
        return sizes

    stage: Payload = {"stage": Shared(torch.tensor(0, dtype=torch.int32))}
    for kind, give, take, order in (
        (Kind.PARTIAL_SUMS, "send_partial_sums", "add_remote_sums", widths),
        (Kind.COTANGENTS, "send_cotangents", "add_remote_cotangents", widths[::-1]),
    ):
        expected = [
            sizes
            for width in order
            for sizes in (
                frame_sizes(give, stage, clients).tolist(),
                frames(give, width, halo.off, "rows", {}),
                frames(take, width, halo.boundary_off, "sum", stage),
                frame_sizes(take, {}, clients).tolist(),
            )
        ]
        records = [record for record in fed.ledger.records if record.what == kind]
        assert [record.bytes.tolist() for record in records] == expected


@pytest.mark.parametrize("normalize", ["paper", "conditional", "none"])
@pytest.mark.parametrize("rows", ["drawn", "all"])
def test_bytes_of_drawn_rows_are_those_of_slots_with_a_drawn_sender(
    make_graph: Callable[..., Graph], normalize: str, rows: str
) -> None:
    """A slot crosses, with its number, if rows at both ends of one of its edges take part."""
    block, route, _ = cut_of(make_graph(60, sparse=True), 4, "random")
    model = model_of("gcn", layers=2, dropout=0.0, residual=False)
    cfg = config_of(model, sample=20, normalize=normalize, rows=rows)
    fed = InProcess(cfg, block, route, 4)
    weights = model.init_weights(KEY, torch.float64)
    LABEL_GUIDED.init(fed, cfg, weights, KEY)
    step(Server(fed, cfg, 0, KEY), weights)

    local = draw(cfg, block, fed.states()[0], {}, KEY)[0]["pass/rows"]
    assert isinstance(local, Ragged)
    takes_part = torch.zeros(60, dtype=torch.bool)
    takes_part[local.t + block.off[:-1].repeat_interleave(local.off.diff())] = True
    halo = block.halo
    row, slot = halo.adj.row, halo.adj.indices.long()
    owner = halo.boundary[route.target]
    slots = slot[takes_part[row] & takes_part[owner[slot]]].unique()
    assert (0 < len(slots) < len(route.target)) == (rows == "drawn")
    heard = route.target[slots].unique()
    slot_off = torch.searchsorted(slots, route.slot_off)
    heard_off = torch.searchsorted(heard, route.boundary_off)

    def parts(name: str, place: str, width: int, off: Tensor) -> Payload:
        count = int(off[-1])
        return {
            name: Ragged(torch.zeros(count, width, dtype=torch.float64), off),
            place: Ragged(torch.zeros(count, dtype=torch.int32), off),
        }

    stage: Payload = {"stage": Shared(torch.tensor(0, dtype=torch.int32))}
    for kind, give, take, widths in (
        (Kind.PARTIAL_SUMS, "send_partial_sums", "add_remote_sums", (6, 3)),
        (Kind.COTANGENTS, "send_cotangents", "add_remote_cotangents", (3, 6)),
    ):
        expected = []
        for width in widths:
            for op, fields in (
                (give, stage),
                (give, parts("rows", "slot", width, slot_off)),
                (take, {**stage, **parts("sum", "row", width, heard_off)}),
                (take, {}),
            ):
                expected.append(frame_sizes(op, fields, 4).tolist())
        records = [record for record in fed.ledger.records if record.what == kind]
        assert [record.bytes.tolist() for record in records] == expected


@pytest.mark.law(sample=6)
@pytest.mark.parametrize(
    "options", [{}, {"sample": 30}, {"sample": 30, "normalize": "conditional"}]
)
def test_a_run_judges_with_all_neighbors_and_resumes_its_bits(
    make_graph: Callable[..., Graph],
    setups: list[Setup],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    run: dict[str, Any] = RUN | {"options": options}
    result = sg.run(make_graph(60), **run, out=str(tmp_path / "whole"))
    run_until(monkeypatch, make_graph(60), 2, tmp_path / "cut", **run)
    sg.resume(tmp_path / "cut", graph=make_graph(60))
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")
    server, uncut = result.test.server, result.test.uncut
    assert server is not None
    assert uncut is not None
    assert server.accuracy == uncut.accuracy
    assert server.loss == pytest.approx(uncut.loss, abs=1e-12)
    assert result.test.personalized == server
    kinds = result.ledger.bytes_by_kind
    assert kinds["partial_sums"] > 0
    assert kinds["cotangents"] > 0
    assert "embeddings" not in kinds
    assert "features" not in kinds
    assert all(
        not name.startswith("pass/") for state in setups[0].federation.states() for name in state
    )


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"rows": "all"}, "rows"),
        ({"normalize": "none", "weigh_loss": True}, "normalize, weigh_loss"),
    ],
)
def test_options_of_drawn_nodes_where_none_are_drawn(
    make_graph: Callable[..., Graph], options: dict[str, Any], names: str
) -> None:
    first = names.split(",")[0]
    message = f"expected sample with {first}, .*sample=NODES, or leave out {names}$"
    with pytest.raises(ConfigError, match=message):
        sg.run(make_graph(40), **RUN | {"options": options})


def test_an_option_of_the_method_among_those_of_the_run(make_graph: Callable[..., Graph]) -> None:
    with pytest.raises(
        ConfigError,
        match=r"expected sample, an option of label_guided, under options: give options="
        r"\{'sample': 20\}$",
    ):
        sg.run(make_graph(40), **RUN, sample=20)  # type: ignore[call-arg]


@TOGETHER
@pytest.mark.parametrize("options", [{"participation": 0.5}, {"batch_size": 4}, {"fanout": "3,3"}])
def test_steps_that_silos_do_not_take_together(
    make_graph: Callable[..., Graph], options: dict[str, Any], method: str
) -> None:
    with raises_code(ConfigError, "conflicting-options", options=["method", *options]):
        sg.run(make_graph(40), clients=3, partition="random", method=method, **options)


@TOGETHER
def test_modules_of_the_user(make_graph: Callable[..., Graph], method: str) -> None:
    class Net(torch.nn.Module):
        def __init__(self, features: int, outputs: int) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(features, outputs)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            del edge_index
            out: Tensor = self.linear(x)
            return out

    own: dict[str, Any] = {"clients": 3, "partition": "random", "method": method}
    with pytest.raises(
        ConfigError, match="expected one of silograph's own models for sums over all"
    ):
        sg.run(make_graph(40), model=Net, **own)


@TOGETHER
def test_sums_that_cannot_be_shared(make_graph: Callable[..., Graph], method: str) -> None:
    with pytest.raises(ConfigError, match="expected a model whose sums can be shared, got GAT: "):
        sg.run(make_graph(40), clients=3, partition="random", method=method, model="gat")


def test_edges_that_only_one_owner_knows(make_graph: Callable[..., Graph]) -> None:
    block, route, _ = cut_of(make_graph(40), 3, "random")
    dense = block.halo.adj.scipy().tolil()
    row, slot = (int(i[0]) for i in dense.nonzero())
    dense[row, slot] = 0
    halo = replace(block.halo, adj=CSR.from_scipy(dense.tocsr()).to("cpu", torch.float64))
    cfg = config_of(model_of("gcn"))
    fed = InProcess(cfg, replace(block, halo=halo), route, 3)
    start = cfg.model.init_weights(KEY, torch.float64)
    with pytest.raises(
        DataError, match="expected both owners of a cross-client edge to know of it, got 1 "
    ):
        LABEL_GUIDED.init(fed, cfg, start, KEY)
