"""What a server and its silos tell each other before the first call, and what silos cannot run."""

import dataclasses
import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic.dataclasses import dataclass as checked_dataclass

from silograph.core.config import STRICT, RunConfig, checked
from silograph.core.errors import ConfigError
from silograph.core.resolved_config import ResolvedConfig, resolved_values
from silograph.deploy.allowed_code import portable
from silograph.deploy.run_bounds import PRIVATE
from silograph.experiment.resolve.parts import own_code
from silograph.federation.session.peer import one_line
from silograph.graph.graph import Schema
from silograph.methods import METHODS
from silograph.methods.base import Method

NONE: Mapping[str, str] = MappingProxyType({})
AROUND = ("protocol", "name", "key", "process")  # of a greeting, besides versions
UNCUT_ONLY = ("largest_component", "drop_edges", "local_bias")


@checked_dataclass(frozen=True, config=STRICT)
class Versions:
    """What a silo tells when it attaches: versions of Python and packages, by name."""

    versions: dict[str, str]


def read_versions(name: str, facts: Mapping[str, Any]) -> dict[str, str]:
    """Return a silo's versions; raise `ConfigError` where it tells something else."""
    own = {key: value for key, value in facts.items() if key not in AROUND}
    told = checked(Versions, own, f"facts of {name}").versions
    return {one_line(package): one_line(version) for package, version in told.items()}


def check_device_name(device: str) -> None:
    """Raise `ConfigError` for a device that a server cannot name to silos."""
    if re.fullmatch(r"cpu|cuda(:\d+)?", device) is None:
        raise ConfigError(
            f"device: expected cpu or cuda, on which silos compute, got {device!r}: a silo may "
            "choose another by its own --device"
        )


def check_deployable(config: RunConfig, method: Method) -> None:
    """Raise `ConfigError` for a run that silos cannot do on their own data."""
    if (needs := method.setting.at_server) is not None:
        raise ConfigError(
            f"expected a method that trains at silos alone, got {config.method}, whose server "
            f"needs {needs}"
        )
    for kind, spec in own_code(config).items():
        if kind not in ("method", "model"):
            raise ConfigError(
                f"expected one of silograph's own {kind} parts at silos, got {spec}: only methods "
                "and models may be users' code there"
            )
    for f in dataclasses.fields(config):
        if f.name in UNCUT_ONLY and getattr(config, f.name) != f.default:
            raise ConfigError(
                f"expected silos' own data as they are, got {f.name}={getattr(config, f.name)}, "
                "which needs the uncut graph: leave it out"
            )


def start_facts(
    config: ResolvedConfig,
    schema: Schema,
    code: Mapping[str, str] = NONE,
    *,
    hand_over: bool = True,
) -> dict[str, Any]:
    """Return what the server sends to silos before the first call.

    Args:
        config: of the run.
        schema: of all silos' data.
        code: digests of users' code that the run needs, by name; see `told_of_code`.
        hand_over: whether silos get the server's model when the run is over.
    """
    named = {name: portable(getattr(config, name)) for name in ("method", "model")}
    values = resolved_values(config) | named
    told = {k: v for k, v in values.items() if k not in PRIVATE}
    told["options"] = {k: v for k, v in told["options"].items() if k not in server_only(config)}
    facts = {"config": told, "schema": dataclasses.asdict(schema), "hand_over": hand_over}
    return facts | ({"code": dict(code)} if code else {})


def check_start(facts: Mapping[str, Any], schema: Schema) -> None:
    """Raise `ConfigError` where a server says something else than `start_facts` of these data."""
    odd = facts.keys() - {"config", "schema", "hand_over", "code"}
    if odd:
        raise ConfigError(
            f"expected config, schema, hand_over and code of a server, got {min(odd)!r}, too: it "
            "may be of another version"
        )
    if type(facts.get("hand_over")) is not bool:
        raise ConfigError(f"expected whether silos get the model, got {facts.get('hand_over')!r}")
    own = dataclasses.asdict(schema)
    told, known = (json.dumps(s, sort_keys=True) for s in (facts.get("schema"), own))
    if told != known:  # as texts: 3.0 and true are no 3 and 1 there
        raise ConfigError(f"expected the schema of this silo's data, {own}, got another")


def server_only(config: ResolvedConfig) -> set[str]:
    """Return the options of a run's method that name what only the server has, such as a file."""
    method = METHODS.get(config.method)
    declared = () if method is None else dataclasses.fields(method.options)
    return {f"method.{f.name}" for f in declared if f.metadata.get("server_only")}
