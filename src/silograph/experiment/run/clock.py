"""The clocks of a run: seconds of training, and the virtual clock of clients' speeds and links."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from silograph.core.client_speeds import parse_links, parse_speeds
from silograph.core.key import Key, hash_texts
from silograph.core.resolved_config import ResolvedConfig
from silograph.federation.virtual_clock import VirtualClock

SPEED, BANDWIDTH = 1e9, 1e6  # of one unit: operations a second, bytes a second


class FirstUse(Protocol):
    """Knows what kernels have cost that were used for the first time in this process.

    Attributes:
        seconds: of compiling them.
        warm_up_seconds: of compiling them or loading them from the cache on disk.
    """

    @property
    def seconds(self) -> float:
        """Seconds of compiling so far."""

    @property
    def warm_up_seconds(self) -> float:
        """Seconds of compiling or loading so far."""


@dataclass(frozen=True)
class NoFirstUse:
    """Of runs that compile nothing."""

    seconds: float = 0.0
    warm_up_seconds: float = 0.0


def watch_first_use(
    kernels: str, tell: Callable[[str], None] = lambda _: None
) -> AbstractContextManager[FirstUse]:
    """Return what measures the first use of kernels while it is entered.

    What torch imports at its first use is imported here, before a clock runs.

    Args:
        kernels: what the run trains with: `compiled` or `torch`.
        tell: told in one line that something is compiled.
    """
    if kernels != "compiled":
        import torch.fx.experimental.symbolic_shapes  # noqa: F401 - by autograd.grad: 500 modules

        return nullcontext(NoFirstUse())
    from silograph.nn.kernels.compile_notice import told_of_compiling  # numba imports slowly

    return told_of_compiling(tell)


@dataclass(frozen=True)
class TrainingClock:
    """Seconds of training, without what only the first run of a process spends on kernels.

    So the seconds of several runs can be compared, whichever of them came first.

    Attributes:
        began: seconds of the monotonic clock at which the run would have begun without breaks.
        first_use: what the use of new kernels has cost since then.
    """

    began: float
    first_use: FirstUse = NoFirstUse()

    def seconds(self) -> float:
        """Return the seconds of training so far."""
        return time.monotonic() - self.began - self.first_use.warm_up_seconds


def clock_of(config: ResolvedConfig, ids: Sequence[str]) -> VirtualClock | None:
    """Return the clock of a run, None where it has none.

    Speeds that are drawn are exp(z) with z standard normal, by seed and name of the client.
    """
    if config.speeds is None or config.links is None:
        return None
    return _clock(config.speeds, config.links, config.seed, tuple(ids))


@lru_cache(maxsize=4)  # asked for in every round
def _clock(speed_text: str, link_text: str, seed: int, ids: tuple[str, ...]) -> VirtualClock:
    given, clients = parse_speeds(speed_text), np.arange(len(ids))
    if given is None:
        u = Key.of(seed).fold("speeds").uniform(hash_texts(ids), 2).numpy()
        speeds = np.exp(np.sqrt(-2 * np.log(1 - u[:, 0])) * np.cos(2 * math.pi * u[:, 1]))
    else:
        speeds = np.array(given)[clients % len(given)]
    links = np.array(parse_links(link_text))
    rate, latency = links[clients % len(links)].T
    return VirtualClock(SPEED * speeds, BANDWIDTH * rate, latency.copy())
