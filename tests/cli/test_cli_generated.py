"""Laws of generated graphs on the command line: a name and `--scale`, kept for the next time."""

import json
from pathlib import Path
from typing import Any

import pytest

import silograph
from commands import QUICK, Capture, MakeGraph, everything, printed
from silograph.cli import run_app
from silograph.core.errors import ConfigError

YELP = ["run", "generated:yelp", "--scale", "0.001", *QUICK]
MADE = "generating generated:yelp, scale 0.001: 717 nodes, 6,977 edges, to be kept in "
CACHE = Path(".cache", "silograph", "generated")


@pytest.fixture(autouse=True)
def home(work: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(work.parent))
    return work.parent


def lines(capsys: Capture, *arguments: str) -> list[str]:
    """What a command that succeeds writes to standard error."""
    capsys.readouterr()
    assert run_app(list(arguments)) == 0
    return capsys.readouterr().err.splitlines()


def test_the_first_run_makes_it_and_says_so(capsys: Capture, home: Path) -> None:
    first = lines(capsys, *YELP, "--out", "one")
    place = home / CACHE / "yelp-0.001-0-v1"
    assert first[0] == f"{MADE}{place}"
    assert place.is_dir()
    second = lines(capsys, *YELP, "--out", "two")
    assert not any("generat" in line for line in first[1:] + second)
    results = [json.loads(Path(out, "result.json").read_text()) for out in ("one", "two")]
    assert results[0]["test"] == results[1]["test"]
    about = json.loads(Path("one", "run.json").read_text())
    size = {"nodes": 717, "edges": 6980, "features": 300, "classes": 100}
    assert about["dataset"] == {"name": "generated:yelp", **size}
    assert about["source"] == {"dataset": "generated:yelp", "data_dir": None}


def test_a_cut_says_that_a_graph_is_made(capsys: Capture, home: Path) -> None:
    cut = ["partition", "generated:yelp", "--scale", "0.001", "--clients", "3"]
    place = home / CACHE / "yelp-0.001-0-v1"
    assert lines(capsys, *cut) == [f"{MADE}{place}"]
    assert lines(capsys, *cut) == []


def test_a_terminal_sees_how_far_it_is(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("silograph.experiment.run.progress.best_mode", lambda: "live")
    text = "\n".join(lines(capsys, *YELP))
    first, rest = text.split("\n", 1)
    assert first.startswith(MADE)
    percents = [int(part) for part in rest.split("100 %")[0].replace("%", " ").split()]
    assert percents == sorted(set(percents))
    assert len(percents) > 3


def test_quiet_is_quiet(capsys: Capture) -> None:
    assert lines(capsys, *YELP, "--quiet") == []


def test_a_run_file_says_the_scale(capsys: Capture, home: Path) -> None:
    printed(capsys, *YELP, "--out", "one", "--quiet")
    assert "scale = 0.001" in Path("one", "config.toml").read_text().splitlines()
    before = everything(home / CACHE)
    text = printed(capsys, "run", "--config", "one/config.toml", "--out", "two", "--json")
    assert json.loads(text)["test"] == json.loads(Path("one", "result.json").read_text())["test"]
    assert everything(home / CACHE) == before


def test_resume_finds_or_makes_the_same_graph(capsys: Capture, home: Path) -> None:
    data = ["--data-dir", str(home)]
    whole = json.loads(printed(capsys, *YELP, *data, "--out", "one", "--json", "--quiet"))
    Path("one", "result.json").unlink()
    (home / "generated").rename(home / "elsewhere")
    again = json.loads(printed(capsys, "resume", "one", "--json", "--quiet"))
    assert again["test"] == whole["test"]
    assert (home / "generated" / "yelp-0.001-0-v1").is_dir()


def test_the_communities_can_be_the_clients(capsys: Capture) -> None:
    arguments = [word for word in YELP if word not in ("--clients", "3", "--partition", "random")]
    text = printed(capsys, *arguments, "--partition", "silo", "--json", "--quiet")
    assert json.loads(text)["clients"] == 20


def test_python_takes_the_same_words(home: Path) -> None:
    options: dict[str, Any] = {"clients": 3, "partition": "random", "rounds": 1, "hidden": 4}
    by_name = silograph.run("generated:yelp", scale=0.001, **options)
    given = silograph.run(silograph.generate("yelp", scale=0.001), **options)
    assert by_name.test == given.test


def test_a_graph_in_memory_has_no_scale(make_graph: MakeGraph) -> None:
    match = r"^scale: expected 1 with a graph in memory, got 0\.5: only generated graphs have"
    with pytest.raises(ConfigError, match=match):
        silograph.run(make_graph(), scale=0.5)


WRONG: dict[str, tuple[list[str], str]] = {
    "scale of a file": (
        ["run", "g.npz", "--scale", "0.5"],
        "--scale: expected 1 with g.npz, got 0.5: only generated graphs have another, such as",
    ),
    "scale of a dataset": (
        ["run", "digits", "--scale", "2"],
        "--scale: expected 1 with digits, got",
    ),
    "no scale": (["run", "generated:yelp", "--scale", "0"], "scale: input should be greater than"),
    "no finite scale": (
        ["run", "generated:yelp", "--scale", "inf"],
        "scale: input should be a finite number, got inf",
    ),
    "small scale": (
        ["run", "generated:reddit", "--scale", "0.001"],
        "expected a scale of 0.00846 to 9218 for reddit, got 0.001: at a mean degree of 492",
    ),
    "preset": (
        ["run", "generated:redit"],
        "unknown generated graph 'redit': did you mean 'reddit'?",
    ),
    "seed": (["run", "generated:yelp@x"], "expected a whole number from 0 as seed after @, got 'g"),
    "prefix": (
        ["run", "generatd:yelp"],
        "unknown dataset 'generatd:yelp': did you mean 'generated:yelp'?",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_one_line_and_leaves_nothing(home: Path, capsys: Capture, case: str) -> None:
    arguments, message = WRONG[case]
    before = everything(home)
    assert run_app(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert everything(home) == before


def test_the_list_of_datasets_has_them(capsys: Capture) -> None:
    words = printed(capsys, "datasets").split()
    assert {"generated:reddit", "generated:yelp", "generated:amazon2m"} <= set(words)
    assert "generated:ogbn-products" in words
