"""Tables of the page of security are those of the code and of the committed attacks."""

import runpy
from pathlib import Path

from silograph.core.kinds import Kind

DOCS = Path(__file__).parents[2] / "docs"


def test_tables_follow_from_the_messages_the_policy_and_the_attacks() -> None:
    tables = runpy.run_path(str(DOCS / "security_tables.py"))
    page = (DOCS / "security.md").read_text(encoding="utf-8")
    assert page.count("<!-- table: ") == len(tables["TABLES"])
    assert tables["with_tables"](page) == page


def test_every_kind_of_message_has_a_row() -> None:
    """The optimizer is carried by no message."""
    page = (DOCS / "security.md").read_text(encoding="utf-8")
    rows = page.partition("## Kinds of messages")[2].partition("\n## ")[0]
    for kind in set(Kind) - {Kind.OPTIMIZER}:
        assert f"`{kind}`" in rows
