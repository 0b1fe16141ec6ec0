"""The recipes that come with the package: their folder, their names, and what they promise."""

import itertools
import re
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
# In an installed package, and in a checkout.
_PLACES = (_PACKAGE / "recipes", _PACKAGE.parent / "jobs" / "recipes")
_TITLES = ("Paper", "Left open", "Expected", "Cost", "Commands?")


def recipes_folder() -> Path:
    """The folder of the shipped recipes."""
    return next((place for place in _PLACES if place.is_dir()), _PLACES[0])


def recipe_names() -> list[str]:
    """Names of the shipped recipes, such as `digits` and `paper/vit_h14_jft`."""
    folder = recipes_folder()
    names = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.yaml"))
    return sorted((name.as_posix() for name in names), key=lambda name: (name.count("/"), name))


def shipped_recipe(name: str) -> Path | None:
    """The file of a shipped recipe, by its name or by the name's last part if that is unique."""
    name, names = name.removeprefix("jobs/recipes/").removesuffix(".yaml"), recipe_names()
    same = [one for one in names if one.rpartition("/")[2] == name]
    chosen = name if name in names else same[0] if len(same) == 1 else None
    return recipes_folder() / f"{chosen}.yaml" if chosen else None


def is_shipped(path: Path) -> bool:
    """Whether the file is one of the package or of a checkout, also one that is not installed."""
    above = path.resolve().parents
    folders = [one for one in above if one.match("jobs/recipes") or one.match("vit_ray/recipes")]
    return any((folder.parents[1] / "vit_ray" / "config").is_dir() for folder in folders)


def header_of(path: Path) -> dict[str, str]:
    """The statements of a recipe's header, such as `Cost`, each on one line; the title is `""`."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    text = " ".join(line.removeprefix("#").strip() for line in lines)
    parts = re.split(rf"(?:^|\s)({'|'.join(_TITLES)})[:,]\s", text)
    return dict(zip(["", *parts[1::2]], map(str.strip, parts[::2]), strict=True))
