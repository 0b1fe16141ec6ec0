"""What a cluster may become: the nodes that its autoscaler may start.

Ray 2.60 has no call for it: `get_cluster_config` is for managed clusters. The autoscaler of
`ray up` and `ray start --autoscaling-config` runs on the head, as a submitted job's driver does,
and its file is in its command line. That of KubeRay is in a container of its own: that there is one
is known, and not what it may start.
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
    """Nodes that may be started."""

    name: str
    most: int
    """Nodes of this type at a time."""
    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        held = ", ".join(f"{count:g} {key}" for key, count in self.resources.items())
        return f"{self.most} of {self.name} ({held or 'nothing'} each)"


@dataclass(frozen=True)
class Growth:
    """What an autoscaler may start."""

    types: tuple[NodeType, ...] | None
    """None: there is an autoscaler, and what it may start is not known here."""
    most_nodes: float = math.inf
    """Of all types together."""
    head: Mapping[str, float] = field(default_factory=dict)
    """What the head has, which is up and counts as none of them."""

    def matching(self, selector: Mapping[str, str], *, has_head: bool) -> Growth:
        """Those of the nodes that the autoscaler starts for the labels.

        It knows those of a node type's definition alone, not what a node finds in itself once it is
        up, such as `ray.io/accelerator-type`.

        Args:
            has_head: the head is one of them.
        """
        asked = dict(selector)
        types = self.types and tuple(
            each for each in self.types if node_labels_match_selector(dict(each.labels), asked)
        )
        return replace(self, types=types, head=self.head if has_head else {})

    def total(self, key: str) -> float:
        """The most of a resource that there can be; infinite where it is not known."""
        return self._most(lambda resources: resources.get(key, 0.0))

    def holds(self, each: Mapping[str, float]) -> float:
        """Workers that there can be room for at a time; infinite where it is not known."""
        return self._most(
            lambda resources: math.floor(
                min(resources.get(key, 0.0) / need for key, need in each.items() if need)
            )
        )

    def _most(self, of_node: Callable[[Mapping[str, float]], float]) -> float:
        """The sum over the head and the nodes that have most."""
        if self.types is None:
            return math.inf
        nodes = sorted(
            (of_node(each.resources) for each in self.types for _ in range(each.most)),
            reverse=True,
        )
        return of_node(self.head) + sum(nodes[: int(min(self.most_nodes, len(nodes)))])

    def __str__(self) -> str:
        if self.types is None:
            return "its autoscaler's node types are not known here"
        limit = "" if math.isinf(self.most_nodes) else f", {self.most_nodes:g} nodes in all"
        return f"it may start {', '.join(map(str, self.types)) or 'nothing'}{limit}"


def find_growth(address: str, head: Mapping[str, float]) -> Growth | None:
    """Of the connected cluster; None if its nodes are those that are up.

    Its autoscaler's configuration is read if that runs on this host.

    Args:
        address: of its head, `HOST:PORT`; another Ray may run on this host.
        head: what the head has.
    """
    for process in _PROCESSES.glob("[0-9]*/cmdline"):
        try:
            words = process.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended, or is another user's
            continue
        if f"{_CLUSTER}{address}" in words and any(w.endswith("monitor.py") for w in words):
            for word in words:
                file = Path(word.removeprefix(_OPTION))
                if word.startswith(_OPTION) and file.is_file():
                    return replace(growth_of(yaml.safe_load(file.read_text())), head=head)
    return Growth(None) if has_second_autoscaler() else None


def growth_of(config: Mapping[str, Any]) -> Growth:
    """Of a configuration as `ray up` takes it; its head is up already and no more is started."""
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
