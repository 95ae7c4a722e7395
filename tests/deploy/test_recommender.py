"""A silo's own file rates and recommends items to its users; nothing else does."""

import csv
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

pytest.importorskip("grpc")
pytest.importorskip("cryptography")

import silograph as sg
from commands import Capture
from rating_graphs import rating_graph
from silograph.cli import run_app
from silograph.core.errors import DataError
from silograph.deploy.server_settings import ServerSettings
from silograph.experiment.resolve.data import client_block
from silograph.experiment.run.recommender import (
    FORMAT,
    Recommender,
    load_recommender,
    recommender_file,
)
from silograph.graph.block.block import pairs_of
from silograph.graph.silos.read import read_silo
from silos import config_of, federate, folders

PLAIN = ServerSettings("127.0.0.1:0", insecure=True, patience=600)
OPTIONS: dict[str, Any] = {
    "partition": "category",
    "rounds": 2,
    "hidden": 4,
    "layers": 2,
    "dropout": 0.0,
    "lr": 0.02,
    "split": "0.6/0.2/0.2",
    "dtype": "float64",
}
MODELS: list[dict[str, Any]] = [
    {"model": "rating_gcn", "method": "fedavg", "options": {"embedding": 6}},
    {"model": "rating_profiles", "method": "local"},
]


@pytest.fixture(scope="module", params=MODELS, ids=lambda given: str(given["model"]))
def federated(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, tuple[Path, ...], list[Path]]:
    """A result, the silos' folders, and their result folders."""
    path, said = tmp_path_factory.mktemp("federation"), list[str]()
    config = config_of(2, **OPTIONS | request.param)
    silos = folders(rating_graph(), config, path / "silos")
    result = federate(silos, config, PLAIN, silo_lines=said, keep=True)
    result_folders = [Path(line.partition(" are in ")[2]) for line in said if " are in " in line]
    return result, silos, result_folders


def test_predictions_are_those_that_were_scored(
    federated: tuple[Any, tuple[Path, ...], list[Path]],
) -> None:
    """The RMSE of a silo's test ratings, pair by pair, is its own score."""
    result, silos, results = federated
    for folder in results:
        about = json.loads((folder / "result.json").read_text())
        file = folder / "recommender.safetensors"
        assert file.stat().st_mode & 0o077 == 0
        whole = load_recommender(file)
        assert whole.scale == (1.0, 5.0)
        recommender = replace(whole, scale=None)  # scores are those of what the model says
        silo = read_silo(next(path for path in silos if path.name == about["silo"]))
        block = client_block(silo, result.config, torch.float64)
        pairs, errors = pairs_of(block), []
        for row, user, item in zip(pairs.row, pairs.user, pairs.item, strict=True):
            if block.split.test[row]:
                names = [silo.keys[int(end)].partition(":")[2] for end in (user, item)]
                errors.append(recommender.predict(*names) - float(block.y[row]))
                assert whole.predict(*names) == min(max(recommender.predict(*names), 1.0), 5.0)
        view = "personalized" if about["model_of"] == "own" else "server"
        rmse = float(torch.tensor(errors, dtype=torch.float64).square().mean().sqrt())
        assert rmse == pytest.approx(about["test"][view]["rmse"], abs=1e-9)


def test_recommended_are_the_best_items_that_the_user_has_not_rated(
    federated: tuple[Any, tuple[Path, ...], list[Path]], capsys: Capture
) -> None:
    folder = federated[2][0]
    recommender = load_recommender(folder / "recommender.safetensors")
    user = recommender.users[3]
    mine = {recommender.items[i] for u, i in recommender.rated.tolist() if u == 3}
    ratings = {
        item: recommender.predict(user, item) for item in recommender.items if item not in mine
    }
    recommendations = recommender.recommend(user, 4)
    assert [value for _, value in recommendations] == sorted(ratings.values(), reverse=True)[:4]
    assert all(ratings[item] == value for item, value in recommendations)
    assert len(recommender.recommend(user, 1000)) == len(ratings)
    capsys.readouterr()
    assert run_app(["recommend", str(folder), "--user", user, "--top", "4"]) == 0
    out = capsys.readouterr().out
    assert all(item in out and f"{value:.2f}" in out for item, value in recommendations)
    assert all(f"{recommender.score(user, item):.3f}" in out for item, _ in recommendations)
    assert run_app(["recommend", str(folder), "--user", user, "--top", "4", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["items"]
    assert [(row["item"], row["rating"]) for row in rows] == recommendations
    assert [row["score"] for row in rows] == sorted((r["score"] for r in rows), reverse=True)
    one = ["recommend", str(folder), "--user", user, "--item", recommendations[0][0], "--json"]
    assert run_app(one) == 0
    told_of_one = {"user": user, "source": "model", "items": rows[:1]}
    assert json.loads(capsys.readouterr().out) == told_of_one
    assert run_app(["recommend", str(folder), "--user", user, "--item", recommendations[0][0]]) == 0
    assert capsys.readouterr().out.strip() == f"{recommendations[0][1]:.2f}"


def test_the_page_of_a_silo_names_the_command_and_counts_ratings(
    federated: tuple[Any, tuple[Path, ...], list[Path]], tmp_path: Path, capsys: Capture
) -> None:
    _, silos, results = federated
    for folder in results:
        about = json.loads((folder / "result.json").read_text())
        silo = next(path for path in silos if path.name == about["silo"])
        keys = [str(key) for key in read_silo(silo).keys]
        ratings = sum("\t" in key for key in keys)
        users, items = (
            sum(key.startswith(kind) and "\t" not in key for key in keys) for kind in ("u:", "i:")
        )
        assert about["ratings"] == {"users": users, "items": items, "ratings": ratings}
        assert about["recommends"] is True
        page = (folder / "report.html").read_text()
        assert "<code>silograph recommend</code>" in page
        assert "silograph predict" not in page
        assert f"<dt>own users, items</dt><dd>{users}, {items}</dd>" in page
        assert f"<dt>own ratings</dt><dd>{ratings}</dd>" in page
        assert "own nodes</dt>" not in page
        words = ["predict", str(folder), "--data", str(silo), "--out", str(tmp_path / "p.csv")]
        assert run_app(words) == 2
        assert "`silograph recommend` predicts ratings with the" in capsys.readouterr().err


def test_a_server_counts_ratings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "silograph")
    config = config_of(2, **OPTIONS | MODELS[1] | {"rounds": 1})
    federate(folders(rating_graph(), config, tmp_path / "silos"), config, PLAIN)
    assert sum(" test ratings (" in line for line in caplog.messages) == 2
    assert not any(" test nodes " in line for line in caplog.messages)


def test_unknown_items_are_refused_in_one_line(
    federated: tuple[Any, tuple[Path, ...], list[Path]], capsys: Capture
) -> None:
    folder = str(federated[2][0])
    for words, message in (
        (["--user", "100", "--item", "x"], "items of this silo, got item 'x'"),
        (["--user", "nobody", "--item", "x"], "items of this silo, got item 'x'"),
        (["--user", "100", "--client", "a"], "which is of one silo, got 'a': leave --client out"),
        (["--all"], "either --user ID, perhaps with --item ID, or --all with --out FILE"),
        (["--all", "--user", "100", "--out", "x.csv"], "or --all with --out FILE"),
        (["--user", "100", "--out", "x.csv"], "or --all with --out FILE"),
        ([], "or --all with --out FILE"),
    ):
        assert run_app(["recommend", folder, *words]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_an_unknown_user_gets_the_items_of_the_highest_mean(
    federated: tuple[Any, tuple[Path, ...], list[Path]], capsys: Capture
) -> None:
    """The mean over all users of what is predicted for each, and marked."""
    folder = federated[2][0]
    recommender = load_recommender(folder / "recommender.safetensors")
    means = {
        i: sum(recommender.score(u, i) for u in recommender.users) / len(recommender.users)
        for i in recommender.items
    }
    best = sorted(means, key=lambda item: -means[item])[:3]
    capsys.readouterr()
    words = ["recommend", str(folder), "--user", "nobody", "--top", "3"]
    assert run_app([*words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["user"], printed["source"]) == ("nobody", "popular")
    assert [row["item"] for row in printed["items"]] == best
    for row in printed["items"]:
        assert row["score"] == pytest.approx(means[row["item"]], abs=1e-9)
        assert row["rating"] == min(max(row["score"], 1.0), 5.0)
    assert run_app(words) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == (
        "user nobody is unknown to this silo: its popular items, by the model's means over all "
        "users"
    )
    assert run_app(["recommend", str(folder), "--user", "nobody", "--item", best[0]]) == 0
    assert capsys.readouterr().out.splitlines()[1] == f"{printed['items'][0]['rating']:.2f}"


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_table_of_all_users_has_what_each_is_recommended(
    federated: tuple[Any, tuple[Path, ...], list[Path]],
    tmp_path: Path,
    capsys: Capture,
    ending: str,
) -> None:
    folder, out = federated[2][0], tmp_path / f"items.{ending}"
    recommender = load_recommender(folder / "recommender.safetensors")
    words = ["recommend", str(folder), "--all", "--top", "4", "--out", str(out)]
    if ending == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
    capsys.readouterr()
    assert run_app(words) == 0
    assert capsys.readouterr().out == f"{len(recommender.users)} users written to {out}\n"
    if ending == "parquet":
        rows = [tuple(row.values()) for row in parquet.read_table(out).to_pylist()]
    else:
        with out.open(newline="") as file:
            header, *lines = csv.reader(file)
        assert header == ["user", "rank", "item", "rating", "score", "source"]
        rows = [(u, int(k), i, float(r), float(s), of) for u, k, i, r, s, of in lines]
    expected = [
        (user, rank, *item, "model")
        for user in recommender.users
        for rank, item in enumerate(recommender.best_items(user, 4), 1)
    ]
    popular = [("", k, *item, "popular") for k, item in enumerate(recommender.popular_items(4), 1)]
    assert rows == [*expected, *popular]
    assert out.stat().st_mode & 0o077 == 0
    assert run_app(words) == 2
    assert "expected a file that does not exist yet" in capsys.readouterr().err


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("given", MODELS, ids=lambda given: str(given["model"]))
def test_a_simulation_recommends_as_its_silos_do(
    federated: tuple[Any, tuple[Path, ...], list[Path]],
    tmp_path: Path,
    capsys: Capture,
    given: dict[str, Any],
) -> None:
    result, silos, results = federated
    if result.config.model != given["model"]:
        pytest.skip("of the other run")
    run = tmp_path / "run"
    config = replace(result.config, out=str(run))
    simulated = sg.run(sg.read_silos(silos[0].parent), config=config)
    assert simulated.test == result.test
    if simulated.best_round < len(simulated.rounds) and given["model"] == "rating_gcn":
        assert not (run / "recommenders").exists()
        return
    for folder in results:
        name = json.loads((folder / "result.json").read_text())["silo"]
        theirs = load_recommender(folder / "recommender.safetensors")
        ours = load_recommender(recommender_file(run, name))
        assert ours.users == theirs.users
        for user in ours.users:
            assert ours.best_items(user, 5) == theirs.best_items(user, 5)
    names = [silo.name for silo in silos]
    every = [tmp_path / f"{name}.csv" for name in ("all", *names)]
    for out, client in zip(every, ([], *(["--client", name] for name in names)), strict=True):
        flags = ["--all", "--top", "3", "--out", str(out), *client]
        assert run_app(["recommend", str(run), *flags]) == 0
    all_rows, *rows = [list(csv.reader(out.read_text().splitlines())) for out in every]
    assert all_rows[0] == ["client", *rows[0][0]]
    own = [[name, *row] for name, table in zip(names, rows, strict=True) for row in table[1:]]
    assert all_rows[1:] == own
    assert run_app(["report", str(run)]) == 0  # nothing is missing or altered
    first = next((run / "recommenders").iterdir())
    first.write_bytes(first.read_bytes() + b"x")
    assert run_app(["report", str(run)]) == 1
    words = ["recommend", str(run), "--user", "100"]
    for more, message in (
        ([], "expected the name of a client"),
        (["--client", "nowhere"], "unknown client 'nowhere'"),
    ):
        assert run_app([*words, *more]) == 2
        assert message in capsys.readouterr().err


def test_folders_without_a_recommender_are_refused(tmp_path: Path, capsys: Capture) -> None:
    options = OPTIONS | {"model": "consisrec", "method": "local", "rounds": 1}
    del options["hidden"], options["layers"], options["dropout"]
    sg.run(rating_graph(), **options, clients=2, out=str(tmp_path / "run"))
    assert run_app(["recommend", str(tmp_path / "run"), "--user", "100"]) == 2
    assert "got none: they are written when a run on ratings ends" in capsys.readouterr().err
    (tmp_path / "silo").mkdir()
    (tmp_path / "silo" / "report.html").write_text("")
    assert run_app(["recommend", str(tmp_path / "silo"), "--user", "100"]) == 2
    assert "of a run of labels of nodes or of model consisrec" in capsys.readouterr().err
    assert run_app(["recommend", str(tmp_path), "--user", "100"]) == 2
    assert "which is of no run: name a folder in a silo's results" in capsys.readouterr().err


def test_shown_ratings_are_on_the_scale_and_items_beyond_it_keep_their_order(
    tmp_path: Path,
) -> None:
    items = ("b", "c", "d")
    three = {"items": items, "item": torch.zeros(3, 1)}
    bias = {"bias": torch.tensor([6.0, 9.0, -7.0]), "rated": torch.zeros(0, 2, dtype=torch.int64)}
    small(**three, **bias, scale=(1.0, 5.0)).save(tmp_path / "r")
    recommender = load_recommender(tmp_path / "r")
    assert recommender.recommend("a", 3) == [("c", 5.0), ("b", 5.0), ("d", 1.0)]
    assert [recommender.predict("a", item) for item in items] == [5.0, 5.0, 1.0]
    assert replace(recommender, scale=None).predict("a", "c") == 10.0


def test_what_is_printed_steers_no_terminal_and_says_where_nothing_is_left(
    tmp_path: Path, capsys: Capture
) -> None:
    two = {"items": ("b", "\x1b[31mc\nd"), "item": torch.zeros(2, 1), "bias": torch.zeros(2)}
    small(**two).save(tmp_path / "two.safetensors")
    assert run_app(["recommend", str(tmp_path / "two.safetensors"), "--user", "a"]) == 0
    shown = capsys.readouterr().out
    assert "?[31mc?d" in shown
    assert "\x1b" not in shown
    small().save(tmp_path / "one.safetensors")
    assert run_app(["recommend", str(tmp_path / "one.safetensors"), "--user", "a"]) == 0
    assert capsys.readouterr().out == "user a has rated all items of this silo\n"


def small(**changed: Any) -> Recommender:
    one = torch.ones(1)
    own: dict[str, Any] = {
        "users": ("a",),
        "items": ("b",),
        "user": one[:, None],
        "item": one[:, None],
        "level": one,
        "bias": one,
        "rated": torch.zeros(1, 2, dtype=torch.int64),
    }
    return Recommender(**own | changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"user": torch.ones(2, 1)},
        {"item": torch.ones(1, 3)},
        {"level": torch.full((1,), torch.nan)},
        {"bias": torch.ones(1, dtype=torch.int64)},
        {"rated": torch.tensor([[0, 7]])},
        {"rated": torch.tensor([[-1, 0]])},
        {"users": ("a", "c")},
        {"scale": (5.0, 1.0)},
        {"users": ("a", "a"), "user": torch.ones(2, 1), "level": torch.ones(2)},
        {"items": ("b", "b"), "item": torch.ones(2, 1), "bias": torch.ones(2)},
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    small().save(tmp_path / "good")
    assert load_recommender(tmp_path / "good").predict("a", "b") == 3
    small(**changed).save(tmp_path / "bad")
    with pytest.raises(DataError, match=r"expected figures for . users in .*bad, got others"):
        load_recommender(tmp_path / "bad")


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    with pytest.raises(DataError, match=r"expected a recommender at .*file, got"):
        load_recommender(path)
    path.write_bytes(safetensors.torch.save({"user": torch.ones(1)}, {FORMAT: "[1]"}))
    with pytest.raises(DataError, match=f"expected a '{FORMAT}' in .*file, got something else"):
        load_recommender(path)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("given", MODELS, ids=lambda given: str(given["model"]))
def test_recommenders_of_a_simulation_do_not_depend_on_blocks(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    options = OPTIONS | given | {"rounds": 1, "clients": 6}
    items = []
    for size in (1, 2):
        run = tmp_path / str(size)
        sg.run(rating_graph(), **options, block_size=size, out=str(run))
        recommenders = [load_recommender(path) for path in sorted((run / "recommenders").iterdir())]
        assert len(recommenders) == 6
        items.append(
            [
                (f.users, [[i for i, *_ in f.best_items(u, 5)] for u in f.users])
                for f in recommenders
            ]
        )
    assert items[0] == items[1]
