"""Every method's default beside FedOpt's on Cora and Photo, and defaults that were tried."""

import sys
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from silograph.core.config import Scalar
from silograph.experiment.terminal_table import markdown_table
from silograph.study.cells import Cell, Line
from silograph.study.reproduce import Page, Recipe, StudyLines, cell

sys.path.insert(0, str(Path(__file__).parent))

from small_sage import ADAM_STEP, SMALL_SAGE

# Everything that decides a cell stands here, so that a change of the defaults changes no cell.
PROTOCOL: dict[str, Any] = SMALL_SAGE | {
    "participation": 1.0,
    "weight_decay": 5e-4,
    "local_epochs": 1,
    "server_optimizer": "none",
    "seed": 0,
}
ADAM: dict[str, Any] = {"optimizer": "adam", "lr": 0.01, "keep_optimizer": False}
KEPT = ADAM | {"keep_optimizer": True}
SGD: dict[str, Any] = {"optimizer": "sgd", "lr": 0.1, "keep_optimizer": False}
SHORT = SGD | {"lr": 0.02, "local_epochs": 5}
LONG = SGD | {"local_epochs": 10}
STEPS: dict[str, Any] = {"server_optimizer": "adam", "options": ADAM_STEP}
SPLITS: dict[str, Scalar] = {"epsilon1": 0.05, "epsilon2": 0.1, "warmup": 20}
CURVES: dict[str, Any] = {"method": "gcflplus", "options": SPLITS | {"sequence": 5}}
GENERATOR: dict[str, Scalar] = {
    "hidden": 0.5,
    "generator_epochs": 100,
    "cross_epochs": 5,
    "generator_lr": 0.01,
    "generator_width": 128,
    "most": 5,
    "feature_weight": 1.0,
}
FEDSAGE: dict[str, Any] = {"method": "fedsageplus", "options": GENERATOR}
LLCG: dict[str, Any] = {"method": "llcg", "options": {"server_share": 1.0, "correction_steps": 1}}
PUB: dict[str, Scalar] = {
    "scale": 3.0,
    "l1": 0.0,
    "proximal": 0.0,
    "masks": True,
    "communities": 5,
}
DROPPED: dict[str, Scalar] = {"kappa": 256, "keep_1": 0.5, "keep_2": 0.5, "policy": "fixed"}
IMPORTANT: dict[str, Scalar] = {"tau": 2, "ratio": 0.7, "batches": 10, "drawn": 10}
IMPORTANT |= {"unbiased": True}
FEDOPT = "fedopt"
METHODS: dict[str, dict[str, Any]] = {
    FEDOPT: {"method": "fedopt", **SHORT, **STEPS},
    "local": {"method": "local", **KEPT},
    "fedavg": {"method": "fedavg", **ADAM},
    "fedprox": {"method": "fedprox", **ADAM, "local_epochs": 3, "options": {"mu": 0.1}},
    "llcg": LLCG | ADAM,
    "scaffold": {"method": "scaffold", **LONG, "options": {"server_lr": 1.0}},
    "fedper": {"method": "fedper", **ADAM, "options": {"private": 1}},
    "gcfl": {"method": "gcfl", **ADAM, "options": SPLITS},
    "gcflplus": CURVES | ADAM,
    "fedpub": {"method": "fedpub", **KEPT, "options": PUB},
    "fedsageplus": FEDSAGE | ADAM,
    "fedgraph": {"method": "fedgraph", **SGD, **STEPS, "options": ADAM_STEP | DROPPED},
    "fedais": {"method": "fedais", **SGD, **STEPS, "lr": 0.01, "local_epochs": 2}
    | {"options": ADAM_STEP | IMPORTANT, "weight_decay": 0.0},
    "label_guided": {"method": "label_guided", **KEPT},
    "bns": {"method": "bns", **KEPT, "options": {"rate": 0.1}},
    "cagnet": {"method": "cagnet", **KEPT},
}
TRIED: dict[str, dict[str, Any]] = {
    "fedavg, Adam kept": {"method": "fedavg", **KEPT},
    "fedprox, Adam kept": METHODS["fedprox"] | {"keep_optimizer": True},
    "llcg, Adam kept": LLCG | KEPT,
    "fedper, Adam kept": METHODS["fedper"] | KEPT,
    "gcfl, Adam kept": METHODS["gcfl"] | KEPT,
    "fedsageplus, Adam kept": FEDSAGE | KEPT,
    "fedavg, ten of SGD .1": {"method": "fedavg", **LONG},
    "fedper, five of SGD .02, step": METHODS["fedper"]
    | SHORT
    | STEPS
    | {"options": ADAM_STEP | {"private": 1}},
    "fedper, ten of SGD .1": METHODS["fedper"] | LONG,
    "gcfl, ten of SGD .1": METHODS["gcfl"] | LONG,
    "gcflplus, ten of SGD .1": CURVES | LONG,
    "fedsageplus, five of SGD .02, step": FEDSAGE
    | SHORT
    | STEPS
    | {"options": ADAM_STEP | GENERATOR},
    "fedpub, Adam built anew": METHODS["fedpub"] | ADAM,
}
ALL = METHODS | TRIED
PLACES = list(product(("cora", "amazon_photo"), ("metis", "random"), (10, 100)))
NAMES = {"cora": "Cora", "amazon_photo": "Photo"}


@cache
def cell_of(place: tuple[str, str, int], method: str) -> Cell:
    """Return a cell."""
    dataset, cut, clients = place
    labels: dict[str, Scalar] = {"dataset": dataset, "cut": cut, "clients": clients}
    own = {"dataset": dataset, "partition": cut, "clients": clients}
    return cell(labels | {"method": method}, **PROTOCOL | ALL[method] | own)


def cells(found: StudyLines) -> list[Cell]:
    """Return all cells, the defaults first."""
    del found
    return [cell_of(place, m) for methods in (METHODS, TRIED) for place in PLACES for m in methods]


def score(line: Line | None, part: str) -> float | None:
    """Return the accuracy of the view that a method is about, in percent."""
    if line is None or "error" in line:
        return None
    return 100 * float(line[part][line["judge"]]["accuracy"])


def text_of(line: Line | None, reference: Line | None) -> str:
    """Return test accuracy; `!`: validation is more than a point behind FedOpt's."""
    if line is None:
        return "-"
    val, other = score(line, "val"), score(reference, "val")
    if val is None:
        return "diverged"
    return f"{score(line, 'test'):.1f}{' !' * (other is not None and val < other - 1)}"


def table_of(found: StudyLines, methods: dict[str, dict[str, Any]]) -> str:
    """Return a row for each method, a column for each place."""
    rows = [
        [m, *(text_of(found.any(cell_of(p, m)), found.any(cell_of(p, FEDOPT))) for p in PLACES)]
        for m in methods
    ]
    return markdown_table(["method", *(f"{NAMES[d]}, {c} {n}" for d, c, n in PLACES)], rows)


def page(found: StudyLines) -> Page:
    """Return the page."""
    return Page({"defaults": table_of(found, METHODS), "tried": table_of(found, TRIED)})


RECIPE = Recipe(
    name="defaults/beside_fedopt",
    title="every method's default beside FedOpt's",
    cells=cells,
    page=page,
    text="""\
# Every method's default beside FedOpt's

<!-- defaults -->
<!-- defaults -->

Each method was run with its default training beside `fedopt` (test accuracy in percent at the best
validation round, each method in the view that it is about; `!`: more than a point behind FedOpt in
validation). Local Adam that is built anew in every round, the setting of most papers, is up to 55
points behind, and keeping its state does not mend it. So `fedper` and `fedsageplus` now train as
`fedopt` does, and `gcfl` and `gcflplus` by ten local epochs of SGD .1; `fedavg` and `fedprox` keep
their papers' setting, and say so.

## How it was measured

SAGE with 32 hidden units, 50 rounds, split .2/.4/.4, seed 0. The rows of `fedper`, `gcfl`,
`gcflplus` and `fedsageplus` above are the defaults of before; today's are among those below.

## Defaults that were tried

<!-- tried -->
<!-- tried -->

FedSage+ trained as FedOpt is behind FedOpt on random cuts: there its generated neighbors hurt.

## Limits

- One seed: differences below a point are chance. Not all cells have run; the list below names them.
- FED-PUB keeps its paper's training and is 6 to 12 points behind on Cora; `fedper` has no server
  view, so its column is of the clients' own models.

<!-- again -->
<!-- again -->

<!-- cells -->
<!-- cells -->
""",
)
