"""Limits on the counts that leave a client, so that each is of enough nodes.

`counts_to_send` makes the counts that clients send from the full ones, in simulations and at real
silos alike. With a least count m of 2 or more, for validation and test apart:

- **Nodes.** A client with fewer than m evaluated nodes sends zeros, as a client that is away.
- **Classes** (label bits, targets of a regression). Of each class there are several numbers of
  nodes: those that have it, those that have another one, those that are predicted to have it, those
  that are not, and those whose label is missing. A class with one of them in 1..m-1 is merged with
  all others like it into the fields `merged.*`, sums over the merged classes, and 0 stands in its
  place. If the merged cell itself has such a number, the next smallest class is merged, too. So
  sums over all classes stay exact, and with them accuracy, micro F1 and the loss. If even all
  classes together have such a number, the client sends zeros.
- **Histograms.** Occupied bins are merged with the next ones until m scores are together. They are
  counted at one of 51 places, the one in which the middle score is. A merged class has none.
- **Ratings.** Seen and unseen ones are counted apart only if there are 0, or m or more, of both.
- **Rankings.** A client with fewer than m ranked users sends zeros.

So every number of nodes above is 0 or at least m in what leaves. Hits and misses of a class,
`tp`, `fp` and `fn`, are parts of such numbers and may be any. Nothing here hides a node from a
server that asks twice and takes the difference; see `docs/explanation/privacy.md`.

Sums of losses and of errors of ratings are over at least m nodes. An exact sum would tell a label
of each node to a server whose weights give every node a loss of its own size. So each loss is at
most `MOST_LOSS`, and the sum is a multiple of `LOSS_STEP` (`limited_sums`); an error of a rating is
at most the span of the client's ratings, in steps of the same share. Then a sum tells about four
labels at most, and the mean of n losses is within 1 / (2 n) of that of the limited losses.

C: clients. K: classes, label bits or targets. B: bins.
"""

from bisect import bisect_left
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from silograph.graph.graph import LabelForm
from silograph.task.base import CountSpec, Task
from silograph.task.counts import HITS, CountRules, JudgedRows, node_loss
from silograph.task.scores import PARTS

MERGED = "merged"
PLACE = 5  # bins: a group of merged bins is at one of 51 places of 255
NUMBERS = ("known", "square", "absolute")  # by target
KINDS = ("seen", "unseen")  # of ratings
MOST_LOSS, LOSS_STEP = 8.0, 1.0  # of a node, and of the sum over a client's nodes
RANKED = "ranked"  # users whose items are ranked, a number of users


def merged_fields(labels: LabelForm) -> tuple[str, ...]:
    """Return the names without `val.` or `test.` of the fields that classes are merged in."""
    if labels in ("multiclass", "multilabel"):
        return HITS
    return NUMBERS if labels == "node_value" else ()


def specs_to_send(task: Task, outputs: int, rules: CountRules) -> dict[str, CountSpec]:
    """Return the specs of `counts_to_send` for one client, by name; without rankings."""
    specs = dict(task.counts(outputs, val_histogram=rules.val_histogram))
    if rules.merges:
        for part in PARTS:
            for name in merged_fields(task.labels):
                spec = specs[f"{part}.{name}"]
                specs[f"{part}.{MERGED}.{name}"] = CountSpec((), spec.dtype, spec.low, spec.high)
    return specs


def counts_to_send(
    counts: Mapping[str, Tensor], labels: LabelForm, rules: CountRules
) -> dict[str, Tensor]:
    """Return the counts that clients send, of the same shapes and dtypes.

    Where `rules.merges`, there are `PART.merged.NAME` (C,) besides, see `merged_fields`.

    Args:
        counts: the full ones (C, ...), of `Task.tally` or of rankings; not changed.
        labels: the form of the labels.
        rules: what replies of evaluation hold.
    """
    arrays = {name: t.cpu().numpy().copy() for name, t in counts.items()}
    if rules.merges:
        for part in PARTS:
            if f"{part}.nodes" in arrays:
                _limit_part(arrays, part, labels, rules.min_count)
            if f"{part}.{RANKED}" in arrays:
                _zero_part(arrays, part, arrays[f"{part}.{RANKED}"] < rules.min_count)
    if rules.level != "histograms":
        for name, array in arrays.items():
            if rules.level == "none" or name.endswith(".histogram"):
                array[...] = 0
    sent = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if all(t.is_cpu for t in counts.values()):
        return sent
    device = next(iter(counts.values())).device
    return {name: t.to(device) for name, t in sent.items()}


def limited_sums(rows: JudgedRows) -> dict[str, Tensor]:
    """Return the sums of losses and errors (C,) float64 that clients send with a least count.

    They take the place of the exact ones of `Task.tally`. Of numbers to predict at nodes there are
    none: such graphs are not trained at real silos.
    """
    if rows.task == "node_value":
        return {}
    if rows.task != "rating":
        # In NumPy, which adds in the same order: torch takes several times as long for few rows.
        node_losses = node_loss(rows.logits, rows.y, rows.task).detach().cpu().numpy()
        loss = np.minimum(node_losses.astype(np.float64), MOST_LOSS)
        val, group = rows.val.cpu().numpy(), rows.group.cpu().numpy()
        by_part = {
            part: np.bincount(group[in_part], loss[in_part], rows.groups)
            for part, in_part in zip(PARTS, (val, ~val), strict=True)
        }
        return {
            f"{part}.loss": _round_to_steps(torch.from_numpy(total), LOSS_STEP).to(rows.y.device)
            for part, total in by_part.items()
        }
    y = rows.y.double()
    lowest, highest = (
        y.new_zeros(rows.groups).scatter_reduce(0, rows.group, y, reduction, include_self=False)
        for reduction in ("amin", "amax")
    )
    span = highest - lowest
    error = (rows.logits[:, 0].double() - y).abs().minimum(span[rows.group])
    step_share = LOSS_STEP / MOST_LOSS
    kinds = {"": torch.ones_like(rows.val)}
    if rows.seen is not None:
        kinds |= {"seen.": rows.seen, "unseen.": ~rows.seen}
    sums: dict[str, Tensor] = {}
    for part, in_part in zip(PARTS, (rows.val, ~rows.val), strict=True):
        for kind, mask in kinds.items():
            selected = in_part & mask
            square = rows.sum_by_client(error[selected].square(), selected)
            sums[f"{part}.{kind}square"] = _round_to_steps(square, step_share * span.square())
        absolute = rows.sum_by_client(error[in_part], in_part)
        sums[f"{part}.absolute"] = _round_to_steps(absolute, step_share * span)
        sums[f"{part}.loss"] = sums[f"{part}.square"].clone()
    return sums


def _round_to_steps(sums: Tensor, step: Tensor | float) -> Tensor:
    """Return sums (C,) as multiples of a step; 0 where the step is 0."""
    steps = torch.as_tensor(step, dtype=sums.dtype, device=sums.device).expand_as(sums)
    return torch.where(steps > 0, (sums / steps).round() * steps, 0.0)


def _limit_part(arrays: dict[str, np.ndarray], part: str, labels: LabelForm, least: int) -> None:
    """Apply a least count to the fields of a part, in place, and add those of merged classes."""
    nodes = arrays[f"{part}.nodes"]
    names = merged_fields(labels)
    for name in names:
        field = arrays[f"{part}.{name}"]
        arrays[f"{part}.{MERGED}.{name}"] = np.zeros(len(nodes), field.dtype)
    _zero_part(arrays, part, nodes < least)
    if names:
        margins = _revealed_counts(arrays, part, labels)
        for client in np.nonzero(_is_below_least(margins, least).any(axis=(0, 2)))[0]:
            merged = _classes_to_merge(margins[:, client], least)
            if merged is None:
                _zero_part(arrays, part, np.arange(len(nodes)) == client)
                continue
            for name in names:
                field = arrays[f"{part}.{name}"]
                arrays[f"{part}.{MERGED}.{name}"][client] = field[client, merged].sum()
                field[client, merged] = 0
            if f"{part}.histogram" in arrays:
                arrays[f"{part}.histogram"][client, merged] = 0
    if f"{part}.histogram" in arrays:
        bins = arrays[f"{part}.histogram"].reshape(-1, arrays[f"{part}.histogram"].shape[-1])
        for row in np.nonzero(_is_below_least(bins, least).any(axis=1))[0]:
            bins[row] = merge_bins(bins[row], least)
    _limit_kinds(arrays, part, least)


def _limit_kinds(arrays: dict[str, np.ndarray], part: str, least: int) -> None:
    """Zero the fields of seen and unseen ratings where there are few of either."""
    fields = [(f"{part}.{kind}.nodes", f"{part}.{kind}.square") for kind in KINDS]
    if fields[0][0] in arrays:
        is_few = np.any([_is_below_least(arrays[nodes], least) for nodes, _ in fields], axis=0)
        for names in fields:
            for name in names:
                arrays[name][is_few] = 0


def _is_below_least(numbers: np.ndarray, least: int) -> np.ndarray:
    """Return which numbers of nodes are below the least count, but not 0."""
    is_few: np.ndarray = (numbers > 0) & (numbers < least)
    return is_few


def _zero_part(arrays: Mapping[str, np.ndarray], part: str, clients: np.ndarray) -> None:
    """Set all fields of a part to 0 for some clients (C,) bool."""
    if not clients.any():
        return
    for name, array in arrays.items():
        if name.startswith(f"{part}."):
            array[clients] = 0


def _revealed_counts(arrays: Mapping[str, np.ndarray], part: str, labels: LabelForm) -> np.ndarray:
    """Return the numbers of nodes that the counts of a class reveal, (M, C, K) int64."""
    num_known = arrays[f"{part}.known"].astype(np.int64)
    missing = arrays[f"{part}.nodes"].astype(np.int64)[:, None] - num_known
    if labels == "node_value":
        return np.stack([num_known, missing])
    tp, fp, fn = (arrays[f"{part}.{name}"].astype(np.int64) for name in ("tp", "fp", "fn"))
    num_true, num_predicted = tp + fn, tp + fp
    return np.stack(
        [num_true, num_known - num_true, num_predicted, num_known - num_predicted, missing]
    )


def _classes_to_merge(margins: np.ndarray, least: int) -> np.ndarray | None:
    """Return which classes (K,) bool of a client to merge; None if even all are too few.

    Args:
        margins: (M, K) numbers of nodes of each class.
        least: that each number, of a class and of all merged ones together, must have unless it
            is 0.
    """
    merged: np.ndarray = np.any(_is_below_least(margins, least), axis=0)
    for class_number in np.argsort(
        margins.min(axis=0, where=margins > 0, initial=2**62), kind="stable"
    ):
        if not _is_below_least(margins[:, merged].sum(axis=1), least).any():
            return merged
        merged[class_number] = True
    return None if _is_below_least(margins.sum(axis=1), least).any() else merged


def merge_bins(bins: np.ndarray, least: int) -> np.ndarray:
    """Return a histogram (B,) whose occupied bins hold `least` or more; of fewer in all, zeros.

    Bins join the next occupied ones until there are enough, and the remaining ones at the end join
    the last group. A group of several bins is at the middle one of the `PLACE` bins in which its
    middle score is: a score alone at an end does not move it, and none tells its bin.
    """
    merged = np.zeros_like(bins)
    occupied = np.nonzero(bins)[0]
    # As Python's own numbers: NumPy is slower with as few as there are in a group.
    places, ends = occupied.tolist(), bins[occupied].cumsum().tolist()
    whole = ends[-1] if ends else 0
    if whole < least:
        return merged
    first = start = 0  # of a group: its first place, and how many scores are before it
    while start < whole:
        last = bisect_left(ends, start + least, first)
        if whole - ends[last] < least:
            last = len(ends) - 1
        total = ends[last] - start
        middle = places[bisect_left(ends, start + (total + 1) // 2, first)]
        if last > first:
            middle = min(middle // PLACE * PLACE + PLACE // 2, len(bins) - 1)
        merged[middle] += total
        first, start = last + 1, ends[last]
    return merged


TOGETHER = 64  # groups of bins that are spread together: arrays stay in the cache


def spread_bins(bins: Tensor, least: int) -> Tensor:
    """Return the sum (K, 2, B) float64 of clients' histograms (C, K, 2, B), merged bins spread out.

    A count below twice the least one of the run may be a group of bins. It is spread evenly from
    half way to the occupied bin before to half way to the one after, and as far at the ends as on
    the other side. Without this the AUC would be too high, as middles of groups differ less than
    scores do.

    Args:
        bins: the histograms.
        least: the least count of the run; not that of the replies, which one client could choose.
    """
    table = bins.cpu().numpy()
    total = table.sum(axis=0).astype(np.float64)
    size = table.shape[-1]
    # 1. Occupied bins, by client and histogram, with the middles between them and their neighbors.
    histograms = table.reshape(-1, size)
    row, place = np.nonzero(histograms)
    between = np.where(row[1:] == row[:-1], (place[1:] + place[:-1]) / 2, np.nan)
    before, after = np.append(np.nan, between), np.append(between, np.nan)
    low = np.where(np.isnan(before), 2 * place - after, before)
    high = np.where(np.isnan(after), 2 * place - before, after)
    count = histograms[row, place]
    # 2. Those that may be groups. A bin alone in its histogram stays: nothing says how wide it is.
    is_spread = (count < 2 * least) & ~np.isnan(low)
    row, place, low, high, count = (a[is_spread] for a in (row, place, low, high, count))
    start = row % (total.size // size) * size  # of the sum of its histogram
    edges, sums = np.arange(size + 1) - 0.5, total.reshape(-1)
    for first in range(0, len(row), TOGETHER):
        part = slice(first, first + TOGETHER)
        offsets = (edges - low[part, None]) / (high - low)[part, None]
        shares = np.diff(np.clip(offsets, 0, 1, out=offsets))
        # Every group leaves its place before it is spread, one after the other in client order.
        changes = np.empty((len(shares), 1 + size))
        changes[:, 0] = -count[part]
        np.multiply(count[part, None], shares, out=changes[:, 1:])
        changes[:, 1:] /= shares.sum(axis=1, keepdims=True)
        at = np.flatnonzero(changes != 0)
        group, bin_number = np.divmod(at, 1 + size)
        target = np.where(bin_number == 0, place[part][group], bin_number - 1)
        np.add.at(sums, start[part][group] + target, changes.reshape(-1)[at])
    return torch.from_numpy(total).to(bins.device)


# --- What counts of predictions can be together, whoever has sent them ---------------------------
#
# C: clients. K: classes or label bits.


def count_problem(
    labels: LabelForm, counts: Mapping[str, Tensor], min_count: int = 0
) -> str | None:
    """Return why counts (C, ...) are impossible, as expected and received values, or None.

    Args:
        labels: what the nodes have.
        counts: of `Task.tally`, on the CPU; those of `val` or `test` may be missing.
        min_count: of the run, see `silograph.task.least_count`; 0 and 1 are no limit.
    """
    arrays = {name: t.numpy() for name, t in counts.items()}  # small: faster than as tensors
    for part in PARTS:
        if f"{part}.nodes" not in arrays:
            continue
        nodes = arrays[f"{part}.nodes"].astype(np.int64)
        num_seen, num_unseen = (arrays.get(f"{part}.{kind}.nodes") for kind in ("seen", "unseen"))
        if (
            num_seen is not None
            and num_unseen is not None
            and (num_seen.astype(np.int64) + num_unseen > nodes).any()
        ):
            return f"at most as many seen and unseen ratings as {part} ratings, got more"
        problem = _hit_problem(labels, part, nodes, arrays)
        problem = problem or _histogram_problem(part, arrays, min_count)
        if problem is not None:
            return problem
    return None


def _hit_problem(
    labels: LabelForm, part: str, nodes: np.ndarray, counts: Mapping[str, np.ndarray]
) -> str | None:
    """Return why hits and misses (C, K) of nodes (C,) are impossible, or None."""
    num_known = counts.get(f"{part}.known")
    if num_known is not None and (num_known > nodes[:, None]).any():
        return f"at most as many known labels as {part} nodes, got more"
    if any(f"{part}.{name}" not in counts for name in HITS):
        return None
    num_known, tp, fp, fn = _with_merged(counts, part)
    of_class, predicted = tp + fn, tp + fp
    if (of_class > num_known).any() or (predicted > num_known).any():
        return f"at most as many hits and misses as known labels of {part} nodes, got more"
    if labels != "multiclass":
        return None
    own_classes = num_known[:, :-1]
    all_known = (
        num_known.sum(1) == nodes * own_classes.shape[1]
    )  # merged classes have no nodes in their own place
    is_consistent = (of_class.sum(1) == nodes) & (predicted.sum(1) == nodes) & all_known
    if not is_consistent.all() or ((own_classes != nodes[:, None]) & (own_classes != 0)).any():
        return f"one label and one prediction of each of {nodes.tolist()} {part} nodes, got others"
    return None


def _with_merged(counts: Mapping[str, np.ndarray], part: str) -> np.ndarray:
    """Return the counts `HITS` by class and, last, of all merged classes, (4, C, K + 1) int64."""
    clients, classes = counts[f"{part}.{HITS[0]}"].shape
    hits = np.zeros((len(HITS), clients, classes + 1), np.int64)
    for number, name in enumerate(HITS):
        hits[number, :, :-1] = counts[f"{part}.{name}"]
        if (merged := counts.get(f"{part}.{MERGED}.{name}")) is not None:
            hits[number, :, -1] = merged
    return hits


def _histogram_problem(part: str, counts: Mapping[str, np.ndarray], min_count: int) -> str | None:
    """Return why a histogram (C, K, 2, B) contradicts the hits and misses, or None."""
    bins = counts.get(f"{part}.histogram")
    if bins is None:
        return None
    is_few = _is_below_least(bins, min_count)
    if is_few.any():
        return (
            f"{part} histogram bins of 0 or at least {min_count} nodes, got one of "
            f"{bins[is_few].min()}"
        )
    num_known, tp, fn = (
        counts[f"{part}.{name}"].astype(np.int64) for name in ("known", "tp", "fn")
    )
    by_truth = bins.sum(axis=3, dtype=np.int64)
    differs = (by_truth != np.stack([num_known - tp - fn, tp + fn], axis=2)).any(axis=2)
    if (differs & by_truth.any(axis=2)).any():  # a silo may send none
        return f"a histogram of as many {part} nodes by class as the hits and misses, got others"
    return None
