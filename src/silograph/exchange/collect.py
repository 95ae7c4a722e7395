"""Collecting: silos fetch the features of a share of their halo once, before training.

From then on a client trains and is judged on its own nodes, those it has fetched, and the edges
between the two; fetched nodes have no label there, and what connects them to each other stays
unknown. Features leave their silo. This is the "neighbor collection" of Zhang, Luo, Feng, Liu, Zhou
and Zheng, "Tackling the local bias in federated graph learning", 2021, section 4.2 (a share of .2).

State: `collected/slot` (k,) int32 as the client counts its slots, ascending; `collected/x` (k, F).

C: clients. n: rows. k: fetched rows. F: features.
"""

from typing import Any

import torch

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Ragged, Shared, State, offsets, owners
from silograph.exchange.generated import COUNTS, GENERATED, with_generated
from silograph.exchange.pull import pull, pull_steps, rows_of_width
from silograph.federation.base import Federation
from silograph.federation.field_specs import SLOTS, FieldSpec, FieldSpecs, places
from silograph.federation.program import Steps
from silograph.graph.block.block import ClientBlock, dense_rows
from silograph.graph.block.extension import extended
from silograph.nn.doors import check_places, dtype_of

SLOT, ROWS = "collected/slot", "collected/x"
LOCAL_GRAPH = (SLOT, ROWS, COUNTS, GENERATED)  # what `local_graph` reads of the state


def collect(fed: Federation, share: float, key: Key) -> None:
    """Let every client fetch the features of a share of its halo.

    Args:
        fed: the federation.
        share: of each client's slots, in [0, 1]; rounded to whole slots.
        key: key of the draw.
    """
    inbox = {"share": Shared(torch.tensor(share, dtype=torch.float64))}
    pull(fed, choose, serve, keep, what=Kind.FEATURES, key=key, inbox=inbox)


def collect_steps(share: float, features: int, key: Key) -> Steps:
    """Return the calls of `collect`."""
    told = {"share": FieldSpec(Shared, (), torch.float64, low=share, high=share)}
    what = Kind.FEATURES
    return pull_steps(
        choose, serve, keep, what=what, key=key, inbox=told, form=rows_of_width(features)
    )


def collected_specs(features: int) -> FieldSpecs:
    """Return what the state holds of fetched rows."""
    return {SLOT: places(SLOTS), ROWS: FieldSpec(Ragged, (features,), rows=f"own/{SLOT}")}


def choose(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Draw slots, without replacement. In: `share`. Out: `slot` (k,) int32."""
    del cfg
    sizes, share = block.halo.off.diff(), inbox["share"].t
    if not bool(((share >= 0) & (share <= 1)).all()):  # so not if it is NaN
        raise ProtocolError(f"expected a share in [0, 1], got {share.flatten()[:4].tolist()}")
    wanted = (share * sizes).round().long()
    client = owners(block.halo.off)
    word = key.uniform(block.halo.key)[:, 0]
    order = torch.argsort(word, stable=True)
    order = order[torch.argsort(client[order], stable=True)]  # by client, then by draw
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - block.halo.off[client]
    slot = (rank < wanted[client]).nonzero()[:, 0]
    own = (slot - block.halo.off[client[slot]]).int()
    field = Ragged(own, offsets(wanted))
    return {**state, SLOT: field}, {"slot": field}


def serve(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Send features of boundary rows. In: `share`, `row` (k,). Out: `rows` (k, F)."""
    del cfg, key
    row = inbox["row"]
    assert isinstance(row, Ragged)  # from `pull`
    wanted = block.halo.boundary[check_places(row, block.halo.boundary_off, "boundary rows")]
    return state, {"rows": Ragged(dense_rows(block, wanted), row.off)}


def keep(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Keep what was fetched. In: `share`, `rows` (k, F). Out: nothing."""
    del cfg, block, key
    rows = inbox["rows"]
    assert isinstance(rows, Ragged)  # from `pull`
    return {**state, ROWS: rows}, {}


def local_graph(block: ClientBlock, state: State) -> ClientBlock:
    """Return what clients train and are judged on: the block, what they have fetched and made up.

    Raises:
        ProtocolError: features that are not those of the slots, or of the generated neighbors.
    """
    return with_generated(_with_fetched(block, state), block, state)


def _with_fetched(block: ClientBlock, state: State) -> ClientBlock:
    """Return the block with the rows that clients have fetched."""
    if ROWS not in state:
        return block
    slot, rows = state[SLOT], state[ROWS]
    assert isinstance(slot, Ragged)  # as `choose` left it
    found = block.memo.get("local graph")
    if isinstance(found, tuple) and found[0] is rows.t:
        known: ClientBlock = found[1]
        return known
    place = check_places(slot, block.halo.off, "halo slots")
    shape, dtype = (len(place), block.num_features), dtype_of(block)
    if rows.t.shape != shape or rows.t.dtype is not dtype:
        raise ProtocolError(
            f"expected features {dtype} {shape} of the slots that were fetched, got {rows.t.dtype} "
            f"{tuple(rows.t.shape)}"
        )
    larger = extended(block, place, slot.off, rows.t)
    block.memo["local graph"] = (rows.t, larger)
    return larger
