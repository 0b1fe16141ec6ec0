"""What a study says that it will cost, and when it is refused for it."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest

from tests.experiments.flows import Parent
from tests.experiments.studies import study_row, study_tree
from vit_ray.commands.experiments import study
from vit_ray.commands.plans.study_plan import StudyPlan, describe_study, plan_study
from vit_ray.config import Recipe
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.experiments import runner as runner_module
from vit_ray.experiments import study as study_module
from vit_ray.experiments import sweep, transfer
from vit_ray.experiments.runner import Room, Runner, Work
from vit_ray.experiments.search_space import points_of
from vit_ray.experiments.study import StudyRun
from vit_ray.experiments.study_cells import study_of
from vit_ray.experiments.sweep import SweepPlan, trial_recipe
from vit_ray.experiments.training import Outcome, Training
from vit_ray.launch.run import RunResult
from vit_ray.measure.devices import find_device
from vit_ray.models.flops import training_exaflops
from vit_ray.outcomes import TrialState
from vit_ray.report.tables import Table


def paper_study(plan: dict[str, Any] | None = None, **axes: Any) -> Recipe:
    rows = [
        {"label": "H", "model": {"name": "ViT-H/14"}, "changes": {"workers.num_workers": 4}},
        {"label": "B", "model": {"name": "ViT-B/16"}, "changes": {"workers.num_workers": 2}},
        {"label": "b", "model": {"name": "ViT-B/32"}},
    ]
    tree = study_tree("/x", rows, train="s3://BUCKET/jft", **{"epochs": [7.0], **axes})
    tree["train"] = {"global_batch_size": 4096}
    tree["plan"] = {"num_images": 303_000_000, "num_classes": 18_291, **(plan or {})}
    return recipe_from_dict(tree, "test")


def hours(name: str) -> float:
    """GPU-hours of 7 epochs of JFT-300M at 40 % of an H200."""
    device = find_device("H200")
    assert device
    return training_exaflops(name, 303_000_000, 7) * 1e18 / (0.4 * device.bf16_flops) / 3600


def test_every_cell_has_its_compute_steps_and_hours() -> None:
    text = describe_study(paper_study())
    (line,) = [line for line in text.splitlines() if line.startswith("grid-H-data1-epochs7")]
    _, images, steps, exaflops, gpus, gpu_hours, transfer, wall = line.split()
    assert (images, steps, gpus, transfer) == ("303,000,000", "517,822", "4", "0")
    numbers = [float(one.replace(",", "")) for one in (exaflops, gpu_hours, wall)]
    expected = hours("ViT-H/14")
    assert numbers[0] == pytest.approx(training_exaflops("ViT-H/14", 303_000_000, 7), rel=1e-3)
    assert numbers[1:] == pytest.approx([expected, expected / 4], rel=1e-3)


def test_the_sum_and_the_critical_path_are_told() -> None:
    plan = plan_study(paper_study())
    whole = [hours(name) for name in ("ViT-H/14", "ViT-B/16", "ViT-B/32")]
    assert plan.gpu_hours == pytest.approx(sum(whole), rel=1e-3)
    # On 4 GPUs H/14 takes all of them; then B/16 on two, and B/32 on one of the other two.
    assert plan.num_gpus == 4
    assert plan.hours == pytest.approx(whole[0] / 4 + whole[1] / 2, rel=1e-3)
    wide = plan_study(paper_study({"num_gpus": 7}))
    assert wide.hours == pytest.approx(whole[0] / 4, rel=1e-3)
    text = describe_study(paper_study({"num_gpus": 7}))
    assert re.search(r"in parallel +\S+ hours on 7 x H200", text)
    assert re.search(r"critical path +\S+ hours: grid-H-data1-epochs7", text)
    assert "cost  " not in text


def test_one_cell_at_a_time_takes_the_sum_of_their_hours() -> None:
    plan = plan_study(paper_study({"num_gpus": 64}, max_concurrent=1))
    assert plan.hours == pytest.approx(sum(one.hours for one in plan.cells))


def test_the_studys_gpus_bound_the_plans() -> None:
    assert plan_study(paper_study({"num_gpus": 64}, max_gpus=4)).num_gpus == 4


def test_a_cell_wider_than_the_cluster_is_refused() -> None:
    told = r"plan.num_gpus=2: cell 'grid-H-data1-epochs7' needs 4 GPUs"
    with pytest.raises(ValueError, match=told):
        plan_study(paper_study({"num_gpus": 2}))


def test_a_study_over_its_budget_is_refused_before_anything_is_opened() -> None:
    total = sum(map(hours, ("ViT-H/14", "ViT-B/16", "ViT-B/32")))
    plan_study(paper_study(budget_gpu_hours=total * 1.01)).check_budget()
    small = paper_study(budget_gpu_hours=total * 0.99)
    told = r"study.budget_gpu_hours=\S+: the 3 cells need .* hours of H200 at 40 % MFU, "
    with pytest.raises(ValueError, match=told + r"'grid-H-data1-epochs7' alone .*raise the budget"):
        study(small)
    assert "refused        study.budget_gpu_hours=" in describe_study(small)


def test_cells_of_other_lengths_cost_in_proportion() -> None:
    row = study_row("a")
    tree = study_tree("/x", [row], train="s3://BUCKET/d", epochs=None, steps=[10, 30])
    tree["plan"] = {"num_images": 6400, "num_classes": 10}
    short, long = plan_study(recipe_from_dict(tree, "test")).cells
    assert (short.facts.total_steps, long.facts.total_steps) == (10, 30)
    assert long.gpu_hours == pytest.approx(3 * short.gpu_hours)


def test_transfers_are_part_of_what_a_cell_costs() -> None:
    pets = {"name": "pets", "recipe": "finetune/pets"}  # four rates, then three runs
    fixed = {**pets, "name": "fixed", "changes": {"sweep": None}}
    tree = study_tree(
        "/x", [{"label": "L", "model": {"name": "ViT-L/16"}}], train="s3://BUCKET/jft"
    )
    tree["plan"] = {"num_images": 303_000_000, "num_classes": 18_291}
    tree["study"]["transfer"] = [pets]
    (swept,) = plan_study(recipe_from_dict(tree, "test")).cells
    tree["study"]["transfer"] = [fixed]
    (single,) = plan_study(recipe_from_dict(tree, "test")).cells
    # What the header of finetune/pets says of one run with ViT-L/16.
    assert single.transfer_hours == pytest.approx(0.2061, rel=1e-3)
    assert swept.transfer_hours == pytest.approx(7 * 0.2061, rel=1e-3)
    assert swept.gpu_hours == swept.training_hours + swept.transfer_hours


ROWS = {"wide": 4, "middle": 2, "small": 1, "one": 1}
"""Workers of each."""


def branching_study(*, branch: bool, **study: Any) -> Recipe:
    """Rows of several widths and lengths; each cell is fine-tuned at one rate and over a sweep."""
    rows = [
        {
            **study_row(label, width=16 * count, depth=len(label)),
            "changes": {"workers.num_workers": count},
        }
        for label, count in ROWS.items()
    ]
    rows[1]["steps"] = [400]
    pets = {"name": "pets", "recipe": "finetune/pets", "changes": {"data.eval": "/x/pets"}}
    tasks = [pets, {**pets, "name": "fixed", "changes": {"sweep": None, "optim.steps": 140}}]
    lengths = {"epochs": None, "steps": [100, 300], "transfer": tasks, "branch": branch}
    tree = study_tree("/x", rows, train="s3://BUCKET/d", **lengths, **study)
    tree["optim"]["schedule"], tree["workers"]["use_gpu"] = "cooldown", True
    tree["plan"] = {"num_images": 6400, "num_classes": 10, "num_gpus": 5}
    return recipe_from_dict(tree, "test")


def swept_without_data(recipe: Recipe) -> SweepPlan:
    assert recipe.sweep is not None
    points = points_of(recipe, recipe.sweep)
    trials = [trial_recipe(recipe, point) for point in points]
    of_itself: Any = SimpleNamespace(total_steps=1)
    return SweepPlan(recipe, of_itself, points, trials, [1] * len(points))


def studied_hours(monkeypatch: pytest.MonkeyPatch, plan: StudyPlan, room: Room) -> float:
    """How long the study itself takes, whose trainings take what the plan says of each."""
    recipe = plan.recipe
    by_name = {one.cell.name: one for one in plan.cells}
    clock_hours, ends, number = 0.0, list[tuple[float, int, Work]](), itertools.count()

    def hours_of(training: Training) -> float:
        if training.kind == "study_cell":
            cell = by_name[training.recipe.name]
            return cell.training_hours / cell.num_gpus
        cell = by_name[training.tags["vit_ray.study_cell"]]
        names = [task.name for task in study_of(recipe).transfer]
        task = cell.tasks[names.index(training.tags["vit_ray.transfer_task"])]
        return task.gpu_hours / cell.num_gpus

    def run_flow(flow: Any, *_: Any) -> Any:
        nonlocal clock_hours
        runner = Runner(flow, lambda: room)
        while not runner.is_over:
            while (work := runner.next()) is not None:
                ends.append((clock_hours + hours_of(work.training), next(number), work))
            ends.sort()
            clock_hours, _, ended = ends.pop(0)
            result = RunResult(None, "one", 1, 1, {"eval/top1": 0.5}, "folder")
            runner.end(ended, Outcome(TrialState.FINISHED, result, top1=0.5))
        assert runner.error is None
        return runner.result

    parent = Parent(recipe)
    parent.__dict__["run_flow"] = run_flow
    monkeypatch.setattr(runner_module, "GATHER_SHARE", 0.0)  # in a clock of its own
    monkeypatch.setattr(study_module, "cluster_room", lambda *_: room)
    monkeypatch.setattr(transfer, "plan_sweep", swept_without_data)
    monkeypatch.setattr(sweep, "sweep_table", lambda *_: Table("", [], []))
    monkeypatch.setattr(sweep, "description", lambda *_: "")
    monkeypatch.setattr(transfer, "open_sweep", lambda *_: contextlib.nullcontext(parent))
    resolved_runs: list[Any] = [
        SimpleNamespace(
            recipe=one.cell.recipe,
            total_steps=one.facts.total_steps,
            num_images=one.facts.num_images,
            manifest=SimpleNamespace(num_classes=one.facts.num_classes),
        )
        for one in plan.cells
    ]
    cells = [one.cell for one in plan.cells]
    results = StudyRun(study_of(recipe), cells, resolved_runs, {}, parent).run()
    assert [one.error for one in results] == [""] * len(cells)
    return clock_hours


@pytest.mark.slow(after=2)
@pytest.mark.parametrize(
    ("branch", "most"),
    [(True, 3), (False, None), (True, None), (True, 1), (False, 1), (False, 3)],
)
def test_a_dry_run_tells_the_hours_that_the_studys_own_runner_takes(
    branch: bool, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_study(branching_study(branch=branch, max_concurrent=most))
    room = Room(plan.num_gpus, 999.0, most or math.inf)
    assert studied_hours(monkeypatch, plan, room) == pytest.approx(plan.hours, rel=1e-12)
    anything = studied_hours(monkeypatch, plan, Room(math.inf, math.inf))
    assert anything == pytest.approx(plan.critical_path[0], rel=1e-12)
    assert plan.critical_path[0] < plan.hours
