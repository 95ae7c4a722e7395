"""CPU of an iteration of FedGraph beside a step on drawn neighbors of as many rows.

    python benchmarks/fedgraph/iteration.py DATA_DIR DATASET [REPEATS]

Both train in torch, on one thread, on all labeled nodes of 20 clients, with a GCN of 16 hidden
units, 128 on the generated shape of Reddit, whose clients hold no copies, as in the paper. Rounds
with 1 and with 11 iterations (4 on the larger graphs) differ by 10: a tenth of the difference in
CPU seconds is an iteration, its exchange with other silos included. The step is FedAvg's, with 11
local epochs and 1, of one batch each.
"""

import statistics
import sys
import time
from typing import Any

import silograph as sg
from silograph.experiment.terminal_table import markdown_table

FEW = 1
REDDIT = "generated:reddit"
COUNTS = {"pubmed": (4, 2), REDDIT: (4, 2)}  # most iterations of a round, and rounds
RUN: dict[str, Any] = {
    "clients": 20,
    "partition": "shares",
    "model": "gcn",
    "hidden": 16,
    "dropout": 0.5,
    "optimizer": "adam",
    "lr": 0.01,
    "kernels": "torch",
    "threads": 1,
}
OWN: dict[str, dict[str, Any]] = {
    REDDIT: {"scale": 0.02, "partition": "random", "hidden": 128, "dropout": 0.2, "lr": 1e-4}
}
SHARE = 0.5  # of neighbors that FedGraph keeps in each layer
FANOUTS = ("2,2", "25,10")


def case(name: str, steps: int) -> dict[str, Any]:
    """Return what a run is asked for: FedGraph with such a `share`, or FedAvg's fan-out."""
    if name in FANOUTS:
        return {"method": "fedavg", "fanout": name, "batch_size": 10**6, "local_epochs": steps}
    options = {"kappa": 1024, "keep_1": SHARE, "keep_2": SHARE, "share": name, "local_steps": steps}
    return {"method": "fedgraph", "options": options}


def seconds_of(dataset: str, data_dir: str, name: str, steps: int) -> float:
    """Return CPU seconds of a run with so many iterations a round."""
    rounds = counts_of(dataset)[1]
    asked = {**RUN, "rounds": rounds, "eval_every": rounds, **OWN.get(dataset, {})}
    begun = time.process_time()
    sg.run(dataset=dataset, data_dir=data_dir, **asked, **case(name, steps))
    return time.process_time() - begun


def counts_of(dataset: str) -> tuple[int, int]:
    """Return the most iterations of a round, and the rounds."""
    return COUNTS.get(dataset, (11, 5))


def iteration(dataset: str, data_dir: str, name: str) -> float:
    """Return CPU seconds of an iteration of all clients."""
    most, rounds = counts_of(dataset)
    few, many = (seconds_of(dataset, data_dir, name, steps) for steps in (FEW, most))
    return (many - few) / (rounds * (most - FEW))


def main() -> None:
    """Print a table: medians over repeats, in which all cases take turns."""
    data_dir, dataset = sys.argv[1:3]
    repeats = int(sys.argv[3]) if len(sys.argv) > 3 else 3
    cases, rows = (*FANOUTS, "none", "hidden", "all"), []
    found: dict[str, list[float]] = {name: [] for name in cases}
    for name in cases:
        seconds_of(dataset, data_dir, name, FEW)  # loads
    for _ in range(repeats):
        for name in cases:
            found[name].append(iteration(dataset, data_dir, name))
    medians = {name: statistics.median(values) for name, values in found.items()}
    for name, value in medians.items():
        title = f"a step, fan-out {name}" if name in FANOUTS else f"fedgraph, share={name}"
        over = [f"{value / medians[fanout]:.1f}" for fanout in FANOUTS]
        rows.append([dataset, title, f"{1000 * value:.1f}", *over])
    names = ("data", "what", "CPU ms", *(f"over {fanout}" for fanout in FANOUTS))
    print(markdown_table(names, rows))


if __name__ == "__main__":
    main()
