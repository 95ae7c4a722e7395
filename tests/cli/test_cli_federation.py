"""`silograph server`, `silo`, `certs` and `demo-federation`."""

import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")
pytest.importorskip("cryptography")

from test_cli import flags_of

from commands import Capture, everything, printed
from forked import Forked
from processes import children, children_of, is_running
from silograph.cli import run_app
from silograph.core.errors import ConfigError, SilographError, mistake
from silograph.deploy.demo import (
    SECONDS_TO_START,
    SECONDS_TO_STOP,
    _equal_own_models,
    _error_line,
    _wait_for_end,
)
from silograph.deploy.server import read_versions
from silograph.federation.session.identity import SiloKey
from silograph.federation.session.key_versions import read_keys
from silograph.federation.session.state_store import lock_state_folder
from silos import running

CERTIFIED = ["--listen", "localhost:0", "--certs", "certs"]
TRAINED = ["--rounds", "2", "--hidden", "4", "--method", "fedavg"]
SMALL = [*TRAINED, "--partition", "random"]


@pytest.fixture
def alone(work: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for temporary files, which is empty again in the end."""
    temporary = work / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    return temporary


def test_a_server_has_no_flags_of_a_graph_or_a_cut() -> None:
    gone = flags_of("run") - flags_of("server")
    assert {"--partition", "--data-dir", "--drop-edges", "--partition-seed"} < gone
    assert {"--clients", "--split", "--split-seed", "--seed", "--method"} < flags_of("server")
    assert not flags_of("silo") & flags_of("run") - {"--device", "--help"}


@pytest.mark.slow  # imports for half of a minute in four processes
def test_a_demonstration_of_new_processes_is_the_simulation(alone: Path, capsys: Capture) -> None:
    assert_demonstrates_the_simulation(alone, capsys)


@pytest.mark.usefixtures("forked")
def test_the_demonstration_is_the_simulation_and_leaves_nothing(
    alone: Path, capsys: Capture
) -> None:
    assert_demonstrates_the_simulation(alone, capsys)


def assert_demonstrates_the_simulation(alone: Path, capsys: Capture) -> None:
    before = children()
    text = printed(capsys, "demo-federation", "g.npz", *SMALL, "--clients", "2", "--quiet")
    assert text.startswith("2 silos and a server, each a process of its own, over TLS on 127.0.0.1")
    assert "model         the same, bit for bit as in the simulation\n" in text
    assert re.search(r"ledger        the same, bit for bit: [0-9,]+ bytes\n", text)
    assert everything(alone) == {}
    assert children() == before


@pytest.mark.parametrize(
    ("printed_lines", "error"),
    [
        ("listening\nerror: no room\nto go on: silograph server --resume d\n", "no room"),
        ("Traceback\nValueError: no\n\n", "ValueError: no"),
        ("", "it said nothing"),
    ],
)
def test_a_demonstration_says_why_a_process_failed(printed_lines: str, error: str) -> None:
    assert _error_line(printed_lines) == error


@pytest.mark.parametrize(
    "cut", [["louvain", "--option", "halve=true"], ["dirichlet", "--alpha", "1"]]
)
@pytest.mark.usefixtures("forked")
def test_a_demonstration_may_have_options_of_its_cut(
    alone: Path, capsys: Capture, cut: list[str]
) -> None:
    given = [*TRAINED, "--clients", "2", "--quiet", "--partition", *cut]
    text = printed(capsys, "demo-federation", "g.npz", *given)
    assert "model         the same, bit for bit as in the simulation\n" in text


@pytest.mark.parametrize("method", ["local", pytest.param("fedper", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("forked")
def test_a_demonstration_without_a_model_at_the_server(
    alone: Path, capsys: Capture, method: str
) -> None:
    given = [*SMALL, "--clients", "2", "--quiet", "--method", method]
    text = printed(capsys, "demo-federation", "g.npz", *given)
    assert "\nsilos' models the same, bit for bit as in the simulation\n" in text
    assert re.search(r"accuracy      0\.\d+ \(silos' own models, test nodes\)\n", text)


def test_own_models_that_differ_or_are_absent_are_not_the_same(tmp_path: Path) -> None:
    silos = [tmp_path / name for name in ("a", "b")]
    for number, silo in enumerate(silos):
        (silo / "results" / "run").mkdir(parents=True)
        kept = silo / "results" / "run" / "model.safetensors"
        for path in (kept, tmp_path / f"models/{number}-x"):
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(bytes([number]))
    assert _equal_own_models(tmp_path, silos)
    assert not _equal_own_models(tmp_path, silos[::-1])
    (silos[0] / "results/run/model.safetensors").unlink()
    assert not _equal_own_models(tmp_path, silos)


def test_a_demonstration_that_fails_leaves_nothing(
    alone: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> str:
        assert children() > before
        raise SilographError("expected a server, got none")

    before = children()
    monkeypatch.setattr("silograph.deploy.demo._read_address", broken)
    assert run_app(["demo-federation", "g.npz", *SMALL, "--clients", "2"]) == 2
    assert capsys.readouterr().err.endswith("error: expected a server, got none\n")
    assert everything(alone) == {}
    assert children() == before


class Process:
    """What a demonstration sees of a process."""

    def __init__(self, code: int | None, seconds: int) -> None:
        self.code, self.seconds = code, seconds

    def poll(self) -> int | None:
        return self.code

    def communicate(self, timeout: float) -> tuple[None, str]:
        self.seconds -= 1
        if self.seconds > 0:
            raise subprocess.TimeoutExpired("server", timeout)
        return None, "said"


@pytest.mark.parametrize(
    ("code", "seconds", "said"),
    [
        pytest.param(None, 1000, "said", id="silos run"),
        pytest.param(0, 1000, "said", id="a silo has ended well"),
        pytest.param(1, SECONDS_TO_STOP, "said", id="the server says why a silo failed"),
        pytest.param(1, 1000, None, id="the server waits for a silo that failed"),
    ],
)
def test_a_demonstration_ends_with_the_first_silo_that_fails(
    code: int | None, seconds: int, said: str | None
) -> None:
    silos: Any = [Process(None, 0), Process(code, 0)]
    server: Any = Process(None, seconds)
    assert _wait_for_end(server, silos) == said


def test_a_demonstration_that_can_never_run_starts_nothing(alone: Path, capsys: Capture) -> None:
    given = ["--partition", "random", "--clients", "2", "--method", "fedais", "--model", "gat"]
    assert run_app(["demo-federation", "g.npz", *given]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: expected a model whose sums can be shared, got GAT: "), error
    assert error.count("\n") == 1  # no silo was written
    assert everything(alone) == {}


def test_a_demonstration_that_is_killed_leaves_no_process(alone: Path) -> None:
    command = ["demo-federation", "g.npz", *SMALL, "--clients", "2"]
    demo = Forked(
        [sys.executable, "-m", "silograph", *command],
        env={**os.environ, "TMPDIR": str(alone)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert demo.stderr is not None
    while "silos started" not in demo.stderr.readline():
        assert demo.poll() is None
    started = {int(pid) for pid in children_of(demo.pid)}
    assert len(started) == 3  # the server and two silos
    demo.kill()
    demo.wait()
    demo.stderr.close()
    limit = time.monotonic() + 600
    while any(is_running(pid) for pid in started):
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_three_commands_make_a_federation(
    work: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The silos are threads of this process; the server's address is in its log."""
    lines: list[str] = []
    address: list[str] = []
    listening = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            if lines[-1].startswith("listening on "):
                address.append(lines[-1].split()[-1])
                listening.set()

    listener, log = Listener(), logging.getLogger("silograph")
    monkeypatch.setattr(log, "handlers", [listener])
    monkeypatch.setattr(log, "level", log.level)  # threads set it, too
    run_app(["export-silos", "g.npz", "--clients", "2", "--partition", "random", "--out", "silos"])
    told = [Path("silos", name, "secret") for name in ("client_00", "client_01")]
    assert [path.stat().st_mode & 0o777 for path in told] == [0o600, 0o600]
    assert len({path.read_bytes() for path in told}) == 1
    assert "ca.pem for the silos" in printed(capsys, "certs", "--out", "certs")
    codes: dict[str, int] = {}

    def silo(name: str) -> None:
        assert listening.wait(600)
        common = ["--server", address[0], "--ca", "certs/ca.pem"]
        codes[name] = run_app(["silo", "--data", f"silos/{name}", "--name", name, *common])

    names = ("client_00", "client_01")
    lines_of_keys = [printed(capsys, "silo", "--make-key", "--data", f"silos/{n}") for n in names]
    Path("keys.txt").write_text("".join(lines_of_keys))
    with running([lambda name=name: silo(name) for name in names]):  # type: ignore[misc]
        listen = ["--listen", "localhost:0", "--certs", "certs", "--silos", ",".join(names)]
        listen += ["--keys", "keys.txt"]
        capsys.readouterr()
        watched = ["--quiet", "--json", "--log-file", "server.jsonl", "--metrics", "0"]
        assert run_app(["server", *listen, *TRAINED, "--out", "out", *watched]) == 0
        result = json.loads(capsys.readouterr().out)
    assert codes == dict.fromkeys(names, 0)
    assert (result["dataset"], result["clients"]) == ("silos", 2)
    logged = [json.loads(line) for line in Path("server.jsonl").read_text().splitlines()]
    assert {line["message"] for line in logged} <= set(lines)
    assert {"metrics", "listening", "attached", "round", "ended"} <= {e["event"] for e in logged}
    assert {"client_00 is attached (1 of 2)", "client_01 is attached (1 of 2)"} & set(lines)
    for name in names:
        assert {"key.pem", "key.pub", "state"} <= {p.name for p in Path("silos", name).iterdir()}
    capsys.readouterr()
    assert run_app(["resume", "out"]) == 2
    assert "got one whose graph silos hold" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["server"], "error: Missing option '--listen'."),
        (
            ["server", "--listen", "localhost:0", "--clients", "2"],
            "error: expected the server's certificate and key, got none: give --certs DIR (",
        ),
        (
            ["server", "--listen", "localhost:0"],
            "error: --silos: expected their names, or their number as --clients N, got neither: ",
        ),
        (
            ["server", "--listen", "localhost:0", "--silos", "a,b,c", "--clients", "2"],
            "error: --silos: expected as many names as --clients 2, got 3: leave --clients out",
        ),
        *(
            (
                ["server", "--listen", "localhost:0", "--clients", "2", *words.split()],
                f"error: {words.split()[0]}: expected {what}",
            )
            for words, what in (
                ("--wait -1", "0 seconds or more, got -1"),
                ("--rejoin-seconds nan", "0 seconds or more, got nan"),
                ("--round-seconds 0", "more than 0 seconds, got 0"),
                ("--max-update-norm 0", "more than 0, got 0"),
                ("--least 3", "1 to 2 silos, got 3"),
            )
        ),
        (
            ["server", "--listen", "localhost:0", "--silos", "a,b", "--certs", "nowhere"],
            "error: --certs: expected a file at nowhere/server.pem, got: No such file or directory",
        ),
        (
            ["server", "--listen", "localhost:0", "--clients", "2", "--certs", "certs"],
            "error: expected the public keys of the silos, got none: give --keys with a file of ",
        ),
        (
            ["server", *CERTIFIED, "--clients", "2", "--keys", "keys.txt", "--accept-first-keys"],
            "error: expected --keys or --accept-first-keys, got both: leave one out",
        ),
        (
            ["server", *CERTIFIED, "--clients", "2", "--keys", "nowhere"],
            "error: --keys: expected a file or folder at nowhere, got: No such file or directory",
        ),
        (
            ["server", *CERTIFIED, "--silos", "a,b", "--keys", "keys.txt"],
            "error: expected a public key of each silo in keys.txt, got none of b: add what ",
        ),
        (
            ["server", *CERTIFIED, "--clients", "2", "--keys", "keys.txt"],
            "error: expected public keys of 2 silos in keys.txt, got 1: add what silograph silo ",
        ),
        (
            ["server", *CERTIFIED, "--clients", "2", "--insecure"],
            "error: expected --certs or --insecure, which is without TLS, got both: leave one out",
        ),
        (
            [
                *("silo", "--data", "silos/client_00", "--server", "localhost:1"),
                *("--insecure", "--ca", "certs/ca.pem"),
            ],
            "error: expected --ca or --insecure, which is without TLS, got both: leave --insecure "
            "out to use certs/ca.pem",
        ),
        (
            ["silo", "--data", "untold", "--server", "localhost"],  # before data are read
            "error: --server: expected HOST:PORT, got 'localhost'",
        ),
        (
            ["silo", "--data", "nowhere"],
            "error: expected the address of a server, got none: give --server HOST:PORT",
        ),
        (
            ["silo", "--make-key", "--data", "certs"],
            "error: certs/silo.toml: expected what the tables mean, got No such file or directory",
        ),
        (
            ["silo", "--data", "untold", "--server", "localhost:1"],
            "error: expected the secret that client_00 shares with client_01, which edges lead to",
        ),
        (
            ["silo", "--data", "silos/client_00", "--server", "localhost:1", "--name", "x"],
            "error: expected the silo x in silos/client_00, got client_00: see its silo.toml",
        ),
        (
            ["silo", "--data", "silos/client_00", "--server", "localhost:1"],
            "error: expected the certificate of the server's authority, got none: give --ca FILE",
        ),
        (
            ["silo", "--data", "silos", "--server", "localhost:1"],
            "error: expected the folder of a silo, got silos, which holds folders of silos: name "
            "one of them (client_00, client_01)",
        ),
        (
            ["silo", "--data", "silos/client_00", "--server", "localhost:1", "--ca", "nofile"],
            "error: --ca: expected a file at nofile, got: No such file or directory",
        ),
        (
            ["server", "--listen", "localhost:99999", "--clients", "2", "--insecure"],
            "error: --listen: expected a port from 1 to 65535 in HOST:PORT, got 'localhost:99999'",
        ),
        (
            ["silo", "--data", "silos/client_00", "--server", "localhost:1", "--secret", "silos"],
            "error: --secret: expected a file at silos/client_01, got: Is a directory",
        ),
        (
            ["server", "--listen", "localhost:0", "--clients", "2", "--insecure", "--metrics", "x"],
            "error: --metrics: expected PORT or HOST:PORT, got 'x'",
        ),
        (
            ["server", "--listen", "localhost:0", "--clients", "2", "--log-level", "loud"],
            "error: --log-level: unknown level 'loud'; choices: debug, info, warning",
        ),
        (
            ["silo", "--data", "silos/client_00", "--server", "localhost:1", "--wait", "-1"],
            "error: --wait: expected 0 seconds or more, got -1",
        ),
        (
            ["silo", "--data", "silos/client_00", "--server", "localhost:1", "--log-file", "."],
            "error: expected a log to write at ., got: Is a directory",
        ),
        *(
            (
                ["server", "--listen", "localhost:0", "--resume", "out", *word.split(), "--json"],
                "error: expected --resume alone, for the run's folder says the rest, got "
                f"{word.split()[0]} besides: leave it out",
            )
            for word in ("--rounds 5", "--silos a,b", "--config run.toml")
        ),
        (["certs", "--out", "c", "--host", "ü"], "error: expected the server's name or address, "),
        (
            ["demo-federation", "g.npz", "--method", "centralized"],
            "error: expected a method that trains at silos alone, got centralized, whose server ",
        ),
    ],
)
def test_mistakes_are_one_line(work: Path, capsys: Capture, command: list[str], line: str) -> None:
    run_app(["export-silos", "g.npz", "--clients", "2", "--partition", "random", "--out", "silos"])
    shutil.copytree("silos/client_00", "untold")
    Path("untold", "secret").unlink()
    run_app(["certs", "--out", "certs"])
    Path("keys.txt").write_text(f"a {'0' * 64}\n")
    Path("run.toml").write_text("rounds = 5\n")
    capsys.readouterr()
    assert run_app(command) == 2
    error, *others = capsys.readouterr().err.splitlines()
    assert error.startswith(line), error
    assert len(others) == ("--json" in command)
    for other in others:
        about = json.loads(other)["error"]
        assert about["code"] == "conflicting-options"
        assert error == f"error: {about['message']}"


def test_make_key_prints_the_line_for_the_servers_file(work: Path, capsys: Capture) -> None:
    run_app(["export-silos", "g.npz", "--clients", "2", "--partition", "random", "--out", "silos"])
    make = ["silo", "--make-key", "--data", "silos/client_00"]
    capsys.readouterr()
    assert run_app(make) == 0
    made = capsys.readouterr()
    key = Path("silos", "client_00", "key.pem")
    assert key.stat().st_mode & 0o777 == 0o600
    assert made.err.startswith(f"the private key was written to {key}: keep it here. Send the line")
    assert made.err.count("\n") == 1
    Path("keys.txt").write_text(f"# our silos\n\n{made.out}")
    assert read_keys(Path("keys.txt")) == {"client_00": SiloKey.load(key).public}
    before = key.read_bytes()
    key.chmod(0o640)
    assert run_app(make) == 0
    again = capsys.readouterr()
    assert (again.out, key.read_bytes()) == (made.out, before)
    assert again.err.splitlines() == [
        made.err.strip().replace("was written to", "is already in"),
        f"warning: other users can read {key} (mode 640): chmod 600 {key}",
    ]


def test_a_silo_warns_of_secrets_that_others_can_read(work: Path, capsys: Capture) -> None:
    run_app(["export-silos", "g.npz", "--clients", "2", "--partition", "random", "--out", "silos"])
    data = Path("silos", "client_00")
    command = ["silo", "--data", str(data), "--server", "localhost:1", "--insecure", "--wait", "0"]
    assert run_app(command) == 2
    assert "can read" not in capsys.readouterr().err
    (data / "secret").chmod(0o644)
    (data / "key.pem").chmod(0o604)
    (data / "state").chmod(0o750)
    assert run_app(command) == 2
    warnings = [line for line in capsys.readouterr().err.splitlines() if "can read" in line]
    assert [line.partition("other")[2] for line in warnings] == [
        f" users can read {data}/key.pem (mode 604): chmod 600 {data}/key.pem",
        f" users can read {data}/secret (mode 644): chmod 600 {data}/secret",
        f" users can read {data}/state (mode 750): chmod 700 {data}/state",
    ]


def test_a_server_says_what_it_accepts_and_who_can_read_its_key(
    work: Path, capsys: Capture
) -> None:
    run_app(["certs", "--out", "certs"])
    listen = ["server", *CERTIFIED, "--clients", "2", "--wait", "0", *TRAINED, "--quiet"]
    Path("certs", "server.key").chmod(0o640)
    capsys.readouterr()
    assert run_app([*listen, "--accept-first-keys", "--out", "first"]) == 2
    lines = capsys.readouterr().err
    assert "other users can read certs/server.key (mode 640): chmod 600 certs/server.key" in lines
    assert "the first key that takes a silo's name is accepted (--accept-first-keys)" in lines
    Path("certs", "server.key").chmod(0o600)
    Path("keys.txt").write_text(f"a {'0' * 64}\nb {'1' * 64}\n")
    assert run_app([*listen, "--keys", "keys.txt", "--out", "known"]) == 2
    lines = capsys.readouterr().err
    assert "can read" not in lines
    assert "first key" not in lines


def test_what_a_server_has_no_use_for_is_said(
    work: Path, capsys: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    Path("run.toml").write_text("clients = 20\nblock_size = 4\n")
    listen = ["server", "cora", "--listen", "localhost:99999", "--insecure", "--block-size", "2"]
    assert run_app([*listen, "--clients", "2"]) == 2
    assert caplog.messages == [
        "cora is a name in tables only: the data are the silos' own",
        "--block-size 2 is not used: each silo trains by itself",
    ]
    capsys.readouterr()
    assert run_app(["server", *listen[2:-2], "--config", "run.toml", "--silos", "a,b"]) == 2
    assert capsys.readouterr().err == (
        "error: --silos: expected as many names as clients = 20 in run.toml, got 2: leave clients "
        "out of the file, or add --clients 2\n"
    )
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("resumed", [False, True])
def test_a_server_that_is_interrupted_says_how_it_goes_on(
    work: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, resumed: bool
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("silograph.deploy.server.serve", interrupted)
    monkeypatch.setattr("silograph.deploy.server.resume_server", interrupted)
    run = ["--resume", "my run"]
    if not resumed:
        run = [*TRAINED, "--silos", "a,b", "--out", "my run", "mine", "--strict"]
        run += ["--no-residual", "--option", "server_lr=1", "--option", "server_tau=0.5"]
    how = ["--listen", "localhost:0", "--certs", "c", "--least", "1", "--quiet"]
    assert run_app(["server", *run, *how]) == 130
    why, *hints = capsys.readouterr().err.splitlines()
    assert why == "interrupted"
    assert len(hints) == (not resumed)  # before the first silo came there is no folder
    for hint in hints:
        program, *words = shlex.split(hint.removeprefix("to go on: "))
        assert (program, words[0]) == ("silograph", "server")
        assert sorted(words[1:]) == sorted([*run, *how])
        assert run_app(words) == 130
        assert capsys.readouterr().err.splitlines() == ["interrupted", hint]
    Path("my run").mkdir()
    assert run_app(["server", *run, *how]) == 130
    why, hint = capsys.readouterr().err.splitlines()
    assert why == "interrupted"
    words = shlex.split(hint.removeprefix("to go on: silograph server "))
    assert words[:2] == ["--resume", "my run"]
    assert sorted(words[2:]) == sorted(how)
    assert run_app(["server", *words]) == 130


@pytest.mark.usefixtures("work")
def test_a_server_whose_silos_do_not_come_says_how_it_goes_on(capsys: Capture) -> None:
    run = [*TRAINED, "--silos", "a,b", "--out", "my run"]
    how = ["--listen", "localhost:0", "--insecure", "--wait", "0.2", "--quiet"]
    assert run_app(["server", *run, *how]) == 2
    hint = capsys.readouterr().err.splitlines()[-1]
    words = shlex.split(hint.removeprefix("to go on: silograph server "))
    assert sorted(words) == sorted([*run, *how])


@pytest.mark.usefixtures("work")
@pytest.mark.parametrize("resumed", [False, True])
def test_a_server_whose_silo_did_not_come_back_says_how_it_goes_on(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, resumed: bool
) -> None:
    def lost(*_: object, **__: object) -> None:
        raise ConfigError("a: not back", **mistake("too-few-silos", 2, 1, ["a"]))

    monkeypatch.setattr("silograph.deploy.server.serve", lost)
    monkeypatch.setattr("silograph.deploy.server.resume_server", lost)
    Path("my run").mkdir()
    run = ["--resume", "my run"] if resumed else [*TRAINED, "--silos", "a,b", "--out", "my run"]
    assert run_app(["server", *run, "--listen", "localhost:0", "--insecure", "--quiet"]) == 2
    hint = capsys.readouterr().err.splitlines()[-1]
    assert hint.startswith("to go on: silograph server --resume 'my run' ")


@pytest.mark.usefixtures("forked")
def test_a_server_of_the_demonstration_waits_no_longer_than_its_silos(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is told how long silos may take to start; one that fails ends it at once."""
    begun: list[list[str]] = []
    real = subprocess.Popen

    def popen(command: list[str], **named: Any) -> Any:
        begun.append(command)
        return real(command, **named)

    def broken(*_: object) -> str:
        raise SilographError("expected a server, got none")

    monkeypatch.setattr("silograph.deploy.demo._read_address", broken)
    monkeypatch.setattr("silograph.deploy.demo.subprocess.Popen", popen)
    assert run_app(["demo-federation", "g.npz", *SMALL, "--clients", "2", "--quiet"]) == 2
    (server,) = [command for command in begun if "server" in command]
    assert server[server.index("--wait") + 1] == str(SECONDS_TO_START)


def test_a_silo_is_not_started_twice(work: Path, capsys: Capture) -> None:
    run_app(["export-silos", "g.npz", "--clients", "2", "--partition", "random", "--out", "silos"])
    capsys.readouterr()
    with lock_state_folder(Path("silos/client_00/state")):
        silo = ["silo", "--data", "silos/client_00", "--server", "localhost:1", "--insecure"]
        assert run_app([*silo, "--wait", "0"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: expected one process for the state in silos/client_00/state, got another that "
    )


def test_an_error_is_one_line_that_cannot_steer_a_terminal(
    work: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise SilographError("expected a, got b\nerror: c \x1b[2J")

    monkeypatch.setattr("silograph.deploy.demo.demonstrate", broken)
    assert run_app(["demo-federation", "g.npz"]) == 2
    assert capsys.readouterr().err == "error: expected a, got b error: c ?[2J\n"


def test_versions_that_silos_tell_are_one_line() -> None:
    told = {"versions": {"torch": "1\n2 \x1b[2J", "a\nb": "x" * 999}, "protocol": 2}
    assert read_versions("north", told) == {"torch": "1 2 ?[2J", "a b": "x" * 300}


@pytest.mark.parametrize("command", ["server", "silo", "certs", "demo-federation"])
def test_every_command_has_help(capsys: Capture, command: str) -> None:
    text = printed(capsys, command, "--help")
    assert text.strip().startswith(f"Usage: silograph {command} [OPTIONS]")


@pytest.mark.usefixtures("forked")
def test_own_code_in_a_demonstration(alone: Path, capsys: Capture) -> None:
    """Silos as processes of their own, which allow a file by its name."""
    Path("near.py").write_text(
        "from dataclasses import replace\nfrom silograph.methods import FEDAVG, Needs, Proximal\n"
        "PULLED = Needs(corrections=lambda options: (Proximal(0.5),))\n"
        "NEAR = replace(FEDAVG, name='near', needs=PULLED)\n"
    )
    words = ["--rounds", "2", "--hidden", "4", "--partition", "random", "--clients", "2"]
    text = printed(capsys, "demo-federation", "g.npz", "--method", "near.py:NEAR", *words)
    assert "model         the same, bit for bit as in the simulation\n" in text
    assert "ledger        the same, bit for bit: " in text


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--allow-code", "gone.py"], "expected to import "),
        (["--allow-code", "fine.py,bad.py"], "bad.py, got ZeroDivisionError: division by zero ("),
        (["--allow", "fine.py:X"], "unknown method to allow 'fine.py:X'"),
    ],
)
def test_code_that_a_silo_cannot_allow(
    work: Path, capsys: Capture, words: list[str], line: str
) -> None:
    Path("bad.py").write_text("1 / 0\n")
    Path("fine.py").write_text("X = 1\n")
    printed(capsys, "export-silos", "g.npz", "--clients", "2", "--partition", "random",
            "--out", "silos")  # fmt: skip
    data = ["--data", "silos/client_00", "--server", "127.0.0.1:1", "--insecure"]
    assert run_app(["silo", *data, *words]) == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1
