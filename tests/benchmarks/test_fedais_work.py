"""Work of training alone, as FedAIS' pages have it: by two short runs of a cell."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "fedais"))

import fedais_cells as fedais

from silograph.study.reproduce import StudyLines

TRAINING, STEPS, SCORES, FIRST, SETUP = 100.0, 7.0, 11.0, 5.0, 3.0


class Lines(StudyLines):
    """Lines by the digest of their cell."""

    def __init__(self, lines: dict[str, dict[str, Any]]) -> None:
        self.lines = lines


def line_of(rounds: int, training: float = TRAINING) -> dict[str, Any]:
    """A run that is scored every five rounds; set-up and a first score take work, too."""
    at = list(range(5, rounds + 1, 5))
    parts = {
        "training": training * rounds,
        "optimizer": SETUP + STEPS * rounds,
        "evaluation": FIRST + SCORES * len(at),
    }
    work = [SETUP + FIRST + (training + STEPS) * t + SCORES * (n + 1) for n, t in enumerate(at)]
    curve = {"round": at, "flops": work}
    return {"rounds": rounds, "flops": work[-1], "flops_by_part": parts, "curve": curve}


@pytest.mark.parametrize(("more", "known"), [(1.0, True), (1.3, False)])
def test_what_training_takes_is_told_by_short_runs(more: float, known: bool) -> None:
    """Exactly so where rounds are alike; not where the run is of a version that took more."""
    place = fedais.Place("pubmed")
    cell = fedais.cell_of(place, "fedais", 2)
    short = [fedais.cell_of(place, "fedais", 1, f"rounds={n}") for n in fedais.SHORT]
    found = Lines({c.digest: line_of(n) for c, n in zip(short, fedais.SHORT, strict=True)})
    line = {**line_of(20, more * TRAINING), "labels": dict(cell.labels)}
    work = fedais.training_work(found, line)
    assert work == ([TRAINING * t for t in (5, 10, 15, 20)] if known else None)
    assert fedais.training_work(Lines({}), line) is None
