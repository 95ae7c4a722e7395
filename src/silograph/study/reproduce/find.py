"""Recipes by name: the files FOLDER/recipe_NAME.py of the repository's benchmarks."""

import re
from pathlib import Path

from silograph.core.errors import ConfigError, lookup
from silograph.experiment.resolve.trusted_code import check_trusted
from silograph.experiment.resolve.user_code import imported, is_spec
from silograph.study.reproduce.recipe import Recipe

_PART = r"[A-Za-z0-9_-][A-Za-z0-9_.-]*"


def recipes_in(folder: Path) -> dict[str, str]:
    """Return where the recipes of a folder are, by name.

    FOLDER/NAME is `RECIPE` in the file FOLDER/recipe_NAME.py, beside its lines and its page.

    Raises:
        ConfigError: there are none.
    """
    files = sorted(folder.glob("*/recipe_*.py"))
    if not files:
        raise ConfigError(
            f"expected recipes in {folder}, got none: they are in the folder benchmarks of "
            "silograph's repository, so run the command there, or name the folder by --recipes DIR"
        )
    return {
        f"{file.parent.name}/{file.stem.removeprefix('recipe_')}": f"{file}:RECIPE"
        for file in files
    }


def find_recipe(name: str, folder: Path, *, trust: bool) -> Recipe:
    """Return a recipe by its name in a folder, or by `FILE.py:NAME` or `package.module:NAME`.

    Args:
        name: of the recipe.
        folder: of recipes by name.
        trust: whether a recipe by name may be run: its file is what the folder has.

    Raises:
        ConfigError: there is none (names the nearest), its name is not like folder/name, or it is
            not trusted.
    """
    spec = name if is_spec(name) else lookup(recipes_in(folder), name, "recipe")
    if not is_spec(name):
        check_trusted({"recipe": spec}, trust, folder)
    recipe = imported(spec, Recipe)
    if not re.fullmatch(rf"{_PART}(/{_PART})*", recipe.name):
        raise ConfigError(f"expected a recipe's name like folder/name, got {recipe.name!r}")
    return recipe
