"""What masks of partial sums cost: bytes, seconds and accuracy of `label_guided` beside plain sums.

    python benchmarks/trust/masked_rows.py runs cora.npz
    python benchmarks/trust/masked_rows.py masks

`runs` simulates 8 silos, with all rows and with those of at least two silos. `masks` takes the
steps of one pass at three silos that all contribute to the rows of a fourth. Seconds are CPU
seconds of this process, of masks the least of three. Each prints a line of JSON for each cell.
"""

import argparse
import json
import time
from typing import Any

import numpy as np

import silograph as sg
from silograph.core.config import make_config
from silograph.experiment.run.setup import prepare
from silograph.federation.secure.protocol import NO_PROVER
from silograph.federation.secure.row_form import RowNames
from silograph.federation.secure.row_masks import Agreement, RowMasks
from silograph.graph.graph import Graph

SILOS, ROUNDS, TIMES = 8, 60, 3
RUN: dict[str, Any] = {"method": "label_guided", "clients": SILOS, "eval_every": 10}
ROWS, WIDTH = 2_000, 128


def tell(**cell: Any) -> None:
    """Print a cell."""
    print(json.dumps(cell), flush=True)


def runs(graph: Graph) -> None:
    """Compare plain and masked runs."""
    for partition in ("random", "metis"):
        options = RUN | {"partition": partition, "rounds": ROUNDS}
        route = prepare(make_config(options), graph).federation.route
        contributors = np.bincount(route.target.numpy())
        for least in (1, 2):
            for secure in (False, True):
                start = time.process_time()
                own = options | {"min_silos_per_row": least, "secure_aggregation": secure}
                result = sg.run(graph, **own)
                seconds = time.process_time() - start
                assert result.test.server is not None
                of_round = [r for r in result.ledger.records if r.round == 2]
                kinds = ("partial_sums", "cotangents", "keys")
                tell(
                    partition=partition,
                    least=least,
                    secure=secure,
                    rows_of_one_silo=round(float((contributors == 1).mean()), 3),
                    accuracy=result.test.server["accuracy"],
                    seconds=round(seconds / ROUNDS, 4),
                    **{
                        f"{kind}_{way}": sum(
                            int(r.bytes.sum())
                            for r in of_round
                            if r.what == kind and r.direction == way
                        )
                        // SILOS
                        for kind in kinds
                        for way in ("up", "down")
                    },
                )


def masks() -> None:
    """Measure keys, masks and pads of one pass with one call."""
    names, best = ("a", "b", "c", "owner"), [float("inf")] * 3
    node, nobody = np.arange(ROWS), np.zeros(0, np.int64)
    links = [(row, name) for row in range(ROWS) for name in names[:3]]
    rows = {name: RowNames.of(node, ("owner",) * ROWS, nobody, ()) for name in names[:3]}
    rows["owner"] = RowNames.of(nobody, (), node, links)
    sets, empty = np.full((ROWS, 1), 7, np.uint8), np.zeros((0, 1), np.uint8)
    for _ in range(TIMES):
        silos = {name: RowMasks(name, b"benchmark", NO_PROVER) for name in names}
        offers = np.stack([np.frombuffer(silos[name].offer(), np.uint8) for name in names])
        start = time.process_time()
        for name in names[:3]:
            silos[name].agree(Agreement(names, offers, sets, empty), rows[name])
        silos["owner"].agree(Agreement(names, offers, empty, sets), rows["owner"])
        agreed = time.process_time()
        parts = [silos[name].mask(np.ones((ROWS, WIDTH), np.int64), None) for name in names[:3]]
        masked = time.process_time()
        silos["owner"].mask(np.zeros((0, WIDTH), np.int64), None)  # it has no part in others' rows
        total = silos["owner"].unmask(parts[0] + parts[1] + parts[2], None)
        unmasked = time.process_time()
        assert (total == 3).all()
        spent = (agreed - start) / 4, (masked - agreed) / 3, unmasked - masked
        best = [min(pair) for pair in zip(best, spent, strict=True)]
    tell(
        rows=ROWS,
        width=WIDTH,
        **{
            name: round(seconds, 5)
            for name, seconds in zip(("agree", "mask", "unmask"), best, strict=True)
        },
    )


def main() -> None:
    """Measure one part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["runs", "masks"])
    parser.add_argument("data", nargs="?", help="file with the graph of Cora")
    args = parser.parse_args()
    if args.part == "masks":
        masks()
    else:
        runs(sg.load(args.data))


if __name__ == "__main__":
    main()
