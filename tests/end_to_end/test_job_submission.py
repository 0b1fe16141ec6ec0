"""`ray job submit --working-dir . -- python jobs/pretrain.py ...` on a running cluster."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.conftest import ROOT, Digits, Head
from tests.end_to_end.runs import curve, runs_of, write_recipe
from tests.recipes import small_recipe


def submit(head: Head, working_dir: Path, *entrypoint: str) -> subprocess.CompletedProcess[str]:
    command = [
        str(Path(sys.executable).parent / "ray"), "job", "submit", "--address", head.dashboard,
        "--working-dir", str(working_dir), "--", *entrypoint,
    ]  # fmt: skip
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=dict(os.environ), cwd=ROOT
    )


@pytest.mark.slow
def test_a_submitted_job_ends_well_and_records_its_run(
    ray_head: Head, digits: Digits, working_dir: Path, tmp_path: Path
) -> None:
    recipe = small_recipe("submitted", digits, tmp_path, optim={"steps": 8})
    path = str(write_recipe(recipe, tmp_path))
    commit = "VIT_RAY_GIT_COMMIT=0123abc"
    done = submit(ray_head, working_dir, "env", commit, "python", "jobs/pretrain.py", path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "succeeded" in done.stdout
    assert "first step:" in done.stdout
    (run,) = runs_of(recipe)
    assert MlflowClient(recipe.tracking.uri).get_run(run.info.run_id).info.status == "FINISHED"
    assert [step for step, _ in curve(recipe, run.info.run_id)] == [1, 4, 8]
    # A job's copy of the folder has no .git, so the submitter says the commit.
    assert run.data.tags["vit_ray.git_commit"] == "0123abc"


def test_a_submitted_job_with_a_wrong_key_fails_with_the_reason(
    ray_head: Head, working_dir: Path
) -> None:
    done = submit(
        ray_head,
        working_dir,
        "python",
        "jobs/pretrain.py",
        "jobs/recipes/digits.yaml",
        "train.zero=2",
    )
    assert done.returncode != 0
    told = done.stdout + done.stderr
    assert "unknown key train.zero; did you mean train.zero_stage?" in told
