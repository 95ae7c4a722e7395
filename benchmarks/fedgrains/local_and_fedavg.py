"""Local only and FedAvg beside table 1 of FedGrAINS, on Cora cut by METIS.

    python benchmarks/fedgrains/local_and_fedavg.py --data-dir ../shared/data

runs the cells that `local_and_fedavg.jsonl` does not hold yet and rewrites the table in
`local_and_fedavg.md`. A cell is one run; it can be stopped and continued at any time.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import silograph as sg

HERE = Path(__file__).parent
CELLS, PAGE = HERE / "local_and_fedavg.jsonl", HERE / "local_and_fedavg.md"
MARK = "<!-- table -->"
CLIENTS, SEEDS = (5, 10, 20), (0, 1, 2)
# FedGrAINS, table 1, Cora, disjoint: mean and standard deviation over three runs.
PAPER = {
    "local": {5: "80.10 ± 0.76", 10: "77.43 ± 0.49", 20: "72.75 ± 0.89"},
    "fedavg": {5: "79.63 ± 4.37", 10: "72.06 ± 2.18", 20: "69.50 ± 3.58"},
}
PROTOCOL: dict[str, Any] = {
    "dataset": "cora",
    "largest_component": True,
    "partition": "metis",
    "rounds": 100,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "local": {"method": "local"},
    "local, no weight decay": {"method": "local", "weight_decay": 0.0},
    "local, Adam rebuilt each round": {"method": "local", "keep_optimizer": False},
    "local, features divided by row sums": {"method": "local", "normalize": "row"},
    "local, 3 layers": {"method": "local", "layers": 3},
    "local, GraphSAGE": {"method": "local", "model": "sage"},
    "local, training share 10 %": {"method": "local", "split": "0.1/0.4/0.4"},
    "local, training share 5 %": {"method": "local", "split": "0.05/0.4/0.4"},
    "fedavg": {"method": "fedavg"},
    "fedavg, no weight decay": {"method": "fedavg", "weight_decay": 0.0},
    "fedavg, Adam kept": {"method": "fedavg", "keep_optimizer": True},
    "fedavg, features divided by row sums": {"method": "fedavg", "normalize": "row"},
    "fedopt, local SGD and server momentum": {
        "method": "fedopt",
        "optimizer": "sgd",
        "lr": 0.5,
        "local_epochs": 3,
        "options": {"server_optimizer": "momentum"},
    },
}


def run_cell(variant: str, clients: int, seed: int, data_dir: str | None) -> dict[str, Any]:
    """Return one line of the cells' file; accuracies are means over clients."""
    result = sg.run(**PROTOCOL, **VARIANTS[variant], clients=clients, seed=seed, data_dir=data_dir)
    views = {view: getattr(result.test, view) for view in ("server", "personalised")}
    best = {v: s.accuracy_client_mean for v, s in views.items() if s is not None}
    last = {v: result.rounds[-1][f"test_{v}_accuracy_client_mean"] for v in best}
    return {
        "variant": variant,
        "clients": clients,
        "seed": seed,
        "best": best,
        "last": last,
        "best_round": result.best_round,
        "seconds": round(result.seconds, 2),
        "partition": result.partition_hash,
    }


def cell_text(rows: list[dict[str, Any]], when: str, view: str) -> str:
    """Return mean ± standard deviation in percent, or what is missing."""
    values = [100 * row[when][view] for row in rows if view in row[when]]
    if len(values) < 2:
        return "-" if rows else "not run"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def table(rows: list[dict[str, Any]]) -> str:
    """Return the page's table."""
    lines = [
        "| run | view | " + " | ".join(f"{k} clients" for k in CLIENTS) + " |",
        "|---|---|" + "---|" * len(CLIENTS),
    ]
    for variant in VARIANTS:
        if variant in PAPER:
            lines.append(
                f"| **{variant}, paper** | | "
                + " | ".join(f"**{PAPER[variant][k]}**" for k in CLIENTS)
                + " |"
            )
        for view in ("server", "personalised"):
            for when in ("best", "last"):
                cells = [
                    cell_text(
                        [r for r in rows if r["variant"] == variant and r["clients"] == k],
                        when,
                        view,
                    )
                    for k in CLIENTS
                ]
                if any(text != "-" for text in cells):
                    label = "best by validation" if when == "best" else "last round"
                    lines.append(f"| {variant} | {view}, {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, one seed of every variant after the other, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir")
    data_dir = parser.parse_args().data_dir
    rows = [json.loads(line) for line in CELLS.read_text().splitlines()] if CELLS.exists() else []
    done = {(row["variant"], row["clients"], row["seed"]) for row in rows}
    for seed in SEEDS:
        for clients in CLIENTS:
            for variant in VARIANTS:
                if (variant, clients, seed) not in done:
                    rows.append(run_cell(variant, clients, seed, data_dir))
                    with CELLS.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
    before, _, after = PAGE.read_text().split(MARK)
    PAGE.write_text(f"{before}{MARK}\n{table(rows)}\n{MARK}{after}")


if __name__ == "__main__":
    main()
