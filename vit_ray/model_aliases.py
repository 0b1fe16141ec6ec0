"""Names that timm and Hugging Face have for models of the catalog.

Recipes and models both read them; models import nothing that torch alone does not have.
"""

from __future__ import annotations

import re
from typing import Final

_SIZES: Final = {"tiny": "Ti", "small": "S", "base": "B", "large": "L", "huge": "H"}
# What follows a full stop in timm, and an owner or data set in the hub, are of weights.
_OWNER, _TAG = r"(?:[\w.-]+/)?", r"(?:\.\w+|-in21k)?"
_VIT: Final = re.compile(
    rf"{_OWNER}(?:vit|deit)[_-]({'|'.join(_SIZES)})[_-]patch(\d+)[_-](\d+){_TAG}"
)
_HYBRID: Final = re.compile(rf"vit_({'|'.join(_SIZES)})_r50_s(\d+)_(\d+){_TAG}")
_BIT: Final = re.compile(rf"resnetv2_(\d+x\d)_bit{_TAG}|(?:google/)?bit-(\d+)")


def canonical_model(name: str) -> tuple[str, int | None]:
    """The catalog's name of a model, and the side in pixels that another name of it says.

    Args:
        name: such as `vit_base_patch16_224.augreg_in21k` of timm, `google/vit-base-patch16-224` of
            the hub; any other is returned as it is.
    """
    if found := _VIT.fullmatch(name):
        return f"ViT-{_SIZES[found[1]]}/{found[2]}", int(found[3])
    if found := _HYBRID.fullmatch(name):
        return f"R50x1+ViT-{_SIZES[found[1]]}/{found[2]}", int(found[3])
    if found := _BIT.fullmatch(name):
        return f"R{found[1] or f'{found[2]}x1'}", None
    return name, None


def resolved_model(name: str, image_size: object) -> tuple[str, object]:
    """The catalog's name of a model, and its image size where another name says it.

    Args:
        image_size: as it is given; None = not at all.

    Raises:
        ValueError: the name is of another size than the one that is given.
    """
    known, side = canonical_model(name)
    if side is None or image_size in (side, (side, side), [side, side]):
        return known, image_size
    if image_size is not None:
        raise ValueError(
            f"name={name} is of {side} pixels and image_size={image_size}; "
            f"give image_size={side}, or name={known}"
        )
    return known, side
