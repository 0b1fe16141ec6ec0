"""Pooling by attention: the MAP head of "Scaling Vision Transformers" (arXiv:2106.04560)."""

# B images, N tokens, D width, H heads, K head width

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vit_ray.models.encoder import Mlp, layer_norm
from vit_ray.models.layers import Linear


class AttentionPool(nn.Module):
    """A learned probe asks all tokens, then x + mlp(norm(x)) of the answer, as big_vision's.

    Args:
        width: D, a multiple of `num_heads`.
        mlp_dim: hidden width of the MLP.
        num_heads: H.
    """

    def __init__(self, width: int, mlp_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.probe = nn.Parameter(torch.empty(1, 1, width))
        # Xavier as flax has it for (1, 1, D): one in, D out.
        limit = math.sqrt(6.0 / (1 + width))
        nn.init.uniform_(self.probe, -limit, limit)
        self.query, self.key, self.value, self.out = (Linear(width, width) for _ in range(4))
        self.norm = layer_norm(width)
        self.mlp = Mlp(width, mlp_dim, dropout=0.0)

    def forward(self, x_BND: Tensor) -> Tensor:
        """Encoder outputs (B, N, D) to (B, D)."""
        probe = self.probe.to(x_BND.dtype).expand(len(x_BND), -1, -1)
        q_BHNK, k_BHNK, v_BHNK = (
            part.view(*part.shape[:2], self.num_heads, -1).transpose(1, 2)
            for part in (self.query(probe), self.key(x_BND), self.value(x_BND))
        )
        mixed = F.scaled_dot_product_attention(q_BHNK, k_BHNK, v_BHNK)
        answer_B1D = self.out(mixed.transpose(1, 2).flatten(2))
        return (answer_B1D + self.mlp(self.norm(answer_B1D)))[:, 0]
