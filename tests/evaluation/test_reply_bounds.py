"""Sums of scores that no score can give are refused, whoever sends them."""

import pytest
import torch

from layers import model_of
from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.payload import Stacked
from silograph.evaluation.evaluation_steps import server_steps
from silograph.federation.field_specs import Extent
from silograph.federation.program import Call, calls_of

EXTENT = Extent(1, torch.float32, {})


def reply_to(call: Call) -> dict[str, Stacked]:
    """The reply of a silo that has nothing to count."""
    return {
        name: Stacked(torch.zeros(1, *(n or 0 for n in spec.shape), dtype=spec.dtype))
        for name, spec in call.gives.items()
    }


@pytest.mark.parametrize("name", ["score.sum", "score.square"])
@pytest.mark.parametrize("value", [1.7e308, -1.7e308])
def test_sums_of_scores_are_those_of_scores(name: str, value: float) -> None:
    call = next(calls_of(server_steps(model_of("gcn", 7, 3), Key.of(0))))
    reply = reply_to(call)
    call.check_reply({}, reply, EXTENT)
    reply[name].t[0, 1] = value
    with pytest.raises(ProtocolError, match=f"expected values .* for '{name}' in reply of judge_"):
        call.check_reply({}, reply, EXTENT)
