"""The streams of a run: its data sets, opened, checked against each other, cut as the recipe says.

Nothing is started; errors say what to change.
"""

import logging
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np

from vit_ray.config import Recipe, require
from vit_ray.config.training_sections import DataConfig
from vit_ray.data import open_dataset
from vit_ray.data.augment import augmentation_of
from vit_ray.data.boxes import Augmentation
from vit_ray.data.dataset import Manifest
from vit_ray.data.order import ShuffleWindow
from vit_ray.data.parts import select
from vit_ray.data.shards import Cache, first_labels
from vit_ray.data.stream.batches import StreamSpec
from vit_ray.evaluation.few_shot import require_shots
from vit_ray.launch.resolved_run import check_batch, check_model, check_own_parts, window_rows

logger = logging.getLogger(__name__)

MOST_LABELS_READ: Final = 2_000_000
"""Images of a few-shot pool that are looked at before a run: 8 MB, seconds from an object store."""


@dataclass(frozen=True)
class ResolvedRun:
    """A recipe resolved on its data: streams, classes and steps.

    Attributes:
        recipe: with the order of the data made definite.
        streams: `train`, and of `eval`, `dev`, `few_shot_train` and `few_shot_test` what the recipe
            has.
    """

    recipe: Recipe
    manifest: Manifest
    streams: dict[str, StreamSpec]
    total_steps: int

    @property
    def num_images(self) -> int:
        """Training images of one epoch."""
        return self.streams["train"].num_images


def resolve_run(
    recipe: Recipe, *, needs_train: bool = True, begun: int | None = None
) -> ResolvedRun:
    """Open the data sets and check the recipe's arithmetic.

    Args:
        needs_train: without, the recipe may have a test set alone.
        begun: the shuffle window of a run that is continued.

    Raises:
        ValueError: there is no such model or part of the user's own, a data set is missing or
            broken, the batch does not
            divide, the run has no length, the classes of two sets differ, or a class has fewer
            images than shots.
    """
    check_model(recipe)
    data, evaluate = recipe.data, recipe.evaluate
    path = data.train if needs_train or data.train else data.eval
    key = "data.train" if needs_train else "data.eval"
    manifest = open_dataset(require(path, key, "the folder of a converted data set"))
    if needs_train:
        require_trainable(manifest)
    check_own_parts(recipe, manifest.num_classes)
    batch = recipe.train.global_batch_size
    window_size = window_rows(data, batch, recipe.model.sides, manifest, begun)
    recipe = recipe.with_changes(data={"shuffle_window": window_size})
    data = recipe.data
    part, held_out = select(
        manifest,
        seed=recipe.seed,
        held_out_fraction=data.held_out_fraction,
        fraction=data.fraction,
    )

    def evaluated(manifest: Manifest) -> StreamSpec:
        cut = augmentation_of(recipe.model, data.eval_augment)
        return stream_of(data, recipe.seed, cut, manifest)

    cut = augmentation_of(recipe.model, data.augment)
    streams = {"train": training_stream(data, recipe.seed, cut, batch, part)}
    if data.eval is not None:
        streams["eval"] = evaluated(open_dataset(data.eval))
        if held_out is not None and recipe.chooses_on_dev and needs_train:
            streams["dev"] = evaluated(held_out)
    elif held_out is not None:
        streams["eval"] = evaluated(held_out)
    if evaluate.few_shot_train is not None and evaluate.few_shot_test is not None:
        pool, test = open_dataset(evaluate.few_shot_train), open_dataset(evaluate.few_shot_test)
        streams |= {"few_shot_train": evaluated(pool), "few_shot_test": evaluated(test)}
        _check_classes("evaluate.few_shot_test", test, pool)
        _check_shots(pool.path, pool.fingerprint, evaluate.shots)
    total_steps = 0
    if needs_train:
        if "eval" in streams:
            _check_classes("data.eval", streams["eval"].manifest, manifest)
        num_images = streams["train"].num_images
        check_batch(recipe, num_images)
        total_steps = recipe.optim.total_steps(num_images, batch)
    return ResolvedRun(recipe, manifest, streams, total_steps)


def training_stream(
    data: DataConfig,
    seed: int,
    augmentation: Augmentation,
    batch: int,
    manifest: Manifest,
) -> StreamSpec:
    """The stream that trains on a data set in global batches; `data.shuffle_window` is a number."""
    spec = stream_of(data, seed, augmentation, manifest)
    assert data.shuffle_window != "auto"
    if data.shuffle_window <= batch:
        return spec
    window = ShuffleWindow(batch, data.shuffle_window // batch)
    return replace(spec, window=window, task_rows=max(spec.task_rows, window.num_rows))


def stream_of(
    data: DataConfig,
    seed: int,
    augmentation: Augmentation,
    manifest: Manifest,
) -> StreamSpec:
    """A stream without a shuffle window: as evaluations read it."""
    cache = data.cache_dir and Cache(data.cache_dir, int(data.cache_free_gib * 2**30))
    return StreamSpec(
        manifest,
        augmentation,
        seed=seed,
        max_bad_fraction=data.max_bad_fraction,
        num_cpus=data.cpus_per_task,
        label_selector=data.label_selector,
        object_store_mib=data.object_store_mib,
        cache=cache or None,
    )


def _check_classes(key: str, one: Manifest, other: Manifest) -> None:
    if one.classes != other.classes:
        raise ValueError(
            f"{key}: {one.path} has {one.num_classes} classes and {other.path} has "
            f"{other.num_classes}, and they are not the same; convert both with one list of classes"
        )


def require_trainable(manifest: Manifest) -> None:
    """
    Raises:
        ValueError: its maker has marked the set as one for evaluation only.
    """
    if manifest.origin.get("evaluation_only"):
        raise ValueError(
            f"data.train={manifest.path!r} is for evaluation only "
            "(convert.evaluation_only), so it may be data.eval; train on another set"
        )


@lru_cache(maxsize=4)
def _check_shots(path: str, fingerprint: str, shots: tuple[int, ...]) -> None:
    """Read labels until every class has its examples; once for all trials of a sweep.

    Raises:
        ValueError: a class has fewer.
    """
    manifest = open_dataset(path)
    examples = np.zeros(manifest.num_classes, np.int64)
    for labels in first_labels(manifest):
        examples += np.bincount(labels[labels >= 0], minlength=len(examples))
        if examples.min() >= max(shots):
            return
        if examples.sum() > MOST_LABELS_READ:
            logger.warning(
                "evaluate.few_shot_train: of %d images the first %d were looked at, and %d of %d "
                "classes have fewer than %d there; the first evaluation shows whether they have "
                "them at all",
                manifest.num_images,
                examples.sum(),
                (examples < max(shots)).sum(),
                len(examples),
                max(shots),
            )
            return
    require_shots(examples, shots=shots, classes=manifest.classes)
