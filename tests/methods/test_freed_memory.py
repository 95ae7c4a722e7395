"""What a round has worked out is freed when it is over, without the collector of cycles."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

import silograph as sg
from silograph.experiment.run import run as loop
from silograph.graph.block.block import ClientBlock

CASES: dict[str, dict[str, Any]] = {
    "fedais": {"method": "fedais", "model": "sage", "options": {"batches": 10}},
    "fedais in torch": {
        "method": "fedais",
        "model": "sage",
        "options": {"batches": 10},
        "kernels": "torch",
    },
    "fedais without a halo": {"method": "fedlocal", "model": "sage", "options": {"batches": 10}},
    "fedavg": {"method": "fedavg", "batch_size": 2, "kernels": "torch"},
}


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("case", CASES)
def test_a_round_leaves_no_block_in_a_cycle(
    make_graph: Callable[..., sg.Graph],
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    participation: float,
) -> None:
    """With 1,000 clients of a few nodes such blocks held 60 MB a round until it came."""
    begin, finish, in_cycles = loop.begin_round, loop.finish_round, []
    gc.collect()
    gc.freeze()  # what was there before need not be walked through in every round, nor later

    def begin_watched(*args: Any) -> Any:
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        return begin(*args)

    def finish_watched(*args: Any) -> Any:
        try:
            return finish(*args)
        finally:
            gc.collect()
            # By type: `isinstance` would ask weak proxies of what is gone for their class.
            in_cycles.append([o for o in gc.garbage if issubclass(type(o), Tensor | ClientBlock)])
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()

    monkeypatch.setattr(loop, "begin_round", begin_watched)
    monkeypatch.setattr(loop, "finish_round", finish_watched)
    given: dict[str, Any] = {"clients": 30, "partition": "random", "hidden": 4, "rounds": 3}
    sg.run(make_graph(120), **given, **CASES[case], participation=participation)
    assert in_cycles == [[]] * 3
