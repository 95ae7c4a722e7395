"""Laws of batches that are drawn together: the draws of each batch by itself."""

from collections.abc import Callable

import pytest
import torch

from silograph.core.key import Key
from silograph.core.payload import offsets
from silograph.graph.graph import Graph
from silograph.nn.mini_batches import FULL, Fanout
from silograph.nn.stored_batches import BatchRows, draw_batches
from silograph.nn.stored_rows import drawn_around, surroundings
from together import cut_of


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("halo", [True, False])
def test_batches_draw_together_what_each_draws_alone(
    make_graph: Callable[..., Graph], count: int, halo: bool
) -> None:
    block, _, _ = cut_of(make_graph(80), 4, "random")
    alone, around = surroundings(block, halo=False), surroundings(block, halo=halo)
    keys = tuple(Key.of(9).fold("batch", number) for number in range(3))
    # Batch j has every third row of a client from j on, but the last client has none in batch 1.
    rows = torch.arange(len(block.row_key))
    parts = [rows[rows % 3 == j] for j in range(3)]
    parts[1] = parts[1][block.client[parts[1]] < 3]
    runs = [torch.bincount(block.client[part], minlength=4) for part in parts]
    off, whole = offsets(torch.cat(runs)), torch.cat(parts)
    together = BatchRows.of(whole, off, torch.arange(len(whole)), whole, len(keys))
    drawn = draw_batches((alone, around), together, count, keys)
    sampler, first, slots = Fanout((count,)) if count else FULL, 0, []
    for graph, edges in ((alone, drawn.alone), (around, drawn.around)):
        first = 0
        for part, run, key in zip(parts, runs, keys, strict=True):
            expected = drawn_around(graph, part, offsets(run), sampler, key)
            is_in = (edges.position >= first) & (edges.position < first + len(part))
            assert (edges.position[is_in] - first).tolist() == expected.position.tolist()
            assert edges.node[is_in].tolist() == expected.neighbor.tolist()
            assert torch.equal(torch.from_numpy(edges.share[is_in]), expected.share)
            slot = graph.slot[expected.neighbor]
            slots.append(slot[slot >= 0].unique())
            first += len(part)
    assert sorted(set(drawn.slots(range(1)).tolist())) == slots[3].tolist()
    assert sorted(set(drawn.slots(range(3)).tolist())) == torch.cat(slots[3:]).unique().tolist()
    assert drawn.find_range(keys[1], 2, whole) == range(1, 3)
    assert drawn.find_range(keys[1], 3, whole) is None
    assert drawn.find_range(Key.of(1), 1, whole) is None
    assert drawn.find_range(keys[0], 3, whole + 1) is None
    # Some of the batches are those that are drawn without the others.
    last = BatchRows.of(
        torch.cat(parts[1:]),
        offsets(torch.cat(runs[1:])),
        torch.arange(len(whole))[len(parts[0]) :],
        whole,
        2,
    )
    expected_part = draw_batches((alone, around), last, count, keys[1:])
    selected = drawn.select(range(1, 3))
    assert selected.keys == expected_part.keys
    assert (selected.around is selected.alone) == (expected_part.around is expected_part.alone)
    for of in ("rows", "alone", "around"):
        for name, t in vars(getattr(selected, of)).items():
            assert t.tolist() == getattr(getattr(expected_part, of), name).tolist(), (of, name)
    assert selected.slot.tolist() == expected_part.slot.tolist()
