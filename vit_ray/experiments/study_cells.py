"""The cells of a scaling study, rows x data sizes x lengths x seeds, and their fine-tunings.

Each cell and each fine-tuning has a recipe, made from other recipes: no data set is opened. Run
names are derived from settings, so that a restarted study finds what it has trained.

Several lengths can come from one run: the longest is trained, and the others branch off checkpoints
of that run. With a learning rate that is constant until a cool-down at the end (Hagele et al.,
arXiv:2405.18392), a shorter run equals the longer run, step for step, up to the shorter run's
cool-down. So only that cool-down has to be trained; the weights equal those of a separate run.
"""

import hashlib
import itertools
import json
import logging
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from vit_ray.checkpoints.checkpoint import Position, copy_checkpoint, folder_name
from vit_ray.checkpoints.checkpoint_format import (
    DamagedCheckpointError,
    PartialCheckpointError,
)
from vit_ray.checkpoints.run_checkpoints import Warn, begin_training, newest_checkpoint
from vit_ray.config import Recipe, load_recipe, require
from vit_ray.config.command_sections import StudyConfig, StudyModel, StudyTask
from vit_ray.config.recipe import leaves
from vit_ray.config.schema import errors_of
from vit_ray.experiments.search_space import check_in_turn, short_name, with_point
from vit_ray.launch.resolved_run import check_model
from vit_ray.launch.run_record import SIZES, trained_params
from vit_ray.lock import hold_lock
from vit_ray.outcomes import BRANCH_NOTE, origin_of
from vit_ray.storage import locate
from vit_ray.training.steps import cooldown_start

# Epochs of most rows of the paper's Table 3, on JFT-300M.
PAPER_EPOCHS: Final = 7.0
# Sections and keys that no row changes, except for descriptions of the data; and how they are set.
_NOT_OF_A_ROW: Final = {
    "name": "the row's label",
    "seed": "study.seeds",
    "data.fraction": "data_fractions",
    **{f"optim.{unit}": unit for unit in ("epochs", "steps")},
    **dict.fromkeys(
        ("output", "resume", "tracking", "storage", "study", "sweep", "vtab", "plan"),
        "it outside the rows, for all cells",
    ),
}
_DESCRIBES_DATA: Final = ("plan.num_images", "plan.num_classes")
# Sections and keys of a task's recipe that come from the cell.
_KEYS_OF_CELL: Final = (
    "name",
    "output",
    "init_from",
    "seed",
    "tracking",
    "storage",
    "workers",
    "resume",
)
# Keys of the model that decide the shapes of the weights.
_SHAPE_KEYS: Final = (
    "name", "depth", "width", "mlp_dim", "num_heads", "patch_size", "stages", "width_factor",
)  # fmt: skip
# Options of the model that come from the task's recipe.
_KEYS_OF_TASK: Final = ("representation", "head_bias", "dropout", "stochastic_depth")


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cell:
    """One training of the study.

    Attributes:
        length: as text, such as `7 epochs`.
        steps: 0 until the data are known.
    """

    label: str
    fraction: float
    length: str
    recipe: Recipe
    steps: int = 0

    @property
    def name(self) -> str:
        """Run name: study, label, share of data, length, and the seed if it is not the recipe's."""
        return self.recipe.name


def study_cells(recipe: Recipe) -> list[Cell]:
    """Every row with every data size, length and seed, in the order of the recipe.

    Raises:
        ValueError: the recipe has no study; a row has an unknown key, a key that rows cannot
            change, an impossible value or an unknown model; or two cells have one name or train
            the same.
    """
    study, cells = study_of(recipe), list[Cell]()
    for index, row in enumerate(study.models):
        where = f"study.models.{index} ({row.label!r})"
        point = _row_point(row, where)
        batch = with_point(recipe, point, where).train.global_batch_size
        fractions = row.data_fractions or study.data_fractions or (1.0,)
        seeds = row.seeds or study.seeds or (recipe.seed,)
        lengths = row.lengths or study.lengths or [("epochs", PAPER_EPOCHS)]
        label = re.sub(r"[^A-Za-z0-9._+]+", "-", row.label).strip("-")
        for fraction, (unit, length), seed in itertools.product(fractions, lengths, seeds):
            value = f"{length:g}" if isinstance(length, float) else str(length)
            name = f"{recipe.name}-{label}-data{fraction:g}-{unit}{value}"
            duration = {unit: length}
            if unit == "images":
                duration = {"steps": max(1, round(length / batch))}
            changes: dict[str, Any] = {
                "name": short_name(name + (f"-seed{seed}" if seed != recipe.seed else "")),
                "seed": seed,
                "data": {"fraction": fraction},
                "optim": {"epochs": None, "steps": None, **duration},
                "study": None,
            }
            cell_recipe = with_point(recipe, point, where, **changes).with_absolute_paths()
            with errors_of(where):
                check_model(cell_recipe)
            cells.append(Cell(row.label, fraction, f"{value} {unit}", cell_recipe))
    _check_together(study, cells)
    return cells


def study_of(recipe: Recipe) -> StudyConfig:
    """The recipe's section.

    Raises:
        ValueError: there is no such section.
    """
    return require(
        recipe.study, "study", "study.models, a list of {label: ..., model: {name: ...}}"
    )


def _row_point(row: StudyModel, where: str) -> dict[str, Any]:
    point: dict[str, Any] = {}
    if row.model is not None:
        point |= {f"model.{key}": value for key, value in row.model.model_dump(mode="json").items()}
    if row.learning_rate is not None:
        point["optim.learning_rate"] = row.learning_rate
    for key, value in leaves(row.changes):
        setting = _NOT_OF_A_ROW.get(key) or _NOT_OF_A_ROW.get(key.partition(".")[0])
        if setting and key not in _DESCRIBES_DATA:
            raise ValueError(f"{where}: changes.{key} cannot be set by a row; give {setting}")
        point[key] = value
    return point


def _check_together(study: StudyConfig, cells: list[Cell]) -> None:
    names = [cell.name for cell in cells]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"study: two cells have the name {twice[0]!r}; give each of study.models its own "
            "label, and list fractions and lengths that differ more"
        )
    by_params: dict[str, Cell] = {}
    for cell in cells:
        other = by_params.setdefault(json.dumps(trained_params(cell.recipe)), cell)
        if other is not cell:
            raise ValueError(
                f"study: rows {other.label!r} and {cell.label!r} give the same cell: "
                f"{other.name!r} and {cell.name!r} would train the same; change or remove one"
            )
    for cell in cells if study.branch else ():
        schedule = cell.recipe.optim.schedule
        if schedule != "cooldown":
            raise ValueError(
                f"study.branch=true: cell {cell.name!r} has optim.schedule={schedule}, with which "
                "a shorter run does not equal the start of a longer one; set "
                "optim.schedule=cooldown"
            )
        if cell.recipe.keeps_best:
            raise ValueError(
                f"study.branch=true: cell {cell.name!r} keeps its best evaluation, which may be "
                "before the branch; turn off checkpoint.keep_best and train.early_stopping"
            )


def task_recipe(cell: Cell, task: StudyTask) -> Recipe:
    """The fine-tuning of a cell's weights on a task; starts nothing and opens no data.

    The run name ends with a digest of the settings: a finished run is not continued with another
    recipe, so a changed task is trained as a new run.

    Raises:
        ValueError: the task's recipe does not exist, or a change of it is not allowed.
    """
    where = f"study.transfer {task.name!r}"
    point = dict(leaves(task.changes))
    if taken := key_of_the_cell(point):
        raise ValueError(f"{where}: changes.{taken} comes from the cell; leave it out")
    trained = cell.recipe
    base = load_recipe(task.recipe, {"tracking": trained.tracking.model_dump(mode="json")})
    # Off and unset are equal: a model without the option can be fine-tuned with the recipe, too.
    options = {key: getattr(base.model, key) or None for key in _KEYS_OF_TASK}
    # As in the paper's code: of 384 pixels ViT-H/14 uses the 378 that are a multiple of its patch.
    size, patch = base.model.image_size, trained.model.patch or 1
    options["image_size"] = (
        size - size % patch if isinstance(size, int) else [side - side % patch for side in size]
    )
    changes: dict[str, Any] = {
        "name": f"{cell.name}-{task.name}",
        "output": trained.output,
        "init_from": trained.run_folder,
        "seed": trained.seed,
        "storage": trained.storage.model_dump(mode="json"),
        "workers": trained.workers.model_dump(mode="json"),
        "model": trained.model.model_dump(mode="json") | options,
        "study": None,
    }
    recipe = with_point(base, point, where, **changes)
    check_in_turn(recipe, where)
    # The same on any number of workers.
    params = {key: value for key, value in trained_params(recipe).items() if key not in SIZES}
    digest = hashlib.sha256(json.dumps(params, sort_keys=True).encode()).hexdigest()[:8]
    return recipe.with_changes(name=short_name(f"{recipe.name}-{digest}")).with_absolute_paths()


def key_of_the_cell(point: Mapping[str, Any]) -> str | None:
    """The first key of a task's point that comes from the cell; None if there is none."""
    of_model = [f"model.{key}" for key in _SHAPE_KEYS]
    taken = (k for k, _ in leaves(point) if k.partition(".")[0] in _KEYS_OF_CELL or k in of_model)
    return next(taken, None)


def in_groups(study: StudyConfig, cells: Sequence[Cell]) -> list[list[Cell]]:
    """Groups of cells that are trained one by one, the longest of a branching row first."""
    if not study.branch:
        return [[cell] for cell in cells]
    groups: dict[Any, list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[cell.label, cell.fraction, cell.recipe.seed].append(cell)
    return [sorted(group, key=lambda cell: -cell.steps) for group in groups.values()]


def branch_step(cell: Cell) -> int:
    """Step of the row's longest cell after which this cell is trained separately."""
    return cooldown_start(cell.recipe.optim, cell.steps)


def begin_branch(cell: Cell, trunk: Cell, warn: Warn = logger.warning) -> str:
    """Copy the trunk's checkpoint at which a cell branches off, if the cell has no checkpoint.

    If that checkpoint cannot be used, the cell is trained from step 0, with the same result.

    Args:
        warn: called with the reason if the checkpoint cannot be used.

    Returns:
        The cell's origin, see `origin_of`; empty if the cell has not branched off, now or at an
        earlier start.

    Raises:
        ValueError: another process trains the cell.
    """
    step, folder = branch_step(cell), locate(cell.recipe.run_folder)
    note = folder.child(BRANCH_NOTE)
    if newest_checkpoint(folder) is not None:
        return note.read().decode() if note.exists() else ""

    # The trunk's position with the cell's recipe, to be recorded in a separate run.
    def of_cell(position: Position) -> Position:
        lengths = {key: getattr(cell.recipe.optim, key) for key in ("epochs", "steps")}
        changes = {"name": cell.name, "optim": {**position.recipe["optim"], **lengths}}
        return replace(
            position,
            progress=replace(position.progress, seconds={}),  # the seconds are the trunk's
            recipe=position.recipe | changes,
            tracking_run_id=None,
        )

    with hold_lock(folder):
        note.delete()  # of an interrupted copy, which does not count
        if step == 0:
            return ""
        origin = origin_of(trunk.name, step)
        source = locate(trunk.recipe.run_folder).child(folder_name(step))
        begin_training(folder)
        note.write(origin.encode())  # before the copy: a complete copy has its note
        try:
            copy_checkpoint(source, folder, of_cell)
        except (DamagedCheckpointError, PartialCheckpointError) as error:
            note.delete()
            warn(f"{cell.name} does not branch off {origin}, but starts at step 0: {error}")
            return ""
    return origin
