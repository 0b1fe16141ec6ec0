"""`vit-ray plan --scale`: what limits a training on 1 to 1,024 GPUs, its days and its price.

Each point is the plan's step, compared with the capacity of hosts, storage and the recording
process, and then run through failures. Our figures were measured on CPUs (`benchmarks/results`);
what was not measured is printed as assumed.
"""

import math
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np

from vit_ray.commands.plans.manifest import CPU_MS_PER_IMAGE
from vit_ray.commands.plans.plan import (
    TrainingFacts,
    describe_work,
    plan_stage,
    planned_cluster,
    times_read,
    told_facts,
)
from vit_ray.config import Recipe
from vit_ray.data.order.partition import divisors
from vit_ray.launch.record.run_metadata import trained_params
from vit_ray.measure.failures import MOST_AUTO_S, Interruptions
from vit_ray.measure.memory import GIB
from vit_ray.measure.step_time import DAY_S, StepTime
from vit_ray.metric_names import PLAN_GROUP
from vit_ray.report.figures.charts import Axis, Chart, Point, Series, svg
from vit_ray.report.tables import Column, Table, Value
from vit_ray.tracking.metrics_log import RunOpening
from vit_ray.tracking.tracker import Tracker
from vit_ray.train.memory.memory_estimate import state_shape
from vit_ray.train.memory.micro_batch import pass_sizes
from vit_ray.worker.run_link import beats_between

POWERS: Final = [2**power for power in range(11)]
SERVER_MS_PER_IMAGE: Final = 1.70 / 128
"""CPU ms per image in a host's stream server: stream_scale_cpu_2026-11-24.md, two servers at 64
ranks."""
HEARTBEAT_S: Final = 1.422e-3
"""CPU seconds per heartbeat in the process that records the run: many_ranks_cpu_2026-11-24.md."""
SAVE_S, SAVING_RANKS = 6.5, 512
"""Seconds of requests for a save by this many ranks, on two cores: many_ranks_cpu_2026-11-24.md."""
STALL_S, STALL_S_PER_GIB = 0.03, 0.113
"""Seconds per save, and per GiB of a rank's part: checkpoint_stall_training_cpu_2026-11-27.md."""
IMAGE_BYTES: Final = 110_631
"""Mean bytes of an ImageNet photograph: data_shrink_to_cpu_2026-11-22.md."""
REQUESTS_PER_S: Final = 5500.0
"""GET requests that S3 answers for one prefix: Amazon S3 User Guide, performance guidelines."""
NUM_RUNS, SHARES = 1000, (0.05, 0.95)
"""Simulated runs for each point, and the quantiles at the ends of its range."""
BESIDE: Final = ("checkpoints", "record")
"""Loads that do not slow training down: the next checkpoint comes later, heartbeats wait."""
MOST_SIMULATED: Final = 3000
"""A run with more failures than this is not simulated: their number hardly varies."""
LEAST_GOODPUT: Final = 0.01
"""Below this goodput a run is reported as one that does not end."""


@dataclass(frozen=True)
class ScalePoint:
    """The training on a number of GPUs.

    Attributes:
        micro_batch: images per pass.
        fits: whether it fits into the GPU's memory, by estimate.
        step: time of one optimizer step once its data are there.
        loads: work of each source of data and of the record at that pace, as a share of their
            capacity; sources slow training down above 1.
        link: the link that communication uses.
        met: the interruptions of the training.
        interval_s: training time between two checkpoints.
    """

    num_gpus: int
    micro_batch: int
    fits: bool
    step: StepTime
    loads: Mapping[str, float]
    link: str
    met: Interruptions
    interval_s: float
    batch: int
    total_steps: int

    @property
    def slowest(self) -> str:
        """The source of data with the highest load."""
        return max(self.sources, key=self.loads.__getitem__)

    @property
    def sources(self) -> list[str]:
        """Loads that slow training down when they are above 1."""
        return [name for name in self.loads if name not in BESIDE]

    def paced_s(self, step_s: float) -> float:
        """Time of a step that computes for `step_s`, with the slowest source's delay."""
        return max(step_s, self.step.most_s * self.loads[self.slowest])

    @property
    def images_per_s(self) -> float:
        """Over all GPUs, without failures; no communication is hidden."""
        return self.batch / self.paced_s(self.step.most_s)

    @property
    def limit(self) -> str:
        """A source that cannot keep up; else, or if larger, what takes most of the wall clock."""
        step, paced_s = self.step, self.paced_s(self.step.most_s)
        stalls_s = paced_s * self.met.stall_s / self.interval_s
        parts = {
            "kernel starts" if step.launch_s > step.device_s else "compute": step.compute_s,
            self.link: step.sent_s,
            "operation starts": step.starts_s,
            self.slowest: paced_s if paced_s > step.most_s else 0.0,
            "checkpoints": stalls_s,
            "failures": paced_s / max(self.kept, 1e-300) - paced_s - stalls_s,
        }
        return max(parts, key=lambda name: parts[name])

    @cached_property
    def kept(self) -> float:
        """Share of the wall clock that is left after checkpoints and failures."""
        return self.met.goodput(self.interval_s)

    @property
    def goodput(self) -> float:
        """Expected share of the wall clock that trains new steps, as runs report it."""
        return self.kept * self.step.most_s / self.paced_s(self.step.most_s)

    @cached_property
    def days(self) -> tuple[float, float, float] | None:
        """Expected wall clock, and its range; None: the run would not end.

        The low end hides all communication and has few failures; the high end hides none and has as
        many failures as the worst 5 % of the simulated runs.
        """
        if self.kept < LEAST_GOODPUT:
            return None
        rng = np.random.default_rng(self.num_gpus)
        least_s, most_s = (
            self.total_steps * self.paced_s(one) for one in (self.step.least_s, self.step.most_s)
        )
        low_s, mean_s, high_s = (one / self.kept for one in (least_s, most_s, most_s))
        if mean_s / self.met.failure_s < MOST_SIMULATED:
            low_s, high_s = (
                float(np.quantile(self.met.simulated_s(self.interval_s, s, NUM_RUNS, rng), share))
                for s, share in zip((least_s, most_s), SHARES, strict=True)
            )
        low, mean, high = ((self.met.restart_s + one) / DAY_S for one in (low_s, mean_s, high_s))
        return mean, min(low, mean), max(mean, high)


def gpu_counts(recipe: Recipe) -> list[int]:
    """For each of `POWERS` the largest count up to it that divides the batch, or its pairs."""
    batch, least = recipe.train.global_batch_size, recipe.train.least_pass
    fitting = divisors(batch // least)
    return sorted({max(one for one in fitting if one <= power) for power in POWERS})


def scale_points(recipe: Recipe, facts: TrainingFacts) -> list[ScalePoint]:
    """The training on each of `gpu_counts`."""
    return [_point(recipe, facts, num_gpus) for num_gpus in gpu_counts(recipe)]


def _point(recipe: Recipe, facts: TrainingFacts, num_gpus: int) -> ScalePoint:
    plan, batch = recipe.plan, recipe.train.global_batch_size
    given = recipe.train.micro_batch_size
    micro = None
    if isinstance(given, int):  # the largest pass that a share can be divided into
        sizes = pass_sizes(recipe, num_gpus)
        micro = max([size for size in sizes if size <= given], default=sizes[0])
    cluster = planned_cluster(recipe.with_changes(plan={"num_gpus": num_gpus}))
    stage = plan_stage(recipe, facts, cluster, recipe.train.zero_stage, micro)
    network = cluster.pace.network
    servers = network.servers(num_gpus)
    step_s = stage.time.most_s
    images_per_s = batch / step_s
    image_bytes = facts.image_bytes or IMAGE_BYTES
    into_server = plan.storage_gb_per_server * 1e9
    into_all = min(servers * into_server, (plan.storage_gb_per_s or math.inf) * 1e9)
    again = times_read(recipe, facts, servers)
    image_bytes *= again
    cpu_ms = CPU_MS_PER_IMAGE + SERVER_MS_PER_IMAGE
    gpus_here = min(num_gpus, network.gpus_per_server)
    # A server with only some of its GPUs in the run is assumed to have CPUs in proportion.
    cpus = plan.cpus_per_server * gpus_here / network.gpus_per_server
    sources = {
        "data CPUs": images_per_s / servers * cpu_ms / 1e3 / cpus,
        "bytes into hosts": images_per_s * image_bytes / (servers * into_server),
        "store requests": again * images_per_s / facts.group_images / REQUESTS_PER_S,
    }
    if plan.storage_gb_per_s is not None:
        sources["store bandwidth"] = images_per_s * image_bytes / into_all
    shape = state_shape(recipe, facts.num_classes, num_gpus)
    state_bytes = 4 * shape.num_frozen + shape.num_parameters * (
        4 + shape.moment_bytes + 4 * shape.has_average
    )
    met = Interruptions(
        plan.failure_s(num_gpus),
        plan.restart_s + state_bytes / min(into_server, into_all / servers),
        STALL_S + STALL_S_PER_GIB * state_bytes / num_gpus / GIB,
        # written, and read back to be checked
        SAVE_S * num_gpus / SAVING_RANKS + 2 * state_bytes / into_all,
    )
    paced_s = step_s * max(1.0, *sources.values())
    interval_s = _interval_s(recipe, met, paced_s, facts.total_steps)
    loads = sources | {
        "record": (1 + (num_gpus - 1) / beats_between(num_gpus)) * HEARTBEAT_S,
        "checkpoints": met.write_s / (interval_s + met.stall_s),
    }
    is_inside = servers == 1 or not network.is_limited_by_adapters(num_gpus)
    return ScalePoint(
        num_gpus,
        stage.micro_batch,
        stage.largest_micro_batch is not None and stage.micro_batch <= stage.largest_micro_batch,
        stage.time,
        loads,
        "links in a server" if is_inside else "network",
        met,
        interval_s,
        batch,
        facts.total_steps,
    )


def _interval_s(recipe: Recipe, met: Interruptions, step_s: float, total_steps: int) -> float:
    """Seconds of training between two checkpoints, by the recipe; the last step also writes one."""
    config, wanted = recipe.checkpoint, [total_steps * step_s]
    if config.every_minutes == "auto":
        wanted.append(min(met.best_interval_s, MOST_AUTO_S))
    elif config.every_minutes is not None:
        wanted.append(60 * config.every_minutes)
    if config.every_steps is not None:
        wanted.append(config.every_steps * step_s)
    return max(min(wanted), met.write_s)


def scale_table(recipe: Recipe, points: Sequence[ScalePoint]) -> Table:
    """A row for each point; a run that does not end has inf days."""
    price, each = recipe.plan.price_per_gpu_hour, points[0].images_per_s / points[0].num_gpus
    ends = ("", ", low", ", high")
    titles = [
        "GPUs", "micro-batch", "step in ms", "images/s", "of linear", "limited by",
        *points[0].loads, "save every min", "best every min", "failures a week", "goodput",
        *(f"days{end}" for end in ends), *(f"price{end}" for end in ends if price),
    ]  # fmt: skip
    rows: list[list[Value]] = []
    for one in points:
        days = one.days or (math.inf,) * 3
        rows.append([
            one.num_gpus, one.micro_batch, one.step.most_s * 1e3, one.images_per_s,
            one.images_per_s / one.num_gpus / each,
            one.limit if one.fits else "memory", *one.loads.values(),
            one.interval_s / 60, one.met.best_interval_s / 60, 7 * DAY_S / one.met.failure_s,
            one.goodput, *days, *(24 * one.num_gpus * price * part for part in days if price),
        ])  # fmt: skip
    shares = {"of linear", "goodput", *points[0].loads}
    forms: dict[str, Callable[[float], str]] = {
        title: "{:.1%}".format if title in shares else short for title in titles
    }
    columns = [Column(one, None if one == "limited by" else forms[one]) for one in titles]
    return Table("What limits each number of GPUs", columns, rows)


def short(value: float) -> str:
    """At most four digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _printed(table: Table) -> list[str]:
    """Lines of the table; a range shares a column with its value."""
    rows = [
        [column.title for column in table.columns],
        *([c.text for c in r] for r in table.cells()),
    ]
    shown = []
    for row in rows:
        cells = dict(zip(rows[0], row, strict=True))
        for name in ("days", "price"):
            ends = [cells.pop(f"{name}, {end}", "") for end in ("low", "high")]
            if name in cells:
                cells[name] += " (low-high)" if row is rows[0] else " ({}-{})".format(*ends)
        shown.append([*cells.values()])
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return ["  ".join(map(str.rjust, row, widths)) for row in shown]


def scale_figure(recipe: Recipe, points: Sequence[ScalePoint]) -> Chart:
    """Images/s against GPUs: in training, after failures, and the capacity of each source."""
    lines: dict[str, list[float | None]] = {
        "no communication": [p.batch / p.step.compute_s for p in points],
        "with communication": [p.batch / p.step.most_s for p in points],
        "with failures": [p.images_per_s * p.kept if p.days else None for p in points],
        **{
            name: [p.batch / p.step.most_s / p.loads[name] for p in points]
            for name in points[0].sources
        },
    }
    return Chart(
        f"{recipe.name}: images/s by number of {recipe.plan.device}",
        Axis("GPUs", is_log=True),
        Axis("images/s", is_log=True),
        [
            Series(
                name,
                [Point(p.num_gpus, r) for p, r in zip(points, rates, strict=True) if r],
                dash=0 if number < 3 else 1 + number % 3,
                has_markers=number < 3,
            )
            for number, (name, rates) in enumerate(lines.items())
        ],
    )


def assumptions(recipe: Recipe, facts: TrainingFacts) -> list[str]:
    """The inputs of the points: measured where, or assumed."""
    plan = recipe.plan
    spot = plan.server_days_per_preemption
    image = f"{facts.image_bytes:,.0f} bytes an image (the data set)"
    if not facts.image_bytes:
        image = f"{IMAGE_BYTES:,} bytes an image (ImageNet photographs; assumed)"
    reading_ms = CPU_MS_PER_IMAGE
    return [
        f"assumed   {plan.mfu * 100:g} % MFU at any micro-batch; 5 us for each kernel; no "
        "communication hidden; no evaluation; a run starts as it restarts",
        f"assumed   {plan.cpus_per_server} cores and {plan.storage_gb_per_server:g} GB/s from the "
        f"store for each server of {plan.gpus_per_server} GPUs; {REQUESTS_PER_S:,.0f} requests/s "
        f"of a row group of {facts.group_images:.0f} images each, those at the ends of a task's "
        "part of a shuffle window twice; nothing cached",
        f"assumed   a failure each {plan.gpu_days_per_failure:,g} GPU-days, "
        + (f"a server taken back after {spot:g} days, " if spot else "no spot servers, ")
        + f"{plan.restart_s:g} s until the workers run again",
        f"images    {image}",
        f"measured  on CPUs: {reading_ms:g} ms of a core to read an image "
        f"and {SERVER_MS_PER_IMAGE:.3f} to serve it, {STALL_S:g} s and {STALL_S_PER_GIB:g} s/GiB "
        f"of stall, {SAVE_S:g} s of requests for a save by {SAVING_RANKS} ranks, "
        f"{HEARTBEAT_S * 1e3:g} ms for a heartbeat",
        f"range     low: all communication hidden, 5th percentile of {NUM_RUNS:,} simulated runs; "
        "high: none hidden, 95th percentile",
        "columns   share of capacity (CPUs, bytes, requests), of one core (record), of the time "
        "spent writing (checkpoints)",
    ]


def describe_scale(recipe: Recipe, facts: TrainingFacts, points: Sequence[ScalePoint]) -> str:
    """The text of the command."""
    cluster = planned_cluster(recipe.with_changes(plan={"num_gpus": 1}))
    table, batch = scale_table(recipe, points), recipe.train.global_batch_size
    notes = []
    if [one.num_gpus for one in points] != POWERS:
        notes = [
            "GPUs      for each power of two, the largest count up to it that divides the batch "
            f"of {batch:,}"
        ]
    return "\n".join([
        *describe_work(recipe, facts, cluster)[:4], "",
        *_printed(table), "", *assumptions(recipe, facts), *notes,
    ])  # fmt: skip


def print_scale(recipe: Recipe, *, is_dry: bool) -> int:
    """Print `describe_scale`; except in a dry run, also record table and figure in MLflow."""
    facts = told_facts(recipe)
    points = scale_points(recipe, facts)
    text = describe_scale(recipe, facts, points)
    print(text)
    if is_dry:
        return 0
    table, name = scale_table(recipe, points), f"{recipe.name}-scale"
    figure = svg(scale_figure(recipe, points))
    planned = {key: value for key, value in recipe.flat().items() if key.startswith("plan.")}
    with tempfile.TemporaryDirectory(prefix="vit_ray-") as folder:
        opening = RunOpening(
            recipe.tracking,
            name,
            Path(folder) / "metrics.jsonl",
            params=trained_params(recipe) | planned,
            tags={"vit_ray.kind": "scale_plan"},
        )
        tracker = Tracker.start(opening)
        for point, row in zip(points, table.rows, strict=True):
            values = zip(table.columns, row, strict=True)
            tracker.log.metrics(
                point.num_gpus,
                {_metric(c.title): v for c, v in values if isinstance(v, int | float)},
            )
        tracker.log.text("scale.txt", text)
        tracker.log.text("scale.csv", table.csv())
        tracker.log.text("scale.svg", figure)
        if not tracker.finish():
            print("MLflow did not answer; the plan is not recorded", file=sys.stderr)
            return 1
    print(f"MLflow page: {tracker.hint}")
    return 0


def _metric(title: str) -> str:
    """MLflow's metric names, by the heading of a column."""
    plain = title.lower().replace("/s", " per s").replace(" in ", " ")
    return PLAN_GROUP + re.sub(r"\W+", "_", plain)
