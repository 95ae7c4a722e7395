"""Tables as Markdown."""

from collections.abc import Sequence


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table.

    >>> print(markdown_table(["method", "accuracy"], [["fedavg", "70.0"]]))
    | method | accuracy |
    | --- | --- |
    | fedavg | 70.0 |
    """
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join("| " + " | ".join(_cell(text) for text in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
