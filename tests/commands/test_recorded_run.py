"""`vit-ray batch` and `verify` of a run: what its steps see, and whether its ranks received it."""

import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

from tests.checkpoints.written import WEIGHTS_0, flip
from tests.commands.command_line import run_cli
from tests.data.damage import damage
from tests.launch.test_seen_batch import recipe_on, sets
from tests.models.small import small_model
from tests.trained_runs import write_run
from vit_ray.checkpoints.checkpoint import Progress, add_digests, folder_name, samples_digest
from vit_ray.config import Recipe
from vit_ray.data import open_dataset
from vit_ray.launch.dataset import SeenBatches, training_batches
from vit_ray.launch.resolved_run import resolve_run
from vit_ray.storage import locate

__all__ = ["sets"]


def said(*words: str) -> tuple[int, str]:
    done = run_cli(*words)
    return done.exit_code, done.output


def verified(run: str) -> tuple[int, str]:
    return said("verify", "digits", f"verify.path={run}")


@pytest.fixture
def recipe(sets: Path, tmp_path: Path) -> Recipe:
    return recipe_on(sets, output=str(tmp_path / "runs"), data={"shuffle_window": 32})


@pytest.fixture
def file(recipe: Recipe, tmp_path: Path) -> str:
    """The recipe of a run that has not begun."""
    path = tmp_path / "seen.yaml"
    path.write_text(yaml.safe_dump(recipe.written()))
    return str(path)


def begin(recipe: Recipe, digest: str = "", **changes: Any) -> str:
    """A run with a checkpoint of step 7, whose digest is of steps 4 to 6; its folder."""
    facts = {
        "progress": Progress(step=7, samples_digest=digest, digest_from=4),
        "recipe": recipe.with_changes(**changes).recorded(),
        "data_fingerprint": open_dataset(str(recipe.data.train)).fingerprint,
        "global_batch_size": 16, "samples_seen": 7 * 16,
    }  # fmt: skip
    return write_run(Path(recipe.run_folder), small_model("ViT"), facts=facts)


def test_table_and_pictures_of_a_recipe_before_its_run(file, recipe, tmp_path):
    words = ("batch", file, "step=2", "--out", str(tmp_path / "out"))
    code, text = said(*words)
    assert code == 0, text
    table = pq.read_table(tmp_path / "out" / "batch.parquet").to_pylist()
    assert table == SeenBatches(resolve_run(recipe)).read(2)[1]
    assert {name for row in table for name in row["classes"]} == {"cat", "dog", "emu"}
    assert Image.open(tmp_path / "out" / "batch.png").width == 8 * 160
    code, text = said(*words)
    assert (code, "exists already" in text) == (2, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["step=20"], "the run has 20 steps; give one from 0 to 19"),
        (["step=-1"], "give one step"),
        (["step=1", "sed=4"], "unknown key sed; did you mean seed?"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(file, words, message):
    code, text = said("batch", file, *words)
    assert (code, message in text) == (2, True), text


def test_another_recipe_or_data_set_than_the_runs_is_refused(file, recipe, sets):
    folder = begin(recipe, seed=5)
    for words, told in [
        ((file,), "seed was 5 and is 0"),
        ((folder, "data.augment.flip=false"), "data.augment.flip was True and is False"),
        ((folder, f"data.train={sets / 'small'}"), "is not the data set of the run 'seen'"),
    ]:
        code, text = said("batch", *words, "step=1")
        assert (code, told in text) == (2, True), text


def test_a_step_before_a_fork_is_its_parents(recipe):
    folder = begin(recipe)
    (Path(folder) / "branched_from.txt").write_text("parent at step 5")
    code, text = said("batch", folder, "step=4")
    assert (code, "branches off parent at step 5" in text) == (2, True), text
    assert said("batch", folder, "step=5", "--out", f"{folder}-5")[0] == 0


def received(recipe: Recipe, first: int, last: int) -> str:
    """The digest of what two ranks get in these steps."""
    digest, share = 0, recipe.train.global_batch_size // 2
    for rank in range(2):
        batches = training_batches(recipe, rank, 2)
        for step in range(first, last):
            place = step * 2 * share + rank * share
            digest = add_digests(digest, samples_digest(place, batches[step]["sample"]))
    return f"{digest:016x}"


def test_samples_are_whole_in_the_runs_order_and_others_are_named_by_their_steps(recipe):
    whole = begin(recipe, received(recipe, 4, 7))
    told = "step 7: files whole; samples of steps 4 to 6 in the planned order\n"
    assert verified(whole) == (0, told)
    code, text = verified(begin(recipe.with_changes(name="other"), received(recipe, 3, 6)))
    assert code == 1
    assert "step 7: the samples of steps 4 to 6 differ from the planned order" in text


def test_a_neighbour_of_an_image_that_cannot_be_decoded_is_no_other_sample(recipe, sets, tmp_path):
    bad = int(SeenBatches(resolve_run(recipe)).planned(5)[3])
    shutil.copytree(sets / "large", tmp_path / "set")
    damage(open_dataset(str(tmp_path / "set")), group=bad // 8, rows=[bad % 8])
    recipe = recipe.with_changes(data={"train": str(tmp_path / "set"), "max_bad_fraction": 0.1})
    assert bad not in training_batches(recipe)[5]["sample"]
    code, text = verified(begin(recipe, received(recipe, 4, 7)))
    assert (code, "planned order, with neighbours for undecodable" in text) == (0, True), text
    assert verified(begin(recipe.with_changes(name="other"), received(recipe, 3, 6)))[0] == 1


def test_a_changed_file_and_a_folder_named_after_another_step_are_told(recipe):
    """A resume passes the second over."""
    folder = Path(locate(begin(recipe)).child(folder_name(7)).path)
    shutil.copytree(folder, folder.parent / folder_name(9))
    code, text = verified(str(folder.parent))
    assert code == 1
    assert "step 7: files whole" in text
    assert re.search("step 9: checkpoint.*is of step 7, unlike its name", text, re.S)
    shutil.rmtree(folder.parent / folder_name(9))
    flip(locate(str(folder)))
    code, text = verified(str(folder.parent))
    assert (code, WEIGHTS_0 in text) == (1, True)
