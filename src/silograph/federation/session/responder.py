"""The silo's half of a session, without the network: messages in, answers out.

A worker holds the silo's block and state. It takes messages in their order only, does what the
program of the run that it has agreed to has next and nothing else (`silograph.federation.program`),
and tells the server one line where it refuses; the rest is for its own log.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from silograph.core.errors import (
    AbsentError,
    FrameError,
    OpError,
    PolicyError,
    ProtocolError,
    SilographError,
    mistake,
    reword_error,
)
from silograph.core.kinds import Kind
from silograph.core.payload import Field, State, moved, state_of
from silograph.core.work import Meter, metered
from silograph.federation.base import Op
from silograph.federation.check import of_round, run_op
from silograph.federation.frame import RESULT, Envelope, decode, encode
from silograph.federation.matching import NONCE_BYTES, Disagreement, to_payload
from silograph.federation.privacy.release import check_release, is_noised
from silograph.federation.program import (
    BLANK,
    Call,
    ScoredWeights,
    ScoringRules,
)
from silograph.federation.secure.revealed import RevealedError
from silograph.federation.secure.sums import SumError
from silograph.federation.session.audit import Audit, digest_of
from silograph.federation.session.events import Event, EventCallback, What, log_event
from silograph.federation.session.message import (
    MAX_FACTS,
    CallBody,
    Message,
    Type,
    check_size,
    facts_body,
    op_of,
    pack,
    read_call,
    read_explain,
    read_message,
    reply_body,
)
from silograph.federation.session.peer import LongestCall, one_line
from silograph.federation.session.signed_heads import read_heads
from silograph.federation.session.silo_data import (
    NO_BOUNDS,
    Outcome,
    Prepared,
    SendingBounds,
    SiloData,
    run_name,
)
from silograph.federation.session.state_store import StateStore

if TYPE_CHECKING:
    from silograph.federation.secure.row_masks import RowMasker
    from silograph.federation.session.summed_reply import SummedReply

# --- What a server's messages of facts say, read and checked -------------------------------------


def nonce_of(facts: Mapping[str, Any]) -> bytes:
    """Return the nonce that a message gives; raise `FrameError` where it has none."""
    try:
        nonce = bytes.fromhex(str(facts.get("nonce")))
    except ValueError:
        nonce = b""
    if len(nonce) != NONCE_BYTES:
        raise FrameError(f"expected a nonce of {NONCE_BYTES} bytes, got {len(nonce)}")
    return nonce


def difference(known_facts: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Return the first key in which two configs differ."""
    for part in sorted(known_facts.keys() | facts.keys()):
        one, other = known_facts.get(part), facts.get(part)
        if isinstance(one, dict) and isinstance(other, dict) and one != other:
            return min(str(k) for k in one.keys() | other.keys() if one.get(k) != other.get(k))
        if one != other:
            return part
    return "config"


def number_of(message: Message) -> int:
    """Return the number of a round that a message gives; raise `FrameError` where it has none."""
    number = message.facts().get("round")
    if type(number) is not int or number < BLANK:  # true is an int, too
        raise FrameError(f"expected the number of a round, got {number!r}")
    return number


def read_committed_rounds(message: Message) -> list[int]:
    """Return the rounds that the server holds; raise `FrameError` where a message has none."""
    rounds = message.facts().get("committed")
    if not isinstance(rounds, list) or not all(type(n) is int and n >= 0 for n in rounds):
        raise FrameError(f"expected the rounds that the server holds, got {rounds!r}")
    return rounds


def complaint_of(error: Exception) -> dict[str, Any]:
    """Return what the server may act on of a refusal in a secure sum: who or what is wrong."""
    if isinstance(error, RevealedError):
        return {"revealed": sorted(error.revealed)}
    silo = error.fields["silo"] if isinstance(error, SumError) else ""
    return {"silo": silo} if silo else {}


HELLO = Envelope("hello", Kind.HALO_KEYS, 0, 0)
MOST_EXPLAINED = 1000  # silos that one silo has edges to
MOST_REFUSALS = 10_000  # of a process; an honest server gets a few
LAST_TYPES = (Type.END, Type.STOPPING)
MOST_COMMITTED = 4  # rounds that a server holds checkpoints of, and the best one


class Responder:
    """Answers the messages of one run.

    Args:
        token: of the run; other messages are refused.
        ops: by qualified name.
        data: the silo's data.
        store: where states are kept.
        report: gets the events; the server gets fewer details.
        name: of the silo, for what is reported.
        audit: records everything that leaves; without a file it counts only.
        bounds: of what may leave.
    """

    def __init__(
        self,
        token: bytes,
        ops: Mapping[str, Op],
        data: SiloData,
        store: StateStore,
        report: EventCallback = log_event,
        name: str | None = None,
        audit: Audit | None = None,
        bounds: SendingBounds = NO_BOUNDS,
    ) -> None:
        self._token = token
        self.audit = (audit or Audit()).of_run(run_name(token))
        self._bounds = bounds
        self._ops = ops
        self._data = data
        self._store = store
        self._report = report
        self._name = name
        self._prepared: Prepared | None = None
        self._facts: Mapping[str, Any] = {}  # that it was prepared from
        self._joined: bytes | None = None  # nonce of the JOIN of this stream
        self._refusals = 0
        self._hello_size = 0  # bytes of the answer to JOIN, whose tags may come back
        self._longest: LongestCall | None = None
        self._scored = ScoredWeights(ScoringRules())
        self._explained = 0  # edges explained, in all streams: each is a line of the log
        self._started = False  # in this stream
        self._state: State = {}
        self._round = BLANK  # the last one that it was called in
        self._summed: SummedReply | None = None  # the reply to the last call, if it is summed
        self._row_masking: RowMasker | None = None  # masks rows, in runs with secure aggregation
        self._sequence = 0
        self._current_op = ""  # the op, or the type of the message
        self.ended: str | None = None  # why the run is over, once it is
        self.stopped = False  # the server was stopped, in this stream
        self._is_over = False  # the result has come, in this stream
        self._is_stored = False  # all of it is written down, in any stream: states may go

    @property
    def has_agreed(self) -> bool:
        """Whether the silo has agreed to this run."""
        return self._prepared is not None

    def most(self, size: int) -> int:
        """Return the bytes of the longest message that the server may send; see `chunks.whole`."""
        if self._longest is None or not self._started:
            return MAX_FACTS + self._hello_size
        return self._longest.most(size, self._round, self._state)

    def attach(self) -> None:
        """Begin a new stream: the server counts its messages from 1 again."""
        self._sequence = 0
        self._joined, self._started = None, False
        self.stopped, self._is_over = False, False

    def answer(self, data: bytes | bytearray) -> bytes:
        """Return the answer to a message.

        Raises:
            FrameError: it is no message of this run, or not the next one: the stream is unusable.
        """
        message = read_message(data, self._token, self._sequence + 1)
        if self.ended is not None:
            raise FrameError("expected nothing after the end of the run, got another message")
        if self.stopped:
            raise FrameError("expected nothing after STOPPING, got another message")
        self._sequence += 1
        self._current_op = message.type.name.lower()
        try:
            try:
                kind, body, *frames = self._do(message)
            except PolicyError:
                raise
            except Exception as error:
                reason = {"reason": self._refuse(error)}
                kind, body = Type.REFUSED, facts_body({**reason, **complaint_of(error)})
                frames = []
        except PolicyError as error:  # the silo's part in the run is over; states stay
            self.ended = one_line(error)
            with suppress(PolicyError):  # where the file cannot be written, the log has it
                self.audit.record_refusal(self.ended)
            self._report(Event(What.DECLINED, self._name, self._round, reason=self.ended))
            kind, body, frames = Type.REFUSED, facts_body({"reason": self.ended}), []
        return pack(Message(kind, self._token, message.sequence, body), *frames)

    def _refuse(self, error: Exception) -> str:
        """Record and report why a request is not done; return the reason for the server.

        Of code that failed the server learns the type of the exception only.

        Raises:
            PolicyError: the refusal cannot be written down, or there were too many.
        """
        if isinstance(error, SilographError) and not isinstance(error, OpError):
            reason = one_line(error)  # it may quote what the server has sent
            self.audit.record_refusal(reason)
            self._count_line()
            self._report(Event(What.DECLINED, self._name, self._round, reason=reason))
            return reason
        what = type(error.__cause__ if isinstance(error, OpError) else error).__name__
        op = self._current_op
        self._report(Event(What.FAILED, self._name, self._round, op=op, reason=what))
        self.audit.record_refusal(f"{op} failed: {what}")
        self._count_line()
        return f"{what} at the silo: its log says more"

    def _count_line(self) -> None:
        """Count lines in the log that a server can cause at will."""
        self._refusals += 1
        if self._refusals == MOST_REFUSALS:
            raise PolicyError(
                f"expected what was agreed, got {MOST_REFUSALS:,} requests that were refused, "
                "failed or told of a dismissal: the silo leaves the run"
            )

    def _do(self, message: Message) -> tuple[Type, bytes, *tuple[bytes, ...]]:
        if self._is_over and message.type not in (*LAST_TYPES, Type.HEAD, Type.HEADS):
            raise ProtocolError(f"expected END after RESULT, got {message.type.name}")
        match message.type:
            case Type.CALL:
                return Type.REPLY, *self._call(read_call(message.body))
            case Type.SHARE | Type.MASK | Type.CONFIRM | Type.UNMASK:
                return Type.SUMMED, self._take_step(message)
            case Type.JOIN:
                return Type.JOINED, self._join(nonce_of(message.facts()))
            case Type.EXPLAIN:
                self._explain(message)
            case Type.START:
                nodes = dict(self._start(message.facts()).nodes)
                return Type.DONE, facts_body({"nodes": nodes} if nodes else {})
            case Type.KEEP:
                self._keep(number_of(message), read_committed_rounds(message))
            case Type.LOAD:
                self._load(number_of(message))
            case Type.DISMISSED:
                reason = one_line(message.facts().get("reason"))
                self._count_line()
                self._report(Event(What.DISMISSED, self._name, self._round, reason=reason))
            case Type.RESULT:
                self._finish(message.body)
            case Type.HEAD:
                if self._require_start("HEAD").private is not None:
                    raise ProtocolError(
                        "a silo does not send its audit head in a run with differential privacy: "
                        "run the server without --share-audit-heads"
                    )
                return Type.DONE, facts_body(self.audit.sign_head())
            case Type.HEADS:
                self._require_start("HEADS")
                self.audit.record_heads(read_heads(message.facts()))
            case Type.STOPPING:  # states and what was agreed stay, as after a crash
                self.stopped = True
            case Type.END:
                self.ended = one_line(message.facts().get("reason", ""))
                # States are deleted unless they may hold the only model.
                if not self.ended and self._is_stored:
                    self._store.drop()
                elif not self.ended and self.has_agreed:
                    self.audit.states_stay()
            case _:
                raise ProtocolError(f"expected a request, got {message.type.name}")
        return Type.DONE, facts_body({})

    def _join(self, nonce: bytes) -> bytes:
        """Return the silo's hello, once for each stream and before any other answer."""
        if self._joined is not None or self._started:
            raise ProtocolError("expected JOIN once, before START, got it again")
        self._joined = nonce
        frame = encode(HELLO, to_payload(self._data.hello(nonce)), 0)
        self._bounds.check_size(self.audit.sent, len(frame))
        self.audit.record_hello(frame)
        self._hello_size = len(frame)
        return frame

    def _explain(self, message: Message) -> None:
        facts, tags = read_explain(message.body)
        try:
            names = str(facts["silo"]), str(facts["other"])
            about = Disagreement(*names, tags, facts["absent"] is True)
        except KeyError:
            raise FrameError("expected edges to explain, got something else") from None
        if nonce_of(facts) != self._joined or self._started or self._explained == MOST_EXPLAINED:
            raise ProtocolError("expected EXPLAIN between JOIN and START, with the nonce of JOIN")
        self._explained += 1
        self._data.explain(self._joined, about)

    def _start(self, facts: Mapping[str, Any]) -> Prepared:
        """Agree to the run, once: prepare it, and write the agreement down before anything else."""
        if self._started:
            raise ProtocolError("expected START once, got it again")
        known_facts = self._facts if self._prepared is not None else self._store.agreed()
        if known_facts is not None and facts != known_facts:
            raise ProtocolError(
                "expected the run that this silo has agreed to, got one of another "
                f"{difference(known_facts, facts)}: start the silo anew for another run"
            )
        prepared = self._prepared
        if prepared is None:
            digest = digest_of(facts_body(facts))
            self.audit.check_again(digest)
            prepared = self._data.prepare(facts, self.audit)
            self._store.agree(facts)  # before anything here knows of the agreement
            self.audit.record_agreement({"config": digest, **prepared.agreed})
            self._prepared, self._facts = prepared, facts
            if prepared.secure is not None and prepared.rows is not None:
                from silograph.federation.secure.row_masks import RowMasker  # needs cryptography

                self._row_masking = RowMasker(
                    self._name or "",
                    prepared.secure,
                    self._token,
                    prepared.rows,
                    self._store.row_sets(),
                )
            self._scored = ScoredWeights(prepared.course.program.scoring)
            self._longest = LongestCall(prepared.course.program, prepared.extent)
            self._report(Event(What.AGREED, self._name, note=prepared.note))
            for line in prepared.plan:
                self._report(Event(What.NOTE, self._name, note=line))
        self._started = True
        return prepared

    def _require_start(self, what: str) -> Prepared:
        if self._prepared is None or not self._started:
            raise ProtocolError(f"expected START before {what}, got none")
        return self._prepared

    def _keep(self, number: int, committed: Sequence[int]) -> None:
        """Store the state after a round that is over."""
        prepared = self._require_start("KEEP")
        prepared.course.check_number(number)
        is_allowed = len(committed) <= MOST_COMMITTED and max(committed, default=0) <= number
        if number < self._round or not is_allowed:
            raise ProtocolError(
                f"expected a round from {self._round} on to keep, beside at most {MOST_COMMITTED} "
                f"earlier ones, got {number} beside {len(committed)}"
            )
        prepared.course.check_whole()
        try:
            prepared.course.check_state(self._state, prepared.extent)
        except ProtocolError as error:  # it would be refused as well where it is read again
            raise reword_error(
                error, f"{error}: round {number} is not saved", ProtocolError
            ) from None
        self._store.keep(number, self._state, committed)
        self.audit.round_over()

    def _finish(self, frame: bytes | memoryview) -> None:
        """Store the result of the run."""
        prepared = self._require_start("RESULT")
        envelope, weights = decode(frame)
        if envelope.op != RESULT:
            raise FrameError(f"expected a frame of {RESULT}, got one of {envelope.op}")
        number = envelope.round
        prepared.course.check_result(number, weights, prepared.extent)
        self._is_stored = False  # states stay where this fails
        try:
            state = self._state_of(prepared, number)
        except AbsentError:  # it did not take part in that round
            state = None
        prepared.store_result(Outcome(run_name(self._token), number, weights, state, self._state))
        self._is_over = True
        self._is_stored = state is not None or not prepared.own_model

    def _load(self, number: int) -> None:
        """Restore the state after a round."""
        prepared = self._require_start("LOAD")
        prepared.course.check_number(number)
        if number != self._round or not prepared.course.is_whole:  # else that is where it is
            self._state = self._state_of(prepared, number)
            self._round = number
        prepared.course.jump_to(number)
        self._scored.forget_last()
        self._store.forget_after(number)

    def _state_of(self, prepared: Prepared, number: int) -> State:
        """Return the state after a round, once it is checked.

        Raises:
            AbsentError: it is not there.
            CheckpointError: it is damaged, or of other data.
        """
        state = self._store.load(number)
        if number != BLANK:
            prepared.course.check_state(state, prepared.extent)
        return state_of({name: moved(f, prepared.device) for name, f in state.items()})

    def _call(self, call: CallBody) -> tuple[bytes, bytes]:
        """Run the next call of the program, and return the answer in two parts, as `_run` does.

        Raises:
            ProtocolError: it is not the next one, or not as agreed.
        """
        prepared = self._require_start("the first call")
        course, extent = prepared.course, prepared.extent
        # 1. Check the message against the agreed program.
        op = op_of(self._ops, call.op)
        self._current_op = op.__name__
        envelope, inbox = decode(call.frame)
        if envelope.op != op.__name__:
            raise FrameError(f"expected a frame of {op.__name__}, got one of {envelope.op}")
        agreed_call, after = course.find(envelope.round, op, envelope.kind, call.key)
        if call.rows and not agreed_call.rows:
            raise ProtocolError(
                f"expected a call of {op.__name__} without rows, as agreed",
                **mistake("call-not-agreed", envelope.round),
            )
        if agreed_call.rows and envelope.round > 0 and not prepared.sends_rows:
            raise ProtocolError(
                f"expected no rows of single nodes in a run that this silo agreed to without them, "
                f"got {op.__name__} in round {envelope.round}, whose reply has such rows",
                **mistake("call-not-agreed", envelope.round),
            )
        is_single = bool(agreed_call.reply_specs) and not agreed_call.rows
        if (call.by is None) is (prepared.secure is not None and is_single):
            raise ProtocolError(
                f"expected the reply of {op.__name__} to be summed as agreed, got a call for it in "
                "another form",
                **mistake("call-not-agreed", envelope.round),
            )
        agreed_call.check_inbox(inbox, extent, self._state)
        closes = course.closes(envelope.round, after)
        digest = self._scored.digest(inbox)
        self._scored.check(agreed_call, envelope.round, digest, closes=closes)
        # 2. Do it; the server may not pass over what has failed.
        begins = course.advance(envelope.round, after)
        try:
            if begins:
                self._bounds.check_repeats(self.audit.repeats_with(envelope.round))
            answer = self._run(prepared, call, agreed_call, envelope, inbox, begins=begins)
        except Exception as error:
            course.mark_failed()
            if prepared.private is None or isinstance(error, PolicyError):
                raise
            self._refuse(error)
            raise PolicyError(
                f"a call of {op.__name__} failed. In a run with differential privacy a failure may "
                "reveal data at no charge, so the silo leaves the run; the line before says why",
                **mistake("refused-by-policy", "differential privacy"),
            ) from None
        self._scored.record(agreed_call, envelope.round, digest, closes=closes)
        return answer

    def _run(
        self,
        prepared: Prepared,
        call: CallBody,
        agreed_call: Call,
        envelope: Envelope,
        inbox: Mapping[str, Field],
        *,
        begins: bool,
    ) -> tuple[bytes, bytes]:
        """Run an op, check its reply, write it down, and return the answer.

        Returns:
            The body before the frame, and the frame.
        """
        if envelope.round != self._round:  # the round before is over here
            self._store.remember(self._round, self._state)
            self._round = envelope.round
        began, name = time.monotonic(), envelope.op
        about = Event(What.ASKED, self._name, self._round, op=name, bytes=len(call.frame))
        self._report(about)
        self._summed = None  # a sum that was not finished stays masked
        block = prepared.block if prepared.block_in is None else prepared.block_in(self._state)
        if self._row_masking is not None:
            inbox = self._row_masking.unmask_inbox(agreed_call.inbox_specs, inbox)
        with metered(1) as meter:
            new, reply = run_op(
                agreed_call.op,
                of_round(prepared.cfg, self._round),
                block,
                self._state,
                {field_name: moved(f, prepared.device) for field_name, f in inbox.items()},
                call.key,
                rows=call.rows,
                number=self._round,
                private=True,
            )
        agreed_call.check_reply(inbox, reply, prepared.extent, own=True)
        if self._row_masking is not None:
            reply = self._row_masking.mask_reply(agreed_call.reply_specs, reply, inbox, self._round)
        answer = replace(envelope, kind=agreed_call.reply_kind)
        if prepared.private is not None:
            meter = Meter(1)  # work depends on the data
            check_release(agreed_call.op, agreed_call.reply_kind, reply)
            if is_noised(agreed_call.op) and call.by is None:
                reply = prepared.private.with_noise(answer, inbox, reply)
        sent_envelope, sent = answer, reply
        if call.by is not None:
            assert prepared.secure is not None  # see `_call`
            from silograph.federation.session.summed_reply import SumContext, SummedReply

            name = self._name or ""
            private = prepared.private if is_noised(agreed_call.op) else None
            self._summed = SummedReply(
                SumContext(name, self._token, call.called, prepared.secure, self._store.revealed),
                answer,
                reply,
                call.by,
                inbox,
                private,
            )
            sent_envelope, sent = self._summed.keys()
        frame = encode(sent_envelope, sent, 0)
        head = reply_body(answer.kind, meter, b"")
        check_size(head, frame)
        self._bounds.check(answer.kind, self.audit.sent, len(frame))
        self.audit.record_reply(sent_envelope, sent, frame, begins=begins)
        self._state = new
        seconds = round(time.monotonic() - began, 6)
        about = replace(about, what=What.ANSWERED, bytes=len(frame), seconds=seconds)
        self._report(about)
        return head, frame

    def _take_step(self, message: Message) -> bytes:
        """Take the next step of a secure sum, and return the frame of the answer.

        Raises:
            ProtocolError: there is no sum, or not this step of it.
        """
        self._require_start("a secure sum")
        envelope, payload = decode(message.body)
        self._current_op = envelope.op
        if self._summed is None:
            raise ProtocolError(
                f"expected a call of {envelope.op} that is summed before {message.type.name}, got "
                "none",
                **mistake("call-not-agreed", envelope.round),
            )
        answer, fields = self._summed.answer(message.type, envelope, payload)
        frame = encode(answer, fields, 0)
        self._bounds.check_size(self.audit.sent, len(frame))
        self.audit.record_reply(answer, fields, frame)
        return frame
