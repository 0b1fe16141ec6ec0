"""Training from a bucket, with its checkpoints in a bucket, as submitted jobs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, Digits, Head
from tests.data.s3_server import ACCESS_KEY, SECRET_KEY, serve_s3
from tests.end_to_end.runs import curve, runs_of, write_recipe
from tests.recipes import small_recipe
from vit_ray.config import Recipe


def environment(port: int) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        # What stores other than AWS need of pyarrow's client.
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
    }


def submit(head: Head, recipe: Recipe, code: Path, folder: Path, variables: dict[str, str]) -> str:
    command = [
        str(Path(sys.executable).parent / "ray"), "job", "submit", "--address", head.dashboard,
        "--working-dir", str(code), "--runtime-env-json", json.dumps({"env_vars": variables}),
        "--", "python", "jobs/pretrain.py", str(write_recipe(recipe, folder)),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, env=dict(os.environ), cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_a_run_reads_from_s3_and_goes_on_from_its_checkpoints_there(
    ray_head: Head, digits: Digits, working_dir: Path, tmp_path: Path
) -> None:
    buckets = tmp_path / "buckets"
    shutil.copytree(digits.train, buckets / "sets" / "train")
    (buckets / "runs").mkdir()
    first = small_recipe(
        "on-s3",
        digits,
        tmp_path,
        output="s3://runs/all",
        data={"train": "s3://sets/train", "eval": None},
        optim={"steps": 8, "schedule": "constant"},
        checkpoint={"every_steps": 4, "keep_last": 2},
    )
    with serve_s3(buckets) as port:
        variables = {**environment(port), "HOME": str(tmp_path)}
        submit(ray_head, first, working_dir, tmp_path, variables)
        second = first.with_changes(optim={"steps": 12})
        output = submit(ray_head, second, working_dir, tmp_path, variables)
    assert "resumed: from step 8" in output
    # By files: the server leaves the empty folders of deleted keys behind.
    shards = (buckets / "runs" / "all" / "on-s3").glob("step-*/*.safetensors")
    assert sorted({shard.parent.name for shard in shards}) == ["step-00000008", "step-00000012"]
    (run,) = runs_of(second)
    assert [step for step, _ in curve(second, run.info.run_id)] == [1, 4, 8, 9, 12]
    for path in [*tmp_path.glob("mlflow.db"), *(buckets / "runs").rglob("*.json")]:
        assert SECRET_KEY.encode() not in path.read_bytes(), path
