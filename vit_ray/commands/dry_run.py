"""What `--dry-run` prints for a training, a sweep, VTAB and a study; starts nothing."""

import os
import time
from dataclasses import dataclass
from typing import Final

import torch
from joblib import cpu_count

from vit_ray.commands.plan import (
    TrainingFacts,
    data_facts,
    describe_work,
    pace_of,
    planned_cluster,
)
from vit_ray.config import Recipe
from vit_ray.config.training_sections import ModelConfig
from vit_ray.data.tasks import clock
from vit_ray.experiments.search_space import (
    final_recipe,
    point_name,
    point_text,
    points_of,
    sweep_of,
    trial_recipe,
)
from vit_ray.experiments.study_cells import (
    Cell,
    branch_step,
    in_groups,
    study_cells,
    study_of,
    task_recipe,
)
from vit_ray.launch.resolved_run import check_batch
from vit_ray.measure.devices import Device
from vit_ray.training.memory_estimate import (
    estimate_memory,
    forward_pass,
    largest_micro_batch,
    prepared_model,
    step_macs,
)
from vit_ray.training.steps import accumulation_steps, micro_batch_size

# Multiply-adds of a measured pass: a few seconds, in bf16 on CPUs that emulate it.
_MAX_MACS: Final = 5e9


def describe_training(recipe: Recipe) -> str:
    """Steps, batch, memory and compute of a training; reads the manifest and starts nothing.

    Raises:
        ValueError: as `resolve_run`; `data.train` may be a placeholder if `plan` gives the counts.
    """
    facts = data_facts(recipe)
    check_batch(recipe, facts.num_images)
    device, num_gpus = planned_cluster(recipe)
    lines = describe_work(recipe, facts, device, num_gpus)
    sizes = recipe.group_sizes
    for world_size in sizes if len(sizes) <= 4 else (sizes[0], sizes[-1]):
        lines += _describe_group(recipe, facts, device, world_size)
    lines.append(f"planned for             {recipe.plan.device} (plan.device)")
    uses_gpu = torch.cuda.is_available() or recipe.workers.use_gpu is True
    if not uses_gpu and "RAY_ADDRESS" not in os.environ:
        lines.append(f"this machine, no GPU    {_time_here(recipe, facts)}")
    return "\n".join(lines)


def _describe_group(
    recipe: Recipe, facts: TrainingFacts, device: Device, world_size: int
) -> list[str]:
    """Lines on batch and memory with this number of workers."""
    batch, note = recipe.train.global_batch_size, ""
    if recipe.train.micro_batch_size != "auto" or recipe.workers.use_gpu is False:
        micro = micro_batch_size(recipe, world_size)
    else:  # a training finds it by trying; here it is estimated
        largest = largest_micro_batch(recipe, facts.num_classes, world_size, device.memory_gib)
        verdict = "the most that fits a {}, by estimate" if largest else "does not fit a {}"
        micro, note = largest or 1, f" ({verdict.format(recipe.plan.device)})"
    passes = accumulation_steps(batch, micro, world_size)
    memory = estimate_memory(recipe, facts.num_classes, micro, world_size)
    workers = f"{world_size} worker{'s' if world_size > 1 else ''}"
    return [
        f"with {workers:<19}global batch {batch:,} = {world_size} x micro-batch {micro}{note} x "
        f"{passes} pass{'es' if passes > 1 else ''}",
        f"  memory per worker     {memory.total:.2f} GiB under ZeRO {recipe.train.zero_stage}",
        *(f"    {part:<20}{gib:8.2f} GiB" for part, gib in vars(memory).items() if gib >= 0.005),
    ]


def _time_here(recipe: Recipe, facts: TrainingFacts) -> str:
    """The time of the training on the CPUs of this machine, from the second of two passes.

    A model that is too large to try is timed by its multiply-adds at the rate of a ViT-Ti/16.
    """
    macs = step_macs(recipe, facts.num_classes)
    measured, note = recipe, "two passes"
    if macs > _MAX_MACS:
        model = ModelConfig(name="ViT-Ti/16", image_size=224)
        optim = recipe.optim.model_copy(update={"frozen": ()})  # it names layers of the large model
        measured = recipe.model_copy(update={"model": model, "optim": optim})
        note = "two passes of a ViT-Ti/16"
    measured_macs = step_macs(measured, facts.num_classes)
    size = min(int(_MAX_MACS // measured_macs), recipe.train.global_batch_size)
    size = max(size - size % recipe.train.least_pass, recipe.train.least_pass)
    device = torch.device("cpu")
    network = prepared_model(measured, facts.num_classes, device)
    forward = forward_pass(network, measured, size, device)
    pass_s = 0.0
    for _ in range(2):
        start_s = time.perf_counter()
        forward().backward()  # type: ignore[no-untyped-call]
        pass_s = time.perf_counter() - start_s
    rate = size / pass_s * measured_macs / macs
    total_s = facts.total_steps * recipe.train.global_batch_size / rate
    return (
        f"about {clock(total_s)} on {cpu_count()} CPU cores, {rate:,.1f} images/s in "
        f"{recipe.train.precision} (tried: {note}; images in each: {size:,}), without reading"
    )


def describe_sweep(recipe: Recipe) -> str:
    """The trials of a sweep, and the plan of one of them."""
    config = sweep_of(recipe)
    points = points_of(recipe, config)
    grid = "; ".join(map(point_text, points))
    if config.space is None:
        grid = f"learning rates {', '.join(f'{rate:g}' for rate in config.learning_rates)}"
    planned = [(point_name(point), 1, trial_recipe(recipe, point)) for point in points]
    retrainings = (final_recipe(recipe, point, recipe.seed) for point in points)
    longest = max(retrainings, key=lambda retraining: data_facts(retraining).exaflops)
    planned.append(("each retraining, at most", config.seeds, longest))
    return "\n".join([
        f"{len(points)} trials ({grid}), then {config.seeds} runs on the full training set",
        *_cost_table(planned),
        f"\none trial:\n{describe_training(planned[0][2])}",
    ])  # fmt: skip


def _cost_table(planned: list[tuple[str, int, Recipe]]) -> list[str]:
    """A line with the cost of one run for each name, number of runs and recipe; then the sum."""
    last_name = "in all, at most"
    width = max(len(name) for name in (last_name, *(name for name, _, _ in planned)))
    lines = [f"{'':{width}}{'steps':>12}{'exaFLOPs':>12}{'GPU-hours':>12}"]
    row, sums = "{:{}}{:12,.0f}{:12,.4g}{:12,.4g}", [0.0, 0.0, 0.0]
    for name, num_runs, recipe in planned:
        facts = data_facts(recipe)
        costs = facts.total_steps, facts.exaflops, pace_of(recipe).device_hours(facts.exaflops)
        lines.append(row.format(name, width, *costs))
        sums = [total + num_runs * cost for total, cost in zip(sums, costs, strict=True)]
    return [*lines, row.format(last_name, width, *sums)]


def _num_runs(recipe: Recipe) -> int:
    # A fine-tuning is one run; with a sweep, its trials and retrainings.
    return len(points_of(recipe, recipe.sweep)) + recipe.sweep.seeds if recipe.sweep else 1


def describe_vtab(recipe: Recipe) -> str:
    """The cost of a run of each task, and of all runs; names the tasks without data.

    Raises:
        ValueError: no task has data, and `plan` gives no counts of images and classes.
    """
    from vit_ray.experiments import vtab  # Tune, which no other dry run needs

    recipes = {task.name: vtab.task_recipe(recipe, task) for task in vtab.vtab_of(recipe).tasks}
    tuned = recipes if recipe.plan.num_images is not None else vtab.with_data(recipes)
    planned = [(name, _num_runs(one), one) for name, one in tuned.items()]
    missing = ", ".join(name for name in recipes if name not in tuned)
    return "\n".join([
        f"{sum(runs for _, runs, _ in planned)} runs on {len(tuned)} of {len(recipes)} tasks",
        *_cost_table(planned),
        *([f"no converted data: {missing}"] if missing else []),
    ])  # fmt: skip


@dataclass(frozen=True)
class PlannedCell:
    """A cell on the cluster of `plan`.

    Attributes:
        exaflops: of its pre-training; of a branch only its cool-down, whereas `facts.exaflops` is
            of all steps.
        training_hours: GPU-hours of `exaflops` at `plan.mfu` of the peak, without start-up,
            evaluation and communication.
        transfer_exaflops: of all its fine-tunings.
        transfer_hours: GPU-hours of `transfer_exaflops`.
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
        """GPU-hours of pre-training and fine-tunings."""
        return self.training_hours + self.transfer_hours


def plan_study(recipe: Recipe) -> list[PlannedCell]:
    """Plan every cell, in the order of the recipe; reads manifests and starts nothing.

    Raises:
        ValueError: as `study_cells` and `data_facts`; the device is not known, or a cell has more
            workers than `plan.num_gpus`.
    """
    study, max_gpus, planned = study_of(recipe), recipe.plan.num_gpus, list[PlannedCell]()
    cells = [(cell, data_facts(cell.recipe)) for cell in study_cells(recipe)]
    cells_and_steps = [(cell, facts.total_steps) for cell, facts in cells]
    branch_shares = {
        cell.name: 1 - branch_step(cell, steps) / steps
        for _, *branches in in_groups(study, cells_and_steps)
        for cell, steps in branches
    }
    for cell, facts in cells:
        sizes = cell.recipe.group_sizes
        fitting = [size for size in sizes if max_gpus is None or size <= max_gpus]
        if not fitting:
            raise ValueError(
                f"plan.num_gpus={max_gpus}: cell {cell.name!r} needs {sizes[0]} GPUs, one per "
                f"worker (workers.num_workers={cell.recipe.workers.num_workers}); raise "
                "plan.num_gpus, or lower workers.num_workers"
            )
        check_batch(cell.recipe, facts.num_images)
        exaflops = facts.exaflops * branch_shares.get(cell.name, 1.0)
        hours = pace_of(cell.recipe).device_hours(exaflops)
        transfer_exaflops = transfer_hours = 0.0
        for task in study.transfer:
            tuned = task_recipe(cell, task)
            task_exaflops = _num_runs(tuned) * data_facts(tuned).exaflops
            transfer_exaflops += task_exaflops
            transfer_hours += pace_of(tuned).device_hours(task_exaflops)
        planned.append(
            PlannedCell(
                cell, facts, fitting[-1], exaflops, hours, transfer_exaflops, transfer_hours
            )
        )
    return planned


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
    for planned in cells:
        facts = planned.facts
        table.append((
            planned.cell.name, f"{facts.num_images:,}", f"{facts.total_steps:,}",
            f"{facts.exaflops:,.4g}", str(planned.num_gpus), f"{planned.gpu_hours:,.4g}",
            *([f"{planned.transfer_hours:,.4g}"] if transfers else []),
            f"{planned.gpu_hours / planned.num_gpus:,.4g}",
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    # Steps that branches share count once.
    exaflops = sum(cell.exaflops for cell in cells)
    hours = sum(cell.training_hours for cell in cells)
    transfer_exaflops = sum(cell.transfer_exaflops for cell in cells)
    transfer_hours = sum(cell.transfer_hours for cell in cells)
    sources = ", ".join(dict.fromkeys(cell.facts.source for cell in cells))
    unit = f"{config.device}-hours"
    return "\n".join([
        *("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
          for row in table),
        "",
        f"total          {len(cells)} cells, {exaflops + transfer_exaflops:,.4g} exaFLOPs, "
        f"{hours + transfer_hours:,.4g} {unit} at {config.mfu * 100:g} % MFU, without starting, "
        "evaluation and communication",
        f"pre-training   {exaflops:,.4g} exaFLOPs, {hours:,.4g} {unit}",
        *([f"transfer       {transfer_exaflops:,.4g} exaFLOPs, {transfer_hours:,.4g} {unit}"]
          if transfers else []),
        f"images         {sources}",
    ])  # fmt: skip
