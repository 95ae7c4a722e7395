"""Settings that users write as text, and their parsers.

Numbers of bytes, clients' speeds, ranges of options, schedules of the learning rate, scales of
ratings, least counts behind a row, forms of sent weights, widths of layers, and missing values.
"""

import csv
import json
import math
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic_core import PydanticCustomError

from silograph.core.errors import ConfigError, mistake
from silograph.core.files import check_regular

UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_bytes(value: Any) -> Any:
    """Return the number of bytes of a text such as `10MB`; other values are returned unchanged.

    >>> parse_bytes("10MB"), parse_bytes("1.5 kB"), parse_bytes(7)
    (10000000, 1500, 7)
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?(B|kB|MB|GB|)", value.strip())
    if match is None:
        raise PydanticCustomError(
            "bytes", "expected a number of bytes, or of kB, MB or GB such as 10MB"
        )
    return int(Decimal(match[1]) * UNITS[match[2]])  # decimal, so that 0.3 kB is 300


# --- Speeds and links of clients as users write them; nothing here needs torch -------------------


EQUAL, LOGNORMAL = "equal", "lognormal"
DEFAULT_LINKS = "10:0.05"


def parse_speeds(text: str) -> tuple[float, ...] | None:
    """Return speeds in 10^9 operations a second, which clients have in turn; None: drawn.

    >>> parse_speeds("equal"), parse_speeds("1,2,4"), parse_speeds("lognormal")
    ((1.0,), (1.0, 2.0, 4.0), None)

    Raises:
        ConfigError: another form, or a speed that is not above 0.
    """
    if text in (EQUAL, LOGNORMAL):
        return (1.0,) if text == EQUAL else None
    speeds = tuple(_number(part) for part in text.split(","))
    if not all(speed > 0 for speed in speeds):
        raise ConfigError(
            f"speeds: expected equal, lognormal, or numbers above 0 of 10^9 operations a second "
            f"such as 1,2,4, got {text!r}",
            **mistake("option-value", "speeds", text),
        )
    return speeds


def parse_links(text: str) -> tuple[tuple[float, float], ...]:
    """Return MB/s and seconds of latency for each call, which clients have in turn.

    >>> parse_links("10:0.05,0.5:0.2")
    ((10.0, 0.05), (0.5, 0.2))

    Raises:
        ConfigError: another form, no bandwidth above 0, or a latency below 0.
    """
    links = []
    for part in text.split(","):
        rate, colon, latency = part.partition(":")
        link = _number(rate), _number(latency)
        if not colon or not link[0] > 0 or not link[1] >= 0:
            raise ConfigError(
                f"links: expected MB/s:SECONDS of latency for each call, such as 10:0.05 or "
                f"10:0.05,0.5:0.2, got {text!r}",
                **mistake("option-value", "links", text),
            )
        links.append(link)
    return tuple(links)


def _number(text: str) -> float:
    """Return a finite number, NaN where the text is none."""
    try:
        number = float(text)
    except ValueError:
        return math.nan
    return number if math.isfinite(number) else math.nan


# --- ranges --------------------------------------------------------------------------------------
# Ranges of values that tuning tries: declared beside the fields of configs, or given as text.


Scalar = bool | int | float | str
BETWEEN_CHOICES = re.compile(r',(?=(?:[^"]*"[^"]*")*[^"]*$)')  # commas that no quotes enclose


@dataclass(frozen=True)
class Range:
    """Values to try.

    Attributes:
        kind: `lin` or `log` between `low` and `high`, both included; or one of `choices`.
        low: whole numbers are tried where both ends are whole.
        high: above `low`.
        choices: at least two.
    """

    kind: Literal["lin", "log", "choice"]
    low: float = 0
    high: float = 0
    choices: tuple[Scalar, ...] = ()

    def __str__(self) -> str:
        """Return the text that `parse_range` reads."""
        if self.kind == "choice":
            return ",".join(map(_text, self.choices))
        return f"{self.low}:{self.high}" + (":log" if self.kind == "log" else "")

    @property
    def ends(self) -> tuple[Scalar, ...]:
        """Return the values that a config must take if it takes all."""
        return self.choices or (self.low, self.high)


def lin(low: float, high: float) -> Range:
    """Return a range in which every value is as likely."""
    return Range("lin", low, high)


def log(low: float, high: float) -> Range:
    """Return a range in which every order of magnitude is as likely."""
    return Range("log", low, high)


def choice(*values: Scalar) -> Range:
    """Return a range of single values."""
    return Range("choice", choices=values)


def parse_range(text: str) -> Range:
    """Return the range of `LOW:HIGH`, `LOW:HIGH:log` or `A,B,C`; quotes keep a choice together.

    >>> parse_range("0.001:0.3:log"), parse_range("gcn,sage").choices
    (Range(kind='log', low=0.001, high=0.3, choices=()), ('gcn', 'sage'))
    >>> parse_range('"10,5",5').choices
    ('10,5', 5)

    Raises:
        ConfigError: another form, ends in the wrong order, or fewer than two choices.
    """
    form = "LOW:HIGH, LOW:HIGH:log or A,B,C"
    words = BETWEEN_CHOICES.split(text)
    if len(words) > 1 or ":" not in text:
        values = tuple(_value(word.strip()) for word in words)
        if len(values) < 2 or len(set(values)) < len(values) or "" in values:
            raise ConfigError(f"expected a range {form} with choices that differ, got {text!r}")
        return choice(*values)
    low, high, *scale = text.split(":")
    ends = _value(low.strip()), _value(high.strip())
    numbers = [end for end in ends if isinstance(end, int | float) and not isinstance(end, bool)]
    if len(numbers) < 2 or scale not in ([], ["log"], ["lin"]):
        raise ConfigError(f"expected a range {form}, got {text!r}")
    if not numbers[0] < numbers[1] or (scale == ["log"] and numbers[0] <= 0):
        raise ConfigError(f"expected a range with LOW < HIGH (log: LOW > 0), got {text!r}")
    return Range("log" if scale == ["log"] else "lin", numbers[0], numbers[1])


def _text(value: Scalar) -> str:
    """Return a choice as `parse_range` reads it: in quotes where it would be something else."""
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    plain = not isinstance(value, str) or (_value(text) == text == text.strip())
    if plain and not set(text) & set(',"'):
        return text
    # A quote inside as its code, so that commas are told apart by counting quotes.
    parts = (json.dumps(part, ensure_ascii=False)[1:-1] for part in text.split('"'))
    return '"' + "\\u0022".join(parts) + '"'


def _value(text: str) -> Any:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value if isinstance(value, Scalar) else text


def declared(fields: Mapping[str, Any]) -> dict[str, Range]:
    """Return the ranges in the metadata of dataclass fields, by name."""
    return {name: f.metadata["tune"] for name, f in fields.items() if f.metadata.get("tune")}


# --- How the clients' learning rate changes over rounds; nothing here needs torch ----------------
#
# A rate is a pure function of the number of the round and the config, so it is the same on every
# engine and after a resume. Each form is that of `torch.optim.lr_scheduler`, a round for an epoch.


@dataclass(frozen=True)
class RateSchedule:
    """A factor of the learning rate for each round.

    Rounds 1 to W warm up: round t has t / W of the rate. After them, with s = t - W - 1:

        constant    1
        step        factor^floor(s / every)                (torch: StepLR)
        cosine      (1 + cos(pi s / (rounds - W))) / 2     (torch: CosineAnnealingLR to 0)

    Attributes:
        form: one of the above.
        rounds: of the run.
        warmup: W.
        every: rounds between steps.
        factor: of each step.
    """

    form: Literal["constant", "step", "cosine"] = "constant"
    rounds: int = 1
    warmup: int = 0
    every: int = 1
    factor: float = 1.0

    def at(self, t: int) -> float:
        """Return the factor of round t, from 1; what is done before round 1 has that of round 1."""
        t = max(t, 1)
        if t <= self.warmup:
            return t / self.warmup
        s = t - self.warmup - 1
        if self.form == "step":
            return float(self.factor ** (s // self.every))
        if self.form == "cosine":
            return (1 + math.cos(math.pi * s / (self.rounds - self.warmup))) / 2
        return 1.0


CONSTANT = RateSchedule()


def parse_rate_schedule(text: str, rounds: int, warmup: int) -> RateSchedule:
    """Return the schedule of a run.

    >>> parse_rate_schedule("step:30:0.1", 100, 5)
    RateSchedule(form='step', rounds=100, warmup=5, every=30, factor=0.1)

    Args:
        text: constant, cosine, or step:ROUNDS:FACTOR.
        rounds: of the run.
        warmup: rounds in which the rate rises.

    Raises:
        ConfigError: another form, or rounds of warm-up after which no round is left.
    """
    if warmup >= rounds and warmup:
        raise ConfigError(
            f"expected fewer rounds of warm-up than rounds, got warmup_rounds={warmup} with "
            f"rounds={rounds}",
            **mistake("option-value", "warmup_rounds", warmup),
        )
    if text == "constant":
        return RateSchedule("constant", rounds, warmup)
    if text == "cosine":
        return RateSchedule("cosine", rounds, warmup)
    name, *parts = text.split(":")
    step_rounds, factor = (_number(part) for part in parts) if len(parts) == 2 else (0.0, 0.0)
    if (
        name != "step"
        or not (step_rounds >= 1 and step_rounds == int(step_rounds))
        or not 0 < factor <= 1
    ):
        raise ConfigError(
            f"expected lr_schedule constant, cosine, or step:ROUNDS:FACTOR with a factor above 0 "
            f"and at most 1 such as step:30:0.1, got {text!r}",
            **mistake("option-value", "lr_schedule", text),
        )
    return RateSchedule("step", rounds, warmup, int(step_rounds), factor)


# --- The scale of a table of ratings as one text, as the command line and run files have it ------


def parse_rating_scale(value: Any) -> str | None:
    """Return the least and the largest rating as a text; None for None.

    >>> parse_rating_scale("0.5, 5"), parse_rating_scale((1, 10))
    ('0.5,5.0', '1.0,10.0')
    """
    if value is None:
        return None
    words = value.split(",") if isinstance(value, str) else value
    try:
        low, high = map(float, words if isinstance(words, list | tuple) else ())
    except (TypeError, ValueError, OverflowError):
        low = high = math.nan
    if not -math.inf < low < high < math.inf:
        raise PydanticCustomError(
            "rating_scale", "expected the least and the largest rating, such as 0.5,5"
        )
    return f"{low!r},{high!r}"


def ends_of(scale: str | None) -> tuple[float, float] | None:
    """Return the least and the largest rating of a parsed text; None for None."""
    if scale is None:
        return None
    low, _, high = scale.partition(",")
    return float(low), float(high)


# --- `RowMinimum`: how many nodes and silos must contribute to a row that silos exchange ---------


@dataclass(frozen=True)
class RowMinimum:
    """The least number of contributors to each exchanged row; rows with fewer are left out.

    Attributes:
        nodes: own nodes that a silo's row sums over, which that silo enforces.
        silos: silos whose rows a sum adds up. The server enforces it, and a silo cannot check it;
            of masked rows each silo enforces it.
        rows_are_masked: whether silos mask what they send for a sum, so that the server cannot read
            it (`silograph.exchange.masked_sums`).
    """

    nodes: int = 1
    silos: int = 1
    rows_are_masked: bool = False

    @property
    def limits(self) -> bool:
        """Whether rows can be left out."""
        return self.nodes > 1 or self.silos > 1

    @property
    def names_slots(self) -> bool:
        """Whether silos say which rows they send, because they leave some out.

        Of masked rows these are the ones with too few silos, which all contributors know. In place
        of those with too few nodes they send zeros.
        """
        return (self.silos if self.rows_are_masked else self.nodes) > 1

    @property
    def counts_left_out(self) -> bool:
        """Whether silos say how many rows they leave out, or replace by zeros."""
        return self.nodes > 1 or self.names_slots


NO_MINIMUM = RowMinimum()


# --- Encoding of weights between the server and clients ------------------------------------------


@dataclass(frozen=True)
class SentWeights:
    """How weights are encoded.

    Attributes:
        numbers: `exact`: in the run's floating point numbers. `float16`, `int8`, `int4`: matrices
            in these; int8 and int4 (two in a byte) have a scale for each row. Clients send by how
            much they have changed, with what was rounded off before (error feedback).
        rows: of the first weights: `all`, or `used`: only those of features that occur at a client.
    """

    numbers: Literal["exact", "float16", "int8", "int4"] = "exact"
    rows: Literal["all", "used"] = "all"

    @cached_property
    def plain(self) -> bool:
        """Whether weights are sent whole and exactly."""
        return self == PLAIN_WEIGHTS


PLAIN_WEIGHTS = SentWeights()


# --- Widths of hidden layers as users write them: one for all, or one for each -------------------


LAYERS = 2  # default number of layers with weights
HIDDEN = 128  # default width of the hidden layers
MOST_LAYERS = 1000  # of a list of widths
MOST_DIGITS = 18


def parse_workers(value: Any) -> Any:
    """Return a number of workers, or `auto`.

    >>> parse_workers("4"), parse_workers("auto")
    (4, 'auto')
    """
    if value is None or value == "auto":
        return value
    if not re.fullmatch(r"0*[1-9][0-9]{0,3}", str(value)):
        raise PydanticCustomError("workers", "expected a number from 1 to 9999, or auto")
    return int(value)


def parse_widths(value: Any) -> Any:
    """Return a number, the width of all hidden layers, or a text that has one for each.

    >>> parse_widths("64"), parse_widths([256, 128]), parse_widths("256, 128"), parse_widths([64])
    (64, '256,128', '256,128', '64,')
    """
    if value is None:
        return None
    if isinstance(value, list | tuple):
        value = ",".join(str(width) for width in value[: MOST_LAYERS + 1]) + "," * (len(value) == 1)
    if isinstance(value, int) and 1 <= value < 10**MOST_DIGITS:
        return value
    words = [word.strip() for word in str(value).split(",", MOST_LAYERS + 1)]
    one = len(words) == 1
    if len(words) > 1 and not words[-1]:  # a list of one ends with a comma
        words.pop()
    if len(words) > MOST_LAYERS or not all(
        re.fullmatch(rf"0*[1-9][0-9]{{0,{MOST_DIGITS - 1}}}", word) for word in words
    ):
        raise PydanticCustomError(
            "widths", "expected a width of 1 or more, or one for each hidden layer such as 256,128"
        )
    widths = [int(word) for word in words]
    if one:
        return widths[0]
    return ",".join(str(width) for width in widths) + "," * (len(widths) == 1)


def shortest(hidden: int | str | None) -> int | str:
    """Return hidden widths, written as one width where all are equal: that is the same model.

    >>> shortest("64,64"), shortest("64,"), shortest("64,32"), shortest(None)
    (64, 64, '64,32', 128)
    """
    if hidden is None:
        return HIDDEN
    widths = {hidden} if isinstance(hidden, int) else set(_split_widths(hidden))
    return widths.pop() if len(widths) == 1 else hidden


def num_layers(hidden: int | str | None, layers: int | None) -> int:
    """Return the number of layers with weights; a list of hidden widths has one less.

    Raises:
        ConfigError: both say it, and differ.
    """
    if hidden is None or isinstance(hidden, int):
        return LAYERS if layers is None else layers
    count = len(_split_widths(hidden)) + 1
    if layers is not None and layers != count:
        raise ConfigError(
            f"expected {count} layers with hidden={hidden}, got {layers}: leave layers out, or "
            "give one width for all",
            **mistake("conflicting-options", ["layers", "hidden"]),
        )
    return count


def hidden_widths(hidden: int | str | None, layers: int | None) -> tuple[int, ...]:
    """Return the width of every hidden layer.

    Raises:
        ConfigError: not as many as the layers need.
    """
    count, hidden = num_layers(hidden, layers), HIDDEN if hidden is None else hidden
    return (hidden,) * (count - 1) if isinstance(hidden, int) else _split_widths(hidden)


def _split_widths(hidden: str) -> tuple[int, ...]:
    return tuple(int(width) for width in hidden.split(",") if width)


# --- Declared missing values: words and numbers, or one text as the command line has them --------


def parse_na_values(value: Any) -> Any:
    """Return words and numbers as one text, from which `na_words` makes them; else the value.

    >>> parse_na_values([-999, "unknown"]), parse_na_values(["no, thanks"])
    ('-999,unknown', '["no, thanks"]')
    """
    if not isinstance(value, list | tuple):
        return value
    if any(isinstance(v, bool) or not isinstance(v, str | int | float) for v in value):
        return value
    words = [str(word) for word in value]
    text = ",".join(words)
    return text if na_words(text) == words else json.dumps(words, ensure_ascii=False)


def na_words(values: str | Iterable[Any]) -> list[Any]:
    """Return the words of a text, with commas between them or as a JSON list; a list as it is.

    >>> na_words("-999,unknown"), na_words('["no, thanks"]'), na_words([-9])
    (['-999', 'unknown'], ['no, thanks'], [-9])
    """
    if not isinstance(values, str):
        return list(values)
    if values.startswith("["):
        try:
            words = json.loads(values)
        except ValueError:  # a word that begins so
            words = None
        if isinstance(words, list):
            return words
    return values.split(",")


# --- Weights of classes --------------------------------------------------------------------------

BALANCED = "balanced"


def parse_class_weight(value: Any) -> Any:
    """Return weights of classes as a JSON text, `balanced`, or None for `none`; else the value.

    >>> parse_class_weight({"fraud": 5, 0: 1}), parse_class_weight("none")
    ('{"fraud": 5.0, "0": 1.0}', None)

    Args:
        value: `balanced`, `none`, a mapping, its JSON text, or the path of a file of weights: TOML
            with lines `class = weight`, or CSV with columns class and weight.

    Raises:
        PydanticCustomError: a file that is missing or holds something else, or a weight that is not
            above 0.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if value is None or value == "none":
        return None
    if isinstance(value, str):
        if value == BALANCED:
            return value
        value = json_mapping(value) if value.startswith("{") else _weights_in(Path(value))
    if not isinstance(value, Mapping):
        return value
    weights: dict[str, float] = {}
    for name, weight in value.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 0 < weight <= MOST_WEIGHT:
            raise _class_weight_error(
                f"a weight above 0, at most {MOST_WEIGHT:g}, for class {name}, which has {weight!r}"
            )
        weights[str(name)] = float(weight)
    if not weights:
        raise _class_weight_error("the weight of a class, got none")
    return json.dumps(weights, ensure_ascii=False)


MOST_WEIGHT = 1e6  # of a class
MOST_BYTES = 10**6  # of a file of weights


def json_mapping(text: str) -> Any:
    """Return the mapping of a JSON text; the text where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _weights_in(path: Path) -> dict[str, Any]:
    """Return the weights of classes in a TOML or CSV file."""
    try:
        check_regular(path, "a file of weights of classes", ConfigError)
        text = path.read_bytes()[: MOST_BYTES + 1].decode()
    except (ConfigError, OSError, UnicodeDecodeError, ValueError):
        raise _class_weight_error(
            f"balanced, none, or a file of class = weight, got {str(path)!r}, which is no such file"
        ) from None
    if path.suffix == ".csv":
        rows = [row for row in csv.reader(text.splitlines()) if row]
        rows = rows[1:] if rows and [cell.strip() for cell in rows[0]] == CSV_COLUMNS else rows
        pairs = [(row[0], row[1]) if len(row) == 2 else ("", "") for row in rows]
        names = [name.strip() for name, _ in pairs]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise _class_weight_error(f"each class once in {path}, which has {twice!r} twice")
        return dict(zip(names, (_number_or_text(weight) for _, weight in pairs), strict=True))
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        raise _class_weight_error(
            f"lines class = weight in {path}, or CSV in a file that ends with .csv, got something "
            "else"
        ) from None


CSV_COLUMNS = ["class", "weight"]


def _number_or_text(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _class_weight_error(text: str) -> PydanticCustomError:
    return PydanticCustomError("class_weight", "expected {text}", {"text": text})
