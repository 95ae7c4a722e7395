"""Tables of `security.md`: they follow from the typed messages, the strict policy and attacks.

    python docs/security_tables.py

writes them into the page, between its marks.
"""

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import Any

from silograph.core.config import make_config
from silograph.core.kinds import Kind
from silograph.core.payload import Ragged
from silograph.deploy.policy import STRICT_POLICY, ProposedRun, policy_of, refusal_of
from silograph.deploy.server import with_evaluate_clients
from silograph.experiment.resolve.resolve import Resolved, resolve_without_data
from silograph.experiment.resolve.run_program import beyond_weights, program_of
from silograph.experiment.terminal_table import markdown_table
from silograph.federation.field_specs import FieldSpecs
from silograph.federation.privacy.release import is_noised
from silograph.federation.program import Call, Program, calls_of
from silograph.methods import METHODS

HERE = Path(__file__).parent
PAGE = HERE / "security.md"
ATTACKS = HERE.parent / "benchmarks" / "attacks" / "methods.jsonl"
MARKS = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
SILOS = 8
# Options that change what is sent, with a method that supports each.
OPTIONS: dict[str, dict[str, Any]] = {
    "`--collect 0.5`": {"method": "fedavg", "collect": 0.5},
    "`--normalize standard`": {"method": "fedavg", "normalize": "standard"},
    "`--feature-drift`": {"method": "fedavg", "feature_drift": True},
    "`--class-weight balanced`": {"method": "fedavg", "class_weight": "balanced"},
    "`--weight-rows used`": {"method": "fedavg", "weight_rows": "used"},
    "`--neighbors fedgrains`": {"method": "fedavg", "neighbors": "fedgrains"},
    "`--dp-unit silo`": {
        "method": "fedavg",
        "dp_epsilon": 8.0,
        "dp_delta": 1e-5,
        "dp_unit": "silo",
    },
    "`--dp-clip-quantile 0.5`": {
        "method": "fedavg",
        "dp_epsilon": 8.0,
        "dp_delta": 1e-5,
        "dp_clip_quantile": 0.5,
    },
    "`--dp-unit node`": {
        "method": "fedavg",
        "dp_epsilon": 8.0,
        "dp_delta": 1e-5,
        "dp_unit": "node",
    },
    "`--option share=all`": {"method": "fedgraph", "options": {"share": "all"}},
    "`--option share=none`": {"method": "fedgraph", "options": {"share": "none"}},
}


@dataclass(frozen=True)
class Exchange:
    """What a run sends, apart from evaluations: names of fields, with `*` for rows of nodes.

    Attributes:
        kinds: of replies.
        replies: fields of replies, by which kind they leave.
        requests: fields that a silo gets.
    """

    kinds: tuple[str, ...]
    replies: frozenset[str]
    requests: frozenset[str]


def resolved(settings: dict[str, Any]) -> tuple[Resolved, Program]:
    """Return a run without data, and its program."""
    config = with_evaluate_clients(make_config({"clients": SILOS, **settings}))
    run = resolve_without_data(config, device="cpu")
    assert run is not None  # only modules of users need data
    return run, program_of(run.config, run.schema, run.parts.method.part, run.method_config)


def calls_in(program: Program) -> Iterator[Call]:
    """Yield the calls of set-up, the first and the last round."""
    parts = program.setup, program.round(1), program.round(program.rounds)
    yield from chain.from_iterable(map(calls_of, parts))


def names_of(specs: FieldSpecs) -> Iterator[str]:
    """Yield the fields of a message: mappings by their name, `*` marks rows of single nodes."""
    for name, spec in specs.items():
        yield name.partition("/")[0] + ("\\*" if spec.form is Ragged else "")


def exchange_of(settings: dict[str, Any]) -> Exchange:
    """Return what a run sends, apart from evaluations."""
    _, program = resolved(settings)
    calls = [call for call in calls_in(program) if call.what is not Kind.EVALUATION]
    replies, requests = set[str](), set[str]()
    for call in calls:
        replies |= set(names_of(call.reply_specs))
        requests |= set(names_of(call.inbox_specs))
    kinds = {str(call.reply_kind) for call in calls if call.reply_specs}
    return Exchange(tuple(sorted(kinds)), frozenset(replies), frozenset(requests))


def joined(names: frozenset[str] | set[str]) -> str:
    """Return names in order; a hyphen for none."""
    return ", ".join(sorted(names)) or "-"


def silo_methods() -> Iterator[str]:
    """Yield the methods that silos can run, those with equal messages as presets left out."""
    for name, method in METHODS.items():
        if method.setting.at_server is None and not method.setting.uncut:
            yield name


def messages_table() -> str:
    """Return the table of fields by method; methods with equal messages share a row."""
    by_exchange: dict[Exchange, list[str]] = {}
    for name in silo_methods():
        by_exchange.setdefault(exchange_of({"method": name}), []).append(f"`{name}`")
    rows = [
        [", ".join(names), ", ".join(each.kinds), joined(each.replies), joined(each.requests)]
        for each, names in by_exchange.items()
    ]
    head = ["methods", "kinds", "the server gets from each silo", "each silo gets"]
    return markdown_table(head, rows)


def options_table() -> str:
    """Return the table of what options add to the messages of a method, or take away."""
    rows = []
    for name, settings in OPTIONS.items():
        plain, changed = exchange_of({"method": settings["method"]}), exchange_of(settings)
        rows.append(
            [
                name,
                f"`{settings['method']}`",
                joined(set(changed.kinds) - set(plain.kinds)),
                _difference(plain.replies, changed.replies),
                _difference(plain.requests, changed.requests),
            ]
        )
    head = ["option", "method", "further kinds", "the server gets", "each silo gets"]
    return markdown_table(head, rows)


def _difference(plain: frozenset[str], changed: frozenset[str]) -> str:
    more, less = changed - plain, plain - changed
    parts = [f"more: {joined(more)}"] if more else []
    parts += [f"no longer: {joined(less)}"] if less else []
    return "; ".join(parts) or "the same fields"


def refused_rules(*, listed: bool = False) -> dict[str, str | None]:
    """Return the first rule of the strict policy that each method's run breaks.

    Args:
        listed: whether the silo's people have listed the method and the kinds that it sends, and
            the run keeps to the policy's minimum of nodes and silos where its method can.
    """
    policy, rules = policy_of(tomllib.loads(STRICT_POLICY)), dict[str, str | None]()
    terms = {"evaluation_min_count": policy.evaluation_min_count, "rounds": policy.most_rounds}
    minimums = {
        "min_nodes_per_row": policy.rows.min_nodes,
        "min_silos_per_row": policy.rows.min_silos,
    }
    for name in silo_methods():
        own_terms = terms | (minimums if listed and name == "label_guided" else {})
        run, program = resolved({"method": name, **own_terms})
        needs = beyond_weights(run.config, run.parts.method.part, run.method_config)
        own = replace(policy, methods=(name,), kinds=None) if listed else policy
        error = refusal_of(own, ProposedRun(run.config, program, needs))
        rules[name] = None if error is None else str(error.fields["rule"])
    return rules


def policy_table() -> str:
    """Return the table of methods that the strict policy lets run, and of the rules for others."""
    by_rule: dict[str | None, list[str]] = {}
    for name, rule in refused_rules().items():
        by_rule.setdefault(rule, []).append(f"`{name}`")
    rows = [
        ["may run" if rule is None else f"refused by `{rule}`", ", ".join(names)]
        for rule, names in by_rule.items()
    ]
    return markdown_table(["strict policy", "methods"], rows)


def attacks_table() -> str:
    """Return the table of what attacks recover, without and with the strict policy's terms.

    Attacks that recover nothing are left out; methods with equal figures share a row.
    """
    lines = [json.loads(line) for line in ATTACKS.read_text(encoding="utf-8").splitlines()]
    by_case = {tuple(line["case"]): line for line in lines}
    rules, listed_rules = refused_rules(), refused_rules(listed=True)
    rows: dict[tuple[str, ...], list[str]] = {}
    for (name, terms), line in by_case.items():
        if terms != "simulation":
            continue
        method = name.partition(",")[0]
        verdict = "yes" if rules[method] is None else "if listed"
        if (rule := listed_rules[method]) is not None:
            verdict = f"no: `{rule}`"
        others = {
            (each["attack"], each["recovered"]): each
            for each in by_case[name, "strict"].get("findings", [])
        }
        for each in line["findings"]:
            other = others.get((each["attack"], each["recovered"]))
            if each["share"] == 0:
                continue
            limited = "-" if other is None else _share(other)
            what = each["attack"], each["recovered"], each["server"]
            row = (*what, _share(each), limited, verdict)
            rows.setdefault(row, []).append(f"`{method}`{name.removeprefix(method)}")
    head = [
        *("method", "attack", "what is recovered", "server", "fraction found"),
        *("fraction found on the policy's terms", "allowed"),
    ]
    return markdown_table(head, [["; ".join(names), *row] for row, names in rows.items()])


def _share(finding: dict[str, Any]) -> str:
    right = finding["right"]
    guesses = "" if right is None else f", {100 * right:.0f} % right"
    return f"{100 * finding['share']:.1f} % of {finding['of']:,}{guesses}"


def privacy_table() -> str:
    """Return the table of all replies of a run with differential privacy, by method and unit."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for unit, name in product(("silo", "node"), silo_methods()):
        method = METHODS[name]
        has_own_steps = bool(method.needs.corrections(method.options()))
        if not method.clips_updates or (unit == "node" and has_own_steps):
            continue
        privacy = {"dp_epsilon": 8.0, "dp_delta": 1e-5, "dp_unit": unit, "selector": "all"}
        _, program = resolved({"method": name, **privacy})
        for call in {call.op.__name__: call for call in calls_in(program)}.values():
            content = "nothing" if not call.reply_specs else "zeros, whatever the data"
            content = "clipped integers with noise" if is_noised(call.op) else content
            assert is_noised(call.op) or not call.reply_specs or call.reply_kind is Kind.EVALUATION
            fields = joined({f"`{n}`" for n in names_of(call.reply_specs)})
            row = f"`{unit}`", f"`{call.op.__name__}`", str(call.reply_kind), fields, content
            rows.setdefault(row, []).append(f"`{name}`")
    head = ["unit", "call", "kind", "fields of the reply", "they hold", "methods"]
    return markdown_table(head, [[*row, ", ".join(names)] for row, names in rows.items()])


TABLES = {
    "messages": messages_table,
    "options": options_table,
    "privacy": privacy_table,
    "policy": policy_table,
    "attacks": attacks_table,
}


def with_tables(text: str) -> str:
    """Return the page with its tables made anew."""
    return MARKS.sub(lambda mark: mark[1] + "\n" + TABLES[mark[2]]() + "\n\n" + mark[3], text)


def main() -> None:
    """Write the tables into the page."""
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
