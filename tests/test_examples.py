"""Every script of examples/ runs, offline and in seconds, and is listed."""

import os
import runpy
from pathlib import Path

import pytest

import silograph as sg

ROOT = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(path.name for path in ROOT.glob("*.py"))


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # without data sets beside it
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SILOGRAPH_DATA", raising=False)
    runpy.run_path(str(ROOT / name), run_name="__main__")
    assert "Graph(" in capsys.readouterr().out
    assert os.listdir(tmp_path) == []  # an example leaves nothing behind


def test_every_example_is_listed_and_says_what_it_shows() -> None:
    listed = (ROOT / "README.md").read_text()
    for name in SCRIPTS:
        assert f"]({name})" in listed
        text = (ROOT / name).read_text()
        assert "\nShows: " in text
        assert len(text.splitlines()) <= 40


@pytest.mark.parametrize("participation", [0.5, 1.0])
def test_the_method_of_the_example_keeps_to_the_selected_clients(participation: float) -> None:
    method = runpy.run_path(str(ROOT / "own_method.py"))["METHOD"]
    result = sg.run("digits", method=method, clients=4, rounds=2, participation=participation)
    called = [r for r in result.ledger.records if r.op == "train" and r.what == "weights"]
    assert {len(set(record.clients.tolist())) for record in called} == {round(4 * participation)}
    assert method.caution == ""
