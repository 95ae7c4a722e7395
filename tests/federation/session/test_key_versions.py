"""Versions of a silo's key: who may follow whom, and what a file of keys may say."""

from pathlib import Path

import pytest

from mistakes import raises_code

pytest.importorskip("cryptography")

from silograph.core.errors import ConfigError
from silograph.federation.session.identity import Register, SiloKey, key_line
from silograph.federation.session.key_versions import (
    KeyVersion,
    own_version,
    read_key_versions,
    read_keys,
    read_revoked,
    rotate_key,
    succession_text,
    versions_file,
)


def key_at(path: Path) -> SiloKey:
    return SiloKey.load(path / "key.pem")


def test_each_version_is_signed_by_the_one_before(tmp_path: Path) -> None:
    file = tmp_path / "key.pem"
    first = key_at(tmp_path)
    assert own_version(file, "north", first.public) == KeyVersion("north", first.public)
    lines, keys = [key_line("north", first.public)], [first.public]
    for version in (2, 3):
        successor = rotate_key(file, "north")
        assert successor.version == version
        assert successor.public == key_at(tmp_path).public
        assert own_version(file, "north", successor.public) == successor
        lines.append(successor.line)
        keys.append(successor.public)
    (tmp_path / "keys.txt").write_text("\n".join(lines))
    versions = read_key_versions(tmp_path / "keys.txt")["north"]
    assert [each.public for each in versions] == keys
    assert read_keys(tmp_path / "keys.txt") == {"north": keys[-1]}
    assert versions_file(file).read_text().splitlines() == lines
    assert file.stat().st_mode & 0o077 == 0
    assert file.with_suffix(".pub").read_bytes() == key_at(tmp_path).public_pem


def test_a_later_version_may_be_the_first_that_a_server_knows(tmp_path: Path) -> None:
    key_at(tmp_path)
    successor = rotate_key(tmp_path / "key.pem", "north")
    (tmp_path / "keys.txt").write_text(successor.line)
    assert read_keys(tmp_path / "keys.txt") == {"north": successor.public}


@pytest.mark.parametrize("fault", ["another signer", "another name", "a version is missing"])
def test_a_key_that_the_one_before_has_not_signed_is_refused(tmp_path: Path, fault: str) -> None:
    old, new, other = SiloKey.new(), SiloKey.new(), SiloKey.new()
    version = 3 if fault == "a version is missing" else 2
    signer = other if fault == "another signer" else old
    signed_name = "south" if fault == "another name" else "north"
    text = succession_text(signed_name, version, new.public)
    line = KeyVersion("north", new.public, version, signer.sign(text)).line
    (tmp_path / "keys.txt").write_text(f"{key_line('north', old.public)}\n{line}\n")
    with raises_code(ConfigError, "wrong-format"):
        read_keys(tmp_path / "keys.txt")


@pytest.mark.parametrize("step", ["write_atomic", "os.replace"])
def test_a_rotation_that_is_broken_off_can_be_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    file, before = tmp_path / "key.pem", key_at(tmp_path)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(f"silograph.federation.session.key_versions.{step}", fail)
        with raises_code(ConfigError, "unwritable-path"):
            rotate_key(file, "north")
    assert key_at(tmp_path).public == before.public
    assert own_version(file, "north", before.public).version == 1
    successor = rotate_key(file, "north")
    assert successor.version == 2
    assert successor.is_successor_of(KeyVersion("north", before.public))


def test_there_is_a_key_to_replace(tmp_path: Path) -> None:
    with raises_code(ConfigError, "missing-file"):
        rotate_key(tmp_path / "key.pem", "north")
    made = key_at(tmp_path)
    versions_file(tmp_path / "key.pem").write_text(key_line("north", SiloKey.new().public))
    with raises_code(ConfigError, "wrong-format"):
        own_version(tmp_path / "key.pem", "north", made.public)


def test_a_list_of_revoked_keys(tmp_path: Path) -> None:
    one, two = SiloKey.new().public, SiloKey.new().public
    path = tmp_path / "revoked.txt"
    path.write_text(f"# stolen in May\n{one.hex()}\n\n{key_line('south', two)}\n")
    assert read_revoked(path) == {one, two}
    path.write_text("")
    assert read_revoked(path) == frozenset()
    path.write_text("north")
    with raises_code(ConfigError, "wrong-format"):
        read_revoked(path)


def test_a_register_knows_which_keys_may_go_on() -> None:
    old, new, other = (SiloKey.new().public for _ in range(3))
    register = Register(None, 2, {"a": old, "b": other})
    assert register.refusal("a", old) is None
    register.update({"a": new}, frozenset())
    assert not register.is_current("a", old)
    assert register.is_current("b", other)  # lines that are missing change nothing
    assert "registered with" in (register.refusal("a", old) or "")
    assert register.refusal("a", new) is None
    register.update({}, frozenset({new}))
    assert not register.is_current("a", new)
    assert "revoked" in (register.refusal("a", new) or "")
