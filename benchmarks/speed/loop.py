"""FedAvg as a plain loop over torch_geometric models: what silograph's speed is compared with.

`PlainLoop` is what a user writes: a `GCNConv` model for each client, dense features, torch's
Adam, `load_state_dict`, a mean of state dicts. `TunedLoop` is what a user who profiles it makes
of it, without giving up the loop. Both do the same work as `silograph run --method fedavg`:
full-batch local epochs with an optimizer rebuilt each round, a mean weighted by training nodes,
and after every round each client's validation and test accuracy of the averaged model. They get
cut, split and first weights from silograph, so that all sides can be compared number by number.

n: rows of a client. F: features. E: directed edges of a client.
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from cells import LEARNING_RATE
from torch import Tensor
from torch_geometric.nn import GCNConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from silograph.core.resolved_config import ResolvedConfig
from silograph.experiment.resolve.data import Cut
from silograph.experiment.resolve.resolve import DTYPES
from silograph.graph.block.block import SparseRows, make_block
from silograph.nn.conv import Params

# Features as a torch user may hold them; which is fastest depends on their width and density.
FORMS = ("dense", "sparse csr", "sparse coo")


@dataclass(frozen=True, eq=False)
class Client:
    """The data of a client.

    Attributes:
        x: (n, F).
        edges: what `GCNConv` is given: (2, E) int64, or a sparse matrix (n, n).
        y: (n,) int64.
        train: who trains: (n,) bool or (k,) int64, as `val` and `test`.
        val: who validates.
        test: who tests.
    """

    x: Tensor
    edges: Tensor
    y: Tensor
    train: Tensor
    val: Tensor
    test: Tensor


@dataclass(frozen=True)
class Accuracies:
    """Accuracy of every client, in the clients' order; NaN where nobody is judged."""

    val: list[float]
    test: list[float]


def clients_of(cut: Cut, dtype: torch.dtype) -> list[Client]:
    """Return the clients of a cut, with dense features and `edge_index`, as PyG users have them."""
    block, _ = make_block(cut.graph, cut.partition, cut.split, dtype)
    held = block.x
    x = torch.from_numpy(held.csr.scipy().toarray()) if isinstance(held, SparseRows) else held
    ends = torch.stack([block.adj.row, block.adj.indices.long()])
    entry = block.adj.indptr.long()[block.off].tolist()  # rows are sorted by client, so are edges
    row = block.off.tolist()
    clients = []
    for client in range(block.num_clients):
        rows = slice(row[client], row[client + 1])
        split = block.split
        clients.append(
            Client(
                x=x[rows].to(dtype, copy=True),
                edges=ends[:, entry[client] : entry[client + 1]] - row[client],
                y=block.y[rows],
                train=split.train[rows],
                val=split.val[rows],
                test=split.test[rows],
            )
        )
    return clients


class GCN(torch.nn.Module):
    """Two graph convolutions with ReLU and dropout between them."""

    def __init__(self, features: int, config: ResolvedConfig, classes: int, **options: Any) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.first = GCNConv(features, config.hidden, **options)
        self.second = GCNConv(config.hidden, classes, **options)
        self.to(DTYPES[config.dtype])

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Return logits (n, classes)."""
        h = F.relu(self.first(x, edges))
        if self.dropout > 0:
            h = F.dropout(h, self.dropout, self.training)
        logits: Tensor = self.second(h, edges)
        return logits


# Our names of weights and those of the model's state dict; `GCNConv` holds the transpose.
NAMES = {
    "0.weight": "first.lin.weight",
    "0.bias": "first.bias",
    "1.weight": "second.lin.weight",
    "1.bias": "second.bias",
}


def to_pyg(weights: Params) -> Params:
    """Return silograph's weights as a state dict of `GCN`."""
    return {
        NAMES[name]: w.T.contiguous() if name.endswith("weight") else w.clone()
        for name, w in weights.items()
    }


def from_pyg(state: Params) -> Params:
    """Return a state dict of `GCN` as silograph's weights."""
    back = {theirs: ours for ours, theirs in NAMES.items()}
    return {
        back[k]: w.T.contiguous() if k.endswith("weight") else w.clone() for k, w in state.items()
    }


def hit_rate(hits: Tensor, rows: Tensor) -> float:
    """Return the share of hits (n,) bool among chosen rows."""
    return float(hits[rows].float().mean())


class PlainLoop:
    """FedAvg as a user writes it.

    Args:
        cut: the graph, its cut and its split.
        config: width, dropout, epochs, learning rate, weight decay, dtype.
        weights: the first weights, in silograph's form.
    """

    def __init__(self, cut: Cut, config: ResolvedConfig, weights: Params) -> None:
        graph = cut.graph
        self.config = config
        self.clients = clients_of(cut, DTYPES[config.dtype])
        self.models = [GCN(graph.num_features, config, graph.num_classes) for _ in self.clients]
        self.state: Params = to_pyg(weights)

    @property
    def weights(self) -> Params:
        """The averaged model, in silograph's form."""
        return from_pyg(self.state)

    def round(self) -> Accuracies:
        """Train every client, average, judge the averaged model at every client."""
        states: list[Params] = []
        sizes: list[int] = []
        for model, client in zip(self.models, self.clients, strict=True):
            size = int(client.train.sum())
            if size > 0:
                self._train(model, client)
                states.append(model.state_dict())
                sizes.append(size)
        mean = {name: torch.zeros_like(w) for name, w in self.state.items()}
        for state, size in zip(states, sizes, strict=True):
            for name, w in state.items():
                mean[name] += size / sum(sizes) * w
        self.state = mean
        return self._judge()

    def _train(self, model: GCN, client: Client) -> None:
        config = self.config
        model.load_state_dict(self.state)
        optimizer = torch.optim.Adam(
            model.parameters(), lr=LEARNING_RATE, weight_decay=config.weight_decay
        )
        model.train()
        assert config.local_epochs is not None  # given
        for _ in range(config.local_epochs):
            optimizer.zero_grad()
            logits = model(client.x, client.edges)
            F.cross_entropy(logits[client.train], client.y[client.train]).backward()
            optimizer.step()

    @torch.no_grad()
    def _judge(self) -> Accuracies:
        val, test = [], []
        for model, client in zip(self.models, self.clients, strict=True):
            model.load_state_dict(self.state)
            model.eval()
            hits = model(client.x, client.edges).argmax(dim=1) == client.y
            val.append(hit_rate(hits, client.val))
            test.append(hit_rate(hits, client.test))
        return Accuracies(val, test)


def tuned_client(client: Client, form: str) -> Client:
    """Return a client as `TunedLoop` holds it: see there."""
    n, x = len(client.y), client.x
    edges, values = gcn_norm(client.edges, None, n, dtype=x.dtype)
    adj = torch.sparse_coo_tensor(edges.flip(0), values, (n, n), check_invariants=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        adj = adj.coalesce().to_sparse_csr()
        if form == "sparse csr":
            x = x.to_sparse_csr()
        elif form == "sparse coo":
            x = x.to_sparse_coo().coalesce()
    roles = {name: getattr(client, name).nonzero()[:, 0] for name in ("train", "val", "test")}
    return replace(client, x=x, edges=adj, **roles)


class TunedLoop:
    """The plain loop after a profiler: the same numbers, still client after client.

    What changes: the adjacency is normalized once (what `cached=True` does) and kept as sparse
    CSR; Adam is fused; features are held in one of `FORMS`; one model serves all clients, so that
    its weights stay in the processor's cache; masks become indices; the mean grows in place;
    judging loads the averaged weights once.

    Args:
        cut: the graph, its cut and its split.
        config: as for `PlainLoop`.
        weights: the first weights, in silograph's form.
        form: one of `FORMS`.
    """

    def __init__(self, cut: Cut, config: ResolvedConfig, weights: Params, form: str) -> None:
        graph = cut.graph
        self.config, self.form = config, form
        plain = clients_of(cut, DTYPES[config.dtype])
        self.clients = [tuned_client(client, form) for client in plain]
        self.sizes = [len(client.train) for client in self.clients]
        self.model = GCN(graph.num_features, config, graph.num_classes, normalize=False)
        self.model.load_state_dict(to_pyg(weights))

    @property
    def weights(self) -> Params:
        """The averaged model, in silograph's form."""
        return from_pyg({name: w.detach() for name, w in self.model.state_dict().items()})

    def round(self) -> Accuracies:
        """Train every client, average, judge the averaged model at every client."""
        live: list[Tensor] = list(self.model.parameters())
        start = [w.detach().clone() for w in live]
        mean = [torch.zeros_like(w) for w in start]
        total = sum(self.sizes)
        for client, size in zip(self.clients, self.sizes, strict=True):
            if size > 0:
                with torch.no_grad():
                    torch._foreach_copy_(live, start)
                self._train(live, client)
                with torch.no_grad():
                    torch._foreach_add_(mean, live, alpha=size / total)
        with torch.no_grad():
            torch._foreach_copy_(live, mean)
        return self._judge()

    def _train(self, live: list[Tensor], client: Client) -> None:
        config = self.config
        optimizer = torch.optim.Adam(
            live, lr=LEARNING_RATE, weight_decay=config.weight_decay, fused=True
        )
        self.model.train()
        assert config.local_epochs is not None  # given
        for _ in range(config.local_epochs):
            optimizer.zero_grad()
            logits = self.model(client.x, client.edges)
            F.cross_entropy(logits[client.train], client.y[client.train]).backward()
            optimizer.step()

    @torch.no_grad()
    def _judge(self) -> Accuracies:
        self.model.eval()
        val, test = [], []
        for client in self.clients:
            hits = self.model(client.x, client.edges).argmax(dim=1) == client.y
            val.append(hit_rate(hits, client.val))
            test.append(hit_rate(hits, client.test))
        return Accuracies(val, test)


def best_form(cut: Cut, config: ResolvedConfig, weights: Params) -> str:
    """Return the form of features in which a round of the tuned loop takes least CPU time."""
    spent = {}
    for form in FORMS:
        trial = TunedLoop(cut, config, weights, form)
        trial.round()
        spent[form] = min(_cpu_of(trial.round) for _ in range(2))
    return min(spent, key=lambda form: spent[form])


def _cpu_of(act: Callable[[], object]) -> float:
    begin = time.process_time()
    act()
    return time.process_time() - begin
