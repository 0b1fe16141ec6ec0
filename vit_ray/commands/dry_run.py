"""What `--dry-run` prints for a training, a sweep, VTAB and a study; starts nothing."""

import os
import time
from dataclasses import dataclass
from typing import Final

import torch
from joblib import cpu_count

from vit_ray.commands.plan import (
    PlannedCluster,
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
from vit_ray.training.memory_estimate import (
    estimate_memory,
    forward_pass,
    largest_micro_batch,
    prepared_model,
    step_macs,
)
from vit_ray.training.steps import accumulation_steps, micro_batch_size

# Multiply-adds of a pass that is tried here: some seconds, in bf16 on CPUs that emulate it.
_MOST_MACS: Final = 5e9


def describe_training(recipe: Recipe) -> str:
    """Steps, batch, memory and compute of a training; reads the manifest and starts nothing.

    Raises:
        ValueError: as `resolve_run`; `data.train` may be a placeholder if `plan` gives the counts.
    """
    facts = data_facts(recipe)
    check_batch(recipe, facts.num_images)
    cluster = planned_cluster(recipe)
    lines = describe_work(recipe, facts, cluster)
    sizes = recipe.group_sizes
    for world_size in sizes if len(sizes) <= 4 else (sizes[0], sizes[-1]):
        lines += _describe_group(recipe, facts, cluster, world_size)
    lines.append(f"planned for             {recipe.plan.device} (plan.device)")
    has_gpu = torch.cuda.is_available() or recipe.workers.use_gpu is True
    if not has_gpu and "RAY_ADDRESS" not in os.environ:
        lines.append(f"this machine, no GPU    {_time_here(recipe, facts)}")
    return "\n".join(lines)


def _describe_group(
    recipe: Recipe, facts: TrainingFacts, cluster: PlannedCluster, world_size: int
) -> list[str]:
    """Lines on the batch and the memory of a number of workers."""
    batch, note = recipe.train.global_batch_size, ""
    if recipe.train.micro_batch_size != "auto" or recipe.workers.use_gpu is False:
        micro = micro_batch_size(recipe, world_size)
    else:  # decided only by trying
        memory_gib = cluster.device.memory_gib
        largest = largest_micro_batch(recipe, facts.num_classes, world_size, memory_gib)
        fits = "the most that fits a {}, by estimate" if largest else "does not fit a {}"
        micro, note = largest or 1, f" ({fits.format(recipe.plan.device)})"
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
    """The time of the training on the CPUs of this machine, by the second of two passes.

    Of a model too large to try, by its multiply-adds at the rate of a ViT-Ti/16.
    """
    macs = step_macs(recipe, facts.num_classes)
    tried, note = recipe, "two passes"
    if macs > _MOST_MACS:
        small = ModelConfig(name="ViT-Ti/16", image_size=224)
        optim = recipe.optim.model_copy(update={"frozen": ()})  # names of the recipe's own model
        tried = recipe.model_copy(update={"model": small, "optim": optim})
        note = "two passes of a ViT-Ti/16"
    tried_macs = step_macs(tried, facts.num_classes)
    size = min(int(_MOST_MACS // tried_macs), recipe.train.global_batch_size)
    size = max(size - size % recipe.train.least_pass, recipe.train.least_pass)
    device = torch.device("cpu")
    model = prepared_model(tried, facts.num_classes, device)
    forward = forward_pass(model, tried, size, device)
    pass_s = 0.0
    for _ in range(2):
        start_s = time.perf_counter()
        forward().backward()  # type: ignore[no-untyped-call]
        pass_s = time.perf_counter() - start_s
    rate = size / pass_s * tried_macs / macs
    total_s = facts.total_steps * recipe.train.global_batch_size / rate
    return (
        f"about {clock(total_s)} on {cpu_count()} CPU cores, {rate:,.1f} images/s in "
        f"{recipe.train.precision} (tried: {note}; images in each: {size:,}), without reading"
    )


def describe_sweep(recipe: Recipe) -> str:
    """The trials of a sweep, and the plan of one of them."""
    config = sweep_of(recipe)
    points = points_of(recipe, config)
    tried = "; ".join(map(point_text, points))
    if config.space is None:
        tried = f"learning rates {', '.join(f'{rate:g}' for rate in config.learning_rates)}"
    planned = [(point_name(point), 1, trial_recipe(recipe, point)) for point in points]
    retrained = [final_recipe(recipe, point, recipe.seed) for point in points]
    dearest = max(retrained, key=lambda one: data_facts(one).exaflops)
    planned.append(("each retraining, at most", config.seeds, dearest))
    return "\n".join([
        f"{len(points)} trials ({tried}), then {config.seeds} runs on the full training set",
        *_cost_table(planned),
        f"\none trial:\n{describe_training(planned[0][2])}",
    ])  # fmt: skip


def _cost_table(planned: list[tuple[str, int, Recipe]]) -> list[str]:
    """A line for each name with what one of its runs costs, and the sum over all runs."""
    whole = "in all, at most"
    width = max(len(name) for name in (whole, *(name for name, _, _ in planned)))
    lines = [f"{'':{width}}{'steps':>12}{'exaFLOPs':>12}{'GPU-hours':>12}"]
    row, sums = "{:{}}{:12,.0f}{:12,.4g}{:12,.4g}", [0.0, 0.0, 0.0]
    for name, runs, one in planned:
        facts = data_facts(one)
        hours = pace_of(one).device_hours(facts.exaflops)
        figures = facts.total_steps, facts.exaflops, hours
        lines.append(row.format(name, width, *figures))
        sums = [known + runs * figure for known, figure in zip(sums, figures, strict=True)]
    return [*lines, row.format(whole, width, *sums)]


def describe_vtab(recipe: Recipe) -> str:
    """What a run of each task costs, and all of them; names the tasks that have no data.

    Raises:
        ValueError: no task has data, and `plan` gives no counts of images and classes.
    """
    from vit_ray.experiments import vtab  # Tune, which no other dry run needs

    recipes = {task.name: vtab.task_recipe(recipe, task) for task in vtab.vtab_of(recipe).tasks}
    has_counts = recipe.plan.num_images is not None
    there = recipes if has_counts else vtab.with_data(recipes)
    planned = []
    for name, one in there.items():
        runs = len(points_of(one, one.sweep)) + one.sweep.seeds if one.sweep else 1
        planned.append((name, runs, one))
    absent = ", ".join(name for name in recipes if name not in there)
    runs = sum(runs for _, runs, _ in planned)
    return "\n".join([
        f"{runs} runs on {len(planned)} of {len(recipes)} tasks",
        *_cost_table(planned),
        *([f"no converted data: {absent}"] if absent else []),
    ])  # fmt: skip


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
    study, most, planned = study_of(recipe), recipe.plan.num_gpus, list[PlannedCell]()
    cells = [(cell, data_facts(cell.recipe)) for cell in study_cells(recipe)]
    pairs = [(cell, facts.total_steps) for cell, facts in cells]
    trained_shares = {
        cell.name: 1 - branch_step(cell, steps) / steps
        for _, *branches in in_groups(study, pairs)
        for cell, steps in branches
    }
    for cell, facts in cells:
        sizes = cell.recipe.group_sizes
        fitting = [size for size in sizes if most is None or size <= most]
        if not fitting:
            raise ValueError(
                f"plan.num_gpus={most}: cell {cell.name!r} needs {sizes[0]} GPUs, one per worker "
                f"(workers.num_workers={cell.recipe.workers.num_workers}); raise plan.num_gpus, or "
                "lower workers.num_workers"
            )
        check_batch(cell.recipe, facts.num_images)
        exaflops = facts.exaflops * trained_shares.get(cell.name, 1.0)
        hours = pace_of(cell.recipe).device_hours(exaflops)
        transfer_exaflops = transfer_hours = 0.0
        for task in study.transfer:
            tuned = task_recipe(cell, task)
            num_runs = len(points_of(tuned, tuned.sweep)) + tuned.sweep.seeds if tuned.sweep else 1
            of_task = num_runs * data_facts(tuned).exaflops
            transfer_exaflops += of_task
            transfer_hours += pace_of(tuned).device_hours(of_task)
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
