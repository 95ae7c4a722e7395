"""Differential privacy of a run: its settings, its noise, and what cannot have the guarantee."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from silograph.aggregation.aggregators import MEAN
from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError, mistake
from silograph.core.resolved_config import ResolvedConfig
from silograph.core.setting_values import BALANCED, SentWeights
from silograph.experiment.resolve.parts import Parts
from silograph.federation.privacy.accounting import noise_multiplier_for
from silograph.federation.privacy.discrete_gaussian import MOST_SIGMA
from silograph.federation.privacy.updates import LEAST_CLIP, MOST_CLIP, UpdatePrivacy
from silograph.methods import METHODS
from silograph.nn.bounded_subgraphs import most_changed_subgraphs
from silograph.selection.round_robin import ROUND_ROBIN

CLIP, DEGREE = 1.0, 3
NODE_MODELS = "gcn", "sage"
ROUNDS_FOR_A_SPARE = 10
NEEDED = ("dp_epsilon", "dp_delta")
OPTIONS = (*NEEDED, "dp_unit", "dp_clip", "dp_clip_quantile", "dp_degree")
Exclusion = tuple[bool, str, tuple[str, ...]]


def has_privacy(config: RunConfig) -> bool:
    """Whether a config asks for differential privacy.

    Raises:
        ConfigError: some of its options are missing.
    """
    values = {name: getattr(config, name) for name in OPTIONS}
    if all(value is None for value in values.values()):
        return False
    for name in NEEDED:
        if values[name] is None:
            raise ConfigError(
                f"expected {' and '.join(NEEDED)} together for differential privacy, got no "
                f"{name}: give both, or no option of differential privacy",
                **mistake("missing-option", name),
            )
    return True


def privacy_defaults(config: RunConfig) -> dict[str, Any]:
    """Return the options of differential privacy with their defaults; None where they do nothing.

    The unit is a silo unless another one is given: that hides the most.
    """
    is_private = config.dp_epsilon is not None
    is_node = config.dp_unit == "node"
    return {
        "dp_unit": (config.dp_unit or "silo") if is_private else None,
        "dp_clip": (config.dp_clip or CLIP) if is_private else None,
        "dp_degree": (config.dp_degree or DEGREE) if is_node else None,
    }


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
        ConfigError: no noise of a useful size is enough, the accountant is not installed, or the
            unit is a node and the model is not for it.
    """
    if config.dp_epsilon is None:
        return None
    assert config.dp_delta is not None  # see `has_privacy`
    assert config.dp_unit is not None  # see `privacy_defaults`
    assert config.dp_clip is not None
    releases = config.rounds + spare_releases(config)
    privacy = UpdatePrivacy(
        unit=config.dp_unit,
        epsilon=config.dp_epsilon,
        delta=config.dp_delta,
        clip=config.dp_clip,
        noise_multiplier=noise_multiplier_for(config.dp_epsilon, config.dp_delta, releases),
        releases=releases,
        quantile=config.dp_clip_quantile,
    )
    return privacy if config.dp_unit == "silo" else _of_nodes(config, privacy)


def _of_nodes(config: ResolvedConfig, privacy: UpdatePrivacy) -> UpdatePrivacy:
    """Return the privacy of a run whose unit is a node; see `privacy_of`."""
    if config.model not in NODE_MODELS:
        raise ConfigError(
            f"expected one of the models {', '.join(NODE_MODELS)} for dp_unit=node, got "
            f"{config.model}: use one of them, or dp_unit=silo",
            **mistake("conflicting-options", ["model", "dp_unit"]),
        )
    assert config.dp_degree is not None  # see `privacy_defaults`
    sensitivity = 2 * most_changed_subgraphs(config.dp_degree, config.layers)
    privacy = replace(privacy, sensitivity=sensitivity, degree=config.dp_degree, hops=config.layers)
    if privacy.sigma() > MOST_SIGMA:
        raise ConfigError(
            f"expected less noise, got {privacy.noise_multiplier * sensitivity:.4g} times the "
            f"clip for dp_degree={config.dp_degree} and {config.layers} layers: lower dp_degree or "
            "layers, or raise dp_epsilon",
            **mistake("option-value", "dp_degree", config.dp_degree),
        )
    return privacy


def exclusions_of_privacy(config: RunConfig, parts: Parts) -> Iterator[Exclusion]:
    """Yield what would let anything leave besides clipped sums with noise."""
    # 1. What the method and the selector send
    method, selector, what = parts.method.part, parts.selector.part, "dp_epsilon"
    yield (
        not method.clips_updates,
        f"expected a method whose rounds are one sum of clipped updates for {what}, got "
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
    # 2. Options that send or use figures
    sends_or_uses_figures = {
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
    for name, is_given in sends_or_uses_figures.items():
        yield (
            is_given,
            f"expected no {name}={getattr(config, name)} for {what}: it would send or use figures "
            f"of silos without noise; leave {name} out",
            (name, what),
        )
    # 3. Unit silo
    if config.dp_unit != "node":
        adapts = config.dp_clip_quantile is not None
        yield (
            adapts and not LEAST_CLIP <= (config.dp_clip or CLIP) <= MOST_CLIP,
            f"expected dp_clip from 2^-64 to 2^64 with dp_clip_quantile, got {config.dp_clip}: "
            "silos refuse other clips that adapt; change dp_clip, or leave dp_clip_quantile out",
            ("dp_clip", "dp_clip_quantile"),
        )
        yield (
            config.dp_degree is not None,
            f"expected no dp_degree={config.dp_degree} for dp_unit=silo: leave it out, or use "
            "dp_unit=node",
            ("dp_degree", "dp_unit"),
        )
        return
    # 4. Unit node: figures and features of several nodes
    yield (
        config.dp_clip_quantile is not None,
        f"expected no dp_clip_quantile for dp_unit=node, got {config.dp_clip_quantile}: one node "
        "changes whether many gradients are within the clip, which the noise does not cover; "
        "leave it out, or use dp_unit=silo",
        ("dp_clip_quantile", "dp_unit"),
    )
    mixes_nodes = {
        "features": "degree" in config.features,
        "normalize": config.normalize == "standard_client",
        "split": (config.split or "").startswith("fold="),  # moves the roles of two other nodes
    }
    for name, is_given in mixes_nodes.items():
        yield (
            is_given,
            f"expected no {name}={getattr(config, name)} for dp_unit=node: one node would change "
            f"features or roles of others, which the noise does not count; leave {name} out, or "
            "prepare features of each node by itself",
            (name, "dp_unit"),
        )
    # 5. Unit node: other local steps
    asks_for_other_steps = {
        "optimizer": config.optimizer not in (None, "sgd"),
        "local_epochs": config.local_epochs not in (None, 1),
        "batch_size": config.batch_size is not None,
        "neighbors": config.neighbors not in (None, "full"),
        "keep_optimizer": bool(config.keep_optimizer),
        "momentum": config.momentum > 0,
        "directed": config.directed != "none",
    }
    for name, is_given in asks_for_other_steps.items():
        yield (
            is_given,
            f"expected no {name}={getattr(config, name)} for dp_unit=node, whose rounds are one "
            f"step of SGD on all training nodes along sampled edges: leave {name} out",
            (name, "dp_unit"),
        )
    yield (
        bool(method.needs.corrections(parts.method.options))
        or bool(method.needs.losses(parts.method.options)),
        f"expected a method without terms of its own in each step for dp_unit=node, got "
        f"{method.name}: use fedavg or fedopt",
        ("method", "dp_unit"),
    )
