"""The work that a call can be at most: a closed form, which honest runs stay far below."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from rating_graphs import rating_graph
from sessions import DirectLink, session, shares_of_work
from silograph.core.config import make_config
from silograph.core.errors import ProtocolError
from silograph.core.kinds import Kind
from silograph.core.payload import Shared
from silograph.core.work import Meter
from silograph.experiment.resolve.data import clients_of
from silograph.experiment.resolve.run_program import most_work, program_of
from silograph.experiment.run.progress import Silent, TrackerGroup
from silograph.experiment.run.run import first_snapshot, train
from silograph.experiment.run.setup import Setup, prepare
from silograph.federation.frame import decode
from silograph.federation.session.engine import Session, check_work
from silograph.federation.session.message import Type, own_ops, pack, read_reply, reply_body, unpack
from silograph.federation.session.peer import WorkBound
from silograph.graph.graph import Graph
from silograph.sampling.neighbors import NEIGHBORS

SHARE = 0.1  # of the bound, that honest work has at most
SIZES = {"train": 9, "val": 0, "test": 0, "rows": 100, "edges": 1000}
SMALL = {"clients": 3, "partition": "random", "hidden": 8, "rounds": 2, "block_size": 1}
RATED = {"partition": "category", "split": "0.6/0.2/0.2", "optimizer": "sgd", "lr": 0.02}
MODELS = (
    *("rating_gcn", "rating_gat", "rating_mf", "sorec", "soreg"),
    *("rating_profiles", "rating_biases", "consisrec"),
)


def setup_of(graph: Graph, **options: Any) -> Setup:
    return prepare(make_config({**SMALL, "method": "fedavg", **options}), graph)


def over_session(setup: Setup) -> tuple[Session, dict[str, DirectLink], Setup]:
    _, whole, _ = clients_of(setup.config, setup.parts, setup.cut.graph, torch.float32)
    agreed = program_of(setup.config, setup.schema, setup.method, setup.method_config)
    fed, links = session(
        whole,
        setup.federation.route,
        setup.method_config,
        own_ops(),
        least=1,
        program=agreed,
        most_work=partial(most_work, setup.config, setup.method, setup.method_config),
    )
    return fed, links, replace(setup, federation=fed, simulated=None, server_block=None)


def run(setup: Setup) -> None:
    train(setup, None, Silent(), first_snapshot(setup), [], TrackerGroup(()))


def shares(setup: Setup) -> list[float]:
    """The work of each reply of a run as a share of its bound."""
    fed, _, setup = over_session(setup)
    with shares_of_work() as found:
        run(setup)
    assert fed.away == ()
    return found


def bound_of(setup: Setup) -> WorkBound:
    found = most_work(setup.config, setup.method, setup.method_config, SIZES)
    assert found is not None
    return found


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("name", [name for name in NEIGHBORS if name not in ("full", "fanout")])
def test_honest_work_of_samplers(make_graph: Callable[..., Graph], name: str) -> None:
    """Methods are in the test of their programs, which looks at the same shares."""
    setup = setup_of(make_graph(60), neighbors=name, batch_size=3)
    found = shares(setup)
    assert 0 < max(found) < SHARE


@pytest.mark.law(sample=6)
@pytest.mark.parametrize(
    "options",
    [
        *({"model": name} for name in MODELS),
        {"model": "sorec", "method": "fedmf"},
        {"model": "rating_gat", "method": "fedgnn", "batch_size": 5},
    ],
    ids=str,
)
def test_honest_work_of_ratings(options: dict[str, Any]) -> None:
    found = shares(setup_of(rating_graph(), **RATED, **options))
    assert 0 < max(found) < SHARE


@pytest.mark.law(sample=6)
@pytest.mark.parametrize(
    ("graph", "options"),
    [
        (None, {"method": "fedsage_local"}),
        (None, {"neighbors": "fedgrains", "batch_size": 3}),
        (rating_graph, {"model": "rating_gcn", **RATED}),
    ],
    ids=["generator", "flow network", "ratings"],
)
def test_a_lie_beyond_the_bound_names_the_silo(
    make_graph: Callable[..., Graph],
    caplog: pytest.LogCaptureFixture,
    graph: Callable[[], Graph] | None,
    options: dict[str, Any],
) -> None:
    """It says so in round 1; the run goes on without the silo, and the ledger has none of it."""
    setup = setup_of(make_graph(60) if graph is None else graph(), **options)
    fed, links, setup = over_session(setup)
    bounds = [bound.fixed for bound in fed._most_work if bound is not None]

    def lies(data: bytes) -> bytes:
        message = unpack(data)
        if message.type is not Type.REPLY:
            return data
        meter, frame = read_reply(message.body)
        envelope, _ = decode(frame)
        meter.add_each(2 * bounds[1] * (envelope.round > 0))
        return pack(replace(message, body=reply_body(envelope.kind, meter, bytes(frame))))

    links["client_01"].change = lies
    run(setup)
    assert fed.away == ("client_01",)
    assert "round 1 has lost client_01: expected work of at most" in caplog.text
    assert 0 < fed.ledger.flops < sum(bounds) * len(fed.ledger)


def test_a_generator_compares_its_rows_with_all_that_a_call_brings(
    make_graph: Callable[..., Graph],
) -> None:
    """10 · 2 R for each number; the fixed part has the generated rows, the model's or its own.

    With 3 neighbors for each node at most: 400 rows, 1000 · 4 + 2 · 3 · 100 edges. The generator's
    maps from F features to H and back are P, and 9 steps of it more than 2 of the model's.
    """
    options = {"most": 3, "generator_width": 5, "generator_epochs": 9}
    setup = setup_of(make_graph(60), method="fedsageplus", hidden=2, options=options)
    f, h = setup.schema.num_features, 5
    maps = [(f, h), (f, h), (h,), (h, h), (h, h), (h,), (h, 1), (1,), (h, f), (f,)]
    weights, widths = sum(map(math.prod, maps)), sum(map(sum, maps))
    step = 6 * 400 * weights + 40 * (400 + 4600) * widths + 40 * weights
    assert bound_of(setup) == WorkBound(10 * 10 * step, 10 * 2 * 100)
    inbox = {"x": Shared(torch.zeros(7, f))}
    assert bound_of(setup).of(inbox) == 10 * 10 * step + 10 * 2 * 100 * 7 * f


def test_a_flow_network_is_in_each_hop_and_step(make_graph: Callable[..., Graph]) -> None:
    """9 training nodes in batches of 3, 2 layers, the flow network from F + 3 values to H and 1."""
    own = {"neighbors.width": 5}
    options = {"neighbors": "fedgrains", "batch_size": 3, "hidden": 4, "options": own}
    setup = setup_of(make_graph(60), layers=2, **options)
    f, k = setup.schema.num_features, setup.schema.num_classes
    maps = [(f, 4), (4,), (4, k), (k,), *2 * [(f + 3, 5), (5,), (5, 1), (1,)]]
    weights, widths = sum(map(math.prod, maps)), sum(map(sum, maps))
    step = 6 * 100 * weights + 40 * 1100 * widths + 40 * weights
    steps = 3 * setup.method_config.schedule.epochs + 1
    assert bound_of(setup) == WorkBound(10 * steps * step)


def test_tables_and_turns_of_ratings(make_graph: Callable[..., Graph]) -> None:
    """A table's columns count as widths; biases are solved in 300 turns of 4 operations a row."""
    mf = setup_of(rating_graph(), **{**RATED, "model": "rating_mf", "options": {"embedding": 6}})
    epochs = mf.method_config.schedule.epochs
    step = 6 * 100 * 1 + 40 * 1100 * (1 + 6 + 1) + 40 * 1
    assert bound_of(mf) == WorkBound(10 * (epochs + 1) * step)
    biases = setup_of(rating_graph(), **RATED, model="rating_biases")
    (shape,) = biases.method_config.model.weight_shapes.values()
    step = 6 * 100 * math.prod(shape) + 40 * 1100 * sum(shape) + 40 * math.prod(shape)
    assert bound_of(biases) == WorkBound(10 * ((epochs + 1) * step + 4 * 300 * 100))


def test_code_of_users_is_bounded_by_time_only(make_graph: Callable[..., Graph]) -> None:
    setup = setup_of(make_graph(60))
    for part in ("method", "model"):
        own: dict[str, Any] = {part: "own.py:PART"}
        config = replace(setup.config, **own)
        assert most_work(config, setup.method, setup.method_config, SIZES) is None
    assert most_work(setup.config, setup.method, setup.method_config, {"train": 9}) is None


@pytest.mark.parametrize("model", ["gcn", "sage"])
def test_work_is_bounded_by_the_model_and_what_silos_reported(
    make_graph: Callable[..., Graph], model: str
) -> None:
    """A silo that claims a thousand times its work is named; all honest work passes elsewhere.

    The bound is the closed form, for 2 epochs and one pass more: 10 · 3 · (6 R P + 40 (R + E) D +
    40 P), with one layer of P = F K (+ root) + K weights.
    """
    setup = setup_of(make_graph(60), model=model, layers=1, local_epochs=2, lr=0.1)
    features, classes = setup.schema.num_features, setup.schema.num_classes
    roots = 2 if model == "sage" else 1
    weights = roots * features * classes + classes
    widths = roots * (features + classes) + classes
    step = 6 * 100 * weights + 40 * 1100 * widths + 40 * weights
    assert bound_of(setup) == WorkBound(10 * 3 * step)
    bound = bound_of(setup).fixed
    meter = Meter(1)
    meter.add_each(bound)
    check_work(meter, 1.0, bound)
    meter.part(Kind.OPTIMIZER).add_each(bound)
    with pytest.raises(ProtocolError, match=r"expected work of at most .* operations, by the mod"):
        check_work(meter, 1.0, bound)
