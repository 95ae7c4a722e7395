"""Laws of ranges: text and back, and every mistake in one line."""

import dataclasses

import pytest

from silograph.core.config import RunConfig, make_config
from silograph.core.errors import ConfigError
from silograph.core.setting_values import Range, choice, declared, lin, log, parse_range
from silograph.experiment.resolve.resolve import choose
from silograph.methods import METHODS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.001:0.3:log", log(0.001, 0.3)),
        ("0:0.8", lin(0, 0.8)),
        ("1:5:lin", lin(1, 5)),
        ("16, 64,256", choice(16, 64, 256)),
        ("gcn,sage", choice("gcn", "sage")),
        ("true,false", choice(True, False)),
        ('"10","5"', choice("10", "5")),
        ('"10,5", 5,x', choice("10,5", 5, "x")),
        ("gcn,mine.py:Net", choice("gcn", "mine.py:Net")),
        ('"true",true', choice("true", True)),
        ('" a","b\\u0022,c\\\\"', choice(" a", 'b",c\\')),
    ],
)
def test_text_and_back(text: str, expected: Range) -> None:
    assert parse_range(text) == expected
    assert parse_range(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5", "with choices that differ, got '5'"),
        ("", "with choices that differ, got ''"),
        ("1,1", "with choices that differ, got '1,1'"),
        ("a:b", "expected a range LOW:HIGH, LOW:HIGH:log or A,B,C, got 'a:b'"),
        ("true:false", "got 'true:false'"),
        ("1:2:3", "got '1:2:3'"),
        ("1:2:log:x", "got '1:2:log:x'"),
        ("2:1", "expected a range with LOW < HIGH"),
        ("0:1:log", "expected a range with LOW < HIGH"),
    ],
)
def test_mistakes(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_range(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("method", METHODS)
def test_declared_ranges_are_allowed(method: str) -> None:
    """Every config takes the ends of what its fields declare."""
    fields = {f.name: f for f in dataclasses.fields(RunConfig)}
    assert {"lr", "weight_decay", "dropout", "local_epochs", "hidden"} <= declared(fields).keys()
    for name, values in declared(fields).items():
        for value in values.ends:
            make_config({"method": method, name: value})
    options = {f.name: f for f in dataclasses.fields(METHODS[method].options)}
    for name, values in declared(options).items():
        for value in values.ends:
            choose(RunConfig(method=method, options={name: value}))
