"""FedGrAINS: a generative flow network at each client draws the nodes that its steps sum over.

The rule as printed turns into uniform drawing: with a constant log Z every p goes to 1, so all
log p are alike; with a learned one a single loss stands for all choices of a batch, and one node
changes it far less than the batch does. `credit="gate"` and `score="odds"` learn (see below).

Ceyani, Xie, Buyukates, Yang and Avestimehr, "FedGrAINS: Personalized subgraph federated learning
with adaptive neighbor sampling", SDM 2025, section 3, algorithm 1.
Kool, van Hoof and Welling, "Stochastic beams and where to find them", ICML 2019 (Gumbel top-k).
Malkin, Jain, Bengio, Sun and Bengio, "Trajectory balance", NeurIPS 2022.

From the training nodes of a batch outwards, layer by layer:

    candidates  C = N(S) without S, where S are the nodes chosen so far (S^0 is the batch)
    p           = sigmoid(GCN(X, layer in which each was chosen)) on S and C and the edges of S
    chosen      V = top k of log p + Gumbel noise, a client and batch                     eq. 3.6
    log P_F     = sum over V of log p + sum over C without V of log(1 - p)
    S           becomes S and V; messages come along all edges from S and V to the old S

After the step of the model, whose mean loss is L, the flow network follows the gradient of

    (log Z + sum over layers of log P_F + alpha L)^2                                      eq. 3.5

What we read or changed: nodes that are in S already need not be chosen again, and C is new nodes.
Z is one number a client. A constant Z is 1. A learned one is held as log Z = alpha z, as it has to
follow alpha L; z starts where the first step is balanced and has a rate of its own, as in the
work on trajectory balance. Gumbel top-k does not draw from P_F given k nodes: training is
off-policy, as the paper says. Chosen edges stand for themselves, as the paper's do, so sums are not
unbiased. With full degrees and k >= the number of candidates a step is the one without a sampler.
The GNN does not follow the gradient of eq. 3.7 through alpha L: it steps along the gradient of L
alone, as in algorithm 1. Through alpha L its step would be 2 alpha times the balance times that.

What we added, by options:

- gate credit: the rows that a chosen node v sends are scaled by a gate of 1, and the network
  descends the sum over chosen v of (dL/dgate_v - mean) score_v. The gradient says for each node
  what its messages do to the loss, and the mean over a client's choice in a layer takes away what
  they do alike. There is no log Z, and by odds the last bias, a shift of all logits, stays put.
- odds: nodes are drawn by the logit, log p / (1 - p), in place of log p, which is flat near p = 1.
- weighted evaluation: a message counts p of its sender, in the draw of a batch that is its
  receiver alone (`star_logits`). The paper evaluates on all messages alike.

The flow network and its optimizer are state of the client. Mean p and the range of the score (of
neighbors of each node) travel, as facts of the round. This is the torch form;
`silograph.nn.kernels.flow` does the same, client by client.

C: clients. A: clients in a step. n: rows. s: rows of S and C. m: candidates. F: features. H: width.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor
from torch.nn.functional import logsigmoid

from silograph.core.config import STRICT
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Ragged, Stacked, State, StateField, offsets
from silograph.core.setting_values import choice, log
from silograph.core.work import report_clients, report_entries, report_rows
from silograph.federation.field_specs import FieldSpec, FieldSpecs
from silograph.graph.block.block import ClientBlock, SparseRows
from silograph.graph.csr import CSR
from silograph.nn.conv import Messages, Params, glorot, internal_messages
from silograph.nn.fit import dtype_of
from silograph.nn.flow import GATE_FLOPS, Credit, FlowRule, Policy, Score
from silograph.nn.forward import AnyModel
from silograph.nn.mini_batches import Drawn, Reached, Signal, edges_of
from silograph.nn.optim import Adam
from silograph.nn.segment import (
    gradients,
    segment_bias,
    segment_linear,
    segment_sum,
    sparse_product,
)

# --- What scores candidates in FedGrAINS: a graph convolution on the rows that may be drawn ------
#
# C: clients.


@dataclasses.dataclass(frozen=True, eq=False)
class _Union:
    """The rows chosen so far and the candidates, with the edges of the former.

    Attributes:
        rows: (s,) int64 of the block, by client.
        hops: (s,) int64 layer in which each was chosen, or would be.
        off: (A + 1,) int64 rows of each client.
        operator: (s, s) D^-1/2 (A + I) D^-1/2, symmetric.
        candidate: (m,) int64 which of the rows are candidates, by client.
        candidate_off: (A + 1,) int64.
    """

    rows: Tensor
    hops: Tensor
    off: Tensor
    operator: CSR
    candidate: Tensor
    candidate_off: Tensor


def top_k(score: Tensor, off: Tensor, k: int) -> Tensor:
    """Return which candidates have the k highest scores of their client, (m,) bool."""
    client = torch.repeat_interleave(off.diff())
    order = score.argsort(descending=True)
    order = order[client[order].argsort(stable=True)]
    rank = torch.arange(len(score), device=score.device) - off[client]
    is_chosen = torch.zeros_like(client, dtype=torch.bool)
    is_chosen[order[rank < k]] = True
    return is_chosen


def log_forward(logit: Tensor, is_chosen: Tensor, off: Tensor) -> Tensor:
    """Return log P_F of the choice of each client, (A,).

    Args:
        logit: (m,) of the probability that a candidate is chosen.
        is_chosen: (m,) bool.
        off: (A + 1,) candidates of each client.
    """
    report_rows(off, 6 * (1 + gradients(logit)))
    return segment_sum(logsigmoid(torch.where(is_chosen, logit, -logit)), off)


EDGES_AT_ONCE = 2**16  # 32 MB of float32 at width 128
LEAST_RANGE = 0.3  # below, draws are nearly uniform beside Gumbel noise of deviation 1.28


def gate_objective(
    block: ClientBlock, traces: Sequence[Mapping[str, Tensor]], gates: Sequence[Tensor]
) -> Tensor:
    """Return what gate credit descends: scores of chosen nodes times their credit, less its mean.

    The credit of a chosen node is the gradient of the loss by the gate of its messages: negative
    where these lower the loss.
    """
    total = gates[0].new_zeros(())
    for trace, gate in zip(traces, gates, strict=True):
        rows = trace["candidate"][trace["is_chosen"]]
        client = block.client[rows]
        credit = gate[rows]
        count = torch.bincount(client, minlength=block.num_clients).clamp(min=1)
        mean = credit.new_zeros(block.num_clients).index_add_(0, client, credit) / count
        total = total + ((credit - mean[client]) * trace["score"][trace["is_chosen"]]).sum()
    return total


def mask_of_rows(block: ClientBlock, rows: Tensor) -> Tensor:
    """Return a mask (n,) bool of these rows of a block."""
    mask = torch.zeros(block.adj.num_rows, dtype=torch.bool, device=rows.device)
    mask[rows] = True
    return mask


def union_of(block: ClientBlock, reached: Reached, edges: Drawn, hop: int) -> _Union:
    """Return the rows reached and all their neighbors; see `_Union`."""
    is_new = mask_of_rows(block, edges.neighbor)
    is_new[reached.rows] = False
    new_rows = is_new.nonzero()[:, 0]
    rows = torch.cat([reached.rows, new_rows])
    hops = torch.cat([reached.hops, torch.full_like(new_rows, hop + 1)])
    order = block.client[rows].argsort(stable=True)
    rows, hops = rows[order], hops[order]
    count = len(rows)
    position = torch.empty(block.adj.num_rows, dtype=torch.int64, device=rows.device)
    position[rows] = torch.arange(count, device=rows.device)
    receiver, sender = position[reached.rows[edges.position]], position[edges.neighbor]
    reverse, self_position = is_new[edges.neighbor], position[rows]
    entry = torch.cat(
        [
            receiver * count + sender,
            (sender * count + receiver)[reverse],
            self_position * (count + 1),
        ]
    )
    entry = entry.sort().values
    row, column = entry // count, entry % count
    degree = torch.bincount(row, minlength=count)
    scale = degree.to(edges.share.dtype).rsqrt()
    dtype = torch.int32 if len(entry) < 2**31 else torch.int64
    operator = CSR(offsets(degree).to(dtype), column.to(dtype), scale[row] * scale[column], count)
    bounds = torch.cat([reached.clients, reached.clients[-1:] + 1])
    candidate = is_new[rows].nonzero()[:, 0]
    off = torch.searchsorted(block.client[rows], bounds)
    candidate_off = torch.searchsorted(block.client[rows[candidate]], bounds)
    return _Union(rows, hops, off, operator, candidate, candidate_off)


def policy_logits(
    block: ClientBlock, union: _Union, clients: Tensor, mapped: Tensor, weights: Params
) -> Tensor:
    """Return the logit of every row of a union by the flow network, a GCN of two layers, (s,).

    Args:
        block: C clients.
        union: the rows.
        clients: (A,) int64 that take part.
        mapped: (s, H) of `mapped_features`.
        weights: of the network.
    """
    part = {
        name: w[clients] for name, w in weights.items() if name not in ("features", "indicator")
    }
    z = mapped + _indicator_weights(block, union, weights["indicator"])
    report_rows(union.off, z.shape[1] * 5)  # the sum above, ReLU, and their ways back
    h = segment_bias(_sum_neighbors(union, z), part["bias"], union.off).relu()
    out = _sum_neighbors(union, segment_linear(h, part["last"].transpose(1, 2), union.off))
    return segment_bias(out, part["last_bias"], union.off)[:, 0]


def mapped_features(block: ClientBlock, union: _Union, clients: Tensor, weight: Tensor) -> Tensor:
    """Return X W of the rows of a union, (s, H).

    Args:
        block: C clients.
        union: the rows.
        clients: (A,) int64 that take part.
        weight: (U, H) rows for the features of every client up to the last of these.
    """
    return _features_of(block, union.rows, union.off, clients, weight)


def _features_of(
    block: ClientBlock, rows: Tensor, off: Tensor, clients: Tensor, weight: Tensor
) -> Tensor:
    """Return X W of some rows (s,) of clients (A,), whose offsets are `off` (A + 1,); (s, H)."""
    if isinstance(block.x, SparseRows):
        x = block.x.used.csr.select_rows(rows)
        x = CSR(x.indptr, x.indices, x.values, len(weight))
        report_entries(x.indptr, off, 2 * weight.shape[1] * (1 + gradients(weight)))
        return sparse_product(x, weight)
    client_weights = weight.view(int(clients[-1]) + 1, -1, weight.shape[1])[clients]
    return segment_linear(block.x[rows], client_weights, off)


def star_logits(block: ClientBlock, mapped: Tensor, network: Params, hop: int) -> Tensor:
    """Return the logit of each edge's sender, (E,), for a batch that is its receiver.

    The union of a node with d neighbors is a star: degrees with loops are d + 1 and 2, so

        h_v = relu(z_v / 2 + z_u / sqrt(2 (d + 1)) + b)
        h_u = relu(z_u / (d + 1) + sum of z_v / sqrt(2 (d + 1)) + b)
        logit of v = (h_v / 2 + h_u / sqrt(2 (d + 1))) w + b'

    Args:
        block: C clients.
        mapped: (n, H) X W.
        network: weights of the flow networks, (C, ...).
        hop: in which neighbors are drawn.
    """
    adj, client, width = block.adj, block.client, mapped.shape[1]
    report_rows(block.off, 9 * width)
    report_entries(adj.indptr, block.off, 8 * width)
    degree = adj.degree.to(mapped.dtype)
    cross = (2 * (degree + 1)).rsqrt()
    indicator, bias, last = network["indicator"], network["bias"], network["last"][:, 0]
    z_sender = mapped + indicator[client, hop + 1]
    z_receiver = mapped + indicator[client, hop]
    ones = adj.with_values(mapped.new_ones(adj.nnz))
    sums = cross[:, None] * sparse_product(ones, z_sender)
    h_receiver = (z_receiver / (degree + 1)[:, None] + sums + bias[client]).relu()
    of_receiver = cross * (h_receiver * last[client]).sum(1) + network["last_bias"][client, 0]
    base = cross[:, None] * z_receiver + bias[client]
    parts = []
    for edges in torch.arange(adj.nnz, device=mapped.device).split(EDGES_AT_ONCE):
        row, column = adj.row[edges], adj.indices[edges].long()
        h_sender = (z_sender[column] / 2 + base[row]).relu()
        parts.append((h_sender * last[client[row]]).sum(1) / 2 + of_receiver[row])
    return torch.cat(parts) if parts else mapped.new_zeros(0)


def feature_gradient(
    block: ClientBlock, traces: Sequence[Mapping[str, Tensor]], mapped_gradients: Sequence[Tensor]
) -> Tensor:
    """Return the gradient of W, (U, H), from those of X W in every hop, (s, H) each.

    The rows of a hop are among those of the next, so one product is enough: X' (G + G').

    Args:
        block: C clients.
        traces: of the hops: `rows` (s,), and in the last one `mapped` (s, H) and `features`.
        mapped_gradients: by hop, (s, H) each.
    """
    last = traces[-1]
    position = torch.empty(block.adj.num_rows, dtype=torch.int64, device=last["rows"].device)
    position[last["rows"]] = torch.arange(len(last["rows"]), device=position.device)
    total = mapped_gradients[-1].clone()
    for trace, grad in zip(traces[:-1], mapped_gradients[:-1], strict=True):
        total.index_add_(0, position[trace["rows"]], grad)
    (gradient,) = torch.autograd.grad(last["mapped"], last["features"], total)
    return gradient


def _indicator_weights(block: ClientBlock, union: _Union, weight: Tensor) -> Tensor:
    """Return the rows of the indicator's weights (C, L + 1, H) of every row of a union, (s, H)."""
    clients, layers, width = weight.shape
    column = block.client[union.rows] * layers + union.hops
    report_rows(union.off, 2 * width * (1 + gradients(weight)))
    return weight.view(clients * layers, width).index_select(0, column)


def _sum_neighbors(union: _Union, z: Tensor) -> Tensor:
    """Return the sums over neighbors of a union (s, D)."""
    report_entries(union.operator.indptr, union.off, 2 * z.shape[1] * (1 + gradients(z)))
    return sparse_product(union.operator, z, symmetric=True)


Rate = Annotated[float, Field(gt=0)]
TRAINED = {"read_if": {"policy": ("trained",)}}
BALANCED = {"read_if": {"policy": ("trained",), "credit": ("balance",)}}
NETWORK = {"read_if": {"policy": ("trained", "untrained")}}
MOST_ALPHA = 1e8  # second moments of log Z go with its fourth power, and have to fit float32


@checked_dataclass(frozen=True, config=STRICT)
class FedGrainsOptions:
    """The help texts are the documentation of the fields."""

    k: Annotated[int, Field(ge=1, lt=2**31)] = field(
        default=32,
        metadata={
            "help": "nodes that a client chooses in each layer of a step, among all neighbors of "
            "the nodes chosen so far",
            "tune": log(8, 256),
        },
    )
    alpha: Annotated[float, Field(gt=0, le=MOST_ALPHA)] = field(
        default=1e5,
        metadata=BALANCED | {"help": "scale of the loss in the reward", "tune": log(1e2, 1e6)},
    )
    lr: Rate = field(
        default=1e-3,
        metadata=TRAINED | {"help": "rate of the flow network's Adam", "tune": log(1e-4, 1e-1)},
    )
    log_z: Literal["learned", "constant"] = field(
        default="learned",
        metadata=BALANCED
        | {
            "help": "log Z of the trajectory balance: learned, or constant 0 (the paper's)",
            "tune": choice("learned", "constant"),
        },
    )
    log_z_lr: Rate = field(
        default=0.1,
        metadata={
            "help": "rate of a learned log Z, in units of alpha",
            "read_if": {"policy": ("trained",), "credit": ("balance",), "log_z": ("learned",)},
        },
    )
    degrees: Literal["full", "sampled"] = field(
        default="sampled",
        metadata={
            "help": "degrees that convolutions scale by: of the client's graph (full), or of what "
            "was chosen",
            "tune": choice("full", "sampled"),
        },
    )
    credit: Credit = field(
        default="balance",
        metadata=TRAINED
        | {
            "help": "what the network learns from: the trajectory balance (balance, the paper's), "
            "or the gradient of the loss at the gate of each chosen node's messages (gate)",
        },
    )
    score: Score = field(
        default="probability",
        metadata=NETWORK
        | {
            "help": "what is drawn by: log p (probability, the paper's) or log p / (1 - p) (odds)",
        },
    )
    evaluate: Literal["full", "weighted"] = field(
        default="full",
        metadata=NETWORK
        | {
            "help": "what models are scored with: all messages alike (full, the paper's), or "
            "each by its p (weighted)",
        },
    )
    policy: Policy = field(
        default="trained",
        metadata={
            "help": "who chooses: the flow network (trained), or for comparison one that is not "
            "trained (untrained) or chance (uniform)"
        },
    )
    width: Annotated[int, Field(ge=1)] = field(
        default=128,
        metadata={
            "help": "hidden width of the flow network",
            "read_if": {"policy": ("trained", "untrained")},
        },
    )


@dataclasses.dataclass(frozen=True)
class FedGrains(FlowRule):
    """The sampler; see the head of this file."""

    def fanout(self, hops: int) -> None:
        """Return None: it does not draw a number of neighbors for each row."""
        del hops

    def why_not(self, model: AnyModel) -> str | None:
        """Return a reason unless the model takes edges layer by layer."""
        return None if model.staged is not None else f"{model.noun} sees all edges of a client"

    def maps(self, model: AnyModel) -> Sequence[tuple[int, ...]]:
        """Return shapes of the flow network's weights, hop by hop."""
        if self.policy == "uniform":
            return ()
        first = model.features + self.hops + 1, self.width
        return (first, (self.width,), (self.width, 1), (1,)) * self.hops

    def specs(self, model: AnyModel) -> FieldSpecs:
        """Return the specs of the flow network, its moments, log Z, and its number of steps."""
        del model
        if self.policy == "uniform":
            return {}
        width, weight_specs = self.width, {"features": FieldSpec(Ragged, (self.width,))}
        weight_specs |= {"indicator": FieldSpec(Stacked, (self.hops + 1, width))}
        weight_specs |= {
            "bias": FieldSpec(Stacked, (width,)),
            "last": FieldSpec(Stacked, (1, width)),
        }
        weight_specs |= {"last_bias": FieldSpec(Stacked, (1,))}
        if self.policy == "untrained":
            return weight_specs
        weight_specs |= {"log_z": FieldSpec(Stacked)} if self.trains_z else {}
        moments = {
            f"{kind}/{n}": s for kind in ("first", "second") for n, s in weight_specs.items()
        }
        return weight_specs | moments | {"steps": FieldSpec(Stacked, (), torch.float32, low=0)}

    def init(self, block: ClientBlock, model: AnyModel, key: Key) -> State:
        """Return the same network for every client, with rows for the features that occur there."""
        if self.policy == "uniform":
            return {}
        clients, features = block.num_clients, model.features
        assert block.adj.values is not None  # blocks carry values of the run's dtype
        dtype, device = block.adj.values.dtype, block.off.device
        first = glorot(key.fold(0), features + self.hops + 1, self.width).to(device, dtype)
        last = glorot(key.fold(1), self.width, 1).to(device, dtype)
        if isinstance(block.x, SparseRows):
            rows = Ragged(first[block.x.used.feature], block.x.used.off)
        else:
            off = torch.arange(clients + 1, device=device) * features
            rows = Ragged(first[:features].repeat(clients, 1), off)
        state: dict[str, Stacked | Ragged] = {"features": rows}
        state["indicator"] = Stacked(first[features:].repeat(clients, 1, 1))
        state["bias"] = Stacked(first.new_zeros(clients, self.width))
        state["last"] = Stacked(last.T.repeat(clients, 1, 1))
        state["last_bias"] = Stacked(first.new_zeros(clients, 1))
        if self.policy == "untrained":
            return state
        if self.trains_z:
            state["log_z"] = Stacked(first.new_zeros(clients))
        for kind in ("first", "second"):
            state |= {
                f"{kind}/{name}": replace(state[name], t=torch.zeros_like(state[name].t))
                for name in self._learned
            }
        steps = torch.zeros(clients, dtype=torch.float32, device=device)
        return state | {"steps": Stacked(steps)}

    def draw(self, block: ClientBlock, reached: Reached, hop: int, key: Key, state: State) -> Drawn:
        """Choose k candidates of each client; keep all edges to them and to those chosen before."""
        all_edges, gate = edges_of(block, reached.rows), None
        union = union_of(block, reached, all_edges, hop)
        rows = union.rows[union.candidate]
        with torch.set_grad_enabled(self.policy == "trained"):
            network = self._leaves(state, reached.clients)
            logit, trace = all_edges.share.new_zeros(len(rows)), dict[str, Tensor]()
            if network:
                mapped = mapped_features(block, union, reached.clients, network["features"])
                trace = network | {"mapped": mapped, "rows": union.rows}
                trace["leaf"] = leaf = mapped.detach().requires_grad_(mapped.requires_grad)
                logit = policy_logits(block, union, reached.clients, leaf, network)
                logit = logit[union.candidate]
            noise = -(-key.fold("gumbel").uniform(block.row_key[rows])[:, 0].log()).log()
            score = self.score_of(logit)
            is_chosen = top_k(score.detach() + noise, union.candidate_off, self.k)
            if self.policy == "trained" and self.credit == "balance":
                trace["log_p"] = log_forward(logit, is_chosen, union.candidate_off)
            elif self.policy == "trained":
                report_rows(union.candidate_off, GATE_FLOPS)
                trace |= {"score": score, "candidate": rows, "is_chosen": is_chosen}
                gate = all_edges.share.new_ones(block.adj.num_rows, requires_grad=True)
        is_usable = mask_of_rows(block, torch.cat([reached.rows, rows[is_chosen]]))
        is_usable_edge = is_usable[all_edges.neighbor]
        drawn = Drawn(
            all_edges.position[is_usable_edge],
            all_edges.neighbor[is_usable_edge],
            all_edges.share[is_usable_edge],
            trace=trace,
            gate=gate,
        )
        if self.sampled_degrees:
            drawn = replace(drawn, degree=_sampled_degree(block, reached, drawn))
        return drawn

    def _leaves(self, state: State, clients: Tensor) -> Params:
        """Return the flow network's weights, which get gradients if it is trained.

        Rows of features end with the last of these clients.
        """
        if self.policy == "uniform":
            return {}
        network = {name: state[name].t.detach() for name in self._network}
        rows = state["features"]
        assert isinstance(rows, Ragged)  # see `specs`
        network["features"] = network["features"][: int(rows.off[int(clients[-1]) + 1])]
        return {name: w.requires_grad_(self.policy == "trained") for name, w in network.items()}

    def learn(self, block: ClientBlock, state: State, signal: Signal) -> State:
        """Take a step of Adam on the trajectory balance."""
        if self.policy != "trained" or not signal.draws:
            return state
        traces = [drawn.trace for _, drawn in signal.draws]
        new = state if signal.own else {n: replace(f, t=f.t.clone()) for n, f in state.items()}
        z = signal.loss.new_zeros(0)
        if self.credit == "gate":
            objective = gate_objective(block, traces, signal.gates)
        else:
            log_p = torch.stack([trace["log_p"] for trace in traces]).sum(0)
            balance = log_p + self.alpha * signal.loss
        if self.credit == "balance" and self.trains_z:
            is_first_step = self._balance_first(new, signal.clients, balance.detach())
            z = new["log_z"].t.clone().requires_grad_()
            balance = (balance + self.alpha * z[signal.clients]).masked_fill(is_first_step, 0)
        if self.credit == "balance":
            objective = balance.square().sum()
        names = ("leaf", *self._network[1:])
        leaves = [trace[name] for name in names for trace in traces] + [z] * self.trains_z
        gradients = torch.autograd.grad(objective, leaves, materialize_grads=True)
        hops = len(traces)
        by_hop = {name: gradients[i * hops : (i + 1) * hops] for i, name in enumerate(names)}
        grads = {name: torch.stack(by_hop[name]).sum(0) for name in self._network[1:]}
        if self.credit == "gate" and self.score == "odds":  # a shift of logits changes no draw
            grads["last_bias"] = torch.zeros_like(grads["last_bias"])
        grads["features"] = feature_gradient(block, traces, by_hop["leaf"])
        grads |= {"log_z": gradients[-1]} if self.trains_z else {}
        self._report_step(state, signal.clients)
        for a, b in _ranges_of_equal_steps(signal.clients, new["steps"].t):
            self._step(new, grads, a, b)
        return new

    @property
    def fact_specs(self) -> FieldSpecs:
        """Mean p and the range of scores, of the candidates of every node by itself."""
        if self.policy == "uniform":
            return {}
        return {
            "mean_p": FieldSpec(Stacked, low=0, high=1),
            "score_range": FieldSpec(Stacked, low=0),
        }

    def facts(self, block: ClientBlock, state: State) -> Mapping[str, Tensor]:
        """Return mean p and the range of scores, means over layers, (C,) each; 0 without edges."""
        if self.policy == "uniform":
            return {}
        client = block.client[block.adj.row]
        count = torch.bincount(client, minlength=block.num_clients).clamp(min=1)
        means, ranges = [], []
        for hop in range(self.hops):
            logit = self._logits_of_neighbors(block, state, hop)
            zero = logit.new_zeros(block.num_clients)
            means.append(zero.index_add(0, client, logit.sigmoid()) / count)
            score = self.score_of(logit)
            high, low = (
                zero.scatter_reduce(0, client, score, kind, include_self=False)
                for kind in ("amax", "amin")
            )
            ranges.append(high - low)
        mean_p = torch.stack(means).mean(0).clamp(0, 1)  # rounding may leave a trace above 1
        return {"mean_p": mean_p, "score_range": torch.stack(ranges).mean(0)}

    def note(self, facts: Mapping[str, Sequence[float]]) -> str | None:
        """Return a warning where what the networks draw by is nearly the same for all."""
        ranges = facts.get("score_range", ())
        if self.policy != "trained" or not ranges or ranges[-1] >= LEAST_RANGE:
            return None
        what = "log odds" if self.score == "odds" else "log p"
        hint = "" if self.credit == "gate" else "; neighbors.credit=gate learns"
        return (
            f"fedgrains draws nearly uniformly: {what} spans {ranges[-1]:.2g}, beside Gumbel noise "
            f"of deviation 1.28{hint}"
        )

    def messages(
        self, block: ClientBlock, sums: Sequence[bool], state: State
    ) -> tuple[Messages, ...] | None:
        """Return messages that count p each; degrees are the sums of p, or those of the graph."""
        if not self.weighs or self.policy == "uniform":
            return None
        plain, messages = internal_messages(block, dtype_of(block)), list[Messages]()
        row = block.adj.row
        for number, sums_neighbors in enumerate(sums):
            if not sums_neighbors:
                messages.append(plain)
                continue
            p = self._logits_of_neighbors(block, state, sum(sums[number + 1 :])).sigmoid()
            weighed = replace(plain, adj=plain.adj.with_values(p), symmetric=False)
            if self.sampled_degrees:
                degree = p.new_zeros(block.adj.num_rows).index_add(0, row, p)[:, None]
                weighed = replace(weighed, sender=degree, receiver=degree)
            messages.append(weighed)
        return tuple(messages)

    def score_of(self, logit: Tensor) -> Tensor:
        """Return what is drawn by, log p or log p / (1 - p), from logits."""
        return logit if self.score == "odds" else logsigmoid(logit)

    def _logits_of_neighbors(self, block: ClientBlock, state: State, hop: int) -> Tensor:
        """Return the logit of the sender of every edge, where its receiver is the batch, (E,).

        In the closed form of `policy_logits`: the union is a star.
        """
        with torch.no_grad():
            clients = torch.arange(block.num_clients, device=block.off.device)
            network = self._leaves(state, clients)
            rows = torch.arange(block.adj.num_rows, device=block.off.device)
            features = _features_of(block, rows, block.off, clients, network["features"])
            return star_logits(block, features, network, hop)

    def _report_step(self, state: State, clients: Tensor) -> None:
        """Report the operations of a step of the clients in it."""
        fixed = sum(f.t[:1].numel() for n, f in state.items() if n in self._network[1:])
        rows = state["features"]
        assert isinstance(rows, Ragged)  # see `specs`
        sizes = rows.off.diff()[clients] * self.width + fixed
        report_clients(sizes.double().cpu() * Adam(self.lr).flops_of(""), Kind.OPTIMIZER)

    @property
    def _network(self) -> tuple[str, ...]:
        return ("features", "indicator", "bias", "last", "last_bias")

    @property
    def _learned(self) -> tuple[str, ...]:
        return (*self._network, *(["log_z"] * self.trains_z))

    def _balance_first(self, new: State, clients: Tensor, balance: Tensor) -> Tensor:
        """Set z of clients without a step so that the first one is balanced; return which.

        Their balance is then taken as exactly 0. A rounding error would make Adam take a step of
        full length.
        """
        z, is_first_step = new["log_z"].t, new["steps"].t[clients] == 0
        z[clients] = torch.where(is_first_step, -balance / self.alpha, z[clients])
        return is_first_step

    def _step(self, new: State, grads: Mapping[str, Tensor], a: int, b: int) -> None:
        """Take the step of clients a to b, who have taken equally many, in place."""
        steps = new["steps"].t[a:b]
        for names, lr in ((self._network, self.lr), (("log_z",), self.log_z_lr)):
            if names[0] not in grads:
                continue
            kinds = [(f"{kind}/{n}", n) for kind in ("first", "second") for n in names]
            weights = {name: _slice_clients(new[name], new[name].t, a, b) for name in names}
            moments = {
                moment_name: _slice_clients(new[n], new[moment_name].t, a, b)
                for moment_name, n in kinds
            }
            part_grads = {name: _slice_clients(new[name], grads[name], a, b) for name in names}
            Adam(lr).step_(weights, part_grads, moments | {"steps": steps.clone()})
        steps += 1


def _slice_clients(like: StateField, t: Tensor, a: int, b: int) -> Tensor:
    """Return the part of clients a to b of a tensor that has the form of a field."""
    return t[int(like.off[a]) : int(like.off[b])] if isinstance(like, Ragged) else t[a:b]


def _ranges_of_equal_steps(clients: Tensor, steps: Tensor) -> Iterator[tuple[int, int]]:
    """Yield ranges of clients, all of them in `clients` (A,), that have counted equally many steps.

    Training sorts clients by their number of batches, so there are few.
    """
    breaks = (clients.diff() != 1) | (steps[clients].diff() != 0)
    ends = (breaks.nonzero()[:, 0] + 1).tolist()
    for a, b in zip([0, *ends], [*ends, len(clients)], strict=True):
        yield int(clients[a]), int(clients[b - 1]) + 1


def _sampled_degree(block: ClientBlock, reached: Reached, drawn: Drawn) -> Tensor:
    """Return the degrees in what was drawn, edges counted at both ends, (n,)."""
    rows = reached.rows
    degree = torch.bincount(drawn.neighbor, minlength=block.adj.num_rows)
    degree[rows] = torch.bincount(drawn.position, minlength=len(rows))
    return degree.to(drawn.share.dtype)
