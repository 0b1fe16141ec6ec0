"""Who reaches what on Kubernetes: what docs/clusters.md says of the manifests."""

import functools
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import yaml

from tests.cluster.test_manifests import CLUSTER, OVERLAYS, documents_with

Document = dict[str, Any]
OPERATORS = [
    {"app.kubernetes.io/name": name, "app.kubernetes.io/component": "kuberay-operator"}
    for name in ("kuberay-operator", "kuberay")
]
"""Of KubeRay's Helm chart, and of its kustomize files (`ray-operator/config/manager`)."""
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
            for operator in OPERATORS:
                assert reaches(policies, operator, mine, port, "kuberay") is (port == 8265)
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
