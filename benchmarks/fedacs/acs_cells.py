"""Cells of FedACS' figures: which clients train, on five cuts of Ciao and Epinions.

Every run has a virtual clock and is scored after every round. The bandit's controls, uniform and
round-robin selection at its own mean participation, wait for its line.
"""

import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from silograph.core.config import Scalar
from silograph.study.cells import Cell, Line
from silograph.study.reproduce import StudyLines, cell

sys.path.insert(0, str(Path(__file__).parent))

from recipe_profiles import BIASES, PROTOCOL
from recipe_ratings import floor
from recipe_tables import GCN, SOLVED, WIDE

DATASETS = ("ciao", "epinions")
SEEDS = (0, 1, 2)
AVERAGE = "Average, 10 clients"
# What the page calls a cut: the number of clients and how evenly they have categories.
CUTS: dict[str, tuple[int, str]] = {
    AVERAGE: (10, "average"),
    "Skewed, 10 clients": (10, "skewed"),
    "Extreme, 10 clients": (10, "extreme"),
    "5 clients": (5, "average"),
    "20 clients": (20, "average"),
}
CLOCK: dict[str, Any] = {"speeds": "lognormal", "links": "10:0.05", "eval_every": 1}
ALONE = "biases in each silo"
EVERYBODY, BANDIT = "FedGraphNN (all)", "FedACS"
NUMBER, CLIENTS = "FedACS, number only (ND)", "FedACS, clients only (CS)"
SAME, TURN = "Rand at FedACS' mean", "round-robin at FedACS' mean"
# What the page calls a row: method and selector.
ROWS: dict[str, tuple[str, str]] = {
    EVERYBODY: ("fedavg", "all"),
    BANDIT: ("fedacs", "ucb"),
    SAME: ("fedavg", "uniform"),
    "Rand": ("fedavg", "uniform"),
    "Oort": ("fedavg", "oort"),
    NUMBER: ("fedacs", "ucb"),
    CLIENTS: ("fedacs", "ucb"),
    "POW": ("fedavg", "power_of_choice"),
    TURN: ("fedavg", "round_robin"),
}
EVERYWHERE = [*ROWS][:5]  # on every cut; the others on Average
LEVELS: dict[str, dict[str, Scalar]] = {
    NUMBER: {"selector.level": "number"},
    CLIENTS: {"selector.level": "clients"},
}
SHARES = (0.25, 0.5, 0.75, 0.9)  # of the way from the mean's RMSE to full participation's best
BUDGETS = (0.25, 0.5, 0.75)  # of the bytes of full participation
Cost = Callable[[Line], Sequence[float]]


def own_options(row: str, clients: int, share: float | None) -> dict[str, Scalar]:
    """Return the options of a selector, which takes half of the clients unless it has a share."""
    selector, part = ROWS[row][1], 0.5 if share is None else share
    if selector == "uniform":
        return {"selector.participation": part}
    if selector in ("all", "ucb"):
        return LEVELS.get(row, {})
    return {"selector.clients": max(1, round(part * clients))}


@cache
def alone(dataset: str, cut: str) -> Cell:
    """Return the cell of what needs neither training nor bytes, seed 0."""
    clients, how = CUTS[cut]
    labels: dict[str, Scalar] = {"dataset": dataset, "cut": cut, "row": ALONE, "seed": 0}
    placed: dict[str, Scalar] = {"partition.column": "category", "partition.spread": how}
    fields = PROTOCOL | BIASES | {"clients": clients, "method": "fedavg"}
    return cell(labels, **fields, dataset=dataset, seed=0, options=placed | SOLVED)


@cache
def cell_of(dataset: str, cut: str, row: str, seed: int, share: float | None = None) -> Cell:
    """Return a cell; `share` of the clients is for what waits for the bandit."""
    clients, how = CUTS[cut]
    method, selector = ROWS[row]
    labels: dict[str, Scalar] = {"dataset": dataset, "cut": cut, "row": row, "seed": seed}
    fields = PROTOCOL | GCN | CLOCK | {"clients": clients, "method": method, "selector": selector}
    placed: dict[str, Scalar] = {"partition.column": "category", "partition.spread": how}
    options = placed | WIDE | own_options(row, clients, share)
    return cell(labels, **fields, dataset=dataset, seed=seed, options=options)


def cell_in(found: StudyLines, dataset: str, cut: str, row: str, seed: int) -> Cell | None:
    """Return a cell; None of a control whose bandit has not run."""
    if row == ALONE:
        return alone(dataset, cut)
    if row not in (SAME, TURN):
        return cell_of(dataset, cut, row, seed)
    lines = found.scored([cell_of(dataset, cut, name, seed) for name in (BANDIT, EVERYBODY)])
    if len(lines) < 2:
        return None
    sizes = [line["bytes"]["by_kind"]["weights"] for line in lines]
    return cell_of(dataset, cut, row, seed, round(sizes[0] / sizes[1], 2))


def line_of(found: StudyLines, dataset: str, cut: str, row: str, seed: int) -> Line | None:
    """Return the line of a cell with scores."""
    place = cell_in(found, dataset, cut, row, seed)
    lines = [] if place is None else found.scored([place])
    return lines[0] if lines else None


def lines_of(found: StudyLines, dataset: str, cut: str, row: str) -> dict[int, Line]:
    """Return the lines of a row by seed, of the seeds whose full participation has run."""
    seeds = [s for s in SEEDS if line_of(found, dataset, cut, EVERYBODY, s) is not None]
    lines = {seed: line_of(found, dataset, cut, row, seed) for seed in seeds}
    return {seed: line for seed, line in lines.items() if line is not None}


def cells(found: StudyLines) -> list[Cell]:
    """Return all cells: Ciao's seed 0 first, then Ciao's other seeds, then Epinions."""
    wanted: list[Cell | None] = [alone(dataset, cut) for dataset in DATASETS for cut in CUTS]
    for dataset in DATASETS:
        for seed in SEEDS:
            wanted += [cell_in(found, dataset, c, row, seed) for c in CUTS for row in EVERYWHERE]
            rest = [row for row in ROWS if row not in EVERYWHERE]
            wanted += [cell_in(found, dataset, AVERAGE, row, seed) for row in rest]
    known = [each for each in wanted if each is not None]
    return list({each.digest: each for each in (*known, *floor())}.values())


def training_bytes(line: Line) -> list[float]:
    """Return the bytes so far without evaluation, by round."""
    curve = line["curve"]
    return [a - b for a, b in zip(curve["bytes"], curve["bytes_evaluation"], strict=True)]


def operations(line: Line) -> list[float]:
    """Return the work so far, by round."""
    return list(line["curve"]["flops"])


def virtual(line: Line) -> list[float]:
    """Return the virtual seconds so far, by round."""
    return list(line["curve"]["virtual_seconds"])


def cost_to(line: Line, level: float, cost: Cost) -> float | None:
    """Return what a run had taken when its test RMSE was first at most `level`; None: never."""
    for value, spent in zip(line["curve"]["test"], cost(line), strict=True):
        if value is not None and value <= level:
            return float(spent)
    return None


def within(line: Line, limit: float) -> float | None:
    """Return the test RMSE of the best round by validation whose bytes are within a limit."""
    rows = zip(line["curve"]["val"], line["curve"]["test"], training_bytes(line), strict=True)
    kept = [(val, test) for val, test, spent in rows if spent <= limit]
    return min(kept)[1] if kept else None


def mean_of(line: Line) -> float:
    """Return the test RMSE of predicting the mean of all training ratings."""
    return float(line["constant"]["scores"]["rmse"])


def levels(whole: Line) -> list[float]:
    """Return the test RMSE that stand for `SHARES`, given full participation's line."""
    first, best = mean_of(whole), min(whole["curve"]["test"])
    return [first + share * (best - first) for share in SHARES]
