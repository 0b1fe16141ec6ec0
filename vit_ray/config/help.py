"""The schema as users read it: every key with its values, default and meaning."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any

from pydantic import BaseModel

from vit_ray.config.recipe import Recipe
from vit_ray.config.resume_compatibility import on_resume
from vit_ray.config.validation import dotted_keys, fields_below, is_list, nearest_key, section_type

Node = dict[str, Any]


@dataclass(frozen=True)
class KeyHelp:
    """One key of a recipe."""

    name: str
    value: str
    """The schema's default, or the recipe's value."""
    allowed: str
    meaning: str
    on_resume: str
    """Whether a run may be resumed with another value; empty for keys that no training reads."""


@dataclass(frozen=True)
class SectionHelp:
    """A section and its own keys, without those of its subsections."""

    name: str
    meaning: str
    keys: tuple[KeyHelp, ...]


def describe_sections(recipe: Recipe | None = None) -> list[SectionHelp]:
    """Every section in the order of the schema; the first, without a name, is the recipe itself.

    Args:
        recipe: its values replace the schema's defaults.
    """
    return list(_sections(Recipe, recipe.recorded() if recipe else {}, ""))


def key_names() -> list[str]:
    """Every key that takes a value."""
    sections = {section.name for section in describe_sections()}
    return [name for name in dotted_keys(Recipe) if name not in sections]


def known_key(key: str) -> str:
    """The key itself if a recipe has it, otherwise the most similar one, or the key if none is."""
    return key if key in key_names() else nearest_key(Recipe, key, list(Recipe.model_fields)) or key


def require_keys(recipe: Recipe, keys: Sequence[str], example: str) -> None:
    """Refuse a recipe that lacks a key that the command needs.

    Args:
        recipe: the recipe.
        keys: dotted keys of sections or values.
        example: a command line that has them.

    Raises:
        ValueError: the first key that is not set.
    """
    fields = dict(fields_below(Recipe))
    for key in keys:
        if attrgetter(key)(recipe) is not None:
            continue
        field, what = fields[key], []
        section = None if is_list(field.annotation) else section_type(field.annotation)
        if section:
            names = section.model_fields
            what = [f"{key}.{name}" for name in names if names[name].is_required()]
            what = what or [f"{key}.{next(iter(names))}"]
        meaning = _one_line(field.description).partition(";")[0]
        expected = " and ".join(what) or f"{meaning[:1].lower()}{meaning[1:]}"
        raise ValueError(f"{key} is not set; give {expected}, such as `{example}`")


def _sections(schema: type[BaseModel], values: Node, name: str) -> Iterator[SectionHelp]:
    keys, below = [], []
    nodes = _json_schema()["$defs"].get(schema.__name__, _json_schema())["properties"]
    for key, field in schema.model_fields.items():
        full, mark = f"{name}.{key}".removeprefix("."), on_resume(f"{name}.{key}".removeprefix("."))
        section = None if is_list(field.annotation) else section_type(field.annotation)
        if section:
            below.append((section, values.get(key) or {}, full))
            continue
        value = values.get(key, "required" if field.is_required() else field.default)
        meaning, allowed = _one_line(field.description), _allowed(nodes[key])
        keys.append(KeyHelp(full, _written(value), allowed, meaning, mark.value if mark else ""))
    yield SectionHelp(name, _one_line(schema.__doc__), tuple(keys))
    for inner in below:
        yield from _sections(*inner)


@cache
def _json_schema() -> Node:
    return Recipe.model_json_schema()


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _written(value: Any) -> str:
    """A value as YAML writes it."""
    return value if isinstance(value, str) else json.dumps(value)


def _allowed(node: Node) -> str:
    """The values that a key takes, as text: `0 | 1 | 2`, `integer > 0 | auto`."""
    match node:
        case {"anyOf": branches}:
            return " | ".join(dict.fromkeys(map(_allowed, branches)))
        case {"enum": values}:
            return " | ".join(map(_written, values))
        case {"const": value}:
            return _written(value)
        case {"prefixItems": items}:
            return f"[{', '.join(map(_allowed, items))}]"
        case {"items": items}:
            return f"[{_allowed(items)}, ...]"
        case {"$ref": reference}:
            section = _json_schema()["$defs"][reference.rpartition("/")[2]]
            return f"{{{', '.join(section.get('properties', ()))}}}"
        case {"type": "string"}:
            return "text"
        case {"type": "boolean"}:
            return "true | false"
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f" {sign} {node[bound]:g}" for bound, sign in signs.items() if bound in node]
    return node["type"] + ",".join(bounds)
