"""Check a built site: every link, image and anchor that stays within it leads somewhere.

Sphinx' own `linkcheck` builder asks other hosts and skips links between pages; this does the
reverse. Usage: python docs/check_links.py docs/_build/html/VERSION
"""

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What a browser loads or follows.
TARGETS = ("href", "src", "data", "poster")


class Page(HTMLParser):
    """The anchors of a page, and what it refers to.

    Attributes:
        anchors: ids and names that a link may end with.
        targets: values of `TARGETS`, in the order of the page.
    """

    def __init__(self, path: Path) -> None:
        """Read a page."""
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the ids and targets of an element."""
        for name, value in attrs:
            if value and (name == "id" or (tag == "a" and name == "name")):
                self.anchors.add(value)
            elif value and name in TARGETS:
                self.targets.append(value)


def broken_links(site: Path) -> Iterator[str]:
    """Yield a line for each link within a site that leads nowhere."""
    site = site.resolve()
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site} has no pages"
    for path, page in pages.items():
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            name, anchor = path.relative_to(site), unquote(parts.fragment)
            if not file.is_file() or not file.is_relative_to(site):
                yield f"{name}: {target} does not exist"
            elif parts.fragment and file in pages and anchor not in pages[file].anchors:
                yield f"{name}: {target} has no such anchor"


if __name__ == "__main__":
    sys.exit("\n".join(broken_links(Path(sys.argv[1]))) or None)
