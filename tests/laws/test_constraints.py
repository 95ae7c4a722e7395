"""The two files of pinned versions: one for pip's constraints, one with digests of every file."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DIGEST = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def name_of(name: str) -> str:
    """Return a package's name as indexes have it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(text: str) -> dict[str, str]:
    """Return versions by name of what is pinned to one version; raise `ValueError` for others."""
    found = {}
    for line in text.splitlines():
        name, version = re.fullmatch(r"([\w.-]+)==([\w.]+)", line).groups()  # type: ignore[union-attr]
        if name_of(name) in found:
            raise ValueError(name)
        found[name_of(name)] = version
    return found


def hashed(text: str) -> dict[str, list[str]]:
    """Return the digests that stand behind each requirement, as it is written."""
    whole = (line.split() for line in text.replace("\\\n", " ").splitlines())
    return {first: rest for first, *rest in whole}


def test_both_files_name_the_same_versions_and_each_has_digests() -> None:
    """They name no index either: whose digests they are is for who installs to choose."""
    text = (ROOT / "constraints-hashed.txt").read_text()
    found = hashed(text)
    assert pinned("\n".join(found)) == pinned((ROOT / "constraints.txt").read_text())
    for requirement, digests in found.items():
        assert digests, requirement
        assert len(set(digests)) == len(digests), requirement
        assert all(DIGEST.fullmatch(digest) for digest in digests), requirement
    assert len(found) > 50
    assert "://" not in text


@pytest.mark.parametrize("line", ["torch>=2", "torch==2.13.0+cpu", "-r other.txt"])
def test_only_exact_versions_that_any_index_may_have_are_pinned(line: str) -> None:
    """A range would let in what nobody tested, and a local version is one index's own."""
    with pytest.raises(AttributeError):
        pinned(line)
