"""FedAIS beside a loop over clients and nodes that is written from the paper, with nothing shared.

It has dictionaries of rows, Python's numbers and torch's gradients alone; of the library it takes
the random words of a node. Every neighbor is read (`drawn=0`), so that edges are not drawn.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.federation.in_process import InProcess
from silograph.graph.block.block import ClientBlock, Route
from silograph.graph.graph import Graph
from silograph.methods.base import MethodConfig, RoundReport
from silograph.methods.fedais import FEDAIS, FedAISOptions
from silograph.nn.fit import Schedule
from silograph.nn.optim import SGD
from together import cut_of, model_of

MakeGraph = Callable[..., Graph]
KEY = Key.of(5)
RATE, CLIENTS, LAYERS = 0.3, 5, 3
# Who takes part in each round; the last client never does, so nothing of it is ever known.
PARTS = ((0, 1, 2), (0, 3), (1, 2, 3), (0, 2), (0, 1, 3), (0, 1, 2, 3))
Rows = dict[int, Tensor]


@dataclass
class Node:
    """A client's own node.

    Attributes:
        x: features.
        y: class.
        trains: whether it is a training node.
        key: of its draws.
        near: own neighbors, as its client numbers them.
        slots: neighbors of other clients, as owner and number there.
    """

    x: Tensor
    y: int
    trains: bool
    key: int
    near: list[int]
    slots: list[tuple[int, int]]


@dataclass
class Client:
    """A client: nodes, what is stored of them and of its halo, and what it remembers."""

    nodes: list[Node]
    own: dict[int, Rows] = field(default_factory=lambda: {n: {} for n in range(1, LAYERS)})
    halo: dict[tuple[int, int], Rows] = field(default_factory=dict)
    seen: dict[tuple[int, int], int] = field(default_factory=dict)
    last: dict[int, float] = field(default_factory=dict)
    passes: int = 0
    weights: dict[str, Tensor] | None = None
    drawn: list[int] = field(default_factory=list)
    share: dict[int, float] = field(default_factory=dict)
    asked: set[tuple[int, int]] = field(default_factory=set)
    readable: set[tuple[int, int]] | None = None
    told: list[float] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)


def clients_of(block: ClientBlock, route: Route) -> list[Client]:
    """The clients of a block."""
    off, halo = block.off.tolist(), block.halo
    owner = (torch.searchsorted(route.boundary_off, route.target, right=True) - 1).tolist()
    there = halo.boundary[route.target].tolist()
    names = [(c, row - off[c]) for c, row in zip(owner, there, strict=True)]
    assert isinstance(block.x, Tensor)
    found = []
    for c in range(block.num_clients):
        nodes = []
        for row in range(off[c], off[c + 1]):
            near = block.adj.indices[block.adj.indptr[row] : block.adj.indptr[row + 1]].tolist()
            slots = halo.adj.indices[halo.adj.indptr[row] : halo.adj.indptr[row + 1]].tolist()
            nodes.append(
                Node(
                    block.x[row],
                    int(block.y[row]),
                    bool(block.split.train[row]),
                    int(block.row_key[row]),
                    [u - off[c] for u in near],
                    [names[s] for s in slots],
                )
            )
        found.append(Client(nodes))
    return found


def row_of(conv: str, p: dict[str, Tensor], own: Tensor, near: list[Tensor], ask: Any) -> Tensor:
    """A layer at one node.

    `near` are rows of own neighbors with their degrees in `ask[0]`, of halo ones as they were sent
    in `ask[1]`; `ask[2]` is how many neighbors there are in all, known or not.
    """
    degrees, sent, every = ask
    if conv == "gcn":
        near = [u / math.sqrt(d + 1) for u, d in zip(near, degrees, strict=True)]
    rows = [*near, *sent]
    total = torch.stack(rows).sum(0) if rows else torch.zeros_like(own)
    mean = total / max(len(rows), 1)
    if conv == "gcn":
        mean = every * mean / math.sqrt(every + 1) + own / (every + 1)
    out: Tensor = mean @ p["weight"] + p["bias"]
    return out + own @ p["root"] if conv == "sage" else out


def known_to(me: Client, slot: tuple[int, int]) -> bool:
    """Whether what a client computes now may read a slot."""
    return slot in me.seen and (me.readable is None or slot in me.readable)


def forward(
    conv: str, me: Client, weights: dict[str, Tensor], rows: Sequence[int], layers: int = LAYERS
) -> tuple[Rows, dict[int, Rows]]:
    """What leaves `layers` layers of some nodes, and what entered those after the first.

    These nodes are worked out; what is stored is read of all others.
    """
    h, entered = {v: me.nodes[v].x for v in rows}, {}
    for number in range(layers):
        p = {k[2:]: w for k, w in weights.items() if k.startswith(f"{number}.")}
        if number:
            entered[number] = {v: t.detach() for v, t in h.items()}
        out = {}
        for v in rows:
            node, heard, degrees = me.nodes[v], [], []
            for u in node.near:
                stored = me.own[number].get(u) if number else me.nodes[u].x
                row = h.get(u, stored)
                heard.append(torch.zeros_like(h[v]) if row is None else row)
                there = me.nodes[u]
                degrees.append(len(there.near) + (len(there.slots) if number else 0))
            known = [s for s in node.slots if known_to(me, s)] if number else []
            sent = [me.halo[s][number] for s in known]
            every = len(node.near) + (len(node.slots) if number else 0)
            out[v] = row_of(conv, p, h[v], heard, (degrees, sent, every))
            if number + 1 < LAYERS:
                out[v] = torch.relu(out[v])
        h = out
    if layers < LAYERS:
        entered[layers] = {v: t.detach() for v, t in h.items()}
    return h, entered


def loss_of(logits: Tensor, y: int) -> Tensor:
    return torch.logsumexp(logits, 0) - logits[y]


def uniform(key: Key, rows: list[int]) -> list[float]:
    return [float(u) for u in key.uniform(torch.tensor(rows))[:, 0]]


def mixed(key: Key, keys: list[int]) -> list[int]:
    """Places in an order that is drawn evenly."""
    words = key.words(torch.tensor(keys), 1)[:, 0].tolist()
    return sorted(range(len(keys)), key=lambda i: words[i])


def draw(me: Client, options: FedAISOptions, changes: dict[int, float], key: Key) -> None:
    """Draw the nodes of a round by how much their losses have changed."""
    rows = sorted(changes)
    keys, n = [me.nodes[v].key for v in rows], len(rows)
    count = n if options.nodes == "all" else max(1, math.floor(options.ratio * n + 0.5))
    size = [abs(changes[v]) for v in rows]
    even = options.nodes != "importance" or me.passes < options.warmup or not sum(size)
    p = [options.floor / n + (1 - options.floor) * (1 / n if even else s / sum(size)) for s in size]
    if options.unbiased:
        low, high = 0.0, 1e6
        for _ in range(300):
            c = (low + high) / 2
            low, high = (c, high) if sum(min(1.0, c * q) for q in p) < count else (low, c)
        pi = [min(1.0, low * q) for q in p]
        end = uniform(key.fold("start"), [int(torch.tensor(keys).sum())])[0] * -1.0
        kept = set()
        for i in mixed(key.fold("order"), keys):
            begin, end = end, end + pi[i]
            if math.floor(end + 1e-9) > math.floor(begin + 1e-9):
                kept.add(i)
        me.share = {rows[i]: 1 / (n * pi[i]) for i in kept}
    else:
        u = uniform(key, keys)
        clock = [-math.log(max(t, 2.0**-54)) / q for t, q in zip(u, p, strict=True)]
        kept = set(sorted(range(n), key=lambda i: clock[i])[:count])
        me.share = {}
    me.drawn = [rows[i] for i in mixed(key.fold("order"), keys) if i in kept]


def batches_of(drawn: list[int], count: int) -> list[list[int]]:
    """Nodes in order, in as many batches; the first ones have one more where they must."""
    sizes = [len(drawn) // count + (i < len(drawn) % count) for i in range(count)]
    return [drawn[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(count)]


def open_client(
    conv: str, me: Client, options: FedAISOptions, weights: dict[str, Tensor], key: Key
) -> None:
    """Take the weights, and draw by losses that they give."""
    me.weights = {name: w.clone() for name, w in weights.items()}
    logits, me.own = forward(conv, me, me.weights, range(len(me.nodes)))
    losses = {v: float(loss_of(logits[v], me.nodes[v].y)) for v in logits if me.nodes[v].trains}
    changes = {v: loss - me.last.get(v, 0.0) for v, loss in losses.items()}
    draw(me, options, changes, key.fold("nodes"))
    me.last, me.passes, me.told, me.ages = losses, me.passes + 1, [], []


def exchange(
    conv: str,
    clients: list[Client],
    options: FedAISOptions,
    chosen: Sequence[int],
    start: int,
    now: int,
) -> None:
    """Owners answer for what the next batches want, then all is stored."""
    wants: dict[int, list[tuple[int, int]]] = {}
    for c in chosen:
        all_batches, until = batches_of(clients[c].drawn, options.batches), start + 1
        until += (options.tau - 1) * (options.halo == "held")
        rows = [v for batch in all_batches[start:until] for v in batch]
        wants[c] = sorted({s for v in rows for s in clients[c].nodes[v].slots})
        clients[c].asked = set(wants[c])
    answers: dict[tuple[int, int], Rows] = {}
    for o, owner in enumerate(clients):
        rows = sorted({row for wanted in wants.values() for at, row in wanted if at == o})
        if rows and owner.weights is not None and options.owners == "recompute":
            entered = forward(conv, owner, owner.weights, rows, LAYERS - 1)[1]
            for number, found in entered.items():
                owner.own[number] |= found
        for row in rows if owner.passes else ():
            node = owner.nodes[row]
            scale = 1 / math.sqrt(len(node.near) + len(node.slots) + 1) if conv == "gcn" else 1.0
            answers[o, row] = {n: owner.own[n][row] * scale for n in owner.own}
    for c, wanted in wants.items():
        for slot in wanted:
            if slot in answers:
                clients[c].halo[slot], clients[c].seen[slot] = answers[slot], now


def train_batch(conv: str, me: Client, options: FedAISOptions, number: int, now: int) -> None:
    """A step of SGD on a batch."""
    rows = batches_of(me.drawn, options.batches)[number]
    if not rows:
        return
    assert me.weights is not None
    leaves = {name: w.clone().requires_grad_() for name, w in me.weights.items()}
    me.readable = me.asked if options.halo == "held" else None
    logits, entered = forward(conv, me, leaves, rows)
    read = {s for v in rows for s in me.nodes[v].slots if known_to(me, s)}
    me.readable = None
    losses = {v: loss_of(logits[v], me.nodes[v].y) for v in rows}
    share = {v: s * len(me.drawn) / len(rows) for v, s in me.share.items()}
    share = share or dict.fromkeys(rows, 1 / len(rows))
    loss = torch.stack([share[v] * losses[v] for v in rows]).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    me.weights = {
        name: w.detach() - RATE * g for (name, w), g in zip(leaves.items(), grads, strict=True)
    }
    for at, found in entered.items():
        me.own[at] |= found
    me.told += [float(loss.detach()) for loss in losses.values()]
    me.ages += [now - me.seen[s] for s in read]


def whole_round(
    conv: str,
    clients: list[Client],
    options: FedAISOptions,
    weights: dict[str, Tensor],
    chosen: Sequence[int],
    t: int,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """A round; return the mean of the models, and what is told of it."""
    key = KEY.fold("train", t)
    for c in chosen:
        open_client(conv, clients[c], options, weights, key)
    for start in range(0, options.batches, options.tau):
        now = (t - 1) * options.batches + start
        exchange(conv, clients, options, chosen, start, now)
        for c in chosen:
            for number in range(start, min(start + options.tau, options.batches)):
                train_batch(conv, clients[c], options, number, now - start + number)
    mine = [clients[c] for c in chosen]
    models = [me.weights for me in mine if me.weights is not None]
    sizes = [sum(n.trains for n in me.nodes) if options.average == "nodes" else 1 for me in mine]
    pairs = [(n / sum(sizes), w) for n, w in zip(sizes, models, strict=True)]
    mean = {name: torch.stack([s * w[name] for s, w in pairs]).sum(0) for name in weights}
    facts = {
        "loss": sum(sum(me.told) / len(me.told) for me in mine) / len(mine),
        "rows_trained": sum(len(me.told) for me in mine) / len(mine),
        "row_age": sum(sum(me.ages) / max(len(me.ages), 1) for me in mine) / len(mine),
    }
    for me in mine:
        me.weights = None
    return mean, facts


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "importance": ("sage", {}),
    "degrees": ("gcn", {}),
    "stored": ("gcn", {"owners": "stored", "tau": 1}),
    "unbiased": ("sage", {"unbiased": True, "floor": 0.2, "ratio": 0.5}),
    "even": ("sage", {"nodes": "random", "ratio": 0.4}),
    "long warm-up": ("sage", {"warmup": 2, "floor": 0.0, "ratio": 0.6}),
    "all": ("gcn", {"nodes": "all", "tau": 3}),
    "held": ("gcn", {"nodes": "all", "halo": "held"}),
    "nodes": ("sage", {"average": "nodes"}),
}


def compare(block: ClientBlock, state: Any, ours: list[Client]) -> None:
    """What clients hold between rounds beside the loop's."""
    slot: dict[tuple[int, tuple[int, int]], int] = {}
    for c, me in enumerate(ours):
        rows = range(int(block.off[c]), int(block.off[c + 1]))
        assert int(state["passes"].t[c]) == me.passes
        for v, row in enumerate(rows):
            assert float(state["losses"].t[row]) == pytest.approx(me.last.get(v, 0.0), abs=1e-10)
            near = block.halo.adj.indices[
                block.halo.adj.indptr[row] : block.halo.adj.indptr[row + 1]
            ]
            slot |= {(c, s): int(p) for s, p in zip(me.nodes[v].slots, near, strict=True)}
            for number in range(1, LAYERS) if me.passes else ():
                found = state[f"own_rows/{number}"].t[row]
                torch.testing.assert_close(found, me.own[number][v], rtol=0, atol=1e-10)
    for (c, s), place in slot.items():
        assert int(state["received_at"].t[place]) == ours[c].seen.get(s, -1)
        for number in range(1, LAYERS) if s in ours[c].seen else ():
            found = state[f"halo_rows/{number}"].t[place]
            torch.testing.assert_close(found, ours[c].halo[s][number], rtol=0, atol=1e-10)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("name", CASES)
def test_rounds_are_those_of_a_loop_from_the_paper(make_graph: MakeGraph, name: str) -> None:
    """Weights, histories, losses of nodes, ages and counts, with clients that take no part."""
    conv, changes = CASES[name]
    options = FedAISOptions(**{"interval": "fixed", "batches": 4, "drawn": 0, "tau": 2, **changes})
    block, route, _ = cut_of(make_graph(60), CLIENTS, "random")
    cfg = MethodConfig(
        model=model_of(conv, layers=LAYERS, dropout=0.0, residual=False),
        optimizer=SGD(RATE),
        schedule=Schedule(1),
        keep_optimizer=False,
        participation=1.0,
        options=options,
    )
    fed = InProcess(cfg, block, route, CLIENTS)
    state = FEDAIS.init(fed, cfg, cfg.model.init_weights(Key.of(2), torch.float64), KEY)
    assert state.weights is not None
    weights, clients = dict(state.weights), clients_of(block, route)
    assert min(sum(n.trains for n in me.nodes) for me in clients) >= 2
    for t, chosen in enumerate(PARTS, start=1):
        fed.start_round(t)
        called = replace(cfg, selected=tuple(fed.ids[c] for c in chosen))
        state, report = FEDAIS.round(fed, called, state, t, KEY)
        weights, facts = whole_round(conv, clients, options, weights, chosen, t)
        assert state.weights is not None
        for field_, w in weights.items():
            torch.testing.assert_close(state.weights[field_], w, rtol=0, atol=1e-10)
        check_facts(report, facts)
        compare(block, fed.states()[0], clients)
    assert sum(me.passes for me in clients) == sum(map(len, PARTS))
    assert any(me.nodes and not me.passes for me in clients)


def check_facts(report: RoundReport, facts: dict[str, float]) -> None:
    assert report.train_loss == pytest.approx(facts["loss"], abs=1e-10)
    for name in ("rows_trained", "row_age"):
        assert report.facts[name] == pytest.approx(facts[name], abs=1e-10)
