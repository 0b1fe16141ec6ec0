"""Weights to start from: another run's checkpoint, or an exported or published file."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import IO, Any

import torch
from pyarrow import fs
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vit_ray.checkpoints.checkpoint import Checkpoint, Position
from vit_ray.checkpoints.hf_hub import SCHEME, download
from vit_ray.checkpoints.run_checkpoints import find_weights
from vit_ray.config.training_sections import ModelConfig
from vit_ray.models import build_model
from vit_ray.models.positions import ResizeMode
from vit_ray.models.sizes import Grid
from vit_ray.models.weights.files import (
    FOLDER_CONFIG,
    FOLDER_INDEX,
    FOLDER_WEIGHTS,
    Opener,
    Origin,
    origin_of,
    parse_settings,
    parts_of,
)
from vit_ray.models.weights.input_statistics import FOLDER_PREPROCESSOR
from vit_ray.models.weights.load_save import WeightFile, read_weights
from vit_ray.models.weights.state_dicts import NOT_TOLD, LoadReport, NewHead, fit_state_dict
from vit_ray.storage import Location, locate

_WEIGHT_FILES = (".npz", ".safetensors")
# A remote file is fetched in pieces, so that a fault costs one of them.
_PIECE_BYTES = 64 * 2**20
# Of a remote file whose names and shapes are looked at: those of small tensors lie side by side.
_LOOK_BYTES = 8 * 2**10


@dataclass(frozen=True)
class SavedWeights:
    """Weights that are not in a model yet: their number of classes (None: no head), and a loader.

    `load_into` takes the model, what becomes of its head, and how positions are resized, as
    `initialize_weights`.
    """

    num_classes: int | None
    load_into: Callable[[nn.Module, NewHead, ResizeMode], LoadReport]
    sides: Grid | None = None
    """Height and width in pixels of the images that they were trained on, as a run records them;
    None for a file."""
    run_id: str | None = None
    """MLflow run that trained them, as its checkpoint has it."""


def initialize_weights(
    model: nn.Module,
    path: str,
    *,
    new_head: NewHead,
    averaged: bool | None = None,
    resize: ResizeMode = "bilinear",
) -> LoadReport:
    """Load weights, positions resized to the model's resolution; returns what became of each.

    Args:
        path: as in `open_weights`.
        new_head: True keeps the model's fresh head and drops the saved one (fine-tuning), False
            demands the saved one, "auto" takes it if it fits.
        averaged: as in `open_weights`.
        resize: as in `fit_state_dict`.

    Raises:
        ValueError: there is nothing to load at `path`, or it does not fit the model.
    """
    return open_weights(path, averaged).load_into(model, new_head, resize)


@lru_cache(maxsize=8)
def planned_load(
    config: ModelConfig, num_classes: int, path: str, new_head: NewHead, resize: ResizeMode
) -> LoadReport:
    """What `initialize_weights` would do, by names and shapes; once for all trials.

    Raises:
        ValueError: as `initialize_weights`.
    """
    weights = meta_state_of(path)
    try:
        with _ShapesAlone():
            return weights.load_into(_model_without_values(config, num_classes), new_head, resize)
    except (RuntimeError, IndexError) as error:  # of torch, for a tensor of too few dimensions
        raise ValueError(f"{path} does not fit this model: {error}") from error


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


def _undrawn(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    return tensor


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
    "normal_": _undrawn,
    "uniform_": _undrawn,
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
        file = _read_file(location, has_values)
        return SavedWeights(
            file.num_classes,
            lambda model, new_head, resize: file.load_into(model, new_head, resize=resize),
        )
    return _of_checkpoint(find_weights(path), averaged, has_values)


def find_weight_file(path: str) -> Location | None:
    """The file that `path` names, itself or in a folder of Hugging Face; None for a run's folder.

    A path that ends like a weight file is one, whether or not it is there. A repository of the hub
    is fetched into its cache.

    Raises:
        ValueError: as `download`, or there are no weights that can be read in the repository.
    """
    location = locate(download(path) if path.startswith(SCHEME) else path)
    if path.endswith(_WEIGHT_FILES) or location.info().type == fs.FileType.File:
        return location
    inside = (location.child(name) for name in (FOLDER_WEIGHTS, FOLDER_INDEX))
    found = next((file for file in inside if file.exists()), None)
    if found is None and path.startswith(SCHEME):
        raise ValueError(
            f"{path!r}: the repository has no {FOLDER_WEIGHTS}; other formats can run "
            "code and are not read"
        )
    return found


def published_classes(path: str) -> tuple[str, ...] | None:
    """Classes in the order of a published head, as its folder's `config.json` names them.

    Args:
        path: as in `open_weights`.

    Returns:
        None where there is no such file, or it has the placeholders of transformers.
    """
    file = find_weight_file(path)
    if file is None:
        return None
    config = _beside(file, FOLDER_CONFIG)
    if not config.exists():
        return None
    told = parse_settings(config.read(), config.uri)
    labels = told.get("id2label") or told.get("label_names")
    if isinstance(labels, dict):
        labels = [labels.get(str(index)) for index in range(len(labels))]
    if not isinstance(labels, list) or not labels:
        return None
    if not all(isinstance(label, str) for label in labels):
        return None
    is_placeholder = all(label == f"LABEL_{index}" for index, label in enumerate(labels))
    return None if is_placeholder else tuple(labels)


def _read_file(location: Location, has_values: bool) -> WeightFile:
    if location.is_local:
        return read_weights(location.path, opener=None if has_values else _open_here)
    with tempfile.TemporaryDirectory() as folder:
        here, name = Path(folder), PurePosixPath(location.path).name
        heavy = [name]
        for small in (FOLDER_CONFIG, FOLDER_PREPROCESSOR):
            _fetch(_beside(location, small), here / small)
        if name == FOLDER_INDEX:
            _fetch(location, here / name)
            heavy = list(parts_of(here / name, location.uri))
        for part in heavy:
            _fetch(_beside(location, part), here / part, is_whole=has_values)
        opener = None if has_values else _opener_of(location)
        return read_weights(here / name, source=location.uri, opener=opener)


def _open_here(path: Path) -> IO[bytes]:
    return path.open("rb")


def _opener_of(location: Location) -> Opener:
    """Opens a remote file, or one beside it, that a file of the same name here stands for."""

    def open_there(path: Path) -> IO[bytes]:
        return io.BufferedReader(_Ranges(_beside(location, path.name)), _LOOK_BYTES)

    return open_there


class _Ranges(io.RawIOBase):
    """A remote file, of which each range is read again after a fault."""

    def __init__(self, location: Location) -> None:
        self._location, self._size, self._at = location, location.info().size or 0, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        at = offset + (0, self._at, self._size)[whence]
        if at < 0:
            raise OSError(f"byte {at} of {self._location.uri}")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), max(0, self._size - self._at))
        content = self._location.read_range(self._at, count) if count else b""
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


def _beside(location: Location, name: str) -> Location:
    return Location(location.filesystem, str(PurePosixPath(location.path).with_name(name)))


def _fetch(location: Location, copy: Path, *, is_whole: bool = True) -> None:
    """Copy a file, where there is one; if not whole, an empty one says that it is there."""
    size = location.info().size
    if size is None:
        return
    with copy.open("wb") as file:
        for start in range(0, size if is_whole else 0, _PIECE_BYTES):
            file.write(location.read_range(start, min(_PIECE_BYTES, size - start)))


def _of_checkpoint(checkpoint: Checkpoint, averaged: bool | None, has_values: bool) -> SavedWeights:
    position = checkpoint.position
    takes_average = checkpoint.has_average() if averaged is None else averaged
    if takes_average and not checkpoint.has_average():
        raise ValueError(f"{checkpoint.folder.uri} has no averaged weights; set averaged to null.")
    kind = "averaged weights" if takes_average else "weights"
    source = f"{checkpoint.folder.uri} ({kind} of step {position.step})"

    shapes = position.shapes
    outline = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}

    def load_into(model: nn.Module, new_head: NewHead, resize: ResizeMode) -> LoadReport:
        weights = checkpoint.weights(averaged=takes_average) if has_values else outline
        origin = origin_of_checkpoint(position)
        return fit_state_dict(model, weights, new_head, resize=resize, origin=origin, source=source)

    head, config = shapes.get("head.bias"), _config_of(position)
    sides = config.sides if config else None
    return SavedWeights(head[0] if head else None, load_into, sides, position.tracking_run_id)


def origin_of_checkpoint(position: Position) -> Origin:
    """The grid by a checkpoint's recipe: whether 36 tokens are 4 x 9 or 6 x 6."""
    config = _config_of(position)
    return origin_of(_model_without_values(config, 1)) if config else NOT_TOLD


def _config_of(position: Position) -> ModelConfig | None:
    if "model" not in position.recipe:
        return None
    return ModelConfig.model_validate_json(json.dumps(position.recipe["model"]))
