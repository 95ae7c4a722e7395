"""Scoring the model that a client receives, before it trains: counts that travel with its reply.

They cost no call of their own. Where the run asks for it (`MethodConfig.received`), every selected
client counts what the model with which it begins the round says of its validation nodes, or of all
nodes that judge; so the server's model of a round is known by who trains in the next one.

C: clients.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from silograph.core.kinds import Kind
from silograph.core.payload import NO_STATE, Ragged, Stacked, State
from silograph.core.work import work_for
from silograph.evaluation.evaluate import counts_of_logits, judged_logits
from silograph.evaluation.evaluation_steps import tally_specs
from silograph.evaluation.ranking import ranked, ranking_reply, ranking_reply_specs
from silograph.federation.field_specs import FieldSpecs
from silograph.graph.block.block import ClientBlock
from silograph.nn.start import Start, start_fields, whole

RECEIVED = "received"  # begins the names of the counts in a reply
VALIDATION = "val."


def score_received(
    cfg: Any, block: ClientBlock, start: Start, tables: State = NO_STATE
) -> tuple[dict[str, Ragged | Stacked], dict[str, Tensor]]:
    """Return what stays in the state, and the counts (C, ...) that travel; nothing if not asked.

    Args:
        cfg: of the method; it has `received`, `is_unscored`, `model`, `backend`, `relevant` and
            `count_rules`.
        block: the graphs on which the clients train.
        start: from which they train, see `silograph.nn.start`.
        tables: the clients', where the model has any.
    """
    if not cfg.received:
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
        logits = cfg.backend.predict(cfg.model, weights, block, tables)
        ranking = ranked(cfg, "server", weights, block, tables) if cfg.received == "all" else {}
    rows = judged_logits(logits, block)
    counts = counts_of_logits(cfg, block, rows)
    if cfg.received == "all":
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
    """Return what a reply has of these counts, `received/*`."""
    if not cfg.received:
        return {}
    return {f"{RECEIVED}/{n}": spec for n, spec in _count_specs(cfg).items()}


def _count_specs(cfg: Any) -> FieldSpecs:
    """Return what clients count of the model that they receive, rankings included."""
    specs = tally_specs(cfg.model.task, cfg.model.outputs, cfg.count_rules)
    if cfg.received != "all":
        return {name: spec for name, spec in specs.items() if name.startswith(VALIDATION)}
    return specs if cfg.relevant is None else {**specs, **ranking_reply_specs()}
