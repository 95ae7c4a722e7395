"""Laws of the counts: what a client says of its predictions, and no more than that.

Logits are chosen freely: an `mlp` of one layer with the identity as weight returns its features.

C: clients. K: classes or label bits. B: bins.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.core.payload import Stacked
from silograph.evaluation.counts import BINS, RANGE, count, log_odds, no_counts, tally
from silograph.graph.block import ClientBlock, make_block, whole
from silograph.graph.graph import MISSING, Graph, Split, Task, subgraph
from silograph.graph.halo import Route
from silograph.graph.partition import Partition
from silograph.nn.loss import node_loss
from silograph.nn.model import Model, forward, init_weights

MakeGraph = Callable[..., Graph]
MakeBlock = Callable[..., tuple[ClientBlock, Route]]

CLIENTS, K = 4, 3
TASKS = pytest.mark.parametrize("task", ["multiclass", "multilabel"])


def tensors_of(fields: dict[str, Stacked]) -> dict[str, Tensor]:
    return {name: field.t for name, field in fields.items()}


def identity(task: Task, classes: int = K) -> tuple[Model, dict[str, Tensor]]:
    """Return the model whose logits are the features."""
    weights = {
        "0.weight": torch.eye(classes, dtype=torch.float64),
        "0.bias": torch.zeros(classes, dtype=torch.float64),
    }
    return Model("mlp", classes, 1, classes, 1, 0.0, task), weights


def case(
    make_graph: MakeGraph, cut_block: MakeBlock, task: Task, n: int = 60
) -> tuple[Model, dict[str, Tensor], ClientBlock]:
    graph = make_graph(n, features=K, multilabel=task == "multilabel", missing=0.2)
    if task == "multilabel":  # single bits are missing too
        drawn = torch.rand(n, K, generator=torch.Generator().manual_seed(0))
        graph.y[drawn < 0.2] = MISSING
    return *identity(task), cut_block(graph, CLIENTS)[0]


def shapes(fields: dict[str, Stacked]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(t.shape), t.dtype) for name, t in tensors_of(fields).items()}


@TASKS
def test_counts_equal_a_loop_over_nodes(
    make_graph: MakeGraph, cut_block: MakeBlock, task: Task
) -> None:
    model, weights, block = case(make_graph, cut_block, task)
    got = tensors_of(count(model, weights, block))
    assert isinstance(block.x, Tensor)
    for part, mask in (("val", block.split.val), ("test", block.split.test)):
        expected = {
            name: torch.zeros(CLIENTS, K, dtype=torch.int32) for name in ("known", "tp", "fp", "fn")
        }
        nodes = torch.zeros(CLIENTS, dtype=torch.int32)
        for i in mask.nonzero()[:, 0].tolist():
            c, logits, y = int(block.client[i]), block.x[i], block.y[i]
            nodes[c] += 1
            for k in range(K):
                if task == "multiclass":
                    predicted, true, known = int(logits.argmax()) == k, int(y) == k, True
                else:
                    predicted, true, known = bool(logits[k] > 0), int(y[k]) == 1, int(y[k]) >= 0
                expected["known"][c, k] += known
                expected["tp"][c, k] += known and predicted and true
                expected["fp"][c, k] += known and predicted and not true
                expected["fn"][c, k] += known and true and not predicted
        assert torch.equal(got[f"{part}.nodes"], nodes)
        for name, value in expected.items():
            assert torch.equal(got[f"{part}.{name}"], value)
        loss = node_loss(block.x, block.y, task)
        sums = torch.stack([loss[mask & (block.client == c)].sum() for c in range(CLIENTS)])
        torch.testing.assert_close(got[f"{part}.loss"], sums, rtol=1e-10, atol=1e-10)


@TASKS
def test_the_histogram_holds_every_judged_label_in_its_bin(
    make_graph: MakeGraph, cut_block: MakeBlock, task: Task
) -> None:
    model, weights, block = case(make_graph, cut_block, task)
    got = tensors_of(count(model, weights, block))
    assert isinstance(block.x, Tensor)
    p = block.x.softmax(1) if task == "multiclass" else block.x.sigmoid()
    scores = (p / (1 - p)).log()
    expected = torch.zeros(CLIENTS, K, 2, BINS, dtype=torch.int32)
    for i in block.split.test.nonzero()[:, 0].tolist():
        for k in range(K):
            y = int(block.y[i]) == k if task == "multiclass" else int(block.y[i, k])
            if y == MISSING:
                continue
            b = int((float(scores[i, k]) + RANGE) * BINS / (2 * RANGE))
            expected[block.client[i], k, int(y), b] += 1
    assert torch.equal(got["test.histogram"], expected)
    assert torch.equal(got["test.histogram"].sum(dim=(2, 3)).int(), got["test.known"])
    right = got["test.tp"] + got["test.fn"]
    assert torch.equal(got["test.histogram"][:, :, 1].sum(dim=2).int(), right)


@TASKS
@pytest.mark.parametrize("conv", ["gcn", "sage", "mlp"])
@pytest.mark.parametrize("personal", [False, True], ids=["shared", "stacked"])
def test_counts_of_a_block_are_counts_of_blocks_of_one(
    make_graph: MakeGraph, cut_block: MakeBlock, task: Task, conv: str, personal: bool
) -> None:
    _, _, block = case(make_graph, cut_block, task)
    model = Model(conv, K, 5, K, 2, 0.5, task)
    own = [init_weights(model, Key.of(c if personal else 0), torch.float64) for c in range(CLIENTS)]
    weights = {k: torch.stack([p[k] for p in own]) for k in own[0]} if personal else own[0]
    got = tensors_of(count(model, weights, block))
    for c in range(CLIENTS):
        one = tensors_of(count(model, own[c], block.take(torch.tensor([c]))))
        assert list(one) == list(got)
        for name, value in one.items():
            torch.testing.assert_close(value, got[name][c : c + 1], rtol=1e-10, atol=1e-10)


@TASKS
def test_a_tally_by_other_groups_is_the_same_counts_sorted_anew(
    make_graph: MakeGraph, cut_block: MakeBlock, task: Task
) -> None:
    model, weights, block = case(make_graph, cut_block, task)
    logits = forward(model, weights, block)
    whole = tensors_of(tally(logits, block, block.client, CLIENTS, task))
    for name, value in tensors_of(count(model, weights, block)).items():
        assert torch.equal(whole[name], value)
    # Groups in any order of rows; group 5 of 6 has none.
    group = torch.randint(0, 5, (len(block.y),), generator=torch.Generator().manual_seed(0))
    got = tensors_of(tally(logits, block, group, 6, task))
    for g in range(6):
        mine, split = group == g, block.split
        alone = replace(block, split=Split(split.train, split.val & mine, split.test & mine))
        expected = tensors_of(tally(logits, alone, torch.zeros_like(group), 1, task))
        for name, value in got.items():
            torch.testing.assert_close(value[g], expected[name][0], rtol=1e-10, atol=1e-10)


@TASKS
def test_shapes_depend_on_clients_classes_and_bins_only(
    make_graph: MakeGraph, cut_block: MakeBlock, task: Task
) -> None:
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "test.histogram": ((CLIENTS, K, 2, BINS), torch.int32)
    }
    for part in ("val", "test"):
        expected[f"{part}.nodes"] = ((CLIENTS,), torch.int32)
        expected[f"{part}.loss"] = ((CLIENTS,), torch.float64)
        expected |= {
            f"{part}.{name}": ((CLIENTS, K), torch.int32) for name in ("known", "tp", "fp", "fn")
        }
    # As many nodes as B or K or more: no shape may be that of rows by chance.
    for n in (20, 60, 300):
        model, weights, block = case(make_graph, cut_block, task, n)
        assert shapes(count(model, weights, block)) == expected
        assert shapes(no_counts(model, CLIENTS, torch.device("cpu"))) == expected
    assert not any(
        t.any() for t in tensors_of(no_counts(model, CLIENTS, torch.device("cpu"))).values()
    )


@TASKS
def test_counts_do_not_tell_one_node_from_another(make_graph: MakeGraph, task: Task) -> None:
    model, weights = identity(task)
    graph = make_graph(60, features=K, multilabel=task == "multilabel")
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    counts = []
    for g in (graph, subgraph(graph, order)):
        role = torch.from_numpy(g.node_id // 3 % 3)  # by name: the same nodes judge
        split = Split(role == 0, role == 1, role == 2)
        block, _ = make_block(g, whole(g), split, torch.float64)
        counts.append(tensors_of(count(model, weights, block)))
    assert counts[0]["val.nodes"].tolist() == counts[0]["test.nodes"].tolist() == [20]
    for name, value in counts[0].items():
        torch.testing.assert_close(value, counts[1][name], rtol=1e-10, atol=1e-10)


def test_training_nodes_and_features_do_not_count(
    make_graph: MakeGraph, cut_block: MakeBlock
) -> None:
    model, weights, block = case(make_graph, cut_block, "multiclass")
    assert isinstance(block.x, Tensor)
    unjudged = ~(block.split.val | block.split.test)
    assert unjudged.any()
    x = torch.where(unjudged[:, None], 100 * block.x, block.x)
    y = torch.where(unjudged, (block.y + 1) % K, block.y)
    changed = tensors_of(count(model, weights, replace(block, x=x, y=y)))
    for name, value in tensors_of(count(model, weights, block)).items():
        assert torch.equal(changed[name], value)


@TASKS
def test_very_confident_logits_stay_finite(make_graph: MakeGraph, task: Task) -> None:
    graph = make_graph(6, classes=2, features=2, multilabel=task == "multilabel")
    # Right and sure, wrong and sure, and undecided, for both classes.
    x = torch.tensor([[1e4, -1e4], [-1e4, 1e4], [1e4, -1e4], [-1e4, 1e4], [0.0, 0.0], [1e4, 1e4]])
    y = torch.tensor([0, 1, 1, 0, 0, 1])
    graph = replace(graph, x=x, y=y if task == "multiclass" else torch.stack([1 - y, y], dim=1))
    nobody = torch.zeros(6, dtype=torch.bool)
    block, _ = make_block(graph, whole(graph), Split(nobody, nobody, ~nobody), torch.float64)
    model, weights = identity(task, 2)
    got = tensors_of(count(model, weights, block))
    assert all(torch.isfinite(t.double()).all() for t in got.values())
    histogram = got["test.histogram"][0]
    assert histogram.sum(dim=(1, 2)).tolist() == [6, 6]
    # Class 0: nodes 0 and 4 and 3 are right, at +1e4, at 0 and at -1e4.
    middle = BINS // 2
    if task == "multiclass":
        # Equal logits are log-odds 0, at any size.
        assert histogram[0, 1, [0, middle, BINS - 1]].tolist() == [1, 1, 1]
        assert histogram[0, 0, [0, middle, BINS - 1]].tolist() == [1, 1, 1]
    else:
        assert histogram[0, 1, [0, middle, BINS - 1]].tolist() == [1, 1, 1]
        assert histogram[0, 0, [0, middle, BINS - 1]].tolist() == [1, 0, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_odds_keep_the_order_of_confident_logits(dtype: torch.dtype) -> None:
    # Two classes: the log-odds of class 0 are the difference of the logits.
    difference = torch.linspace(-30, 30, 25, dtype=dtype)
    odds = log_odds(torch.stack([difference, torch.zeros_like(difference)], dim=1), "multiclass")
    assert odds.dtype == torch.float64
    # Up to the range of the histogram to 1e-7: 1 - p has lost half the digits of a double there.
    inside = difference.abs() <= RANGE
    torch.testing.assert_close(odds[inside, 0], difference[inside].double(), rtol=0, atol=1e-7)
    assert bool((odds[:, 0].diff() > 0).all())
    assert torch.equal(log_odds(difference[:, None], "multilabel"), difference[:, None])


@TASKS
def test_clients_without_judged_nodes_count_nothing(make_graph: MakeGraph, task: Task) -> None:
    graph = make_graph(20, features=K, multilabel=task == "multilabel")
    partition = Partition(("a", "b"), (torch.arange(10), torch.arange(10, 20)), 20, "hand")
    first = torch.arange(20) < 10
    block, _ = make_block(graph, partition, Split(~first, first & False, first), torch.float64)
    model, weights = identity(task)
    for name, value in tensors_of(count(model, weights, block)).items():
        assert not value[1].any()
        assert bool(value[0].any()) == name.startswith("test.")
    # And a block in which nobody judges.
    nobody = make_block(graph, partition, Split(~first | first, first & False, first & False))[0]
    weights = {name: w.float() for name, w in weights.items()}
    empty = count(model, weights, nobody)
    assert shapes(empty) == shapes(no_counts(model, 2, torch.device("cpu")))
    assert not any(t.any() for t in tensors_of(empty).values())


def test_counting_uses_no_dropout_and_no_gradient(
    make_graph: MakeGraph, cut_block: MakeBlock
) -> None:
    _, _, block = case(make_graph, cut_block, "multiclass")
    model = Model("gcn", K, 5, K, 2, 0.9, "multiclass")
    weights = {
        name: w.requires_grad_()
        for name, w in init_weights(model, Key.of(0), torch.float64).items()
    }
    got = tensors_of(count(model, weights, block))
    assert not any(t.requires_grad for t in got.values())
    with torch.no_grad():
        predicted = forward(model, weights, block).argmax(dim=1)
    right = (predicted == block.y) & block.split.test
    assert torch.equal(got["test.tp"].sum(1), block.count(right))
