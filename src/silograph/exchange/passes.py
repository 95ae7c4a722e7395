"""Passes through a model whose sums over neighbors reach other silos: what the server does.

The clients' side, and where all of it comes from, is `silograph.exchange.stages`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import MappingProxyType

import torch
from torch import Tensor

from silograph.core.errors import ConfigError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Shared, Stacked, named, under
from silograph.core.row_minimum import NO_MINIMUM, RowMinimum
from silograph.exchange.rows import Relayed, relay_steps, relay_sum
from silograph.exchange.stages import (
    absorb,
    begin,
    contribute,
    hand_in,
    lose,
    return_sums,
    walk_back,
)
from silograph.federation.base import Federation, Op, Sum
from silograph.federation.field_specs import COUNT, LOSS, FieldSpec, FieldSpecs, exactly
from silograph.federation.program import Call, Steps
from silograph.nn.any_model import AnyModel
from silograph.nn.conv import Params
from silograph.nn.forward import Staged
from silograph.nn.stage_halves import scales_of

Carry = Callable[[Federation, Mapping[str, Shared], Key], Relayed | None]
CarrySteps = Callable[[FieldSpecs, int, Key], Steps]


@dataclass(frozen=True)
class Crossing:
    """How the sums of a stage come to hold what other silos know.

    Attributes:
        forward: carries a stage on; gets what its ops are told, `stage`, and the step's key;
            returns what it carried, if these are sums.
        backward: the way back.
        forward_steps: the calls of `forward`, from specs of what ops are told, the width of the
            stage's sum, and the key.
        backward_steps: those of `backward`.
    """

    forward: Carry
    backward: Carry
    forward_steps: CarrySteps
    backward_steps: CarrySteps


def share_sums(
    fed: Federation,
    told: Mapping[str, Shared],
    key: Key,
    *,
    what: Kind = Kind.PARTIAL_SUMS,
    silos: int = 1,
    lacking: bool = False,
) -> Relayed:
    """Add up partial sums at the rows' owners, those with as many silos behind them."""
    return relay_sum(
        fed, contribute, absorb, what=what, key=key, inbox=told, silos=silos, lacking=lacking
    )


def share_cotangents(
    fed: Federation, told: Mapping[str, Shared], key: Key, *, silos: int = 1
) -> Relayed:
    """Add up partial sums of the gradients at the rows' owners, likewise."""
    what = Kind.COTANGENTS
    return relay_sum(fed, return_sums, walk_back, what=what, key=key, inbox=told, silos=silos)


def sums_steps(
    told: FieldSpecs,
    width: int,
    key: Key,
    *,
    what: Kind = Kind.PARTIAL_SUMS,
    named: bool = False,
    behind: RowMinimum = NO_MINIMUM,
) -> Steps:
    """Return the calls of `share_sums`; `named`: whether not all rows take part."""
    return relay_steps(
        contribute,
        absorb,
        what=what,
        key=key,
        width=width,
        named=named,
        behind=behind,
        inbox=told,
    )


def cotangents_steps(
    told: FieldSpecs,
    width: int,
    key: Key,
    *,
    named: bool = False,
    behind: RowMinimum = NO_MINIMUM,
) -> Steps:
    """Return the calls of `share_cotangents`."""
    return relay_steps(
        return_sums,
        walk_back,
        what=Kind.COTANGENTS,
        key=key,
        width=width,
        named=named,
        behind=behind,
        inbox=told,
    )


def by_sums(*, named: bool = False, behind: RowMinimum = NO_MINIMUM) -> Crossing:
    """Return the crossing of partial sums; `named`: whether not all rows take part."""
    return Crossing(
        partial(share_sums, silos=behind.silos),
        partial(share_cotangents, silos=behind.silos),
        partial(sums_steps, named=named, behind=behind),
        partial(cotangents_steps, named=named, behind=behind),
    )


def noted(crossing: Crossing, carried: list[Relayed]) -> Crossing:
    """Return the same crossing; what its sums have carried is added to a list."""

    def noting(carry: Carry) -> Carry:
        def carry_on(fed: Federation, told: Mapping[str, Shared], key: Key) -> None:
            found = carry(fed, told, key)
            carried.extend([] if found is None else [found])

        return carry_on

    return replace(crossing, forward=noting(crossing.forward), backward=noting(crossing.backward))


BY_SUMS = by_sums()


def divisible(model: AnyModel) -> Staged:
    """Return the model; raise `ConfigError` unless silos can share the sums of every stage."""
    if model.staged is None:
        raise ConfigError(
            f"expected one of silograph's own models for sums over all silos, got {model.noun}, "
            "whose sums are its own affair: use model=gcn, graphconv, gin, sage or appnp"
        )
    for stage in model.staged.stages:
        if stage.conv.sums:
            scales_of(stage.conv)
    return model.staged


def predict(
    fed: Federation,
    model: Staged,
    weights: Mapping[str, Tensor],
    key: Key,
    first: Op | None = None,
    behind: RowMinimum = NO_MINIMUM,
) -> None:
    """Leave the model's logits at the clients, complete sums over all silos' neighbors.

    Nothing is dropped, and all is counted as evaluation.

    Args:
        fed: the federation.
        model: the shape.
        weights: the server's.
        key: of the pass.
        first: finishes the stage that features enter without other silos, and the pass then goes on
            without silos that are away; None: it is as others.
        behind: what must stand behind rows.
    """
    _begin(fed, weights, key, train=False)
    for told in with_sums(model):
        if first is not None and int(told["stage"].t) == 0:
            fed.call(first, {}, what=Kind.EVALUATION, key=key)
        else:
            what, lacking = Kind.EVALUATION, first is not None
            share_sums(fed, told, key, what=what, silos=behind.silos, lacking=lacking)


@lru_cache(maxsize=64)  # programs ask for specs in every round
def weight_specs(
    model: AnyModel | Staged, form: type[Shared] | type[Stacked], prefix: str = "weights"
) -> FieldSpecs:
    """Return the specs of the weights of a model, or of what has their shapes."""
    shapes = model.weight_shapes.items()
    return MappingProxyType({f"{prefix}/{name}": FieldSpec(form, shape) for name, shape in shapes})


def predict_steps(
    model: Staged, key: Key, first: Op | None = None, behind: RowMinimum = NO_MINIMUM
) -> Steps:
    """Return the calls of `predict`."""
    what = Kind.EVALUATION
    steps: tuple[Steps, ...] = (begin_step(model, key, train=False),)
    for told, width in sum_specs(model):
        if first is not None and told["stage"].low == 0:
            steps = (*steps, Call(first, what, key))
        else:
            steps = (*steps, sums_steps(told, width, key, what=what, behind=behind))
    return steps


def begin_step(model: Staged, key: Key, *, train: bool, op: Op = begin) -> Call:
    """Return the call that starts a pass, by default that of all stages."""
    takes = {**weight_specs(model, Shared), "train": exactly(train, torch.bool)}
    what = Kind.WEIGHTS if train else Kind.EVALUATION
    return Call(op, what, key, takes, {"part": COUNT, "all": COUNT})


def _begin(
    fed: Federation, weights: Mapping[str, Tensor], key: Key, *, train: bool
) -> dict[str, Tensor]:
    """Start a pass; return `part` and `all`, training rows that take part and all there are."""
    inbox: Payload = {
        **{name: Shared(w) for name, w in named("weights", weights).items()},
        "train": Shared(torch.tensor(train)),
    }
    what = Kind.WEIGHTS if train else Kind.EVALUATION
    counts = fed.call(begin, inbox, what=what, key=key, reduce=Sum())
    return {name: field.t for name, field in counts.items()}


def forward(
    fed: Federation,
    model: Staged,
    weights: Mapping[str, Tensor],
    key: Key,
    crossing: Crossing = BY_SUMS,
) -> dict[str, Tensor]:
    """Leave the model's logits at the clients, with dropout, and all that the way back needs.

    Returns:
        `part` and `all`, the number of training rows that take part and of all.
    """
    counts = _begin(fed, weights, key, train=True)
    for told in with_sums(model):
        crossing.forward(fed, told, key)
    return counts


def gradients(
    fed: Federation,
    model: Staged,
    weights: Mapping[str, Tensor],
    key: Key,
    *,
    weighed: bool = False,
    crossing: Crossing = BY_SUMS,
) -> tuple[Params, float | None]:
    """Return the gradient of the loss of all silos' training rows, and the loss.

    Args:
        fed: the federation.
        model: the shape.
        weights: the server's.
        key: key of the step.
        weighed: whether rows' losses have weights whose mean over the training rows of all silos
            is 1; the loss is divided by their number then, else by that of those that take part.
        crossing: how sums reach other silos.

    Returns:
        Gradients by name, without those that are 0 for want of rows; None for the loss if no
        training row takes part.
    """
    counts = forward(fed, model, weights, key, crossing)
    count = counts["all" if weighed else "part"]
    total = {"count": Shared(count.clamp(min=1))}
    loss = fed.call(lose, total, what=Kind.CONTROL, key=key, reduce=Sum())["loss"]
    for told in reversed(with_sums(model)):
        crossing.backward(fed, told, key)
    reply = fed.call(hand_in, {}, what=Kind.GRADIENTS, key=key, reduce=Sum())
    return under("gradient", reply), float(loss.t) if int(counts["part"]) else None


def gradient_steps(model: Staged, key: Key, crossing: Crossing = BY_SUMS) -> Steps:
    """Return the calls of `gradients`."""
    sums = sum_specs(model)
    count = {"count": FieldSpec(Shared, (), torch.int64, low=1)}
    gives = weight_specs(model, Stacked, "gradient")
    return (
        begin_step(model, key, train=True),
        *(crossing.forward_steps(told, width, key) for told, width in sums),
        Call(lose, Kind.CONTROL, key, count, {"loss": LOSS}),
        *(crossing.backward_steps(told, width, key) for told, width in reversed(sums)),
        Call(hand_in, Kind.GRADIENTS, key, {}, gives),
    )


def sum_specs(model: Staged) -> list[tuple[FieldSpecs, int]]:
    """Return, for every stage that has a sum, specs of what its ops are told, and its width."""
    shapes = model.weight_shapes
    found: list[tuple[FieldSpecs, int]] = []
    for number, stage in enumerate(model.stages):
        if stage.conv.sums:
            maps = stage.conv.maps  # what the rows are mapped by before they are summed
            width = shapes[f"{number}.{maps[0]}"][-1] if maps else stage.inputs
            found.append(({"stage": exactly(number)}, width))
    return found


def with_sums(model: Staged) -> list[dict[str, Shared]]:
    """Return what ops are told of every stage that has a sum."""
    numbers = [number for number, stage in enumerate(model.stages) if stage.conv.sums]
    return [{"stage": Shared(torch.tensor(number, dtype=torch.int32))} for number in numbers]
