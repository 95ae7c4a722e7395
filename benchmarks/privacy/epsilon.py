"""Accuracy against epsilon, with differential privacy of whole silos, beside local training.

    python benchmarks/privacy/epsilon.py DATA_DIR
    python benchmarks/privacy/epsilon.py

The first command runs all cells and appends a line of JSON for each to epsilon.jsonl. The second
writes the tables of epsilon.md and the plot.
"""

import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

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
    *(Place(graph, "metis", silos) for silos, graph in product((10, 100), GRAPHS)),
    Place("pubmed", "random", 100),
]
MANY = Place("pubmed", "random", 1000)
# With many weights and silos a run takes long: this place has the settings of another graph.
SHARES_CORA_SETTINGS = Place("citeseer", "metis", 100)
SHOWN = [p for p in [*PLACES, MANY] if p.silos > 10 and p.graph != "citeseer"]  # in the plot
# One step of a client: solver, rate and layers.
STEPS: dict[str, Settings] = {
    "SGD 5": {"optimizer": "sgd", "lr": 5.0, "layers": 1},
    "SGD 50": {"optimizer": "sgd", "lr": 50.0, "layers": 1},
    "Adam 0.1": {"optimizer": "adam", "lr": 0.1, "layers": 1},
    "Adam 0.1, 2 layers": {"optimizer": "adam", "lr": 0.1, "layers": 2, "hidden": 16},
}
CLIPS = 3.0, 10.0, 30.0


def grid_of(steps: Iterable[str], rounds: Iterable[int]) -> dict[str, Settings]:
    """Return settings by name: every step with every clip and number of rounds."""
    return {
        f"{name}, clip {clip:g}, {number} rounds": STEPS[name]
        | {"dp_clip": clip, "rounds": number, "eval_every": number}
        for name, clip, number in product(steps, CLIPS, rounds)
    }


# The cost of a run grows with its silos, so fewer settings are tried where there are more.
FOR_TEN_SILOS = grid_of(STEPS, (3, 20))
FOR_MANY_SILOS = {
    "cora": grid_of(["SGD 5", "SGD 50", "Adam 0.1"], [10]),
    "pubmed": grid_of(["Adam 0.1"], [10]),
}
PRIVATE: Settings = {
    "method": "fedavg",
    "local_epochs": 5,
    "dropout": 0.0,
    "weight_decay": 0.0,
    "secure_aggregation": True,
    "dp_unit": "silo",
}
ROUNDS_WITHOUT = {"rounds": 60, "eval_every": 5}
LOCAL_GRID: dict[str, Settings] = {
    f"Adam {lr:g}, {layers} layer{'s' * (layers > 1)}": {"lr": lr, "layers": layers}
    for lr, layers in product((0.01, 0.05), (1, 2))
}
LOCAL = Arm("local", {"method": "local", **ROUNDS_WITHOUT}, [LOCAL_GRID])
LOCAL_DEFAULTS = Arm("local, defaults", {"method": "local", **ROUNDS_WITHOUT})
LOCALS = LOCAL_DEFAULTS, LOCAL
FEDERATED = Arm("not private", {"method": "fedopt", **ROUNDS_WITHOUT})


def chosen_on(place: Place) -> Place:
    """Return where the settings of a place are chosen."""
    if place == SHARES_CORA_SETTINGS:
        return replace(place, graph="cora")
    return MANY if place.cut == "random" else place


def private_arms(place: Place) -> list[Arm]:
    """Return the arms with differential privacy, by rising epsilon."""
    delta = 1e-4 if place == MANY else 1e-3  # below 1 / number of silos
    return [
        Arm(
            name_of(epsilon),
            PRIVATE | {"dp_delta": delta, "dp_epsilon": epsilon},
            [FOR_TEN_SILOS if place.silos == 10 else FOR_MANY_SILOS[chosen_on(place).graph]],
            {"dp_epsilon": CHOSEN_AT[epsilon]},
            f"choice at {name_of(CHOSEN_AT[epsilon])}",
            chosen_on,
        )
        for epsilon in EPSILONS
    ]


def measure(data_dir: str) -> None:
    """Run all cells that have not run."""
    torch.set_num_threads(1)
    cells = Cells(HERE / "epsilon.jsonl", data_dir)
    for place in sorted([*PLACES, MANY], key=lambda place: place == SHARES_CORA_SETTINGS):
        cells.measure([place], [*LOCALS, FEDERATED, *private_arms(place)])


def write() -> None:
    """Write the page's tables and plot."""
    cells, every = Cells(HERE / "epsilon.jsonl"), [*PLACES, MANY]
    sections = {
        "table": table(cells, every, lambda p: [*LOCALS, *reversed(private_arms(p)), FEDERATED]),
        "choices": choices(cells, every, lambda p: [LOCAL, *private_arms(p)[::2]]),
        "cost": cells.cost(),
    }
    title = "Whole silos hidden: test accuracy beside local training"
    plot = gaps(cells, title, SHOWN, lambda p: [LOCAL, *private_arms(p)[:-1]])
    write_page(HERE / "epsilon.md", sections, plot)


if __name__ == "__main__":
    measure(sys.argv[1]) if sys.argv[1:] else write()
