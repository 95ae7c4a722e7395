"""Every method runs without a named model, and with every other one or says in a line why not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import silograph as sg
from mistakes import raises_code
from rating_graphs import rating_graph, write_ratings
from silograph.cli import run_app
from silograph.core.config import make_config
from silograph.core.errors import ConfigError
from silograph.experiment.resolve.resolve import choose, device_of, resolve, resolve_without_data
from silograph.graph.graph import Graph, Schema
from silograph.methods import METHODS
from silograph.nn.model_options import MODEL_KINDS, RATING_MODELS

SMALL: dict[str, Any] = {"clients": 2, "rounds": 1, "split": "0.5/0.25/0.25", "kernels": "torch"}
ON_RATINGS = [name for name, method in METHODS.items() if method.trains_ratings]


def node_graph() -> Graph:
    rng = np.random.default_rng(0)
    edges = rng.integers(0, 24, (2, 60))
    return sg.from_arrays(
        edge_index=edges[:, edges[0] != edges[1]],
        x=rng.normal(size=(24, 4)),
        y=np.arange(24) % 3,
    )


def why_refused(asked: dict[str, Any]) -> str | None:
    try:
        resolve_without_data(make_config(asked))
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.law(sample=3)
@pytest.mark.parametrize("method", METHODS)
def test_on_labels_of_nodes_the_default_is_gcn(method: str) -> None:
    result = sg.run(node_graph(), method=method, partition="random", hidden=4, **SMALL)
    assert (result.config.model, result.config.layers) == ("gcn", 2)


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("method", ON_RATINGS)
def test_on_ratings_the_default_is_the_recommended_one_or_the_papers(method: str) -> None:
    result = sg.run(rating_graph(8, 10, 40), method=method, partition="category", **SMALL)
    own = ("rating_gcn", 5, 32) if method == "fedacs" else ("rating_profiles", 2, 128)
    assert (result.config.model, result.config.layers, result.config.hidden) == own


@pytest.mark.parametrize("method", METHODS)
def test_without_data_the_default_is_that_of_a_task(method: str) -> None:
    asked = make_config({"method": method})
    assert resolve(asked, Schema(2, 2, "multiclass")).config.model == "gcn"
    if METHODS[method].trains_ratings:
        assert resolve(asked, Schema(2, 2, "rating")).config.model in RATING_MODELS


def test_what_a_user_names_stays() -> None:
    asked = make_config({"method": "fedacs", "hidden": "8,8"})
    config = resolve(asked, Schema(2, 2, "rating")).config
    assert (config.model, config.layers, config.hidden) == ("rating_gcn", 3, 8)
    asked = make_config({"method": "fedacs", "hidden": 128, "layers": 2})
    config = resolve(asked, Schema(2, 2, "rating")).config
    assert (config.model, config.layers, config.hidden) == ("rating_gcn", 2, 128)
    asked = make_config({"method": "fedacs", "model": "rating_gcn"})
    config = resolve(asked, Schema(2, 2, "rating")).config
    assert (config.layers, config.hidden) == (2, 128)


def test_an_option_of_the_default_for_ratings_is_taken_before_the_data_are_read() -> None:
    parts = choose(make_config({"method": "fedacs", "options": {"embedding": 4}}))
    assert parts.model.part.name == "rating_gcn"
    with raises_code(ConfigError, "unread-option", option="items", part="gcn"):
        choose(make_config({"method": "fedgraph", "options": {"items": 4}}))


def test_data_in_files_are_known_by_their_names(tmp_path: Path) -> None:
    """Runs, comparisons and searches of files get the model that their data call for."""
    write_ratings(tmp_path / "shop", 8, 10, 40)
    table = sg.compare(
        str(tmp_path / "shop"), methods=["fedacs", "fedavg"], seeds=1, processes=0, **SMALL
    )
    found = [cell.config.model for cell in table.cells]
    assert found == ["rating_gcn", "rating_profiles"]
    made = np.loadtxt(tmp_path / "shop/ratings.csv", delimiter=",", skiprows=1)
    trust = np.loadtxt(tmp_path / "shop/trust.csv", delimiter=",", skiprows=1, dtype=np.int64)
    np.savez(tmp_path / "shop.npz", ratings=made.astype(np.int64), trust=trust)
    result = sg.run(str(tmp_path / "shop.npz"), out=str(tmp_path / "run"), **SMALL)
    assert result.config.model == "rating_profiles"
    said, _, defaults = (tmp_path / "run/config.toml").read_text().partition("[defaults]")
    assert "model =" not in said
    assert 'model = "rating_profiles"' in defaults


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("method", METHODS)
def test_before_anything_starts_a_method_takes_mlp_or_says_why_not(method: str) -> None:
    asked = {"method": method, "model": "mlp", "partition": "random", "hidden": 4, **SMALL}
    line = why_refused(asked)
    if line is None:
        sg.run(node_graph(), **asked)
    else:
        assert "mlp" in line


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted(MODEL_KINDS))
@pytest.mark.parametrize("method", METHODS)
def test_before_anything_starts_a_method_takes_a_model_or_says_why_not(
    method: str, model: str
) -> None:
    asked = {"method": method, "model": model, "hidden": 8, **SMALL}
    if (line := why_refused(asked)) is not None:
        assert "\n" not in line
        return
    ratings = model in RATING_MODELS
    graph = rating_graph(8, 10, 40) if ratings else node_graph()
    sg.run(graph, **asked, partition="category" if ratings else "random")


DEVICES = ("hpu", "xpu", "mps", "meta", "xla", "opengl", "nonsense", "cpu:-1")


@pytest.mark.parametrize("device", DEVICES)
def test_a_device_that_this_machine_lacks_is_one_line(device: str) -> None:
    with pytest.raises(ConfigError) as caught:
        device_of(device)
    said = str(caught.value)
    assert said.startswith("device: expected a torch device of this machine, such as cpu or cuda:0")
    assert f"got {device!r}" in said
    assert "\n" not in said
    assert "INTERNAL" not in said


def test_such_a_device_ends_a_command_without_a_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_app(["run", "digits", "--device", "hpu", "--quiet"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --device: expected a torch device of this machine, such as cpu")
    assert said.count("\n") == 1
