"""Each client's own model in the round that is best by this client's validation nodes.

A run picks one round for all clients. Where models are the clients' own, each client can keep the
one that its own validation nodes like best, and papers on personalized methods often report that.

C: clients.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from silograph.evaluation.evaluate import HISTOGRAM
from silograph.experiment.run.round_scores import Counts, run_metric, task_in
from silograph.experiment.run.setup import Setup
from silograph.task.metric_table import METRICS
from silograph.task.scores import PARTS, Scores


def with_round(setup: Setup, known: Counts | None, own: Counts) -> Counts | None:
    """Return the counts of each client's best round so far, after one more was scored.

    Clients compare rounds by the run's metric if it is one of single clients, otherwise by their
    first metric, then by their loss; on a tie the earlier round stays, and without validation nodes
    the later one.

    Args:
        setup: the run.
        known: the counts so far, by name (C, ...); empty before the first scored round, None where
            earlier rounds are not known.
        own: counts of the clients' own models in the new round.
    """
    if known is None:
        return None
    found = {name: t for name, t in own.items() if not name.endswith(HISTOGRAM)}
    if not known:
        return found
    better = _better(_ranks(setup, found), _ranks(setup, known))
    if not better.any():
        return known
    return {name: _of_better(better, new, known[name]) for name, new in found.items()}


def _of_better(better: np.ndarray, new: Tensor, old: Tensor) -> Tensor:
    """Return the slices (C, ...) of the new round where it is better (C,), else the old ones."""
    chosen = better.reshape(-1, *[1] * (new.dim() - 1))
    return torch.from_numpy(np.where(chosen, new.cpu().numpy(), old.cpu().numpy()))


def _ranks(setup: Setup, counts: Counts) -> tuple[np.ndarray, np.ndarray]:
    """Return how good each client's validation score and loss are, two (C,); NaN: no nodes."""
    by_metric = task_in(setup).client_scores(counts, "val")
    chosen = run_metric(setup).name
    losses, nodes = (counts[f"val.{name}"].cpu().numpy() for name in ("loss", "nodes"))
    with np.errstate(invalid="ignore", divide="ignore"):
        loss = -losses / nodes
    name = next((n for n in (chosen, *by_metric) if n in by_metric), None)
    if name is None:
        return loss, loss
    sign = 1.0 if METRICS[name].higher else -1.0
    values = [float("nan") if value is None else sign * value for value in by_metric[name]]
    return np.array(values), loss


def _better(new: tuple[np.ndarray, np.ndarray], old: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Return for which clients (C,) the new round is chosen."""
    closer = (new[0] > old[0]) | ((new[0] == old[0]) & (new[1] > old[1]))
    found: np.ndarray = closer | np.isnan(old[0])
    return found


def scores_of(setup: Setup, counts: Counts | None) -> Mapping[str, Scores | None] | None:
    """Return validation and test scores of the clients' own best rounds, None if unknown.

    AUC is None: its histograms are of all clients together.
    """
    if not counts:
        return None
    return {part: task_in(setup).scores(counts, part) for part in PARTS}
