"""Options of the ways of cutting; the help texts are the documentation of the fields.

Nothing here needs torch, so that the command line knows them at once.
"""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from silograph.core.config import STRICT, Count

Spread = Literal["average", "skewed", "extreme"]
FAVORED = 2  # classes that `class_biased` favors where there are more


@dataclass(frozen=True, config=STRICT)
class NoPartitionOptions:
    """Options of a cut that has none of its own."""


@dataclass(frozen=True, config=STRICT)
class CategoryOptions:
    """See `silograph.graph.partition.cuts.category`."""

    column: str = field(
        default="category", metadata={"help": "column of the ratings whose values are dealt"}
    )
    spread: Spread = field(
        default="average",
        metadata={
            "help": "how unequal the numbers of values at clients are: average, skewed or extreme"
        },
    )


@dataclass(frozen=True, config=STRICT)
class DirichletOptions:
    """Beyond 1e6, shares are equal to six digits, and gamma draws overflow in the end."""

    alpha: Annotated[float, Field(gt=0, le=1e6)] = field(
        default=0.5, metadata={"help": "concentration, smaller is more skewed"}
    )


@dataclass(frozen=True, config=STRICT)
class ClassBiasedOptions:
    """See `class_biased`."""

    favored_classes: Count | None = field(
        default=None,
        metadata={
            "help": f"classes favored at each client, fewer than there are (default: {FAVORED}, or "
            "1 of two classes)"
        },
    )
    favor: Annotated[float, Field(ge=1)] = field(
        default=10.0, metadata={"help": "how many times as likely they are"}
    )


@dataclass(frozen=True, config=STRICT)
class LouvainOptions:
    """See `louvain`."""

    halve: bool = field(
        default=True,
        metadata={
            "help": "halve communities above a client's fair share, so that clients are of near "
            "equal size; false keeps them whole, and clients may differ much"
        },
    )


@dataclass(frozen=True, config=STRICT)
class MetisOverlappingOptions:
    """See `metis_overlapping`."""

    clients_per_part: Count = field(
        default=5, metadata={"help": "clients drawn from each part of METIS"}
    )
    part_share: Annotated[float, Field(gt=0, le=1)] = field(
        default=0.5, metadata={"help": "share of a part's nodes that each of them gets"}
    )


@dataclass(frozen=True, config=STRICT)
class SharesOptions:
    """See `shares`."""

    share_mean: Annotated[float, Field(gt=0, le=1)] = field(
        default=0.8, metadata={"help": "mean share of all nodes at a client"}
    )
    share_variance: Annotated[float, Field(ge=0)] = field(
        default=0.1, metadata={"help": "variance of that share"}
    )
    share_classes: Count | None = field(
        default=None,
        metadata={
            "help": "classes drawn for each client, whose nodes it draws from (default: all)"
        },
    )
