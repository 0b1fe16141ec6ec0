"""Names of the paper's models, and the sizes behind each; `build` makes them.

Sizes: paper Table 1; Ti, S and b from google-research/vision_transformer `configs/models.py` and
the caption of Figure 4. The paper gives ViT-b's hidden sizes as half of ViT-B's and does not give
its heads; here it has 6, so that a head is 64 wide as in every other model.
"""

import dataclasses
import difflib
from typing import Any

from vit_ray.models.sizes import (
    AxialResNetOptions,
    AxialVitOptions,
    EncoderSize,
    Grid,
    ResNetOptions,
    ResNetSize,
    VitOptions,
)

ImageSize = int | tuple[int, int]

ENCODERS: dict[str, EncoderSize] = {
    "Ti": EncoderSize(depth=12, width=192, mlp_dim=768, num_heads=3),
    "S": EncoderSize(depth=12, width=384, mlp_dim=1536, num_heads=6),
    "b": EncoderSize(depth=12, width=384, mlp_dim=1536, num_heads=6),
    "B": EncoderSize(depth=12, width=768, mlp_dim=3072, num_heads=12),
    "L": EncoderSize(depth=24, width=1024, mlp_dim=4096, num_heads=16),
    "H": EncoderSize(depth=32, width=1280, mlp_dim=5120, num_heads=16),
}

RESNETS: dict[str, ResNetSize] = {
    "R50x1": ResNetSize((3, 4, 6, 3), 1),
    "R50x2": ResNetSize((3, 4, 6, 3), 2),
    "R101x1": ResNetSize((3, 4, 23, 3), 1),
    "R152x1": ResNetSize((3, 8, 36, 3), 1),
    "R152x2": ResNetSize((3, 8, 36, 3), 2),
    "R152x4": ResNetSize((3, 8, 36, 3), 4),
    "R200x3": ResNetSize((3, 24, 36, 3), 3),
}


@dataclasses.dataclass(frozen=True)
class PlainVit:
    """A ViT over square patches of the image."""

    size: EncoderSize
    patch_size: int


@dataclasses.dataclass(frozen=True)
class HybridVit:
    """A ViT over the feature map of a ResNet."""

    size: EncoderSize
    backbone: ResNetSize


@dataclasses.dataclass(frozen=True)
class PlainResNet:
    """A BiT ResNet."""

    size: ResNetSize


@dataclasses.dataclass(frozen=True)
class PlainAxialVit:
    """A ViT whose blocks attend along rows, then along columns."""

    size: EncoderSize
    patch_size: int


@dataclasses.dataclass(frozen=True)
class PlainAxialResNet:
    """A ResNet whose 3 x 3 convolutions are axial attention."""

    size: ResNetSize


ModelSpec = PlainVit | HybridVit | PlainResNet | PlainAxialVit | PlainAxialResNet

# Stage 4 of the /16 hybrids is moved into stage 3, which leaves a map twice as fine (paper 4.1).
_STAGES_16 = ResNetSize((3, 4, 9))
_STAGES_32 = ResNetSize((3, 4, 6, 3))

_SPECS: dict[str, ModelSpec] = {
    **{
        f"ViT-{name}/{patch}": PlainVit(ENCODERS[name], patch)
        for name, patch in [
            ("Ti", 16),
            ("S", 16),
            ("S", 32),
            ("b", 16),
            ("b", 32),
            ("B", 8),
            ("B", 16),
            ("B", 32),
            ("L", 16),
            ("L", 32),
            ("H", 14),
        ]
    },
    **{name: PlainResNet(size) for name, size in RESNETS.items()},
    "R50x1+ViT-B/32": HybridVit(ENCODERS["B"], _STAGES_32),
    "R50x1+ViT-B/16": HybridVit(ENCODERS["B"], _STAGES_16),
    "R50x1+ViT-L/32": HybridVit(ENCODERS["L"], _STAGES_32),
    "R50x1+ViT-L/16": HybridVit(ENCODERS["L"], _STAGES_16),
    "Axial-ViT-B/32": PlainAxialVit(ENCODERS["B"], 32),
    "Axial-ViT-B/16": PlainAxialVit(ENCODERS["B"], 16),
    "AxialResNet50": PlainAxialResNet(ResNetSize((3, 4, 6, 3))),
}

# Families whose size is given in full, and the sizes that each asks for.
_FAMILIES: dict[str, tuple[str, ...]] = {
    "ViT": ("depth", "width", "mlp_dim", "num_heads", "patch_size"),
    "Axial-ViT": ("depth", "width", "mlp_dim", "num_heads", "patch_size"),
    "R+ViT": ("depth", "width", "mlp_dim", "num_heads", "stages", "width_factor"),
    "ResNet": ("stages", "width_factor"),
    "AxialResNet": ("stages", "width_factor"),
}

_OPTIONS: dict[type[ModelSpec], type[Any]] = {
    PlainVit: VitOptions,
    HybridVit: VitOptions,
    PlainResNet: ResNetOptions,
    PlainAxialVit: AxialVitOptions,
    PlainAxialResNet: AxialResNetOptions,
}


def model_names() -> list[str]:
    """Every name that `build_model` knows, and the families whose size is given in full."""
    return [*_SPECS, *_FAMILIES]


def find_spec(name: str, options: dict[str, Any]) -> tuple[ModelSpec, dict[str, Any]]:
    """The sizes behind a name, and the options that are not sizes.

    Raises:
        ValueError: for an unknown name, or a family without its sizes.
    """
    if name in _SPECS:
        return _SPECS[name], options
    if name in _FAMILIES:
        return _spec_in_full(name, options)
    near = difflib.get_close_matches(name, model_names(), n=5, cutoff=0.4) or model_names()
    raise ValueError(
        f"model name {name!r} is unknown; near names: {', '.join(near)}. "
        f"{', '.join(_FAMILIES)} take any size in full."
    )


def _spec_in_full(name: str, options: dict[str, Any]) -> tuple[ModelSpec, dict[str, Any]]:
    needed = _FAMILIES[name]
    missing = [key for key in needed if key not in options]
    if missing:
        raise ValueError(
            f"model {name!r} needs its size in full: {', '.join(needed)}; add {', '.join(missing)}."
        )
    rest = {key: value for key, value in options.items() if key not in needed}
    resnet = (
        ResNetSize(tuple(options["stages"]), options["width_factor"])
        if ("stages" in needed)
        else None
    )
    if resnet is not None and name != "R+ViT":
        return (PlainResNet if name == "ResNet" else PlainAxialResNet)(resnet), rest
    size = EncoderSize(*(options[key] for key in ("depth", "width", "mlp_dim", "num_heads")))
    if resnet is not None:
        return HybridVit(size, resnet), rest
    return (PlainVit if name == "ViT" else PlainAxialVit)(size, options["patch_size"]), rest


def checked_options(name: str, spec: ModelSpec, options: dict[str, Any]) -> Any:
    """The options of the spec's family, from those that are not sizes.

    Raises:
        ValueError: for an option that the family does not have.
    """
    kind = _OPTIONS[type(spec)]
    allowed = [field.name for field in dataclasses.fields(kind)]
    unknown = [key for key in options if key not in allowed]
    if unknown:
        near = [match for key in unknown for match in difflib.get_close_matches(key, allowed, n=1)]
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        if any(key in sizes for key in unknown for sizes in _FAMILIES.values()):
            hint = f" Sizes are given in full to {', '.join(_FAMILIES)}; a name has its own."
        raise ValueError(
            f"model {name!r} has no option {', '.join(unknown)}; "
            f"it takes {', '.join(allowed)}.{hint}"
        )
    return kind(**options)


def as_grid(image_size: ImageSize) -> Grid:
    """(height, width) of a side or a pair.

    Raises:
        ValueError: if a side is not a positive whole number.
    """
    pair = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    if len(pair) != 2 or not all(isinstance(side, int) and side > 0 for side in pair):
        raise ValueError(
            f"image_size={image_size!r} must be a side in pixels or (height, width), each above 0."
        )
    return (pair[0], pair[1])
