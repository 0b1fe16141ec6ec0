"""Checks of a recipe's worker counts: the batch divides among them, and the cluster has room."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vit_ray.config import Recipe
from vit_ray.training.steps import micro_batch_size

if TYPE_CHECKING:  # importing Ray takes seconds, and opening data sets does not need it
    from vit_ray.launch.connection import ClusterShape


def check_batch(recipe: Recipe, num_images: int) -> None:
    """Check that the global batch divides among the workers for every allowed count, and that the
    data fill it.

    Raises:
        ValueError: it does not; with the arithmetic and the nearest valid value.
    """
    batch = recipe.train.global_batch_size
    for world_size in recipe.group_sizes:
        micro_batch_size(recipe, world_size)
    if num_images < batch:
        raise ValueError(
            f"train.global_batch_size={batch} is more than the {num_images} training images; "
            f"use at most {num_images}"
        )


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
