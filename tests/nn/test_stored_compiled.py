"""Laws of compiled rows that owners send: those of the torch form, and the same work."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from silograph.core.key import Key
from silograph.core.payload import Stacked, offsets
from silograph.core.work import metered
from silograph.exchange.passes import divisible
from silograph.graph.block.block import ClientBlock, Route
from silograph.graph.graph import Graph
from silograph.nn import stored_rows
from silograph.nn.fit import Schedule, Training, features_for
from silograph.nn.optim import Adam
from together import blank_rows, model_of

pytest.importorskip("numba")
from silograph.nn.stored_compiled import compute_first_outputs, pack_weights


@pytest.mark.parametrize("hidden", [6, 16, 48])
@pytest.mark.parametrize("conv", ["sage", "gcn", "graphconv"])
@pytest.mark.parametrize("part", [None, [0, 2]])
def test_rows_of_owners_are_those_of_torch(
    make_graph: Callable[..., Graph],
    cut_block: Callable[..., tuple[ClientBlock, Route]],
    conv: str,
    hidden: int,
    part: list[int] | None,
) -> None:
    """Bits agree where products and sums are fused alike; the work is that of the torch form."""
    block = cut_block(make_graph(60, sparse=True), 4, dtype=torch.float32)[0]
    if part is not None:
        block = block.called(torch.tensor(part))
    shape = replace(model_of(conv, residual=False, layers=2), hidden=hidden)
    model, training = divisible(shape), Training(shape, Adam(0.01), Schedule(1))
    weights = shape.init_weights(Key.of(3), torch.float32)
    held = stored_rows.start_training(model, training, block, weights, None, compact=True)
    for number, field in enumerate(held.values()):  # clients and rows differ
        if field.t.is_floating_point():
            noise = torch.rand(field.t.shape, generator=torch.Generator().manual_seed(number))
            field.t.add_(noise.sub_(0.5).mul_(0.2))
    packed = pack_weights(model, held, fresh=True)
    rows = torch.arange(len(block.row_key))[1::3]
    off = offsets(torch.bincount(block.client[rows], minlength=block.num_clients))
    stored, around = blank_rows(model, block), stored_rows.surroundings(block)
    batch = stored_rows.batch_of_edges(block, around, stored, rows, off, later=False)
    with torch.no_grad(), metered(block.num_clients) as work:
        expected = stored_rows.rows_entering(
            model, stored_rows.weights_of(held), block, features_for(block, True), batch, stored
        )
    with metered(block.num_clients) as compiled_work:
        outputs = compute_first_outputs(model, block, packed, rows, off)
    assert outputs is not None
    torch.testing.assert_close(outputs, expected[1], rtol=1e-5, atol=1e-6)
    assert compiled_work.flops.tolist() == work.flops.tolist()


def test_torch_does_what_kernels_do_not(
    make_graph: Callable[..., Graph], cut_block: Callable[..., tuple[ClientBlock, Route]]
) -> None:
    """Sums of float64 are added up in another order, and dense features multiplied otherwise."""
    for sparse, dtype in ((False, torch.float32), (True, torch.float64)):
        block = cut_block(make_graph(40, sparse=sparse), 2, dtype=dtype)[0]
        shape = model_of("sage", layers=2)
        model, training = divisible(shape), Training(shape, Adam(0.01), Schedule(1))
        weights = shape.init_weights(Key.of(3), dtype)
        held = stored_rows.start_training(model, training, block, weights, None, compact=True)
        packed = pack_weights(model, held, fresh=True)
        assert (
            compute_first_outputs(model, block, packed, torch.arange(2), torch.tensor([0, 2, 2]))
            is None
        )


def test_weights_of_another_width_do_not_reach_the_kernel(
    make_graph: Callable[..., Graph], cut_block: Callable[..., tuple[ClientBlock, Route]]
) -> None:
    block = cut_block(make_graph(40, sparse=True), 2, dtype=torch.float32)[0]
    shape = model_of("sage", layers=2)
    model, training = divisible(shape), Training(shape, Adam(0.01), Schedule(1))
    weights = shape.init_weights(Key.of(3), torch.float32)
    held = stored_rows.start_training(model, training, block, weights, None, compact=True)
    packed = pack_weights(model, held, fresh=True)
    rows, off = torch.arange(2), torch.tensor([0, 2, 2])
    assert compute_first_outputs(model, block, packed, rows, off) is not None
    narrow = {**packed, "weights/flat": Stacked(packed["weights/flat"].t[:, :3].contiguous())}
    assert compute_first_outputs(model, block, narrow, rows, off) is None
