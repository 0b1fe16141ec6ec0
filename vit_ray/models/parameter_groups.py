"""Parts of a model by name, in the order of its forward pass; torch is not needed.

A part is a module of the model, or one block or unit of its chain: `embedding`, `blocks.3`, `head`.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from vit_ray.models.catalog import (
    HybridVit,
    PlainAxialResNet,
    PlainAxialVit,
    PlainResNet,
    PlainVit,
    checked_options,
    find_spec,
)

_CHAINS = ("blocks", "units")
# Layer 0 of a Transformer, with the patch embedding.
_FIRST_LAYER = ("embedding", "class_token", "positions", "registers", "mask")


def parts_of(name: str, options: dict[str, Any]) -> tuple[str, ...]:
    """Parts of a model that have parameters, with the arguments of `build_model`.

    Raises:
        ValueError: as `build_model`.
    """
    spec, rest = find_spec(name, options)
    chosen = checked_options(name, spec, rest)
    if isinstance(spec, PlainResNet | PlainAxialResNet):
        units = tuple(f"units.{i}" for i in range(sum(spec.size.stages)))
        norm = ("root", *units, "norm") if isinstance(spec, PlainResNet) else None
        return (*(norm or ("root", "root_norm", *units)), "head")
    assert isinstance(spec, PlainVit | HybridVit | PlainAxialVit)
    has = {
        "class_token": chosen.pool == "cls",
        "positions": chosen.positions.startswith("learned"),
        "registers": chosen.registers > 0,
        "attention_pool": chosen.pool == "map",
        "representation": chosen.representation,
    }
    blocks = (f"blocks.{i}" for i in range(spec.size.depth))
    stem = ("embedding", "class_token", "positions", "registers")
    parts = (*stem, *blocks, "norm", "attention_pool", "representation", "head")
    return tuple(part for part in parts if has.get(part, True))


def part_of(parameter: str) -> str:
    """The part that a parameter belongs to, by its name in a model or in an objective around it."""
    first, *rest = parameter.removeprefix("model.").split(".")
    return f"{first}.{rest[0]}" if first in _CHAINS else first


def chosen_parts(wanted: Iterable[str], parts: Sequence[str]) -> frozenset[str]:
    """Parts that are meant: each by its name, `blocks` for all blocks, `blocks.0-5` for six.

    Raises:
        ValueError: a name is of no part.
    """
    chosen: set[str] = set()
    for name in wanted:
        found = {part for part in parts if name in (part, part.partition(".")[0])}
        found |= _in_range(name, parts)
        if not found:
            raise ValueError(
                f"{name!r} is no part of this model; it has {', '.join(_summary(parts))}"
            )
        chosen |= found
    return frozenset(chosen)


def _in_range(name: str, parts: Sequence[str]) -> set[str]:
    """Parts of a range such as `blocks.0-5`; empty where it is none, or not all of it is there."""
    match = re.fullmatch(r"(\w+)\.(\d{1,9})-(\d{1,9})", name)
    if match is None:
        return set()
    first, last = int(match[2]), int(match[3])
    indices = (part.removeprefix(f"{match[1]}.") for part in parts)
    inside = {i for i in indices if i.isdecimal() and first <= int(i) <= last}
    return {f"{match[1]}.{i}" for i in inside} if len(inside) == last - first + 1 else set()


def _summary(parts: Sequence[str]) -> list[str]:
    """The parts, the blocks as one range."""
    short: list[str] = []
    for part in parts:
        chain, dot, index = part.partition(".")
        entry = f"{chain}.0-{index}" if dot else part
        if dot and short and short[-1].startswith(f"{chain}."):
            short[-1] = entry
        else:
            short.append(entry if index != "0" else part)
    return short


def layer_of(parameter: str, depth: int) -> int:
    """Layer of a parameter of a Transformer: 0 the embedding, i + 1 block i, depth + 1 the rest.

    As BEiT (arXiv:2106.08254) and MAE (arXiv:2111.06377) number them for layer-wise decay.
    Positions that are added before another block than the first are of that block's layer.
    """
    part = part_of(parameter)
    own_table = re.search(r"^positions\.([1-9]\d*)\.", parameter.removeprefix("model."))
    if own_table:
        return int(own_table[1]) + 1
    if part in _FIRST_LAYER:
        return 0
    chain, _, index = part.partition(".")
    return int(index) + 1 if chain == "blocks" else depth + 1
