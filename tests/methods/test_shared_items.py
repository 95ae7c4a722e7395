"""Laws of methods that average rows of items: who has rated them, what noise does, what travels."""

import dataclasses
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import silograph as sg
from leaks import blocks_of
from policed import why_refused
from rating_graphs import rating_graph
from remote_runs import finish, lines, remote, setup_of
from runs import assert_close, dying, files_of, rows_of, run_until, same_bits, weights_of
from silograph.core.config import make_config
from silograph.core.errors import ConfigError
from silograph.core.key import Key
from silograph.core.payload import Payload, Ragged, Stacked, dense, fields_under, take
from silograph.deploy.policy import NO_POLICY, STRICT_POLICY, ProposedRun, policy_of
from silograph.deploy.server import check_deployable
from silograph.deploy.server_settings import ServerSettings, check_update_norm
from silograph.deploy.silo import parse_allowed_methods
from silograph.experiment.resolve.run_program import beyond_weights, program_of
from silograph.experiment.run.setup import Setup, prepare
from silograph.federation.base import WeightedMean, fold_of
from silograph.federation.frame import Envelope, decode, encode
from silograph.federation.in_process import BlockHost, InProcess
from silograph.federation.session.message import Type, pack, read_reply, reply_body, unpack
from silograph.graph.block.block import UNSEEN
from silograph.methods import METHODS
from silograph.methods.fedgnn import item_rows_of as sent_rows
from silograph.methods.fedgnn import laplace, normal
from silograph.methods.fedmf import LocalChange, item_changes
from silograph.methods.fesog import labeled_gradients, mean_size
from silograph.nn.rating_steps import rating_graph as messages_of
from silograph.nn.shared_items import ITEMS, item_counts, item_rows

ROWS = 300
OPTIONS: dict[str, Any] = {
    "model": "rating_mf",
    "clients": 3,
    "partition": "random",
    "split": "0.6/0.2/0.2",
    "rounds": 3,
    "hidden": 4,
    "layers": 2,
    "dropout": 0.0,
    "lr": 0.02,
    "local_epochs": 2,
    "dtype": "float64",
    "options": {"embedding": 3, "items": ROWS},
}
ITEM_WEIGHT, SHARE = f"weights/{ITEMS}", "share"
ALL = pytest.mark.parametrize("method", ["fedmf", "fedgnn", "fesog"])


def options_of(method: str, **changed: Any) -> dict[str, Any]:
    """Options of a run; `own` are those of the method."""
    own = {"pseudo": 20, "clip": 0.1, "noise": 0.01} if method in ("fedgnn", "fesog") else {}
    own |= changed.pop("own", {})
    found = {**OPTIONS, "method": method, **changed}
    return found | {"options": found["options"] | own}


def one_round(method: str, **changed: Any) -> tuple[Setup, list[Payload], dict[str, Tensor]]:
    """Return a run's set-up, what each client sends in round 1, and the server's next weights."""
    setup = prepare(make_config(options_of(method, block_size=1, **changed)), rating_graph())
    cfg, key, sent = setup.method_config, Key.of(3), list[Payload]()
    weights = cfg.model.init_weights(key, torch.float64)
    fed = setup.federation
    assert isinstance(fed, InProcess)
    state = setup.method.init(fed, cfg, weights, key)
    call = fed.call

    def spy(op: Any, inbox: Payload, **how: Any) -> Payload:
        if isinstance(fold_of(how.get("reduce")), WeightedMean):
            for block, own in zip(blocks_of(setup), fed.states(), strict=True):
                sent.append(op(cfg, block, own, inbox, how["key"])[1])
        return call(op, inbox, **how)

    fed.call = spy  # type: ignore[method-assign]
    state, _ = setup.method.round(fed, cfg, state, 1, key)
    assert state.weights is not None
    return setup, sent, state.weights


def test_rows_are_means_over_who_rated_them_by_hand() -> None:
    """Each row: sum over clients of ratings times change, over the ratings that all have of it."""
    setup, sent, weights = one_round("fedmf")
    total, number = torch.zeros(ROWS, 4).double(), torch.zeros(ROWS)
    for block, reply in zip(blocks_of(setup), sent, strict=True):
        count = item_counts(block, ROWS)
        change = reply[ITEM_WEIGHT].t[0] / reply[SHARE].t[0].where(count > 0, 1.0)[:, None]
        assert bool((change[count > 0] != 0).any(dim=1).all())
        total, number = total + count[:, None] * change, number + count
    assert bool((number > 30).sum() == 0)
    several = torch.stack([item_counts(b, ROWS) > 0 for b in blocks_of(setup)]).sum(0) > 1
    assert int(several.sum()) > 5
    wanted = torch.where(number[:, None] > 0, total / number[:, None], 0.0)
    torch.testing.assert_close(weights[ITEMS], wanted, rtol=0, atol=1e-12)
    level = sum(float(r["nodes"].t[0]) * float(r["weights/level"].t[0]) for r in sent)
    assert float(weights["level"]) == pytest.approx(level / sum(int(r["nodes"].t[0]) for r in sent))


def test_one_client_that_has_all_is_fedavg_and_others_are_apart() -> None:
    alone = {"clients": 1, "partition": "random"}
    ours, theirs = (sg.run(rating_graph(), **options_of(m, **alone)) for m in ("fedmf", "fedavg"))
    sizes = [name for name in ours.rounds[0] if "bytes" in name]  # shares travel as well
    assert_close(ours, theirs, 1e-12, *sizes)
    many = [sg.run(rating_graph(), **options_of(m)) for m in ("fedmf", "fedavg")]
    moved = []
    for result in many:
        weights = weights_of(result)
        assert weights is not None
        moved.append(float(weights[ITEMS].abs().mean()))
    assert moved[0] > 1.3 * moved[1]  # a mean over all clients keeps rows near where they were


def test_without_rows_of_items_it_is_fedavg_to_the_bit() -> None:
    given = {"options": {"embedding": 3}}
    ours, theirs = (sg.run(rating_graph(), **options_of(m, **given)) for m in ("fedmf", "fedavg"))
    for a, b in zip(rows_of(ours), rows_of(theirs), strict=True):  # names of ops differ in length
        assert {k: v for k, v in a.items() if "bytes" not in k} == {
            k: v for k, v in b.items() if "bytes" not in k
        }
    assert same_bits(weights_of(ours), weights_of(theirs))


@pytest.mark.parametrize("method", ["fedgnn", "fesog"])
def test_without_noise_clip_and_drawn_items_rows_are_plain_means(method: str) -> None:
    own = {"pseudo": 0, "clip": 1e9, "noise": 0.0}
    setup, sent, weights = one_round(method, own=own)
    plain = one_round("fedmf")[1]
    for block, ours, theirs in zip(blocks_of(setup), sent, plain, strict=True):
        has = item_counts(block, ROWS) > 0
        assert torch.equal(ours[SHARE].t[0], has.double())
        change = theirs[ITEM_WEIGHT].t[0] / theirs[SHARE].t[0].where(has, 1.0)[:, None]
        torch.testing.assert_close(ours[ITEM_WEIGHT].t[0], change, rtol=0, atol=1e-12)
        level = [reply["weights/level"].t for reply in (ours, theirs)]
        torch.testing.assert_close(*level, rtol=0, atol=1e-12)
    assert bool(weights[ITEMS].any())


@pytest.mark.parametrize("method", ["fedgnn", "fesog"])
def test_changes_are_clipped_and_drawn_items_join_always_the_same(method: str) -> None:
    own = {"pseudo": 40, "clip": 0.005, "noise": 0.0}
    setup, sent, _ = one_round(method, own=own)
    for block, reply in zip(blocks_of(setup), sent, strict=True):
        has, said = item_counts(block, ROWS) > 0, reply[SHARE].t[0] > 0
        assert bool(said[has].all())
        assert int((said & ~has).sum()) == 40
        change = reply[ITEM_WEIGHT].t[0]
        assert float(change.abs().max()) <= 0.005 + 1e-12
        assert bool((change[said & ~has] != 0).any(dim=1).all())
        assert not change[~said].any()
    for block, reply in zip(blocks_of(setup), sent, strict=True):
        share = (item_counts(block, ROWS) > 0).double()
        drawn = sent_rows(block, torch.zeros(ROWS, 4).double(), share, 40)[2]
        pseudo = (reply[SHARE].t[0] > 0) & (share == 0)
        assert pseudo.nonzero()[:, 0].tolist() == sorted(drawn.tolist())


def test_noise_has_the_scale_that_is_said() -> None:
    """Of fedgnn absolute, of fesog relative to the mean size of what is sent."""
    quiet = one_round("fedgnn", own={"pseudo": 0, "noise": 0.0})[1]
    loud = one_round("fedgnn", own={"pseudo": 0, "noise": 0.3})[1]
    for a, b in zip(quiet, loud, strict=True):
        said = a[SHARE].t[0] > 0
        noise = (b[ITEM_WEIGHT].t[0] - a[ITEM_WEIGHT].t[0])[said]
        assert float(noise.abs().mean()) == pytest.approx(0.3, rel=0.35)
    quiet = one_round("fesog", own={"pseudo": 0, "noise": 0.0})[1]
    loud = one_round("fesog", own={"pseudo": 0, "noise": 0.5})[1]
    for a, b in zip(quiet, loud, strict=True):
        said = a[SHARE].t[0] > 0
        size = float(a[ITEM_WEIGHT].t[0][said].abs().mean())
        noise = (b[ITEM_WEIGHT].t[0] - a[ITEM_WEIGHT].t[0])[said]
        assert float(noise.abs().mean()) == pytest.approx(0.5 * size, rel=0.35)
    draws = laplace(Key.of(1), torch.zeros(200, 100).double())
    assert float(draws.mean()) == pytest.approx(0, abs=0.03)
    assert float(draws.abs().mean()) == pytest.approx(1, rel=0.03)
    assert float(draws.var()) == pytest.approx(2, rel=0.06)
    draws = normal(Key.of(1), torch.zeros(200, 100).double())
    assert float(draws.mean()) == pytest.approx(0, abs=0.03)
    assert float(draws.var()) == pytest.approx(1, rel=0.03)


def test_drawn_items_of_fedgnn_move_as_the_own_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Column by column: their mean and standard deviation are those of the silo's own rows."""
    shift = torch.tensor([5.0, -2.0, 0.0, 1.0]).double()

    def moved(*args: Any) -> LocalChange:
        reply = item_changes(*args)
        assert reply.share is not None
        far = dense(reply.weights[ITEMS]) + reply.share.t[..., None] * shift
        return replace(reply, weights={**reply.weights, ITEMS: Stacked(far)})

    monkeypatch.setattr("silograph.methods.fedgnn.item_changes", moved)
    setup, sent, _ = one_round("fedgnn", own={"pseudo": 200, "clip": 1e9, "noise": 0.0}, lr=0.2)
    for block, reply in zip(blocks_of(setup), sent, strict=True):
        has = item_counts(block, ROWS) > 0
        own, drawn = (
            reply[ITEM_WEIGHT].t[0][rows] for rows in (has, (reply[SHARE].t[0] > 0) & ~has)
        )
        spread = own.std(dim=0, unbiased=False)
        assert len(drawn) == 200
        assert float(spread.min()) > 0.01
        assert bool(((drawn.mean(dim=0) - own.mean(dim=0)).abs() < 4 * spread / 200**0.5).all())
        assert bool(((drawn.std(dim=0) / spread - 1).abs() < 0.25).all())


def test_the_mean_size_that_noise_of_fesog_goes_by() -> None:
    """Of items in the rows that are sent: rows of 0 have no share in it."""
    change = torch.tensor([[[1.0, -3.0], [0.0, 0.0]]])
    assert float(mean_size(change, "level")) == 1
    assert float(mean_size(change, ITEMS)) == 2
    assert float(mean_size(0 * change, ITEMS)) == 0


def test_labels_of_drawn_items_are_by_users_drawn_alike() -> None:
    """With rows of 0 a gradient is in the direction of the user's x: here the number of its row."""
    setup = prepare(make_config(options_of("fesog", clients=1)), rating_graph())
    block = blocks_of(setup)[0]
    graph = messages_of(block, torch.float64)
    count, rows = len(graph.key), torch.zeros(4000, 2).double()
    off, x = torch.tensor([0, count]), torch.arange(count)[:, None].double()
    tables = {"tables/embedding": Ragged(x, off), "tables/bias": Ragged(0 * x + 0.3, off)}
    found = labeled_gradients(block, tables, rows, Key.of(0))
    number = (found[:, 0] / found[:, 1]).round().long()
    users = graph.slot[~graph.is_item & (graph.slot >= UNSEEN)]
    times = torch.bincount(number, minlength=count)
    assert set(number.tolist()) == set(users.tolist())
    assert float(times[users].max()) < 2 * float(times[users].min())


def test_a_label_of_a_drawn_item_by_hand() -> None:
    """One user with x = (1, 2), b = .5; row (.1, .2, .3): mean + 1.3, less what it rounds to."""
    given = options_of("fesog", clients=1, options={"embedding": 2, "items": 9})
    setup = prepare(make_config(given), rating_graph(1, 8, 8, 1))
    block = blocks_of(setup)[0]
    graph = messages_of(block, torch.float64)
    off = torch.tensor([0, len(graph.key)])
    x = torch.tensor([1.0, 2.0]).double().expand(len(graph.key), 2)
    tables = {"tables/embedding": Ragged(x, off)}
    tables["tables/bias"] = Ragged(torch.full((len(graph.key), 1), 0.5).double(), off)
    rows = torch.tensor([[0.1, 0.2, 0.3]], dtype=torch.float64)
    said = graph.mean + 0.5 + 0.1 + 0.4 + 0.3
    left = 2 * (said - round(said))
    found = labeled_gradients(block, tables, rows, Key.of(0))
    torch.testing.assert_close(found, left * torch.tensor([[1, 2, 1]]).double(), rtol=0, atol=1e-12)


@ALL
@pytest.mark.parametrize("model", ["rating_mf", "rating_gat"])
def test_users_ids_and_ratings_never_leave(
    monkeypatch: pytest.MonkeyPatch, setups: list[Setup], method: str, model: str
) -> None:
    """What leaves: weights, rows of items, and which rows; nothing of users, no single rating."""
    sent: list[tuple[Envelope, Payload]] = []
    carried = BlockHost._send_over_wire

    def spy(self: BlockHost, envelope: Envelope, payload: Payload, clients: int) -> Payload:
        sent.extend(
            (envelope, {n: take(f, torch.tensor([place])) for n, f in payload.items()})
            for place in range(clients)
        )
        return carried(self, envelope, payload, clients)

    monkeypatch.setattr(BlockHost, "_send_over_wire", spy)
    given = options_of(method, model=model, strict=True, block_size=1, relevant=4.0)
    sg.run(rating_graph(), **given)
    assert not any(isinstance(f, Ragged) for _, payload in sent for f in payload.values())
    sizes = {name: f.t.numel() for _, payload in sent for name, f in payload.items()}
    assert {n for n, size in sizes.items() if size > 1 and not n.startswith("weights/")} == {SHARE}
    said = {x for _, payload in sent for f in payload.values() for x in f.t.flatten().tolist()}
    for block, state in zip(blocks_of(setups[-1]), setups[-1].federation.states(), strict=True):
        for field in fields_under("tables", state).values():
            assert not said & ({*field.t.flatten().tolist()} - {0.0})
        words = messages_of(block, torch.float64).word
        assert not said & {*block.row_key.tolist(), *words.tolist()}


def test_what_rows_say_is_what_the_page_says(setups: list[Setup]) -> None:
    """FedMF shows the server which items a silo has; FedGNN shows it among drawn ones."""
    setup, plain, _ = one_round("fedmf")
    _, hidden, _ = one_round("fedgnn", own={"pseudo": 100})
    for block, a, b in zip(blocks_of(setup), plain, hidden, strict=True):
        has = item_counts(block, ROWS) > 0
        assert torch.equal(a[SHARE].t[0] > 0, has)
        shown = b[SHARE].t[0] > 0
        assert int(shown.sum()) == int(has.sum()) + 100


@pytest.mark.law(sample=3)
@ALL
def test_a_run_that_died_resumes_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    graph, out = rating_graph(), tmp_path / "cut"
    options = options_of(method, participation=0.6)
    sg.run(graph, **options, out=str(tmp_path / "whole"))
    run_until(monkeypatch, graph, 1, out, **options)
    with dying(monkeypatch, 2):
        sg.resume(out, graph=graph)
    sg.resume(out, graph=graph)
    assert files_of(out) == files_of(tmp_path / "whole")


def test_a_session_of_silos_is_the_simulation() -> None:
    given = options_of("fedmf")
    del given["method"]
    own = {"fanout": None, "neighbors": None}
    here = setup_of(rating_graph(), METHODS["fedmf"], **own | given)
    there, _ = remote(here)
    ours, theirs = finish(here), finish(there)
    assert same_bits(weights_of(ours), weights_of(theirs))
    assert lines(ours.ledger.records) == lines(theirs.ledger.records)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize(
    ("share", "line"),
    [
        (1e-30, "expected shares of 0 or from 1 in 40 training ratings, got others"),
        (0.4 / 40, "expected shares of 0 or from 1 in 40 training ratings, got others"),
        (float("nan"), "expected shares of 0 or from 1 in 40 training ratings, got others"),
        (0.0, "expected no change of rows whose share is 0, got some"),
    ],
)
def test_a_share_that_no_ratings_give_names_the_silo(
    share: float, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = options_of("fedmf", rounds=1)
    del given["method"]
    setup, links = remote(setup_of(rating_graph(), METHODS["fedmf"], **given), least=1)

    def lie(data: bytes) -> bytes:
        message = unpack(data)
        if message.type is not Type.REPLY:
            return data
        meter, frame = read_reply(message.body)
        envelope, fields = decode(frame)
        if SHARE in fields:
            fields = {**fields, SHARE: Stacked(torch.full_like(fields[SHARE].t, share))}
            fields[ITEM_WEIGHT] = Stacked(torch.full_like(fields[ITEM_WEIGHT].t, 0.1))
        body = reply_body(envelope.kind, meter, encode(envelope, fields, 0))
        return pack(dataclasses.replace(message, body=body))

    links["client_01"].change = lie
    weights = weights_of(finish(setup))
    assert setup.federation.away == ("client_01",)
    assert f"has lost client_01: {line} in reply of train_items" in caplog.text
    assert weights is not None
    assert 0 < float(weights[ITEMS].abs().max()) < 1


@pytest.mark.parametrize("method", ["fedgnn", "fesog"])
def test_noise_that_a_server_could_draw_is_refused_at_silos(method: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_deployable(make_config(options_of(method)), METHODS[method])
    assert str(caught.value) == (
        f"expected a method that trains at silos alone, got {method}, whose server needs not to "
        "know the run's key, from which clients draw noise"
    )


@pytest.mark.parametrize("method", ["fedmf", "fedavg"])
def test_silos_must_agree_to_rows_of_items(method: str) -> None:
    setup = prepare(make_config(options_of(method)), rating_graph())
    cfg = setup.method_config
    needs = beyond_weights(setup.config, setup.method, cfg)
    assert needs == ("items",)
    program = program_of(setup.config, setup.schema, setup.method, cfg)
    asked = ProposedRun(setup.config, program, needs)
    said = why_refused(NO_POLICY, asked)
    assert said is not None
    assert "this silo has not agreed to items" in said
    said = why_refused(policy_of(tomllib.loads(STRICT_POLICY)), asked)
    assert said is not None
    assert "items" in said
    agreed = dataclasses.replace(asked, allow=parse_allowed_methods("items"))
    assert why_refused(NO_POLICY, agreed) is None


def test_rows_of_items_are_by_public_key_so_the_same_at_all_clients() -> None:
    seen: dict[int, set[int]] = {}
    setup = prepare(make_config(options_of("fedmf", block_size=1)), rating_graph())
    for block in blocks_of(setup):
        known = messages_of(block, torch.float64)
        row = item_rows(known, ROWS)
        for word, place in zip(known.word[known.is_item], row[known.is_item], strict=True):
            seen.setdefault(int(word), set()).add(int(place))
    assert len(seen) == 30
    assert all(len(places) == 1 for places in seen.values())


@pytest.mark.parametrize("method", ["fedmf", "fedgnn", "fesog"])
def test_weighted_changes_of_rows_may_have_a_bound(method: str) -> None:
    setup = prepare(make_config(options_of(method)), rating_graph())
    program = program_of(setup.config, setup.schema, setup.method, setup.method_config)
    check_update_norm(ServerSettings("", update_norm=1.0), program, method)


@pytest.mark.parametrize("most", [None, 50.0])
def test_a_row_that_moves_too_far_names_the_silo(
    most: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Changes are sent times their shares, so a small number of a small share moves a row far."""
    given = options_of("fedmf", rounds=1)
    del given["method"]
    setup, links = remote(setup_of(rating_graph(), METHODS["fedmf"], **given), least=1)
    fed: Any = setup.federation
    fed._limits = dataclasses.replace(fed._limits, update_norm=most)

    def lie(data: bytes) -> bytes:
        message = unpack(data)
        if message.type is not Type.REPLY:
            return data
        meter, frame = read_reply(message.body)
        envelope, fields = decode(frame)
        if SHARE in fields:
            row = int(fields[SHARE].t[0].nonzero()[0])
            far = 100.0 if most else 10_000.0
            fields[ITEM_WEIGHT].t[0, row, 0] = far * fields[SHARE].t[0, row]
        body = reply_body(envelope.kind, meter, encode(envelope, fields, 0))
        return pack(dataclasses.replace(message, body=body))

    links["client_01"].change = lie
    weights = weights_of(finish(setup))
    assert fed.away == ("client_01",)
    bound = "an update of norm 50 at most, got 100" if most else "a reply of train_items, got one w"
    assert f"has lost client_01: expected {bound}" in caplog.text
    assert weights is not None
    assert 0 < float(weights[ITEMS].abs().max()) < 1
