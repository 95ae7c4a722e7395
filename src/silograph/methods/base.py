"""What a method is: a server program, its options, and which of its models is judged."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from silograph.core.key import Key
from silograph.federation.base import Federation
from silograph.federation.program import Calls
from silograph.graph.block.block import ClientBlock
from silograph.nn.backends import Kernels
from silograph.nn.conv import Params
from silograph.nn.correction import Correction
from silograph.nn.fit import Schedule, Training
from silograph.nn.model import AnyModel
from silograph.nn.optim import Optimizer


@dataclass(frozen=True)
class MethodConfig:
    """What the ops and the server program of a method read.

    Attributes:
        model: shape of the model.
        optimizer: the clients' optimizer.
        schedule: a client's steps in a round.
        keep_optimizer: whether a client's optimizer state outlives the round.
        participation: share of clients that train in a round.
        options: the method's own options, of its `Method.options` type.
        kernels: what trains and judges: compiled kernels or torch.
        corrections: what the method adds to the gradient of every local step.
        held: what the server holds itself, for a method that says so; clients never see it.
    """

    model: AnyModel
    optimizer: Optimizer
    schedule: Schedule
    keep_optimizer: bool
    participation: float
    options: Any
    kernels: Kernels = "torch"
    corrections: tuple[Correction, ...] = ()
    held: ClientBlock | None = None

    @property
    def training(self) -> Training:
        """How clients train."""
        return Training(self.model, self.optimizer, self.schedule, self.corrections)


@dataclass(frozen=True)
class NoOptions:
    """Options of a method that has none of its own."""


@dataclass(frozen=True)
class ServerState:
    """What the server keeps between rounds: flat mappings of tensors.

    Attributes:
        weights: the server's model, or None where a method has none.
        memory: whatever the method's aggregation remembers.
    """

    weights: Params | None
    memory: Params


@dataclass(frozen=True)
class RoundReport:
    """What a round tells.

    Attributes:
        participants: clients that were selected.
        train_loss: their mean training loss, weighted by nodes; None if none could train.
    """

    participants: tuple[str, ...]
    train_loss: float | None


def no_corrections(options: Any) -> tuple[Correction, ...]:
    """Local steps follow the gradient of the data."""
    del options
    return ()


Init = Callable[[Federation, MethodConfig, Params, Key], ServerState]
Round = Callable[[Federation, MethodConfig, ServerState, int, Key], tuple[ServerState, RoundReport]]


@dataclass(frozen=True)
class Method:
    """A method.

    Attributes:
        name: what users call it.
        title: one line for listings.
        reference: title, authors, venue, year.
        options: frozen dataclass of the method's own options.
        optimizer: default of the run's `optimizer`.
        keep_optimizer: default of the run's `keep_optimizer`.
        judge: the view whose validation accuracy picks the round.
        uncut: trains on the uncut graph as one client (simulation only).
        init: sets up the clients and returns the server's first state from initial weights.
        round: one round, from the number of the round (from 1) and the run's key.
        exchange: whether the server's model is judged with sums over all silos' neighbors, not
            only the client's own.
        corrections: what the options add to the gradient of every local step; what an op works
            out anew for every call stands here too, without its values, for the plan of the run.
        holds: the share of all nodes whose features, labels and edges the server holds itself, by
            the options (simulation only); None: none.
        plain_sgd: whether it takes clients for granted that take plain SGD steps.
        calls: what it calls, which silos hold it to; None: silos of their own cannot run it.
    """

    name: str
    title: str
    reference: str
    options: type
    optimizer: Literal["adam", "sgd"]
    keep_optimizer: bool
    judge: Literal["server", "personalised"]
    uncut: bool
    init: Init
    round: Round
    exchange: bool = False
    corrections: Callable[[Any], tuple[Correction, ...]] = no_corrections
    holds: Callable[[Any], float] | None = None
    plain_sgd: bool = False
    calls: Calls | None = None
