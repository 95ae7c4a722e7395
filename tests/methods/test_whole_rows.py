"""Methods that send whole rows are centralized training, or draw what makes them so on average."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import silograph as sg
from runs import files_of, run_until
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Ragged, Shared
from silograph.exchange.passes import forward, logits_of
from silograph.experiment.run.setup import Setup
from silograph.federation.frame import frame_sizes
from silograph.federation.in_process import InProcess
from silograph.graph.block.block import ClientBlock, Route
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph
from silograph.graph.partition.partition import Partition
from silograph.methods import bns
from silograph.methods.base import Method, MethodConfig, NoOptions
from silograph.methods.bns import BNS, BNSOptions
from silograph.methods.cagnet import CAGNET
from silograph.methods.cagnet import step as broadcast_step
from silograph.methods.label_guided import LABEL_GUIDED, LabelGuidedOptions
from silograph.methods.ops import Server
from silograph.nn.fit import Schedule
from silograph.nn.model import Model
from silograph.nn.optim import Adam
from silograph.task.counts import node_loss
from together import KEY, SHARED, cut_by, cut_of, model_of, train, train_centrally

WHOLE: list[tuple[Method, object]] = [(BNS, BNSOptions(1.0)), (CAGNET, NoOptions())]


def config_of(model: Model, options: object) -> MethodConfig:
    return MethodConfig(model, Adam(0.01, weight_decay=5e-4), Schedule(1), True, 1.0, options)


@pytest.mark.law(sample=24)
@pytest.mark.parametrize(("method", "options"), WHOLE)
@pytest.mark.parametrize(
    ("clients", "how", "size", "sparse"),
    [
        (1, "random", 1, True),
        (4, "metis", 3, True),
        pytest.param(16, "random", 5, False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("conv", SHARED)
def test_all_rows_are_centralized_training(
    make_graph: Callable[..., Graph],
    method: Method,
    options: object,
    conv: str,
    clients: int,
    how: str,
    size: int,
    sparse: bool,
) -> None:
    block, route, uncut = cut_of(make_graph(60, sparse=sparse), clients, how)
    cfg = config_of(model_of(conv), options)
    losses, weights = train(method, block, route, cfg, size)
    expected, wanted = train_centrally(uncut, cfg)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0, atol=1e-10)
    for name, w in wanted.items():
        torch.testing.assert_close(weights[name], w, rtol=0, atol=1e-10)


@pytest.mark.law(sample=3)
@pytest.mark.parametrize(("method", "options"), [*WHOLE, (LABEL_GUIDED, LabelGuidedOptions())])
def test_unequal_widths_and_a_linear_head_are_trained_as_centrally(
    make_graph: Callable[..., Graph], method: Method, options: object
) -> None:
    block, route, uncut = cut_of(make_graph(60, sparse=True), 4, "random")
    cfg = config_of(replace(model_of("sage", head="linear"), hidden=(7, 5)), options)
    losses, weights = train(method, block, route, cfg, 3)
    expected, wanted = train_centrally(uncut, cfg)
    assert {name: tuple(w.shape) for name, w in wanted.items() if name[0] != "0"} == {
        "1.weight": (7, 5),
        "1.root": (7, 5),
        "1.bias": (5,),
        "2.weight": (5, 3),
        "2.bias": (3,),
    }
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0, atol=1e-10)
    for name, w in wanted.items():
        torch.testing.assert_close(weights[name], w, rtol=0, atol=1e-10)


def with_a_lonely_client(graph: Graph) -> tuple[ClientBlock, Route, ClientBlock]:
    """Return three clients, of which the second has no neighbors in others."""
    row, column, n = graph.adj.row, graph.adj.indices.long(), graph.num_nodes
    client = torch.arange(n) % 3
    kept = ((client[row] == 1) == (client[column] == 1)).nonzero()[:, 0]
    parted = replace(graph, adj=CSR.from_pairs(row[kept], column[kept], (n, n)))
    nodes = tuple((client == c).nonzero()[:, 0] for c in range(3))
    block, route, uncut = cut_by(parted, Partition(("a", "b", "c"), nodes, n, "given"))
    assert [bool(size) for size in block.halo.off.diff().tolist()] == [True, False, True]
    return block, route, uncut


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("method", "options"), [*WHOLE, (LABEL_GUIDED, LabelGuidedOptions())])
def test_a_client_without_neighbors_in_others_and_several_labels_a_node(
    make_graph: Callable[..., Graph], method: Method, options: object, size: int
) -> None:
    block, route, uncut = with_a_lonely_client(make_graph(45, multilabel=True))
    cfg = config_of(replace(model_of("gcn"), task="multilabel"), options)
    losses, weights = train(method, block, route, cfg, size)
    expected, wanted = train_centrally(uncut, cfg)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0, atol=1e-10)
    for name, w in wanted.items():
        torch.testing.assert_close(weights[name], w, rtol=0, atol=1e-10)


def test_each_slot_is_drawn_by_itself_with_the_rate(make_graph: Callable[..., Graph]) -> None:
    """Of two clients that have the same node in their halo each draws its own slot."""
    block, route, _ = cut_of(make_graph(60), 4, "random")
    rate, steps, slots = 0.3, 400, len(route.target)
    cfg = config_of(model_of("gcn"), BNSOptions(rate))
    drawn = torch.zeros(steps, slots, dtype=torch.float64)
    for step in range(steps):
        weight = bns.draw(cfg, block, {}, {}, KEY.fold(step))[0]["pass/slot"].t
        drawn[step] = (weight > 0).double()
        assert torch.equal(weight, drawn[step] / rate)
    spread = math.sqrt(rate * (1 - rate) / steps)
    assert float((drawn.mean(0) - rate).abs().max()) < 5 * spread
    same = [
        (a, b)
        for a, b in itertools.combinations(range(slots), 2)
        if route.target[a] == route.target[b]
    ]
    assert same
    left, right = torch.tensor(same).T
    both = (drawn[:, left] * drawn[:, right]).mean(0)
    spread = math.sqrt(rate**2 * (1 - rate**2) / steps)
    assert float((both - rate**2).abs().max()) < 5 * spread


def test_drawn_slots_do_not_depend_on_blocks(make_graph: Callable[..., Graph]) -> None:
    block, route, _ = cut_of(make_graph(60, sparse=True), 5, "random")
    cfg = config_of(model_of("sage"), BNSOptions(0.4))
    one, wanted = train(BNS, block, route, cfg, 1, steps=8)
    all_at_once, weights = train(BNS, block, route, cfg, 5, steps=8)
    torch.testing.assert_close(torch.tensor(one), torch.tensor(all_at_once), rtol=0, atol=1e-10)
    for name, w in wanted.items():
        torch.testing.assert_close(weights[name], w, rtol=0, atol=1e-10)
    _, other = train(BNS, block, route, config_of(model_of("sage"), BNSOptions(1.0)), 5, steps=8)
    assert any((other[name] - w).abs().max() > 1e-4 for name, w in wanted.items())


def places(block: ClientBlock, uncut: ClientBlock) -> Tensor:
    """Return where the rows of a block stand in the uncut graph, (n,)."""
    order: Tensor = uncut.row_key.argsort()
    return order[torch.searchsorted(uncut.row_key[order], block.row_key)]


def draw_by_hand(monkeypatch: pytest.MonkeyPatch, chosen: list[Tensor]) -> None:
    """Let the next draw choose these slots instead."""

    def draw(
        cfg: MethodConfig, block: ClientBlock, state: Any, inbox: Payload, key: Key
    ) -> tuple[Any, Payload]:
        del inbox, key
        weight = chosen[0].double() / cfg.options.rate
        return {**state, "pass/slot": Ragged(weight, block.halo.off)}, {}

    monkeypatch.setattr(bns, "draw", draw)


def test_a_drawn_layer_is_unbiased_by_enumeration(
    make_graph: Callable[..., Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer is linear in what crosses, so logits are right on average."""
    graph = make_graph(12)
    block, route, uncut = cut_of(graph, 2, "random")
    slots, rate = len(route.target), 0.3
    assert 5 <= slots <= 8
    model = model_of("gcn", layers=1, dropout=0.0, residual=False)
    cfg = config_of(model, BNSOptions(rate))
    weights = model.init_weights(KEY, torch.float64)
    chosen = [torch.zeros(slots, dtype=torch.bool)]
    draw_by_hand(monkeypatch, chosen)
    mean = torch.zeros(12, 3, dtype=torch.float64)
    for bits in itertools.product((False, True), repeat=slots):
        chosen[0] = torch.tensor(bits)
        fed = InProcess(cfg, block, route, 2)
        key = KEY.fold(repr(bits))
        fed.call(bns.draw, {}, what=Kind.CONTROL, key=key)
        forward(fed, model, weights, key, bns.BY_ROWS)
        p = rate ** sum(bits) * (1 - rate) ** (slots - sum(bits))
        mean += p * logits_of(model, fed.states()[0])
    expected = model.forward(weights, uncut)[places(block, uncut)]
    torch.testing.assert_close(mean, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("rate", "some"), [(0.4, True), (1e-9, False)])
def test_the_way_back_is_autograd_of_the_drawn_loss(
    make_graph: Callable[..., Graph], rate: float, some: bool
) -> None:
    """The oracle is a dense GCN whose entries between silos are weighed by the drawn slots."""
    block, route, uncut = cut_of(make_graph(40), 4, "random")
    model = model_of("gcn", layers=2, dropout=0.0, residual=False)
    cfg = config_of(model, BNSOptions(rate))
    weights = model.init_weights(KEY, torch.float64)
    fed = InProcess(cfg, block, route, 4)
    grads, loss = bns.step(Server(fed, cfg, 0, KEY), weights)

    drawn = bns.draw(cfg, block, {}, {}, KEY)[0]["pass/slot"].t
    assert bool((drawn > 0).any()) == some
    assert not bool((drawn > 0).all())
    place = places(block, uncut)
    weight = torch.ones(40, 40, dtype=torch.float64)
    cross = block.halo.adj
    owner_row = block.halo.boundary[route.target]
    slot = cross.indices.long()
    weight[place[cross.row], place[owner_row[slot]]] = drawn[slot]
    dense = torch.eye(40, dtype=torch.float64)
    dense[uncut.adj.row, uncut.adj.indices.long()] = 1
    scale = dense.sum(1).rsqrt()
    matrix = scale[:, None] * dense * weight * scale
    leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
    assert isinstance(uncut.x, Tensor)
    hidden = (matrix @ (uncut.x @ leaves["0.weight"]) + leaves["0.bias"]).relu()
    logits = matrix @ (hidden @ leaves["1.weight"]) + leaves["1.bias"]
    rows = uncut.split.train
    expected = node_loss(logits[rows], uncut.y[rows], "multiclass").mean()
    assert loss == pytest.approx(float(expected.detach()), abs=1e-12)
    found = torch.autograd.grad(expected, list(leaves.values()))
    for name, g in zip(leaves, found, strict=True):
        torch.testing.assert_close(grads[name], g, rtol=0, atol=1e-12)


def test_bytes_are_those_of_drawn_rows(make_graph: Callable[..., Graph]) -> None:
    block, route, _ = cut_of(make_graph(60), 4, "random")
    model = model_of("gcn", layers=2, dropout=0.0, residual=False)
    cfg = config_of(model, BNSOptions(0.5))
    fed = InProcess(cfg, block, route, 4)
    bns.step(Server(fed, cfg, 0, KEY), model.init_weights(KEY, torch.float64))
    slot = bns.draw(cfg, block, {}, {}, KEY)[0]["pass/slot"].t.nonzero()[:, 0]
    row = torch.unique(route.target[slot])
    slots = torch.searchsorted(slot, route.slot_off)
    rows = torch.searchsorted(row, route.boundary_off)

    def frame(op: str, told: Payload, **fields: tuple[int, torch.dtype, Tensor]) -> list[int]:
        parts = {
            name: Ragged(torch.zeros(int(off[-1]), *([width] if width else []), dtype=dtype), off)
            for name, (width, dtype, off) in fields.items()
        }
        sizes: list[int] = frame_sizes(op, {**told, **parts}, 4).tolist()
        return sizes

    stage: Payload = {"stage": Shared(torch.tensor(0, dtype=torch.int32))}
    places, values = torch.int32, torch.float64
    expected = [
        size
        for width in (6, 3)
        for size in (
            frame("serve", stage, row=(0, places, rows)),
            frame("serve", {}, rows=(width, values, rows)),
            frame("store", stage, rows=(width, values, slots)),
            frame("store", {}),
        )
    ]
    records = [record for record in fed.ledger.records if record.what == Kind.EMBEDDINGS]
    assert [record.bytes.tolist() for record in records] == expected


def test_a_broadcast_costs_all_rows_at_every_silo(make_graph: Callable[..., Graph]) -> None:
    block, route, _ = cut_of(make_graph(60), 4, "random")
    model = model_of("gcn", layers=2, dropout=0.0, residual=False)
    cfg = config_of(model, NoOptions())
    fed = InProcess(cfg, block, route, 4)
    start = model.init_weights(KEY, torch.float64)
    CAGNET.init(fed, cfg, start, KEY)
    broadcast_step(Server(fed, cfg, 0, KEY), start)
    stage: Payload = {"stage": Shared(torch.tensor(0, dtype=torch.int32))}
    for kind, send, hear, widths in (
        (Kind.EMBEDDINGS, "send", "hear", (6, 3)),
        (Kind.COTANGENTS, "send_back", "hear_back", (3, 6)),
    ):
        expected = []
        for width in widths:
            own = Ragged(torch.zeros(60, width, dtype=torch.float64), block.off)
            everyone = Shared(torch.zeros(60, width, dtype=torch.float64))
            for op, fields in (
                (send, stage),
                (send, {"rows": own}),
                (hear, {**stage, "all": everyone}),
                (hear, {}),
            ):
                expected.append(frame_sizes(op, fields, 4).tolist())
        records = [record for record in fed.ledger.records if record.what == kind]
        assert [record.bytes.tolist() for record in records] == expected


@pytest.mark.law(sample=6)
@pytest.mark.parametrize(("name", "options"), [("bns", {"rate": 0.3}), ("cagnet", {})])
def test_a_run_resumes_its_bits_and_leaves_nothing_of_a_pass(
    make_graph: Callable[..., Graph],
    setups: list[Setup],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    options: dict[str, Any],
) -> None:
    run: dict[str, Any] = {"method": name, "options": options, "clients": 4, "rounds": 3}
    run |= {"partition": "random", "hidden": 8, "dtype": "float64"}
    result = sg.run(make_graph(60), **run, out=str(tmp_path / "whole"))
    run_until(monkeypatch, make_graph(60), 2, tmp_path / "cut", **run)
    sg.resume(tmp_path / "cut", graph=make_graph(60))
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")
    assert result.test.server is not None
    assert result.test.uncut is not None
    assert result.test.server.accuracy == result.test.uncut.accuracy
    assert all(
        not name.startswith("pass/") for state in setups[0].federation.states() for name in state
    )
