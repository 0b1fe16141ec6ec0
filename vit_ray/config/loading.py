"""Recipes from YAML: `base` files, `key.sub=value` overrides, and clear errors."""

import difflib
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from vit_ray.config.recipe import Recipe, recipe_from_dict
from vit_ray.config.secrets import redact
from vit_ray.config.shipped_recipes import recipe_names, require_one_recipe, shipped_recipe
from vit_ray.own_parts import trust_named

MLFLOW_VARIABLES: Final = {"uri": "MLFLOW_TRACKING_URI", "experiment": "MLFLOW_EXPERIMENT_NAME"}
"""Environment variables that give keys of `tracking` which a recipe does not set."""

logger = logging.getLogger(__name__)


def load_recipe(
    path: str | Path, overrides: Iterable[str] | Mapping[str, Any] | None = None
) -> Recipe:
    """Read a YAML recipe and apply overrides such as `optim.learning_rate=3e-4`.

    Its own parts may be imported from then on (`own_parts.py`).

    Args:
        path: YAML file, or the name of a shipped recipe, such as `digits`; a key `base` names
            another recipe, relative to it or shipped, that it changes.
        overrides: `dotted.key=value`, the value in YAML; or dotted keys with their values, such as
            `{"optim.steps": 5}`.

    Raises:
        ValueError: no such file, a name that means a file here as well as a shipped recipe, bad
            YAML, an unknown key (with the nearest valid one), an ill-typed or impossible value
            (with its dotted key).
    """
    require_one_recipe(str(path))
    tree = changed(_read_tree(Path(path), seen=()), overrides or ())
    _add_mlflow_variables(tree)
    recipe = recipe_from_dict(tree, where=str(path))
    trust_named(tree)
    recipe.storage.use()
    return recipe


def _add_mlflow_variables(tree: dict[str, Any]) -> None:
    """Fill the keys of MLflow that the recipe leaves out from MLflow's own variables."""
    tracking = tree.get("tracking", {})
    for key, variable in MLFLOW_VARIABLES.items():
        value = os.environ.get(variable)
        if value and isinstance(tracking, dict) and key not in tracking:
            tree["tracking"] = tracking = {**tracking, key: value}
            logger.warning("tracking.%s=%s is taken from %s", key, redact(value), variable)


def changed(tree: dict[str, Any], overrides: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """The plain tree with the values of the overrides, which are as in `load_recipe`.

    Raises:
        ValueError: an override is not `key=value`, or its key goes through a value.
    """
    given = overrides.items() if isinstance(overrides, Mapping) else map(_parsed, overrides)
    for key, value in given:
        try:
            json.dumps(value)
        except TypeError:
            raise ValueError(
                f"override of {key}: {value!r} is of Python's type {type(value).__name__}; give a "
                "text, a number, a bool, None, or a list or dict of these"
            ) from None
        node = tree
        *parents, last = key.split(".")
        for parent in parents:
            if node.get(parent) is None:
                node[parent] = {}
            node = node[parent]
            if not isinstance(node, dict):
                raise ValueError(f"override of {key}: {parent} is a value, not a section")
        node[last] = value
    return tree


def _parsed(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    if not equals or not key:
        place = Path(override)
        if place.suffix in _WEIGHTS or (os.path.isdir(place) and any(place.glob("step-*"))):
            raise ValueError(f"{override!r} is not a key: give weights as init_from={override}")
        raise ValueError(f"override {override!r}: expected key=value, such as train.zero_stage=2")
    return key, _parse(text, f"override {override!r}")


_TEXT: Final = "tag:yaml.org,2002:str"
_MERGE: Final = "tag:yaml.org,2002:merge"
"""Tag of the key `<<`, which takes the keys of another section."""


_READ_OTHERWISE: Final = (":timestamp", ":int", ":float")
_NUMBERS: Final = {
    "int": r"[-+]?(0|[1-9][\d_]*|0x[\da-fA-F_]+)",
    "float": r"[-+]?((\d[\d_]*\.[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?|\d+[eE][-+]?\d+"
    r"|\.(inf|Inf|INF))|\.(nan|NaN|NAN)",
}


class _Loader(yaml.SafeLoader):
    """YAML as users write it: 3e-4 is a number (YAML 1.1 would read a string); a date is a text,
    and so are 010 and 1:30 (it would read 8 and 90).

    Values are limited to JSON's kinds. Keys are texts as written (YAML 1.1 would read `on` as
    true), and none appears twice in a section.
    """

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in found if not tag.endswith(_READ_OTHERWISE)]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors = {
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None
        or tag.rpartition(":")[2] in ("null", "bool", "int", "float", "str", "seq", "map")
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Keys are texts; refuses one that is there already, which YAML's own rules forbid."""
        node = super().compose_mapping_node(anchor)
        names = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                key.tag = _TEXT
                if key.value in names:
                    problem = (
                        f"the key {key.value!r} is given twice in this section; keep one of them"
                    )
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                names.add(key.value)
        return node


for _kind, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_kind}", re.compile(f"^({_pattern})$"), list("-+0123456789.")
    )


def _parse(text: str, where: str) -> Any:
    """The value of a YAML text.

    Raises:
        ValueError: it is not valid YAML, or an anchor contains itself.
    """
    try:
        loader = _Loader(text)
        loader.name = where  # what the error's places are of
        tree = loader.get_single_data()
        json.dumps(tree, ensure_ascii=False).encode()
    # The last three: a text that does not fit its tag, such as `!!bool x`, or is not Unicode.
    except (yaml.YAMLError, RecursionError, ValueError, IndexError, KeyError) as error:
        raise ValueError(f"{where}: not valid YAML: {error}") from None
    return tree


_WEIGHTS: Final = (".npz", ".safetensors")


def _read_tree(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    path = _find(path, f"base of {str(seen[-1])!r}: " if seen else "")
    whose = f"recipe {str(path)!r}"
    if path.resolve() in seen:
        raise ValueError(f"{whose}: base names the recipe itself")
    try:
        tree = _parse(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{whose} is not UTF-8 text ({error.reason} at byte {error.start}); save the YAML file "
            "as UTF-8, or check that it is the file you mean"
        ) from None
    if tree is None:
        raise ValueError(
            f"{whose} is empty; begin it with `base: digits` or another recipe that `vit-ray "
            "recipes` lists, and below it the keys that differ"
        )
    if not isinstance(tree, dict):
        raise ValueError(f"{whose}: expected a mapping of sections, got {tree!r}")
    base = tree.pop("base", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ValueError(f"{whose}: base={base!r}: expected the name of one recipe")
    local = path.parent / base
    is_shipped = not local.is_file() and shipped_recipe(base) is not None
    below = _read_tree(Path(base) if is_shipped else local, (*seen, path.resolve()))
    return _merge(below, tree)


def _find(path: Path, whose: str) -> Path:
    """The file itself, or the shipped recipe of this name.

    Raises:
        ValueError: there is neither; the message gives similar names.
    """
    if path.suffix in _WEIGHTS:
        raise ValueError(
            f"{whose}{str(path)!r} is a weight file, not a recipe; give a recipe, and the weights "
            f"as init_from={path}"
        )
    found = path if path.is_file() else shipped_recipe(path.as_posix())
    if found is not None:
        return found
    if any(path.glob("step-*")):
        raise ValueError(
            f"{whose}{str(path)!r} is the folder of a run, not a recipe; give its recipe, and the "
            f"weights of the run as init_from={path}"
        )
    if path.is_dir():
        inside = ", ".join(sorted(str(file) for file in path.glob("*.yaml"))[:3])
        raise ValueError(
            f"{whose}recipe {str(path)!r} is a folder; give a YAML "
            f"file{f' in it, such as {inside},' if inside else ''} or one that `vit-ray recipes` "
            "lists"
        )
    siblings = [file.name for file in path.parent.glob("*.yaml")]
    near = difflib.get_close_matches(path.name, siblings, 3)
    near += difflib.get_close_matches(path.as_posix().removesuffix(".yaml"), recipe_names(), 3, 0.5)
    hint = f"; similar: {', '.join(near)}" if near else ""
    raise ValueError(
        f"{whose}recipe {str(path)!r}: no such file{hint} (`vit-ray recipes` lists all)"
    )


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = {**below, **above}
    for key in below.keys() & above.keys():
        if isinstance(below[key], dict) and isinstance(above[key], dict):
            merged[key] = _merge(below[key], above[key])
    return merged
