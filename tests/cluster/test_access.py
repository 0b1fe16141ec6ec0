"""Who reaches what: pods on Kubernetes, who has Ray's token, and roles in a bucket."""

import contextlib
import functools
import json
import os
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.cluster.test_manifests import CLUSTER, OVERLAYS, documents_with
from tests.data.converted_set import converted_set
from tests.data.denying_s3 import serve_s3_with_policy
from vit_ray.data import open_dataset
from vit_ray.lock import hold_lock
from vit_ray.storage import locate

Document = dict[str, Any]
API = "/var/run/secrets/kubernetes.io/serviceaccount"


def team() -> list[Document]:
    return list(yaml.safe_load_all((CLUSTER / "mlflow.yaml").read_text()))


@functools.cache
def jobs() -> list[list[Document]]:
    """What is sent as shipped, and with each overlay where kubectl can render it."""
    overlays = OVERLAYS if shutil.which("kubectl") else ()
    return [documents_with(name) for name in ("", *overlays)]


def pods(documents: list[Document]) -> Iterator[tuple[str, dict[str, str], Document]]:
    """Of each pod template its owner's name, its labels, and its specification."""
    for document in documents:
        spec, templates = document.get("spec", {}), []
        if document["kind"] == "RayJob":
            cluster = spec["rayClusterSpec"]
            groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
            templates = [group["template"] for group in groups]
        elif document["kind"] in ("Deployment", "CronJob"):
            templates = [spec.get("jobTemplate", {"spec": spec})["spec"]["template"]]
        for template in templates:
            yield document["metadata"]["name"], template["metadata"]["labels"], template["spec"]


def of_kind(documents: list[Document], kind: str) -> list[Document]:
    return [document for document in documents if document["kind"] == kind]


def test_the_ports_of_ray_are_open_among_the_pods_of_a_job_alone():
    assert of_kind(jobs()[0], "NetworkPolicy")
    for documents in jobs():
        for policy in of_kind(documents, "NetworkPolicy"):
            kubernetes_validate.validate(policy, "1.37", strict=True)
            spec = policy["spec"]
            mine = spec["podSelector"]["matchLabels"]
            assert mine
            assert all(mine.items() <= labels.items() for _, labels, _ in pods(documents))
            assert spec["policyTypes"] == ["Ingress"]
            for rule in spec["ingress"]:
                is_own = rule["from"] == [{"podSelector": {"matchLabels": mine}}]
                ports = [one["port"] for one in rule.get("ports", ())]
                # KubeRay's operator, and Prometheus; without `from` it would be everybody.
                assert is_own or (rule["from"] and ports in ([8265], [8080, 44217, 44227]))
                for peer in rule["from"] if 8265 in ports else ():
                    assert peer.keys() == {"namespaceSelector", "podSelector"}
                    assert "kuberay-operator" in peer["podSelector"]["matchLabels"].values()


def test_mlflow_answers_jobs_alone_and_postgresql_mlflow_alone():
    opened = {}
    for policy in of_kind(team(), "NetworkPolicy"):
        (rule,) = policy["spec"]["ingress"]
        (port,) = (one["port"] for one in rule["ports"])
        assert all(peer.keys() == {"podSelector"} and peer["podSelector"] for peer in rule["from"])
        opened[port] = str(rule["from"])
    assert opened.keys() == {5000, 5432}
    assert "vit-ray/job" in opened[5000]
    assert "vit-ray/job" not in opened[5432]


def test_pods_have_no_rights_but_the_autoscaler_and_no_keys_but_the_heads_log_in_to_mlflow():
    everything = (team(), *jobs())
    for owner, _, spec in (pod for documents in everything for pod in pods(documents)):
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostPID", "hostIPC", "shareProcessNamespace"} & spec.keys()
        assert all("hostPath" not in volume for volume in spec.get("volumes", ()))
        assert spec["automountServiceAccountToken"] is False, owner
        for container in [*spec.get("initContainers", ()), *spec["containers"]]:
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False, owner
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert not {"privileged", "runAsUser", "runAsNonRoot", "procMount"} & own.keys()
            assert API not in [mount["mountPath"] for mount in container.get("volumeMounts", ())]
            assert not [e for e in container.get("env", ()) if e["name"].startswith("AWS_")]
            secrets = [one["secretRef"]["name"] for one in container.get("envFrom", ())]
            if container["name"].startswith("ray-"):
                assert ("vit-ray-mlflow" in secrets) is (container["name"] == "ray-head")


def test_ray_is_started_with_a_token_and_answers_nobody_without_it(ray_head):
    for documents in jobs():
        (job,) = of_kind(documents, "RayJob")
        assert job["spec"]["rayClusterSpec"]["authOptions"]["mode"] == "token"
    for name in ("ray_up.yaml", "slurm.sbatch", "README.md"):
        assert "RAY_AUTH_MODE=token" in (CLUSTER / name).read_text()

    def status(token: str | None) -> int:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        request = urllib.request.Request(f"{ray_head.dashboard}/api/jobs/", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    assert status(os.environ["RAY_AUTH_TOKEN"]) == 200
    assert status(None) == 401
    assert status("0" * 64) == 403


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
