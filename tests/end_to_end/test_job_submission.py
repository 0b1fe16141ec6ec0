"""`ray job submit --working-dir . -- python jobs/pretrain.py ...` on a running cluster."""

from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.conftest import Digits, Head
from tests.end_to_end.runs import curve, runs_of, submit, write_recipe
from tests.recipes import small_recipe


@pytest.mark.slow
def test_a_submitted_job_ends_well_and_records_its_run(
    ray_head: Head, digits: Digits, working_dir: Path, tmp_path: Path
) -> None:
    recipe = small_recipe("submitted", digits, tmp_path, optim={"steps": 8})
    path = str(write_recipe(recipe, tmp_path))
    commit = "VIT_RAY_GIT_COMMIT=0123abc"
    words = ("env", commit, "python", "jobs/pretrain.py", path)
    code, output = submit(ray_head, working_dir, *words)
    assert code == 0, output[-5000:]
    assert "succeeded" in output
    assert "first step:" in output
    (run,) = runs_of(recipe)
    assert MlflowClient(recipe.tracking.uri).get_run(run.info.run_id).info.status == "FINISHED"
    assert [step for step, _ in curve(recipe, run.info.run_id)] == [1, 4, 8]
    # A job's copy of the folder has no .git, so the submitter says the commit.
    assert run.data.tags["vit_ray.git_commit"] == "0123abc"


def test_a_submitted_job_with_a_wrong_key_fails_with_the_reason(
    ray_head: Head, working_dir: Path
) -> None:
    words = ("python", "jobs/pretrain.py", "jobs/recipes/digits.yaml", "train.zero=2")
    code, output = submit(ray_head, working_dir, *words)
    assert code != 0
    assert "unknown key train.zero; did you mean train.zero_stage?" in output
