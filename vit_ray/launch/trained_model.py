"""A trained model for images of many kinds; needs neither Ray nor DeepSpeed.

Images are cropped and computed as in an evaluation, in batches of the same size: logits are
bit-equal to those of the evaluation if the process has as many threads.
"""

import contextlib
import copy
import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vit_ray.checkpoints.checkpoint import Position
from vit_ray.checkpoints.init_weights import (
    SavedWeights,
    open_weights,
    published_classes,
    published_use,
)
from vit_ray.config import Recipe, load_recipe
from vit_ray.config.loading import changed
from vit_ray.config.recipe import recipe_from_dict, used_sections
from vit_ray.config.schema import errors_of
from vit_ray.data.boxes import evaluation_augmentation
from vit_ray.data.crops import crop_of
from vit_ray.data.dataset import Manifest, open_dataset
from vit_ray.data.images import BadImageError, UInt8Array, orientation_of, pixels_of, turned_pixels
from vit_ray.launch.dataset import Sample
from vit_ray.launch.named_run import where_it_lies
from vit_ray.models import build_model
from vit_ray.own_parts import trust_named
from vit_ray.storage import locate
from vit_ray.training.objective import normalize

logger = logging.getLogger(__name__)

# An address, an encoded image, Pillow's image, a sample of a data set, or pixels: (H, W, 3),
# uint8 or floats in [0, 1]
AnImage = str | os.PathLike[str] | bytes | Image.Image | NDArray[Any] | Sample
# One image or several; a data set and an array (N, H, W, 3) are several.
Images = AnImage | Iterable[AnImage]


class Prediction(NamedTuple):
    """The most probable class of an image.

    Attributes:
        name: name of the class; its number as text if the names are unknown.
        probability: by softmax over the classes, or by sigmoid if the model was trained so.
        label: index of the class.
    """

    name: str
    probability: float
    label: int


class TrainedModel:
    """A trained model for images.

    Attributes:
        model: in evaluation mode, on a GPU if there is one; (B, 3, H, W) in [-1, 1] to logits. Its
            parameters have the training's precision: those of a bf16 run are rounded, so save
            weights from the checkpoint (`open_weights`, `vit-ray export`), not from here.
        recipe: has the model, evaluation crop, loss, precision and batch size of the training.
        has_names: whether the names of the classes are known.
        classes: names in the order of the logits; numbers as text if the names are unknown.
        source: describes the weights.
    """

    def __init__(
        self,
        recipe: Recipe,
        weights: SavedWeights,
        classes: tuple[str, ...] = (),
        is_turned: bool = False,
    ) -> None:
        """
        Args:
            is_turned: whether images are turned by their EXIF orientation, as in the training.

        Raises:
            ValueError: the weights have no head, or are those of another model.
        """
        config = recipe.model
        if weights.num_classes is None or recipe.train.loss == "masked_patch":
            raise ValueError("the weights have no trained head; fine-tune them first")
        model = build_model(
            config.name, weights.num_classes, config.image_size, **config.options()
        ).eval()
        self.source = weights.load_into(model, False).source
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._dtype = torch.bfloat16 if recipe.train.precision == "bf16" else torch.float32
        self.model = model.to(device, self._dtype)
        self.recipe = recipe
        self._is_turned = is_turned
        self.has_names = bool(classes)
        self.classes = list(classes or map(str, range(weights.num_classes)))
        self._augmentation = evaluation_augmentation(config, recipe.data.eval_augment)

    def crop(self, image: AnImage) -> UInt8Array:
        """The crop of an image that an evaluation uses: uint8 (H, W, 3) of the model's size.

        Raises:
            BadImageError: the image cannot be decoded, or is not an image.
            OSError: the image's file cannot be read.
        """
        if isinstance(image, Sample):
            image = image.image
        if isinstance(image, (str, os.PathLike)):
            image = locate(os.fspath(image)).read()
        if isinstance(image, bytes):
            must_turn = self._is_turned and orientation_of(image) != 1
            content = turned_pixels(image) if must_turn else image
        elif isinstance(image, Image.Image):
            content = pixels_of(image)
        else:
            content = _checked(np.asarray(image))
        return crop_of(content, self._augmentation, (0, 0, 0))

    def transform(self, image: AnImage) -> Tensor:
        """An image as input of `model`, without the batch dimension: (3, H, W) in [-1, 1].

        Raises:
            BadImageError, OSError: as `crop`.
        """
        return normalize(torch.from_numpy(self.crop(image)[None]), torch.float32)[0]

    @torch.no_grad()
    def logits_of_crops(self, crops: Iterable[UInt8Array]) -> Iterator[NDArray[np.float32]]:
        """Logits (b, K) of `crop`s, batch by batch.

        The last batch is padded, as in an evaluation, unless it is the only one.
        """
        crops, size = iter(crops), self.recipe.evaluate.batch_size
        device, is_first = next(self.model.parameters()).device, True
        while rows := list(itertools.islice(crops, size)):
            batch = np.zeros((len(rows) if is_first else size, *rows[0].shape), np.uint8)
            batch[: len(rows)], is_first = rows, False
            pixels = normalize(torch.from_numpy(batch).to(device), self._dtype)
            yield self.model(pixels).float().cpu().numpy()[: len(rows)]

    def logits(self, images: Images) -> NDArray[np.float32]:
        """Logits (N, K).

        Raises:
            BadImageError, OSError: as `crop`.
        """
        batches = list(self.logits_of_crops(map(self.crop, _several(images))))
        return np.concatenate(batches or [np.zeros((0, len(self.classes)), np.float32)])

    def probabilities(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Probabilities (N, K) of the classes: softmax, or sigmoid if the model was trained so."""
        values = torch.from_numpy(logits).double()
        is_sigmoid = self.recipe.train.loss == "sigmoid"
        return (values.sigmoid() if is_sigmoid else values.softmax(1)).float().numpy()

    def predict(self, images: Images) -> list[Prediction]:
        """The most probable class of each image; also accepts a single image.

        Raises:
            BadImageError, OSError: as `crop`.
        """
        probabilities = self.probabilities(self.logits(images))
        best = probabilities.argmax(1).tolist()
        return [
            Prediction(self.classes[label], float(row[label]), label)
            for label, row in zip(best, probabilities, strict=True)
        ]


def load(
    source: str | os.PathLike[str],
    recipe: Recipe | str | os.PathLike[str] | None = None,
    *,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    averaged: bool | None = None,
) -> TrainedModel:
    """A trained model for images, from a run, a checkpoint or a weight file.

    Args:
        source: as `init_from` of a recipe: a run's folder, a checkpoint, a `.npz` or `.safetensors`
            file, an exported or published folder, or `hf://OWNER/NAME`.
        recipe: a recipe, or its name or path, which describes the model of a weight file; a run and
            an exported folder record their recipe.
        overrides: changes of the recipe, or of the recorded one, as for `load_recipe`.
        averaged: whether to take a run's averaged weights; None = if there are any.

    Raises:
        ValueError: there are no complete weights, they have no head, or nothing describes their
            model.
    """
    source = os.fspath(source)
    weights = open_weights(source, averaged)
    if isinstance(recipe, (str, os.PathLike)):
        recipe = load_recipe(Path(recipe), overrides)
    else:
        if recipe is not None:
            tree: dict[str, Any] | None = recipe.model_dump(mode="json")
        elif weights.position:
            tree = used_sections(weights.position.recipe)
        else:
            tree = published_use(source)
        if tree is None and not overrides:
            raise ValueError(
                f"{source!r} does not record its model; give the recipe that trained it, or the "
                "model, such as model.name=ViT-B/16"
            )
        trust_named(changed({}, overrides))  # but no modules that a checkpoint names
        tree = changed(copy.deepcopy({"name": "trained", **(tree or {})}), overrides)
        recipe = recipe_from_dict(tree, where=source)
    data = training_set(source, weights.position, recipe.data.train)
    classes = class_names(source, data, weights.num_classes)
    is_turned = bool(data and data.origin.get("apply_orientation"))
    with errors_of(repr(source)):
        return TrainedModel(recipe, weights, classes, is_turned)


def training_set(source: str, position: Position | None, path: str | None) -> Manifest | None:
    """The training set of a model in its present place; None if it is unknown.

    A set with another fingerprint is not used.

    Args:
        source: as for `load`.
        position: of its checkpoint.
        path: `data.train` of a recipe, tried after the path in the checkpoint.
    """
    recorded = None
    if position and "data" in position.recipe:
        recorded = where_it_lies(position.recipe, locate(source))["data"]["train"]
    for folder in filter(None, (recorded, path)):
        with contextlib.suppress(ValueError, OSError):
            data = open_dataset(folder)
            if position is None or position.data_fingerprint in ("", data.fingerprint):
                return data
            logger.warning(
                "%s was trained on another data set than %s is now; classes are numbers",
                source,
                data.path,
            )
    return None


def class_names(source: str, data: Manifest | None, num_classes: int | None) -> tuple[str, ...]:
    """Names of the head's classes, from the folder of published weights or the training set.

    Empty if the names are unknown.
    """
    candidates = published_classes(source), tuple(data.classes) if data else ()
    return next((names for names in candidates if names and len(names) == num_classes), ())


def _checked(pixels: NDArray[Any]) -> UInt8Array:
    """An array of pixels as uint8; floats are from 0 to 1.

    Raises:
        BadImageError: the array has another shape or type, or other values.
    """
    values = np.rint(pixels * 255) if pixels.dtype.kind == "f" else pixels
    is_image = values.ndim == 3 and values.shape[2] == 3 and values.dtype.kind in "uif"
    if not (is_image and values.size and values.min() >= 0 and values.max() <= 255):
        raise BadImageError(
            f"pixels are {pixels.dtype} {pixels.shape}; give (H, W, 3), integers in [0, 255] or "
            "floats in [0, 1]"
        )
    return values.astype(np.uint8)


def _several(images: Images) -> Iterable[AnImage]:
    if isinstance(images, (str, os.PathLike, bytes, Image.Image, Sample)):
        return [images]
    if hasattr(images, "iloc"):  # a pandas table: its first column
        return list(images.iloc[:, 0])
    if isinstance(images, np.ndarray):
        return [images] if images.ndim == 3 else list(images)
    return images
