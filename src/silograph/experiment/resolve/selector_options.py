"""The selector of a run and its options, which are those of the run that begin with `selector.`."""

from collections.abc import Mapping

from silograph.core.config import RunConfig, Scalar, checked
from silograph.core.errors import ConfigError, lookup
from silograph.methods.base import Method
from silograph.selection import ALL, SELECTORS, UNIFORM, Selector
from silograph.selection.uniform import UniformOptions

PREFIX = "selector."


def without_selector(options: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the options that are not the selector's."""
    return {name: value for name, value in options.items() if not name.startswith(PREFIX)}


def selector_of(config: RunConfig, method: Method) -> tuple[Selector, object]:
    """Return the selector of a run and its checked options.

    Raises:
        ConfigError: an unknown selector (names the nearest) or option, a value out of range, a
            share beside a selector that takes none, or a method in which all clients train.
    """
    selector = lookup(SELECTORS, config.selector, "selector")
    if (method.evaluate.all_silos or method.setting.uncut) and selector is not UNIFORM:
        raise ConfigError(
            f"expected a method that trains locally for selector {selector.name}, got "
            f"{method.name}, in which all clients train in every round: leave selector out"
        )
    own = {n.removeprefix(PREFIX): v for n, v in config.options.items() if n.startswith(PREFIX)}
    if selector is UNIFORM:
        if own:
            raise ConfigError(
                f"expected no options of selector uniform, got {min(own)!r}: its share is "
                "participation"
            )
        return selector, UniformOptions(config.participation)
    if config.participation != 1:
        raise ConfigError(
            f"expected participation 1 with selector {selector.name}, got {config.participation}: "
            f"the share belongs to selector {UNIFORM.name}"
        )
    return selector, checked(selector.options, own, f"options of selector {selector.name}")


def draws_at_the_server(selector: Selector) -> bool:
    """Whether the run draws clients before a round; `all` and `uniform` need nothing from it."""
    return selector is not ALL and selector is not UNIFORM
