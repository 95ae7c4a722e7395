"""Laws of names of parts: those of papers are taken, and silograph's are stored."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import silograph as sg
from commands import save
from conftest import planted_graph
from mistakes import raises_code
from silograph.cli import run_app
from silograph.core.config import make_config
from silograph.core.errors import ConfigError, canonical_name
from silograph.deploy.policy import policy_of
from silograph.deploy.silo import parse_allowed_methods
from silograph.experiment.resolve.parts import TABLES, find_method, with_canonical_names
from silograph.methods import METHODS

SMALL: dict[str, Any] = {"clients": 2, "partition": "random", "rounds": 1, "hidden": 4}
PAPERS = {
    "FedAvg": "fedavg",
    "FED-PUB": "fedpub",
    "GCFL": "gcfl",
    "GCFL+": "gcflplus",
    "FedSage+": "fedsageplus",
    "Label-guided": "label_guided",
    "Label Guided": "label_guided",
    "SCAFFOLD": "scaffold",
    "FedAIS": "fedais",
    "FedAIS-1": "fedais1",
}


@pytest.mark.parametrize("name", PAPERS)
def test_names_of_papers_are_those_of_methods(name: str) -> None:
    assert canonical_name(name, METHODS, "method") == PAPERS[name]
    assert find_method(make_config({"method": name})) is METHODS[PAPERS[name]]
    assert parse_allowed_methods(name) == (PAPERS[name],)
    assert policy_of({"methods": [name]}).methods == (PAPERS[name],)


def test_every_part_is_found_by_its_name_in_capitals_without_separators() -> None:
    for kind, table in TABLES.items():
        for name in table:
            written = name.upper().replace("_", "-")
            assert with_canonical_names({kind: written, "rounds": 3}) == {kind: name, "rounds": 3}


def test_a_name_of_several_parts_is_one_line() -> None:
    table = ["fed_avg", "fedavg", "local"]
    assert canonical_name("fedavg", table, "method") == "fedavg"
    with pytest.raises(ConfigError, match=r"^method 'FedAvg' can be fed_avg or fedavg: write whi"):
        canonical_name("FedAvg", table, "method")


def test_files_values_and_unknown_names_stay() -> None:
    values = {"method": "own/Mine.py:FEDAVG", "model": len, "selector": None, "partition": "A.csv"}
    assert with_canonical_names(values) == values
    with raises_code(
        ConfigError, "unknown-name", what="method", got="FedAvgg", suggestion="fedavg"
    ):
        sg.run(planted_graph(30), method="FedAvgg", **SMALL)


def test_what_is_stored_is_the_name_of_silograph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    graph = planted_graph(30)
    by_keyword = sg.run(graph, method="FedAvg", model="GCN", out="a", **SMALL)
    by_config = sg.run(graph, config=make_config({"method": "FED_AVG", **SMALL}))
    plain = sg.run(graph, method="fedavg", model="gcn", **SMALL)
    assert replace(by_keyword.config, out=None) == by_config.config == plain.config
    stored = tomllib.loads(Path("a", "config.toml").read_text())
    assert (stored["method"], stored["model"]) == ("fedavg", "gcn")
    save("g.npz", graph)
    Path("run.toml").write_text(
        'method = "FED-PUB"\npartition = "Random"\nrounds = 1\nclients = 2\n'
    )
    assert run_app(["run", "g.npz", "--config", "run.toml", "--quiet", "--out", "b"]) == 0
    stored = tomllib.loads(Path("b", "config.toml").read_text())
    assert (stored["method"], stored["partition"]) == ("fedpub", "random")
    assert (
        run_app(["run", "g.npz", "--method", "Fed-Prox", "--rounds", "1", "--quiet", "--out", "c"])
        == 0
    )
    assert tomllib.loads(Path("c", "config.toml").read_text())["method"] == "fedprox"


def test_listings_take_them_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["methods", "FED-PUB"]) == 0
    assert capsys.readouterr().out.startswith("fedpub: ")
    assert run_app(["parts", "FedGrAINS"]) == 0
    assert "fedgrains: " in capsys.readouterr().out


def test_fedgraph_says_without_an_agent_that_it_is_not_the_papers_policy() -> None:
    advice = "rates are fixed: this is not the paper's learned policy"
    graph = planted_graph(30)
    assert advice in (sg.run(graph, method="FedGraph", **SMALL).advice or "")
    drawn = sg.run(graph, method="fedgraph", options={"policy": "drawn"}, **SMALL)
    assert "rates are drawn by chance: this is not the paper's" in (drawn.advice or "")
    agent: dict[str, Any] = {"policy": "ddpg", "time": "none"}
    learned = sg.run(graph, method="fedgraph", options=agent, **SMALL)
    assert "not the paper's" not in (learned.advice or "")
    assert "not the paper's" not in (sg.run(graph, method="fedavg", **SMALL).advice or "")
