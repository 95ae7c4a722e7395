"""Pages as tests read them: parsed, and held to what every page must be."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

VOID = {"meta", "input", "br", "hr", "img", "link"}


class Page(HTMLParser):
    """A page whose tags must nest; keeps texts, tables, titles and data."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.tables: list[list[list[str]]] = []
        self.titles: list[str] = []  # of sections and figures
        self.codes: list[str] = []
        self.text = ""
        self.json = ""
        self.feed(self.source)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        assert len(given) == len(attrs), (tag, attrs)
        self.tags.append((tag, given))
        if tag not in VOID:
            self.stack.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag in ("h2", "h3"):
            self.titles.append("")
        elif tag == "code":
            self.codes.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert "svg" in self.stack  # only there does a slash close a tag
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag, (tag, self.getpos())

    def handle_data(self, data: str) -> None:
        if {"script", "style"} & set(self.stack):
            if self.tags[-1] == ("script", {"type": "application/json", "id": "data"}):
                self.json += data
            return
        self.text += data
        if {"td", "th"} & set(self.stack):
            self.tables[-1][-1][-1] += data
        if {"h2", "h3"} & set(self.stack):
            self.titles[-1] += data
        if "code" in self.stack:
            self.codes[-1] += data

    @property
    def data(self) -> dict[str, Any]:
        """What the page's script reads."""
        found: dict[str, Any] = json.loads(self.json)
        return found

    def all(self, tag: str, part: str = "") -> list[dict[str, str]]:
        """Attributes of every tag with a class."""
        return [
            given
            for name, given in self.tags
            if name == tag and (not part or part in given.get("class", "").split())
        ]

    def table(self, *header: str) -> list[dict[str, str]]:
        """The rows, by column, of the first table with these columns among its own."""
        for rows in self.tables:
            if set(header) <= set(rows[0]):
                return [dict(zip(rows[0], row, strict=True)) for row in rows[1:] if len(row) > 1]
        raise AssertionError(f"no table with {header}")


def read_page(path: Path) -> Page:
    """Parse a page and check what holds for every one: it is whole, titled, and all by itself."""
    page = Page(path)
    assert page.source.startswith("<!doctype html>\n<!-- silograph report -->\n")
    assert not re.search(r"https?://|//\w+\.|@import|url\(", page.source)
    outside = ("src", "href", "action", "data", "poster", "srcset")
    assert not [given for _, given in page.tags if set(outside) & given.keys()]
    assert not [name for _, given in page.tags for name in given if name.startswith("on")]
    ids = [given["id"] for _, given in page.tags if "id" in given]
    assert len(ids) == len(set(ids))
    assert len(page.all("figure")) == len(page.all("figcaption"))
    assert all(page.titles)
    assert "None" not in page.text
    assert "nan" not in page.text.lower().replace("nand", "").split()
    for given in page.all("path"):
        assert given["d"]
        assert not re.search(r"nan|inf|None", given["d"])
    return page
