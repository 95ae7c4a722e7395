"""What the kernels are given, and how they are compiled."""

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numba import njit
from numba.core import event

from silograph.core import key, numba_extensions
from silograph.core.compiling import kept_on_disk
from silograph.core.numba_extensions import SelfContained, copied

# --- compile notice ------------------------------------------------------------------------------
# Progress of compilation: which kernel the first run on a machine waits for, and how long.


LINE = "compiling kernels that this run needs, once for this machine: up to a minute ..."
LINE_FOR_ALL = "compiling kernels for later runs, once for this machine: some minutes ..."
# What the kernels do, by the names of their functions; `predict` is that of two.
PLAIN_NAMES = {
    "train": "training",
    "train_flow": "training with chosen neighbors",
    "train_stored": "training with stored rows",
    "first_stage": "outputs of the first layer",
    "predict": "predictions",
    "untouched_rows_after": "optimizer",
    "kept_rows_after": "kept optimizers",
    "finish": "layers of ratings",
    "finish_back": "gradients of ratings",
    "loss_gradient": "loss of ratings",
    "tally": "scores",
    "add_rows": "sums of rows",
    "add_slices": "sums of weights",
    "add_patched": "sums of weights in parts",
    "compare": "comparison of weights",
    "measure_change": "norms of updates",
}
# The second event spans a compilation, or the loading of one from the cache, for each signature.
COMPILE, COMPILER_LOCK = "numba:compile", "numba:compiler_lock"


class CompileWatch(event.Listener):
    """Reports each kernel that is compiled; what comes from the cache on disk is not.

    Attributes:
        seconds: that compiling has taken so far.
        warm_up_seconds: that compiling, or loading from the cache on disk, has taken so far.
        kernels: number of kernels compiled so far, the current one included.
    """

    def __init__(self, report: Callable[[str], None], first_line: str) -> None:
        self.seconds = 0.0
        self.warm_up_seconds = 0.0
        self.kernels = 0
        self._report, self._first_line = report, first_line
        # A kernel's compilation has those that it calls inside.
        self._inside = {COMPILE: 0, COMPILER_LOCK: 0}
        self._began = {COMPILE: 0.0, COMPILER_LOCK: 0.0}

    def on_start(self, event: event.Event) -> None:
        """Report a kernel that starts to be compiled, and note when it is compiled or loaded."""
        if not self._inside[event.kind]:
            if event.kind == COMPILE:
                if not self.kernels:
                    self._report(self._first_line)
                self.kernels += 1
                self._report(f"compiling kernel {self.kernels} ({name_of(event)}) ...")
            self._began[event.kind] = time.monotonic()
        self._inside[event.kind] += 1

    def on_end(self, event: event.Event) -> None:
        """Add the time of a function that no other one needed."""
        self._inside[event.kind] -= 1
        if self._inside[event.kind]:
            return
        passed = time.monotonic() - self._began[event.kind]
        if event.kind == COMPILE:
            self.seconds += passed
        else:
            self.warm_up_seconds += passed


def name_of(event: event.Event) -> str:
    """Return what the function does that an event is about."""
    name = str((event.data or {})["dispatcher"].py_func.__name__)
    return PLAIN_NAMES.get(name, name)


@contextmanager
def report_compiling(
    report: Callable[[str], None], first_line: str = LINE
) -> Iterator[CompileWatch]:
    """Inside, `report` hears when kernels have to be compiled; yields how long that has taken."""
    watch = CompileWatch(report, first_line)
    with event.install_listener(COMPILE, watch), event.install_listener(COMPILER_LOCK, watch):
        yield watch


Function = TypeVar("Function", bound=Callable[..., Any])
# Not literals, for each of which numba would compile the called function anew.
ZERO = cast(int, np.int64(0))
TRAINING, PREDICTING = cast(bool, np.True_), cast(bool, np.False_)

Array = np.ndarray
Absent = Any  # None, in kernels that have no code for the member: see `core.numba_extensions`

# Sums may be reordered and contracted for speed; NaN and infinity keep their meaning. Division is
# NumPy's: numba's own check for zero would keep loops from being vectorized.
FAST = {"contract", "reassoc", "nsz", "arcp"}
OPTIONS: dict[str, Any] = {
    "fastmath": FAST,
    "error_model": "numpy",
    "nogil": True,
    "no_cfunc_wrapper": True,  # what nobody calls is not made
}

# What a compiled layer is, by the name that its convolution gives (`Conv.kernel`): X W + b, with a
# sum over neighbors, and with a second matrix for the node's own row.
FORMS = {"linear": 0, "sum": 1, "rooted sum": 2}
LINEAR, SUM, ROOTED = FORMS["linear"], FORMS["sum"], FORMS["rooted sum"]


@cache
def sources() -> bytes:
    """Return a digest of all that is compiled together."""
    shared = (Path(str(module.__file__)) for module in (key, numba_extensions))
    files = [*sorted(Path(__file__).parent.glob("*.py")), *shared]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).digest()


def compiled(function: Function) -> Function:
    """Compile a function that kernels call and that allocates nothing; Python must not call it.

    Kernels copy its code, so it is kept on disk with theirs only. It counts no references to
    arrays: its caller keeps them alive. It may return arrays to others of its kind, in a tuple,
    since numba lets such a function return no array by itself. A kernel would drop a reference
    that was never counted, so a kernel must not call a function that returns arrays.
    """
    return copied(function, OPTIONS, counts_references=False)


def allocating(function: Function) -> Function:
    """Compile a function that allocates arrays and either returns them to a kernel or drops them.

    A function that counts no references would never free what it is returned here.
    """
    return copied(function, OPTIONS, counts_references=True)


def kernel(function: Function) -> Function:
    """Compile a function that Python calls, and keep its code on disk.

    Its bits do not depend on what else is loaded. No compiled function calls it, so that a process
    that compiles it waits for no other kernel.

    numba looks for changes in the file of a function only, not in those of functions that it calls:
    after an upgrade old code would run on. Here every file counts.
    """
    made: Any = njit(**OPTIONS, cache=True, pipeline_class=SelfContained)(function)
    return cast(Function, kept_on_disk(made, sources()))


class CalledArrays(NamedTuple):
    """The clients that are called: C of those that rows and features are of."""

    position: Array  # (C,) where rows and features have them
    off: Array  # (C + 1,) rows of each in what is filled
    used_off: Array  # (C + 1,) used rows of each in their weights


class RowArrays(NamedTuple):
    """The rows of a block; columns and rows within a client are numbered from 0."""

    off: Array  # (C + 1,)
    row_key: Array  # (n,) uint64
    ptr: Array  # (n + 1,) edges of every row
    col: Array  # (E,) neighbor
    value: Array  # (E,) both scales of the convolution
    back: Array  # (E,) the same of the edge in the other direction
    own: Array  # (n,) weight of a row's own z (GCN)
    train: Array  # training rows, ascending in a client
    train_off: Array  # (C + 1,)
    y: Array  # labels, (n, 1) or (n, K)
    class_weight: Array  # (K,) of the loss of each class, or of bits that are 1; (0,): all are 1


class InputArrays(NamedTuple):
    """Features: `dense` (n, F); or sparse, and `dense` is empty."""

    dense: Array
    ptr: Array  # (n + 1,) entries of every row
    col: Array  # used row of the client
    value: Array
    t_ptr: Array  # (U + 1,) the same entries by used row
    t_row: Array  # row of the client
    t_value: Array
    used_off: Array  # (C + 1,) used rows of each client
    used: Array  # (U,) which row of the shared first matrices it is


class ModelShape(NamedTuple):
    """Model and schedule."""

    layers: int
    form: Array  # (L,) what each layer is, see `FORMS`
    width: Array  # (L + 1,) of what enters each layer, and leaves the last
    place: Array  # (L, 3) where a layer's matrix, second matrix and bias are in `Weights.flat`
    act: Array  # (L,) width of all that enters layers 1 to l
    widest: int  # of what leaves a layer
    rooted: bool  # whether a layer has a second matrix
    outputs: int
    multilabel: bool
    threshold: int  # levels of 2^16 that dropout drops
    scale: float  # 1 / share that it keeps
    x_threshold: int  # the same of the dropout of features
    x_scale: float
    epochs: int
    batch: int  # training rows in a step, 0 for all
    fanout: Array | Absent  # (L,) neighbors drawn by layer, 0 for all


class StepRule(NamedTuple):
    """The optimizer: Adam, or SGD with momentum `beta1`; and how hard the start pulls."""

    adam: bool
    lr: float
    decay: float  # of the first layer
    later_decay: float
    later: int  # where later layers begin in `Weights.flat`
    beta1: float
    beta2: float
    eps: float
    mu: float  # of the proximal term, 0 for none


class BegunRows(NamedTuple):
    """What rows of all clients start as, where kernels fill them in; else empty."""

    rows: Array  # (M, U, D)
    first_rows: Array
    second_rows: Array


class MaskArrays(NamedTuple):
    """Masks and moments of all clients, in the shapes of the weights, changed in place.

    Moments are empty if they do not outlive the call.
    """

    begun: BegunRows
    rows: Array  # (M, U, D)
    flat: Array  # (C, P); biases have 1
    first_rows: Array
    second_rows: Array
    first_flat: Array
    second_flat: Array
    near: float  # how hard the start pulls: the gradient's length in each tensor
    l1: float  # weight of the masks' L1 norm
    least: float  # what a mask's entry must reach in evaluation


class ParamArrays(NamedTuple):
    """Weights and moments of all clients, changed in place."""

    start: Array  # (G, F, D) bases that `rows` start from; empty if they hold their start already
    which: Array  # (M, C) base of each client
    begun: BegunRows
    rows: Array  # (M, U, D) first matrices
    flat: Array  # (C, P) the other weights
    first_rows: Array  # moments, of the same shapes; empty if they do not outlive the call
    second_rows: Array
    first_flat: Array
    second_flat: Array
    steps: Array  # (C,) steps taken so far
    masks: MaskArrays | Absent


class Weights(NamedTuple):
    """One client's weights, or moments of them."""

    first: Array  # (u, D)
    second: Array  # (u, D), the first again where there is only one
    flat: Array  # (P,)


class Masking(NamedTuple):
    """What one client's weights are products of."""

    raw: Weights
    mask: Weights
    first: Weights  # moments of the masks
    second: Weights
    other: Array  # memory for the gradient of a mask
    near: float  # see `MaskArrays`
    l1: float
    least: float


class TrainedWeights(NamedTuple):
    """One client's weights, and what their steps read and change."""

    weights: Weights  # under masks: the products
    start: Weights  # read where there is a pull to it only
    first: Weights  # moments
    second: Weights
    mask_state: Masking | Absent


class Moving(NamedTuple):
    """What steps move, and its moments, (N,) each."""

    value: Array
    first: Array
    second: Array


class TrainedMatrix(NamedTuple):
    """The same of one matrix (u, D) of N = u D weights."""

    weights: Array
    start: Array  # (N,)
    raw: Moving  # what is under the mask; without one, the weights themselves
    mask: Moving | Absent
    mask_state: Masking | Absent


class Spare(NamedTuple):
    """Memory of one thread for what does not outlive a client: its start and fresh moments."""

    start: Array  # (M, u, D), empty if there is no pull
    start_flat: Array  # (P,)
    moments: Array  # (2, M, u, D); u = 0 if they are kept or never read, see `spare`
    moments_flat: Array  # (2, P)
    mask_moments: Array  # the same of masks; empty without masks
    mask_moments_flat: Array
    product: Array  # (M, u, D) products of weights and masks, empty without masks
    product_flat: Array  # (P,)
    other: Array  # see `Masking`


class Filled(NamedTuple):
    """What training fills, of the clients that are called."""

    loss: Array  # (C,) float64
    logits: Array  # (n, K)
    work: Array  # (C, 2 L + 4) int64 counts, see `training.count`


class Scratch(NamedTuple):
    """Memory of one thread, large enough for its largest client."""

    nodes: Array  # (n,) rows that take part, seeds first
    place: Array  # (n,) where a row stands among them, -1 if it does not
    m: Array  # (L + 1,) rows before each layer, and after the last
    ptr: Array  # (L, n + 1) drawn edges of each layer
    col: Array
    value: Array
    x: Array  # (n, F) dense features that were drawn, or are after dropout
    x_value: Array  # sparse features after dropout; empty if there is none
    t_value: Array  # the same by used row
    x_start: Array  # (n,) entries of drawn sparse features
    x_end: Array
    act: Array  # what enters layers 1 and up, layer after layer
    z: Array  # (n * W,) mapped rows, and their gradient, for the widest layer
    self_z: Array  # (n * W,) rows mapped by the second matrix
    out: Array  # (n, K) logits, then their gradient
    grad: Array  # (2, n * W)
    flat: Array  # (P,) gradient
    rows: Array  # (u, D) gradient
    words: Array  # (W / 4,) uint64 random words
    levels: Array  # the same memory as uint16
    order: Array  # (n,) training rows in the order of their batches
    scores: Array  # of the neighbors of a row that are kept so far, largest first
    edges: Array  # of the same neighbors
    credit: Array  # (n,) gradient of the loss by the gate of each row's messages; empty: no gates


# --- Copies and sums of arrays of one shape, as loops --------------------------------------------
#
# An assignment of an array to a slice, `to[:] = of`, would compare the shapes: numba compiles what
# builds its message, strings and all, for several seconds.


@compiled
def copy(of: Array, to: Array) -> None:
    """Fill `to` (n,) with the first n entries of `of`."""
    for i in range(to.shape[0]):
        to[i] = of[i]


@compiled
def copy_rows(of: Array, to: Array) -> None:
    """Fill `to` (n, d) with the first n rows of `of`."""
    for i in range(to.shape[0]):
        for j in range(to.shape[1]):
            to[i, j] = of[i, j]


@compiled
def clear(rows: Array) -> None:
    """Fill rows (n, d) with 0."""
    for i in range(rows.shape[0]):
        for j in range(rows.shape[1]):
            rows[i, j] = 0


@compiled
def clear_row(row: Array) -> None:
    """Fill a row (d,) with 0."""
    for j in range(row.shape[0]):
        row[j] = 0


@compiled
def add_rows(of: Array, to: Array) -> None:
    """Add `of` (n, d) to the first n rows of `to`."""
    for i in range(of.shape[0]):
        for j in range(of.shape[1]):
            to[i, j] += of[i, j]


# --- Memory that a thread uses for all its clients, one after the other ---------------------------
#
# It is allocated here, not in kernels: numba compiles what allocates arrays for seconds.


def scratch(
    rows: RowArrays,
    x: InputArrays,
    shape: ModelShape,
    clients: Array,
    dtype: np.dtype,
    flat: int,
    first: int,
) -> Scratch:
    """Return memory for the clients at these positions of `rows`; P = `flat`, D = `first`."""
    start, end = rows.off[clients], rows.off[clients + 1]
    sizes, edges, most = end - start, 1, 1
    n = int(sizes.max(initial=1))
    u = int((x.used_off[clients + 1] - x.used_off[clients]).max(initial=16))
    if shape.fanout is not None:
        drawn, between = np.zeros_like(sizes), rows.ptr[end] - rows.ptr[start]
        for form, fanout in zip(shape.form, shape.fanout, strict=True):
            if form != LINEAR:  # a row itself is an edge in what flow networks choose
                drawn += sizes
                drawn += between if fanout == 0 else np.minimum(between, sizes * fanout)
        edges, most = int(drawn.max(initial=1)), int(shape.fanout.max(initial=1))
    dense, sampled, widest = x.dense.shape[0] > 0, shape.fanout is not None, shape.widest
    dropping, features = shape.x_threshold > 0 and shape.epochs > 0, x.dense.shape[1]
    entries, values = 0 if dense else n, len(x.value) if dropping else 0
    words = np.empty((max(widest, features if dropping else 0) + 3) // 4, np.uint64)
    return Scratch(
        nodes=np.empty(n, np.int64),
        place=np.full(n, -1, np.int64),
        m=np.zeros(shape.layers + 1, np.int64),
        ptr=np.empty((shape.layers if sampled else 1, n + 1), np.int64),
        col=np.empty(edges, np.int64),
        value=np.empty(edges, dtype),
        x=np.empty((n if (sampled or dropping) and dense else 0, features), dtype),
        x_value=np.empty(values, dtype),
        t_value=np.empty(values, dtype),
        x_start=np.empty(entries, np.int64),
        x_end=np.empty(entries, np.int64),
        act=np.empty(n * shape.act[-1], dtype),
        z=np.empty(n * widest, dtype),
        self_z=np.empty((n if shape.rooted else 1) * widest, dtype),
        out=np.empty((n, shape.outputs), dtype),
        grad=np.empty((2, n * widest), dtype),
        flat=np.empty(flat, dtype),
        rows=np.empty((u, first), dtype),
        words=words,
        levels=words.view(np.uint16),
        order=np.empty(n, np.int64),
        scores=np.empty(most, np.int64),
        edges=np.empty(most, np.int64),
        credit=np.empty(0, dtype),
    )


def spare(params: ParamArrays, steps: StepRule, used: int, *, single_step: bool) -> Spare:
    """Return memory for clients of at most `used` used rows, each of which takes a `single_step`.

    Moments are not read after a client's only step, so Adam allocates no rows for them.
    """
    (matrices, _, first), flat, dtype = params.rows.shape, params.flat.shape[1], params.rows.dtype
    masked, keeps_moments = params.masks is not None, len(params.first_flat) > 0
    pulled = steps.mu > 0 or masked
    moment_rows = 0 if keeps_moments or (single_step and steps.adam) else used
    return Spare(
        start=np.empty((matrices, used if pulled else 0, first), dtype),
        start_flat=np.empty(flat if pulled else 0, dtype),
        moments=np.empty((2, matrices, moment_rows, first), dtype),
        moments_flat=np.empty((2, flat), dtype),
        mask_moments=np.empty((2, matrices, moment_rows if masked else 0, first), dtype),
        mask_moments_flat=np.empty((2, flat if masked else 0), dtype),
        product=np.empty((matrices, used if masked else 0, first), dtype),
        product_flat=np.empty(flat if masked else 0, dtype),
        other=np.empty(max(used * first, flat) if masked else 0, dtype),
    )
