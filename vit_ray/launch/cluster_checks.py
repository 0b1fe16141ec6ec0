"""Checks of a run against the cluster: room for the workers, and files that all nodes see."""

import contextlib
import json
import math
import os
import platform
from collections.abc import Collection, Iterable
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vit_ray.config import Recipe
from vit_ray.launch.connection import ClusterShape
from vit_ray.storage import locate

# A node without an answer by then, for example while it unpacks the job's environment, passes the
# check: its workers check again when they start.
_ANSWER_LIMIT_S: Final = 20.0


def check_cluster(recipe: Recipe, cluster: ClusterShape) -> bool:
    """Check that a run may start on the cluster; returns whether its workers get GPUs.

    Only the machine of a Ray that this command has started must have room now. Any other cluster
    may grow, so the worker group waits there.

    Raises:
        ValueError: this machine has no room, or no node with the recipe's labels; or, with
            workers.use_gpu=auto, an empty cluster does not show whether workers will get GPUs.
    """
    workers, matching = recipe.workers, cluster.matching(recipe.workers.label_selector)
    has_nodes = matching.num_cpus > 0 or matching.num_gpus > 0
    if workers.use_gpu == "auto" and not has_nodes and not cluster.is_private:
        raise ValueError(
            "workers.use_gpu=auto: no node that can hold workers is up, and whether those that "
            f"come will have GPUs is not known ({matching}); set workers.use_gpu=true, or false to "
            "train on CPUs"
        )
    use_gpu = matching.num_gpus > 0 if workers.use_gpu == "auto" else workers.use_gpu
    if cluster.is_private:
        _check_machine(recipe, cluster, use_gpu=use_gpu)
    return use_gpu


def _check_machine(recipe: Recipe, cluster: ClusterShape, *, use_gpu: bool) -> None:
    workers, size, cpus = recipe.workers, recipe.group_sizes[0], recipe.workers.cpus_per_worker
    for section in ("workers", "data"):
        selector = getattr(recipe, section).label_selector
        if selector and not cluster.matching(selector).num_cpus:
            raise ValueError(
                f"{section}.label_selector={json.dumps(dict(selector))}: this machine, on which "
                "the command has started Ray, has no such labels; set RAY_ADDRESS to a cluster "
                f"whose nodes have them, or leave {section}.label_selector out"
            )
    max_workers = int(min(cluster.num_cpus / cpus, cluster.num_gpus if use_gpu else math.inf))
    if max_workers < size:
        gpu = " and a GPU" if use_gpu else ""
        raise ValueError(
            f"workers.num_workers={workers.num_workers} with {cpus:g} CPU{gpu} each: this machine "
            f"can hold at most {max_workers} ({cluster}); join a cluster, lower "
            "workers.num_workers or workers.cpus_per_worker, or set workers.use_gpu=false"
        )
    if (free_cpus := cluster.num_cpus - size * cpus) < recipe.data.cpus_per_task:
        raise ValueError(
            f"{size} workers with workers.cpus_per_worker={cpus:g} leave {free_cpus:g} of "
            f"{cluster.num_cpus:g} CPUs for reading data, which needs "
            f"data.cpus_per_task={recipe.data.cpus_per_task:g} ({cluster}); use fewer workers, or "
            "fewer CPUs for each"
        )


def paths_of(recipe: Recipe, *, trains: bool = True) -> list[tuple[str, str]]:
    """Key and path of what a run reads.

    Args:
        trains: False for an evaluation.
    """
    data, evaluate = recipe.data, recipe.evaluate
    reads_train = trains or (data.eval is None and data.held_out_fraction)
    paths = {
        "data.train": data.train if reads_train else None,
        "data.eval": data.eval,
        "evaluate.few_shot_train": evaluate.few_shot_train,
        "evaluate.few_shot_test": evaluate.few_shot_test,
        "init_from": recipe.init_from,
    }
    return [(key, path) for key, path in paths.items() if path is not None]


def check_shared(cluster: ClusterShape, read: Iterable[tuple[str, str]]) -> None:
    """Check that all nodes that are up see the local files of this machine.

    Only files that are read are checked: workers themselves check that they see the lock.

    Args:
        read: key and path of each data set, file and folder that is read.

    Raises:
        ValueError: some nodes do not see them; names these nodes.
    """
    if len(cluster.nodes) < 2:
        return
    nodes = {node["NodeID"]: node for node in cluster.nodes if node["Resources"].get("CPU", 0)}
    nodes.pop(ray.get_runtime_context().get_node_id(), None)
    local = [(key, path) for key, path in read if "://" not in path or path.startswith("file://")]
    names = {locate(path).path: f"{key}={path}" for key, path in local}
    names = {path: name for path, name in names.items() if os.path.exists(path)}
    missing = unseen_by(nodes, list(names)) if names and nodes else {}
    if not missing:
        return
    hosts = sorted(
        f"{nodes[node]['NodeManagerHostname']} ({nodes[node]['NodeManagerAddress']})"
        for node in missing
    )
    unseen = sorted({names[path] for paths in missing.values() for path in paths})
    raise ValueError(
        "nodes of the cluster do not see the files of this machine "
        f"({platform.node()}): {', '.join(unseen)}: not on {', '.join(hosts)}; give folders that "
        "all nodes share (NFS, Lustre) or s3:// addresses"
    )


def unseen_by(nodes: Collection[str], paths: Collection[str]) -> dict[str, list[str]]:
    """The paths that a node does not see, by the node's id; only for nodes that lack some.

    Returns within `_ANSWER_LIMIT_S`.
    """

    def unseen() -> list[str]:  # sent as code: the node needs no import of this package
        return [path for path in paths if not os.path.exists(path)]

    task: Any = ray.remote(num_cpus=0, max_retries=0)(unseen)
    node_of = {
        task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(): node
        for node in nodes
    }
    answered, _ = ray.wait(
        [*node_of], num_returns=len(node_of), timeout=_ANSWER_LIMIT_S, fetch_local=True
    )
    unseen_paths = {}
    for reference in answered:
        with contextlib.suppress(ray.exceptions.RayError):  # the node has gone
            if missing := ray.get(reference, timeout=_ANSWER_LIMIT_S):
                unseen_paths[node_of[reference]] = missing
    return unseen_paths
