"""Histograms that no counts can have are refused, whoever sends them."""

import pytest
import torch

from layers import model_of
from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.payload import Stacked
from silograph.evaluation.evaluation_steps import server_steps
from silograph.federation.field_specs import Extent
from silograph.federation.program import Call, calls_of
from silograph.task.counts import CountRules

EXTENT = Extent(1, torch.float32, {})


def reply_to(call: Call) -> dict[str, Stacked]:
    """The reply of a silo that has nothing to count."""
    return {
        name: Stacked(torch.zeros(1, *(n or 0 for n in spec.shape), dtype=spec.dtype))
        for name, spec in call.gives.items()
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
