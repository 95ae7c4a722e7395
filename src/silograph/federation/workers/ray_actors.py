"""Workers as actors of a Ray cluster, on this machine or others.

Arrays go to workers through Ray's object store, a copy for each machine. Ray pickles what it sends
and trusts whoever can reach the cluster, so it is for simulations only.
"""

import logging
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from silograph.core.errors import ConfigError, install_command, mistake
from silograph.core.user_module import FILE_MODULE
from silograph.federation.workers.packing import Packed, pack, reduce_tensor
from silograph.federation.workers.processes import LostWorkerError
from silograph.federation.workers.worker import WorkerServer

LOG = logging.getLogger("silograph")
PATIENCE = 30.0  # seconds without an answer, after which waiting for free cores is logged


def connect(address: str | None, cores: int) -> bool:
    """Connect to a Ray cluster, or start one on this machine; return whether that was needed.

    Ray's usage statistics are off, no dashboard is started, and signal handlers stay as they are.

    Args:
        address: of a running cluster, or `auto` to look for one on this machine; None starts one.
        cores: that a cluster on this machine must have at least.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster at the address.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"expected ray for engine=ray, got: {error}: {install_command('ray')}",
            **mistake("missing-package", "ray", "ray"),
        ) from None
    if ray.is_initialized():
        return False
    options: dict[str, Any] = {"address": address or "local"}
    if address is None:
        options |= {"num_cpus": max(cores, len(os.sched_getaffinity(0)))}
        options |= {"include_dashboard": False}
    try:
        with _quiet_ray():
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"expected a Ray cluster at address {address or 'local'}, got: {line}: start one with "
            "ray start --head, or leave address out",
            **mistake("option-value", "address", address),
        ) from None
    return True


@contextmanager
def _quiet_ray() -> Iterator[None]:
    """Switch off what Ray reports, and restore the caller's settings after the block."""
    switches = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    before = {name: os.environ.get(name) for name in switches}
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    os.environ.update(switches)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if is_main:
            for number, handler in handlers.items():
                signal.signal(number, handler)


class RayPool:
    """Actors of a Ray cluster, each with a worker.

    Args:
        size: most workers.
        address: see `connect`.
        threads: cores that each worker takes.
        is_exact: whether fewer are an error; else there are as many as the cluster has cores for.

    Raises:
        ConfigError: there is no cluster, or it has too few cores.
    """

    def __init__(self, size: int, address: str | None, threads: int, *, is_exact: bool) -> None:
        self._environment = dict(os.environ)
        self._is_own = connect(address, size * threads if is_exact else 1)
        import ray

        self._ray: Any = ray
        self._actors: list[Any] = []
        try:
            cores = int(ray.cluster_resources().get("CPU", 0))
            self.size = size if is_exact else max(1, min(size, cores // threads))
            if cores < self.size * threads:
                raise ConfigError(
                    f"workers: expected at most {cores // threads} on a cluster of {cores} cores "
                    f"with threads={threads}, got {size}",
                    **mistake("option-value", "workers", size),
                )
            remote: Any = ray.remote(WorkerServer)
            self._actor = remote.options(
                num_cpus=threads, max_restarts=0, scheduling_strategy="SPREAD"
            )
            self._actors = [self._actor.remote() for _ in range(self.size)]
        except BaseException:
            self.close()
            raise

    def share(self, value: Any) -> Any:
        """Return a reference to a copy of a value in the object store."""
        try:
            return self._ray.put(_pack_with_code(value))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                "expected a run that other processes can read, got "
                f"{' '.join(str(error).split())}: name your code as FILE.py:NAME, or use "
                "engine=local",
                **mistake("conflicting-options", ["engine"]),
            ) from error

    def restart(self, worker: int) -> None:
        """Start a new actor, where there is room."""
        self._actors[worker] = self._actor.remote()

    def submit(self, worker: int, method: str, *arguments: Any) -> Any:
        """Call a method of an actor; reports of other actors go to it directly."""
        return self._actors[worker].handle.remote(method, *arguments)

    def report(self, task: Any) -> Packed:
        """Wait for a task and return its packed report.

        Raises:
            LostWorkerError: the actor has ended, or one whose report it needed.
        """
        ray = self._ray
        is_waiting_said = False
        while True:
            try:
                packed: Packed = ray.get(task, timeout=PATIENCE)
            except ray.exceptions.GetTimeoutError:
                free = ray.available_resources().get("CPU", 0)
                if not is_waiting_said and free < 1 and self._is_pending():
                    LOG.warning("workers wait for free cores of the Ray cluster")
                    is_waiting_said = True
            except ray.exceptions.RayError as error:
                lines = str(error).splitlines() or [type(error).__name__]
                raise LostWorkerError(lines[0]) from None
            else:
                return packed

    def _is_pending(self) -> bool:
        """Whether an actor does not answer yet."""
        answers = [actor.handle.remote("ping") for actor in self._actors]
        ready, _ = self._ray.wait(answers, num_returns=len(answers), timeout=0)
        return len(ready) < len(answers)

    def find_lost(self) -> list[int]:
        """Return the numbers of the actors that have ended."""
        lost = []
        for number, actor in enumerate(self._actors):
            try:
                self._ray.get(actor.handle.remote("ping"))
            except self._ray.exceptions.RayError:
                lost.append(number)
        return lost

    def close(self) -> None:
        """End all actors at once, and the cluster if it was started for them."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []
        if self._is_own:
            with _quiet_ray():
                self._ray.shutdown()
            self._is_own = False
            for name in os.environ.keys() - self._environment.keys():
                del os.environ[name]
            os.environ.update(self._environment)


def _pack_with_code(value: Any) -> Packed:
    """Return a packed value with the code of scripts, notebooks and users' files.

    Other machines need not have the files.
    """
    from ray import cloudpickle

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            if type(value) is Tensor:
                return reduce_tensor(value)
            return super().reducer_override(value)

    modules = [module for name, module in sys.modules.items() if name.endswith(FILE_MODULE)]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return pack(value, Pickler)
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
