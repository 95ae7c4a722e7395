"""The loop that FedAIS' speed is compared with does the same work."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "fedais"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "speed"))

import side
from fedais_loop import Loop, Rules

from conftest import MakeGraph
from silograph.core.config import make_config
from silograph.experiment.run.setup import prepare
from silograph.graph.block.block import make_block


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_the_loop_trains_the_weights_that_silograph_trains(
    make_graph: MakeGraph, tensors: bool, sparse: bool
) -> None:
    """Where nothing is drawn: one batch of all nodes, with all neighbors."""
    config = make_config(
        {
            "method": "fedais",
            "clients": 4,
            "partition": "random",
            "dtype": "float64",
            "model": "sage",
            "layers": 3,
            "hidden": "8,5",
            "head": "linear",
            "dropout": 0.0,
            "optimizer": "adam",
            "server_optimizer": "none",
            "lr": 0.01,
            "local_epochs": 1,
            "weight_decay": 1e-3,
            "rounds": 9,
            "options": {"nodes": "all", "batches": 1, "drawn": 0},
        }
    )
    ours = side.Ours(prepare(config, make_graph(sparse=sparse)))
    cut = ours.setup.cut
    block, route = make_block(cut.graph, cut.partition, cut.split, torch.float64)
    rules = Rules(batches=1, ratio=1, drawn=0, rate=0.01, tensors=tensors, fused=tensors)
    loop = Loop(block, route, ours.weights, rules)
    for _ in range(3):
        ours.train()
        loop.round()
    for name, w in ours.weights.items():
        torch.testing.assert_close(loop.weights[name], w, rtol=0, atol=1e-10)
