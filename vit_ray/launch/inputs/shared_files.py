"""Whether the nodes of the cluster see the local files of a run, before anything is written."""

import contextlib
import os
import platform
from collections.abc import Collection, Iterable
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vit_ray.config import Recipe
from vit_ray.launch.connection import ClusterShape
from vit_ray.storage import locate

ANSWER_LIMIT_S: Final = 20.0
"""A node that has not answered by then, such as one that is still unpacking the job's environment,
is taken for one that sees everything: its workers look again when they start."""
_NAMED: Final = 8
"""Most nodes that an error names."""


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
