"""Laws of joining: silos agree on edges by tags that tell the server no key."""

import json
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from silo_folders import NORTH, SOUTH, drawn_split, folder, same
from silograph.core.errors import ConfigError, DataError, ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Field, Payload, Ragged, Shared
from silograph.exchange.rows import agree_on_edges
from silograph.federation.frame import Envelope, decode, encode
from silograph.federation.in_process import InProcess
from silograph.federation.matching import (
    Disagreement,
    Hello,
    _hash,
    _named,
    agree,
    as_tags,
    edge_tags,
    explain,
    from_payload,
    hello,
    match,
    node_tag,
    pair_key,
    to_payload,
)
from silograph.graph.block.block import make_block
from silograph.graph.graph import Graph
from silograph.graph.partition.partition import make_partition
from silograph.graph.silos.data import Silo, Silos, join_blocks, silo_block, silo_split
from silograph.graph.silos.export import write_silos
from silograph.graph.silos.read import read_silos

MakeGraph = Callable[..., Graph]
RUN, SECRET = b"run", b"shared by silos!"
SECRETS = dict.fromkeys(["north", "south", "sout"], SECRET)


def silos_of(path: Path, **changes: dict[str, str]) -> Silos:
    """North and south, with other files."""
    for name, files in {"north": NORTH, "south": SOUTH}.items():
        folder(path / name, files | changes.get(name, {}))
    return read_silos(path)


def edge_tag(key: bytes, silo: str, node: str, other: str, remote: str) -> bytes:
    """As the protocol says it: a keyed hash of both ends, in the order of their names."""
    named = b"".join(_named(*end) for end in sorted(((silo, node), (other, remote))))
    return _hash(key, b"silograph edge", named).digest()


def test_the_tags_of_a_list_are_those_of_its_edges(tmp_path: Path) -> None:
    for silo in silos_of(tmp_path).members:
        other = {"north": "south", "south": "north"}[silo.name]
        key, cross = pair_key(SECRET, RUN, silo.name, other), silo.cross
        assert edge_tags(silo, {other: key}) == [
            edge_tag(key, silo.name, silo.keys[row], other, cross.keys[slot])
            for row, slot in zip(cross.row.tolist(), cross.slot.tolist(), strict=True)
        ]


def hellos_of(silos: Silos) -> list[Hello]:
    return [hello(silo, SECRETS, RUN) for silo in silos.members]


def test_tags_name_what_they_should_and_nothing_else() -> None:
    key = pair_key(SECRET, RUN, "north", "south")
    assert key == pair_key(SECRET, RUN, "south", "north")
    assert edge_tag(key, "north", "a", "south", "k") == edge_tag(key, "south", "k", "north", "a")
    seen = {
        key,
        pair_key(SECRET, b"other", "north", "south"),
        pair_key(SECRET + b"x", RUN, "north", "south"),
        pair_key(SECRET, RUN, "north", "west"),
        pair_key(SECRET, RUN, "nort", "hsouth"),
        pair_key(SECRET, RUN + b"n", "orth", "south"),
    }
    assert len(seen) == 6
    tags = {
        edge_tag(key, "north", "a", "south", "bc"),
        edge_tag(key, "north", "ab", "south", "c"),
        edge_tag(key, "north", "bc", "south", "a"),
        node_tag(key, "north", "a"),
        node_tag(key, "nort", "ha"),
        node_tag(key, "south", "a"),
    }
    assert len(tags) == 6
    assert {len(tag) for tag in tags} == {16}


def test_one_silo_with_weights_makes_the_federation_weighted(tmp_path: Path) -> None:
    """A silo without weights says nothing about them, so its hello has the bytes of before."""
    found = hellos_of(silos_of(tmp_path))
    assert not match(found).facts.weighted
    about = to_payload(found[0])["about"]
    assert isinstance(about, Ragged)
    assert "weighted" not in json.loads(about.t.numpy().tobytes())
    for number in range(len(found)):
        some = [
            replace(said, facts=replace(said.facts, weighted=each == number))
            for each, said in enumerate(found)
        ]
        assert match(some).facts.weighted


@pytest.mark.parametrize("clients", [1, 2, 5])
def test_the_route_is_that_of_the_cut(make_graph: MakeGraph, tmp_path: Path, clients: int) -> None:
    """Whatever the secrets: one for all, or one for each pair."""
    graph = make_graph(50, seed=clients)
    partition = make_partition(graph, "random", clients=clients, key=Key.of(1))
    split = drawn_split(graph)
    write_silos(tmp_path / "silos", graph, partition, split)
    silos = read_silos(tmp_path / "silos")
    _, route = make_block(graph, partition, split)

    def secrets(own: str) -> dict[str, bytes]:
        return {other: "".join(sorted((own, other))).encode() for other in silos.ids}

    found = match([hello(silo, secrets(silo.name), RUN) for silo in silos.members])
    assert found.disagreements == ()
    assert found.ids == partition.ids
    same(found.route, route)
    same(agree(silos), route)


def test_what_silos_agree_on_passes_the_check_of_numbers(tmp_path: Path) -> None:
    silos = silos_of(tmp_path)
    blocks = [silo_block(s, silo_split(s, "public", Key.of(0))) for s in silos.members]
    agree_on_edges(InProcess(None, join_blocks(blocks), agree(silos), 1), Key.of(0))


def test_a_hello_goes_through_a_frame(make_graph: MakeGraph, tmp_path: Path) -> None:
    for said in [*hellos_of(silos_of(tmp_path)), hello(alone(tmp_path / "alone"), {}, RUN)]:
        frame = encode(Envelope("hello", Kind.HALO_KEYS, 0, 1), to_payload(said), 0)
        again = from_payload(decode(frame)[1])
        same(again, said)


def alone(path: Path) -> Silo:
    """North without edges to others."""
    folder(path / "north", NORTH | {"cross_edges.csv": "own,silo,remote\n"})
    return read_silos(path).members[0]


def test_a_silo_may_be_alone(tmp_path: Path) -> None:
    route = agree(Silos("alone", (alone(tmp_path),)))
    assert route.target.tolist() == []
    assert route.slot_off.tolist() == route.boundary_off.tolist() == [0, 0]


def test_no_frame_holds_a_key(tmp_path: Path) -> None:
    """Nor the order of the list: edges come sorted by tag."""
    names = {
        "a": "patient-0017",
        "b": "patient-0018",
        "c": "patient-0019",
        "k1": "case-8",
        "k2": "case-9",
    }

    def renamed(files: dict[str, str]) -> dict[str, str]:
        found = dict(files)
        for name in ("nodes.csv", "features.csv", "edges.csv", "cross_edges.csv"):
            rows = [line.split(",") for line in files[name].splitlines()]
            lines = [",".join(names.get(cell, cell) for cell in row) for row in rows]
            found[name] = "\n".join(lines) + "\n"
        return found

    silos = silos_of(tmp_path, north=renamed(NORTH), south=renamed(SOUTH))
    assert silos.members[0].keys == ["patient-0017", "patient-0018", "patient-0019"]
    agree(silos)
    for said in hellos_of(silos):
        frame = encode(Envelope("hello", Kind.HALO_KEYS, 0, 1), to_payload(said), 0)
        assert not any(word in bytes(frame) for word in (b"patient", b"case", SECRET))
        tags = as_tags(said.edge_tag)
        assert tags == sorted(tags)


def test_other_runs_and_other_secrets_give_other_tags(tmp_path: Path) -> None:
    north = silos_of(tmp_path).members[0]
    said = [
        hello(north, {"south": secret}, run)
        for secret, run in [(SECRET, RUN), (SECRET, b"next"), (SECRET[::-1], RUN)]
    ]
    for name in ("slot_tag", "row_tag", "edge_tag"):
        tags = [tag for each in said for tag in as_tags(getattr(each, name))]
        assert len(set(tags)) == len(tags)


WEIGHED = "own,silo,remote,weight\na,south,k1,2\nb,south,k2,{}\nc,south,k2,\n"
WEIGHED_SOUTH = "own,silo,remote,weight\nk1,north,a,2\nk2,north,c,1\nk2,north,b,{}\n"
EDGES = {
    "an edge that south does not list": (
        {"south": {"cross_edges.csv": "own,silo,remote\nk1,north,a\nk2,north,c\n"}},
        "got 1 of north that lead to south, which does not list them with the same "
        "weights; the first is from 'b' to 'k2': list it in cross_edges of south, too, "
        "with the weight 1 (1 where none is given), or drop it",
    ),
    "an edge that north does not list": (
        {"north": {"cross_edges.csv": "own,silo,remote\na,south,k1\nb,south,k2\n"}},
        "got 1 of south that lead to north, which does not list them with the same "
        "weights; the first is from 'k2' to 'c': list it in cross_edges of north, too, "
        "with the weight 1 (1 where none is given), or drop it",
    ),
    "a key that is spelled in another way": (
        {"south": {"cross_edges.csv": SOUTH["cross_edges.csv"].replace("north,c", "north,C")}},
        "got 1 of north that lead to south, which does not list them with the same "
        "weights; the first is from 'c' to 'k2': list it",
    ),
    "the first in the order of the list": (
        {"south": {"cross_edges.csv": "own,silo,remote\n"}},
        "got 3 of north that lead to south, which does not list them with the same "
        "weights; the first is from 'c' to 'k2': list it",
    ),
    "another weight": (
        {
            "north": {"cross_edges.csv": WEIGHED.format(0.5)},
            "south": {"cross_edges.csv": WEIGHED_SOUTH.format(0.25)},
        },
        "got 1 of north that lead to south, which does not list them with the same "
        "weights; the first is from 'b' to 'k2': list it in cross_edges of south, too, "
        "with the weight 0.5 (1 where none is given), or drop it",
    ),
    "a weight at one silo only": (
        {"north": {"cross_edges.csv": WEIGHED.format(0.5)}},
        "got 2 of north that lead to south, which does not list them with the same "
        "weights; the first is from 'a' to 'k1': list it in cross_edges of south, too, "
        "with the weight 2 (1 where none is given), or drop it",
    ),
    "a weight at the other silo only": (
        {"south": {"cross_edges.csv": WEIGHED_SOUTH.format(0.5)}},
        "got 2 of north that lead to south, which does not list them with the same weights; the "
        "first is from 'a' to 'k1': list it in cross_edges of south, too, "
        "with the weight 1 ",
    ),
    "a silo that is not there": (
        {"north": {"cross_edges.csv": NORTH["cross_edges.csv"].replace("south,k1", "sout,k1")}},
        "got 1 of north that lead to sout, which is no silo of this federation; the first is from "
        "'a' to 'k1': correct the name in cross_edges of north",
    ),
}


@pytest.mark.parametrize("kind", EDGES)
def test_a_disagreement_names_the_silo_and_the_first_key(tmp_path: Path, kind: str) -> None:
    changes, line = EDGES[kind]
    silos = silos_of(tmp_path, **changes)
    expected = f"expected both owners of a cross-silo edge to list it, {line}"
    with pytest.raises(DataError) as caught:
        agree(silos)
    assert str(caught.value).startswith(expected)
    # Apart: the server names silos only, and the silo that holds the keys says which.
    found = match(hellos_of(silos))
    assert found.route is None
    first = found.disagreements[0]
    assert str(first) == expected.partition(";")[0]
    silo = next(silo for silo in silos.members if silo.name == first.silo)
    assert explain(silo, SECRETS, RUN, first) == str(caught.value)


def test_equal_weights_agree_and_are_in_the_tags(tmp_path: Path) -> None:
    """A weight of 1 is none: an empty cell, or no column, is the same edge.

    Weights are alike that are alike in float32.
    """
    plain = hellos_of(silos_of(tmp_path / "plain"))
    weighed = silos_of(
        tmp_path / "weighed",
        north={"cross_edges.csv": WEIGHED.format(0.1)},
        south={"cross_edges.csv": WEIGHED_SOUTH.format("0.100000001490116")},
    )
    assert match(hellos_of(weighed)).route is not None
    for one, other in zip(plain, hellos_of(weighed), strict=True):
        assert len(set(as_tags(one.edge_tag)) & set(as_tags(other.edge_tag))) == 1


def test_a_disagreement_shows_the_name_of_another_silo_safely() -> None:
    """It is what a silo says, and the server prints it."""
    line = str(Disagreement("north", "a\n\x1b[2J" + "x" * 999, (bytes(16),), absent=True))
    assert f"that lead to a??[2J{'x' * 74}, which is no silo" in line


def test_a_disagreement_of_others_cannot_be_explained(tmp_path: Path) -> None:
    north, _ = silos_of(tmp_path).members
    for wrong in (
        Disagreement("north", "south", (b"x" * 16,), absent=False),
        Disagreement("south", "north", tuple(as_tags(hello(north, SECRETS, RUN).edge_tag)), False),
    ):
        with pytest.raises(ProtocolError, match=r"^expected a disagreement about edges of north, "):
            explain(north, SECRETS, RUN, wrong)


FACTS: dict[str, tuple[dict[str, str], str]] = {
    "features": (
        {
            "silo.toml": SOUTH["silo.toml"].replace("features = 2", "features = 1"),
            "features.csv": "id,size\nk1,1\nk2,0\n",
        },
        "the same features at every silo, got 2 at north and 1 at south: ",
    ),
    "their order": (
        {"features.csv": "id,age,size\nk1,1,2\nk2,0,1\n"},
        "the same feature names (number 1 of 2) at every silo, got 'size' at north and 'age' at "
        "south: ",
    ),
    "their form": (
        {
            "silo.toml": SOUTH["silo.toml"] + "sparse = true\n",
            "features.csv": "id,feature,value\n",
        },
        "the same sparse at every silo, got False at north and True at south: ",
    ),
    "the task": (
        {
            "silo.toml": SOUTH["silo.toml"] + 'task = "multilabel"\n',
            "nodes.csv": "id\nk1\nk2\n",
        },
        "the same task at every silo, got 'multiclass' at north and 'multilabel' at south: ",
    ),
    "how many labels": (
        {"silo.toml": SOUTH["silo.toml"].replace('"dog"', '"dog", "eel"')},
        "the same num classes at every silo, got 2 at north and 3 at south: ",
    ),
    "which labels": (
        {"silo.toml": SOUTH["silo.toml"].replace('"cat", "dog"', '"dog", "cat"')},
        "the same class names (number 1 of 2) at every silo, got 'cat' at north and 'dog' at "
        "south: ",
    ),
    "labels without names": (
        {"silo.toml": 'name = "south"\nfeatures = 2\nclasses = 2\n', "nodes.csv": "id\nk1\nk2\n"},
        "the same class names at every silo, got ('cat', 'dog') at north and () at south: ",
    ),
}


@pytest.mark.parametrize("kind", FACTS)
def test_silos_must_have_the_same_columns_and_labels(tmp_path: Path, kind: str) -> None:
    changes, line = FACTS[kind]
    with pytest.raises(DataError) as caught:
        agree(silos_of(tmp_path, south=changes))
    assert str(caught.value) == f"expected {line}describe and order the tables alike"


def test_features_without_names_go_with_names(tmp_path: Path) -> None:
    """An .npz file names none; what others name stands."""
    silos_of(tmp_path)
    (tmp_path / "north" / "features.csv").unlink()
    np.savez(tmp_path / "north" / "features.npz", x=np.ones((3, 2)))
    found = match(hellos_of(read_silos(tmp_path)))
    assert found.facts.feature_names == ("size", "age")
    assert found.route is not None


def test_two_silos_of_one_name(tmp_path: Path) -> None:
    said = hellos_of(silos_of(tmp_path))
    with pytest.raises(DataError, match=r"^expected silos of different names, got 'north' twice: "):
        match([*said, said[0]])


def test_secrets_that_cannot_be_used(tmp_path: Path) -> None:
    north = silos_of(tmp_path).members[0]
    with pytest.raises(
        ConfigError, match=r"^expected a secret between north and south, which edge"
    ):
        hello(north, {"east": SECRET}, RUN)
    for secret in (b"", b"x" * 15, b"x" * 65):
        with pytest.raises(
            ConfigError,
            match=r"^expected a secret of 16 to 64 bytes between north and south, got \d+: draw on",
        ):
            hello(north, {"south": secret}, RUN)


def test_tags_that_no_data_give_are_refused(tmp_path: Path) -> None:
    north, south = hellos_of(silos_of(tmp_path))
    turned = replace(north, slot_tag=north.slot_tag[::-1] ^ 1)
    with pytest.raises(
        ProtocolError, match=r"^expected every halo slot of north to be a boundary "
    ):
        match([turned, south])


def changed(said: Hello, **about: Any) -> Payload:
    """The fields of a hello with other facts."""
    fields = dict(to_payload(said))
    facts = json.loads(fields["about"].t.numpy().tobytes()) | about
    found = {name: fact for name, fact in facts.items() if fact != "absent"}
    text = torch.from_numpy(np.frombuffer(json.dumps(found).encode(), np.uint8).copy())
    return fields | {"about": Ragged(text, torch.tensor([0, len(text)]))}


def rows(values: Sequence[Any], dtype: torch.dtype = torch.int64) -> Ragged:
    return Ragged(torch.tensor(values, dtype=dtype), torch.tensor([0, len(values)]))


def test_fields_that_are_no_hello_are_refused(tmp_path: Path) -> None:
    said, _ = hellos_of(silos_of(tmp_path))
    good: dict[str, Field] = dict(to_payload(said))
    from_payload(changed(said))
    facts: list[dict[str, Any]] = [
        {"name": 3},
        {"name": "south"},
        {"name": "absent"},
        {"others": 3},
        {"others": []},
        {"others": [3]},
        {"features": "2"},
        {"features": -1},  # 0: the graphs have none of their own
        {"features": True},
        {"num_classes": -1},
        {"task": "regression"},
        {"sparse": 1},
        {"weighted": 1},
        {"weighted": None},
        {"feature_names": ["size"]},  # of two features
        {"class_names": [1]},
        {"class_names": None},
        {"more": 1},
        {"scale": [1, 5]},  # of silos without ratings
        *(
            {"task": "rating", "scale": scale}
            for scale in ([5, 1], [1], [1, 2, 3], 3, ["1", "5"], [False, True])
        ),
        {"task": "rating", "scale": [1, float("nan")]},
        {"task": "rating", "scale": [1, float("inf")]},
    ]
    from_payload(changed(said, task="rating", scale=[1, 5]))
    assert from_payload(changed(said, weighted=True)).facts.weighted
    wrong = [changed(said, **about) for about in facts]
    nested = torch.from_numpy(np.frombuffer(b"[" * 100_000, np.uint8).copy())
    wrong += [
        good | {"about": rows([1, 2, 3], torch.uint8)},
        good | {"about": Ragged(nested, torch.tensor([0, len(nested)]))},
        good | {"slot_other": rows([0, 1])},
        good | {"slot_other": rows([0])},
        good | {"slot_other": rows([0, -1])},
        good | {"slot_other": rows([0, 0], torch.int32)},
        good | {"slot_other": Shared(torch.tensor([0, 0]))},
        good | {"edge_tag": rows([[0] * 15] * 3, torch.uint8)},
        good | {"edge_tag": rows([[0] * 16] * 3)},
        good | {"row": rows([0, 1, 3])},
        good | {"row": rows([1, 2, 3])},
        good | {"row": rows([1, 0, 2])},
        good | {"row": rows([0, 1])},
        good | {"row": rows([0.0, 1.0, 2.0], torch.float64)},
    ]
    wrong += [{k: v for k, v in good.items() if k != name} for name in good]
    for payload in wrong:
        with pytest.raises(
            ProtocolError, match=r"^expected the hello of a silo, got fields withou"
        ):
            from_payload(payload)
    assert {f.name for f in fields(Hello)} - {"name", "facts", "others"} == set(good) - {"about"}
