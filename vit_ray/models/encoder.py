"""The Transformer encoder block: pre-norm attention and MLP, as the paper's equations 2 and 3.

Also pooling by attention: the MAP head of "Scaling Vision Transformers" (arXiv:2106.04560).
"""

# B images, N tokens, D width, H heads, K head width

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vit_ray.models.counter_random import numbered_keys
from vit_ray.models.dropout import Dropout, StochasticDepth
from vit_ray.models.layers import LayerScale, Linear, QkvLinear
from vit_ray.models.positions import RelativePositions, turned
from vit_ray.models.sizes import Activation, EncoderSize, VitOptions

# Takes the attention weights (B, H, N, N) of one block; they are freed when it no longer keeps
# them.
WeightsSink = Callable[[Tensor], None]


def _quick_gelu(x: Tensor) -> Tensor:
    """As CLIP's own towers (Radford et al., arXiv:2103.00020) use it instead of GELU."""
    return x * torch.sigmoid(1.702 * x)


_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "quick_gelu": _quick_gelu,
    "swiglu": F.silu,
}


class Attention(nn.Module):
    """Multi-head self-attention (Appendix A) with biases; no dropout on the weights.

    Args:
        size: of the encoder.
        options: whether queries and keys of each head are normalised (Dehghani et al.,
            arXiv:2302.05442), which bounds the logits.
        relative: bias on the logits from relative positions, or None.
    """

    def __init__(
        self, size: EncoderSize, options: VitOptions, relative: RelativePositions | None = None
    ) -> None:
        super().__init__()
        width, self.num_heads = size.width, size.num_heads
        self.qkv = QkvLinear(width)
        self.query_norm, self.key_norm = (
            nn.LayerNorm(width // self.num_heads, options.norm_eps)
            if options.qk_norm
            else nn.Identity()
            for _ in range(2)
        )
        self.relative = relative
        self.out = Linear(width, width)

    def forward(
        self,
        x_BND: Tensor,
        weights_to: WeightsSink | None = None,
        num_queries: int | None = None,
        rope_2NK: Tensor | None = None,
    ) -> Tensor:
        """(B, N, D) to (B, N, D), or to (B, num_queries, D).

        Args:
            x_BND: normalised tokens.
            weights_to: if given, is called with the attention weights (B, H, N, N) in float32; the
                output still comes from the fused kernel.
            num_queries: how many tokens, from the first on, are needed; None for all.
            rope_2NK: from `positions.rope_table`, if queries and keys are rotated.
        """
        q_BHNK, k_BHNK, v_BHNK = (
            part.view(*part.shape[:2], self.num_heads, -1).transpose(1, 2)
            for part in self.qkv(x_BND, num_queries)
        )
        q_BHNK, k_BHNK = self.query_norm(q_BHNK), self.key_norm(k_BHNK)
        if rope_2NK is not None:
            q_BHNK, k_BHNK = turned(q_BHNK, rope_2NK), turned(k_BHNK, rope_2NK)
        bias = None if self.relative is None else self.relative(q_BHNK)
        if weights_to is not None:
            scale = q_BHNK.shape[-1] ** -0.5
            logits = (q_BHNK.float() * scale) @ k_BHNK.float().transpose(-2, -1)
            weights_to(torch.softmax(logits if bias is None else logits + bias.float(), dim=-1))
        mixed = F.scaled_dot_product_attention(q_BHNK, k_BHNK, v_BHNK, attn_mask=bias)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two dense layers with an activation between, dropout after each.

    For SwiGLU (Shazeer, arXiv:2002.05202) the activation is applied to a third layer, whose outputs
    are multiplied with those of the first.
    """

    def __init__(
        self, width: int, mlp_dim: int, dropout: float, activation: Activation = "gelu_tanh"
    ) -> None:
        super().__init__()
        self.activation = _ACTIVATIONS[activation]
        self.expand = Linear(width, mlp_dim, bias_std=1e-6)
        self.gate = Linear(width, mlp_dim, bias_std=1e-6) if activation == "swiglu" else None
        self.contract = Linear(mlp_dim, width, bias_std=1e-6)
        self.dropout = Dropout(dropout)

    def forward(self, x_BND: Tensor, keys: Tensor | None = None) -> Tensor:
        """(B, N, D) to (B, N, D); `keys` as in `Block.forward`."""
        hidden = self.expand(x_BND)
        if self.gate is None:
            hidden = self.activation(hidden)
        else:
            hidden = self.activation(self.gate(x_BND)) * hidden
        hidden = self.dropout(hidden, numbered_keys(keys, 1))
        return self.dropout(self.contract(hidden), numbered_keys(keys, 2))


class Block(nn.Module):
    """x + dropout(attention(norm(x))), then x + mlp(norm(x)); with LayerScale, factors on both.

    Args:
        size: of the encoder.
        options: of the ViT; stochastic depth is that of the last block.
        relative: as in `Attention`.
        stochastic_depth: of this block.
    """

    def __init__(
        self,
        size: EncoderSize,
        options: VitOptions,
        relative: RelativePositions | None = None,
        stochastic_depth: float = 0.0,
    ) -> None:
        super().__init__()
        width, initial = size.width, options.layer_scale
        self.attention_norm = nn.LayerNorm(width, options.norm_eps)
        self.attention = Attention(size, options, relative)
        self.dropout = Dropout(options.dropout)
        self.attention_scale = LayerScale(width, initial) if initial else nn.Identity()
        self.mlp_norm = nn.LayerNorm(width, options.norm_eps)
        self.mlp = Mlp(width, size.mlp_dim, options.dropout, options.activation)
        self.mlp_scale = LayerScale(width, initial) if initial else nn.Identity()
        self.stochastic_depth = StochasticDepth(stochastic_depth)

    def forward(
        self,
        x_BND: Tensor,
        weights_to: WeightsSink | None = None,
        num_queries: int | None = None,
        keys: Tensor | None = None,
        rope_2NK: Tensor | None = None,
    ) -> Tensor:
        """(B, N, D) to (B, N, D), or to (B, num_queries, D).

        Args:
            x_BND: tokens.
            weights_to: as in `Attention.forward`.
            num_queries: as in `Attention.forward`.
            keys: int64 (B,), from which this block's dropout draws; None = torch's generator.
            rope_2NK: as in `Attention.forward`.
        """
        # Each place that drops has its own keys: 0 after attention, 1 and 2 in the MLP, 3 and 4 for
        # whole branches.
        mixed = self.attention(self.attention_norm(x_BND), weights_to, num_queries, rope_2NK)
        mixed = self.attention_scale(self.dropout(mixed, numbered_keys(keys, 0)))
        x_BND = x_BND[:, :num_queries] + self.stochastic_depth(mixed, numbered_keys(keys, 3))
        made = self.mlp_scale(self.mlp(self.mlp_norm(x_BND), keys))
        return x_BND + self.stochastic_depth(made, numbered_keys(keys, 4))


class AttentionPool(nn.Module):
    """A learned probe attends to all tokens, then x + mlp(norm(x)) of the result, as in big_vision.

    Args:
        size: of the encoder.
        options: activation of the MLP, and the epsilon of the norm.
    """

    def __init__(self, size: EncoderSize, options: VitOptions) -> None:
        super().__init__()
        width, self.num_heads = size.width, size.num_heads
        self.probe = nn.Parameter(torch.empty(1, 1, width))
        # Xavier as in flax for (1, 1, D): one in, D out.
        limit = math.sqrt(6.0 / (1 + width))
        nn.init.uniform_(self.probe, -limit, limit)
        self.query, self.key, self.value, self.out = (Linear(width, width) for _ in range(4))
        self.norm = nn.LayerNorm(width, options.norm_eps)
        self.mlp = Mlp(width, size.mlp_dim, 0.0, options.activation)

    def forward(self, x_BND: Tensor) -> Tensor:
        """Encoder outputs (B, N, D) to (B, D)."""
        probe = self.probe.to(x_BND.dtype).expand(x_BND.shape[0], -1, -1)
        q_BHNK, k_BHNK, v_BHNK = (
            part.view(*part.shape[:2], self.num_heads, -1).transpose(1, 2)
            for part in (self.query(probe), self.key(x_BND), self.value(x_BND))
        )
        mixed = F.scaled_dot_product_attention(q_BHNK, k_BHNK, v_BHNK)
        answer_B1D = self.out(mixed.transpose(1, 2).flatten(2))
        return (answer_B1D + self.mlp(self.norm(answer_B1D)))[:, 0]
