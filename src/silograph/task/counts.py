"""What a client returns of its predictions: counts, sums and histograms, never labels or rows.

Scores of a class are log-odds. Their histogram has bins that follow the scores: the clients first
return sums, from which the server works out mean and deviation of each class over all clients, and
then histograms over a scale that is fine around that mean. So the area under the ROC curve is
right whether a model is confident or has hardly begun.

Compiled counting checks no bounds, and the torch form refuses the same: `check_rows` and
`check_scale` look at what may come from a server or a file, logits and the scale.

C: clients (groups of rows). K: classes or label bits. B: bins. j: judged rows, val and test.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import is_

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.payload import offsets, owners, rows_of
from silograph.graph.block.block import ClientBlock
from silograph.graph.block.pairs import seen_rows
from silograph.graph.graph import MISSING, LabelForm, label_form
from silograph.task.loss import node_loss

BINS = 256
CLIP = 50.0  # log-odds beyond are as good as certain
LEAST_DEVIATION = 1e-9
MOST_CONFUSED = 100  # classes; a matrix of more is nothing to look at, and large
HITS = ("known", "tp", "fp", "fn")
SCORE_SUMS = ("score.sum", "score.square")


@dataclass(frozen=True, eq=False)
class Truth:
    """What is known of judged rows before a model says anything of them, worked out once.

    Attributes:
        y: (j,) or (j, K) labels.
        val: (j,) bool.
        group: (j,) int64 client of the row.
    """

    y: Tensor
    val: Tensor
    group: Tensor

    @cached_property
    def groups(self) -> tuple[int, int]:
        """The least and the largest client; of no rows none."""
        return _ends(self.group)

    @cached_property
    def labels(self) -> tuple[int, int]:
        """The least and the largest label; of no rows none."""
        return _ends(self.y)

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The three as the kernels take them."""
        y = self.y if self.y.dim() == 2 else self.y[:, None]
        labels, val, group = (t.contiguous().numpy() for t in (y, self.val, self.group))
        return labels, val, group


def _ends(t: Tensor) -> tuple[int, int]:
    if not t.numel():
        return 0, -1
    least, most = t.aminmax()
    return int(least), int(most)


@dataclass(frozen=True, eq=False)
class JudgedRows:
    """The rows that judge a model, with what the model says of them.

    Attributes:
        logits: (j, K).
        y: (j,) or (j, K) labels.
        val: (j,) bool, whether a row is for validation; the others are for testing.
        group: (j,) int64 client of the row.
        groups: C.
        task: what the labels mean.
        compiled: whether counting uses compiled kernels.
        seen: (j,) bool of ratings, whether user and item train; None: nobody says.
        prepared: what was worked out of labels, masks and clients; see `truth`.
    """

    logits: Tensor
    y: Tensor
    val: Tensor
    group: Tensor
    groups: int
    task: LabelForm
    compiled: bool = False
    seen: Tensor | None = None
    prepared: Truth | None = None

    @property
    def truth(self) -> Truth:
        """What is known of the rows: what was worked out, if it is of these very tensors."""
        found, own = self.prepared, (self.y, self.val, self.group)
        if found is not None and all(map(is_, (found.y, found.val, found.group), own)):
            return found
        return Truth(*own)

    def summed(self, values: Tensor, rows: Tensor) -> Tensor:
        """Return the sum of values (r, ...) of the chosen rows by client, (C, ...)."""
        zero = values.new_zeros(self.groups, *values.shape[1:])
        return zero.index_add_(0, self.group[rows], values)


def judged_mask(block: ClientBlock) -> Tensor:
    """Return which rows of a block judge, (n,) bool."""
    return block.split.val | block.split.test


@dataclass(frozen=True, eq=False)
class Judges:
    """The rows of a block that judge, whatever the model.

    Attributes:
        rows: (j,) int64.
        off: (C + 1,) int64 judged rows of each client.
        task: what the labels mean.
        truth: what is known of the rows, each counted for its own client.
        seen: (j,) bool of ratings, see `JudgedRows`.
    """

    rows: Tensor
    off: Tensor
    task: LabelForm
    truth: Truth
    seen: Tensor | None = None


def judges_of(block: ClientBlock) -> Judges:
    """Return the rows of a block that judge, worked out once."""
    if "judges" not in block.memo and block.source is not None:
        whole, positions = block.source
        block.memo["judges"] = _judges_at(judges_of(whole), whole.off, block.off, positions)
    if "judges" not in block.memo:
        rows, task = judged_mask(block).nonzero()[:, 0], label_form(block.y)
        seen = seen_rows(block)[rows] if task == "rating" else None
        truth = Truth(block.y[rows], block.split.val[rows], block.client[rows])
        off = offsets(torch.bincount(truth.group, minlength=block.num_clients))
        block.memo["judges"] = Judges(rows, off, task, truth, seen)
    found = block.memo["judges"]
    assert isinstance(found, Judges)
    return found


def _judges_at(judges: Judges, off: Tensor, new_off: Tensor, positions: Tensor) -> Judges:
    """Return those of the clients at `positions` (k,), whose rows move from `off` to `new_off`."""
    counts = judges.off.diff()[positions]
    chosen = rows_of(judges.off, positions)
    shift = torch.repeat_interleave(new_off[:-1] - off[positions], counts)
    rows = judges.rows[chosen] + shift
    seen = None if judges.seen is None else judges.seen[chosen]
    known, own_off = judges.truth, offsets(counts)
    truth = Truth(known.y[chosen], known.val[chosen], owners(own_off))
    return Judges(rows, own_off, judges.task, truth, seen)


def judged_rows(
    block: ClientBlock, logits: Tensor, group: Tensor, groups: int, *, compiled: bool = False
) -> JudgedRows:
    """Return the judged rows of a block from logits of those rows (j, K).

    Args:
        block: labels and split.
        logits: (j, K), rows of `judged_mask`.
        group: (n,) int64 client that every row of the block counts for.
        groups: number of clients.
        compiled: whether counting uses compiled kernels.
    """
    judges = judges_of(block)
    truth = judges.truth
    if group is not block.client:
        truth = Truth(truth.y, truth.val, group[judges.rows])
    own = truth.y, truth.val, truth.group
    return JudgedRows(logits, *own, groups, judges.task, compiled, judges.seen, truth)


def log_odds(logits: Tensor, task: LabelForm) -> Tensor:
    """Return log(p / (1 - p)) of every class's probability, (j, K) float64 within +-CLIP."""
    if task == "multilabel":
        odds = logits.double()
    else:
        # An infinite logit is certain; a finite one in its place keeps the softmax from NaN.
        finite = logits.double().nan_to_num(nan=torch.nan)
        log_p = torch.log_softmax(finite, dim=1)
        odds = log_p - torch.log1p(-log_p.exp())
    # A diverged model has NaN for scores: they rank lowest.
    return odds.nan_to_num(nan=-CLIP, posinf=CLIP, neginf=-CLIP).clamp(-CLIP, CLIP)


def check_rows(rows: JudgedRows) -> None:
    """Raise `ProtocolError` unless every row has logits, and a label that they say something of."""
    logits, y, count = rows.logits, rows.y, len(rows.group)
    if logits.dim() != 2 or len(logits) != count or not logits.is_floating_point():
        raise ProtocolError(
            f"expected logits of {count} judged rows, got {logits.dtype} of shape "
            f"{tuple(logits.shape)}"
        )
    several = rows.task == "multilabel"
    if y.shape != (logits.shape if several else (count,)) or len(rows.val) != count:
        raise ProtocolError(
            f"expected labels of shape {tuple(y.shape)} and as many masks to be judged by logits "
            f"as they are, got logits of shape {tuple(logits.shape)} and {len(rows.val)} masks"
        )
    if count:
        truth = rows.truth
        ends = [(truth.groups, rows.groups, "clients")]
        ends += [] if several else [(truth.labels, logits.shape[1], "labels of judged rows")]
        for (least, most), end, what in ends:
            if least < 0 or most >= end:
                raise ProtocolError(f"expected {what} in 0 to {end - 1}, got {least} to {most}")


def check_scale(mean: Tensor, deviation: Tensor, classes: int) -> None:
    """Raise `ProtocolError` unless a scale (K,) has finite means and deviations above 0."""
    for name, t in (("mean", mean), ("deviation", deviation)):
        if t.shape != (classes,) or not t.is_floating_point():
            raise ProtocolError(
                f"expected a {name} of shape ({classes},), floating point, got "
                f"{tuple(t.shape)} in {t.dtype}"
            )
    means, deviations = mean.tolist(), deviation.tolist()  # few: faster than as tensors
    if not all(map(math.isfinite, means + deviations)) or min(deviations, default=1) <= 0:
        raise ProtocolError(
            f"expected finite means and finite deviations above 0, got {means[:4]} and "
            f"{deviations[:4]}"
        )


def _decisions(rows: JudgedRows) -> tuple[Tensor, Tensor, Tensor]:
    """Return predicted, true and known as (j, K) bool."""
    logits, y = rows.logits, rows.y
    if rows.task == "multilabel":
        return logits > 0, y == 1, y != MISSING
    classes = torch.arange(logits.shape[1], device=y.device)
    true = y[:, None] == classes
    return logits.argmax(dim=1)[:, None] == classes, true, torch.ones_like(true)


def tally(rows: JudgedRows) -> dict[str, Tensor]:
    """Return counts and sums by client.

    For `val` and `test`: `*.nodes` (C,) judged nodes, `*.loss` (C,) float64 sum of node losses,
    `*.known` (C, K) judged labels, `*.tp`, `*.fp`, `*.fn` (C, K) hits and misses; and for `test`
    `score.sum` and `score.square` (C, K) float64, sums of log-odds of known labels and of their
    squared distances from the client's own mean. Integers are int32.

    Raises:
        ProtocolError: logits or labels that are not those of the rows.
    """
    check_rows(rows)
    if rows.compiled:
        return _compiled_tally(rows)
    predicted, true, known = _decisions(rows)
    loss = node_loss(rows.logits, rows.y, rows.task).double()
    tallies = {
        "known": known,
        "tp": predicted & true & known,
        "fp": predicted & ~true & known,
        "fn": ~predicted & true & known,
    }
    fields: dict[str, Tensor] = {}
    for part, chosen in (("val", rows.val), ("test", ~rows.val)):
        fields[f"{part}.nodes"] = torch.bincount(rows.group[chosen], minlength=rows.groups).int()
        fields[f"{part}.loss"] = rows.summed(loss[chosen], chosen)
        for name, hits in tallies.items():
            fields[f"{part}.{name}"] = rows.summed(hits[chosen].int(), chosen)
    test = ~rows.val
    scores, counted = log_odds(rows.logits, rows.task)[test], known[test]
    fields["score.sum"] = rows.summed(scores * counted, test)
    mean = fields["score.sum"] / fields["test.known"].clamp(min=1)
    # Not plain squares: for a small spread around a large mean they cancel to nothing.
    distance = (scores - mean[rows.group[test]]) * counted
    fields["score.square"] = rows.summed(distance**2, test)
    return fields


def confusion(rows: JudgedRows) -> Tensor | None:
    """Return how many test nodes of a class (row) were taken for a class (column), (K, K) int64.

    It tells more than `tally`, so it is for those who have the labels and never a report. None
    where a node is not of one class, and for more classes than `MOST_CONFUSED`.
    """
    test, k = ~rows.val, rows.logits.shape[1]
    if rows.task != "multiclass" or k > MOST_CONFUSED:
        return None
    cells = rows.y[test] * k + rows.logits[test].argmax(dim=1)
    return torch.bincount(cells, minlength=k * k).view(k, k)


def _compiled_tally(rows: JudgedRows) -> dict[str, Tensor]:
    from silograph.task import count_kernels  # numba takes a while to import

    parts, c, k = 2, rows.groups, rows.logits.shape[1]
    nodes, loss = np.zeros((parts, c), np.int32), np.zeros((parts, c))
    hits, score = np.zeros((parts * len(HITS), c, k), np.int32), np.zeros((2, c, k))
    outputs = nodes, loss, hits.reshape(parts, len(HITS), c, k), score
    logits, bits = rows.logits.contiguous().numpy(), rows.task == "multilabel"
    y, val, group = rows.truth.arrays
    count_kernels.tally(logits, y, val, group, bits, CLIP, *outputs)
    found = [torch.from_numpy(t).unbind() for t in (nodes, loss, hits, score)]
    fields: dict[str, Tensor] = {}
    for number, part in enumerate(("val", "test")):
        fields |= {f"{part}.nodes": found[0][number], f"{part}.loss": found[1][number]}
        own = found[2][number * len(HITS) : (number + 1) * len(HITS)]
        fields |= {f"{part}.{name}": t for name, t in zip(HITS, own, strict=True)}
    return fields | dict(zip(SCORE_SUMS, found[3], strict=True))


def score_scale(fields: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation (K,) float64 of all clients' test scores, from `tally`."""
    names = "test.known", *SCORE_SUMS
    # In NumPy: torch is slow at small steps.
    known, total, square = (fields[name].cpu().numpy() for name in names)
    number = np.maximum(known.sum(0, dtype=np.float64), 1)
    mean = _sum(total) / number
    between = known * (total / np.maximum(known, 1) - mean) ** 2
    variance = _sum(square + between) / number
    deviation = np.maximum(np.sqrt(variance), LEAST_DEVIATION)
    device = fields["test.known"].device
    return torch.from_numpy(mean).to(device), torch.from_numpy(deviation).to(device)


def _sum(values: np.ndarray) -> np.ndarray:
    """Return the sums (K,) of values (C, K), added in torch's order."""
    found: np.ndarray = torch.from_numpy(values).sum(0).numpy()
    return found


def histogram(rows: JudgedRows, mean: Tensor, deviation: Tensor) -> Tensor:
    """Return counts of test scores by client, class, truth and bin, (C, K, 2, B) int32.

    The scale is u = (1 + z / (1 + |z|)) / 2 with z = (score - mean) / deviation: increasing, so
    ranks stay, and equal bins of u are narrow where scores are many. A score without a place on the
    scale, NaN, is in the first bin.

    Raises:
        ProtocolError: logits or labels that are not those of the rows, or no such scale.
    """
    check_rows(rows)
    check_scale(mean, deviation, rows.logits.shape[1])
    if rows.compiled:
        return _compiled_histogram(rows, mean, deviation)
    test = ~rows.val
    _, true, known = (part[test] for part in _decisions(rows))
    z = (log_odds(rows.logits[test], rows.task) - mean) / deviation
    u = (1 + z / (1 + z.abs())) / 2
    bins = (u * BINS).nan_to_num(nan=0.0).clamp(0, BINS - 1).long()  # an index before it is cast
    k = rows.logits.shape[1]
    classes = torch.arange(k, device=z.device)
    cell = (rows.group[test][:, None] * k + classes) * 2 + true.long()
    counts = torch.bincount((cell * BINS + bins)[known], minlength=rows.groups * k * 2 * BINS)
    return counts.view(rows.groups, k, 2, BINS).int()


def _compiled_histogram(rows: JudgedRows, mean: Tensor, deviation: Tensor) -> Tensor:
    from silograph.task import count_kernels

    counts = np.zeros((rows.groups, rows.logits.shape[1], 2, BINS), np.int32)
    logits, bits = rows.logits.contiguous().numpy(), rows.task == "multilabel"
    y, val, group = rows.truth.arrays
    means, deviations = (t.double().contiguous().numpy() for t in (mean, deviation))
    count_kernels.histogram(logits, y, val, group, bits, CLIP, means, deviations, counts)
    return torch.from_numpy(counts)
