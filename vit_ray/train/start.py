"""Weights to start from: another run's checkpoint, or an exported or published file."""

from __future__ import annotations

import tempfile
from pathlib import Path, PurePosixPath

from torch import nn

from vit_ray.models.positions import Grid
from vit_ray.models.weights import LoadReport, NewHead, fit_state_dict, load_weights
from vit_ray.storage import locate
from vit_ray.train.checkpoint import Position, find_weights

WEIGHT_FILES = (".npz", ".safetensors")
# Channels that a projection of pixels reads; a hybrid's projects feature maps.
_COLORS = 3


def initialize_weights(
    model: nn.Module, path: str, *, new_head: NewHead, averaged: bool | None = None
) -> LoadReport:
    """Load weights, positions resized to the model's resolution; tells what became of each tensor.

    Args:
        path: run folder, checkpoint folder, or a `.npz` or `.safetensors` file; local or `s3://`.
        new_head: True keeps the model's fresh head and drops the saved one (fine-tuning), False
            demands the saved one, "auto" takes it if it fits.
        averaged: take the averaged weights of a checkpoint; None = if it has any.

    Raises:
        ValueError: there is nothing to load at `path`, or it does not fit the model.
    """
    if path.endswith(WEIGHT_FILES):
        return _load_file(model, path, new_head)
    checkpoint = find_weights(path)
    takes_average = checkpoint.has_average() if averaged is None else averaged
    weights = checkpoint.weights(averaged=takes_average)
    grid = grid_of(checkpoint.position)
    return fit_state_dict(model, weights, new_head=new_head, source_grid=grid)


def grid_of(position: Position) -> Grid | None:
    """(rows, columns) of patches that a checkpoint of a ViT was trained at; None where not told.

    Two grids may have as many patches, 4 x 9 and 6 x 6, and then no shape tells them apart. A
    hybrid's grid depends on its backbone too, and is left to the shapes.
    """
    image_size = position.recipe.get("model", {}).get("image_size")
    names = (f"{prefix}embedding.projection.weight" for prefix in ("", "model."))
    shape = next((position.shapes[name] for name in names if name in position.shapes), None)
    if image_size is None or shape is None or shape[1] != _COLORS:
        return None
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    return height // shape[2], width // shape[3]


def _load_file(model: nn.Module, path: str, new_head: NewHead) -> LoadReport:
    location = locate(path)
    if location.is_local:
        return load_weights(model, location.path, new_head=new_head)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / PurePosixPath(location.path).name
        copy.write_bytes(location.read())
        return load_weights(model, copy, new_head=new_head)
