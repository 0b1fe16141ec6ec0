"""What a trained model looks at: the four figures of the paper's 4.5, D.7 and D.8.

Pure functions turn weights and attention into arrays; `figures.py` draws them.
"""

# B images, H heads, N tokens, L layers, D width, P patch side, h w grid

import contextlib

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.decomposition import PCA
from sklearn.metrics.pairwise import cosine_similarity
from torch import Tensor, nn

from vit_ray.models.catalog import Grid
from vit_ray.models.vit import Attention, VisionTransformer

FloatArray = NDArray[np.float32]
UInt8Array = NDArray[np.uint8]


def first_kernel(model: nn.Module) -> FloatArray | None:
    """A copy of the filters that are applied to the pixels.

    (D, 3, P, P) of the patch embedding or of a ResNet's root.

    None for a user's own model without a convolution of three channels.
    """
    kernels = (p for p in model.parameters() if p.dim() == 4 and p.shape[1] == 3)
    kernel = next(kernels, None)
    return None if kernel is None else kernel.detach().float().cpu().numpy().copy()


def filter_components(kernel: FloatArray, count: int = 28) -> tuple[FloatArray, FloatArray]:
    """Principal components of the patch filters (Figure 7, left).

    Args:
        kernel: (D, 3, P, P).
        count: number of components, at most min(D, 3 * P * P).

    Returns:
        Components (count, P, P, 3), each stretched to [0, 1] for display, the strongest first; and
        the share of the filters' variance that each explains (count,).
    """
    filters = kernel.reshape(len(kernel), -1).astype(np.float64)
    pca = PCA(min(count, *filters.shape), svd_solver="full")  # which draws no random numbers
    with np.errstate(invalid="ignore"):  # shares of a variance of 0
        pca.fit(filters)
    images = pca.components_.reshape(-1, *kernel.shape[1:]).transpose(0, 2, 3, 1)
    low, high = images.min((1, 2, 3), keepdims=True), images.max((1, 2, 3), keepdims=True)
    stretched = (images - low) / np.maximum(high - low, np.finfo(float).tiny)
    variance = np.nan_to_num(pca.explained_variance_ratio_)
    return stretched.astype(np.float32), variance.astype(np.float32)


def position_vectors(model: VisionTransformer) -> FloatArray | None:
    """What the first position embedding adds to each patch, (h, w, D); None without a table."""
    if not len(model.positions):
        return None
    weight = model.norm.weight
    with torch.no_grad():
        added = model.positions[0](weight.new_zeros(1, model.num_tokens, model.size.width))
    num_patches = model.grid[0] * model.grid[1]
    return added[0, -num_patches:].reshape(*model.grid, -1).float().cpu().numpy()


def position_similarity(vectors: FloatArray) -> FloatArray:
    """Cosine similarity of each position with all others (Figure 7, centre; Figure 10).

    Args:
        vectors: (h, w, D).

    Returns:
        (h, w, h, w): the tile of a patch, then the patch it is compared with.
    """
    similarity = cosine_similarity(vectors.reshape(-1, vectors.shape[-1]).astype(np.float64))
    return similarity.reshape(*vectors.shape[:2], *vectors.shape[:2]).astype(np.float32)


def tiled(similarity: FloatArray) -> FloatArray:
    """All tiles of (h, w, h, w) in one picture, with nan between them: a thousand axes are slow."""
    rows, columns = similarity.shape[:2]
    spaced = np.full((rows, rows + 1, columns, columns + 1), np.nan, dtype=np.float32)
    spaced[:, :-1, :, :-1] = similarity.transpose(0, 2, 1, 3)
    return spaced.reshape(rows * (rows + 1), columns * (columns + 1))[:-1, :-1]


def mean_attention_distance(weights: Tensor, grid: Grid, patch_size: int) -> FloatArray:
    """How far heads look, in pixels (Figure 7, right; Figure 11): "receptive field size".

    The Euclidean distance between a query patch and every patch, weighted by attention, averaged
    over queries and images. Attention from and to the class token has no distance: it is left out,
    and the rest of each row is normalized to a sum of 1.

    Args:
        weights: (B, H, N, N), the class token first if there is one.
        grid: (h, w) of the patches.
        patch_size: pixels from one patch to the next.

    Returns:
        (H,).
    """
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    places = torch.stack([rows.flatten(), columns.flatten()], dim=1).double() * patch_size
    distances = torch.cdist(places, places).to(weights.device)
    num_patches = len(distances)
    means = []
    # Head by head: all of them in float64 would take three times the memory.
    for head in weights[..., -num_patches:, -num_patches:].unbind(1):
        patches = head.double()
        per_query = (patches * distances).sum(dim=-1) / patches.sum(dim=-1)
        means.append(per_query.mean())
    return torch.stack(means).float().cpu().numpy()


def roll(rollout: Tensor | None, layer: Tensor) -> Tensor:
    """A rollout (B, N, N) in float64 extended by one more layer (B, H, N, N), or its start.

    How much of each token reaches the output (Figure 6, D.8; Abnar and Zuidema, 2020): heads are
    averaged, the residual path is added as an identity, rows are normalized to a sum of 1, and
    layers are multiplied.
    """
    mixed = torch.zeros_like(layer[:, 0], dtype=torch.float64)
    for head in layer.unbind(1):
        mixed += head
    mixed /= layer.shape[1]
    mixed.diagonal(dim1=-2, dim2=-1).add_(1)
    mixed /= mixed.sum(dim=-1, keepdim=True)
    return mixed if rollout is None else mixed @ rollout


def output_row(rollout: Tensor, grid: Grid, has_class_token: bool) -> FloatArray:
    """The contribution of each patch (B, h, w) to the output in a rollout.

    The class token's row; without a class token, the mean row of the patches, the last tokens.
    """
    patches = rollout[:, :, -grid[0] * grid[1] :]
    row = patches[:, 0] if has_class_token else patches[:, -grid[0] * grid[1] :].mean(dim=1)
    return row.reshape(-1, *grid).float().cpu().numpy()


def attention_figures(
    model: VisionTransformer, images: UInt8Array
) -> tuple[FloatArray, FloatArray]:
    """Mean attention distance (L, H) in pixels, and rollouts (B, h, w), of some images.

    Image by image and layer by layer, so that no more than one layer's attention is in memory.

    Args:
        model: with attention over the whole sequence, not along lines.
        images: uint8 (B, H, W, 3), of the model's size.
    """
    was_training = model.training
    model.eval()
    distances, rollouts = zip(*(_look(model, image[None]) for image in images), strict=True)
    model.train(was_training)
    return np.mean(distances, axis=0), np.concatenate(rollouts)


def _look(model: VisionTransformer, images: UInt8Array) -> tuple[FloatArray, FloatArray]:
    """Distance (L, H) and rollouts (B, h, w) of images; holds one layer's attention."""
    distances: list[FloatArray] = []
    rollout: Tensor | None = None

    def look(attention: nn.Module, args: tuple[Tensor, ...]) -> None:
        nonlocal rollout
        assert isinstance(attention, Attention)
        weights = attention.weights(args[0])
        distances.append(mean_attention_distance(weights, model.grid, model.embedding.patch_size))
        rollout = roll(rollout, weights)

    device = next(model.parameters()).device
    with torch.no_grad(), contextlib.ExitStack() as hooks:
        for block in model.blocks:
            attention = block.get_submodule("attention")
            hooks.callback(attention.register_forward_pre_hook(look).remove)
        pixels = torch.from_numpy(images).to(device).permute(0, 3, 1, 2).float() / 127.5 - 1
        model.encode(model.embed(pixels))
    assert rollout is not None
    has_class_token = model.class_token is not None
    return np.stack(distances), output_row(rollout, model.grid, has_class_token)
