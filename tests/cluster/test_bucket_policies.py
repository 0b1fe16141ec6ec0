"""The policies of cluster/README.md in a store that enforces them (moto): enough, and no more."""

from __future__ import annotations

import contextlib
import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import botocore.session
import pytest

from tests.cluster.test_manifests import CLUSTER
from tests.data import s3_server
from tests.data.converted_set import converted_set
from vit_ray.data import open_dataset
from vit_ray.lock import hold_lock
from vit_ray.storage import Location, locate

OTHERS = ("imagenet21k/new", "mlflow/1/weights", "runs/a/step-1", "elsewhere")


@pytest.fixture(scope="module")
def store() -> Iterator[int]:
    """A bucket `team` with a data set and one object in each other place; yields the port."""
    with s3_server.serve_conditional_s3() as port:
        _enforce(port, False)
        owner = _owner(port, "s3")
        for bucket in ("team", "another"):
            owner.create_bucket(Bucket=bucket)
            for key in OTHERS:
                owner.put_object(Bucket=bucket, Key=key, Body=b"theirs")
        for file in (file for file in converted_set().rglob("*") if file.is_file()):
            key = f"imagenet21k/train/{file.relative_to(converted_set())}"
            owner.put_object(Bucket="team", Key=key, Body=file.read_bytes())
        yield port


def _owner(port: int, service: str) -> Any:
    return botocore.session.get_session().create_client(
        service, region_name="us-east-1", endpoint_url=f"http://127.0.0.1:{port}",
        aws_access_key_id="owner", aws_secret_access_key="owner",  # noqa: S106
    )  # fmt: skip


def _enforce(port: int, is_on: bool) -> None:
    """So many requests pass unchecked."""
    address = f"http://127.0.0.1:{port}/moto-api/reset-auth"
    request = urllib.request.Request(address, b"0" if is_on else b"inf")
    request.add_header("Content-Type", "text/plain")
    urllib.request.urlopen(request, timeout=60).close()


def policy_text(name: str) -> str:
    """That of the accounts of jobs (`training`) or of MLflow, as the page has it."""
    found = re.findall(r"```json\n(.*?)```", (CLUSTER / "README.md").read_text(), re.DOTALL)
    return dict(zip(("training", "mlflow"), found, strict=True))[name]


@contextlib.contextmanager
def role(port: int, name: str) -> Iterator[None]:
    """Inside the block this process has the rights of a policy.

    And one that AWS does not ask for: moto (5.2) holds a request that deletes several objects
    against the bucket, and not against each of them.
    """
    policy = json.loads(policy_text(name).replace("BUCKET", "team"))
    of_moto = {"Effect": "Allow", "Action": "s3:DeleteObject", "Resource": "arn:aws:s3:::team"}
    text = json.dumps(policy | {"Statement": [*policy["Statement"], of_moto]})
    _enforce(port, False)
    iam = _owner(port, "iam")
    iam.create_user(UserName=name)
    iam.put_user_policy(UserName=name, PolicyName="rights", PolicyDocument=text)
    key = iam.create_access_key(UserName=name)["AccessKey"]
    _enforce(port, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(s3_server, "ACCESS_KEY", key["AccessKeyId"])
        patch.setattr(s3_server, "SECRET_KEY", key["SecretAccessKey"])
        with s3_server.this_process_uses(port, timeout_s=60):
            yield
    _enforce(port, False)


def assert_denied(action: Callable[[], object]) -> None:
    with pytest.raises(OSError, match=r"(?i)access.?denied|forbidden"):
        action()


def assert_kept(key: str) -> None:
    """Nobody with these rights can delete it."""
    with pytest.raises(PermissionError):
        locate(f"s3://team/{key}").filesystem.rm_file(f"team/{key}")


def write_and_give_up(file: Location) -> None:
    with contextlib.suppress(RuntimeError), file.output() as stream:
        stream.write(bytes(102 << 20))  # in parts
        raise RuntimeError


def test_a_job_reads_its_data_and_writes_its_runs_and_nothing_else(store: int) -> None:
    with role(store, "training"):
        assert open_dataset("s3://team/imagenet21k/train").num_images > 0
        run = locate("s3://team/runs/mine")
        with hold_lock(run, pytest.fail):
            run.child("small").write(b"1")
            with run.child("large").output() as stream:
                stream.write(bytes(17 << 20))  # in parts
        assert run.child("small").read() == b"1"
        assert run.child("large").info().size == 17 << 20
        run.child("small").move_to(run.child("aside"))
        write_and_give_up(run.child("given-up"))
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


def test_mlflow_has_its_own_folder_alone(
    store: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By MLflow's own code for S3."""
    from mlflow.store.artifact.s3_artifact_repo import S3ArtifactRepository

    (tmp_path / "weights.bin").write_bytes(bytes(9 << 20))  # in parts, for boto3
    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", f"http://127.0.0.1:{store}")
    with role(store, "mlflow"):
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


def test_the_policies_name_the_places_of_the_shipped_definitions() -> None:
    """And no action on everything."""
    for name, folders in {"training": ["imagenet21k", "runs"], "mlflow": ["mlflow"]}.items():
        policy = json.loads(policy_text(name))
        places = [one["Resource"] for one in policy["Statement"]]
        assert places == ["arn:aws:s3:::BUCKET", *(f"arn:aws:s3:::BUCKET/{f}/*" for f in folders)]
        assert {one["Effect"] for one in policy["Statement"]} == {"Allow"}
        assert "*" not in str([one["Action"] for one in policy["Statement"]])
        file = "rayjob.yaml" if name == "training" else "mlflow.yaml"
        text = (CLUSTER / file).read_text()
        assert all(f"s3://BUCKET/{folder}" in text for folder in folders)
