"""A plain mean over clients of very unlike sizes is named before the run begins."""

import logging
from collections.abc import Callable

import pytest
import torch

import silograph as sg
from silograph.graph.graph import Graph

SIZES = {"even": (20, 20, 20), "one large": (54, 3, 3)}


@pytest.mark.law(sample=3)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("average", ["clients", "nodes"])
@pytest.mark.parametrize("method", ["fedais", "fedopt"])
def test_a_plain_mean_of_uneven_clients_is_named(
    make_graph: Callable[..., Graph],
    caplog: pytest.LogCaptureFixture,
    sizes: str,
    average: str,
    method: str,
) -> None:
    partition = torch.repeat_interleave(torch.arange(3), torch.tensor(SIZES[sizes]))
    options = {"average": average} if method == "fedais" else {}
    with caplog.at_level(logging.WARNING, logger="silograph"):
        sg.run(
            make_graph(60),
            partition=partition,
            split="0.34/0.33/0.33",
            method=method,
            options=options,
            rounds=1,
            hidden=4,
            kernels="torch",
        )
    lines = [record.getMessage() for record in caplog.records]
    is_named = any("average=nodes" in line for line in lines)
    assert is_named == (sizes == "one large" and method == "fedais" and average == "clients")
