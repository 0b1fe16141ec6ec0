"""How long collective operations take over servers of GPUs.

Rings and trees cross the border of a server once for all of its GPUs, so that its adapters carry
together what one GPU sends (NVIDIA nccl-tests, PERFORMANCE.md). Starts and shares of a link's rate
are those of NCCL's own model for its protocol LL128 (NVIDIA nccl, src/graph/tuning.cc).
"""

import math
from dataclasses import dataclass
from typing import Final

# Share of the data sheet's rate: 235 of an A100's 300 GB/s, and 120 of each 128 bytes.
LINK_SHARE: Final = 235 / 300
ADAPTER_SHARE: Final = 120 / 128
# Seconds of an operation, of each step within a server, and of each step between two.
_RING_S: Final = (10.0e-6, 1.9e-6, 4.0e-6)
_TREE_S: Final = (4.4e-6, 1.2e-6, 8.5e-6)


@dataclass(frozen=True)
class Network:
    """Links of a cluster, one way, in GB/s (1000^3) as data sheets have them.

    Attributes:
        link_gb_per_s: of a GPU to the others of its server.
        server_gb_per_s: of all network adapters of a server together; by default eight of
            400 Gbit/s, as in the reference designs of HGX and DGX H100 and in AWS's p5.
    """

    link_gb_per_s: float
    server_gb_per_s: float = 400.0
    gpus_per_server: int = 8

    def servers(self, num_gpus: int) -> int:
        return math.ceil(num_gpus / self.gpus_per_server)

    def is_limited_by_adapters(self, num_gpus: int) -> bool:
        """Whether the adapters are slower than the links within a server."""
        return self.bus_gb_per_s(num_gpus) < self.link_gb_per_s * LINK_SHARE

    def bus_gb_per_s(self, num_gpus: int) -> float:
        """Bytes that each GPU sends in large operations: nccl-tests' bus bandwidth, in GB/s."""
        inside = self.link_gb_per_s * LINK_SHARE
        outside = self.server_gb_per_s * ADAPTER_SHARE
        if self.servers(num_gpus) == 1:
            return inside
        return outside if self.gpus_per_server == 1 else min(inside, outside)

    def start_s(self, num_gpus: int, *, is_sum: bool) -> float:
        """Seconds of an operation that carries nothing.

        Args:
            is_sum: an all-reduce, by ring or tree; else an all-gather or a reduce-scatter, which
                NCCL does by rings.
        """
        servers = self.servers(num_gpus)
        start_s, inside_s, outside_s = _RING_S
        ring_s = (num_gpus - servers) * inside_s + (servers - 1) * outside_s
        if not is_sum:
            return start_s + ring_s
        tree_start_s, inside_s, outside_s = _TREE_S
        depth = min(num_gpus, self.gpus_per_server) - 1
        tree_s = tree_start_s + 2 * (depth * inside_s + math.log2(servers) * outside_s)
        return min(start_s + 2 * ring_s, tree_s)


ASSUMED: Final = Network(link_gb_per_s=450.0)
"""H100 or H200 in such servers, where nothing else is known."""
