"""The Workload that Kueue makes of a RayJob with a queue, against Kueue's own definition."""

import gzip
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.cluster.test_manifests import _broken_rules, _problems, _strict, job_with

FILE = Path(__file__).with_name("workload_v1beta2_kueue_0.19.2.schema.json.gz")


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = json.loads(gzip.decompress(FILE.read_bytes()))
    # The API server fills and checks metadata by its own schema, which a CRD does not repeat.
    schema["properties"]["metadata"]["properties"] = {"name": {}}
    return jsonschema.Draft7Validator(_strict(schema))


def workload_of(job: dict[str, Any]) -> dict[str, Any]:
    """As Kueue (0.19.2) does: `raycluster.BuildPodSets`; no pod submits in HTTPMode."""
    cluster = job["spec"]["rayClusterSpec"]
    groups = [("head", 1, cluster["headGroupSpec"])]
    groups += [(g["groupName"], g["replicas"], g) for g in cluster["workerGroupSpecs"]]
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "Workload",
        "metadata": {"name": f"rayjob-{job['metadata']['name']}"},
        "spec": {
            "queueName": job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"],
            "podSets": [
                {"name": name, "count": count, "template": group["template"]}
                for name, count, group in groups
            ],
        },
    }


def test_kueue_can_make_a_workload_of_the_rayjob(validator):
    workload = workload_of(job_with("queue")[1])
    assert _problems(validator, workload) == []
    assert _broken_rules(validator.schema, workload) == []
    # What is admitted is the whole group at once.
    held = {one["name"]: one["count"] for one in workload["spec"]["podSets"]}
    assert held == {"head": 1, "gpu": 2, "cpu": 4}
    workload["spec"]["podSets"] = []
    assert _problems(validator, workload)
