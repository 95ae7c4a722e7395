"""A block as the arrays that the compiled kernels read, worked out once for each convolution."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from silograph.core.payload import offsets
from silograph.graph.block.block import ClientBlock
from silograph.nn.conv import Conv
from silograph.nn.forward import Staged
from silograph.nn.kernels import arrays


@dataclass(frozen=True, eq=False)
class BlockArrays:
    """A block as the kernels want it; of a part of a block, the arrays are those of the whole."""

    rows: arrays.RowArrays
    inputs: arrays.InputArrays  # columns: used rows of the client
    features: np.ndarray  # feature of every sparse entry; empty if dense
    called: arrays.CalledArrays  # the clients of the block, which may be a part of the arrays

    def take(self, positions: Tensor, off: Tensor) -> "BlockArrays":
        """Return the same for calls to the clients at `positions` (k,), who have rows `off`."""
        used = torch.from_numpy(self.called.used_off).diff()[positions]
        position = torch.from_numpy(self.called.position)[positions]
        called = arrays.CalledArrays(
            contiguous(position), contiguous(off, np.int64), offsets(used).numpy()
        )
        return replace(self, called=called)


def prepared(model: Staged, block: ClientBlock, *, compact: bool) -> BlockArrays:
    """Return the block's arrays, worked out once for each convolution."""
    name = ("kernels", conv_of(model), compact)
    if name not in block.memo and block.source is not None:
        whole, positions = block.source
        block.memo[name] = prepared(model, whole, compact=compact).take(positions, block.off)
    if name not in block.memo:
        rows = _rows(model, block)
        inputs, features = _inputs(block, compact=compact)
        position = np.arange(block.num_clients)
        called = arrays.CalledArrays(position, rows.off, inputs.used_off)
        block.memo[name] = BlockArrays(rows, inputs, features, called)
    found = block.memo[name]
    assert isinstance(found, BlockArrays)
    return found


def conv_of(model: Staged) -> Conv:
    """Return the convolution of the layers that sum over neighbors, if there are any."""
    return next((stage.conv for stage in model.stages if stage.conv.sums), model.stages[0].conv)


def _rows(model: Staged, block: ClientBlock) -> arrays.RowArrays:
    conv, adj, values = conv_of(model), block.adj, block.adj.values
    assert values is not None  # blocks carry values of the run's dtype
    scales = conv.scales
    assert scales is not None  # of what has a kernel
    degree = adj.weighted_degree[:, None]
    one = torch.ones_like(degree)
    pre, post = scales.before(degree), scales.after(degree)
    pre, post = (one if scale is None else scale for scale in (pre, post))
    neighbor = adj.indices.long()
    train = block.split.train.nonzero()[:, 0]
    first = block.off[block.client]
    own = scales.itself(degree)
    return arrays.RowArrays(
        off=contiguous(block.off, np.int64),
        row_key=contiguous(block.row_key, np.int64).view(np.uint64),
        ptr=contiguous(adj.indptr * conv.sums, np.int64),
        col=contiguous(neighbor - first[adj.row], np.int32),
        value=contiguous((post[adj.row] * pre[neighbor])[:, 0] * values),
        back=contiguous((post[neighbor] * pre[adj.row])[:, 0] * values),
        own=contiguous((torch.zeros_like(one) if own is None else own)[:, 0]),
        train=contiguous(train - first[train], np.int64),
        train_off=contiguous(offsets(block.num_train), np.int64),
        y=contiguous(block.y if block.y.dim() == 2 else block.y[:, None], np.int64),
    )


def _inputs(block: ClientBlock, *, compact: bool) -> tuple[arrays.InputArrays, np.ndarray]:
    """Return features; `compact`: weights of a client are its used rows, else all F."""
    clients, width = block.num_clients, block.num_features
    if isinstance(block.x, Tensor) or not compact:
        used, off = torch.arange(width).repeat(clients), torch.arange(clients + 1) * width
    else:
        used, off = block.x.used.feature, block.x.used.off
    numbers = {"used_off": contiguous(off, np.int64), "used": contiguous(used, np.int64)}
    if isinstance(block.x, Tensor):
        dense = contiguous(block.x)
        ptr, col, value = np.empty(0, np.int64), np.empty(0, np.int32), dense.reshape(-1)[:0]
        return arrays.InputArrays(dense, ptr, col, value, ptr, col, value, **numbers), col
    csr = block.x.csr
    columns = block.x.used.csr if compact else block.x.stacked
    back, first = columns.transposed, block.off[block.client]
    assert csr.values is not None  # features carry values
    assert back.values is not None
    inputs = arrays.InputArrays(
        dense=np.empty((0, 0), csr.values.numpy().dtype),
        ptr=contiguous(csr.indptr, np.int64),
        col=contiguous(columns.indices.long() - off[block.client[csr.row]], np.int32),
        value=contiguous(csr.values),
        t_ptr=contiguous(back.indptr, np.int64),
        t_row=contiguous(back.indices.long() - first[back.indices.long()], np.int32),
        t_value=contiguous(back.values),
        **numbers,
    )
    return inputs, contiguous(csr.indices, np.int32)


def contiguous(t: Tensor, dtype: "np.typing.DTypeLike | None" = None) -> np.ndarray:
    """Return a contiguous array of a fixed dtype: every other one would be compiled anew."""
    return np.ascontiguousarray(t.numpy(), dtype=dtype)
