"""`vit-ray fork RUN step=k name=NEW key=value ...`: a new run from a checkpoint, with changes.

The checkpoint is copied, so that parent and fork can be trained, pruned and deleted independently.
The fork's recipe is written as a file; train it with `vit-ray pretrain`, like any run.
"""

import copy
import math
import sys
from bisect import bisect
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from vit_ray.checkpoints.checkpoint import (
    Position,
    copy_checkpoint,
    folder_name,
    read_checkpoint,
)
from vit_ray.checkpoints.checkpoint_format import is_committed
from vit_ray.checkpoints.run_checkpoints import begin_training, list_checkpoints
from vit_ray.config import Recipe
from vit_ray.config.branch_origin import NOTE, origin_of
from vit_ray.config.loading import changed, write_yaml
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.config.resume_compatibility import (
    DATA_SET,
    LENGTH,
    Change,
    incompatible_changes,
)
from vit_ray.data import open_dataset
from vit_ray.data.partition import divisors
from vit_ray.launch.inputs.shuffle_window import shuffle_window
from vit_ray.launch.inputs.streams import ResolvedRun, resolve_run
from vit_ray.launch.named_run import named_folder
from vit_ray.launch.run_lock import lock_run
from vit_ray.lock import is_lock_file
from vit_ray.measure.best_evaluation import without_best
from vit_ray.metric_names import DEV_GROUP, EVAL_GROUP, FEW_SHOT_GROUP
from vit_ray.storage import Location, locate

_OF_TENSORS: Final = (
    "optim.name", "optim.frozen", "train.loss", "train.masked_target",
)  # fmt: skip
_WITHOUT_TENSORS: Final = ("model.dropout", "model.stochastic_depth")
"""Keys of the model that no tensor depends on."""
_MEASURED: Final = (EVAL_GROUP, DEV_GROUP, FEW_SHOT_GROUP)
"""Prefixes of an evaluation's metrics."""


def fork_run(source: str, words: Sequence[str], is_dry: bool) -> int:
    """Make the fork, and print how to train it.

    Repeating an interrupted command completes the fork.

    Args:
        source: folder of the parent's checkpoints, or its id in MLflow.
        words: `step=k` of a checkpoint, `name=NEW`, and the changes of the recipe.
        is_dry: print what would be done, and write nothing.

    Raises:
        ValueError: there is no such checkpoint, a change is not possible, the name is taken, or the
            recipe or its data set is wrong.
        DamagedCheckpointError: the checkpoint is not what was written.
    """
    asked = {key: value for key, _, value in (word.partition("=") for word in words)}
    if not asked.get("step", "").isdecimal() or not asked.get("name"):
        raise ValueError(
            "a fork needs a step and a name; give the step of a checkpoint and a new name, such as "
            "step=1000 name=lower-rate"
        )
    step, changes = int(asked["step"]), [w for w in words if w.partition("=")[0] != "step"]
    parent, position = _parent(source, step, changes)
    before = recipe_from_dict(position.recipe, where=f"the recipe of {source}")
    tree = changed({**copy.deepcopy(position.recipe), "resume": "auto"}, changes)
    recipe = recipe_from_dict(tree, where="the fork").with_absolute_paths()
    resolved = resolve_run(recipe)
    kept = _checked_changes(before, resolved, position, asked.keys())
    _check_classes(parent, before, resolved, position)
    own_step = _own_step(before, resolved, position)
    if resolved.total_steps <= own_step:
        key = "epochs" if recipe.optim.epochs else "steps"
        raise ValueError(
            f"the fork would end after {resolved.total_steps} steps, and the checkpoint is at step "
            f"{own_step}; give a larger optim.{key}"
        )
    folder, file = locate(recipe.run_folder), Path(f"{recipe.name}.yaml")
    text = write_yaml(resolved.recipe.written())
    origin = origin_of(before.name, step, own_step)
    if file.exists() and file.read_text() != text:
        raise ValueError(f"name={recipe.name}: {file} exists already; give another name")
    if not _is_free(folder, origin, own_step):
        raise ValueError(f"name={recipe.name}: {folder.uri} exists already; give another name")
    size = sum(one.size or 0 for one in parent.list_files())
    print(
        f"{recipe.name}: from {origin} to step {resolved.total_steps}; "
        f"{'; '.join(map(str, kept)) or 'nothing else changes the training'}"
    )
    print(f"copies {size / 2**20:,.1f} MiB to {folder.uri}", file=sys.stderr, flush=True)
    if is_dry:
        return 0
    file.write_text(text)
    with lock_run(folder):
        target = folder.child(folder_name(own_step))
        if not is_committed(target):
            begin_training(folder)
            folder.child(NOTE).write(origin.encode())
            copy_checkpoint(parent, target, lambda it: _of_fork(it, resolved, own_step))
    print(f"wrote {file}; train it with: vit-ray pretrain {file} (or finetune, as its parent)")
    return 0


def _is_free(folder: Location, origin: str, step: int) -> bool:
    """Whether the folder is empty, or holds the beginning of this same fork."""
    files = [one.base_name for one in folder.list_files(recursive=False)]
    steps = [number for number, _ in list_checkpoints(folder)]
    if all(map(is_lock_file, files)) and not steps:
        return True
    note = folder.child(NOTE)
    return note.exists() and note.read().decode() == origin and set(steps) <= {step}


def _parent(source: str, step: int, changes: Sequence[str]) -> tuple[Location, Position]:
    """The checkpoint's folder and position."""
    source, run_folder = named_folder(source, changes)
    if not run_folder.exists():
        raise ValueError(f"{source}: no such run; give the folder of its checkpoints, or its id")
    if run_folder.info().kind == "file":
        raise ValueError(
            f"{source} is a file; give the folder of the run's checkpoints, or its id in MLflow"
        )
    whole = [number for number, one in list_checkpoints(run_folder) if is_committed(one)]
    folder = run_folder.child(folder_name(step))
    if step not in whole:
        steps = ", ".join(map(str, sorted(whole))) or "none"
        raise ValueError(
            f"step={step}: {source} has no complete checkpoint of this step; it has those of steps "
            f"{steps}; give one of them (checkpoint.keep_steps keeps more of a run)"
        )
    return folder, read_checkpoint(folder).position


def _checked_changes(
    before: Recipe, resolved: ResolvedRun, position: Position, given: Collection[str]
) -> list[Change]:
    """What changes the training, as text.

    Args:
        given: the keys of the command line.

    Raises:
        ValueError: the fork cannot continue with a change, or would train nothing.
    """
    recipe = resolved.recipe
    flat, now = before.flat(), recipe.flat()
    flat[DATA_SET], now[DATA_SET] = position.data_fingerprint, resolved.manifest.fingerprint
    found = incompatible_changes(flat, now, without=LENGTH)
    found += [Change(key, flat[key], now[key]) for key in LENGTH if flat[key] != now[key]]
    for change in found:
        of_model = change.key.startswith("model.") and change.key not in _WITHOUT_TENSORS
        if of_model or change.key in _OF_TENSORS:
            raise ValueError(
                f"{change}: the tensors of the checkpoint do not fit; start a new run with "
                "init_from, which loads the weights that fit"
            )
    if flat[DATA_SET] != now[DATA_SET] and "data.train" not in given:
        raise ValueError(
            f"{resolved.manifest.path} is no longer the data set of {before.name} (its "
            "fingerprint differs); give data.train=PATH to continue on it anyway"
        )
    held_out = recipe.data.held_out_fraction
    is_other = recipe.seed != before.seed or flat[DATA_SET] != now[DATA_SET]
    if held_out > before.data.held_out_fraction or (held_out and is_other):
        raise ValueError(
            f"data.held_out_fraction={held_out:g} with another seed, data set or size would hold "
            "out images that the parent has trained on; evaluate on a separate set (data.eval, "
            "data.held_out_fraction=0)"
        )
    return found


def _own_step(before: Recipe, resolved: ResolvedRun, position: Position) -> int:
    """The step at which the fork's batches have covered what the parent has read.

    Raises:
        ValueError: with another batch size there is no such step, and images would be read twice or
            skipped.
    """
    then, size = position.global_batch_size, resolved.recipe.train.global_batch_size
    if size == then:
        return position.step
    seen, key = position.samples_seen, f"train.global_batch_size={size}"
    if seen % size:
        sizes = divisors(seen)
        nearest = sizes[max(0, bisect(sizes, size) - 1) :][:2]
        raise ValueError(
            f"{key}: the parent has read {seen:,} images, which is not a whole number of these "
            f"batches; the nearest sizes that divide it: {', '.join(map(str, nearest))}"
        )
    assert before.data.shuffle_window != "auto"
    windows = (
        shuffle_window(before.data.shuffle_window, then),
        resolved.streams["train"].window,
    )
    period = math.lcm(*(window.num_rows for window in windows if window))
    if seen % period:
        steps = math.lcm(period, then, size) // then
        raise ValueError(
            f"{key}: step {position.step} is inside a shuffle window, which another batch size "
            f"deals out differently; fork at a step that is a multiple of {steps}"
        )
    return seen // size


def _check_classes(
    parent: Location, before: Recipe, resolved: ResolvedRun, position: Position
) -> None:
    """Refuse a data set with other classes than the head."""
    manifest, key = resolved.manifest, f"data.train={resolved.manifest.path}"
    if manifest.fingerprint == position.data_fingerprint:
        return
    from vit_ray.checkpoints.init_weights import meta_state_of  # with torch: seconds

    trained = meta_state_of(parent.uri).num_classes
    if trained is not None and trained != manifest.num_classes:
        raise ValueError(
            f"{key} has {manifest.num_classes} classes, and the head of the checkpoint {trained}; "
            "start a new run with init_from"
        )
    try:
        names = open_dataset(str(before.data.train)).classes
    except (ValueError, OSError):  # the parent's set may no longer be there
        return
    if names != manifest.classes:
        raise ValueError(
            f"{key} has other class names than {before.data.train}; start a new run with init_from"
        )


def _of_fork(position: Position, resolved: ResolvedRun, step: int) -> Position:
    """The parent's position as the fork's own, without the parent's measurements."""
    plain, recipe = without_best(position.progress.metrics), resolved.recipe
    progress = replace(
        position.progress,
        step=step,
        ended="",
        evaluation_due=False,
        nonfinite_steps=0,
        train_seconds=0.0,
        worker_seconds=0.0,
        seconds={},
        until_s=0.0,
        best_eval_loss=None,
        evals_without_best=0,
        num_evals=0,
        eval_step=-1,
        samples_digest="",  # of the parent's order
        metrics={key: value for key, value in plain.items() if not key.startswith(_MEASURED)},
    )
    return replace(
        position,
        progress=progress,
        global_batch_size=recipe.train.global_batch_size,
        recipe=recipe.recorded(),
        data_fingerprint=resolved.manifest.fingerprint,
        data_terms=resolved.manifest.about,
        tracking_run_id=None,
    )
