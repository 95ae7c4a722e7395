"""What releases with Gaussian noise cost together, worked out by `dp-accounting`.

Each release adds noise of `noise_multiplier` times its sensitivity in the Euclidean norm. The
accountant composes their Renyi divergences (Mironov, "Renyi differential privacy", CSF 2017), which
for the discrete Gaussian are at most those of the continuous one (Canonne, Kamath and Steinke 2020,
proposition 5). So epsilon holds for integer noise as well; curves of privacy loss (PLD) of the
continuous Gaussian would be slightly lower, but are not proved for it. A sum of shares of noise is
no discrete Gaussian itself: its divergence has an extra term (Kairouz, Liu and Steinke, "The
distributed discrete Gaussian mechanism for federated learning with secure aggregation", ICML 2021,
theorem 1), which falls with exp(-pi^2 sigma^2). A share's sigma is dozens of units of the grid at
least, so that term is far below any delta.

Neighbors are federations with and without one silo (*add or remove*): a silo that is removed sends
zeros. Replacing the data of a silo by other data is two such steps.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from silograph.core.errors import ConfigError, mistake

LEAST_MULTIPLIER, MOST_MULTIPLIER = 2.0**-12, 2.0**13  # beyond that nothing could be learned
EXTRA = "dp"


def _library() -> Any:
    """Return `dp_accounting`; imported here, as it takes seconds.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError as error:
        raise ConfigError(
            "expected dp-accounting for differential privacy, got none: pip install "
            f"'silograph[{EXTRA}]'",
            **mistake("missing-package", "dp-accounting", EXTRA),
        ) from error
    return dp_accounting


def _new_accountant() -> Any:
    """Return an accountant of Renyi divergences, for neighbors by add or remove."""
    library = _library()
    relation = library.NeighboringRelation.ADD_OR_REMOVE_ONE
    return library.rdp.RdpAccountant(neighboring_relation=relation)


def _gaussian(multiplier: float, releases: int) -> Any:
    library = _library()
    return library.SelfComposedDpEvent(library.GaussianDpEvent(multiplier), releases)


def epsilon_of(releases: Mapping[float, int], delta: float) -> float:
    """Return epsilon at delta of all releases together.

    Args:
        releases: number of releases by noise multiplier; none cost nothing.
        delta: probability that the bound does not hold.
    """
    if not any(releases.values()):
        return 0.0
    accountant = _new_accountant()
    for multiplier, count in sorted(releases.items()):
        if count:
            accountant.compose(_gaussian(multiplier, count))
    return float(accountant.get_epsilon(delta))


def epsilon_left(releases: Mapping[float, int], epsilon: float, delta: float) -> float:
    """Return the largest epsilon at delta of further releases, so that all cost at most epsilon.

    Renyi divergences of Gaussian noise at order a are a n / (2 z^2) for n releases of noise
    multiplier z. They add up, so sums of n / z^2 decide, however they are divided into releases.
    Epsilon grows slower than these sums: what is left is more than the difference of epsilons.

    Args:
        releases: number of releases so far by noise multiplier.
        epsilon: that all may cost.
        delta: probability that the bound does not hold.
    """
    if not any(releases.values()):
        return epsilon
    try:
        allowed = noise_multiplier_for(epsilon, delta, 1) ** -2
    except ConfigError:  # even the most noise costs more
        return 0.0
    left = allowed - sum(count / multiplier**2 for multiplier, count in releases.items())
    return epsilon_of({left**-0.5: 1}, delta) if left > MOST_MULTIPLIER**-2 else 0.0


@lru_cache(maxsize=64)
def noise_multiplier_for(epsilon: float, delta: float, releases: int) -> float:
    """Return the least noise multiplier with which releases cost at most epsilon at delta.

    Raises:
        ConfigError: no noise of a useful size is enough.
    """
    if epsilon_of({MOST_MULTIPLIER: releases}, delta) > epsilon:
        raise ConfigError(
            f"dp_epsilon: expected a larger value for {releases} releases, got {epsilon:g}, which "
            f"needs noise of more than {MOST_MULTIPLIER:g} times the clip: raise dp_epsilon or "
            "dp_delta",
            **mistake("option-value", "dp_epsilon", epsilon),
        )
    if epsilon_of({LEAST_MULTIPLIER: releases}, delta) <= epsilon:
        return LEAST_MULTIPLIER
    library = _library()
    multiplier = library.calibrate_dp_mechanism(
        _new_accountant,
        lambda value: _gaussian(value, releases),
        epsilon,
        delta,
        library.ExplicitBracketInterval(LEAST_MULTIPLIER, MOST_MULTIPLIER),
        tol=2.0**-20,
    )
    # Both ends of a run work it out: few digits, rounded up, do not depend on rounding errors.
    return math.ceil(float(multiplier) * 2**12 + 2.0**-6) / 2**12
