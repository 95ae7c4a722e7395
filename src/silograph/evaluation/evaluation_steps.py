"""The calls of evaluations, which silos hold their server to."""

from collections.abc import Callable
from functools import lru_cache
from types import MappingProxyType

import torch

from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Stacked
from silograph.core.row_minimum import NO_MINIMUM, RowMinimum
from silograph.evaluation.evaluate import judge_exchanged, judge_own, judge_server
from silograph.evaluation.ranking import ranking_steps
from silograph.exchange.passes import divisible, predict_steps
from silograph.federation.base import Op
from silograph.federation.field_specs import TEST, VAL, FieldSpec, FieldSpecs
from silograph.federation.program import Call, Maybe, Steps
from silograph.graph.graph import LabelForm
from silograph.nn.any_model import AnyModel
from silograph.task.base import CountSpec
from silograph.task.counts import CountRules
from silograph.task.least_count import MERGED, specs_to_send
from silograph.task.plausible import count_problem
from silograph.task.registry import task_of


def server_steps(model: AnyModel, takes: FieldSpecs, key: Key, rules: CountRules) -> Steps:
    """Return the calls of `server_counts`; `takes`: specs of the weights as they travel."""
    return judged_steps(judge_server, takes, model, key, rules)


def received_steps(
    model: AnyModel, takes: FieldSpecs, key: Key, rules: CountRules, *, ranks: bool
) -> Steps:
    """Return the calls of `received_counts`, which may be left out.

    Args:
        model: of the run.
        takes: specs of the weights as they travel.
        key: of the calls.
        rules: what the replies hold.
        ranks: whether clients rank, too.
    """
    ranking = ranking_steps("server", key) if ranks else ()
    return Maybe((server_steps(model, takes, key, rules), ranking))


def exchanged_steps(
    model: AnyModel, key: Key, rules: CountRules, behind: RowMinimum = NO_MINIMUM
) -> Steps:
    """Return the calls of `exchanged_counts`."""
    predicted = predict_steps(divisible(model), key, behind=behind)
    return predicted, judged_steps(judge_exchanged, {}, model, key, rules)


def own_steps(model: AnyModel, key: Key, rules: CountRules) -> Steps:
    """Return the calls of `own_counts`."""
    return judged_steps(judge_own, {}, model, key, rules)


def judged_steps(
    judge: Op, takes: FieldSpecs, model: AnyModel, key: Key, rules: CountRules
) -> Steps:
    """Return the call of `call_for_counts`."""
    specs = tally_specs(model.task, model.outputs, rules)
    return (Call(judge, Kind.EVALUATION, key, takes, specs, tallies(model, rules)),)


def tallies(
    model: AnyModel, rules: CountRules, under: str = ""
) -> Callable[[Payload, Payload], str | None]:
    """Return what looks at counts in a reply, of fields whose names begin with `under`."""

    def problem(_: Payload, reply: Payload) -> str | None:
        counts = {n.removeprefix(under): f.t for n, f in reply.items() if n.startswith(under)}
        return count_problem(model.task, counts, rules.min_count)

    return problem


@lru_cache(maxsize=16)  # programs ask for specs in every round
def tally_specs(labels: LabelForm, outputs: int, rules: CountRules) -> FieldSpecs:
    """Return what clients report of their judged rows."""
    counts = specs_to_send(task_of(labels), outputs, rules)
    specs = {
        n: FieldSpec(Stacked, c.shape, c.dtype, low=c.low, high=c.high, among=_nodes_in(n, c))
        for n, c in counts.items()
    }
    return MappingProxyType(specs)


def _nodes_in(name: str, count: CountSpec) -> str:
    """Return which nodes a count is a number of; nothing for sums, over merged classes, too."""
    part, _, rest = name.partition(".")
    numbers = part in (VAL, TEST) and count.dtype is torch.int32
    return part if numbers and not rest.startswith(f"{MERGED}.") else ""
