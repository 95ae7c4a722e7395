"""The server's step over forms of the features: raw, row-normalized, standardized and degrees.

    python benchmarks/defaults/features.py --data-dir ../shared/data

runs the cells that `features.jsonl` does not hold yet, and writes the tables of `features.md`. It
can be stopped and continued at any time; `--max-minutes 0` only writes the page.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import scipy.sparse as sp
import torch

import silograph as sg
from silograph.experiment.markdown import markdown_table
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph
from silograph.study.reproduce.reproduce import filled

HERE = Path(__file__).parent
LINES, PAGE = (HERE / f"features.{end}" for end in ("jsonl", "md"))
LARGEST_DEGREE = 128  # of the one-hot degrees; larger ones share the last column
# Everything that decides a cell stands here, so that a change of the defaults changes no cell.
PROTOCOL: dict[str, Any] = {
    "partition": "metis",
    "split": "0.2/0.4/0.4",
    "layers": 2,
    "hidden": 128,
    "dropout": 0.5,
    "rounds": 100,
    "weight_decay": 5e-4,
    "local_epochs": 1,
    "eval_every": 5,
}


def step(**options: Any) -> dict[str, Any]:
    """Return FedOpt with these options of the server's Adam step."""
    server = {"server_optimizer": "adam", "server_beta1": 0.9, "server_beta2": 0.99}
    local = {"method": "fedopt", "optimizer": "sgd", "lr": 0.1, "keep_optimizer": False}
    return local | {"options": server | options}


ABSOLUTE, RELATIVE = "absolute tau 1e-5, .005", "relative tau .1, .01"
CENTRAL, LOCAL, CUT = "centralized", "local", "centralized, edges cut"
ADAM: dict[str, Any] = {"optimizer": "adam", "lr": 0.01, "keep_optimizer": True}
SETTINGS: dict[str, dict[str, Any]] = {
    ABSOLUTE: step(server_lr=0.005, server_tau=1e-5),
    RELATIVE: step(server_lr=0.01, server_relative_tau=0.1),
    "relative tau 0, .01": step(server_lr=0.01, server_relative_tau=0.0),
    "relative tau 1, .01": step(server_lr=0.01, server_relative_tau=1.0),
    "relative tau .1, .005": step(server_lr=0.005, server_relative_tau=0.1),
    "relative tau .1, .02": step(server_lr=0.02, server_relative_tau=0.1),
    "relative tau .1, .03": step(server_lr=0.03, server_relative_tau=0.1),
    CENTRAL: {"method": "centralized", **ADAM},
    LOCAL: {"method": "local", **ADAM},
    CUT: {"method": "centralized", **ADAM, "partition": "silo"},
}
CLIENTS = (5, 20, 100, 300)
TRIED = ("cora", "citeseer")  # where every setting runs
FORMS = ("raw", "row", "standard", "onehot-degree")
DECISIVE = [
    ("amazon_photo", "row"),
    ("pubmed", "row"),
    ("cora", "standard"),
    ("amazon_photo", "raw"),
    ("citeseer", "onehot-degree"),
    ("cora", "onehot-degree"),
    ("coauthor_cs", "row"),
    ("pubmed", "raw"),
    ("twitch", "raw"),
]
LARGER = [  # Coauthor-CS is left out where it is standardized: half a gigabyte
    ("citeseer", "standard"),
    ("coauthor_cs", "raw"),
    ("amazon_photo", "onehot-degree"),
    ("amazon_photo", "standard"),
    ("facebook100_20schools", "raw"),
    ("facebook100_20schools", "onehot-degree"),
    ("twitch", "onehot-degree"),
    *product(("pubmed",), FORMS[2:]),
    *product(("amazon_computers",), FORMS[:2]),
]
SHOWN = (ABSOLUTE, RELATIVE, CENTRAL, CUT)
Place = tuple[str, str, str, int, str, int]  # dataset, form, model, clients, setting, seed
KEYS = ("dataset", "form", "model", "clients", "setting", "seed")
Line = dict[str, Any]


def places() -> list[Place]:
    """Return all cells, in the order in which they decide."""
    small = list(product(TRIED, FORMS[:2]))
    others = product(("gin", "gat", "appnp"), FORMS[:2], SHOWN[:3])
    cells = [
        *((d, f, "gcn", 20, s, 0) for (d, f), s in product(small, SETTINGS)),
        *((d, f, "gcn", 20, s, 0) for (d, f), s in product(DECISIVE, (RELATIVE, CENTRAL))),
        *((d, f, "gcn", 20, ABSOLUTE, 0) for d, f in DECISIVE),
        *((d, f, "gcn", k, s, 0) for (d, f), k, s in product(small, (100, 300, 5), SHOWN[:2])),
        *((d, f, "sage", 20, s, 0) for (d, f), s in product(small, SHOWN)),
        *((d, f, "gcn", 20, s, 0) for (d, f), s in product(LARGER, SHOWN)),
        *((d, f, "gcn", 20, CUT, 0) for d, f in DECISIVE),
        *(("cora", f, m, 20, s, 0) for m, f, s in others),
        *(("amazon_photo", f, "sage", 20, s, 0) for f, s in product(FORMS[:2], SHOWN)),
        *((d, f, "gcn", 20, s, 1) for (d, f), s in product([*small, *DECISIVE, *LARGER], SHOWN)),
    ]
    return list(dict.fromkeys(cells))


def formed(graph: Graph, form: str) -> Graph:
    """Return the graph with its features in a form; `row` is left to the run."""
    if form == "standard":
        x = graph.x.scipy().toarray() if isinstance(graph.x, CSR) else graph.x.numpy()
        scale = x.std(axis=0)
        x = (x - x.mean(axis=0)) / np.where(scale > 0, scale, 1)
        return replace(graph, x=torch.as_tensor(x, dtype=torch.float32))
    if form == "onehot-degree":
        degree = graph.adj.degree.clamp(max=LARGEST_DEGREE).numpy()
        n = graph.num_nodes
        ones = np.ones(n, np.float32), (np.arange(n), degree)
        return replace(graph, x=CSR.from_scipy(sp.csr_matrix(ones, shape=(n, LARGEST_DEGREE + 1))))
    return graph


def without_cut_edges(graph: Graph, clients: int, seed: int) -> Graph:
    """Return the graph without the edges between clients, which are its silos."""
    run = sg.run(graph, clients=clients, seed=seed, partition="metis", rounds=1, hidden=1)
    assert run.cut is not None  # a simulation
    owner = run.cut.partition.owner
    ends = graph.edge_index
    kept = ends[:, owner[ends[0]] == owner[ends[1]]]
    names = tuple(str(number) for number in range(clients))
    adj = CSR.from_pairs(kept[0], kept[1], (graph.num_nodes, graph.num_nodes))
    return replace(graph, adj=adj, silo=owner, silo_names=names)


def line_of(graph: Graph, place: Place) -> Line:
    """Run a cell."""
    _, form, model, clients, setting, seed = place
    if setting == CUT:
        graph = without_cut_edges(graph, clients, seed)
    options = PROTOCOL | {"clients": clients} | SETTINGS[setting]
    if setting == CUT:
        del options["clients"]
    normalize: Literal["row", "none"] = "row" if form == "row" else "none"
    start = time.monotonic()
    result = sg.run(graph, model=model, normalize=normalize, seed=seed, **options)
    view = "server" if result.test.server is not None else "personalized"
    curve = [float(row[f"val_{view}_accuracy"] or 0) for row in result.rounds]
    return {
        **dict(zip(KEYS, place, strict=True)),
        "val": getattr(result.val, view)["accuracy"],
        "test": getattr(result.test, view)["accuracy"],
        "last_test": result.rounds[-1][f"test_{view}_accuracy"],
        "best_round": result.best_round,
        "curve": [round(value, 4) for value in curve],
        "seconds": round(time.monotonic() - start, 1),
    }


def measure(lines: list[Line], data_dir: str | None, until: float) -> None:
    """Append the cells that are missing."""
    loaded: dict[str, Graph] = {}
    for place in places():
        if found(lines, place) is not None or time.monotonic() >= until:
            continue
        dataset, form = place[:2]
        if dataset not in loaded:
            loaded = {dataset: sg.load(dataset, data_dir=data_dir)}
        lines.append(line_of(formed(loaded[dataset], form), place))
        with LINES.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
        print(*place, f"{lines[-1]['val']:.4f} {lines[-1]['seconds']}", flush=True)


def found(lines: Sequence[Line], place: Place) -> Line | None:
    """Return the line of a cell."""
    wanted = dict(zip(KEYS, place, strict=True))
    return next((line for line in lines if wanted.items() <= line.items()), None)


def percent(lines: Sequence[Line | None], part: str) -> str:
    """Return the mean of an accuracy in percent."""
    values = [100 * line[part] for line in lines if line is not None]
    return f"{statistics.mean(values):.1f}" if values else "-"


def entry(lines: Sequence[Line], *place: Any) -> str:
    """Return test and validation accuracy at the best validation round, and the last round's."""
    line = found(lines, (*place, 0))
    if line is None:
        return "-"
    return f"{percent([line], 'test')} ({percent([line], 'val')}), {percent([line], 'last_test')}"


def forms_table(lines: Sequence[Line]) -> str:
    """Return every dataset and form by setting, 20 clients, GCN."""
    heads = ["dataset", "features", *SHOWN, "behind centralized", "behind it, edges cut"]
    rows = []
    for dataset, form in dict.fromkeys([*product(TRIED, FORMS), *DECISIVE, *LARGER]):
        of = {s: found(lines, (dataset, form, "gcn", 20, s, 0)) for s in SHOWN}
        texts = [entry(lines, dataset, form, "gcn", 20, s) for s in SHOWN]
        if set(texts) != {"-"}:
            gaps = [gap(of[other], of[RELATIVE]) for other in (CENTRAL, CUT)]
            rows.append([dataset, form, *texts, *gaps])
    return markdown_table(heads, rows)


def gap(reference: Line | None, line: Line | None) -> str:
    """Return how many points of validation accuracy a line is behind another."""
    if reference is None or line is None:
        return "-"
    return f"{100 * (reference['val'] - line['val']):+.1f}"


def tried_table(lines: Sequence[Line]) -> str:
    """Return validation accuracy of all steps on the graphs where all ran, and their mean."""
    small = list(product(TRIED, FORMS[:2]))
    rows = []
    for setting in SETTINGS:
        of = [found(lines, (d, f, "gcn", 20, setting, 0)) for d, f in small]
        mean = percent(of, "val") if all(of) else "-"
        rows.append([setting, *(percent([line], "val") for line in of), mean])
    return markdown_table(["setting", *(f"{d}, {f}" for d, f in small), "mean"], rows)


def clients_table(lines: Sequence[Line]) -> str:
    """Return the two steps by number of clients."""
    heads = ["dataset", "features", "step", *(f"{k} clients" for k in CLIENTS)]
    rows = [
        [d, f, s, *(entry(lines, d, f, "gcn", k, s) for k in CLIENTS)]
        for (d, f), s in product(product(TRIED, FORMS[:2]), (ABSOLUTE, RELATIVE))
    ]
    return markdown_table(heads, rows)


def models_table(lines: Sequence[Line]) -> str:
    """Return other models than GCN, 20 clients."""
    sage = product((*TRIED, "amazon_photo"), FORMS[:2], ("sage",))
    rows = []
    for d, f, m in [*sage, *product(("cora",), FORMS[:2], ("gin", "gat", "appnp"))]:
        texts = [entry(lines, d, f, m, 20, s) for s in SHOWN[:3]]
        if set(texts) != {"-"}:
            rows.append([d, f, m, *texts])
    return markdown_table(["dataset", "features", "model", *SHOWN[:3]], rows)


def seeds_table(lines: Sequence[Line]) -> str:
    """Return seed 1 of what ran with it, in validation."""
    rows = []
    for d, f in dict.fromkeys([*product(TRIED, FORMS), *DECISIVE, *LARGER]):
        of = [found(lines, (d, f, "gcn", 20, s, 1)) for s in SHOWN]
        if any(of):
            rows.append([d, f, *(percent([line], "val") for line in of)])
    return markdown_table(["dataset", "features", *SHOWN], rows)


def left_out(lines: Sequence[Line]) -> str:
    """Return which cells have not run."""
    wanted = places()
    missing = [place for place in wanted if found(lines, place) is None]
    told = "; ".join(
        f"{d} {f}, {m}, {k} clients, seed {s}: {count}"
        for (d, f, m, k, s), count in Counter((*p[:4], p[5]) for p in missing).items()
    )
    ran = f"{len(wanted) - len(missing)} of {len(wanted)} cells have run."
    return f"{ran} Not yet run: {told}." if missing else ran


def write_page(lines: Sequence[Line]) -> None:
    """Fill the tables of the page in."""
    tables = {"forms": forms_table, "tried": tried_table, "clients": clients_table}
    tables |= {"models": models_table, "seeds": seeds_table, "feature cells": left_out}
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else "# Features\n"
    for name, table in tables.items():
        text = filled(text, name, table(lines))
    PAGE.write_text(text, encoding="utf-8")


def main() -> None:
    """Run what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir")
    parser.add_argument("--max-minutes", type=float, default=float("inf"))
    args = parser.parse_args()
    lines = [json.loads(line) for line in LINES.open()] if LINES.exists() else []
    measure(lines, args.data_dir, time.monotonic() + 60 * args.max_minutes)
    write_page(lines)


if __name__ == "__main__":
    main()
