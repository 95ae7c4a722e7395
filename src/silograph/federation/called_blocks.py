"""Blocks of the clients that are called, kept for calls to the same clients."""

from collections import OrderedDict

from torch import Tensor

from silograph.graph.block.block import ClientBlock


class CalledBlocks:
    """Takes blocks of some clients from a block, and keeps the latest.

    Methods call the same clients several times in a round, and some selectors call them in turn.
    What is kept has at most as many clients as the block itself, so it takes at most its memory
    once more.

    Args:
        block: all clients.
    """

    def __init__(self, block: ClientBlock) -> None:
        self.all = block
        self._kept: OrderedDict[tuple[int, ...], ClientBlock] = OrderedDict()

    def take(self, positions: Tensor) -> ClientBlock:
        """Return the block of the clients at `positions` (k,) int64, ascending."""
        if len(positions) == self.all.num_clients:
            return self.all
        name = tuple(positions.tolist())
        if name not in self._kept:
            self._kept[name] = self.all.called(positions)
        self._kept.move_to_end(name)
        while sum(map(len, self._kept)) > self.all.num_clients:
            self._kept.popitem(last=False)
        return self._kept[name]
