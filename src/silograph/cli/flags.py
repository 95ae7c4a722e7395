"""The application, and commands whose flags are the fields of `RunConfig`."""

import dataclasses
import inspect
import logging
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import click
import typer
from pydantic import BeforeValidator
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.utils import get_params_from_function

from silograph.core.config import (
    ENGINE,
    RunConfig,
    changed_values,
    make_config,
    not_said_again,
)
from silograph.core.errors import SilographError
from silograph.core.run_file import parse_options, read_toml
from silograph.core.stop_signals import INTERRUPTED
from silograph.core.text import count_of
from silograph.experiment.resolve.flat_options import HELP
from silograph.experiment.result_files import CHECKPOINTS

FIELDS = tuple(f.name for f in dataclasses.fields(RunConfig) if f.name != "dataset")
# What says which graph there is, and how it is cut.
CUT_FIELDS = (
    *("data_dir", "columns", "na_values", "scale", "rating_scale"),
    *("repeated_edges", "directed", "largest_component"),
    *("features", "split", "partition", "options", "clients", "drop_edges"),
    *(f.name for f in dataclasses.fields(RunConfig) if f.metadata.get("part") == "partition"),
    *("seed", "partition_seed", "split_seed"),
)
# What shards are made of besides: they hold what clients train on.
SHARD_FIELDS = (*CUT_FIELDS, "normalize", "edge_weights", "dtype")
# The graph is at the silos, and is cut already: a server has no flags for that.
AT_SILOS = {*CUT_FIELDS, *ENGINE, "local_bias"} - {
    *("directed", "split", "options", "clients", "seed", "split_seed")
}


class CommandGroup(TyperGroup):
    """The commands of the application; their arguments have a help text with every click.

    click 8.5 clears the help that typer before 0.26 stores in an argument.
    """

    def __init__(self, **settings: Any) -> None:
        """Create the group and set the help of each argument from its declaration."""
        super().__init__(**settings)
        for registered in self.commands.values():
            assert registered.callback is not None  # typer gives each command one
            declarations = get_params_from_function(registered.callback)
            for parameter in registered.params:
                if isinstance(parameter, TyperArgument):
                    assert parameter.name is not None  # typer names all
                    parameter.help = declarations[parameter.name].default.help


# The options that most people need; `--help` shows these, `--help-all` all of them.
COMMON = (
    *("data_dir", "clients", "partition", "split", "method", "model"),
    *("options", "rounds", "lr", "participation", "seed", "out"),
)
SHOW_ALL = "silograph.help_all"


class ConfigCommand(TyperCommand):
    """A command with the flags of a config, of which its help shows the common ones."""

    def __init__(self, name: str | None, **settings: Any) -> None:
        """Add `--help-all`."""
        super().__init__(name, **settings)
        own = TyperOption(param_decls=["--help-all"], is_flag=True, is_eager=True)
        own.expose_value, own.callback = False, show_all_help
        own.help = "Show all options, in groups, and exit."
        self.params.append(own)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help; what it does not show is hidden meanwhile."""
        shows_all = ctx.meta.get(SHOW_ALL, False)
        rare = [p for p in self.params if p.name in FIELDS and p.name not in COMMON]
        hidden = [p for p in rare if isinstance(p, click.Option) and not shows_all]
        for option in hidden:
            option.hidden = True
        try:
            super().format_help(ctx, formatter)
        finally:
            for option in hidden:
                option.hidden = False


def show_all_help(ctx: click.Context, _: click.Parameter, is_requested: bool) -> None:
    """Print the help with all options, and end."""
    if is_requested and not ctx.resilient_parsing:
        ctx.meta[SHOW_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


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
    """Return the type that a flag is read as, without Optional, Annotated and Literal.

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
    return _parameter(field.name, kind | None, declared)


@dataclasses.dataclass(frozen=True)
class CommandInputs:
    """The config of a command, from its run file and flags.

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


Body = TypeVar("Body", bound=Callable[..., Any])


def flag(name: str, help: str, **settings: Any) -> Any:
    """Return the declaration of a flag; `settings` are those of `typer.Option`."""
    return typer.Option(name, help=help, **settings)


Json = Annotated[bool, flag("--json", "print the final result as one JSON object")]
Quiet = Annotated[bool, flag("--quiet", "show no progress")]


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _own_parameters(body: Callable[..., Any]) -> tuple[type | None, list[inspect.Parameter]]:
    """Return the parameters of a command's function besides `inputs`, and the dataclass of `flags`.

    The fields of that dataclass are parameters of the command.
    """
    own = {n: p for n, p in inspect.signature(body).parameters.items() if n != "inputs"}
    if "flags" not in own:
        return None, [_parameter(n, p.annotation, p.default) for n, p in own.items()]
    flags_type: type = own["flags"].annotation
    required = inspect.Parameter.empty
    return flags_type, [
        _parameter(f.name, f.type, required if f.default is dataclasses.MISSING else f.default)
        for f in dataclasses.fields(flags_type)
    ]


def command(
    name: str,
    fields: Collection[str] | None = None,
    dataset_help: str = "name of a dataset, or a path to its file (default: digits)",
    examples: Sequence[str] = (),
) -> Callable[[Body], Body]:
    """Register a function as a command.

    Its parameters are flags, annotated for typer; `flags` is a dataclass of such. With `fields` the
    command also takes DATASET, `--config`, `--trust` and the flags of these fields, which the
    function gets as `inputs`.

    Args:
        name: of the command.
        fields: of `RunConfig`; None: the command has no config.
        dataset_help: what DATASET is.
        examples: command lines that end its help.
    """
    dataset = typer.Argument(None, help=dataset_help)
    config = typer.Option(None, "--config", help="run file (TOML); flags go over it")
    trust = typer.Option(False, "--trust", help="run code of yours that a run file or folder names")
    of_config = [
        _parameter("dataset", str | None, dataset),
        _parameter("config", Path | None, config),
        _parameter("trust", bool, trust),
        *(_flag(f) for f in dataclasses.fields(RunConfig) if f.name in (fields or ())),
    ]

    def register(body: Body) -> Body:
        flags_type, own = _own_parameters(body)

        def run_body(**values: Any) -> Any:
            arguments = {parameter.name: values.pop(parameter.name) for parameter in own}
            if flags_type is not None:
                arguments = {"flags": flags_type(**arguments)}
            if fields is not None:
                arguments["inputs"] = _parse_inputs(values, fields)
            return body(**arguments)

        parameters = own if fields is None else [*of_config, *own]
        run_body.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run_body.__annotations__ = {p.name: p.annotation for p in parameters}
        run_body.__doc__ = body.__doc__
        epilog = "\n\n".join(("Examples:", *examples)) if examples else None
        kind = TyperCommand if fields is None else ConfigCommand
        app.command(name, cls=kind, epilog=epilog)(run_body)
        return body

    return register


def _parse_inputs(values: Mapping[str, Any], fields: Collection[str]) -> CommandInputs:
    """Merge the values of DATASET, `--config` and flags into the inputs of a command."""
    flags = {key: value for key, value in values.items() if value is not None}
    file, trust = flags.pop("config", None), flags.pop("trust")
    # Runs that differ from the file's, as all of a study do, choose their own defaults.
    choose_defaults = "seed" not in fields or not flags.keys() <= {"out", "tracker", *ENGINE}
    from silograph.experiment.resolve.parts import with_canonical_names  # torch takes a while

    file_values = {} if file is None else read_toml(file, anew=choose_defaults)
    base_config = make_config(with_canonical_names(file_values), source=str(file))
    flags = with_canonical_names(flags)
    if file is not None and not trust:
        _check_file(file, base_config, flags)
    texts = flags.pop("options", None)
    merged = changed_values(base_config, flags)
    if texts is not None:
        option_values = parse_options(texts)
        flags["options"] = not_said_again(merged["options"], option_values) | option_values
    return CommandInputs(make_config(merged | flags), base_config, flags, trust)


def _check_file(file: Path, config: RunConfig, flags: Mapping[str, Any]) -> None:
    """Raise `ConfigError` where a run file names code that no flag replaces."""
    from silograph.experiment.resolve.user_code import check_trusted, own_code

    named_code = {kind: spec for kind, spec in own_code(config).items() if kind not in flags}
    check_trusted(named_code, trust=False, origin=file)


# --- Names of settings as the command line spells them -------------------------------------------
#
# Messages are written for Python and run files: `local_epochs=2`. On the command line the same
# setting is `--local-epochs 2`.


SETTINGS = {
    f.name: f for f in dataclasses.fields(RunConfig) if f.name not in ("dataset", "options")
}
CHOICES = {n: get_args(f.type) for n, f in SETTINGS.items() if get_origin(f.type) is Literal}
OTHERS = (
    *("listen", "silos", "least", "metrics", "wait", "round_seconds", "rejoin_seconds"),
    *("max_update_norm", "log_level", "ca", "certs", "keys", "secret", "server"),
    *("seeds", "trials", "max_minutes", "search_seed"),
)
# A name stands alone: it is no part of a path, of a quotation or of a dotted or longer name.
BEFORE, AFTER = r"(?<![\w./'\"=-])(?<!--option )", r"(?![\w'\"/=-]|\.\w|\()"
NAMES = "|".join(sorted(SETTINGS, key=len, reverse=True))
LONG = "|".join(sorted((n for n in SETTINGS if "_" in n), key=len, reverse=True))
CHOSEN = "|".join(f"{n} (?:{'|'.join(map(re.escape, c))})" for n, c in CHOICES.items())
SETTING = re.compile(
    rf"{BEFORE}(?:(?P<set>{NAMES})=(?P<value>[^\s,;:()]*[^\s,;:().])|(?P<chosen>{CHOSEN}){AFTER}"
    rf"|(?P<name>(?:^(?:{NAMES})(?=: )|{LONG}|(?<=leave )(?:{NAMES})(?= out)"
    rf"|(?<=give )(?:{NAMES})(?= itself))){AFTER})"
)
# What was quoted, Python that is called, and names to choose from are not the message's own.
QUOTED = re.compile(r"""((?<!\w)'[^']*'(?!\w)|"[^"]*"|[\w.]+\([^()]*\)|[Cc]hoices: .*)""")
# Settings that begin a message without being a run's: those of servers, silos and studies.
HEAD = re.compile(rf"(?P<name>{'|'.join(OTHERS)})(?=: )|option (?P<option>\w[\w.]*)(?=: )")
# A message about a part's own option: settings in it belong to other parts.
OF_PART = re.compile(r"(?P<name>[a-z]\w*): (?P<said>.* \(options of (?P<part>[^()]+)\))")
LOG = logging.getLogger("silograph")


def spell_as_flags(text: str) -> str:
    """Return a message with settings spelled as flags.

    Words that are settings, too, stay where they may be only words ("2 clients"). So does a
    message about a run file.

    >>> spell_as_flags("expected local_epochs=1 and no batch_size: add edge_weights=ignore")
    'expected --local-epochs 1 and no --batch-size: add --edge-weights ignore'
    >>> spell_as_flags("alpha: input is 0 (options of dirichlet)")
    '--alpha: input is 0 (options of dirichlet)'
    """
    if ".toml" in text:
        return text
    if own := OF_PART.fullmatch(text):
        return f"{_option_flag(own['name'], own['part'])}: {own['said']}"
    if head := HEAD.match(text):
        flag = f"--option {head['option']}" if head["option"] else _flag_name(head["name"])
        return flag + spell_as_flags(text[head.end() :])
    pieces = QUOTED.split(text)
    pieces[::2] = [SETTING.sub(_flag_spelling, piece) for piece in pieces[::2]]
    return "".join(pieces)


def _option_flag(name: str, part: str) -> str:
    """Return the flag of a part's option: its own flag, or --option NAME."""
    from silograph.experiment.resolve.parts import FLAT, TABLES

    has_flag = name in FLAT and part in TABLES[FLAT[name]]
    return _flag_name(name) if has_flag else f"--option {name}"


def _flag_name(name: str) -> str:
    """Return the flag of a setting."""
    return f"--{name.replace('_', '-')}"


def _flag_spelling(match: "re.Match[str]") -> str:
    name, value = match["set"] or match["name"] or "", match["value"]
    if match["chosen"]:
        name, value = match["chosen"].split(" ")
    field = SETTINGS[name]
    if value is not None and value not in CHOICES.get(name, (value,)):
        return f"--option {name}={value}"  # a part has an option of the same name
    flag = _flag_name(name)
    if plain_type(field.type) is bool and value is not None:
        off = field.metadata["off"] or f"--no-{flag[2:]}"
        return {"true": flag, "false": off}.get(value.lower(), f"{flag} {value}")
    return flag if value is None else f"{flag} {value}"


class _AsFlags(logging.Filter):
    """Spells settings of whole lines as flags; values that lines are made of stay."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.args and isinstance(record.msg, str):
            record.msg = spell_as_flags(record.msg)
        return True


@contextmanager
def logging_with_flags() -> Iterator[None]:
    """Spell settings as flags in what is logged meanwhile."""
    spelling = _AsFlags()
    LOG.addFilter(spelling)
    try:
        yield
    finally:
        LOG.removeFilter(spelling)


# --- Messages of a command that is stopped, or that gets an option of a method as a flag ---------


EXTRA = "Got unexpected extra argument"  # click's words
MISTAKE = 2  # exit code


class StoppedError(Exception):
    """A command was stopped that can go on.

    Attributes:
        lines: why it stopped, and last how to go on.
        code: exit code.
    """

    def __init__(self, reason: str, continue_command: str, code: int) -> None:
        """Say why, and how to go on."""
        super().__init__(reason)
        self.lines = (reason, f"to go on: {continue_command}")
        self.code = code


@contextmanager
def hint_to_continue(
    continue_command: str,
    folder: str | None = None,
    *,
    also: tuple[type[SilographError], ...] = (),
    before: str | None = None,
) -> Iterator[None]:
    """On Ctrl-C, a full disk or missing silos, print the command that continues.

    Args:
        continue_command: the command.
        folder: what must be there for it; None for nothing.
        also: other errors after which it goes on.
        before: the command after Ctrl-C, or when silos are missing, while the folder is not there
            yet; None: no hint.

    Raises:
        StoppedError: it was stopped.
    """
    try:
        yield
    except BrokenPipeError:  # nobody reads what is printed
        raise
    except (KeyboardInterrupt, OSError, SilographError) as error:
        are_silos_missing = isinstance(error, SilographError) and error.code == "too-few-silos"
        is_of_system = not isinstance(error, SilographError)  # or Ctrl-C
        if not (is_of_system or are_silos_missing or isinstance(error, also)):
            raise
        if folder is not None and not Path(folder).is_dir():
            if before is None or not (are_silos_missing or isinstance(error, KeyboardInterrupt)):
                raise
            continue_command = before
        if isinstance(error, KeyboardInterrupt):
            raise StoppedError("interrupted", continue_command, INTERRUPTED) from None
        raise StoppedError(
            f"error: {spell_as_flags(str(error))}", continue_command, MISTAKE
        ) from error


@contextmanager
def resume_hint(folder: str, *, trust: bool, run: bool = False) -> Iterator[None]:
    """On Ctrl-C or a full disk, say how the run or study of a folder goes on.

    Args:
        folder: of the run or study.
        trust: whether it has code of the user's.
        run: whether it is of a run, which goes on from a checkpoint.
    """
    continue_command = f"silograph resume {shlex.quote(folder)}{' --trust' * trust}"
    try:
        with hint_to_continue(continue_command, folder):
            yield
    except StoppedError as stopped:
        if run and not any(Path(folder, CHECKPOINTS).glob("round-*.checkpoint")):
            first = (
                f"to go on from the first round, for no checkpoint was written: {continue_command}"
            )
            stopped.lines = (stopped.lines[0], first)
        raise


def usage_error(error: click.ClickException) -> str:
    """Return what is wrong with a command line, and how to mend it where that is known."""
    if isinstance(error, click.NoSuchOption):
        return flag_error(error)
    # typer names similar commands in the message; click 8.4 appends them a second time.
    has_suggestions = error.message.startswith("No such command")
    message = error.message if has_suggestions else error.format_message()
    if message.startswith(EXTRA) and isinstance(error, click.UsageError) and error.ctx is not None:
        return _too_many_arguments_message(error.ctx, message.partition("(")[2].removesuffix(")"))
    if not isinstance(error, click.MissingParameter) or error.param is None:
        return message
    param = error.param
    name = (
        f"{param.opts[0]} VALUE" if isinstance(param, click.Option) else param.human_readable_name
    )
    help = getattr(param, "help", None)
    return f"{message} Give {name}: {help}" if help else message


def _too_many_arguments_message(context: click.Context, extra: str) -> str:
    """Return the message for a command with too many arguments."""
    argument_names = [
        p.human_readable_name for p in context.command.params if isinstance(p, click.Argument)
    ]
    what = f"{' and '.join(argument_names)} alone" if argument_names else "no argument"
    also = ", too" if argument_names else ""
    return f"silograph {context.info_name}: expected {what}, got {extra}{also}"


def flag_error(error: click.NoSuchOption) -> str:
    """Return the message for an unknown flag, which may be an option of a part."""
    from silograph.experiment.resolve.parts import join_words, owners_of
    from silograph.methods import METHODS

    name = error.option_name.lstrip("-").replace("-", "_")
    command_flags = (
        [] if error.ctx is None else [opt for p in error.ctx.command.params for opt in p.opts]
    )
    part, _, option_name = name.rpartition(".")  # such as selector.budget
    owners = owners_of(option_name) if {"--option", "--options"} & {*command_flags} else []
    owners = [owner for owner in owners if part in ("", owner.partition(" ")[0])]
    if not owners:
        return _other_commands_message(error)
    kind, _, method = owners[0].partition(" ")
    flag = f"--option {name}"
    if error.ctx is not None and error.ctx.info_name == "compare":
        is_method = kind == "method" and method in METHODS
        flag = f"--options {method if is_method else kind}.{option_name}"
    words = join_words([owner.replace("_", " ", 1) for owner in owners])
    return f"expected an option of {words} as {flag}=VALUE, got {error.option_name}"


def _unknown_flag(error: click.NoSuchOption) -> str:
    """Return the message for an unknown flag, with similar ones; click's text varies by version."""
    similar = sorted(error.possibilities or ())
    line = f"No such option: {error.option_name}"
    if len(similar) == 1:
        return f"{line} Did you mean {similar[0]}?"
    return f"{line} (Possible options: {', '.join(similar)})" if similar else line


def _other_commands_message(error: click.NoSuchOption) -> str:
    """Return the message for an unknown flag that other commands have."""
    context, message = error.ctx, _unknown_flag(error)
    if context is None or context.parent is None:
        return message
    group = context.parent.command
    assert isinstance(group, click.Group)  # silograph itself
    commands_with_flag = [
        f"silograph {name}"
        for name, other_command in group.commands.items()
        if any(error.option_name in (*p.opts, *p.secondary_opts) for p in other_command.params)
    ]
    if not commands_with_flag:
        return message
    if context.info_name == "resume" and "silograph run" in commands_with_flag:
        return (
            f"No such option: {error.option_name}. A run's settings are fixed: silograph run "
            f"--config DIR/config.toml {error.option_name} VALUE begins another one"
        )
    if context.info_name == "compare" and error.option_name == "--option":
        return (
            "No such option: --option. It is --options METHOD.NAME=VALUE for one method, and "
            "--options PART.NAME=VALUE for all, such as partition.column=shop"
        )
    if context.info_name == "server" and error.option_name[2:].replace("-", "_") in AT_SILOS:
        if error.option_name[2:].replace("-", "_") in ENGINE:
            return f"No such option: {error.option_name}. Silos compute by themselves"
        return (
            f"No such option: {error.option_name}. The data are at the silos, cut already: each "
            "says in its silo.toml what its tables mean"
        )
    first, *others = commands_with_flag
    other_commands = f" and {count_of(len(others), 'other command')}" if others else ""
    return f"No such option: {error.option_name}. It is a flag of {first}{other_commands}"


# --- typed ---------------------------------------------------------------------------------------
# Messages that begin with what was typed: the flag whose value is wrong, an option by its name.


UNKNOWN = re.compile(r"unknown (?P<what>[a-z]+)[^']*'(?P<got>[^']*)'")
OPTION = re.compile(r"--option (?P<name>[\w.]+)(?=: )")
DATASET = "dataset"  # what a command names without a flag


def prefix_with_flag(text: str, words: Sequence[str]) -> str:
    """Return a message as the command line spells it, which begins with the flag it is about.

    >>> prefix_with_flag("unknown model 'gnc'; choices: gcn", ["run", "--model", "gnc"])
    "--model: unknown model 'gnc'; choices: gcn"
    >>> prefix_with_flag("option budget: got 0", ["run", "--option", "selector.budget=0"])
    '--option selector.budget: got 0'
    >>> prefix_with_flag("option mu: got 0", ["compare", "--over", "mu=0,1"])
    '--over mu: got 0'

    Args:
        text: the message.
        words: of the command line.
    """
    spelled = spell_as_flags(text)
    if match := UNKNOWN.match(spelled):
        flag = _flag_with(match["what"], match["got"], words)
        return spelled if flag is None else f"{flag}: {spelled}"
    if match := OPTION.match(spelled):
        return _option(match["name"], words) + spelled[match.end() :]
    return spelled


def _flag_with(what: str, got: str, words: Sequence[str]) -> str | None:
    """Return the flag that has a value, that of its kind first; None: the value was not typed."""
    standalone = re.compile(rf"(?<![\w./:-]){re.escape(got)}(?![\w/:-])")
    flags = [flag for flag, value in _pairs(words) if standalone.search(value)]
    flags_of_kind = [flag for flag in flags if flag.lstrip("-").startswith(what)]
    matching_flags = flags_of_kind or [flag for flag in flags if flag.startswith("--")]
    return matching_flags[-1].replace(DATASET, DATASET.upper()) if matching_flags else None


def _option(name: str, words: Sequence[str]) -> str:
    """Return an option as it was typed, with its part or method if that was typed."""
    for flag, value in _pairs(words):
        typed = value.partition("=")[0].strip()
        if (
            flag in ("--option", "--options", "--over")
            and typed.rpartition(".")[2] == name.rpartition(".")[2]
        ):
            return f"{flag} {typed}"
    return f"--option {name}"


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield flags with their values, and values without a flag as those of a dataset."""
    current_flag = ""
    for word in words[1:]:
        flag, equals, value = word.partition("=")
        if word.startswith("--"):
            if equals:
                yield flag, value
            current_flag = "" if equals else word
        else:
            yield current_flag or DATASET, word
            current_flag = ""
