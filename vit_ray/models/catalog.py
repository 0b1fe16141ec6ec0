"""Names of the paper's models, with their sizes and options; `build.py` builds them.

Sizes: paper Table 1; Ti, S and b from google-research/vision_transformer `configs/models.py` and
the caption of Figure 4. The paper gives ViT-b's hidden sizes as half of ViT-B's and does not give
its number of heads; here it has 6, so that a head is 64 wide as in every other model.

Ranges of numbers are checked with the recipe (`config`); here, what depends on the model. Nothing
here needs torch, which takes seconds to import.
"""

import dataclasses
import difflib
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
        if not self.stages:
            raise ValueError("stages=() is empty; give the number of units of each stage")

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

    encoder: EncoderSize | None
    patch_size: int
    resnet: ResNetSize | None
    is_axial: bool
    options: Any


_ENCODER_KEYS = ("depth", "width", "mlp_dim", "num_heads")
_RESNET_KEYS = ("stages", "width_factor")
# Families of any size, and the keys of their sizes.
_FAMILIES: dict[str, tuple[str, ...]] = {
    "ViT": (*_ENCODER_KEYS, "patch_size"),
    "Axial-ViT": (*_ENCODER_KEYS, "patch_size"),
    "R+ViT": (*_ENCODER_KEYS, *_RESNET_KEYS),
    "ResNet": _RESNET_KEYS,
    "AxialResNet": _RESNET_KEYS,
}
_OPTIONS: dict[str, type[Any]] = {
    "ViT": VitOptions,
    "Axial-ViT": AxialVitOptions,
    "R+ViT": VitOptions,
    "ResNet": ResNetOptions,
    "AxialResNet": ResNetOptions,
}

_ENCODERS = {
    "Ti": {"depth": 12, "width": 192, "mlp_dim": 768, "num_heads": 3},
    "S": {"depth": 12, "width": 384, "mlp_dim": 1536, "num_heads": 6},
    "b": {"depth": 12, "width": 384, "mlp_dim": 1536, "num_heads": 6},
    "B": {"depth": 12, "width": 768, "mlp_dim": 3072, "num_heads": 12},
    "L": {"depth": 24, "width": 1024, "mlp_dim": 4096, "num_heads": 16},
    "H": {"depth": 32, "width": 1280, "mlp_dim": 5120, "num_heads": 16},
}
_PATCHES = {
    "Ti": (16,),
    "S": (14, 16, 32),
    "b": (16, 32),
    "B": (8, 14, 16, 32),
    "L": (14, 16, 32),
    "H": (14,),
}
# By the suffix of a hybrid. The units of stage 4 of the /16 hybrids are in stage 3: a feature map
# twice as fine (paper 4.1).
_BACKBONES: dict[str, dict[str, Any]] = {
    "32": {"stages": (3, 4, 6, 3), "width_factor": 1},
    "16": {"stages": (3, 4, 9), "width_factor": 1},
}

# Family and size of each model of the paper.
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"ViT-{name}/{patch}": ("ViT", {**_ENCODERS[name], "patch_size": patch})
        for name, patches in _PATCHES.items()
        for patch in patches
    },
    "R50x1": ("ResNet", {"stages": (3, 4, 6, 3), "width_factor": 1}),
    "R50x2": ("ResNet", {"stages": (3, 4, 6, 3), "width_factor": 2}),
    "R101x1": ("ResNet", {"stages": (3, 4, 23, 3), "width_factor": 1}),
    "R152x1": ("ResNet", {"stages": (3, 8, 36, 3), "width_factor": 1}),
    "R152x2": ("ResNet", {"stages": (3, 8, 36, 3), "width_factor": 2}),
    "R152x4": ("ResNet", {"stages": (3, 8, 36, 3), "width_factor": 4}),
    "R200x3": ("ResNet", {"stages": (3, 24, 36, 3), "width_factor": 3}),
    **{
        f"R50x1+ViT-{name}/{suffix}": ("R+ViT", {**_ENCODERS[name], **_BACKBONES[suffix]})
        for name in ("B", "L")
        for suffix in _BACKBONES
    },
    "Axial-ViT-B/32": ("Axial-ViT", {**_ENCODERS["B"], "patch_size": 32}),
    "Axial-ViT-B/16": ("Axial-ViT", {**_ENCODERS["B"], "patch_size": 16}),
    "AxialResNet50": ("AxialResNet", {"stages": (3, 4, 6, 3), "width_factor": 1}),
}


def model_names() -> list[str]:
    """All names for `build_model`, and the families of any size."""
    return [*_MODELS, *_FAMILIES]


def find_spec(name: str, options: dict[str, Any]) -> ModelSpec:
    """The sizes and options of a model, from its name (timm's too) and options for `build_model`.

    Raises:
        ValueError: for an unknown name, a family without its sizes, or an option that the family
            does not have.
    """
    name, _ = canonical_model(name)
    family, sizes = _MODELS.get(name, (name, {}))
    if family not in _FAMILIES:
        near = difflib.get_close_matches(name, model_names(), n=5, cutoff=0.4) or model_names()
        raise ValueError(
            f"model name {name!r} is unknown; similar names: {', '.join(near)}; "
            f"{', '.join(_FAMILIES)} take any size in full"
        )
    if not sizes:
        needed = _FAMILIES[family]
        if missing := [key for key in needed if key not in options]:
            raise ValueError(
                f"model {name!r} needs its size in full: {', '.join(needed)}; add "
                f"{', '.join(missing)}"
            )
        sizes = {key: options[key] for key in needed}
        options = {key: value for key, value in options.items() if key not in needed}
    kind = _OPTIONS[family]
    allowed = [field.name for field in dataclasses.fields(kind)]
    if unknown := [key for key in options if key not in allowed]:
        near = [match for key in unknown for match in difflib.get_close_matches(key, allowed, n=1)]
        hint = f"did you mean {', '.join(near)}? " if near else ""
        raise ValueError(
            f"model {name!r} has no option {', '.join(unknown)}; it takes {', '.join(allowed)}; "
            f"{hint}leave it out (options inherited from another model.name must be reset, such as "
            f"model.{unknown[0]}=null)"
        )
    return ModelSpec(
        EncoderSize(*(sizes[key] for key in _ENCODER_KEYS)) if "depth" in sizes else None,
        sizes.get("patch_size", 0),
        ResNetSize(tuple(sizes["stages"]), sizes["width_factor"]) if "stages" in sizes else None,
        family.startswith("Axial"),
        kind(**options),
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
