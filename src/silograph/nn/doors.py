"""What comes from outside is checked here before code that trusts it, compiled or not, reads it.

Compiled kernels and torch's fused optimizers check no bounds: a weight that is too small makes them
read, and optimizer state that is too small makes them write, where they must not. Weights come from
a server and state may come from a damaged file, so both tiers check them first, and refuse the same
with the same words.

C: clients. F: features. K: outputs.
"""

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.payload import Patched, Ragged, Stacked, owners, patched_problem
from silograph.graph.block.block import ClientBlock
from silograph.nn.any_model import AnyModel
from silograph.nn.optim import Optimizer
from silograph.nn.schedule import Training, TrainingInputs
from silograph.nn.start import Start
from silograph.task.registry import task_of

ANOTHER = "these are weights of another model"
MOST_STEPS = 2**53  # beyond, counting by ones stands still even in float64


def dtype_of(block: ClientBlock) -> torch.dtype:
    """Return the dtype of a block's floating point values."""
    values = block.origin.adj.values  # a part copies when asked
    assert values is not None  # blocks carry values of the run's dtype
    return values.dtype


def check_fit(training: Training, inputs: TrainingInputs) -> None:
    """Raise `ProtocolError` unless a block can be trained from these weights and this state."""
    model, block = training.model, inputs.block
    check_start(model, inputs.start, block)
    check_labels(model, block)
    if inputs.memory is not None:
        check_memory(model, training.optimizer, inputs.memory, block)


def check_weights(
    model: AnyModel, weights: Mapping[str, Tensor], block: ClientBlock, *, shared: bool = False
) -> None:
    """Raise `ProtocolError` unless weights are those of the model, in the block's dtype.

    Args:
        model: the shape.
        weights: shared by all clients, or all (C, ...).
        block: C clients with the model's number of features.
        shared: whether weights must be shared.
    """
    _check_slices(_shapes(model, weights, block), weights, block, shared=shared)


def check_start(model: AnyModel, start: Start, block: ClientBlock) -> None:
    """Raise `ProtocolError` unless training can start from these weights of a block's clients."""
    shapes, dtype = _shapes(model, start, block), dtype_of(block)
    tensors = {name: w for name, w in start.items() if isinstance(w, Tensor)}
    _check_slices({n: s for n, s in shapes.items() if n in tensors}, tensors, block, shared=False)
    for name, shape in shapes.items():
        match start[name]:
            case Stacked(t) if t.shape != (block.num_clients, *shape) or t.dtype is not dtype:
                _refuse(name, t, (block.num_clients, *shape), dtype, ANOTHER)
            case Patched(base) as field:
                if base.shape[1:] != shape or base.dtype is not dtype or not len(base):
                    _refuse(name, base, (max(len(base), 1), *shape), dtype, ANOTHER)
                problem = patched_problem(field, block.num_clients)
                if problem is None and field.t.dtype is not dtype:
                    problem = f"rows of {dtype}, got {field.t.dtype}"
                if problem:
                    raise ProtocolError(f"expected {problem} for {name} where training starts")


def _shapes(
    model: AnyModel, weights: Mapping[str, object], block: ClientBlock
) -> Mapping[str, tuple[int, ...]]:
    """Return shapes by name; raise `ProtocolError` unless model, names and features fit."""
    shapes = model.weight_shapes
    if model.features != block.num_features:
        raise ProtocolError(
            f"expected a model of {block.num_features} features, got one of {model.features}"
        )
    if weights.keys() != shapes.keys():
        raise ProtocolError(f"expected the weights {_few(shapes)}, got {_few(weights)}: {ANOTHER}")
    return shapes


def _check_slices(
    shapes: Mapping[str, tuple[int, ...]],
    weights: Mapping[str, Tensor],
    block: ClientBlock,
    *,
    shared: bool,
) -> None:
    """Raise `ProtocolError` unless weights have these shapes: all shared, or all (C, ...)."""
    first = next(iter(shapes), None)
    stacked = first is not None and not shared and weights[first].dim() > len(shapes[first])
    clients, dtype = (block.num_clients,) if stacked else (), dtype_of(block)
    for name, shape in shapes.items():
        w = weights[name]
        if w.shape != clients + shape or w.dtype is not dtype:
            _refuse(name, w, clients + shape, dtype, ANOTHER)


def check_memory(
    model: AnyModel, optimizer: Optimizer, memory: Mapping[str, Tensor], block: ClientBlock
) -> None:
    """Raise `ProtocolError` unless optimizer state (C, ...) is as `Optimizer.init` makes it."""
    expected = _memory_shapes(model, optimizer, dtype_of(block))
    if memory.keys() != expected.keys():
        raise ProtocolError(
            f"expected the optimizer state {_few(expected)}, got {_few(memory)}: it is of another "
            "optimizer or model"
        )
    for name, (shape, dtype) in expected.items():
        m, whole = memory[name], (block.num_clients, *shape)
        if m.shape != whole or m.dtype is not dtype:
            _refuse(name, m, whole, dtype, "this is optimizer state of another model")
    steps = memory.get("steps")
    if steps is not None and not bool(((steps >= 0) & (steps < MOST_STEPS)).all()):
        raise ProtocolError(
            "expected steps of 0 or more in the optimizer state, got "
            f"{steps.flatten()[:4].tolist()}"
        )


def check_labels(model: AnyModel, block: ClientBlock) -> None:
    """Raise `ProtocolError` unless training rows have labels that the model has outputs for."""
    block = block.origin  # once for all clients, not anew for those of each call
    name = ("labels", model.task, model.outputs)
    if name in block.memo:
        return
    y, task = block.y, task_of(model.task)
    wrong = y.dim() != 1 + task.wide or (task.wide and y.shape[1] != model.outputs)
    if wrong or y.is_floating_point() == task.classes:
        what = "numbers" if not task.classes else "bits" if task.wide else "classes"
        raise ProtocolError(
            f"expected {model.outputs} {what} as labels, got labels of "
            f"shape {tuple(y.shape)}: the model is for another task"
        )
    if task.classes and not task.wide and bool(block.split.train.any()):
        least, most = (int(t) for t in y[block.split.train].aminmax())
        if least < 0 or most >= model.outputs:
            raise ProtocolError(
                f"expected labels of training rows in 0 to {model.outputs - 1}, got "
                f"{least} to {most}: the model is for fewer classes"
            )
    block.memo[name] = True


def check_places(named: Ragged, off: Tensor, what: str) -> Tensor:
    """Return places (k,) int64 in the order of a block, of what clients name in their own order.

    Args:
        named: (k,) integers, ascending in each client.
        off: (C + 1,) int64, how many places each client has.
        what: what they are, for the message.

    Raises:
        ProtocolError: a place that does not exist, or one out of order.
    """
    t = named.t
    if t.dim() != 1 or t.is_floating_point() or t.dtype is torch.bool or len(named.off) != len(off):
        raise ProtocolError(
            f"expected {what} as whole numbers for each of {len(off) - 1} clients, got {t.dtype} "
            f"of shape {tuple(t.shape)} for {len(named.off) - 1}"
        )
    own, client = t.long(), owners(named.off)
    if not bool(((own >= 0) & (own < off.diff()[client])).all()):
        raise ProtocolError(f"expected {what}, got others")
    places = off[client] + own
    if not bool((places.diff() > 0).all()):
        raise ProtocolError(f"expected {what} in ascending order, got another order")
    return places


def check_like(rows: Tensor, own: Tensor) -> Tensor:
    """Return rows (k, D) of other silos; raise `ProtocolError` unless they are as the own (r, D).

    What is made of them has as many columns, which would be any number else.
    """
    if rows.dim() != 2 or rows.shape[1:] != own.shape[1:] or rows.dtype is not own.dtype:
        raise ProtocolError(
            f"expected rows of {own.shape[-1]} values of {own.dtype}, got {rows.dtype} of shape "
            f"{tuple(rows.shape)}"
        )
    return rows


@lru_cache(maxsize=64)  # a millisecond
def _memory_shapes(
    model: AnyModel, optimizer: Optimizer, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of one client's optimizer state, by name.

    Tensors of device `meta` would need no memory, but torch imports 500 modules for the first one,
    which a run's clock would count.
    """
    blank = {
        name: torch.empty(1, *shape, dtype=dtype) for name, shape in model.weight_shapes.items()
    }
    return {name: (tuple(t.shape[1:]), t.dtype) for name, t in optimizer.init(blank).items()}


def _refuse(name: str, t: Tensor, shape: tuple[int, ...], dtype: torch.dtype, reason: str) -> None:
    if t.shape != shape:
        raise ProtocolError(f"expected {name} of shape {shape}, got {tuple(t.shape)}: {reason}")
    raise ProtocolError(f"expected {name} of {dtype}, got {t.dtype}: {reason}")


def _few(names: Mapping[str, object]) -> str:
    """Return some of the names, as a server may send any number of any length."""
    shown = [repr(name[:40])[1:-1] for name in list(names)[:6]]
    return ", ".join(shown + ["..."] * (len(names) > 6)) or "none"
