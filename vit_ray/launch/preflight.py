"""Checks of recipe, data and cluster before anything starts; errors say what to change."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, Literal

import numpy as np

from vit_ray.checkpoints.checkpoint import Checkpoint
from vit_ray.checkpoints.run_checkpoints import (
    NoUsableCheckpointError,
    begin_without_checkpoint,
    newest_checkpoint,
    newest_verified_checkpoint,
)
from vit_ray.config import Recipe, require
from vit_ray.config.training_sections import AugmentConfig, EvalAugmentConfig, ModelConfig
from vit_ray.data import open_dataset
from vit_ray.data.format.joined_datasets import join
from vit_ray.data.format.labels import first_labels
from vit_ray.data.format.local_cache import LocalCache
from vit_ray.data.format.manifest import Manifest
from vit_ray.data.images.crops import Augmentation
from vit_ray.data.images.randaugment import RandAugment
from vit_ray.data.order.selection import Selection, select
from vit_ray.data.stream.batches import StreamSpec
from vit_ray.evaluate.few_shot import require_shots
from vit_ray.evaluate.ground_truth import Answers
from vit_ray.launch.cluster import ClusterShape
from vit_ray.launch.data_order import (
    shuffle_window,
    with_window,
)
from vit_ray.launch.evaluation_labels import answers_of
from vit_ray.launch.recipe_changes import accepted_changes
from vit_ray.launch.run_lock import lock_run
from vit_ray.lock import is_lock_file
from vit_ray.models.catalog import (
    PlainAxialResNet,
    PlainResNet,
    as_grid,
    checked_options,
    find_spec,
)
from vit_ray.models.parameter_groups import chosen_parts, parts_of
from vit_ray.models.sizes import Grid
from vit_ray.outcomes import EventKind
from vit_ray.storage import Location, locate
from vit_ray.train.micro_batch import micro_batch_size
from vit_ray.worker.job import Extraction

Kind = Literal["pretrain", "finetune", "sweep_trial", "study_cell", "evaluate", "extract"]
NEW_HEADS: Final = ("finetune", "sweep_trial")
"""Kinds of run that give the weights they start from a new head."""
_HEADS: Final[dict[str, bool]] = {**dict.fromkeys(NEW_HEADS, True), "evaluate": False}

logger = logging.getLogger(__name__)

MOST_OF_FIRST_WEIGHTS: Final = 0.2
"""Share of a run's first weights in its averaged ones that nothing is said about."""
MOST_LABELS_READ: Final = 2_000_000
"""Images of a few-shot pool that are looked at before a run: 8 MB, seconds from an object store."""


@dataclass(frozen=True)
class ResolvedRun:
    """A recipe resolved on its data: streams, classes and steps."""

    recipe: Recipe
    """With the order of the data made definite."""
    manifest: Manifest
    streams: dict[str, StreamSpec]
    """`train`, and of `eval`, `dev`, `few_shot_train` and `few_shot_test` what the recipe has."""
    total_steps: int

    @property
    def few_shot_classes(self) -> int:
        """Classes of the few-shot sets; 0 without them."""
        streams = self.streams
        return streams["few_shot_train"].manifest.num_classes if "few_shot_train" in streams else 0

    @property
    def num_images(self) -> int:
        """Training images of one epoch."""
        return self.streams["train"].num_images


@dataclass(frozen=True)
class PreparedRun:
    """A run that has passed every check which needs no cluster."""

    recipe: Recipe
    """With absolute paths."""
    kind: Kind
    resolved: ResolvedRun
    resume_from: Checkpoint | None = None
    """The newest good checkpoint of a run of this name."""
    notes: tuple[tuple[EventKind, str], ...] = ()
    """Kind and text of the events of the run's start, for its history."""
    lock_number: int | None = None
    """By which workers see that the run is still this driver's; None for an evaluation."""
    answers: Answers | None = None
    """Of an evaluation: what is right for its images."""
    outputs: int | None = None
    """Of the model; None where it has one for each class of the data set."""
    extraction: Extraction | None = None
    """Features that are written in the place of an evaluation."""
    until_step: int | None = None
    """Where this part of the run ends, evaluated and saved; None for the end of the run."""
    training_id: str | None = None
    """Of a training that begins at step 0: what is recorded of another one is not continued."""

    @property
    def trains(self) -> bool:
        """Whether weights are trained, and not only used."""
        return self.kind not in ("evaluate", "extract")

    @property
    def num_classes(self) -> int:
        """Outputs of the model."""
        return self.outputs or self.resolved.manifest.num_classes

    @property
    def new_head(self) -> bool | Literal["auto"]:
        """What becomes of the head of the weights it starts from, as in `initialize_weights`.

        Features want the whole of weights that have a head, and what there is of others.
        """
        if self.kind == "extract" and self.outputs is not None:
            return False
        return _HEADS.get(self.kind, "auto")

    @property
    def is_over(self) -> bool:
        """Whether the run, or this part of it, has ended before."""
        if self.resume_from is None:
            return False
        last_step = self.until_step or self.resolved.total_steps
        return self.resume_from.position.progress.is_over(last_step)


@contextmanager
def prepared_training(recipe: Recipe, kind: Kind) -> Iterator[PreparedRun]:
    """Check a training run and hold its lock inside the block.

    Raises:
        ValueError: the recipe cannot work, or another driver works on the run; nothing was started.
    """
    recipe = recipe.with_absolute_paths()
    resolved = resolve_run(recipe)
    check_head_is_trained(recipe, kind)
    if warning := averaging_warning(recipe, resolved.total_steps):
        logger.warning("%s", warning)
    # From before the checkpoints are looked at: another driver may be removing them.
    run_folder = locate(recipe.run_folder)
    run_folder.refuse_file_in_its_place("output")
    with lock_run(run_folder) as lock_number:
        damage: list[str] = []
        changes: list[str] = []
        training_id = None
        resume_from = find_resume_point(recipe, damage.append)
        if resume_from is None:
            check_weights(PreparedRun(resolved.recipe, kind, resolved))
            training_id = begin_without_checkpoint(run_folder, damage.append)
        else:
            begun = resume_from.position.recipe["data"]["shuffle_window"]
            if begun != resolved.recipe.data.shuffle_window:
                resolved = resolve_run(recipe, begun=begun)
            changes = accepted_changes(
                resolved.recipe,
                resume_from.position,
                fingerprint=resolved.manifest.fingerprint,
                num_images=resolved.num_images,
                total_steps=resolved.total_steps,
            )
        notes = [(EventKind.CHECKPOINT_DAMAGED, text) for text in damage]
        notes += [(EventKind.RECIPE_CHANGED, text) for text in changes]
        yield PreparedRun(
            resolved.recipe, kind, resolved, resume_from, tuple(notes), lock_number,
            training_id=training_id,
        )  # fmt: skip


def prepare_evaluation(recipe: Recipe) -> PreparedRun:
    """Check an evaluation, which is a run of its own: the training's record stays as it is.

    Raises:
        ValueError: no data set is given, or the weights are not there.
    """
    recipe = recipe.with_absolute_paths()
    recipe = recipe.with_changes(name=f"{recipe.name}-evaluation-{time.strftime('%Y%m%d-%H%M%S')}")
    resolved = resolve_run(recipe, needs_train=False)
    prepared = PreparedRun(resolved.recipe, "evaluate", resolved)
    if "eval" in resolved.streams:
        answers = answers_of(recipe, resolved.streams["eval"].manifest, resolved.manifest)
        prepared = replace(prepared, answers=answers, outputs=answers.num_outputs)
    check_weights(prepared)
    return prepared


def resolve_run(
    recipe: Recipe, *, needs_train: bool = True, begun: int | None = None
) -> ResolvedRun:
    """Open the data sets and check the recipe's arithmetic; starts nothing.

    Args:
        begun: the shuffle window of a run that is continued.

    Raises:
        ValueError: there is no such model, a data set is missing or broken, the batch does not
            divide, the run has no length, the classes of two sets differ, or a class has fewer
            images than shots.
    """
    check_model(recipe)
    manifest = _open_data(recipe, needs_train)
    recipe = with_window(recipe, manifest, begun)
    rows, held_out = select(
        manifest,
        seed=recipe.seed,
        held_out_fraction=recipe.data.held_out_fraction,
        fraction=recipe.data.fraction,
    )
    streams = {"train": _training_spec(recipe, manifest, None if rows.is_all else rows)}
    _add_evaluation(streams, recipe, manifest, held_out, needs_train)
    if needs_train and "eval" in streams:
        _check_classes("data.eval", streams["eval"].manifest, manifest)
    total_steps = 0
    if needs_train:
        check_batch(recipe, rows.count)
        total_steps = recipe.optim.total_steps(rows.count, recipe.train.global_batch_size)
    return ResolvedRun(recipe, manifest, streams, total_steps)


def _open_data(recipe: Recipe, needs_train: bool) -> Manifest:
    """What is trained on; for an evaluation that has none, what is evaluated on."""
    train = recipe.data.train
    if isinstance(train, tuple):
        return join([open_dataset(one.path) for one in train], [one.weight for one in train])
    path = train if needs_train or train else recipe.data.eval
    key = "data.train" if needs_train else "data.eval"
    return open_dataset(require(path, key, "the folder of a converted data set"))


def check_model(recipe: Recipe) -> None:
    """Check that there is such a model, before any data set is opened.

    Raises:
        ValueError: as `build_model`.
    """
    model = recipe.model
    spec, options = find_spec(model.name, model.options())
    try:
        checked_options(model.name, spec, options)
    except ValueError as error:
        raise ValueError(
            f"{error} What a base, or the recipe that is changed here, gives for another "
            "model.name is to be set to null"
        ) from None
    as_grid(model.image_size)
    if recipe.optim.layer_decay < 1.0 and isinstance(spec, PlainResNet | PlainAxialResNet):
        raise ValueError(
            f"optim.layer_decay={recipe.optim.layer_decay} goes by the blocks of a Transformer, "
            f"and model.name={model.name} has none; set it to 1"
        )
    check_frozen(recipe)


def check_frozen(recipe: Recipe) -> None:
    """Frozen parts are parts of the model, and others are left to train.

    Raises:
        ValueError: naming the parts that the model has.
    """
    parts = parts_of(recipe.model.name, recipe.model.options())
    try:
        chosen = chosen_parts(recipe.optim.frozen, parts)
    except ValueError as error:
        raise ValueError(f"optim.frozen: {error}") from None
    if chosen == set(parts):
        raise ValueError("optim.frozen names every part, so nothing is trained; leave one out")


def check_head_is_trained(recipe: Recipe, kind: Kind) -> None:
    """A head that starts anew, as a kernel of zeros, is not frozen.

    Raises:
        ValueError: it would give every image the same logits for ever.
    """
    starts_anew = recipe.init_from is None or kind in NEW_HEADS
    has_head = recipe.train.loss != "masked_patch"
    if has_head and starts_anew and "head" in recipe.optim.frozen:
        raise ValueError(
            "optim.frozen has head, and this run starts with a new one of zeros, which would never "
            "learn; leave head out of optim.frozen"
        )


def averaging_warning(recipe: Recipe, total_steps: int) -> str | None:
    """What to say of averaged weights that are still the first ones; None where they are not.

    They decide what a sweep chooses, when a run stops early, and what tables show.
    """
    train = recipe.train
    left = train.averaging**total_steps
    if not train.averaging or train.averaging_warmup or left <= MOST_OF_FIRST_WEIGHTS:
        return None
    return (
        f"train.averaging={train.averaging:g}: after {total_steps} steps the averaged weights are "
        f"{left:.1%} the weights that the run began with; set train.averaging_warmup=true, or a "
        "smaller train.averaging"
    )


def check_batch(recipe: Recipe, num_images: int) -> None:
    """The global batch divides among the workers of every allowed group size, and the data fill it.

    Raises:
        ValueError: with the arithmetic and the nearest valid value.
    """
    batch = recipe.train.global_batch_size
    for world_size in recipe.group_sizes:
        if batch % world_size:
            # Whole passes of the recipe's own size, or the next check would refuse it.
            fixed = recipe.train.micro_batch_size
            unit = world_size * (recipe.train.least_pass if fixed == "auto" else fixed)
            nearest = max(1, round(batch / unit)) * unit
            raise ValueError(
                f"train.global_batch_size={batch} does not divide among {world_size} workers "
                f"(workers.num_workers={recipe.workers.num_workers}): {batch} = "
                f"{batch // world_size} x {world_size} + {batch % world_size}; the nearest valid "
                f"train.global_batch_size is {nearest}"
            )
        micro_batch_size(recipe, world_size)
    if num_images < batch:
        raise ValueError(
            f"train.global_batch_size={batch} is more than the {num_images} training images; "
            f"use at most {num_images}"
        )


def check_cluster(recipe: Recipe, cluster: ClusterShape) -> bool:
    """The cluster can hold the workers and still feed them; returns whether workers get GPUs.

    It can where it may grow to it: the group then asks for its nodes, and waits for them.

    Raises:
        ValueError: more GPUs or CPUs are asked for than there are or may be, or whether there may
            be GPUs is not known.
    """
    workers = recipe.workers
    least = recipe.group_sizes[0]
    use_gpu = _uses_gpus(recipe, cluster)
    each = {"CPU": workers.cpus_per_worker, **({"GPU": 1.0} if use_gpu else {})}
    if use_gpu and cluster.most_gpus < least:
        raise ValueError(
            f"workers.num_workers={workers.num_workers} with a GPU each needs {least} GPUs; the "
            f"cluster has {cluster.most_gpus:g} ({cluster}). Lower workers.num_workers to at most "
            f"{cluster.most_gpus:g}, or set workers.use_gpu=false"
        )
    needed = least * workers.cpus_per_worker
    if cluster.most_cpus - needed < recipe.data.cpus_per_task:
        most = int((cluster.most_cpus - recipe.data.cpus_per_task) // workers.cpus_per_worker)
        raise ValueError(
            f"{least} workers with workers.cpus_per_worker={workers.cpus_per_worker:g} leave "
            f"{cluster.most_cpus - needed:g} of {cluster.most_cpus:g} CPUs for reading data, which "
            f"needs data.cpus_per_task={recipe.data.cpus_per_task:g} ({cluster}); use at most "
            f"{max(most, 0)} workers, or fewer CPUs for each"
        )
    now = {"CPU": cluster.num_cpus, "GPU": cluster.num_gpus}
    has_room = min(now[key] / need for key, need in each.items())
    if cluster.growth is not None and has_room < least and cluster.growth.holds(each) < least:
        held = " and ".join(f"{count:g} {key}" for key, count in each.items())
        raise ValueError(
            f"workers.num_workers={workers.num_workers} with {held} each find room for "
            f"{cluster.growth.holds(each):g} on the nodes that the cluster may start ({cluster}). "
            "Raise max_workers of a node type, or lower workers.num_workers or "
            "workers.cpus_per_worker"
        )
    return use_gpu


def _uses_gpus(recipe: Recipe, cluster: ClusterShape) -> bool:
    if recipe.workers.use_gpu != "auto":
        return recipe.workers.use_gpu
    if cluster.num_gpus == 0 and math.isinf(cluster.most_gpus):
        raise ValueError(
            "workers.use_gpu=auto: no node with a GPU is up, and whether the cluster's autoscaler "
            "may start one is not known here; set workers.use_gpu=true, or false to train on CPUs"
        )
    return cluster.most_gpus > 0


def find_resume_point(
    recipe: Recipe, tell: Callable[[str], None] = logger.warning
) -> Checkpoint | None:
    """The checkpoint that a run of this name goes on from, as `resume` allows.

    Args:
        tell: called with a text for each damaged one that is passed over.

    Raises:
        ValueError: a run of this name exists and may not be continued, or should exist and does
            not, or was of another model, data set, seed or batch; or it has had checkpoints,
            none of which can be used.
    """
    folder = locate(recipe.run_folder)
    if recipe.resume is False and _holds_a_run(folder):
        newest = newest_checkpoint(folder)
        raise ValueError(
            f"resume=false, but a run {recipe.name!r} exists in {recipe.output} (step "
            f"{newest.position.step if newest else 0}); choose another name, or set resume=auto "
            "to continue it"
        )
    try:
        checkpoint = newest_verified_checkpoint(folder, tell)
    except NoUsableCheckpointError as error:
        if recipe.resume != "from_zero":
            raise
        tell(str(error))
        checkpoint = None
    if checkpoint is None and recipe.resume is True:
        raise ValueError(
            f"resume=true, but {recipe.output}/{recipe.name} holds no checkpoint; check name "
            "and output, or set resume=auto"
        )
    return checkpoint


def _holds_a_run(folder: Location) -> bool:
    return any(not is_lock_file(info.base_name) for info in folder.list_files())


def check_weights(prepared: PreparedRun) -> None:
    """What `init_from` names is there and fits the model, by names and shapes.

    Raises:
        ValueError: there is nothing, no checkpoint in it is good, or the tensors that are missing,
            unexpected or of another shape.
    """
    recipe = prepared.recipe
    if recipe.init_from is None:
        return
    from vit_ray.checkpoints.init_weights import meta_state_of, planned_load  # with torch: seconds

    model, told = recipe.model, (prepared.new_head, recipe.init_resize)
    with errors_of_weights():
        report = planned_load(model, prepared.num_classes, recipe.init_from, *told)
        trained = meta_state_of(recipe.init_from).sides or _trained_sides(model.sides, report.grids)
    if trained not in (None, model.sides) and not prepared.trains:
        _warn_of_resolution(model, trained, is_resized=bool(report.resized))


@contextmanager
def errors_of_weights() -> Iterator[None]:
    """Errors in the block name the key that they are about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"init_from: {error}") from None


def _trained_sides(sides: Grid, grids: tuple[Grid, Grid] | None) -> Grid | None:
    """Pixels of the images that weights of another grid were trained on; None: of the same."""
    if grids is None:
        return None
    (rows, columns), (own_rows, own_columns) = grids
    return sides[0] * rows // own_rows, sides[1] * columns // own_columns


def _warn_of_resolution(model: ModelConfig, trained: Grid, *, is_resized: bool) -> None:
    if is_resized:
        what = "their positions are resized to"
    elif model.positions == "sincos_2d":
        what = "their positions, which are not learned, are computed for"
    else:
        what = "they have no positions, and are used as they are at"
    logger.warning(
        "init_from: the weights are of %d x %d pixels, and %s model.image_size=%s; set "
        "model.image_size=%s for their own resolution",
        *trained,
        what,
        list(model.sides),
        list(trained),
    )


def _add_evaluation(
    streams: dict[str, StreamSpec],
    recipe: Recipe,
    manifest: Manifest,
    held_out: Selection | None,
    needs_train: bool,
) -> None:
    augment = recipe.data.eval_augment
    if recipe.data.eval is not None:
        streams["eval"] = _spec(recipe, open_dataset(recipe.data.eval), augment, None)
        if held_out is not None and recipe.chooses_on_dev and needs_train:
            streams["dev"] = _spec(recipe, manifest, augment, held_out)
    elif held_out is not None:
        streams["eval"] = _spec(recipe, manifest, augment, held_out)
    for key in ("few_shot_train", "few_shot_test"):
        path = getattr(recipe.evaluate, key)
        if path is not None:
            streams[key] = _spec(recipe, open_dataset(path), augment, None)
    if "few_shot_test" in streams:
        train, test = (streams[f"few_shot_{part}"].manifest for part in ("train", "test"))
        _check_classes("evaluate.few_shot_test", test, train)
        _check_shots(train.path, train.fingerprint, recipe.evaluate.shots)


@lru_cache(maxsize=4)
def _check_shots(path: str, fingerprint: str, shots: tuple[int, ...]) -> None:
    """Read labels until every class has its examples; once for all trials of a sweep."""
    manifest = open_dataset(path)
    examples = np.zeros(manifest.num_classes, np.int64)
    for labels in first_labels(manifest):
        examples += np.bincount(labels[labels >= 0], minlength=len(examples))
        if examples.min() >= max(shots):
            return
        if examples.sum() > MOST_LABELS_READ:
            logger.warning(
                "evaluate.few_shot_train: of %d images the first %d were looked at, and %d of %d "
                "classes have fewer than %d there; whether they have them at all shows at the "
                "first evaluation",
                manifest.num_images,
                examples.sum(),
                (examples < max(shots)).sum(),
                len(examples),
                max(shots),
            )
            return
    require_shots(examples, shots=shots, classes=manifest.classes)


def _check_classes(key: str, one: Manifest, other: Manifest) -> None:
    if one.classes != other.classes:
        raise ValueError(
            f"{key}: {one.path} has {one.num_classes} classes and {other.path} has "
            f"{other.num_classes}, and they are not the same; convert both with one list of classes"
        )


def _spec(
    recipe: Recipe,
    manifest: Manifest,
    augment: AugmentConfig | EvalAugmentConfig,
    rows: Selection | None,
) -> StreamSpec:
    return StreamSpec(
        manifest,
        augmentation_of(recipe, augment),
        seed=recipe.seed,
        rows=rows,
        max_bad_fraction=recipe.data.max_bad_fraction,
        num_cpus=recipe.data.cpus_per_task,
        concurrency=recipe.data.max_tasks,
        cache_mib=recipe.data.task_memory_mib,
        decode=recipe.data.decode,
        object_store_mib=recipe.data.object_store_mib,
        cache=_cache(recipe),
    )


def _cache(recipe: Recipe) -> LocalCache | None:
    folder = recipe.data.cache_dir
    return None if folder is None else LocalCache(folder, int(recipe.data.cache_gib * 2**30))


def _training_spec(recipe: Recipe, manifest: Manifest, rows: Selection | None) -> StreamSpec:
    spec = _spec(recipe, manifest, recipe.data.augment, rows)
    window = shuffle_window(recipe, manifest)
    if window is None or window.num_batches == 1:
        return replace(spec, window=window)
    return replace(spec, window=window, task_rows=max(spec.task_rows, window.num_rows))


def augmentation_of(recipe: Recipe, augment: AugmentConfig | EvalAugmentConfig) -> Augmentation:
    """How images of the recipe's model are cut, for training or for evaluation."""
    cut = Augmentation(
        kind=augment.kind,
        size=recipe.model.image_size,
        flip=False,
        resize=augment.resize or _default_resize(recipe),
    )
    if isinstance(augment, EvalAugmentConfig):
        return replace(cut, border=augment.border)
    operations = augment.randaugment and RandAugment(
        augment.randaugment,
        augment.randaugment_layers,
        augment.randaugment_magnitude,
        augment.randaugment_magnitude_std,
    )
    return replace(
        cut,
        flip=augment.flip,
        min_area=augment.min_area,
        max_area=augment.max_area,
        randaugment=operations,
    )


def _default_resize(recipe: Recipe) -> int:
    """256 for a crop of 224, and in proportion for others (448 for 384 in BiT is set by recipe)."""
    size = recipe.model.image_size
    longest = size if isinstance(size, int) else max(size)
    return round(longest * 8 / 7)
