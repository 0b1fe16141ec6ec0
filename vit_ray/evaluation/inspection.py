"""What a trained model looks at: the four figures of the paper's 4.5, D.7 and D.8.

`inspect_model` draws them, from arrays that pure functions make of weights and attention.
"""

# B images, H heads, N tokens, L layers, D width, P patches (in kernels: patch side), h w grid

import contextlib
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from sklearn.decomposition import PCA
from sklearn.metrics.pairwise import cosine_similarity
from torch import Tensor, nn

from vit_ray.evaluation.examples import UInt8Array, sheet
from vit_ray.models.axial import AxialViT
from vit_ray.models.vit import Attention, VisionTransformer

FloatArray = NDArray[np.float32]
# Or the reason why there is none.
Drawing = Figure | Image.Image | str
NUM_ROLLOUTS = 16


def inspect_model(model: nn.Module, images: UInt8Array, folder: Path) -> dict[str, Path | str]:
    """Draw every figure that the model has into a folder.

    Args:
        model: of any family, in any precision.
        images: uint8 (B, H, W, 3) of the model's size; the paper averages over 128.
        folder: exists.

    Returns:
        For `filters`, `position_similarity`, `attention_distance` and `attention_rollout`: the
        file, or the reason why there is none.
    """
    no_attention = f"a {type(model).__name__} has no attention over the whole image"
    distance: Drawing = no_attention
    rollout: Drawing = no_attention
    if isinstance(model, VisionTransformer) and not isinstance(model, AxialViT):
        distances, rollouts = attention_figures(model, images)
        distance = _distances(distances, len(images))
        rollout = _rollouts(images, rollouts, model.embedding.patch_size)
    drawings: dict[str, Drawing] = {
        "filters": _filters(model),
        "position_similarity": _positions(model),
        "attention_distance": distance,
        "attention_rollout": rollout,
    }
    return {name: _saved(drawing, folder / f"{name}.png") for name, drawing in drawings.items()}


def _saved(drawing: Drawing, path: Path) -> Path | str:
    if isinstance(drawing, str):
        return drawing
    save = drawing.savefig if isinstance(drawing, Figure) else drawing.save
    save(path)
    return path


def _filters(model: nn.Module) -> Drawing:
    kernel = first_kernel(model)
    if kernel is None:
        return "the model has no convolution of the pixels"
    components, variance = filter_components(kernel)
    tiles = list((255 * components).round().astype(np.uint8))
    title = f"Patch filters: {len(tiles)} principal components, {variance.sum():.0%} of variance"
    return sheet(tiles, [f"{share:.1%}" for share in variance], title)


def _positions(model: nn.Module) -> Drawing:
    """The similarity of each position embedding to all others, a tile for each."""
    vectors = position_vectors(model) if isinstance(model, VisionTransformer) else None
    if vectors is None:
        return "the model has no table of positions"
    figure = Figure(figsize=(7, 6), dpi=150, layout="constrained")
    axis = figure.subplots()
    image = axis.imshow(position_similarity(vectors), vmin=-1, vmax=1, interpolation="nearest")
    axis.set_axis_off()
    axis.set_title(f"Similarity of {vectors.shape[0]} x {vectors.shape[1]} position embeddings")
    figure.colorbar(image, label="cosine similarity")
    return figure


def _distances(distances: FloatArray, num_images: int) -> Figure:
    """A dot for each head, of distances (L, H) in pixels, over the depth of the layer."""
    num_layers, num_heads = distances.shape
    figure = Figure(figsize=(6, 4), dpi=150, layout="constrained")
    axis = figure.subplots()
    axis.scatter(np.repeat(np.arange(1, num_layers + 1), num_heads), distances.flatten(), s=14)
    axis.set(
        xlabel="depth (layer)",
        ylabel="mean attention distance (pixels)",
        ylim=(0, 1.08 * float(distances.max())),
        title=f"{num_heads} heads a layer, mean over {num_images} images",
    )
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _rollouts(images: UInt8Array, rollouts: FloatArray, patch_size: int) -> Image.Image:
    """Some of the images, each beside its overlay."""
    pairs: list[UInt8Array] = []
    for i in np.linspace(0, len(images) - 1, min(NUM_ROLLOUTS, len(images))).astype(int):
        pairs += [images[i], _overlay(images[i], rollouts[i], patch_size)]
    return sheet(pairs, [""] * len(pairs), "Attention from the output to the input")


def _overlay(image: UInt8Array, rollout: FloatArray, patch_size: int) -> UInt8Array:
    """The image (H, W, 3) dimmed where the rollout (h, w) is low.

    As the paper's authors draw it: the rollout is divided by the largest value, resized with
    Lanczos, blurred by a Gaussian of one patch, stretched to [0, 1], and multiplied by the image.
    """
    height, width = image.shape[:2]
    scaled = (255 * rollout / max(float(rollout.max()), 1e-12)).astype(np.uint8)
    mask = Image.fromarray(scaled).resize((width, height), Image.Resampling.LANCZOS)
    blurred = np.asarray(mask.filter(ImageFilter.GaussianBlur(patch_size)), dtype=np.float32)
    span = max(float(blurred.max() - blurred.min()), 1e-12)
    return (image * ((blurred - blurred.min()) / span)[..., None]).astype(np.uint8)


def first_kernel(model: nn.Module) -> FloatArray | None:
    """A copy of the filters of the patch embedding or of a ResNet's root, (D, 3, P, P).

    None for a custom model without a convolution of three channels.
    """
    kernel = next((p for p in model.parameters() if p.dim() == 4 and p.shape[1] == 3), None)
    return None if kernel is None else kernel.detach().float().cpu().numpy().copy()


def filter_components(kernel: FloatArray, count: int = 28) -> tuple[FloatArray, FloatArray]:
    """Principal components of the patch filters (Figure 7, left).

    Args:
        kernel: (D, 3, P, P).
        count: number of components, at most min(D, 3 * P * P).

    Returns:
        Components (count, P, P, 3), each stretched to [0, 1] for display, the strongest first; and
        the share of the filters' variance that each component explains (count,).
    """
    filters = kernel.reshape(len(kernel), -1).astype(np.float64)
    pca = PCA(min(count, *filters.shape), svd_solver="full")  # draws no random numbers
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
    zeros = model.norm.weight.new_zeros(1, model.num_tokens, model.size.width)
    with torch.no_grad():
        added = model.positions[0](zeros)
    num_patches = model.grid[0] * model.grid[1]
    return added[0, -num_patches:].reshape(*model.grid, -1).float().cpu().numpy()


def position_similarity(vectors: FloatArray) -> FloatArray:
    """Cosine similarity of each position with all others (Figure 7, centre; Figure 10).

    Args:
        vectors: (h, w, D).

    Returns:
        (h * (h + 1) - 1, w * (w + 1) - 1): a tile (h, w) for each patch, in the order of the image
        grid, with nan between tiles; as one image, because a thousand axes are slow to draw.
    """
    rows, columns, width = vectors.shape
    similarity = cosine_similarity(vectors.reshape(-1, width).astype(np.float64))
    tiles = similarity.reshape(rows, columns, rows, columns).astype(np.float32)
    spaced = np.full((rows, rows + 1, columns, columns + 1), np.nan, dtype=np.float32)
    spaced[:, :-1, :, :-1] = tiles.transpose(0, 2, 1, 3)
    return spaced.reshape(rows * (rows + 1), columns * (columns + 1))[:-1, :-1]


def attention_figures(
    model: VisionTransformer, images: UInt8Array
) -> tuple[FloatArray, FloatArray]:
    """Mean attention distance (L, H) in pixels, and rollouts (B, h, w), of some images.

    The distance is how far heads look (Figure 7, right; Figure 11): the Euclidean distance between
    a query patch and every patch, weighted by attention, averaged over queries and images.
    Attention from and to the class token has no distance and is left out; the rest of each row is
    normalized to a sum of 1.

    The rollout is how much of each patch reaches the output (Figure 6, D.8; Abnar and Zuidema,
    2020): heads are averaged, the residual path is added as an identity, rows are normalized to a
    sum of 1, and layers are multiplied. The output is the class token's row, or without a class
    token the mean row.

    Args:
        model: with attention over the full sequence, not axial attention.
        images: uint8 (B, H, W, 3), of the model's size.
    """
    was_training = model.training
    model.eval()
    distances, rollouts = zip(*(_attention_of(model, image) for image in images), strict=True)
    model.train(was_training)
    return np.mean(distances, axis=0), np.stack(rollouts)


def _attention_of(model: VisionTransformer, image: UInt8Array) -> tuple[FloatArray, FloatArray]:
    """Distance (L, H) and rollout (h, w) of an image (H, W, 3), with one layer in memory."""
    device, grid = next(model.parameters()).device, model.grid
    patches = torch.cartesian_prod(*(torch.arange(side) for side in grid)).double().to(device)
    distances_PP = torch.cdist(patches, patches) * model.embedding.patch_size
    residual = torch.eye(model.num_tokens, dtype=torch.float64, device=device)
    rollout, distances = residual, list[Tensor]()

    def add_layer(attention: nn.Module, args: tuple[Tensor, ...]) -> None:
        nonlocal rollout
        assert isinstance(attention, Attention)
        weights_HNN = attention.weights(args[0])[0].double()
        among_patches = weights_HNN[:, -len(patches) :, -len(patches) :]
        per_query = (among_patches * distances_PP).sum(dim=-1) / among_patches.sum(dim=-1)
        distances.append(per_query.mean(dim=-1))
        mixed = weights_HNN.mean(dim=0) + residual
        rollout = mixed / mixed.sum(dim=-1, keepdim=True) @ rollout

    with torch.no_grad(), contextlib.ExitStack() as hooks:
        for block in model.blocks:
            attention = block.get_submodule("attention")
            hooks.callback(attention.register_forward_pre_hook(add_layer).remove)
        pixels = torch.from_numpy(image[None]).to(device).permute(0, 3, 1, 2).float()
        model.encode(model.embed(pixels / 127.5 - 1))
    rows = rollout[:, -len(patches) :]
    row = rows.mean(dim=0) if model.class_token is None else rows[0]
    return (
        torch.stack(distances).float().cpu().numpy(),
        row.reshape(grid).float().cpu().numpy(),
    )
