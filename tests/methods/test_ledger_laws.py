"""Ledger = closed form, and strict = not strict, for every method."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from crossed import crossed
from layers import model_of
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.work import metered
from silograph.evaluation.evaluate import own_counts, server_counts
from silograph.federation.frame import DIMENSION, FIELD, HEADER
from silograph.federation.in_process import InProcess
from silograph.federation.ledger import Record
from silograph.graph.block.block import ClientBlock, Route, SparseRows
from silograph.graph.graph import Graph
from silograph.methods import METHODS
from silograph.methods.base import MethodConfig, RoundReport
from silograph.methods.local_training import shared
from silograph.nn.backends import TORCH
from silograph.nn.fit import LOSS_FLOPS, Schedule, Training, TrainingInputs
from silograph.nn.model import Model
from silograph.nn.optim import SGD, Adam
from silograph.selection.base import select_uniform
from together import EPOCHS, SHORT, held_of, whole_round

Built = tuple[ClientBlock, Route]
ROUNDS = 3
BINS = 255


def config(graph: Graph, name: str, participation: float = 1.0) -> MethodConfig:
    method = METHODS[name]
    return MethodConfig(
        model=Model("gcn", graph.num_features, 8, graph.num_classes, 2, 0.5, graph.task),
        optimizer=SGD(0.1, 5e-4) if method.needs.plain_sgd else Adam(lr=0.01, weight_decay=5e-4),
        schedule=Schedule(EPOCHS.get(name, 2)),
        keep_optimizer=method.needs.keep_optimizer,
        participation=participation,
        options=method.options(**SHORT.get(name, {})),
        corrections=method.needs.corrections(method.options()),
    )


def run(
    name: str, cfg: MethodConfig, built: Built, *, block_size: int = 5, strict: bool = False
) -> tuple[InProcess, dict[str, torch.Tensor], list[RoundReport]]:
    method = METHODS[name]
    fed = InProcess(cfg, *built, block_size, strict=strict)
    key = Key.of(5)
    state = method.init(fed, cfg, cfg.model.init_weights(Key.of(9), torch.float64), key)
    reports, held = [], held_of(built[0])
    for t in range(1, ROUNDS + 1):
        fed.start_round(t)
        state, report = whole_round(method, fed, cfg, held, state, t, key)
        reports.append(report)
    left = dict(own_counts(fed, key, cfg.count_rules))
    if state.weights is not None:
        left |= (
            server_counts(fed, shared("weights", state.weights), key, cfg.count_rules)
            | state.weights
        )
    for states in fed.states():
        left |= {f"{len(left)} {k}": f.t for k, f in states.items()}
    return fed, left, reports


@pytest.mark.law(sample=12)
@crossed({"block_size": (1, 5), "participation": (1.0, 0.5)}, quick=[(1, 1.0), (5, 0.5)])
@pytest.mark.parametrize("name", METHODS)
def test_strict_is_not_strict_bitwise(
    make_graph: Callable[..., Graph],
    cut_block: Callable[..., Built],
    name: str,
    block_size: int,
    participation: float,
) -> None:
    graph = make_graph(40)
    share = 1.0 if METHODS[name].evaluate.all_silos else participation
    cfg, built = config(graph, name, share), cut_block(graph, 5)
    fed, left, _ = run(name, cfg, built, block_size=block_size)
    strict, arrived, _ = run(name, cfg, built, block_size=block_size, strict=True)
    assert left.keys() == arrived.keys()
    assert all(torch.equal(left[k], arrived[k]) for k in left)
    assert list(fed.ledger.records) == list(strict.ledger.records)


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("name", METHODS)
def test_ledger_does_not_depend_on_blocks(
    make_graph: Callable[..., Graph], cut_block: Callable[..., Built], name: str
) -> None:
    graph = make_graph(40, sparse=True)
    share = 1.0 if METHODS[name].evaluate.all_silos else 0.5
    cfg, built = config(graph, name, share), cut_block(graph, 5)
    expected = list(run(name, cfg, built, block_size=5)[0].ledger.records)
    for block_size in (1, 2):
        assert list(run(name, cfg, built, block_size=block_size)[0].ledger.records) == expected


def fields_bytes(op: str, fields: dict[str, tuple[tuple[int, ...], int]]) -> int:
    """Length of a frame from the names, shapes and bytes a value of its fields."""
    head = HEADER.size + len(op)
    return head + sum(
        FIELD.size + len(name) + DIMENSION.size * len(shape) + item * int(np.prod(shape))
        for name, (shape, item) in fields.items()
    )


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("name", ["fedavg", "fedopt", "fedprox"])
def test_bytes_are_the_closed_form(
    make_graph: Callable[..., Graph],
    cut_block: Callable[..., Built],
    name: str,
    participation: float,
) -> None:
    """Each round: weights and a flag down to m clients, weights, nodes and loss up; then counts."""
    graph = make_graph(40)
    cfg = config(graph, name, participation)
    fed, _, reports = run(name, cfg, cut_block(graph, 5))
    f, h, k = graph.num_features, 8, graph.num_classes
    shapes = {"0.weight": (f, h), "0.bias": (h,), "1.weight": (h, k), "1.bias": (k,)}
    weights = {f"weights/{n}": (shape, 8) for n, shape in shapes.items()}
    down = fields_bytes("train", weights)
    up = fields_bytes("train", weights | {"nodes": ((), 8), "loss": ((), 8)})
    begin = 2 * fields_bytes("begin", {})
    calls = sum(len(report.participants) for report in reports)
    assert calls == ROUNDS * max(1, round(participation * 5))
    assert fed.ledger.bytes_by_kind["control"] == 5 * begin
    assert fed.ledger.bytes_by_kind["weights"] == calls * (down + up)
    counts: dict[str, tuple[tuple[int, ...], int]] = {"test.histogram": ((k, 2, BINS), 4)}
    for part in ("val", "test"):
        counts |= {f"{part}.nodes": ((), 4), f"{part}.loss": ((), 8)}
        counts |= {f"{part}.{c}": ((k,), 4) for c in ("known", "tp", "fp", "fn")}
    own = fields_bytes("judge_own", {}) + fields_bytes("judge_own", counts)
    server = fields_bytes("judge_server", weights) + fields_bytes("judge_server", counts)
    assert fed.ledger.bytes_by_kind["evaluation"] == 5 * (own + server)


def only(fed: InProcess, op: str, direction: str, what: Kind = Kind.WEIGHTS) -> list[Record]:
    asked = (op, direction, what)
    return [r for r in fed.ledger.records if (r.op, r.direction, r.what) == asked]


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("sparse", [False, True])
def test_work_is_the_closed_form(
    make_graph: Callable[..., Graph],
    cut_block: Callable[..., Built],
    sparse: bool,
    optimizer: str,
) -> None:
    """A GCN F-8-K with dropout, worked out by hand from rows n, entries and training nodes.

    Layer 1, width 8: X W and its weight gradient 2 x 2 s 8 (s values of X); the sum over
    neighbors and its transpose 2 x 2 e 8; two scalings, both ways 4 n 8; self loop 4 n 8; bias
    2 n 8; ReLU 2 n 8; dropout 4 n 8. Layer 2, width K: the product with both gradients 3 x 2 n 8
    K, and the same sums and scalings at width K, without ReLU and dropout.
    """
    graph = make_graph(40, sparse=sparse)
    block, route = cut_block(graph, 5)
    steps = Adam(lr=0.01) if optimizer == "adam" else SGD(lr=0.1, momentum=0.9)
    cfg = replace(config(graph, "fedavg"), optimizer=steps)
    fed = InProcess(cfg, block, route, 5)
    weights = cfg.model.init_weights(Key.of(9), torch.float64)
    method = METHODS["fedavg"]
    state = method.init(fed, cfg, weights, Key.of(5))
    method.round(fed, cfg, state, 1, Key.of(5))
    f, h, k = graph.num_features, 8, graph.num_classes
    for c, part in enumerate(block.take(torch.tensor([c])) for c in range(5)):
        n, entries, train = len(part.y), part.adj.nnz, int(part.num_train)
        values = part.x.csr.nnz if isinstance(part.x, SparseRows) else n * f
        first = 4 * values * h + 4 * entries * h + (4 + 4 + 2 + 2 + 4) * n * h
        second = 6 * n * h * k + 4 * entries * k + (4 + 4 + 2) * n * k
        loss = LOSS_FLOPS * k * train
        parameters = f * h + h + h * k + k
        step = (12 if optimizer == "adam" else 4) * parameters
        epochs = cfg.schedule.epochs
        assert only(fed, "train", "up")[0].flops[c] == epochs * (first + second + loss)
        assert only(fed, "train", "up", Kind.OPTIMIZER)[0].flops[c] == epochs * step
        # Judging the trained model is evaluation, with its own record: one forward pass.
        judged = only(fed, "train", "up", Kind.EVALUATION)[0]
        first = 2 * values * h + 2 * entries * h + (2 + 2 + 1 + 1) * n * h
        second = 2 * n * h * k + 2 * entries * k + (2 + 2 + 1) * n * k
        assert judged.flops[c] == first + second
        assert judged.bytes.tolist() == [0] * 5


def layer_work(model: Model, layer: int, n: int, entries: int, values: int, *, train: bool) -> int:
    """Work of one layer by hand; values of X stand for its product in layer 0, n I later.

    `both` counts the way back, `two` that for both factors of a product.
    """
    wide, out, last = model.widths[1], model.widths[layer + 1], layer == model.layers - 1
    both, two = (2, 3) if train else (1, 1)
    stored = values if layer == 0 else n * wide
    product = 2 * stored * (both if layer == 0 else two)  # for each column of the weight
    total = both * n * out  # bias
    if model.conv == "graphconv":
        total += 2 * product * out + both * 2 * entries * out + n * out
    elif model.conv == "gin":  # sums, self loop, bias and ReLU inside, then the second product
        total += product * wide + both * (2 * entries + 2 * n + n + n) * wide
        total += two * 2 * n * wide * out
    elif model.conv == "gat":  # both scores, then edges and loops, then the division
        z = model.heads * out if last else out
        total += product * z + two * 2 * 2 * n * z
        total += (entries + n) * (both * 6 * model.heads + two * 2 * z) + both * n * z
        total += both * n * z * last  # the mean of the heads
    else:
        total += product * out
    if layer and train:
        total += 4 * n * wide  # dropout
    if not last:
        total += both * n * out  # ReLU
    if model.residual and layer and not last:
        total += n * out
    return total


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("conv", ["graphconv", "gin", "gat", "appnp"])
def test_work_of_every_layer_is_the_closed_form(
    make_graph: Callable[..., Graph], cut_block: Callable[..., Built], conv: str, sparse: bool
) -> None:
    graph = make_graph(40, sparse=sparse)
    block, _ = cut_block(graph, 5)
    model = model_of(conv, graph.num_features, graph.num_classes, layers=3, residual=True)
    weights, k = model.init_weights(Key.of(9), torch.float64), graph.num_classes
    size = sum(w.numel() for w in weights.values())
    with metered(5) as meter:
        TORCH.fit(
            Training(model, SGD(0.1), Schedule(2)), TrainingInputs(block, weights, None, Key.of(1))
        )
    for c, part in enumerate(block.take(torch.tensor([c])) for c in range(5)):
        n, entries, train = len(part.y), part.adj.nnz, int(part.num_train)
        values = part.x.csr.nnz if isinstance(part.x, SparseRows) else n * graph.num_features
        step, judged = (
            sum(layer_work(model, i, n, entries, values, train=way) for i in range(3))
            # A hop of APPNP: sums, two scalings, self loop, restart.
            + model.hops * (2 if way else 1) * (2 * entries + (2 + 2 + 2) * n) * k
            for way in (True, False)
        )
        assert meter.flops[c] == 2 * (step + LOSS_FLOPS * k * train)
        assert meter.part(Kind.OPTIMIZER).flops[c] == 2 * 2 * size
        assert meter.part(Kind.EVALUATION).flops[c] == judged


def test_clients_that_do_not_train_do_no_work(
    make_graph: Callable[..., Graph], cut_block: Callable[..., Built]
) -> None:
    graph = make_graph(40)
    block, route = cut_block(graph, 5)
    idle = block.client == 2
    block = replace(block, split=replace(block.split, train=block.split.train & ~idle))
    cfg = config(graph, "fedavg")
    fed = InProcess(cfg, block, route, 5)
    method = METHODS["fedavg"]
    state = method.init(fed, cfg, cfg.model.init_weights(Key.of(9), torch.float64), Key.of(5))
    method.round(fed, cfg, state, 1, Key.of(5))
    flops = only(fed, "train", "up")[0].flops
    assert flops[2] == 0
    assert (np.delete(flops, 2) > 0).all()


def test_partial_participation_costs_only_the_chosen(
    make_graph: Callable[..., Graph], cut_block: Callable[..., Built]
) -> None:
    graph = make_graph(40)
    cfg = config(graph, "fedavg", 0.4)
    fed, _, reports = run("fedavg", cfg, cut_block(graph, 5))
    for t, (record, report) in enumerate(
        zip(only(fed, "train", "down"), reports, strict=True), start=1
    ):
        chosen = select_uniform(fed.ids, 0.4, Key.of(5).fold("select", t))
        assert tuple(chosen) == report.participants
        assert [fed.ids[c] for c in record.clients] == chosen
        assert (record.round, record.step) == (t, 1)
