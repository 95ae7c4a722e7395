"""Aggregators, by the name that users give: what the server makes of the clients' weights.

`mean` is folded while replies arrive. All others see the weights client by client, so the server
holds one model for every client of the federation meanwhile. k: clients that trained.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass as checked
from torch import Tensor

from silograph.core.config import STRICT
from silograph.core.errors import ProtocolError
from silograph.core.setting_values import lin

Combine = Callable[[Any, Tensor, Mapping[str, Tensor]], Mapping[str, Tensor]]
ROBUST = (
    "Yin et al., Byzantine-robust distributed learning: towards optimal statistical rates, "
    "ICML 2018"
)


@dataclass(frozen=True)
class Aggregator:
    """An aggregator.

    Attributes:
        name: what users call it.
        title: one line for listings.
        reference: title, authors, venue, year.
        options: frozen dataclass of its own options.
        combine: from options, training nodes (k,) int64 and weights by name, (k, ...), of the
            clients that trained: weights by the same names, (...). It changes nothing that it is
            given. None: the mean weighted by training nodes.
    """

    name: str
    title: str
    reference: str
    options: type
    combine: Combine | None


@checked(frozen=True, config=STRICT)
class NoAggregatorOptions:
    """Options of aggregators that have none."""


@checked(frozen=True, config=STRICT)
class TrimmedMeanOptions:
    """The help text is the documentation of the field."""

    trim: Annotated[float, Field(ge=0, lt=0.5)] = field(
        default=0.1,
        metadata={
            "help": "share of the clients left out at each end, of every weight by itself",
            "tune": lin(0.0, 0.4),
        },
    )


def median(options: object, nodes: Tensor, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the median of every weight; of an even number, the mean of the middle two."""
    del options, nodes
    return {name: _mean_of_middle(w, (len(w) - 1) // 2) for name, w in weights.items()}


def trimmed_mean(
    options: TrimmedMeanOptions, nodes: Tensor, weights: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Return the mean of every weight without the ceil(trim k) smallest and largest values.

    So a trim above 0 leaves out the extremes of three clients and more.
    """
    most_cut = (len(nodes) - 1) // 2
    cut = min(math.ceil(options.trim * len(nodes) - ROUNDING), most_cut)
    return {name: _mean_of_middle(w, cut) for name, w in weights.items()}


def _mean_of_middle(w: Tensor, cut: int) -> Tensor:
    """Return the mean over dim 0 without `cut` values at each end; NaN counts as the largest."""
    return w.sort(0).values[cut : len(w) - cut].mean(0)


ROUNDING = 1e-9  # .1 times 30 is a little more than 3


MEAN = Aggregator(
    name="mean",
    title="the mean, weighted by training nodes",
    reference="McMahan et al., Communication-efficient learning of deep networks from "
    "decentralized data, AISTATS 2017",
    options=NoAggregatorOptions,
    combine=None,
)
MEDIAN = Aggregator("median", "the median of every weight", ROBUST, NoAggregatorOptions, median)
TRIMMED_MEAN = Aggregator(
    "trimmed_mean",
    "the mean of every weight without its extremes",
    ROBUST,
    TrimmedMeanOptions,
    trimmed_mean,
)
AGGREGATORS: dict[str, Aggregator] = {a.name: a for a in (MEAN, MEDIAN, TRIMMED_MEAN)}


def combine_weights(
    aggregator: Aggregator, options: object, nodes: Tensor, weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Combine weights (k, ...), k >= 1, by an aggregator, in the dtype of each.

    Raises:
        ProtocolError: a user's own returns other names or shapes.
    """
    assert aggregator.combine is not None  # the mean is folded
    new_weights = aggregator.combine(options, nodes, weights)
    one_client = {name: w[0] for name, w in weights.items()}
    check_shapes(f"aggregator {aggregator.name}", one_client, new_weights)
    return {name: new_weights[name].to(w.dtype) for name, w in weights.items()}


def check_shapes(
    part: str, weights: Mapping[str, Tensor], new_weights: Mapping[str, Tensor]
) -> None:
    """Raise `ProtocolError` unless what a part of the server returns has the shapes of weights."""
    for name in {**weights, **new_weights}:
        expected_shape = tuple(weights[name].shape) if name in weights else None
        shape = tuple(new_weights[name].shape) if name in new_weights else None
        if expected_shape != shape:
            raise ProtocolError(
                f"expected weights of the same names and shapes, without clients, from {part}, "
                f"got {shape} for {name!r} of shape {expected_shape}"
            )
