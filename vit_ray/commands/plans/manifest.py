"""`vit-ray manifest`: a file of `cluster/` filled in with a recipe and sizes for it.

The shipped file is the template: everything except sizes, names and the network is only there.
"""

import json
import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import yaml

from vit_ray.addresses import PLACEHOLDER, sqlite_file
from vit_ray.commands.plans.plan import plan_stage, planned_cluster, shared_mib, told_facts
from vit_ray.config import Recipe
from vit_ray.config.command_sections import ClusterConfig
from vit_ray.data.order.partition import divisors
from vit_ray.measure.memory import READER_MIB

CPU_MS_PER_IMAGE: Final = 0.88
"""CPU ms per image: data_stream_decode_cpu_2026-11-22.md, as in the table of
`data_cores.py`."""
NETWORK_GB_PER_S: Final = {"tcp": 12.5, "efa": 400.0, "rdma": 400.0}
"""GB/s that a node sends, by its data sheet: one adapter of 100 Gbit/s, or eight of 400."""
_MOST_STORE_GIB: Final = 100
"""Largest object store of a node: it holds what eight GPUs train on in 20 s."""
_PACKAGE: Final = Path(__file__).parents[2]
# In an installed package, or in a checkout.
_FILES: Final = next(p for p in (_PACKAGE / "cluster", _PACKAGE.parent / "cluster") if p.is_dir())
_ONE_TRAINING: Final = ("pretrain", "finetune")


@dataclass(frozen=True)
class ClusterSizes:
    """The sizes of a recipe's cluster."""

    gpus: int
    gpu_nodes: int
    data_nodes: int
    images_per_s: float
    """Images that the GPUs train per second, with communication hidden."""
    reading_cpus: float
    """CPUs that reading this many images per second takes."""
    free_cpus: float
    """CPUs of the training nodes that their workers leave free."""
    shared_mib: float
    """Manifest and order, which the reading tasks of a node share."""


def cluster_sizes(recipe: Recipe) -> ClusterSizes:
    """The sizes by the plan of the recipe's training on `cluster.gpus`.

    Raises:
        ValueError: the GPUs do not divide the batch, the model does not fit on one, or a node has
            too few CPUs for its workers.
    """
    cluster, workers = recipe.cluster or ClusterConfig(), recipe.workers
    batch, gpus = recipe.train.global_batch_size, cluster.gpus or workers.sizes[-1]
    size = gpus if cluster.job in _ONE_TRAINING else min(gpus, workers.sizes[-1])
    if batch % size:
        nearest = max(n for n in divisors(batch) if n < size)
        raise ValueError(
            f"cluster.gpus={gpus}: {size} workers do not divide train.global_batch_size={batch}; "
            f"use {nearest} or another divisor"
        )
    each = min(gpus, cluster.gpus_per_node)
    free = cluster.cpus_per_node - each * workers.cpus_per_worker
    if free < recipe.data.cpus_per_task:
        raise ValueError(
            f"cluster.cpus_per_node={cluster.cpus_per_node} leaves {free:g} CPUs for reading next "
            f"to {each} workers of workers.cpus_per_worker={workers.cpus_per_worker:g}; lower "
            "workers.cpus_per_worker, or choose nodes with more CPUs"
        )
    plan: dict[str, Any] = {"num_gpus": size, "gpus_per_server": each}
    if "network_gb_per_s" not in recipe.plan.model_fields_set:
        plan["network_gb_per_s"] = NETWORK_GB_PER_S[cluster.network]
    planned = recipe.with_changes(plan=plan)
    facts = told_facts(planned)
    stage = plan_stage(planned, facts, planned_cluster(planned), recipe.train.zero_stage)
    if stage.largest_micro_batch is None:
        raise ValueError(
            f"not one image of {recipe.model.name} fits on a {recipe.plan.device} under "
            f"train.zero_stage={recipe.train.zero_stage}: {stage.memory.total:.1f} GiB; raise "
            "train.zero_stage, cluster.gpus or train.activation_checkpointing"
        )
    images_per_s = gpus // size * batch / stage.time.least_s
    reading = images_per_s * CPU_MS_PER_IMAGE / 1000
    gpu_nodes = math.ceil(gpus / each)
    data_nodes = cluster.data_nodes
    if data_nodes is None:
        missing = reading - gpu_nodes * free
        data_nodes = max(0, math.ceil(missing / cluster.cpus_per_data_node))
    if cluster.kind == "slurm":
        data_nodes = 0
    shared = shared_mib(recipe, facts)
    return ClusterSizes(
        gpus, gpu_nodes, data_nodes, images_per_s, reading, gpu_nodes * free, shared
    )


def describe_sizes(recipe: Recipe) -> str:
    """The nodes, and the reason for their number."""
    return "\n".join(_size_lines(recipe, cluster_sizes(recipe)))


def _size_lines(recipe: Recipe, sizes: ClusterSizes) -> list[str]:
    cluster = recipe.cluster or ClusterConfig()
    lines = [
        f"nodes that train     {sizes.gpu_nodes} with {sizes.gpus} GPUs in total, "
        f"{cluster.cpus_per_node} CPUs and {cluster.memory_gib_per_node} GiB each"
    ]
    if sizes.data_nodes:
        lines.append(
            f"nodes that read      {sizes.data_nodes} with {cluster.cpus_per_data_node} CPUs and "
            f"{cluster.memory_gib_per_data_node} GiB each"
        )
    lines += [
        f"training             {sizes.images_per_s:,.0f} images/s on {recipe.plan.device} at "
        f"{recipe.plan.mfu * 100:g} % MFU",
        f"reading              {sizes.reading_cpus:,.1f} CPUs at "
        f"{CPU_MS_PER_IMAGE} ms an image; {sizes.free_cpus:g} are free on the "
        "nodes that train",
    ]
    if sizes.reading_cpus > sizes.free_cpus + sizes.data_nodes * cluster.cpus_per_data_node:
        lines[-1] += "; data will limit training"
    kinds = [("trains", sizes.free_cpus / sizes.gpu_nodes, cluster.memory_gib_per_node)]
    if sizes.data_nodes:
        kinds.append(("reads", cluster.cpus_per_data_node, cluster.memory_gib_per_data_node))
    each_mib = recipe.data.task_memory_mib + READER_MIB
    for name, cpus, memory_gib in kinds:
        tasks = int(cpus / recipe.data.cpus_per_task)
        tasks = min(tasks, recipe.data.max_tasks or tasks)
        needed_gib = (tasks * each_mib + sizes.shared_mib) / 1024
        left_gib = memory_gib - _store_gib(memory_gib)
        lines.append(
            f"memory for reading   {needed_gib:,.1f} GiB where it {name}, of {left_gib} outside "
            f"the object store: {tasks} tasks of {each_mib} MiB, and {sizes.shared_mib:,.0f} MiB "
            "of manifest and order for all"
        )
        if needed_gib > left_gib:
            lines[-1] += "; too little: lower data.task_memory_mib or data.max_tasks"
    return lines


def print_manifest(recipe: Recipe) -> int:
    """Print the file."""
    print(manifest(recipe), end="")
    return 0


def manifest(recipe: Recipe) -> str:
    """The file of `cluster.kind` for the recipe.

    Raises:
        ValueError: as `cluster_sizes`, or a path or an address that the cluster cannot use.
    """
    cluster = recipe.cluster or ClusterConfig()
    _check_places(recipe, cluster)
    sizes = cluster_sizes(recipe)
    name, fill = {
        "kuberay": ("rayjob.yaml", _rayjob),
        "slurm": ("slurm.sbatch", _slurm),
        "ray_up": ("ray_up.yaml", _ray_up),
    }[cluster.kind]
    text = fill((_FILES / name).read_text(), _recipe_there(recipe, cluster, sizes), cluster, sizes)
    first, interpreter, rest = text.partition("#!/bin/bash\n")
    comments = [f"By `vit-ray manifest` from cluster/{name}", *_size_lines(recipe, sizes)]
    return "".join([interpreter, *(f"# {line}\n" for line in comments), first, rest])


def _check_places(recipe: Recipe, cluster: ClusterConfig) -> None:
    """Check that every node can reach the recipe's paths and addresses."""
    if cluster.kind != "slurm" and not cluster.image:
        raise ValueError(
            "cluster.image is not set; give the image that you built from cluster/Dockerfile and "
            "pushed, such as cluster.image=REGISTRY/vit-ray:0.1.0-ray2.60.0"
        )
    if cluster.kind == "ray_up":  # its file has no recipe
        return
    for key, value in recipe.flat().items():
        if f"{PLACEHOLDER}/" in value:
            raise ValueError(f"{key}={value} is a placeholder; give {key}=s3://MY-BUCKET/FOLDER")
    if recipe.recorded() != recipe.model_dump(mode="json"):
        raise ValueError(
            "the recipe contains a password, which would be readable in this file; remove it, and "
            "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD on the head"
        )
    if cluster.kind == "slurm":
        return
    store = sqlite_file(recipe.tracking.uri)
    if store is not None and not store.is_absolute():
        raise ValueError(
            f"tracking.uri={recipe.tracking.uri} is a file on the head node and is lost with it; "
            "give a server such as http://mlflow:5000 (cluster/mlflow.yaml)"
        )
    if urlsplit(recipe.tracking.uri).hostname in ("localhost", "127.0.0.1", "::1"):
        raise ValueError(
            f"tracking.uri={recipe.tracking.uri} means the pod of the head itself there, where no "
            "MLflow answers; give a server such as http://mlflow:5000 (cluster/mlflow.yaml)"
        )
    places = [
        ("output", recipe.output),
        ("init_from", recipe.init_from),
        ("data.train", recipe.data.train),
        ("data.eval", recipe.data.eval),
        ("evaluate.few_shot_train", recipe.evaluate.few_shot_train),
        ("evaluate.few_shot_test", recipe.evaluate.few_shot_test),
        ("vtab.data", recipe.vtab and recipe.vtab.data),
    ]
    for key, place in places:
        if place and "://" not in place and not place.startswith("/"):
            raise ValueError(
                f"{key}={place} is a folder on one node and is lost with it; give "
                "s3://BUCKET/FOLDER, or the full path of a file system that all nodes mount"
            )


def _recipe_there(recipe: Recipe, cluster: ClusterConfig, sizes: ClusterSizes) -> Recipe:
    """The recipe as it runs on the cluster."""
    count: int | tuple[int, int] = recipe.workers.num_workers
    if cluster.job in _ONE_TRAINING:
        count = sizes.gpus if isinstance(count, int) else (min(count[0], sizes.gpus), sizes.gpus)
    changes: dict[str, Any] = {"workers": {"num_workers": count, "use_gpu": True}}
    if recipe.study is not None:
        changes["study"] = {"max_gpus": sizes.gpus}
    if cluster.kind == "slurm":
        recipe = recipe.with_absolute_paths()
    return recipe.with_changes(**changes, cluster=None)


def recipe_text(recipe: Recipe) -> str:
    """YAML of what the recipe sets; it loads as the same recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json", exclude_defaults=True), sort_keys=False)


class _Dumper(yaml.SafeDumper):
    """Texts of several lines are written as block scalars, and repeated values are repeated."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = "|" if "\n" in text else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _Dumper.represent_text)


def _rayjob(text: str, recipe: Recipe, cluster: ClusterConfig, sizes: ClusterSizes) -> str:
    name = re.sub("[^a-z0-9]+", "-", recipe.name.lower()).strip("-")
    name = (name if name[:1].isalpha() else f"vit-{name}")[:47].rstrip("-")  # a DNS-1035 label
    shipped = next(yaml.safe_load_all(text))["metadata"]["name"]
    text = text.replace(shipped, name).replace("jobs/pretrain.py", f"jobs/{cluster.job}.py")
    text = re.sub(r"REGISTRY/vit-ray:\S+", str(cluster.image), text)
    text = text.replace("vit-ray-mlflow", cluster.mlflow_secret or "vit-ray-mlflow")
    config, network, job = yaml.safe_load_all(text)
    config["data"]["recipe.yaml"] = recipe_text(recipe)
    spec = job["spec"]["rayClusterSpec"]
    gpu, cpu = spec["workerGroupSpecs"]
    head_pod = spec["headGroupSpec"]["template"]["spec"]
    gpu["maxReplicas"] = sizes.gpu_nodes
    gpus = {"nvidia.com/gpu": str(min(sizes.gpus, cluster.gpus_per_node))}
    _fill_group(gpu, cluster.cpus_per_node, cluster.memory_gib_per_node, gpus)
    cpu |= dict.fromkeys(("replicas", "maxReplicas"), sizes.data_nodes)
    _fill_group(cpu, cluster.cpus_per_data_node, cluster.memory_gib_per_data_node, {})
    for group, kinds in ((gpu, ("none", "data")), (cpu, ("none",))):
        if cluster.spot in kinds:
            group["template"]["spec"]["affinity"] = head_pod["affinity"]
    gpu_labels, cpu_labels = _labels(recipe, sizes)
    for group, labels in ((gpu, gpu_labels), (cpu, cpu_labels)):
        if labels:
            group["labels"] = labels
    if not sizes.data_nodes:
        spec["workerGroupSpecs"] = [gpu]
    if cluster.network != "tcp":
        patch = (_FILES / f"{cluster.network}_patch.yaml").read_text()
        _apply_patch(job, yaml.safe_load(patch))
    documents = [config, network, job]
    if gpu["template"]["spec"].get("hostNetwork"):
        # Network plugins do not select such pods by label: the head's policy would reject them.
        documents.remove(network)
    if cluster.queue:
        # Kueue (0.19) accepts no cluster that grows, and none that outlives its job.
        job["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": cluster.queue}
        gpu["replicas"] = gpu["minReplicas"] = sizes.gpu_nodes
        del spec["enableInTreeAutoscaling"], spec["autoscalerOptions"]
        del job["spec"]["deletionStrategy"]
        head_pod["volumes"] = [v for v in head_pod["volumes"] if v["name"] != "kubernetes"]
        job["spec"] |= {"shutdownAfterJobFinishes": True, "ttlSecondsAfterFinished": 600}
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=100)


def _labels(recipe: Recipe, sizes: ClusterSizes) -> tuple[dict[str, str], dict[str, str]]:
    """Labels of nodes that train and of nodes that read: an autoscaler knows only these of a new
    node.

    Only a selector for a single value gives the label that a node must have.
    """
    trains, reads = (
        {key: value for key, value in selector.items() if not set("!(") & set(value)}
        for selector in (recipe.workers.label_selector, recipe.data.label_selector)
    )
    return trains if sizes.data_nodes else reads | trains, reads


def _store_gib(memory_gib: int) -> int:
    """Of a node's object store."""
    return min(_MOST_STORE_GIB, memory_gib * 3 // 10)


def _fill_group(group: dict[str, Any], cpus: int, memory_gib: int, gpus: dict[str, str]) -> None:
    """Set the sizes of a worker group's pod.

    By default Ray gives its object store 30 % of the memory; it is in `/dev/shm`.
    """
    store_gib = _store_gib(memory_gib)
    group["rayStartParams"]["object-store-memory"] = str(store_gib << 30)
    pod = group["template"]["spec"]
    held = {"cpu": str(cpus), "memory": f"{memory_gib}Gi", **gpus}
    pod["containers"][0]["resources"] = {"requests": held, "limits": dict(held)}
    pod["volumes"][0]["emptyDir"]["sizeLimit"] = f"{-(-store_gib * 11 // 10)}Gi"


def _apply_patch(document: Any, operations: list[dict[str, Any]]) -> None:
    """JSON Patch (RFC 6902) as far as the files use it: `test`, and `add` at a list's end."""
    for operation in operations:
        *path, last = [part.replace("~1", "/") for part in operation["path"].split("/")[1:]]
        node = document
        for part in path:
            node = node[int(part)] if isinstance(node, list) else node[part]
        if operation["op"] == "test":
            assert node[last] == operation["value"]
        elif isinstance(node, list):
            node.append(operation["value"])
        else:
            node[last] = operation["value"]


def _slurm(text: str, recipe: Recipe, cluster: ClusterConfig, sizes: ClusterSizes) -> str:
    partition = f"\n#SBATCH --partition={cluster.queue}" if cluster.queue else ""
    gpus = min(sizes.gpus, cluster.gpus_per_node)
    for pattern, filled in (
        (r"(#SBATCH --job-name=).*", rf"\g<1>{recipe.name}{partition}"),
        (r"(#SBATCH --nodes=).*", rf"\g<1>{sizes.gpu_nodes}"),
        (r"(#SBATCH --gpus-per-node=).*", rf"\g<1>{gpus}"),
        (r"(python -m vit_ray )pretrain", rf"\g<1>{cluster.job}"),
    ):
        text, count = re.subn(pattern, filled, text)
        assert count == 1, pattern
    before, begin, rest = text.partition("<<'RECIPE'\n")
    after = rest.partition("RECIPE\n")[2]
    return f"{before}{begin}{recipe_text(recipe)}RECIPE\n{after}"


def _ray_up(text: str, recipe: Recipe, cluster: ClusterConfig, sizes: ClusterSizes) -> str:
    config = yaml.safe_load(re.sub(r"REGISTRY/vit-ray:\S+", str(cluster.image), text))
    types = config["available_node_types"]
    config["max_workers"] = sizes.gpu_nodes + sizes.data_nodes
    gpus = {"GPU": min(sizes.gpus, cluster.gpus_per_node)}
    gpu_labels, cpu_labels = _labels(recipe, sizes)
    for name, count, cpus, others, labels, kinds in (
        ("gpu", sizes.gpu_nodes, cluster.cpus_per_node, gpus, gpu_labels, ("all",)),
        ("cpu", sizes.data_nodes, cluster.cpus_per_data_node, {}, cpu_labels, ("all", "data")),
    ):
        types[name] |= {"max_workers": count, "resources": {"CPU": cpus, **others}}
        if labels:
            types[name]["labels"] = labels
        node = types[name]["node_config"]
        if cluster.spot in kinds:
            node["InstanceMarketOptions"] = {"MarketType": "spot"}
        elif cluster.spot:
            node.pop("InstanceMarketOptions", None)
    if not sizes.data_nodes:
        del types["cpu"]
    workers = f"workers.num_workers={json.dumps(recipe.workers.num_workers)}"
    sets = f"{shlex.quote(workers)} workers.use_gpu=true"
    line = f"# Submit with {sets}; the instance types must hold `resources`.\n"
    return line + yaml.dump(config, Dumper=_Dumper, sort_keys=False, width=100)
