"""Checkpoints: a run's tensors and facts after a round, in one file, of which two are kept.

A file is written under another name and renamed, so it is there whole or not at all, whenever the
process dies; where it is synced, also after a power failure. What time or disks do to it afterwards
shows in its checksum: then the file of the checkpoint before is used.

    magic "SGC1" · CRC-32 u32 of all that follows · length of the facts u32 · facts (JSON) ·
    tensors (safetensors), of which those that the fact `alike` names are packed (`packed`)
"""

import json
import os
import re
import struct
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.numpy
import torch
from safetensors import SafetensorError
from torch import Tensor

from silograph.core.errors import CheckpointError, mistake, read_mistake
from silograph.core.files import check_regular, replacing, sync_folder
from silograph.core.payload import Patched, Ragged, Stacked, State, StateField, patched_problem

# --- Rows that many clients have alike are in a checkpoint once ----------------------------------
#
# A client that has no node with some feature never changes the weights of that feature, and its
# optimizer's moments of them stay what everybody's are. With many clients most rows of a first
# layer are such rows. They are found by comparing bits, so nothing needs to know why they are
# alike, and what is read is what was written bit for bit.
#
# C: clients. R: rows of a client.


LEAST = 2**20  # bytes of a tensor that is worth looking at
GAIN = 0.25  # share of rows that must be alike
# Who reads a file makes at most so many bytes of each of its own: one client in 16 stays whole.
MOST_TIMES = 16
KEY = 16  # words of a row, spread over it, by whose sum the most common one is found
PARTS = ("alike", "common", "own")


def packed(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Return tensors with alike rows once, and the names of those that are packed.

    A packed tensor (C, R, ...) is replaced by `NAME/common` (R, ...), the most common row of each
    number; `NAME/alike` (C, R) bool, who has it; and `NAME/own` (n, ...), all other rows in order.

    Args:
        tensors: by name, contiguous and on the CPU.
    """
    stored: dict[str, Tensor] = {}
    names = []
    for name, t in tensors.items():
        alike = _find_alike_rows(t) if t.dim() > 2 and len(t) > 1 and t.nbytes >= LEAST else None
        if alike is None:
            stored[name] = t
            continue
        number, common = alike
        parts = (common, t[number, torch.arange(t.shape[1])], t[~common])
        stored |= {f"{name}/{part}": p for part, p in zip(PARTS, parts, strict=True)}
        names.append(name)
    return stored, names


def unpacked(tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Return the tensors from which `packed` made these.

    Raises:
        ValueError: parts that are missing, do not fit, or say more than `MOST_TIMES` of themselves.
        TypeError: names that are none.
    """
    whole = dict(tensors)
    for name in names:
        try:
            alike, common, own = (whole.pop(f"{name}/{part}") for part in PARTS)
        except KeyError as error:
            raise ValueError(f"rows of {error} are missing") from None
        _check_parts(name, alike, common, own)
        t = common.expand(len(alike), *common.shape).clone()
        t[~alike] = own
        whole[name] = t
    return whole


def _find_alike_rows(t: Tensor) -> tuple[Tensor, Tensor] | None:
    """Find for each row number the most common row among the clients.

    Returns:
        (R,) int64, one client that has it, and (C, R) bool, all clients that have it; None where
        so few rows are alike that packing does not pay.
    """
    bits = t.flatten(2).view(torch.uint8)
    if bits.shape[2] % 4:
        return None
    words = bits.view(torch.int32)
    some = words[:, :, :: -(-words.shape[2] // KEY)].long()
    keys = (some * (2 * torch.arange(some.shape[2]) + 1)).sum(2)
    common, number = keys.mode(0)
    if (keys == common).float().mean() < GAIN:
        return None
    alike = (words == words[number, torch.arange(t.shape[1])]).all(2)
    alike[: len(t) // MOST_TIMES + 1] = False
    return None if alike.float().mean() < GAIN else (number, alike)


def _check_parts(name: str, alike: Tensor, common: Tensor, own: Tensor) -> None:
    """Raise `ValueError` for parts that do not fit each other."""
    fits = (
        alike.dtype is torch.bool
        and alike.dim() == 2
        and common.dim() > 1
        and common.dtype is own.dtype
        and alike.shape[1] == len(common)
        and common.shape[1:] == own.shape[1:]
        and int((~alike).sum()) == len(own)
    )
    if not fits or alike.numel() > MOST_TIMES * len(own):
        raise ValueError(f"rows of {name!r} do not fit")


MAGIC = b"SGC1"
HEAD = struct.Struct("<4sII")
STATES = "states"  # begins names of files with clients' states, see `federation.state_files`
NAME = re.compile(r"(round|best|states)-(\d{9,})(?:-\d{6,})?\.checkpoint")
WHOLE, PARTIAL = ".checkpoint", ".partial"  # suffixes: of a file, and while it is written
NUM_CHECKPOINTS = 2  # checkpoints of each sort
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RecursionError, SafetensorError)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The state of a run after a round.

    Attributes:
        round: the round that was over.
        tensors: by name, in an order that a file keeps; on the CPU.
        facts: plain values.
    """

    round: int
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]


def to_bytes(checkpoint: Checkpoint) -> list[bytes]:
    """Return the parts of a checkpoint's file."""
    whole = {name: t.detach().cpu().contiguous() for name, t in checkpoint.tensors.items()}
    tensors, alike = packed(whole)
    all_facts = {
        **checkpoint.facts,
        "round": checkpoint.round,
        "names": list(whole),  # safetensors has an order of its own, another one at each reading
        **({"alike": alike} if alike else {}),
    }
    facts = json.dumps(all_facts).encode()
    arrays = {name: t.numpy() for name, t in tensors.items()}
    saved = safetensors.numpy.save(arrays)
    length = struct.pack("<I", len(facts))
    crc = zlib.crc32(saved, zlib.crc32(facts, zlib.crc32(length)))
    return [MAGIC + struct.pack("<I", crc) + length, facts, saved]


def from_bytes(data: bytes) -> Checkpoint:
    """Return the checkpoint of a file's bytes.

    Raises:
        CheckpointError: anything but what `to_bytes` made.
    """
    if len(data) < HEAD.size:
        raise CheckpointError(f"expected a checkpoint, got {len(data)} bytes")
    magic, crc, length = HEAD.unpack(data[: HEAD.size])
    if magic != MAGIC:
        raise CheckpointError(f"expected a checkpoint that starts with {MAGIC!r}, got {magic!r}")
    if zlib.crc32(memoryview(data)[HEAD.size - 4 :]) != crc:
        raise CheckpointError(
            "expected a checkpoint that agrees with its checksum, got a damaged one"
        )
    try:
        facts = json.loads(data[HEAD.size : HEAD.size + length])
        json.dumps(facts, ensure_ascii=False).encode()  # refuses half a surrogate pair
        arrays = safetensors.numpy.load(data[HEAD.size + length :])
        number = int(facts.pop("round"))
        parts = {name: torch.from_numpy(a) for name, a in arrays.items()}
        tensors = _in_order(unpacked(parts, facts.pop("alike", ())), facts.pop("names", None))
    except UNREADABLE as error:
        raise CheckpointError(f"expected facts and tensors in a checkpoint, got: {error}") from None
    return Checkpoint(number, tensors, facts)


def _in_order(tensors: Mapping[str, Tensor], names: Any) -> dict[str, Tensor]:
    """Return tensors in the order in which they were written; earlier versions wrote none.

    Raises:
        ValueError: these are names of others.
    """
    if names is None:
        return dict(sorted(tensors.items()))
    if not isinstance(names, list) or len(names) != len(tensors) or {*names} != tensors.keys():
        raise ValueError("names of other tensors")
    return {name: tensors[name] for name in names}


def read_checkpoint(path: Path, number: int) -> Checkpoint:
    """Return the checkpoint of a round from its file.

    Raises:
        CheckpointError: names the file, which is missing, damaged or of another round.
    """
    check_regular(path)
    try:
        checkpoint = from_bytes(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"expected {path.name}, got: {error.strerror}", **read_mistake(error, path)
        ) from None
    except CheckpointError as error:
        raise CheckpointError(f"{path.name}: {error}", **mistake("damaged-file", path)) from None
    if checkpoint.round != number:
        raise CheckpointError(
            f"{path.name}: expected round {number}, got {checkpoint.round}",
            **mistake("damaged-file", path),
        )
    return checkpoint


def state_tensors(state: State) -> dict[str, Tensor]:
    """Return the tensors of a state: `NAME/t`, of runs of rows `NAME/off`, and what else it has."""
    return {f"{name}/{role}": t for name, field in state.items() for role, t in vars(field).items()}


def state_from(tensors: Mapping[str, Tensor]) -> State:
    """Return the state of such tensors.

    Raises:
        CheckpointError: offsets that are not those of the rows beside them, or other parts that do
            not fit each other.
    """
    state: dict[str, StateField] = {}
    for key, t in tensors.items():
        name, _, role = key.rpartition("/")
        if role != "t":
            continue
        off, base = tensors.get(f"{name}/off"), tensors.get(f"{name}/base")
        if off is not None and not _are_offsets(off, t):
            raise CheckpointError(
                f"expected ascending offsets of all rows of {name!r}, got others: the "
                "checkpoint is damaged"
            )
        if off is None:
            state[name] = Stacked(t)
        elif base is None:
            state[name] = Ragged(t, off)
        else:
            which, index = (tensors.get(f"{name}/{part}", off[:0]) for part in ("which", "index"))
            patched = Patched(base, which, t, index, off)
            if problem := patched_problem(patched, len(off) - 1):
                raise CheckpointError(f"expected {problem} for {name!r}: the checkpoint is damaged")
            state[name] = patched
    return state


def _are_offsets(off: Tensor, t: Tensor) -> bool:
    """Whether offsets are those of runs of the rows of a tensor."""
    if off.dtype is not torch.int64 or off.dim() != 1 or len(off) < 1 or t.dim() < 1:
        return False
    return int(off[0]) == 0 and int(off[-1]) == len(t) and bool((off.diff() >= 0).all())


def file_name(what: str, number: int) -> str:
    """Return the name of a checkpoint's file; sorting names sorts rounds."""
    return f"{what}-{number:09d}{WHOLE}"


def _round_of(name: str) -> int:
    """Return the round in the name of a file of `_names_by_sort`."""
    match = NAME.fullmatch(name)
    assert match is not None
    return int(match[2])


class CheckpointFolder:
    """The checkpoints of one run.

    Args:
        path: the folder.
        synced: whether what is written is on the disk before the next step, so that it outlives a
            power failure. Servers and silos need that: they can only go back together.
    """

    def __init__(self, path: Path, *, synced: bool = False) -> None:
        self.path = path
        self.synced = synced
        self._written_best_round: int | None = None  # whose weights this process has written

    def write(self, checkpoint: Checkpoint, needed_rounds: Collection[int] = ()) -> None:
        """Write a checkpoint whole, then drop all but it, the one before and `needed_rounds`.

        Later ones go, too: they are of rounds from before the run was reset to an earlier one.
        """
        self._write("round", checkpoint, {file_name("round", number) for number in needed_rounds})

    def make(self) -> Path:
        """Make the folder, if it is not there, and return its path."""
        if not self.path.is_dir():
            self.path.mkdir()
            if self.synced:
                sync_folder(self.path.parent)
        return self.path

    @property
    def rounds(self) -> list[int]:
        """The rounds that there are checkpoints of."""
        return [_round_of(name) for name in self._names_by_sort()["round"]]

    def keep_best(self, number: int, weights: Mapping[str, Tensor]) -> None:
        """Write the weights of the best round, once: checkpoints after it need not repeat them.

        Two are kept: the two latest checkpoints know at most two best rounds.
        """
        if self._written_best_round != number:
            self._write("best", Checkpoint(number, weights, {}))
            self._written_best_round = number

    def best(self, number: int) -> Mapping[str, Tensor]:
        """Return the weights that `keep_best` wrote.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        return read_checkpoint(self.path / file_name("best", number), number).tensors

    def _write(self, what: str, checkpoint: Checkpoint, needed_names: Collection[str] = ()) -> None:
        target = self.make() / file_name(what, checkpoint.round)
        with replacing(target, target.with_suffix(PARTIAL), synced=self.synced) as file:
            for part in to_bytes(checkpoint):
                file.write(part)
        by_sort = self._names_by_sort()
        names = by_sort[what]
        later = names.index(target.name) if what == "round" else 0
        for old in (*names[:later], *names[later + NUM_CHECKPOINTS :]):
            if old not in needed_names:
                os.unlink(self.path / old)
                names.remove(old)
        # Between checkpoints lost workers are started from states that are of no checkpoint.
        rounds = {_round_of(name) for name in by_sort["round"]}
        for old in by_sort[STATES] if what == "round" else ():
            if _round_of(old) not in rounds:
                os.unlink(self.path / old)

    def drop_partial(self) -> None:
        """Remove partial files of a process that was killed while it wrote a checkpoint."""
        for path in self.path.glob(f"*{PARTIAL}"):
            if NAME.fullmatch(path.with_suffix(WHOLE).name):
                path.unlink()

    def _names_by_sort(self) -> dict[str, list[str]]:
        """Return the names of the files of each sort, of the latest round first."""
        names: dict[str, list[str]] = {"round": [], "best": [], STATES: []}
        for name in os.listdir(self.path) if self.path.is_dir() else ():
            if match := NAME.fullmatch(name):
                names[match[1]].append(name)
        return {sort: sorted(each, key=_round_of, reverse=True) for sort, each in names.items()}

    def latest(
        self, find_misfit: Callable[[Checkpoint], str | None] = lambda _: None
    ) -> tuple[Checkpoint | None, list[str]]:
        """Return the latest checkpoint that can be used, and a line for each later one.

        Args:
            find_misfit: says why a whole checkpoint cannot be used all the same, or None.

        Raises:
            CheckpointError: there are checkpoints, but none can be used.
        """
        problems: list[str] = []
        for checkpoint in self.each(find_misfit):
            if isinstance(checkpoint, Checkpoint):
                return checkpoint, problems
            problems.append(checkpoint)
        if problems:
            raise self.none_usable(problems)
        return None, []

    def each(
        self, find_misfit: Callable[[Checkpoint], str | None] = lambda _: None
    ) -> Iterator[Checkpoint | str]:
        """Yield the checkpoints, the latest first; in place of one that is unusable, why it is."""
        for number in sorted(self.rounds, reverse=True):
            name = file_name("round", number)
            try:
                checkpoint = read_checkpoint(self.path / name, number)
                reason = find_misfit(checkpoint)
            except CheckpointError as error:
                reason = str(error).removeprefix(f"{name}: ")
            yield checkpoint if reason is None else f"{name} cannot be used: {reason}"

    def none_usable(self, problems: Collection[str]) -> CheckpointError:
        """Return the error for a folder none of whose checkpoints can be used, and why."""
        return CheckpointError(
            f"expected a usable checkpoint in {self.path}, got none: {'; '.join(problems)}: "
            "restore what is missing from a copy, or begin a new run",
            **mistake("missing-checkpoint", self.path),
        )
