"""Cells of FedAIS' tables and figures, and what is read from their lines."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from silograph.core.config import RunConfig, Scalar
from silograph.study.cells import Cell, Line
from silograph.study.reproduce import StudyLines, cell

CUTS: dict[str, dict[str, Any]] = {
    "iid": {"partition": "random"},
    "Dirichlet .5": {"partition": "dirichlet", "alpha": 0.5},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adam rebuilt": {"optimizer": "adam", "lr": 1e-3},
    "Adam kept": {"optimizer": "adam", "lr": 1e-3, "keep_optimizer": True},
    **{f"SGD {lr}": {"optimizer": "sgd", "lr": lr, "momentum": 0.0} for lr in (0.1, 0.3, 1.0)},
}
REBUILT, KEPT = "Adam rebuilt", "Adam kept"
FOLDS = 5
BATCHES = 10
# Everything that decides a cell stands here, so that a change of the defaults changes no cell.
PROTOCOL: dict[str, Any] = {
    "largest_component": False,
    "normalize": "none",
    "drop_edges": 0.5,
    "selector": "all",
    "model": "sage",
    "layers": 3,
    "hidden": "256,128",
    "head": "linear",
    "dropout": 0.0,
    "local_epochs": 1,
    "weight_decay": 1e-3,
    "keep_optimizer": False,
    "rounds": 100,
    "eval_every": 5,
    "speeds": "equal",  # a clock writes work and bytes of every scored round down
    "links": "10:0.05",
}
PRESETS = ("fedall", "fedrandom", "fedlocal", "fedpns", "fedais1", "fedais2", "stale")
STORED = ("fedais", *PRESETS)
JOINED = ("centralized", "bns", "label_guided")  # steps of all silos together
OPTIONS: dict[str, Scalar] = {
    "batches": BATCHES,
    "drawn": 10,
    "ratio": 0.7,
    "warmup": 1,
    "floor": 0.1,
    "unbiased": False,
    "owners": "recompute",
    "share_features": False,
    "average": "clients",
}
NODES = {  # of 100 clients' data, for batches of other methods
    "pubmed": 19717,
    "amazon_photo": 7650,
    "amazon_computers": 13752,
    "coauthor_cs": 18333,
}
SERVER: dict[str, Scalar] = {
    "server_lr": 0.01,
    "server_beta1": 0.9,
    "server_beta2": 0.99,
    "server_relative_tau": 0.1,
}


WORK = "work of training"
SHORT = (5, 10)  # rounds of short runs, each with a last one that is scored
FIELDS = {field.name for field in fields(RunConfig)}


@dataclass(frozen=True)
class Place:
    """Where a cell stands, apart from its method.

    Attributes:
        dataset: its name.
        cut: of `CUTS`.
        optimizer: of `OPTIMIZERS`.
        clients: how many.
        alpha: of a Dirichlet cut, in place of the cut's own; 0: that.
    """

    dataset: str
    cut: str = "iid"
    optimizer: str = REBUILT
    clients: int = 100
    alpha: float = 0.0


@cache
def cell_of(place: Place, method: str, fold: int, changes: str = "") -> Cell:
    """Return the cell of a method; `changes`: fields and options that differ, as `a=1 b=2`."""
    labels: dict[str, Scalar] = {
        "dataset": place.dataset,
        "method": method,
        "cut": place.cut,
        "adam": place.optimizer,
        "clients": place.clients,
        "alpha": place.alpha,
        "changes": changes,
        "fold": fold,
    }
    cut = CUTS[place.cut] | ({"alpha": place.alpha} if place.alpha else {})
    own = PROTOCOL | cut | OPTIMIZERS[place.optimizer] | options_of(place, method)
    given = {name: plain(text) for name, text in (c.split("=") for c in changes.split())}
    own |= {name: value for name, value in given.items() if name in FIELDS}
    changed = {name: value for name, value in given.items() if name not in FIELDS}
    options = {**own.pop("options", {}), **changed}
    split = f"fold={fold}/{FOLDS}"
    numbers = {"clients": place.clients, "seed": fold - 1, "split_seed": 0, "partition_seed": 0}
    return cell(
        labels, dataset=place.dataset, method=method, split=split, options=options, **numbers, **own
    )


def options_of(place: Place, method: str) -> dict[str, Any]:
    """Return what a method is given beside the protocol: batches and neighbors like FedAIS'."""
    if method in STORED:
        return {"options": dict(OPTIONS), "server_optimizer": "none"}
    if method == "local":
        return {"local_epochs": BATCHES}  # as many steps, with all nodes
    if method in JOINED:
        return {"local_epochs": BATCHES, "selector": None}
    rows = 0.8 * NODES[place.dataset] / place.clients  # a mean client's training nodes
    batch = max(1, -(-round(rows) // BATCHES))
    if method == "fedgraph":
        own = {"kappa": batch, "local_steps": BATCHES}
        return {"selector": None, "options": own, "server_optimizer": "none"}
    drawn: dict[str, Any] = {"batch_size": batch, "fanout": "10,10"}
    if method == "fedsageplus":
        drawn["server_optimizer"] = "none"
    return drawn | ({"options": dict(SERVER)} if method == "fedopt" else {})


def plain(text: str) -> Scalar:
    """Return the value that a text is."""
    if text in ("true", "false"):
        return text == "true"
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() and "." not in text else number


def cell_again(labels: Mapping[str, Any]) -> Cell:
    """Return the cell of a line's labels."""
    place = Place(*(labels[n] for n in ("dataset", "cut", "adam", "clients", "alpha")))
    return cell_of(place, labels["method"], labels["fold"], labels["changes"])


# What lines say.


def line_of(
    found: StudyLines, place: Place, method: str, fold: int, changes: str = ""
) -> Line | None:
    """Return the line of a cell with scores, or None."""
    line = found.any(cell_of(place, method, fold, changes))
    return None if line is None or "error" in line else line


def scores(line: Line, view: str, metric: str) -> float | None:
    """Return a test score of the best round by validation."""
    got = line["test"].get(view)
    return None if got is None else got[metric]


def rows_bytes(line: Line) -> list[float]:
    """Return bytes of training so far without weights, at each scored round."""
    each = line["bytes"]["by_kind"].get("weights", 0) / line["rounds"]
    pairs = zip(total_bytes(line), line["curve"]["round"], strict=True)
    return [total - each * number for total, number in pairs]


def total_bytes(line: Line) -> list[float]:
    """Return bytes of training so far, at each scored round; evaluation is not of it."""
    curve = line["curve"]
    return [a - b for a, b in zip(curve["bytes"], curve["bytes_evaluation"], strict=True)]


def spent(found: StudyLines, line: Line, cost: str) -> list[float] | None:
    """Return what a run has cost so far at each scored round; None: not known."""
    return training_work(found, line) if cost == WORK else SIZES[cost](line)


def training_work(found: StudyLines, line: Line) -> list[float] | None:
    """Return operations of training at all clients so far, at each scored round.

    A line has those of all work. Steps of the optimizer and evaluation are as many in each round
    of a run, and two short runs tell how many.
    """
    short = [found.any(each) for each in short_cells(line["labels"])]
    known = [each for each in short if each is not None and "error" not in each]
    if len(known) < len(SHORT) or _is_recounted(line, known[-1]):
        return None
    parts = [each["flops_by_part"] for each in known]
    first, second = (part["evaluation"] for part in parts)
    scored = second - first
    step = (parts[1]["optimizer"] - parts[0]["optimizer"]) / (SHORT[1] - SHORT[0])
    first += parts[0]["optimizer"] - step * SHORT[0]  # steps of set-up, as of generators
    curve = line["curve"]
    pairs = zip(curve["round"], curve["flops"], strict=True)
    return [
        all_work - step * number - first - scored * n for n, (number, all_work) in enumerate(pairs)
    ]


def _is_recounted(line: Line, short: Line) -> bool:
    """Whether a run is of a version that took more work for the same: by that of a short one.

    Folds and settings differ by up to 6 % of what training takes, versions by 20 % and more.
    """
    work = dict(zip(line["curve"]["round"], line["curve"]["flops"], strict=True))
    more = abs(work[short["rounds"]] - short["flops"])
    return bool(more / short["flops_by_part"]["training"] > 0.1)


def short_cells(labels: Mapping[str, Any]) -> list[Cell]:
    """Return the short runs that tell what a round's steps and evaluation take."""
    texts = [f"rounds={rounds} {labels['changes']}".strip() for rounds in SHORT]
    return [cell_again({**labels, "fold": 1, "changes": text}) for text in texts]


def with_short(wanted: Sequence[Cell]) -> list[Cell]:
    """Return some cells, each with the short runs of its kind before it."""
    each = {id(short): short for cell in wanted for short in (*short_cells(cell.labels), cell)}
    return list(each.values())


SIZES = {"rows' bytes": rows_bytes, "all bytes": total_bytes}
COSTS = (*SIZES, WORK)


def goal_of(found: StudyLines, place: Place, fold: int) -> float | None:
    """Return FedAll's test accuracy in the end less half a point."""
    line = line_of(found, place, "fedall", fold)
    return None if line is None else line["curve"]["test"][-1] - 0.005


def first_at(line: Line, goal: float) -> int | None:
    """Return which scored round is the first with a test accuracy of the goal; None: none is."""
    return next((n for n, value in enumerate(line["curve"]["test"]) if value >= goal), None)


def savings(
    found: StudyLines, place: Place, method: str, changes: str = ""
) -> dict[str, list[float]]:
    """Return what is saved beside FedAll to `goal_of`, in percent, one for each fold that has both.

    A fold in which the goal is not met counts as what the whole run has cost, which is too little.
    """
    found_by: dict[str, list[float]] = {name: [] for name in COSTS}
    for fold in range(1, FOLDS + 1):
        goal, line = goal_of(found, place, fold), line_of(found, place, method, fold, changes)
        base = line_of(found, place, "fedall", fold)
        if goal is None or line is None or base is None:
            continue
        ours, theirs = first_at(line, goal), first_at(base, goal)
        for name in COSTS:
            cost, usual = spent(found, line, name), spent(found, base, name)
            if cost is not None and usual is not None and theirs is not None:
                share = cost[-1 if ours is None else ours] / usual[theirs]
                found_by[name].append(100 * (1 - share))
    return found_by


def bounds(found: StudyLines, place: Place) -> list[float]:
    """Return what sending no row at all would save of FedAll's bytes, in percent, for each fold."""
    lines = [line_of(found, place, "fedall", fold) for fold in range(1, FOLDS + 1)]
    pairs = [(rows_bytes(line)[-1], total_bytes(line)[-1]) for line in lines if line]
    return [100 * rows / total for rows, total in pairs]


def met(found: StudyLines, place: Place, method: str, changes: str = "") -> list[bool]:
    """Return for each fold that has both whether a method gets to `goal_of`."""
    pairs = (
        (line_of(found, place, method, fold, changes), goal_of(found, place, fold))
        for fold in range(1, FOLDS + 1)
    )
    return [first_at(line, goal) is not None for line, goal in pairs if line and goal]


def percent(values: Sequence[float]) -> str:
    """Return a mean of percentages."""
    return f"{statistics.mean(values):.1f}" if values else "-"
