"""What a minimum of nodes a row costs, and which attacks it stops; writes `thresholds.md`.

    python benchmarks/attacks/thresholds.py ../shared/data

Global training (`label_guided`, 2 layers of GCN, 128 units, 8 silos, 60 rounds, seed 0) with
`min_nodes_per_row` of 1, 2, 3 and 5: test accuracy in the round with the best validation and in
the last, local bias (the distance of logits from those of centralized training), rows of the last
round, and what `silograph attack` finds. Lines are kept in `thresholds.jsonl`, and runs that are
there are not repeated.
"""

import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import silograph as sg
from silograph.core.config import make_config
from silograph.experiment.terminal_table import markdown_table
from silograph.study.attack import attack

HERE = Path(__file__).parent
LINES, PAGE = HERE / "thresholds.jsonl", HERE / "thresholds.md"
CASES = tuple(product(("cora", "pubmed"), ("random", "metis"), (1, 2, 3, 5)))
HEAD = (
    "dataset",
    "partition",
    "k",
    "accuracy, best validation",
    "accuracy, last round",
    "local bias",
    "rows left out",
    "MB",
    "features",
    "features, edges known",
    "labels alone",
    "labels, same class",
    "right",
)

SUMMARY = (0, 1, 2, 3, 6, 8, 11)  # columns of the first table, for k of 1 and 2
TEXT = """\
# What a minimum of nodes a row costs and stops

{summary}

Global training was run with `--min-nodes-per-row` k, which drops rows of partial sums that fewer
nodes contribute to, and then attacked with `silograph attack`. From k = 2 on, a server without the
silos' edges solves the features of at most .1 % of the nodes, but it still reads labels of up to
41 % of the training nodes where neighbors share a class. Use k = 2 on graphs cut by communities,
where it costs a point at most, and expect to lose 3 to 12 points under a random partition.

## How it was measured

The method is `label_guided` with a 2-layer GCN of 128 units, 8 silos, 60 rounds and seed 0. Local
bias is the distance of logits from those of centralized training. The last five columns are the
shares of nodes whose features or labels the server finds. *Features, edges known* is for a server
that knows the edges of the silos. *Labels alone* are those of nodes that alone contribute to a row,
and *labels, same class* also those of nodes among others of their class. *Right* is the share of
those labels that are correct. [Attacks](../../docs/explanation/privacy.md) explains each of them.

## All figures

{table}

Run again: `python benchmarks/attacks/thresholds.py DATA`.

## Limits

All figures are of one seed. A server that knows the edges still solves the features of up to 37 %
of the nodes at k = 2. With `--option sample=...` the nodes of a row are drawn in every step;
these attacks are not measured there.
"""


def measured(dataset: str, partition: str, k: int, data: str) -> dict[str, Any]:
    """Return the line of a case."""
    asked = {"dataset": dataset, "data_dir": data, "partition": partition, "clients": 8}
    asked |= {"method": "label_guided", "rounds": 60, "min_nodes_per_row": k}
    result = sg.run(config=make_config({**asked, "local_bias": True}), progress="none")
    last = result.rounds[-1]
    sent, left = (float(last.get(f"fact_rows_{what}") or 0) for what in ("sent", "left_out"))
    assert result.test.server is not None  # global training has a model
    return {
        "case": [dataset, partition, k],
        "accuracy": result.test.server.accuracy,
        "last_accuracy": last["test_server_accuracy"],
        "local_bias": result.local_bias,
        "left_out": left / max(sent + left, 1),
        "bytes": result.ledger.bytes,
        "found": [[f.share, f.right] for f in attack(make_config(asked))],
    }


def row_of(line: dict[str, Any]) -> list[str]:
    """Return a line as the texts of `HEAD`; findings are in the order of `attack`."""
    dataset, partition, k = line["case"]
    features, edges, alone, same = line["found"][:4]
    shares = [f"{100 * one[0]:.1f} %" for one in (features, edges, alone, same)]
    right = "-" if same[1] is None else f"{100 * same[1]:.1f} %"
    figures = [f"{100 * line[which]:.1f}" for which in ("accuracy", "last_accuracy")]
    figures += [f"{line['local_bias']:.3f}", f"{100 * line['left_out']:.1f} %"]
    figures.append(f"{line['bytes'] / 1e6:.0f}")
    return [dataset, partition, str(k), *figures, *shares, right]


def lines() -> Iterator[dict[str, Any]]:
    """Return what was measured before."""
    if LINES.exists():
        yield from map(json.loads, LINES.read_text(encoding="utf-8").splitlines())


def main(data: str) -> None:
    """Measure what is missing, and write the page."""
    for case in CASES:
        if list(case) not in [line["case"] for line in lines()]:
            line = measured(*case, data)
            with LINES.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(line["case"], line["accuracy"], flush=True)
    rows = [row_of(line) for line in lines()]
    few = [[row[i] for i in SUMMARY] for row in rows if row[2] in ("1", "2")]
    summary = markdown_table([HEAD[i] for i in SUMMARY], few)
    PAGE.write_text(TEXT.format(summary=summary, table=markdown_table(HEAD, rows)), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
