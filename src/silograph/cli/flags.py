"""The application, and commands whose flags are the fields of `RunConfig`."""

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import BeforeValidator

from silograph.core.config import RunConfig, changed_values, make_config, not_said_again
from silograph.core.run_file import parse_option, read_toml
from silograph.experiment.resolve.flat_options import HELP

FIELDS = tuple(f.name for f in dataclasses.fields(RunConfig) if f.name != "dataset")
# What says which graph there is, and how it is cut.
CUT_FIELDS = (
    "data_dir",
    "scale",
    "largest_component",
    "split",
    "partition",
    "clients",
    "alpha",
    "favored_classes",
    "favor",
    "clients_per_part",
    "part_share",
    "share_mean",
    "share_variance",
    "drop_edges",
    "seed",
    "partition_seed",
    "split_seed",
)
app = typer.Typer(
    help="Graph neural networks over graphs that live in separate silos.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _plain_type(annotation: Any) -> type:
    """Return the type that a flag is read as: Optional, Annotated and Literal taken off.

    Text where the config has its own way to read a value.
    """
    if get_origin(annotation) is Annotated:
        if any(isinstance(part, BeforeValidator) for part in get_args(annotation)):
            return str
        return _plain_type(get_args(annotation)[0])
    if isinstance(annotation, type):
        return annotation
    inner = [a for a in get_args(annotation) if a is not type(None)]
    return type(inner[0]) if isinstance(inner[0], str) else _plain_type(inner[0])


def _flag(field: "dataclasses.Field[Any]") -> inspect.Parameter:
    """Return the command-line parameter of a config field."""
    name = "--" + field.name.replace("_", "-")
    help_text = HELP[field.name]
    kind: Any = _plain_type(field.type)
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
    """

    config: RunConfig
    file: RunConfig
    flags: Mapping[str, Any]


def command(
    name: str, fields: Collection[str], extra: Mapping[str, tuple[Any, Any]]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a command that takes DATASET, `--config`, the flags of `fields`, and `extra`.

    The wrapped function gets `Given` and the extras.

    Args:
        name: of the command.
        fields: of `RunConfig`.
        extra: type and typer's declaration of what is no field, by name.
    """
    chosen = [f for f in dataclasses.fields(RunConfig) if f.name in fields]

    def register(body: Callable[..., Any]) -> Callable[..., Any]:
        def called(**given: Any) -> Any:
            own = {key: given.pop(key) for key in extra}
            file = given.pop("config")
            flags = {key: value for key, value in given.items() if value is not None}
            # Runs that differ from the file's, as all of a study do, choose their own defaults.
            anew = "seed" not in fields or not flags.keys() <= {"out", "tracker"}
            values = read_toml(file, anew=anew) if file is not None else {}
            base = make_config(values, source=str(file))
            texts = flags.pop("options", None)
            merged = changed_values(base, flags)
            if texts is not None:
                said = dict(parse_option(text) for text in texts)
                flags["options"] = not_said_again(merged["options"], said) | said
            return body(Given(make_config(merged | flags), base, flags), **own)

        parameters = [
            inspect.Parameter(
                "dataset",
                inspect.Parameter.KEYWORD_ONLY,
                default=typer.Argument(
                    None, help="name of a dataset, or a path to its file (default: digits)"
                ),
                annotation=str | None,
            ),
            inspect.Parameter(
                "config",
                inspect.Parameter.KEYWORD_ONLY,
                default=typer.Option(None, "--config", help="run file (TOML); flags go over it"),
                annotation=Path | None,
            ),
            *(_flag(f) for f in chosen),
            *(
                inspect.Parameter(
                    key, inspect.Parameter.KEYWORD_ONLY, default=declared, annotation=kind
                )
                for key, (kind, declared) in extra.items()
            ),
        ]
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {p.name: p.annotation for p in parameters}
        called.__doc__ = body.__doc__
        app.command(name)(called)
        return body

    return register
