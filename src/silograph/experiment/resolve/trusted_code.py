"""Code that a folder or a file names is imported only once the user has said so.

What a user names in a call or on the command line is the user's own word. What stands in a result
folder, a run file or the plan of a study may be anybody's, and to import it is to run it.
"""

from collections.abc import Collection, Mapping

from silograph.core.config import RunConfig
from silograph.core.errors import CheckpointError, ConfigError
from silograph.core.resolved_config import ResolvedConfig
from silograph.experiment.resolve.parts import own_code
from silograph.experiment.resolve.user_code import absolute, digest

Trust = bool | Collection[str]


def check_trusted(named: Mapping[str, str], trust: Trust, where: object) -> None:
    """Raise `ConfigError` for code that was not named by the user; nothing is imported.

    Args:
        named: `FILE.py:NAME` or `package.module:NAME` by what it is for.
        trust: whether all of it may be imported, or which.
        where: the file or folder that names it.
    """
    if trust is True:
        return
    known = {absolute(spec) for spec in trust or ()}
    for kind, spec in named.items():
        if absolute(spec) not in known:
            raise ConfigError(
                f"expected leave to run code that {where} names, got none: the {kind} is {spec}; "
                "read that code, then say --trust (in Python trust=True)"
            )


def code_digests(config: RunConfig | ResolvedConfig) -> dict[str, str]:
    """Return hashes of the files or packages of users' parts, by kind; nothing is imported.

    A model that was given as a value may be in no file; then it is left out.
    """
    found = {}
    for kind, spec in own_code(config).items():
        try:
            found[kind] = digest(spec)
        except ConfigError:
            if kind != "model":
                raise
    return found


def check_code(theirs: Mapping[str, str], config: RunConfig, given: Collection[str] = ()) -> None:
    """Raise `CheckpointError` where a user's code has changed since a run began.

    The rest of the run's identity may not be known yet; see `check_identity`.

    Args:
        theirs: digests of the run.
        config: of the run.
        given: kinds of parts that the caller gives as values.
    """
    for kind, ours in code_digests(config).items():
        if kind not in given and theirs.get(kind) != ours:
            raise differs(kind, ours, theirs.get(kind))


def differs(name: str, ours: object, theirs: object) -> CheckpointError:
    """Return the error for a run that would go on with something else than it began with."""
    return CheckpointError(
        f"expected a run with {name} {ours}, got one with {theirs}: going on would not give the "
        "numbers of an uninterrupted run; start a new run"
    )
