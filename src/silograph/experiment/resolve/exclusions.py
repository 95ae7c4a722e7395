"""What does not go together in a run: parts and options that exclude each other."""

from dataclasses import fields
from typing import Any

from silograph.aggregation.aggregators import MEAN
from silograph.core.client_speeds import parse_links, parse_speeds
from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError
from silograph.core.rate_schedule import parse_rate_schedule
from silograph.core.sent_weights import SentWeights
from silograph.experiment.resolve.cutting import (
    check_features,
)
from silograph.experiment.resolve.parts import Parts
from silograph.experiment.resolve.run_metric import check_metric
from silograph.graph.graph import LabelForm
from silograph.methods import METHODS
from silograph.methods.base import Method
from silograph.methods.local_only import fit_round as train_alone
from silograph.nn.any_model import AnyModel
from silograph.nn.neighbors import Neighbors
from silograph.selection.options import LIMITS
from silograph.selection.round_robin import ROUND_ROBIN
from silograph.selection.uniform import UNIFORM


def check_clock(asked: RunConfig) -> None:
    """Raise `ConfigError` where speeds or links of clients are not such."""
    if asked.speeds is not None:
        parse_speeds(asked.speeds)
    if asked.links is not None:
        parse_links(asked.links)


def check_together(config: RunConfig, parts: Parts, *, overlapping: bool) -> None:
    """Raise `ConfigError` for parts and options that exclude each other.

    Args:
        config: of the run.
        parts: of the config.
        overlapping: whether several clients may hold a node.
    """
    method, selector = parts.method.part, parts.selector.part
    setting = method.setting
    crosses = method.evaluate.crosses
    if config.collect and (crosses or setting.uncut):
        raise ConfigError(
            f"expected a method that trains on each client's own graph for collect, got "
            f"{method.name}, which has all neighbors already: leave collect out"
        )
    if overlapping and not method.evaluate.copies and not setting.uncut:
        raise ConfigError(
            f"expected a cut in which each node has one client for {method.name}, which trains all "
            f"clients as one graph, got {config.partition}: use another partition, such as metis"
        )
    limited = is_limited(parts.selector.options)
    if not method.selects and (selector is not UNIFORM or limited):
        raise ConfigError(
            f"expected a method that trains locally for selector {selector.name}, got "
            f"{method.name}, in which all clients train in every round: leave selector out"
        )
    if parts.aggregator.part is not MEAN and not method.aggregates:
        able = [name for name, each in METHODS.items() if each.aggregates]
        raise ConfigError(
            f"expected a method that averages weights and nothing else for aggregator "
            f"{parts.aggregator.part.name}, got {method.name}: use one of {', '.join(able)}, or "
            "one of your own with aggregates=True"
        )
    if config.local_bias and method.evaluate.view != "server":
        raise ConfigError(
            f"expected a method whose server has a model for local_bias, got {method.name}: leave "
            "local_bias out"
        )
    check_minimum(config, method)
    check_sent(config, parts)
    check_features(config)
    check_clock(config)
    parse_rate_schedule(config.lr_schedule, config.rounds, config.warmup_rounds)
    check_metric(config)


def check_ratings(method: Method, task: LabelForm) -> None:
    """Raise `ConfigError` for ratings and a method that does not train on them."""
    if task == "rating" and not method.trains_ratings:
        able = [name for name, each in METHODS.items() if each.trains_ratings]
        raise ConfigError(
            f"expected a method that trains on ratings of users and items, got {method.name}: use "
            f"one of {', '.join(able)}"
        )


def check_selected(parts: Parts) -> None:
    """Raise `ConfigError` for a selector that learns, where clients train without a server.

    Of new runs: one that was begun so goes on.
    """
    method, selector = parts.method.part, parts.selector
    learns = selector.part.observe is not None and selector.part is not ROUND_ROBIN
    if method.round is train_alone and (learns or is_limited(selector.options)):
        asked = f"selector {selector.part.name}{'' if learns else ' with limits'}"
        raise ConfigError(
            f"expected a method whose clients train with a server for {asked}, got {method.name}, "
            "whose clients train alone: leave selector out, or use uniform, round_robin or all "
            "without limits"
        )


WITHOUT_SUMS = {
    "none": "which exchanges no rows",
    "single": "which exchanges more than sums",
}


def check_minimum(config: RunConfig, method: Method) -> None:
    """Raise `ConfigError` where rows that rest on few nodes or silos cannot be left out."""
    names = ("min_nodes_per_row", "min_silos_per_row")
    given = [name for name in names if getattr(config, name) > 1]
    if given and method.rows != "sums":
        raise ConfigError(
            f"expected a method that exchanges sums of rows for {given[0]}, got {method.name}, "
            f"{WITHOUT_SUMS[method.rows]}: leave {' and '.join(given)} out"
        )


def check_sent(config: RunConfig, parts: Parts) -> None:
    """Raise `ConfigError` unless weights can travel as they are asked to."""
    method = parts.method.part
    if SentWeights(config.weights_as, config.weight_rows).plain:
        return
    asked = f"weights_as={config.weights_as} weight_rows={config.weight_rows}"
    if not method.small_weights:
        able = [name for name, each in METHODS.items() if each.small_weights]
        raise ConfigError(
            f"expected weights_as=exact and weight_rows=all for method {method.name}, got {asked}: "
            f"{', '.join(able)} can send them otherwise"
        )
    if parts.selector.part.on_receipt:
        raise ConfigError(
            f"expected weights_as=exact and weight_rows=all where clients score what they receive, "
            f"got {asked}: those that do not train would score other weights"
        )
    if config.weight_rows == "all":
        return
    keep = method.needs.keep_optimizer if config.keep_optimizer is None else config.keep_optimizer
    if keep or config.batch_size is not None or config.collect:
        raise ConfigError(
            "expected neither keep_optimizer, batch_size nor collect with weight_rows=used: then "
            "the server cannot know what becomes of the rows that a client does not use"
        )


def check_silos_behind(config: RunConfig, clients: int) -> None:
    """Raise `ConfigError` where no sum can have as many silos behind it as it needs."""
    most = max(clients - 1, 1)
    if config.min_silos_per_row > most:
        raise ConfigError(
            f"expected at most {most} for min_silos_per_row, as a node has neighbors in at most "
            f"that many other silos, got {config.min_silos_per_row}: lower it"
        )


def check_neighbors(name: str, model_name: str, neighbors: Neighbors, model: AnyModel) -> None:
    """Raise `ConfigError` where a model cannot be trained on what a sampler draws."""
    reason = neighbors.why_not(model)
    if reason is not None:
        raise ConfigError(
            f"expected a model that takes the draws of neighbors={name}, got {model_name}: "
            f"{reason}; use neighbors=full or fanout"
        )


def is_limited(options: Any) -> bool:
    """Whether options of a selector limit the clients of rounds; a user's may not have them."""
    found = {f.name: getattr(options, f.name) for f in fields(options)}
    return any(found.get(name) is not None for name in LIMITS)


def check_decay(config: RunConfig, model: AnyModel) -> None:
    """Raise `ConfigError` where the first layer is to decay alone, and nobody knows which it is."""
    if config.decay_layers != "all" and model.staged is None:
        raise ConfigError(
            f"expected decay_layers=all with {model.noun}, whose layers are not known, got "
            f"decay_layers={config.decay_layers}: leave it out"
        )
