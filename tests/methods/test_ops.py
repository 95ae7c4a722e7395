"""Messages and ops as methods are written: what annotations say is what crosses, and no more."""

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import pytest
import torch
from torch import Tensor

import silograph as sg
from remote_runs import setup_of
from runs import MakeGraph, go
from silograph.core.errors import ConfigError, OpError, ProtocolError
from silograph.core.payload import Ragged, Shared, Stacked
from silograph.federation.field_specs import LOSS, TRAINED, FieldSpec
from silograph.federation.messages import from_payload, is_own_field, specs_of, to_payload
from silograph.federation.ops import CallContext, Part, for_each, steps_of
from silograph.federation.program import calls_of, possible_calls
from silograph.methods import (
    FEDAVG,
    Clients,
    Empty,
    GlobalModel,
    Kind,
    LocalModel,
    Method,
    Server,
    ServerState,
    average_and_step,
    averaging,
    calls,
    exact_weights,
    op,
    program,
    repeat,
    train,
    when,
)
from silograph.methods.local_training import AveragedModel
from silograph.methods.ops import scores_start

RUN: dict[str, Any] = {"clients": 3, "rounds": 1, "hidden": 4, "kernels": "torch"}


def some_rows(cfg: Any) -> dict[str, FieldSpec]:
    """Return specs by name; none where the config says so."""
    return {f"rows/{n}": FieldSpec(Ragged, (2,)) for n in cfg}


@dataclass(frozen=True)
class Message:
    """A field of each kind."""

    one: Annotated[Tensor, FieldSpec(Shared)]
    each: Annotated[Stacked, FieldSpec(Stacked, (2,))]
    rows: Annotated[Mapping[str, Ragged], some_rows]
    named: Annotated[Mapping[str, Tensor], lambda _: {"named/a": FieldSpec(Shared)}]
    maybe: Annotated[Stacked | None, lambda _: {}]


def message() -> Message:
    rows = Ragged(torch.ones(3, 2), torch.tensor([0, 1, 3]))
    return Message(
        torch.tensor(1.0), Stacked(torch.ones(2, 2)), {"a": rows}, {"a": torch.tensor(2.0)}, None
    )


def test_a_message_is_its_fields_and_back() -> None:
    sent = to_payload(message())
    assert set(sent) == {"one", "each", "rows/a", "named/a"}
    assert all(isinstance(sent[name], Shared) for name in ("one", "named/a"))
    came = from_payload(Message, {**sent, "other": Shared(torch.tensor(0))})
    assert to_payload(came).keys() == sent.keys()
    assert all(to_payload(came)[name].t is field.t for name, field in sent.items())
    assert came.maybe is None
    assert specs_of(Message, ["a"]).keys() == sent.keys()
    assert specs_of(Message, []).keys() == sent.keys() - {"rows/a"}
    assert is_own_field(Message, "rows/b")
    assert not is_own_field(Message, "rowsmore")


@dataclass(frozen=True)
class StatePart:
    """A part of a state, with names of its own."""

    PREFIX: ClassVar[str] = "part/"
    rows: Annotated[Mapping[str, Ragged], some_rows]
    count: Annotated[Stacked, FieldSpec(Stacked)]


@dataclass(frozen=True)
class Moved:
    """Another part, without a prefix."""

    moved: Annotated[Stacked, FieldSpec(Stacked)]


@dataclass(frozen=True)
class LargerPart(StatePart, Moved):
    """Both of them, and a field more of the first."""

    maybe: Annotated[Stacked | None, FieldSpec(Stacked)]


def test_parts_of_a_state_have_names_of_their_own() -> None:
    rows, one = message().rows["a"], Stacked(torch.zeros(2))
    stored = to_payload(LargerPart(one, {"a": rows}, one, one))
    assert set(stored) == {"moved", "part/rows/a", "part/count", "part/maybe"}
    assert specs_of(LargerPart, ["a"]).keys() == stored.keys()
    again = from_payload(LargerPart, {**stored, "rows/a": one})
    assert again.rows == {"a": rows}
    assert again.count is again.maybe is again.moved is one
    assert is_own_field(LargerPart, "part/rows/a")
    assert not is_own_field(LargerPart, "rows/a")


def test_a_field_that_is_missing_is_named() -> None:
    sent = to_payload(message())
    del sent["each"]
    with pytest.raises(ProtocolError, match="the field 'each' of Message"):
        from_payload(Message, sent)


def test_annotations_that_say_no_message_are_refused() -> None:
    def own(clients: Any, state: Empty, request: GlobalModel) -> Any:
        return clients, state, request

    with pytest.raises(ConfigError, match=r"expected op own\(clients"):
        op(Kind.WEIGHTS)(own)


def test_what_is_no_op_and_a_round_without_calls_are_refused() -> None:
    def old_op(cfg: Any, block: Any, state: Any, inbox: Any, key: Any) -> Any:
        return cfg, block, state, inbox, key

    def bare_round(server: Any, state: Any) -> Any:
        return state, server

    plain: Any = old_op
    with pytest.raises(ConfigError, match=r"expected ops that @op\(KIND\) has made, got old_op"):
        averaging(plain)
    with pytest.raises(ConfigError, match=r"expected @calls\(\.\.\.\) above bare_round"):
        program(bare_round)


@dataclass(frozen=True)
class Moments:
    """A state of its own."""

    moments: Annotated[Mapping[str, Stacked], exact_weights(Stacked, "moments", optional=True)]


def test_a_state_has_names_of_its_own(cfg: Any) -> None:
    cfg = replace(cfg, keep_optimizer=True)
    calls_ = averaging(train, Moments).calls
    assert calls_ is not None
    specs = calls_.state(cfg)
    assert {n.partition("/")[0] for n in specs} >= {"moments", "optimizer"}

    @dataclass(frozen=True)
    class Taken:
        optimizer: Annotated[Mapping[str, Stacked], exact_weights(Stacked, "optimizer")]

    clashing = averaging(train, Taken).calls
    assert clashing is not None
    with pytest.raises(ConfigError, match="in Taken, got optimizer: rename it"):
        clashing.state(cfg)


@pytest.fixture
def cfg(make_graph: MakeGraph) -> Any:
    """The config of FedAvg's ops in a small run."""
    return setup_of(make_graph(40), FEDAVG, **RUN).method_config


@op(Kind.WEIGHTS)
def train_twice(
    clients: Clients[Any], state: Moments, request: GlobalModel
) -> tuple[Moments, LocalModel]:
    """Train, and keep how far the weights moved."""
    fitted = clients.fit(request.weights)
    moved = {n: Stacked(w - request.weights[n]) for n, w in fitted.tensors.items()}
    return Moments(moved), LocalModel.of(fitted, clients.block)


def test_a_program_has_the_declared_calls(cfg: Any) -> None:
    """In their order, repeated as often as the config says; silos refuse any other."""

    @calls(train, repeat(train_twice, at_most=lambda cfg: cfg.schedule.epochs + 1))
    def own_round(server: Server[Any], state: ServerState) -> Any:
        return state, server

    steps = program(own_round, state=Moments)["calls"].round(cfg, 1, sg.methods.Key.of(0))
    assert [call.op for call in calls_of(steps)] == [train, train_twice]
    first = list(possible_calls(steps))
    assert [call.op for call, _ in first] == [train]
    for _ in range(cfg.schedule.epochs + 1):
        after = [next(rest for _, rest in first)]
        first = list(possible_calls(after[0]))
        assert [call.op for call, _ in first] == [train_twice]
    assert not list(possible_calls(next(rest for _, rest in first)))


def test_calls_in_several_contexts_have_their_keys(cfg: Any) -> None:
    def twice(context: CallContext) -> list[CallContext]:
        return [replace(context, key=context.key.fold(n), kind=Kind.EVALUATION) for n in range(2)]

    steps = steps_of(calls_made_twice(twice), CallContext(cfg, sg.methods.Key.of(0), 1))
    keys = [sg.methods.Key.of(0).fold(n) for n in range(2)]
    assert [(call.op, call.key, call.what) for call in calls_of(steps)] == [
        (train, key, Kind.EVALUATION) for key in keys
    ]


def calls_made_twice(twice: Callable[[CallContext], list[CallContext]]) -> tuple[Part, ...]:
    return when(lambda cfg: cfg.participation == 0, train), for_each(twice, train)


def test_state_goes_from_round_to_round(make_graph: MakeGraph) -> None:
    method = replace(averaging(train_twice, Moments), name="twice")
    ours = sg.run(make_graph(40), method=method, **RUN | {"rounds": 3, "participation": 0.5})
    theirs = sg.run(make_graph(40), method="fedavg", **RUN | {"rounds": 3, "participation": 0.5})
    assert [r["train_loss"] for r in ours.rounds] == [r["train_loss"] for r in theirs.rounds]


@op(Kind.WEIGHTS)
def train_from_zeros(
    clients: Clients[Any], state: Empty, request: GlobalModel
) -> tuple[Empty, LocalModel]:
    """Begin from other weights than were received."""
    start = {name: torch.zeros_like(w) for name, w in request.weights.items()}
    return state, LocalModel.of(clients.fit(start), clients.block)


def test_an_op_that_begins_elsewhere_is_not_scored_as_the_servers_model(
    make_graph: MakeGraph,
) -> None:
    """Counts of the start would be those of its weights, not of the model that was received."""
    method = replace(averaging(train_from_zeros), name="zeros")
    results = [
        sg.run(make_graph(40), method=m, **RUN | {"rounds": 2})
        for m in (method, replace(method, scores_on_receipt=False))
    ]
    losses = [[row["val_server_loss"] for row in result.rounds] for result in results]
    assert losses[0] == losses[1]
    assert scores_start(FEDAVG.round)
    assert not scores_start(method.round)


@calls(train)
def failing_round(server: Server[Any], state: ServerState) -> Any:
    """Fail as a function of a user may."""
    raise KeyError((server, state))


def test_a_failing_round_is_one_line_with_its_place(make_graph: MakeGraph) -> None:
    method = replace(FEDAVG, name="failing", **program(failing_round), cautions=())
    with pytest.raises(OpError, match=r"^failing_round of method failing failed with KeyError"):
        sg.run(make_graph(40), method=method, **RUN)


def test_methods_with_typed_ops_can_be_pickled(make_graph: MakeGraph) -> None:
    method = replace(averaging(train_twice, Moments), name="twice")
    again = pickle.loads(pickle.dumps(method))
    runs = [sg.run(make_graph(40), method=m, **RUN) for m in (method, again)]
    assert runs[0].rounds[0]["train_loss"] == runs[1].rounds[0]["train_loss"]
    assert pickle.loads(pickle.dumps(runs[0])).rounds[0] == runs[0].rounds[0]


# What silos would refuse, a simulation refuses, too.


@dataclass(frozen=True)
class Counted:
    """How often clients took part, (C,)."""

    rounds: Annotated[Stacked, FieldSpec(Stacked, (), torch.int64, low=0)]


@dataclass(frozen=True)
class Unannotated:
    """A reply of which nobody knows what it must be."""

    nodes: Annotated[Stacked, TRAINED]
    loss: Annotated[Stacked, LOSS]
    extra: Stacked


@op(Kind.WEIGHTS)
def train_twice_as_wide(
    clients: Clients[Any], state: Empty, request: GlobalModel
) -> tuple[Empty, LocalModel]:
    model = LocalModel.of(clients.fit(request.weights), clients.block)
    return state, replace(model, loss=Stacked(model.loss.t[:, None]))


@op(Kind.WEIGHTS)
def count_round(
    clients: Clients[Any], state: Empty, request: GlobalModel
) -> tuple[Counted, LocalModel]:
    model = LocalModel.of(clients.fit(request.weights), clients.block)
    del state
    return Counted(Stacked(torch.ones_like(clients.block.num_train))), model


@op(Kind.WEIGHTS)
def reply_unannotated(
    clients: Clients[Any], state: Empty, request: GlobalModel
) -> tuple[Empty, Unannotated]:
    model = LocalModel.of(clients.fit(request.weights), clients.block)
    return state, Unannotated(model.nodes, model.loss, model.loss)


def method_of(round_: Any) -> Method:
    return replace(FEDAVG, name="own", **program(round_))


def test_what_is_no_program_is_refused_at_once(make_graph: MakeGraph) -> None:
    @calls(train)
    def calls_another(server: Server[Any], state: ServerState) -> Any:
        return average_and_step(server, state, train_twice_as_wide)

    @calls(train_twice_as_wide)
    def of_another_shape(server: Server[Any], state: ServerState) -> Any:
        return average_and_step(server, state, train_twice_as_wide)

    @calls(reply_unannotated)
    def without_annotation(server: Server[Any], state: ServerState) -> Any:
        assert state.weights is not None
        return server.average(reply_unannotated, GlobalModel(state.weights), AveragedModel)

    @calls(count_round)
    def without_state(server: Server[Any], state: ServerState) -> Any:
        return average_and_step(server, state, count_round)

    lines = {
        calls_another: "expected a call of an op that @calls.* declares, got train_twice_as_wide",
        of_another_shape: r"expected loss of shape \(C\) in the reply .* says, got \(C, 1\)",
        without_annotation: r"expected Annotated\[TYPE, SPECS\] for extra of Unannotated",
    }
    for round_, line in lines.items():
        with pytest.raises((ConfigError, OpError), match=line):
            go(make_graph(), method=method_of(round_), rounds=1)
    with pytest.raises(ConfigError, match=r"expected state=Counted in program\(\.\.\.\)"):
        method_of(without_state)


@op(Kind.CONTROL)
def begin_nothing(clients: Clients[Any], state: Empty, _: Empty) -> tuple[Empty, Empty]:
    del clients
    return state, Empty()


def test_a_set_up_that_begins_nothing_is_named(make_graph: MakeGraph) -> None:
    @calls(begin_nothing)
    def setup(server: Server[Any], weights: Any) -> ServerState:
        server.call(begin_nothing, Empty())
        return ServerState(weights, {})

    @calls(train)
    def own_round(server: Server[Any], state: ServerState) -> Any:
        return average_and_step(server, state, train)

    method = replace(FEDAVG, name="own", **program(own_round, setup=setup))
    with pytest.raises((ProtocolError, OpError), match=r"call clients\.begin\(\) in the first op"):
        go(make_graph(), method=method, rounds=1, participation=0.5)
