"""Scoring with rows of other silos from some layer on: below it each node sees its own graph.

What comes is multiplied by the weights and scaled at its owners, so no feature leaves where the
first layer is not shared.

C: clients. n: rows. k: halo slots. O: width of a stage's sum.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Ragged, Shared, State, under
from silograph.evaluation.evaluate import call_for_counts, judge_left
from silograph.evaluation.evaluation_steps import judged_steps
from silograph.evaluation.views import HALO, SILOS
from silograph.exchange.history import finish_alone
from silograph.exchange.passes import begin_step, divisible, predict_steps, sum_specs, with_sums
from silograph.exchange.passes import predict as predict_together
from silograph.exchange.pull import pull, pull_steps, rows_of_width
from silograph.exchange.stages import begin, begin_inside, finish, inputs_of, stage_of
from silograph.federation.base import Federation
from silograph.federation.field_specs import FieldSpecs
from silograph.federation.program import Steps
from silograph.graph.block.block import ClientBlock
from silograph.nn.any_model import AnyModel
from silograph.nn.doors import check_like
from silograph.nn.reach import gathered, messages_out
from silograph.nn.stage_halves import before, scales_of
from silograph.task.counts import CountRules


@dataclass(frozen=True)
class HaloFrom:
    """Each node sees its neighbors in other silos from a layer on.

    Attributes:
        layer: number of that layer among those that sum over neighbors, 0 or 1.
        view: whose validation scores pick the round.
        by: `rows` by `pull`, so that clients may hold copies of a node; or `sums`, from layer 1 on.
            Where clients keep features of their halo (`exchange.history`), they then see these in
            layer 0, too.
    """

    layer: Literal[0, 1]
    view: Literal["server", "personalized"] = "server"
    by: Literal["rows", "sums"] = "rows"
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
            predict_together(fed, staged, under("weights", inbox), key, finish_alone)
            return call_for_counts(fed, judge_left, {}, key, rules)
        inbox = {**inbox, "train": Shared(torch.tensor(False))}
        what = Kind.EVALUATION
        fed.call(begin_inside if self.layer else begin, inbox, what=what, key=key)
        for told in with_sums(staged)[self.layer :]:
            pull(fed, None, serve_all, store_all, what=what, key=key, inbox=told)
        return call_for_counts(fed, judge_left, {}, key, rules)

    def steps(self, model: AnyModel, takes: FieldSpecs, key: Key, rules: CountRules) -> Steps:
        """Return the calls of `counts`; `rules`: what the replies hold."""
        del takes
        staged, what = divisible(model), Kind.EVALUATION
        judged = judged_steps(judge_left, {}, model, key, rules)
        if self.by == "sums":
            return predict_steps(staged, key, finish_alone), judged
        pulls = (
            pull_steps(
                None,
                serve_all,
                store_all,
                what=what,
                key=key,
                inbox=told,
                form=rows_of_width(width),
            )
            for told, width in sum_specs(staged)[self.layer :]
        )
        op = begin_inside if self.layer else begin
        return begin_step(staged, key, train=False, op=op), *pulls, judged

    def seen(self, collect: float) -> str:
        """Return how a node is seen."""
        del collect
        return HALO if self.layer else SILOS


HaloSums = partial(HaloFrom, 1, by="sums")  # needs no row of a single node to cross


def serve_all(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Work out the messages of a stage; send boundary rows. In: `stage`. Out: `rows` (k, O)."""
    at, params = inputs_of(cfg, block, state, key, stage_of(cfg, inbox))
    z = before(params, at)
    rows = messages_out(scales_of(at.stage.conv), z, at.reach)[block.halo.boundary]
    new = {**state, f"pass/z/{at.number}": Ragged(z, at.reach.off)}
    return new, {"rows": Ragged(rows, block.halo.boundary_off)}


def store_all(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Add up what came and finish the stage. In: `stage`, `rows` (k, O). Out: nothing."""
    at, params = inputs_of(cfg, block, state, key, stage_of(cfg, inbox))
    rows = check_like(inbox["rows"].t, state[f"pass/z/{at.number}"].t)
    arrived = gathered(at.reach, block.halo.adj, rows)
    return finish(cfg, block, state, key, at, params, arrived), {}
