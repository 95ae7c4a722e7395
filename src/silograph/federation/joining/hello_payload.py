"""A silo's hello as fields of a frame, and what of a frame can be one, whoever sent it."""

import json
import math
from dataclasses import asdict
from typing import get_args

import numpy as np
import torch

from silograph.core.errors import ProtocolError
from silograph.core.payload import Field, Payload, Ragged
from silograph.federation.joining.edge_tags import TAG_BYTES
from silograph.federation.joining.matching import Hello, SiloFacts
from silograph.graph.graph import LabelForm


def to_payload(said: Hello) -> Payload:
    """Return a hello as fields of one client, ready for a frame."""
    about = {"name": said.name, "others": said.others, **asdict(said.facts)}
    if said.facts.scale is None:  # a silo without ratings sends no byte for it
        del about["scale"]
    if not said.facts.weighted:  # nor does one without weights of edges
        del about["weighted"]
    fields = {
        "about": np.frombuffer(json.dumps(about).encode(), dtype=np.uint8),
        **{name: getattr(said, name) for name in _ARRAYS},
    }
    return {
        name: Ragged(torch.from_numpy(a.copy()), torch.tensor([0, len(a)]))
        for name, a in fields.items()
    }


def from_payload(payload: Payload) -> Hello:
    """Return the hello that `to_payload` made fields of.

    Raises:
        ProtocolError: these are no such fields.
    """
    try:
        arrays = {name: _array(payload[name]) for name in ("about", *_ARRAYS)}
        about = json.loads(arrays.pop("about").tobytes().decode())
        name, others = about.pop("name"), tuple(about.pop("others"))
        for key in {"feature_names", "class_names", "scale"} & about.keys():
            about[key] = tuple(about[key])
        said = Hello(name, SiloFacts(**about), others, **arrays)
        _check(said)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"expected the hello of a silo, got fields without: {error}") from None
    return said


_ARRAYS = ("slot_other", "slot_tag", "row", "row_other", "row_tag", "edge_other", "edge_tag")


def _array(field: Field) -> np.ndarray:
    if not isinstance(field, Ragged):
        raise TypeError("rows")
    array: np.ndarray = field.t.numpy()
    return array


def _check(said: Hello) -> None:
    """Raise `ValueError` where arrays of a hello cannot belong together."""
    words = (said.name, *said.others, *said.facts.feature_names, *said.facts.class_names)
    if not all(isinstance(word, str) for word in words) or said.name in said.others:
        raise ValueError("names")
    if said.facts.task not in get_args(LabelForm) or type(said.facts.sparse) is not bool:
        raise ValueError("task and sparse")
    if type(said.facts.weighted) is not bool:
        raise ValueError("whether edges have weights")
    numbers = (said.facts.features, said.facts.num_classes)
    if not all(type(number) is int and number >= 0 for number in numbers) or not numbers[1]:
        raise ValueError("sizes")
    if len(said.facts.feature_names) not in (0, said.facts.features):
        raise ValueError("a name for each feature")
    _check_scale(said.facts)
    for other, tag in (
        (said.slot_other, said.slot_tag),
        (said.row_other, said.row_tag),
        (said.edge_other, said.edge_tag),
    ):
        right = other.dtype == np.int64 and tag.dtype == np.uint8
        if not right or tag.shape != (len(other), TAG_BYTES) or other.ndim != 1:
            raise ValueError("tags of 16 bytes")
        if len(other) and (other.min() < 0 or other.max() >= len(said.others)):
            raise ValueError("silos that edges lead to")
    step = np.diff(said.row, prepend=-1)
    if (
        said.row.dtype != np.int64
        or said.row.shape != said.row_other.shape
        or (len(step) and (step.min() < 0 or step.max() > 1))
    ):
        raise ValueError("boundary rows")


def _check_scale(facts: SiloFacts) -> None:
    """Raise `ValueError` unless a scale, which only silos with ratings have, can be one."""
    low, high = facts.scale or (0, 1)
    numbers = all(type(end) in (int, float) for end in (low, high))
    if (
        (facts.scale and facts.task != "rating")
        or not numbers
        or not -math.inf < low < high < math.inf
    ):
        raise ValueError("a least and a largest rating")
