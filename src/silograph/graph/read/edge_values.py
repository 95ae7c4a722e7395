"""Weights of edges, and what else is known of edges and not used, which is reported in one line."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import DataError
from silograph.core.text import counted
from silograph.graph.csr import CSR

LOG = logging.getLogger("silograph")
IN_RANGE = "from 0 to 3.4e38 (float32)"  # what weights are
WEIGHTS = ("edge_weight", "edge_weights", "weight")  # names that others use
# A single column of it is a weight, too, if all its numbers could be one and are floating point:
# whole numbers there are mostly kinds of edges.
FEATURES = "edge_attr"
NAMES = (*WEIGHTS, FEATURES)


def chosen_weight(found: Mapping[str, Any]) -> tuple[str | None, list[str]]:
    """Return the name of the weights (E,) among values of edges, and the names of the others.

    Others that are alike for all edges say nothing, and are not named.

    >>> chosen_weight({"edge_weight": [1.0, 2.0], "edge_attr": [[0, 1], [0, 2]]})
    ('edge_weight', ['edge_attr'])
    """
    given = {name: np.asarray(found[name]) for name in NAMES if name in found}
    able = [name for name, values in given.items() if name in WEIGHTS or _could_weigh(values)]
    chosen = able[0] if able else None
    return chosen, [name for name, v in given.items() if name != chosen and _differ(v)]


def report_unused(source: object, names: Iterable[str]) -> None:
    """Report what is known of edges and is not used; nothing where there are no names.

    Args:
        source: where it was found.
        names: of the values.
    """
    words = ", ".join(names)
    if words:
        LOG.warning("%s: values of edges (%s) are not used", source, words)


def checked_weights(values: Any, edges: int) -> np.ndarray:
    """Return weights of edges (E,) or (E, 1) as (E,) float64.

    Raises:
        DataError: they are not `edges` finite numbers >= 0; of another shape than (E,), other kinds
            of values, or too large for float32.
    """
    weight = np.asarray(values)
    if weight.ndim == 2 and weight.shape[1] == 1:
        weight = weight[:, 0]
    if weight.shape != (edges,) or (weight.dtype.kind not in "biuf" and edges):
        raise DataError(
            f"expected edge_weight of shape ({edges},), one number an edge, got {weight.shape} of "
            f"dtype {weight.dtype}"
        )
    weight = weight.astype(np.float64)
    wrong = np.flatnonzero(~usable(weight))
    if len(wrong):
        raise DataError(
            f"expected edge weights {IN_RANGE}, got {weight[wrong[0]]} at edge {wrong[0]} "
            f"({counted(len(wrong), 'such edge')}): drop these edges or change their weights"
        )
    return weight


def usable(weight: np.ndarray) -> np.ndarray:
    """Return which numbers can be weights: not negative, and finite in float32, too."""
    with np.errstate(invalid="ignore"):
        found: np.ndarray = (weight >= 0) & (weight <= np.finfo(np.float32).max)
    return found


def weights_of(adj: CSR, edges: np.ndarray, weight: np.ndarray, source: object) -> Tensor | None:
    """Return the weight of every stored edge, (nnz,) float64; None where all are 1.

    Edges have no direction, so one that is listed several times, as in both directions, has the
    mean of what is listed for it; where that differs, a line is logged.

    Args:
        adj: (n, n) the edges, both directions.
        edges: (2, E) as listed, perhaps with self loops, whose weights are lost as they are.
        weight: (E,) float64.
        source: where they were found.
    """
    low, high = edges.min(axis=0), edges.max(axis=0)
    kept = low < high
    pair, weight = (low * adj.num_rows + high)[kept], weight[kept]
    order = np.lexsort((weight, pair))  # by weight, too, so that no order of listing matters
    pair, weight = pair[order], weight[order]
    if (weight == 1).all():
        return None
    first = np.flatnonzero(np.diff(pair, prepend=-1))
    last = np.append(first[1:], len(pair)) - 1
    mean = np.add.reduceat(weight, first) / (last - first + 1)
    differs = weight[first] != weight[last]
    if differs.any():
        LOG.warning(
            "%s: %s listed with several weights, as in both directions: the mean counts",
            source,
            counted(int(differs.sum()), "edge"),
        )
    mean = np.where(differs, mean, weight[first])
    row, column = adj.row.numpy(), adj.indices.long().numpy()
    place = np.minimum(row, column) * adj.num_rows + np.maximum(row, column)
    return torch.from_numpy(mean[np.searchsorted(pair[first], place)])


def _could_weigh(values: np.ndarray) -> bool:
    """Whether values are one floating point number an edge, each of which could be a weight."""
    single = values.ndim == 1 or (values.ndim == 2 and values.shape[1] == 1)
    return single and values.dtype.kind == "f" and bool(usable(values).all())


def _differ(rows: np.ndarray) -> bool:
    return rows.ndim > 0 and len(rows) > 0 and bool((rows != rows[:1]).any())
