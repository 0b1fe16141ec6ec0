"""Parts of a model by name, in the order of its forward pass; torch is not needed.

A part is a module of the model, or one block or unit of its chain: `embedding`, `blocks.3`, `head`.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from vit_ray.models.catalog import find_spec

_CHAINS = ("blocks", "units")


def parts_of(name: str, options: dict[str, Any]) -> tuple[str, ...]:
    """Parts of a model that have parameters, with the arguments of `build_model`.

    Raises:
        ValueError: as `build_model`.
    """
    spec = find_spec(name, options)
    if spec.encoder is None:
        assert spec.resnet is not None
        units = (f"units.{i}" for i in range(sum(spec.resnet.stages)))
        return (
            ("root", "root_norm", *units, "head")
            if spec.is_axial
            else ("root", *units, "norm", "head")
        )
    has = {
        "class_token": spec.options.pool == "cls",
        "positions": spec.options.positions.startswith("learned"),
        "representation": spec.options.representation,
    }
    blocks = (f"blocks.{i}" for i in range(spec.encoder.depth))
    parts = ("embedding", "class_token", "positions", *blocks, "norm", "representation", "head")
    return tuple(part for part in parts if has.get(part, True))


def part_of(parameter: str) -> str:
    """The part that a parameter belongs to, by its name in a model or in an objective around it."""
    first, *rest = parameter.removeprefix("model.").split(".")
    return f"{first}.{rest[0]}" if first in _CHAINS else first


def chosen_parts(wanted: Iterable[str], parts: Sequence[str]) -> frozenset[str]:
    """The named parts: each by its name, `blocks` for all blocks, `blocks.0-5` for six.

    Raises:
        ValueError: a name does not belong to any part.
    """
    chosen: set[str] = set()
    for name in wanted:
        found = {part for part in parts if name in (part, part.partition(".")[0])}
        match = re.fullmatch(r"(\w+)\.(\d{1,9})-(\d{1,9})", name)
        if match and f"{match[1]}.{int(match[3])}" in parts:
            found = {f"{match[1]}.{i}" for i in range(int(match[2]), int(match[3]) + 1)}
        if not found:
            last_of_each = {part.partition(".")[0]: part for part in parts}.values()
            names = (re.sub(r"\.([1-9]\d*)$", r".0-\1", part) for part in last_of_each)
            raise ValueError(f"{name!r} is not a part of this model; it has {', '.join(names)}")
        chosen |= found
    return frozenset(chosen)
