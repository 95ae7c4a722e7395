"""Races: rounds of several sides in turn, which first show that they train the same weights."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

import torch
from cells import FASTEST, VARIANTS, Row, Shape
from loop import PlainLoop, TunedLoop, best_form
from side import Ours
from timing import Act, Plan, medians, ratios, take_turns

from silograph.experiment.resolve.resolve import DTYPES
from silograph.experiment.run.setup import Setup, prepare
from silograph.graph.block.block import make_block
from silograph.graph.datasets import load
from silograph.graph.graph import Graph
from silograph.nn.conv import Params

GUARD_ROUNDS = 2
# Most that logits may be apart. In float32 Adam turns the rounding of a gradient near 0 into a
# step, so that float64 has to tell whether the same is computed.
TOLERANCE = {"float64": 1e-8, "float32": 1e-2}


class Side(Protocol):
    """A runner of a race."""

    @property
    def weights(self) -> Params:
        """The averaged model."""

    def round(self) -> object:
        """Run one round and judge it."""


@lru_cache(maxsize=1)
def graph_of(dataset: str, data_dir: str | None) -> Graph:
    """Return a graph; the last one is kept, as neighboring cells share it."""
    return load(dataset, data_dir=data_dir)


def ours(shape: Shape, plan: Plan, **options: Any) -> Ours:
    """Return silograph's side of a shape."""
    return Ours(prepare(shape.config(**options), graph_of(shape.dataset, plan.data_dir)))


def logits_apart(
    sides: Mapping[str, Side], reference: str, setup: Setup, dtype: str
) -> dict[str, float]:
    """Return how far each side's logits are from the reference's after some rounds.

    Args:
        sides: by name, without dropout.
        reference: name of one of them.
        setup: a set-up of ours with their graph and model.
        dtype: precision of all sides.

    Raises:
        RuntimeError: a side does other work than the reference.
    """
    block, _ = make_block(setup.cut.graph, setup.cut.partition, setup.cut.split, DTYPES[dtype])
    logits = {}
    for name, side in sides.items():
        for _ in range(GUARD_ROUNDS):
            side.round()
        with torch.no_grad():
            logits[name] = setup.method_config.model.forward(side.weights, block)
    wanted = logits.pop(reference)
    apart = {name: float((out - wanted).abs().max()) for name, out in logits.items()}
    if not all(gap <= TOLERANCE[dtype] for gap in apart.values()):  # NaN fails too
        raise RuntimeError(
            f"expected {dtype} logits within {TOLERANCE[dtype]:g} of the {reference}'s after "
            f"{GUARD_ROUNDS} rounds, got {apart}: the sides do not do the same work"
        )
    return {name: float(f"{gap:.2g}") for name, gap in apart.items()}


def sides_of(
    shape: Shape, plan: Plan, form: str | None, dtype: str = "float32"
) -> tuple[dict[str, Side], str, Setup]:
    """Return all sides with the same first weights, the tuned loop's form, and a set-up of ours.

    Args:
        shape: the federation.
        plan: where the data are.
        form: how the tuned loop holds features; None tries all forms.
        dtype: precision of all sides.
    """
    mine = {name: ours(shape, plan, dtype=dtype, **own) for name, own in VARIANTS.items()}
    setup, weights = mine[FASTEST].setup, mine[FASTEST].weights
    form = form or best_form(setup.cut, setup.config, weights)
    plain = PlainLoop(setup.cut, setup.config, weights)
    tuned = TunedLoop(setup.cut, setup.config, weights, form)
    return {"loop": plain, "tuned": tuned, **mine}, form, setup


def agreement(shape: Shape, plan: Plan, form: str, dtype: str) -> dict[str, float]:
    """Return how far each side's logits are from the loop's after some rounds without dropout."""
    sides, _, setup = sides_of(replace(shape, dropout=0.0), plan, form, dtype)
    return logits_apart(sides, "loop", setup, dtype)


def race(shape: Shape, plan: Plan) -> Row:
    """Race the loops and every variant of ours."""
    sides, form, setup = sides_of(shape, plan, None)
    apart = {dtype: agreement(shape, plan, form, dtype) for dtype in TOLERANCE}
    spent = take_turns({name: side.round for name, side in sides.items()}, plan)
    return {
        "apart": apart,
        "form": form,
        "turns": len(spent["loop"]),
        "seconds_a_round": {name: medians(turns) for name, turns in spent.items()},
        "over_loop": {name: ratios(spent, "loop", name) for name in ("tuned", *VARIANTS)},
        "over_tuned": {name: ratios(spent, "tuned", name) for name in VARIANTS},
        "partition": setup.cut.partition.hash,
    }


def pair(one: Act, other: Act, plan: Plan, rounds: int | None = None) -> Row:
    """Time rounds of two sides; return the ratio of the first to the second.

    Args:
        one: the first.
        other: the second.
        plan: how to measure.
        rounds: of a turn; None as in `take_turns`.
    """
    spent = take_turns({"one": one, "other": other}, plan, rounds)
    return {
        "turns": len(spent["one"]),
        "seconds_a_round": [medians(spent["one"]), medians(spent["other"])],
        "ratio": ratios(spent, "one", "other"),
    }
