"""Kernels take subnormal numbers for 0, and threads that run none do not."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from silograph.graph.block.block import ClientBlock, Route
from silograph.graph.graph import Graph
from silograph.nn.backends import COMPILED, TORCH
from silograph.nn.fit import Schedule, Training
from silograph.nn.kernel_block import flush_subnormals, run_in_threads
from silograph.nn.model import Model
from silograph.nn.optim import SGD

pytestmark = pytest.mark.skipif(
    not torch.set_flush_denormal(False), reason="this processor cannot take such numbers for 0"
)

TINY = np.float32(1e-40)
MakeGraph = Callable[..., Graph]
CutBlock = Callable[..., tuple[ClientBlock, Route]]


def product() -> float:
    """Return what this thread makes of a number below the least normal one."""
    return float(TINY * np.float32(1))


@pytest.fixture
def kept() -> Iterator[None]:
    """Leave the thread as it was."""
    yield
    torch.set_flush_denormal(False)


def test_only_what_is_inside_is_flushed() -> None:
    with ThreadPoolExecutor(1) as other:
        assert other.submit(product).result() > 0
        with flush_subnormals():
            assert product() == 0
            with flush_subnormals():
                assert product() == 0
            assert product() == 0
            assert other.submit(product).result() > 0
    assert product() > 0


def test_where_a_processor_cannot_do_it_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_flush_denormal", lambda _: False)
    with flush_subnormals():
        assert product() > 0


def test_steps_without_data_are_flushed() -> None:
    training = Training(Model("gcn", 2, 2, 1, 2, 0.0, "multiclass"), SGD(0.1, 0.5), Schedule(1))
    start = torch.full((2, 3), 1e-40)
    assert not COMPILED.untouched_rows_after(training, start, 1).any()
    assert TORCH.untouched_rows_after(training, start, 1).all()


def test_an_error_inside_ends_it() -> None:
    with pytest.raises(KeyError), flush_subnormals():
        raise KeyError
    assert product() > 0


@pytest.mark.usefixtures("kept")
def test_a_caller_that_wants_it_keeps_it() -> None:
    torch.set_flush_denormal(True)
    with flush_subnormals():
        assert product() == 0
    assert product() == 0


@pytest.mark.parametrize("threads", [1, 2])
def test_every_thread_of_a_block_is_flushed(
    cut_block: CutBlock, make_graph: MakeGraph, threads: int
) -> None:
    block, before = cut_block(make_graph())[0], torch.get_num_threads()
    found: list[float] = []
    torch.set_num_threads(threads)
    try:
        run_in_threads(block, lambda _first, _end: found.append(product()))
    finally:
        torch.set_num_threads(before)
    assert found == [0.0] * min(threads, block.num_clients)
    assert product() > 0
