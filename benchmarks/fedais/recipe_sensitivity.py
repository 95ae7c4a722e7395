"""FedAIS' figure 7 and its own knobs: alpha, r, floor, warm-up, on PubMed."""

import sys
from collections.abc import Sequence
from pathlib import Path

from silograph.experiment.markdown import markdown_table
from silograph.study.cells import Cell
from silograph.study.reproduce.recipe import Found, Page, Recipe, scores_of, spread

sys.path.insert(0, str(Path(__file__).parent))

from fedais_cells import KEPT, Place, cell_of, line_of, rows_bytes

ALPHAS = (0.05, 0.1, 0.5, 1.0, 10.0, 100.0)
# Methods and what is changed in them. FedAvg's mean is weighted by training nodes, that of FedAIS,
# as in its paper, is plain.
NODES = "average=nodes"
COLUMNS = {
    "fedais": ("fedais", ""),
    "fedall": ("fedall", ""),
    "fedavg": ("fedavg", ""),
    "fedais, mean by nodes": ("fedais", NODES),
    "fedall, mean by nodes": ("fedall", NODES),
}
SETTINGS = {
    "ratio": tuple(f"ratio={r}" for r in (0.1, 0.3, 0.5, 0.7, 0.9)),
    "floor": tuple(f"floor={f}" for f in (0.0, 0.1, 0.5, 1.0)),
    "warm-up": tuple(f"warmup={w}" for w in (0, 1, 5)),
    "tau": tuple(f"tau={t}" for t in (1, 2, 5, 10)),
    "halo": ("halo=none", "halo=drawn", "halo=held", "halo=all"),
}
FOLDS = (1, 2, 3)
IID = Place("pubmed", optimizer=KEPT)


def place_of(alpha: float) -> Place:
    """Return a cut by Dirichlet's alpha."""
    return Place("pubmed", "Dirichlet .5", KEPT, alpha=alpha)


def cells(found: Found) -> Sequence[Cell]:
    """Return all cells."""
    del found
    wanted = []
    for fold in FOLDS:
        wanted += [
            cell_of(place_of(a), method, fold, changes)
            for a in ALPHAS
            for method, changes in COLUMNS.values()
        ]
        wanted += [cell_of(IID, "fedais", fold, c) for group in SETTINGS.values() for c in group]
    return list({cell.digest: cell for cell in wanted}.values())


def accuracy(found: Found, place: Place, method: str, changes: str = "") -> tuple[str, str, str]:
    """Return accuracy over folds at the best and in the last round, and GB of rows in the first."""
    lines = [line_of(found, place, method, fold, changes) for fold in FOLDS]
    have = [line for line in lines if line]
    last = spread(scores_of(have, last=True))
    return spread(scores_of(have)), last, f"{rows_bytes(have[0])[-1] / 1e9:.2f}" if have else "-"


def page(found: Found) -> Page:
    """Return the page."""
    rows = [
        [
            f"{a:g}",
            *(text for c in COLUMNS.values() for text in accuracy(found, place_of(a), *c)[:2]),
        ]
        for a in ALPHAS
    ]
    heads = [head for name in COLUMNS for head in (name, f"{name}, last round")]
    sections = {"alpha": markdown_table(["alpha", *heads], rows)}
    for name, group in SETTINGS.items():
        texts = [[c, *accuracy(found, IID, "fedais", c)] for c in group]
        sections[name] = markdown_table(["setting", "accuracy", "last round", "rows, GB"], texts)
    return Page(sections)


RECIPE = Recipe(
    name="fedais/sensitivity",
    title="FedAIS by heterogeneity, ratio, floor, warm-up, interval and halo (PubMed)",
    cells=cells,
    page=page,
    text="""\
# FedAIS by heterogeneity and by its own knobs

PubMed, 100 clients, Adam kept between rounds, the setting of [table 2](table2.md). Settings that
are equal to the default are one cell.

<!-- again -->
<!-- again -->

## Heterogeneity: Dirichlet's alpha

<!-- alpha -->
<!-- alpha -->

"""
    + "\n".join(f"## {name}\n\n<!-- {name} -->\n<!-- {name} -->\n" for name in SETTINGS),
)
