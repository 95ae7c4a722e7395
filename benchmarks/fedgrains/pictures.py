"""What personalized methods do, in pictures: likeness, clusters, chosen neighbors, sweeps.

    python benchmarks/fedgrains/pictures.py --data-dir ../shared/data

runs what `pictures.jsonl` does not hold yet, and draws; it can be stopped and continued at any
time. The protocol is that of tables 1 and 2 (`personal_cells.py`), on Cora with 10 clients.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from personal_cells import BATCH, CHOICE, METHODS, PROTOCOL
from pictures_chart import pictures
from torch import Tensor
from torch.nn.functional import normalize

import silograph as sg
from silograph.core.config import make_config
from silograph.core.key import Key
from silograph.core.payload import fields_under, offsets, tensors_under
from silograph.experiment.run.setup import Setup, prepare
from silograph.graph.block.block import ClientBlock, make_block
from silograph.graph.datasets import load
from silograph.graph.graph import Graph
from silograph.methods.fedpub import cosines, embedding_of, mixing_weights
from silograph.nn.mini_batches import Reached, edges_of
from silograph.sampling.fedgrains import FedGrains

sys.path.append(str(Path(__file__).parents[1] / "speed"))
from side import Ours

HERE = Path(__file__).parent
LINES, PAGE = HERE / "pictures.jsonl", HERE / "pictures.md"
CLIENTS, ROUNDS, SEEDS, DRAWS = 10, 100, (0, 1, 2), 20
SWEPT = (0, 1)  # seeds of the sweeps
SWEEPS: dict[str, tuple[float, ...]] = {
    "k": (8, 16, 32, 64, 128),
    "alpha": (1e2, 1e3, 1e4, 1e5, 1e6),
}
Row = dict[str, Any]


def options(partition: str, seed: int, **own: Any) -> dict[str, Any]:
    """Return the options of a run."""
    cut = {"clients": CLIENTS, "partition": partition, "seed": seed}
    return {"dataset": "cora", "rounds": ROUNDS, "local_epochs": 1, **PROTOCOL, **cut, **own}


def begun(graph: Graph, partition: str, seed: int, **own: Any) -> Ours:
    """Return a run before its first round, with all clients in one block."""
    config = make_config({**options(partition, seed, **own), "block_size": CLIENTS})
    return Ours(prepare(config, graph))


def block_of(setup: Setup) -> ClientBlock:
    """Return the clients of a run."""
    cut = setup.cut
    return make_block(cut.graph, cut.partition, cut.split, torch.float32)[0]


def similarity(graph: Graph, partition: str) -> Row:
    """Train FED-PUB; return cosines of embeddings and shares beside what the clients hold."""
    run = begun(graph, partition, 0, **METHODS["fedpub"])
    for _ in range(ROUNDS):
        run.round()
    setup, cfg = run.setup, run.setup.method_config
    block, state = block_of(setup), setup.federation.states()[0]
    everyone = torch.ones(CLIENTS, dtype=torch.bool)
    alike = cosines(embedding_of(cfg, block, tensors_under("weights", state)), everyone)
    count = torch.zeros(CLIENTS, graph.num_classes).double()
    count.index_put_((block.client, block.y), torch.ones(len(block.y)).double(), accumulate=True)
    labels = normalize(count, dim=1)
    return {
        "cosine": rounded(alike),
        "share": rounded(mixing_weights(alike, everyone, cfg.options.scale)),
        "labels": rounded(labels @ labels.T),
        "edges": cut_edges(setup),
    }


def cut_edges(setup: Setup) -> list[list[int]]:
    """Return the edges of the graph between the nodes of each two clients, 0 with themselves."""
    cut = setup.cut
    adj = cut.graph.adj
    held = torch.zeros(CLIENTS, adj.num_rows)
    for client, nodes in enumerate(cut.partition.nodes):
        held[client, nodes] = 1
    between = held @ torch.from_numpy(adj.scipy() @ held.numpy().T)
    return between.fill_diagonal_(0).long().tolist()


def rounded(t: Tensor) -> list[list[float]]:
    """Return a matrix for a line."""
    return [[round(value, 4) for value in row] for row in t.tolist()]


def clusters(graph: Graph, partition: str) -> Row:
    """Train GCFL+; return every client's cluster after each round in which one was split."""
    run = begun(graph, partition, 0, **METHODS["gcflplus"])
    found: list[Any] = []
    for number in range(1, ROUNDS + 1):
        run.round()
        now = run.snapshot.state.memory["cluster"].tolist()
        if not found or found[-1][1] != now:
            found.append([number, now])
    return {"splits": found}


def chosen(graph: Graph, policy: str, seed: int) -> Row:
    """Train FedGrAINS; return how many edges between seeds and candidates join equal classes."""
    choice = {**CHOICE, "neighbors.policy": policy}
    flow = {"batch_size": BATCH, "neighbors": "fedgrains", "options": choice}
    run = begun(graph, "metis", seed, method="fedavg", **flow)
    for _ in range(ROUNDS):
        run.round()
    state = fields_under("neighbors", run.setup.federation.states()[0])
    sampler, block = run.setup.method_config.schedule.neighbors, block_of(run.setup)
    assert isinstance(sampler, FedGrains)
    count = torch.zeros(2, 2, CLIENTS, dtype=torch.int64)  # all or chosen; all or equal classes
    for number in range(DRAWS):
        key = Key.of(seed).fold("picture", number)
        reached = seeds_of(block, key)
        every = edges_of(block, reached.rows)
        drawn = sampler.draw(block, reached, 0, key, state)
        for place, edges in enumerate((every, drawn)):
            to, neighbor = reached.rows[edges.position], edges.neighbor
            new = ~torch.isin(neighbor, reached.rows)
            same = block.y[to] == block.y[neighbor]
            for kind, which in enumerate((new, new & same)):
                count[place, kind] += torch.bincount(block.client[to[which]], minlength=CLIENTS)
    (all_new, all_same), (kept, kept_same) = count.tolist()
    return {"edges": all_new, "same": all_same, "kept": kept, "kept_same": kept_same}


def seeds_of(block: ClientBlock, key: Key) -> Reached:
    """Return a batch of each client, drawn from its training nodes."""
    rows = []
    for client in range(block.num_clients):
        own = ((block.client == client) & block.split.train).nonzero()[:, 0]
        order = key.fold("seeds").uniform(block.row_key[own])[:, 0].argsort()
        rows.append(own[order[:BATCH]].sort().values)
    off = offsets(torch.tensor([len(part) for part in rows]))
    seeds = torch.cat(rows)
    return Reached(seeds, torch.zeros_like(seeds), torch.arange(block.num_clients), off)


def swept(graph: Graph, name: str, value: float, policy: str, seed: int) -> Row:
    """Run FedAvg with FedGrAINS; return the test accuracy in percent, mean over clients."""
    own = int(value) if name == "k" else value
    choice = {**CHOICE, "neighbors.policy": policy, f"neighbors.{name}": own}
    flow = {"batch_size": BATCH, "neighbors": "fedgrains", "options": choice}
    given = options("metis", seed, method="fedavg", **flow)
    result = sg.run(graph, **{k: v for k, v in given.items() if k != "dataset"})
    found = {}
    for view, scores in (
        ("server", result.test.server),
        ("personalized", result.test.personalized),
    ):
        assert scores is not None  # FedAvg has both views
        assert scores.accuracy_client_mean is not None  # of a simulation
        found[view] = 100 * scores.accuracy_client_mean
    return found


def cells(graph: Graph) -> Iterator[tuple[str, Any]]:
    """Yield all cells by name, the cheap ones first."""
    for partition in ("metis", "metis_overlapping"):
        yield f"similarity {partition}", partial(similarity, graph, partition)
        yield f"clusters {partition}", partial(clusters, graph, partition)
    for seed in SEEDS:
        for policy in ("trained", "untrained"):
            yield f"chosen {policy} {seed}", partial(chosen, graph, policy, seed)
    for seed, (name, values) in product(SWEPT, SWEEPS.items()):
        for value, policy in product(values, ("trained", "uniform")):
            if name == "k" or policy == "trained":
                cell = partial(swept, graph, name, value, policy, seed)
                yield f"sweep {name} {value:g} {policy} {seed}", cell


def main() -> None:
    """Run what is missing; draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", help="folder in which graphs are looked for first")
    parser.add_argument("--draw", action="store_true", help="only draw what is there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = LINES.read_text().splitlines() if LINES.exists() else []
    found = {row["cell"]: row for row in map(json.loads, lines)}
    graph = None if given.draw else load("cora", data_dir=given.data_dir)
    for name, cell in cells(graph) if graph is not None else ():
        if name not in found:
            found[name] = {"cell": name, **cell()}
            with LINES.open("a") as file:
                file.write(json.dumps(found[name]) + "\n")
            print(name, flush=True)
    for name, text in pictures(found).items():
        (HERE / name).write_text(text)


if __name__ == "__main__":
    main()
