"""Laws of model options: which model has which, what is refused, and whole runs with them."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import silograph as sg
from layers import MODELS_WITH_SKIPS
from mistakes import raises_code
from runs import FAST, MakeGraph, files_of, go, of, run_until
from silograph.core.config import make_config
from silograph.core.errors import ConfigError
from silograph.core.resolved_config import to_run_config
from silograph.experiment.resolve.resolve import choose, make_neighbors, resolve
from silograph.graph.graph import largest_component, schema_of
from silograph.nn.mini_batches import Fanout
from silograph.nn.model import MODELS, Model


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"model": "mlp"}, {}),
        ({"model": "gcn"}, {"head": "conv"}),
        ({"model": "gcn", "head": "linear"}, {"head": "linear"}),
        ({"model": "gat"}, {"head": "conv", "heads": 8}),
        ({"model": "gat", "heads": 4}, {"head": "conv", "heads": 4}),
        ({"model": "gat", "options": {"model.heads": 4}}, {"head": "conv", "heads": 4}),
        ({"model": "appnp"}, {"hops": 10, "teleport": 0.1}),
        ({"model": "appnp", "hops": 3, "teleport": 0.0}, {"hops": 3, "teleport": 0.0}),
    ],
)
def test_options_of_a_model_are_written_out(given: dict[str, Any], options: dict[str, Any]) -> None:
    found = vars(choose(make_config(given)).model.options)
    dropout = ["input_dropout", *(["attention_dropout"] if given["model"] == "gat" else [])]
    assert found == {"residual": False, **dict.fromkeys(dropout, 0.0), **options}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"model": "gcn", "heads": 4},
            "heads: model gcn has no such option, but model gat and model rating_gat have it: "
            "leave it out, or choose one of them",
        ),
        (
            {"model": "gat", "hops": 2},
            "hops: model gat has no such option, but model appnp has it: leave it out, or set "
            "model=appnp",
        ),
        (
            {"model": "mlp", "teleport": 0.0},
            "teleport: model mlp has no such option, but model appnp has it: leave it out, or "
            "set model=appnp",
        ),
        (
            {"residual": True},
            "expected 3 layers or more with residual, got 2: there is no hidden layer whose input "
            "and output are equally wide",
        ),
        (
            {"residual": True, "hidden": "8,4"},
            "expected hidden layers of one width with residual, got hidden=8,4: what enters a "
            "layer is added to what leaves it",
        ),
        (
            {"hidden": "8,4", "layers": 2},
            "expected 3 layers with hidden=8,4, got 2: leave layers out, or give one width for all",
        ),
        (
            {"model": "mlp", "neighbors": "drop_edge"},
            "expected no neighbors=drop_edge with model mlp, which ignores the graph: leave it "
            "out, or take a model that sums over neighbors, such as gcn",
        ),
        (
            {"head": "linear", "layers": 1},
            "expected 2 layers or more with head=linear, got 1: there is no convolution below it",
        ),
        (
            {"head": "linear", "model": "mlp"},
            "head: model mlp has no such option, but model gcn, model sage, model graphconv, model "
            "gin and model gat have it: leave it out, or choose one of them",
        ),
        (
            {"model": "gat", "hidden": "16,20", "heads": 8},
            "expected a hidden width that is a multiple of 8 heads, got 20: they stand side by "
            "side in it",
        ),
        (
            {"model": "gat", "hidden": 20},
            "expected a hidden width that is a multiple of 8 heads, got 20: they stand side by "
            "side in it",
        ),
        (
            {"model": "gcm"},
            "unknown model 'gcm': did you mean 'gcn'?",
        ),
    ],
)
def test_options_that_do_nothing_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(make_config(given))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("given", "hidden", "layers"),
    [
        ({}, 128, 2),
        ({"hidden": "8,4"}, "8,4", 3),
        ({"hidden": [8, 8]}, 8, 3),
        ({"hidden": "8,"}, 8, 2),
        ({"hidden": 8, "layers": 4}, 8, 4),
        ({"hidden": "8,4", "head": "linear", "layers": 3}, "8,4", 3),
    ],
)
def test_widths_and_layers_are_written_out(
    make_graph: MakeGraph, given: dict[str, Any], hidden: int | str, layers: int
) -> None:
    """What is equal is written alike; what was resolved, asked for again, is the same run."""
    schema = schema_of(make_graph())
    found = resolve(make_config(given), schema)
    assert (found.config.hidden, found.config.layers) == (hidden, layers)
    again = resolve(to_run_config(found.config), schema)
    assert again.config == found.config
    assert again.method_config.model == found.method_config.model


def test_a_run_with_widths_and_a_linear_head(make_graph: MakeGraph) -> None:
    """The backends agree, and drawn neighbors are of the layers that sum."""
    graph, given = make_graph(60, sparse=True), {"model": "sage", "hidden": "7,4", "head": "linear"}
    for more in ({}, {"batch_size": 4, "fanout": "3,2"}):
        found = [
            go(graph, rounds=2, dtype="float64", kernels=kernels, **given, **more)
            for kernels in ("compiled", "torch")
        ]
        ours, theirs = (result.model for result in found)
        assert ours is not None
        assert theirs is not None
        for name, w in ours.weights.items():
            torch.testing.assert_close(theirs.weights[name], w, rtol=0, atol=1e-10)
        assert ours.weights["2.weight"].shape == (4, graph.num_classes)
        assert found[0].config.layers == 3
    with raises_code(ConfigError, "option-value", option="fanout", got="3,2,2"):
        go(graph, rounds=1, fanout="3,2,2", **given)


def test_one_layer_of_heads_has_no_hidden_width() -> None:
    config = make_config({"model": "gat", "hidden": 3, "layers": 1})
    assert choose(config).model.options.heads == 8


def test_drawn_neighbors_are_counted_by_hops_of_appnp(make_graph: MakeGraph) -> None:
    config = make_config({"model": "appnp", "hops": 3, "fanout": "4"})
    assert make_neighbors(config, choose(config)) == Fanout((4, 4, 4))
    with pytest.raises(ConfigError) as caught:
        go(make_graph(), model="appnp", hops=3, fanout="4,4")
    assert str(caught.value) == ("fanout: expected one number or 3 (one for each hop), got '4,4'")


def run_options(conv: str, residual: bool) -> dict[str, Any]:
    own: dict[str, dict[str, Any]] = {"gat": {"heads": 2}, "appnp": {"hops": 3}}
    return own.get(conv, {}) | {"layers": 3 if residual else 2, "residual": residual}


@pytest.mark.law(sample=6)
@pytest.mark.parametrize(("conv", "residual"), MODELS_WITH_SKIPS)
def test_every_model_trains_is_saved_and_goes_on(
    make_graph: MakeGraph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    conv: str,
    residual: bool,
) -> None:
    graph = make_graph(60, sparse=True)
    options = FAST | run_options(conv, residual) | {"model": conv, "kernels": "torch"}
    result = sg.run(graph, **options, out=str(tmp_path / "whole"))
    back = sg.load_model(tmp_path / "whole" / "model.safetensors")
    assert result.model is not None
    assert back.shape == result.model.shape
    assert torch.equal(back.logits(graph), result.model.logits(graph))
    run_until(monkeypatch, graph, 3, tmp_path / "cut", **options)
    sg.resume(tmp_path / "cut", graph=graph)
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("conv", MODELS)
def test_every_model_learns_a_planted_graph(make_graph: MakeGraph, conv: str) -> None:
    """Better than the largest class alone, with the defaults of `run`."""
    graph = largest_component(make_graph(150, features=12))
    options = run_options(conv, False) | {"clients": 3, "partition": "random", "rounds": 30}
    result = sg.run(graph, model=conv, hidden=16, **options, kernels="torch")
    assert result.test.server is not None
    assert result.test.server.accuracy is not None
    largest = float(graph.y.bincount().max()) / len(graph.y)
    assert result.test.server.accuracy > largest + 0.2


def test_models_saved_before_there_were_options_still_load(
    make_graph: MakeGraph, tmp_path: Path
) -> None:
    graph, path = make_graph(), tmp_path / "model.safetensors"
    model = go(graph, rounds=1).model
    assert model is not None
    shape = model.shape.described()
    for name in ("residual", "heads", "hops", "teleport"):
        del shape[name]
    about = {"shape": shape, "class_names": [], "normalize": "none"}
    safetensors.torch.save_file(model.weights, path, {"silograph model 1": json.dumps(about)})
    assert sg.load_model(path).shape == model.shape
    assert Model("gcn", 7, 8, 3, 2, 0.5, "multiclass") == model.shape


def test_a_model_is_the_same_in_blocks_of_any_size(make_graph: MakeGraph) -> None:
    graph = make_graph(60, sparse=True)
    one, many = (of(go(graph, model="gat", heads=2, block_size=size)) for size in (1, 4))
    for name, w in one.items():
        torch.testing.assert_close(many[name], w, rtol=0, atol=1e-10)
