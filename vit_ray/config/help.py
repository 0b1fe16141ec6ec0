"""What a person reads of the schema: every key with its values, default and meaning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from vit_ray.config.recipe import Recipe
from vit_ray.config.resume_compatibility import on_resume
from vit_ray.config.validation import dotted_keys

_REQUIRED = object()
Node = dict[str, Any]


@dataclass(frozen=True)
class KeyHelp:
    """One key of a recipe."""

    name: str
    value: str
    """The default, or what a recipe sets."""
    allowed: str
    meaning: str
    on_resume: str
    """Whether a run may be resumed with another value; empty where no training reads the key."""


@dataclass(frozen=True)
class SectionHelp:
    """A section and its own keys, without those of its subsections."""

    name: str
    meaning: str
    keys: tuple[KeyHelp, ...]


def describe_sections(recipe: Recipe | None = None) -> list[SectionHelp]:
    """Every section in the order of the schema; the first, without a name, is the recipe itself.

    Args:
        recipe: whose values to show in place of the schema's defaults.
    """
    values = recipe.model_dump(mode="json") if recipe else {}
    return list(_sections(_schema(), values, ""))


def key_names() -> list[str]:
    """Every key that takes a value."""
    sections = set(_section_names())
    return [name for name in dotted_keys(Recipe) if name not in sections]


def _section_names() -> list[str]:
    return [section.name for section in describe_sections()]


@lru_cache(maxsize=1)
def _schema() -> Node:
    return Recipe.model_json_schema()


def _sections(section: Node, values: Node, name: str) -> Iterator[SectionHelp]:
    keys, below = [], []
    for key, node in section["properties"].items():
        inner = _section_in(node)
        value = values.get(key, node.get("default", _REQUIRED))
        full = f"{name}.{key}".removeprefix(".")
        if inner is None:
            text = "required" if value is _REQUIRED else _as_written(value)
            mark = on_resume(full)
            keys.append(
                KeyHelp(full, text, _allowed(node), _one_line(node), mark.value if mark else "")
            )
        else:
            below.append((inner, value if isinstance(value, dict) else {}, full))
    yield SectionHelp(name, _one_line(section), tuple(keys))
    for inner, inner_values, full in below:
        yield from _sections(inner, inner_values, full)


def _section_in(node: Node) -> Node | None:
    """The section that a key holds, if it holds one and not a list of them."""
    for branch in (node, *node.get("anyOf", ())):
        if "$ref" in branch:
            return _resolve(branch)
    return None


def _resolve(node: Node) -> Node:
    return _schema()["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node


def _one_line(node: Node) -> str:
    return " ".join(node.get("description", "").split())


def _as_written(value: Any) -> str:
    """As YAML writes it."""
    return value if isinstance(value, str) else json.dumps(value)


def _allowed(node: Node) -> str:
    """The values that a key takes, in words: `0 | 1 | 2`, `integer > 0 | auto`."""
    if "anyOf" in node:
        return " | ".join(dict.fromkeys(_allowed(branch) for branch in node["anyOf"]))
    if "enum" in node:
        return " | ".join(_as_written(value) for value in node["enum"])
    if "const" in node:
        return _as_written(node["const"])
    if "prefixItems" in node:
        return f"[{', '.join(_allowed(item) for item in node['prefixItems'])}]"
    if "items" in node:
        return f"[{_allowed(node['items'])}, ...]"
    if "$ref" in node:
        return f"{{{', '.join(_resolve(node)['properties'])}}}"
    return {"string": "text", "boolean": "true | false"}.get(node["type"]) or _bounded(node)


def _bounded(node: Node) -> str:
    least, most = node.get("minimum"), node.get("maximum")
    above = node.get("exclusiveMinimum")
    below = node.get("exclusiveMaximum")
    low = f" >= {least:g}" if least is not None else f" > {above:g}" if above is not None else ""
    high = f" <= {most:g}" if most is not None else f" < {below:g}" if below is not None else ""
    return f"{node['type']}{low}{',' if low and high else ''}{high}"
