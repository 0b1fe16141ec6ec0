"""Draws the figures of `inspection.py` and `weight_pictures.py` into PNG files."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image, ImageFilter
from torch import nn

from vit_ray.evaluation.inspection import FloatArray, UInt8Array, attention_figures
from vit_ray.evaluation.weight_pictures import FirstLayer
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
    results: dict[str, Path | str] = {
        "filters": "the model has no convolution of the pixels",
        "position_similarity": "the model has no table of positions",
    }
    for name, content in FirstLayer.of(model).files().items():
        (folder / name).write_bytes(content)
        results[Path(name).stem] = folder / name
    if not isinstance(model, VisionTransformer) or isinstance(model, AxialViT):
        reason = f"a {type(model).__name__} has no attention over the whole image"
        return {**results, "attention_distance": reason, "attention_rollout": reason}
    distances, rollouts = attention_figures(model, images)
    shown = np.linspace(0, len(images) - 1, min(NUM_ROLLOUTS, len(images))).astype(int)
    drawn = {
        "attention_distance": attention_distance(distances, len(images)),
        "attention_rollout": rollout_pairs(
            images[shown], rollouts[shown], model.embedding.patch_size
        ),
    }
    for name, figure in drawn.items():
        results[name] = path = folder / f"{name}.png"
        figure.savefig(path, dpi=150)
    return results


def attention_distance(distances: FloatArray, num_images: int) -> Figure:
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
    return figure


def rollout_pairs(images: UInt8Array, rollouts: FloatArray, patch_size: int) -> Figure:
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
    return figure


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
