"""Updates of a model as bounded integer vectors, and the noise that is added to them.

McMahan, Ramage, Talwar and Zhang, "Learning differentially private recurrent language models", ICLR
2018, algorithm 1 with flat clipping and a fixed denominator: a silo's update (trained minus
received weights) is scaled to a norm of at most C, and the server divides the sum by the number of
silos that it called. All silos have equal weights, since numbers of nodes do not leave.

Values travel as integers, C / 2^22 each. They are rounded towards zero, which makes none of them
larger, so the norm of the integers is at most 2^22 exactly, and nothing need be added to the
sensitivity for rounding (Kairouz, Liu and Steinke, "The distributed discrete Gaussian mechanism for
federated learning with secure aggregation", ICML 2021, add sqrt(d) / 2 for rounding to the
nearest).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from silograph.core.payload import Payload, Stacked
from silograph.federation.privacy.accounting import epsilon_of
from silograph.federation.privacy.discrete_gaussian import draw_discrete_gaussian

CLIP_UNITS = 2**22  # the clip C in units of the grid


@dataclass(frozen=True)
class UpdatePrivacy:
    """How the updates of a run are clipped and noised.

    Attributes:
        unit: what the guarantee is for: a whole `silo`, or a `node` of one.
        epsilon: that the run may cost, at `delta`.
        delta: probability that the bound does not hold.
        clip: C, largest Euclidean norm of a silo's update, or of the gradient of a training node.
        noise_multiplier: scale of the noise of a released sum, as a multiple of what one unit
            changes in it.
        releases: sums that the run may release: one for each round, and spare ones for rounds that
            are repeated.
        sensitivity: most that one unit changes in a released sum, as a multiple of C.
        degree: K, edges of a node that are sampled at most; 0: the unit is a silo.
        hops: r, how far the gradient of a training node reads; 0: the unit is a silo.
    """

    unit: str
    epsilon: float
    delta: float
    clip: float
    noise_multiplier: float
    releases: int
    sensitivity: int = 1
    degree: int = 0
    hops: int = 0

    def sigma(self, shares: int = 1) -> int:
        """Return the scale of one silo's noise in units of the grid.

        Args:
            shares: fewest silos whose noise must suffice together; 1: the silo's own must.
        """
        scale = self.noise_multiplier * self.sensitivity * CLIP_UNITS
        return max(1, math.ceil(scale / math.sqrt(shares)))


def spent_facts(privacy: UpdatePrivacy, releases: Mapping[float, int]) -> dict[str, Any]:
    """Return what releases have cost, for results and audits."""
    return {
        "unit": privacy.unit,
        "epsilon": epsilon_of(releases, privacy.delta),
        "delta": privacy.delta,
        "agreed_epsilon": privacy.epsilon,
        "clip": privacy.clip,
        "noise_multiplier": privacy.noise_multiplier,
        "releases": sum(releases.values()),
    }


def clip_to_grid(updates: np.ndarray, clip: float) -> np.ndarray:
    """Return updates as integers whose norm is at most `CLIP_UNITS`.

    Args:
        updates: (C, n) float64; the row of a client that has NaN or infinity becomes 0.
        clip: C, the norm to which longer rows are scaled.

    Returns:
        (C, n) int64.
    """
    finite = np.isfinite(updates).all(1, keepdims=True)
    values = np.where(finite, updates, 0.0)
    largest = np.maximum(np.abs(values).max(1, keepdims=True, initial=0.0), 2.0**-1000)
    norms = largest * np.sqrt(np.square(values / largest).sum(1, keepdims=True))
    # Divided first, so that neither huge nor tiny values overflow.
    units = CLIP_UNITS * (values / np.maximum(norms, clip))
    while True:
        grid: np.ndarray = np.trunc(units).astype(np.int64)
        is_too_long = np.square(grid).sum(1, keepdims=True) > CLIP_UNITS**2
        if not is_too_long.any():
            return grid
        units = np.where(is_too_long, units * (1 - 2.0**-30), units)  # by rounding of the norm


def clipped_updates(
    trained: Mapping[str, Tensor], start: Mapping[str, Tensor], clip: float
) -> dict[str, Stacked]:
    """Return clients' updates as integer fields by name; see `clip_to_grid`.

    Args:
        trained: (C, ...) weights after training.
        start: (...) weights that they received.
        clip: C.
    """
    parts = {name: (w.double() - start[name].double()).flatten(1) for name, w in trained.items()}
    rows = clip_to_grid(torch.cat(list(parts.values()), 1).cpu().numpy(), clip)
    fields, begin = {}, 0
    for name, part in parts.items():
        values = torch.from_numpy(rows[:, begin : begin + part.shape[1]].copy())
        fields[name] = Stacked(values.view(trained[name].shape).to(part.device))
        begin += part.shape[1]
    return fields


def mean_update(
    total: Mapping[str, Tensor], start: Mapping[str, Tensor], clip: float, silos: int
) -> dict[str, Tensor]:
    """Return received weights plus the mean update, in the dtype of each.

    Args:
        total: sum of the noised updates by name, (...) int64.
        start: (...) weights that silos received.
        clip: C.
        silos: that were called, whether or not they answered.
    """
    unit = clip / CLIP_UNITS / silos
    return {n: (w.double() + total[n].double() * unit).to(w.dtype) for n, w in start.items()}


def add_noise(reply: Payload, seeds: Sequence[bytes], sigma: int) -> dict[str, Stacked]:
    """Return a reply of integer fields with noise in the slice of every client.

    Args:
        reply: (C, ...) int64 fields.
        seeds: of the noise of each of the C clients.
        sigma: scale of the noise.
    """
    fields = {name: field.t.clone() for name, field in sorted(reply.items())}
    sizes = [t.shape[1:].numel() for t in fields.values()]
    for position, seed in enumerate(seeds):
        noise = torch.from_numpy(draw_discrete_gaussian(seed, sigma, sum(sizes)))
        for t, part in zip(fields.values(), noise.split(sizes), strict=True):
            t[position] += part.view(t[position].shape).to(t.device)
    return {name: Stacked(t) for name, t in fields.items()}
