"""What an earlier start of a study has finished, by its runs in MLflow."""

from vit_ray.config import Recipe
from vit_ray.config.branch_origin import TAG
from vit_ray.config.command_sections import StudyTask
from vit_ray.config.recorded_recipe import recorded_before, tags_of
from vit_ray.config.resume_compatibility import DATA_SET, EVALUATED_SETS, incompatible_changes
from vit_ray.experiments.study_cells import Cell, CellResult, study_of
from vit_ray.experiments.transfer import task_tags, top1_key
from vit_ray.launch.inputs.streams import ResolvedRun
from vit_ray.launch.record.run_metadata import data_inputs
from vit_ray.measure.best_evaluation import with_best
from vit_ray.metric_names import STUDY_EXAFLOPS
from vit_ray.tracking.mlflow_api import Run
from vit_ray.tracking.past_runs import finished_children


def finished_cells(
    recipe: Recipe, cells: list[Cell], resolved_runs: list[ResolvedRun], parent_id: str | None
) -> dict[str, CellResult]:
    """Cells that are finished under the study's run in MLflow, by name.

    Raises:
        ValueError: a cell was finished with another recipe.
    """
    if parent_id is None:
        return {}
    runs = finished_children(recipe.tracking, parent_id)
    found = {}
    for cell, resolved in zip(cells, resolved_runs, strict=True):
        run = runs.get(cell.name)
        if run is not None and STUDY_EXAFLOPS in run.data.metrics:
            check_same_cell(cell, resolved, run)
            found[cell.name] = CellResult(
                cell,
                with_best(run.data.metrics),
                str(run.info.run_id),
                was_finished=True,
                branched_from=run.data.tags.get(TAG, ""),
                missing=missing_tasks(cell, study_of(recipe).transfer, run),
            )
    return found


def missing_tasks(cell: Cell, tasks: tuple[StudyTask, ...], run: Run) -> tuple[StudyTask, ...]:
    """Transfers whose accuracy the cell's run lacks, or has with another recipe."""
    return tuple(
        task
        for task in tasks
        if top1_key(task) not in run.data.metrics
        or not task_tags(cell, task).items() <= tags_of(run.data.tags).items()
    )


def check_same_cell(cell: Cell, resolved: ResolvedRun, run: Run) -> None:
    """Refuse a finished run of the cell's name with another recipe or other data.

    Raises:
        ValueError: names what differs.
    """
    before = recorded_before(run.data.params, run.data.tags)
    before[DATA_SET] = tags_of(run.data.tags).get("vit_ray.data_fingerprint", "unknown")
    now = {**cell.recipe.flat(), DATA_SET: resolved.manifest.fingerprint}
    used = {
        (tag.value, one.dataset.digest)
        for one in (run.inputs.dataset_inputs if run.inputs else ())
        for tag in one.tags
        if tag.key == "mlflow.data.context"
    }
    is_same = used == {(one["context"], one["digest"]) for one in data_inputs(resolved)}
    moved = EVALUATED_SETS if is_same else ()
    if changed := incompatible_changes(before, now, without=moved):
        raise ValueError(
            f"cell {cell.name!r} was finished with another recipe: {'; '.join(map(str, changed))}; "
            "restore the earlier value, or choose another name for the study"
        )
