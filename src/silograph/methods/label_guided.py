"""Label-guided global training: one model, trained on all silos' graphs as if they were one.

Zhang, Luo, Feng, Liu, Zhou and Zheng, "Tackling the local bias in federated graph learning", 2021
(algorithm 1). In every step all silos together run a forward and a backward pass through the model;
sums over neighbors reach other silos as partial sums (`silograph.exchange.passes`). Gradients of
the weights are summed, and the server takes one step, so that there is one model.

Without sampling this is centralized training, to rounding. With `sample` every silo draws nodes by
label (`silograph.sampling.label_guided`), and the pass runs on those and the edges among them.

What we changed: the loss is divided by the number of training nodes that take part; with
`weigh_loss` each counts 1/p and the number is that of all, which makes the loss of drawn rows
unbiased. Judged with complete sums, too: a node of the test set hears all its neighbors. With
`min_nodes_per_row` or `min_silos_per_row` above 1 sums are not complete: what has fewer own nodes
or silos behind it counts as 0, forward, backward and in scores, and degrees stay as they are.
"""

from collections.abc import Mapping
from dataclasses import field, replace
from functools import partial
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from silograph.core.config import STRICT
from silograph.core.errors import ConfigError
from silograph.core.key import Key
from silograph.evaluation.scoring import AllSilos
from silograph.exchange.passes import (
    BY_SUMS,
    Crossing,
    by_sums,
    divisible,
    gradient_steps,
    gradients,
    noted,
)
from silograph.exchange.rows import Relayed
from silograph.federation.base import Federation
from silograph.federation.program import Steps
from silograph.methods.base import Method, MethodConfig, Needs, RoundReport, ServerState
from silograph.methods.global_training import (
    calls_of_global_training,
    check_together,
    start_together,
    steps_together,
)
from silograph.nn.conv import Params
from silograph.sampling.label_guided import (
    draw_rows,
    draw_steps,
    sampler_specs,
    set_up_sampler,
    set_up_sampler_steps,
)


@dataclass(frozen=True, config=STRICT)
class LabelGuidedOptions:
    """What is drawn and how it is weighed; the help texts are the documentation of the fields."""

    sample: Annotated[int, Field(ge=1)] | None = field(
        default=None,
        metadata={"help": "nodes drawn in a step, all silos together; none: all nodes"},
    )
    normalize: Literal["paper", "conditional", "none"] = field(
        default="paper",
        metadata={
            "help": "divide messages by p(u) (paper), p(u | v) (conditional), nothing (none)"
        },
    )
    rows: Literal["drawn", "all"] = field(
        default="drawn",
        metadata={"help": "rows that are evaluated in a step, drawn or all; only drawn ones send"},
    )
    weigh_loss: bool = field(
        default=False, metadata={"help": "weigh a drawn node's loss by 1/p: unbiased, less steady"}
    )


def init(fed: Federation, cfg: MethodConfig, weights: Params, key: Key) -> ServerState:
    """Set up the clients, and what they draw by."""
    state = start_together(fed, cfg, weights, key)
    if cfg.options.sample is not None:
        set_up_sampler(fed, cfg.options.sample, cfg.options.normalize, key)
    return state


def check(cfg: MethodConfig[LabelGuidedOptions]) -> None:
    """Raise `ConfigError` for options about drawn nodes where none are drawn, and other steps."""
    defaults, options = LabelGuidedOptions(), cfg.options
    names = [name for name in vars(defaults) if getattr(options, name) != getattr(defaults, name)]
    if options.sample is None and names:
        raise ConfigError(
            f"expected sample with {names[0]}, which says how drawn nodes count, got none: give "
            f"--option sample=NODES, or leave out {', '.join(names)}"
        )
    check_together(cfg)


def fit_round(
    fed: Federation, cfg: MethodConfig, state: ServerState, t: int, key: Key
) -> tuple[ServerState, RoundReport]:
    """Take `local_epochs` steps, all silos together; facts count incomplete sums."""
    relayed: list[Relayed] = []
    crossing = noted(by_sums(row_minimum=cfg.row_minimum), relayed)
    state, report = steps_together(fed, cfg, state, t, key, partial(step, crossing=crossing))
    if cfg.row_minimum.limits:
        facts = vars(sum(relayed, Relayed()))
        report = replace(report, facts={f"rows_{name}": n for name, n in facts.items()})
    return state, report


def step(
    fed: Federation,
    cfg: MethodConfig,
    weights: Mapping[str, Tensor],
    key: Key,
    crossing: Crossing = BY_SUMS,
) -> tuple[Params, float | None]:
    """Draw nodes, and return the gradients of their loss."""
    if cfg.options.sample is not None:
        draw_rows(fed, cfg.options, key)
    weighed = cfg.options.weigh_loss
    return gradients(fed, divisible(cfg.model), weights, key, weighed=weighed, crossing=crossing)


def setup_steps(cfg: MethodConfig, key: Key) -> Steps:
    """Return the calls of `init` besides those of all global training."""
    if cfg.options.sample is None:
        return ()
    return set_up_sampler_steps(cfg.options.sample, cfg.model.outputs, key)


def step_steps(cfg: MethodConfig, key: Key) -> Steps:
    """Return the calls of `step`."""
    model, is_drawn = divisible(cfg.model), cfg.options.sample is not None
    gradient_calls = gradient_steps(
        model, key, by_sums(named=is_drawn, row_minimum=cfg.row_minimum)
    )
    return (draw_steps(cfg.options, key), gradient_calls) if is_drawn else gradient_calls


CALLS = calls_of_global_training(
    step_steps,
    setup_steps,
    lambda cfg: {} if cfg.options.sample is None else sampler_specs(cfg.options.sample),
)

LABEL_GUIDED = Method(
    name="label_guided",
    title="one model on the joined graph, on all nodes or those drawn by label",
    reference="Zhang et al., Tackling the local bias in federated graph learning, 2021",
    options=LabelGuidedOptions,
    init=init,
    round=fit_round,
    check=check,
    evaluate=AllSilos(),
    needs=Needs(keep_optimizer=True),
    calls=CALLS,
    rows="sums",
)
