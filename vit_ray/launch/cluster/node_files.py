"""Asks the nodes of the cluster whether they see files of this machine.

Nodes import this module only, so that a new process there answers within about a second.
"""

import os
import time
from collections.abc import Collection
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


def unseen(paths: Collection[str], patience_s: float) -> set[str]:
    """The paths that this node does not see; called on the node."""
    deadline_s = time.monotonic() + patience_s
    while missing := {path for path in paths if not os.path.exists(path)}:
        if time.monotonic() > deadline_s:
            return missing
        time.sleep(_POLL_S)
    return set()


def unseen_by(nodes: Collection[str], paths: Collection[str]) -> dict[str, set[str]]:
    """The paths that each node does not see, by the node's id; none of one that does not answer."""
    task: Any = ray.remote(num_cpus=0, max_retries=0)(unseen)
    asked = {}
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        asked[node] = task.options(scheduling_strategy=there).remote(paths, SHOWN_S)
    answered, _ = ray.wait(
        [*asked.values()], num_returns=len(asked), timeout=ANSWER_LIMIT_S, fetch_local=True
    )
    found = {}
    for node, reference in asked.items():
        if reference not in answered:
            ray.cancel(reference)
            continue
        try:
            found[node] = ray.get(reference, timeout=ANSWER_LIMIT_S)
        except ray.exceptions.RayError:  # the node has gone
            found[node] = set()
    return found
