"""The version stands in one place, and what must repeat it does."""

import re
from pathlib import Path

import silograph

ROOT = Path(__file__).parents[2]


def test_citation_and_changelog_have_the_version_of_the_package() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {silograph.__version__}\n" in citation
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[(.+?)\]", changelog, re.MULTILINE)[0] == silograph.__version__
