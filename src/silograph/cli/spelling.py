"""Names of settings as the command line spells them.

Messages are written for Python and run files: `local_epochs=2`. On the command line the same
setting is `--local-epochs 2`.
"""

import dataclasses
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args, get_origin

from silograph.cli.flags import plain_type
from silograph.core.config import RunConfig

SETTINGS = {
    f.name: f for f in dataclasses.fields(RunConfig) if f.name not in ("dataset", "options")
}
CHOICES = {n: get_args(f.type) for n, f in SETTINGS.items() if get_origin(f.type) is Literal}
OTHERS = (
    *("listen", "silos", "least", "metrics", "wait", "round_seconds", "rejoin_seconds"),
    *(
        "max_update_norm",
        "log_level",
        "ca",
        "certs",
        "keys",
        "secret",
        "server",
        "seeds",
        "trials",
        "max_minutes",
        "search_seed",
    ),
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
KEPT = re.compile(r"""((?<!\w)'[^']*'(?!\w)|"[^"]*"|[\w.]+\([^()]*\)|[Cc]hoices: .*)""")
# Settings that begin a message without being a run's: those of servers, silos and studies.
HEAD = re.compile(rf"(?P<name>{'|'.join(OTHERS)})(?=: )|option (?P<option>\w[\w.]*)(?=: )")
# What is said of a part's own option: settings in it are other parts'.
OF_PART = re.compile(r"(?P<name>[a-z]\w*): (?P<said>.* \(options of (?P<part>[^()]+)\))")
LOG = logging.getLogger("silograph")


def as_flags(text: str) -> str:
    """Return a message with settings spelled as flags.

    Words that are settings, too, stay where they may be only words ("2 clients"). So does a
    message about a run file.

    >>> as_flags("expected local_epochs=1 and no batch_size: add edge_weights=ignore")
    'expected --local-epochs 1 and no --batch-size: add --edge-weights ignore'
    >>> as_flags("alpha: input is 0 (options of dirichlet)")
    '--alpha: input is 0 (options of dirichlet)'
    """
    if ".toml" in text:
        return text
    if own := OF_PART.fullmatch(text):
        return f"{_option_flag(own['name'], own['part'])}: {own['said']}"
    if head := HEAD.match(text):
        flag = f"--option {head['option']}" if head["option"] else _spelled(head["name"])
        return flag + as_flags(text[head.end() :])
    pieces = KEPT.split(text)
    pieces[::2] = [SETTING.sub(_flag, piece) for piece in pieces[::2]]
    return "".join(pieces)


def _option_flag(name: str, part: str) -> str:
    """Return how an option of a part is given: by the flag of its own, where it has one."""
    from silograph.experiment.resolve.parts import FLAT, TABLES

    has_flag = name in FLAT and part in TABLES[FLAT[name]]
    return _spelled(name) if has_flag else f"--option {name}"


def _spelled(name: str) -> str:
    """Return the flag of a setting."""
    return f"--{name.replace('_', '-')}"


def _flag(found: "re.Match[str]") -> str:
    name, value = found["set"] or found["name"] or "", found["value"]
    if found["chosen"]:
        name, value = found["chosen"].split(" ")
    field = SETTINGS[name]
    if value is not None and value not in CHOICES.get(name, (value,)):
        return f"--option {name}={value}"  # a part has an option of the same name
    flag = _spelled(name)
    if plain_type(field.type) is bool and value is not None:
        off = field.metadata["off"] or f"--no-{flag[2:]}"
        return {"true": flag, "false": off}.get(value.lower(), f"{flag} {value}")
    return flag if value is None else f"{flag} {value}"


class _AsFlags(logging.Filter):
    """Spells settings of whole lines as flags; values that lines are made of stay."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.args and isinstance(record.msg, str):
            record.msg = as_flags(record.msg)
        return True


@contextmanager
def logged_as_flags() -> Iterator[None]:
    """Spell settings as flags in what is logged meanwhile."""
    spelling = _AsFlags()
    LOG.addFilter(spelling)
    try:
        yield
    finally:
        LOG.removeFilter(spelling)
