"""`ray job submit --working-dir . -- python jobs/pretrain.py ...` on a running cluster."""

import time

import pytest
import yaml
from mlflow import MlflowClient
from ray.job_submission import JobStatus, JobSubmissionClient

from tests.conftest import ROOT
from tests.end_to_end.runs import curve, runs_of, submit, write_recipe
from tests.recipes import small_recipe
from vit_ray.config.keys import tags_of


@pytest.mark.slow
def test_a_submitted_job_ends_well_and_records_its_run(ray_head, digits, working_dir, tmp_path):
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
    assert tags_of(run.data.tags)["vit_ray.git_commit"] == "0123abc"


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("python jobs/pretrain.py jobs/recipes/digits.yaml train.zero=2", JobStatus.STOPPED),
        ("false", JobStatus.FAILED),
    ],
)
def test_kuberay_tries_again_what_has_failed_and_not_what_no_restart_mends(
    ray_head, working_dir, command, status
):
    """Of a job's states KubeRay (1.7) counts FAILED alone against `backoffLimit`."""
    *_, job = yaml.safe_load_all((ROOT / "cluster" / "rayjob.yaml").read_text())
    ours, own = job["spec"]["entrypoint"], job["spec"]["jobId"]
    name = f"{own}-{status.lower()}"
    entrypoint = ours.replace(own, name).replace(
        "python jobs/pretrain.py /home/ray/recipe/recipe.yaml", command
    )
    assert entrypoint.startswith(f"{command} ||")
    client = JobSubmissionClient(ray_head.dashboard)
    environment = {"working_dir": str(working_dir)}
    client.submit_job(entrypoint=entrypoint, submission_id=name, runtime_env=environment)
    deadline = time.monotonic() + 120
    while not client.get_job_status(name).is_terminal() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert client.get_job_status(name) == status, client.get_job_logs(name)
    if status == JobStatus.STOPPED:
        assert "unknown key train.zero; did you mean" in client.get_job_logs(name)
