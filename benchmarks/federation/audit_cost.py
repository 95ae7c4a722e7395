"""What the audit file costs a silo: calls with and without it, in turns; prints a table.

    python benchmarks/federation/audit_cost.py ../shared/data

Over TLS on loopback, server and silo in one process of one torch thread: echoes, and training of
FedAvg on Cora (10 clients by METIS, 64 hidden units, 3 local epochs). Every second call has the
file, and each is compared with the one after it. CPU is that of the whole process, both ends, which
other processes on the machine change less than they change the time.
"""

import secrets
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

import exchange
import silograph as sg
from silograph.core.config import make_config
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Shared
from silograph.core.resolved_config import training_key
from silograph.experiment.run.setup import Setup, prepare
from silograph.federation.base import Op
from silograph.federation.frame import Envelope
from silograph.federation.in_process import InProcess
from silograph.federation.program import Call, Course, Maybe, Program
from silograph.federation.session.attach import Attaching, take_part
from silograph.federation.session.audit import RunAudit
from silograph.federation.session.audit_file import open_audit
from silograph.federation.session.certificates import make_certificates
from silograph.federation.session.engine import Session
from silograph.federation.session.holder import Prepared
from silograph.federation.session.hub import Hub
from silograph.federation.session.identity import Register, SiloKey
from silograph.federation.session.limits import Limits
from silograph.federation.session.message import Type
from silograph.federation.session.names import own_ops, qualified
from silograph.federation.session.parting import say_goodbye
from silograph.federation.session.peer import Peer
from silograph.federation.session.responder import Responder
from silograph.federation.session.state_store import StateStore
from silograph.graph.block.halo import Route
from silograph.methods.local_training import train

PAIRS = 40
SIZES = (1_000, 50_000, 1_000_000)


class Timed:
    """Records as the silo does, and how much CPU time of its thread that takes."""

    def __init__(self, audit: RunAudit) -> None:
        self._audit = audit
        self.took: list[float] = []

    def answered(self, envelope: Envelope, reply: Payload, frame: bytes, **begins: bool) -> None:
        """Add the line."""
        began = time.thread_time()
        self._audit.answered(envelope, reply, frame, **begins)
        self.took.append(time.thread_time() - began)

    def __getattr__(self, name: str) -> Any:
        """Return all else of the silo's record."""
        return getattr(self._audit, name)


class Unwritten:
    """Records nothing of what leaves."""

    def __init__(self, audit: RunAudit) -> None:
        self._audit = audit

    def answered(self, envelope: Envelope, reply: Payload, frame: bytes, **_: bool) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        """Return all else of the silo's record."""
        return getattr(self._audit, name)


@dataclass(frozen=True)
class Case:
    """A call that is made again and again; `program` lets it be made in every round."""

    name: str
    op: Op
    kind: Kind
    key: Key
    inbox: Payload
    prepared: Prepared


def echo_of(size: int) -> Case:
    """Return an echo of some bytes."""
    held = exchange.Echoing("silo").prepare({}, None)  # type: ignore[arg-type]
    inbox = {"x": Shared(torch.zeros(size, dtype=torch.uint8))}
    return Case(f"echo of {size:,} B", exchange.echo, Kind.CONTROL, Key.of(0), inbox, held)


def training_of(setup: Setup) -> Case:
    """Return a round's training at the first client, as its method has it."""
    assert isinstance(setup.federation, InProcess)
    cfg, key = setup.method_config, training_key(setup.config).fold("train", 1)
    calls = setup.method.calls
    assert calls is not None
    step = calls.round(cfg, 1, training_key(setup.config))
    while isinstance(step, tuple | Maybe):
        step = step.steps if isinstance(step, Maybe) else step[0]
    assert isinstance(step, Call)
    program = Program((), lambda _: Maybe(step), 10**6, {})
    block = setup.federation._blocks[0].all
    prepared = Prepared(cfg, block, torch.device("cpu"), Course(program))
    weights = cfg.model.init_weights(Key.of(0), torch.float32)
    inbox = {f"weights/{name}": Shared(w) for name, w in weights.items()}
    return Case("train, FedAvg on Cora", train, Kind.WEIGHTS, step.key or key, inbox, prepared)


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


def measured(case: Case, certs: Path, path: Path) -> tuple[int, float, float, float, float]:
    """Return bytes of a reply, and medians of seconds.

    They are those of a call without the file, its CPU time, that of the line where it is written,
    and what a call with the file takes more than the next one without.
    """
    pair = tuple((certs / name).read_bytes() for name in ("server.pem", "server.key"))
    token, ops = secrets.token_bytes(16), {**own_ops(), qualified(exchange.echo): exchange.echo}
    hub = Hub("127.0.0.1:0", Register(None, 1), token, (pair[0], pair[1]), 1)
    with open_audit(path, {}) as (audit, _):
        worker = Responder(
            token, ops, Holding(case.prepared), StateStore(), lambda _: None, "silo", audit
        )
        worker._refused = lambda reason: sys.exit(reason)  # type: ignore[method-assign]
        attaching = Attaching(
            "silo",
            SiloKey.new(),
            {},
            hub.address,
            (certs / "ca.pem").read_bytes(),
            lambda _: worker,
            60.0,
            lambda _: None,
        )
        silo = threading.Thread(target=take_part, args=(attaching,), daemon=True)
        silo.start()
        joined = hub.next(60)
        assert joined is not None
        peer = Peer(joined.name, joined.link, token)
        peer.ask(Type.START, {}, 60)
        none = torch.zeros(2, dtype=torch.int64)
        course = Course(case.prepared.course.program)
        engine = Session(
            {"silo": peer},
            Route(none[:0], none, none),
            ops,
            course,
            dtype=torch.float32,
            limits=Limits(1),
        )
        records = Timed(worker.audit), Unwritten(worker.audit)
        took: tuple[list[float], list[float]] = ([], [])
        cpu: tuple[list[float], list[float]] = ([], [])
        for number in range(2 * PAIRS + 6):
            which = number % 2
            worker.audit = records[which]  # type: ignore[assignment]
            engine.start_round(number + 1)
            began, spent = time.perf_counter(), time.process_time()
            engine.call(case.op, case.inbox, what=case.kind, key=case.key)
            if number >= 6:
                took[which].append(time.perf_counter() - began)
                cpu[which].append(time.process_time() - spent)
        up = max(int(r.bytes[0]) for r in engine.ledger.records if r.direction == "up")
        say_goodbye(engine.peers, "")
        hub.close()
        silo.join(10)
    line = statistics.median(records[0].took[3:])
    more = statistics.median(a - b for a, b in zip(*cpu, strict=True))
    return up, statistics.median(took[1]), statistics.median(cpu[1]), line, more


def rate(make: Callable[[bytes], Any]) -> float:
    """Return GB/s of a hash of 1 MB, the best of 30, of CPU time."""
    data, best = bytes(1_000_000), float("inf")
    for _ in range(30):
        began = time.thread_time()
        make(data)
        best = min(best, time.thread_time() - began)
    return 1e-3 / best


def main(data: str) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    asked = {"clients": 10, "hidden": 64, "local_epochs": 3, "partition": "metis"}
    setup = prepare(make_config({**asked, "block_size": 1}), sg.load("cora", data_dir=data))
    cases = [*map(echo_of, SIZES), training_of(setup)]
    print("| call | bytes up | ms | CPU ms | line, CPU ms | of it | pairs, CPU ms | of it |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        certs = Path(name)
        make_certificates(certs, ["127.0.0.1"], days=1)
        for number, case in enumerate(cases):
            up, ms, cpu, line, more = measured(case, certs, certs / f"{number}.jsonl")
            cells = f"{1e3 * ms:.2f} | {1e3 * cpu:.2f} | {1e3 * line:.3f} | {line / cpu:.1%}"
            last = f"{1e3 * more:.2f} | {more / cpu:.1%}"
            print(f"| {case.name} | {up:,} | {cells} | {last} |", flush=True)
    mac = AESGCM(bytes(32))
    gmac = rate(lambda data: mac.encrypt(bytes(12), b"", data))
    others = f"SHA-256 {rate(lambda data: sha256(data).digest()):.1f}"
    print(f"GB/s: GMAC {gmac:.1f}, {others}, BLAKE2b {rate(lambda d: blake2b(d).digest()):.1f}")


if __name__ == "__main__":
    main(sys.argv[1])
