"""A device that no machine has: its tensors are in main memory, and torch does not know.

Code that forgets to move a tensor works on the CPU and fails on a GPU. It fails here as well: an
operation on a tensor of this device and one of the CPU raises what CUDA would have torch raise.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

NAME = "pretended"
CPU = torch.device("cpu")
aten = torch.ops.aten
TAKES_BOTH = {aten._to_copy.default, aten.copy_.default}
INDEXES = {  # CUDA's tensors can be indexed by those of the CPU
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
}


class Pretended(Tensor):
    """A tensor of the device; what it is made of is `raw`, on the CPU."""

    raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, raw: Tensor) -> "Pretended":
        place: dict[str, Any] = {"dtype": raw.dtype, "device": torch.device(NAME, 0)}
        if raw.layout is torch.strided:
            place |= {"strides": raw.stride(), "storage_offset": raw.storage_offset()}
        self: Pretended = torch.Tensor._make_wrapper_subclass(cls, raw.size(), **place)
        self.raw = raw
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _call(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.raw.tolist()

    def untyped_storage(self) -> Any:
        return self.raw.untyped_storage()

    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        if not force:
            raise TypeError(f"can't convert {NAME} device type tensor to numpy")
        found: np.ndarray[Any, Any] = self.raw.numpy()
        return found

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray[Any, Any]:
        return self.numpy()


class _Watched(TorchDispatchMode):
    """Sees what makes tensors of the device from none."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; to say so to torch's compiler would import it, for seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _call(func, args, kwargs or {})


def _is_named(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _astray(func: Any, args: tuple[Any, ...], there: list[Pretended], here: list[Tensor]) -> bool:
    """Whether tensors with dimensions are on a device where the operation does not take them."""
    if not there or func in TAKES_BOTH:
        return False
    if func not in INDEXES:
        return any(t.dim() > 0 for t in here)
    if not isinstance(args[0], Pretended):
        return True
    return any(t.dim() > 0 and all(t is not place for place in args[1]) for t in here)


def _raw(value: Any) -> Any:
    """What a tensor of the device is made of; of anything else, itself."""
    return value.raw if isinstance(value, Pretended) else value


def _on_cpu(value: Any, there: list[Pretended], here: list[Tensor]) -> Any:
    """What stands for an argument on the CPU; notes the tensors of both devices.

    `torch.utils._pytree` does the same, and took half of the time of these tests.
    """
    if isinstance(value, Pretended):
        there.append(value)
        return value.raw
    if isinstance(value, Tensor):
        here.append(value)
    elif isinstance(value, torch.device):
        return CPU
    elif isinstance(value, list | tuple):
        return type(value)([_on_cpu(part, there, here) for part in value])
    return value


def _on_device(value: Any, known: Mapping[int, Pretended]) -> Any:
    """A result on the device; `known` are tensors by what they are made of."""
    if isinstance(value, Tensor):
        return known[id(value)] if id(value) in known else Pretended(value)
    if isinstance(value, list | tuple):
        return type(value)([_on_device(part, known) for part in value])
    return value


def _call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    there: list[Pretended] = []
    here: list[Tensor] = []
    inner_args = _on_cpu(args, there, here)
    inner_kwargs = {name: _on_cpu(value, there, here) for name, value in kwargs.items()}
    if _astray(func, args, there, here):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{NAME}:0 and cpu! (when calling {func})"
        )
    if func is aten.copy_.default:
        target, source = inner_args[:2]
        target.copy_(source)
        return args[0]
    asked = kwargs.get("device")
    out = func(*inner_args, **inner_kwargs)
    if not (there if asked is None else _is_named(asked)):
        return out
    return _on_device(out, {id(t.raw): t for t in there})  # known: of operations in place


@cache
def register() -> torch.library.Library | None:
    """Tell torch of the device, before a process's first `backward`: it makes queues but once.

    Returns:
        What holds its operations; None where torch is too old to be told (before 2.9).
    """
    tell = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if tell is None:
        return None
    tell(NAME)
    # `torch.utils.checkpoint` and `torch.random.fork_rng` ask every backend, whatever is computed.
    module = getattr(torch, NAME)
    module.get_amp_supported_dtype = list
    module.device_count = lambda: 0  # devices with random states of their own
    module.is_available = lambda: False  # else whoever seeds torch waits for stacks to be written
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda func, *args, **kwargs: _call(func, args, kwargs), "PrivateUse1")
    return library


@contextmanager
def pretended_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Have the device while the block runs; give its name."""
    if register() is None:
        pytest.skip("this torch has no backends that are written in Python")
    make, make_csr = torch.tensor, torch.sparse_csr_tensor

    def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        found = make(data, device=None if _is_named(device) else device, **options)
        return found.to(device) if _is_named(device) else found

    def sparse_csr_tensor(*parts: Any, **options: Any) -> Tensor:
        if not isinstance(parts[0], Pretended):
            return make_csr(*parts, **options)
        pointers, columns, values, *size = (_raw(t) for t in parts)
        return Pretended(make_csr(pointers, columns, values, *size, **options))

    with monkeypatch.context() as patch, _Watched():  # type: ignore[no-untyped-call]
        patch.setattr(torch, "tensor", tensor)
        patch.setattr(torch, "sparse_csr_tensor", sparse_csr_tensor)
        yield NAME
