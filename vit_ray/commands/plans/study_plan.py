"""What a study costs before it starts: every cell, and the total."""

from dataclasses import dataclass

from vit_ray.commands.plan import TrainingFacts, data_facts, pace_of
from vit_ray.config import Recipe
from vit_ray.experiments.search_space import points_of
from vit_ray.experiments.study import in_groups
from vit_ray.experiments.study_cells import Cell, branch_step, study_cells, study_of, task_recipe
from vit_ray.launch.resolved_run import check_batch


@dataclass(frozen=True)
class PlannedCell:
    """A cell on the cluster of `plan`.

    Attributes:
        exaflops: of its pre-training; for a branch, of its cool-down: `facts.exaflops` has the
            whole length.
        training_hours: GPU-hours of the same at `plan.mfu` of the peak, without starting,
            evaluation and communication.
        transfer_exaflops: of all its fine-tunings.
        transfer_hours: GPU-hours of the same.
    """

    cell: Cell
    facts: TrainingFacts
    num_gpus: int
    exaflops: float
    training_hours: float
    transfer_exaflops: float
    transfer_hours: float

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of the cell with its tasks."""
        return self.training_hours + self.transfer_hours


def plan_study(recipe: Recipe) -> list[PlannedCell]:
    """Plan every cell, in the order of the recipe; reads manifests and starts nothing.

    Raises:
        ValueError: as `study_cells` and `data_facts`; the device is not known, or a cell has more
            workers than `plan.num_gpus`.
    """
    cells = [(cell, data_facts(cell.recipe)) for cell in study_cells(recipe)]
    pairs = [(cell, facts.total_steps) for cell, facts in cells]
    trained = {
        cell.name: 1 - branch_step(cell, steps) / steps
        for _, *branches in in_groups(study_of(recipe), pairs)
        for cell, steps in branches
    }
    return [_planned(recipe, *one, trained.get(one[0].name, 1.0)) for one in cells]


def _planned(recipe: Recipe, cell: Cell, facts: TrainingFacts, trained: float) -> PlannedCell:
    """A cell that trains this share of its steps itself."""
    sizes, most = cell.recipe.group_sizes, recipe.plan.num_gpus
    fitting = [size for size in sizes if most is None or size <= most]
    if not fitting:
        raise ValueError(
            f"plan.num_gpus={most}: cell {cell.name!r} needs {sizes[0]} GPUs, one per worker "
            f"(workers.num_workers={cell.recipe.workers.num_workers}); raise plan.num_gpus, or "
            "lower workers.num_workers"
        )
    check_batch(cell.recipe, facts.num_images)
    exaflops = facts.exaflops * trained
    transfer_exaflops = transfer_hours = 0.0
    for task in study_of(recipe).transfer:
        one = task_recipe(cell, task)
        num_runs = len(points_of(one, one.sweep)) + one.sweep.seeds if one.sweep else 1
        of_task = num_runs * data_facts(one).exaflops
        transfer_exaflops += of_task
        transfer_hours += pace_of(one).device_hours(of_task)
    hours = pace_of(cell.recipe).device_hours(exaflops)
    return PlannedCell(cell, facts, fitting[-1], exaflops, hours, transfer_exaflops, transfer_hours)


def describe_study(recipe: Recipe) -> str:
    """Every cell with images, steps, compute and hours, for `--dry-run`; starts nothing.

    Raises:
        ValueError: as `plan_study`.
    """
    cells, config = plan_study(recipe), recipe.plan
    transfers = bool(study_of(recipe).transfer)
    table: list[tuple[str, ...]] = [(
        "cell", "images", "steps", "exaFLOPs", "GPUs", "GPU-hours",
        *(["of transfer"] if transfers else []), "hours",
    )]  # fmt: skip
    for one in cells:
        facts = one.facts
        table.append((
            one.cell.name, f"{facts.num_images:,}", f"{facts.total_steps:,}",
            f"{facts.exaflops:,.4g}", str(one.num_gpus), f"{one.gpu_hours:,.4g}",
            *([f"{one.transfer_hours:,.4g}"] if transfers else []),
            f"{one.gpu_hours / one.num_gpus:,.4g}",
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in table
    ]
    figures = ("exaflops", "training_hours", "transfer_exaflops", "transfer_hours")
    # Shared steps of branches count once.
    exaflops, hours, transfer_exaflops, transfer_hours = (
        sum(getattr(cell, figure) for cell in cells) for figure in figures
    )
    sources = ", ".join(dict.fromkeys(cell.facts.source for cell in cells))
    unit = f"{config.device}-hours"
    of_transfer = f"transfer       {transfer_exaflops:,.4g} exaFLOPs, {transfer_hours:,.4g} {unit}"
    return "\n".join([
        *lines,
        "",
        f"total          {len(cells)} cells, {exaflops + transfer_exaflops:,.4g} exaFLOPs, "
        f"{hours + transfer_hours:,.4g} {unit} at {config.mfu * 100:g} % MFU, without starting, "
        "evaluation and communication",
        f"pre-training   {exaflops:,.4g} exaFLOPs, {hours:,.4g} {unit}",
        *([of_transfer] if transfers else []),
        f"images         {sources}",
    ])  # fmt: skip
