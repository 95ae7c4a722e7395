"""CPU of a round and peak memory of FedAIS beside FedAvg's, with the same model and batches.

    python benchmarks/fedais/fedais_timing.py --data-dir DIR [--dataset pubmed] [--clients 100,1000]
        [--scale 1] [--rounds 4] [--cases fedavg/auto,fedais/auto]

Every case is a process of its own, on one thread. Runs of one and of four rounds, without scores in
between, differ by three rounds: a third of the difference in CPU seconds is a round. FedAvg trains
on as many batches a round, with 10 neighbors drawn for each node in both hops. `--scale` is of
generated graphs (`generated:reddit`), `--rounds` of the longer run.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

SHORT = 1
CASES = "fedavg/auto,fedais/auto,fedall/auto,fedais/torch"


def seconds_of(given: argparse.Namespace, method: str, kernels: str, rounds: int) -> float:
    """Return CPU seconds of a run of so many rounds."""
    from fedais_cells import BATCHES, Place, cell_of

    import silograph as sg
    from silograph.core.config import make_config

    clients = int(given.clients)
    asked = cell_of(Place("pubmed", clients=clients), method, 1).config
    where = {"data_dir": given.data_dir, "scale": given.scale}
    own = {"rounds": rounds, "eval_every": given.rounds, "kernels": kernels}
    if asked.batch_size is not None:
        rows = 0.8 * sg.load(given.dataset, **where).num_nodes / clients
        own["batch_size"] = max(1, -(-round(rows) // BATCHES))
    asked = make_config({**vars(asked), "dataset": given.dataset, **where, **own})
    begun = time.process_time()
    sg.run(config=asked)
    return time.process_time() - begun


def one(given: argparse.Namespace, method: str, kernels: str) -> dict[str, float]:
    """Return CPU seconds of a round, and peak memory in GB."""
    seconds_of(given, method, kernels, SHORT)  # compiles and loads
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # of a run by itself
    short, long = (seconds_of(given, method, kernels, n) for n in (SHORT, given.rounds))
    return {"round": (long - short) / (given.rounds - SHORT), "peak": peak}


def main() -> None:
    """Run all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--dataset", default="pubmed")
    parser.add_argument("--clients", default="100,1000")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--cases", default=CASES, help="METHOD/KERNELS, the first for the ratio")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(one(asked, *asked.one)))
        return
    print("| clients | method | kernels | CPU s of a round | over FedAvg | peak GB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for clients in map(int, asked.clients.split(",")):
        usual = 0.0
        for method, kernels in (case.split("/") for case in asked.cases.split(",")):
            command = [sys.executable, __file__, "--data-dir", asked.data_dir]
            command += ["--dataset", asked.dataset, "--clients", str(clients)]
            command += ["--scale", str(asked.scale), "--rounds", str(asked.rounds)]
            command += ["--one", method, kernels]
            done = subprocess.run(
                command,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                check=True,
            )
            got = json.loads(done.stdout.splitlines()[-1])
            usual = usual or got["round"]
            row = [clients, method, kernels, f"{got['round']:.2f}", f"{got['round'] / usual:.1f}"]
            print("|", " | ".join(map(str, [*row, f"{got['peak']:.2f}"])), "|", flush=True)


if __name__ == "__main__":
    main()
