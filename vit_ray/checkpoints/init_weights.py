"""Weights to start from: another run's checkpoint, or an exported or published file.

A file is local, remote, or on the Hugging Face hub. Repositories of the hub
(`hf://google/vit-base-patch16-224`, also timm's) are downloaded to the hub's cache (`HF_HOME`),
and read from there when there is no network.
"""

import io
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final

import huggingface_hub
import torch
from huggingface_hub import constants
from huggingface_hub.errors import (
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vit_ray.checkpoints.checkpoint import Position
from vit_ray.checkpoints.run_checkpoints import find_weights, read_weights
from vit_ray.config.schema import value_text
from vit_ray.config.training_sections import ModelConfig
from vit_ray.models import build_model
from vit_ray.models.fitting import LoadReport, NewHead, fit_state_dict, origin_of
from vit_ray.models.published import (
    FOLDER_CONFIG,
    FOLDER_PREPROCESSOR,
    FOLDER_WEIGHTS,
    USE,
    model_options,
    parse_settings,
    weights_file,
)
from vit_ray.models.weights import WeightFile
from vit_ray.models.weights import read_weights as weights_in_file
from vit_ray.own_parts import is_own
from vit_ray.paper import canonical_model
from vit_ray.storage import Location, locate

# Keys of the model that change no tensor's shape, or only that of positions, which are resized.
_SHAPELESS_KEYS: Final = {"image_size", "dropout", "stochastic_depth"}
_WEIGHT_SUFFIXES = (".npz", ".safetensors")
# A remote file is read in pieces, so that a fault costs one piece.
_PIECE_BYTES = 64 * 2**20
# Read buffer for the headers of a remote file: those of small tensors lie side by side.
_HEADER_BUFFER_BYTES: Final = 8 * 2**10
SCHEME: Final = "hf://"
# What is downloaded from a repository: settings and weights, nothing that could run code.
_DOWNLOADED_FILES: Final = [
    FOLDER_CONFIG,
    FOLDER_PREPROCESSOR,
    FOLDER_WEIGHTS,
]
_SIZE_KEYS: Final = {"depth", "width", "mlp_dim", "num_heads", "patch_size"}
_PILLOW_BICUBIC: Final = 3  # in the settings of transformers' image processors


@dataclass(frozen=True)
class SavedWeights:
    """Weights that are not in a model yet.

    Attributes:
        num_classes: outputs of their head; None if they have none.
        load_into: loads them into a model, with positions resized to its resolution, and reports
            every tensor. Its `new_head`: True keeps the model's new head and drops the saved one
            (fine-tuning), False requires the saved head, "auto" loads the saved head if it fits.
        position: position and recipe of the run that trained them; None for a file.
    """

    num_classes: int | None
    load_into: Callable[[nn.Module, NewHead], LoadReport]
    position: Position | None = None


@lru_cache(maxsize=8)
def planned_load(config: ModelConfig, num_classes: int, path: str, new_head: NewHead) -> LoadReport:
    """The report that loading would give, from names and shapes; once for all trials.

    Raises:
        ValueError: there are no weights at `path`, or they do not fit the model.
    """
    weights = meta_state_of(path)
    try:
        with _ShapesOnly():
            return weights.load_into(_model_without_values(config, num_classes), new_head)
    except (RuntimeError, IndexError) as error:  # of torch, for a tensor of too few dimensions
        raise ValueError(f"{path} does not fit this model: {error}") from error
    except ValueError as error:
        trained = weights.position.recipe.get("model", {}) if weights.position else {}
        model = config.model_dump(mode="json", exclude=_SHAPELESS_KEYS)
        changed = [key for key in model if trained.get(key, model[key]) != model[key]]
        if not changed:
            raise
        listed = ", ".join(f"model.{key}={value_text(trained[key])}" for key in changed)
        raise ValueError(f"{error}; the weights are of {listed}") from None


@lru_cache(maxsize=8)
def meta_state_of(path: str) -> SavedWeights:
    """Names and shapes of the weights at a path, read once for all tasks and trials.

    Raises:
        ValueError: as `open_weights`.
    """
    return open_weights(path, has_values=False)


def _model_without_values(config: ModelConfig, num_classes: int) -> nn.Module:
    with torch.device("meta"), _ShapesOnly():
        return build_model(config.name, num_classes, config.image_size, **config.options())


class _ShapesOnly(TorchFunctionMode):
    """Computes shapes on `meta` for functions for which torch imports its compiler (seconds)."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _SHAPES.get(getattr(func, "__name__", ""), func)(*args, **(kwargs or {}))


def _cat_shapes(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return tensors[0].new_empty(shape)


def _interpolate_shape(image: Tensor, size: int | tuple[int, ...], **_: Any) -> Tensor:
    sides = (size,) if isinstance(size, int) else size
    return image.new_empty((*image.shape[:2], *sides))


_SHAPES: dict[str, Callable[..., Tensor]] = {
    "normal_": lambda tensor, *_, **__: tensor,
    "cat": _cat_shapes,
    "interpolate": _interpolate_shape,
}


def open_weights(
    path: str, averaged: bool | None = None, *, has_values: bool = True
) -> SavedWeights:
    """The weights of a run or of a file, on the CPU.

    Args:
        path: a run folder, a checkpoint folder, a `.npz` or `.safetensors` file, or a folder that
            Hugging Face transformers wrote, local or `s3://`; or `hf://OWNER/NAME` on its hub.
        averaged: take the averaged weights of a checkpoint; None = if it has any.
        has_values: False = only names and shapes (a few megabytes), for a model on `meta`.

    Raises:
        ValueError: there are no weights at `path`, or they are incomplete.
    """
    location = _find_weight_file(path)
    if location is not None:
        file = _read_weight_file(location, has_values)
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
        # A checkpoint does not run the code of a user's own model.
        if config is not None and not is_own(config.name):
            # Needed for its grid: 36 tokens may be 4 x 9 or 6 x 6.
            origin = origin_of(_model_without_values(config, 1))
        return fit_state_dict(model, values, new_head, origin=origin, source=source)

    # In an objective's checkpoint the model's tensors have the prefix `model.`.
    head = position.shapes.get("head.bias", position.shapes.get("model.head.bias"))
    return SavedWeights(head[0] if head else None, load_into, position)


def download(address: str) -> str:
    """The local folder of a repository's weights: downloaded, or from the cache.

    Args:
        address: `hf://OWNER/NAME`, or `hf://OWNER/NAME@REVISION`.

    Raises:
        ValueError: there is no such repository, or it cannot be reached and is not in the cache.
    """
    name, _, revision = address.removeprefix(SCHEME).strip("/").partition("@")
    try:
        # This attribute imports the hub's client, which training workers rarely need.
        return huggingface_hub.snapshot_download(
            name, revision=revision or None, allow_patterns=_DOWNLOADED_FILES
        )
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError):
        raise ValueError(
            f"{address!r}: the Hugging Face hub shows no such repository or revision; give "
            "hf://OWNER/NAME or hf://OWNER/NAME@REVISION in init_from, and set HF_TOKEN if it is "
            "private or gated"
        ) from None
    except Exception as error:  # the HTTP library's errors change with the hub's versions
        raise ValueError(
            f"{address!r}: the Hugging Face hub cannot be reached, and the weights are "
            f"not in its cache {constants.HF_HUB_CACHE}. Run `hf download {name}` where there is a "
            f"network and copy the cache, or give a local folder ({type(error).__name__}: {error})"
        ) from error


def _find_weight_file(path: str) -> Location | None:
    """The weight file at `path` or in the folder at `path`; None for a run's folder.

    A path with the suffix of a weight file counts as one even if nothing is there. Repositories of
    the hub are downloaded.

    Raises:
        ValueError: as `download`, or the repository has no weights that can be read.
    """
    location = locate(download(path) if path.startswith(SCHEME) else path)
    if path.endswith(_WEIGHT_SUFFIXES) or location.info().kind == "file":
        return location
    files = (location.child(name) for name in (FOLDER_WEIGHTS, weights_file("jax")))
    weight_file = next((file for file in files if file.exists()), None)
    if weight_file is None and path.startswith(SCHEME):
        raise ValueError(
            f"{path!r}: the repository has no {FOLDER_WEIGHTS}; weights in several files, "
            "and formats that can run code, are not read"
        )
    return weight_file


def published_use(path: str) -> dict[str, Any] | None:
    """Sections of a recipe for a published file: its model, crop and precision.

    Args:
        path: as in `open_weights`, of a file.

    Returns:
        None if neither the file's folder nor its name on the hub says which model it is.
    """
    settings = _settings_beside(path, FOLDER_CONFIG)
    if USE in settings:
        return dict(settings[USE])
    model = _model_section(settings, path.removeprefix(SCHEME).partition("@")[0])
    if model is None:
        return None
    processor = _settings_beside(path, FOLDER_PREPROCESSOR)
    size = processor.get("size")
    edge = size.get("shortest_edge") if isinstance(size, dict) else size
    crop: dict[str, object] = {"kind": "resize"}
    if processor.get("do_center_crop") and isinstance(edge, int):
        crop = {"kind": "center_crop", "resize": edge}
    timm = settings.get("pretrained_cfg") or {}
    share, size = timm.get("crop_pct"), timm.get("input_size")
    if share and size and timm.get("crop_mode", "center") == "center":
        crop = {"kind": "center_crop", "resize": int(max(size[1:]) / share)}
    if timm.get("interpolation") == "bicubic" or processor.get("resample") == _PILLOW_BICUBIC:
        crop["interpolation"] = "bicubic"
    return {"model": model, "data": {"eval_augment": crop}, "train": {"precision": "fp32"}}


def _model_section(config: dict[str, Any], hub_name: str) -> dict[str, Any] | None:
    """The recipe section `model` for a `config.json` of transformers or timm, or for a name on the
    hub; None if unknown.
    """
    if config.get("model_type") == "bit":
        factor = config.get("embedding_size", 64) // 64
        return {"name": "ResNet", "stages": config.get("depths"), "width_factor": factor}
    options = {"name": "ViT", "image_size": 224, "pool": "cls", **model_options(config)}
    if config.get("model_type", "vit") == "vit" and set(options) >= _SIZE_KEYS:
        not_in_recipes = ("grid", "norm_layer", "pooler_act")
        return {key: value for key, value in options.items() if key not in not_in_recipes}
    names = (str(config.get("architecture")), hub_name)
    return next(({"name": name} for name in names if canonical_model(name)[0] != name), None)


def published_classes(path: str) -> tuple[str, ...] | None:
    """Class names in the order of a published head, from its folder's `config.json`.

    Args:
        path: as in `open_weights`.

    Returns:
        None if there is no such file, or it has the placeholders of transformers.
    """
    settings = _settings_beside(path, FOLDER_CONFIG)
    labels = settings.get("id2label") or settings.get("label_names")
    if isinstance(labels, dict):
        labels = [labels.get(str(index)) for index in range(len(labels))]
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        return None
    if all(label == f"LABEL_{index}" for index, label in enumerate(labels)):  # or there are none
        return None
    return tuple(labels)


def _settings_beside(path: str, name: str) -> dict[str, Any]:
    weights = _find_weight_file(path)
    file = weights and _beside(weights, name)
    return parse_settings(file.read(), file.uri) if file and file.exists() else {}


def _read_weight_file(location: Location, has_values: bool) -> WeightFile:
    """The weights of a file, with its folder's configuration if there is one."""
    if location.is_local:
        return weights_in_file(location.path, opener=None if has_values else lambda p: p.open("rb"))

    def open_remote(copy: Path) -> IO[bytes]:
        return io.BufferedReader(_beside(location, copy.name).open(), _HEADER_BUFFER_BYTES)

    with tempfile.TemporaryDirectory() as temporary:
        folder, name = Path(temporary), PurePosixPath(location.path).name
        for settings in (FOLDER_CONFIG, FOLDER_PREPROCESSOR):
            _fetch(_beside(location, settings), folder / settings)
        _fetch(location, folder / name, has_values=has_values)
        opener = None if has_values else open_remote
        return weights_in_file(folder / name, source=location.uri, opener=opener)


def _beside(location: Location, name: str) -> Location:
    return Location(location.protocol, str(PurePosixPath(location.path).with_name(name)))


def _fetch(location: Location, copy: Path, *, has_values: bool = True) -> None:
    """Copy a file if it exists; without values only the header of safetensors, the rest sparse."""
    info = location.info()
    if info.kind == "nothing":
        return
    end = info.size
    if not has_values:
        length = location.read_range(0, 8) if copy.suffix == ".safetensors" else b""
        end = min(end, 8 + int.from_bytes(length, "little")) if length else 0
    with copy.open("wb") as file:
        for start in range(0, end, _PIECE_BYTES):
            file.write(location.read_range(start, min(_PIECE_BYTES, end - start)))
        file.truncate(info.size)  # the rest takes no disk space
