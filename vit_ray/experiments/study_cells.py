"""The cells of a scaling study, rows x data sizes x lengths x seeds, and their fine-tunings.

Each has its own recipe. Depends only on recipes: no data set is opened. A name is derived from the
settings, so that a restarted study finds what it has trained.

Several lengths can come from one run: the longest is trained, and the others branch off its
checkpoints. With a learning rate that is constant until a cool-down at the end (Hagele et al.,
arXiv:2405.18392), a shorter run equals the longer one, step for step, up to the shorter one's
cool-down. So only that cool-down has to be trained, and its weights are those of a separate run.
"""

import hashlib
import itertools
import json
import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from vit_ray.checkpoints.checkpoint import Position, copy_checkpoint, folder_name
from vit_ray.checkpoints.checkpoint_format import (
    DamagedCheckpointError,
    PartialCheckpointError,
    is_committed,
)
from vit_ray.checkpoints.run_checkpoints import Warn, begin_training, newest_checkpoint
from vit_ray.config import Recipe, load_recipe, require
from vit_ray.config.command_sections import StudyConfig, StudyModel, StudyTask
from vit_ray.config.keys import TAGGED, unused_keys
from vit_ray.config.schema import ImageSize, errors_of
from vit_ray.config.training_sections import ModelConfig
from vit_ray.experiments.search_space import check_in_turn, short_name, with_point
from vit_ray.launch.prepared_run import lock_run
from vit_ray.launch.resolved_run import check_model
from vit_ray.launch.run_record import SIZES, trained_params
from vit_ray.outcomes import BRANCH_NOTE, origin_of
from vit_ray.storage import locate
from vit_ray.training.steps import cooldown_start

PAPER_EPOCHS: Final = 7.0
"""Epochs of most rows of the paper's Table 3, on JFT-300M."""
# Keys that a row sets through its other fields.
_GIVEN_ELSEWHERE: Final = {
    "name": "label",
    "seed": "study.seeds",
    "data.fraction": "data_fractions",
    **{f"optim.{key}": key for key in ("epochs", "steps")},
}
# Keys and sections that are the same for all cells, except for descriptions of their data.
_COMMON: Final = ("output", "resume", "tracking", "storage", "study", "sweep", "vtab", "plan")
_TOLD: Final = ("plan.num_images", "plan.num_classes")
# Sections and keys of a task's recipe that come from the cell.
_OF_THE_CELL: Final = (
    "name",
    "output",
    "init_from",
    "seed",
    "tracking",
    "storage",
    "workers",
    "resume",
)
# Keys of the model that its weights need.
_SIZES: Final = (
    "name", "depth", "width", "mlp_dim", "num_heads", "patch_size", "stages", "width_factor",
)  # fmt: skip
# Options of the model that come from the task's recipe.
_OF_PRETRAINING: Final = ("representation", "head_bias", "dropout", "stochastic_depth")


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cell:
    """One training of the study; `length` is a text, such as `7 epochs`."""

    label: str
    fraction: float
    length: str
    recipe: Recipe

    @property
    def name(self) -> str:
        """Run name: the study's, the row's label, the share of data, the length, later seeds."""
        return self.recipe.name


Planned = tuple[Cell, int]
"""A cell, and the steps of its training."""


@dataclass(frozen=True)
class CellResult:
    """The result of a cell.

    Attributes:
        was_finished: it was complete before; nothing was trained.
        branched_from: cell and step of the checkpoint that it started from; empty if it was trained
            from its start.
        error: why it or one of its transfers failed; empty if none did.
    """

    cell: Cell
    metrics: dict[str, float]
    run_id: str | None
    was_finished: bool = False
    branched_from: str = ""
    error: str = ""


def study_cells(recipe: Recipe) -> list[Cell]:
    """Every row with every data size, length and seed, in the order of the recipe.

    Raises:
        ValueError: the recipe has no study, a row changes a key that rows cannot change, has an
            unknown key, an impossible value or a model that does not exist, or two cells have the
            same name.
    """
    study, cells = study_of(recipe), list[Cell]()
    for place, row in enumerate(study.models):
        where = f"study.models.{place} ({row.label!r})"
        point = _row_point(row, where)
        batch = with_point(recipe, point, where).train.global_batch_size
        fractions = row.data_fractions or study.data_fractions or (1.0,)
        seeds = row.seeds or study.seeds or (recipe.seed,)
        lengths = row.lengths or study.lengths or [("epochs", PAPER_EPOCHS)]
        label = re.sub(r"[^A-Za-z0-9._+]+", "-", row.label).strip("-")
        for fraction, (unit, length), seed in itertools.product(fractions, lengths, seeds):
            value = f"{length:g}" if isinstance(length, float) else str(length)
            name = f"{recipe.name}-{label}-data{fraction:g}-{unit}{value}"
            own = {unit: length}
            if unit == "images":
                own = {"steps": max(1, round(length / batch))}
            changes: dict[str, Any] = {
                "name": short_name(name + (f"-seed{seed}" if seed != recipe.seed else "")),
                "seed": seed,
                "data": {"fraction": fraction},
                "optim": {"epochs": None, "steps": None, **own},
                "study": None,
            }
            trained = with_point(recipe, point, where, **changes)
            with errors_of(where):
                check_model(trained)
            cells.append(Cell(row.label, fraction, f"{value} {unit}", trained))
    _check_together(study, cells)
    return cells


def study_of(recipe: Recipe) -> StudyConfig:
    """The recipe's section.

    Raises:
        ValueError: there is no such section.
    """
    hint = "study.models, a list of {label: ..., model: {name: ...}}"
    return require(recipe.study, "study", hint)


def _row_point(row: StudyModel, where: str) -> dict[str, Any]:
    point: dict[str, Any] = {}
    if row.model is not None:
        point |= {f"model.{key}": value for key, value in row.model.model_dump(mode="json").items()}
    if row.learning_rate is not None:
        point["optim.learning_rate"] = row.learning_rate
    for key, value in leaves(row.changes):
        if instead := _GIVEN_ELSEWHERE.get(key):
            raise ValueError(
                f"{where}: changes.{key} cannot be set for a single cell; give {instead}"
            )
        if (section := key.partition(".")[0]) in _COMMON and key not in _TOLD:
            raise ValueError(
                f"{where}: changes.{key}: all cells of a study share {section}; set it outside the "
                "rows"
            )
        if key in point and (row.model is None or not key.startswith("model.")):
            raise ValueError(f"{where}: {key} is given twice; keep one of them")
        point[key] = value
    return point


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values from dotted or nested keys; a sweep's space is one value."""
    for key, value in tree.items():
        if isinstance(value, dict) and f"{prefix}{key}" != "sweep.space":
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _check_together(study: StudyConfig, cells: list[Cell]) -> None:
    names = [cell.name for cell in cells]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"study: two cells have the name {twice[0]!r}; give each of study.models its own "
            "label, and list fractions and lengths that differ more"
        )
    known: dict[str, Cell] = {}
    for cell in cells:
        other = known.setdefault(json.dumps(_decides(cell.recipe), sort_keys=True), cell)
        if other is not cell:
            raise ValueError(
                f"study: rows {other.label!r} and {cell.label!r} give the same cell: "
                f"{other.name!r} and {cell.name!r} would train the same; remove one of them, or "
                "change it"
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

    A part of its name stands for its settings: a finished run is not continued with another recipe,
    so a changed task is trained as a new run.

    Raises:
        ValueError: there is no such recipe, or it cannot have such a change.
    """
    where = f"study.transfer {task.name!r}"
    point = dict(leaves(task.changes))
    if taken := key_of_the_cell(point):
        raise ValueError(f"{where}: changes.{taken} comes from the cell; leave it out")
    own = cell.recipe
    base = load_recipe(task.recipe, {"tracking": own.tracking.model_dump(mode="json")})
    # Off and unset are equal: a model without the option can be fine-tuned with the recipe, too.
    of_task = {key: getattr(base.model, key) or None for key in _OF_PRETRAINING}
    model = own.model.model_dump(mode="json") | of_task
    changes: dict[str, Any] = {
        "name": f"{cell.name}-{task.name}",
        "output": own.output,
        "init_from": own.run_folder,
        "seed": own.seed,
        "storage": own.storage.model_dump(mode="json"),
        "workers": own.workers.model_dump(mode="json"),
        "model": model | {"image_size": _whole_patches(own.model, base.model.image_size)},
        "study": None,
    }
    recipe = with_point(base, point, where, **changes)
    check_in_turn(recipe, where)
    # What is trained and evaluated, on any number of workers.
    decides = {key: value for key, value in _decides(recipe).items() if key not in SIZES}
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:8]
    return recipe.with_changes(name=short_name(f"{recipe.name}-{digest}"))


def _decides(recipe: Recipe) -> dict[str, Any]:
    """What decides a training and its evaluation."""
    flat = recipe.flat()
    measured = {key: flat[key] for key in TAGGED if key not in unused_keys(flat)}
    return {**trained_params(recipe), **measured}


def key_of_the_cell(point: Mapping[str, Any]) -> str | None:
    """A key that a task changes or varies although the cell sets it; None if there is none."""
    of_model = [f"model.{key}" for key in _SIZES]
    taken = (k for k, _ in leaves(point) if k.partition(".")[0] in _OF_THE_CELL or k in of_model)
    return next(taken, None)


def _whole_patches(model: ModelConfig, size: ImageSize) -> ImageSize:
    """The part of an image size that whole patches cover; the rest is cut off, as in the paper's
    code.

    Of 384 pixels ViT-H/14 sees 378: its convolution takes 27 patches and leaves six pixels.
    """
    patch = model.patch or 1
    if isinstance(size, int):
        return size - size % patch
    return size[0] - size[0] % patch, size[1] - size[1] % patch


def in_groups(study: StudyConfig, planned: Sequence[Planned]) -> list[list[Planned]]:
    """Cells that are trained one after another, the longest of a branching row first."""
    if not study.branch:
        return [[one] for one in planned]
    groups: dict[Any, list[Planned]] = defaultdict(list)
    for cell, steps in planned:
        groups[cell.label, cell.fraction, cell.recipe.seed].append((cell, steps))
    return [sorted(group, key=lambda one: -one[1]) for group in groups.values()]


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
    note = folder.child(BRANCH_NOTE)
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

        # The trunk's position as the cell's own: it is recorded in a separate run.
        def of_cell(position: Position) -> Position:
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
