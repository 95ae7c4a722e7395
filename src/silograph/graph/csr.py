"""Compressed sparse rows: the one form in which adjacency and sparse features are held."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from silograph.core.errors import DataError
from silograph.core.payload import offsets, ranges, runs_at


def index_dtype(entries: int, columns: int) -> torch.dtype:
    """Return the dtype of the arrays of a matrix with so many entries and columns."""
    return torch.int32 if max(entries, columns) < 2**31 else torch.int64


FEW = 2**14  # entries that torch selects as fast as SciPy


@dataclass(frozen=True, eq=False)
class CSR:
    """A sparse matrix (n, num_cols): entries of row i are at indptr[i]:indptr[i+1].

    Attributes:
        indptr: (n + 1,) int32 or int64, the dtype of `indices`.
        indices: (nnz,) column of every entry, ascending within a row.
        values: (nnz,) floating point; None means that every entry is 1. Of edges with directions
            (nnz, 2): the weight from the row to the column and that from the column to the row, NaN
            where there is no such edge.
        num_cols: number of columns.
    """

    indptr: Tensor
    indices: Tensor
    values: Tensor | None
    num_cols: int

    def map(self, change: Callable[[Tensor], Tensor]) -> "CSR":
        """Return the matrix of the arrays that `change` makes of these; itself if it changes none.

        Cached properties of an unchanged matrix stay valid.
        """
        indptr, indices = change(self.indptr), change(self.indices)
        values = None if self.values is None else change(self.values)
        if indptr is self.indptr and indices is self.indices and values is self.values:
            return self
        return CSR(indptr, indices, values, self.num_cols)

    @staticmethod
    def from_scipy(matrix: Any, *, ones: bool = False) -> "CSR":
        """Return a copy of a SciPy matrix; `ones` drops its values."""
        rows = sp.csr_matrix(matrix, copy=True)
        rows.sort_indices()
        dtype = index_dtype(rows.nnz, rows.shape[1])
        values = None if ones else torch.from_numpy(np.ascontiguousarray(rows.data))
        return CSR(
            torch.from_numpy(np.ascontiguousarray(rows.indptr)).to(dtype),
            torch.from_numpy(np.ascontiguousarray(rows.indices)).to(dtype),
            values,
            int(rows.shape[1]),
        )

    @staticmethod
    def from_pairs(
        rows: Tensor, cols: Tensor, shape: tuple[int, int], values: Tensor | None = None
    ) -> "CSR":
        """Return the matrix with values at (rows[i], cols[i]), which must be distinct; None: ones.

        Ones are not stored. Values may have several columns, (len(rows), k).
        """
        if values is not None and values.dim() == 2:  # SciPy sorts one number for each entry
            entries = CSR.from_pairs(rows, cols, shape, torch.arange(len(rows)))
            assert entries.values is not None  # given above
            return entries.with_values(values[entries.values])
        data = np.ones(len(rows), dtype=np.int8) if values is None else values.numpy()
        matrix = sp.coo_matrix((data, (rows.numpy(), cols.numpy())), shape=shape)
        return CSR.from_scipy(matrix, ones=values is None)

    @staticmethod
    def undirected(edges: np.ndarray, n: int) -> "CSR":
        """Return the adjacency (n, n) of edges (2, E) between nodes 0..n-1.

        Both directions of every edge; self loops and repeated edges are dropped.
        """
        return replace(CSR.directions(edges, n), values=None)

    @staticmethod
    def directions(edges: np.ndarray, n: int) -> "CSR":
        """Return the adjacency of `undirected` with the directions of its entries as values.

        (nnz,) int8: 1 where the edge from the row to the column is listed, 2 where that from the
        column to the row is, 3 where both are.
        """
        loops = edges[0] == edges[1]
        if loops.any():
            edges = edges[:, ~loops]
        ones = np.ones(edges.shape[1], dtype=np.bool_)
        # The conversion to rows merges repeated edges, and the sum those of the two directions.
        directed = sp.coo_matrix((ones, (edges[0], edges[1])), shape=(n, n)).tocsr()
        directed = directed.astype(np.int8)
        return CSR.from_scipy(directed + 2 * directed.T.tocsr())

    @staticmethod
    def stacked_rows(parts: Sequence["CSR"]) -> "CSR":
        """Return matrices of one width one below the other; all have values, or none has."""
        return _joined(parts, [part.indices.long() for part in parts], parts[0].num_cols)

    @staticmethod
    def block_diagonal(parts: Sequence["CSR"]) -> "CSR":
        """Return matrices as diagonal blocks of one; all have values, or none has."""
        start = offsets(torch.tensor([part.num_cols for part in parts])).tolist()
        columns = [part.indices.long() + s for part, s in zip(parts, start, strict=False)]
        return _joined(parts, columns, start[-1])

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.indptr) - 1

    @property
    def nnz(self) -> int:
        """Number of stored entries."""
        return len(self.indices)

    @cached_property
    def degree(self) -> Tensor:
        """Number of entries of every row, (n,) int64."""
        return self.indptr.diff().long()

    @cached_property
    def weighted_degree(self) -> Tensor:
        """Sum of the entries of every row, (n,) in their dtype; (n,) int64 without values."""
        if self.values is None:
            return self.degree
        # In float64, so that a sum of ones is their number in every dtype.
        total = torch.segment_reduce(self.values.double(), "sum", lengths=self.degree)
        return total.to(self.values.dtype)

    @cached_property
    def row(self) -> Tensor:
        """Row of every entry, (nnz,) int64."""
        return torch.repeat_interleave(
            torch.arange(self.num_rows, device=self.indptr.device), self.degree
        )

    @cached_property
    def by_column(self) -> Tensor:
        """The entries in the order of their columns, then rows, (nnz,) int64."""
        return self._transposed[2]

    @cached_property
    def _transposed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Where columns begin among the entries by column, their rows, and their places here."""
        dtype = self.indices.dtype
        if self.indices.device.type == "cpu":  # SciPy counts in linear time, torch sorts
            places = np.arange(self.nnz, dtype=np.int64)
            parts = places, self.indices.numpy(), self.indptr.numpy()
            transposed = sp.csr_matrix(parts, shape=(self.num_rows, self.num_cols)).tocsc()
            starts, row = (
                torch.from_numpy(t).to(dtype) for t in (transposed.indptr, transposed.indices)
            )
            return starts, row, torch.from_numpy(transposed.data)
        order = torch.sort(self.indices, stable=True).indices
        lengths = torch.bincount(self.indices, minlength=self.num_cols)
        return offsets(lengths).to(dtype), self.row[order].to(dtype), order

    @cached_property
    def transposed(self) -> "CSR":
        """The transpose, built once: torch's own transposed products are several times slower."""
        if self._fits_scipy and "_transposed" not in self.__dict__:
            return self._from_arrays(self.scipy().tocsc(), self.num_rows)
        starts, row, order = self._transposed
        values = None if self.values is None else self.values[order]
        return CSR(starts, row, values, self.num_rows)

    @property
    def _fits_scipy(self) -> bool:
        """Whether SciPy can take rows or the transpose, in a third of the time of torch."""
        values = self.values
        if values is None or values.dim() != 1 or not values.is_cpu:
            return False
        return values.dtype in (torch.float32, torch.float64)

    def _from_arrays(self, matrix: "sp.csr_matrix | sp.csc_matrix", num_cols: int) -> "CSR":
        """Return a matrix of SciPy's arrays, with integers as here."""
        dtype = self.indices.dtype
        starts, places = (torch.from_numpy(t).to(dtype) for t in (matrix.indptr, matrix.indices))
        return CSR(starts, places, torch.from_numpy(matrix.data), num_cols)

    @cached_property
    def tensor(self) -> Tensor:
        """The matrix as a torch sparse CSR tensor, for products with dense ones."""
        if self.values is None:
            raise DataError("expected a sparse matrix with values, got one without: use `to` first")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            return torch.sparse_csr_tensor(
                self.indptr,
                self.indices,
                self.values,
                (self.num_rows, self.num_cols),
                check_invariants=False,
            )

    def scipy(self, dtype: "np.typing.DTypeLike" = np.float32) -> "sp.csr_matrix":
        """Return a SciPy matrix; absent values become ones of `dtype`."""
        data = np.ones(self.nnz, dtype) if self.values is None else self.values.cpu().numpy()
        return sp.csr_matrix(
            (data, self.indices.cpu().numpy(), self.indptr.cpu().numpy()),
            shape=(self.num_rows, self.num_cols),
        )

    def select_rows(self, rows: Tensor) -> "CSR":
        """Return the matrix of these rows (k,) int64, columns unchanged; all rows are itself."""
        if len(rows) == self.num_rows:
            all_rows = torch.arange(self.num_rows, dtype=rows.dtype, device=rows.device)
            if torch.equal(rows, all_rows):
                return self
        if self._fits_scipy and len(rows) * self.nnz > FEW * self.num_rows:
            return self._from_arrays(self.scipy()[rows.numpy()], self.num_cols)
        lengths = self.degree[rows]
        entries = ranges(self.indptr[:-1].long()[rows], lengths)
        return CSR(
            offsets(lengths).to(self.indices.dtype),
            self.indices.index_select(0, entries),
            None if self.values is None else self.values.index_select(0, entries),
            self.num_cols,
        )

    def select_diagonal(self, row_off: Tensor, col_off: Tensor, positions: Tensor) -> "Runs":
        """Return the diagonal blocks at `positions` (k,) int64 of a block-diagonal matrix.

        Block c has rows row_off[c]:row_off[c + 1] and columns col_off[c]:col_off[c + 1].
        """
        return Runs(self, row_off, positions, col_off)

    def copied(self) -> "CSR":
        """Return the matrix in memory of its own, apart from one that it is a part of."""
        return CSR(self.indptr, self.indices, self.values, self.num_cols)

    def select_runs(self, row_off: Tensor, positions: Tensor) -> "Runs":
        """Return the rows of the clients at `positions` (k,) int64, columns unchanged.

        Client c has rows row_off[c]:row_off[c + 1].
        """
        return Runs(self, row_off, positions, None)

    def with_columns(self, indices: Tensor, num_cols: int) -> "CSR":
        """Return the same rows and values with other columns (nnz,), ascending in each row."""
        dtype = index_dtype(self.nnz, num_cols)
        return CSR(self.indptr.to(dtype), indices.to(dtype), self.values, num_cols)

    def with_values(self, values: Tensor) -> "CSR":
        """Return the same places with other values (nnz,); cached orders are shared."""
        csr = CSR(self.indptr, self.indices, values, self.num_cols)
        for name in ("row", "by_column", "_transposed"):  # cached, as cached properties do it
            if name in self.__dict__:
                csr.__dict__[name] = self.__dict__[name]
        return csr

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "CSR":
        """Return a copy on another device with values of `dtype`, ones where there were none."""
        values = torch.ones(self.nnz) if self.values is None else self.values
        values = values.to(device, dtype)
        moved = CSR(self.indptr.to(device), self.indices.to(device), values, self.num_cols)
        if self.values is None:  # known without a pass over the entries; cached as above
            moved.__dict__["weighted_degree"] = moved.degree.to(dtype)
        return moved


class Runs(CSR):
    """Runs of rows of another matrix; each array is copied when it is first read.

    A call to some clients reads little of their matrices where its inputs are cached.

    Args:
        whole: the matrix, which stays in memory.
        off: (C + 1,) int64, the rows of each client.
        positions: (k,) int64, of the clients whose rows these are.
        col_off: (C + 1,) int64, the columns of each client, of which only theirs are kept; None:
            all columns are.
    """

    def __init__(self, whole: CSR, off: Tensor, positions: Tensor, col_off: Tensor | None) -> None:
        # As dataclasses do that are frozen.
        self.__dict__ |= {"_whole": whole, "_off": off, "_positions": positions}
        self.__dict__ |= {"_col_off": col_off}

    _whole: CSR
    _off: Tensor
    _positions: Tensor
    _col_off: Tensor | None

    @cached_property
    def num_cols(self) -> int:
        """Number of columns."""
        if self._col_off is None:
            return self._whole.num_cols
        return int(self._col_off.diff()[self._positions].sum())

    @cached_property
    def _shift(self) -> Tensor | None:
        """The shift of the columns of each client, (k,) int64, or None."""
        if self._col_off is None:
            return None
        first = offsets(self._col_off.diff()[self._positions])[:-1]
        return first - self._col_off[self._positions]

    @cached_property
    def _entry_off(self) -> Tensor:
        """Where the entries of each client of the whole matrix begin, (C + 1,) int64."""
        return self._whole.indptr[self._off].long()

    @cached_property
    def _index_dtype(self) -> torch.dtype:
        entries = int(self._entry_off.diff()[self._positions].sum())
        return index_dtype(entries, self.num_cols)

    @cached_property
    def degree(self) -> Tensor:
        """Number of entries of every row, (n,) int64."""
        return runs_at(self._whole.degree, self._off, self._positions)

    @cached_property
    def weighted_degree(self) -> Tensor:
        """Sum of the entries of every row, (n,)."""
        return runs_at(self._whole.weighted_degree, self._off, self._positions)

    @cached_property
    def indptr(self) -> Tensor:
        """Where the entries of every row begin, (n + 1,)."""
        return offsets(self.degree).to(self._index_dtype)

    @cached_property
    def indices(self) -> Tensor:
        """Column of every entry, (nnz,)."""
        indices = runs_at(self._whole.indices, self._entry_off, self._positions)
        if self._shift is not None:
            lengths = self._entry_off.diff()[self._positions]
            indices += torch.repeat_interleave(self._shift.to(indices.dtype), lengths)
        return indices.to(self._index_dtype)

    @cached_property
    def values(self) -> Tensor | None:
        """The entries, (nnz,), or None."""
        values = self._whole.values
        return None if values is None else runs_at(values, self._entry_off, self._positions)


def _joined(parts: Sequence[CSR], columns: Sequence[Tensor], num_cols: int) -> CSR:
    """Return the rows of all parts with these columns."""
    values = [part.values for part in parts if part.values is not None]
    lengths = torch.cat([part.degree for part in parts])
    indices = torch.cat(tuple(columns))
    dtype = index_dtype(len(indices), num_cols)
    return CSR(
        offsets(lengths).to(dtype),
        indices.to(dtype),
        torch.cat(values) if values else None,
        num_cols,
    )
