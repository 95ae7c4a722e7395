"""FED-PUB: each client starts from a mean of all models weighted by likeness, through sparse masks.

Baek, Jeong, Jin, Yoon and Hwang, "Personalized subgraph federated learning", ICML 2023, eqs. 3 to 6
and algorithms 1 and 2; where the paper is silent, the authors' published code.

A client c has weights W_c and masks M_c of the same shape. It computes with W_c * M_c, and in
evaluation with M_c set to 0 where |M_c| < l1. In a round it starts from the server's weights V_c,
takes local steps on both W_c and M_c along the gradient of

    loss + l1 |M_c|_1 + proximal * sum over tensors of |W_c - V_c|_2

and returns W_c and its functional embedding h_c: what its model, masks included, gives on a graph
that all clients share, before the classifier and its ReLU, as the mean over the nodes. The graph is
random: communities of 100 nodes, joined inside with probability .1, and normal features. The server
takes

    V_c = sum over d of a_cd W_d,   a_cd = exp(scale cos(h_c, h_d)) / sum over e of exp(...)

Masks stay with their client. All begin at 1.

What we changed: the shared graph is one and the same in all runs, and each client draws it itself,
so it does not travel. Matrices that meet the input of a layer have masks; biases have none. Means
are over the clients that answered and could train; who was away keeps its last V_c, which is the
first model for one that has not trained yet (the code: the plain mean). Clients weigh by likeness
alone, not by nodes, as in the paper. Optimizer state is kept between rounds, as in the code, that
of the masks too.

Views: `personalized` scores what a client's training left, and picks the round. There is no
`server` view: every client has a model of its own.

State of the server: a model (C, ...) for each client. State of a client: `masks/*` and `weights/*`
(C, ...), its masks and its model, and what local training keeps.

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
from silograph.core.errors import ConfigError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Shared, Stacked, State, under
from silograph.core.setting_values import lin, log
from silograph.core.work import report_rows, work_of
from silograph.evaluation.scoring import personal, received_specs
from silograph.exchange.passes import weight_specs
from silograph.federation.base import Federation, Gather
from silograph.federation.field_specs import FieldSpec, FieldSpecs
from silograph.federation.program import Call, Calls, Steps
from silograph.graph.block.block import ClientBlock
from silograph.graph.csr import CSR
from silograph.methods.base import (
    Caution,
    Method,
    MethodConfig,
    Needs,
    RoundReport,
    ServerState,
    finite_or_old,
)
from silograph.methods.local_only import begin_own, own_weights
from silograph.methods.local_training import (
    local_steps,
    report_of,
    selected,
    shared,
    stacked,
    start_from,
    state_specs,
    told,
    train_from,
    zero_weights,
)
from silograph.nn.conv import Messages, Params, convolve
from silograph.nn.conv.layers import PlainConv, operator
from silograph.nn.correction import Correction
from silograph.nn.forward import Stage, Staged, last_layer, leave
from silograph.nn.masked import Masked, Near, SparseMasks, is_mask, pruned
from silograph.nn.model import Model

# --- functional embedding ------------------------------------------------------------------------
# What a model does, as one vector: its mean output on a random graph that all clients have.
#
# Baek, Jeong, Jin, Yoon and Hwang, "Personalized subgraph federated learning", ICML 2023, section
# 3.2: models that do the same are alike, whatever their weights are. The graph has communities of
# 100 nodes, joined inside with probability .1, and normal features.
#
# The mean is taken before the last product with weights where it can be: mean over rows of
# A X W + b = (mean of A X) W + b. Then a model of one layer before its classifier is looked at
# through one row of features, and one of two through n x F features once.
#
# C: clients. n: rows of the graph. F: features. D: width of the embedding.


COMMUNITY, INSIDE = 100, 0.1  # nodes of a community of the shared graph, and their edges
SHARED_GRAPH = Key.of(0).fold("fedpub")
MOST = 1 << 22  # features of copies of the shared graph that are in memory at once


def body(model: Staged) -> tuple[Stage, ...]:
    """Return the stages before the classifier, the last one without its ReLU."""
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
        """Return who hears whom in as many copies."""
        n = len(self.x)
        adj = CSR.block_diagonal([self.adj] * clients)
        degree = adj.degree.to(self.x.dtype)[:, None]
        off = torch.arange(clients + 1, device=self.x.device) * n
        return Messages(adj, True, degree, degree, None, off, off)


def shared_graph(block: ClientBlock, communities: int) -> _SharedGraph:
    """Return the graph, drawn once for a block: the same for all clients and in all runs."""
    name = ("fedpub", communities)
    return block.origin.once(name, _SharedGraph, lambda: _drawn_graph(block, communities))


def _drawn_graph(block: ClientBlock, communities: int) -> _SharedGraph:
    assert block.adj.values is not None  # blocks carry values of the run's dtype
    dtype, device = block.adj.values.dtype, block.off.device
    n, each = communities * COMMUNITY, SHARED_GRAPH.fold("edges")
    u = torch.stack([each.fold(c).matrix(COMMUNITY, COMMUNITY) for c in range(communities)])
    part, a, b = (torch.triu(u, 1).where(u < INSIDE, 0) > 0).nonzero().T
    rows, cols = part * COMMUNITY + a, part * COMMUNITY + b
    adj = CSR.from_pairs(torch.cat([rows, cols]), torch.cat([cols, rows]), (n, n))
    noise = SHARED_GRAPH.fold("features").matrix(n, block.num_features)
    x = torch.special.ndtri(noise.clamp(min=2.0**-53)).to(device, dtype)
    return _SharedGraph(x, adj.to(device, dtype))


@dataclass(frozen=True, eq=False)
class _Means:
    """Means over the rows that enter a stage of one matrix before a plain sum.

    Attributes:
        heard: (C, I) of what the sum over neighbors makes of them.
        own: (C, I) of the rows themselves.
    """

    heard: Tensor
    own: Tensor


def functional_embedding(
    model: Staged, block: ClientBlock, weights: Params, communities: int
) -> Tensor:
    """Return what each client's model gives on the shared graph, mean over its nodes, (C, D).

    Args:
        model: of layers.
        block: the clients.
        weights: theirs, (C, ...), without masks.
        communities: of the shared graph.
    """
    graph, stages = shared_graph(block, communities), body(model)
    with torch.no_grad():
        if len(stages) == 1 and isinstance(stages[0].conv, PlainConv):
            means = _common_means(block, graph, stages[0].conv, communities)
            return _through(stages[0], means, _of_stage(weights, 0))
        many, parts = max(1, MOST // graph.x.numel()), []
        for positions in torch.arange(block.num_clients).split(many):
            mine = {name: w[positions[0] : positions[-1] + 1] for name, w in weights.items()}
            with work_of(positions):
                parts.append(_outputs(stages, graph, mine, len(positions)))
        return torch.cat(parts)


def _of_stage(weights: Mapping[str, Tensor], number: int) -> Params:
    """Return the weights of a stage by their names in it."""
    prefix = f"{number}."
    return {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}


def _outputs(
    stages: tuple[Stage, ...], graph: _SharedGraph, weights: Params, clients: int
) -> Tensor:
    """Return the mean output of models (C, ...) on copies of a graph, (C, D)."""
    messages = graph.messages(clients)
    x = graph.x.repeat(clients, 1)
    for number, stage in enumerate(stages):
        p = _of_stage(weights, number)
        if number == len(stages) - 1 and isinstance(stage.conv, PlainConv):
            report_rows(messages.off, 2 * x.shape[1] * (stage.conv.sums + 1))
            return _through(stage, _means(stage.conv, x, messages, clients), p)
        x = leave(stage, convolve(stage.conv, p, x, messages), x, None, messages)
    return x.view(clients, len(graph.x), -1).mean(1)


def _common_means(
    block: ClientBlock, graph: _SharedGraph, conv: PlainConv, communities: int
) -> _Means:
    """Return the means of the graph's features, which are the same for all, worked out once.

    They count as work of nobody, as the graph itself does.
    """
    name = ("fedpub", communities, conv)
    found = block.origin.once(name, _Means, lambda: _means(conv, graph.x, graph.messages(1), 1))
    clients = block.num_clients
    return _Means(found.heard.expand(clients, -1), found.own.expand(clients, -1))


def _means(conv: PlainConv, x: Tensor, messages: Messages, clients: int) -> _Means:
    """Return the means of the rows (C * n, I) of copies of the graph."""
    rows = x.view(clients, -1, x.shape[1])
    own = rows.mean(1)
    if not conv.sums:
        return _Means(own, own)
    matrix, n = operator(conv.scales, messages), rows.shape[1]
    assert matrix.values is not None  # an operator has some
    share = matrix.values.new_zeros(len(x)).index_add_(0, matrix.indices.long(), matrix.values) / n
    return _Means(torch.einsum("n,cni->ci", share[:n], rows), own)


def _through(stage: Stage, means: _Means, p: Params) -> Tensor:
    """Return the mean of what a stage without ReLU gives, (C, O), from those that enter it."""
    off = torch.arange(len(means.own) + 1, device=means.own.device)
    one = means.own.new_ones(len(means.own), 1)
    nobody = CSR(torch.zeros_like(off), off[:0], None, len(one))
    messages = Messages(nobody, True, one, one, None, off, off)
    out = stage.conv.finish(p, means.own, stage.conv.map(p, means.heard, off), messages)
    return leave(stage, out, means.own, None, messages)


NotNegative = Annotated[float, Field(ge=0)]


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
        default=1e-3,
        metadata={
            "help": "weight of the masks' L1 norm, and what a mask's entry must reach to count",
            "read_if": {"masks": (True,)},
            "tune": log(1e-5, 1e-1),
        },
    )
    proximal: NotNegative = field(
        default=1e-3,
        metadata={
            "help": "weight of the distance from the weights that a round began with",
            "tune": log(1e-5, 1e-1),
        },
    )
    masks: bool = field(default=True, metadata={"help": "whether weights have masks"})
    communities: Annotated[int, Field(ge=1)] = field(
        default=5, metadata={"help": "communities of 100 nodes of the shared random graph"}
    )


def corrections(options: FedPubOptions) -> tuple[Correction, ...]:
    """Return what is added to the gradient of every local step."""
    near = Near(options.proximal)
    return (SparseMasks(options.l1), near) if options.masks else (near,)


def masked(cfg: MethodConfig[FedPubOptions]) -> MethodConfig[FedPubOptions]:
    """Return the config of a model with masks, or as it is where there are none.

    Raises:
        ConfigError: a model without layers that could be looked at.
    """
    if not isinstance(cfg.model, Model):
        raise ConfigError(
            f"expected a model of layers for fedpub, whose masks and embeddings are theirs, got "
            f"{cfg.model.noun}: use one of silograph's models"
        )
    if not cfg.options.masks:
        return cfg
    return replace(cfg, model=Masked(cfg.model, cfg.options.l1))


def check(cfg: MethodConfig[FedPubOptions]) -> None:
    """Raise `ConfigError` for a model without layers."""
    masked(cfg)


def begin_masks(
    cfg: MethodConfig[FedPubOptions], block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Set up the state with the first model and masks of ones. In: `weights/*`. Out: nothing."""
    new, reply = begin_own(cfg, block, state, inbox, key)
    model = masked(cfg).model
    zero = zero_weights(model, block)
    masks = stacked("masks", {name: w + 1 for name, w in zero.items() if is_mask(name)})
    memory = stacked("optimizer", cfg.optimizer.init(zero)) if cfg.keep_optimizer else {}
    return {**new, **masks, **memory}, reply


def train_masked(
    cfg: MethodConfig[FedPubOptions], block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Train weights and masks, keep masks and model; see what it does on the shared graph.

    In: `weights/*` (C, ...). Out: the same, `embedding` (C, D), `sparsity` (C,) share of masks'
    entries that do not count, `nodes` (C,) training nodes, `loss` (C,).
    """
    own = masked(cfg)
    masks = {name: Stacked(t) for name, t in under("masks", state).items()}
    fitted, new = train_from(own, block, state, {**start_from("weights", inbox), **masks}, key)
    weights = fitted.tensors
    kept = {name: w for name, w in weights.items() if is_mask(name)}
    plain = {name: w for name, w in weights.items() if not is_mask(name)}
    cut = {name: pruned(mask, cfg.options.l1) for name, mask in kept.items()}
    sparse = sparsity(cut, cfg.options.l1, fitted.loss)
    mine = own.model.products_(plain, cut) if isinstance(own.model, Masked) else plain
    reply = stacked("weights", plain) | {
        "embedding": Stacked(embedding_of(cfg, block, mine)),
        "sparsity": Stacked(sparse),
        **told(fitted, block),
    }
    own_masks = finite_or_old(stacked("masks", kept), state)
    return {**new, **own_masks, **stacked("weights", mine)}, reply


def sparsity(masks: Mapping[str, Tensor], least: float, like: Tensor) -> Tensor:
    """Return which share of each client's masks does not reach the least value, (C,).

    Args:
        masks: (C, ...) each, pruned.
        least: that value.
        like: of the dtype that is wanted, (C,).
    """
    if not masks or least == 0:  # all reach 0
        return torch.zeros_like(like)
    reach = torch.zeros_like(like)
    for mask in masks.values():
        reach += counted(mask).to(like)
    return 1 - reach / sum(mask[0].numel() for mask in masks.values())


def counted(rows: Tensor) -> Tensor:
    """Return how many numbers of each row (C, ...) are not 0, (C,) int64."""
    there = rows != 0
    if rows.device.type != "cpu":
        return there.flatten(1).sum(1)
    # torch's sums of bool take 5 times as long (10 clients) or 100 times (50).
    found = [np.count_nonzero(row) for row in there.numpy()]
    return torch.tensor(found, dtype=torch.int64)


def embedding_of(cfg: MethodConfig[FedPubOptions], block: ClientBlock, weights: Params) -> Tensor:
    """Return what each client's model gives on the shared graph, mean over its nodes, (C, D)."""
    assert cfg.model.staged is not None  # see `masked`
    return functional_embedding(cfg.model.staged, block, weights, cfg.options.communities)


def init(
    fed: Federation, cfg: MethodConfig[FedPubOptions], weights: Params, key: Key
) -> ServerState:
    """Send the first model; every client starts from it."""
    del cfg
    fed.call(begin_masks, shared("weights", weights), what=Kind.WEIGHTS, key=key)
    clients = len(fed.ids)
    return ServerState(None, {n: w.expand(clients, *w.shape).clone() for n, w in weights.items()})


def fit_round(
    fed: Federation, cfg: MethodConfig[FedPubOptions], state: ServerState, t: int, key: Key
) -> tuple[ServerState, RoundReport]:
    """Train at the selected clients; give each of them a mean weighted by likeness."""
    chosen = selected(fed, cfg, t, key)
    starts = state.memory
    if chosen != fed.ids:
        called = torch.tensor([fed.ids.index(name) for name in chosen])
        starts = {name: w[called] for name, w in starts.items()}
    reply = fed.call(
        train_masked,
        stacked("weights", starts),
        what=Kind.WEIGHTS,
        key=key.fold("train", t),
        to=chosen,
        reduce=Gather(
            *("nodes", "loss", "sparsity", "embedding", *received_specs(cfg)),
            *(f"weights/{n}" for n in state.memory),
        ),
    )
    found = under("by_client", reply)
    sent = [found["embedding"], *(found[f"weights/{name}"] for name in state.memory)]
    sound = torch.stack([_finite(t.reshape(len(t), -1)) for t in sent]).all(0)
    gives = found["answered"] & (found["nodes"] > 0) & sound  # who diverged enters no mean
    alike = cosines(found["embedding"], gives)
    share = shares(alike, gives, cfg.options.scale)
    memory = {
        name: _where(gives, mean_of(share, gives, found[f"weights/{name}"]), w)
        for name, w in state.memory.items()
    }
    figures = {"own_share": share.diagonal(), "similarity": to_others(alike, gives)}
    figures |= {"sparsity": found["sparsity"]}
    facts = {name: float(t[gives].mean()) for name, t in figures.items()}
    client_facts = {name: t.where(gives, torch.nan) for name, t in figures.items()}
    report = report_of(chosen, found, gives, facts, client_facts, observed=cfg.observed)
    return ServerState(None, memory), report


def cosines(embedding: Tensor, gives: Tensor) -> Tensor:
    """Return how alike the embeddings (C, D) of those that give are (C, C) float64, else 0."""
    h = normalize(embedding.double().where(gives[:, None], 0.0), dim=1)
    return h @ h.T


def to_others(alike: Tensor, gives: Tensor) -> Tensor:
    """Return each client's mean cosine with the others that give (C,), NaN where there are none."""
    return (alike.sum(1) - alike.diagonal()) / (int(gives.sum()) - 1 or torch.nan)


def shares(alike: Tensor, gives: Tensor, scale: float) -> Tensor:
    """Return what each client takes of each other's model, (C, C) float64; rows add up to 1.

    Args:
        alike: (C, C) cosines.
        gives: (C,) bool whose models there are; of the others nobody takes anything.
        scale: of the cosine.
    """
    logit = (scale * alike).masked_fill(~gives, -torch.inf)
    return torch.softmax(logit, dim=1).nan_to_num(0.0)


def mean_of(share: Tensor, gives: Tensor, models: Tensor) -> Tensor:
    """Return each client's mean of models (C, ...), (C, ...)."""
    there = _where(gives, models, models.new_zeros(()))
    mean: Tensor = torch.tensordot(share.to(models.dtype), there, dims=1)
    return mean


def _where(gives: Tensor, models: Tensor, other: Tensor) -> Tensor:
    """Return models (C, ...) of the clients that give (C,), others of the others; mostly none."""
    if bool(gives.all()):
        return models
    return torch.where(gives.view(-1, *[1] * (models.dim() - 1)), models, other)


def _finite(rows: Tensor) -> Tensor:
    """Return which rows (C, P) are finite, (C,); their sums say it of nearly all, in one pass."""
    found = rows.sum(1).isfinite()
    doubtful = (~found).nonzero()[:, 0]
    return found.index_copy(0, doubtful, rows[doubtful].isfinite().all(1))


def round_steps(cfg: MethodConfig[FedPubOptions], t: int, key: Key) -> Steps:
    """Return the call of `fit_round`."""
    weights, staged = weight_specs(cfg.model, Stacked), masked(cfg).model.staged
    assert staged is not None  # see `masked`
    gives = {
        **weights,
        "embedding": FieldSpec(Stacked, (body(staged)[-1].outputs,)),
        "sparsity": FieldSpec(Stacked, low=0, high=1),
    }
    return local_steps(cfg, train_masked, weights, gives, Kind.WEIGHTS, t, key)


def kept(cfg: MethodConfig[FedPubOptions]) -> FieldSpecs:
    """Return what a client keeps between rounds."""
    own = masked(cfg)
    shapes = {name: s for name, s in own.model.weight_shapes.items() if is_mask(name)}
    masks = {f"masks/{name}": FieldSpec(Stacked, shape) for name, shape in shapes.items()}
    return {**state_specs(own), **weight_specs(cfg.model, Stacked), **masks}


CALLS = Calls(
    setup=lambda cfg, key: Call(begin_masks, Kind.WEIGHTS, key, weight_specs(cfg.model, Shared)),
    round=round_steps,
    state=kept,
    server_model=False,
)

FEDPUB = Method(
    name="fedpub",
    title="means of models weighted by what they do on a random graph, through sparse masks",
    reference="Baek et al., Personalized subgraph federated learning, ICML 2023",
    options=FedPubOptions,
    init=init,
    round=fit_round,
    check=check,
    evaluate=personal(),
    needs=Needs(keep_optimizer=True, corrections=corrections),
    calls=CALLS,
    own_weights=own_weights,
    cautions=(
        Caution("far behind local on PubMed, in 100 rounds, in which masks hardly become sparse"),
    ),
    ratings=False,
)
