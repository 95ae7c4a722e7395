"""What a server looks at when its silos have joined: their versions, the order of names."""

import json
import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from silograph.core.errors import ConfigError
from silograph.core.text import counted
from silograph.deploy.start_messages import read_versions
from silograph.experiment.run.setup import versions
from silograph.experiment.run.snapshot import NUMERIC
from silograph.federation.field_specs import (
    EDGES,
    MOST_EDGES,
    MOST_NODES,
    ROWS,
    TEST,
    TRAIN,
    VAL,
)
from silograph.federation.session.peer import one_line

if TYPE_CHECKING:
    from silograph.federation.session.hub import Joined

LOG = logging.getLogger("silograph")


def check_versions(silo: "Joined") -> None:
    """Raise `ConfigError` unless a silo has the server's silograph; warn of other differences."""
    theirs, ours = read_versions(silo.name, silo.facts), versions()
    if theirs.get("silograph") != ours["silograph"]:
        raise ConfigError(
            f"expected silograph {ours['silograph']} at {silo.name}, as at the server, got "
            f"{theirs.get('silograph')}: install the same version"
        )
    for name in NUMERIC:
        if theirs.get(name) != ours.get(name):
            LOG.warning(
                "%s has %s %s, the server %s: numbers may differ in the last bits",
                silo.name,
                name,
                theirs.get(name),
                ours.get(name),
            )


def read_nodes(
    body: bytes | memoryview, known: Mapping[str, int] | None, what: str = "nodes"
) -> dict[str, int]:
    """Return how many nodes a silo says that it has, by TRAIN, VAL, TEST, ROWS and EDGES.

    Args:
        body: of its answer to START.
        known: what it has said before, if it has.
        what: what is judged: nodes or ratings.

    Raises:
        ConfigError: it says none, or others than before.
    """
    try:
        told = json.loads(bytes(body))["nodes"]
        found = {name: told[name] for name in (TRAIN, VAL, TEST, ROWS, EDGES)}
    except (ValueError, KeyError, TypeError, RecursionError):
        found = {}
    most = {EDGES: MOST_EDGES}
    good = all(type(n) is int and 0 <= n <= most.get(k, MOST_NODES) for k, n in found.items())
    if not found or not good:
        raise ConfigError(
            f"expected numbers of training, validation and test {what} and of rows up to "
            f"{MOST_NODES:,}, and of edges, got {one_line(bytes(body[:200]))}"
        )
    if known is not None and found != known:
        raise ConfigError(
            f"expected {shown_nodes(known, what)} as at first, got {shown_nodes(found, what)}"
        )
    return found


def shown_nodes(nodes: Mapping[str, int], what: str = "nodes") -> str:
    """Return numbers of nodes for people, or of what else is judged.

    >>> shown_nodes({"train": 1000, "val": 20, "test": 30, "rows": 1200, "edges": 9})
    '1,000 training, 20 validation and 30 test nodes (1,200 rows and 9 edges with its halo)'
    """
    train, val, test = (f"{nodes[n]:,}" for n in (TRAIN, VAL, TEST))
    of_all = f"({counted(nodes[ROWS], 'row')} and {counted(nodes[EDGES], 'edge')} with its halo)"
    return f"{train} training, {val} validation and {test} test {what} {of_all}"


def natural(name: str) -> list[tuple[int, str]]:
    """Return what names are sorted by: numbers in them by their value.

    >>> sorted(["silo_10", "silo_9"], key=natural)
    ['silo_9', 'silo_10']
    """
    parts = re.findall(r"\d+|\D+", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
