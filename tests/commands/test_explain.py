"""`vit-ray explain`: the image that makes a step's gradient is named, and none where none does."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from tests.data.pictures import jpeg
from tests.data.small_sets import write_encoded
from tests.recipes import recipe_with
from tests.trained_runs import write_run
from vit_ray.commands.cli import vit_ray
from vit_ray.commands.trained.explain import likeness
from vit_ray.config import Recipe
from vit_ray.data import open_dataset
from vit_ray.data.format.shard_writer import EncodedImage
from vit_ray.launch.inputs.seen_batch import SeenBatches
from vit_ray.launch.inputs.streams import resolve_run
from vit_ray.train.objective import build_objective

LABELLED, STEPS, AT = 13, 20, 2
"""The one image with a label: with a bias of -10, all others have next to no loss."""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    (tmp_path / "set").mkdir()
    images = [
        EncodedImage(jpeg(i, 20, 24), (1,) if i == LABELLED else (), f"{i}.jpg", 24, 20)
        for i in range(70)
    ]
    write_encoded(tmp_path / "set", "part-0.parquet", images, ["cat", "dog", "emu"], 8)
    model = {
        "name": "ViT", "image_size": 16, "depth": 1, "width": 8, "mlp_dim": 8, "num_heads": 2,
        "patch_size": 4, "head_bias": -10.0,
    }  # fmt: skip
    return recipe_with(
        "seen", model=model, data={"train": str(tmp_path / "set"), "shuffle_window": 0},
        train={"global_batch_size": 16, "precision": "fp32", "loss": "sigmoid"},
        optim={"steps": STEPS}, output=str(tmp_path / "runs"),
    )  # fmt: skip


@pytest.fixture
def run(recipe: Recipe) -> str:
    """With one checkpoint, of step 7."""
    torch.manual_seed(0)
    facts = {
        "recipe": recipe.recorded(),
        "data_fingerprint": open_dataset(str(recipe.data.train)).fingerprint,
        "global_batch_size": 16, "samples_seen": 7 * 16,
    }  # fmt: skip
    return write_run(Path(recipe.run_folder), build_objective(recipe, 3), facts=facts)


def said(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(vit_ray, ["explain", *words])
    return result.exit_code, result.output


def steps_with_it(recipe: Recipe) -> list[int]:
    return [step for step, *_ in SeenBatches(resolve_run(recipe)).steps_of(LABELLED)]


def test_the_image_that_makes_the_gradient_is_named_shown_and_left_out_by_a_fork(
    recipe: Recipe, run: str, tmp_path: Path
) -> None:
    has_it = steps_with_it(recipe)
    step = next(k for k in has_it if k > 7 and not {k - 1, k + 1} & {*has_it})
    out = tmp_path / "out"
    code, text = said(run, f"step={step}", "--out", str(out))
    assert code == 0, text
    assert f"weights of checkpoint 7, {step - 7} steps before" in text
    assert "verdict: 1 of 16 images make the gradient" in text
    assert re.search(rf"sample {LABELLED} \({LABELLED}\.jpg, dog\): share \d+\.\d%, loss 10", text)
    assert f"vit-ray fork {run} step=7 name=seen-without data.exclude=[{LABELLED}]" in text
    with (out / "images.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    planned = SeenBatches(resolve_run(recipe)).planned(step)
    assert [int(row["sample"]) for row in rows] == planned.tolist()
    assert sum(float(row["share"]) for row in rows) == pytest.approx(1.0, abs=1e-4)
    assert np.argmax([float(row["loss"]) for row in rows]) == planned.tolist().index(LABELLED)
    with Image.open(out / "explain.png") as picture:
        assert picture.width > 0


def test_a_step_like_its_neighbours_has_no_culprit(
    recipe: Recipe, run: str, tmp_path: Path
) -> None:
    has_it = {*steps_with_it(recipe)}
    step = next(k for k in range(8, STEPS - 1) if not {k - 1, k, k + 1} & has_it)
    code, text = said(run, f"step={step}", "--out", str(tmp_path / "out"))
    assert code == 0, text
    assert "verdict: no image is the cause" in text
    assert "data.exclude" not in text


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("step=3",), "no checkpoint at or before it (it has those of steps 7); give a later step"),
        (("step=20",), "the run has 20 steps; give one from 0 to 19"),
        (("stop=9",), "give the step to explain, counted from 0, such as step=1200"),
    ],
)
def test_what_cannot_be_explained_is_refused(run: str, words: tuple[str, ...], error: str) -> None:
    code, text = said(run, *words)
    assert code == 2
    assert error in text


@pytest.mark.parametrize(
    ("kept", "told"),
    [({4: 0.5, 9: 2.0}, "these are its weights"), ({4: 0.5, 9: 2.6}, "differ .* by up to 0.6:")],
)
def test_losses_that_were_kept_tell_whether_these_are_the_runs_weights(
    kept: dict[int, float], told: str
) -> None:
    assert re.search(told, likeness([0.5, 2.0, 1.0], [4, 9, 11], kept))
