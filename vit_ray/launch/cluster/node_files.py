"""Asks the nodes of the cluster whether they see files of this machine.

Nodes import this module only, so that a new process there answers within about a second.
"""

import contextlib
import os
from collections.abc import Collection
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

ANSWER_LIMIT_S: Final = 20.0
"""A node that has not answered by then, such as one that is still unpacking the job's environment,
is taken for one that sees everything: its workers look again when they start."""


def unseen(paths: Collection[str]) -> set[str]:
    """The paths that this node does not see; called on the node."""
    return {path for path in paths if not os.path.exists(path)}


def unseen_by(nodes: Collection[str], paths: Collection[str]) -> dict[str, set[str]]:
    """The paths that a node does not see, by the node's id; only of nodes that answer."""
    task: Any = ray.remote(num_cpus=0, max_retries=0)(unseen)
    asked = {}
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        asked[task.options(scheduling_strategy=there).remote(paths)] = node
    answered, late = ray.wait(
        [*asked], num_returns=len(asked), timeout=ANSWER_LIMIT_S, fetch_local=True
    )
    for reference in late:
        ray.cancel(reference)
    found = {}
    for reference in answered:
        with contextlib.suppress(ray.exceptions.RayError):  # the node has gone
            found[asked[reference]] = ray.get(reference, timeout=ANSWER_LIMIT_S)
    return found
