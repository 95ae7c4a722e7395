"""Laws of generated graphs: the same bits from the same seed, and the structure they promise."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from silograph.core.key import Key
from silograph.graph.generated.generate import (
    PRESETS,
    Blocks,
    GenerateRequest,
    generate,
    make,
    read,
)
from silograph.graph.generated.planted import (
    CROWDED,
    DENSEST,
    Drawing,
    GraphPlan,
    Nodes,
    Wheel,
    uniform_below,
)
from silograph.graph.graph import Graph, fingerprint

FACTORS = {"amazon2m": 0.002, "ogbn-products": 0.002, "reddit": 0.02, "yelp": 0.005}


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Graph]:
    """A small graph of every preset."""
    folder = tmp_path_factory.mktemp("graphs")
    return {name: generate(name, scale=FACTORS[name], data_dir=folder) for name in PRESETS}


def plan_of(name: str, scale: float | None = None) -> GraphPlan:
    return GenerateRequest(name, FACTORS[name] if scale is None else scale, 0).plan


# --- the same bits ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["amazon2m", "yelp"])
def test_blocks_of_any_size_give_the_same_files(tmp_path: Path, name: str) -> None:
    recipe = GenerateRequest(name, 0.0005, 3)
    shares: list[float] = []
    make(recipe, tmp_path / "large", Blocks(), lambda _what, share: shares.append(share))
    small = Blocks(draws=1_111, values=2_345, entries=999)
    make(recipe, tmp_path / "small", small, lambda _what, share: shares.append(share))
    files = sorted(path.name for path in (tmp_path / "large").iterdir())
    assert len(files) == 9
    for file in files:
        assert (tmp_path / "large" / file).read_bytes() == (tmp_path / "small" / file).read_bytes()
    ends = [place for place, share in enumerate(shares) if share == 1]
    for run in (shares[: ends[0] + 1], shares[ends[0] + 1 :]):
        assert run == sorted(run)
        assert (run[0], run[-1]) == (0, 1)


def test_everything_asked_for_decides_the_bits(tmp_path: Path) -> None:
    asked = [("yelp", 0.001, 0), ("yelp", 0.001, 1), ("yelp", 0.0011, 0)]
    asked += [("amazon2m", 0.001, 0), ("ogbn-products", 0.001, 0)]
    found = {
        fingerprint(generate(name, scale=scale, seed=seed, data_dir=tmp_path))
        for name, scale, seed in asked
    }
    assert len(found) == len(asked)


@pytest.mark.parametrize(
    ("name", "scale", "expected"),
    [
        ("yelp", 0.001, "18af9397655ca060"),
        ("amazon2m", 0.001, "f2f464f30ca07bab"),
        ("reddit", 0.01, "346008a0ddcfceb6"),
    ],
)
def test_the_law_has_not_changed(tmp_path: Path, name: str, scale: float, expected: str) -> None:
    """Written down when VERSION became 1: whoever changes the bits must raise it."""
    assert fingerprint(generate(name, scale=scale, data_dir=tmp_path)) == expected


# --- edges --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_the_adjacency_is_that_of_a_simple_undirected_graph(
    graphs: dict[str, Graph], name: str
) -> None:
    graph, plan = graphs[name], plan_of(name)
    assert graph.num_nodes == plan.nodes
    assert abs(graph.num_edges - plan.edges) <= 0.005 * plan.edges
    assert graph.adj.indptr.dtype == graph.adj.indices.dtype == torch.int32
    assert graph.adj.values is None
    row, column = graph.edge_index
    entry = row * graph.num_nodes + column
    assert bool((entry.diff() > 0).all())  # rows ascend, columns ascend in them, none is twice
    assert bool((row != column).all())
    assert torch.equal(torch.sort(column * graph.num_nodes + row).values, entry)


@pytest.mark.parametrize("name", ["amazon2m", "yelp"])
def test_degrees_follow_the_propensities(tmp_path: Path, name: str) -> None:
    plan = plan_of(name, 0.02)
    degree = generate(name, scale=0.02, data_dir=tmp_path).adj.degree.double().numpy()
    assert degree.mean() == pytest.approx(plan.shape.mean_degree, rel=0.005)
    sigma = plan.shape.sigma
    # A log-normal has median / mean = exp(-sigma^2 / 2).
    median = plan.shape.mean_degree * math.exp(-(sigma**2) / 2)
    assert np.median(degree) == pytest.approx(median, rel=0.15)
    assert degree.max() > 10 * degree.mean()
    rank = Nodes(plan).rank
    assert np.corrcoef(np.log1p(degree), rank)[0, 1] > 0.9


def test_a_share_of_the_edges_stays_in_the_community(tmp_path: Path) -> None:
    """Large communities: of the draws that go anywhere, as many stay as the sizes say."""
    graph = generate("yelp", scale=0.03, data_dir=tmp_path)
    nodes = Nodes(plan_of("yelp", 0.03))
    home = graph.silo
    assert home is not None
    assert np.array_equal(home.numpy(), nodes.community)
    row, column = graph.edge_index
    total = np.bincount(nodes.place, nodes.weights())
    weight = total / total.sum()
    inside = nodes.internal_odds()
    expected = float((weight * (inside + (1 - inside) * weight)).sum())
    assert float((home[row] == home[column]).double().mean()) == pytest.approx(expected, abs=0.02)
    assert expected > 0.7


def test_small_communities_keep_fewer_of_their_edges(graphs: dict[str, Graph]) -> None:
    """Reddit's mean degree is 492; a fiftieth of it has communities of 30 to 510 nodes."""
    graph, nodes = graphs["reddit"], Nodes(plan_of("reddit"))
    home = graph.silo
    assert home is not None
    row, column = graph.edge_index
    stays = torch.bincount(home[row][home[row] == home[column]], minlength=len(nodes.sizes))
    pairs = nodes.sizes * (nodes.sizes - 1)
    # All that stays: the draws that must, and of the others those that happen to.
    by_chance = plan_of("reddit").shape.mean_degree / graph.num_nodes
    assert (stays.numpy() / pairs).max() < CROWDED + 2 * by_chance
    assert nodes.internal_odds().max() < PRESETS["reddit"].inside


def test_ends_are_drawn_in_proportion_to_propensity() -> None:
    """Counts of 400,000 draws against the law, worked out node by node: chi-square."""
    shape = dataclasses.replace(
        PRESETS["yelp"], nodes=60, edges=300, classes=20, communities=20, inside=0.5
    )
    nodes = Nodes(GraphPlan(shape, 60, 300, 20, Key.of(5)))
    one, other = Drawing(nodes).pairs(0, 400_000)
    weight = np.empty(60)
    weight[nodes.at] = nodes.weights()
    inside = nodes.internal_odds()[nodes.community]
    same = nodes.community[:, None] == nodes.community
    share = weight / weight.sum()
    in_home = same * share / (same @ share)[:, None]
    law = share[:, None] * (inside[:, None] * in_home + (1 - inside)[:, None] * share)
    counts = np.bincount(one.astype(np.int64) * 60 + other, minlength=3600).reshape(60, 60)
    likely = law > 5 / 400_000
    chi = ((counts - 400_000 * law)[likely] ** 2 / (400_000 * law[likely])).sum()
    degrees = likely.sum() - 1
    assert abs(chi - degrees) < 5 * math.sqrt(2 * degrees)


@pytest.mark.parametrize("seed", range(4))
def test_the_wheel_is_a_search_in_the_running_sum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = np.maximum(np.rint(np.exp(rng.normal(0, 3, 500)) * 100), 1).astype(np.int64)
    wheel = Wheel(weights)
    tickets = rng.integers(0, wheel.total, 5_000)
    tickets[:2] = 0, wheel.total - 1
    assert np.array_equal(wheel.find(tickets), np.searchsorted(wheel.ends, tickets, side="right"))


def test_a_draw_is_below_its_width() -> None:
    highest = np.array([0.0, 1 - 2.0**-53])
    for width in (1, 3, 2**40 + 1, 2**52 - 1):
        assert uniform_below(highest, width).tolist() == [0, width - 1]


# --- labels, features and split -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["amazon2m", "reddit"])
def test_classes_are_those_of_the_communities_but_for_strays(
    graphs: dict[str, Graph], name: str
) -> None:
    graph, shape = graphs[name], PRESETS[name]
    assert graph.silo is not None
    assert (graph.y.dtype, tuple(graph.y.shape)) == (torch.int64, (graph.num_nodes,))
    sizes = torch.bincount(graph.y, minlength=shape.classes)
    assert len(sizes) == shape.classes
    assert sizes[0] > 3 * sizes[-1]
    away = graph.y != graph.silo % shape.classes
    # A stray may find its own class again, most likely a large one.
    again = float((sizes / graph.num_nodes).square().sum())
    assert float(away.double().mean()) == pytest.approx(shape.stray * (1 - again), abs=0.02)


def test_label_bits_differ_from_community_to_community(graphs: dict[str, Graph]) -> None:
    graph = graphs["yelp"]
    assert graph.task == "multilabel"
    assert (graph.y.dtype, tuple(graph.y.shape)) == (torch.int64, (graph.num_nodes, 100))
    assert set(graph.y.unique().tolist()) == {0, 1}
    assert graph.silo is not None
    rates = graph.y.double().mean(dim=0)
    assert rates[:10].mean() > 3 * rates[-10:].mean()
    homes = [graph.y[graph.silo == number].double().mean(dim=0) for number in range(5)]
    assert float(torch.stack(homes).std(dim=0).mean()) > 0.05


@pytest.mark.parametrize("name", PRESETS)
def test_features_are_means_and_noise(graphs: dict[str, Graph], name: str) -> None:
    x = graphs[name].x
    assert isinstance(x, torch.Tensor)
    assert (x.dtype, x.shape[1]) == (torch.float32, PRESETS[name].features)
    assert bool((x * 4096 == (x * 4096).round()).all())
    assert abs(float(x.mean())) < 0.05
    assert 0.95 < float(x.std()) < 1.25


def score(graph: Graph, *features: torch.Tensor) -> float:
    """Accuracy (micro F1 of bits) on test nodes of a ridge regression on the training nodes."""
    assert graph.split is not None
    x = torch.cat(features, dim=1).double()
    train, test = graph.split.train | graph.split.val, graph.split.test
    bits = graph.y if graph.y.dim() == 2 else torch.nn.functional.one_hot(graph.y)
    target, centre = bits.double(), x[train].mean(dim=0)
    mean, x = target[train].mean(dim=0), x - centre
    gram = x[train].T @ x[train] + 30 * torch.eye(x.shape[1])
    out = x[test] @ torch.linalg.solve(gram, x[train].T @ (target[train] - mean)) + mean
    if graph.y.dim() == 1:
        return float((out.argmax(dim=1) == graph.y[test]).double().mean())
    guess, truth = out > 0.35, graph.y[test] == 1
    return float(2 * (guess & truth).sum() / (guess.sum() + truth.sum()))


@pytest.mark.law(sample=3)
@pytest.mark.parametrize(("name", "scale"), [("amazon2m", 0.01), ("reddit", 0.02), ("yelp", 0.02)])
def test_neighbors_tell_more_than_features_alone(tmp_path: Path, name: str, scale: float) -> None:
    graph = generate(name, scale=scale, data_dir=tmp_path)
    x = graph.x
    assert isinstance(x, torch.Tensor)
    mean = sp.diags(1 / graph.adj.degree.clamp(min=1).numpy()) @ graph.adj.scipy(np.float32)
    near = torch.from_numpy(mean @ x.numpy())
    chance = score(graph, torch.ones(graph.num_nodes, 1))
    alone, both = score(graph, x), score(graph, x, near)
    assert chance + 0.1 < alone < 0.75
    assert alone + 0.05 < both < 0.97


@pytest.mark.parametrize("name", PRESETS)
def test_the_split_has_the_shares_of_the_data(graphs: dict[str, Graph], name: str) -> None:
    graph, shape = graphs[name], PRESETS[name]
    assert graph.split is not None
    masks = torch.stack([graph.split.train, graph.split.val, graph.split.test])
    assert masks.dtype == torch.bool
    assert bool((masks.sum(dim=0) == 1).all())
    shares = masks.double().mean(dim=1)[:2].tolist()
    assert shares == pytest.approx(shape.split, abs=1 / graph.num_nodes)
    degree = graph.adj.degree.double()
    ratio = float(degree[graph.split.train].mean() / degree[graph.split.test].mean())
    if shape.by_rank:
        assert ratio > 2  # those of high rank train
    else:
        assert ratio == pytest.approx(1, abs=0.25)


def test_communities_are_silos(graphs: dict[str, Graph]) -> None:
    graph = graphs["reddit"]
    assert graph.silo is not None
    assert graph.silo_names[0] == "community_00"
    assert graph.silo.unique().tolist() == list(range(len(graph.silo_names)))


# --- size ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_scale_is_a_factor_of_nodes_and_edges(name: str) -> None:
    shape = PRESETS[name]
    for scale in (0.01, 0.3, 1, 2.5):
        plan = plan_of(name, scale)
        assert plan.nodes == round(scale * shape.nodes)
        assert 2 * plan.edges / plan.nodes == pytest.approx(shape.mean_degree, rel=1e-3)
        assert plan.sizes.sum() == plan.nodes
        assert plan.sizes.min() >= 1
    assert len(plan_of(name, 2.5).sizes) == round(2.5 * shape.communities)


@pytest.mark.parametrize("name", PRESETS)
def test_the_smallest_scale_can_be_made(tmp_path: Path, name: str) -> None:
    shape = PRESETS[name]
    fewest = max(math.ceil(shape.mean_degree / DENSEST) + 1, shape.classes)
    graph = generate(name, scale=fewest / shape.nodes, data_dir=tmp_path)
    assert graph.num_nodes == fewest
    assert graph.num_edges == pytest.approx(fewest * shape.mean_degree / 2, rel=0.01)


def test_more_entries_than_32_bits_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets and columns become int64 together, as `CSR` wants; here from 1,000 entries on."""
    monkeypatch.setattr("silograph.graph.generated.generate.INT32", 1000)
    recipe = GenerateRequest("yelp", 0.001, 0)
    make(recipe, tmp_path / "wide", Blocks(), lambda _what, _share: None)
    wide = read(recipe, tmp_path / "wide")
    assert wide.adj.indptr.dtype == wide.adj.indices.dtype == torch.int64
    narrow = generate("yelp", scale=0.001, data_dir=tmp_path)
    assert torch.equal(wide.edge_index, narrow.edge_index)
