"""Laws of `CSR`: every operation equals SciPy's, and values may be left out."""

from itertools import pairwise

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from silograph.core.errors import DataError
from silograph.core.payload import offsets
from silograph.graph.csr import CSR


def sparse(rows: int, cols: int, seed: int, density: float = 0.3) -> sp.csr_matrix:
    """Return a matrix with nonzero integers below 100, so that every product is exact."""
    rng = np.random.default_rng(seed)
    dense = rng.integers(1, 100, (rows, cols)) * (rng.random((rows, cols)) < density)
    return sp.csr_matrix(dense.astype(np.float64))


@st.composite
def matrices(draw: st.DrawFn) -> sp.csr_matrix:
    shape = draw(st.tuples(st.integers(0, 8), st.integers(0, 8)))
    return sparse(*shape, draw(st.integers(0, 999)), draw(st.sampled_from([0.0, 0.2, 1.0])))


def check_form(matrix: CSR) -> None:
    """Assert what every reader of a CSR relies on."""
    assert matrix.indptr.dtype == matrix.indices.dtype == torch.int32
    assert matrix.indptr[0] == 0
    assert matrix.indptr[-1] == matrix.nnz
    for start, end in pairwise(matrix.indptr.tolist()):
        columns = matrix.indices[start:end].tolist()
        assert columns == sorted(set(columns))
        assert all(0 <= column < matrix.num_cols for column in columns)
    assert matrix.values is None or len(matrix.values) == matrix.nnz


def dense(matrix: CSR) -> np.ndarray:
    return matrix.scipy(np.float64).toarray()


def equal(matrix: CSR, expected: "sp.csr_matrix | np.ndarray") -> bool:
    """Return whether a well-formed CSR has this shape and these entries, exactly."""
    check_form(matrix)
    array = expected if isinstance(expected, np.ndarray) else expected.toarray()
    return (matrix.num_rows, matrix.num_cols) == array.shape and bool(
        (dense(matrix) == array).all()
    )


@given(matrix=matrices())
def test_a_copy_of_scipy_is_the_same_matrix(matrix: sp.csr_matrix) -> None:
    csr = CSR.from_scipy(matrix)
    assert equal(csr, matrix)
    assert csr.nnz == matrix.nnz
    assert csr.degree.tolist() == np.diff(matrix.indptr).tolist()
    assert csr.row.tolist() == sp.coo_matrix(matrix).row.tolist()
    pattern = CSR.from_scipy(matrix, ones=True)
    assert pattern.values is None
    assert equal(pattern, (matrix.toarray() != 0).astype(float))


def test_entries_out_of_order_and_other_formats() -> None:
    unsorted = sp.csr_matrix(
        (np.array([1.0, 2.0, 3.0]), np.array([2, 0, 1]), np.array([0, 2, 3])), shape=(2, 3)
    )
    expected = np.array([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]])
    assert equal(CSR.from_scipy(unsorted), expected)
    assert equal(CSR.from_scipy(sp.csc_matrix(expected)), expected)
    assert equal(CSR.from_scipy(sp.coo_array(expected)), expected)


def test_from_scipy_leaves_its_input_alone_and_shares_nothing_with_it() -> None:
    matrix = sp.csr_matrix(
        (np.array([1.0, 2.0, 3.0]), np.array([2, 0, 1], np.int32), np.array([0, 2, 3], np.int32)),
        shape=(2, 3),
    )
    csr = CSR.from_scipy(matrix)
    assert matrix.indices.tolist() == [2, 0, 1]
    assert matrix.data.tolist() == [1.0, 2.0, 3.0]
    matrix.data[:] = 7.0
    assert csr.values is not None
    assert csr.values.tolist() == [2.0, 1.0, 3.0]


@given(matrix=matrices(), seed=st.integers(0, 99))
def test_pairs_in_any_order_give_the_pattern(matrix: sp.csr_matrix, seed: int) -> None:
    pattern = sp.coo_matrix(matrix)
    order = np.random.default_rng(seed).permutation(pattern.nnz)
    rows = torch.from_numpy(pattern.row[order].astype(np.int64))
    cols = torch.from_numpy(pattern.col[order].astype(np.int64))
    csr = CSR.from_pairs(rows, cols, matrix.shape)
    assert csr.values is None
    assert equal(csr, (matrix.toarray() != 0).astype(float))


@given(matrix=matrices(), ones=st.booleans())
def test_transposed_equals_scipy(matrix: sp.csr_matrix, ones: bool) -> None:
    if ones:
        matrix = sp.csr_matrix((matrix.toarray() != 0).astype(np.float64))
    csr = CSR.from_scipy(matrix, ones=ones)
    assert equal(csr.transposed, sp.csr_matrix(matrix.T))
    assert equal(csr.transposed.transposed, matrix)
    assert (csr.transposed.values is None) == ones


@given(matrix=matrices(), ones=st.booleans(), data=st.data())
def test_select_rows_equals_scipy(matrix: sp.csr_matrix, ones: bool, data: st.DataObject) -> None:
    if ones:
        matrix = sp.csr_matrix((matrix.toarray() != 0).astype(np.float64))
    last = matrix.shape[0] - 1
    # Any order, any row twice, or none.
    rows = data.draw(st.lists(st.integers(0, last), max_size=10)) if last >= 0 else []
    chosen = CSR.from_scipy(matrix, ones=ones).select_rows(torch.tensor(rows, dtype=torch.int64))
    assert equal(chosen, matrix.toarray()[rows])


@given(
    shapes=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=5),
    ones=st.booleans(),
    seed=st.integers(0, 999),
    data=st.data(),
)
def test_select_diagonal_equals_the_blocks_that_were_put_in(
    shapes: list[tuple[int, int]], ones: bool, seed: int, data: st.DataObject
) -> None:
    parts = [sparse(*shape, seed + i, 0.5).toarray() for i, shape in enumerate(shapes)]
    if ones:
        parts = [(part != 0).astype(np.float64) for part in parts]
    positions = data.draw(st.lists(st.integers(0, len(shapes) - 1), max_size=6))
    row_off = offsets(torch.tensor([rows for rows, _ in shapes]))
    col_off = offsets(torch.tensor([cols for _, cols in shapes]))
    whole = CSR.from_scipy(sp.csr_matrix(diagonal(parts)), ones=ones)
    chosen = whole.select_diagonal(row_off, col_off, torch.tensor(positions, dtype=torch.int64))
    assert (chosen.values is None) == ones
    assert equal(chosen, diagonal([parts[p] for p in positions]))


def diagonal(parts: list[np.ndarray]) -> np.ndarray:
    """Return the block-diagonal matrix; SciPy's own refuses blocks without rows or columns."""
    out = np.zeros((sum(len(p) for p in parts), sum(p.shape[1] for p in parts)))
    row = col = 0
    for part in parts:
        out[row : row + len(part), col : col + part.shape[1]] = part
        row, col = row + len(part), col + part.shape[1]
    return out


def test_diagonal_helper_equals_scipy() -> None:
    parts = [sparse(3, 2, 0).toarray(), sparse(1, 4, 1).toarray()]
    assert (diagonal(parts) == sp.block_diag(parts).toarray()).all()


def test_with_columns_moves_entries() -> None:
    matrix = sparse(4, 3, seed=3)
    csr = CSR.from_scipy(matrix)
    moved = csr.with_columns(csr.indices.long() + 2, 6)
    assert equal(moved, np.hstack([np.zeros((4, 2)), matrix.toarray(), np.zeros((4, 1))]))


@pytest.mark.parametrize("columns", [2**31 - 1, 2**31])
def test_indices_grow_to_64_bits_with_the_columns(columns: int) -> None:
    pair = torch.tensor([0])
    csr = CSR.from_pairs(pair, pair, (1, 1)).with_columns(torch.tensor([columns - 1]), columns)
    expected = torch.int32 if columns < 2**31 else torch.int64
    assert csr.indices.dtype == csr.indptr.dtype == expected
    assert csr.indices.tolist() == [columns - 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_to_gives_values_where_there_were_none(dtype: torch.dtype) -> None:
    matrix = sparse(5, 4, seed=1)
    csr = CSR.from_scipy(matrix, ones=True).to("cpu", dtype)
    assert csr.values is not None
    assert csr.values.dtype == dtype
    assert equal(csr, (matrix.toarray() != 0).astype(float))
    assert equal(CSR.from_scipy(matrix).to("cpu", dtype), matrix)


@given(matrix=matrices(), seed=st.integers(0, 99))
def test_product_of_the_tensor_equals_scipy(matrix: sp.csr_matrix, seed: int) -> None:
    right = np.random.default_rng(seed).integers(0, 9, (matrix.shape[1], 3)).astype(np.float64)
    product = CSR.from_scipy(matrix).tensor @ torch.from_numpy(right)
    assert (product.numpy() == matrix @ right).all()


def test_a_matrix_without_values_has_no_tensor() -> None:
    csr = CSR.from_scipy(sparse(2, 2, seed=0), ones=True)
    with pytest.raises(
        DataError, match=r"^expected a sparse matrix with values, got one without: use `to` first$"
    ):
        _ = csr.tensor


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=30))
@settings(max_examples=50)
def test_undirected_has_both_directions_once_and_no_loops(
    n: int, pairs: list[tuple[int, int]]
) -> None:
    edges = np.array(pairs, dtype=np.int64).reshape(-1, 2).T % n
    adj = CSR.undirected(edges, n)
    check_form(adj)
    wanted = np.zeros((n, n), dtype=bool)
    wanted[edges[0], edges[1]] = wanted[edges[1], edges[0]] = True
    np.fill_diagonal(wanted, False)
    assert adj.values is None
    assert (adj.scipy(bool).toarray() == wanted).all()
