"""Recipes from YAML: shipped ones, `base` files, `key.sub=value` overrides, and clear errors."""

import difflib
import io
import itertools
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from vit_ray.addresses import UPLOADED, redact
from vit_ray.config.recipe import Recipe, in_folder, recipe_from_dict
from vit_ray.config.schema import errors_of
from vit_ray.own_parts import trust_named

_VARIABLES: Final = {"uri": "MLFLOW_TRACKING_URI", "experiment": "MLFLOW_EXPERIMENT_NAME"}
_PACKAGE = Path(__file__).parents[1]
# Folders of the shipped recipes, in an installed package and in a checkout.
_PLACES = (_PACKAGE / "recipes", _PACKAGE.parent / "jobs" / "recipes")
_TITLES = ("Paper", "Left open", "Expected", "Cost", "Commands?")


def load_recipe(
    path: str | Path, overrides: Iterable[str] | Mapping[str, Any] | None = None
) -> Recipe:
    """Read a YAML recipe and apply overrides such as `optim.learning_rate=3e-4`.

    Custom components that it names may be imported from then on (`own_parts.py`).

    Args:
        path: YAML file, or the name of a shipped recipe, such as `digits`. Its key `base` names the
            recipe that it changes: a shipped one, or a file relative to it. Paths in a file are
            relative to its folder. Paths in a shipped recipe are relative to the current folder,
            and in a submitted job also those in a file that was not uploaded.
        overrides: `dotted.key=value`, the value in YAML; or dotted keys with their values, such as
            `{"optim.steps": 5}`; paths are relative to the current folder.

    Raises:
        ValueError: no such file, bad YAML, an unknown key (with the nearest valid one), or an
            impossible value (with its dotted key and what is allowed).
    """
    return completed(_read_tree(Path(path), seen=()), overrides or (), str(path))


def completed(
    tree: dict[str, Any], overrides: Iterable[str] | Mapping[str, Any], where: str
) -> Recipe:
    """The recipe from plain data and overrides, as in `load_recipe`."""
    tree = {"tracking": {}} | changed(tree, overrides)
    if isinstance(tree["tracking"], dict):
        tree["tracking"] = mlflow_variables() | tree["tracking"]
    recipe = recipe_from_dict(tree, where)
    trust_named(tree)
    recipe.storage.use()
    return recipe


def mlflow_variables() -> dict[str, str]:
    """Keys of `tracking` from MLflow's own variables, for a recipe that does not set them."""
    return {key: os.environ[name] for key, name in _VARIABLES.items() if os.environ.get(name)}


def changed(tree: dict[str, Any], overrides: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Plain data with the values of the overrides, as in `load_recipe`; changed in place.

    Raises:
        ValueError: an override is not `key=value`, or a part of its key is no section.
    """
    if isinstance(overrides, str):
        raise ValueError(f"overrides={overrides!r} is a text; give a list, such as [{overrides!r}]")
    pairs = overrides.items() if isinstance(overrides, Mapping) else map(_parsed, overrides)
    for key, value in pairs:
        try:
            json.dumps(value, default=os.fspath)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{key}={value!r}: {error}; give texts, numbers, true, false, lists or dictionaries"
            ) from None
        if key == "base":
            raise ValueError(f"base={value} is a key of recipe files; give {value} as the recipe")
        node = tree
        *parents, last = str(key).split(".")
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
    if equals and key:
        return key, parse_yaml(text, f"override {override!r}")
    raise ValueError(f"override {override!r}: expected key=value, such as init_from=runs/mine")


class _Constructor(SafeConstructor):
    """Dates stay strings: a recipe has JSON's types of values."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML 1.2 text, with JSON's types of values and strings as keys.

    Raises:
        ValueError: it is not valid YAML, or an anchor contains itself.
    """
    yaml = YAML(typ="safe", pure=True)  # the parser in C reads YAML 1.1
    yaml.Constructor = _Constructor
    try:
        plain = json.dumps(yaml.load(text), ensure_ascii=False)
        plain.encode()
    # The last four are for a text that does not fit its tag, such as `!!bool x`, or no Unicode.
    except (YAMLError, RecursionError, ValueError, IndexError, KeyError, TypeError) as error:
        reason: object = error
        if isinstance(error, MarkedYAMLError) and error.problem_mark:
            mark = error.problem_mark
            problem = str(error.problem).partition(" with value ")[0]  # the value may be a secret
            reason = f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
        raise ValueError(redact(f"{where}: not valid YAML: {reason}")) from None
    return json.loads(plain)


def write_yaml(tree: Mapping[str, Any]) -> str:
    """Plain data as the text of a recipe."""
    yaml: Any = YAML(typ="safe", pure=True)  # declared without the types of its settings
    yaml.default_flow_style, yaml.sort_base_mapping_type_on_output = False, False
    stream = io.StringIO()
    yaml.dump(tree, stream)
    return stream.getvalue()


def _read_tree(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    path = _find(path, f"base of {str(seen[-1])!r}: " if seen else "")
    whose = f"recipe {str(path)!r}"
    if path.resolve() in seen:
        raise ValueError(f"{whose}: base names the recipe itself")
    with errors_of(f"{whose}: give YAML in UTF-8"):
        text = path.read_text(encoding="utf-8")
    tree = parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise ValueError(
            f"{whose}: expected a mapping of sections, got {tree!r}; begin it with `base: digits` "
            "or another recipe that `vit-ray recipes` lists, and below it the keys that differ"
        )
    base = tree.pop("base", None)
    folder = path.parent.resolve()
    # In a submitted job, the folder of a recipe that was not uploaded may exist on one node only.
    if not is_shipped(path) and (UPLOADED not in Path.cwd().parts or UPLOADED in folder.parts):
        tree = in_folder(tree, str(folder))
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ValueError(f"{whose}: base={base!r}: expected the name of one recipe")
    local = path.parent / os.path.expanduser(base)
    is_name = not local.is_file() and shipped_recipe(base) is not None
    base_tree = _read_tree(Path(base) if is_name else local, (*seen, path.resolve()))
    return _merge(base_tree, tree)


def _find(path: Path, whose: str) -> Path:
    """The file itself, or the shipped recipe of this name.

    Raises:
        ValueError: neither exists (the message gives similar names), or the path has weights.
    """
    file = path if path.is_file() else shipped_recipe(path.as_posix())
    is_run = file is None and any(path.glob("step-*"))
    if is_run or path.suffix in (".npz", ".safetensors"):
        raise ValueError(f"{whose}{str(path)!r} has weights; give a recipe and init_from={path}")
    if file is not None:
        return file
    near = difflib.get_close_matches(path.name, [f.name for f in path.parent.glob("*.yaml")], 3)
    near += difflib.get_close_matches(path.as_posix().removesuffix(".yaml"), recipe_names(), 3, 0.5)
    hint = f"; similar: {', '.join(near)}" if near else ""
    what = "this is a folder; give a YAML file in it" if path.is_dir() else f"no such file{hint}"
    raise ValueError(f"{whose}recipe {str(path)!r}: {what} (`vit-ray recipes` lists all)")


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = {**below, **above}
    for key in below.keys() & above.keys():
        if isinstance(below[key], dict) and isinstance(above[key], dict):
            merged[key] = _merge(below[key], above[key])
    return merged


def recipes_folder() -> Path:
    """The folder of the shipped recipes."""
    return next((folder for folder in _PLACES if folder.is_dir()), _PLACES[0])


def recipe_names() -> list[str]:
    """Names of the shipped recipes, such as `digits` and `paper/vit_h14_jft`."""
    folder = recipes_folder()
    names = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.yaml"))
    return sorted((name.as_posix() for name in names), key=lambda name: (name.count("/"), name))


def shipped_recipe(name: str) -> Path | None:
    """The file of a shipped recipe, by its name or by the name's last part if that is unique."""
    name, names = name.removeprefix("jobs/recipes/").removesuffix(".yaml"), recipe_names()
    matches = [name] if name in names else [n for n in names if n.rpartition("/")[2] == name]
    return recipes_folder() / f"{matches[0]}.yaml" if len(matches) == 1 else None


def is_shipped(path: Path) -> bool:
    """Whether the file is a recipe of this package or of any checkout, also one not installed."""
    return any(
        (folder.parents[1] / "vit_ray" / "config").is_dir()
        for folder in path.resolve().parents
        if folder.match("jobs/recipes") or folder.match("vit_ray/recipes")
    )


def header_of(path: Path) -> dict[str, str]:
    """Parts of a recipe's header by name, such as `Cost`, each as one line; the title is `""`."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    text = " ".join(line.removeprefix("#").strip() for line in lines)
    parts = re.split(rf"(?:^|\s)({'|'.join(_TITLES)})[:,]\s", text)
    return dict(zip(["", *parts[1::2]], map(str.strip, parts[::2]), strict=True))
