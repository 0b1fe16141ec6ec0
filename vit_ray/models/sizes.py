"""Sizes and options of the models: what is known about a model before it is built.

Nothing here needs torch, which takes seconds to import.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

# (rows, columns), or the height and width of an image.
Grid = tuple[int, int]
Positions = Literal["none", "learned_1d", "learned_2d", "relative", "sincos_2d"]
PositionsAt = Literal["stem", "every_layer", "every_layer_shared"]
Pool = Literal["cls", "gap"]
Activation = Literal["gelu_tanh", "gelu"]

# The reference code's; PyTorch's default is 1e-5.
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
    """Options in which two ViTs of one size may differ.

    `representation` adds the tanh layer of pre-training; `head_bias` is a constant added to the
    head's bias (-10 for ImageNet-21k); `positions` and `positions_at` choose a cell of Table 8;
    `stochastic_depth` is the share of images for which the last block's branches are dropped;
    the `activation` is that of the MLPs, where `gelu_tanh` is the reference code's; `norm_eps` is
    the epsilon of the layer norms. The positions `sincos_2d` are fixed.
    """

    positions: Positions = "learned_1d"
    positions_at: PositionsAt = "stem"
    pool: Pool = "cls"
    representation: bool = False
    head_bias: float = 0.0
    dropout: float = 0.0
    stochastic_depth: float = 0.0
    activation: Activation = "gelu_tanh"
    norm_eps: float = LAYER_NORM_EPS

    def __post_init__(self) -> None:
        choices = {
            "positions": Positions,
            "positions_at": PositionsAt,
            "pool": Pool,
            "activation": Activation,
        }
        for name, choice in choices.items():
            if getattr(self, name) not in get_args(choice):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is unknown; "
                    f"use one of {', '.join(get_args(choice))}"
                )
        fixed = ("none", "relative", "sincos_2d")
        if self.positions in fixed and self.positions_at != "stem":
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

    def num_tokens(self, grid: Grid) -> int:
        """Tokens of a block: class token, patches."""
        return grid[0] * grid[1] + (self.pool == "cls")

    def depth_rate(self, index: int, depth: int) -> float:
        """Stochastic depth of a block: from 0 at the first, linearly up to the last."""
        return self.stochastic_depth * index / max(1, depth - 1)


@dataclass(frozen=True)
class AxialVitOptions(VitOptions):
    """Options of a ViT whose attention runs along lines: no class token; positions are added."""

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
        for name, (is_given, reason) in refused.items():
            if is_given:
                raise ValueError(f"{name}={getattr(self, name)!r}: an axial ViT {reason}")


@dataclass(frozen=True)
class ResNetSize:
    """Units per stage, and the factor on every width (64 in the first stage)."""

    stages: tuple[int, ...]
    width_factor: int = 1

    def __post_init__(self) -> None:
        if not self.stages or min(self.stages) < 1:
            raise ValueError(f"stages={self.stages} must name at least one unit in each stage")
        if self.width_factor < 1:
            raise ValueError(f"width_factor={self.width_factor} must be at least 1")

    @property
    def widths(self) -> tuple[int, ...]:
        """Inner channels of each stage; a unit gives four times as many."""
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
