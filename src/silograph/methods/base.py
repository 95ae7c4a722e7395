"""The interface of a method: a server program, its options, where it trains and how it is scored.

Differences between methods are values with an interface (`Setting`, `Evaluation`, `Needs`), so that
no other code has to know the methods.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated, Any, Generic, Literal, Protocol, cast

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor
from typing_extensions import TypeVar

from silograph.aggregation.aggregators import MEAN, Aggregator
from silograph.aggregation.server_optimizers import NONE, ServerStep, take_mean
from silograph.control import FIXED, Controller, Knob, knobs_of
from silograph.core.config import STRICT, RunConfig
from silograph.core.errors import ConfigError
from silograph.core.key import Key
from silograph.core.payload import Patched, Stacked, State, StateField, put, state_of, take_all
from silograph.core.resolved_config import ResolvedConfig
from silograph.core.setting_values import (
    CONSTANT,
    NO_MINIMUM,
    PLAIN_WEIGHTS,
    RateSchedule,
    RowMinimum,
    SentWeights,
)
from silograph.core.text import short_repr, state_of_fields
from silograph.evaluation.scoring import Evaluation, OwnGraph
from silograph.evaluation.views import UNCUT
from silograph.federation.base import Federation
from silograph.federation.privacy.updates import UpdatePrivacy
from silograph.federation.program import Calls
from silograph.graph.block.block import ClientBlock
from silograph.nn.backends import TORCH, Backend
from silograph.nn.conv import Params
from silograph.nn.correction import Correction, LossTerm
from silograph.nn.fit import Schedule, TrainableModel, Trainer, Training
from silograph.nn.optim import SGD, Adam, Optimizer
from silograph.nn.segment import segment_sum
from silograph.task.counts import ALL_COUNTS, CountRules

# --- caution -------------------------------------------------------------------------------------
# Data on which the defaults of a method are known not to learn.


Predicted = Literal["labels of nodes", "ratings"]


@dataclass(frozen=True)
class Caution:
    """A part of a method's caution.

    >>> print(Caution("raise --lr", of="ratings"))
    for ratings, raise --lr

    Attributes:
        text: the data on which the defaults do not learn, and settings that do.
        of: the predictions that it is about; None: all.
    """

    text: str
    of: Predicted | None = None

    def __str__(self) -> str:
        """Return it in words."""
        return self.text if self.of is None else f"for {self.of}, {self.text}"


def in_words(parts: Iterable[Caution]) -> str:
    """Return parts as one text, empty without any."""
    return "; ".join(map(str, parts))


# --- What methods need of the clients' training, and their defaults ------------------------------


LEARNING_RATES = {"sgd": 0.1, "adam": 0.01}  # where a method names none of its own


def fixed_knobs(options: Any) -> Controller:
    """Return the controller that leaves knobs at the values of the options."""
    del options
    return FIXED


def no_losses(options: Any) -> tuple[LossTerm, ...]:
    """Return no loss terms."""
    del options
    return ()


def no_corrections(options: Any) -> tuple[Correction, ...]:
    """Return no corrections."""
    del options
    return ()


@dataclass(frozen=True)
class DefaultModel:
    """The default model of a method's runs.

    Attributes:
        name: of the model.
        layers: default of the run's `layers` with it; None: the default of all models.
        hidden: default of the run's `hidden` with it; None: the default of all models.
    """

    name: str
    layers: int | None = None
    hidden: int | None = None


NODE_MODEL, RATING_MODEL = DefaultModel("gcn"), DefaultModel("rating_profiles")


@dataclass(frozen=True)
class Needs:
    """What a method needs of the clients' training, and its defaults.

    Attributes:
        optimizer: default of the run's `optimizer`.
        lr: default of the run's `lr` with that optimizer; None: that of `LEARNING_RATES`.
        weight_decay: default of the run's `weight_decay`.
        local_epochs: default of the run's `local_epochs`.
        keep_optimizer: default of the run's `keep_optimizer`.
        plain_sgd: whether gradients are recovered from the clients' steps, so that these must be
            plain SGD.
        corrections: terms added to the gradient of every local step, by the options. A correction
            that an op computes for every call is listed too, without values, to plan the run.
        losses: terms added to the loss of every local step, by the options.
        score_first: whether the first weights are scored before round 1, and the last scores kept
            for controllers that need them.
        knobs: the knobs of a run, by the options.
        controller: the controller that sets them, by the options.
        selector: default of the run's `selector`.
        server_optimizer: default of the run's `server_optimizer`.
        rating_model: default of the run's `model` on ratings of users and items.
    """

    optimizer: Literal["adam", "sgd"] = "adam"
    lr: float | None = None
    weight_decay: float = 5e-4
    local_epochs: int = 1
    keep_optimizer: bool = False
    plain_sgd: bool = False
    corrections: Callable[[Any], tuple[Correction, ...]] = no_corrections
    losses: Callable[[Any], tuple[LossTerm, ...]] = no_losses
    score_first: bool = False
    knobs: Callable[[Any], tuple[Knob, ...]] = knobs_of
    controller: Callable[[Any], Controller] = fixed_knobs
    selector: str = "uniform"
    server_optimizer: str = NONE.name
    rating_model: DefaultModel = RATING_MODEL

    def learning_rate(self, optimizer: str) -> float:
        """Return the default of the run's `lr` with an optimizer."""
        method_rate = self.lr if optimizer == self.optimizer else None
        return LEARNING_RATES[optimizer] if method_rate is None else method_rate


Options = TypeVar("Options", default=Any)
Part = TypeVar("Part", bound=StateField)
Share = Annotated[float, Field(gt=0, le=1)]  # an option


@dataclass(frozen=True)
class MethodConfig(Generic[Options]):
    """What the ops and the server program of a method read.

    Attributes:
        model: shape of the model.
        optimizer: the clients' optimizer.
        schedule: a client's steps in a round.
        keep_optimizer: whether a client's optimizer state outlives the round.
        participation: share of clients that train in a round, drawn uniformly.
        options: the method's own options, of its `Method.options` type.
        backend: computes training and predictions.
        corrections: terms that the method adds to the gradient of every local step.
        losses: terms that the method adds to the loss of every local step.
        selector: name of the selector of clients; `uniform` draws the share `participation`.
        selected: ids of who trains in this round, if a selector has chosen them.
        selector_uses_feedback: whether that selector gets feedback of each client after the round.
        selector_has_budget: whether a budget or another limit bounds how many clients it selects.
        score_on_receipt: on which of their nodes clients score the model that they receive in a
            round, to send the counts with their reply: none, validation nodes, or all.
        count_rules: contents of replies of evaluation.
        row_minimum: the least numbers of nodes and silos that must contribute to an exchanged row.
        scored_every: number of rounds between two with counts of all nodes; 0: every round has
            them. In the others, and in round 1, they are zeros where `score_on_receipt` is `all`.
        is_unscored: whether they are zeros in this round; `in_round` sets it.
        relevant: least rating of relevant items, which rankings should have first; None: nothing is
            ranked.
        knobs: values of the method's knobs in this round, () or (C,); at the server only, as they
            reach clients by messages (`silograph.control.knob_fields`).
        rates: how the learning rate of `optimizer` changes over rounds.
        aggregator: combines the clients' weights at the server; `Server.average` uses it.
        aggregator_options: of its `options` type.
        server_optimizer: name of the server's optimizer.
        server_step: its step from the mean; `Server.step` takes it.
        sent: how weights travel.
        privacy: how updates are clipped and noised; None: without differential privacy.
    """

    model: TrainableModel
    optimizer: Optimizer
    schedule: Schedule
    keep_optimizer: bool
    participation: float
    options: Options
    backend: Backend = TORCH
    corrections: tuple[Correction, ...] = ()
    losses: tuple[LossTerm, ...] = ()
    selector: str = "uniform"
    selected: tuple[str, ...] | None = None
    selector_uses_feedback: bool = False
    selector_has_budget: bool = False
    score_on_receipt: Literal["", "val", "all"] = ""
    count_rules: CountRules = ALL_COUNTS
    scored_every: int = 0
    is_unscored: bool = False
    row_minimum: RowMinimum = NO_MINIMUM
    relevant: float | None = None
    knobs: Mapping[str, Tensor] = field(default_factory=dict)
    rates: RateSchedule = CONSTANT
    aggregator: Aggregator = MEAN
    aggregator_options: Any = None
    server_optimizer: str = NONE.name
    server_step: ServerStep = take_mean
    sent: SentWeights = PLAIN_WEIGHTS
    privacy: UpdatePrivacy | None = None

    __getstate__ = state_of_fields  # what is worked out from them is not pickled

    def in_round(self, number: int) -> "MethodConfig[Options]":
        """Return the config of ops and server program in a round.

        The learning rate of the clients depends on the round, and whether they score the weights
        with which they begin it: the weights of round `number` - 1.
        """
        cfg = self
        if self.score_on_receipt == "all" and self.scored_every:
            is_scored = number > 1 and (number - 1) % self.scored_every == 0
            if is_scored == self.is_unscored:
                cfg = replace(self, is_unscored=not is_scored)
        if self.rates.at(number) == 1:
            return cfg
        optimizer = self.optimizer
        assert isinstance(optimizer, SGD | Adam)  # all that a run can name
        learning_rate = optimizer.lr * self.rates.at(number)
        return replace(cfg, optimizer=replace(optimizer, lr=learning_rate), rates=CONSTANT)

    @property
    def everyone_trains(self) -> bool:
        """Whether all clients train in every round."""
        if self.selector_has_budget:
            return False
        return self.selector == "all" or (self.selector == "uniform" and self.participation == 1)

    @cached_property
    def training(self) -> Training:
        """How clients train."""
        return Training(self.model, self.optimizer, self.schedule, self.corrections, self.losses)

    @cached_property
    def trainer(self) -> Trainer:
        """What trains the clients of a block, by model and backend."""
        return self.backend.trainer(self.training)


@dataclass(frozen=True)
class NoOptions:
    """Options of a method that has none of its own."""


@dataclass(frozen=True)
class ServerState:
    """The server's state between rounds: flat mappings of tensors.

    Attributes:
        weights: the server's model, or None where a method has none.
        memory: other tensors of the method, such as momenta.
    """

    weights: Params | None
    memory: Params


@dataclass(frozen=True)
class RoundReport:
    """The report of a round.

    Attributes:
        participants: clients that were selected.
        train_loss: their mean training loss, weighted by nodes; None if none could train.
        facts: further figures of the round, by name: columns `fact_NAME` of the table of rounds.
            A method that sets any sets the same names in every round.
        client_facts: the same by client, (C,) tensors, NaN where one is not known: those of the
            last round are columns `fact_NAME` of the table of clients.
        trained: what is known by client, (C, ...): `answered`, `nodes` and `loss` for an observed
            selector, and `received/*`, counts of the model with which clients began.
        aggregator: name of what has combined the clients' weights; `Server.average` sets it.
        server_optimizer: name of the server's optimizer if it may take a step in the round;
            `Server.step` sets it.
    """

    participants: tuple[str, ...]
    train_loss: float | None
    facts: Mapping[str, float] = field(default_factory=dict)
    client_facts: Mapping[str, Tensor] = field(default_factory=dict)
    trained: Mapping[str, Tensor] = field(default_factory=dict)
    aggregator: str = MEAN.name
    server_optimizer: str = NONE.name


StepsOnHeld = Callable[[MethodConfig[Any], ClientBlock, ServerState, int, Key], ServerState]
"""(cfg, nodes that the server holds, state after the round, its number, key) to the next state."""


class Setting(Protocol):
    """The setting of a method: at the silos, on the uncut graph, in simulation only."""

    @property
    def uncut(self) -> bool:
        """Whether it trains on the uncut graph as one client."""

    @property
    def at_server(self) -> str | None:
        """What its server needs that no server of a real federation has; None is nothing."""

    def held(self, options: Any) -> float | None:
        """Return the share of all nodes that the server holds itself; None is no node."""

    @property
    def on_held(self) -> StepsOnHeld | None:
        """What the server does after each round on the nodes that it holds."""


@dataclass(frozen=True)
class AtSilos:
    """Trains at the silos; the only setting of a real federation."""

    uncut = False
    at_server = None
    on_held = None

    def held(self, options: Any) -> float | None:
        """The server holds no node."""
        del options
        return None


@dataclass(frozen=True)
class Uncut:
    """Trains on the uncut graph as one client: a reference, in simulation only."""

    uncut = True
    at_server = "the uncut graph"
    on_held = None

    def held(self, options: Any) -> float | None:
        """The server holds no node besides."""
        del options
        return None


@dataclass(frozen=True)
class OnlySimulated:
    """Trains at the silos, in simulation only.

    Attributes:
        at_server: what it would need of the server of a real federation.
    """

    at_server: str
    uncut = False
    on_held = None

    def held(self, options: Any) -> float | None:
        """The server holds no node."""
        del options
        return None


@dataclass(frozen=True)
class ServerHolds:
    """The server holds features, labels and edges of some nodes itself, in simulation only.

    The nodes are an argument of `on_held` and of nothing else, so no op can read them.

    Attributes:
        share: of all nodes, by the method's options.
        on_held: what the server does after each round on these nodes.
    """

    share: Callable[[Any], float]
    on_held: StepsOnHeld
    uncut = False
    at_server = "nodes of its own"

    def held(self, options: Any) -> float | None:
        """Return the share."""
        return self.share(options)


def any_config(cfg: MethodConfig[Any]) -> None:
    """Accept every config: the default of `Method.check`."""
    del cfg


def no_deviation(options: Any) -> str | None:
    """Return that every option leaves the method that of its paper."""
    del options
    return None


Check = Callable[[MethodConfig[Options]], None]
OwnWeights = Callable[[MethodConfig[Options], Params, Mapping[str, Tensor]], Params]
Init = Callable[[Federation, MethodConfig[Options], Params, Key], ServerState]
Round = Callable[
    [Federation, MethodConfig[Options], ServerState, int, Key], tuple[ServerState, RoundReport]
]


@dataclass(frozen=True)
class Method(Generic[Options]):
    """A method.

    Attributes:
        name: name in the config.
        title: one line for listings.
        reference: title, authors, venue, year.
        options: frozen dataclass of the method's own options.
        init: sets up the clients and returns the server's first state from initial weights.
        round: one round, from the number of the round (from 1) and the run's key.
        check: raises `ConfigError` for a config that it cannot train with. It is called before
            there are clients, and before silos are waited for, when the numbers of features and
            classes are not known yet: it must not depend on them.
        setting: where it trains.
        evaluate: how its models are scored, and which view picks the round.
        evaluate_by: the same by the options, where these decide it; None: they do not.
        needs: of the clients' training.
        calls: the ops that it calls, in their order; real silos refuse any other call. None: it
            runs in simulation only.
        own_weights: the weights that each client predicts with when the run is over, (C, ...) or
            the same for all, from the server's (none where it has no model) and the tensors of
            the clients' state; None: those of the server, if it has a model.
        rows: data of single nodes that silos exchange: none, rows of single nodes, or only sums
            over a silo's nodes, of which those of few nodes can be left out.
        small_weights: whether its weights can travel in the forms of `MethodConfig.sent`.
        cautions: data on which its defaults are known not to learn, and settings that do; listings
            and comparisons show them.
        aggregates: whether the run's aggregator may be another than the mean. Then the round must
            average by `Server.average`, and clients must reply as `LocalModel` does, with nothing
            else.
        server_step: whether the run may have a server optimizer. Then the round must end with
            `Server.step`.
        weighs_classes: whether classes may have weights in the loss of training nodes. Then clients
            must train by `Clients.fit`, and by no other loss of labels.
        scores_on_receipt: whether each round sends the server's model, clients train from exactly
            that, and their reply has the field `received`. If so, the clients of the next round
            score the server's model. Otherwise it is sent to be scored, and the next round must
            start from it. None: yes where round and ops are the library's and have that field.
        makes_edges: whether clients train on edges besides those of the data, which have no
            weights.
        ratings: whether it can train models of ratings of users and items; see `trains_ratings`.
        only_sums: whether the server needs no reply of a single client, besides rows that it hands
            on: what runs with secure aggregation.
        clips_updates: whether its rounds are one sum of clipped updates where `cfg.privacy` says
            so: what runs with differential privacy of whole silos.
        deviation: returns in one line how a run with these options is not what the paper has; None:
            it is. Listings show it for the defaults, and runs and comparisons for theirs.
        note: returns one line about a whole run, from the options and the values of each fact in
            the scored rounds; None: no line.
        facts: what each figure that its rounds report is, in one sentence; pages show it.
    """

    name: str
    title: str
    reference: str
    options: type[Options]
    init: Init[Options]
    round: Round[Options]
    check: Check[Options] = any_config
    setting: Setting = field(default_factory=AtSilos)
    evaluate: Evaluation = field(default_factory=OwnGraph)
    evaluate_by: Callable[[Options], Evaluation] | None = None
    needs: Needs = field(default_factory=Needs)
    calls: Calls | None = None
    own_weights: OwnWeights[Options] | None = None
    rows: Literal["none", "single", "sums"] = "none"
    small_weights: bool = False
    cautions: tuple[Caution, ...] = ()
    aggregates: bool = False
    server_step: bool = False
    weighs_classes: bool = False
    scores_on_receipt: bool | None = None
    makes_edges: bool = False
    ratings: bool = True
    only_sums: bool = False
    clips_updates: bool = False
    deviation: Callable[[Options], str | None] = no_deviation
    note: Callable[[Options, Mapping[str, Sequence[float]]], str | None] | None = None
    facts: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise `ConfigError` unless cautions are a tuple of `Caution`."""
        cautions = self.cautions
        if not isinstance(cautions, tuple) or not all(
            isinstance(part, Caution) for part in cautions
        ):
            raise ConfigError(
                f"expected cautions of method {self.name} as a tuple of Caution, got "
                f"{short_repr(cautions)}: write (Caution(TEXT),)"
            )

    @property
    def caution(self) -> str:
        """All cautions as one text, empty without any."""
        return in_words(self.cautions)

    def caution_on(self, predicted: Predicted) -> str:
        """Return as one text the cautions that hold for what is predicted."""
        return in_words(part for part in self.cautions if part.of in (None, predicted))

    @property
    def trains_ratings(self) -> bool:
        """Whether it trains on ratings, whose users and items several clients may have."""
        return self.ratings and (self.evaluate.copies or self.setting.uncut)

    @property
    def weighs_edges(self) -> bool:
        """Whether weights of edges can be used: its sums over neighbors stay inside one client."""
        return self.rows == "none" and not (self.evaluate.crosses or self.makes_edges)

    @property
    def selects(self) -> bool:
        """Whether clients can be selected for its rounds."""
        return not (self.evaluate.all_silos or self.setting.uncut)


AnyMethod = Method[Any]


def own_weights(
    method: AnyMethod, cfg: MethodConfig[Any], server: Params, states: Sequence[State]
) -> Params | None:
    """Return the weights that clients predict with, (C, ...) or the same for all.

    None where they predict with the server's model, and where states are not given.

    Args:
        method: of the run.
        cfg: what its ops read.
        server: the server's weights; none where it has no model.
        states: of the clients, by block.
    """
    if method.own_weights is None or not states:
        return None
    tensors = ({name: field.t for name, field in state.items()} for state in states)
    parts = [method.own_weights(cfg, server, state) for state in tensors]
    if len(parts) == 1:
        return parts[0]
    shapes = cfg.model.weight_shapes
    return {
        name: w if tuple(w.shape) == shapes[name] else torch.cat([part[name] for part in parts])
        for name, w in parts[0].items()
    }


def client_weights(
    shapes: Mapping[str, Sequence[int]], weights: Mapping[str, Tensor], client: int
) -> Params:
    """Return one client's weights, from shared ones and those with a slice for each, (C, ...)."""
    return {n: w if tuple(w.shape) == shapes[n] else w[client] for n, w in weights.items()}


def seen_by(method: AnyMethod, config: RunConfig | ResolvedConfig) -> str:
    """Return which graph a node sees in the `server` view of a run."""
    return UNCUT if method.setting.uncut else method.evaluate.seen(config.collect)


# --- private parts -------------------------------------------------------------------------------
# State that clients never send, and how it survives a round with infinite values or NaN.
#
# Moments of optimizers, masks, private layers, flow networks, tables of users, control variates.
#
# C: clients.


def keep_previous_if_not_finite(new: Mapping[str, Part], old: State) -> Mapping[str, Part]:
    """Return private state after training; a client with infinite values or NaN keeps its old one.

    Otherwise bad weights from the server, or one step that is too long, would spoil all later
    rounds.

    Args:
        new: fields of the state after training.
        old: the state before, with these fields.
    """
    # Adam's second moments are as finite as its first ones, of which they are the squares.
    checked_fields = [
        f for n, f in new.items() if n.replace("first/", "second/", 1) not in new.keys() - {n}
    ]
    # A pass over moments costs some percent of a round: by client only where something is wrong.
    if all(math.isfinite(float(t.sum())) for f in checked_fields for t in _values_of(f)):
        return new
    is_good = torch.stack([_is_finite(f) for f in checked_fields]).all(0)
    bad_clients = (~is_good).nonzero()[:, 0]
    old_fields = state_of(take_all({name: old[name] for name in new}, bad_clients))
    return {n: cast(Part, put(f, old_fields[n], bad_clients)) for n, f in new.items()}


def _values_of(field: StateField) -> tuple[Tensor, ...]:
    return (field.t, field.base) if isinstance(field, Patched) else (field.t,)


def _is_finite(field: StateField) -> Tensor:
    """Return a mask (C,) bool of the clients whose numbers of a field are all finite."""
    rows = field.t.isfinite()
    rows = rows.flatten(1).all(1) if rows.dim() > 1 else rows
    if isinstance(field, Stacked):
        return rows
    is_finite = segment_sum((~rows).long(), field.off) == 0
    if isinstance(field, Patched):
        is_finite &= field.base.isfinite().flatten(1).all(1)[field.which]
    return is_finite


# --- Presets: a method under another name, with other defaults of its options --------------------


def preset(base: AnyMethod, name: str, title: str, **defaults: object) -> AnyMethod:
    """Return a method under another name.

    Args:
        base: the method.
        name: what users call it.
        title: one line for listings.
        defaults: of its options that differ.
    """
    base_options = base.options
    option_fields = {
        f.name: field(default=defaults.get(f.name, f.default), metadata=f.metadata)
        for f in fields(base_options)
    }
    namespace = {"__module__": base_options.__module__, "__doc__": base_options.__doc__}
    namespace["__qualname__"] = f"{name.upper()}.options"  # where pickle looks for the class
    types = {"__annotations__": {f.name: f.type for f in fields(base_options)}}
    options: type[Any] = type(
        f"{name.capitalize()}Options", (), {**option_fields, **namespace, **types}
    )
    options_type = checked_dataclass(options, config=STRICT, frozen=True)
    return replace(base, name=name, title=title, options=options_type)
