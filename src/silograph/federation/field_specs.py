"""Specs of fields of messages and states: names, forms, dtypes, shapes, rows and values.

Specs are checked before an op sees a field, and before a reply leaves: nothing that came from
elsewhere reaches an op or a kernel unchecked.

C: clients.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from silograph.core.errors import ProtocolError, mistake
from silograph.core.payload import Field, Patched, Ragged, Shared, Stacked
from silograph.graph.block.block import ClientBlock, Route, table_rows
from silograph.graph.graph import label_form

NODES, JUDGED, SLOTS, BOUNDARY = "nodes", "judged", "slots", "boundary"
TABLE = "table"  # rows of the tables of a client with ratings
ONE = "one"  # a single row of each client
TRAIN, VAL, TEST = "train", "val", "test"  # nodes of a client by their use
ROWS, EDGES = "rows", "edges"  # of a client's graph, halo included: what its work is bounded by
Masking = Literal["", "key", "keys", "part", "sum", "sealed", "opened", "own", "halo"]
WORDS = {torch.float32: torch.int32, torch.float64: torch.int64}
MOST_EDGES = 2**40
MOST_NODES = 2**31 - 1  # of a client: counts of predictions are int32


@dataclass(frozen=True)
class FieldSpec:
    """What a field of a message or of a state must be.

    Attributes:
        form: `Shared`, `Stacked` or `Ragged`.
        shape: of the tensor if shared, of a client's slice, or of one row; None is any length.
        dtype: None is the run's floating point dtype.
        rows: how many rows each client has, for `Ragged`: NODES, JUDGED, SLOTS, BOUNDARY, TABLE or
            ONE of the client; as many as the field `own/NAME` of the same message has; as many as
            it marks as true, `marked/NAME`; or as many as `inbox/NAME` has, or `state/NAME` of the
            client.
        fewer: whether there may be fewer rows.
        low: least value; None is any.
        high: largest value; None is any.
        places_of: SLOTS or BOUNDARY: values are places among them, from 0, ascending.
        ascending: whether each client's values ascend, each once: numbers of rows, say.
        optional: of a state: whether clients may lack the field, as a call to some creates it.
        among: TRAIN, VAL or TEST: a number of such nodes, or several by class; where a class has
            more than one number it is their sum. No silo may report more than it has said to have.
        masking: what a silo does with the field where it masks rows that are summed
            (`silograph.federation.secure.row_masks`): it fills in its public `key`, reads the
            `keys` of all, masks its `part` of sums, or removes the rest of the masks from a `sum`.
            Of rows that are not summed it seals the key (`sealed`), opens those of others
            (`opened`), encrypts the `own` rows and decrypts those of its `halo`: these two are
            integers with the bits of values of the dtype.
    """

    form: type[Shared] | type[Stacked] | type[Ragged]
    shape: tuple[int | None, ...] = ()
    dtype: torch.dtype | None = None
    rows: str = ""
    fewer: bool = False
    low: float | None = None
    high: float | None = None
    places_of: str = ""
    ascending: bool = False
    optional: bool = False
    among: str = ""
    masking: Masking = ""


FieldSpecs = Mapping[str, FieldSpec]


def places(of: str) -> FieldSpec:
    """Return the spec of places (k,) int32 among a client's SLOTS or BOUNDARY."""
    return FieldSpec(Ragged, (), torch.int32, rows=of, fewer=True, places_of=of)


def exactly(value: float, dtype: torch.dtype = torch.int32) -> FieldSpec:
    """Return the spec of a number that the server can only send as it is."""
    return FieldSpec(Shared, (), dtype, low=value, high=value)


COUNT = FieldSpec(Stacked, (), torch.int64, low=0, high=MOST_NODES)
TRAINED = replace(COUNT, among=TRAIN)
LOSS = FieldSpec(Stacked)


@dataclass(frozen=True, eq=False)
class Extent:
    """What the rows and values of fields are measured by.

    Attributes:
        clients: C.
        dtype: of floating point values in the run.
        rows: of each client, by NODES, JUDGED, SLOTS, BOUNDARY, TABLE and ONE; what is not known is
            not there.
        nodes: of one client by TRAIN, VAL and TEST, as it reported once; what is not known is not
            there.
    """

    clients: int
    dtype: torch.dtype
    rows: Mapping[str, Sequence[int]]
    nodes: Mapping[str, int] = field(default_factory=dict)


def extent_of(block: ClientBlock) -> Extent:
    """Return the extent of a block's clients."""
    assert block.adj.values is not None  # blocks carry values of the run's dtype
    rows = {
        NODES: block.off.diff(),
        JUDGED: block.count(block.split.val | block.split.test),
        SLOTS: block.halo.off.diff(),
        BOUNDARY: block.halo.boundary_off.diff(),
        ONE: torch.ones(block.num_clients, dtype=torch.int64),
    }
    if label_form(block.y) == "rating":
        rows[TABLE] = table_rows(block)
    counts = {name: n.tolist() for name, n in rows.items()}
    return Extent(block.num_clients, block.adj.values.dtype, counts)


def extent_at_server(
    route: Route, client: int, dtype: torch.dtype, nodes: Mapping[str, int]
) -> Extent:
    """Return what the server knows of one client; `nodes`: as the client has reported them."""
    rows = {SLOTS: route.slot_off.diff(), BOUNDARY: route.boundary_off.diff()}
    counts = {name: [int(n[client])] for name, n in rows.items()}
    return Extent(1, dtype, counts | {ONE: [1]}, nodes)


def check_against(
    fields: Mapping[str, Field],
    specs: FieldSpecs,
    extent: Extent,
    where: str,
    *,
    others: Mapping[str, Mapping[str, Field]] | None = None,
    finite: bool = False,
    values: bool = True,
) -> None:
    """Raise `ProtocolError` unless fields satisfy their specs.

    Args:
        fields: of a message or a state.
        specs: by the same names.
        extent: of the clients that they belong to.
        where: what the fields belong to, for the message: `inbox of train`.
        others: what rows may be counted by besides: the `inbox` that a reply answers, the `state`
            of who gets a message.
        finite: whether NaN and infinity are refused.
        values: whether values are looked at; else shapes only.
    """
    missing = {n for n in specs.keys() - fields.keys() if not specs[n].optional}
    unknown = fields.keys() - specs.keys()
    if missing or unknown:
        what = f"{min(missing)!r}, got none" if missing else f"no field {min(unknown)!r}"
        raise ProtocolError(
            f"expected {what} in {where}",
            **mistake("field-out-of-bounds", min(missing or unknown), where),
        )
    others = {"own": fields, "marked": fields, **(others or {})}
    for name, spec in specs.items():
        if name not in fields:
            continue
        value = fields[name]
        problem = _shape_problem(value, spec, extent, others)
        if problem is None and values:
            problem = _value_problem(value, spec, extent, finite=finite)
        if problem:
            raise ProtocolError(
                f"expected {problem} for {name!r} in {where}",
                **mistake("field-out-of-bounds", name, where),
            )


def _shape_problem(
    value: Field, spec: FieldSpec, extent: Extent, others: Mapping[str, Mapping[str, Field]]
) -> str | None:
    """Return the expected and the actual type, dtype or shape, or None if the field is right."""
    if isinstance(value, Patched):  # travels whole: as slices of the base's shape
        value = Stacked(value.base[:1].expand(len(value.which), *value.base.shape[1:]))
    if type(value) is not spec.form:
        return f"a {spec.form.__name__} field, got {type(value).__name__}"
    t = value.t
    dtype = extent.dtype if spec.dtype is None else spec.dtype
    if spec.masking in ("own", "halo"):
        dtype = WORDS[dtype]
    clients = (extent.clients,) if isinstance(value, Stacked) else ()
    if t.dtype == dtype and t.shape == clients + spec.shape and not isinstance(value, Ragged):
        return None  # as nearly always: a message has up to twenty fields
    if t.dtype != dtype:
        return f"dtype {dtype}, got {t.dtype}"
    lead_dims = () if isinstance(value, Shared) else (len(t),)
    expected = (*lead_dims, *spec.shape)
    if t.dim() != len(expected) or any(
        w is not None and w != n for w, n in zip(expected, t.shape, strict=True)
    ):
        return f"shape {_shape(expected)}, got {_shape(tuple(t.shape))}"
    if isinstance(value, Stacked) and len(t) != extent.clients:
        return f"a slice for each of {extent.clients} clients, got {len(t)}"
    return _rows_problem(value, spec, extent, others) if isinstance(value, Ragged) else None


def _rows_problem(
    value: Ragged, spec: FieldSpec, extent: Extent, others: Mapping[str, Mapping[str, Field]]
) -> str | None:
    """Return the expected and the actual number of rows, or None if it is right."""
    ends = value.off.tolist()
    runs = [b - a for a, b in itertools.pairwise(ends)]
    if len(runs) != extent.clients or ends[0] != 0 or ends[-1] != len(value.t) or min(runs) < 0:
        return f"a run of rows for each of {extent.clients} clients, got {len(runs)}"
    group, _, name = spec.rows.partition("/")
    expected = extent.rows.get(group)
    if name:
        other = others.get(group, {}).get(name)
        if other is None:
            return f"{name!r} beside its rows, got none"
        expected = (
            _count_rows(other, marked=group == "marked") if isinstance(other, Ragged) else None
        )
    if expected is None:  # the server does not know how many nodes a silo has
        return None
    for most, count in zip(expected, runs, strict=True):
        if count > most or (count < most and not spec.fewer):
            return f"{'at most ' * spec.fewer}{most} rows, got {count}"
    return None


def _count_rows(rows: Ragged, *, marked: bool) -> list[int]:
    """Return how many rows each client has, or how many of them are true."""
    ends = rows.off.tolist()
    if not marked:
        return [b - a for a, b in itertools.pairwise(ends)]
    return [int(rows.t[a:b].bool().sum()) for a, b in itertools.pairwise(ends)]


def _value_problem(value: Field, spec: FieldSpec, extent: Extent, *, finite: bool) -> str | None:
    """Return which values were expected and which came, or None if all are allowed."""
    t = value.t
    if t.numel() == 0:
        return None
    # A sum is finite only if all values are, and takes a fraction of the time of looking at each.
    doubtful = finite and t.is_floating_point() and not math.isfinite(t.sum().item())
    if doubtful and not bool(t.isfinite().all()):
        return "finite numbers, got NaN or infinity"
    if spec.low is not None or spec.high is not None:
        # In NumPy: torch takes several times as long for the few numbers of most fields.
        numbers = t.cpu().numpy()
        if spec.low is not None and (least := float(numbers.min())) < spec.low:
            return f"values from {spec.low:g}, got {least:g}"
        if spec.high is not None and (most := float(numbers.max())) > spec.high:
            return f"values up to {spec.high:g}, got {most:g}"
    if spec.among in extent.nodes:
        counts, limit = t.cpu().numpy(), extent.nodes[spec.among]
        if t.dim() > 2:
            counts = counts.reshape(*t.shape[:2], -1).sum(axis=2)
        if (got := int(counts.max())) > limit:
            return f"at most the {limit} {spec.among} nodes reported at first, got {got}"
    if spec.ascending and isinstance(value, Ragged) and not _is_ascending(value):
        return "ascending numbers, each once, got others"
    if spec.places_of and spec.places_of in extent.rows:
        assert isinstance(value, Ragged)  # places are rows
        return _places_problem(value, extent.rows[spec.places_of])
    return None


def _is_ascending(rows: Ragged) -> bool:
    """Whether the values of every client ascend, each once."""
    ends = itertools.pairwise(rows.off.tolist())
    return all(bool((rows.t[a:b].diff() > 0).all()) for a, b in ends)


def _places_problem(rows: Ragged, sizes: Sequence[int]) -> str | None:
    """Return which places were expected, or None if all exist and ascend."""
    for (a, b), size in zip(itertools.pairwise(rows.off.tolist()), sizes, strict=True):
        place = rows.t[a:b]
        if not bool((place.diff() > 0).all()):
            return "ascending places, each once, got others"
        if len(place) and not 0 <= int(place[0]) <= int(place[-1]) < size:
            return "places that exist, got others"
    return None


def _shape(shape: tuple[int | None, ...]) -> str:
    return "(" + ", ".join("any" if n is None else str(n) for n in shape) + ")"
