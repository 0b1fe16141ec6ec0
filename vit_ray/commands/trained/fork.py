"""`vit-ray fork RUN step=k name=NEW key=value ...`: a new run from a checkpoint, with changes.

The checkpoint is copied, so that parent and fork can be trained, pruned and deleted without each
other. The fork's recipe is written as a file; training it is `vit-ray pretrain`, as of any run.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import yaml

from vit_ray.checkpoints.checkpoint import Position, copy_checkpoint, folder_name, open_checkpoint
from vit_ray.checkpoints.checkpoint_format import is_committed
from vit_ray.checkpoints.run_checkpoints import begin_without_checkpoint, list_checkpoints
from vit_ray.config import Recipe
from vit_ray.config.branch_origin import NOTE, origin_of
from vit_ray.config.loading import changed
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.config.resume_compatibility import LENGTH, Change, incompatible_changes
from vit_ray.launch.inputs.streams import ResolvedRun, resolve_run
from vit_ray.launch.named_run import named_folder
from vit_ray.launch.run_lock import lock_run
from vit_ray.lock import is_lock_file
from vit_ray.measure.best_evaluation import without_best
from vit_ray.storage import Location, locate

_OF_TENSORS: Final = ("model", "optim.name", "optim.frozen", "train.loss", "train.masked_target")
"""With another value a checkpoint's tensors mean nothing."""
_OF_PLACE: Final = "train.global_batch_size"
"""With another value step k is another place in the data."""


def fork_run(source: str, words: Sequence[str], is_dry: bool) -> int:
    """Make the fork, and print how to train it.

    Args:
        source: folder of the parent's checkpoints, or its id in MLflow.
        words: `step=k` of a checkpoint, `name=NEW`, and the changes of the recipe.
        is_dry: say what would be done, and write nothing.

    Raises:
        ValueError: there is no such checkpoint, a change is not possible, the name is taken, or the
            recipe or its data set are wrong.
        DamagedCheckpointError: the checkpoint is not what was written.
    """
    asked = {key: value for key, _, value in (word.partition("=") for word in words)}
    if not asked.get("step", "").isdecimal() or not asked.get("name"):
        raise ValueError("give the checkpoint and a name, such as step=1000 name=lower-rate")
    step, changes = int(asked["step"]), [w for w in words if w.partition("=")[0] != "step"]
    parent, position = _parent(source, step, changes)
    before = recipe_from_dict(position.recipe, where=f"the recipe of {source}")
    tree = changed(copy.deepcopy(position.recipe), changes)
    tree["tracking"]["parent_run_id"] = None
    recipe = recipe_from_dict(tree, where="the fork").with_absolute_paths()
    resolved = resolve_run(recipe)
    kept = _checked_changes(before, resolved, position)
    folder, file = locate(recipe.run_folder), Path(f"{recipe.name}.yaml")
    if file.exists() or not all(is_lock_file(one.base_name) for one in folder.list_files()):
        raise ValueError(
            f"name={recipe.name}: {file if file.exists() else folder.uri} is there already; give "
            "another name"
        )
    size = sum(one.size or 0 for one in parent.list_files())
    print(
        f"{recipe.name}: from step {step} of {before.name} to step {resolved.total_steps}, with "
        f"{'; '.join(map(str, kept)) or 'no change that decides'}"
    )
    print(f"copies {size / 2**20:,.1f} MiB to {folder.uri}", file=sys.stderr, flush=True)
    if is_dry:
        return 0
    with lock_run(folder):
        begin_without_checkpoint(folder, lambda text: print(text, file=sys.stderr))
        folder.child(NOTE).write(origin_of(before.name, step).encode())
        copy_checkpoint(parent, folder.child(folder_name(step)), lambda it: _of_fork(it, resolved))
    file.write_text(yaml.safe_dump(resolved.recipe.recorded(), sort_keys=False))
    command = "finetune" if recipe.init_from else "pretrain"
    print(f"wrote {file}; train it with: vit-ray {command} {file}")
    return 0


def _parent(source: str, step: int, changes: Sequence[str]) -> tuple[Location, Position]:
    """The checkpoint's folder and position."""
    source, run_folder = named_folder(source, changes)
    whole = [number for number, one in list_checkpoints(run_folder) if is_committed(one)]
    folder = run_folder.child(folder_name(step))
    checkpoint = open_checkpoint(folder) if step in whole else None
    if checkpoint is None:
        steps = ", ".join(map(str, sorted(whole))) or "none"
        raise ValueError(
            f"step={step}: {source} has no whole checkpoint of this step; it has those of steps "
            f"{steps}. checkpoint.keep_steps keeps more of a run"
        )
    return folder, checkpoint.position


def _checked_changes(before: Recipe, resolved: ResolvedRun, position: Position) -> list[Change]:
    """What decides and is new in the fork.

    Raises:
        ValueError: it cannot go on with that, or would train nothing.
    """
    flat, now = before.flat(), resolved.recipe.flat()
    found = incompatible_changes(flat, now, without=LENGTH)
    found += [Change(key, flat[key], now[key]) for key in LENGTH if flat[key] != now[key]]
    for change in found:
        if change.key.split(".")[0] in _OF_TENSORS or change.key in _OF_TENSORS:
            raise ValueError(
                f"{change}: the tensors of the checkpoint would not fit; begin a new run with "
                "init_from, which takes over what does"
            )
        if change.key == _OF_PLACE:
            raise ValueError(
                f"{change}: the checkpoint's place in the data is its step times this; begin a new "
                "run with init_from"
            )
    if resolved.total_steps <= position.step:
        raise ValueError(
            f"the fork would end after {resolved.total_steps} steps, and the checkpoint is of step "
            f"{position.step}; give a longer one, such as optim.steps={2 * position.step}"
        )
    return found


def _of_fork(position: Position, resolved: ResolvedRun) -> Position:
    """The parent's position as the fork's own: its results are still to come."""
    progress = replace(
        position.progress,
        ended="",
        evaluation_due=False,
        nonfinite_steps=0,
        metrics=without_best(position.progress.metrics),
    )
    return replace(
        position,
        progress=progress,
        recipe=resolved.recipe.recorded(),
        data_fingerprint=resolved.manifest.fingerprint,
        data_terms=list(resolved.manifest.terms),
        tracking_run_id=None,
    )
