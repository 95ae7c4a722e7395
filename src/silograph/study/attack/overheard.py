"""What the server of a simulated run sees: every message of every silo, before it is folded."""

from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

from silograph.core.key import Key
from silograph.core.payload import Payload, Shared, State
from silograph.core.resolved_config import training_key
from silograph.evaluation.evaluate import own_counts
from silograph.exchange.collect import collect
from silograph.experiment.run.round_scores import weights_message
from silograph.experiment.run.setup import Setup, first_weights
from silograph.federation.base import Federation, Op
from silograph.federation.ledger import Ledger
from silograph.graph.block.block import ClientBlock
from silograph.graph.block.halo import Route


@dataclass(frozen=True, eq=False)
class SeenCall:
    """A call of one block of clients: what they were sent and what they replied, by client.

    Attributes:
        name: MODULE.OP, without the rooms that the module is in.
        inbox: what was sent.
        reply: what came, before anything is folded.
    """

    name: str
    inbox: Payload
    reply: Payload


@dataclass(frozen=True, eq=False)
class Overheard:
    """A federation of one block whose server writes down what it sees.

    Attributes:
        fed: the engine.
        calls: all calls, in order.
        blocks: the silos' own data, by which attacks are judged; no server has them.
    """

    fed: Federation
    calls: list[SeenCall] = field(default_factory=list)
    blocks: list[ClientBlock] = field(default_factory=list)

    @property
    def ids(self) -> tuple[str, ...]:
        """See `Federation`."""
        return self.fed.ids

    @property
    def route(self) -> Route:
        """See `Federation`."""
        return self.fed.route

    @property
    def away(self) -> tuple[str, ...]:
        """See `Federation`."""
        return self.fed.away

    @property
    def ledger(self) -> Ledger:
        """See `Federation`."""
        return self.fed.ledger

    def start_round(self, number: int) -> None:
        """See `Federation`."""
        self.fed.start_round(number)

    def call(self, op: Op, inbox: Payload, **how: Any) -> Payload:
        """Call, and write down what every silo replies."""
        name = f"{op.__module__.rpartition('.')[2]}.{op.__name__}"

        @wraps(op)
        def told(
            cfg: Any, block: ClientBlock, state: State, given: Payload, key: Key
        ) -> tuple[State, Payload]:
            state, reply = op(cfg, block, state, given, key)
            self.calls.append(SeenCall(name, _kept(given), reply))
            self.blocks[:] = [block]
            return state, reply

        return self.fed.call(told, inbox, **how)


def _kept(inbox: Payload) -> Payload:
    """Return an inbox whose weights stay as they were sent: servers step in place."""
    return {n: Shared(f.t.clone()) if isinstance(f, Shared) else f for n, f in inbox.items()}


def overhear(setup: Setup, rounds: int) -> Overheard:
    """Train some rounds of a run and score the last, and return what its server saw."""
    fed, key = Overheard(setup.federation), training_key(setup.config)
    method, cfg = setup.method, setup.method_config
    knobs = {k.name: k.constant(k.start, len(fed.ids)) for k in method.needs.knobs(cfg.options)}
    cfg = replace(cfg, knobs=knobs)
    fed.start_round(0)
    if setup.config.collect:
        collect(fed, setup.config.collect, key.fold("collect"))
    state = method.init(fed, cfg, first_weights(setup), key.fold("init"))
    for t in range(1, rounds + 1):
        fed.start_round(t)
        state, _ = method.round(fed, cfg.in_round(t), state, t, key)
    if state.weights is not None:
        judging = key.fold("judge server", rounds)
        inbox = weights_message(setup, state, fed.ids)
        method.evaluate.counts(fed, cfg.model, inbox, judging, cfg.count_rules)
    own_counts(fed, key.fold("judge own", rounds), cfg.count_rules)
    return fed
