"""The cost of recipes before anything starts: `vit-ray plan`, and `--dry-run` of trainings, sweeps,
VTAB and studies.

Memory is counted on models on the meta device; time follows from data sheets. Neither GPU nor Ray
is needed, and no data if the recipe sets `plan.num_images` and `plan.num_classes`.
"""

import itertools
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from joblib import cpu_count

from vit_ray.addresses import PLACEHOLDER, is_placeholder
from vit_ray.config import Recipe
from vit_ray.config.training_sections import ModelConfig
from vit_ray.data.order import divisors
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
    branch_step,
    in_groups,
    study_cells,
    study_of,
    task_recipe,
)
from vit_ray.launch.resolved_run import check_batch, check_model, resolve_run
from vit_ray.measure.devices import DAY_S, Device, require_device
from vit_ray.models.flops import forward_macs
from vit_ray.storage import locate
from vit_ray.training.memory_estimate import (
    count_parameters,
    estimate_memory,
    forward_pass,
    largest_micro_batch,
    prepared_model,
    run_exaflops,
    step_macs,
)
from vit_ray.training.steps import accumulation_steps, micro_batch_size

# CPU seconds to read an image, benchmarks/results/data_stream_pair_cpu_2026-11-28.md.
_READING_S: Final = 0.92e-3
# Multiply-adds of a measured pass: a few seconds, in bf16 on CPUs that emulate it.
_MAX_MACS: Final = 5e9


@dataclass(frozen=True)
class PlannedRuns:
    """Equal trainings: the counts of their data, and the work of each.

    Attributes:
        source: of the two counts: the data set, or the recipe's key.
        exaflops: that each training computes itself: of a branch, those of its cool-down.
        name: of the row in a table of costs.
    """

    recipe: Recipe
    num_images: int
    num_classes: int
    source: str
    total_steps: int
    exaflops: float
    name: str = ""
    num_runs: int = 1

    @property
    def costs(self) -> tuple[int, float, float]:
        """Steps, exaFLOPs and GPU-hours of one, without start-up, evaluation and communication."""
        return self.total_steps, self.exaflops, gpu_hours(self.recipe, self.exaflops)


def planned_runs(
    recipe: Recipe, name: str = "", num_runs: int = 1, *, prefers_plan: bool = False
) -> PlannedRuns:
    """Trainings on the data set in `data.train`; if that does not exist yet, on that of `plan`.

    Args:
        prefers_plan: take the counts in `plan` in any case, and open no data set.

    Raises:
        ValueError: there is no such model; the batch does not divide, or does not fit the data; the
            data set is broken, or nothing gives the counts.
    """
    source = recipe.data.train or PLACEHOLDER
    if prefers_plan or is_placeholder(source) or not locate(source).exists():
        num_images, num_classes = recipe.plan.num_images, recipe.plan.num_classes
        if num_images is None or num_classes is None:
            raise ValueError(
                f"data.train={recipe.data.train!r} is not a data set, or one of "
                f"plan.num_images={num_images} and plan.num_classes={num_classes} is missing; give "
                "both counts, or neither and the folder of a converted set"
            )
        check_model(recipe)
        kept = num_images - round(num_images * recipe.data.held_out_fraction)
        num_images, source = round(kept * recipe.data.fraction), "plan.num_images"
        check_batch(recipe, num_images)
    else:
        resolved = resolve_run(recipe)
        num_images, num_classes = resolved.num_images, resolved.manifest.num_classes
    batch = recipe.train.global_batch_size
    steps = recipe.optim.total_steps(num_images, batch)
    exaflops = run_exaflops(recipe, num_classes, steps * batch)
    return PlannedRuns(recipe, num_images, num_classes, source, steps, exaflops, name, num_runs)


def planned_cluster(recipe: Recipe) -> tuple[Device, int]:
    """The device of the recipe's `plan` section, and the number of GPUs; by default, of workers.

    Raises:
        ValueError: the device is not known, or the number of GPUs does not divide the batch.
    """
    plan, batch = recipe.plan, recipe.train.global_batch_size
    device = require_device(plan.device, "plan.device")
    num_gpus = plan.num_gpus or recipe.group_sizes[-1]
    if batch % num_gpus:
        raise ValueError(
            f"plan.num_gpus={num_gpus} does not divide train.global_batch_size={batch}; use "
            f"{max(n for n in divisors(batch) if n <= num_gpus)} or another divisor"
        )
    return device, num_gpus


def gpu_flops_per_s(recipe: Recipe) -> float:
    """Model FLOP/s that one GPU of `plan` is assumed to reach over a whole step.

    Raises:
        ValueError: the device is not known.
    """
    device = require_device(recipe.plan.device, "plan.device")
    return recipe.plan.mfu * device.peak_flops(recipe.train.precision)


def gpu_hours(recipe: Recipe, exaflops: float) -> float:
    """Hours of one GPU of `plan` for this many 10^18 model FLOPs."""
    return exaflops * 1e18 / gpu_flops_per_s(recipe) / 3600


def describe_plan(recipe: Recipe) -> str:
    """The text of `vit-ray plan`: the work, then a column for each ZeRO stage."""
    has_counts = bool(recipe.plan.num_images or recipe.plan.num_classes)
    planned = planned_runs(recipe, prefers_plan=has_counts)
    _, num_gpus = planned_cluster(recipe)
    lines = _work(planned, [(num_gpus, stage) for stage in range(4)])
    step_flops = 2 * step_macs(recipe, planned.num_classes)
    cpus = math.ceil(num_gpus * gpu_flops_per_s(recipe) / step_flops * _READING_S)
    lines += [
        "",
        "sizes, as marked in cluster/rayjob.yaml",
        f"  workers.num_workers   {num_gpus}",
        f"  maxReplicas           {math.ceil(num_gpus / 8)} nodes of 8 GPUs",
        f"  CPUs that read        {cpus}, which workers leave free or in the group cpu "
        f"({_READING_S * 1e3:g} ms for a crop of 224 px)",
        "  object-store-memory   at most 30 % of a node's memory; sizeLimit a tenth above it",
    ]
    return "\n".join(lines)


def describe_training(recipe: Recipe) -> str:
    """Steps, batch, memory and compute of a training; reads the manifest and starts nothing.

    Raises:
        ValueError: as `resolve_run`; `data.train` may be a placeholder if `plan` gives the counts.
    """
    planned = planned_runs(recipe)
    sizes = recipe.group_sizes
    shown = sizes if len(sizes) <= 4 else [sizes[0], sizes[-1]]
    lines = _work(planned, [(size, recipe.train.zero_stage) for size in shown])
    uses_gpu = torch.cuda.is_available() or recipe.workers.use_gpu is True
    if not uses_gpu and "RAY_ADDRESS" not in os.environ:
        lines += ["", f"this machine, no GPU    {_time_here(planned)}"]
    return "\n".join(lines)


def _work(planned: PlannedRuns, groups: Sequence[tuple[int, int]]) -> list[str]:
    """Lines on images, steps, model, exaFLOPs and device hours, and a table of groups of workers.

    Args:
        groups: number of workers and ZeRO stage of each column.
    """
    recipe, num_classes = planned.recipe, planned.num_classes
    device, num_gpus = planned_cluster(recipe)
    model, plan, batch = recipe.model, recipe.plan, recipe.train.global_batch_size
    epochs = planned.total_steps * batch / planned.num_images
    parameters = count_parameters(recipe, num_classes)
    macs = forward_macs(model.name, num_classes, model.image_size, **model.options())
    hours = gpu_hours(recipe, planned.exaflops)
    columns = [_column(planned, device, size, stage) for size, stage in groups]
    device_time = f"{hours:,.4g} {plan.device}-hours"
    if hours < 0.1:
        device_time = f"{60 * hours:.2g} {plan.device}-minutes"
    return [
        f"images                  {planned.num_images:,} of {num_classes:,} classes "
        f"({planned.source})",
        f"steps                   {planned.total_steps:,} of {batch:,} images: {epochs:.2f} epochs",
        f"model                   {model.name}: {parameters / 1e6:.1f} M parameters, "
        f"{macs / 1e9:.4g} GMAC per image",
        f"training                {planned.exaflops:,.4g} exaFLOPs, "
        f"{device_time} at {plan.mfu * 100:g} % MFU",
        f"cluster                 {num_gpus} x {plan.device}, {device.memory_gib:.4g} GiB each",
        "",
        *(
            f"{cells[0][0]:<30}" + "".join(f"{value:>10}" for _, value in cells)
            for cells in zip(*columns, strict=True)
            if {value for _, value in cells} - {"0.0", "0.00", "0.000"}
        ),
    ]


def _column(
    planned: PlannedRuns, device: Device, num_gpus: int, stage: int
) -> list[tuple[str, str]]:
    """Name and value of each row of the table for one group of workers.

    Raises:
        ValueError: the recipe's micro-batch does not divide a worker's part of the batch.
    """
    recipe, num_classes = planned.recipe, planned.num_classes
    batch, workers = recipe.train.global_batch_size, recipe.workers
    largest = largest_micro_batch(recipe, num_classes, num_gpus, device.memory_gib, stage)
    is_tried = recipe.train.micro_batch_size == "auto" and workers.use_gpu is not False
    micro = largest or 1 if is_tried else micro_batch_size(recipe, num_gpus)
    memory = estimate_memory(recipe, num_classes, micro, num_gpus, stage)
    step_flops = 2 * step_macs(recipe, num_classes) * batch
    step_s = step_flops / num_gpus / gpu_flops_per_s(recipe)
    days = step_s * planned.total_steps / DAY_S
    return [
        ("workers", str(num_gpus)),
        ("ZeRO stage", str(stage)),
        ("largest micro-batch", str(largest or "none")),
        ("planned micro-batch", str(micro)),
        ("passes per step", str(accumulation_steps(batch, micro, num_gpus))),
        ("GiB per GPU, total", f"{memory.total:.2f}"),
        *((f"  {part}", f"{gib:.2f}") for part, gib in vars(memory).items()),
        ("step in s", f"{step_s:.3f}"),
        ("images per s and GPU", f"{batch / step_s / num_gpus:.0f}"),
        ("run in days", f"{days:.2f}"),
        ("core-days (GPU-days)", f"{days * num_gpus:.1f}"),
    ]


def _time_here(planned: PlannedRuns) -> str:
    """The time of the training on the CPUs of this machine, from the second of two passes.

    A model that is too large to try is timed by its multiply-adds at the rate of a ViT-Ti/16.
    """
    recipe, num_classes = planned.recipe, planned.num_classes
    macs, measured, note = step_macs(recipe, num_classes), recipe, "two passes"
    if macs > _MAX_MACS:
        model = ModelConfig(name="ViT-Ti/16", image_size=224)
        optim = recipe.optim.model_copy(update={"frozen": ()})  # it names layers of the large model
        measured = recipe.model_copy(update={"model": model, "optim": optim})
        note = "two passes of a ViT-Ti/16"
    measured_macs = step_macs(measured, num_classes)
    size = min(int(_MAX_MACS // measured_macs), recipe.train.global_batch_size)
    size = max(size - size % recipe.train.pass_multiple, recipe.train.pass_multiple)
    device, pass_s = torch.device("cpu"), 0.0
    network = prepared_model(measured, num_classes, device)
    forward = forward_pass(network, measured, size, device)
    for _ in range(2):
        start_s = time.perf_counter()
        forward().backward()  # type: ignore[no-untyped-call]
        pass_s = time.perf_counter() - start_s
    rate = size / pass_s * measured_macs / macs
    total_s = planned.total_steps * recipe.train.global_batch_size / rate
    return (
        f"about {clock(total_s)} on {cpu_count()} CPU cores, {rate:,.1f} images/s in "
        f"{recipe.train.precision} (tried: {note}; images in each: {size:,}), without reading"
    )


def _num_runs(recipe: Recipe) -> int:
    # A fine-tuning is one run; with a sweep, its trials and retrainings.
    return len(points_of(recipe, recipe.sweep)) + recipe.sweep.seeds if recipe.sweep else 1


def _cost_table(planned: Sequence[PlannedRuns]) -> list[str]:
    """A line with the costs of one run for each row, and the sums over all runs."""
    total, form = "in all, at most", "{:{}}{:>14}{:12,.0f}{:12,.4g}{:12,.4g}"
    width = max(len(total), *(len(row.name) for row in planned))
    sums = [sum(row.num_runs * row.costs[column] for row in planned) for column in range(3)]
    return [
        f"{'':{width}}{'images':>14}{'steps':>12}{'exaFLOPs':>12}{'GPU-hours':>12}",
        *(form.format(row.name, width, f"{row.num_images:,}", *row.costs) for row in planned),
        form.format(total, width, "", *sums),
    ]


def describe_sweep(recipe: Recipe) -> str:
    """The trials of a sweep, and the plan of one of them."""
    config = sweep_of(recipe)
    points = points_of(recipe, config)
    grid = "; ".join(map(point_text, points))
    if config.space is None:
        grid = f"learning rates {', '.join(f'{rate:g}' for rate in config.learning_rates)}"
    trials = [planned_runs(trial_recipe(recipe, point), point_name(point)) for point in points]
    retrainings = [
        planned_runs(final_recipe(recipe, point, recipe.seed), "each retraining, at most")
        for point in points
    ]
    longest = max(retrainings, key=lambda row: row.exaflops)
    return "\n".join([
        f"{len(points)} trials ({grid}), then {config.seeds} runs on the full training set",
        *_cost_table([*trials, replace(longest, num_runs=config.seeds)]),
        f"\none trial:\n{describe_training(trials[0].recipe)}",
    ])  # fmt: skip


def describe_vtab(recipe: Recipe) -> str:
    """The cost of a run of each task, and of all runs; names the tasks without data.

    Raises:
        ValueError: no task has data, and `plan` gives no counts of images and classes.
    """
    from vit_ray.experiments import vtab  # Tune, which no other plan needs

    recipes = {task.name: vtab.task_recipe(recipe, task) for task in vtab.vtab_of(recipe).tasks}
    tuned = recipes if recipe.plan.num_images is not None else vtab.with_data(recipes)
    planned = [planned_runs(run, name, _num_runs(run)) for name, run in tuned.items()]
    missing = ", ".join(name for name in recipes if name not in tuned)
    return "\n".join([
        f"{sum(row.num_runs for row in planned)} runs on {len(tuned)} of {len(recipes)} tasks",
        *_cost_table(planned),
        *([f"no converted data: {missing}"] if missing else []),
    ])  # fmt: skip


def plan_study(recipe: Recipe) -> tuple[list[PlannedRuns], list[PlannedRuns]]:
    """Every cell and every fine-tuning, in the order of the recipe; reads manifests and starts
    nothing.

    Raises:
        ValueError: as `study_cells` and `planned_runs`; the device is not known.
    """
    study, cells = study_of(recipe), study_cells(recipe)
    trained = {cell.name: planned_runs(cell.recipe, cell.name) for cell in cells}
    with_steps = [replace(cell, steps=trained[cell.name].total_steps) for cell in cells]
    for _, *branches in in_groups(study, with_steps):
        for cell in branches:
            row, share = trained[cell.name], 1 - branch_step(cell) / cell.steps
            trained[cell.name] = replace(row, exaflops=share * row.exaflops)
    transfers = list[PlannedRuns]()
    for cell, task in itertools.product(cells, study.transfer):
        tuned = task_recipe(cell, task)
        transfers.append(planned_runs(tuned, f"{cell.name} {task.name}", _num_runs(tuned)))
    return list(trained.values()), transfers


def describe_study(recipe: Recipe) -> str:
    """Every cell and fine-tuning with images, steps, compute and hours; starts nothing.

    Raises:
        ValueError: as `plan_study`.
    """
    (cells, transfers), plan = plan_study(recipe), recipe.plan
    sources = ", ".join(dict.fromkeys(row.source for row in cells))
    return "\n".join([
        *_cost_table(cells),
        *(["", "transfers", *_cost_table(transfers)] if transfers else []),
        "",
        f"{plan.device} at {plan.mfu * 100:g} % MFU, without start, evaluation and communication; "
        f"images as in {sources}",
    ])  # fmt: skip
