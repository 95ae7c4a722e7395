"""Weights as float16 or bytes, and used rows: what they are, what they cost, what is refused."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import scipy.sparse as sp
import torch

import silograph as sg
from remote_runs import finish, lines, remote, setup_of
from runs import FAST, go, of, rows_of, run_until, same_bits, weights_of
from silograph.core.errors import ConfigError, ProtocolError
from silograph.core.key import Key
from silograph.core.payload import Patched, Ragged, Shared, Stacked
from silograph.core.setting_values import SentWeights
from silograph.exchange.sent_weights import (
    LEFT,
    SMALL_DTYPES,
    USED,
    decode_weights,
    encode_reply,
    encode_weights,
    tell_used,
)
from silograph.federation.base import WeightedMean
from silograph.federation.decoder import (
    LARGEST,
    LARGEST_HALF,
    Decoder,
    as_bytes,
    as_half_bytes,
    as_halves,
    from_small,
    unpacked,
)
from silograph.federation.field_specs import check_against, extent_of
from silograph.federation.fold import Reduction
from silograph.federation.frame import DIMENSION, FIELD, decode, encode
from silograph.federation.session.engine import FAR
from silograph.federation.session.message import Type, pack, read_reply, reply_body, unpack
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph
from silograph.methods import FEDAVG, METHODS
from silograph.methods.fedais import FEDAIS, begin_stored, serve, train_batches
from silograph.methods.fedavg import train
from silograph.methods.local_training import begin

MakeGraph = Callable[..., Graph]
Numbers = Literal["exact", "float16", "int8", "int4"]
SCALES = ("int8", "int4")
RUN: dict[str, Any] = {"clients": 5, "participation": 0.6, "kernels": "torch", "model": "sage"}
BRIEF: dict[str, Any] = {"options": {"batches": 2, "tau": 1, "interval": "fixed"}}


def thin_graph(make_graph: MakeGraph) -> Graph:
    """Few of the features occur at one client."""
    graph = make_graph(50, features=60, sparse=True)
    assert isinstance(graph.x, CSR)
    x = torch.from_numpy(graph.x.scipy().toarray())
    mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.06
    return replace(graph, x=CSR.from_scipy(sp.csr_matrix((x * mask).numpy())))


def options_of(method: str) -> dict[str, Any]:
    return {"method": method, **RUN, **(BRIEF if method == "fedais" else {})}


@pytest.mark.law(sample=3)
@pytest.mark.parametrize("method", ["fedavg", "fedopt", "fedprox", "fedais"])
@pytest.mark.parametrize("kernels", ["torch", "compiled"])
def test_used_rows_change_nothing_but_bytes(
    make_graph: MakeGraph, method: str, kernels: str
) -> None:
    """Also where clients take fewer steps than others: fedais has two rows or less in a round."""
    given = {**options_of(method), "kernels": kernels, "weight_decay": 0.01}
    graph = thin_graph(make_graph)
    whole, some = (go(graph, **given, weight_rows=rows) for rows in ("all", "used"))
    for name, w in of(whole).items():
        torch.testing.assert_close(of(some)[name], w, rtol=0, atol=1e-12)
    assert some.ledger.bytes_by_kind["weights"] < whole.ledger.bytes_by_kind["weights"]


def test_clients_that_take_fewer_steps_have_other_unused_rows(make_graph: MakeGraph) -> None:
    given = {**options_of("fedais"), "weight_decay": 0.1, "clients": 12, "participation": 1.0}
    given["options"] = {**BRIEF["options"], "batches": 6}
    graph = thin_graph(make_graph)
    whole, some = (go(graph, **given, weight_rows=rows) for rows in ("all", "used"))
    for name, w in of(whole).items():
        torch.testing.assert_close(of(some)[name], w, rtol=0, atol=1e-12)


def by_hand(t: torch.Tensor, width: int) -> torch.Tensor:
    """Whole numbers, or halves, as they travel, in float64."""
    if t.dtype is not torch.uint8:
        return t.double()
    found = torch.empty(*t.shape[:-1], 2 * t.shape[-1], dtype=torch.float64)
    found[..., 0::2] = t.double() % 16 - 8
    found[..., 1::2] = (t.double() / 16).floor() - 8
    return found[..., :width]


def trained_bytes(result: Any, op: str) -> int:
    records = [r for r in result.ledger.records if r.op == op]
    return sum(int(r.bytes.sum()) for r in records)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("numbers", ["exact", "float16", "int8", "int4"])
@pytest.mark.parametrize("rows", ["all", "used"])
def test_bytes_are_their_closed_form(make_graph: MakeGraph, numbers: Numbers, rows: str) -> None:
    graph = thin_graph(make_graph)
    given = {**options_of("fedavg"), "participation": 1.0, "rounds": 2}
    found = go(graph, **given, weights_as=numbers, weight_rows=rows)
    plain = go(graph, **given)
    setup = setup_of(graph, FEDAVG, **{k: v for k, v in given.items() if k != "method"})
    blocks = setup.federation._host.blocks  # type: ignore[attr-defined]
    used = sum(int(b.all.x.used.off[-1]) for b in blocks)
    clients, both, item = 5, 2 * 2, 8
    saved = 0
    size = {"exact": item, "float16": 2, "int8": 1, "int4": 1}[numbers]
    for name, w in of(found).items():
        if w.dim() < 2:
            continue
        first = rows == "used" and name in setup.method_config.model.first_maps
        sent = used if first else clients * len(w)
        width = (w.shape[1] + 1) // 2 if numbers == "int4" else w.shape[1]
        saved += both * (clients * w.numel() * item - sent * width * size)
        if numbers in SCALES:
            head = FIELD.size + DIMENSION.size + len(f"scale/weights/{name}")
            saved -= both * (4 * sent + clients * head)
    assert trained_bytes(plain, "train") - trained_bytes(found, "train") == saved


@pytest.mark.parametrize("numbers", ["float16", "int8", "int4"])
@pytest.mark.parametrize(
    ("rows", "keep"),
    [("all", False), ("all", True), ("used", False)],  # the fourth is refused
)
def test_what_was_sent_is_what_has_changed_less_what_waits(
    make_graph: MakeGraph, numbers: Numbers, rows: Literal["all", "used"], keep: bool
) -> None:
    """Error feedback, over rounds: sums of what the server adds telescope."""
    setup = setup_of(thin_graph(make_graph), FEDAVG, **{**RUN, "block_size": 5})
    sent = SentWeights(numbers, rows)
    cfg = replace(setup.method_config, sent=sent, keep_optimizer=keep)
    (called,) = setup.federation._host.blocks  # type: ignore[attr-defined]
    block = called.all
    state, reply = tell_used(cfg, block, {}, {}, Key.of(0))
    used = state[USED]
    assert isinstance(used, Ragged)
    memory = {USED: used.t, "sent/off": used.off} if "used" in reply else {}
    weights = cfg.model.init_weights(Key.of(1), torch.float64)
    added: dict[str, Any] = dict.fromkeys(weights, 0.0)
    true: dict[str, Any] = dict.fromkeys(weights, 0.0)
    for t in range(4):
        start = decode_weights(
            cfg, block, state, encode_weights(cfg, weights, memory, torch.arange(5))
        )
        trained = {}
        for name, was in start.items():
            own = (Key.of(t).fold(name).matrix(5, was.t.numel()) - 0.5).view(5, *was.t.shape)
            if not keep and name.removeprefix("weights/") in cfg.model.first_maps:
                mask = torch.zeros(own.shape[:2], dtype=torch.bool)
                client = torch.repeat_interleave(torch.arange(5), used.off.diff())
                mask[client, used.t.long()] = True
                own = own * mask[:, :, None]
            trained[name] = Stacked(was.t + own)
            true[name.removeprefix("weights/")] += own
        state, out = encode_reply(cfg, state, start, trained, {})
        for name, w in weights.items():
            field: Any = out[f"weights/{name}"]
            if w.dim() < 2:
                assert torch.equal(field.t, trained[f"weights/{name}"].t)
                continue
            scale = out.get(f"scale/weights/{name}")
            assert field.t.dtype is SMALL_DTYPES[numbers]
            if isinstance(field, Patched):
                field = field.stacked()
                scale = scale.stacked() if isinstance(scale, Patched) else scale
            change = by_hand(field.t, w.shape[-1])
            change = change * (1.0 if scale is None else scale.t.double()[..., None])
            if isinstance(field, Ragged):
                client = torch.repeat_interleave(torch.arange(5), used.off.diff())
                spread = torch.zeros(5, *w.shape, dtype=torch.float64)
                spread[client, used.t.long()] = change
                change = spread
            added[name] = added[name] + change
    for name, w in weights.items():
        if w.dim() < 2:
            continue
        left = state[f"{LEFT}{name}"]
        waits = left.t
        if isinstance(left, Ragged):
            client = torch.repeat_interleave(torch.arange(5), used.off.diff())
            waits = torch.zeros(5, *w.shape, dtype=torch.float64)
            waits[client, used.t.long()] = left.t
        torch.testing.assert_close(added[name] + waits, true[name], rtol=0, atol=1e-9)
        # It does not grow: half a level of what was sent last.
        assert waits.abs().max() < (0.04 if numbers == "int4" else 0.01)


def test_the_server_adds_what_came(make_graph: MakeGraph) -> None:
    """A mean of changes beside the mean of what they stand for, by a loop."""
    base, weights = torch.arange(6.0).view(3, 2), torch.tensor([1.0, 3.0])
    change = torch.tensor([[[0.5, -1.0]] * 3, [[2.0, 0.25]] * 3])
    t, scale = as_bytes(change)
    expected = base + (change * weights[:, None, None]).sum(0) / 4
    reply = {"w": Stacked(t), "scale/w": Stacked(scale), "n": Stacked(weights)}
    found = Reduction(WeightedMean("n", sent=Decoder({"w": base})), 2)
    found.add(reply, torch.arange(2))
    torch.testing.assert_close(found.result()["w"].t, expected, rtol=0, atol=0.01)
    assert set(found.result()) == {"w", "n"}
    known = Ragged(torch.tensor([0, 2, 1]).int(), torch.tensor([0, 2, 3]))
    rows = Ragged(as_halves(torch.ones(3, 2)), known.off)
    used_rows = Decoder({"w": base}, {"w": known}, {"w": base})
    some = Reduction(WeightedMean("n", {"w": base}, used_rows), 2)
    some.add({"w": rows, "n": Stacked(weights)}, torch.arange(2))
    moved = base + torch.tensor([[0.25], [0.75], [0.25]])
    torch.testing.assert_close(some.result()["w"].t, moved, rtol=0, atol=1e-6)
    halves, scales = as_half_bytes(change)
    wide = Stacked(torch.cat((halves, halves), -1))
    for wrong, message in (
        ({**reply, "w": Stacked(t.half())}, "expected scales with changes as int8"),
        ({"w": Stacked(t), "n": Stacked(weights)}, "expected scales with changes as int8"),
        ({"w": Stacked(halves), "n": Stacked(weights)}, "expected scales with changes as int8"),
        (
            {**reply, "w": wide, "scale/w": Stacked(scales)},
            "expected 1 entries for a row of 2 numbers, got 2",
        ),
    ):
        with pytest.raises(ProtocolError, match=message):
            Reduction(WeightedMean("n", sent=Decoder({"w": base})), 2).add(wrong, torch.arange(2))
    short = Ragged(rows.t[:2], torch.tensor([0, 1, 2]))
    with pytest.raises(ProtocolError, match=r"expected changes of \[2, 1\] rows, which clients"):
        Reduction(WeightedMean("n", {"w": base}, used_rows), 2).add(
            {"w": short, "n": Stacked(weights)}, torch.arange(2)
        )


def test_numbers_that_are_too_large_or_none() -> None:
    x = torch.tensor([[1e9, -1e9], [float("nan"), 1.0], [0.0, 0.0]])
    assert as_halves(x)[0].tolist() == [LARGEST_HALF, -LARGEST_HALF]
    t, scale = as_bytes(x)
    assert t[0].tolist() == [127, -127]
    assert t[2].tolist() == [0, 0]
    assert bool(scale[1].isnan())  # so the server sees that training has diverged


@pytest.mark.parametrize("width", [1, 2, 5])
def test_half_bytes_are_rounded_to_fifteen_levels(width: int) -> None:
    x = Key.of(0).matrix(40, width).double() - 0.5
    x[0], x[1] = 0.0, float("nan")
    t, scale = as_half_bytes(x)
    assert t.shape == (40, (width + 1) // 2)
    assert t.dtype is torch.uint8
    found = from_small(unpacked(t, width), scale, torch.float64)
    nearest = (x / x.abs().amax(1, keepdim=True) * 7).round() / 7 * x.abs().amax(1, keepdim=True)
    torch.testing.assert_close(found[2:], nearest[2:], rtol=0, atol=1e-7)
    assert not found[0].any()
    assert bool(found[1].isnan().all())


def test_half_bytes_have_one_layout() -> None:
    """Two versions that packed them in another order would misread each other without a word."""
    t, scale = as_half_bytes(torch.tensor([[7.0, -7.0, 1.0]]))
    assert t.tolist() == [[(7 + 8) | (-7 + 8) << 4, (1 + 8) | 8 << 4]]
    assert scale.tolist() == [1.0]
    assert unpacked(t, 3).tolist() == [[7, -7, 1]]
    assert unpacked(torch.tensor([[0, 255]], dtype=torch.uint8), 4).tolist() == [[-8, -8, 7, 7]]


SMALL: list[tuple[str, dict[str, Any]]] = [
    ("fedavg", {"weights_as": "int8", "weight_rows": "used"}),
    ("fedavg", {"weights_as": "int8"}),
    ("fedavg", {"weights_as": "int4", "weight_rows": "used"}),
    ("fedopt", {"weights_as": "float16", "weight_rows": "used"}),
    ("fedais", {"weights_as": "int8", "weight_rows": "used"}),
    ("fedais", {"weights_as": "float16"}),
]
OPS = {
    "fedavg": (begin, train, tell_used),
    "fedopt": (begin, train, tell_used),
    "fedais": (begin_stored, tell_used, serve, train_batches),
}


@pytest.mark.law(sample=12)
@pytest.mark.parametrize(("method", "sent"), SMALL)
def test_killed_and_resumed_in_blocks_and_over_a_session_it_is_the_same(
    make_graph: MakeGraph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    sent: dict[str, Any],
) -> None:
    graph = thin_graph(make_graph)
    options = {**options_of(method), **sent, "weight_decay": 0.01}
    whole = go(graph, **options, block_size=1)
    strict = go(graph, **options, block_size=2, strict=True)
    run_until(monkeypatch, graph, 3, tmp_path / "half", **{**FAST, **options, "block_size": 1})
    again = sg.resume(tmp_path / "half", graph=graph)
    own = {name: value for name, value in options.items() if name != "method"}
    over, _ = remote(setup_of(graph, METHODS[method], **own), *OPS[method])
    there = finish(over)
    for other in (again, there):
        assert same_bits(weights_of(whole), weights_of(other))
        assert rows_of(whole) == rows_of(other)
        assert lines(whole.ledger.records) == lines(other.ledger.records)
    for name, w in of(whole).items():
        torch.testing.assert_close(of(strict)[name], w, rtol=0, atol=1e-9)
    assert lines(strict.ledger.records) == lines(whole.ledger.records)


def changed_reply(field: str, value: float) -> Callable[[bytes], bytes]:
    """Return what puts a value into what a silo sends back of its training."""

    def put(reply: dict[str, Any]) -> None:
        reply[field].t.view(-1)[0] = value

    return changed("train", put)


def changed(
    op: str, edit: Callable[[dict[str, Any]], None], *more: str
) -> Callable[[bytes], bytes]:
    """Return what edits replies of some ops."""

    def change(data: bytes) -> bytes:
        message = unpack(data)
        if message.type is not Type.REPLY:
            return data
        meter, frame = read_reply(message.body)
        envelope, reply = decode(frame)
        if envelope.op not in {op, *more}:
            return data
        edit(found := dict(reply))
        body = reply_body(envelope.kind, meter, encode(envelope, found, 0))
        return pack(replace(message, body=body))

    return change


@pytest.mark.parametrize("value", [-1.0, float("inf"), 2.0 * LARGEST])
def test_a_silo_whose_scales_are_none_is_away(make_graph: MakeGraph, value: float) -> None:
    options = {**RUN, "weights_as": "int8", "rounds": 1, "participation": 1.0}
    setup = setup_of(thin_graph(make_graph), FEDAVG, **options)
    over, links = remote(setup, *OPS["fedavg"], least=1)
    name = over.federation.ids[2]
    links[name].change = changed_reply("scale/weights/0.weight", value)
    finish(over)
    assert over.federation.away == (name,)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize(
    ("method", "op"), [("fedais", "serve"), ("fedais", "close_round"), ("fedavg", "train")]
)
@pytest.mark.parametrize("numbers", ["exact", "int8"])
def test_a_silo_that_is_a_row_short_is_named_and_left_out(
    make_graph: MakeGraph, method: str, op: str, numbers: str, caplog: pytest.LogCaptureFixture
) -> None:
    def shorter(reply: dict[str, Any]) -> None:
        for name in [name for name, f in reply.items() if isinstance(f, Ragged)]:
            rows = reply[name].t[:-1].clone()
            reply[name] = Ragged(rows, torch.tensor([0, len(rows)]))

    options = {**options_of(method), "weights_as": numbers, "weight_rows": "used"}
    options |= {"participation": 1.0, "rounds": 3}
    del options["method"]
    setup = setup_of(thin_graph(make_graph), METHODS[method], **options)
    over, links = remote(setup, *OPS[method], least=1)
    name = over.federation.ids[2]
    links[name].change = changed(op, shorter)
    result = finish(over)
    assert [row["round"] for row in result.rounds] == [1, 2, 3]
    assert over.federation.away == (name,)
    assert re.search(rf"lost {name}: expected \d+ .*got", caplog.text)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("rows", ["all", "used"])
@pytest.mark.parametrize(("numbers", "levels"), [("int8", 128), ("int4", 8)])
@pytest.mark.parametrize(("share", "away"), [(0.9, False), (1.1, True)])
def test_a_scale_counts_as_the_largest_number_that_it_gives(
    make_graph: MakeGraph,
    monkeypatch: pytest.MonkeyPatch,
    rows: str,
    numbers: str,
    levels: int,
    share: float,
    away: bool,
) -> None:
    """The bound of updates is a thousand times narrower, so it is put aside."""
    monkeypatch.setattr("silograph.federation.session.engine.FAR_UPDATE", float("inf"))
    options = {**RUN, "weights_as": numbers, "weight_rows": rows, "participation": 1.0}
    setup = setup_of(thin_graph(make_graph), FEDAVG, **{**options, "rounds": 1})
    over, links = remote(setup, *OPS["fedavg"], least=1)
    name = over.federation.ids[2]
    links[name].change = changed_reply("scale/weights/0.weight", share * FAR / levels)
    finish(over)
    assert over.federation.away == ((name,) if away else ())


@pytest.mark.law(sample=3)
@pytest.mark.parametrize("numbers", ["exact", "float16", "int8", "int4"])
@pytest.mark.parametrize("rows", ["all", "used"])
def test_the_norm_of_an_update_is_that_of_what_is_added(
    make_graph: MakeGraph, numbers: str, rows: str
) -> None:
    """Honest silos move by less than 1; one whose change is ten times as large is left out."""
    options = {**RUN, "weights_as": numbers, "weight_rows": rows, "participation": 1.0}
    setup = setup_of(thin_graph(make_graph), FEDAVG, **{**options, "rounds": 1})
    for lie in (False, True):
        over, links = remote(setup, *OPS["fedavg"], least=1)
        fed: Any = over.federation
        fed._limits = replace(fed._limits, update_norm=4.0)
        field = "scale/weights/0.weight" if numbers in SCALES else "weights/0.weight"
        if lie:
            links[fed.ids[2]].change = changed_reply(field, 10.0)
        finish(over)
        assert fed.away == ((fed.ids[2],) if lie else ())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 2.0 * LARGEST])
def test_no_server_can_send_scales_that_are_none(make_graph: MakeGraph, value: float) -> None:
    setup = setup_of(thin_graph(make_graph), FEDAVG, **{**RUN, "weights_as": "int8"})
    cfg, block = setup.method_config, setup.federation._host.blocks[0].all  # type: ignore[attr-defined]
    from silograph.exchange.sent_weights import inbox_spec

    weights = cfg.model.init_weights(Key.of(1), torch.float64)
    inbox = encode_weights(cfg, weights, {}, torch.arange(1))
    check_against(inbox, inbox_spec(cfg), extent_of(block), "here", finite=True)
    inbox["scale/weights/0.weight"].t[0] = value
    with pytest.raises(ProtocolError, match=r"'scale/weights/0.weight' in here"):
        check_against(inbox, inbox_spec(cfg), extent_of(block), "here", finite=True)


def test_rows_that_differ_between_clients_are_refused(make_graph: MakeGraph) -> None:
    options = {**RUN, "weight_rows": "used", "block_size": 5}
    setup = setup_of(thin_graph(make_graph), FEDAVG, **options)
    cfg, block = setup.method_config, setup.federation._host.blocks[0].all  # type: ignore[attr-defined]
    state, reply = tell_used(cfg, block, {}, {}, Key.of(0))
    used = reply["used"]
    assert isinstance(used, Ragged)
    memory = {USED: used.t, "sent/off": used.off}
    inbox = encode_weights(
        cfg, cfg.model.init_weights(Key.of(1), torch.float64), memory, torch.arange(5)
    )
    assert isinstance(decode_weights(cfg, block, state, inbox)["weights/0.weight"], Shared)
    twice = int(used.t.bincount().argmax())
    inbox["weights/0.weight"].t[(used.t == twice).nonzero()[0, 0]] += 1
    with pytest.raises(ProtocolError, match=r"expected the same rows of 0\.weight for all clients"):
        decode_weights(cfg, block, state, inbox)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "scaffold", "weights_as": "int8"}, "for method scaffold, got weights_as=int8"),
        ({"keep_optimizer": True, "weight_rows": "used"}, "expected neither keep_optimizer"),
        ({"batch_size": 4, "weight_rows": "used"}, "batch_size nor collect with weight_rows=used"),
        ({"collect": 0.5, "weight_rows": "used"}, "batch_size nor collect with weight_rows=used"),
        (
            {"method": "fedais", "weights_as": "int8", "options": {"share_features": True}},
            "with share_features, whose clients",
        ),
    ],
)
def test_what_does_not_go_together(
    make_graph: MakeGraph, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        go(make_graph(30), **given)


def test_presets_send_small_weights_and_others_do_not() -> None:
    names = {name for name, method in METHODS.items() if method.small_weights}
    stored = {name for name, method in METHODS.items() if method.init is FEDAIS.init}
    assert names == {"fedavg", "fedopt", "fedprox"} | stored


def test_who_can_send_them_is_told(make_graph: MakeGraph) -> None:
    able = ", ".join(name for name, method in METHODS.items() if method.small_weights)
    with pytest.raises(ConfigError, match=f": {able} can send them otherwise"):
        go(make_graph(30), method="scaffold", weights_as="int8")
