"""Checks of a run against the cluster: it has room for the workers, and its nodes see the files."""

import contextlib
import json
import os
import platform
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vit_ray.config import Recipe
from vit_ray.launch.connection import ClusterShape
from vit_ray.storage import locate

ANSWER_LIMIT_S: Final = 20.0
"""A node that has not answered by then, such as one that is still unpacking the job's environment,
is taken for one that sees everything: its workers look again when they start."""
# Most nodes that an error names.
_NAMED: Final = 8


def check_cluster(recipe: Recipe, cluster: ClusterShape) -> bool:
    """Check that a run may start on the cluster; returns whether its workers get GPUs.

    A cluster that others run may grow: there the worker group waits for its place. One that this
    command has started stays as it is.

    Raises:
        ValueError: as `check_room` for a cluster of this command's own; or nothing shows whether
            the workers of a cluster that is still empty get GPUs.
    """
    if cluster.is_private:
        return check_room(recipe, cluster)
    workers = recipe.workers
    if workers.use_gpu != "auto":
        return workers.use_gpu
    found = cluster.matching(workers.label_selector)
    if not found.num_cpus and not found.num_gpus:
        raise ValueError(
            "workers.use_gpu=auto: no node that can hold workers is up, and whether those that "
            f"come will have GPUs is not known ({found}); set workers.use_gpu=true, or false to "
            "train on CPUs"
        )
    return found.num_gpus > 0


def check_room(recipe: Recipe, cluster: ClusterShape) -> bool:
    """Check that the cluster as it is can hold the workers and still feed them; returns whether
    workers get GPUs.

    Raises:
        ValueError: the recipe asks for more GPUs or CPUs than there are on nodes with its labels.
    """
    workers, least = recipe.workers, recipe.group_sizes[0]
    reading = _matching("data", recipe.data.label_selector, cluster)
    cluster = _matching("workers", workers.label_selector, cluster)
    both = cluster.matching(recipe.data.label_selector)
    use_gpu = cluster.num_gpus > 0 if workers.use_gpu == "auto" else workers.use_gpu
    if use_gpu and cluster.num_gpus < least:
        fewer = f"lower workers.num_workers to at most {cluster.num_gpus:g}, or "
        raise ValueError(
            f"workers.num_workers={workers.num_workers} with a GPU each needs {least} GPUs; the "
            f"cluster has {cluster.num_gpus:g} ({cluster}); "
            f"{fewer if cluster.num_gpus >= 1 else 'start nodes with GPUs, or '}"
            "set workers.use_gpu=false"
        )
    needed = least * workers.cpus_per_worker
    # Workers first take the nodes that do not read.
    left = reading.num_cpus - max(0.0, needed - (cluster.num_cpus - both.num_cpus))
    if left < recipe.data.cpus_per_task:
        fit = int((needed + left - recipe.data.cpus_per_task) // workers.cpus_per_worker)
        raise ValueError(
            f"{least} workers with workers.cpus_per_worker={workers.cpus_per_worker:g} leave "
            f"{max(left, 0):g} of {reading.num_cpus:g} CPUs for reading data, which "
            f"needs data.cpus_per_task={recipe.data.cpus_per_task:g} ({reading}); use at most "
            f"{max(fit, 0)} workers, or fewer CPUs for each"
        )
    each = {"CPU": workers.cpus_per_worker, **({"GPU": 1.0} if use_gpu else {})}
    now = {"CPU": cluster.num_cpus, "GPU": cluster.num_gpus}
    has_room = min(now[key] / need for key, need in each.items())
    if has_room < least:
        held = " and ".join(f"{count:g} {key}" for key, count in each.items())
        raise ValueError(
            f"workers.num_workers={workers.num_workers} with {held} each: the nodes that are up "
            f"hold at most {int(has_room)} ({cluster}); lower workers.num_workers or "
            "workers.cpus_per_worker"
        )
    return use_gpu


def _matching(section: str, selector: Mapping[str, str], cluster: ClusterShape) -> ClusterShape:
    """The part of the cluster whose nodes have the labels.

    Raises:
        ValueError: there is no such node.
    """
    found = cluster.matching(selector)
    if not selector or found.num_cpus:
        return found
    there = sorted({f"{k}={v}" for n in cluster.nodes for k, v in n["Labels"].items()
                    if k != "ray.io/node-id"})  # fmt: skip
    raise ValueError(
        f"{section}.label_selector={json.dumps(dict(selector))}: no node with CPUs has these "
        f"labels; the labels there are: {', '.join(there) or 'no labels'} ({cluster}); change "
        f"{section}.label_selector, or start nodes with these labels by `ray start --labels`"
    )


def paths_of(recipe: Recipe, *, trains: bool = True) -> list[tuple[str, str]]:
    """Key and path of what a run reads.

    Args:
        trains: not only evaluates.
    """
    data, evaluate = recipe.data, recipe.evaluate
    reads_train = trains or (data.eval is None and data.held_out_fraction)
    found = {
        "data.train": data.train if reads_train else None,
        "data.eval": data.eval,
        "evaluate.few_shot_train": evaluate.few_shot_train,
        "evaluate.few_shot_test": evaluate.few_shot_test,
        "init_from": recipe.init_from,
    }
    return [(key, path) for key, path in found.items() if path is not None]


def check_shared(cluster: ClusterShape, read: Iterable[tuple[str, str]]) -> None:
    """Check that the nodes that are up see the local files of this machine; nothing is asked on a
    cluster of one node. What is written is seen by those that write: workers look for the lock.

    Args:
        read: key and path of each data set, file and folder that is read.

    Raises:
        ValueError: nodes do not see them; with these nodes.
    """
    if cluster.is_private or len(cluster.nodes) < 2:
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
    if len(hosts) > _NAMED:
        hosts = [*hosts[:_NAMED], f"{len(hosts) - _NAMED} more"]
    unseen = [name for path, name in names.items() if any(path in one for one in missing.values())]
    raise ValueError(
        "nodes of the cluster do not see the files of this machine "
        f"({platform.node()}): {', '.join(unseen)}: not on {', '.join(hosts)}; give folders that "
        "all nodes share (NFS, Lustre) or s3:// addresses"
    )


def unseen_by(nodes: Collection[str], paths: Collection[str]) -> dict[str, list[str]]:
    """The paths that a node does not see, by the node's id; only of nodes that lack some.

    Returns within `ANSWER_LIMIT_S`.
    """

    def unseen() -> list[str]:  # sent as code: a node imports nothing of ours for it
        return [path for path in paths if not os.path.exists(path)]

    task: Any = ray.remote(num_cpus=0, max_retries=0)(unseen)
    asked = {}
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        asked[task.options(scheduling_strategy=there).remote()] = node
    answered, late = ray.wait(
        [*asked], num_returns=len(asked), timeout=ANSWER_LIMIT_S, fetch_local=True
    )
    for reference in late:
        ray.cancel(reference)
    found = {}
    for reference in answered:
        with contextlib.suppress(ray.exceptions.RayError):  # the node has gone
            if missing := ray.get(reference, timeout=ANSWER_LIMIT_S):
                found[asked[reference]] = missing
    return found
