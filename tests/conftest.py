"""Small generated graphs and blocks, shared by all tests."""

import gc
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

import unsynced  # noqa: F401
from commands import save
from pretended import register
from silograph.core.key import Key
from silograph.experiment.resolve.resolve import SimulatedRun
from silograph.experiment.run.setup import Setup, set_up
from silograph.graph.block.block import ClientBlock, Route, make_block
from silograph.graph.csr import CSR
from silograph.graph.graph import MISSING, Graph
from silograph.graph.partition.partition import Partition, make_partition
from silograph.graph.partition.split import draw_split

os.environ["SILOGRAPH_CACHE"] = "off"  # tests leave no parts of METIS in a home folder
# Presets differ in options alone: batteries take these in the slow suite.
PRESETS_APART = {
    "fedall",
    "fedrandom",
    "fedpns",
    "fedais1",
    "fedais2",
    "stale",
    "fedsage_local",
    "fedacs",
    "fesog",
}
# Fewer examples of a law than Hypothesis' 100, which differ from run to run. How long one takes
# says how loaded the machine is, and fixtures of a function are only read here.
settings.register_profile(
    "default suite",
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("default suite")
# It runs in a process of its own, on Ray.
collect_ignore = ["ray_runs.py"]
MANY_TESTS = 1000  # from which on compiling before the first one pays
COMPILE = """
import sys
from silograph.experiment.run import compile_kernels

del compile_kernels.OF_LABELS["masks and batches"]
compile_kernels.compile_kernels(sys.argv[1], print)
"""
OWN_TESTS = (
    "test_fedais.py",
    "test_fedsage.py",
    "test_defaults.py",
    "test_program.py",
    "test_cli.py",
)

MakeGraph = Callable[..., Graph]
MakeBlock = Callable[..., tuple[ClientBlock, Route]]


@pytest.hookimpl(tryfirst=True)  # before what is slow is left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        call = getattr(item, "callspec", None)
        if call is None or item.path.name in OWN_TESTS:
            continue
        if any(isinstance(v, str) and v in PRESETS_APART for v in call.params.values()):
            item.add_marker(pytest.mark.slow)
    sample_laws(items)


def sample_laws(items: list[pytest.Item]) -> None:
    """Mark cases of laws with `law(sample=n)` as slow, but one in n, drawn by a hash of the case.

    At least one case of each law runs by default.
    """
    laws: dict[str, list[tuple[bytes, pytest.Item]]] = {}
    for item in items:
        if item.get_closest_marker("law") and not item.get_closest_marker("slow"):
            law = f"{item.path}::{item.name.partition('[')[0]}"
            laws.setdefault(law, []).append((sha256(item.name.encode()).digest(), item))
    for cases in laws.values():
        cases.sort(key=lambda case: case[0])
        mark = cases[0][1].get_closest_marker("law")
        assert mark is not None
        count = -(-len(cases) // mark.kwargs["sample"])
        for _, item in cases[count:]:
            item.add_marker(pytest.mark.slow)


def pytest_sessionstart() -> None:
    register()
    # What is collected stays to the end: the garbage collector need not walk it again and again.
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Have each of two workers compile all kernels of one precision before its first test.

    One of them would compile what a test needs, for most of a minute in all, and the other wait.
    No test of the default suite needs the kernel of masks and batches, the slowest to compile.
    """
    worker = getattr(session.config, "workerinput", {}).get("workerid", "")
    dtype = {"gw0": "float32", "gw1": "float64"}.get(worker)
    if dtype and len(session.items) > MANY_TESTS and importlib.util.find_spec("numba"):
        command = [sys.executable, "-c", COMPILE, dtype]
        subprocess.run(command, check=True, capture_output=True)


@pytest.fixture(autouse=True, scope="module")
def garbage_of_earlier_modules() -> None:
    """Free it, and let later collections skip what is left: libraries that tests have imported.

    Each cell of a comparison begins with a collection, which took 0.1 to 0.3 s where numba and
    PyTorch Geometric were walked through.
    """
    gc.collect()
    gc.freeze()


def figure_text(curves: Any) -> str:
    """Stand for a figure: the same curves have the same text."""
    return f"<svg>{sha256(repr(curves).encode()).hexdigest()}</svg>\n"


@pytest.fixture(autouse=True, scope="session")
def no_drawn_figures() -> Iterator[None]:
    """Let comparisons write short files for figures: drawing took most of the time of their tests.

    Figures themselves are tested in test_comparison_files.py, which draws them.
    """
    with pytest.MonkeyPatch.context() as patch:
        module = "silograph.study.comparison_files"
        patch.setattr(f"{module}.svg_of", figure_text)
        patch.setattr(f"{module}.pdf_of", lambda curves: b"%PDF " + figure_text(curves).encode())
        yield


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums in one fixed order, whatever the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def planted_graph(
    n: int = 60,
    classes: int = 3,
    features: int = 7,
    *,
    seed: int = 0,
    sparse: bool = False,
    multilabel: bool = False,
    missing: float = 0.0,
) -> Graph:
    """Return a graph whose classes show in features and edges; `missing` labels are unknown."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, n)
    near = np.where(y[:, None] == y[None, :], 0.2, 0.03)
    upper = np.triu(rng.random((n, n)) < near, 1)
    rows, cols = np.nonzero(upper | upper.T)
    adj = CSR.from_pairs(torch.from_numpy(rows), torch.from_numpy(cols), (n, n))
    centers = rng.normal(size=(classes, features))
    x = torch.from_numpy((centers[y] + rng.normal(size=(n, features))).astype(np.float32))
    labels = torch.from_numpy(y.astype(np.int64))
    if multilabel:
        labels = torch.from_numpy((rng.random((n, classes)) < 0.3).astype(np.int64))
        labels[torch.arange(n), torch.from_numpy(y)] = 1
    if missing:
        labels[torch.from_numpy(rng.random(n) < missing)] = MISSING
    if sparse:
        x = x * torch.from_numpy(rng.random((n, features)) < 0.4)
    return Graph(
        adj=adj,
        x=_sparse(x) if sparse else x,
        y=labels,
        num_classes=classes,
        node_id=np.arange(n) * 3 + 11,
        name="planted",
    )


def _sparse(x: torch.Tensor) -> CSR:
    import scipy.sparse as sp

    return CSR.from_scipy(sp.csr_matrix(x.numpy()))


def block_of(
    graph: Graph,
    clients: int = 4,
    *,
    partition: Partition | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[ClientBlock, Route]:
    """Return a graph cut at random, all clients as one block, in float64."""
    if partition is None:
        partition = make_partition(graph, "random", clients=clients, key=Key.of(seed))
    split = draw_split(graph, partition, ratios=(0.4, 0.3, 0.3), key=Key.of(seed + 1))
    return make_block(graph, partition, split, dtype)


@pytest.fixture(scope="session")
def make_graph() -> MakeGraph:
    return planted_graph


@pytest.fixture
def cut_block() -> MakeBlock:
    return block_of


@pytest.fixture
def work(tmp_path: Path, make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a graph of 60 nodes; its parent has no shared data."""
    folder = tmp_path / "home" / "work"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("SILOGRAPH_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    save("g.npz", make_graph())
    return folder


@pytest.fixture
def setups(monkeypatch: pytest.MonkeyPatch) -> list[Setup]:
    """Every set-up that runs make while the test goes."""
    seen: list[Setup] = []

    def spy(run: SimulatedRun) -> Setup:
        seen.append(set_up(run))
        return seen[-1]

    monkeypatch.setattr("silograph.experiment.run.run.set_up", spy)
    return seen


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that silograph starts are forked from one that has all imports behind it."""
    from forked import popen
    from processes import begin_forks

    begin_forks()
    monkeypatch.setattr("subprocess.Popen", popen)


@pytest.fixture
def hubs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes hubs of this machine, which close with the test.

    They wait longer than others for who says who it is, for this machine may be busy.
    """
    from sessions import TOKEN
    from silograph.federation.session.hub import Hub

    monkeypatch.setattr("silograph.federation.session.hub.HANDSHAKE_SECONDS", 600.0)
    made = []

    def make(register: Any, **other: Any) -> Hub:
        credentials = other.pop("credentials", None)
        made.append(Hub("127.0.0.1:0", register, TOKEN, credentials, room=2, **other))
        return made[-1]

    yield make
    for hub in made:
        hub.close()


@pytest.fixture
def raws() -> Iterator[Any]:
    """Makes streams to hubs on which anything can be said, which close with the test."""
    from streams import Raw

    made = []

    def make(hub: Any) -> Raw:
        made.append(Raw(hub))
        return made[-1]

    yield make
    for raw in made:
        raw.close()
