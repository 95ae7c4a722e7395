"""What it takes to cut a large graph: time and memory of `prepare`, and of rounds after it.

    python benchmarks/speed/cut.py --folder DIR

generates graphs of the shapes of Reddit and ogbn-products in DIR (4 GB), cuts each and trains three
rounds of FedAvg, every cell in a process of its own; it rewrites the table in cut.md. A process
that takes more than --limit GB is stopped. `--cells 0 3` measures these rows only.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from side import one_round
from torch import Tensor

import silograph as sg
from silograph.core.config import make_config
from silograph.experiment.run import run as loop
from silograph.experiment.run.setup import Setup, prepare
from silograph.graph.heterogeneity import describe

PAGE = Path(__file__).parent / "cut.md"
LINES = PAGE.with_suffix(".jsonl")
MARK = "<!-- table -->"
CELLS = [  # shape, scale, clients, partition
    ("reddit", 0.025, 1000, "random"),
    ("reddit", 0.1, 1000, "random"),
    ("reddit", 0.4, 1000, "random"),
    ("reddit", 1.0, 1000, "random"),
    ("ogbn-products", 0.1, 1000, "random"),
    ("ogbn-products", 1.0, 1000, "random"),
    ("ogbn-products", 0.1, 1000, "metis"),
    ("ogbn-products", 0.1, 1000, "metis again"),
]
ROUNDS = 3
Row = dict[str, Any]


def memory() -> dict[str, int]:
    """Return the memory of this process in bytes: all, and without mapped files (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith(" kB")}
    return {name: int(sizes[name]) * 1024 for name in ("VmRSS", "VmHWM", "RssAnon")}


class Watch:
    """Follows the memory of this process, which it ends above a limit.

    Attributes:
        peak: most bytes without mapped files since it was last set.
    """

    def __init__(self, limit: float) -> None:
        self.peak = 0
        threading.Thread(target=self._follow, args=(limit,), daemon=True).start()

    def _follow(self, limit: float) -> None:
        while True:
            now = memory()
            self.peak = max(self.peak, now["RssAnon"])
            if now["VmRSS"] > limit * 1e9:
                print(f"stopped at {now['VmRSS'] / 1e9:.1f} GB", file=sys.stderr, flush=True)
                os._exit(9)
            time.sleep(0.01)


def kept_bytes(setup: Setup) -> int:
    """Return the bytes of the blocks that training keeps, with their routes."""
    seen: dict[int, int] = {}

    def add(value: object) -> None:
        if isinstance(value, Tensor):
            seen[value.data_ptr()] = value.nbytes
        elif isinstance(value, tuple | list):
            for part in value:
                add(part)
        elif hasattr(value, "__dataclass_fields__"):
            for name in value.__dataclass_fields__:
                add(getattr(value, name))

    add(setup.federation.route)
    add([called.all for called in setup.federation._host.blocks])  # type: ignore[attr-defined]
    return sum(seen.values())


def measure(shape: str, scale: float, clients: int, partition: str, given: Any) -> Row:
    """Return the figures of one cell."""
    torch.set_num_threads(1)
    watch, name = Watch(given.limit), f"generated:{shape}"
    values = {"dataset": name, "partition": partition, "method": "fedavg", "rounds": ROUNDS}
    small = sg.generate(shape, scale=0.02, data_dir=given.folder)
    prepare(make_config(values | {"scale": 0.02, "clients": 10}), small)  # imports everything
    graph = sg.load(name, scale=scale, data_dir=given.folder)
    base, began = memory()["RssAnon"], time.process_time()
    watch.peak = 0
    setup = prepare(make_config(values | {"scale": scale, "clients": clients}), graph)
    prepared, peak, kept = time.process_time(), watch.peak, kept_bytes(setup)
    hash_of_cut, watch.peak = setup.partition_hash, 0
    snapshot = loop.first_snapshot(setup)
    rounds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        snapshot, _ = one_round(setup, None, snapshot)
        rounds.append(time.process_time() - start)
    train_peak, watch.peak = watch.peak, 0
    start, before = time.process_time(), memory()["RssAnon"]
    figures = describe(graph, setup.cut.partition, copies=setup.cut.copies_split)
    return {
        "shape": shape,
        "scale": scale,
        "clients": clients,
        "partition": partition,
        "hash": hash_of_cut,
        "nodes": graph.num_nodes,
        "edges": graph.num_edges,
        "cut_share": figures.cut_share,
        "kernels": setup.config.kernels,
        "block_size": setup.config.block_size,
        "prepare_seconds": prepared - began,
        "kept_bytes": kept,
        "prepare_peak_bytes": peak - base,
        "round_seconds": rounds,
        "train_peak_bytes": train_peak - base,
        "describe_seconds": time.process_time() - start,
        "describe_bytes": watch.peak - before,
        "process_peak_bytes": memory()["VmHWM"],
    }


def table(rows: list[Row]) -> str:
    """Return the rows in Markdown."""
    lines = [
        "| shape | scale | partition | nodes | edges, M | prepare, s | kept, B/edge | "
        "peak beyond it, B/edge | round, s | figures, s | peak of the process, GB |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        beyond = r["prepare_peak_bytes"] - r["kept_bytes"]
        lines.append(
            f"| {r['shape']} | {r['scale']:g} | {r['partition']} | {r['nodes']:,} | "
            f"{r['edges'] / 1e6:.1f} | {r['prepare_seconds']:.1f} | "
            f"{r['kept_bytes'] / r['edges']:.0f} | {beyond / r['edges']:.0f} | "
            f"{min(r['round_seconds']):.1f} | {r['describe_seconds']:.1f} | "
            f"{r['process_peak_bytes'] / 1e9:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure cells in processes of their own and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--limit", type=float, default=16.0, metavar="GB")
    parser.add_argument("--cells", type=int, nargs="*", default=list(range(len(CELLS))))
    parser.add_argument("--cell", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.cell is not None:
        shape, scale, clients, partition = CELLS[given.cell]
        row = measure(shape, scale, clients, partition.split()[0], given)
        print(json.dumps(row | {"partition": partition}))
        return
    Path(given.folder).mkdir(parents=True, exist_ok=True)
    lines = LINES.read_text().splitlines() if LINES.exists() else []
    rows = {row["cell"]: row for row in map(json.loads, lines)}
    with tempfile.TemporaryDirectory() as cache:  # METIS runs in the first of its cells
        for cell in given.cells:
            sg.generate(CELLS[cell][0], scale=CELLS[cell][1], data_dir=given.folder)
            command = [sys.executable, __file__, "--folder", given.folder, "--cell", str(cell)]
            done = subprocess.run(
                [*command, "--limit", str(given.limit)],
                stdout=subprocess.PIPE,
                check=True,
                text=True,
                env=os.environ | {"SILOGRAPH_CACHE": cache},
            )
            rows[cell] = {"cell": cell} | json.loads(done.stdout.splitlines()[-1])
            print(rows[cell], flush=True)
            ordered = [rows[number] for number in sorted(rows)]
            LINES.write_text("".join(json.dumps(row) + "\n" for row in ordered))
            before, _, rest = PAGE.read_text().partition(MARK)
            after = rest.partition(MARK)[2]
            PAGE.write_text(f"{before}{MARK}\n{table(ordered)}\n{MARK}{after}")


if __name__ == "__main__":
    main()
