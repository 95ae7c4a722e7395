"""Weights and features of edges: they are not used, and whoever has some is told."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

LOG = logging.getLogger("silograph")
UNUSED = ("edge_weight", "edge_weights", "edge_attr", "weight")  # names that others use


def report_unused(source: object, found: Mapping[str, Any]) -> None:
    """Report values of edges that differ from edge to edge, in one line; others say nothing.

    Args:
        source: where they were found.
        found: (E,) or (E, ...) values of the edges, by name.
    """
    names = [name for name, values in found.items() if _differ(values)]
    if names:
        report_names(source, names)


def report_names(source: object, names: Iterable[str]) -> None:
    """Report in one line what is known of edges and is not used."""
    LOG.warning(
        "%s: %s of edges not used: every edge counts 1, weights and features of edges are not "
        "supported",
        source,
        ", ".join(names),
    )


def _differ(values: Any) -> bool:
    rows = np.asarray(values)
    return rows.ndim > 0 and len(rows) > 0 and bool((rows != rows[:1]).any())
