"""Operations on rows sorted by client, with weights that are stacked by client or shared.

C: clients. n: rows. I, O: input and output width. `off` (C + 1,) int64 are the rows of each
client. A weight of one dimension more than usual has a slice for each client.
"""

from typing import cast

import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.payload import owners
from silograph.core.work import report_entries, report_rows
from silograph.graph.block.block import Rows, SparseRows
from silograph.graph.csr import CSR

WIDE = 64  # columns


def gradients(*tensors: object) -> int:
    """Count the tensors that get a gradient, to report the work of the backward pass as well."""
    if not torch.is_grad_enabled():
        return 0
    return sum(isinstance(t, Tensor) and t.requires_grad for t in tensors)


def _sparse_times_dense(matrix: CSR, dense: Tensor) -> Tensor:
    """Sparse times dense, by whichever of torch's kernels is the fastest; entries add up in order.

    Measured on a CPU over widths 1 to 256. In float32 sums of embeddings (FBGEMM) are 2 to 3 times
    as fast as `torch.sparse.mm`, to the same bits, and 1 to 15 times as fast as `@`. In float64
    they have no such kernel, and `@` is the fastest for narrow rows only.

    Raises:
        ProtocolError: the shapes do not fit, which the kernels would not all notice.
    """
    values = matrix.values
    if dense.dim() != 2 or len(dense) != matrix.num_cols:
        raise ProtocolError(
            f"expected {matrix.num_cols} rows to multiply a sparse matrix with, got shape "
            f"{tuple(dense.shape)}"
        )
    if values is not None and values.shape != matrix.indices.shape:
        raise ProtocolError(
            f"expected a value for each of {len(matrix.indices)} entries of a sparse matrix, got "
            f"shape {tuple(values.shape)}"
        )
    if dense.device.type != "cpu":
        return matrix.tensor @ dense
    if dense.dtype is torch.float32 and matrix.nnz:
        return sum_row_runs(dense.detach(), matrix.indices, matrix.indptr, values)
    if dense.shape[1] < WIDE:
        return matrix.tensor @ dense
    out: Tensor = torch.sparse.mm(matrix.tensor, dense.contiguous(), "sum")
    return out


class _SparseProduct(torch.autograd.Function):
    """Sparse (n, m) times dense (m, O), with the transpose built once for the way back."""

    @staticmethod
    def forward(ctx, dense, matrix, transposed):  # type: ignore[no-untyped-def]
        ctx.transposed = transposed
        return _sparse_times_dense(matrix, dense)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return _sparse_times_dense(ctx.transposed(), grad), None, None


class _SharedProduct(torch.autograd.Function):
    """Sparse features times one weight that is expanded to all clients, each with a gradient."""

    @staticmethod
    def forward(ctx, weight, x):  # type: ignore[no-untyped-def]
        ctx.x, ctx.shape = x, weight.shape
        return _sparse_times_dense(x.csr, weight[0])

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return _sparse_times_dense(ctx.x.stacked.transposed, grad).view(ctx.shape), None


def sparse_product(matrix: CSR, dense: Tensor, *, symmetric: bool = False) -> Tensor:
    """Return matrix (n, m) @ dense (m, O); only `dense` gets a gradient."""
    if not gradients(dense):
        return _sparse_times_dense(matrix, dense)
    transposed = (lambda: matrix) if symmetric else (lambda: matrix.transposed)
    out: Tensor = _SparseProduct.apply(dense, matrix, transposed)  # type: ignore[no-untyped-call]
    return out


class _EdgeProduct(torch.autograd.Function):
    """Sums over edges with a weight for each edge and head, without a value for each edge."""

    @staticmethod
    def forward(ctx, weight, z, matrix):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(weight, z)
        ctx.matrix = matrix
        return _product_by_head(matrix, weight, z)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        weight, z = ctx.saved_tensors
        matrix = ctx.matrix
        heads = zip(grad.unbind(1), z.unbind(1), strict=True)
        grad_weight = torch.stack([edge_dots(matrix, g, t) for g, t in heads], dim=1)
        grad_z = _product_by_head(matrix.transposed, weight[matrix.by_column], grad)
        return grad_weight, grad_z, None


def edge_dots(matrix: CSR, a: Tensor, b: Tensor) -> Tensor:
    """Return the dot product of the vectors at both ends of every stored entry, (nnz,).

    No vector is copied for each entry: with copies this takes ten to twenty times the CPU.

    Args:
        matrix: (n, m); its values are not looked at.
        a: (n, D) of its rows.
        b: (m, D) of its columns.
    """
    places = matrix.with_values(a.new_zeros(matrix.nnz)).tensor
    dots: Tensor = torch.sparse.sampled_addmm(places, a.contiguous(), b.T).values()
    return dots


def _product_by_head(matrix: CSR, weight: Tensor, z: Tensor) -> Tensor:
    parts = zip(weight.unbind(1), z.unbind(1), strict=True)
    weighted = [_sparse_times_dense(matrix.with_values(w.contiguous()), t) for w, t in parts]
    return torch.stack(weighted, dim=1)


def edge_product(matrix: CSR, weight: Tensor, z: Tensor) -> Tensor:
    """Return the sums of z (m, heads, D) over edges, (n, heads, D).

    Args:
        matrix: (n, m); its values are not looked at.
        weight: (nnz, heads) of every stored entry.
        z: (m, heads, D).
    """
    out: Tensor = _EdgeProduct.apply(weight, z, matrix)  # type: ignore[no-untyped-call]
    return out


def segment_heads(z: Tensor, weight: Tensor, off: Tensor) -> Tensor:
    """Return the product of each row and head with a vector, (n, heads).

    Args:
        z: (n, heads * D).
        weight: (heads, D) shared by all clients, or (C, heads, D).
        off: (C + 1,).
    """
    report_rows(off, 2 * z.shape[1] * (1 + gradients(z, weight)))
    if weight.dim() == 3:
        weight = weight.repeat_interleave(off.diff(), dim=0, output_size=len(z))
    return (z.view(len(z), *weight.shape[-2:]) * weight).sum(dim=2)


class _SegmentProduct(torch.autograd.Function):
    """x[rows of c] @ weight[c] for every client, as one node of the autograd graph."""

    @staticmethod
    def forward(ctx, x, weight, sizes):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.sizes = sizes
        out = x.new_empty(x.shape[0], weight.shape[2])
        for rows, w, o in zip(x.split(sizes), weight, out.split(sizes), strict=True):
            torch.mm(rows, w, out=o)
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        return *product_gradients(x, weight, grad, ctx.sizes, of_x=ctx.needs_input_grad[0]), None


def product_gradients(
    x: Tensor, weight: Tensor, grad: Tensor, sizes: list[int], *, of_x: bool
) -> tuple[Tensor | None, Tensor]:
    """Return the gradients of x (n, I), if `of_x`, and of weights (C, I, O) of their product.

    Args:
        x: rows of all clients.
        weight: of each client.
        grad: (n, O) of the product.
        sizes: number of rows of each client.
        of_x: whether x has a gradient.
    """
    grad_x = torch.empty_like(x) if of_x else None
    grad_weight = torch.empty_like(weight)
    grads = grad.contiguous().split(sizes)
    if grad_x is not None:
        for g, w, o in zip(grads, weight, grad_x.split(sizes), strict=True):
            torch.mm(g, w.t(), out=o)
    for rows, g, o in zip(x.split(sizes), grads, grad_weight, strict=True):
        torch.mm(rows.t(), g, out=o)
    return grad_x, grad_weight


def segment_linear(x: Rows, weight: Tensor, off: Tensor) -> Tensor:
    """Return x @ weight, (n, O).

    Args:
        x: (n, I), dense or sparse.
        weight: (I, O) shared by all clients, or (C, I, O), perhaps one that is expanded.
        off: (C + 1,).
    """
    products = 1 + gradients(x, weight)
    if isinstance(x, SparseRows):
        report_entries(x.csr.indptr, off, 2 * weight.shape[-1] * products)
        if weight.dim() == 2:
            return sparse_product(x.csr, weight)
        if weight.stride(0) == 0:
            return cast(Tensor, _SharedProduct.apply(weight, x))  # type: ignore[no-untyped-call]
        return sparse_product(x.stacked, weight.flatten(0, 1))
    report_rows(off, 2 * weight.shape[-2] * weight.shape[-1] * products)
    if weight.dim() == 2:
        return x @ weight
    out: Tensor = _SegmentProduct.apply(x, weight, off.diff().tolist())  # type: ignore[no-untyped-call]
    return out


class _SegmentBias(torch.autograd.Function):
    """x[rows of c] + bias[c] for every client; the way back sums rows instead of scattering."""

    @staticmethod
    def forward(ctx, x, bias, sizes, off):  # type: ignore[no-untyped-def]
        ctx.off = off
        if bias.stride(0) == 0:  # expanded from one
            return x + bias[0]
        return bias.repeat_interleave(sizes, dim=0, output_size=x.shape[0]).add_(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad, segment_sum(grad, ctx.off), None, None


def segment_bias(x: Tensor, bias: Tensor, off: Tensor) -> Tensor:
    """Return x (n, O) plus a bias (O,) shared by all clients, or (C, O)."""
    report_rows(off, x.shape[1] * (1 + gradients(bias)))
    if bias.dim() == 1:
        return x + bias
    out: Tensor = _SegmentBias.apply(x, bias, off.diff(), off)  # type: ignore[no-untyped-call]
    return out


def segment_sum(values: Tensor, off: Tensor) -> Tensor:
    """Return the sum of each client's values, (C, ...) from (n, ...)."""
    if can_sum_row_runs(values):
        return sum_row_runs(values, torch.arange(len(values)), off)
    zeros = values.new_zeros(len(off) - 1, *values.shape[1:])
    return zeros.index_add_(0, owners(off), values)


def can_sum_row_runs(values: Tensor) -> bool:
    """Return whether `sum_row_runs` takes such values: a float32 matrix on a CPU, no gradient."""
    is_plain = values.dtype is torch.float32 and values.dim() == 2 and not gradients(values)
    return is_plain and values.is_cpu and len(values) > 0


def sum_row_runs(values: Tensor, rows: Tensor, off: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the sums of runs of rows, added one after the other, (m, D).

    They are computed as sums of embeddings. This takes a third of the time of `index_add_` and
    gives the same bits.

    Args:
        values: (n, D), see `can_sum_row_runs`.
        rows: (k,) int32 or int64 places in `values`, run after run.
        off: (m + 1,) of the same dtype: run i has rows[off[i]:off[i + 1]].
        weight: (k,) float32 by which rows are multiplied; None: 1.
    """
    sums: Tensor = torch.embedding_bag(
        values.contiguous(),
        rows,
        off,
        mode=0,  # sums
        per_sample_weights=weight,
        include_last_offset=True,
    )[0]
    return sums
