"""What leaves a client of its counts where few nodes are behind them.

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
- **Ratings.** The seen and the unseen ones are told apart where there are 0, or m or more, of both.
- **Rankings.** A client with fewer than m ranked users sends zeros.

So every number of nodes above is 0 or at least m in what leaves. Hits and misses of a class,
`tp`, `fp` and `fn`, are parts of such numbers and may be any. Nothing here hides a node from a
server that asks twice and takes the difference; see `docs/attacks.md`.

Sums of losses and of errors of ratings are over at least m nodes. An exact sum would tell a label
of each node to a server whose weights give every node a loss of its own size. So each loss is at
most `MOST_LOSS`, and the sum is a multiple of `LOSS_STEP` (`limited_sums`); an error of a rating is
at most the span of the client's ratings, in steps of the same share. Then a sum tells about four
labels at most, and the mean of n losses is within 1 / (2 n) of that of the limited losses.

C: clients. K: classes, label bits or targets. B: bins.
"""

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
    """Return what `counts_to_send` gives of one client, by name; without rankings."""
    specs = dict(task.counts(outputs, val_histogram=rules.val_histogram))
    if rules.merges:
        for part in PARTS:
            for name in merged_fields(task.labels):
                one = specs[f"{part}.{name}"]
                specs[f"{part}.{MERGED}.{name}"] = CountSpec((), one.dtype, one.low, one.high)
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
                _clear(arrays, part, arrays[f"{part}.{RANKED}"] < rules.min_count)
    for name, array in arrays.items():
        if rules.level == "none" or (rules.level == "counts" and name.endswith(".histogram")):
            array[...] = 0
    device = next(iter(counts.values())).device if counts else None
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def limited_sums(rows: JudgedRows) -> dict[str, Tensor]:
    """Return the sums of losses and errors (C,) float64 that clients send with a least count.

    They take the place of the exact ones of `Task.tally`. Of numbers to predict at nodes there are
    none: such graphs are not trained at real silos.
    """
    if rows.task == "node_value":
        return {}
    if rows.task != "rating":
        loss = node_loss(rows.logits, rows.y, rows.task).double().clamp(max=MOST_LOSS)
        return {
            f"{part}.loss": _rounded(rows.summed(loss[chosen], chosen), LOSS_STEP)
            for part, chosen in zip(PARTS, (rows.val, ~rows.val), strict=True)
        }
    y = rows.y.double()
    least, most = (
        y.new_zeros(rows.groups).scatter_reduce(0, rows.group, y, how, include_self=False)
        for how in ("amin", "amax")
    )
    span = most - least
    error = (rows.logits[:, 0].double() - y).abs().minimum(span[rows.group])
    share = LOSS_STEP / MOST_LOSS
    kinds = {"": torch.ones_like(rows.val)}
    if rows.seen is not None:
        kinds |= {"seen.": rows.seen, "unseen.": ~rows.seen}
    sums: dict[str, Tensor] = {}
    for part, chosen in zip(PARTS, (rows.val, ~rows.val), strict=True):
        for kind, mask in kinds.items():
            which = chosen & mask
            square = rows.summed(error[which].square(), which)
            sums[f"{part}.{kind}square"] = _rounded(square, share * span.square())
        absolute = rows.summed(error[chosen], chosen)
        sums[f"{part}.absolute"] = _rounded(absolute, share * span)
        sums[f"{part}.loss"] = sums[f"{part}.square"].clone()
    return sums


def _rounded(sums: Tensor, step: Tensor | float) -> Tensor:
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
    _clear(arrays, part, nodes < least)
    if names:
        margins = _margins(arrays, part, labels)
        for client in np.nonzero(_too_few(margins, least).any(axis=(0, 2)))[0]:
            merged = _merged_classes(margins[:, client], least)
            if merged is None:
                _clear(arrays, part, np.arange(len(nodes)) == client)
                continue
            for name in names:
                field = arrays[f"{part}.{name}"]
                arrays[f"{part}.{MERGED}.{name}"][client] = field[client, merged].sum()
                field[client, merged] = 0
            if f"{part}.histogram" in arrays:
                arrays[f"{part}.histogram"][client, merged] = 0
    if f"{part}.histogram" in arrays:
        bins = arrays[f"{part}.histogram"].reshape(-1, arrays[f"{part}.histogram"].shape[-1])
        for row in np.nonzero(_too_few(bins, least).any(axis=1))[0]:
            bins[row] = merge_bins(bins[row], least)
    _limit_kinds(arrays, part, least)


def _limit_kinds(arrays: dict[str, np.ndarray], part: str, least: int) -> None:
    """Clear what tells seen and unseen ratings apart where there are few of either."""
    fields = [(f"{part}.{kind}.nodes", f"{part}.{kind}.square") for kind in KINDS]
    if fields[0][0] in arrays:
        few = np.any([_too_few(arrays[nodes], least) for nodes, _ in fields], axis=0)
        for names in fields:
            for name in names:
                arrays[name][few] = 0


def _too_few(numbers: np.ndarray, least: int) -> np.ndarray:
    """Return which numbers of nodes are neither 0 nor enough."""
    few: np.ndarray = (numbers > 0) & (numbers < least)
    return few


def _clear(arrays: Mapping[str, np.ndarray], part: str, clients: np.ndarray) -> None:
    """Set all fields of a part to 0 for some clients (C,) bool."""
    for name, array in arrays.items():
        if name.startswith(f"{part}."):
            array[clients] = 0


def _margins(arrays: Mapping[str, np.ndarray], part: str, labels: LabelForm) -> np.ndarray:
    """Return the numbers of nodes that a class tells, (M, C, K) int64."""
    known = arrays[f"{part}.known"].astype(np.int64)
    missing = arrays[f"{part}.nodes"].astype(np.int64)[:, None] - known
    if labels == "node_value":
        return np.stack([known, missing])
    tp, fp, fn = (arrays[f"{part}.{name}"].astype(np.int64) for name in ("tp", "fp", "fn"))
    true, predicted = tp + fn, tp + fp
    return np.stack([true, known - true, predicted, known - predicted, missing])


def _merged_classes(margins: np.ndarray, least: int) -> np.ndarray | None:
    """Return which classes (K,) bool of a client are merged; None where not even all suffice.

    Args:
        margins: (M, K) numbers of nodes of each class.
        least: that each number, of a class and of all merged ones together, must have unless it
            is 0.
    """
    merged: np.ndarray = np.any(_too_few(margins, least), axis=0)
    for place in np.argsort(margins.min(axis=0, where=margins > 0, initial=2**62), kind="stable"):
        if not _too_few(margins[:, merged].sum(axis=1), least).any():
            return merged
        merged[place] = True
    return None if _too_few(margins.sum(axis=1), least).any() else merged


def merge_bins(bins: np.ndarray, least: int) -> np.ndarray:
    """Return a histogram (B,) whose occupied bins hold `least` or more; of fewer in all, zeros.

    Bins join the next occupied ones until there are enough, and what is left over at the end joins
    the last group. A group of several bins is at the middle one of the `PLACE` bins in which its
    middle score is: a score alone at an end does not move it, and none tells its bin.
    """
    new, left = np.zeros_like(bins), int(bins.sum())
    group: list[int] = []
    if left < least:
        return new
    for place in np.nonzero(bins)[0].tolist():
        group.append(place)
        total = int(bins[group].sum())
        if total >= least and (left - total == 0 or left - total >= least):
            middle = group[int(np.searchsorted(bins[group].cumsum(), (total + 1) // 2))]
            if len(group) > 1:
                middle = min(middle // PLACE * PLACE + PLACE // 2, len(bins) - 1)
            new[middle] += total
            left -= total
            group = []
    return new


def spread_bins(bins: Tensor, least: int) -> Tensor:
    """Return the sum (K, 2, B) float64 of clients' histograms (C, K, 2, B), merged bins spread out.

    A count below twice the least one of the run may be a group of bins. It is spread evenly from
    half way to the occupied bin before to half way to the one after, and as far at the ends as on
    the other side. Without this the AUC would be too high, as middles of groups differ less than
    scores do.

    Args:
        bins: the histograms.
        least: the least count of the run; not that of what came, which one client could choose.
    """
    table = bins.cpu().numpy()
    total = table.sum(axis=0).astype(np.float64)
    size = table.shape[-1]
    edges = np.arange(size + 1) - 0.5
    for client, k, truth in zip(*np.nonzero((table > 0).sum(axis=-1) > 1), strict=True):
        row = table[client, k, truth]
        at = np.nonzero(row)[0].astype(np.float64)
        between = (at[1:] + at[:-1]) / 2
        first = np.concatenate([[2 * at[0] - between[0]], between])
        last = np.concatenate([between, [2 * at[-1] - between[-1]]])
        for place, low, high in zip(at.astype(np.int64), first, last, strict=True):
            if row[place] >= 2 * least:
                continue
            share = np.diff(np.clip((edges - low) / (high - low), 0, 1))
            total[k, truth, place] -= row[place]
            total[k, truth] += row[place] * share / share.sum()
    return torch.from_numpy(total).to(bins.device)


# --- What counts of predictions can be together, whoever has sent them ---------------------------
#
# C: clients. K: classes or label bits.


def count_problem(
    labels: LabelForm, counts: Mapping[str, Tensor], min_count: int = 0
) -> str | None:
    """Return what was expected of counts (C, ...) and what came, None for counts that can be.

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
        seen, unseen = (arrays.get(f"{part}.{kind}.nodes") for kind in ("seen", "unseen"))
        if (
            seen is not None
            and unseen is not None
            and (seen.astype(np.int64) + unseen > nodes).any()
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
    """Return what hits and misses (C, K) of nodes (C,) cannot be, or None."""
    known = counts.get(f"{part}.known")
    if known is not None and (known > nodes[:, None]).any():
        return f"at most as many known labels as {part} nodes, got more"
    if any(f"{part}.{name}" not in counts for name in HITS):
        return None
    known, tp, fp, fn = (_with_merged(counts, part, name) for name in HITS)
    of_class, predicted = tp + fn, tp + fp
    if (of_class > known).any() or (predicted > known).any():
        return f"at most as many hits and misses as known labels of {part} nodes, got more"
    if labels != "multiclass":
        return None
    own = known[:, :-1]
    every = known.sum(1) == nodes * own.shape[1]  # merged classes have no nodes in their own place
    once = (of_class.sum(1) == nodes) & (predicted.sum(1) == nodes) & every
    if not once.all() or ((own != nodes[:, None]) & (own != 0)).any():
        return f"one label and one prediction of each of {nodes.tolist()} {part} nodes, got others"
    return None


def _with_merged(counts: Mapping[str, np.ndarray], part: str, name: str) -> np.ndarray:
    """Return counts (C, K + 1) int64 by class, and of all merged classes together."""
    by_class = counts[f"{part}.{name}"].astype(np.int64)
    merged = counts.get(f"{part}.{MERGED}.{name}", np.zeros(len(by_class), np.int64))
    return np.concatenate([by_class, merged[:, None].astype(np.int64)], axis=1)


def _histogram_problem(part: str, counts: Mapping[str, np.ndarray], min_count: int) -> str | None:
    """Return what a histogram (C, K, 2, B) cannot be beside the hits and misses, or None."""
    bins = counts.get(f"{part}.histogram")
    if bins is None:
        return None
    few = bins[(bins > 0) & (bins < min_count)]
    if few.size:
        return f"{part} histogram bins of 0 or at least {min_count} nodes, got one of {few.min()}"
    known, tp, fn = (counts[f"{part}.{name}"].astype(np.int64) for name in ("known", "tp", "fn"))
    by_truth = bins.sum(axis=3, dtype=np.int64)
    differs = (by_truth != np.stack([known - tp - fn, tp + fn], axis=2)).any(axis=2)
    if (differs & by_truth.any(axis=2)).any():  # a silo may send none
        return f"a histogram of as many {part} nodes by class as the hits and misses, got others"
    return None
