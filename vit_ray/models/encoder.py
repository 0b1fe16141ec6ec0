"""The Transformer encoder block: pre-norm attention and MLP, as the paper's equations 2 and 3."""

# B images, N tokens, D width, H heads, K head width

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vit_ray.models.counter_random import numbered_keys
from vit_ray.models.dropout import Dropout, StochasticDepth
from vit_ray.models.layers import MlpLinear, QkvLinear, XavierLinear
from vit_ray.models.positions import RelativePositions

# Takes the attention weights (B, H, N, N) of one block; they live as long as it keeps them.
WeightsSink = Callable[[Tensor], None]

# The reference code's; PyTorch's default is 1e-5.
LAYER_NORM_EPS = 1e-6


def layer_norm(width: int) -> nn.LayerNorm:
    """LayerNorm over the width with the reference's epsilon."""
    return nn.LayerNorm(width, eps=LAYER_NORM_EPS)


class Attention(nn.Module):
    """Multi-head self-attention (Appendix A) with biases; no dropout on the weights.

    Args:
        width: D, a multiple of `num_heads`.
        num_heads: H.
        relative: bias on the logits from relative positions, or None.
    """

    def __init__(
        self, width: int, num_heads: int, relative: RelativePositions | None = None
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = QkvLinear(width)
        self.relative = relative
        self.out = XavierLinear(width, width)

    def forward(
        self,
        x_BND: Tensor,
        weights_to: WeightsSink | None = None,
        num_queries: int | None = None,
    ) -> Tensor:
        """(B, N, D) to (B, N, D), or to (B, num_queries, D).

        Args:
            x_BND: normalised tokens.
            weights_to: where given, is called with the attention weights (B, H, N, N) in float32;
                the output still comes from the fused kernel.
            num_queries: how many tokens, from the first on, are wanted; None for all.
        """
        q_BHNK, k_BHNK, v_BHNK = (
            part.view(*part.shape[:2], self.num_heads, -1).transpose(1, 2)
            for part in self.qkv(x_BND, num_queries)
        )
        bias: Tensor | None = None if self.relative is None else self.relative(q_BHNK)
        if weights_to is not None:
            weights_to(attention_weights(q_BHNK, k_BHNK, bias))
        mixed = F.scaled_dot_product_attention(q_BHNK, k_BHNK, v_BHNK, attn_mask=bias)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def attention_weights(q_BHNK: Tensor, k_BHNK: Tensor, bias: Tensor | None) -> Tensor:
    """softmax(q k / sqrt(K) + bias) in float32, (B, H, N, N)."""
    scale: float = q_BHNK.shape[-1] ** -0.5
    logits = (q_BHNK.float() * scale) @ k_BHNK.float().transpose(-2, -1)
    if bias is not None:
        logits = logits + bias.float()
    return torch.softmax(logits, dim=-1)


class Mlp(nn.Module):
    """Two dense layers with tanh-approximate GELU between, dropout after each."""

    def __init__(self, width: int, mlp_dim: int, dropout: float) -> None:
        super().__init__()
        self.expand = MlpLinear(width, mlp_dim)
        self.contract = MlpLinear(mlp_dim, width)
        self.dropout = Dropout(dropout)

    def forward(self, x_BND: Tensor, keys: Tensor | None = None) -> Tensor:
        """(B, N, D) to (B, N, D); `keys` as of `Block.forward`."""
        inner, outer = _keys_of(keys, 1), _keys_of(keys, 2)
        hidden = self.dropout(F.gelu(self.expand(x_BND), approximate="tanh"), inner)
        out: Tensor = self.dropout(self.contract(hidden), outer)
        return out


def _keys_of(keys: Tensor | None, place: int) -> Tensor | None:
    """Keys of one of a block's places that drop: 0 after attention, 1 and 2 in the MLP, 3 and 4 of
    whole branches."""
    return None if keys is None else numbered_keys(keys, place)


class Block(nn.Module):
    """x + dropout(attention(norm(x))), then x + mlp(norm(x))."""

    def __init__(
        self,
        width: int,
        mlp_dim: int,
        num_heads: int,
        dropout: float,
        relative: RelativePositions | None = None,
        stochastic_depth: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention_norm = layer_norm(width)
        self.attention = Attention(width, num_heads, relative)
        self.dropout = Dropout(dropout)
        self.mlp_norm = layer_norm(width)
        self.mlp = Mlp(width, mlp_dim, dropout)
        self.stochastic_depth = StochasticDepth(stochastic_depth)

    def forward(
        self,
        x_BND: Tensor,
        weights_to: WeightsSink | None = None,
        num_queries: int | None = None,
        keys: Tensor | None = None,
    ) -> Tensor:
        """(B, N, D) to (B, N, D), or to (B, num_queries, D).

        Args:
            x_BND: tokens.
            weights_to: as of `Attention.forward`.
            num_queries: as of `Attention.forward`.
            keys: int64 (B,), from which this block's dropout draws; None = torch's generator.
        """
        mixed: Tensor = self.attention(self.attention_norm(x_BND), weights_to, num_queries)
        mixed = self.stochastic_depth(self.dropout(mixed, _keys_of(keys, 0)), _keys_of(keys, 3))
        x_BND = x_BND[:, :num_queries] + mixed
        made: Tensor = self.mlp(self.mlp_norm(x_BND), keys)
        return x_BND + self.stochastic_depth(made, _keys_of(keys, 4))
