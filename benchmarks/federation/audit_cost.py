"""What the audit file costs a silo: its calls with a line and without one, in turns.

    python benchmarks/federation/audit_cost.py ../shared/data

Server and silo are two processes of one torch thread each, over TLS on loopback. A call is what the
silo does between a message that it has received and the answer that it hands to the transport: on
the one hand calls that compute nothing (the count of training nodes at the beginning of FedAvg,
echoes), on the other training of FedAvg on Cora (the first of 10 silos by METIS), the least that
there is and one with 64 hidden units and 3 local epochs. Of three
blocks of calls one adds lines, one hashes and writes as many bytes and does nothing else, and one
does nothing; times are compared within each such three.
"""

import multiprocessing
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import exchange
import silograph as sg
from silograph.core.config import make_config
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Shared
from silograph.core.resolved_config import training_key
from silograph.experiment.run.setup import prepare
from silograph.federation.base import Op
from silograph.federation.in_process import InProcess
from silograph.federation.program import Call, Course, Maybe, Program, calls_of
from silograph.federation.session.attach import Attaching, take_part
from silograph.federation.session.audit import RunAudit, open_audit
from silograph.federation.session.engine import Session
from silograph.federation.session.hub import Hub, say_goodbye
from silograph.federation.session.identity import Register, SiloKey, make_certificates
from silograph.federation.session.message import Type, own_ops, qualified
from silograph.federation.session.peer import Limits, Peer
from silograph.federation.session.responder import Responder
from silograph.federation.session.silo_data import Prepared
from silograph.federation.session.state_store import StateStore
from silograph.graph.block.block import Route

CALLS = 1000
BLOCK = 20  # calls
WARM = 2 * BLOCK  # calls that are not counted
CASES = ("counts", "echo 1000", "echo 50000", "echo 1000000", "train least", "train")
LINE = b"x" * 420  # as many bytes as a line of these calls has
TURNS = ("line", "bare", "none")


@dataclass(frozen=True)
class Case:
    """A call that is made again and again; its program lets it be made in every round."""

    op: Op
    kind: Kind
    key: Key
    inbox: Payload
    prepared: Prepared


def case_of(name: str, data: str) -> Case:
    """Return a call by its name in `CASES`."""
    torch.set_num_threads(1)
    if name.startswith("echo"):
        held = exchange.Echoing("silo").prepare({}, None)  # type: ignore[arg-type]
        inbox = {"x": Shared(torch.zeros(int(name.split()[1]), dtype=torch.uint8))}
        return Case(exchange.echo, Kind.CONTROL, Key.of(0), inbox, held)
    size = {"hidden": 8, "local_epochs": 1} if name == "train least" else {"local_epochs": 3}
    asked = {"clients": 10, "partition": "metis", "block_size": 1, "hidden": 64, **size}
    setup = prepare(make_config(asked), sg.load("cora", data_dir=data))
    cfg, key, calls = setup.method_config, training_key(setup.config), setup.method.calls
    assert isinstance(setup.federation, InProcess)
    assert calls is not None
    if name == "counts":
        steps, inbox = calls.setup(cfg, key.fold("init")), {}
    else:
        weights = cfg.model.init_weights(Key.of(0), torch.float32)
        steps = calls.round(cfg, 1, key)
        inbox = {f"weights/{name}": Shared(w) for name, w in weights.items()}
    call = next(calls_of(steps))
    block = setup.federation._host.blocks[0].all
    prepared = Prepared(cfg, block, torch.device("cpu"), always(call))
    return Case(call.op, call.what, call.key, inbox, prepared)


def always(call: Call) -> Course:
    """Return the course of a run that may make one call in every round."""
    return Course(Program((), lambda _: Maybe(call), 10**6, {}))


class Holding:
    """A silo that is prepared already."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared

    def hello(self, run: bytes) -> Any:
        """Not asked."""
        raise NotImplementedError

    def explain(self, run: bytes, disagreement: Any) -> None:
        """Not asked."""
        raise NotImplementedError

    def prepare(self, facts: Mapping[str, Any], audit: RunAudit) -> Prepared:
        """Return what is prepared."""
        del facts, audit
        return self.prepared


class Turns:
    """A silo's record that takes turns, and times itself and whole calls by turn, in seconds."""

    def __init__(self, audit: RunAudit, file: int) -> None:
        self._audit = audit
        self._file = file
        self.number = 0
        self.took = Times()
        self.calls = Times()

    @property
    def turn(self) -> str:
        """Whose turn it is."""
        return TURNS[self.number // BLOCK % len(TURNS)]

    def record_reply(self, *about: Any, **begins: bool) -> None:
        """Add the line, or less than that."""
        acts: dict[str, Callable[..., None]]
        acts = {"line": self._audit.record_reply, "bare": self._bare}
        act = acts.get(self.turn, lambda *_, **__: None)
        began, spent = time.perf_counter(), time.thread_time()
        act(*about, **begins)
        self.took.add(self.turn, time.perf_counter() - began, time.thread_time() - spent)

    def _bare(self, *_: Any, **__: bool) -> None:
        blake2b(LINE, digest_size=32).hexdigest()
        os.write(self._file, LINE)

    def __getattr__(self, name: str) -> Any:
        """Return all else of the silo's record."""
        return getattr(self._audit, name)


@dataclass
class Times:
    """Wall time and CPU time of the thread, by turn, in seconds."""

    wall: dict[str, list[float]] = field(default_factory=lambda: {turn: [] for turn in TURNS})
    cpu: dict[str, list[float]] = field(default_factory=lambda: {turn: [] for turn in TURNS})

    def add(self, turn: str, wall: float, cpu: float) -> None:
        """Take in one."""
        self.wall[turn].append(wall)
        self.cpu[turn].append(cpu)


def serve(name: str, data: str, address: str, folder: Path, token: bytes, told: Connection) -> None:
    """Be the silo, and send its times."""
    ops = {**own_ops(), qualified(exchange.echo): exchange.echo}
    holder = Holding(case_of(name, data).prepared)
    bare = os.open(folder / "bare", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with open_audit(folder / "audit.jsonl", {}) as (audit, _):
        worker = Responder(token, ops, holder, StateStore(), lambda _: None, "silo", audit)
        turns = Turns(worker.audit, bare)
        worker.audit, answer = turns, worker.answer  # type: ignore[assignment]

        def timed(message: bytes | bytearray) -> bytes:
            turns.number += 1
            began, spent = time.perf_counter(), time.thread_time()
            found = answer(message)
            wall, cpu = time.perf_counter() - began, time.thread_time() - spent
            turns.calls.add(turns.turn, wall, cpu)
            return found

        worker.answer = timed  # type: ignore[assignment, method-assign]
        roots, key = (folder / "ca.pem").read_bytes(), SiloKey.new()
        quiet: Callable[[Any], None] = lambda _: None  # noqa: E731
        take_part(Attaching("silo", key, {}, address, roots, lambda _: worker, 60.0, quiet))
    told.send((turns.took, turns.calls))


def measured(name: str, data: str, folder: Path) -> tuple[Times, Times, float, int]:
    """Return times of lines and of calls, and the median of round trips and bytes of a reply."""
    case = case_of(name, data)
    make_certificates(folder, ["127.0.0.1"], days=1)
    certificate, key = ((folder / end).read_bytes() for end in ("server.pem", "server.key"))
    token = secrets.token_bytes(16)
    hub = Hub("127.0.0.1:0", Register(None, 1), token, (certificate, key), 1)
    processes = multiprocessing.get_context("spawn")
    told, tells = processes.Pipe()
    about = (name, data, hub.address, folder, token, tells)
    silo = processes.Process(target=serve, args=about, daemon=True)
    silo.start()
    joined = hub.next(120)
    assert joined is not None
    peer = Peer(joined.name, joined.link, token)
    peer.ask(Type.START, {}, 60)
    none = torch.zeros(2, dtype=torch.int64)
    engine = Session(
        {"silo": peer},
        Route(none[:0], none, none),
        {**own_ops(), qualified(exchange.echo): exchange.echo},
        Course(case.prepared.course.program),
        dtype=torch.float32,
        limits=Limits(1),
    )
    took = []
    for number in range(len(TURNS) * (CALLS + WARM)):
        engine.start_round(number + 1)
        began = time.perf_counter()
        engine.call(case.op, case.inbox, what=case.kind, key=case.key)
        took.append(time.perf_counter() - began)
    size = max(int(r.bytes[0]) for r in engine.ledger.records if r.direction == "up")
    say_goodbye(engine.peers, "")
    hub.close()
    lines, calls = told.recv()
    silo.join(20)
    return lines, calls, statistics.median(took[3 * WARM :]), size


def median(times: list[float]) -> float:
    """Return the median of what is counted."""
    return statistics.median(times[WARM : WARM + CALLS])


def more(times: Mapping[str, list[float]]) -> float:
    """Return what a call with a line takes more than its neighbor without one, the median."""
    pairs = zip(times["line"], times["none"], strict=False)
    return median([one - other for one, other in pairs])


def row(name: str, data: str) -> str:
    """Return a row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        lines, calls, trip, size = measured(name, data, Path(folder))
    whole, spent = median(calls.wall["none"]), median(calls.cpu["none"])
    clock, ticks = median(lines.wall["none"]), median(lines.cpu["none"])
    line, bare = median(lines.wall["line"]) - clock, median(lines.wall["bare"]) - clock
    busy, extra = median(lines.cpu["line"]) - ticks, more(calls.wall)
    cells = [f"{size:,}", f"{1e3 * trip:.2f}", f"{1e6 * whole:.0f}", f"{1e6 * spent:.0f}"]
    cells += [f"{1e6 * t:.1f}" for t in (line, busy, bare, extra)]
    cells += [f"{100 * t:.1f} %" for t in (line / whole, bare / whole, extra / whole, line / trip)]
    return f"| {name} | {' | '.join(cells)} |"


def main(data: str, names: list[str]) -> None:
    """Print the table; times are medians, those of a silo in µs."""
    print("| call | bytes | trip, ms | call | its CPU | line | its CPU | bare | pairs |", end="")
    print(" line | bare | pairs | line of trip |")
    print("|---" * 13 + "|")
    for name in names or CASES:
        print(row(name, data), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
