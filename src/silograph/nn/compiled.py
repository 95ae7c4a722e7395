"""Hands blocks to the compiled kernels: arrays in, tensors out, work counted.

Kernels check no bounds. What does not come from the block itself is checked by `nn.backends`, which
alone calls these functions.

C: clients. n: rows. F: features. U: used rows of the first weights. H: hidden width. K: outputs.
L: layers.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor

from silograph.core.errors import ConfigError
from silograph.core.key import DROPOUT_LEVELS, Key, keep_probability
from silograph.core.payload import Patched, Stacked, offsets
from silograph.graph.block.block import ClientBlock, SparseRows
from silograph.nn.conv import Conv, Params
from silograph.nn.correction import Proximal
from silograph.nn.fit import Fitted, Schedule, Training, patched
from silograph.nn.forward import Staged
from silograph.nn.kernel_work import report_pass, report_training
from silograph.nn.kernels import arrays
from silograph.nn.kernels import optim as kernels_optim
from silograph.nn.kernels import training as kernels
from silograph.nn.optim import SGD, Adam
from silograph.nn.start import (
    Start,
    StartFields,
    joined_bases,
    start_fields,
    starts_compact,
    used_rows,
    whole,
)

NO_DRAW = np.empty(0, np.int64)
UNKNOWN_DEGREE = 2**31  # no row has as many neighbors


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A block as the kernels want it; of a part of a block, the arrays are those of the whole."""

    rows: arrays.RowArrays
    inputs: arrays.InputArrays  # columns: used rows of the client
    features: np.ndarray  # feature of every sparse entry; empty if dense
    called: arrays.CalledArrays  # the clients of the block, which may be a part of the arrays

    def take(self, positions: Tensor, off: Tensor) -> "_Prepared":
        """Return the same for calls to the clients at `positions` (k,), who have rows `off`."""
        used = torch.from_numpy(self.called.used_off).diff()[positions]
        position = torch.from_numpy(self.called.position)[positions]
        called = arrays.CalledArrays(_array(position), _array(off, np.int64), offsets(used).numpy())
        return replace(self, called=called)


def fit(
    model: Staged,
    training: Training,
    block: ClientBlock,
    start: Start,
    memory: Mapping[str, Tensor] | None,
    key: Key,
) -> Fitted:
    """Train every client of a block; see `silograph.nn.fit.fit`."""
    fields = start_fields(model, start, block.num_clients)
    compact = memory is None and starts_compact(model, fields, block.x)
    data = _prepared(model, block, compact=compact)
    degree = block.adj.degree
    shape = _shape(model, training.schedule, int(degree.max()) if len(degree) else 0)
    used = int(data.called.used_off[-1])
    params = _params(model, block, fields, memory, used=used, compact=compact)
    clients, rows = block.num_clients, int(block.off[-1])
    filled = arrays.Filled(
        loss=np.zeros(clients),
        logits=np.empty((rows, model.outputs), params.flat.dtype),
        work=np.zeros((clients, 2 * len(model.stages) + 4), np.int64),
    )
    before = params.steps.copy()

    def train(first: int, end: int) -> None:
        kernels.train(
            first,
            end,
            data.called,
            data.rows,
            data.inputs,
            shape,
            _steps(training),
            params,
            np.uint64(key.value),
            filled,
        )

    _share_out(block, train)
    report_training(model, training, block, filled.work)
    weights = _weights(model, training, block, fields, params, before if compact else None)
    kept = {} if memory is None else _memory(model, training, block, params)
    logits, steps = torch.from_numpy(filled.logits), torch.from_numpy(params.steps - before)
    loss = torch.from_numpy(filled.loss).to(logits.dtype)
    return Fitted(weights, kept, loss, logits, steps)


def predict(model: Staged, weights: Mapping[str, Tensor], block: ClientBlock) -> Tensor:
    """Return logits (n, K) of one model for all clients."""
    data = _prepared(model, block, compact=isinstance(block.x, SparseRows))
    first = [weights[name].contiguous().numpy() for name in model.first_maps]
    w = arrays.Weights(
        first[0], first[-1], _flat(model, {k: t[None] for k, t in weights.items()})[0]
    )
    logits = np.empty((int(block.off[-1]), model.outputs), w.flat.dtype)
    shape = _shape(model, Schedule(0))

    def run(start: int, end: int) -> None:
        kernels.predict(
            start, end, data.called, data.rows, data.inputs, data.features, shape, w, logits
        )

    _share_out(block, run)
    report_pass(model, block)
    return torch.from_numpy(logits)


def rest(training: Training, start: Tensor, steps: int) -> Tensor:
    """Return where weights (R, D) are after some steps of a fresh optimizer without data."""
    weight = start.clone(memory_format=torch.contiguous_format)
    kernels_optim.rest(weight.numpy(), _steps(training), steps)
    return weight


@lru_cache(maxsize=1)
def _blas() -> ThreadpoolController:
    # What products in kernels call: it must be loaded to be found. Looking takes milliseconds.
    importlib.import_module("scipy.linalg.cython_blas")
    return ThreadpoolController()


def _share_out(block: ClientBlock, run: Callable[[int, int], None]) -> None:
    """Run ranges of clients, with about as many rows each, on torch's number of threads."""
    threads = min(torch.get_num_threads(), block.num_clients)
    with _blas().limit(limits=1, user_api="blas"):
        if threads == 1:
            run(0, block.num_clients)
            return
        goals = torch.linspace(0, float(block.off[-1]), threads + 1, dtype=torch.float64)
        ends = torch.searchsorted(block.off.double(), goals).tolist()
        ends[0], ends[-1] = 0, block.num_clients
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(run, ends[:-1], ends[1:]))


def _prepared(model: Staged, block: ClientBlock, *, compact: bool) -> _Prepared:
    """Return the block's arrays, worked out once for each convolution."""
    name = ("kernels", _conv(model), compact)
    if name not in block.memo and block.source is not None:
        whole, positions = block.source
        block.memo[name] = _prepared(model, whole, compact=compact).take(positions, block.off)
    if name not in block.memo:
        rows = _rows(model, block)
        inputs, features = _inputs(block, compact=compact)
        position = np.arange(block.num_clients)
        called = arrays.CalledArrays(position, rows.off, inputs.used_off)
        block.memo[name] = _Prepared(rows, inputs, features, called)
    found = block.memo[name]
    assert isinstance(found, _Prepared)
    return found


def _conv(model: Staged) -> Conv:
    """Return the convolution of the layers that sum over neighbors, if there are any."""
    return next((stage.conv for stage in model.stages if stage.conv.sums), model.stages[0].conv)


def _rows(model: Staged, block: ClientBlock) -> arrays.RowArrays:
    conv, adj, values = _conv(model), block.adj, block.adj.values
    assert values is not None  # blocks carry values of the run's dtype
    scales = conv.scales
    assert scales is not None  # of what has a kernel
    degree = adj.degree.to(values.dtype)[:, None]
    one = torch.ones_like(degree)
    pre, post = scales.before(degree), scales.after(degree)
    pre, post = (one if scale is None else scale for scale in (pre, post))
    neighbor = adj.indices.long()
    train = block.split.train.nonzero()[:, 0]
    first = block.off[block.client]
    own = scales.itself(degree)
    return arrays.RowArrays(
        off=_array(block.off, np.int64),
        row_key=_array(block.row_key, np.int64).view(np.uint64),
        ptr=_array(adj.indptr * conv.sums, np.int64),
        col=_array(neighbor - first[adj.row], np.int32),
        value=_array((post[adj.row] * pre[neighbor])[:, 0]),
        back=_array((post[neighbor] * pre[adj.row])[:, 0]),
        own=_array((torch.zeros_like(one) if own is None else own)[:, 0]),
        train=_array(train - first[train], np.int64),
        train_off=_array(offsets(block.num_train), np.int64),
        y=_array(block.y if block.y.dim() == 2 else block.y[:, None], np.int64),
    )


def _array(t: Tensor, dtype: "np.typing.DTypeLike | None" = None) -> np.ndarray:
    """Return a contiguous array of a fixed dtype: every other one would be compiled anew."""
    return np.ascontiguousarray(t.numpy(), dtype=dtype)


def _inputs(block: ClientBlock, *, compact: bool) -> tuple[arrays.InputArrays, np.ndarray]:
    """Return features; `compact`: weights of a client are its used rows, else all F."""
    clients, width = block.num_clients, block.num_features
    if isinstance(block.x, Tensor) or not compact:
        used, off = torch.arange(width).repeat(clients), torch.arange(clients + 1) * width
    else:
        used, off = block.x.used.feature, block.x.used.off
    numbers = {"used_off": _array(off, np.int64), "used": _array(used, np.int64)}
    if isinstance(block.x, Tensor):
        dense = _array(block.x)
        ptr, col, value = np.empty(0, np.int64), np.empty(0, np.int32), dense.reshape(-1)[:0]
        return arrays.InputArrays(dense, ptr, col, value, ptr, col, value, **numbers), col
    csr = block.x.csr
    columns = block.x.used.csr if compact else block.x.stacked
    back, first = columns.transposed, block.off[block.client]
    assert csr.values is not None  # features carry values
    assert back.values is not None
    inputs = arrays.InputArrays(
        dense=np.empty((0, 0), csr.values.numpy().dtype),
        ptr=_array(csr.indptr, np.int64),
        col=_array(columns.indices.long() - off[block.client[csr.row]], np.int32),
        value=_array(csr.values),
        t_ptr=_array(back.indptr, np.int64),
        t_row=_array(back.indices.long() - first[back.indices.long()], np.int32),
        t_value=_array(back.values),
        **numbers,
    )
    return inputs, _array(csr.indices, np.int32)


def _by_layer(model: Staged, schedule: Schedule, most: int) -> np.ndarray:
    """Return neighbors drawn by layer; nobody has more than `most`, and memory is for that.

    Raises:
        ConfigError: not a number for each layer that sums over neighbors.
    """
    sums = [stage.conv.sums for stage in model.stages]
    hops = sum(sums) or len(sums)
    fanout = schedule.neighbors.fanout(hops)
    if fanout is None or len(fanout) != hops or min(fanout) < 0:
        raise ConfigError(f"expected a fanout for each of {hops} layers, got {fanout}")
    counts = iter(fanout)
    drawn = [next(counts) if hears else 0 for hears in reversed(sums)]
    return np.array([min(count, max(most, 1)) for count in reversed(drawn)], np.int64)


def _shape(model: Staged, schedule: Schedule, most: int = UNKNOWN_DEGREE) -> arrays.ModelShape:
    stages = model.stages
    widths = [stage.outputs for stage in stages]
    keep = keep_probability(model.dropout)
    return arrays.ModelShape(
        layers=len(stages),
        form=np.array([arrays.FORMS[str(stage.conv.kernel)] for stage in stages], np.int64),
        width=np.array([model.features, *widths], np.int64),
        place=_places(model),
        act=np.array([0, *widths[:-1]], np.int64).cumsum(),
        widest=max(widths),
        rooted=any(stage.conv.rooted for stage in stages),
        outputs=model.outputs,
        multilabel=model.task == "multilabel",
        threshold=round((1 - keep) * DROPOUT_LEVELS),
        scale=1 / keep,
        epochs=schedule.epochs,
        batch=schedule.batch_size or 0,
        fanout=NO_DRAW if schedule.whole else _by_layer(model, schedule, most),
    )


def _steps(training: Training) -> arrays.StepRule:
    mu = sum(c.mu for c in training.corrections if isinstance(c, Proximal))
    match training.optimizer:
        case Adam(lr, decay, beta1, beta2, eps):
            return arrays.StepRule(True, lr, decay, beta1, beta2, eps, float(mu))
        case SGD(lr, decay, momentum):
            return arrays.StepRule(False, lr, decay, momentum, 0.0, 0.0, float(mu))
    raise AssertionError(f"{training.optimizer} is not compiled: see why_not_compiled")


def _later_names(model: Staged) -> Iterator[str]:
    """Names of the weights after the first matrices, in the kernels' order."""
    yield "0.bias"
    for layer, stage in enumerate(model.stages[1:], start=1):
        yield from (f"{layer}.{name}" for name in stage.conv.maps)
        yield f"{layer}.bias"


def _places(model: Staged) -> np.ndarray:
    """Return where each layer's matrix, second matrix and bias are in `_flat`, (L, 3)."""
    names = list(_later_names(model))
    sizes = [torch.Size(model.weight_shapes[name]).numel() for name in names]
    start = dict(zip(names, np.cumsum([0, *sizes]).tolist(), strict=False))
    maps = [[f"{layer}.{name}" for name in s.conv.maps] for layer, s in enumerate(model.stages)]
    return np.array(
        [
            [start.get(of[0], 0), start.get(of[-1], 0), start[f"{layer}.bias"]]
            for layer, of in enumerate(maps)
        ],
        np.int64,
    )


def _flat(model: Staged, tensors: Mapping[str, Tensor]) -> np.ndarray:
    """Return tensors (C, ...) of the weights after the first matrices side by side, (C, P)."""
    flat: np.ndarray = torch.cat(
        [tensors[name].flatten(1) for name in _later_names(model)], dim=1
    ).numpy()
    return flat


def _unflat(model: Staged, flat: np.ndarray) -> Params:
    """Return what `_flat` put side by side."""
    shapes = model.weight_shapes
    names = list(_later_names(model))
    parts = torch.from_numpy(flat).split([torch.Size(shapes[n]).numel() for n in names], dim=1)
    return {n: part.reshape(len(flat), *shapes[n]) for n, part in zip(names, parts, strict=True)}


def _matrices(model: Staged, tensors: Mapping[str, Tensor]) -> np.ndarray:
    """Return first matrices (C, F, D) as rows of all clients, (M, C * F, D), a copy."""
    rows: np.ndarray = torch.stack([tensors[n].flatten(0, 1) for n in model.first_maps]).numpy()
    return rows


def _params(
    model: Staged,
    block: ClientBlock,
    fields: StartFields,
    memory: Mapping[str, Tensor] | None,
    *,
    used: int,
    compact: bool,
) -> arrays.ParamArrays:
    """Return weights and moments; first matrices have `used` rows in all, those that clients use.

    `compact`: these are not all of their rows.
    """
    maps = model.first_maps
    flat = _flat(model, {n: whole(field) for n, field in fields.items() if n not in maps})
    none3, none2 = np.empty((0, 0, 0), flat.dtype), np.empty((0, 0), flat.dtype)
    given, which = joined_bases([fields[name] for name in maps])
    if len(given):
        rows = np.empty((len(maps), used, given.shape[-1]), flat.dtype)
    elif compact:
        rows = torch.stack([used_rows(fields[name], block.x) for name in maps]).numpy()
    else:
        rows = _matrices(model, {name: whole(fields[name]) for name in maps})
    moments = [none3, none3, none2, none2]
    steps = np.zeros(block.num_clients, np.int64)
    if memory is not None:
        moments = _moments(model, memory, rows, flat)
        # SGD does not count: its velocity is what it was given, from the first step on.
        steps = np.ones(block.num_clients, np.int64)
        if "steps" in memory:
            steps = memory["steps"].to(torch.int64).contiguous().numpy()
    weights = given.numpy(), _array(which), rows, flat
    first_rows, second_rows, first_flat, second_flat = moments
    return arrays.ParamArrays(*weights, first_rows, second_rows, first_flat, second_flat, steps)


def _moments(
    model: Staged, memory: Mapping[str, Tensor], rows: np.ndarray, flat: np.ndarray
) -> list[np.ndarray]:
    """Return copies of the optimizer's state: of the matrices, then of the rest."""
    found: dict[str, Params] = {"first": {}, "second": {}, "momentum": {}}
    for name, m in memory.items():
        kind, slash, weight = name.partition("/")
        if slash:
            found[kind][weight] = m
    pairs = [found["first"] or found["momentum"], found["second"]]
    by_rows = [_matrices(model, m) if m else np.zeros_like(rows) for m in pairs]
    by_flat = [_flat(model, m) if m else np.zeros_like(flat) for m in pairs]
    return by_rows + by_flat


def _memory(
    model: Staged, training: Training, block: ClientBlock, params: arrays.ParamArrays
) -> Params:
    """Return the optimizer's state after training, as `Optimizer.init` names it."""
    optimizer = training.optimizer
    moments = {
        "first": (params.first_rows, params.first_flat),
        "second": (params.second_rows, params.second_flat),
    }
    if isinstance(optimizer, SGD):
        moments = {"momentum": moments["first"]} if optimizer.momentum else {}
    state: Params = {}
    for kind, (rows, flat) in moments.items():
        tensors = _unflat(model, flat) | _split(model, block, rows)
        state |= {f"{kind}/{name}": tensors[name] for name in model.weight_shapes}
    if isinstance(optimizer, Adam):
        state["steps"] = torch.from_numpy(params.steps).float()
    return state


def _split(model: Staged, block: ClientBlock, rows: np.ndarray) -> Params:
    """Return the first matrices (C, F, D) from rows of all clients."""
    shape = block.num_clients, block.num_features, rows.shape[2]
    return {
        name: torch.from_numpy(part).view(shape)
        for name, part in zip(model.first_maps, rows, strict=True)
    }


def _weights(
    model: Staged,
    training: Training,
    block: ClientBlock,
    fields: StartFields,
    params: arrays.ParamArrays,
    before: np.ndarray | None,
) -> dict[str, Stacked | Patched]:
    """Return trained weights; `before` (C,) are steps at the start if only used rows were held."""
    found: dict[str, Stacked | Patched] = {
        name: Stacked(t) for name, t in _unflat(model, params.flat).items()
    }
    if before is None:
        found |= {n: Stacked(t) for n, t in _split(model, block, params.rows).items()}
    else:
        steps = torch.from_numpy(params.steps - before)
        for name, rows in zip(model.first_maps, params.rows, strict=True):
            assert isinstance(block.x, SparseRows)  # only then are there used rows
            t = torch.from_numpy(rows)
            found[name] = patched(partial(rest, training), fields[name], t, block.x, steps)
    return {name: found[name] for name in model.weight_shapes}
