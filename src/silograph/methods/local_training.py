"""Local training: what FedAvg and most methods do between two messages.

Each client starts from given weights and takes full-batch steps on its own training nodes, on
its internal edges. The ops and the round here are shared by the methods of this folder.

McMahan, Moore, Ramage, Hampson and Agüera y Arcas, "Communication-efficient learning of deep
networks from decentralized data", AISTATS 2017, algorithm 1 (ClientUpdate, B = infinity).

State of a client: `optimizer/*` if kept between rounds, and what judging keeps (see
`silograph.evaluation.judge`). C: clients.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Ragged, Shared, Stacked, State, named, offsets, under
from silograph.core.work import report_rows, work_of
from silograph.evaluation.judge import no_logits, remember_own
from silograph.federation.base import Federation, Op, WeightedMean
from silograph.graph.block import ClientBlock
from silograph.methods.base import MethodConfig, RoundReport
from silograph.nn.conv import Params
from silograph.nn.loss import node_loss
from silograph.nn.model import forward, weight_shapes
from silograph.nn.segment import segment_sum
from silograph.selection.uniform import select_uniform

LOSS_FLOPS = 7  # a class of a training node: exp, sum, log, difference, product; 2 on the way back


def stacked(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Stacked]:
    """Return client tensors (C, ...) as fields `prefix/name`."""
    return {name: Stacked(t) for name, t in named(prefix, tensors).items()}


def shared_weights(weights: Mapping[str, Tensor]) -> dict[str, Shared]:
    """Return the server's weights as fields `weights/name`."""
    return {name: Shared(w) for name, w in named("weights", weights).items()}


def stacked_copies(weights: Mapping[str, Tensor], clients: int) -> Params:
    """Return a copy of shared weights for each client, (C, ...)."""
    return {k: w.expand(clients, *w.shape).clone() for k, w in weights.items()}


def mean_loss(cfg: MethodConfig, block: ClientBlock, weights: Params, key: Key | None) -> Tensor:
    """Return every client's mean training loss, (C,); each client needs a training node."""
    train = block.split.train
    logits = forward(cfg.model, weights, block, key)
    off = offsets(block.num_train)
    report_rows(off, LOSS_FLOPS * cfg.model.outputs)
    total = segment_sum(node_loss(logits[train], block.y[train], cfg.model.task), off)
    return total / block.num_train


def fit(
    cfg: MethodConfig, block: ClientBlock, weights: Params, memory: Params, key: Key
) -> tuple[Params, Params, Tensor]:
    """Train every client from its own weights (C, ...) for the local epochs.

    Clients without training nodes leave the computation: their weights and optimizer state
    stay as they are and their loss is 0.

    Args:
        cfg: model, optimizer, epochs.
        block: the rows.
        weights: (C, ...), the caller's own copy: the optimizer works in place.
        memory: optimizer state, likewise.
        key: key of the dropout draws.

    Returns:
        Weights, optimizer state, and the training loss before the last step (C,).
    """
    active = (block.num_train > 0).nonzero()[:, 0]
    if len(active) == block.num_clients:
        return _fit(cfg, block, weights, memory, key)
    loss = next(iter(weights.values())).new_zeros(block.num_clients)
    if len(active) == 0:
        return weights, memory, loss
    part = [{k: t[active] for k, t in tensors.items()} for tensors in (weights, memory)]
    with work_of(active):
        new_weights, new_memory, new_loss = _fit(cfg, block.take(active), part[0], part[1], key)
    return (
        {k: w.index_copy(0, active, new_weights[k]) for k, w in weights.items()},
        {k: m.index_copy(0, active, new_memory[k]) for k, m in memory.items()},
        loss.index_copy(0, active, new_loss),
    )


def _fit(
    cfg: MethodConfig, block: ClientBlock, weights: Params, memory: Params, key: Key
) -> tuple[Params, Params, Tensor]:
    loss = torch.empty(0)
    for epoch in range(cfg.local_epochs):
        leaves = {k: w.requires_grad_() for k, w in weights.items()}
        loss = mean_loss(cfg, block, leaves, key.fold("epoch", epoch))
        # Clients share no weight, so the gradient of the sum holds each client's own.
        grads = torch.autograd.grad(loss.sum(), list(leaves.values()))
        weights = {k: w.detach() for k, w in leaves.items()}
        cfg.optimizer.step_(weights, dict(zip(weights, grads, strict=True)), memory)
    return weights, memory, loss.detach()


def begin(
    cfg: MethodConfig, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Set up the state of every client. In: nothing. Out: nothing."""
    del state, inbox, key
    new: dict[str, Stacked | Ragged] = {**no_logits(cfg.model, block)}
    if cfg.keep_optimizer:
        assert block.adj.values is not None  # blocks carry values of the run's dtype
        shapes = weight_shapes(cfg.model).items()
        like = {k: block.adj.values.new_zeros(block.num_clients, *shape) for k, shape in shapes}
        new |= stacked("optimizer", cfg.optimizer.init(like))
    return new, {}


def train(
    cfg: MethodConfig, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Train from the server's weights.

    In: `weights/*` shared. Out: `weights/*` (C, ...), `nodes` (C,) training nodes, `loss` (C,).
    """
    start = stacked_copies(under("weights", inbox), block.num_clients)
    weights, new, loss = train_from(cfg, block, state, start, key)
    reply = stacked("weights", weights)
    return new, reply | {"nodes": Stacked(block.num_train), "loss": Stacked(loss)}


def train_from(
    cfg: MethodConfig, block: ClientBlock, state: State, start: Params, key: Key
) -> tuple[Params, State, Tensor]:
    """Train from weights (C, ...), a copy; return weights, new state, losses (C,).

    What the trained model says of the judged rows stays in the state, as the client's own view.
    """
    if cfg.keep_optimizer:
        memory = {k: m.clone() for k, m in under("optimizer", state).items()}
    else:
        memory = cfg.optimizer.init(start)
    weights, memory, loss = fit(cfg, block, start, memory, key)
    new = {**state, **remember_own(cfg.model, weights, block)}
    if cfg.keep_optimizer:
        new |= stacked("optimizer", memory)
    return weights, new, loss


def local_round(
    fed: Federation, cfg: MethodConfig, op: Op, inbox: Payload, what: Kind, t: int, key: Key
) -> tuple[Params | None, RoundReport]:
    """Let the selected clients run a training op once.

    Returns:
        The mean of the fields `weights/*` of the replies, weighted by `nodes`, without the
        prefix (empty if the op sends none), or None if nobody could train; and the report.
    """
    chosen = select_uniform(fed.ids, cfg.participation, key.fold("select", t))
    reply = fed.call(
        op, inbox, what=what, key=key.fold("train", t), to=chosen, reduce=WeightedMean("nodes")
    )
    if "loss" not in reply:  # no selected client has a training node
        return None, RoundReport(tuple(chosen), None)
    report = RoundReport(tuple(chosen), float(reply["loss"].t))
    return under("weights", reply), report
