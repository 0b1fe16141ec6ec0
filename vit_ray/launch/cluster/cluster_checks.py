"""Checks of a recipe's worker groups: the batch divides among them, and the cluster holds them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vit_ray.config import Recipe
from vit_ray.train.memory.micro_batch import micro_batch_size

if TYPE_CHECKING:  # Ray takes seconds, and who only opens data sets needs none
    from vit_ray.launch.cluster.connection import ClusterShape


def check_batch(recipe: Recipe, num_images: int) -> None:
    """The global batch divides among the workers of every allowed group size, and the data fill it.

    Raises:
        ValueError: with the arithmetic and the nearest valid value.
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
    """The cluster can hold the workers and still feed them; returns whether workers get GPUs.

    It can where it may grow to it: the group then asks for its nodes, and waits for them.

    Raises:
        ValueError: more GPUs or CPUs are asked for than there are or may be, on nodes with the
            labels that the recipe asks for; or whether there may be GPUs is not known.
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
        raise ValueError(
            f"workers.num_workers={workers.num_workers} with a GPU each needs {least} GPUs; the "
            f"cluster has {cluster.most_gpus:g} ({cluster}). Lower workers.num_workers to at most "
            f"{cluster.most_gpus:g}, or set workers.use_gpu=false"
        )
    needed = least * workers.cpus_per_worker
    left = most = reading.most_cpus
    if not math.isinf(most):  # workers first take the nodes that do not read
        left -= max(0.0, needed - (cluster.most_cpus - both.most_cpus))
    if left < recipe.data.cpus_per_task:
        fit = int((needed + left - recipe.data.cpus_per_task) // workers.cpus_per_worker)
        raise ValueError(
            f"{least} workers with workers.cpus_per_worker={workers.cpus_per_worker:g} leave "
            f"{left:g} of {most:g} CPUs for reading data, which "
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
            f"workers.num_workers={workers.num_workers} with {held} each find room for "
            f"{int(may_hold)} on the nodes that there are or that the cluster may start "
            f"({cluster}). Raise max_workers of a node type, or lower workers.num_workers or "
            "workers.cpus_per_worker"
        )
    return use_gpu


def _matching(section: str, selector: Mapping[str, str], cluster: ClusterShape) -> ClusterShape:
    """The part of the cluster whose nodes have the labels.

    Raises:
        ValueError: there is none, and none may come.
    """
    found = cluster.matching(selector)
    if not selector or found.most_cpus:
        return found
    there = sorted({f"{k}={v}" for n in cluster.nodes for k, v in n["Labels"].items()
                    if k != "ray.io/node-id"})  # fmt: skip
    raise ValueError(
        f"{section}.label_selector={json.dumps(dict(selector))}: no node with CPUs has these "
        f"labels, and none that has them may be started; there are "
        f"{', '.join(there) or 'no labels'} ({cluster}). Change {section}.label_selector, or start "
        "nodes with these labels: by `ray start --labels`, or by `labels` in the definition of the "
        "node type, which is all that its autoscaler knows of nodes that are not up"
    )
