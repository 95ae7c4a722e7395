"""Differential privacy of a run: its settings, its noise, and what cannot have the guarantee."""

import math
from collections.abc import Iterator, Mapping

from silograph.aggregation.aggregators import MEAN
from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError, mistake
from silograph.core.resolved_config import ResolvedConfig
from silograph.core.setting_values import BALANCED, SentWeights
from silograph.experiment.resolve.parts import Parts
from silograph.federation.privacy.accounting import noise_multiplier_for
from silograph.federation.privacy.updates import UpdatePrivacy
from silograph.methods import METHODS
from silograph.selection.round_robin import ROUND_ROBIN

CLIP = 1.0
ROUNDS_FOR_A_SPARE = 10
NEEDED = ("dp_epsilon", "dp_delta", "dp_unit")
Exclusion = tuple[bool, str, tuple[str, ...]]


def has_privacy(config: RunConfig) -> bool:
    """Whether a config asks for differential privacy.

    Raises:
        ConfigError: some of its options are missing.
    """
    values = {name: getattr(config, name) for name in (*NEEDED, "dp_clip")}
    if all(value is None for value in values.values()):
        return False
    for name in NEEDED:
        if values[name] is None:
            raise ConfigError(
                f"expected {', '.join(NEEDED)} together for differential privacy, got none of "
                f"{name}: give all three, or none",
                **mistake("missing-option", name),
            )
    return True


def clip_of(config: RunConfig) -> float | None:
    """Return the clip of a run, None without differential privacy."""
    return (config.dp_clip or CLIP) if config.dp_unit is not None else None


def spare_releases(config: ResolvedConfig) -> int:
    """Return how many releases a run may have besides one for each round.

    A silo's noise is in one secure sum only, so a round that is repeated after a silo was lost is
    released anew: once for every ten rounds. Without secure aggregation a silo repeats its reply.
    """
    return math.ceil(config.rounds / ROUNDS_FOR_A_SPARE) if config.secure_aggregation else 0


def privacy_of(config: ResolvedConfig) -> UpdatePrivacy | None:
    """Return how updates are clipped and noised; None without differential privacy.

    The server knows who takes part in a round, so the draw of participants makes nothing cheaper:
    the noise is enough for a silo that takes part in every round.

    Raises:
        ConfigError: no noise of a useful size is enough, or the accountant is not installed.
    """
    if config.dp_unit is None:
        return None
    assert config.dp_epsilon is not None  # see `has_privacy`
    assert config.dp_delta is not None
    assert config.dp_clip is not None
    releases = config.rounds + spare_releases(config)
    return UpdatePrivacy(
        unit=config.dp_unit,
        epsilon=config.dp_epsilon,
        delta=config.dp_delta,
        clip=config.dp_clip,
        noise_multiplier=noise_multiplier_for(config.dp_epsilon, config.dp_delta, releases),
        releases=releases,
    )


def exclusions_of_privacy(config: RunConfig, parts: Parts) -> Iterator[Exclusion]:
    """Yield what would let anything leave besides clipped sums with noise."""
    method, selector, what = parts.method.part, parts.selector.part, "dp_unit"
    yield (
        not method.clips_updates,
        f"expected a method whose rounds are one sum of clipped updates for {what}=silo, got "
        f"{method.name}: use one of "
        f"{', '.join(m.name for m in METHODS.values() if m.clips_updates)}",
        ("method", what),
    )
    yield (
        selector.on_receipt or (selector.observe is not None and selector is not ROUND_ROBIN),
        f"expected a selector that learns nothing of single clients for {what}, got "
        f"{selector.name}: use uniform, round_robin or all",
        ("selector", what),
    )
    yield (
        parts.aggregator.part is not MEAN,
        f"expected aggregator=mean for {what}, got {parts.aggregator.part.name}, which needs the "
        "weights of single clients: leave one of them out",
        ("aggregator", what),
    )
    yield (
        not SentWeights(config.weights_as, config.weight_rows).plain,
        f"expected weights_as=exact and weight_rows=all for {what}, whose updates are integers, "
        f"got weights_as={config.weights_as} weight_rows={config.weight_rows}: leave them out",
        ("weights_as", "weight_rows", what),
    )
    for name, is_given in _leaking_options(config).items():
        yield (
            is_given,
            f"expected no {name}={getattr(config, name)} for {what}: it would send or use figures "
            f"of silos without noise; leave {name} out",
            (name, what),
        )


def _leaking_options(config: RunConfig) -> Mapping[str, bool]:
    """Return which options that send or use statistics, rows or scores are given."""
    return {
        "normalize": config.normalize == "standard",
        "edge_weights": config.edge_weights == "scale",
        "feature_drift": config.feature_drift,
        "class_weight": config.class_weight == BALANCED,
        "collect": bool(config.collect),
        "local_bias": config.local_bias,
        "patience": config.patience is not None,
        "target": config.target is not None,
        "threshold": config.threshold is not None,
        "max_seconds": config.max_seconds is not None,
        "evaluate_clients": config.evaluate_clients == "participants",
    }
