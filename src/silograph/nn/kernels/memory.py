"""Memory that a thread uses for all its clients, one after the other.

It is allocated here, not in kernels: numba compiles what allocates arrays for seconds.
"""

import numpy as np

from silograph.nn.kernels.arrays import (
    LINEAR,
    Array,
    InputArrays,
    ModelShape,
    ParamArrays,
    RowArrays,
    Scratch,
    Spare,
    StepRule,
)


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
    )


def spare(params: ParamArrays, steps: StepRule, used: int) -> Spare:
    """Return memory for clients of at most `used` used rows."""
    (matrices, _, first), flat, dtype = params.rows.shape, params.flat.shape[1], params.rows.dtype
    masked, keeps_moments = params.masks is not None, len(params.first_flat) > 0
    pulled = steps.mu > 0 or masked
    return Spare(
        start=np.empty((matrices, used if pulled else 0, first), dtype),
        start_flat=np.empty(flat if pulled else 0, dtype),
        moments=np.empty((2, matrices, 0 if keeps_moments else used, first), dtype),
        moments_flat=np.empty((2, flat), dtype),
        product=np.empty((matrices, used if masked else 0, first), dtype),
        product_flat=np.empty(flat if masked else 0, dtype),
        other=np.empty(max(used * first, flat) if masked else 0, dtype),
    )
