"""`vit-ray batch`: what it writes of a run and of a recipe, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner
from PIL import Image

from tests.launch.test_seen_batch import recipe_on, sets
from tests.models.small import small_model
from tests.trained_runs import write_run
from vit_ray.commands.cli import vit_ray
from vit_ray.config import Recipe
from vit_ray.data import open_dataset
from vit_ray.launch.dataset import SeenBatches
from vit_ray.launch.resolved_run import resolve_run

__all__ = ["sets"]


def said(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(vit_ray, ["batch", *words])
    return result.exit_code, result.output


@pytest.fixture
def recipe(sets: Path, tmp_path: Path) -> Recipe:
    return recipe_on(sets, output=str(tmp_path / "runs"), data={"shuffle_window": 32})


@pytest.fixture
def file(recipe: Recipe, tmp_path: Path) -> str:
    """The recipe of a run that has not begun."""
    path = tmp_path / "seen.yaml"
    path.write_text(yaml.safe_dump(recipe.written()))
    return str(path)


def begin(recipe: Recipe, run_id: str | None = None, **changes: Any) -> str:
    """A run of the recipe with a checkpoint of step 7, of two ranks; its folder."""
    facts = {
        "recipe": recipe.with_changes(**changes).recorded(),
        "data_fingerprint": open_dataset(str(recipe.data.train)).fingerprint,
        "global_batch_size": 16, "samples_seen": 7 * 16, "tracking_run_id": run_id,
    }  # fmt: skip
    return write_run(Path(recipe.run_folder), small_model("ViT"), facts=facts)


def test_table_and_pictures_of_a_recipe_before_its_run(file, recipe, tmp_path):
    out = tmp_path / "out"
    code, text = said(file, "step=2", "--out", str(out))
    assert code == 0, text
    table = pq.read_table(out / "batch.parquet").to_pylist()
    assert table == SeenBatches(resolve_run(recipe)).read(2)[1]
    assert {name for row in table for name in row["classes"]} == {"cat", "dog", "emu"}
    assert Image.open(out / "batch.png").width == 8 * 160
    code, text = said(file, "step=2", "--out", str(out))
    assert code == 2
    assert "exists already" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["step=20"], "the run has 20 steps; give one from 0 to 19"),
        (["step=-1"], "give one step"),
        (["step=1", "sed=4"], "unknown key sed; did you mean seed?"),
    ],
)
def test_what_cannot_be_is_refused(file, words, message):
    code, text = said(file, *words)
    assert (code, message in text) == (2, True), text
    assert len(text.strip().splitlines()[-1]) < 500


def test_another_recipe_or_data_set_than_the_runs_is_refused(file, recipe, sets):
    folder = begin(recipe, seed=5)
    code, text = said(file, "step=1")
    assert (code, "seed was 5 and is 0" in text) == (2, True), text
    code, text = said(folder, "step=1", "data.augment.flip=false")
    assert (code, "data.augment.flip was True and is False" in text) == (2, True), text
    assert f"give the run's folder, {folder}" in text
    code, text = said(folder, "step=1", f"data.train={sets / 'small'}")
    assert (code, "is not the data set of the run 'seen'" in text) == (2, True), text


def test_a_step_before_a_fork_is_its_parents(recipe):
    folder = begin(recipe)
    (Path(folder) / "branched_from.txt").write_text("parent at step 5")
    code, text = said(folder, "step=4")
    assert (code, "branches off parent at step 5" in text) == (2, True), text
    assert said(folder, "step=5", "--out", f"{folder}-5")[0] == 0
