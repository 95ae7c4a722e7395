"""A silo's own policy: what it agrees to, whatever a server asks for.

It is the file policy.toml in the silo's folder, written by the silo's people (`silograph silo
--init-policy` writes a strict one to start from). A rule that it does not have sets no limit, as
without the file; that only methods named here or by `--allow` send rows of nodes holds always.
"""

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor

from silograph.core.config import ENGINE, STRICT, RunConfig, checked
from silograph.core.errors import (
    ConfigError,
    canonical_name,
    lookup,
    mistake,
    read_mistake,
    reword_error,
)
from silograph.core.files import opens_private
from silograph.core.kinds import Kind
from silograph.core.resolved_config import ResolvedConfig, resolved_values
from silograph.core.setting_values import hidden_widths, parse_bytes
from silograph.core.text import count_of, short_repr
from silograph.experiment.report.reading import size_text
from silograph.experiment.resolve.parts import Parts
from silograph.experiment.resolve.run_program import BESIDES, FEATURES, USERS, kinds_sent
from silograph.experiment.resolve.user_code import is_spec
from silograph.federation.privacy.budget import PrivacyBudget
from silograph.federation.program import Program
from silograph.federation.session.silo_data import SendingBounds
from silograph.graph.silos.data import Silo
from silograph.methods import METHODS
from silograph.nn.shared_items import ITEMS
from silograph.task.counts import EvaluationLevel

POLICY = "policy.toml"
ROWS = "sends rows of single nodes through the server"
SENDS = {
    ITEMS: "says which items a silo has",
    USERS: "says how many ratings each user has, under a name that silos share",
    FEATURES: "says which features occur at a silo",
}
Exact = Annotated[int, Field(strict=True, ge=1, lt=2**63)]  # neither "3" nor true
Repeats = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Bytes = Annotated[Exact, BeforeValidator(parse_bytes)]


@checked_dataclass(frozen=True, config=STRICT, kw_only=True)
class RowRules:
    """The table [rows]: how many nodes and silos contribute to each exchanged row, at least.

    Attributes:
        min_nodes: least number of nodes.
        min_silos: least number of silos.
    """

    min_nodes: Exact = 1
    min_silos: Exact = 1


@checked_dataclass(frozen=True, config=STRICT, kw_only=True)
class SiloPolicy:
    """What a silo agrees to; None sets no limit.

    Attributes:
        methods: that may run, and `collect`.
        kinds: of what may leave in calls.
        most_bytes: that leave in a run.
        most_rounds: of a run.
        most_repeats: rounds of a run that are done again, in all.
        most_runs: that the silo takes part in, ever.
        most_runs_of_server: that it takes part in of one server.
        least_silos: of a run, as the server says.
        evaluation: what replies of evaluation hold: histograms and counts, counts only, or zeros.
        evaluation_min_count: least of a run's, see `silograph.task.least_count`.
        privacy_budget: what all runs together may cost of differential privacy; runs without it are
            refused then. `any` sets no limit.
        code: digests of users' code that may run here, by name.
        evaluate_clients: `participants`: the silo scores no model of a round that it does not train
            from, but for the last and the best one; `all` sets no limit.
        secure_aggregation: `require`: the silo takes part in runs with secure aggregation only, and
            masks sums over at least `least_silos`; `any` sets no limit, but refuses shares of noise
            (`OwnData.secure_sums`).
        rows: how many nodes and silos contribute to each exchanged row, at least.
    """

    methods: tuple[str, ...] | None = None
    kinds: tuple[str, ...] | None = None
    most_bytes: Bytes | None = None
    most_rounds: Exact | None = None
    most_repeats: Repeats | None = None
    most_runs: Exact | None = None
    most_runs_of_server: Exact | None = None
    least_silos: Exact | None = None
    evaluation: EvaluationLevel = "histograms"
    evaluation_min_count: Repeats | None = None
    evaluate_clients: Literal["all", "participants"] | None = None
    secure_aggregation: Literal["any", "require"] | None = None
    privacy_budget: PrivacyBudget | Literal["any"] | None = None
    code: Mapping[str, str] | None = None
    rows: RowRules = field(default_factory=RowRules)

    @property
    def digest(self) -> str:
        """SHA-256 of all rules; comments and the order of lines do not count."""
        return sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    @property
    def bounds(self) -> SendingBounds:
        """What is looked at again before each reply leaves."""
        return SendingBounds(self.kinds, self.most_bytes, self.most_repeats)


NO_POLICY = SiloPolicy()


@dataclass(frozen=True, eq=False)
class ProposedRun:
    """A run that a server proposes, and what the silo has done before.

    Attributes:
        config: every default written out.
        program: what it calls.
        needs: what sends rows of single nodes in it, by the names that `--allow` takes.
        allow: what the silo's people allowed for this start.
        sent: bytes that have left in this run, in earlier processes too.
        least: bytes that set-up and the first round send in any case.
        runs: other runs that the silo has agreed to.
        runs_of_server: those of this server.
        spent: epsilon at the delta of `privacy_budget` of all runs, this one to its end included.
    """

    config: ResolvedConfig
    program: Program
    needs: Sequence[str]
    allow: Sequence[str] = ()
    sent: int = 0
    least: int = 0
    runs: int = 0
    runs_of_server: int = 0
    spent: float = 0.0


def refusal_of(policy: SiloPolicy, run: ProposedRun) -> ConfigError | None:
    """Return the error for the first rule that a run breaks, which names the others; or None."""
    errors = list(_broken_rules(policy, run))
    if not errors:
        return None
    first, names = errors[0], dict.fromkeys(error.fields["rule"] for error in errors)
    others = [str(name) for name in names if name != first.fields["rule"]]
    if not others:
        return first
    return reword_error(first, f"{first}; it also breaks {' and '.join(others)}", ConfigError)


def _broken_rules(policy: SiloPolicy, run: ProposedRun) -> Iterator[ConfigError]:
    """Yield the error for each rule that a run breaks."""
    config = run.config
    yield from _missing_permissions(policy, run)
    if policy.kinds is not None:
        missing = [kind for kind in kinds_sent(run.program) if kind not in policy.kinds]
        if missing:
            kinds = f"kinds {', '.join(policy.kinds)}" if policy.kinds else "no kind"
            yield _refusal(
                "kinds",
                f"replies of {kinds}",
                f"a run that sends {', '.join(missing)}",
                f"write kinds = {json.dumps(sorted({*policy.kinds, *missing}))} there",
            )
    if policy.most_rounds is not None and config.rounds > policy.most_rounds:
        yield _refusal(
            "most_rounds",
            f"at most {policy.most_rounds:,} rounds in a run",
            f"{config.rounds:,}",
            "raise most_rounds there",
        )
    if policy.least_silos is not None and config.clients < policy.least_silos:
        yield _refusal(
            "least_silos",
            f"at least {count_of(policy.least_silos, 'silo')}",
            f"{config.clients}",
            "lower least_silos there",
        )
    if policy.secure_aggregation == "require" and not config.secure_aggregation:
        yield _refusal(
            "secure_aggregation",
            "secure aggregation",
            "a run without it",
            "let the server run with --secure-aggregation, or leave secure_aggregation out there",
        )
    for name, minimum, run_minimum in (
        ("nodes", policy.rows.min_nodes, config.min_nodes_per_row),
        ("silos", policy.rows.min_silos, config.min_silos_per_row),
    ):
        if run.needs and run_minimum < minimum:
            yield _refusal(
                f"min_{name}",
                f"at least {minimum} {name} behind each row",
                f"a run with {run_minimum}",
                f"let the server run with --min-{name}-per-row {minimum}, or lower min_{name} "
                "there",
            )
    min_count = policy.evaluation_min_count or 0
    sends_counts = policy.evaluation != "none" or config.feature_drift
    is_hidden = config.secure_aggregation or config.dp_epsilon is not None
    shows_counts = sends_counts and not is_hidden  # of this silo alone
    if config.evaluation_min_count < min_count and shows_counts:
        yield _refusal(
            "evaluation_min_count",
            f"at least {count_of(min_count, 'node')} behind each count of an evaluation or of "
            "--feature-drift",
            f"a run with {config.evaluation_min_count}",
            f"let the server run with --evaluation-min-count {min_count}, or lower "
            "evaluation_min_count there",
        )
    if policy.evaluate_clients == "participants" and not run.program.scoring.bounded:
        yield _refusal(
            "evaluate_clients",
            "only models that the silo trains from to be scored",
            "a run in which it scores those of rounds without it",
            "let the server run with --evaluate-clients participants or let all silos train, or "
            'write evaluate_clients = "all" there',
        )
    yield from _broken_budget(policy, run)
    for what, maximum, runs, prefix, key in (
        ("runs", policy.most_runs, run.runs, "run number", "most_runs"),
        (
            "runs of one server",
            policy.most_runs_of_server,
            run.runs_of_server,
            "its run number",
            "most_runs_of_server",
        ),
    ):
        if maximum is not None and runs + 1 > maximum:
            yield _refusal(
                key, f"at most {maximum:,} {what}", f"{prefix} {runs + 1:,}", f"raise {key} there"
            )
    if policy.most_bytes is not None and run.sent + run.least > policy.most_bytes:
        sent_text = f" after {size_text(run.sent)} that have left" if run.sent else ""
        yield _refusal(
            "most_bytes",
            f"at most {size_text(policy.most_bytes)} in a run",
            f"a run whose set-up and first round send {size_text(run.least)}{sent_text}",
            "raise most_bytes there",
        )


def _broken_budget(policy: SiloPolicy, run: ProposedRun) -> Iterator[ConfigError]:
    """Yield the error of a run that would cost more than the budget has left."""
    budget = policy.privacy_budget
    if not isinstance(budget, PrivacyBudget):
        return
    if run.config.dp_epsilon is None:
        yield _refusal(
            "privacy_budget",
            "differential privacy",
            "a run without it",
            "let the server run with --dp-epsilon and --dp-delta, or leave privacy_budget out "
            "there",
        )
    elif run.config.dp_unit != budget.unit:
        yield _refusal(
            "privacy_budget",
            f"differential privacy of a {budget.unit}",
            f"a run with that of a {run.config.dp_unit}",
            f"let the server run with --dp-unit {budget.unit}, or change unit in privacy_budget "
            "there",
        )
    elif run.spent > budget.epsilon:
        yield _refusal(
            "privacy_budget",
            f"epsilon of at most {budget.epsilon:g} at delta {budget.delta:g} in all runs",
            f"a run with which it would be {run.spent:.4g}",
            "let the server run with a smaller --dp-epsilon, or raise privacy_budget there",
        )


def _missing_permissions(policy: SiloPolicy, run: ProposedRun) -> Iterator[ConfigError]:
    """Yield what neither the policy nor this start allows, of methods and of rows of nodes."""
    allowed = {*(policy.methods or ()), *run.allow}

    def flag(names: Iterable[str]) -> str:
        # The server does not learn what else is allowed.
        return f"--allow {','.join(name for name in names if name not in (policy.methods or ()))}"

    parts = (run.config.method, *(name for name in run.needs if name in BESIDES))
    missing = [name for name in parts if name not in allowed]
    if policy.methods is not None and missing:
        methods = f"one of {', '.join(policy.methods)}" if policy.methods else "no method"
        pronoun = "it" if len(missing) == 1 else "them"
        remedy = f"add {pronoun} to methods there, start the silo with {flag(parts)}"
        yield _refusal("methods", methods, " and ".join(missing), remedy)
    missing = [name for name in run.needs if name not in allowed]
    if missing:
        sends = ", nor to ".join(f"{name}, which {SENDS.get(name, ROWS)}" for name in missing)
        yield ConfigError(
            f"this silo has not agreed to {sends} (docs/reference/policy.md): start it with "
            f"{flag(run.needs)}, or leave the run",
            **mistake("refused-by-policy", "methods"),
        )


def _refusal(rule: str, expected: str, got: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"expected {expected} by this silo's {POLICY}, got {got}: {remedy}, or leave the run",
        **mistake("refused-by-policy", rule),
    )


def check_code(policy: SiloPolicy, digests: Mapping[str, str]) -> None:
    """Raise `ConfigError` where a silo's people allow code that its policy does not list.

    Args:
        policy: of the silo.
        digests: of what `--allow-code` names, by name.
    """
    for name, digest in digests.items() if policy.code is not None else ():
        listed_digest = (policy.code or {}).get(name)
        if listed_digest != digest:
            in_place = "" if listed_digest is None else f" in place of {listed_digest}"
            raise ConfigError(
                f"expected code that {POLICY} lists under [code], got {name} with digest "
                f'{digest}{in_place}: write "{name}" = "{digest}" there once you have read it',
                **mistake("refused-by-policy", "code"),
            )


def read_policy(folder: Path) -> SiloPolicy | None:
    """Return the policy of a silo's folder, None where it has none.

    Raises:
        ConfigError: the file is damaged, or has an unknown key, or a value of another type or out
            of range.
    """
    path = folder / POLICY
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not path.is_symlink():
            return None
        raise ConfigError(
            f"expected a policy behind the link {path}, got none: without one nothing is limited; "
            "mend the link, or remove it",
            **mistake("missing-file", path),
        ) from None
    except OSError as error:
        raise ConfigError(
            f"expected to read {path}, got: {error.strerror}", **read_mistake(error, path)
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path}: expected TOML, got: {error}", **mistake("wrong-format", path)
        ) from None
    try:
        return policy_of(values)
    except ConfigError as error:
        raise reword_error(error, f"{path}: {error}", ConfigError) from None


def policy_of(values: Mapping[str, Any]) -> SiloPolicy:
    """Return the policy of the keys of a file; raise `ConfigError` where one is wrong."""
    rows = values.get("rows", {})
    if isinstance(rows, dict):
        values = {**values, "rows": checked(RowRules, rows, "[rows]")}
    budget = values.get("privacy_budget")
    if isinstance(budget, dict):
        budget = checked(PrivacyBudget, budget, "privacy_budget")
        values = {**values, "privacy_budget": budget}
    policy = checked(SiloPolicy, values, POLICY)
    for name in policy.kinds or ():
        lookup({str(kind): kind for kind in Kind}, name, "kind in kinds")
    if policy.methods is None:
        return policy
    library_names = dict.fromkeys((*BESIDES, *METHODS))
    methods = [canonical_name(name, library_names, "method in methods") for name in policy.methods]
    for name in methods:
        if not is_spec(name):
            lookup(library_names, name, "method in methods")
    return replace(policy, methods=tuple(methods))


def describe_policy(policy: SiloPolicy, *, has_file: bool, allow: Sequence[str]) -> Iterator[str]:
    """Yield lines that describe the rules, for the silo's people."""
    allow_text = f"; --allow {','.join(allow)}" if allow else ""
    if not has_file:
        yield f"no {POLICY}: methods that send weights and counts only{allow_text}; no other limit"
        return
    yield f"{POLICY} holds, digest {policy.digest[:16]}{allow_text}"
    for key, value in asdict(policy).items():
        text = {None: "no limit", (): "none"}.get(value) if not isinstance(value, dict) else None
        yield f"  {key}: {text or _value_text(key, value)}"


def _value_text(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {n}" for name, n in value.items()) or "none"
    if isinstance(value, tuple):
        return ", ".join(value)
    if isinstance(value, str):
        return value
    return size_text(value) if key == "most_bytes" else f"{value:,}"


STRICT_POLICY = """\
# The policy of this silo: what it agrees to, whatever a server asks for.
# It is read when the silo starts, and holds for all of its runs. A key that is left out sets no
# limit. What the silo has sent is in audit.jsonl (silograph audit FILE).
# docs/reference/policy.md explains the keys.

# Methods that may run; "own_heads.py:METHOD" for one of your own. Those below send weights, losses
# and counts. A method that sends rows of single nodes (label_guided, collect, ...; the page above
# lists them) may do so where it is listed here, or where this start has --allow METHOD.
methods = ["fedavg", "fedacs", "fedmf", "fedopt", "fedprox", "scaffold", "fedper", "gcfl",
    "gcflplus", "fedsage_local", "local"]

# Kinds of what may leave in calls, as the ledger names them (docs/explanation/ledger.md).
kinds = ["control", "evaluation", "weights"]

# Most bytes that leave in a run, all repeated rounds counted; 500, "20 MB", "1.5GB".
most_bytes = "100 MB"

# Most rounds of a run, and how many of them may be done again, as after lost streams: each time is
# one more look at the silo's data. What was answered before counts, in earlier processes, too.
most_rounds = 100
most_repeats = 20

# Most runs that this silo takes part in, in all and of one server, as audit.jsonl counts them.
most_runs = 20
most_runs_of_server = 10

# Least number of silos in a run. The server says how many: a silo cannot count the others.
least_silos = 3

# With "require" the silo takes part only where its replies are masked (--secure-aggregation), and
# makes sure by itself that each sum is over at least least_silos; all silos need one secret file.
# "any" sets no limit, but refuses runs with both secure aggregation and differential privacy.
secure_aggregation = "any"

# What all runs of this silo together may cost of differential privacy (--dp-epsilon), such as
# { epsilon = 8.0, delta = 1e-5 }; privacy.jsonl in the folder of states counts it, and runs without
# differential privacy of silos are refused then (with unit = "node": of nodes). "any" sets no
# limit.
privacy_budget = "any"

# What the server gets when models are evaluated on this silo's validation and test nodes: "none"
# (the silo evaluates for itself, its figures stay in its own result), "counts" (right and wrong
# predictions by class, and losses), or "histograms" (of scores by class, too, for the AUC).
evaluation = "counts"

# Least number of nodes behind each of these counts that a run must agree to keep.
evaluation_min_count = 5

# Whose models of rounds this silo scores: "participants" are those that train from a model; "all"
# lets a server have it score every round's model, also of rounds in which it does not train.
evaluate_clients = "participants"

# Code of your own that --allow-code may bring, by name and digest (the silo shows the digest).
[code]
# "own_heads.py" = "1f0c22aa90b3d7e41f0c22aa90b3d7e4"

# Least number of nodes and of silos behind each row that methods exchange.
[rows]
min_nodes = 5
min_silos = 2
"""


def write_policy(folder: Path) -> Path:
    """Write a strict policy into a silo's folder and return its path.

    Raises:
        ConfigError: there is one already, or it cannot be written.
    """
    path = folder / POLICY
    try:
        with open(path, "x", encoding="utf-8", opener=opens_private) as file:
            file.write(STRICT_POLICY)
    except FileExistsError:
        raise ConfigError(
            f"expected no policy at {path} yet, got one: it stays as it is",
            **mistake("existing-output", path),
        ) from None
    except OSError as error:
        raise ConfigError(
            f"expected to write {path}, got: {error.strerror}", **mistake("unwritable-path", path)
        ) from None
    return path


# --- Checks of a server's config before a silo agrees to a run -----------------------------------


# Limits of a server's config, so that none can block a silo or fill its memory.
MOST = {"threads": 256, "layers": 1000, "local_epochs": 10_000, "rounds": 1_000_000}
MOST_OF_PARTS = {
    "model.hops": 1000,
    "model.heads": 1000,
    "model.embedding": 4096,
    "neighbors.width": 4096,
    "method.communities": 1000,
    "method.most": 20,  # rows that FedSage+ generates for a node, in states and checkpoints
    "method.generator_width": 1024,
}
MOST_WEIGHTS = 2**28
MOST_IN_TABLES = 2**30  # numbers of embeddings of a silo's own users and items
MOST_STEPS = 100_000  # of a silo in a round
# Settings of the server's config that silos do not need.
PRIVATE = (
    *("out", "tracker", "data_dir", "dataset", "columns", "na_values", "rating_scale"),
    "repeated_edges",
    *ENGINE,
)
OWN = (*PRIVATE, "options", "device", "block_size")  # that a silo sets, or reads apart


def check_complete_config(server_config: Mapping[str, Any], config: ResolvedConfig) -> None:
    """Raise `ConfigError` for a server's config that leaves a default or a reading to the silo.

    Both ends, and whoever reads what a silo agreed to, must mean the same by it.
    """
    own = resolved_values(config)  # without None
    options, own_options = server_config.get("options", {}), own["options"]
    needed = [name for name in own if name not in (*PRIVATE, "block_size")]
    missing = [name for name in needed if server_config.get(name) is None]
    missing += [name for name in own_options if options.get(name) is None]
    if missing:
        raise ConfigError(
            f"expected a server's config with every default written out, got none of {missing[0]}"
        )
    own |= own_options
    for name, value in ({k: v for k, v in server_config.items() if k not in OWN} | options).items():
        text, own_text = (json.dumps(each) for each in (value, own.get(name)))
        if text != own_text:  # as texts: 2.0 and true are no 2 and 1 there
            raise ConfigError(
                f"expected {name} as it is used, {own_text}, got {short_repr(value)} (server)"
            )


def batches_of(config: RunConfig, options: Mapping[str, Any], silo: Silo) -> int:
    """Return how many batches a local epoch has at most, by the number of batches or their size."""
    num_batches = options.get("method.batches")
    batches = num_batches if isinstance(num_batches, int) else 1
    if config.batch_size is not None:
        batches = max(batches, -(-len(silo.graph.y) // config.batch_size))
    return batches


def check_size(config: RunConfig, parts: Parts, silo: Silo) -> None:
    """Raise `ConfigError` for a run that is larger than a silo does for a server."""
    options, fields = parts.options, vars(config)
    for name, maximum in (MOST | MOST_OF_PARTS).items():
        value = options.get(name, fields.get(name))
        if isinstance(value, int) and value > maximum:
            short_name = name.rpartition(".")[2]
            raise ConfigError(
                f"expected {short_name} of at most {maximum} at a silo, got {value}",
                **mistake("refused-by-policy", short_name),
            )
    steps = (config.local_epochs or 1) * batches_of(config, options, silo)
    if steps > MOST_STEPS:
        raise ConfigError(
            f"expected at most {MOST_STEPS:,} steps of a round at a silo, got {steps:,}: take "
            "fewer local epochs, or fewer or larger batches",
            **mistake("refused-by-policy", "steps"),
        )
    hidden = hidden_widths(config.hidden, config.layers)
    widths = silo.graph.num_features, *hidden, silo.num_classes
    num_weights = sum(inputs * outputs for inputs, outputs in pairwise(widths))
    if num_weights * int(options.get("model.heads") or 1) > MOST_WEIGHTS:
        raise ConfigError(
            f"expected a model of at most {MOST_WEIGHTS:,} weights at a silo, got about "
            f"{num_weights:,}: take a smaller hidden width, or fewer layers",
            **mistake("refused-by-policy", "weights"),
        )
    _check_embeddings(int(options.get("model.embedding") or 0), options, silo)


def _check_embeddings(width: int, options: Mapping[str, Any], silo: Silo) -> None:
    """Raise `ConfigError` for rows of items, or embeddings of ratings, that fill the memory."""
    table_size = int(options.get("model.items") or 0) * (width + 1)
    if table_size > MOST_WEIGHTS:
        raise ConfigError(
            f"expected a table of items of at most {MOST_WEIGHTS:,} weights at a silo, got "
            f"{table_size:,}: take fewer items (rows), or a smaller embedding",
            **mistake("refused-by-policy", "items"),
        )
    if width and isinstance(silo.graph.x, Tensor):
        num_values = width * int((silo.graph.x > 0).sum())  # a row for each user and item
        if num_values > MOST_IN_TABLES:
            raise ConfigError(
                f"expected embeddings of at most {MOST_IN_TABLES:,} numbers at a silo, got more: "
                "take a smaller embedding",
                **mistake("refused-by-policy", "embedding"),
            )
