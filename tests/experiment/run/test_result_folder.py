"""Laws of result folders: made once, never overwritten, whole or not there."""

import csv
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from forked import Forked
from mistakes import raises_code
from silograph.core.config import ENGINE, RunConfig, make_config
from silograph.core.errors import CheckpointError, ConfigError, SilographError
from silograph.core.files import write_atomic
from silograph.core.resolved_config import ResolvedConfig, to_run_config
from silograph.core.run_file import read_toml
from silograph.experiment.report.reading import read_run
from silograph.experiment.run.result import Result
from silograph.experiment.run.result_folder import check_free, default_folder
from silograph.experiment.run.run import resume, run
from silograph.graph.graph import Graph
from silograph.methods import METHODS

MakeGraph = Callable[..., Graph]
FAST: dict[str, Any] = {
    "method": "fedavg",
    "clients": 4,
    "partition": "random",
    "rounds": 3,
    "hidden": 8,
}
AT_FIRST = {"checksums.json", "clients.csv", "config.toml", "run.json", "simulation.json"}
ON_THE_WAY = AT_FIRST | {"rounds.csv", "ledger.jsonl", "checkpoints"}
OF_THE_MACHINE = ("seconds", "compile_seconds", "peak_memory_bytes", "result_dir")


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save(graph: Graph, path: Path) -> Path:
    assert isinstance(graph.x, Tensor)
    np.savez(path, x=graph.x.numpy(), edge_index=graph.edge_index, y=graph.y)
    return path


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def everything(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder, and what its files hold."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def final(path: str | Path) -> dict[str, Any]:
    """result.json without what the machine decides."""
    values = json.loads((Path(path) / "result.json").read_text(encoding="utf-8"))
    return {k: v for k, v in values.items() if k not in OF_THE_MACHINE}


# --- what a folder holds --------------------------------------------------------------------------


@pytest.fixture
def done(make_graph: MakeGraph, work: Path) -> tuple[Path, Result]:
    """A finished run and its folder."""
    return work / "done", run(make_graph(), **FAST, out="done", seed=3, eval_every=2)


def test_the_files_of_a_run(done: tuple[Path, Result]) -> None:
    folder, result = done
    names = {path.name for path in folder.iterdir()}
    assert names == ON_THE_WAY | {"result.json", "model.safetensors", "report.html"}
    assert result.result_dir == "done"


def test_the_table_of_rounds(done: tuple[Path, Result]) -> None:
    folder, result = done
    rows = table(folder / "rounds.csv")
    assert [row["round"] for row in rows] == ["2", "3"]
    for written, row in zip(rows, result.rounds, strict=True):
        assert written == {k: "" if v is None else str(v) for k, v in row.items()}


def test_missing_scores_are_empty_cells(make_graph: MakeGraph, work: Path) -> None:
    run(make_graph(), **FAST | {"method": "local"}, out="x", split="0.5/0/0.5")
    for row in table(work / "x" / "rounds.csv"):
        assert row["test_server_accuracy"] == row["val_personalized_accuracy"] == ""
        assert 0 <= float(row["test_personalized_accuracy"]) <= 1


def test_the_table_of_clients(done: tuple[Path, Result]) -> None:
    rows = table(done[0] / "clients.csv")
    assert [row["client"] for row in rows] == [f"client_0{c}" for c in range(4)]
    assert sum(int(row["nodes"]) for row in rows) == 60
    assert [row["nodes"] for row in rows] == ["15"] * 4
    # .2/.4/.4 of 15 nodes
    assert {(row["train"], row["val"], row["test"]) for row in rows} == {("3", "6", "6")}


def test_how_the_run_came_about(done: tuple[Path, Result], make_graph: MakeGraph) -> None:
    folder, result = done
    about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert set(about) == {
        *("versions", "source", "same", "model", "config", "method", "partition_hash", "dataset"),
        *("simulated", "format", "metrics", "given", "help", "code"),
    }
    assert {**about["config"], "out": "done"} == vars(result.config)
    fedavg = METHODS["fedavg"]
    assert about["method"] == {
        "name": "fedavg",
        "title": fedavg.title,
        "reference": fedavg.reference,
        "judge": "server",
        "seen": "through its own client's graph",
        "held": None,
        "facts": dict(fedavg.facts),
    }
    assert about["source"] is None  # the graph was in memory
    assert set(about["versions"]) >= {"python", "silograph", "torch", "numpy", "scipy", "pymetis"}
    assert result.model is not None
    assert about["model"] == result.model.shape.described()
    assert about["partition_hash"] == result.partition_hash
    graph = make_graph()
    assert about["dataset"] == {
        "name": "planted",
        "nodes": 60,
        "edges": graph.num_edges,
        "features": 7,
        "classes": 3,
    }


def test_everything_that_decides_a_run_is_written_out(done: tuple[Path, Result]) -> None:
    folder, result = done
    about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    apart = ("out", "tracker", "options", *ENGINE)
    names = [f.name for f in fields(ResolvedConfig) if f.name not in apart]
    same, options = about["same"], result.config.options
    assert same.keys() == {f"config {name}" for name in names} | {
        *(f"option {name}" for name in options),
        *("graph", "partition", "silograph", "torch", "numpy", "scipy", "numba"),
    }
    assert {name: same[f"option {name}"] for name in options} == {
        name: repr(value) for name, value in options.items()
    }
    assert {name: same[f"config {name}"] for name in names} == {
        name: repr(getattr(result.config, name)) for name in names
    }
    seeds = ("seed", "partition_seed", "split_seed", "init_seed")
    assert [same[f"config {name}"] for name in seeds] == ["3"] * 4
    assert (same["config keep_optimizer"], same["config block_size"]) == ("False", "4")
    assert (same["config optimizer"], same["config lr"]) == ("'adam'", "0.01")
    assert same["partition"] == result.partition_hash
    assert same["torch"] == about["versions"]["torch"]


def test_the_final_result(done: tuple[Path, Result]) -> None:
    folder, result = done
    written = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert written == result.to_dict()
    scores = vars(result.val).items()
    assert written["val"] == {view: None if s is None else dict(s) for view, s in scores}
    assert written["partition_hash"] == result.partition_hash


# --- the config as a run file ---------------------------------------------------------------------


@pytest.mark.law(sample=6)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": "fedopt"},
        {"method": "local", "seed": 4, "split_seed": 1, "participation": 0.5},
        {
            "method": "fedopt",
            "server_optimizer": "adam",
            "options": {"server_lr": 0.1},
            "optimizer": "sgd",
            "momentum": 0.9,
            "lr": 0.1,
            "dtype": "float64",
            "block_size": 3,
        },
        {"method": "centralized", "normalize": "row", "largest_component": True},
    ],
)
def test_the_config_runs_again(make_graph: MakeGraph, work: Path, options: dict[str, Any]) -> None:
    path = save(make_graph(80), work / "a graph, [mine].npz")
    first = run(path, **FAST | options, out="first")
    values = read_toml(work / "first" / "config.toml")
    config = make_config(values)
    assert config == to_run_config(replace(first.config, out=None))  # every default written out
    second = run(config=config, out="second")
    assert final("first") == final("second")
    without = [{k: v for k, v in row.items() if k != "seconds"} for row in second.rounds]
    assert without == [{k: v for k, v in r.items() if k != "seconds"} for r in first.rounds]
    assert read_toml("second/config.toml") == values
    assert Path("first", "clients.csv").read_bytes() == Path("second", "clients.csv").read_bytes()
    one, other = (json.loads(Path(name, "run.json").read_text()) for name in ("first", "second"))
    assert {**one, "given": None} == {**other, "given": None}  # what was given is more


def test_the_config_of_a_named_dataset_runs_again() -> None:
    options: dict[str, Any] = {**FAST, "rounds": 1}
    first = run("Digits", **options, out="first")
    assert first.config.dataset == "Digits"
    run(config=make_config(read_toml("first/config.toml")), out="second")
    assert final("first") == final("second")


def test_the_paths_of_a_config_work_from_anywhere(
    make_graph: MakeGraph, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(work))
    (work / "data").mkdir()
    path = save(make_graph(), work / "data" / "mine.npz")
    cases: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
        "path": ({"dataset": "data/mine.npz"}, {"dataset": str(path)}),
        "home": ({"dataset": "~/data/mine.npz"}, {"dataset": str(path)}),
        "name": (
            {"dataset": "mine", "data_dir": "data"},
            {"dataset": "mine", "data_dir": str(work / "data")},
        ),
        "folder at home": (
            {"dataset": "mine", "data_dir": "~/data"},
            {"dataset": "mine", "data_dir": str(work / "data")},
        ),
    }
    for name, (given, written) in cases.items():
        monkeypatch.chdir(work)
        run(**FAST, **given, out=f"{name} first")
        values = read_toml(f"{name} first/config.toml")
        assert {k: values[k] for k in values.keys() & {"dataset", "data_dir"}} == written
        (work / name).mkdir()
        monkeypatch.chdir(work / name)
        run(config=make_config(values), out="second")
        assert final("second") == final(work / f"{name} first")


def test_a_graph_in_memory_is_called_what_it_is_called(make_graph: MakeGraph, work: Path) -> None:
    """A folder that happens to have the graph's name is none of its business."""
    (work / "mine").mkdir()
    graph = replace(make_graph(), name="mine")
    assert run(graph, **FAST, out="x").config.dataset == "mine"
    assert read_toml("x/config.toml")["dataset"] == "mine"
    with raises_code(ConfigError, "part-not-saved", part="graph", path="x"):
        resume("x")
    assert resume("x", graph=graph).config.dataset == "mine"


# --- going on from another working folder ---------------------------------------------------------


def write_tables(folder: Path, graph: Graph) -> None:
    """Write a graph as nodes.csv and edges.csv."""
    assert isinstance(graph.x, Tensor)
    folder.mkdir(parents=True)
    names = [f"f{i}" for i in range(graph.num_features)]
    rows = [
        [str(node), f"class {label}", *map(str, values)]
        for node, (label, values) in enumerate(zip(graph.y.tolist(), graph.x.tolist(), strict=True))
    ]
    lines = [["id", "label", *names], *rows]
    (folder / "nodes.csv").write_text("\n".join(",".join(line) for line in lines) + "\n")
    pairs = [f"{a},{b}\n" for a, b in graph.edge_index.T.tolist() if a < b]
    (folder / "edges.csv").write_text("source,target\n" + "".join(pairs))


def interrupt_in_round_3(monkeypatch: pytest.MonkeyPatch, *graph: Any, **options: Any) -> None:
    fedavg = METHODS["fedavg"]

    def stopped(fed: Any, cfg: Any, state: Any, t: int, key: Any) -> Any:
        if t == 3:
            raise KeyboardInterrupt
        return fedavg.round(fed, cfg, state, t, key)

    with monkeypatch.context() as patch:
        patch.setitem(METHODS, "fedavg", replace(fedavg, round=stopped, scores_on_receipt=True))
        with pytest.raises(KeyboardInterrupt):
            run(*graph, **options)


PLACES: dict[str, tuple[str, dict[str, Any], str]] = {
    "folder of tables": ("mine", {}, "here/mine"),
    "path": ("../data/mine.npz", {}, "data/mine.npz"),
    "data_dir": ("mine", {"data_dir": "../data"}, "data/mine.npz"),
    "variable": ("mine", {}, "data/mine.npz"),
    "shared": ("mine", {}, "shared/data/mine.npz"),
    "built in": ("digits", {"data_dir": "../data"}, ""),
}


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("place", PLACES)
def test_a_run_goes_on_from_any_working_folder(
    make_graph: MakeGraph, work: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    dataset, options, file = PLACES[place]
    for folder in ("here", "elsewhere/deep", "data", "shared/data"):
        (work / folder).mkdir(parents=True)
    monkeypatch.delenv("SILOGRAPH_DATA", raising=False)
    if place == "variable":
        monkeypatch.setenv("SILOGRAPH_DATA", "../data")
    if place == "folder of tables":
        write_tables(work / file, make_graph())
    elif file:
        save(make_graph(), work / file)
    monkeypatch.chdir(work / "here")
    run(dataset, **FAST, **options, out="whole")
    interrupt_in_round_3(monkeypatch, dataset, **FAST, **options, out="cut")
    source = json.loads(Path("cut", "run.json").read_text(encoding="utf-8"))["source"]
    assert source.keys() == {"dataset", "data_dir"}
    if file:
        assert Path(source["dataset"]).is_absolute()
        assert Path(source["dataset"]).resolve() == (work / file).resolve()
    else:
        assert source == {"dataset": "digits", "data_dir": str(work / "data")}
    monkeypatch.chdir(work / "elsewhere" / "deep")
    monkeypatch.delenv("SILOGRAPH_DATA", raising=False)
    resume("../../here/cut")
    assert final(work / "here" / "cut") == final(work / "here" / "whole")
    for name in ("ledger.jsonl", "clients.csv", "run.json", "model.safetensors"):
        cut, whole = (work / "here" / run / name for run in ("cut", "whole"))
        assert cut.read_bytes() == whole.read_bytes()


def test_what_is_complete_stays_as_it_is(done: tuple[Path, Result], make_graph: MakeGraph) -> None:
    folder, result = done
    before = everything(folder)
    again = resume("done", graph=make_graph())
    assert everything(folder) == before
    assert (again.test, again.val, again.rounds) == (result.test, result.val, result.rounds)
    assert again.seconds == result.seconds


@pytest.mark.parametrize("text", ["", "{", "null", "[]", "{}"])
def test_a_damaged_run_json_is_one_line(
    done: tuple[Path, Result], make_graph: MakeGraph, text: str
) -> None:
    (done[0] / "run.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"expected what the run was in done/run\.json, got"):
        resume("done", graph=make_graph())


def test_a_folder_of_another_version_says_which(
    done: tuple[Path, Result], make_graph: MakeGraph
) -> None:
    about = json.loads((done[0] / "run.json").read_text(encoding="utf-8"))
    del about["format"]
    about["versions"]["silograph"] = "0.0.9"
    (done[0] / "run.json").write_text(json.dumps(about), encoding="utf-8")
    line = r"expected a result folder of format 4 in done, got format 1, as silograph 0\.0\.9 wrote"
    with pytest.raises(CheckpointError, match=line):
        resume("done", graph=make_graph())
    with raises_code(CheckpointError, "other-version", got=1):
        read_run(done[0])


# --- nothing is overwritten -----------------------------------------------------------------------


def make_folder(path: Path) -> None:
    path.mkdir()
    (path / "result.json").write_text("mine", encoding="utf-8")


OCCUPANTS: dict[str, Callable[[Path], Any]] = {
    "empty folder": Path.mkdir,
    "folder": make_folder,
    "file": lambda path: path.write_text("mine", encoding="utf-8"),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link to a folder": lambda path: path.symlink_to(path.parent),
}


@pytest.mark.parametrize("occupant", OCCUPANTS)
def test_what_exists_is_refused_and_stays(make_graph: MakeGraph, work: Path, occupant: str) -> None:
    OCCUPANTS[occupant](work / "taken")
    before = everything(work)
    with raises_code(ConfigError, "existing-output", path="taken"):
        run(make_graph(), **FAST, out="taken")
    assert everything(work) == before
    assert os.path.lexists(work / "taken")


def test_a_folder_that_appears_meanwhile_stays(
    make_graph: MakeGraph, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(work / "taken")
    monkeypatch.setattr("silograph.experiment.run.run.check_free", lambda _: None)
    monkeypatch.setattr("silograph.experiment.run.result_folder.check_free", lambda _: None)
    before = everything(work)
    with raises_code(ConfigError, "unwritable-path", path="taken"):
        run(make_graph(), **FAST, out="taken")
    assert everything(work) == before


RACE = """
import sys, time
from pathlib import Path
from silograph.experiment.run import result_folder as folder
from silograph.experiment.run import result_folder as new_folder
from silograph.cli import main

write = folder.write_start

def together(*arguments):
    write(*arguments)
    Path("ready " + sys.argv[-1]).touch()
    while len(list(Path().glob("ready *"))) < 2:
        time.sleep(0.001)

folder.write_start = together
new_folder.default_folder = lambda config: "runs/same"
main()
"""


def test_two_runs_that_chose_one_name_at_once(make_graph: MakeGraph, work: Path) -> None:
    """Both found the name free; one makes the folder, the other one says so in a line."""
    save(make_graph(), work / "g.npz")
    flags = ["--clients", "3", "--partition", "random", "--rounds", "2", "--hidden", "4", "--quiet"]
    command = [sys.executable, "-c", RACE, "run", "g.npz", *flags, "--json", "--seed"]
    both = [
        Forked([*command, seed], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for seed in ("1", "2")
    ]
    outputs = [process.communicate(timeout=600) for process in both]
    codes = [process.returncode for process in both]
    assert set(codes) == {0, 2}, outputs
    (out, err), (lost_out, lost_err) = outputs[codes.index(0)], outputs[codes.index(2)]
    assert (err, lost_out) == ("", "")
    line, detail = lost_err.splitlines()
    assert line.startswith("error: expected to make the result folder runs/same, got: ")
    assert json.loads(detail)["error"]["code"] == "unwritable-path"
    assert [path.name for path in (work / "runs").iterdir()] == ["same"]
    written = json.loads((work / "runs" / "same" / "result.json").read_text(encoding="utf-8"))
    assert written["seed"] == json.loads(out)["seed"] == codes.index(0) + 1


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_what_is_no_path_is_refused(make_graph: MakeGraph, work: Path, path: str) -> None:
    with raises_code(ConfigError, "option-value", option="out"):
        run(make_graph(), **FAST, out=path)
    assert everything(work) == {}


@pytest.mark.parametrize("path", ["file/x", "file/x/y", "n" * 300])
def test_a_folder_that_cannot_be_made(make_graph: MakeGraph, work: Path, path: str) -> None:
    (work / "file").write_text("mine", encoding="utf-8")
    with raises_code(ConfigError, "unwritable-path"):
        run(make_graph(), **FAST, out=path)
    assert everything(work) == {"file": b"mine"}


def test_a_folder_that_may_not_be_made(
    make_graph: MakeGraph, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refused)
    with raises_code(ConfigError, "unwritable-path", path="x"):
        run(make_graph(), **FAST, out="x")
    assert everything(work) == {}


@pytest.mark.parametrize(
    "options",
    [
        {"clients": 61},
        {"partition": "silo", "clients": None},
        {"split": "public"},
        {"split": "0.9/0.9/0.9"},
        {"device": "nosuch"},
        {"method": "nosuch"},
        {"momentum": 0.9},
        {"progress": "loud"},
    ],
)
def test_a_run_that_fails_before_training_leaves_no_folder(
    make_graph: MakeGraph, work: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(SilographError):
        run(make_graph(), **(FAST | {"out": "x"} | options))
    assert everything(work) == {}


# --- a run that is cut off ------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [KeyboardInterrupt, MemoryError])
def test_a_run_that_is_stopped_keeps_its_rounds(
    make_graph: MakeGraph, work: Path, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    whole = run(make_graph(), **FAST)
    fedavg = METHODS["fedavg"]

    def stopped(fed: Any, cfg: Any, state: Any, t: int, key: Any) -> Any:
        if t == 3:
            raise stop
        return fedavg.round(fed, cfg, state, t, key)

    late = replace(fedavg, round=stopped, scores_on_receipt=True)  # round 2 is scored in round 3
    monkeypatch.setitem(METHODS, "fedavg", late)
    with pytest.raises(stop):
        run(make_graph(), **FAST, out="x")
    assert {path.name for path in (work / "x").iterdir()} == ON_THE_WAY
    assert (work / "x" / "rounds.csv").read_bytes().endswith(b"\n")
    rows = table(work / "x" / "rounds.csv")
    assert [row["round"] for row in rows] == ["1"]
    for written, row in zip(rows, whole.rounds[:1], strict=True):
        assert None not in written.values()
        assert {**written, "seconds": ""} == {
            **{k: "" if v is None else str(v) for k, v in row.items()},
            "seconds": "",
        }


def test_a_file_is_written_whole(work: Path) -> None:
    path = work / "a.json"
    write_atomic(path, "one é")
    write_atomic(path, "two")
    assert everything(work) == {"a.json": b"two"}


@pytest.mark.parametrize("stop", [OSError, KeyboardInterrupt])
def test_a_file_that_cannot_be_written_leaves_nothing(
    work: Path, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    def full(_: int) -> None:
        raise stop("no space left")

    write_atomic(work / "old.json", "old")
    monkeypatch.setattr(os, "fsync", full)
    for name in ("old.json", "new.json"):
        with pytest.raises(stop, match="no space left"):
            write_atomic(work / name, "x" * 10000)
    assert everything(work) == {"old.json": b"old"}


# --- the name of a folder -------------------------------------------------------------------------


@pytest.fixture
def stamp(monkeypatch: pytest.MonkeyPatch) -> str:
    """The time that names have, which stands still."""
    now = 1700000000.0425
    frozen = SimpleNamespace(time=lambda: now, localtime=time.localtime, strftime=time.strftime)
    monkeypatch.setattr("silograph.experiment.run.result_folder.time", frozen)
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(now)) + "-042"


def test_the_name_of_a_folder(work: Path, stamp: str) -> None:
    config = RunConfig(dataset="cora", method="local")
    name = f"runs/cora-local-{stamp}"
    assert default_folder(config) == name
    Path(name).mkdir(parents=True)
    assert default_folder(config) == f"{name}-2"
    Path(f"{name}-2").symlink_to("nowhere")
    Path(f"{name}-4").mkdir()
    assert default_folder(config) == f"{name}-3"
    Path(f"{name}-3").write_text("")
    assert default_folder(config) == f"{name}-5"
    check_free(default_folder(config))


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        ("../data/mine.npz", "mine"),
        ("/a/b c/", "b c"),
        ("Cora", "Cora"),
        (".", "here"),
        ("..", "above"),
        ("loop", "loop"),
    ],
)
def test_the_name_of_a_folder_for_a_path(
    work: Path, monkeypatch: pytest.MonkeyPatch, stamp: str, dataset: str, name: str
) -> None:
    (work / "above" / "here").mkdir(parents=True)
    monkeypatch.chdir(work / "above" / "here")
    Path("loop").symlink_to("loop")
    assert default_folder(RunConfig(dataset=dataset)) == f"runs/{name}-fedopt-{stamp}"


def test_the_time_in_the_name_is_a_time() -> None:
    text = default_folder(RunConfig()).removeprefix("runs/digits-fedopt-")
    assert re.fullmatch(r"\d{8}-\d{6}-\d{3}", text)
    assert abs(time.mktime(time.strptime(text[:-4], "%Y%m%d-%H%M%S")) - time.time()) < 4000
