"""A run as users name it: by the folder of its checkpoints, its MLflow id, or its recipe.

The recipe in the newest checkpoint decides, not a recipe file of the same name. A run is continued
only if the changes since that recipe allow it.
"""

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vit_ray.addresses import with_texts
from vit_ray.checkpoints.checkpoint import Checkpoint, Position
from vit_ray.checkpoints.run_checkpoints import (
    checkpoint_to_resume,
    give_up_checkpoints,
    list_checkpoints,
    newest_checkpoint,
)
from vit_ray.config import Recipe, load_recipe
from vit_ray.config.loading import changed, mlflow_variables
from vit_ray.config.recipe import (
    DATA_SET,
    EVALUATED_SETS,
    LENGTH,
    Change,
    incompatible_changes,
    leaves,
    on_resume,
    recipe_from_dict,
)
from vit_ray.config.schema import NAME, OnResume, validated
from vit_ray.config.training_sections import TrackingConfig
from vit_ray.launch.resolved_run import ResolvedRun, resolve_run
from vit_ray.lock import is_lock_file
from vit_ray.outcomes import RUN_FOLDER
from vit_ray.storage import Location, locate
from vit_ray.tracking.store_requests import safe_uri
from vit_ray.training.steps import lr_at

logger = logging.getLogger(__name__)


def find_run(source: str, overrides: Sequence[str] = ()) -> ResolvedRun:
    """A run on its training data, in the order of its start; its evaluation sets are not opened.

    Args:
        source: folder of the run's checkpoints, the run's id in MLflow, or a recipe by name or
            path; for a run that has not started, the recipe is enough.
        overrides: changes of the recipe, such as `data.train=` if the data set has moved, and
            `tracking.uri=` if `source` is an id.

    Raises:
        ValueError: there is no such run or recipe; the data set is not the run's; or the recipe
            differs from the recipe with which the run was trained.
    """
    source, folder = named_folder(source, overrides)
    newest = newest_checkpoint(folder)
    if newest is not None:
        recorded = where_it_lies(newest.position.recipe, folder)
        recorded["output"], _, name = folder.uri.rpartition("/")
        if re.match(NAME, name):
            recorded["name"] = name
        recipe = recipe_from_dict(changed(recorded, overrides), f"the recipe of {source}")
    else:
        files = folder.list_files(recursive=False)
        has_begun = any(is_lock_file(file.base_name) for file in files)
        if has_begun or list_checkpoints(folder):  # also where a recipe has the folder's name
            raise ValueError(
                f"{source} has no complete checkpoint; give the run's recipe, or wait for its "
                "first checkpoint"
            )
        recipe = load_recipe(Path(source), overrides).with_absolute_paths()
        newest = newest_checkpoint(locate(recipe.run_folder))
    recipe = recipe.with_changes(  # only the training set is opened
        data={"eval": None}, evaluate={"few_shot_train": None, "few_shot_test": None}
    )
    if newest is None:
        return resolve_run(recipe)
    position = newest.position
    resolved = resolve_run(recipe, begun=position.recipe["data"]["shuffle_window"])
    _, changes = changes_since(position, resolved)
    if changes := [c for c in changes if c.key not in (*EVALUATED_SETS, *LENGTH)]:
        raise ValueError(
            f"run {recipe.name!r} was trained with another recipe: {_listed(changes)}; give the "
            f"run's folder, {recipe.run_folder}, without changes, the run's own data set as "
            "data.train=PATH, or another name"
        )
    return resolved


def changes_since(position: Position, resolved: ResolvedRun) -> tuple[Recipe, list[Change]]:
    """The recipe of a checkpoint, and the deciding keys, and the data set, that have changed; a
    path that has moved with the run folder has not.

    Raises:
        ValueError: another version of this package has written the recipe.
    """
    # Not a copy by `with_changes`, which would be checked as a new recipe.
    before = validated(
        Recipe,
        position.recipe,
        f"run {position.recipe.get('name')!r} was started by another version of vit_ray; resume it "
        "with that one, or choose another name",
    )
    then = {DATA_SET: position.data_fingerprint, **before.flat()}
    now = {DATA_SET: resolved.manifest.fingerprint, **resolved.recipe.flat()}
    moved = dict(leaves(where_it_lies(position.recipe, locate(resolved.recipe.run_folder))))
    changes = incompatible_changes(then, now)
    return before, [change for change in changes if moved.get(change.key) != change.now]


def where_it_lies(recipe: dict[str, Any], folder: Location) -> dict[str, Any]:
    """A recorded recipe with the paths of a run folder that was copied or moved.

    Paths near the old run folder become those near `folder`, if they exist there.
    """
    old, new = Path(recipe.get("output", ""), recipe.get("name", "")), Path(folder.path)
    while old.name == new.name and old != new:
        old, new = old.parent, new.parent

    def moved(key: str, path: str) -> str:
        if not (key and folder.is_local and old.is_absolute() and Path(path).is_relative_to(old)):
            return path
        copy = new / Path(path).relative_to(old)
        return str(copy) if copy.exists() else path

    return dict(with_texts(recipe, moved))


def named_folder(source: str, overrides: Sequence[str]) -> tuple[str, Location]:
    """The folder of a named run, as text and as location; for an MLflow id, that run's folder.

    Raises:
        ValueError: MLflow has no such training, or does not answer.
    """
    if not re.fullmatch(r"[0-9a-f]{32}", source):
        return source, locate(source)
    from vit_ray.tracking.mlflow_client import asking  # MLflow: seconds

    uri = changed({}, overrides).get("tracking", {}).get("uri")
    uri = uri or validated(TrackingConfig, mlflow_variables(), source).uri
    try:
        with asking(uri) as client:
            folder = client.get_run(source).data.tags.get(RUN_FOLDER)
    except RuntimeError as error:
        raise ValueError(f"tracking.uri: {error}") from None
    if folder is None:
        raise ValueError(f"run {source} of MLflow at {safe_uri(uri)} is not a training of vit_ray")
    return folder, locate(folder)


def find_resume_point(
    recipe: Recipe, warn: Callable[[str], None] = logger.warning
) -> Checkpoint | None:
    """The checkpoint from which a run of this name continues, if `resume` allows it.

    Args:
        warn: called with a text for each checkpoint that `resume=from_zero` gives up.

    Raises:
        ValueError: `resume` forbids to continue a run of this name, or requires one that does not
            exist; or none of its checkpoints can be used.
    """
    folder = locate(recipe.run_folder)
    if recipe.resume is False and not all(
        is_lock_file(file.base_name) for file in folder.list_files()
    ):
        newest = newest_checkpoint(folder)
        raise ValueError(
            f"resume=false, but a run {recipe.name!r} exists in {recipe.output} (step "
            f"{newest.position.step if newest else 0}); choose another name, or set resume=auto "
            "to continue it"
        )
    if recipe.resume == "from_zero":
        give_up_checkpoints(folder, warn)
        return None
    # Workers choose again: they wait for a late marker, and report damaged checkpoints.
    checkpoint = newest_checkpoint(folder) or checkpoint_to_resume(folder, lambda _: None)
    if checkpoint is None and recipe.resume is True:
        raise ValueError(
            f"resume=true, but {recipe.output}/{recipe.name} holds no checkpoint; check name "
            "and output, or set resume=auto"
        )
    return checkpoint


def accepted_changes(resolved: ResolvedRun, position: Position) -> list[str]:
    """The changes since the checkpoint was written, for the run's history.

    Extending a run needs no confirmation, any other change needs `resume=changed`.

    Args:
        resolved: of the recipe, with the present data.

    Raises:
        ValueError: some changes need confirmation, or no run can continue with them; names each.
    """
    recipe, total_steps = resolved.recipe, resolved.total_steps
    step, progress, run = position.step, position.progress, f"run {recipe.name!r}"
    before, all_changes = changes_since(position, resolved)
    length = [change for change in all_changes if change.key in LENGTH]
    changes = [change for change in all_changes if change not in length]
    if fixed := [change for change in changes if on_resume(change.key) is OnResume.FIXED]:
        raise ValueError(
            f"{run} cannot continue from step {step}: {_listed(fixed)}; restore the earlier value, "
            "or choose another name (init_from loads the weights)"
        )
    steps_before = before.optim.total_steps(resolved.num_images, position.global_batch_size)
    if total_steps < steps_before or progress.ended:
        changes += length
    if total_steps < step:
        raise ValueError(
            f"{run} has been trained for {step} steps, and this recipe ends after {total_steps}; "
            "set at least that length, or choose another name"
        )
    if changes and progress.is_over(total_steps):
        raise ValueError(
            f"{run} has finished ({progress.ended or f'step {step}'}), and these keys have "
            f"changed: {_listed(changes)}; restore the earlier values to see its result, or choose "
            "another name; for another test set, evaluate its weights (vit-ray evaluate)"
        )
    if changes and recipe.resume != "changed":
        raise ValueError(
            f"{run} was started with another recipe: {_listed(changes)}; restore the earlier "
            f"value, choose another name, or set resume=changed to continue it from step {step}"
        )
    notes = [f"continues with another recipe: {_listed(changes)}"] if changes else []
    if total_steps > steps_before:
        rates = lr_at(step, before.optim, steps_before), lr_at(step, recipe.optim, total_steps)
        notes.append(
            f"longer: {_listed(length)}, which makes {total_steps} steps instead of "
            f"{steps_before}. The schedule ({recipe.optim.schedule}) is that of {total_steps} "
            f"steps from here on: the learning rate after step {step} is {rates[1]:.3g}, and would "
            f"have been {rates[0]:.3g}"
        )
    return notes


def _listed(changes: list[Change]) -> str:
    return "; ".join(map(str, changes))
