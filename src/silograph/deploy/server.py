"""The server of a real federation: waits for its silos, and runs the loop of every run on them."""

import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from silograph.core.config import RunConfig, make_config
from silograph.core.errors import ConfigError, SilographError
from silograph.core.files import describe_exposure
from silograph.core.numeric_state import standard_numerics, torch_threads
from silograph.core.run_file import read_toml
from silograph.core.text import counted
from silograph.deploy.allowed_code import (
    check_declared,
    check_model,
    server_table,
    told_of_code,
)
from silograph.deploy.joined_silos import check_versions, natural, read_nodes, shown_nodes
from silograph.deploy.metrics import Figures
from silograph.deploy.monitoring import Watch, watching
from silograph.deploy.session_file import SESSION, Known, read_known, write_known
from silograph.deploy.start_messages import check_deployable, check_device_name, start_facts
from silograph.deploy.venue import (
    Venue,
    check_update_norm,
    credentials,
    expected_silos,
    known_keys,
)
from silograph.experiment.resolve.client_data import CUT
from silograph.experiment.resolve.exclusions import check_selected
from silograph.experiment.resolve.fitting import sum_specs
from silograph.experiment.resolve.most_work import most_work
from silograph.experiment.resolve.parts import own_code
from silograph.experiment.resolve.resolve import (
    DTYPES,
    can_score_participants,
    choose,
    resolve,
)
from silograph.experiment.resolve.run_program import program_of
from silograph.experiment.resolve.trusted_code import Trust, check_code, check_trusted
from silograph.experiment.resolve.user_code import absolute, is_spec
from silograph.experiment.resolve.varied_parts import without_part
from silograph.experiment.resolve.without_data import resolved_without_data
from silograph.experiment.run.loop import first_snapshot
from silograph.experiment.run.new_folder import check_free
from silograph.experiment.run.progress import Progress
from silograph.experiment.run.result import Result
from silograph.experiment.run.result_folder import ResultFolder
from silograph.experiment.run.run import check_mode, go_on, restored, watched_by
from silograph.experiment.run.setup import Setup
from silograph.experiment.run.snapshot import check_identity, identity
from silograph.experiment.run.trackers import Tracker
from silograph.federation.course import Course
from silograph.federation.session.engine import Session
from silograph.federation.session.events import (
    Event,
    EventCallback,
    StrangerLimit,
    What,
    both,
    log_event,
)
from silograph.federation.session.limits import Limits
from silograph.federation.session.meeting import agree
from silograph.federation.session.message import Type, facts_body
from silograph.federation.session.parting import say_goodbye, say_stopping
from silograph.federation.session.peer import LostError, Peer
from silograph.federation.session.status import Board
from silograph.federation.session.wire import need_packages
from silograph.graph.graph import Schema

if TYPE_CHECKING:
    from silograph.federation.session.hub import Joined

MOST_FAILURES = 3  # of a silo, after which it is left out for good
EVALUATION_MIN_COUNT = 5  # of real silos, unless the config says another
UNKNOWN_KEYS = (
    "the first key that takes a silo's name is accepted (--accept-first-keys): who reaches this "
    "server first can be that silo"
)


@standard_numerics()
def serve(
    config: RunConfig,
    venue: Venue,
    *,
    progress: str | Progress = "none",
    trackers: Sequence[Tracker] = (),
    report: EventCallback = log_event,
) -> Result:
    """Train a federation of silos and return what came of it.

    Args:
        config: of the run; what it says of cuts is not used, and `evaluation_min_count` is 5
            unless it says another.
        venue: where silos attach.
        progress: as in `run`.
        trackers: as in `run`.
        report: told of what happens; the first event names the address.

    Raises:
        SilographError: the config cannot be used, silos do not come or do not fit, or too few
            are left.
    """
    check_mode(progress)
    need_packages()
    config = with_evaluate_clients(with_min_count(with_absolute_code(config)))
    check_run(replace(config, clients=expected_silos(config, venue)[1]), venue)
    check_selected(choose(config))
    config = without_part(config, "partition")  # how a simulation of it cuts its graph
    if config.out is not None:
        check_free(config.out)
    figures = Figures()
    watched = watched_by(config, (figures, *trackers))
    known = Known(secrets.token_bytes(16), {})
    with _met(config, venue, known, progress, figures, report) as (meeting, watch):
        setup = meeting.set_up()
        start = first_snapshot(setup)
        folder = None
        if config.out is not None:
            folder = ResultFolder.create(config.out, setup, config, None)
            folder.expect(SESSION, write_known(folder.path, meeting.known))
            meeting.folder = folder
        with closing(folder) if folder is not None else nullcontext():
            watch.start(start.round)
            return go_on(setup, folder, watch, start, [], watched, watch.say)


@standard_numerics()
def serve_again(
    path: str | os.PathLike[str],
    venue: Venue,
    *,
    trust: Trust = False,
    progress: str | Progress = "none",
    trackers: Sequence[Tracker] = (),
    report: EventCallback = log_event,
) -> Result:
    """Go on with a run of silos whose server was interrupted, as if it had not been.

    Args:
        path: the run's result folder.
        venue: where silos attach: the same ones, with their keys and their states.
        trust: as in `resume`.
        progress: as in `run`.
        trackers: as in `run`.
        report: told of what happens; the first event names the address.

    Raises:
        SilographError: there is no such run, silos do not come, or have other data or no state.
    """
    check_mode(progress)
    need_packages()
    target = Path(path)
    with closing(ResultFolder(target)) as folder:
        if folder.is_complete:
            raise ConfigError(
                f"expected a run to go on with in {target}, got a complete one: its result is in "
                "result.json"
            )
        about = folder.about()
        config = make_config(read_toml(target / "config.toml"), source=f"{target}/config.toml")
        check_trusted(own_code(config), trust, target)
        check_code(about["code"], config)
        check_run(config)
        known = read_known(target)
        figures = Figures()
        watched = watched_by(config, (figures, *trackers))
        # Who takes part is known, whatever number was asked for.
        venue, asked = replace(venue, silos=tuple(known.keys)), replace(config, clients=None)
        with _met(asked, venue, known, progress, figures, report) as (meeting, watch):
            meeting.folder = folder
            setup = meeting.set_up()
            check_identity(about["same"], identity(setup), config)
            snapshot, rows = restored(setup, folder, about["same"])
            watch.start(snapshot.round)
            return go_on(setup, folder, watch, snapshot, rows, watched, watch.say)


@contextmanager
def _met(
    config: RunConfig,
    venue: Venue,
    known: Known,
    progress: str | Progress,
    figures: Figures,
    report: EventCallback,
) -> Iterator[tuple["Meeting", Watch]]:
    """Open the place where silos attach; when it closes, silos hear how the run ended."""
    names, room = expected_silos(config, venue)
    limit = StrangerLimit(report)  # figures count all of them
    board = Board(names or tuple(known.keys), room, both(figures.take, limit))
    shown = watching(config.rounds, board, progress, figures, venue.metrics)
    with torch_threads(config.threads), closing(limit), shown as watch:
        config = replace(config, clients=room, partition=CUT)
        meeting = Meeting(config, venue, known, names, watch)
        try:
            yield meeting, watch
        except BaseException as error:
            meeting.leave(error)
            raise
        meeting.close("")


def with_min_count(config: RunConfig) -> RunConfig:
    """Return the config with the least count of real silos, unless it has one of its own."""
    if config.evaluation_min_count is not None:
        return config
    return replace(config, evaluation_min_count=EVALUATION_MIN_COUNT)


def with_absolute_code(config: RunConfig) -> RunConfig:
    """Return the config with files of users' code named from the root on."""
    method, model = config.method, config.model
    return replace(
        config,
        method=absolute(method) if is_spec(method) else method,
        model=absolute(model) if model is not None and is_spec(model) else model,
    )


def with_evaluate_clients(config: RunConfig) -> RunConfig:
    """Return the config that says who scores models: who trains from them, where that can be."""
    if config.evaluate_clients is not None:
        return config
    some = can_score_participants(choose(config))
    return replace(config, evaluate_clients="participants" if some else "all")


def check_run(config: RunConfig, venue: Venue | None = None) -> None:
    """Raise `ConfigError` for a run that silos, or this venue, cannot have; none is waited for."""
    method = choose(config).method.part
    check_device_name(config.device)
    check_deployable(config, method)
    check_declared(config, method)
    check_model(config)
    at_silos = replace(without_part(config, "partition"), partition=CUT)
    found = resolved_without_data(at_silos, device="cpu")
    if venue is not None and found is not None:
        program = program_of(found.config, found.schema, method, found.method_config)
        check_update_norm(venue, program, config.method)


def reason_of(error: BaseException) -> str:
    """Return what silos are told of a run that failed: nothing that only the server knows."""
    if isinstance(error, KeyboardInterrupt):
        return "the server was interrupted"
    return str(error) if isinstance(error, SilographError) else type(error).__name__


class Meeting:
    """The server among its silos, from the first that attaches to the end of the run.

    Args:
        config: of the run; it has the number of silos.
        venue: where they attach.
        known: what is known of them from before.
        names: of them; None: whoever comes first.
        watch: told of what happens.
    """

    def __init__(
        self,
        config: RunConfig,
        venue: Venue,
        known: Known,
        names: tuple[str, ...] | None,
        watch: Watch,
    ) -> None:
        from silograph.federation.session.hub import Hub
        from silograph.federation.session.identity import Register

        room = config.clients
        assert room is not None  # see `expected_silos`
        certificate_and_key = credentials(venue)
        keys = known.keys or known_keys(venue, names, room)
        self._config = config
        self._venue = venue
        self._token = known.token
        self._watch = watch
        self._report = watch.report
        self._room = room
        self._session: Session | None = None
        self._peers: dict[str, Peer] = {}
        self._nodes = {name: dict(nodes) for name, nodes in known.nodes.items()}
        self._judged = "nodes"  # or ratings, once the silos have said
        self._start: Mapping[str, object] = {}  # what silos were told of the run, once they were
        self.folder: ResultFolder | None = None  # of the run, once there is one
        self._register = Register(names, room, keys)
        self._hub: Hub = Hub(
            venue.listen, self._register, self._token, certificate_and_key, room, self._report
        )
        if venue.certificate is not None and (line := describe_exposure(venue.certificate[1])):
            self._report(Event(What.EXPOSED, note=line))
        if keys is None and not venue.insecure:
            self._report(Event(What.UNKNOWN_KEYS, note=UNKNOWN_KEYS))
        self._report(Event(What.LISTENING, address=self._hub.address))

    def set_up(self) -> Setup:
        """Wait for all silos, check that they fit together, and return the run.

        Raises:
            ConfigError: silos are missing or do not fit.
        """
        venue = self._venue
        joined = self._all()
        ids = venue.silos or tuple(sorted(joined, key=natural))
        for name in ids:
            check_versions(joined[name])
        peers = {name: self._peers[name] for name in ids}
        agreed, route = agree(peers, venue.seconds)
        known = agreed.facts
        schema = Schema(known.features, known.num_classes, known.task, known.class_names)
        self._judged = "ratings" if schema.task == "rating" else "nodes"
        resolved = resolve(self._config, schema, device="cpu", weighted=known.weighted)
        config, method_config = replace(resolved.config, block_size=1), resolved.method_config
        method, schema = resolved.parts.method.part, resolved.schema
        program = program_of(config, schema, method, method_config, hand_over=venue.hand_over)
        check_update_norm(venue, program, config.method)
        ops = server_table(program)
        code = told_of_code(config, program)
        self._start = start_facts(config, schema, code, hand_over=venue.hand_over)
        for peer in peers.values():
            peer.send(Type.START, facts_body(self._start))
        for name, peer in peers.items():
            try:
                self._take_nodes(name, peer.answer(Type.DONE, venue.seconds))
            except (ConfigError, LostError) as error:
                raise ConfigError(f"{name}: {error}") from None
        limits = Limits(
            least=len(ids) if venue.least is None else venue.least,
            seconds=venue.seconds,
            patience=venue.rejoin,
            failures=MOST_FAILURES,
            update_norm=venue.update_norm,
            most_work=partial(most_work, config, method, method_config),
        )
        self._session = Session(
            peers,
            route,
            ops,
            Course(program),
            dtype=DTYPES[config.dtype],
            limits=limits,
            compiled=method_config.backend.compiled,
            returned=self._returned,
            report=both(self._report, self._register.take),
            nodes=self._nodes,
        )
        session = self._session
        self._watch.follow(lambda: session.ledger)
        names = known.feature_names if config.features == "given" else ()
        return Setup(
            config,
            resolved.parts,
            schema,
            method_config,
            session,
            resolved.device,
            feature_names=names,
            sums=sum_specs(config, schema.num_features, method),
            why_torch=resolved.why_torch,
        )

    @property
    def known(self) -> Known:
        """What a server that goes on must know, once all silos are there."""
        assert self._session is not None  # set up
        keys = self._register.keys
        ids = self._session.ids
        nodes = {name: self._nodes[name] for name in ids}
        return Known(self._token, {name: keys[name] for name in ids}, nodes)

    def close(self, reason: str) -> None:
        """Tell the silos that the run is over, and stop listening."""
        say_goodbye(self._there(), reason, self._report)
        self._hub.close()
        self._report(Event(What.ENDED, reason=reason or None))

    def leave(self, error: BaseException) -> None:
        """Tell the silos what an error means for them, and stop listening.

        They wait for a server that was interrupted if they can take part in what it does next: in
        this run once it has a folder, in any as long as they have agreed to none.
        """
        if self.folder is not None and self.folder.is_complete:
            self.close("")
        elif isinstance(error, KeyboardInterrupt) and (self.folder is not None or not self._start):
            self._stop()
        else:
            self.close(reason_of(error))

    def _stop(self) -> None:
        there = self._there()
        say_stopping(there, self._report)
        self._hub.close()
        waits = bool(there) or self.folder is not None  # else none has ever attached
        self._report(Event(What.STOPPED, silos=None if waits else 0))

    def _there(self) -> dict[str, Peer]:
        """Return all silos that are attached, also those that are in no round yet."""
        peers = dict(self._peers if self._session is None else self._session.peers)
        for joined in self._hub.returned():
            peers[joined.name] = Peer(joined.name, joined.link, self._token)
        return peers

    def _all(self) -> dict[str, "Joined"]:
        """Return all silos once they are there."""
        found: dict[str, Joined] = {}
        until = time.monotonic() + self._venue.patience
        while True:
            found = {name: joined for name, joined in found.items() if joined.link.alive}
            if len(found) == self._room:
                return found
            joined = self._hub.next(max(0.0, until - time.monotonic()))
            if joined is None:
                there = ", ".join(sorted(found)) or "none"
                raise ConfigError(
                    f"expected {counted(self._room, 'silo')} within {self._venue.patience:g} s, "
                    f"got {len(found)} ({there}): start them with silograph silo"
                )
            found[joined.name] = joined
            self._peers[joined.name] = Peer(joined.name, joined.link, self._token)

    def _take_nodes(self, name: str, told: bytes | memoryview) -> None:
        """Remember how many nodes a silo has; raise `ConfigError` where it has said otherwise."""
        known = self._nodes.get(name)
        self._nodes[name] = read_nodes(told, known, self._judged)
        if known is None:
            line = f"{name} has {shown_nodes(self._nodes[name], self._judged)}"
            self._report(Event(What.NOTE, name, note=line))

    def _returned(self) -> dict[str, Peer]:
        """Return the silos that have attached again and are ready for calls."""
        found = {}
        for joined in self._hub.returned():
            peer = Peer(joined.name, joined.link, self._token)
            try:
                check_versions(joined)
                self._take_nodes(
                    joined.name, peer.ask(Type.START, self._start, self._venue.seconds)
                )
            except (ConfigError, LostError) as error:
                self._report(Event(What.UNFIT, joined.name, reason=str(error)))
                peer.dismiss(str(error))
                continue
            found[joined.name] = peer
        return found
