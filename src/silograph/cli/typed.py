"""Messages that begin with what was typed: the flag whose value is wrong, an option by its name."""

import re
from collections.abc import Iterator, Sequence

from silograph.cli.spelling import as_flags

UNKNOWN = re.compile(r"unknown (?P<what>[a-z]+)[^']*'(?P<got>[^']*)'")
OPTION = re.compile(r"--option (?P<name>[\w.]+)(?=: )")
DATASET = "dataset"  # what a command names without a flag


def as_typed(text: str, words: Sequence[str]) -> str:
    """Return a message as the command line spells it, which begins with the flag it is about.

    >>> as_typed("unknown model 'gnc'; choices: gcn", ["run", "--model", "gnc"])
    "--model: unknown model 'gnc'; choices: gcn"
    >>> as_typed("option budget: got 0", ["run", "--option", "selector.budget=0"])
    '--option selector.budget: got 0'
    >>> as_typed("option mu: got 0", ["compare", "--over", "mu=0,1"])
    '--over mu: got 0'

    Args:
        text: the message.
        words: of the command line.
    """
    spelled = as_flags(text)
    if found := UNKNOWN.match(spelled):
        flag = _flag_with(found["what"], found["got"], words)
        return spelled if flag is None else f"{flag}: {spelled}"
    if found := OPTION.match(spelled):
        return _option(found["name"], words) + spelled[found.end() :]
    return spelled


def _flag_with(what: str, got: str, words: Sequence[str]) -> str | None:
    """Return the flag that a value was given to, that of its kind first; None: it was not typed."""
    alone = re.compile(rf"(?<![\w./:-]){re.escape(got)}(?![\w/:-])")
    flags = [flag for flag, value in _pairs(words) if alone.search(value)]
    own = [flag for flag in flags if flag.lstrip("-").startswith(what)]
    named = own or [flag for flag in flags if flag.startswith("--")]
    return named[-1].replace(DATASET, DATASET.upper()) if named else None


def _option(name: str, words: Sequence[str]) -> str:
    """Return how an option was given: with the part or method whose it is, if that was said."""
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
    before = ""
    for word in words[1:]:
        flag, equals, value = word.partition("=")
        if word.startswith("--"):
            if equals:
                yield flag, value
            before = "" if equals else word
        else:
            yield before or DATASET, word
            before = ""
