"""A session without a network: the silos' workers answer as soon as they are asked."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, State, owners
from silograph.core.work import Meter
from silograph.deploy.silo import nodes_of
from silograph.federation.base import Op
from silograph.federation.field_specs import Extent, extent_of
from silograph.federation.matching import Disagreement, Hello
from silograph.federation.program import Call, Course, Program, Steps
from silograph.federation.secure.row_form import RowNames
from silograph.federation.secure.sums import SecureSums
from silograph.federation.session import engine
from silograph.federation.session.audit import RunAudit
from silograph.federation.session.engine import Session
from silograph.federation.session.events import Cause
from silograph.federation.session.message import Type, facts_body, qualified
from silograph.federation.session.peer import Arrived, Limits, LostError, Peer, WorkBound
from silograph.federation.session.responder import Responder
from silograph.federation.session.silo_data import Prepared
from silograph.federation.session.state_store import StateStore
from silograph.graph.block.block import ClientBlock, Route

TOKEN = b"0123456789abcdef"
Change = Callable[[bytes], bytes | None]


class DirectLink:
    """Hands messages to a worker in this thread.

    `change` may change or swallow what the worker answers; `requests` and `answers` are what went.
    """

    def __init__(self, worker: Responder, change: Change = lambda data: data) -> None:
        self.worker = worker
        self.change = change
        self.requests: list[bytes] = []
        self.answers: deque[Arrived | None] = deque()
        self.closed = False

    def send(self, data: bytes, most: int) -> None:
        self.requests.append(data)
        answer = self.change(self.worker.answer(data))
        self.answers.append(None if answer is None else Arrived(answer, time.monotonic()))

    def receive(self, seconds: float | None) -> Arrived:
        arrived = self.answers.popleft()
        if arrived is None:
            line = "expected an answer, got the end of the stream: it is gone"
            raise LostError(line, Cause.GONE)
        return arrived

    def close(self) -> None:
        self.closed = True


@dataclass(frozen=True, eq=False)
class FreeCall(Call):
    """A call of anything."""

    rows = True

    def check_inbox(self, inbox: Payload, extent: Extent, state: State) -> None:
        pass

    def check_reply(
        self, inbox: Payload, reply: Payload, extent: Extent, *, own: bool = False
    ) -> None:
        pass


class FreeCourse(Course):
    """Lets every op pass, for tests of what surrounds the program."""

    def __init__(self) -> None:
        super().__init__(Program((), lambda _: (), 10**6, {}))

    def find(self, number: int, op: Op, what: Kind, key: Key) -> tuple[Call, Steps]:
        return FreeCall(op, what, key), ()

    def advance(self, number: int, after: Steps) -> bool:
        return False

    def mark_failed(self) -> None:
        pass

    def check_state(self, state: State, extent: Extent, *, own: bool = False) -> None:
        pass


def course_of(program: Program | None) -> Course:
    return FreeCourse() if program is None else Course(program)


class BlockHolder:
    """A silo that is prepared already."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared

    def hello(self, run: bytes) -> Hello:
        raise NotImplementedError

    def explain(self, run: bytes, disagreement: Disagreement) -> None:
        raise NotImplementedError

    def prepare(self, facts: Mapping[str, Any], audit: RunAudit) -> Prepared:
        return self.prepared


def worker_of(
    block: ClientBlock,
    cfg: Any,
    ops: Mapping[str, Op],
    store: StateStore | None = None,
    program: Program | None = None,
    *,
    rows: bool = True,
    secure: SecureSums | None = None,
    masked_rows: RowNames | None = None,
) -> Responder:
    """Return a silo's worker; without a program it does whatever it is asked."""
    device, course = torch.device("cpu"), course_of(program)
    prepared = Prepared(
        cfg, block, device, course, sends_rows=rows, secure=secure, rows=masked_rows
    )
    store = StateStore() if store is None else store
    name = None if secure is None else block.ids[0]
    return Responder(TOKEN, ops, BlockHolder(prepared), store, name=name)


def session(
    block: ClientBlock,
    route: Route,
    cfg: Any,
    ops: Mapping[str, Op],
    *,
    least: int | None = None,
    returned: Callable[[], Mapping[str, Peer]] = dict,
    patience: float = 0.0,
    seconds: float | None = None,
    program: Program | None = None,
    most_work: Callable[[Mapping[str, int]], WorkBound | None] | None = None,
    secure: SecureSums | None = None,
) -> tuple[Session, dict[str, DirectLink]]:
    """Return a session of workers, one for each client of the block, and their links."""
    own_blocks = [block.take(torch.tensor([c])) for c in range(block.num_clients)]
    links = {
        name: DirectLink(
            worker_of(
                own,
                cfg,
                ops,
                program=program,
                secure=secure,
                masked_rows=None if secure is None else row_names(block, route, c),
            )
        )
        for c, (name, own) in enumerate(zip(block.ids, own_blocks, strict=True))
    }
    peers = {name: Peer(name, link, TOKEN) for name, link in links.items()}
    for peer in peers.values():
        peer.ask(Type.START, {}, None)
    least = len(links) if least is None else least
    parts = {name: block.take(torch.tensor([c])) for c, name in enumerate(block.ids)}
    reported = {} if most_work is None else {name: nodes_of(part) for name, part in parts.items()}
    fed = Session(
        peers,
        route,
        ops,
        course_of(program),
        dtype=extent_of(block).dtype,
        limits=Limits(
            least,
            seconds,
            patience,
            secure=secure is not None,
            most_work=most_work or (lambda _: None),
        ),
        returned=returned,
        nodes=reported,
    )
    return fed, links


def row_names(block: ClientBlock, route: Route, client: int) -> RowNames:
    """Return what a client of a block knows of the rows that it exchanges."""
    first, last = route.boundary_off[client : client + 2].tolist()
    owner = torch.searchsorted(route.boundary_off, route.target, right=True) - 1
    holder = owners(route.slot_off)
    links = zip(route.target.tolist(), holder.tolist(), strict=True)
    own_slots = slice(*route.slot_off[client : client + 2].tolist())
    return RowNames.of(
        route.target[own_slots].numpy(),
        tuple(block.ids[c] for c in owner[own_slots].tolist()),
        torch.arange(first, last).numpy(),
        [(row - first, block.ids[c]) for row, c in links if first <= row < last],
    )


@contextmanager
def shares_of_work() -> Iterator[list[float]]:
    """Inside, the work of each reply is noted as a share of its bound, which it must have."""
    found: list[float] = []
    check_work = engine.check_work  # the original: the patch below replaces it in this module

    def checked(meter: Meter, seconds: float, most: float | None = None) -> None:
        assert most is not None
        found.append(sum(float(m.flops.sum()) for m in (meter, *meter.apart.values())) / most)
        check_work(meter, seconds, most)

    with patch.object(engine, "check_work", checked):
        yield found


def table(*ops: Op) -> dict[str, Op]:
    """The closed table of some ops."""
    return {qualified(op): op for op in ops}


def facts(**values: Any) -> bytes:
    return facts_body(values)
