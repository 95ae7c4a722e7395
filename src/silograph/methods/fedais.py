"""FedAIS: a batch reads stored embeddings, and trains on the nodes that matter.

Li, Chen, Ren, Wang, Hu, Li, Yu and Chen, "Federated graph learning with adaptive importance-based
sampling", AAAI 2025, algorithm 1.

Every client keeps, for each hidden layer, the last embeddings of its own nodes and of its halo
(eq. 6). A round is `batches` steps on drawn training nodes; a batch needs one hop of neighbors,
whose embeddings are stored. Before every tau-th batch a client fetches the embeddings of those halo
nodes that the batch has drawn. Nodes are drawn by how much their loss has changed since the client
last took part (eq. 8), and tau shrinks as the validation loss falls (eq. 11); with `policy=ddpg`
an agent sets tau, and the share of its nodes that each client draws.

`nodes`, `interval` and `halo` are options, and the paper's baselines are presets of this program:

    fedall      all nodes; each batch fetches what it has drawn     tau = 1
    fedrandom   the same on drawn nodes
    fedlocal    all nodes, without the halo
    fedpns      all nodes; neighbors of other silos are drawn anew every 2 batches
    fedais1     drawn by importance, but fetched in every batch
    fedais2     all nodes, adaptive interval
    stale       all nodes; all slots are fetched every tau-th batch (VR-GCN, PipeGCN)

How we read the paper where it is silent: losses are worked out once a round, by one pass over all
own nodes with the weights received, which also refreshes what is stored of them; owners work asked
rows out anew with their own current weights, from stored rows, if they take part, and send
what is stored if they do not. F is the validation loss. Features do not leave: without
`share_features` the first layer sums over the client's own graph.

What clients do is in `silograph.methods.fedais_clients`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from silograph.control import knob_fields, knob_specs
from silograph.control.bound_interval import MOVED, RATE
from silograph.control.round_costs import BATCHES, EXCHANGES, ROW_BYTES
from silograph.core.errors import ConfigError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import (
    Ragged,
    Shared,
    Stacked,
    under,
)
from silograph.evaluation.halo_from import HaloSums
from silograph.exchange.history import (
    history_specs,
    rows_form,
    share_features,
    share_features_steps,
)
from silograph.exchange.moved_rows import moved_specs
from silograph.exchange.passes import divisible
from silograph.exchange.pull import pull, pull_steps
from silograph.exchange.sent_weights import gives as weights_up
from silograph.exchange.sent_weights import kept, learn_form, learn_steps, mean_of, outgoing
from silograph.exchange.sent_weights import takes as weights_down
from silograph.federation.base import Federation, WeightedMean, positions_of
from silograph.federation.field_specs import LOSS, NODES, TRAINED, FieldSpec, FieldSpecs, exactly
from silograph.federation.program import Call, Calls, Either, Maybe, Repeat, Steps
from silograph.methods.base import Method, RoundReport, ServerState
from silograph.methods.caution import Caution
from silograph.methods.fedais_batches import advance, close_round
from silograph.methods.fedais_clients import ask, begin_stored, open_round, serve, store
from silograph.methods.fedais_options import (
    RATIO,
    TAU,
    Config,
    FedAISOptions,
    Plan,
    controller_of,
    knobs_in,
    moved_in,
    plan_of,
)
from silograph.methods.fedais_state import LOSSES, pull_form_of, tells_moves, untouched
from silograph.methods.local_training import state_specs
from silograph.methods.needs import Needs
from silograph.methods.preset import preset
from silograph.nn.conv import Params
from silograph.nn.neighbors import Fanout, Full
from silograph.nn.optim import SGD, Adam, Optimizer
from silograph.nn.stored_rows import stored_stages
from silograph.selection.uniform import select_uniform

# What the server does.


def init(fed: Federation, cfg: Config, weights: Params, key: Key) -> ServerState:
    """Set up the clients, which share features if they may."""
    fed.call(begin_stored, {}, what=Kind.CONTROL, key=key)
    memory = learn_form(fed, cfg, key)
    if cfg.options.share_features:
        share_features(fed, key)
    return ServerState(weights=weights, memory=memory)


def check(cfg: Config) -> None:
    """Raise `ConfigError` for a model or a config without such steps."""
    if cfg.options.halo != "none" and not stored_stages(divisible(cfg.model)):
        raise ConfigError(
            "expected a model with a layer after the first that sums over neighbors, which reads "
            f"the rows that are exchanged, got none in {cfg.model.noun}: use model=sage, gcn, "
            "graphconv, gin or appnp with layers=2 or more, or halo=none"
        )
    if cfg.schedule.batch_size is not None or not isinstance(cfg.schedule.neighbors, Full):
        name = "fanout" if isinstance(cfg.schedule.neighbors, Fanout) else "neighbors"
        name = name if cfg.schedule.batch_size is None else "batch_size"
        raise ConfigError(
            f"fedais draws batches and neighbors itself: leave {name} out; its options batches and "
            "drawn say how many batches a round has, and how many neighbors a node draws"
        )
    if cfg.options.share_features and cfg.options.halo == "none":
        raise ConfigError("expected a halo for share_features, got halo=none: leave one out")
    if cfg.options.share_features and not cfg.sent.plain:
        raise ConfigError(
            "expected weights_as=exact and weight_rows=all with share_features, whose clients "
            "train on features of others, too: leave one out"
        )
    if not knobs_in(cfg.options):
        raise ConfigError(
            f"expected an option that policy={cfg.options.policy} can set, got none: leave out "
            "nodes=all, for the ratio, or halo=none, for tau"
        )


def fit_round(
    fed: Federation, cfg: Config, state: ServerState, t: int, key: Key
) -> tuple[ServerState, RoundReport]:
    """Train at the selected clients, with exchanges in between, and average."""
    assert state.weights is not None  # set by init
    own, plan, chosen = key.fold("train", t), plan_of(cfg), cfg.selected
    if chosen is None:
        chosen = tuple(select_uniform(fed.ids, cfg.participation, key.fold("select", t)))
    inbox = outgoing(cfg, state.weights, state.memory, positions_of(fed.ids, chosen))
    inbox |= knob_fields({n: t for n, t in cfg.knobs.items() if n == RATIO}, fed.ids, chosen)
    fed.call(open_round, inbox, what=Kind.WEIGHTS, key=own, to=chosen, lacking=True)
    row_bytes = 0
    for start in plan.starts:
        told = told_of(cfg, t, start)
        row_bytes += exchange(fed, cfg, told, chosen, own)
        fed.call(advance, told, what=Kind.CONTROL, key=own, to=chosen, lacking=True)
    reduce = mean_in(cfg, state, plan)
    reply = fed.call(close_round, {}, what=Kind.WEIGHTS, key=own, to=chosen, reduce=reduce)
    facts = facts_of(fed, cfg, chosen, plan, state.weights) | {ROW_BYTES: float(row_bytes)}
    names = ("row_age", "rows_trained", *((MOVED,) if tells_moves(cfg) else ()))
    if "loss" not in reply:  # no selected client has a training node
        return state, RoundReport(chosen, None, facts | dict.fromkeys(names, 0.0))
    facts |= {name: float(reply[name].t) for name in names}
    return ServerState(under("weights", reply), state.memory), RoundReport(
        chosen, float(reply["loss"].t), facts
    )


def mean_in(cfg: Config, state: ServerState, plan: Plan) -> WeightedMean:
    """Return what the server makes of trained models."""
    weights = state.weights
    assert weights is not None  # set by init

    def after(name: str, steps: int) -> Tensor:
        """Return rows that a client does not use after so many steps."""
        return untouched(cfg, weights, steps)[name]

    ended = untouched(cfg, weights, plan.batches)
    return mean_of(cfg, "share", weights, state.memory, ended, steps="steps", after=after)


def exchange(
    fed: Federation, cfg: Config, told: Mapping[str, Shared], chosen: Sequence[str], key: Key
) -> int:
    """Fetch rows for the clients `chosen`, from all; return the bytes that it took."""
    if cfg.options.halo == "none":
        return 0
    before = fed.ledger.bytes
    form, what = pull_form_of(cfg), Kind.EMBEDDINGS
    pull(fed, ask, serve, store, what=what, key=key, inbox=told, to=chosen, form=form)
    return fed.ledger.bytes - before


def told_of(cfg: Config, t: int, start: int) -> dict[str, Shared]:
    """Return what clients are told of an exchange, and of the batches that follow."""
    tau = cfg.knobs.get(TAU, torch.tensor(cfg.options.tau))
    numbers = {"round": t, "start": start}
    fields = {k: Shared(torch.tensor(n, dtype=torch.int32)) for k, n in numbers.items()}
    return {"knobs/tau": Shared(tau), **fields}


def facts_of(
    fed: Federation, cfg: Config, chosen: Sequence[str], plan: Plan, weights: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return the facts of a round; `paper_row_bytes`: every slot in every batch, rows alone."""
    model, halo = divisible(cfg.model), cfg.options.halo != "none"
    slots = int(fed.route.slot_off.diff()[positions_of(fed.ids, chosen)].sum())
    width = sum(spec.shape[0] or 0 for spec in rows_form(model).fields.values())
    size = width * next(iter(weights.values())).element_size()
    return {
        EXCHANGES: float(len(plan.starts) * halo),
        BATCHES: float(plan.batches),
        **({RATE: rate_of(cfg.optimizer)} if tells_moves(cfg) else {}),
        "paper_row_bytes": float(slots * size * plan.batches * halo),
    }


def rate_of(optimizer: Optimizer) -> float:
    """Return an optimizer's learning rate; 0, which sets no interval, of one that has none."""
    return optimizer.lr if isinstance(optimizer, SGD | Adam) else 0.0


# What silos hold the server to.


def told_specs(cfg: Config, t: int) -> FieldSpecs:
    """Return the specs of what clients are told of an exchange."""
    start = FieldSpec(Shared, (), torch.int32, low=0, high=plan_of(cfg).batches - 1)
    tau = knob_specs(cfg.options, moved=TAU in moved_in(cfg.options), names=(TAU,))
    return {**tau, "round": exactly(t), "start": start}


def setup_steps(cfg: Config, key: Key) -> Steps:
    """Return the calls of `init`."""
    features = share_features_steps(cfg.model.features, key) if cfg.options.share_features else ()
    return Call(begin_stored, Kind.CONTROL, key), learn_steps(cfg, key), features


def round_steps(cfg: Config, t: int, key: Key) -> Steps:
    """Return the calls of `fit_round`: a client trains, and answers, or only answers."""
    own, told = key.fold("train", t), told_specs(cfg, t)
    # Weights came in another call: rows are counted by `Decoder.known`, silo by silo.
    gives = {name: replace(spec, rows="") for name, spec in weights_up(cfg).items()}
    share = replace(TRAINED, high=1) if cfg.options.average == "clients" else TRAINED
    gives |= {"share": share, "loss": LOSS, "row_age": LOSS, "rows_trained": LOSS}
    gives |= {MOVED: FieldSpec(Stacked, low=0)} if tells_moves(cfg) else {}
    if cfg.sent.rows == "used":
        gives["steps"] = FieldSpec(Stacked, (), torch.int64, low=0, high=plan_of(cfg).batches)
    ratio = knob_specs(cfg.options, names=moved_in(cfg.options) - {TAU})
    opens = Call(open_round, Kind.WEIGHTS, own, {**weights_down(cfg), **ratio})
    steps = Call(advance, Kind.CONTROL, own, told)
    closes = Call(close_round, Kind.WEIGHTS, own, {}, gives)
    if cfg.options.halo == "none":
        trains: Steps = (opens, steps, closes)
        return trains if cfg.everyone_trains else Maybe(trains)
    what, form = Kind.EMBEDDINGS, pull_form_of(cfg)
    pulled = pull_steps(ask, serve, store, what=what, key=own, inbox=told, form=form)
    assert isinstance(pulled, Either)  # clients that do not ask may answer
    most = plan_of(cfg).batches
    trains = (opens, Repeat((pulled, steps), most), closes)
    return trains if cfg.everyone_trains else Either(trains, Repeat(pulled.ways[1], most))


def kept_specs(cfg: Config) -> FieldSpecs:
    """Return what a client's state holds between rounds."""
    model, features = divisible(cfg.model), cfg.options.share_features
    losses = {LOSSES: FieldSpec(Ragged, (), rows=NODES)}
    moved = {} if cfg.options.moved is None else moved_specs(pull_form_of(cfg))
    history = history_specs(model, features=features)
    return {**state_specs(cfg), **kept(cfg), **history, **losses, **moved}


FEDAIS: Method[FedAISOptions] = Method(
    name="fedais",
    title="stored embeddings, important nodes, and exchanges as the loss falls (FedAIS)",
    reference="Li et al., Federated graph learning with adaptive importance-based sampling, "
    "AAAI 2025",
    options=FedAISOptions,
    init=init,
    round=fit_round,
    check=check,
    evaluate=HaloSums(),
    needs=Needs(weight_decay=0.0, score_first=True, knobs=knobs_in, controller=controller_of),
    calls=Calls(setup=setup_steps, round=round_steps, state=kept_specs),
    rows="single",
    small_weights=True,
    cautions=(
        Caution(
            "fedais was far behind local on Photo, and on Cora with 100 clients, in 100 rounds"
        ),
    ),
)


# What was measured of FedAIS itself is not known of its presets.
PLAIN = replace(FEDAIS, cautions=())
FEDALL = preset(
    PLAIN,
    "fedall",
    "stored embeddings, fetched in every batch, on all nodes",
    nodes="all",
    interval="fixed",
    tau=1,
)
FEDRANDOM = preset(
    PLAIN,
    "fedrandom",
    "stored embeddings, fetched in every batch, on random nodes",
    nodes="random",
    interval="fixed",
    tau=1,
)
FEDLOCAL = preset(
    PLAIN, "fedlocal", "FedAIS on all nodes, without the halo", nodes="all", halo="none"
)
FEDPNS = preset(
    PLAIN,
    "fedpns",
    "stored embeddings of neighbors that are drawn every 2 batches (FedPNS)",
    nodes="all",
    interval="fixed",
    halo="held",
)
FEDAIS1 = preset(PLAIN, "fedais1", "FedAIS that exchanges in every batch", interval="fixed", tau=1)
FEDAIS2 = preset(PLAIN, "fedais2", "FedAIS on all nodes", nodes="all")
STALE = preset(
    PLAIN,
    "stale",
    "stored embeddings of all halo nodes, fetched every tau-th batch (VR-GCN, PipeGCN)",
    nodes="all",
    interval="fixed",
    halo="all",
)
PRESETS = (FEDALL, FEDRANDOM, FEDLOCAL, FEDPNS, FEDAIS1, FEDAIS2, STALE)
