"""The cells of FedGrAINS' tables: controls differ in one thing, and figures are paired by seed."""

import dataclasses
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "fedgrains"))

import recipe_silos as silos
import recipe_strong as strong
import recipe_table1 as table1
import recipe_table2 as table2
import recipe_table3 as table3
import recipe_tuned as tuned
from personal_cells import METHODS, SAGE, SAMPLERS, SEEDS, Place, by_seed, cell_of, paired, scores

from silograph.experiment.resolve.resolve import choose
from silograph.study.cells import Cell
from silograph.study.reproduce import StudyLines

PLACE = Place("disjoint", "cora", 10)


def config_of(cell: Cell) -> dict[str, Any]:
    return dataclasses.asdict(cell.config)


def test_every_cell_is_its_own_and_its_parts_go_together() -> None:
    for recipe in (table1, table2, table3, strong, silos, tuned):
        cells = recipe.cells(StudyLines([]))
        assert len({cell.digest for cell in cells}) == len(cells)
    for method, sampler in product(METHODS, SAMPLERS):
        choose(cell_of(PLACE, method, sampler, 0).config)


@pytest.mark.parametrize("method", METHODS)
def test_controls_differ_in_one_thing(method: str) -> None:
    whole, batches, ours, uniform, untrained = (
        config_of(cell_of(PLACE, method, sampler, 1)) for sampler in SAMPLERS
    )
    assert {k for k in whole if whole[k] != batches[k]} == {"batch_size"}
    assert {k for k in batches if batches[k] != ours[k]} == {"neighbors", "options"}
    for control, policy in ((uniform, "uniform"), (untrained, "untrained")):
        assert {k for k in ours if ours[k] != control[k]} == {"options"}
        changed = {k for k, v in ours["options"].items() if control["options"][k] != v}
        assert changed == {"neighbors.policy"}
        assert control["options"]["neighbors.policy"] == policy


def line_of(cell: Cell, accuracy: float) -> dict[str, Any]:
    scored = {"personalized": {"accuracy_client_mean": accuracy}}
    return {"labels": cell.labels, "config": config_of(cell), "test": scored}


class Lines(StudyLines):
    """Lines by the digest of their cell."""

    def __init__(self, values: dict[Cell, float]) -> None:
        self.lines = {cell.digest: line_of(cell, value) for cell, value in values.items()}


def test_differences_are_of_the_same_seed() -> None:
    """Gains 2 and 4 points in two seeds: mean 3, standard error 1; the third has not run."""
    cells = {(s, seed): cell_of(PLACE, "fedavg", s, seed) for s in SAMPLERS for seed in SEEDS}
    values = {cells["fedgrains", 0]: 0.72, cells["fedgrains", 1]: 0.84}
    values |= {cells["", 0]: 0.70, cells["", 1]: 0.80, cells["", 2]: 0.1}
    found = Lines(values)
    assert by_seed(found, PLACE, "fedavg", "fedgrains") == {0: 0.72, 1: 0.84}
    text = paired(by_seed(found, PLACE, "fedavg", "fedgrains"), by_seed(found, PLACE, "fedavg", ""))
    assert text == "+3.00 ± 1.00"
    assert paired({0: 0.5}, {1: 0.5}) == "-"
    assert paired({0: 0.5}, {0: 0.4}) == "+10.00"
    table = scores(found, PLACE, table1.PRINTED)
    assert "| fedavg | 72.06 | 53.33 ± 37.86 (-18.73) | +3.00 ± 1.00 |" in table
    assert "| fedavg + FedGrAINS | 80.16 | 78.00 ± 8.49 (-2.16) |  |" in table


@pytest.mark.parametrize("recipe", [table1, table2])
def test_the_papers_figures_are_whole(recipe: Any) -> None:
    assert all(len(row) == 15 for row in recipe.PRINTED.values())
    assert all(50 < value < 100 for row in recipe.PRINTED.values() for value in row.values())
    assert len(recipe.PRINTED) == 2 * len(METHODS) - 1 + len(SAGE)  # local, FedSage+: alone


def test_training_is_picked_by_validation_on_shared_seeds() -> None:
    """A way that lacks a seed is judged on the others; where no seed has all, the first stays."""
    scores = {"a": {0: 0.5, 1: 0.9}, "a, x": {0: 0.6}, "a, y": {0: 0.55, 1: 0.99}}
    assert strong.pick(list(scores), scores.__getitem__) == "a, x"
    assert strong.pick(list(scores), {**scores, "a, x": {2: 1.0}}.__getitem__) == "a"
    assert strong.ways_of("fedavg", strong.OTHER_WAYS) == [
        "fedavg",
        "fedavg, SGD .1 x 10",
        "fedavg, SGD 1 x 10",
    ]


def test_a_best_trial_is_chosen_by_validation_alone() -> None:
    """Of equal ones the first; further seeds only when all trials have ended."""
    run = ("fedavg", "")
    trials = tuned.trials_of(run)
    assert len(trials) == tuned.TRIALS + 1 <= 30

    def lines(scores: list[float]) -> StudyLines:
        found = Lines({each: 1 - score for each, score in zip(trials, scores, strict=False)})
        for line, score in zip(found.lines.values(), scores, strict=True):
            line["val"] = {"personalized": {"accuracy_client_mean": score}}
        return found

    scores = [0.5, 0.7, 0.6, 0.7, *[0.1] * (tuned.TRIALS - 3)]
    whole, part = lines(scores), lines(scores[:3])
    for found in (whole, part):
        best = tuned.best_of(found, run)
        assert best is not None
        assert best["labels"]["trial"] == 1
    assert tuned.further(part, run) == []
    asked = tuned.further(whole, run)
    assert [(c.labels["trial"], c.labels["seed"]) for c in asked] == [
        (0, 1),
        (1, 1),
        (0, 2),
        (1, 2),
    ]
    assert "70.00 | 50.00 | 30.00" in tuned.page(whole).sections["scores"]


def test_trials_stay_in_their_ranges_and_runs_share_them() -> None:
    for run, trial in product(tuned.RUNS, range(1, tuned.TRIALS + 1)):
        values = tuned.settings(*run, trial)
        for key, known in tuned.ranges_of(*run).items():
            value = values[key]
            assert value in known.choices or known.low <= float(value) <= known.high
            assert value == tuned.drawn(known, key, trial)
        choose(tuned.cell_of(*run, trial, 0).config)
    first = tuned.settings("local", "", 1)
    assert first.items() <= tuned.settings("fedpub", "fedgrains", 1).items()
