"""Laws of passes over stored rows without dropout, which sum rows of slots before the maps."""

from collections.abc import Callable

import pytest
import torch

from silograph.core.key import Key
from silograph.core.payload import offsets
from silograph.core.work import metered
from silograph.graph.block.block import ClientBlock
from silograph.graph.graph import Graph
from silograph.nn.forward import Staged
from silograph.nn.stored_rows import (
    StoredRows,
    batch_of_edges,
    batch_pass,
    rows_entering,
    surroundings,
)
from together import SHARED, blank_rows, cut_of, model_of

MakeGraph = Callable[..., Graph]
KEY = Key.of(5)


def drawn_history(block: ClientBlock, model: Staged) -> StoredRows:
    """Stored rows that are drawn, and known for two slots of three."""
    blank = blank_rows(model, block)
    own = {k: Key.of(k).matrix(*t.shape) for k, t in blank.own.items()}
    halo = {k: Key.of(k + 50).matrix(*t.shape) for k, t in blank.halo.items()}
    return StoredRows(own, halo, torch.arange(len(blank.known)) % 3 > 0)


def some_rows(block: ClientBlock, each: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.cat([torch.arange(int(a), int(a) + each) for a in block.off[:-1]])
    return rows, offsets(torch.full((block.num_clients,), each))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("conv", SHARED)
def test_sums_before_maps_are_sums_of_maps(
    make_graph: MakeGraph, conv: str, *, stacked: bool
) -> None:
    """With a key each row is mapped, as dropout needs it; at rate 0 the results are the same."""
    block, _, _ = cut_of(make_graph(60), 3, "random")
    model = model_of(conv, dropout=0.0)
    weights = model.init_weights(Key.of(2), torch.float64)
    if stacked:
        weights = {k: torch.stack([w, 2 * w, w - 1]) for k, w in weights.items()}
    stored, (rows, off) = drawn_history(block, model), some_rows(block, 5)
    batch = batch_of_edges(block, surroundings(block), stored, rows, off)
    assert len(batch.later.slots)
    found, entered = batch_pass(model, weights, block, block.x, batch, stored, None)
    each, others = batch_pass(model, weights, block, block.x, batch, stored, KEY)
    torch.testing.assert_close(found, each, rtol=0, atol=1e-10)
    for number, x in others.items():
        torch.testing.assert_close(entered[number], x, rtol=0, atol=1e-10)


def test_work_of_a_pass_is_its_closed_form(make_graph: MakeGraph) -> None:
    block, _, _ = cut_of(make_graph(60), 3, "random")
    model = model_of("sage", dropout=0.0)
    weights = model.init_weights(Key.of(2), torch.float64)
    stored, (rows, off) = drawn_history(block, model), some_rows(block, 5)
    batch = batch_of_edges(block, surroundings(block), stored, rows, off)
    with torch.no_grad(), metered(block.num_clients) as meter:
        batch_pass(model, weights, block, block.x, batch, stored, None)
    b, total = len(rows), 0
    for number, stage in enumerate(model.stages):
        heard = batch.later if number else batch.first
        near, far = (int((heard.adj.indices >= b + len(heard.rows)).eq(on).sum()) for on in (0, 1))
        wide, outer = 2 * stage.inputs * stage.outputs, stage.outputs
        total += wide * (b + len(heard.rows)) + 2 * outer * near  # own rows
        total += (2 * stage.inputs * far + wide * b + outer * b) * (number > 0)  # slots
        total += outer * b + wide * b + outer * b  # the scale, the root
        total += outer * b + outer * b * (number < 2)  # bias, ReLU
    assert float(meter.flops.sum()) == total


@pytest.mark.parametrize("conv", ["sage", "gcn", "appnp"])
def test_who_sends_in_later_stages_matters_not_to_the_only_stored_one(
    make_graph: MakeGraph, conv: str
) -> None:
    """Owners of models with one stored stage answer from their own graph's edges alone."""
    block, _, _ = cut_of(make_graph(60), 3, "random")
    model = model_of(conv, layers=2, hops=1)
    weights = model.init_weights(Key.of(2), torch.float64)
    stored, (rows, off) = drawn_history(block, model), some_rows(block, 5)
    found = [
        rows_entering(
            model,
            weights,
            block,
            block.x,
            batch_of_edges(block, surroundings(block), stored, rows, off, later=later),
            stored,
        )
        for later in (True, False)
    ]
    assert len(found[0]) == 1
    assert all(torch.equal(x, found[1][number]) for number, x in found[0].items())
