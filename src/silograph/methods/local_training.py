"""Local training: what FedAvg and most methods do between two messages.

Each client starts from given weights and takes steps on its own training nodes, on its internal
edges. The ops and the round here are shared by the methods of this folder.

McMahan, Moore, Ramage, Hampson and Agüera y Arcas, "Communication-efficient learning of deep
networks from decentralized data", AISTATS 2017, algorithm 1 (ClientUpdate).

State of a client: `optimizer/*` if kept between rounds, and what judging keeps (see
`silograph.evaluation.judge`). C: clients.
"""

from collections.abc import Mapping

from torch import Tensor

from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Patched, Payload, Ragged, Shared, Stacked, State, named, under
from silograph.evaluation.judge import no_logits, remembered
from silograph.federation.base import Federation, Op, WeightedMean
from silograph.graph.block import ClientBlock
from silograph.methods.base import MethodConfig, RoundReport
from silograph.nn.conv import Params
from silograph.nn.fit import Fitted
from silograph.nn.model import first_maps, weight_shapes
from silograph.nn.tiers import fit, rest
from silograph.selection.uniform import select_uniform


def stacked(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Stacked]:
    """Return client tensors (C, ...) as fields `prefix/name`."""
    return {name: Stacked(t) for name, t in named(prefix, tensors).items()}


def named_fields(
    prefix: str, fields: Mapping[str, Stacked | Patched]
) -> dict[str, Stacked | Patched]:
    """Return the fields under names `prefix/name`."""
    return {f"{prefix}/{name}": field for name, field in fields.items()}


def shared_weights(weights: Mapping[str, Tensor]) -> dict[str, Shared]:
    """Return the server's weights as fields `weights/name`."""
    return {name: Shared(w) for name, w in named("weights", weights).items()}


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
    fitted, new = train_from(cfg, block, state, under("weights", inbox), key)
    reply = named_fields("weights", fitted.weights)
    return new, reply | {"nodes": Stacked(block.num_train), "loss": Stacked(fitted.loss)}


def train_from(
    cfg: MethodConfig, block: ClientBlock, state: State, start: Mapping[str, Tensor], key: Key
) -> tuple[Fitted, State]:
    """Train from weights, shared or (C, ...); return what came of it, and the new state.

    What the trained model says of the judged rows stays in the state, as the client's own view.
    """
    memory = under("optimizer", state) if cfg.keep_optimizer else None
    fitted = fit(cfg.kernels, cfg.model, cfg.optimizer, cfg.schedule, block, start, memory, key)
    new = {**state, **remembered(fitted.logits, block)}
    if cfg.keep_optimizer:
        new |= stacked("optimizer", fitted.memory)
    return fitted, new


def rests(cfg: MethodConfig, weights: Mapping[str, Tensor]) -> Params:
    """Return what most rows of clients' first weights are after a round, to take a mean around."""
    if cfg.keep_optimizer:
        return {}
    steps = cfg.schedule.epochs
    return {
        f"weights/{name}": rest(cfg.kernels, cfg.optimizer, weights[name], steps)
        for name in first_maps(cfg.model)
    }


def local_round(
    fed: Federation,
    cfg: MethodConfig,
    op: Op,
    inbox: Payload,
    what: Kind,
    t: int,
    key: Key,
    around: Mapping[str, Tensor] | None = None,
) -> tuple[Params | None, RoundReport]:
    """Let the selected clients run a training op once; `around`: see `WeightedMean`.

    Returns:
        The mean of the fields `weights/*` of the replies, weighted by `nodes`, without the
        prefix (empty if the op sends none), or None if nobody could train; and the report.
    """
    chosen = select_uniform(fed.ids, cfg.participation, key.fold("select", t))
    mean = WeightedMean("nodes", around or {})
    reply = fed.call(op, inbox, what=what, key=key.fold("train", t), to=chosen, reduce=mean)
    if "loss" not in reply:  # no selected client has a training node
        return None, RoundReport(tuple(chosen), None)
    report = RoundReport(tuple(chosen), float(reply["loss"].t))
    return under("weights", reply), report
