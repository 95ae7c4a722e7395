"""The server of a real federation: waits for its silos, and runs the loop of every run on them."""

import dataclasses
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic.dataclasses import dataclass as checked_dataclass

from silograph.core.config import STRICT, RunConfig, checked
from silograph.core.errors import (
    CheckpointError,
    ConfigError,
    ProtocolError,
    SilographError,
    mistake,
    reword_error,
)
from silograph.core.files import check_regular, describe_exposure, write_atomic
from silograph.core.numeric_state import standard_numerics, torch_threads
from silograph.core.resolved_config import ResolvedConfig, resolved_values
from silograph.core.text import count_of
from silograph.core.work import keep_freed_memory
from silograph.deploy.allowed_code import (
    check_declared,
    check_model,
    code_digests_for_silos,
    portable_name,
    server_ops,
)
from silograph.deploy.key_watch import KeyWatch
from silograph.deploy.metrics import Figures, RunMonitor, monitor_run
from silograph.deploy.policy import PRIVATE
from silograph.deploy.server_settings import (
    ServerSettings,
    check_update_norm,
    credentials,
    expected_silos,
    known_keys,
)
from silograph.experiment.resolve.data import sum_specs
from silograph.experiment.resolve.exclusions import check_selected
from silograph.experiment.resolve.parts import without_part
from silograph.experiment.resolve.resolve import (
    DTYPES,
    can_score_participants,
    choose,
    resolve,
    resolve_without_data,
)
from silograph.experiment.resolve.run_program import most_work, program_of
from silograph.experiment.resolve.run_request import CUT
from silograph.experiment.resolve.user_code import (
    Trust,
    absolute,
    check_code,
    check_trusted,
    is_spec,
    own_code,
)
from silograph.experiment.run.progress import Progress, Tracker
from silograph.experiment.run.result import Result
from silograph.experiment.run.result_folder import ResultFolder, check_free
from silograph.experiment.run.run import (
    check_mode,
    first_snapshot,
    make_trackers,
    restore_run,
    train,
)
from silograph.experiment.run.setup import Setup, versions
from silograph.experiment.run.snapshot import NUMERIC, check_identity, identity
from silograph.federation.field_specs import (
    EDGES,
    MOST_EDGES,
    MOST_NODES,
    ROWS,
    TEST,
    TRAIN,
    VAL,
)
from silograph.federation.program import BLANK, Course
from silograph.federation.session.engine import Session
from silograph.federation.session.events import (
    Board,
    Event,
    EventCallback,
    StrangerLimit,
    What,
    both,
    log_event,
)
from silograph.federation.session.hub import agree, ask_all, say_goodbye
from silograph.federation.session.message import Type
from silograph.federation.session.peer import Limits, LostError, Peer, one_line
from silograph.federation.session.signed_heads import share_heads
from silograph.federation.session.wire import SHORT, need_packages
from silograph.graph.graph import Schema
from silograph.methods import METHODS
from silograph.methods.base import Method

if TYPE_CHECKING:
    from silograph.federation.session.hub import Joined


# --- What a resumed server must know of its silos, a file of the result folder -------------------


SESSION = "session.json"
COUNTS = (TRAIN, VAL, TEST, ROWS, EDGES)  # of each silo


@dataclass(frozen=True)
class SessionState:
    """What a resumed server must know of its silos.

    Attributes:
        token: of the run, by which silos find their states.
        keys: public keys by the silos' names, in the order of every sum.
        nodes: how many nodes each silo has reported, by TRAIN, VAL, TEST, ROWS and EDGES.
    """

    token: bytes
    keys: Mapping[str, bytes]
    nodes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def write_session(folder: Path, session: SessionState) -> bytes:
    """Write the session state for a resumed server, and return the bytes of the file."""
    silos = {name: key.hex() for name, key in session.keys.items()}
    content = {"token": session.token.hex(), "silos": silos, "nodes": session.nodes}
    data = (json.dumps(content, indent=2) + "\n").encode()
    write_atomic(folder / SESSION, data, private=True)  # a token lets others on
    return data


def read_session(folder: Path) -> SessionState:
    """Return what `write_session` wrote; raise `CheckpointError` where it is missing or damaged."""
    check_regular(folder / SESSION)
    try:
        content = json.loads((folder / SESSION).read_text(encoding="utf-8"))
        keys = {name: bytes.fromhex(key) for name, key in content["silos"].items()}
        nodes = {
            name: {count_name: int(n) for count_name, n in counts.items()}
            for name, counts in content["nodes"].items()
        }
        session = SessionState(bytes.fromhex(content["token"]), keys, nodes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(
            f"expected the silos of the run in {folder / SESSION}, got none: it is no run of silos"
        ) from None
    for name, counts in session.nodes.items():
        missing = [each for each in COUNTS if each not in counts]
        if counts and missing:  # without any the silo does not tell them
            raise CheckpointError(
                f"expected numbers of {' and '.join(missing)} of {name} in "
                f"{folder / SESSION}, got none: another version wrote it; resume with that one, or "
                "start the run anew"
            )
    return session


# --- start messages ------------------------------------------------------------------------------
# What a server and its silos exchange before the first call, and what silos cannot run.


NONE: Mapping[str, str] = MappingProxyType({})
AROUND = ("protocol", "name", "key", "process")  # of a greeting, besides versions
UNCUT_ONLY = ("largest_component", "drop_edges", "local_bias")


@checked_dataclass(frozen=True, config=STRICT)
class Versions:
    """Sent by a silo when it attaches: versions of Python and packages, by name."""

    versions: dict[str, str]


def read_versions(name: str, facts: Mapping[str, Any]) -> dict[str, str]:
    """Return a silo's versions; raise `ConfigError` where they are invalid."""
    version_facts = {key: value for key, value in facts.items() if key not in AROUND}
    silo_versions = checked(Versions, version_facts, f"facts of {name}").versions
    return {one_line(package): one_line(version) for package, version in silo_versions.items()}


def check_device_name(device: str) -> None:
    """Raise `ConfigError` for a device that a server cannot name to silos."""
    if re.fullmatch(r"cpu|cuda(:\d+)?", device) is None:
        raise ConfigError(
            f"device: expected cpu or cuda, on which silos compute, got {device!r}: a silo may "
            "choose another by its own --device",
            **mistake("option-value", "device", device),
        )


def check_deployable(config: RunConfig, method: Method) -> None:
    """Raise `ConfigError` for a run that silos cannot do on their own data."""
    if (needs := method.setting.at_server) is not None:
        raise ConfigError(
            f"expected a method that trains at silos alone, got {config.method}, whose server "
            f"needs {needs}"
        )
    for kind, spec in own_code(config).items():
        if kind not in ("method", "model"):
            raise ConfigError(
                f"expected one of silograph's own {kind} parts at silos, got {spec}: only methods "
                "and models may be users' code there"
            )
    for f in dataclasses.fields(config):
        if f.name in UNCUT_ONLY and getattr(config, f.name) != f.default:
            raise ConfigError(
                f"expected silos' own data as they are, got {f.name}={getattr(config, f.name)}, "
                "which needs the uncut graph: leave it out"
            )


def start_facts(
    config: ResolvedConfig,
    schema: Schema,
    code: Mapping[str, str] = NONE,
    *,
    hand_over: bool = True,
) -> dict[str, Any]:
    """Return what the server sends to silos before the first call.

    Args:
        config: of the run.
        schema: of all silos' data.
        code: digests of users' code that the run needs, by name; see `code_digests_for_silos`.
        hand_over: whether silos get the server's model when the run is over.
    """
    portable_names = {name: portable_name(getattr(config, name)) for name in ("method", "model")}
    values = resolved_values(config) | portable_names
    config_values = {k: v for k, v in values.items() if k not in PRIVATE}
    config_values["options"] = {
        k: v for k, v in config_values["options"].items() if k not in server_only(config)
    }
    facts = {"config": config_values, "schema": dataclasses.asdict(schema), "hand_over": hand_over}
    return facts | ({"code": dict(code)} if code else {})


def check_start(facts: Mapping[str, Any], schema: Schema) -> None:
    """Raise `ConfigError` where a server's message differs from `start_facts` of these data."""
    unknown_keys = facts.keys() - {"config", "schema", "hand_over", "code"}
    if unknown_keys:
        raise ConfigError(
            f"expected config, schema, hand_over and code of a server, got {min(unknown_keys)!r}, "
            "too: it may be of another version"
        )
    if type(facts.get("hand_over")) is not bool:
        raise ConfigError(f"expected whether silos get the model, got {facts.get('hand_over')!r}")
    schema_values = dataclasses.asdict(schema)
    server_schema, own_schema = (
        json.dumps(s, sort_keys=True) for s in (facts.get("schema"), schema_values)
    )
    if server_schema != own_schema:  # as texts: 3.0 and true are no 3 and 1 there
        raise ConfigError(f"expected the schema of this silo's data, {schema_values}, got another")


def server_only(config: ResolvedConfig) -> set[str]:
    """Return the options of a run's method that name what only the server has, such as a file."""
    method = METHODS.get(config.method)
    declared = () if method is None else dataclasses.fields(method.options)
    return {f"method.{f.name}" for f in declared if f.metadata.get("server_only")}


# --- What a server looks at when its silos have joined: their versions, the order of names -------


LOG = logging.getLogger("silograph")


def check_versions(silo: "Joined") -> None:
    """Raise `ConfigError` unless a silo has the server's silograph; warn of other differences."""
    silo_versions, server_versions = read_versions(silo.name, silo.facts), versions()
    if silo_versions.get("silograph") != server_versions["silograph"]:
        raise ConfigError(
            f"expected silograph {server_versions['silograph']} at {silo.name}, as at the server, "
            f"got {silo_versions.get('silograph')}: install the same version",
            **mistake(
                "other-version", server_versions["silograph"], silo_versions.get("silograph")
            ),
        )
    for name in NUMERIC:
        if silo_versions.get(name) != server_versions.get(name):
            LOG.warning(
                "%s has %s %s, the server %s: numbers may differ in the last bits",
                silo.name,
                name,
                silo_versions.get(name),
                server_versions.get(name),
            )


def read_nodes(
    body: bytes | memoryview, earlier_counts: Mapping[str, int] | None, what: str = "nodes"
) -> dict[str, int]:
    """Return how many nodes a silo reports, by TRAIN, VAL, TEST, ROWS and EDGES.

    Args:
        body: of its answer to START.
        earlier_counts: those that it reported before, if any.
        what: what is judged: nodes or ratings.

    Raises:
        ConfigError: they are missing, invalid or other than before.
    """
    try:
        answer = json.loads(bytes(body))["nodes"]
        counts = {name: answer[name] for name in COUNTS}
    except (ValueError, KeyError, TypeError, RecursionError):
        counts = {}
    are_valid = all(
        type(n) is int and 0 <= n <= (MOST_EDGES if name == EDGES else MOST_NODES)
        for name, n in counts.items()
    )
    if not counts or not are_valid:
        raise ConfigError(
            f"expected numbers of training, validation and test {what} and of rows up to "
            f"{MOST_NODES:,}, and of edges, got {one_line(bytes(body[:200]))}"
        )
    if earlier_counts is not None and counts != earlier_counts:
        raise ConfigError(
            f"expected {describe_nodes(earlier_counts, what)} as at first, got "
            f"{describe_nodes(counts, what)}"
        )
    return counts


def describe_nodes(nodes: Mapping[str, int], what: str = "nodes") -> str:
    """Return numbers of nodes for people, or of what else is judged.

    >>> describe_nodes({"train": 1000, "val": 20, "test": 30, "rows": 1200, "edges": 9})
    '1,000 training, 20 validation and 30 test nodes (1,200 rows and 9 edges with its halo)'
    """
    train, val, test = (f"{nodes[n]:,}" for n in (TRAIN, VAL, TEST))
    of_all = f"({count_of(nodes[ROWS], 'row')} and {count_of(nodes[EDGES], 'edge')} with its halo)"
    return f"{train} training, {val} validation and {test} test {what} {of_all}"


def natural_sort_key(name: str) -> list[tuple[int, str]]:
    """Return what names are sorted by: numbers in them by their value.

    >>> sorted(["silo_10", "silo_9"], key=natural_sort_key)
    ['silo_9', 'silo_10']
    """
    parts = re.findall(r"\d+|\D+", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


# Seconds without a new silo after which the server reports who is missing.
ABSENT_SECONDS = 30.0
MOST_ABSENT = 12  # Most missing silos that it names.
MOST_FAILURES = 3  # of a silo, after which it is left out for good
EVALUATION_MIN_COUNT = 5  # of real silos, unless the config says another
UNKNOWN_KEYS = (
    "the first key that takes a silo's name is accepted (--accept-first-keys): who reaches this "
    "server first can be that silo"
)


@standard_numerics()
def serve(
    config: RunConfig,
    server_settings: ServerSettings,
    *,
    progress: str | Progress = "none",
    trackers: Sequence[Tracker] = (),
    report: EventCallback = log_event,
) -> Result:
    """Train a federation of silos and return its result.

    Args:
        config: of the run; what it says of cuts is not used, and `evaluation_min_count` is 5
            unless it says another.
        server_settings: where silos attach.
        progress: as in `run`.
        trackers: as in `run`.
        report: called with events; the first one names the address.

    Raises:
        SilographError: the config cannot be used, silos do not come or do not fit, or too few
            are left.
    """
    check_mode(progress)
    need_packages()
    config = with_evaluate_clients(with_min_count(with_absolute_code(config)))
    check_run(replace(config, clients=expected_silos(config, server_settings)[1]), server_settings)
    check_selected(choose(config))
    config = without_part(config, "partition")  # how a simulation of it cuts its graph
    if config.out is not None:
        check_free(config.out)
    figures = Figures()
    tracker_group = make_trackers(config, (figures, *trackers))
    session = SessionState(secrets.token_bytes(16), {})
    opened = _open_server(config, server_settings, session, progress, figures, report)
    with opened as (server_session, monitor):
        setup = server_session.set_up()
        first = first_snapshot(setup)
        folder = None
        if config.out is not None:
            folder = ResultFolder.create(config.out, setup, config, None)
            folder.record_digest(SESSION, write_session(folder.path, server_session.session_state))
            server_session.folder = folder
        with closing(folder) if folder is not None else nullcontext():
            monitor.start(first.round)
            return train(setup, folder, monitor, first, [], tracker_group, monitor.say)


@standard_numerics()
def resume_server(
    path: str | os.PathLike[str],
    server_settings: ServerSettings,
    *,
    trust: Trust = False,
    progress: str | Progress = "none",
    trackers: Sequence[Tracker] = (),
    report: EventCallback = log_event,
) -> Result:
    """Resume a run of silos whose server was interrupted, with identical results.

    Args:
        path: the run's result folder.
        server_settings: where silos attach: the same ones, with their keys and their states.
        trust: as in `resume`.
        progress: as in `run`.
        trackers: as in `run`.
        report: called with events; the first one names the address.

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
                "result.json",
                **mistake("completed-run", target),
            )
        about = folder.about()
        config = folder.config()
        check_trusted(own_code(config), trust, target)
        check_code(about["code"], config)
        check_run(config)
        session = read_session(target)
        figures = Figures()
        tracker_group = make_trackers(config, (figures, *trackers))
        # The silos are known, whatever number the config has.
        server_settings = replace(server_settings, silos=tuple(session.keys))
        config = replace(config, clients=None)
        opened = _open_server(config, server_settings, session, progress, figures, report)
        with opened as (server_session, monitor):
            server_session.folder = folder
            setup = server_session.set_up()
            check_identity(about["same"], identity(setup), config)
            snapshot, rows = restore_run(setup, folder, about["same"])
            monitor.start(snapshot.round)
            return train(setup, folder, monitor, snapshot, rows, tracker_group, monitor.say)


@contextmanager
def _open_server(
    config: RunConfig,
    server_settings: ServerSettings,
    session: SessionState,
    progress: str | Progress,
    figures: Figures,
    report: EventCallback,
) -> Iterator[tuple["ServerSession", RunMonitor]]:
    """Open the server for silos; when it closes, silos receive how the run ended."""
    names, num_silos = expected_silos(config, server_settings)
    limit = StrangerLimit(report)  # figures count all of them
    board = Board(names or tuple(session.keys), num_silos, both(figures.take, limit))
    monitor = monitor_run(config.rounds, board, progress, figures, server_settings.metrics)
    with torch_threads(config.threads), closing(limit), monitor as run_monitor:
        config = replace(config, clients=num_silos, partition=CUT)
        server_session = ServerSession(config, server_settings, session, names, run_monitor)
        try:
            yield server_session, run_monitor
        except BaseException as error:
            server_session.leave(error)
            raise
        server_session.close("")


def with_min_count(config: RunConfig) -> RunConfig:
    """Return the config with the least count of real silos, unless it has one of its own."""
    if config.evaluation_min_count is not None:
        return config
    if config.secure_aggregation or config.dp_epsilon is not None:  # no count of one silo is shown
        return replace(config, evaluation_min_count=0)
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
    """Return the config with `evaluate_clients`: `participants` where the method allows it."""
    if config.evaluate_clients is not None:
        return config
    parts = choose(config)
    by_participants = not config.secure_aggregation and can_score_participants(config, parts)
    return replace(config, evaluate_clients="participants" if by_participants else "all")


def check_run(config: RunConfig, server_settings: ServerSettings | None = None) -> None:
    """Raise `ConfigError` for a run that silos or this server cannot do, before waiting for any."""
    method = choose(config).method.part
    if server_settings is not None and server_settings.share_audit_heads and config.dp_epsilon:
        raise ConfigError(
            "--share-audit-heads cannot be used with --dp-epsilon, because silos send nothing "
            "without noise: leave one of them out",
            **mistake("conflicting-options", ["share_audit_heads", "dp_epsilon"]),
        )
    check_device_name(config.device)
    check_deployable(config, method)
    check_declared(config, method)
    check_model(config)
    at_silos = replace(without_part(config, "partition"), partition=CUT)
    resolved = resolve_without_data(at_silos, device="cpu")
    if server_settings is not None and resolved is not None:
        program = program_of(resolved.config, resolved.schema, method, resolved.method_config)
        check_update_norm(server_settings, program, config.method, secure=config.secure_aggregation)


def reason_of(error: BaseException) -> str:
    """Return the reason that silos receive for a failed run, without the server's internals."""
    if isinstance(error, KeyboardInterrupt):
        return "the server was interrupted"
    return str(error) if isinstance(error, SilographError) else type(error).__name__


def _keys_of(
    session: SessionState,
    server_settings: ServerSettings,
    names: tuple[str, ...] | None,
    num_silos: int,
) -> Mapping[str, bytes] | None:
    """Return the keys of the silos of a run: of its folder, but for those in a given file."""
    if not session.keys:
        return known_keys(server_settings, names, num_silos)
    if server_settings.keys is None:
        return session.keys
    return {**session.keys, **(known_keys(server_settings, names, num_silos) or {})}


class ServerSession:
    """The server's side of a run, from the first silo that attaches to the end.

    Args:
        config: of the run; it has the number of silos.
        server_settings: where they attach.
        session: what is known of them from before.
        names: of them; None: whoever comes first.
        monitor: receives events and rounds.
    """

    def __init__(
        self,
        config: RunConfig,
        server_settings: ServerSettings,
        session: SessionState,
        names: tuple[str, ...] | None,
        monitor: RunMonitor,
    ) -> None:
        from silograph.federation.session.hub import Hub
        from silograph.federation.session.identity import Register

        num_silos, certificate_and_key = config.clients, credentials(server_settings)
        assert num_silos is not None  # see `expected_silos`
        keys = _keys_of(session, server_settings, names, num_silos)
        self._config = config
        self._server_settings = server_settings
        self._token = session.token
        self._monitor = monitor
        self._report = monitor.report
        self._num_silos = num_silos
        self._names = names
        self._session: Session | None = None
        self._peers: dict[str, Peer] = {}
        self._nodes = {name: dict(nodes) for name, nodes in session.nodes.items()}
        self._judged = "nodes"  # or ratings, once the schema is known
        self._start: Mapping[str, object] = {}  # that silos received with START, once they did
        self._rejoin_deadlines: dict[str, float] = {}  # of silos that were lost before round 1
        self.folder: ResultFolder | None = None  # of the run, once there is one
        self._register = Register(names, num_silos, keys)
        self._hub: Hub = Hub(
            server_settings.listen,
            self._register,
            self._token,
            certificate_and_key,
            num_silos,
            self._report,
        )
        key_file = None if server_settings.certificate is None else server_settings.certificate[1]
        if key_file is not None and (line := describe_exposure(key_file)):
            self._report(Event(What.EXPOSED, note=line))
        if keys is None and not server_settings.insecure:
            self._report(Event(What.UNKNOWN_KEYS, note=UNKNOWN_KEYS))
        self._key_watch = KeyWatch(server_settings, self._register, self._hub, self._report)
        try:
            self._key_watch.start()
        except ConfigError:
            self._hub.close()
            raise
        self._report(Event(What.LISTENING, address=self._hub.address))

    def set_up(self) -> Setup:
        """Wait for all silos, check that they fit together, and return the run.

        Raises:
            ConfigError: silos are missing or do not fit.
            ProtocolError: one does not come back.
        """
        server_settings = self._server_settings
        # Wait for all silos; their order decides the order of every sum.
        joined_silos = self._wait_for_silos()
        ids = server_settings.silos or tuple(sorted(joined_silos, key=natural_sort_key))
        for name in ids:
            check_versions(joined_silos[name])
        peers = {name: self._peers[name] for name in ids}
        # Match the edges between silos, and agree on features and classes.
        agreed, route = agree(peers, server_settings.seconds, self._wait_for_return)
        facts = agreed.facts
        schema = Schema(facts.features, facts.num_classes, facts.task, facts.class_names)
        self._judged = "ratings" if schema.task == "rating" else "nodes"
        # Resolve the run, and send every silo its config; each checks it against its policy.
        resolved = resolve(self._config, schema, device="cpu", weighted=facts.weighted)
        config, method_config = replace(resolved.config, block_size=1), resolved.method_config
        method, schema = resolved.parts.method.part, resolved.schema
        program = program_of(
            config, schema, method, method_config, hand_over=server_settings.hand_over
        )
        check_update_norm(server_settings, program, config.method, secure=config.secure_aggregation)
        ops = server_ops(program)
        code = code_digests_for_silos(config, program)
        self._start = start_facts(config, schema, code, hand_over=server_settings.hand_over)
        self._start_all(peers)
        # All silos have agreed: open the session.
        keep_freed_memory()
        limits = Limits(
            least=len(ids) if server_settings.least is None else server_settings.least,
            seconds=server_settings.seconds,
            patience=server_settings.rejoin,
            failures=MOST_FAILURES,
            update_norm=server_settings.update_norm,
            secure=config.secure_aggregation,
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
            returned=self._returned_peers,
            report=both(self._report, self._register.take),
            nodes=self._nodes,
        )
        session = self._session
        self._monitor.follow(lambda: session.ledger)
        names = facts.feature_names if config.features == "given" else ()
        return Setup(
            config,
            resolved.parts,
            schema,
            method_config,
            session,
            resolved.device,
            feature_names=names,
            sums=sum_specs(config, schema, method),
            why_torch=resolved.why_torch,
        )

    @property
    def session_state(self) -> SessionState:
        """The session state for a resumed server, once all silos are there."""
        assert self._session is not None  # set up
        keys = self._register.keys
        ids = self._session.ids
        nodes = {name: self._nodes[name] for name in ids}
        return SessionState(self._token, {name: keys[name] for name in ids}, nodes)

    def close(self, reason: str) -> None:
        """Tell the silos that the run is over, and stop listening."""
        if self._server_settings.share_audit_heads and self._session is not None:
            share_heads(self._session.peers, self._report)
        say_goodbye(self._attached_peers(), reason, self._report)
        self._stop_listening()
        self._report(Event(What.ENDED, reason=reason or None))

    def leave(self, error: BaseException) -> None:
        """Tell the silos what an error means for them, and stop listening.

        They wait for a server that was interrupted if they can take part in what it does next: in
        this run once it has a folder, in any as long as they have agreed to none.
        """
        if self.folder is not None and self.folder.is_complete:
            self.close("")
        elif isinstance(error, KeyboardInterrupt) and (self.folder is not None or not self._start):
            peers = self._attached_peers()
            say_goodbye(peers, None, self._report)
            self._stop_listening()
            waits = bool(peers) or self.folder is not None  # else none has ever attached
            self._report(Event(What.STOPPED, silos=None if waits else 0))
        else:
            self.close(reason_of(error))

    def _stop_listening(self) -> None:
        self._key_watch.close()
        self._hub.close()

    def _attached_peers(self) -> dict[str, Peer]:
        """Return all silos that are attached, also those that are in no round yet."""
        peers = dict(self._peers if self._session is None else self._session.peers)
        for joined in self._hub.returned():
            peers[joined.name] = joined.peer
        return peers

    def _wait_for_silos(self) -> dict[str, "Joined"]:
        """Wait for all silos and return them; say now and then who is missing."""
        joined_by_name: dict[str, Joined] = {}
        patience = self._server_settings.patience
        deadline = time.monotonic() + patience
        while True:
            joined_by_name = {
                name: joined for name, joined in joined_by_name.items() if joined.link.alive
            }
            if len(joined_by_name) == self._num_silos:
                return joined_by_name
            remaining = max(0.0, deadline - time.monotonic())
            joined = self._hub.next(min(remaining, ABSENT_SECONDS))
            if joined is None and remaining <= ABSENT_SECONDS:
                num_joined, names = len(joined_by_name), ", ".join(sorted(joined_by_name)) or "none"
                missing = None if self._names is None else set(self._names) - joined_by_name.keys()
                raise ConfigError(
                    f"expected {count_of(self._num_silos, 'silo')} within {patience:g} s, got "
                    f"{num_joined} ({names}): start them with silograph silo",
                    **mistake(
                        "too-few-silos",
                        self._num_silos,
                        num_joined,
                        None if missing is None else sorted(missing, key=natural_sort_key),
                    ),
                )
            if joined is None:
                self._report_absent(joined_by_name)
                continue
            joined_by_name[joined.name] = joined
            self._peers[joined.name] = joined.peer

    def _report_absent(self, joined_by_name: Mapping[str, "Joined"]) -> None:
        """Report which silos are not attached, and which of them have never been."""
        num_joined, room = len(joined_by_name), self._num_silos
        # Names that the server was not given are unknown until their silos attach.
        names = self._peers if self._names is None else self._names
        missing = [name for name in names if name not in joined_by_name]
        seen = [f"{name} (was here before)" for name in missing if name in self._peers]
        unseen = [f"{name} (never connected)" for name in missing if name not in self._peers]
        num_unnamed = room - num_joined - len(missing)
        more = [f"{num_unnamed} that never connected"] if num_unnamed > 0 else []
        note = f"{num_joined} of {count_of(room, 'silo')} attached; waiting for "
        note += ", ".join((seen + unseen)[:MOST_ABSENT] + more)
        if len(missing) > MOST_ABSENT:
            note += f" and {len(missing) - MOST_ABSENT} more"
        self._report(Event(What.ABSENT, silos=num_joined, room=room, note=note))

    def _start_all(self, peers: dict[str, Peer]) -> None:
        """Send all silos the run's config; raise `ConfigError` where one does not agree to it."""
        request, seconds = (Type.START, self._start, SHORT), self._server_settings.seconds
        try:
            for name, body in ask_all(peers, request, Type.DONE, seconds, self._wait_for_return):
                try:
                    self._record_node_counts(name, body)
                except ConfigError as error:
                    raise reword_error(error, f"{name}: {error}", ConfigError) from None
        except LostError as error:
            raise reword_error(error, str(error), ConfigError) from None

    def _wait_for_return(self, former: Peer, lost: LostError) -> Peer:
        """Return the next stream of a silo whose stream has ended before the first round.

        A silo has `rejoin` seconds in all, from the first time that its stream ends.

        Raises:
            ProtocolError: it does not come back in time.
        """
        name, rejoin = former.name, self._server_settings.rejoin
        if name not in self._rejoin_deadlines:
            self._rejoin_deadlines[name] = time.monotonic() + rejoin
        self._report(Event(What.DROPPED, name, 0, cause=lost.cause, reason=str(lost)))
        self._report(Event(What.WAITING, name, 0, seconds=rejoin))
        while self._peers[name] is former:
            joined = self._hub.next(max(0.0, self._rejoin_deadlines[name] - time.monotonic()))
            if joined is None:
                raise ProtocolError(
                    f"{name}: {lost}; not back within {rejoin:g} s",
                    **mistake("too-few-silos", self._num_silos, self._num_silos - 1, [name]),
                ) from None
            try:
                check_versions(joined)
            except ConfigError as error:
                self._report(Event(What.UNFIT, joined.name, reason=str(error)))
                joined.peer.dismiss(str(error))
                continue
            self._peers[joined.name] = joined.peer
        self._report(Event(What.RETURNED, name, BLANK))
        return self._peers[name]

    def _record_node_counts(self, name: str, body: bytes | memoryview) -> None:
        """Remember how many nodes a silo has; raise `ConfigError` where it reported others."""
        earlier_counts = self._nodes.get(name)
        # Silos do not tell.
        if self._config.secure_aggregation or self._config.dp_epsilon is not None:
            self._nodes[name] = {}
            return
        self._nodes[name] = read_nodes(body, earlier_counts, self._judged)
        if earlier_counts is None:
            line = f"{name} has {describe_nodes(self._nodes[name], self._judged)}"
            self._report(Event(What.NOTE, name, note=line))

    def _returned_peers(self) -> dict[str, Peer]:
        """Return the silos that have attached again and are ready for calls."""
        returned_peers = {}
        for joined in self._hub.returned():
            peer = joined.peer
            try:
                check_versions(joined)
                self._record_node_counts(
                    joined.name, peer.ask(Type.START, self._start, self._server_settings.seconds)
                )
            except (ConfigError, LostError) as error:
                self._report(Event(What.UNFIT, joined.name, reason=str(error)))
                peer.dismiss(str(error))
                continue
            returned_peers[joined.name] = peer
        return returned_peers
