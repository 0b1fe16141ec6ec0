"""A cloud whose quota is smaller than the cluster's limits, in the process of Ray's autoscaler."""

from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider
from ray.autoscaler.node_launch_exception import NodeLaunchException


class QuotaProvider(FakeMultiNodeProvider):  # type: ignore[misc]
    """Ray's provider of nodes that are processes of one machine; `quota` of them at most."""

    def create_node_with_resources_and_labels(
        self, node_config: Any, tags: Any, count: int, resources: Any, labels: Any
    ) -> None:
        """Make as many as the quota allows.

        Raises:
            NodeLaunchException: they are fewer than were asked for.
        """
        quota = self.provider_config["quota"]
        for _ in range(count):
            if len(self.non_terminated_nodes({})) > quota:  # the head is one of them
                raise NodeLaunchException("QuotaExceeded", f"{quota} nodes at most", None)
            super().create_node_with_resources_and_labels(node_config, tags, 1, resources, labels)
