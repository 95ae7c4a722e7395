"""Who may attach: keys, names, nonces, certificates; everything else is refused with one line."""

import datetime
import logging
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mistakes import raises_code

grpc = pytest.importorskip("grpc")
pytest.importorskip("cryptography")

from sessions import TOKEN, worker_of  # noqa: E402
from silograph.core.errors import ConfigError  # noqa: E402
from silograph.federation.session.attach import Attaching, take_part  # noqa: E402
from silograph.federation.session.events import log_event  # noqa: E402
from silograph.federation.session.hub import PROTOCOL, Hub, StreamLink  # noqa: E402
from silograph.federation.session.identity import (  # noqa: E402  # noqa: E402
    Register,
    SiloKey,
    check_name,
    hosts_of,
    is_host_of,
    make_certificates,
    signed_text,
)
from silograph.federation.session.key_versions import read_keys  # noqa: E402
from silograph.federation.session.message import NO_TOKEN, Message, Type, pack  # noqa: E402
from silograph.federation.session.peer import LostError, one_line  # noqa: E402
from silograph.federation.session.responder import Responder  # noqa: E402
from silograph.federation.session.state_store import StateStore  # noqa: E402
from silograph.federation.session.wire import (  # noqa: E402
    check_plaintext,
    is_loopback,
    need_packages,
    split_address,
)
from silos import running  # noqa: E402
from streams import joined, refusal  # noqa: E402


def test_a_silo_attaches_and_its_stream_carries(hubs: Any, raws: Any) -> None:
    hub = hubs(Register(None, 2))
    silo = raws(hub)
    assert silo.greet("north", SiloKey.new(), versions={"a": "1"}).type is Type.WELCOME
    found = joined(hub)
    assert (found.name, found.facts["versions"]) == ("north", {"a": "1"})
    found.link.send(b"down", 99)
    assert next(silo.call) == b"down"
    silo.out.put(b"up")
    assert found.link.receive(30).data == b"up"
    with pytest.raises(LostError, match=r"expected an answer within 0\.01 s, got none"):
        found.link.receive(0.01)
    silo.close()
    for _ in range(2):  # for good
        with pytest.raises(LostError, match="got the end of the stream: it is gone"):
            found.link.receive(30)


def test_a_name_belongs_to_its_first_key(
    hubs: Any, raws: Any, caplog: pytest.LogCaptureFixture
) -> None:
    hub, key = hubs(Register(None, 2)), SiloKey.new()
    assert raws(hub).greet("north", key).type is Type.WELCOME
    first = joined(hub)
    other = refusal(raws(hub).greet("north", SiloKey.new()))
    assert other == "expected the key that north is registered with, got another: use its own"
    assert "refused north from ipv4:127.0.0.1" in caplog.text
    assert raws(hub).greet("north", key).type is Type.WELCOME  # the same key attaches again
    with pytest.raises(LostError):  # and the stream before is ended
        first.link.receive(30)
    assert [silo.name for silo in hub.returned()] == ["north"]


def test_a_signature_holds_for_its_stream_name_and_key_only(hubs: Any, raws: Any) -> None:
    hub, key = hubs(Register(None, 2)), SiloKey.new()
    says = "expected a signature of the silo's own key, got another"
    assert refusal(raws(hub).greet("north", key, signer=SiloKey.new())) == says
    silo = raws(hub)
    silo.say(Type.HELLO, name="north", key=key.public.hex(), protocol=PROTOCOL)
    silo.hear()
    old = key.sign(signed_text(TOKEN, bytes(32), "north", ""))  # of another stream: replayed
    silo.say(Type.PROOF, TOKEN, signature=old.hex(), host="")
    assert refusal(silo.hear()) == says
    silo = raws(hub)
    silo.say(Type.HELLO, name="north", key=key.public.hex(), protocol=PROTOCOL)
    nonce = bytes.fromhex(silo.hear().facts()["nonce"])
    signature = key.sign(signed_text(TOKEN, nonce, "south", ""))
    silo.say(Type.PROOF, TOKEN, signature=signature.hex(), host="")
    assert refusal(silo.hear()) == says


def test_only_registered_keys_attach_where_there_is_a_folder_of_them(
    hubs: Any, raws: Any, tmp_path: Path
) -> None:
    own = SiloKey.load(tmp_path / "made" / "north.pem")
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "north.pub").write_bytes(own.public_pem)
    hub = hubs(Register(None, 2, read_keys(tmp_path / "keys")))
    assert refusal(raws(hub).greet("south", SiloKey.new())) == (
        "expected a silo whose public key is known, got south: add the line that silograph silo "
        "--make-key prints there to the server's --keys"
    )
    assert refusal(raws(hub).greet("north", SiloKey.new())).startswith(
        "expected the key that north"
    )
    assert raws(hub).greet("north", own).type is Type.WELCOME


def test_who_is_not_expected(hubs: Any, raws: Any) -> None:
    hub = hubs(Register(("north", "south"), 2))
    assert refusal(raws(hub).greet("east", SiloKey.new())) == (
        "expected one of the run's silos, got east: give its name to --silos"
    )
    hub = hubs(Register(None, 1))
    assert raws(hub).greet("north", SiloKey.new()).type is Type.WELCOME
    assert refusal(raws(hub).greet("south", SiloKey.new())) == (
        "expected 1 silo, got south besides: raise --clients"
    )
    assert refusal(raws(hub).greet("a/b", SiloKey.new())) == "expected a silo's name, got 'a/b'"
    assert refusal(raws(hub).greet("north", SiloKey.new(), protocol=1)) == (
        "expected protocol 3, got 1: use the same version of silograph at server and silos"
    )
    silo = raws(hub)
    silo.say(Type.HELLO, name="north", key="xyz", protocol=PROTOCOL)
    silo.hear()
    silo.say(Type.PROOF, TOKEN, signature="")
    assert refusal(silo.hear()) == "expected a key and a signature in hexadecimal, got others"


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (b"garbage", "expected a message of"),
        (pack(Message(Type.PROOF, NO_TOKEN, 0, b"{}")), "expected HELLO, got PROOF"),
        (
            pack(Message(Type.HELLO, TOKEN, 0, b"{}")),
            "expected a message of this run, got one of another",
        ),
        (
            pack(Message(Type.HELLO, NO_TOKEN, 5, b"{}")),
            "expected message 0, got 5: repeated or lost",
        ),
        (pack(Message(Type.HELLO, NO_TOKEN, 0, b"[]")), "expected a JSON object in a HELLO"),
    ],
)
def test_a_stream_that_is_no_silo_is_ended(
    hubs: Any, raws: Any, caplog: pytest.LogCaptureFixture, said: bytes, says: str
) -> None:
    hub = hubs(Register(None, 2))
    silo = raws(hub)
    silo.out.put(said)
    assert list(silo.call) == []
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert line.startswith("a stream from ipv4:127.0.0.1")
    assert says in line


def test_an_address_that_is_taken(hubs: Any) -> None:
    hub = hubs(Register(None, 2))
    with raises_code(ConfigError, "option-value", option="listen", got=hub.address):
        Hub(hub.address, Register(None, 2), TOKEN, None, room=2)


def test_what_comes_after_the_end_is_told_as_late() -> None:
    told: list[tuple[int, bool]] = []
    link = StreamLink(lambda size, late: told.append((size, late)))
    link.pump(iter([b"abc"]))
    assert link.receive(1.0).data == b"abc"
    link.close()
    link.pump(iter([b"late"]))
    assert told == [(3, False), (4, True)]


def no_worker(token: bytes) -> Responder:
    raise AssertionError("the silo must not attach")


def attaching(server: str, roots: bytes | None, **other: Any) -> Attaching:
    key = SiloKey.new()
    return Attaching("north", key, {}, server, roots, no_worker, report=log_event, **other)


def test_a_silo_trusts_its_own_authority_only(hubs: Any, tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        make_certificates(tmp_path / name, ["127.0.0.1"])
    make_certificates(tmp_path / "elsewhere", ["example.org"])
    read = {
        name: [(tmp_path / name / file).read_bytes() for file in ("server.pem", "server.key")]
        for name in ("theirs", "elsewhere")
    }
    for name, roots in (("theirs", "ours"), ("elsewhere", "elsewhere")):
        hub = hubs(Register(None, 2), credentials=tuple(read[name]))
        ca = (tmp_path / roots / "ca.pem").read_bytes()
        with pytest.raises(ConfigError, match="to have a certificate that --ca vouches for, got: "):
            take_part(attaching(hub.address, ca, patience=0.0))
        with pytest.raises(
            ConfigError, match=r"expected a server at .* within 0 s, got: the connection"
        ):
            take_part(attaching(hub.address, None, patience=0.0))  # plaintext to a TLS port


def test_one_end_with_tls_and_one_without_says_where_to_look(hubs: Any, tmp_path: Path) -> None:
    make_certificates(tmp_path, ["127.0.0.1"])
    chain, key, ca = (
        (tmp_path / name).read_bytes() for name in ("server.pem", "server.key", "ca.pem")
    )
    plain, secure = hubs(Register(None, 2)), hubs(Register(None, 2), credentials=(chain, key))
    with pytest.raises(ConfigError, match=r"whether the server was started with --insecure$"):
        take_part(attaching(plain.address, ca, patience=0.0))
    with pytest.raises(ConfigError, match=r"speaks TLS: --ca in place of --insecure$"):
        take_part(attaching(secure.address, None, patience=0.0))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no-such-host.invalid:80"])
def test_why_a_silo_does_not_reach_its_server_is_said_without_words_of_grpc(address: str) -> None:
    silo = replace(attaching(address, None, patience=0.0), roots=b"")
    with pytest.raises(ConfigError) as error:
        take_part(silo)
    text = str(error.value)
    assert not re.search("unavailable|unknown:|failed to connect|resolving", text, re.IGNORECASE)


class Past(datetime.datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return super().now(tz) - datetime.timedelta(days=9)


def test_a_certificate_that_has_expired(
    hubs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(datetime, "datetime", Past)
        make_certificates(tmp_path, ["127.0.0.1"], days=1)
    pair = tuple((tmp_path / file).read_bytes() for file in ("server.pem", "server.key"))
    hub = hubs(Register(None, 2), credentials=pair)
    with pytest.raises(ConfigError, match=r"that --ca vouches for, got: .*has expired"):
        take_part(attaching(hub.address, (tmp_path / "ca.pem").read_bytes(), patience=0.0))


def test_a_proxy_without_tls_is_no_server_yet(tmp_path: Path) -> None:
    """A silo keeps trying: its server may be behind it in a while."""
    make_certificates(tmp_path, ["127.0.0.1"])

    def answer() -> None:
        while stream := take():
            with stream:
                stream.recv(1)
                stream.sendall(b"HTTP/1.1 502 Bad Gateway\r\n\r\n")

    def take() -> socket.socket | None:
        try:
            return listener.accept()[0]
        except OSError:
            return None

    with socket.create_server(("127.0.0.1", 0)) as listener, running([answer]):
        try:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            with pytest.raises(
                ConfigError, match=r"expected a server at .* within 0 s, got: the server answers w"
            ):
                take_part(attaching(address, (tmp_path / "ca.pem").read_bytes(), patience=0.0))
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def test_a_server_that_is_not_there_or_refuses(hubs: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected a server at 127.0.0.1:1 within 0.2 s, got"):
        take_part(attaching("127.0.0.1:1", None, patience=0.2))
    hub = hubs(Register(("south",), 1))
    with pytest.raises(ConfigError, match="the server refused: expected one of the run's silos"):
        take_part(attaching(hub.address, None, patience=0.0))


def test_patience_is_for_the_time_without_a_stream(
    hubs: Any, make_graph: Callable[..., Any], cut_block: Callable[..., Any]
) -> None:
    """A silo whose stream was there for longer than that attaches again."""
    hub, failed = hubs(Register(None, 1)), list[str]()
    silo = attaching(hub.address, None, patience=0.5)
    block, _ = cut_block(make_graph(20), 1)
    silo = replace(silo, make_worker=lambda token: worker_of(block, None, {}))

    def attend() -> None:
        with pytest.raises(ConfigError) as failure:
            take_part(silo)
        failed.append(str(failure.value))

    with running([attend]):
        first = joined(hub)
        time.sleep(1.0)
        first.link.close()
        joined(hub)
        hub.close()
    assert "within 0.5 s, got: " in failed[0]


def test_plaintext_stays_on_this_machine() -> None:
    for host in ("10.0.0.1", "example.org", "0.0.0.0", "::"):
        assert not is_loopback(host)
        with pytest.raises(ConfigError, match=f"expected TLS to {host}, got --insecure"):
            check_plaintext(host)
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        check_plaintext(host)
    with pytest.raises(ConfigError, match=r"expected TLS to 10.0.0.1"):
        take_part(attaching("10.0.0.1:5", None, patience=0.0))


@pytest.mark.parametrize("text", ["nowhere", ":5", "a:", "a:b", "a:-1", "a:٣"])
def test_what_is_no_address(text: str) -> None:
    with raises_code(ConfigError, "option-value", option="server", got=text):
        split_address(text, "server")


@pytest.mark.parametrize("port", ["65536", "99999", "9" * 5000])
def test_a_port_that_is_none(port: str) -> None:
    with raises_code(ConfigError, "option-value", option="listen"):
        split_address(f"localhost:{port}", "listen")
    assert split_address("localhost:65535", "listen") == ("localhost", 65535)


def test_keys_are_for_their_owner_only(tmp_path: Path) -> None:
    made = SiloKey.load(tmp_path / "a" / "key.pem")
    assert (tmp_path / "a" / "key.pem").stat().st_mode & 0o777 == 0o600
    assert SiloKey.load(tmp_path / "a" / "key.pem").public == made.public
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "north.pub").write_bytes((tmp_path / "a" / "key.pub").read_bytes())
    assert read_keys(tmp_path / "keys") == {"north": made.public}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"expected lines NAME KEY in .*keys.txt, got none"),
        ("north", r"keys.txt, line 1: expected NAME KEY as silograph silo --make-key prints it, "),
        ("\nnorth abc", r"keys.txt, line 2: expected NAME KEY .*, got 'north abc'"),
        (f"../x {'0' * 64}", "expected a silo's name of up to 64 letters"),
        (f"a {'0' * 64}\na {'1' * 64}", "line 2: expected each silo once, got a again"),
        (f"a {'0' * 64}\nb {'0' * 64}", "expected a key of its own for each silo .* for a and b"),
        (b"\xff", r"keys: expected a file or folder at .*keys.txt, got: no text"),
    ],
)
def test_what_is_no_file_of_keys(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = tmp_path / "keys.txt"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError, match=message):
        read_keys(path)


def test_what_is_no_key(tmp_path: Path) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("no key")
    with pytest.raises(ConfigError, match=r"expected an Ed25519 key \(PEM\) in .*bad.pem"):
        SiloKey.load(bad)
    with pytest.raises(ConfigError, match=r"expected a silo's key at .*, got: Is a directory"):
        SiloKey.load(tmp_path)
    with raises_code(ConfigError, "missing-file"):
        read_keys(tmp_path)
    (tmp_path / "north.pub").write_text("no key")
    with pytest.raises(ConfigError, match=r"expected an Ed25519 public key \(PEM\) in .*north.pub"):
        read_keys(tmp_path)
    with raises_code(ConfigError, "unwritable-path", path="/proc/none/key.pem"):
        SiloKey.load(Path("/proc/none/key.pem"))
    with pytest.raises(ConfigError, match="expected a silo's name of up to 64 letters"):
        check_name("../x")


def test_certificates_are_never_written_over(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["localhost"])
    assert (tmp_path / "ca.key").stat().st_mode & 0o777 == 0o600
    with raises_code(ConfigError, "existing-output"):
        make_certificates(tmp_path, ["localhost"])
    with pytest.raises(ConfigError, match="expected the server's name or address, got 'ü'"):
        make_certificates(tmp_path / "b", ["ü"])


def test_the_packages_are_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises_code(ConfigError, "missing-package", package="grpc", extra="federation"):
        need_packages()


def test_what_others_say_is_one_printable_line() -> None:
    assert one_line("a\nb\x1b[31m" + "c" * 400) == "a b?[31m" + "c" * 292


def test_runs_that_come_to_nothing_do_not_fill_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server could give its run another name in each stream, and be shown the silo's hello."""

    class Ends:
        """A stream of another run that ends at once."""

        def __init__(self, channel: Any) -> None:
            pass

        def do_handshake(self, silo: Attaching) -> bytes:
            return os.urandom(16)

        def answer(self, worker: Responder, silo: Attaching) -> None:
            pass

        def close(self) -> None:
            pass

    monkeypatch.setattr("silograph.federation.session.attach._Stream", Ends)
    monkeypatch.setattr("silograph.federation.session.attach.MOST_RUNS", 5)
    monkeypatch.setattr("time.sleep", lambda _: None)
    made: list[bytes] = []

    def make(token: bytes) -> Responder:
        made.append(token)
        return Responder(token, {}, None, StateStore(), lambda _: None)  # type: ignore[arg-type]

    silo = Attaching("a", SiloKey.new(), {}, "127.0.0.1:1", None, make, 60.0, lambda _: None)
    with pytest.raises(ConfigError, match="got 5 that the silo could not agree to: start it again"):
        take_part(silo)
    assert len(made) == 6


@pytest.mark.parametrize("agreed", [True, False])
def test_a_silo_takes_part_in_the_run_that_it_has_agreed_to(
    monkeypatch: pytest.MonkeyPatch, make_graph: Any, cut_block: Any, agreed: bool
) -> None:
    """A server that is another run by now is refused once there is an agreement, not before."""
    block, _ = cut_block(make_graph(20), 1)
    tokens = [TOKEN, bytes(16)]
    workers = []

    def make(token: bytes) -> Responder:
        worker = worker_of(block, None, {})
        workers.append(worker)
        return worker

    class Ends:
        """A stream that ends after START, if it is sent at all."""

        def __init__(self, channel: Any) -> None:
            pass

        def do_handshake(self, silo: Attaching) -> bytes:
            if not tokens:
                raise ConfigError("the server refused: it is over")
            return tokens.pop(0)

        def answer(self, worker: Responder, silo: Attaching) -> None:
            if agreed:
                worker.answer(pack(Message(Type.START, TOKEN, 1, b"{}")))

        def close(self) -> None:
            pass

    monkeypatch.setattr("silograph.federation.session.attach._Stream", Ends)
    line = "expected the run that this silo has agreed to" if agreed else "it is over"
    with pytest.raises(ConfigError, match=line):
        take_part(replace(attaching("127.0.0.1:9", None, patience=5.0), make_worker=make))
    assert len(workers) == (1 if agreed else 2)


@pytest.mark.parametrize(
    ("told", "signed", "says"),
    [
        ("127.0.0.1", "127.0.0.1", None),
        ("evil.example.org", "evil.example.org", "expected a silo that attaches to s.exam"),
        ("127.0.0.1", "evil.example.org", "expected a signature of the silo's own key, got "),
        ("", "", "expected a silo that attaches to s.example.org, 127.0.0.1, got one that "),
        (None, "127.0.0.1", "expected a silo that attaches to s.example.org, "),
    ],
)
def test_a_challenge_that_is_handed_on_gets_nobody_in(
    hubs: Any, tmp_path: Path, told: str | None, signed: str, says: str | None
) -> None:
    """A silo signs the name by which it reaches its own server, which TLS has verified."""
    make_certificates(tmp_path, ["127.0.0.1", "s.example.org"])
    pair = (tmp_path / "server.pem").read_bytes(), (tmp_path / "server.key").read_bytes()
    hub, key, nonce = hubs(Register(None, 2), credentials=pair), SiloKey.new(), bytes(32)
    hello = {"name": "north", "key": key.public.hex(), "protocol": PROTOCOL}
    signature = key.sign(signed_text(TOKEN, nonce, "north", signed)).hex()
    reason = hub._refusal(hello, {"signature": signature, "host": told}, nonce)
    assert reason is None if says is None else str(reason).startswith(says)


@pytest.mark.parametrize(
    ("host", "hosts", "is_one"),
    [
        ("a.org", ("a.org",), True),
        ("A.org.", ("a.org",), True),
        ("x.a.org", ("*.a.org",), True),
        ("x.y.a.org", ("*.a.org",), False),
        ("a.org", ("*.org",), False),
        ("org", ("*.org", "*"), False),
        ("::1", ("::1",), True),
        ("0:0:0:0:0:0:0:1", ("::1",), True),
        ("127.0.0.2", ("127.0.0.1",), False),
        ("", ("a.org",), False),
        ("", (), True),
        ("a.org", (), False),
    ],
)
def test_which_hosts_a_certificate_stands_for(
    host: str, hosts: tuple[str, ...], is_one: bool
) -> None:
    assert is_host_of(host, hosts) is is_one


def test_names_of_a_certificate(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["s.example.org", "::1", "10.0.0.1"])
    found = hosts_of((tmp_path / "server.pem").read_bytes())
    assert found == ("s.example.org", "::1", "10.0.0.1")
    assert hosts_of((tmp_path / "ca.pem").read_bytes())[0].startswith("silograph trial authority")
