"""Laws of studies of methods and modules that are given as values, as `sg.run` takes them."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import silograph as sg
from mistakes import raises_code
from runs import MakeGraph
from silograph.core.errors import ConfigError
from silograph.experiment.resolve.run_request import source_hash
from silograph.experiment.resolve.user_code import import_spec
from silograph.methods import FEDAVG, METHODS, Method, Needs
from silograph.nn.own_module import Make
from silograph.study.compare import resume_comparison
from silograph.study.tune import resume_search

pytestmark = pytest.mark.usefixtures("work")

RUN: dict[str, Any] = {"clients": 3, "partition": "random", "rounds": 2, "split": "0.4/0.3/0.3"}
SMALL = RUN | {"processes": 0}
SOURCE = """
from dataclasses import replace
import torch
from silograph.methods import FEDAVG

class Net(torch.nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        self.linear = torch.nn.Linear(features, outputs)

    def forward(self, x, edge_index):
        return self.linear(x)

def sized(width):
    def make(features, outputs):
        return torch.nn.Sequential(torch.nn.Linear(features, width))
    return make

def own_round(fed, cfg, state, t, key):
    return FEDAVG.round(fed, cfg, state, t, key)

METHOD = replace(FEDAVG, name="own", round=own_round)
wide, wider, shaped = sized(3), sized(4), sized(torch.ones(3))
"""


class Net(nn.Module):
    """A linear map of a node's own features."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, outputs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        del edge_index
        out: Tensor = self.linear(x)
        return out


def parts(text: str = SOURCE) -> tuple[Method, Make]:
    """A method and a module from a file, as an import gives them."""
    Path("own.py").write_text(text, encoding="utf-8")
    return import_spec("own.py:METHOD", Method), import_spec("own.py:Net", type)


def test_cells_of_values_are_plain_runs(make_graph: MakeGraph) -> None:
    graph = make_graph()
    method = replace(FEDAVG, name="own", needs=Needs(keep_optimizer=True))
    table = sg.compare(graph, methods=[FEDAVG, method], seeds=1, over={"model": [Net]}, **SMALL)
    assert [row["method"] for row in table.rows] == ["fedavg", "own"]
    assert {row["model"] for row in table.rows} == {f"{Net.__module__}:Net"}
    assert not table.failed
    for given, row in zip((FEDAVG, method), table.rows, strict=True):
        plain = sg.run(graph, method=given, model=Net, **RUN)
        assert plain.test.server is not None
        assert row["server_mean"] == plain.test.server.accuracy
    by_option = sg.compare(graph, methods=["fedavg"], seeds=1, model=Net, **SMALL)
    assert by_option.rows[0]["server_mean"] == table.rows[0]["server_mean"]
    assert by_option.to_markdown()


def test_a_method_of_the_library_is_its_name(make_graph: MakeGraph) -> None:
    one = sg.compare(make_graph(), methods=[FEDAVG], seeds=1, hidden=4, **SMALL)
    two = sg.compare(make_graph(), methods=["fedavg"], seeds=1, hidden=4, **SMALL)
    assert one.cells[0].digest == two.cells[0].digest


def test_a_source_that_changed_is_another_cell(make_graph: MakeGraph) -> None:
    def again(text: str) -> Any:
        method, net = parts(text)
        given: dict[str, Any] = {"model": net, "out": "c"} | SMALL
        return sg.compare(make_graph(), methods=[method, "local"], seeds=1, **given)

    whole = again(SOURCE)
    lines = Path("c/compare.jsonl").read_text(encoding="utf-8")
    assert not whole.failed
    Path("c/compare.jsonl").write_text("".join(lines.splitlines(keepends=True)[1:]))
    shutil.rmtree(next(Path("c/runs").glob("local-*")))
    assert again(SOURCE).rows[0]["server_mean"] == whole.rows[0]["server_mean"]  # from its folder
    assert len(Path("c/compare.jsonl").read_text(encoding="utf-8").splitlines()) == 2
    with raises_code(ConfigError, "existing-output", path="c"):
        again(SOURCE.replace("self.linear(x)", "-self.linear(x)"))
    method, net = parts()
    sg.compare("g.npz", methods=[method], seeds=1, model=net, out="d", **SMALL)
    with raises_code(ConfigError, "part-not-saved", path="d"):
        resume_comparison("d", trust=True)


def test_what_a_source_does_not_say_has_no_hash() -> None:
    method, net = parts()
    found = [source_hash(part) for part in (method, net, made("wide"), made("wider"), torch.nn.GRU)]
    found += [source_hash(m) for m in METHODS.values()]
    found.append(source_hash(replace(FEDAVG, needs=Needs(keep_optimizer=True))))
    assert None not in found
    assert len(set(found)) == len(found)
    assert source_hash(made("wide")) == found[2]
    unknown: list[Any] = [made("shaped"), eval("lambda features, outputs: None"), len]
    assert [source_hash(part) for part in unknown] == [None] * 3


def made(name: str) -> Any:
    """What the file makes anew."""
    return import_spec(f"own.py:{name}", object)


def test_a_value_that_cannot_be_known_again_needs_no_folder(make_graph: MakeGraph) -> None:
    parts()
    given: dict[str, Any] = {"methods": ["local"], "seeds": 1, "model": made("shaped")} | SMALL
    with pytest.raises(ConfigError, match=r"expected .*make from a file, enclosing plain"):
        sg.compare(make_graph(), **given, out="c")
    assert not Path("c").exists()
    with raises_code(ConfigError, "conflicting-options"):
        sg.compare(make_graph(), **given | {"processes": 2})
    assert len(sg.compare(make_graph(), **given | {"processes": None}).lines) == 1


def test_settings_of_a_value_are_searched(make_graph: MakeGraph) -> None:
    pytest.importorskip("optuna")
    method, net = parts()
    given: dict[str, Any] = {"trials": 1, "keys": ["lr"], "out": "t", "method": method} | SMALL
    found = sg.tune(make_graph(), model=net, **given)
    assert found.best is not None
    plain = sg.run(make_graph(), method=method, model=net, **RUN, lr=found.config.lr)
    assert plain.test.server is not None
    assert found.test["server"] == plain.test.server.accuracy
    with raises_code(ConfigError, "part-not-saved", part="graph", path="t"):
        resume_search("t")
    sg.tune("g.npz", **given | {"out": "named"})
    with raises_code(ConfigError, "part-not-saved", part="own", path="named"):
        resume_search("named")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"methods": [3]}, "expected methods or their names as methods, got 3"),
        ({"methods": 3}, "expected a list of methods, got 3"),
        ({"methods": [FEDAVG, "fedavg"]}, "expected methods that differ, got 'fedavg' twice"),
        ({"methods": [["local"]]}, "expected methods or their names as methods, got ['local']"),
        ({"model": Net(2, 2)}, "expected a class or function that makes a module as model, got N"),
        ({"seeds": "3"}, "expected a list of seeds, got '3'"),
        ({"seeds": {0, 1}}, "expected a list of seeds, got {0, 1}"),
        ({"over": {"clients": 3}}, "expected a list of values of clients, got 3"),
        ({"over": {3: [1]}}, "unknown key to vary 3; choices"),
        ({"over": {"clients": [[1]]}}, "clients: input should be a valid integer, got [1]"),
        ({"options": {"local": 3}}, "expected options of local as a dict, got 3"),
        ({"options": {"local": {3: 4}}}, "options.[key]: expected a finite number, a bool or"),
        ({"baseline": 3}, "unknown baseline 3; choices: local"),
        ({"metric": 3}, "unknown metric 3"),
        ({"trackers": []}, "unknown option 'trackers'"),
    ],
)
def test_other_types_are_one_line(
    make_graph: MakeGraph, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        sg.compare(make_graph(), **{"methods": ["local"], **SMALL, **given})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
