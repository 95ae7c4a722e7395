"""Histograms that no counts can have are refused, whoever sends them."""

import pytest
import torch

from layers import model_of
from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.payload import Stacked
from silograph.evaluation.evaluate import server_steps
from silograph.federation.field_specs import Extent
from silograph.federation.program import Call, calls_of
from silograph.task.counts import CountRules

EXTENT = Extent(1, torch.float32, {})


def reply_to(call: Call) -> dict[str, Stacked]:
    """The reply of a silo that has nothing to count."""
    return {
        name: Stacked(torch.zeros(1, *(n or 0 for n in spec.shape), dtype=spec.dtype))
        for name, spec in call.reply_specs.items()
    }


@pytest.mark.parametrize("part", ["val", "test"])
@pytest.mark.parametrize("value", [-1, 1, 2**31 - 1])
def test_a_histogram_is_that_of_the_counts_beside_it(part: str, value: int) -> None:
    rules = CountRules(val_histogram=True)
    call = next(calls_of(server_steps(model_of("gcn", 7, 3), {}, Key.of(0), rules)))
    reply = reply_to(call)
    call.check_reply({}, reply, EXTENT)
    reply[f"{part}.histogram"].t[0, 1, 1, 7] = value
    with pytest.raises(ProtocolError, match=r"^expected .* in reply of judge_server"):
        call.check_reply({}, reply, EXTENT)


@pytest.mark.parametrize("part", ["val", "test"])
@pytest.mark.parametrize("value", [1, 4, 5])
def test_bins_have_the_least_count_of_the_run(part: str, value: int) -> None:
    """A silo that sends a bin of fewer scores is refused, whatever its counts say besides."""
    rules = CountRules(5, val_histogram=True)
    call = next(calls_of(server_steps(model_of("gcn", 7, 3), {}, Key.of(0), rules)))
    reply = reply_to(call)
    reply[f"{part}.nodes"].t[0] = 5 * value
    for name, number in (("known", 5 * value), ("tp", 5 * value)):
        reply[f"{part}.{name}"].t[0, 1] = number
    for name, number in (("known", 10 * value),):
        reply[f"{part}.merged.{name}"].t[0] = number
    reply[f"{part}.histogram"].t[0, 1, 1, 10:15] = value
    if value == 5:
        call.check_reply({}, reply, EXTENT)
        return
    line = f"^expected {part} histogram bins of 0 or at least 5 nodes, got one of {value} in reply"
    with pytest.raises(ProtocolError, match=line):
        call.check_reply({}, reply, EXTENT)
