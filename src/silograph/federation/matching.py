"""How silos come together before training: what each says, and what the server makes of it.

Each silo says `hello`; the server's `match` finds out which slot is which boundary row, and where
silos disagree, from keyed hashes (`silograph.federation.matching` says who learns what). A
silo that is told of a disagreement can `explain` it, for it knows the keys. These are pure
functions: an engine carries what they return.

S: halo slots of a silo. B: boundary rows. R: pairs of a boundary row and a silo that it has edges
to. X: cross-silo edges.
"""

import hashlib
import json
import math
import secrets as random
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np
import torch

from silograph.core.errors import ConfigError, DataError, ProtocolError, mistake
from silograph.core.payload import Field, Payload, Ragged, offsets
from silograph.core.text import printable
from silograph.graph.block.block import Route
from silograph.graph.csr import CSR
from silograph.graph.graph import LabelForm
from silograph.graph.silos.data import Silo, Silos

# --- edge tags -----------------------------------------------------------------------------------
# Cross-silo edges under keyed hashes: what two silos can compare through a server that cannot.
#
# Each pair of silos has a secret that the server does not know. It may be of the pair alone, or
# one that all silos share; silos that list edges to each other's nodes have told each other these
# nodes' keys already, and the secret goes the same way. For a run, the pair derives a key from
# its secret, its two names and the run's nonce, and with it
#
#     node tag    hash of (owner, the node's key): names a node to the other silo of the pair
#     edge tag    hash of (silo, key, silo, key), silos by name, and of the edge's weight where it
#                 is not 1: names an edge to both
#
# as BLAKE2b keyed with 32 bytes, 16 bytes long (J.-P. Aumasson et al.: "BLAKE2: simpler, smaller,
# fast as MD5", ACNS 2013; RFC 7693). Parts are hashed with their lengths, so no two lists of parts
# give the same bytes.
#
# Who learns what:
# - The server: the silos' names and `SiloFacts`; how many slots, boundary rows and edges each pair
#   has; which slot is which boundary row (it carries rows by that). Without the secret a tag tells
#   it no more than a random number would: it cannot test a guessed key, however short keys are.
#   Tags
#   of two runs cannot be linked either, as long as nonces differ; the server draws them, so a
#   dishonest one can repeat a nonce and see which edges or weights have changed. Tags keep keys
#   from
#   the server; they do not keep it from carrying rows to the wrong silo.
# - A silo: which of its own edges the other owner does not list; never a tag of another silo. One
#   that lists guessed edges learns of each whether the other lists it, for which both of its ends
#   must be right and its weight, and the run does not start while one guess is wrong.
# - Server and a silo together: with secrets of pairs, they can test guessed keys and weights
#   against
#   the tags of that silo's own pairs. With one secret for all, against all tags, so that short or
#   serial keys of all boundary nodes fall: where silos do not trust each other with that, each
#   pair
#   needs a secret of its own.


TAG_BYTES = 16
LEAST_SECRET, LONGEST_SECRET = 16, 64  # bytes; 64 is BLAKE2b's longest key


def pair_key(secret: bytes, run: bytes, one: str, other: str) -> bytes:
    """Return the key (32 bytes) of two silos for a run; both get the same.

    Args:
        secret: what the two share, 16 to 64 random bytes.
        run: nonce of the run, public.
        one: name of one silo.
        other: name of the other.

    Raises:
        ConfigError: a secret of another length.
    """
    if not LEAST_SECRET <= len(secret) <= LONGEST_SECRET:
        raise ConfigError(
            f"expected a secret of {LEAST_SECRET} to {LONGEST_SECRET} bytes between {one} and "
            f"{other}, got {len(secret)}: draw one with secrets.token_bytes(32)"
        )
    first, second = sorted((one, other))
    parts = _joined(run, first.encode(), second.encode())
    return hashlib.blake2b(parts, key=secret, digest_size=32, person=b"silograph pair").digest()


def node_tag(key: bytes, owner: str, node: str) -> bytes:
    """Return the tag (16 bytes) of a node by its owner and its key there."""
    return _hash(key, b"silograph node", _named(owner, node)).digest()


def edge_tags(silo: Silo, keys: Mapping[str, bytes]) -> list[bytes]:
    """Return the tags (16 bytes) of a silo's cross-silo edges, in the order of its list.

    That of an edge is the same from both ends, and another one where they say directions that
    differ, or weights that differ in float32: tables of one silo may have more digits than the
    arrays of the other.

    Args:
        silo: its data.
        keys: its `pair_key` with every silo that its edges lead to.
    """
    cross, tags = silo.cross, []
    # Hashing starts once a pair, and names are written once a node: twice as fast as edge by edge.
    start = {other: _hash(key, b"silograph edge", b"") for other, key in keys.items()}
    own = [_named(silo.name, key) for key in silo.keys]
    remote = [_named(*end) for end in zip(cross.silo, cross.keys, strict=True)]
    weights = np.ones(len(cross.row)) if cross.weight is None else cross.weight.numpy()
    ways = np.zeros((len(weights), 0))  # of edges without directions
    if cross.directed_weight is not None:
        ways = cross.directed_weight.nan_to_num(-1).numpy()
    edges = (cross.row.tolist(), cross.slot.tolist(), weights.tolist(), ways.tolist())
    for row, slot, weight, way in zip(*edges, strict=True):
        other = cross.silo[slot]
        digest = start[other].copy()
        digest.update(own[row] + remote[slot] if silo.name < other else remote[slot] + own[row])
        if weight != 1:
            digest.update(struct.pack(">f", weight + 0.0))  # -0 is 0
        if way:  # the weight to the silo of the later name, and that from it; -1 is no edge
            first, second = way if silo.name < other else way[::-1]
            digest.update(struct.pack(">3f", -1.0, first + 0.0, second + 0.0))
        tags.append(digest.digest())
    return tags


def user_tags(silo: Silo, secret: bytes | None) -> torch.Tensor:
    """Return words (n,) int64 that name rows to all silos with the same secret.

    Without a secret they are drawn, and so name nothing to anybody else.

    Raises:
        ConfigError: a secret of the wrong length.
    """
    if secret is None:
        secret = random.token_bytes(LEAST_SECRET)
    if not LEAST_SECRET <= len(secret) <= LONGEST_SECRET:
        raise ConfigError(
            f"expected a secret of {LEAST_SECRET} to {LONGEST_SECRET} bytes, got {len(secret)}: "
            "draw one with secrets.token_bytes(32)"
        )
    digests = b"".join(
        hashlib.blake2b(key.encode(), key=secret, digest_size=8, person=b"silograph user").digest()
        for key in silo.keys
    )
    return torch.from_numpy(np.frombuffer(digests, dtype="<i8").astype(np.int64))


def pair_keys(silo: Silo, secrets: Mapping[str, bytes], run: bytes) -> dict[str, bytes]:
    """Return a silo's key with every silo that its edges lead to.

    Raises:
        ConfigError: there is no secret with one of them, or one of the wrong length.
    """
    keys = {}
    for other in dict.fromkeys(silo.cross.silo):
        if other not in secrets:
            raise ConfigError(
                f"expected a secret between {silo.name} and {other}, which edges of {silo.name} "
                "lead to, got none: agree on one, or correct the edges"
            )
        keys[other] = pair_key(secrets[other], run, silo.name, other)
    return keys


def as_words(tags: Iterable[bytes]) -> np.ndarray:
    """Return tags as (k, 16) uint8."""
    return np.frombuffer(b"".join(tags), dtype=np.uint8).reshape(-1, TAG_BYTES)


def as_tags(words: np.ndarray) -> list[bytes]:
    """Return (k, 16) uint8 as tags."""
    joined = words.tobytes()
    return [joined[i : i + TAG_BYTES] for i in range(0, len(joined), TAG_BYTES)]


def _named(silo: str, node: str) -> bytes:
    return _joined(silo.encode(), node.encode())


def _hash(key: bytes, person: bytes, data: bytes) -> "hashlib.blake2b":
    return hashlib.blake2b(data, key=key, digest_size=TAG_BYTES, person=person)


def _joined(*parts: bytes) -> bytes:
    """Join parts into one text that is different for different parts."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


NONCE_BYTES = 16


@dataclass(frozen=True)
class SiloFacts:
    """Facts of silos' data from which the server builds the model; the same at every silo.

    Attributes:
        features: number of features of a node; 0 where the run has to say what to make.
        feature_names: their names, or empty; compared where two silos name them.
        sparse: whether they are held as the entries that are not 0.
        task: multiclass or multilabel.
        num_classes: number of classes, or of label bits.
        class_names: their names, or empty.
        scale: least and largest rating, of silos with ratings; None of others.
        weighted: whether any edge has a weight; this one may differ between silos.
    """

    features: int
    feature_names: tuple[str, ...]
    sparse: bool
    task: LabelForm
    num_classes: int
    class_names: tuple[str, ...]
    scale: tuple[float, float] | None = None
    weighted: bool = False


@dataclass(frozen=True, eq=False)
class Hello:
    """What a silo sends about its data before training.

    Attributes:
        name: the silo's.
        facts: what must be the same everywhere.
        others: silos that its edges lead to.
        slot_other: (S,) int64 which of them holds the node of a slot; slots in their order.
        slot_tag: (S, 16) uint8 tag of the node.
        row: (R,) int64 place among the own boundary rows, ascending.
        row_other: (R,) int64 which of the others it has edges to.
        row_tag: (R, 16) uint8 its tag for that one.
        edge_other: (X,) int64 where an edge leads.
        edge_tag: (X, 16) uint8 its tag; sorted, so that the order tells nothing.
    """

    name: str
    facts: SiloFacts
    others: tuple[str, ...]
    slot_other: np.ndarray
    slot_tag: np.ndarray
    row: np.ndarray
    row_other: np.ndarray
    row_tag: np.ndarray
    edge_other: np.ndarray
    edge_tag: np.ndarray


@dataclass(frozen=True)
class Disagreement:
    """Edges that one silo lists and the other owner does not.

    Attributes:
        silo: who lists them.
        other: where they lead, by that silo.
        tags: the edges' tags.
        absent: whether no silo has that name.
    """

    silo: str
    other: str
    tags: tuple[bytes, ...]
    absent: bool

    def __str__(self) -> str:
        """Return what is wrong, without the keys, which only `silo` knows."""
        reason = "does not list them with the same weights"
        reason = "is no silo of this federation" if self.absent else reason
        return (
            f"expected both owners of a cross-silo edge to list it, got {len(self.tags)} of "
            f"{self.silo} that lead to {printable(self.other)[:80]}, which {reason}"
        )


@dataclass(frozen=True, eq=False)
class Agreement:
    """The result of matching all silos' hellos.

    Attributes:
        ids: the silos' names, in the order of the hellos.
        facts: what they have in common, with the names that any of them gave to features.
        disagreements: where both owners do not list the same edges.
        route: who answers for each halo slot; None while silos disagree.
    """

    ids: tuple[str, ...]
    facts: SiloFacts
    disagreements: tuple[Disagreement, ...]
    route: Route | None


def facts_of(silo: Silo) -> SiloFacts:
    """Return the facts that a silo must have in common with the others."""
    graph = silo.graph
    return SiloFacts(
        features=graph.num_features,
        feature_names=silo.feature_names,
        sparse=isinstance(silo.x, CSR),
        task=graph.task,
        num_classes=silo.num_classes,
        class_names=silo.class_names,
        scale=silo.scale,
        weighted=silo.weighted,
    )


def hello(silo: Silo, secrets: Mapping[str, bytes], run: bytes) -> Hello:
    """Return the hello of a silo.

    Args:
        silo: its data.
        secrets: what it shares with each silo that its edges lead to, 16 to 64 bytes.
        run: nonce of the run, the same for all silos.

    Raises:
        ConfigError: a secret is missing, or of the wrong length.
    """
    keys, cross, own = pair_keys(silo, secrets, run), silo.cross, silo.keys
    others = tuple(keys)
    number = {name: i for i, name in enumerate(others)}
    slot_other = np.array([number[name] for name in cross.silo], dtype=np.int64)
    slot_tag = [
        node_tag(keys[name], name, key) for name, key in zip(cross.silo, cross.keys, strict=True)
    ]
    edge_other = slot_other[cross.slot.numpy()]
    boundary, place = np.unique(cross.row.numpy(), return_inverse=True)
    pairs = np.unique(np.stack([place, edge_other], axis=1).reshape(-1, 2), axis=0)
    row_tag = [
        node_tag(keys[others[other]], silo.name, own[boundary[row]])
        for row, other in pairs.tolist()
    ]
    tags = as_words(edge_tags(silo, keys))
    halves = tags.view(">u8")
    order = np.lexsort((halves[:, 1], halves[:, 0], edge_other))
    return Hello(
        name=silo.name,
        facts=facts_of(silo),
        others=others,
        slot_other=slot_other,
        slot_tag=as_words(slot_tag),
        row=pairs[:, 0],
        row_other=pairs[:, 1],
        row_tag=as_words(row_tag),
        edge_other=edge_other[order],
        edge_tag=tags[order],
    )


def match(hellos: Sequence[Hello]) -> Agreement:
    """Match the hellos of all silos, in the order of the federation.

    Raises:
        DataError: two silos have one name, or differ in features or labels.
        ProtocolError: a hello that no silo's data can give.
    """
    ids = tuple(each.name for each in hellos)
    for place, name in enumerate(ids):
        if name in ids[:place]:
            raise DataError(f"expected silos of different names, got {name!r} twice: rename one")
    facts = _common(hellos)
    tags_by_silo = {each.name: _edge_tags_by_silo(each) for each in hellos}
    disagreements = []
    for each in hellos:
        for other, tags in tags_by_silo[each.name].items():
            known_tags = set(tags_by_silo.get(other, {}).get(each.name, ()))
            missing = tuple(tag for tag in tags if tag not in known_tags)
            if missing:
                disagreements.append(
                    Disagreement(each.name, other, missing, other not in tags_by_silo)
                )
    route = None if disagreements else _route(hellos)
    return Agreement(ids, facts, tuple(disagreements), route)


def explain(
    silo: Silo, secrets: Mapping[str, bytes], run: bytes, disagreement: Disagreement
) -> str:
    """Return a disagreement about a silo's edges in one line that names the first one's keys.

    Raises:
        ProtocolError: it is not about edges of this silo.
    """
    tags, cross = edge_tags(silo, pair_keys(silo, secrets, run)), silo.cross
    wrong = set(disagreement.tags)
    first = next((i for i, tag in enumerate(tags) if tag in wrong), None)
    if first is None or disagreement.silo != silo.name:
        raise ProtocolError(f"expected a disagreement about edges of {silo.name}, got another")
    own, remote = silo.keys[int(cross.row[first])], cross.keys[int(cross.slot[first])]
    remedy = f"correct the name in cross_edges of {silo.name}"
    if not disagreement.absent:
        weight = 1.0 if cross.weight is None else float(cross.weight[first])
        what = f"the weight {weight:g} (1 where none is given)"
        if cross.directed_weight is not None:
            ways = zip(("in", "out"), cross.directed_weight[first].tolist(), strict=True)
            listed = [f"{way} with weight {w:g}" for way, w in ways if not math.isnan(w)]
            what = f"directed = true and direction {' and '.join(listed)}"
        remedy = (
            f"list it in cross_edges of {disagreement.other}, too, with {what}, or drop it; both "
            "folders say directed = true, or neither does"
        )
    return f"{disagreement}; the first is from {own!r} to {remote!r}: {remedy}"


def agree(silos: Silos) -> Route:
    """Return the route of silos that are all in this process, matched as separate silos would be.

    Raises:
        DataError: silos differ in features or labels, or disagree on edges; names the first.
    """
    shared, run = random.token_bytes(32), random.token_bytes(NONCE_BYTES)
    secrets = dict.fromkeys((e for silo in silos.members for e in silo.cross.silo), shared)
    result = match([hello(silo, secrets, run) for silo in silos.members])
    if result.route is not None:
        return result.route
    first = result.disagreements[0]
    silo = next(silo for silo in silos.members if silo.name == first.silo)
    raise DataError(
        explain(silo, secrets, run, first),
        **mistake("silos-disagree", "edges", first.silo, first.other),
    )


def _common(hellos: Sequence[Hello]) -> SiloFacts:
    """Return the common facts of all silos; raise `DataError` if one differs from the first."""
    first = hellos[0]
    common = asdict(first.facts)
    for each in hellos[1:]:
        for name, other_value in asdict(each.facts).items():
            value = common[name]
            if name == "weighted" or (name == "feature_names" and not (value and other_value)):
                common[name] = value or other_value
            elif other_value != value:
                raise DataError(
                    _difference(name, first.name, value, each.name, other_value),
                    **mistake("silos-disagree", name, each.name, first.name),
                )
    return SiloFacts(**common)


def _difference(name: str, one: str, value: Any, other: str, other_value: Any) -> str:
    what, remedy = name.replace("_", " "), "describe and order the tables alike"
    if name == "scale":
        value, other_value = list(value or ()), list(other_value or ())
        remedy = "correct it in a silo.toml"
    if isinstance(value, tuple) and isinstance(other_value, tuple):
        pairs = list(zip(value, other_value, strict=False))
        if len(value) == len(other_value):
            place = next(i for i, (own, others) in enumerate(pairs) if own != others)
            what = f"{what} (number {place + 1} of {len(value)})"
            value, other_value = pairs[place]
    return (
        f"expected the same {what} at every silo, got {value!r} at {one} and {other_value!r} at "
        f"{other}: {remedy}"
    )


def _edge_tags_by_silo(hello_message: Hello) -> dict[str, list[bytes]]:
    """Return the tags of a silo's edges by where they lead."""
    tags = as_tags(hello_message.edge_tag)
    tags_by_silo: dict[str, list[bytes]] = {name: [] for name in hello_message.others}
    for other, tag in zip(hello_message.edge_other.tolist(), tags, strict=True):
        tags_by_silo[hello_message.others[other]].append(tag)
    return tags_by_silo


def _route(hellos: Sequence[Hello]) -> Route:
    """Return the route of silos that list the same edges."""
    counts = [int(each.row[-1]) + 1 if len(each.row) else 0 for each in hellos]
    boundary_off = offsets(torch.tensor(counts))
    place: dict[tuple[str, str, bytes], int] = {}
    for each, start in zip(hellos, boundary_off.tolist(), strict=False):
        rows = zip(each.row.tolist(), each.row_other.tolist(), as_tags(each.row_tag), strict=True)
        for row, other, tag in rows:
            place[each.name, each.others[other], tag] = start + row
    target = []
    for each in hellos:
        for other, tag in zip(each.slot_other.tolist(), as_tags(each.slot_tag), strict=True):
            where = (each.others[other], each.name, tag)
            if where not in place:
                raise ProtocolError(
                    f"expected every halo slot of {each.name} to be a boundary row of the silo "
                    f"that it names, got one that is none of {where[0]}: tags that no data give"
                )
            target.append(place[where])
    return Route(
        target=torch.tensor(target, dtype=torch.int64),
        slot_off=offsets(torch.tensor([len(each.slot_other) for each in hellos])),
        boundary_off=boundary_off,
    )


# --- A silo's hello as fields of a frame, and what of a frame can be one, whoever sent it --------


def to_payload(hello_message: Hello) -> Payload:
    """Return a hello as fields of one client, ready for a frame."""
    facts = hello_message.facts
    about = {"name": hello_message.name, "others": hello_message.others, **asdict(facts)}
    if facts.scale is None:  # a silo without ratings sends no byte for it
        del about["scale"]
    if not facts.weighted:  # nor does one without weights of edges
        del about["weighted"]
    fields = {
        "about": np.frombuffer(json.dumps(about).encode(), dtype=np.uint8),
        **{name: getattr(hello_message, name) for name in _ARRAYS},
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
        hello_message = Hello(name, SiloFacts(**about), others, **arrays)
        _check_hello(hello_message)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"expected the hello of a silo, got fields without: {error}") from None
    return hello_message


_ARRAYS = ("slot_other", "slot_tag", "row", "row_other", "row_tag", "edge_other", "edge_tag")


def _array(field: Field) -> np.ndarray:
    if not isinstance(field, Ragged):
        raise TypeError("rows")
    array: np.ndarray = field.t.numpy()
    return array


def _check_hello(hello_message: Hello) -> None:
    """Raise `ValueError` where arrays of a hello cannot belong together."""
    name, others, facts = hello_message.name, hello_message.others, hello_message.facts
    words = (name, *others, *facts.feature_names, *facts.class_names)
    if not all(isinstance(word, str) for word in words) or name in others:
        raise ValueError("names")
    if facts.task not in get_args(LabelForm) or type(facts.sparse) is not bool:
        raise ValueError("task and sparse")
    if type(facts.weighted) is not bool:
        raise ValueError("whether edges have weights")
    numbers = (facts.features, facts.num_classes)
    if not all(type(number) is int and number >= 0 for number in numbers) or not facts.num_classes:
        raise ValueError("sizes")
    if len(facts.feature_names) not in (0, facts.features):
        raise ValueError("a name for each feature")
    _check_scale(facts)
    for other, tag in (
        (hello_message.slot_other, hello_message.slot_tag),
        (hello_message.row_other, hello_message.row_tag),
        (hello_message.edge_other, hello_message.edge_tag),
    ):
        is_of_tags = other.dtype == np.int64 and tag.dtype == np.uint8 and other.ndim == 1
        if not is_of_tags or tag.shape != (len(other), TAG_BYTES):
            raise ValueError("tags of 16 bytes")
        if len(other) and (other.min() < 0 or other.max() >= len(others)):
            raise ValueError("silos that edges lead to")
    # Boundary rows are numbered without gaps; a row may have edges to several silos.
    row = hello_message.row
    if row.dtype != np.int64 or row.shape != hello_message.row_other.shape:
        raise ValueError("boundary rows")
    step = np.diff(row, prepend=-1)
    if len(step) and (step.min() < 0 or step.max() > 1):
        raise ValueError("boundary rows")


def _check_scale(facts: SiloFacts) -> None:
    """Raise `ValueError` unless a scale, which only silos with ratings have, can be one."""
    low, high = facts.scale or (0, 1)
    is_range = all(type(end) in (int, float) for end in (low, high)) and (
        -math.inf < low < high < math.inf
    )
    if (facts.scale and facts.task != "rating") or not is_range:
        raise ValueError("a least and a largest rating")
