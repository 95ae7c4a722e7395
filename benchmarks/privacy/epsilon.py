"""Accuracy against epsilon, with differential privacy of whole silos, beside local training.

    python benchmarks/privacy/epsilon.py DATA_DIR > benchmarks/privacy/epsilon.jsonl
    python benchmarks/privacy/epsilon.py --page benchmarks/privacy/epsilon.jsonl

The first command runs all cells and prints a line of JSON for each; the second prints the table of
the page. `local` trains each silo alone, with the library's defaults.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import silograph as sg

GRAPHS = ("cora", "citeseer", "pubmed")
SILOS = (10, 100)
NO_NOISE = 1e12  # epsilon so large that the noise is 2^-12 times the clip
EPSILONS = (1.0, 2.0, 4.0, 8.0, NO_NOISE)
DELTA = 1e-3  # below 1 / number of silos
# A model of few weights, long updates and few rounds: what noise harms least.
PRIVATE: dict[str, Any] = {
    "method": "fedavg",
    "optimizer": "sgd",
    "lr": 5.0,
    "local_epochs": 5,
    "layers": 1,
    "dropout": 0.0,
    "weight_decay": 0.0,
    "rounds": 10,
    "secure_aggregation": True,
}
LOCAL: dict[str, Any] = {"method": "local", "rounds": 30}


def settings_of(epsilon: float) -> dict[str, Any]:
    """Return the options of a cell."""
    privacy = {"dp_epsilon": epsilon, "dp_delta": DELTA, "dp_unit": "silo", "dp_clip": 3.0}
    return PRIVATE | privacy


def measure(data_dir: str, seeds: int) -> None:
    """Run all cells."""
    for graph in GRAPHS:
        for silos in SILOS:
            cells: list[tuple[str, dict[str, Any]]] = [("local", LOCAL)]
            cells += [(str(epsilon), settings_of(epsilon)) for epsilon in EPSILONS]
            for name, options in cells:
                for seed in range(seeds):
                    _measure_cell(graph, data_dir, silos, seed, name, options)


def _measure_cell(
    graph: str, data_dir: str, silos: int, seed: int, name: str, options: dict[str, Any]
) -> None:
    start, rounds = time.process_time(), options["rounds"]
    result = sg.run(
        graph,
        data_dir=data_dir,
        clients=silos,
        partition="metis",
        seed=seed,
        eval_every=rounds,
        **options,
    )
    scores = result.test.personalized if name == "local" else result.test.server
    assert scores is not None
    cell = {
        "graph": graph,
        "silos": silos,
        "epsilon": name,
        "seed": seed,
        "accuracy": scores["accuracy"],
        "weights": 0
        if result.model is None
        else sum(map(torch.numel, result.model.weights.values())),
        "noise_multiplier": result.privacy and result.privacy["noise_multiplier"],
        "seconds": round(time.process_time() - start, 1),
    }
    print(json.dumps(cell), flush=True)


def table(path: Path) -> str:
    """Return the table of the page: mean accuracy over seeds."""
    cells = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    names = ["local", *(str(epsilon) for epsilon in reversed(EPSILONS))]
    titles = ["local", "clipped only", *(f"epsilon {float(n):g}" for n in names[2:])]
    lines = [
        "| graph | silos | weights | " + " | ".join(titles) + " |",
        "|---|---|---|" + "---|" * len(titles),
    ]
    for graph in GRAPHS:
        for silos in SILOS:
            own = [c for c in cells if (c["graph"], c["silos"]) == (graph, silos)]
            means = []
            for name in names:
                values = [c["accuracy"] for c in own if c["epsilon"] == name]
                means.append(f"{100 * sum(values) / len(values):.1f}" if values else "-")
            weights = max((c["weights"] for c in own if c["epsilon"] != "local"), default=0)
            lines.append(f"| {graph} | {silos} | {weights:,} | " + " | ".join(means) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run all cells, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data_dir", nargs="?")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--page", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.page is not None:
        print(table(arguments.page))
        return
    measure(arguments.data_dir, arguments.seeds)


if __name__ == "__main__":
    main()
