"""Personalized methods and FedGrAINS on real silos, where personalizing should matter most.

The silos are organizations of the data: WebKB's universities, Twitch's languages, bibliographic
sources. No edge crosses them. Methods and samplers are those of the strong protocol, and GCFL+.
"""

import sys
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from silograph.core.config import Scalar
from silograph.experiment.markdown import markdown_table
from silograph.study.cells import Cell
from silograph.study.reproduce.recipe import Found, Page, Recipe, cell, spread

sys.path.insert(0, str(Path(__file__).parent))

from personal_cells import DECIDING, METHODS, SAMPLERS, SEEDS, SHOWN, merged, paired
from recipe_strong import ADAM, STRONG
from recipe_strong import BASES as STRONG_BASES

# The score that suits the labels: mature content is a third of Twitch, citations have several.
SCORES = {"webkb": "accuracy", "twitch": "auc", "citation_domains": "f1_micro"}
TITLES = {"webkb": "WebKB", "twitch": "Twitch", "citation_domains": "Citation domains"}
BASES = STRONG_BASES | {"gcflplus": merged(METHODS["gcflplus"], ADAM)}
SILOS: dict[str, Any] = {"partition": "silo", "largest_component": False}


@cache
def cell_of(dataset: str, base: str, sampler: str, seed: int) -> Cell:
    """Return a cell."""
    labels: dict[str, Scalar] = {
        "dataset": dataset,
        "base": base,
        "sampler": sampler,
        "seed": seed,
    }
    run = merged(STRONG, BASES[base], SAMPLERS[sampler]) | SILOS
    return cell(labels, **run, dataset=dataset, seed=seed)


def cells(found: Found) -> Sequence[Cell]:
    """Return all cells: one graph after the other, of each one seed of all methods first."""
    del found
    order = product(SCORES, SEEDS, BASES, DECIDING)
    return [cell_of(dataset, base, sampler, seed) for dataset, seed, base, sampler in order]


def by_seed(found: Found, dataset: str, base: str, sampler: str) -> dict[int, float]:
    """Return the scores of each silo's own model, pooled over silos, of the seeds that have run."""
    lines = {seed: found.scored([cell_of(dataset, base, sampler, seed)]) for seed in SEEDS}
    name = SCORES[dataset]
    return {seed: line[0]["test"]["personalized"][name] for seed, line in lines.items() if line}


def table(found: Found, dataset: str) -> str:
    """Return the table of one graph."""
    rows = []
    alone = by_seed(found, dataset, "local", "")
    for base, sampler in product(BASES, DECIDING):
        values = by_seed(found, dataset, base, sampler)
        ours = by_seed(found, dataset, base, "fedgrains")
        gain = "" if sampler == "fedgrains" else paired(ours, values)
        federated = "" if (base, sampler) == ("local", "") else paired(values, alone)
        rows.append([f"{base}{SHOWN[sampler]}", spread(list(values.values())), federated, gain])
    head = ["run", SCORES[dataset], "less `local`, paired", "FedGrAINS less this, paired"]
    return markdown_table(head, rows)


def page(found: Found) -> Page:
    """Return the page."""
    return Page({dataset: table(found, dataset) for dataset in SCORES})


RECIPE = Recipe(
    name="fedgrains/silos",
    title="Personalized methods and FedGrAINS on real silos: does federation matter?",
    cells=cells,
    page=page,
    text="""\
# Personalized methods on real silos

Test score in percent, view `personalized` (each silo's own model), pooled over silos, three
seeds, at the round that validation picks. The silos are those of the data; the rest is the
strong protocol (`recipe_strong.py`): GCN of two layers, features as published,
20 % of the nodes train.

<!-- again -->
<!-- again -->

"""
    + "\n".join(
        f"## {TITLES[dataset]}\n\n<!-- {dataset} -->\n<!-- {dataset} -->\n" for dataset in SCORES
    ),
)
