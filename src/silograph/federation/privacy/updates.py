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

The clip may follow a quantile of the norms (Andrew, Thakkar, McMahan and Ramaswamy,
"Differentially private learning with adaptive clipping", NeurIPS 2021, algorithm 1). Then a silo
also says whether its norm is at most C: one more integer, +B or -B. The paper sends b - 1/2, which
is +1/2 or -1/2 likewise, with noise of sigma_b of its own. Here all integers get the same noise,
sigma = 2^22 z, and the update is scaled to U = sqrt(2^44 - B^2) in place of 2^22. So the norm of
both together is at most 2^22, and the accountant counts the same as for a fixed clip. This is the
paper's split (theorem 1): in its units z_delta = sigma / U and sigma_b = sigma / (2 B), thus
z_delta^-2 = (2^44 - B^2) / sigma^2 = z^-2 - (2 sigma_b)^-2.

What we changed: B is a quarter of 2^22, so the update has 3.3 % more noise, and sigma_b is 2 z
whatever the number of silos. The paper takes a twentieth of the silos for sigma_b, which small
federations could not pay.
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
WITHIN_UNITS = CLIP_UNITS // 4  # B
ADAPTED_CLIP_UNITS = math.isqrt(CLIP_UNITS**2 - WITHIN_UNITS**2)  # U, rounded down
CLIP_RATE = 0.2  # eta_C of the paper
# Of a clip that adapts: noise without end must not lead to numbers that are not finite.
LEAST_CLIP, MOST_CLIP = 2.0**-64, 2.0**64


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
        quantile: gamma, of the norms of updates, which the clip follows from `clip` on; None: a
            fixed clip.
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
    quantile: float | None = None

    @property
    def clip_units(self) -> int:
        """The clip in units of the grid."""
        return CLIP_UNITS if self.quantile is None else ADAPTED_CLIP_UNITS

    def sigma(self, shares: int = 1) -> int:
        """Return the scale of one silo's noise in units of the grid.

        Args:
            shares: fewest silos whose noise must suffice together; 1: the silo's own must.
        """
        scale = self.noise_multiplier * self.sensitivity * CLIP_UNITS
        return max(1, math.ceil(scale / math.sqrt(shares)))


def spent_facts(privacy: UpdatePrivacy, releases: Mapping[float, int]) -> dict[str, Any]:
    """Return what releases have cost, for results and audits."""
    quantile = {} if privacy.quantile is None else {"clip_quantile": privacy.quantile}
    return {
        "unit": privacy.unit,
        "epsilon": epsilon_of(releases, privacy.delta),
        "delta": privacy.delta,
        "agreed_epsilon": privacy.epsilon,
        "clip": privacy.clip,
        **quantile,
        "noise_multiplier": privacy.noise_multiplier,
        "releases": sum(releases.values()),
    }


def norms_of(updates: np.ndarray) -> np.ndarray:
    """Return the Euclidean norms (C, 1) of updates (C, n) float64.

    It is infinity for an update that has NaN, or whose norm is no finite number in float64.
    """
    finite = np.isfinite(updates).all(1, keepdims=True)
    values = np.where(finite, updates, 0.0)
    largest = np.maximum(np.abs(values).max(1, keepdims=True, initial=0.0), 2.0**-1000)
    # Divided first, so that squares of neither huge nor tiny values overflow.
    with np.errstate(over="ignore"):
        norms = largest * np.sqrt(np.square(values / largest).sum(1, keepdims=True))
    return np.where(finite, norms, np.inf)


def clip_to_grid(
    updates: np.ndarray,
    clip: float,
    clip_units: int = CLIP_UNITS,
    norms: np.ndarray | None = None,
) -> np.ndarray:
    """Return updates as integers whose norm is at most `clip_units`.

    Args:
        updates: (C, n) float64; the row of a client that has NaN or infinity becomes 0.
        clip: C, the norm to which longer rows are scaled.
        clip_units: the clip in units of the grid.
        norms: what `norms_of` returns for the updates; None: they are computed here.

    Returns:
        (C, n) int64.

    Raises:
        ValueError: a clip that is not positive and finite, which would bound nothing.
    """
    if not 0 < clip < math.inf:
        raise ValueError(f"expected a positive, finite clip, got {clip}")
    norms = norms_of(updates) if norms is None else norms
    values = np.where(np.isfinite(updates).all(1, keepdims=True), updates, 0.0)
    units = clip_units * (values / np.maximum(norms, clip))
    while True:
        grid: np.ndarray = np.trunc(units).astype(np.int64)
        is_too_long = np.square(grid).sum(1, keepdims=True) > clip_units**2
        if not is_too_long.any():
            return grid
        units = np.where(is_too_long, units * (1 - 2.0**-30), units)  # by rounding of the norm


def clipped_updates(
    trained: Mapping[str, Tensor],
    start: Mapping[str, Tensor],
    clip: float,
    privacy: UpdatePrivacy,
) -> tuple[dict[str, Stacked], Stacked | None]:
    """Return clients' updates as integer fields by name, and which are within the clip.

    Args:
        trained: (C, ...) weights after training.
        start: (...) weights that they received.
        clip: C of the round.
        privacy: of the run.

    Returns:
        Updates (C, ...) int64, and (C,) int64 `WITHIN_UNITS` for a norm of at most C, else minus
        that; None for a fixed clip.
    """
    parts = {name: (w.double() - start[name].double()).flatten(1) for name, w in trained.items()}
    updates = torch.cat(list(parts.values()), 1).cpu().numpy()
    norms = norms_of(updates)
    rows = clip_to_grid(updates, clip, privacy.clip_units, norms)
    fields, begin = dict[str, Stacked](), 0
    for name, part in parts.items():
        values = torch.from_numpy(rows[:, begin : begin + part.shape[1]].copy())
        fields[name] = Stacked(values.view(trained[name].shape).to(part.device))
        begin += part.shape[1]
    if privacy.quantile is None:
        return fields, None
    is_within = torch.from_numpy(norms[:, 0] <= clip)
    device = next(iter(parts.values())).device
    return fields, Stacked(torch.where(is_within, WITHIN_UNITS, -WITHIN_UNITS).to(device))


def mean_update(
    total: Mapping[str, Tensor],
    start: Mapping[str, Tensor],
    clip: float,
    silos: int,
    clip_units: int = CLIP_UNITS,
) -> dict[str, Tensor]:
    """Return received weights plus the mean update, in the dtype of each.

    Args:
        total: sum of the noised updates by name, (...) int64.
        start: (...) weights that silos received.
        clip: C.
        silos: that were called, whether or not they answered.
        clip_units: the clip in units of the grid.
    """
    unit = clip / clip_units / silos
    return {n: (w.double() + total[n].double() * unit).to(w.dtype) for n, w in start.items()}


def share_within(total: int, silos: int) -> float:
    """Return the share of silos whose updates are within the clip, with noise: maybe beyond 0 to 1.

    Args:
        total: sum of what `clipped_updates` returns for it, with noise.
        silos: that were called. One that did not answer counts as half a silo.
    """
    return total / (2 * WITHIN_UNITS * silos) + 0.5


def next_clip(clip: float, within: float, quantile: float) -> float:
    """Return the clip of the next round: smaller if a larger share than the quantile is within.

    Andrew et al. 2021, algorithm 1: C exp(-eta_C (b - gamma)).

    Args:
        clip: C.
        within: b, share of silos within it.
        quantile: gamma.
    """
    # A share that noise has moved far beyond 0 to 1 must not move the clip without bound.
    new = clip * math.exp(-CLIP_RATE * (min(max(within, -100.0), 100.0) - quantile))
    return min(max(new, LEAST_CLIP), MOST_CLIP)


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
