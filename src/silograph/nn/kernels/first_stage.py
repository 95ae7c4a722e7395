"""The stage that features enter, of some rows of clients in training.

What `silograph.nn.stored_rows` does with torch, in its order of operations: products are rounded
before sums are added up, so loops that come one after the other are not one.

C: clients. n: rows. b: wanted rows. D: width of what leaves the stage.
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
    compiled,
    kernel,
)
from silograph.nn.kernels.layers import REGISTER_BYTES, add_sum
from silograph.nn.kernels.stored import Trained, part, zero


class WantedRows(NamedTuple):
    """The rows that are wanted, how rows are summed, and memory."""

    rows: Array  # (b,) row of the client
    off: Array  # (C + 1,)
    edge: Array  # (E,) value of every edge of `RowArrays`
    sender: Array  # (n,) scale of the sender of a block's rows, or (0,) for 1
    receiver: Array  # (n,) likewise
    itself: Array  # (n,) weight of the own z, or (0,) for 0
    relu: bool
    mapped: Array  # (n', D) z of the called clients' rows, where `is_mapped`
    is_mapped: Array  # (n',) bool, False
    is_wanted: Array  # (n',) bool, False
    term: Array  # (C, 1, D)
    counts: Array  # (C, 4) int64, 0: entries of wanted rows; other senders, their entries; edges


@compiled
def add_entries(x: InputArrays, row: int, w: Array, out: Array) -> None:
    """Out (1, D) += the features of a row times w (u, D), entry after entry."""
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
    """Fill z of a client's row, whose first ones are `a` in the block and `at` in the call."""
    if wanted.is_mapped[at + row]:
        return
    wanted.is_mapped[at + row] = True
    out = wanted.mapped[at + row : at + row + 1]
    zero(out[0])
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
    """Fill `out` (b, D) with what leaves the stage, of the called clients k0 to k1."""
    block_rows, features, form, of = (
        pointer_to(rows),
        pointer_to(x),
        pointer_to(shape),
        pointer_to(wanted),
    )
    to, held = pointer_to(called), pointer_to(weights)
    fill_range(k0, k1, to, block_rows, features, form, of, held, out)


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
    """Do what `first_stage` does."""
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
    """Fill `out` (D,) with a wanted row of client k; `a` and `at` are as for `map_row`."""
    counts, term, place = wanted.counts[k], wanted.term[k], a + row
    counts[0] += x.ptr[place + 1] - x.ptr[place]
    zero(out)
    for others in range(2):  # wanted rows are added up before others
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
    if wanted.itself.shape[0] > 0:
        map_row(x, a, at, row, own.first, wanted, counts)
        fill_scaled(wanted.mapped[at + row], wanted.itself[place], term[0])
        add_row(term[0], out)
    if shape.form[0] == ROOTED:
        zero(term[0])
        add_entries(x, place, own.second, term)
        add_row(term[0], out)
    bias = shape.place[0, 2]
    add_row(own.flat[bias : bias + out.shape[0]], out)
    if wanted.relu:
        nothing = out.dtype.type(0)
        for h in range(out.shape[0]):
            out[h] = nothing if nothing > out[h] else out[h]
