"""Several lengths from one run: the longest is trained, and the others branch off its checkpoints.

With a learning rate that is constant until a cool-down at the end (Hagele et al.,
arXiv:2405.18392), a shorter run equals the longer one, step for step, up to the shorter one's
cool-down. So only that cool-down has to be trained, and its weights are those of a separate run.
"""

import logging
from dataclasses import replace

from vit_ray.checkpoints.checkpoint import Position, copy_checkpoint, folder_name
from vit_ray.checkpoints.checkpoint_format import (
    DamagedCheckpointError,
    PartialCheckpointError,
    is_committed,
)
from vit_ray.checkpoints.run_checkpoints import Warn, begin_training, newest_checkpoint
from vit_ray.experiments.study_cells import Cell
from vit_ray.launch.prepared_run import lock_run
from vit_ray.outcomes import NOTE, origin_of
from vit_ray.storage import locate
from vit_ray.training.steps import cooldown_start

logger = logging.getLogger(__name__)


def branch_step(cell: Cell, total_steps: int) -> int:
    """Step of its row's longest cell after which a cell is trained separately."""
    return cooldown_start(cell.recipe.optim, total_steps)


def with_kept_steps(trunk: Cell, steps: list[int]) -> Cell:
    """The longest cell, with checkpoints for the others."""
    kept = sorted({*trunk.recipe.checkpoint.keep_steps, *(step for step in steps if step > 0)})
    return replace(trunk, recipe=trunk.recipe.with_changes(checkpoint={"keep_steps": kept}))


def begin_branch(cell: Cell, trunk: Cell, step: int, warn: Warn = logger.warning) -> str:
    """Give a cell that has not begun the trunk's checkpoint of a step.

    If no checkpoint can be used, the cell is trained from its own start, with the same result.

    Args:
        warn: called with why the checkpoint cannot be used.

    Returns:
        Its origin, now or at an earlier start, see `origin_of`; empty if it has not branched off.

    Raises:
        ValueError: another process trains the cell.
    """
    folder = locate(cell.recipe.run_folder)
    note = folder.child(NOTE)
    if newest_checkpoint(folder) is not None:
        return note.read().decode() if note.exists() else ""
    source = locate(trunk.recipe.run_folder).child(folder_name(step))
    origin = origin_of(trunk.name, step)
    with lock_run(folder):
        note.delete()  # of an interrupted copy, which does not count
        if step == 0:
            return ""
        alone = f"{cell.name} does not branch off {origin}, and is trained from its start"
        if not is_committed(source):
            warn(f"{alone}: {trunk.name} has no complete checkpoint of that step")
            return ""
        begin_training(folder)
        note.write(origin.encode())  # before the copy: a complete copy has its note

        def of_cell(position: Position) -> Position:
            """The trunk's position as the cell's own, which is recorded in a separate run."""
            optim = cell.recipe.optim
            lengths = {key: getattr(optim, key) for key in ("epochs", "steps")}
            own = {"name": cell.name, "optim": {**position.recipe["optim"], **lengths}}
            progress = replace(position.progress, seconds={})  # which are the trunk's
            return replace(
                position, progress=progress, recipe=position.recipe | own, tracking_run_id=None
            )

        try:
            copy_checkpoint(source, folder.child(folder_name(step)), of_cell)
        except (DamagedCheckpointError, PartialCheckpointError) as error:
            note.delete()
            warn(f"{alone}: {error}")
            return ""
    return origin
