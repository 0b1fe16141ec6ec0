"""Draws the figures of `inspection.py` into PNG files."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image, ImageFilter
from torch import nn

from vit_ray.evaluation.examples import sheet
from vit_ray.evaluation.inspection import (
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
    reason = f"a {type(model).__name__} has no attention over the whole image"
    results: dict[str, Path | str] = {
        "filters": "the model has no convolution of the pixels",
        "position_similarity": "the model has no table of positions",
        "attention_distance": reason,
        "attention_rollout": reason,
    }

    def file(name: str) -> Path:
        results[name] = path = folder / f"{name}.png"
        return path

    if (kernel := first_kernel(model)) is not None:
        filters(kernel).save(file("filters"))
    if not isinstance(model, VisionTransformer):
        return results
    if (vectors := position_vectors(model)) is not None:
        positions(vectors).savefig(file("position_similarity"), dpi=150)
    if not isinstance(model, AxialViT):
        distances, rollouts = attention_figures(model, images)
        figure = attention_distance(distances, len(images))
        figure.savefig(file("attention_distance"), dpi=150)
        chosen = np.linspace(0, len(images) - 1, min(NUM_ROLLOUTS, len(images))).astype(int)
        pairs = rollout_pairs(images[chosen], rollouts[chosen], model.embedding.patch_size)
        pairs.save(file("attention_rollout"))
    return results


def filters(kernel: FloatArray) -> Image.Image:
    """The principal components of the filters (D, 3, P, P), with the variance of each."""
    components, variance = filter_components(kernel)
    title = f"Patch filters: {len(components)} principal components, {variance.sum():.0%} of the "
    pixels = list((255 * components).round().astype(np.uint8))
    return sheet(pixels, [f"{share:.1%}" for share in variance], f"{title}variance")


def positions(vectors: FloatArray) -> Figure:
    """The similarity of each position embedding (h, w, D) to all others, a tile each."""
    figure = Figure(figsize=(7, 6), layout="constrained")
    axis = figure.subplots()
    tiles = tiled(position_similarity(vectors))
    drawn = axis.imshow(tiles, vmin=-1, vmax=1, interpolation="nearest")
    axis.set_axis_off()
    axis.set_title(f"Similarity of {vectors.shape[0]} x {vectors.shape[1]} position embeddings")
    figure.colorbar(drawn, label="cosine similarity")
    return figure


def attention_distance(distances: FloatArray, num_images: int) -> Figure:
    """A dot for each head of (L, H) over the depth of its layer."""
    num_layers, num_heads = distances.shape
    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    axis.scatter(np.repeat(np.arange(1, num_layers + 1), num_heads), distances.flatten(), s=14)
    axis.set_xlabel("depth (layer)")
    axis.set_ylabel("mean attention distance (pixels)")
    axis.set_ylim(0, 1.08 * float(distances.max()))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_title(f"{num_heads} heads a layer, mean over {num_images} images")
    return figure


def rollout_pairs(images: UInt8Array, rollouts: FloatArray, patch_size: int) -> Image.Image:
    """Each picture, and after it the same picture, brightened by its rollout (B, h, w)."""
    pairs = [
        drawn
        for image, rollout in zip(images, rollouts, strict=True)
        for drawn in (image, overlay(image, rollout, patch_size))
    ]
    return sheet(pairs, [""] * len(pairs), "Attention from the output to the input")


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
    return (image * ((blurred - blurred.min()) / span)[..., None]).astype(np.uint8)
