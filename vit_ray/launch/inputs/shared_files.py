"""Whether the nodes of the cluster see the local folders of a run, before anything is written."""

import contextlib
import os
import platform
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import ray

from vit_ray.config import Recipe
from vit_ray.config.training_sections import WorkersConfig
from vit_ray.data import open_dataset
from vit_ray.data.format.schema import MANIFEST_FILE
from vit_ray.launch.cluster.connection import ClusterShape
from vit_ray.launch.cluster.node_files import Needed, Sizes, nodes_without
from vit_ray.storage import locate

_NAMED: Final = 8
"""Most nodes that an error names."""


def check_shared(
    cluster: ClusterShape,
    recipes: Sequence[Recipe],
    written: tuple[str, str] | None,
    *,
    trains: bool = True,
) -> None:
    """Check that the nodes that are up see the local files that their workers and reading tasks
    need; nothing is asked on a cluster of one node.

    Args:
        recipes: of all trainings, with absolute paths.
        written: key and folder of what workers write; None for nothing.
        trains: not only evaluates.

    Raises:
        ValueError: nodes do not see them, or see other files there; with these nodes.
    """

    def needed() -> list[Needed]:
        return needed_files(cluster, recipes, trains=trains)

    workers = {node for one in recipes for node in _worker_nodes(cluster, one.workers)}
    by_label = (
        ", or use only the nodes that have them (workers.label_selector, data.label_selector)"
    )
    _check(cluster, needed, written, workers, by_label)


def check_shared_by_tasks(
    cluster: ClusterShape,
    read: Iterable[tuple[str, str]],
    written: tuple[str, str] | None = None,
    num_cpus: float = 1.0,
) -> None:
    """As `check_shared`, for a command whose tasks may run on any node.

    Args:
        read: key and path of each data set, file and folder that tasks read.
        written: key and path of the folder that tasks write.
        num_cpus: of a task.
    """
    nodes = _with_resources(cluster, {}, {"CPU": num_cpus})

    def needed() -> list[Needed]:
        found = [Needed(f"{key}={path}", _files_of(path), nodes) for key, path in read]
        return [one for one in found if one.sizes]

    _check(cluster, needed, written, nodes)


def _check(
    cluster: ClusterShape,
    needed_here: Callable[[], list[Needed]],
    written: tuple[str, str] | None,
    writers: set[str],
    remedy: str = "",
) -> None:
    """Ask all nodes but this one for what they need, and whether they see a new file.

    Args:
        remedy: next to shared folders, for the error.

    Raises:
        ValueError: as `check_shared`.
    """
    is_outside = ray.util.client.ray.is_connected()  # type: ignore[no-untyped-call]
    if cluster.is_private or (len(cluster.nodes) < 2 and not is_outside):
        return
    nodes = {node["NodeID"]: node for node in cluster.nodes}
    if not is_outside:
        nodes.pop(ray.get_runtime_context().get_node_id(), None)
    needed = needed_here()
    with _marked(written[1] if written else None) as marker:
        if written and marker:
            needed.insert(0, Needed("=".join(written), {marker: 0}, writers))
        needed = [replace(one, nodes=nodes.keys() & one.nodes) for one in needed]
        lacking = nodes_without(needed)
    if any(lacking):
        raise ValueError(
            "nodes of the cluster do not see the files of this machine "
            f"({platform.node()}): {_described(needed, lacking, nodes)}; give folders that all "
            f"nodes share (NFS, Lustre) or s3:// addresses{remedy}"
        )


def needed_files(
    cluster: ClusterShape, recipes: Sequence[Recipe], *, trains: bool = True
) -> list[Needed]:
    """The local files of this machine that nodes need, and which nodes, for each key and path.

    Args:
        recipes, trains: as for `check_shared`.
    """
    found: dict[str, Needed] = {}
    files_of = cache(_files_of)

    def add(key: str, path: str | None, sizes: Sizes, nodes: set[str]) -> None:
        name = f"{key}={path}"
        before = found[name].nodes if name in found else ()
        found[name] = Needed(name, sizes, nodes.union(before))

    for recipe in recipes:
        data, evaluate = recipe.data, recipe.evaluate
        readers = _with_resources(cluster, data.label_selector, {"CPU": data.cpus_per_task})
        sets = [("data.eval", path) for path in filter(None, [data.eval])]
        if trains or (not sets and data.held_out_fraction):
            sets = [("data.train", path) for path in filter(None, [data.train])] + sets
        if evaluate.few_shot_train is not None and evaluate.few_shot_test is not None:
            sets.append(("evaluate.few_shot_train", evaluate.few_shot_train))
            sets.append(("evaluate.few_shot_test", evaluate.few_shot_test))
        workers = _worker_nodes(cluster, recipe.workers)
        for key, path in sets:
            is_pool = key == "evaluate.few_shot_train"  # a worker reads its labels
            add(key, path, files_of(path), readers | workers if is_pool else readers)
        if recipe.init_from is not None:
            add("init_from", recipe.init_from, files_of(recipe.init_from), workers)
    return [one for one in found.values() if one.sizes]


def _files_of(path: str) -> Sizes:
    """A local file or folder; of a data set the files by which it is known: its manifest, unless
    its shards are in another folder, and the first and the last shard.
    """
    if not path.startswith("file://") and "://" in path:
        return {}
    here = locate(path).path
    if not os.path.isfile(manifest_file := f"{here}/{MANIFEST_FILE}"):
        if not os.path.exists(here):
            return {}
        return {here: os.path.getsize(here) if os.path.isfile(here) else None}
    manifest = open_dataset(path)
    root, files = locate(manifest.root), [manifest.files[0], manifest.files[-1]]
    places = [root.child(file.path) for file in files]
    places += [locate(file.images.path) for file in files if file.images]
    found = [place.path for place in places if place.is_local]
    if root == locate(path):
        found.append(manifest_file)
    return {file: os.path.getsize(file) for file in found if os.path.isfile(file)}


def _worker_nodes(cluster: ClusterShape, workers: WorkersConfig) -> set[str]:
    """Nodes on which a worker may be placed."""
    has_gpus = cluster.matching(workers.label_selector).num_gpus > 0
    each = {"CPU": workers.cpus_per_worker}
    if workers.use_gpu is True or (workers.use_gpu == "auto" and has_gpus):
        each["GPU"] = 1.0
    return _with_resources(cluster, workers.label_selector, each)


def _with_resources(
    cluster: ClusterShape, selector: Mapping[str, str], each: Mapping[str, float]
) -> set[str]:
    return {
        node["NodeID"]
        for node in cluster.matching(selector).nodes
        if all(node["Resources"].get(key, 0.0) >= need for key, need in each.items())
    }


@contextlib.contextmanager
def _marked(folder: str | None) -> Iterator[str | None]:
    """Path of a new empty file in a local folder, or in the nearest folder above it that exists.

    None if it cannot be made: the run says so when it makes the folder.
    """
    marker = None
    if folder is not None and (place := locate(folder)).is_local:
        path = Path(place.path)
        with contextlib.suppress(OSError):
            there = next(one for one in (path, *path.parents) if one.is_dir())
            made = there / f".vit_ray-{uuid.uuid4().hex}"
            made.touch(exist_ok=False)
            marker = made
    try:
        yield None if marker is None else str(marker)
    finally:
        if marker is not None:
            marker.unlink(missing_ok=True)


def _described(
    needed: Sequence[Needed], lacking: Sequence[set[str]], nodes: Mapping[str, Mapping[str, Any]]
) -> str:
    """What is lacking on which nodes."""
    names: dict[frozenset[str], list[str]] = {}
    for one, missing in zip(needed, lacking, strict=True):
        if missing:
            names.setdefault(frozenset(missing), []).append(one.name)
    parts = []
    for lacking_nodes, things in names.items():
        hosts = sorted(
            f"{nodes[node]['NodeManagerHostname']} ({nodes[node]['NodeManagerAddress']})"
            for node in lacking_nodes
        )
        if len(hosts) > _NAMED:
            hosts = [*hosts[:_NAMED], f"{len(hosts) - _NAMED} more"]
        parts.append(f"{', '.join(things)}: not on {', '.join(hosts)}")
    return "; ".join(parts)
