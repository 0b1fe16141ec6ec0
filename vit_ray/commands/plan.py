"""The cost of a recipe on a cluster, for every ZeRO stage, before anything starts.

Memory is counted on models on the meta device; time follows from data sheets. Neither GPU nor Ray
is needed, and no data if the recipe sets `plan.num_images` and `plan.num_classes`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vit_ray.addresses import PLACEHOLDER, is_placeholder
from vit_ray.config import Recipe
from vit_ray.data.order import divisors
from vit_ray.launch.resolved_run import check_model, resolve_run
from vit_ray.measure.devices import DAY_S, Device, require_device
from vit_ray.models.flops import forward_macs
from vit_ray.storage import locate
from vit_ray.training.memory_estimate import (
    count_parameters,
    estimate_memory,
    largest_micro_batch,
    run_exaflops,
    step_macs,
)
from vit_ray.training.steps import accumulation_steps, micro_batch_size

# CPU seconds to read an image, benchmarks/results/data_stream_pair_cpu_2026-11-28.md.
_READING_S: Final = 0.92e-3


@dataclass(frozen=True)
class TrainingFacts:
    """The counts of the training data, and the work that follows from them.

    Attributes:
        source: of the two counts: the data set, or the recipe's key.
    """

    num_images: int
    num_classes: int
    source: str
    total_steps: int
    exaflops: float


def data_facts(recipe: Recipe, prefers_plan: bool = False) -> TrainingFacts:
    """The facts from the data set in `data.train`; if that does not exist yet, from `plan`.

    Args:
        prefers_plan: take the counts in `plan` in any case, and open no data set.

    Raises:
        ValueError: there is no such model; the data set is broken, or nothing gives the counts.
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
    else:
        resolved = resolve_run(recipe)
        num_images, num_classes = resolved.num_images, resolved.manifest.num_classes
    batch = recipe.train.global_batch_size
    steps = recipe.optim.total_steps(num_images, batch)
    exaflops = run_exaflops(recipe, num_classes, steps * batch)
    return TrainingFacts(num_images, num_classes, source, steps, exaflops)


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
    facts = data_facts(recipe, prefers_plan=bool(recipe.plan.num_images or recipe.plan.num_classes))
    _, num_gpus = planned_cluster(recipe)
    stages = [(num_gpus, stage) for stage in range(4)]
    lines = describe_work(recipe, facts, stages)
    images_per_s = num_gpus * gpu_flops_per_s(recipe) / (2 * step_macs(recipe, facts.num_classes))
    cpus = math.ceil(images_per_s * _READING_S)
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


def describe_work(
    recipe: Recipe, facts: TrainingFacts, groups: Sequence[tuple[int, int]]
) -> list[str]:
    """Lines on images, steps, model, exaFLOPs and device hours, and a table of groups of workers.

    Args:
        groups: number of workers and ZeRO stage of each column.
    """
    device, num_gpus = planned_cluster(recipe)
    model, batch = recipe.model, recipe.train.global_batch_size
    epochs = facts.total_steps * batch / facts.num_images
    parameters = count_parameters(recipe, facts.num_classes)
    macs = forward_macs(model.name, facts.num_classes, model.image_size, **model.options())
    hours = gpu_hours(recipe, facts.exaflops)
    columns = [_column(recipe, facts, device, size, stage) for size, stage in groups]
    time = f"{hours:,.4g} {recipe.plan.device}-hours"
    if hours < 0.1:
        time = f"{60 * hours:.2g} {recipe.plan.device}-minutes"
    return [
        f"images                  {facts.num_images:,} of {facts.num_classes:,} classes "
        f"({facts.source})",
        f"steps                   {facts.total_steps:,} of {batch:,} images: {epochs:.2f} epochs",
        f"model                   {model.name}: {parameters / 1e6:.1f} M parameters, "
        f"{macs / 1e9:.4g} GMAC per image",
        f"training                {facts.exaflops:,.4g} exaFLOPs, "
        f"{time} at {recipe.plan.mfu * 100:g} % MFU",
        f"cluster                 {num_gpus} x {recipe.plan.device}, "
        f"{device.memory_gib:.4g} GiB each",
        "",
        *(
            f"{cells[0][0]:<30}" + "".join(f"{value:>10}" for _, value in cells)
            for cells in zip(*columns, strict=True)
            if {value for _, value in cells} - {"0.0", "0.00", "0.000"}
        ),
    ]


def _column(
    recipe: Recipe, facts: TrainingFacts, device: Device, num_gpus: int, stage: int
) -> list[tuple[str, str]]:
    """Name and value of each row of the table for one group of workers.

    Raises:
        ValueError: the recipe's micro-batch does not divide a worker's part of the batch.
    """
    batch, workers = recipe.train.global_batch_size, recipe.workers
    largest = largest_micro_batch(recipe, facts.num_classes, num_gpus, device.memory_gib, stage)
    is_tried = recipe.train.micro_batch_size == "auto" and workers.use_gpu is not False
    micro = largest or 1 if is_tried else micro_batch_size(recipe, num_gpus)
    passes = accumulation_steps(batch, micro, num_gpus)
    memory = estimate_memory(recipe, facts.num_classes, micro, num_gpus, stage)
    step_flops = 2 * step_macs(recipe, facts.num_classes) * batch
    step_s = step_flops / num_gpus / gpu_flops_per_s(recipe)
    days = step_s * facts.total_steps / DAY_S
    return [
        ("workers", str(num_gpus)),
        ("ZeRO stage", str(stage)),
        ("largest micro-batch", str(largest or "none")),
        ("planned micro-batch", str(micro)),
        ("passes per step", str(passes)),
        ("GiB per GPU, total", f"{memory.total:.2f}"),
        *((f"  {part}", f"{gib:.2f}") for part, gib in vars(memory).items()),
        ("step in s", f"{step_s:.3f}"),
        ("images per s and GPU", f"{batch / step_s / num_gpus:.0f}"),
        ("run in days", f"{days:.2f}"),
        ("core-days (GPU-days)", f"{days * num_gpus:.1f}"),
    ]
