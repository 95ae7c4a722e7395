"""A pass through the model, and the way back with a step of the optimizer."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numba.core import cgutils as untyped_cgutils
from numba.core import types
from numba.core.errors import TypingError
from numba.extending import intrinsic
from numba.np import arrayobj as untyped_arrayobj
from numba.np import linalg as untyped_linalg

from silograph.core.key import hash_text
from silograph.core.numba_extensions import pointer_to
from silograph.nn.kernels.arrays import (
    FAST,
    LINEAR,
    ROOTED,
    SUM,
    ZERO,
    Array,
    InputArrays,
    ModelShape,
    RowArrays,
    Scratch,
    StepRule,
    TrainedMatrix,
    TrainedWeights,
    Weights,
    add_rows,
    clear,
    compiled,
    copy,
)
from silograph.nn.kernels.draws import drop, fold
from silograph.nn.kernels.masks import matrix, pull_of, step_flat_under, step_under
from silograph.nn.kernels.optim import step

_DROPOUT = np.uint64(hash_text("dropout"))
CHUNK = 16  # rows of a gradient that stay in the first cache until their step
FLAGS = tuple(sorted(FAST))
REGISTER_BYTES = 64  # of the widest registers; LLVM takes several narrow ones for one


@compiled
def product(a: Array, b: Array, out: Array) -> None:
    """Fill `out` with the product of two matrices."""
    multiply(a, b, out)


@compiled
def add_sum(start: Array, end: Array, col: Array, value: Array, z: Array, out: Array) -> None:
    """out[i] += the sum of value[e] z[col[e]] over entries e from start[i] to end[i].

    Where the width fills up to eight registers, sums stay there; with more, each pass over the
    entries would fetch other columns of their rows. Otherwise four entries are added at a time: the
    output is loaded and stored once for them.
    """
    width, lanes = out.shape[1], REGISTER_BYTES // out.itemsize
    if width % lanes == 0 and width <= 8 * lanes:
        for i in range(out.shape[0]):
            first, last, at = start[i], end[i], 0
            if width == 8 * lanes:
                add_8_registers(col, value, first, last, z, out, i, at)
                continue
            if at + 4 * lanes <= width:
                add_4_registers(col, value, first, last, z, out, i, at)
                at += 4 * lanes
            if at + 2 * lanes <= width:
                add_2_registers(col, value, first, last, z, out, i, at)
                at += 2 * lanes
            if at < width:
                add_register(col, value, first, last, z, out, i, at)
        return
    for i in range(out.shape[0]):
        e, last = start[i], end[i]
        while e + 4 <= last:
            j0, j1, j2, j3 = col[e], col[e + 1], col[e + 2], col[e + 3]
            a0, a1, a2, a3 = value[e], value[e + 1], value[e + 2], value[e + 3]
            for h in range(width):
                out[i, h] += a0 * z[j0, h] + a1 * z[j1, h] + a2 * z[j2, h] + a3 * z[j3, h]
            e += 4
        if e + 2 <= last:
            j0, j1, a0, a1 = col[e], col[e + 1], value[e], value[e + 1]
            for h in range(width):
                out[i, h] += a0 * z[j0, h] + a1 * z[j1, h]
            e += 2
        if e < last:
            j0, a0 = col[e], value[e]
            for h in range(width):
                out[i, h] += a0 * z[j0, h]


@compiled
def add_back(start: Array, end: Array, col: Array, value: Array, g: Array, out: Array) -> None:
    """out[col[e]] += value[e] g[i] over entries e from start[i] to end[i]: the transpose."""
    width = out.shape[1]
    for i in range(g.shape[0]):
        for e in range(start[i], end[i]):
            j, a = col[e], value[e]
            for h in range(width):
                out[j, h] += a * g[i, h]


@compiled
def begin(own: Array, a: int, nodes: Array, bias: Array, r: Array, out: Array) -> None:
    """out[i] = bias + own[a + nodes[i]] r[i]; no bias, or 1 for own, where that is empty."""
    width, biased, weighted = out.shape[1], bias.shape[0] > 0, own.shape[0] > 0
    for i in range(out.shape[0]):
        weight = own[a + nodes[i]] if weighted else r.dtype.type(1)
        if biased:
            for j in range(width):
                out[i, j] = bias[j] + weight * r[i, j]
        else:
            for j in range(width):
                out[i, j] = weight * r[i, j]


@compiled
def add_columns(g: Array, total: Array) -> None:
    """Fill `total` with the sum of the rows of g."""
    for j in range(total.shape[0]):
        total[j] = 0
    for i in range(g.shape[0]):
        for j in range(g.shape[1]):
            total[j] += g[i, j]


@compiled
def table(memory: Array, start: int, rows: int, width: int) -> tuple[Array]:
    """Return a piece of memory as (rows, width); in a tuple, see `compiled`."""
    return (memory[start : start + rows * width].reshape(rows, width),)


@compiled
def entering(shape: ModelShape, layer: int, rows: int, s: Scratch) -> tuple[Array]:
    """Return the memory of what enters a layer from the second one on, (rows, width)."""
    start = s.nodes.shape[0] * shape.act[layer - 1]
    return table(s.act, start, rows, shape.width[layer])


@compiled
def map_first(
    rows: RowArrays,
    x: InputArrays,
    k: int,
    drawn: bool,
    col: Array,
    w: Array,
    out: Array,
    s: Scratch,
) -> None:
    """Fill `out` with the features of the first rows that take part, times w."""
    a, m = rows.off[k], out.shape[0]
    if x.dense.shape[0] > 0:
        product(s.x[:m] if drawn else x.dense[a : a + m], w, out)
    else:
        clear(out)
        add_sum(s.x_start[:m], s.x_end[:m], col, x.value, w, out)


@compiled
def gather(rows: RowArrays, x: InputArrays, k: int, drawn: bool, s: Scratch) -> None:
    """Look up the features of the rows that take part."""
    a = rows.off[k]
    if x.dense.shape[0] == 0:
        nodes, starts, ends, ptr = s.nodes, s.x_start, s.x_end, x.ptr
        for i in range(s.m[0]):
            row = a + nodes[i]
            starts[i], ends[i] = ptr[row], ptr[row + 1]
    elif drawn:
        for i in range(s.m[0]):
            copy(x.dense[a + s.nodes[i]], s.x[i])


@compiled
def mapped(shape: ModelShape, layer: int, s: Scratch) -> tuple[Array, Array]:
    """Return the memory of a layer's mapped rows (m, D), and of own rows (left, D) where rooted."""
    width, left = shape.width[layer + 1], s.m[layer + 1] * (shape.form[layer] == ROOTED)
    return table(s.z, ZERO, s.m[layer], width)[0], table(s.self_z, ZERO, left, width)[0]


@compiled
def map_rows(
    rows: RowArrays,
    x: InputArrays,
    shape: ModelShape,
    layer: int,
    k: int,
    drawn: bool,
    x_col: Array,
    w: Weights,
    s: Scratch,
) -> None:
    """Fill `mapped` with what enters a layer, times its matrix, and its second one where rooted."""
    z, own = mapped(shape, layer, s)
    rooted = shape.form[layer] == ROOTED
    if layer == 0:
        map_first(rows, x, k, drawn, x_col, w.first, z, s)
        if rooted:
            map_first(rows, x, k, drawn, x_col, w.second, own, s)
        return
    inputs, width = shape.width[layer], shape.width[layer + 1]
    h = entering(shape, layer, s.m[layer], s)[0]
    product(h, table(w.flat, shape.place[layer, 0], inputs, width)[0], z)
    if rooted:
        product(h[: own.shape[0]], table(w.flat, shape.place[layer, 1], inputs, width)[0], own)


@compiled
def sum_rows(
    rows: RowArrays,
    shape: ModelShape,
    layer: int,
    k: int,
    drawn: bool,
    flat: Array,
    out: Array,
    s: Scratch,
) -> None:
    """Fill `out` (left, D) with bias, own row, and the sum over neighbors of a layer's `mapped`."""
    z, own = mapped(shape, layer, s)
    a, form, m, left = rows.off[k], shape.form[layer], z.shape[0], out.shape[0]
    bias = shape.place[layer, 2]
    begin(
        rows.own if form == SUM else rows.own[:0],
        a,
        s.nodes,
        flat[bias : bias + out.shape[1]],
        own if form == ROOTED else z,
        out,
    )
    if form == LINEAR:
        return
    if shape.fanout is not None and drawn:
        ptr = s.ptr[layer]
        add_sum(ptr[:left], ptr[1 : left + 1], s.col, s.value, z, out)
    else:
        add_sum(rows.ptr[a : a + m], rows.ptr[a + 1 : a + m + 1], rows.col, rows.value, z, out)


@compiled
def rectify(out: Array) -> None:
    """Set what is negative to 0, in place."""
    zero, flat = out.dtype.type(0), out.reshape(-1)
    for i in range(flat.shape[0]):
        flat[i] = zero if zero > flat[i] else flat[i]


@compiled
def rectify_back(out: Array, g: Array, scale: float) -> None:
    """Cut a gradient where `rectify` or dropout cut what left, and scale it as dropout did."""
    zero, factor, flat, flat_g = (
        g.dtype.type(0),
        g.dtype.type(scale),
        out.reshape(-1),
        g.reshape(-1),
    )
    for i in range(flat.shape[0]):
        flat_g[i] = flat_g[i] * factor if flat[i] > 0 else zero


@compiled
def forward(
    rows: RowArrays,
    x: InputArrays,
    shape: ModelShape,
    k: int,
    x_col: Array,
    w: Weights,
    key: Any,
    training: bool,
    s: Scratch,
) -> None:
    """Fill `s.out` with logits of the last layer's rows, and `s.act` with what led to them.

    Args:
        rows: the block's rows.
        x: its features.
        shape: the model.
        k: the client.
        x_col: row of the first matrices of every sparse entry.
        w: the client's weights.
        key: key of the step.
        training: whether hidden activations are dropped, and edges are those that `sample` drew,
            if it drew any; then dense features that are after dropout are in `s.x`.
        s: the thread's memory.
    """
    last, ready = shape.layers - 1, training and shape.x_threshold > 0
    sampled = training and shape.fanout is not None
    gather(rows, x, k, sampled and not ready, s)
    for layer in range(shape.layers):
        left = s.m[layer + 1]
        out = s.out[:left] if layer == last else entering(shape, layer + 1, left, s)[0]
        map_rows(rows, x, shape, layer, k, sampled or ready, x_col, w, s)
        sum_rows(rows, shape, layer, k, sampled, w.flat, out, s)
        if layer < last:
            rectify(out)
            if training and shape.threshold > 0:
                layer_key = fold(fold(key, _DROPOUT), layer + 1)
                for i in range(left):
                    row_key = rows.row_key[rows.off[k] + s.nodes[i]]
                    drop(out, i, row_key, layer_key, shape.threshold, shape.scale, s)


@compiled
def step_first(
    rows: RowArrays,
    x: InputArrays,
    shape: ModelShape,
    k: int,
    gz: Array,
    own: TrainedMatrix,
    steps: StepRule,
    t: int,
    s: Scratch,
) -> None:
    """Step a first matrix (u, D) along its gradient, X^T gz."""
    a, used, width = rows.off[k], own.weights.shape[0], own.weights.shape[1]
    many, sparse, drawn = gz.shape[0], x.dense.shape[0] == 0, shape.fanout is not None
    ready = drawn or shape.x_threshold > 0  # features of the rows are in s.x
    if not sparse:
        product((s.x[:many] if ready else x.dense[a : a + many]).T, gz, s.rows[:used])
    elif shape.fanout is not None:
        clear(s.rows[:used])
        add_back(s.x_start[:many], s.x_end[:many], x.col, x.value, gz, s.rows[:used])
    chunk = CHUNK if sparse and not drawn else used
    p, g, p0 = own.weights.reshape(-1), s.rows.reshape(-1), own.start
    p1, p2 = own.raw.first, own.raw.second
    pull = 0.0 if own.mask_state is None else pull_of(own.raw.value, p0, own.mask_state.near)
    for i in range(0, used, chunk if chunk > 0 else 1):
        count = chunk if i + chunk < used else used - i
        lo, hi = i * width, (i + count) * width
        if sparse and not drawn:
            first = x.used_off[k] + i
            clear(s.rows[:count])
            ends = x.t_ptr[first : first + count + 1]
            add_sum(ends[:count], ends[1:], x.t_row, x.t_value, gz, s.rows[:count])
        if own.mask_state is None:
            step(p[lo:hi], g[: hi - lo], p0[lo:hi], p1[lo:hi], p2[lo:hi], steps, t)
        else:
            step_under(p[lo:hi], g[: hi - lo], own, lo, pull, steps, t)


@compiled
def fill_credit(z: Array, gradient: Array, left: int, s: Scratch) -> None:
    """Fill the credit of rows that only send in a layer, from the first one, `left`, on.

    That is the product of what a row sends (m, D) with its gradient; a linear map between them
    changes nothing.
    """
    credit = s.credit
    for i in range(left, z.shape[0]):
        total = z.dtype.type(0)
        for j in range(z.shape[1]):
            total += z[i, j] * gradient[i, j]
        credit[i] = total


@compiled
def back_through_sum(
    rows: RowArrays, shape: ModelShape, layer: int, a: int, g: Array, gz: Array, s: Scratch
) -> None:
    """Fill the gradient of mapped rows, gz (m, D), from that of what leaves a layer, g (left, D).

    `a` is the client's first row.
    """
    m, left, form = gz.shape[0], g.shape[0], shape.form[layer]
    if form == ROOTED:
        clear(gz)
    else:
        clear(gz[left:])
        own = rows.own if form == SUM else rows.own[:0]
        begin(own, a, s.nodes, rows.own[:0], g, gz[:left])
    if form == LINEAR:
        return
    if shape.fanout is not None:
        ptr = s.ptr[layer]
        add_back(ptr[:left], ptr[1 : left + 1], s.col, s.value, g, gz)
    else:
        add_sum(rows.ptr[a : a + m], rows.ptr[a + 1 : a + m + 1], rows.col, rows.back, g, gz)


@compiled
def step_later(shape: ModelShape, own: TrainedWeights, g: Array, steps: StepRule, t: int) -> None:
    """Step the weights after the first matrices along their gradient g (P,)."""
    p, start, m, v = own.weights.flat, own.start.flat, own.first.flat, own.second.flat
    later = pointer_to(later_rule(steps))
    if own.mask_state is not None:
        step_flat_under(shape, own, g, steps, later, t)
        return
    if steps.later_decay == steps.decay:
        step(p, g, start, m, v, steps, t)
        return
    at = steps.later
    step(p[:at], g[:at], start[:at], m[:at], v[:at], steps, t)
    step(p[at:], g[at:], start[at:], m[at:], v[at:], later, t)


@compiled
def later_rule(steps: StepRule) -> StepRule:
    """Return the optimizer of the layers after the first."""
    decay = steps.later_decay
    return StepRule(
        steps.adam,
        steps.lr,
        decay,
        decay,
        steps.later,
        steps.beta1,
        steps.beta2,
        steps.eps,
        steps.mu,
    )


@compiled
def backward_step(
    rows: RowArrays,
    x: InputArrays,
    shape: ModelShape,
    k: int,
    own: TrainedWeights,
    steps: StepRule,
    t: int,
    s: Scratch,
) -> None:
    """Walk from the gradient of the logits in `s.out` to all weights, and step them."""
    a, last, side, w = rows.off[k], shape.layers - 1, 0, own.weights
    for layer in range(last, -1, -1):
        inputs, width, form = shape.width[layer], shape.width[layer + 1], shape.form[layer]
        at, at_self, at_bias = shape.place[layer, 0], shape.place[layer, 1], shape.place[layer, 2]
        m, left = s.m[layer], s.m[layer + 1]
        g = s.out[:left] if layer == last else table(s.grad[side], ZERO, left, width)[0]
        gz = table(s.z, ZERO, m, width)[0]
        add_columns(g, s.flat[at_bias : at_bias + width])
        back_through_sum(rows, shape, layer, a, g, gz, s)
        is_gated = s.credit.shape[0] > 0 and form != LINEAR
        if layer == 0:
            if is_gated:
                z = table(s.grad[1 - side], ZERO, m, width)[0]
                map_first(rows, x, k, True, x.col, w.first, z, s)
                fill_credit(z, gz, left, s)
            for i in range(2 if form == ROOTED else 1):
                first, mapped_gradient = pointer_to(matrix(own, i > 0)), g if i > 0 else gz
                step_first(rows, x, shape, k, mapped_gradient, first, steps, t, s)
            continue
        h, input_gradient = (
            entering(shape, layer, m, s)[0],
            table(s.grad[1 - side], ZERO, m, inputs)[0],
        )
        product(h.T, gz, table(s.flat, at, inputs, width)[0])
        product(gz, table(w.flat, at, inputs, width)[0].T, input_gradient)
        if is_gated:
            fill_credit(h, input_gradient, left, s)
        if form == ROOTED:
            product(h[:left].T, g, table(s.flat, at_self, inputs, width)[0])
            more = table(s.self_z, ZERO, left, inputs)[0]
            product(g, table(w.flat, at_self, inputs, width)[0].T, more)
            add_rows(more, input_gradient)
        rectify_back(h, input_gradient, shape.scale if shape.threshold > 0 else 1.0)
        side = 1 - side
    step_later(shape, own, s.flat, steps, t)


cgutils: Any = untyped_cgutils  # numba's own functions have no types
arrayobj: Any = untyped_arrayobj
ir: Any = cgutils.ir  # of llvmlite, which builds code for numba


# --- Sums of rows in registers --------------------------------------------------------------------
#
# A loop over entries loads and stores the sum for each of them; LLVM does not keep it in registers,
# since it cannot know that rows do not overlap. These loops say so.


def _add_in_registers(count: int) -> Any:
    """Return what adds to `count` times as many columns as a register holds."""

    def add(
        typing: Any,
        col: Any,
        value: Any,
        first: Any,
        last: Any,
        z: Any,
        out: Any,
        row: Any,
        at: Any,
    ) -> Any:
        del typing, first, last, row, at
        if out.layout != "C" or z.layout != "C" or not value.dtype == z.dtype == out.dtype:
            raise TypingError(f"sums of rows need C-contiguous arrays of one type, got {z}, {out}")
        number = types.intp
        return types.void(col, value, number, number, z, out, number, number), emit

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        col, value, z, out = (
            arrayobj.make_array(signature.args[k])(context, builder, arguments[k])
            for k in (0, 1, 4, 5)
        )
        first, last, row, at = (arguments[k] for k in (2, 3, 6, 7))
        intp, entry = row.type, builder.block
        real = context.get_value_type(signature.args[1].dtype)
        size = real.get_abi_size(context.target_data)
        lanes = REGISTER_BYTES // size
        vector = ir.VectorType(real, lanes)
        width = builder.extract_value(out.shape, 1)

        def piece(data: Any, row: Any, number: int) -> Any:
            place = builder.add(builder.mul(row, width), builder.add(at, intp(number * lanes)))
            return builder.bitcast(builder.gep(data, [place]), vector.as_pointer())

        sums = [builder.load(piece(out.data, row, k), align=size) for k in range(count)]
        check, body, end = (builder.append_basic_block(name) for name in ("check", "body", "end"))
        builder.branch(check)
        builder.position_at_end(check)
        number, held = builder.phi(intp), [builder.phi(vector) for _ in sums]
        for variable, begin in zip([number, *held], [first, *sums], strict=True):
            variable.add_incoming(begin, entry)
        builder.cbranch(builder.icmp_signed("<", number, last), body, end)
        builder.position_at_end(body)
        column = builder.load(builder.gep(col.data, [number]))
        if column.type != intp:
            column = builder.sext(column, intp)
        weight = builder.load(builder.gep(value.data, [number]))
        undefined, zeros = vector(ir.Undefined), ir.VectorType(ir.IntType(32), lanes)([0] * lanes)
        weights = builder.insert_element(undefined, weight, ir.IntType(32)(0))
        weights = builder.shuffle_vector(weights, undefined, zeros)
        more = [number.type(1)] + [
            builder.fmul(weights, builder.load(piece(z.data, column, k), align=size), flags=FLAGS)
            for k in range(count)
        ]
        adding = [builder.add(number, more[0])]
        adding += [builder.fadd(s, m, flags=FLAGS) for s, m in zip(held, more[1:], strict=True)]
        for variable, new in zip([number, *held], adding, strict=True):
            variable.add_incoming(new, builder.block)
        builder.branch(check)
        builder.position_at_end(end)
        for k, total in enumerate(held):
            builder.store(total, piece(out.data, row, k), align=size)
        return context.get_dummy_value()

    return intrinsic(add)


add_register, add_2_registers = _add_in_registers(1), _add_in_registers(2)
add_4_registers, add_8_registers = _add_in_registers(4), _add_in_registers(8)


# --- Products of matrices by BLAS -----------------------------------------------------------------
#
# `np.dot` makes the same calls, but numba compiles its checks of shapes, and what builds their
# messages, for every layout of its arguments. That took half a second.


linalg: Any = untyped_linalg


def _multiply(typing: Any, a: Any, b: Any, out: Any) -> Any:
    """Fill `out` (m, n), which is C-contiguous, with the product of a (m, k) and b (k, n).

    a and b are contiguous in either order. Nothing is checked.
    """
    del typing
    layouts = a.layout + b.layout + out.layout
    if not set(layouts) <= set("CF") or out.layout != "C" or not a.dtype == b.dtype == out.dtype:
        raise TypingError(f"products need contiguous matrices of one type, got {a}, {b} and {out}")
    return types.none(a, b, out), _call_blas


def _call_blas(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """Emit the calls of BLAS that `np.dot` makes: by the shapes for vectors or for matrices."""
    linalg.ensure_blas()
    a_type, b_type, out_type = signature.args
    a, b, out = (
        arrayobj.make_array(of)(context, builder, value)
        for of, value in zip(signature.args, arguments, strict=True)
    )
    a_shape, b_shape, out_shape = (cgutils.unpack_tuple(builder, t.shape) for t in (a, b, out))
    (m, k), (_, n) = a_shape, b_shape
    no_entries = builder.icmp_signed("==", out.nitems, out.nitems.type(0))
    no_terms = builder.icmp_signed("==", k, k.type(0))
    one_row, one_column = (builder.icmp_signed("==", size, size.type(1)) for size in (m, n))
    with builder.if_else(builder.or_(no_entries, no_terms), likely=False) as (empty, other):
        with empty:
            cgutils.memset(builder, out.data, builder.mul(out.itemsize, out.nitems), 0)
        with other, builder.if_else(one_column) as (to_column, to_more):
            with to_column, builder.if_else(one_row) as (to_number, to_vector):
                with to_number:
                    linalg.call_xxdot(
                        context, builder, False, a_type.dtype, k, a.data, b.data, out.data
                    )
                with to_vector:
                    turned = a_type.layout == "C"
                    linalg.call_xxgemv(
                        context, builder, turned, a_type, a_shape, a.data, b.data, out.data
                    )
            with to_more, builder.if_else(one_row) as (to_row, to_matrix):
                with to_row:
                    turned = b_type.layout != "C"
                    linalg.call_xxgemv(
                        context, builder, turned, b_type, b_shape, b.data, a.data, out.data
                    )
                with to_matrix:
                    factors = a_type, a_shape, a.data, b_type, b_shape, b.data
                    linalg.call_xxgemm(context, builder, *factors, out_type, out_shape, out.data)
    return context.get_dummy_value()


# To who reads a kernel it is a function.
multiply: Callable[[np.ndarray, np.ndarray, np.ndarray], None] = cast(Any, intrinsic(_multiply))
