"""What runs in a worker: a block host, and answers to calls from the engine.

k: clients of a call in one block.
"""

import io
import logging
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.numeric_state import standard_numerics, torch_threads
from silograph.core.payload import Payload, State
from silograph.core.work import keep_freed_memory
from silograph.federation.base import Reduce
from silograph.federation.fold import Reduction, Running
from silograph.federation.in_process import BlockHost, OpCall, ReplyCost
from silograph.federation.state_files import StateFile, write_state
from silograph.federation.workers.packing import Packed, pack, unpack
from silograph.graph.block.block import ClientBlock
from silograph.graph.silos.shards import ShardedClients

LOG = logging.getLogger("silograph")


class WorkerSettings(NamedTuple):
    """What all workers of a run are started with.

    Attributes:
        cfg: first argument of every op.
        strict: see `BlockHost`.
        single_client_only: see `BlockHost`.
        threads: of torch.
        log_level: least level of the lines that are logged.
    """

    cfg: Any
    strict: bool
    single_client_only: bool
    threads: int
    log_level: int


class WorkerCall(NamedTuple):
    """The part of a call that is the same for all workers.

    Attributes:
        number: of the call in the run; a call that is repeated has the same.
        call: what blocks run.
        names: of the inbox's fields, in order.
        shared: fields that all clients get.
        reduce: how replies are folded, at the worker; None: they are sent to the engine.
        clients: C, all clients of the federation.
        compiled: see `Reduction`.
    """

    number: int
    call: OpCall
    names: tuple[str, ...]
    shared: Payload
    reduce: Reduce | None
    clients: int
    compiled: bool


class Job(NamedTuple):
    """The part of a call that goes to one block.

    Attributes:
        block: its number at the worker.
        clients: (k,) int64 positions in the block.
        positions: (k,) int64 positions in the federation.
        inbox: fields that are not shared.
    """

    block: int
    clients: Tensor
    positions: Tensor
    inbox: Payload


class Answer(NamedTuple):
    """The result of a job.

    Attributes:
        reply: of the clients; None: it stays at the worker, to be folded there.
        cost: of the reply.
    """

    reply: Payload | None
    cost: ReplyCost


class Notes(NamedTuple):
    """Log lines, warnings and output of a call, which are repeated in the user's process.

    Attributes:
        logs: lines of the log.
        warnings: message, category, file and line of each.
        printed: text on standard output.
    """

    logs: list[logging.LogRecord]
    warnings: list[tuple[str, type[Warning], str, int]]
    printed: list[str]


class Report(NamedTuple):
    """The outcome of a method of a worker.

    Attributes:
        value: what it returned.
        error: what it raised; None: nothing.
        cause: of the error.
        notes: of what happened meanwhile.
    """

    value: Any
    error: Exception | None
    cause: BaseException | None
    notes: Notes


class Worker:
    """A block host that runs every call once.

    Args:
        settings: of all workers.
        blocks: of clients, or their files.
    """

    def __init__(
        self, settings: WorkerSettings, blocks: Sequence[ClientBlock | ShardedClients]
    ) -> None:
        keep_freed_memory()
        LOG.setLevel(settings.log_level)
        self._host = BlockHost(
            settings.cfg,
            blocks,
            strict=settings.strict,
            single_client_only=settings.single_client_only,
        )
        self._threads = settings.threads
        self._round, self._number = 0, -1
        self._call: WorkerCall | None = None
        self._jobs: Sequence[Job] = ()
        self._replies: list[Payload] = []
        self._answers: list[Answer] = []

    def run(self, call: WorkerCall, jobs: Sequence[Job]) -> list[Answer]:
        """Run an op for some clients.

        A call that was run already is not run again: its answers are those of the first time.

        Raises:
            SilographError: the op broke a rule or failed.
        """
        if call.number == self._number:
            return self._answers
        self._replies, self._answers = [], []
        if call.call.envelope.round != self._round:
            self._round = call.call.envelope.round
            self._host.start_round(self._round)
        with torch_threads(self._threads):
            for job in jobs:
                fields = {**call.shared, **job.inbox}
                inbox = {name: fields[name] for name in call.names}
                reply, cost = self._host.run(call.call, job.block, job.clients, inbox)
                if call.reduce is not None:
                    self._replies.append(reply)
                self._answers.append(Answer(reply if call.reduce is None else None, cost))
        self._call, self._jobs, self._number = call, jobs, call.number
        return self._answers

    def fold(self, number: int, running: Running | None) -> Running:
        """Add the replies of the last call to the running reduction, in client order.

        Args:
            number: of the call.
            running: reduction over all clients before those of this worker; None: it is first.
        """
        call = self._call
        if number != self._number or call is None or call.reduce is None:  # its op failed
            raise ProtocolError(f"expected replies of call {number}, got those of {self._number}")
        reduction = Reduction(call.reduce, call.clients, compiled=call.compiled)
        if running is not None:
            reduction.resume(running)
        with torch_threads(self._threads):
            for job, reply in zip(self._jobs, self._replies, strict=True):
                reduction.add(reply, job.positions, self._host.states[job.block].holds)
        return reduction.running

    def export(self) -> tuple[State, ...]:
        """Return the states of all blocks."""
        return self._host.export()

    def write_states(
        self, folder: Path, number: int, first_block: int
    ) -> tuple[StateFile, ...] | None:
        """Write the states of all blocks after a round to files.

        Args:
            folder: where.
            number: of the round.
            first_block: number of this worker's first block in the federation.

        Returns:
            None where the folder is not on this machine.
        """
        if not folder.is_dir():
            return None
        blocks = enumerate(self._host.export(), start=first_block)
        return tuple(write_state(folder, number, block, state) for block, state in blocks)

    def restore(self, states: Sequence[State | StateFile]) -> None:
        """Restore states that were exported, or those of a checkpoint."""
        self._host.restore(states)
        self._number = -1


class WorkerServer:
    """Carries out methods of a worker whose arguments and results are packed."""

    def __init__(self) -> None:
        self._worker: Worker | None = None

    def handle(self, method: str, *arguments: Packed) -> Packed:
        """Return the packed `Report` of a method.

        Args:
            method: name of a method of `Worker`; `start` makes the worker, `ping` does nothing.
            arguments: packed; in place of an argument may be the report of another method, also of
                another worker, that returned it.
        """
        notes, value = Notes([], [], []), None
        try:
            values = list(map(_value_of, arguments))
            with _recorded(notes), standard_numerics():
                if method == "start":
                    self._worker = Worker(*values)
                elif method != "ping":
                    value = getattr(self._worker, method)(*values)
            return pack(Report(value, None, None, notes))
        except Exception as error:
            return _pack_failure(error, notes)


def _value_of(packed: Packed) -> Any:
    value = unpack(packed)
    if not isinstance(value, Report):
        return value
    if value.error is not None:
        raise value.error
    return value.value


def _pack_failure(error: Exception, notes: Notes) -> Packed:
    """Return the report of an error, without what pickle cannot write."""
    cause = error.__cause__
    if cause is not None:
        lines = "".join(traceback.format_exception(cause)).rstrip()
        cause.add_note(f"in a worker:\n{lines}")
    for known_cause in (cause, None):
        try:
            packed = pack(Report(None, error, known_cause, notes))
            unpack(packed)  # some errors are written, but not read again
        except Exception:  # of a user's own class, whatever it does
            continue
        return packed
    return pack(Report(None, ProtocolError(f"{type(error).__name__}: {error}"), None, notes))


class _Recorder(logging.Handler):
    """Collects lines of the log, with their arguments filled in."""

    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__()
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        record.msg, record.args = record.getMessage(), None
        record.exc_info = None
        self._records.append(record)


@contextmanager
def _recorded(notes: Notes) -> Iterator[None]:
    """Collect what is logged, warned of and printed inside the block."""
    recorder, printed = _Recorder(notes.logs), io.StringIO()
    propagates = LOG.propagate
    LOG.addHandler(recorder)
    LOG.propagate = False
    try:
        with warnings.catch_warnings(record=True) as caught, redirect_stdout(printed):
            warnings.simplefilter("always")
            yield
    finally:
        LOG.removeHandler(recorder)
        LOG.propagate = propagates
        notes.warnings.extend((str(w.message), w.category, w.filename, w.lineno) for w in caught)
        notes.printed.append(printed.getvalue())
