"""Names of the paper's models, with their sizes and options; `build.py` builds them.

Sizes: paper Table 1; Ti, S and b from google-research/vision_transformer `configs/models.py` and
the caption of Figure 4. The paper gives ViT-b's hidden sizes as half of ViT-B's and does not give
its number of heads; here it has 6, so that a head is 64 wide as in every other model.

Nothing here needs torch, which takes seconds to import.
"""

import dataclasses
import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from vit_ray.paper import canonical_model

# (rows, columns), or the height and width of an image.
Grid = tuple[int, int]
ImageSize = int | Grid
Pool = Literal["cls", "gap"]
Activation = Literal["gelu_tanh", "gelu"]

# As in the reference code; PyTorch's default is 1e-5.
LAYER_NORM_EPS = 1e-6


@dataclass(frozen=True)
class EncoderSize:
    """Depth, width D, MLP width and heads of a Transformer encoder."""

    depth: int
    width: int
    mlp_dim: int
    num_heads: int

    def __post_init__(self) -> None:
        for name in ("depth", "width", "mlp_dim", "num_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1; raise {name}")
        if self.width % self.num_heads:
            raise ValueError(
                f"width={self.width} is not divisible by num_heads={self.num_heads}; "
                f"change num_heads to a divisor of {self.width}, or change width"
            )


@dataclass(frozen=True)
class VitOptions:
    """Options of a ViT besides its size.

    Attributes:
        positions, positions_at: a cell of Table 8; `sincos_2d` are fixed positions.
        representation: adds the tanh layer of pre-training.
        head_bias: constant that is added to the head's bias (-10 for ImageNet-21k).
        stochastic_depth: fraction of images for which the last block's branches are dropped.
        activation: of the MLPs; `gelu_tanh` is that of the reference code.
        norm_eps: epsilon of the layer norms.
    """

    positions: Literal["none", "learned_1d", "learned_2d", "relative", "sincos_2d"] = "learned_1d"
    positions_at: Literal["stem", "every_layer", "every_layer_shared"] = "stem"
    pool: Pool = "cls"
    representation: bool = False
    head_bias: float = 0.0
    dropout: float = 0.0
    stochastic_depth: float = 0.0
    activation: Activation = "gelu_tanh"
    norm_eps: float = LAYER_NORM_EPS

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, choices = getattr(self, field.name), get_args(field.type)
            if get_origin(field.type) is Literal and value not in choices:
                raise ValueError(
                    f"{field.name}={value!r} is unknown; use one of {', '.join(choices)}"
                )
        if self.positions_at != "stem" and not self.positions.startswith("learned"):
            raise ValueError(
                f"positions_at={self.positions_at!r} has no effect with "
                f"positions={self.positions!r}; leave positions_at at 'stem', or use a learned "
                "position"
            )
        for name in ("dropout", "stochastic_depth"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0 and below 1")
        if not 0.0 < self.norm_eps < 1.0:
            raise ValueError(f"norm_eps={self.norm_eps} must be above 0 and below 1")


@dataclass(frozen=True)
class AxialVitOptions(VitOptions):
    """Options of a ViT with axial attention: no class token, and only added positions."""

    pool: Pool = "gap"

    def __post_init__(self) -> None:
        super().__post_init__()
        refused = {
            "pool": (self.pool != "gap", "has no class token; use pool='gap'"),
            "stochastic_depth": (
                self.stochastic_depth,
                "has blocks whose batch is lines, not images; leave it at 0",
            ),
            "positions": (
                self.positions == "relative",
                "never attends to the whole sequence; use 'learned_1d', 'learned_2d' or 'none'",
            ),
        }
        for name, (is_refused, reason) in refused.items():
            if is_refused:
                raise ValueError(f"{name}={getattr(self, name)!r}: an axial ViT {reason}")


@dataclass(frozen=True)
class ResNetSize:
    """Units of each stage, and the factor on all widths (64 in the first stage)."""

    stages: tuple[int, ...]
    width_factor: int = 1

    def __post_init__(self) -> None:
        if not self.stages or min(self.stages) < 1:
            raise ValueError(f"stages={self.stages} must name at least one unit in each stage")
        if self.width_factor < 1:
            raise ValueError(f"width_factor={self.width_factor} must be at least 1")

    @property
    def widths(self) -> tuple[int, ...]:
        """Inner channels of each stage; a unit has four times as many outputs."""
        return tuple(64 * self.width_factor * 2**index for index in range(len(self.stages)))

    @property
    def channels_out(self) -> int:
        """Channels of the last feature map."""
        return 4 * self.widths[-1]

    def units(self) -> Iterator[tuple[int, int, int]]:
        """Input channels, inner width and stride of each unit; all stages but the first halve."""
        channels = self.widths[0]
        for stage, (count, width) in enumerate(zip(self.stages, self.widths, strict=True)):
            for index in range(count):
                yield channels, width, 2 if stage > 0 and index == 0 else 1
                channels = 4 * width

    def grid(self, image_size: Grid) -> Grid:
        """(rows, columns) of the last feature map, rounded up as padding does.

        Raises:
            ValueError: if the image is smaller than the area of one pixel of the map.
        """
        if min(image_size) < self.reduction:
            raise ValueError(
                f"image_size={image_size[0]}x{image_size[1]} is smaller than the {self.reduction} "
                f"pixels that {len(self.stages)} stages reduce to one; raise image_size to at "
                f"least {self.reduction}"
            )
        return -(-image_size[0] // self.reduction), -(-image_size[1] // self.reduction)

    @property
    def reduction(self) -> int:
        """Image pixels along a side for one pixel of the last feature map."""
        return int(2 ** (len(self.stages) + 1))


@dataclass(frozen=True)
class ResNetOptions:
    """`head_bias` is a constant added to the head's bias (-10 for ImageNet-21k)."""

    head_bias: float = 0.0


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


@dataclass(frozen=True)
class ModelSpec:
    """Sizes and options of a ViT, a ResNet, or a hybrid, which has an encoder and a ResNet.

    Attributes:
        encoder: of a ViT or hybrid.
        patch_size: of a ViT over square patches of the image.
        resnet: a BiT ResNet, or the backbone of a hybrid.
        is_axial: attention along rows, then along columns, in the blocks of a ViT, or instead of
            the 3 x 3 convolutions of a ResNet.
        options: of the class of the family, such as `VitOptions`.
    """

    encoder: EncoderSize | None = None
    patch_size: int = 0
    resnet: ResNetSize | None = None
    is_axial: bool = False
    options: Any = None


# The units of stage 4 of the /16 hybrids are in stage 3: a feature map twice as fine (paper 4.1).
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

# Families of any size, and the size keys that each needs.
_FAMILIES: dict[str, tuple[str, ...]] = {
    "ViT": ("depth", "width", "mlp_dim", "num_heads", "patch_size"),
    "Axial-ViT": ("depth", "width", "mlp_dim", "num_heads", "patch_size"),
    "R+ViT": ("depth", "width", "mlp_dim", "num_heads", "stages", "width_factor"),
    "ResNet": ("stages", "width_factor"),
    "AxialResNet": ("stages", "width_factor"),
}


def model_names() -> list[str]:
    """All names for `build_model`, and the families of any size."""
    return [*_SPECS, *_FAMILIES]


def find_spec(name: str, options: dict[str, Any]) -> ModelSpec:
    """The sizes and options of a model, from its name (timm's too) and options for `build_model`.

    Raises:
        ValueError: for an unknown name, a family without its sizes, or an option that the family
            does not have.
    """
    name, _ = canonical_model(name)
    spec, needed = _SPECS.get(name), _FAMILIES.get(name, ())
    if spec is None and not needed:
        near = difflib.get_close_matches(name, model_names(), n=5, cutoff=0.4) or model_names()
        raise ValueError(
            f"model name {name!r} is unknown; similar names: {', '.join(near)}; "
            f"{', '.join(_FAMILIES)} take any size in full"
        )
    if missing := [key for key in needed if key not in options]:
        raise ValueError(
            f"model {name!r} needs its size in full: {', '.join(needed)}; add {', '.join(missing)}"
        )
    if spec is None:
        encoder = EncoderSize(*(options[key] for key in needed[:4])) if "depth" in needed else None
        resnet = (
            ResNetSize(tuple(options["stages"]), options["width_factor"])
            if "stages" in needed
            else None
        )
        patch_size = options["patch_size"] if "patch_size" in needed else 0
        spec = ModelSpec(encoder, patch_size, resnet, name.startswith("Axial"))
    other_options = {key: value for key, value in options.items() if key not in needed}
    if not math.isfinite(options.get("head_bias", 0.0)):
        raise ValueError(f"head_bias={options['head_bias']} must be a finite number")
    kind: type[Any] = ResNetOptions
    if spec.encoder:
        kind = AxialVitOptions if spec.is_axial else VitOptions
    allowed = [field.name for field in dataclasses.fields(kind)]
    unknown = [key for key in other_options if key not in allowed]
    if not unknown:
        return dataclasses.replace(spec, options=kind(**other_options))
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
