"""The compiled GCN of ratings does what torch does, up to rounding, work and draws included."""

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest
import torch

import silograph as sg
from rating_graphs import rating_graph
from silograph.core.errors import ConfigError, ProtocolError
from silograph.core.key import Key
from silograph.core.work import metered
from silograph.graph.block.block import ClientBlock, make_block, whole
from silograph.graph.partition.split import choose_split
from silograph.nn.backends import BACKENDS, COMPILED, TORCH
from silograph.nn.correction import Proximal
from silograph.nn.fit import Fitted, Schedule, Training, TrainingInputs
from silograph.nn.masked import SparseMasks
from silograph.nn.optim import SGD, Adam, Optimizer
from silograph.nn.rating_compiled import CompiledPasses, DistinctNodes
from silograph.nn.rating_model import RatingModel
from silograph.nn.rating_steps import rating_graph as messages_of

pytest.importorskip("numba")

KEY = Key.of(3)
assert_close = partial(torch.testing.assert_close, rtol=0.0, atol=1e-10)
MODEL = RatingModel("rating_gcn", 4, 3, 6, 0.0)
ADAM = Adam(0.05, weight_decay=5e-4)


@pytest.fixture(scope="module")
def block() -> ClientBlock:
    graph = rating_graph(20, 80, 160)
    split = choose_split(graph, whole(graph), "0.6/0.2/0.2", KEY)
    return make_block(graph, whole(graph), split, torch.float64)[0]


def fitted(name: str, training: Training, block: ClientBlock) -> tuple[Fitted, float]:
    """Train from weights of which none is 0, so that each term counts; return the work, too."""
    model = training.model
    start = {
        n: w + 0.1 * KEY.fold(n).matrix(*w.view(len(w), -1).shape).view(w.shape)
        for n, w in model.init_weights(KEY, torch.float64).items()
    }
    tables = model.first_tables(block, KEY)
    inputs = TrainingInputs(block, start, None, KEY, tables=tables)
    with metered(block.num_clients) as meter:
        found = BACKENDS[name].fit(training, inputs)
    return found, float(meter.flops.sum())


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("optimizer", [SGD(0.2, momentum=0.5), ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("batch_size", [None, 7])
def test_both_train_alike(
    block: ClientBlock, layers: int, dropout: float, optimizer: Optimizer, batch_size: int | None
) -> None:
    model = replace(MODEL, layers=layers, dropout=dropout)
    training = Training(model, optimizer, Schedule(3, batch_size=batch_size), (Proximal(0.3),))
    (ours, work), (theirs, other) = (fitted(n, training, block) for n in ("compiled", "torch"))
    for name, w in theirs.tensors.items():
        assert_close(ours.tensors[name], w)
    for name, table in theirs.tables.items():
        assert_close(ours.tables[name].t, table.t)
    assert_close(ours.loss, theirs.loss)
    assert_close(ours.logits, theirs.logits)
    assert torch.equal(ours.steps, theirs.steps)
    assert work == other > 0


def test_both_predict_alike() -> None:
    """Also users and items without training ratings, of which those without edges share a row."""
    graph = rating_graph(60, 80, 100)
    split = choose_split(graph, whole(graph), "0.4/0.3/0.3", KEY)
    block = make_block(graph, whole(graph), split, torch.float64)[0]
    messages = messages_of(block, torch.float64)
    is_alone = messages.adj.degree == 0
    assert (messages.slot < 2)[~is_alone].any()
    alone = messages.slot[is_alone]
    distinct = len(DistinctNodes.of(messages).slot)
    assert distinct == len(messages.slot) - len(alone) + len(alone.unique()) < len(messages.slot)
    found, _ = fitted("torch", Training(MODEL, ADAM, Schedule(4)), block)
    weights = found.tensors
    ours, theirs = (b.predict(MODEL, weights, block, found.tables) for b in (COMPILED, TORCH))
    assert_close(ours, theirs)
    with pytest.raises(ProtocolError, match=r"expected a table embedding \(.*, got none"):
        COMPILED.predict(MODEL, weights, block)


def test_a_client_without_training_ratings_keeps_its_weights() -> None:
    graph = rating_graph(4, 4, 6)
    split = choose_split(graph, whole(graph), "0.6/0.2/0.2", KEY)
    split = replace(split, train=torch.zeros_like(split.train))
    block = make_block(graph, whole(graph), split, torch.float64)[0]
    found, _ = fitted("compiled", Training(MODEL, SGD(0.2), Schedule(2)), block)
    same, _ = fitted("torch", Training(MODEL, SGD(0.2), Schedule(2)), block)
    assert found.steps.tolist() == [0]
    for name, w in same.tensors.items():
        assert torch.equal(found.tensors[name], w)
    first = MODEL.first_tables(block, KEY)
    for name, table in first.items():
        assert torch.equal(found.tables[name].t, table.t)
    assert_close(found.logits, same.logits)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (replace(MODEL, conv="rating_gat", heads=2), "model rating_gat is not compiled"),
        (replace(MODEL, items=8), "model rating_gcn with rows of items is not compiled"),
    ],
)
def test_other_models_of_ratings_are_not_compiled(
    block: ClientBlock, model: RatingModel, reason: str
) -> None:
    assert COMPILED.why_not(Training(model, ADAM, Schedule(1)), torch.device("cpu")) == reason
    weights, tables = model.init_weights(KEY, torch.float64), model.first_tables(block, KEY)
    with pytest.raises(ProtocolError, match=f"got: {reason}; run with kernels=torch"):
        COMPILED.predict(model, weights, block, tables)


def test_models_under_masks_are_not_compiled() -> None:
    training = Training(MODEL, ADAM, Schedule(1), (SparseMasks(0.1),))
    reason = "task rating under masks is not compiled"
    assert COMPILED.why_not(training, torch.device("cpu")) == reason


def test_long_sums_keep_their_digits_in_float32() -> None:
    """Gradients of weights that all ratings share: within rounding of one in float64."""
    graph = rating_graph(300, 400, 60000)
    split = choose_split(graph, whole(graph), "0.8/0.1/0.1", KEY)
    found = {}
    for dtype in (torch.float32, torch.float64):
        block = make_block(graph, whole(graph), split, dtype)[0]
        weights = {n: w.to(dtype) + 0.1 for n, w in MODEL.init_weights(KEY, torch.float64).items()}
        values = weights | {n: f.t for n, f in MODEL.first_tables(block, KEY).items()}
        seeds = block.split.train.nonzero()[:, 0]
        place = torch.full((len(block.y),), -1)
        place[messages_of(block, dtype).row] = torch.arange(len(messages_of(block, dtype).row))
        passes = CompiledPasses(MODEL, block)
        found[dtype] = passes.gradient(values, seeds, place[seeds], KEY)[1]
    for name in MODEL.weight_shapes:
        exact = found[torch.float64][name]
        error = (found[torch.float32][name].double() - exact).norm() / exact.norm()
        assert error < 3e-6, name


def run(kernels: Literal["auto", "compiled", "torch"], **options: Any) -> sg.Result:
    asked: dict[str, Any] = {"model": "rating_gcn", "layers": 2, "hidden": 4, "clients": 3}
    asked |= {"partition": "category", "rounds": 3, "optimizer": "adam", "lr": 0.05}
    asked |= {"dtype": "float64", "keep_optimizer": True, "method": "fedavg"}
    return sg.run(rating_graph(), **asked | options, kernels=kernels)


def test_runs_are_compiled_where_nobody_says_otherwise() -> None:
    """Scores and bytes are those of torch; optimizers are kept, tables' as well."""
    ours, theirs = run("auto"), run("torch")
    assert ours.config.kernels == "compiled"
    assert ours.ledger.bytes_by_kind == theirs.ledger.bytes_by_kind
    assert ours.test.server is not None
    assert theirs.test.server is not None
    assert ours.test.server["rmse"] == pytest.approx(theirs.test.server["rmse"], abs=1e-10)
    with pytest.raises(
        ConfigError, match="got: model rating_gat is not compiled; use kernels=torch"
    ):
        run("compiled", model="rating_gat")
