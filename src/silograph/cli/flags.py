"""The application, and commands whose flags are the fields of `RunConfig`."""

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from pydantic import BeforeValidator
from typer.core import TyperArgument, TyperGroup
from typer.utils import get_params_from_function

from silograph.core.config import RunConfig, make_config
from silograph.core.config_changes import changed_values, not_said_again
from silograph.core.run_file import parse_options, read_toml
from silograph.experiment.resolve.flat_options import HELP

FIELDS = tuple(f.name for f in dataclasses.fields(RunConfig) if f.name != "dataset")
# What says which graph there is, and how it is cut.
CUT_FIELDS = (
    "data_dir",
    "columns",
    "na_values",
    "scale",
    "rating_scale",
    "largest_component",
    "features",
    "split",
    "partition",
    "options",
    "clients",
    "alpha",
    "favored_classes",
    "favor",
    "clients_per_part",
    "part_share",
    "share_mean",
    "share_variance",
    "share_classes",
    "drop_edges",
    "seed",
    "partition_seed",
    "split_seed",
)
# The graph is at the silos, and is cut already: a server has no flags for that.
AT_SILOS = {*CUT_FIELDS, "local_bias"} - {"split", "options", "clients", "seed", "split_seed"}
Flags = TypeVar("Flags")


class CommandGroup(TyperGroup):
    """The commands of the application; their arguments have a help text with every click.

    click 8.5 clears the help that typer before 0.26 stores in an argument.
    """

    def __init__(self, **settings: Any) -> None:
        """Create the group and set the help of each argument from its declaration."""
        super().__init__(**settings)
        for each in self.commands.values():
            assert each.callback is not None  # typer gives each command one
            declarations = get_params_from_function(each.callback)
            for parameter in each.params:
                if isinstance(parameter, TyperArgument):
                    assert parameter.name is not None  # typer names all
                    parameter.help = declarations[parameter.name].default.help


app = typer.Typer(
    cls=CommandGroup,
    help="Graph neural networks over graphs that live in separate silos.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def plain_type(annotation: Any) -> type:
    """Return the type that a flag is read as: Optional, Annotated and Literal taken off.

    Text where the config has its own way to read a value.
    """
    if get_origin(annotation) is Annotated:
        if any(isinstance(part, BeforeValidator) for part in get_args(annotation)):
            return str
        return plain_type(get_args(annotation)[0])
    if isinstance(annotation, type):
        return annotation
    inner = [a for a in get_args(annotation) if a is not type(None)]
    return type(inner[0]) if isinstance(inner[0], str) else plain_type(inner[0])


def _flag(field: "dataclasses.Field[Any]") -> inspect.Parameter:
    """Return the command-line parameter of a config field."""
    name = "--" + field.name.replace("_", "-")
    help_text = HELP[field.name]
    kind: Any = plain_type(field.type)
    if get_origin(field.type) is Literal:
        help_text += f": {' or '.join(get_args(field.type))}"
    if field.name == "options":
        kind, name = list[str], "--option"
    elif field.default is not None:
        help_text += f" (default: {str(field.default).lower()})"
    off = field.metadata["off"] or f"--no-{name[2:]}"
    names = [f"{name}/{off}"] if kind is bool else [name]
    declared = typer.Option(
        None, *names, help=help_text, show_default=False, rich_help_panel=field.metadata["group"]
    )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=declared,
        annotation=kind | None,
    )


@dataclasses.dataclass(frozen=True)
class Given:
    """What a command was given of a run.

    Attributes:
        config: the run file, flags over it.
        file: the run file alone.
        flags: fields that have a flag, with its value; options of the method are those of the file
            with the flags' over them.
        trust: whether code may be run that a file or folder names.
    """

    config: RunConfig
    file: RunConfig
    flags: Mapping[str, Any]
    trust: bool = False


def declared_flags(flags: type) -> dict[str, tuple[Any, Any]]:
    """Return type and default of each field of a dataclass whose fields are annotated for typer."""
    required = inspect.Parameter.empty
    return {
        f.name: (f.type, required if f.default is dataclasses.MISSING else f.default)
        for f in dataclasses.fields(flags)
    }


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _register(
    name: str,
    called: Callable[..., Any],
    body: Callable[..., Any],
    parameters: Sequence[inspect.Parameter],
) -> None:
    """Register a function as a command, with the parameters and the help that it is to have."""
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {p.name: p.annotation for p in parameters}
    called.__doc__ = body.__doc__
    app.command(name)(called)


def flags_command(
    name: str, flags: type[Flags]
) -> Callable[[Callable[[Flags], Any]], Callable[[Flags], Any]]:
    """Register a command that takes the flags of a dataclass, as one value."""

    def register(body: Callable[[Flags], Any]) -> Callable[[Flags], Any]:
        def called(**given: Any) -> Any:
            return body(flags(**given))

        parameters = [_parameter(key, *found) for key, found in declared_flags(flags).items()]
        _register(name, called, body, parameters)
        return body

    return register


def command(
    name: str,
    fields: Collection[str],
    extra: Mapping[str, tuple[Any, Any]],
    dataset_help: str = "name of a dataset, or a path to its file (default: digits)",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a command that takes DATASET, `--config`, the flags of `fields`, and `extra`.

    The wrapped function gets `Given` and the extras.

    Args:
        name: of the command.
        fields: of `RunConfig`.
        extra: type and typer's declaration (or default) of what is no field, by name.
        dataset_help: what DATASET is.
    """
    dataset = typer.Argument(None, help=dataset_help)
    config = typer.Option(None, "--config", help="run file (TOML); flags go over it")
    trust = typer.Option(False, "--trust", help="run code of yours that a run file or folder names")
    parameters = [
        _parameter("dataset", str | None, dataset),
        _parameter("config", Path | None, config),
        _parameter("trust", bool, trust),
        *(_flag(f) for f in dataclasses.fields(RunConfig) if f.name in fields),
        *(_parameter(key, *found) for key, found in extra.items()),
    ]

    def register(body: Callable[..., Any]) -> Callable[..., Any]:
        def called(**given: Any) -> Any:
            own = {key: given.pop(key) for key in extra}
            return body(_given(given, fields), **own)

        _register(name, called, body, parameters)
        return body

    return register


def _given(values: Mapping[str, Any], fields: Collection[str]) -> Given:
    """Return what a command was given, of the values of DATASET, `--config` and flags."""
    flags = {key: value for key, value in values.items() if value is not None}
    file, trust = flags.pop("config", None), flags.pop("trust")
    # Runs that differ from the file's, as all of a study do, choose their own defaults.
    anew = "seed" not in fields or not flags.keys() <= {"out", "tracker"}
    base = make_config({} if file is None else read_toml(file, anew=anew), source=str(file))
    if file is not None and not trust:
        _check_file(file, base, flags)
    texts = flags.pop("options", None)
    merged = changed_values(base, flags)
    if texts is not None:
        said = parse_options(texts)
        flags["options"] = not_said_again(merged["options"], said) | said
    return Given(make_config(merged | flags), base, flags, trust)


def _check_file(file: Path, config: RunConfig, flags: Mapping[str, Any]) -> None:
    """Raise `ConfigError` where a run file names code that no flag replaces."""
    from silograph.experiment.resolve.parts import own_code
    from silograph.experiment.resolve.trusted_code import check_trusted

    named = {kind: spec for kind, spec in own_code(config).items() if kind not in flags}
    check_trusted(named, trust=False, where=file)
