"""GCFL and GCFL+: FedAvg in clusters of clients, which are split in two when they disagree.

Xie, Ma, Xiong and Yang, "Federated graph classification over non-iid graphs", NeurIPS 2021,
sections 4.1 (GCFL) and 4.2 (GCFL+).
Sattler, Müller and Samek, "Clustered federated learning", IEEE TNNLS 2021 (the two criteria).
Stoer and Wagner, "A simple min-cut algorithm", J. ACM 1997; Sakoe and Chiba, "Dynamic programming
algorithm optimization for spoken word recognition", IEEE TASSP 1978 (time warping).

Every cluster has a model. Its clients train from it and the server takes their mean, weighted by
training nodes. With dW_c what training has changed at client c, a cluster is split when

    |mean of dW_c| < epsilon1   and   max of |dW_c| > epsilon2

that is when its clients still move, and away from each other. The two parts are those of a minimum
cut of the graph of its clients, whose edges weigh how alike two of them are:

    gcfl        1 + cos(dW_c, dW_d) of this round
    gcflplus    max D - D(c, d), D the distance of the series of |dW_c| over the last `sequence`
                rounds under dynamic time warping; max D is that of two clients of the cluster

What we changed: the paper calls dW the gradients that clients send; its code takes norms of the
last step's gradients, which do not travel here. A client that was away is in no criterion of that
round; one without a full series goes with the larger part. As in the authors' code, nothing is
split in the first `warmup` rounds, and no cluster below three clients; after a split of `gcflplus`
all series begin anew. The thresholds are absolute, so they depend on the model, the optimizer and
the rate. By default clients take ten local epochs of SGD of rate 0.1, which move a model by up to
1.2 in the first round (Cora, 10 clients), Adam of rate 0.01 by up to 4. Adam that is built anew in
every round fails where clients are small (benchmarks/defaults/beside_fedopt.md).

Views: `personalized` scores what a client's training left, and picks the round. There is no
`server` view: the server has a model for each cluster.

State of the server: the clusters' weights (G, ...), `cluster` (C,), `series` (C, T), and how much
of each is filled, `filled` (C,). State of a client: `weights/*` (C, ...), its model, and the state
of local training.

C: clients. G: clusters. P: all weights of a model. T: length of a series.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Annotated

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as options_class
from torch import Tensor

from silograph.core.config import STRICT
from silograph.core.kinds import Kind
from silograph.core.payload import Patched, Stacked, from_bases, stack
from silograph.core.setting_values import log
from silograph.evaluation.scoring import personal, received_specs
from silograph.federation.base import positions_of
from silograph.federation.field_specs import LOSS, TRAINED
from silograph.methods.base import AnyMethod, Caution, Method, Needs, RoundReport, ServerState
from silograph.methods.local_only import InitialModel, OwnModel, begin_own, own_weights
from silograph.methods.local_training import (
    LocalModel,
    each_as_base,
    exact_weights,
    sampler_specs,
)
from silograph.methods.ops import Clients, Server, calls, op, program
from silograph.nn.conv import Params

Length = Annotated[float, Field(gt=0)]
FEWEST = 3  # clients of a cluster that is split
EPSILON1 = {
    "help": "a cluster is split when the mean change of its models is shorter than this",
    "tune": log(1e-2, 10.0),
}
EPSILON2 = {"help": "... and the longest change is longer than this", "tune": log(1e-2, 10.0)}
WARMUP = {"help": "rounds before the first split"}


@options_class(frozen=True, config=STRICT)
class GCFLOptions:
    """The help texts are the documentation of the fields."""

    epsilon1: Length = field(default=0.05, metadata=EPSILON1)
    epsilon2: Length = field(default=0.1, metadata=EPSILON2)
    warmup: Annotated[int, Field(ge=0)] = field(default=20, metadata=WARMUP)


@options_class(frozen=True, config=STRICT)
class GCFLPlusOptions:
    """The help texts are the documentation of the fields."""

    epsilon1: Length = field(default=0.05, metadata=EPSILON1)
    epsilon2: Length = field(default=0.1, metadata=EPSILON2)
    warmup: Annotated[int, Field(ge=0)] = field(default=20, metadata=WARMUP)
    sequence: Annotated[int, Field(ge=2, le=10**6)] = field(
        default=5, metadata={"help": "rounds whose changes are compared"}
    )


Thresholds = GCFLOptions | GCFLPlusOptions
CLUSTER_STATE = "cluster", "filled", "series"  # what the server remembers beside weights


@dataclass(frozen=True)
class ClusterModels:
    """The model of each client's cluster, (C, ...)."""

    weights: Annotated[Mapping[str, Stacked | Patched], exact_weights(Stacked)]


@dataclass(frozen=True)
class TrainedModels:
    """The clients' models after training; else as `LocalModel`."""

    weights: Annotated[Mapping[str, Stacked | Patched], exact_weights(Stacked)]
    nodes: Annotated[Stacked, TRAINED]
    loss: Annotated[Stacked, LOSS]
    received: Annotated[Mapping[str, Stacked], received_specs]
    sampler: Annotated[Mapping[str, Stacked], sampler_specs]


@op(Kind.WEIGHTS)
def train_in_cluster(
    clients: Clients[Thresholds], _state: OwnModel, request: ClusterModels
) -> tuple[OwnModel, TrainedModels]:
    """Train from the cluster's model and keep the result."""
    fitted = clients.fit(each_as_base(request.weights))
    reply = TrainedModels(**vars(LocalModel.of(fitted, clients.block)))
    return OwnModel(stack(fitted.tensors)), reply


@calls(begin_own)
def setup(server: Server[Thresholds], weights: Params) -> ServerState:
    """Send the first model, which is that of the only cluster."""
    server.call(begin_own, InitialModel(weights))
    clients, length = len(server.fed.ids), length_of(server.options)
    memory = {f"weights/{name}": w[None] for name, w in weights.items()}
    memory["cluster"] = torch.zeros(clients, dtype=torch.int64)
    memory["filled"] = torch.zeros(clients, dtype=torch.int64)
    memory["series"] = torch.zeros(clients, length, dtype=torch.float64)
    return ServerState(weights=None, memory=memory)


def length_of(options: Thresholds) -> int:
    """Return T, 0 where clients are compared by this round alone."""
    return options.sequence if isinstance(options, GCFLPlusOptions) else 0


@calls(train_in_cluster)
def train_round(server: Server[Thresholds], state: ServerState) -> tuple[ServerState, RoundReport]:
    """Train in every cluster, split those whose clients disagree, take means."""
    # Clusters are found on the CPU; what a checkpoint gave back may be elsewhere.
    memory = {**state.memory, **{name: state.memory[name].cpu() for name in CLUSTER_STATE}}
    # In the model's order: a checkpoint may have another, and products are summed over names.
    models = {name: memory[f"weights/{name}"] for name in server.cfg.model.weight_shapes}
    cluster, client_ids = memory["cluster"], server.select()
    base = cluster[positions_of(server.fed.ids, client_ids)]
    request = ClusterModels({name: from_bases(w, base) for name, w in models.items()})
    by_client = server.gather(train_in_cluster, request, to=client_ids)
    is_averaged = by_client["answered"] & (by_client["nodes"] > 0)
    changes = {
        name: torch.where(
            _expand_mask(is_averaged, w), by_client[f"weights/{name}"] - w[cluster], 0.0
        )
        for name, w in models.items()
    }
    is_finite = torch.stack([_flat_rows(t).isfinite().all(1) for t in changes.values()])
    is_averaged = is_averaged & is_finite.all(0)  # a model that diverged enters no mean
    changes = {
        name: torch.where(_expand_mask(is_averaged, w), w, 0.0) for name, w in changes.items()
    }
    gram = products(changes)
    # Nor does one that is too far off to compare.
    is_compared = is_averaged.cpu() & gram.diagonal().isfinite()
    similarity, is_known, memory = similarities(memory, gram, is_compared)
    new_cluster = cluster
    if server.round > server.options.warmup:
        new_cluster = split_clusters(
            server.options, cluster, gram, is_compared, similarity, is_known
        )
    if not torch.equal(new_cluster, cluster):
        memory["filled"] = torch.zeros_like(memory["filled"])
    weight = by_client["nodes"] * is_averaged
    for name, w in models.items():
        memory[f"weights/{name}"] = means(w, changes[name], cluster, new_cluster, weight)
    memory["cluster"] = new_cluster
    shortest, longest = nearest_split(cluster, gram, is_compared)
    facts = {
        "clusters": float(new_cluster.max() + 1),
        "mean_change": shortest,
        "longest_change": longest,
    }
    report = server.report(
        client_ids,
        by_client,
        is_averaged,
        facts,
        {"cluster": new_cluster.double()},
    )
    return ServerState(weights=None, memory=memory), report


def _expand_mask(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask (C,) in the dimensions of models (G, ...)."""
    return mask.view(-1, *[1] * (like.dim() - 1))


def _flat_rows(t: Tensor) -> Tensor:
    """Return a tensor (C, ...) of any shape as rows (C, P)."""
    return t.reshape(len(t), -1)


def products(changes: Mapping[str, Tensor]) -> Tensor:
    """Return the products of all clients' changes (C, P) with each other, (C, C) float64.

    They are on the CPU, where clusters are found.
    """
    flat = map(_flat_rows, changes.values())
    return torch.stack([(t @ t.T).double() for t in flat]).sum(0).cpu()


def similarities(memory: Params, gram: Tensor, took_part: Tensor) -> tuple[Tensor, Tensor, Params]:
    """Return the clients' similarity (C, C), who can be compared (C,), and the series after t.

    The similarity of series is -D; `edge_weights` turns it into weights.
    """
    norm, series = gram.diagonal().sqrt(), memory["series"]
    if series.shape[1] == 0:
        return 1 + gram / torch.outer(norm, norm).clamp(min=1e-12), took_part, memory
    shifted = torch.cat([series[:, 1:], norm[:, None]], dim=1)
    series = torch.where(took_part[:, None], shifted, series)
    filled = memory["filled"] + took_part
    is_known = filled >= series.shape[1]
    return -warping_distances(series), is_known, {**memory, "series": series, "filled": filled}


def warping_distances(series: Tensor) -> Tensor:
    """Return the distances of series (C, T) under dynamic time warping, (C, C).

    The root of the least sum of squared differences along a path that goes on in one series or in
    both at every step.
    """
    square = (series[:, None, :, None] - series[None, :, None, :]).square()
    clients, length = series.shape
    total = series.new_full((clients, clients, length + 1, length + 1), torch.inf)
    total[..., 0, 0] = 0
    for a, b in product(range(length), range(length)):
        previous = torch.minimum(total[..., a, b + 1], total[..., a + 1, b])
        total[..., a + 1, b + 1] = torch.minimum(previous, total[..., a, b]) + square[..., a, b]
    return total[..., -1, -1].sqrt()


def split_clusters(
    options: Thresholds,
    cluster: Tensor,
    gram: Tensor,
    took_part: Tensor,
    similarity: Tensor,
    is_known: Tensor,
) -> Tensor:
    """Return the cluster of every client (C,) after clusters that disagree are split in two.

    Args:
        options: the thresholds.
        cluster: (C,) int64 of every client so far.
        gram: (C, C) products of changes.
        took_part: (C,) bool, clients with changes.
        similarity: (C, C) of clients.
        is_known: (C,) bool, clients whose similarity is known.
    """
    new_cluster, count = cluster.clone(), int(cluster.max()) + 1
    for number in range(count):
        members = (cluster == number).nonzero()[:, 0]
        present, comparable = members[took_part[members]], members[is_known[members]]
        if len(comparable) < FEWEST or not should_split(options, gram[present][:, present]):
            continue
        part = minimum_cut(edge_weights(options, similarity[comparable][:, comparable]))
        new_cluster[comparable[part]] = int(new_cluster.max()) + 1
    return new_cluster


def edge_weights(options: Thresholds, similarity: Tensor) -> Tensor:
    """Return the weights of a cluster's edges (n, n) from the similarity of its clients.

    Weights of series are relative to the least similar pair of this cluster. A larger constant
    would cut off single clients, whatever their series.
    """
    return similarity - similarity.min() if length_of(options) else similarity


def should_split(options: Thresholds, gram: Tensor) -> bool:
    """Whether the mean change is short, and the longest one is not."""
    mean, longest = lengths(gram)
    return mean < options.epsilon1 and longest > options.epsilon2


def lengths(gram: Tensor) -> tuple[float, float]:
    """Return the length of the mean of changes and that of the longest, from their products."""
    if not len(gram):
        return math.inf, 0.0
    return float(gram.mean().clamp(min=0).sqrt()), float(gram.diagonal().max().sqrt())


def nearest_split(cluster: Tensor, gram: Tensor, took_part: Tensor) -> tuple[float, float]:
    """Return both `lengths` of the cluster with the shortest mean change, which splits first.

    NaN where no cluster has changes of enough clients to be split.

    Args:
        cluster: (C,) int64 of every client.
        gram: (C, C) products of changes.
        took_part: (C,) bool, clients with changes.
    """
    members = [((cluster == n) & took_part).nonzero()[:, 0] for n in cluster.unique().tolist()]
    change_lengths = [
        lengths(gram[cluster_members][:, cluster_members])
        for cluster_members in members
        if len(cluster_members) >= FEWEST
    ]
    return min(change_lengths) if change_lengths else (math.nan, math.nan)


def note(options: Thresholds, facts: Mapping[str, Sequence[float]]) -> str | None:
    """Return a note that no cluster was split, and how far from it the nearest one was."""
    if max(facts["clusters"]) > 1:
        return None
    summary = "no cluster was split, so clients trained as with fedavg"
    if not facts["mean_change"]:
        return summary
    return (
        f"{summary}: mean_change was {min(facts['mean_change']):.2g} or more where it was looked "
        f"at, and a split needs less than --option epsilon1 (now {options.epsilon1:.2g}), after "
        f"--option warmup rounds (now {options.warmup})"
    )


def minimum_cut(similarity: Tensor) -> Tensor:
    """Return the smaller part of the minimum cut of a complete graph, (k,) int64 ascending.

    Args:
        similarity: (n, n) weights of its edges, symmetric and not negative.
    """
    import networkx  # its 290 modules are a fiftieth of the start of every command

    rows, columns = torch.triu_indices(len(similarity), len(similarity), 1).tolist()
    graph: networkx.Graph[int] = networkx.Graph()
    # Rounding may leave a weight just below zero, which the algorithm would refuse.
    weights = similarity[rows, columns].clamp(min=0).tolist()
    graph.add_weighted_edges_from(zip(rows, columns, weights, strict=True))
    parts = [sorted(part) for part in networkx.stoer_wagner(graph)[1]]
    return torch.tensor(min(parts, key=lambda part: (len(part), part)))


def means(models: Tensor, change: Tensor, cluster: Tensor, new: Tensor, nodes: Tensor) -> Tensor:
    """Return the models of the clusters (H, ...), each the mean of its clients by training nodes.

    A new cluster begins with the model that its clients had; one whose clients were all away keeps
    it.

    Args:
        models: (G, ...) before.
        change: (C, ...) of each client from the model that it had.
        cluster: (C,) int64 that it was in.
        new: (C,) int64 that it is in, up to H - 1.
        nodes: (C,) training nodes; 0 where a client did not take part.
    """
    count = int(new.max()) + 1
    share = torch.nn.functional.one_hot(new, count).T * nodes.cpu().double()  # (H, C)
    share = share / share.sum(1, keepdim=True).clamp(min=1)
    old_cluster = torch.zeros(count, dtype=torch.int64).index_copy(0, new, cluster)
    mean: Tensor = torch.tensordot(share.to(change), change, dims=1)
    return models[old_cluster] + mean


GCFL: AnyMethod = Method(
    name="gcfl",
    title="a mean in each cluster of clients; clusters split by the direction of changes",
    reference="Xie et al., Federated graph classification over non-iid graphs, NeurIPS 2021",
    options=GCFLOptions,
    **program(train_round, setup=setup, state=OwnModel, server_model=False),
    weighs_classes=True,
    evaluate=personal(),
    own_weights=own_weights,
    note=note,
    facts={
        "clusters": "Clusters of clients; each has a model of its own.",
        "mean_change": "Length of the mean change of weights, where a cluster of three clients or "
        "more may split next; it splits below epsilon1.",
        "longest_change": "Length of the longest change of one client there; it splits above "
        "epsilon2.",
    },
    needs=Needs(optimizer="sgd", local_epochs=10),
    cautions=(
        Caution(
            "plain sgd learns slowly where features are small, as on PubMed: raise --lr there",
            of="labels of nodes",
        ),
    ),
)

GCFLPLUS: AnyMethod = replace(
    GCFL,
    name="gcflplus",
    title="a mean in each cluster of clients; clusters split by series of changes",
    options=GCFLPlusOptions,
)
