"""The Vision Transformer (Dosovitskiy et al., arXiv 2010.11929), over patches or a feature map.

Its blocks are pre-norm attention and MLP, as in the paper's equations 2 and 3.
"""

# B images, N tokens, D width, H heads; K head width in BHNK, otherwise classes

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vit_ray.models.catalog import Activation, AxialVitOptions, EncoderSize, Grid, VitOptions
from vit_ray.models.counter_random import numbered_keys
from vit_ray.models.layers import (
    Dropout,
    Head,
    Linear,
    PatchProjection,
    QkvLinear,
    StochasticDepth,
    lecun_normal_,
)
from vit_ray.models.positions import (
    ClassToken,
    LearnedPositions1d,
    LearnedPositions2d,
    RelativePositions,
    SincosPositions2d,
)
from vit_ray.models.resnet import ResNetEmbedding


class Attention(nn.Module):
    """Multi-head self-attention (Appendix A) with biases; no dropout on the attention weights.

    Args:
        size: of the encoder.
        relative: relative positions, which add a bias to the logits; None = no bias.
    """

    def __init__(self, size: EncoderSize, relative: RelativePositions | None = None) -> None:
        super().__init__()
        width, self.num_heads = size.width, size.num_heads
        self.qkv = QkvLinear(width)
        self.relative = relative
        self.out = Linear(width, width)

    def forward(self, x_BND: Tensor, num_queries: int | None = None) -> Tensor:
        """(B, N, D) to (B, N, D), or to (B, num_queries, D).

        Args:
            x_BND: normalised tokens.
            num_queries: outputs only of the first `num_queries` tokens; None for all.
        """
        q_BHNK, k_BHNK, v_BHNK, bias = self._projected(x_BND, num_queries)
        mixed = F.scaled_dot_product_attention(q_BHNK, k_BHNK, v_BHNK, attn_mask=bias)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def weights(self, x_BND: Tensor) -> Tensor:
        """Attention weights (B, H, N, N) in float32, as in the fused kernel of `forward`."""
        q_BHNK, k_BHNK, _, bias = self._projected(x_BND)
        scale = q_BHNK.shape[-1] ** -0.5
        logits = (q_BHNK.float() * scale) @ k_BHNK.float().transpose(-2, -1)
        return torch.softmax(logits if bias is None else logits + bias.float(), dim=-1)

    def _projected(
        self, x_BND: Tensor, num_queries: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values of each head, and the bias on their logits."""
        q_BHNK, k_BHNK, v_BHNK = (
            part.view(*part.shape[:2], self.num_heads, -1).transpose(1, 2)
            for part in self.qkv(x_BND, num_queries)
        )
        return q_BHNK, k_BHNK, v_BHNK, self.relative(q_BHNK) if self.relative else None


class Mlp(nn.Module):
    """Two dense layers with an activation between them, and dropout after each."""

    def __init__(
        self, width: int, mlp_dim: int, dropout: float, activation: Activation = "gelu_tanh"
    ) -> None:
        super().__init__()
        self.activation = partial(
            F.gelu, approximate="tanh" if activation == "gelu_tanh" else "none"
        )
        self.expand = Linear(width, mlp_dim, bias_std=1e-6)
        self.contract = Linear(mlp_dim, width, bias_std=1e-6)
        self.dropout = Dropout(dropout)

    def forward(self, x_BND: Tensor, keys: Tensor | None = None) -> Tensor:
        """(B, N, D) to (B, N, D); `keys` as in `Block.forward`."""
        hidden = self.dropout(self.activation(self.expand(x_BND)), numbered_keys(keys, 1))
        return self.dropout(self.contract(hidden), numbered_keys(keys, 2))


class Block(nn.Module):
    """x + dropout(attention(norm(x))), then x + mlp(norm(x)).

    Args:
        size: of the encoder.
        options: of the ViT; stochastic depth is that of the last block.
        relative: as in `Attention`.
        stochastic_depth: rate of this block.
        num_outputs: outputs only of the first `num_outputs` tokens; None for all.
    """

    def __init__(
        self,
        size: EncoderSize,
        options: VitOptions,
        relative: RelativePositions | None = None,
        stochastic_depth: float = 0.0,
        num_outputs: int | None = None,
    ) -> None:
        super().__init__()
        width, self.num_outputs = size.width, num_outputs
        self.attention_norm = nn.LayerNorm(width, options.norm_eps)
        self.attention = Attention(size, relative)
        self.dropout = Dropout(options.dropout)
        self.mlp_norm = nn.LayerNorm(width, options.norm_eps)
        self.mlp = Mlp(width, size.mlp_dim, options.dropout, options.activation)
        self.stochastic_depth = StochasticDepth(stochastic_depth)

    def forward(self, x_BND: Tensor, keys: Tensor | None = None) -> Tensor:
        """(B, N, D) to (B, N, D), or to (B, num_outputs, D).

        Args:
            x_BND: tokens.
            keys: int64 (B,), from which this block's dropout draws; None = torch's generator.
        """
        # Each dropout has other keys: 0 after attention, 1 and 2 in the MLP, 3 and 4 for branches.
        mixed = self.attention(self.attention_norm(x_BND), self.num_outputs)
        mixed = self.dropout(mixed, numbered_keys(keys, 0))
        x_BND = x_BND[:, : self.num_outputs] + self.stochastic_depth(mixed, numbered_keys(keys, 3))
        changed = self.mlp(self.mlp_norm(x_BND), keys)
        return x_BND + self.stochastic_depth(changed, numbered_keys(keys, 4))


_POSITIONS: dict[str, type[nn.Module]] = {
    "learned_1d": LearnedPositions1d,
    "learned_2d": LearnedPositions2d,
    "sincos_2d": SincosPositions2d,
}


class PatchEmbedding(nn.Module):
    """Cuts P x P patches and projects each to width D."""

    def __init__(self, patch_size: int, width: int, image_size: Grid) -> None:
        super().__init__()
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
        """Tokens of a block: the class token, if there is one, and the patches."""
        return self.grid[0] * self.grid[1] + (self.options.pool == "cls")

    def _block(self, index: int) -> nn.Module:
        size = self.size
        relative = None
        if self.options.positions == "relative":
            relative = RelativePositions(self.num_tokens, size.width // size.num_heads)
        # If the head sees only the class token, the last block computes only that token: 7 % fewer
        # products in a 12-layer encoder.
        num_outputs = 1 if self.options.pool == "cls" and index == size.depth - 1 else None
        # Grows linearly from 0 at the first block to the option at the last.
        rate = self.options.stochastic_depth * index / max(1, size.depth - 1)
        return Block(size, self.options, relative, rate, num_outputs)

    def keep_all_tokens(self) -> None:
        """Make the last block compute all tokens, even if the head sees only the class token."""
        self.blocks[-1].num_outputs = None  # type: ignore[assignment]

    def forward(self, images: Tensor, keys: Tensor | None = None) -> Tensor:
        """Float (B, 3, H, W) in [-1, 1] to float32 logits (B, K).

        Args:
            images: of the size for which the model was built.
            keys: int64 (B,) from `counter_random.sample_keys`, the only randomness of dropout in
                training; None = torch's generator.
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
        # Without positions an encoder takes any number of tokens; an axial one takes only its grid.
        needs_grid = self.options.positions != "none" or isinstance(self.options, AxialVitOptions)
        if grid_BhwD.shape[1:3] != self.grid and needs_grid:
            raise ValueError(
                f"images of {images.shape[-2]}x{images.shape[-1]} give a grid of "
                f"{grid_BhwD.shape[1]}x{grid_BhwD.shape[2]}, but the model was built for "
                f"{self.grid[0]}x{self.grid[1]}; build it with image_size=({images.shape[-2]}, "
                f"{images.shape[-1]}) and load the weights into that"
            )
        return grid_BhwD.flatten(1, 2)

    def encode(self, patches_BND: Tensor, keys: Tensor | None = None) -> Tensor:
        """Patch embeddings to the normalised encoder outputs that the head sees.

        With a class token only its output (with `keep_all_tokens` also those of all patches),
        otherwise the outputs of all patches.

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
