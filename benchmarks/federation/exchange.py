"""Exchanges with silo processes on this machine: latency, and how soon a lost silo is noticed.

    python benchmarks/federation/exchange.py

One exchange sends the same bytes to every silo and gets as many back from each, through the session
engine: frames encoded, carried over gRPC, decoded, joined. Silos are processes that echo.
"""

import argparse
import itertools
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Shared, Stacked, State
from silograph.federation.field_specs import FieldSpec
from silograph.federation.matching import Disagreement, Hello
from silograph.federation.program import Call, Course, Maybe, Program
from silograph.federation.session.attach import Attaching, take_part
from silograph.federation.session.audit import RunAudit
from silograph.federation.session.engine import Session
from silograph.federation.session.hub import Hub, say_goodbye
from silograph.federation.session.identity import Register, SiloKey, make_certificates
from silograph.federation.session.message import Type, qualified
from silograph.federation.session.peer import Limits, Peer
from silograph.federation.session.responder import Responder
from silograph.federation.session.silo_data import Prepared
from silograph.federation.session.state_store import StateStore
from silograph.graph.block.block import ClientBlock, Route, make_block, whole
from silograph.graph.graph import Split
from silograph.graph.read.arrays import from_arrays

SIZES = (1_000, 1_000_000)  # bytes, each way
TRIALS = 40


def echo(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Send back what came. In: `x`. Out: `x`."""
    del cfg, block, key
    return state, {"x": Stacked(inbox["x"].t[None])}


def hang(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Never answer."""
    del cfg, block, state, inbox, key
    signal.pause()
    raise AssertionError


OPS = {qualified(op): op for op in (echo, hang)}


def course() -> Course:
    """Return what both ends agree on: in every round an echo of any length, or to hang."""
    inbox_specs = {"x": FieldSpec(Shared, (None,), torch.uint8)}
    reply_specs = {"x": FieldSpec(Stacked, (None,), torch.uint8)}
    steps = (
        Maybe(Call(echo, Kind.CONTROL, Key.of(0), inbox_specs, reply_specs)),
        Maybe(Call(hang, Kind.CONTROL, Key.of(0))),
    )
    return Course(Program((), lambda _: steps, 10**6, {}))


class Echoing:
    """A silo of two nodes."""

    def __init__(self, name: str) -> None:
        self.name = name

    def hello(self, run: bytes) -> Hello:
        """Not asked."""
        raise NotImplementedError

    def explain(self, run: bytes, disagreement: Disagreement) -> None:
        """Not asked."""
        raise NotImplementedError

    def prepare(self, facts: Mapping[str, Any], audit: RunAudit) -> Prepared:
        """Return the two nodes."""
        del facts, audit
        torch.set_num_threads(1)
        graph = from_arrays(edge_index=[[0], [1]], x=[[0.0], [1.0]], y=[0, 1])
        none = torch.zeros(2, dtype=torch.bool)
        block, _ = make_block(graph, whole(graph, self.name), Split(none, none, none))
        return Prepared(None, block, torch.device("cpu"), course())


def be_silo(server: str, name: str, ca: str) -> None:
    """Take part as one silo."""
    roots = Path(ca).read_bytes() if ca else None

    def make_worker(token: bytes) -> Responder:
        return Responder(token, OPS, Echoing(name), StateStore())

    take_part(Attaching(name, SiloKey.new(), {}, server, roots, make_worker, 60.0, lambda _: None))


class Federation:
    """A server in this process and silos in others."""

    def __init__(self, silos: int, folder: Path | None) -> None:
        files = [] if folder is None else [folder / n for n in ("server.pem", "server.key")]
        pair = (files[0].read_bytes(), files[1].read_bytes()) if files else None
        token = secrets.token_bytes(16)
        self.hub = Hub("127.0.0.1:0", Register(None, silos), token, pair, silos)
        ca = "" if folder is None else str(folder / "ca.pem")
        command = [sys.executable, __file__, "--silo", self.hub.address, ca]
        self.processes = [subprocess.Popen([*command, f"silo_{i:02}"]) for i in range(silos)]
        peers: dict[str, Peer] = {}
        while len(peers) < silos:
            joined = self.hub.next(60)
            assert joined is not None
            peers[joined.name] = Peer(joined.name, joined.link, token)
            peers[joined.name].ask(Type.START, {}, 60)
        ordered = {name: peers[name] for name in sorted(peers)}
        none = torch.zeros(silos + 1, dtype=torch.int64)
        route = Route(none[:0], none, none)
        self.engine = Session(
            ordered, route, OPS, course(), dtype=torch.float32, limits=Limits(least=silos)
        )
        self.rounds = itertools.count(1)

    def exchange(self, size: int) -> float:
        """Return the seconds of an exchange of `size` bytes each way with every silo."""
        inbox = {"x": Shared(torch.zeros(size, dtype=torch.uint8))}
        self.engine.start_round(next(self.rounds))
        began = time.perf_counter()
        self.engine.call(echo, inbox, what=Kind.CONTROL, key=Key.of(0))
        return time.perf_counter() - began

    def noticed(self, number: int) -> float:
        """Return the seconds from a signal to the last silo, in an op, to the end of the call."""
        last = self.processes[-1]
        began = [0.0]

        def hit() -> None:
            began[0] = time.perf_counter()
            os.kill(last.pid, number)

        timer = threading.Timer(2.0, hit)
        timer.start()
        try:
            to = [self.engine.ids[-1]]
            self.engine.start_round(next(self.rounds))
            self.engine.call(hang, {}, what=Kind.CONTROL, key=Key.of(0), to=to)
        except ProtocolError:
            return time.perf_counter() - began[0]
        raise AssertionError("a silo that hangs has answered")

    def close(self) -> None:
        """End everything."""
        say_goodbye(self.engine.peers, "")
        self.hub.close()
        for process in self.processes:
            process.kill()
            process.wait()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--silo", nargs=3, metavar=("SERVER", "CA", "NAME"))
    parser.add_argument("--silos", default="2,5,10")
    arguments = parser.parse_args()
    if arguments.silo:
        server, ca, name = arguments.silo
        be_silo(server, name, ca)
        return
    torch.set_num_threads(1)
    print(
        "| silos | transport | bytes each way | median ms | 90 % ms | MB/s, both ways, all silos |"
    )
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        certs = Path(name)
        make_certificates(certs, ["127.0.0.1"], days=1)
        for silos in map(int, arguments.silos.split(",")):
            for what, folder in (("plain", None), ("TLS", certs)):
                federation = Federation(silos, folder)
                for size in SIZES:
                    times = sorted(federation.exchange(size) for _ in range(TRIALS))
                    median, late = statistics.median(times), times[int(0.9 * TRIALS)]
                    rate = 2 * size * silos / median / 1e6
                    cells = f"{1e3 * median:.1f} | {1e3 * late:.1f} | {rate:,.0f}"
                    print(f"| {silos} | {what} | {size:,} | {cells} |", flush=True)
                federation.close()
        for number in (signal.SIGKILL, signal.SIGSTOP):
            federation = Federation(2, certs)
            seconds = federation.noticed(number)
            print(
                f"silo that gets {number.name} in an op is noticed after {seconds:.2f} s",
                flush=True,
            )
            federation.close()


if __name__ == "__main__":
    main()
