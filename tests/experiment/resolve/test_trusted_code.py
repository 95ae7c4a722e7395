"""What a folder or a file names as code is never run before the user has said so."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import silograph as sg
from mistakes import raises_code
from silograph.cli import run_app
from silograph.core.errors import ConfigError
from silograph.experiment.resolve.user_code import digest, import_spec
from silograph.experiment.result_files import DIGEST
from silograph.methods.base import Method
from silograph.study.study import StudyFile

Capture = pytest.CaptureFixture[str]
QUICK = ["--clients", "3", "--rounds", "2", "--partition", "random", "--hidden", "4"]
OWN = """
from dataclasses import replace
from pathlib import Path

from silograph.methods import METHODS

Path({mark!r}).touch()
METHOD = replace(METHODS["fedavg"], name="mine")
"""
RECIPE = """
from pathlib import Path

Path({mark!r}).touch()
"""


@pytest.fixture
def mark(work: Path) -> Path:
    """What importing own.py leaves; own.py is there, and nothing has imported it."""
    (work / "own.py").write_text(OWN.format(mark=str(work / "ran")))
    return work / "ran"


@pytest.fixture
def stopped(mark: Path, capsys: Capture) -> Path:
    """The folder of a run with own.py that is not over."""
    assert run_app(["run", "g.npz", *QUICK, "--method", "own.py:METHOD", "--out", "x"]) == 0
    (mark.parent / "x" / "result.json").unlink()
    mark.unlink()  # naming the file on the command line was enough
    capsys.readouterr()
    return mark.parent / "x"


def refused(capsys: Capture, *words: str) -> str:
    """Return the line with which a command is refused."""
    assert run_app(list(words)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_a_folder_runs_nothing_before_it_is_trusted(
    stopped: Path, mark: Path, capsys: Capture
) -> None:
    line = refused(capsys, "resume", "x")
    assert f"the method is {stopped.parent / 'own.py'}:METHOD; read it, then add" in line
    with raises_code(ConfigError, "untrusted-code"):
        sg.resume("x")
    with raises_code(ConfigError, "untrusted-code"):
        sg.resume("x", trust=["other.py:METHOD"])
    assert not mark.exists()
    assert sg.resume("x", trust=["own.py:METHOD"]).best_round in (1, 2)
    assert mark.exists()


def test_a_folder_that_is_trusted_goes_on(stopped: Path, capsys: Capture) -> None:
    del stopped
    assert run_app(["resume", "x", "--trust", "--quiet"]) == 0
    assert "mine" in capsys.readouterr().out


def test_code_that_has_changed_is_not_imported(stopped: Path, mark: Path, capsys: Capture) -> None:
    path = stopped.parent / "own.py"
    before = digest(f"{path}:METHOD")
    path.write_text(path.read_text() + "# changed\n")
    line = refused(capsys, "resume", "x", "--trust")
    assert f"expected a run with method {digest(f'{path}:METHOD')}, got one with {before}" in line
    assert not mark.exists()


@pytest.mark.law(sample=6)
@pytest.mark.parametrize(
    "command",
    [
        ["run"],
        ["partition"],
        ["export-silos", "--out", "s"],
        ["compare", "--methods", "local"],
        ["tune"],
        ["server", "--insecure", "--listen", "127.0.0.1:0"],
        ["demo-federation"],
    ],
    ids=lambda words: words[0],
)
def test_a_run_file_runs_nothing_before_it_is_trusted(
    stopped: Path, mark: Path, capsys: Capture, command: list[str]
) -> None:
    line = refused(capsys, *command, "--config", str(stopped / "config.toml"))
    assert "config.toml names code of its own" in line
    assert "the method is" in line
    assert not mark.exists()


def test_a_run_file_whose_code_is_given_or_trusted(stopped: Path, mark: Path) -> None:
    common = ["run", "--config", str(stopped / "config.toml"), "--quiet"]
    assert run_app([*common, "--method", "fedavg", "--out", "y"]) == 0
    assert not mark.exists()
    assert run_app([*common, "--method", "own.py:METHOD", "--out", "z"]) == 0
    mark.unlink()
    assert run_app([*common, "--trust", "--out", "w"]) == 0
    assert mark.exists()


def test_reports_and_predictions_run_nothing(work: Path, mark: Path) -> None:
    assert run_app(["run", "g.npz", *QUICK, "--method", "own.py:METHOD", "--out", "x"]) == 0
    mark.unlink()
    assert run_app(["report", "x"]) == 0
    assert run_app(["predict", "x", "--data", "g.npz", "--out", "p.csv"]) == 0
    assert not mark.exists()
    page = (work / "x" / "report.html").read_text()
    assert "silograph resume x --trust" in page


@pytest.mark.usefixtures("forked")
def test_the_plan_of_a_comparison(work: Path, mark: Path, capsys: Capture) -> None:
    asked = ["--methods", "local,own.py:METHOD", "--seeds", "1", "--processes", "0", "--quiet"]
    assert run_app(["compare", "g.npz", *QUICK, *asked, "--out", "c"]) == 0
    (work / "c" / "compare.jsonl").unlink()
    mark.unlink()
    capsys.readouterr()
    assert "the method 2 is" in refused(capsys, "resume", "c", "--quiet")
    assert not mark.exists()
    assert run_app(["resume", "c", "--quiet", "--trust"]) == 0
    assert mark.exists()


def test_the_plan_of_a_search(work: Path, mark: Path, capsys: Capture) -> None:
    asked = ["--method", "own.py:METHOD", "--trials", "1", "--keys", "lr", "--quiet"]
    asked += ["--seeds", "1", "--processes", "0"]
    assert run_app(["tune", "g.npz", *QUICK, *asked, "--out", "t"]) == 0
    (work / "t" / "tune.jsonl").unlink()
    mark.unlink()
    capsys.readouterr()
    assert "the method is" in refused(capsys, "resume", "t", "--quiet")
    assert not mark.exists()


def test_lines_of_a_study_run_nothing(work: Path, mark: Path) -> None:
    common = ["compare", "g.npz", *QUICK, "--methods", "local,fedavg", "--seeds", "1"]
    common += ["--processes", "0", "--quiet", "--out", "c"]
    assert run_app(common) == 0
    lines = work / "c" / "compare.jsonl"
    line: dict[str, Any] = json.loads(lines.read_text().splitlines()[0])
    line["config"]["method"] = f"{work / 'own.py'}:METHOD"
    del line[DIGEST]  # as in lines of older versions
    lines.write_text(lines.read_text() + json.dumps(line) + "\n")
    with StudyFile(lines) as file:
        assert len(file.lines) == 3
    assert not mark.exists()


def test_recipes_by_name(work: Path, mark: Path, capsys: Capture) -> None:
    folder = work / "benchmarks" / "mine"
    folder.mkdir(parents=True)
    (folder / "recipe_first.py").write_text(RECIPE.format(mark=str(mark)))
    assert run_app(["reproduce"]) == 0
    assert "mine/first" in capsys.readouterr().out
    assert "the recipe is benchmarks/mine/recipe_first.py:RECIPE" in refused(
        capsys, "reproduce", "mine/first"
    )
    assert not mark.exists()
    for words in (["reproduce", "--trust"], ["reproduce", "mine/first", "--trust"]):
        assert "RECIPE" in refused(capsys, *words)  # the file has none, as it says once it is run
    assert mark.exists()


def test_digests_import_no_package(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = work / "some_package" / "inner"
    package.mkdir(parents=True)
    for init in (package.parent, package):
        (init / "__init__.py").write_text(RECIPE.format(mark=str(work / "ran")))
    (package / "own.py").write_text(OWN.format(mark=str(work / "ran")))
    monkeypatch.syspath_prepend(str(work))
    for source in ("some_package.inner.own", "some_package.inner", "some_package"):
        assert len(digest(f"{source}:METHOD")) == 32
    with pytest.raises(ConfigError, match=r"No module named 'some_package\.inner\.other'"):
        digest("some_package.inner.other:METHOD")
    assert not (work / "ran").exists()
    assert "some_package" not in sys.modules
    assert import_spec("some_package.inner.own:METHOD", Method).name == "mine"
    for name in [name for name in sys.modules if name.startswith("some_package")]:
        del sys.modules[name]
