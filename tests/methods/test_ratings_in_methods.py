"""Laws of methods on rating graphs: one client is all, tables stay, runs resume, silos agree."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

import silograph as sg
from leaks import blocks_of
from rating_graphs import rating_graph
from remote_runs import finish, lines, remote, setup_of
from runs import (
    SCORING_COSTS,
    assert_close,
    dying,
    files_of,
    rows_of,
    run_until,
    same_bits,
    weights_of,
)
from silograph.core.config import make_config
from silograph.core.key import Key
from silograph.core.payload import Payload, Ragged, take
from silograph.experiment.run.setup import Setup, prepare
from silograph.federation.frame import Envelope
from silograph.federation.in_process import BlockHost, InProcess
from silograph.graph.block.block import whole
from silograph.methods import METHODS
from silograph.nn.rating_steps import rating_graph as messages_of

OPTIONS: dict[str, Any] = {
    "model": "rating_gcn",
    "clients": 3,
    "partition": "category",
    "split": "0.6/0.2/0.2",
    "rounds": 3,
    "hidden": 4,
    "layers": 2,
    "dropout": 0.2,
    "lr": 0.02,
    "local_epochs": 2,
    "dtype": "float64",
    "options": {"embedding": 6},
}
LOCAL = ("fedavg", "fedopt", "fedprox", "scaffold", "fedper", "local")


def options_of(method: str, **changed: Any) -> dict[str, Any]:
    sgd = {"optimizer": "sgd"} if method == "scaffold" else {}
    return {**OPTIONS, **sgd, "method": method, **changed}


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("model", ["rating_gcn", "rating_gat"])
@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedper", "local"])
def test_methods_beat_the_mean(method: str, model: str) -> None:
    graph = rating_graph(30, 40, 600)
    heads = {"heads": 2} if model == "rating_gat" else {}
    changed = {"model": model, "rounds": 10, "local_epochs": 10, "dropout": 0.0}
    given = options_of(method, **changed)
    given["options"] = given["options"] | heads
    result = sg.run(graph, **given)
    assert result.test.personalized is not None
    assert result.baseline is not None
    assert result.test.personalized.rmse < result.baseline.rmse  # type: ignore[operator]


def test_one_client_with_all_edges_is_the_centralized_run() -> None:
    graph = rating_graph()
    alone = {name: value for name, value in OPTIONS.items() if name != "partition"}
    central = sg.run(
        graph, **alone | {"method": "centralized", "partition": "random", "clients": 1}
    )
    given = {
        **alone,
        "clients": 1,
        "method": "fedavg",
        "partition": whole(graph),
        "keep_optimizer": True,
    }
    ours = sg.run(graph, **given)
    assert_close(ours, central, 1e-12, *SCORING_COSTS)


def test_tables_ids_and_ratings_never_leave(
    monkeypatch: pytest.MonkeyPatch, setups: list[Setup]
) -> None:
    """No payload of a client has a row of its tables, a rating, or what names a node."""
    sent: list[tuple[Envelope, Payload]] = []
    carried = BlockHost._send_over_wire

    def spy(self: BlockHost, envelope: Envelope, payload: Payload, clients: int) -> Payload:
        for position in range(clients):
            sent.append(
                (envelope, {n: take(f, torch.tensor([position])) for n, f in payload.items()})
            )
        return carried(self, envelope, payload, clients)

    monkeypatch.setattr(BlockHost, "_send_over_wire", spy)
    for method in LOCAL:
        sg.run(rating_graph(), **options_of(method, strict=True, block_size=1, relevant=4.0))
    names = {name for _, payload in sent for name in payload}
    assert {f"weights/{n}" for n in setups[-1].method_config.model.weight_shapes} <= names
    assert not any(isinstance(f, Ragged) for _, payload in sent for f in payload.values())
    sizes = {name: f.t.numel() for _, payload in sent for name, f in payload.items()}
    of_weights = ("weights/", "private/", "variates/")
    assert {size for name, size in sizes.items() if not name.startswith(of_weights)} == {1}
    said = {x for _, payload in sent for f in payload.values() for x in f.t.flatten().tolist()}
    for setup in setups:
        for block, state in zip(blocks_of(setup), setup.federation.states(), strict=True):
            own = [f.t.flatten().tolist() for n, f in state.items() if n.startswith("tables/")]
            assert not said & ({*chain.from_iterable(own)} - {0.0})
            assert not said & {*block.row_key.tolist()}


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("method", ["fedavg", "local"])
@pytest.mark.parametrize("every", [1, 2])
def test_a_run_that_died_resumes_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, every: int
) -> None:
    graph, out = rating_graph(), tmp_path / "cut"
    options = options_of(method, checkpoint_every=every, participation=0.6)
    sg.run(graph, **options, out=str(tmp_path / "whole"))
    run_until(monkeypatch, graph, 1, out, **options)
    with dying(monkeypatch, 2):
        sg.resume(out, graph=graph)
    sg.resume(out, graph=graph)
    assert files_of(out) == files_of(tmp_path / "whole")


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("method", ["fedavg", "fedper", "local"])
def test_a_session_of_silos_is_the_simulation(method: str) -> None:
    given = options_of(method)
    del given["method"]
    own = {"fanout": None, "neighbors": None}
    here = setup_of(rating_graph(), METHODS[method], **own | given)
    there, _ = remote(here)
    ours, theirs = finish(here), finish(there)
    assert same_bits(weights_of(ours), weights_of(theirs))
    skipped = {name for name in rows_of(ours)[0] if name.startswith("bytes")}
    for a, b in zip(rows_of(ours), rows_of(theirs), strict=True):
        assert {k: v for k, v in a.items() if k not in skipped} == {
            k: v for k, v in b.items() if k not in skipped
        }
    assert lines(ours.ledger.records) == lines(theirs.ledger.records)


def test_engines_and_blocks_agree_and_tables_have_rows_of_own_users_and_items_only() -> None:
    graph = rating_graph()
    results = [sg.run(graph, **options_of("fedavg", strict=strict)) for strict in (False, True)]
    assert same_bits(*(weights_of(result) for result in results))
    setup = prepare(make_config(options_of("fedavg")), graph)
    assert isinstance(setup.federation, InProcess)
    setup.method.init(setup.federation, setup.method_config, {}, Key.of(1))
    for block, state in zip(setup.federation._host.blocks, setup.federation.states(), strict=True):
        known = messages_of(block.all, torch.float64)
        assert len(state["tables/embedding"].t) == len(known.key) <= len(known.slot) + 2


def test_the_optimizer_of_tables_is_kept_where_that_of_weights_is() -> None:
    """Two rounds with a kept optimizer are one of twice as many epochs."""
    graph = rating_graph()
    given = options_of("local", dropout=0.0, partition="random", clients=1, keep_optimizer=True)
    twice = sg.run(graph, **given | {"rounds": 2, "local_epochs": 3})
    once = sg.run(graph, **given | {"rounds": 1, "local_epochs": 6})
    ends = [rows_of(result)[-1]["test_personalized_rmse"] for result in (twice, once)]
    assert ends[0] == pytest.approx(ends[1], abs=1e-12)
    fresh = sg.run(graph, **given | {"rounds": 2, "local_epochs": 3, "keep_optimizer": False})
    assert rows_of(fresh)[-1]["test_personalized_rmse"] != pytest.approx(ends[1], abs=1e-9)


def test_fedacs_is_fedavg_with_the_bandit_to_the_bit() -> None:
    graph, own = rating_graph(), {"selector.level": "number", "selector.budget": 60_000}
    given = options_of("fedacs", rounds=4, clients=4)
    given["options"] = given["options"] | own
    ours, theirs = sg.run(graph, **given), sg.run(graph, **given, selector="ucb")
    plain = sg.run(graph, **given | {"method": "fedavg"}, selector="ucb")
    assert ours.config == theirs.config
    assert (ours.config.selector, ours.config.method) == ("ucb", "fedacs")
    assert rows_of(ours) == rows_of(plain)
    assert same_bits(weights_of(ours), weights_of(plain))
    everyone = sg.run(graph, **options_of("fedacs", selector="all"))
    assert rows_of(everyone) == rows_of(sg.run(graph, **options_of("fedavg")))


@pytest.mark.law(sample=3)
@pytest.mark.parametrize("selector", ["ucb", "power_of_choice", "oort", "round_robin"])
def test_selectors_choose_among_clients_with_ratings(selector: str) -> None:
    given = options_of("fedavg", selector=selector, rounds=5, clients=4)
    first, again = (sg.run(rating_graph(), **given) for _ in range(2))
    assert rows_of(first) == rows_of(again)
    assert first.test.server is not None
    if selector == "ucb":
        assert {row["participants"] for row in first.rounds[:4]} == {1, 2, 3, 4}
