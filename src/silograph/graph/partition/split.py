"""Which nodes train, choose and judge.

The split is made once, on the nodes of the uncut graph: where clients overlap, all copies of a
node have the same role, so that no client's test node is another client's training node.

n: nodes of the graph.
"""

import math

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import ConfigError, DataError
from silograph.core.key import Key
from silograph.graph.graph import Graph, Split
from silograph.graph.node_key import key_order
from silograph.graph.partition.partition import Partition

TIMED = "time:"  # begins a split in the order of time
TOLERANCE = 1e-9  # decimal ratios such as .7 + .2 + .1 sum to a little more than 1


def make_split(
    graph: Graph,
    partition: Partition,
    *,
    ratios: tuple[float, float, float],
    key: Key,
    timed: bool = False,
) -> Split:
    """Split the labeled nodes of every client, in an order drawn from the nodes' public keys.

    A node belongs to its owner. Of m labeled nodes, the first round(train * m) train, those up
    to round((train + val) * m) validate, and those up to round(sum * m) test (halves round up);
    the rest have no role. A client may so end up without training nodes: it then has weight 0.

    Args:
        graph: the uncut graph.
        partition: its cut.
        ratios: shares of training, validation and test nodes; their sum may be below 1.
        key: the split is a function of it, of `graph.node_id` and of the cut.
        timed: whether nodes are taken in the order of the graph's column `time`, those of one time
            in the drawn order: the earliest ones train, the latest ones test.

    Returns:
        Masks (n,) bool.

    Raises:
        ConfigError: a ratio is negative, training's is 0, or they sum to more than 1.
        DataError: no client gets a training node, or times are not known.
    """
    split = draw_split(graph, partition, ratios=ratios, key=key, timed=timed)
    if not split.train.any():
        count = int((graph.labeled & (partition.owner >= 0)).sum())
        raise DataError(
            f"expected at least one training node, got 0 of {count} labeled ones over "
            f"{len(partition.ids)} clients: use fewer clients or a larger training ratio"
        )
    return split


def draw_split(
    graph: Graph,
    partition: Partition,
    *,
    ratios: tuple[float, float, float],
    key: Key,
    timed: bool = False,
) -> Split:
    """Return the split of `make_split`, which may have no training node."""
    _check_ratios(ratios)
    order = key_order(graph.node_id, key.fold("split"))
    if timed:
        order = order[torch.argsort(_times(graph)[order], stable=True)]
    eligible = (graph.labeled & (partition.owner >= 0))[order]
    nodes = order[eligible]
    owner = partition.owner[nodes]
    by_owner = torch.argsort(owner, stable=True)
    nodes, owner = nodes[by_owner], owner[by_owner]
    size = torch.bincount(owner, minlength=len(partition.ids))
    place = torch.arange(len(nodes)) - (size.cumsum(0) - size)[owner]

    # Halves round up; the tolerance keeps sums such as .6 + .3 from falling short of one.
    ends = [torch.floor(t * size.double() + 0.5 + TOLERANCE)[owner] for t in np.cumsum(ratios)]
    roles = [place < ends[0]]
    roles += [(place >= ends[i]) & (place < ends[i + 1]) for i in (0, 1)]
    return Split(*(_mask(nodes[role], graph.num_nodes) for role in roles))


def _times(graph: Graph) -> Tensor:
    """Return the time of every node, (n,) float64; raise `DataError` where none is known."""
    time = graph.columns.get("time")
    if time is None or bool(torch.isnan(time.double()[graph.labeled]).any()):
        raise DataError(
            f"expected a time for every labeled node of {graph.name!r} for a split in the order of "
            "time, got none: leave `time:` out"
        )
    return time.double()


def public_split(graph: Graph) -> Split:
    """Return the split that came with the data, labeled nodes only; masks (n,) bool.

    Raises:
        DataError: the graph has none.
    """
    if graph.split is None:
        raise DataError(
            f"expected a graph with a public split, got {graph.name!r} without one: "
            "give ratios instead, such as '0.2/0.4/0.4'"
        )
    known, split = graph.labeled, graph.split
    return split.map(lambda mask: mask & known)


def full_split(graph: Graph) -> Split:
    """Return the public split with all other labeled nodes for training, too; masks (n,) bool.

    Chen, Ma and Xiao, "FastGCN", ICLR 2018, section 4; PyG's `full` split of Planetoid's graphs.

    Raises:
        DataError: the graph has no public split.
    """
    public = public_split(graph)
    return Split(graph.labeled & ~public.val & ~public.test, public.val, public.test)


def choose_split(graph: Graph, partition: Partition, how: str, key: Key) -> Split:
    """Return the split that `how` names: `public`, `full`, or ratios such as `0.2/0.4/0.4`.

    Ratios behind `time:` are taken in the order of time; see `make_split`.

    Raises:
        ConfigError: `how` is neither, or the ratios are out of range.
        DataError: see `public_split` and `make_split`.
    """
    if how == "public":
        return public_split(graph)
    if how == "full":
        return full_split(graph)
    ratios, timed = parse_ratios(how.removeprefix(TIMED)), how.startswith(TIMED)
    return make_split(graph, partition, ratios=ratios, key=key, timed=timed)


def parse_ratios(text: str) -> tuple[float, float, float]:
    """Return the ratios of a text such as `0.2/0.4/0.4`.

    >>> parse_ratios("0.2/0.4/0.4")
    (0.2, 0.4, 0.4)

    Raises:
        ConfigError: the text is not three numbers.
    """
    try:
        train, val, test = (float(part) for part in text.split("/"))
    except ValueError:
        raise ConfigError(
            f"expected a split of 'public', 'full' or train/val/test such as '0.2/0.4/0.4', got "
            f"{text!r}"
        ) from None
    return train, val, test


def _check_ratios(ratios: tuple[float, float, float]) -> None:
    # A comparison with NaN is false: it fails the first test.
    if not all(ratio >= 0 for ratio in ratios) or ratios[0] == 0:
        raise ConfigError(f"expected a training ratio above 0 and none below, got {_text(ratios)}")
    if math.fsum(ratios) > 1 + TOLERANCE:
        raise ConfigError(
            f"expected ratios that sum to at most 1, got {_text(ratios)} = {math.fsum(ratios):g}"
        )


def _text(ratios: tuple[float, float, float]) -> str:
    return "/".join(f"{ratio:g}" for ratio in ratios)


def _mask(nodes: Tensor, num_nodes: int) -> Tensor:
    mask = torch.zeros(num_nodes, dtype=torch.bool)
    mask[nodes] = True
    return mask
