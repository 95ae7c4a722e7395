"""Methods, ops and models of users in a federation of silos.

Code never travels. A silo's people put a file or package where the silo runs, and allow it
(`silograph silo --allow-code own.py`); the silo imports it before it connects. The server of a run
whose method or model is in such code sends the names of file and method, and a digest of what it
has itself. A silo compares that with what it allowed, and opens nothing that a server names.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType

from torch import nn

from silograph.core.config import RunConfig, make_config
from silograph.core.errors import ConfigError, SilographError, lookup, mistake
from silograph.core.resolved_config import ResolvedConfig
from silograph.experiment.resolve.parts import with_default_model
from silograph.experiment.resolve.resolve import choose, resolve
from silograph.experiment.resolve.run_program import beyond_weights, kinds_sent, program_of
from silograph.experiment.resolve.user_code import (
    absolute_source,
    digest_of_source,
    import_spec,
    is_spec,
    module_of,
    source_name,
)
from silograph.federation.base import Op
from silograph.federation.program import Program
from silograph.federation.session.message import (
    is_library,
    name_of,
    ops_in,
    ops_of,
    own_ops,
    with_ops,
)
from silograph.federation.session.peer import one_line
from silograph.graph.graph import Schema
from silograph.methods import METHODS
from silograph.methods.base import Method
from silograph.nn.own_module import Make

NO_CALLS = (
    "it does not declare what it calls: give it calls=Calls(setup=..., round=..., state=...), as "
    "docs/reference/method_interface.md shows"
)


@dataclass(frozen=True, eq=False)
class AllowedSource:
    """A file or package that a silo allowed, imported.

    Attributes:
        name: of the file without its folder, or of the module.
        digest: of the file, or of all modules of the package.
        ops: that it defines, by qualified name.
        methods: values of the type `Method`, by their names in it.
        models: classes of torch.nn.Module that it defines, by name.
    """

    name: str
    digest: str
    ops: Mapping[str, Op]
    methods: Mapping[str, Method]
    models: Mapping[str, Make]


def read_source(source: str) -> AllowedSource:
    """Import a file or package and return what it offers.

    Raises:
        ConfigError: it cannot be imported, or it is silograph's own or no file.
    """
    if source == "silograph" or source.startswith("silograph."):
        raise ConfigError(
            f"expected code of your own to allow, got {source}, which every silo has: leave it out"
        )
    if is_spec(source) and source.rpartition(":")[0]:
        raise ConfigError(
            f"expected FILE.py or package.module to allow, got {source!r}: leave out "
            f":{source.rpartition(':')[2]}"
        )
    module, digest = module_of(source), digest_of_source(source)
    if digest == source:
        raise ConfigError(f"expected code in a file to allow, got {source}, which has none")
    loaded, prefix = sys.modules.copy(), f"{module.__name__}."
    modules = [module, *(loaded[name] for name in sorted(loaded) if name.startswith(prefix))]
    methods = {name: v for name, v in vars(module).items() if isinstance(v, Method)}
    library = list(METHODS.values())
    return AllowedSource(
        source_name(source),
        digest,
        ops_in(modules),
        {name: method for name, method in methods.items() if method not in library},
        {name: v for name, v in vars(module).items() if _is_model(v, modules)},
    )


def _is_model(value: object, modules: Sequence[ModuleType]) -> bool:
    """Return whether a value is a class of torch.nn.Module that the modules define."""
    module_names = {module.__name__ for module in modules}
    return (
        isinstance(value, type)
        and issubclass(value, nn.Module)
        and value.__module__ in module_names
    )


@dataclass(frozen=True, eq=False)
class AllowedCode:
    """What a silo allowed of code that users wrote; see `allow_code`.

    Attributes:
        sources: files and packages, by name.
        ops: the table of ops: silograph's own and theirs, by qualified name.
    """

    sources: Mapping[str, AllowedSource] = field(default_factory=dict)
    ops: Mapping[str, Op] = field(default_factory=own_ops)

    @property
    def methods(self) -> dict[str, Method]:
        """Methods that a server can name, by the name that it gives: `own.py:METHOD`."""
        return {
            f"{source.name}:{name}": method
            for source in self.sources.values()
            for name, method in source.methods.items()
        }

    def check(self, digests: object) -> None:
        """Raise `ConfigError` unless what a server tells of its code is what is here.

        Args:
            digests: digests of files and packages that the run needs, by name; None: of none.
        """
        if digests is None:
            return
        if not isinstance(digests, dict):
            raise ConfigError("expected digests of the run's own code by name, got something else")
        for name, server_digest in digests.items():
            own_digest = self._source(name).digest
            if server_digest != own_digest:
                raise ConfigError(
                    f"expected {name} with digest {own_digest}, got {one_line(server_digest)}: the "
                    "server and this silo have different versions"
                )

    def method(self, spec: str, digests: object) -> Method:
        """Return the method that a server names; nothing is opened or imported.

        Args:
            spec: name of one of silograph's methods, or `own.py:METHOD`.
            digests: see `check`.

        Raises:
            ConfigError: there is none of this name here, or it does not declare its calls.
        """
        if not is_spec(spec):
            return lookup(METHODS, spec, "method")
        source, name = self._find_named_source(spec, digests)
        method = lookup(source.methods, name, f"method in {source.name}")
        if method.calls is None:
            raise ConfigError(f"{source.name}:{name} cannot run at silos: {NO_CALLS}")
        return method

    def model(self, spec: str, digests: object) -> Make | None:
        """Return the model that a server names, None where it is one of silograph's.

        Raises:
            ConfigError: there is none of this name here.
        """
        if not is_spec(spec):
            return None
        source, name = self._find_named_source(spec, digests)
        return lookup(source.models, name, f"model in {source.name}")

    def check_ops(self, program: Program) -> None:
        """Raise `ProtocolError` where a program has ops that are not in the table."""
        for op in ops_of(program):
            name_of(self.ops, op)

    def _find_named_source(self, spec: str, digests: object) -> tuple[AllowedSource, str]:
        """Return the source of a spec and the name in it, once the digest is known to be right."""
        file, _, name = spec.rpartition(":")
        source = self._source(file)
        if not isinstance(digests, dict) or digests.get(file) != source.digest:
            raise ConfigError(f"expected the digest of the server's {source.name}, got none")
        return source, name

    def _source(self, name: str) -> AllowedSource:
        if name not in self.sources:
            raise ConfigError(
                f"this silo has not allowed {one_line(name)!r}, which the run needs: start it with "
                "--allow-code and the file or package of that name, or leave the run",
                **mistake("untrusted-code", one_line(name)),
            )
        return self.sources[name]

    def lines(self, schema: Schema) -> Iterator[str]:
        """Yield what a silo's people should know before it connects.

        Args:
            schema: of the silo's data.
        """
        for source in self.sources.values():
            yield f"allowed {source.name} with digest {source.digest}: {_describe_contents(source)}"
            for name, method in source.methods.items():
                spec = f"{source.name}:{name}"
                yield f"{spec} {_describe_requirements(spec, method, schema)}"


def allow_code(sources: Iterable[str]) -> AllowedCode:
    """Import files and packages of users and return what they offer; their code runs.

    Args:
        sources: `FILE.py` or `package.module` each.

    Raises:
        ConfigError: one cannot be imported, or two have one name, or an op has that of another.
    """
    source_by_name: dict[str, AllowedSource] = {}
    ops = own_ops()
    for name in dict.fromkeys(map(absolute_source, sources)):
        source = read_source(name)
        if source.name in source_by_name:
            raise ConfigError(
                f"expected files of different names to allow, got {source.name} twice: rename one"
            )
        source_by_name[source.name] = source
        ops = with_ops(ops, source.ops.values())
    return AllowedCode(source_by_name, ops)


def split_names(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the names of lists such as `own.py,package.module`.

    >>> split_names(["own.py, lab.methods", "more.py"])
    ('own.py', 'lab.methods', 'more.py')
    """
    return tuple(name.strip() for text in texts for name in text.split(","))


def _describe_contents(source: AllowedSource) -> str:
    """Return what a source has, in words."""
    ops = sorted(op.__name__ for op in source.ops.values())
    parts = {"ops": ops, "methods": list(source.methods), "models": list(source.models)}
    return "; ".join(f"{what} {', '.join(names)}" for what, names in parts.items() if names) or (
        "no op, method or model"
    )


def _describe_requirements(spec: str, method: Method, schema: Schema) -> str:
    """Return what a method would send from here, by its default options."""
    if method.calls is None:
        return f"cannot run at silos: {NO_CALLS}"
    try:
        config = make_config({"method": spec})
        ratings = schema.task == "rating"
        config = with_default_model(config, ratings=ratings, method=method)
        resolved = resolve(config, schema, choose(config, method))
        program = program_of(resolved.config, schema, method, resolved.method_config)
        needs = beyond_weights(resolved.config, method, resolved.method_config)
    except SilographError as error:
        return f"depends on the run's options: {error}"
    except Exception as error:
        return f"cannot be shown: its calls raise {type(error).__name__}"
    sends = f"sends {', '.join(kinds_sent(program))} by default"
    return sends + "".join(f", with rows of single nodes: it needs --allow {n}" for n in needs)


# The server's side: what it sends in place of code.


def server_ops(program: Program) -> dict[str, Op]:
    """Return the ops of a run by qualified name: silograph's own and those of its program.

    Raises:
        ConfigError: an op of the program cannot be named.
    """
    return with_ops(own_ops(), ops_of(program))


def portable_name(spec: str) -> str:
    """Return a name as other machines know it: that of a file without its folder."""
    source, colon, name = spec.rpartition(":")
    return f"{source_name(source)}{colon}{name}"


def code_digests_for_silos(config: ResolvedConfig, program: Program) -> dict[str, str]:
    """Return digests of all code of users that a run needs at silos, by name.

    Raises:
        ConfigError: a file cannot be read, or two have one name.
    """
    specs = [spec for spec in (config.method, config.model) if is_spec(spec)]
    sources = {spec.rpartition(":")[0] for spec in specs}
    for op in ops_of(program):
        module = op.__module__.removesuffix(":")
        is_included = any(module == s or module.startswith(f"{s}.") for s in sources)
        if not is_library(op) and not is_included:
            sources.add(module)
    digest_by_name: dict[str, str] = {}
    for source in sorted({absolute_source(source) for source in sources}):
        digest = digest_of_source(source)
        if digest_by_name.setdefault(source_name(source), digest) != digest:
            raise ConfigError(
                f"expected files of different names, got two of the name {source_name(source)}: "
                "rename one"
            )
    return digest_by_name


def check_declared(config: RunConfig, method: Method) -> None:
    """Raise `ConfigError` for a method that does not say what it calls."""
    if method.calls is None:
        raise ConfigError(f"{config.method} cannot run at silos: {NO_CALLS}")


def check_model(config: RunConfig) -> None:
    """Raise `ConfigError` for a model of users that silos cannot find by its name."""
    if config.model is None or not is_spec(config.model):
        return
    make = import_spec(config.model, object)
    if not (isinstance(make, type) and issubclass(make, nn.Module)):
        raise ConfigError(
            f"expected a class of torch.nn.Module for a federation of silos, got {config.model}, "
            f"a {type(make).__name__}: silos call nothing else by a name"
        )
