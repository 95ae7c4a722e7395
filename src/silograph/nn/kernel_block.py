"""A block as the arrays that the compiled kernels read, worked out once for each convolution."""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor

from silograph.core.errors import ConfigError
from silograph.core.key import DROPOUT_LEVELS, keep_probability
from silograph.core.payload import offsets
from silograph.graph.block.block import ClientBlock
from silograph.nn.conv import Conv, Params
from silograph.nn.correction import Proximal
from silograph.nn.fit import Schedule, Training
from silograph.nn.forward import Stage, Staged
from silograph.nn.kernels import arrays
from silograph.nn.optim import SGD, Adam


@dataclass(frozen=True, eq=False)
class BlockArrays:
    """A block as the kernels want it; of a part of a block, the arrays are those of the whole."""

    rows: arrays.RowArrays
    inputs: arrays.InputArrays  # columns: used rows of the client
    features: np.ndarray  # feature of every sparse entry; empty if dense
    called: arrays.CalledArrays  # the clients of the block, which may be a part of the arrays

    def take(self, positions: Tensor, off: Tensor) -> "BlockArrays":
        """Return the arrays for calls to the clients at `positions` (k,), with rows `off`."""
        used = torch.from_numpy(self.called.used_off).diff()[positions]
        position = torch.from_numpy(self.called.position)[positions]
        called = arrays.CalledArrays(
            contiguous(position), contiguous(off, np.int64), offsets(used).numpy()
        )
        return replace(self, called=called)


def prepare_block(model: Staged, block: ClientBlock, *, compact: bool) -> BlockArrays:
    """Return the block's arrays, worked out once for each convolution."""
    name = ("kernels", conv_of(model), compact)
    if name not in block.memo and block.source is not None:
        whole_block, positions = block.source
        block.memo[name] = prepare_block(model, whole_block, compact=compact).take(
            positions, block.off
        )
    if name not in block.memo:
        rows = _row_arrays(model, block)
        inputs, features = _input_arrays(block, compact=compact)
        position = np.arange(block.num_clients)
        called = arrays.CalledArrays(position, rows.off, inputs.used_off)
        block.memo[name] = BlockArrays(rows, inputs, features, called)
    block_arrays = block.memo[name]
    assert isinstance(block_arrays, BlockArrays)
    return block_arrays


def conv_of(model: Staged) -> Conv:
    """Return the convolution of the layers that sum over neighbors, if there are any."""
    return next((stage.conv for stage in model.stages if stage.conv.sums), model.stages[0].conv)


def _row_arrays(model: Staged, block: ClientBlock) -> arrays.RowArrays:
    conv, adj, values = conv_of(model), block.adj, block.adj.values
    assert values is not None  # blocks carry values of the run's dtype
    scales = conv.scales
    assert scales is not None  # of what has a kernel
    degree = adj.weighted_degree[:, None]
    ones = torch.ones_like(degree)
    pre, post = scales.sender_scale(degree), scales.receiver_scale(degree)
    pre, post = (ones if scale is None else scale for scale in (pre, post))
    neighbor = adj.indices.long()
    train = block.split.train.nonzero()[:, 0]
    first = block.off[block.client]
    own_scale = scales.itself(degree)
    return arrays.RowArrays(
        off=contiguous(block.off, np.int64),
        row_key=contiguous(block.row_key, np.int64).view(np.uint64),
        ptr=contiguous(adj.indptr * conv.sums, np.int64),
        col=contiguous(neighbor - first[adj.row], np.int32),
        value=contiguous((post[adj.row] * pre[neighbor])[:, 0] * values),
        back=contiguous((post[neighbor] * pre[adj.row])[:, 0] * values),
        own=contiguous((torch.zeros_like(ones) if own_scale is None else own_scale)[:, 0]),
        train=contiguous(train - first[train], np.int64),
        train_off=contiguous(offsets(block.num_train), np.int64),
        y=contiguous(block.y if block.y.dim() == 2 else block.y[:, None], np.int64),
        class_weight=np.empty(0)
        if block.class_weight is None
        else contiguous(block.class_weight, np.float64),
    )


def _input_arrays(block: ClientBlock, *, compact: bool) -> tuple[arrays.InputArrays, np.ndarray]:
    """Return features; `compact`: weights of a client are its used rows, else all F."""
    clients, width = block.num_clients, block.num_features
    if isinstance(block.x, Tensor) or not compact:
        used, off = torch.arange(width).repeat(clients), torch.arange(clients + 1) * width
    else:
        used, off = block.x.used.feature, block.x.used.off
    numbers = {"used_off": contiguous(off, np.int64), "used": contiguous(used, np.int64)}
    if isinstance(block.x, Tensor):
        dense = contiguous(block.x)
        ptr, col, value = np.empty(0, np.int64), np.empty(0, np.int32), dense.reshape(-1)[:0]
        return arrays.InputArrays(dense, ptr, col, value, ptr, col, value, **numbers), col
    csr = block.x.csr
    columns = block.x.used.csr if compact else block.x.stacked
    transposed, first = columns.transposed, block.off[block.client]
    assert csr.values is not None  # features carry values
    assert transposed.values is not None
    inputs = arrays.InputArrays(
        dense=np.empty((0, 0), csr.values.numpy().dtype),
        ptr=contiguous(csr.indptr, np.int64),
        col=contiguous(columns.indices.long() - off[block.client[csr.row]], np.int32),
        value=contiguous(csr.values),
        t_ptr=contiguous(transposed.indptr, np.int64),
        t_row=contiguous(transposed.indices.long() - first[transposed.indices.long()], np.int32),
        t_value=contiguous(transposed.values),
        **numbers,
    )
    return inputs, contiguous(csr.indices, np.int32)


def contiguous(t: Tensor, dtype: "np.typing.DTypeLike | None" = None) -> np.ndarray:
    """Return a contiguous array of a fixed dtype: every other one would be compiled anew."""
    return np.ascontiguousarray(t.numpy(), dtype=dtype)


# --- A model, its schedule and its optimizer as the compiled kernels read them -------------------
#
# Kernels hold the weights after the first matrices side by side: see `flatten_weights` and
# `unflatten_weights`.
#
# C: clients. L: layers. P: numbers of a client after the first matrices.


UNKNOWN_DEGREE = 2**31  # no row has as many neighbors


def model_shape(model: Staged, schedule: Schedule, most: int = UNKNOWN_DEGREE) -> arrays.ModelShape:
    """Return model and schedule as kernels read them; no row has more than `most` neighbors.

    Raises:
        ConfigError: see `_fanout_by_layer`.
    """
    stages = model.stages
    widths = [stage.outputs for stage in stages]
    keep = keep_probability(stages[-1].drop if len(stages) > 1 else 0.0)
    x_keep = keep_probability(stages[0].drop)
    return arrays.ModelShape(
        layers=len(stages),
        form=np.array([arrays.FORMS[str(stage.conv.kernel)] for stage in stages], np.int64),
        width=np.array([model.features, *widths], np.int64),
        place=_weight_positions(model),
        act=np.array([0, *widths[:-1]], np.int64).cumsum(),
        widest=max(widths),
        rooted=any(stage.conv.rooted for stage in stages),
        outputs=model.outputs,
        multilabel=model.task == "multilabel",
        threshold=round((1 - keep) * DROPOUT_LEVELS),
        scale=1 / keep,
        x_threshold=round((1 - x_keep) * DROPOUT_LEVELS),
        x_scale=1 / x_keep,
        epochs=schedule.epochs,
        batch=schedule.batch_size or 0,
        fanout=None if schedule.whole else _fanout_by_layer(model, schedule, most),
    )


def _fanout_by_layer(model: Staged, schedule: Schedule, max_degree: int) -> np.ndarray:
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
    counts_by_layer = [next(counts) if sums_neighbors else 0 for sums_neighbors in reversed(sums)]
    return np.array(
        [min(count, max(max_degree, 1)) for count in reversed(counts_by_layer)], np.int64
    )


def step_rule(training: Training) -> arrays.StepRule:
    """Return the optimizer and the proximal terms as kernels read them."""
    mu = sum(c.mu for c in training.corrections if isinstance(c, Proximal))
    later = training.model.weight_shapes["0.bias"][0]
    match training.optimizer:
        case Adam(lr, decay, beta1, beta2, eps, layers):
            decays = decay, decay if layers == "all" else 0.0
            return arrays.StepRule(True, lr, *decays, later, beta1, beta2, eps, float(mu))
        case SGD(lr, decay, momentum, layers):
            decays = decay, decay if layers == "all" else 0.0
            return arrays.StepRule(False, lr, *decays, later, momentum, 0.0, 0.0, float(mu))
    raise AssertionError(f"{training.optimizer} is not compiled: see why_not_compiled")


@lru_cache(maxsize=64)
def later_names(stages: tuple[Stage, ...]) -> Sequence[str]:
    """Return names of the weights after the first matrices, in the kernels' order."""
    names = ["0.bias"]
    for layer, stage in enumerate(stages[1:], start=1):
        names += [*(f"{layer}.{name}" for name in stage.conv.maps), f"{layer}.bias"]
    return tuple(names)


def _weight_positions(model: Staged) -> np.ndarray:
    """Return the positions of each layer's matrices and bias in `flatten_weights`, (L, 3)."""
    names = later_names(model.stages)
    sizes = [torch.Size(model.weight_shapes[name]).numel() for name in names]
    start = dict(zip(names, np.cumsum([0, *sizes]).tolist(), strict=False))
    maps = [[f"{layer}.{name}" for name in s.conv.maps] for layer, s in enumerate(model.stages)]
    return np.array(
        [
            [start.get(map_names[0], 0), start.get(map_names[-1], 0), start[f"{layer}.bias"]]
            for layer, map_names in enumerate(maps)
        ],
        np.int64,
    )


def flatten_weights(model: Staged, tensors: Mapping[str, Tensor]) -> np.ndarray:
    """Return tensors (C, ...) of the weights after the first matrices side by side, (C, P)."""
    flat: np.ndarray = torch.cat(
        [tensors[name].flatten(1) for name in later_names(model.stages)], dim=1
    ).numpy()
    return flat


def unflatten_weights(model: Staged, flat: np.ndarray) -> Params:
    """Return tensors from the array that `flatten_weights` made."""
    shapes = model.weight_shapes
    names = later_names(model.stages)
    parts = torch.from_numpy(flat).split([torch.Size(shapes[n]).numel() for n in names], dim=1)
    return {n: part.reshape(len(flat), *shapes[n]) for n, part in zip(names, parts, strict=True)}


# --- Threads that the compiled kernels run in, each with a range of a block's clients ------------


@lru_cache(maxsize=1)
def _blas_libraries() -> tuple[Any, ...]:
    # What products in kernels call: it must be loaded to be found. Looking takes milliseconds.
    importlib.import_module("scipy.linalg.cython_blas")
    controllers = ThreadpoolController().lib_controllers
    return tuple(library for library in controllers if library.user_api == "blas")


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Limit products in kernels to one thread inside the block.

    threadpoolctl's own context manager also describes the libraries, which takes longer.
    """
    thread_counts = [(library, library.num_threads) for library in _blas_libraries()]
    changed = [(library, number) for library, number in thread_counts if number != 1]
    try:
        for library, _ in changed:
            library.set_num_threads(1)
        yield
    finally:
        for library, number in changed:
            library.set_num_threads(number)


@contextmanager
def flush_subnormals() -> Iterator[None]:
    """Treat subnormal numbers as 0 in this thread inside the block.

    Confident models have gradients of 1e-38 and below, whose squares fill Adam's moments with such
    numbers. A processor takes a hundred times as long for each: a round on Amazon Photo
    grew from .18 to 1.32 s. Threads that are made inside do the same for good.
    """
    with np.errstate(under="ignore"):
        is_standard = np.float32(1e-40) * np.float32(1) != 0
    if is_standard:
        torch.set_flush_denormal(True)
    try:
        yield
    finally:
        if is_standard:
            torch.set_flush_denormal(False)


def run_in_threads(block: ClientBlock, run: Callable[[int, int], None]) -> None:
    """Run ranges of clients, with about as many rows each, on torch's number of threads."""
    threads = min(torch.get_num_threads(), block.num_clients)
    if threads == 1:
        with _one_thread_each(), flush_subnormals():
            run(0, block.num_clients)
        return

    def run_flushed(first: int, end: int) -> None:
        with flush_subnormals():
            run(first, end)

    with _one_thread_each():
        goals = torch.linspace(0, float(block.off[-1]), threads + 1, dtype=torch.float64)
        ends = torch.searchsorted(block.off.double(), goals).tolist()
        ends[0], ends[-1] = 0, block.num_clients
        pool = ThreadPoolExecutor(threads)
        try:
            list(pool.map(run_flushed, ends[:-1], ends[1:]))
        except KeyboardInterrupt:  # a thread may wait for a kernel that is being compiled
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()
