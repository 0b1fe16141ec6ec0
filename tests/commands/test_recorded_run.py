"""A recorded run: what its steps see, whether its ranks received that, and a fork of it."""

import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

from tests.checkpoints.written import WEIGHTS_0, WEIGHTS_1, flip
from tests.commands.command_line import run_cli
from tests.data.damage import damage
from tests.end_to_end.runs import same_weights
from tests.launch.test_dataset import recipe_on, sets
from tests.models.small import small_model
from tests.trained_runs import write_run
from vit_ray.checkpoints.checkpoint import Progress, add_digests, folder_name, samples_digest
from vit_ray.checkpoints.run_checkpoints import (
    begin_training,
    newest_checkpoint,
)
from vit_ray.config import Recipe, load_recipe
from vit_ray.data import open_dataset
from vit_ray.launch.dataset import read_batch, training_batches
from vit_ray.launch.named_run import accepted_changes, find_resume_point
from vit_ray.launch.resolved_run import resolve_run
from vit_ray.metric_names import RESULT_STEP
from vit_ray.outcomes import BRANCH_NOTE
from vit_ray.storage import locate

__all__ = ["sets"]
STEP = 7


def said(*words: str) -> tuple[int, str]:
    done = run_cli(*words)
    return done.exit_code, done.output


def verified(run: str) -> tuple[int, str]:
    return said("verify", "digits", f"verify.path={run}")


@pytest.fixture
def recipe(sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.chdir(tmp_path)
    return recipe_on(sets, output=str(tmp_path / "runs"), data={"shuffle_window": 32})


def write_parent(recipe: Recipe, **more: Any) -> str:
    """A run of this recipe with a checkpoint at `STEP`, in global batches of 16; its folder."""
    resolved = resolve_run(recipe)
    facts = {
        "recipe": resolved.recipe.recorded(), "data_fingerprint": resolved.manifest.fingerprint,
        "global_batch_size": 16, "samples_seen": STEP * 16, "tracking_run_id": "a" * 32, **more,
    }  # fmt: skip
    return write_run(Path(recipe.run_folder), small_model("ViT"), facts=facts)


def with_digest(recipe: Recipe, digest: int | None = None) -> str:
    """A run whose checkpoint has this digest, of steps 4 to 6."""
    return write_parent(recipe, progress=Progress(STEP, samples_digest=digest, digest_from=4))


@pytest.fixture
def file(recipe: Recipe, tmp_path: Path) -> str:
    """The recipe of a run that has not begun."""
    path = tmp_path / "seen.yaml"
    path.write_text(yaml.safe_dump(recipe.written()))
    return str(path)


def test_table_and_pictures_of_a_recipe_before_its_run(file, recipe, tmp_path):
    words = ("batch", file, "step=2", "--out", str(tmp_path / "out"))
    code, text = said(*words)
    assert code == 0, text
    table = pq.read_table(tmp_path / "out" / "batch.parquet").to_pylist()
    assert table == read_batch(resolve_run(recipe), 2)[1]
    assert {name for row in table for name in row["classes"]} == {"cat", "dog", "emu"}
    assert Image.open(tmp_path / "out" / "batch.png").width == 8 * 160
    code, text = said(*words)
    assert (code, "exists already" in text) == (2, True)


def test_no_batch_is_of_another_step_recipe_or_data_set_than_the_runs(file, recipe, sets):
    folder = write_parent(recipe.with_changes(seed=5))
    for words, told in [
        ((folder, "step=20"), "the run has 20 steps; give one from 0 to 19"),
        ((folder, "step=-1"), "give one step"),
        ((folder, "step=1", "sed=4"), "unknown key sed; did you mean seed?"),
        ((file, "step=1"), "seed was 5 and is 0"),
        ((folder, "step=1", "data.augment.flip=false"), "flip was True and is False"),
        ((folder, "step=1", f"data.train={sets / 'small'}"), "own data set as data.train=PATH"),
    ]:
        code, text = said("batch", *words)
        assert (code, told in text) == (2, True), text


def received(recipe: Recipe, first: int, last: int) -> int:
    """The digest of what two ranks get in these steps."""
    digest, share = 0, recipe.train.global_batch_size // 2
    for rank in range(2):
        batches = training_batches(recipe, rank, 2)
        for step in range(first, last):
            place = step * 2 * share + rank * share
            digest = add_digests(digest, samples_digest(place, batches[step]["sample"]))
    return digest


def test_samples_are_whole_in_the_runs_order_and_others_are_named_by_their_steps(recipe):
    whole = with_digest(recipe, received(recipe, 4, 7))
    told = "step 7: files whole; samples of steps 4 to 6 in the planned order\n"
    assert verified(whole) == (0, told)
    code, text = verified(with_digest(recipe.with_changes(name="other"), received(recipe, 3, 6)))
    assert code == 1
    assert "step 7: the samples of steps 4 to 6 differ from the planned order" in text


def test_a_neighbour_of_an_image_that_cannot_be_decoded_is_no_other_sample(recipe, sets, tmp_path):
    bad = int(training_batches(recipe).planned(5)[3])
    shutil.copytree(sets / "large", tmp_path / "set")
    damage(open_dataset(str(tmp_path / "set")), group=bad // 8, rows=[bad % 8])
    recipe = recipe.with_changes(data={"train": str(tmp_path / "set"), "max_bad_fraction": 0.1})
    assert bad not in training_batches(recipe)[5]["sample"]
    code, text = verified(with_digest(recipe, received(recipe, 4, 7)))
    assert (code, "planned order, with neighbours for undecodable" in text) == (0, True), text
    assert verified(with_digest(recipe.with_changes(name="other"), received(recipe, 3, 6)))[0] == 1


def test_a_changed_file_and_a_folder_named_after_another_step_are_told(recipe):
    """A resume passes the second over."""
    folder = Path(locate(with_digest(recipe)).child(folder_name(7)).path)
    shutil.copytree(folder, folder.parent / folder_name(9))
    code, text = verified(str(folder.parent))
    assert code == 1
    assert "step 7: files whole" in text
    assert re.search("step 9: checkpoint.*is of step 7, unlike its name", text, re.S)
    shutil.rmtree(folder.parent / folder_name(9))
    flip(locate(str(folder)))
    code, text = verified(str(folder.parent))
    assert (code, WEIGHTS_0 in text) == (1, True)


@pytest.fixture
def parent(recipe: Recipe) -> str:
    return write_parent(recipe)


def test_a_fork_changes_its_own_recipe_and_nothing_of_its_parent(parent, recipe):
    before = {p.name: p.read_bytes() for p in Path(parent).rglob("*") if p.is_file()}
    code, text = said("fork", parent, f"step={STEP}", "name=lower", "optim.learning_rate=3e-5")
    assert code == 0, text
    assert "optim.learning_rate was 0.001 and is 3e-05" in text
    assert {p.name: p.read_bytes() for p in Path(parent).rglob("*") if p.is_file()} == before
    forked, resolved = load_recipe(Path("lower.yaml")), resolve_run(recipe.with_absolute_paths())
    changes = {"optim": {"learning_rate": 3e-5}, "name": "lower"}
    assert forked == resolved.recipe.with_changes(**changes)
    resumed, original = find_resume_point(forked), newest_checkpoint(locate(parent))
    assert resumed is not None
    assert original is not None
    assert not accepted_changes(resolve_run(forked), resumed.position)
    assert same_weights(resumed.weights(), original.weights())
    assert (resumed.position.step, resumed.position.tracking_run_id) == (STEP, None)
    assert said("batch", forked.run_folder, f"step={STEP}")[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("step=8 name=x", "the steps of the complete checkpoints in"),
        ("step=7 name=x model.depth=2", "model.depth was 1 and is 2: a fork keeps"),
        ("step=7 name=x train.global_batch_size=32", "is 32: a fork keeps"),
        ("step=7 name=x data.held_out_fraction=0.1", "is 0.1: a fork keeps"),
        ("step=7 name=x data.train={}/small", "fingerprint was .*own value or data set"),
        ("step=7 name=x optim.steps=7", "at step 7; give a larger optim.steps or"),
        ("step=7 name=seen", "exists already; give another name"),
    ],
)
def test_what_cannot_be_is_refused_and_writes_nothing(parent, recipe, sets, words, message):
    code, text = said("fork", parent, *words.format(sets).split())
    assert code == 2, text
    assert re.search(message, text), text
    assert sorted(p.name for p in Path(recipe.output).iterdir()) == ["seen"]
    assert not list(Path().glob("*.yaml"))


def test_a_dry_run_writes_nothing_and_a_name_is_taken_once(parent, recipe, tmp_path, monkeypatch):
    words = (parent, f"step={STEP}", "name=again")
    code, text = said("fork", *words, "--dry-run")
    assert (code, "nothing else changes the training" in text) == (0, True), text
    assert not Path("again.yaml").exists()
    assert sorted(p.name for p in Path(recipe.output).iterdir()) == ["seen"]
    assert said("fork", *words)[0] == 0
    code, text = said("fork", *words, "optim.learning_rate=3e-5")
    assert (code, "again.yaml exists already" in text) == (2, True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # without its recipe
    code, text = said("fork", *words, "optim.learning_rate=3e-5")
    assert (code, "runs/again exists already" in text) == (2, True)
    assert not Path("again.yaml").exists()


@pytest.mark.parametrize("cut", ["lock", "note", "begun", "part"])
def test_a_fork_that_was_cut_short_is_made_again_when_its_folder_is_deleted(parent, recipe, cut):
    words = (parent, f"step={STEP}", "name=again")
    assert said("fork", *words)[0] == 0
    folder = Path(recipe.output) / "again"
    step, note = folder / "step-00000007", (folder / BRANCH_NOTE).read_bytes()
    whole = {path.name for path in step.iterdir()}
    Path("again.yaml").unlink()  # the last that is written
    if cut == "part":
        (step / WEIGHTS_1).unlink()
        (step / "commit.json").unlink()
    else:
        shutil.rmtree(folder)
        folder.mkdir()
    if cut == "note":
        (folder / f"{BRANCH_NOTE}.1f2e3d4c.tmp").write_bytes(note[:3])
    if cut == "begun":
        (folder / BRANCH_NOTE).write_bytes(note)
        begin_training(locate(str(folder)))
    if cut != "lock":
        code, text = said("fork", *words)
        assert (code, "delete the folder if a fork was" in text) == (2, True), text
        shutil.rmtree(folder)
    code, text = said("fork", *words)
    assert code == 0, text
    assert {path.name for path in step.iterdir()} == whole
    found = load_recipe(Path("again.yaml"))
    resumed = find_resume_point(found)
    assert resumed is not None
    assert resumed.position.step == STEP
    # What was committed counts: without its folder the fork does not begin at step 0.
    shutil.rmtree(step)
    with pytest.raises(ValueError, match="none of them can be used"):
        find_resume_point(found)


def test_what_was_measured_of_the_parent_is_not_the_forks(recipe):
    progress = Progress(
        STEP, best_eval_loss=0.1, evals_without_best=3, num_evals=4,
        ended="no better", metrics={"eval/top1": 0.9, RESULT_STEP: 5.0}, samples_digest=171,
        skipped_steps=2, recent_norms=[0.5, 0.7],
    )  # fmt: skip
    parent = write_parent(recipe.with_changes(resume=False), progress=progress)
    assert said("fork", parent, f"step={STEP}", "name=fork")[0] == 0
    forked = load_recipe(Path("fork.yaml"))
    assert forked.resume == "auto"
    found = find_resume_point(forked)
    assert found is not None
    # `train.skip_above` compares the next norms with those of the steps before the fork.
    assert found.position.progress == Progress(STEP, skipped_steps=2, recent_norms=[0.5, 0.7])
