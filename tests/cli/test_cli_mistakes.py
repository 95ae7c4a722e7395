"""Laws of mistakes: one line on standard error, exit code 2, nothing written."""

import dataclasses
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from commands import QUICK, Capture, MakeGraph, everything, printed, save
from silograph.cli import run_app
from silograph.core.config import RunConfig
from silograph.methods import METHODS

pytestmark = pytest.mark.usefixtures("work")


WRONG: dict[str, tuple[list[str], str]] = {
    "command": (["rum"], "No such command 'rum'. Did you mean 'run'"),
    "dataset": (["run", "corra"], "unknown dataset 'corra': did you mean 'cora'?"),
    "dataset of a cut": (["partition", "pubmet"], "unknown dataset 'pubmet': did you mean 'pubm"),
    "method": (
        ["run", "g.npz", "--method", "fedavgg"],
        "unknown method 'fedavgg': did you mean 'fedavg'?",
    ),
    "sampler as a method": (
        ["run", "g.npz", "--method", "fedgrains"],
        "error: --method: unknown method 'fedgrains': did you mean --neighbors fedgrains?",
    ),
    "flag": (["run", "g.npz", "--metod", "local"], "No such option: --metod (Possible options: "),
    "option as a flag": (
        ["run", "g.npz", "--server-lr", "0.1"],
        "expected an option of method scaffold, server optimizer momentum and server",
    ),
    "option as a flag of many": (
        ["compare", "g.npz", "--server-lr=0.1"],
        "expected an option of method scaffold, server optimizer momentum and server",
    ),
    "option of a part as a flag": (
        ["run", "g.npz", "--method", "fedacs", "--selector.arms", "3"],
        "error: expected an option of selector ucb as --option selector.arms=VALUE, got",
    ),
    "option of a part that lacks it": (
        ["run", "g.npz", "--model.arms", "3"],
        "error: No such option: --model.arms",
    ),
    "underscore": (["run", "--local_epochs", "2"], "--local-bias, --local-epochs)"),
    "partition": (["run", "g.npz", "--partition", "metes"], "'metes': did you mean 'metis'?"),
    "model": (["run", "g.npz", "--model", "gcnn"], "unknown model 'gcnn': did you mean 'gcn'?"),
    "option": (
        ["run", "g.npz", "--method", "fedopt", "--option", "server_lrr=1"],
        "error: --option server_lrr: model gcn, selector uniform and --server-optimizer adam have "
        "no such option: did you mean 'server_lr'?",
    ),
    "option of none": (
        ["run", "g.npz", "--method", "fedavg", "--option", "mu=1"],
        "error: --option mu: method fedavg has no such option, but method fedprox has it: leave it "
        "out, or set --method fedprox",
    ),
    "option of the default method": (
        ["run", "g.npz", "--option", "server_lrr=1"],
        "error: --option server_lrr: model gcn, selector uniform and --server-optimizer adam have "
        "no such option: did you mean 'server_lr'?",
    ),
    "option's value": (
        ["run", "g.npz", "--method", "fedopt", "--option", "server_lr=-1"],
        "server_lr: input should be greater than 0, got -1 (options of adam)",
    ),
    "a setting as an option": (
        ["run", "g.npz", "--option", "local_epochs=2"],
        "error: --option local_epochs: this is a setting of the run: give --local-epochs itself",
    ),
    "another setting as an option": (
        ["run", "g.npz", "--option", "lr=0.1"],
        "error: --option lr: this is a setting of the run: give --lr itself",
    ),
    "an option as a flag, too": (
        ["run", "g.npz", *("--partition", "dirichlet", "--option", "alpha=1", "--alpha", "2")],
        "error: expected alpha once, got option alpha, too: leave one of them out",
    ),
    "an option twice": (
        ["run", "g.npz", "--option", "server_lr=1", "--option", "server-lr=2"],
        "error: expected --option server_lr once, got it twice: leave one of them out",
    ),
    "an option of a method twice": (
        ["compare", "g.npz", *("--options", "fedopt.server_lr=1") * 2],
        "error: expected --options fedopt.server_lr once, got it twice: leave one of them out",
    ),
    "selector without a server": (
        ["run", "g.npz", "--method", "local", "--selector", "oort"],
        "got local, whose clients train alone: leave --selector out",
    ),
    "option's form": (["run", "g.npz", "--option", "mu"], "expected --option NAME=VALUE, got 'mu'"),
    "key": (["run", "g.npz", "--config", "key.toml"], "unknown key in key.toml 'rouns': did you"),
    "key under options": (
        ["run", "g.npz", "--config", "deep.toml", "--method", "fedopt"],
        "error: --option server_lrr: model gcn, selector uniform and --server-optimizer adam have "
        "no such option: did you mean 'server_lr'?",
    ),
    "file of a model": (
        ["run", "g.npz", "--model", "mine.py"],
        "expected FILE.py:NAME or package.module:NAME, got 'mine.py'",
    ),
    "table": (["run", "g.npz", "--config", "table.toml"], "'optons': did you mean 'options'?"),
    "value of a key": (
        ["run", "g.npz", "--config", "value.toml"],
        "rounds: input should be greater than or equal to 1, got 0 (value.toml)",
    ),
    "value over a file": (
        ["run", "g.npz", "--config", "good.toml", "--rounds", "0"],
        "rounds: input should be greater than or equal to 1, got 0",
    ),
    "options as a number": (
        ["run", "g.npz", "--config", "number.toml", "--option", "mu=1"],
        "options: input should be a valid dictionary, got 3 (number.toml)",
    ),
    "no TOML": (["run", "--config", "text.toml"], "expected TOML in text.toml, got: "),
    "no run file": (["run", "--config", "no.toml"], "expected a run file at no.toml, got: No such"),
    "folder as run file": (["run", "--config", "."], "expected a run file at ., got a folder: "),
    "two datasets": (
        ["run", "g.npz", "h.npz"],
        "error: silograph run: expected DATASET alone, got h.npz, too",
    ),
    "an argument where there is none": (
        ["datasets", "cora"],
        "error: silograph datasets: expected no argument, got cora",
    ),
    "a method to show": (["methods", "fedavgg"], "unknown method 'fedavgg': did you mean 'fedavg'"),
    "another part to show": (
        ["methods", "fedavg", "fedgrains"],
        "expected names of methods, got 'fedgrains', which is for --neighbors: silograph parts",
    ),
    "no value": (["run", "g.npz", "--rounds"], "Option '--rounds' requires an argument."),
    "no number": (["run", "g.npz", "--rounds", "many"], "'many' is not a valid integer."),
    "half a round": (["run", "g.npz", "--rounds", "1.5"], "'1.5' is not a valid integer."),
    "no client": (["run", "g.npz", "--clients", "0"], "clients: input should be greater than or"),
    "rate": (["run", "g.npz", "--lr", "inf"], "lr: input should be a finite number, got inf"),
    "dropout": (["run", "g.npz", "--dropout", "nan"], "dropout: input should be a finite number"),
    "seed": (["run", "g.npz", "--seed", "-1"], "seed: input should be greater than or equal to 0"),
    "dtype": (["run", "g.npz", "--dtype", "half"], "input should be 'float32' or 'float64', got"),
    "device": (
        ["run", "g.npz", "--device", "nosuch"],
        "--device: expected a torch device of this machine,",
    ),
    "momentum": (
        ["run", "g.npz", "--optimizer", "adam", "--momentum", "0.9"],
        "expected no momentum with --optimizer adam, got --momentum 0.9: use --optimizer sgd",
    ),
    "momentum of a method": (
        ["run", "g.npz", "--method", "fedavg", "--momentum", "0.9"],
        "expected no momentum with --optimizer adam, got --momentum 0.9: use --optimizer sgd",
    ),
    "alpha": (
        ["run", "g.npz", "--partition", "dirichlet", "--alpha", "1e9"],
        "alpha: input should be less than or equal to 1000000, got 1000000000.0 (options of diri",
    ),
    "clients of a part": (
        ["run", "g.npz", "--partition", "metis_overlapping", "--clients", "12"],
        "expected a multiple of --clients-per-part for 'metis_overlapping', got 12 clients at 5 a",
    ),
    "alpha of another cut": (
        ["run", "g.npz", "--alpha", "0.5"],
        "error: --alpha: partition metis has no such option, but partition dirichlet has it: leave",
    ),
    "share of another cut": (
        ["partition", "g.npz", "--partition", "silo", "--part-share", "0.1"],
        "error: --part-share: partition silo has no such option, but partition metis_overlapping",
    ),
    "alpha of no cut that is compared": (
        ["compare", "g.npz", "--over", "partition=metis,random", "--over", "alpha=0.1,1"],
        "error: --alpha: partition metis has no such option, but partition dirichlet has it: leave",
    ),
    "one folder twice": (["report", "x", "../work/x"], "expected result folders that differ, got"),
    "favored classes": (
        ["partition", "g.npz", "--partition", "class_biased", "--favored-classes", "3"],
        "expected 1 to 2 --favored-classes (fewer than the 3 classes of 'g'), got 3",
    ),
    "dropped edges": (
        ["run", "g.npz", "--drop-edges", "2"],
        "--drop-edges: input should be less than or equal to 1, got 2.0",
    ),
    "fanout": (
        ["run", "g.npz", "--fanout", "10,x"],
        "--fanout: expected numbers of neighbors like 10,5, got '10,x'",
    ),
    "fanout of another depth": (
        ["run", "g.npz", "--fanout", "3,2,1"],
        "--fanout: expected one number or 2 (one for each layer), got '3,2,1'",
    ),
    "empty batch": (["run", "g.npz", "--batch-size", "0"], "--batch-size: input should be greater"),
    "kernels": (
        ["run", "g.npz", "--kernels", "numba"],
        "kernels: input should be 'auto', 'compiled' or 'torch', got 'numba'",
    ),
    "split": (
        ["run", "g.npz", "--split", "1/2"],
        "--split: expected 'public', 'full' or train/val",
    ),
    "split above 1": (["run", "g.npz", "--split", ".9/.9/.9"], "expected ratios that sum to at mo"),
    "split of NaN": (["run", "g.npz", "--split", "nan/0/0"], "expected a training ratio above 0"),
    "public split": (["run", "g.npz", "--split", "public"], "expected a graph with a public split"),
    "no silos": (["run", "g.npz", "--partition", "silo"], "expected a graph that names its silos "),
    "more clients than nodes": (
        ["run", "g.npz", "--clients", "61"],
        "--clients: expected 1 to 60 (one node each at least), got 61",
    ),
    "more clients than nodes, cut": (
        ["partition", "g.npz", "--clients", "61"],
        "--clients: expected 1 to 60 (one node each at least), got 61",
    ),
    "silos and clients": (
        ["run", "silos.npz", "--partition", "silo", "--clients", "3"],
        "--clients: expected 2, one for each silo, got 3",
    ),
    "empty client": (
        ["run", "empty-silo.npz", "--partition", "silo"],
        "expected at least one node a client, got 1 empty of 3 clients (first: 'c')",
    ),
    "edge to nowhere": (
        ["run", "edge.npz"],
        "edge.npz: expected edges between nodes 0..59, got edge 3 from 60 to ",
    ),
    "NaN": (["run", "nan.npz"], "nan.npz: expected finite features, got 1 NaN or infinite in x"),
    "labels": (
        ["run", "labels.npz"],
        "labels.npz: expected y of shape (60,) or (60, T), got (59,): ",
    ),
    "no labels": (["run", "unlabelled.npz"], "expected at least one known label in y, got none"),
    "no training node": (
        ["run", "g.npz", "--split", "0.001/0.5/0.4"],
        "expected at least one training node, got 0 of 60 labeled ones over 10 clients",
    ),
    "cut short": (["run", "short.npz"], "short.npz: expected an .npz file with edge_index, y and"),
    "foreign": (["run", "foreign.npz"], "foreign.npz: expected an .npz file with edge_index, y "),
    "empty file": (["run", "empty.npz"], "empty.npz: expected an .npz file with edge_index, y an"),
    "other arrays": (["run", "other.npz"], "other.npz: expected keys edge_index, y and x (or "),
    "objects": (["run", "objects.npz"], "objects.npz: expected 'y' to be an array of numbers or"),
    "no file": (["run", "no.npz"], "expected a file or folder, got no.npz: no such file"),
    "no path": (["run", "./no"], "expected a file or folder, got no: no such file"),
    "no data folder": (
        ["run", "cora", "--data-dir", "no"],
        "expected a folder as --data-dir, got ",
    ),
    "folder without a graph": (["run", "."], "expected a folder with nodes.csv and edges.csv, wi"),
    "folder exists": (
        ["run", "g.npz", "--out", "taken"],
        "expected a result folder that does not exist yet, got taken: choose another --out, "
        "nothing was overwritten",
    ),
    "file exists": (["run", "g.npz", "--out", "g.npz"], "does not exist yet, got g.npz: choose a"),
    "folder in a file": (
        ["run", "g.npz", "--out", "g.npz/x"],
        "expected to make the result folder",
    ),
    "no folder": (["run", "g.npz", "--out", ""], "expected the path of a result folder, got ''"),
    "flag of another command": (
        ["partition", "g.npz", "--rounds", "1"],
        "No such option: --rounds",
    ),
    "flag of the server": (
        ["run", "g.npz", "--silos", "a,b"],
        " It is a flag of silograph server",
    ),
    "flag of a silo at a server": (
        ["server", "--ca", "X"],
        "error: No such option: --ca. It is a flag of silograph silo\n",
    ),
    "flag of the cut at a server": (
        ["server", "--columns", "id=key", "--listen", "127.0.0.1:0"],
        "No such option: --columns. The data are at the silos, cut already: each says in its silo",
    ),
    "option at a comparison": (
        ["compare", "g.npz", "--option", "column=shop"],
        "for one method, and --options PART.NAME=VALUE for all, such as partition.column=shop",
    ),
    "option of a part as a flag of a comparison": (
        ["compare", "g.npz", "--column", "shop"],
        "expected an option of partition category as --options partition.column=VALUE, got --col",
    ),
    "flag of many others": (
        ["methods", "--rounds", "1"],
        "error: No such option: --rounds. It is a flag of silograph ",
    ),
    "rounds of a run that goes on": (
        ["resume", "runs/x", "--rounds", "20"],
        "error: No such option: --rounds. A run's settings are fixed: silograph run --config DIR/"
        "config.toml --rounds VALUE begins another one",
    ),
    "missing flag": (
        ["predict", "runs/x"],
        "error: Missing option '--out'. Give --out VALUE: file to write, CSV or .parquet; it must ",
    ),
    "missing argument": (
        ["recommend"],
        "error: Missing argument 'RUN'. Give RUN: result folder of a silo, or its recommender's",
    ),
    "swapped letters": (["run", "g.npz", "--model", "gnc"], "did you mean 'gcn'?\n"),
    "option of a selector": (
        ["run", "g.npz", "--option", "selector.budget=0"],
        "error: --option selector.budget: input should be greater than or equal to 1, got 0 (opt",
    ),
    "too little for a round": (
        ["run", "g.npz", "--option", "selector.budget=1kB"],
        "error: --option selector.budget: expected at least ",
    ),
    "private layers": (
        ["run", "g.npz", "--method", "fedper", "--option", "private=2"],
        "error: --option private: expected less than the number of layers, 2, got 2: ",
    ),
    "option that nothing reads": (
        ["run", "g.npz", "--method", "fedlocal", "--option", "sent=int8"],
        "error: --option sent: fedlocal does not read it with halo=none, got int8: leave it out, ",
    ),
    "option that is a flag of another part": (
        [
            *("run", "g.npz", "--neighbors", "fedgrains", "--batch-size", "8"),
            *("--option", "neighbors.policy=uniform", "--option", "neighbors.alpha=3"),
        ],
        "error: --option neighbors.alpha: fedgrains does not read it with policy=uniform, got 3.0:",
    ),
    "folder of an audit file": (
        ["audit", "taken"],
        "error: expected an audit file, got the folder taken: name its audit.jsonl",
    ),
}

# Of each of these, a value that cannot be: the message begins with the flag.
NAMED = {
    "split": "1/2",
    "target": "4x",
    "links": "3",
    "speeds": "fast",
    "fanout": "0,x",
    "device": "gpu",
    "partition": "silo",
    "scale": "2",
    "rating-scale": "1,10",
    "columns": "label=kind",
    "relevant": "3",
    "clients": "99",
    "hops": "3",
    "hidden": "0",
    "lr": "-1",
    "max-bytes": "3XB",
    "option": "input_droput=3",
}

# A setting as Python spells it; run files, which messages name, spell it so, too.
FIELDS = sorted(f.name for f in dataclasses.fields(RunConfig))
PYTHON = re.compile(
    rf"(?<![\w./-])(?<!--option )(?:{'|'.join(n for n in FIELDS if '_' in n)})\b"
    rf"|(?<![\w./-])(?:{'|'.join(FIELDS)})=|error: (?:{'|'.join(FIELDS)}):"
)


@pytest.fixture
def wrong_files(work: Path, make_graph: MakeGraph) -> Path:
    graph = make_graph()
    x, y, edges = graph.x, graph.y.numpy(), graph.edge_index.numpy().copy()
    assert isinstance(x, Tensor)
    edges[0, 3] = 60
    save("edge.npz", graph, edge_index=edges)
    features = x.numpy().copy()
    features[5, 2] = np.nan
    save("nan.npz", graph, x=features)
    save("labels.npz", graph, y=y[:-1])
    save("unlabelled.npz", graph, y=np.full_like(y, -1))
    save("objects.npz", graph, y=np.array([{}] * 60))
    silo = np.arange(60) % 2
    save("silos.npz", graph, silo=silo)
    save("empty-silo.npz", graph, silo=silo, silo_names=np.array(["a", "b", "c"]))
    np.savez("other.npz", a=np.arange(3))
    whole = Path("g.npz").read_bytes()
    Path("short.npz").write_bytes(whole[: len(whole) // 2])
    Path("foreign.npz").write_bytes(b"%PDF-1.7\n" * 100)
    Path("empty.npz").write_bytes(b"")
    Path("taken").mkdir()
    Path("taken", "result.json").write_text("mine", encoding="utf-8")
    for name, text in {
        "good": "rounds = 2\nclients = 3\n",
        "key": "rouns = 3\n",
        "deep": "[options]\nserver_lrr = 1\n",
        "table": "[optons]\nserver_lr = 1\n",
        "value": "rounds = 0\n",
        "number": "options = 3\n",
        "text": "rounds: 3\n",
    }.items():
        Path(f"{name}.toml").write_text(text, encoding="utf-8")
    return work


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_one_line_and_leaves_nothing(
    wrong_files: Path, capsys: Capture, case: str
) -> None:
    arguments, message = WRONG[case]
    before = everything(wrong_files.parent)
    assert run_app(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert shown.err.endswith("\n")
    assert message in shown.err
    assert ".toml" in shown.err or not PYTHON.search(re.sub("'.*?'", "", shown.err))
    assert everything(wrong_files.parent) == before


@pytest.mark.parametrize("flag", NAMED)
def test_a_message_begins_with_the_flag_that_it_is_about(
    work: Path, capsys: Capture, flag: str
) -> None:
    assert run_app(["run", "g.npz", f"--{flag}", NAMED[flag]]) == 2
    shown = capsys.readouterr().err
    assert re.match(rf"error: --{flag}(:| input_droput:) ", shown)
    assert "(options)" not in shown
    assert not re.search(r"[Cc]hoices: .*--", shown)


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["run", "corra"], "DATASET"),
        (["run", "g.npz", "--partition", "metiss"], "--partition"),
        (["run", "g.npz", "--method=fedav"], "--method"),
        (["run", "g.npz", "--out", "gnc", "--model", "gnc"], "--model"),
        (["run", "g.npz", "--aggregator", "moda"], "--aggregator"),
        (["run", "g.npz", "--selector", "ort"], "--selector"),
        (["run", "g.npz", "--neighbors", "fanot"], "--neighbors"),
        (["run", "g.npz", "--metric", "acuracy"], "--metric"),
        (["run", "g.npz", "--tracker", "mlflw=here"], "--tracker"),
        (["compare", "g.npz", "--methods", "local,fedav"], "--methods"),
        (["compare", "g.npz", "--over", "clientz=1"], "--over"),
        (["compare", "g.npz", "--baseline", "locl"], "--baseline"),
        (["compare", "g.npz", "--options", "fedop.mu=1"], "--options"),
        (["compare", "g.npz", "--view", "servr"], "--view"),
        (["compare", "g.npz", "--test", "z"], "--test"),
    ],
)
def test_an_unknown_name_is_told_with_its_flag(
    work: Path, capsys: Capture, words: list[str], flag: str
) -> None:
    assert run_app(words) == 2
    assert capsys.readouterr().err.startswith(f"error: {flag}: unknown ")


def test_a_name_that_a_file_says_has_no_flag(work: Path, capsys: Capture) -> None:
    Path("m.toml").write_text("model = 'gnc'\n", encoding="utf-8")
    assert run_app(["run", "g.npz", "--config", "m.toml"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown model 'gnc': did you mean 'gcn'?")


def test_a_mistake_with_json_prints_nothing(wrong_files: Path, capsys: Capture) -> None:
    for command in ("run", "partition"):
        assert run_app([command, "nan.npz", "--json"]) == 2
        assert capsys.readouterr().out == ""


def test_no_command_shows_the_help(capsys: Capture) -> None:
    assert run_app([]) == 2
    assert capsys.readouterr().out.strip().startswith("Usage: silograph")


def interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def test_an_interrupt_is_exit_code_130(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("silograph.experiment.run.run.run", interrupted)
    assert run_app(["run", "g.npz", *QUICK]) == 130
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.split() == ["interrupted"]


def test_an_interrupt_keeps_the_rounds_so_far(
    work: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "fedavg", replace(METHODS["fedavg"], round=interrupted))
    assert run_app(["run", "g.npz", *QUICK, "--out", "x", "--json"]) == 130
    assert capsys.readouterr().out == ""
    assert {path.name for path in (work / "x").iterdir()} == {
        "config.toml",
        "run.json",
        "simulation.json",
        "checksums.json",
        "clients.csv",
    }


FULL = "[Errno 28] No space left on device: 'x'"


def full(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device", "x")


def test_a_full_disk_is_one_line_and_how_to_go_on(
    work: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["run", "g.npz", *QUICK, "--quiet", "--json", "--out"]
    whole = json.loads(printed(capsys, *command, "whole"))
    way = "silograph resume 'my run; 1'"
    hint = f"to go on from the first round, for no checkpoint was written: {way}"
    with monkeypatch.context() as patch:
        patch.setattr("silograph.federation.checkpoint.CheckpointFolder.write", full)
        for again in ([*command, "my run; 1"], ["resume", "my run; 1", "--quiet"]):
            assert run_app(again) == 2
            shown = capsys.readouterr()
            assert shown.out == ""
            lines = [f"error: {FULL}", hint]
            if "--json" in again:
                about = {"code": "system", "message": FULL, "fields": {}}
                lines.append(json.dumps({"error": about}))
            assert shown.err.splitlines() == lines
    program, *words = shlex.split(way)
    assert program == "silograph"
    gone_on = json.loads(printed(capsys, *words, "--quiet", "--json"))
    assert gone_on["result_dir"] == "my run; 1"
    assert {k: gone_on[k] for k in ("test", "bytes", "best_round")} == {
        k: whole[k] for k in ("test", "bytes", "best_round")
    }


@pytest.mark.parametrize("where", ["silograph.graph.datasets.load", "pathlib.Path.rename"])
def test_a_full_disk_before_there_is_a_folder(
    work: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    before = everything(work)
    monkeypatch.setattr(where, full)
    assert run_app(["run", "g.npz", *QUICK, "--out", "x"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert "No space left on device" in shown.err
    assert shown.err.count("\n") == 1
    assert everything(work) == before


@pytest.mark.parametrize(("last", "every"), [(1, "1"), (2, "0"), (2, "1")])
def test_an_interrupt_says_how_to_go_on(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, last: int, every: str
) -> None:
    """Without a checkpoint, that all rounds are trained again; resuming says from which one."""
    train = METHODS["fedavg"].round

    def until(fed: Any, cfg: Any, state: Any, t: int, key: Any) -> Any:
        return interrupted() if t == last else train(fed, cfg, state, t, key)

    command = ["run", "g.npz", *QUICK, "--quiet", "--checkpoint-every", every, "--out", "it's"]
    with monkeypatch.context() as patch:
        patch.setitem(METHODS, "fedavg", replace(METHODS["fedavg"], round=until))
        assert run_app(command) == 130
    kept = last == 2 and every == "1"
    first = " from the first round, for no checkpoint was written" * (not kept)
    hint = f"""to go on{first}: silograph resume 'it'"'"'s'"""
    assert capsys.readouterr().err.splitlines() == ["interrupted", hint]
    assert run_app(["resume", "it's"]) == 0
    begins = "there is no checkpoint: beginning again with round 1 of 2"
    where = "going on with round 2 of 2" if kept else begins
    assert f"{where}\n" in capsys.readouterr().err
    if every == "1":
        assert run_app(["resume", "it's"]) == 0
        complete = "the run in it's was complete: nothing was trained"
        assert capsys.readouterr().err.splitlines() == [complete]  # and no plan


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--block-size", "--block-size: input should be less than 9223372036854775808, got 9999"),
        (
            "--hidden",
            "--hidden: expected a width of 1 or more, or one for each hidden layer such as",
        ),
        ("--batch-size", "--batch-size: input should be less than 9223372036854775808, got 9999"),
        ("--rounds", "--rounds: input should be less than 2147483648, got 9999"),
        ("--seed", "--seed: input should be less than 9223372036854775808, got 9999"),
    ],
)
def test_numbers_beyond_those_of_a_machine_are_one_line(
    work: Path, capsys: Capture, flag: str, says: str
) -> None:
    assert run_app(["run", "g.npz", "--clients", "2", flag, "9" * 25]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"error: {says}")


def test_too_large_for_the_memory_is_one_line(work: Path, capsys: Capture) -> None:
    assert run_app(["run", "g.npz", "--clients", "2", "--hidden", str(10**12)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: expected a run that fits into memory, got: can't allocate memory")
    assert err.count("\n") == 1
    assert not (work / "runs").exists()


@pytest.mark.parametrize("words", [["--hidden", str(10**18 - 1)], ["--hidden", "9" * 17 + ",9"]])
def test_more_weights_than_torch_counts_are_one_line(
    work: Path, capsys: Capture, words: list[str]
) -> None:
    assert run_app(["run", "g.npz", "--clients", "2", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "expected a model of fewer than 2^58 weights, got more" in err
    assert err.count("\n") == 1
    assert not (work / "runs").exists()


def test_other_errors_of_torch_are_not_hidden(monkeypatch: pytest.MonkeyPatch, work: Path) -> None:
    def broken(**_: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr("silograph.experiment.run.run.run", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        run_app(["run", "g.npz", "--out", "x"])


@pytest.mark.parametrize(
    ("words", "code", "fields"),
    [
        (["--method", "fedavgg"], "unknown-name", {"got": "fedavgg", "suggestion": "fedavg"}),
        (["--rounds", "0"], "option-value", {"option": "rounds"}),
        (["--lr", "1e30", "--rounds", "9"], "diverged", {}),  # the command says how it goes on
        (["--roundz", "9"], "config", {}),
        (["--hidden", str(10**12)], "system", {}),
    ],
)
def test_json_gets_errors_as_json(
    work: Path, capsys: Capture, words: list[str], code: str, fields: dict[str, Any]
) -> None:
    assert run_app(["run", "g.npz", *QUICK, *words, "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    *lines, last = err.splitlines()
    error = json.loads(last)["error"]
    assert error["code"] == code
    assert error["fields"].items() >= fields.items()
    assert f"error: {error['message']}" in lines
