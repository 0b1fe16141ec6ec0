"""Checks of a recipe's worker counts: the batch divides among them, and the cluster has room."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vit_ray.config import Recipe
from vit_ray.train.memory.micro_batch import micro_batch_size

if TYPE_CHECKING:  # importing Ray takes seconds, and opening data sets does not need it
    from vit_ray.launch.cluster.connection import ClusterShape


def check_batch(recipe: Recipe, num_images: int) -> None:
    """Check that the global batch divides among the workers for every allowed count, and that the
    data fill it.

    Raises:
        ValueError: it does not; with the arithmetic and the nearest valid value.
    """
    batch = recipe.train.global_batch_size
    recipe.check_shares()
    for world_size in recipe.group_sizes:
        micro_batch_size(recipe, world_size)
    if num_images < batch:
        raise ValueError(
            f"train.global_batch_size={batch} is more than the {num_images} training images; "
            f"use at most {num_images}"
        )


def check_cluster(recipe: Recipe, cluster: ClusterShape) -> bool:
    """Check that the cluster can hold the workers and still feed them; returns whether workers get
    GPUs.

    A cluster that may grow to it is enough: the worker group requests the nodes and waits for them.

    Raises:
        ValueError: the recipe asks for more GPUs or CPUs than there are or may be, on nodes with
            its labels; or it is not known whether there may be GPUs.
    """
    workers, least = recipe.workers, recipe.group_sizes[0]
    reading = _matching("data", recipe.data.label_selector, cluster)
    cluster = _matching("workers", workers.label_selector, cluster)
    both = cluster.matching(recipe.data.label_selector)
    use_gpu = workers.use_gpu
    if use_gpu == "auto":
        if cluster.num_gpus == 0 and math.isinf(cluster.most_gpus):
            raise ValueError(
                "workers.use_gpu=auto: no node with a GPU is up, and whether the cluster's "
                "autoscaler may start one is not known here; set workers.use_gpu=true, or false "
                "to train on CPUs"
            )
        use_gpu = cluster.most_gpus > 0
    if use_gpu and cluster.most_gpus < least:
        fewer = f"lower workers.num_workers to at most {cluster.most_gpus:g}, or "
        raise ValueError(
            f"workers.num_workers={workers.num_workers} with a GPU each needs {least} GPUs; the "
            f"cluster has {cluster.most_gpus:g} ({cluster}); "
            f"{fewer if cluster.most_gpus >= 1 else 'start nodes with GPUs, or '}"
            "set workers.use_gpu=false"
        )
    needed = least * workers.cpus_per_worker
    left = most = reading.most_cpus
    if not math.isinf(most):  # workers first take the nodes that do not read
        left -= max(0.0, needed - (cluster.most_cpus - both.most_cpus))
    if left < recipe.data.cpus_per_task:
        fit = int((needed + left - recipe.data.cpus_per_task) // workers.cpus_per_worker)
        raise ValueError(
            f"{least} workers with workers.cpus_per_worker={workers.cpus_per_worker:g} leave "
            f"{max(left, 0):g} of {most:g} CPUs for reading data, which "
            f"needs data.cpus_per_task={recipe.data.cpus_per_task:g} ({reading}); use at most "
            f"{max(fit, 0)} workers, or fewer CPUs for each"
        )
    each = {"CPU": workers.cpus_per_worker, **({"GPU": 1.0} if use_gpu else {})}
    now = {"CPU": cluster.num_cpus, "GPU": cluster.num_gpus}
    has_room = min(now[key] / need for key, need in each.items())
    may_hold = max(has_room, cluster.growth.holds(each) if cluster.growth else 0)
    if may_hold < least:
        held = " and ".join(f"{count:g} {key}" for key, count in each.items())
        raise ValueError(
            f"workers.num_workers={workers.num_workers} with {held} each: the nodes that are up or "
            f"may be started hold at most {int(may_hold)} ({cluster}); raise max_workers of a node "
            "type, or lower workers.num_workers or workers.cpus_per_worker"
        )
    return use_gpu


def _matching(section: str, selector: Mapping[str, str], cluster: ClusterShape) -> ClusterShape:
    """The part of the cluster whose nodes have the labels.

    Raises:
        ValueError: there is no such node, and none may be started.
    """
    found = cluster.matching(selector)
    if not selector or found.most_cpus:
        return found
    there = sorted({f"{k}={v}" for n in cluster.nodes for k, v in n["Labels"].items()
                    if k != "ray.io/node-id"})  # fmt: skip
    raise ValueError(
        f"{section}.label_selector={json.dumps(dict(selector))}: no node with CPUs has these "
        "labels, and none with them may be started; the labels there are: "
        f"{', '.join(there) or 'no labels'} ({cluster}); change {section}.label_selector, or start "
        "nodes with these labels: by `ray start --labels`, or by `labels` in the definition of the "
        "node type, where an autoscaler looks for them"
    )
