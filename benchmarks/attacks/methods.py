"""What attacks recover from each method, and what the strict policy changes; writes `methods.md`.

    python benchmarks/attacks/methods.py ../shared/data

Each method runs on Cora in 8 random silos with its defaults, and is attacked with `silograph
attack`; then again with what the strict policy demands of a run (`silograph silo --init-policy`).
Lines are kept in `methods.jsonl`, and cases that are there are not repeated. The page of security
(`docs/security.md`) is made of them.
"""

import dataclasses
import json
import runpy
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from silograph.core.config import make_config
from silograph.core.errors import ConfigError
from silograph.deploy.policy import STRICT_POLICY
from silograph.study.attack import attack

HERE = Path(__file__).parent
LINES, PAGE = HERE / "methods.jsonl", HERE / "methods.md"
# Presets differ from fedais in options only; ratings and uncut training have no attack here.
METHODS: dict[str, dict[str, Any]] = {
    "local": {},
    "fedavg": {},
    "fedavg, one step of SGD": {
        "method": "fedavg",
        "optimizer": "sgd",
        "local_epochs": 1,
        "dropout": 0.0,
    },
    "fedavg, mlp": {"method": "fedavg", "model": "mlp"},
    "fedprox": {},
    "fedper": {},
    "scaffold": {},
    "fedopt": {},
    "gcfl": {},
    "fedpub": {},
    "fedsageplus": {},
    "fedgraph": {},
    "label_guided": {},
    "bns": {},
    "cagnet": {},
    "fedais": {},
}
BASE = {"dataset": "cora", "clients": 8, "partition": "random", "seed": 0}
STRICT = tomllib.loads(STRICT_POLICY)
TERMS: dict[str, dict[str, Any]] = {
    "simulation": {"evaluation_min_count": 0},
    "strict": {
        "evaluation_min_count": STRICT["evaluation_min_count"],
        "min_nodes_per_row": STRICT["rows"]["min_nodes"],
        "min_silos_per_row": STRICT["rows"]["min_silos"],
    },
}
TEXT = """\
# What attacks recover from each method

{table}

Each method ran on Cora in 8 random silos with its defaults, and the server tried to recover what
silos hold. *Fraction found* is what `silograph attack` recovers in a simulation. *On the policy's
terms* is that with the strict policy's limits: `evaluation_min_count` 5 and, for `label_guided`,
at least 5 nodes and 2 silos in each row. *Allowed* says whether the strict policy lets the method
run.
[Security](../../docs/security.md) explains who can learn what.

## How it was measured

Attacks and their terms are those of [measure an attack](../../docs/how_to/measure_an_attack.md).
Rounds are as many as the attacks need. Seed 0.

Run again: `python benchmarks/attacks/methods.py DATA`.

## Limits

One seed, one graph, one partition. An attack that is not in the table recovered nothing or was not
tried. That proves nothing about other attacks. Presets of `fedais`, methods for ratings, and rows
of `fedgraph`, `fedais` and `fedsageplus` have no attack here.
"""


def measured(name: str, terms: str, data: str) -> dict[str, Any]:
    """Return the line of a case."""
    settings = {**BASE, "data_dir": data, "method": name, **METHODS[name]}
    if terms == "strict" and settings["method"] != "label_guided":
        demanded = {"evaluation_min_count": TERMS[terms]["evaluation_min_count"]}
    else:
        demanded = TERMS[terms]
    try:
        findings = attack(make_config({**settings, **demanded}))
    except ConfigError as error:
        return {"case": [name, terms], "refused": str(error)}
    return {"case": [name, terms], "findings": [dataclasses.asdict(each) for each in findings]}


def lines() -> Iterator[dict[str, Any]]:
    """Yield what was measured before."""
    if LINES.exists():
        yield from map(json.loads, LINES.read_text(encoding="utf-8").splitlines())


def main(data: str) -> None:
    """Measure what is missing, and write the page."""
    for name in METHODS:
        for terms in TERMS:
            if [name, terms] not in [line["case"] for line in lines()]:
                line = measured(name, terms, data)
                with LINES.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                print(line["case"], len(line.get("findings", ())), flush=True)
    tables = runpy.run_path(str(HERE.parents[1] / "docs" / "security_tables.py"))
    PAGE.write_text(TEXT.format(table=tables["attacks_table"]()), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
