"""What a trained model has learned to look at: the four figures of the paper's 4.5, D.7 and D.8.

Pure functions turn weights and attention into arrays; `inspection_figures.py` draws them.
"""

# B images, H heads, N tokens, L layers, D width, P patch side, h w grid

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vit_ray.models.axial import AxialViT
from vit_ray.models.positions import Grid
from vit_ray.models.vit import PatchEmbedding, VisionTransformer

FloatArray = NDArray[np.float32]


def first_kernel(model: nn.Module) -> FloatArray:
    """The filters that see the pixels: (D, 3, P, P) of the patch embedding or a ResNet's root."""
    owner = model.embedding if isinstance(model, VisionTransformer) else model
    assert isinstance(owner, nn.Module)
    layer = owner.get_submodule("projection" if isinstance(owner, PatchEmbedding) else "root")
    weight = layer.weight
    assert isinstance(weight, Tensor)
    kernel: FloatArray = weight.detach().float().cpu().numpy()
    return kernel


def filter_components(kernel: FloatArray, count: int = 28) -> tuple[FloatArray, FloatArray]:
    """Principal components of the patch filters (Figure 7, left).

    Args:
        kernel: (D, 3, P, P).
        count: components wanted, at most min(D, 3 * P * P).

    Returns:
        Components (count, P, P, 3), each stretched to [0, 1] for the eye, the strongest first; and
        the share of the filters' variance that each explains (count,).
    """
    filters = kernel.reshape(len(kernel), -1).astype(np.float64)
    filters = filters - filters.mean(axis=0)
    _, strengths, directions = np.linalg.svd(filters, full_matrices=False)
    variance = strengths**2 / max(float((strengths**2).sum()), np.finfo(float).tiny)
    count = min(count, len(directions))
    images = directions[:count].reshape(count, *kernel.shape[1:]).transpose(0, 2, 3, 1)
    low, high = images.min((1, 2, 3), keepdims=True), images.max((1, 2, 3), keepdims=True)
    stretched = (images - low) / np.maximum(high - low, np.finfo(float).tiny)
    return stretched.astype(np.float32), variance[:count].astype(np.float32)


def position_vectors(model: VisionTransformer) -> FloatArray | None:
    """What the first position embedding adds to each patch, (h, w, D); None without a table."""
    if not len(model.positions):
        return None
    zeros = torch.zeros(1, model.num_tokens, model.size.width)
    table = next(model.positions.parameters())
    with torch.no_grad():
        added: Tensor = model.positions[0](zeros.to(table.device, table.dtype))
    num_patches = model.grid[0] * model.grid[1]
    return added[0, -num_patches:].reshape(*model.grid, -1).float().cpu().numpy()


def position_similarity(vectors: FloatArray) -> FloatArray:
    """Cosine similarity of each position with all others (Figure 7, centre; Figure 10).

    Args:
        vectors: (h, w, D).

    Returns:
        (h, w, h, w): the tile of a patch, then the patch it is compared with.
    """
    flat = vectors.reshape(-1, vectors.shape[-1]).astype(np.float64)
    unit = flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), np.finfo(float).tiny)
    grid = vectors.shape[:2]
    similarity: FloatArray = (unit @ unit.T).reshape(*grid, *grid).astype(np.float32)
    return similarity


def mean_attention_distance(weights: Tensor, grid: Grid, patch_size: int) -> FloatArray:
    """How far heads look, in pixels (Figure 7, right; Figure 11): "receptive field size".

    The Euclidean distance between a query patch and every patch, weighted by attention, averaged
    over queries and images. Attention from and to the class token has no distance: it is left out,
    and the rest of each row is brought to a sum of 1.

    Args:
        weights: (B, H, N, N), the class token first where there is one.
        grid: (h, w) of the patches.
        patch_size: pixels from one patch to the next.

    Returns:
        (H,).
    """
    patches = weights[..., -grid[0] * grid[1] :, -grid[0] * grid[1] :].double()
    patches = patches / patches.sum(dim=-1, keepdim=True)
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    places = torch.stack([rows.flatten(), columns.flatten()], dim=1).double() * patch_size
    distances = torch.cdist(places, places).to(patches.device)
    per_query = (patches * distances).sum(dim=-1)
    return per_query.mean(dim=(0, 2)).float().cpu().numpy()


def attention_rollout(weights: Sequence[Tensor], grid: Grid) -> FloatArray:
    """How much of each patch reaches the output (Figure 6, D.8; Abnar and Zuidema, 2020).

    Heads are averaged, the residual path is added as an identity, rows are brought to a sum of 1,
    and layers are multiplied.

    Args:
        weights: (B, H, N, N) for each layer.
        grid: (h, w) of the patches.

    Returns:
        (B, h, w): the class token's row without itself; without a class token, the mean row.
    """
    num_patches = grid[0] * grid[1]
    rollout: Tensor | None = None
    for layer in weights:
        mixed = layer.double().mean(dim=1)
        mixed = mixed + torch.eye(mixed.shape[-1], dtype=mixed.dtype, device=mixed.device)
        mixed = mixed / mixed.sum(dim=-1, keepdim=True)
        rollout = mixed if rollout is None else mixed @ rollout
    assert rollout is not None
    has_class_token = rollout.shape[-1] > num_patches
    row = rollout[:, 0, 1:] if has_class_token else rollout.mean(dim=1)
    return row.reshape(-1, *grid).float().cpu().numpy()


def attention_figures(
    model: VisionTransformer, images: Tensor, batch_size: int = 16
) -> tuple[FloatArray, FloatArray]:
    """Mean attention distance (L, H) in pixels, and rollouts (B, h, w), of some images.

    Args:
        model: with attention over the whole sequence, not along lines.
        images: float (B, 3, H, W) in [-1, 1], of the model's size.
        batch_size: images at a time; attention of all layers of so many is held.

    Raises:
        ValueError: for an axial model.
    """
    if isinstance(model, AxialViT):
        raise ValueError("an axial ViT attends along lines; distance and rollout need a whole ViT.")
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    distances: list[FloatArray] = []
    rollouts: list[FloatArray] = []
    with torch.no_grad():
        for batch in torch.split(images, batch_size):
            weights = model.attention_weights(batch.to(device))
            per_layer = [
                mean_attention_distance(layer, model.grid, model.embedding.patch_size)
                for layer in weights
            ]
            distances.append(np.stack(per_layer) * len(batch))
            rollouts.append(attention_rollout(weights, model.grid))
    model.train(was_training)
    mean: FloatArray = np.sum(distances, axis=0) / np.float32(len(images))
    return mean, np.concatenate(rollouts)
