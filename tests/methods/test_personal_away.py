"""A silo that is lost stops no personalized method: the others go on as if it were not selected."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from runs import same_bits
from sessions import session
from silograph.core.key import Key
from silograph.core.payload import Stacked
from silograph.federation.frame import decode, encode
from silograph.federation.in_process import InProcess
from silograph.federation.program import Program
from silograph.federation.session.message import Type, own_ops, pack, read_reply, reply_body, unpack
from silograph.graph.block.block import ClientBlock, Route
from silograph.graph.graph import Graph
from silograph.methods import FEDPER, FEDPUB, GCFL, GCFLPLUS, MethodConfig
from silograph.methods.base import AnyMethod
from silograph.nn.fit import Schedule
from silograph.nn.model import Model
from silograph.nn.optim import Adam
from silograph.sampling.fedgrains import FedGrains

KEY, FIRST, ROUNDS = Key.of(5), Key.of(9), 4
SPLITS: dict[str, Any] = {"epsilon1": 100.0, "epsilon2": 1e-6, "warmup": 1}
CASES: list[tuple[AnyMethod, dict[str, Any]]] = [
    (FEDPER, {}),
    (GCFL, SPLITS),
    (GCFLPLUS, SPLITS | {"sequence": 2}),
    (FEDPUB, {"communities": 1}),
]


def spoiled(data: bytes) -> bytes:
    """A reply whose weights are no numbers."""
    message = unpack(data)
    if message.type is not Type.REPLY:
        return data
    meter, frame = read_reply(message.body)
    envelope, fields = decode(frame)
    fields = {
        n: Stacked(torch.full_like(f.t, torch.nan)) if n.startswith("weights/") else f
        for n, f in fields.items()
    }
    body = reply_body(envelope.kind, meter, encode(envelope, fields, 0))
    return pack(replace(message, body=body))


@pytest.mark.law(sample=3)
@pytest.mark.parametrize(("method", "own"), CASES, ids=lambda case: getattr(case, "name", ""))
def test_the_others_go_on(
    make_graph: Callable[..., Graph],
    cut_block: Callable[..., tuple[ClientBlock, Route]],
    method: AnyMethod,
    own: dict[str, Any],
) -> None:
    """Models, clusters and series bit for bit, from the round in which a silo is lost."""
    graph = make_graph(60, sparse=True)
    block, route = cut_block(graph, 4)
    options = method.options(**own)
    cfg: MethodConfig = MethodConfig(
        model=Model("gcn", graph.num_features, 6, graph.num_classes, 2, 0.2, graph.task),
        optimizer=Adam(0.05, 5e-4),
        schedule=Schedule(1, 4, FedGrains(3, 2, width=4)),
        keep_optimizer=True,
        participation=1.0,
        options=options,
        corrections=method.needs.corrections(options),
    )
    calls = method.calls
    assert calls is not None
    agreed = Program(
        calls.setup(cfg, KEY), lambda t: calls.round(cfg, t, KEY), ROUNDS, calls.state(cfg)
    )
    remote, links = session(block, route, cfg, own_ops(), program=agreed, least=2)
    alone = InProcess(cfg, block, route, 1)
    weights = cfg.model.init_weights(FIRST, torch.float64)
    ours, theirs = (method.init(fed, cfg, weights, KEY) for fed in (remote, alone))
    for t in range(1, ROUNDS + 1):
        if t == 3:
            links["client_02"].change = spoiled
        for fed in (remote, alone):
            fed.start_round(t)
        left = tuple(name for name in alone.ids if t < 3 or name != "client_02")
        ours, report = method.round(remote, cfg, ours, t, KEY)
        theirs, expected = method.round(alone, replace(cfg, selected=left), theirs, t, KEY)
        assert same_bits(ours.memory, theirs.memory)
        assert report.facts == expected.facts
        assert report.train_loss == expected.train_loss
    assert remote.away == ("client_02",)
