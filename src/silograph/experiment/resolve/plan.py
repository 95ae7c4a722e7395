"""How a run is computed: which kernels, and how many clients at once.

Results do not depend on it beyond rounding. The choice is written into the result's config; a run
that is resumed where another choice would be made is refused.
"""

from dataclasses import replace

import torch

from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError
from silograph.core.resolved_config import ResolvedConfig
from silograph.graph.block.block import ClientBlock, SparseRows
from silograph.nn.backends import BACKENDS, COMPILED, TORCH, Backend, why_not_compiled
from silograph.nn.fit import Training

# Bytes of the weights of a block's clients, with gradients and moments where torch holds them.
# Measured in decision 006: smaller blocks pay for Python, larger ones leave the cache.
BLOCK_BYTES = 2**26
# On other devices every block starts all operations once more, and caches matter less.
DEVICE_BLOCK_BYTES = 2**30


def choose_backend(config: RunConfig, training: Training, device: torch.device) -> Backend:
    """Return the backend of a run: the fastest that can do it, or the one that is named.

    Raises:
        ConfigError: compiled ones were asked for and cannot be used, or none can train.
    """
    if (reason := TORCH.why_not(training, device)) is not None:
        raise ConfigError(f"expected a model that the method can train, got: {reason}")
    if config.kernels != "auto":
        backend = BACKENDS[config.kernels]
        reason = backend.why_not(training, device)
        if reason is not None:
            raise ConfigError(
                f"expected a run for {backend.name} kernels, got: {reason}; use kernels=torch"
            )
        return backend
    return next(b for b in BACKENDS.values() if b.why_not(training, device) is None)


def explain_torch_kernels(
    config: RunConfig, training: Training, device: torch.device
) -> str | None:
    """Return why torch computes where compiled kernels would be faster, and what to do about it.

    None where kernels are compiled, where torch was asked for, and on other devices than a CPU.
    """
    if config.kernels != "auto" or device.type != "cpu":
        return None
    reason = COMPILED.why_not(training, device)
    if reason is None:
        return None
    line = f"torch kernels, which are slower than compiled ones: {' '.join(reason.split())}"
    if why_not_compiled(training) is None:
        return line  # what this machine lacks; the reason says how to mend it
    return f"{line}; docs/speed.md lists what is compiled, and kernels=torch drops this line"


def client_bytes(
    training: Training, block: ClientBlock, backend: Backend, itemsize: int, *, compact: bool
) -> int:
    """Return the bytes of one client's weights in training, on the mean over clients."""
    model = training.model
    maps, total = model.first_maps, 0
    for name, shape in model.weight_shapes.items():
        size = torch.Size(shape).numel()
        if name in maps and compact and isinstance(block.x, SparseRows):
            size = len(block.x.used.feature) * shape[1] // block.num_clients
        total += size
    return total * itemsize * backend.copies(training)


def choose_block_size(
    training: Training, block: ClientBlock, backend: Backend, device: torch.device, *, keep: bool
) -> int:
    """Return how many clients are computed at once.

    Args:
        training: how they train.
        block: all clients.
        backend: what computes.
        device: that computes.
        keep: whether optimizers are kept; then no weight is left out.
    """
    if training.model.one_by_one:
        return 1  # clients are computed one after the other
    assert block.adj.values is not None  # blocks carry values of the run's dtype
    itemsize = block.adj.values.element_size()
    needed = client_bytes(training, block, backend, itemsize, compact=training.alike and not keep)
    room = BLOCK_BYTES if device.type == "cpu" else DEVICE_BLOCK_BYTES
    most = max(1, room // max(needed, 1))
    blocks = -(-block.num_clients // most)
    return -(-block.num_clients // blocks)  # blocks of one size


def with_block_size(
    config: ResolvedConfig, training: Training, block: ClientBlock
) -> ResolvedConfig:
    """Return the config with the number of clients that are computed at once."""
    if config.block_size is not None:
        return config
    backend = BACKENDS[config.kernels]
    device, keep = torch.device(config.device), config.keep_optimizer
    size = choose_block_size(training, block, backend, device, keep=keep)
    return replace(config, block_size=size)
