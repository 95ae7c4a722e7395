"""Public functions give the same bits whatever torch and NumPy were set to, and restore it."""

import dataclasses
import inspect
import json
import random
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import silograph as sg
from commands import save
from rating_graphs import drawn, rating_graph, write_ratings
from runs import FAST, MakeGraph, outcome, rows_of
from silograph.core.config import make_config
from silograph.core.key import Key
from silograph.core.numeric_state import (
    ProcessSettings,
    flushes_subnormal_numbers,
    standard_numerics,
)
from silograph.deploy.demo import export_silos
from silograph.experiment.run.predictions import predict_to
from silograph.graph.graph import Graph, fingerprint
from silograph.graph.heterogeneity import describe
from silograph.graph.silos.data import silo_fingerprint
from silograph.study.attack import attack
from silograph.study.reproduce import Page, Recipe, cell, reproduce
from silograph.study.train_agent import AgentTraining, train_agent
from silograph.task.threshold import Threshold

RUN: dict[str, Any] = {**FAST, "rounds": 2, "dtype": "float32", "dropout": 0.5}
ON_SILOS = {k: v for k, v in RUN.items() if k not in ("clients", "partition")}
MACHINE = {"peak_memory_bytes", "seconds", "compile_seconds"}  # columns that differ in every run
SILOS: dict[str, Any] = {"clients": 2, "partition": "dirichlet", "split": "0.4/0.3/0.3"}
RATINGS: dict[str, Any] = {
    "model": "rating_gcn",
    "method": "fedavg",
    "options": {"embedding": 6},
    "clients": 2,
    "rounds": 2,
    "hidden": 4,
    "layers": 2,
    "lr": 0.02,
    "split": "0.6/0.2/0.2",
}
KINDS: list[dict[str, Any]] = [
    {"kernels": "auto"},
    {"kernels": "torch"},
    {"model": "gat"},
    {"method": "fedgraph"},
    {"method": "fedsageplus", "options": {"generator_epochs": 3, "cross_epochs": 1}},
]


# --- what a caller may have set ------------------------------------------------------------------


@contextmanager
def default_device() -> Iterator[None]:
    """As `torch.set_default_device("cuda")` in a notebook; no value can be read on this one."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def process_settings(settings: ProcessSettings) -> Iterator[None]:
    before = ProcessSettings.read()
    settings.apply()
    try:
        yield
    finally:
        before.apply()


@contextmanager
def flushed_subnormal_numbers() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def other_random_states() -> Iterator[None]:
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    torch.default_generator.manual_seed(7)
    np.random.seed(7)  # noqa: NPY002
    random.seed(7)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        random.setstate(before[2])


OF_THREAD: Mapping[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "set_default_device": default_device,
    "device": lambda: torch.device("meta"),
    "set_flush_denormal": flushed_subnormal_numbers,
    "errstate": lambda: np.errstate(all="raise"),
}
OF_PROCESS: Mapping[str, Callable[[], Any]] = {
    "set_default_dtype": lambda: process_settings(ProcessSettings(dtype=torch.float64)),
    "deterministic": lambda: process_settings(ProcessSettings(deterministic=True)),
    "detect_anomaly": lambda: process_settings(ProcessSettings(detect_anomaly=True)),
    "matmul_precision": lambda: process_settings(
        ProcessSettings(matmul_precision="medium", backend_precision=("tf32", "bf16", "tf32"))
    ),
    "set_num_threads": threads,
    "random_states": other_random_states,
}
MODES = {**OF_THREAD, **OF_PROCESS}


@contextmanager
def all_of(modes: Mapping[str, Callable[[], Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for mode in modes.values():
            stack.enter_context(mode())
        if "detect_anomaly" in modes:  # the settings of the process exclude each other
            stack.enter_context(
                process_settings(
                    ProcessSettings(
                        torch.float64, True, True, True, "medium", ("tf32", "bf16", "tf32")
                    )
                )
            )
        yield


def settings() -> list[object]:
    """Return all that a public function must leave as it found it."""
    return [
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        str(torch.get_default_device()),
        torch.get_num_threads(),
        flushes_subnormal_numbers(),
        ProcessSettings.read(),
        np.geterr(),
        torch.get_rng_state().tolist(),
        repr(np.random.get_state()),  # noqa: NPY002
        random.getstate(),
    ]


# --- what a caller may call ----------------------------------------------------------------------


class Data:
    """What calls read, made while nothing was set."""

    def __init__(self, folder: Path, graph: Graph) -> None:
        self.folder, self.graph = folder, graph
        self.result = sg.run(graph, **RUN, out=str(folder / "run"))
        save(folder / "g.npz", graph)
        self.silos = self.export(folder / "silos")
        write_ratings(folder / "ratings")
        (folder / "nodes.csv").write_text("id,label,a\n1,u,.5\n2,v,.25\n3,u,1\n")
        (folder / "edges.csv").write_text("source,target\n1,2\n2,3\n")
        self._made = 0

    def export(self, folder: Path) -> tuple[Path, ...]:
        return export_silos(
            make_config({**SILOS, "dataset": str(self.folder / "g.npz")}), folder, "npz"
        )

    @property
    def model(self) -> sg.TrainedModel:
        assert self.result.model is not None
        return self.result.model

    def new(self) -> Path:
        """Return a path at which there is nothing yet."""
        self._made += 1
        return self.folder / f"new{self._made}"


def bits_of(value: object) -> object:
    """Return something that is equal for two values only if they have the same bits."""
    match value:
        case Tensor():
            assert not value.is_inference()
            return (str(value.dtype), str(value.device), value.numpy().tobytes())
        case np.ndarray():
            return (str(value.dtype), value.tobytes())
        case Graph():
            return fingerprint(value), bits_of([value.edge_index, value.labeled])
        case sg.Silos():
            return bits_of(value.members)
        case sg.Silo():
            return silo_fingerprint(value), bits_of(value.graph)
        case sg.Partition():
            return value.hash, bits_of([value.copies, value.client_of_node, value.owner])
        case sg.TrainedModel():
            return bits_of(dict(value.weights))
        case sg.Result():
            return bits_of([value.model, outcome(value), rows_of(value)])
        case Path() if value.is_dir():
            return [path.name for path in sorted(value.iterdir())]
        case Path():
            return value.read_bytes()
        case Mapping():
            return [(key, bits_of(each)) for key, each in value.items()]
        case list() | tuple():
            return [bits_of(each) for each in value]
    return repr(value)


def resume(data: Data) -> object:
    """Resume a run of which the last round is missing."""
    out = data.new()
    shutil.copytree(data.folder / "run", out)
    (out / "result.json").unlink()
    max((out / "checkpoints").glob("round-*.checkpoint")).unlink()
    return bits_of(sg.resume(out, graph=data.graph))


def compare(data: Data) -> object:
    found = sg.compare(data.graph, methods=["fedavg", "local"], seeds=1, processes=0, **RUN)
    assert not found.failed
    return [{k: v for k, v in row.items() if k not in MACHINE} for row in found.rows]


def tune(data: Data) -> object:
    options = {k: v for k, v in RUN.items() if k != "lr"}
    found = sg.tune(data.graph, keys=["lr"], trials=2, processes=0, **options)
    return [vars(trial) for trial in found.trials]


def train_agent_of(data: Data) -> object:
    knobs = {"method": "fedgraph", "speeds": "1,2", "clients": 2, "dataset": "planted"}
    options = {"options": {"policy": "ddpg", "share": "none"}}
    asked = AgentTraining(make_config({**RUN, **knobs, **options}), 1, 1)
    return bits_of(train_agent(asked, data.new(), data.graph))


def reproduce_one(data: Data) -> object:
    options = {**RUN, "dataset": str(data.folder / "g.npz")}
    recipe = Recipe(
        "one", "One.", lambda _: [cell({"a": 1}, **options)], lambda _: Page({}), "# One"
    )
    out = data.new()
    reproduce(recipe, out=out, processes=0)
    line = json.loads((out / "one.jsonl").read_text())
    return {k: v for k, v in line.items() if k not in (*MACHINE, "machine", "digest")}


def from_pyg(data: Data) -> Graph:
    from torch_geometric.data import Data as PygData

    graph = data.graph
    x = graph.x.clone() if isinstance(graph.x, Tensor) else None  # in inference mode, not data
    return sg.from_pyg(PygData(x=x, edge_index=graph.edge_index, y=graph.y))


def from_networkx(data: Data) -> Graph:
    import networkx as nx

    graph = nx.path_graph(4)
    for node in graph:
        graph.nodes[node].update(x=[float(node), 1.0], y=node % 2)
    return sg.from_networkx(graph)


def from_arrays(data: Data) -> Graph:
    graph = data.graph
    assert isinstance(graph.x, Tensor)
    return sg.from_arrays(edge_index=graph.edge_index, x=graph.x + 1, y=graph.y)


def predicted(data: Data) -> Path:
    predict_to(data.folder / "run", data.folder / "g.npz", out := data.new())
    return out


def saved(data: Data) -> object:
    data.model.save(out := data.new())
    return bits_of([out, sg.load_model(out)])


def exported(data: Data) -> object:
    return [bits_of(sg.read_silo(path)) for path in data.export(data.new())]


def prepared(data: Data) -> object:
    (folder := data.new()).mkdir()
    for name in ("nodes", "edges"):
        shutil.copy(data.folder / f"{name}.csv", folder)
    schema = folder / "schema.toml"
    schema.write_text(sg.guess_schema(folder))
    (silo,) = sg.prepare(folder, schema=schema, out=data.new(), name="own")
    return bits_of(sg.read_silo(silo.folder))


def write_counted(data: Data) -> tuple[Path, Path]:
    """A folder with a table of nodes, and a schema with a category to be counted."""
    (folder := data.new()).mkdir()
    rows = "".join(f"k{number},{'ab'[number % 2]}\n" for number in range(20))
    (folder / "nodes.csv").write_text(f"id,kind\n{rows}")
    schema = folder / "schema.toml"
    schema.write_text(
        '[nodes]\ntable = "nodes"\nkey = "id"\nclasses = ["0"]\n[features.kind]\n'
        'type = "category"\nvalues = "counted"\nother = true\n'
    )
    return folder, schema


def counted(data: Data) -> object:
    folder, schema = write_counted(data)
    return sg.count_categories(folder, schema=schema, out=data.new())


def joined(data: Data) -> object:
    folder, schema = write_counted(data)
    sg.count_categories(folder, schema=schema, out=(words := data.new()))
    return sg.join_categories(schema, [words])


def generated(data: Data) -> Graph:
    (folder := data.new()).mkdir()
    return sg.generate("yelp", scale=0.0005, data_dir=folder)


def described(data: Data) -> object:
    partition = sg.make_partition(data.graph, "random", clients=2, key=Key(0))
    return vars(describe(data.graph, partition))


def cut_by(name: str) -> Callable[[Data], object]:
    return lambda data: sg.make_partition(data.graph, name, clients=3, key=Key(0))


def sharded(data: Data) -> object:
    return [vars(file) for file in sg.shard(data.graph, **SILOS, out=str(data.new())).clients.files]


CALLS: dict[str, Callable[[Data], object]] = {
    "run": lambda data: sg.run(data.graph, **RUN),
    "run of silos": lambda data: sg.run(data.folder / "silos", **ON_SILOS),
    "run of ratings": lambda data: sg.run(data.folder / "ratings", **RATINGS),
    "shard": sharded,
    "resume": resume,
    "compare": compare,
    "tune": tune,
    "train_agent": train_agent_of,
    "reproduce": reproduce_one,
    "attack": lambda data: attack(make_config({**RUN, "method": "bns"}), data.graph),
    "load": lambda data: sg.load(data.folder / "g.npz"),
    "from_arrays": from_arrays,
    "from_networkx": from_networkx,
    "from_pyg": from_pyg,
    "from_csv": lambda data: sg.from_csv(
        nodes=data.folder / "nodes.csv", edges=data.folder / "edges.csv"
    ),
    "ratings": lambda data: sg.ratings(**drawn()),
    "generate": generated,
    "read_silo": lambda data: sg.read_silo(data.silos[0]),
    "read_silos": lambda data: sg.read_silos(data.folder / "silos"),
    "write_silos": exported,
    "prepare": prepared,
    "count_categories": counted,
    "join_categories": joined,
    "guess_schema": lambda data: sg.guess_schema(data.folder),
    "make_partition": cut_by("dirichlet"),
    "make_partition louvain": cut_by("louvain"),
    "make_partition metis": cut_by("metis"),
    "describe": described,
    "TrainedModel.logits": lambda data: data.model.logits(data.graph),
    "TrainedModel.decisions": lambda data: replace(
        data.model, threshold=Threshold("f1", 0, 0.25)
    ).decisions(data.graph),
    "TrainedModel.probabilities": lambda data: data.model.probabilities(data.graph),
    "TrainedModel.predict": lambda data: data.model.predict(data.graph),
    "TrainedModel.save": saved,
    "load_model": lambda data: sg.load_model(data.folder / "run" / "model.safetensors"),
    "predict": predicted,
    "Result": lambda data: [
        data.result.to_dict(),
        data.result.summary(),
        data.result._repr_html_(),
    ],
    "Graph": lambda data: [data.graph, repr(data.graph), data.graph._repr_html_()],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, make_graph: MakeGraph) -> Data:
    return Data(tmp_path_factory.mktemp("data"), make_graph())


@pytest.mark.parametrize("name", CALLS)
def test_every_public_function_gives_the_same_bits_under_all_settings(
    name: str, data: Data
) -> None:
    expected = bits_of(CALLS[name](data))
    with all_of(MODES):
        before = settings()
        found = bits_of(CALLS[name](data))
        assert settings() == before
    assert found == expected


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_a_run_gives_the_same_bits_under_each_setting(options: dict[str, Any], data: Data) -> None:
    expected = bits_of(sg.run(data.graph, **RUN | options))
    for name, mode in MODES.items():
        with mode():
            before = settings()
            found = bits_of(sg.run(data.graph, **RUN | options))
            assert settings() == before, name
        assert found == expected, name


def test_every_public_function_is_called_here() -> None:
    """Classes and errors compute nothing when they are made."""
    functions = {name for name in sg.__all__ if inspect.isfunction(getattr(sg, name))}
    assert functions <= CALLS.keys()
    methods = {f"TrainedModel.{n}" for n in vars(sg.TrainedModel) if not n.startswith("_")}
    fields = {f"TrainedModel.{field.name}" for field in dataclasses.fields(sg.TrainedModel)}
    without_tensors = {"TrainedModel.check_says_all", "TrainedModel.feature_names"}
    assert methods - fields - without_tensors <= CALLS.keys() | {"TrainedModel.for_client"}


def test_a_graph_that_was_changed_in_inference_mode_trains(data: Data) -> None:
    assert isinstance(data.graph.x, Tensor)
    x = data.graph.x
    expected = sg.run(replace(data.graph, x=x * 2), **RUN, kernels="torch")
    with torch.inference_mode():
        graph = replace(data.graph, x=x * 2)
    assert bits_of(sg.run(graph, **RUN, kernels="torch")) == bits_of(expected)
    assert isinstance(graph.x, Tensor)
    assert not graph.x.is_inference()


def test_a_server_and_its_silos_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in a thread of its own, which has settings of its own besides those of the process."""
    pytest.importorskip("grpc")
    pytest.importorskip("cryptography")
    import silos
    from silograph.deploy.server import serve
    from silograph.deploy.server_settings import ServerSettings
    from silograph.deploy.silo import take_part_in_run
    from silograph.experiment.run.recommender import load_recommender

    config = silos.config_of(**RATINGS, partition="category")
    kept = silos.folders(rating_graph(), config, tmp_path / "silos")

    def attend_with(*given: Any) -> object:
        with all_of(OF_THREAD):
            return take_part_in_run(*given)

    def federated() -> object:
        venue = ServerSettings("127.0.0.1:0", insecure=True, patience=60)
        result = silos.federate(kept, config, venue, run=serve, keep=True)
        found = sorted(kept[0].glob("results/*/recommender.safetensors"))[-1]
        recommender = load_recommender(found)
        return bits_of(result), recommender.recommend("100"), found.read_bytes()

    expected = federated()
    monkeypatch.setattr(silos, "take_part_in_run", attend_with)
    with all_of(MODES):
        before = settings()
        found = federated()
        assert settings() == before
    assert found == expected


def test_settings_of_the_process_come_back_when_the_last_thread_is_done() -> None:
    """The first to leave must not give the caller's settings to the others."""
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with standard_numerics():
            entered.set()
            leave.wait(60)

    with process_settings(ProcessSettings(dtype=torch.float64)):
        thread = threading.Thread(target=other)
        with standard_numerics():
            thread.start()
            assert entered.wait(60)
        assert torch.get_default_dtype() == torch.float32
        leave.set()
        thread.join(60)
        assert torch.get_default_dtype() == torch.float64
