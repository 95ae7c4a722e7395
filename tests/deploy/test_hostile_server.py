"""What a server asks of a silo in a run called fedavg, beyond fedavg: nothing of it is done."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mistakes import raises_code
from sessions import TOKEN
from silograph.core.config import make_config
from silograph.core.errors import ConfigError, FrameError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Field, Shared, Stacked
from silograph.core.resolved_config import training_key
from silograph.deploy.policy import check_size
from silograph.deploy.server import start_facts
from silograph.deploy.silo import Attendance, OwnData, parse_allowed_methods
from silograph.evaluation.evaluate import judge_own, judge_server
from silograph.exchange.passes import add_remote_sums, begin, compute_loss, send_partial_sums
from silograph.experiment.resolve.parts import choose_parts
from silograph.experiment.resolve.resolve import DTYPES, resolve
from silograph.experiment.resolve.run_program import program_of
from silograph.federation.base import Op
from silograph.federation.frame import RESULT, Envelope, encode
from silograph.federation.matching import NONCE_BYTES, TAG_BYTES
from silograph.federation.program import calls_of
from silograph.federation.session.audit import Audit
from silograph.federation.session.message import (
    CallBody,
    Message,
    Type,
    call_body,
    explain_body,
    facts_body,
    own_ops,
    pack,
    qualified,
    unpack,
)
from silograph.federation.session.responder import Responder
from silograph.federation.session.silo_data import NO_BOUNDS, SendingBounds
from silograph.federation.session.state_store import StateStore
from silograph.graph.graph import Graph, schema_of
from silograph.graph.silos.data import Silo
from silograph.graph.silos.read import read_silo
from silograph.methods import METHODS, cagnet
from silograph.methods.fedavg import train
from silograph.methods.fedper import begin_private, train_private
from silograph.methods.local_only import begin_own, train_own
from silograph.methods.local_training import begin as begin_training
from silograph.methods.ops import Clients
from silos import config_of, folders

HIDDEN = 8


class Hostile:
    """A server that asks one silo whatever it likes.

    Args:
        silo: the silo's data.
        allow: what the silo allows.
        state: folder of its states.
        results: where it writes down what a run has come to.
    """

    def __init__(
        self,
        silo: Silo,
        allow: tuple[str, ...] = (),
        state: Path | None = None,
        results: Path | None = None,
        *,
        audit: Audit | None = None,
        bounds: SendingBounds = NO_BOUNDS,
    ) -> None:
        self.silo = silo
        secrets = dict.fromkeys(silo.cross.silo, bytes(32))
        attendance = Attendance("", Path(), allow=allow, results=results)
        own = OwnData(silo, secrets, attendance, lambda _: None)
        self.worker = Responder(
            TOKEN, own_ops(), own, StateStore(state), lambda _: None, None, audit, bounds
        )
        self.sequence = 0

    def ask(self, kind: Type, body: bytes = b"{}") -> Message:
        self.sequence += 1
        return unpack(self.worker.answer(pack(Message(kind, TOKEN, self.sequence, body))))

    def start(self, **options: Any) -> Message:
        return self.ask(Type.START, facts_body(self.facts(**options)))

    def facts(self, **options: Any) -> dict[str, Any]:
        plain = {"dataset": "silos", "clients": 3, "hidden": HIDDEN, "rounds": 2}
        schema = schema_of(self.silo.graph)
        found = resolve(make_config(plain | options), schema)
        self.config, self.method_config = found.config, found.method_config
        return start_facts(self.config, schema)

    def call(
        self, op: Op, inbox: dict[str, Field], what: Kind, key: Key, t: int, *, rows: bool = False
    ) -> Message:
        frame = encode(Envelope(op.__name__, what, t, 1), inbox, 0)
        return self.ask(Type.CALL, call_body(CallBody(qualified(op), key, rows, frame)))

    def weights(self) -> dict[str, Field]:
        dtype = DTYPES[self.config.dtype]
        weights = self.method_config.model.init_weights(Key.of(0), dtype)
        return {f"weights/{name}": Shared(w) for name, w in weights.items()}

    def begin(self) -> Message:
        key = training_key(self.config).fold("init")
        return self.call(begin_training, {}, Kind.CONTROL, key, 0)

    def train(self, weights: dict[str, Field], t: int = 1) -> Message:
        key = training_key(self.config).fold("train", t)
        return self.call(train, weights, Kind.WEIGHTS, key, t)


@pytest.fixture
def silo(make_graph: Callable[..., Graph], tmp_path: Path) -> Silo:
    paths = folders(make_graph(60), config_of(3, partition="random"), tmp_path / "silos")
    return read_silo(paths[0])


def reason(message: Message) -> str:
    assert message.type is Type.REFUSED
    return str(message.facts()["reason"])


def test_what_fedavg_is(silo: Silo) -> None:
    server = Hostile(silo)
    assert server.start(method="fedavg").type is Type.DONE
    assert server.begin().type is Type.REPLY
    assert server.train(server.weights()).type is Type.REPLY


@pytest.mark.parametrize("allow", [(), ("cagnet", "label_guided")])
def test_features_labels_and_edges_are_not_handed_out(silo: Silo, allow: tuple[str, ...]) -> None:
    """Identity weights, then all rows: with ops of other methods every feature would leave."""
    server = Hostile(silo, allow)
    features = silo.graph.num_features
    assert server.start(method="fedavg", hidden=features).type is Type.DONE
    assert server.begin().type is Type.REPLY
    key = training_key(server.config).fold("train", 1)
    identity = server.weights()
    identity["weights/0.weight"] = Shared(torch.eye(features))
    told: dict[str, Field] = {"stage": Shared(torch.tensor(0, dtype=torch.int32))}
    for op, inbox, what in (
        (begin, {**identity, "train": Shared(torch.tensor(True))}, Kind.WEIGHTS),
        (cagnet.send, told, Kind.EMBEDDINGS),
        (send_partial_sums, told, Kind.PARTIAL_SUMS),
        (add_remote_sums, told, Kind.PARTIAL_SUMS),
        (compute_loss, {"count": Shared(torch.tensor(1))}, Kind.CONTROL),
    ):
        said = reason(server.call(op, dict(inbox), what, key, 1, rows=True))
        assert said.startswith("expected fedavg.train (weights) in round 1, as agreed, got")
        assert said.endswith(f".{op.__name__} ({what.value})")
    assert server.train(server.weights()).type is Type.REPLY  # and fedavg goes on


def test_every_other_op_of_the_table_is_refused(silo: Silo) -> None:
    server = Hostile(silo)
    server.start(method="fedavg")
    server.begin()
    ops = own_ops()
    assert len(ops) > 40
    for op in ops.values():
        for what in Kind:
            if (op, what) != (train, Kind.WEIGHTS):
                assert server.call(op, {}, what, Key.of(0), 1).type is Type.REFUSED


@pytest.mark.parametrize("seed", range(3))
def test_random_calls_get_no_reply_outside_of_the_program(silo: Silo, seed: int) -> None:
    """Each reply is to a call of the agreed round, of its kind and key, with shapes that fit."""
    draw, server = random.Random(seed), Hostile(silo)
    server.start(method="fedavg", rounds=3)
    method = METHODS["fedavg"]
    program = program_of(
        server.config, schema_of(silo.graph), method, server.method_config, hand_over=False
    )
    rounds = {t: list(calls_of(program.round(t) if t else program.setup)) for t in range(4)}
    agreed = [(call, t) for t, calls in rounds.items() for call in calls]
    others, last, replies = list(own_ops().values()), 0, 0
    for _ in range(400):
        call, t = draw.choice(agreed)
        op, what, key, number = call.op, call.what, call.key, t
        inbox: dict[str, Field] = (
            {} if "weights/0.weight" not in call.inbox_specs else server.weights()
        )
        match draw.randrange(6):
            case 0:
                op = draw.choice(others)
            case 1:
                what = draw.choice(list(Kind))
            case 2:
                key = Key.of(draw.randrange(9))
            case 3:
                number = draw.randrange(5)
            case _:
                pass
        rows = draw.random() < 0.1
        if server.call(op, inbox, what, key, number, rows=rows).type is Type.REPLY:
            found = [(c.op, c.what, c.key) for c in rounds[number]]
            assert (op, what, key) in found
            assert number >= last  # rounds follow each other
            last, replies = number, replies + 1
    assert replies > 2


@pytest.mark.parametrize(
    ("name", "field", "message"),
    [
        ("0.weight", torch.zeros(1, HIDDEN), r"expected shape (7, 8), got (1, 8)"),
        ("0.weight", torch.zeros(7, 64), r"expected shape (7, 8), got (7, 64)"),
        ("1.weight", torch.zeros(1, 65536), r"expected shape (8, 3), got (1, 65536)"),
        ("0.bias", torch.zeros(HIDDEN).double(), "expected dtype torch.float32, got torch.float64"),
        (
            "0.bias",
            torch.full((HIDDEN,), torch.nan),
            "expected finite numbers, got NaN or infinity",
        ),
    ],
)
def test_weights_of_another_model_reach_no_kernel(
    silo: Silo, name: str, field: torch.Tensor, message: str
) -> None:
    server = Hostile(silo)
    server.start(method="fedavg")
    server.begin()
    weights = server.weights() | {f"weights/{name}": Shared(field)}
    said = reason(server.train(weights))
    assert said == f"{message} for 'weights/{name}' in inbox of train"


@pytest.mark.parametrize("again", ["in the same stream", "in another one", "by another process"])
def test_a_run_does_not_become_another_one(silo: Silo, tmp_path: Path, again: str) -> None:
    server = Hostile(silo, state=tmp_path / "state" / "run")
    assert server.start(method="fedavg").type is Type.DONE
    server.begin()
    if again == "by another process":
        server = Hostile(silo, state=tmp_path / "state" / "run")
    elif again == "in another one":
        server.worker.attach()
        server.sequence = 0
    said = reason(server.start(method="fedavg", hidden=64))
    if again == "in the same stream":
        assert said == "expected START once, got it again"
    else:
        assert said == (
            "expected the run that this silo has agreed to, got one of another hidden: start the "
            "silo anew for another run"
        )
        assert server.start(method="fedavg").type is Type.DONE  # the one that it agreed to


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"method": "label_guided"}, "label_guided"),
        ({"method": "bns"}, "bns"),
        ({"method": "cagnet"}, "cagnet"),
        ({"method": "fedavg", "collect": 0.5}, "collect"),
    ],
)
def test_rows_of_nodes_leave_by_name_only(silo: Silo, options: dict[str, Any], name: str) -> None:
    said = reason(Hostile(silo).start(**options))
    assert said.startswith(f"this silo has not agreed to {name}, which sends rows of single nodes")
    assert said.endswith(f"start it with --allow {name}, or leave the run")
    assert Hostile(silo, (name,)).start(**options).type is Type.DONE


def test_methods_to_allow() -> None:
    assert parse_allowed_methods(None) == ()
    assert parse_allowed_methods("bns, collect") == ("bns", "collect")
    with raises_code(
        ConfigError, "unknown-name", what="method to allow", got="bnss", suggestion="bns"
    ):
        parse_allowed_methods("bnss")


def test_states_of_another_model_are_not_loaded(silo: Silo, tmp_path: Path) -> None:
    """A file that somebody put in the place of the silo's own state."""
    folder = tmp_path / "state" / "run"
    server = Hostile(silo, state=folder)
    server.start(method="fedavg", keep_optimizer=True)
    server.begin()
    assert server.ask(Type.KEEP, facts_body({"round": 0, "committed": []})).type is Type.DONE
    store = StateStore(folder, "")
    state = dict(store.load(0))
    state["optimizer/first/0.weight"] = Stacked(torch.zeros(1, 7, 64))
    store.keep(0, state)
    again = Hostile(silo, state=folder)
    again.start(method="fedavg", keep_optimizer=True)
    assert reason(again.ask(Type.LOAD, facts_body({"round": 0}))) == (
        "expected shape (1, 7, 8), got (1, 7, 64) for 'optimizer/first/0.weight' in the state of a "
        "round"
    )


@pytest.mark.parametrize(
    ("number", "committed"), [(3, []), (10**9, []), (0, [1]), (0, [0] * 5), (-1, [])]
)
def test_a_server_does_not_fill_a_silos_disk(
    silo: Silo, tmp_path: Path, number: int, committed: list[int]
) -> None:
    server = Hostile(silo, state=tmp_path / "state" / "run")
    server.start(method="fedavg")
    server.begin()
    said = server.ask(Type.KEEP, facts_body({"round": number, "committed": committed}))
    assert reason(said).startswith("expected a round")


def test_a_state_leaves_as_much_room_as_it_takes(
    silo: Silo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server chooses how large a state is, and the disk is the silo's."""
    server = Hostile(silo, state=tmp_path / "state" / "run")
    server.start(**LOCAL)
    key = training_key(server.config).fold("init")
    assert server.call(begin_own, server.weights(), Kind.WEIGHTS, key, 0).type is Type.REPLY
    size = sum(field.t.nbytes for field in server.worker._state.values())
    keep = facts_body({"round": 0, "committed": []})
    free = size * 2 - 1
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    said = reason(server.ask(Type.KEEP, keep))
    assert said.startswith("expected room for a state of ")
    assert said.endswith(f"in run, got {free:,} bytes: make room, or leave the run")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=size * 3))
    assert server.ask(Type.KEEP, keep).type is Type.DONE


def test_a_server_that_asks_for_other_things_only_is_left(
    silo: Silo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("silograph.federation.session.responder.MOST_REFUSALS", 5)
    server = Hostile(silo)
    server.start(method="fedavg")
    for _ in range(4):
        assert reason(server.ask(Type.KEEP, facts_body({"round": 9, "committed": []})))
    said = reason(server.ask(Type.KEEP, facts_body({"round": 9, "committed": []})))
    assert said == (
        "expected what was agreed, got 5 requests that were refused, failed or told of a "
        "dismissal: the silo leaves the run"
    )
    with pytest.raises(FrameError, match="expected nothing after the end of the run"):
        server.begin()


def test_streams_without_end_explain_no_more_edges(
    silo: Silo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a line of the silo's log, and a server can end a stream and begin another one."""
    monkeypatch.setattr("silograph.federation.session.responder.MOST_EXPLAINED", 2)
    monkeypatch.setattr(OwnData, "explain", lambda *_: None)  # the server has the silo's tags
    server = Hostile(silo)
    other = silo.cross.silo[0]
    nonce = bytes(NONCE_BYTES).hex()
    told = {"silo": silo.name, "other": other, "absent": False, "nonce": nonce}
    body = explain_body(told, [bytes(TAG_BYTES)])
    answers = []
    for _ in range(3):
        server.worker.attach()
        server.sequence = 0
        server.ask(Type.JOIN, facts_body({"nonce": nonce}))
        answers.append(server.ask(Type.EXPLAIN, body).type)
    assert answers == [Type.DONE, Type.DONE, Type.REFUSED]


def test_dismissals_without_end_do_not_fill_the_log(
    silo: Silo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("silograph.federation.session.responder.MOST_REFUSALS", 3)
    server = Hostile(silo)
    server.start(method="fedavg")
    told = facts_body({"reason": "late"})
    assert [server.ask(Type.DISMISSED, told).type for _ in range(2)] == [Type.DONE] * 2
    assert reason(server.ask(Type.DISMISSED, told)).endswith("the silo leaves the run")


def test_rounds_are_done_again_as_often_as_the_policy_says(silo: Silo) -> None:
    """Also by another process of the silo: the audit file is the counter."""
    audit = Audit()
    server = Hostile(silo, audit=audit, bounds=SendingBounds(most_repeats=1))
    server.start(method="fedavg", rounds=2)
    server.begin()
    for again in range(3):
        server.ask(Type.KEEP, facts_body({"round": 0, "committed": []}))
        server.ask(Type.LOAD, facts_body({"round": 0}))
        answer = server.train(server.weights())
        if again < 2:
            assert answer.type is Type.REPLY
    assert reason(answer) == (
        "expected at most 1 round to be done again in a run (most_repeats of this silo's "
        "policy), got one more: the silo leaves the run"
    )


def test_a_round_is_kept_once_it_is_over(silo: Silo) -> None:
    server = Hostile(silo)
    server.start(method="fedavg")
    server.begin()
    server.train(server.weights())
    said = server.ask(Type.KEEP, facts_body({"round": 1, "committed": []}))
    assert reason(said) == "expected evaluate.judge_own (evaluation) before round 1 is over"


def judge(server: Hostile, weights: dict[str, Field], t: int) -> Message:
    """Ask for evaluation of weights after a round."""
    key = training_key(server.config).fold("judge server", t)
    return server.call(judge_server, weights, Kind.EVALUATION, key, t)


def judge_own_models(server: Hostile, t: int) -> Message:
    key = training_key(server.config).fold("judge own", t)
    return server.call(judge_own, {}, Kind.EVALUATION, key, t)


def test_weights_are_scored_that_were_sent_for_training_or_once_at_the_end(silo: Silo) -> None:
    """Before training, beside it, twice, and in rounds after the last model was scored."""
    server = Hostile(silo)
    server.start(method="fedavg", rounds=9)
    server.begin()
    crafted: dict[str, Field] = {name: Shared(f.t * 1e6) for name, f in server.weights().items()}
    assert "in round 1, as agreed, got evaluate.judge_server" in reason(judge(server, crafted, 1))
    assert server.train(server.weights()).type is Type.REPLY
    assert "in round 1, as agreed, got evaluate.judge_server" in reason(judge(server, crafted, 1))
    assert judge_own_models(server, 1).type is Type.REPLY
    assert judge(server, crafted, 1).type is Type.REPLY  # the run may be over
    assert "in round 1, as agreed, got evaluate.judge_server" in reason(judge(server, crafted, 1))
    closed = (
        "expected no call after the closing evaluation of round 1, got one of round 2: start the "
        "silo again to go on"
    )
    assert reason(server.train(server.weights(), 2)) == closed
    assert server.ask(Type.LOAD, facts_body({"round": 1})).type is Type.DONE
    assert reason(server.train(server.weights(), 2)) == closed


def test_weights_that_were_scored_are_those_of_the_next_round(silo: Silo) -> None:
    """Where a model is sent to be scored before the next round: else the silo leaves the run."""
    audit = Audit()
    server = Hostile(silo, audit=audit)
    server.start(method="fedper", rounds=9, options={"private": 0})
    key = training_key(server.config)
    server.call(begin_private, {}, Kind.WEIGHTS, key.fold("init"), 0)

    def trained(weights: dict[str, Field], t: int) -> Message:
        return server.call(train_private, weights, Kind.WEIGHTS, key.fold("train", t), t)

    assert trained(server.weights(), 1).type is Type.REPLY
    crafted: dict[str, Field] = {name: Shared(f.t * 1e6) for name, f in server.weights().items()}
    assert judge(server, crafted, 1).type is Type.REPLY
    assert judge_own_models(server, 1).type is Type.REPLY
    assert reason(trained(server.weights(), 2)) == (
        "expected round 2 to train from the weights that were scored after round 1, got other "
        "weights: the silo leaves the run"
    )
    with pytest.raises(FrameError, match="expected nothing after the end of the run"):
        trained(crafted, 2)


@pytest.mark.parametrize("other", [False, True], ids=["same start", "other starts"])
def test_rounds_that_are_done_again_have_no_further_models_scored(silo: Silo, other: bool) -> None:
    """The closing call for one model after another, each time after a LOAD and the round again."""
    server = Hostile(silo)
    server.start(method="fedavg", rounds=4)
    server.begin()

    def like(size: float) -> dict[str, Field]:
        return {name: Shared(f.t * size) for name, f in server.weights().items()}

    def trained(t: int, start: float) -> Message:
        message = server.train(like(start), t)
        assert judge_own_models(server, t).type is Type.REPLY
        return message

    for t in range(1, 4):
        assert trained(t, 1).type is Type.REPLY
    for _ in range(2):  # the same model again is fine
        assert trained(4, 1).type is Type.REPLY
        assert judge(server, like(1e6), 4).type is Type.REPLY
        assert server.ask(Type.LOAD, facts_body({"round": 3})).type is Type.DONE
    assert trained(4, 2 if other else 1).type is Type.REPLY
    assert reason(judge(server, like(2e6), 4)) == (
        "expected 1 model to be scored when the run is over, got one more in round 4: the silo "
        "leaves the run; start it again to go on"
    )
    with pytest.raises(FrameError, match="expected nothing after the end of the run"):
        server.ask(Type.LOAD, facts_body({"round": 3}))


def test_models_that_are_sent_to_be_scored_are_no_more_than_it_trains_from(silo: Silo) -> None:
    """A round that is done again from the same weights, and another model to score each time."""
    server = Hostile(silo)
    server.start(method="fedper", rounds=9, options={"private": 0})
    key = training_key(server.config)
    server.call(begin_private, {}, Kind.WEIGHTS, key.fold("init"), 0)
    replies = []
    for number in range(1, 4):
        trained = server.call(
            train_private, server.weights(), Kind.WEIGHTS, key.fold("train", 1), 1
        )
        assert trained.type is Type.REPLY
        crafted: dict[str, Field] = {
            name: Shared(f.t * 10**number) for name, f in server.weights().items()
        }
        replies.append(judge(server, crafted, 1))
        if number < 3:
            assert judge_own_models(server, 1).type is Type.REPLY
            assert server.ask(Type.LOAD, facts_body({"round": 0})).type is Type.DONE
    assert [message.type for message in replies[:2]] == [Type.REPLY] * 2  # as after a lost silo
    assert reason(replies[2]) == (
        "expected at most 2 models to be scored after training from 1 different ones, got one more "
        "in round 1: the silo leaves the run; start it again to go on"
    )


def test_an_agreement_that_could_not_be_written_is_none(
    silo: Silo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "state" / "run"
    server = Hostile(silo, state=folder)

    def full(store: StateStore, facts: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(StateStore, "agree", full)
        assert reason(server.start(method="fedavg")).startswith("OSError at the silo")
    assert reason(server.begin()) == "expected START before the first call, got none"
    assert server.start(method="fedavg", hidden=4).type is Type.DONE  # nothing was agreed to
    assert json.loads((folder / "agreed.json").read_text())["config"]["hidden"] == 4


def test_states_without_an_agreement_are_not_gone_on_from(silo: Silo, tmp_path: Path) -> None:
    folder = tmp_path / "state" / "run"
    server = Hostile(silo, state=folder)
    server.start(method="fedavg")
    server.begin()
    server.ask(Type.KEEP, facts_body({"round": 0, "committed": []}))
    (folder / "agreed.json").unlink()
    said = reason(Hostile(silo, state=folder).start(method="fedavg"))
    assert said == (
        "expected agreed.json beside the states in run, got none: delete that folder to begin the "
        "run anew"
    )


def test_half_a_round_is_not_made_a_whole_one(silo: Silo) -> None:
    server = Hostile(silo)
    server.start(method="fedavg")
    server.begin()
    server.train(server.weights())
    load = facts_body({"round": 1})
    assert reason(server.ask(Type.LOAD, load)) == "expected the silo's state of round 1, got none"
    assert server.ask(Type.LOAD, facts_body({"round": 0})).type is Type.DONE
    assert server.train(server.weights()).type is Type.REPLY


def test_a_call_that_fails_is_not_passed_over(silo: Silo, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Hostile(silo)
    server.start(method="fedavg")
    server.begin()

    def fails(*given: object, **named: object) -> None:
        raise ValueError

    with monkeypatch.context() as patch:
        patch.setattr(Clients, "fit", fails)
        assert reason(server.train(server.weights())) == "ValueError at the silo: its log says more"
    line = "expected LOAD after a call of round 1 that has failed, got another"
    assert reason(server.train(server.weights())) == line
    assert reason(server.ask(Type.KEEP, facts_body({"round": 1, "committed": []}))) == line
    assert server.ask(Type.LOAD, facts_body({"round": 0})).type is Type.DONE
    assert server.train(server.weights()).type is Type.REPLY


def test_nothing_is_answered_after_the_end(silo: Silo) -> None:
    server = Hostile(silo)
    server.start(method="fedavg")
    assert server.ask(Type.END, facts_body({"reason": ""})).type is Type.DONE
    with pytest.raises(FrameError, match="expected nothing after the end of the run"):
        server.begin()


def test_a_server_that_says_it_stops_gets_no_more_than_one_that_crashes(
    silo: Silo, tmp_path: Path
) -> None:
    """Nothing is answered in that stream, and what was agreed holds in the next one."""
    server = Hostile(silo, state=tmp_path / "state")
    server.start(method="fedavg")
    assert server.ask(Type.STOPPING).type is Type.DONE
    with pytest.raises(FrameError, match="expected nothing after STOPPING, got another message"):
        server.begin()
    assert server.worker.ended is None
    assert (tmp_path / "state" / "agreed.json").exists()
    server.worker.attach()
    server.sequence = 0
    said = reason(server.start(method="fedavg", rounds=3))
    assert said.startswith(
        "expected the run that this silo has agreed to, got one of another round"
    )
    assert server.start(method="fedavg").type is Type.DONE
    assert server.begin().type is Type.REPLY


def result(server: Hostile, fields: dict[str, Field], number: int = 1) -> Message:
    return server.ask(Type.RESULT, encode(Envelope(RESULT, Kind.WEIGHTS, number, 0), fields, 0))


def test_the_result_of_a_run_is_held_to_what_was_agreed(silo: Silo, tmp_path: Path) -> None:
    """Only weights of the agreed shapes are written down, and nothing is answered after them."""
    server = Hostile(silo, results=tmp_path / "results")
    assert reason(result(server, {})) == "expected START before RESULT, got none"
    server.start(method="fedavg", eval_every=2)
    fine = server.weights()
    server.begin()
    said = reason(result(server, fine))
    assert said == "expected a round before the result of the run, got none"
    server.train(fine)
    wrong = {**fine, "weights/0.bias": Shared(torch.zeros(10**6))}
    said = "expected shape (8), got (1000000) for 'weights/0.bias' in the result of the run"
    assert reason(result(server, wrong)) == said
    endless = {**fine, "weights/0.bias": Shared(torch.full((HIDDEN,), torch.inf))}
    assert "expected finite numbers, got NaN or infinity" in reason(result(server, endless))
    assert "expected no field 'z'" in reason(result(server, {**fine, "z": Shared(torch.ones(1))}))
    for number in (0, 3, 2**31):
        assert reason(result(server, fine, number)).startswith("expected a best round from 1 to 2,")
    call = encode(Envelope("train", Kind.WEIGHTS, 1, 0), fine, 0)
    assert reason(server.ask(Type.RESULT, call)) == "expected a frame of result, got one of train"
    assert reason(result(server, fine, 2)) == (
        "expected calls of round 2 before the result of the run, got round 2 as the best one"
    )
    assert not (tmp_path / "results").exists()
    assert result(server, fine).type is Type.DONE
    (folder,) = (tmp_path / "results").iterdir()
    about = json.loads((folder / "result.json").read_text())
    assert (about["test"], about["model_of"]) == ({}, "server")  # it has no state of that round
    assert reason(result(server, fine)) == "expected END after RESULT, got RESULT"
    assert reason(server.train(fine, 2)) == "expected END after RESULT, got CALL"
    assert server.ask(Type.END, facts_body({"reason": ""})).type is Type.DONE


def go_round(server: Hostile, t: int) -> None:
    """Do round t of `local` and let the silo keep it; the rounds before are committed."""
    key = training_key(server.config).fold("train", t)
    assert server.call(train_own, {}, Kind.CONTROL, key, t).type is Type.REPLY
    kept = {"round": t, "committed": list(range(1, t))}
    assert server.ask(Type.KEEP, facts_body(kept)).type is Type.DONE


LOCAL: dict[str, Any] = {"method": "local", "rounds": 3, "eval_every": 3}


def trained(silo: Silo, tmp_path: Path) -> Hostile:
    """A run of `local` after its first round, which the silo has kept."""
    server = Hostile(silo, state=tmp_path / "state", results=tmp_path / "results")
    assert server.start(**LOCAL).type is Type.DONE
    key = training_key(server.config).fold("init")
    assert server.call(begin_own, server.weights(), Kind.WEIGHTS, key, 0).type is Type.REPLY
    go_round(server, 1)
    return server


def end(server: Hostile) -> None:
    assert server.ask(Type.END, facts_body({"reason": ""})).type is Type.DONE


def again(server: Hostile) -> None:
    """Begin a new stream of the same run."""
    server.worker.attach()
    server.sequence = 0
    assert server.start(**LOCAL).type is Type.DONE


def test_a_result_that_is_told_twice_is_written_once(silo: Silo, tmp_path: Path) -> None:
    server = trained(silo, tmp_path)
    assert result(server, {}).type is Type.DONE
    (folder,) = (tmp_path / "results").iterdir()
    assert TOKEN.hex()[:8] not in folder.name  # who knows a token may speak for the run
    first = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    names = ["checksums.json", "model.safetensors", "report.html", "result.json"]
    assert sorted(first) == names
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())
    again(server)
    assert server.ask(Type.LOAD, facts_body({"round": 1})).type is Type.DONE
    assert reason(result(server, {}, 2)).startswith(f"expected no other result in {folder}, got")
    assert result(server, {}).type is Type.DONE
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == first
    end(server)
    assert not (tmp_path / "state").exists()


def test_a_damaged_result_is_not_overwritten_either(silo: Silo, tmp_path: Path) -> None:
    server = trained(silo, tmp_path)
    result(server, {})
    (written,) = (tmp_path / "results").glob("*/result.json")
    for text in ("", "[]", "[" * 100_000, '{"run": 3}'):
        written.write_text(text)
        again(server)
        assert reason(result(server, {})).startswith("expected no other result in ")
        assert written.read_text() == text


def test_states_stay_where_the_result_cannot_be_written(silo: Silo, tmp_path: Path) -> None:
    """They may hold the only copy of the silo's own model."""
    server = trained(silo, tmp_path)
    (tmp_path / "results").touch()  # so that no folder can be made there
    assert reason(result(server, {})).endswith("; the silo's states of the run stay where they are")
    end(server)
    assert list((tmp_path / "state").glob("round-*"))


def test_a_damaged_state_is_not_one_that_took_no_part(silo: Silo, tmp_path: Path) -> None:
    go_round(trained(silo, tmp_path), 2)
    (file,) = (tmp_path / "state").glob("round-*1.*")
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    server = Hostile(silo, state=tmp_path / "state", results=tmp_path / "results")
    assert server.start(**LOCAL).type is Type.DONE
    assert server.ask(Type.LOAD, facts_body({"round": 2})).type is Type.DONE
    assert reason(result(server, {})).endswith("with its checksum, got a damaged one")
    assert not (tmp_path / "results").exists()
    end(server)
    assert file.exists()


def test_a_server_that_keeps_its_model_sends_none(silo: Silo, tmp_path: Path) -> None:
    server = Hostile(silo, results=tmp_path / "results")
    facts = server.facts(method="fedavg", eval_every=2)
    assert server.ask(Type.START, facts_body({**facts, "hand_over": False})).type is Type.DONE
    server.begin()
    server.train(server.weights())
    assert "expected no field 'weights/0.bias'" in reason(result(server, server.weights()))
    assert result(server, {}).type is Type.DONE


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"threads": 50_000}, "expected threads of at most 256 at a silo, got 50000"),
        ({"local_epochs": 2**62}, "expected local_epochs of at most 10000 at a silo"),
        ({"rounds": 2 * 10**9}, "expected rounds of at most 1000000 at a silo, got 2000000000"),
        (
            {"method": "fedais", "method.batches": 1000, "local_epochs": 10_000},
            "expected at most 100,000 steps of a round at a silo, got 10,000,000",
        ),
        ({"batch_size": 1, "local_epochs": 10_000}, "expected at most 100,000 steps of a round"),
        ({"layers": 10**5}, "expected layers of at most 1000 at a silo, got 100000"),
        ({"method": "fedpub", "method.communities": 10**6}, "expected communities of at most 1000"),
        (
            {"neighbors": "fedgrains", "neighbors.width": 10**7},
            "expected width of at most 4096 at a silo, got 10000000",
        ),
        ({"model": "appnp", "hops": 10**7}, "expected hops of at most 1000 at a silo"),
        ({"hidden": "1," * 1001}, "hidden: expected a width of 1 or more"),
        ({"hidden": "9" * 5000}, "hidden: expected a width of 1 or more"),
        (
            {"hidden": "8,30000,30000", "layers": 4},
            "expected a model of at most 268,435,456 weights at a silo",
        ),
        ({"hidden": "8,8", "layers": 2}, "expected 3 layers with hidden=8,8, got 2"),
        ({"model.head": "both"}, "head: input should be 'conv' or 'linear'"),
        ({"hidden": 10**8}, "expected a model of at most 268,435,456 weights at a silo"),
        ({"method": "fedgraph", "model": "mlp"}, "expected a model that sums over neighbors for"),
        ({"device": "privateuseone"}, "device: expected cpu or cuda, on which silos compute"),
        ({"method": "label_guided", "local_epochs": 10**6}, "expected local_epochs of at most"),
    ],
)
def test_no_config_holds_a_silo_up(silo: Silo, options: dict[str, Any], line: str) -> None:
    server = Hostile(silo)
    facts = server.facts(method=options.get("method", "fedavg"))
    own = facts["config"]["options"] | {k: v for k, v in options.items() if "." in k}
    if "model" in options:
        own = {k: v for k, v in own.items() if not k.startswith("model.")}
    facts["config"] |= {k: v for k, v in options.items() if "." not in k} | {"options": own}
    assert reason(server.ask(Type.START, facts_body(facts))).startswith(line)


@pytest.mark.parametrize("model", ["rating_mf", "rating_gcn", "rating_gat"])
def test_embeddings_do_not_fill_the_memory_of_a_silo(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "silo.toml").write_text('name = "a"\ntask = "rating"\n')
    (tmp_path / "ratings.csv").write_text("user,item,rating\nx,y,3\nz,y,4\n")  # 3 ends
    silo = read_silo(tmp_path)

    def check(**options: int) -> None:
        config = make_config({"model": model, "options": options})
        check_size(config, choose_parts(config), silo)

    check(items=2**24, embedding=15)
    with raises_code(ConfigError, "refused-by-policy", rule="items"):
        check(items=2**24, embedding=16)
    with raises_code(ConfigError, "refused-by-policy", rule="embedding"):
        check(embedding=4097)
    monkeypatch.setattr("silograph.deploy.policy.MOST_IN_TABLES", 30)
    check(embedding=10)
    with raises_code(ConfigError, "refused-by-policy", rule="embedding"):
        check(embedding=11)


def test_rounds_far_away_are_not_walked_to(silo: Silo) -> None:
    server = Hostile(silo)
    server.start(method="fedavg", rounds=10**6, participation=0.5, eval_every=10**7)
    server.begin()
    assert reason(server.train(server.weights(), 10**6)) == (
        "expected one of the next 1000 rounds after 0, got 1000000"
    )


def test_what_a_server_sends_does_not_fill_the_log(silo: Silo) -> None:
    facts = {"config": {"x" * 100_000: 1}}
    assert len(reason(Hostile(silo).ask(Type.START, facts_body(facts)))) <= 300


def test_a_silo_shows_itself_once(silo: Silo) -> None:
    server = Hostile(silo)
    join = facts_body({"nonce": bytes(16).hex()})
    assert server.ask(Type.JOIN, join).type is Type.JOINED
    assert reason(server.ask(Type.JOIN, join)) == "expected JOIN once, before START, got it again"
    server.start(method="fedavg")
    assert reason(server.ask(Type.JOIN, join)) == "expected JOIN once, before START, got it again"
