"""How many trainings run at a time: what each takes, and what the cluster has and may become."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

from vit_ray.config import Recipe
from vit_ray.launch.cluster.connection import shape


@dataclass(frozen=True)
class Room:
    """What a training takes of the cluster, or what the cluster has."""

    gpus: float
    cpus: float
    runs: float = math.inf
    """Of a cluster: trainings at a time."""

    def holds(self, need: Room, taken: Iterable[Room]) -> bool:
        """Whether a training has room among those that run; one alone always has it."""
        whole = [need, *taken]
        return len(whole) == 1 or (
            sum(one.gpus for one in whole) <= self.gpus + 1e-6
            and sum(one.cpus for one in whole) <= self.cpus + 1e-6
            and len(whole) <= self.runs
        )


def room_of(recipe: Recipe, cluster: Room) -> Room:
    """What a training takes: its workers, at least, and one task that reads their data."""
    workers, size = recipe.workers, recipe.group_sizes[0]
    uses_gpus = cluster.gpus > 0 if workers.use_gpu == "auto" else workers.use_gpu
    cpus = size * workers.cpus_per_worker + recipe.data.cpus_per_task
    return Room(float(size) if uses_gpus else 0.0, cpus)


def cluster_room(max_runs: int | None = None, max_gpus: int | None = None) -> Room:
    """What trainings may take together, of the cluster as it is now or may become.

    Where it is not known what it may become, that is what is up, or as many GPUs as the recipe
    allows: a limit of trainings alone does not say that there are places for them.

    Args:
        max_runs, max_gpus: the recipe's limits; None: there is none.
    """
    now = shape(time.time())
    gpus, cpus = now.most_gpus, now.most_cpus
    if max_gpus is None:
        gpus = now.num_gpus if math.isinf(gpus) else gpus
        cpus = now.num_cpus if math.isinf(cpus) else cpus
    return Room(min(gpus, max_gpus or math.inf), cpus, max_runs or math.inf)
