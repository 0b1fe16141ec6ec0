"""Weights to start from: another run's checkpoint, or an exported or published file.

A file is local, remote, or on the Hugging Face hub. A repository of the hub
(`hf://google/vit-base-patch16-224`, timm's too) is kept in the hub's own cache (`HF_HOME`), which
is also what is read without a network.
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
from vit_ray.models.catalog import Grid
from vit_ray.models.fitting import (
    LoadReport,
    NewHead,
    fit_state_dict,
    origin_of,
)
from vit_ray.models.published import (
    FOLDER_CONFIG,
    FOLDER_INDEX,
    FOLDER_PREPROCESSOR,
    FOLDER_WEIGHTS,
    USE,
    model_options,
    parse_settings,
    weights_file,
)
from vit_ray.models.weights import WeightFile, parts_of
from vit_ray.models.weights import read_weights as weights_in_file
from vit_ray.own_parts import is_own
from vit_ray.paper import canonical_model
from vit_ray.storage import Location, locate

# Keys of the model that no tensor's shape depends on, or only that of positions, which resize.
_WITHOUT_TENSORS: Final = {"image_size", "dropout", "stochastic_depth"}
_WEIGHT_FILES = (".npz", ".safetensors")
# A remote file is fetched in pieces, so that a fault costs one of them.
_PIECE_BYTES = 64 * 2**20
# Of a remote file whose names and shapes are looked at: those of small tensors lie side by side.
_LOOK_BYTES: Final = 8 * 2**10
SCHEME: Final = "hf://"
# Nothing that could run code, and only the weights of the model itself.
_WANTED: Final = [
    FOLDER_CONFIG,
    FOLDER_PREPROCESSOR,
    FOLDER_WEIGHTS,
    FOLDER_INDEX,
    "model-*.safetensors",
]
_SIZES: Final = {"depth", "width", "mlp_dim", "num_heads", "patch_size"}
_PILLOWS_BICUBIC: Final = 3  # in the settings of transformers' image processors


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
        if config is not None and not is_own(config.name):  # whose code a checkpoint does not run
            # The grid: whether 36 tokens are 4 x 9 or 6 x 6.
            origin = origin_of(_model_without_values(config, 1))
        return fit_state_dict(model, values, new_head, origin=origin, source=source)

    # An objective that trains the head of the model inside it has it under that name.
    head = position.shapes.get("head.bias", position.shapes.get("model.head.bias"))
    sides = config.sides if config else None
    return SavedWeights(head[0] if head else None, load_into, sides, position)


def download(address: str) -> str:
    """The local folder of a repository's weights, from the cache where they are there.

    Args:
        address: `hf://OWNER/NAME`, or `hf://OWNER/NAME@REVISION`.

    Raises:
        ValueError: there is no such repository, or it cannot be reached and is not in the cache.
    """
    name, _, revision = address.removeprefix(SCHEME).strip("/").partition("@")
    try:
        fetch = huggingface_hub.snapshot_download  # imported here: training workers rarely need it
        return fetch(name, revision=revision or None, allow_patterns=_WANTED)
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise ValueError(
            f"{address!r}: the Hugging Face hub shows no such repository or revision; "
            "check init_from, and set HF_TOKEN if it is private or gated"
        ) from None
    except HFValidationError as error:
        raise ValueError(
            f"{address!r}: expected hf://OWNER/NAME in init_from, such as "
            f"hf://google/vit-base-patch16-224 ({error})"
        ) from None
    except Exception as error:  # of an HTTP library that changes with the hub's versions
        raise ValueError(
            f"{address!r}: the Hugging Face hub cannot be reached, and the weights are "
            f"not in its cache {constants.HF_HUB_CACHE}. Run `hf download {name}` where there is a "
            f"network and copy the cache, or give a local folder ({type(error).__name__}: {error})"
        ) from error


def _find_weight_file(path: str) -> Location | None:
    """The file that `path` names, itself or in a folder of Hugging Face; None for a run's folder.

    A path that ends like a weight file is one, whether or not it is there. A repository of the hub
    is fetched into its cache.

    Raises:
        ValueError: as `download`, or there are no weights that can be read in the repository.
    """
    location = locate(download(path) if path.startswith(SCHEME) else path)
    if path.endswith(_WEIGHT_FILES) or location.info().kind == "file":
        return location
    names = (FOLDER_WEIGHTS, FOLDER_INDEX, weights_file("jax"))
    inside = (location.child(name) for name in names)
    weight_file = next((file for file in inside if file.exists()), None)
    if weight_file is None and path.startswith(SCHEME):
        raise ValueError(
            f"{path!r}: the repository has no {FOLDER_WEIGHTS}; other formats can run "
            "code and are not read"
        )
    return weight_file


def published_use(path: str) -> dict[str, Any] | None:
    """Sections of a recipe that say which model a published file is of, and how images are cut.

    Args:
        path: as in `open_weights`, of a file.

    Returns:
        None where neither its folder nor its name on the hub says which model it is.
    """
    settings = _settings_beside(path, FOLDER_CONFIG)
    if USE in settings:
        return dict(settings[USE])
    model = _model_section(settings)
    if model is None:
        name = path.removeprefix(SCHEME).partition("@")[0]
        if canonical_model(name)[0] == name:
            return None
        model = {"name": name}
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
    if timm.get("interpolation") == "bicubic" or processor.get("resample") == _PILLOWS_BICUBIC:
        crop["interpolation"] = "bicubic"
    return {"model": model, "data": {"eval_augment": crop}, "train": {"precision": "fp32"}}


def _model_section(config: dict[str, Any]) -> dict[str, Any] | None:
    """The recipe section `model` for what transformers or timm would build; None: not known."""
    if config.get("model_type") == "bit":
        factor = config.get("embedding_size", 64) // 64
        return {"name": "ResNet", "stages": config.get("depths"), "width_factor": factor}
    options = {"name": "ViT", "image_size": 224, "pool": "cls", **model_options(config)}
    if config.get("model_type", "vit") == "vit" and set(options) >= _SIZES:
        no_keys = ("grid", "norm_layer", "pooler_act")
        return {key: value for key, value in options.items() if key not in no_keys}
    name = str(config.get("architecture"))
    return {"name": name} if canonical_model(name)[0] != name else None


def published_classes(path: str) -> tuple[str, ...] | None:
    """Classes in the order of a published head, as its folder's `config.json` names them.

    Args:
        path: as in `open_weights`.

    Returns:
        None where there is no such file, or it has the placeholders of transformers.
    """
    settings = _settings_beside(path, FOLDER_CONFIG)
    labels = settings.get("id2label") or settings.get("label_names")
    if isinstance(labels, dict):
        labels = [labels.get(str(index)) for index in range(len(labels))]
    if not isinstance(labels, list) or not labels:
        return None
    if not all(isinstance(label, str) for label in labels):
        return None
    is_placeholder = all(label == f"LABEL_{index}" for index, label in enumerate(labels))
    return None if is_placeholder else tuple(labels)


def _settings_beside(path: str, name: str) -> dict[str, Any]:
    """A JSON file in the folder of published weights; empty where there is none."""
    file = _find_weight_file(path)
    beside = file and _beside(file, name)
    return parse_settings(beside.read(), beside.uri) if beside and beside.exists() else {}


def _read_weight_file(location: Location, has_values: bool) -> WeightFile:
    """The weights of a file, with its folder's configuration where there is one.

    Args:
        has_values: False = names and shapes alone.
    """
    if location.is_local:
        return weights_in_file(location.path, opener=None if has_values else lambda p: p.open("rb"))

    def open_there(path: Path) -> IO[bytes]:
        """The remote file, in the same folder, that a local file of this name stands for."""
        return io.BufferedReader(_beside(location, path.name).open(), _LOOK_BYTES)

    with tempfile.TemporaryDirectory() as folder:
        here, name = Path(folder), PurePosixPath(location.path).name
        heavy = [name]
        for small in (FOLDER_CONFIG, FOLDER_PREPROCESSOR):
            _fetch(_beside(location, small), here / small)
        if name == FOLDER_INDEX:
            _fetch(location, here / name)
            heavy = parts_of(here / name, location.uri)
        for part in heavy:
            _fetch(_beside(location, part), here / part, is_whole=has_values)
        opener = None if has_values else open_there
        return weights_in_file(here / name, source=location.uri, opener=opener)


def _beside(location: Location, name: str) -> Location:
    return Location(location.protocol, str(PurePosixPath(location.path).with_name(name)))


def _fetch(location: Location, copy: Path, *, is_whole: bool = True) -> None:
    """Copy a file, where there is one; if not whole, the header of safetensors, without values."""
    info = location.info()
    if info.kind == "nothing":
        return
    end = info.size
    if not is_whole:
        length = location.read_range(0, 8) if copy.suffix == ".safetensors" else b""
        end = min(end, 8 + int.from_bytes(length, "little")) if length else 0
    with copy.open("wb") as file:
        for start in range(0, end, _PIECE_BYTES):
            file.write(location.read_range(start, min(_PIECE_BYTES, end - start)))
        file.truncate(info.size)  # of this size, which takes no room
