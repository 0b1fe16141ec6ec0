"""`--dry-run`: what it must say, from a data set or from told counts, without starting anything."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.commands.test_plan import BILLION
from vit_ray.commands import dry_run
from vit_ray.commands.dry_run import describe_sweep, describe_training
from vit_ray.config import Recipe, load_recipe
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.training.memory_estimate import estimate_memory

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "jobs" / "recipes"


def small(**changes: Any) -> Recipe:
    tree: dict[str, Any] = {
        "name": "small",
        "model": {"name": "ViT-Ti/16", "image_size": 32},
        "optim": {"epochs": 10},
        "train": {"global_batch_size": 64, "micro_batch_size": 16, "zero_stage": 2},
        "workers": {"num_workers": 2},
        "plan": {"num_images": 640, "num_classes": 10},
    }
    return recipe_from_dict({**tree, **changes}, "test")


def test_a_short_training_is_counted_in_minutes_and_the_device_is_named():
    lines = describe_training(small()).splitlines()
    (cost,) = (line for line in lines if line.startswith("training "))
    exaflops, minutes = re.search(r"(\S+) exaFLOPs, (\S+) H200-minutes at 40 % MFU", cost).groups()  # type: ignore[union-attr]
    # An H200 has 989 TFLOP/s in bf16 (data sheet).
    assert float(minutes) == pytest.approx(float(exaflops) * 1e18 / (0.4 * 989.5e12) / 60, rel=0.05)
    assert lines[-2:-1] == ["planned for             H200 (plan.device)"]
    assert lines[-1].startswith("this machine, no GPU    about ")
    assert not [line for line in lines if " 0.00 GiB" in line]
    on_gpus = describe_training(small(workers={"num_workers": 2, "use_gpu": True}))
    assert "this machine" not in on_gpus


@pytest.mark.parametrize(
    ("pass_s", "told"),  # 100 steps of 64 images
    [
        (2.0, r"about 0:03:20 on \d+ CPU cores, 32\.0 images/s in bf16 .*each: 64\)"),
        (128.0, r"about 3:33:20 on \d+ CPU cores, 0\.5 images/s in bf16 .*each: 64\)"),
    ],
)
def test_the_time_here_is_that_of_the_second_pass_for_all_images(pass_s, told, monkeypatch):
    times = iter([0.0, 10.0, 20.0, 20.0 + pass_s])
    monkeypatch.setattr(dry_run, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    assert re.search(told, describe_training(small()).splitlines()[-1])
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert "this machine" not in describe_training(small())


def test_the_memory_that_it_prints_is_the_estimates():
    recipe = small()
    text = describe_training(recipe)
    assert "100 of 64 images: 10.00 epochs" in text
    assert "global batch 64 = 2 x micro-batch 16 x 2 passes" in text
    memory = estimate_memory(recipe, 10, 16, 2)
    assert f"{memory.total:.2f} GiB under ZeRO 2" in text
    assert re.search(rf"activations +{memory.activations:.2f} GiB", text)


def test_a_model_too_large_for_the_device_is_said_to_be():
    large = [*BILLION, "train.averaging=0.9999", "workers.num_workers=1", "plan.device=T4"]
    recipe = load_recipe(RECIPES / "paper" / "vit_b32_jft.yaml", large)
    text = describe_training(recipe)
    assert "does not fit a T4" in text
    assert "tried: two passes of a ViT-Ti/16; images in each: 1)" in text.splitlines()[-1]


def test_the_time_of_a_large_model_is_by_its_multiply_adds(monkeypatch):
    times = iter([0.0, 10.0, 20.0, 20.01])
    monkeypatch.setattr(dry_run, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    text = describe_training(load_recipe("paper/vit_b16_jft")).splitlines()[-1]
    rate = re.search(r"(\d\.\d) images/s in bf16 .*ViT-Ti/16; images in each: 1\)", text)
    assert rate is not None, text
    assert float(rate[1]) == pytest.approx(100 * 1.26 / 17.58, abs=0.1)  # GMAC, as timm's table


def test_frozen_parts_of_a_large_model_are_not_looked_for_in_the_small_one():
    model = {"name": "ViT-L/16", "image_size": 224}
    frozen = {"epochs": 10, "frozen": ["blocks.0-17"]}
    text = describe_training(small(model=model, optim=frozen)).splitlines()[-1]
    assert "two passes of a ViT-Ti/16" in text


@pytest.mark.slow
def test_a_sweep_is_described_by_its_rates_and_one_trial():
    text = describe_sweep(load_recipe(RECIPES / "finetune" / "pets.yaml"))
    assert "4 trials (learning rates 0.001, 0.003, 0.01, 0.03), then 3 runs" in text
    assert "500 of 512 images" in text
    # Of the paper's Table 4: 500 steps each; 4 trials and 3 retrainings.
    table = [line.split() for line in text.splitlines()[2:8]]
    assert [row[0] for row in table] == ["lr0.001", "lr0.003", "lr0.01", "lr0.03", "each", "in"]
    of_a_run = float(table[0][2])
    assert [row[-3] for row in table] == ["500"] * 5 + ["3,500"]
    assert float(table[-1][-2]) == pytest.approx(7 * of_a_run, rel=1e-3)


def test_the_retrainings_of_a_sweep_are_counted_at_the_point_that_costs_most():
    data = {"train": "/data/train", "eval": "/data/test"}
    sweep = {"space": {"optim.epochs": [2, 10, 4]}, "seeds": 2}
    text = describe_sweep(small(data=data, sweep=sweep))
    steps = [line.split()[-3] for line in text.splitlines()[2:7]]
    assert steps[3:] == ["100", str(sum(map(int, steps[:3])) + 200)]
    assert text.splitlines()[5].startswith("each retraining, at most ")
