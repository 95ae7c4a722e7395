"""Laws of models of ratings: dense training, chances of edges, what is private, what is unseen."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import silograph as sg
from mistakes import raises_code
from rating_graphs import drawn, rating_graph
from silograph.core.errors import ConfigError, DataError, ProtocolError
from silograph.core.key import Key
from silograph.core.payload import Ragged
from silograph.graph.block.block import ClientBlock, make_block, pairs_of, whole
from silograph.graph.graph import Graph
from silograph.graph.partition.partition import make_partition
from silograph.graph.partition.split import choose_split
from silograph.nn.fit import Schedule, Training, TrainingInputs
from silograph.nn.optim import SGD, Adam, Optimizer
from silograph.nn.rating_model import RatingConv, RatingModel
from silograph.nn.rating_steps import rating_graph as messages_of

KEY = Key.of(7)
CLOSE = 1e-10
CONVS: tuple[RatingConv, ...] = ("rating_gcn", "rating_gat")
BOTH = pytest.mark.parametrize("conv", CONVS)


def model_of(conv: RatingConv, **changes: Any) -> RatingModel:
    return replace(RatingModel(conv, 4, 2, 6, 0.0, heads=2), **changes)


def block_of(graph: Graph | None = None, ratios: str = "0.6/0.2/0.2") -> ClientBlock:
    graph = rating_graph() if graph is None else graph
    partition = whole(graph)
    split = choose_split(graph, partition, ratios, KEY)
    return make_block(graph, partition, split, torch.float64)[0]


class Dense:
    """The same model with a row for every user and item, by loops and dense matrices."""

    def __init__(self, model: RatingModel, block: ClientBlock) -> None:
        self.model, pairs, n = model, pairs_of(block), len(block.y)
        train = block.split.train
        weight, trust = np.zeros((n, n)), np.zeros((n, n))
        rows = zip(pairs.row.tolist(), pairs.user.tolist(), pairs.item.tolist(), strict=True)
        self.known: set[int] = set()
        for row, user, item in rows:
            if train[row]:
                weight[user, item] = weight[item, user] = float(block.y[row])
                self.known |= {user, item}
        assert isinstance(block.x, Tensor)
        people = block.x[:, 0] > 0
        for i, j in zip(block.adj.row.tolist(), block.adj.indices.tolist(), strict=True):
            trust[i, j] = float(people[i] and people[j])
        with np.errstate(invalid="ignore", divide="ignore"):
            step = [np.nan_to_num(m / m.sum(1, keepdims=True)) for m in (weight, trust)]
        chance = torch.from_numpy(np.maximum(*step))
        self.edge = torch.stack([chance, chance.T], dim=2)
        self.adj = torch.from_numpy(((weight > 0) | (trust > 0)).astype(float))
        self.mean, self.pairs, self.people = block.y[train].mean(), pairs, people
        self.item = block.x[:, 1] > 0

    def said(self, p: dict[str, Tensor]) -> Tensor:
        """Return the predictions of all pairs."""
        h = p["embedding"]
        loops = self.adj + torch.eye(len(h), dtype=torch.float64)
        root = loops.sum(1).rsqrt()
        for number in range(self.model.layers):
            z, edge = h @ p[f"{number}.weight"], self.edge @ p[f"{number}.edge"]
            if self.model.conv == "rating_gcn":
                norm = root[:, None] * loops * root
                h = norm @ z + (norm[..., None] * edge).sum(1) + p[f"{number}.bias"]
            else:
                heads = z.view(len(z), self.model.heads, -1)
                sent, heard = ((heads * p[f"{number}.{e}"]).sum(2) for e in ("sender", "receiver"))
                told = torch.nn.functional.leaky_relu(sent[None] + heard[:, None] + edge, 0.2)
                share = told.where(loops[..., None] > 0, -torch.inf).softmax(dim=1)
                h = torch.einsum("ijh,jhd->ihd", share, heads).flatten(1) + p[f"{number}.bias"]
            h = h.relu() if number < self.model.layers - 1 else h
        user, item = self.pairs.user, self.pairs.item
        both = h[user] * h[item]
        sums = p["bias"][user] + p["bias"][item]
        return self.mean + sums + both @ p["head.weight"] + p["head.bias"]


def started(model: RatingModel, block: ClientBlock) -> tuple[dict[str, Tensor], dict[str, Ragged]]:
    """Return weights of which none is 0, and tables."""
    weights = model.init_weights(KEY, torch.float64)
    weights = {
        n: w + 0.1 * KEY.fold("noise", n).matrix(*w.view(len(w), -1).shape).view(w.shape)
        for n, w in weights.items()
    }
    return weights, model.first_tables(block, KEY)


def dense_rows(table: Tensor, block: ClientBlock, dense: Dense) -> Tensor:
    """Return a table with a row for each row of the block."""
    found = table.new_zeros(len(block.y), table.shape[1])
    found[sorted(dense.known)] = table[2:]
    return found


@BOTH
@pytest.mark.parametrize("optimizer", [SGD(0.2), Adam(0.02)], ids=["sgd", "adam"])
def test_training_touched_rows_is_training_dense_tables(
    conv: RatingConv, optimizer: Optimizer
) -> None:
    block = block_of()
    model, steps = model_of(conv), 5
    weights, tables = started(model, block)
    dense = Dense(model, block)
    p = {n: w.clone()[None] for n, w in weights.items()}
    p |= {n: dense_rows(f.t, block, dense)[None] for n, f in tables.items()}
    state, train = optimizer.init(p), block.split.train[dense.pairs.row]
    truth = block.y[dense.pairs.row]
    for _ in range(steps):
        leaves = {n: w[0].detach().requires_grad_() for n, w in p.items()}
        loss = (dense.said(leaves)[:, 0] - truth)[train].square().mean()
        grads = torch.autograd.grad(loss, list(leaves.values()))
        for name, grad in zip(leaves, grads, strict=True):  # rows of nobody that trains stay
            if name in tables:
                gone = sorted(set(range(len(block.y))) - dense.known)
                grad[gone] = 0
        optimizer.step_(p, {n: g[None] for n, g in zip(leaves, grads, strict=True)}, state)
    training = Training(model, optimizer, Schedule(steps))
    fitted = model.fit(training, TrainingInputs(block, weights, None, KEY, tables=tables))
    for name, w in fitted.tensors.items():
        torch.testing.assert_close(w, p[name], rtol=0, atol=CLOSE)
    for name, f in fitted.tables.items():
        torch.testing.assert_close(f.t[2:], p[name][0][sorted(dense.known)], rtol=0, atol=CLOSE)
        assert not f.t[:2].any()  # unseen users and items
    said = dense.said({n: w[0] for n, w in p.items()})
    torch.testing.assert_close(fitted.logits[dense.pairs.row], said, rtol=0, atol=CLOSE)
    assert not fitted.logits[block.y.isnan()].any()


@BOTH
def test_the_first_prediction_is_the_mean_of_training(conv: RatingConv) -> None:
    block, model = block_of(), model_of(conv)
    weights, tables = model.init_weights(KEY, torch.float64), model.first_tables(block, KEY)
    said = model.forward(weights, block, tables=tables)[pairs_of(block).row]
    torch.testing.assert_close(said, block.y[block.split.train].mean().expand_as(said))


def test_edges_have_row_normalized_ratings_of_both_ends() -> None:
    table = [[1, 1, 4.0], [1, 2, 1.0], [2, 1, 4.0]]
    graph = sg.ratings(table, trust=[[1, 2]])
    train = graph.labeled
    block, _ = make_block(graph, whole(graph), sg.Split(train, ~train, ~train), torch.float64)
    found = messages_of(block, torch.float64)
    ends = zip(found.adj.row.tolist(), found.adj.indices.tolist(), strict=True)
    chance = dict(zip(ends, found.chance.tolist(), strict=True))
    # Users 0 and 1, items 2 and 3.
    assert chance[0, 2] == pytest.approx([0.8, 0.5])
    assert chance[2, 0] == pytest.approx([0.5, 0.8])
    assert chance[0, 3] == pytest.approx([0.2, 1.0])
    assert chance[1, 2] == pytest.approx([1.0, 0.5])
    assert chance[0, 1] == chance[1, 0] == [1.0, 1.0]
    assert len(chance) == 8


def test_ratings_of_0_leave_all_steps_alike() -> None:
    graph = sg.ratings([[1, 1, 0.0], [1, 2, 0.0]], scale=(0, 5))
    train = graph.labeled
    block, _ = make_block(graph, whole(graph), sg.Split(train, ~train, ~train), torch.float64)
    assert messages_of(block, torch.float64).chance.tolist() == [[0.5, 1.0]] * 2 + [[1.0, 0.5]] * 2


@BOTH
def test_ratings_that_do_not_train_reach_no_prediction(conv: RatingConv) -> None:
    block, model = block_of(), model_of(conv)
    weights, tables = started(model, block)
    y = torch.where(block.split.train, block.y, 6 - block.y)
    other = replace(block, y=y)
    ours, theirs = (model.forward(weights, b, tables=tables) for b in (block, other))
    assert torch.equal(ours, theirs)
    y = torch.where(block.split.train, 6 - block.y, block.y)
    assert not torch.equal(ours, model.forward(weights, replace(block, y=y), tables=tables))


@BOTH
def test_unseen_users_and_items_share_a_row(conv: RatingConv) -> None:
    """A pair of a new user and a new item has the rating of any such pair without trust."""
    data = drawn()
    table = np.concatenate([data["ratings"], [[900, 900, 3.0], [901, 901, 1.0]]])
    graph = sg.ratings(table, trust=data["trust"])
    new = np.char.find(graph.node_id, "u:90") == 0
    known = graph.labeled & ~torch.from_numpy(new)
    test = graph.labeled & torch.from_numpy(new)
    split = sg.Split(known, known & ~known, test)
    block, _ = make_block(graph, whole(graph), split, torch.float64)
    model = model_of(conv)
    weights, tables = started(model, block)
    said = model.forward(weights, block, tables=tables)[block.split.test]
    assert len(said) == 2
    assert torch.equal(said[0], said[1])
    moved = {
        n: replace(f, t=f.t + torch.cat([torch.ones(2), torch.zeros(len(f.t) - 2)])[:, None])
        for n, f in tables.items()
    }
    assert not torch.equal(model.forward(weights, block, tables=moved)[block.split.test], said)


def test_tables_of_another_client_are_refused() -> None:
    block, model = block_of(), model_of("rating_gcn")
    weights, tables = started(model, block)
    short = {n: Ragged(f.t[1:], f.off) for n, f in tables.items()}
    single = {n: Ragged(f.t.float(), f.off) for n, f in tables.items()}
    for wrong in (short, single, {}):
        with pytest.raises(ProtocolError, match="expected a table embedding"):
            model.forward(weights, block, tables=wrong)
    graph = rating_graph()
    partition = make_partition(graph, "category", clients=2, key=KEY)
    two, _ = make_block(graph, partition, choose_split(graph, partition, "0.6/0.2/0.2", KEY))
    with pytest.raises(ProtocolError, match="a block of one client for ratings, got 2"):
        model.forward(weights, two, tables=tables)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    (
        {"model": "gcn"},
        "got gcn, .*: use rating_profiles, or .* rating_gcn with layers=5 and hidden=32",
    ),
    ({"hidden": "8,4", "layers": None}, "expected one width for all layers of rating_gcn"),
    ({"collect": 0.5}, "expected no collect with rating_gcn"),
    ({"fanout": "5,5"}, "expected no fanout with rating_gcn"),
    ({"features": "degree"}, "expected no features with rating_gcn"),
    ({"local_bias": True}, "expected no local_bias with rating_gcn"),
    ({"model": "rating_gat", "options": {"heads": 3}}, "a multiple of 3 heads, got 8"),
    *(
        (
            {"method": name, "model": model},
            f"^expected a method that trains on ratings .*, got {name}: use one of local, fedavg, "
            "fedacs, [a-z, ]*centralized$",
        )
        for name, model in {
            "cagnet": "rating_gcn",
            "fedais": "rating_profiles",
            "fedgraph": "gcn",
            "fedpub": "rating_profiles",
            "graphsaint": "rating_gcn",
            "fedsage_local": "rating_gcn",
        }.items()
    ),
    ({"method": "llcg"}, "a model without tables for llcg, .* got model rating_gcn"),
]


@pytest.mark.parametrize(("given", "line"), MISTAKES, ids=[line[:24] for _, line in MISTAKES])
def test_what_does_not_go_with_ratings_is_refused(given: dict[str, Any], line: str) -> None:
    asked: dict[str, Any] = {
        "model": "rating_gcn",
        "clients": 2,
        "partition": "category",
        "hidden": 8,
        "rounds": 1,
    }
    with pytest.raises(ConfigError, match=line) as caught:
        sg.run(rating_graph(), **(asked | given))
    assert "\n" not in str(caught.value)


def test_a_model_of_ratings_needs_ratings(make_graph: Callable[..., Graph]) -> None:
    with raises_code(ConfigError, "conflicting-options", options=["dataset", "model"]):
        sg.run(make_graph(30), model="rating_gcn", clients=2, rounds=1)


def test_a_model_does_not_predict_without_tables(tmp_path: Any) -> None:
    graph = rating_graph()
    result = sg.run(
        graph,
        model="rating_gcn",
        clients=2,
        partition="category",
        hidden=4,
        rounds=1,
        split="0.6/0.2/0.2",
    )
    assert result.model is not None
    assert result.test.uncut is None
    with pytest.raises(DataError, match="what it knows of users and items stays with the clients"):
        result.model.predict(graph)
    result.model.save(tmp_path / "model.safetensors")
    again = sg.load_model(tmp_path / "model.safetensors")
    assert again.shape == result.model.shape
    assert all(torch.equal(again.weights[n], w) for n, w in result.model.weights.items())
