"""FED-PUB beside a loop over clients in plain torch: autograd of the paper's loss, torch's Adam."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from plain import dense_client
from silograph.core.key import Key
from silograph.core.payload import Ragged, State, tensors_under
from silograph.federation.in_process import InProcess
from silograph.graph.block.block import ClientBlock, Route
from silograph.graph.graph import Graph
from silograph.methods import FEDPUB, MethodConfig, Params
from silograph.methods.fedpub import FedPubOptions, corrections, shared_graph
from silograph.nn.backends import BACKENDS
from silograph.nn.fit import Schedule
from silograph.nn.model import Model
from silograph.nn.optim import Adam

KEY, FIRST = Key.of(5), Key.of(9)
CLIENTS, ROUNDS, STEPS = 4, 3, 2
LR, DECAY = 0.05, 5e-3
OWN = FedPubOptions(scale=4.0, l1=0.7, proximal=0.2, communities=1)
MATRICES = ("0.weight", "1.weight", "2.weight")
HAVE_NUMBA = importlib.util.find_spec("numba") is not None


def gcn_gcn_linear(adj: Tensor, x: Tensor, w: Params) -> tuple[Tensor, Tensor]:
    """What enters the ReLU before the classifier, and the logits."""
    h = torch.relu(adj @ (x @ w["0.weight"]) + w["0.bias"])
    h = adj @ (h @ w["1.weight"]) + w["1.bias"]
    return h, h.relu() @ w["2.weight"] + w["2.bias"]


@dataclass
class Peer:
    """A client of the oracle: its graph, weights, masks and optimizer."""

    data: tuple[Tensor, Tensor, Tensor, Tensor]
    w: Params
    m: Params = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.w = {name: t.clone().requires_grad_() for name, t in self.w.items()}
        self.m = {name: torch.ones_like(self.w[name]).requires_grad_() for name in MATRICES}
        values = [*self.w.values(), *self.m.values()]
        self.optimizer = torch.optim.Adam(values, lr=LR, weight_decay=DECAY)

    def effective(self, *, cut: bool) -> Params:
        """Weights times masks; cut: masks are 0 where they are below l1."""
        kept = {n: m * (m.abs() >= OWN.l1) if cut else m for n, m in self.m.items()}
        return {n: w * kept[n] if n in kept else w for n, w in self.w.items()}

    def train(self, start: Params) -> None:
        """Algorithm 1: steps on the loss, the masks' L1 norm and the distance from the start."""
        adj, x, y, train = self.data
        for name, w in self.w.items():
            w.data = start[name].clone()
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            logits = gcn_gcn_linear(adj, x, self.effective(cut=False))[1]
            loss = cross_entropy(logits[train], y[train])
            for m in self.m.values():
                loss = loss + OWN.l1 * m.abs().sum()
            for name, w in self.w.items():
                loss = loss + OWN.proximal * torch.norm(w - start[name], 2)
            loss.backward()
            self.optimizer.step()


def means(peers: list[Peer], adj: Tensor, x: Tensor) -> tuple[list[Params], Tensor]:
    """Eqs. 3 and 4: a model for each client, and how much it takes of whom."""
    h = [gcn_gcn_linear(adj, x, peer.effective(cut=True))[0].mean(0).detach() for peer in peers]
    share = torch.zeros(len(peers), len(peers), dtype=torch.float64)
    for i, j in product(range(len(peers)), repeat=2):
        share[i, j] = torch.exp(OWN.scale * (h[i] @ h[j]) / (h[i].norm() * h[j].norm()))
    share = share / share.sum(1, keepdim=True)
    found = [
        {n: sum((a * p.w[n].detach() for a, p in zip(row, peers, strict=True))) for n in peers[0].w}
        for row in share
    ]
    return found, share


def config(graph: Graph, kernels: str) -> MethodConfig[FedPubOptions]:
    return MethodConfig(
        model=Model("gcn", graph.num_features, 6, 3, 3, 0.0, graph.task, head="linear"),
        optimizer=Adam(LR, DECAY),
        schedule=Schedule(STEPS),
        keep_optimizer=True,
        participation=1.0,
        options=OWN,
        backend=BACKENDS[kernels],
        corrections=corrections(OWN),
    )


@pytest.mark.parametrize(
    "kernels",
    ["torch", pytest.param("compiled", marks=pytest.mark.skipif(not HAVE_NUMBA, reason="numba"))],
)
def test_fedpub_is_the_loop_over_clients(
    make_graph: Callable[..., Graph],
    cut_block: Callable[..., tuple[ClientBlock, Route]],
    kernels: str,
) -> None:
    """Models of the server, of clients as they are scored, masks, and facts; some are pruned."""
    graph = make_graph(48, sparse=True, features=12)
    block, route = cut_block(graph, CLIENTS)
    cfg = config(graph, kernels)
    fed, first = InProcess(cfg, block, route, 2), cfg.model.init_weights(FIRST, torch.float64)
    state = FEDPUB.init(fed, cfg, first, KEY)
    peers = [Peer(dense_client(block, c), dict(first)) for c in range(CLIENTS)]
    starts: list[Params] = [dict(first) for _ in peers]
    common = shared_graph(block, 1)
    hat = common.adj.tensor.to_dense() + torch.eye(len(common.x), dtype=torch.float64)
    adj = hat * hat.sum(1).rsqrt() * hat.sum(1, keepdim=True).rsqrt()
    for t in range(1, ROUNDS + 1):
        fed.start_round(t)
        state, report = FEDPUB.round(fed, cfg, state, t, KEY)
        for peer, start in zip(peers, starts, strict=True):
            peer.train(start)
        starts, share = means(peers, adj, common.x)
        own = report.client_facts["own_share"]
        torch.testing.assert_close(own, share.diagonal(), rtol=0, atol=1e-9)
        assert report.facts["own_share"] == pytest.approx(float(own.mean()), abs=1e-12)
        sparsity = report.client_facts["sparsity"]
        assert report.facts["sparsity"] == pytest.approx(float(sparsity.mean()), abs=1e-12)
    for name, w in state.memory.items():
        torch.testing.assert_close(w, torch.stack([s[name] for s in starts]), rtol=0, atol=1e-9)
    check_clients(fed, peers, sparsity)


def check_clients(fed: InProcess, peers: list[Peer], sparsity: Tensor) -> None:
    """Hold what clients keep to the oracle: masks, pruned models, logits of judged rows."""
    found = [s for state in fed.states() for s in _each(state)]
    for peer, (kept, logits), sparse in zip(peers, found, sparsity.tolist(), strict=True):
        adj, x, _, train = peer.data
        scored = peer.effective(cut=True)
        for name, w in scored.items():
            torch.testing.assert_close(kept[f"weights/{name}"], w.detach(), rtol=0, atol=1e-9)
        masks = [peer.m[name] for name in MATRICES]
        for name, m in zip(MATRICES, masks, strict=True):
            number, _, weight = name.partition(".")
            ours = kept[f"masks/{number}.mask_{weight}"]
            torch.testing.assert_close(ours, m.detach(), rtol=0, atol=1e-9)
        below = sum(int((m.abs() < OWN.l1).sum()) for m in masks)
        assert 0 < below < sum(m.numel() for m in masks)
        assert sparse == pytest.approx(below / sum(m.numel() for m in masks), abs=1e-12)
        theirs = gcn_gcn_linear(adj, x, scored)[1][~train].detach()
        torch.testing.assert_close(logits, theirs, rtol=0, atol=1e-9)


def _each(state: State) -> list[tuple[Params, Tensor]]:
    """The kept tensors and the judged logits of every client of a state."""
    own = {f"{k}/{n}": t for k in ("weights", "masks") for n, t in tensors_under(k, state).items()}
    logits = state["own/logits"]
    assert isinstance(logits, Ragged)
    parts = logits.t.split(logits.off.diff().tolist())
    return [({n: t[c] for n, t in own.items()}, part) for c, part in enumerate(parts)]
