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
from silograph.core.payload import NO_STATE, Ragged, State
from silograph.core.work import work_for
from silograph.evaluation.evaluate import counts_of_logits, judged_logits
from silograph.evaluation.evaluation_steps import tally_specs
from silograph.federation.field_specs import FieldSpecs
from silograph.graph.block.block import ClientBlock
from silograph.nn.start import Start, start_fields, whole

RECEIVED = "received"  # begins the names of the counts in a reply
VALIDATION = "val."


def score_received(
    cfg: Any, block: ClientBlock, start: Start, tables: State = NO_STATE
) -> tuple[dict[str, Ragged], dict[str, Tensor]]:
    """Return what stays in the state, and the counts (C, ...) that travel; nothing if not asked.

    Args:
        cfg: of the method; it has `received`, `model`, `backend` and `count_rules`.
        block: the graphs on which the clients train.
        start: from which they train, see `silograph.nn.start`.
        tables: the clients', where the model has any.
    """
    if not cfg.received:
        return {}, {}
    with work_for(Kind.EVALUATION):
        logits = cfg.backend.predict(cfg.model, weights_of(cfg, block, start), block, tables)
    rows = judged_logits(logits, block)
    counts = counts_of_logits(cfg, block, rows)
    if cfg.received == "all":
        return {"server/logits": rows}, counts
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
    specs = tally_specs(cfg.model.task, cfg.model.outputs, cfg.count_rules)
    wanted = "" if cfg.received == "all" else VALIDATION
    return {f"{RECEIVED}/{n}": spec for n, spec in specs.items() if n.startswith(wanted)}
