"""A recipe resolved on its data: the model and its initial weights are checked, the data sets are
opened as streams, and the correct answers of a test set are read.

Nothing is started; errors say what to change.
"""

import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import PurePosixPath
from typing import Final, Literal

import numpy as np

from vit_ray.config import Recipe, require
from vit_ray.config.schema import errors_of
from vit_ray.config.training_sections import DataConfig
from vit_ray.data.boxes import Augmentation, evaluation_augmentation, training_augmentation
from vit_ray.data.dataset import Manifest, open_dataset
from vit_ray.data.keyed_random import KeyedUniform
from vit_ray.data.order import ShuffleWindow
from vit_ray.data.parts import select
from vit_ray.data.shards import Cache, all_first_labels, first_labels, keys
from vit_ray.data.stream.batches import TASK_MEMORY_MIB, StreamSpec
from vit_ray.evaluation.few_shot import require_shots
from vit_ray.evaluation.ground_truth import (
    OBJECTNET_FILES,
    OBJECTNET_FOLDER,
    REAL_FILE,
    Answers,
    named_answers,
    numbered_answers,
    objectnet_answers,
    parse_classes,
    real_answers,
)
from vit_ray.models.catalog import as_grid, find_spec
from vit_ray.own_parts import is_own, own_part
from vit_ray.storage import locate
from vit_ray.training.steps import micro_batch_size

logger = logging.getLogger(__name__)

Kind = Literal["pretrain", "finetune", "sweep_trial", "study_cell", "evaluate"]
# What a run of this kind does with the head of its initial weights, as in `SavedWeights`
NEW_HEAD: Final[dict[Kind, bool | Literal["auto"]]] = {
    "pretrain": "auto",
    "study_cell": "auto",
    "finetune": True,
    "sweep_trial": True,
    "evaluate": False,
}
# Images of a default window: tasks of twice the usual length, a few seconds of one CPU.
_MAX_ROWS: Final = 2048
# Share of a task's memory for a default window; images differ in size.
_MEMORY_SHARE: Final = 0.75


@dataclass(frozen=True)
class ResolvedRun:
    """A recipe resolved on its data: streams, classes and steps.

    Attributes:
        recipe: with a definite shuffle window.
        streams: `train`; `eval`, `dev`, `few_shot_train` and `few_shot_test` if the recipe has
            them.
        answers: of an evaluation: the correct answers for its images.
    """

    recipe: Recipe
    manifest: Manifest
    streams: dict[str, StreamSpec]
    total_steps: int
    answers: Answers | None = None

    @property
    def num_images(self) -> int:
        """Training images of one epoch."""
        return self.streams["train"].num_images

    @property
    def num_classes(self) -> int:
        """Outputs of the model."""
        return self.answers.num_outputs if self.answers else self.manifest.num_classes

    @property
    def num_eval_images(self) -> int:
        """Images of the test set that have an answer and so count; 0 without a test set."""
        if "eval" not in self.streams:
            return 0
        test = self.streams["eval"]
        if not self.answers or self.recipe.benchmark.kind not in ("imagenet_real", "objectnet"):
            return test.num_images
        labels_n1 = all_first_labels(test.manifest.path)[:, None]
        answers_nl = self.answers.of_batch(labels_n1, np.arange(len(labels_n1)))
        return int((answers_nl >= 0).any(axis=1).sum())


def resolve_run(
    recipe: Recipe, *, needs_train: bool = True, begun: int | None = None
) -> ResolvedRun:
    """Check the model, the custom components and, as `resolve_data`, the data.

    Raises:
        ValueError: there is no such model or custom component, or as `resolve_data`.
    """
    check_model(recipe)
    run = resolve_data(recipe, needs_train=needs_train, begun=begun)
    check_own_parts(recipe, run.manifest.num_classes)
    return run


def resolve_evaluation(recipe: Recipe) -> ResolvedRun:
    """As `resolve_run`, with a name of its own, and with the correct answers of its test set.

    Raises:
        ValueError: no data set to measure on is given, or as `resolve_run` and `answers_of`.
    """
    recipe.check_measures()
    recipe = recipe.with_absolute_paths()
    recipe = recipe.with_changes(name=f"{recipe.name}-evaluation-{time.strftime('%Y%m%d-%H%M%S')}")
    run = resolve_run(recipe, needs_train=False)
    if "eval" not in run.streams:
        return run
    return replace(run, answers=answers_of(recipe, run.streams["eval"].manifest, run.manifest))


def resolve_data(
    recipe: Recipe,
    manifest: Manifest | None = None,
    *,
    needs_train: bool = True,
    begun: int | None = None,
) -> ResolvedRun:
    """Open the data sets and check the recipe's arithmetic.

    Args:
        manifest: the data set if it is open.
        needs_train: if False, a test set is enough.
        begun: the shuffle window of a run that is continued.

    Raises:
        ValueError: a data set is missing or broken, the batch does not divide, the run has no
            length, the classes of two sets differ, or a class has fewer images than shots.
    """
    data, evaluate = recipe.data, recipe.evaluate
    uses_train = needs_train or data.train is not None
    key, path = ("data.train", data.train) if uses_train else ("data.eval", data.eval)
    manifest = manifest or open_dataset(require(path, key, "the folder of a converted data set"))
    if needs_train and manifest.origin.get("evaluation_only"):
        raise ValueError(
            f"data.train={manifest.path!r} is for evaluation only "
            "(convert.evaluation_only), so it may be data.eval; train on another set"
        )
    batch = recipe.train.global_batch_size
    window_size = window_rows(data, batch, recipe.model.sides, manifest, begun)
    recipe = recipe.with_changes(data={"shuffle_window": window_size})
    part, held_out = select(
        manifest,
        seed=recipe.seed,
        held_out_fraction=data.held_out_fraction,
        fraction=data.fraction,
    )
    crop = evaluation_augmentation(recipe.model, data.eval_augment)
    evaluated = partial(stream_of, data, recipe.seed, crop)
    train = stream_of(data, recipe.seed, training_augmentation(recipe.model, data.augment), part)
    if window_size > batch:
        window = ShuffleWindow(batch, window_size // batch)
        train = replace(train, window=window, task_rows=max(train.task_rows, window.num_rows))
    streams = {"train": train}
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
        check_batch(recipe, train.num_images)
        total_steps = recipe.optim.total_steps(train.num_images, batch)
    return ResolvedRun(recipe, manifest, streams, total_steps)


def check_batch(recipe: Recipe, num_images: int) -> None:
    """Check that the global batch divides by every allowed number of workers, and fits the data.

    Raises:
        ValueError: it does not; with the arithmetic and the nearest valid value.
    """
    batch = recipe.train.global_batch_size
    for world_size in recipe.group_sizes:
        micro_batch_size(recipe, world_size)
    if num_images < batch:
        raise ValueError(
            f"train.global_batch_size={batch} is more than the {num_images} training images; "
            f"use at most {num_images}"
        )


def stream_of(
    data: DataConfig,
    seed: int,
    augmentation: Augmentation,
    manifest: Manifest,
) -> StreamSpec:
    """A stream without a shuffle window, as for evaluations."""
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


def _check_classes(key: str, test: Manifest, train: Manifest) -> None:
    if test.classes != train.classes:
        raise ValueError(
            f"{key}: {test.path} has {test.num_classes} classes and {train.path} has "
            f"{train.num_classes}, and they are not the same; convert both with one list of classes"
        )


@lru_cache(maxsize=4)
def _check_shots(path: str, fingerprint: str, shots: tuple[int, ...]) -> None:
    """Read labels until every class has enough examples; once for all trials of a sweep.

    Raises:
        ValueError: a class has fewer.
    """
    manifest = open_dataset(path)
    examples = np.zeros(manifest.num_classes, np.int64)
    for labels in first_labels(manifest):
        examples += np.bincount(labels[labels >= 0], minlength=len(examples))
        if examples.min() >= max(shots):
            return
    require_shots(examples, shots=shots, classes=manifest.classes)


def check_model(recipe: Recipe) -> None:
    """Check that the model and its frozen parts exist.

    Raises:
        ValueError: as `build_model`; or all parts are frozen, or a frozen part does not exist.
    """
    model, optim = recipe.model, recipe.optim
    as_grid(model.image_size)
    if not is_own(model.name):
        find_spec(model.name, model.options())
    if is_own(model.name) or optim.frozen:  # built on `meta`, without values
        import torch  # for these models only: seconds

        from vit_ray.models.flops import forward_macs
        from vit_ray.training.objective import build_objective

        forward_macs(model.name, 2, model.image_size, **model.options())
        with torch.device("meta"):
            objective = build_objective(recipe, 2)
        if not any(parameter.requires_grad for parameter in objective.parameters()):
            raise ValueError(
                "optim.frozen names every part, so that nothing would be trained; remove one"
            )


def check_own_parts(recipe: Recipe, num_classes: int) -> None:
    """Look up custom components other than the model, and call those that need no run.

    Raises:
        ValueError: a component does not exist, or returns a wrong shape or type.
    """
    train, metrics = recipe.train, recipe.evaluate.metrics
    for name in train.callbacks:
        own_part(name, "train.callbacks")
    if recipe.data.augment.own is not None:
        augment = own_part(name := recipe.data.augment.own, "data.augment.own")
        crop = np.zeros((*recipe.model.sides, 3), np.uint8)
        result = augment(crop, KeyedUniform(0))
        if (shape := np.shape(result)) != crop.shape or result.dtype != np.uint8:
            raise ValueError(
                f"data.augment.own={name} returns {list(shape)} {getattr(result, 'dtype', '')} for "
                f"{list(crop.shape)} uint8; return a crop of the same shape and type"
            )
    if not (metrics or is_own(train.loss) or is_own(recipe.optim.name)):
        return
    import torch  # only for these components: seconds

    from vit_ray.training.objective import classification_loss, per_image
    from vit_ray.training.optimizers import state_types

    state_types(recipe.optim)
    logits, labels = torch.zeros(2, num_classes), torch.zeros(2, 1, dtype=torch.int64)
    if is_own(train.loss):
        classification_loss(logits, labels, train)
    for name in metrics:
        values = own_part(name, "evaluate.metrics")(logits, labels)
        per_image(values, labels, f"evaluate.metrics: {name}")


def check_head_is_trained(recipe: Recipe, kind: Kind) -> None:
    """Check that a new head is not frozen.

    Raises:
        ValueError: its weights, which are zero, would give every image the same logits.
    """
    is_new = recipe.init_from is None or NEW_HEAD[kind] is True
    if is_new and recipe.train.loss != "masked_patch" and "head" in recipe.optim.frozen:
        raise ValueError(
            "optim.frozen has head, but this run starts with a new head of zeros, which would "
            "never learn; remove head from optim.frozen"
        )


def window_rows(
    data: DataConfig,
    batch: int,
    sides: tuple[int, int],
    manifest: Manifest,
    begun: int | None = None,
) -> int:
    """Images of the shuffle window; for `auto`, that of the run's start or a default.

    The window is chosen once and recorded in checkpoints.

    Args:
        batch: images of a global batch.
        sides: pixels of a crop.
        begun: the window of the run that is continued; None for a new one.

    Raises:
        ValueError: the window is no whole number of batches, or too large for a task's memory.
    """
    bytes_per_image = max(float(manifest.bytes.sum()) / manifest.num_images, 1.0)
    task_bytes = TASK_MEMORY_MIB * 2**20
    # A task also holds as many rows outside its window: the window's ends cut two row groups.
    group_rows = int(manifest.rows.max())
    rows = begun if data.shuffle_window == "auto" else data.shuffle_window
    if rows is None:  # 2, 4, 8, ... batches that one task makes; 0 for fewer than two
        max_rows = min(_MAX_ROWS, int(_MEMORY_SHARE * task_bytes / bytes_per_image) - group_rows)
        if data.object_store_mib is not None:
            # Half of it: the blocks of two tasks wait there at the same time.
            max_rows = min(max_rows, (data.object_store_mib << 19) // (3 * sides[0] * sides[1]))
        rows = batch << (max_rows // batch).bit_length() - 1 if max_rows >= 2 * batch else 0
    if rows % batch:
        nearest = max(1, round(rows / batch)) * batch
        raise ValueError(
            f"data.shuffle_window={rows} is no whole number of train.global_batch_size={batch}; "
            f"the nearest is {nearest}, and 0 is none"
        )
    fits = int(task_bytes / bytes_per_image) - group_rows
    if rows > max(batch, fits):
        mib = math.ceil((rows + group_rows) * bytes_per_image / 2**20)
        lower = fits // batch * batch
        raise ValueError(
            f"data.shuffle_window={rows} images take about {mib} MiB of each reading task, which "
            f"holds {TASK_MEMORY_MIB}; lower it to {lower if lower > batch else 0}"
        )
    return rows


def check_weights(run: ResolvedRun, kind: Kind) -> str | None:
    """Check that the names and shapes of the weights in `init_from` fit the model.

    Returns:
        The MLflow run that trained them; None if there is none.

    Raises:
        ValueError: there are no weights, no valid checkpoint is among them, or tensors are missing,
            unexpected or of another shape.
    """
    recipe = run.recipe
    if recipe.init_from is None:
        return None
    from vit_ray.checkpoints.init_weights import meta_state_of, planned_load  # with torch: seconds

    with errors_of("init_from"):
        planned_load(recipe.model, run.num_classes, recipe.init_from, NEW_HEAD[kind])
    # The folder's name is not enough: another run may use it later.
    position = meta_state_of(recipe.init_from).position
    return position.tracking_run_id if position else None


def answers_of(recipe: Recipe, eval_set: Manifest, model_set: Manifest) -> Answers:
    """The correct answers for the images of a test set.

    Args:
        model_set: gives the model's classes if the recipe does not name them.

    Raises:
        ValueError: a file is not as published, or not of this test set.
        OSError: a file is missing.
    """
    config = recipe.benchmark
    classes = _model_classes(config.model_classes, model_set.classes, recipe.init_from)
    match config.kind:
        case "imagenet_real":
            file = locate(require(config.label_file, "benchmark.label_file", REAL_FILE))
            with errors_of(f"benchmark.label_file={file.uri} is not {REAL_FILE}"):
                published = json.loads(file.read())
            labels = all_first_labels(eval_set.path)
            names = [key for shard_keys in keys(eval_set) for key in shard_keys]
            return real_answers(published, names, labels, eval_set.classes, classes, file.uri)
        case "imagenet_v2":
            return numbered_answers(eval_set.classes, classes)
        case "objectnet":
            folder = locate(require(config.label_file, "benchmark.label_file", OBJECTNET_FOLDER))
            with errors_of(f"benchmark.label_file={folder.uri} is not {OBJECTNET_FOLDER}"):
                files = {name: folder.child(name).read().decode() for name in OBJECTNET_FILES}
            return objectnet_answers(files, eval_set.classes, classes)
    if tuple(eval_set.classes) == classes:
        return Answers(classes, len(classes))
    if config.kind != "class_names" and sorted(eval_set.classes) != sorted(classes):
        raise ValueError(
            f"data.eval: {eval_set.path} has {eval_set.num_classes} classes and the model has "
            f"{len(classes)}, and they are not the same; name the model's in "
            "benchmark.model_classes, and where the set has only some of them, give "
            "benchmark.kind=class_names"
        )
    return named_answers(eval_set.classes, classes)


def _model_classes(
    path: str | None, classes: Sequence[str], weights: str | None
) -> tuple[str, ...]:
    """The model's classes in the order of its outputs.

    Without `path`: in the order of the published head, if its class names are exactly these.
    """
    if path is not None:
        suffix = PurePosixPath(path).suffix
        if suffix not in (".txt", ".json"):
            return tuple(open_dataset(path).classes)
        with errors_of(f"benchmark.model_classes={path!r} is no text; give a list of the classes"):
            text = locate(path).read().decode()
        return parse_classes(text, suffix, f"benchmark.model_classes={path!r}")
    if weights is None:
        return tuple(classes)
    from vit_ray.checkpoints.init_weights import published_classes  # with torch: seconds

    published = published_classes(weights)
    if published is None or sorted(published) == sorted(classes):
        return published or tuple(classes)
    logger.warning(
        "init_from: its folder names its %d classes otherwise than the data set (%r, not %r): its "
        "outputs are taken to be in the order of the data set; else name them in "
        "benchmark.model_classes",
        len(published),
        published[0],
        classes[0],
    )
    return tuple(classes)
