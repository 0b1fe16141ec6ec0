"""`vit-ray plan`: its numbers, what it needs, and its errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.data.pictures import jpeg
from tests.recipes import SMALL
from vit_ray.commands.plans.plan import (
    data_facts,
    describe_plan,
    plan_stage,
    planned_cluster,
    told_facts,
)
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


def test_the_plan_of_vit_h_states_work_memory_traffic_and_time() -> None:
    text = describe_plan(recipe_of(file="vit_h14_jft"))
    assert "1,035,645 of 4,096 images: 14.00 epochs" in text
    assert "4,259 exaFLOPs, 2,990 H200-hours at 40 % MFU" in text
    table = rows(text)
    assert table["ZeRO stage"] == ["0", "1", "2", "3"]
    parts = ("weights", "gradients", "optimizer", "averages", "batches", "activations", "buffers")
    # The second row named so is the traffic of weights and gradients.
    assert all(len(table[part]) == 4 for part in parts)
    days = [float(value) for value in table["core-days (GPU-days)"]]
    # 2,990 hours by the paper's count are 124.6 days, 2.7 % less as computed.
    assert days == pytest.approx([0.973 * 124.6] * 4, rel=1e-3)


def test_rows_of_the_table_agree_with_each_other() -> None:
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


@pytest.mark.slow
def test_each_stage_needs_less_state_than_the_one_before() -> None:
    recipe = recipe_of("train.micro_batch_size=32", "plan.num_gpus=64")
    facts, cluster = told_facts(recipe), planned_cluster(recipe)
    stages = [plan_stage(recipe, facts, cluster, stage).memory for stage in range(4)]
    optimizer = [memory.optimizer for memory in stages]
    assert optimizer[0] == pytest.approx(64 * optimizer[1])
    assert optimizer[1:] == [optimizer[1]] * 3
    assert stages[2].gradients == pytest.approx(stages[0].gradients / 64)
    assert stages[3].weights == pytest.approx(stages[2].weights / 64)
    assert len({memory.activations for memory in stages}) == 1


def test_a_model_that_fits_nowhere_says_none() -> None:
    large = ("train.averaging=0.9999", "plan.device=T4", "plan.num_gpus=1")
    table = rows(describe_plan(recipe_of(*BILLION, *large)))
    assert table["largest micro-batch"] == ["none"] * 4
    assert table["planned micro-batch"] == ["1"] * 4


def test_a_number_of_gpus_that_does_not_divide_the_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"plan\.num_gpus=60 does not divide .*=4096; use 32"):
        planned_cluster(recipe_of("plan.num_gpus=60"))


def test_counts_are_told_in_pairs() -> None:
    with pytest.raises(ValueError, match=r"num_images=303000000 and num_classes=None: give both"):
        recipe_of("plan.num_classes=null")


def test_a_data_set_that_is_not_there_yet_is_as_the_recipe_tells(tmp_path: Path) -> None:
    missing = f"data.train={tmp_path}/nothing"
    for facts in (told_facts, data_facts):
        assert facts(recipe_of(missing)).num_images == 303_000_000
        with pytest.raises(ValueError, match=r"nothing' is not a data set.*plan\.num_images"):
            facts(recipe_of(missing, "plan.num_images=null", "plan.num_classes=null"))


def test_the_source_is_counted_before_it_is_converted(tmp_path: Path) -> None:
    for name, count in (("cat", 300), ("dog", 200)):
        (tmp_path / name).mkdir()
        for index in range(count):
            (tmp_path / name / f"{index}.jpg").write_bytes(jpeg(index % 3))
    convert = f"convert={{source: {tmp_path}, destination: {tmp_path}/data}}"
    small = ["train.global_batch_size=64", "optim.warmup_steps=0", "optim.epochs=2"]
    recipe = recipe_of(convert, f"data.train={tmp_path}/data", "data.held_out_fraction=0.1", *small)
    facts = data_facts(recipe)
    assert (facts.num_images, facts.num_classes) == (450, 2)
    assert facts.total_steps == round(450 * 2 / 64)
    assert facts.source.startswith("counted in ")
    elsewhere = recipe_of(convert, f"data.train={tmp_path}/other", *small)
    assert data_facts(elsewhere).num_images == 303_000_000
