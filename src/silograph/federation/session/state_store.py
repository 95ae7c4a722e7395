"""Where a silo keeps its own state: of the last two rounds, in memory and, if it may, on its disk.

The server never has it. Ops leave states as they are and return new ones, so keeping one costs
nothing until it is written.
"""

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from silograph.core.errors import AbsentError, CheckpointError, ConfigError, mistake
from silograph.core.files import hold_folder, write_atomic
from silograph.core.payload import State
from silograph.federation.checkpoint import (
    Checkpoint,
    CheckpointFolder,
    file_name,
    read_checkpoint,
    state_from,
    state_tensors,
)
from silograph.federation.program import BLANK
from silograph.federation.secure.revealed import RevealedSums
from silograph.federation.secure.row_sets import RowSets

# --- A silo's own folder: for its owner only, and for one process at a time ----------------------


def make_private(folder: Path) -> None:
    """Make a folder that only its owner may enter; one that is there stays as it is."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextmanager
def lock_state_folder(folder: Path) -> Iterator[None]:
    """Lock a folder, creating it if needed; the system releases it when this process dies.

    Raises:
        ConfigError: another process holds it, or it cannot be made.
    """
    try:
        make_private(folder)
        lock = hold_folder(folder)
    except OSError as error:
        raise ConfigError(
            f"expected to write {folder}, got: {error.strerror}",
            **mistake("unwritable-path", folder),
        ) from None
    if lock is None:
        raise ConfigError(
            f"expected one process for the state in {folder}, got another that holds it: stop "
            "it first",
            **mistake("folder-in-use", folder),
        )
    try:
        yield
    finally:
        os.close(lock)


MOST_RECENT = 2  # rounds whose states stay
AGREED = "agreed.json"
REVEALED = "revealed.jsonl"
ROW_SETS = "row_sets.json"


def runs_left(folder: Path) -> list[bytes]:
    """Return the tokens of the runs whose states are in a silo's folder: they are not over."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return [bytes.fromhex(name) for name in names if re.fullmatch("(?:[0-9a-f]{2})+", name)]


def has_agreement(folder: Path, run: bytes) -> bool:
    """Whether a silo's folder has what it agreed to in a run that is not over, by its token."""
    return (folder / run.hex() / AGREED).exists()


class StateStore:
    """States of one run at one silo.

    Args:
        folder: where they are written, one folder a run; None keeps them in memory only.
        data: what names the silo's data: states on the disk go with no others.
    """

    def __init__(self, folder: Path | None = None, data: str = "") -> None:
        self._data = data
        self._folder = None if folder is None else CheckpointFolder(folder, synced=True)
        self._recent: dict[int, State] = {}
        self._states: dict[int, State] = {}
        self._revealed: RevealedSums | None = None

    @property
    def revealed(self) -> RevealedSums:
        """The secure sums that the silo has helped to unmask in this run.

        Raises:
            CheckpointError: the file is damaged.
        """
        if self._revealed is None:
            path = None if self._folder is None else self._run_folder() / REVEALED
            self._revealed = RevealedSums(path)
        return self._revealed

    def row_sets(self) -> RowSets:
        """Return the contributors of the silo's rows in earlier passes of this run.

        Raises:
            CheckpointError: the file is damaged.
        """
        return RowSets(None if self._folder is None else self._run_folder() / ROW_SETS)

    def agreed(self) -> Mapping[str, Any] | None:
        """Return the stored agreement of the silo in this run; None if there is none.

        Raises:
            CheckpointError: the file is damaged.
        """
        if self._folder is None:
            return None
        path = self._folder.path / AGREED
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            if self._folder.rounds:
                raise CheckpointError(
                    f"expected {AGREED} beside the states in {self._folder.path.name}, got none: "
                    "delete that folder to begin the run anew",
                    **mistake("missing-file", path),
                ) from None
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"expected what was agreed in {path}, got: {error}", **mistake("damaged-file", path)
            ) from None
        if not isinstance(facts, dict):
            raise CheckpointError(
                f"expected what was agreed in {path}, got something else",
                **mistake("damaged-file", path),
            )
        return facts

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Store what the silo agrees to, so that a server cannot change it later in the run."""
        if self._folder is not None:
            write_atomic(self._run_folder() / AGREED, json.dumps(facts), private=True)

    def _run_folder(self) -> Path:
        """Return the folder of the run, which only its owner may read."""
        assert self._folder is not None  # asked where there is one
        if not self._folder.path.is_dir():
            make_private(self._folder.path.parent)
            make_private(self._folder.path)
        return self._folder.path

    def remember(self, number: int, state: State) -> None:
        """Keep the state after a round in memory, in case the next round is repeated."""
        self._recent[number] = state
        _drop_old_states(self._recent)

    def keep(self, number: int, state: State, needed: Collection[int] = ()) -> None:
        """Store the state after a round, and drop all but the last two and those `needed`.

        Raises:
            CheckpointError: less room than it takes would be left on the disk.
        """
        self._states[number] = state
        _drop_old_states(self._states, needed)
        if self._folder is not None:
            tensors = state_tensors(state)
            _check_room(self._run_folder(), sum(t.nbytes for t in tensors.values()))
            checkpoint = Checkpoint(number, tensors, {"data": self._data})
            self._folder.write(checkpoint, needed)

    def load(self, number: int) -> State:
        """Return the state after a round.

        Raises:
            AbsentError: it is not there.
            CheckpointError: it is damaged, or of other data.
        """
        if number == BLANK:
            return {}
        for states in (self._recent, self._states):
            if number in states:
                return states[number]
        if self._folder is not None:
            path = self._folder.path / file_name("round", number)
            if path.exists():
                checkpoint = read_checkpoint(path, number)
                if checkpoint.facts.get("data") != self._data:
                    raise CheckpointError("expected the silo's data as they were, got others")
                return state_from(checkpoint.tensors)
        raise AbsentError(
            f"expected the silo's state of round {number}, got none",
            **mistake("missing-checkpoint", None if self._folder is None else self._folder.path),
        )

    def forget_after(self, number: int) -> None:
        """Forget the states of later rounds, which will be repeated."""
        for states in (self._recent, self._states):
            for later in [round_ for round_ in states if round_ > number]:
                del states[later]

    def drop(self) -> None:
        """Forget all: the run is over."""
        self._recent.clear()
        self._states.clear()
        self._revealed = None
        if self._folder is not None:
            shutil.rmtree(self._folder.path, ignore_errors=True)


def _check_room(folder: Path, size: int) -> None:
    """Raise `CheckpointError` where a state would fill the disk: a server chooses its size."""
    free = shutil.disk_usage(folder).free
    if 2 * size > free:
        raise CheckpointError(
            f"expected room for a state of {size:,} bytes and as much again in {folder.name}, got "
            f"{free:,} bytes: make room, or leave the run"
        )


def _drop_old_states(states: dict[int, State], needed_rounds: Collection[int] = ()) -> None:
    for old in set(sorted(states)[:-MOST_RECENT]) - set(needed_rounds):
        del states[old]
