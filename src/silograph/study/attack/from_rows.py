"""Attacks on sums and rows: features from first-stage messages, labels from last cotangents.

They see what the server sees, and nothing else.

T: steps. F: features. H: width of the first stage. S: rows seen. K: classes.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from scipy.linalg import qr
from torch import Tensor

MOST_GROUPS = 64  # of rows seen in the same steps; each is a system of its own


def solved_features(
    maps: Sequence[Tensor], rows: Sequence[Tensor], places: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return what first-stage messages are made of, by solving message = x @ map in all steps.

    The server knows the weights, and what stands behind a message stays the same from step to
    step, so T steps give T H equations for F unknowns.

    Args:
        maps: (F, H) first weights of each step.
        rows: (S_t, H) messages of each step.
        places: (S_t,) what each message belongs to: a slot, a boundary row.

    Returns:
        (S,) places with as many equations as unknowns, and (S, F) float64 solutions: a sum over
        the nodes behind a place, each scaled by a number that depends on its degree.
    """
    needed = -(-maps[0].shape[0] // maps[0].shape[1]) + 1
    seen: dict[int, list[int]] = defaultdict(list)
    for step, here in enumerate(places):
        for place in here.tolist():
            seen[place].append(step)
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for place, steps in seen.items():
        if len(steps) >= needed:
            groups[tuple(steps[:needed])].append(place)
    largest = sorted(groups.items(), key=lambda group: -len(group[1]))[:MOST_GROUPS]
    found, solutions = [torch.zeros(0, dtype=torch.int64)], [maps[0].new_zeros(0, len(maps[0]))]
    for steps_of, members in largest:
        wanted = torch.tensor(members).sort().values
        known = [_at(rows[t], places[t], wanted) for t in steps_of]
        equations = torch.cat([maps[t] for t in steps_of], 1).T.double()
        values = torch.cat(known, 1).T.double()
        solutions.append(torch.linalg.lstsq(equations, values).solution.T)
        found.append(wanted)
    return torch.cat(found), torch.cat([s.double() for s in solutions])


def _at(rows: Tensor, places: Tensor, wanted: Tensor) -> Tensor:
    """Return the rows (k, H) at some places (k,), ascending."""
    order = places.argsort()
    return rows[order[torch.searchsorted(places[order], wanted)]]


def separable(behind: Tensor) -> Tensor:
    """Return which nodes' own messages are combinations of a silo's rows, (n,) bool.

    Args:
        behind: (S, n) how often each node is behind each row: what a server knows that has the
            silo's edges from elsewhere.
    """
    if not len(behind):
        return torch.zeros(behind.shape[1], dtype=torch.bool)
    # Pivoted, for it tells the rank; a singular value decomposition fails where many values repeat.
    q, r, _ = qr(behind.double().numpy().T, mode="economic", pivoting=True)
    sizes = abs(r.diagonal())
    spanned = q[:, sizes > 1e-9 * max(sizes[0], 1e-300)]
    return torch.from_numpy((spanned**2).sum(1) > 1 - 1e-6)


def labels_behind(cotangents: Tensor) -> Tensor:
    """Return the only class that training nodes behind each row (S, K) can have, -1 for several.

    A training node's gradient is p - 1 at its class and p > 0 elsewhere, so it is negative there
    only. A sum over nodes of one class is negative at that class only, too.
    """
    negative = cotangents < 0
    one = negative.sum(1) == 1
    return negative.long().argmax(1).where(one, -1)


def same_up_to_scale(solved: Tensor, truth: Tensor, tolerance: float = 1e-4) -> Tensor:
    """Return which rows of truth (n, F) a solution (S, F) equals up to a factor, (n,) bool.

    Both are divided by their length; no entry may differ by more than the tolerance.
    """
    hit = torch.zeros(len(truth), dtype=torch.bool)
    own: Tensor = truth.norm(dim=1)
    lengths = own, solved.norm(dim=1)
    real = solved[lengths[1] > 1e-9] / lengths[1][lengths[1] > 1e-9, None]
    if not len(real) or not len(truth):
        return hit
    unit = truth.double() / lengths[0].double().clamp(min=1e-12)[:, None]
    for part in real.split(4096):
        near = (part @ unit.T).argmax(1)
        hit[near[(part - unit[near]).abs().amax(1) <= tolerance]] = True
    return hit & (own > 0)
