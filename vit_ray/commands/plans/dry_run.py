"""What `--dry-run` prints in addition to the resolved recipe: steps, batches, memory, exaFLOPs."""

import os
import time
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
from vit_ray.launch.resolved_run import check_batch
from vit_ray.training.memory_estimate import (
    estimate_memory,
    forward_pass,
    largest_micro_batch,
    prepared_model,
    step_macs,
)
from vit_ray.training.steps import accumulation_steps, micro_batch_size

_MOST_MACS: Final = 5e9
"""Multiply-adds of a pass that is tried here: some seconds, in bf16 on CPUs that emulate it."""


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


def _describe_group(
    recipe: Recipe, facts: TrainingFacts, cluster: PlannedCluster, world_size: int
) -> list[str]:
    batch = recipe.train.global_batch_size
    micro, note = _micro_batch(recipe, facts, cluster, world_size)
    passes = accumulation_steps(batch, micro, world_size)
    memory = estimate_memory(recipe, facts.num_classes, micro, world_size)
    workers = f"{world_size} worker{'s' if world_size > 1 else ''}"
    return [
        f"with {workers:<19}global batch {batch:,} = {world_size} x micro-batch {micro}{note} x "
        f"{passes} pass{'es' if passes > 1 else ''}",
        f"  memory per worker     {memory.total:.2f} GiB under ZeRO {recipe.train.zero_stage}",
        *(f"    {part:<20}{gib:8.2f} GiB" for part, gib in vars(memory).items() if gib >= 0.005),
    ]


def _micro_batch(
    recipe: Recipe, facts: TrainingFacts, cluster: PlannedCluster, world_size: int
) -> tuple[int, str]:
    """Images per pass, and a note if `auto` is decided only by trying."""
    is_auto = recipe.train.micro_batch_size == "auto"
    if not is_auto or recipe.workers.use_gpu is False:
        return micro_batch_size(recipe, world_size), ""
    largest = largest_micro_batch(recipe, facts.num_classes, world_size, cluster.device.memory_gib)
    if largest is None:
        return 1, f" (does not fit a {recipe.plan.device})"
    return largest, f" (the most that fits a {recipe.plan.device}, by estimate)"


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
    width = max(len(name) for name, _, _ in planned)
    lines = [f"{'':{width}}{'steps':>12}{'exaFLOPs':>12}{'GPU-hours':>12}"]
    row, sums = "{:{}}{:12,.0f}{:12,.4g}{:12,.4g}", [0.0, 0.0, 0.0]
    for name, runs, one in planned:
        facts = data_facts(one)
        hours = pace_of(one).device_hours(facts.exaflops)
        figures = facts.total_steps, facts.exaflops, hours
        lines.append(row.format(name, width, *figures))
        sums = [known + runs * figure for known, figure in zip(sums, figures, strict=True)]
    lines.append(row.format("in all, at most", width, *sums))
    return "\n".join([
        f"{len(points)} trials ({tried}), then {config.seeds} runs on the full training set",
        *lines,
        f"\none trial:\n{describe_training(planned[0][2])}",
    ])  # fmt: skip
