"""Which nodes train, choose and judge.

The split is made once, on the nodes of the uncut graph: where clients overlap, all copies of a
node have the same role, so that no client's test node is another client's training node. Only in a
split `by-client:` every client draws the roles of its own copies, as in Chen et al., "FedGraph",
IEEE TPDS 2022; `silograph.graph.heterogeneity` counts what leaks.

n: nodes of the graph. k: copies of them that clients hold.
"""

import itertools
import math
import re

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import ConfigError, DataError, mistake
from silograph.core.key import Key
from silograph.core.text import count_of
from silograph.graph.graph import Graph, Split, drawn_order, key_order
from silograph.graph.partition.partition import Partition, row_keys_of

TIMED = "time:"  # begins a split in the order of time
TIME = "time"  # the column that it goes by, unless it names one
BY_CLIENT = "by-client:"  # begins a split that every client draws for its own copies
TOLERANCE = 1e-9  # decimal ratios such as .7 + .2 + .1 sum to a little more than 1


def _trainable(graph: Graph, partition: Partition, split: Split) -> Split:
    """Return a split; raise `DataError` where no client gets a training node."""
    if not split.train.any():
        count = int((graph.labeled & (partition.owner >= 0)).sum())
        raise DataError(
            f"expected at least one training node, got 0 of {count} labeled ones over "
            f"{len(partition.ids)} clients: use fewer clients or a larger training ratio",
            **mistake("no-training-nodes"),
        )
    return split


def draw_split(
    graph: Graph,
    partition: Partition,
    *,
    ratios: tuple[float, float, float],
    key: Key,
    time: str | None = None,
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
        time: column of the graph in whose order nodes are taken, those of one time in the drawn
            order: the earliest ones train, the latest ones test.

    Returns:
        Masks (n,) bool.

    Raises:
        ConfigError: a ratio is negative, training's is 0, or they sum to more than 1.
        DataError: times are not known.
    """
    _check_ratios(ratios)
    nodes, owner, size, place = _ranked(graph, partition, key, time)
    return _shares(nodes, owner, size, place, ratios, graph.num_nodes)


def copies_split(graph: Graph, partition: Partition, how: str, key: Key) -> Split | None:
    """Return the role of each copy where every client splits its own nodes (`by-client:`).

    The order is drawn from client and node together, so that a client's split is a function of
    what it holds itself.

    Returns:
        Masks (k,) bool over `partition.copies`, or None for a split that is made once.

    Raises:
        ConfigError: see `parse_ratios` and `draw_split`.
    """
    if not how.startswith(BY_CLIENT):
        return None
    ratios = parse_ratios(how.removeprefix(BY_CLIENT))
    _check_ratios(ratios)
    order = drawn_order(row_keys_of(graph, partition), key.fold("split by client"))
    eligible = graph.labeled[partition.copies][order]
    ranked = _by_owner(order[eligible], partition.client_of_node, len(partition.ids))
    return _shares(*ranked, ratios, len(order))


def owners_split(partition: Partition, copies: Split) -> Split:
    """Return the roles that the nodes' owners gave their copies, masks (n,) bool."""
    own = partition.owner[partition.copies] == partition.client_of_node
    return copies.map(lambda mask: _mask(partition.copies[own & mask], partition.num_nodes))


def _shares(
    nodes: Tensor,
    owner: Tensor,
    size: Tensor,
    place: Tensor,
    ratios: tuple[float, float, float],
    total: int,
) -> Split:
    """Return the split of ranked nodes by shares of their owner's, masks (total,) bool."""
    # Halves round up; the tolerance keeps sums such as .6 + .3 from falling short of one.
    ends = [torch.floor(t * size.double() + 0.5 + TOLERANCE)[owner] for t in np.cumsum(ratios)]
    roles = [place < ends[0]]
    roles += [(place >= ends[i]) & (place < ends[i + 1]) for i in (0, 1)]
    return Split(*(_mask(nodes[role], total) for role in roles))


def fold_split(graph: Graph, partition: Partition, *, fold: int, folds: int, key: Key) -> Split:
    """Return a split of cross validation, which may have no training node; masks (n,) bool.

    Each client's labeled nodes, in the order of `draw_split`, are `folds` runs of almost equal
    length. Of run number `fold`, from 1, the first half validates and the second one tests; all
    others train. So every node is outside of training in exactly one fold.
    """
    nodes, owner, size, place = _ranked(graph, partition, key)
    ends = [
        torch.floor(at / folds * size.double() + 0.5 + TOLERANCE)[owner]
        for at in (fold - 1, fold - 0.5, fold)
    ]
    val, test = ((place >= a) & (place < b) for a, b in itertools.pairwise(ends))
    roles = ~val & ~test, val, test
    return Split(*(_mask(nodes[role], graph.num_nodes) for role in roles))


def drawn_split(graph: Graph, partition: Partition, how: str, key: Key) -> Split:
    """Return the split of ratios or a fold, see `choose_split`, which may have no training node."""
    copies = copies_split(graph, partition, how, key)
    if copies is not None:
        return owners_split(partition, copies)
    fold = parse_fold(how)
    if fold is None:
        time = (time_column(how) or TIME) if how.startswith(TIMED) else None
        ratios = parse_ratios(shares_of(how))
        return draw_split(graph, partition, ratios=ratios, key=key, time=time)
    return fold_split(graph, partition, fold=fold[0], folds=fold[1], key=key)


def _ranked(
    graph: Graph, partition: Partition, key: Key, time: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the labeled nodes by owner in the order drawn, owners, their counts, and places."""
    order = key_order(graph.node_id, key.fold("split"))
    if time is not None:
        order = order[torch.argsort(_times(graph, time)[order], stable=True)]
    eligible = (graph.labeled & (partition.owner >= 0))[order]
    return _by_owner(order[eligible], partition.owner, len(partition.ids))


def _by_owner(nodes: Tensor, owners: Tensor, clients: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return nodes by owner, each owner's in the order given; owners, their counts, and places."""
    owner = owners[nodes]
    by_owner = torch.argsort(owner, stable=True)
    nodes, owner = nodes[by_owner], owner[by_owner]
    size = torch.bincount(owner, minlength=clients)
    place = torch.arange(len(nodes)) - (size.cumsum(0) - size)[owner]
    return nodes, owner, size, place


def _times(graph: Graph, column: str) -> Tensor:
    """Return the time of every node, (n,) float64.

    Raises:
        DataError: there is no such column, or the time of a labeled node is missing.
    """
    time = graph.columns.get(column)
    if time is None and graph.task == "rating":
        raise DataError(
            f"split: expected a time for every rating of {graph.name!r} for a split in the order "
            "of time, got none: give their times, a column time of the table, use time:SHARES, or "
            "leave `time:` out"
        )
    if time is None:
        raise DataError(
            f"split: expected a column {column!r} with times of the nodes of {graph.name!r}, got "
            "none: name it, as in time:COLUMN:0.6/0.2/0.2, or read it by sg.load(..., "
            f"time={column!r}), or leave `time:` out",
            **mistake("missing-column", None, column),
        )
    num_missing = int(torch.isnan(time.double()[graph.labeled]).sum())
    if num_missing:
        raise DataError(
            f"split: expected a time in column {column!r} for every labeled node of "
            f"{graph.name!r}, got {count_of(num_missing, 'node')} without: fill it in, or take "
            "their labels out"
        )
    return time.double()


def public_split(graph: Graph) -> Split:
    """Return the split that came with the data, labeled nodes only; masks (n,) bool.

    Raises:
        DataError: the graph has none.
    """
    if graph.split is None:
        raise DataError(
            f"split: expected a graph with a public split, got {graph.name!r} without one: "
            "give ratios instead, such as '0.2/0.4/0.4'"
        )
    is_labeled, split = graph.labeled, graph.split
    return split.map(lambda mask: mask & is_labeled)


def full_split(graph: Graph) -> Split:
    """Return the public split with all other labeled nodes for training, too; masks (n,) bool.

    Chen, Ma and Xiao, "FastGCN", ICLR 2018, section 4; PyG's `full` split of Planetoid's graphs.

    Raises:
        DataError: the graph has no public split.
    """
    public = public_split(graph)
    return Split(graph.labeled & ~public.val & ~public.test, public.val, public.test)


def choose_split(graph: Graph, partition: Partition, how: str, key: Key) -> Split:
    """Return the split that `how` names.

    `public`, `full`, ratios such as `0.2/0.4/0.4`, or a fold of cross validation: `fold=1/5`.

    Ratios behind `time:` or `time:COLUMN:` are taken in the order of time; see `draw_split`. Ratios
    behind `by-client:` are taken by every client of its own copies: then these are the owners'
    roles, and `copies_split` has all of them.

    Raises:
        ConfigError: `how` is neither, or the ratios are out of range.
        DataError: no client gets a training node; or see `public_split` and `draw_split`.
    """
    if how == "public":
        return public_split(graph)
    if how == "full":
        return full_split(graph)
    return _trainable(graph, partition, drawn_split(graph, partition, how, key))


def time_column(how: str) -> str | None:
    """Return the column of times that a split names, as `time:COLUMN:SHARES` does; else None.

    >>> time_column("time:opened:0.6/0.2/0.2"), time_column("time:0.6/0.2/0.2")
    ('opened', None)
    """
    column, colon, _ = how.removeprefix(TIMED).rpartition(":")
    return column if how.startswith(TIMED) and colon else None


def parse_fold(text: str) -> tuple[int, int] | None:
    """Return the number of a fold and of folds of a text such as `fold=1/5`; None of another.

    >>> parse_fold("fold=2/5"), parse_fold("0.2/0.4/0.4")
    ((2, 5), None)

    Raises:
        ConfigError: the text begins so and names no fold.
    """
    if not text.startswith("fold="):
        return None
    match = re.fullmatch(r"fold=(\d{1,4})/(\d{1,4})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]) or int(match[2]) < 2:
        raise ConfigError(
            f"split: expected a fold from fold=1/K to fold=K/K, K folds of 2 or more, got {text!r}",
            **mistake("option-value", "split", text),
        )
    return int(match[1]), int(match[2])


def shares_of(how: str) -> str:
    """Return the shares of a split, without what says whose or in which order."""
    return how.rpartition(":")[2] if how.startswith(TIMED) else how


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
            "split: expected 'public', 'full' or train/val/test such as '0.2/0.4/0.4' (after "
            f"'time:', 'time:COLUMN:' or 'by-client:' if you like), or fold=I/K, got {text!r}",
            **mistake("option-value", "split", text),
        ) from None
    return train, val, test


def _check_ratios(ratios: tuple[float, float, float]) -> None:
    # A comparison with NaN is false: it fails the first test.
    if not all(ratio >= 0 for ratio in ratios) or ratios[0] == 0:
        raise ConfigError(
            f"split: expected a training ratio above 0 and none below, got {_text(ratios)}",
            **mistake("option-value", "split", _text(ratios)),
        )
    if math.fsum(ratios) > 1 + TOLERANCE:
        raise ConfigError(
            f"split: expected ratios that sum to at most 1, such as 0.2/0.4/0.4, got "
            f"{_text(ratios)} = {math.fsum(ratios):g}",
            **mistake("option-value", "split", _text(ratios)),
        )


def _text(ratios: tuple[float, float, float]) -> str:
    return "/".join(f"{ratio:g}" for ratio in ratios)


def _mask(nodes: Tensor, num_nodes: int) -> Tensor:
    mask = torch.zeros(num_nodes, dtype=torch.bool)
    mask[nodes] = True
    return mask
