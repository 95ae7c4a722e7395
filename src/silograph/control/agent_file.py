"""An agent in a file: tensors in safetensors, read as a stranger's."""

from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from silograph.core.errors import ConfigError
from silograph.core.files import check_regular, write_atomic
from silograph.core.text import counted

FORMAT = {"silograph_agent": "1"}
MEND = "give the file agent.safetensors that silograph train-agent wrote"
LARGEST = 1e12  # so that products of its numbers are finite in float32, too
MOST_ROUNDS = 2**31
ACTION = "replay/action"  # (N, A)


def write_agent(path: Path, agent: Mapping[str, Tensor]) -> None:
    """Write an agent, whole or not at all."""
    tensors = {name: t.contiguous() for name, t in agent.items()}
    write_atomic(path, safetensors.torch.save(tensors, FORMAT))


def read_agent(
    path: str | Path, like: Mapping[str, Tensor], clients: int = 0, by_client: int = 0
) -> dict[str, Tensor]:
    """Return the agent of a file.

    Args:
        path: of the file.
        like: an agent with the names, shapes and dtypes that it must have.
        clients: of the run.
        by_client: values that an action has for each of them.

    Raises:
        ConfigError: it cannot be read, or it is no agent of such knobs and clients.
    """
    if Path(path).is_dir():
        raise ConfigError(f"expected an agent in {path}, got a folder: {MEND}")
    check_regular(path)
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}) != FORMAT:
                raise ConfigError(f"expected an agent in {path}, got another file: {MEND}")
            names = file.keys()
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
            wanted = {name: tuple(t.shape) for name, t in like.items()}
            if shapes != wanted:  # nothing is read that is larger than it may be
                had = _clients_of(shapes, wanted, clients, by_client)
                raise ConfigError(_misfit(path, shapes, wanted, had))
            found = {name: file.get_tensor(name) for name in wanted}
    except FileNotFoundError:
        raise ConfigError(f"expected an agent in {path}, got no such file: {MEND}") from None
    except SafetensorError as error:
        raise ConfigError(f"expected an agent in {path}, got: {error}: {MEND}") from None
    except OSError as error:
        raise ConfigError(f"expected an agent in {path}, got: {error}") from None
    for name, t in found.items():
        if t.dtype is not like[name].dtype:
            raise ConfigError(
                f"expected {name} as {like[name].dtype} in the agent {path}, got {t.dtype}"
            )
        if not bool(torch.isfinite(t).all()):
            raise ConfigError(f"expected finite numbers in the agent {path}, got others in {name}")
        if t.is_floating_point() and float(t.abs().max()) > LARGEST:
            raise ConfigError(f"expected numbers up to {LARGEST:g} in the agent {path}, got {name}")
    if not 0 <= int(found["rounds"]) < MOST_ROUNDS:
        raise ConfigError(
            f"expected rounds from 0 to {MOST_ROUNDS - 1} in the agent {path}, got "
            f"{int(found['rounds'])}"
        )
    return found


def _misfit(
    path: str | Path,
    found: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, tuple[int, ...]],
    clients: str,
) -> str:
    odd = min(n for n in found.keys() | wanted.keys() if found.get(n) != wanted.get(n))
    return (
        f"expected {odd[:60]} of shape {wanted.get(odd)} in the agent {path}, got "
        f"{found.get(odd)}: it was trained for other knobs, or {clients}"
    )


def _clients_of(
    found: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, tuple[int, ...]],
    clients: int,
    by_client: int,
) -> str:
    """Return that an agent had other clients, and how many where that can be told."""
    ours, theirs = wanted.get(ACTION, ()), found.get(ACTION, ())
    if len(ours) != len(theirs) or len(ours) != 2 or by_client < 1 or ours == theirs:
        return "another number of clients"
    more, odd = divmod(theirs[1] - ours[1], by_client)
    there = clients + more
    if odd or there < 1:
        return "another number of clients"
    return f"for {counted(there, 'client')}, where this run has {clients}"
