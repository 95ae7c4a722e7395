"""Packs the lines of finished cells, `NAME.jsonl`, into `NAME.jsonl.xz`.

    python benchmarks/pack.py [FILE ...]

Without files it packs those of all recipes. Packed lines take a tenth of the room; everything that
reads a study's lines reads both files, and new cells are added to `NAME.jsonl` until it is packed.
`xz -dc FILE` shows the lines.
"""

import sys
from pathlib import Path

from silograph.study.study import pack

HERE = Path(__file__).parent


def files_of_recipes() -> list[Path]:
    """Return the files of lines that recipes have written here."""
    recipes = HERE.glob("*/recipe_*.py")
    paths = (r.with_name(f"{r.stem.removeprefix('recipe_')}.jsonl") for r in recipes)
    return sorted(path for path in paths if path.exists())


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]) if sys.argv[1:] else files_of_recipes():
        pack(path)
