"""Mean and deviation of columns over training rows, and what standardizes columns by them.

All of it is float64: a column of Unix times differs in its last digits only. Deviations are taken
around a mean that is known before, so that nothing cancels.

C: clients. W: columns. n: rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from silograph.core.errors import DataError
from silograph.graph.csr import CSR
from silograph.graph.graph import Features

FEATURES = "features"  # name of the sums and statistics of features
EDGE_WEIGHTS = "edge_weights"  # likewise of weights of edges
LABELS = "labels"  # likewise of counts of labels
DRIFT = "feature_drift"  # likewise of features, from which the bins of their histograms follow
# What rounding leaves of the deviation of a constant column, beside its mean.
FLAT = 1e-12
LARGEST = 1e100  # magnitude of a value, so that sums of squares of all rows stay finite


@dataclass(frozen=True, eq=False)
class ColumnStatistics:
    """Mean and deviation of columns, to standardize them.

    Attributes:
        mean: (W,) or (C, W) float64.
        deviation: as `mean`; exactly 0 for a column that is constant.
    """

    mean: Tensor
    deviation: Tensor

    def of_client(self, position: int) -> "ColumnStatistics":
        """Return the (W,) statistics of one client out of (C, W)."""
        return ColumnStatistics(self.mean[position], self.deviation[position])


@dataclass(frozen=True, eq=False)
class ClientSums:
    """Sums of each client's training rows, column by column.

    Attributes:
        count: (C,) int64 rows.
        total: (C, W) float64 sums of values.
        squares: (C, W) float64 sums of squared differences from the client's own mean.
        is_sent: whether clients send them, for statistics of all clients; else they stay.
    """

    count: Tensor
    total: Tensor
    squares: Tensor
    is_sent: bool = True

    @property
    def own_mean(self) -> Tensor:
        """(C, W) each client's own mean; 0 without rows."""
        return mean_of(self.count[:, None], self.total)

    def squares_around(self, mean: Tensor) -> Tensor:
        """Return the sums of squared differences from a mean (W,) or (C, W), (C, W) float64."""
        # sum (x - m)^2 = sum (x - own)^2 + count (own - m)^2, and no term of it cancels.
        return self.squares + self.count[:, None] * (self.own_mean - mean) ** 2

    def own_statistics(self) -> ColumnStatistics:
        """Return what standardizes each client's columns by its own rows, (C, W)."""
        mean = self.own_mean
        return ColumnStatistics(mean, deviation_of(mean, self.count[:, None], self.squares))

    def take(self, positions: Tensor) -> "ClientSums":
        """Return the sums of the clients at `positions` (k,) int64."""
        tensors = self.count[positions], self.total[positions], self.squares[positions]
        return ClientSums(*tensors, self.is_sent)

    def to(self, device: torch.device | str) -> "ClientSums":
        """Return the sums on another device."""
        count, total, squares = (t.to(device) for t in (self.count, self.total, self.squares))
        return ClientSums(count, total, squares, self.is_sent)


def join_sums(parts: Sequence[ClientSums]) -> ClientSums:
    """Return sums of several blocks of clients as those of one, in their order."""
    return ClientSums(
        torch.cat([part.count for part in parts]),
        torch.cat([part.total for part in parts]),
        torch.cat([part.squares for part in parts]),
        parts[0].is_sent,
    )


def sum_by_client(values: Tensor, client: Tensor, clients: int) -> ClientSums:
    """Return the sums of each client's rows.

    Rows of a client are added in their order, so a silo alone has the bits of a simulation.

    Args:
        values: (n, W) of any floating point dtype.
        client: (n,) int64 whose row it is.
        clients: C.

    Raises:
        DataError: a value is too large for sums of squares.
    """
    wide = values.double()
    if wide.numel() and not float(wide.abs().max()) <= LARGEST:
        column = int((wide.abs() > LARGEST).any(0).int().argmax())
        raise DataError(
            f"values must be at most {LARGEST:g} to be standardized, got "
            f"{float(wide[:, column].abs().max()):g} in column {column}: scale the column before"
        )
    count = torch.bincount(client, minlength=clients)
    zero = wide.new_zeros(clients, wide.shape[1])
    total = zero.index_add(0, client, wide)
    own = mean_of(count[:, None], total)
    squares = zero.index_add(0, client, (wide - own[client]) ** 2)
    return ClientSums(count, total, squares)


def sum_edge_weights(edges: CSR, halo: CSR, client: Tensor, clients: int) -> ClientSums:
    """Return the sums of the weights (W = 1) of the edges that each client holds.

    An edge inside a client is stored in both directions, one between two clients once at each of
    them. So each edge counts twice, and the mean over all clients is that of all edges. An edge
    with a direction counts once, at the row that it comes from.

    Args:
        edges: (n, n) edges inside clients, values are float64 weights, (nnz,) or by direction
            (nnz, 2); without values each is 1.
        halo: (n, S) edges to other clients, likewise.
        client: (n,) int64 whose row it is.
        clients: C.
    """
    parts = [
        torch.ones(part.nnz, dtype=torch.float64) if part.values is None else part.values.double()
        for part in (edges, halo)
    ]
    weight, row = torch.cat(parts), torch.cat([edges.row, halo.row])
    if weight.dim() == 2:
        is_from_row = ~weight[:, 0].isnan()
        weight, row = weight[is_from_row, 0], row[is_from_row]
    order = weight.argsort(stable=True)  # no order of nodes or edges changes the bits of the sums
    return sum_by_client(weight[order, None], client[row[order]], clients)


def sum_labels(
    y: Tensor, train: Tensor, client: Tensor, clients: int, classes: int, least: int
) -> ClientSums:
    """Return how many training rows of each client have each label, as sums.

    A client with 1 to `least` - 1 training rows of a label sends zeros: it cannot leave out one
    count alone, which the others and the number of its training rows would tell.

    Args:
        y: (n,) classes, W = K columns; or (n, K) bits, W = 2 K: rows whose bit is 1, then 0.
        train: (n,) bool.
        client: (n,) int64 whose row it is.
        clients: C.
        classes: K.
        least: the least count of the run; 0 and 1 are no limit.
    """
    rows = train.nonzero()[:, 0]
    own, labels = client[rows], y[rows]
    if labels.dim() == 2:
        values = torch.cat([labels == 1, labels == 0], dim=1)
    else:
        values = labels[:, None] == torch.arange(classes, device=y.device)
    sums = sum_by_client(values.double(), own, clients)
    is_few = ((sums.total > 0) & (sums.total < least)).any(dim=1)
    return ClientSums(
        sums.count.masked_fill(is_few, 0),
        sums.total.masked_fill(is_few[:, None], 0),
        sums.squares.masked_fill(is_few[:, None], 0),
    )


def balanced_weights(shares: Tensor, classes: int) -> Tensor:
    """Return the weight of each class by which all classes count alike, (K,) float64.

    Of classes it is n / (number of classes * number of rows of the class), as in scikit-learn; of a
    class without rows it is 1. Of a label bit it is the number of zeros / the number of ones, the
    weight of a one, and 1 where there are not both.

    Args:
        shares: (W,) mean of the columns of `sum_labels` over all clients' training rows.
        classes: K.

    Raises:
        DataError: no client has sent counts, or the shares cannot be shares.
    """
    if not bool(((shares >= 0) & (shares <= 1)).all()):  # they come from the server
        raise DataError(f"expected shares of labels from 0 to 1, got {shares.tolist()[:4]}")
    if not bool(shares.any()):
        raise DataError(
            "expected counts of labels for class_weight=balanced, got none: at every "
            "client some label has fewer training nodes than evaluation_min_count; give weights in "
            "a file"
        )
    if len(shares) == classes:
        number = (shares > 0).sum()
        return torch.where(shares > 0, 1 / (number * shares.clamp(min=1e-300)), 1.0)
    ones, zeros = shares[:classes], shares[classes:]
    return torch.where((ones > 0) & (zeros > 0), zeros / ones.clamp(min=1e-300), 1.0)


def mean_of(count: Tensor, total: Tensor) -> Tensor:
    """Return total / count, and 0 where nothing was counted."""
    return total / count.clamp(min=1)


def deviation_of(mean: Tensor, count: Tensor, squares: Tensor) -> Tensor:
    """Return the standard deviation of columns, exactly 0 where they are constant.

    Args:
        mean: (W,) or (C, W).
        count: rows; a number, or (C, 1).
        squares: sums of squared differences from the mean, as `mean`.
    """
    deviation = mean_of(count, squares).sqrt()
    return torch.where(deviation <= FLAT * mean.abs(), 0.0, deviation)


def dense_columns(x: Features) -> Tensor:
    """Return features (n, F) that can be standardized; raise `DataError` for sparse ones."""
    if isinstance(x, CSR):
        raise DataError(
            "expected dense features for normalize standard, got sparse ones, which it would make "
            "dense: use normalize row or none"
        )
    return x


def standardize(x: Features, statistics: ColumnStatistics, client: Tensor | None = None) -> Tensor:
    """Return features (n, F) float64 minus the mean, divided by the deviation.

    A column without deviation becomes 0.

    Args:
        x: dense features.
        statistics: of all rows, or of each client.
        client: (n,) int64 whose row it is, where each client has its own statistics.

    Raises:
        DataError: `x` is sparse.
    """
    wide = dense_columns(x).double()
    mean, deviation = statistics.mean, statistics.deviation
    scale = torch.where(deviation == 0, 0.0, 1 / deviation.where(deviation != 0, 1.0))
    if client is not None:
        mean, scale = mean[client], scale[client]
    return (wide - mean) * scale
