"""Laws of matrix factorization: loops over ratings and trust, shared rows of items, likeness."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import silograph as sg
from rating_graphs import rating_graph
from runs import SCORING_COSTS, assert_close, files_of, run_until
from silograph.core.errors import DataError
from silograph.core.key import Key, mix_words, unmix_words
from silograph.core.payload import Ragged
from silograph.graph.block.block import ClientBlock, make_block, pairs_of, trained_rows, whole
from silograph.graph.graph import Graph, Split, node_words, row_keys, words_of_rows
from silograph.graph.partition.split import choose_split
from silograph.nn.fit import Schedule, Training, TrainingInputs
from silograph.nn.optim import SGD
from silograph.nn.rating_factors import RatingFactors, Social, likeness
from silograph.nn.rating_steps import rating_graph as messages_of
from silograph.nn.shared_items import ITEMS, item_counts, item_rows

KEY = Key.of(7)
KINDS: tuple[Social, ...] = ("rating_mf", "sorec", "soreg")
OPTIONS: dict[str, Any] = {
    "method": "fedavg",
    "clients": 3,
    "partition": "category",
    "split": "0.6/0.2/0.2",
    "rounds": 3,
    "lr": 0.02,
    "local_epochs": 2,
    "dtype": "float64",
    "options": {"embedding": 3},
}


def block_of(graph: Graph | None = None, ratios: str = "0.6/0.2/0.2") -> ClientBlock:
    graph = rating_graph() if graph is None else graph
    split = choose_split(graph, whole(graph), ratios, KEY)
    return make_block(graph, whole(graph), split, torch.float64)[0]


def fitted(model: RatingFactors, block: ClientBlock, **changes: Any) -> dict[str, Tensor]:
    """Return weights and tables after some steps on all training ratings."""
    training = Training(model, SGD(0.3, weight_decay=0.01), Schedule(5))
    weights, tables = model.init_weights(KEY, torch.float64), model.first_tables(block, KEY)
    found = model.fit(training, TrainingInputs(block, weights, None, KEY, tables=tables, **changes))
    own = {name: w[0] for name, w in found.tensors.items()}
    return own | {name: field.t for name, field in found.tables.items()}


def loops(model: RatingFactors, block: ClientBlock) -> dict[str, Tensor]:
    """Return the same from the papers' sums, by loops over ratings and statements."""
    pairs, train, known = pairs_of(block), block.split.train, trained_rows(block)
    names = ["embedding", "bias"] + ["trusted"] * (model.social == "sorec")
    tables = model.first_tables(block, KEY)
    slot = {int(row): 2 + k for k, row in enumerate(known.nonzero()[:, 0])}
    p = {name: tables[name].t.clone() for name in names} | {"level": torch.zeros(1).double()}
    triples = [
        (slot[int(u)], slot[int(i)], float(block.y[r]))
        for r, u, i in zip(pairs.row, pairs.user, pairs.item, strict=True)
        if train[r]
    ]
    mean = sum(r for *_, r in triples) / len(triples)
    assert isinstance(block.x, Tensor)
    people = block.x[:, 0] > 0
    ends = zip(block.adj.row.tolist(), block.adj.indices.tolist(), strict=True)
    trust = [(slot.get(u, 0), slot.get(v, 0)) for u, v in ends if people[u] and people[v]]
    rated = {u: {i: r for who, i, r in triples if who == u} for u in slot.values()} | {0: {}}
    degree = {u: sum(1 for who, _ in trust_rows(block) if who == u) for u in range(len(block.y))}
    for _ in range(5):
        leaves = {name: t.clone().requires_grad_() for name, t in p.items()}
        x, b = leaves["embedding"], leaves["bias"]
        errors = [
            (r - mean - x[u] @ x[i] - leaves["level"] - (b[u] + b[i]) * (model.terms == "biases"))
            for u, i, r in triples
        ]
        loss = torch.stack(errors).square().mean()
        for (u, v), (row, other) in zip(trust, trust_rows(block), strict=True):
            if model.social == "sorec":
                wanted = (degree[other] / (degree[row] + degree[other])) ** 0.5
                term = (wanted - (x[u] @ leaves["trusted"][v]).sigmoid()) ** 2
            elif model.social == "soreg":
                term = pearson(rated[u], rated[v]) * (x[u] - x[v]).square().sum() / 2
            else:
                continue
            loss = loss + model.weight * term / len(triples)
        values = list(leaves.values())
        grads = torch.autograd.grad(loss, values, materialize_grads=True, allow_unused=True)
        steps = zip(p.items(), grads, strict=True)
        p = {name: t - 0.3 * (grad.view(t.shape) + 0.01 * t) for (name, t), grad in steps}
    return p


def trust_rows(block: ClientBlock) -> list[tuple[int, int]]:
    """Return statements of trust as rows of the block, both ways."""
    assert isinstance(block.x, Tensor)
    people = block.x[:, 0] > 0
    ends = zip(block.adj.row.tolist(), block.adj.indices.tolist(), strict=True)
    return [(u, v) for u, v in ends if people[u] and people[v]]


def pearson(a: dict[int, float], b: dict[int, float]) -> float:
    """Return (1 + Pearson) / 2 over the items that both have, 1/2 where there is none."""
    both = sorted(a.keys() & b.keys())
    one, other = (np.array([ratings[item] for item in both]) for ratings in (a, b))
    if len(both) < 2 or np.ptp(one) == 0 or np.ptp(other) == 0:
        return 0.5
    return (1 + float(np.corrcoef(one, other)[0, 1])) / 2


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("terms", ["biases", "mean"])
@pytest.mark.parametrize("social", KINDS)
def test_training_is_the_papers_sums_by_loops(social: Social, terms: Any) -> None:
    model, block = RatingFactors(social, 3, terms, weight=0.7), block_of(rating_graph(8, 9, 50))
    ours, theirs = fitted(model, block), loops(model, block)
    assert ours.keys() == theirs.keys()
    for name, t in theirs.items():
        torch.testing.assert_close(ours[name], t, rtol=0, atol=1e-10)
    moved = (ours["embedding"] - model.first_tables(block, KEY)["embedding"].t)[2:]
    assert float(moved.abs().min()) > 0


@pytest.mark.parametrize("social", ["sorec", "soreg"])
def test_without_weight_trust_changes_nothing(social: Social) -> None:
    block = block_of()
    plain = fitted(RatingFactors("rating_mf", 3), block)
    ours = fitted(RatingFactors(social, 3, weight=0.0), block)
    assert all(torch.equal(ours[name], t) for name, t in plain.items())
    weighed = fitted(RatingFactors(social, 3, weight=1.0), block)
    assert not torch.equal(weighed["embedding"], plain["embedding"])


def test_a_strong_pull_brings_users_together_whom_trust_joins() -> None:
    graph = sg.ratings(np.array([[0, 5, 5], [0, 6, 1], [1, 5, 5], [1, 6, 1]]), trust=[[0, 1]])
    off = torch.zeros_like(graph.labeled)
    split = Split(graph.labeled, off, off)
    block = make_block(graph, whole(graph), split, torch.float64)[0]
    assert likeness(block).tolist() == [1.0, 1.0]
    apart = [
        float((x[2] - x[3]).norm())
        for weight in (0.0, 2.0)
        for x in [fitted(RatingFactors("soreg", 2, weight=weight), block)["embedding"]]
    ]
    assert apart[1] < 0.2 * apart[0]


def test_one_product_by_hand() -> None:
    """Ratings 5 and 3 of mean 4; x = (2, 1), y = (1, 3): 4 + 5 + biases .5 - .25 + level .125."""
    graph = sg.ratings(np.array([[0, 5, 5], [0, 6, 3]]))
    off = torch.zeros_like(graph.labeled)
    block = make_block(graph, whole(graph), Split(graph.labeled, off, off), torch.float64)[0]
    model = RatingFactors("rating_mf", 2)
    rows = torch.tensor([[0, 0], [0, 0], [2, 1], [1, 3], [0, 0.0]]).double()
    bias = torch.tensor([[0], [0], [0.5], [-0.25], [0.0]]).double()
    tables = {n: Ragged(t, torch.tensor([0, 5])) for n, t in (("embedding", rows), ("bias", bias))}
    level = {"level": torch.tensor([0.125]).double()}
    said = model.forward(level, block, tables=tables)[3:, 0]
    assert said.tolist() == [9.375, 4.625]
    order = model.factors(level, block, tables=tables)
    score = order.item @ order.user[0] + order.bias + order.level[0]
    assert score[1:3].tolist() == [9.375, 4.625]
    plain = replace(model, terms="mean").forward(level, block, tables=tables)[3:, 0]
    assert plain.tolist() == [9.125, 4.125]


def test_words_of_keys_come_back_from_any_client() -> None:
    words = KEY.words(torch.arange(100), 3).flatten()
    assert torch.equal(unmix_words(mix_words(words)), words)
    keys = np.array(["i:1", "i:2", "u:1"])
    for client in ("silo", "another"):
        assert torch.equal(words_of_rows(client, row_keys(client, keys)), node_words(keys))


def test_an_item_has_the_same_row_at_every_client_and_users_have_none() -> None:
    graph = rating_graph()
    block = block_of(graph)
    found = messages_of(block, torch.float64)
    row = item_rows(found, 1000)
    assert len(row[found.is_item].unique()) > 25  # few items share one of 1,000 rows
    counts = item_counts(block, 1000)
    assert int(counts.sum()) == int(block.num_train)
    untrained = torch.ones(1000, dtype=torch.bool)
    untrained[row[found.is_item]] = False
    assert not counts[untrained].any()
    model = RatingFactors("rating_mf", 3, items=1000)
    weights, tables = model.init_weights(KEY, torch.float64), model.first_tables(block, KEY)
    plain = model.forward(weights, block, tables=tables)
    moved = {**weights, ITEMS: weights[ITEMS].clone()}
    moved[ITEMS][untrained] = 9
    assert torch.equal(model.forward(moved, block, tables=tables), plain)
    moved[ITEMS][:, -1] = 2  # the bias of every item
    pairs = pairs_of(block).row
    torch.testing.assert_close(
        (model.forward(moved, block, tables=tables) - plain)[pairs].min(),
        torch.tensor(2.0).double(),
        rtol=0,
        atol=1e-9,
    )


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("model", KINDS)
def test_runs_beat_the_mean_and_one_client_is_the_centralized_run(model: str) -> None:
    graph = rating_graph(30, 40, 600)
    given = OPTIONS | {"model": model, "rounds": 10, "local_epochs": 10}
    result = sg.run(graph, **given)
    assert result.test.server is not None
    assert result.baseline is not None
    assert result.test.server.rmse < result.baseline.rmse  # type: ignore[operator]
    alone = OPTIONS | {"model": model, "clients": 1}
    central = sg.run(graph, **alone | {"method": "centralized", "partition": "random"})
    ours = sg.run(graph, **alone | {"partition": whole(graph), "keep_optimizer": True})
    assert_close(ours, central, 1e-12, *SCORING_COSTS)


def test_a_run_resumes_to_the_bit_and_its_model_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, out = rating_graph(), tmp_path / "cut"
    given = OPTIONS | {"model": "sorec", "relevant": 4.0, "batch_size": 16}
    sg.run(graph, **given, out=str(tmp_path / "whole"))
    run_until(monkeypatch, graph, 1, out, **given)
    sg.resume(out, graph=graph)
    assert files_of(out) == files_of(tmp_path / "whole")
    model = sg.load_model(tmp_path / "whole" / "model.safetensors")
    assert isinstance(model.shape, RatingFactors)
    changed = replace(model, shape=replace(model.shape, items=2**20))
    changed.save(tmp_path / "other")
    with pytest.raises(DataError, match="expected weights"):
        sg.load_model(tmp_path / "other")
