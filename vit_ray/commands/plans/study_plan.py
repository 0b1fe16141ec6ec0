"""What a study costs before it starts: every cell, and the total."""

from dataclasses import dataclass, replace
from functools import cached_property

from vit_ray.commands.plans.plan import (
    TrainingFacts,
    data_facts,
    planned_cluster,
)
from vit_ray.config import Recipe
from vit_ray.experiments.branching import branch_step
from vit_ray.experiments.search_space import points_of
from vit_ray.experiments.study import in_groups
from vit_ray.experiments.study_cells import Cell, study_cells, study_of
from vit_ray.experiments.transfer import task_recipe


@dataclass(frozen=True)
class PlannedTask:
    """The fine-tunings of a cell on one data set."""

    num_trials: int
    """Fine-tunings that select a rate; 0 for a single fine-tuning."""
    num_finals: int
    """Fine-tunings with the selected rate."""
    exaflops: float
    """Per fine-tuning."""
    gpu_hours: float
    """Per fine-tuning."""

    @property
    def num_runs(self) -> int:
        return self.num_trials + self.num_finals


@dataclass(frozen=True)
class PlannedCell:
    """A cell on the cluster of `plan`."""

    cell: Cell
    facts: TrainingFacts
    num_gpus: int
    exaflops: float
    """Compute of its pre-training; for a branch, of its cool-down: `facts.exaflops` has the whole
    length."""
    training_hours: float
    """GPU-hours at `plan.mfu` of the peak, without starting, evaluation and communication."""
    tasks: tuple[PlannedTask, ...]
    """The fine-tunings after the pre-training."""

    @property
    def transfer_exaflops(self) -> float:
        return sum(task.num_runs * task.exaflops for task in self.tasks)

    @property
    def transfer_hours(self) -> float:
        """GPU-hours of its tasks."""
        return sum(task.num_runs * task.gpu_hours for task in self.tasks)

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of the cell with its tasks."""
        return self.training_hours + self.transfer_hours

    @property
    def hours(self) -> float:
        """Hours of the cell with its tasks on its own GPUs, one training after another."""
        return self.gpu_hours / self.num_gpus


@dataclass(frozen=True)
class StudyPlan:
    """All cells in the order of the recipe, and their total need."""

    recipe: Recipe
    cells: list[PlannedCell]

    @cached_property
    def gpu_hours(self) -> float:
        """GPU-hours of all cells."""
        return sum(one.gpu_hours for one in self.cells)

    @property
    def exaflops(self) -> float:
        """Compute of all pre-trainings, counting shared steps of branches once."""
        return sum(one.exaflops for one in self.cells)

    @property
    def transfer_exaflops(self) -> float:
        return sum(one.transfer_exaflops for one in self.cells)


def plan_study(recipe: Recipe) -> StudyPlan:
    """Plan every cell; reads manifests and starts nothing.

    Raises:
        ValueError: as `study_cells` and `data_facts`; the device is not known, or a cell has more
            workers than `plan.num_gpus`.
    """
    cells = study_cells(recipe)
    planned = [_planned(recipe, cell) for cell in cells]
    pairs = [(one.cell, one.facts.total_steps) for one in planned]
    left = {
        cell.name: 1 - branch_step(cell, steps) / steps
        for _, *branches in in_groups(study_of(recipe), pairs)
        for cell, steps in branches
    }
    for index, one in enumerate(planned):
        share = left.get(one.cell.name, 1.0)
        planned[index] = replace(
            one, exaflops=one.exaflops * share, training_hours=one.training_hours * share
        )
    return StudyPlan(recipe, planned)


def _planned(recipe: Recipe, cell: Cell) -> PlannedCell:
    num_gpus, most = cell.recipe.group_sizes[-1], recipe.plan.num_gpus
    if most is not None and num_gpus > most:
        fitting = [size for size in cell.recipe.group_sizes if size <= most]
        if not fitting:
            raise ValueError(
                f"plan.num_gpus={most}: cell {cell.name!r} needs {cell.recipe.group_sizes[0]} "
                f"GPUs, one per worker (workers.num_workers={cell.recipe.workers.num_workers}); "
                "raise plan.num_gpus, or lower workers.num_workers"
            )
        num_gpus = fitting[-1]
    facts = data_facts(cell.recipe)
    return PlannedCell(
        cell,
        facts,
        num_gpus,
        facts.exaflops,
        _gpu_hours(cell.recipe, facts.exaflops, num_gpus),
        tuple(
            _planned_task(task_recipe(cell, task), num_gpus) for task in study_of(recipe).transfer
        ),
    )


def _gpu_hours(recipe: Recipe, exaflops: float, num_gpus: int) -> float:
    alone = recipe.with_changes(plan={"num_gpus": num_gpus})
    return planned_cluster(alone).pace.device_hours(exaflops)


def _planned_task(recipe: Recipe, num_gpus: int) -> PlannedTask:
    exaflops = data_facts(recipe).exaflops
    trials, finals = 0, 1
    if recipe.sweep is not None:
        trials, finals = len(points_of(recipe, recipe.sweep)), recipe.sweep.seeds
    return PlannedTask(trials, finals, exaflops, _gpu_hours(recipe, exaflops, num_gpus))


def describe_study(recipe: Recipe) -> str:
    """Every cell with images, steps, compute and hours, for `--dry-run`; starts nothing.

    Raises:
        ValueError: as `plan_study`.
    """
    plan = plan_study(recipe)
    table: list[tuple[str, ...]] = [(
        "cell", "images", "steps", "exaFLOPs", "GPUs", "GPU-hours", "of transfer", "hours",
    )]  # fmt: skip
    for one in plan.cells:
        facts = one.facts
        table.append((
            one.cell.name, f"{facts.num_images:,}", f"{facts.total_steps:,}",
            f"{facts.exaflops:,.4g}", str(one.num_gpus), f"{one.gpu_hours:,.4g}",
            f"{one.transfer_hours:,.4g}", f"{one.hours:,.4g}",
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in table
    ]
    return "\n".join([*lines, "", *_totals(plan)])


def _totals(plan: StudyPlan) -> list[str]:
    config = plan.recipe.plan
    sources = ", ".join(dict.fromkeys(one.facts.source for one in plan.cells))
    exaflops = plan.exaflops + plan.transfer_exaflops
    transfer_hours = sum(one.transfer_hours for one in plan.cells)
    hours = f"{config.device}-hours"
    lines = [
        f"total          {len(plan.cells)} cells, {exaflops:,.4g} exaFLOPs, {plan.gpu_hours:,.4g} "
        f"{hours} at {config.mfu * 100:g} % MFU, without starting, evaluation and communication",
        f"pre-training   {plan.exaflops:,.4g} exaFLOPs, "
        f"{plan.gpu_hours - transfer_hours:,.4g} {hours} of that",
        f"transfer       {plan.transfer_exaflops:,.4g} exaFLOPs, {transfer_hours:,.4g} {hours}",
        f"images         {sources}",
    ]
    return lines
