"""Laws of class weights: torch's weighted losses, the same in every engine, refused or honored."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight

import silograph as sg
from conftest import planted_graph
from mistakes import raises_code
from runs import FAST, same_bits, weights_of, with_values
from silograph.core.config import make_config
from silograph.core.errors import ConfigError, DataError
from silograph.core.key import Key
from silograph.core.run_file import read_toml
from silograph.experiment.resolve.resolve import SimulatedRun, resolve_simulation
from silograph.graph.block.block import ClientBlock
from silograph.graph.column_statistics import balanced_weights
from silograph.graph.graph import Graph
from silograph.methods import METHODS
from silograph.nn.backends import COMPILED, TORCH
from silograph.nn.fit import TrainingInputs, label_losses
from silograph.nn.model import Model

RARE: dict[str, float] = {"0": 1.0, "1": 2.5, "2": 7.0}
WEIGHING = [name for name, method in METHODS.items() if method.weighs_classes]


def uneven_graph(n: int = 120, *, multilabel: bool = False, sparse: bool = False) -> Graph:
    """Return a graph with a rare class, or with rare bits, some of which are unknown."""
    graph = planted_graph(n, multilabel=multilabel, sparse=sparse)
    if multilabel:
        y = graph.y.clone()
        y[::3, 2] = 0
        y[::7, 1] = -1
        return replace(graph, y=y)
    return replace(graph, y=torch.where((graph.y == 2) & (torch.arange(n) % 3 > 0), 0, graph.y))


def set_up(graph: Graph, **options: Any) -> SimulatedRun:
    return resolve_simulation(make_config(FAST | options), graph)


def block_of(run: SimulatedRun) -> ClientBlock:
    """Return the clients, whose graph is in memory."""
    assert isinstance(run.clients, ClientBlock)
    return run.clients


def weights_in(run: SimulatedRun) -> list[float]:
    """Return the weights of classes that clients train with."""
    weights = block_of(run).class_weight
    assert weights is not None
    return [float(weight) for weight in weights]


# --- the loss -------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["multiclass", "multilabel"])
def test_the_loss_of_a_step_is_torchs(task: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(10, 3, generator=generator, dtype=torch.float64)
    weight = torch.tensor([1.0, 2.5, 7.0], dtype=torch.float64)
    model = Model("mlp", 3, 4, 3, 1, 0.0, task)
    off = torch.tensor([0, 4, 4, 10])
    if task == "multiclass":
        y = torch.randint(0, 3, (10,), generator=generator)
        loss: Any = torch.nn.CrossEntropyLoss(weight=weight)
    else:
        y = torch.randint(0, 2, (10, 3), generator=generator)
        loss = torch.nn.BCEWithLogitsLoss(pos_weight=weight)
    losses = label_losses(model, logits, y, off, weight)
    for a, b in ((0, 4), (4, 10)):
        target = y[a:b] if task == "multiclass" else y[a:b].double()
        assert float(losses[a:b].mean()) == pytest.approx(float(loss(logits[a:b], target)))
    ones = label_losses(model, logits, y, off, torch.ones(3, dtype=torch.float64))
    assert torch.allclose(ones, label_losses(model, logits, y, off, None), rtol=1e-14)


@pytest.mark.parametrize("multilabel", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="whole"),
        # Batches with weights are a kernel of their own, which takes 10 s to compile.
        pytest.param({"batch_size": 5, "fanout": "3,3"}, id="drawn", marks=pytest.mark.slow),
        pytest.param({"batch_size": 4}, id="batches", marks=pytest.mark.slow),
        pytest.param({"local_epochs": 3}, id="epochs"),
    ],
)
def test_compiled_training_is_torchs(
    multilabel: bool, sparse: bool, options: dict[str, Any]
) -> None:
    graph = uneven_graph(multilabel=multilabel, sparse=sparse)
    setup = set_up(graph, class_weight=RARE, **options)
    training, block = setup.resolved.method_config.training, block_of(setup)
    assert weights_in(setup) == [1.0, 2.5, 7.0]
    weights = setup.resolved.method_config.model.init_weights(Key.of(3), torch.float64)
    inputs = TrainingInputs(block, weights, None, Key.of(1))
    ours, theirs = (backend.fit(training, inputs) for backend in (COMPILED, TORCH))
    plain = TORCH.fit(training, replace(inputs, block=replace(block, class_weight=None)))
    for name, w in ours.tensors.items():
        assert torch.allclose(w, theirs.tensors[name], atol=1e-10, rtol=1e-10)
    assert torch.allclose(ours.loss, theirs.loss, atol=1e-10)
    assert any(not torch.allclose(w, plain.tensors[n], atol=1e-3) for n, w in ours.tensors.items())


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
def test_weights_of_one_are_no_weights(kernels: Any) -> None:
    graph, ones = uneven_graph(), {"0": 1, "1": 1, "2": 1}
    plain, weighed = (sg.run(graph, **FAST, kernels=kernels, class_weight=w) for w in (None, ones))
    assert plain.model is not None
    assert weighed.model is not None
    for name, w in plain.model.weights.items():
        assert torch.allclose(w, weighed.model.weights[name], atol=1e-9)


# --- balanced -------------------------------------------------------------------------------------


def test_balanced_is_scikit_learns_over_all_clients() -> None:
    setup = set_up(uneven_graph(), class_weight="balanced")
    block = block_of(setup)
    y = block.y[block.split.train].numpy()
    expected = compute_class_weight("balanced", classes=np.unique(y), y=y)
    assert weights_in(setup) == pytest.approx(expected.tolist(), rel=1e-12)
    # A rare bit counts as much as its zeros.
    setup = set_up(uneven_graph(multilabel=True), class_weight="balanced")
    block = block_of(setup)
    bits = block.y[block.split.train]
    zeros, ones = ((bits == bit).sum(dim=0) for bit in (0, 1))
    assert weights_in(setup) == pytest.approx((zeros / ones).tolist(), rel=1e-6)


def test_a_class_without_rows_has_weight_one_and_nothing_is_refused() -> None:
    shares = torch.tensor([0.75, 0.25, 0.0], dtype=torch.float64)
    assert balanced_weights(shares, 3).tolist() == pytest.approx([2 / 3, 2.0, 1.0])
    for wrong, line in (([0.0, 0.0], "got none: at every client"), ([2.0, 0.5], "from 0 to 1")):
        with pytest.raises(DataError, match=line):
            balanced_weights(torch.tensor(wrong, dtype=torch.float64), 2)
    with pytest.raises(DataError, match="from 0 to 1"):
        balanced_weights(torch.tensor([float("nan"), 0.5], dtype=torch.float64), 2)


def test_clients_with_few_nodes_of_a_class_send_no_counts() -> None:
    graph = uneven_graph(240)
    setup = set_up(graph, class_weight="balanced", evaluation_min_count=4)
    block = block_of(setup)
    train = block.split.train
    counts = torch.stack([block.count(train & (block.y == k)) for k in range(3)], dim=1)
    few = ((counts > 0) & (counts < 4)).any(dim=1)
    assert few.any()
    assert not few.all()
    sums = block.sums["labels"]
    assert torch.equal(sums.total.long(), counts * ~few[:, None])
    assert torch.equal(sums.count, counts.sum(dim=1) * ~few)
    reported = counts[~few].sum(dim=0)
    expected = reported.sum() / (3 * reported)
    assert weights_in(setup) == pytest.approx(expected.tolist())
    with pytest.raises(DataError, match="got none: at every client"):
        set_up(graph, class_weight="balanced", evaluation_min_count=30)


# --- engines and methods --------------------------------------------------------------------------


@pytest.mark.parametrize("method", WEIGHING)
def test_every_method_honors_or_refuses(method: str) -> None:
    # Masks with weights would be one more kernel to compile.
    options = FAST | {"method": method, "rounds": 2, "kernels": "torch"}
    plain, weighed = (sg.run(uneven_graph(), **options, class_weight=w) for w in (None, "balanced"))
    if plain.model is not None:
        assert not same_bits(weights_of(plain), weights_of(weighed))
    assert plain.test != weighed.test


@pytest.mark.parametrize("method", sorted(METHODS.keys() - set(WEIGHING)))
def test_other_methods_refuse_in_one_line(method: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sg.run(uneven_graph(), **FAST | {"method": method}, class_weight="balanced")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("normalize", ["none", "standard_client"])
def test_blocks_of_any_size_train_alike(normalize: Any) -> None:
    whole, single = (
        sg.run(
            uneven_graph(), **FAST, class_weight="balanced", normalize=normalize, block_size=size
        )
        for size in (4, 1)
    )
    assert same_bits(weights_of(whole), weights_of(single))


# --- what users give ------------------------------------------------------------------------------


def test_weights_come_from_mappings_and_files(tmp_path: Path) -> None:
    toml, csv = tmp_path / "w.toml", tmp_path / "w.csv"
    toml.write_text('1 = 2.5\n"2" = 7\n')
    csv.write_text("class,weight\n1,2.5\n2,7\n")
    text = json.dumps({"1": 2.5, "2": 7.0})
    for given in ({"1": 2.5, 2: 7}, text, toml, str(csv)):
        assert make_config({"class_weight": given}).class_weight == text
    assert make_config({"class_weight": "none"}).class_weight is None
    assert weights_in(set_up(uneven_graph(), class_weight=str(toml))) == [1.0, 2.5, 7.0]
    result = sg.run(uneven_graph(), **FAST, class_weight=csv, out=str(tmp_path / "run"))
    toml.unlink()
    csv.unlink()
    assert result.config.class_weight == text
    again = make_config(read_toml(tmp_path / "run" / "config.toml"))
    assert again.class_weight == text


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("nofile.toml", "expected balanced, none, or a file of class = weight, got 'nofile.toml'"),
        (
            {"1": 0},
            r"class_weight: expected a weight above 0, at most 1e\+06, for class 1, which has 0",
        ),
        ({"1": "2"}, "for class 1, which has '2', got {'1': '2'}"),
        ({}, "expected the weight of a class, got {}"),
        ({"9": 2}, "unknown class of class_weight '9'"),
    ],
)
def test_mistakes_are_one_line(given: Any, line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=line) as caught:
        sg.run(uneven_graph(), **FAST, class_weight=given)
    assert "\n" not in str(caught.value)


def test_numbers_have_no_classes() -> None:
    with raises_code(ConfigError, "conflicting-options", options=["dataset", "class_weight"]):
        sg.run(with_values(planted_graph(40)), **FAST, class_weight="balanced")


def test_a_file_with_a_class_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.csv"
    path.write_text("class,weight\n0,2\n1,3\n0,4\n")
    with raises_code(ConfigError, "option-value", option="class_weight"):
        sg.run(uneven_graph(), **FAST, class_weight=str(path))
