"""Generated neighbors: rows that a client has made up for neighbors that it cannot see.

A client that has some trains and is judged on its own graph with them as further nodes: each has
one edge, to the row that it was made for, no label, and no part in the split. They stay in the
client's state.

State: `generated/count` (n,) int32 of every own row; `generated/x` (k, F) in the order of the rows.

C: clients. n: own rows. k: generated rows. F: features.
"""

import torch

from silograph.core.errors import ProtocolError
from silograph.core.payload import Ragged, State, offsets
from silograph.federation.field_specs import NODES, FieldSpec, FieldSpecs
from silograph.graph.block.block import ClientBlock
from silograph.graph.block.extension import with_neighbors
from silograph.nn.doors import dtype_of

COUNTS, GENERATED = "generated/count", "generated/x"


def generated_specs(features: int, most: int) -> FieldSpecs:
    """Return what the state holds of generated rows, at most `most` for an own row."""
    count = FieldSpec(Ragged, (), torch.int32, rows=NODES, low=0, high=most)
    return {COUNTS: count, GENERATED: FieldSpec(Ragged, (features,))}


def with_generated(graph: ClientBlock, block: ClientBlock, state: State) -> ClientBlock:
    """Return a graph with the generated neighbors of the clients' own rows, if there are any.

    Args:
        graph: what clients train on besides: their own rows, and behind them what they fetched.
        block: their own rows.
        state: of the clients.

    Raises:
        ProtocolError: rows that are not those that were counted.
    """
    if GENERATED not in state:
        return graph
    count, rows = state[COUNTS], state[GENERATED]
    assert isinstance(count, Ragged)  # see `generated_specs`
    assert isinstance(rows, Ragged)
    found = graph.memo.get("generated")
    if isinstance(found, tuple) and found[0] is rows.t:
        known: ClientBlock = found[1]
        return known
    shape, dtype, each = (len(rows.t), block.num_features), dtype_of(block), count.t.long()
    fits = len(each) == len(block.row_key) and bool((each >= 0).all())
    if not fits or not torch.equal(offsets(each)[block.off], rows.off):
        raise ProtocolError("expected as many generated rows as were counted, got others")
    if rows.t.shape != shape or rows.t.dtype is not dtype:
        raise ProtocolError(
            f"expected generated features {dtype} {shape}, got {rows.t.dtype} {tuple(rows.t.shape)}"
        )
    if not len(rows.t):
        return graph
    shift = (graph.off - block.off)[:-1][block.client]
    own = torch.arange(len(each), device=each.device) + shift
    larger = with_neighbors(graph, torch.repeat_interleave(own, each), rows.off, rows.t)
    graph.memo["generated"] = (rows.t, larger)
    return larger
