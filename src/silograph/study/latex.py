"""LaTeX of tables, with the rules of booktabs."""

import re
from collections.abc import Sequence

SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
    "±": r"$\pm$",
    "²": "$^2$",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}
SPECIAL_CHARACTERS = re.compile("|".join(map(re.escape, SPECIAL)))


def escape(text: str) -> str:
    r"""Return a text as LaTeX sets it.

    >>> print(escape("50 % of a_b & {c}"))
    50 \% of a\_b \& \{c\}
    """
    return SPECIAL_CHARACTERS.sub(lambda match: SPECIAL[match[0]], text)


def table(
    caption: str,
    label: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    last_rows: Sequence[Sequence[str]] = (),
) -> str:
    """Return a floating table; the first column is of words, the others of numbers.

    Args:
        caption: of the table, in LaTeX as all texts here.
        label: what the paper refers to it by.
        columns: their titles.
        rows: cells.
        last_rows: further cells, below a rule.
    """
    lines = [
        r"\begin{table}",
        r"  \centering",
        f"  \\caption{{{caption}}}",
        f"  \\label{{{label}}}",
        f"  \\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}",
        r"    \toprule",
        _line(columns),
        r"    \midrule",
        *map(_line, rows),
        *([r"    \midrule", *map(_line, last_rows)] if last_rows else []),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"    {' & '.join(cells)} \\\\"
