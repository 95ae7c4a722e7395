"""Laws of reports: whole, escaped, small pages with the figures of result.json, for every run."""

import json
import logging
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import precision_recall_fscore_support

import silograph as sg
from commands import save
from mistakes import raises_code
from pages import read_page
from runs import FAST, MakeGraph, go, run_until
from silograph.cli import run_app
from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError, DataError
from silograph.core.kinds import Kind
from silograph.core.resolved_config import ResolvedConfig
from silograph.experiment.report import comparison_runs, reading, write_comparison, write_report
from silograph.experiment.report.page import constant_facts, fact_text, facts_of
from silograph.experiment.report.reading import (
    Curve,
    Scale,
    curves,
    quantile,
    read_ledger,
    read_run,
    thin_indices,
    ticks,
)
from silograph.experiment.report.several_runs import cuts_follow_seeds
from silograph.experiment.resolve.resolve import resolve
from silograph.experiment.result_files import Row, read_csv, read_rounds
from silograph.experiment.run.result import Result
from silograph.experiment.run.run import resume, run
from silograph.federation.ledger import Record
from silograph.task.scores import Views

NAMES = {"accuracy": "accuracy", "client mean": "accuracy_client_mean", "AUC": "auc"}
FIGURES = ["Accuracy", "Loss", "Bytes by kind", "Test accuracy of each client"]
REST = ["recall", "F1"]
CUT = ["Sizes", "Mix of labels", "Edges between clients"]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "x"


@pytest.fixture
def done(make_graph: MakeGraph, out: Path) -> Result:
    """A finished run, its folder at `out`."""
    return go(make_graph(), out=str(out), rounds=6)


def result_of(folder: Path) -> Any:
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


# --- what the page says ---------------------------------------------------------------------------


def test_a_run_leaves_a_page_with_its_figures(done: Result, out: Path) -> None:
    page = read_page(out / "report.html")
    sections = ["Scores", "Learning", "Bytes", "Clients", "The cut", "Config", "Run it again"]
    assert [title for title in page.titles if title in sections] == sections
    assert [title for title in page.titles if title not in sections] == [
        "Probabilities and decisions",
        *FIGURES,
        *CUT,
    ]
    assert "finished: all 6 rounds" in page.text
    assert done.partition_hash in page.text
    assert "McMahan et al., Communication-efficient learning" in page.text


def test_the_scores_are_those_of_the_result(done: Result, out: Path) -> None:
    page, result = read_page(out / "report.html"), result_of(out)
    tables = [t for t in page.tables if t[0][:3] == ["view", "accuracy", "client mean"]]
    largest, *cells = tables[0].pop()
    assert largest == result["baseline"]["name"] == "largest class"
    assert cells == [f"{value:.4f}" for value in result["baseline"]["scores"].values()]
    for table, part in zip(tables, ("test", "val"), strict=True):
        assert [row[0] for row in table[1:]] == ["server", "uncut", "personalized"]
        for view, *cells in table[1:]:
            shown = dict(zip(table[0][1:], cells, strict=True))
            assert ("AUC" in shown) == (part == "test")
            for column in shown.keys() & NAMES.keys():
                assert shown[column] == f"{result[part][view][NAMES[column]]:.4f}"
    assert f"best: round {result['best_round']}" in page.text
    total = sum(size for size in result["bytes"]["by_kind"].values())
    assert total == result["bytes"]["total"]
    assert f"{total / 1e3:.1f} kB" in page.text


def test_a_page_says_which_neighbors_are_heard(make_graph: MakeGraph, tmp_path: Path) -> None:
    for method in ("label_guided", "fedavg", "centralized"):
        go(make_graph(), method=method, out=str(tmp_path / method), rounds=1)
    go(make_graph(), method="fedavg", collect=0.5, out=str(tmp_path / "fetched"), rounds=1)
    fetched, uncut = (read_page(tmp_path / m / "report.html") for m in ("fetched", "centralized"))
    assert "its own client's graph and the neighbors that it has fetched" in fetched.text
    assert "each node on the uncut graph, where it was trained" in uncut.text
    assert "client's graph" not in uncut.text
    heard, own = "with its neighbors in all silos", "through its own client's graph"
    guided, plain = (read_page(tmp_path / m / "report.html") for m in ("label_guided", "fedavg"))
    assert (heard in guided.text, own in guided.text) == (True, False)
    assert (heard in plain.text, own in plain.text) == (False, True)
    assert "has fetched" not in plain.text
    folders = [tmp_path / "label_guided", tmp_path / "fedavg"]
    both = read_page(write_comparison(folders, tmp_path / "both.html").path)
    assert heard in both.text
    assert own in both.text


def test_the_curves_are_the_table_of_rounds(done: Result, out: Path) -> None:
    page, rows = read_page(out / "report.html"), read_rounds(out / "rounds.csv")
    [axis], figures = page.data["axes"], page.data["figures"]
    for unit in ("round", "bytes", "seconds"):
        assert axis[unit] == [row[unit] for row in rows]
    series = {s["name"]: s["y"] for s in figures["accuracy"]["series"]}
    assert list(series) == [
        f"{part}, {view}" for part in ("validation", "test") for view in ("server", "personalized")
    ]
    for name, column in (("validation, server", "val_server"), ("test, server", "test_server")):
        assert series[name] == pytest.approx([row[f"{column}_accuracy"] for row in rows], rel=1e-5)
    losses = {s["name"]: s["y"] for s in figures["loss"]["series"]}
    assert losses["training"] == pytest.approx([row["train_loss"] for row in rows], rel=1e-5)
    # Test is never the thick line that chooses.
    looks = [s["look"].split() for f in figures.values() for s in f["series"]]
    assert [look for look in looks if "judge" in look] == [["server", "val", "judge"]] * 2


def test_one_round_is_a_dot_and_said_to_be_one(make_graph: MakeGraph, out: Path) -> None:
    go(make_graph(), out=str(out), rounds=1)
    page = read_page(out / "report.html")
    for line in ("judge", "test"):
        dots = [p["d"] for p in page.all("path", "dots") if line in p["class"].split()]
        assert dots
        assert all(re.fullmatch(r"M500 \d+h0", d) for d in dots)
    assert page.text.count("One round was evaluated, so each curve is a dot.") == 2
    text = (out / "report.html").read_text(encoding="utf-8")
    rounds = re.findall(r'ticks-x">\s*<span[^>]*>([^<]*)</span>\s*</div>\s*<p[^>]*>rounds', text)
    assert rounds == ["1", "1"]  # no halves of a round


def test_without_a_script_all_of_it_is_there(done: Result, out: Path) -> None:
    page = read_page(out / "report.html")
    for unit in ("round", "bytes", "seconds"):
        assert len(page.all("div", f"by-{unit}")) == 2  # accuracy and loss, drawn for each axis
        assert [given for given in page.all("input") if given["id"] == f"axis-{unit}"]
    rows = page.table("round", "train loss")
    assert [row["round"] for row in rows] == [str(t) for t in range(1, 7)]
    clients = page.table("client", "internal edges")
    for shown, row in zip(clients, read_csv(out / "clients.csv"), strict=True):
        assert (shown["client"], shown["nodes"]) == (row["client"], row["nodes"])
        exact = float(row["test_server_accuracy"])
        assert float(shown["test server accuracy"]) == pytest.approx(exact, rel=1e-5)


def test_the_curves_are_drawn_to_scale(done: Result, out: Path) -> None:
    """Ticks and points agree: the first and the last round are the ends of the axis."""
    page = read_page(out / "report.html")
    panels = [p for p in page.all("div", "panel") if p.get("data-unit") == "round"]
    assert [(p["data-low"], p["data-high"]) for p in panels] == [("1.0", "6.0")] * 2
    lines = [p["d"] for p in page.all("path", "judge")]
    assert all(d.startswith("M0 ") and "L1000 " in d for d in lines if d != "M1 4h22")
    assert "each curve is a dot" not in page.text


def test_clients_and_cut_hold_together(done: Result, out: Path) -> None:
    rows = read_csv(out / "clients.csv")
    cut = json.loads((out / "simulation.json").read_text(encoding="utf-8"))
    assert "simulation only" in cut["note"]
    nodes = np.array([int(row["test"]) for row in rows])
    for view in ("server", "uncut", "personalized"):
        accuracy = np.array([float(row[f"test_{view}_accuracy"]) for row in rows])
        assert tuple(accuracy) == done.client_accuracy[view]
        scores = getattr(done.test, view)
        assert (accuracy * nodes).sum() / nodes.sum() == pytest.approx(scores.accuracy)
        assert accuracy.mean() == pytest.approx(scores.accuracy_client_mean)
    assert np.sum(cut["between"], axis=1).tolist() == [int(row["cross_edges"]) for row in rows]
    assert np.sum(cut["between"]) == 2 * cut["edges_cut"]
    assert np.sum(cut["labels"], axis=1).tolist() == [int(row["nodes"]) for row in rows]


def test_the_config_marks_what_differs(done: Result, out: Path) -> None:
    page = read_page(out / "report.html")
    table = {row["key"]: row["value"] for row in page.table("key", "value", "meaning")}
    plain = {f.name for f in fields(ResolvedConfig)} - {"out", "options"}
    silent = {name for name in plain if getattr(done.config, name) is None}
    silent |= {"min_nodes_per_row", "min_silos_per_row"}  # FedAvg sends no rows
    silent |= {"weights_as", "weight_rows"}  # which travel whole
    silent |= {"secure_aggregation", "engine"}  # plain, and in this process
    silent |= {"edge_weights"}  # of a graph that has none
    silent |= {"evaluation_min_count"}  # no count is left out
    silent |= {"scale"} | ({"momentum"} - {*FAST} if adam_of(done) else set())
    options = {name for name, value in done.config.options.items() if value is not None}
    assert set(table) == (plain - silent) | options
    assert (table["method"], table["lr"], table["init_seed"]) == ("fedavg", "0.05", "0")
    given = {**FAST, "rounds": 6}
    default = RunConfig()
    changed = {k for k in given if given[k] != getattr(default, k)} | {"dataset"}
    assert len(page.all("tr", "changed")) == len(changed)
    for name, version in done_versions(out).items():
        assert f"{name}\xa0{version}" in page.text


def adam_of(done: Result) -> bool:
    return done.config.optimizer == "adam"


def done_versions(folder: Path) -> Any:
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))["versions"]


GIVEN: list[dict[str, Any]] = [
    {"clients": 3, "rounds": 1, "hidden": 4},
    {"clients": 3, "rounds": 1, "hidden": 4, "largest_component": True, "strict": True, "seed": 5},
    {"clients": 2, "rounds": 1, "keep_optimizer": False, "method": "local", "target": "accuracy=1"},
    {"rounds": 1, "clients": 2, "server_optimizer": "momentum", "options": {"server_lr": 0.5}},
]


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("given", GIVEN)
def test_the_command_runs_the_same_again(
    make_graph: MakeGraph,
    tmp_path: Path,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Any],
) -> None:
    save(tmp_path / "a graph.npz", make_graph(150))
    first = run(str(tmp_path / "a graph.npz"), **given, out=str(out)).config
    graph = make_graph(150)
    page = read_page(out / "report.html")
    seen: list[RunConfig] = []
    monkeypatch.setattr("silograph.experiment.run.run.run", lambda **kw: seen.append(kw["config"]))
    monkeypatch.setattr("silograph.cli.printing.print_result", lambda _: None)
    commands = [code for code in page.codes if code.startswith("silograph ")]
    assert len(commands) == 3
    assert commands[2] == shlex.join(["silograph", "resume", str(out)])
    for command in commands[:2]:
        assert run_app([*shlex.split(command)[1:], "--out", "y"]) == 0
        again = resolve(seen[-1], graph).config
        assert again == replace(first, out="y", block_size=again.block_size)


def test_a_graph_in_memory_runs_again_in_python(done: Result, out: Path) -> None:
    codes = read_page(out / "report.html").codes
    line = next(code for code in codes if code.startswith("sg.run(graph, "))
    seen: dict[str, Any] = {}
    exec(line, {"sg": type("sg", (), {"run": lambda _, **kw: seen.update(kw)}), "graph": None})
    assert {k: seen[k] for k in seen} == {
        k: v for k, v in {**FAST, "rounds": 6}.items() if v != getattr(RunConfig(), k)
    }
    assert f"sg.resume('{out}', graph=graph)" in codes


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("method", ["local", "fedper", "fedavg"])
def test_where_the_clients_models_are(make_graph: MakeGraph, out: Path, method: str) -> None:
    said = f"models of 4 clients: {out}/models"
    result = go(make_graph(), method=method, out=str(out))
    assert (said in result.summary()) == (said in read_page(out / "report.html").text)
    assert (said in result.summary()) == (method != "fedavg") == (out / "models").exists()
    (out / "result.json").unlink()
    assert "models of" not in read_page(write_report(out).path).text


# --- every kind of run ----------------------------------------------------------------------------

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str], str]] = {
    "multi-label": (
        {"multilabel": True, "missing": 0.2},
        {"metric": "accuracy"},
        ["Accuracy", "Loss", "Bytes by kind", "Test accuracy of each client", *CUT],
        "right label bits",
    ),
    "F1": (
        {"multilabel": True},
        {"rounds": 2},
        ["Loss", "Bytes by kind", *CUT],
        "chosen by validation F1 micro",
    ),
    "no validation": ({}, {"split": "0.5/0/0.5"}, FIGURES + CUT, "there are no validation nodes"),
    "withheld": (
        {},
        {"evaluation_min_count": 100_000},
        FIGURES[1:] + CUT,
        "The last round is reported: no client sent validation counts to choose by.",
    ),
    "no test": ({}, {"split": "0.5/0.5/0"}, FIGURES[:3] + CUT, "There are no test scores."),
    "neither": ({}, {"split": "1/0/0"}, [*FIGURES[1:3], *CUT], "There are no test nodes"),
    "one client": ({}, {"clients": 1}, FIGURES + CUT[:2], "One client holds the graph."),
    "one round": ({}, {"rounds": 1}, FIGURES + CUT, "finished: all 1 round"),
    "centralized": ({}, {"method": "centralized"}, FIGURES + CUT, "centralized on planted"),
    "local": ({}, {"method": "local"}, FIGURES + CUT, "of the personalized view"),
    "stopped": ({}, {"max_bytes": 1}, FIGURES + CUT, "finished: max_bytes: "),
    "seldom judged": ({}, {"eval_every": 3}, FIGURES + CUT, "finished"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_has_a_page(make_graph: MakeGraph, out: Path, kind: str) -> None:
    about, options, figures, words = KINDS[kind]
    result = go(make_graph(**about), **options, out=str(out))
    page = read_page(out / "report.html")
    assert [t for t in page.titles if t in FIGURES + CUT] == figures
    assert words in " ".join(page.text.split())
    for view, scores in vars(result.test).items():
        assert (
            (f"{scores.accuracy:.4f}" in page.text) if scores else f"test, {view}" not in page.text
        )
    if kind == "centralized":  # one client trained: only the uncut view knows the cut's clients
        assert {len(found) for found in result.client_accuracy.values()} == {1, 4}
        row = read_csv(out / "clients.csv")[0]
        assert row["bytes"] == row["test_server_accuracy"] == ""
        assert row["test_uncut_accuracy"] != ""


@pytest.mark.law(sample=6)
@pytest.mark.parametrize(("clients", "most"), [(300, 0.25), (1000, 0.6)])
def test_many_clients_make_a_small_page(
    make_graph: MakeGraph, out: Path, clients: int, most: float
) -> None:
    go(make_graph(3 * clients), clients=clients, rounds=2, out=str(out))
    page = read_page(out / "report.html")
    assert len(page.source) < most * 1e6
    many = ["Nodes", "Largest class", "Cut edges"]
    assert [t for t in page.titles if t in FIGURES + CUT + many] == FIGURES + many
    assert f"{clients} clients with test nodes" in page.text
    assert len(page.table("client", "internal edges")) == clients
    assert json.loads((out / "simulation.json").read_text())["between"] is None


def test_many_rounds_are_thinned_and_the_best_stays(done: Result, out: Path) -> None:
    lines = (out / "rounds.csv").read_text().splitlines()
    more = [lines[1].replace("1,", f"{t},", 1) for t in range(7, 3000)]
    (out / "rounds.csv").write_text("\n".join([*lines, *more]) + "\n")
    write_report(out)
    page = read_page(out / "report.html")
    rounds = page.data["axes"][0]["round"]
    assert len(rounds) <= 402
    assert {1, done.best_round, 2999} <= set(rounds)
    assert len(page.source) < 1e6
    assert "(201 of 2999; all of them are in rounds.csv)" in page.text


EVIL = ["</script><script>alert(1)</script>", 'a & b\'s "silo"', "<img src=x onerror=y>{{ 7*7 }}"]


def test_names_are_escaped(make_graph: MakeGraph, tmp_path: Path) -> None:
    folder = tmp_path / "<b>x & 'y'"
    folder.mkdir()
    silo = np.array(EVIL)[np.arange(60) % 3]
    save(folder / "<i>g.npz", make_graph(), silo=silo)
    run(folder / "<i>g.npz", partition="silo", rounds=2, out=str(folder / "<u>"))
    page = read_page(folder / "<u>" / "report.html")
    shutil.copytree(folder / "<u>", folder / "two")
    other = read_page(write_comparison([folder / "<u>", folder / "two"], folder / "c.html").path)
    for written in (page, other):
        assert not {"u", "img"} & {tag for tag, _ in written.tags}
        assert written.source.count("<script") == 2
    for name in EVIL:
        assert name in page.text
    assert shlex.join(["silograph", "resume", str(folder / "<u>")]) in page.codes
    assert str(folder / "<u>") in other.text


# --- runs that are not over -----------------------------------------------------------------------


def test_an_interrupted_run_has_a_page_and_then_a_better_one(
    make_graph: MakeGraph, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = make_graph()
    run_until(monkeypatch, graph, 4, out, **FAST | {"rounds": 6})
    assert not (out / "report.html").exists()
    write_report(out)
    page = read_page(out / "report.html")
    assert "not finished: round 2 is the last one judged" not in page.text
    assert "not finished: round 2 of 6 is the last one judged" in page.text
    assert [t for t in page.titles if t in FIGURES + CUT] == FIGURES[:3] + CUT
    record = read_run(out)
    best = record.best_row
    assert best == max(
        record.rows, key=lambda r: (r["val_server_accuracy"], -(r["val_server_loss"] or 0))
    )
    assert f"{best['test_server_accuracy']:.4f}" in page.text
    result = resume(out, graph=graph)
    page = read_page(out / "report.html")
    assert "finished: all 6 rounds" in page.text
    assert f"best: round {result.best_round}" in page.text


def test_a_run_without_a_round_has_a_page(
    make_graph: MakeGraph, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_until(monkeypatch, make_graph(), 1, out, **FAST)
    page = read_page(write_report(out).path)
    assert "No round has been judged yet." in page.text
    assert "The ledger has no bytes yet" in page.text
    other = read_page(write_comparison([out, out], out / "c.html").path)
    assert "No round has been judged yet." in other.text
    assert "not finished" in other.text


def test_the_folder_alone_tells_what_the_result_says(done: Result, out: Path) -> None:
    """Without result.json the same rows choose the same round."""
    whole = read_run(out)
    (out / "result.json").unlink()
    part = read_run(out)
    assert part.best_row == whole.best_row
    assert part.total_bytes == whole.total_bytes
    assert part.seconds == pytest.approx(whole.seconds, abs=0.1)
    for name in ("test", "val"):
        ours, theirs = part.scores(name), whole.scores(name)
        assert ours["server"]["accuracy"] == theirs["server"]["accuracy"]
    assert tuple(f.name for f in fields(Views)) == reading.VIEWS


@pytest.mark.parametrize("sizes", [[3], [5, 5, 5], [5, 6, 7], [5, 7, 4]])
def test_bytes_are_added_up_however_they_are_packed(tmp_path: Path, sizes: list[int]) -> None:
    k = len(sizes)
    record = Record(1, 1, "a", Kind.WEIGHTS, "up", np.arange(k), np.array(sizes), np.zeros(k))
    (tmp_path / "ledger.jsonl").write_text(record.to_line() + "\n")
    assert read_ledger(tmp_path / "ledger.jsonl") == ({("weights", "up"): sum(sizes)}, 1)


def test_bytes_by_kind_and_direction_are_the_ledger(done: Result, out: Path) -> None:
    found, last = read_ledger(out / "ledger.jsonl")
    assert last == 6
    expected: dict[tuple[str, str], int] = {}
    for record in done.ledger.records:
        if record.what is Kind.OPTIMIZER:  # work alone
            continue
        key = (str(record.what), record.direction)
        expected[key] = expected.get(key, 0) + int(record.bytes.sum())
    assert found == expected
    with (out / "ledger.jsonl").open("a") as file:
        file.write(Record.to_line(done.ledger.records[0])[:40])  # still being written
    assert read_ledger(out / "ledger.jsonl") == (expected, last)


# --- several runs ---------------------------------------------------------------------------------


@pytest.fixture
def three(make_graph: MakeGraph, tmp_path: Path) -> list[Path]:
    """Two seeds of one method and one of another."""
    graph = make_graph()
    options: list[dict[str, Any]] = [{}, {"seed": 1}, {"method": "local"}]
    for number, given in enumerate(options):
        go(graph, **given, out=str(tmp_path / f"r{number}"))
    return [tmp_path / f"r{number}" for number in range(3)]


def test_runs_side_by_side(three: list[Path], tmp_path: Path) -> None:
    path = write_comparison(three, tmp_path / "c.html").path
    assert path == tmp_path / "c.html"
    page = read_page(path)
    assert page.titles[:7] == [
        "Scores",
        "Each run",
        "Scores of each class",
        "Learning",
        "Validation accuracy",
        "Training loss",
        "Test accuracy",
    ]
    rows = page.table("run", "best round")
    assert [row["run"] for row in rows] == ["fedavg, seed 0", "fedavg, seed 1", "local, seed 0"]
    for row, folder in zip(rows, three, strict=True):
        result = result_of(folder)
        for view, scores in result["test"].items():
            assert row[view] == ("-" if scores is None else f"{scores['accuracy']:.4f}")
        assert row["best round"] == str(result["best_round"])
    differ = page.table("run", "method")
    assert list(differ[0]) == [
        *("run", "method", "keep_optimizer", "seed", "partition_seed", "split_seed", "init_seed"),
        "hash of the partition",
    ]
    assert [row["run"] for row in differ] == [str(folder) for folder in three]
    looks = [s["look"] for s in page.data["figures"]["val"]["series"]]
    assert looks == ["color0 dash0", "color0 dash0", "color1 dash0"]  # seeds share a color
    for number, folder in enumerate(three):
        assert page.data["axes"][number]["round"] == [
            r["round"] for r in read_rounds(folder / "rounds.csv")
        ]


def test_runs_of_one_config_are_called_by_their_folders(three: list[Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(three[0], copy)
    page = read_page(write_comparison([three[0], copy], tmp_path / "c.html").path)
    assert [row["run"] for row in page.table("run", "best round")] == ["r0", "copy"]
    assert "They do not." in page.text
    page = read_page(write_comparison([three[0], three[0]], tmp_path / "c.html").path)
    assert [row["run"] for row in page.table("run", "best round")] == [str(three[0])] * 2


def test_runs_of_the_same_seeds_are_no_sample(three: list[Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(three[0], copy)
    page = read_page(write_comparison([three[0], copy, three[1]], tmp_path / "c.html").path)
    (row,) = next(t for t in page.tables if t[0][0] == "runs")[1:]
    assert row[-1] == "2 of 3; 1 of the same seeds"
    scores = [result_of(folder)["test"]["server"]["accuracy"] for folder in (three[0], three[1])]
    assert row[1] == f"{statistics.mean(scores):.4f} ± {statistics.stdev(scores):.4f}"


# --- the commands ---------------------------------------------------------------------------------


def test_the_command(
    three: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (three[0] / "report.html").unlink()
    assert run_app(["report", "r0"]) == 0
    assert capsys.readouterr().out == "written to r0/report.html\n"
    assert run_app(["report", "r0", "--out", "one.html"]) == 0
    assert Path("one.html").read_bytes() == Path("r0/report.html").read_bytes()
    assert run_app(["report", "r0", "r1", "r2"]) == 0
    assert run_app(["report", "r0", "r1", "r2", "--out", "several.html"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "written to comparison.html",
        "written to several.html",
    ]
    assert Path("comparison.html").read_bytes() == Path("several.html").read_bytes()


def test_a_page_needs_no_torch(done: Result, out: Path) -> None:
    code = (
        f"import sys; from silograph.cli import run_app; assert run_app(['report', {str(out)!r}]) "
        "== 0; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_the_page_of_a_result(done: Result, out: Path, tmp_path: Path) -> None:
    before = (out / "report.html").read_bytes()
    assert done.report(tmp_path / "mine.html") == tmp_path / "mine.html"
    assert (tmp_path / "mine.html").read_bytes() == before
    assert done.report() == out / "report.html"
    assert done.report(tmp_path / "new" / "deep" / "mine.html").read_bytes() == before


def test_a_result_without_a_folder_has_no_page(make_graph: MakeGraph) -> None:
    with pytest.raises(ConfigError, match=r"expected a run with a result folder for report\(\)"):
        go(make_graph(), rounds=1).report("x.html")


# --- mistakes -------------------------------------------------------------------------------------


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def remove(*paths: Path) -> None:
    for path in paths:
        path.unlink()


def cut(path: Path, lines: int) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (shutil.rmtree, "got run.json: No such file"),
    "no run.json": (lambda p: (p / "run.json").unlink(), "got run.json: No such file"),
    "a comparison": (
        lambda p: shutil.copytree(p, p / "runs") and (p / "run.json").rename(p / "x"),
        r"got run.json: No such file or directory; there are runs in .*/runs$",
    ),
    "damaged": (lambda p: halve(p / "run.json"), r"run\.json as a run writes it, got: \w+"),
    "a list": (lambda p: (p / "run.json").write_text("[]"), r"run\.json as .*, got: list: restore"),
    "other": (lambda p: (p / "run.json").write_text("{}"), "got run.json without 'config'"),
    "changed": (
        lambda p: (p / "run.json").write_text((p / "run.json").read_text() + " "),
        r"expected .*run\.json as the run has written it \(\w+\), got one that has changed \(\w+\)",
    ),
    "few clients": (lambda p: cut(p / "clients.csv", 2), r"expected .*clients\.csv as the run has"),
    "no result": (lambda p: halve(p / "result.json"), r"result\.json as a run writes it, got: \w+"),
    "words": (
        lambda p: (p / "rounds.csv").write_text("round,seconds\n1,x\n"),
        r"expected a table in .*rounds\.csv as a run writes it, got: could not convert .*: restore",
    ),
    "no simulation": (lambda p: (p / "simulation.json").unlink(), "got simulation.json: No such"),
    "bad ledger": (
        lambda p: (p / "ledger.jsonl").write_text("x\n"),
        r"ledger.*the line 'x",
    ),
    "no text": (
        lambda p: (p / "ledger.jsonl").write_bytes(b"\xff\n"),
        r"ledger\.jsonl as a run writes it, got: the line .*: restore the file from a copy",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_is_no_run_is_one_line(done: Result, out: Path, kind: str) -> None:
    damage, words = DAMAGE[kind]
    damage(out)
    with pytest.raises((DataError, ConfigError), match=words) as caught:
        write_report(out, out.parent / "new.html")
    assert str(out) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (out.parent / "new.html").exists()


CUT_SHORT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no rounds": (lambda p: remove(p / "rounds.csv"), "rounds up to 6 .*got no such file: "),
    "a header": (lambda p: cut(p / "rounds.csv", 1), "rounds up to 6 in .*got up to 0: restore"),
    "few rounds": (lambda p: cut(p / "rounds.csv", 3), "rounds up to 6 in .*got up to 2: restore"),
    "no ledger": (lambda p: remove(p / "ledger.jsonl"), "bytes up to round 6 .*no such file: "),
    "half a ledger": (lambda p: cut(p / "ledger.jsonl", 9), "bytes up to round 6 .*got [0-9,]+: "),
    "neither": (
        lambda p: remove(p / "rounds.csv", p / "ledger.jsonl"),
        r"in .*rounds\.csv, for result\.json says that the run is over, got no such file: restore",
    ),
}


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("kind", CUT_SHORT)
def test_a_finished_run_keeps_its_page_where_a_table_lacks_its_end(
    done: Result, out: Path, kind: str
) -> None:
    page = (out / "report.html").read_bytes()
    damage, words = CUT_SHORT[kind]
    damage(out)
    with pytest.raises(DataError, match=words) as caught:
        write_report(out)
    assert "\n" not in str(caught.value)
    assert (out / "report.html").read_bytes() == page


def test_scores_of_two_metrics_are_not_put_into_one_column(
    make_graph: MakeGraph, tmp_path: Path
) -> None:
    folders = [str(tmp_path / name) for name in ("by_accuracy", "by_f1")]
    for metric, folder in zip(("accuracy", "f1_macro"), folders, strict=True):
        go(make_graph(), rounds=1, metric=metric, out=folder)
    with pytest.raises(ConfigError) as caught:
        write_comparison(folders, tmp_path / "c.html")
    assert str(caught.value) == (
        f"expected runs of one metric, got accuracy in {folders[0]} and f1_macro in {folders[1]}: "
        "report runs of one task and one --metric together"
    )
    assert not (tmp_path / "c.html").exists()


def test_nothing_else_is_overwritten(done: Result, out: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.html").write_text("mine")
    for path in (tmp_path / "mine.html", tmp_path):
        with raises_code(ConfigError, "existing-output"):
            write_report(out, path)
        with raises_code(ConfigError, "existing-output"):
            write_comparison([out, out], path)
    assert (tmp_path / "mine.html").read_text() == "mine"
    with raises_code(ConfigError, "missing-option", option="folders"):
        write_comparison([], tmp_path / "new.html")


def test_a_full_disk_does_not_fail_a_run(
    make_graph: MakeGraph, out: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("silograph.experiment.report.write_report", full)
    with caplog.at_level(logging.WARNING, "silograph"):
        result = go(make_graph(), rounds=1, out=str(out))
    assert result.best_round == 1
    assert caplog.messages == [
        f"no report.html: No space left on device; later: silograph report {out}"
    ]


# --- parts of figures -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (1, 6, [1, 2, 3, 4, 5, 6]),
        (0.93, 1.0, [0.94, 0.96, 0.98, 1]),
        (-0.02, 0.004, [-0.02, -0.015, -0.01, -0.005, 0]),
        (1590170, 158973440, [50e6, 100e6, 150e6]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize("count", [0, 1, 2, 399, 400, 401, 12345])
def test_thinning_keeps_ends_and_what_it_is_told(count: int) -> None:
    keep = [count // 3] if count else []
    kept = thin_indices(count, keep)
    assert kept == sorted(set(kept))
    assert len(kept) <= 402
    if count:
        assert {0, count - 1, *keep} <= set(kept) <= set(range(count))


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 1])
def test_quantiles_are_numpys(share: float) -> None:
    for size in (1, 2, 7, 10):
        values = np.random.default_rng(size).random(size).tolist()
        assert quantile(values, share) == pytest.approx(float(np.quantile(values, share)))


def test_scores_of_each_class_are_in_the_result_and_on_the_page(done: Result, out: Path) -> None:
    page, rows = read_page(out / "report.html"), result_of(out)["by_class"]
    assert [row["class"] for row in rows] == list(done.class_scores)
    table = next(t for t in page.tables if t[0] == ["class", "test nodes", "precision", *REST])
    f1 = [row["f1"] for row in rows if row["f1"] is not None]
    assert sum(f1) / len(f1) == pytest.approx(done.test.server.f1_macro)  # type: ignore[union-attr]
    # On the page they are of the uncut view, as the confusion matrix beside them is.
    assert "Test scores of each class, uncut view" in page.text
    matrix = np.array(result_of(out)["confusion"])
    true, predicted = (np.repeat(ids.ravel(), matrix.ravel()) for ids in np.indices(matrix.shape))
    parts = precision_recall_fscore_support(
        true, predicted, labels=range(len(rows)), zero_division=np.nan
    )
    for row, shown, scores, nodes in zip(
        rows, table[1:], np.transpose(parts[:3]), parts[3], strict=True
    ):
        cells = ["-" if np.isnan(v) else f"{v:.4f}" for v in scores]
        assert shown == [row["class"], str(nodes), *cells]


def test_the_confusion_matrix_is_that_of_the_predictions(
    make_graph: MakeGraph, done: Result, out: Path
) -> None:
    page, matrix = read_page(out / "report.html"), result_of(out)["confusion"]
    assert done.confusion is not None
    assert done.confusion.tolist() == matrix
    assert done.model is not None
    assert done.cut is not None
    test = done.cut.split.test
    y, found = make_graph().y[test].numpy(), done.model.predict(make_graph())[test]
    for true, counts in enumerate(matrix):
        for predicted, count in enumerate(counts):
            assert count == ((y == true) & (found == predicted)).sum()
    (table,) = [t for t in page.tables if t[0][0] == "true class"]
    assert [row[1:] for row in table[1:]] == [[str(n) for n in counts] for counts in matrix]
    assert [row[0] for row in table[1:]] == table[0][1:] == list(done.class_scores)
    assert "There is no confusion matrix" not in page.text


def test_without_a_model_at_the_server_the_page_says_why_there_is_no_matrix(
    make_graph: MakeGraph, out: Path
) -> None:
    go(make_graph(), out=str(out), rounds=1, method="local")
    assert result_of(out)["confusion"] is None
    assert "There is no confusion matrix" in read_page(out / "report.html").text


STYLE = (Path(reading.__file__).parent / "templates" / "style.css").read_text(encoding="utf-8")
INK = ("ink", "faint", "server", "uncut", "personalized", "train", "one")


def luminance(color: Sequence[float]) -> float:
    """Relative luminance of a color of three parts in 0 to 1 (WCAG 2.2)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: Sequence[float], other: Sequence[float]) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark", "print"])
def test_colors_can_be_read_on_their_ground(scheme: str) -> None:
    """4.5 for text and 3 for lines and marks is what WCAG 2.2 asks for (AA)."""
    light, dark, paper = re.findall(r":root {(.*?)}", STYLE, re.DOTALL)
    text = {"light": light, "dark": light + dark, "print": light + paper}[scheme]
    found = {
        name: [int(value[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        for name, short in re.findall(r"--([\w]+): #([0-9a-f]+);", text)
        for value in [short if len(short) == 6 else "".join(2 * c for c in short)]
    }
    assert contrast([0, 0, 0], [1, 1, 1]) == pytest.approx(21)
    for ground in ("paper", "panel"):
        for name in (*INK, *(f"c{k}" for k in range(8))):
            least = 4.5 if name in INK[:2] else 3.0
            assert contrast(found[name], found[ground]) >= least, (name, ground)
    assert contrast(found["ink"], found["mark"]) >= 4.5
    full = [0.45 * a + 0.55 * b for a, b in zip(found["one"], found["paper"], strict=True)]
    assert contrast(found["ink"], full) >= 4.5  # a full cell of the confusion matrix
    assert "calc(.45 * var(--share))" in STYLE


@pytest.mark.parametrize(("clients", "told"), [(3, False), (20, True)])
def test_the_worst_tenth_needs_clients_enough(
    make_graph: MakeGraph, out: Path, clients: int, told: bool
) -> None:
    go(make_graph(), out=str(out), rounds=1, clients=clients, partition="random")
    assert ("the worst tenth is at" in read_page(out / "report.html").text) is told


def test_keys_that_have_no_say_are_left_out(make_graph: MakeGraph, tmp_path: Path) -> None:
    def keys(name: str, **options: Any) -> list[str]:
        go(make_graph(), out=str(tmp_path / name), rounds=1, **options)
        page = read_page(tmp_path / name / "report.html")
        table = next(t for t in page.tables if t[0] == ["key", "value", "meaning"])
        return [row[0] for row in table[1:]]

    adam, sgd = keys("adam", optimizer="adam"), keys("sgd", optimizer="sgd", patience=7)
    assert "momentum" not in adam
    assert "momentum" in sgd
    assert "patience" not in adam
    assert "patience" in sgd
    assert {"max_bytes", "max_seconds", "data_dir", "scale"}.isdisjoint(adam)
    assert {"lr", "optimizer", "rounds"} <= set(adam)


def test_a_comparison_s_folder_has_a_page_with_means_over_seeds(
    make_graph: MakeGraph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small: dict[str, Any] = {"clients": 3, "partition": "random", "rounds": 2, "hidden": 4}
    methods = ["fedavg", "local"]
    folder = tmp_path / "c"
    table = sg.compare(make_graph(), methods=methods, seeds=3, processes=0, out=folder, **small)
    assert run_app(["report", str(folder)]) == 0
    assert str(folder / "report.html") in capsys.readouterr().out
    page = read_page(folder / "report.html")
    means = next(t for t in page.tables if t[0][:2] == ["method", "server"])
    (last,) = table.constants
    for row, found in zip(means[1:], [*table.rows, last], strict=True):
        assert row[0] == found.get("method", "largest class")
        for view, cell in zip(("server", "uncut", "personalized"), row[1:4], strict=True):
            mean, std = (found.get(f"{view}_{n}", last[n]) for n in ("mean", "std"))
            star = "*" if view in found.get("best", ()) else ""
            assert cell == ("-" if mean is None else f"{mean:.4f} ± {std:.4f}{star}")
            assert cell in table.summary(200)  # one unit and one mark in the terminal and here
        assert row[4] == ("3" if "method" in found else "-")
    ended = page.table("run", "judged in")
    assert [row["judged in"] for row in ended] == ["server"] * 3 + ["personalized"] * 3
    assert "Each of the 3 seeds has a partition of its own." in page.text
    tested = page.table("method", "p, Holm")
    for tests, found in zip(tested, table.rows, strict=True):
        assert tests["method"] == found["method"]
        reference = found["method"] == found["reference"]
        assert (tests["difference"] == "reference") == reference
        assert (tests["p"] == "-") == reference
        if not reference:  # in the unit of the scores above it
            assert tests["difference"] == f"{found['difference']:+.4f}"
            low, _, high = tests["95 % interval"].split()
            assert (low, high) == (f"{found['low']:+.4f}", f"{found['high']:+.4f}")
    assert all(note in page.text for note in table.notes)
    results = [result_of(run) for run in comparison_runs(folder)]
    shown = [t for t in page.tables if t[0][0] == "class"]
    assert [[row[1] for row in t[1:]] for t in shown] == [
        [str(row["nodes"]) for row in result["by_class"]] for result in results
    ]
    matrices = [
        [[int(v) for v in row[1:]] for row in t[1:]] for t in page.tables if t[0][0] == "true class"
    ]
    assert matrices == [r["confusion"] for r in results if r["confusion"]]
    assert len(matrices) == 3  # local has no server's model
    for what in ("Test scores of each class", "Confusion matrix of test nodes"):
        assert page.text.count(f"{what}, uncut view") == 3
    first = next((folder / "runs").glob("fedavg-0-*"))
    (first / "result.json").unlink()
    (first / "diverged.txt").write_text("why")
    page = read_page(write_comparison(comparison_runs(folder), folder / "report.html").path)
    means = next(t for t in page.tables if t[0][0] == "runs")
    assert means[1][5] == "2 of 3; 1 diverged"


def test_a_comparison_without_runs_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "compare.json").write_text("{}")
    with pytest.raises(DataError, match=r"expected runs in the comparison .*, got none: go on"):
        comparison_runs(tmp_path)
    assert comparison_runs(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("run.json", "config", 5),
        ("run.json", "method", []),
        ("run.json", "versions", "x"),
        ("run.json", "metrics", None),
        ("run.json", "dataset", 3),
        ("run.json", "given", [1]),
        ("run.json", "model", 1),
        ("result.json", "val", 7),
        ("result.json", "bytes", []),
        ("result.json", "best_round", {}),
        ("simulation.json", "labels", "x"),
    ],
)
def test_fields_of_other_types_are_one_line(
    done: Result, out: Path, name: str, key: str, value: object
) -> None:
    del done
    file = out / name
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    try:
        write_report(out)
    except DataError as error:
        line = str(error)
    else:
        line = ""  # a page that shows nothing of the field
    assert "\n" not in line


@pytest.mark.parametrize("name", ["run.json", "rounds.csv", "clients.csv", "ledger.jsonl"])
@pytest.mark.parametrize("data", [b"\xff\xfe", b"\0\0\0", b"a,b\n1\n", b"[" * 100_000])
def test_damaged_files_are_one_line(done: Result, out: Path, name: str, data: bytes) -> None:
    del done
    (out / name).write_bytes(data)
    try:
        write_report(out)
    except DataError as error:
        assert "\n" not in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    ("seeds_and_cuts", "follow"),
    [
        (["0a", "0a", "1b"], True),  # two methods of one seed have one partition
        (["0a", "0b", "1c"], False),
        (["0a", "1a", "1b"], False),  # as many partitions as seeds, and none is a seed's own
        (["0a", "0b", "1a", "1b"], False),
    ],
)
def test_partitions_follow_seeds_or_not(seeds_and_cuts: list[str], follow: bool) -> None:
    runs: list[Any] = [
        SimpleNamespace(about={"config": {"seed": each[0]}, "partition_hash": each[1]})
        for each in seeds_and_cuts
    ]
    assert cuts_follow_seeds(runs) is follow


def test_ticks_of_large_and_of_whole_numbers_are_short() -> None:
    """There is room for seven signs beside a figure."""
    large = [tick.text for tick in Scale(1.7e7, 5.2e7).marks()]
    assert large == ["20 M", "30 M", "40 M", "50 M"]
    axes = [{"round": [1.0, 2.0, 3.0]}]
    whole = curves("a", [Curve("a", "train", [4.0, 5.0, 4.0])], axes)
    assert whole is not None
    assert [tick.text for tick in whole["ticks"]] == ["4", "5"]
    parts = curves("a", [Curve("a", "train", [4.0, 5.5, 4.0])], axes)
    assert parts is not None
    assert "4.5" in [tick.text for tick in parts["ticks"]]
    assert curves("a", [Curve("a", "train", [1.0, float("nan"), 2.5])], axes) is not None


def test_what_is_alike_in_all_rounds_is_a_sentence_and_no_curve() -> None:
    rows: list[Row] = [
        {"round": t, "fact_batches": 10, "fact_age": t, "fact_late": 3 if t > 1 else None}
        for t in (1, 2, 3)
    ]
    run: Any = SimpleNamespace(
        rows=rows, about={"method": {"facts": {"batches": "At each client."}}}
    )
    first: Any = SimpleNamespace(rows=rows[:1])
    assert constant_facts(run) == [("batches", "10", "At each client.")]
    assert constant_facts(first) == []
    axes: list[dict[str, list[float | None]]] = [{"round": [1.0, 2.0, 3.0]}]
    drawn = [figure["title"] for figure in facts_of(run, rows, axes, None, {"fact_batches"})]
    assert drawn == ["age", "late"]


@pytest.mark.law(sample=6)
@pytest.mark.parametrize(
    "settings",
    [
        {"method": "fedais", "model": "sage"},
        {"method": "fedais", "model": "sage", "options": {"interval": "bound"}},
        {"method": "fedgraph"},
        {"method": "gcfl"},
        {"method": "fedpub"},
        {"method": "label_guided", "min_silos_per_row": 2},
        {"method": "fedavg", "neighbors": "fedgrains", "batch_size": 8},
        {
            "method": "fedavg",
            "participation": 0.5,
            "evaluate_clients": "participants",
            "seed": 3,
        },
    ],
    ids=lambda settings: f"{settings['method']} {settings.get('options', '')}",
)
def test_a_page_says_of_each_figure_what_it_is(
    make_graph: MakeGraph, tmp_path: Path, settings: dict[str, Any]
) -> None:
    paths: dict[str, Any] = {"out": tmp_path / "run"}
    sg.run(make_graph(60), clients=3, rounds=2, **settings, **paths)
    run = read_run(tmp_path / "run")
    names = [name.removeprefix("fact_") for name in run.rows[0] if name.startswith("fact_")]
    assert names
    for name in names:
        assert fact_text(run, name)[-1:] == ".", name
