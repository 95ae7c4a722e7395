"""Laws of the parts that a config names: whose an option is, and what is refused."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import silograph as sg
from mistakes import raises_code
from runs import FAST, MakeGraph
from silograph.aggregation.aggregators import MEDIAN
from silograph.cli import run_app
from silograph.core.config import RunConfig, make_config
from silograph.core.errors import CheckpointError, ConfigError, SilographError
from silograph.core.resolved_config import ResolvedConfig, resolved_values, to_run_config
from silograph.core.run_file import parse_options, read_toml, write_toml
from silograph.experiment.report.reading import read_run
from silograph.experiment.resolve.exclusions import own_module
from silograph.experiment.resolve.flat_options import DECLARED, HELP
from silograph.experiment.resolve.parts import FLAT, TABLES, choose_parts, options_of, unset_options
from silograph.experiment.resolve.resolve import resolve
from silograph.federation.in_process import InProcess
from silograph.graph.graph import Schema
from silograph.methods import METHODS
from silograph.nn.conv import GCN
from silograph.nn.model import MODELS, add_model, layers_of
from silograph.nn.model_options import MODEL_KINDS, RATING_MODELS, LayerOptions, ModelKind
from silograph.sampling.neighbors import NEIGHBORS
from silograph.selection.options import LIMITS
from silograph.selection.registry import SELECTORS
from silograph.selection.ucb import UCB
from silograph.study.cells import Cell, digest_of

OPEN = {k: v for k, v in FAST.items() if k != "lr"} | {"method": "fedopt"}
SCHEMA = Schema(5, 3, "multiclass")
EVERY = [(kind, name) for kind, table in TABLES.items() for name in table]
WITH_CLIENTS = [
    f"selector {name}"
    for name, selector in SELECTORS.items()
    if "clients" in {f.name for f in dataclasses.fields(selector.options)}
]


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_every_option_has_help_and_its_default_is_written_out(kind: str, name: str) -> None:
    part = TABLES[kind][name]
    asked = make_config({kind: name, **({"optimizer": "sgd"} if kind == "method" else {})})
    found = choose_parts(asked).options
    for option, f in options_of(part).items():
        assert f.metadata["help"]
        assert f"{kind}.{option}" in found
    assert MODEL_KINDS.keys() == MODELS.keys() | set(RATING_MODELS)


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_none_can_be_said_where_it_is_the_default_and_nowhere_else(kind: str, name: str) -> None:
    """A run file has no null, so None can only be what stands there when nothing is said."""
    base: dict[str, Any] = {kind: name, **({"optimizer": "sgd"} if kind == "method" else {})}
    usual = choose_parts(make_config(base)).options
    hints = get_type_hints(TABLES[kind][name].options)
    for option, f in options_of(TABLES[kind][name]).items():
        assert (type(None) in get_args(hints[option])) == (f.default is None)
        if f.default is None:
            for said in (option, f"{kind}.{option}"):
                asked = make_config({**base, "options": {said: "none"}})
                assert choose_parts(asked).options == usual
                assert f"{kind}.{option}" in unset_options(asked, choose_parts(asked))


def test_none_over_a_run_file_takes_its_value_back(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(write_toml(RunConfig(options={"server_tau": 0.001})))
    for given, tau in (([], 0.001), (["--option", "server_tau=none"], None)):
        values = read_toml(file)
        values["options"] |= parse_options(given[1:])
        assert choose_parts(make_config(values)).server_optimizer.options.server_tau == tau
    with raises_code(ConfigError, "option-value", option="mu", got="none"):
        choose_parts(make_config({"method": "fedprox", "options": {"mu": "none"}}))


def test_flags_of_options_are_declared_by_parts_and_nowhere_else() -> None:
    declared = {
        (kind, f.name): part
        for kind, parts in DECLARED.items()
        for part, options in parts.items()
        for f in dataclasses.fields(options)
    }
    flags = declared.keys() - {("selector", name) for name in LIMITS}  # these have no flag
    assert {(kind, name) for name, kind in FLAT.items()} == flags
    for (kind, _), part in declared.items():
        assert TABLES[kind][part].options is DECLARED[kind][part]
    assert all(HELP.values())
    assert HELP["alpha"].startswith("dirichlet: concentration")


@pytest.mark.parametrize(
    "given",
    [
        {"alpha": 0.3},
        {"options": {"alpha": 0.3}},
        {"options": {"partition.alpha": 0.3}},
    ],
)
def test_a_flag_a_name_and_a_dotted_name_mean_the_same(given: dict[str, Any]) -> None:
    asked = make_config({"partition": "dirichlet", **given})
    assert choose_parts(asked).partition.options.alpha == 0.3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"alpha": 0.3},
            "alpha: partition metis has no such option, but partition dirichlet has it: leave it "
            "out, or set partition=dirichlet",
        ),
        (
            {"options": {"server_tau": 1}, "method": "fedavg"},
            "option server_tau: server_optimizer none has no such option, but server_optimizer "
            "adam has it: leave it out, or set server_optimizer=adam",
        ),
        (
            {"partition": "dirichlet", "alpha": 0.3, "options": {"partition.alpha": 0.3}},
            "expected alpha once, got alpha and partition.alpha: leave one of them out",
        ),
        (
            {"options": {"model.residul": True}},
            "option model.residul: model gcn has no such option: did you mean 'model.residual'?",
        ),
        (
            {"options": {"fedpub.scale": 1}, "method": "fedpub"},
            "option fedpub.scale: method fedpub, model gcn and selector uniform have no such "
            "option: did you mean 'scale'?",
        ),
        (  # two parts have it, so it is named in full
            {"options": {"alfa": 1}, "partition": "dirichlet", "neighbors": "fedgrains"},
            "option alfa: partition dirichlet, model gcn, neighbors fedgrains, selector uniform "
            "and server_optimizer adam have no such option: did you mean 'partition.alpha'?",
        ),
        (
            {"options": {"neighbors.x": 1}},
            "option neighbors.x: neighbors full has no such option, nor any other: leave it out",
        ),
        (
            {"options": {"selector.client": 1}},
            "option selector.client: selector uniform has no such option: did you mean 'clients' "
            f"of {', '.join(WITH_CLIENTS[:-1])} and {WITH_CLIENTS[-1]}?",
        ),
        (
            {"options": {"foo": 1}, "method": "fedprox"},
            "option foo: method fedprox, model gcn and selector uniform have no such option; "
            "choices: method.mu, model.residual, model.input_dropout, model.head, "
            "selector.participation, selector.budget, selector.least_clients, "
            "selector.least_selections",
        ),
        (
            {"partition": "dirichlet", "alpha": -1.0},
            "alpha: input should be greater than 0, got -1.0 (options of dirichlet)",
        ),
    ],
)
def test_what_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_parts(make_config(given))
    assert str(caught.value) == message


def test_a_name_that_two_parts_have_must_say_whose(monkeypatch: pytest.MonkeyPatch) -> None:
    own = dataclasses.make_dataclass("Own", [("heads", int, 1)], frozen=True)
    method = dataclasses.replace(METHODS["fedavg"], name="own", options=own)
    base = {"method": "own", "model": "gat"}
    with pytest.raises(ConfigError) as caught:
        choose_parts(make_config({**base, "options": {"heads": 2}}), method)
    assert str(caught.value) == (
        "expected method.heads or model.heads, got heads: method own and model gat both have it"
    )
    found = choose_parts(make_config({**base, "options": {"model.heads": 2}}), method)
    assert (found.model.options.heads, found.method.options.heads) == (2, 1)
    found = choose_parts(make_config({**base, "heads": 2}), method)  # the flag is the model's
    assert (found.model.options.heads, found.method.options.heads) == (2, 1)


def test_the_two_configs_have_the_same_fields() -> None:
    asked = {f.name for f in dataclasses.fields(RunConfig)}
    assert {f.name for f in dataclasses.fields(ResolvedConfig)} == asked - FLAT.keys()


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"method": "scaffold", "seed": 3, "split_seed": 0},
        {"method": "llcg", "model": "appnp", "hops": 3, "fanout": "4"},
        {"partition": "shares", "share_mean": 0.4, "selector": "round_robin"},
        {"partition": "class_biased", "features": "onehot-degree", "columns": "id=key"},
        {"neighbors": "bernoulli", "options": {"keep": 0.25}, "clients": 3, "model": "sage"},
    ],
)
def test_what_was_resolved_is_resolved_to_itself(given: dict[str, Any]) -> None:
    config = resolve(make_config(given), SCHEMA).config
    assert resolve(to_run_config(config), SCHEMA).config == config
    known = {k for k, v in vars(config).items() if v is not None} | {"options"}
    assert resolved_values(config).keys() == known


def test_favored_classes_are_written_out_where_classes_are_known() -> None:
    asked = make_config({"partition": "class_biased"})
    for classes, favored in ((2, 1), (3, 2), (9, 2)):
        options = resolve(asked, Schema(5, classes, "multiclass")).config.options
        assert options["partition.favored_classes"] == favored
    cells = [Cell({}, config) for config in (asked, dataclasses.replace(asked, favored_classes=2))]
    assert cells[0].digest == cells[1].digest  # lines of old have the number
    assert cells[0].digest != Cell({}, dataclasses.replace(asked, favored_classes=1)).digest


def test_spelled_out_defaults_are_the_same_run(make_graph: MakeGraph, tmp_path: Path) -> None:
    """Equal in the result folder, in lines of studies, and in what resuming compares."""
    graph, plain = make_graph(40), OPEN
    spelled = plain | {
        "options": {"server_optimizer.server_lr": 0.01, "participation": 1.0},
        "lr": 0.02,
    }
    for name, options in (("a", plain), ("b", spelled)):
        sg.run(graph, **options, out=str(tmp_path / name))
    one, other = (json.loads((tmp_path / name / "run.json").read_text()) for name in "ab")
    assert one["config"] == other["config"]
    assert one["same"] == other["same"]
    assert one["config"]["options"]["server_optimizer.server_beta2"] == 0.99
    assert "options" in one["given"]
    cells = [Cell({}, make_config({"dataset": "x", **own}), graph) for own in (plain, spelled)]
    assert cells[0].digest == cells[1].digest


def test_a_run_file_keeps_its_meaning_when_a_default_changes(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, path = make_graph(40), tmp_path / "a"
    sg.run(graph, **OPEN, optimizer="adam", out=str(path))
    monkeypatch.setattr("silograph.methods.base.LEARNING_RATES", {"sgd": 9, "adam": 9})
    monkeypatch.setattr("silograph.aggregation.server_optimizers.RELATIVE_RATE", 9.0)
    config = make_config(read_toml(path / "config.toml"))
    assert resolve(config, graph).config.lr == 0.01
    assert sg.resume(path, graph=graph).config.options["server_optimizer.server_lr"] == 0.01
    assert resolve(make_config({"optimizer": "adam"}), graph).config.lr == 9


@pytest.mark.law(sample=3)
@pytest.mark.parametrize(
    ("first", "flags"),
    [
        ({"partition": "dirichlet", "alpha": 0.3}, {"alpha": 0.4}),
        ({"fanout": "2"}, {"fanout": "3"}),
        ({"fanout": "2"}, {"hidden": 3}),
        ({"options": {"server_lr": 0.1}}, {"options": ["server_lr=0.2"]}),
        ({"method": "fedprox", "options": {"method.mu": 0.1}}, {"method": "fedavg"}),
        ({}, {"method": "fedavg"}),
        ({}, {"seed": 7, "clients": 3}),
        ({"split_seed": 5}, {"seed": 7}),
        ({}, {"fanout": "3"}),
        ({}, {"server-optimizer": "momentum"}),
        ({"clients": 3}, {"optimizer": "adam"}),
    ],
)
def test_flags_over_the_file_of_a_run_are_flags_over_what_was_given(
    work: Path,
    make_graph: MakeGraph,
    monkeypatch: pytest.MonkeyPatch,
    first: dict[str, Any],
    flags: dict[str, Any],
) -> None:
    """The oracle is a file that has what was given, and nothing else."""
    plain = {n: v for n, v in OPEN.items() if n != "clients"} | {"dataset": "g.npz"} | first
    sg.run(**plain, out="first")
    (work / "given.toml").write_text(write_toml(make_config(plain)), encoding="utf-8")
    seen: list[RunConfig] = []

    def spy(*, config: RunConfig, progress: str) -> None:
        seen.append(dataclasses.replace(config, dataset=str(work / "g.npz"), out=None))
        raise SilographError("seen")

    monkeypatch.setattr("silograph.experiment.run.run.run", spy)
    texts = [
        text
        for name, value in flags.items()
        for each in (value if isinstance(value, list) else [value])
        for text in ("--option" if name == "options" else f"--{name}", str(each))
    ]
    for file in ("first/config.toml", "given.toml"):
        assert run_app(["run", "--config", file, *texts]) == 2
    one, other = (resolve(config, make_graph()).config for config in seen)
    assert one == other


def test_lines_from_before_mean_what_they_meant() -> None:
    cell = Cell({}, make_config({"dataset": "cora", "partition": "dirichlet", "fanout": "3"}))
    config = dict(cell.start["config"])
    dropped = ("options", "neighbors", "server_optimizer")
    old = {n: v for n, v in config.items() if n not in dropped} | {
        "alpha": 0.5,
        "favor": 10.0,
        "participation": 1.0,
        "fanout": "3",
        "heads": None,
        "options": {"server_lr": 0.01},
    }
    assert digest_of({**cell.start, "config": old}) == cell.digest
    assert digest_of({**cell.start, "config": old | {"alpha": 0.4}}) != cell.digest


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, {"method.server_lr": 0.01, "method.server_momentum": 0.9, "method.server_tau": None}),
        ({"options": {"server_tau": 0.1}}, {"method.server_tau": 0.1, "method.server_lr": 0.005}),
        (
            {"server_optimizer": "momentum", "options": {"server_lr": 0.5}},
            {"method.server_optimizer": "momentum", "method.server_lr": 0.5},
        ),
        (
            {"method": "llcg", "options": {"correction_lr": 0.5}},
            {"method.server_lr": 0.5, "method.server_share": 1.0},
        ),
        ({"method": "scaffold", "options": {"server_lr": 0.5}}, {"method.server_lr": 0.5}),
    ],
)
def test_lines_from_when_the_server_optimizer_was_an_option(
    given: dict[str, Any], options: dict[str, Any]
) -> None:
    cell = Cell({}, make_config({"dataset": "cora"} | given))
    config = {n: v for n, v in cell.start["config"].items() if n != "server_optimizer"}
    others = {n: v for n, v in config["options"].items() if not n.startswith(("method", "server"))}
    old = config | {"options": others | options}
    assert digest_of({**cell.start, "config": old}) == cell.digest


def test_older_folders_are_refused_in_one_line(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph, path = make_graph(40), tmp_path / "a"
    sg.run(graph, **FAST, out=str(path))
    about = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(about | {"format": 2}))
    for read in (read_run, lambda path: sg.resume(path, graph=graph)):
        with raises_code(CheckpointError, "other-version", got=2):
            read(path)


def test_a_selector_of_a_file(make_graph: MakeGraph, tmp_path: Path) -> None:
    text = "from silograph.selection.round_robin import ROUND_ROBIN as OURS\n"
    (tmp_path / "mine.py").write_text(text)
    graph, spec = make_graph(40), f"{tmp_path}/mine.py:OURS"
    own = FAST | {"options": {"clients": 2}}
    one = sg.run(graph, selector="round_robin", **own)
    other = sg.run(graph, selector=spec, **own, out=str(tmp_path / "out"))
    assert one.rounds[-1]["val_server_loss"] == other.rounds[-1]["val_server_loss"]
    (tmp_path / "mine.py").write_text(text + "# changed\n")
    with raises_code(CheckpointError, "foreign-checkpoint", what="selector"):
        sg.resume(tmp_path / "out", graph=graph, trust=True)


def test_ops_cannot_read_what_the_server_holds(make_graph: MakeGraph, setups: list[Any]) -> None:
    sg.run(make_graph(40), **FAST | {"method": "llcg"})
    federation = setups[0].federation
    assert isinstance(federation, InProcess)
    assert setups[0].server_block is not None
    assert "held" not in {f.name for f in dataclasses.fields(setups[0].method_config)}


@pytest.mark.parametrize(
    ("kind", "value"),
    [("selector", UCB), ("neighbors", NEIGHBORS["full"]), ("aggregator", MEDIAN)],
)
def test_parts_that_have_names_only_are_refused_as_values(
    make_graph: MakeGraph, kind: str, value: Any
) -> None:
    message = f"^expected the name of a part as {kind}, got a .* {kind}='FILE.py:NAME'$"
    for call in (sg.run, partial(sg.compare, methods=["fedavg"]), partial(sg.tune, trials=1)):
        with pytest.raises(ConfigError, match=message):
            call(make_graph(), **{kind: value})


def test_a_convolution_as_a_value_is_no_model(make_graph: MakeGraph) -> None:
    with pytest.raises(ConfigError) as caught:
        sg.run(make_graph(), model=GCN)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "expected a class or function that makes a module as model, got PlainConv: name what makes "
        "a torch.nn.Module; a convolution becomes a model by silograph.nn.model.add_model"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"selector": "mine.py:SELECTOR"},
            "expected a Selector named SELECTOR in mine.py, got none: the file has no Selector",
        ),
        (
            {"model": "mine.py:CONV"},
            "expected a class or function in mine.py:CONV, got PlainConv: name what makes a "
            "torch.nn.Module; a convolution becomes a model by silograph.nn.model.add_model",
        ),
        (
            {"neighbors": "scarce"},
            "unknown neighbor sampler 'scarce'; choices: FILE.py:NAME, bernoulli, drop_edge, "
            "drop_node, fanout, fastgcn, fedgrains, full, ladies",
        ),
    ],
)
def test_what_is_not_there_is_said_with_what_can_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], message: str
) -> None:
    (tmp_path / "mine.py").write_text("from silograph.nn.conv import GCN as CONV\n")
    monkeypatch.chdir(tmp_path)
    config = make_config(given)
    with pytest.raises(ConfigError) as caught:
        own_module(config) if "model" in given else choose_parts(config)
    assert str(caught.value) == message


def test_a_model_is_added_by_one_call(make_graph: MakeGraph) -> None:
    """Layers of its own convolution: here those of gcn, so that numbers are known."""
    kind = ModelKind("again", "graph convolutions again", "nobody", LayerOptions)
    try:
        MODELS["again"] = lambda model: layers_of(model, lambda _: GCN)
        with pytest.raises(ConfigError, match=r"^expected model 'again' with title and options, g"):
            choose_parts(make_config({"model": "again"}))
        del MODELS["again"]
        add_model(kind, lambda model: layers_of(model, lambda _: GCN))
        with pytest.raises(ConfigError, match=r"^expected a new name of a model, got 'again': ch"):
            add_model(kind, MODELS["gcn"])
        own: dict[str, Any] = {
            "clients": 3,
            "partition": "random",
            "rounds": 2,
            "hidden": 4,
        }
        one, other = (sg.run(make_graph(), model=name, **own) for name in ("again", "gcn"))
        assert one.rounds[-1]["val_server_loss"] == other.rounds[-1]["val_server_loss"]
    finally:
        MODELS.pop("again", None)
        MODEL_KINDS.pop("again", None)


@pytest.mark.parametrize("kind", ["neighbors", "selector", "aggregator"])
def test_lines_of_studies_are_those_of_a_part_as_its_file_was(tmp_path: Path, kind: str) -> None:
    names = {"neighbors": "sampling.neighbors import NEIGHBORS\nPART = NEIGHBORS['full']"}
    names["selector"] = "selection.ucb import UCB as PART"
    names["aggregator"] = "aggregation.aggregators import MEDIAN as PART"
    path = tmp_path / "mine.py"
    digests = set()
    for end in ("", "# changed", ""):
        path.write_text(f"from silograph.{names[kind]}\n{end}")
        digests.add(Cell({}, make_config({kind: f"{path}:PART"})).digest)
    assert len(digests) == 2
