"""Disjoint cuts that skew the clients' labels.

C: clients. K: classes. n: nodes of the graph.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import PartitionError
from silograph.core.key import Key
from silograph.graph.graph import MISSING, Graph
from silograph.graph.node_key import key_order
from silograph.graph.partition.disjoint import fill_empty, scattered
from silograph.graph.partition.options import FAVORED, ClassBiasedOptions, DirichletOptions

FITTING_STEPS = 1000
FITTED = 1e-9  # relative to a client's size


def dirichlet(graph: Graph, clients: int, key: Key, options: DirichletOptions) -> Tensor:
    """Spread every class over the clients by shares from Dirichlet(alpha, ..., alpha).

    Small alpha: each class sits at few clients. Q. Li et al.: "Federated learning on non-IID
    data silos: an experimental study", ICDE 2022, after T.-M. Hsu et al.: "Measuring the effects
    of non-identical data distribution for federated visual classification", 2019. Unlabeled
    nodes are dealt evenly. Li et al. redraw until no client is short of nodes, which does not
    end with many clients; here an empty client gets one node of the client that is largest then.
    """
    require_classes(graph, "dirichlet")

    def shares(label: int) -> np.ndarray:
        generator = np.random.Generator(np.random.PCG64(key.fold("shares", label).value))
        return generator.dirichlet(np.full(clients, options.alpha))

    return _deal(graph, clients, key, shares)


def with_favored(options: ClassBiasedOptions, num_classes: int) -> ClassBiasedOptions:
    """Return the options with the number of favored classes written out."""
    if options.favored_classes is not None:
        return options
    return replace(options, favored_classes=max(1, min(FAVORED, num_classes - 1)))


def class_biased(graph: Graph, clients: int, key: Key, options: ClassBiasedOptions) -> Tensor:
    """Favor a few classes at each client: their nodes are `favor` times as likely to go there.

    The non-iid setting of B. Zhang et al.: "Tackling the local bias in federated graph learning",
    2021: in each client the nodes of a few classes, drawn at random, are sampled with ten times
    the probability of others. Its clients share one pool and are equally large, which leaves
    the probabilities open. Here client c gets r_c w_ck s_k nodes of class k with w_ck = `favor`
    or 1, where r and s make the clients equally large and use every node once (iterative
    proportional fitting: W. Deming, F. Stephan, Ann. Math. Stat. 11(4), 1940). So odds ratios
    of two classes at two clients are those of w, and sizes are equal to within K + 1 nodes.
    Unlabeled nodes are dealt evenly.
    """
    require_classes(graph, "class_biased")
    favored, favor = options.favored_classes, options.favor
    assert favored is not None  # written out
    if favored >= graph.num_classes:
        raise PartitionError(
            f"expected 1 to {graph.num_classes - 1} favored_classes (fewer than the "
            f"{graph.num_classes} classes of {graph.name!r}), got {favored}"
        )
    table = _fitted(_weights(graph, clients, key, favored, favor), graph)
    return _deal(graph, clients, key, lambda label: table[:, label])


def require_classes(graph: Graph, method: str) -> None:
    """Raise `PartitionError` where nodes have no class each, which `method` needs."""
    if graph.task != "multiclass":
        got = "a multi-label graph" if graph.task == "multilabel" else "numbers to predict"
        raise PartitionError(
            f"expected one class a node for {method!r}, got {got}: "
            "use 'metis', 'louvain' or 'random'"
        )


def _weights(graph: Graph, clients: int, key: Key, favored: int, favor: float) -> np.ndarray:
    """Return `favor` for the drawn classes of each client and 1 for the others, (C, K)."""
    draws = key.fold("favored").matrix(clients, graph.num_classes)
    weights = np.ones((clients, graph.num_classes))
    chosen = draws.argsort(dim=1, stable=True)[:, :favored].numpy()
    np.put_along_axis(weights, chosen, favor, axis=1)
    return weights


def _fitted(weights: np.ndarray, graph: Graph) -> np.ndarray:
    """Scale rows and columns until rows sum alike and columns to shares of 1, (C, K)."""
    present = torch.bincount(graph.y[graph.y != MISSING], minlength=graph.num_classes).numpy()
    nodes = present.astype(np.float64)
    size = max(nodes.sum(), 1.0) / len(weights)
    table = weights * nodes
    for _ in range(FITTING_STEPS):
        table *= (size / np.maximum(table.sum(axis=1), FITTED))[:, None]
        table *= nodes / np.maximum(table.sum(axis=0), FITTED)
        if np.abs(table.sum(axis=1) - size).max() <= FITTED * size:
            break
    return table / np.maximum(nodes, 1.0)


def _deal(graph: Graph, clients: int, key: Key, shares: Callable[[int], np.ndarray]) -> Tensor:
    """Deal each class by its shares (C,) in drawn order, and unlabeled nodes evenly."""
    order = key_order(graph.node_id, key)
    y = graph.y[order].numpy()
    part = np.empty(len(order), np.int64)
    for label in range(graph.num_classes):
        mine = np.flatnonzero(y == label)
        ends = np.rint(np.cumsum(shares(label))[:-1] * len(mine))
        part[mine] = np.searchsorted(ends, np.arange(len(mine)), side="right")
    unknown = np.flatnonzero(y == MISSING)
    part[unknown] = np.arange(len(unknown)) % clients
    return scattered(fill_empty(part, clients), order)
