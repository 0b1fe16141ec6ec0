"""The schema as users read it: every key with its values, default and meaning."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from pydantic import BaseModel

from vit_ray.config.keys import on_resume
from vit_ray.config.recipe import Recipe
from vit_ray.config.schema import allowed_text, is_list, nearest_key, section_type, yaml_text

# Keys of a row of a study that are those of `model` and of `study`.
_COUNTED_ELSEWHERE = ("study.models.model.", *(
    f"study.models.{key}" for key in ("data_fractions", "epochs", "steps", "images", "seeds")
))  # fmt: skip


@dataclass(frozen=True)
class KeyHelp:
    """One key of a recipe.

    Attributes:
        default: as YAML has it, or `required`.
        on_resume: whether a run may be resumed with another value; empty for keys that no training
            reads.
    """

    name: str
    default: str
    allowed: str
    meaning: str
    on_resume: str

    @property
    def section(self) -> str:
        return self.name.rpartition(".")[0]


@cache
def all_keys() -> tuple[KeyHelp, ...]:
    """Every key that takes a value, in the order of the schema."""
    return tuple(_keys(Recipe, ""))


@cache
def sections() -> dict[str, str]:
    """Every section and its meaning; the first, without a name, is the recipe itself."""
    return dict(_sections(Recipe, ""))


def keys_below(*prefixes: str) -> list[KeyHelp]:
    """The keys that are, or are below, one of the prefixes."""
    return [k for k in all_keys() if any(f"{k.name}.".startswith(f"{p}.") for p in prefixes)]


def count_keys(keys: Iterable[KeyHelp]) -> int:
    """How many of the keys have a meaning of their own."""
    return sum(not key.name.startswith(_COUNTED_ELSEWHERE) for key in keys)


def known_key(key: str) -> str:
    """The key or section itself if it is one, else the most similar key, or itself if none is."""
    valid = [] if "." in key else list(Recipe.model_fields)
    return key if keys_below(key) else nearest_key(Recipe, key, valid) or key


def _keys(schema: type[BaseModel], prefix: str) -> Iterator[KeyHelp]:
    whole = schema.model_json_schema()
    nodes, defs = whole["properties"], whole.get("$defs", {})
    for name, field in schema.model_fields.items():
        key, section = f"{prefix}{name}", section_type(field.annotation)
        if section is None or is_list(field.annotation):
            default = "required" if field.is_required() else yaml_text(field.default)
            mark = on_resume(key)
            yield KeyHelp(
                key,
                default,
                allowed_text(nodes[name], defs),
                _one_line(field.description),
                mark.value if mark else "",
            )
        if section is not None:
            yield from _keys(section, f"{key}.")


def _sections(schema: type[BaseModel], name: str) -> Iterator[tuple[str, str]]:
    yield name, _one_line(schema.__doc__)
    for key, field in schema.model_fields.items():
        if section := section_type(field.annotation):
            yield from _sections(section, f"{name}.{key}".removeprefix("."))


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())
