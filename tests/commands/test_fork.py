"""`vit-ray fork`: what a fork takes over and changes, and what it refuses."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints.written import WEIGHTS_1
from tests.commands.command_line import run_cli
from tests.end_to_end.runs import same_weights
from tests.launch.test_seen_batch import recipe_on, sets
from tests.models.small import small_model
from tests.trained_runs import write_run
from vit_ray.checkpoints.checkpoint import Progress
from vit_ray.checkpoints.run_checkpoints import (
    NoUsableCheckpointError,
    begin_training,
    newest_checkpoint,
)
from vit_ray.config import Recipe, load_recipe
from vit_ray.launch.named_run import accepted_changes, find_resume_point, find_run
from vit_ray.launch.resolved_run import resolve_run
from vit_ray.metric_names import RESULT_STEP
from vit_ray.outcomes import BRANCH_NOTE
from vit_ray.storage import locate

__all__ = ["sets"]
STEP = 7


@pytest.fixture
def recipe(sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.chdir(tmp_path)
    return recipe_on(sets, output=str(tmp_path / "runs"))


@pytest.fixture
def parent(recipe: Recipe) -> str:
    """A run with a checkpoint of step 7, whose best evaluation was before."""
    return write_parent(recipe)


def write_parent(recipe: Recipe, **more: Any) -> str:
    """A run of this recipe with a checkpoint at `STEP`, in global batches of 16."""
    resolved = resolve_run(recipe)
    facts = {
        "recipe": resolved.recipe.recorded(), "data_fingerprint": resolved.manifest.fingerprint,
        "global_batch_size": 16, "samples_seen": STEP * 16, "tracking_run_id": "a" * 32, **more,
    }  # fmt: skip
    return write_run(Path(recipe.run_folder), small_model("ViT"), facts=facts)


def said(*words: str) -> tuple[int, str]:
    done = run_cli("fork", *words)
    return done.exit_code, done.output


def test_a_fork_resumes_from_the_parents_weights_with_its_own_recipe(parent, recipe):
    before = {p.name: p.read_bytes() for p in Path(parent).rglob("*") if p.is_file()}
    code, text = said(parent, f"step={STEP}", "name=lower", "optim.learning_rate=3e-5")
    assert code == 0, text
    assert "optim.learning_rate was 0.001 and is 3e-05" in text
    assert {p.name: p.read_bytes() for p in Path(parent).rglob("*") if p.is_file()} == before
    forked = load_recipe(Path("lower.yaml"))
    expected = resolve_run(recipe.with_absolute_paths()).recipe.with_changes(
        optim={"learning_rate": 3e-5}, name="lower"
    )
    assert forked == expected
    # Its driver takes it up as any run.
    resumed, original = find_resume_point(forked), newest_checkpoint(locate(parent))
    assert resumed is not None
    assert original is not None
    assert not accepted_changes(resolve_run(forked), resumed.position)
    assert same_weights(resumed.weights(), original.weights())
    assert (resumed.position.step, resumed.position.tracking_run_id) == (STEP, None)
    assert locate(forked.run_folder).child(BRANCH_NOTE).read() == b"seen at step 7"
    with pytest.raises(ValueError, match="branches off seen at step 7"):
        find_run(forked.run_folder).checked_step(STEP - 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["step=8", "name=x"], "the steps of the complete checkpoints in"),
        (["step=7", "name=x", "model.depth=2"], "model.depth was 1 and is 2: a fork keeps"),
        (["step=7", "name=x", "train.global_batch_size=32"], "is 32: a fork keeps"),
        (["step=7", "name=x", "data.held_out_fraction=0.1"], "is 0.1: a fork keeps"),
        (["step=7", "name=x", "data.train={sets}/small"], r"own set instead of data.train=.*small"),
        (["step=7", "name=x", "optim.steps=7"], "at step 7; give a larger optim.steps or"),
        (["step=7", "name=seen"], "exists already; give another name"),
    ],
)
def test_what_cannot_be_is_refused_and_writes_nothing(parent, recipe, sets, words, message):
    code, text = said(parent, *(word.format(sets=sets) for word in words))
    assert code == 2, text
    assert re.search(message, text), text
    assert sorted(p.name for p in Path(recipe.output).iterdir()) == ["seen"]
    assert not list(Path().glob("*.yaml"))


def test_a_dry_run_writes_nothing_and_a_name_is_taken_once(parent, recipe, tmp_path, monkeypatch):
    words = (parent, f"step={STEP}", "name=again")
    code, text = said(*words, "--dry-run")
    assert (code, "nothing else changes the training" in text) == (0, True), text
    assert not Path("again.yaml").exists()
    assert sorted(p.name for p in Path(recipe.output).iterdir()) == ["seen"]
    assert said(*words)[0] == 0
    code, text = said(*words, "optim.learning_rate=3e-5")
    assert (code, "again.yaml exists already" in text) == (2, True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # without its recipe
    code, text = said(*words, "optim.learning_rate=3e-5")
    assert (code, "runs/again exists already" in text) == (2, True)
    assert not Path("again.yaml").exists()


@pytest.mark.parametrize("cut", ["lock", "note", "begun", "part"])
def test_a_fork_that_was_cut_short_is_made_again_when_its_folder_is_deleted(parent, recipe, cut):
    words = (parent, f"step={STEP}", "name=again")
    assert said(*words)[0] == 0
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
        code, text = said(*words)
        assert (code, "delete the folder if a fork was" in text) == (2, True), text
        shutil.rmtree(folder)
    code, text = said(*words)
    assert code == 0, text
    assert {path.name for path in step.iterdir()} == whole
    found = load_recipe(Path("again.yaml"))
    resumed = find_resume_point(found)
    assert resumed is not None
    assert resumed.position.step == STEP
    # What was committed counts: without its folder the fork does not begin at step 0.
    shutil.rmtree(step)
    with pytest.raises(NoUsableCheckpointError):
        find_resume_point(found)


def test_what_was_measured_of_the_parent_is_not_the_forks(sets, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = recipe_on(sets, output=str(tmp_path / "runs"), resume=False)
    metrics = {"eval/top1": 0.9, "eval/best_loss": 0.1, RESULT_STEP: 5.0, "train/loss": 0.3}
    progress = Progress(
        STEP, best_eval_loss=0.1, evals_without_best=3, num_evals=4, eval_step=7,
        ended="no better", metrics=metrics, samples_digest="12ab", skipped_steps=2,
        recent_norms=[0.5, 0.7],
    )  # fmt: skip
    parent = write_parent(recipe, progress=progress)
    assert said(parent, f"step={STEP}", "name=fork")[0] == 0
    forked = load_recipe(Path("fork.yaml"))
    assert forked.resume == "auto"
    found = find_resume_point(forked)
    assert found is not None
    # `train.skip_above` compares the next norms with those of the steps before the fork.
    kept = Progress(STEP, skipped_steps=2, recent_norms=[0.5, 0.7])
    assert found.position.progress == kept
