"""What silograph's layers reach with one setting for all, and where sums over neighbors fail.

One seed: no ranking of layers, but what a first run of each looks like.
"""

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

from silograph.core.config import Scalar
from silograph.experiment.terminal_table import markdown_table
from silograph.study.cells import Cell
from silograph.study.reproduce import Page, Recipe, StudyLines, cell, scores_of, spread

DATASETS = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}
ROUNDS = {"best validation": False, "last round": True}
LAYERS = ("gcn", "graphconv", "gin", "gat", "appnp")
# Everything that decides a cell stands here, so that a change of the defaults changes no cell.
PROTOCOL: dict[str, Any] = {
    "clients": 10,
    "partition": "metis",
    "split": "0.2/0.4/0.4",
    "largest_component": False,
    "participation": 1.0,
    "layers": 2,
    "hidden": 128,
    "dropout": 0.5,
    "method": "fedopt",
    "local_epochs": 1,
    "optimizer": "sgd",
    "weight_decay": 5e-4,
    "momentum": 0.0,
    "keep_optimizer": False,
    "seed": 0,
}
SERVER: dict[str, Scalar] = {
    "server_lr": 0.005,
    "server_tau": 1e-5,
    "server_beta1": 0.9,
    "server_beta2": 0.99,
}
DEFAULT: dict[str, Any] = {"rounds": 100, "normalize": "none", "lr": 0.1, "options": SERVER}
PHOTO = DEFAULT | {"rounds": 50}
# Amazon Photo: rows of many ones, and a node with 1,434 neighbors.
SMALLER: dict[str, dict[str, Any]] = {
    "defaults": PHOTO,
    "`--normalize row`": PHOTO | {"normalize": "row"},
    "`--option server_lr=0.001`": PHOTO | {"options": SERVER | {"server_lr": 0.001}},
    "`--lr 0.01`": PHOTO | {"lr": 0.01},
}
SUMS = ("gin", "graphconv")
ONE_SEED = [*SMALLER]
# The default step as it is now, with ten seeds: those above are one seed of an earlier one.
NOW = "defaults, ten seeds"
SEEDS = range(10)
SCALE_FREE = {name: value for name, value in SERVER.items() if name != "server_tau"} | {
    "server_lr": 0.01,
    "server_relative_tau": 0.01,
}
SMALLER[NOW] = PHOTO | {"options": SCALE_FREE}


@cache
def cell_of(dataset: str, model: str, setting: str = "", seed: int = 0) -> Cell:
    """Return a cell; a setting is one of `SMALLER`."""
    labels: dict[str, Scalar] = {"dataset": dataset, "model": model}
    labels |= {"setting": setting} if setting else {}
    labels |= {"seed": seed} if setting == NOW else {}
    own = SMALLER[setting] if setting else DEFAULT
    return cell(labels, **PROTOCOL | own | {"seed": seed}, dataset=dataset, model=model)


def cells(found: StudyLines) -> list[Cell]:
    """Return all cells."""
    del found
    plain = [cell_of(dataset, model) for dataset in DATASETS for model in LAYERS]
    sums = [cell_of("amazon_photo", model, setting) for setting in ONE_SEED for model in SUMS]
    seeds = [cell_of("amazon_photo", m, NOW, seed) for seed in SEEDS for m in (*SUMS, "gcn")]
    return [*plain, cell_of("amazon_photo", "gcn", "defaults"), *sums, *seeds]


def accuracies(found: StudyLines, *place: str) -> list[str]:
    """Return the test accuracy in percent, at the best validation round and in the last."""
    lines = found.scored([cell_of(*place)])
    return [spread(scores_of(lines, last=last), 1) for last in ROUNDS.values()]


def seeds_table(found: StudyLines) -> str:
    """Return the present default on Amazon Photo over ten seeds."""
    rows = []
    for model in (*SUMS, "gcn"):
        lines = found.scored([cell_of("amazon_photo", model, NOW, seed) for seed in SEEDS])
        texts = []
        for last in ROUNDS.values():
            scores = [100 * score for score in scores_of(lines, last=last)]
            ends = f"{min(scores):.1f} to {max(scores):.1f}" if scores else "-"
            texts += [spread([score / 100 for score in scores], 1), ends]
        rows.append([f"`{model}`", str(len(lines)), *texts])
    heads = [head for which in ROUNDS for head in (which, f"{which}, least to greatest")]
    return markdown_table(["Amazon Photo", "seeds", *heads], rows)


def table(name: str, columns: Sequence[str], rows: Sequence[tuple[str, list[list[str]]]]) -> str:
    """Return a table with a column for each round under each of the columns."""
    heads = [f"{column}, {which}" for column, which in product(columns, ROUNDS)]
    texts = [[f"`{model}`", *(text for pair in pairs for text in pair)] for model, pairs in rows]
    return markdown_table([name, *heads], texts)


def page(found: StudyLines) -> Page:
    """Return the page."""
    plain = [(m, [accuracies(found, d, m) for d in DATASETS]) for m in LAYERS]
    sums = [(m, [accuracies(found, "amazon_photo", m, s) for s in ONE_SEED]) for m in SUMS]
    best, last = accuracies(found, "amazon_photo", "gcn", "defaults")
    return Page(
        {
            "layers": table("", [*DATASETS.values()], plain),
            "gcn": f"For comparison, `gcn` with the defaults: {best}, last round {last}.",
            "sums": table("Amazon Photo", ONE_SEED, sums),
            "seeds": seeds_table(found),
        }
    )


RECIPE = Recipe(
    name="models/layers",
    title="every layer with the defaults; sums over many neighbors",
    cells=cells,
    page=page,
    text="""\
# What the layers reach

<!-- layers -->
<!-- layers -->

Five layers were trained with FedOpt on three citation graphs, and two of them on Amazon Photo,
where nodes have many neighbors. All five learn the citation graphs, but on Photo `gin` and
`graphconv` are 36 and 47 points behind `gcn`, because they add neighbors up without dividing by
their number. On graphs of high degree use `gcn`, or `--normalize row` with the other two.

## How it was measured

Figures are test accuracy in percent of the server's model, at the best validation round and in the
last round. Each node is seen through its own client's graph. Runs have 10 clients cut by METIS,
100 rounds, hidden width 128, dropout .5 and seed 0. FedOpt's server step was its default then
(`server_lr` .005, `server_tau` 1e-5).

## Where sums do not learn

Amazon Photo has nodes of up to 1,434 neighbors, and many features of a row are ones. Runs have 50
rounds, and else the settings above.

<!-- sums -->
<!-- sums -->

<!-- gcn -->
<!-- gcn -->

The next table repeats this over ten seeds with a later default step (`server_lr` .01,
`server_relative_tau` .01). `gin` is ahead of `graphconv` in three of ten seeds.

<!-- seeds -->
<!-- seeds -->

## Limits

The first two tables have one seed and one setting for all layers, so they do not rank them. The
defaults of FedOpt have changed since ([fedopt.md](../defaults/fedopt.md)).

<!-- again -->
<!-- again -->

<!-- cells -->
<!-- cells -->

<!-- machine -->
<!-- machine -->
""",
)
