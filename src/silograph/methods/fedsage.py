"""FedSage+: clients generate the neighbors that they cannot see, then train by FedAvg.

Zhang, Yang, Li, Sun and Yiu, "Subgraph federated learning with missing neighbor generation",
NeurIPS 2021, algorithm 1; the generator is `silograph.nn.neighgen`.

Before round 1, at every client:

    1. hide each node with probability `hidden`; take `generator_epochs` steps on what the graph
       without them says of them
    2. take `cross_epochs` more; in each of them every client shows the rows x that it generates to
       all others, who answer 2 (x - x_u), u their node that is nearest. That is the gradient of
       min over u of |x - x_u|^2, which all others' sums are added to the client's own loss
    3. generate neighbors of all nodes on the whole graph, and keep them

Then rounds are FedAvg's, on graphs with the generated neighbors.

`fedsage_local` leaves step 2 out (`cross_epochs=0`), so no row leaves its silo. What the paper
calls FedSage has no generator: `--method fedavg --model sage`.

What we changed: generated rows travel, where the paper sends the generator and what enters it;
gradients are the same by the chain rule. Noise is drawn for each generated neighbor, and all of
them go through one map. The degree predictor has no activation and begins at 0; the features have
none. The generator follows no classification loss. Nodes are compared with all nodes of another
client, not with a sample. Any model may be trained; the paper's is `sage`.

What the answers reveal is in docs/exchange.md: a real row, exactly if there are two clients.

State of a client in set-up, all under `generator/`: `weights/*`, `optimizer/*` (C, ...), `hidden`
(n,), `answers` (k, F). Afterwards `generated/*`, and what local training keeps.

C: clients. n: rows. k: generated rows. F: features.
"""

from dataclasses import field, replace
from typing import Annotated

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from silograph.core.config import STRICT
from silograph.core.errors import ConfigError, ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Ragged, Stacked, State, offsets, under
from silograph.core.ranges import lin, log
from silograph.core.work import report_steps
from silograph.evaluation.scoring import OwnGraph
from silograph.evaluation.views import MENDED
from silograph.exchange.generated import COUNTS, GENERATED, generated_specs
from silograph.exchange.rows import publish, publish_steps
from silograph.federation.base import Federation
from silograph.federation.field_specs import FieldSpec, FieldSpecs
from silograph.federation.program import Call, OtherNetwork, Steps
from silograph.graph.block.block import ClientBlock
from silograph.methods.base import Method, MethodConfig, ServerState
from silograph.methods.caution import Caution
from silograph.methods.fedavg import fit_round
from silograph.methods.local_training import TRAIN_CALLS, begin, stacked, state_specs
from silograph.methods.preset import preset
from silograph.nn.conv import Params, internal_messages
from silograph.nn.doors import dtype_of
from silograph.nn.neighgen import (
    Impaired,
    NeighGen,
    impaired,
    made_for,
    objective,
    pulls,
    shown,
)
from silograph.nn.optim import Adam

PRIVATE = "generator/"  # begins the names of what a client keeps in set-up
HIDDEN, ANSWERS = "generator/hidden", "generator/answers"
HiddenShare = Annotated[float, Field(ge=0, lt=1)]
Epochs = Annotated[int, Field(ge=0, le=10_000)]


@dataclass(frozen=True, config=STRICT)
class FedSageOptions:
    """The help texts are the documentation of the fields."""

    hidden: HiddenShare = field(
        default=0.5,
        metadata={
            "help": "probability with which a node is hidden while the generator learns; 0: "
            "nothing is learned or generated, which is FedAvg",
            "tune": lin(0.1, 0.9),
        },
    )
    generator_epochs: Epochs = field(
        default=100, metadata={"help": "steps of the generator on hidden nodes"}
    )
    cross_epochs: Annotated[int, Field(ge=0, le=1000)] = field(
        default=5,
        metadata={"help": "steps with the answers of other silos as well; 0: no row leaves"},
    )
    generator_lr: Annotated[float, Field(gt=0)] = field(
        default=0.01,
        metadata={"help": "rate of the generator's Adam", "tune": log(1e-4, 1e-1)},
    )
    generator_width: Annotated[int, Field(ge=1, le=4096)] = field(
        default=128, metadata={"help": "hidden width of the generator"}
    )
    most: Annotated[int, Field(ge=0, le=100)] = field(
        default=5, metadata={"help": "neighbors that are generated for a node at most"}
    )
    feature_weight: Annotated[float, Field(ge=0)] = field(
        default=1.0,
        metadata={
            "help": "weight of the features' loss beside that of the degrees",
            "tune": log(1e-2, 1e2),
        },
    )


FedSageConfig = MethodConfig[FedSageOptions]


def generator_of(cfg: FedSageConfig) -> NeighGen:
    """Return the shape of the generator."""
    return NeighGen(cfg.model.features, cfg.options.generator_width, cfg.options.most)


def train_generator(
    cfg: FedSageConfig, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Hide nodes and let a new generator learn from them. In, out: nothing."""
    del inbox
    first = generator_of(cfg).init(key.fold("first")).items()
    like, clients = block.row_key.new_zeros(0, dtype=dtype_of(block)), block.num_clients
    weights = {name: w.to(like).repeat(clients, *[1] * w.dim()) for name, w in first}
    hidden = key.fold("hidden").uniform(block.row_key)[:, 0] < cfg.options.hidden
    memory, graph = Adam(cfg.options.generator_lr).init(weights), impaired(block, hidden)
    for epoch in range(cfg.options.generator_epochs):
        weights, memory = _stepped(cfg, block, graph, weights, memory, key.fold("noise", epoch))
    return {
        **state,
        HIDDEN: Ragged(hidden, block.off),
        **stacked("generator/weights", weights),
        **stacked("generator/optimizer", memory),
    }, {}


def _stepped(
    cfg: FedSageConfig,
    block: ClientBlock,
    graph: Impaired,
    weights: Params,
    memory: Params,
    key: Key,
    answers: torch.Tensor | None = None,
) -> tuple[Params, Params]:
    """Return weights and optimizer state of the generators after a step."""
    gen, weight = generator_of(cfg), cfg.options.feature_weight
    leaves = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
    with torch.enable_grad():
        loss = objective(gen, leaves, block, graph, key, weight, answers)
        found = torch.autograd.grad(loss, list(leaves.values()))
    new = {name: w.detach() for name, w in leaves.items()}
    kept = {name: t.clone() for name, t in memory.items()}
    adam = Adam(cfg.options.generator_lr)
    adam.step_(new, dict(zip(new, found, strict=True)), kept)
    report_steps(float(sum(adam.flops_of(n) * w[:1].numel() for n, w in new.items())))
    return new, kept


def _impaired(block: ClientBlock, state: State) -> Impaired:
    return impaired(block, state[HIDDEN].t)


def show(
    cfg: FedSageConfig, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Show what is generated for nodes that are not hidden. In: nothing. Out: `x` (k, F)."""
    del inbox
    weights, graph = under("generator/weights", state), _impaired(block, state)
    return state, {"x": Ragged(*shown(generator_of(cfg), weights, block, graph, key))}


def answer(
    cfg: FedSageConfig, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Answer 2 (x - x_u), u the nearest own node. In: `x` (k, F). Out: `gradient` (C, k, F)."""
    del cfg, key
    return state, {"gradient": Stacked(pulls(inbox["x"].t, block))}


def take(
    cfg: FedSageConfig, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Keep the sum of the others' answers. In: `gradient` (1, k, F). Out: nothing."""
    del cfg, key, block
    found = inbox["gradient"].t
    off = offsets(torch.full((len(found),), found.shape[1], device=found.device))
    return {**state, ANSWERS: Ragged(found.flatten(0, 1), off)}, {}


def learn(
    cfg: FedSageConfig, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Take a step with the answers, if there were others to answer. In, out: nothing.

    Raises:
        ProtocolError: answers to other rows than those that were shown.
    """
    del inbox
    weights, memory = (under(f"generator/{name}", state) for name in ("weights", "optimizer"))
    graph, answers = _impaired(block, state), None
    if ANSWERS in state:
        answers = state[ANSWERS].t
        count = len(shown(generator_of(cfg), weights, block, graph, key)[0])
        if answers.shape != (count, cfg.model.features):
            raise ProtocolError(
                f"expected answers to {count} generated rows, got {tuple(answers.shape)}"
            )
    weights, memory = _stepped(cfg, block, graph, weights, memory, key, answers)
    new = {name: f for name, f in state.items() if name != ANSWERS}
    new |= stacked("generator/weights", weights) | stacked("generator/optimizer", memory)
    return new, {}


def mend(
    cfg: FedSageConfig, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Generate neighbors of all nodes, forget the generator, set up training. In, out: nothing."""
    gen, weights = generator_of(cfg), under("generator/weights", state)
    with torch.no_grad():
        z = gen.encode(weights, block, internal_messages(block, dtype_of(block)))
        count = gen.counted(gen.missing(weights, z, block.off))
        made = made_for(block, count)
        x = gen.generate(weights, z, made, key.fold("noise"))
    kept = {name: f for name, f in state.items() if not name.startswith(PRIVATE)}
    mended = {COUNTS: Ragged(count.int(), block.off), GENERATED: Ragged(x, made.off)}
    return begin(cfg, block, {**kept, **mended}, inbox, key)


def init(fed: Federation, cfg: FedSageConfig, weights: Params, key: Key) -> ServerState:
    """Train the generators, and mend the clients' graphs."""
    fed.call(train_generator, {}, what=Kind.CONTROL, key=key.fold("generator"))
    for own in _cross_keys(cfg, key):
        publish(fed, show, answer, take, what=Kind.GENERATED, key=own, back=Kind.FEATURES)
        fed.call(learn, {}, what=Kind.CONTROL, key=own)
    fed.call(mend, {}, what=Kind.CONTROL, key=key.fold("mend"))
    return ServerState(weights=weights, memory={})


def check(cfg: FedSageConfig) -> None:
    """Raise `ConfigError` where nodes have no features to generate."""
    if cfg.model.task == "rating":
        raise ConfigError(
            "expected nodes with features for fedsageplus and fedsage_local, which generate them, "
            "got ratings: use method=fedavg"
        )


def _cross_keys(cfg: FedSageConfig, key: Key) -> list[Key]:
    """Return the key of each step with other silos' answers."""
    return [key.fold("cross", number) for number in range(cfg.options.cross_epochs)]


def setup_steps(cfg: FedSageConfig, key: Key) -> Steps:
    """Return the calls of `init`."""
    width = cfg.model.features
    rows, back = {"x": FieldSpec(Ragged, (width,))}, {"gradient": FieldSpec(Stacked, (None, width))}
    return (
        Call(train_generator, Kind.CONTROL, key.fold("generator")),
        *(
            (
                publish_steps(
                    show,
                    answer,
                    take,
                    what=Kind.GENERATED,
                    key=own,
                    shown=rows,
                    answers=back,
                    back=Kind.FEATURES,
                ),
                Call(learn, Kind.CONTROL, own),
            )
            for own in _cross_keys(cfg, key)
        ),
        Call(mend, Kind.CONTROL, key.fold("mend")),
    )


def network_of(cfg: FedSageConfig) -> OtherNetwork:
    """Return what bounds the work of generators."""
    options, first = cfg.options, generator_of(cfg).init(Key.of(0))
    shapes = {name: tuple(w.shape) for name, w in first.items()}
    return OtherNetwork(shapes, max(1, options.generator_epochs), options.most)


def kept_specs(cfg: FedSageConfig) -> FieldSpecs:
    """Return what a client's state holds between rounds."""
    return {**state_specs(cfg), **generated_specs(cfg.model.features, cfg.options.most)}


FEDSAGEPLUS: Method[FedSageOptions] = Method(
    name="fedsageplus",
    title="average of models trained with generated neighbors; silos' rows guide generators",
    reference="Zhang et al., Subgraph federated learning with missing neighbor generation, "
    "NeurIPS 2021",
    options=FedSageOptions,
    init=init,
    round=fit_round,
    check=check,
    evaluate=OwnGraph(through=MENDED),
    makes_edges=True,
    ratings=False,
    calls=replace(TRAIN_CALLS, setup=setup_steps, state=kept_specs, other_network=network_of),
    cautions=(
        Caution(
            "clients train with adam, as for fedavg: far behind local on Photo, and with 100 "
            "clients on Cora, where --optimizer sgd --local-epochs 10 learns, and on PubMed"
        ),
    ),
)

FEDSAGE_LOCAL = preset(
    FEDSAGEPLUS,
    "fedsage_local",
    "average of models trained with generated neighbors; generators learn alone",
    cross_epochs=0,
)
