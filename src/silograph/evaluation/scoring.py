"""How a method's models are scored: which neighbors a node sees, and which view picks the round.

Scores are counts that clients report (`silograph.evaluation.evaluate`). Of every method the
clients' own models are scored; how the server's model is scored is what the values here differ in.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, Protocol

import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import (
    NO_STATE,
    Payload,
    Ragged,
    Stacked,
    State,
    fields_under,
    tensors_under,
)
from silograph.core.setting_values import NO_MINIMUM, RowMinimum
from silograph.core.work import work_for
from silograph.evaluation.evaluate import (
    TABLES,
    call_for_counts,
    counts_of_logits,
    exchanged_counts,
    exchanged_steps,
    judge_left,
    predict,
    ranked,
    ranking_reply,
    ranking_reply_specs,
    scoring_steps,
    server_counts,
    server_steps,
    tally_specs,
)
from silograph.evaluation.views import FETCHED, HALO, OWN, SILOS
from silograph.exchange.pass_state import PassState
from silograph.exchange.passes import (
    AtStage,
    StartOfPass,
    TrainingRows,
    at_sums,
    begin,
    begin_inside,
    cross,
    divisible,
    finish,
    inputs_at,
    predict_steps,
    prediction,
    with_product,
)
from silograph.exchange.passes import predict as predict_together
from silograph.exchange.pull import Fetch, finish_alone
from silograph.federation.base import Federation, Sum
from silograph.federation.field_specs import BOUNDARY, SLOTS, FieldSpec, FieldSpecs
from silograph.federation.messages import Empty
from silograph.federation.ops import ClientOp, Clients, op
from silograph.federation.program import Steps
from silograph.graph.block.block import ClientBlock
from silograph.nn.fit import Start, check_like, start_fields, whole
from silograph.nn.forward import AnyModel
from silograph.nn.model import before, scales_of
from silograph.nn.reach import gathered, messages_out
from silograph.task.counts import CountRules, judges_of

# --- Views of evaluation: which neighbors of a node the server's model uses when it is scored ----


class Evaluation(Protocol):
    """A way to score the server's model."""

    @property
    def view(self) -> Literal["server", "personalized"]:
        """The view whose validation scores pick the round."""

    @property
    def all_silos(self) -> bool:
        """Whether a node sees its neighbors in all silos, and all train in every round."""

    @property
    def copies(self) -> bool:
        """Whether several clients may hold a node."""

    @property
    def crosses(self) -> bool:
        """Whether scores need sums that cross silos."""

    def counts(
        self, fed: Federation, model: AnyModel, inbox: Payload, key: Key, rules: CountRules
    ) -> dict[str, Tensor]:
        """Return all clients' counts of the server's model.

        Args:
            fed: the engine.
            model: the shape.
            inbox: `weights/*` of the server; where no sums cross, encoded as for training.
            key: of the calls.
            rules: what the replies hold.
        """

    def steps(self, model: AnyModel, inbox_specs: FieldSpecs, key: Key, rules: CountRules) -> Steps:
        """Return the calls of `counts`.

        Args:
            model: the shape.
            inbox_specs: specs of the inbox.
            key: of the calls.
            rules: what the replies hold.
        """

    def seen(self, collect: float) -> str:
        """Return how a node is seen where clients have fetched a share `collect` of their halo."""


@dataclass(frozen=True)
class OwnGraph:
    """Each node is seen through its own client's graph; the server's model picks the round.

    Attributes:
        view: see `Evaluation`.
        through: description of that graph, one of `silograph.evaluation.scoring`.
    """

    view: Literal["server", "personalized"] = "server"
    through: str = OWN
    all_silos = False
    copies = True
    crosses = False

    def counts(
        self, fed: Federation, model: AnyModel, inbox: Payload, key: Key, rules: CountRules
    ) -> dict[str, Tensor]:
        """Score through the clients' graphs."""
        del model
        return server_counts(fed, inbox, key, rules)

    def steps(self, model: AnyModel, inbox_specs: FieldSpecs, key: Key, rules: CountRules) -> Steps:
        """Return the calls of `counts`; see `Evaluation`."""
        return server_steps(model, inbox_specs, key, rules)

    def seen(self, collect: float) -> str:
        """Return how a node is seen."""
        return FETCHED if collect and self.through == OWN else self.through


def personal() -> OwnGraph:
    """Return `OwnGraph` where the clients' own models pick the round."""
    return OwnGraph("personalized")


@dataclass(frozen=True)
class AllSilos:
    """Each node is seen with its neighbors in all silos; the server's model picks the round.

    Attributes:
        view: whose validation scores pick the round.
        row_minimum: how many nodes and silos must contribute to the sums that scores need.
    """

    view: Literal["server", "personalized"] = "server"
    row_minimum: RowMinimum = NO_MINIMUM
    all_silos = True
    copies = False
    crosses = True

    def counts(
        self, fed: Federation, model: AnyModel, inbox: Payload, key: Key, rules: CountRules
    ) -> dict[str, Tensor]:
        """Score with sums over all silos."""
        return exchanged_counts(
            fed, model, tensors_under("weights", inbox), key, rules, self.row_minimum
        )

    def steps(self, model: AnyModel, inbox_specs: FieldSpecs, key: Key, rules: CountRules) -> Steps:
        """Return the calls of `counts`; see `Evaluation`."""
        del inbox_specs
        return exchanged_steps(model, key, rules, self.row_minimum)

    def seen(self, collect: float) -> str:
        """Return how a node is seen."""
        del collect
        return SILOS


# --- halo from -----------------------------------------------------------------------------------
# Scoring with rows of other silos from some layer on: below it each node sees its own graph.
#
# Owners multiply their rows by the weights and scale them, so no feature leaves where the first
# layer is not shared.
#
# C: clients. n: rows. k: halo slots. O: width of a stage's sum.


@dataclass(frozen=True)
class HaloFrom:
    """Each node sees its neighbors in other silos from a layer on.

    Attributes:
        layer: number of that layer among those that sum over neighbors, 0 or 1.
        view: whose validation scores pick the round.
        by: `rows` by `pull`, so that clients may hold copies of a node; or `sums`, from layer 1 on.
            Where clients keep features of their halo (`exchange.pull`), they then see these in
            layer 0, too.
        row_minimum: how many nodes and silos must contribute to sums, and whether these are masked.
    """

    layer: Literal[0, 1]
    view: Literal["server", "personalized"] = "server"
    by: Literal["rows", "sums"] = "rows"
    row_minimum: RowMinimum = NO_MINIMUM
    crosses = True

    @property
    def all_silos(self) -> bool:
        """Whether all clients train in every round."""
        return self.by == "rows"

    @property
    def copies(self) -> bool:
        """Whether several clients may hold a node."""
        return self.by == "rows"

    def counts(
        self, fed: Federation, model: AnyModel, inbox: Payload, key: Key, rules: CountRules
    ) -> dict[str, Tensor]:
        """Score with rows or sums of all halo slots."""
        staged = divisible(model)
        if self.by == "sums":
            weights = tensors_under("weights", inbox)
            predict_together(fed, staged, weights, key, finish_alone, self.row_minimum)
            return call_for_counts(fed, judge_left, {}, key, rules)
        context = prediction(staged, key)
        start = StartOfPass(tensors_under("weights", inbox), torch.tensor(False))
        context.call(fed, self._begin, start, Sum())  # counts that nobody reads
        for stage in at_sums(context)[self.layer :]:
            cross(fed, BOUNDARY_ROWS, stage)
        return call_for_counts(fed, judge_left, {}, key, rules)

    @property
    def _begin(self) -> ClientOp[StartOfPass, TrainingRows]:
        """The op that begins a pass."""
        return begin_inside if self.layer else begin

    def steps(self, model: AnyModel, inbox_specs: FieldSpecs, key: Key, rules: CountRules) -> Steps:
        """Return the calls of `counts`; `rules`: what the replies hold."""
        del inbox_specs
        staged = divisible(model)
        scoring = scoring_steps(judge_left, {}, model, key, rules)
        if self.by == "sums":
            return predict_steps(staged, key, finish_alone, self.row_minimum), scoring
        context = prediction(staged, key)
        rows = tuple(BOUNDARY_ROWS.steps(stage) for stage in at_sums(context)[self.layer :])
        return context.declare(self._begin), rows, scoring

    def seen(self, collect: float) -> str:
        """Return how a node is seen."""
        del collect
        return HALO if self.layer else SILOS


HaloSums = partial(HaloFrom, 1, by="sums")  # needs no row of a single node to cross


@dataclass(frozen=True)
class SentMessages:
    """Messages (B, O) of all boundary rows."""

    rows: Annotated[Ragged, lambda form: FieldSpec(Ragged, (form.width,), rows=BOUNDARY)]


@dataclass(frozen=True)
class HaloMessages(AtStage):
    """The same of all halo slots, (S, O)."""

    rows: Annotated[Ragged, lambda form: FieldSpec(Ragged, (form.width,), rows=SLOTS)]


@op(Kind.EVALUATION)
def serve_all(
    clients: Clients, state: PassState, request: AtStage
) -> tuple[PassState, SentMessages]:
    """Compute the messages of a stage; send those of boundary rows."""
    halo = clients.block.halo
    at, params = inputs_at(clients, state, request, "before")
    z = before(params, at)
    rows = messages_out(scales_of(at.stage.conv), z, at.reach, halo.boundary)
    return with_product(state, at, z), SentMessages(Ragged(rows, halo.boundary_off))


@op(Kind.EVALUATION)
def store_all(clients: Clients, state: PassState, request: HaloMessages) -> tuple[PassState, Empty]:
    """Sum the received rows and finish the stage."""
    at, params = inputs_at(clients, state, request, "after")
    rows = check_like(request.rows.t, state.z[str(at.number)].t)
    remote_sums = gathered(at.reach, clients.block.halo.adj, rows)
    return finish(clients, state, at, params, remote_sums), Empty()


BOUNDARY_ROWS = Fetch[AtStage](None, serve_all, store_all)


# --- on receipt ----------------------------------------------------------------------------------
# Scoring the model that a client receives, before it trains: counts that travel with its reply.
#
# They cost no call of their own. Where the run asks for it (`MethodConfig.score_on_receipt`), every
# selected client counts what the model with which it begins the round says of its validation
# nodes, or of all nodes that judge; so the server's model of a round is known by who trains in
# the next one.
#
# C: clients.


RECEIVED = "received"  # begins the names of the counts in a reply
VALIDATION = "val."


def score_received(
    cfg: Any, block: ClientBlock, start: Start, state: State = NO_STATE
) -> tuple[dict[str, Ragged | Stacked], dict[str, Tensor]]:
    """Return fields for the state, and the counts (C, ...) of the reply; both empty if off.

    Args:
        cfg: of the method; it has `score_on_receipt`, `is_unscored`, `model`, `backend`,
            `schedule`, `relevant` and `count_rules`.
        block: the graphs on which the clients train.
        start: from which they train, see `silograph.nn.fit`.
        state: the clients', with tables and what the neighbor sampler keeps.
    """
    if not cfg.score_on_receipt:
        return {}, {}
    if cfg.is_unscored:  # zeros, so that a round costs the same bytes whether it scores or not
        assert block.adj.values is not None  # blocks carry values of the run's dtype
        like, clients = block.adj.values, block.num_clients
        return {}, {
            name: like.new_zeros(clients, *(n or 0 for n in spec.shape), dtype=spec.dtype)
            for name, spec in _count_specs(cfg).items()
        }
    with work_for(Kind.EVALUATION):
        weights = weights_of(cfg, block, start)
        logits = predict(cfg, weights, block, state)
        ranking = (
            ranked(cfg, "server", weights, block, fields_under(TABLES, state))
            if cfg.score_on_receipt == "all"
            else {}
        )
    rows = judges_of(block).select(logits)
    counts = counts_of_logits(cfg, block, rows)
    if cfg.score_on_receipt == "all":
        if ranking:
            counts |= {n: f.t for n, f in ranking_reply(cfg, ranking, block, "server").items()}
        return {"server/logits": rows, **ranking}, counts
    return {}, {name: t for name, t in counts.items() if name.startswith(VALIDATION)}


def weights_of(cfg: Any, block: ClientBlock, start: Start) -> Mapping[str, Tensor]:
    """Return the weights that training starts from: shared by all, or (C, ...) of each client."""
    shapes = cfg.model.weight_shapes
    shared = {n: w for n, w in start.items() if isinstance(w, Tensor) and w.shape == shapes[n]}
    if len(shared) == len(shapes):
        return shared
    fields = start_fields(cfg.model, start, block.num_clients)
    return {name: whole(field) for name, field in fields.items()}


def received_specs(cfg: Any) -> FieldSpecs:
    """Return the specs of these counts in a reply, `received/*`."""
    if not cfg.score_on_receipt:
        return {}
    return {f"{RECEIVED}/{n}": spec for n, spec in _count_specs(cfg).items()}


def _count_specs(cfg: Any) -> FieldSpecs:
    """Return the specs of counts of a model that clients receive, rankings included."""
    specs = tally_specs(cfg.model.task, cfg.model.outputs, cfg.count_rules)
    if cfg.score_on_receipt != "all":
        return {name: spec for name, spec in specs.items() if name.startswith(VALIDATION)}
    return specs if cfg.relevant is None else {**specs, **ranking_reply_specs()}
