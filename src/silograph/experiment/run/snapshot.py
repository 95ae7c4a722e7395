"""A run between two rounds, as tensors and facts, and back: what a checkpoint holds.

Everything that decides the rest of the run is here or in the config; draws come from keys, so
there is no random state to save.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from silograph.core.config import ENGINE, RunConfig
from silograph.core.errors import CheckpointError, SilographError
from silograph.core.payload import Shared, State, fields_under, moved, with_prefix
from silograph.core.resolved_config import training_key
from silograph.core.setting_values import PLAIN_WEIGHTS
from silograph.evaluation.evaluate import HISTOGRAM
from silograph.exchange.sent_weights import check_remembered
from silograph.experiment.resolve.user_code import code_digests, differs
from silograph.experiment.result_files import digest_of_bytes
from silograph.experiment.run.round_scores import (
    Counts,
    JudgedRound,
    PendingRound,
    judged_from_counts,
    task_in,
)
from silograph.experiment.run.setup import Setup, versions
from silograph.experiment.run.trained_model import checked_statistics
from silograph.federation.checkpoint import Checkpoint, state_from, state_tensors
from silograph.federation.program import calls_of
from silograph.federation.state_files import StateFile, read_state, state_files
from silograph.graph.column_statistics import DRIFT
from silograph.methods import METHODS
from silograph.methods.base import ServerState, own_weights
from silograph.nn.conv import Params
from silograph.task.least_count import specs_to_send

# --- server parts --------------------------------------------------------------------------------
# What parts of a run other than the method store in the server's memory, and so in checkpoints.


SELECTOR, CONTROLLER, SELECTED = "selector/", "controller/", "selected/"
STATISTICS = "statistics/"  # what was fitted to the training data of all clients
DISTANCES = f"{DRIFT}/distances"  # (C, F) of them, with feature_drift
PARTS = SELECTOR, CONTROLLER, SELECTED, STATISTICS


def without_parts(state: ServerState) -> ServerState:
    """Return the server's state with the method's own memory only."""
    method_memory = {n: t for n, t in state.memory.items() if not n.startswith(PARTS)}
    return (
        state
        if len(method_memory) == len(state.memory)
        else ServerState(state.weights, method_memory)
    )


class PartMemory(dict[str, Tensor]):
    """The tensors of a part between rounds, by name.

    A checkpoint of an older version may lack a name that the part reads now.
    """

    def __init__(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self._part = part

    def __missing__(self, name: str) -> Tensor:
        """Raise `CheckpointError`, of one line in place of a traceback."""
        raise CheckpointError(
            f"expected {name!r} in what the {self._part} keeps between rounds, got "
            f"{', '.join(sorted(self)) or 'nothing'}: its functions must return the same names in "
            "every round; a checkpoint of another version needs a new run"
        )


def part_of(state: ServerState, prefix: str) -> Mapping[str, Tensor]:
    """Return the tensors of one part, without the prefix of their names."""
    items = state.memory.items()
    tensors = {name.removeprefix(prefix): t for name, t in items if name.startswith(prefix)}
    return PartMemory(prefix.removesuffix("/"), tensors)


def with_part(state: ServerState, prefix: str, tensors: Mapping[str, Tensor]) -> ServerState:
    """Return the server's state with the tensors of one part replaced."""
    others = {name: t for name, t in state.memory.items() if not name.startswith(prefix)}
    return ServerState(state.weights, {**others, **with_prefix(prefix[:-1], tensors)})


OTHER_FORM = TypeError, ValueError, IndexError, AttributeError, ArithmeticError, RuntimeError
COUNTED = (
    *("best/personalized", "best/server", "scores/personalized", "scores/server"),
    *("pending", "each"),
)
OWN = "own"  # begins the names of clients' own weights among those of the best round
# Packages whose version decides the bits of a result.
NUMERIC = ("silograph", "torch", "numpy", "scipy", "numba")


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A run after a round.

    Attributes:
        round: the round that is over; 0 before the first.
        state: the server's.
        best: the best round so far, None before the first judged one.
        seconds: of training so far.
        stopped: why the run is over, None while it goes on.
        scores: of the last round that was scored, from round 0 on, without its weights; None where
            nothing in the run decides by them (`Needs.score_first`).
        client_facts: what the method reports of each client in this round, (C,).
        virtual_seconds: of the virtual clock so far, None without one.
        pending: what is known of this round where its server's model is scored in the next one.
        executed: operations executed here so far, see `Engine.executed`.
        each: counts of each client's best round so far, see
            `silograph.experiment.run.round_scores`; None where that is not known.
    """

    round: int
    state: ServerState
    best: JudgedRound | None
    seconds: float
    stopped: str | None
    scores: JudgedRound | None = None
    client_facts: Mapping[str, Tensor] = field(default_factory=dict)
    virtual_seconds: float | None = None
    pending: PendingRound | None = None
    executed: float | None = None
    each: Counts | None = None


def identity(setup: Setup) -> dict[str, str]:
    """Return everything that must be equal for a run to be resumed, by name."""
    config = {f.name: getattr(setup.config, f.name) for f in fields(setup.config)}
    for name in ("out", "tracker", *ENGINE):  # they decide no number
        del config[name]
    options = config.pop("options")
    # The model of a run may be a class of this process: its source counts, not its file.
    source, installed_versions = setup.method_config.model.source, versions()
    return {
        **{f"config {name}": repr(value) for name, value in config.items()},
        **{f"option {name}": repr(value) for name, value in options.items()},
        **({} if source is None else {"source of the model": digest_of_bytes(source.encode())}),
        **{kind: digest for kind, digest in code_digests(setup.config).items() if kind != "model"},
        **({} if setup.simulated is None else {"graph": setup.cut.fingerprint}),
        **({} if setup.shards is None else {"graph": setup.shards.fingerprint}),
        **({"silos": setup.cut.silos} if setup.simulated and setup.cut.silos else {}),
        "partition": setup.partition_hash,
        **{name: installed_versions.get(name, "not installed") for name in NUMERIC},
    }


def check_identity(
    run_identity: Mapping[str, str], current_identity: Mapping[str, str], config: RunConfig
) -> None:
    """Raise `CheckpointError` unless two identities are the same.

    A field or option that the run did not have came later, and its default says how things were
    then.

    Args:
        run_identity: of the run.
        current_identity: of the run as it would go on.
        config: of the run's folder.

    Raises:
        CheckpointError: names what differs, and both values.
    """
    added_fields = {
        f"config {f.name}" for f in fields(config) if getattr(config, f.name) == f.default
    }
    options = {name for name in current_identity if name.startswith("option ")}
    added_fields |= {name for name in options if name.removeprefix("option ") not in config.options}
    for name in sorted(
        (current_identity.keys() | run_identity.keys()) - (added_fields - run_identity.keys())
    ):
        if run_identity.get(name) != current_identity.get(name):
            raise differs(name, current_identity.get(name), run_identity.get(name))


def to_checkpoint(
    setup: Setup,
    snapshot: Snapshot,
    run: str,
    prefixes: Mapping[str, tuple[int, str]],
    files: Sequence[StateFile] | None = None,
) -> Checkpoint:
    """Return the checkpoint of a snapshot.

    Args:
        setup: the run.
        snapshot: where it is.
        run: digest of the run's identity.
        prefixes: bytes and digest of what the folder's growing files begin with, and belongs to
            this snapshot.
        files: where workers have written the clients' states, by block; None: nowhere.
    """
    state, best = snapshot.state, snapshot.best
    groups: dict[str, Mapping[str, Tensor] | None] = {
        "server/memory": state.memory,
        "server/weights": state.weights,
    }
    if best is not None:
        groups |= {"best/personalized": best.personalized, "best/server": best.server}
    last = snapshot.scores
    if last is not None:
        groups |= {"scores/personalized": last.personalized, "scores/server": last.server}
    pending = snapshot.pending
    if pending is not None:
        groups["pending"] = pending.judged.personalized
    if snapshot.each is not None:
        groups["each"] = snapshot.each
    if snapshot.client_facts:
        groups["facts"] = snapshot.client_facts
    tensors: dict[str, Tensor] = {}
    for prefix, group in groups.items():
        tensors |= with_prefix(prefix, group or {})
    for number, block in enumerate(setup.federation.states() if files is None else ()):
        tensors |= with_prefix(f"client/{number}", state_tensors(block))
    facts: dict[str, Any] = {
        "run": run,
        "prefixes": dict(prefixes),
        "groups": [prefix for prefix, group in groups.items() if group is not None],
        "best_round": None if best is None else best.round,
        "best_apart": separate_best_weights(snapshot) is not None,
        "best_away": [] if best is None else list(best.away),
        "seconds": snapshot.seconds,
        "stopped": snapshot.stopped,
    }
    if files is not None:
        facts["states"] = {file.path.name: file.digest for file in files}
    if engine_facts := setup.federation.remembered:
        facts["engine"] = dict(engine_facts)
    if pending is not None:
        facts |= {"pending_row": dict(pending.row), "pending_away": list(pending.judged.away)}
    if snapshot.virtual_seconds is not None:
        facts["virtual_seconds"] = snapshot.virtual_seconds
    if snapshot.executed is not None:
        facts["executed"] = snapshot.executed
    if last is not None:
        facts |= {"scores_round": last.round, "scores_away": list(last.away)}
    return Checkpoint(snapshot.round, tensors, facts)


def separate_best_weights(snapshot: Snapshot) -> Params | None:
    """Return the best round's weights, and clients' own, where they are not the current ones."""
    best = snapshot.best
    if best is None or best.round == snapshot.round:
        return None
    return {**(best.weights or {}), **with_prefix(OWN, best.own or {})} or None


def _finite_number(value: Any) -> float | None:
    number = None if value is None else float(value)
    if number is not None and not math.isfinite(number):
        raise ValueError(number)
    return number


def _check_facts(setup: Setup, checkpoint: Checkpoint) -> None:
    """Raise `ValueError` for invalid facts of a checkpoint."""
    facts, ids = checkpoint.facts, setup.federation.ids
    for round_number in (facts["best_round"], facts.get("scores_round")):
        if round_number is not None and (
            type(round_number) is not int or not 0 <= round_number <= checkpoint.round
        ):
            raise ValueError(round_number)
    if not isinstance(facts["stopped"], str | None):
        raise TypeError(facts["stopped"])
    for name in ("best_away", "scores_away", "pending_away"):
        if not set(facts.get(name, ())) <= set(ids):
            raise ValueError(name)


def _check_counts(setup: Setup, counts: Mapping[str, Tensor]) -> None:
    """Raise `ValueError` for counts of another form than those of this run's predictions."""
    model, clients = setup.method_config.model, len(setup.federation.ids)
    clients = 1 if setup.config.secure_aggregation else clients  # the sum of all
    rules = replace(setup.method_config.count_rules, val_histogram=True)
    for name, spec in specs_to_send(task_in(setup), model.outputs, rules).items():
        t = counts.get(name)
        if t is None:
            continue
        # Histograms are summed over clients.
        client_dims = () if name.endswith(HISTOGRAM) else (clients,)
        if t.shape != (*client_dims, *spec.shape):
            raise ValueError(name)
        floating = spec.dtype.is_floating_point or (name.endswith(HISTOGRAM) and rules.merges)
        if t.is_floating_point() is not floating:
            raise ValueError(name)
        if name.startswith("val") and not bool(t.isfinite().all()):
            raise ValueError(name)


def _weights_sent(setup: Setup) -> dict[str, tuple[int | None, ...]]:
    """Return shapes by name of the server's weights that clients get whole in a round."""
    # With the shapes that the server holds, not those that travel.
    calls, cfg = setup.method.calls, replace(setup.method_config, sent=PLAIN_WEIGHTS)
    if METHODS.get(setup.method.name) is not setup.method:
        return {}  # a user's server may make what it sends of its memory
    steps = () if calls is None else calls.round(cfg, 1, training_key(setup.config))
    return {
        name.removeprefix("weights/"): spec.shape
        for call in calls_of(steps)
        for name, spec in call.inbox_specs.items()
        if name.startswith("weights/") and spec.form is Shared
    }


def _check_groups(setup: Setup, facts: Mapping[str, Any], parts: Mapping[str, Tensor]) -> None:
    """Raise `ValueError` for invalid groups of tensors."""
    groups = facts["groups"]
    if not isinstance(groups, list) or not all(isinstance(prefix, str) for prefix in groups):
        raise ValueError(groups)
    for prefix in COUNTED:
        counts = fields_under(prefix, parts)
        if counts and prefix not in groups:
            raise ValueError(prefix)
        if any(not t.is_floating_point() and bool((t < 0).any()) for t in counts.values()):
            raise ValueError(prefix)
        _check_counts(setup, counts)
    best_by_client, best = (fields_under(name, parts) for name in ("each", "best/personalized"))
    if best_by_client and best_by_client.keys() != {
        name for name in best if not name.endswith(HISTOGRAM)
    }:
        raise ValueError(best_by_client.keys())
    weights, calls = fields_under("server/weights", parts), setup.method.calls
    has_model = calls is not None and calls.scores_server(setup.method_config)
    if "server/weights" not in groups and (weights or has_model):
        raise ValueError(groups)
    shapes = dict(setup.method_config.model.weight_shapes)
    scored = {
        f"{name}/server" for name in ("best", "scores") if facts.get(f"{name}_round") is not None
    }
    if has_model and not scored <= set(groups):
        raise ValueError(groups)
    if has_model and {n: tuple(t.shape) for n, t in weights.items()} != shapes:
        raise ValueError(weights.keys())
    memory = fields_under(
        "server/memory", parts
    )  # where methods without a server's model keep weights
    shapes_by_name = {n: tuple(w.shape) for n, w in {**memory, **weights}.items()}
    if not _weights_sent(setup).items() <= shapes_by_name.items():
        raise ValueError(shapes_by_name.keys())
    check_remembered(setup.method_config, memory, len(setup.federation.ids))


@contextmanager
def _checking_form() -> Iterator[None]:
    """Turn errors of reading an invalid checkpoint inside the block into `CheckpointError`."""
    try:
        yield
    except KeyError as error:
        raise CheckpointError(f"expected {error} in the checkpoint, got none") from None
    except SilographError:
        raise
    except OTHER_FORM as error:
        raise CheckpointError(
            "expected a checkpoint as this version writes it, got facts or tensors of another form "
            f"({type(error).__name__}): begin a new run"
        ) from None


def _states_in(
    setup: Setup, checkpoint: Checkpoint, parts: Mapping[str, Tensor], folder: Path | None
) -> Sequence[State | StateFile]:
    """Return the clients' states by block, or their files; see `from_checkpoint`."""
    number, names = len(setup.federation.states()), checkpoint.facts.get("states")
    if folder is None or names is None:
        return [state_from(fields_under(f"client/{block}", parts)) for block in range(number)]
    files = state_files(folder, checkpoint.round, names)
    if len(files) != number:
        raise CheckpointError(f"expected states of {number} blocks, got {len(files)}")
    return files


def _own_models(
    setup: Setup, weights: Params, states: Sequence[State | StateFile]
) -> Params | None:
    """Return the clients' own models in their states, None where they have none."""
    if setup.method.own_weights is None:  # no file has to be read
        return None
    read = [read_state(state) if isinstance(state, StateFile) else state for state in states]
    on_device = [{name: moved(f, setup.device) for name, f in state.items()} for state in read]
    return own_weights(setup.method, setup.method_config, weights, on_device)


def from_checkpoint(
    setup: Setup,
    checkpoint: Checkpoint,
    best_weights: Mapping[str, Tensor] | None,
    folder: Path | None = None,
) -> tuple[Snapshot, Sequence[State | StateFile]]:
    """Return the snapshot, and the clients' states by block or their files.

    Args:
        setup: the run.
        checkpoint: what `to_checkpoint` made.
        best_weights: of the best round, if they are in a file of their own according to the facts.
        folder: of the checkpoint; None: it has no file.

    Raises:
        CheckpointError: something that every checkpoint has is missing.
    """
    parts = {name: t.to(setup.device) for name, t in checkpoint.tensors.items()}
    facts = checkpoint.facts

    def group(prefix: str) -> dict[str, Tensor] | None:
        return fields_under(prefix, parts) if prefix in facts["groups"] else None

    def scored(prefix: str, t: int, weights: Params | None, away: Iterable[str]) -> JudgedRound:
        own = fields_under(f"{prefix}/personalized", parts)
        return judged_from_counts(setup, t, group(f"{prefix}/server"), own, weights, tuple(away))

    with _checking_form():
        _check_facts(setup, checkpoint)
        _check_groups(setup, facts, parts)
        # Parts of a run compute on the CPU, wherever the method does.
        memory = fields_under("server/memory", parts)
        memory = {name: t.cpu() if name.startswith(PARTS) else t for name, t in memory.items()}
        for name, spec in setup.sums.items():
            mean, deviation = (memory[f"{STATISTICS}{name}/{k}"] for k in ("mean", "deviation"))
            checked_statistics(mean, deviation, (spec.width,))
        if setup.config.feature_drift:
            distances = memory[STATISTICS + DISTANCES]
            shape = len(setup.federation.ids), setup.schema.num_features
            if distances.shape != shape or not bool((distances <= 1).all()):
                raise ValueError(f"distances of shape {tuple(distances.shape)}")
        state = ServerState(group("server/weights"), memory)
        best, scores, pending = None, None, None
        if facts["best_round"] is not None:
            best_on_device = {name: w.to(setup.device) for name, w in (best_weights or {}).items()}
            server = {n: w for n, w in best_on_device.items() if not n.startswith(f"{OWN}/")}
            weights, away = server or state.weights, facts.get("best_away", ())
            best = scored("best", facts["best_round"], weights, away)
            best = replace(best, own=fields_under(OWN, best_on_device) or None)
        if "scores_round" in facts:
            scores = scored("scores", facts["scores_round"], None, facts["scores_away"])
        if "pending_row" in facts:
            own, away = fields_under("pending", parts), tuple(facts["pending_away"])
            partial_scores = judged_from_counts(setup, checkpoint.round, None, own, None, away)
            pending = PendingRound(partial_scores, dict(facts["pending_row"]))
        best_by_client = group("each")
        seconds, stopped = _finite_number(facts["seconds"]) or 0.0, facts["stopped"]
        virtual, executed = (_finite_number(facts.get(k)) for k in ("virtual_seconds", "executed"))
    states = _states_in(setup, checkpoint, parts, folder)
    if best is not None and best.round == checkpoint.round:
        best = replace(best, own=_own_models(setup, best.weights or {}, states) or None)
    facts = {name: t.cpu() for name, t in fields_under("facts", parts).items()}
    snapshot = Snapshot(
        checkpoint.round, state, best, seconds, stopped, scores, facts, virtual, pending, executed
    )
    return replace(snapshot, each=best_by_client), states
