"""How a method is written: what clients do, what the server does, and the order of its calls.

A method is read from top to bottom in one file. Messages and the state of a client are frozen
dataclasses (`silograph.federation.messages`). A client's step is a function of them:

    @op(Kind.WEIGHTS)
    def train(
        clients: Clients[NoOptions], state: Empty, request: GlobalModel
    ) -> tuple[Empty, LocalModel]:
        return state, LocalModel.of(clients.fit(request.weights), clients.block)

and the server's round calls it, in the declared order:

    @calls(train)
    def average(server: Server[NoOptions], state: ServerState) -> tuple[ServerState, RoundReport]:
        mean, report = server.average(train, GlobalModel(state.weights), AveragedModel)
        return (state if mean is None else ServerState(mean.weights, {})), report

`Method(..., **program(average))` makes a method of it. What each end checks, the program that a
silo enforces, and the table of what leaves a silo are derived from the annotations and from the
order, for simulations and real federations alike.

C: clients of a block.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Generic, TypedDict, TypeVar

import torch
from torch import Tensor

from silograph.aggregation.aggregators import check_shapes, combine_weights
from silograph.aggregation.server_optimizers import take_mean
from silograph.core.errors import ConfigError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import (
    Payload,
    Ragged,
    Shared,
    State,
    StateField,
    fields_under,
    tensors_under,
    with_prefix,
)
from silograph.core.text import state_of_fields
from silograph.core.work import work_for
from silograph.evaluation.evaluate import (
    NEIGHBORS,
    TABLES,
    predict_weighed,
    ranked,
    tallies,
    weighed_messages,
)
from silograph.evaluation.scoring import RECEIVED, received_specs, score_received
from silograph.exchange import sent_weights
from silograph.exchange.collect import LOCAL_GRAPH, local_graph
from silograph.exchange.pull import Fetch, fetch_rows, pull_form
from silograph.federation.base import (
    BY_CLIENT,
    Federation,
    Gather,
    Reduce,
    WeightedMean,
    at_server,
    positions_of,
)
from silograph.federation.messages import (
    Empty,
    declared_fields,
    from_payload,
    round_number,
    specs_of,
    to_payload,
)
from silograph.federation.ops import (
    CallContext,
    ClientOp,
    Exchange,
    OpDeclaration,
    Problem,
    anyone,
    calls,
    op,
    ops_in,
    order_of,
    repeat,
    steps_of,
    when,
)
from silograph.federation.ops import Clients as OpClients
from silograph.federation.program import (
    AlikeRounds,
    Call,
    Calls,
    Either,
    Maybe,
    OtherNetwork,
    Steps,
)
from silograph.graph.block.block import ClientBlock
from silograph.methods.base import (
    Init,
    MethodConfig,
    Options,
    Round,
    RoundReport,
    ServerState,
    keep_previous_if_not_finite,
)
from silograph.methods.local_training import (
    SAMPLER_FACTS,
    begin,
    memory_fields,
    memory_in,
    selected,
    state_specs,
    untouched_rows_after_round,
    with_first_state,
)
from silograph.nn.conv import Params
from silograph.nn.fit import Fitted, Start, TrainingInputs, check_fit
from silograph.nn.forward import embedded_pass, whole_pass
from silograph.nn.mini_batches import Full
from silograph.task.counts import judges_of

Before = TypeVar("Before")
After = TypeVar("After")
Request = TypeVar("Request")
Reply = TypeVar("Reply")
Result = TypeVar("Result")
SERVER_OPTIMIZER = "server_optimizer"  # begins the names of what it remembers
TRAINING_STATE = "optimizer/", "neighbors/", "tables/", "sent/", *LOCAL_GRAPH

# --- Clients -------------------------------------------------------------------------------------


@dataclass
class Clients(OpClients, Generic[Options]):
    """The clients of a block, as an op sees them.

    Attributes:
        cfg: of the method.
        block: their graphs.
        key: of the op's draws.
        state: what the library keeps for them besides the method's own state: optimizers, samplers,
            tables and logits; `begin` and `fit` replace it.
        start: weights `weights/*` that trained ones are encoded against, and those of rows that no
            data moves, where the run sends changes; None: the request's, after a round.
    """

    LIBRARY = TRAINING_STATE
    cfg: MethodConfig[Options]
    start: tuple[Mapping[str, Shared], Params] | None = None

    @property
    def options(self) -> Options:
        """The method's options."""
        return self.cfg.options

    @property
    def graph(self) -> ClientBlock:
        """The graphs that clients train on: theirs, and what they have collected of others."""
        has_more = any(name.startswith(LOCAL_GRAPH) for name in self.state)
        return local_graph(self.block, self.state) if has_more else self.block

    def begin(self, cfg: MethodConfig[Options] | None = None) -> None:
        """Set up what the library keeps; the first op of a method's own set-up calls it.

        Args:
            cfg: a config with another model that clients train; None: the method's.
        """
        self.state = with_first_state(cfg or self.cfg, self.block, self.state, self.key)

    def fit(self, start: Start, cfg: MethodConfig[Options] | None = None) -> Fitted:
        """Train for the local epochs of a round, each client on its own training nodes.

        Args:
            start: initial weights by name: a tensor in the model's shape for all clients, (C, ...)
                or `Stacked` with a part for each, or `Patched` (see `silograph.nn.fit`).
            cfg: a config with other corrections or losses; None: the method's.

        Returns:
            Weights, losses, steps and counts of each client. Weights whose rows a client mostly
            does not use, those of sparse features, are `Patched`; `dense` makes tensors of all.
            Where bad input or a diverged step leaves NaN or infinity, private state keeps its
            values from before.
        """
        cfg, state, graph = cfg or self.cfg, self.state, self.graph
        sampler_state, tables = fields_under(NEIGHBORS, state), fields_under(TABLES, state)
        new, counts = {**state}, dict[str, Tensor]()
        # 1. Where the run scores what clients receive, do it before training.
        if cfg.score_on_receipt:
            score_fields, counts = score_received(cfg, graph, start, state)
            new |= score_fields
        # 2. Train.
        memory = memory_in(state) if cfg.keep_optimizer else None
        inputs = TrainingInputs(graph, start, memory, self.key, sampler_state, tables)
        check_fit(cfg.training, inputs)
        fitted = cfg.trainer.fit(cfg.training, inputs)
        # 3. Keep what only the clients have: sampler, tables and optimizer.
        private: dict[str, StateField] = {}
        private |= {f"{NEIGHBORS}/{name}": f for name, f in fitted.neighbors.items()}
        if cfg.keep_optimizer:
            private |= memory_fields(fitted.memory)
        private |= {f"{TABLES}/{name}": f for name, f in fitted.tables.items()}
        if private:
            new |= keep_previous_if_not_finite(private, state)
        # 4. Keep logits of the trained model for the scored rows, as the clients' own view.
        sampler, facts, logits = cfg.schedule.neighbors, dict[str, Tensor](), fitted.logits
        if not isinstance(sampler, Full):
            with work_for(Kind.EVALUATION):
                facts |= sampler.facts(graph, fields_under(NEIGHBORS, new))
                messages = weighed_messages(cfg, graph, new)
                if messages is not None:  # only now, for it makes whole tensors of the weights
                    logits = predict_weighed(cfg, fitted.tensors, graph, messages)
        if cfg.relevant is not None:
            with work_for(Kind.EVALUATION):
                new |= ranked(cfg, "own", fitted.tensors, graph, fitted.tables)
        self.state = {**new, "own/logits": judges_of(graph).select(logits)}
        return replace(fitted, received=counts, sampler_facts=facts, logits=logits)

    def embeddings(self, weights: Mapping[str, Tensor]) -> Ragged:
        """Return what enters the last layer, (n, D), for all rows that clients train on.

        Nothing is dropped, and gradients do not go through it.

        Args:
            weights: shared by all clients, or (C, ...).
        """
        graph, model = self.graph, self.cfg.model.staged
        assert model is not None  # see `why_no_embeddings`
        inputs = whole_pass(model, graph, next(iter(weights.values())).dtype)
        with torch.no_grad():
            return Ragged(embedded_pass(model, weights, inputs, None)[1], graph.off)

    @staticmethod
    def encoded(message: type) -> bool:
        """Whether a message has weights in the form that the run sends them in."""
        forms = sent_weights.inbox_spec, sent_weights.reply_spec, sent_weights.later_reply_spec
        return any(f.specs in forms for f in declared_fields(message))

    def decode(self, inbox: Payload) -> Payload:
        """Return what has come, with weights as they are before they are sent."""
        weights = sent_weights.decode_weights(self.cfg, self.block, self.state, inbox)
        return {**inbox, **weights}

    def encode(self, inbox: Payload, state: State, reply: Payload) -> tuple[State, Payload]:
        """Return the new state, and the reply with weights in the form of the run."""
        if self.start is None:
            start = {n: f for n, f in inbox.items() if isinstance(f, Shared)}
            self.start = (
                start,
                untouched_rows_after_round(self.cfg, tensors_under("weights", start)),
            )
        base, untouched = self.start
        return sent_weights.encode_reply(self.cfg, state, base, reply, untouched)

    @staticmethod
    def reply_check(declared: OpDeclaration, cfg: Any) -> Problem | None:
        """Return what finds a problem with counts of the weights that clients received."""
        if not sends_scores(declared) or not cfg.score_on_receipt:
            return None
        return tallies(cfg.model, cfg.count_rules, f"{RECEIVED}/")


def sends_scores(declared: OpDeclaration) -> bool:
    """Return whether clients score the weights that they receive, and send the counts."""
    return any(f.name == RECEIVED for f in declared_fields(declared.reply))


# --- The server ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server(Generic[Options]):
    """The server in a round, or in set-up.

    Attributes:
        fed: carries calls to clients.
        cfg: of the method.
        round: number of the round from 1; 0: set-up.
        key: of the run.
        used_rows: which rows of first weights each client uses, where only these are sent.
        declared: ops that the round or the set-up calls, as `@calls` says; None: any.
        key_of_calls: of the clients' draws, where a round has several; None: one for all its calls.
    """

    fed: Federation
    cfg: MethodConfig[Options]
    round: int
    key: Key
    used_rows: Params = field(default_factory=dict)
    declared: frozenset[ClientOp[Any, Any]] | None = None
    key_of_calls: Key | None = None

    @property
    def options(self) -> Options:
        """The method's options."""
        return self.cfg.options

    @property
    def call_key(self) -> Key:
        """Key of the clients' draws."""
        if self.key_of_calls is not None:
            return self.key_of_calls
        return self.key.fold("train", self.round) if self.round else self.key

    @property
    def context(self) -> CallContext:
        """What calls depend on."""
        return CallContext(self.cfg, self.call_key, self.round)

    def select(self) -> tuple[str, ...]:
        """Return the ids of the clients that train in the round."""
        if self.cfg.selected is None and self.cfg.participation == 1:
            return tuple(self.fed.ids)
        return selected(self.fed, self.cfg, self.round, self.key)

    def call(
        self,
        op: ClientOp[Request, Reply],
        request: Request,
        *,
        to: Sequence[str] | None = None,
        reduce: Reduce | None = None,
        allow_missing: bool = False,
    ) -> Payload:
        """Call an op at clients (all by default), and return what `reduce` makes of the replies.

        With `allow_missing` the call goes on without clients that are away or fail.
        """
        inbox, kind, key = self._inbox(op, request, to), op.declaration.kind, self.call_key
        rows = reduce is None and any(f.is_rows for f in declared_fields(op.declaration.reply))
        return self.fed.call(
            op,
            inbox,
            what=kind,
            key=key,
            to=to,
            reduce=reduce,
            rows=rows,
            allow_missing=allow_missing,
        )

    def fetch_rows(
        self,
        slots: Payload,
        op: ClientOp[Any, Any],
        request: Any,
        into: type[Request],
        *,
        to: Sequence[str] | None = None,
        of_anyone: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> Request:
        """Fetch the rows that clients want, and return the next request to them.

        Args:
            slots: which ones: what a call to the clients has returned, `slot` and maybe `version`.
            op: how owners send rows; it gets `request` and the fields `row` and maybe `since`.
            request: fields that owners and the clients get besides.
            into: class of the next request, with the fields of the rows and those of `request`.
            to: the clients that want rows.
            of_anyone: whether owners need not be among these (see `anyone`).
            dtype: of floating point values in the run.
        """
        fields = to_payload(request)
        form = pull_form(op, self.cfg, some=of_anyone)
        what = op.declaration.kind
        rows = fetch_rows(
            self.fed,
            slots,
            op,
            what=what,
            key=self.call_key,
            inbox=fields,
            to=to,
            form=form,
            dtype=dtype,
        )
        return from_payload(into, {**fields, **rows})

    def exchange(self, rows: Exchange, request: Any, *, to: Sequence[str] | None = None) -> Any:
        """Let rows go from clients to others, by default from all to all."""
        return rows.carry(self.fed, request, replace(self.context, to=to))

    def average(
        self,
        op: ClientOp[Request, Reply],
        request: Request,
        into: type[Result],
        *,
        mean: WeightedMean | None = None,
    ) -> tuple[Result | None, RoundReport]:
        """Let the selected clients train, and average what they send, weighted by training nodes.

        The run's aggregator combines `weights` instead, if it is another than the mean.

        Args:
            op: its reply has the fields `nodes` and `loss`.
            request: what clients get.
            into: class of the averages: fields of the reply, each one tensor; `nodes` is the sum.
            mean: by `nodes`. None: of all fields; of weights in the form of the run around those
                of a round without data, so that rows which no client trains cost nothing.

        Returns:
            The averages, None where no client could train; and the report of the round.
        """
        client_ids, cfg = self.select(), self.cfg
        inbox, declared = self._inbox(op, request, client_ids), op.declaration
        if mean is None and declared.encodes_request:
            weights = tensors_under("weights", to_payload(request))
            untouched = untouched_rows_after_round(cfg, weights)
            mean = WeightedMean("nodes", untouched)
            if not cfg.sent.plain:
                mean = sent_weights.mean_of(cfg, "nodes", weights, self.used_rows, untouched)
        mean = mean or WeightedMean("nodes")

        # 1. Call the clients: fields are averaged, but for weights that an aggregator combines.
        scores = tuple(received_specs(cfg)) if cfg.score_on_receipt else ()
        aggregator = cfg.aggregator
        combine = aggregator.combine
        combined = [n for n in inbox if combine is not None and n.startswith("weights/")]
        reduce: Reduce = mean
        if cfg.selector_uses_feedback or scores or combined:
            fold = replace(mean, without=(*combined, *scores))  # nobody reads their mean
            reduce = Gather("nodes", "loss", *scores, *combined, fold=fold)
        what, key = declared.kind, self.call_key
        reply = self.fed.call(op, inbox, what=what, key=key, to=client_ids, reduce=reduce)
        by_client = tensors_under("by_client", reply)
        averages = {n: field for n, field in reply.items() if not n.startswith(BY_CLIENT)}

        # 2. Report what selectors and scores need.
        needs_replies = cfg.selector_uses_feedback or scores
        trained = {n: t for n, t in by_client.items() if needs_replies and n not in combined}
        # "": there was nothing to combine.
        name = aggregator.name if combined or combine is None else ""
        facts = dict[str, float]()
        if not isinstance(cfg.schedule.neighbors, Full):
            names = fields_under(SAMPLER_FACTS, specs_of(declared.reply, cfg))
            facts = dict.fromkeys(names, math.nan)
        report = RoundReport(client_ids, None, facts, trained=trained, aggregator=name)
        if "loss" not in averages:  # no selected client has a training node
            return None, report

        # 3. Combine weights.
        if combined:
            is_trained = by_client["answered"] & (by_client["nodes"] > 0)
            of_clients = {n.partition("/")[2]: by_client[n][is_trained] for n in combined}
            nodes = by_client["nodes"][is_trained]
            with at_server(combine or combine_weights, f"aggregator {aggregator.name}", self.round):
                new = combine_weights(aggregator, cfg.aggregator_options, nodes, of_clients)
            averages |= {f"weights/{n}": Shared(w) for n, w in new.items()}
        is_ours = (op.__module__ or "").startswith("silograph.")
        if self.round == 1 and cfg.sent.plain and not is_ours:
            self._check_shapes(op, averages)
        loss = float(averages["loss"].t)
        facts = {n: float(t) for n, t in tensors_under(SAMPLER_FACTS, averages).items()}
        return from_payload(into, averages), replace(report, train_loss=loss, facts=facts)

    def step(
        self, state: ServerState, mean: Mapping[str, Tensor], report: RoundReport
    ) -> tuple[ServerState, RoundReport]:
        """Let the server's optimizer take its step towards the clients' mean.

        Args:
            state: weights x_t, and memory with that of the optimizer.
            mean: of the clients' weights, by the names of x_t.
            report: of the round.

        Returns:
            The state after the step, with weights in the dtype of each and the rest of the memory
            as it was; and the report, which names the optimizer.

        Raises:
            ProtocolError: a user's own optimizer returns weights of other names or shapes.
        """
        assert state.weights is not None
        optimizer, step = self.cfg.server_optimizer, self.cfg.server_step
        own = fields_under(SERVER_OPTIMIZER, state.memory)
        others = {n: t for n, t in state.memory.items() if not n.startswith(f"{SERVER_OPTIMIZER}/")}
        weights, memory = mean, own
        if step is not take_mean:
            with at_server(step, f"server optimizer {optimizer}", self.round):
                weights, memory = step(state.weights, mean, own)
        check_shapes(f"server optimizer {optimizer}", state.weights, weights)
        weights = {n: weights[n].to(w.dtype) for n, w in state.weights.items()}
        new = ServerState(weights, {**others, **with_prefix(SERVER_OPTIMIZER, memory)})
        return new, replace(report, server_optimizer=optimizer)

    def gather(
        self, op: ClientOp[Request, Reply], request: Request, *, to: Sequence[str]
    ) -> dict[str, Tensor]:
        """Call an op at clients, and return each field of the replies by client.

        Returns:
            Fields (C, ...) by name, zeros for clients that did not answer, and `answered` (C,).
        """
        names = specs_of(op.declaration.reply, self.cfg)
        return tensors_under("by_client", self.call(op, request, to=to, reduce=Gather(*names)))

    def report(
        self,
        client_ids: tuple[str, ...],
        by_client: Mapping[str, Tensor],
        is_averaged: Tensor,
        facts: Mapping[str, float] | None = None,
        client_facts: Mapping[str, Tensor] | None = None,
    ) -> RoundReport:
        """Return the report of a round whose replies the server has by client.

        Args:
            client_ids: of the clients that were called.
            by_client: of `gather`, with `nodes` and `loss` (C,).
            is_averaged: (C,) bool, clients whose models are used; the loss is their mean.
            facts: of the round.
            client_facts: of the clients.
        """
        nodes, losses = by_client["nodes"][is_averaged], by_client["loss"][is_averaged]
        loss = float((losses * nodes).sum() / nodes.sum()) if bool(nodes.any()) else None
        counts = {n: t for n, t in by_client.items() if n.startswith(f"{RECEIVED}/")}
        names = ("answered", "nodes", "loss") if self.cfg.selector_uses_feedback or counts else ()
        trained = {**{name: by_client[name] for name in names}, **counts}
        prefix = f"{SAMPLER_FACTS}/"
        sampler_facts = {
            name.removeprefix(prefix): float((t[is_averaged] * nodes).sum() / nodes.sum())
            for name, t in by_client.items()
            if name.startswith(prefix)
        }
        return RoundReport(
            client_ids, loss, {**sampler_facts, **(facts or {})}, client_facts or {}, trained
        )

    def _check_shapes(self, op: ClientOp[Any, Any], averages: Payload) -> None:
        """Raise `ConfigError` where averages have other shapes than the reply declares."""
        for name, spec in specs_of(op.declaration.reply, self.cfg).items():
            if name in averages and tuple(averages[name].t.shape) != spec.shape:
                expected, got = (
                    "(" + ", ".join(map(str, ("C", *shape))) + ")"
                    for shape in (spec.shape, averages[name].t.shape)
                )
                raise ConfigError(
                    f"expected {name} of shape {expected} in the reply of {op.__name__}, as its "
                    f"annotation says, got {got}"
                )

    def _inbox(
        self,
        op: ClientOp[Request, Reply],
        request: Request,
        to: Sequence[str] | None,
    ) -> Payload:
        if self.declared is not None and op not in self.declared:
            raise ConfigError(
                f"expected a call of an op that @calls(...) declares, got {op.__name__}: add it "
                "there, where it is called in the order"
            )
        inbox = to_payload(request)
        if self.cfg.sent.plain or not op.declaration.encodes_request:
            return inbox
        positions = positions_of(self.fed.ids, to)
        cfg, weights = self.cfg, tensors_under("weights", inbox)
        return {**inbox, **sent_weights.encode_weights(cfg, weights, self.used_rows, positions)}


# --- A method's program --------------------------------------------------------------------------

Setup = Callable[[Server[Any], Params], ServerState]
ServerRound = Callable[[Server[Any], ServerState], tuple[ServerState, RoundReport]]


class Program(TypedDict):
    """Fields of `Method` that follow from typed ops."""

    init: Init[Any]
    round: Round[Any]
    calls: Calls


@dataclass(frozen=True)
class TypedMethod:
    """Functions of a `Method` whose round and set-up are written with typed ops.

    They are methods of a value, not functions in functions, so that a `Method` can be pickled.

    Attributes:
        written_round: decorated with `calls`.
        setup: decorated with `calls`; None: clients get nothing.
        state: class of the state that clients keep between rounds.
        trained: returns the config with the model that clients train.
    """

    written_round: ServerRound
    setup: Setup | None
    state: type
    trained: Callable[[MethodConfig[Any]], MethodConfig[Any]]

    __getstate__ = state_of_fields  # what is worked out from them is not pickled

    @cached_property
    def declared(self) -> frozenset[ClientOp[Any, Any]]:
        """The ops that the round calls."""
        return frozenset(ops_in(order_of(self.written_round)))

    def init(
        self, fed: Federation, cfg: MethodConfig[Any], weights: Params, key: Key
    ) -> ServerState:
        """Set up the clients, and return the server's first state."""
        # What silos derive is derived here, too, so that a simulation finds what they would refuse.
        self.setup_steps(cfg, key)
        self.round_steps(cfg, 1, key)
        self.client_state(cfg)
        if self.setup is None:
            fed.call(begin, {}, what=Kind.CONTROL, key=key)
            return ServerState(weights, sent_weights.learn_form(fed, cfg, key))
        server = Server(fed, cfg, 0, key, declared=frozenset(ops_in(order_of(self.setup))))
        new = self.setup(server, weights)
        return ServerState(new.weights, {**new.memory, **sent_weights.learn_form(fed, cfg, key)})

    def round(
        self, fed: Federation, cfg: MethodConfig[Any], state: ServerState, t: int, key: Key
    ) -> tuple[ServerState, RoundReport]:
        """Carry out a round."""
        used_rows = {} if cfg.sent.plain else sent_weights.remembered_form(state.memory)
        own = {name: m for name, m in state.memory.items() if name not in used_rows}
        server = Server(fed, cfg, t, key, used_rows, declared=self.declared)
        new, report = self.written_round(server, ServerState(state.weights, own))
        return ServerState(new.weights, {**new.memory, **used_rows}), report

    def setup_steps(self, cfg: MethodConfig[Any], key: Key) -> Steps:
        """Return the calls of the set-up."""
        if self.setup is None:
            own: tuple[Steps, ...] = (Call(begin, Kind.CONTROL, key),)
        else:
            own = steps_of(order_of(self.setup), CallContext(cfg, key))
        return *own, sent_weights.learn_steps(cfg, key)

    def round_steps(self, cfg: MethodConfig[Any], t: int, key: Key) -> Steps:
        """Return the calls of a round."""
        parts = order_of(self.written_round)
        context = CallContext(cfg, key.fold("train", t), t)
        own = steps_of(parts, context)
        if cfg.everyone_trains:
            return own
        answers = steps_of(parts, context, only_answers=True)
        return Either(own, answers) if answers else Maybe(own)

    def client_state(self, cfg: MethodConfig[Any]) -> dict[str, Any]:
        """Return the specs of what a client keeps between rounds."""
        library = {**state_specs(self.trained(cfg)), **sent_weights.state_spec(cfg)}
        own = specs_of(self.state, cfg)
        if clash := {n.partition("/")[0] for n in library} & {n.partition("/")[0] for n in own}:
            raise ConfigError(
                f"expected other names of fields than the library's in {self.state.__name__}, got "
                f"{min(clash)}: rename it"
            )
        return library | own


def same_config(cfg: MethodConfig[Any]) -> MethodConfig[Any]:
    """Return the config: clients train the method's model."""
    return cfg


def program(
    round_: ServerRound,
    *,
    setup: Setup | None = None,
    state: type = Empty,
    trained: Callable[[MethodConfig[Any]], MethodConfig[Any]] = same_config,
    server_model: bool | Callable[[Any], bool] = True,
    other_network: Callable[[Any], OtherNetwork] | None = None,
) -> Program:
    """Return the fields of a `Method` whose round and set-up are written with typed ops.

    Args:
        round_: one round, decorated with `calls`.
        setup: sets up the clients, decorated with `calls`; the first op must call `Clients.begin`.
            None: clients get nothing, and the server starts from the initial weights.
        state: class of the state that clients keep between rounds.
        trained: returns the config with the model that clients train, if it is another.
        server_model: see `Calls`.
        other_network: see `Calls`.
    """
    declared: list[Callable[..., Any]] = [round_] if setup is None else [round_, setup]
    for function in declared:
        if not order_of(function):
            raise ConfigError(
                f"expected @calls(...) above {getattr(function, '__name__', 'a round')}, with the "
                "ops that it calls in their order, got none: see docs/reference/method_interface.md"
            )
    *_, last = ops_in(order_of(round_))
    remaining = declared_fields(last.declaration.after)
    if left := {f.name for f in remaining} - {f.name for f in declared_fields(state)}:
        raise ConfigError(
            f"expected state={last.declaration.after.__name__} in program(...), which clients keep "
            f"after {last.__name__}, got {state.__name__} without {min(left)}"
        )
    typed = TypedMethod(round_, setup, state, trained)
    requests = (op.declaration.request for op in typed.declared)
    has_number = any(f.specs is round_number for cls in requests for f in declared_fields(cls))
    steps = typed.round_steps if has_number else AlikeRounds(typed.round_steps)
    calls_ = Calls(typed.setup_steps, steps, typed.client_state, server_model, other_network)
    return {"init": typed.init, "round": typed.round, "calls": calls_}


def written_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what the author of a method has written as its round or set-up, for messages."""
    typed = getattr(function, "__self__", None)
    if not isinstance(typed, TypedMethod):
        return function
    written = typed.written_round if function.__name__ == "round" else typed.setup or function
    return written.func if isinstance(written, partial) else written


def scores_start(round_: Round[Any]) -> bool:
    """Return whether clients surely score the server's model when they receive it to train.

    Only in rounds of the library: those of a user may send other weights, and a user's op may
    begin from others than it receives. The counts would be those of these weights.
    """
    typed = getattr(round_, "__self__", None)
    if not isinstance(typed, TypedMethod):
        return False
    ops = list(ops_in(order_of(typed.written_round)))
    modules = [f.__module__ or "" for f in (written_function(round_), *ops)]
    is_ours = all(name.startswith("silograph.") for name in modules)
    return is_ours and any(sends_scores(op.declaration) for op in ops)


__all__ = [
    "ClientOp",
    "Clients",
    "Empty",
    "Fetch",
    "Server",
    "anyone",
    "calls",
    "op",
    "program",
    "repeat",
    "when",
]
