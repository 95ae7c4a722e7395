"""Laws of ConsisRec: the paper's sums by loops, draws by enumeration, attention by hand."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import silograph as sg
from mistakes import raises_code
from rating_graphs import rating_graph
from runs import SCORING_COSTS, assert_close, files_of, run_until
from silograph.core.errors import ConfigError, DataError
from silograph.core.key import Key
from silograph.core.payload import Ragged
from silograph.graph.block.block import ClientBlock, make_block, pairs_of, trained_rows, whole
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph
from silograph.graph.partition.split import choose_split
from silograph.nn import consisrec
from silograph.nn import consisrec as rating_neighborhood
from silograph.nn.consisrec import (
    ConsisRec,
    DrawnNeighbors,
    Neighborhood,
    _nearest_levels,
    attentive_mean,
    draw_neighbors,
    neighborhood,
    similar_items,
)
from silograph.nn.fit import Schedule, Training, TrainingInputs
from silograph.nn.optim import SGD
from silograph.nn.rating_steps import rating_graph as messages_of

KEY = Key.of(7)
OPTIONS: dict[str, Any] = {
    "method": "fedavg",
    "model": "consisrec",
    "clients": 3,
    "partition": "category",
    "split": "0.6/0.2/0.2",
    "rounds": 3,
    "lr": 0.02,
    "local_epochs": 2,
    "dtype": "float64",
    "batch_size": 16,
    "options": {"embedding": 3},
}


def block_of(graph: Graph | None = None, *, flip: bool = False) -> ClientBlock:
    graph = rating_graph() if graph is None else graph
    split = choose_split(graph, whole(graph), "0.6/0.2/0.2", KEY)
    if flip:
        others = graph.labeled & ~split.train
        graph.y[others] = 6 - graph.y[others]
    return make_block(graph, whole(graph), split, torch.float64)[0]


def started(model: ConsisRec, block: ClientBlock) -> tuple[dict[str, Tensor], dict[str, Ragged]]:
    """Return weights of which none is 0, and tables."""
    weights = model.init_weights(KEY, torch.float64)
    noise = {n: KEY.fold("noise", n).matrix(len(w), w[:1].numel()) for n, w in weights.items()}
    weights = {n: w + 0.3 * noise[n].view(w.shape) for n, w in weights.items()}
    return weights, model.first_tables(block, KEY)


def fitted(model: ConsisRec, block: ClientBlock, steps: int = 4, **how: Any) -> dict[str, Tensor]:
    """Return weights and tables after some epochs."""
    weights, tables = started(model, block)
    training = Training(model, SGD(0.1), Schedule(steps, **how))
    found = model.fit(training, TrainingInputs(block, weights, None, KEY, tables=tables))
    own = {name: w[0] for name, w in found.tensors.items()}
    return own | {name: field.t for name, field in found.tables.items()}


class Loops:
    """The paper's sums over all neighbors, one rating after the other, from sets and dicts."""

    def __init__(self, model: ConsisRec, block: ClientBlock) -> None:
        self.model, pairs, train = model, pairs_of(block), block.split.train
        self.slot = {int(row): 2 + k for k, row in enumerate(trained_rows(block).nonzero()[:, 0])}
        ends = zip(pairs.row.tolist(), pairs.user.tolist(), pairs.item.tolist(), strict=True)
        self.triples = [(u, i, float(block.y[r])) for r, u, i in ends if train[r]]
        self.mean = sum(r for *_, r in self.triples) / len(self.triples)
        low, high = (f(r for *_, r in self.triples) for f in (min, max))
        assert (low, high) == (1, 5)
        self.near: dict[int, list[tuple[int, int]]] = {}  # neighbor and relation
        users: dict[int, set[int]] = {}
        for u, i, r in self.triples:
            self._join(u, i, int(r) - 1)
            self._join(i, u, int(r) - 1)
            users.setdefault(i, set()).add(u)
        assert isinstance(block.x, Tensor)
        people = block.x[:, 0] > 0
        for u, v in zip(block.adj.row.tolist(), block.adj.indices.tolist(), strict=True):
            if people[u] and people[v]:
                self._join(u, v, 5)
        for i, j in itertools.permutations(users, 2):
            if len(users[i] & users[j]) > len(users[i] | users[j]) / 2:
                self._join(i, j, 6)

    def _join(self, v: int, other: int, relation: int) -> None:
        self.near.setdefault(v, []).append((other, relation))

    def said(self, p: dict[str, Tensor], u: int, t: int) -> Tensor:
        """Return the prediction of a pair."""
        own, b = p["embedding"], p["bias"]
        slots = [self.slot.get(u, 0), self.slot.get(t, 1)]
        h = []
        for v, slot in zip((u, t), slots, strict=True):
            around = torch.zeros_like(own[0])
            near = self.near.get(v, [])
            if near:
                x = torch.stack([own[self.slot.get(other, 0)] for other, _ in near])
                e = torch.stack([p["relation"][relation] for _, relation in near])
                share = (torch.cat([x, e], dim=1) @ p["attention"]).softmax(dim=0)
                around = (share * x).sum(dim=0)
            both = torch.cat([own[slot], around])
            h.append((both @ p["layer.weight"] + p["layer.bias"]).relu())
        found = h[0] @ h[1]
        if self.model.terms == "none":
            return found
        sums = (b[slots[0]] + b[slots[1]]).sum() * (self.model.terms == "biases")
        return self.mean + sums + found + p["level"][0]

    def fitted(self, block: ClientBlock, steps: int) -> dict[str, Tensor]:
        """Return weights and tables after some steps of gradient descent."""
        weights, tables = started(self.model, block)
        p = weights | {n: f.t for n, f in tables.items()}
        for _ in range(steps):
            leaves = {n: t.detach().requires_grad_() for n, t in p.items()}
            errors = [self.said(leaves, u, i) - r for u, i, r in self.triples]
            loss = torch.stack(errors).square().mean()
            values = list(leaves.values())
            grads = torch.autograd.grad(loss, values, materialize_grads=True, allow_unused=True)
            p = {n: t - 0.1 * g for (n, t), g in zip(p.items(), grads, strict=True)}
        return p


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("terms", ["biases", "mean", "none"])
def test_training_with_all_neighbors_is_the_papers_sums_by_loops(terms: Any) -> None:
    block = block_of(rating_graph(8, 9, 60))
    model = ConsisRec(3, terms, sampled=1.0)
    loops = Loops(model, block)
    relations = {relation for near in loops.near.values() for _, relation in near}
    assert {5, 6} < relations  # trust and shared users
    ours, theirs = fitted(model, block), loops.fitted(block, 4)
    assert ours.keys() == theirs.keys()
    for name, t in theirs.items():
        torch.testing.assert_close(ours[name], t, rtol=0, atol=1e-10)
    before = started(model, block)[0]
    idle = {n for n in before if torch.equal(ours[n], before[n])}
    assert idle == {"query.weight", "query.bias"} | ({"level"} if terms == "none" else set())
    weights, tables = started(model, block)
    said, pairs = model.forward(weights, block, tables=tables)[:, 0], pairs_of(block)
    p = weights | {n: f.t for n, f in tables.items()}
    for row, u, i in zip(pairs.row.tolist(), pairs.user.tolist(), pairs.item.tolist(), strict=True):
        torch.testing.assert_close(said[row], loops.said(p, u, i), rtol=0, atol=1e-10)


def star(leaves: int) -> Neighborhood:
    """Return node 0 and those around it."""
    columns = torch.arange(1, leaves + 1)
    adj = CSR.from_pairs(torch.zeros(leaves).long(), columns, (leaves + 1, leaves + 1))
    relation = torch.zeros(leaves).long()
    return Neighborhood(adj, relation, Key.of(1).words(torch.arange(leaves + 1), 1)[:, 0], 0, 0)


def test_draws_have_the_chances_of_an_enumeration() -> None:
    """Two of four without replacement: p_a p_b (1 / (1 - p_a) + 1 / (1 - p_b)) for each set."""
    near, count = star(4), 40_000
    x = torch.tensor([[9.0, 9], [0, 0], [1, 0], [0.5, 1], [-0.3, 0.2]]).double()
    query = torch.tensor([0.4, 0.3]).double()
    score = [math.exp(-float((query - row).square().sum())) for row in x[1:]]
    p = [s / sum(score) for s in score]
    ends, rows = torch.zeros(count).long(), Key.of(3).words(torch.arange(count), 1)[:, 0]
    drawn = draw_neighbors(near, x, query.expand(count, 2), ends, rows, 0.6, KEY).adj
    assert drawn.degree.tolist() == [2] * count
    sets = drawn.indices.view(count, 2) - 1
    for a, b in itertools.combinations(range(4), 2):
        chance = p[a] * p[b] * (1 / (1 - p[a]) + 1 / (1 - p[b]))
        found = int(((sets[:, 0] == a) & (sets[:, 1] == b)).sum())
        assert abs(found - count * chance) < 4 * math.sqrt(count * chance * (1 - chance))
    one = draw_neighbors(near, x, query.expand(count, 2), ends, rows, 0.1, KEY).adj
    shares = torch.bincount(one.indices - 1, minlength=4) / count
    assert np.allclose(shares, p, atol=4 * 0.5 / math.sqrt(count))


@pytest.mark.parametrize(("sampled", "number"), [(0.01, 1), (0.3, 3), (0.39, 3), (0.7, 7), (1, 10)])
def test_a_share_of_the_neighbors_is_drawn_and_one_at_least(sampled: float, number: int) -> None:
    near, x = star(10), torch.zeros(11, 2).double()
    ends = torch.tensor([0, 5, 0])  # 5 has no neighbors
    drawn = draw_neighbors(near, x, x[:3], ends, torch.arange(3), sampled, KEY).adj
    assert drawn.degree.tolist() == [number, 0, number]
    assert all(len(set(part.tolist())) == number for part in drawn.indices.view(2, number))


def test_attention_by_hand() -> None:
    """Logits 1 + 0 and 3 + log 2 - 2: shares 1 / 3 and 2 / 3 of (1, 0) and (3, 6)."""
    x = torch.tensor([[0.0, 0], [1, 0], [3, 6]]).double()
    adj = CSR.from_pairs(torch.tensor([0, 0]), torch.tensor([1, 2]), (2, 3))
    p = {
        "attention": torch.tensor([[1.0], [0], [0], [1]]).double(),
        "relation": torch.tensor([[7, 0], [5, math.log(2) - 2]]).double(),
    }
    found = attentive_mean(p, x, DrawnNeighbors(adj, torch.tensor([0, 2])), torch.tensor([0, 9, 1]))
    torch.testing.assert_close(found, torch.tensor([[7 / 3, 4], [0, 0]]).double())


def test_gradients_of_drawn_neighbors_are_those_of_differences() -> None:
    block = block_of(rating_graph(8, 9, 50))
    model = ConsisRec(2, sampled=0.5)
    weights, tables = started(model, block)
    values = {n: v for n, v in weights.items() if not n.startswith("query")}
    names, pair = [*values, "embedding"], torch.arange(12)

    def said(*given: Tensor) -> Tensor:
        own = dict(zip(names, given, strict=True))
        p = weights | {n: f.t for n, f in tables.items()} | own
        return model.predict_pairs(p, block, pair, KEY)

    given = [*values.values(), tables["embedding"].t.clone()]
    assert torch.autograd.gradcheck(said, [t.requires_grad_() for t in given])


def test_draws_are_those_of_key_and_rating_whatever_else_is_in_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block, model = block_of(), ConsisRec(3, sampled=0.4)
    weights, tables = started(model, block)
    p = weights | {n: f.t for n, f in tables.items()}
    pair = torch.arange(len(pairs_of(block).row))
    said = [model.predict_pairs(p, block, pair, KEY.fold(k)) for k in (0, 0, 1)]
    assert torch.equal(said[0], said[1])
    assert not torch.allclose(said[0], said[2])
    alone = torch.cat([model.predict_pairs(p, block, part, KEY.fold(0)) for part in pair.split(7)])
    torch.testing.assert_close(alone, said[0], rtol=0, atol=1e-12)
    found = model.forward(weights, block, tables=tables)
    monkeypatch.setattr(consisrec, "SCORED_AT_ONCE", 30)
    again = model.forward(weights, block, tables=tables)
    torch.testing.assert_close(again, found, rtol=0, atol=1e-12)


def test_the_query_of_a_pair_is_what_the_paper_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is relu((x_u, x_t) W_q + b_q), the same for the neighbors of both ends."""
    block, model = block_of(), ConsisRec(3)
    weights, tables = started(model, block)
    seen: list[Tensor] = []

    def spy(near: Neighborhood, x: Tensor, query: Tensor, *rest: Any) -> DrawnNeighbors:
        seen.append(query)
        return draw_neighbors(near, x, query, *rest)

    monkeypatch.setattr(consisrec, "draw_neighbors", spy)
    model.forward(weights, block, tables=tables)
    slot = {int(row): 2 + k for k, row in enumerate(trained_rows(block).nonzero()[:, 0])}
    x, pairs = tables["embedding"].t, pairs_of(block)
    assert len(seen) == 2
    assert torch.equal(*seen)
    for place, (u, t) in enumerate(zip(pairs.user.tolist(), pairs.item.tolist(), strict=True)):
        both = torch.cat([x[slot.get(u, 0)], x[slot.get(t, 1)]])
        wanted = (both @ weights["query.weight"] + weights["query.bias"]).clamp(min=0)
        torch.testing.assert_close(seen[0][place], wanted, rtol=0, atol=1e-12)
    assert bool((seen[0] == 0).any())


class LargestTensor(TorchDispatchMode):
    """How many numbers the largest tensor has that an operation returns."""

    numbers = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        out = func(*args, **kwargs or {})
        found = [t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.numbers = max([self.numbers, *found])
        return out


def test_no_step_holds_embeddings_of_all_neighbors_of_its_ratings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the width and the share that is drawn are; and to the bit as with all at once."""
    block, model = block_of(rating_graph(25, 30, 400)), ConsisRec(32, sampled=1.0)
    at_once = fitted(model, block, steps=1)
    ratings = int(block.num_train)
    neighbors = neighborhood(block, 5).train * ratings
    monkeypatch.setattr(consisrec, "SCORED_AT_ONCE", ratings)
    with LargestTensor() as largest:  # type: ignore[no-untyped-call]
        found = fitted(model, block, steps=1)
    assert largest.numbers <= 3 * ratings * 32 < neighbors * 32 / 5
    assert all(torch.equal(t, at_once[name]) for name, t in found.items())


def test_neighbors_are_ordered_by_value_within_their_pair() -> None:
    value = torch.tensor([0.5, -2.0, 3.0, -0.0, -torch.inf, 3.0, 0.0, torch.inf, -1.0]).double()
    owner = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    assert consisrec._largest_first(owner, value).tolist() == [2, 0, 1, 3, 4, 7, 5, 6, 8]
    draws = torch.randn(500, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    many = torch.arange(10).repeat_interleave(50)
    wanted = draws.view(10, 50).argsort(dim=1, descending=True) + 50 * torch.arange(10)[:, None]
    assert torch.equal(consisrec._largest_first(many, draws), wanted.flatten())


def test_predictions_of_pairs_with_few_neighbors_do_not_hold_all_their_embeddings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block, model = block_of(rating_graph(30, 40, 600)), ConsisRec(64)
    weights, tables = started(model, block)
    monkeypatch.setattr(consisrec, "SCORED_AT_ONCE", 100 * 4 * 64)
    with LargestTensor() as largest:  # type: ignore[no-untyped-call]
        model.forward(weights, block, tables=tables)
    assert largest.numbers <= 100 * 2 * 64 < len(pairs_of(block).row) * 64 / 2


class KeptNumbers:
    """How many numbers a pass keeps for its way back."""

    def __init__(self) -> None:
        self.numbers = 0

    def pack(self, kept: Tensor) -> Tensor:
        self.numbers += kept.numel()
        return kept

    def unpack(self, kept: Tensor) -> Tensor:
        return kept


def test_a_step_in_parts_gives_the_same_gradients_and_keeps_no_drawn_neighbors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block, model = block_of(rating_graph(30, 40, 600)), ConsisRec(3, sampled=1.0)
    weights, tables = started(model, block)
    pair = torch.arange(len(pairs_of(block).row))
    found = []
    for at_once in (consisrec.DRAWN_AT_ONCE, 500):
        monkeypatch.setattr(consisrec, "DRAWN_AT_ONCE", at_once)
        leaves = {n: t.clone() for n, t in (weights | {n: f.t for n, f in tables.items()}).items()}
        for t in leaves.values():
            t.requires_grad_()
        kept = KeptNumbers()
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
            said = model.predict_pairs(leaves, block, pair, KEY)
        grads = torch.autograd.grad(
            said.square().sum(), list(leaves.values()), materialize_grads=True, allow_unused=True
        )
        found.append((said, grads, kept.numbers))
    (said, grads, numbers), (in_parts, of_parts, fewer) = found
    torch.testing.assert_close(in_parts, said, rtol=0, atol=1e-12)
    torch.testing.assert_close(of_parts, grads, rtol=0, atol=1e-10)
    assert fewer < len(pair) * 10 < numbers / 10
    assert "embedding" in fitted(model, block)


def test_ratings_that_validate_or_test_are_nobodys_neighbors() -> None:
    one, other = block_of(), block_of(flip=True)
    model = ConsisRec(3)
    ours, theirs = fitted(model, one), fitted(model, other)
    assert all(torch.equal(t, theirs[name]) for name, t in ours.items())


def test_similar_items_share_more_than_half_of_their_users() -> None:
    rng = np.random.default_rng(4)
    pairs = np.unique(rng.integers(0, (6, 12), (40, 2)), axis=0)
    users = {int(i): set(pairs[pairs[:, 1] == i, 0].tolist()) for i in pairs[:, 1]}
    wanted = {
        (6 + i, 6 + j)
        for i, j in itertools.permutations(users, 2)
        if len(users[i] & users[j]) > len(users[i] | users[j]) / 2
    }
    user, item = torch.from_numpy(pairs.T.copy())
    one, other = similar_items(user, item + 6, 18)
    assert set(zip(one.tolist(), other.tolist(), strict=True)) == wanted
    assert len(one) == len(wanted) > 4
    half = similar_items(torch.tensor([0, 0, 1]), torch.tensor([2, 3, 3]), 4)
    assert [len(t) for t in half] == [0, 0]


def test_items_are_compared_in_parts_and_too_many_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nine single items of a user are 9 * 9 pairs to compare, of which all but 9 are joined."""
    user, item = torch.zeros(9).long(), torch.arange(1, 10)
    found = similar_items(user, item, 10)
    assert len(found[0]) == 72
    monkeypatch.setattr(rating_neighborhood, "COMPARED_AT_ONCE", 10)
    monkeypatch.setattr(rating_neighborhood, "MOST_COMPARED", 81)
    monkeypatch.setattr(rating_neighborhood, "MOST_SIMILAR", 72)
    again = similar_items(user, item, 10)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    monkeypatch.setattr(rating_neighborhood, "MOST_SIMILAR", 71)
    with pytest.raises(DataError, match=r"^expected at most 71 pairs of items to join at a client"):
        similar_items(user, item, 10)
    monkeypatch.setattr(rating_neighborhood, "MOST_COMPARED", 80)
    with pytest.raises(DataError, match=r"^expected at most 80 pairs of items to compare at a cli"):
        similar_items(user, item, 10)
    with pytest.raises(DataError, match="leave items out, or take another mo"):
        sg.run(rating_graph(), **OPTIONS)


def test_work_of_batches_is_that_of_their_neighbors() -> None:
    block, model = block_of(), ConsisRec(4, sampled=0.5)
    near, graph = neighborhood(block, 5), messages_of(block, torch.float64)
    train = block.split.train[graph.row]
    degree = near.adj.degree
    total = int((degree[graph.user] + degree[graph.item])[train].sum())
    number = int(block.num_train)
    assert near.train * number == pytest.approx(total)
    nodes = 3 * near.adj.num_rows * 2 * 4
    whole_step = model.flops(block, number, passes=3)
    parts = model.flops(block, 50, passes=3) + model.flops(block, number - 50, passes=3)
    assert parts - whole_step == pytest.approx(nodes)
    assert model.flops(block, 0, passes=3) == nodes
    more = replace(model, sampled=1.0).flops(block, number, passes=3) - whole_step
    assert more == pytest.approx(3 * 0.5 * total * 16)


def test_a_run_beats_the_mean_and_one_client_is_the_centralized_run() -> None:
    graph = rating_graph(30, 40, 600)
    result = sg.run(graph, **OPTIONS | {"rounds": 5, "batch_size": None, "local_epochs": 10})
    assert result.test.server is not None
    assert result.baseline is not None
    assert result.test.server.rmse < result.baseline.rmse  # type: ignore[operator]
    graph, alone = rating_graph(), OPTIONS | {"clients": 1}
    central = sg.run(graph, **alone | {"method": "centralized", "partition": "random"})
    ours = sg.run(graph, **alone | {"partition": whole(graph), "keep_optimizer": True})
    assert_close(ours, central, 1e-12, *SCORING_COSTS)


def test_a_run_resumes_to_the_bit_and_its_model_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, out = rating_graph(), tmp_path / "cut"
    sg.run(graph, **OPTIONS, out=str(tmp_path / "whole"))
    run_until(monkeypatch, graph, 1, out, **OPTIONS)
    sg.resume(out, graph=graph)
    assert files_of(out) == files_of(tmp_path / "whole")
    model = sg.load_model(tmp_path / "whole" / "model.safetensors")
    assert model.shape == ConsisRec(3)


def test_it_ranks_nothing_and_says_so() -> None:
    with raises_code(ConfigError, "unread-option", option="relevant", part="rating"):
        sg.run(rating_graph(), **OPTIONS, relevant=4.0)


def test_levels_go_from_the_lowest_rating_that_trains_to_the_highest() -> None:
    value = torch.tensor([2.0, 3.0, 3.4, 5.0], dtype=torch.float64)
    assert _nearest_levels(value, 4).tolist() == [0, 1, 1, 3]
    assert _nearest_levels(value[:1], 4).tolist() == [0]  # all alike
    assert _nearest_levels(value[:0], 4).tolist() == []
