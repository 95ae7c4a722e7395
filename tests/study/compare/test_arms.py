"""Laws of arms: they are plain runs in whatever form they are written, and paired as methods."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import silograph as sg
from commands import save
from conftest import planted_graph
from mistakes import raises_code
from runs import FAST, MakeGraph
from silograph.cli import run_app
from silograph.cli.studies import parse_arms
from silograph.core.errors import ConfigError
from silograph.study.arms import (
    checked_arms,
    labels_of_baseline,
    names_of_arms,
    read_arms,
    reference_of,
)
from silograph.study.compare import resume_comparison
from silograph.study.comparison import Comparison
from silograph.study.paired_tests import overlap_of, paired_test

SHORT = {k: v for k, v in FAST.items() if k != "method"} | {"rounds": 2}
TWO = {
    "GrAINS": {"method": "fedavg", "neighbors": "fedgrains", "batch_size": 8, "k": 2},
    "Prox, wide": {"method": "fedprox", "hidden": 8, "method.mu": 0.5},
}


def score_of(run: sg.Result) -> float:
    assert run.test.server is not None
    assert run.test.server.accuracy is not None
    return run.test.server.accuracy


def digests_of(table: Comparison) -> list[str]:
    return [cell.digest for cell in table.cells]


# --- forms ----------------------------------------------------------------------------------------


def test_flags_toml_and_dict_are_the_same_cells(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    graph = make_graph()
    by_dict = sg.compare(graph, arms=TWO, seeds=[1], processes=0, **SHORT)
    flags = [
        "GrAINS: method=FedAvg neighbors=FedGrAINS batch-size=8 neighbors.k=2",
        'Prox, wide: method=Fed-Prox "hidden=8" mu=0.5',
    ]
    by_flags = sg.compare(graph, arms=parse_arms(flags), seeds=[1], processes=0, **SHORT)
    Path("arms.toml").write_text(
        '[arms.GrAINS]\nmethod = "fedavg"\nneighbors = "fedgrains"\nbatch_size = 8\n'
        '"neighbors.k" = 2\n'
        '[arms."Prox, wide"]\nmethod = "fedprox"\nhidden = 8\noptions = {mu = 0.5}\n'
    )
    by_file = sg.compare(graph, arms="arms.toml", seeds=[1], processes=0, **SHORT)
    assert digests_of(by_dict) == digests_of(by_flags) == digests_of(by_file)
    assert list(by_dict.arms) == list(by_flags.arms) == list(by_file.arms) == list(TWO)


def test_an_option_stands_bare_with_its_part_or_in_its_table() -> None:
    forms: list[dict[str, Any]] = [
        {"neighbors.k": 2, "lr": 0.1},
        {"neighbors": {"k": 2}, "lr": 0.1},
        {"options": {"neighbors.k": 2}, "lr": 0.1},
    ]
    assert all(checked_arms({"a": form}) == {"a": forms[0]} for form in forms)
    assert parse_arms(["a: hidden=64,32 note='a b' drop_x=true"])["a"] == {
        "hidden": "64,32",
        "note": "a b",
        "drop_x": True,
    }
    assert parse_arms(["default:"]) == {"default": {}}
    assert parse_arms(["a: method=own/m.py:METHOD"]) == {"a": {"method": "own/m.py:METHOD"}}


def test_an_arm_is_a_plain_run(make_graph: MakeGraph) -> None:
    table = sg.compare(make_graph(), arms=TWO, seeds=[1], processes=0, **SHORT)
    given: list[dict[str, Any]] = [
        {
            "method": "fedavg",
            "neighbors": "fedgrains",
            "batch_size": 8,
            "options": {"neighbors.k": 2},
        },
        {"method": "fedprox", "hidden": 8, "options": {"mu": 0.5}},
    ]
    for row, options in zip(table.rows, given, strict=True):
        plain = sg.run(make_graph(), seed=1, **{**SHORT, **options})
        assert plain.test.server is not None
        assert row["server_mean"] == plain.test.server.accuracy
        assert (row["bytes"], row["flops"]) == (plain.bytes, plain.flops)
    assert [(row["arm"], row["method"]) for row in table.rows] == [
        ("GrAINS", "fedavg"),
        ("Prox, wide", "fedprox"),
    ]


def test_an_arm_equal_to_a_method_has_its_lines(make_graph: MakeGraph, tmp_path: Path) -> None:
    """So a folder of methods goes on as one of arms, and the other way round."""
    given: dict[str, Any] = {"seeds": 2, "processes": 0, "out": tmp_path / "c", **SHORT}
    methods = sg.compare(make_graph(), methods=["fedavg", "fedprox"], **given)
    text = (tmp_path / "c" / "compare.jsonl").read_bytes()
    arms = {"first": {"method": "fedavg"}, "second": {"method": "fedprox"}}
    named = sg.compare(make_graph(), arms=arms, **given)
    assert (tmp_path / "c" / "compare.jsonl").read_bytes() == text
    assert named.lines == methods.lines
    both = sg.compare(make_graph(), methods=["fedavg"], arms={"too": arms["second"]}, **given)
    assert (tmp_path / "c" / "compare.jsonl").read_bytes() == text
    assert list(both.arms) == ["fedavg", "too"]
    assert both.tests


def test_what_an_arm_replaces_has_no_options_of_the_rest(make_graph: MakeGraph) -> None:
    """Options for all go to the arms that have the part; an arm's own come first."""
    arms: dict[str, Any] = {
        "base": {},
        "own": {"k": 3},
        "full": {"neighbors": "full", "batch_size": 8},
        "gat": {"model": "gat", "heads": 2},
    }
    options = {"neighbors": {"k": 2}}
    table = sg.compare(
        make_graph(),
        arms=arms,
        options=options,
        seeds=[1],
        processes=0,
        **{**SHORT, "batch_size": 8, "neighbors": "fedgrains", "heads": 4},
    )
    ks = [line["config"]["options"].get("neighbors.k") for line in table.lines if line is not None]
    assert ks == [2, 3, None, 2]
    heads = [line["config"]["options"].get("model.heads") for line in table.lines if line]
    assert heads == [None, None, None, 2]


# --- what makes arms, and what tables -------------------------------------------------------------


def test_a_varied_selector_is_paired_as_by_hand(make_graph: MakeGraph) -> None:
    over: dict[str, Any] = {"clients": [4, 5], "selector": ["uniform", "harmony"]}
    given = {k: v for k, v in SHORT.items() if k != "clients"} | {"participation": 0.5}
    table = sg.compare(
        make_graph(),
        methods=["fedavg"],
        over=over,
        seeds=3,
        processes=0,
        baseline="selector=uniform",
        **given,
    )
    assert list(table.arms) == ["selector=uniform", "selector=harmony"]
    assert [(row["clients"], row["selector"]) for row in table.rows] == [
        (clients, name) for clients in over["clients"] for name in over["selector"]
    ]
    for clients in over["clients"]:
        own: dict[str, Any] = {**given, "clients": clients, "method": "fedavg"}
        scores = {}
        for name, options in {"uniform": own, "harmony": own | {"participation": None}}.items():
            runs = [sg.run(make_graph(), seed=n, selector=name, **options) for n in range(3)]
            scores[name] = [score_of(run) for run in runs]
        overlap = overlap_of(str(SHORT["split"]), None)
        assert overlap is not None
        test = paired_test(scores["harmony"], scores["uniform"], "resampled", overlap)
        (row,) = (r for r in table.rows if (r["clients"], r["selector"]) == (clients, "harmony"))
        assert row["reference"] == "selector=uniform"
        assert [row[key] for key in ("pairs", "difference", "low", "high", "p", "p_holm")] == [
            *(3, test.mean, test.low, test.high, test.p, test.p)
        ]


def test_values_that_change_the_cut_have_tables_of_their_own(make_graph: MakeGraph) -> None:
    over: dict[str, Any] = {"partition": ["louvain", "random"], "halve": [True, False]}
    over |= {"lr": [0.1, 0.2], "split_seed": [0, 1], "init_seed": [3, 4]}
    table = sg.compare(
        make_graph(), methods=["fedavg"], over=over, seeds=[1], processes=0, **SHORT | {"rounds": 1}
    )
    assert table.point_keys == ("partition", "halve", "split_seed")
    assert list(table.arms) == [
        f"lr={lr}, init_seed={seed}" for lr in (0.1, 0.2) for seed in (3, 4)
    ]
    for point in table._points:
        cuts = {line["partition"] for line in table.lines_of(point)}
        assert len(cuts) == 1


def test_every_combination_of_arms_and_values_is_an_arm(make_graph: MakeGraph) -> None:
    arms: dict[str, Any] = {"A": {"method": "fedavg"}, "B": {"method": "fedprox"}}
    table = sg.compare(
        make_graph(),
        arms=arms,
        over={"lr": [0.1, 0.2], "mu": [1.0, 2.0]},
        seeds=2,
        processes=0,
        baseline="A",
        **{k: v for k, v in SHORT.items() if k != "lr"} | {"rounds": 1},
    )
    assert list(table.arms) == [
        *("A, lr=0.1", "A, lr=0.2"),
        *(f"B, lr={lr}, mu={mu}" for lr in (0.1, 0.2) for mu in (1.0, 2.0)),
    ]
    references = {row["arm"]: row["reference"] for row in table.rows}
    assert references["A, lr=0.1"] == "A, lr=0.1"
    assert references["B, lr=0.2, mu=1.0"] == "A, lr=0.2"  # which has no mu
    other = replace(table, request=replace(table.request, baseline="B"))
    references = {row["arm"]: row["reference"] for row in other.rows}
    assert references["A, lr=0.2"] is None  # two arms B may be meant
    note = "not tested, as several arms are B and none of them is like these: A, lr=0.1, A, lr=0.2"
    assert note in other.notes


def test_a_baseline_is_an_arm_or_what_several_have() -> None:
    grid = [{"method": method, "lr": lr} for method in ("fedavg", "fedopt") for lr in (0.1, 0.2)]
    arms = dict(zip(names_of_arms(grid), grid, strict=True))
    assert list(arms)[:2] == ["fedavg, lr=0.1", "fedavg, lr=0.2"]

    def references(baseline: str) -> list[str | None]:
        labels = labels_of_baseline(baseline, arms)
        return [reference_of(name, labels, arms) for name in arms]

    assert references("fedopt, lr=0.2") == ["fedopt, lr=0.2"] * 4
    assert references("FedAvg") == ["fedavg, lr=0.1", "fedavg, lr=0.2"] * 2
    assert references("lr=0.1") == ["fedavg, lr=0.1"] * 2 + ["fedopt, lr=0.1"] * 2
    with raises_code(
        ConfigError, "unknown-name", what="baseline", got="fedavgg", suggestion="fedavg"
    ):
        references("fedavgg")


# --- going on, and the command --------------------------------------------------------------------


def test_arms_resume(tmp_path: Path, make_graph: MakeGraph) -> None:
    save(tmp_path / "g.npz", make_graph())
    folder = tmp_path / "c"
    given: dict[str, Any] = {"seeds": 2, "processes": 0, "baseline": "GrAINS", **SHORT}
    comparison = sg.compare(str(tmp_path / "g.npz"), arms=TWO, out=folder, **given)
    lines = (folder / "compare.jsonl").read_text().splitlines(keepends=True)
    (folder / "compare.jsonl").write_text("".join(lines[:-1]))
    again = resume_comparison(folder, processes=0)
    assert again.arms == comparison.arms
    assert again.request == comparison.request
    assert [row["p"] for row in again.rows] == [row["p"] for row in comparison.rows]
    plan = json.loads((folder / "compare.json").read_text())
    assert plan["arms"]["GrAINS"]["method"] == "fedavg"


def test_the_plan_of_an_older_version_resumes_with_the_same_tables(
    tmp_path: Path, make_graph: MakeGraph
) -> None:
    """It has no arms, and a baseline among methods that something is varied of."""
    save(tmp_path / "g.npz", make_graph())
    given: dict[str, Any] = {"methods": ["fedavg", "fedprox"], "seeds": 2, "processes": 0}
    given |= {"over": {"lr": [0.1, 0.2]}, "baseline": "fedavg"}
    short = {k: v for k, v in SHORT.items() if k != "lr"}
    comparison = sg.compare(str(tmp_path / "g.npz"), out=tmp_path / "c", **given, **short)
    plan = json.loads((tmp_path / "c" / "compare.json").read_text())
    del plan["arms"], plan["digest"]
    (tmp_path / "c" / "compare.json").write_text(json.dumps(plan))
    again = resume_comparison(tmp_path / "c", processes=0)
    assert again.rows == comparison.rows
    assert {row["arm"]: row["reference"] for row in again.rows} == {
        f"{method}, lr={lr}": f"fedavg, lr={lr}"
        for method in ("fedavg", "fedprox")
        for lr in (0.1, 0.2)
    }


def test_the_command(work: Path, capsys: pytest.CaptureFixture[str], make_graph: MakeGraph) -> None:
    save("h.npz", make_graph())
    Path("arms.toml").write_text('[arms."From file"]\nmodel = "sage"\n')
    short = [f"--{k.replace('_', '-')}={v}" for k, v in SHORT.items()]
    line = ["compare", "g.npz,h.npz", *short, "--seeds=1", "--processes=0", "--quiet", "--out=c"]
    line += ["--methods=local", "--arms=arms.toml", "--arm", "By flag: method=fedprox mu=.5"]
    capsys.readouterr()
    assert run_app([*line, "--json"]) == 0
    printed_rows = json.loads(capsys.readouterr().out)
    assert [(row["dataset"], row["arm"], row["method"]) for row in printed_rows["rows"]] == [
        (name, arm, method)
        for name in ("g.npz", "h.npz")
        for arm, method in (("local", "local"), ("From file", "fedopt"), ("By flag", "fedprox"))
    ]
    Path("code.toml").write_text('[arms.Mine]\nmethod = "own.py:METHOD"\n')
    assert run_app(["compare", "g.npz", "--arms=code.toml", "--out=d"]) == 2
    assert "--trust" in capsys.readouterr().err
    assert not Path("d").exists()


# --- mistakes -------------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another cut": (
        {"arms": {"a": {"clients": 2}, "b": {"clients": 3}}},
        "clients: expected one value for all arms, whose runs are paired by cut and split, got 2 "
        "(a) and 3 (b): give it to all, or vary it by over",
    ),
    "another option of the cut": (
        {"arms": {"a": {"halve": False}, "b": {}}, "partition": "louvain"},
        "partition.halve: expected one value for all arms",
    ),
    "another dataset": (
        {"arms": {"a": {"dataset": "digits"}, "b": {}}},
        "dataset: expected one value for all arms",
    ),
    "a seed": ({"arms": {"a": {"seed": 3}}}, "arm a: expected no seed, got one: give seeds for"),
    "a folder": ({"arms": {"a": {"out": "x"}}}, "arm a: expected no out, got one: give out for"),
    "a method": ({"arms": {"a": {"method": "fedavgg"}}}, "arm a: unknown method 'fedavgg': did"),
    "a key": ({"arms": {"a": {"rouns": 3}}}, "unknown key of arm a 'rouns': did you mean 'rounds'"),
    "a value": ({"arms": {"a": {"rounds": 0}}}, "arm a: rounds: input should be greater than or"),
    "an option of another part": (
        {"arms": {"a": {"heads": 2}}},
        "arm a: heads: model gcn has no such option, but model gat and",
    ),
    "a table": ({"arms": {"a": {"lr": {"x": 1}}}}, "arm a: expected one value of lr, got {'x': 1}"),
    "a key twice": (
        {"arms": {"a": {"lr": 0.1, "options": {"lr": 2}}}},
        "arm a: expected lr once, got it twice: leave one out",
    ),
    "varied and given": (
        {"arms": {"a": {"lr": 0.1}}, "over": {"lr": [0.1, 0.2]}},
        "arm a: expected lr of a either varied or with a value, got both",
    ),
    "no name": ({"arms": {" ": {}}}, "expected the name of an arm as text of one line, got ' '"),
    "a list": ({"arms": [{}]}, "expected arms as a dict, got [{}]"),
    "no settings": ({"arms": {"a": "fedavg"}}, "expected arm a as a dict, got 'fedavg'"),
    "baseline": ({"arms": {"a": {}, "b": {}}, "baseline": "c"}, "unknown baseline 'c'; choices: a"),
    "no arms": ({"arms": {}}, "expected at least one of methods, got none"),
    "no file": ({"arms": "nowhere.toml"}, "expected a run file at nowhere.toml, got: No such"),
    "datasets twice": (
        {"graph": ["digits", "cora"], "over": {"dataset": ["cora"]}, "methods": ["local"]},
        "expected datasets once, got a list of them and over: leave one out",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_one_line_and_writes_nothing(
    make_graph: MakeGraph, tmp_path: Path, case: str
) -> None:
    given, message = WRONG[case]
    all_given: dict[str, Any] = {"graph": make_graph(), "out": tmp_path / "x"} | given
    with pytest.raises(ConfigError) as caught:
        sg.compare(all_given.pop("graph"), **all_given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no colon method=fedavg", "expected --arm 'NAME: KEY=VALUE KEY=VALUE', got 'no colon"),
        ("method=own.py:M lr=1", "expected --arm 'NAME: KEY=VALUE KEY=VALUE', got 'method=own"),
        ("a: lr", "arm a: expected KEY=VALUE, got 'lr'"),
        ("a: lr=1 lr=2", "arm a: expected lr once, got it twice"),
        ("a: x='b", 'arm a: expected words as in a shell, got "x=\'b" (no closing quotation)'),
    ],
)
def test_a_flag_of_another_form_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_arms([text])
    assert message in str(caught.value)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    for text, got in (("lr = 1", "lr"), ("[arms]\n[options]", "options"), ("", "none")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=rf"expected tables such as .* alone .*, got {got}$"):
            read_arms(path)


def test_a_dotted_option_without_quotes_is_told_how_to_write_it(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[arms.a]\nneighbors = "fedgrains"\nneighbors.k = 8\n')
    with pytest.raises(ConfigError, match=r'Cannot overwrite .*: write "PART\.NAME" in quotes$'):
        read_arms(tmp_path / "a.toml")


def test_two_arms_with_the_same_settings_are_said_to_be_one(make_graph: MakeGraph) -> None:
    arms = {"a": {"method": "fedavg"}, "b": {"method": "fedavg"}}
    table = sg.compare(make_graph(), arms=arms, seeds=2, processes=0, **SHORT)
    assert any(note.startswith("a and b have the same scores and losses") for note in table.notes)
    assert len({cell.digest for cell in table.cells}) == 2
    assert replace(table).rows[1]["difference"] == 0


def test_fedgraph_without_an_agent_is_named_in_comparisons() -> None:
    table = sg.compare(
        planted_graph(30), arms={"FedGraph": {"method": "fedgraph"}}, seeds=1, processes=0, **SHORT
    )
    (note,) = (n for n in table.notes if "not the paper's learned policy" in n)
    assert note.startswith("FedGraph: rates are fixed")
