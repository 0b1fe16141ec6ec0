"""A run that has passed every check that needs no cluster, and holds the lock of its folder."""

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Literal

import numpy as np

from vit_ray.checkpoints.checkpoint import Checkpoint
from vit_ray.checkpoints.run_checkpoints import begin_training
from vit_ray.config import Recipe, require
from vit_ray.config.schema import errors_of
from vit_ray.data import open_dataset
from vit_ray.data.dataset import Manifest
from vit_ray.data.shards import all_first_labels, keys
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
from vit_ray.launch.named_run import accepted_changes, find_resume_point
from vit_ray.launch.resolved_run import (
    NEW_HEADS,
    Kind,
    ResolvedRun,
    check_head_is_trained,
    resolve_run,
)
from vit_ray.lock import hold_lock
from vit_ray.outcomes import EventKind
from vit_ray.storage import RIGHTS_PROBE, Location, check_reachable, locate

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedRun:
    """A checked run before it starts.

    Attributes:
        resume_from: the newest valid checkpoint of a run of this name.
        notes: kind and text of the events of the run's start, for its history.
        lock_number: shows workers that this driver still holds the run; None for an evaluation.
        answers: of an evaluation: the correct answers for its images.
        training_id: of a training that starts at step 0, which does not continue an earlier record.
    """

    kind: Kind
    resolved: ResolvedRun
    resume_from: Checkpoint | None = None
    notes: tuple[tuple[EventKind, str], ...] = ()
    lock_number: int | None = None
    answers: Answers | None = None
    training_id: str | None = None

    @property
    def recipe(self) -> Recipe:
        """With absolute paths, and a fixed order of the data."""
        return self.resolved.recipe

    @property
    def trains(self) -> bool:
        """Whether weights are trained, not only used."""
        return self.kind != "evaluate"

    @property
    def num_classes(self) -> int:
        """Outputs of the model."""
        return self.answers.num_outputs if self.answers else self.resolved.manifest.num_classes

    @property
    def num_eval_images(self) -> int:
        """Images of the test set that have an answer and so count; 0 without a test set."""
        if "eval" not in self.resolved.streams:
            return 0
        test = self.resolved.streams["eval"]
        if not self.answers or self.recipe.benchmark.kind not in ("imagenet_real", "objectnet"):
            return test.num_images
        labels_n1 = all_first_labels(test.manifest.path)[:, None]
        answers_nl = self.answers.of_batch(labels_n1, np.arange(len(labels_n1)))
        return int((answers_nl >= 0).any(axis=1).sum())

    @property
    def new_head(self) -> bool | Literal["auto"]:
        """What happens to the head of its initial weights, as in `SavedWeights`."""
        if not self.trains:
            return False
        return True if self.kind in NEW_HEADS else "auto"

    @property
    def is_over(self) -> bool:
        """Whether the run had ended before."""
        total_steps = self.resolved.total_steps
        return bool(self.resume_from and self.resume_from.position.progress.is_over(total_steps))


@contextlib.contextmanager
def prepared_training(
    recipe: Recipe,
    kind: Kind,
    check_cluster: Callable[[Recipe], object] = lambda _: None,
) -> Iterator[PreparedRun]:
    """Check a training run, and hold the run's lock inside the block.

    Args:
        check_cluster: raises ValueError if a run cannot start on the cluster; called last, before
            the folder of a new run is created.

    Raises:
        ValueError: the recipe cannot work, or another driver works on the run; nothing was started.
    """
    recipe = recipe.with_absolute_paths()
    resolved = resolve_run(recipe)
    check_head_is_trained(recipe, kind)
    run_folder = locate(recipe.run_folder)
    run_folder.refuse_file_in_its_place("output")
    if not run_folder.is_local:
        check_rights(run_folder)
    prepared = PreparedRun(kind, resolved)
    is_new = not run_folder.exists()
    if is_new:  # checked before the lock creates a folder: a refused recipe leaves none
        find_resume_point(recipe)
        check_weights(prepared)
        check_cluster(prepared.recipe)
    # Locked before checkpoints are read: another driver may be removing them.
    with lock_run(run_folder) as lock_number:
        notes: list[tuple[EventKind, str]] = []
        newest = find_resume_point(
            recipe, lambda text: notes.append((EventKind.CHECKPOINT_DAMAGED, text))
        )
        if newest is not None:
            window = newest.position.recipe["data"]["shuffle_window"]
            if window != resolved.recipe.data.shuffle_window:
                resolved = resolve_run(recipe, begun=window)
            changes = accepted_changes(resolved, newest.position)
            notes += [(EventKind.RECIPE_CHANGED, text) for text in changes]
        prepared = PreparedRun(kind, resolved, newest, tuple(notes), lock_number)
        if newest is None:
            if not is_new:
                check_weights(prepared)
                check_cluster(prepared.recipe)
            prepared = replace(prepared, training_id=begin_training(run_folder))
        elif not prepared.is_over:
            check_cluster(prepared.recipe.with_changes(init_from=None))
        yield prepared


def check_rights(folder: Location) -> None:
    """Write, list, read and delete a small file in a run's folder; after an error it may stay.

    Raises:
        OSError: the store refuses it, cannot be reached, or has no such bucket.
    """
    check_reachable(folder)
    probe = folder.child(RIGHTS_PROBE)
    probe.write(b"vit_ray")
    names = [info.base_name for info in folder.list_files(recursive=False)]
    if probe.read() != b"vit_ray" or RIGHTS_PROBE not in names:
        raise OSError(f"{probe.uri} was written, and is not there; check the storage")
    probe.delete()


def prepare_evaluation(recipe: Recipe) -> PreparedRun:
    """Check an evaluation, which has a record of its own.

    Raises:
        ValueError: no data set to measure on is given, or the weights are not there.
    """
    recipe.check_measures()
    recipe = recipe.with_absolute_paths()
    recipe = recipe.with_changes(name=f"{recipe.name}-evaluation-{time.strftime('%Y%m%d-%H%M%S')}")
    resolved = resolve_run(recipe, needs_train=False)
    answers = None
    if "eval" in resolved.streams:
        answers = answers_of(recipe, resolved.streams["eval"].manifest, resolved.manifest)
    prepared = PreparedRun("evaluate", resolved, answers=answers)
    check_weights(prepared)
    return prepared


def check_weights(prepared: PreparedRun) -> None:
    """Check that the names and shapes of the weights in `init_from` fit the model.

    Raises:
        ValueError: there are no weights, no valid checkpoint is among them, or tensors are missing,
            unexpected or of another shape.
    """
    recipe = prepared.recipe
    if recipe.init_from is None:
        return
    from vit_ray.checkpoints.init_weights import planned_load  # with torch: seconds

    with errors_of("init_from"):
        planned_load(recipe.model, prepared.num_classes, recipe.init_from, prepared.new_head)


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


def lock_run(folder: Location) -> contextlib.AbstractContextManager[int]:
    """Hold the run's lock inside the block; yields the token for `check_lock`.

    The process ends if another driver takes the run nevertheless.

    Raises:
        HeldError: another driver holds it.
        OSError: the folder cannot be written.
    """
    return hold_lock(folder, _end_process)


def _end_process(reason: str) -> None:
    # Two drivers of one run would mix their checkpoints. Ray ends this driver's workers.
    print(f"error: {reason}; this driver ends", file=sys.stderr, flush=True)
    os._exit(1)
