"""How FedAIS' interval falls with the loss, and how old the rows are that it trains on.

    python benchmarks/fedais/interval.py --data-dir DIR     runs what interval.jsonl lacks
    python benchmarks/fedais/interval.py                    only draws

PubMed, 100 clients, Adam kept, one fold: the cells of `fedais/bytes`, with tau and age by round.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import silograph as sg
from silograph.core.config import make_config
from silograph.study.reproduce import Curves, svg_of

sys.path.insert(0, str(Path(__file__).parent))

from fedais_cells import KEPT, Place, cell_of

HERE = Path(__file__).parent
LINES = HERE / "interval.jsonl"
# Cells of recipe_bytes.py: the method and what differs.
RULES = {
    "from 2 batches (eq. 11)": ("fedais", ""),
    "from 10, the number of batches": ("fedais", "tau=10"),
    "of eq. 10": ("fedais", "interval=bound"),
    "every batch (FedAll)": ("fedall", ""),
}
COLUMNS = {"tau": "fact_knob_tau", "age": "fact_row_age"}
LABELS = {"tau": "batches between two exchanges", "age": "age of stored rows, batches"}
Row = dict[str, Any]


def row_of(rule: str, data_dir: str) -> Row:
    """Run a rule and return tau and age by round."""
    method, changes = RULES[rule]
    asked = cell_of(Place("pubmed", optimizer=KEPT), method, 1, changes).config
    result = sg.run(config=make_config({**vars(asked), "data_dir": data_dir}))
    told = {n: [row.get(column) for row in result.rounds] for n, column in COLUMNS.items()}
    assert result.test.server is not None
    numbers = [row["round"] for row in result.rounds]
    return {"rule": rule, "round": numbers, **told, "test": result.test.server.accuracy}


def plot(rows: list[Row], what: str) -> Curves:
    """Return one line for each rule."""
    lines = {
        row["rule"]: tuple(zip(*known, strict=True))
        for row in rows
        if (known := [p for p in zip(row["round"], row[what], strict=True) if p[1] is not None])
    }
    drawn = {name: (list(x), list(y)) for name, (x, y) in lines.items()}
    return Curves("PubMed, 100 clients, Adam kept", "round", LABELS[what], drawn, bottom=0)


def main() -> None:
    """Run what is missing; draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", help="folder in which graphs are looked for first")
    given = parser.parse_args()
    rows = [json.loads(t) for t in LINES.read_text().splitlines()] if LINES.exists() else []
    for rule in RULES if given.data_dir else ():
        if rule not in {row["rule"] for row in rows}:
            rows.append(row_of(rule, given.data_dir))
            LINES.write_text("".join(json.dumps(row) + "\n" for row in rows))
            print(rule, rows[-1]["test"], flush=True)
    for what in COLUMNS:
        (HERE / f"interval_{what}.svg").write_text(svg_of(plot(rows, what)))


if __name__ == "__main__":
    main()
