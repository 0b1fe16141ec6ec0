"""The policies of cluster/README.md in a store that enforces them (moto): enough, and no more."""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.test_manifests import CLUSTER
from tests.data.converted_set import converted_set
from tests.data.denying_s3 import serve_s3_with_policy
from vit_ray.data import open_dataset
from vit_ray.lock import hold_lock
from vit_ray.storage import locate

OTHERS = ("imagenet21k/new", "mlflow/1/weights", "runs/a/step-1", "elsewhere")


@pytest.fixture(scope="module")
def take_role() -> Iterator[Callable[[str], None]]:
    """Gives this process the rights of jobs (`training`) or of MLflow, as the page has them.

    One right more than AWS asks for: moto (5.2) holds a deletion of several objects against
    the bucket, and not against each of them.
    """
    found = re.findall(r"```json\n(.*?)```", (CLUSTER / "README.md").read_text(), re.DOTALL)
    texts = dict(zip(("training", "mlflow"), found, strict=True))
    of_moto = {"Effect": "Allow", "Action": "s3:DeleteObject", "Resource": "arn:aws:s3:::team"}
    theirs = dict.fromkeys(OTHERS, b"theirs")
    files = [file for file in converted_set().rglob("*") if file.is_file()]
    data = {f"imagenet21k/train/{f.relative_to(converted_set())}": f.read_bytes() for f in files}
    with serve_s3_with_policy({"team": theirs | data, "another": theirs}) as allow:

        def take(name: str) -> None:
            policy = json.loads(texts[name].replace("BUCKET", "team"))
            allow(policy | {"Statement": [*policy["Statement"], of_moto]})

        yield take


def assert_denied(action: Callable[[], object]) -> None:
    with pytest.raises(OSError, match=r"(?i)access.?denied|forbidden"):
        action()


def assert_kept(key: str) -> None:
    with pytest.raises(PermissionError):
        locate(f"s3://team/{key}").filesystem.rm_file(f"team/{key}")


def test_a_job_reads_its_data_and_writes_its_runs_and_nothing_else(take_role):
    take_role("training")
    assert open_dataset("s3://team/imagenet21k/train").num_images > 0
    run = locate("s3://team/runs/mine")
    with hold_lock(run, pytest.fail):
        run.child("small").write(b"1")
        with run.child("large").output() as stream:
            stream.write(bytes(17 << 20))  # in parts
    assert run.child("small").read() == b"1"
    assert run.child("large").info().size == 17 << 20
    run.child("small").move_to(run.child("aside"))
    with contextlib.suppress(RuntimeError), run.child("given-up").output() as stream:
        stream.write(bytes(102 << 20))
        raise RuntimeError
    assert not run.child("given-up").exists()
    run.delete()
    assert not run.list_files()
    for key in OTHERS:
        place = locate(f"s3://team/{key}")
        if not key.startswith("runs/"):
            assert_denied(lambda place=place: place.write(b"mine"))
            assert_kept(key)
        if key.startswith(("mlflow/", "elsewhere")):
            assert_denied(place.read)
    assert_denied(locate("s3://another/runs/a/step-1").read)
    assert_denied(lambda: locate("s3://another/runs/mine").write(b"mine"))


def test_mlflow_has_its_own_folder_alone(take_role, tmp_path, monkeypatch):
    """By MLflow's own code for S3."""
    from mlflow.store.artifact.s3_artifact_repo import S3ArtifactRepository

    (tmp_path / "weights.bin").write_bytes(bytes(9 << 20))  # in parts, for boto3
    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", os.environ["AWS_ENDPOINT_URL"])
    take_role("mlflow")
    own = S3ArtifactRepository("s3://team/mlflow/2")
    own.log_artifact(str(tmp_path / "weights.bin"), "model")
    assert [found.path for found in own.list_artifacts("model")] == ["model/weights.bin"]
    back = Path(own.download_artifacts("model/weights.bin", str(tmp_path)))
    assert back.stat().st_size == 9 << 20
    own.delete_artifacts("model")
    assert own.list_artifacts("model") == []
    for key in OTHERS:
        if not key.startswith("mlflow/"):
            place = locate(f"s3://team/{key}")
            assert_denied(place.read)
            assert_denied(lambda place=place: place.write(b"mine"))
            assert_kept(key)
