"""Asks the nodes of the cluster whether they see files of this machine.

Nodes import this module only, so that a new process there answers within about a second.
"""

import contextlib
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

ANSWER_LIMIT_S: Final = 20.0
"""A node that has not answered by then, such as one that is still unpacking the job's environment,
is taken for one that sees everything: its workers look again when they start."""
SHOWN_S: Final = 10.0
"""How late a new file may appear on a node that shares the disk, as for workers in `lock.SHOWN_S`:
a run whose workers would see its files is not refused."""
_POLL_S: Final = 0.2
Sizes = Mapping[str, int | None]
"""Bytes of files by their paths; None for a folder."""


@dataclass(frozen=True)
class Needed:
    """Files that some nodes need."""

    name: str
    """The key and what the recipe gives for it, as errors name them."""
    sizes: Sizes
    nodes: Collection[str]
    """Ids of the nodes."""


def unseen(sizes: Sizes, patience_s: float) -> set[str]:
    """The paths where this node has no such file or folder; called on the node."""
    deadline_s = time.monotonic() + patience_s
    while missing := {path for path, size in sizes.items() if not _is_there(path, size)}:
        if time.monotonic() > deadline_s:
            return missing
        time.sleep(_POLL_S)
    return set()


def _is_there(path: str, size: int | None) -> bool:
    if size is None:
        return os.path.isdir(path)
    if not os.path.isfile(path):
        return False
    try:  # opening makes NFS ask the server; what it has cached may be a minute old
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_size == size
    except OSError:
        return False


def nodes_without(needed: Sequence[Needed]) -> list[set[str]]:
    """Ids of the nodes that do not see what they need, for each of `needed`; all are asked at once.

    A node that does not answer, or fails, is not among them.
    """
    sizes_of: dict[str, dict[str, int | None]] = {}
    for one in needed:
        for node in one.nodes:
            sizes_of.setdefault(node, {}).update(one.sizes)
    task: Any = ray.remote(num_cpus=0, max_retries=0)(unseen)
    asked = {}
    for node, sizes in sizes_of.items():
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        asked[node] = task.options(scheduling_strategy=there).remote(sizes, SHOWN_S)
    missing: dict[str, set[str]] = {}
    deadline_s = time.monotonic() + ANSWER_LIMIT_S
    for node, reference in asked.items():
        try:
            left_s = max(0.0, deadline_s - time.monotonic())
            missing[node] = ray.get(reference, timeout=left_s)
        except ray.exceptions.RayError:  # a time-out among them
            with contextlib.suppress(ray.exceptions.RayError):
                ray.cancel(reference)
    return [
        {node for node in one.nodes if missing.get(node, set()) & one.sizes.keys()}
        for one in needed
    ]
