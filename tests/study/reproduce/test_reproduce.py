"""Laws of `reproduce`: what is missing runs, once; pages keep their text; paper beside ours."""

import builtins
import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mistakes import raises_code

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "baselines"))
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "defaults"))
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "fedacs"))
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "fedais"))
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "fedgrains"))
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "fedgraph"))
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "local_bias"))
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "models"))
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "selection"))
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "silos"))

import acs_cells as acs
import fedais_cells as fedais
import fedgraph_cells as fedgraph
import personal_cells as personal
import recipe_beside_fedopt as beside_fedopt
import recipe_citations as baselines
import recipe_clients as bias_by_clients
import recipe_federating as federating
import recipe_fedopt as fedopt_steps
import recipe_layers as layers
import recipe_local_and_fedavg as fedgrains
import recipe_methods as methods
import recipe_profiles as profiles
import recipe_pubmed as pubmed
import recipe_ratings as of_ratings
import recipe_selectors as selectors
import recipe_server_step as server_step
import recipe_silos as of_silos
import recipe_small_k as small_k
import recipe_spread as over_seeds
import recipe_strong as strong
import recipe_sweep as tables_of_the_sweep
import recipe_table3 as sensitivity
import recipe_tables as of_tables
import recipe_tuned as tuned
import recipe_unbiased as unbiased
import sweep_cells as sweep

import silograph as sg
from silograph.cli import run_app
from silograph.cli.studies import _resume_command_line, parse_only
from silograph.core.config import Scalar
from silograph.core.errors import ConfigError, SilographError
from silograph.study.cells import Cell, Line, digest_of
from silograph.study.reproduce import (
    COLORS,
    Curves,
    Page,
    Points,
    Recipe,
    StudyLines,
    beside,
    cell,
    find_recipe,
    paths_of,
    recipes_in,
    replace_section,
    reproduce,
    spread,
    svg_of,
)
from silograph.study.study import read_lines

pytestmark = pytest.mark.usefixtures("work")

PAGES = Path(__file__).parents[3] / "benchmarks"
RECIPES = recipes_in(PAGES)
# Recipes have 5500 lines, which take a minute: by default one in twenty is looked at.
EVERY = pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 20])
SHORT: dict[str, Any] = {
    "dataset": "g.npz",
    "clients": 3,
    "partition": "random",
    "rounds": 2,
    "hidden": 4,
}
PAPER = {"local": 50.0, "fedavg": 60.0}


def one(method: str, seed: int, **options: Any) -> Cell:
    labels: dict[str, Scalar] = {"method": method, "seed": seed}
    return cell(labels, **SHORT | {"method": method, "seed": seed} | options)


def cells(found: StudyLines) -> list[Cell]:
    """Seed 1 of the better method by validation, once both have run with seed 0."""
    first = [one(method, 0) for method in PAPER]
    lines = found.scored(first)
    if len(lines) < len(first):
        return first
    best = max(lines, key=lambda line: line["val"]["personalized"]["accuracy"])
    return [*first, one(best["labels"]["method"], 1)]


def page(found: StudyLines) -> Page:
    rows = {}
    for method, paper in PAPER.items():
        lines = found.scored([one(method, seed) for seed in (0, 1)])
        values = [line["test"]["personalized"]["accuracy"] for line in lines]
        rows[method] = f"{method}: {paper} {beside(values, paper)}"
    return Page({"table": "\n".join(rows.values())}, {"c.svg": Curves("t", "x", "y", {})})


RECIPE = Recipe("mine/first", "my title", cells, page, "# Mine\n\n<!-- table -->\n<!-- table -->\n")


def text_of(name: str = "mine/first") -> str:
    return Path("out", f"{name}.md").read_text(encoding="utf-8")


# --- running --------------------------------------------------------------------------------------


def test_what_is_missing_runs_once_and_later_cells_follow() -> None:
    made = reproduce(RECIPE, out="out", processes=0)
    assert (made.ran, made.failed, made.missing) == (3, 0, 0)
    lines = read_lines(paths_of(RECIPE, Path("out"))[0])
    assert [line["labels"]["seed"] for line in lines] == [0, 0, 1]
    text = text_of()
    assert "3 of 3 cells have run." in text
    accuracy = lines[0]["test"]["personalized"]["accuracy"]
    plain = sg.run("g.npz", method="local", **{k: v for k, v in SHORT.items() if k != "dataset"})
    assert plain.test.personalized is not None
    assert accuracy == plain.test.personalized.accuracy
    assert f"({100 * accuracy - 50:+.2f})" in text or lines[2]["labels"]["method"] == "local"
    assert "silograph reproduce mine/first" in text
    assert f"3 by silograph {sg.__version__}, torch " in text
    again = reproduce(RECIPE, out="out", processes=0)
    assert (again.ran, again.missing) == (0, 0)
    assert text_of() == text
    ElementTree.fromstring(Path("out/mine/c.svg").read_text(encoding="utf-8"))


def test_time_and_choices_leave_the_rest() -> None:
    assert reproduce(RECIPE, out="out", processes=0, max_minutes=0).missing == 2
    assert "Not yet run: local, seed 0; fedavg, seed 0." in text_of()
    made = reproduce(RECIPE, out="out", processes=0, only={"method": ["fedavg"], "hidden": ["4"]})
    assert (made.ran, made.missing) == (1, 1)
    assert "1 of 2 cells have run." in text_of()
    assert reproduce(RECIPE, out="out", processes=0).ran == 2


def test_a_failed_cell_is_told_and_tried_again() -> None:
    wrong = replace(RECIPE, cells=lambda _: [one("local", 0, clients=61), one("fedavg", 0)])
    for ran in (2, 1):
        made = reproduce(wrong, out="out", processes=0)
        assert (made.ran, made.failed, made.missing) == (ran, 1, 0)
    assert (
        "Failed: local, seed 0: clients: expected 1 to 60 (one node each at least), got 61"
        in text_of()
    )
    diverging = replace(RECIPE, cells=lambda _: [one("fedavg", 0, lr=1e30)])
    assert [reproduce(diverging, out="two", processes=0).ran for _ in range(2)] == [1, 0]


def test_many_missing_cells_are_counted() -> None:
    many = replace(RECIPE, cells=lambda _: [one(m, s) for m in PAPER for s in range(30)])
    reproduce(replace(many, page=lambda _: Page({})), out="out", max_minutes=0)
    assert "0 of 60 cells have run." in text_of()
    assert "| local | 0 | 1 |" in text_of()


def test_labels_cost_no_run_and_settings_do() -> None:
    reproduce(RECIPE, out="out", processes=0)
    relabelled = [replace(c, labels={"row": c.name}) for c in RECIPE.cells(StudyLines([]))]
    assert reproduce(replace(RECIPE, cells=lambda _: relabelled), out="out", processes=0).ran == 0
    other = [one("local", 0, rounds=1)]
    assert reproduce(replace(RECIPE, cells=lambda _: other), out="out", processes=0).ran == 1


def test_a_cell_that_a_recipe_beside_has_run_is_copied() -> None:
    reproduce(RECIPE, out="out", processes=0)
    for name, text in (("other.jsonl", '{"a": 1}\n'), ("odd.jsonl", "[]\n")):
        Path("out/mine", name).write_text(text, encoding="utf-8")  # no lines of cells
    config, results = {"method": "local", "options": {}}, 1
    odd = {"labels": {}, "config": config, "results": results, "graph": [{}], "error": 3}
    Path("out/mine/odder.jsonl").write_text(f"{json.dumps(odd)}\n", encoding="utf-8")
    relabelled = [replace(one("local", 0), labels={"row": "a"}), one("local", 3)]
    beside_it = replace(RECIPE, name="mine/second", cells=lambda _: relabelled)
    made = reproduce(beside_it, out="out", max_minutes=0)
    assert (made.copied, made.ran, made.missing) == (1, 0, 1)
    lines = [read_lines(paths_of(recipe, Path("out"))[0]) for recipe in (RECIPE, beside_it)]
    assert lines[1] == [lines[0][0] | {"labels": {"row": "a"}}]
    assert reproduce(beside_it, out="out", max_minutes=0).copied == 0
    assert reproduce(replace(beside_it, name="yours/x"), out="out", max_minutes=0).copied == 0


# --- pages ----------------------------------------------------------------------------------------


def test_a_page_keeps_its_own_text() -> None:
    reproduce(RECIPE, out="out", max_minutes=0)
    path = Path("out/mine/first.md")
    path.write_text(f"before\n{text_of().replace('# Mine', '# Yours')}after\n", encoding="utf-8")
    reproduce(RECIPE, out="out", processes=0)
    assert text_of().startswith("before\n# Yours\n")
    assert text_of().endswith("after\n")
    assert "3 of 3 cells have run." in text_of()
    path.write_text("<!-- table -->", encoding="utf-8")
    with pytest.raises(ConfigError, match="expected <!-- table --> twice in the page, got it 1 "):
        reproduce(RECIPE, out="out", max_minutes=0)


def test_a_page_names_what_makes_it_again() -> None:
    reproduce(RECIPE, out="out", max_minutes=0)
    assert "`silograph reproduce mine/first --data-dir DIR`" in text_of()
    reproduce(RECIPE, name="my recipes.py:MINE", out="out", max_minutes=0)
    assert "`silograph reproduce 'my recipes.py:MINE' --data-dir DIR`" in text_of()


def test_sections_are_filled_in() -> None:
    assert replace_section("a", "t", "x") == "a\n\n<!-- t -->\nx\n<!-- t -->\n"
    once = replace_section("a <!-- t --> <!-- t --> b", "t", "x")
    assert replace_section(once, "t", "y") == once.replace("x", "y")


def test_figures_of_a_table() -> None:
    assert (spread([]), spread([0.5]), spread([0.5, 0.7], 1)) == ("-", "50.00", "60.0 ± 14.1")
    assert (beside([], 1.0), beside([0.5], 40.0)) == ("-", "50.00 (+10.00)")


def test_a_plot_is_the_same_again_and_on_white() -> None:
    many = {f"line {n}": ([1, 2], [n, n + 1]) for n in range(len(COLORS) + 1)}
    curves = Curves("a title", "rounds", "%", many, {"line 0": [0.1, 0.2]}, markers=True)
    text = svg_of(curves)
    assert svg_of(curves) == text
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert all(words in text for words in ("a title", "rounds", "%", *many))
    assert "#ffffff" in text
    assert "stroke-dasharray" in text  # told apart where colors come round again


def test_a_plot_marks_a_line_of_one_point() -> None:
    def marks(lines: Mapping[str, Points]) -> int:
        return svg_of(Curves("t", "rounds", "%", lines)).count('<use xlink:href="#m')

    line = {"line": ([1, 2], [3, 4])}
    dot = {"dot": ([1], [3])}
    assert marks(line | dot) == marks(line) + 2  # in the plot and in the legend


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with raises_code(SilographError, "missing-package", package="matplotlib", extra="plots"):
        reproduce(RECIPE, out="out")
    assert not Path("out").exists()


# --- recipes of the repository --------------------------------------------------------------------


@pytest.mark.law(sample=3)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_finds_its_lines_and_writes_its_page(name: str) -> None:
    """The page in the repository is that of its lines."""
    recipe = find_recipe(name, PAGES, trust=False)
    assert recipe.name == name
    lines, path = paths_of(recipe, PAGES)
    if not lines.exists():
        pytest.skip("not in the repository")
    found = StudyLines(read_lines(lines))
    text = path.read_text(encoding="utf-8")
    for section, body in recipe.page(found).sections.items():
        assert text.split(f"<!-- {section} -->")[1].strip() == body
    assert "<!-- cells -->" in text


def selection_of(cut: str, name: str, seed: int, clock: str) -> Cell:
    """The cell of a selector; a control takes its participation from the bandit's line."""
    if name == "start":
        return selectors.start_of(cut, seed)
    if name not in (selectors.SAME, selectors.TURN):
        return selectors.run_of(cut, name, seed, clock)
    found = StudyLines(read_lines(PAGES / "selection" / "selectors.jsonl"))
    control = selectors.control_of(found, cut, name, seed)
    assert control is not None
    return control


def again_of(line: Line) -> Cell:
    """The cell of a recipe of the repository, by the labels of its line."""
    labels = dict(line["labels"])
    if "run" in labels:
        return over_seeds.cell_of(labels["run"], labels["seed"])
    if labels.get("setting") in layers.SMALLER:
        return layers.cell_of(*labels.values())
    if "trial" in labels:
        return tuned.cell_of(*(labels[p] for p in ("method", "sampler", "trial", "seed")))
    if "adam" in labels:
        return fedais.cell_again(labels)
    if "base" in labels and "clients" not in labels:
        return of_silos.cell_of(*(labels[p] for p in ("dataset", "base", "sampler", "seed")))
    if "base" in labels:
        return strong.cell_of(
            *(labels[p] for p in ("dataset", "clients", "base", "sampler", "seed"))
        )
    if "scenario" in labels and "setting" in labels:
        return sensitivity.cell_of(labels["scenario"], labels["setting"], labels["seed"])
    if "scenario" in labels:
        place = personal.Place(labels["scenario"], labels["dataset"], labels["clients"])
        return personal.cell_of(place, labels["method"], labels["sampler"], labels["seed"])
    if "selector" in labels:
        return selection_of(labels["cut"], labels["selector"], labels["seed"], labels["clock"])
    if "clock" in labels:
        named = (labels[p] for p in ("dataset", "method", "clock", "seed"))
        return fedgraph.cell_of(*named, labels.get("shape", fedgraph.PLAIN))
    if "damping" in labels:
        named = (labels[p] for p in ("dataset", "row", "seed", "damping"))
        return profiles.cell_of(*named, ranked=labels["ranked"])
    if set(labels) == {"dataset", "clients", "method", "sampler", "seed"}:
        cut: Any = labels["dataset"], labels["clients"]
        return small_k.cell_of(cut, labels["method"], labels["sampler"], labels["seed"])
    if "ratio" in labels:
        named = (labels[p] for p in ("dataset", "ratio", "unbiased", "seed"))
        return unbiased.cell_of(*named)
    if "cut" in labels and "seed" not in labels:
        where = (labels["dataset"], labels["cut"], labels["clients"])
        return beside_fedopt.cell_of(where, labels["method"])
    if {"cut", "setting"} <= labels.keys():
        where = (labels["dataset"], labels["cut"], labels["clients"])
        return fedopt_steps.cell_of(where, labels["setting"], labels["seed"])
    if {"cut", "method"} <= labels.keys():
        where = (labels["dataset"], labels["cut"], labels["clients"])
        return server_step.cell_of(where, labels["method"], labels["seed"])
    if "cut" in labels:
        found = StudyLines(read_lines(PAGES / "fedacs" / "selection.jsonl"))
        again = acs.cell_in(found, *(labels[p] for p in ("dataset", "cut", "row", "seed")))
        assert again is not None
        return again
    if labels.get("row") == of_tables.MATCHED:
        found = StudyLines(read_lines(PAGES / "fedacs" / "tables.jsonl"))
        control = of_tables.matched(found, labels["seed"], labels["dataset"])
        assert control is not None
        return control
    if "ranked" in labels:
        return of_tables.cell_of(labels["row"], labels["seed"], labels["dataset"])
    if "row" in labels:
        return of_ratings.cell_of(labels["dataset"], labels["row"], labels["seed"])
    if "seed" not in labels and "clients" in labels:
        return methods.cell_of(*labels.values())
    if "seed" not in labels:
        return layers.cell_of(*labels.values())
    if "train share" in labels:
        places = ("dataset", "model", "train share", "method", "seed")
        return federating.cell_of(*(labels[place] for place in places))
    if "lr" in labels:
        return pubmed.cell_of(labels["variant"], labels["lr"], labels["seed"])
    if "sample" in labels:
        return bias_by_clients.sample_of(labels["sample"], labels["seed"])
    if "method" in labels and "dataset" not in labels:
        return bias_by_clients.cell_of(labels["setting"], labels["method"], labels["seed"])
    if "clients" in labels and "dataset" not in labels:
        return fedgrains.cell_of(labels["variant"], labels["clients"], labels["seed"])
    if "model" in labels and labels.get("setting", "as above") in baselines.WITHOUT:
        return baselines.cell_of(*labels.values())
    dataset, seed, setting = labels["dataset"], labels["seed"], sweep.BY_NAME[labels["setting"]]
    if "model" in labels:
        return sweep.robust_cell(dataset, labels["model"], setting, seed)
    pair = (dataset, labels["clients"])
    return sweep.cell_of(pair, setting, seed, labels.get("variant", ""))


@EVERY
@pytest.mark.law(sample=6)
@pytest.mark.parametrize("name", RECIPES)
def test_lines_are_of_the_cells_that_their_labels_name(name: str, every: int) -> None:
    """No line has gone stale: what decides it is what its recipe would run."""
    lines = read_lines(paths_of(find_recipe(name, PAGES, trust=False), PAGES)[0])
    if not lines:
        pytest.skip("not in the repository")
    for line in lines[::every]:
        assert again_of(line).digest == digest_of(line), line["labels"]


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_without_lines_has_a_page(name: str) -> None:
    recipe = replace(find_recipe(name, PAGES, trust=False), name="mine/empty")
    made = reproduce(recipe, out="out", max_minutes=0)
    assert (made.ran, made.failed) == (0, 0)
    assert made.missing == len(recipe.cells(StudyLines([])))
    assert "0 of " in text_of("mine/empty")
    for image in re.findall(r"\]\((.*\.svg)\)", text_of("mine/empty")):
        assert Path("out/mine", image).exists()


@EVERY
def test_lines_of_every_recipe_would_be_known(every: int) -> None:
    for name in RECIPES:
        for each in find_recipe(name, PAGES, trust=False).cells(StudyLines([]))[::every]:
            assert again_of(each.start).digest == each.digest, each.name


def test_a_diverged_cell_has_no_test_score() -> None:
    """Its mean over cells counts 0, as in validation."""
    lines = [c.start | {"error": "diverged"} for s in sweep.SEEDS for c in everywhere(s)]
    for score in (sweep.value_of, tables_of_the_sweep.tested):
        name = sweep.DEFAULT.name
        mean = tables_of_the_sweep.mean_over(StudyLines(lines), name, sweep.SEEDS, score)
        assert mean == "0.00"


def everywhere(seed: int) -> list[Cell]:
    return [sweep.cell_of(pair, sweep.DEFAULT, seed) for pair in sweep.PAIRS]


def numbers_of(cells: Sequence[Cell]) -> int:
    digests = {c.digest for c in cells}
    assert len(digests) == len(cells)  # no cell stands for two
    return len(digests)


def test_the_cells_of_recipes() -> None:
    assert numbers_of(fedgrains.cells(StudyLines([]))) == 3 * 3 * 13
    assert numbers_of(sweep.cells(StudyLines([]))) == 2 * len(sweep.BY_NAME)
    places = len(methods.NAMES) * 2 * len(methods.METHODS)
    assert numbers_of(methods.cells(StudyLines([]))) == places + 2 * len(methods.STEPS_AT)
    assert numbers_of(pubmed.cells(StudyLines([]))) == len(pubmed.RATES) * len(pubmed.VARIANTS)
    settings = len(bias_by_clients.SETTINGS) * len(bias_by_clients.METHODS)
    samples = len(bias_by_clients.SAMPLES) - 1  # one of them stands in the tables, too
    assert numbers_of(bias_by_clients.cells(StudyLines([]))) == 3 * (settings + samples)
    for name, figures in fedgrains.PAPER.items():
        assert figures.keys() == set(fedgrains.CLIENTS), name


# --- mistakes and the command ---------------------------------------------------------------------


def test_mistakes() -> None:
    with raises_code(
        ConfigError,
        "unknown-name",
        what="recipe",
        got="defaults/sweeep",
        suggestion="defaults/sweep",
    ):
        find_recipe("defaults/sweeep", PAGES, trust=True)
    with pytest.raises(ConfigError, match="expected recipes in nowhere, got none: they are in the"):
        find_recipe("defaults/sweep", Path("nowhere"), trust=True)
    Path("bad.py").write_text(
        "from dataclasses import replace\nfrom pathlib import Path\n"
        "from silograph.study.reproduce import find_recipe\n"
        f"FOUND = find_recipe('defaults/sweep', Path({str(PAGES)!r}), trust=True)\n"
        "BAD = replace(FOUND, name='../x')\n",
        encoding="utf-8",
    )
    with pytest.raises(ConfigError, match=r"expected a recipe's name like folder/name, got '../x'"):
        find_recipe("bad.py:BAD", Path("nowhere"), trust=False)
    with pytest.raises(ConfigError, match="expected method among fedavg, local, got 'x'"):
        reproduce(RECIPE, out="out", only={"method": ["x"]})
    with pytest.raises(ConfigError, match="expected a label or key that the cells of the"):
        reproduce(RECIPE, out="out2", only={"nothing": ["x"]})
    assert not Path("out2").exists()
    for minutes in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match="expected at least 0 minutes, got "):
            reproduce(RECIPE, out="out", max_minutes=minutes)
    for wrong in (["a"], ["a=1", "a=2"]):
        with raises_code(ConfigError, "option-value", option="only"):
            parse_only(wrong, None)
    for text in ("", "a,,b", '"a', '"a"b'):
        with raises_code(ConfigError, "option-value", option="only row"):
            parse_only([f"row={text}"], None)


@pytest.mark.parametrize("values", [["a", "b"], ["`local`, x", "b"], ['say "a"', "b, c"]])
def test_values_of_cells_with_commas_and_quotes_are_read_as_they_are_written(
    values: list[str],
) -> None:
    said = shlex.split(_resume_command_line("r", Path("r"), Path("o"), {"row": values}, {}))
    only = next(word for word in said if word.startswith("--only="))
    assert parse_only([only.removeprefix("--only=")], None) == {"row": values}


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_app(["reproduce"]) == 2
    assert "name the folder by --recipes DIR" in capsys.readouterr().err
    assert run_app(["reproduce", "--recipes", str(PAGES)]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in RECIPES)
    monkeypatch.setattr("silograph.study.reproduce.find_recipe", lambda *_, **__: RECIPE)
    command = ["reproduce", "r", "--out", "my out", "--processes", "0", "--quiet"]
    assert run_app([*command, "--datasets", "g.npz", "--only", "method=local"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ran 1 cell, 0 without result, 1 not yet run",
        "written to my out/mine/first.md",
    ]
    assert "`silograph reproduce r --data-dir" in Path("my out/mine/first.md").read_text()

    def stopped(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("silograph.study.reproduce.run_missing_cells", stopped)
        assert run_app([*command, "--data-dir", "."]) == 130
    assert capsys.readouterr().err.splitlines() == [
        "interrupted",
        "to go on: silograph reproduce r --out 'my out' --data-dir . --processes 0",
    ]
    with monkeypatch.context() as patch:
        patch.setattr("silograph.study.reproduce.run_missing_cells", stopped)
        assert run_app([*command, "--recipes", "mine"]) == 130
    assert "--out 'my out' --recipes mine" in capsys.readouterr().err
    failing = replace(RECIPE, cells=lambda _: [one("fedavg", 0, lr=1e30)])
    monkeypatch.setattr("silograph.study.reproduce.find_recipe", lambda *_, **__: failing)
    assert run_app(["reproduce", "r", "--out", "three", "--processes", "0"]) == 1
    assert json.loads(Path("three/mine/first.jsonl").read_text())["kind"] == "TrainingError"
