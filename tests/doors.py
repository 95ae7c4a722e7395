"""A small block and its model, with what is refused beside them.

F: features. H: hidden width. K: classes. C: clients.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.graph.block.block import ClientBlock, Route
from silograph.graph.graph import Graph
from silograph.methods.base import MethodConfig, NoOptions
from silograph.nn.backends import BACKENDS
from silograph.nn.conv import Params
from silograph.nn.fit import Schedule, stacked_copies
from silograph.nn.model import Model
from silograph.nn.optim import Adam, Optimizer

MakeGraph = Callable[..., Graph]
CutBlock = Callable[..., tuple[ClientBlock, Route]]
KEY = Key.of(3)
F, H, K, C = 12, 6, 3, 4


@dataclass(frozen=True, eq=False)
class Case:
    model: Model
    block: ClientBlock
    route: Route

    @property
    def weights(self) -> Params:
        return self.model.init_weights(Key.of(1), torch.float64)

    def memory(self, optimizer: Optimizer) -> Params:
        return optimizer.init(stacked_copies(self.weights, C))

    def config(self, kernels: str = "torch") -> MethodConfig:
        adam, schedule = Adam(0.1), Schedule(1)
        return MethodConfig(
            self.model, adam, schedule, False, 1.0, NoOptions(), backend=BACKENDS[kernels]
        )


def case_of(make_graph: MakeGraph, cut_block: CutBlock, *, sparse: bool) -> Case:
    graph = make_graph(60, features=F, sparse=sparse)
    return Case(Model("gcn", F, H, K, 2, 0.5, "multiclass"), *cut_block(graph, C))


def refused(text: str) -> Any:
    return pytest.raises(ProtocolError, match=f"^{re.escape(text)}$")
