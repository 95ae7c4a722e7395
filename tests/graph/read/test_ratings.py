"""Laws of rating graphs: who rated what, which cuts and splits they have, and what is refused."""

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import silograph as sg
from mistakes import raises_code
from rating_graphs import drawn, rating_graph
from silograph.core.errors import ConfigError, DataError, PartitionError, ProtocolError
from silograph.core.key import Key
from silograph.graph.block.block import make_block, pairs_of, seen_rows
from silograph.graph.csr import CSR
from silograph.graph.datasets import tables_of
from silograph.graph.graph import Graph, fingerprint, pairs_among
from silograph.graph.partition.partition import Partition, make_partition
from silograph.graph.partition.split import choose_split

KEY = Key.of(3)
THREE = [[7, 1, 4.0], [7, 2, 3.0], [8, 1, 5.0]]


def told(graph: Graph) -> set[tuple[str, str, float]]:
    """Return who rated what how."""
    assert isinstance(graph.x, torch.Tensor)
    pairs = pairs_among(graph.x, graph.adj)
    user, item = (graph.node_id[rows.numpy()] for rows in (pairs.user, pairs.item))
    return set(zip(user.tolist(), item.tolist(), graph.y[pairs.row].tolist(), strict=True))


def cut(graph: Graph, method: str = "category", clients: int = 3, **options: Any) -> Partition:
    return make_partition(graph, method, clients=clients, key=KEY, **options)


def test_a_graph_says_who_rated_what() -> None:
    data = drawn()
    graph = sg.ratings(**data)
    wanted = {(f"u:{u:.0f}", f"i:{i:.0f}", float(v)) for u, i, v in data["ratings"]}
    assert told(graph) == wanted
    assert graph.task == "rating"
    assert int(graph.labeled.sum()) == len(wanted)
    pair = {tuple(sorted(two)) for two in data["trust"].tolist() if two[0] != two[1]}
    assert graph.num_edges == 2 * len(wanted) + len(pair)
    assert len(set(graph.node_id.tolist())) == graph.num_nodes


def test_tables_say_what_arrays_say(tmp_path: Path) -> None:
    data, path, trust = drawn(), tmp_path / "ratings.csv", tmp_path / "trust.csv"
    lines = ["user,item,rating,category,time"]
    beside = zip(data["ratings"].tolist(), data["categories"], data["times"], strict=True)
    lines += [f"{u:.0f},{i:.0f},{v},{kind},{time}" for (u, i, v), kind, time in beside]
    path.write_text("\n".join(lines))
    trust.write_text("\n".join(["truster,trustee", *(f"{a},{b}" for a, b in data["trust"])]))
    cells = zip(*(line.split(",") for line in lines[1:]), strict=True)
    columns = dict(zip(lines[0].split(","), cells, strict=True))
    table: dict[str, Any] = {name: np.array(values) for name, values in columns.items()}
    np.savez(tmp_path / "ratings.npz", **table)
    here = fingerprint(sg.ratings(**data))
    assert fingerprint(sg.ratings(path, trust=trust)) == here
    assert fingerprint(sg.ratings(tmp_path / "ratings.npz", trust=trust)) == here
    both = sg.load(tmp_path)
    assert (fingerprint(both), both.name) == (here, tmp_path.name)
    assert {file.name for file in tables_of(tmp_path).values()} == {"ratings.csv", "trust.csv"}
    trust.unlink()
    alone = {name: value for name, value in data.items() if name != "trust"}
    assert fingerprint(sg.load(tmp_path)) == fingerprint(sg.ratings(**alone))
    path.unlink()
    assert {file.name for file in tables_of(tmp_path).values()} == {"ratings.npz"}
    assert fingerprint(sg.load(tmp_path)) == fingerprint(sg.ratings(**alone))


def test_an_npz_file_may_be_a_table_of_ratings(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    user, item, rating = drawn()["ratings"].T
    arrays = {"user": user.astype(int), "item": item.astype(int), "rating": rating}
    for file in ("shops.npz", "folder/ratings.npz"):
        np.savez(tmp_path / file, **arrays)
    graph = sg.load(tmp_path / "shops.npz")
    assert fingerprint(graph) == fingerprint(sg.load(tmp_path / "folder"))
    assert (graph.task, graph.name) == ("rating", "shops")
    assert sg.load("shops", data_dir=tmp_path).task == "rating"
    result = sg.run(tmp_path / "shops.npz", method="fedacs", rounds=1, clients=2)
    assert result.cut is not None
    assert result.cut.graph.task == "rating"
    wider = sg.load(tmp_path / "shops.npz", rating_scale=(0, 9), columns="user=item,item=user")
    assert wider.scale == (0, 9)
    np.savez(tmp_path / "other.npz", user=arrays["user"], item=arrays["item"], stars=rating)
    with pytest.raises(DataError, match=r"got keys item, stars, user: a table of ratings has keys"):
        sg.load(tmp_path / "other.npz")


def test_cells_of_lists_and_arrays_of_objects_are_what_tables_have() -> None:
    """So 1 and 1.0 are one item, whatever stands beside them."""
    rows = [["a", 1, 3], ["b", 1.0, 4.5], [7.0, "x", 2]]
    wanted = {("u:a", "i:1", 3.0), ("u:b", "i:1", 4.5), ("u:7", "i:x", 2.0)}
    assert told(sg.ratings(rows)) == wanted
    rows[0][2], rows[1][1] = np.float32(3), np.float64(1)
    assert told(sg.ratings(np.array(rows, dtype=object))) == wanted


def test_trust_may_be_of_floats_or_of_nobody(tmp_path: Path) -> None:
    table = np.array(THREE)
    both = fingerprint(sg.ratings(table, trust=[[7, 8]]))
    assert fingerprint(sg.ratings(table, trust=np.array([[7.0, 8.0]]))) == both
    nobody = fingerprint(sg.ratings(table))
    assert fingerprint(sg.ratings(table, trust=[])) == nobody != both
    (tmp_path / "trust.csv").write_text("truster,trustee\n")
    assert fingerprint(sg.ratings(table, trust=tmp_path / "trust.csv")) == nobody
    (tmp_path / "trust.csv").write_text("truster,trustee\n7,\n")
    with pytest.raises(DataError, match=r"the id of a trustee in .*line 2, got none: name it"):
        sg.ratings(table, trust=tmp_path / "trust.csv")


def test_a_graph_tells_its_users_items_and_ratings(make_graph: Callable[..., Graph]) -> None:
    graph = sg.ratings([[7, 1, 4.0], [7, 2, 3.0], [8, 1, 5.0], [8, 3, 5.0]])
    assert graph.rating_sizes == {"users": 2, "items": 3, "ratings": 4}
    assert repr(graph) == (
        "Graph('ratings', nodes=9, edges=8, users=2, items=3, ratings=4, task='rating')"
    )
    shown = graph._repr_html_()
    assert all(name in shown for name in graph.rating_sizes)
    assert "features" not in shown
    assert make_graph(20).rating_sizes == {}


def test_of_repeated_pairs_the_last_one_counts() -> None:
    table = [[1, 1, 2.0], [1, 1, 5.0], [1, 1, 3.0], [2, 1, 1.0]]
    assert told(sg.ratings(table)) == {("u:1", "i:1", 3.0), ("u:2", "i:1", 1.0)}
    by_time = sg.ratings(table, times=[5, 9, 9, 1])
    assert told(by_time) == {("u:1", "i:1", 3.0), ("u:2", "i:1", 1.0)}
    assert ("u:1", "i:1", 5.0) in told(sg.ratings(table, times=[5, 9, 8, 1]))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"ratings": [[1, 1]]}, r"expected ratings \(R, 3\) of user, item and rating"),
    (
        {"ratings": [[1, 1, 0.0]]},
        r"got 0 at rating 0 \(1 such rating\): .* --rating-scale LEAST,LARGEST, "
        r"in Python .*scale=\(least, largest\)\), .*silo.toml$",
    ),
    ({"ratings": [[1, 1, 2.0], [1, 2, np.nan]]}, r"got nan at rating 1 .*: leave them out$"),
    ({"ratings": [["a", "b", "2"], ["a", "c", "good"]]}, "a number as rating 1, got 'good'"),
    ({"ratings": np.array([["a", "b", None]], dtype=object)}, "a number as rating 0, got None"),
    ({"ratings": [["a", "", "3"]]}, "the id of an item at rating 0, got none: name it"),
    ({"ratings": [["a", "b", 3], [None, "b", 4]]}, "the id of a user at rating 1, got none"),
    ({"ratings": [["a", "b", 3], ["a", np.nan, 4]]}, "the id of an item at rating 1, got none"),
    (
        {"ratings": np.array([[np.datetime64("NaT"), "b", 4]], dtype=object)},
        "the id of a user at rating 0, got none",
    ),
    ({"ratings": [["a", "b", 3], ["a", 1.5, 3]]}, "the id of an item at rating 1, got 1.5: give"),
    ({"ratings": [["a", 2.0**53, 3]]}, r"the id of an item at rating 0, got 9007199254740992\.0"),
    ({"ratings": [["a", float("inf"), 3]]}, "the id of an item at rating 0, got inf: give a whole"),
    ({"ratings": [["a\tb", "c", "3"]]}, "the id of a user without tabs"),
    ({"ratings": [[1.5, 1, 2.0]]}, "the id of a user at rating 0, got 1.5"),
    ({"ratings": THREE, "scale": (5, 1)}, r"expected a scale \(least, largest\)"),
    ({"ratings": THREE, "scale": ("a", "b")}, r"largest\) of ratings, got \('a', 'b'\)"),
    ({"ratings": THREE, "scale": (1,)}, r"largest\) of ratings, got \(1,\)"),
    ({"ratings": THREE, "scale": None}, r"largest\) of ratings, got None"),
    ({"ratings": THREE, "scale": (1, np.inf)}, r"largest\) of ratings, got \(1, inf\)"),
    ({"ratings": THREE, "repeated": "no"}, "repeated='last' or 'refuse', got 'no'"),
    (
        {"ratings": [*THREE, THREE[0]], "repeated": "refuse"},
        "another of item 1 by user 7 at rating",
    ),
    ({"ratings": THREE, "trust": [[7, 9]]}, r"got user 9 without any \(1 such user\)"),
    ({"ratings": THREE, "trust": [[7, 8, 9]]}, r"expected trust \(T, 2\)"),
    ({"ratings": THREE, "trust": [[7, None]]}, "the id of a trustee at row 0, got none"),
    (
        {"ratings": THREE, "trust": [[7.5, 8]]},
        "the id of a truster at row 0, got 7.5: give a whole",
    ),
    ({"ratings": THREE, "unrated": "no"}, "unrated='refuse' or 'drop', got 'no'"),
    (
        {"ratings": THREE, "categories": ["a", float("nan"), "b"]},
        "a category of every rating, got none at rating 1",
    ),
    (
        {"ratings": THREE, "categories": [1, float("nan"), 2]},
        "categories that are words or whole numbers, none missing, got float64",
    ),
    ({"ratings": THREE, "times": ["a", "b", "c"]}, "times that are numbers, got object"),
    ({"ratings": THREE, "categories": ["a"]}, r"expected categories \(3,\), one for each rating"),
    ({"ratings": THREE, "categories": ["a", None, "b"]}, "of every rating, got none at rating 1"),
    ({"ratings": THREE, "categories": ["a", "b", ""]}, "of every rating, got none at rating 2"),
    ({"ratings": THREE, "times": [1.0, np.inf, 2.0]}, "finite times, got inf at rating 1"),
    ({"ratings": "r.txt"}, "expected a table in one of .csv, .* .dat, .dat.gz, got r.txt"),
    ({"ratings": "r.csv", "times": [1]}, "columns of the table of ratings, got arrays"),
    ({"ratings": "."}, r"dat.gz, got the folder \.: sg.load reads the folder"),
    ({"ratings": THREE, "columns": {"usr": "a"}}, "columns: unknown column 'usr': did you mean"),
    (
        {"ratings": THREE, "columns": {"user": "a"}},
        "a table of ratings for its column user, got an array: leave user out",
    ),
    ({"ratings": "r.csv", "columns": "user=a"}, "a mapping such as .*, got 'user=a'"),
    ({"ratings": "r.csv", "columns": {"user": 3}}, "a mapping such as .*, got {'user': 3}"),
    (
        {"ratings": "r.csv", "columns": {"truster": "a"}},
        "a table of trust for its column truster, got none: lea",
    ),
]


@pytest.mark.parametrize(("given", "line"), BAD, ids=[line[:30] for _, line in BAD])
def test_what_is_wrong_is_one_line(given: dict[str, Any], line: str) -> None:
    with pytest.raises(DataError, match=line) as caught:
        sg.ratings(**given)
    assert "\n" not in str(caught.value)


TABLES = [
    ("user,item,rating\n", "expected at least one row, got none"),
    ("user,item\na,b\n", "expected a column 'rating'"),
    (
        "user,item,stars\na,b,3\n",
        "expected a column 'rating', got columns user, item, stars: rename one, or name yours: --c",
    ),
    ("user,item,rating\na,b,x\n", "line 2, column 'rating': expected a number, got 'x'"),
    ("user,item,rating\na,b,np.float64(4.0)\n", "written by repr of NumPy 2: save numbers, not"),
    ("user,item,rating\na,b,7\n", "got 7 in .*line 2"),
    ("user,item,rating\na,b,nan\n", "from 1 to 5, got nan in .*line 2"),
    ("user,item,rating\na,b,3\nnan,b,4\n", "the id of a user in .*line 3, got 'nan': name it"),
    ("user,item,rating,kind\na,b,3,NaN\n", "line 2, column 'kind': expected a value, got 'NaN'"),
    ("user,item,rating\n,b,3\n", "the id of a user in .*line 2, got none"),
    (
        f"user,item,rating\n{'a' * 257},b,3\n",
        "line 2, column 'user': expected at most 256 characters, got 'aaaaaaaaaaaaaaaaaaaa...'",
    ),
    ("user,item,rating,time\na,b,3,\n", "column 'time': expected a number, got ''"),
    ("user,item,rating,time\na,b,3,2020-01-31\n", "got '2020-01-31': dates may be seconds since"),
    ("user,item,rating,category\na,b,3,\n", "column 'category': expected a name, got ''"),
]


@pytest.mark.parametrize(("text", "line"), TABLES)
def test_a_wrong_table_is_told_by_line(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "ratings.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=line):
        sg.ratings(path)


def test_tables_may_call_their_columns_otherwise(tmp_path: Path) -> None:
    text, named = "userId,stars,item,when\n1,4,9,20\n2,3,9,10\n", "a,b\n1,2\n"
    (tmp_path / "ratings.csv").write_text(text)
    (tmp_path / "trust.csv").write_text(named)
    columns = {"user": "userId", "rating": "stars", "time": "when", "truster": "a", "trustee": "b"}
    graph = sg.load(tmp_path, columns=",".join(f"{n}={c}" for n, c in columns.items()))
    arrays = sg.ratings([[1, 9, 4], [2, 9, 3]], trust=[[1, 2]], times=[20, 10])
    assert graph.node_id.tolist() == arrays.node_id.tolist()
    assert graph.y[3:].tolist() == [4, 3]
    assert graph.columns["time"][3:].tolist() == [20, 10]
    assert graph.num_edges == arrays.num_edges
    (tmp_path / "ratings.csv").write_text(text.replace(",4,", ",good,"))
    with raises_code(DataError, "bad-cell", row=2, column="stars", got="good"):
        sg.load(tmp_path, columns="user=userId,rating=stars")
    many = "userId,stars," + ",".join("abcdefghijk") + "\x1b[31m\n"
    (tmp_path / "ratings.csv").write_text(many + "1," * 12 + "1\n")
    with raises_code(DataError, "missing-column", column="item") as caught:
        sg.load(tmp_path, columns="user=userId,rating=stars")
    assert "columns userId, stars, a, b, c, d, e, f, g, h, i, j, ...: rename" in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        ({"user": "userId"}, "expected a column 'userId', got .* correct the name given for user$"),
        ({"user": "item"}, "expected 'item' to be column 'user', got another column 'user' besid"),
        ({"rating": "stars"}, "'stars' to be column 'rating', got another column 'rating' beside"),
        (
            {"time": "stars", "category": "stars"},
            "expected one name for column 'stars', got time and category",
        ),
        (
            {"category": "stars", "time": "stars"},
            "expected one name for column 'stars', got category and time",
        ),
    ],
)
def test_wrong_names_of_columns_are_told(
    tmp_path: Path, columns: dict[str, str], line: str
) -> None:
    path = tmp_path / "ratings.csv"
    path.write_text("user,item,rating,stars\na,b,3,4\n")
    with pytest.raises(DataError, match=line):
        sg.ratings(path, columns=columns)


def test_trust_of_users_without_ratings_can_be_dropped() -> None:
    graph = sg.ratings(THREE, trust=[[7, 9], [8, 7], [7, 7], [7, 8]], unrated="drop")
    assert graph.num_edges == 2 * 3 + 1


def archive(path: Path, **changed: np.ndarray) -> Path:
    data = drawn()
    table = data["ratings"].astype(np.int32)
    table[0, 2] = 0  # not on the scale
    kept = table[:, 0] % 2 == 0  # the others trust nobody
    arrays = {
        "ratings": table,
        "trust": np.stack([table[kept, 0], table[kept, 0][::-1]], axis=1),
        "rating_category": np.arange(len(table)) % 4,
        "rating_time": data["times"],
    }
    np.savez(path, **(arrays | changed))
    return path


def test_an_archive_of_ratings_is_filtered_as_in_the_papers(tmp_path: Path) -> None:
    table = drawn()["ratings"]
    graph = sg.load(archive(tmp_path / "ciao.npz"))
    kept = (table[:, 0] % 2 == 0) & (np.arange(len(table)) > 0)
    wanted = {(f"u:{u:.0f}", f"i:{i:.0f}", float(v)) for u, i, v in table[kept]}
    assert told(graph) == wanted
    assert graph.columns.keys() == {"category", "time"}
    wrong = archive(tmp_path / "wrong.npz", rating_time=np.ones(3))
    with pytest.raises(DataError, match="one category and time for each of 200 ratings"):
        sg.load(wrong)
    flat = archive(tmp_path / "flat.npz", ratings=np.ones(3))
    with pytest.raises(DataError, match=r"expected ratings \(R, 3\) of numbers"):
        sg.load(flat)


@pytest.mark.parametrize("method", ["category", "random", "louvain"])
def test_a_client_holds_its_ratings_with_their_users_and_items(method: str) -> None:
    graph = rating_graph()
    partition = cut(graph, method)
    block, route = make_block(graph, partition, choose_split(graph, partition, "0.8/0.1/0.1", KEY))
    pairs = pairs_of(block)
    assert torch.equal(block.client[pairs.row], block.client[pairs.user])
    assert torch.equal(block.client[pairs.row], block.client[pairs.item])
    assert len(pairs.row) == int(graph.labeled.sum())  # every rating at one client
    assert bool((block.x.sum(dim=1) > 0)[torch.cat([pairs.user, pairs.item])].all())  # type: ignore[union-attr]
    ends = torch.cat([pairs.row, pairs.user, pairs.item])
    assert len(torch.unique(ends)) == len(block.row_key)  # nobody holds anything else
    assert block.halo.adj.nnz == 0  # nor knows of others' ratings
    assert len(route.target) == 0


@pytest.mark.parametrize(
    ("spread", "ends"), [("average", (2, 3)), ("skewed", (2, 4)), ("extreme", (1, 5))]
)
def test_clients_get_whole_categories(spread: str, ends: tuple[int, int]) -> None:
    graph = rating_graph(60, 112, 1500, 28)
    code = graph.columns["category"]
    seen: set[int] = set()
    for seed in range(8):
        key = Key.of(seed)
        partition = make_partition(graph, "category", clients=10, key=key, spread=spread)
        held = [torch.unique(code[nodes][code[nodes] >= 0]).tolist() for nodes in partition.nodes]
        assert sorted(chain.from_iterable(held)) == list(range(28))
        seen |= {len(values) for values in held}
    assert (min(seen), max(seen)) == ends


def test_any_column_can_be_dealt() -> None:
    table = [[u, i, 3.0] for u in range(4) for i in range(3)]
    graph = sg.ratings(table, categories=[f"{u % 2}" for u, _, _ in table])
    partition = cut(graph, clients=2)
    assert [int(graph.labeled[nodes].sum()) for nodes in partition.nodes] == [6, 6]


def test_cuts_that_cannot_be_made_are_refused(make_graph: Callable[..., Graph]) -> None:
    with pytest.raises(
        PartitionError, match=r"at least 7 values of 'category', one a client, got 6"
    ):
        cut(rating_graph(), clients=7)
    with pytest.raises(PartitionError, match="expected a column 'shop' of words"):
        cut(rating_graph(), column="shop")
    with pytest.raises(PartitionError, match="got none: add it, or choose another partition"):
        cut(make_graph(20))
    with pytest.raises(PartitionError, match=r"no drop_edges for a rating graph, got 0\.5"):
        cut(rating_graph(), drop_edges=0.5)
    with raises_code(PartitionError, "empty-client", client=2):
        cut(sg.ratings([*THREE, *([9, item, 5.0] for item in range(10, 20))]), "random", 13)
    with pytest.raises(PartitionError, match=r"1 to 3 \(one rating each at least\), got 7$"):
        cut(sg.ratings(THREE), "random", 7)
    with pytest.raises(PartitionError, match="'silo', got 'ratings' without: use 'metis', 'lou"):
        cut(sg.ratings(THREE), "silo", 1)
    with pytest.raises(PartitionError, match="without: use 'category', 'metis', 'louvain' or 'r"):
        cut(rating_graph(), "silo", 1)


def test_renumbering_changes_nothing() -> None:
    data = drawn()
    order = np.random.default_rng(1).permutation(len(data["ratings"]))
    other = data | {name: data[name][order] for name in ("ratings", "categories", "times")}
    assert fingerprint(sg.ratings(**data)) == fingerprint(sg.ratings(**other))


def test_a_pair_has_one_role_in_shares_of_each_client() -> None:
    graph = rating_graph()
    partition = cut(graph)
    for how in ("0.8/0.1/0.1", "time:0.8/0.1/0.1"):
        split = choose_split(graph, partition, how, KEY)
        roles = torch.stack(list(vars(split).values())).int().sum(dim=0)
        assert torch.equal(roles > 0, graph.labeled)
        assert int(roles.max()) == 1
        for nodes in partition.nodes:
            count = int(graph.labeled[nodes].sum())
            assert abs(int(split.train[nodes].sum()) - 0.8 * count) <= 0.5 + 1e-9


def test_by_time_nobody_trains_on_what_is_later_than_a_test() -> None:
    graph = rating_graph()
    partition = cut(graph)
    split, time = choose_split(graph, partition, "time:0.8/0.1/0.1", KEY), graph.columns["time"]
    for nodes in partition.nodes:
        train, val, test = (time[nodes[mask[nodes]]] for mask in vars(split).values())
        assert float(train.max()) <= float(val.min())
        assert float(val.max()) <= float(test.min())
    with pytest.raises(
        DataError,
        match=r"a time for every rating of .* a column time of the table, use t",
    ):
        choose_split(
            sg.ratings(THREE), cut(sg.ratings(THREE), "random", 1), "time:0.8/0.1/0.1", KEY
        )
    with raises_code(ConfigError, "option-value", option="split", got="now"):
        choose_split(graph, partition, "time:now", KEY)


def test_seen_ratings_are_those_whose_user_and_item_train_at_the_client() -> None:
    graph = rating_graph()
    partition = cut(graph)
    split = choose_split(graph, partition, "0.5/0.2/0.3", KEY)
    block, _ = make_block(graph, partition, split)
    seen, pairs, train = seen_rows(block), pairs_of(block), block.split.train
    for row, user, item in zip(*(t.tolist() for t in vars(pairs).values()), strict=True):
        near = [
            bool(train[pairs.row[ends == end]].any())
            for ends, end in ((pairs.user, user), (pairs.item, item))
        ]
        assert bool(seen[row]) == all(near)
    assert 0 < int(seen[block.split.test].sum()) < int(block.split.test.sum())


def test_edges_that_are_no_pairs_are_refused() -> None:
    kinds = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    one = CSR.undirected(np.array([[2], [0]]), 3)
    two = CSR.undirected(np.array([[2, 2], [0, 1]]), 3)
    assert pairs_among(kinds, two).item.tolist() == [1]
    for x, adj in ((kinds, one), (kinds[:, [0, 0]], two)):
        with pytest.raises(ProtocolError, match=r"edges from each rating to its user and its item"):
            pairs_among(x, adj)
