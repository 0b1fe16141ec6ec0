"""Axial attention against ordinary attention under a mask, and against its formula in loops."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.models.small import attention_weights, shake, small_model, some_images
from vit_ray.models.axial import AxialAttention2d, AxialBlock, LineAttention
from vit_ray.models.encoder import Block
from vit_ray.models.sizes import EncoderSize, VitOptions


def masked_block(block: Block, x_BND: Tensor, may_meet: Tensor) -> Tensor:
    """An ordinary block whose tokens attend only where `may_meet` (N, N) is true."""
    normed = block.attention_norm(x_BND)
    q, k, v = (part.reshape(*x_BND.shape[:2], 4, 8) for part in block.attention.qkv(normed))
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(8)
    weights = logits.masked_fill(~may_meet, -torch.inf).softmax(-1)
    mixed = torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)
    x_BND = x_BND + F.linear(mixed, block.attention.out.weight, block.attention.out.bias)
    return x_BND + block.mlp(block.mlp_norm(x_BND))


def test_an_axial_block_is_two_blocks_that_see_one_row_and_one_column() -> None:
    torch.manual_seed(0)
    row, column = (Block(EncoderSize(1, 32, 64, 4), VitOptions()) for _ in range(2))
    block = AxialBlock((3, 5), row, column)
    shake(block)
    x = torch.randn(2, 15, 32)
    row, column = torch.arange(15) // 5, torch.arange(15) % 5
    expected = masked_block(block.row, x, row[:, None] == row[None])
    expected = masked_block(block.column, expected, column[:, None] == column[None])
    torch.testing.assert_close(block(x), expected, rtol=1e-5, atol=1e-5)


def test_an_axial_vit_shows_the_weights_of_rows_and_of_columns() -> None:
    model = small_model("Axial-ViT", image_size=(24, 40)).eval()
    weights = attention_weights(model, some_images(2, (24, 40)))
    assert [tuple(w.shape) for w in weights] == [(2 * 3, 4, 5, 5), (2 * 5, 4, 3, 3)] * 2
    for each in weights:
        torch.testing.assert_close(each.sum(-1), torch.ones(each.shape[:-1]))


def test_line_attention_is_position_sensitive_as_its_formula_says() -> None:
    torch.manual_seed(0)
    attention = LineAttention(width=32, length=5)
    shake(attention)
    x = torch.randn(1, 5, 32)
    queries, keys = attention.qk(x)[0].chunk(2, dim=-1)
    values = attention.v(x)[0]
    expected = torch.zeros(5, 32)
    for head in range(8):
        q, k = queries[:, head * 2 : head * 2 + 2], keys[:, head * 2 : head * 2 + 2]
        v = values[:, head * 4 : head * 4 + 4]
        for i in range(5):
            logits = []
            for j in range(5):
                r_q, r_k = attention.query_table[i - j + 4], attention.key_table[i - j + 4]
                logits.append((q[i] @ k[j] + q[i] @ r_q + k[j] @ r_k) / math.sqrt(2))
            weights = torch.stack(logits).softmax(0)
            for j in range(5):
                r_v = attention.value_table[i - j + 4]
                expected[i, head * 4 : head * 4 + 4] += (weights[j] * (v[j] + r_v)).detach()
    torch.testing.assert_close(attention(x)[0], expected, rtol=1e-5, atol=1e-5)


def test_axial_attention_goes_along_rows_first_and_strides_by_averaging() -> None:
    torch.manual_seed(0)
    attention = AxialAttention2d(16, (3, 4), stride=2)
    shake(attention)
    x = torch.randn(1, 16, 3, 4)
    rows = torch.stack([attention.along_rows(x[:, :, i].transpose(1, 2)) for i in range(3)], dim=1)
    both = torch.stack([attention.along_columns(rows[:, :, j]) for j in range(4)], dim=2)
    whole = both.permute(0, 3, 1, 2)
    # Three rows make two: the last average is over what is there.
    expected = torch.stack(
        [
            whole[:, :, :2].unfold(3, 2, 2).mean((2, 4)),
            whole[:, :, 2:].unfold(3, 2, 2).mean((2, 4)),
        ],
        dim=2,
    )
    torch.testing.assert_close(attention(x), expected, rtol=1e-5, atol=1e-5)


def test_an_axial_vit_without_positions_refuses_images_of_another_grid() -> None:
    model = small_model("Axial-ViT", positions="none")
    with pytest.raises(ValueError, match="grid of 2x8, but the model was built for 4x4"):
        # As many tokens, of other lines.
        model(some_images(2, (16, 64)))
