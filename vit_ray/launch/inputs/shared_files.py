"""Whether the nodes of the cluster see the local files of a run, before anything is written."""

import os
import platform
from collections.abc import Iterable
from typing import Final

import ray

from vit_ray.config import Recipe
from vit_ray.launch.cluster.connection import ClusterShape
from vit_ray.launch.cluster.node_files import unseen_by
from vit_ray.storage import locate

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
    names = {locate(path).path: f"{key}={path}" for key, path in read if _is_here(path)}
    missing = unseen_by(nodes, list(names)) if names and nodes else {}
    lacking = {node: paths for node, paths in missing.items() if paths}
    if not lacking:
        return
    hosts = sorted(
        f"{nodes[node]['NodeManagerHostname']} ({nodes[node]['NodeManagerAddress']})"
        for node in lacking
    )
    if len(hosts) > _NAMED:
        hosts = [*hosts[:_NAMED], f"{len(hosts) - _NAMED} more"]
    unseen = [name for path, name in names.items() if any(path in one for one in lacking.values())]
    raise ValueError(
        "nodes of the cluster do not see the files of this machine "
        f"({platform.node()}): {', '.join(unseen)}: not on {', '.join(hosts)}; give folders that "
        "all nodes share (NFS, Lustre) or s3:// addresses"
    )


def _is_here(path: str) -> bool:
    place = locate(path) if path.startswith("file://") or "://" not in path else None
    return place is not None and os.path.exists(place.path)
