"""Names of the paper's models, and the sizes behind each; `build` makes them.

Sizes: paper Table 1; Ti, S and b from google-research/vision_transformer `configs/models.py` and
the caption of Figure 4. The paper gives ViT-b's hidden sizes as half of ViT-B's and does not give
its heads; here it has 6, so that a head is 64 wide as in every other model.
"""

import dataclasses
import difflib
import math
from typing import Any

from vit_ray.paper import canonical_model

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
class ModelSpec:
    """What a name stands for: a ViT, a ResNet, or a hybrid, which has both an encoder and a ResNet.

    Attributes:
        encoder: of a ViT or hybrid.
        patch_size: of a ViT over square patches of the image.
        resnet: a BiT ResNet, or the backbone of a hybrid.
        is_axial: attention along rows, then along columns, in the blocks of a ViT, and instead of
            the 3 x 3 convolutions of a ResNet.
        options: the options class of the family, such as `VitOptions`.
    """

    encoder: EncoderSize | None = None
    patch_size: int = 0
    resnet: ResNetSize | None = None
    is_axial: bool = False
    options: Any = None


# Stage 4 of the /16 hybrids is moved into stage 3, which leaves a map twice as fine (paper 4.1).
_STAGES_16, _STAGES_32 = ResNetSize((3, 4, 9)), ResNetSize((3, 4, 6, 3))
_PATCHES = {
    "Ti": (16,),
    "S": (14, 16, 32),
    "b": (16, 32),
    "B": (8, 14, 16, 32),
    "L": (14, 16, 32),
    "H": (14,),
}

_SPECS: dict[str, ModelSpec] = {
    **{
        f"ViT-{name}/{patch}": ModelSpec(ENCODERS[name], patch)
        for name, patches in _PATCHES.items()
        for patch in patches
    },
    **{name: ModelSpec(resnet=size) for name, size in RESNETS.items()},
    "R50x1+ViT-B/32": ModelSpec(ENCODERS["B"], resnet=_STAGES_32),
    "R50x1+ViT-B/16": ModelSpec(ENCODERS["B"], resnet=_STAGES_16),
    "R50x1+ViT-L/32": ModelSpec(ENCODERS["L"], resnet=_STAGES_32),
    "R50x1+ViT-L/16": ModelSpec(ENCODERS["L"], resnet=_STAGES_16),
    "Axial-ViT-B/32": ModelSpec(ENCODERS["B"], 32, is_axial=True),
    "Axial-ViT-B/16": ModelSpec(ENCODERS["B"], 16, is_axial=True),
    "AxialResNet50": ModelSpec(resnet=_STAGES_32, is_axial=True),
}

# Families whose size is given in full, and the sizes that each needs.
_FAMILIES: dict[str, tuple[str, ...]] = {
    "ViT": ("depth", "width", "mlp_dim", "num_heads", "patch_size"),
    "Axial-ViT": ("depth", "width", "mlp_dim", "num_heads", "patch_size"),
    "R+ViT": ("depth", "width", "mlp_dim", "num_heads", "stages", "width_factor"),
    "ResNet": ("stages", "width_factor"),
    "AxialResNet": ("stages", "width_factor"),
}


def model_names() -> list[str]:
    """Every name that `build_model` knows, and the families whose size is given in full."""
    return [*_SPECS, *_FAMILIES]


def find_spec(name: str, options: dict[str, Any]) -> ModelSpec:
    """The sizes and options behind a name, timm's too, with the arguments of `build_model`.

    Raises:
        ValueError: for an unknown name, a family without its sizes, or an option that the family
            does not have.
    """
    name, _ = canonical_model(name)
    needed = _FAMILIES.get(name, ())
    if name not in _SPECS and not needed:
        near = difflib.get_close_matches(name, model_names(), n=5, cutoff=0.4) or model_names()
        raise ValueError(
            f"model name {name!r} is unknown; similar names: {', '.join(near)}; "
            f"{', '.join(_FAMILIES)} take any size in full"
        )
    if missing := [key for key in needed if key not in options]:
        raise ValueError(
            f"model {name!r} needs its size in full: {', '.join(needed)}; add {', '.join(missing)}"
        )
    if needed:
        encoder, resnet = None, None
        if "depth" in needed:
            encoder = EncoderSize(*(options[key] for key in needed[:4]))
        if "stages" in needed:
            resnet = ResNetSize(tuple(options["stages"]), options["width_factor"])
        patch_size = options["patch_size"] if "patch_size" in needed else 0
        spec = ModelSpec(encoder, patch_size, resnet, name.startswith("Axial"))
    else:
        spec = _SPECS[name]
    given = {key: value for key, value in options.items() if key not in needed}
    if not math.isfinite(given.get("head_bias", 0.0)):
        raise ValueError(f"head_bias={given['head_bias']} must be a finite number")
    of_vit = AxialVitOptions if spec.is_axial else VitOptions
    kind: type[Any] = of_vit if spec.encoder else ResNetOptions
    allowed = [field.name for field in dataclasses.fields(kind)]
    unknown = [key for key in given if key not in allowed]
    if not unknown:
        return dataclasses.replace(spec, options=kind(**given))
    near = [match for key in unknown for match in difflib.get_close_matches(key, allowed, n=1)]
    hint = f"did you mean {', '.join(near)}? " if near else ""
    if any(key in sizes for key in unknown for sizes in _FAMILIES.values()):
        hint = f"only {', '.join(_FAMILIES)} take sizes; other names have a fixed size; "
    raise ValueError(
        f"model {name!r} has no option {', '.join(unknown)}; it takes {', '.join(allowed)}; "
        f"{hint}leave it out (options inherited from another model.name must be reset, such as "
        f"model.{unknown[0]}=null)"
    )


def as_grid(image_size: ImageSize) -> Grid:
    """(height, width) of a side or a pair.

    Raises:
        ValueError: if a side is not a positive whole number.
    """
    pair = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    if len(pair) != 2 or not all(isinstance(side, int) and side > 0 for side in pair):
        raise ValueError(
            f"image_size={image_size!r} must be a side in pixels or (height, width), each above 0"
        )
    return (pair[0], pair[1])
