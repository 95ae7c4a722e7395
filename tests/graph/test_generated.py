"""Laws of generated graphs: the same bits, the structure they promise, whole files or none."""

import dataclasses
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import silograph
from mistakes import raises_code
from silograph.core.errors import ConfigError, DataError
from silograph.graph import generated as module
from silograph.graph.datasets import load, locate
from silograph.graph.generated import (
    CROWDED,
    DENSEST,
    PRESETS,
    Drawing,
    GenerateRequest,
    Nodes,
    Wheel,
    generate,
    make,
    parse,
    read,
    uniform_below,
)
from silograph.graph.graph import Graph, fingerprint

FACTORS = {"amazon2m": 0.002, "ogbn-products": 0.002, "reddit": 0.02, "yelp": 0.005}


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Graph]:
    """A small graph of every preset."""
    folder = tmp_path_factory.mktemp("graphs")
    return {name: generate(name, scale=FACTORS[name], data_dir=folder) for name in PRESETS}


def plan_of(name: str, scale: float | None = None) -> GenerateRequest:
    return GenerateRequest(name, FACTORS[name] if scale is None else scale, 0)


# --- the same bits ------------------------------------------------------------------------------


def test_blocks_of_any_size_give_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = GenerateRequest("yelp", 0.0005, 3)
    shares: list[float] = []
    make(recipe, tmp_path / "large", lambda _what, share: shares.append(share))
    monkeypatch.setattr(module, "BLOCK_DRAWS", 1_111)
    monkeypatch.setattr(module, "BLOCK_VALUES", 2_345)
    make(recipe, tmp_path / "small", lambda _what, share: None)
    files = sorted(path.name for path in (tmp_path / "large").iterdir())
    assert len(files) == 9
    for file in files:
        assert (tmp_path / "large" / file).read_bytes() == (tmp_path / "small" / file).read_bytes()
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0, 1)


def test_everything_asked_for_decides_the_bits(tmp_path: Path) -> None:
    asked = [("yelp", 0.001, 0), ("yelp", 0.001, 1), ("yelp", 0.0011, 0)]
    asked += [("amazon2m", 0.001, 0), ("ogbn-products", 0.001, 0)]
    graphs = {
        fingerprint(generate(name, scale=scale, seed=seed, data_dir=tmp_path))
        for name, scale, seed in asked
    }
    assert len(graphs) == len(asked)


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


@pytest.mark.law(sample=6)
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


@pytest.mark.law(sample=6)
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


def test_ends_are_drawn_in_proportion_to_propensity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of 400,000 draws against the law, worked out node by node: chi-square."""
    shape = dataclasses.replace(
        PRESETS["yelp"], nodes=60, edges=300, classes=20, communities=20, inside=0.5
    )
    monkeypatch.setitem(PRESETS, "yelp", shape)
    nodes = Nodes(GenerateRequest("yelp", 1.0, 5))
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
    monkeypatch.setattr("silograph.graph.generated.INT32", 1000)
    recipe = GenerateRequest("yelp", 0.001, 0)
    make(recipe, tmp_path / "wide", lambda _what, _share: None)
    wide = read(recipe, tmp_path / "wide")
    assert wide.adj.indptr.dtype == wide.adj.indices.dtype == torch.int64
    narrow = generate("yelp", scale=0.001, data_dir=tmp_path)
    assert torch.equal(wide.edge_index, narrow.edge_index)


TINY = 0.001
FOLDER = "yelp-0.001-0-v1"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without any data."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("SILOGRAPH_DATA", raising=False)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


def names(folder: Path) -> list[str]:
    """What is below `generated/`."""
    return sorted(path.name for path in (folder / "generated").iterdir())


def not_again(*_: Any) -> None:
    raise AssertionError("made again")


# --- on disk ------------------------------------------------------------------------------------


def test_the_second_call_reads_what_the_first_made(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress: list[tuple[str, float]] = []
    first = generate("yelp", scale=TINY, data_dir=data, report=lambda *news: progress.append(news))
    assert progress[0] == (
        "generating generated:yelp, scale 0.001: 717 nodes, 6,977 edges, to be kept in "
        f"{data / 'generated' / FOLDER}",
        0.0,
    )
    assert progress[-1] == (progress[0][0], 1.0)
    monkeypatch.setattr(module, "make", not_again)
    second = generate("YELP", scale=TINY, data_dir=str(data), report=not_again)
    assert fingerprint(second) == fingerprint(first)
    assert names(data) == [FOLDER]
    manifest = json.loads((data / "generated" / FOLDER / "manifest.json").read_text())
    assert manifest["fingerprint"] == fingerprint(first)
    assert manifest["edges"] == first.num_edges
    assert manifest["draws"] > first.num_edges


def is_mapped(tensor: torch.Tensor, file: Path) -> bool:
    """Whether the system has a tensor's first byte from a file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, path = line.split(maxsplit=5)
        begin, end = (int(part, 16) for part in span.split("-"))
        if begin <= tensor.data_ptr() < end:
            return path == str(file)
    return False


def test_arrays_are_mapped_and_their_files_never_written(data: Path) -> None:
    graph = generate("yelp", scale=TINY, data_dir=data)
    folder = (data / "generated" / FOLDER).resolve()
    assert isinstance(graph.x, torch.Tensor)
    assert graph.split is not None
    assert graph.silo is not None
    tensors = {
        "x": graph.x,
        "y": graph.y,
        "indptr": graph.adj.indptr,
        "indices": graph.adj.indices,
        "train": graph.split.train,
        "val": graph.split.val,
        "test": graph.split.test,
        "community": graph.silo,
    }
    for name, tensor in tensors.items():
        assert is_mapped(tensor, folder / f"{name}.npy")
    before = (folder / "x.npy").read_bytes()
    graph.x.zero_()
    assert (folder / "x.npy").read_bytes() == before
    again = generate("yelp", scale=TINY, data_dir=data).x
    assert isinstance(again, torch.Tensor)
    assert float(again.abs().sum()) > 0


def test_where_it_is_kept(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate("yelp", scale=TINY)
    assert names(home / ".cache" / "silograph") == [FOLDER]
    variable = tmp_path / "variable"
    variable.mkdir()
    monkeypatch.setenv("SILOGRAPH_DATA", str(variable))
    generate("yelp", scale=TINY, seed=7)
    assert names(variable) == ["yelp-0.001-7-v1"]


def test_it_is_a_dataset_by_name(data: Path) -> None:
    graph = load("Generated:Yelp@7", data_dir=data, scale=TINY)
    assert (graph.name, graph.num_nodes) == ("generated:yelp@7", 717)
    assert fingerprint(graph) == fingerprint(generate("yelp", scale=TINY, seed=7, data_dir=data))
    assert load("generated:yelp", data_dir=data, scale=TINY).name == "generated:yelp"
    assert locate("generated:yelp", data_dir=data) is None
    assert silograph.generate is generate


def test_a_file_does_not_hide_it(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data)
    for name in ("generated:yelp", "generated:yelp.npz"):
        Path(name).write_text("mine")
    assert load("generated:yelp", data_dir=data, scale=TINY).num_nodes == 717


# --- whole or absent ----------------------------------------------------------------------------


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("at", ["_write_edges", "_write_nodes", "fingerprint"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_what_ends_half_way_leaves_nothing(
    data: Path, monkeypatch: pytest.MonkeyPatch, at: str, error: type[BaseException]
) -> None:
    def ends(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(module, at, ends)
        with pytest.raises(error):
            generate("yelp", scale=TINY, data_dir=data)
    assert names(data) == []
    assert generate("yelp", scale=TINY, data_dir=data).num_nodes == 717


# --- mistakes -----------------------------------------------------------------------------------


def damaged(folder: Path, how: str) -> None:
    path = folder / "indices.npy"
    match how:
        case "short":
            path.write_bytes(path.read_bytes()[:-400])
        case "absent":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case "other":
            np.save(path, np.zeros(3))
        case "offsets":
            offsets = np.load(folder / "indptr.npy")
            np.save(folder / "indptr.npy", offsets + np.int32(2))
        case "no manifest":
            (folder / "manifest.json").unlink()
        case "renamed":
            folder.rename(folder.with_name("yelp-0.002-0-v1"))
        case text:
            (folder / "manifest.json").write_text(text)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("short", "ValueError: mmap length is greater than file size"),
        ("absent", "FileNotFoundError"),
        ("empty", "EOFError|ValueError"),
        ("other", "ValueError: arrays that are not those of manifest"),
        ("offsets", "ValueError: offsets that do not fit the edges"),
        ("no manifest", "FileNotFoundError"),
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"version": 1}', "KeyError: 'preset'"),
        ("renamed", "ValueError: scale 0.001 instead of 0.002"),
    ],
)
def test_a_damaged_folder_is_one_line(data: Path, how: str, reason: str) -> None:
    generate("yelp", scale=TINY, data_dir=data)
    damaged(data / "generated" / FOLDER, how)
    scale = 0.002 if how == "renamed" else TINY
    place = data / "generated" / f"yelp-{scale}-0-v1"
    match = rf"expected a whole graph in {re.escape(str(place))}, got ({reason}).*: delete the fol"
    with pytest.raises(DataError, match=match) as caught:
        generate("yelp", scale=scale, data_dir=data)
    assert "\n" not in str(caught.value)
    shutil.rmtree(place)
    assert generate("yelp", scale=scale, data_dir=data).num_features == 300


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    ("redit", {}, "unknown generated graph 'redit': did you mean 'reddit'"),
    ("", {}, "unknown generated graph ''"),
    (3, {}, "expected the name of a generated graph, got int"),
    ("yelp", {"scale": 0}, "expected a scale above 0, got 0"),
    ("yelp", {"scale": -0.5}, r"expected a scale above 0, got -0\.5"),
    ("yelp", {"scale": float("nan")}, "expected a scale above 0, got nan"),
    ("yelp", {"scale": float("inf")}, "expected a scale above 0, got inf"),
    ("yelp", {"scale": "half"}, "expected a number as scale, got 'half'"),
    ("yelp", {"scale": True}, "expected a number as scale, got True"),
    ("yelp", {"seed": -1}, "expected a whole number from 0 as seed, got -1"),
    ("yelp", {"seed": 2**63}, "expected a whole number from 0 as seed, got 9223372036854775808"),
    ("yelp", {"seed": 1.5}, r"expected a whole number from 0 as seed, got 1\.5"),
    (
        "yelp",
        {"scale": 1e-4},
        r"expected a scale of 0\.00014 to 2995 for yelp, got 0\.0001: at a mean degree of 19 and "
        "100 classes, 100 nodes are the fewest and 2,147,483,647 the most",
    ),
    ("reddit", {"scale": 1e-3}, r"expected a scale of 0\.00846 to 9218 for reddit, got 0\.001"),
    ("reddit", {"scale": 1e5}, "expected a scale of .* got 100000: at a mean degree of 492"),
]


@pytest.mark.parametrize(("name", "options", "match"), WRONG)
def test_wrong_arguments(data: Path, name: Any, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        generate(name, data_dir=data, **options)
    assert list(data.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "scale", "match"),
    [
        ("generated:redit", 1.0, "unknown generated graph 'redit': did you mean 'reddit'"),
        ("generated:reddit@", 1.0, "expected a whole number from 0 as seed after @, got 'gen"),
        ("generated:reddit@x", 1.0, "whole number from 0 as seed after @, got 'generated:reddit@x"),
        ("generated:reddit@-1", 1.0, "whole number from 0 as seed after @"),
        (f"generated:reddit@{2**63}", 1.0, "expected a whole number from 0 as seed, got 92233"),
        ("digits", 0.5, r"scale: expected 1 with digits, got 0\.5: only generated graphs have"),
        ("amazon2m", 1.0, "unknown dataset 'amazon2m': did you mean 'generated:amazon2m'"),
    ],
)
def test_wrong_names(data: Path, name: str, scale: float, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load(name, data_dir=data, scale=scale)
    assert list(data.iterdir()) == []


def test_the_folder_must_be_there(tmp_path: Path) -> None:
    with raises_code(DataError, "missing-file"):
        generate("yelp", scale=TINY, data_dir=tmp_path / "no")


def test_a_disk_that_fills_up_is_one_line(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    place = data / "generated" / FOLDER
    match = f"expected to keep generated:yelp in {place}, got: No space left on device"
    with pytest.raises(DataError, match=re.escape(match)):
        generate("yelp", scale=TINY, data_dir=data)
    assert names(data) == []


def test_a_folder_that_cannot_be_made_is_one_line(data: Path) -> None:
    (data / "generated").write_text("a file")
    with raises_code(DataError, "unwritable-path"):
        generate("yelp", scale=TINY, data_dir=data)


def test_parse() -> None:
    assert parse("GENERATED:Reddit@007") == ("Reddit", 7)
    assert {GenerateRequest(name, 1.0, 0).name for name in PRESETS} == {
        f"generated:{n}" for n in PRESETS
    }


# --- at full size -------------------------------------------------------------------------------

MEASURE = """
import json, resource, sys, time, torch, silograph
start = time.monotonic()
graph = silograph.generate("reddit", scale=0.87, data_dir=sys.argv[1])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([time.monotonic() - start, peak, graph.adj.nnz, graph.num_nodes]))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_million_directed_edges(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    _, peak, entries, nodes = json.loads(done.stdout)
    assert nodes == 202_680
    assert entries == pytest.approx(99_715_826, rel=0.01)
    assert peak < 4e9
    shutil.rmtree(tmp_path / "generated")
