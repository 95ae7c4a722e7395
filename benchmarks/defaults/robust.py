"""Whether the settings of `sweep.md` also train other graphs and GraphSAGE.

    python benchmarks/defaults/robust.py --data-dir ../shared/data

runs the cells that `robust.jsonl` does not hold yet, one line each, and rewrites the table in
`sweep.md`. It can be stopped and continued.
"""

import argparse
import json
import statistics
from itertools import product
from pathlib import Path
from typing import Any

import silograph as sg

HERE = Path(__file__).parent
CELLS, PAGE, MARK = HERE / "robust.jsonl", HERE / "sweep.md", "<!-- robust -->"
GRAPHS: dict[str, dict[str, Any]] = {
    "amazon_photo": {"clients": 50},
    "digits": {"clients": 10},
    "minesweeper": {"clients": 20},
    "webkb": {"partition": "silo"},
}
MODELS, SEEDS = ("gcn", "sage"), (0, 1)


def fedopt(lr: float, **options: Any) -> dict[str, Any]:
    """Return a setting of FedOpt with local SGD."""
    return {"method": "fedopt", "optimizer": "sgd", "lr": lr, "options": options}


ADAM = {"server_optimizer": "adam"}
SETTINGS = {
    "SGD .1 x 1 / Adam .005, tau 1e-5": fedopt(0.1, **ADAM, server_lr=0.005, server_tau=1e-5),
    "SGD .1 x 1 / Adam .01, tau 1e-5": fedopt(0.1, **ADAM, server_lr=0.01, server_tau=1e-5),
    "SGD .5 x 1 / momentum .9": fedopt(0.5, server_optimizer="momentum"),
    "Adam .01 x 1 / replace": {"method": "fedavg", "optimizer": "adam", "lr": 0.01},
}


def run_cell(graph: str, model: str, setting: str, seed: int, data_dir: str | None) -> None:
    """Run one cell and add its line; scores are those of the server's model."""
    common: dict[str, Any] = {"rounds": 100, "eval_every": 5, "data_dir": data_dir}
    common |= {"model": model, "seed": seed}
    line: dict[str, Any] = {"graph": graph, "model": model, "setting": setting, "seed": seed}
    try:
        result = sg.run(graph, **GRAPHS[graph], **SETTINGS[setting], **common)
        views = {"val": result.val.server, "test": result.test.server}
        for part, scores in views.items():
            assert scores is not None  # every setting has a server's model
            line |= {part: scores.accuracy, f"{part}_f1": scores.f1_macro}
    except sg.SilographError as error:
        line["error"] = str(error)
    with CELLS.open("a") as file:
        file.write(json.dumps(line) + "\n")


def rows() -> list[dict[str, Any]]:
    """Return the lines so far."""
    return [json.loads(line) for line in CELLS.read_text().splitlines()] if CELLS.exists() else []


def entry(found: list[dict[str, Any]]) -> str:
    """Return test accuracies of all seeds in percent, or what went wrong."""
    if not found:
        return "-"
    if any("error" in row for row in found):
        return "diverged"
    tests = [100 * row["test"] for row in found]
    return f"{statistics.mean(tests):.1f} ({min(tests):.1f} to {max(tests):.1f})"


def table() -> str:
    """Return the table in Markdown."""
    columns = list(product(GRAPHS, MODELS))
    lines = [
        "| local / server | " + " | ".join(f"{g}, {m}" for g, m in columns) + " |",
        "|" + "---|" * (len(columns) + 1),
    ]
    known = rows()
    for setting in SETTINGS:
        cells = [
            entry([r for r in known if (r["graph"], r["model"], r["setting"]) == (*c, setting)])
            for c in columns
        ]
        lines.append(f"| {setting} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing and rewrite the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir")
    data_dir = parser.parse_args().data_dir
    names = ("graph", "model", "setting", "seed")
    for graph, model, setting, seed in product(GRAPHS, MODELS, SETTINGS, SEEDS):
        done = {tuple(row[name] for name in names) for row in rows()}
        if (graph, model, setting, seed) not in done:
            run_cell(graph, model, setting, seed, data_dir)
            print(rows()[-1], flush=True)
    before, _, rest = PAGE.read_text().partition(MARK)
    PAGE.write_text(f"{before}{MARK}\n{table()}\n{MARK}{rest.partition(MARK)[2]}")


if __name__ == "__main__":
    main()
