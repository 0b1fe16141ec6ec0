"""The Vision Transformer (Dosovitskiy et al., arXiv 2010.11929), over patches or a feature map."""

# B images, N tokens, D width, H heads, K classes

import torch
from torch import Tensor, nn

from vit_ray.models.catalog import AxialVitOptions, EncoderSize, Grid, VitOptions
from vit_ray.models.counter_random import numbered_keys
from vit_ray.models.layers import Dropout, Head, Linear, PatchProjection, lecun_normal_
from vit_ray.models.positions import (
    ClassToken,
    LearnedPositions1d,
    LearnedPositions2d,
    RelativePositions,
    SincosPositions2d,
)
from vit_ray.models.resnet import ResNetEmbedding

_POSITIONS: dict[str, type[nn.Module]] = {
    "learned_1d": LearnedPositions1d,
    "learned_2d": LearnedPositions2d,
    "sincos_2d": SincosPositions2d,
}


class PatchEmbedding(nn.Module):
    """Cuts P x P patches and projects each to width D."""

    def __init__(self, patch_size: int, width: int, image_size: Grid) -> None:
        super().__init__()
        if patch_size < 1:
            raise ValueError(f"patch_size={patch_size} must be at least 1; raise patch_size")
        if min(image_size) < patch_size:
            raise ValueError(
                f"image_size={image_size[0]}x{image_size[1]} is smaller than a patch of "
                f"{patch_size}x{patch_size}; raise image_size to at least {patch_size}, or choose "
                "a model with smaller patches"
            )
        self.patch_size = patch_size
        self.grid = (image_size[0] // patch_size, image_size[1] // patch_size)
        self.projection = PatchProjection(3, width, patch_size)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) to (B, h, w, D)."""
        return self.projection(images)


class VisionTransformer(nn.Module):
    """Embedding, class token, positions, encoder, pooled feature, linear head.

    Args:
        embedding: turns images into (B, h, w, D).
        size: of the encoder.
        num_classes: K.
        options: positions, pooling, head and dropout.
    """

    def __init__(
        self,
        embedding: PatchEmbedding | ResNetEmbedding,
        size: EncoderSize,
        num_classes: int,
        options: VitOptions,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.grid = embedding.grid
        self.size = size
        self.options = options
        self.class_token = ClassToken(size.width) if options.pool == "cls" else None
        tables = size.depth if options.positions_at == "every_layer" else 1
        self.positions = nn.ModuleList(
            _POSITIONS[options.positions](self.grid, size.width, options.pool == "cls")
            for _ in range(tables if options.positions in _POSITIONS else 0)
        )
        self.dropout = Dropout(options.dropout)
        self.blocks = nn.ModuleList(self._block(index) for index in range(size.depth))
        self.norm = nn.LayerNorm(size.width, options.norm_eps)
        self.representation = (
            Linear(size.width, size.width, lecun_normal_) if options.representation else None
        )
        self.head = Head(size.width, num_classes, options.head_bias)

    @property
    def num_tokens(self) -> int:
        """Tokens of a block, as `encode` has them."""
        return self.options.num_tokens(self.grid)

    def _block(self, index: int) -> nn.Module:
        size = self.size
        relative = None
        if self.options.positions == "relative":
            relative = RelativePositions(self.num_tokens, size.width // size.num_heads)
        # 7 % of the products of a 12-layer encoder, on which no output depends, are left out.
        sees_one = self.options.pool == "cls" and index == size.depth - 1
        rate = self.options.depth_rate(index, size.depth)
        return Block(size, self.options, relative, rate, num_outputs=1 if sees_one else None)

    def keep_all_tokens(self) -> None:
        """Have the last block compute all tokens, also if the head sees only the class token."""
        self.blocks[-1].num_outputs = None  # type: ignore[assignment]

    def forward(self, images: Tensor, keys: Tensor | None = None) -> Tensor:
        """Float (B, 3, H, W) in [-1, 1] to float32 logits (B, K).

        Args:
            images: of the size that the model was built for.
            keys: int64 (B,) from `counter_random.sample_keys`: dropout in training depends only on
                them. None = torch's generator decides.
        """
        return self.head(self.features(images, keys))

    def features(self, images: Tensor, keys: Tensor | None = None) -> Tensor:
        """(B, D), the head's input: pooled, and after the tanh layer if there is one."""
        return self.pool(self.encode(self.embed(images), keys))

    def embed(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) to patch embeddings (B, h * w, D), before positions.

        Raises:
            ValueError: if the images have another size than the model was built for.
        """
        grid_BhwD = self.embedding(images)
        # Without positions the encoder is a function of a set of any size; not of lines.
        is_bound = self.options.positions != "none" or isinstance(self.options, AxialVitOptions)
        if grid_BhwD.shape[1:3] != self.grid and is_bound:
            raise ValueError(
                f"images of {images.shape[-2]}x{images.shape[-1]} give a grid of "
                f"{grid_BhwD.shape[1]}x{grid_BhwD.shape[2]}, but the model was built for "
                f"{self.grid[0]}x{self.grid[1]}; build it with image_size=({images.shape[-2]}, "
                f"{images.shape[-1]}) and load the weights into that"
            )
        return grid_BhwD.flatten(1, 2)

    def encode(self, patches_BND: Tensor, keys: Tensor | None = None) -> Tensor:
        """Patch embeddings to normalised encoder outputs that the head sees.

        The class token alone, or all patches if there is none; the class token and all patches
        after `keep_all_tokens`.

        Args:
            patches_BND: from `embed`.
            keys: as in `forward`.
        """
        options = self.options
        x_BND = patches_BND if self.class_token is None else self.class_token(patches_BND)
        for index, block in enumerate(self.blocks):
            if len(self.positions) and (index == 0 or options.positions_at != "stem"):
                x_BND = self.positions[index % len(self.positions)](x_BND)
            if index == 0:
                x_BND = self.dropout(x_BND, numbered_keys(keys, self.size.depth))
            x_BND = block(x_BND, numbered_keys(keys, index))
        return self.norm(x_BND)

    def pool(self, encoded_BND: Tensor) -> Tensor:
        """(B, N, D) to the head's input (B, D)."""
        pooled = encoded_BND.mean(dim=1) if self.class_token is None else encoded_BND[:, 0]
        return pooled if self.representation is None else torch.tanh(self.representation(pooled))
