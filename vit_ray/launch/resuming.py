"""Whether a run of a name is continued, from where, and with which changes of its recipe."""

import logging
from collections.abc import Callable

from vit_ray.checkpoints.checkpoint import Checkpoint, Position
from vit_ray.checkpoints.run_checkpoints import (
    checkpoint_to_resume,
    give_up_checkpoints,
    newest_checkpoint,
)
from vit_ray.config import Recipe
from vit_ray.config.keys import (
    DATA_SET,
    EVALUATED_SETS,
    LENGTH,
    Change,
    incompatible_changes,
    on_resume,
)
from vit_ray.config.schema import OnResume, validated
from vit_ray.launch.resolved_run import ResolvedRun
from vit_ray.lock import is_lock_file
from vit_ray.storage import locate
from vit_ray.training.steps import lr_at

logger = logging.getLogger(__name__)


def find_resume_point(
    recipe: Recipe, warn: Callable[[str], None] = logger.warning
) -> Checkpoint | None:
    """The checkpoint from which a run of this name continues, if `resume` allows it.

    Args:
        warn: called with a text for each checkpoint that `resume=from_zero` gives up.

    Raises:
        ValueError: a run of this name exists and may not be continued, or should exist and does
            not; or none of its checkpoints can be used.
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
        try:
            give_up_checkpoints(folder, warn)
        except ValueError as error:
            raise ValueError(
                f"resume=from_zero, but run {recipe.name!r} {error}; set resume=auto to continue "
                "it, or choose another name"
            ) from None
        return None
    # Workers choose again: they wait for a late marker, and report what they pass over.
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
        ValueError: a change that is not accepted, or with which no run could continue; names each.
    """
    recipe, total_steps = resolved.recipe, resolved.total_steps
    # The stored recipe: a copy by `with_changes` would be checked as a new recipe.
    before = validated(
        Recipe,
        position.recipe,
        f"run {recipe.name!r} was started by another version of vit_ray; resume it with that one, "
        "or choose another name",
    )
    step = position.step
    then = {DATA_SET: position.data_fingerprint, **before.flat()}
    now = {DATA_SET: resolved.manifest.fingerprint, **recipe.flat()}
    found = incompatible_changes(then, now, without=LENGTH)
    changes = [change for change in found if not change.is_move]
    if fixed := [change for change in changes if on_resume(change.key) is OnResume.FIXED]:
        raise ValueError(
            f"run {recipe.name!r} cannot continue from step {step}: {_listed(fixed)}; restore the "
            "earlier value, or choose another name (init_from loads the weights)"
        )
    steps_before = before.optim.total_steps(resolved.num_images, position.global_batch_size)
    length = [Change(key, then[key], now[key]) for key in LENGTH if then[key] != now[key]]
    if total_steps < steps_before:
        changes += length
    _refuse_too_late(recipe.name, position, changes, steps_before, total_steps)
    if changes and recipe.resume != "changed":
        raise ValueError(
            f"run {recipe.name!r} was started with another recipe: {_listed(changes)}; restore the "
            f"earlier value, choose another name, or set resume=changed to continue it from step "
            f"{step}"
        )
    notes = [f"{change}, assumed to have the same weights" for change in found if change.is_move]
    if changes:
        notes.append(f"continues with another recipe: {_listed(changes)}")
    if total_steps > steps_before:
        rates = lr_at(step, before.optim, steps_before), lr_at(step, recipe.optim, total_steps)
        notes.append(
            f"longer: {_listed(length)}, which makes {total_steps} steps instead of "
            f"{steps_before}. The schedule ({recipe.optim.schedule}) is that of {total_steps} "
            f"steps from here on: the learning rate after step {step} is {rates[1]:.3g}, and would "
            f"have been {rates[0]:.3g}"
        )
    return notes


def _refuse_too_late(
    name: str, position: Position, changes: list[Change], steps_before: int, total_steps: int
) -> None:
    """Refuse a resume that would train nothing."""
    step, run, ended = position.step, f"run {name!r}", position.progress.ended
    if total_steps < step:
        raise ValueError(
            f"{run} has been trained for {step} steps, and this recipe ends after {total_steps}; "
            "set at least that length, or choose another name"
        )
    if ended and total_steps > steps_before:
        raise ValueError(
            f"{run} has finished: it ended after step {step} of {steps_before} ({ended}), so it "
            f"would not be trained for the {total_steps} steps of this recipe; restore the length, "
            "or choose another name (init_from loads the weights)"
        )
    if not changes or not position.progress.is_over(total_steps):
        return
    if all(change.key in EVALUATED_SETS for change in changes):
        raise ValueError(
            f"{run} has finished and was evaluated on other data: {_listed(changes)}; restore the "
            "earlier value, or evaluate its weights on the new data: vit-ray evaluate, with "
            f"init_from set to the folder of {name!r}"
        )
    way_out = "" if ended else ", or make the run longer (with resume=changed)"
    raise ValueError(
        f"{run} has finished, and these keys have changed: {_listed(changes)}; restore the earlier "
        f"values to see its result, or choose another name{way_out}"
    )


def _listed(changes: list[Change]) -> str:
    return "; ".join(map(str, changes))
