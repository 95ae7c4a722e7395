"""FedOpt's default: local steps against their rate, by graph, cut and number of clients."""

import statistics
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from silograph.core.config import Scalar
from silograph.experiment.terminal_table import markdown_table
from silograph.study.cells import Cell, Line
from silograph.study.reproduce import Page, Recipe, StudyLines, cell, spread

sys.path.insert(0, str(Path(__file__).parent))

from small_sage import ADAM_STEP, SMALL_SAGE

# Everything that decides a cell stands here, so that a change of the defaults changes no cell.
PROTOCOL: dict[str, Any] = SMALL_SAGE | {
    "method": "fedopt",
    "optimizer": "sgd",
    "keep_optimizer": False,
    "weight_decay": 5e-4,
    "server_optimizer": "adam",
    "options": ADAM_STEP,
    "speeds": "equal",
    "links": "10:0.05",
}
# Local epochs and their rate.
SETTINGS: dict[str, tuple[int, float]] = {
    "1 of .1": (1, 0.1),
    "3 of .03": (3, 0.03),
    "5 of .01": (5, 0.01),
    "5 of .02": (5, 0.02),
    "5 of .04": (5, 0.04),
    "10 of .02": (10, 0.02),
}
BEFORE = "1 of .1"
CUTS = ("random", "metis")
PLACES = [(g, c, n) for n in (10, 100) for g in ("cora", "amazon_photo") for c in CUTS]
PLACES += [("coauthor_cs", cut, 100) for cut in CUTS] + [("pubmed", cut, 100) for cut in CUTS]
PLACES += [("pubmed", cut, 1000) for cut in CUTS]
SEEDS = (0, 1, 2)
Place = tuple[str, str, int]


@cache
def cell_of(place: Place, setting: str, seed: int) -> Cell:
    """Return a cell."""
    dataset, cut, clients = place
    labels: dict[str, Scalar] = {
        "dataset": dataset,
        "cut": cut,
        "clients": clients,
        "setting": setting,
        "seed": seed,
    }
    epochs, lr = SETTINGS[setting]
    own = {"dataset": dataset, "partition": cut, "clients": clients, "seed": seed}
    return cell(labels, **PROTOCOL | own, local_epochs=epochs, lr=lr)


def cells(found: StudyLines) -> Sequence[Cell]:
    """Return all cells, seed by seed."""
    del found
    return [cell_of(p, s, seed) for seed in SEEDS for p in PLACES for s in SETTINGS]


def lines_of(found: StudyLines, place: Place, setting: str) -> list[Line]:
    """Return the runs of a setting, of those seeds that have run with all settings."""
    seeds = [s for s in SEEDS if all(found.scored([cell_of(place, o, s)]) for o in SETTINGS)]
    return found.scored([cell_of(place, setting, seed) for seed in seeds])


def scores_of(lines: Sequence[Line], part: str = "test") -> list[float]:
    """Return the accuracy of the server's model at the best validation round."""
    return [line[part]["server"]["accuracy"] for line in lines]


def place_table(found: StudyLines) -> str:
    """Return accuracy by place and setting, the best validation accuracy bold."""
    rows = []
    for place in PLACES:
        lines = {setting: lines_of(found, place, setting) for setting in SETTINGS}
        if not lines[BEFORE]:
            continue
        vals = {s: statistics.mean(scores_of(lines[s], part="val")) for s in SETTINGS}
        texts = [
            f"**{spread(scores_of(lines[s]))}**"
            if vals[s] == max(vals.values())
            else spread(scores_of(lines[s]))
            for s in SETTINGS
        ]
        rows.append([place[0], place[1], str(place[2]), str(len(lines[BEFORE])), *texts])
    return markdown_table(["graph", "cut", "clients", "seeds", *SETTINGS], rows)


def mean_of(found: StudyLines, setting: str, part: str) -> float:
    """Return the accuracy of a setting over all places in percent."""
    scores = [scores_of(lines_of(found, place, setting), part=part) for place in PLACES]
    return 100 * statistics.mean(statistics.mean(s) for s in scores if s)


def cost_table(found: StudyLines) -> str:
    """Return what settings cost beside one step of .1, as ratios over the same runs."""
    rows = []
    for setting in SETTINGS:
        ratios: dict[str, list[float]] = {"work": [], "virtual seconds": [], "bytes": []}
        losses = []
        for place in PLACES:
            ours, before = (lines_of(found, place, s) for s in (setting, BEFORE))
            for a, b in zip(ours, before, strict=True):
                ratios["work"].append(
                    a["flops_by_part"]["training"] / b["flops_by_part"]["training"]
                )
                ratios["virtual seconds"].append(a["virtual_seconds"] / b["virtual_seconds"])
                ratios["bytes"].append(a["bytes"]["total"] / b["bytes"]["total"])
            if ours:
                losses.append(statistics.mean(scores_of(ours)) - statistics.mean(scores_of(before)))
        costs = [f"{statistics.mean(r):.3g}" for r in ratios.values()]
        means = [f"{mean_of(found, setting, part):.2f}" for part in ("val", "test")]
        rows.append([setting, *means, f"{100 * min(losses):+.2f}", *costs])
    heads = ["local epochs and rate", "validation", "test", "least gain over 1 of .1"]
    return markdown_table([*heads, "work of training", "virtual seconds", "bytes"], rows)


def page(found: StudyLines) -> Page:
    """Return the page."""
    return Page({"costs": cost_table(found), "places": place_table(found)})


RECIPE = Recipe(
    name="defaults/fedopt",
    title="FedOpt's local steps against their rate",
    cells=cells,
    page=page,
    text="""\
# FedOpt's local steps and their rate

<!-- costs -->
<!-- costs -->

FedOpt was trained with six pairs of local epochs and learning rate, on five graphs with two cuts.
Five epochs of SGD with rate .02 gain 18 to 41 points on Photo over one step of .1, and lose at
most 1.5 points on Cora. Use the default (five epochs of .02), and try `--local-epochs 1 --lr 0.1`
on graphs like Cora.

## How it was measured

The model is GraphSAGE with 32 hidden units. A run has 50 rounds, weight decay 5e-4, and server
Adam (rate .01, relative tau .01). Accuracy is that of the server's model, in percent. The first
table has means over the rows of the second one, costs as ratios to one step of .1, and the worst
difference of test accuracy in any row (*least gain*).

## By graph, cut and number of clients

Bold marks the best setting by validation.

<!-- places -->
<!-- places -->

## Limits

- Ten epochs are .6 points ahead of five in validation, for twice the work. The default does
  without them.
- No setting is within a point of one step of .1 on every graph.

<!-- again -->
<!-- again -->

<!-- cells -->
<!-- cells -->

<!-- machine -->
<!-- machine -->
""",
)
