"""Accuracy against epsilon, with differential privacy of nodes, beside local training.

    python benchmarks/privacy/node_epsilon.py DATA_DIR
    python benchmarks/privacy/node_epsilon.py

The first command runs all cells and appends a line of JSON for each to node_epsilon.jsonl. The
second writes the tables of node_epsilon.md and the plot.
"""

import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from silograph.experiment.terminal_table import markdown_table

sys.path.insert(0, str(Path(__file__).parent))

from epsilon import LOCAL
from privacy_cells import (
    CHOSEN_AT,
    EPSILONS,
    GRAPHS,
    Arm,
    Cells,
    Place,
    Settings,
    choices,
    gaps,
    name_of,
    table,
    write_page,
)

HERE = Path(__file__).parent
PLACES = [
    *(Place("pubmed", "random", silos) for silos in (100, 1000)),
    *(Place(graph, "metis", 10) for graph in GRAPHS),
    *(Place(graph, "metis", 100) for graph in GRAPHS),
]
SHOWN = [p for p in PLACES if p.graph == "pubmed" or p == Place("cora", "metis", 10)]  # in the plot
DELTAS = {"cora": 1e-4, "citeseer": 1e-4, "pubmed": 1e-5}  # below 1 / number of nodes
SMALLEST: Settings = {"model": "gcn", "layers": 1, "dp_degree": 1}


def steps_of(
    rates: Iterable[float], rounds: Iterable[int], clips: Iterable[float] = (0.1, 1.0)
) -> dict[str, Settings]:
    """Return settings of steps by name, for the smallest model."""
    return {
        f"rate {rate:g}, clip {clip:g}, {number} rounds": SMALLEST
        | {
            "options": {"server_lr": rate},
            "dp_clip": clip,
            "rounds": number,
            "eval_every": number,
        }
        for rate, clip, number in product(rates, clips, rounds)
    }


# Fewer are tried for models of more weights, and CiteSeer has the settings of Cora.
STEPS = {
    "cora": steps_of((0.3, 1.0), [10]),
    "pubmed": steps_of((0.1, 0.3, 1.0), (5, 20)),
}
SHAPES: dict[str, Settings] = {
    "GCN, 1 layer, K = 1": SMALLEST,
    "GCN, 1 layer, K = 2": SMALLEST | {"dp_degree": 2},
    "GCN, 1 layer, K = 3": SMALLEST | {"dp_degree": 3},
    "SAGE, 1 layer, K = 1": SMALLEST | {"model": "sage"},
    "GCN, 2 layers, K = 1": SMALLEST | {"layers": 2, "hidden": 8},
    "GCN, 2 layers, K = 2": SMALLEST | {"layers": 2, "hidden": 8, "dp_degree": 2},
}
PRIVATE: Settings = {
    "method": "fedopt",
    "dropout": 0.0,
    "weight_decay": 0.0,
    "secure_aggregation": True,
    "dp_unit": "node",
}
ROUNDS_WITHOUT = {"rounds": 60, "eval_every": 5}
LOCAL_MLP = Arm("local MLP", {"method": "local", "model": "mlp", **ROUNDS_WITHOUT})
FEDERATED = Arm("not private", {"method": "fedopt", **ROUNDS_WITHOUT})


def chosen_on(place: Place) -> Place:
    """Return where the settings of a place are chosen."""
    graph = "cora" if place.graph == "citeseer" else place.graph
    return Place(graph, "metis", 10)


def private_arms(graph: str) -> list[Arm]:
    """Return the arms with differential privacy, by rising epsilon."""
    return [
        Arm(
            name_of(epsilon),
            PRIVATE | {"dp_delta": DELTAS[graph], "dp_epsilon": epsilon},
            [STEPS["pubmed"], SHAPES] if graph == "pubmed" else [STEPS["cora"]],
            {"dp_epsilon": CHOSEN_AT[epsilon]},
            f"choice at {name_of(CHOSEN_AT[epsilon])}",
            chosen_on,
        )
        for epsilon in EPSILONS
    ]


def without_secure_sums(arm: Arm) -> Arm:
    """Return an arm in which each silo adds all of the noise; its settings are those of the arm."""
    options = {"secure_aggregation": False}
    chosen_at = {"secure_aggregation": True} | arm.chosen_at
    name = f"{arm.name}, no secure sums"
    return replace(arm, name=name, fixed=arm.fixed | options, chosen_at=chosen_at)


def arms_at(place: Place) -> list[Arm]:
    """Return the columns of the table."""
    private = private_arms(place.graph)
    insecure = without_secure_sums(private[3])
    return [LOCAL, LOCAL_MLP, *reversed(private), insecure, FEDERATED]


def models(cells: Cells) -> str:
    """Return validation accuracies of the models among which PubMed chose."""
    arms = private_arms("pubmed")[::-2]
    columns = [cells.last_choice(Place("pubmed", "metis", 10), arm) for arm in arms]
    rows = [[name, *(f"{column[name]:.1f}" for column in columns)] for name in SHAPES]
    return markdown_table(["model", *(arm.choice for arm in arms)], rows)


def with_local(cells: Cells) -> Cells:
    """Add the runs of local training, which are those of the page on silos."""
    cells.lines += [line for line in Cells(HERE / "epsilon.jsonl").lines if line["arm"] == "local"]
    return cells


def measure(data_dir: str) -> None:
    """Run all cells that have not run."""
    torch.set_num_threads(1)
    cells = with_local(Cells(HERE / "node_epsilon.jsonl", data_dir))
    for place in PLACES:
        cells.measure([place], arms_at(place))


def write() -> None:
    """Write the page's tables and plot."""
    own = Cells(HERE / "node_epsilon.jsonl")
    cost, cells = own.cost(), with_local(own)
    every = sorted(PLACES, key=lambda p: (p.cut, p.silos, GRAPHS.index(p.graph)))
    own_choices = [Place(graph, "metis", 10) for graph in STEPS]
    sections = {
        "table": table(cells, every, arms_at),
        "choices": choices(cells, own_choices, lambda p: private_arms(p.graph)[::2]),
        "models": models(cells),
        "cost": cost,
    }
    title = "Single nodes hidden: test accuracy beside local training"
    plot = gaps(cells, title, SHOWN, lambda p: [LOCAL, *private_arms(p.graph)[:-1]])
    write_page(HERE / "node_epsilon.md", sections, plot)


if __name__ == "__main__":
    measure(sys.argv[1]) if sys.argv[1:] else write()
