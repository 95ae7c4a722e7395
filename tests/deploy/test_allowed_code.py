"""Methods, ops and models of users in a federation: what a silo allowed runs, nothing else."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import silograph as sg
from runs import outcome, rows_of, same_bits, weights_of
from sessions import TOKEN
from silograph.core.config import make_config
from silograph.core.errors import ConfigError
from silograph.deploy.allowed_code import (
    AllowedCode,
    allow_code,
    code_digests_for_silos,
    split_names,
)
from silograph.deploy.server import serve, start_facts
from silograph.deploy.server_settings import ServerSettings
from silograph.deploy.silo import Attendance, OwnData, parse_allowed_methods
from silograph.experiment.resolve.resolve import choose, fill_defaults, resolve
from silograph.experiment.run.result import Result
from silograph.federation.program import Program
from silograph.federation.session.message import (
    Message,
    Type,
    facts_body,
    own_ops,
    pack,
    qualified,
    unpack,
)
from silograph.federation.session.responder import Responder
from silograph.federation.session.state_store import StateStore
from silograph.graph.graph import Graph, schema_of
from silograph.graph.silos.data import Silo
from silograph.graph.silos.read import read_silo
from silos import config_of, federate, folders

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "method_interface.md"
PLAIN = ServerSettings("127.0.0.1:0", insecure=True, patience=600)
BASE: dict[str, Any] = {"partition": "random", "rounds": 2, "hidden": 8, "split": "0.4/0.3/0.3"}
MakeGraph = Callable[..., Graph]

NEAR = """
from dataclasses import replace
from silograph.methods import FEDAVG, LABEL_GUIDED, Needs, Proximal

NEAR = replace(FEDAVG, name="near", needs=Needs(corrections=lambda _: (Proximal(0.5),)))
SILENT = replace(FEDAVG, name="silent", calls=None)
ROWS = replace(LABEL_GUIDED, name="rows")
"""

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        self.first = torch.nn.Linear(features, outputs)

    def forward(self, x, edge_index):
        return self.first(x)

def make(features, outputs):
    return Net(features, outputs)
"""

SCORED = """
from dataclasses import replace
from silograph.methods import FEDAVG, LABEL_GUIDED

SCORED = replace(FEDAVG, name="scored", needs=replace(FEDAVG.needs, score_first=True))
ROWS = replace(LABEL_GUIDED, name="rows", needs=replace(LABEL_GUIDED.needs, score_first=True))
"""

OP = "def {name}(cfg, block, state, inbox, key):\n    return state, {{}}\n"


def own_heads() -> str:
    """The example of the page on methods."""
    text = PAGE.read_text(encoding="utf-8")
    return str(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with code of a user; what it imports is forgotten after the test."""
    folder = tmp_path / "code"
    folder.mkdir()
    monkeypatch.chdir(folder)
    texts = {"own_heads.py": own_heads(), "near.py": NEAR, "net.py": NET, "scored.py": SCORED}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def federated(graph: Graph, path: Path, code: AllowedCode, **options: Any) -> Result:
    config = config_of(3, **BASE | options)
    return federate(folders(graph, config, path / "silos"), config, PLAIN, code=code)


def assert_as_simulated(ours: Result, graph: Graph, **options: Any) -> None:
    theirs = sg.run(graph, config=config_of(3, **BASE | options), block_size=1)
    assert same_bits(weights_of(ours), weights_of(theirs))
    assert ours.ledger.records == theirs.ledger.records
    assert rows_of(ours) == rows_of(theirs)
    views = [{**outcome(run)["test"], "uncut": None} for run in (ours, theirs)]
    assert views[0] == views[1]


@pytest.mark.law(sample=24)
@pytest.mark.parametrize(
    "options",
    [
        {"method": "own_heads.py:METHOD"},
        {"method": "own_heads.py:METHOD", "participation": 0.5, "keep_optimizer": True},
        {"method": "near.py:NEAR", "local_epochs": 3},
        {"method": "fedavg", "model": "net.py:Net", "hidden": 128},
        {"method": "near.py:NEAR", "model": "net.py:Net", "hidden": 128},
        {"method": "scored.py:SCORED", "eval_every": 2, "rounds": 3},
        {"method": "scored.py:ROWS"},
    ],
    ids=str,
)
def test_own_code_gives_the_bits_and_the_ledger_of_a_simulation(
    make_graph: MakeGraph, here: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    graph = make_graph(60)
    code = allow_code(["own_heads.py", str(here / "near.py"), "net.py", "scored.py"])
    config = config_of(3, **BASE | options)
    silos = folders(graph, config, tmp_path / "silos")
    ours = federate(silos, config, PLAIN, code=code, allow=("scored.py:ROWS",))
    assert_as_simulated(ours, graph, **options)


def test_own_methods_that_send_rows_are_allowed_by_name(
    make_graph: MakeGraph, here: Path, tmp_path: Path
) -> None:
    graph, options, code = make_graph(60), {"method": "near.py:ROWS"}, allow_code(["near.py"])
    config = config_of(3, **BASE | options)
    silos = folders(graph, config, tmp_path / "silos")
    with pytest.raises(ConfigError, match=r"has not agreed to near\.py:ROWS, .* --allow near\.py"):
        federate(silos, config, PLAIN, code=code)
    allow = parse_allowed_methods("near.py:ROWS,collect", code)
    ours = federate(silos, config, PLAIN, code=code, allow=allow)
    assert_as_simulated(ours, graph, **options)


SETUP = "@m.calls(begin_head)"  # begins what the server does
PACKAGE = {
    "__init__.py": "from .methods import HEADS as HEADS",
    "ops.py": own_heads().partition(SETUP)[0],
    "methods.py": "from .ops import *\n"
    + "".join(own_heads().partition(SETUP)[1:]).replace("METHOD =", "HEADS ="),
}


@pytest.fixture
def lab(here: Path) -> Path:
    """The same method as a package, its ops in a module of their own."""
    folder = here / "lab"
    folder.mkdir()
    for name, text in PACKAGE.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.law(sample=6)
@pytest.mark.parametrize(
    ("method", "allowed"), [("lab:HEADS", ["lab"]), ("lab.methods:HEADS", ["lab.methods,lab.ops"])]
)
def test_a_package_and_a_module_of_one(
    make_graph: MakeGraph, lab: Path, tmp_path: Path, method: str, allowed: list[str]
) -> None:
    graph, code = make_graph(60), allow_code(split_names(allowed))
    ours = federated(graph, tmp_path, code, method=method)
    assert_as_simulated(ours, graph, method="own_heads.py:METHOD")
    missing = AllowedCode({n: s for n, s in code.sources.items() if n == "lab.methods"})
    with pytest.raises(ConfigError, match="this silo has not allowed 'lab"):
        federated(graph, tmp_path / "again", missing, method=method)


def test_a_package_is_known_by_all_its_modules(lab: Path) -> None:
    before = allow_code(["lab"]).sources["lab"].digest
    (lab / "ops.py").write_text(PACKAGE["ops.py"] + "\n# changed\n")
    assert allow_code(["lab"]).sources["lab"].digest != before


class Server:
    """A server that says what it likes to one silo that allowed some code."""

    def __init__(self, silo: Silo, code: AllowedCode, state: Path | None = None) -> None:
        attendance = Attendance("", Path(), code=code)
        own = OwnData(silo, dict.fromkeys(silo.cross.silo, bytes(32)), attendance, print)
        store = StateStore(state)
        self.worker = Responder(TOKEN, code.ops, own, store, lambda _: None)
        self.schema = schema_of(silo.graph)
        self.sequence = 0

    def start(self, code: object, **options: Any) -> str | None:
        """Say START, and return why it is refused."""
        plain = {"clients": 3, "hidden": 8, "rounds": 2, "kernels": "torch", "block_size": 1}
        plain |= {"server_optimizer": "none"}
        config = make_config(plain | options)
        told = {k: v for k, v in vars(config).items() if v is not None and k != "dataset"}
        parts = choose(make_config({**plain, **options, "method": "fedopt", "model": "gcn"}))
        told |= {k: v for k, v in fill_defaults(config, parts).items() if v is not None}
        given = {k: v for k, v in parts.options.items() if v is not None}
        others = {k: v for k, v in given.items() if not k.startswith("method.")}
        told |= {
            "metric": "accuracy",
            "edge_weights": "use",
            "model": options.get("model", "gcn"),
            "options": others | options.get("options", {}),
        }
        self.sequence += 1
        about = {"config": told, "schema": asdict(self.schema), "hand_over": True, "code": code}
        body = facts_body(about)
        answer = unpack(self.worker.answer(pack(Message(Type.START, TOKEN, self.sequence, body))))
        return str(answer.facts()["reason"]) if answer.type is Type.REFUSED else None


@pytest.fixture
def silo(make_graph: MakeGraph, tmp_path: Path) -> Silo:
    return read_silo(folders(make_graph(60), config_of(3, **BASE), tmp_path / "silos")[0])


def digest_of(code: AllowedCode, name: str) -> str:
    return code.sources[name].digest


def test_another_version_is_refused(silo: Silo, here: Path) -> None:
    code = allow_code(["own_heads.py"])
    mine = digest_of(code, "own_heads.py")
    assert Server(silo, code).start({"own_heads.py": "ab12"}, method="own_heads.py:METHOD") == (
        f"expected own_heads.py with digest {mine}, got ab12: the server and this silo have "
        "different versions"
    )
    assert Server(silo, code).start({"own_heads.py": mine}, method="own_heads.py:METHOD") is None


def test_code_that_is_not_allowed(silo: Silo, here: Path) -> None:
    said = Server(silo, AllowedCode()).start({"near.py": "ab"}, method="near.py:NEAR")
    assert said == (
        "this silo has not allowed 'near.py', which the run needs: start it with --allow-code and "
        "the file or package of that name, or leave the run"
    )


@pytest.mark.parametrize(
    ("options", "told", "expected"),
    [
        ({"method": "near.py:NEAR"}, None, "expected the digest of the server's near.py, got none"),
        ({"method": "near.py:NEAR"}, {}, "expected the digest of the server's near.py, got none"),
        ({"method": "near.py:NEAR"}, 3, "expected digests of the run's own code by name, got som"),
        ({"method": "near.py:NONE"}, "right", "unknown method in near.py 'NONE'; choices: NEAR"),
        ({"method": "near.py:SILENT"}, "right", "near.py:SILENT cannot run at silos: it does not"),
        ({"method": "near.py"}, "right", "this silo has not allowed '', which"),
        ({"model": "net.py:make"}, "right", "unknown model in net.py 'make'"),
        ({"model": "net.py:torch"}, "right", "unknown model in net.py 'torch'"),
        ({"model": "near.py:replace"}, "right", "unknown model in near.py 'replace'"),
        ({"method": "os:system"}, "right", "this silo has not allowed 'os', which"),
        ({"method": "net.py:__builtins__"}, "right", "unknown method in net.py '__builtins__'"),
    ],
)
def test_what_a_server_cannot_name(
    silo: Silo, here: Path, options: dict[str, Any], told: object, expected: str
) -> None:
    code = allow_code(["near.py", "net.py"])
    right = {name: source.digest for name, source in code.sources.items()}
    said = Server(silo, code).start(right if told == "right" else told, **options)
    assert said is not None
    assert said.startswith(expected)
    assert "\n" not in said


@pytest.mark.parametrize("part", ["method", "model"])
@pytest.mark.parametrize("path", ["{evil}:METHOD", "../evil.py:METHOD", "evil.py:METHOD", "evil:X"])
def test_no_path_of_a_server_is_opened(silo: Silo, here: Path, part: str, path: str) -> None:
    """Not with the digest of what is allowed, nor with that of the file itself."""
    evil = here / "evil.py"
    evil.write_text("from pathlib import Path\nPath('ran').touch()\n")
    spec, code = path.format(evil=evil), allow_code(["near.py"])
    for told in ({}, {"near.py": digest_of(code, "near.py")}, {str(evil): "ab"}, {spec: "ab"}):
        said = Server(silo, code).start(told, **{part: spec})
        assert said is not None
        assert said.startswith("this silo has not allowed ")
    assert not (here / "ran").exists()


def test_a_silo_that_is_started_again_with_another_file_is_refused(
    silo: Silo, here: Path, tmp_path: Path
) -> None:
    """The run was agreed to with the file as it was, by the server and by the silo."""
    state, options = tmp_path / "state" / "run", {"method": "near.py:NEAR"}
    before = allow_code(["near.py"])
    agreed = {"near.py": digest_of(before, "near.py")}
    assert Server(silo, before, state).start(agreed, **options) is None
    (here / "near.py").write_text(NEAR.replace("0.5", "0.6"))
    after = allow_code(["near.py"])
    now = {"near.py": digest_of(after, "near.py")}
    said = Server(silo, after, state).start(agreed, **options)
    assert said is not None
    assert said.startswith(
        f"expected near.py with digest {now['near.py']}, got {agreed['near.py']}"
    )
    assert Server(silo, after, state).start(now, **options) == (
        "expected the run that this silo has agreed to, got one of another near.py: start the silo "
        "anew for another run"
    )
    assert Server(silo, before, state).start(agreed, **options) is None


@pytest.mark.parametrize(
    ("files", "names", "expected"),
    [
        ({}, "gone.py", "gone.py, got FileNotFoundError"),
        ({"a.py": "1 / 0"}, "a.py", "a.py, got ZeroDivisionError: division by zero ("),
        ({"a.py": "", "b/a.py": ""}, "a.py,b/a.py", "of different names to allow, got a.py twice"),
        ({"a.py": "X = 1"}, "a.py:X", "expected FILE.py or package.module to allow, got 'a.py:X'"),
        ({}, "silograph.methods", "expected code of your own to allow, got silograph.methods, whi"),
        ({}, "sys", "expected code in a file to allow, got sys, which has none"),
        (
            {"methods/__init__.py": "", "methods/local_training.py": "", "methods/fedavg.py": OP},
            "methods.fedavg",
            "expected an op with a name of its own, got methods.fedavg:train, which "
            "silograph has, too: rename its module",
        ),
    ],
)  # fmt: skip
def test_code_that_cannot_be_allowed(
    here: Path, files: dict[str, str], names: str, expected: str
) -> None:
    for name, text in files.items():
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(text.format(name="train"))
    with pytest.raises(ConfigError) as caught:
        allow_code([str(here / n) if "/" in n else n for n in split_names([names])])
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_table_of_ops_has_those_of_the_code_too(here: Path) -> None:
    (here / "ops.py").write_text(OP.format(name="mine") + OP.format(name="_hidden") + "f = mine\n")
    code = allow_code(["own_heads.py", "ops.py"])
    more = code.ops.keys() - own_ops().keys()
    assert more == {"own_heads.py:begin_head", "own_heads.py:train_body", "ops.py:mine"}
    assert all(qualified(code.ops[name]) == name for name in more)
    assert own_ops().items() <= code.ops.items()


def test_a_silo_shows_what_it_allowed(silo: Silo, here: Path) -> None:
    code = allow_code(["own_heads.py", "near.py", "net.py"])
    lines = list(code.lines(schema_of(silo.graph)))
    heads, near, net = (digest_of(code, n) for n in ("own_heads.py", "near.py", "net.py"))
    assert lines == [
        f"allowed own_heads.py with digest {heads}: ops begin_head, train_body; methods METHOD",
        "own_heads.py:METHOD sends evaluation, weights by default",
        f"allowed near.py with digest {near}: methods NEAR, SILENT, ROWS",
        "near.py:NEAR sends control, evaluation, weights by default",
        "near.py:SILENT cannot run at silos: it does not declare what it calls: give it "
        "calls=Calls(setup=..., round=..., state=...), as docs/reference/method_interface.md shows",
        lines[5],
        f"allowed net.py with digest {net}: models Net",
    ]
    assert lines[5].startswith("near.py:ROWS sends ")
    assert lines[5].endswith(", with rows of single nodes: it needs --allow near.py:ROWS")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"method": "near.py:SILENT"}, r"near\.py:SILENT cannot run at silos: it does not declare"),
        ({"model": "net.py:make", "hidden": 128}, "a class of torch.nn.Module for a federation of"),
        ({"method": "gone.py:X"}, r"expected to import .*gone\.py, got FileNotFoundError"),
    ],
)
def test_a_server_waits_for_nobody_in_a_run_that_silos_cannot_do(
    here: Path, options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        serve(config_of(2, **BASE | options), PLAIN)


def test_calls_that_raise_are_shown_as_such(silo: Silo, here: Path) -> None:
    (here / "bad.py").write_text(
        "from dataclasses import replace\nfrom silograph.methods import FEDAVG\n"
        "BAD = replace(FEDAVG, name='bad', calls=replace(FEDAVG.calls, setup=lambda: 1))\n"
    )
    assert list(allow_code(["bad.py"]).lines(schema_of(silo.graph)))[1] == (
        "bad.py:BAD cannot be shown: its calls raise TypeError"
    )


def test_an_op_that_no_name_stands_for(make_graph: MakeGraph, here: Path, tmp_path: Path) -> None:
    text = own_heads().replace("begin_head", "_begin_head")
    (here / "own_heads.py").write_text(text)
    with pytest.raises(ConfigError, match=r"expected ops that are public functions .*_begin_head"):
        federated(make_graph(60), tmp_path, AllowedCode(), method="own_heads.py:METHOD")


def test_no_path_leaves_the_server(silo: Silo, here: Path) -> None:
    own: dict[str, Any] = {"method": f"{here}/near.py:NEAR", "model": f"{here}/net.py:Net"}
    schema = schema_of(silo.graph)
    plain = resolve(make_config({}), schema).config
    facts = start_facts(replace(plain, **own), schema, {"near.py": "ab"})
    assert (facts["config"]["method"], facts["config"]["model"]) == ("near.py:NEAR", "net.py:Net")
    assert facts["code"] == {"near.py": "ab"}
    assert str(here) not in json.dumps(facts)
    assert "code" not in start_facts(plain, schema)


def test_two_files_of_one_name_cannot_be_told_apart(silo: Silo, here: Path) -> None:
    (here / "b").mkdir()
    (here / "b" / "near.py").write_text(NEAR + NET)
    own: dict[str, Any] = {"method": f"{here}/near.py:NEAR", "model": f"{here}/b/near.py:Net"}
    config = replace(resolve(make_config({}), schema_of(silo.graph)).config, **own)
    empty = Program((), lambda _: (), 1, {})
    with pytest.raises(
        ConfigError, match=r"files of different names, got two of the name near\.py"
    ):
        code_digests_for_silos(config, empty)
