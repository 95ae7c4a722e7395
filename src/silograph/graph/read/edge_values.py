"""Weights and features of edges: they are not used, and whoever has some is told in one line."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

LOG = logging.getLogger("silograph")
UNUSED = ("edge_weight", "edge_weights", "edge_attr", "weight")  # names that others use


def differing(found: Mapping[str, Any]) -> list[str]:
    """Return the names of the values (E,) or (E, ...) that differ from edge to edge.

    >>> differing({"edge_weight": [1.0, 1.0], "edge_attr": [[0, 1], [0, 2]]})
    ['edge_attr']
    """
    return [name for name, values in found.items() if _differ(values)]


def report_unused(source: object, names: Iterable[str]) -> None:
    """Report what is known of edges and is not used; nothing where there are no names.

    Args:
        source: where it was found.
        names: of the values.
    """
    words = ", ".join(names)
    if words:
        LOG.warning(
            "%s: weights or features of edges (%s) are not used: every edge counts 1", source, words
        )


def _differ(values: Any) -> bool:
    rows = np.asarray(values)
    return rows.ndim > 0 and len(rows) > 0 and bool((rows != rows[:1]).any())
