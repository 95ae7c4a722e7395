"""What a run leaves where training diverges: no folder without a round, and a page that says so."""

from pathlib import Path

import pytest

from mistakes import raises_code
from pages import read_page
from runs import MakeGraph, go
from silograph.core.errors import TrainingError
from silograph.experiment.report import write_comparison
from silograph.experiment.run.run import resume

SGD = {"method": "fedavg", "optimizer": "sgd", "eval_every": 1}


def test_a_run_that_diverges_in_round_1_leaves_no_folder(
    make_graph: MakeGraph, tmp_path: Path
) -> None:
    with raises_code(TrainingError, "diverged", loss="validation", round=1):
        go(make_graph(), out=str(tmp_path / "x"), rounds=3, lr=1e300, weight_decay=1e300, **SGD)
    assert list(tmp_path.iterdir()) == []


def test_the_page_of_a_diverged_run_says_so(make_graph: MakeGraph, tmp_path: Path) -> None:
    out, steady = tmp_path / "x", tmp_path / "steady"
    growing = {"rounds": 60, "lr": 1e6, "weight_decay": 1.0, "clients": 2, **SGD}
    with raises_code(TrainingError, "diverged", loss="validation", round=25) as failed:
        go(make_graph(), out=str(out), **growing)
    assert (out / "diverged.txt").read_text(encoding="utf-8") == f"{failed.value}\n"
    text = read_page(out / "report.html").text
    assert f"training diverged after round {last_round(out)}: lower" in text
    go(make_graph(), out=str(steady), rounds=2)
    both = read_page(write_comparison([out, steady], tmp_path / "both.html").path)
    assert "diverged" in both.text
    # Resumed, it diverges in the same round.
    with pytest.raises(TrainingError) as again:
        resume(out, graph=make_graph())
    assert str(again.value) == str(failed.value)


def last_round(folder: Path) -> int:
    """Return the last round of the table."""
    return int((folder / "rounds.csv").read_text(encoding="utf-8").splitlines()[-1].split(",")[0])
