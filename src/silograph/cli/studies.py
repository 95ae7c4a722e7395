"""Commands that run many cells: `compare`, `tune`, `reproduce` and `train-agent`."""

import csv
import io
import math
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from silograph.cli.flags import (
    FIELDS,
    CommandInputs,
    Quiet,
    app,
    command,
    flag,
    hint_to_continue,
    plain_type,
    resume_hint,
)
from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError, mistake
from silograph.core.run_file import parse_option
from silograph.core.setting_values import Scalar
from silograph.core.text import count_of

if TYPE_CHECKING:
    from silograph.study.comparison import Comparison
    from silograph.study.tune import Tuned


FAILED = 1  # exit code where a cell failed
APART = ("method", "options", "seed")  # flags that a comparison has of its own
TYPES = {f.name: f.type for f in fields(RunConfig)}
Processes = Annotated[
    int | None,
    flag("--processes", "runs at the same time (default: cores / threads; 0: in this process)"),
]
JsonStudy = Annotated[bool, flag("--json", "print everything as one JSON object")]


def split_list(text: str, what: str) -> list[str]:
    """Return the entries of a comma-separated list.

    Raises:
        ConfigError: one of them is empty.
    """
    entries = [word.strip() for word in text.split(",")]
    if not all(entries):
        raise ConfigError(
            f"expected {what} as a list like a,b, got {text!r}",
            **mistake("option-value", what.removeprefix("--"), text),
        )
    return entries


def parse_seeds(text: str) -> int | list[int]:
    """Return a number of seeds, or the seeds of a list.

    >>> parse_seeds("3"), parse_seeds("0,4")
    (3, [0, 4])

    Raises:
        ConfigError: no numbers.
    """
    numbers = split_list(text, "--seeds")
    if not all(word.isdecimal() for word in numbers):
        raise ConfigError(
            f"expected --seeds as a number or a list like 0,1,2, got {text!r}",
            **mistake("option-value", "seeds", text),
        )
    return int(text) if len(numbers) == 1 else [int(word) for word in numbers]


def parse_method_options(texts: Sequence[str] | None) -> dict[str, dict[str, Scalar]]:
    """Return options by method, or part, of `METHOD.NAME=VALUE`.

    >>> parse_method_options(["fedopt.server_lr=0.1"])
    {'fedopt': {'server_lr': 0.1}}
    >>> parse_method_options(["own/mine.py:METHOD.trim=0.2"])
    {'own/mine.py:METHOD': {'trim': 0.2}}

    Raises:
        ConfigError: another form, or an option twice.
    """
    options_by_method: dict[str, dict[str, Scalar]] = {}
    for text in texts or []:
        name_text = text.partition("=")[0]
        # The path of a file may have dots before the colon.
        dot = name_text.find(".", name_text.rfind(":") + 1)
        method, option_text = text[:dot], text[dot + 1 :]
        if dot < 0 or "=" not in option_text:
            raise ConfigError(
                "expected --options METHOD.NAME=VALUE, or PART.NAME=VALUE for all methods, such as "
                f"partition.column=shop, got {text!r}",
                **mistake("option-value", "options", text),
            )
        name, value = parse_option(option_text)
        method_options = options_by_method.setdefault(method.strip(), {})
        if name in method_options:
            raise ConfigError(
                f"expected --options {method.strip()}.{name} once, got it twice: leave one of them "
                "out",
                **mistake("repeated-option", f"{method.strip()}.{name}"),
            )
        method_options[name] = value
    return options_by_method


def parse_varied_values(texts: Sequence[str] | None) -> dict[str, list[Scalar]]:
    """Return the values of `KEY=V1,V2`, by key.

    >>> parse_varied_values(["clients=10,100", "model=gcn,sage"])
    {'clients': [10, 100], 'model': ['gcn', 'sage']}

    Raises:
        ConfigError: another form, or a key twice.
    """
    values_by_key: dict[str, list[Scalar]] = {}
    for text in texts or []:
        key, equals, values = text.partition("=")
        if not equals:
            raise ConfigError(
                f"expected --over KEY=VALUE,VALUE, got {text!r}",
                **mistake("option-value", "over", text),
            )
        key = key.strip().replace("-", "_")
        if key in values_by_key:
            raise ConfigError(
                f"expected --over {key} once, got it twice: give all values at once",
                **mistake("repeated-option", key),
            )
        values_by_key[key] = [
            parse_option(f"{key}={v}")[1] for v in split_list(values, f"--over {key}")
        ]
    return values_by_key


def parse_arms(texts: Sequence[str] | None) -> dict[str, dict[str, Scalar]]:
    """Return the settings of arms by name, of `NAME: KEY=VALUE KEY="A VALUE"`.

    >>> parse_arms(["FedGrAINS: method=fedavg neighbors=fedgrains neighbors.k=8"])
    {'FedGrAINS': {'method': 'fedavg', 'neighbors': 'fedgrains', 'neighbors.k': 8}}

    Raises:
        ConfigError: another form, or an arm or a key twice.
    """
    arms: dict[str, dict[str, Scalar]] = {}
    for text in texts or []:
        name, colon, settings_text = (part.strip() for part in text.partition(":"))
        first_key = name.partition("=")[0]
        if not colon or not name or first_key.replace("-", "_") in (*FIELDS, "dataset"):
            raise ConfigError(
                f"expected --arm 'NAME: KEY=VALUE KEY=VALUE', got {text!r}",
                **mistake("option-value", "arm", text),
            )
        if name in arms:
            raise ConfigError(
                f"expected --arm {name} once, got it twice: give another name",
                **mistake("repeated-option", name),
            )
        try:
            words = shlex.split(settings_text)
        except ValueError as error:  # such as a quotation without an end
            raise ConfigError(
                f"arm {name}: expected words as in a shell, got {settings_text!r} "
                f"({str(error)[:1].lower()}{str(error)[1:]})"
            ) from None
        settings: dict[str, Scalar] = {}
        for word in words:
            if "=" not in word:
                raise ConfigError(f"arm {name}: expected KEY=VALUE, got {word!r}")
            key, value = parse_option(word)
            if key in settings:
                raise ConfigError(f"arm {name}: expected {key} once, got it twice")
            is_text = key in TYPES and plain_type(TYPES[key]) is str
            settings[key] = word.partition("=")[2] if is_text else value
        arms[name] = settings
    return arms


def split_datasets(name: str) -> list[str]:
    """Return the datasets of a list such as `cora,pubmed`; one that is there is no list.

    Raises:
        ConfigError: an empty entry.
    """
    if "," not in name or Path(name).exists():
        return [name]
    return split_list(name, "DATASET")


@dataclass(frozen=True, kw_only=True)
class ComparisonFlags:
    """Flags of a comparison besides those of its runs."""

    methods: Annotated[
        str | None,
        flag(
            "--methods",
            "methods, separated by commas (default: local,fedavg,fedopt; with arms none)",
        ),
    ] = None
    arm: Annotated[
        list[str] | None,
        flag("--arm", "settings under a name: 'NAME: method=fedavg hidden=64' (repeatable)"),
    ] = None
    arms: Annotated[
        Path | None, flag("--arms", "TOML file with a table arms.NAME for each arm")
    ] = None
    seeds: Annotated[str, flag("--seeds", "how many seeds, or which: 0,1,2")] = "3"
    over: Annotated[
        list[str] | None,
        flag("--over", "vary a key or an option: clients=10,100 (repeatable)"),
    ] = None
    method_options: Annotated[
        list[str] | None,
        flag("--options", "an option: METHOD.NAME=VALUE, or PART.NAME=VALUE for all (repeatable)"),
    ] = None
    baseline: Annotated[str | None, flag("--baseline", "test against it (default: the best)")] = (
        None
    )
    view: Annotated[
        str,
        flag(
            "--view", "of the test: server, uncut, personalized or own (one that all methods have)"
        ),
    ] = "own"
    test: Annotated[
        str,
        flag(
            "--test",
            "paired test: t, resampled (corrected for splits that overlap) or wilcoxon; auto: "
            "resampled where every seed splits the graph anew, else t",
        ),
    ] = "auto"
    processes: Processes = None
    json: JsonStudy = False
    quiet: Quiet = False


@command(
    "compare",
    [name for name in FIELDS if name not in APART],
    "name of a dataset, or a path to its file, or several: cora,citeseer (default: digits)",
    examples=(
        "silograph compare cora --methods local,fedavg,fedopt --seeds 3",
        "silograph compare cora --methods fedavg --over neighbors=full,fanout --seeds 5",
        "silograph compare cora,citeseer,pubmed --arms arms.toml --out table2",
    ),
)
def compare_command(inputs: CommandInputs, flags: ComparisonFlags) -> int:
    """Run methods, or named arms, on the same cuts, splits and first weights, and compare them."""
    from silograph.experiment.resolve.user_code import check_trusted, own_code
    from silograph.experiment.run.progress import best_mode
    from silograph.experiment.run.result_folder import default_folder
    from silograph.study.arms import checked_arms, code_of_arms, read_arms
    from silograph.study.compare import compare

    arms = {} if flags.arms is None else read_arms(flags.arms)
    if not inputs.trust:
        code = code_of_arms(checked_arms(arms), inputs.config)
        check_trusted(code, trust=False, origin=flags.arms or "")
    for name, settings in parse_arms(flags.arm).items():
        if name in arms:
            raise ConfigError(
                f"expected arm {name} once, got it in {flags.arms} and by --arm",
                **mistake("repeated-option", name),
            )
        arms[name] = settings
    default_methods = [] if arms else ["local", "fedavg", "fedopt"]
    method_names = (
        default_methods if flags.methods is None else split_list(flags.methods, "--methods")
    )
    given_seeds, varied = parse_seeds(flags.seeds), parse_varied_values(flags.over)
    options = parse_method_options(flags.method_options)
    datasets = split_datasets(inputs.config.dataset)
    config = replace(inputs.config, dataset=datasets[0])
    code = own_code(config) | code_of_arms(
        checked_arms(arms) | {name: {"method": name} for name in method_names}, config
    )
    folder_config = replace(config, dataset="-".join(datasets)) if len(datasets) > 1 else config
    out = config.out or default_folder(folder_config, "compare")
    with resume_hint(out, trust=bool(code)):
        comparison = compare(
            datasets if len(datasets) > 1 else None,
            config=inputs.file,
            methods=method_names,
            arms=arms,
            seeds=given_seeds,
            over=varied,
            options=options,
            baseline=flags.baseline,
            view=flags.view,
            processes=flags.processes,
            progress="none" if flags.quiet else best_mode(),
            **{**inputs.flags, "dataset": datasets[0], "out": out, "test": flags.test},
        )
    return print_comparison(comparison, flags.json)


def print_comparison(comparison: "Comparison", json: bool) -> int:
    """Print a comparison; return the exit code."""
    if json:
        typer.echo(comparison.to_json())
    else:
        typer.echo(comparison.summary(shutil.get_terminal_size().columns))
        figures = ", figures/" if Path(f"{comparison.folder}/figures").is_dir() else ""
        typer.echo(f"compare.md, .tex, .csv{figures}")
        typer.echo(f"written to {comparison.folder}")
    return FAILED if comparison.failed else 0


def parse_ranges(texts: Sequence[str] | None) -> dict[str, str]:
    """Return the ranges of `KEY=RANGE`, by key, as text.

    >>> parse_ranges(["lr=0.001:0.3:log"])
    {'lr': '0.001:0.3:log'}

    Raises:
        ConfigError: another form, or a key twice.
    """
    range_by_key: dict[str, str] = {}
    for text in texts or []:
        key, equals, values = text.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or key in range_by_key:
            raise ConfigError(
                f"expected --range KEY=LOW:HIGH, each key once, got {text!r}",
                **mistake("option-value", "range", text),
            )
        range_by_key[key] = values
    return range_by_key


@dataclass(frozen=True, kw_only=True)
class SearchFlags:
    """Flags of a search besides those of its runs."""

    trials: Annotated[int, flag("--trials", "settings to try")] = 30
    max_minutes: Annotated[float, flag("--max-minutes", "try no more settings then")] = math.inf
    seeds: Annotated[str, flag("--seeds", "how many seeds a setting runs with, or which")] = "1"
    keys: Annotated[str | None, flag("--keys", "keys to tune: lr,dropout (default: see docs)")] = (
        None
    )
    ranges: Annotated[
        list[str] | None,
        flag("--range", "KEY=LOW:HIGH, KEY=LOW:HIGH:log or KEY=A,B (repeatable)"),
    ] = None
    view: Annotated[
        str, flag("--view", "that is searched by: server, uncut, personalized or own")
    ] = "own"
    search_seed: Annotated[int, flag("--search-seed", "another one tries other settings")] = 0
    processes: Processes = None
    json: JsonStudy = False
    quiet: Quiet = False


@command("tune", [name for name in FIELDS if name != "seed"])
def tune_command(inputs: CommandInputs, flags: SearchFlags) -> int:
    """Search settings of a method by validation scores alone; score the winner on test nodes."""
    from silograph.experiment.resolve.parts import find_method
    from silograph.experiment.resolve.user_code import own_code
    from silograph.experiment.run.progress import best_mode
    from silograph.experiment.run.result_folder import default_folder
    from silograph.study.tune import tune

    tuned_keys = None
    if flags.keys is not None:
        tuned_keys = [key.replace("-", "_") for key in split_list(flags.keys, "--keys")]
    config = inputs.config
    given_seeds, given_ranges = parse_seeds(flags.seeds), parse_ranges(flags.ranges)
    out = config.out or default_folder(config, f"tune-{find_method(config).name}")
    with resume_hint(out, trust=bool(own_code(config))):
        outcome = tune(
            config=inputs.file,
            seeds=given_seeds,
            keys=tuned_keys,
            ranges=given_ranges,
            trials=flags.trials,
            max_minutes=flags.max_minutes,
            view=flags.view,
            search_seed=flags.search_seed,
            processes=flags.processes,
            progress="none" if flags.quiet else best_mode(),
            **{**inputs.flags, "out": out},
        )
    return print_search(outcome, flags.json)


def print_search(outcome: "Tuned", json: bool) -> int:
    """Print a search; return the exit code."""
    if json:
        typer.echo(outcome.to_json())
    else:
        typer.echo(outcome.summary(shutil.get_terminal_size().columns))
        typer.echo(f"written to {outcome.folder}")
        if outcome.best is not None:
            best = shlex.quote(f"{outcome.folder}/best.toml")
            typer.echo(f"run the winner: silograph run --config {best}")
    return FAILED if outcome.best is None else 0


# --- `silograph train-agent`: episodes of an agent, one run after the other ----------------------


@command("train-agent", [name for name in FIELDS if name not in ("checkpoint_every", "tracker")])
def train_agent_command(
    inputs: CommandInputs,
    episodes: Annotated[int, flag("--episodes", "runs, those that are over included")] = 100,
    seeds: Annotated[
        int, flag("--seeds", "partitions, splits and first weights that episodes take turns in")
    ] = 5,
    quiet: Quiet = False,
) -> None:
    """Train an agent that sets a method's knobs, over runs with seeds of their own."""
    from silograph.control.ddpg import PROFILE
    from silograph.study.train_agent import AgentTraining, missing_rounds, train_agent

    config = inputs.config
    if config.out is None:
        raise ConfigError(
            "expected a folder for the agent, got none: give --out FOLDER",
            **mistake("missing-option", "out"),
        )
    if episodes < 1 or seeds < 1:
        raise ConfigError(f"expected 1 or more episodes and seeds, got {episodes} and {seeds}")
    out = Path(config.out)
    with hint_to_continue(f"the same command, which goes on in {shlex.quote(config.out)}"):
        path = train_agent(
            AgentTraining(config, episodes, seeds),
            out,
            report=(lambda _: None) if quiet else _print_episode,
        )
    missing = missing_rounds(out)
    if missing:
        typer.echo(
            f"written to {path}: nothing was learned yet, for the first {PROFILE} rounds of an "
            f"agent are its profile: {count_of(missing, 'more round')} at least: raise --episodes"
        )
    else:
        typer.echo(f"written to {path}: use it with --option agent={path} --option explore=false")


def _print_episode(line: dict[str, Any]) -> None:
    episode_return = line["return"]
    return_text = "profile" if episode_return is None else f"return {episode_return:.3f}"
    score = line["best_validation"]
    validation = "-" if score is None else f"{score:.3f}"
    typer.echo(f"episode {line['episode']}: {return_text}, validation {validation}", err=True)


# --- `silograph reproduce`: recipes, listed and made ---------------------------------------------


RECIPES = Path("benchmarks")


def parse_only(texts: Sequence[str], datasets: str | None) -> dict[str, list[str]]:
    """Return the values that cells may have, by key, of `KEY=V1,V2`.

    A value with a comma stands in double quotes, as in CSV.

    >>> parse_only(["clients=10,100"], "cora")
    {'clients': ['10', '100'], 'dataset': ['cora']}
    >>> parse_only(['row="FedGNN, noise 0.002",FeSoG'], None)
    {'row': ['FedGNN, noise 0.002', 'FeSoG']}

    Raises:
        ConfigError: another form, or a key twice.
    """
    all_texts = [*texts, *([f"dataset={datasets}"] if datasets is not None else [])]
    values_by_key: dict[str, list[str]] = {}
    for text in all_texts:
        key, equals, values = text.partition("=")
        if not equals or key in values_by_key:
            raise ConfigError(
                f"expected --only KEY=VALUE,VALUE, each key once, got {text!r}",
                **mistake("option-value", "only", text),
            )
        values_by_key[key] = _parse_csv_line(values, f"--only {key}")
    return values_by_key


def _parse_csv_line(text: str, what: str) -> list[str]:
    """Return the values of a line of CSV.

    Raises:
        ConfigError: one of them is empty, or quotes that do not end where a value does.
    """
    try:
        row = next(csv.reader([text], skipinitialspace=True, strict=True), [])
    except csv.Error:
        row = []
    values = [value.strip() for value in row]
    if not values or not all(values):
        raise ConfigError(
            f'expected {what} as a list like a,b or "a, b",c, got {text!r}',
            **mistake("option-value", what.removeprefix("--"), text),
        )
    return values


def _format_csv_line(values: Sequence[str]) -> str:
    """Return the line of CSV that `_parse_csv_line` reads."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(values)
    return line.getvalue()


@app.command("reproduce")
def reproduce_command(
    recipe: Annotated[
        str | None,
        typer.Argument(help="name of a recipe, or FILE.py:NAME (default: list the recipes)"),
    ] = None,
    datasets: Annotated[
        str | None, flag("--datasets", "run only cells of these: cora,pubmed")
    ] = None,
    only: Annotated[
        list[str] | None,
        flag("--only", 'run only cells with KEY=VALUE,"A, B" (repeatable)'),
    ] = None,
    recipes: Annotated[Path, flag("--recipes", "folder of recipes by name")] = RECIPES,
    out: Annotated[Path, flag("--out", "folder of pages and lines")] = RECIPES,
    data_dir: Annotated[
        str | None, flag("--data-dir", "folder in which datasets are looked for first")
    ] = None,
    processes: Annotated[
        int | None,
        flag("--processes", "runs at the same time (default: cores / threads)"),
    ] = None,
    max_minutes: Annotated[
        float,
        flag("--max-minutes", "start no more cells then; 0 only writes the page"),
    ] = math.inf,
    quiet: Quiet = False,
    trust: Annotated[
        bool, flag("--trust", "run the code of recipes that are named, not given")
    ] = False,
) -> int:
    """Run what a recipe lacks and write its page, ours beside the paper's."""
    from silograph.experiment.run.progress import best_mode
    from silograph.study.reproduce import find_recipe, reproduce

    if recipe is None:
        list_recipes(recipes, out, trust=trust)
        return 0
    only_values = parse_only(only or [], datasets)
    extra_flags = {"--data-dir": data_dir, "--processes": processes}
    with hint_to_continue(
        _resume_command_line(recipe, recipes, out, only_values, extra_flags) + " --trust" * trust
    ):
        outcome = reproduce(
            find_recipe(recipe, recipes, trust=trust),
            name=recipe,
            out=out,
            data_dir=data_dir,
            only=only_values,
            processes=processes,
            max_minutes=max_minutes,
            progress="none" if quiet else best_mode(),
        )
    if outcome.copied:
        typer.echo(
            f"copied {count_of(outcome.copied, 'cell')} that recipes beside this one have run"
        )
    typer.echo(
        f"ran {count_of(outcome.ran, 'cell')}, {outcome.failed} without result, {outcome.missing} "
        "not yet run"
    )
    typer.echo(f"written to {outcome.page}")
    return FAILED if outcome.failed else 0


def _resume_command_line(
    recipe: str,
    recipes: Path,
    out: Path,
    only_values: Mapping[str, Sequence[str]],
    extra_flags: Mapping[str, str | int | None],
) -> str:
    """Return the command that continues an interrupted recipe."""
    arguments = ["reproduce", recipe, "--out", str(out)]
    arguments += ["--recipes", str(recipes)] if recipes != RECIPES else []
    arguments += [f"--only={key}={_format_csv_line(values)}" for key, values in only_values.items()]
    for name, value in extra_flags.items():
        arguments += [] if value is None else [name, str(value)]
    return f"silograph {shlex.join(arguments)}"


def list_recipes(folder: Path, out: Path, *, trust: bool) -> None:
    """Print the recipes of a folder; where their code may be run, also how far their files are."""
    from silograph.cli.printing import print_table
    from silograph.study.reproduce import find_recipe, listing, own_recipes, recipes_in

    names = recipes_in(folder)
    if not trust and not own_recipes(folder):
        print_table(["recipe", "file"], [[n, spec.rpartition(":")[0]] for n, spec in names.items()])
        typer.echo("with --trust, which runs these files: what they are, and how far")
        return
    rows = listing(out, [find_recipe(name, folder, trust=True) for name in names])
    print_table(["recipe", "cells", "what it is"], rows)
