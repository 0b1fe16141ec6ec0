"""`vit-ray plan`: its numbers, what it needs, and its errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.commands.command_line import run_cli
from tests.data.converted_set import converted_set
from tests.recipes import SMALL
from vit_ray.commands.plan import data_facts, describe_plan, planned_cluster
from vit_ray.config import Recipe, load_recipe

# 12 x 9,216^2 parameters at 16 bytes, and 4 for an average: 19 GiB.
BILLION = (*SMALL, "model.width=9216", "model.mlp_dim=36864", "model.num_heads=72")
ROOT = Path(__file__).parents[2]
PAPER = ROOT / "jobs" / "recipes" / "paper"


def recipe_of(*overrides: str, file: str = "vit_l16_jft") -> Recipe:
    return load_recipe(PAPER / f"{file}.yaml", list(overrides))


def rows(text: str) -> dict[str, list[str]]:
    """The table of a plan: name of the row to its four columns."""
    table = text.split("\n\n")[1].splitlines()
    split = [re.split(r"\s{2,}", line.strip()) for line in table]
    return {name: values for name, *values in split}


def test_the_plan_of_vit_h_states_work_memory_and_time():
    text = describe_plan(recipe_of(file="vit_h14_jft"))
    assert "1,035,645 of 4,096 images: 14.00 epochs" in text
    assert "4,259 exaFLOPs, 2,990 H200-hours at 40 % MFU" in text
    table = rows(text)
    assert table["ZeRO stage"] == ["0", "1", "2", "3"]
    parts = ("weights", "gradients", "optimizer", "batches", "activations", "buffers")
    assert all(len(table[part]) == 4 for part in parts)
    assert "averages" not in table  # nothing is averaged
    days = [float(value) for value in table["core-days (GPU-days)"]]
    # 2,990 hours by the paper's count are 124.6 days, 2.7 % less as computed.
    assert days == pytest.approx([0.973 * 124.6] * 4, rel=1e-3)


def test_gpus_on_the_command_line_are_those_of_the_cluster():
    key, option = (
        run_cli("plan", "paper/vit_b16_jft", *words)
        for words in (["plan.num_gpus=4"], ["--gpus", "4"])
    )
    assert "cluster                 4 x H200" in option.stdout
    assert option.stdout == key.stdout


def test_rows_of_the_table_agree_with_each_other():
    table = rows(describe_plan(recipe_of("plan.num_gpus=4", file="vit_b16_jft")))
    for stage in range(4):
        micro, passes = (
            int(table[name][stage]) for name in ("planned micro-batch", "passes per step")
        )
        assert micro * passes * 4 == 4096
        step_s = float(table["step in s"][stage])
        assert float(table["run in days"][stage]) == pytest.approx(
            step_s * 517_822 / 86_400, rel=0.01
        )
        assert float(table["images per s and GPU"][stage]) == pytest.approx(
            4096 / 4 / step_s, rel=0.02
        )


def test_a_model_that_fits_nowhere_says_none():
    large = ("train.averaging=0.9999", "plan.device=T4", "plan.num_gpus=1")
    table = rows(describe_plan(recipe_of(*BILLION, *large)))
    assert table["largest micro-batch"] == ["none"] * 4
    assert table["planned micro-batch"] == ["1"] * 4


def test_a_number_of_gpus_that_does_not_divide_the_batch_is_refused():
    with pytest.raises(ValueError, match=r"plan\.num_gpus=60 does not divide .*=4096; use 32"):
        planned_cluster(recipe_of("plan.num_gpus=60"))


def test_a_data_set_that_is_not_there_yet_is_as_the_recipe_tells(tmp_path):
    missing = f"data.train={tmp_path}/nothing"
    assert data_facts(recipe_of(missing)).num_images == 303_000_000
    for counts in (["plan.num_images=null", "plan.num_classes=null"], ["plan.num_classes=null"]):
        with pytest.raises(ValueError, match=r"nothing' is not a data set.*plan\.num_images"):
            data_facts(recipe_of(missing, *counts))


def test_a_plan_takes_counts_before_a_set_and_a_dry_run_the_set_before_counts():
    small = ["train.global_batch_size=4", "optim.warmup_steps=0", "optim.epochs=2"]
    small += ["data.shuffle_window=0", "workers.num_workers=1"]
    recipe = recipe_of(f"data.train={converted_set()}", *small)
    assert data_facts(recipe).num_images == 12
    assert "images                  303,000,000 of" in describe_plan(recipe)
    counted = recipe.with_changes(plan={"num_images": None, "num_classes": None})
    assert "images                  12 of 3 classes" in describe_plan(counted)
    for missing in ("num_images", "num_classes"):
        with pytest.raises(
            ValueError, match=rf"plan\.{missing}=None.* is missing; give both counts"
        ):
            describe_plan(recipe.with_changes(plan={missing: None}))


def test_what_is_held_out_is_not_trained_on():
    small = ["train.global_batch_size=64", "optim.warmup_steps=0", "optim.epochs=2"]
    counts = ["plan.num_images=500", "plan.num_classes=2", "data.held_out_fraction=0.1"]
    facts = data_facts(recipe_of(*small, *counts))
    assert (facts.num_images, facts.num_classes) == (450, 2)
    assert facts.total_steps == round(450 * 2 / 64)
