"""Laws of a study's data: lines count only for the graph that they were computed on."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import silograph as sg
from commands import everything, save
from mistakes import raises_code
from runs import MakeGraph
from silograph.core.errors import ConfigError
from silograph.experiment.result_files import DIGEST
from silograph.study.reproduce import Page, Recipe, cell, reproduce

SMALL: dict[str, Any] = {"clients": 3, "partition": "random", "rounds": 1, "hidden": 4}
NAMED: dict[str, Any] = SMALL | {"data_dir": "data", "processes": 0, "out": "out"}
CELLS = [cell({"method": "local"}, dataset="mine", method="local", **SMALL)]
RECIPE = Recipe("mine", "mine", lambda _: CELLS, lambda _: Page({}), "# Mine\n")
Study = Callable[[], Any]
STUDIES: dict[str, tuple[Study, str]] = {
    "compare": (lambda: sg.compare("mine", methods=["local"], seeds=1, **NAMED), "compare.jsonl"),
    "tune": (lambda: sg.tune("mine", trials=1, keys=["lr"], **NAMED), "tune.jsonl"),
    "reproduce": (
        lambda: reproduce(RECIPE, data_dir="data", processes=0, out="out"),
        "mine.jsonl",
    ),
}
FILE = Path("data/mine.npz")


@pytest.fixture(params=STUDIES)
def study(work: Path, make_graph: MakeGraph, request: pytest.FixtureRequest) -> tuple[Study, Path]:
    """A study of a dataset by name that has run, and its lines."""
    del work
    FILE.parent.mkdir()
    save(FILE, make_graph())
    run, lines = STUDIES[request.param]
    if request.param == "tune":
        pytest.importorskip("optuna")
    run()
    return run, Path("out", lines)


def test_another_graph_under_the_same_name_is_refused(
    study: tuple[Study, Path], make_graph: MakeGraph
) -> None:
    run, _ = study
    save(FILE, make_graph(seed=1))
    before = everything(Path("out"))
    match = r"expected mine as it was for the lines of out/.*\.jsonl \(graph \w{16}\), got another"
    with pytest.raises(ConfigError, match=match):
        run()
    assert everything(Path("out")) == before


def test_lines_that_do_not_say_their_data_count(
    study: tuple[Study, Path], make_graph: MakeGraph
) -> None:
    run, path = study
    line = json.loads(path.read_text(encoding="utf-8"))
    del line["data"], line[DIGEST]  # as in lines of older versions
    path.write_text(json.dumps(line) + "\n", encoding="utf-8")
    save(FILE, make_graph(seed=1))
    run()
    assert len(path.read_text(encoding="utf-8").splitlines()) == 1


def test_a_graph_is_read_only_where_its_file_is_another(
    study: tuple[Study, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, path = study
    before = path.read_bytes()
    loads: list[str] = []
    load_graph = sg.load

    def load(name: str, **options: Any) -> Any:
        loads.append(Path(name).stem)
        return load_graph(name, **options)

    monkeypatch.setattr("silograph.graph.datasets.load", load)
    run()
    assert loads == []
    with np.load(FILE) as arrays:
        np.savez_compressed(FILE, **arrays)  # the same graph in other bytes
    run()
    assert loads == ["mine"]
    FILE.unlink()  # its results stand
    run()
    assert loads == ["mine"]
    assert path.read_bytes() == before


def test_a_page_needs_no_data(work: Path, make_graph: MakeGraph) -> None:
    (work / "data").mkdir()
    save(FILE, make_graph())
    reproduce(RECIPE, data_dir="data", processes=0, out="out")
    shutil.rmtree("data")
    assert reproduce(RECIPE, data_dir="data", processes=0, out="out", max_minutes=0).ran == 0


def test_a_missing_cell_is_told_before_anything_is_written(
    work: Path, make_graph: MakeGraph
) -> None:
    """Seed 1 must not run on another graph than seed 0."""
    (work / "data").mkdir()
    save(FILE, make_graph())
    first: dict[str, Any] = {"methods": ["local"], "largest_component": True, "normalize": "row"}
    sg.compare("mine", seeds=1, **first, **NAMED)
    before = everything(Path("out"))
    save(FILE, make_graph(seed=1))
    with pytest.raises(ConfigError, match="got another"):
        sg.compare("mine", seeds=2, **first, **NAMED)
    assert everything(Path("out")) == before
    save(FILE, make_graph())
    assert len(sg.compare("mine", seeds=2, **first, **NAMED).lines) == 2
    with raises_code(
        ConfigError, "unknown-name", what="dataset", got="minne", suggestion="minesweeper"
    ):
        sg.compare("minne", methods=["local"], **NAMED | {"out": "new"})
    assert not Path("new").exists()
