"""What predicts ratings without any training: scores that every other score is read beside.

Biases are those of `silograph.nn.rating_biases` with its default damping. The experiment works them
out, as it knows all ratings; silos of their own tell theirs to nobody.

p: ratings. R: ratings that train.
"""

import torch
from torch import Tensor

from silograph.evaluation.evaluate import counts_of
from silograph.experiment.run.setup import Setup
from silograph.graph.rating_pairs import pairs_among
from silograph.nn.model_options import RatingBiasesOptions
from silograph.nn.rating_biases import solved_biases
from silograph.task.counts import JudgedRows
from silograph.task.registry import task_of
from silograph.task.scores import Scores

TURNS = 60  # of biases: what is left to solve is far below the noise


def untrained_scores(setup: Setup) -> dict[str, Scores]:
    """Return test scores by name: silo mean, silo biases (in each silo) and all biases (of all).

    Nothing for other tasks, where silos hold the data, and without test ratings.
    """
    if setup.schema.task != "rating" or setup.simulated is None:
        return {}
    graph, split = setup.cut.graph, setup.cut.split
    assert isinstance(graph.x, Tensor)  # a rating graph says what its nodes are
    pairs, owner = pairs_among(graph.x, graph.adj), setup.cut.partition.owner
    held = owner[pairs.row] >= 0
    row, user, item = (t[held] for t in (pairs.row, pairs.user, pairs.item))
    value, silo, train = graph.y[row].double(), owner[row], split.train[row]
    test = split.test[row]
    if not bool(test.any()) or not bool(train.any()):
        return {}
    size, clients = graph.num_nodes, len(setup.cut.partition.ids)
    one = torch.zeros_like(silo)
    found = {}
    for name, group, damping in (
        ("silo mean", silo, None),
        ("silo biases", silo, RatingBiasesOptions().damping),
        ("all biases", one, RatingBiasesOptions().damping),
    ):
        ends = torch.stack([group * size + user, group * size + item])
        said, seen = _predicted(value, group, ends, train, damping)
        rows = JudgedRows(
            said[test][:, None],
            graph.y[row[test]],
            torch.zeros_like(row[test], dtype=torch.bool),
            silo[test],
            clients,
            "rating",
            seen=seen[test],
        )
        scores = task_of("rating").scores(counts_of(rows), "test")
        assert scores is not None  # there are test ratings
        found[name] = scores
    return found


def _predicted(
    value: Tensor, group: Tensor, ends: Tensor, train: Tensor, damping: float | None
) -> tuple[Tensor, Tensor]:
    """Return predictions (p,) float64, and which user and item train in the group, (p,) bool.

    Args:
        value: (p,) float64 ratings.
        group: (p,) int64 whose mean and biases a rating is predicted by.
        ends: (2, p) int64 user and item, each apart in every group.
        train: (p,) bool.
        damping: of biases; None: means alone.
    """
    names, place = torch.unique(ends, return_inverse=True)
    number = torch.bincount(group[train], minlength=int(group.max()) + 1)
    total = torch.zeros(len(number), dtype=torch.float64).index_add(0, group[train], value[train])
    mean = (total / number.clamp(min=1))[group]
    known = torch.zeros(len(names), dtype=torch.bool)
    known[place[:, train]] = True
    seen = known[place].all(dim=0)
    if damping is None:
        return mean, seen
    user, item = place
    left = (value - mean)[train]
    bias = solved_biases(user[train], item[train], left, len(names), damping, TURNS)
    return mean + bias[user] + bias[item], seen
