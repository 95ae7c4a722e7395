"""What counts of predictions can be together, whoever has sent them.

C: clients. K: classes or label bits.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from silograph.graph.graph import LabelForm
from silograph.task.counts import CLIP, HITS, SCORE_SUMS
from silograph.task.scores import PARTS

ROUNDING = 1e-9  # share by which a sum of clipped scores may be beyond its bound


def count_problem(labels: LabelForm, counts: Mapping[str, Tensor]) -> str | None:
    """Return what was expected of counts (C, ...) and what came, None for counts that can be.

    Args:
        labels: what the nodes have.
        counts: of `Task.tally`; those of `val` or `test` may be missing.
    """
    for part in PARTS:
        nodes = counts.get(f"{part}.nodes")
        if nodes is None:
            continue
        seen, unseen = (counts.get(f"{part}.{kind}.nodes") for kind in ("seen", "unseen"))
        if seen is not None and unseen is not None and bool((seen.long() + unseen > nodes).any()):
            return f"at most as many seen and unseen ratings as {part} ratings, got more"
        problem = _hit_problem(labels, part, nodes.long(), counts)
        if problem is not None:
            return problem
    return _score_problem(counts)


def _hit_problem(
    labels: LabelForm, part: str, nodes: Tensor, counts: Mapping[str, Tensor]
) -> str | None:
    """Return what hits and misses (C, K) of nodes (C,) cannot be, or None."""
    known = counts.get(f"{part}.known")
    if known is not None and bool((known > nodes[:, None]).any()):
        return f"at most as many known labels as {part} nodes, got more"
    if any(f"{part}.{name}" not in counts for name in HITS):
        return None
    known, tp, fp, fn = torch.stack([counts[f"{part}.{name}"] for name in HITS]).long()
    of_class, predicted = tp + fn, tp + fp
    if bool(((of_class > known) | (predicted > known)).any()):
        return f"at most as many hits and misses as known labels of {part} nodes, got more"
    once = torch.stack([of_class.sum(1), predicted.sum(1), known.min(1).values])
    if labels == "multiclass" and bool((once != nodes).any()):
        return f"one label and one prediction of each of {nodes.tolist()} {part} nodes, got others"
    return None


def _score_problem(counts: Mapping[str, Tensor]) -> str | None:
    """Return what sums of clipped scores (C, K) cannot be, or None."""
    if SCORE_SUMS[0] not in counts:
        return None
    total, square = (counts[name] for name in SCORE_SUMS)
    known = counts["test.known"].double() * (1 + ROUNDING)
    if bool((total.abs() > CLIP * known).any()) or bool((square > (2 * CLIP) ** 2 * known).any()):
        return f"scores within {CLIP:g} of 0 for each known label, got sums of others"
    return None
