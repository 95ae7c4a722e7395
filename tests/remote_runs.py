"""Runs of methods over a session in which both ends hold each other to the program."""

from collections.abc import Sequence
from typing import Any

import torch

from runs import FAST
from sessions import DirectLink, session, table
from silograph.core.config import make_config
from silograph.experiment.resolve.data import clients_of
from silograph.experiment.resolve.resolve import DTYPES, choose
from silograph.experiment.resolve.run_program import program_of
from silograph.experiment.run.progress import Silent, TrackerGroup
from silograph.experiment.run.result import Result
from silograph.experiment.run.run import first_snapshot, train
from silograph.experiment.run.setup import Setup, prepare
from silograph.federation.base import Op
from silograph.federation.ledger import Record
from silograph.federation.secure.sums import SecureSums
from silograph.federation.session.engine import Session
from silograph.federation.session.message import own_ops
from silograph.graph.graph import Graph
from silograph.methods.base import Method


def setup_of(graph: Graph, method: Method, **options: Any) -> Setup:
    """A short run in blocks of one client, as a session has them."""
    given = {**FAST, "block_size": 1, **options, "method": method.name}
    asked = make_config(given)
    return prepare(asked, graph, choose(asked, method))


def remote(
    setup: Setup, *ops: Op, least: int | None = None, **session_options: Any
) -> tuple[Setup, dict[str, DirectLink]]:
    """Return the run over a session, with some ops beside silograph's own, and its links."""
    dtype: torch.dtype = DTYPES[setup.config.dtype]
    _, whole, route = clients_of(setup.config, setup.parts, setup.cut.graph, dtype)
    cfg = setup.method_config
    program = program_of(setup.config, setup.schema, setup.method, cfg)
    known = {**own_ops(), **table(*ops)}
    sums = SecureSums(whole.num_clients, 2) if setup.config.secure_aggregation else None
    fed, links = session(
        whole, route, cfg, known, program=program, least=least, secure=sums, **session_options
    )
    return with_engine(setup, fed), links


def with_engine(setup: Setup, fed: Session) -> Setup:
    return Setup(setup.config, setup.parts, setup.schema, setup.method_config, fed, setup.device)


def finish(setup: Setup) -> Result:
    """Train from the first round to the last."""
    return train(setup, None, Silent(), first_snapshot(setup), [], TrackerGroup(()))


def lines(records: Sequence[Record]) -> list[str]:
    return [record.to_line() for record in records]
