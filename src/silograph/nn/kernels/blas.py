"""Products of matrices by BLAS.

`np.dot` makes the same calls, but numba compiles its checks of shapes, and what builds their
messages, for every layout of its arguments. That took half a second.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numba.core import cgutils as untyped_cgutils
from numba.core import types
from numba.core.errors import TypingError
from numba.extending import intrinsic
from numba.np import arrayobj as untyped_arrayobj
from numba.np import linalg as untyped_linalg

cgutils: Any = untyped_cgutils  # numba's own functions have no types
arrayobj: Any = untyped_arrayobj
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
