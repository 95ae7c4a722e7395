"""Laws of the segment operations: a loop over clients, with gradients that finite differences find.

Clients without rows and matrices without entries are among the cases.

C: clients. n: rows. I, O: input and output width.
"""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

from silograph.core.payload import offsets, owners
from silograph.graph.block.block import SparseRows
from silograph.graph.csr import CSR
from silograph.nn.segment import (
    edge_dots,
    edge_product,
    segment_bias,
    segment_linear,
    segment_sum,
    sparse_product,
)

SIZES = [3, 0, 1, 4]
OFF = offsets(torch.tensor(SIZES))
CLIENTS, ROWS, IN, OUT = 4, 8, 5, 3
STACKED = pytest.mark.parametrize("stacked", [False, True], ids=["shared", "stacked"])


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def weight_of(stacked: bool, *shape: int) -> Tensor:
    return draw(CLIENTS, *shape, seed=7) if stacked else draw(*shape, seed=7)


def sparse_rows(density: float = 0.5) -> SparseRows:
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(ROWS, IN)) * (rng.random((ROWS, IN)) < density)
    return SparseRows(CSR.from_scipy(sp.csr_matrix(dense)), OFF)


def adjacency(symmetric: bool) -> CSR:
    rng = np.random.default_rng(3)
    dense = rng.normal(size=(ROWS, ROWS)) * (rng.random((ROWS, ROWS)) < 0.3)
    dense[2] = dense[:, 2] = 0  # a node without neighbors
    return CSR.from_scipy(sp.csr_matrix(dense + dense.T if symmetric else dense))


def gradcheck(function: Callable[..., Tensor], *inputs: Tensor) -> None:
    leaves = [t.clone().requires_grad_() for t in inputs]
    assert torch.autograd.gradcheck(function, leaves, atol=1e-8, rtol=1e-6)


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)


def looped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight, client by client, in plain torch."""
    parts = [
        x[a:b] @ (weight if weight.dim() == 2 else weight[c])
        for c, (a, b) in enumerate(pairwise(OFF.tolist()))
    ]
    return torch.cat(parts)


@STACKED
def test_linear_of_dense_rows_equals_a_loop(stacked: bool) -> None:
    x, weight = draw(ROWS, IN), weight_of(stacked, IN, OUT)
    close(segment_linear(x, weight, OFF), looped_linear(x, weight))
    gradcheck(lambda x, w: segment_linear(x, w, OFF), x, weight)


@STACKED
@pytest.mark.parametrize("density", [0.0, 0.5, 1.0])
def test_linear_of_sparse_rows_equals_a_loop(stacked: bool, density: float) -> None:
    x, weight = sparse_rows(density), weight_of(stacked, IN, OUT)
    dense = torch.from_numpy(x.csr.scipy(np.float64).toarray())
    close(segment_linear(x, weight, OFF), looped_linear(dense, weight))
    gradcheck(lambda w: segment_linear(x, w, OFF), weight)


@pytest.mark.parametrize("symmetric", [False, True])
def test_sparse_product_equals_the_dense_one(symmetric: bool) -> None:
    matrix, right = adjacency(symmetric), draw(ROWS, OUT)
    dense = torch.from_numpy(matrix.scipy(np.float64).toarray())
    close(sparse_product(matrix, right, symmetric=symmetric), dense @ right)
    gradcheck(lambda d: sparse_product(matrix, d, symmetric=symmetric), right)


def test_sparse_product_of_a_matrix_that_is_not_square() -> None:
    matrix, right = sparse_rows().csr, draw(IN, OUT)
    close(sparse_product(matrix, right), torch.from_numpy(matrix.scipy().toarray()) @ right)
    gradcheck(lambda d: sparse_product(matrix, d), right)


@pytest.mark.parametrize("width", [1, 7, 64, 100])
def test_products_in_single_precision_are_those_of_the_double_one(width: int) -> None:
    # Another kernel: rows without entries, strided input, and the way back have to hold there, too.
    matrix, right = sparse_rows(0.3).csr, draw(width, IN)
    single = matrix.to("cpu", torch.float32)
    expected = torch.from_numpy(matrix.scipy(np.float64).toarray())
    leaf = right.float().T.requires_grad_()
    out = sparse_product(single, leaf)
    torch.testing.assert_close(out.double(), expected @ right.T, rtol=0, atol=1e-5)
    weight = draw(ROWS, width, seed=3)
    (grad,) = torch.autograd.grad((out * weight.float()).sum(), leaf)
    torch.testing.assert_close(grad.double(), expected.T @ weight, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (3, 4)])
def test_a_matrix_without_entries_gives_zeros(shape: tuple[int, int], dtype: torch.dtype) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    matrix = CSR.from_pairs(none, none, shape).to("cpu", dtype)
    right = draw(shape[1], OUT).to(dtype).requires_grad_()
    out = sparse_product(matrix, right)
    assert torch.equal(out, torch.zeros(shape[0], OUT, dtype=dtype))
    (grad,) = torch.autograd.grad(out.sum(), right)
    assert torch.equal(grad, torch.zeros_like(right))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_products_at_the_ends_of_edges_equal_the_dense_ones(index: torch.dtype) -> None:
    dense = torch.zeros(4, 6)
    dense[0, [1, 5]], dense[2, [0, 2, 3]], dense[3, 4] = 1, 1, torch.nan  # values are not read
    found = CSR.from_scipy(sp.csr_matrix(dense.numpy()))
    matrix = CSR(found.indptr.to(index), found.indices.to(index), found.values, 6)
    a, b = draw(4, 3, seed=1), draw(6, 3, seed=2)
    row, column = matrix.row, matrix.indices.long()
    close(edge_dots(matrix, a, b), (a @ b.T)[row, column])
    none = torch.zeros(0, dtype=torch.int64)
    assert len(edge_dots(CSR.from_pairs(none, none, (4, 6)), a, b)) == 0
    heads, weight = draw(6, 2, 3, seed=4), draw(6, 2, seed=5)
    gradcheck(lambda w, z: edge_product(matrix, w, z), weight, heads)


@pytest.mark.parametrize("stacked", [False, True])
def test_bias_is_added_to_every_row_of_its_client(stacked: bool) -> None:
    x, bias = draw(ROWS, OUT), weight_of(stacked, OUT)
    owner = [c for c, size in enumerate(SIZES) for _ in range(size)]
    rows = [x[i] + (bias[c] if stacked else bias) for i, c in enumerate(owner)]
    close(segment_bias(x, bias, OFF), torch.stack(rows))
    gradcheck(lambda x, b: segment_bias(x, b, OFF), x, bias)


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 2), (ROWS, 2, 3)])
def test_sum_adds_up_the_rows_of_each_client(shape: tuple[int, ...]) -> None:
    values = draw(*shape)
    expected = torch.stack([values[a:b].sum(dim=0) for a, b in pairwise(OFF.tolist())])
    close(segment_sum(values, OFF), expected)
    gradcheck(lambda v: segment_sum(v, OFF), values)


def test_sum_of_integers_keeps_their_dtype() -> None:
    total = segment_sum(torch.ones(ROWS, dtype=torch.int32), OFF)
    assert total.dtype == torch.int32
    assert total.tolist() == SIZES


def _transposed(out: Tensor) -> Tensor:
    return (out.T * draw(OUT, ROWS, seed=5)).sum()


def _expanded(out: Tensor) -> Tensor:
    return out.sum()


@pytest.mark.parametrize("loss", [_transposed, _expanded])
@STACKED
def test_gradients_that_arrive_with_strides(
    loss: Callable[[Tensor], Tensor], stacked: bool
) -> None:
    # autograd hands down whatever layout the next operation left, stride 0 included.
    x, weight = draw(ROWS, IN), weight_of(stacked, IN, OUT)

    def grads(linear: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        return torch.autograd.grad(loss(linear(*leaves)), leaves)

    ours, looped = grads(lambda x, w: segment_linear(x, w, OFF)), grads(looped_linear)
    for left, right in zip(ours, looped, strict=True):
        close(left, right)

    rows, matrix = sparse_rows(), adjacency(symmetric=False)
    dense_rows = torch.from_numpy(rows.csr.scipy(np.float64).toarray())
    dense = torch.from_numpy(matrix.scipy(np.float64).toarray())

    def weight_grad(linear: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = weight.clone().requires_grad_()
        return torch.autograd.grad(loss(linear(leaf)), leaf)[0]

    close(
        weight_grad(lambda w: sparse_product(matrix, segment_linear(rows, w, OFF))),
        weight_grad(lambda w: dense @ looped_linear(dense_rows, w)),
    )


def test_inputs_with_strides_are_read_right() -> None:
    x, weight = draw(IN, ROWS).T, draw(CLIENTS, OUT, IN).transpose(1, 2)
    close(segment_linear(x, weight, OFF), looped_linear(x, weight))
    gradcheck(lambda x, w: segment_linear(x.T, w.transpose(1, 2), OFF), x.T, weight.mT)
    rows = sparse_rows()
    dense = torch.from_numpy(rows.csr.scipy(np.float64).toarray())
    close(segment_linear(rows, weight, OFF), looped_linear(dense, weight))
    right = draw(OUT, ROWS).T
    matrix = adjacency(symmetric=False)
    close(sparse_product(matrix, right), torch.from_numpy(matrix.scipy().toarray()) @ right)


def test_sums_of_float32_are_those_of_one_row_after_the_other() -> None:
    values, expected = draw(ROWS, OUT).float(), torch.zeros(CLIENTS, OUT)
    for client, row in zip(owners(OFF), values, strict=True):
        expected[client] += row
    assert torch.equal(segment_sum(values, OFF), expected)
    assert torch.equal(segment_sum(values[:0], OFF * 0), torch.zeros(CLIENTS, OUT))
