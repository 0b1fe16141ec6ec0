"""The recipes that come with the package: their folder, their names, and what they promise."""

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
# In an installed package, and in a checkout.
_PLACES = (_PACKAGE / "recipes", _PACKAGE.parent / "jobs" / "recipes")
_TITLES = ("Paper", "Left open", "Expected", "Cost", "Commands?")


@dataclass(frozen=True)
class Header:
    """The statements in a recipe's header comment; empty where one is missing."""

    title: str
    expected: str
    cost: str


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
    name = name.removeprefix("jobs/recipes/").removesuffix(".yaml")
    names = recipe_names()
    found = [known for known in names if known.rpartition("/")[2] == name]
    if name in names:
        found = [name]
    return recipes_folder() / f"{found[0]}.yaml" if len(found) == 1 else None


def header_of(path: Path) -> Header:
    """Title, expected result and cost of a recipe, each on one line."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    text = " ".join(line.removeprefix("#").strip() for line in lines)
    parts = re.split(rf"(?:^|\s)({'|'.join(_TITLES)})[:,]\s", text)
    fields = dict(zip(parts[1::2], parts[2::2], strict=True))
    return Header(parts[0].strip(), fields.get("Expected", ""), fields.get("Cost", ""))
