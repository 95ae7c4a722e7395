"""FedSage+: clients generate the neighbors that they cannot see, then train by FedAvg.

Zhang, Yang, Li, Sun and Yiu, "Subgraph federated learning with missing neighbor generation",
NeurIPS 2021, algorithm 1; the generator is `silograph.methods.fedsage`.

Before round 1, at every client:

    1. hide each node with probability `hidden`; take `generator_epochs` steps on what the graph
       without them says of them
    2. take `cross_epochs` more; in each of them every client shows the rows x that it generates to
       all others, who answer 2 (x - x_u), u their node that is nearest. That is the gradient of
       min over u of |x - x_u|^2, which all others' sums are added to the client's own loss
    3. generate neighbors of all nodes on the whole graph, and keep them

Then rounds are FedAvg's, on graphs with the generated neighbors.

`fedsage_local` leaves step 2 out (`cross_epochs=0`), so no row leaves its silo. What the paper
calls FedSage has no generator: `--method fedavg --model sage`.

What we changed: generated rows travel, where the paper sends the generator and what enters it;
gradients are the same by the chain rule. Noise is drawn for each generated neighbor, and all of
them go through one map. The degree predictor has no activation and begins at 0; the features have
none. The generator follows no classification loss. Nodes are compared with all nodes of another
client, not with a sample. Any model may be trained; the paper's is `sage`. By default models are
trained as by FedOpt, with a step of Adam at the server.

The answers reveal real rows, exactly if there are two clients (docs/explanation/privacy.md).

C: clients. n: rows. k: generated rows. F: features.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from silograph.core.config import STRICT
from silograph.core.errors import ConfigError, ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Ragged, Shared, Stacked, offsets, ranges, stack
from silograph.core.setting_values import lin, log
from silograph.core.work import report_each, report_entries, report_rows
from silograph.evaluation.scoring import OwnGraph
from silograph.evaluation.views import MENDED
from silograph.exchange.collect import generated_specs
from silograph.exchange.rows import Publish
from silograph.federation.field_specs import FieldSpec, FieldSpecs
from silograph.federation.messages import Empty, is_own_field, to_payload
from silograph.federation.ops import CallContext, for_each
from silograph.federation.program import OtherNetwork
from silograph.graph.block.block import ClientBlock, SparseRows, dense_rows, neighbor_keys
from silograph.graph.csr import CSR
from silograph.methods.base import Caution, Method, MethodConfig, ServerState, preset
from silograph.methods.fedavg import FEDOPT, average_and_step
from silograph.methods.ops import Clients, Server, calls, op, program
from silograph.nn.conv import (
    SAGE,
    Messages,
    Params,
    convolve,
    glorot,
    internal_messages,
    rooted_init,
)
from silograph.nn.fit import dtype_of
from silograph.nn.optim import Adam
from silograph.nn.segment import (
    gradients,
    segment_bias,
    segment_linear,
    segment_sum,
    sparse_product,
)

# --- NeighGen: how many neighbors of a node are missing, and what their features are -------------
#
# Zhang, Yang, Li, Sun and Yiu, "Subgraph federated learning with missing neighbor generation",
# NeurIPS 2021, sections 4.2 and 4.3. Every client has one of its own:
#
#     z_v     = two layers of GraphSAGE on the client's graph                        encoder
#     d_v     = z_v . w + b                                                          dGen
#     x_v^p   = (z_v + e_v^p) W + c,  e normal, for each p < round(d_v)              fGen
#
# It learns on a graph some of whose nodes are hidden, with H_v the hidden neighbors of v; the loss
# is the mean over the nodes v that are not hidden of
#
#     smooth L1(d_v, |H_v|) + weight * sum over p < round(d_v) of min over u in H_v of |x_v^p -
#     x_u|^2
#
# C: clients. n: rows. k: generated rows. m: pairs of generated and hidden rows. F: features.
# H: width.


AT_ONCE = 1 << 24  # numbers of pairs of rows that are compared at once
TINY = 2.0**-53


@dataclass(frozen=True)
class NeighGen:
    """A generator as a value; its weights are (C, ...).

    Attributes:
        features: F.
        width: H.
        most: neighbors that a node gets at most.
    """

    features: int
    width: int
    most: int

    def init(self, key: Key) -> Params:
        """Return the weights that all clients begin with, float64, shared form.

        The degree predictor begins at 0, so nothing is generated before it has learned.
        """
        width = self.width
        first = rooted_init(key.fold("first"), self.features, width)
        second = rooted_init(key.fold("second"), width, width)
        zero = torch.zeros(width, dtype=torch.float64)
        return {
            **{f"first.{name}": w for name, w in first.items()},
            **{f"second.{name}": w for name, w in second.items()},
            "degree.weight": zero[:, None],
            "degree.bias": zero[:1],
            "feature.weight": glorot(key.fold("feature"), width, self.features),
            "feature.bias": torch.zeros(self.features, dtype=torch.float64),
        }

    def encode(self, weights: Mapping[str, Tensor], block: ClientBlock, along: Messages) -> Tensor:
        """Return z (n, H) of the rows of a block, by messages among them."""
        h = convolve(SAGE, _layer_weights(weights, "first"), block.x, along).relu()
        report_rows(block.off, self.width * (1 + gradients(h)))
        return convolve(SAGE, _layer_weights(weights, "second"), h, along)

    def predict_missing(self, weights: Mapping[str, Tensor], z: Tensor, off: Tensor) -> Tensor:
        """Return d (n,), how many neighbors rows seem to lack."""
        d = segment_linear(z, weights["degree.weight"], off)
        return segment_bias(d, weights["degree.bias"], off)[:, 0]

    def round_counts(self, d: Tensor) -> Tensor:
        """Return how many neighbors are generated for each row, (n,) int64."""
        return d.detach().nan_to_num(0.0).clamp(0, self.most).round().long()

    def generate(
        self, weights: Mapping[str, Tensor], z: Tensor, neighbors: "GeneratedNeighbors", key: Key
    ) -> Tensor:
        """Return the features of generated neighbors (k, F), each with noise of its own."""
        noise = torch.special.ndtri(key.uniform(neighbors.key, self.width).clamp(min=TINY))
        x = z[neighbors.host] + noise.to(z.dtype)
        report_rows(neighbors.off, self.width * (1 + gradients(z)))
        return segment_bias(
            segment_linear(x, weights["feature.weight"], neighbors.off),
            weights["feature.bias"],
            neighbors.off,
        )


def _layer_weights(weights: Mapping[str, Tensor], name: str) -> Params:
    return {k.partition(".")[2]: w for k, w in weights.items() if k.startswith(f"{name}.")}


@dataclass(frozen=True, eq=False)
class GeneratedNeighbors:
    """Which neighbors are generated.

    Attributes:
        host: (k,) int64 row that each is a neighbor of, ascending.
        key: (k,) int64 row keys.
        off: (C + 1,) int64 those of each client.
    """

    host: Tensor
    key: Tensor
    off: Tensor


def neighbors_to_generate(block: ClientBlock, count: Tensor) -> GeneratedNeighbors:
    """Return the neighbors that are generated, from how many each row gets (n,) int64."""
    host = torch.repeat_interleave(count)
    return GeneratedNeighbors(host, neighbor_keys(block.row_key, host), offsets(count)[block.off])


@dataclass(frozen=True, eq=False)
class HiddenGraph:
    """Clients' graphs with some nodes hidden.

    Attributes:
        along: messages among the rows that are not hidden.
        hidden: (n,) bool.
        edges: (n, n) from rows that are not hidden to their hidden neighbors.
    """

    along: Messages
    hidden: Tensor
    edges: CSR


def hide_rows(block: ClientBlock, hidden: Tensor) -> HiddenGraph:
    """Return the graphs of a block without the rows hidden (n,) bool, and their edges."""
    assert block.adj.values is not None  # blocks carry values of the run's dtype
    row, column, n = block.adj.row, block.adj.indices.long(), len(hidden)
    is_visible, is_hidden_neighbor = ~hidden[row] & ~hidden[column], ~hidden[row] & hidden[column]
    device, dtype = block.off.device, block.adj.values.dtype
    inner, outer = (
        CSR.from_pairs(row[part].cpu(), column[part].cpu(), (n, n)).to(device, dtype)
        for part in (is_visible, is_hidden_neighbor)
    )
    degree = inner.degree.to(dtype)[:, None]
    along = Messages(inner, True, degree, degree, None, block.off, block.off)
    return HiddenGraph(along, hidden, outer)


def objective(
    gen: NeighGen,
    weights: Mapping[str, Tensor],
    block: ClientBlock,
    graph: HiddenGraph,
    key: Key,
    weight: float,
    answers: Tensor | None = None,
) -> Tensor:
    """Return the sum of the clients' losses; see the head of this file.

    Args:
        gen: the generator.
        weights: (C, ...).
        block: the clients.
        graph: theirs, with hidden nodes.
        key: of the noise.
        weight: of the features' part.
        answers: (k, F) gradients by the generated rows of what other clients add to that part.
    """
    z = gen.encode(weights, block, graph.along)
    d = gen.predict_missing(weights, z, block.off)
    node_weights = _row_weights(block, graph.hidden, z.dtype)
    report_rows(block.off, 6 * (1 + gradients(d)))
    total = (
        smooth_l1_loss(d, graph.edges.degree.to(d.dtype), reduction="none") * node_weights
    ).sum()
    neighbors = neighbors_to_generate(block, gen.round_counts(d).masked_fill(graph.hidden, 0))
    x = gen.generate(weights, z, neighbors, key)
    nearest = nearest_hidden(x.detach(), neighbors, block, graph.edges)
    has_hidden_neighbor = nearest >= 0
    report_rows(neighbors.off, 3 * gen.features * (1 + gradients(x)))
    squared_distance = (
        (x[has_hidden_neighbor] - dense_rows(block, nearest[has_hidden_neighbor])).square().sum(1)
    )
    total = (
        total
        + weight * (squared_distance * node_weights[neighbors.host[has_hidden_neighbor]]).sum()
    )
    if answers is not None:
        total = total + weight * ((x * answers).sum(1) * node_weights[neighbors.host]).sum()
    return total


def generated_rows(
    gen: NeighGen, weights: Mapping[str, Tensor], block: ClientBlock, graph: HiddenGraph, key: Key
) -> tuple[Tensor, Tensor]:
    """Return the rows that `objective` generates (k, F), and those of each client (C + 1,)."""
    with torch.no_grad():
        z = gen.encode(weights, block, graph.along)
        count = gen.round_counts(gen.predict_missing(weights, z, block.off))
        neighbors = neighbors_to_generate(block, count.masked_fill(graph.hidden, 0))
        return gen.generate(weights, z, neighbors, key), neighbors.off


def _row_weights(block: ClientBlock, hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return one over the number of rows of the client that are not hidden; 0 for hidden ones."""
    is_visible = (~hidden).to(dtype)
    return is_visible / segment_sum(is_visible, block.off).clamp(min=1)[block.client]


def nearest_hidden(
    x: Tensor, neighbors: GeneratedNeighbors, block: ClientBlock, edges: CSR
) -> Tensor:
    """Return the hidden neighbor of each generated row's node that is nearest to it, (k,) int64.

    -1 where the node has none.
    """
    counts = edges.degree[neighbors.host]
    other = edges.indices.long()[ranges(edges.indptr.long()[neighbors.host], counts)]
    generated_row = torch.repeat_interleave(counts)
    report_entries(offsets(counts), neighbors.off, 3 * x.shape[1])
    pairs = torch.arange(len(generated_row), device=x.device).split(max(1, AT_ONCE // x.shape[1]))
    squared_distances = [
        (x[generated_row[p]] - dense_rows(block, other[p])).square().sum(1) for p in pairs
    ]
    pair_number = first_least(torch.cat(squared_distances), generated_row, len(x))
    return torch.where(pair_number >= 0, torch.cat([other, other.new_zeros(1)])[pair_number], -1)


def first_least(value: Tensor, group: Tensor, groups: int) -> Tensor:
    """Return the position of each group's first least value, (groups, ...) int64; -1 without any.

    Args:
        value: (m, ...).
        group: (m,) int64 which group each belongs to.
        groups: how many there are.
    """
    shape, count = value.shape[1:], len(value)
    index = group.view(-1, *[1] * len(shape)).expand_as(value)
    least = value.new_full((groups, *shape), torch.inf)
    least = least.scatter_reduce(0, index, value, "amin")
    number = torch.arange(count, device=value.device).view(-1, *[1] * len(shape))
    position = torch.where(value == least.gather(0, index), number, count)
    first = position.new_full((groups, *shape), count).scatter_reduce(0, index, position, "amin")
    return torch.where(first == count, -1, first)


def nearest_gradients(x: Tensor, block: ClientBlock) -> Tensor:
    """Return 2 (x - x_u) of rows x (k, F), u the nearest row of each client, (C, k, F).

    That is the gradient of min over u of |x - x_u|^2. It is 0 for clients without rows.
    """
    parts = [
        _nearest_gradients(p, block) for p in x.split(max(1, AT_ONCE // max(1, len(block.row_key))))
    ]
    return torch.cat(parts, dim=1)


def _nearest_gradients(x: Tensor, block: ClientBlock) -> Tensor:
    """Do what `nearest_gradients` does for few rows, whose distances to all rows fit memory."""
    length, product = _squares_and_products(x, block)
    nearest = first_least(length[:, None] - 2 * product, block.client, block.num_clients)  # (C, k)
    empty = x.new_zeros(1, x.shape[1])
    rows = dense_rows(block, nearest.clamp(min=0).flatten()) if len(length) else empty
    differences = 2 * (x - rows.expand(nearest.numel(), -1).view(*nearest.shape, x.shape[1]))
    return torch.where((nearest >= 0)[..., None], differences, 0.0)


def _squares_and_products(x: Tensor, block: ClientBlock) -> tuple[Tensor, Tensor]:
    """Return the squared lengths of a block's rows (n,), and their products with x (n, k)."""
    work = 2 * (1 + len(x))
    if not isinstance(block.x, SparseRows):
        report_rows(block.off, work * block.x.shape[1])
        return block.x.square().sum(1), block.x @ x.T
    csr = block.x.csr
    assert csr.values is not None  # features always carry values
    report_entries(csr.indptr, block.off, work)
    length = x.new_zeros(csr.num_rows).index_add_(0, csr.row, csr.values.square())
    return length, sparse_product(csr, x.T.contiguous())


HiddenShare = Annotated[float, Field(ge=0, lt=1)]
Epochs = Annotated[int, Field(ge=0, le=10_000)]


@checked_dataclass(frozen=True, config=STRICT)
class FedSageOptions:
    """The help texts are the documentation of the fields."""

    hidden: HiddenShare = field(
        default=0.5,
        metadata={
            "help": "probability with which a node is hidden while the generator learns; 0: "
            "nothing is learned or generated, which is FedAvg",
            "tune": lin(0.1, 0.9),
        },
    )
    generator_epochs: Epochs = field(
        default=100, metadata={"help": "steps of the generator on hidden nodes"}
    )
    cross_epochs: Annotated[int, Field(ge=0, le=1000)] = field(
        default=5,
        metadata={"help": "steps with the answers of other silos as well; 0: no row leaves"},
    )
    generator_lr: Annotated[float, Field(gt=0)] = field(
        default=0.01,
        metadata={"help": "rate of the generator's Adam", "tune": log(1e-4, 1e-1)},
    )
    generator_width: Annotated[int, Field(ge=1, le=4096)] = field(
        default=128, metadata={"help": "hidden width of the generator"}
    )
    most: Annotated[int, Field(ge=0, le=100)] = field(
        default=5, metadata={"help": "neighbors that are generated for a node at most"}
    )
    feature_weight: Annotated[float, Field(ge=0)] = field(
        default=1.0,
        metadata={
            "help": "weight of the features' loss beside that of the degrees",
            "tune": log(1e-2, 1e2),
        },
    )


FedSageConfig = MethodConfig[FedSageOptions]


def generator_of(cfg: FedSageConfig) -> NeighGen:
    """Return the shape of the generator."""
    return NeighGen(cfg.model.features, cfg.options.generator_width, cfg.options.most)


@dataclass(frozen=True)
class LearningState:
    """While generators learn.

    Attributes:
        weights: (C, ...) of the generators.
        moments: (C, ...) of their optimizer.
        hidden: (n,) bool rows that are hidden.
        answers: (k, F) sums of the others' answers to the rows that were shown last.
    """

    weights: Mapping[str, Stacked]
    moments: Mapping[str, Stacked]
    hidden: Ragged
    answers: Ragged | None = None


FedSageClients = Clients[FedSageOptions]


# --- Set-up, step 1: each generator learns from hidden nodes of its own client -------------------


@op(Kind.CONTROL)
def train_generator(
    clients: FedSageClients, _state: Empty, _: Empty
) -> tuple[LearningState, Empty]:
    """Hide nodes and let a new generator learn from them."""
    cfg, block, key = clients.cfg, clients.block, clients.key.fold("generator")
    first = generator_of(cfg).init(key.fold("first")).items()
    example = block.row_key.new_zeros(0, dtype=dtype_of(block))
    weights = {n: w.to(example).repeat(block.num_clients, *[1] * w.dim()) for n, w in first}
    hidden = key.fold("hidden").uniform(block.row_key)[:, 0] < cfg.options.hidden
    memory = Adam(cfg.options.generator_lr).init(weights)
    state = LearningState(stack(weights), stack(memory), Ragged(hidden, block.off))
    graph = hide_rows(block, hidden)
    for epoch in range(cfg.options.generator_epochs):
        state = step_generators(clients, graph, state, key.fold("noise", epoch))
    return state, Empty()


def step_generators(
    clients: FedSageClients, graph: HiddenGraph, state: LearningState, key: Key
) -> LearningState:
    """Return the state after a step, with the answers of other silos if there are any."""
    cfg, options = clients.cfg, clients.options
    answers = None if state.answers is None else state.answers.t
    leaves = {name: w.t.detach().clone().requires_grad_() for name, w in state.weights.items()}
    with torch.enable_grad():
        loss = objective(
            generator_of(cfg), leaves, clients.block, graph, key, options.feature_weight, answers
        )
        gradients = torch.autograd.grad(loss, list(leaves.values()))
    weights = {name: w.detach() for name, w in leaves.items()}
    memory = {name: m.t.clone() for name, m in state.moments.items()}
    adam = Adam(options.generator_lr)
    adam.step_(weights, dict(zip(weights, gradients, strict=True)), memory)
    report_each(
        float(sum(adam.flops_of(n) * w[:1].numel() for n, w in weights.items())), Kind.OPTIMIZER
    )
    return LearningState(stack(weights), stack(memory), state.hidden)


# --- Set-up, step 2: silos show what they generate, and the others answer ------------------------


def all_rows_spec(cfg: FedSageConfig) -> FieldSpec:
    """Return the spec of rows of one client, of any number."""
    return FieldSpec(Ragged, (cfg.model.features,))


def shown_rows_spec(cfg: FedSageConfig) -> FieldSpec:
    """Return the spec of the same at all others."""
    return FieldSpec(Shared, (None, cfg.model.features))


def answer_spec(cfg: FedSageConfig) -> FieldSpec:
    """Return the spec of gradients of such rows."""
    return FieldSpec(Stacked, (None, cfg.model.features))


@dataclass(frozen=True)
class GeneratedRows:
    """Rows (k, F) that a client has generated for its nodes that are not hidden."""

    x: Annotated[Ragged, all_rows_spec]


@dataclass(frozen=True)
class RowsOfAnother:
    """The same (k, F), as the other clients get them."""

    x: Annotated[Tensor, shown_rows_spec]


@dataclass(frozen=True)
class RowGradients:
    """2 (x - x_u) for these rows, u the nearest node of a client, (C, k, F); or their sum."""

    gradient: Annotated[Stacked, answer_spec]


@op(Kind.GENERATED)
def show(
    clients: FedSageClients, state: LearningState, _: Empty
) -> tuple[LearningState, GeneratedRows]:
    """Show what is generated for nodes that are not hidden."""
    return state, GeneratedRows(Ragged(*rows_to_show(clients, state)))


def rows_to_show(clients: FedSageClients, state: LearningState) -> tuple[Tensor, Tensor]:
    """Return the generated rows (k, F) of nodes that are not hidden, and their offsets (C + 1,)."""
    weights = {name: w.t for name, w in state.weights.items()}
    graph = hide_rows(clients.block, state.hidden.t)
    return generated_rows(generator_of(clients.cfg), weights, clients.block, graph, clients.key)


@op(Kind.FEATURES)
def answer(
    clients: FedSageClients, state: LearningState, request: RowsOfAnother
) -> tuple[LearningState, RowGradients]:
    """Answer 2 (x - x_u), u the nearest own node."""
    return state, RowGradients(Stacked(nearest_gradients(request.x, clients.block)))


@op(Kind.FEATURES)
def take(
    _clients: FedSageClients, state: LearningState, request: RowGradients
) -> tuple[LearningState, Empty]:
    """Keep the sum of the others' answers."""
    gradient = request.gradient.t
    off = offsets(torch.full((len(gradient),), gradient.shape[1], device=gradient.device))
    return replace(state, answers=Ragged(gradient.flatten(0, 1), off)), Empty()


@op(Kind.CONTROL)
def learn(clients: FedSageClients, state: LearningState, _: Empty) -> tuple[LearningState, Empty]:
    """Take a step with the answers of other silos, if there are any.

    Raises:
        ProtocolError: answers to other rows than those that were shown.
    """
    if state.answers is not None:
        count = len(rows_to_show(clients, state)[0])
        if state.answers.t.shape != (count, clients.cfg.model.features):
            raise ProtocolError(
                f"expected answers to {count} generated rows, got {tuple(state.answers.t.shape)}"
            )
    graph = hide_rows(clients.block, state.hidden.t)
    return step_generators(clients, graph, state, clients.key), Empty()


# --- Set-up, step 3: neighbors of all nodes are generated, and stay -------------------------------


def mended_specs(cfg: FedSageConfig) -> FieldSpecs:
    """Return the specs of generated neighbors."""
    return generated_specs(cfg.model.features, cfg.options.most)


@dataclass(frozen=True)
class MendedState:
    """Between rounds: generated neighbors, see `silograph.exchange.collect`."""

    generated: Annotated[Mapping[str, Ragged], mended_specs]


@op(Kind.CONTROL)
def mend(clients: FedSageClients, state: LearningState, _: Empty) -> tuple[MendedState, Empty]:
    """Generate neighbors of all nodes, forget the generator, and set up training."""
    block, key, gen = clients.block, clients.key.fold("mend"), generator_of(clients.cfg)
    weights = {name: w.t for name, w in state.weights.items()}
    with torch.no_grad():
        z = gen.encode(weights, block, internal_messages(block, dtype_of(block)))
        count = gen.round_counts(gen.predict_missing(weights, z, block.off))
        neighbors = neighbors_to_generate(block, count)
        x = gen.generate(weights, z, neighbors, key.fold("noise"))
    mended = MendedState({"count": Ragged(count.int(), block.off), "x": Ragged(x, neighbors.off)})
    beginning = replace(clients, key=key, state={**clients.state, **to_payload(mended)})
    beginning.begin()
    clients.state = {n: f for n, f in beginning.state.items() if not is_own_field(MendedState, n)}
    return mended, Empty()


def check(cfg: FedSageConfig) -> None:
    """Raise `ConfigError` where nodes have no features to generate."""
    if cfg.model.task == "rating":
        raise ConfigError(
            "expected nodes with features for fedsageplus and fedsage_local, which generate them, "
            "got ratings: use method=fedavg"
        )


# --- Server --------------------------------------------------------------------------------------


SHOW_ROWS = Publish(show, answer, take)


def cross_steps(context: CallContext) -> list[CallContext]:
    """Return the contexts of the steps with other silos' answers; each has draws of its own."""
    numbers = range(context.cfg.options.cross_epochs)
    return [replace(context, key=context.key.fold("cross", number)) for number in numbers]


@calls(train_generator, for_each(cross_steps, SHOW_ROWS, learn), mend)
def setup(server: Server[FedSageOptions], weights: Params) -> ServerState:
    """Train the generators, and mend the clients' graphs."""
    server.call(train_generator, Empty())
    for context in cross_steps(server.context):
        SHOW_ROWS.carry(server.fed, Empty(), context)
        context.call(server.fed, learn, Empty())
    server.call(mend, Empty())
    return ServerState(weights, {})


def network_of(cfg: FedSageConfig) -> OtherNetwork:
    """Return the bounds of the generators' work."""
    options, first = cfg.options, generator_of(cfg).init(Key.of(0))
    shapes = {name: tuple(w.shape) for name, w in first.items()}
    return OtherNetwork(shapes, max(1, options.generator_epochs), options.most)


FEDSAGEPLUS: Method[FedSageOptions] = Method(
    name="fedsageplus",
    title="average of models trained with generated neighbors; silos' rows guide generators",
    reference="Zhang et al., Subgraph federated learning with missing neighbor generation, "
    "NeurIPS 2021",
    options=FedSageOptions,
    **program(average_and_step, setup=setup, state=MendedState, other_network=network_of),
    check=check,
    server_step=True,
    weighs_classes=True,
    evaluate=OwnGraph(through=MENDED),
    makes_edges=True,
    ratings=False,
    needs=FEDOPT.needs,
    cautions=(
        Caution(
            "on random cuts generated neighbors hurt: 63.9 % on Cora with 10 clients, where fedopt "
            "with the same steps has 69.4 (benchmarks/defaults/beside_fedopt.md)"
        ),
    ),
    only_sums=True,
)

FEDSAGE_LOCAL = preset(
    FEDSAGEPLUS,
    "fedsage_local",
    "average of models trained with generated neighbors; generators learn alone",
    cross_epochs=0,
)
