"""Show that a change of the code has changed no number: fingerprints of runs, before and after.

    python benchmarks/neutral/fingerprint.py run --out before.jsonl      # at the old commit
    python benchmarks/neutral/fingerprint.py run --out after.jsonl       # at the new commit
    python benchmarks/neutral/fingerprint.py compare before.jsonl after.jsonl
    python benchmarks/neutral/fingerprint.py list                        # the cells

A cell is one small run: a method, a model, a cut, a kernel, a run that is killed and resumed, or a
server with three silo processes. Its graph is drawn here, from a fixed seed. Only what users see is
used: `sg.run`, the command line, and the files of result folders. So the script runs unmodified at
both commits, and should be the same file at both. `PYTHONPATH=src` makes it take the code of a
working tree; the first line that it prints says which code it took.

`run` writes one line of JSON for each cell, and skips cells that are in the file already;
`--cells 'silos/*'` runs only those whose names match. `compare` prints what differs and exits with
1 if anything does. A line holds

- `hashes`: SHA-256 of the model of the best round, of the ledger's records, and of every column of
  rounds.csv and clients.csv and every value of result.json. Seconds, memory, paths and the words
  for why a run ended are left out. Clients' own models are seen by their losses.
- `nameless`: hashes of the model without the names of its tensors, and of the records without the
  names of their ops. An op's name is a part of its messages: its length is taken off their bytes.
- `ops`: records by op; `figures`: a few numbers to read.

`compare` says "renamed" where only names have changed, and "new" for values that only the second
file has; `--allow-names` accepts both and lists each once. A run that is killed must end as the
same run uninterrupted, and silos must end with the model and ledger of a simulation: `run` reports
where that fails, leaves the cell out, and exits with 1. Both files have to come from one machine
with the same packages.

A process that compiles kernels itself gets other last bits than those that load them from numba's
cache. So `run` first has another process run the cells with compiled kernels, and throws away what
that gives. All of it takes about four minutes on a quiet core, and two more where kernels are new.
"""

import argparse
import csv
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np
from safetensors.numpy import load_file

import silograph as sg

Options = dict[str, Any]  # keywords of `sg.run`
Print = dict[str, Any]  # the fingerprint of a run, a line of the file without the cell's name

# --- graphs -------------------------------------------------------------------------------------

SEED = 20251122
SILOS = ("east", "north", "south", "west")
OWN_MODEL = '''"""A model of users' own."""

import torch


class Net(torch.nn.Module):
    """Two layers with a mean over neighbors between them."""

    def __init__(self, features, outputs):
        super().__init__()
        self.first = torch.nn.Linear(features, 12)
        self.norm = torch.nn.LayerNorm(12)
        self.last = torch.nn.Linear(12, outputs)

    def forward(self, x, edge_index):
        h = self.first(x)
        sums = torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]])
        h = self.norm(h + sums).relu()
        return self.last(torch.nn.functional.dropout(h, 0.3, self.training))
'''


def planted_edges(rng: np.random.Generator, group: np.ndarray, drawn: int) -> np.ndarray:
    """Return edges (2, E), most of them within groups."""
    ends = rng.integers(0, len(group), (2, drawn))
    same = group[ends[0]] == group[ends[1]]
    edges: np.ndarray = ends[:, same | (rng.random(drawn) < 0.12)]
    return edges


def draw_masks(rng: np.random.Generator, nodes: int) -> dict[str, np.ndarray]:
    """Return a split that leaves some nodes out."""
    part = rng.choice(4, nodes, p=(0.3, 0.25, 0.3, 0.15))
    return {f"{name}_mask": part == i for i, name in enumerate(("train", "val", "test"))}


def class_arrays() -> dict[str, Any]:
    """Return a multi-class graph with missing labels, a split and silos, in two components."""
    rng = np.random.default_rng(SEED)
    nodes, classes, features = 300, 5, 24
    y = rng.integers(0, classes, nodes)
    edges = planted_edges(rng, y, 4000)
    apart = edges >= nodes - 20  # a small component
    edges = edges[:, apart[0] == apart[1]]
    likely = np.arange(features) % classes == y[:, None]
    x = np.where(rng.random((nodes, features)) < 0.08 + 0.3 * likely, rng.random((nodes, 1)) + 1, 0)
    silo = (y + rng.integers(0, 2, nodes)) % len(SILOS)
    y[rng.choice(nodes, 9, replace=False)] = -1
    return {
        "edge_index": edges,
        "x": x.astype(np.float32),
        "y": y,
        "num_classes": classes,
        "silo": silo,
        "silo_names": np.array(SILOS),
        **draw_masks(rng, nodes),
    }


def label_arrays() -> dict[str, Any]:
    """Return a multi-label graph with dense features, missing bits and words as node ids."""
    rng = np.random.default_rng(SEED + 1)
    nodes, bits, features = 240, 6, 16
    group = rng.integers(0, 4, nodes)
    edges = planted_edges(rng, group, 2500)
    y = (rng.random((nodes, bits)) < rng.random((4, bits))[group]).astype(np.int64)
    x = rng.normal(size=(bits, features))[None] * y[:, :, None]
    x = x.sum(1) + rng.normal(size=(nodes, features))
    y[rng.random((nodes, bits)) < 0.02] = -1
    ids = np.array([f"node-{i:03d}" for i in rng.permutation(nodes)])
    return {
        "edge_index": edges,
        "x": x.astype(np.float32),
        "y": y,
        "node_id": ids,
        **draw_masks(rng, nodes),
    }


def to_sparse(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays with the features as the parts of a CSR matrix."""
    x = arrays["x"]
    rows, columns = np.nonzero(x)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(x)))])
    rest = {name: values for name, values in arrays.items() if name != "x"}
    parts = {"x_data": x[rows, columns], "x_indices": columns, "x_indptr": indptr}
    return {**rest, **parts, "x_shape": np.array(x.shape)}


def rating_arrays() -> dict[str, Any]:
    """Return ratings of 60 users and 40 items, each from 1 to 5."""
    rng = np.random.default_rng(SEED)
    pairs = rng.permutation(60 * 40)[:900]
    user, item = pairs // 40, pairs % 40
    taste, quality = rng.normal(size=(60, 2)), rng.normal(size=(40, 2))
    rating = 3 + (taste[user] * quality[item]).sum(1) + rng.normal(scale=0.5, size=len(pairs))
    return {"user": user, "item": item, "rating": rating.clip(1, 5).round(1)}


def write_tables(arrays: Mapping[str, Any], folder: Path) -> None:
    """Write a multi-class graph as two CSV tables."""
    folder.mkdir()
    x, y = arrays["x"], arrays["y"]
    with (folder / "nodes.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["id", "label", *(f"x{i}" for i in range(x.shape[1]))])
        for node, row in enumerate(x.tolist()):
            table.writerow([node, y[node] if y[node] >= 0 else "", *row])
    with (folder / "edges.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["source", "target"])
        table.writerows(arrays["edge_index"].T.tolist())


def write_graphs(folder: Path) -> None:
    """Write all that cells take from `folder`."""
    classes = class_arrays()
    np.savez(folder / "classes.npz", **to_sparse(classes))
    np.savez(folder / "labels.npz", **label_arrays())
    np.savez(folder / "ratings.npz", **rating_arrays())
    write_tables(classes, folder / "tables")
    (folder / "own.py").write_text(OWN_MODEL, encoding="utf-8")


# --- cells --------------------------------------------------------------------------------------

BASE: Options = {"rounds": 3, "clients": 5, "hidden": 16, "local_epochs": 2, "threads": 1}
OWN: Options = {"model": "{folder}/own.py:Net", "hidden": None}  # decides its width by itself
BATCHES: Options = {"batch_size": 8, "fanout": "4,3"}
METHODS: dict[str, Options] = {
    "local": {"method": "local"},
    "fedavg": {"method": "fedavg"},
    "fedopt": {"method": "fedopt"},
    "fedprox": {"method": "fedprox", "local_epochs": 3},
    "fedper": {"method": "fedper"},
    "scaffold": {"method": "scaffold"},
    "llcg": {"method": "llcg"},
    "label_guided": {"method": "label_guided"},
    "label_guided_sample": {"method": "label_guided", "options": {"sample": 60}},
    "bns": {"method": "bns", "options": {"rate": 0.5}},
    "cagnet": {"method": "cagnet"},
    "centralized": {"method": "centralized"},
    "graphsaint": {"method": "graphsaint", "options": {"budget": 40}},
    "collect": {"method": "fedavg", "collect": 0.5},
    "gcfl": {"method": "gcfl", "options": {"warmup": 0, "epsilon1": 100.0, "epsilon2": 1e-6}},
    "gcflplus": {
        "method": "gcflplus",
        "options": {"warmup": 0, "epsilon1": 100.0, "epsilon2": 1e-6, "sequence": 2},
    },
    "fedpub": {"method": "fedpub", "options": {"communities": 1}},
    "fedsageplus": {"method": "fedsageplus"},
    "fedais": {"method": "fedais"},
    "fedgraph": {"method": "fedgraph", "options": {"kappa": 16}, "local_epochs": 1},
    "fedacs": {"method": "fedacs"},
}
MODELS: dict[str, Options] = {
    "gcn": {},
    "sage": {},
    "gin": {},
    "graphconv": {},
    "gat": {"heads": 4},
    "appnp": {"hops": 4, "teleport": 0.2},
    "mlp": {},
}
CUTS: dict[str, Options] = {
    "louvain": {},
    "random": {},
    "dirichlet": {"alpha": 0.3},
    "class_biased": {"favored_classes": 1, "favor": 5.0},
    "silo": {"clients": 4},
    "metis_overlapping": {"clients": 6, "clients_per_part": 3, "part_share": 0.6},
    "shares": {"share_mean": 0.5, "share_variance": 0.02},
}
# Variants of FedAvg; where a value is `method`, it says of which method they are.
VARIANTS: dict[str, Options] = {
    "participation": {"participation": 0.5, "rounds": 4},
    "batches": {"batch_size": 8},
    "fanout": BATCHES,
    "keep_optimizer": {"keep_optimizer": True},
    "drop_optimizer": {"keep_optimizer": False},
    "keep_optimizer_participation": {"keep_optimizer": True, "participation": 0.5, "rounds": 4},
    "sgd": {"optimizer": "sgd", "momentum": 0.9, "keep_optimizer": True},
    "no_decay": {"weight_decay": 0.0, "dropout": 0.0},
    "three_layers": {"layers": 3},
    "one_layer": {"layers": 1},
    "float64": {"dtype": "float64"},
    "strict": {"strict": True},
    "blocks": {"block_size": 2, "participation": 0.7},
    "eval_every": {"eval_every": 2, "rounds": 4},
    "patience": {"patience": 1, "rounds": 4, "lr": 0.5},
    "target": {"target": "accuracy=0.18", "rounds": 4},
    "max_bytes": {"max_bytes": "200kB", "rounds": 4},
    "normalize": {"normalize": "row"},
    "component": {"largest_component": True},
    "public": {"split": "public"},
    "full": {"split": "full"},
    "drop_edges": {"drop_edges": 0.3},
    "local_bias": {"local_bias": True},
    "seeds": {"seed": 3, "partition_seed": 4, "split_seed": 5, "init_seed": 6},
    "no_checkpoints": {"checkpoint_every": 0},
    "local_fanout": {"method": "local", **BATCHES},
    "local_drop_optimizer": {"method": "local", "keep_optimizer": False},
    "fedopt_momentum": {"method": "fedopt", "server_optimizer": "momentum"},
    "fedopt_absolute_tau": {"method": "fedopt", "options": {"server_tau": 1e-5}},
    "fedopt_participation": {"method": "fedopt", "participation": 0.5, "rounds": 4},
    "fedopt_keep_optimizer": {"method": "fedopt", "momentum": 0.9, "keep_optimizer": True},
    "fedprox_fanout": {"method": "fedprox", "options": {"mu": 0.5}, **BATCHES},
    "llcg_share": {"method": "llcg", "options": {"server_share": 0.5, "correction_steps": 2}},
    "llcg_participation": {"method": "llcg", "participation": 0.5, "rounds": 4},
    "label_guided_conditional": {
        "method": "label_guided",
        "options": {"sample": 60, "normalize": "conditional", "weigh_loss": True},
    },
    "label_guided_rows": {
        "method": "label_guided",
        "options": {"sample": 60, "normalize": "none", "rows": "all"},
    },
    "label_guided_sage": {"method": "label_guided", "model": "sage"},
    "bns_sage": {"method": "bns", "model": "sage"},
    "cagnet_layers": {"method": "cagnet", "layers": 3},
    "centralized_sage": {"method": "centralized", "model": "sage", **BATCHES},
    "graphsaint_node": {"method": "graphsaint", "options": {"sampler": "node", "budget": 40}},
    "graphsaint_edge": {
        "method": "graphsaint",
        "options": {"sampler": "edge", "budget": 40, "normalize": False, "steps": 3},
    },
    "collect_all_fedopt": {"method": "fedopt", "collect": 1.0, "participation": 0.5},
    "median": {"aggregator": "median", "participation": 0.8},
    "oort": {"selector": "oort", "rounds": 4},
    "fedper_no_private": {"method": "fedper", "options": {"private": 0}},
    "fedper_participation": {"method": "fedper", "participation": 0.6, "rounds": 4},
    "gcfl_participation": {**METHODS["gcfl"], "participation": 0.6, "rounds": 4},
    "fedpub_masks": {
        "method": "fedpub",
        "options": {"communities": 1, "masks": False},
        "keep_optimizer": False,
        "participation": 0.6,
        "rounds": 4,
    },
    "int8": {"weights_as": "int8", "participation": 0.6, "rounds": 4},
    "used_rows": {"weight_rows": "used", "participation": 0.6, "rounds": 4},
    "fedopt_float16_used": {"method": "fedopt", "weights_as": "float16", "weight_rows": "used"},
    **{
        f"fedais_{name}": {"method": "fedais", "options": options}
        for name, options in {
            "tau": {"tau": 1, "interval": "fixed"},
            "bound": {"interval": "bound"},
            "held": {"halo": "held", "tau": 3},
            "all": {"halo": "all", "sent": "int8"},
            "none": {"halo": "none", "nodes": "all"},
            "unbiased": {"unbiased": True, "average": "nodes"},
            "stored": {"owners": "stored", "warmup": 2},
        }.items()
    },
    "fedais_participation": {"method": "fedais", "participation": 0.6, "rounds": 4},
    "fedais_sage": {"method": "fedais", "model": "sage", "local_epochs": 1},
    "fedgraph_all": {
        "method": "fedgraph",
        "local_epochs": 1,
        "options": {"share": "all", "kappa": 16},
    },
    "fedgraph_gradients": {
        "method": "fedgraph",
        "local_epochs": 1,
        "options": {"return_gradients": True, "local_steps": 2, "rescale": "inverse"},
    },
    "fedgraph_none": {"method": "fedgraph", "local_epochs": 1, "options": {"share": "none"}},
}
RATINGS: dict[str, Options] = {
    "fedavg": {"method": "fedavg", "model": "rating_mf"},
    "local": {"method": "local", "model": "rating_mf"},
    "fedmf": {"method": "fedmf", "model": "rating_mf", "options": {"items": 24}},
    "fedgnn": {"method": "fedgnn", "model": "rating_gat", "options": {"items": 24, "pseudo": 4}},
    "fesog": {"method": "fesog", "model": "rating_gat", "options": {"items": 24, "pseudo": 4}},
    "fedacs": {"method": "fedacs", "model": "rating_gcn"},
    "profiles": {"method": "fedavg", "model": "rating_profiles"},
}
# Variants that have no compiled kernels.
TORCH_VARIANTS: dict[str, Options] = {
    "residual": {"layers": 3, "residual": True},
    "scaffold_fanout": {"method": "scaffold", "options": {"server_lr": 0.5}, **BATCHES},
    "scaffold_participation": {"method": "scaffold", "participation": 0.5, "rounds": 4},
    "scaffold_collect": {"method": "scaffold", "collect": 0.5},
    "label_guided_gin": {"method": "label_guided", "model": "gin"},
    "label_guided_appnp": {"method": "label_guided", "model": "appnp", "hops": 3},
    "cagnet_graphconv": {"method": "cagnet", "model": "graphconv"},
    "fedopt_gat": {"method": "fedopt", "model": "gat", "heads": 2, "participation": 0.5},
    "local_gin": {"method": "local", "model": "gin", **BATCHES},
    "own_model": OWN,
    "own_model_fedopt": {"method": "fedopt", "batch_size": 8, **OWN},
    "own_model_scaffold": {"method": "scaffold", **OWN},
}
TORCH_ONLY = {"scaffold", "gin", "graphconv", "gat", "appnp"}
TORCH_ONLY |= {"rating_mf", "rating_gat", "rating_profiles"}
# Enough work in a round that a process can be killed in the middle of a run.
SLOW: Options = {"rounds": 4, "local_epochs": 60, "kernels": "torch"}
KILLED: dict[str, Options] = {
    "fedopt": {"method": "fedopt", "participation": 0.6},
    "fedavg_keep_optimizer": {"method": "fedavg", "keep_optimizer": True, "participation": 0.6},
    "scaffold": {"method": "scaffold", "participation": 0.6},
    "label_guided": {"method": "label_guided", "options": {"sample": 60}, "local_epochs": 20},
    "collect_fanout": {"method": "fedavg", "collect": 0.5, "local_epochs": 20, **BATCHES},
}
SILO_RUNS: dict[str, Options] = {
    "fedavg": {"method": "fedavg", "kernels": "compiled"},
    "fedopt_participation": {
        "method": "fedopt",
        "participation": 0.6,
        "kernels": "torch",
        "evaluate_clients": "all",  # a server of real silos would score participants only
    },
    "scaffold": {"method": "scaffold", "kernels": "torch"},
    "label_guided_sample": {**METHODS["label_guided_sample"], "kernels": "torch"},
    "bns": {**METHODS["bns"], "kernels": "compiled"},
    "collect": {"collect": 0.5, "method": "local", "kernels": "torch"},
    "fedper": {"method": "fedper", "kernels": "torch"},
    "gcfl": {**METHODS["gcfl"], "kernels": "torch"},
    "fedpub": {**METHODS["fedpub"], "kernels": "torch"},
    "fedais": {"method": "fedais", "kernels": "torch", "participation": 0.7},
    "fedgraph": {**METHODS["fedgraph"], "kernels": "torch"},
    "used_rows": {"method": "fedavg", "weight_rows": "used", "kernels": "torch"},
}
COMMAND: Options = {
    "method": "fedopt",
    "options": {"server_lr": 0.03},
    "participation": 0.6,
    "batch_size": 8,
    "fanout": "4,3,2",
    "layers": 3,
    "residual": True,
    "momentum": 0.5,
    "keep_optimizer": True,
    "collect": 0.4,
    "kernels": "torch",
    "seed": 2,
    "strict": True,
    "max_bytes": "10MB",
    "target": "accuracy=0.99",
    "partition": "random",
}


@dataclass(frozen=True)
class Cell:
    """A run.

    Attributes:
        graph: `classes`, `labels` or `tables`, which are drawn here, or the name of a dataset.
        options: keywords of `sg.run`, over `BASE`; None leaves one out, and `{folder}` is the
            folder of the graphs.
        way: how it is run, one of `WAYS`.
    """

    graph: str
    options: Options
    way: str = "called"


def kernels_of(options: Options) -> Sequence[str]:
    """Return the kernels that a run can have."""
    named = {options.get("method"), options.get("model")}
    return ("torch",) if named & TORCH_ONLY else ("compiled", "torch")


def in_kernels(name: str, graph: str, options: Options) -> dict[str, Cell]:
    """Return a cell for each kernel that a run can have."""
    return {
        f"{name}/{kernels}": Cell(graph, {**options, "kernels": kernels})
        for kernels in kernels_of(options)
    }


def method_cells() -> dict[str, Cell]:
    """Return every method and every model, on both graphs."""
    cells: dict[str, Cell] = {}
    for graph in ("classes", "labels"):
        for name, options in METHODS.items():
            if graph == "labels" and name == "label_guided_sample":
                continue  # it needs one label a node
            cells |= in_kernels(f"methods/{graph}/{name}", graph, options)
        for name, own in MODELS.items():
            options = {"method": "fedavg", "model": name, **own}
            cells |= in_kernels(f"models/{graph}/{name}", graph, options)
    for name, options in RATINGS.items():
        cells |= in_kernels(f"methods/ratings/{name}", "ratings", {**options, "hidden": 8})
    return cells


def variant_cells() -> dict[str, Cell]:
    """Return options of runs, cuts and forms of graphs."""
    cells: dict[str, Cell] = {}
    fedavg: Options = {"method": "fedavg"}
    for name, options in VARIANTS.items():
        cells |= in_kernels(f"variants/{name}", "classes", fedavg | options)
    for name, options in TORCH_VARIANTS.items():
        cells[f"variants/{name}/torch"] = Cell("classes", fedavg | options | {"kernels": "torch"})
    for name, options in CUTS.items():
        cells[f"cuts/{name}"] = Cell("classes", fedavg | options | {"partition": name})
    cells["data/tables"] = Cell("tables", fedavg)
    cells["data/digits"] = Cell("digits", {"method": "fedopt"})
    tiny = {"scale": 0.0003, "data_dir": "{folder}", "split": "public"}
    cells["data/generated"] = Cell("generated:yelp", fedavg | tiny)
    return cells


def process_cells() -> dict[str, Cell]:
    """Return runs of processes: commands, a kill and a resumption, a server and its silos."""
    cells = {
        "commands/flags": Cell("classes", COMMAND, "command"),
        "commands/run_file": Cell("labels", COMMAND, "run_file"),
        "commands/partition": Cell("classes", {"partition": "dirichlet"}, "partition"),
    }
    for name, options in KILLED.items():
        cells[f"killed/{name}"] = Cell("classes", SLOW | options, "killed")
    for name, options in SILO_RUNS.items():
        cells[f"silos/{name}"] = Cell("classes", {**options, "clients": 3}, "silos")
    several = {"method": "llcg", "kernels": "torch", "clients": 3}
    cells["killed/labels_llcg"] = Cell("labels", SLOW | several, "killed")
    cells["silos/labels_cagnet"] = Cell("labels", several | {"method": "cagnet"}, "silos")
    return cells


def all_cells() -> dict[str, Cell]:
    """Return the cells by name, in the order in which they run."""
    return method_cells() | variant_cells() | process_cells()


# --- fingerprints -------------------------------------------------------------------------------

# What does not repeat, or says where a run was and why it ended in words.
LEFT_OUT = {"seconds", "compile_seconds", "peak_memory_bytes", "result_dir", "dataset", "stopped"}


def digest(values: Any) -> str:
    """Return the SHA-256 of plain values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def canonical(value: Any) -> Any:
    """Return a number as a double, however it is written, and anything else as it is."""
    try:
        return float(value).hex()
    except (TypeError, ValueError):
        return value


def weights_of(folder: Path) -> dict[str, str] | None:
    """Return the hash of each tensor of the model, or None where the server has no model."""
    path = folder / "model.safetensors"
    if not path.exists():
        return None
    found = {}
    for name, tensor in load_file(path).items():
        about = f"{tensor.dtype} {tensor.shape} ".encode()
        found[name] = hashlib.sha256(about + tensor.tobytes()).hexdigest()
    return found


def unpacked(values: Any) -> list[Any]:
    """Return a ledger's list, which may be written as equal or consecutive numbers."""
    if isinstance(values, list):
        return values
    if "all" in values:
        return [values["all"]] * int(values["times"])
    return list(range(values["from"], values["from"] + values["times"]))


@dataclass(frozen=True)
class Call:
    """A record of the ledger: `facts` are round, step, kind and direction."""

    op: str
    facts: tuple[Any, ...]
    clients: list[int]
    bytes: list[int]
    flops: list[str]

    def named(self) -> list[Any]:
        """Return all of it."""
        return [self.op, *self.facts, self.clients, self.bytes, self.flops]

    def nameless(self) -> list[Any]:
        """Return it without the op's name, which is also a part of each message."""
        size = len(self.op.encode())
        return [*self.facts, self.clients, [b - size if b else 0 for b in self.bytes], self.flops]


def ledger_of(folder: Path) -> list[Call]:
    """Return the records of a run."""
    calls = []
    for line in (folder / "ledger.jsonl").read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        kind = found["what"] if "what" in found else found["kind"]
        clients, sizes, flops = (unpacked(found[name]) for name in ("clients", "bytes", "flops"))
        calls.append(
            Call(
                op=found["op"].replace(":", ".").rpartition(".")[2],
                facts=(found["round"], found["step"], kind, found["direction"]),
                clients=clients,
                bytes=sizes,
                flops=[canonical(value) for value in flops],
            )
        )
    return calls


def table_hashes(path: Path) -> dict[str, str]:
    """Return a hash for each column of a table."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = [name for name in (rows[0] if rows else ()) if name not in LEFT_OUT]
    return {
        f"{path.stem} {name}": digest([canonical(row[name]) for row in rows])[:16]
        for name in columns
    }


def leaf_hashes(values: Any, name: str) -> dict[str, str]:
    """Return a hash for each value of nested mappings, by its path."""
    if not isinstance(values, dict):
        plain = values if isinstance(values, list) else canonical(values)
        return {name: digest(plain)[:16]}
    found: dict[str, str] = {}
    for key, value in values.items():
        if key not in LEFT_OUT:
            found |= leaf_hashes(value, f"{name}.{key}")
    return found


def fingerprint(folder: Path) -> Print:
    """Return the fingerprint of a run that is over, from its result folder."""
    weights, calls = weights_of(folder), ledger_of(folder)
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return {
        "hashes": {
            "weights": digest(weights),
            "ledger": digest([call.named() for call in calls]),
            **table_hashes(folder / "rounds.csv"),
            **table_hashes(folder / "clients.csv"),
            **leaf_hashes(result, "result"),
        },
        "nameless": {
            "weights": digest(weights and sorted(weights.values())),
            "ledger": digest([call.nameless() for call in calls]),
        },
        "ops": dict(sorted(Counter(call.op for call in calls).items())),
        "figures": figures(result, calls),
    }


def figures(result: Mapping[str, Any], calls: Sequence[Call]) -> dict[str, Any]:
    """Return a few numbers for people."""
    views, metric = result.get("test", {}), result.get("metric", "accuracy")
    return {
        "test": {name: view[metric] for name, view in views.items() if view},
        "bytes": sum(sum(call.bytes) for call in calls),
        "records": len(calls),
        "best_round": result.get("best_round"),
        "stopped": result.get("stopped"),
    }


# --- ways to run a cell -------------------------------------------------------------------------

PATIENCE = 300.0  # seconds that any process may take
LISTENING = "listening on "


class CellError(Exception):
    """A cell could not be run, or two runs that have to be the same are not."""


@dataclass(frozen=True)
class Place:
    """Where a cell runs: a folder of its own, the graph's name or path, and the options."""

    folder: Path
    graph: str
    options: Options

    def flags(self, *leave_out: str) -> list[str]:
        """Return the options as flags of the command line."""
        words = []
        for name, value in self.options.items():
            flag = name.replace("_", "-")
            if name in leave_out:
                continue
            if name == "options":
                words += [word for key, v in value.items() for word in ("--option", f"{key}={v}")]
            elif isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                words += [f"--{flag}", str(value)]
        return words


def started(log: IO[bytes], *words: object) -> "subprocess.Popen[bytes]":
    """Start a command of silograph, on one thread; what it says goes to a file."""
    one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "silograph", *map(str, words)],
        env={**os.environ, **one},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
    )


def silograph(folder: Path, *words: object) -> str:
    """Run a command of silograph to its end and return what it said."""
    log = folder / f"{words[0]}.log"
    with log.open("wb") as file, ended(started(file, *words)) as process:
        code = process.wait(PATIENCE)
    said = log.read_text(encoding="utf-8")
    if code != 0:
        raise CellError(f"silograph {words[0]} exits with {code}: {said.strip()[-300:]}")
    return said


@contextmanager
def ended(*processes: "subprocess.Popen[bytes]") -> Iterator["subprocess.Popen[bytes]"]:
    """Give the first process; afterwards none of them is left."""
    try:
        yield processes[0]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def expect_same(first: Print, second: Print, keys: Sequence[str] | None = None) -> None:
    """Raise `CellError` unless two fingerprints have the same hashes."""
    one, other = first["hashes"], second["hashes"]
    names = sorted(one.keys() | other.keys()) if keys is None else keys
    unlike = [name for name in names if one.get(name) != other.get(name)]
    if unlike:
        raise CellError(f"two runs that have to be the same differ in {', '.join(unlike)}")


def called(place: Place) -> Print:
    """Run in this process."""
    out = place.folder / "called"
    sg.run(place.graph, out=str(out), **place.options)
    return fingerprint(out)


def command(place: Place) -> Print:
    """Run `silograph run`, and expect what `sg.run` gives."""
    out = place.folder / "out"
    silograph(place.folder, "run", place.graph, *place.flags(), "--out", out, "--quiet")
    found = fingerprint(out)
    expect_same(found, called(place))
    return found


def run_file(place: Place) -> Print:
    """Run once more from the run file of a result folder, and expect the same."""
    first, out = called(place), place.folder / "out"
    file = place.folder / "called" / "config.toml"
    silograph(place.folder, "run", "--config", file, "--out", out, "--quiet")
    found = fingerprint(out)
    expect_same(found, first)
    return found


def partition(place: Place) -> Print:
    """Hash what `silograph partition` says of a cut."""
    leave = ("rounds", "hidden", "local_epochs", "threads")
    said = silograph(place.folder, "partition", place.graph, *place.flags(*leave), "--json")
    lines = [line for line in said.splitlines() if line.startswith("{")]
    values = json.loads(lines[-1] if lines else said)
    figures = {name: values[name] for name in ("partition_hash",) if name in values}
    return {"hashes": leaf_hashes(values, "cut"), "nameless": {}, "ops": {}, "figures": figures}


def rows_in(path: Path) -> int:
    """Return the number of whole rows in a table of rounds that may be growing."""
    return path.read_bytes().count(b"\n") - 1 if path.exists() else 0


def kill_midway(place: Place, out: Path) -> int:
    """Start a run, kill it after its second round, and return the rounds that it has written."""
    words = ("run", place.graph, *place.flags(), "--out", out, "--quiet")
    with (place.folder / "killed.log").open("wb") as log, ended(started(log, *words)) as process:
        until = time.monotonic() + PATIENCE
        while rows_in(out / "rounds.csv") < 2 and process.poll() is None:
            if time.monotonic() > until:
                raise CellError("the run to be killed takes too long")
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    said = (place.folder / "killed.log").read_text(encoding="utf-8")
    if process.returncode != -signal.SIGKILL:
        raise CellError(f"the run to be killed ended by itself: {said.strip()[-300:]}")
    return rows_in(out / "rounds.csv")


def killed(place: Place) -> Print:
    """Kill a run in the middle and resume it, and expect what the uninterrupted run gives."""
    out = place.folder / "out"
    done = kill_midway(place, out)
    if (out / "result.json").exists() or done >= place.options["rounds"]:
        raise CellError(f"the run was over before it was killed, after {done} rounds")
    silograph(place.folder, "resume", out, "--quiet")
    found = fingerprint(out)
    expect_same(found, called(place))
    return found


def address_in(log: Path, server: "subprocess.Popen[bytes]") -> str:
    """Return where a server listens, once it says so."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        said = log.read_text(encoding="utf-8")
        address = said.partition(LISTENING)[2]
        if "\n" in address:  # the whole line
            return address.split()[0]
        if server.poll() is not None:
            break
        time.sleep(0.02)
    raise CellError(f"the server does not listen: {log.read_text(encoding='utf-8').strip()[-300:]}")


def federate(place: Place, folders: Sequence[Path], out: Path) -> None:
    """Run a server and a process for each silo, until all have ended."""
    logs = [place.folder / f"{path.name}.log" for path in folders]
    words = ("server", *place.flags(), "--listen", "127.0.0.1:0")
    with (
        (place.folder / "server.log").open("wb") as log,
        ended(started(log, *words, "--insecure", "--out", out, "--quiet", "--wait", 120)) as server,
    ):
        address = address_in(place.folder / "server.log", server)
        members = []
        for path, each in zip(folders, logs, strict=True):
            with each.open("wb") as file:
                here = ("--server", address, "--insecure", "--data", path, "--wait", 120)
                members.append(started(file, "silo", *here, *allowed()))
        with ended(*members):
            codes = [process.wait(PATIENCE) for process in (server, *members)]
    if any(codes):
        said = [path.read_text(encoding="utf-8").strip()[-200:] for path in (Path(log.name), *logs)]
        raise CellError(f"server and silos exit with {codes}: {said}")


@cache
def allowed() -> tuple[str, ...]:
    """Return what allows all methods at a silo; before it was asked for, nothing."""
    command = [sys.executable, "-m", "silograph", "silo", "--help"]
    help_text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = "label_guided,bns,cagnet,collect,fedais,fedgraph"
    if "features" in help_text:  # of --weight-rows used, whose replies have rows
        names += ",fedavg,features"
    return ("--allow", names) if "--allow" in help_text else ()


def silos(place: Place) -> Print:
    """Run a server and three silo processes, and expect weights and ledger of a simulation."""
    folder, out = place.folder / "folders", place.folder / "out"
    clients = place.options["clients"]
    silograph(
        place.folder,
        *("export-silos", place.graph, "--clients", clients, "--out", folder, "--format", "npz"),
    )
    federate(place, sorted(path for path in folder.iterdir() if path.is_dir()), out)
    found = fingerprint(out)
    # A server of real silos asks for counts of at least five nodes, a simulation for any.
    own = {"block_size": 1, "evaluation_min_count": 5}
    simulated = called(Place(place.folder, place.graph, place.options | own))
    expect_same(found, simulated, ("weights", "ledger"))
    return found


WAYS: dict[str, Callable[[Place], Print]] = {
    "called": called,
    "command": command,
    "run_file": run_file,
    "partition": partition,
    "killed": killed,
    "silos": silos,
}


# --- commands -----------------------------------------------------------------------------------


def graph_at(folder: Path, name: str) -> str:
    """Return the path of a graph that was drawn here, or the name of a dataset."""
    for path in (folder / f"{name}.npz", folder / name):
        if path.exists():
            return str(path)
    return name


def run_cell(cell: Cell, graphs: Path) -> Print:
    """Run a cell in a folder of its own, which is removed afterwards."""
    options = {
        name: value.format(folder=graphs) if isinstance(value, str) else value
        for name, value in (BASE | cell.options).items()
        if value is not None
    }
    place = Place(Path(tempfile.mkdtemp(dir=graphs)), graph_at(graphs, cell.graph), options)
    try:
        return WAYS[cell.way](place)
    finally:
        shutil.rmtree(place.folder)


def read_prints(path: Path) -> dict[str, Print]:
    """Return the lines of a file by cell."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines]
    return {line.pop("cell"): line for line in found}


def wanted_cells(out: Path, pattern: str) -> dict[str, Cell]:
    """Return the cells that match and are not in the file."""
    done = read_prints(out)
    return {n: c for n, c in all_cells().items() if fnmatchcase(n, pattern) and n not in done}


def is_compiled(cell: Cell) -> bool:
    """Whether a cell may use compiled kernels."""
    return cell.way != "partition" and cell.options.get("kernels") != "torch"


def compile_kernels(out: Path, pattern: str) -> None:
    """Run the cells of `run` that have compiled kernels, for what numba keeps of them only."""
    with tempfile.TemporaryDirectory(prefix="fingerprint-") as name:
        graphs = Path(name)
        write_graphs(graphs)
        for cell in filter(is_compiled, wanted_cells(out, pattern).values()):
            with suppress(Exception):  # `run` will say it
                run_cell(cell, graphs)


def run(out: Path, pattern: str) -> int:
    """Run the cells that match and are not in the file, and return how many failed."""
    wanted = wanted_cells(out, pattern)
    if any(map(is_compiled, wanted.values())):
        print("compiling kernels, where that is not done", file=sys.stderr, flush=True)
        words = ("compile", "--out", str(out), "--cells", pattern)
        subprocess.run([sys.executable, __file__, *words], check=True)
    print(f"{len(wanted)} cells with {Path(sg.__file__).parent}", file=sys.stderr, flush=True)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="fingerprint-") as name:
        graphs = Path(name)
        write_graphs(graphs)
        for number, (cell, about) in enumerate(wanted.items(), 1):
            begun, said = time.monotonic(), "ok"
            try:
                line = json.dumps({"cell": cell, **run_cell(about, graphs)}) + "\n"
                with out.open("a", encoding="utf-8") as file:
                    file.write(line)
            except Exception as error:  # others are run all the same
                failed, said = failed + 1, f"FAILED, {type(error).__name__}: {error}"
            seconds = time.monotonic() - begun
            told = f"[{number}/{len(wanted)}] {cell} {seconds:.1f} s {said}"
            print(told, file=sys.stderr, flush=True)
    return failed


def new_names(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """Return names that only `before` has, with one of the same hash that only `after` has."""
    free = {name: value for name, value in after.items() if name not in before}
    found = {}
    for name, value in before.items():
        match = next((n for n, v in free.items() if v == value), None)
        if name not in after and match is not None:
            found[name] = match
            del free[match]
    return found


def renamed(name: str, before: Print, after: Print) -> bool:
    """Whether a hash differs by names only: sizes of messages follow from the names of ops."""
    old, new = before["nameless"], after["nameless"]
    key = "ledger" if "bytes" in name else name
    return key in old and old[key] == new.get(key)


def ops_changed(before: Print, after: Print) -> str:
    """Return which ops only one of two runs has called, in words."""
    old, new = before["ops"], after["ops"]
    lost, got = ([op for op in a if op not in b] for a, b in ((old, new), (new, old)))
    return f" (ops {', '.join(lost)} -> {', '.join(got)})" if lost or got else ""


def differences(before: Print, after: Print) -> Iterator[tuple[str, str]]:
    """Yield how a cell differs: `renamed`, `new`, `differs` or `gone`, and what."""
    old, new = before["hashes"], after["hashes"]
    names = new_names(old, new)
    for name, value in old.items():
        if name in names:
            yield "renamed", f"{name} -> {names[name]}"
        elif name not in new:
            yield "gone", name
        elif value != new[name]:
            more = ops_changed(before, after) if name == "ledger" else ""
            yield ("renamed" if renamed(name, before, after) else "differs"), name + more
    yield from (("new", name) for name in new if name not in {*old, *names.values()})


def compared(before: Path, after: Path, *, allow_names: bool) -> int:
    """Print how two files differ, and return how many cells do."""
    old, new = read_prints(before), read_prints(after)
    fine = {"renamed", "new"} if allow_names else set()
    unlike, names = 0, Counter[tuple[str, str]]()
    for cell in dict.fromkeys([*old, *new]):
        found = [("gone" if cell in old else "added", "the cell is in one file only")]
        if cell in old and cell in new:
            found = list(differences(old[cell], new[cell]))
        names.update(each for each in found if each[0] in fine)
        found = [each for each in found if each[0] not in fine]
        unlike += bool(found)
        show(cell, found, old.get(cell), new.get(cell))
    for (how, what), number in names.items():
        print(f"{how} in {number} cells: {what}")
    print(f"{len(old)} cells before, {len(new)} after, {unlike} differ")
    return unlike


def show(
    cell: str, found: Sequence[tuple[str, str]], before: Print | None, after: Print | None
) -> None:
    """Print the differences of a cell, one line for each way of differing."""
    if not found:
        return
    print(cell)
    for how in dict.fromkeys(how for how, _ in found):
        print(f"  {how}: {', '.join(what for h, what in found if h == how)}")
    if before and after and before["figures"] != after["figures"]:
        print(f"  before {before['figures']}")
        print(f"  after  {after['figures']}")


def parse() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="run cells and write their fingerprints")
    one.add_argument("--out", type=Path, required=True, help="file of JSON lines")
    one.add_argument("--cells", default="*", help="pattern of names, such as 'silos/*'")
    two = commands.add_parser("compare", help="print what differs; 1 if anything does")
    two.add_argument("before", type=Path)
    two.add_argument("after", type=Path)
    two.add_argument("--allow-names", action="store_true", help="new names are no difference")
    four = commands.add_parser("compile", help="what `run` does first, in a process of its own")
    four.add_argument("--out", type=Path, required=True, help="file of JSON lines")
    four.add_argument("--cells", default="*", help="pattern of names, such as 'silos/*'")
    three = commands.add_parser("list", help="print the names of the cells")
    three.add_argument("--cells", default="*", help="pattern of names, such as 'silos/*'")
    return parser.parse_args()


def main() -> None:
    """Do what the command line says."""
    given = parse()
    if given.command == "list":
        print(*(name for name in all_cells() if fnmatchcase(name, given.cells)), sep="\n")
    elif given.command == "compile":
        compile_kernels(given.out, given.cells)
    elif given.command == "run":
        sys.exit(min(1, run(given.out, given.cells)))
    else:
        unlike = compared(given.before, given.after, allow_names=given.allow_names)
        sys.exit(min(1, unlike))


if __name__ == "__main__":
    main()
