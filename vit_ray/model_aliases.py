"""Names of models: the paper's family of each, and what timm and Hugging Face call it."""

import re
from typing import Final

_SIZES: Final = {"tiny": "Ti", "small": "S", "base": "B", "large": "L", "huge": "H"}
# The part after a full stop in timm, and an owner or data set in the hub, name weights.
_OWNER, _TAG = r"(?:[\w.-]+/)?", r"(?:\.\w+|-in21k)?"
_VIT: Final = re.compile(
    rf"{_OWNER}(?:vit|deit)[_-]({'|'.join(_SIZES)})[_-]patch(\d+)[_-](\d+){_TAG}"
)
_HYBRID: Final = re.compile(rf"vit_({'|'.join(_SIZES)})_r50_s(\d+)_(\d+){_TAG}")
_BIT: Final = re.compile(rf"resnetv2_(\d+x\d)_bit{_TAG}|(?:google/)?bit-(\d+)")

_FAMILIES: Final = {"Axial": "Axial", "Hybrid": r".*\+", "ViT": "ViT", "ResNet": r"R\d|ResNet"}


def model_family(name: str) -> str:
    """`ViT`, `Hybrid`, `ResNet`, `Axial` or `Other`, by the catalog's name."""
    return next((family for family, test in _FAMILIES.items() if re.match(test, name)), "Other")


def canonical_model(name: str) -> tuple[str, int | None]:
    """The catalog's name of a model, and the side in pixels that its other name gives.

    Args:
        name: such as `vit_base_patch16_224.augreg_in21k` in timm, `google/vit-base-patch16-224` on
            the hub; any other name is returned unchanged.
    """
    if found := _VIT.fullmatch(name):
        return f"ViT-{_SIZES[found[1]]}/{found[2]}", int(found[3])
    if found := _HYBRID.fullmatch(name):
        return f"R50x1+ViT-{_SIZES[found[1]]}/{found[2]}", int(found[3])
    if found := _BIT.fullmatch(name):
        return f"R{found[1] or f'{found[2]}x1'}", None
    return name, None


def resolved_model(name: str, image_size: object) -> tuple[str, object]:
    """The catalog's name of a model, and its image size if its other name gives it.

    Args:
        image_size: as given; None = not given.

    Raises:
        ValueError: the name is for another size than the given one.
    """
    known, side = canonical_model(name)
    if side is None or image_size in (side, (side, side), [side, side]):
        return known, image_size
    if image_size is not None:
        raise ValueError(
            f"name={name} is for {side} pixels, but image_size={image_size}; give "
            f"image_size={side}, or name={known}"
        )
    return known, side
