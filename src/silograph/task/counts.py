"""What a client returns of its predictions: counts, sums and histograms, never labels or rows.

Scores of a class are log-odds. Their histogram has bins that are fixed for every model and every
call, so it travels with the counts, and neither the server nor a client can choose bins that single
out nodes. The bins are narrow around the log-odds of a model that knows nothing, 1 / K for each of
K classes, where the scores of models lie that have hardly begun (docs/decisions/05-evaluation.md).

Compiled counting checks no bounds, and the torch form refuses the same: `check_rows` looks at what
may come from a server or a file, which is logits.

C: clients (groups of rows). K: classes or label bits. B: bins. j: judged rows, val and test.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from operator import is_
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.payload import Ragged, offsets, owners, rows_of
from silograph.graph.block.block import ClientBlock, seen_rows
from silograph.graph.graph import MISSING, LabelForm, label_form

# --- Losses of single nodes; their weighting is the caller's -------------------------------------
#
# n: rows. K: classes or label bits.


def node_loss(
    logits: Tensor, y: Tensor, task: LabelForm, class_weight: Tensor | None = None
) -> Tensor:
    """Return the loss of every node, (n,); 0 where no label is known.

    Cross-entropy for `multiclass` (y (n,)); for `multilabel` (y (n, K)) the mean binary
    cross-entropy over the bits that are known.

    `class_weight` (K,): factor of the loss of a class (`weight` of `torch.nn.CrossEntropyLoss`), or
    of that of a bit that is 1 (`pos_weight` of `torch.nn.BCEWithLogitsLoss`); None: 1.
    """
    weight = None if class_weight is None else class_weight.to(logits.dtype)
    if task == "multiclass":
        return F.cross_entropy(logits, y, weight, reduction="none", ignore_index=MISSING)
    is_known = (y != MISSING).to(logits.dtype)
    bits = F.binary_cross_entropy_with_logits(
        logits, y.to(logits.dtype), reduction="none", pos_weight=weight
    )
    total = torch.where(is_known > 0, bits, torch.zeros_like(bits)).sum(dim=1)
    return total / is_known.sum(dim=1).clamp(min=1)


BINS = 255  # odd: the score of a model that knows nothing is inside a bin and not at its edge
STEEPNESS = 4.0  # of the scale of the bins around that score
CLIP = 50.0  # log-odds beyond are as good as certain
MOST_CONFUSED = 100  # classes; a matrix of more is nothing to look at, and large
HITS = ("known", "tp", "fp", "fn")
HISTOGRAM, VAL_HISTOGRAM = "test.histogram", "val.histogram"
EvaluationLevel = Literal["none", "counts", "histograms"]


@dataclass(frozen=True)
class CountRules:
    """What replies of evaluation hold in a run.

    Attributes:
        min_count: least number of nodes behind what leaves a client, see
            `silograph.task.least_count`; 0 and 1 are no limit.
        val_histogram: whether validation nodes have a histogram, as runs need that pick their best
            round, or stop, by the AUC.
        level: what a silo's policy lets leave: histograms and counts, counts only, or nothing.
            Zeros stand for the rest.
        summed: whether the server learns the sums over all clients only.
    """

    min_count: int = 0
    val_histogram: bool = False
    level: EvaluationLevel = "histograms"
    summed: bool = False

    @property
    def withholds(self) -> bool:
        """Whether something may stay at the clients."""
        return self.merges or self.level != "histograms"

    @property
    def merges(self) -> bool:
        """Whether classes may be merged, so that replies have fields for them."""
        return self.min_count > 1


ALL_COUNTS = CountRules()


@dataclass(frozen=True, eq=False)
class Truth:
    """Labels, parts and clients of judged rows, independent of any model and computed once.

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
        """The least and the largest client; (0, -1) without rows."""
        return _least_and_most(self.group)

    @cached_property
    def labels(self) -> tuple[int, int]:
        """The least and the largest label; (0, -1) without rows."""
        return _least_and_most(self.y)

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Labels, `val` and `group` as arrays for the kernels."""
        labels, val, group = (t.contiguous().numpy() for t in (self.y, self.val, self.group))
        return labels, val, group


def _least_and_most(t: Tensor) -> tuple[int, int]:
    if not t.numel():
        return 0, -1
    smallest, largest = t.aminmax()
    return int(smallest), int(largest)


@dataclass(frozen=True, eq=False)
class JudgedRows:
    """The rows that judge a model, with the model's logits.

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
        """Truth of the rows: the prepared one, if it belongs to these very tensors."""
        prepared, tensors = self.prepared, (self.y, self.val, self.group)
        if prepared is not None and all(
            map(is_, (prepared.y, prepared.val, prepared.group), tensors)
        ):
            return prepared
        return Truth(*tensors)

    def sum_by_client(self, values: Tensor, rows: Tensor) -> Tensor:
        """Return the sum of values (r, ...) of the chosen rows by client, (C, ...)."""
        zeros = values.new_zeros(self.groups, *values.shape[1:])
        return zeros.index_add_(0, self.group[rows], values)


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

    def select(self, values: Tensor) -> Ragged:
        """Return what the state holds of values (n, ...) of all rows."""
        return Ragged(values.index_select(0, self.rows), self.off)


def judges_of(block: ClientBlock) -> Judges:
    """Return the rows of a block that judge, worked out once."""
    if "judges" not in block.memo and block.source is not None:
        whole_block, positions = block.source
        block.memo["judges"] = _select_judges(
            judges_of(whole_block), whole_block.off, block.off, positions
        )
    if "judges" not in block.memo:
        rows, task = judged_mask(block).nonzero()[:, 0], label_form(block.y)
        is_seen = seen_rows(block)[rows] if task == "rating" else None
        truth = Truth(block.y[rows], block.split.val[rows], block.client[rows])
        off = offsets(torch.bincount(truth.group, minlength=block.num_clients))
        block.memo["judges"] = Judges(rows, off, task, truth, is_seen)
    judges = block.memo["judges"]
    assert isinstance(judges, Judges)
    return judges


def _select_judges(judges: Judges, off: Tensor, new_off: Tensor, positions: Tensor) -> Judges:
    """Return judges of the clients at `positions` (k,), with rows moved from `off` to `new_off`."""
    counts = judges.off.diff()[positions]
    selected = rows_of(judges.off, positions)
    shift = torch.repeat_interleave(new_off[:-1] - off[positions], counts)
    rows = judges.rows[selected] + shift
    is_seen = None if judges.seen is None else judges.seen[selected]
    truth_before, own_off = judges.truth, offsets(counts)
    truth = Truth(truth_before.y[selected], truth_before.val[selected], owners(own_off))
    return Judges(rows, own_off, judges.task, truth, is_seen)


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
    tensors = truth.y, truth.val, truth.group
    return JudgedRows(logits, *tensors, groups, judges.task, compiled, judges.seen, truth)


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
    is_multilabel = rows.task == "multilabel"
    if y.shape != (logits.shape if is_multilabel else (count,)) or len(rows.val) != count:
        raise ProtocolError(
            f"expected labels of shape {tuple(y.shape)} and as many masks to be judged by logits "
            f"as they are, got logits of shape {tuple(logits.shape)} and {len(rows.val)} masks"
        )
    if count:
        truth = rows.truth
        ends = [(truth.groups, rows.groups, "clients")]
        ends += [] if is_multilabel else [(truth.labels, logits.shape[1], "labels of judged rows")]
        for (smallest, largest), end, name in ends:
            if smallest < 0 or largest >= end:
                raise ProtocolError(
                    f"expected {name} in 0 to {end - 1}, got {smallest} to {largest}"
                )


def _decisions(rows: JudgedRows) -> tuple[Tensor, Tensor, Tensor]:
    """Return predicted, true and known as (j, K) bool."""
    logits, y = rows.logits, rows.y
    if rows.task == "multilabel":
        return logits > 0, y == 1, y != MISSING
    classes = torch.arange(logits.shape[1], device=y.device)
    is_true = y[:, None] == classes
    return logits.argmax(dim=1)[:, None] == classes, is_true, torch.ones_like(is_true)


def tally(rows: JudgedRows, *, val_histogram: bool = False) -> dict[str, Tensor]:
    """Return counts and sums by client.

    For `val` and `test`: `*.nodes` (C,) judged nodes, `*.loss` (C,) float64 sum of node losses,
    `*.known` (C, K) judged labels, `*.tp`, `*.fp`, `*.fn` (C, K) hits and misses; and
    `test.histogram` (C, K, 2, B) counts of known labels by class, truth and bin of their score.
    Integers are int32.

    Args:
        rows: the judged rows.
        val_histogram: whether validation nodes have a histogram, too.

    Raises:
        ProtocolError: logits or labels that are not those of the rows.
    """
    check_rows(rows)
    if rows.compiled:
        return _tally_compiled(rows, val_histogram=val_histogram)
    predicted, is_true, is_known = _decisions(rows)
    loss = node_loss(rows.logits, rows.y, rows.task).double()
    tallies = {
        "known": is_known,
        "tp": predicted & is_true & is_known,
        "fp": predicted & ~is_true & is_known,
        "fn": ~predicted & is_true & is_known,
    }
    fields: dict[str, Tensor] = {}
    for part, in_part in (("val", rows.val), ("test", ~rows.val)):
        fields[f"{part}.nodes"] = torch.bincount(rows.group[in_part], minlength=rows.groups).int()
        fields[f"{part}.loss"] = rows.sum_by_client(loss[in_part], in_part)
        for name, hits in tallies.items():
            fields[f"{part}.{name}"] = rows.sum_by_client(hits[in_part].int(), in_part)
    for name, in_part in _rows_of_histograms(rows, val_histogram=val_histogram).items():
        fields[name] = _count_scores(rows, in_part, is_true, is_known)
    return fields


def _rows_of_histograms(rows: JudgedRows, *, val_histogram: bool) -> dict[str, Tensor]:
    """Return the rows (j,) bool of each histogram, by its name."""
    return {HISTOGRAM: ~rows.val} | ({VAL_HISTOGRAM: rows.val} if val_histogram else {})


def bins_of(odds: Tensor, classes: int) -> Tensor:
    """Return the bin of each log-odds within +-CLIP, int64 of the same shape.

    The scale is u = (1 + z / (1 + |z|)) / 2 with z = STEEPNESS * (odds + log(classes - 1)). It
    increases, so ranks stay, and it is steep where all classes are alike.

    Args:
        odds: of any shape.
        classes: K of one class of several; 2 for label bits.
    """
    z = STEEPNESS * (odds + middle_of(classes))
    return (((1 + z / (1 + z.abs())) / 2) * BINS).clamp(0, BINS - 1).long()


def middle_of(classes: int) -> float:
    """Return the negative log-odds of one of several classes that are alike."""
    return math.log(max(classes - 1, 1))


def _count_scores(rows: JudgedRows, selected: Tensor, is_true: Tensor, is_known: Tensor) -> Tensor:
    """Return counts (C, K, 2, B) of the chosen rows (j,) by truth (j, K) where it is known."""
    k = rows.logits.shape[1]
    is_true, is_known = is_true[selected], is_known[selected]
    bins = bins_of(log_odds(rows.logits[selected], rows.task), classes_of_scores(rows))
    classes = torch.arange(k, device=bins.device)
    cell = (rows.group[selected][:, None] * k + classes) * 2 + is_true.long()
    counts = torch.bincount((cell * BINS + bins)[is_known], minlength=rows.groups * k * 2 * BINS)
    return counts.view(rows.groups, k, 2, BINS).int()


def classes_of_scores(rows: JudgedRows) -> int:
    """Return the number of classes that a score chooses from: two for a label bit."""
    return 2 if rows.task == "multilabel" else rows.logits.shape[1]


def confusion(rows: JudgedRows) -> Tensor | None:
    """Return the confusion matrix of test nodes, true class by predicted class, (K, K) int64.

    It tells more than `tally`, so it is for those who have the labels and never a report. None
    where a node is not of one class, and for more classes than `MOST_CONFUSED`.
    """
    test, k = ~rows.val, rows.logits.shape[1]
    if rows.task != "multiclass" or k > MOST_CONFUSED:
        return None
    cells = rows.y[test] * k + rows.logits[test].argmax(dim=1)
    return torch.bincount(cells, minlength=k * k).view(k, k)


def _tally_compiled(rows: JudgedRows, *, val_histogram: bool) -> dict[str, Tensor]:
    from silograph.task import count_kernels  # numba takes a while to import

    parts, c, k = 2, rows.groups, rows.logits.shape[1]
    nodes, loss = np.zeros((parts, c), np.int32), np.zeros((parts, c))
    hits = np.zeros((parts, len(HITS), c, k), np.int32)
    bins = np.zeros((1 + val_histogram, c, k, 2, BINS), np.int32)  # of testing, then of validation
    y, val, group = rows.truth.arrays
    labels = (None, y) if rows.task == "multilabel" else (y, None)
    scale = middle_of(classes_of_scores(rows)), STEEPNESS
    outputs = count_kernels.Sums(nodes, loss, hits, bins)
    logits, odds = rows.logits.contiguous().numpy(), np.empty(k)
    count_kernels.tally(logits, *labels, val, group, CLIP, *scale, odds, outputs)
    fields: dict[str, Tensor] = {}
    for number, part in enumerate(("val", "test")):
        fields[f"{part}.nodes"] = torch.from_numpy(nodes[number])
        fields[f"{part}.loss"] = torch.from_numpy(loss[number])
        for name, counts in zip(HITS, hits[number], strict=True):
            fields[f"{part}.{name}"] = torch.from_numpy(counts)
    names = _rows_of_histograms(rows, val_histogram=val_histogram)
    return fields | {name: torch.from_numpy(t) for name, t in zip(names, bins, strict=True)}
