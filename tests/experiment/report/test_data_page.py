"""Laws of the page about silos' data: whole, escaped, for its owner only, and never over a file."""

import re
from pathlib import Path

import silograph as sg
from mistakes import raises_code
from pages import read_page
from silo_folders import NORTH, SOUTH, folder
from silograph.cli import run_app
from silograph.core.errors import ConfigError
from silograph.experiment.report import write_inspection
from silograph.graph.silos.inspect import inspect_silos

BAD = '<script>alert("x")</script>'


def silos(tmp_path: Path) -> Path:
    """Two silos whose names of features and classes are HTML, with enough nodes for histograms."""
    quoted = BAD.replace('"', "'")
    for name, files in (("north", NORTH), ("south", SOUTH)):
        toml = f'name = "{name}"\nfeatures = 1\nclasses = ["{quoted}", "b"]\n[missing]\n'
        nodes = "".join(f"{name}{i},{('b', quoted)[i % 2]}\n" for i in range(30))
        features = "".join(f"{name}{i},{i}.5\n" for i in range(30))
        edges = f"source,target\n{name}0,{name}1\n"
        own = {
            "silo.toml": f'{toml}"{BAD.replace(chr(34), "")}" = 3\n',
            "nodes.csv": f"id,label\n{nodes}",
            "features.csv": f'id,"{quoted}"\n{features}',
            "edges.csv": edges,
            "cross_edges.csv": "own,silo,remote\n",
        }
        folder(tmp_path / "silos" / name, files | own)
    return tmp_path / "silos"


def test_the_page_is_whole_and_names_are_escaped(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert run_app(["check", str(silos(tmp_path)), "--out", str(out)]) == 0
    assert out.stat().st_mode & 0o077 == 0  # counts of a silo's data are its own
    text = out.read_text()
    read_page(out)
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text
    assert not re.search(r"(src|href)=.?http", text)


def test_pages_of_ratings_and_of_silos_without_anything(tmp_path: Path) -> None:
    shop = {"silo.toml": 'name = "shop"\ntask = "rating"\n', "ratings.csv": "user,item,rating\n"}
    ratings = "".join(f"u{i},i{i % 3},{1 + i % 5}\n" for i in range(40))
    folder(tmp_path / "shop", shop | {"ratings.csv": shop["ratings.csv"] + ratings})
    nothing = NORTH | {
        "silo.toml": 'name = "north"\nfeatures = 0\nclasses = 2\n',
        "nodes.csv": "id,label\na,\n",
        "features.csv": None,
        "edges.csv": "source,target\n",
        "cross_edges.csv": "own,silo,remote\n",
    }
    folder(tmp_path / "empty", nothing)
    for name in ("shop", "empty"):
        page = tmp_path / f"{name}.html"
        write_inspection(inspect_silos([sg.read_silo(tmp_path / name)]), tmp_path / name, page)
        read_page(page)


def test_a_page_goes_over_no_other_file(tmp_path: Path) -> None:
    data, out = silos(tmp_path), tmp_path / "notes.html"
    out.write_text("mine")
    with raises_code(ConfigError, "existing-output"):
        write_inspection(inspect_silos(sg.read_silos(data).members), data, out)
    assert out.read_text() == "mine"
    assert run_app(["check", str(data), "--out", str(tmp_path / "page.pdf")]) != 0
    assert run_app(["check", str(data), "--json", "--out", str(tmp_path / "page.html")]) != 0
    assert not (tmp_path / "page.html").exists()
