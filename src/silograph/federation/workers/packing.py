"""Values as bytes that cross between this process and its workers: pickle, with arrays apart.

Pickle runs code of whoever wrote the bytes, so it is for processes of one user only: those that a
simulation starts. Silos of a real federation never use it.
"""

import io
import pickle
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from silograph.core.user_module import FILE_MODULE, run_module_file


class Packed(NamedTuple):
    """A value as bytes.

    Attributes:
        head: the pickle, without the contents of arrays.
        arrays: their contents, uint8.
    """

    head: bytes
    arrays: list[np.ndarray]


class TensorPickler(pickle.Pickler):
    """Writes tensors as NumPy arrays, whose contents need not be copied."""

    def reducer_override(self, value: Any) -> Any:
        """Return how a tensor is restored."""
        if type(value) is Tensor:
            return _tensor_of, (value.detach().numpy(),)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    """Reads what `pack` wrote; a user's file is run where a module of it is not there yet."""

    def find_class(self, module: str, name: str) -> Any:
        if module.endswith(FILE_MODULE) and module not in sys.modules:
            run_module_file(module.removesuffix(":"))
        return super().find_class(module, name)


def pack(value: Any, pickler: Callable[..., Any] = TensorPickler) -> Packed:
    """Return a value as bytes; arrays share the memory of its tensors.

    Args:
        value: anything that pickle writes.
        pickler: class that writes it.

    Raises:
        pickle.PicklingError: something that pickle cannot write; also AttributeError or TypeError.
    """
    buffers, stream = list[pickle.PickleBuffer](), io.BytesIO()
    pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    views = [buffer.raw() for buffer in buffers]
    empty = np.empty(0, np.uint8)
    arrays = [np.frombuffer(view, np.uint8) if view.nbytes else empty for view in views]
    return Packed(stream.getvalue(), arrays)


def unpack(packed: Packed) -> Any:
    """Return the value, its tensors in memory of their own."""
    return _Unpickler(io.BytesIO(packed.head), buffers=packed.arrays).load()


def _tensor_of(array: np.ndarray) -> Tensor:
    """Return a tensor in memory that torch has allocated.

    Sums of a library for matrices may depend on where memory begins; and ops write to some tensors.
    """
    t = torch.empty(array.shape, dtype=_dtype_of(array.dtype))
    t.numpy()[...] = array
    return t


@cache
def _dtype_of(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
