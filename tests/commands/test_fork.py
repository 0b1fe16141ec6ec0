"""`vit-ray fork`: what a fork takes over and changes, and what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.checkpoints.written import WEIGHTS_1
from tests.end_to_end.runs import same_weights
from tests.launch.inputs.test_seen_batch import CASES, recipe_on, sets
from tests.models.small import small_model
from tests.trained_runs import write_run
from vit_ray.checkpoints.checkpoint import Progress
from vit_ray.checkpoints.run_checkpoints import (
    NoUsableCheckpointError,
    newest_checkpoint,
)
from vit_ray.commands.cli import vit_ray
from vit_ray.config import Recipe, load_recipe
from vit_ray.config.branch_origin import NOTE
from vit_ray.launch.inputs.seen_batch import SeenBatches
from vit_ray.launch.inputs.streams import ResolvedRun, resolve_run
from vit_ray.launch.named_run import find_run
from vit_ray.launch.resuming import accepted_changes, find_resume_point
from vit_ray.metric_names import RESULT_STEP
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
    result = CliRunner().invoke(vit_ray, ["fork", *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result.exit_code, result.output


def test_a_fork_resumes_from_the_parents_weights_with_its_own_recipe(
    parent: str, recipe: Recipe
) -> None:
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
    resolved = resolve_run(forked)
    assert not accepted_changes(
        resolved.recipe, resumed.position, fingerprint=resolved.manifest.fingerprint,
        num_images=resolved.num_images, total_steps=resolved.total_steps,
    )  # fmt: skip
    assert same_weights(resumed.weights(), original.weights())
    assert (resumed.position.step, resumed.position.tracking_run_id) == (STEP, None)
    assert locate(forked.run_folder).child(NOTE).read() == b"seen at step 7"
    assert RESULT_STEP not in resumed.position.progress.metrics


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["step=8", "name=x"], "has no complete checkpoint of this step; it has those of steps 7"),
        (["step=7", "name=x", "model.depth=2"], "model.depth was 1 and is 2: the tensors"),
        (["step=7", "name=x", "train.global_batch_size=32"], "112 images, which is not a whole"),
        (["step=7", "name=x", "data.held_out_fraction=0.1"], "the parent has trained on"),
        (["step=7", "name=seen"], "exists already; give another name"),
    ],
)
def test_what_cannot_be_is_refused_and_writes_nothing(
    parent: str, recipe: Recipe, words: list[str], told: str
) -> None:
    code, text = said(parent, *words)
    assert (code, told in text) == (2, True), text
    assert sorted(p.name for p in Path(recipe.output).iterdir()) == ["seen"]
    assert not list(Path().glob("*.yaml"))


def test_a_dry_run_writes_nothing_and_a_name_is_taken_once(parent: str, recipe: Recipe) -> None:
    words = (parent, f"step={STEP}", "name=again")
    code, text = said(*words, "--dry-run")
    assert (code, "nothing else changes the training" in text) == (0, True), text
    assert not Path("again.yaml").exists()
    assert sorted(p.name for p in Path(recipe.output).iterdir()) == ["seen"]
    assert said(*words)[0] == 0
    code, text = said(*words, "optim.learning_rate=3e-5")
    assert (code, "again.yaml exists already" in text) == (2, True)


@pytest.mark.parametrize("cut", ["no recipe", "part"])
def test_a_fork_that_was_cut_short_is_made_again(parent: str, recipe: Recipe, cut: str) -> None:
    words = (parent, f"step={STEP}", "name=again")
    assert said(*words)[0] == 0
    folder = Path(recipe.output) / "again"
    whole = {p.name: p.read_bytes() for p in (folder / "step-00000007").iterdir()}
    if cut == "no recipe":
        Path("again.yaml").unlink()
    else:
        (folder / "step-00000007" / "commit.json").unlink()
        if cut == "part":
            (folder / "step-00000007" / WEIGHTS_1).unlink()
    code, text = said(*words)
    assert code == 0, text
    found = load_recipe(Path("again.yaml"))
    resumed = find_resume_point(found)
    assert resumed is not None
    assert resumed.position.step == STEP
    assert {p.name for p in (folder / "step-00000007").iterdir()} == set(whole)
    # What was committed counts: without its folder the fork does not begin at step 0.
    shutil.rmtree(folder / "step-00000007")
    with pytest.raises(NoUsableCheckpointError):
        find_resume_point(found)


def test_what_was_measured_of_the_parent_is_not_the_forks(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = recipe_on(sets, output=str(tmp_path / "runs"), resume=False)
    metrics = {"eval/top1": 0.9, "eval/best_loss": 0.1, RESULT_STEP: 5.0, "train/loss": 0.3}
    progress = Progress(
        STEP, best_eval_loss=0.1, evals_without_best=3, num_evals=4, eval_step=7,
        ended="no better", metrics=metrics, samples_digest="12ab",
    )  # fmt: skip
    parent = write_parent(recipe, progress=progress)
    assert said(parent, f"step={STEP}", "name=fork")[0] == 0
    fork = load_recipe(Path("fork.yaml"))
    assert fork.resume == "auto"
    found = find_resume_point(fork)
    assert found is not None
    assert found.position.progress == Progress(STEP, metrics={"train/loss": 0.3})


@pytest.mark.parametrize(("case", "batch"), [("plain", 8), ("window", 28)])
def test_with_another_batch_each_image_is_read_once_in_each_epoch(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, batch: int
) -> None:
    monkeypatch.chdir(tmp_path)
    data: dict[str, Any] = {**CASES[case], "shuffle_window": 112 if case == "window" else 0}
    recipe = recipe_on(sets, data=data, output=str(tmp_path / "runs"))
    epochs = 336 / resolve_run(recipe).num_images
    recipe = recipe.with_changes(optim={"steps": None, "epochs": epochs})
    resolved = resolve_run(recipe)
    parent = write_parent(recipe, applied_steps=6, progress=Progress(STEP))
    code, text = said(parent, "step=7", "name=fork", f"train.global_batch_size={batch}")
    assert code == 0, text
    fork = load_recipe(Path("fork.yaml"))
    found = find_resume_point(fork)
    assert found is not None
    position, now = found.position, resolve_run(fork)
    assert position.progress == Progress(112 // batch)
    assert (position.samples_seen, position.applied_steps) == (112, 6)
    assert now.total_steps == 336 // batch
    assert f"seen at step 7 (its own step {position.step}) to step {now.total_steps}" in text
    assert not accepted_changes(
        now.recipe, position, fingerprint=now.manifest.fingerprint,
        num_images=now.num_images, total_steps=now.total_steps,
    )  # fmt: skip

    def drawn(one: ResolvedRun, steps: range) -> list[tuple[int, int]]:
        batches = SeenBatches(one)
        rows = [row for step in steps for row in batches.read(step)[1]]
        return [(row["sample"], row["epoch"]) for row in rows]

    before = drawn(resolved, range(STEP))
    after = drawn(now, range(position.step, now.total_steps))
    assert sorted(before + after) == sorted(drawn(resolved, range(resolved.total_steps)))
    with pytest.raises(ValueError, match="branches off seen at step 7"):
        find_run(fork.run_folder).checked_step(position.step - 1)


def test_with_another_batch_a_fork_begins_between_two_shuffle_windows(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = recipe_on(sets, data={"shuffle_window": 32}, output=str(tmp_path / "runs"))
    parent = write_parent(recipe)
    words = (parent, "step=7", "name=fork", "train.global_batch_size=8", "optim.steps=40")
    code, text = said(*words)
    assert (code, "fork at a step that is a multiple of 2" in text) == (2, True), text
    assert "a multiple of 2" in said(*words, "data.shuffle_window=0")[1]
