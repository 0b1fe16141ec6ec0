"""Features of a data set from all workers: from recipe to a folder of parquet files."""

import time
from dataclasses import dataclass, replace
from typing import Any, Final

from vit_ray.config import Recipe, require
from vit_ray.config.validation import errors_of
from vit_ray.evaluate.feature_files import FACTS_FILE, read_facts, whole_parts, write_facts
from vit_ray.launch.inputs.streams import resolve_run
from vit_ray.launch.pool.pool_training import RunFailedError
from vit_ray.launch.prepared_run import PreparedRun, check_weights
from vit_ray.launch.record.open_record import OpenRun
from vit_ray.launch.run import check_start, run_prepared
from vit_ray.launch.run_lock import lock_run
from vit_ray.metric_names import (
    EXTRACT_FILE_WAIT_FRACTION,
    EXTRACT_IMAGE_WAIT_FRACTION,
    EXTRACT_IMAGES_PER_S,
)
from vit_ray.storage import Location, check_rights, locate
from vit_ray.worker.job import Extraction

ROWS_PER_FILE: Final = 16384
"""Images per file of one worker, approximately; an interrupted extraction continues after complete
files."""
SPEED: Final = (EXTRACT_IMAGES_PER_S, EXTRACT_IMAGE_WAIT_FRACTION, EXTRACT_FILE_WAIT_FRACTION)
"""Metrics of the last attempt that are kept with the features."""
_OF_TRAINING: Final = {"dropout", "stochastic_depth", "head_bias"}
"""Keys of `model` that features do not depend on."""


@dataclass(frozen=True)
class Features:
    """The features that an extraction writes or has written."""

    folder: Location
    prepared: PreparedRun
    facts: dict[str, Any]
    """The settings that decide the features' values."""

    def are_whole(self) -> bool:
        """Whether all files are there.

        Raises:
            ValueError: the folder has features from other settings.
        """
        folder, before = self.folder, read_facts(self.folder)
        if before is None:
            if whole_parts(folder)[:2] != ([], []):
                raise ValueError(
                    f"extract.path: {folder.uri} holds features without {FACTS_FILE}, so their "
                    "origin is unknown; choose another folder"
                )
            return False
        if changed := [key for key, value in self.facts.items() if before.get(key) != value]:
            both = "; ".join(
                f"{key}: {before.get(key)} there, {self.facts[key]} here" for key in changed
            )
            raise ValueError(
                f"extract.path: {folder.uri} holds features with other settings ({both}); choose "
                "another folder"
            )
        return bool(before.get("is_complete"))


def extract_features(recipe: Recipe, parent: OpenRun | None = None) -> Location:
    """Write features of `extract.data` with the weights of `init_from`; returns their folder.

    An interrupted extraction continues after the files that it has written, and a finished one is
    not repeated.

    Raises:
        ValueError: the recipe cannot work, the folder holds features with other settings, or
            another process writes features there; nothing was started.
        RunStoppedError: it was stopped on request; the same command continues it.
    """
    features = plan_extraction(recipe)
    folder, facts = features.folder, features.facts
    if features.are_whole():
        return folder
    if not folder.is_local:
        check_rights(folder)
    written, is_child = ("extract.path", folder.uri), parent is not None
    check_start(features.prepared.recipe, written, trains=False, is_child=is_child)
    with lock_run(folder, what=f"extract.path: {folder.uri}"):
        if not features.are_whole():  # another process may have finished it before the lock
            write_facts(folder, facts)
            result = run_prepared(features.prepared, parent=parent)
            files, _, end = whole_parts(folder)
            if end < facts["num_images"]:
                raise RunFailedError(
                    f"the workers have ended, and {folder.uri} holds files of {end} of "
                    f"{facts['num_images']} images; run the same command again"
                )
            speed = {key: result.metrics[key] for key in SPEED if key in result.metrics}
            write_facts(folder, {**facts, "is_complete": True, "files": files, "speed": speed})
    return folder


def plan_extraction(recipe: Recipe) -> Features:
    """Check an extraction, except for the contents of its folder; starts nothing.

    Raises:
        ValueError: the recipe cannot work.
    """
    # They import torch, which takes seconds.
    from vit_ray.checkpoints.init_weights import meta_state_of
    from vit_ray.checkpoints.run_checkpoints import find_weights
    from vit_ray.checkpoints.weight_files import find_weight_file

    recipe = recipe.with_absolute_paths()
    hint = "extract.data and extract.path, such as extract='{data: data/train, path: features/}'"
    config = require(recipe.extract, "extract", hint)
    whose = "the run, checkpoint or file whose features to take"
    source = require(recipe.init_from, "init_from", whose)
    folder = locate(config.path)
    folder.refuse_file_in_its_place("extract.path")
    recipe = recipe.with_changes(
        name=f"{recipe.name}-features-{time.strftime('%Y%m%d-%H%M%S')}",
        data={"train": None, "eval": config.data, "held_out_fraction": 0.0, "fraction": 1.0},
        evaluate={"few_shot_train": None, "few_shot_test": None},
    )
    resolved = resolve_run(recipe, needs_train=False)
    spec = replace(resolved.streams["eval"], gives_keys=True)
    with errors_of("init_from"):
        outputs = meta_state_of(source).num_classes  # None without a head
    with_logits = config.logits and outputs is not None
    prepared = PreparedRun(
        "extract",
        replace(resolved, streams={"train": spec, "eval": spec}),
        outputs=outputs,
        extraction=Extraction(config.path, with_logits, ROWS_PER_FILE),
    )
    check_weights(prepared)
    # The version of the weights: for a run the step of its checkpoint, for a file its size and
    # time.
    if (file := find_weight_file(source)) is None:
        weights = f"step {find_weights(source).position.step}"
    else:
        weights = f"{file.info().size} bytes of {file.info().mtime_ns}"
    facts = {
        "data_fingerprint": resolved.manifest.fingerprint,
        "num_images": resolved.manifest.num_images,
        "init_from": source,
        "init_resize": recipe.init_resize,
        "weights": weights,
        "model": recipe.model.model_dump(mode="json", exclude=_OF_TRAINING),
        "eval_augment": recipe.data.eval_augment.model_dump(mode="json"),
        "precision": recipe.train.precision,
        "with_logits": with_logits,
    }
    return Features(folder, prepared, facts)
