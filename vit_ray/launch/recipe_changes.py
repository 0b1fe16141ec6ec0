"""Which changes of the recipe a run may be resumed with, and how they are reported."""

from __future__ import annotations

from vit_ray.checkpoints.checkpoint import Position
from vit_ray.config import Recipe
from vit_ray.config.resume_compatibility import (
    DATA_SET,
    EVALUATED_SETS,
    LENGTH,
    Change,
    incompatible_changes,
)
from vit_ray.config.validation import validated
from vit_ray.storage import READS_OLDER
from vit_ray.train.schedule import lr_at


def accepted_changes(
    recipe: Recipe, position: Position, *, fingerprint: str, num_images: int, total_steps: int
) -> list[str]:
    """The changes since the checkpoint was written, for the run's history.

    A longer run is accepted without confirmation, anything else with `resume=changed`.

    Args:
        recipe: with a definite window.
        fingerprint, num_images, total_steps: of the recipe on the data as they are now.

    Raises:
        ValueError: a change that is not accepted, or that no run could go on with; names each.
    """
    # As it was: a copy by `with_changes` would be checked as a new recipe.
    before = validated(
        Recipe,
        position.recipe,
        f"run {recipe.name!r} was begun by other code; resume it with commit {READS_OLDER}",
    )
    then = {DATA_SET: position.data_fingerprint, **before.flat()}
    now = {DATA_SET: fingerprint, **recipe.flat()}
    found = incompatible_changes(then, now, without=LENGTH)
    changes = [change for change in found if not change.is_move]
    if fixed := [change for change in changes if change.is_fixed]:
        raise ValueError(
            f"run {recipe.name!r} cannot go on from step {position.step}: {_listed(fixed)}. Put "
            "that back, or choose another name (init_from takes over the weights)"
        )
    steps_before = before.optim.total_steps(num_images, position.global_batch_size)
    length = [Change(key, then[key], now[key]) for key in LENGTH if then[key] != now[key]]
    if total_steps < steps_before:
        changes += length
    _refuse_too_late(recipe.name, position, changes, steps_before, total_steps)
    if changes and recipe.resume != "changed":
        raise ValueError(
            f"run {recipe.name!r} was begun with another recipe: {_listed(changes)}. Put that "
            "back, choose another name, or set resume=changed to go on with it from step "
            f"{position.step}"
        )
    told = [
        f"{change}, where the same weights are taken to be" for change in found if change.is_move
    ]
    if changes:
        told.append(f"goes on with another recipe: {_listed(changes)}")
    if total_steps > steps_before:
        told.append(_longer(recipe, before, position.step, length, steps_before, total_steps))
    return told


def _refuse_too_late(
    name: str, position: Position, changes: list[Change], steps_before: int, total_steps: int
) -> None:
    step, run, ended = position.step, f"run {name!r}", position.progress.ended
    if total_steps < step:
        raise ValueError(
            f"{run} has been trained for {step} steps, and this recipe ends after {total_steps}; "
            "give a length of at least that, or choose another name"
        )
    if ended and total_steps > steps_before:
        raise ValueError(
            f"{run} is over: it ended after step {step} of {steps_before} ({ended}), so it would "
            f"not be trained for the {total_steps} steps of this recipe. Put the length back, or "
            "choose another name (init_from takes over the weights)"
        )
    if not (changes and position.progress.is_over(total_steps)):
        return
    if all(change.key in EVALUATED_SETS for change in changes):
        raise ValueError(
            f"{run} is over and was measured on other data: {_listed(changes)}. Put that back, or "
            f"measure its weights on these: vit-ray evaluate, with init_from the folder of {name!r}"
        )
    way_out = "" if ended else ", or make the run longer (with resume=changed)"
    raise ValueError(
        f"{run} is over, so nothing would be trained with {_listed(changes)}. Put that back, or "
        f"choose another name{way_out}"
    )


def _longer(
    recipe: Recipe, before: Recipe, step: int, length: list[Change], old: int, new: int
) -> str:
    rates = lr_at(step, before.optim, old), lr_at(step, recipe.optim, new)
    return (
        f"longer: {_listed(length)}, which makes {new} steps of {old}. The schedule "
        f"({recipe.optim.schedule}) is that of {new} steps from here on: the learning rate after "
        f"step {step} is {rates[1]:.3g}, and would have been {rates[0]:.3g}"
    )


def _listed(changes: list[Change]) -> str:
    return "; ".join(map(str, changes))
