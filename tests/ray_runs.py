"""Runs on Ray, in a process of their own; used by test_ray.py.

    python -m ray_runs CASE FOLDER [WORDS]

Prints one line of JSON: what a run left in one process and on Ray, as digests by name.
"""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from torch import Tensor, nn

import silograph as sg
from killing import graph
from rating_graphs import rating_graph
from runs import files_of, little_work, some_of

RUN: dict[str, Any] = {
    "clients": 6,
    "partition": "random",
    "rounds": 4,
    "hidden": 8,
    "block_size": 1,
    "kernels": "torch",
    "split": "0.4/0.3/0.3",
    "checkpoint_every": 1,
}


def digest_of(folder: Path) -> str:
    """Return a digest of what a run leaves."""
    return hashlib.blake2b(repr(files_of(folder)).encode(), digest_size=8).hexdigest()


def data_of(method: str) -> sg.Graph:
    return rating_graph() if method in ("fedacs", "fedmf", "fedgnn", "fesog") else graph()


def run(folder: Path, method: str, **options: Any) -> str:
    """Run a method and return the digest of what it leaves."""
    own = {"pseudo": 20, "clip": 0.1} if method in ("fedgnn", "fesog") else {}
    given = {**RUN, "method": method, **some_of(method, 0.6), **little_work(method)}
    given["options"] = {**given.get("options", {}), **own}
    sg.run(data_of(method), **given | options, out=str(folder))
    return digest_of(folder)


class Killer:
    """Does harm after a round, with a chance."""

    def __init__(self, harm: Callable[[], None], rounds: set[int]) -> None:
        self._harm, self._rounds = harm, rounds

    def update(self, rounds_done: int, metric: str) -> None:
        if rounds_done in self._rounds:
            self._harm()


OWN = os.getpid()
STARTS = 5  # of a machine, until one is in time


def workers_of_ray() -> list[int]:
    """Return the process numbers of the actors of this process's cluster that are alive."""
    return [
        int(folder.name)
        for folder in Path("/proc").glob("[0-9]*")
        if command_of(folder.name).startswith("ray::WorkerServer") and is_descendant(folder.name)
    ]


def command_of(process: str) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:  # it has ended
        return ""


def is_descendant(process: str) -> bool:
    """Whether a process was started by this one, or by such a process."""
    while process not in ("0", "1"):
        if int(process) == OWN:
            return True
        try:
            status = Path(f"/proc/{process}/stat").read_text()
        except OSError:
            return False
        process = status.rpartition(")")[2].split()[1]
    return False


@contextmanager
def cluster_of(nodes: int, cores: int) -> Iterator[Cluster]:
    cluster = Cluster()
    try:
        add_node(cluster, 0, include_dashboard=False)
        for _ in range(nodes):
            add_node(cluster, cores)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()


def add_node(cluster: Cluster, cores: int, **options: Any) -> None:
    """Add a machine, the first as head; a busy one may need more than the 30 seconds of Ray."""
    for attempt in range(STARTS):
        try:
            cluster.add_node(num_cpus=cores, object_store_memory=100 << 20, **options)
        except Exception as error:  # Ray has no class for it
            if "timed out during startup" not in str(error) or attempt == STARTS - 1:
                raise
        else:
            return


def settings() -> list[object]:
    """Return what a run must leave as it was."""
    return [
        dict(os.environ),
        signal.getsignal(signal.SIGTERM),
        signal.getsignal(signal.SIGINT),
        list(sys.path),
        len(warnings.filters),
    ]


def local(folder: Path) -> dict[str, Any]:
    """A cluster that the run starts itself."""
    here, before = run(folder / "here", "scaffold"), settings()
    there = run(folder / "there", "scaffold", engine="ray", workers=2)
    left = [a == b for a, b in zip(before, settings(), strict=True)]
    return {"pairs": [[here, there]], "left": left, "initialized": ray.is_initialized()}


def methods(folder: Path, *names: str) -> dict[str, Any]:
    """Methods on a cluster of two machines."""
    pairs = {}
    with cluster_of(2, 1) as cluster:
        for name in names:
            here = run(folder / name / "here", name)
            there = run(folder / name / "there", name, engine="ray", address=cluster.address)
            pairs[name] = [here, there]
    return {"pairs": list(pairs.values())}


class Net(nn.Module):
    """A module of a script, which no other process can import."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.line = nn.Linear(features, outputs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.line(x)
        return out


METHOD = """
from silograph.methods import Clients, Empty, GlobalModel, Kind, LocalModel, NoOptions, op
from silograph.methods import averaging

@op(Kind.WEIGHTS)
def train(
    clients: Clients[NoOptions], state: Empty, request: GlobalModel
) -> tuple[Empty, LocalModel]:
    return state, LocalModel.of(clients.fit(request.weights), clients.block)

METHOD = averaging(train)
"""


def code(folder: Path) -> dict[str, Any]:
    """Code of a script and of a file goes to the workers."""
    file = folder / "own.py"
    folder.mkdir(exist_ok=True)
    file.write_text(METHOD, encoding="utf-8")
    options = {name: value for name, value in RUN.items() if name != "hidden"}
    pairs, codes = [], list[dict[str, Any]]()
    codes += [{"model": Net}, {"method": f"{file}:METHOD"}]
    with cluster_of(2, 1) as cluster:
        here: dict[str, Any] = {}
        ray_options = {"engine": "ray", "address": cluster.address}
        for number, own in enumerate(codes):
            for name, engine in (("here", here), ("there", ray_options)):
                sg.run(graph(), **options | own | engine, out=str(folder / f"{name}{number}"))
            pairs.append([digest_of(folder / f"{name}{number}") for name in ("here", "there")])
    return {"pairs": pairs}


def actors(folder: Path, kills: str) -> dict[str, Any]:
    """Actors are killed in the middle of runs."""
    generator, pairs, landed = random.Random(3), [], 0
    with cluster_of(3, 1) as cluster:
        here = run(folder / "here", "fedper", rounds=8)
        number = 0
        while landed < int(kills):
            killed: list[int] = []

            def harm(killed: list[int] = killed) -> None:
                victim = generator.choice(workers_of_ray())
                os.kill(victim, signal.SIGKILL)
                killed.append(victim)

            rounds = set(generator.sample(range(1, 8), 3))
            there = run(
                folder / str(number),
                "fedper",
                rounds=8,
                engine="ray",
                address=cluster.address,
                keep_every=generator.choice([0, 1, 3]),
                progress=Killer(harm, rounds),
            )
            pairs.append([here, there])
            number, landed = number + 1, landed + len(killed)
    return {"pairs": pairs, "kills": landed}


def node(folder: Path) -> dict[str, Any]:
    """A machine is lost: its worker starts on another."""
    here, pairs = run(folder / "here", "fedper", rounds=6), []
    with cluster_of(3, 2) as cluster:
        for number in range(2):

            def harm() -> None:
                victim = next(n for n in cluster.worker_nodes)
                cluster.remove_node(victim, allow_graceful=False)

            there = run(
                folder / str(number),
                "fedper",
                rounds=6,
                engine="ray",
                workers=2,
                address=cluster.address,
                progress=Killer(harm, {2}),
            )
            pairs.append([here, there])
            add_node(cluster, 2)
            cluster.wait_for_nodes()
    return {"pairs": pairs}


def shards(folder: Path) -> dict[str, Any]:
    """Actors read the clients; a run on the graph itself has the same model and ledger."""
    data = {name: RUN[name] for name in ("clients", "partition", "split")}
    training = {name: value for name, value in RUN.items() if name not in data}
    folder.mkdir(exist_ok=True)
    sg.shard(graph(), **data, out=str(folder / "shards"))
    pairs = []
    with cluster_of(2, 1) as cluster:
        for method in ("fedais", "fedper"):
            engine = {"engine": "ray", "address": cluster.address}
            places = [folder / f"{method}-{name}" for name in ("graph", "here", "there")]
            given = {**training, "method": method}
            whole = sg.run(graph(), **data, **given, out=str(places[0]))
            here = sg.run(folder / "shards", **given, out=str(places[1]))
            sg.run(folder / "shards", **given, **engine, out=str(places[2]))
            assert here.ledger.records == whole.ledger.records
            assert here.test.personalized == whole.test.personalized
            pairs.append([digest_of(place) for place in places[1:]])
    return {"pairs": pairs}


def victim(folder: Path, address: str, last: str) -> dict[str, Any]:
    """A run whose process is killed after a round; it has a checkpoint of the one before."""
    kill = Killer(lambda: os.kill(os.getpid(), signal.SIGKILL), {int(last)})
    run(folder, "fedper", rounds=6, engine="ray", address=address, progress=kill)
    raise AssertionError


def driver(folder: Path) -> dict[str, Any]:
    """The process of a run is killed; it is resumed, and new runs start on the same cluster."""
    here, pairs = run(folder / "here", "fedper", rounds=6), []
    with cluster_of(2, 2) as cluster:
        for number in range(3):
            out = folder / str(number)
            words = ["victim", str(out), cluster.address, str(2 + number)]
            victim_process = [sys.executable, "-m", "ray_runs", *words]
            assert subprocess.run(victim_process, check=False).returncode == -signal.SIGKILL
            engine = {"engine": "ray", "address": cluster.address, "workers": 2}
            sg.resume(out, graph=graph(), engine=engine)
            pairs.append([here, digest_of(out)])
        deadline = time.monotonic() + 60
        while workers_of_ray() and time.monotonic() < deadline:
            time.sleep(0.5)
        alive = len(workers_of_ray())
    return {"pairs": pairs, "alive": alive}


CASES: dict[str, Callable[..., dict[str, Any]]] = {
    case.__name__: case for case in (local, methods, code, actors, node, driver, shards, victim)
}


def main() -> None:
    name, folder, *words = sys.argv[1:]
    sys.stdout.write(json.dumps(CASES[name](Path(folder), *words)) + "\n")


if __name__ == "__main__":
    main()
