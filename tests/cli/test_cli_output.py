"""Laws of output: JSON for programs, tables that fit a terminal, the figures of real data."""

import dataclasses
import io
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import silograph as sg
from commands import QUICK, RESULT_KEYS, Capture, MakeGraph, everything, printed, save
from mistakes import raises_code
from rating_graphs import write_ratings
from silograph.cli import run_app
from silograph.cli.printing import print_parts
from silograph.core.config import make_config
from silograph.core.errors import ConfigError
from silograph.core.run_file import read_toml
from silograph.experiment.report.reading import size_text
from silograph.experiment.run import result as make_result
from silograph.experiment.run.run import run
from silograph.experiment.terminal_table import console_to, print_number_table, printed_text
from silograph.graph.datasets import DATASETS
from silograph.methods import FEDAIS, METHODS

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"

SCORES = ["accuracy", "accuracy_client_mean", "f1_macro", "f1_micro", "auc"]

pytestmark = pytest.mark.usefixtures("work")


# --- output ---------------------------------------------------------------------------------------


def test_json_is_one_object_and_nothing_else(work: Path, capsys: Capture) -> None:
    text = printed(capsys, "run", "g.npz", *QUICK, "--seed", "4", "--json")
    assert text.count("\n") == 1
    values = json.loads(text)
    assert list(values) == RESULT_KEYS
    shown = [values[k] for k in RESULT_KEYS[:6]]
    assert shown == [str(work / "g.npz"), "fedavg", 3, "random", 2, 4]  # a path from anywhere
    assert list(values["test"]) == ["server", "uncut", "personalized"]
    for scores in values["test"].values():
        assert list(scores) == SCORES
        assert all(0 <= value <= 1 for value in scores.values())
    assert values["best_round"] in (1, 2)
    folder = work / values["result_dir"]
    assert folder.parent == work / "runs"
    assert folder.name.startswith("g-fedavg-2")
    written = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert {k: written[k] for k in RESULT_KEYS} == values


def test_text_is_text_in_a_notebook(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """There rich shows what is printed at once, so `print(result)` printed an empty line."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert printed_text(lambda console: console.print("accuracy"), 80) == "accuracy"
    assert capsys.readouterr().out == ""


def test_json_where_a_view_does_not_exist(capsys: Capture) -> None:
    text = printed(capsys, "run", "g.npz", *QUICK, "--method", "local", "--json", "--out", "x")
    values = json.loads(text)
    assert values["test"]["server"] is values["test"]["uncut"] is None
    assert list(values["test"]["personalized"]) == SCORES
    assert values["result_dir"] == "x"


def test_python_flags_and_file_agree(capsys: Capture) -> None:
    text = 'dataset = "g.npz"\nmethod = "fedavg"\nrounds = 2\nclients = 3\n'
    text += 'partition = "random"\nhidden = 4\n'
    Path("run.toml").write_text(text, encoding="utf-8")
    by_flags = json.loads(printed(capsys, "run", "g.npz", *QUICK, "--json"))
    by_file = json.loads(printed(capsys, "run", "--config", "run.toml", "--json"))
    options: dict[str, Any] = {"method": "fedavg", "rounds": 2, "clients": 3, "hidden": 4}
    options["partition"] = "random"
    by_python = sg.run(sg.load("g.npz"), **options)
    assert by_flags["test"] == by_file["test"] == by_python.to_dict()["test"]
    assert by_flags["best_round"] == by_file["best_round"] == by_python.best_round
    config = read_toml(f"{by_flags['result_dir']}/config.toml")
    again = run(config=make_config(config))
    assert again.to_dict()["test"] == by_flags["test"]


def test_the_same_millisecond_gives_two_folders(
    work: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = SimpleNamespace(
        time=lambda: 1700000000.0425, localtime=time.localtime, strftime=lambda *_: "TIME"
    )
    monkeypatch.setattr("silograph.experiment.run.result_folder.time", frozen)
    for seed in ("1", "2"):
        printed(capsys, "run", "g.npz", *QUICK, "--seed", seed)
    names = ["g-fedavg-TIME-042", "g-fedavg-TIME-042-2"]
    assert sorted(path.name for path in (work / "runs").iterdir()) == names
    seeds = [json.loads((work / "runs" / n / "result.json").read_text())["seed"] for n in names]
    assert seeds == [1, 2]


def test_one_seed_over_the_file_of_a_run_is_all_seeds(capsys: Capture) -> None:
    """The file has what was given, so that what was not given still follows."""
    printed(capsys, "run", "g.npz", *QUICK, "--seed", "4", "--out", "first")
    file = ["--config", "first/config.toml"]
    second = json.loads(printed(capsys, "run", *file, "--seed", "1", "--out", "second", "--json"))
    third = json.loads(
        printed(capsys, "run", "g.npz", *QUICK, "--seed", "1", "--out", "third", "--json")
    )
    assert second["test"] == third["test"]
    runs = [json.loads(Path(name, "run.json").read_text()) for name in ("second", "third")]
    assert runs[0] == runs[1]
    seeds = ("seed", "partition_seed", "split_seed", "init_seed")
    assert [runs[0]["same"][f"config {name}"] for name in seeds] == ["1"] * 4
    printed(capsys, "run", *file, "--clients", "5", "--method", "local", "--out", "fourth")
    same = json.loads(Path("fourth", "run.json").read_text())["same"]
    assert (same["config block_size"], same["config clients"]) == ("5", "5")
    assert same["config keep_optimizer"] == repr(METHODS["local"].needs.keep_optimizer)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("method", ["fedavg", "local"])
@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--evaluation-min-count", "100000"), "no client sent validation counts"),
        (("--split", "0.5/0/0.5"), "no validation nodes"),
    ],
)
@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ((), None),
        (("--patience", "1"), "patience"),
        (("--patience", "1", "--target", "0.1"), "patience and target"),
    ],
)
def test_without_validation_scores_none_picks_the_round(
    capsys: Capture,
    method: str,
    flags: tuple[str, ...],
    why: str,
    limits: tuple[str, ...],
    named: str | None,
) -> None:
    text = printed(capsys, "run", "g.npz", *QUICK, "--method", method, *flags, *limits)
    assert f"best round 2 of 2 (the last one: {why})" in text
    line = "could not stop the run: there were no validation scores to read"
    assert (line in " ".join(text.split())) == (named is not None)
    if named is not None:
        assert f"{named} {line}" in " ".join(text.split())


def test_the_table_of_a_run(capsys: Capture) -> None:
    text = printed(capsys, "run", "g.npz", *QUICK, "--out", "x", "--dtype", "float64")
    result = json.loads(Path("x", "result.json").read_text(encoding="utf-8"))
    for view, scores in result["test"].items():
        cells = [f"{scores[name]:.4f}" for name in SCORES]
        assert " ".join([view, *cells]) in [" ".join(line.split()) for line in text.splitlines()]
    assert f"best round {result['best_round']} of 2 (by validation)" in text
    assert "written to x\n" in text
    assert f"peak memory {size_text(result['peak_memory_bytes'])}\n" in text
    sizes = [f"{n} {size_text(s)}" for n, s in result["bytes"]["by_kind"].items()]
    assert f"({', '.join(sizes)})" in " ".join(text.split())
    text = printed(capsys, "run", "g.npz", *QUICK, "--out", "y", "--split", "0.5/0/0.5")
    assert "best round 2 of 2 (the last one: no validation nodes)" in text


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("name", ["[red]a[", "[ b]", ":smile:"])
def test_names_are_shown_as_they_are(make_graph: MakeGraph, capsys: Capture, name: str) -> None:
    silo = np.array([name, "a"])[np.arange(60) % 2]
    save(f"{name}.npz", make_graph(), silo=silo)
    text = printed(capsys, "run", f"{name}.npz", "--rounds", "1", "--partition", "silo")
    title = f"{name}, fedopt, 2 clients (silo)"
    assert "".join(title.split()) in "".join(text.split())  # a long path may be wrapped
    assert f"written to runs/{name}-fedopt-2" in text
    text = printed(capsys, "partition", f"{name}.npz", "--partition", "silo")
    assert f"\n{name} " in text


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("columns", [80, 140])
def test_tables_fit_the_terminal(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    commands = [
        ["run", "g.npz", *QUICK, "--out", "x"],
        ["partition", "g.npz", "--clients", "12"],
        ["methods"],
        ["datasets"],
        *([name, "--help"] for name in ("run", "partition", "methods", "datasets")),
        ["run", "--help-all"],
    ]
    for command in commands:
        text = printed(capsys, *command)
        assert max(len(line.rstrip()) for line in text.splitlines()) <= columns
        assert "…" not in text
        assert "\x1b" not in text
    header = printed(capsys, "partition", "g.npz", "--clients", "12").splitlines()[1]
    assert "internal edges  cross edges" in header  # ten and more clients on one line each


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("columns", [40, 80, 140])
def test_tables_of_rankings_fit_the_terminal(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    write_ratings(Path("r"))
    flags = ["--model", "rating_profiles", "--relevant", "4", "--rounds", "1", "--clients", "2"]
    text = printed(capsys, "run", "r", *flags, "--method", "fedavg", "--out", "x")
    told = json.loads(Path("x", "result.json").read_text(encoding="utf-8"))["test"]["server"]
    shown = "\n".join(line.partition("server ")[2] for line in text.splitlines())
    for name in ("rmse", "rmse_seen", "rmse_client_mean", "mae", "recall@10", "ndcg@10"):
        assert f"{told[name]:.4f}" in shown
    assert ("RMSE client mean  recall@10  NDCG@10" in text) == (columns == 140)
    compare = ["compare", "r", *flags, "--methods", "fedavg,fedper", "--seeds", "2", "--out", "c"]
    for table in (text, printed(capsys, *compare, "--processes", "0", "--metric", "ndcg@10")):
        assert max(len(line.rstrip()) for line in table.splitlines()) <= columns
        assert "…" not in table


@pytest.mark.parametrize("width", [23, 30, 43, 44, 56, 57, 200])
def test_nothing_of_a_table_is_cut_off(width: int) -> None:
    """Columns that do not fit follow below, with the first one again."""
    columns = ["name", "two words", "number", "a longer header", "last"]
    rows = [["first one", "1.25", "-4", "3", "123456789"], ["second", "22", "33", "44", "55"]]
    file = io.StringIO()
    print_number_table(console_to(file, width), columns, rows, "title")
    assert max(len(line.rstrip()) for line in file.getvalue().splitlines()) <= width
    words = file.getvalue().split()
    tables = words.count("name")
    for row in (columns, *rows):
        assert words.count(row[0].split()[0]) == tables
        assert all(words.count(word) == 1 for cell in row[1:] for word in cell.split())
    assert (tables == 1) == (width >= 44)
    assert ("a longer header" in file.getvalue()) == (width >= 57)


@pytest.mark.parametrize("columns", [["name"], ["name", ""]])
def test_tables_of_few_columns_and_words(columns: list[str]) -> None:
    file = io.StringIO()
    print_number_table(console_to(file, 40), columns, [["first", "1.5"][: len(columns)]], "title")
    assert [line.split()[0] for line in file.getvalue().splitlines() if line.strip("─ ")] == [
        "title",
        "name",
        "first",
    ]


def test_the_figures_of_a_cut(capsys: Capture, make_graph: MakeGraph, work: Path) -> None:
    before = everything(work)
    text = printed(capsys, "partition", "g.npz", "--clients", "4", "--seed", "3", "--json")
    assert text.count("\n") == 1
    values = json.loads(text)
    assert list(values) == [
        *("dataset", "partition", "clients", "hash", "nodes", "nodes_held", "copies"),
        *("edges", "edges_cut", "cut_share", "label_distance", "label_divergence"),
        *("degree_distance", "clustering", "uncut_clustering", "homophily", "test_leaks"),
        "by_client",
    ]
    graph = make_graph()
    rows = values["by_client"]
    assert [row["client"] for row in rows] == [f"client_0{c}" for c in range(4)]
    assert sum(row["nodes"] for row in rows) == graph.num_nodes
    assert values["edges"] == graph.num_edges
    internal = sum(row["internal_edges"] for row in rows)
    assert internal + values["edges_cut"] == graph.num_edges
    assert sum(row["cross_edges"] for row in rows) == 2 * values["edges_cut"]
    assert sum(row[part] for row in rows for part in ("train", "val", "test")) == 60
    # It is the cut that a run makes.
    assert values["hash"] == run("g.npz", clients=4, seed=3, rounds=1).partition_hash
    table = printed(capsys, "partition", "g.npz", "--clients", "4", "--seed", "3")
    assert f"edges cut: {values['edges_cut']}\n" in table
    assert f"partition hash: {values['hash']}\n" in table
    for row in rows:
        cells = " ".join(str(value) for name, value in row.items() if name != "clustering")
        assert cells in [" ".join(line.split()) for line in table.splitlines()]
    assert everything(work) == before


def test_a_quick_look_at_a_cut_leaves_clustering_out(capsys: Capture) -> None:
    command = ["partition", "g.npz", "--clients", "4", "--json"]
    full = json.loads(printed(capsys, *command))
    quick = json.loads(printed(capsys, *command, "--quick"))
    assert full["clustering"] > 0
    assert (quick["clustering"], quick["uncut_clustering"]) == (None, None)
    assert "clustering: -\n" in printed(capsys, *command[:-1], "--quick")
    for values in (full, quick):
        for name in ("clustering", "uncut_clustering"):
            del values[name]
    for row in full["by_client"]:
        del row["clustering"]
    assert full == quick


def test_an_overlapping_cut(capsys: Capture, make_graph: MakeGraph) -> None:
    command = ["partition", "g.npz", "--partition", "metis_overlapping", "--drop-edges", "0.5"]
    values = json.loads(printed(capsys, *command, "--json"))
    assert values["clients"] == 10
    assert (
        values["copies"]
        == sum(row["nodes"] for row in values["by_client"]) / (values["nodes_held"])
    )
    assert 1 < values["copies"] < 5
    assert values["nodes_held"] < values["nodes"] == make_graph().num_nodes


def test_the_seed_of_a_cut(capsys: Capture) -> None:
    def cut(*flags: str) -> Any:
        command = ["partition", "g.npz", "--clients", "4", "--partition", "random", "--json"]
        return json.loads(printed(capsys, *command, *flags))["hash"]

    assert cut("--partition-seed", "1") == cut("--seed", "1") != cut()
    assert cut("--split-seed", "1") == cut()


def test_many_clients_are_not_all_shown(capsys: Capture) -> None:
    text = printed(capsys, "partition", "g.npz", "--clients", "50", "--split", "1/0/0")
    assert text.count("client_") == 40
    assert "... and 10 more clients (all of them: --json)" in text


def test_a_cut_of_silos(capsys: Capture, make_graph: MakeGraph) -> None:
    save("s.npz", make_graph(), silo=np.array(["east", "north"])[np.arange(60) % 2])
    values = json.loads(printed(capsys, "partition", "s.npz", "--partition", "silo", "--json"))
    assert [row["client"] for row in values["by_client"]] == ["east", "north"]
    assert values["clients"] == 2


def test_a_client_without_labels_is_no_mistake(capsys: Capture, make_graph: MakeGraph) -> None:
    graph = make_graph()
    silo = np.arange(60) % 3
    save("s.npz", graph, silo=silo, y=np.where(silo == 2, -1, graph.y.numpy()))
    command = ["run", "s.npz", "--partition", "silo", "--rounds", "2", "--hidden", "4"]
    text = printed(capsys, *command, "--json", "--out", "x")
    assert "NaN" not in text
    assert json.loads(text)["clients"] == 3
    for path in (*Path("x").glob("*.json"), *Path("x").glob("*.csv")):
        assert "nan" not in path.read_text(encoding="utf-8").lower()


def test_the_list_of_methods(capsys: Capture) -> None:
    text = printed(capsys, "methods").replace("\n      ", " ")  # what did not fit into a line
    for name, method in METHODS.items():
        assert f"\n{name}: {method.title}\n  {method.reference}\n" in f"\n{text}"
        entry = text.partition(f"\n{name}: {method.title}\n")[2].partition("\n  --option")[0]
        for option in dataclasses.fields(method.options):
            value = f"{option.name}={str(option.default).lower()}"
            usual = {f.name: f.default for f in dataclasses.fields(FEDAIS.options)}
            if method.reference == FEDAIS.reference and name != "fedais":
                assert "options of fedais, with " in entry
                assert (value in re.split(", |\n| ", entry)) == (
                    usual[option.name] != option.default
                )
            elif name != "fedsage_local":
                assert f"  --option {value}  " in text
        assert f"Caution: {method.caution}\n" in text or not method.caution
    assert "options of fedsageplus, with cross_epochs=0\n" in text
    assert "clients: sgd 0.1, 10 local epochs in a round\n" in text
    assert "clients: adam 0.01, 1 local epoch in a round, optimizer state kept between" in text


def test_methods_that_are_named(capsys: Capture) -> None:
    everything = printed(capsys, "methods")
    one = printed(capsys, "methods", "fedprox")
    assert one in everything
    assert one.startswith("fedprox: ")
    assert "--option mu=0.1" in one
    assert printed(capsys, "methods", "fedprox", "local", "fedprox") == one + printed(
        capsys, "methods", "local"
    )
    preset = printed(capsys, "methods", "stale")  # whose options are those of one not shown
    assert "  --option halo=all  " in preset
    assert "options of" not in preset


def test_the_list_of_datasets(capsys: Capture) -> None:
    words = printed(capsys, "datasets").split()
    assert set(DATASETS) <= set(words)


# --- real data ------------------------------------------------------------------------------------

needs_data = pytest.mark.skipif(not SHARED.is_dir(), reason=f"no data in {SHARED}")


@needs_data
@pytest.mark.parametrize(
    ("method", "view", "least"),
    [(None, "server", 0.8), (None, "personalized", 0.8), ("fedavg", "personalized", 0.6)],
)
def test_the_run_of_the_manual(
    capsys: Capture, method: str | None, view: str, least: float
) -> None:
    """`silograph run cora --data-dir ... --clients 10 --partition metis`, and FedAvg."""
    data = ["cora", "--data-dir", str(SHARED)]
    flags = ["--clients", "10", "--partition", "metis", *(["--method", method] if method else [])]
    flags += ["--rounds", "20"]
    values = json.loads(printed(capsys, "run", *data, *flags, "--json"))
    shown = [values[k] for k in RESULT_KEYS[:6]]
    assert shown == ["cora", method or "fedopt", 10, "metis", 20, 0]
    assert values["test"][view]["accuracy"] > least  # the largest class holds .30
    cut = json.loads(printed(capsys, "partition", *data, *flags[:4], "--json"))
    assert (cut["clients"], cut["edges"]) == (10, 5278)
    assert sum(row["nodes"] for row in cut["by_client"]) == 2708
    assert cut["cut_share"] < 0.13
    by_path = json.loads(
        printed(capsys, "run", str(SHARED / "cora.npz"), *flags[:-2], "--rounds", "1", "--json")
    )
    by_name = json.loads(printed(capsys, "run", *data, *flags[:-2], "--rounds", "1", "--json"))
    assert by_path["test"] == by_name["test"]


@needs_data
@pytest.mark.parametrize(
    ("name", "clients", "bits"),
    [
        ("webkb", 4, 5),
        ("twitch", 7, 2),
        ("citation_domains", 3, 5),
        ("facebook100_20schools", 20, 2),
    ],
)
def test_real_silos(capsys: Capture, name: str, clients: int, bits: int) -> None:
    command = ["run", name, "--data-dir", str(SHARED), "--partition", "silo", "--hidden", "4"]
    values = json.loads(printed(capsys, *command, "--rounds", "1", "--json", "--out", "x"))
    assert (values["dataset"], values["clients"]) == (name, clients)
    assert None not in values["test"]["uncut"].values()
    about = json.loads(Path("x", "run.json").read_text(encoding="utf-8"))
    assert about["dataset"]["classes"] == bits
    with np.load(SHARED / f"{name}.npz") as file:
        names = file["silo_names"].tolist()
    rows = Path("x", "clients.csv").read_text(encoding="utf-8").splitlines()[1:]
    assert [row.split(",")[0] for row in rows] == names


@needs_data
def test_the_public_split_of_planetoid(capsys: Capture) -> None:
    command = ["partition", "cora", "--data-dir", str(SHARED), "--split", "public", "--json"]
    rows = json.loads(printed(capsys, *command))["by_client"]
    assert [sum(row[part] for row in rows) for part in ("train", "val", "test")] == [140, 500, 1000]


@needs_data
@pytest.mark.parametrize("name", ["epinions", "ciao"])
def test_ratings_need_a_model_for_them(capsys: Capture, work: Path, name: str) -> None:
    before = everything(work)
    assert run_app(["run", str(SHARED / f"{name}.npz"), "--model", "gcn"]) == 2
    shown = capsys.readouterr()
    assert "expected a model for ratings of users and items, got gcn" in shown.err
    assert shown.err.count("\n") == 1
    assert everything(work) == before


def test_a_complete_run_says_so_and_shows_its_result(
    work: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = printed(capsys, "run", "g.npz", *QUICK, "--quiet", "--out", "x")
    path = Path("x/result.json")
    told = path.read_text()
    memory = json.loads(told)["peak_memory_bytes"]
    # Shown is the memory of the process that ran it.
    monkeypatch.setattr(make_result, "peak_memory_bytes", lambda: 12345)
    assert run_app(["resume", "x"]) == 0
    shown = capsys.readouterr()
    assert shown.out == first
    assert shown.err.splitlines()[-1] == "the run in x was complete: nothing was trained"
    assert run_app(["resume", "x", "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    for damaged in (told[:-20], "[]", told.replace(f"{memory}", "Infinity")):
        path.write_text(damaged)
        assert run_app(["resume", "x"]) == 2
        said = capsys.readouterr().err
        assert "x/result.json" in said
        assert said.endswith("remove the file, and resume writes it anew\n")


def test_a_run_goes_on_that_could_not_begin_today(
    work: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Selectors were once allowed where clients train alone."""
    flags = [*QUICK[2:], "--method", "local", "--selector", "ucb", "--quiet", "--out", "x"]
    with monkeypatch.context() as patch:
        patch.setattr("silograph.experiment.resolve.resolve.check_selected", lambda parts: None)
        first = printed(capsys, "run", "g.npz", *flags)
    assert printed(capsys, "resume", "x", "--quiet") == first
    assert run_app(["run", "g.npz", *flags[:-1], "y"]) == 2


def test_parts_are_listed_by_name_and_by_kind(capsys: pytest.CaptureFixture[str]) -> None:
    print_parts(["fedgrains"])
    text = capsys.readouterr().out
    assert "--neighbors NAME" in text
    assert "--option k=32" in text
    assert "fanout:" not in text
    print_parts(["neighbors"])
    text = capsys.readouterr().out
    assert "fanout:" in text
    assert "--model NAME" not in text
    with raises_code(
        ConfigError, "unknown-name", what="part", got="fedgrain", suggestion="fedgrains"
    ):
        print_parts(["fedgrain"])
