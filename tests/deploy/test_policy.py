"""A silo's policy: what is refused, by one line, before anything leaves."""

import dataclasses
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mistakes import raises_code
from policed import PolicedSilos, policed, why_refused
from runs import rows_of, same_bits, weights_of
from silograph.core.config import make_config
from silograph.core.errors import ConfigError, SilographError
from silograph.core.kinds import Kind
from silograph.deploy.policy import (
    NO_POLICY,
    STRICT_POLICY,
    ProposedRun,
    RowRules,
    SiloPolicy,
    check_code,
    describe_policy,
    read_policy,
    refusal_of,
    write_policy,
)
from silograph.deploy.server_settings import ServerSettings, check_update_norm
from silograph.deploy.silo import (
    MOST_CALLS,
    Attendance,
    OwnData,
    PlanRow,
    RunPlan,
    lines_of,
    plan_of,
)
from silograph.experiment.report.reading import size_text
from silograph.experiment.resolve.resolve import choose, resolve
from silograph.experiment.resolve.run_program import beyond_weights, kinds_sent, program_of
from silograph.federation.field_specs import Extent
from silograph.federation.privacy.budget import PrivacyBudget
from silograph.federation.program import SizeBound, calls_of
from silograph.federation.session.audit import Audit, AuditReading, open_audit, read_audit
from silograph.federation.session.message import Message, Type, own_ops, pack
from silograph.federation.session.responder import Responder
from silograph.federation.session.silo_data import SendingBounds
from silograph.federation.session.state_store import StateStore
from silograph.graph.graph import Graph, Schema
from silograph.methods import METHODS

MakeGraph = Callable[..., Graph]
SCHEMA = Schema(7, 3, "multiclass", ())
ABLE = [name for name, method in METHODS.items() if method.setting.at_server is None]
QUICK = ("fedavg", "label_guided", "fedais")
WEIGHTS_ONLY = ("control", "evaluation", "weights")
POLICY_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "policy.md"


def asked_run(*, nodes: int = 1, silos: int = 1, **options: Any) -> ProposedRun:
    """What a run asks; `nodes` and `silos` are what it has behind each row at least."""
    given = {"method": "fedavg", "clients": 4, "rounds": 20, **options}
    asked = make_config(given)
    found = resolve(asked, SCHEMA, choose(asked))
    method, cfg = found.parts.method.part, found.method_config
    program = program_of(found.config, SCHEMA, method, cfg)
    needs = beyond_weights(found.config, method, cfg)
    config = dataclasses.replace(found.config, min_nodes_per_row=nodes, min_silos_per_row=silos)
    return ProposedRun(config, program, needs)


def test_the_page_names_every_method_that_sends_rows_and_every_key_of_a_policy() -> None:
    page = POLICY_PAGE.read_text(encoding="utf-8")
    agreed = page[page.index("## Names that need permission") :]
    for name in ABLE:
        assert (f"`{name}`" in agreed) is bool(asked_run(method=name).needs), name
    table = page[: page.index("## Evaluation")]
    keys = {line.split("|")[1] for line in table.splitlines() if line.startswith("| `")}
    strict = tomllib.loads(STRICT_POLICY)
    nested = {f"[{name}]" for name, value in strict.items() if isinstance(value, dict)}
    flat = strict.keys() - {name.strip("[]") for name in nested}
    assert {key for cell in keys for key in re.findall(r"`([^`]+)`", cell)} == flat | nested


def test_no_policy_is_what_held_before() -> None:
    assert why_refused(NO_POLICY, asked_run()) is None
    asked = asked_run(method="bns")
    assert why_refused(NO_POLICY, asked) == (
        "this silo has not agreed to bns, which sends rows of single nodes through the server "
        "(docs/reference/policy.md): start it with --allow bns, or leave the run"
    )
    assert why_refused(NO_POLICY, dataclasses.replace(asked, allow=("bns",))) is None
    assert why_refused(SiloPolicy(methods=("bns",)), asked) is None


@pytest.mark.parametrize(
    ("rules", "options", "facts", "says"),
    [
        (
            {"evaluate_clients": "participants"},
            {"participation": 0.5},
            {},
            "expected only models that the silo trains from to be scored by this silo's "
            "policy.toml, got a run in which it scores those of rounds without it: let the server "
            "run with --evaluate-clients participants or let all silos train, or write "
            'evaluate_clients = "all" there, or leave the run',
        ),
        (
            {"methods": ("fedavg", "local")},
            {"method": "fedopt"},
            {},
            "expected one of fedavg, local by this silo's policy.toml, got fedopt: add it to "
            "methods there, start the silo with --allow fedopt, or leave the run",
        ),
        (
            {"methods": ()},
            {},
            {},
            "expected no method by this silo's policy.toml, got fedavg: add it to methods there, "
            "start the silo with --allow fedavg, or leave the run",
        ),
        (
            {"methods": ("fedavg",)},
            {"collect": 0.5},
            {},
            "expected one of fedavg by this silo's policy.toml, got collect: add it to methods "
            "there, start the silo with --allow collect, or leave the run",
        ),
        (
            {"kinds": ("weights",)},
            {},
            {},
            "expected replies of kinds weights by this silo's policy.toml, got a run that sends "
            'control, evaluation: write kinds = ["control", "evaluation", "weights"] there, or '
            "leave the run",
        ),
        (
            {"kinds": ()},
            {},
            {},
            "expected replies of no kind by this silo's policy.toml, got a run that sends control, "
            'evaluation, weights: write kinds = ["control", "evaluation", "weights"] there, or '
            "leave the run",
        ),
        (
            {"most_rounds": 19},
            {},
            {},
            "expected at most 19 rounds in a run by this silo's policy.toml, got 20: raise "
            "most_rounds there, or leave the run",
        ),
        (
            {"most_runs": 2},
            {},
            {"runs": 2},
            "expected at most 2 runs by this silo's policy.toml, got run number 3: raise most_runs "
            "there, or leave the run",
        ),
        (
            {"most_runs_of_server": 1},
            {},
            {"runs_of_server": 1},
            "expected at most 1 runs of one server by this silo's policy.toml, got its run number "
            "2: raise most_runs_of_server there, or leave the run",
        ),
        (
            {"secure_aggregation": "require"},
            {},
            {},
            "expected secure aggregation by this silo's policy.toml, got a run without it: let the "
            "server run with --secure-aggregation, or leave secure_aggregation out there, or leave "
            "the run",
        ),
        (
            {"least_silos": 5},
            {},
            {},
            "expected at least 5 silos by this silo's policy.toml, got 4: lower least_silos there, "
            "or leave the run",
        ),
        (
            {"most_bytes": 1000},
            {},
            {"least": 400, "sent": 601},
            "expected at most 1.0 kB in a run by this silo's policy.toml, got a run whose set-up "
            "and first round send 400 B after 601 B that have left: raise most_bytes there, or "
            "leave the run",
        ),
        (
            {"most_bytes": 1000},
            {},
            {"least": 1001},
            "expected at most 1.0 kB in a run by this silo's policy.toml, got a run whose set-up "
            "and first round send 1.0 kB: raise most_bytes there, or leave the run",
        ),
        (
            {"rows": RowRules(min_nodes=3)},
            {"method": "label_guided", "nodes": 2},
            {"allow": ("label_guided",)},
            "expected at least 3 nodes behind each row by this silo's policy.toml, got a run with "
            "2: let the server run with --min-nodes-per-row 3, or lower min_nodes there, or leave "
            "the run",
        ),
        (
            {"rows": RowRules(min_silos=2)},
            {"method": "label_guided"},
            {"allow": ("label_guided",)},
            "expected at least 2 silos behind each row by this silo's policy.toml, got a run with "
            "1: let the server run with --min-silos-per-row 2, or lower min_silos there, or leave "
            "the run",
        ),
    ],
)
def test_why_a_run_is_refused_that_breaks_a_rule(
    rules: dict[str, Any], options: dict[str, Any], facts: dict[str, Any], says: str
) -> None:
    asked = dataclasses.replace(asked_run(**options), **facts)
    assert why_refused(SiloPolicy(**rules), asked) == says


def test_all_rules_that_a_run_breaks_are_named() -> None:
    policy = SiloPolicy(least_silos=5, most_rounds=19, kinds=WEIGHTS_ONLY)
    refusal = refusal_of(policy, asked_run())
    assert refusal is not None
    assert refusal.fields["rule"] == "most_rounds"
    assert str(refusal).endswith("or leave the run; it also breaks least_silos")


def test_what_a_policy_just_allows() -> None:
    policy = SiloPolicy(
        methods=("fedavg",),
        kinds=WEIGHTS_ONLY,
        most_bytes=1000,
        most_rounds=20,
        most_runs=3,
        most_runs_of_server=2,
        least_silos=4,
        rows=RowRules(min_nodes=9, min_silos=9),  # nothing is exchanged
    )
    asked = dataclasses.replace(asked_run(), least=400, sent=600, runs=2, runs_of_server=1)
    assert why_refused(policy, asked) is None
    sums = asked_run(method="label_guided", nodes=3, silos=2)
    rules = RowRules(min_nodes=3, min_silos=2)
    assert why_refused(SiloPolicy(methods=("label_guided",), rows=rules), sums) is None
    allowed = dataclasses.replace(asked, allow=("fedavg",))
    assert why_refused(dataclasses.replace(policy, methods=()), allowed) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("most_round = 3", "unknown key in policy.toml 'most_round': did you mean 'most_rounds'"),
        ("[rows]\nmin_node = 3", "unknown key in [rows] 'min_node': did you mean 'min_nodes'"),
        ("most_rounds = 0", "most_rounds: input should be greater than or equal to 1, got 0"),
        ("most_rounds = 1e3", "most_rounds: input should be a valid integer, got 1000.0"),
        ("most_rounds = true", "most_rounds: input should be a valid integer, got True"),
        ("most_rounds = '3'", "most_rounds: input should be a valid integer, got '3'"),
        ("most_runs = 99999999999999999999", "most_runs: "),
        ("most_bytes = '3 apples'", "most_bytes: expected a number of bytes, or of kB, MB or GB"),
        ("most_bytes = -1", "most_bytes: input should be greater than or equal to 1, got -1"),
        ("methods = 'fedavg'", "methods: input should be a valid tuple, got 'fedavg'"),
        ("methods = [1]", "methods: input should be a valid string, got 1"),
        ("methods = ['fedavgg']", "unknown method in methods 'fedavgg': did you mean 'fedavg'"),
        ("kinds = ['weight']", "unknown kind in kinds 'weight': did you mean 'weights'"),
        ("rows = 3", "rows: "),
        ("[code]\n'a.py' = 3", "code.a.py: input should be a valid string, got 3"),
        ("[rows]\nmin_silos = -2", "min_silos: input should be greater than or equal to 1"),
        ("most_rounds = ", "expected TOML, got: "),
        ("\udcff", "expected TOML, got: "),
    ],
)
def test_a_file_that_says_something_else(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "policy.toml").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as failure:
        read_policy(tmp_path)
    assert str(failure.value).startswith(f"{tmp_path / 'policy.toml'}: {says}")
    assert "\n" not in str(failure.value)


def test_what_a_file_says(tmp_path: Path) -> None:
    assert read_policy(tmp_path) is None
    text = "methods = ['own.py:METHOD', 'collect']\nmost_bytes = '1.5 kB'\n[code]\n'own.py' = '1f'"
    (tmp_path / "policy.toml").write_text(text)
    policy = read_policy(tmp_path)
    assert policy == SiloPolicy(
        methods=("own.py:METHOD", "collect"), most_bytes=1500, code={"own.py": "1f"}
    )
    assert policy.bounds == SendingBounds(None, 1500)
    assert policy.digest != NO_POLICY.digest
    (tmp_path / "policy.toml").write_text(f"# said otherwise\n{text}".replace("1.5 kB", "1500"))
    again = read_policy(tmp_path)
    assert again is not None
    assert again.digest == policy.digest
    (tmp_path / "policy.toml").unlink()
    (tmp_path / "policy.toml").mkdir()
    with pytest.raises(ConfigError, match=r"expected to read .*policy.toml, got: Is a directory"):
        read_policy(tmp_path)


def test_the_strict_policy(tmp_path: Path) -> None:
    """Every key is there, with a comment; its methods are those that send nothing else."""
    path = write_policy(tmp_path)
    assert path.read_text(encoding="utf-8") == STRICT_POLICY
    assert path.stat().st_mode & 0o777 == 0o600
    policy = read_policy(tmp_path)
    assert policy is not None
    values = dataclasses.asdict(policy)
    assert [key for key, value in values.items() if value is None] == []
    lines = STRICT_POLICY.splitlines()
    for key in (*values, "min_nodes", "min_silos"):
        place = next(n for n, line in enumerate(lines) if line.startswith((f"{key} =", f"[{key}]")))
        above = lines[place - 1]
        assert above.startswith(("#", "most_r", "min_nodes =", "[rows]")), key
    alone = {n for n in ABLE if not asked_run(method=n).needs}
    assert set(policy.methods or ()) | {"fedpub"} == alone
    for name in policy.methods or ():
        assert set(kinds_sent(asked_run(method=name).program)) <= set(policy.kinds or ())
    with raises_code(ConfigError, "existing-output"):
        write_policy(tmp_path)
    with raises_code(ConfigError, "unwritable-path"):
        write_policy(tmp_path / "none")


def test_which_features_occur_is_allowed_by_a_name_of_its_own() -> None:
    asked = asked_run(weight_rows="used")
    assert asked.needs == ("fedavg", "features")  # its replies have rows, too
    named = dataclasses.replace(asked, allow=("fedavg",))
    line = "this silo has not agreed to features, which says which features occur at a silo"
    assert str(why_refused(NO_POLICY, named)).startswith(line)
    assert str(why_refused(NO_POLICY, named)).endswith(
        " (docs/reference/policy.md): start it with --allow fedavg,features, or leave the run"
    )
    assert why_refused(NO_POLICY, asked) == (
        "this silo has not agreed to fedavg, which sends rows of single nodes through the server, "
        "nor to features, which says which features occur at a silo (docs/reference/policy.md): "
        "start it with --allow fedavg,features, or leave the run"
    )
    assert why_refused(SiloPolicy(methods=("local",)), asked) == (
        "expected one of local by this silo's policy.toml, got fedavg and features: add them to "
        "methods there, start the silo with --allow fedavg,features, or leave the run"
    )
    assert "got features: add it " in str(why_refused(SiloPolicy(methods=("fedavg",)), asked))
    assert why_refused(NO_POLICY, dataclasses.replace(asked, allow=("fedavg", "features"))) is None
    assert why_refused(SiloPolicy(methods=("fedavg", "features")), asked) is None
    asked = asked_run(method="fedais", model="sage", weight_rows="used")
    assert asked.needs == ("fedais", "features")  # leave for the rows is none for the features


def test_the_docs_name_all_that_sends_rows() -> None:
    """The list in docs/reference/policy.md is that of the methods; `collect` goes with any."""
    page = POLICY_PAGE.read_text(encoding="utf-8")
    (listed,) = re.findall(r"These send rows of single nodes by default: ([^.]*)\.", page)
    assert sorted(re.findall(r"`([a-z]\w*)`", listed)) == sorted(
        [*(name for name in ABLE if asked_run(method=name).needs), "collect"]
    )


def test_a_link_that_leads_nowhere_is_not_no_policy(tmp_path: Path) -> None:
    """The folder that it leads to may not be mounted: without the file nothing would be limited."""
    assert read_policy(tmp_path) is None
    (tmp_path / "policy.toml").symlink_to(tmp_path / "elsewhere" / "policy.toml")
    with raises_code(ConfigError, "missing-file"):
        read_policy(tmp_path)


def test_which_rules_hold_is_said(tmp_path: Path) -> None:
    none = list(describe_policy(NO_POLICY, has_file=False, allow=("bns",)))
    assert none == [
        "no policy.toml: methods that send weights and counts only; --allow bns; no other limit"
    ]
    write_policy(tmp_path)
    policy = read_policy(tmp_path)
    assert policy is not None
    first, *rules = describe_policy(policy, has_file=True, allow=())
    assert first == f"policy.toml holds, digest {policy.digest[:16]}"
    assert rules[1:7] == [
        "  kinds: control, evaluation, weights",
        "  most_bytes: 100.00 MB",
        "  most_rounds: 100",
        "  most_repeats: 20",
        "  most_runs: 20",
        "  most_runs_of_server: 10",
    ]
    assert rules[-2:] == ["  code: none", "  rows: min_nodes 5, min_silos 2"]
    assert "  methods: no limit" in describe_policy(
        SiloPolicy(most_rounds=3), has_file=True, allow=()
    )


def test_code_is_allowed_by_its_digest() -> None:
    check_code(NO_POLICY, {"own.py": "12"})
    check_code(SiloPolicy(code={"own.py": "12", "more.py": "34"}), {"own.py": "12"})
    listed = "expected code that policy.toml lists under .code., got own.py with digest 12"
    with pytest.raises(
        ConfigError, match=f'{listed}: write "own.py" = "12" there once you have re'
    ):
        check_code(SiloPolicy(code={}), {"own.py": "12"})
    with pytest.raises(ConfigError, match=f"{listed} in place of 34: write"):
        check_code(SiloPolicy(code={"own.py": "34"}), {"own.py": "12"})


def read(path: Path) -> AuditReading:
    with path.open("rb") as file:
        return read_audit(file)


@pytest.fixture
def silos(make_graph: MakeGraph, tmp_path: Path) -> PolicedSilos:
    return policed(make_graph(60), tmp_path)


def strictest(name: str, sent: int, kinds: tuple[str, ...]) -> SiloPolicy:
    return SiloPolicy(
        methods=(name,),
        kinds=kinds,
        most_bytes=sent,
        most_rounds=2,
        most_repeats=0,
        most_runs=1,
        most_runs_of_server=1,
        least_silos=3,
    )


@pytest.mark.law(sample=12)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in ABLE]
)
def test_methods_run_unchanged_under_the_strictest_policy_that_allows_them(
    silos: PolicedSilos, tmp_path: Path, name: str
) -> None:
    """Not a byte, a round, a run or a kind could be less; weights, ledger and scores are the same.

    The audit file tells what the ledger counts as sent up, and no less than the plan's least.
    """
    options: dict[str, Any] = {"method": name, "rounds": 2}
    plain, workers = silos.run(allow=(name,), **options)
    sent = {silo: worker.audit.sent for silo, worker in workers.items()}
    kinds = kinds_sent(asked_run(method=name, rounds=2).program)
    paths = {silo: tmp_path / f"{silo}.jsonl" for silo in sent}
    contexts = {silo: open_audit(path, {"policy": "p"}) for silo, path in paths.items()}
    audits = {silo: context.__enter__()[0] for silo, context in contexts.items()}
    found, _ = silos.run(
        lambda silo: strictest(name, sent[silo], kinds), audit=audits.__getitem__, **options
    )
    for context in contexts.values():
        context.__exit__(None, None, None)
    assert same_bits(weights_of(found), weights_of(plain))
    assert found.ledger.records == plain.ledger.records
    assert rows_of(found) == rows_of(plain)
    for place, silo in enumerate(sent):
        (run,) = read(paths[silo]).runs
        up = {str(kind): 0 for kind in Kind}
        for r in found.ledger.records:
            if r.direction == "up":
                up[str(r.what)] += int(r.bytes[r.clients == place].sum())
        assert {k: n for k, n in run.bytes.items() if k != "hello"} == {
            kind: size for kind, size in up.items() if size
        }
        assert run.agreed is not None
        most = run.agreed.facts["most_bytes"]
        assert all(most[kind] is None or up[kind] <= most[kind] for kind in most)
        assert {kind for kind, size in up.items() if size} <= most.keys()


def test_the_silo_stops_before_one_byte_too_many(silos: PolicedSilos, tmp_path: Path) -> None:
    options: dict[str, Any] = {"method": "fedavg", "rounds": 2}
    _, workers = silos.run(**options)
    sent = {silo: worker.audit.sent for silo, worker in workers.items()}
    first, path = silos.silos[0].name, tmp_path / "a.jsonl"
    silos.said.clear()
    with (
        open_audit(path, {}) as (audit, _),
        pytest.raises(SilographError),  # of the server, which the silo does not answer any more
    ):
        silos.run(
            lambda silo: SiloPolicy(most_bytes=sent[silo] - (silo == first)),
            audit=lambda silo: audit if silo == first else Audit(),
            **options,
        )
    (run,) = read(path).runs
    assert run.sent < sent[first] - 1
    assert run.refused == 1
    (line,) = [line for line in silos.said if line.startswith("refused:")]
    assert line.startswith(f"refused: expected at most {sent[first] - 1:,} bytes to leave in a run")
    assert line.endswith("the silo leaves the run")


def test_a_run_whose_first_round_is_too_much_is_refused_at_once(silos: PolicedSilos) -> None:
    _, workers = silos.run(method="fedavg", rounds=1)
    sent = {silo: worker.audit.sent for silo, worker in workers.items()}
    with pytest.raises(SilographError, match="got a run whose set-up and first round send "):
        silos.run(lambda silo: SiloPolicy(most_bytes=sent[silo] // 3), method="fedavg", rounds=9)


def test_a_kind_that_no_program_told_of_does_not_leave() -> None:
    bounds = SendingBounds(("weights",), 10)
    bounds.check("weights", 4, 6)
    with raises_code(SilographError, "refused-by-policy", rule="kinds"):
        bounds.check("features", 0, 1)
    with raises_code(SilographError, "refused-by-policy", rule="most_bytes"):
        bounds.check("weights", 4, 7)


def test_what_a_run_will_send_is_shown_before_it_begins(silos: PolicedSilos) -> None:
    _, workers = silos.run(allow=("label_guided",), method="label_guided", rounds=2)
    start = silos.said.index("this run sends to the server")
    shown = silos.said[start : start + 13]
    assert shown[1] == "(rows of single nodes: label_guided; 3 silos, as the server says)"
    assert shown[2].split() == ["kind", "rounds", "in", "a", "round", "in", "all"]
    hellos = {size_text(worker.audit.hello) for worker in workers.values()}
    assert shown[3].split("sent already")[1].strip() in hellos
    names = [line.split()[0] for line in shown[3:11]]
    assert names == [
        *(
            "hello",
            "control",
            "cotangents",
            "evaluation",
            "gradients",
            "halo_keys",
            "partial_sums",
            "weights",
        )
    ]
    assert shown[11].startswith("all of it")
    assert shown[12] == "(without its name, key and versions, and figures of work)"
    assert silos.said[start + 13].startswith("received")
    assert all(len(line) <= 65 for line in shown)


def test_columns_of_what_a_run_sends_stay_apart() -> None:
    unknown, known = SizeBound(0, None), SizeBound(1, 999_990_000)
    rows = [PlanRow("node_embeddings", 0, 10_000, known, known)]
    plan = RunPlan(rows, PlanRow("received", 0, 400, unknown, unknown), unknown, 400)
    shown = [*lines_of(plan, 400, 1, "s", 2, ())]
    assert shown[-1] == "received      set-up to 400    not known yet   not known yet"
    assert shown[4] == "node_embeddings set-up to 10,000  up to 999.99 MB up to 999.99 MB"


def test_runs_are_counted_over_restarts(silos: PolicedSilos, tmp_path: Path) -> None:
    """The third run is refused; the second one, begun again, is still the second."""
    path, first = tmp_path / "a.jsonl", silos.silos[0].name
    for token, says in ((b"a", ""), (b"b", ""), (b"b", ""), (b"c", "got run number 3: raise")):
        with open_audit(path, {"server": "s:1"}) as (audit, _):
            arguments: dict[str, Any] = {
                "policy": lambda _: SiloPolicy(most_runs=2),
                "audit": lambda silo: audit if silo == first else Audit(),
                "token": token * 16,
                "method": "local",
                "rounds": 1,
            }
            if says:
                with pytest.raises(
                    SilographError, match=f"^{first}: expected at most 2 runs .*{says}"
                ):
                    silos.run(**arguments)
            else:
                silos.run(**arguments)
    assert [run.agreements for run in read(path).runs] == [1, 2, 0]


def test_an_unknown_server_fills_no_disk(silos: PolicedSilos, tmp_path: Path) -> None:
    """It asks for what was not agreed to 5,000 times."""
    path, silo = tmp_path / "a.jsonl", silos.silos[0]
    own = OwnData(silo, {}, Attendance("", Path()), lambda _: None)
    with open_audit(path, {}) as (audit, _):
        worker = Responder(
            bytes(16), own_ops(), own, StateStore(), lambda _: None, silo.name, audit
        )
        for number in range(1, 5001):
            worker.answer(pack(Message(Type.START, bytes(16), number, b"{}")))
    assert read(path).broken is None
    assert read(path).lines < 40
    assert path.stat().st_size < 20_000


def test_a_long_run_is_added_up_as_far_as_it_goes_quickly() -> None:
    """A run of a million rounds; each has some calls, and their bytes are the same in each."""
    extent = Extent(1, torch.float32, {})
    asked = asked_run(method="fedavg", rounds=10**6)
    found = plan_of(asked.program, extent)
    calls = sum(1 for _ in calls_of(asked.program.round(1)))
    assert found.rounds == -(-MOST_CALLS // calls)
    (weights,) = [row for row in found.sent if row.name == "weights"]
    assert weights.whole == SizeBound(*[found.rounds * weights.each.least] * 2)
    shown = list(lines_of(found, 10**6, 100, "x", 4, ()))
    assert shown[-1] == f"(in all: the first {found.rounds:,} of 1,000,000 rounds)"


def test_updates_that_nobody_can_measure_have_no_bound() -> None:
    """Else changes would be held against weights, or nothing against anything."""
    bound, refused = ServerSettings("", update_norm=1.0), set()
    for name in ABLE:
        try:
            check_update_norm(bound, asked_run(method=name).program, name)
        except ConfigError as error:
            if "what these have become" in str(error):
                refused.add(name)
    stored = {name for name, method in METHODS.items() if method.init is METHODS["fedais"].init}
    stored.remove("fedlocal")  # a round of it is one call, which brings weights and returns them
    assert refused == {"fedgraph", *stored}


@pytest.mark.parametrize("evaluation", ["none", "counts"])
def test_the_least_count_holds_for_histograms_of_features(evaluation: Any) -> None:
    """A silo that sends no counts of evaluation may still be asked for those of its features."""
    policy = SiloPolicy(evaluation=evaluation, evaluation_min_count=5)
    asked = asked_run(feature_drift=True, evaluation_min_count=0)
    assert "expected at least 5 nodes behind each count" in str(why_refused(policy, asked))
    assert why_refused(policy, asked_run(feature_drift=True, evaluation_min_count=5)) is None


def test_a_budget_is_read_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text("privacy_budget = { epsilon = 8, delta = 1e-5 }\n")
    policy = read_policy(tmp_path)
    assert policy is not None
    assert policy.privacy_budget == PrivacyBudget(epsilon=8.0, delta=1e-5)
    assert len(policy.digest) == 64
    assert "  privacy_budget: epsilon 8.0, delta 1e-05, unit silo" in describe_policy(
        policy, has_file=True, allow=()
    )
    for wrong in ("{ epsilon = 8 }", "{ epsilon = 0, delta = 1e-5 }", "8.0", '"none"'):
        file.write_text(f"privacy_budget = {wrong}\n")
        with pytest.raises(ConfigError):
            read_policy(tmp_path)


@pytest.mark.parametrize(
    ("method", "further"),
    [("fedavg", set()), ("fedprox", set()), ("label_guided", {"keys"}), ("bns", {"keys"})],
)
def test_kinds_that_secure_aggregation_adds(method: str, further: set[str]) -> None:
    """Masked replies count as the kind of their values; only keys of masked rows are calls."""
    plain, secure = (
        set(kinds_sent(asked_run(method=method, secure_aggregation=masked).program))
        for masked in (False, True)
    )
    assert secure - plain == further
