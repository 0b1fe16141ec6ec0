"""What a recipe costs on a cluster, for every ZeRO stage, before anything starts.

Memory is counted on models of the meta device, traffic and time by data sheets; no GPU and no Ray
are needed, and no data if the recipe sets `plan.num_images` and `plan.num_classes`.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

from vit_ray.addresses import PLACEHOLDER, is_placeholder
from vit_ray.config import Recipe
from vit_ray.config.command_sections import ConvertConfig
from vit_ray.config.training_sections import accumulation_steps
from vit_ray.data.convert.estimate import estimate_conversion
from vit_ray.data.convert.files import is_pattern
from vit_ray.data.partition import divisors
from vit_ray.data.stream.batches import TASK_MEMORY_MIB
from vit_ray.launch.inputs.shuffle_window import most_rows
from vit_ray.launch.inputs.streams import resolve_run
from vit_ray.launch.model_checks import averaging_warning, check_model
from vit_ray.measure.devices import Device, require_device
from vit_ray.measure.memory import MemoryEstimate, shared_reading_mib
from vit_ray.measure.step_time import (
    DAY_S,
    Pace,
    Traffic,
    traffic_per_step,
)
from vit_ray.models.flops import forward_macs
from vit_ray.storage import locate
from vit_ray.training.largest_batch import largest_micro_batch
from vit_ray.training.memory_estimate import (
    count_parameters,
    estimate_memory,
    run_exaflops,
    state_shape,
    step_macs,
)

STAGES = (0, 1, 2, 3)
TASK_IMAGES: Final = 1024
"""Consecutive images of the order that a reading task has, about (`partition.read_tasks`): some
have up to 2,048, and read less."""
GPUS_PER_SERVER: Final = 8
_TIMES_SHOWN: Final = 1.25
GROUP_IMAGES: Final[int] = ConvertConfig.model_fields["rows_per_row_group"].default
BYTES_PER_PIXEL = 12  # of an image that is decoded whole, at most: PNG of 16 bits, or CMYK


@dataclass(frozen=True)
class TrainingFacts:
    """The numbers that the data give a recipe, and the work that follows.

    Attributes:
        source: where the two counts come from.
        largest_pixels: of the largest image; 0 if unknown.
        group_images: mean number of images in a row group.
        num_row_groups: of the whole data set; by `group_images` where it is not there yet.
        window: images of the shuffle window; None where the data set is not there yet.
    """

    num_images: int
    num_classes: int
    source: str
    total_steps: int
    forward_macs: int
    exaflops: float
    largest_pixels: int = 0
    group_images: float = GROUP_IMAGES
    num_row_groups: int = 0
    window: int | None = None


def told_facts(recipe: Recipe) -> TrainingFacts:
    """From `plan.num_images` and `plan.num_classes`, or as `data_facts` if they are not given.

    Raises:
        ValueError: as `data_facts`.
    """
    return data_facts(recipe) if recipe.plan.num_images is None else _told_facts(recipe)


def data_facts(recipe: Recipe) -> TrainingFacts:
    """From the data set in `data.train`; if it does not exist yet, from its source, or from `plan`.

    Raises:
        ValueError: there is no such model; the data set is broken, or nothing gives the counts.
    """
    check_model(recipe)
    train, convert = recipe.data.train, recipe.convert
    path = train or PLACEHOLDER
    if not is_placeholder(path) and locate(path).exists():
        plan = resolve_run(recipe)
        of_set = plan.manifest
        groups, window = of_set.num_row_groups, plan.recipe.data.shuffle_window
        assert window != "auto"
        facts = _facts(recipe, plan.num_images, of_set.num_classes, path, groups)
        return replace(
            facts,
            largest_pixels=of_set.largest_pixels,
            group_images=of_set.num_images / of_set.num_row_groups,
            window=window,
        )
    if convert is None or convert.destination != train:
        return _told_facts(recipe)
    if not is_pattern(convert.source) and not locate(convert.source).exists():
        return _told_facts(recipe)
    found = estimate_conversion(convert)
    how = "counted in" if found.is_exact else "estimated from"
    where = f"{how} {convert.source}, which is not converted yet"
    groups = math.ceil(found.num_images / GROUP_IMAGES)
    return _facts(recipe, _share(recipe, found.num_images), found.num_classes, where, groups)


def _told_facts(recipe: Recipe) -> TrainingFacts:
    plan, train = recipe.plan, recipe.data.train
    if plan.num_images is None or plan.num_classes is None:
        raise ValueError(
            f"data.train={train!r} is not a data set; give the folder of a converted one, or "
            "plan.num_images and plan.num_classes"
        )
    num_images, groups = _share(recipe, plan.num_images), math.ceil(plan.num_images / GROUP_IMAGES)
    return _facts(recipe, num_images, plan.num_classes, "plan.num_images", groups)


def _share(recipe: Recipe, num_images: int) -> int:
    """Images per epoch: all but the held-out ones, and then `data.fraction` of the rest."""
    kept = num_images - round(num_images * recipe.data.held_out_fraction)
    return round(kept * recipe.data.fraction)


def _facts(
    recipe: Recipe, num_images: int, num_classes: int, source: str, num_row_groups: int
) -> TrainingFacts:
    model, batch = recipe.model, recipe.train.global_batch_size
    steps = recipe.optim.total_steps(num_images, batch)
    macs = forward_macs(model.name, num_classes, model.image_size, **model.options())
    exaflops = run_exaflops(recipe, num_classes, steps * batch)
    return TrainingFacts(
        num_images, num_classes, source, steps, macs, exaflops, num_row_groups=num_row_groups
    )


def shared_mib(recipe: Recipe, facts: TrainingFacts) -> float:
    """MiB of manifest and order that the reading tasks of a host share."""
    is_part = recipe.data.fraction < 1 or recipe.data.held_out_fraction > 0
    return shared_reading_mib(facts.num_row_groups, is_part=is_part)


@dataclass(frozen=True)
class PlannedCluster:
    """The cluster that a plan is made for."""

    device: Device
    num_gpus: int
    pace: Pace


def planned_cluster(recipe: Recipe) -> PlannedCluster:
    """The recipe's `plan` section with its unset values filled in.

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
    return PlannedCluster(device, num_gpus, pace_of(recipe))


def pace_of(recipe: Recipe) -> Pace:
    """The speed of one GPU of `plan`, at the peak of the recipe's precision.

    Raises:
        ValueError: the device is not known.
    """
    device = require_device(recipe.plan.device, "plan.device")
    return Pace(device.peak_flops(recipe.train.precision), recipe.plan.mfu)


@dataclass(frozen=True)
class StagePlan:
    """One ZeRO stage on the cluster.

    Attributes:
        largest_micro_batch: None: not even one image fits.
        micro_batch: the recipe's, or the largest; 1 if none fits.
    """

    stage: int
    largest_micro_batch: int | None
    micro_batch: int
    memory: MemoryEstimate
    traffic: Traffic
    step_s: float


def plan_stage(
    recipe: Recipe, facts: TrainingFacts, cluster: PlannedCluster, stage: int
) -> StagePlan:
    """Memory, traffic and time of the recipe under a ZeRO stage.

    Raises:
        ValueError: the recipe's micro-batch does not divide a worker's share.
    """
    batch, size = recipe.train.global_batch_size, cluster.num_gpus
    largest = largest_micro_batch(recipe, facts.num_classes, size, cluster.device.memory_gib, stage)
    wanted = recipe.train.micro_batch_size
    micro = wanted if isinstance(wanted, int) else largest or 1
    passes = accumulation_steps(batch, micro, size)
    traffic = traffic_per_step(state_shape(recipe, facts.num_classes, size, stage), passes)
    macs = step_macs(recipe, facts.num_classes).hardware
    return StagePlan(
        stage,
        largest,
        micro,
        estimate_memory(recipe, facts.num_classes, micro, size, stage),
        traffic,
        cluster.pace.step_s(macs, batch / size),
    )


def describe_plan(recipe: Recipe) -> str:
    """The text of `vit-ray plan`: the work, then a column for each ZeRO stage."""
    facts = told_facts(recipe)
    cluster = planned_cluster(recipe)
    stages = [plan_stage(recipe, facts, cluster, stage) for stage in STAGES]
    table = _stage_table(recipe, facts, stages, cluster)
    return "\n".join([*describe_work(recipe, facts, cluster), "", *table])


def print_plan(recipe: Recipe) -> int:
    """Print `describe_plan`."""
    print(describe_plan(recipe))
    return 0


def describe_work(recipe: Recipe, facts: TrainingFacts, cluster: PlannedCluster) -> list[str]:
    """Lines on images, steps, model, exaFLOPs and device hours."""
    batch, pace = recipe.train.global_batch_size, cluster.pace
    servers = math.ceil(cluster.num_gpus / GPUS_PER_SERVER)
    epochs = facts.total_steps * batch / facts.num_images
    parameters = count_parameters(recipe, facts.num_classes)
    hours = pace.device_hours(facts.exaflops)
    warning = averaging_warning(recipe.train, facts.total_steps)
    return [
        f"images                  {facts.num_images:,} of {facts.num_classes:,} classes "
        f"({facts.source})",
        f"steps                   {facts.total_steps:,} of {batch:,} images: {epochs:.2f} epochs",
        f"model                   {recipe.model.name}: {parameters / 1e6:.1f} M parameters, "
        f"{facts.forward_macs / 1e9:.4g} GMAC per image",
        f"training                {facts.exaflops:,.4g} exaFLOPs, "
        f"{_time_text(hours, recipe.plan.device)} at {recipe.plan.mfu * 100:g} % MFU",
        f"cluster                 {cluster.num_gpus} x {recipe.plan.device}, "
        f"{cluster.device.memory_gib:.4g} GiB each",
        f"reading                 {_reading_text(recipe, facts, servers)}",
        *([f"warning                 {warning}"] if warning else []),
    ]


def _time_text(hours: float, device: str) -> str:
    """Hours of a device; of short trainings minutes."""
    if hours >= 0.1:
        return f"{hours:,.4g} {device}-hours"
    minutes = 60 * hours
    return f"{minutes:.2g} {device}-minutes" if minutes >= 1 else f"below one {device}-minute"


def times_read(recipe: Recipe, facts: TrainingFacts, servers: int) -> float:
    """How often each row group is read, about, by tasks that hold all that they have read."""
    batch = recipe.train.global_batch_size
    window = facts.window
    if window is None and recipe.data.shuffle_window == 0:
        window = 0
    elif window is None:
        window = most_rows(recipe.data, batch, recipe.model.sides)
    # A server's images of a window lie side by side in the order, and a task has some of them: the
    # row groups at its ends are read for others, too.
    num_images = min(TASK_IMAGES, max(batch, window) / servers)
    return 1 + (facts.group_images - 1) / num_images


def _reading_text(recipe: Recipe, facts: TrainingFacts, servers: int) -> str:
    """What a reading task holds at most (row groups, largest image), what tasks share and what they
    read several times.
    """
    limit = (
        recipe.convert.max_pixels
        if recipe.convert
        else ConvertConfig.model_fields["max_pixels"].default
    )
    pixels = facts.largest_pixels or limit
    of_image = pixels * BYTES_PER_PIXEL / 2**20
    what = f"largest image, of {pixels:,}" if facts.largest_pixels else f"image of {pixels:,}"
    text = (
        f"up to {TASK_MEMORY_MIB + of_image:,.0f} MiB in a task: {TASK_MEMORY_MIB} for row groups, "
        f"and {of_image:,.0f} for the {what} pixels"
    )
    shared = shared_mib(recipe, facts)
    if shared >= 1:
        text += f"; {shared:,.0f} MiB for all tasks of a host: manifest and order"
    if (times := times_read(recipe, facts, servers)) >= _TIMES_SHOWN:
        text += f"; each row group is read {times:.2f} times by {servers} servers"
    return text


def _stage_table(
    recipe: Recipe, facts: TrainingFacts, stages: list[StagePlan], cluster: PlannedCluster
) -> list[str]:
    run_s = [stage.step_s * facts.total_steps for stage in stages]
    batch = recipe.train.global_batch_size
    rows: list[tuple[str, list[str]]] = [
        ("ZeRO stage", [str(stage.stage) for stage in stages]),
        ("largest micro-batch", [str(s.largest_micro_batch or "none") for s in stages]),
        ("planned micro-batch", [str(s.micro_batch) for s in stages]),
        ("passes per step", [str(batch // s.micro_batch // cluster.num_gpus) for s in stages]),
        ("GiB per GPU, total", [f"{s.memory.total:.2f}" for s in stages]),
    ]
    for part in vars(stages[0].memory):
        rows.append((f"  {part}", [f"{getattr(s.memory, part):.2f}" for s in stages]))
    rows += [
        ("GB sent per GPU and step", [f"{s.traffic.total / 1e9:.2f}" for s in stages]),
        ("  gradients", [f"{s.traffic.gradients / 1e9:.2f}" for s in stages]),
        ("  weights", [f"{s.traffic.weights / 1e9:.2f}" for s in stages]),
        ("step in s", [f"{s.step_s:.3f}" for s in stages]),
        ("images per s and GPU", [f"{batch / s.step_s / cluster.num_gpus:.0f}" for s in stages]),
        ("run in days", [f"{seconds / DAY_S:.2f}" for seconds in run_s]),
        ("core-days (GPU-days)", [f"{s / DAY_S * cluster.num_gpus:.1f}" for s in run_s]),
    ]
    return [f"{name:<30}" + "".join(f"{value:>10}" for value in values) for name, values in rows]
