"""Pages in a browser: nothing sticks out, no script fails, and links lead somewhere.

These need `pip install playwright` and the system's Chromium. Last run: 2026-11-28.
"""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import silograph as sg
from runs import MakeGraph
from silograph.experiment.report import write_comparison, write_inspection, write_report
from silograph.graph.silos.inspect import inspect_silos

sync_api: Any = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs the system's Chromium"),
]
RUN: dict[str, Any] = {"clients": 3, "rounds": 2, "hidden": "4", "partition": "random"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def pages(make_graph: MakeGraph, tmp_path: Path) -> list[Path]:
    options: dict[str, dict[str, Any]] = {
        "a_folder_with_a_long_name_that_does_not_break": {},
        "b": {"method": "fedgraph"},
        "c": {"method": "local", "class_weight": "balanced"},
    }
    runs = [tmp_path / name for name in options]
    for out, own in zip(runs, options.values(), strict=True):
        sg.run(make_graph(60), **RUN | own, out=str(out))
    single = [Path(write_report(run, None).path) for run in runs]
    cut = sg.run(make_graph(60), **RUN).cut
    assert cut is not None
    sg.write_silos(tmp_path / "silos", cut.graph, cut.partition, cut.split)
    members = sg.read_silos(tmp_path / "silos").members
    long_names = tuple(f"{'long' * 30}{n}" for n in range(cut.graph.num_features))
    members = tuple(replace(silo, feature_names=long_names) for silo in members)
    write_inspection(inspect_silos(members), tmp_path / "silos", tmp_path / "data.html")
    several = Path(write_comparison(runs, tmp_path / "all.html").path)
    return [*single, several, tmp_path / "data.html"]


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_and_work(browser: Any, pages: list[Path], width: int, scheme: str) -> None:
    for path in pages:
        check_page(browser, path, width, scheme)


def check_page(browser: Any, path: Path, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page, failures = context.new_page(), []
    page.on("console", lambda m: failures.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: failures.append(str(error)))
    page.goto(path.as_uri())
    overhang = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(overhang) == 0, path.name
    for summary in page.query_selector_all("summary"):
        if summary.is_visible():
            summary.click()
    for label in page.query_selector_all("fieldset.axis label"):
        label.click()
    assert page.evaluate(overhang) == 0, path.name
    assert failures == []
    for link in page.query_selector_all("a[href]"):
        target = link.get_attribute("href")
        if target.startswith("#"):
            assert page.query_selector(f'[id="{target[1:]}"]') is not None, target
        elif "://" not in target:
            assert (path.parent / target).exists(), target
    context.close()
