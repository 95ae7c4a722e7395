"""FED-PUB: each client starts from a mean of models weighted by similarity, through sparse masks.

Baek, Jeong, Jin, Yoon and Hwang, "Personalized subgraph federated learning", ICML 2023, eqs. 3 to 6
and algorithms 1 and 2; where the paper is silent, the authors' published code.

The paper's symbols: θ is W here, θ̄ is V, μ is M, α_ij is a_cd, τ is `scale`, λ1 is `l1` and λ2 is
`proximal`.

A client c has weights W_c and masks M_c of the same shape. It computes with W_c * M_c, and in
evaluation with M_c set to 0 where |M_c| < l1. In a round it starts from the server's weights V_c,
takes local steps on both W_c and M_c along the gradient of

    loss + l1 |M_c|_1 + proximal * sum over tensors of |W_c - V_c|_2

and returns W_c and its functional embedding h_c: what its model, masks included, gives on a graph
that all clients share, before the classifier and its ReLU, as the mean over the nodes. The graph is
random: communities of 100 nodes, joined inside with probability .1, and normal features. The server
takes

    V_c = sum over d of a_cd W_d,   a_cd = exp(scale cos(h_c, h_d)) / sum over e of exp(...)

Masks stay with their client. All begin at 1. The defaults of l1 and proximal are 0, as in the
authors' code, whose penalties are of `state_dict()` tensors and have no gradient; the paper names
.001.

What we changed: the shared graph is one and the same in all runs, and each client draws it itself,
so it does not travel. Matrices that meet the input of a layer have masks; biases have none. Means
are over the clients that answered and could train; who was away keeps its last V_c, which is the
first model for one that has not trained yet (the code: the plain mean). Clients weigh by similarity
alone, not by nodes, as in the paper. Optimizer state is kept between rounds, as in the code, that
of the masks too.

Views: `personalized` scores what a client's training left, and picks the round. There is no
`server` view: every client has a model of its own.

State of the server: a model (C, ...) for each client. State of a client: `masks/*` and `weights/*`
(C, ...), M_c and W_c * M_c, and the state of local training.

C: clients. n: rows. D: width of the embedding.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor
from torch.nn.functional import normalize

from silograph.core.config import STRICT
from silograph.core.errors import ConfigError, mistake
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Patched, Stacked, stack
from silograph.core.setting_values import choice, lin
from silograph.core.work import report_rows, work_of
from silograph.evaluation.scoring import personal, received_specs
from silograph.federation.base import positions_of
from silograph.federation.field_specs import LOSS, TRAINED, FieldSpec, FieldSpecs
from silograph.federation.messages import Empty
from silograph.graph.block.block import ClientBlock
from silograph.graph.csr import CSR
from silograph.methods.base import (
    Caution,
    Method,
    MethodConfig,
    Needs,
    RoundReport,
    ServerState,
    keep_previous_if_not_finite,
)
from silograph.methods.local_only import InitialModel, begin_with, own_weights
from silograph.methods.local_training import (
    LocalModel,
    each_as_base,
    exact_weights,
    sampler_specs,
    zero_weights,
)
from silograph.methods.ops import Clients, Server, calls, op, program
from silograph.nn.conv import Messages, Params, PlainConv, convolve, operator
from silograph.nn.correction import Correction
from silograph.nn.forward import Stage, Staged, last_layer, leave
from silograph.nn.masked import Masked, NearStart, SparseMasks, is_mask, prune_mask
from silograph.nn.model import Model

# --- functional embedding ------------------------------------------------------------------------
# What a model does, as one vector: its mean output on a random graph that all clients have.
#
# Baek, Jeong, Jin, Yoon and Hwang, "Personalized subgraph federated learning", ICML 2023, section
# 3.2: models that do the same are alike, whatever their weights are.
#
# The mean is taken before the last product with weights where it can be: mean over rows of
# A X W + b = (mean of A X) W + b. So a model with one layer before its classifier costs a product
# with one row of features, and one with two layers one pass over n x F features.
#
# C: clients. n: rows of the graph. F: features. D: width of the embedding.


COMMUNITY_SIZE, EDGE_PROBABILITY = 100, 0.1  # nodes of a community, and edges inside it
SHARED_GRAPH = Key.of(0).fold("fedpub")
MAX_FEATURES = 1 << 22  # features of copies of the shared graph that are in memory at once


def stages_before_classifier(model: Staged) -> tuple[Stage, ...]:
    """Return the stages before the classifier, the last one without its ReLU.

    Of a model of one layer, that layer.
    """
    stages = model.stages[: max(last_layer(model), 1)]
    return (*stages[:-1], replace(stages[-1], relu=False))


@dataclass(frozen=True, eq=False)
class _SharedGraph:
    """A random graph that all clients have.

    Attributes:
        x: (n, F) normal features.
        adj: (n, n) edges inside communities, values 1.
    """

    x: Tensor
    adj: CSR

    def messages(self, clients: int) -> Messages:
        """Return the messages in this many copies of the graph."""
        n = len(self.x)
        adj = CSR.block_diagonal([self.adj] * clients)
        degree = adj.degree.to(self.x.dtype)[:, None]
        off = torch.arange(clients + 1, device=self.x.device) * n
        return Messages(
            adj=adj,
            symmetric=True,
            sender=degree,
            receiver=degree,
            own=None,
            sender_off=off,
            off=off,
        )


def shared_graph(block: ClientBlock, communities: int) -> _SharedGraph:
    """Return the graph, drawn once for a block: the same for all clients and in all runs."""
    name = ("fedpub", communities)
    return block.origin.once(name, _SharedGraph, lambda: _draw_graph(block, communities))


def _draw_graph(block: ClientBlock, communities: int) -> _SharedGraph:
    assert block.adj.values is not None  # blocks carry values of the run's dtype
    dtype, device = block.adj.values.dtype, block.off.device
    n, edge_key = communities * COMMUNITY_SIZE, SHARED_GRAPH.fold("edges")
    u = torch.stack(
        [edge_key.fold(c).matrix(COMMUNITY_SIZE, COMMUNITY_SIZE) for c in range(communities)]
    )
    part, a, b = (torch.triu(u, 1).where(u < EDGE_PROBABILITY, 0) > 0).nonzero().T
    rows, cols = part * COMMUNITY_SIZE + a, part * COMMUNITY_SIZE + b
    adj = CSR.from_pairs(torch.cat([rows, cols]), torch.cat([cols, rows]), (n, n))
    uniform = SHARED_GRAPH.fold("features").matrix(n, block.num_features)
    x = torch.special.ndtri(uniform.clamp(min=2.0**-53)).to(device, dtype)
    return _SharedGraph(x, adj.to(device, dtype))


@dataclass(frozen=True, eq=False)
class _Means:
    """Means over nodes of A X and of X, for the input X of a stage.

    Attributes:
        neighbor_sum: (C, I) of A X; of X for a stage that does not sum over neighbors.
        own: (C, I) of X.
    """

    neighbor_sum: Tensor
    own: Tensor


def functional_embedding(
    model: Staged, block: ClientBlock, weights: Params, communities: int
) -> Tensor:
    """Return the mean output (C, D) of each client's model over the nodes of the shared graph.

    Args:
        model: of layers.
        block: the clients.
        weights: theirs, (C, ...), without masks.
        communities: of the shared graph.
    """
    graph, stages = shared_graph(block, communities), stages_before_classifier(model)
    with torch.no_grad():
        if len(stages) == 1 and isinstance(stages[0].conv, PlainConv):
            means = _common_means(block, graph, stages[0].conv, communities)
            return _mean_output_of_stage(stages[0], means, _stage_weights(weights, 0))
        batch_size, parts = max(1, MAX_FEATURES // graph.x.numel()), []
        for positions in torch.arange(block.num_clients).split(batch_size):
            batch_weights = {
                name: w[positions[0] : positions[-1] + 1] for name, w in weights.items()
            }
            with work_of(positions):
                parts.append(_mean_outputs(stages, graph, batch_weights, len(positions)))
        return torch.cat(parts)


def _stage_weights(weights: Mapping[str, Tensor], number: int) -> Params:
    """Return the weights of a stage by their names in it."""
    prefix = f"{number}."
    return {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}


def _mean_outputs(
    stages: tuple[Stage, ...], graph: _SharedGraph, weights: Params, clients: int
) -> Tensor:
    """Return the mean output of models (C, ...) on copies of a graph, (C, D)."""
    messages = graph.messages(clients)
    x = graph.x.repeat(clients, 1)
    for number, stage in enumerate(stages):
        p = _stage_weights(weights, number)
        if number == len(stages) - 1 and isinstance(stage.conv, PlainConv):
            report_rows(messages.off, 2 * x.shape[1] * (stage.conv.sums + 1))
            return _mean_output_of_stage(stage, _compute_means(stage.conv, x, messages, clients), p)
        x = leave(stage, convolve(stage.conv, p, x, messages), x, None, messages)
    return x.view(clients, len(graph.x), -1).mean(1)


def _common_means(
    block: ClientBlock, graph: _SharedGraph, conv: PlainConv, communities: int
) -> _Means:
    """Return the means of the graph's features, which all clients share, computed once.

    They count as work of no client, as the graph itself does.
    """
    name = ("fedpub", communities, conv)
    means = block.origin.once(
        name, _Means, lambda: _compute_means(conv, graph.x, graph.messages(1), 1)
    )
    clients = block.num_clients
    return _Means(means.neighbor_sum.expand(clients, -1), means.own.expand(clients, -1))


def _compute_means(conv: PlainConv, x: Tensor, messages: Messages, clients: int) -> _Means:
    """Return the means of the rows (C * n, I) of copies of the graph."""
    rows = x.view(clients, -1, x.shape[1])
    own = rows.mean(1)
    if not conv.sums:
        return _Means(own, own)
    matrix, n = operator(conv.scales, messages), rows.shape[1]
    assert matrix.values is not None  # an operator has some
    row_weights = (
        matrix.values.new_zeros(len(x)).index_add_(0, matrix.indices.long(), matrix.values) / n
    )
    return _Means(torch.einsum("n,cni->ci", row_weights[:n], rows), own)


def _mean_output_of_stage(stage: Stage, means: _Means, p: Params) -> Tensor:
    """Return the mean of what a stage without ReLU gives, (C, O), from those that enter it."""
    off = torch.arange(len(means.own) + 1, device=means.own.device)
    ones = means.own.new_ones(len(means.own), 1)
    no_edges = CSR(torch.zeros_like(off), off[:0], None, len(ones))
    messages = Messages(
        adj=no_edges,
        symmetric=True,
        sender=ones,
        receiver=ones,
        own=None,
        sender_off=off,
        off=off,
    )
    out = stage.conv.finish(p, means.own, stage.conv.map(p, means.neighbor_sum, off), messages)
    return leave(stage, out, means.own, None, messages)


NotNegative = Annotated[float, Field(ge=0)]
PENALTIES = choice(0.0, 1e-4, 1e-3, 1e-2)


@checked_dataclass(frozen=True, config=STRICT)
class FedPubOptions:
    """The help texts are the documentation of the fields."""

    scale: NotNegative = field(
        default=3.0,
        metadata={
            "help": "how much more a client takes of models like its own; 0: of all the same",
            "tune": lin(0.0, 20.0),
        },
    )
    l1: NotNegative = field(
        default=0.0,
        metadata={
            "help": "weight of the masks' L1 norm, and what a mask's entry must reach to count",
            "read_if": {"masks": (True,)},
            "tune": PENALTIES,
        },
    )
    proximal: NotNegative = field(
        default=0.0,
        metadata={
            "help": "weight of the distance from the weights that a round began with",
            "tune": PENALTIES,
        },
    )
    masks: bool = field(default=True, metadata={"help": "whether weights have masks"})
    communities: Annotated[int, Field(ge=1)] = field(
        default=5, metadata={"help": "communities of 100 nodes of the shared random graph"}
    )


def corrections(options: FedPubOptions) -> tuple[Correction, ...]:
    """Return what is added to the gradient of the loss in every local step.

    l1 |M_c|_1 by `SparseMasks`, proximal * sum over tensors of |W_c - V_c|_2 by `NearStart`
    (gradients in nn/masked.py; compiled: nn/kernels/masks.py). W_c * M_c:
    `MaskedConv.masked_weights`.
    """
    proximal = (NearStart(options.proximal),) if options.proximal else ()
    return (SparseMasks(options.l1), *proximal) if options.masks else proximal


def with_masks(cfg: MethodConfig[FedPubOptions]) -> MethodConfig[FedPubOptions]:
    """Return the config with a masked model, or unchanged if the options have no masks.

    Raises:
        ConfigError: a model without layers that could be looked at.
    """
    if not isinstance(cfg.model, Model):
        raise ConfigError(
            f"expected a model of layers for fedpub, whose masks and embeddings are theirs, got "
            f"{cfg.model.noun}: use one of silograph's models",
            **mistake("conflicting-options", ["method", "model"]),
        )
    if not cfg.options.masks:
        return cfg
    return replace(cfg, model=Masked(cfg.model, cfg.options.l1))


def check(cfg: MethodConfig[FedPubOptions]) -> None:
    """Raise `ConfigError` for a model without layers."""
    with_masks(cfg)


# --- messages and state --------------------------------------------------------------------------


def masks_of(cfg: MethodConfig[FedPubOptions]) -> FieldSpecs:
    """Return the specs of the masks, one number for each entry of a weight."""
    shapes = with_masks(cfg).model.weight_shapes
    return {f"masks/{n}": FieldSpec(Stacked, shape) for n, shape in shapes.items() if is_mask(n)}


def embedding_spec(cfg: MethodConfig[FedPubOptions]) -> FieldSpec:
    """Return the spec of embeddings: as wide as what the last layer takes."""
    staged = with_masks(cfg).model.staged
    assert staged is not None  # see `with_masks`
    return FieldSpec(Stacked, (stages_before_classifier(staged)[-1].outputs,))


@dataclass(frozen=True)
class ClientState:
    """A client's own model.

    Attributes:
        weights: (C, ...) W_c * M_c, weights times masks.
        masks: (C, ...) M_c before small entries are left out.
    """

    weights: Annotated[Mapping[str, Stacked], exact_weights(Stacked)]
    masks: Annotated[Mapping[str, Stacked], masks_of]


@dataclass(frozen=True)
class PersonalModels:
    """V_c, the model that each client starts from, (C, ...)."""

    weights: Annotated[Mapping[str, Stacked | Patched], exact_weights(Stacked)]


@dataclass(frozen=True)
class TrainedModels:
    """W_c after training, without masks; else as `LocalModel`.

    Attributes:
        embedding: (C, D) mean output of each model over the nodes of the shared random graph.
        sparsity: (C,) share of the masks' entries that do not count.
    """

    weights: Annotated[Mapping[str, Stacked], exact_weights(Stacked)]
    embedding: Annotated[Stacked, embedding_spec]
    sparsity: Annotated[Stacked, FieldSpec(Stacked, low=0, high=1)]
    nodes: Annotated[Stacked, TRAINED]
    loss: Annotated[Stacked, LOSS]
    received: Annotated[Mapping[str, Stacked], received_specs]
    sampler: Annotated[Mapping[str, Stacked], sampler_specs]


# --- clients -------------------------------------------------------------------------------------


@op(Kind.WEIGHTS)
def begin_masks(
    clients: Clients[FedPubOptions], _state: Empty, request: InitialModel
) -> tuple[ClientState, Empty]:
    """Set up the clients with the first model and masks of ones."""
    model = begin_with(clients, request, with_masks(clients.cfg))
    zeros = zero_weights(with_masks(clients.cfg).model, clients.block)
    masks = {name: w + 1 for name, w in zeros.items() if is_mask(name)}
    return ClientState(model.weights, stack(masks)), Empty()


@op(Kind.WEIGHTS)
def train_masked(
    clients: Clients[FedPubOptions], state: ClientState, request: PersonalModels
) -> tuple[ClientState, TrainedModels]:
    """Train weights and masks, keep masks and model; embed the model by the shared graph."""
    cfg, masked_cfg = clients.cfg, with_masks(clients.cfg)
    fitted = clients.fit({**each_as_base(request.weights), **state.masks}, masked_cfg)
    masks = {name: w for name, w in fitted.tensors.items() if is_mask(name)}
    weights = {name: w for name, w in fitted.tensors.items() if not is_mask(name)}
    pruned = {name: prune_mask(mask, cfg.options.l1) for name, mask in masks.items()}
    sparsities = sparsity(pruned, cfg.options.l1, fitted.loss)
    trained = LocalModel.of(fitted, clients.block)
    masked_weights = (  # overwrites pruned, so after sparsity
        masked_cfg.model.products_(weights, pruned)
        if isinstance(masked_cfg.model, Masked)
        else weights
    )
    reply = TrainedModels(
        stack(weights),
        Stacked(embedding_of(cfg, clients.block, masked_weights)),
        Stacked(sparsities),
        trained.nodes,
        trained.loss,
        trained.received,
        trained.sampler,
    )
    own_masks = keep_previous_if_not_finite(stack(masks), state.masks)
    return ClientState(stack(masked_weights), own_masks), reply


def sparsity(masks: Mapping[str, Tensor], least: float, like: Tensor) -> Tensor:
    """Return the share of each client's mask entries below the least value, (C,).

    Args:
        masks: (C, ...) each, pruned.
        least: that value.
        like: (C,) of the dtype of the result.
    """
    if not masks or least == 0:  # all reach 0
        return torch.zeros_like(like)
    num_counted = torch.zeros_like(like)
    for mask in masks.values():
        num_counted += count_nonzero(mask).to(like)
    return 1 - num_counted / sum(mask[0].numel() for mask in masks.values())


def count_nonzero(rows: Tensor) -> Tensor:
    """Count the numbers of each row (C, ...) that are not 0, (C,) int64."""
    is_nonzero = rows != 0
    if rows.device.type != "cpu":
        return is_nonzero.flatten(1).sum(1)
    # torch's sums of bool take 5 times as long (10 clients) or 100 times (50).
    counts = [np.count_nonzero(row) for row in is_nonzero.numpy()]
    return torch.tensor(counts, dtype=torch.int64)


def embedding_of(cfg: MethodConfig[FedPubOptions], block: ClientBlock, weights: Params) -> Tensor:
    """Return the mean output (C, D) of each client's model over the nodes of the shared graph."""
    assert cfg.model.staged is not None  # see `with_masks`
    return functional_embedding(cfg.model.staged, block, weights, cfg.options.communities)


# --- server --------------------------------------------------------------------------------------


@calls(begin_masks)
def setup(server: Server[FedPubOptions], weights: Params) -> ServerState:
    """Send the first model; every client starts from it."""
    server.call(begin_masks, InitialModel(weights))
    clients = len(server.fed.ids)
    return ServerState(None, {n: w.expand(clients, *w.shape).clone() for n, w in weights.items()})


@calls(train_masked)
def train_round(
    server: Server[FedPubOptions], state: ServerState
) -> tuple[ServerState, RoundReport]:
    """Train at the selected clients; give each of them a mean weighted by similarity."""
    client_ids, start_models = server.select(), state.memory  # V_c of each client
    if client_ids != server.fed.ids:
        positions = positions_of(server.fed.ids, client_ids)
        start_models = {name: w[positions] for name, w in start_models.items()}
    by_client = server.gather(train_masked, PersonalModels(stack(start_models)), to=client_ids)
    sent_tensors = [
        by_client["embedding"],
        *(by_client[f"weights/{name}"] for name in state.memory),
    ]
    is_finite = torch.stack([_finite_rows(t.reshape(len(t), -1)) for t in sent_tensors]).all(0)
    is_averaged = (
        by_client["answered"] & (by_client["nodes"] > 0) & is_finite
    )  # who diverged enters no mean
    similarity = cosines(by_client["embedding"], is_averaged)
    mixing = mixing_weights(similarity, is_averaged, server.options.scale)
    memory = {
        name: _averaged_or(
            is_averaged, mean_of(mixing, is_averaged, by_client[f"weights/{name}"]), w
        )
        for name, w in state.memory.items()
    }
    figures = {
        "own_share": mixing.diagonal(),
        "similarity": mean_similarity(similarity, is_averaged),
    }
    figures |= {"sparsity": by_client["sparsity"]}
    facts = {name: float(t[is_averaged].mean()) for name, t in figures.items()}
    client_facts = {name: t.where(is_averaged, torch.nan) for name, t in figures.items()}
    report = server.report(client_ids, by_client, is_averaged, facts, client_facts)
    return ServerState(None, memory), report


def cosines(embedding: Tensor, is_averaged: Tensor) -> Tensor:
    """Return cos(h_c, h_d), (C, C) float64, of the embeddings (C, D); 0 for who is not averaged."""
    h = normalize(embedding.double().where(is_averaged[:, None], 0.0), dim=1)
    return h @ h.T


def mean_similarity(similarity: Tensor, is_averaged: Tensor) -> Tensor:
    """Return each client's mean cosine with other averaged clients (C,), NaN without any."""
    return (similarity.sum(1) - similarity.diagonal()) / (int(is_averaged.sum()) - 1 or torch.nan)


def mixing_weights(similarity: Tensor, is_averaged: Tensor, scale: float) -> Tensor:
    """Return a_cd, the weight of model d in the mean of client c, (C, C) float64.

    Rows add up to 1.

    Args:
        similarity: (C, C) cosines.
        is_averaged: (C,) bool, clients whose models are averaged; the others have share 0.
        scale: of the cosine.
    """
    logit = (scale * similarity).masked_fill(~is_averaged, -torch.inf)
    return torch.softmax(logit, dim=1).nan_to_num(0.0)


def mean_of(mixing: Tensor, is_averaged: Tensor, models: Tensor) -> Tensor:
    """Return V_c = sum over d of a_cd W_d, (C, ...), from models W_d (C, ...)."""
    averaged_models = _averaged_or(is_averaged, models, models.new_zeros(()))
    mean: Tensor = torch.tensordot(mixing.to(models.dtype), averaged_models, dims=1)
    return mean


def _averaged_or(is_averaged: Tensor, models: Tensor, other: Tensor) -> Tensor:
    """Return models (C, ...) of averaged clients, and `other` for the rest, mostly nobody."""
    if bool(is_averaged.all()):
        return models
    return torch.where(is_averaged.view(-1, *[1] * (models.dim() - 1)), models, other)


def _finite_rows(rows: Tensor) -> Tensor:
    """Return which rows (C, P) are finite, (C,); their sums decide nearly all, in one pass."""
    is_finite = rows.sum(1).isfinite()
    unclear = (~is_finite).nonzero()[:, 0]
    return is_finite.index_copy(0, unclear, rows[unclear].isfinite().all(1))


FEDPUB = Method(
    name="fedpub",
    title="means of models weighted by what they do on a random graph, through sparse masks",
    reference="Baek et al., Personalized subgraph federated learning, ICML 2023",
    options=FedPubOptions,
    **program(train_round, setup=setup, state=ClientState, trained=with_masks, server_model=False),
    check=check,
    weighs_classes=True,
    evaluate=personal(),
    needs=Needs(keep_optimizer=True, corrections=corrections),
    own_weights=own_weights,
    facts={
        "own_share": "Weight of a client's own model in its mean, mean over clients.",
        "similarity": "Cosine of a client's outputs on the random graph with the others', mean "
        "over clients.",
        "sparsity": "Share of the masks' entries that do not count, mean over clients.",
    },
    cautions=(
        Caution(
            "behind local on PubMed (81 against 85 % with 10 clients, METIS, 100 rounds), and 6 to "
            "39 points behind fedopt on Cora (benchmarks/defaults/beside_fedopt.md)"
        ),
    ),
    ratings=False,
)
