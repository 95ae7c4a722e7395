"""Laws of GCFL and GCFL+: FedAvg until a split; criteria, cuts and series by hand."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import planted_graph
from runs import FAST, go, rows_of, run_until, same_bits
from silograph.core.key import Key
from silograph.experiment.run.run import resume
from silograph.federation.in_process import InProcess
from silograph.graph.block.block import ClientBlock, Route, make_block
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph, Split
from silograph.graph.partition.partition import Partition
from silograph.methods import FEDAVG, GCFL, GCFLPLUS, MethodConfig, NoOptions
from silograph.methods.base import AnyMethod
from silograph.methods.gcfl import (
    GCFLOptions,
    GCFLPlusOptions,
    edge_weights,
    means,
    minimum_cut,
    nearest_split,
    note,
    should_split,
    similarities,
    split_clusters,
    warping_distances,
)
from silograph.nn.fit import Schedule
from silograph.nn.model import Model
from silograph.nn.optim import SGD, Adam

Built = tuple[ClientBlock, Route]
MakeGraph = Callable[..., Graph]
CutBlock = Callable[..., Built]
KEY, FIRST = Key.of(5), Key.of(9)
BOTH = pytest.mark.parametrize("method", [GCFL, GCFLPLUS], ids=lambda method: method.name)
NEVER: dict[str, Any] = {"epsilon1": 1e-9, "warmup": 0}


def config(graph: Graph, options: Any, **changes: Any) -> MethodConfig:
    cfg = MethodConfig(
        model=Model("gcn", graph.num_features, 8, graph.num_classes, 2, 0.0, graph.task),
        optimizer=Adam(0.05, 5e-4),
        schedule=Schedule(2),
        keep_optimizer=False,
        participation=1.0,
        options=options,
    )
    return replace(cfg, **changes)


@BOTH
@pytest.mark.parametrize("participation", [1.0, 0.6])
def test_one_cluster_is_fedavg(
    make_graph: MakeGraph, cut_block: CutBlock, method: AnyMethod, participation: float
) -> None:
    graph = make_graph(60, sparse=True)
    block, route = cut_block(graph, 5)
    options = method.options(**NEVER)
    cfg = config(graph, options, participation=participation)
    fed, other = (InProcess(cfg, block, route, 5) for _ in range(2))
    weights = cfg.model.init_weights(FIRST, torch.float64)
    ours = method.init(fed, cfg, weights, KEY)
    theirs = FEDAVG.init(other, replace(cfg, options=NoOptions()), weights, KEY)
    for t in range(1, 4):
        ours, report = method.round(fed, cfg, ours, t, KEY)
        theirs, expected = FEDAVG.round(other, cfg, theirs, t, KEY)
        assert report.facts["clusters"] == 1
        assert report.participants == expected.participants
        assert report.train_loss == pytest.approx(expected.train_loss, abs=1e-12)
        assert theirs.weights is not None
        for name, w in theirs.weights.items():
            torch.testing.assert_close(ours.memory[f"weights/{name}"][0], w, rtol=0, atol=1e-10)


def test_a_cluster_is_split_when_the_mean_is_short_and_a_change_is_long() -> None:
    """Changes (1, 0), (-1, 0), (0, .1): the mean is .0333 long, the longest 1."""
    changes = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.1]], dtype=torch.float64)
    gram = changes @ changes.T
    mean = 0.1 / 3
    for epsilon1, epsilon2, expected in (
        (mean * 1.01, 0.99, True),
        (mean * 0.99, 0.99, False),
        (mean * 1.01, 1.01, False),
    ):
        assert should_split(GCFLOptions(epsilon1=epsilon1, epsilon2=epsilon2), gram) == expected


def test_facts_are_what_thresholds_are_compared_with() -> None:
    """Two clusters; the mean of the second is .0333 long, and its longest change 1."""
    far = [[5.0, 0.0], [5.0, 1.0], [4.0, 0.0]]
    near = [[1.0, 0.0], [-1.0, 0.0], [0.0, 0.1]]
    changes = torch.tensor([*far, *near, [9.0, 9.0]], dtype=torch.float64)
    cluster, here = torch.tensor([0, 0, 0, 1, 1, 1, 1]), torch.arange(7) < 6
    found = nearest_split(cluster, changes @ changes.T, here)
    assert found == pytest.approx((0.1 / 3, 1.0), abs=1e-12)  # who was away is in none
    alone = nearest_split(cluster, changes @ changes.T, torch.arange(7) < 2)
    assert all(math.isnan(length) for length in alone)


def cut_weight(alike: Tensor, part: tuple[int, ...]) -> float:
    others = [i for i in range(len(alike)) if i not in part]
    return float(alike[list(part)][:, others].sum())


@pytest.mark.parametrize("n", [2, 3, 5, 6])
def test_the_cut_is_the_least_of_all(n: int) -> None:
    for seed in range(20):
        alike = Key.of(seed).matrix(n, n)
        alike = alike + alike.T
        found = tuple(minimum_cut(alike).tolist())
        parts = itertools.chain.from_iterable(
            itertools.combinations(range(n), k) for k in range(1, n // 2 + 1)
        )
        assert cut_weight(alike, found) == pytest.approx(min(cut_weight(alike, p) for p in parts))
        assert 0 < len(found) <= n / 2


def warped_by_hand(a: list[float], b: list[float]) -> float:
    if not a or not b:
        return 0.0 if a == b else math.inf
    ways = ((a[:-1], b), (a, b[:-1]), (a[:-1], b[:-1]))
    return (a[-1] - b[-1]) ** 2 + min(warped_by_hand(*way) for way in ways)


def test_time_warping_by_hand() -> None:
    series = Key.of(3).matrix(4, 5)
    found = warping_distances(series)
    for i, j in itertools.product(range(4), range(4)):
        expected = math.sqrt(warped_by_hand(series[i].tolist(), series[j].tolist()))
        assert float(found[i, j]) == pytest.approx(expected, abs=1e-12)
    late = torch.tensor([[1.0, 1, 2, 3], [1, 2, 3, 3]])
    assert warping_distances(late).tolist() == [[0, 0], [0, 0]]


def test_means_by_hand() -> None:
    """Two clusters become three; the middle client of the first was away, the last has no nodes."""
    models = torch.tensor([[1.0, 10.0], [2.0, 20.0]])
    change = torch.tensor([[1.0, 0], [9.0, 9.0], [3.0, 1.0], [1.0, 1.0], [5.0, 5.0]])
    cluster, new = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 0, 2, 1, 1])
    nodes = torch.tensor([2, 0, 4, 3, 0])
    found = means(models, change, cluster, new, nodes)
    assert found.tolist() == [[2, 10], [3, 21], [4, 11]]
    away = means(models, change, cluster, new, nodes * 0)
    assert away.tolist() == [[1, 10], [2, 20], [1, 10]]


def test_series_of_those_who_were_away_wait() -> None:
    series = torch.tensor([[1.0, 2], [3, 4]], dtype=torch.float64)
    memory = {"series": series, "filled": torch.tensor([1, 1])}
    gram = torch.diag(torch.tensor([25.0, 36], dtype=torch.float64))
    alike, known, memory = similarities(memory, gram, torch.tensor([True, False]))
    assert memory["series"].tolist() == [[2, 5], [3, 4]]
    assert memory["filled"].tolist() == [2, 1]
    assert known.tolist() == [True, False]
    assert torch.equal(alike, -warping_distances(memory["series"]))


def test_clients_without_a_series_go_with_the_larger_part() -> None:
    alike = torch.tensor([[0.0, 5, 1, 0], [5, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]]).double()
    gram = torch.diag(torch.ones(4, dtype=torch.float64))
    everyone, known = torch.ones(4).bool(), torch.tensor([True, True, True, False])
    options = GCFLPlusOptions(epsilon1=1.0, epsilon2=0.1)
    found = split_clusters(options, torch.zeros(4).long(), gram, everyone, alike, known)
    assert found.tolist() == [0, 0, 1, 0]
    few = torch.tensor([True, True, False, False])
    assert (
        split_clusters(options, torch.zeros(4).long(), gram, everyone, alike, few).tolist()
        == [0] * 4
    )


def test_planted_clusters_are_found(make_graph: MakeGraph, cut_block: CutBlock) -> None:
    """Half of the clients call the two classes by each other's name."""
    graph = make_graph(240, classes=2)
    block, route = cut_block(graph, 6)
    block = replace(block, y=torch.where(block.client >= 3, 1 - block.y, block.y))
    options = GCFLOptions(epsilon1=100.0, epsilon2=1e-6, warmup=5)
    cfg = config(graph, options, optimizer=SGD(0.1), schedule=Schedule(3))
    fed = InProcess(cfg, block, route, 6)
    state = GCFL.init(fed, cfg, cfg.model.init_weights(FIRST, torch.float64), KEY)
    for t in range(1, 7):
        state, report = GCFL.round(fed, cfg, state, t, KEY)
    first = state.memory["cluster"].tolist()
    assert report.facts["clusters"] == 2
    assert sorted([first[:3], first[3:]]) == [[0] * 3, [1] * 3]
    assert report.client_facts["cluster"].tolist() == first


def disagreeing(seed: int, others: int, noise: float) -> tuple[Graph, Built]:
    """Six clients that hold one graph but for noise; the last ones exchange its two classes."""
    one, n = planted_graph(40, classes=2, seed=seed), 40
    first = torch.arange(6) * n
    rows, cols = ((first[:, None] + t).flatten() for t in (one.adj.row, one.adj.indices.long()))
    assert isinstance(one.x, Tensor)
    x = one.x.repeat(6, 1) + noise * (Key.of(seed).matrix(6 * n, 7) - 0.5).float()
    swapped = torch.arange(6 * n) >= (6 - others) * n
    y = torch.where(swapped, 1 - one.y.repeat(6), one.y.repeat(6))
    adj = CSR.from_pairs(rows, cols, (6 * n, 6 * n))
    graph = replace(one, adj=adj, x=x, y=y, node_id=np.arange(6 * n))
    nodes = tuple(torch.arange(6 * n).split(n))
    train = torch.arange(6 * n) % 2 == 0
    cut = Partition(tuple("abcdef"), nodes, 6 * n, "copies")
    return graph, make_block(graph, cut, Split(train, ~train, ~train), torch.float64)


@BOTH
@pytest.mark.law(sample=6)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("others", [0, 2])
def test_clients_that_disagree_are_parted_once_and_those_alike_never(
    method: AnyMethod, seed: int, others: int
) -> None:
    """With the same thresholds: in the first round after the warm-up, and the parts stay whole.

    Series of lengths do not show directions, but those of a minority stay longer.
    """
    graph, (block, route) = disagreeing(seed, others, 0.1)
    own = {"sequence": 3} if method is GCFLPLUS else {}
    options = method.options(epsilon1=0.2, epsilon2=0.3, warmup=5, **own)
    cfg = config(graph, options, optimizer=SGD(0.3), schedule=Schedule(3))
    fed = InProcess(cfg, block, route, 6)
    state = method.init(fed, cfg, cfg.model.init_weights(FIRST, torch.float64), KEY)
    for t in range(1, 13):
        state, report = method.round(fed, cfg, state, t, KEY)
        parted = others * (t > 5)
        assert state.memory["cluster"].tolist() == [0] * (6 - parted) + [1] * parted
        assert report.facts["clusters"] == (2 if parted else 1)


@pytest.mark.parametrize("seed", range(10))
def test_planted_series_are_told_apart(seed: int) -> None:
    """Three clients whose changes shrink, three whose changes do not, with noise."""
    shrinking, level = torch.tensor([5.0, 3, 2, 1.5, 1]), torch.tensor([5.0, 5, 5, 5, 5])
    planted = torch.stack([level] * 3 + [shrinking] * 3).double()
    series = planted + 0.2 * Key.of(seed).matrix(6, 5)
    gram = torch.diag(series[:, -1] ** 2)
    everyone = torch.ones(6).bool()
    memory = {"series": series.roll(1, 1), "filled": torch.full((6,), 5)}
    alike, known, memory = similarities(memory, gram, everyone)
    torch.testing.assert_close(memory["series"], series, rtol=0, atol=1e-12)
    options = GCFLPlusOptions(epsilon1=100.0, epsilon2=1e-6)
    found = split_clusters(options, torch.zeros(6).long(), gram, everyone, alike, known).tolist()
    assert sorted([found[:3], found[3:]]) == [[0] * 3, [1] * 3]


@pytest.mark.parametrize("other", ["cluster", "away"])
def test_a_cut_depends_on_the_series_of_its_cluster_alone(other: str) -> None:
    """Two pairs fall apart as pairs, however far off others are.

    Counted from a distance of 100 or so, the least cut of these four would be a single client.
    """
    level = torch.tensor([1.0, 1.1, 2.0, 2.1, 90.0, 200.0], dtype=torch.float64)
    series = level[:, None].expand(6, 3).clone()
    memory = {"series": series, "filled": torch.full((6,), 3)}
    cluster, took_part = torch.tensor([0, 0, 0, 0, 1, 1]), torch.ones(6).bool()
    if other == "away":  # for so long that there is no series of the last two
        cluster, took_part[4:], memory["filled"][4:] = cluster * 0, False, 0
    gram = torch.diag(series[:, -1] ** 2)
    options = GCFLPlusOptions(epsilon1=1e3, epsilon2=1e-6, sequence=3)
    alike, known, _ = similarities(memory, gram, took_part)
    found = split_clusters(options, cluster, gram, took_part, alike, known).tolist()
    assert found[:4] in ([0, 0, 2, 2], [2, 2, 0, 0], [0, 0, 1, 1], [1, 1, 0, 0])
    distance = warping_distances(series[:4])
    expected = minimum_cut(distance.max() - distance)
    assert sorted(expected.tolist()) in ([0, 1], [2, 3])


def test_cosines_are_weights_as_they_are() -> None:
    alike = torch.tensor([[2.0, 1.5], [1.5, 2.0]])
    assert torch.equal(edge_weights(GCFLOptions(), alike), alike)
    assert torch.equal(edge_weights(GCFLPlusOptions(), alike), alike - 1.5)


SAID = "no cluster was split, so clients trained as with fedavg"


def test_a_run_says_that_no_cluster_was_split(make_graph: MakeGraph) -> None:
    advice = go(make_graph(), method="gcfl", clients=4, rounds=2).advice
    assert advice is not None
    assert advice.startswith(f"{SAID}: mean_change was ")
    assert "--option epsilon1 (now 0.05), after --option warmup rounds (now 20)" in advice
    options = GCFLOptions(epsilon1=2.0)
    assert note(options, {"clusters": [1, 1], "mean_change": []}) == SAID
    two = {"clusters": [1.0, 2.0], "mean_change": [3.0, 1.5]}
    assert note(options, two) is None
    one = note(options, {**two, "clusters": [1.0, 1.0]})
    assert one is not None
    assert "mean_change was 1.5 or more" in one


@BOTH
def test_clients_keep_the_models_that_are_scored(make_graph: MakeGraph, method: AnyMethod) -> None:
    graph = make_graph(60)
    options = {"epsilon1": 100.0, "epsilon2": 1e-6, "warmup": 0}
    result = go(graph, method=method.name, options=options, kernels="torch", rounds=3)
    assert len(result.models) == 4
    assert result.model is None
    assert all(row["fact_clusters"] >= 1 for row in rows_of(result))


@pytest.mark.law(sample=6)
@BOTH
def test_a_run_goes_on_from_where_it_was(
    make_graph: MakeGraph, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, method: AnyMethod
) -> None:
    options: dict[str, Any] = {"method": method.name, "rounds": 5, "participation": 0.8}
    options |= {"clients": 5, "hidden": 8, "dtype": "float64", "kernels": "torch"}
    options["options"] = {"epsilon1": 100.0, "epsilon2": 1e-6, "warmup": 1}
    graph = make_graph(60)
    straight = go(graph, **options)
    run_until(monkeypatch, graph, 3, tmp_path / "cut", **FAST | options)
    again = resume(tmp_path / "cut", graph=graph)
    assert rows_of(straight) == rows_of(again)
    assert list(straight.ledger.records) == list(again.ledger.records)
    for name, model in straight.models.items():
        assert same_bits(model.weights, again.models[name].weights)


@pytest.mark.parametrize("warmup", [0, 9])
def test_a_model_that_diverged_changes_nothing(
    make_graph: MakeGraph, cut_block: CutBlock, warmup: int
) -> None:
    """The client's replies are no numbers: cuts and means of the others are those without it."""
    graph = make_graph(60)
    block, route = cut_block(graph, 4)
    assert isinstance(block.x, Tensor)
    x = torch.where((block.client == 0)[:, None], torch.nan, block.x)
    options = GCFLPlusOptions(epsilon1=100.0, epsilon2=1e-6, warmup=warmup, sequence=2)
    cfg = config(graph, options)
    found = []
    for part in (replace(block, x=x), block.take(torch.tensor([1, 2, 3]))):
        fed = InProcess(cfg, part, route, part.num_clients)
        state = GCFLPLUS.init(fed, cfg, cfg.model.init_weights(FIRST, torch.float64), KEY)
        for t in range(1, 4):
            state, _ = GCFLPLUS.round(fed, cfg, state, t, KEY)
        assert state.memory["series"].isfinite().all()
        found.append(state.memory)
    with_it, without = found
    cluster, alone = with_it["cluster"], without["cluster"]
    assert torch.equal(cluster[1:], alone)
    assert int(cluster[0]) == 0
    assert bool(alone.any()) is (warmup == 0)
    for name in (n for n in without if n.startswith("weights/")):
        ours, theirs = with_it[name][cluster[1:]], without[name][alone]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@BOTH
def test_a_change_without_a_finite_square_splits_nothing(
    make_graph: MakeGraph, cut_block: CutBlock, method: AnyMethod
) -> None:
    """Its length is infinite: it is in no series and no criterion."""
    graph = make_graph(60)
    block, route = cut_block(graph, 4)
    assert isinstance(block.x, Tensor)
    x = torch.where((block.client == 0)[:, None], 1e200 * block.x, block.x)
    own = {"sequence": 2} if method is GCFLPLUS else {}
    options = method.options(epsilon1=100.0, epsilon2=1e-6, warmup=0, **own)
    cfg = config(graph, options, optimizer=SGD(0.1), schedule=Schedule(1))
    fed = InProcess(cfg, replace(block, x=x), route, 4)
    state = method.init(fed, cfg, cfg.model.init_weights(FIRST, torch.float64), KEY)
    state, _ = method.round(fed, cfg, state, 1, KEY)
    assert float(state.memory["weights/0.weight"].abs().max()) > 1e180
    assert state.memory["series"].isfinite().all()
    assert state.memory["filled"].tolist() == ([0, 1, 1, 1] if own else [0] * 4)
    assert int(state.memory["cluster"][0]) == 0
