"""Options of the selectors that have a flag of their own, and those that all have.

Nothing here needs torch.
"""

from dataclasses import field
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from silograph.core.config import MOST, STRICT
from silograph.core.errors import ConfigError, mistake
from silograph.core.setting_values import parse_bytes

LIMITS = ("budget", "least_clients", "least_selections")  # options that any selector may have
Budget = Annotated[Annotated[int, Field(ge=1, lt=MOST)] | None, BeforeValidator(parse_bytes)]
Least = Annotated[int, Field(ge=1, lt=MOST)] | None
DEFAULT_CLIENTS = 10  # in a round, where they are chosen by what they have shown


def budget_field() -> Any:
    """Return the field of the budget of all rounds together."""
    text = "bytes of all rounds without evaluation, kept before the fact, e.g. 10MB; none: no limit"
    return field(default=None, metadata={"help": text})


def least_clients_field() -> Any:
    """Return the field of the least number of clients in a round."""
    return field(default=None, metadata={"help": "least clients in a round; none: 1"})


def least_selections_field() -> Any:
    """Return the field of the least number of selections in all rounds together."""
    text = "least selections of clients in all rounds together; none: 0"
    return field(default=None, metadata={"help": text})


def clients_field() -> Any:
    """Return the field of the number of clients in a round."""
    text = f"clients in a round; none: {DEFAULT_CLIENTS}, or all if there are fewer"
    return field(default=None, metadata={"help": text})


def clients_of_round(clients: int | None, num_clients: int) -> int:
    """Return the number of clients of a round, by the option `clients`.

    An option above the number of clients, which older runs may have, means all clients.
    """
    return min(DEFAULT_CLIENTS if clients is None else clients, num_clients)


def check_at_most(name: str, value: int | None, most: int, what: str) -> None:
    """Raise `ConfigError` where an option of a selector is above what the federation has.

    Args:
        name: of the option, without `selector.`.
        value: of it, None if it was left out.
        most: that there are.
        what: there are.
    """
    if value is not None and value > most:
        raise ConfigError(
            f"option selector.{name}: expected at most {most}, the number of {what}, got {value}: "
            "lower it, or leave it out",
            **mistake("option-value", f"selector.{name}", value),
        )


@dataclass(frozen=True, config=STRICT)
class AllOptions:
    """The help texts are the documentation of the fields."""

    budget: Budget = budget_field()
    least_clients: Least = least_clients_field()
    least_selections: Least = least_selections_field()


@dataclass(frozen=True, config=STRICT)
class UniformOptions:
    """The help texts are the documentation of the fields."""

    participation: Annotated[float, Field(gt=0, le=1)] = field(
        default=1.0, metadata={"help": "share of clients that train in a round"}
    )
    budget: Budget = budget_field()
    least_clients: Least = least_clients_field()
    least_selections: Least = least_selections_field()
