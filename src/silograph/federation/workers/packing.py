"""Pickles of values that go between this process and its workers, with arrays outside the pickle.

Pickle runs code of whoever wrote the bytes, so it is for processes of one user only: those that a
simulation starts. Silos of a real federation never use it.
"""

import io
import pickle
import sys
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from types import FunctionType
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
        """Return how a tensor, or a function or class of a user's file, is restored."""
        if type(value) is Tensor:
            return reduce_tensor(value)
        if isinstance(value, type | FunctionType) and value.__module__.endswith(FILE_MODULE):
            if "<locals>" in value.__qualname__:
                raise pickle.PicklingError(f"{value.__qualname__} is made inside a function")
            return _find_in_file, (value.__module__, value.__qualname__)
        return NotImplemented


def reduce_tensor(t: Tensor) -> tuple[Callable[..., Tensor], tuple[np.ndarray]]:
    """Return how pickle restores a tensor: from an array in its memory."""
    return _tensor_of, (t.detach().numpy(),)


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
    return pickle.loads(packed.head, buffers=packed.arrays)


def _find_in_file(module: str, name: str) -> Any:
    """Return a function or class of a user's file; run the file first if needed."""
    if module not in sys.modules:
        run_module_file(module.removesuffix(":"))
    return attrgetter(name)(sys.modules[module])


def _tensor_of(array: np.ndarray) -> Tensor:
    """Return a tensor in memory that torch has allocated.

    Results of matrix products may depend on the alignment of memory, and ops write to some tensors.
    """
    t = torch.empty(array.shape, dtype=_dtype_of(array.dtype))
    t.numpy()[...] = array
    return t


@cache
def _dtype_of(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
