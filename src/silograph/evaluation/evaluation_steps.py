"""The calls of evaluations, which silos hold their server to."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

import torch

from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Shared, Stacked
from silograph.core.row_minimum import NO_MINIMUM, RowMinimum
from silograph.evaluation.evaluate import (
    HISTOGRAM,
    VAL_HISTOGRAM,
    bin_own,
    bin_own_val,
    bin_server,
    bin_server_val,
    judge_exchanged,
    judge_own,
    judge_server,
)
from silograph.exchange.passes import divisible, predict_steps, weight_specs
from silograph.federation.base import Op
from silograph.federation.field_specs import TEST, VAL, FieldSpec, FieldSpecs
from silograph.federation.program import Call, Maybe, Steps
from silograph.graph.graph import LabelForm
from silograph.nn.any_model import AnyModel
from silograph.task.base import CountSpec
from silograph.task.counts import BINS, LEAST_DEVIATION
from silograph.task.plausible import count_problem
from silograph.task.registry import task_of


def validation_steps(
    model: AnyModel, whose: Literal["server", "own"], key: Key
) -> tuple[Call, ...]:
    """Return the call of `with_validation`."""
    sort = bin_server_val if whose == "server" else bin_own_val
    scale, bins = _histogram_specs(model.outputs)
    val = replace(bins[HISTOGRAM], among=VAL)
    return (Call(sort, Kind.EVALUATION, key, scale, {VAL_HISTOGRAM: val}),)


def server_steps(model: AnyModel, key: Key) -> Steps:
    """Return the calls of `server_counts`."""
    weights = weight_specs(model, Shared)
    return judged_steps(judge_server, bin_server, weights, model, key)


def received_steps(model: AnyModel, key: Key, *, everyone: bool) -> Steps:
    """Return the calls of `received_counts`; `everyone`: whether all clients score on receipt."""
    steps = server_steps(model, key)
    assert isinstance(steps, tuple)  # the scores, and histograms if the task has any
    return steps[1:] if everyone else (Maybe(steps[0]), *steps[1:])


def exchanged_steps(model: AnyModel, key: Key, behind: RowMinimum = NO_MINIMUM) -> Steps:
    """Return the calls of `exchanged_counts`."""
    predicted = predict_steps(divisible(model), key, behind=behind)
    return predicted, judged_steps(judge_exchanged, bin_server, {}, model, key)


def own_steps(model: AnyModel, key: Key) -> Steps:
    """Return the calls of `own_counts`."""
    return judged_steps(judge_own, bin_own, {}, model, key)


def judged_steps(judge: Op, sort: Op, takes: FieldSpecs, model: AnyModel, key: Key) -> Steps:
    """Return the calls of `tallied_counts`."""
    what = Kind.EVALUATION
    judged = Call(judge, what, key, takes, tally_specs(model.task, model.outputs), tallies(model))
    if not task_of(model.task).histograms:
        return (judged,)
    scale, bins = _histogram_specs(model.outputs)
    return judged, Call(sort, what, key, scale, bins)


def tallies(model: AnyModel, under: str = "") -> Callable[[Payload, Payload], str | None]:
    """Return what looks at counts in a reply, of fields whose names begin with `under`."""

    def problem(_: Payload, reply: Payload) -> str | None:
        counts = {n.removeprefix(under): f.t for n, f in reply.items() if n.startswith(under)}
        return count_problem(model.task, counts)

    return problem


@lru_cache(maxsize=16)  # programs ask for specs in every round
def _histogram_specs(classes: int) -> tuple[FieldSpecs, FieldSpecs]:
    """Return the scale that histograms are made on, and what they are."""
    scale = {
        "mean": FieldSpec(Shared, (classes,), torch.float64),
        "deviation": FieldSpec(Shared, (classes,), torch.float64, low=LEAST_DEVIATION),
    }
    bins = FieldSpec(Stacked, (classes, 2, BINS), torch.int32, low=0, among=TEST)
    return MappingProxyType(scale), MappingProxyType({HISTOGRAM: bins})


@lru_cache(maxsize=16)
def tally_specs(labels: LabelForm, outputs: int) -> FieldSpecs:
    """Return what `Task.tally` gives."""
    counts = task_of(labels).counts(outputs)
    specs = {
        n: FieldSpec(Stacked, c.shape, c.dtype, low=c.low, high=c.high, among=_nodes_in(n, c))
        for n, c in counts.items()
    }
    return MappingProxyType(specs)


def _nodes_in(name: str, count: CountSpec) -> str:
    """Return which nodes a count is a number of; nothing for sums."""
    part = name.partition(".")[0]
    return part if part in (VAL, TEST) and count.dtype is torch.int32 else ""
