"""Pictures of a model's first layer (Figure 7, left and centre).

Without Matplotlib, which takes a worker a second to import.
"""

import io
from dataclasses import dataclass
from typing import Final

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import nn

from vit_ray.evaluation.contact_sheet import sheet
from vit_ray.evaluation.inspection import (
    FloatArray,
    UInt8Array,
    filter_components,
    first_kernel,
    position_similarity,
    position_vectors,
    tiled,
)
from vit_ray.models.vit import VisionTransformer

_SIDE: Final = 720
"""Least pixels of a side; smaller pictures are enlarged."""
_TITLE: Final = 22
"""Pixels of the space above a picture."""
_COLORS: Final = (
    (68, 1, 84), (71, 44, 122), (59, 81, 139), (44, 113, 142), (33, 144, 141), (39, 173, 129),
    (92, 200, 99), (170, 220, 50), (253, 231, 37),
)  # fmt: skip
"""Matplotlib's viridis at equal distances, dark to light."""


@dataclass(frozen=True)
class FirstLayer:
    """Copies of what the pictures show; None for what a model does not have."""

    kernel: FloatArray | None
    """(D, 3, P, P)"""
    positions: FloatArray | None
    """(h, w, D)"""

    @classmethod
    def of(cls, model: nn.Module) -> "FirstLayer":
        """From a model with all of its weights."""
        return cls(
            first_kernel(model),
            position_vectors(model) if isinstance(model, VisionTransformer) else None,
        )

    def files(self) -> dict[str, bytes]:
        """`filters.png` and `position_similarity.png`, as far as the model has them."""
        found = {}
        if self.kernel is not None:
            components, variance = filter_components(self.kernel)
            title = f"Patch filters: {len(components)} principal components, "
            title += f"{variance.sum():.0%} of the variance"
            pixels = [np.round(255 * one).astype(np.uint8) for one in components]
            found["filters.png"] = _png(sheet(pixels, [f"{one:.1%}" for one in variance], title))
        if self.positions is not None:
            rows, columns = self.positions.shape[:2]
            title = f"Cosine similarity of {rows} x {columns} position embeddings: -1 dark, 1 light"
            drawn = Image.fromarray(_colored(tiled(position_similarity(self.positions))))
            scale = max(1, -(-_SIDE // max(drawn.size)))
            drawn = drawn.resize(
                (drawn.width * scale, drawn.height * scale), Image.Resampling.NEAREST
            )
            whole = Image.new("RGB", (drawn.width, drawn.height + _TITLE), "white")
            whole.paste(drawn, (0, _TITLE))
            ImageDraw.Draw(whole).text((4, 4), title, "black", ImageFont.load_default(14))
            found["position_similarity.png"] = _png(whole)
        return found


def _colored(values: FloatArray) -> UInt8Array:
    """(H, W) in [-1, 1] to (H, W, 3); nan is white."""
    colors, known = np.array(_COLORS, np.float64), ~np.isnan(values)
    places = (values[known] + 1) / 2 * (len(colors) - 1)
    pixels = np.full((*values.shape, 3), 255, np.uint8)
    pixels[known] = np.stack(
        [np.interp(places, np.arange(len(colors)), channel) for channel in colors.T], axis=-1
    ).round()
    return pixels


def _png(picture: Image.Image) -> bytes:
    written = io.BytesIO()
    picture.save(written, "PNG")
    return written.getvalue()
