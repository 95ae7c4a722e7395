"""Laws of every method: grouping, order and numbering of clients and nodes change nothing."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from crossed import crossed
from layers import MODELS_WITH_SKIPS, model_of, reference_model
from silograph.aggregation.server_optimizers import (
    ADAM,
    MOMENTUM,
    NONE,
    MomentumOptions,
    ServerOptimizer,
)
from silograph.core.key import Key
from silograph.core.payload import Stacked, take_all
from silograph.evaluation.evaluate import own_counts, server_counts
from silograph.federation.in_process import InProcess
from silograph.graph.block.block import ClientBlock, Route, make_block, whole
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph, Split
from silograph.graph.partition.partition import Partition, make_partition
from silograph.graph.partition.split import draw_split
from silograph.methods import METHODS
from silograph.methods.base import Method, MethodConfig
from silograph.methods.fedavg import FEDAVG
from silograph.methods.local_training import shared
from silograph.nn.conv import Params
from silograph.nn.fit import Schedule
from silograph.nn.model import Model
from silograph.nn.optim import SGD, Adam, Optimizer
from together import EPOCHS, SHORT, held_of, whole_round, with_first_knobs

ROUNDS = 4
TOLERANCE = 1e-10
OPTIMIZERS: dict[str, Optimizer] = {
    "adam": Adam(lr=0.01, weight_decay=5e-4),
    "sgd": SGD(lr=0.1, weight_decay=5e-4, momentum=0.9),
}
Built = tuple[ClientBlock, Route]


def shape(graph: Graph, conv: str = "gcn", **options: Any) -> Model:
    sizes = graph.num_features, graph.num_classes
    return model_of(conv, *sizes, **{"hidden": 8, "dropout": 0.5, "task": graph.task} | options)


def config(graph: Graph, method: Method, **changes: Any) -> MethodConfig:
    optimizer = changes.pop("optimizer", "adam")
    cfg = MethodConfig(
        model=shape(graph, changes.pop("conv", "gcn"), **changes.pop("shape", {})),
        optimizer=SGD(0.1, 5e-4) if method.needs.plain_sgd else OPTIMIZERS[optimizer],
        schedule=Schedule(EPOCHS.get(method.name, 2)),
        keep_optimizer=method.needs.keep_optimizer,
        participation=1.0,
        options=method.options(**SHORT.get(method.name, {})),
        corrections=method.needs.corrections(method.options()),
    )
    return replace(cfg, **changes)


@dataclass(frozen=True)
class Trace:
    """What a run leaves, by client name where it is a client's."""

    weights: Params
    own: dict[str, dict[str, torch.Tensor]]
    counts: Params
    losses: list[float | None]


def train(
    method: Method, cfg: MethodConfig, built: Built, block_size: int, rounds: int = ROUNDS
) -> Trace:
    block, route = built
    fed = InProcess(cfg, block, route, block_size)
    key = Key.of(5)
    weights = cfg.model.init_weights(Key.of(9), torch.float64)
    state = method.init(fed, cfg, weights, key)
    losses, held = [], held_of(block)
    for t in range(1, rounds + 1):
        state, report = whole_round(method, fed, cfg, held, state, t, key)
        losses.append(report.train_loss)
    everyone = torch.arange(len(fed.ids))
    own = {
        name: {
            field: f.t
            for field, f in take_all(states, torch.tensor([position])).items()
            if isinstance(f, Stacked)  # rows come in the order of the nodes; counts cover them
        }
        for members, states in zip(everyone.split(block_size), fed.states(), strict=True)
        for position, name in enumerate(fed.ids[m] for m in members)
    }
    counts = own_counts(fed, key, cfg.count_rules)
    if state.weights is not None:
        counts |= {
            f"server {k}": v
            for k, v in server_counts(
                fed, shared("weights", state.weights), key, cfg.count_rules
            ).items()
        }
    return Trace(state.weights or {}, own, counts, losses)


def transposed(w: torch.Tensor) -> torch.Tensor:
    """Weights (I, O) as torch's (O, I); biases as they are."""
    return w.T if w.dim() == 2 else w


def assert_same(a: Trace, b: Trace) -> None:
    for name, w in a.weights.items():
        torch.testing.assert_close(w, b.weights[name], rtol=0, atol=TOLERANCE)
    for client, fields in a.own.items():
        for name, t in fields.items():
            torch.testing.assert_close(t, b.own[client][name], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(
        np.array(a.losses, dtype=float), np.array(b.losses, dtype=float), atol=TOLERANCE
    )


@pytest.mark.law(sample=24)
@crossed(
    {"keep": (True, False), "optimizer": ("adam", "sgd"), "participation": (1.0, 0.5)},
    quick=[  # each pair of settings once
        (True, "adam", 1.0),
        (False, "adam", 0.5),
        (True, "sgd", 0.5),
        (False, "sgd", 1.0),
    ],
)
@pytest.mark.parametrize("name", METHODS)
def test_a_block_of_many_is_many_blocks_of_one(
    make_graph: Callable[..., Graph],
    cut_block: Callable[..., Built],
    name: str,
    keep: bool,
    optimizer: str,
    participation: float,
) -> None:
    graph, method = make_graph(50, sparse=keep), METHODS[name]
    share = 1.0 if method.evaluate.all_silos else participation
    cfg = config(graph, method, optimizer=optimizer, keep_optimizer=keep, participation=share)
    built = cut_block(graph, 5)
    one = train(method, cfg, built, 1)
    for block_size in (2, 5):
        many = train(method, cfg, built, block_size)
        assert_same(many, one)
        for field, t in one.counts.items():
            # A score on the border of two bins may change sides with the last bit.
            ours, theirs = (
                c.sum(-1) if "histogram" in field else c for c in (many.counts[field], t)
            )
            torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.law(sample=24)
@crossed(
    {"layer": MODELS_WITH_SKIPS, "keep": (True, False)},
    quick=[*((layer, True) for layer in MODELS_WITH_SKIPS), (("gcn", False), False)],
)
def test_every_layer_trains_the_same_in_blocks(
    make_graph: Callable[..., Graph],
    cut_block: Callable[..., Built],
    layer: tuple[str, bool],
    keep: bool,
) -> None:
    graph, (conv, residual) = make_graph(50, sparse=True), layer
    skips = {"layers": 3 if residual else 2, "residual": residual}
    cfg = config(graph, FEDAVG, conv=conv, shape=skips, keep_optimizer=keep)
    built = cut_block(graph, 5)
    one = train(FEDAVG, cfg, built, 1)
    for block_size in (2, 5):
        assert_same(train(FEDAVG, cfg, built, block_size), one)


# Global training has laws of its own: tests/methods/test_label_guided.py.
@pytest.mark.law(sample=24)
@pytest.mark.parametrize("name", [name for name, m in METHODS.items() if not m.evaluate.crosses])
@pytest.mark.parametrize("conv", ["gin", "gat", "appnp"])
def test_every_method_trains_every_kind_of_layer(
    make_graph: Callable[..., Graph], cut_block: Callable[..., Built], conv: str, name: str
) -> None:
    graph, method = make_graph(50, missing=0.1), METHODS[name]
    built = cut_block(graph, 5)
    for schedule in (Schedule(2), Schedule(1, batch_size=3)):
        cfg = config(graph, method, conv=conv, participation=0.6, schedule=schedule)
        assert_same(train(method, cfg, built, 5), train(method, cfg, built, 1))


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("adam", [True, False])
def test_server_steps_train_the_same_in_blocks(
    make_graph: Callable[..., Graph], cut_block: Callable[..., Built], adam: bool
) -> None:
    graph, method, chosen = make_graph(50), METHODS["fedopt"], ADAM if adam else MOMENTUM
    cfg = with_server(config(graph, method, optimizer="sgd"), chosen, chosen.options())
    built = cut_block(graph, 5)
    assert_same(train(method, cfg, built, 5), train(method, cfg, built, 2))


def with_server(cfg: MethodConfig, chosen: ServerOptimizer, options: Any) -> MethodConfig:
    return replace(cfg, server_optimizer=chosen.name, server_step=chosen.step(options))


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("name", [name for name, m in METHODS.items() if m.server_step])
def test_half_a_server_step_leads_half_the_way(
    make_graph: Callable[..., Graph], cut_block: Callable[..., Built], name: str
) -> None:
    """Without momentum, x + lr (mean - x): of all weights that a method averages."""
    graph, method = make_graph(50), METHODS[name]
    plain = with_first_knobs(method, config(graph, method, optimizer="sgd"), 5)
    assert plain.server_optimizer == NONE.name
    initial = plain.model.init_weights(Key.of(9), torch.float64)
    after = {}
    for lr in (None, 1.0, 0.5):
        options = MomentumOptions(server_lr=lr or 1.0, server_momentum=0.0)
        cfg = plain if lr is None else with_server(plain, MOMENTUM, options)
        fed = InProcess(cfg, *cut_block(graph, 5), 5)
        state = method.init(fed, cfg, initial, Key.of(5))
        state, report = method.round(fed, cfg, state, 1, Key.of(5))
        assert report.server_optimizer == cfg.server_optimizer
        tensors = state.memory if state.weights is None else state.weights
        after[lr] = {n: w for n, w in tensors.items() if not n.startswith("server_optimizer/")}
    moved = 0.0
    for name, w in after[None].items():
        moved += float((w - initial[name]).abs().max())
        torch.testing.assert_close(after[1.0][name], w, rtol=0, atol=TOLERANCE)
        halfway = (initial[name] + w) / 2
        torch.testing.assert_close(after[0.5][name], halfway, rtol=0, atol=TOLERANCE)
    assert moved > 0


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("multilabel", [False, True])
@pytest.mark.parametrize("name", ["fedavg", "local"])
def test_missing_labels_and_clients_without_them(
    make_graph: Callable[..., Graph], name: str, multilabel: bool
) -> None:
    """Clients 1 and 3 have no training node: weight 0, never NaN, weights as received."""
    graph, method = make_graph(50, missing=0.2, multilabel=multilabel), METHODS[name]
    cut = make_partition(graph, "random", clients=5, key=Key.of(0))
    split = draw_split(graph, cut, ratios=(0.4, 0.3, 0.3), key=Key.of(1))
    idle = (cut.owner == 1) | (cut.owner == 3)
    built = make_block(graph, cut, Split(split.train & ~idle, split.val, split.test), torch.float64)
    cfg = config(graph, method, keep_optimizer=True)
    many, one = train(method, cfg, built, 5), train(method, cfg, built, 1)
    assert_same(many, one)
    assert all(bool(w.isfinite().all()) for w in many.weights.values())
    assert all(bool(t.isfinite().all()) for own in many.own.values() for t in own.values())
    assert many.own[cut.ids[1]]["optimizer/steps"] == 0
    assert many.own[cut.ids[0]]["optimizer/steps"] == ROUNDS * cfg.schedule.epochs
    alone, _ = make_block(graph, cut, split, torch.float64)
    assert built[0].num_train.tolist()[1] == 0 < alone.num_train.tolist()[1]
    dropped = built[0].take(torch.tensor([0, 2, 4]))
    if name == "fedavg":
        without = train(method, cfg, (dropped, built[1]), 3)
        for key, w in many.weights.items():
            torch.testing.assert_close(w, without.weights[key], rtol=0, atol=TOLERANCE)


def test_a_round_of_clients_that_cannot_train_changes_nothing(
    make_graph: Callable[..., Graph], cut_block: Callable[..., Built]
) -> None:
    graph = make_graph(50)
    block, route = cut_block(graph, 5)
    nobody = replace(block, split=replace(block.split, train=torch.zeros_like(block.split.train)))
    for name in ("fedavg", "fedopt", "local"):
        cfg = config(graph, METHODS[name])
        trace = train(METHODS[name], cfg, (nobody, route), 5)
        assert trace.losses == [None] * ROUNDS
        first = cfg.model.init_weights(Key.of(9), torch.float64)
        assert all(torch.equal(w, first[k]) for k, w in trace.weights.items())


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("name", METHODS)
def test_numbering_and_order_change_nothing(make_graph: Callable[..., Graph], name: str) -> None:
    graph, method = make_graph(50), METHODS[name]
    cut = make_partition(graph, "random", clients=5, key=Key.of(0))
    order = torch.from_numpy(np.random.default_rng(3).permutation(50))
    where = torch.empty_like(order)
    where[order] = torch.arange(50)
    relabelled = replace(
        graph,
        adj=CSR.from_pairs(where[graph.adj.row], where[graph.adj.indices.long()], (50, 50)),
        x=graph.x[order],  # type: ignore[index]
        y=graph.y[order],
        node_id=graph.node_id[order.numpy()],
    )
    turned = Partition(
        ids=cut.ids[::-1],
        nodes=tuple(where[part].sort().values for part in cut.nodes[::-1]),
        num_nodes=50,
        method="random",
    )
    split = draw_split(graph, cut, ratios=(0.4, 0.3, 0.3), key=Key.of(1))
    moved = Split(split.train[order], split.val[order], split.test[order])
    cfg = config(graph, method, participation=1.0 if method.evaluate.all_silos else 0.6)
    assert_same(
        train(method, cfg, make_block(graph, cut, split, torch.float64), 5),
        train(method, cfg, make_block(relabelled, turned, moved, torch.float64), 5),
    )


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("conv", "residual"), MODELS_WITH_SKIPS)
def test_one_client_with_kept_optimizer_is_centralized_training(
    make_graph: Callable[..., Graph], conv: str, residual: bool, optimizer: str
) -> None:
    """The oracle is an ordinary torch loop over PyG's layers, without dropout."""
    graph = make_graph(50)
    cut = whole(graph)
    split = draw_split(graph, cut, ratios=(0.4, 0.3, 0.3), key=Key.of(1))
    layers = 3 if residual else 2
    model = shape(graph, conv, dropout=0.0, layers=layers, residual=residual)
    cfg = config(graph, FEDAVG, optimizer=optimizer, keep_optimizer=True, model=model)
    ours = train(FEDAVG, cfg, make_block(graph, cut, split, torch.float64), 1).weights

    theirs = {
        name: w.requires_grad_()
        for name, w in cfg.model.init_weights(Key.of(9), torch.float64).items()
    }
    step: torch.optim.Optimizer = (
        torch.optim.Adam(list(theirs.values()), lr=0.01, weight_decay=5e-4)
        if optimizer == "adam"
        else torch.optim.SGD(list(theirs.values()), lr=0.1, weight_decay=5e-4, momentum=0.9)
    )
    x = graph.x.double()  # type: ignore[union-attr]
    for _ in range(ROUNDS * cfg.schedule.epochs):
        step.zero_grad()
        logits = reference_model(model, theirs, x, graph.edge_index)
        torch.nn.functional.cross_entropy(logits[split.train], graph.y[split.train]).backward()
        step.step()
    for name, w in theirs.items():
        torch.testing.assert_close(ours[name], w.detach(), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("keep", [True, False])
def test_fedavg_is_the_loop_over_clients(
    make_graph: Callable[..., Graph], cut_block: Callable[..., Built], keep: bool
) -> None:
    """The oracle trains PyG models one client after the other and averages their weights."""
    from torch_geometric.nn import GCNConv

    graph = make_graph(50)
    block, route = cut_block(graph, 5)
    cfg = config(graph, FEDAVG, keep_optimizer=keep, shape={"dropout": 0.0})
    ours = train(FEDAVG, cfg, (block, route), 5).weights

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = GCNConv(7, 8).double(), GCNConv(8, 3).double()

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.b(torch.relu(self.a(x, edges)), edges)
            return out

    first = cfg.model.init_weights(Key.of(9), torch.float64)
    shared = {
        f"{layer}.{theirs}": transposed(first[f"{number}.{our}"])
        for number, layer in enumerate("ab")
        for our, theirs in (("weight", "lin.weight"), ("bias", "bias"))
    }
    parts = [block.take(torch.tensor([c])) for c in range(5)]
    nets = [Net() for _ in parts]
    optimizers = [torch.optim.Adam(n.parameters(), lr=0.01, weight_decay=5e-4) for n in nets]
    for _ in range(ROUNDS):
        for c, (net, part) in enumerate(zip(nets, parts, strict=True)):
            net.load_state_dict(shared)
            if not keep:
                optimizers[c] = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=5e-4)
            edges = torch.stack([part.adj.row, part.adj.indices.long()])
            for _ in range(cfg.schedule.epochs):
                optimizers[c].zero_grad()
                logits = net(part.x, edges)[part.split.train]
                torch.nn.functional.cross_entropy(logits, part.y[part.split.train]).backward()
                optimizers[c].step()
        weight = block.num_train.double() / block.num_train.sum()
        states = [net.state_dict() for net in nets]
        shared = {k: sum(w * s[k] for w, s in zip(weight, states, strict=True)) for k in shared}
    for number, layer in enumerate("ab"):
        torch.testing.assert_close(
            ours[f"{number}.weight"], shared[f"{layer}.lin.weight"].T, rtol=0, atol=TOLERANCE
        )


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("name", METHODS)
def test_ops_leave_their_input_untouched(
    make_graph: Callable[..., Graph], cut_block: Callable[..., Built], name: str
) -> None:
    """The same federation state gives the same round twice."""
    graph, method = make_graph(50), METHODS[name]
    cfg = config(graph, method, keep_optimizer=True)
    block, route = cut_block(graph, 5)
    fed = InProcess(cfg, block, route, 5)
    key = Key.of(5)
    weights = cfg.model.init_weights(Key.of(9), torch.float64)
    state = method.init(fed, cfg, weights, key)
    before = dict(fed.states()[0])
    saved = {k: f.t.clone() for k, f in before.items()}
    cfg = with_first_knobs(method, cfg, 5)
    after, _ = method.round(fed, cfg, state, 1, key)
    kept = {k: w.clone() for k, w in (after.weights or {}).items()}
    if method.setting.on_held is not None:
        method.setting.on_held(cfg, held_of(block), after, 1, key)
    assert all(torch.equal(w, kept[k]) for k, w in (after.weights or {}).items())
    assert all(torch.equal(before[k].t, saved[k]) for k in saved)
    again = cfg.model.init_weights(Key.of(9), torch.float64)
    assert all(torch.equal(w, again[k]) for k, w in weights.items())
