"""The files of `cluster/`, against the schemas of those who read them, and our own rules."""

import gzip
import json
import re
import shlex
from importlib import metadata
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import ray.autoscaler
import yaml
from ray._private import ray_constants

from vit_ray.config import load_recipe
from vit_ray.config.command_sections import PlanConfig
from vit_ray.measure.network import ASSUMED, Network

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster"
GIB = 2**30


def _strict(schema):
    """The schema with every listed set of properties closed, so that a typo is an error."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _strict(value) for key, value in schema.items()}
    if "properties" in schema and "additionalProperties" not in schema:
        closed["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        closed = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    return closed


@pytest.fixture(scope="module")
def rayjob_schema():
    name = "rayjob_v1_kuberay_1.7.0.schema.json.gz"
    schema = json.loads(gzip.decompress((Path(__file__).parent / name).read_bytes()))
    # The API server fills and checks metadata by its own schema, which a CRD does not repeat.
    known = ("name", "namespace", "labels", "annotations")
    schema["properties"]["metadata"]["properties"] = {key: {} for key in known}
    return jsonschema.Draft7Validator(_strict(schema))


def _problems(validator, document):
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]


@pytest.fixture
def rayjob():
    return yaml.safe_load((CLUSTER / "rayjob.yaml").read_text())


def _pods(rayjob):
    cluster = rayjob["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def _container(group):
    (container,) = group["template"]["spec"]["containers"]
    return container


def _bytes(quantity):
    number, unit = re.fullmatch(r"(\d+)(Gi)?", quantity).groups()
    return int(number) * (GIB if unit else 1)


def test_the_rayjob_is_what_kuberay_defines(rayjob_schema, rayjob):
    assert _problems(rayjob_schema, rayjob) == []


@pytest.mark.parametrize(
    ("path", "typo", "value"),
    [
        ("spec", "backofflimit", 3),
        ("spec.deletionStrategy.deletionRules.0", "policies", "DeleteSelf"),
        ("spec.rayClusterSpec", "rayversion", "2.60.0"),
        ("spec.rayClusterSpec.authOptions", "modes", "token"),
        ("spec.rayClusterSpec.headGroupSpec", "rayStartParam", {}),
        ("spec.rayClusterSpec.headGroupSpec.template.spec", "terminationGracePeriod", 300),
        ("spec.rayClusterSpec.workerGroupSpecs.0", "minReplica", 1),
        ("spec.rayClusterSpec.workerGroupSpecs.0.template.spec.containers.0", "resourcess", {}),
        ("spec.rayClusterSpec.workerGroupSpecs.0.template.spec.volumes.0.emptyDir", "size", "1Gi"),
    ],
)
def test_a_typo_in_the_rayjob_is_found(rayjob_schema, rayjob, path, typo, value):
    node = rayjob
    for part in path.split("."):
        node = node[int(part)] if isinstance(node, list) else node[part]
    node[typo] = value
    (problem,) = _problems(rayjob_schema, rayjob)
    assert typo in problem


@pytest.mark.parametrize(
    ("key", "value"),
    [("backoffLimit", "three"), ("submissionMode", 1), ("shutdownAfterJobFinishes", "yes")],
)
def test_a_value_of_the_wrong_type_in_the_rayjob_is_found(rayjob_schema, rayjob, key, value):
    rayjob["spec"][key] = value
    (problem,) = _problems(rayjob_schema, rayjob)
    assert key in problem


def test_an_authentication_mode_that_does_not_exist_is_found(rayjob_schema, rayjob):
    rayjob["spec"]["rayClusterSpec"]["authOptions"]["mode"] = "tokens"
    assert "'tokens' is not one of" in _problems(rayjob_schema, rayjob)[0]


def test_the_pods_of_the_rayjob_are_valid_kubernetes_pods(rayjob):
    for group in _pods(rayjob):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **group["template"]}
        pod["metadata"] = {"name": "x", **group["template"].get("metadata", {})}
        kubernetes_validate.validate(pod, "1.33", strict=True)


def test_the_mlflow_manifests_are_valid_kubernetes():
    documents = list(yaml.safe_load_all((CLUSTER / "mlflow.yaml").read_text()))
    assert [d["kind"] for d in documents] == [
        "PersistentVolumeClaim",
        "Deployment",
        "Service",
        "Deployment",
        "Service",
    ]
    for document in documents:
        kubernetes_validate.validate(document, "1.33", strict=True)
    documents[1]["spec"]["replica"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(documents[1], "1.33", strict=True)


def _patched(document, operations):
    """By JSON Patch (RFC 6902), of which the files use `test` and `add`; to lists at their end."""
    for operation in operations:
        *path, last = [part.replace("~1", "/") for part in operation["path"].split("/")[1:]]
        node = document
        for part in path:
            node = node[int(part)] if isinstance(node, list) else node[part]
        if operation["op"] == "test":
            assert node[last] == operation["value"], (
                f"{operation['path']} == {operation['value']!r}"
            )
        else:
            assert operation["op"] == "add"
            if isinstance(node, list):
                assert last == "-"
                node.append(operation["value"])
                continue
            assert last not in node  # it would be lost
            node[last] = operation["value"]
    return document


NETWORKS = {
    "efa_patch.yaml": {"vpc.amazonaws.com/efa": "32", "hugepages-2Mi": "5120Mi"},
    "rdma_patch.yaml": {"rdma/rdma_shared_device_a": "1"},
}
# What chooses the adapters: libfabric's provider as AWS names it, NCCL's own variables.
CHOICES = {
    "efa_patch.yaml": {"FI_PROVIDER": "efa", "FI_EFA_USE_HUGE_PAGE": "0"},
    "rdma_patch.yaml": {"NCCL_IB_HCA": "mlx5", "NCCL_IB_GID_INDEX": "3"},
}
TOLD = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_fast_network_is_a_patch_of_the_pods_with_gpus(rayjob_schema, rayjob, name):
    operations = yaml.safe_load((CLUSTER / name).read_text())
    patched = _patched(rayjob, operations)
    assert _problems(rayjob_schema, patched) == []
    test_the_pods_of_the_rayjob_are_valid_kubernetes_pods(patched)
    _, gpu, cpu = _pods(patched)
    resources = _container(gpu)["resources"]
    for kind in ("requests", "limits"):
        assert NETWORKS[name].items() <= resources[kind].items()
        assert not NETWORKS[name].keys() & _container(cpu)["resources"][kind].keys()
    assert _container(gpu)["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    variables = {item["name"]: item["value"] for item in _container(gpu)["env"]}
    assert variables.pop("NCCL_SOCKET_IFNAME")
    assert int(variables.pop("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S")) >= 240  # it is kept
    assert variables.pop("RAY_grpc_keepalive_timeout_ms")
    assert variables == CHOICES[name] | TOLD
    # InfiniBand's adapters are the host's. There a pod finds the head by the cluster's names only
    # if told so.
    pod = gpu["template"]["spec"]
    is_on_host = name == "rdma_patch.yaml"
    assert pod.get("hostNetwork", False) is is_on_host
    assert (pod.get("dnsPolicy") == "ClusterFirstWithHostNet") == is_on_host


@pytest.mark.parametrize("name", NETWORKS)
def test_a_patch_stops_where_the_first_group_has_no_gpus(rayjob, name):
    operations = yaml.safe_load((CLUSTER / name).read_text())
    rayjob["spec"]["rayClusterSpec"]["workerGroupSpecs"].reverse()
    with pytest.raises(AssertionError, match="== 'gpu'"):
        _patched(rayjob, operations)


def test_the_networks_are_as_fast_as_the_plan_and_the_engine_assume():
    assumed = PlanConfig().network_gb_per_s
    assert Network(450.0, assumed, PlanConfig().gpus_per_server) == ASSUMED
    said = f"{assumed:g} GB/s for each server that `vit-ray plan` assumes"
    for name in NETWORKS:
        assert said in " ".join((CLUSTER / name).read_text().replace("#", "").split())
    rows = re.findall(r"^\| (\w.*?) \| ([\d.]+) \| .*? \| (.*) \|$", _readme(), re.M)
    rates = {network: float(rate) for network, rate, _ in rows}
    # Gbit/s of a server, over 8 bits.
    assert list(rates.values()) == [3200 / 8, 8 * 400 / 8, 100 / 8] == [assumed, assumed, 12.5]
    assert rows[2][2] == "`plan.network_gb_per_s=12.5`"


def _readme():
    return (CLUSTER / "README.md").read_text()


def test_services_find_their_pods_and_ports():
    documents = list(yaml.safe_load_all((CLUSTER / "mlflow.yaml").read_text()))
    deployments = [d for d in documents if d["kind"] == "Deployment"]
    for service in (d for d in documents if d["kind"] == "Service"):
        selector = service["spec"]["selector"]
        (pod,) = [
            d["spec"]["template"]
            for d in deployments
            if d["spec"]["template"]["metadata"]["labels"] == selector
        ]
        names = [port["name"] for port in pod["spec"]["containers"][0]["ports"]]
        assert [port["targetPort"] for port in service["spec"]["ports"]] == names


def test_no_password_is_written_down():
    text = (CLUSTER / "mlflow.yaml").read_text()
    documents = list(yaml.safe_load_all(text))
    assert "Secret" not in [d["kind"] for d in documents]
    assert re.findall(r"postgresql\S+://\S+", text) == [
        "postgresql+psycopg2://mlflow:$(POSTGRES_PASSWORD)@mlflow-postgres:5432/mlflow"
    ]


def test_the_cluster_launcher_file_is_what_ray_defines():
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    validator = jsonschema.Draft7Validator(schema)
    config = yaml.safe_load((CLUSTER / "ray_up.yaml").read_text())
    assert _problems(validator, config) == []
    assert config["head_node_type"] in config["available_node_types"]
    assert config["available_node_types"]["head"]["resources"] == {"CPU": 0}
    assert "--num-cpus=0" in config["head_start_ray_commands"][-1]
    assert "/home/ray/.ray/auth_token" in config["file_mounts"]
    config["available_node_types"]["gpu"]["max_worker"] = 1
    assert "max_worker" in _problems(validator, config)[0]


def test_one_ray_version_everywhere(rayjob):
    version = metadata.version("ray")
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if re.match(r"[a-z]", line) and "==" in line
    )
    assert pins["ray"] == version
    assert rayjob["spec"]["rayClusterSpec"]["rayVersion"] == version
    dockerfile = (CLUSTER / "Dockerfile").read_text()
    assert re.search(r"^FROM rayproject/ray:(\S+)-py311-gpu$", dockerfile, re.M).group(1) == version
    documents = [rayjob, *yaml.safe_load_all((CLUSTER / "mlflow.yaml").read_text())]
    documents.append(yaml.safe_load((CLUSTER / "ray_up.yaml").read_text()))
    images = set(re.findall(r"REGISTRY/vit-ray:[^\s\"',]+", json.dumps(documents)))
    assert images == {f"REGISTRY/vit-ray:{_project_version()}-ray{version}"}
    assert images == set(re.findall(r"REGISTRY/vit-ray:\S+", dockerfile)) - {"."}


def test_the_image_has_a_compiler_the_decoder_and_pinned_cuda_libraries():
    dockerfile = (CLUSTER / "Dockerfile").read_text()
    assert re.search(r"apt-get install .*\bgcc\b", dockerfile)
    assert "device-decode" in dockerfile
    assert "--constraint constraints-gpu.txt" in dockerfile
    names = ("constraints.txt", "constraints-gpu.txt")
    plain, gpu = (
        dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / name).read_text(), re.M)) for name in names
    )
    assert {"torch", "triton", "cuda-toolkit", "nvidia-nccl-cu13"} <= gpu.keys()
    assert all(plain[name] == gpu[name] for name in plain.keys() & gpu.keys())


def _project_version():
    text = (ROOT / "pyproject.toml").read_text()
    return re.search(r'^version = "(.+)"', text, re.M).group(1)


def test_only_the_head_is_free_of_work_and_safe_from_spot_nodes(rayjob):
    head, *workers = _pods(rayjob)
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert all("num-cpus" not in group["rayStartParams"] for group in workers)
    affinity = head["template"]["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert {rule["operator"] for rule in term["matchExpressions"]} == {"NotIn"}


def test_one_group_has_gpus_and_one_has_none(rayjob):
    _, gpu, cpu = _pods(rayjob)
    assert "nvidia.com/gpu" in _container(gpu)["resources"]["limits"]
    assert "nvidia.com/gpu" not in _container(cpu)["resources"]["limits"]


def test_the_object_store_fits_into_shared_memory_and_that_into_the_pod(rayjob):
    for group in _pods(rayjob):
        (volume,) = group["template"]["spec"]["volumes"]
        assert volume["emptyDir"]["medium"] == "Memory"
        (mount,) = _container(group)["volumeMounts"]
        assert mount == {"name": volume["name"], "mountPath": "/dev/shm"}
        shared = _bytes(volume["emptyDir"]["sizeLimit"])
        assert int(group["rayStartParams"]["object-store-memory"]) <= shared
        assert shared <= _bytes(_container(group)["resources"]["limits"]["memory"]) / 2


def test_pods_that_train_get_time_for_a_last_checkpoint(rayjob):
    head, gpu, _ = _pods(rayjob)
    for group in (head, gpu):
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] >= 300
    names = {item["name"]: item["value"] for item in _container(head)["env"]}
    assert int(names["RAY_JOB_STOP_WAIT_TIME_S"]) >= 60
    (drain,) = [
        int(item["value"])
        for item in _container(gpu)["env"]
        if item["name"] == "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
    ]
    assert "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S" in vars(ray_constants)
    # Ray's own default cuts a checkpoint off after 30 s; and the pod is not killed before that.
    assert 240 <= drain < gpu["template"]["spec"]["terminationGracePeriodSeconds"]


def test_every_definition_has_the_same_health_checks_and_hears_of_a_lost_node_in_35_s(rayjob):
    head, *others = _pods(rayjob)
    variables = {item["name"]: item["value"] for item in _container(head)["env"]}
    checks = {name: value for name, value in variables.items() if "health_check" in name}
    period, timeout, count = (
        int(checks[f"RAY_health_check_{name}"])
        for name in ("period_ms", "timeout_ms", "failure_threshold")
    )
    # TCP sends again after 0.2 s, 0.4 s and so on: after a cut of 12.6 to 25.4 s at 25.4 s.
    assert (count - 1) * (period + timeout) + timeout > 25_400 + 3_000
    assert count * (period + timeout) <= 30_000  # and 5 s for those who hear of it
    keepalive = {"RAY_grpc_keepalive_timeout_ms": variables["RAY_grpc_keepalive_timeout_ms"]}
    assert int(*keepalive.values()) > count * (period + timeout)
    for pod in others:
        assert keepalive.items() <= {i["name"]: i["value"] for i in _container(pod)["env"]}.items()
    launcher = yaml.safe_load((CLUSTER / "ray_up.yaml").read_text())
    (start,) = [c for c in launcher["head_start_ray_commands"] if "ray start" in c]
    (join,) = [c for c in launcher["worker_start_ray_commands"] if "ray start" in c]
    by_hand = (CLUSTER / "README.md").read_text().split("## Any machines")[1]
    for name, value in {**checks, **keepalive}.items():
        assert f"{name}={value}" in start
        assert f"{name}={value}" in by_hand
    assert "RAY_grpc_keepalive_timeout_ms=45000" in join


def test_a_lost_cluster_is_replaced_and_nothing_is_submitted_twice(rayjob):
    spec = rayjob["spec"]
    assert spec["backoffLimit"] == 3
    # No pod submits that could be lost: the operator does.
    assert spec["submissionMode"] == "HTTPMode"
    assert not {"submitterConfig", "submitterPodTemplate"} & spec.keys()
    # The operator refuses both (`validation.go`).
    assert not {"shutdownAfterJobFinishes", "ttlSecondsAfterFinished"} & spec.keys()
    rules = {
        (rule["condition"]["jobStatus"], rule["policy"]): rule["condition"]["ttlSeconds"]
        for rule in spec["deletionStrategy"]["deletionRules"]
    }
    assert rules["FAILED", "DeleteWorkers"] == 0
    assert rules["FAILED", "DeleteCluster"] >= 3600  # its logs are there for so long
    assert 0 < rules["SUCCEEDED", "DeleteCluster"] <= 3600
    assert spec["rayClusterSpec"]["authOptions"] == {"mode": "token"}


def test_the_command_of_the_rayjob_is_a_job_and_a_recipe_that_fit_the_cluster(rayjob):
    python, job, recipe_path, *overrides = shlex.split(rayjob["spec"]["entrypoint"])
    assert python == "python"
    assert (ROOT / job).is_file()
    recipe = load_recipe(ROOT / recipe_path, overrides)
    _, gpu, _ = _pods(rayjob)
    num_gpus = gpu["replicas"] * int(_container(gpu)["resources"]["limits"]["nvidia.com/gpu"])
    num_cpus = gpu["replicas"] * int(_container(gpu)["resources"]["limits"]["cpu"])
    assert recipe.workers.num_workers == num_gpus
    assert recipe.workers.cpus_per_worker * num_gpus <= num_cpus
    services = yaml.safe_load_all((CLUSTER / "mlflow.yaml").read_text())
    addresses = [
        f"http://{d['metadata']['name']}:{d['spec']['ports'][0]['port']}"
        for d in services
        if d["kind"] == "Service"
    ]
    assert recipe.tracking.uri in addresses


def test_the_files_named_in_the_readme_exist():
    text = (CLUSTER / "README.md").read_text()
    for name in set(re.findall(r"(?:cluster|jobs)/[\w/]+\.\w+", text)) - {"jobs/NAME.py"}:
        assert (ROOT / name).exists(), name
