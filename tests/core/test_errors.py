"""Laws of the error tree and of names that no table holds."""

from types import SimpleNamespace

import pytest

from silograph.core.errors import (
    ConfigError,
    DataError,
    PartitionError,
    ProtocolError,
    SilographError,
    install_command,
    lookup,
    unknown,
)


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (ConfigError, ValueError),
        (DataError, ValueError),
        (PartitionError, ValueError),
        (ProtocolError, RuntimeError),
    ],
)
def test_every_error_is_caught_by_the_root_and_by_its_builtin(
    kind: type[Exception], builtin: type[Exception]
) -> None:
    assert issubclass(kind, SilographError)
    assert issubclass(kind, builtin)


@pytest.mark.parametrize(
    ("got", "message"),
    [
        # One edit away, in another case, and with nothing near: no guess is better than a bad one.
        ("fedavgg", "unknown method 'fedavgg': did you mean 'fedavg'?"),
        ("FedAvg", "unknown method 'FedAvg': did you mean 'fedavg'?"),
        ("zzz", "unknown method 'zzz'; choices: fedavg, local"),
        ("", "unknown method ''; choices: fedavg, local"),
        ("a\nb", "unknown method 'a\\nb'; choices: fedavg, local"),
    ],
)
def test_an_unknown_name_is_told_with_the_nearest_one(got: str, message: str) -> None:
    error = unknown("method", got, ["local", "fedavg"])
    assert isinstance(error, ConfigError)
    assert str(error) == message


@pytest.mark.parametrize(
    ("got", "meant"),
    [
        ("gnc", "'gcn'"),  # swapped letters, not another one
        ("GCFL+", "'gcflplus'"),  # as papers write it
        ("user-di", "'user-id'"),
        ("acc", "'accuracy'"),  # the beginning of a name, and of what begins with that
        ("fed", None),  # of several
    ],
)
def test_the_nearest_name_is_that_which_was_meant(got: str, meant: str | None) -> None:
    known = ["gcn", "gin", "auc", "accuracy", "accuracy_of_all", "fedproximal", "fedaveraging"]
    known += ["gcfl", "gcflplus", "user", "user-id"]
    said = str(unknown("x", got, known))
    assert f"did you mean {meant}?" in said if meant else "did you mean" not in said


def test_choices_do_not_depend_on_their_order() -> None:
    names = ["gcn", "sage", "mlp"]
    assert str(unknown("x", "gcm", names)) == str(unknown("x", "gcm", reversed(names)))


def test_lookup_returns_the_entry_itself() -> None:
    entry = object()
    assert lookup({"a": entry, "b": object()}, "a", "thing") is entry


def test_lookup_of_an_unknown_name_hides_the_key_error() -> None:
    with pytest.raises(ConfigError, match=r"^unknown thing 'gcm': did you mean 'gcn'\?") as caught:
        lookup({"gcn": 1, "mlp": 2}, "gcm", "thing")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_numbers_are_alike_whatever_zeros_are_in_front() -> None:
    clients = [f"client_{number:02}" for number in range(12)]
    for got, meant in (("client_0", "client_00"), ("client_1", "client_01"), ("Client_011", 11)):
        meant = meant if isinstance(meant, str) else f"client_{meant}"
        assert str(unknown("client", got, clients)) == (
            f"unknown client {got!r}: did you mean {meant!r}?"
        )


def test_choices_do_not_bury_the_nearest() -> None:
    names = ["name03", "name04"]
    assert str(unknown("x", "nam03", names)) == "unknown x 'nam03': did you mean 'name03'?"
    assert str(unknown("x", "qqq", names)) == "unknown x 'qqq'; choices: name03, name04"


@pytest.mark.parametrize(
    ("record", "command"),
    [
        (None, "pip install 'silograph[fast]'"),
        ("{", "pip install 'silograph[fast]'"),
        ("[]", "pip install 'silograph[fast]'"),
        (
            '{"vcs_info": {"vcs": "git", "commit_id": "1f0c"}, "url": "https://example.org/s.git"}',
            "pip install 'silograph[fast] @ git+https://example.org/s.git@1f0c'",
        ),
        (
            '{"dir_info": {"editable": true}, "url": "file:///my%20code"}',
            "pip install -e '/my code[fast]'",
        ),
        (
            '{"dir_info": {"editable": true}, "url": "file:///my%20code/silograph"}',
            "pip install -e '/my code/silograph[fast]'",
        ),
        ('{"dir_info": {}, "url": "file:///silograph"}', "pip install '/silograph[fast]'"),
        (
            '{"archive_info": {}, "url": "file:///silograph-1-py3-none-any.whl"}',
            "pip install '/silograph-1-py3-none-any.whl[fast]'",
        ),
        (
            '{"url": "https://example.org/silograph-1.whl"}',
            "pip install 'silograph[fast] @ https://example.org/silograph-1.whl'",
        ),
    ],
)
def test_extras_are_installed_from_where_silograph_is(
    monkeypatch: pytest.MonkeyPatch, record: str | None, command: str
) -> None:
    distribution = SimpleNamespace(read_text=lambda _: record)
    monkeypatch.setattr("importlib.metadata.distribution", lambda _: distribution)
    assert install_command("fast") == command
