"""The Transformer encoder block: pre-norm attention and MLP, as the paper's equations 2 and 3."""

# B images, N tokens, D width, H heads, K head width

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vit_ray.models.catalog import Activation, EncoderSize, VitOptions
from vit_ray.models.counter_random import numbered_keys
from vit_ray.models.layers import Dropout, Linear, QkvLinear, StochasticDepth
from vit_ray.models.positions import RelativePositions

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
}


class Attention(nn.Module):
    """Multi-head self-attention (Appendix A) with biases; no dropout on the weights.

    Args:
        size: of the encoder.
        relative: bias on the logits from relative positions, or None.
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
            num_queries: how many tokens, from the first on, are needed; None for all.
        """
        q_BHNK, k_BHNK, v_BHNK, bias = self._projected(x_BND, num_queries)
        mixed = F.scaled_dot_product_attention(q_BHNK, k_BHNK, v_BHNK, attn_mask=bias)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def weights(self, x_BND: Tensor) -> Tensor:
        """(B, H, N, N) in float32, as the fused kernel of `forward` applies them."""
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
    """Two dense layers with an activation between, dropout after each."""

    def __init__(
        self, width: int, mlp_dim: int, dropout: float, activation: Activation = "gelu_tanh"
    ) -> None:
        super().__init__()
        self.activation = _ACTIVATIONS[activation]
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
        stochastic_depth: of this block.
        num_outputs: how many tokens, from the first on, are needed; None for all.
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
        # Each place that drops has its own keys: 0 after attention, 1 and 2 in the MLP, 3 and 4 for
        # whole branches.
        mixed = self.attention(self.attention_norm(x_BND), self.num_outputs)
        mixed = self.dropout(mixed, numbered_keys(keys, 0))
        x_BND = x_BND[:, : self.num_outputs] + self.stochastic_depth(mixed, numbered_keys(keys, 3))
        made = self.mlp(self.mlp_norm(x_BND), keys)
        return x_BND + self.stochastic_depth(made, numbered_keys(keys, 4))
