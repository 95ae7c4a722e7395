"""The engine whose clients are at workers: other processes of this machine, or of a cluster.

Workers hold blocks in client order, and states stay with them. A worker runs an op at its blocks
while others do the same. Where replies are reduced, they stay at the worker, and the running
reduction goes from worker to worker in client order: the same additions in the same order as in one
process, to the same bits, and one model moves for each worker instead of one for each client.

A worker that is lost is started again, from the last copy of its states and the calls since then.
The others wait; for a call that they have run already they return the stored answers. So a loss
changes no result.

C: clients of the federation. k: clients of a call.
"""

import itertools
import logging
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Shared, State, join, take_all
from silograph.federation.base import (
    NOTHING,
    AwayError,
    Gather,
    Op,
    Reduce,
    positions_of,
)
from silograph.federation.check import check_fields
from silograph.federation.fold import Reduction, Running
from silograph.federation.frame import RESULT, frame_sizes
from silograph.federation.in_process import OpCall
from silograph.federation.ledger import Account, Ledger, Record
from silograph.federation.state_files import StateFile, read_state
from silograph.federation.workers.packing import Packed, pack, unpack
from silograph.federation.workers.processes import LostWorkerError
from silograph.federation.workers.worker import (
    Answer,
    Job,
    Notes,
    Report,
    WorkerCall,
    WorkerSettings,
)
from silograph.graph.block.block import ClientBlock, Route
from silograph.graph.silos.shards import ShardedClients

LOG = logging.getLogger("silograph")
NO_NOTES = Notes([], [], [])
T = TypeVar("T")
MOST_LOSSES = 3  # of workers in one call, after which the run ends
MOST_LOGGED = 1 << 28  # bytes of messages since the last copy of states, after which it is renewed


class Pool(Protocol):
    """Numbered workers, and how to call methods of `Worker` there.

    What `share` and `submit` return may be an argument of `submit`.
    """

    @property
    def size(self) -> int:
        """Number of workers."""

    def share(self, value: Any) -> Any:
        """Return a handle of a copy of a value, for several workers or calls."""

    def submit(self, worker: int, method: str, *arguments: Any) -> Any:
        """Call a method of a worker, which runs after those submitted before; return its task."""

    def report(self, task: Any) -> Any:
        """Wait for a task and return its packed report.

        Raises:
            LostWorkerError: its worker, or one that an argument comes from, has ended.
        """

    def find_lost(self) -> list[int]:
        """Return the numbers of the workers that have ended."""

    def restart(self, worker: int) -> None:
        """Put a new worker in the place of one that has ended."""

    def close(self) -> None:
        """End all workers at once."""


class _SentCall(NamedTuple):
    """A call as it was sent, to be sent again.

    Attributes:
        call: the shared `WorkerCall`.
        jobs: the shared jobs of each worker that it goes to, by its number.
    """

    call: Any
    jobs: Mapping[int, Any]


class Workers:
    """Runs ops on blocks of clients at workers.

    Args:
        settings: of the workers.
        clients: all clients as one block, or in files that all workers can read.
        route: owner of each halo slot.
        block_size: most clients in one block, as in one process.
        make_pool: starts a pool of at most the given number of workers.
        workers: most workers; None: as many as the pool has cores for. Never more than blocks.
        keep_every: rounds between copies of the workers' states; 0: no copies at intervals.
        compiled: fold replies with the compiled kernel; results are the same.

    Attributes:
        ids: names of the clients.
        route: who answers for each halo slot.
        away: names of absent clients: none, because lost workers are started again.
        left_out: clients that were left out, and why: none, because a failure ends the whole run.
        remembered: what an engine stores for a resume: nothing.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        clients: ClientBlock | ShardedClients,
        route: Route,
        block_size: int,
        make_pool: Callable[[int], Pool],
        *,
        workers: int | None,
        keep_every: int,
        compiled: bool,
    ) -> None:
        self.ids, self.route, self.away = clients.ids, route, tuple[str, ...]()
        self.left_out, self.remembered = dict[str, str](), dict[str, Any]()
        self._compiled, self._keep_every = compiled, keep_every
        members = torch.arange(clients.num_clients).split(block_size)
        self._starts = torch.tensor([0, *itertools.accumulate(map(len, members))])
        self._account, self._round, self._number = Account(clients.num_clients), 0, 0
        self._sent, self._sent_bytes = list[_SentCall](), 0
        self._warned: dict[Any, Any] = {}
        self._pool = make_pool(min(workers or len(members), len(members)))
        # Packed reports of `export`, by worker.
        self._copies: list[Packed | None] = [None] * self._pool.size
        self._folder: Path | None = None  # where all workers can write their states
        try:
            self._first_blocks = share_out(clients, self._starts, self._pool.size)
            shared = self._pool.share(settings)
            self._beginnings = [
                (shared, self._pool.share([clients.take(m) for m in members[a:b]]))
                for a, b in itertools.pairwise(self._first_blocks)
            ]
            self._repeat(lambda: self._start(range(self._pool.size)))
        except BaseException:
            self.close()
            raise

    @property
    def ledger(self) -> Ledger:
        """What every call cost."""
        return self._account.ledger

    @property
    def executed(self) -> float:
        """Operations executed since this engine began, of all clients."""
        return self._account.executed

    def start_round(self, number: int) -> None:
        """Assign the calls from here on to this round."""
        self._round = number
        self._account.start_round(number)

    def states(self) -> Sequence[State]:
        """Return the state of each block, for a checkpoint."""
        self._keep_states()
        states = [state for copy in self._copies if copy for state in unpack(copy).value]
        return [read_state(state) if isinstance(state, StateFile) else state for state in states]

    def write_states(self, folder: Path, number: int) -> Sequence[StateFile] | None:
        """Have workers write their states, from which lost workers are then started again.

        None where a worker does not see the folder, or this process does not see its files.
        """
        first = self._first_blocks

        def write() -> list[Packed]:
            place = self._pool.share(folder), self._pool.share(number)
            tasks = [
                self._pool.submit(w, "write_states", *place, self._pool.share(first[w]))
                for w in range(self._pool.size)
            ]
            return [self._pool.report(task) for task in tasks]

        reports = self._repeat(write)
        values = []
        for report in map(unpack, reports):
            _raise_error(report)
            values.append(report.value)
        files = [file for value in values for file in value or ()]
        is_seen = None not in values and all(file.path.is_file() for file in files)
        self._folder = folder if is_seen else None
        if not is_seen:
            return None
        self._copies = list(reports)
        self._sent.clear()
        self._sent_bytes = 0
        return files

    def keep(self, number: int, committed: Sequence[int]) -> None:
        """Copy the states of all workers if a copy is due; a lost worker is started from it."""
        del committed  # the server's checkpoint already holds the state of every client
        is_due = self._keep_every > 0 and number % self._keep_every == 0
        if not self._sent or not (is_due or self._sent_bytes > MOST_LOGGED):
            return
        if self._folder is None or self.write_states(self._folder, number) is None:
            self._keep_states()

    def hand_over(self, number: int, weights: Payload) -> int:
        """Return the bytes that sending the final weights to real silos would take."""
        del number
        return int(frame_sizes(RESULT, weights, len(self.ids)).sum())

    def restore(
        self,
        number: int,
        states: Sequence[State | StateFile],
        records: Sequence[Record],
        remembered: Mapping[str, Any] = NOTHING,
    ) -> None:
        """Restore the states of a checkpoint and the ledger records up to it."""
        del number, remembered  # the first call of a round says which it is
        ends = itertools.pairwise(self._first_blocks)
        parts = (Report(tuple(states[a:b]), None, None, NO_NOTES) for a, b in ends)
        self._copies = [pack(part) for part in parts]
        self._sent.clear()
        self._sent_bytes = 0

        def restore_all() -> None:
            tasks = [self._pool.submit(w, "restore", copy) for w, copy in enumerate(self._copies)]
            for task in tasks:
                self._value(task)

        self._repeat(restore_all)
        self._account = Account(len(self.ids), records)

    def rejoin(self, away: AwayError) -> None:
        """Raise `away` again: lost workers are started again within a call."""
        raise away

    def close(self) -> None:
        """End all workers at once."""
        self._pool.close()

    def call(
        self,
        op: Op,
        inbox: Payload,
        *,
        what: Kind,
        key: Key,
        to: Sequence[str] | None = None,
        reduce: Reduce | None = None,
        rows: bool = False,
        allow_missing: bool = False,
    ) -> Payload:
        """Run `op` at the clients `to`; see `Federation.call`."""
        del allow_missing  # lost workers are started again
        fold = None if reduce is None else Reduction(reduce, len(self.ids), compiled=self._compiled)
        # What is gathered whole goes to this process once, not from worker to worker.
        is_folded_there = fold is not None and not (isinstance(reduce, Gather) and not reduce.fold)
        # 1. Send the inbox.
        positions = positions_of(self.ids, to)
        size, envelope = len(positions), self._account.open(op.__name__, what)
        check_fields(inbox, size, f"inbox of {op.__name__}", shared=True)
        self._account.down(envelope, positions, frame_sizes(op.__name__, inbox, size))
        answer_envelope = replace(envelope, kind=op.__dict__.get("reply_kind", what))
        takes_rows = rows or (fold is not None and fold.takes_rows)
        op_call = OpCall(op, envelope, answer_envelope, key, takes_rows)
        shared = {name: field for name, field in inbox.items() if isinstance(field, Shared)}
        self._number += 1
        here = len(self.ids), self._compiled
        there = reduce if is_folded_there else None
        call = WorkerCall(self._number, op_call, tuple(inbox), shared, there, *here)
        jobs = self._split(positions, inbox, shared)
        sent = _SentCall(self._pool.share(call), {w: self._pool.share(j) for w, j in jobs.items()})
        # 2. Run the op at each worker, and fold the replies there.
        answers, running = self._repeat(lambda: self._carry(sent, folds=is_folded_there))
        self._sent.append(sent)
        self._sent_bytes += sum(f.t.nbytes for f in inbox.values())
        # 3. Record the costs, and fold replies that have come here.
        sizes, counts = (np.concatenate([answer.cost[k] for answer in answers]) for k in (0, 1))
        works = [answer.cost.work for answer in answers]
        self._account.up(answer_envelope, positions, sizes, counts, works)
        if fold is not None and running is not None:
            fold.resume(running)
            return fold.result()
        replies = [answer.reply for answer in answers if answer.reply is not None]
        if fold is None:
            return join(replies)
        for job, reply in zip(itertools.chain(*jobs.values()), replies, strict=True):
            fold.add(reply, job.positions)
        return fold.result()

    def _split(self, positions: Tensor, inbox: Payload, shared: Payload) -> dict[int, list[Job]]:
        """Return the jobs of each worker that has clients among those at `positions` (k,)."""
        own = {name: field for name, field in inbox.items() if name not in shared}
        ends = torch.searchsorted(positions, self._starts).tolist()
        jobs: dict[int, list[Job]] = {}
        for worker, (first, last) in enumerate(itertools.pairwise(self._first_blocks)):
            for block in range(first, last):
                a, b = ends[block : block + 2]
                if a < b:
                    called = positions[a:b]
                    part = take_all(own, torch.arange(a, b))
                    job = Job(block - first, called - self._starts[block], called, part)
                    jobs.setdefault(worker, []).append(job)
        return jobs

    def _carry(self, sent: _SentCall, *, folds: bool) -> tuple[list[Answer], Running | None]:
        """Send a call to its workers; return the answers in client order, and what was folded."""
        tasks = {w: self._pool.submit(w, "run", sent.call, jobs) for w, jobs in sent.jobs.items()}
        if folds:
            number, last = self._pool.share(self._number), self._pool.share(None)
            for worker in tasks:
                last = self._pool.submit(worker, "fold", number, last)
        reports = [unpack(self._pool.report(task)) for task in tasks.values()]
        folded = unpack(self._pool.report(last)) if folds else None
        # Only once all workers have answered: else a repeated call would show its notes twice.
        for report in reports:
            self._show(report.notes)
            _raise_error(report)
        answers = [answer for report in reports for answer in report.value]
        if folded is None:
            return answers, None
        _raise_error(folded)
        return answers, folded.value

    def _value(self, task: Any) -> Any:
        """Return what a method of a worker returned, or raise its error."""
        report = unpack(self._pool.report(task))
        _raise_error(report)
        return report.value

    def _keep_states(self) -> None:
        """Copy the states of all workers, and forget the calls that led to them."""

        def export() -> list[Packed | None]:
            tasks = [self._pool.submit(w, "export") for w in range(self._pool.size)]
            return [self._pool.report(task) for task in tasks]

        if self._sent or None in self._copies:
            self._copies = self._repeat(export)
            self._sent.clear()
            self._sent_bytes = 0

    def _repeat(self, action: Callable[[], T]) -> T:
        """Return the result of an action, which is repeated if a worker is lost in it."""
        losses = 0
        while True:
            try:
                if losses > 0:
                    lost_workers = self._pool.find_lost()
                    for worker in lost_workers:
                        self._pool.restart(worker)
                    self._start(lost_workers)
                return action()
            except LostWorkerError as lost:
                losses += 1
                if losses > MOST_LOSSES:
                    raise ProtocolError(
                        f"expected at most {MOST_LOSSES} losses of workers in a call, got {losses} "
                        f"in round {self._round}, the last one: {lost}"
                    ) from None
                LOG.warning("a worker was lost and is started again: %s", lost)

    def _start(self, workers: Sequence[int]) -> None:
        """Start new workers: restore the last copy of states, and repeat all calls since then."""
        tasks = [self._pool.submit(w, "start", *self._beginnings[w]) for w in workers]
        for worker in workers:
            if self._copies[worker] is not None:
                tasks.append(self._pool.submit(worker, "restore", self._copies[worker]))
        tasks += [
            self._pool.submit(worker, "run", sent.call, sent.jobs[worker])
            for sent in self._sent
            for worker in workers
            if worker in sent.jobs
        ]
        for task in tasks:
            self._value(task)

    def _show(self, notes: Notes) -> None:
        """Repeat here what a worker has logged, warned of and printed."""
        for text in notes.printed:
            sys.stdout.write(text)
        for record in notes.logs:
            if LOG.isEnabledFor(record.levelno):
                LOG.handle(record)
        for message, category, file, line in notes.warnings:
            warnings.warn_explicit(message, category, file, line, registry=self._warned)


def _raise_error(report: Any) -> None:
    """Raise the error of a report, if it has one."""
    if report.error is not None:
        raise report.error from report.cause


def share_out(clients: ClientBlock | ShardedClients, starts: Tensor, workers: int) -> list[int]:
    """Return the first block of each worker, and the number of blocks.

    Each worker gets adjacent blocks, at least one, with about the same number of rows in all.

    Args:
        clients: all of them.
        starts: (blocks + 1,) int64 first client of each block, and C.
        workers: at most as many as blocks.
    """
    rows = clients.off[starts.to(clients.off.device)].cpu()
    blocks = len(starts) - 1
    goals = torch.arange(1, workers) * (float(rows[-1]) / workers)
    ends = torch.searchsorted(rows[1:].double(), goals.double()).add(1).tolist()
    first_blocks = [0]
    for worker, end in enumerate(ends, start=1):
        first_blocks.append(min(max(end, first_blocks[-1] + 1), blocks - workers + worker))
    return [*first_blocks, blocks]
