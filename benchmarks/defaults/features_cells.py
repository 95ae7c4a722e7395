"""The cells of `features.py`: what runs, in the order in which it decides, and one line of each."""

import time
from dataclasses import replace
from itertools import product
from typing import Any, Literal

import numpy as np
import scipy.sparse as sp
import torch

import silograph as sg
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph

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
    server = {"server_beta1": 0.9, "server_beta2": 0.99}
    local = {"method": "fedopt", "optimizer": "sgd", "lr": 0.1, "keep_optimizer": False}
    return local | {"options": server | options}


ABSOLUTE, LARGER_TAU = "absolute tau 1e-5, .005", "relative tau .1, .01"
DEFAULT = "relative tau .01, .01"
CENTRAL, LOCAL, CUT = "centralized", "local", "centralized, edges cut"
ADAM: dict[str, Any] = {"optimizer": "adam", "lr": 0.01, "keep_optimizer": True}
SETTINGS: dict[str, dict[str, Any]] = {
    ABSOLUTE: step(server_lr=0.005, server_tau=1e-5),
    "relative tau 1, .01": step(server_lr=0.01, server_relative_tau=1.0),
    LARGER_TAU: step(server_lr=0.01, server_relative_tau=0.1),
    "relative tau .03, .01": step(server_lr=0.01, server_relative_tau=0.03),
    DEFAULT: step(server_lr=0.01, server_relative_tau=0.01),
    "relative tau 0, .01": step(server_lr=0.01, server_relative_tau=0.0),
    "relative tau .1, .005": step(server_lr=0.005, server_relative_tau=0.1),
    "relative tau .1, .02": step(server_lr=0.02, server_relative_tau=0.1),
    "relative tau .1, .03": step(server_lr=0.03, server_relative_tau=0.1),
    LOCAL: {"method": "local", **ADAM},
    CENTRAL: {"method": "centralized", **ADAM},
    CUT: {"method": "centralized", **ADAM, "partition": "silo"},
}
TAUS = ("relative tau .03, .01", DEFAULT, "relative tau 0, .01")
CLIENTS = (5, 20, 100, 300)
FORMS = ("raw", "row", "standard", "onehot-degree")
# Every setting runs on the first four; settings that differ in tau on all.
TRIED = [
    *product(("cora", "citeseer"), FORMS[:2], ("gcn",)),
    ("cora", "onehot-degree", "gcn"),
    ("amazon_photo", "row", "sage"),
]
SMALL = [(d, f) for d, f, _ in TRIED[:4]]
SIZES = {  # standardized features are dense: left out where they take more than 250 MB
    "cora": FORMS,
    "citeseer": FORMS,
    "pubmed": FORMS,
    "amazon_photo": FORMS,
    "amazon_computers": FORMS,
    "webkb": FORMS,
    "minesweeper": FORMS,
    "coauthor_cs": ("raw", "row", "onehot-degree"),
    "twitch": ("raw", "row", "onehot-degree"),
    "facebook100_20schools": ("raw", "row", "onehot-degree"),
    "citation_domains": ("raw", "row", "onehot-degree"),
}
WHERE = [(dataset, form) for dataset, forms in SIZES.items() for form in forms]
# More seeds where two leave a gap near the aim, or wide apart.
MORE_SEEDS = [
    *product(("cora", "citeseer", "webkb"), FORMS),
    ("pubmed", "onehot-degree"),
    ("amazon_photo", "onehot-degree"),
]
OTHER_MODELS = [
    *product(("cora",), FORMS[:2], ("sage", "gin", "gat", "appnp")),
    *product(("citeseer", "amazon_photo"), FORMS[:2], ("sage",)),
]
DENSE = "facebook100_20schools"
COMPARED = (DEFAULT, CENTRAL, CUT)
BEFORE = (ABSOLUTE, LARGER_TAU)
Place = tuple[str, str, str, int, str, int]  # dataset, form, model, clients, setting, seed
KEYS = ("dataset", "form", "model", "clients", "setting", "seed")
Line = dict[str, Any]


def places() -> list[Place]:
    """Return all cells, in the order in which they decide."""
    settings = [name for name in SETTINGS if name not in TAUS]
    by_clients = product((5, 100, 300), (*COMPARED, *BEFORE))
    cells = [
        *((*at, 20, s, 0) for at, s in product(TRIED, TAUS)),
        *((*at, 20, s, 0) for at, s in product(TRIED[:4], settings)),
        *((d, f, "gcn", 20, s, 0) for (d, f), s in product(WHERE, COMPARED)),
        *((*at, 20, s, 0) for at, s in product(OTHER_MODELS, COMPARED)),
        *((d, f, "gcn", 20, s, 1) for (d, f), s in product(WHERE, COMPARED)),
        *((d, f, "gcn", 20, s, n) for n, (d, f), s in product((2, 3, 4), MORE_SEEDS, COMPARED)),
        *((*at, 20, s, n) for n, at, s in product((1, 2), OTHER_MODELS, COMPARED)),
        *((d, f, "gcn", k, s, 0) for (d, f), (k, s) in product(SMALL, by_clients)),
        *((DENSE, "raw", "gcn", k, s, 0) for k, s in product((5, 100, 300), COMPARED)),
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
    """Run a cell. Scores are accuracy, or micro F1 where nodes have several labels."""
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
    score = "f1_micro" if graph.y.ndim == 2 else "accuracy"
    curve = [float(row[f"val_{view}_{score}"] or 0) for row in result.rounds]
    return {
        **dict(zip(KEYS, place, strict=True)),
        "val": getattr(result.val, view)[score],
        "test": getattr(result.test, view)[score],
        "last_test": result.rounds[-1][f"test_{view}_{score}"],
        "best_round": result.best_round,
        "curve": [round(value, 4) for value in curve],
        "seconds": round(time.monotonic() - start, 1),
    }
