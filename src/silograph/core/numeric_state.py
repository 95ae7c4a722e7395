"""The numeric settings that silograph computes with, whatever its caller has set.

A notebook may have set `torch.no_grad`, autocast, a default device or dtype, deterministic
algorithms, a number of threads, or `np.seterr`. All of these change bits or raise errors. Every
public function is decorated with `standard_numerics()`, which sets what training needs and restores
the caller's settings afterwards.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "mtia")
# Where torch may be told to multiply float32 as bfloat16 or TF32, besides
# `torch.set_float32_matmul_precision`, which sets the last two.
PRECISION_SETTINGS: tuple[Any, ...] = (
    torch.backends,
    torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
    torch.backends.cuda.matmul,
)


@dataclass(frozen=True)
class ProcessSettings:
    """Settings of torch that all threads of the process share; the defaults are torch's own.

    Attributes:
        dtype: of new tensors.
        deterministic: whether torch prefers deterministic algorithms, which sum in another order.
        warn_only: whether operations without such an algorithm warn instead of raising.
        detect_anomaly: whether NaN in a gradient is an error.
        matmul_precision: of products of float32.
        backend_precision: the same by `PRECISION_SETTINGS`, where that was set; `none` and `ieee`
            both mean float32.
    """

    dtype: torch.dtype = torch.float32
    deterministic: bool = False
    warn_only: bool = False
    detect_anomaly: bool = False
    matmul_precision: str = "highest"
    backend_precision: tuple[str, ...] = ("none",) * len(PRECISION_SETTINGS)

    @staticmethod
    def read() -> "ProcessSettings":
        """Return the current settings."""
        return ProcessSettings(
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled(),
            torch.get_float32_matmul_precision(),
            tuple(backend.fp32_precision for backend in PRECISION_SETTINGS),
        )

    @property
    def is_standard(self) -> bool:
        """Whether results have the same bits as with the defaults."""
        plain = replace(self, backend_precision=ProcessSettings.backend_precision)
        return plain == ProcessSettings() and {*self.backend_precision} <= {"none", "ieee"}

    def apply(self) -> None:
        """Make these the current settings."""
        torch.set_default_dtype(self.dtype)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        torch.autograd.set_detect_anomaly(self.detect_anomaly)
        torch.set_float32_matmul_precision(self.matmul_precision)
        for backend, value in zip(PRECISION_SETTINGS, self.backend_precision, strict=True):
            backend.fp32_precision = value


class _SharedSettings:
    """Gives the process the standard settings while at least one thread needs them.

    A server and its silos may run in threads of one process. If each thread restored the
    settings from before it, the first to finish would give the caller's settings to the others.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = ProcessSettings()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, the process has the standard settings; the last to leave restores the caller's.

        Yields:
            None.
        """
        with self._lock:
            if self._users == 0:
                self._before = ProcessSettings.read()
                if not self._before.is_standard:
                    ProcessSettings().apply()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0 and not self._before.is_standard:
                    self._before.apply()


_SHARED = _SharedSettings()


@contextmanager
def standard_numerics() -> Iterator[None]:
    """Inside, torch and NumPy have the settings that give the same bits in every process.

    It is a context manager and a decorator; calls may be nested. Gradients are recorded, nothing is
    cast, tensors are float32 on the CPU, torch uses one thread (see `torch_threads`), subnormal
    numbers are kept and floating-point errors warn. Random states are neither read nor changed.

    Yields:
        None.
    """
    with ExitStack() as stack:
        stack.enter_context(_SHARED.in_use())
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        for device in AUTOCAST_DEVICES:
            if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        # Only where it is needed: with a device of its own every call of torch takes longer.
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        if flushes_subnormal_numbers() and torch.set_flush_denormal(False):
            stack.callback(torch.set_flush_denormal, True)
        stack.enter_context(torch_threads(1))
        stack.enter_context(np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"))
        yield


def as_data(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy where autograd could not use it as data.

    A tensor that was made in `torch.inference_mode` cannot be saved for a gradient, and one that
    requires a gradient would get one in training.
    """
    if not tensor.is_inference() and not tensor.requires_grad:
        return tensor
    with torch.inference_mode(mode=False):
        return tensor.detach().clone()


def flushes_subnormal_numbers() -> bool:
    """Return whether this thread takes numbers below the least normal one for 0."""
    with np.errstate(under="ignore"):
        return bool(np.float32(1e-40) * np.float32(1) == 0)


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Use this many torch threads inside the block: part of what makes two runs equal."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
