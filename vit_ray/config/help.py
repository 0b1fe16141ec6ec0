"""What a person reads of the schema: every key with default and meaning."""

from __future__ import annotations

from pydantic import BaseModel

from vit_ray.config.schema import Recipe
from vit_ray.config.validation import section_type, value_text


def describe_keys() -> str:
    """All dotted keys with type, default and meaning, one a line, for `--help`."""
    return "\n".join(_describe_section(Recipe, ""))


def _describe_section(model: type[BaseModel], prefix: str) -> list[str]:
    lines = []
    for name, field in model.model_fields.items():
        section = section_type(field.annotation)
        if section is not None:
            lines += ["", f"{prefix}{name}: {(section.__doc__ or '').splitlines()[0]}"]
            lines += _describe_section(section, f"{prefix}{name}.")
        else:
            default = "required" if field.is_required() else value_text(field.get_default())
            lines.append(f"  {prefix}{name} [{default}]  {field.description or ''}")
    return lines
