"""The files of `cluster/`, against the schemas of those who read them, and our own rules."""

import copy
import functools
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

import celpy
import jsonschema
import kubernetes_validate
import numpy as np
import pytest
import ray.autoscaler
import yaml
from celpy.adapter import json_to_cel
from ray._private import ray_constants
from ray._private.runtime_env.packaging import create_package
from ray._private.runtime_env.working_dir import upload_working_dir_if_needed
from ray.autoscaler._private.util import fillout_defaults, validate_config

from tests.recipes import SMALL
from vit_ray.commands.plan import describe_plan
from vit_ray.config import load_recipe

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster"
RECIPE = "paper/vit_b16_i21k"
OVERLAYS = ("efa", "rdma", "spot", "queue")


@functools.cache
def _rendered(overlay):
    if not overlay:
        files = ("rayjob.yaml", "network_policy.yaml")
        return "\n---\n".join((CLUSTER / name).read_text() for name in files)
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    with tempfile.TemporaryDirectory() as folder:
        there = shutil.copytree(CLUSTER, Path(folder, "cluster"))
        file = there / "kustomization.yaml"
        listed = f"components: [overlays/{overlay}]"
        file.write_text(file.read_text().replace("components: []", listed))
        command = ["kubectl", "kustomize", there]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def documents_with(overlay=""):
    """All that `kubectl apply -k` sends with an overlay, as rendered; "" is as shipped."""
    return [one for one in yaml.safe_load_all(_rendered(overlay)) if one]


def job_with(overlay=""):
    """The ConfigMap with the recipe, and the job."""
    kinds = {one["kind"]: one for one in documents_with(overlay)}
    return kinds["ConfigMap"], kinds["RayJob"]


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


def _schema(file, *metadata_keys):
    """Strict; the API server checks metadata by its own schema, which a CRD does not repeat."""
    schema = json.loads(gzip.decompress((Path(__file__).parent / file).read_bytes()))
    schema["properties"]["metadata"]["properties"] = {key: {} for key in metadata_keys}
    return jsonschema.Draft7Validator(_strict(schema))


@pytest.fixture(scope="module")
def rayjob_schema():
    known = ("name", "namespace", "labels", "annotations")
    return _schema("rayjob_v1_kuberay_1.7.0.schema.json.gz", *known)


def _problems(validator, document):
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]


@pytest.fixture(params=["", "efa", "rdma", "spot"])
def documents(request):
    return job_with(request.param)


@pytest.fixture
def rayjob(documents):
    return documents[1]


def _pods(rayjob):
    cluster = rayjob["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def _container(group):
    (container,) = group["template"]["spec"]["containers"]
    return container


def _variables(group):
    return {one["name"]: one.get("value") for one in _container(group)["env"]}


def test_the_rayjob_is_what_kuberay_and_kubernetes_define(rayjob_schema, rayjob):
    assert _problems(rayjob_schema, rayjob) == []
    for group in _pods(rayjob):
        pod = {"apiVersion": "v1", "kind": "Pod", **group["template"]}
        pod["metadata"] = {"name": "x", **group["template"].get("metadata", {})}
        kubernetes_validate.validate(pod, "1.37", strict=True)
    rayjob["spec"]["backofflimit"] = 3
    group["minReplica"] = 1
    group["template"]["spec"]["volumes"][0]["emptyDir"] = {"size": "1Gi"}
    assert len(_problems(rayjob_schema, rayjob)) == 3  # a typo is found on any level


def test_the_mlflow_manifests_are_valid_kubernetes():
    documents = list(yaml.safe_load_all((CLUSTER / "mlflow.yaml").read_text()))
    for document in documents:
        kubernetes_validate.validate(document, "1.37", strict=True)
    assert "Secret" not in [document["kind"] for document in documents]
    deployment = next(one for one in documents if one["kind"] == "Deployment")
    deployment["spec"]["replica"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, "1.37", strict=True)


def test_one_ray_version_everywhere():
    _, shipped_rayjob = job_with()
    version = metadata.version("ray")
    assert f"\nray=={version}\n" in (ROOT / "constraints.txt").read_text()
    assert shipped_rayjob["spec"]["rayClusterSpec"]["rayVersion"] == version
    dockerfile = (CLUSTER / "Dockerfile").read_text()
    assert f"\nARG BASE=rayproject/ray:{version}-py311-gpu\n" in dockerfile
    project = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    texts = [json.dumps(shipped_rayjob), dockerfile]
    texts += [(CLUSTER / name).read_text() for name in ("mlflow.yaml", "ray_up.yaml")]
    for text in texts:
        images = set(re.findall(r"REGISTRY/vit-ray:[^\s\"',]+", text))
        assert images == {f"REGISTRY/vit-ray:{project}-ray{version}"}


def test_versions_for_gpus_and_for_cpus_agree():
    plain, gpu = (
        dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / name).read_text(), re.M))
        for name in ("constraints.txt", "constraints-gpu.txt")
    )
    assert {"torch", "triton", "nvidia-nccl-cu13"} <= gpu.keys()
    assert all(plain[name] == gpu[name] for name in plain.keys() & gpu.keys())


def test_the_marked_sizes_are_those_of_the_plan():
    config, job = job_with()
    head, gpu, cpu = _pods(job)
    num_workers = yaml.safe_load(config["data"]["recipe.yaml"])["workers"]["num_workers"]
    text = describe_plan(load_recipe(RECIPE, [f"plan.num_gpus={num_workers}"]))
    sizes = dict(re.findall(r"^  (\S.*\S)  +(\d+)", text.partition("\nsizes,")[2], re.M))
    assert int(sizes["workers.num_workers"]) == num_workers
    assert int(sizes["maxReplicas"]) == gpu["maxReplicas"]
    cpus = cpu["maxReplicas"] * int(_container(cpu)["resources"]["limits"]["cpu"])
    assert int(sizes["CPUs that read"]) <= cpus
    share = int(re.search(r"at most (\d+) % of a node's memory; sizeLimit a tenth above", text)[1])
    for group in (head, gpu, cpu):
        (volume,) = [v for v in group["template"]["spec"]["volumes"] if "emptyDir" in v]
        limit = int(volume["emptyDir"]["sizeLimit"].removesuffix("Gi"))
        memory = int(_container(group)["resources"]["limits"]["memory"].removesuffix("Gi"))
        store = int(group["rayStartParams"]["object-store-memory"]) / 2**30
        assert 11 * store <= 10 * limit
        assert store <= share / 100 * memory


def test_pods_that_train_get_time_for_a_last_checkpoint():
    _, gpu, *_ = _pods(job_with()[1])
    name = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
    assert name in vars(ray_constants)
    # Ray's own default cuts a checkpoint off after 30 s; and the pod is not killed before that.
    grace_s = gpu["template"]["spec"]["terminationGracePeriodSeconds"]
    assert 240 <= int(_variables(gpu)[name]) < grace_s


def test_a_lost_node_is_heard_of_in_35_s_and_a_cut_shorter_than_20_s_ends_none(rayjob):
    head, *others = _pods(rayjob)
    checks = {name: text for name, text in _variables(head).items() if "health_check" in name}
    period, timeout, count = (
        int(checks[f"RAY_health_check_{name}"])
        for name in ("period_ms", "timeout_ms", "failure_threshold")
    )
    # TCP sends what was lost again after r, 2 r, 4 r and so on; r is 0.2 s and the round trip.
    # Ray's processes send at any time of the cut, since gRPC measures the round trip by itself.
    lost_ms, first_ms = np.arange(0, 20_000, 5)[:, None], np.arange(201, 208.5, 0.5)
    tries = lost_ms + first_ms * 2.0 ** np.arange(10)[:, None, None]
    latest = np.where(tries > 20_000, tries, np.inf).min(axis=0).max()
    assert (count - 1) * (period + timeout) + timeout > latest
    assert count * (period + timeout) <= 34_000  # and 1 s for those who hear of it
    keepalive = "RAY_grpc_keepalive_timeout_ms"
    (value,) = {_variables(group)[keepalive] for group in (head, *others)}
    assert int(value) > count * (period + timeout)
    launcher = yaml.safe_load((CLUSTER / "ray_up.yaml").read_text())
    (start,), (join,) = (
        [one for one in launcher[f"{role}_start_ray_commands"] if "ray start" in one]
        for role in ("head", "worker")
    )
    assert f"{keepalive}={value}" in join
    by_hand = (CLUSTER / "README.md").read_text().split("## Any machines")[1]
    for text in (f"{name}={value}" for name, value in (*checks.items(), (keepalive, value))):
        assert text in start
        assert text in by_hand


def test_the_command_of_the_rayjob_is_a_job_and_a_recipe_that_fit_the_cluster(documents, tmp_path):
    config, job = documents
    kubernetes_validate.validate(config, "1.37", strict=True)
    entrypoint = job["spec"]["entrypoint"]
    (script,) = re.findall(r"python (jobs/\w+\.py) /home/ray/recipe/", entrypoint)
    assert (ROOT / script).is_file()
    head, gpu, *_ = _pods(job)
    volume = {"name": "recipe", "configMap": {"name": config["metadata"]["name"]}}
    assert volume in head["template"]["spec"]["volumes"]
    assert {"name": "recipe", "mountPath": "/home/ray/recipe"} in _container(head)["volumeMounts"]
    # It is stopped by its own name: where no restart helps, and before its head goes.
    stop = ["ray", "job", "stop", job["spec"]["jobId"]]
    assert f"ray job stop --no-wait {stop[-1]};" in entrypoint
    assert _container(head)["lifecycle"]["preStop"]["exec"]["command"] == stop
    (tmp_path / "recipe.yaml").write_text(config["data"]["recipe.yaml"])
    recipe, held = load_recipe(tmp_path / "recipe.yaml"), _container(gpu)["resources"]["limits"]
    gpus = int(held["nvidia.com/gpu"])
    assert recipe.workers.num_workers == gpu["maxReplicas"] * gpus
    reading = int(held["cpu"]) - recipe.workers.cpus_per_worker * gpus
    assert reading >= recipe.data.cpus_per_task
    assert recipe.tracking.uri == "http://mlflow:5000"


def _rules(schema, value, path="$"):
    """Each CEL rule of the schema that speaks of the value: its path, text and the value there."""
    for rule in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" not in rule["rule"]:  # of a change
            yield path, rule["rule"], value
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _rules(schema.get("properties", {}).get(key, {}), one, f"{path}.{key}")
    if isinstance(value, list):
        for one in value:
            yield from _rules(schema.get("items", {}), one, f"{path}[]")


def _broken_rules(schema, job):
    environment = celpy.Environment()
    return [
        path
        for path, rule, value in _rules(schema, job)
        if not environment.program(environment.compile(rule)).evaluate({"self": json_to_cel(value)})
    ]


def test_the_rayjob_keeps_the_rules_between_keys_of_kuberays_definition(rayjob_schema, rayjob):
    schema = rayjob_schema.schema
    assert len(list(_rules(schema, rayjob))) == 8  # two of the strategy, two of each condition
    assert _broken_rules(schema, rayjob) == []
    strategy = rayjob["spec"]["deletionStrategy"]
    strategy["deletionRules"][0]["condition"]["jobDeploymentStatus"] = "Failed"
    strategy["onFailure"] = {"policy": "DeleteNone"}
    place = "$.spec.deletionStrategy"
    assert _broken_rules(schema, rayjob) == [place, f"{place}.deletionRules[].condition"]


def test_a_queue_of_kueue_admits_the_whole_cluster_at_once(rayjob_schema):
    """As its webhook demands (0.19, `rayjob_webhook.go`), with the Workload that it makes (0.19.2,
    `raycluster.BuildPodSets`; no pod submits in HTTPMode).
    """
    _, job = job_with("queue")
    assert _problems(rayjob_schema, job) == []
    spec, cluster = job["spec"], job["spec"]["rayClusterSpec"]
    assert spec["shutdownAfterJobFinishes"] is True
    assert "deletionStrategy" not in spec  # the operator takes one of the two
    assert not cluster.get("enableInTreeAutoscaling")
    assert all(g["replicas"] == g["maxReplicas"] for g in cluster["workerGroupSpecs"])
    sets = [{"name": "head", "count": 1, "template": cluster["headGroupSpec"]["template"]}]
    sets += [
        {"name": group["groupName"], "count": group["replicas"], "template": group["template"]}
        for group in cluster["workerGroupSpecs"]
    ]
    assert {one["name"]: one["count"] for one in sets} == {"head": 1, "gpu": 2, "cpu": 4}
    queue = job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
    workload = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload"}
    workload |= {"metadata": {"name": "job"}, "spec": {"queueName": queue, "podSets": sets}}
    validator = _schema("workload_v1beta2_kueue_0.19.2.schema.json.gz", "name")
    assert _problems(validator, workload) == []
    assert _broken_rules(validator.schema, workload) == []
    workload["spec"]["podSets"] = []
    assert _problems(validator, workload)


@pytest.mark.parametrize("words", [("shellcheck", "slurm.sbatch"), ("hadolint", "Dockerfile")])
def test_a_linter_finds_no_fault(words):
    beside = Path(sys.executable).parent  # where pip puts programs, whether or not on the path
    if (linter := shutil.which(words[0], path=f"{beside}:{os.environ['PATH']}")) is None:
        pytest.skip(f"{words[0]} is not installed")
    done = subprocess.run([linter, *words[1:]], cwd=CLUSTER, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_script_for_slurm_has_a_recipe_that_fits_its_nodes(tmp_path):
    text = (CLUSTER / "slurm.sbatch").read_text()
    file = tmp_path / "recipe.yaml"
    file.write_text(text.partition("<<'RECIPE'\n")[2].partition("RECIPE\n")[0])
    nodes, gpus = (
        int(re.search(rf"^#SBATCH --{key}=(\d+)$", text, re.M)[1])
        for key in ("nodes", "gpus-per-node")
    )
    assert load_recipe(file).workers.num_workers == nodes * gpus


def test_the_launcher_file_is_rays_and_holds_the_workers():
    config = yaml.safe_load((CLUSTER / "ray_up.yaml").read_text())
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    validator = jsonschema.Draft7Validator(schema)
    assert _problems(validator, config) == []
    validate_config(fillout_defaults(copy.deepcopy(config)))  # Ray's own
    types = config["available_node_types"].values()
    cpus, gpus = (
        sum(one.get("max_workers", 0) * one["resources"].get(key, 0) for one in types)
        for key in ("CPU", "GPU")
    )
    recipe = load_recipe(RECIPE, [*SMALL, "workers.num_workers=16", "workers.cpus_per_worker=7.5"])
    assert gpus >= recipe.workers.num_workers
    assert cpus >= 16 * recipe.workers.cpus_per_worker + recipe.data.cpus_per_task
    config["available_node_types"]["gpu"]["max_worker"] = 1
    assert "max_worker" in _problems(validator, config)[0]


@pytest.mark.parametrize("given", ["right", "wrong", "none"])
def test_the_efa_installer_runs_only_when_its_checksum_is_the_one_given(given, tmp_path):
    folder, tools = tmp_path / "efa", tmp_path / "tools"
    script = tmp_path / "aws-efa-installer" / "efa_installer.sh"
    for place in (folder, tools, script.parent):
        place.mkdir()
    script.write_text(f'#!/bin/bash\necho "$@" > {tmp_path}/installed\n')
    script.chmod(0o755)
    archive = tmp_path / "served.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(script.parent, "aws-efa-installer")
    served = f"cp {archive} aws-efa-installer-1.51.0.tar.gz"
    for name, line in {"curl": served, "apt-get": "true", "ldconfig": "true"}.items():
        (tools / name).write_text(f"#!/bin/bash\n{line}\n")
        (tools / name).chmod(0o755)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    sums = {"right": digest, "wrong": digest[::-1], "none": ""}
    # As the builder gives it to the shell.
    dockerfile = (CLUSTER / "Dockerfile").read_text()
    (step,) = re.findall(r"^RUN (if \[ -n \"\$EFA_VERSION.*?)\n\n", dockerfile, re.M | re.DOTALL)
    step = (
        step.replace("\\\n", "")
        .replace("/tmp/efa", str(folder))
        .replace("/var/lib/apt/lists/*", "")
    )
    done = subprocess.run(
        ["sh", "-c", step], cwd=folder, capture_output=True, text=True,
        env={
            "PATH": f"{tools}:/usr/bin:/bin", "EFA_SHA256": sums[given], "EFA_VERSION": "1.51.0",
        },
    )  # fmt: skip
    assert (done.returncode == 0) is (given == "right"), done.stderr
    assert (tmp_path / "installed").exists() is (given == "right")
    assert ("give EFA_SHA256" in done.stderr) is (given == "none")


STAYS = (
    ".env", ".env.production", "keys/id.pem", ".aws/credentials", "B_16.npz", "my/model.pt",
    "exported/model.safetensors", "runs/a/step-1/rank-0.safetensors", "mlflow.db",
    "mlruns/1/meta.yaml", ".git/config", ".venv/bin/python",
)  # fmt: skip
GOES = ("jobs/pretrain.py", "mine.yaml", "environment.py", "my/model.py")


def test_secrets_weights_and_results_are_left_behind(tmp_path):
    folder, package = tmp_path / "folder", tmp_path / "package.zip"
    for name in (*STAYS, *GOES):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("content")
    for name in (".gitignore", ".rayignore"):
        shutil.copy(ROOT / name, folder)

    def upload(path: str, excludes: list[str], is_file: bool = False) -> None:
        create_package(path, package, include_gitignore=True, excludes=excludes)

    given = {"working_dir": str(folder)}
    upload_working_dir_if_needed(given, include_gitignore=True, upload_fn=upload)
    sent = {name for name in zipfile.ZipFile(package).namelist() if not name.endswith("/")}
    assert sent == {*GOES, ".gitignore", ".rayignore"}
