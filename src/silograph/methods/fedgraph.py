"""FedGraph: convolutions across clients on drawn neighbors, with rates that an agent may learn.

Chen, Li, Miyazaki and Wu, "FedGraph: Federated graph learning with intelligent sampling", IEEE
TPDS 2022, algorithms 1 to 3, eq. 2-8. In every iteration each client draws `kappa` labeled nodes
and keeps each neighbor with a probability of the layer (`silograph.sampling.sampled_stages`). From
the second layer on neighbors in other silos are summed over, too: their owners send rows that they
have multiplied by their own current weights, and that rest on neighbors drawn under their own
rates. These rows are constants for the gradient, or with `return_gradients` their gradients go back
to the owners, as those of summed losses: then with all of everything and one step of SGD a round is
one of centralized training. The server takes the mean of the clients' weights
in proportion to the sizes of their batches (eq. 8).

`share` says which layers hear other silos: those from the second on (`hidden`), all (`all`,
FedGraph_allShare) or none (`none`, FedGraph_nonShare). What is shared is not private for that: see
docs/exchange.md.

How we read the paper: the node's own message is always kept; a layer that does not hear other silos
scales by degrees within the client, and counts neighbors there in eq. 7. A row that is wanted has
the neighbors that it has in its owner's own batch, those in other silos included where the layer is
shared; so with all labeled nodes, all neighbors and equal weights a pass is that of live exchange.
One iteration is taken a round (`local_steps`), as the paper names no number.

The agent (`policy=ddpg`) is `silograph.control.ddpg`; by default rates stay what options say.

State in a round, all under `round/`: `weights/*`, `optimizer/*` (C, ...); `kappa`, `keep` (C, 3);
`nodes`, `loss` (C,); and what an iteration keeps (`silograph.sampling.sampled_passes`). Between
rounds `optimizer/*` if it is kept, and what judging keeps.

C: clients. k: halo slots, boundary rows. O: width of a stage's sum.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from silograph.control import FIXED, Controller, by_policy, knob_fields, knob_specs
from silograph.control.policy import AGENT, AGENT_SEED, EXPLORE, TARGET, TIME
from silograph.core.config import STRICT
from silograph.core.errors import ConfigError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Ragged, Shared, Stacked, State, under
from silograph.core.ranges import lin
from silograph.core.work import report_rows, report_steps
from silograph.evaluation.evaluate import remembered
from silograph.evaluation.halo_from import HaloFrom
from silograph.evaluation.scoring import Evaluation, OwnGraph
from silograph.exchange.passes import divisible, weight_specs
from silograph.exchange.pull import PullForm, announce, announce_steps, pull, pull_steps
from silograph.exchange.rows import relay_steps, relay_sum
from silograph.federation.base import Federation
from silograph.federation.field_specs import FieldSpec, FieldSpecs, exactly
from silograph.federation.program import Call, Calls, Steps
from silograph.graph.block.block import ClientBlock
from silograph.methods.base import Method, MethodConfig, RoundReport, ServerState, Share
from silograph.methods.caution import Caution
from silograph.methods.local_training import (
    begin,
    local_round,
    local_steps,
    shared,
    stacked,
    state_specs,
)
from silograph.methods.needs import Needs
from silograph.nn.conv import Params
from silograph.nn.doors import check_weights
from silograph.nn.fit import stacked_copies
from silograph.nn.steps import LOSS_FLOPS
from silograph.sampling.sampled_passes import (
    SHARED_FROM,
    ask,
    listen,
    objective,
    received_in,
    send_back,
    serve,
    shared_stages,
    stages_of,
    store,
    take_back,
    width_of,
)

KEEPS = ("keep_1", "keep_2", "keep_3")


def _knob(text: str) -> dict[str, object]:
    return {"help": text, "knob": lin(0.05, 1.0), "by_client": True, "tune": lin(0.05, 1.0)}


@dataclass(frozen=True, config=STRICT)
class FedGraphOptions:
    """What is drawn, what crosses, and what sets the rates; the help texts document the fields."""

    kappa: Annotated[int, Field(ge=1, le=1024)] = field(
        default=256,
        metadata={
            "help": "labeled nodes in a client's batch",
            "knob": lin(1, 1024),
            "by_client": True,
            "tune": lin(1, 1024),
        },
    )
    keep_1: Share = field(
        default=0.5, metadata=_knob("probability with which a neighbor is kept in layer 1")
    )
    keep_2: Share = field(default=0.5, metadata=_knob("in layer 2"))
    keep_3: Share | None = field(
        default=None, metadata=_knob("in layers from the third on; none: as in layer 2")
    )
    rescale: Literal["degree", "inverse"] = field(
        default="degree",
        metadata={
            "help": "what a kept neighbor counts: degree (neighbors / kept ones, as the paper) or "
            "inverse (1 / probability, unbiased)"
        },
    )
    share: Literal["hidden", "all", "none"] = field(
        default="hidden",
        metadata={"help": "layers that hear other silos: from the second on, all, or none"},
    )
    return_gradients: bool = field(
        default=False,
        metadata={"help": "send gradients of rows back to their owners, unlike the paper"},
    )
    local_steps: Annotated[int, Field(ge=1, le=1000)] = field(
        default=1, metadata={"help": "iterations of a client in a round"}
    )
    policy: Literal["fixed", "ddpg", "drawn"] = field(
        default="fixed",
        metadata={
            "help": "what sets kappa and the probabilities: fixed, ddpg (an agent) or drawn (by "
            "chance)"
        },
    )
    target: Share = field(default=0.9, metadata=TARGET)
    time: Literal["virtual", "measured", "none"] = field(default="virtual", metadata=TIME)
    explore: bool = field(default=True, metadata=EXPLORE)
    agent: str | None = field(default=None, metadata=AGENT)
    agent_seed: int = field(default=0, metadata=AGENT_SEED)


def controller_of(options: FedGraphOptions) -> Controller:
    """Return what sets the rates."""
    return by_policy(options, FIXED)


def evaluation_of(options: FedGraphOptions) -> Evaluation:
    """Return how the server's model is scored: a node sees what it sees in training."""
    first = SHARED_FROM.get(options.share)
    return OwnGraph() if first is None else HaloFrom(1 if first else 0)


def init(
    fed: Federation, cfg: MethodConfig[FedGraphOptions], weights: Params, key: Key
) -> ServerState:
    """Set up the clients."""
    del cfg
    fed.call(begin, {}, what=Kind.CONTROL, key=key)
    return ServerState(weights=weights, memory={})


def check(cfg: MethodConfig[FedGraphOptions]) -> None:
    """Raise `ConfigError` where sums cannot be shared, or the config asks for other steps."""
    if not any(stage.conv.sums for stage in divisible(cfg.model).stages):
        raise ConfigError(
            "expected a model that sums over neighbors for fedgraph, which draws them, got "
            f"{cfg.model.noun}: use model=gcn, graphconv, gin, sage or appnp, or another method, "
            "such as fedopt"
        )
    schedule = cfg.schedule
    if not cfg.everyone_trains or not schedule.whole or schedule.epochs != 1:
        raise ConfigError(
            "expected participation=1, local_epochs=1 and neither batch_size nor neighbors with "
            "fedgraph, whose clients take their steps together: use --option kappa=, keep_1=, "
            "keep_2= and local_steps="
        )


def fit_round(
    fed: Federation, cfg: MethodConfig[FedGraphOptions], state: ServerState, t: int, key: Key
) -> tuple[ServerState, RoundReport]:
    """Take the iterations at all clients, and the mean of their weights (eq. 8)."""
    assert state.weights is not None  # set by init
    inbox = {**shared("weights", state.weights), **knob_fields(cfg.knobs, fed.ids)}
    fed.call(begin_round, inbox, what=Kind.WEIGHTS, key=key.fold("begin", t))
    for own in _step_keys(cfg, t, key):
        _exchange(fed, cfg, own)
        if own != key.fold("train", t):
            fed.call(step, {}, what=Kind.CONTROL, key=own)
    reply, report = local_round(fed, cfg, submit, {}, Kind.WEIGHTS, t, key)
    if reply is None:
        return state, report
    return ServerState(under("weights", reply), state.memory), report


def _step_keys(cfg: MethodConfig[FedGraphOptions], t: int, key: Key) -> list[Key]:
    """Return the key of every iteration of a round; in the last one clients send their weights."""
    last = key.fold("train", t)
    return [*(last.fold("step", n) for n in range(cfg.options.local_steps - 1)), last]


def _exchange(fed: Federation, cfg: MethodConfig[FedGraphOptions], key: Key) -> None:
    """Bring the rows of an iteration; owners hear what later layers want before they pull.

    So a row that they answer with has its neighbors in other silos, too. The first shared layer
    rests on its own silo alone, so there `pull` says it in time.
    """
    told = [{"stage": Shared(torch.tensor(n, dtype=torch.int32))} for n in shared_stages(cfg)]
    for each in reversed(told[1:]):
        announce(fed, ask, listen, key=key, inbox=each)
    for each in told:
        pull(fed, ask, serve, store, what=Kind.EMBEDDINGS, key=key, inbox=each)
    for each in reversed(told) if cfg.options.return_gradients else ():
        relay_sum(fed, send_back, take_back, what=Kind.COTANGENTS, key=key, inbox=each)


def begin_round(
    cfg: MethodConfig[FedGraphOptions], block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Take the server's weights and the rates. In: `weights/*`, `knobs/*`. Out: nothing."""
    del key
    given, clients = under("weights", inbox), block.num_clients
    check_weights(cfg.model, given, block, shared=True)
    weights = stacked_copies(given, clients)
    memory = under("optimizer", state) if cfg.keep_optimizer else cfg.optimizer.init(weights)
    keep = [inbox["knobs/keep_1"].t]
    for name in KEEPS[1:]:
        found = inbox.get(f"knobs/{name}")
        keep.append(keep[-1] if found is None else found.t)
    zero = next(iter(weights.values())).new_zeros(clients)
    return {
        **state,
        **stacked("round/weights", weights),
        **stacked("round/optimizer", memory),
        "round/kappa": Stacked(inbox["knobs/kappa"].t),
        "round/keep": Stacked(torch.stack(keep, dim=1)),
        "round/nodes": Stacked(torch.zeros_like(block.num_train)),
        "round/loss": Stacked(zero),
    }, {}


def step(
    cfg: MethodConfig[FedGraphOptions], block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Take a step on the batch (eq. 5, 6); rows of others are constants. In, out: nothing."""
    del inbox
    weights = under("round/weights", state)
    leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
    with torch.enable_grad():
        loss, total = objective(cfg, block, state, key, leaves, received_in(state))
        found = torch.autograd.grad(total, list(leaves.values()))
    batch = stages_of(cfg, block, state, key, 0)[-1].leaving
    nodes = batch.off.diff()
    report_rows(batch.off, LOSS_FLOPS * cfg.model.outputs)
    report_steps(cfg.training.step_flops)
    memory = under("round/optimizer", state)
    stepped, remembers = ({n: t.clone() for n, t in old.items()} for old in (weights, memory))
    cfg.optimizer.step_(stepped, dict(zip(leaves, found, strict=True)), remembers)
    new = {n: f for n, f in state.items() if not n.startswith(EXCHANGED)}
    return {
        **new,
        **stacked("round/weights", _where(nodes > 0, stepped, weights)),
        **stacked("round/optimizer", _where(nodes > 0, remembers, memory)),
        "round/nodes": Stacked(nodes),
        "round/loss": Stacked(loss.detach()),
    }, {}


EXCHANGED = ("round/asked/", "round/wanted/", "round/received/", "round/returned/")


def submit(
    cfg: MethodConfig[FedGraphOptions], block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Take the last step, send the weights and end the round.

    In: nothing. Out: `weights/*` (C, ...), `nodes` (C,) of the last batch, `loss` (C,).
    """
    state, _ = step(cfg, block, state, inbox, key)
    weights = under("round/weights", state)
    new = {name: f for name, f in state.items() if not name.startswith("round/")}
    new |= remembered(cfg.backend.predict(cfg.model, weights, block), block)
    if cfg.keep_optimizer:
        new |= stacked("optimizer", under("round/optimizer", state))
    reply = {name: state[f"round/{name}"] for name in ("nodes", "loss")}
    return new, {**stacked("weights", weights), **reply}


def _where(active: Tensor, new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> Params:
    """Return the tensors (C, ...) after a step of the clients that took one."""
    return {
        n: torch.where(active.view(-1, *[1] * (t.dim() - 1)), t, old[n]) for n, t in new.items()
    }


def setup_steps(cfg: MethodConfig[FedGraphOptions], key: Key) -> Steps:
    """Return the call of `init`."""
    del cfg
    return Call(begin, Kind.CONTROL, key)


def round_steps(cfg: MethodConfig[FedGraphOptions], t: int, key: Key) -> Steps:
    """Return the calls of `fit_round`."""
    moves = controller_of(cfg.options) is not FIXED
    takes = {**weight_specs(cfg.model, Shared), **knob_specs(cfg.options, moved=moves)}
    gives = weight_specs(cfg.model, Stacked)
    return (
        Call(begin_round, Kind.WEIGHTS, key.fold("begin", t), takes),
        *(
            (_exchange_steps(cfg, own), Call(step, Kind.CONTROL, own))
            for own in _step_keys(cfg, t, key)[:-1]
        ),
        _exchange_steps(cfg, key.fold("train", t)),
        local_steps(cfg, submit, {}, gives, Kind.WEIGHTS, t, key),
    )


def _exchange_steps(cfg: MethodConfig[FedGraphOptions], key: Key) -> Steps:
    """Return the calls of `_exchange`."""
    numbers = shared_stages(cfg)
    told: dict[int, FieldSpecs] = {n: {"stage": exactly(n)} for n in numbers}
    return (
        *(announce_steps(ask, listen, key=key, inbox=told[n]) for n in reversed(numbers[1:])),
        *(
            pull_steps(
                ask, serve, store, what=Kind.EMBEDDINGS, key=key, inbox=told[n], form=_form(cfg, n)
            )
            for n in numbers
        ),
        *(
            relay_steps(
                send_back,
                take_back,
                what=Kind.COTANGENTS,
                key=key,
                width=width_of(cfg, n),
                named=True,
                inbox=told[n],
            )
            for n in (reversed(numbers) if cfg.options.return_gradients else ())
        ),
    )


def _form(cfg: MethodConfig[FedGraphOptions], number: int) -> PullForm:
    rows = FieldSpec(Ragged, (width_of(cfg, number),))
    return PullForm(fields={"rows": rows}, asked=f"round/asked/{number}")


FEDGRAPH: Method[FedGraphOptions] = Method(
    name="fedgraph",
    title="average of models trained on drawn neighbors, in other silos from the second layer on",
    reference="Chen et al., FedGraph: Federated graph learning with intelligent sampling, IEEE "
    "TPDS 2022",
    options=FedGraphOptions,
    init=init,
    round=fit_round,
    check=check,
    evaluate=HaloFrom(1),
    evaluate_by=evaluation_of,
    needs=Needs(keep_optimizer=True, score_first=True, controller=controller_of),
    calls=Calls(setup=setup_steps, round=round_steps, state=state_specs),
    cautions=(
        Caution(
            "far behind local where nodes have many neighbors (Photo) and with 100 clients, in 100 "
            "rounds"
        ),
    ),
    rows="single",
    ratings=False,
)
