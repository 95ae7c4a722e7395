"""Where silos attach: a gRPC server with one method, a stream a silo.

A silo says who it is, signs what the server asks, and is registered or refused with one line. Then
its stream is a `Link`. A silo whose stream has ended attaches anew with the same key.
"""

import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from threading import Timer
from typing import Any

import grpc

from silograph.core.errors import (
    ConfigError,
    DataError,
    FrameError,
    ProtocolError,
    mistake,
    reword_error,
)
from silograph.federation.frame import decode
from silograph.federation.matching import (
    NONCE_BYTES,
    Agreement,
    Disagreement,
    Hello,
    from_payload,
    match,
)
from silograph.federation.session.events import Cause, Event, EventCallback, What, log_event
from silograph.federation.session.identity import (
    NAME,
    Register,
    check_pair,
    hosts_of,
    is_host_of,
    is_signed,
    signed_text,
)
from silograph.federation.session.message import (
    NO_TOKEN,
    Message,
    Type,
    explain_body,
    facts_body,
    pack,
    read_message,
)
from silograph.federation.session.peer import MOST_HELLO, Arrived, LostError, Peer, one_line
from silograph.federation.session.responder import HELLO
from silograph.federation.session.wire import (
    ATTACH,
    OPTIONS,
    SERVICE,
    SHORT,
    check_plaintext,
    cut,
    join_address,
    split_address,
    whole,
)
from silograph.graph.block.block import Route

# --- greeting ------------------------------------------------------------------------------------
# Streams of which nobody knows yet whose they are: how many may wait, and who makes room.
#
# An honest silo says who it is at once and signs as soon as it is asked. So where streams wait in
# excess it is the one that has waited longest that is ended, of the address that has most of them:
# who opens many and says nothing keeps nobody out.


WAITING = 16  # streams that may be greeted at the same time, besides one of each known key
FROM_ONE = 8  # of them from one address


@dataclass(eq=False)
class Place:
    """A place for a stream during its handshake.

    Attributes:
        address: of its other end, without the port.
        end: ends the stream.
        key: the key that the stream claims, if this is the place reserved for that key.
    """

    address: str
    end: Callable[[], object]
    key: bytes | None = None


class Handshakes:
    """The streams in their handshakes; used by one thread for each stream.

    Args:
        known: public keys of silos by name; one place is reserved for each.
    """

    def __init__(self, known_keys: Callable[[], Mapping[str, bytes]]) -> None:
        self._known_keys = known_keys
        self._lock = threading.Lock()
        self._places: list[Place] = []  # who came first is first

    @contextmanager
    def place(self, peer: str, end: Callable[[], object]) -> Iterator[Place]:
        """Hold a place for a stream; another stream may be ended for it.

        Args:
            peer: address and port of its other end, as gRPC names them.
            end: ends the stream.
        """
        place = Place(peer.rpartition(":")[0], end)
        with self._lock:
            last = self._excess(place.address)
            if last is not None:
                self._places.remove(last)
            self._places.append(place)
        if last is not None:
            last.end()
        try:
            yield place
        finally:
            with self._lock:
                if place in self._places:
                    self._places.remove(place)

    def claim(self, place: Place, key: object) -> None:
        """Give a stream the place that is reserved for the key that it claims, if it is free."""
        with self._lock:
            registered = {public.hex(): public for public in self._known_keys().values()}
            pending_keys = {other.key for other in self._places}
            public = registered.get(key) if isinstance(key, str) else None
            if public not in pending_keys:
                place.key = public

    def _excess(self, address: str) -> Place | None:
        """Return the stream to end for one more stream from an address, None if there is room."""
        waiting = [place for place in self._places if place.key is None]
        by_address = Counter(place.address for place in waiting)
        if by_address[address] < FROM_ONE:
            if len(waiting) < WAITING:
                return None
            address = max(by_address, key=lambda each: by_address[each])
        return next(place for place in waiting if place.address == address)


HANDSHAKE_SECONDS = 10.0  # a stream that has not said who it is by then is ended
SPARE = 8  # streams that are just being ended
QUEUE = 1000  # streams that wait for a thread, which is for milliseconds
UNREAD = 2  # messages of a silo that may wait: it is asked one thing at a time
LONGEST_HANDSHAKE = SHORT  # bytes
PROTOCOL = 3
Stream = Iterator[bytes]
MOST_PROCESSES = 100  # of a silo that are remembered: one for each time it was started


class StreamLink:
    """A silo's stream as queues: the engine uses `send` and `receive`, the hub all else.

    Args:
        on_arrival: called for every message with its bytes, and whether it is too late.
    """

    def __init__(self, on_arrival: Callable[[int, bool], None]) -> None:
        self._on_arrival = on_arrival
        self._to_send: SimpleQueue[bytes | None] = SimpleQueue()
        self._arrived: SimpleQueue[Arrived | LostError | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._owed_sizes: deque[int] = deque(maxlen=2 * UNREAD)  # longest answers to what was asked
        self._closed = False
        self._is_ended = False
        self.alive = True  # until the silo's end of the stream has ended

    def send(self, data: bytes, most: int) -> None:
        """Queue a message; see `Link`."""
        with self._lock:
            self._owed_sizes.append(most)
        self._to_send.put(data)

    def _most(self, size: int) -> int:
        """Return the bytes of the longest message that the silo may send."""
        del size
        with self._lock:
            return max(self._owed_sizes, default=0)

    def receive(self, seconds: float | None) -> Arrived:
        """Return the next message; see `Link`."""
        try:
            answer = None if self._closed else self._arrived.get(timeout=seconds)
        except Empty:
            line = f"expected an answer within {seconds:g} s, got none"
            raise LostError(line, Cause.LATE) from None
        if isinstance(answer, LostError):
            self._closed = True
            raise answer
        if answer is None:
            self._closed = True
            line = "expected an answer, got the end of the stream: it is gone"
            raise LostError(line, Cause.GONE)
        return answer

    def close(self) -> None:
        """End the stream."""
        self._is_ended = True
        self._to_send.put(None)

    def pending_messages(self) -> Stream:
        """Yield the messages to send, until the stream ends."""
        return cut(iter(self._to_send.get, None))

    def pump(self, requests: Stream) -> None:
        """Queue received messages until the stream ends or sends one without a request."""
        loss = None
        try:
            for data in whole(requests, self._most):
                self._on_arrival(len(data), self._is_ended)
                if self._is_ended:
                    continue
                if self._arrived.qsize() == UNREAD:  # else it could fill the server's memory
                    break
                with self._lock:
                    if self._owed_sizes:
                        self._owed_sizes.popleft()
                self._arrived.put(Arrived(data, time.monotonic()))
        except FrameError as error:
            loss = LostError(str(error))
        except Exception:  # gRPC's own classes, and whatever a broken stream raises
            loss = None
        self.alive = False
        self._arrived.put(loss)
        self._to_send.put(None)


@dataclass(frozen=True, eq=False)
class Joined:
    """A silo that has attached.

    Attributes:
        name: of the silo.
        facts: its versions and data.
        link: its stream.
        peer: the same for the engine.
    """

    name: str
    facts: Mapping[str, Any]
    link: StreamLink
    peer: Peer


class Hub:
    """Listens for silos.

    Args:
        address: HOST:PORT; port 0 takes a free one.
        register: who may attach.
        token: of the run.
        credentials: certificate chain and private key of the server, PEM; None is without TLS,
            on this machine only.
        room: silos of the run.
        report: gets the events.

    Raises:
        ConfigError: the address cannot be used, or would need TLS.
    """

    def __init__(
        self,
        address: str,
        register: Register,
        token: bytes,
        credentials: tuple[bytes, bytes] | None,
        room: int,
        report: EventCallback = log_event,
    ) -> None:
        host, port = split_address(address, "listen")
        self._register = register
        self._token = token
        self._report = report
        self._lock = threading.Lock()
        self._joined: SimpleQueue[Joined] = SimpleQueue()
        # By silo: its stream, gRPC's context of it, and the key that it has attached with.
        self._streams: dict[str, tuple[StreamLink, Any, bytes]] = {}
        self._processes: dict[str, list[str]] = {}  # of each silo, in the order of their coming
        self._duplicate_processes: set[str] = set()
        self._handshakes = Handshakes(lambda: dict(register.keys))
        streams = 3 * room + WAITING + FROM_ONE + SPARE  # attached, and one in reserve for a key
        self._server = grpc.server(
            ThreadPoolExecutor(streams, "silo"),
            options=OPTIONS,
            maximum_concurrent_rpcs=streams + QUEUE,
        )
        handler = grpc.stream_stream_rpc_method_handler(self._attach)
        generic = grpc.method_handlers_generic_handler(SERVICE, {ATTACH: handler})
        self._server.add_generic_rpc_handlers((generic,))
        at = join_address(host, port)
        self._hosts: tuple[str, ...] = ()  # of the server's certificate; none without TLS
        if credentials is not None:
            check_pair(*credentials)
            self._hosts = hosts_of(credentials[0])
        try:
            if credentials is None:
                check_plaintext(host)
                self.port = self._server.add_insecure_port(at)
            else:
                chain, key = credentials
                secure = grpc.ssl_server_credentials([(key, chain)])
                self.port = self._server.add_secure_port(at, secure)
        except RuntimeError:
            self.port = 0
        if not self.port:
            raise ConfigError(
                f"listen: expected a free address, got {address}: it is in use, or not of this "
                "machine",
                **mistake("option-value", "listen", address),
            )
        self.address = join_address(host, self.port)
        self._server.start()

    def next(self, seconds: float) -> Joined | None:
        """Return the next silo that attaches, None if none does in time."""
        try:
            return self._joined.get(timeout=seconds)
        except Empty:
            return None

    def returned(self) -> list[Joined]:
        """Return the silos that have attached since, the last stream of each."""
        joined_by_name: dict[str, Joined] = {}
        while not self._joined.empty():
            joined = self._joined.get()
            joined_by_name[joined.name] = joined
        return list(joined_by_name.values())

    def end_replaced(self) -> list[str]:
        """End the streams of silos whose key was replaced or revoked, and return their names."""
        with self._lock:
            ended = {
                name: stream
                for name, stream in self._streams.items()
                if stream[0].alive and not self._register.is_current(name, stream[2])
            }
        for link, context, _ in ended.values():
            link.close()
            context.cancel()
        return list(ended)

    def close(self) -> None:
        """Stop listening and end all streams."""
        with self._lock:
            streams = list(self._streams.values())
        for link, *_ in streams:
            link.close()
        self._server.stop(grace=1).wait()

    def _attach(self, requests: Stream, context: Any) -> Iterator[bytes]:
        """Serve one stream: greet the silo, then carry messages."""
        timer = Timer(HANDSHAKE_SECONDS, context.cancel)
        timer.daemon = True
        timer.start()
        try:
            with self._handshakes.place(context.peer(), context.cancel) as place:
                outcome = yield from self._do_handshake(requests, context, place)
                if outcome is None:
                    return
                if isinstance(outcome, str):
                    yield self._message(Type.REFUSED, {"reason": outcome})
                    return
                link = self._accept_stream(outcome, requests, context)
                yield self._message(Type.WELCOME, {})
        finally:  # not before the last word is out: who reads nothing must not keep a thread
            timer.cancel()
        yield from link.pending_messages()

    def _do_handshake(
        self, requests: Stream, context: Any, place: Place
    ) -> Generator[bytes, None, Mapping[str, Any] | str | None]:
        """Do the handshake; return the facts of a silo, or the reason why it may not attach.

        None if the other end is no silo.
        """
        try:
            nonce = secrets.token_bytes(32)
            hello = _next(requests, Type.HELLO, NO_TOKEN).facts()
            self._handshakes.claim(place, hello.get("key"))
            yield self._message(Type.CHALLENGE, {"nonce": nonce.hex(), "protocol": PROTOCOL})
            proof = _next(requests, Type.PROOF, self._token).facts()
        except (ProtocolError, StopIteration, grpc.RpcError) as error:
            self._report(Event(What.STRANGER, address=context.peer(), reason=one_line(error)))
            return None
        reason = self._refusal(hello, proof, nonce)
        if reason is None:
            reason = self._find_duplicate_process(hello)
        if reason is None:
            return hello
        who, why = _text(hello.get("name"))[:80], one_line(reason)
        self._report(Event(What.REFUSED, who, address=context.peer(), reason=why))
        return why

    def _find_duplicate_process(self, hello: Mapping[str, Any]) -> str | None:
        """Return why a process may not attach: another one with its key was there before it.

        A silo that was started anew has another process, too, but the one before it is not alive
        then. So a process that comes back after another one has taken its place tells that there
        are two: the later one has to go, for the earlier one has the silo's state.
        """
        name, process = str(hello["name"]), _text(hello.get("process"))
        line = (
            f"a second process uses the key of {name}: the one that was there first goes on; stop "
            "one of them, or give each silo its own key"
        )
        with self._lock:
            processes = self._processes.setdefault(name, [])
            if process in self._duplicate_processes:
                return line
            if process in processes[:-1]:
                self._duplicate_processes |= set(processes[processes.index(process) + 1 :])
                del processes[processes.index(process) + 1 :]
                self._report(Event(What.NOTE, name, note=line))
            elif process not in processes:
                self._processes[name] = [*processes, process][-MOST_PROCESSES:]
        return None

    def _accept_stream(
        self, hello: Mapping[str, Any], requests: Stream, context: Any
    ) -> StreamLink:
        """Accept a silo's stream; an earlier one of the silo is ended."""
        name = str(hello["name"])
        link = StreamLink(partial(self._report_arrival, name))
        self._report(Event(What.ATTACHED, name))
        threading.Thread(target=link.pump, args=(requests,), daemon=True).start()
        with self._lock:  # streams of one silo are told of in their order
            before = self._streams.get(name)
            self._streams[name] = link, context, bytes.fromhex(str(hello["key"]))
            self._joined.put(
                Joined(name, hello, link, Peer(name, link, self._token))
            )  # whoever is welcome is known to be there
        if before is not None:
            before[0].close()
            before[1].cancel()  # it may be stuck in a message that nobody reads
        return link

    def _report_arrival(self, name: str, size: int, is_late: bool) -> None:
        what = What.DISCARDED if is_late else What.ANSWERED
        self._report(Event(what, name, bytes=size))

    def _message(self, kind: Type, facts: Mapping[str, Any]) -> bytes:
        return pack(Message(kind, self._token, 0, facts_body(facts)))

    def _refusal(
        self, hello: Mapping[str, Any], proof: Mapping[str, Any], nonce: bytes
    ) -> str | None:
        """Return why a silo may not attach, or None; all that it sends is checked."""
        name, protocol = hello.get("name"), hello.get("protocol")
        if not isinstance(name, str) or NAME.fullmatch(name) is None:
            return f"expected a silo's name, got {_text(name)[:80]!r}"
        try:
            public, signature = bytes.fromhex(hello["key"]), bytes.fromhex(proof["signature"])
        except (KeyError, TypeError, ValueError):
            return "expected a key and a signature in hexadecimal, got others"
        if protocol != PROTOCOL:
            return (
                f"expected protocol {PROTOCOL}, got {_text(protocol)}: use the same version of "
                "silograph at server and silos"
            )
        host = proof.get("host")
        if not isinstance(host, str) or not is_host_of(host, self._hosts):
            own = ", ".join(self._hosts) or "a server without TLS"
            return (
                f"expected a silo that attaches to {own}, got one that attaches to "
                f"{_text(host)[:80]!r}: give its --server by a name of the server's certificate"
            )
        if not is_signed(public, signature, signed_text(self._token, nonce, name, host)):
            return "expected a signature of the silo's own key, got another"
        with self._lock:
            return self._register.refusal(name, public)


def _next(requests: Stream, kind: Type, token: bytes) -> Message:
    data = next(requests)
    if len(data) > LONGEST_HANDSHAKE:
        raise FrameError(
            f"expected a message of the handshake of at most {LONGEST_HANDSHAKE} bytes, got "
            f"{len(data)}"
        )
    message = read_message(data, token, 0)
    message.check_type(kind)
    return message


def _text(value: object) -> str:
    """Return a value from a stranger as one line; nested values are not shown."""
    return one_line(value) if isinstance(value, str | int) else "something else"


# --- Before training: silos show themselves, and the server finds out who answers for what -------


Rejoin = Callable[[Peer, LostError], Peer]


def ask_all(
    peers: dict[str, Peer],
    request: tuple[Type, Mapping[str, Any], int],
    answer: Type,
    seconds: float | None,
    rejoin: Rejoin,
) -> Iterator[tuple[str, bytes | memoryview]]:
    """Ask all silos at the same time, and yield the name and the answer of each, in order.

    A silo whose stream ends is asked again on its next one, which takes its place in `peers`.

    Args:
        peers: the silos, by name.
        request: type, facts, and the most bytes that an answer may have.
        answer: type of the answers.
        seconds: how long each may take; None: as long as its stream is there.
        rejoin: called with a silo whose stream has ended, and why; returns its next stream, or
            raises.

    Raises:
        LostError: a silo refuses, is late, or sends an invalid answer.
    """
    kind, facts, most = request
    for peer in peers.values():
        peer.send(kind, facts_body(facts), most)
    for name in peers:
        while True:
            try:
                body = peers[name].answer(answer, seconds)
            except LostError as error:
                if error.cause is not Cause.GONE:
                    raise LostError(f"{name}: {error}", error.cause) from None
                peers[name] = rejoin(peers[name], error)
                peers[name].send(kind, facts_body(facts), most)
            else:
                yield name, body
                break


def agree(peers: dict[str, Peer], seconds: float | None, rejoin: Rejoin) -> tuple[Agreement, Route]:
    """Match features, labels and edges of the silos, in the federation's order.

    Args:
        peers: the silos; see `ask_all`.
        seconds: how long each answer may take; None: as long as the stream is there.
        rejoin: see `ask_all`.

    Raises:
        DataError: they do not; where it is edges, the silo itself has told its people which.
        ProtocolError: a silo does not answer, or shows what no data can give.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    request = Type.JOIN, {"nonce": nonce.hex()}, MOST_HELLO
    answers = ask_all(peers, request, Type.JOINED, seconds, rejoin)
    result = match([_hello(name, body) for name, body in answers])
    if result.route is None:
        for each in result.disagreements:
            _explain(peers[each.silo], nonce, each, seconds)
        first = result.disagreements[0]
        raise DataError(
            f"{first}: {first.silo} itself says which, where it was started",
            **mistake("silos-disagree", "edges", first.silo, first.other),
        )
    return result, result.route


def _hello(name: str, body: bytes | memoryview) -> Hello:
    try:
        envelope, payload = decode(body)
        if envelope != HELLO:
            raise ProtocolError(f"expected the hello of a silo, got a frame of {envelope.op}")
        hello_message = from_payload(payload)
    except ProtocolError as error:
        raise reword_error(error, f"{name}: {error}", ProtocolError) from None
    return replace(hello_message, name=name)  # the one that it has proved to be


def _explain(peer: Peer, nonce: bytes, about: Disagreement, seconds: float | None) -> None:
    names = {"silo": about.silo, "other": about.other}
    facts = {"nonce": nonce.hex(), **names, "absent": about.absent}
    try:
        peer.send(Type.EXPLAIN, explain_body(facts, about.tags))
        peer.answer(Type.DONE, seconds)
    except LostError:  # what is wrong is told all the same
        return


# --- The last words of a server: the run is over, or the server stops and may continue it --------


GOODBYE_SECONDS = 10.0


def say_goodbye(
    peers: Mapping[str, Peer], reason: str | None, report: EventCallback = log_event
) -> None:
    """Tell silos how the run ended, and end their streams.

    Args:
        peers: the silos.
        reason: why the run failed, empty where it did not; None: the server stops, and the run may
            be continued.
        report: gets the events.
    """
    kind, facts = (Type.STOPPING, {}) if reason is None else (Type.END, {"reason": reason})
    for peer in peers.values():
        peer.send(kind, facts_body(facts))
    for peer in peers.values():
        try:
            _last_answer(peer)
        except LostError as error:
            report(Event(What.UNHEARD, peer.name, reason=str(error)))
        peer.close()


def _last_answer(peer: Peer) -> None:
    """Take the last answer, and before it the one that a silo in the midst of a call owes."""
    try:
        peer.answer(Type.DONE, GOODBYE_SECONDS)
    except LostError as error:
        if error.cause is not Cause.GARBAGE:
            raise
        peer.answer(Type.DONE, GOODBYE_SECONDS)
