"""Draws the figures of `inspection.py` into PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image, ImageFilter
from torch import nn

from vit_ray.evaluate.inspection import (
    FloatArray,
    UInt8Array,
    attention_figures,
    filter_components,
    first_kernel,
    position_similarity,
    position_vectors,
    tiled,
)
from vit_ray.models.axial import AxialViT
from vit_ray.models.vit import VisionTransformer

# One colour map from light to dark for magnitudes; Matplotlib's own, readable without colour.
COLOR_MAP = "viridis"
NUM_ROLLOUTS = 16


def inspect_model(model: nn.Module, images: UInt8Array, folder: Path) -> dict[str, Path | str]:
    """Draw every figure that the model has into a folder.

    Args:
        model: of any family, in any precision.
        images: uint8 (B, H, W, 3) of the model's size; the paper averages over 128.
        folder: created if it does not exist.

    Returns:
        For `filters`, `position_similarity`, `attention_distance` and `attention_rollout`: the
        file, or the reason why the model has none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kernel = first_kernel(model)
    results: dict[str, Path | str] = {
        "filters": "the model has no convolution of the pixels"
        if kernel is None
        else draw_filters(*filter_components(kernel), folder / "filters.png")
    }
    vectors = position_vectors(model) if isinstance(model, VisionTransformer) else None
    results["position_similarity"] = (
        "the model has no table of positions"
        if vectors is None
        else draw_position_similarity(
            position_similarity(vectors), folder / "position_similarity.png"
        )
    )
    if not isinstance(model, VisionTransformer) or isinstance(model, AxialViT):
        reason = f"a {type(model).__name__} has no attention over the whole image"
        return {**results, "attention_distance": reason, "attention_rollout": reason}
    distances, rollouts = attention_figures(model, images)
    results["attention_distance"] = draw_attention_distance(
        distances, len(images), folder / "attention_distance.png"
    )
    shown = np.linspace(0, len(images) - 1, min(NUM_ROLLOUTS, len(images))).astype(int)
    results["attention_rollout"] = draw_rollouts(
        images[shown],
        rollouts[shown],
        model.embedding.patch_size,
        folder / "attention_rollout.png",
    )
    return results


def draw_images(
    images: Sequence[UInt8Array], captions: Sequence[str], title: str, path: Path
) -> Path:
    """Images with a line below each, eight in a row."""
    columns = min(8, len(images))
    rows = -(-len(images) // columns)
    figure = Figure(figsize=(1.8 * columns, 2.1 * rows + 0.5), layout="constrained")
    figure.suptitle(_plain(title))
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes:
        axis.set_axis_off()
    for axis, image, caption in zip(axes, images, captions, strict=False):
        axis.imshow(image)
        axis.set_title(_plain(caption), fontsize=8, y=-0.02, verticalalignment="top")
    return _save(figure, path)


def _plain(text: str) -> str:
    """Text in which a dollar sign does not start a formula."""
    return text.replace("$", r"\$")


def draw_filters(components: FloatArray, variance: FloatArray, path: Path) -> Path:
    """Tiles of principal components (count, P, P, 3) in [0, 1], seven in a row."""
    columns = 7
    rows = -(-len(components) // columns)
    figure = Figure(figsize=(columns, rows + 0.6), layout="constrained")
    figure.suptitle(
        f"Patch filters: {len(components)} principal components, "
        f"{variance.sum():.0%} of the variance"
    )
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes:
        axis.set_axis_off()
    for axis, component in zip(axes, components, strict=False):
        axis.imshow(component, interpolation="nearest")
    return _save(figure, path)


def draw_position_similarity(similarity: FloatArray, path: Path) -> Path:
    """A tile for each patch of (h, w, h, w), at the patch's own position."""
    rows, columns = similarity.shape[:2]
    tiles = tiled(similarity)
    figure = Figure(
        figsize=(min(0.6 * columns, 16) + 1.6, min(0.6 * rows, 16) + 1), layout="constrained"
    )
    axis = figure.subplots()
    axis.set_title("Position embedding similarity")
    drawn = axis.imshow(tiles, vmin=-1, vmax=1, cmap=COLOR_MAP, interpolation="nearest")
    axis.spines[:].set_visible(False)
    for one, count in ((axis.yaxis, rows), (axis.xaxis, columns)):
        # At the middles of about a dozen tiles along a side, which are numbered from 1.
        shown = range(0, count, -(-count // 14))
        middles = [index * (count + 1) + (count - 1) / 2 for index in shown]
        one.set_ticks(middles, [str(index + 1) for index in shown])
    axis.set_ylabel("patch row")
    axis.set_xlabel("patch column")
    figure.colorbar(drawn, label="cosine similarity", aspect=40)
    return _save(figure, path)


def draw_attention_distance(distances: FloatArray, num_images: int, path: Path) -> Path:
    """A dot for each head of (L, H) over the depth of its layer."""
    num_layers, num_heads = distances.shape
    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    depths = np.repeat(np.arange(1, num_layers + 1), num_heads)
    axis.scatter(depths, distances.flatten(), s=14)
    axis.set_xlabel("depth (layer)")
    axis.set_ylabel("mean attention distance (pixels)")
    axis.set_ylim(0, 1.08 * float(distances.max()))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_title(f"{num_heads} heads a layer, mean over {num_images} images")
    return _save(figure, path)


def draw_rollouts(images: UInt8Array, rollouts: FloatArray, patch_size: int, path: Path) -> Path:
    """Each picture next to the same picture, brightened by its rollout (B, h, w)."""
    pairs = min(4, len(images))
    rows = -(-len(images) // pairs)
    figure = Figure(figsize=(3 * pairs, 1.6 * rows + 0.4), layout="constrained")
    figure.suptitle("Attention from the output to the input")
    axes = figure.subplots(rows, 2 * pairs, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for index, (image, rollout) in enumerate(zip(images, rollouts, strict=True)):
        row, column = divmod(index, pairs)
        axes[row][2 * column].imshow(image)
        axes[row][2 * column + 1].imshow(overlay(image, rollout, patch_size))
    return _save(figure, path)


def overlay(image: UInt8Array, rollout: FloatArray, patch_size: int) -> UInt8Array:
    """The picture (H, W, 3) dimmed where the rollout (h, w) is low.

    As the paper's authors draw it: divided by its largest value, resized with Lanczos, blurred by
    a Gaussian of one patch, stretched to [0, 1], multiplied into the picture.
    """
    height, width = image.shape[:2]
    scaled = (255 * rollout / max(float(rollout.max()), 1e-12)).astype(np.uint8)
    mask = Image.fromarray(scaled).resize((width, height), Image.Resampling.LANCZOS)
    blurred = np.asarray(mask.filter(ImageFilter.GaussianBlur(patch_size)), dtype=np.float32)
    span = max(float(blurred.max() - blurred.min()), 1e-12)
    light = (blurred - blurred.min()) / span
    return (image * light[..., None]).astype(np.uint8)


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=150)
    return path
