"""Code that a folder or a file names is imported only if the user trusts it.

Users trust what they name themselves in a call or on the command line. A result folder, a run file
or the plan of a study may come from anybody, and importing the code that it names runs it.
"""

from collections.abc import Collection, Mapping

from silograph.core.config import RunConfig
from silograph.core.errors import CheckpointError, ConfigError
from silograph.core.resolved_config import ResolvedConfig
from silograph.experiment.resolve.parts import own_code
from silograph.experiment.resolve.user_code import absolute, digest

Trust = bool | Collection[str]


def check_trusted(specs_by_kind: Mapping[str, str], trust: Trust, origin: object) -> None:
    """Raise `ConfigError` for code that was not named by the user; nothing is imported.

    Args:
        specs_by_kind: `FILE.py:NAME` or `package.module:NAME` by what it is for.
        trust: whether all of it may be imported, or which.
        origin: the file or folder that names it.
    """
    if trust is True:
        return
    trusted_specs = {absolute(spec) for spec in trust or ()}
    for kind, spec in specs_by_kind.items():
        if absolute(spec) not in trusted_specs:
            raise ConfigError(
                f"expected leave to run code that {origin} names, got none: the {kind} is {spec}; "
                "read that code, then say --trust (in Python trust=True)"
            )


def code_digests(config: RunConfig | ResolvedConfig) -> dict[str, str]:
    """Return hashes of the files or packages of users' parts, by kind; nothing is imported.

    A model passed as a value may be in no file; then it is left out.
    """
    digests = {}
    for kind, spec in own_code(config).items():
        try:
            digests[kind] = digest(spec)
        except ConfigError:
            if kind != "model":
                raise
    return digests


def check_code(
    run_digests: Mapping[str, str], config: RunConfig, value_kinds: Collection[str] = ()
) -> None:
    """Raise `CheckpointError` where a user's code has changed since a run began.

    The rest of the run's identity may not be known yet; see `check_identity`.

    Args:
        run_digests: digests of the run.
        config: of the run.
        value_kinds: kinds of parts that the caller passes as values.
    """
    for kind, current_digest in code_digests(config).items():
        if kind not in value_kinds and run_digests.get(kind) != current_digest:
            raise differs(kind, current_digest, run_digests.get(kind))


def differs(name: str, current: object, original: object) -> CheckpointError:
    """Return the error for a run that would be resumed with another value than it began with."""
    return CheckpointError(
        f"expected a run with {name} {current}, got one with {original}: going on would not give "
        "the numbers of an uninterrupted run; start a new run"
    )
