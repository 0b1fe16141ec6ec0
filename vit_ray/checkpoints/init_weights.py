"""Weights to start from: another run's checkpoint, or an exported or published file."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vit_ray.checkpoints.checkpoint import Position
from vit_ray.checkpoints.run_checkpoints import find_weights, read_weights
from vit_ray.config.schema import value_text
from vit_ray.config.training_sections import ModelConfig
from vit_ray.models import build_model
from vit_ray.models.catalog import Grid
from vit_ray.models.fitting import (
    LoadReport,
    NewHead,
    fit_state_dict,
    origin_of,
)
from vit_ray.own_parts import is_own

_WITHOUT_TENSORS: Final = {"image_size", "dropout", "stochastic_depth"}
"""Keys of the model that no tensor's shape depends on, or only that of positions, which resize."""


@dataclass(frozen=True)
class SavedWeights:
    """Weights that are not in a model yet: their number of classes (None: no head), and a loader.

    `load_into` takes the model and what becomes of its head, as `initialize_weights`.

    Attributes:
        sides: height and width in pixels of the images that they were trained on, as a run records
            them; None for a file.
        position: where the run stood that trained them, with its recipe; None for a file.
    """

    num_classes: int | None
    load_into: Callable[[nn.Module, NewHead], LoadReport]
    sides: Grid | None = None
    position: Position | None = None

    @property
    def run_id(self) -> str | None:
        """MLflow run that trained them."""
        return self.position.tracking_run_id if self.position else None


def initialize_weights(
    model: nn.Module,
    path: str,
    *,
    new_head: NewHead,
) -> LoadReport:
    """Load weights, positions resized to the model's resolution; returns what became of each.

    Args:
        path: as in `open_weights`.
        new_head: True keeps the model's fresh head and drops the saved one (fine-tuning), False
            demands the saved one, "auto" takes it if it fits.

    Raises:
        ValueError: there is nothing to load at `path`, or it does not fit the model.
    """
    return open_weights(path).load_into(model, new_head)


@lru_cache(maxsize=8)
def planned_load(config: ModelConfig, num_classes: int, path: str, new_head: NewHead) -> LoadReport:
    """What `initialize_weights` would do, by names and shapes; once for all trials.

    Raises:
        ValueError: as `initialize_weights`.
    """
    weights = meta_state_of(path)
    try:
        with _ShapesAlone():
            return weights.load_into(_model_without_values(config, num_classes), new_head)
    except (RuntimeError, IndexError) as error:  # of torch, for a tensor of too few dimensions
        raise ValueError(f"{path} does not fit this model: {error}") from error
    except ValueError as error:
        before = weights.position.recipe.get("model", {}) if weights.position else {}
        now = config.model_dump(mode="json", exclude=_WITHOUT_TENSORS)
        others = [key for key in now if before.get(key, now[key]) != now[key]]
        if not others:
            raise
        listed = ", ".join(f"model.{key}={value_text(before[key])}" for key in others)
        raise ValueError(f"{error}; the weights are of {listed}") from None


@lru_cache(maxsize=8)
def meta_state_of(path: str) -> SavedWeights:
    """Names and shapes of the weights at a path, looked at once for all tasks and trials.

    Raises:
        ValueError: as `open_weights`.
    """
    return open_weights(path, has_values=False)


def _model_without_values(config: ModelConfig, num_classes: int) -> nn.Module:
    with torch.device("meta"), _ShapesAlone():
        return build_model(config.name, num_classes, config.image_size, **config.options())


class _ShapesAlone(TorchFunctionMode):
    """Does on `meta` what torch would import its compiler for, which takes seconds."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        known = _SHAPES.get(getattr(func, "__name__", ""))
        return (known or func)(*args, **(kwargs or {}))


def _joined(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    shapes = [list(tensor.shape) for tensor in tensors]
    length = sum(shape[dim] for shape in shapes)
    for shape in shapes:
        shape[dim] = length
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"tensors of the shapes {[tuple(t.shape) for t in tensors]} are one")
    return tensors[0].new_empty(shapes[0])


def _resampled(image: Tensor, size: int | tuple[int, ...], **_: Any) -> Tensor:
    sides = (size,) if isinstance(size, int) else size
    return image.new_empty((*image.shape[:2], *sides))


_SHAPES: dict[str, Callable[..., Tensor]] = {
    **dict.fromkeys(("normal_", "uniform_"), lambda tensor, *_, **__: tensor),
    "cat": _joined,
    "interpolate": _resampled,
}


def open_weights(
    path: str, averaged: bool | None = None, *, has_values: bool = True
) -> SavedWeights:
    """The weights of a run or of a file; a GPU is not needed.

    Args:
        path: a run folder, a checkpoint folder, a `.npz` or `.safetensors` file, or a folder that
            Hugging Face transformers wrote, local or `s3://`; or `hf://OWNER/NAME` on its hub.
        averaged: take the averaged weights of a checkpoint; None = if it has any.
        has_values: False = names and shapes alone, of a few megabytes, for a model on `meta`.

    Raises:
        ValueError: there are no weights at `path`, or they are not whole.
    """
    location = find_weight_file(path)
    if location is not None:
        file = read_weight_file(location, has_values)
        return SavedWeights(file.num_classes, file.load_into)
    if has_values:
        checkpoint, values = read_weights(path, averaged)
    else:
        checkpoint = find_weights(path)
        shapes = checkpoint.position.shapes
        values = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    position = checkpoint.position
    config: ModelConfig | None = None
    if "model" in position.recipe:
        config = ModelConfig.model_validate_json(json.dumps(position.recipe["model"]))
    kind = "averaged weights" if checkpoint.takes_average(averaged) else "weights"
    source = f"{checkpoint.folder.uri} ({kind} of step {position.step})"

    def load_into(model: nn.Module, new_head: NewHead) -> LoadReport:
        origin = None
        if config is not None and not is_own(config.name):  # whose code a checkpoint does not run
            # The grid: whether 36 tokens are 4 x 9 or 6 x 6.
            origin = origin_of(_model_without_values(config, 1))
        return fit_state_dict(model, values, new_head, origin=origin, source=source)

    # An objective that trains the head of the model inside it has it under that name.
    head = position.shapes.get("head.bias", position.shapes.get("model.head.bias"))
    sides = config.sides if config else None
    return SavedWeights(head[0] if head else None, load_into, sides, position)
