"""`vit-ray plan` and `--dry-run`: what they say of a training, a sweep and a study, and refuse."""

import re
from collections.abc import Callable
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.commands.command_line import run_cli
from tests.data.converted_set import converted_set
from tests.experiments.studies import study_tree
from tests.recipes import SMALL, recipe_with
from vit_ray.commands import plan
from vit_ray.commands.plan import (
    describe_plan,
    describe_study,
    describe_sweep,
    describe_training,
    describe_vtab,
    planned_cluster,
    planned_runs,
)
from vit_ray.config import Recipe, load_recipe
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.measure.devices import find_device
from vit_ray.models.flops import training_exaflops
from vit_ray.training.memory_estimate import estimate_memory

# 12 x 9,216^2 parameters at 16 bytes, and 4 for an average: 19 GiB.
BILLION = (*SMALL, "model.width=9216", "model.mlp_dim=36864", "model.num_heads=72")


def recipe_of(*overrides: str, file: str = "vit_l16_jft") -> Recipe:
    return load_recipe(f"paper/{file}", list(overrides))


def rows(text: str) -> dict[str, list[str]]:
    table = text.split("\n\n")[1].splitlines()
    split = [re.split(r"\s{2,}", line.strip()) for line in table]
    return {name: values for name, *values in split}


def test_the_plan_of_vit_h_states_work_memory_and_time():
    text = run_cli("plan", "paper/vit_h14_jft", "--gpus", "4").stdout
    assert "1,035,645 of 4,096 images: 14.00 epochs" in text
    assert "4,259 exaFLOPs, 2,990 H200-hours at 40 % MFU" in text
    assert "4 x H200" in text
    table = rows(text)
    assert table["ZeRO stage"] == ["0", "1", "2", "3"]
    assert "averages" not in table  # nothing is averaged
    names = ("planned micro-batch", "passes per step", "step in s", "run in days")
    for column in zip(*(table[name] for name in names), strict=True):
        micro, passes, step_s, days = map(float, column)
        assert micro * passes * 4 == 4096
        assert days == pytest.approx(step_s * 1_035_645 / 86_400, rel=0.01)
        # 2,990 hours by the paper's count are 124.6 days of one GPU, 2.7 % less as computed.
        assert days == pytest.approx(0.973 * 124.6 / 4, rel=1e-3)


def test_what_a_cluster_cannot_do_is_told():
    large = ("train.averaging=0.9999", "plan.device=T4", "plan.num_gpus=1")
    table = rows(describe_plan(recipe_of(*BILLION, *large)))
    assert table["largest micro-batch"] == ["none"] * 4
    assert table["planned micro-batch"] == ["1"] * 4
    with pytest.raises(ValueError, match=r"plan\.num_gpus=60 does not divide .*=4096; use 32"):
        planned_cluster(recipe_of("plan.num_gpus=60"))


def test_a_plan_takes_counts_before_a_set_and_a_dry_run_the_set_before_counts():
    missing = recipe_of("data.train=nothing")
    assert planned_runs(missing).num_images == 303_000_000
    with pytest.raises(ValueError, match=r"nothing' is not a data set.*plan\.num_images"):
        planned_runs(missing.with_changes(plan={"num_classes": None}))
    small = ["train.global_batch_size=4", "optim.warmup_steps=0", "optim.epochs=2"]
    small += ["data.shuffle_window=0", "workers.num_workers=1"]
    recipe = recipe_of(f"data.train={converted_set()}", *small)
    assert planned_runs(recipe).num_images == 12
    assert "images                  303,000,000 of" in describe_plan(recipe)
    counted = recipe.with_changes(plan={"num_images": None, "num_classes": None})
    assert "images                  12 of 3 classes" in describe_plan(counted)
    for key in ("num_images", "num_classes"):
        with pytest.raises(ValueError, match=rf"plan\.{key}=None.* is missing; give both counts"):
            describe_plan(recipe.with_changes(plan={key: None}))


def test_what_is_held_out_is_not_trained_on():
    small = ["train.global_batch_size=64", "optim.warmup_steps=0", "optim.epochs=2"]
    counts = ["plan.num_images=500", "plan.num_classes=2", "data.held_out_fraction=0.1"]
    facts = planned_runs(recipe_of(*small, *counts))
    assert (facts.num_images, facts.num_classes) == (450, 2)
    assert facts.total_steps == round(450 * 2 / 64)


def small(**changes: Any) -> Recipe:
    sections = {
        "model": {"name": "ViT-Ti/16", "image_size": 32},
        "optim": {"epochs": 10},
        "train": {"global_batch_size": 64, "micro_batch_size": 16, "zero_stage": 2},
        "workers": {"num_workers": 2},
        "plan": {"num_images": 640, "num_classes": 10},
    }
    return recipe_with("small", **{**sections, **changes})


def test_steps_memory_and_compute_are_those_of_the_estimates_and_of_the_data_sheet():
    recipe = small()
    text = describe_training(recipe)
    assert "100 of 64 images: 10.00 epochs" in text
    table, memory = rows(text), estimate_memory(recipe, 10, 16, 2)
    numbers = [("workers", 2), ("planned micro-batch", 16), ("passes per step", 2)]
    assert [table[name] for name, _ in numbers] == [[str(number)] for _, number in numbers]
    assert table["GiB per GPU, total"] == [f"{memory.total:.2f}"]
    assert table["activations"] == [f"{memory.activations:.2f}"]
    cost = re.search(r"training .* (\S+) exaFLOPs, (\S+) H200-minutes at 40 % MFU", text)
    assert cost is not None
    # An H200 has 989 TFLOP/s in bf16 (data sheet).
    minutes = float(cost[1]) * 1e18 / (0.4 * 989.5e12) / 60
    assert float(cost[2]) == pytest.approx(minutes, rel=0.05)
    assert ["0.00"] not in table.values()
    assert text.splitlines()[-1].startswith("this machine, no GPU    about ")
    on_gpus = describe_training(small(workers={"num_workers": 2, "use_gpu": True}))
    assert "this machine" not in on_gpus


@pytest.fixture
def second_pass(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the seconds of the second pass that is tried on this machine."""

    def takes(seconds: float) -> None:
        times = iter([0.0, 10.0, 20.0, 20.0 + seconds])
        monkeypatch.setattr(plan, "time", SimpleNamespace(perf_counter=lambda: next(times)))

    return takes


def test_the_time_here_is_that_of_the_second_pass_for_all_images(second_pass, monkeypatch):
    second_pass(128.0)  # of 64 images; there are 100 steps
    told = r"about 3:33:20 on \d+ CPU cores, 0\.5 images/s in bf16 .*each: 64\)"
    assert re.search(told, describe_training(small()).splitlines()[-1])
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert "this machine" not in describe_training(small())


def test_the_time_of_a_large_model_is_by_its_multiply_adds(second_pass):
    second_pass(0.01)
    text = describe_training(load_recipe("paper/vit_b16_jft")).splitlines()[-1]
    rate = re.search(r"(\d\.\d) images/s in bf16 .*ViT-Ti/16; images in each: 1\)", text)
    assert rate is not None, text
    assert float(rate[1]) == pytest.approx(100 * 1.26 / 17.58, abs=0.1)  # GMAC, as timm's table
    second_pass(0.01)
    # The small model that is tried has no such blocks.
    optim = {"epochs": 10, "frozen": ["blocks.0-17"]}
    frozen = small(model={"name": "ViT-L/16", "image_size": 224}, optim=optim)
    assert "two passes of a ViT-Ti/16" in describe_training(frozen).splitlines()[-1]
    second_pass(0.01)
    large = [*BILLION, "train.averaging=0.9999", "workers.num_workers=1", "plan.device=T4"]
    table = rows(describe_training(load_recipe("paper/vit_b32_jft", large)))
    assert table["largest micro-batch"] == ["none"]


@pytest.mark.slow
def test_a_sweep_is_described_by_its_rates_and_one_trial():
    text = describe_sweep(load_recipe("finetune/pets"))
    assert "4 trials (learning rates 0.001, 0.003, 0.01, 0.03), then 3 runs" in text
    assert "500 of 512 images" in text
    # Of the paper's Table 4: 500 steps each; 4 trials and 3 retrainings.
    table = [line.split() for line in text.splitlines()[2:8]]
    assert [row[0] for row in table] == ["lr0.001", "lr0.003", "lr0.01", "lr0.03", "each", "in"]
    assert [row[-3] for row in table] == ["500"] * 5 + ["3,500"]
    assert float(table[-1][-2]) == pytest.approx(7 * float(table[0][3]), rel=1e-3)


def test_vtab_costs_what_its_tasks_cost_and_names_those_without_data(tmp_path):
    rows = describe_vtab(load_recipe("vtab_1k", ["init_from=x"])).splitlines()
    assert rows[0] == "19 runs on 19 of 19 tasks"
    # ViT-L/16 at 384 px: 2,500 steps of 512 images for each task (Table 4).
    facts = planned_runs(load_recipe("finetune/vtab"))
    steps, exaflops = (float(word.replace(",", "")) for word in rows[-1].split()[-3:-1])
    assert (facts.total_steps, steps) == (2_500, 19 * 2_500)
    assert exaflops == pytest.approx(19 * facts.exaflops, rel=1e-3)
    tuned = ["sweep.learning_rates=[0.001,0.01]", "sweep.seeds=3", "vtab.sweep_each=true"]
    rows = describe_vtab(load_recipe("vtab_1k", ["init_from=x", *tuned])).splitlines()
    assert rows[0] == "95 runs on 19 of 19 tasks"
    for part in ("train", "test"):
        copytree(converted_set(), tmp_path / "pets" / part)
    tasks = [{"name": name, "group": "natural"} for name in ("pets", "svhn")]
    vtab = {"data": str(tmp_path), "tasks": tasks}
    train = {"global_batch_size": 4, "micro_batch_size": 2}
    here = small(init_from="x", plan={}, train=train, vtab=vtab)
    rows = describe_vtab(here).splitlines()
    assert (rows[0], rows[-1]) == ("1 runs on 1 of 2 tasks", "no converted data: svhn")
    assert rows[2].split()[:3] == ["pets", "12", "30"]  # ten epochs of 12 images


def test_every_cell_of_a_study_has_its_compute_steps_and_hours_and_all_have_a_sum():
    models = ("ViT-H/14", "ViT-B/16", "ViT-B/32")
    rows = [{"label": f"m{number}", "model": {"name": name}} for number, name in enumerate(models)]
    tree = study_tree("/x", rows, train="s3://BUCKET/jft", epochs=[7.0])
    tree |= {"train": {"global_batch_size": 4096}, "workers": {"num_workers": 1}}
    tree["plan"] = {"num_images": 303_000_000, "num_classes": 18_291}
    text = describe_study(recipe_from_dict(tree, "test"))
    found = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line}
    images, steps, *costs = found["grid-m0-data1-epochs7"]
    assert (images, steps) == ("303,000,000", "517,822")
    exaflops = [training_exaflops(name, 303_000_000, 7) for name in models]
    flops_per_hour = 0.4 * find_device("H200").bf16_flops * 3600
    for column, expected in enumerate((exaflops, np.array(exaflops) * 1e18 / flops_per_hour)):
        assert float(costs[column].replace(",", "")) == pytest.approx(expected[0], rel=1e-3)
        total = found["in"][-2 + column].replace(",", "")
        assert float(total) == pytest.approx(sum(expected), rel=1e-3)
    assert "transfers" not in found
