"""What `--dry-run` prints for a training, a sweep, VTAB and a study; starts nothing."""

import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from joblib import cpu_count

from vit_ray.commands.plan import (
    TrainingFacts,
    data_facts,
    describe_work,
    gpu_hours,
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
    branch_step,
    in_groups,
    study_cells,
    study_of,
    task_recipe,
)
from vit_ray.launch.resolved_run import check_batch
from vit_ray.training.memory_estimate import (
    forward_pass,
    prepared_model,
    step_macs,
)

# Multiply-adds of a measured pass: a few seconds, in bf16 on CPUs that emulate it.
_MAX_MACS: Final = 5e9


def describe_training(recipe: Recipe) -> str:
    """Steps, batch, memory and compute of a training; reads the manifest and starts nothing.

    Raises:
        ValueError: as `resolve_run`; `data.train` may be a placeholder if `plan` gives the counts.
    """
    facts = data_facts(recipe)
    check_batch(recipe, facts.num_images)
    sizes = recipe.group_sizes
    shown = sizes if len(sizes) <= 4 else [sizes[0], sizes[-1]]
    groups = [(size, recipe.train.zero_stage) for size in shown]
    lines = describe_work(recipe, facts, groups)
    uses_gpu = torch.cuda.is_available() or recipe.workers.use_gpu is True
    if not uses_gpu and "RAY_ADDRESS" not in os.environ:
        lines += ["", f"this machine, no GPU    {_time_here(recipe, facts)}"]
    return "\n".join(lines)


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


@dataclass(frozen=True)
class PlannedRuns:
    """Equal trainings on the device of `plan`.

    Attributes:
        own_share: share of `facts.exaflops` that each computes itself; of a branch, its cool-down.
    """

    name: str
    num_runs: int
    recipe: Recipe
    facts: TrainingFacts
    own_share: float = 1.0

    @property
    def costs(self) -> tuple[int, float, float]:
        """Steps, exaFLOPs and GPU-hours of one, without start-up, evaluation and communication."""
        exaflops = self.facts.exaflops * self.own_share
        return self.facts.total_steps, exaflops, gpu_hours(self.recipe, exaflops)


def _planned(name: str, recipe: Recipe, num_runs: int = 1) -> PlannedRuns:
    """
    Raises:
        ValueError: as `data_facts` and `check_batch`.
    """
    facts = data_facts(recipe)
    check_batch(recipe, facts.num_images)
    return PlannedRuns(name, num_runs, recipe, facts)


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
        *(form.format(row.name, width, f"{row.facts.num_images:,}", *row.costs) for row in planned),
        form.format(total, width, "", *sums),
    ]


def describe_sweep(recipe: Recipe) -> str:
    """The trials of a sweep, and the plan of one of them."""
    config = sweep_of(recipe)
    points = points_of(recipe, config)
    grid = "; ".join(map(point_text, points))
    if config.space is None:
        grid = f"learning rates {', '.join(f'{rate:g}' for rate in config.learning_rates)}"
    trials = [_planned(point_name(point), trial_recipe(recipe, point)) for point in points]
    retrainings = [
        _planned("each retraining, at most", final_recipe(recipe, point, recipe.seed), config.seeds)
        for point in points
    ]
    longest = max(retrainings, key=lambda row: row.costs[1])
    return "\n".join([
        f"{len(points)} trials ({grid}), then {config.seeds} runs on the full training set",
        *_cost_table([*trials, longest]),
        f"\none trial:\n{describe_training(trials[0].recipe)}",
    ])  # fmt: skip


def describe_vtab(recipe: Recipe) -> str:
    """The cost of a run of each task, and of all runs; names the tasks without data.

    Raises:
        ValueError: no task has data, and `plan` gives no counts of images and classes.
    """
    from vit_ray.experiments import vtab  # Tune, which no other dry run needs

    recipes = {task.name: vtab.task_recipe(recipe, task) for task in vtab.vtab_of(recipe).tasks}
    tuned = recipes if recipe.plan.num_images is not None else vtab.with_data(recipes)
    planned = [_planned(name, run, _num_runs(run)) for name, run in tuned.items()]
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
        ValueError: as `study_cells` and `data_facts`; the device is not known.
    """
    study, cells = study_of(recipe), study_cells(recipe)
    trained = {cell.name: _planned(cell.name, cell.recipe) for cell in cells}
    with_steps = [replace(cell, steps=trained[cell.name].facts.total_steps) for cell in cells]
    for _, *branches in in_groups(study, with_steps):
        for cell in branches:
            share = 1 - branch_step(cell) / cell.steps
            trained[cell.name] = replace(trained[cell.name], own_share=share)
    transfers = list[PlannedRuns]()
    for cell, task in itertools.product(cells, study.transfer):
        tuned = task_recipe(cell, task)
        transfers.append(_planned(f"{cell.name} {task.name}", tuned, _num_runs(tuned)))
    return list(trained.values()), transfers


def describe_study(recipe: Recipe) -> str:
    """Every cell and fine-tuning with images, steps, compute and hours; starts nothing.

    Raises:
        ValueError: as `plan_study`.
    """
    (cells, transfers), plan = plan_study(recipe), recipe.plan
    sources = ", ".join(dict.fromkeys(row.facts.source for row in cells))
    return "\n".join([
        *_cost_table(cells),
        *(["", "transfers", *_cost_table(transfers)] if transfers else []),
        "",
        f"{plan.device} at {plan.mfu * 100:g} % MFU, without start, evaluation and communication; "
        f"images as in {sources}",
    ])  # fmt: skip
