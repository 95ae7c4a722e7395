"""Silos of a cut graph, as folders, threads and processes."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from silograph.core.config import RunConfig, make_config
from silograph.core.errors import SilographError
from silograph.deploy.policy import SiloPolicy
from silograph.deploy.server import serve
from silograph.deploy.server_settings import ServerSettings
from silograph.deploy.silo import Attendance, take_part_in_run
from silograph.experiment.resolve.data import cut_graph
from silograph.experiment.resolve.parts import choose_parts
from silograph.experiment.run.result import Result
from silograph.federation.session.events import Event, What, log_event
from silograph.graph.graph import Graph
from silograph.graph.silos.export import write_silos
from silograph.graph.silos.read import read_silo

# All that silos do not do unasked.
ALLOW = (
    *("label_guided", "bns", "cagnet", "fedgraph", "fedais", "collect"),
    *("items", "users"),
)


def folders(
    graph: Graph, config: RunConfig, path: Path, format: str = "npz", *, cross_edges: bool = True
) -> tuple[Path, ...]:
    """The silos' folders of a run on a graph, and beside them `secret`, which all share."""
    found = cut_graph(config, graph, choose_parts(config).partition)
    made = write_silos(
        path,
        found.graph,
        found.partition,
        found.split,
        format=format,
        cross_edges=cross_edges,
    )
    (path / "secret").write_bytes(bytes(range(32)))
    (path / "secret").chmod(0o600)
    return made


def config_of(clients: int, **options: Any) -> RunConfig:
    # What simulations have by default; real silos have 5, and participants.
    exact = {"evaluation_min_count": 0, "evaluate_clients": "all"}
    given = {"clients": clients, "dataset": "planted", "checkpoint_every": 1, **exact}
    return make_config({**given, **options})


@contextmanager
def running(targets: Sequence[Callable[[], object]]) -> Iterator[None]:
    """Run functions in threads of their own, which end before this does."""
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join(timeout=600)
            assert not thread.is_alive()


def federate(
    silos: Sequence[Path],
    config: RunConfig,
    venue: ServerSettings,
    *,
    silo_lines: list[str] | None = None,
    run: Callable[..., Result] = serve,
    on_address: Callable[[str], None] = lambda _: None,
    reached: Callable[[Path, str], str] = lambda _, address: address,
    own_secrets: bool = False,
    policies: Mapping[Path, SiloPolicy] = MappingProxyType({}),
    keep: bool = False,
    own: Mapping[Path, Mapping[str, Any]] = MappingProxyType({}),
    **how: Any,
) -> Result:
    """Run a federation over gRPC whose silos are threads, and return its result.

    Args:
        silos: their folders; keys are made there.
        config: of the run.
        venue: of the server.
        silo_lines: gets what the silos print, and why they ended if they failed.
        run: what the server does; called as `serve`.
        on_address: told where the server listens.
        reached: by which address a silo reaches it.
        keep: whether silos write down what the run has come to, into `results` of their folder.
        policies: of silos, by their folders; others have none.
        own: what the `Attendance` of a silo has, by its folder.
        own_secrets: whether each silo has a secret in its folder, in place of that of all.
        how: what else a silo's `Attendance` has.
    """
    heard: list[str] = [] if silo_lines is None else silo_lines
    address: list[str] = []
    listening = threading.Event()

    def report(event: Event) -> None:
        log_event(event)
        if event.what is What.LISTENING:
            address.append(str(event.address))
            on_address(address[0])
            listening.set()

    def hear(event: Event) -> None:
        heard.append(str(event))

    def silo(folder: Path) -> None:
        if not listening.wait(600) or not address:
            return
        prepared = folder / "prepared.json"
        plain = Attendance(
            reached(folder, address[0]),
            folder / "key.pem",
            (folder if own_secrets else folder.parent) / "secret",
            insecure=venue.insecure,
            state=folder / "state",
            patience=30.0,
            allow=ALLOW,
            results=folder / "results" if keep else None,
            prepared=prepared.read_text() if prepared.exists() else None,
            policy=policies.get(folder),
        )
        try:
            reason = take_part_in_run(
                read_silo(folder), replace(plain, **how, **own.get(folder, {})), hear
            )
        except SilographError as error:
            reason = str(error)
        if reason is not None:
            heard.append(reason)

    with running([partial(silo, folder) for folder in silos]):
        try:
            return run(config, venue, report=report)
        except SilographError as error:  # that of a test that fails says what silos had to say
            error.add_note("\n".join(heard))
            raise
        finally:
            listening.set()
