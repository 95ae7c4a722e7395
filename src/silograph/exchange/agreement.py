"""Before training: both owners of every cross-client edge must know of it."""

from typing import Any

import torch

from silograph.core.errors import DataError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Ragged, Stacked, State
from silograph.exchange.rows import relay_steps, relay_sum
from silograph.federation.base import Federation
from silograph.federation.field_specs import COUNT
from silograph.federation.program import Call, Steps
from silograph.graph.block.block import ClientBlock


def agree_on_edges(fed: Federation, key: Key) -> None:
    """Check that as many cross-client edges end at each boundary row as its owner knows.

    Raises:
        DataError: a client whose neighbors do not agree.
    """
    relay_sum(fed, tell_edges, compare_edges, what=Kind.HALO_KEYS, key=key)
    reply = fed.call(tell_disagreement, {}, what=Kind.CONTROL, key=key)
    wrong = reply["wrong"].t.tolist()
    for name, count in zip(fed.ids, wrong, strict=True):
        if count:
            raise DataError(
                f"expected both owners of a cross-client edge to know of it, got {count} nodes of "
                f"{name} with other numbers of edges than their neighbors say: list each edge at "
                "both owners; clients that hold copies of a node cannot be trained as one"
            )


def agreement_steps(key: Key) -> Steps:
    """Return the calls of `agree_on_edges`."""
    what = Kind.HALO_KEYS
    return (
        relay_steps(tell_edges, compare_edges, what=what, key=key, width=1, dtype=torch.int64),
        Call(tell_disagreement, Kind.CONTROL, key, {}, {"wrong": COUNT}),
    )


def tell_edges(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Count the own edges to every halo slot. In: nothing. Out: `rows` (S, 1) int64."""
    del cfg, inbox, key
    counts = torch.bincount(block.halo.adj.indices.long(), minlength=block.halo.adj.num_cols)
    return state, {"rows": Ragged(counts[:, None], block.halo.off)}


def compare_edges(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Compare with the own edges. In: `sum` (B, 1) int64. Out: nothing."""
    del cfg, key
    told = torch.zeros(len(block.row_key), dtype=torch.int64, device=block.off.device)
    told[block.halo.boundary] = inbox["sum"].t[:, 0]
    wrong = block.count(told != block.halo.adj.degree)
    return {**state, "agreement/wrong": Stacked(wrong)}, {}


def tell_disagreement(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Tell how many rows differ. In: nothing. Out: `wrong` (C,) int64."""
    del cfg, block, inbox, key
    new = {name: field for name, field in state.items() if name != "agreement/wrong"}
    return new, {"wrong": state["agreement/wrong"]}
