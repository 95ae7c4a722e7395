"""How far the features of silos differ, by federated histograms before training.

Each client counts its training nodes in bins of every feature and sends the counts. Bins follow
from the mean and the deviation over all clients, which are federated sums
(`silograph.exchange.collect`): with z = (x - mean) / deviation they end at -2.85, -2.55, ..., 2.85.
Features that `normalize` standard has standardized are z already. A silo takes mean and deviation
from the server and cannot verify them: a server that lies places the bins where it wants.

A count below the run's least count (`evaluation_min_count`) is added to the next bin toward the
middle. So each count that leaves is 0 or at least that, their sum tells no small one, and no
cumulative count is off by the least count or more. A client with fewer training nodes sends zeros.

The distance of a client is that of Kolmogorov and Smirnov between its own bins and those of all
others together: the largest difference of their cumulative shares, 0 to 1.

C: clients. F: features. B: bins.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from silograph.core.errors import DataError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Stacked
from silograph.exchange.collect import DEVIATION, MEAN
from silograph.federation.base import BY_CLIENT, Federation, Gather
from silograph.federation.field_specs import TRAIN, FieldSpec
from silograph.federation.messages import Empty
from silograph.federation.ops import CallContext, Clients, op, steps_of
from silograph.federation.program import Steps
from silograph.graph.block.block import ClientBlock, SparseRows
from silograph.graph.column_statistics import (
    DRIFT,
    ClientSums,
    ColumnStatistics,
    standardize,
    sum_by_client,
)

BINS = 21
ENDS = 0.3 * torch.arange(-9.5, 10, dtype=torch.float64)  # (B - 1,) of bins but the last one
UNKNOWN = -1.0  # distance where a client, or all others, sent no counts


@dataclass(frozen=True)
class DriftForm:
    """What the message depends on.

    Attributes:
        features: F.
        min_count: the run's least count; 0 and 1 are no limit.
    """

    features: int
    min_count: int


@dataclass(frozen=True)
class Histograms:
    """Counts (C, F, B) int32 of training nodes."""

    counts: Annotated[
        Stacked,
        lambda form: FieldSpec(Stacked, (form.features, BINS), torch.int32, low=0, among=TRAIN),
    ]

    def find_problem(self, request: Empty, form: DriftForm) -> str | None:
        """Return what counts were expected in place of these, or None if they can be right."""
        del request
        counts = self.counts.t
        if bool(((counts > 0) & (counts < form.min_count)).any()):
            return f"every count to be 0 or at least {form.min_count}, got a smaller one"
        totals = counts.sum(dim=2)
        if bool((totals != totals[:, :1]).any()):
            return "the same number of values for each feature, got different numbers"
        return None


@op(Kind.STATISTICS, reads_only=("statistics/",))
def send_histograms(clients: Clients, state: Empty, _: Empty) -> tuple[Empty, Histograms]:
    """Count training nodes in bins of each feature."""
    block, mean = clients.block, clients.state.get(MEAN + DRIFT)
    x, client = _training_rows(block)
    if mean is not None:  # all clients have the same
        statistics = ColumnStatistics(mean.t[0], clients.state[DEVIATION + DRIFT].t[0])
        x = standardize(x, statistics)
    size, ends = block.num_clients, ENDS.to(x.device)
    columns = [
        torch.bincount(
            client * BINS + torch.bucketize(column.double().contiguous(), ends),
            minlength=size * BINS,
        )
        for column in x.T  # one at a time: bins of all of them take eight bytes for each value
    ]
    counts = torch.stack(columns).view(len(columns), size, BINS).transpose(0, 1)
    return state, Histograms(Stacked(merge_small(counts, clients.cfg.count_rules.min_count).int()))


def _training_rows(block: ClientBlock) -> tuple[Tensor, Tensor]:
    """Return the features of training nodes, (k, F), and their clients, (k,) int64."""
    if isinstance(block.x, SparseRows):
        raise DataError(
            "expected dense features for feature_drift, got sparse ones: leave feature_drift out"
        )
    rows = block.split.train.nonzero()[:, 0]
    return block.x[rows], block.client[rows]


def drift_sums(block: ClientBlock) -> ClientSums:
    """Return the sums from which bins follow.

    Raises:
        DataError: features are sparse, or too large.
    """
    return sum_by_client(*_training_rows(block), block.num_clients)


def merge_small(counts: Tensor, min_count: int) -> Tensor:
    """Return counts (..., B) without any from 1 to `min_count` - 1; they join the next bin inward.

    Where the middle itself has too few, it joins the next bin that has enough; where the sum of all
    is too small, nothing is left.
    """
    middle, last = BINS // 2, BINS - 1
    bins = list(counts.unbind(dim=-1))
    inward = [*((b, b + 1) for b in range(middle)), *((b, b - 1) for b in range(last, middle, -1))]
    outward = [
        *((b, b + 1) for b in range(middle, last)),
        *((b, b - 1) for b in range(last, 0, -1)),
    ]
    for source, target in (*inward, *outward):
        is_small = bins[source] < min_count
        bins[target] = bins[target] + bins[source] * is_small
        bins[source] = bins[source] * ~is_small
    return torch.stack([bins[0] * (bins[0] >= min_count), *bins[1:]], dim=-1)


def drift_distances(counts: Tensor) -> Tensor:
    """Return the distance of each client to all others, (C, F) float64, of counts (C, F, B)."""
    own = counts.long()
    others = own.sum(dim=0) - own
    sizes = own.sum(dim=2), others.sum(dim=2)
    cumulative = [
        part.cumsum(dim=2).double() / size.clamp(min=1).double()[:, :, None]
        for part, size in zip((own, others), sizes, strict=True)
    ]
    distance = (cumulative[0] - cumulative[1]).abs().amax(dim=2)
    return torch.where((sizes[0] > 0) & (sizes[1] > 0), distance, UNKNOWN)


def measure_drift(fed: Federation, form: DriftForm, key: Key) -> Tensor:
    """Let every client send its histograms; return the distances (C, F) float64.

    Args:
        fed: the federation; clients have the means and deviations that bins follow from.
        form: of the message.
        key: of the call; nothing is drawn.
    """
    replies = CallContext(form, key).call(fed, send_histograms, Empty(), Gather("counts"))
    return drift_distances(replies[f"{BY_CLIENT}counts"].t).cpu()


def drift_steps(form: DriftForm, key: Key) -> Steps:
    """Return the calls of `measure_drift`."""
    return steps_of((send_histograms,), CallContext(form, key))
