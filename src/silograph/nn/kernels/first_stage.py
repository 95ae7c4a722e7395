"""The outputs of the first stage for some rows of clients in training.

`silograph.nn.stored_rows` computes the same with torch, in the same order of operations. Torch
rounds products before it adds them up, so loops here that could be fused are apart.

C: clients. n: rows of the block. n': rows of the called clients. u: features that a client uses.
b: wanted rows. E: edges. D: output width of the stage.
"""

from typing import NamedTuple

from silograph.core.numba_extensions import pointer_to
from silograph.nn.kernels.arrays import (
    ROOTED,
    Array,
    CalledArrays,
    InputArrays,
    ModelShape,
    RowArrays,
    Weights,
    clear_row,
    compiled,
    kernel,
)
from silograph.nn.kernels.layers import REGISTER_BYTES, add_sum
from silograph.nn.kernels.stored import Trained, part


class WantedRows(NamedTuple):
    """The rows whose outputs are computed, the weights of their sums, and memory."""

    rows: Array  # (b,) row of the client
    off: Array  # (C + 1,) wanted rows of each client
    edge: Array  # (E,) value of every edge of `RowArrays`
    sender: Array  # (n,) scale of the sender of a block's rows, or (0,) for 1
    receiver: Array  # (n,) scale of the receiver, or (0,) for 1
    itself: Array  # (n,) weight of a row's own z in its sum, or (0,) for 0
    relu: bool
    mapped: Array  # (n', D) z of the rows for which `is_mapped` is true
    is_mapped: Array  # (n',) bool, False at first
    is_wanted: Array  # (n',) bool, False at first
    term: Array  # (C, 1, D) memory for one row of each client
    # (C, 4) int64, 0 at first: entries of features of wanted rows, other rows that send, entries of
    # their features, and edges.
    counts: Array


@compiled
def add_entries(x: InputArrays, row: int, w: Array, out: Array) -> None:
    """Out (1, D) += the features of a row times w (u, D), entry after entry."""
    # For other widths `add_sum` adds four entries at a time, which is another order than torch's.
    lanes, width = REGISTER_BYTES // out.itemsize, out.shape[1]
    if width % lanes == 0 and width <= 8 * lanes:
        ends = x.ptr[row : row + 2]
        add_sum(ends[:1], ends[1:], x.col, x.value, w, out)
        return
    for e in range(x.ptr[row], x.ptr[row + 1]):
        add_scaled(w[x.col[e]], x.value[e], out[0])


@compiled
def add_scaled(row: Array, scale: float, out: Array) -> None:
    """Out (D,) += scale * row."""
    for h in range(out.shape[0]):
        out[h] += scale * row[h]


@compiled
def fill_scaled(row: Array, scale: float, out: Array) -> None:
    """Out (D,) = scale * row."""
    for h in range(out.shape[0]):
        out[h] = scale * row[h]


@compiled
def add_row(row: Array, out: Array) -> None:
    """Out (D,) += row."""
    for h in range(out.shape[0]):
        out[h] += row[h]


@compiled
def map_row(
    x: InputArrays, a: int, at: int, row: int, w: Array, wanted: WantedRows, counts: Array
) -> None:
    """Compute z of a client's row, unless that is done, and count its entries.

    Args:
        x: features of the block.
        a: first row of the client in the block.
        at: first row of the client in `wanted.mapped`.
        row: of the client.
        w: (u, D) the client's weights.
        wanted: where z is stored.
        counts: (4,) of the client, see `WantedRows`.
    """
    if wanted.is_mapped[at + row]:
        return
    wanted.is_mapped[at + row] = True
    out = wanted.mapped[at + row : at + row + 1]
    clear_row(out[0])
    add_entries(x, a + row, w, out)
    if not wanted.is_wanted[at + row]:
        counts[1] += 1
        counts[2] += x.ptr[a + row + 1] - x.ptr[a + row]


@kernel
def first_stage(
    k0: int,
    k1: int,
    called: CalledArrays,
    rows: RowArrays,
    x: InputArrays,
    shape: ModelShape,
    wanted: WantedRows,
    weights: Trained,
    out: Array,
) -> None:
    """Fill `out` (b, D) with the outputs of wanted rows of the called clients k0 to k1."""
    block_rows, features, form, wanted_rows = (
        pointer_to(rows),
        pointer_to(x),
        pointer_to(shape),
        pointer_to(wanted),
    )
    clients, trained = pointer_to(called), pointer_to(weights)
    fill_range(k0, k1, clients, block_rows, features, form, wanted_rows, trained, out)


@compiled
def fill_range(
    k0: int,
    k1: int,
    called: CalledArrays,
    rows: RowArrays,
    x: InputArrays,
    shape: ModelShape,
    wanted: WantedRows,
    weights: Trained,
    out: Array,
) -> None:
    """Do what `first_stage` does, with arguments behind pointers."""
    for k in range(k0, k1):
        g, at = called.position[k], called.off[k]
        a, own = (
            rows.off[g],
            pointer_to(part(weights, k, called.used_off[k], called.used_off[k + 1])),
        )
        for i in range(wanted.off[k], wanted.off[k + 1]):
            wanted.is_wanted[at + wanted.rows[i]] = True
        for i in range(wanted.off[k], wanted.off[k + 1]):
            fill_row(rows, x, shape, a, at, k, wanted.rows[i], own, wanted, out[i])


@compiled
def fill_row(
    rows: RowArrays,
    x: InputArrays,
    shape: ModelShape,
    a: int,
    at: int,
    k: int,
    row: int,
    own: Weights,
    wanted: WantedRows,
    out: Array,
) -> None:
    """Fill `out` (D,) with the outputs of a wanted row of client k.

    `a` and `at` are those of `map_row`, `own` are the client's weights.
    """
    counts, term, place = wanted.counts[k], wanted.term[k], a + row
    counts[0] += x.ptr[place + 1] - x.ptr[place]
    # 1. The sum over neighbors: torch adds up those that are wanted rows before the others.
    clear_row(out)
    for others in range(2):
        for e in range(rows.ptr[place], rows.ptr[place + 1]):
            neighbor = rows.col[e]
            if wanted.is_wanted[at + neighbor] == (others == 1):
                continue
            map_row(x, a, at, neighbor, own.first, wanted, counts)
            counts[3] += 1
            if wanted.sender.shape[0] > 0:
                fill_scaled(wanted.mapped[at + neighbor], wanted.sender[a + neighbor], term[0])
                add_scaled(term[0], wanted.edge[e], out)
            else:
                add_scaled(wanted.mapped[at + neighbor], wanted.edge[e], out)
    if wanted.receiver.shape[0] > 0:
        fill_scaled(out, wanted.receiver[place], out)
    # 2. The row itself, the bias and ReLU.
    if wanted.itself.shape[0] > 0:
        map_row(x, a, at, row, own.first, wanted, counts)
        fill_scaled(wanted.mapped[at + row], wanted.itself[place], term[0])
        add_row(term[0], out)
    if shape.form[0] == ROOTED:
        clear_row(term[0])
        add_entries(x, place, own.second, term)
        add_row(term[0], out)
    bias = shape.place[0, 2]
    add_row(own.flat[bias : bias + out.shape[0]], out)
    if wanted.relu:
        zero = out.dtype.type(0)
        for h in range(out.shape[0]):
            out[h] = zero if zero > out[h] else out[h]
