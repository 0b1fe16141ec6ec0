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
# Of KubeRay's Helm chart and of its kustomize files (`ray-operator/config/manager`).
OPERATOR = {"app.kubernetes.io/component": "kuberay-operator"}
API = "/var/run/secrets/kubernetes.io/serviceaccount"
RAY_PORTS = (6379, 8265, 8080, 10001, 29500)


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


# Kubernetes' own rule (NetworkPolicySpec): a pod that no policy selects is open; else what any of
# the policies that select it allows.


def _selects(selector: Document, labels: dict[str, str]) -> bool:
    for rule in selector.get("matchExpressions", ()):
        assert rule["operator"] in ("Exists", "In")
        if labels.get(rule["key"]) not in rule.get("values", labels.values()):
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()


def reaches(
    policies: list[Document], source: dict[str, str], target: dict[str, str], port: int,
    namespace: str = "",
) -> bool:  # fmt: skip
    """Whether pods with these labels may connect; `namespace` is the source's, if another one."""
    mine = [p["spec"] for p in policies if _selects(p["spec"]["podSelector"], target)]
    for rule in (rule for spec in mine for rule in spec["ingress"]):
        if "ports" in rule and port not in [one["port"] for one in rule["ports"]]:
            continue
        for peer in rule["from"]:
            is_there = not namespace
            if "namespaceSelector" in peer:
                name = {"kubernetes.io/metadata.name": namespace}
                is_there = _selects(peer["namespaceSelector"], name)
            if is_there and _selects(peer.get("podSelector", {}), source):
                return True
    return not mine


def test_what_the_policies_say_is_read_as_kubernetes_reads_it():
    """By the first examples of Kubernetes' page on network policies."""
    frontend, target = {"role": "frontend"}, {"role": "db"}
    rule = {"from": [{"podSelector": {"matchLabels": frontend}}], "ports": [{"port": 6379}]}
    deny, allow = (
        {"spec": {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": rules}}
        for rules in ([], [rule])
    )
    assert reaches([], {}, target, 1)
    assert not reaches([deny], {}, target, 1)
    assert reaches([deny, allow], frontend, target, 6379)
    assert not reaches([deny, allow], frontend, target, 6380)
    assert not reaches([deny, allow], frontend, target, 6379, "elsewhere")


def test_the_ports_of_ray_are_open_among_the_pods_of_a_job_alone():
    for documents in jobs():
        policies = of_kind(documents, "NetworkPolicy")
        for policy in policies:
            kubernetes_validate.validate(policy, "1.37", strict=True)
        _, mine, _ = next(pods(documents))
        assert all(labels == mine for _, labels, _ in pods(documents))
        # A pod on the host's network has the node's address: network plugins know no labels of it.
        on_host = [spec for _, _, spec in pods(documents) if spec.get("hostNetwork")]
        for port in RAY_PORTS:
            assert reaches(policies, mine, mine, port)
            if on_host:
                assert reaches(policies, {}, mine, port)
                continue  # among addresses of nodes no label separates jobs
            for label in ({"vit-ray/job": "of-another-team"}, {}, {"app": "mlflow"}):
                assert not reaches(policies, label, mine, port)
            assert reaches(policies, OPERATOR, mine, port, "kuberay") is (port == 8265)
            assert not reaches(policies, mine, mine, port, "of-another-team")
            assert reaches(policies, {}, mine, port, "prometheus-system") is (port == 8080)


def test_mlflow_answers_jobs_alone_and_postgresql_mlflow_alone():
    policies = of_kind(team(), "NetworkPolicy")
    services = of_kind(team(), "Service")
    served = {service["metadata"]["name"]: service["spec"] for service in services}
    sources = {name: labels for name, labels, _ in pods(team())}
    sources |= {"job": {"vit-ray/job": "any"}, "stranger": {"app": "other"}}
    for service, port, expected in [
        ("mlflow", 5000, {"job", "mlflow-gc"}),
        ("mlflow-postgres", 5432, {"mlflow", "mlflow-gc", "mlflow-backup"}),
    ]:
        assert [one["port"] for one in served[service]["ports"]] == [port]
        target = served[service]["selector"]
        for name, labels in sources.items():
            assert reaches(policies, labels, target, port) is (name in expected), (name, service)
            assert not reaches(policies, labels, target, port, "elsewhere")
            assert not reaches(policies, labels, target, port + 1)


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
