"""Commands that run many cells: `compare` and `tune`."""

import math
import shlex
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from silograph.cli.flags import FIELDS, Given, command
from silograph.cli.hints import resume_hint
from silograph.core.errors import ConfigError
from silograph.core.ranges import Scalar
from silograph.core.run_file import parse_option

if TYPE_CHECKING:
    from silograph.study.compare.comparison import Comparison
    from silograph.study.tune.outcome import Tuned

FAILED = 1  # exit code where a cell failed
APART = ("method", "options", "seed")  # flags that a comparison has of its own
PROCESSES = (
    int | None,
    typer.Option(
        None,
        "--processes",
        help="runs at the same time (default: cores / threads; 0: in this process)",
        show_default=False,
    ),
)
QUIET = (bool, typer.Option(False, "--quiet", help="show no progress"))


def words(text: str, what: str) -> list[str]:
    """Return the entries of a comma-separated list.

    Raises:
        ConfigError: one of them is empty.
    """
    found = [word.strip() for word in text.split(",")]
    if not all(found):
        raise ConfigError(f"expected {what} as a list like a,b, got {text!r}")
    return found


def seeds_of(text: str) -> int | list[int]:
    """Return a number of seeds, or the seeds of a list.

    >>> seeds_of("3"), seeds_of("0,4")
    (3, [0, 4])

    Raises:
        ConfigError: no numbers.
    """
    found = words(text, "--seeds")
    if not all(word.isdecimal() for word in found):
        raise ConfigError(f"expected --seeds as a number or a list like 0,1,2, got {text!r}")
    return int(text) if len(found) == 1 else [int(word) for word in found]


def options_of(texts: Sequence[str] | None) -> dict[str, dict[str, Scalar]]:
    """Return options by method, or part, of `METHOD.NAME=VALUE`.

    >>> options_of(["fedopt.server_lr=0.1"])
    {'fedopt': {'server_lr': 0.1}}
    >>> options_of(["own/mine.py:METHOD.trim=0.2"])
    {'own/mine.py:METHOD': {'trim': 0.2}}

    Raises:
        ConfigError: another form, or an option twice.
    """
    found: dict[str, dict[str, Scalar]] = {}
    for text in texts or []:
        named = text.partition("=")[0]
        dot = named.find(".", named.rfind(":") + 1)  # a file has dots of its own, before the colon
        method, rest = text[:dot], text[dot + 1 :]
        if dot < 0 or "=" not in rest:
            raise ConfigError(
                "expected --options METHOD.NAME=VALUE, or PART.NAME=VALUE for all methods, such as "
                f"partition.column=shop, got {text!r}"
            )
        name, value = parse_option(rest)
        own = found.setdefault(method.strip(), {})
        if name in own:
            raise ConfigError(
                f"expected --options {method.strip()}.{name} once, got it twice: leave one of them "
                "out"
            )
        own[name] = value
    return found


def over_of(texts: Sequence[str] | None) -> dict[str, list[Scalar]]:
    """Return the values of `KEY=V1,V2`, by key.

    >>> over_of(["clients=10,100", "model=gcn,sage"])
    {'clients': [10, 100], 'model': ['gcn', 'sage']}

    Raises:
        ConfigError: another form, or a key twice.
    """
    found: dict[str, list[Scalar]] = {}
    for text in texts or []:
        key, equals, values = text.partition("=")
        if not equals:
            raise ConfigError(f"expected --over KEY=VALUE,VALUE, got {text!r}")
        key = key.strip().replace("-", "_")
        if key in found:
            raise ConfigError(f"expected --over {key} once, got it twice: give all values at once")
        found[key] = [parse_option(f"{key}={v}")[1] for v in words(values, f"--over {key}")]
    return found


def _option(kind: Any, name: str, help: str, default: Any = None) -> tuple[Any, Any]:
    shown = default is not None
    return kind, typer.Option(default, name, help=help, show_default=shown)


@command(
    "compare",
    [name for name in FIELDS if name not in APART],
    {
        "methods": _option(str, "--methods", "methods, separated by commas", "local,fedavg,fedopt"),
        "seeds": _option(str, "--seeds", "how many seeds, or which: 0,1,2", "3"),
        "over": _option(
            list[str] | None, "--over", "vary a key or an option: clients=10,100 (repeatable)"
        ),
        "method_options": _option(
            list[str] | None,
            "--options",
            "an option: METHOD.NAME=VALUE, or PART.NAME=VALUE for all (repeatable)",
        ),
        "baseline": _option(str | None, "--baseline", "test against it (default: the best)"),
        "view": _option(
            str,
            "--view",
            "of the test: server, uncut, personalized or own (one that all methods have)",
            "own",
        ),
        "test": _option(
            str,
            "--test",
            "paired test: t, resampled (corrected for splits that overlap) or wilcoxon; auto: "
            "resampled where every seed splits the graph anew, else t",
            "auto",
        ),
        "processes": PROCESSES,
        "json": _option(bool, "--json", "print everything as one JSON object", False),
        "quiet": QUIET,
    },
)
def compare_command(
    given: Given,
    methods: str,
    seeds: str,
    over: list[str] | None,
    method_options: list[str] | None,
    json: bool,
    quiet: bool,
    **asked: Any,
) -> int:
    """Run methods on the same cuts, splits and initial weights, and compare them."""
    from silograph.experiment.resolve.parts import own_code
    from silograph.experiment.resolve.user_code import is_spec
    from silograph.experiment.run.new_folder import default_folder
    from silograph.experiment.run.progress import best_mode
    from silograph.study.compare.compare import compare

    chosen = words(methods, "--methods")
    given_seeds, varied, options = seeds_of(seeds), over_of(over), options_of(method_options)
    out = given.config.out or default_folder(given.config, "compare")
    with resume_hint(out, trust=bool(own_code(given.config)) or any(map(is_spec, chosen))):
        found = compare(
            config=given.file,
            methods=chosen,
            seeds=given_seeds,
            over=varied,
            options=options,
            progress="none" if quiet else best_mode(),
            **{**asked, **given.flags, "out": out},
        )
    return print_comparison(found, json)


def print_comparison(found: "Comparison", json: bool) -> int:
    """Print a comparison; return the exit code."""
    if json:
        typer.echo(found.to_json())
    else:
        typer.echo(found.summary(shutil.get_terminal_size().columns))
        typer.echo(f"written to {found.folder}")
    return FAILED if found.failed else 0


def ranges_of(texts: Sequence[str] | None) -> dict[str, str]:
    """Return the ranges of `KEY=RANGE`, by key, as text.

    >>> ranges_of(["lr=0.001:0.3:log"])
    {'lr': '0.001:0.3:log'}

    Raises:
        ConfigError: another form, or a key twice.
    """
    found: dict[str, str] = {}
    for text in texts or []:
        key, equals, values = text.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or key in found:
            raise ConfigError(f"expected --range KEY=LOW:HIGH, each key once, got {text!r}")
        found[key] = values
    return found


@command(
    "tune",
    [name for name in FIELDS if name != "seed"],
    {
        "trials": _option(int, "--trials", "settings to try", 30),
        "max_minutes": _option(float, "--max-minutes", "try no more settings then", math.inf),
        "seeds": _option(str, "--seeds", "how many seeds a setting runs with, or which", "1"),
        "keys": _option(str | None, "--keys", "keys to tune: lr,dropout (default: see docs)"),
        "ranges": _option(
            list[str] | None, "--range", "KEY=LOW:HIGH, KEY=LOW:HIGH:log or KEY=A,B (repeatable)"
        ),
        "view": _option(
            str, "--view", "that is searched by: server, uncut, personalized or own", "own"
        ),
        "search_seed": _option(int, "--search-seed", "another one tries other settings", 0),
        "processes": PROCESSES,
        "json": _option(bool, "--json", "print everything as one JSON object", False),
        "quiet": QUIET,
    },
)
def tune_command(
    given: Given,
    seeds: str,
    keys: str | None,
    ranges: list[str] | None,
    json: bool,
    quiet: bool,
    **asked: Any,
) -> int:
    """Search settings of a method by validation scores alone; score the winner on test nodes."""
    from silograph.experiment.resolve.parts import find_method, own_code
    from silograph.experiment.run.new_folder import default_folder
    from silograph.experiment.run.progress import best_mode
    from silograph.study.tune.tune import tune

    chosen = None if keys is None else [k.replace("-", "_") for k in words(keys, "--keys")]
    given_seeds, given_ranges = seeds_of(seeds), ranges_of(ranges)
    config = given.config
    out = config.out or default_folder(config, f"tune-{find_method(config).name}")
    with resume_hint(out, trust=bool(own_code(config))):
        found = tune(
            config=given.file,
            seeds=given_seeds,
            keys=chosen,
            ranges=given_ranges,
            progress="none" if quiet else best_mode(),
            **{**asked, **given.flags, "out": out},
        )
    return print_search(found, json)


def print_search(found: "Tuned", json: bool) -> int:
    """Print a search; return the exit code."""
    if json:
        typer.echo(found.to_json())
    else:
        typer.echo(found.summary(shutil.get_terminal_size().columns))
        typer.echo(f"written to {found.folder}")
        if found.best is not None:
            best = shlex.quote(f"{found.folder}/best.toml")
            typer.echo(f"run the winner: silograph run --config {best}")
    return FAILED if found.best is None else 0
