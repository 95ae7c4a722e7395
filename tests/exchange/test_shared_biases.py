"""Laws of shared biases: equal to those of all ratings, in any order, and what leaves a silo."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import silograph as sg
from rating_graphs import rating_graph
from remote_runs import finish, lines, remote, setup_of
from runs import rows_of, run_until, same_bits, weights_of
from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.payload import Payload, Ragged, Stacked
from silograph.exchange.collect import local_graph
from silograph.exchange.shared_biases import (
    SIDES,
    _ratings_of,
    share_biases,
    sharing_of,
    sharing_steps,
)
from silograph.experiment.resolve.data import clients_of
from silograph.experiment.resolve.run_program import beyond_weights
from silograph.experiment.run.setup import Setup
from silograph.federation.field_specs import TRAIN, Extent
from silograph.federation.in_process import InProcess
from silograph.federation.matching import user_tags
from silograph.federation.program import Call, calls_of
from silograph.graph.graph import Graph, pairs_among
from silograph.graph.silos.export import write_silos
from silograph.graph.silos.read import read_silo
from silograph.methods import METHODS

KEY, WIDE = Key.of(1), torch.float64
OPTIONS: dict[str, Any] = {
    "clients": 3,
    "partition": "random",
    "split": "0.6/0.2/0.2",
    "rounds": 2,
    "hidden": 4,
    "lr": 0.02,
    "dtype": "float64",
    "model": "rating_biases",
}


def options(shared: str = "all", min_silos: int = 2, **changed: Any) -> dict[str, Any]:
    own = {"model.shared": shared, "model.min_silos": min_silos, "model.damping": 2.0}
    return OPTIONS | {"options": own} | changed


def shared_runs(
    graph: Graph, order: tuple[int, ...] = (0, 1, 2), **given: Any
) -> tuple[Setup, InProcess, list[Tensor]]:
    """Share biases; return the run, its clients in this order, and what each of them predicts."""
    run = setup_of(graph, METHODS["fedavg"], **options(**given))
    _, whole, route = clients_of(run.config, run.parts, run.cut.graph, WIDE)
    fed = InProcess(run.method_config, whole.take(torch.tensor(order)), route, 1, strict=True)
    model = run.method_config.model
    sharing = sharing_of(model)
    assert sharing is not None
    share_biases(fed, sharing, KEY)
    weights = model.init_weights(KEY, WIDE)
    predicted = [
        model.forward(weights, local_graph(whole.take(torch.tensor([client])), state))[:, 0]
        for client, state in zip(order, fed.states(), strict=True)
    ]
    return run, fed, predicted


def test_biases_are_those_of_all_ratings_together() -> None:
    """With a least number of 1: the minimum for all training ratings, by its normal equations."""
    run, _, predicted = shared_runs(rating_graph(), min_silos=1)
    graph, train = run.cut.graph, run.cut.split.train
    assert isinstance(graph.x, Tensor)
    pairs = pairs_among(graph.x, graph.adj)
    y, trains = graph.y[pairs.row].numpy(), train[pairs.row].numpy()
    design = np.zeros((len(y), graph.num_nodes))
    for ends in (pairs.user, pairs.item):
        design[np.arange(len(y)), ends] = 1
    a, mean = design[trains], y[trains].mean()
    normal = a.T @ a + 2.0 * np.eye(graph.num_nodes)
    bias = np.linalg.solve(normal, a.T @ (y[trains] - mean))
    expected = torch.zeros(graph.num_nodes, dtype=WIDE)
    expected[pairs.row] = torch.from_numpy(mean + design @ bias)
    for nodes, own in zip(run.cut.partition.nodes, predicted, strict=True):
        assert torch.allclose(own, expected[nodes], rtol=0, atol=1e-3)


def test_two_silos_by_hand() -> None:
    """One item is shared, of two in each silo, so means are half way: 3.5 and 2.5."""
    table = [["ann", "tea", 5], ["bob", "tea", 1], ["ann", "mug", 3], ["bob", "pot", 3]]
    graph = sg.ratings(table, categories=["a", "b", "a", "b"])
    own = {"model.shared": "items", "model.min_silos": 2, "model.damping": 1.0}
    run = setup_of(
        graph,
        METHODS["fedavg"],
        **OPTIONS | {"clients": 2, "partition": "category", "split": "1/0/0", "options": own},
    )
    sharing = sharing_of(run.method_config.model)
    assert sharing is not None
    sizes = share_biases(run.federation, sharing, KEY)
    assert sizes == {"user": 0, "item": 1}
    state = run.federation.states()[0]
    assert state["shared/number/item"].t.tolist() == [1]
    # By symmetry the shared item's bias is 0. In the first silo, with residuals 1.5 and -0.5:
    # ann = (1.5 - 0.5 - mug) / 3 and mug = (-0.5 - ann) / 2, so ann = 0.5. Bob is the opposite.
    assert state["shared/mean"].t.tolist() == [3.5]
    assert state["shared/total/item"].t.tolist() == pytest.approx([-1.5 + 0.5], abs=1e-3)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("shared", ["items", "all"])
def test_the_order_of_clients_does_not_matter(shared: str) -> None:
    order = (2, 0, 1)
    _, _, one = shared_runs(rating_graph(), shared=shared)
    _, _, other = shared_runs(rating_graph(), order, shared=shared)
    for place, client in enumerate(order):
        assert torch.allclose(one[client], other[place], rtol=0, atol=1e-10)


@pytest.mark.parametrize("min_silos", [2, 3])
def test_rows_of_fewer_silos_stay_where_they_are(
    min_silos: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that the server sends is of a user or item that fewer silos have rated."""
    sent: dict[str, list[tuple[Payload, Payload]]] = {}
    call = InProcess.call

    def spy(fed: InProcess, op: Any, inbox: Payload, **how: Any) -> Payload:
        reply = call(fed, op, inbox, **how)
        sent.setdefault(op.__name__, []).append((inbox, reply))
        return reply

    monkeypatch.setattr(InProcess, "call", spy)
    shared_runs(rating_graph(), min_silos=min_silos)
    (_, own), (places, _) = sent["send_tags"][0], sent["store_places"][0]
    for side in SIDES:
        tag, rated, place = own[f"tag/{side}"], own[f"rated/{side}"], places[f"place/{side}"]
        assert isinstance(tag, Ragged)
        assert isinstance(place, Ragged)
        raters: dict[int, int] = {}
        for word, number in zip(tag.t.tolist(), rated.t.tolist(), strict=True):
            raters[word] = raters.get(word, 0) + (number > 0)
        own_tags = [tag.t[a:b] for a, b in zip(tag.off, tag.off[1:], strict=False)]
        ends = zip(place.off, place.off[1:], strict=False)
        for words, (a, b) in zip(own_tags, ends, strict=True):
            shared = {int(word) for word in words[place.t[a:b].long()]}
            assert shared == {int(word) for word in words if raters[int(word)] >= min_silos}
    for inbox, _ in sent["send_user_sums"] + sent["send_item_sums"] + sent["store_sums"]:
        for name, field in inbox.items():
            side = "user" if "user" in name else "item"
            assert torch.equal(field.off, places[f"place/{side}"].off)  # type: ignore[union-attr]


def test_a_server_that_makes_up_biases_learns_who_rated_what(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """docs/reference/what_leaves_a_silo.md: powers of two as biases show rated items."""
    call = InProcess.call
    learned: list[list[set[int]]] = []

    def probe(fed: InProcess, op: Any, inbox: Payload, **how: Any) -> Payload:
        reply = call(fed, op, inbox, **how)
        if op.__name__ != "send_user_sums" or learned:
            return reply
        items, users = inbox["item"], reply["user"]
        assert isinstance(items, Ragged)
        assert isinstance(users, Ragged)
        powers = [2.0 ** torch.arange(int(n), dtype=WIDE) for n in items.off.diff()]
        probed = call(fed, op, {"item": Ragged(items.t - torch.cat(powers), items.off)}, **how)
        codes = (probed["user"].t - users.t).round().long()
        for a, b in zip(users.off, users.off[1:], strict=False):
            sets = [{i for i in range(52) if code >> i & 1} for code in codes[a:b].tolist()]
            learned.append(sets)
        return call(fed, op, inbox, **how)

    monkeypatch.setattr(InProcess, "call", probe)
    run, fed, _ = shared_runs(rating_graph(), min_silos=2)
    _, whole, _ = clients_of(run.config, run.parts, run.cut.graph, WIDE)
    count = 0
    for client, (sets, state) in enumerate(zip(learned, fed.states(), strict=True)):
        ratings = _ratings_of(whole.take(torch.tensor([client])))
        rows = {
            side: ratings.row[side][state[f"shared/place/{side}"].t.long()].tolist()
            for side in SIDES
        }
        pairs = set(zip(*(ratings.ends[side].tolist() for side in SIDES), strict=True))
        for user, items in zip(rows["user"], sets, strict=True):
            assert items == {i for i, item in enumerate(rows["item"]) if (user, item) in pairs}
            count += len(items)
    assert count > 50


def test_without_shared_rows_nothing_changes() -> None:
    """Silos that have no item in common predict with their own biases, to the bit."""
    graph = rating_graph(30, 40, 500)
    given = {"partition": "category", "method": "fedavg"}
    alone, together = (
        sg.run(graph, **options(shared, min_silos, **given))
        for shared, min_silos in (("none", 2), ("items", 4))  # of 3 clients
    )
    assert alone.test == together.test
    assert alone.untrained["silo biases"] == together.untrained["silo biases"]
    assert alone.bytes < together.bytes


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("model", ["rating_biases", "rating_profiles"])
def test_a_session_and_a_resumed_run_have_the_same_bits(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, own = rating_graph(), options(model=model, batch_size=32)
    whole = finish(setup_of(graph, METHODS["fedavg"], **own))
    far = finish(remote(setup_of(graph, METHODS["fedavg"], **own))[0])
    assert rows_of(whole) == rows_of(far)
    assert same_bits(weights_of(whole), weights_of(far))
    assert lines(whole.ledger.records) == lines(far.ledger.records)
    run_until(monkeypatch, graph, 1, tmp_path / "a", method="fedavg", **own | {"rounds": 3})
    again = sg.resume(tmp_path / "a", graph=graph)
    straight = sg.run(graph, method="fedavg", **own | {"rounds": 3})
    assert rows_of(again) == rows_of(straight)
    assert same_bits(weights_of(again), weights_of(straight))


def test_it_helps_where_items_are_shared() -> None:
    graph = rating_graph(60, 40, 1200)
    alone, items, together = (
        sg.run(graph, method="fedavg", **options(shared)) for shared in ("none", "items", "all")
    )
    scores = [run.test.server for run in (alone, items, together)]
    rmse = [score["rmse"] or 0.0 for score in scores if score is not None]
    assert rmse[2] < rmse[1] < rmse[0]


def test_a_silo_must_allow_items_and_users() -> None:
    for shared, names in (("none", ()), ("items", ("items",)), ("all", ("items", "users"))):
        run = setup_of(rating_graph(), METHODS["fedavg"], **options(shared))
        assert beyond_weights(run.config, run.method, run.method_config) == names


@pytest.mark.parametrize("method", ["local", "centralized"])
def test_baselines_share_nothing(method: str) -> None:
    result = sg.run(rating_graph(), method=method, **options())
    assert "statistics" not in result.ledger.bytes_by_kind


def test_tags_of_users_need_a_secret(tmp_path: Path) -> None:
    """With one, a user has one tag everywhere that no other secret gives; without, none."""
    run = setup_of(rating_graph(), METHODS["fedavg"], **options())
    paths = write_silos(tmp_path / "s", run.cut.graph, run.cut.partition, run.cut.split)
    silos = [read_silo(path) for path in paths]
    one, other = bytes(range(32)), bytes(range(1, 33))
    by_key = [dict(zip(silo.keys, user_tags(silo, one).tolist(), strict=True)) for silo in silos]
    both = by_key[0].keys() & by_key[1].keys()
    assert both
    assert all(by_key[0][key] == by_key[1][key] for key in both)
    assert not {*user_tags(silos[0], one).tolist()} & {*user_tags(silos[0], other).tolist()}
    assert not {*user_tags(silos[0], None).tolist()} & {*user_tags(silos[0], None).tolist()}


def tags_of_one(**change: Any) -> dict[str, Any]:
    off = torch.tensor([0, 2])
    fields: dict[str, Any] = {
        "ratings": Stacked(torch.tensor([3])),
        "total": Stacked(torch.tensor([9.0], dtype=WIDE)),
    }
    for side in SIDES:
        fields[f"tag/{side}"] = Ragged(torch.tensor([4, 7]), off)
        fields[f"rated/{side}"] = Ragged(torch.tensor([1, 2], dtype=torch.int32), off)
    return fields | {name.replace("__", "/"): field for name, field in change.items()}


def test_a_silo_cannot_report_ratings_that_cannot_be() -> None:
    run = setup_of(rating_graph(), METHODS["fedavg"], **options())
    sharing = sharing_of(run.method_config.model)
    assert sharing is not None
    calls: dict[str, Call] = {c.op.__name__: c for c in calls_of(sharing_steps(sharing, KEY))}
    extent, off = Extent(1, WIDE, {}, {TRAIN: 3}), torch.tensor([0, 2])
    call = calls["send_tags"]
    call.check_reply({}, tags_of_one(), extent)
    for change, line in (
        ({"ratings": Stacked(torch.tensor([4]))}, "at most the 3 train nodes"),
        ({"total": Stacked(torch.tensor([torch.nan], dtype=WIDE))}, "a sum of at most 1e"),
        ({"total": Stacked(torch.tensor([1e12], dtype=WIDE))}, "a sum of at most 1e"),
        ({"tag__user": Ragged(torch.tensor([7, 4]), off)}, "ascending numbers"),
        (
            {"rated__item": Ragged(torch.tensor([2, 2], dtype=torch.int32), off)},
            "at most as many ratings of each item as in all",
        ),
        (
            {"rated__item": Ragged(torch.tensor([-1, 2], dtype=torch.int32), off)},
            "values from 0",
        ),
    ):
        with pytest.raises(ProtocolError, match=line):
            call.check_reply({}, tags_of_one(**change), extent)
    some = Ragged(torch.tensor([1.0], dtype=WIDE), torch.tensor([0, 1]))
    broken = Ragged(torch.tensor([torch.inf], dtype=WIDE), torch.tensor([0, 1]))
    with pytest.raises(ProtocolError, match="finite"):
        calls["send_item_sums"].check_reply({"user": some}, {"item": broken}, extent)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("own_secrets", [False, True])
def test_real_silos_find_their_users_by_a_secret(tmp_path: Path, own_secrets: bool) -> None:
    """With one secret for all they score as a simulation; with others only items are shared."""
    pytest.importorskip("grpc")
    pytest.importorskip("cryptography")
    from silograph.deploy.server_settings import ServerSettings
    from silos import config_of, federate, folders

    given = options(partition="category", method="fedavg", rounds=1)
    config = config_of(3, **{name: value for name, value in given.items() if name != "clients"})
    paths = folders(rating_graph(), config, tmp_path / "silos")
    if own_secrets:
        for number, path in enumerate(paths):
            (path / "secret").write_bytes(bytes([number] * 32))
            (path / "secret").chmod(0o600)
    venue = ServerSettings("127.0.0.1:0", insecure=True, patience=600)
    result = federate(paths, config, venue, own_secrets=own_secrets)
    shared = "items" if own_secrets else "all"
    own = {**config.options, "model.shared": shared}
    silos = sg.read_silos(paths[0].parent)
    simulated = sg.run(silos, config=result.config, options=own)
    assert "shared: 20 users and 0 items are in two clients or more" in simulated.summary()
    assert simulated.test.server == result.test.server
