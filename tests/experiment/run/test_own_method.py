"""Laws of methods that users wrote: a value, or a file that is found again; and every mistake."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import silograph as sg
from commands import Capture, printed
from runs import (
    FAST,
    MakeGraph,
    assert_close,
    files_of,
    go,
    of,
    outcome,
    rows_of,
    run_until,
    same_bits,
)
from silograph.cli import run_app
from silograph.core.errors import ConfigError
from silograph.experiment.resolve.user_code import import_spec
from silograph.methods import FEDAVG, Method, Needs, Proximal

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "method_interface.md"
OWN = replace(FEDAVG, name="own", needs=Needs(corrections=lambda _: (Proximal(0.5),)))


@pytest.fixture
def heads(work: Path) -> Path:
    """The example of the page on methods, as a file."""
    example = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[0]
    lines = [line for line in example.splitlines() if line.strip()]
    assert len(lines) < 85
    path = work / "own_heads.py"
    path.write_text(example)
    return path


def test_a_method_as_a_value_runs(make_graph: MakeGraph) -> None:
    graph = make_graph()
    ours = go(graph, method=OWN, local_epochs=3)
    theirs = go(graph, method="fedprox", options={"mu": 0.5}, local_epochs=3)
    assert same_bits(of(ours), of(theirs))
    assert rows_of(ours) == rows_of(theirs)
    assert outcome(ours) == outcome(theirs) | {"method": "own"}
    assert ours.config.method == "own"


def test_a_method_of_the_library_is_a_value_too(make_graph: MakeGraph) -> None:
    graph = make_graph()
    assert outcome(go(graph, method=FEDAVG)) == outcome(go(graph, method="fedavg"))


@pytest.mark.parametrize("name", ["fedavg", "a:b"])
def test_a_value_has_a_name_of_its_own(make_graph: MakeGraph, name: str) -> None:
    message = f"^expected a name of its own, without a colon, .* got '{name}': use dataclasses"
    with pytest.raises(ConfigError, match=message):
        go(make_graph(), method=replace(OWN, name=name))


def test_a_run_of_a_value_goes_on_with_it(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    graph, options = make_graph(), FAST | {"method": OWN, "local_epochs": 2}
    sg.run(graph, out=str(tmp_path / "whole"), **options)
    run_until(monkeypatch, graph, 3, tmp_path / "cut", **options)
    with pytest.raises(ConfigError) as caught:
        sg.resume(tmp_path / "cut", graph=graph)
    assert str(caught.value) == (
        "expected the method 'own' of the run, got none: it was given as a value; "
        "use sg.resume(DIR, method=...)"
    )
    with pytest.raises(ConfigError, match=r"^expected method 'own', got one named 'other'$"):
        sg.resume(tmp_path / "cut", graph=graph, method=replace(OWN, name="other"))
    sg.resume(tmp_path / "cut", graph=graph, method=OWN)
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")


def test_the_example_shares_the_body_and_keeps_the_heads(
    make_graph: MakeGraph, heads: Path
) -> None:
    method = import_spec(f"{heads}:METHOD", Method)
    many, one = (go(make_graph(), method=method, block_size=size) for size in (4, 1))
    assert many.model is None
    assert_close(many, one, 1e-10)
    local = go(make_graph(), method="local")
    whole = go(make_graph(), method="fedavg")
    sent = [r.ledger.bytes_by_kind["weights"] for r in (local, many, whole)]
    assert sent == sorted(sent)


def test_a_file_on_the_command_line(
    heads: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["run", "g.npz", "--clients", "3", "--rounds", "2", "--partition", "random", "--json"]
    values = json.loads(printed(capsys, *command, "--method", "own_heads.py:METHOD", "--out", "x"))
    assert values["method"] == "own-heads"
    result = json.loads(Path("x/result.json").read_text())
    Path("x/result.json").unlink()
    monkeypatch.chdir(heads.parent.parent)  # the folder knows where the file is
    printed(capsys, "resume", str(heads.parent / "x"), "--json", "--trust")
    again = json.loads((heads.parent / "x" / "result.json").read_text())
    assert again["test"] == result["test"]
    heads.write_text(heads.read_text() + "\n# changed\n")
    Path(heads.parent / "x" / "result.json").unlink()
    assert run_app(["resume", str(heads.parent / "x"), "--trust"]) == 2
    assert "expected a run with method " in capsys.readouterr().err


def test_the_default_folder_of_a_file_has_its_name(heads: Path, capsys: Capture) -> None:
    printed(capsys, "run", "g.npz", "--clients", "3", "--rounds", "1", "--partition", "random",
            "--method", "own_heads.py:METHOD")  # fmt: skip
    assert [p.name.rpartition("-own-heads-")[0] for p in Path("runs").iterdir()] == ["g"]


def test_a_method_of_a_file_is_called_by_its_name(heads: Path, capsys: Capture) -> None:
    """Tables, pages and rows; the run file and what is resumed still name the file."""
    common = ["g.npz", "--clients", "3", "--rounds", "1", "--partition", "random"]
    text = printed(capsys, "run", *common, "--method", "own_heads.py:METHOD", "--out", "x")
    assert text.startswith("g, own-heads, 3 clients (random)\n")
    page = Path("x/report.html").read_text()
    assert "<h1>own-heads on g</h1>" in page
    assert "own_heads.py:METHOD" in Path("x/config.toml").read_text()
    asked = ["--methods", "local,own_heads.py:METHOD", "--seeds", "1", "--processes", "0"]
    table = printed(capsys, "compare", *common, *asked, "--out", "y")
    assert any(line.startswith("own-heads ") for line in table.splitlines())
    assert "METHOD" not in table + Path("y/compare.md").read_text()
    printed(capsys, "run", *common, "--method", "local", "--out", "z")
    printed(capsys, "report", "x", "z", "--out", "both.html")
    assert "</i>own-heads</th>" in Path("both.html").read_text()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (
            "own_heads.py:METHODS",
            "error: unknown Method in own_heads.py 'METHODS'; choices: M",
        ),
        ("own_heads.py:split", "error: expected a Method in own_heads.py:split, got function"),
        ("no_such.py:METHOD", "error: expected to import no_such.py, got FileNotFoundError"),
    ],
)
def test_mistakes_are_one_line(heads: Path, capsys: Capture, spec: str, expected: str) -> None:
    assert run_app(["run", "g.npz", "--method", spec]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert expected in text
    assert not Path("runs").exists()


def test_a_module_that_python_finds(heads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(heads.parent))
    result = sg.run("g.npz", **FAST | {"method": "own_heads:METHOD"})
    assert result.config.method == "own_heads:METHOD"
