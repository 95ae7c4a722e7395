"""FedAIS as a plain loop over torch_geometric models: what silograph's speed is compared with.

    python benchmarks/fedais/fedais_loop.py --data-dir DIR [--clients 100,1000] [--rounds 2]

`Loop` is what a user writes: a `SAGEConv` model and torch's Adam for each client, and for each
client a dictionary with the last known row of each of its own nodes and of its halo. `tensors`
and `fused` are what a user makes of it who profiles it: histories as one matrix for each client,
and torch's fused Adam. Neighbors are drawn from Python's lists, which for batches of some ten rows
is faster than tensors are. Both do the work of `silograph run --method fedais` without scores: a
pass over all own nodes for losses and rows, nodes drawn by importance, exchanges before every
second batch in which owners work the rows out anew, steps, and a plain mean of models.

Each side's rounds take turns in one process on one thread; seconds are of the CPU.

n: rows of a client. F: features. H: width of the first layer.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch_geometric.nn import SAGEConv

from silograph.graph.block.block import ClientBlock, Route, SparseRows, make_block
from silograph.nn.conv import Params
from silograph.nn.stored_rows import surroundings

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "speed")]

# Our names of weights and those of the model's state dict, which holds the transpose of matrices.
NAMES = {
    "0.weight": "first.lin_l.weight",
    "0.root": "first.lin_r.weight",
    "0.bias": "first.lin_l.bias",
    "1.weight": "second.lin_l.weight",
    "1.root": "second.lin_r.weight",
    "1.bias": "second.lin_l.bias",
    "2.weight": "head.weight",
    "2.bias": "head.bias",
}


@dataclass(frozen=True)
class Rules:
    """The options of FedAIS that the loop has.

    Attributes:
        batches: of a round.
        tau: batches between two exchanges.
        ratio: share of training nodes that is drawn in a round; 1: all, in any order.
        drawn: neighbors drawn for a node; 0: all.
        floor: share of the probability that all nodes have alike.
        rate: of Adam.
        decay: weight decay.
        tensors: histories as matrices, not as dictionaries.
        fused: torch's fused Adam.
    """

    batches: int = 10
    tau: int = 2
    ratio: float = 0.7
    drawn: int = 10
    floor: float = 0.1
    rate: float = 1e-3
    decay: float = 1e-3
    tensors: bool = False
    fused: bool = False


class Net(torch.nn.Module):
    """Two GraphSAGE layers and a linear classifier."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.first = SAGEConv(widths[0], widths[1])
        self.second = SAGEConv(widths[1], widths[2])
        self.head = torch.nn.Linear(widths[2], widths[3])


class Dictionary:
    """The last known rows, by node."""

    def __init__(self) -> None:
        self.rows: dict[int, Tensor] = {}

    def known(self, nodes: Iterable[int]) -> list[int]:
        """Return those nodes of which a row is there."""
        return [node for node in nodes if node in self.rows]

    def get(self, nodes: Sequence[int]) -> Tensor:
        """Return rows of nodes, (k, H)."""
        return torch.stack([self.rows[node] for node in nodes])

    def put(self, nodes: Sequence[int], rows: Tensor) -> None:
        """Keep rows (k, H) of nodes."""
        self.rows.update(zip(nodes, rows.unbind(), strict=True))


class Matrix:
    """The same as one matrix, with the place of each node."""

    def __init__(self, nodes: Sequence[int], width: int, dtype: torch.dtype) -> None:
        self.place = {node: place for place, node in enumerate(nodes)}
        self.rows = torch.zeros(len(nodes), width, dtype=dtype)
        self.there: set[int] = set()

    def known(self, nodes: Iterable[int]) -> list[int]:
        """Return those nodes of which a row is there."""
        return [node for node in nodes if node in self.there]

    def get(self, nodes: Sequence[int]) -> Tensor:
        """Return rows of nodes, (k, H)."""
        return self.rows[[self.place[node] for node in nodes]]

    def put(self, nodes: Sequence[int], rows: Tensor) -> None:
        """Keep rows (k, H) of nodes."""
        self.rows[[self.place[node] for node in nodes]] = rows
        self.there.update(nodes)


@dataclass(eq=False)
class Client:
    """A client's data, and what it keeps.

    Attributes:
        x: (n, F).
        y: (n,).
        nodes: of its rows, as the whole graph counts.
        row: of its nodes.
        train: rows that train.
        inside: of each row, the neighbors here, as rows.
        around: of each row, all neighbors, as nodes.
        history: last known rows.
        losses: of training rows when last worked out; None before its first round.
    """

    x: Tensor
    y: Tensor
    nodes: list[int]
    row: dict[int, int]
    train: list[int]
    inside: list[list[int]]
    around: list[list[int]]
    history: Dictionary | Matrix
    losses: Tensor | None = None
    model: Net = field(init=False)
    adam: torch.optim.Optimizer = field(init=False)


def clients_of(block: ClientBlock, route: Route, width: int, *, tensors: bool) -> list[Client]:
    """Return the clients of a block, with dense features and lists of neighbors."""
    held = block.x
    x = torch.from_numpy(held.csr.scipy().toarray()) if isinstance(held, SparseRows) else held
    around = surroundings(block)
    slots = block.halo.boundary[route.target].tolist()
    names = [
        row if row >= 0 else slots[slot]
        for row, slot in zip(around.row.tolist(), around.slot.tolist(), strict=True)
    ]
    start, sender = around.graph.adj.indptr.tolist(), around.graph.adj.indices.tolist()
    places, off, clients = around.place.tolist(), block.off.tolist(), []
    for first, last in pairwise(off):
        nodes = list(range(first, last))
        lists = [[names[s] for s in sender[start[p] : start[p + 1]]] for p in places[first:last]]
        seen = list(dict.fromkeys([*nodes, *(node for near in lists for node in near)]))
        history = Matrix(seen, width, x.dtype) if tensors else Dictionary()
        clients.append(
            Client(
                x=x[first:last].clone(),
                y=block.y[first:last],
                nodes=nodes,
                row={node: row for row, node in enumerate(nodes)},
                train=block.split.train[first:last].nonzero()[:, 0].tolist(),
                inside=[[n - first for n in near if first <= n < last] for near in lists],
                around=lists,
                history=history,
            )
        )
    return clients


class Loop:
    """FedAIS, client after client.

    Args:
        block: the clients.
        route: who owns which slot.
        weights: the first ones, in silograph's form.
        rules: the options.
        seed: of draws.
    """

    def __init__(
        self, block: ClientBlock, route: Route, weights: Params, rules: Rules, seed: int = 0
    ) -> None:
        self.rules, self.draws = rules, random.Random(seed)
        widths = [*weights["0.weight"].shape, *weights["2.weight"].shape]
        self.clients = clients_of(block, route, widths[1], tensors=rules.tensors)
        self.state = {
            NAMES[name]: w.T.contiguous() if w.ndim == 2 else w.clone()
            for name, w in weights.items()
        }
        self.owner = {node: client for client in self.clients for node in client.nodes}
        for client in self.clients:
            client.model = Net(widths).to(client.x.dtype)

    @property
    def weights(self) -> Params:
        """The averaged model, in silograph's form."""
        back = {theirs: ours for ours, theirs in NAMES.items()}
        return {back[n]: w.T.contiguous() if w.ndim == 2 else w for n, w in self.state.items()}

    def round(self) -> None:
        """Train every client, with exchanges in between, and average."""
        rules, batches = self.rules, [self._open(client) for client in self.clients]
        for number in range(rules.batches):
            drawn = [
                [(row, self._some(client.around[row])) for row in rows[number]]
                for client, rows in zip(self.clients, batches, strict=True)
            ]
            if number % rules.tau == 0:
                self._exchange(drawn)
            for client, rows in zip(self.clients, drawn, strict=True):
                if rows:
                    self._step(client, rows)
        mean = {name: torch.zeros_like(w) for name, w in self.state.items()}
        for client in self.clients:
            for name, w in client.model.state_dict().items():
                mean[name] += w / len(self.clients)
            del client.adam
        self.state = mean

    def _open(self, client: Client) -> list[list[int]]:
        """Take the weights, work out losses and rows, and draw nodes, as batches of rows."""
        rules = self.rules
        client.model.load_state_dict(self.state)
        client.adam = torch.optim.Adam(
            client.model.parameters(), lr=rules.rate, weight_decay=rules.decay, fused=rules.fused
        )
        every = range(len(client.nodes))
        with torch.no_grad():
            h = self._first(client, every, client.inside)
            client.history.put(client.nodes, h)
            logits = self._logits(client, every, h, client.around)
            losses = F.cross_entropy(logits[client.train], client.y[client.train], reduction="none")
        count = max(1, round(rules.ratio * len(client.train)))
        if rules.ratio == 1 or not client.train:
            rows = self.draws.sample(client.train, len(client.train))
        elif client.losses is None:
            rows = self.draws.sample(client.train, count)
        else:
            change = (losses - client.losses).abs() + 1e-30
            p = (1 - rules.floor) * change / change.sum() + rules.floor / len(change)
            rows = [client.train[i] for i in torch.multinomial(p, count).tolist()]
            self.draws.shuffle(rows)  # the most important nodes would be in the first batch
        client.losses = losses
        return [rows[number :: rules.batches] for number in range(rules.batches)]

    def _some(self, near: list[int]) -> list[int]:
        """Return neighbors drawn among all."""
        drawn = self.rules.drawn
        return near if not drawn or len(near) <= drawn else self.draws.sample(near, drawn)

    def _exchange(self, drawn: Sequence[Sequence[tuple[int, list[int]]]]) -> None:
        """Fetch what the next batches have drawn; each owner works rows out once."""
        asked: dict[int, dict[int, None]] = {}
        for number, (client, rows) in enumerate(zip(self.clients, drawn, strict=True)):
            named = (node for _, near in rows for node in near if node not in client.row)
            asked[number] = dict.fromkeys(named)
        wanted: dict[int, tuple[Client, dict[int, None]]] = {}
        for nodes in asked.values():
            for node in nodes:
                owner = self.owner[node]
                wanted.setdefault(id(owner), (owner, {}))[1][node] = None
        for owner, nodes in wanted.values():
            asked_rows = [owner.row[node] for node in nodes]
            with torch.no_grad():
                h = self._first(owner, asked_rows, [owner.inside[row] for row in asked_rows])
            owner.history.put(list(nodes), h)
        for number, nodes in asked.items():
            by_owner: dict[int, list[int]] = {}
            for node in nodes:
                by_owner.setdefault(id(self.owner[node]), []).append(node)
            for theirs in by_owner.values():
                rows_of = self.owner[theirs[0]].history.get(theirs)
                self.clients[number].history.put(theirs, rows_of)

    def _step(self, client: Client, drawn: Sequence[tuple[int, list[int]]]) -> None:
        rows = [row for row, _ in drawn]
        client.adam.zero_grad()
        h = self._first(client, rows, [self._some(client.inside[row]) for row in rows])
        logits = self._logits(client, rows, h, [near for _, near in drawn])
        F.cross_entropy(logits, client.y[rows]).backward()
        client.adam.step()
        client.history.put([client.nodes[row] for row in rows], h.detach())

    def _first(
        self, client: Client, rows: Sequence[int], inside: Sequence[Sequence[int]]
    ) -> Tensor:
        """Return the first layer of some rows, (b, H)."""
        place = {row: at for at, row in enumerate(rows)}
        for near in inside:
            for row in near:
                place.setdefault(row, len(place))
        x = client.x[list(place)]
        out = client.model.first((x, x[: len(rows)]), edges_of(inside, place))
        return F.relu(out)

    def _logits(
        self, client: Client, rows: Sequence[int], h: Tensor, around: Sequence[Sequence[int]]
    ) -> Tensor:
        """Return logits of rows: fresh among themselves, all other neighbors as stored."""
        place = {client.nodes[row]: at for at, row in enumerate(rows)}
        other = client.history.known(
            dict.fromkeys(node for near in around for node in near if node not in place)
        )
        place |= {node: len(rows) + at for at, node in enumerate(other)}
        senders = torch.cat([h, client.history.get(other)]) if other else h
        edges = edges_of([[n for n in near if n in place] for near in around], place)
        out: Tensor = client.model.head(F.relu(client.model.second((senders, h), edges)))
        return out


def edges_of(near: Sequence[Sequence[int]], place: dict[int, int]) -> Tensor:
    """Return `edge_index` (2, e) of receivers' neighbors."""
    sender = [place[name] for names in near for name in names]
    receiver = [at for at, names in enumerate(near) for _ in names]
    return torch.tensor([sender, receiver], dtype=torch.int64)


def seconds_of(act: Callable[[], object]) -> float:
    """Return CPU seconds of a call."""
    begun = time.process_time()
    act()
    return time.process_time() - begun


def one(dataset: str, data_dir: str, clients: int, rounds: int) -> dict[str, float]:
    """Return CPU seconds of a round of each side: means, after one round that warms up."""
    from fedais_cells import Place, cell_of
    from side import Ours

    from silograph.core.config import make_config
    from silograph.experiment.run.setup import prepare
    from silograph.graph.datasets import load

    torch.set_num_threads(1)
    asked = cell_of(Place(dataset, clients=clients), "fedais", 1).config
    asked = make_config({**vars(asked), "data_dir": data_dir})
    setup = prepare(asked, load(dataset, data_dir=data_dir))
    ours = Ours(setup)
    cut = setup.cut
    block, route = make_block(cut.graph, cut.partition, cut.split, torch.float32)
    spent: dict[str, list[float]] = {"silograph": []}
    for name, rules in {"dictionary": Rules(), "tuned": Rules(tensors=True, fused=True)}.items():
        loop, spent[name] = Loop(block, route, ours.weights, rules), []  # one at a time, for memory
        for number in range(1 + rounds):
            for side, act in (("silograph", ours.train), (name, loop.round)):
                seconds = seconds_of(act)
                if number:
                    spent[side].append(seconds)
        del loop, act
    return {name: statistics.mean(values) for name, values in spent.items()}


def main() -> None:
    """Run all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--dataset", default="pubmed")
    parser.add_argument("--clients", default="100,1000")
    parser.add_argument("--rounds", type=int, default=2, help="measured rounds of each side")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(one(asked.dataset, asked.data_dir, int(asked.clients), asked.rounds)))
        return
    print("| clients | side | CPU s of a round | over silograph |")
    print("| --- | --- | --- | --- |")
    for clients in asked.clients.split(","):
        command = [sys.executable, __file__, "--data-dir", asked.data_dir, "--one"]
        command += ["--dataset", asked.dataset, "--clients", clients, "--rounds", str(asked.rounds)]
        one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=one_thread, stdout=subprocess.PIPE, check=True)
        got = json.loads(done.stdout.splitlines()[-1])
        for side, spent in got.items():
            ratio = spent / got["silograph"]
            print(f"| {clients} | {side} | {spent:.2f} | {ratio:.1f} |", flush=True)


if __name__ == "__main__":
    main()
