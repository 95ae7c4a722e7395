"""FedAIS' figure 6: 100 to 1,000 clients, on PubMed."""

import sys
from collections.abc import Sequence
from pathlib import Path

from silograph.experiment.terminal_table import markdown_table
from silograph.study.cells import Cell
from silograph.study.reproduce import Page, Recipe, StudyLines, scores_of, spread

sys.path.insert(0, str(Path(__file__).parent))

from fedais_cells import KEPT, REBUILT, Place, cell_of, line_of, rows_bytes, total_bytes

CLIENTS = (100, 300, 500, 700, 1000)
METHODS = ("fedais", "fedall", "fedavg", "fedlocal")
OPTIMIZERS = (REBUILT, KEPT)
FOLDS = (1, 2, 3)


def cells(found: StudyLines) -> Sequence[Cell]:
    """Return all cells."""
    del found
    return [
        cell_of(Place("pubmed", optimizer=how, clients=clients), method, fold)
        for fold in FOLDS
        for how in OPTIMIZERS
        for clients in CLIENTS
        for method in METHODS
    ]


def table_of(found: StudyLines, how: str) -> str:
    """Return accuracy, bytes and work by number of clients."""
    texts = []
    for clients in CLIENTS:
        for method in METHODS:
            place = Place("pubmed", optimizer=how, clients=clients)
            lines = [line_of(found, place, method, fold) for fold in FOLDS]
            have = [line for line in lines if line]
            if not have:
                continue
            each = [rows_bytes(have[0])[-1], total_bytes(have[0])[-1], have[0]["flops"]]
            texts.append(
                [str(clients), method, str(len(have)), spread(scores_of(have))]
                + [spread(scores_of(have, last=True))]
                + [f"{value / 1e9:,.1f}" for value in each]
            )
    heads = ["clients", "method", "folds", "accuracy", "last round", "rows, GB", "all, GB"]
    return markdown_table([*heads, "GFLOP"], texts) if texts else "No cell has run."


def page(found: StudyLines) -> Page:
    """Return the page."""
    return Page({how: table_of(found, how) for how in OPTIMIZERS})


RECIPE = Recipe(
    name="fedais/clients",
    title="FedAIS with 100 to 1,000 clients (PubMed)",
    cells=cells,
    page=page,
    text=f"""\
# FedAIS with 100 to 1,000 clients

PubMed, random partition, the setting of [table 2](table2.md); bytes and work are those of 100
rounds. The paper's figure is on Reddit, which is not at hand.

With 1,000 clients, some 16 training nodes each and batches of one or two, nobody is near what 100
clients reach in as many rounds, and FedAIS stays at the largest class. The cause is local Adam that
is built anew in every round, as on all small clients, not the drawing by importance: validation
losses of random and important nodes are equal (1.053 and 1.049). With local SGD and a step of the
server FedAIS learns there, too: see [server_step.md](server_step.md).

<!-- again -->
<!-- again -->

## {REBUILT}

<!-- {REBUILT} -->
<!-- {REBUILT} -->

## {KEPT}

<!-- {KEPT} -->
<!-- {KEPT} -->
""",
)
