"""The neighbor sampler of a run, from `neighbors`, `fanout` and options `neighbors.NAME`."""

from collections.abc import Mapping
from dataclasses import Field, asdict, fields
from typing import Any

from silograph.core.config import RunConfig, checked
from silograph.core.errors import ConfigError, lookup
from silograph.core.ranges import Scalar
from silograph.core.widths import LAYERS
from silograph.nn.any_model import AnyModel
from silograph.nn.neighbors import Neighbors
from silograph.sampling.neighbors import NEIGHBORS, Depth, NeighborSampler

PREFIX = "neighbors."  # of the sampler's options, among those of a run


def of_neighbors(options: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return those options of a run that are the sampler's, under their whole names."""
    return {name: value for name, value in options.items() if name.startswith(PREFIX)}


def of_method(options: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return those options of a run that are the method's."""
    return {name: value for name, value in options.items() if not name.startswith(PREFIX)}


def sampler_named(config: RunConfig) -> NeighborSampler:
    """Return the sampler of a config.

    Raises:
        ConfigError: unknown sampler (names the nearest), or a fan-out of another one.
    """
    if config.neighbors is None:
        return NEIGHBORS["full" if config.fanout is None else "fanout"]
    found = lookup(NEIGHBORS, config.neighbors, "neighbor sampler")
    if config.fanout is not None and found.name != "fanout":
        raise ConfigError(
            f"expected fanout with neighbors=fanout only, got fanout={config.fanout} with "
            f"neighbors={found.name}: leave one of them out"
        )
    return found


def sampler_options(config: RunConfig) -> tuple[NeighborSampler, object]:
    """Return the sampler of a config and its checked options.

    Raises:
        ConfigError: see `sampler_named`; or an unknown option, or a value out of range.
    """
    sampler, given = sampler_named(config), of_neighbors(config.options)
    values = {name.removeprefix(PREFIX): value for name, value in given.items()}
    if config.fanout is not None:
        if values:
            raise ConfigError(
                f"expected a fan-out either as fanout or as an option, got fanout={config.fanout} "
                f"and {', '.join(given)}: leave one of them out"
            )
        values = {"counts": config.fanout}
    options: object = checked(sampler.options, values, f"options of neighbors={sampler.name}")
    return sampler, options


def sampler_fields(config: RunConfig) -> "dict[str, Field[Any]]":
    """Return the fields of the sampler's options under their whole names.

    Raises:
        ConfigError: see `sampler_named`.
    """
    if config.fanout is not None:
        return {}
    return {f"{PREFIX}{f.name}": f for f in fields(sampler_named(config).options)}


def neighbors_of(config: RunConfig) -> Neighbors:
    """Return the sampler of a run; options of the model must be written out.

    Raises:
        ConfigError: see `sampler_options`; or something about the fan-out.
    """
    sampler, options = sampler_options(config)
    by_hop = config.hops is not None
    convs = (config.layers or LAYERS) - (config.head == "linear")
    depth = Depth(config.hops if config.hops else convs, "hop" if by_hop else "layer")
    return sampler.make(options, depth)


def written_out(config: RunConfig) -> dict[str, Scalar]:
    """Return the sampler's options under their whole names, defaults written out.

    Nothing where `fanout` says all.
    """
    _, options = sampler_options(config)
    if config.fanout is not None:
        return {}
    values = asdict(options)  # type: ignore[call-overload]
    return {f"{PREFIX}{name}": value for name, value in values.items()}


def check_neighbors(config: RunConfig, neighbors: Neighbors, model: AnyModel) -> None:
    """Raise `ConfigError` where a model cannot be trained on what a sampler draws."""
    reason = neighbors.why_not(model)
    if reason is not None:
        raise ConfigError(
            f"expected a model that takes the draws of neighbors={config.neighbors}, got "
            f"{config.model}: {reason}; use neighbors=full or fanout"
        )
