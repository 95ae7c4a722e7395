"""Scores of rankings: clients rank their items where they score a model, and send three sums.

What a ranking came to stays in the state until the server asks, as logits of judged rows do, so no
model is sent twice. Users, items and ratings never leave; see `silograph.task.ranking`.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Stacked, State
from silograph.federation.base import Federation
from silograph.federation.field_specs import FieldSpec, FieldSpecs
from silograph.federation.program import Call
from silograph.graph.block.block import ClientBlock
from silograph.task.least_count import counts_to_send
from silograph.task.ranking import FIELDS, RankingModel, ranking_counts, ranking_specs

Whose = Literal["server", "own"]


def no_ranking(cfg: Any, block: ClientBlock) -> dict[str, Stacked]:
    """Return the state of clients that have ranked nothing; none where no run ranks."""
    if cfg.relevant is None:
        return {}
    zero = torch.zeros(block.num_clients, len(FIELDS), dtype=torch.float64, device=block.y.device)
    return {f"{whose}/ranking": Stacked(zero) for whose in ("server", "own")}


def rankings_specs(cfg: Any) -> FieldSpecs:
    """Return what the state holds of rankings."""
    kept = FieldSpec(Stacked, (len(FIELDS),), torch.float64)
    return {} if cfg.relevant is None else {"server/ranking": kept, "own/ranking": kept}


def ranked(
    cfg: Any, whose: Whose, weights: Mapping[str, Tensor], block: ClientBlock, tables: State
) -> dict[str, Stacked]:
    """Return the state field with what rankings by a model come to; none where no run ranks."""
    if cfg.relevant is None:
        return {}
    assert isinstance(cfg.model, RankingModel)  # see `resolve`
    with torch.no_grad():
        factors = cfg.model.factors(weights, block, tables=tables)
        return {f"{whose}/ranking": Stacked(ranking_counts(block, factors, cfg.relevant))}


def rank_server(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Report rankings by the server's model, just judged. In: nothing. Out: `FIELDS`, (C,)."""
    del inbox, key
    return state, ranking_reply(cfg, state, block, "server")


def rank_own(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Report rankings by the clients' own models. In: nothing. Out: `FIELDS`, (C,)."""
    del inbox, key
    return state, ranking_reply(cfg, state, block, "own")


def ranking_reply(cfg: Any, state: State, block: ClientBlock, whose: Whose) -> dict[str, Stacked]:
    """Return what a client reports of the rankings that a state holds; see `counts_to_send`."""
    counts = counts_to_send(_rankings(state, block, whose), "rating", cfg.count_rules)
    return {name: Stacked(t) for name, t in counts.items()}


def _rankings(state: State, block: ClientBlock, whose: Whose) -> dict[str, Tensor]:
    kept = state[f"{whose}/ranking"].t
    if kept.shape != (block.num_clients, len(FIELDS)):
        raise ProtocolError(
            f"expected {whose}/ranking of {block.num_clients} clients, got {tuple(kept.shape)}: "
            "this is the state of another model or silo"
        )
    return {name: kept[:, place] for place, name in enumerate(FIELDS)}


def left_rankings(state: State, block: ClientBlock, whose: Whose) -> dict[str, Tensor]:
    """Return the counts of `server` or `own` that a round has left, none where no run ranks."""
    if f"{whose}/ranking" not in state:
        return {}
    return _rankings(state, block, whose)


def with_rankings(
    fed: Federation, counts: Mapping[str, Tensor], whose: Whose, key: Key
) -> dict[str, Tensor]:
    """Return counts that have just been asked for, with those of rankings."""
    op = rank_server if whose == "server" else rank_own
    reply = fed.call(op, {}, what=Kind.EVALUATION, key=key)
    return {**counts, **{name: field.t for name, field in reply.items()}}


def ranking_steps(whose: Whose, key: Key) -> tuple[Call, ...]:
    """Return the call of `with_rankings`."""
    op = rank_server if whose == "server" else rank_own
    return (Call(op, Kind.EVALUATION, key, {}, ranking_reply_specs()),)


def ranking_reply_specs() -> FieldSpecs:
    """Return what clients report of rankings."""
    return {
        name: FieldSpec(Stacked, spec.shape, spec.dtype, low=spec.low, high=spec.high)
        for name, spec in ranking_specs().items()
    }


def unranked(clients: int) -> dict[str, Tensor]:
    """Return the counts of clients that have ranked nothing."""
    return {name: torch.zeros(clients, dtype=torch.float64) for name in FIELDS}
