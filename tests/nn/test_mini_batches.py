"""Laws of mini-batches with drawn neighbors.

The score of an edge is a hash, so all orders of a row's edges are alike: with k of d neighbors
drawn, each set of k has probability 1 / C(d, k). So the expectation of whatever is worked out from
a draw is the plain mean over those sets, which the tests enumerate with the code's own draws.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from layers import COMPILED_MODELS, CONVS, model_of
from silograph.core.key import Key
from silograph.core.payload import Patched, Stacked
from silograph.graph.block.block import ClientBlock, Route, Rows, make_block, whole
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph, Split
from silograph.graph.partition.partition import Partition, make_partition
from silograph.graph.partition.split import draw_split
from silograph.nn.backends import BACKENDS
from silograph.nn.conv import (
    GAT,
    GIN,
    Conv,
    Messages,
    Params,
    Propagation,
    convolve,
    internal_messages,
)
from silograph.nn.fit import Fitted, Schedule, Training, TrainingInputs, stacked_copies
from silograph.nn.forward import Pass
from silograph.nn.mini_batches import Fanout, Reached, batches, sampled_pass
from silograph.nn.model import MODELS, Model
from silograph.nn.optim import Adam
from silograph.sampling.neighbors import Bernoulli

pytest.importorskip("numba")

MakeGraph = Callable[..., Graph]
CutBlock = Callable[..., tuple[ClientBlock, Route]]
TOLERANCE = 1e-10
TIERS = pytest.mark.parametrize("kernels", ["torch", "compiled"])
TIERS_OF_MODELS = pytest.mark.parametrize(
    ("kernels", "conv"),
    [("torch", conv) for conv in MODELS] + [("compiled", conv) for conv in COMPILED_MODELS],
)
KEYS = 1200


def star_like(make_graph: MakeGraph) -> ClientBlock:
    """One client with 8 nodes: node 0 knows 1 to 5, and there are a few more edges."""
    pairs = np.array([(0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (1, 2), (4, 6), (5, 7), (6, 7)])
    rows, cols = torch.from_numpy(np.concatenate([pairs, pairs[:, ::-1]])).T
    graph = replace(make_graph(8), adj=CSR.from_pairs(rows, cols, (8, 8)))
    everyone = torch.ones(8, dtype=torch.bool)
    block, _ = make_block(graph, whole(graph), Split(everyone, ~everyone, ~everyone), torch.float64)
    return block


def draw_edges(
    block: ClientBlock, rows: list[int], fanout: int | None, key: Key
) -> tuple[Tensor, Tensor, Tensor]:
    """Position among the rows of one client, neighbor, and how many edges it stands for."""
    t = torch.tensor(rows)
    reached = Reached(t, torch.zeros_like(t), torch.tensor([0]), torch.tensor([0, len(t)]))
    drawn = Fanout((fanout or 0,)).draw(block, reached, 0, key, {})
    return drawn.position, drawn.neighbor, drawn.share


def pass_to(
    block: ClientBlock,
    seeds: list[int] | Tensor,
    fanout: tuple[int, ...],
    key: Key,
    sums: list[bool],
) -> Pass:
    """The pass of one client that ends at the seeds."""
    with torch.device("cpu"):
        t, off = torch.as_tensor(seeds), torch.tensor([0, len(seeds)])
    return sampled_pass(block, block.x, t, off, Fanout(fanout), key, sums, {})[0]


def drawn_sets(
    block: ClientBlock, row: int, fanout: int
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """The neighbors drawn under many keys, and how many edges each stands for."""
    for number in range(KEYS):
        _, neighbor, share = draw_edges(block, [row], fanout, Key.of(number))
        order = neighbor.argsort()
        yield tuple(neighbor[order].tolist()), share[order]


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("fanout", [1, 2, 3, 4])
def test_the_sum_over_drawn_neighbors_is_unbiased(make_graph: MakeGraph, fanout: int) -> None:
    block = star_like(make_graph)
    assert isinstance(block.x, Tensor)
    estimates = {
        drawn: share @ block.x[list(drawn)] for drawn, share in drawn_sets(block, 0, fanout)
    }
    assert set(estimates) == set(itertools.combinations(range(1, 6), fanout))
    mean = torch.stack(list(estimates.values())).mean(0)
    torch.testing.assert_close(mean, block.x[1:6].sum(0), rtol=0, atol=1e-12)


def drawn_passes(block: ClientBlock, conv: Conv) -> dict[tuple[int, ...], Pass]:
    """A pass to node 0 for every set of 2 neighbors that may be drawn."""
    found = {}
    for number in range(200):
        key = Key.of(number)
        inputs = pass_to(block, [0], (2,), key, [conv.sums])
        drawn = inputs.row_key[0][inputs.messages[0].adj.indices.long()]
        found[tuple(drawn.sort().values.tolist())] = inputs
    assert len(found) == (math.comb(5, 2) if conv.sums else 1)
    return found


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("name", sorted(set(CONVS) - {"gin"}))
def test_a_layer_over_drawn_neighbors_is_unbiased(make_graph: MakeGraph, name: str) -> None:
    """The mean over the drawn sets of a layer without ReLU, own features and bias included.

    Attention is a ratio of unbiased sums: the law holds for it where all edges weigh the same.
    """
    block, conv = star_like(make_graph), CONVS[name]
    p = stacked_copies(conv.init(Key.of(1), block.num_features, 6), 1)
    if isinstance(conv, GAT):
        p |= {name: torch.zeros_like(p[name]) for name in ("sender", "receiver")}
    found = [
        convolve(conv, p, inputs.x, inputs.messages[0])[0]
        for inputs in drawn_passes(block, conv).values()
    ]
    expected = convolve(conv, p, block.x, internal_messages(block, torch.float64))[0]
    torch.testing.assert_close(torch.stack(found).mean(0), expected)


@pytest.mark.parametrize("conv", [GIN(4), Propagation(0.2)], ids=["gin", "propagation"])
def test_a_sum_over_drawn_neighbors_is_unbiased(make_graph: MakeGraph, conv: Conv) -> None:
    """What comes after the sum need not be linear."""
    block = star_like(make_graph)
    p = stacked_copies(conv.init(Key.of(1), block.num_features, 6), 1)

    def summed(x: Rows, messages: Messages) -> Tensor:
        return conv.combine(p, conv.map(p, x, messages.sender_off), messages)[0]

    found = [summed(i.x, i.messages[0]) for i in drawn_passes(block, conv).values()]
    expected = summed(block.x, internal_messages(block, torch.float64))
    torch.testing.assert_close(torch.stack(found).mean(0), expected)


@pytest.mark.parametrize("name", CONVS)
def test_an_edge_that_stands_for_two_is_two_edges(name: str) -> None:
    conv = CONVS[name]
    p = stacked_copies(conv.init(Key.of(1), 4, 6), 1)
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def heard(indices: list[int], values: list[float]) -> Tensor:
        """What row 0 hears from rows 1 and 2."""
        adj = CSR(
            torch.tensor([0, len(indices)]),
            torch.tensor(indices),
            torch.tensor(values, dtype=torch.float64),
            3,
        )
        degree = torch.full((3, 1), 3.0, dtype=torch.float64)
        first, rows = torch.tensor([0, 1]), torch.tensor([0, 3])
        messages = Messages(adj, False, degree, degree[:1], first[:1], rows, first)
        return convolve(conv, p, x, messages)

    torch.testing.assert_close(heard([1, 2], [2, 1]), heard([1, 1, 2], [1, 1, 1]))


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("fanout", [1, 2, 4])
def test_every_set_of_neighbors_is_equally_likely(make_graph: MakeGraph, fanout: int) -> None:
    block = star_like(make_graph)
    assert isinstance(block.x, Tensor)
    counts: Counter[tuple[int, ...]] = Counter()
    estimates = []
    for drawn, share in drawn_sets(block, 0, fanout):
        counts[drawn] += 1
        estimates.append(share @ block.x[list(drawn)])
    seen = [counts[subset] for subset in itertools.combinations(range(1, 6), fanout)]
    assert sum(seen) == KEYS
    assert scipy.stats.chisquare(seen).pvalue > 1e-3
    sums = torch.stack(estimates)
    error = (sums.mean(0) - block.x[1:6].sum(0)).abs()
    assert bool((error < 5 * sums.std(0) / KEYS**0.5).all())


def test_rows_draw_independently_of_each_other(make_graph: MakeGraph) -> None:
    """Nodes 1 and 2 both know 0 and each other: what one draws says nothing about the other."""
    block, table = star_like(make_graph), np.zeros((2, 2), int)
    for number in range(KEYS):
        _, neighbor, _ = draw_edges(block, [1, 2], 1, Key.of(number))
        table[int(neighbor[0] == 0), int(neighbor[1] == 0)] += 1
    assert scipy.stats.chisquare(table.ravel()).pvalue > 1e-3


@given(
    seed=st.integers(0, 99),
    fanout=st.integers(1, 9) | st.none(),
    rows=st.lists(st.integers(0, 29), min_size=1, max_size=8, unique=True),
)
def test_drawn_are_some_neighbors_each_once(
    make_graph: MakeGraph, seed: int, fanout: int | None, rows: list[int]
) -> None:
    graph = make_graph(30, seed=seed % 3)
    block, _ = make_block(graph, whole(graph), Split(*[torch.ones(30) > 0] * 3), torch.float64)
    place, neighbor, share = draw_edges(block, rows, fanout, Key.of(seed))
    for position, row in enumerate(rows):
        known = block.adj.indices[block.adj.row == row].tolist()
        drawn = neighbor[place == position].tolist()
        assert len(set(drawn)) == len(drawn)
        assert set(drawn) <= set(known)
        assert len(drawn) == (len(known) if fanout is None else min(fanout, len(known)))
        assert share[place == position].tolist() == [len(known) / max(len(drawn), 1)] * len(drawn)


@given(size=st.integers(1, 40) | st.none(), seed=st.integers(0, 99))
def test_an_epoch_visits_every_training_node_once(
    make_graph: MakeGraph, cut_block: CutBlock, size: int | None, seed: int
) -> None:
    block, _ = cut_block(make_graph(60), 1)
    parts = batches(block, size, Key.of(seed))
    train = block.split.train.nonzero()[:, 0].tolist()
    assert sorted(torch.cat(parts).tolist()) == train
    full = len(train) if size is None else min(size, len(train))
    assert [len(part) for part in parts[:-1]] == [full] * (len(parts) - 1)
    assert 1 <= len(parts[-1]) <= full


def test_every_epoch_has_an_order_of_its_own(make_graph: MakeGraph, cut_block: CutBlock) -> None:
    block, _ = cut_block(make_graph(60), 1)
    orders = {
        tuple(torch.cat(batches(block, 4, Key.of(3).fold("epoch", e))).tolist()) for e in range(20)
    }
    assert len(orders) == 20


@pytest.mark.parametrize("fanout", [(2, 1), (0, 0)])
def test_draws_stay_on_the_device_of_the_block(
    make_graph: MakeGraph, cut_block: CutBlock, fanout: tuple[int, int]
) -> None:
    """Whatever is made without naming a device is on another one here, and does not mix."""
    block, _ = cut_block(make_graph(60), 1)
    _ = block.num_train, block.client
    with torch.device("meta"):
        for seeds in batches(block, 5, Key.of(0)):
            inputs = pass_to(block, seeds, fanout, Key.of(1), [True, True])
            for messages in inputs.messages:
                tensors = [t for t in vars(messages).values() if isinstance(t, Tensor)]
                assert {t.device.type for t in tensors} == {"cpu"}


# --- whole local trainings ------------------------------------------------------------------------


def model_for(graph: Graph, conv: str = "gcn") -> Model:
    options = {"hops": 2} if conv == "appnp" else {}
    return model_of(conv, graph.num_features, graph.num_classes, dropout=0.5, **options)


def fitted(kernels: str, model: Model, schedule: Schedule, block: ClientBlock) -> Fitted:
    start = model.init_weights(Key.of(1), torch.float64)
    training = Training(model, Adam(0.05, 5e-4), schedule)
    return BACKENDS[kernels].fit(training, TrainingInputs(block, start, None, Key.of(3)))


def dense(field: Stacked | Patched) -> Tensor:
    return field.stacked().t if isinstance(field, Patched) else field.t


def weights_of(found: Fitted) -> Params:
    return {name: dense(w) for name, w in found.weights.items()}


def assert_close(ours: Params, theirs: Params) -> None:
    for name, w in theirs.items():
        torch.testing.assert_close(ours[name], w, rtol=0, atol=TOLERANCE, msg=name)


@pytest.mark.law(sample=6)
@TIERS_OF_MODELS
@pytest.mark.parametrize("sparse", [True, False])
def test_one_batch_with_all_neighbors_is_full_batch(
    make_graph: MakeGraph, cut_block: CutBlock, conv: str, sparse: bool, kernels: str
) -> None:
    graph = make_graph(60, sparse=sparse)
    block, _ = cut_block(graph, 3)
    full = fitted(kernels, model_for(graph, conv), Schedule(3), block)
    for schedule in (
        Schedule(3, batch_size=60),
        Schedule(3, neighbors=Fanout((0, 0))),
        Schedule(3, batch_size=int(block.num_train.max()), neighbors=Fanout((60, 60))),
    ):
        found = fitted(kernels, model_for(graph, conv), schedule, block)
        assert_close(weights_of(found), weights_of(full))
        torch.testing.assert_close(found.logits, full.logits, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(found.loss, full.loss, rtol=0, atol=TOLERANCE)


@pytest.mark.law(sample=6)
@TIERS_OF_MODELS
def test_fanout_from_the_largest_degree_on_draws_nothing(
    make_graph: MakeGraph, cut_block: CutBlock, conv: str, kernels: str
) -> None:
    graph = make_graph(60)
    block, _ = cut_block(graph, 3)
    largest, model = int(block.adj.degree.max()), model_for(graph, conv)
    every = fitted(kernels, model, Schedule(2, batch_size=4), block)
    for fanout in ((largest, largest), (0, largest), (10 * largest, 0)):
        found = fitted(kernels, model, Schedule(2, batch_size=4, neighbors=Fanout(fanout)), block)
        assert_close(weights_of(found), weights_of(every))
    if sum(stage.conv.sums for stage in model.stages):
        fewer = Schedule(2, batch_size=4, neighbors=Fanout((largest - 1, largest)))
        found = fitted(kernels, model, fewer, block)
        assert not torch.equal(weights_of(found)["1.bias"], weights_of(every)["1.bias"])


@TIERS
def test_draws_depend_on_no_numbering_of_nodes(make_graph: MakeGraph, kernels: str) -> None:
    graph = make_graph(60)
    cut = make_partition(graph, "random", clients=4, key=Key.of(0))
    split = draw_split(graph, cut, ratios=(0.4, 0.3, 0.3), key=Key.of(1))
    order = torch.from_numpy(np.random.default_rng(3).permutation(60))
    where = order.argsort()
    assert isinstance(graph.x, Tensor)
    relabelled = replace(
        graph,
        adj=CSR.from_pairs(where[graph.adj.row], where[graph.adj.indices.long()], (60, 60)),
        x=graph.x[order],
        y=graph.y[order],
        node_id=graph.node_id[order.numpy()],
    )
    parts = tuple(where[part].sort().values for part in cut.nodes)
    moved = Split(split.train[order], split.val[order], split.test[order])
    block, _ = make_block(graph, cut, split, torch.float64)
    other, _ = make_block(relabelled, Partition(cut.ids, parts, 60, "random"), moved, torch.float64)
    for schedule in (
        Schedule(3, batch_size=3, neighbors=Fanout((2, 1))),
        Schedule(2, neighbors=Fanout((1, 1))),
        *([Schedule(2, 3, Bernoulli(0.5))] if kernels == "torch" else []),
    ):
        ours, theirs = (fitted(kernels, model_for(graph), schedule, b) for b in (block, other))
        assert_close(weights_of(ours), weights_of(theirs))


@TIERS
def test_draws_depend_on_no_grouping_of_clients(
    make_graph: MakeGraph, cut_block: CutBlock, kernels: str
) -> None:
    graph = make_graph(60, sparse=True)
    block, _ = cut_block(graph, 4)
    schedule = Schedule(2, batch_size=3, neighbors=Fanout((2, 1)))
    together = weights_of(fitted(kernels, model_for(graph), schedule, block))
    for group in ([0], [2, 3], [3, 1]):
        part = block.take(torch.tensor(group))
        apart = weights_of(fitted(kernels, model_for(graph), schedule, part))
        assert_close(apart, {name: w[group] for name, w in together.items()})
