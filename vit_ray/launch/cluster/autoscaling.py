"""What a cluster may grow to: the nodes that its autoscaler may start.

Ray 2.60 has no call for it: `get_cluster_config` is for managed clusters. The autoscaler of `ray
up` and `ray start --autoscaling-config` runs on the head, like a submitted job's driver, and its
configuration file is in its command line. KubeRay's autoscaler is in a separate container: we can
see that it exists, but not what it may start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import yaml

from vit_ray.ray_internals import has_second_autoscaler, node_labels_match_selector

_PROCESSES: Final = Path("/proc")
_OPTION: Final = "--autoscaling-config="
_CLUSTER: Final = "--gcs-address="


@dataclass(frozen=True)
class NodeType:
    """A type of node that may be started."""

    name: str
    most: int
    """Most nodes of this type at a time."""
    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        held = ", ".join(f"{count:g} {key}" for key, count in self.resources.items())
        return f"{self.most} of {self.name} ({held or 'nothing'} each)"


@dataclass(frozen=True)
class Growth:
    """What an autoscaler may start."""

    types: tuple[NodeType, ...] | None
    """None: there is an autoscaler, but what it may start is not known here."""
    most_nodes: float = math.inf
    """Most nodes of all types together."""
    head: Mapping[str, float] = field(default_factory=dict)
    """Resources of the head, which is up and is not counted as a node."""

    def matching(self, selector: Mapping[str, str], *, has_head: bool) -> Growth:
        """The nodes with these labels that the autoscaler may start.

        It knows only the labels in a node type's definition, not those that a node finds once it is
        up, such as `ray.io/accelerator-type`.

        Args:
            has_head: whether the head has the labels.
        """
        asked = dict(selector)
        types = self.types and tuple(
            each for each in self.types if node_labels_match_selector(dict(each.labels), asked)
        )
        return replace(self, types=types, head=self.head if has_head else {})

    def total(self, key: str) -> float:
        """The most of a resource that there can be; infinite if unknown."""
        return self._most(lambda resources: resources.get(key, 0.0))

    def holds(self, each: Mapping[str, float]) -> float:
        """Workers that can be placed at the same time; infinite if unknown."""
        return self._most(
            lambda resources: math.floor(
                min(resources.get(key, 0.0) / need for key, need in each.items() if need)
            )
        )

    def _most(self, of_node: Callable[[Mapping[str, float]], float]) -> float:
        """The sum over the head and the largest nodes."""
        if self.types is None:
            return math.inf
        nodes = sorted(
            (of_node(each.resources) for each in self.types for _ in range(each.most)),
            reverse=True,
        )
        return of_node(self.head) + sum(nodes[: int(min(self.most_nodes, len(nodes)))])

    def __str__(self) -> str:
        if self.types is None:
            return "the node types of its autoscaler are not known here"
        limit = "" if math.isinf(self.most_nodes) else f", {self.most_nodes:g} nodes in total"
        return f"it may start {', '.join(map(str, self.types)) or 'nothing'}{limit}"


def find_growth(address: str, head: Mapping[str, float]) -> Growth | None:
    """Of the connected cluster; None if it cannot grow.

    The autoscaler's configuration is read if it runs on this host.

    Args:
        address: of the cluster's head, `HOST:PORT`; another Ray may run on this host.
        head: resources of the head.
    """
    for process in _PROCESSES.glob("[0-9]*/cmdline"):
        try:
            words = process.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # the process has ended, or belongs to another user
            continue
        if f"{_CLUSTER}{address}" in words and any(w.endswith("monitor.py") for w in words):
            for word in words:
                file = Path(word.removeprefix(_OPTION))
                if word.startswith(_OPTION) and file.is_file():
                    return replace(growth_of(yaml.safe_load(file.read_text())), head=head)
    return Growth(None) if has_second_autoscaler() else None


def growth_of(config: Mapping[str, Any]) -> Growth:
    """From a configuration for `ray up`; its head is already up and no second one is started."""
    most_nodes = config.get("max_workers", math.inf)
    head = config.get("head_node_type")
    return Growth(
        tuple(
            NodeType(
                name,
                int(min(each.get("max_workers", most_nodes), most_nodes)),
                {key: float(count) for key, count in (each.get("resources") or {}).items()},
                each.get("labels") or {},
            )
            for name, each in config.get("available_node_types", {}).items()
            if name != head
        ),
        most_nodes,
    )
