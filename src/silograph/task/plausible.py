"""What counts of predictions can be together, whoever has sent them.

C: clients. K: classes or label bits.
"""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from silograph.graph.graph import LabelForm
from silograph.task.counts import HITS
from silograph.task.least_count import MERGED
from silograph.task.scores import PARTS


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
