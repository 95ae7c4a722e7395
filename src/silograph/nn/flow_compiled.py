"""FedGrAINS' sampler by the compiled kernels: networks in, networks out, work counted.

What the kernels do is what `silograph.sampling.fedgrains` does in torch, from the same draws.

C: clients. E: edges. U: used rows of the first matrices. H: width of the networks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.kinds import Kind
from silograph.core.payload import Ragged, Stacked, State, StateField
from silograph.core.work import report_clients
from silograph.graph.block.block import ClientBlock, SparseRows
from silograph.nn.conv import Conv
from silograph.nn.fit import Schedule, dtype_of
from silograph.nn.flow import GATE_FLOPS, FlowRule
from silograph.nn.forward import Staged
from silograph.nn.kernel_block import contiguous, conv_of, prepare_block
from silograph.nn.kernels import arrays
from silograph.nn.kernels.flow import FlowArrays, FlowSampling, FlowShape, LinkArrays
from silograph.nn.mini_batches import Fanout
from silograph.nn.optim import Adam

LATER = ("indicator", "bias", "last", "last_bias")  # in the kernels' order
MOMENTS = ("", "first/", "second/")


def hops_of(model: Staged) -> int:
    """Return the number of hops that a step draws."""
    return sum(stage.conv.sums for stage in model.stages)


def with_full_fanout(model: Staged, schedule: Schedule) -> Schedule:
    """Return the schedule with memory for all neighbors of the rows of a batch."""
    return replace(schedule, neighbors=Fanout((0,) * (hops_of(model) or len(model.stages))))


@dataclass(frozen=True, eq=False)
class FlowNetworks:
    """The sampler of a call, and what the networks were before it."""

    rule: FlowRule
    block: ClientBlock
    state: State
    sampling: FlowSampling

    def new_state(self) -> State:
        """Report the work of the networks, and return the clients' new state of them."""
        flows, learns = self.sampling.flows, self.sampling.shape.learns
        if self.sampling.shape.scores:
            report_clients(_flops_of_unions(self.rule, self.block, flows.work, learns=learns))
        if not learns:
            return self.state
        steps_before = self.state["steps"].t
        steps_taken = torch.from_numpy(flows.steps) - steps_before.long()
        report_clients(steps_taken * _step_flops(self.rule, self.state), Kind.OPTIMIZER)
        new_state: dict[str, Stacked | Ragged] = {}
        rows = flows.rows, flows.first_rows, flows.second_rows
        flat = flows.flat, flows.first_flat, flows.second_flat
        for kind, first, later in zip(MOMENTS, rows, flat, strict=True):
            new_state[f"{kind}features"] = _with_rows_of(
                self.state["features"], torch.from_numpy(first)
            )
            names = _later_names(self.rule)
            shapes = [self.state[name].t.shape for name in names]
            parts = torch.from_numpy(later).split([s[1:].numel() for s in shapes], dim=1)
            for name, shape, part in zip(names, shapes, parts, strict=True):
                new_state[f"{kind}{name}"] = Stacked(part.reshape(shape).contiguous())
        return new_state | {"steps": Stacked(torch.from_numpy(flows.steps).to(steps_before.dtype))}


def _with_rows_of(field: StateField, t: Tensor) -> Ragged:
    """Return rows with the offsets of a field."""
    assert isinstance(field, Ragged)  # see `FedGrains.specs`
    return Ragged(t, field.off)


def _later_names(rule: FlowRule) -> Sequence[str]:
    return (*LATER, *(["log_z"] * rule.trains_z * (rule.policy == "trained")))


def networks_of(rule: FlowRule, model: Staged, block: ClientBlock, state: State) -> FlowNetworks:
    """Return the sampler of a call with copies of its networks.

    Raises:
        ProtocolError: networks of another model or block.
    """
    hops = hops_of(model)
    if hops > rule.hops:
        raise ProtocolError(
            f"expected flow networks for {hops} layers, got some for {rule.hops}: they are of "
            "another model"
        )
    shape = _flow_shape(rule, model)
    block_arrays = prepare_block(model, block, compact=isinstance(block.x, SparseRows))
    flows = _copy_networks(rule, block, state, block_arrays.called.used_off, learns=shape.learns)
    links = _degree_scales(rule, model, block)
    return FlowNetworks(rule, block, state, FlowSampling(shape, links, block_arrays.inputs, flows))


def _flow_shape(rule: FlowRule, model: Staged) -> FlowShape:
    hops, sums = hops_of(model), [stage.conv.sums for stage in model.stages]
    num_hops, width = max(hops, 1), rule.width
    memory = arrays.ModelShape(
        layers=num_hops + 1,
        form=np.full(num_hops + 1, arrays.SUM, np.int64),
        width=np.array([1, *[width] * num_hops, 1], np.int64),
        place=np.zeros((num_hops + 1, 3), np.int64),
        act=np.arange(num_hops + 1) * width,
        widest=width,
        rooted=False,
        outputs=1,
        multilabel=False,
        threshold=0,
        scale=1.0,
        x_threshold=0,
        x_scale=1.0,
        epochs=0,
        batch=0,
        fanout=np.zeros(num_hops + 1, np.int64),
    )
    return FlowShape(
        memory=memory,
        hop=np.array([sum(sums[layer + 1 :]) for layer in range(len(sums))], np.int64),
        hops=hops,
        layers=rule.hops,
        width=width,
        k=rule.k,
        scores=rule.policy != "uniform",
        learns=rule.policy == "trained" and hops > 0,
        learns_z=rule.trains_z,
        gated=rule.credit == "gate",
        odds=rule.score == "odds",
        alpha=float(rule.alpha),
        steps=_adam_rule(rule.lr),
        z_steps=_adam_rule(rule.log_z_lr),
    )


def _adam_rule(lr: float) -> arrays.StepRule:
    adam = Adam(lr)
    return arrays.StepRule(True, float(lr), 0.0, 0.0, 0, adam.beta1, adam.beta2, adam.eps, 0.0)


def _copy_networks(
    rule: FlowRule, block: ClientBlock, state: State, used_off: np.ndarray, *, learns: bool
) -> FlowArrays:
    """Return copies of the networks, moments as empty arrays where nothing is learned."""
    clients, dtype, num_rows = block.num_clients, dtype_of(block), int(used_off[-1])
    rows = [torch.empty(0, rule.width, dtype=dtype)] * 3
    flat = [torch.empty(clients, 0, dtype=dtype)] * 3
    if rule.policy == "uniform":
        used_off = np.zeros(clients + 1, np.int64)
    else:
        for i, kind in enumerate(MOMENTS if learns else MOMENTS[:1]):
            rows[i], flat[i] = _copy_network(rule, state, kind, num_rows, clients)
            if not rows[i].dtype is flat[i].dtype is dtype:
                raise ProtocolError(f"expected flow networks of {dtype}, got {rows[i].dtype}")
    steps = state["steps"].t.long() if learns else torch.zeros(clients, dtype=torch.int64)
    return FlowArrays(
        rows=rows[0].numpy(),
        first_rows=rows[1].numpy(),
        second_rows=rows[2].numpy(),
        flat=flat[0].numpy(),
        first_flat=flat[1].numpy(),
        second_flat=flat[2].numpy(),
        used_off=used_off,
        steps=steps.numpy(),
        work=np.zeros((clients, 4), np.int64),
    )


def _copy_network(
    rule: FlowRule, state: State, kind: str, num_rows: int, clients: int
) -> tuple[Tensor, Tensor]:
    """Return copies of the networks, or of moments: first matrices (U, H), the rest (C, Q)."""
    names = _later_names(rule)
    first = state[f"{kind}features"].t.clone(memory_format=torch.contiguous_format)
    later = torch.cat([state[f"{kind}{n}"].t.reshape(clients, -1) for n in names], dim=1)
    num_other = rule.width * (rule.hops + 3) + 1 + ("log_z" in names)
    if first.shape != (num_rows, rule.width) or later.shape[1] != num_other:
        raise ProtocolError(
            f"expected flow networks with {num_rows} rows of {rule.width} for the features of "
            f"{clients} clients and {num_other} other weights each, got {tuple(first.shape)} and "
            f"{later.shape[1]}: they are of another graph or model"
        )
    return first, later


def _degree_scales(rule: FlowRule, model: Staged, block: ClientBlock) -> LinkArrays:
    """Return scales by degree, where these are of what was chosen."""
    empty = torch.empty(0, dtype=dtype_of(block))
    if not rule.sampled_degrees:
        return LinkArrays(*[empty.numpy()] * 4)
    conv, source = conv_of(model), block if block.source is None else block.origin
    return source.once(("links", conv), LinkArrays, lambda: _compute_links(conv, source))


def _compute_links(conv: Conv, block: ClientBlock) -> LinkArrays:
    scales, adj = conv.scales, block.adj
    assert scales is not None  # of what has a kernel
    assert adj.values is not None  # blocks carry values of the run's dtype
    max_degree = int(adj.degree.max()) if adj.num_rows else 0
    degree = torch.arange(max_degree + 1, dtype=adj.values.dtype)[:, None]
    ones, zeros = torch.ones_like(degree), torch.zeros_like(degree)
    scales_or_none = (
        scales.sender_scale(degree),
        scales.receiver_scale(degree),
        scales.itself(degree),
    )
    filled_scales = (
        d if t is None else t for t, d in zip(scales_or_none, (ones, ones, zeros), strict=True)
    )
    return LinkArrays(contiguous(adj.values), *(contiguous(t[:, 0]) for t in filled_scales))


def _flops_of_unions(
    rule: FlowRule, block: ClientBlock, counts: np.ndarray, *, learns: bool
) -> Tensor:
    """Return operations of unions, (C,): what `fedgrains_policy` reports for the same ones."""
    width, passes = rule.width, 1 + learns
    rows, edges, entries, candidates = torch.from_numpy(counts).double().unbind(1)
    features = entries if isinstance(block.x, SparseRows) else rows * block.num_features
    total = 2 * width * passes * features + edges * (2 * width + 2) * passes
    flops_of_row = 5 * width + 2 * width * passes  # the indicator, and what comes of it
    flops_of_row += width * passes + 2 * width * (1 + 2 * learns) + passes
    flops_of_candidate = GATE_FLOPS if rule.credit == "gate" else 12
    return total + rows * flops_of_row + flops_of_candidate * learns * candidates


def _step_flops(rule: FlowRule, state: State) -> Tensor:
    """Return operations of a step of Adam, (C,) float64."""
    rows = state["features"]
    assert isinstance(rows, Ragged)  # see `FedGrains.specs`
    fixed = sum(state[name].t[:1].numel() for name in LATER)
    return (rows.off.diff() * rule.width + fixed).double() * Adam(rule.lr).flops_of("")
