"""One silo of a real federation: its own data, a server to connect to, and nothing else."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from silograph.core.config import RunConfig, make_config
from silograph.core.errors import (
    ConfigError,
    PolicyError,
    SilographError,
    canonical_name,
    lookup,
    mistake,
)
from silograph.core.files import describe_exposure
from silograph.core.numeric_state import standard_numerics
from silograph.core.resolved_config import ResolvedConfig
from silograph.core.text import count_of, printable
from silograph.core.work import keep_freed_memory
from silograph.deploy.allowed_code import AllowedCode, split_names
from silograph.deploy.policy import (
    NO_POLICY,
    PRIVATE,
    ProposedRun,
    SiloPolicy,
    check_code,
    check_complete_config,
    check_size,
    describe_policy,
    refusal_of,
)
from silograph.deploy.server import check_deployable, check_device_name, check_start
from silograph.deploy.server_settings import common_secret, read_roots, read_secrets
from silograph.deploy.silo_result import SiloRun, check_result_folder, folder_of, write_result
from silograph.experiment.report.reading import size_text
from silograph.experiment.resolve.data import (
    BlockInState,
    check_edge_weights,
    client_block,
    describe_weight_scale,
    narrowing_line,
    prepare_silo,
    scale_line,
    sum_specs,
)
from silograph.experiment.resolve.parts import choose_parts, with_default_model
from silograph.experiment.resolve.resolve import DTYPES, Resolved, choose, resolve
from silograph.experiment.resolve.run_program import (
    BESIDES,
    beyond_weights,
    kinds_sent,
    program_of,
)
from silograph.experiment.run.setup import versions
from silograph.federation.field_specs import EDGES, ROWS, TEST, TRAIN, VAL, Extent, extent_of
from silograph.federation.matching import Disagreement, Hello, explain, hello, user_tags
from silograph.federation.privacy.budget import (
    SECRET,
    PrivacyBudget,
    PrivacyLedger,
    read_or_make_secret,
)
from silograph.federation.privacy.updates import UpdatePrivacy
from silograph.federation.program import (
    ZERO,
    Course,
    Program,
    SizeBound,
    calls_of,
    received_sizes,
    sent_sizes,
)
from silograph.federation.secure.row_form import names_of_rows
from silograph.federation.secure.sums import LEAST_SILOS, SecureSums
from silograph.federation.session.audit import Audit, RunAudit, digest_of, open_audit
from silograph.federation.session.events import Event, EventCallback, What, log_event
from silograph.federation.session.private_reply import PrivateReplies
from silograph.federation.session.responder import Responder
from silograph.federation.session.silo_data import Outcome, Prepared, run_name
from silograph.federation.session.state_store import (
    StateStore,
    has_agreement,
    lock_state_folder,
    runs_left,
)
from silograph.federation.session.wire import need_packages
from silograph.graph.block.block import ClientBlock
from silograph.graph.column_statistics import FEATURES
from silograph.graph.graph import schema_of
from silograph.graph.silos.data import Silo, featured, silo_fingerprint
from silograph.graph.silos.read import CROSS
from silograph.methods import METHODS
from silograph.methods.base import Method
from silograph.methods.local_only import sharing_in
from silograph.nn.own_module import Make
from silograph.task.counts import judges_of

if TYPE_CHECKING:
    from silograph.federation.session.attach import Attaching


# --- What a run will send from a silo, for its people to read before the first call --------------


MOST_CALLS = 10_000  # that are added up; a server's config must not hold a silo up


@dataclass(frozen=True)
class PlanRow:
    """One kind of what leaves, or all that is received.

    Attributes:
        name: of the kind, or `received`.
        first: round in which it first may leave; 0 is set-up.
        last: the last such round.
        each: bytes of the round that may send most.
        whole: bytes of the run.
    """

    name: str
    first: int
    last: int
    each: SizeBound
    whole: SizeBound


@dataclass(frozen=True, eq=False)
class RunPlan:
    """What a run sends from one silo and what it is sent, at most.

    Attributes:
        sent: by kind.
        incoming: what it is sent, all kinds together.
        first: what set-up and the first round send.
        rounds: that were added up; the run may have more.
    """

    sent: Sequence[PlanRow]
    incoming: PlanRow
    first: SizeBound
    rounds: int

    @property
    def whole(self) -> SizeBound:
        """What leaves in the rounds that were added up."""
        return sum((row.whole for row in self.sent), ZERO)


def plan_of(program: Program, extent: Extent) -> RunPlan:
    """Return what a run sends, of the specs of its fields and the silo's numbers of rows.

    Args:
        program: of the run.
        extent: of the silo, as one client.
    """
    steps = [program.steps(0)]
    calls = 0
    while calls < MOST_CALLS and len(steps) <= program.rounds:
        steps.append(program.steps(len(steps)))
        calls += sum(1 for _ in calls_of(steps[-1]))
    up = [sent_sizes(step, extent, program.state) for step in steps]
    down = [received_sizes(step, extent, program.state) for step in steps]
    kinds = sorted({kind for sizes in up for kind in sizes})
    rows = [_row(str(kind), [sizes.get(kind, ZERO) for sizes in up]) for kind in kinds]
    incoming = _row("received", [sum(sizes.values(), ZERO) for sizes in down])
    first = sum((size for sizes in up[:2] for size in sizes.values()), ZERO)
    return RunPlan(rows, incoming, first, len(steps) - 1)


def _row(name: str, sizes: Sequence[SizeBound]) -> PlanRow:
    at = [number for number, size in enumerate(sizes) if size != ZERO]
    largest = max(sizes, key=lambda size: float("inf") if size.most is None else size.most)
    return PlanRow(name, at[0] if at else 0, at[-1] if at else 0, largest, sum(sizes, ZERO))


def lines_of(
    plan: RunPlan, rounds: int, hello: int, to: str, silos: int, rows: Sequence[str]
) -> Iterator[str]:
    """Yield the plan as lines of at most 60 characters.

    Args:
        plan: what leaves.
        rounds: of the run.
        hello: bytes of the silo's hello, by which silos find out which edges they share: they
            have left already.
        to: whom it goes to.
        silos: of the run, as the server says.
        rows: what sends rows of single nodes, by the names that `--allow` takes.
    """
    yield f"this run sends to {to}"
    rows_text = f"rows of single nodes: {', '.join(rows)}" if rows else "no rows of single nodes"
    yield f"({rows_text}; {count_of(silos, 'silo')}, as the server says)"
    yield _cells("kind", "rounds", "in a round", "in all")
    hello_size = SizeBound(hello, hello)
    yield _cells("hello", "sent already", "", _size(hello_size))
    for row in plan.sent:
        yield _cells(row.name, _rounds(row), _size(row.each), _size(row.whole))
    yield _cells("all of it", "", "", _size(plan.whole + hello_size))
    yield "(without its name, key and versions, and figures of work)"
    incoming = plan.incoming
    yield _cells(incoming.name, _rounds(incoming), _size(incoming.each), _size(incoming.whole))
    if plan.rounds < rounds:
        yield f"(in all: the first {plan.rounds:,} of {count_of(rounds, 'round')})"


def _cells(name: str, rounds: str, per_round: str, total: str) -> str:
    # The blanks separate cells that are wider than their column.
    return f"{name:<13} {rounds:<13} {per_round:>16} {total:>15}".rstrip()


def _rounds(row: PlanRow) -> str:
    names = ["set-up" if number == 0 else f"{number:,}" for number in (row.first, row.last)]
    return names[0] if row.first == row.last else " to ".join(names)


def _size(size: SizeBound) -> str:
    if size.most is None:
        return "not known yet"
    return size_text(size.most) if size.least == size.most else f"up to {size_text(size.most)}"


@dataclass(frozen=True)
class Attendance:
    """How a silo connects to its server; no setting here changes a number.

    Attributes:
        server: HOST:PORT.
        key: file of the silo's own key; it is made if there is none.
        secret: what it shares with other silos: a file for all, or a folder with a file NAME for
            each that its edges lead to; None where no edge leads anywhere.
        ca: file of certificates that the server's must come from; None with `insecure`.
        insecure: without TLS, to this machine only.
        state: folder for the silo's state of the last two rounds; None keeps it in memory.
        device: where it computes; None is what the server's config says.
        patience: seconds for which it tries to reach the server, also one that was stopped.
        waits: whether it waits for a server that was stopped; else the run fails then.
        allow: what the silo agrees to besides weights and counts: methods by name, `collect`, and
            `items`, shared rows of items.
        code: code of users that the silo allowed.
        out: folder for the result of a run.
        results: where it gets a folder of its own, if `out` is None; None keeps nothing.
        prepared: what `silograph prepare` fitted to the silo's tables (its prepared.json), which is
            saved beside the model; None: the folder was made otherwise.
        policy: what the silo agrees to; None: there is no file of it.
        audit: file in which all that leaves is written down; None: there is none.
    """

    server: str
    key: Path
    secret: Path | None = None
    ca: Path | None = None
    insecure: bool = False
    state: Path | None = None
    device: str | None = None
    patience: float = 600.0
    waits: bool = True
    allow: tuple[str, ...] = ()
    code: AllowedCode = field(default_factory=AllowedCode)
    out: Path | None = None
    results: Path | None = None
    prepared: str | None = None
    policy: SiloPolicy | None = None
    audit: Path | None = None


@dataclass(frozen=True, eq=False)
class OwnData:
    """The data of a silo, and what it does with them when the server calls; see `SiloData`.

    Attributes:
        silo: its data.
        secrets: shared with each silo that its edges lead to.
        attendance: what the silo's people allow, and where results go.
        report: called with events for the silo's own people only.
        server: what its own people call the server.
    """

    silo: Silo
    secrets: Mapping[str, bytes]
    attendance: Attendance
    report: EventCallback
    server: str = "the server"

    @property
    def policy(self) -> SiloPolicy:
        """What the silo agrees to."""
        return self.attendance.policy or NO_POLICY

    def hello(self, run: bytes) -> Hello:
        """Return what the silo shows of itself; see `SiloData`."""
        return hello(self.silo, self.secrets, run)

    def explain(self, run: bytes, disagreement: Disagreement) -> None:
        """Tell which edge the other silo does not list; see `SiloData`."""
        line = explain(self.silo, self.secrets, run, disagreement)
        cross, other = self.silo.cross, disagreement.other
        between = sum(cross.silo[slot] == other for slot in cross.slot.tolist())
        if len(disagreement.tags) == between and not disagreement.absent:
            line += (
                f"; as these are all: see first whether {other} has the same secret, or other "
                "weights"
            )
        self.report(Event(What.DISAGREED, self.silo.name, note=line))

    def prepare(self, facts: Mapping[str, Any], audit: RunAudit) -> Prepared:
        """Check the server's config and prepare the silo's block and program; see `SiloData`.

        Raises:
            SilographError: the config is missing, or cannot be used here or with these data.
        """
        server_config = facts.get("config")
        if not isinstance(server_config, dict):
            raise ConfigError("expected the server's config, got none")
        # Read the server's config: method and model only from code that this silo allows.
        config = make_config(
            {k: v for k, v in server_config.items() if k not in PRIVATE}, source="server"
        )
        code, digests = self.attendance.code, facts.get("code")
        code.check(digests)
        method = code.method(config.method, digests)
        ratings = self.silo.graph.task == "rating"
        # `check_complete_config` refuses a server's config that has no model.
        config = with_default_model(config, ratings=ratings, method=method)
        make = code.model(config.model or "", digests)
        # Refuse what silos cannot run, or what is too large, before any work.
        check_deployable(config, method)
        if self.attendance.device is None:
            check_device_name(config.device)
        else:  # by this silo's people
            config = dataclasses.replace(config, device=self.attendance.device)
        with self.errors_stay_here(config):
            silo, resolved, edge_weights_line = self._fit_to_config(config, method, make)
        schema, dtype = schema_of(silo.graph), DTYPES[config.dtype]
        resolved_config, method_config = resolved.config, resolved.method_config
        method = resolved.parts.method.part  # scored as the options and the row minimum say
        # The resolved config must be that of the server, with no default left to this silo.
        check_complete_config(server_config, resolved_config)
        check_start(facts, resolved.schema)
        hands_over_model: bool = facts["hand_over"]
        # Counts of evaluation have no noise, so a run with differential privacy sends none.
        privacy, level = method_config.privacy, self.policy.evaluation
        rules = dataclasses.replace(
            method_config.count_rules, level=level if privacy is None else "none"
        )
        method_config = dataclasses.replace(method_config, count_rules=rules)
        # Derive the program, and check what it would send against the silo's policy.
        program = program_of(
            resolved_config, schema, method, method_config, hand_over=hands_over_model
        )
        code.check_ops(program)
        with self.errors_stay_here(config):
            block = self._make_block(silo, resolved, dtype)
            plan = plan_of(program, extent_of(block))
        needs = beyond_weights(resolved_config, method, method_config)
        private = self.private_replies(method_config.privacy, audit)
        self.check_policy(ProposedRun(resolved_config, program, needs), plan, audit, private)
        torch.set_num_threads(config.threads)
        keep_freed_memory()
        # From here on the run is agreed to: prepare the data, and describe the run to people.
        note = (
            f"agreed to {method.name}, {count_of(program.rounds, 'round')}: answers have "
            f"{', '.join(kinds_sent(program))}"
            f"{'' if hands_over_model else '; the server keeps its model'}"
        )
        block = block.to(resolved.device, dtype)
        run = SiloRun(silo, resolved_config, method, method_config, block, private)
        specs = sum_specs(resolved_config, schema, method)
        lines = lines_of(
            plan, resolved_config.rounds, audit.hello, self.server, resolved_config.clients, needs
        )
        secure = self.secure_sums(resolved_config)
        remarks = (
            None if secure is None else masked_line(secure.least),
            None if method_config.privacy is None else noised_line(method_config.privacy),
            edge_weights_line,
            describe_weight_scale(resolved_config.edge_weights, silo.edge_weight),
            scale_line(resolved_config, silo.graph),
            # Sums of all silos, by which features may be standardized, are not known yet.
            None if FEATURES in specs else narrowing_line(silo, block, resolved_config.normalize),
        )
        nodes = nodes_of(block)
        agreed = {
            "method": method.name,
            "rounds": resolved_config.rounds,
            "silos": resolved_config.clients,
            "most_bytes": {row.name: row.whole.most for row in plan.sent},  # None: not known
            "nodes": nodes,
            **({} if privacy is None else {"privacy": dataclasses.asdict(privacy)}),
        }
        return Prepared(
            method_config,
            block,
            resolved.device,
            Course(program),
            nodes if secure is None and private is None else {},  # which the server would learn
            note,
            partial(self.store_result, run),
            (*lines, *(line for line in remarks if line is not None)),
            agreed,
            resolved_config.method in needs,
            method.own_weights is not None,
            secure,
            None if secure is None else names_of_rows(silo),
            private,
            BlockInState(block, silo, self.report_line) if specs else None,
        )

    def _fit_to_config(
        self, config: RunConfig, method: Method, make: Make | None
    ) -> tuple[Silo, Resolved, str | None]:
        """Return the silo with features and edges as in a config, the resolved config, and a line.

        Raises:
            ConfigError: the config asks for too much, or for what these data do not have.
        """
        silo = featured(self.silo, config.features)
        check_size(config, choose_parts(config, method), silo)
        schema = schema_of(silo.graph)
        # Whether other silos have weights is in the config: the server has resolved the rule.
        resolved = resolve(config, schema, choose(config, method), make, weighted=True)
        silo = prepare_silo(
            silo,
            "given",  # or made above
            resolved.config.edge_weights,
            directed=resolved.config.directed != "none",
        )
        line = check_edge_weights(
            config,
            resolved.config,
            resolved.parts.method.part,
            resolved.method_config.model,
            self.silo,
        )
        return silo, resolved, line

    @contextmanager
    def errors_stay_here(self, config: RunConfig) -> Iterator[None]:
        """Tell the server of errors only that there was one, where data leave with noise only.

        Errors quote the data: how many steps a round has, or the least weight of an edge.

        Raises:
            PolicyError: in place of the error, so the silo leaves the run and is not asked again.
        """
        try:
            yield
        except Exception as error:
            if config.dp_epsilon is None and not isinstance(
                self.policy.privacy_budget, PrivacyBudget
            ):
                raise
            self.report_line(f"cannot take part in this run: {printable(str(error))}")
            raise PolicyError(
                "the run and the data of this silo do not go together; its log says why, which "
                "the server does not learn with differential privacy: the silo leaves the run",
                **mistake("refused-by-policy", "differential privacy"),
            ) from None

    def secure_sums(self, config: ResolvedConfig) -> SecureSums | None:
        """Return what the silo agrees to of secure aggregation, None for a run without it.

        Raises:
            ConfigError: its policy requires proofs of keys, for which it has no secret; or it does
                not, but the silo is to add a share of noise only.
        """
        if not config.secure_aggregation:
            return None
        is_required = self.policy.secure_aggregation == "require"
        if config.dp_epsilon is not None and not is_required:
            raise ConfigError(
                'expected secure_aggregation = "require" in the policy.toml of a silo that adds a '
                "share of the noise of differential privacy only, got none: without proofs of keys "
                "the server could invent the silos that add the rest; write it there, or let the "
                "server run without --secure-aggregation",
                **mistake("refused-by-policy", "secure_aggregation"),
            )
        secret = common_secret(self.attendance.secret)
        if secret is None and is_required:
            raise ConfigError(
                'expected a secret of all silos with secure_aggregation = "require", by which they '
                "prove their keys to each other, got none: give its file as --secret",
                **mistake("missing-option", "secret"),
            )
        least = self.policy.least_silos or LEAST_SILOS
        return SecureSums(config.clients, least, secret, needs_proofs=is_required)

    def _make_block(self, silo: Silo, run: Resolved, dtype: torch.dtype) -> ClientBlock:
        """Return the silo's block; where biases are shared, with the tags of its users."""
        block = client_block(silo, run.config, dtype)
        if sharing_in(run.parts.method.part, run.method_config.model) is None:
            return block
        return block.with_user_tag(user_tags(silo, common_secret(self.attendance.secret)))

    def check_policy(
        self, run: ProposedRun, plan: RunPlan, audit: RunAudit, private: PrivateReplies | None
    ) -> None:
        """Raise `ConfigError` for a run that the silo's policy does not allow.

        Args:
            run: the run, apart from what the silo has done before and allows at this start.
            plan: what it would send.
            audit: what has been sent, and how many runs there were.
            private: what all runs have cost; None: a run without differential privacy.
        """
        budget, spent = self.policy.privacy_budget, 0.0
        if private is not None and isinstance(budget, PrivacyBudget):
            spent = private.epsilon_of_all_runs(budget.delta)
        allow, sent, least = self.attendance.allow, audit.sent, plan.first.least
        runs, of_server = audit.others
        run = dataclasses.replace(
            run,
            allow=allow,
            sent=sent,
            least=least,
            runs=runs,
            runs_of_server=of_server,
            spent=spent,
        )
        if (refusal := refusal_of(self.policy, run)) is not None:
            raise refusal

    def private_replies(
        self, privacy: UpdatePrivacy | None, audit: RunAudit
    ) -> PrivateReplies | None:
        """Return what adds noise to replies and charges them; None without differential privacy.

        Raises:
            ConfigError: there is nowhere to write charges, the silo has edges to others, or a run
                of this name is over.
            CheckpointError: charges are missing.
        """
        if privacy is None:
            return None
        state = self.attendance.state
        if state is None:
            raise ConfigError(
                "expected a folder for states in a run with differential privacy, where charges "
                "are written, got none: give --state",
                **mistake("missing-option", "state"),
            )
        check_no_cross_edges(self.silo)
        ledger, secret = PrivacyLedger(state), read_or_make_secret(state)
        ledger.check_complete(audit.charged)
        names = [run_name(token) for token in runs_left(state) if has_agreement(state, token)]
        if audit.run not in names and ledger.has_run(audit.run):
            raise ConfigError(
                f"expected a run that this silo has charged nothing for yet, got {audit.run}, "
                f"whose agreement is no longer in {state}: begin a new run",
                **mistake("refused-by-policy", "privacy_budget"),
            )
        budget = self.policy.privacy_budget
        of_nodes = ledger.releases("node")
        if isinstance(budget, PrivacyBudget) and budget.unit == "silo" and of_nodes:
            raise ConfigError(
                "expected no earlier runs that hid single nodes only with a budget for the whole "
                f"silo, got {count_of(len(of_nodes), 'run')}, whose cost to the silo has no bound: "
                'write unit = "node" in privacy_budget of policy.toml, or begin with a new --state '
                "and --audit if these runs shall not count",
                **mistake("refused-by-policy", "privacy_budget"),
            )
        return PrivateReplies(
            privacy,
            ledger,
            secret,
            audit.run,
            audit.record_charge,
            budget if isinstance(budget, PrivacyBudget) else None,
        )

    def report_line(self, line: str) -> None:
        """Report a line to the silo's own people."""
        self.report(Event(What.NOTE, self.silo.name, note=line))

    def store_result(self, run: SiloRun, outcome: Outcome) -> None:
        """Write the result of a run; see `Prepared`."""
        folder, results = self.attendance.out, self.attendance.results
        if folder is None and results is not None:
            folder = folder_of(results, run, outcome)
        if folder is None:
            return
        try:
            write_result(folder, run, outcome, self.attendance.prepared)
        except OSError as error:
            raise ConfigError(
                f"expected to write {folder}, got: {error.strerror}; the silo's states of the run "
                "stay where they are",
                **mistake("unwritable-path", folder),
            ) from None
        self.report(Event(What.RESULT_STORED, self.silo.name, note=str(folder)))


def check_no_cross_edges(silo: Silo) -> None:
    """Raise `ConfigError` for edges to other silos, whose hashes leave without noise."""
    if len(silo.cross.row):
        raise ConfigError(
            "expected no edges to other silos in a run with differential privacy, as their hashes "
            f"leave without noise, got some: delete all rows of "
            f"{CROSS}.csv (or .npz, .parquet) in this silo's folder but the names of its columns; "
            "for folders of a trial, use silograph export-silos --without-cross-edges",
            **mistake("refused-by-policy", "cross_edges"),
        )


def noised_line(privacy: UpdatePrivacy) -> str:
    """Return what differential privacy changes of what a silo sends, for its people."""
    adapts = privacy.quantile is not None
    within = "; the share of updates within the clip is sent with the same noise" if adapts else ""
    return (
        f"differential privacy of a {privacy.unit}: epsilon {privacy.epsilon:g} at delta "
        f"{privacy.delta:g} for {count_of(privacy.releases, 'release')} with noise"
        f"{within}; "
        "counts of evaluation, numbers of nodes and figures of work are zeros"
    )


def masked_line(least: int) -> str:
    """Return what secure aggregation changes of what a silo sends, for its people."""
    return (
        "replies that are summed are sent masked, 8 bytes for each number, and unmasked only in "
        f"sums over at least {count_of(least, 'silo')}; their sizes above are those without masks; "
        "partial sums of rows, and rows of bns, are masked for the silo that needs them; other "
        "rows of nodes are not masked"
    )


def nodes_of(block: ClientBlock) -> dict[str, int]:
    """Return how many nodes, or ratings, of a silo train, validate and test, and its size.

    Rows and edges, those of the halo included, bound the silo's work. A server could also infer
    them from the work that replies report.
    """
    is_validation = judges_of(block).truth.val
    return {
        TRAIN: int(block.num_train[0]),
        VAL: int(is_validation.sum()),
        TEST: int((~is_validation).sum()),
        ROWS: int(block.off[-1]) + int(block.halo.off[-1]),
        EDGES: block.adj.nnz + block.halo.adj.nnz,
    }


def parse_allowed_methods(text: str | None, code: AllowedCode | None = None) -> tuple[str, ...]:
    """Return the names of a list such as `label_guided,collect,own.py:METHOD`.

    Args:
        text: the list.
        code: that the silo allowed.

    Raises:
        ConfigError: a name that is neither a method, `collect` nor `items`.
    """
    names = () if text is None else split_names([text])
    own_methods = () if code is None else code.methods
    allowed_names = dict.fromkeys((*BESIDES, *METHODS, *own_methods))
    canonical_names = tuple(canonical_name(name, allowed_names, "method") for name in names)
    for name in canonical_names:
        lookup(allowed_names, name, "method to allow")
    return canonical_names


@standard_numerics()
def take_part_in_run(
    data: Silo, attendance: Attendance, report: EventCallback = log_event
) -> str | None:
    """Take part in one run; return None, or why the run failed.

    Args:
        data: what the silo holds.
        attendance: where the server is.
        report: called with events.

    Raises:
        ConfigError: the server refused the silo or cannot be reached, a file cannot be used, or
            another process holds the folder for the state.
    """
    need_packages()
    from silograph.federation.session.attach import take_part

    secrets = read_secrets(data, attendance.secret)
    if attendance.out is not None:
        unfinished_runs = () if attendance.state is None else runs_left(attendance.state)
        check_result_folder(attendance.out, [run_name(token) for token in unfinished_runs])
    policy = attendance.policy or NO_POLICY
    if isinstance(policy.privacy_budget, PrivacyBudget):  # all of its runs have noise
        check_no_cross_edges(data)
    check_code(policy, {source.name: source.digest for source in attendance.code.sources.values()})
    roots = read_roots(attendance.ca, insecure=attendance.insecure)
    authority = "none: without TLS" if roots is None else digest_of(roots)
    server = f"{attendance.server} (authority {authority if roots is None else authority[:16]})"
    own_data = OwnData(data, secrets, attendance, report, server)
    session_facts = {"server": attendance.server, "authority": authority, "policy": policy.digest}
    session_facts["silograph"] = versions()["silograph"]
    try:
        with (
            nullcontext() if attendance.state is None else lock_state_folder(attendance.state),
            open_audit(attendance.audit, session_facts) as (audit, audit_note),
        ):
            lines = [*_policy_lines(data, attendance), *([audit_note] if audit_note else [])]
            if isinstance(policy.privacy_budget, PrivacyBudget) and attendance.state is not None:
                ledger = PrivacyLedger(attendance.state)
                ledger.check_complete(audit.charged)  # else too little would be shown
                lines.append(f"privacy budget: {ledger.use_of(policy.privacy_budget)}")
            for line in lines:
                report(Event(What.NOTE, data.name, note=line))
            silo = _make_attaching(own_data, attendance, roots, audit)
            for line in _exposure_lines(attendance):
                report(Event(What.EXPOSED, data.name, note=line))
            if (warning := _end_of_authority(roots)) is not None:
                report(Event(What.EXPIRES, data.name, note=warning))
            reason = audit.to_end(lambda: take_part(silo) or None)
            if attendance.audit is not None:
                line = f"{attendance.audit} ends with {audit.head}"
                report(Event(What.NOTE, data.name, note=line))
    except SilographError as error:
        report(Event(What.ENDED, data.name, reason=str(error)))
        raise
    report(Event(What.ENDED, data.name, reason=reason))
    return reason


def _policy_lines(data: Silo, attendance: Attendance) -> Iterator[str]:
    """Yield lines on what a silo allows, for its people to read before it connects."""
    silo = data if data.graph.num_features else featured(data, "constant")
    yield from attendance.code.lines(schema_of(silo.graph))
    has_file = attendance.policy is not None
    yield from describe_policy(
        attendance.policy or NO_POLICY, has_file=has_file, allow=attendance.allow
    )


def _end_of_authority(roots: bytes | None) -> str | None:
    """Return a warning if all certificates that a silo trusts end soon, or have ended."""
    from silograph.federation.session.identity import end_warning, ends_of

    ends = () if roots is None else ends_of(roots)
    if not ends:
        return None
    return end_warning("the certificate of the server's authority", max(ends), datetime.now(UTC))


def _exposure_lines(attendance: Attendance) -> Iterator[str]:
    """Yield lines on secret files and folders of a silo that other users can read."""
    secrets = [] if attendance.secret is None else [attendance.secret]
    if attendance.secret is not None and attendance.secret.is_dir():
        # Whether others can list the names does not matter, only what the files hold.
        secrets = sorted(path for path in attendance.secret.iterdir() if path.is_file())
    folders = [] if attendance.state is None else [attendance.state, attendance.state / SECRET]
    for path in (attendance.key, *secrets, *folders):
        if (warning := describe_exposure(path)) is not None:
            yield warning


def _make_attaching(
    own_data: OwnData, attendance: Attendance, roots: bytes | None, audit: Audit
) -> "Attaching":
    """Return the settings with which the silo attaches to the server."""
    from silograph.federation.session.attach import Attaching
    from silograph.federation.session.identity import SiloKey, check_name
    from silograph.federation.session.key_versions import own_version
    from silograph.federation.session.signed_heads import HeadSigner

    name, key = check_name(own_data.silo.name), SiloKey.load(attendance.key)
    version = own_version(attendance.key, name, key.public).version
    audit.signer = HeadSigner(name, key, version)

    def make_worker(token: bytes) -> Responder:
        folder = None if attendance.state is None else attendance.state / token.hex()
        store = StateStore(folder, silo_fingerprint(own_data.silo))
        bounds = own_data.policy.bounds
        return Responder(
            token, attendance.code.ops, own_data, store, own_data.report, name, audit, bounds
        )

    return Attaching(
        name=name,
        key=key,
        facts={"versions": versions()},
        server=attendance.server,
        roots=roots,
        make_worker=make_worker,
        patience=attendance.patience,
        report=own_data.report,
        waits=attendance.waits,
    )
