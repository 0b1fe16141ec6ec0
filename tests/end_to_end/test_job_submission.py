"""`ray job submit --working-dir . -- python jobs/NAME.py ...`, on files and on S3."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from ray.job_submission import JobStatus, JobSubmissionClient

from tests.conftest import ROOT, Digits
from tests.data.s3_server import SECRET_KEY, s3_environment, serve_s3, timeout
from tests.end_to_end.runs import (
    curve,
    runs_of,
    submit,
    weights_of,
    write_recipe,
)
from tests.newcomer.follow import blocks
from tests.recipes import small_recipe
from vit_ray import trust_modules
from vit_ray.config import load_recipe
from vit_ray.experiments.search_space import RATE


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


@pytest.fixture
def buckets(tmp_path: Path, digits: Digits) -> Path:
    """Folders of the bucket `sets`, which has the digits, and the bucket `runs`."""
    folder = tmp_path / "buckets"
    for split in (digits.train, digits.test):
        shutil.copytree(split, folder / "sets" / Path(split).name)
    (folder / "runs").mkdir()
    return folder


@pytest.mark.slow
def test_a_run_reads_from_s3_and_goes_on_from_its_checkpoints_there(
    ray_head, digits, buckets, working_dir, tmp_path
):
    first = small_recipe(
        "on-s3", digits, tmp_path, output="s3://runs/all",
        data={"train": "s3://sets/train", "eval": None},
        optim={"steps": 8, "schedule": "constant"}, checkpoint={"every_steps": 4, "keep_last": 2},
    )  # fmt: skip
    # A job's copy of the folder has no .git, so the submitter says the commit.
    words = ("env", "VIT_RAY_GIT_COMMIT=0123abc", "python", "jobs/pretrain.py")
    with serve_s3(buckets) as port:
        variables = {**s3_environment(port), **timeout(20.0), "HOME": str(tmp_path)}
        second = first.with_changes(optim={"steps": 12})
        for recipe in (first, second):
            path = str(write_recipe(recipe, tmp_path))
            code, output = submit(ray_head, working_dir, *words, path, **variables)
            assert code == 0, output[-6000:]
    assert "resumed: from step 8" in output
    # By files: the server leaves the empty folders of deleted keys behind.
    shards = (buckets / "runs" / "all" / "on-s3").glob("step-*/*.safetensors")
    assert sorted({shard.parent.name for shard in shards}) == ["step-00000008", "step-00000012"]
    (run,) = runs_of(second)
    assert run.info.status == "FINISHED"
    assert run.data.tags["vit_ray.git_commit"] == "0123abc"
    assert [step for step, _ in curve(second, run.info.run_id)] == [1, 4, 8, 9, 12]
    for path in [*tmp_path.glob("mlflow.db"), *(buckets / "runs").rglob("*.json")]:
        assert SECRET_KEY.encode() not in path.read_bytes(), path


@pytest.mark.slow
def test_a_sweep_keeps_its_runs_and_the_files_of_tune_on_s3(
    ray_head, digits, buckets, working_dir, tmp_path
):
    recipe = small_recipe(
        "swept", digits, tmp_path, output="s3://runs/all",
        data={"train": "s3://sets/train", "eval": "s3://sets/test"}, optim={"steps": 4},
        workers={"num_workers": 1},
        sweep={"learning_rates": [0.01, 0.001], "dev_fraction": 0.1, "seeds": 1},
    )  # fmt: skip
    job = ("python", "jobs/sweep.py", str(write_recipe(recipe, tmp_path)))
    ends = []
    with serve_s3(buckets) as port:
        variables = {**s3_environment(port), **timeout(20.0), "HOME": str(tmp_path)}
        for _ in range(2):
            code, output = submit(ray_head, working_dir, *job, **variables)
            assert code == 0, output[-6000:]
            ends.append({run.info.run_name: run.info.end_time for run in runs_of(recipe)})
    assert {"swept", "swept-lr0.01", "swept-lr0.001"} < ends[0].keys()
    del ends[0]["swept"], ends[1]["swept"]
    assert ends[0] == ends[1]  # nothing was trained again
    results = (buckets / "runs" / "all" / "tune" / "swept-trials").glob("*/result.json")
    found = {json.loads(file.read_text().splitlines()[-1])["config"][RATE] for file in results}
    assert found == {0.01, 0.001}


@pytest.mark.slow
def test_the_pages_example_of_own_parts_resumes_as_a_job(ray_head, digits, tmp_path, working_dir):
    """A driver in the folder, then a job that continues the run with a copy of the folder."""
    for block in blocks(ROOT / "docs" / "python.md"):
        for name in block.told("file"):
            (tmp_path / name).write_text(block.text)
    for file in ("myparts.py", "own.yaml"):
        (working_dir / file).write_bytes((tmp_path / file).read_bytes())
    words = (
        "-m", "vit_ray", "pretrain", "own.yaml", f"data.train={digits.train}",
        f"data.eval={digits.test}", f"output={tmp_path / 'runs'}", "workers.cpus_per_worker=0.5",
        f"tracking.uri=sqlite:///{tmp_path / 'mlflow.db'}", "optim.epochs=null",
        "optim.schedule=constant", "optim.warmup_steps=0",
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, *words, "optim.steps=20"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "RAY_ADDRESS": ray_head.address, "PYTHONPATH": str(ROOT)}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    code, output = submit(ray_head, working_dir, "python", *words, "optim.steps=40")
    assert code == 0, output[-5000:]
    assert "resumed: from step 20" in output
    trust_modules("myparts")
    sys.path.append(str(tmp_path))
    recipe = load_recipe(tmp_path / "own.yaml", list(words[4:]))
    (run,) = runs_of(recipe)
    assert "eval/top3" in run.data.metrics
    assert run.data.params["model.name"] == "myparts.ConvStem"
    assert any(name.startswith("vit.embedding.convs.") for name in weights_of(recipe))
