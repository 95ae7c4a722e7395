"""Options of FedAIS (`silograph.methods.fedais`), and what follows from them for a round."""

from dataclasses import dataclass as plain
from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from silograph.control import (
    BOUND_INTERVAL,
    FIXED,
    LOSS_INTERVAL,
    Controller,
    Knob,
    by_policy,
    knobs_of,
)
from silograph.control.policy import AGENT, AGENT_SEED, EXPLORE, TARGET, TIME
from silograph.core.config import STRICT
from silograph.core.ranges import lin
from silograph.methods.base import MethodConfig, Share

EXCHANGES = {"read_if": {"halo": ("drawn", "held", "all")}}
DRAWS = {"read_if": {"nodes": ("random", "importance")}}
WEIGHS = {"read_if": {"nodes": ("importance",)}}
MOST_COUNT = 2**31  # of what ops count in whole numbers of 32 bits
MOST = 100  # batches between two exchanges
TAU, RATIO = "tau", "ratio"  # knobs


@dataclass(frozen=True, config=STRICT)
class FedAISOptions:
    """The help texts are the documentation of the fields."""

    nodes: Literal["all", "random", "importance"] = field(
        default="importance",
        metadata={
            "help": "training nodes of a round: all, or a share, drawn at random or by importance"
        },
    )
    interval: Literal["fixed", "adaptive", "bound"] = field(
        default="adaptive",
        metadata={
            "read_if": EXCHANGES["read_if"] | {"policy": ("rule",)},
            "help": "batches between two exchanges: always tau (fixed), fewer as the loss falls "
            "(adaptive), or of the least error bound by estimated constants (bound)",
        },
    )
    halo: Literal["none", "drawn", "held", "all"] = field(
        default="drawn",
        metadata={
            "help": "what an exchange fetches: nothing (none), what the next batch has drawn "
            "(drawn), what all batches until the next exchange have, which read no other slots "
            "(held), or all slots (all)"
        },
    )
    tau: Annotated[int, Field(ge=1, le=MOST)] = field(
        default=2,
        metadata=EXCHANGES
        | {"help": "batches between two exchanges at first", "knob": lin(1, MOST)},
    )
    ratio: Share = field(
        default=0.7,
        metadata=DRAWS
        | {
            "help": "share of its training nodes that a client draws",
            "knob": lin(0.05, 1.0),
            "by_client": True,
        },
    )
    batches: Annotated[int, Field(ge=1, le=1000)] = field(
        default=10, metadata={"help": "batches of a round, in each of its local epochs"}
    )
    drawn: Annotated[int, Field(ge=0, lt=MOST_COUNT)] = field(
        default=10,
        metadata={"help": "neighbors drawn for a node of a batch, halo included; 0: all"},
    )
    warmup: Annotated[int, Field(ge=1, lt=MOST_COUNT)] = field(
        default=1,
        metadata=WEIGHS | {"help": "rounds of a client in which its nodes are drawn evenly"},
    )
    floor: Annotated[float, Field(ge=0, le=1)] = field(
        default=0.1,
        metadata=WEIGHS | {"help": "share of the probability that all nodes have alike"},
    )
    unbiased: bool = field(
        default=False,
        metadata={"help": "draw systematically, and weigh losses so that steps are unbiased"},
    )
    owners: Literal["recompute", "stored"] = field(
        default="recompute",
        metadata=EXCHANGES
        | {"help": "rows that are asked for: worked out anew (recompute), or as they were stored"},
    )
    sent: Literal["exact", "int8"] = field(
        default="exact",
        metadata=EXCHANGES
        | {"help": "rows that are sent: exact, or as bytes with a scale for each row (int8)"},
    )
    moved: Annotated[float, Field(ge=0)] | None = field(
        default=None,
        metadata=EXCHANGES
        | {
            "help": "send only rows that moved by more than this share of their length since they "
            "were last sent (none: all that are asked for)"
        },
    )
    share_features: bool = field(
        default=False, metadata={"help": "features leave, too: the first layer sees the halo"}
    )
    average: Literal["clients", "nodes"] = field(
        default="clients",
        metadata={"help": "mean of the models: plain (clients), or weighted by training nodes"},
    )
    policy: Literal["rule", "ddpg", "drawn"] = field(
        default="rule",
        metadata={
            "help": "what sets tau, and the ratio of each client: rule (tau by interval; ratio "
            "stays), ddpg (an agent) or drawn (by chance)"
        },
    )
    target: Share = field(default=0.9, metadata=TARGET)
    time: Literal["virtual", "measured", "none"] = field(default="virtual", metadata=TIME)
    explore: bool = field(default=True, metadata=EXPLORE)
    agent: str | None = field(default=None, metadata=AGENT)
    agent_seed: int = field(default=0, metadata=AGENT_SEED)


Config = MethodConfig[FedAISOptions]


@plain(frozen=True)
class Plan:
    """How many batches a round has, and how many exchanges.

    Attributes:
        batches: of all local epochs.
        tau: batches between two exchanges.
    """

    batches: int
    tau: int

    @property
    def starts(self) -> range:
        """Number of the first batch after each exchange."""
        return range(0, self.batches, self.tau)


def plan_of(cfg: Config) -> Plan:
    """Return the plan of a round; without a halo nothing is exchanged."""
    total = cfg.options.batches * cfg.schedule.epochs
    if cfg.options.halo == "none":
        return Plan(total, total)
    return Plan(total, int(cfg.knobs[TAU]) if TAU in cfg.knobs else cfg.options.tau)


def knobs_in(options: FedAISOptions) -> tuple[Knob, ...]:
    """Return the knobs of a run: by the rules tau alone, else those that change anything."""
    if options.policy == "rule":
        return knobs_of(options, (TAU,))
    moved = {TAU: options.halo != "none", RATIO: options.nodes != "all"}
    return knobs_of(options, [name for name, changes in moved.items() if changes])


def controller_of(options: FedAISOptions) -> Controller:
    """Return what sets them."""
    rules = {"adaptive": LOSS_INTERVAL, "bound": BOUND_INTERVAL}
    rule = FIXED if options.halo == "none" else rules.get(options.interval, FIXED)
    return by_policy(options, rule)


def moved_in(options: FedAISOptions) -> frozenset[str]:
    """Return the names of the knobs that may change during a run."""
    if controller_of(options) is FIXED:
        return frozenset()
    return frozenset(knob.name for knob in knobs_in(options))
