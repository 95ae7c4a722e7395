"""Laws of the error tree and of names that no table holds; codes, fields and their wording."""

import ast
import copy
import pickle
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import silograph as sg
from runs import FAST
from silograph.core import errors
from silograph.core.config import make_config
from silograph.core.errors import (
    CODES,
    AbsentError,
    CheckpointError,
    ConfigError,
    DataError,
    FrameError,
    OpError,
    PartitionError,
    PolicyError,
    ProtocolError,
    SilographError,
    StateError,
    TrainingError,
    install_command,
    lookup,
    missing_package,
    mistake,
    reword_error,
    unknown,
)
from silograph.core.files import check_new_file
from silograph.core.payload import Stacked
from silograph.core.run_file import parse_options, read_toml
from silograph.deploy.server_settings import read_file
from silograph.experiment.resolve.resolve import resolve_without_data
from silograph.experiment.resolve.user_code import check_trusted, differs, import_spec
from silograph.experiment.result_files import check_format, read_json
from silograph.experiment.run.round_scores import divergence_error
from silograph.experiment.run.trained_model import check_names
from silograph.federation.base import AwayError
from silograph.federation.check import check_fields
from silograph.federation.checkpoint import CheckpointFolder
from silograph.federation.matching import Hello, SiloFacts, match
from silograph.federation.program import Program
from silograph.federation.secure.protocol import SiloSum
from silograph.federation.session.engine import Failures
from silograph.federation.session.peer import LostError
from silograph.federation.session.silo_data import SendingBounds
from silograph.federation.session.state_store import lock_state_folder
from silograph.graph.partition.partition import Partition
from silograph.graph.read import tables
from silograph.graph.read.tables import Table, check_unpacked
from silograph.study.study_request import check_resumable

SOURCE = Path(errors.__file__).parents[1]
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"
CLASSES: tuple[type[SilographError], ...] = (
    ConfigError,
    DataError,
    PartitionError,
    OpError,
    ProtocolError,
    FrameError,
    PolicyError,
)
CLASSES += (TrainingError, CheckpointError, StateError, AbsentError, LostError)
OF_CLASSES = {kind.code for kind in CLASSES} | {SilographError.code, "system"}


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (ConfigError, ValueError),
        (DataError, ValueError),
        (PartitionError, ValueError),
        (ProtocolError, RuntimeError),
    ],
)
def test_every_error_is_caught_by_the_root_and_by_its_builtin(
    kind: type[Exception], builtin: type[Exception]
) -> None:
    assert issubclass(kind, SilographError)
    assert issubclass(kind, builtin)


@pytest.mark.parametrize(
    ("got", "message"),
    [
        # One edit away, in another case, and with nothing near: no guess is better than a bad one.
        ("fedavgg", "unknown method 'fedavgg': did you mean 'fedavg'?"),
        ("FedAvg", "unknown method 'FedAvg': did you mean 'fedavg'?"),
        ("zzz", "unknown method 'zzz'; choices: fedavg, local"),
        ("", "unknown method ''; choices: fedavg, local"),
        ("a\nb", "unknown method 'a\\nb'; choices: fedavg, local"),
    ],
)
def test_an_unknown_name_is_told_with_the_nearest_one(got: str, message: str) -> None:
    error = unknown("method", got, ["local", "fedavg"])
    assert isinstance(error, ConfigError)
    assert str(error) == message


@pytest.mark.parametrize(
    ("got", "meant"),
    [
        ("gnc", "'gcn'"),  # swapped letters, not another one
        ("GCFL+", "'gcflplus'"),  # as papers write it
        ("user-di", "'user-id'"),
        ("acc", "'accuracy'"),  # the beginning of a name, and of what begins with that
        ("fed", None),  # of several
    ],
)
def test_the_nearest_name_is_that_which_was_meant(got: str, meant: str | None) -> None:
    known = ["gcn", "gin", "auc", "accuracy", "accuracy_of_all", "fedproximal", "fedaveraging"]
    known += ["gcfl", "gcflplus", "user", "user-id"]
    said = str(unknown("x", got, known))
    assert f"did you mean {meant}?" in said if meant else "did you mean" not in said


def test_choices_do_not_depend_on_their_order() -> None:
    names = ["gcn", "sage", "mlp"]
    assert str(unknown("x", "gcm", names)) == str(unknown("x", "gcm", reversed(names)))


def test_lookup_returns_the_entry_itself() -> None:
    entry = object()
    assert lookup({"a": entry, "b": object()}, "a", "thing") is entry


def test_lookup_of_an_unknown_name_hides_the_key_error() -> None:
    with pytest.raises(ConfigError, match=r"^unknown thing 'gcm': did you mean 'gcn'\?") as caught:
        lookup({"gcn": 1, "mlp": 2}, "gcm", "thing")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_numbers_are_alike_whatever_zeros_are_in_front() -> None:
    clients = [f"client_{number:02}" for number in range(12)]
    for got, meant in (("client_0", "client_00"), ("client_1", "client_01"), ("Client_011", 11)):
        meant = meant if isinstance(meant, str) else f"client_{meant}"
        assert str(unknown("client", got, clients)) == (
            f"unknown client {got!r}: did you mean {meant!r}?"
        )


def test_choices_do_not_bury_the_nearest() -> None:
    names = ["name03", "name04"]
    assert str(unknown("x", "nam03", names)) == "unknown x 'nam03': did you mean 'name03'?"
    assert str(unknown("x", "qqq", names)) == "unknown x 'qqq'; choices: name03, name04"


@pytest.mark.parametrize(
    ("record", "command"),
    [
        (None, "pip install 'silograph[fast]'"),
        ("{", "pip install 'silograph[fast]'"),
        ("[]", "pip install 'silograph[fast]'"),
        (
            '{"vcs_info": {"vcs": "git", "commit_id": "1f0c"}, "url": "https://example.org/s.git"}',
            "pip install 'silograph[fast] @ git+https://example.org/s.git@1f0c'",
        ),
        (
            '{"dir_info": {"editable": true}, "url": "file:///my%20code"}',
            "pip install -e '/my code[fast]'",
        ),
        (
            '{"dir_info": {"editable": true}, "url": "file:///my%20code/silograph"}',
            "pip install -e '/my code/silograph[fast]'",
        ),
        ('{"dir_info": {}, "url": "file:///silograph"}', "pip install '/silograph[fast]'"),
        (
            '{"archive_info": {}, "url": "file:///silograph-1-py3-none-any.whl"}',
            "pip install '/silograph-1-py3-none-any.whl[fast]'",
        ),
        (
            '{"url": "https://example.org/silograph-1.whl"}',
            "pip install 'silograph[fast] @ https://example.org/silograph-1.whl'",
        ),
    ],
)
def test_extras_are_installed_from_where_silograph_is(
    monkeypatch: pytest.MonkeyPatch, record: str | None, command: str
) -> None:
    distribution = SimpleNamespace(read_text=lambda _: record)
    monkeypatch.setattr("importlib.metadata.distribution", lambda _: distribution)
    assert install_command("fast") == command


# --- Codes and fields ----------------------------------------------------------------------------


@cache
def calls_by_name() -> dict[str, list[tuple[str, ast.Call]]]:
    """Return the calls in the source by the function's name, each with its file and line."""
    calls: dict[str, list[tuple[str, ast.Call]]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                place = f"{path.relative_to(SOURCE)}:{node.lineno}"
                calls.setdefault(called, []).append((place, node))
    return calls


def literals_of(node: ast.expr) -> list[str]:
    """Return the texts that an expression may be."""
    if isinstance(node, ast.IfExp):
        return literals_of(node.body) + literals_of(node.orelse)
    return [str(node.value)] if isinstance(node, ast.Constant) else []


def test_every_raise_gives_a_known_code_its_fields() -> None:
    used = set()
    for place, call in calls_by_name()["mistake"]:
        code, *values = call.args
        if place.startswith("core/errors.py"):
            used |= {*literals_of(code)}
            continue
        assert literals_of(code), place
        assert not any(isinstance(value, ast.Starred) for value in values), place
        for text in literals_of(code):
            assert len(values) == len(CODES[text]), (place, text)
            used.add(text)
    assert used | OF_CLASSES == CODES.keys()


def test_codes_are_given_by_mistake_alone() -> None:
    for kind in (*CLASSES, SilographError, AwayError):
        for place, call in calls_by_name().get(kind.__name__, []):
            codes = [k for k in call.keywords if k.arg == "code" and literals_of(k.value)]
            assert not codes or place.startswith("cli/"), place


def test_the_page_lists_the_codes_and_their_fields() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| (.*) \| .* \|$", PAGE.read_text(), re.MULTILINE)
    table = {code: tuple(re.findall(r"`(\w+)`", fields)) for code, fields in rows}
    assert table == {code: CODES[code] for code in CODES if code not in OF_CLASSES}
    assert list(table) == [code for code in CODES if code in table]
    words = PAGE.read_text().rpartition("|\n")[2]
    assert all(f"`{code}`" in words for code in OF_CLASSES)


def test_a_code_needs_its_fields() -> None:
    with pytest.raises(ValueError, match="shorter"):
        mistake("missing-column", "nodes.csv")


@pytest.mark.parametrize("kind", CLASSES)
def test_errors_pickle_and_copy_with_code_and_fields(kind: Callable[..., SilographError]) -> None:
    error = kind("a line")
    error.code, error.fields = "bad-cell", {"path": "x.csv", "row": 3}
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert (type(again), str(again)) == (type(error), "a line")
        assert vars(again) == vars(error)
    plain = pickle.loads(pickle.dumps(kind("a line")))
    assert (plain.code, plain.fields) == (type(error).code, {})


def test_paths_become_texts() -> None:
    assert DataError("", **mistake("missing-file", Path("a/b"))).fields == {"path": "a/b"}


def test_an_error_in_other_words_keeps_its_kind() -> None:
    error = reword_error(unknown("key", "lx", ["lr"]), "run.toml: wrong", DataError)
    assert (type(error), str(error), error.code) == (DataError, "run.toml: wrong", "unknown-name")
    assert error.fields["suggestion"] == "lr"
    assert reword_error(ConfigError("x"), "y", DataError).code == "data"


# --- The wording of each kind --------------------------------------------------------------------


def table_of_nodes() -> Table:
    return Table(Path("nodes.csv"), ["id", "label"], [["1", "x"]], [2])


def partition_of(*sizes: int) -> Partition:
    parts = torch.arange(sum(sizes)).split(sizes)
    return Partition(tuple("abc"[: len(sizes)]), parts, sum(sizes), "own")


def hello_of(name: str, features: int) -> Hello:
    none = np.zeros(0, dtype=np.int64)
    facts = SiloFacts(features, (), False, "multiclass", 2, ())
    return Hello(name, facts, (), none, none, none, none, none, none, none)


def write(path: str, text: str) -> Path:
    Path(path).write_text(text)
    return Path(path)


def hold_twice() -> None:
    with lock_state_folder(Path("state")), lock_state_folder(Path("state")):
        pass


def check_large(patch: pytest.MonkeyPatch) -> None:
    np.savez("large.npz", x=np.zeros(100))
    patch.setattr(tables, "memory_left", lambda: 99)
    check_unpacked(Path("large.npz"), ["x"])


def resume_complete(make_graph: Any) -> None:
    sg.run(make_graph(), **FAST | {"rounds": 1, "checkpoint_every": 0}, out="out")
    sg.resume("out", graph=make_graph())


def raise_(error: Exception) -> None:
    raise error


WORDING: list[tuple[str, Callable[..., object], str]] = [
    (
        "unknown-name",
        lambda: lookup({"fedavg": 1, "local": 2}, "fedavgg", "method"),
        "unknown method 'fedavgg': did you mean 'fedavg'?",
    ),
    (
        "option-value",
        lambda: make_config({"rounds": 0}),
        "rounds: input should be greater than or equal to 1, got 0",
    ),
    (
        "unread-option",
        lambda: resolve_without_data(
            make_config(
                {
                    "neighbors": "fedgrains",
                    "batch_size": 8,
                    "options": {"neighbors.policy": "uniform", "neighbors.width": 8},
                }
            )
        ),
        "option neighbors.width: fedgrains does not read it with policy=uniform, got 8: leave it "
        "out, or give policy=trained or untrained",
    ),
    (
        "conflicting-options",
        lambda: resolve_without_data(make_config({"optimizer": "adam", "momentum": 0.9})),
        "expected no momentum with optimizer=adam, got momentum=0.9: use optimizer=sgd",
    ),
    (
        "repeated-option",
        lambda: parse_options(["mu=1", "mu=2"]),
        "expected --option mu once, got it twice: leave one of them out",
    ),
    (
        "missing-option",
        lambda: sg.run(None),
        "expected a graph, or the name or path of one, got None: sg.load('digits') is one",
    ),
    (
        "missing-package",
        lambda: raise_(missing_package("pandas", "to_dataframe()", "pandas", SilographError)),
        f"expected pandas for to_dataframe(), got no such package: {install_command('pandas')}",
    ),
    (
        "failed-import",
        lambda: import_spec("no-module:NET", object),
        "expected to import no-module, got ModuleNotFoundError: 'no-module' is no name of a "
        "module, nor a file that ends in .py",
    ),
    (
        "untrusted-code",
        lambda: check_trusted({"model": "own.py:Net"}, False, "run.toml"),
        "run.toml names code of its own, which runs only if you allow it: the model is own.py:Net; "
        "read it, then add --trust (in Python trust=True)",
    ),
    (
        "missing-file",
        lambda: read_toml("gone.toml"),
        "expected a run file at gone.toml, got: No such file or directory",
    ),
    (
        "unreadable-file",
        lambda: read_file(Path("."), "ca"),
        "ca: expected a file at ., got: Is a directory",
    ),
    (
        "wrong-format",
        lambda: read_toml(write("run.toml", "=")),
        "expected TOML in run.toml, got: Invalid statement (at line 1, column 1)",
    ),
    (
        "damaged-file",
        lambda: read_json(write("run.json", "[]")),
        "expected run.json as a run writes it, got: list: restore the file from a copy",
    ),
    (
        "too-large",
        check_large,
        "large.npz: expected arrays of at most 99 bytes, the memory that is free, got 928 once "
        "unpacked: use a machine with more memory, or smaller data",
    ),
    (
        "other-version",
        lambda: check_format({"format": 1, "versions": {"silograph": "0.0.9"}}, Path("x/run.json")),
        "expected a result folder of format 4 in x, got format 1, as silograph 0.0.9 wrote it: "
        "read it with that version, or run it again from its config.toml",
    ),
    (
        "unwritable-path",
        lambda: check_new_file(Path("gone/x.csv")),
        "expected an existing folder for --out, got gone",
    ),
    (
        "existing-output",
        lambda: check_new_file(write("x.csv", "")),
        "expected a file that does not exist yet, got x.csv: choose another --out, nothing was "
        "overwritten",
    ),
    (
        "folder-in-use",
        hold_twice,
        "expected one process for the state in state, got another that holds it: stop it first",
    ),
    (
        "bad-cell",
        lambda: raise_(table_of_nodes().wrong(0, "label", "0 or 1", "x", "change it")),
        "nodes.csv, line 2, column 'label': expected 0 or 1, got 'x': change it",
    ),
    (
        "missing-column",
        lambda: table_of_nodes().column("kind"),
        "nodes.csv, line 1: expected a column 'kind', got columns id, label: rename one, or name "
        "yours in the call or by --columns",
    ),
    (
        "no-training-nodes",
        lambda make_graph: sg.run(make_graph(), **FAST | {"split": "0.001/0.4/0.4"}),
        "expected at least one training node, got 0 of 60 labeled ones over 4 clients: use fewer "
        "clients or a larger training ratio",
    ),
    (
        "empty-client",
        lambda: partition_of(3, 0),
        "expected at least one node a client, got 1 empty of 2 clients (first: 'b'): use fewer "
        "clients or another method",
    ),
    (
        "model-mismatch",
        lambda: check_names("features", ["age", "size"], ["size", "age"], "north"),
        "expected the features of the model in north, age, size, got size, age: rename them or "
        "bring them into the model's order",
    ),
    (
        "silos-disagree",
        lambda: match([hello_of("north", 7), hello_of("south", 9)]),
        "expected the same features at every silo, got 7 at north and 9 at south: describe and "
        "order the tables alike",
    ),
    (
        "diverged",
        lambda: raise_(divergence_error("training", float("nan"), 3)),
        "expected a finite training loss, got nan in round 3: training diverged; lower --lr, or "
        "the server's learning rate",
    ),
    (
        "completed-run",
        resume_complete,
        "expected a run to go on with in out, got a complete one without checkpoints: its result "
        "is in result.json",
    ),
    (
        "part-not-saved",
        lambda: check_resumable({"in_memory": True}, "t", "search"),
        "expected the graph of the search in t, got none: it was made in memory; call sg.tune with "
        "it and the same out again",
    ),
    (
        "foreign-checkpoint",
        lambda: raise_(differs("config lr", "0.02", "0.01")),
        "expected a run with config lr 0.02, got one with 0.01: going on would not give the "
        "numbers of an uninterrupted run; start a new run",
    ),
    (
        "missing-checkpoint",
        lambda: raise_(CheckpointFolder(Path("c")).none_usable(["a is damaged"])),
        "expected a usable checkpoint in c, got none: a is damaged: restore what is missing from a "
        "copy, or begin a new run",
    ),
    (
        "too-few-silos",
        lambda: raise_(
            Failures(None).missing_silos_error("expected 3 silos, got 2; ", ["west"], 3, 2, 3)
        ),
        "expected 3 silos, got 2; west: not there; to resume the run without west: --resume with "
        "--least 2",
    ),
    (
        "field-out-of-bounds",
        lambda: check_fields({"w": Stacked(torch.zeros(1, 2))}, 2, "reply of train"),
        "expected a slice for each of 2 clients, got shape (1, 2) for 'w' in reply of train",
    ),
    (
        "call-not-agreed",
        lambda: Program((), lambda _: (), 3, {}).check_number(4),
        "expected a round up to 3, got 4",
    ),
    (
        "refused-by-policy",
        lambda: SendingBounds(most_repeats=1).check_repeats(2),
        "expected at most 1 round to be done again in a run (most_repeats of this silo's policy), "
        "got one more: the silo leaves the run",
    ),
    (
        "secure-sum",
        lambda: SiloSum("west", b"sum").share({}, ["west", "east"]),
        "expected each step of a secure sum once and in order, got shares after none",
    ),
]


@pytest.mark.parametrize(("code", "call", "line"), WORDING, ids=[code for code, *_ in WORDING])
def test_the_wording_of_each_kind(
    code: str,
    call: Callable[..., object],
    line: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    names = call.__code__.co_varnames[: call.__code__.co_argcount]
    patches = {"patch": "monkeypatch", "make_graph": "make_graph"}
    with pytest.raises(SilographError) as raised:
        call(*(request.getfixturevalue(patches[name]) for name in names))
    error = raised.value
    assert (str(error), error.code, tuple(error.fields)) == (line, code, CODES[code])


def test_every_kind_has_its_wording_tested() -> None:
    assert [code for code, *_ in WORDING] == [code for code in CODES if code not in OF_CLASSES]
