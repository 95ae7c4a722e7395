"""Laws of `compare`: cells are plain runs, pairs share their cut, figures are those of NumPy."""

import builtins
import json
import re
import shutil
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import silograph as sg
from commands import save
from conftest import planted_graph
from forked import completed
from mistakes import raises_code
from rating_graphs import rating_graph
from runs import FAST, MakeGraph, files_of
from silograph.core.config import make_config
from silograph.core.errors import ConfigError, DataError, SilographError
from silograph.experiment.report import comparison_runs, write_comparison
from silograph.experiment.result_files import DIGEST
from silograph.methods import METHODS as METHODS_BY_NAME
from silograph.methods.base import Caution
from silograph.study.compare import resume_comparison
from silograph.study.comparison import COST_COLUMNS, Comparison

SHORT = {k: v for k, v in FAST.items() if k != "method"} | {"rounds": 3}
METHODS = ["local", "fedavg", "fedopt"]


def lines_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(text) for text in (folder / "compare.jsonl").read_text().splitlines()]
    return [
        {
            k: v
            for k, v in line.items()
            if k not in ("seconds", "compile_seconds", "peak_memory_bytes", DIGEST)
        }
        for line in lines
    ]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("compared") / "c"
    given: dict[str, Any] = {k: v for k, v in SHORT.items() if k != "clients"}
    given |= {"over": {"clients": [3, 5]}, "options": {"fedopt": {"server_lr": 0.02}}}
    graph = planted_graph()
    return sg.compare(graph, methods=METHODS, seeds=[0, 4], processes=0, out=folder, **given)


# --- cells ----------------------------------------------------------------------------------------


def test_cells_are_plain_runs(compared: Comparison, make_graph: MakeGraph) -> None:
    assert len(compared.lines) == 12
    for cell, line in zip(compared.cells, compared.lines, strict=True):
        assert line is not None
        labels = cell.labels
        options = {"server_lr": 0.02} if labels["method"] == "fedopt" else {}
        given: dict[str, Any] = SHORT | dict(labels)
        plain = sg.run(make_graph(), **given, options=options)
        for view in ("server", "uncut", "personalized"):
            scores = getattr(plain.test, view)
            assert line["test"][view] == (None if scores is None else dict(scores))
        assert line["bytes"]["total"] == plain.bytes
        assert line["flops"] == plain.flops
        assert line["best_round"] == plain.best_round


def test_options_of_parts_are_varied_as_fields_are(make_graph: MakeGraph, tmp_path: Path) -> None:
    """Runs are those with the option; a method that lacks it is alike for all values."""
    over: dict[str, Any] = {"mu": [0.05, 2.0], "selector.least_clients": [1, 2]}
    base = {**SHORT, "config": make_config({"options": {"method.mu": 9.0}, "method": "fedprox"})}
    told = sg.compare(
        make_graph(), methods=["fedavg", "fedprox"], seeds=[1], over=over, processes=0, **base
    )
    shown = [tuple(row[key] for key in ("method", *over)) for row in told.rows]
    pairs = [(mu, least) for mu in (0.05, 2.0) for least in (1, 2)]
    assert shown == [
        *(("fedavg", None, least) for least in (1, 2)),
        *(("fedprox", mu, least) for mu, least in pairs),
    ]
    assert list(told.arms) == [
        *(f"fedavg, selector.least_clients={least}" for least in (1, 2)),
        *(f"fedprox, mu={mu}, selector.least_clients={least}" for mu, least in pairs),
    ]
    for row in told.rows:
        options = {"selector.least_clients": row["selector.least_clients"]}
        options |= {"mu": row["mu"]} if row["method"] == "fedprox" else {}
        plain = sg.run(make_graph(), **SHORT, method=row["method"], seed=1, options=options)
        assert plain.test.server is not None
        assert row["server_mean"] == plain.test.server.accuracy
    assert not [note for note in told.notes if "without option" in note]
    assert len(told.cells) == 6


def test_options_of_parts_are_given_to_all_methods(make_graph: MakeGraph) -> None:
    """An option of the method itself comes first."""
    options: dict[str, Any] = {
        "partition": {"halve": True},
        "selector": {"least_clients": 2},
        "fedprox": {"selector.least_clients": 1},
    }
    given: dict[str, Any] = {**SHORT, "partition": "louvain", "participation": 0.5}
    methods = ["fedavg", "fedprox"]
    told = sg.compare(
        make_graph(), methods=methods, seeds=[1], options=options, processes=0, **given
    )
    for cell, least in zip(told.cells, (2, 1), strict=True):
        found = {name.rpartition(".")[2]: value for name, value in cell.config.options.items()}
        assert found == {"halve": True, "least_clients": least}
    with raises_code(
        ConfigError,
        "unknown-name",
        what="option",
        got="partition.halves",
        suggestion="partition.halve",
    ):
        sg.compare(make_graph(), methods=methods, options={"partition": {"halves": 1}}, **given)


def test_varied_options_of_a_sampler_resume(tmp_path: Path, make_graph: MakeGraph) -> None:
    save(tmp_path / "g.npz", make_graph())
    given: dict[str, Any] = SHORT | {"kernels": "auto", "rounds": 1, "batch_size": 8}
    given |= {"over": {"neighbors": ["full", "fedgrains"], "neighbors.k": [1, 3]}}
    folder = tmp_path / "c"
    told = sg.compare(
        str(tmp_path / "g.npz"), methods=["fedavg"], seeds=1, processes=0, out=folder, **given
    )
    ks = [line["config"]["options"].get("neighbors.k") for line in told.lines if line is not None]
    assert ks == [None, 1, 3]  # without the option there is one arm for both values
    assert len(lines_of(folder)) == 3
    assert list(told.arms) == [
        "neighbors=full",
        "neighbors=fedgrains, neighbors.k=1",
        "neighbors=fedgrains, neighbors.k=3",
    ]
    lines = (folder / "compare.jsonl").read_text().splitlines(keepends=True)
    (folder / "compare.jsonl").write_text("".join(lines[:-1]))
    again = resume_comparison(folder, processes=0)
    assert [row["server_mean"] for row in again.rows] == [row["server_mean"] for row in told.rows]


def test_a_seed_has_one_cut_for_all_methods(compared: Comparison) -> None:
    cuts: dict[tuple[Any, Any], set[str]] = {}
    for line in compared.lines:
        assert line is not None
        labels = line["labels"]
        cuts.setdefault((labels["clients"], labels["seed"]), set()).add(line["partition"])
    assert len(cuts) == 4
    assert all(len(hashes) == 1 for hashes in cuts.values())
    assert len(set.union(*cuts.values())) == 4


def test_every_cell_has_its_result_folder(compared: Comparison) -> None:
    assert compared.folder is not None
    folders = list(Path(compared.folder, "runs").iterdir())
    assert len(folders) == 12
    assert all((folder / "result.json").exists() for folder in folders)


# --- figures --------------------------------------------------------------------------------------


def test_rows_are_the_figures_of_numpy(compared: Comparison) -> None:
    assert [(row["clients"], row["method"]) for row in compared.rows] == [
        (clients, method) for clients in (3, 5) for method in METHODS
    ]
    for row in compared.rows:
        lines = [
            line
            for line in compared.lines
            if line
            and (line["labels"]["method"], line["labels"]["clients"])
            == (row["method"], row["clients"])
        ]
        assert row["seeds"] == 2
        for view in ("server", "uncut", "personalized"):
            if row["method"] == "local" and view != "personalized":
                assert row[f"{view}_mean"] is row[f"{view}_std"] is None
                continue
            scores = [line["test"][view]["accuracy"] for line in lines]
            assert row[f"{view}_mean"] == pytest.approx(np.mean(scores), rel=1e-12)
            assert row[f"{view}_std"] == pytest.approx(np.std(scores, ddof=1), abs=1e-12)
        assert row["bytes"] == np.mean([line["bytes"]["total"] for line in lines])
        assert row["seconds"] == pytest.approx(np.mean([line["seconds"] for line in lines]))
    for clients in (3, 5):
        rows = [row for row in compared.rows if row["clients"] == clients]
        means = {row["method"]: row["personalized_mean"] for row in rows}  # the view that all have
        assert {row["view"] for row in rows} == {"personalized"}
        assert {row["reference"] for row in rows} == {max(means, key=lambda m: means[m])}
        for view in ("server", "uncut", "personalized"):
            marked = [row[f"{view}_mean"] for row in rows if view in row["best"]]
            found = [row[f"{view}_mean"] for row in rows if row[f"{view}_mean"] is not None]
            assert marked == [max(found)] * len(marked) != []


def with_scores(scores: dict[str, list[float | None]], **asked: Any) -> Comparison:
    """A comparison whose test accuracies are given, by method and seed; None: the cell failed."""
    seeds = len(next(iter(scores.values())))
    small: dict[str, Any] = {"clients": 2, "partition": "random", "rounds": 1, "hidden": 2}
    graph = planted_graph()
    table = sg.compare(graph, methods=list(scores), seeds=seeds, processes=0, **small)
    lines = []
    for cell, line in zip(table.cells, table.lines, strict=True):
        assert line is not None
        value = scores[str(cell.labels["method"])][int(cell.labels["seed"])]
        if value is None:
            lines.append({"error": "why", "versions": line["versions"]})
            continue
        view = {"accuracy": value, "auc": None}
        lines.append(line | {"test": {"server": view, "uncut": None, "personalized": view}})
    return replace(table, lines=tuple(lines), request=replace(table.request, **asked))


def test_splits_that_overlap_are_corrected_unless_another_test_is_asked_for() -> None:
    """A split of .2/.4/.4 has .4 / .6 test nodes for each that trains or validates."""
    scores: dict[str, list[float | None]] = {"fedavg": [0.5, 0.5, 0.5], "local": [0.6, 0.7, 0.9]}
    table = with_scores(scores, baseline="fedavg")
    d = np.array([0.1, 0.2, 0.4])
    t = d.mean() / (d.std(ddof=1) * np.sqrt(1 / 3 + 0.4 / 0.6))
    assert table.rows[1]["p"] == pytest.approx(2 * stats.t.sf(t, 2), rel=1e-9)
    assert any("corrected for splits that overlap" in note for note in table.notes)
    plain = with_scores(scores, baseline="fedavg", test="t")
    assert plain.rows[1]["p"] == pytest.approx(stats.ttest_1samp(d, 0).pvalue, rel=1e-9)
    assert any("p-values are too small; --test resampled" in note for note in plain.notes)
    one = replace(table, cells=tuple(
        replace(cell, config=replace(cell.config, split_seed=0)) for cell in table.cells
    ))  # fmt: skip
    assert one.rows[1]["p"] == plain.rows[1]["p"]


def told(table: Comparison) -> list[dict[str, Any]]:
    return [line for line in table.lines if line is not None]


def test_the_paired_test_is_that_of_scipy() -> None:
    scores: dict[str, list[float | None]] = {
        "fedavg": [0.70, 0.74, 0.71],
        "fedopt": [0.80, 0.79, 0.83],
        "local": [0.60, 0.75, 0.50],
    }
    table = with_scores(scores, baseline="fedavg", test="t")
    rows = {row["method"]: row for row in table.rows}
    assert rows["fedavg"]["difference"] is None
    values = {m: np.array(found, dtype=np.float64) for m, found in scores.items()}
    tests = {m: stats.ttest_rel(values[m], values["fedavg"]) for m in ("fedopt", "local")}
    for method, test in tests.items():
        interval = test.confidence_interval(0.95)
        row = rows[method]
        assert row["reference"] == "fedavg"
        assert row["p"] == pytest.approx(test.pvalue, rel=1e-9)
        assert (row["low"], row["high"]) == pytest.approx((interval.low, interval.high), rel=1e-9)
    low, high = sorted(float(test.pvalue) for test in tests.values())
    assert sorted([rows["fedopt"]["p_holm"], rows["local"]["p_holm"]]) == pytest.approx(
        [min(1, 2 * low), max(min(1, 2 * low), high)]
    )
    assert not any("favors it" in note for note in table.notes)
    best = with_scores(scores)
    assert {row["reference"] for row in best.rows} == {"fedopt"}
    assert any("favors it" in note for note in best.notes)


def test_views_that_hear_more_are_told(make_graph: MakeGraph) -> None:
    common: dict[str, Any] = {"seeds": 1, "processes": 0, **SHORT, "rounds": 1}
    methods = ["fedavg", "fedprox", "local", "label_guided", "centralized"]
    several = sg.compare(make_graph(), methods=methods, **common)
    (told,) = [note for note in several.notes if "server view" in note]
    assert told == (
        "the server view sees a node differently (fedavg, fedprox: through its own client's graph; "
        "label_guided: with its neighbors in all silos; centralized: on the uncut graph, where it "
        "was trained); the uncut view alike"
    )
    (tested,) = [note for note in several.notes if note.startswith("difference")]
    each = "server (fedavg, fedprox, label_guided, centralized); personalized (local)"
    assert tested == "difference: in the personalized view"  # all have it
    assert f"views that pick the rounds: {each}" in several.notes
    assert not any(word in note for note in several.notes for word in ("paired test", "p-value"))
    alike = sg.compare(make_graph(), methods=["fedavg", "local"], **common)
    assert not any("server view" in note for note in alike.notes)
    over = {"collect": [0.0, 0.5]}
    fetched = sg.compare(make_graph(), methods=["fedavg"], over=over, **common)
    (told,) = [note for note in fetched.notes if "server view sees" in note]
    assert "collect=0.5: through its own client's graph and the neighbors that it has fet" in told


def test_a_method_alone_is_tested_against_nothing(make_graph: MakeGraph, tmp_path: Path) -> None:
    common: dict[str, Any] = {
        **SHORT,
        "rounds": 1,
        "processes": 0,
        "seeds": 2,
    }
    del common["clients"]
    table = sg.compare(
        make_graph(), methods=["fedavg"], over={"clients": [2, 3]}, out=tmp_path / "c", **common
    )
    for page in (table.summary(80), table.summary(200), table.to_markdown(), table._repr_html_()):
        assert not any(word in page for word in ("reference", "paired", "p-value", "difference"))
        assert "clients 3" in page
    assert [row["clients"] for row in table.rows] == [2, 3]
    paired = json.loads((tmp_path / "c" / "paired.json").read_text())
    assert paired["tables"] == []


def test_rows_of_nodes_have_a_column_where_a_method_sends_them(make_graph: MakeGraph) -> None:
    common: dict[str, Any] = {"seeds": 1, "processes": 0, **SHORT, "rounds": 1, "model": "sage"}
    common = {k: v for k, v in common.items() if k not in ("optimizer", "lr", "local_epochs")}
    ours, over = ["fedlocal", "fedall", "fedais"], {"tau": [1, 3]}
    table = sg.compare(make_graph(), methods=ours, over=over, **common)
    for row in table.rows:
        (line,) = (
            line
            for cell, line in zip(table.cells, table.lines, strict=True)
            if (cell.labels["method"], cell.labels.get("tau")) == (row["method"], row["tau"])
        )
        assert line is not None
        kinds = line["bytes"]["by_kind"]
        assert row["row_bytes"] == kinds.get("embeddings", 0) + kinds.get("halo_keys", 0)
        assert (row["row_bytes"] > 0) == (row["method"] != "fedlocal")
    assert "rows MB" in table.summary()
    (caution,) = (note for note in table.notes if "few edges" in note)
    assert caution.startswith("fedais, tau=1, fedais, tau=3: ")  # presets were not measured there
    assert "rows MB" not in sg.compare(make_graph(), methods=["fedavg"], **common).summary()


def test_ratings_have_no_caution_on_labels_and_small_costs_have_digits() -> None:
    common: dict[str, Any] = {"split": "0.6/0.2/0.2", "clients": 2, "partition": "category"}
    table = sg.compare(
        rating_graph(),
        methods=["fedavg", "fedacs", "fedper"],
        seeds=[1],
        processes=0,
        rounds=1,
        model="rating_profiles",
        **common,
    )
    assert not any("labels of nodes" in note for note in table.notes)
    assert any(note.startswith("fedacs: for ratings, its paper's") for note in table.notes)
    small, shown = {**table.rows[0], "bytes": 4321, "flops": 8.71e6}, dict(COST_COLUMNS)
    assert (shown["MB"](small), shown["GFLOP"](small)) == ("0.0043", "0.0087")


def test_a_caution_holds_for_what_its_field_says(make_graph: MakeGraph) -> None:
    """Not for what its text happens to mention."""
    parts = (
        Caution("unlike for labels of nodes, slow"),
        Caution("raise --lr", of="ratings"),
        Caution("lower --lr", of="labels of nodes"),
    )
    method = replace(METHODS_BY_NAME["local"], cautions=parts)
    on_ratings = "unlike for labels of nodes, slow; for ratings, raise --lr"
    assert method.caution_on("ratings") == on_ratings
    on_labels = "unlike for labels of nodes, slow; for labels of nodes, lower --lr"
    assert method.caution_on("labels of nodes") == on_labels
    assert method.caution == f"{on_ratings}; for labels of nodes, lower --lr"
    table = sg.compare(
        make_graph(), methods=["local", "fedacs"], seeds=[1], processes=0, rounds=1, clients=3
    )
    assert not [note for note in table.notes if "for ratings" in note]


def test_cautions_that_are_texts_are_refused() -> None:
    given: tuple[Any, ...] = ("raise --lr", ["raise --lr"], ("raise --lr",))
    for wrong in given:
        with pytest.raises(ConfigError, match="expected cautions of method local as a tuple of C"):
            replace(METHODS_BY_NAME["local"], cautions=wrong)


def test_methods_that_coincide_are_told(make_graph: MakeGraph) -> None:
    """FedProx with one local step is FedAvg."""
    common: dict[str, Any] = {"seeds": 2, "processes": 0, **SHORT}
    methods = ["fedavg", "local", "fedprox"]
    for epochs, same in ((1, 1), (2, 0)):
        table = sg.compare(make_graph(), methods=methods, local_epochs=epochs, **common)
        told = [note for note in table.notes if "same scores and losses" in note]
        assert told == same * [
            "fedavg and fedprox have the same scores and losses in every round: with these "
            "settings they are the same method"
        ]


def test_defaults_that_do_not_learn_are_told(make_graph: MakeGraph) -> None:
    """Once for a method, and only where its clients train by default."""
    common: dict[str, Any] = {"seeds": 2, "processes": 0, **SHORT, "rounds": 1}
    del common["lr"]
    table = sg.compare(make_graph(), methods=["fedavg", "fedopt"], **common)
    caution = f"fedavg: {sg.methods.FEDAVG.caution}"
    assert [note for note in table.notes if note.startswith("fedavg: ")] == [caution]
    assert caution.partition(";")[0] in table.summary(400)
    other = sg.compare(make_graph(), methods=["fedavg"], optimizer="sgd", **common)
    assert not any(note.startswith("fedavg: ") for note in other.notes)


def test_the_largest_class_ends_the_tables_of_scores(compared: Comparison) -> None:
    """Training labels name it; it has the share of the test nodes that have it."""
    for clients, found in zip((3, 5), compared.constants, strict=True):
        shares = []
        for seed in (0, 4):
            given: dict[str, Any] = SHORT | {"clients": clients, "rounds": 1, "seed": seed}
            cut = sg.run(planted_graph(), **given).cut
            assert cut is not None
            y, split = cut.graph.y, cut.split
            share = (y[split.test] == y[split.train].bincount().argmax()).double().mean()
            shares.append(float(share))
        assert found["name"] == "largest class"
        assert found["mean"] == pytest.approx(statistics.mean(shares))
        assert found["std"] == pytest.approx(statistics.stdev(shares))
        text = f"{statistics.mean(shares):.4f} ± {statistics.stdev(shares):.4f}"
        (line,) = re.findall(f"^largest class .*{text}.*", compared.summary(), re.MULTILINE)
        assert line.count(text) == 3  # in every view
        assert text in compared.to_markdown()
        assert text in compared._repr_html_()
    assert json.loads(compared.to_json())["constants"] == compared.constants
    old = tuple({k: v for k, v in line.items() if k != "constant"} for line in told(compared))
    assert "largest class" not in replace(compared, lines=old).summary()


def test_what_trains_as_fedavg_says_where_it_fails() -> None:
    """Adam, built anew in each round, fails on weight decay where FedAvg's does."""
    for method in METHODS_BY_NAME.values():
        needs = method.needs
        anew = needs.optimizer == "adam" and not needs.keep_optimizer
        if anew and needs.weight_decay:
            assert method.caution, method.name
    for name in ("local", "centralized", "fedopt"):
        assert METHODS_BY_NAME[name].caution == ""


def test_runs_that_were_still_improving_are_told(compared: Comparison) -> None:
    lines = [line | {"best_round": 2} for line in told(compared)]
    known = replace(compared, lines=tuple(lines))
    assert not any("still improving" in note for note in known.notes)
    for line, cell in zip(lines, compared.cells, strict=True):
        if cell.labels["method"] == "fedopt" and cell.labels["seed"] == 4:
            line["best_round"] = 3
    (note,) = [n for n in replace(compared, lines=tuple(lines)).notes if "still improving" in n]
    assert note.endswith("raise --rounds (fedopt in 2 of 4 runs)")
    private = [line | {"config": line["config"] | {"dp_epsilon": 8.0}} for line in lines]
    known = replace(compared, lines=tuple(private))
    assert not any("still improving" in note for note in known.notes)  # the last round is given
    early = replace(compared, lines=tuple(line | {"rounds": 2, "best_round": 2} for line in lines))
    assert not any("still improving" in note for note in early.notes)  # stopped by a limit


def test_pairs_are_the_seeds_that_both_have() -> None:
    table = with_scores({"fedavg": [0.7, None, 0.5], "local": [0.6, 0.9, None]}, baseline="fedavg")
    row = {row["method"]: row for row in table.rows}["local"]
    assert (row["seeds"], row["pairs"], row["p"]) == (2, 1, None)
    assert row["difference"] == pytest.approx(-0.1)
    assert table.failed == ["fedavg, seed 1: why", "local, seed 2: why"]
    assert "failed: fedavg, seed 1: why" in table.summary()
    alike = with_scores({"fedavg": [0.7, None, None], "local": [0.6, 0.9, 0.8]})
    assert alike.failed == ["fedavg, seed 1: why", "fedavg, seed 2: why"]
    assert "failed: fedavg, seeds 1, 2: why" in alike.summary()
    assert "- fedavg, seeds 1, 2: why" in alike.to_markdown()
    assert "- local, seed 2: why" in table.to_markdown()


def test_seeds_without_a_result_stand_beside_the_mean() -> None:
    """Else a method that diverges now and then looks as good as its good seeds."""
    table = with_scores({"fedavg": [0.7, None, 0.5], "local": [0.6, 0.9, 0.75]})
    lines = [{**line, "kind": "TrainingError"} if "error" in line else line for line in told(table)]
    table = replace(table, lines=tuple(lines))
    rows = {row["method"]: row for row in table.rows}
    assert [rows["fedavg"][key] for key in ("seeds", "diverged", "failed")] == [2, 1, 0]
    assert [rows["local"][key] for key in ("seeds", "diverged", "failed")] == [3, 0, 0]
    for text in (table.summary(140), table.to_markdown()):
        assert "0.6000 ± 0.1414 (2 of 3)" in text
        assert "2 of 3; 1 diverged" in text
        assert "0.7500 ± 0.1500* " in text
        assert "means and tests leave out seeds without a result" in text
    failed = with_scores({"fedavg": [None], "local": [0.5]})
    assert "0 of 1; 1 failed" in failed.summary(140)
    whole = with_scores({"fedavg": [0.7], "local": [0.5]})
    assert "leave out" not in whole.summary()
    assert " of 1" not in whole.summary()


def test_a_method_without_any_score_stays_in_the_table() -> None:
    table = with_scores({"fedavg": [None, None], "local": [0.5, 0.75]})
    row = table.rows[0]
    assert (row["seeds"], row["server_mean"], row["bytes"], row["pairs"]) == (0, None, None, 0)
    assert statistics.mean([0.5, 0.75]) == table.rows[1]["personalized_mean"]
    assert with_scores({"fedavg": [None], "local": [None]}).rows[0]["reference"] is None


def test_a_chosen_view_metric_and_test() -> None:
    scores: dict[str, list[float | None]] = {"fedavg": [0.5, 0.6, 0.9], "local": [0.4, 0.4, 0.6]}
    table = with_scores(scores, view="server", test="wilcoxon")
    assert table.rows[1]["pairs"] == 0 or table.rows[1]["method"] == "local"
    table = with_scores(scores, view="personalized", test="wilcoxon")
    assert table.rows[1]["p"] == pytest.approx(0.25)  # signed ranks of one sign, n = 3
    assert any("is 0.25" in note for note in table.notes)
    assert with_scores(scores, metric="auc").rows[0]["server_mean"] is None


def with_views(scores: dict[str, dict[str, list[float]]], **asked: Any) -> Comparison:
    """A comparison whose test accuracies are given, by method and view, of two seeds."""
    small: dict[str, Any] = {"clients": 2, "partition": "random", "rounds": 1, "hidden": 2}
    graph = planted_graph(30)
    table = sg.compare(graph, methods=list(scores), seeds=2, processes=0, kernels="torch", **small)
    lines = []
    for cell, line in zip(table.cells, table.lines, strict=True):
        given = scores[str(cell.labels["method"])]
        test = {
            view: {"accuracy": given[view][int(cell.labels["seed"])]} if view in given else None
            for view in ("server", "uncut", "personalized")
        }
        assert line is not None
        lines.append(line | {"test": test})
    return replace(table, lines=tuple(lines), request=replace(table.request, **asked))


def test_methods_are_tested_in_a_view_that_all_have() -> None:
    """In its own view FedAvg is behind, and in the view that both have it is ahead."""
    scores = {
        "local": {"personalized": [0.5, 0.6]},
        "fedavg": {"server": [0.2, 0.25], "uncut": [0.2, 0.2], "personalized": [0.9, 0.8]},
    }
    table = with_views(scores)
    local, fedavg = table.rows
    assert local["reference"] == "fedavg"
    assert local["difference"] == pytest.approx(-0.3)
    assert (local["view"], fedavg["view"]) == ("personalized", "personalized")
    assert any(note.endswith("in the personalized view") for note in table.notes)
    assert "views that pick the rounds: personalized (local); server (fedavg)" in table.notes
    server = replace(
        table, request=replace(table.request, view="server")
    )  # asked for: local has no scores in it
    assert [row["view"] for row in server.rows] == [None, "server"]
    assert server.rows[0]["difference"] is server.rows[0]["p"] is server.rows[0]["pairs"] is None


def test_methods_without_a_common_view_are_not_tested() -> None:
    scores = {
        "local": {"personalized": [0.5, 0.6]},
        "fedavg": {"server": [0.2, 0.25], "personalized": [0.3, 0.3]},
        "centralized": {"server": [0.9, 0.8], "uncut": [0.9, 0.8]},
    }
    told = "not tested, for want of a view that the compared arms share: "
    table = with_views(scores, baseline="local")
    assert [row["view"] for row in table.rows] == ["personalized", "personalized", None]
    assert f"{told}centralized" in table.notes
    assert table.summary(200).count("no common view") == 1
    table = replace(table, request=replace(table.request, baseline="centralized"))
    assert [row["view"] for row in table.rows] == [None, "server", "server"]
    assert f"{told}local" in table.notes
    assert [row["difference"] is None for row in table.rows] == [True, False, True]
    two = with_views({name: scores[name] for name in ("local", "centralized")})
    assert [row["difference"] for row in two.rows] == [None, None]
    assert any(note.startswith(told) for note in two.notes)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_the_best_is_marked_alike_in_every_form(metric: str, tmp_path: Path) -> None:
    small: dict[str, Any] = {"clients": 2, "partition": "random", "rounds": 1, "hidden": 2}
    small |= {"kernels": "torch", "processes": 0, "metric": metric}
    methods = ["local", "fedavg"]
    table = sg.compare(planted_graph(30), methods=methods, seeds=2, out=tmp_path / "c", **small)
    page = write_comparison(
        comparison_runs(tmp_path / "c"), tmp_path / "p.html", comparison=tmp_path / "c"
    ).path
    html, text, markdown = page.read_text(encoding="utf-8"), table.summary(200), table.to_markdown()
    marked = 0
    for row in json.loads(table.to_json())["rows"]:
        for view in ("server", "uncut", "personalized"):
            if row[f"{view}_mean"] is None:
                continue
            cell = f"{row[f'{view}_mean']:.4f} ± {row[f'{view}_std']:.4f}"
            star = "*" if view in row["best"] else ""
            marked += bool(star)
            assert all(f"{cell}{star}" in form for form in (html, text, markdown))
            assert (f"<b>{cell}*</b>" in html) == bool(star)
    assert marked >= 3
    places = [html.index(f'<tr><th scope="row">{method}</th>') for method in methods]
    assert places == sorted(places)


# --- forms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 140])
def test_tables_fit(compared: Comparison, width: int) -> None:
    text = compared.summary(width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    assert len(re.findall("^fedopt  ", text, re.MULTILINE)) == (6 if width == 80 else 4)
    assert "p, Holm" in text
    tested = [row for row in compared.rows if row["low"] is not None]
    assert len(re.findall(r"[+-]\d\.\d{4} to [+-]\d\.\d{4}", text)) == len(tested) > 0
    assert "±" in text
    assert "clients 5" in text
    assert repr(compared) == compared.summary()


def test_json_and_markdown_hold_the_rows(compared: Comparison) -> None:
    told = json.loads(compared.to_json())
    assert told["rows"] == json.loads(json.dumps(compared.rows))
    assert told["methods"] == METHODS
    assert len(told["cells"]) == 12
    assert compared.folder is not None
    page = Path(compared.folder, "compare.md").read_text(encoding="utf-8")
    assert page == compared.to_markdown()
    mean = f"{compared.rows[0]['personalized_mean']:.4f} ± "
    assert mean in page


def test_a_data_frame(compared: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name == "pandas":
            raise ImportError
        return real(name, *args)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", without)
        with raises_code(SilographError, "missing-package", package="pandas", extra="pandas"):
            compared.to_dataframe()
    pandas = pytest.importorskip("pandas")
    frame = compared.to_dataframe()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["method"]) == METHODS * 2


# --- going on -------------------------------------------------------------------------------------


def test_more_seeds_and_methods_go_on(make_graph: MakeGraph, tmp_path: Path) -> None:
    whole, grown = tmp_path / "whole", tmp_path / "grown"
    common: dict[str, Any] = {"processes": 0, **SHORT}
    sg.compare(make_graph(), methods=METHODS[:2], seeds=2, out=whole, **common)
    sg.compare(make_graph(), methods=METHODS[:1], seeds=1, out=grown, **common)
    before = (grown / "compare.jsonl").read_bytes()
    sg.compare(make_graph(), methods=METHODS[:2], seeds=2, out=grown, **common)
    assert (grown / "compare.jsonl").read_bytes().startswith(before)
    assert lines_of(grown) == lines_of(whole)
    with raises_code(ConfigError, "existing-output"):
        sg.compare(make_graph(), methods=METHODS[:1], seeds=2, out=grown, **common)
    with raises_code(ConfigError, "existing-output"):
        sg.compare(make_graph(), methods=METHODS[:2], seeds=2, out=grown, **common | {"lr": 0.5})


def test_resuming_from_another_folder(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common: dict[str, Any] = {"processes": 0, **SHORT, "rounds": 1}
    whole = sg.compare("g.npz", methods=METHODS[:1], seeds=1, out="a", **common)
    monkeypatch.chdir(work.parent)
    gone_on = resume_comparison(work / "a", processes=0)
    assert gone_on.lines == whole.lines


def test_resuming_by_the_folder(work: Path, make_graph: MakeGraph) -> None:
    common: dict[str, Any] = {"processes": 0, **SHORT}
    common["hidden"] = 4
    whole = sg.compare("g.npz", methods=METHODS[:2], seeds=2, out="a", **common)
    lines = (work / "a" / "compare.jsonl").read_text().splitlines(keepends=True)
    (work / "a" / "compare.jsonl").write_text("".join(lines[:1]) + lines[1][:50])
    shutil.rmtree(next((work / "a" / "runs").glob("fedavg-1-*")))
    (work / "a" / "runs" / ".fedavg-1.7").mkdir()  # was being made at a kill
    gone_on = resume_comparison("a", processes=0)
    assert gone_on.cells[0].labels == whole.cells[0].labels
    assert [line["test"] for line in gone_on.lines if line] == [
        line["test"] for line in whole.lines if line
    ]
    assert (work / "a" / "compare.jsonl").read_text().startswith(lines[0])
    assert not list((work / "a" / "runs").glob(".*"))
    sg.compare(make_graph(), methods=["local"], seeds=1, out="b", **common)
    with raises_code(ConfigError, "part-not-saved", part="graph", path="b"):
        resume_comparison("b")
    Path("b", "compare.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"expected the plan of a comparison in b/compare\.json"):
        resume_comparison("b")


@pytest.mark.parametrize("most", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_kills_do_not_show(tmp_path: Path, most: int) -> None:
    """SIGKILL at random instants: the lines and every run's files are those of no kill."""
    done = completed([sys.executable, "-m", "killing_compare", str(tmp_path), str(most), "1"])
    assert done.returncode == 0, done.stderr
    studies, kills = map(int, done.stdout.split())
    assert kills == most
    reference = tmp_path / "reference"
    for number in range(studies):
        folder = tmp_path / str(number)
        assert lines_of(folder) == lines_of(reference)
        for run in (reference / "runs").iterdir():
            assert files_of(folder / "runs" / run.name) == files_of(run)
        assert not list((folder / "runs").glob(".*"))


# --- mistakes -------------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"methods": ["fedavgg"]}, "unknown method 'fedavgg': did you mean 'fedavg'"),
    "no methods": ({"methods": []}, "expected at least one of methods, got none"),
    "methods as text": ({"methods": "local"}, "expected a list of methods, got 'local'"),
    "a method twice": ({"methods": ["local"] * 2}, "expected methods that differ, got 'local' tw"),
    "no seeds": ({"seeds": 0}, "seeds: expected at least one, got 0"),
    "empty seeds": ({"seeds": []}, "expected at least one of seeds, got none"),
    "a seed below 0": ({"seeds": [0, -1]}, "expected seeds that are whole numbers from 0, got -1"),
    "half a seed": ({"seeds": 1.5}, "expected a list of seeds, got 1.5"),
    "a key": ({"over": {"clientz": [1]}}, "unknown key to vary 'clientz': did you mean 'clients'"),
    "the seed varied": ({"over": {"seed": [1]}}, "unknown key to vary 'seed'"),
    "an option varied that none has": (
        {"over": {"tau": [1, 2]}},
        "option tau: method local has no such option, but method fedais,",
    ),
    "an option varied of another part": (
        {"over": {"neighbors.k": [8]}},
        "option neighbors.k: neighbors full has no such option, but neighbors fedgrains has it",
    ),
    "an option's value varied": (
        {"methods": ["fedprox"], "over": {"mu": [0.1, -1]}},
        "mu: input should be greater than or equal to 0, got -1 (options of fedprox)",
    ),
    "an option varied and given": (
        {
            "methods": ["fedprox"],
            "over": {"mu": [0.1, 1]},
            "options": {"fedprox": {"method.mu": 1}},
        },
        "expected mu of fedprox either varied or with a value, got both: leave one of them out",
    ),
    "an option varied, and a value for one of that name that no part has": (
        {
            "methods": ["fedprox"],
            "over": {"mu": [0.1, 1]},
            "options": {"fedprox": {"selector.mu": 1}},
        },
        "option selector.mu: selector uniform has no such option; choices: selector.participation",
    ),
    "an option of two parts varied": (
        {"methods": ["fedais"], "over": {"policy": ["rule"]}, "neighbors": "fedgrains"},
        "expected method.policy or neighbors.policy, got policy: method fedais and neighbors fedg",
    ),
    "options varied": (
        {"over": {"options.mu": [8]}},
        "expected NAME or PART.NAME of an option to vary, got 'options.mu'",
    ),
    "no values": ({"over": {"clients": []}}, "expected at least one of values of clients, got no"),
    "a value": ({"over": {"clients": [0]}}, "clients: input should be greater than or equal to 1"),
    "an option": (
        {"options": {"fedopt": {"server_lrr": 1}}, "methods": ["fedopt"]},
        "option server_lrr: model gcn, selector uniform and server_optimizer adam have no such "
        "option: did you mean 'server_lr'?",
    ),
    "another's option": ({"options": {"fedop": {}}}, "unknown method or part with options 'fedop'"),
    "baseline": ({"baseline": "locl"}, "unknown baseline 'locl': did you mean 'local'"),
    "metric": ({"metric": "acuracy"}, "unknown metric 'acuracy': did you mean 'accuracy'"),
    "view": ({"view": "servr"}, "unknown view 'servr': did you mean 'server'"),
    "test": ({"test": "z"}, "unknown test 'z'"),
    "processes": ({"processes": -1}, "expected a number of processes from 0"),
    "progress": ({"progress": "loud"}, "expected progress live, plain or none, got 'loud'"),
    "a seed": ({"seed": 1}, "expected seeds for several runs, got seed=1: give seeds=[...]"),
    "what varies as a list": ({"over": ["clients"]}, "expected over as a dict, got ['clients']"),
    "options as text": ({"options": "a=1"}, "expected options as a dict, got 'a=1'"),
    "a field": ({"rouns": 3}, "unknown option 'rouns': did you mean 'rounds'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_one_line_and_writes_nothing(
    make_graph: MakeGraph, tmp_path: Path, case: str
) -> None:
    given, message = WRONG[case]
    all_given: dict[str, Any] = {"methods": ["local"], "out": tmp_path / "x"} | given
    with pytest.raises(ConfigError) as caught:
        sg.compare(make_graph(), **all_given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "x").exists()


def test_a_folder_of_something_else_or_a_file(make_graph: MakeGraph, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with raises_code(ConfigError, "existing-output"):
        sg.compare(make_graph(), methods=["local"], out=tmp_path)
    with raises_code(ConfigError, "existing-output"):
        sg.compare(make_graph(), methods=["local"], out=tmp_path / "mine.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_graph_that_cannot_be_read(work: Path, make_graph: MakeGraph) -> None:
    save("nan.npz", make_graph(), y=np.full(60, -1))
    with pytest.raises(DataError, match="expected at least one known label"):
        sg.compare("nan.npz", methods=["local"], processes=0)
    with raises_code(ConfigError, "unknown-name", what="dataset", got="corra", suggestion="cora"):
        sg.compare("corra", methods=["local"], processes=0)
