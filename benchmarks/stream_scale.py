"""What a block of the training stream costs its server, for many ranks on one or more servers.

    python benchmarks/stream_scale.py [--ranks 8,64,512] [--servers 1] [--hosts 64]
        [--seconds 20] [--pace 9000]

The stream servers, their Ray Data executions and their reading tasks are those of a training;
only the images are left out: a reading task plans its rows, and gives blocks of sample numbers.
Ranks are threads of one process that take their blocks in step, as ranks that reduce their
gradients do: as fast as they come, or with `--pace` as a training of so many images/s. CPU
milliseconds are user and system time of a process over each 128 images that were taken meanwhile;
they depend less on other work on the machine than rates do. Servers are as many as hosts: the
blocks of one that is not alone are of 256 images. Above each row are the images of all ranks'
blocks, from the first ones on, and the seconds that their ranks waited for them. With `--hosts`
the servers here are some of so many, and only their ranks are run.
"""

import argparse
import math
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.result import finish, header, machine

BLOCK_ROWS = 128
GROUP_ROWS = 64
IMAGES = 303_000_000 // 64
"""A 64th of JFT: the manifest is not what is measured here."""
CPUS = 4
STEP_LIMIT_S = 300.0
SMALL_ROUNDS = 6
"""After so many blocks of each rank, all are full ones."""


@dataclass
class Taken:
    """What ranks have had, by all of them together."""

    first_s: list[float] = field(default_factory=list)
    """Of each rank, from the start to its first block."""
    images: int = 0
    longest_wait_s: float = 0.0
    """Of all ranks for their next blocks."""
    waits: list[str] = field(default_factory=list)
    """Images of all ranks' blocks and the seconds that they were waited for, from the start on."""


def spec_of(batch: int) -> Any:
    """A stream without files."""
    from vit_ray.data.dataset import Manifest, ShardFile
    from vit_ray.data.order import ShuffleWindow
    from vit_ray.data.stream.batches import StreamSpec

    groups = IMAGES // GROUP_ROWS
    full = np.full(groups, GROUP_ROWS, np.int32)
    manifest = Manifest(
        np.zeros(groups, np.int32), np.arange(groups, dtype=np.int32), full,
        full.astype(np.int64) * 110_000,
        files=[ShardFile("part.parquet", groups * GROUP_ROWS, 1 << 40, 0)], classes=["a"],
    )  # fmt: skip
    window = ShuffleWindow(batch, max(1, 2048 // batch)) if batch < 2048 else None
    return StreamSpec(manifest, num_cpus=0.66, block_rows=BLOCK_ROWS, window=window)


class EmptyReader:
    """In the place of `BatchReader`: sample numbers, and none of the images."""

    def __init__(self, job: Any) -> None:
        from vit_ray.data.order import Order

        self._job = job
        self.order = Order(job.spec.manifest.rows, job.spec.seed, True, job.window)

    def batch(self, rank: int, first: int, last: int) -> tuple[Any, dict[int, str]]:
        """As `BatchReader.batch`."""
        positions = self._job.start + self._job.partition.offsets(rank, first, last)
        _, groups, rows = self.order.places(positions)
        samples = self._job.spec.manifest.samples_at(groups, rows)
        return {"sample": samples}, {}


def without_images() -> None:
    """Every process of this Ray reads without images (`worker_process_setup_hook`)."""
    from vit_ray.data.stream import ray_datasets

    ray_datasets.BatchReader = EmptyReader  # type: ignore[assignment,misc]


def start_servers(count: int, hosts: int, world_size: int, share: int) -> list[Any]:
    """The servers of the first of some hosts, each for as many consecutive ranks."""
    import ray

    from vit_ray.data.stream.stream_server import StreamServer

    specs = ray.put({"train": spec_of(world_size * share)})
    options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 2 * world_size // hosts + 4}
    remote = ray.remote(StreamServer).options(**options)
    quiet = {"keeps_statistics": False, "warms_up": False}
    return [
        remote.remote("benchmark", specs, ranks_of(host, hosts, world_size), world_size, **quiet)
        for host in range(count)
    ]


def ranks_of(host: int, hosts: int, world_size: int) -> range:
    """The ranks of a host."""
    return range(host * world_size // hosts, (host + 1) * world_size // hosts)


def process_ids(servers: list[Any]) -> list[int]:
    import ray
    from ray.util.state import list_actors

    ids = {server._actor_id.hex() for server in servers}
    del ray
    return [actor.pid for actor in list_actors(limit=10_000) if actor.actor_id in ids]


def cpu_s(pids: list[int]) -> float:
    """User and system seconds of the busiest of some processes so far."""
    return max(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def find(name: str) -> list[int]:
    """Processes of this Ray that have a name."""
    below = psutil.Process().children(recursive=True)
    return [process.pid for process in below if process.name() == name]


class Ranks:
    """Threads that take blocks in step until they are stopped."""

    def __init__(
        self, servers: list[Any], hosts: int, world_size: int, share: int, pace: float
    ) -> None:
        from vit_ray.data.stream.stream_server import RankStreams

        ranks = range(world_size * len(servers) // hosts)
        self.taken = Taken()
        self._start_s = time.perf_counter()
        self._last_s, self._noted, self._rounds, self._pace = self._start_s, 0, 0, pace
        self._step = threading.Barrier(len(ranks), action=self._note_step)
        self._lock = threading.Lock()
        self._is_over = False
        stop = 10**6 * world_size * share * BLOCK_ROWS
        self._threads = []
        for rank in ranks:
            streams = RankStreams(servers[rank * hosts // world_size], rank)
            blocks = streams.training_blocks(share, 0, stop)
            self._threads.append(threading.Thread(target=self._take, args=(blocks,), daemon=True))
        for thread in self._threads:
            thread.start()

    def _take(self, blocks: Any) -> None:
        for number, block in enumerate(blocks):
            with self._lock:
                self.taken.images += len(block["sample"][0].as_py())
                if number == 0:
                    self.taken.first_s.append(time.perf_counter() - self._start_s)
            try:
                self._step.wait(STEP_LIMIT_S)
            except threading.BrokenBarrierError:
                return

    def _note_step(self) -> None:
        wait_s = time.perf_counter() - self._last_s
        self.taken.longest_wait_s = max(self.taken.longest_wait_s, wait_s)
        images, self._noted = self.taken.images - self._noted, self.taken.images
        self.taken.waits.append(f"{images}:{wait_s:.2f}")
        time.sleep(images / self._pace)
        self._last_s = time.perf_counter()
        self._rounds += 1

    def wait_for(self, rounds: int) -> None:
        """Until each has had so many blocks; the wait that is noted starts then."""
        deadline_s = time.perf_counter() + STEP_LIMIT_S
        while self._rounds < rounds:
            assert time.perf_counter() < deadline_s, f"not every rank got {rounds} blocks"
            time.sleep(0.05)
        self.taken.longest_wait_s = 0.0

    def end(self) -> None:
        """Let the threads end."""
        self._step.abort()
        for thread in self._threads:
            thread.join(STEP_LIMIT_S)


def measure(ranks: int, servers: int, hosts: int, seconds: float, pace: float) -> str:
    """A row of the table, of the first servers of that many hosts."""
    import ray

    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["OMP_NUM_THREADS"] = "1"
    ray.init(
        num_cpus=CPUS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=1 << 30,
        runtime_env={"worker_process_setup_hook": without_images},
    )
    share = max(1, 4096 // ranks)
    try:
        started = start_servers(servers, hosts, ranks, share)
        pids = ray.get([server.__ray_call__.remote(lambda _: os.getpid()) for server in started])
        taking = Ranks(started, hosts, ranks, share, pace)
        taking.wait_for(SMALL_ROUNDS)
        before = [cpu_s(group) for group in (pids, find("raylet"), find("gcs_server"))]
        images, since_s = taking.taken.images, time.perf_counter()
        time.sleep(seconds)
        images, taken_s = taking.taken.images - images, time.perf_counter() - since_s
        after = [cpu_s(group) for group in (pids, find("raylet"), find("gcs_server"))]
        blocks = images / BLOCK_ROWS
        per_server = blocks / servers
        used = [b - a for a, b in zip(before, after, strict=True)]
        memory = max(psutil.Process(pid).memory_info().rss for pid in pids) >> 20
        taking.end()
        print("images, and seconds waited for them:", *taking.taken.waits, flush=True)
        return (
            f"| {ranks} | {servers} | {1000 * used[0] / per_server:.2f} | "
            f"{1000 * used[1] / blocks:.2f} | {1000 * used[2] / blocks:.2f} | "
            f"{images / taken_s:,.0f} | {max(taking.taken.first_s):.1f} | "
            f"{taking.taken.longest_wait_s:.2f} | {memory} |"
        )
    finally:
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="8,64,512")
    parser.add_argument("--servers", default="1")
    parser.add_argument(
        "--hosts",
        type=int,
        help="hosts that the ranks are spread over, if there are more than servers",
    )
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--pace", type=float, default=math.inf, help="images/s of all ranks")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lines = [
        f"# stream_scale: {machine()}\n",
        *header(
            "ranks | servers | ms for 128 images, busiest server | raylet | GCS | images/s | "
            "first blocks s | longest wait s | server MiB"
        ),
    ]
    for servers in args.servers.split(","):
        for ranks in args.ranks.split(","):
            if int(ranks) >= int(servers):
                hosts = args.hosts or int(servers)
                lines.append(measure(int(ranks), int(servers), hosts, args.seconds, args.pace))
                print(lines[-1], flush=True)
    finish("\n".join(lines), args.out)


if __name__ == "__main__":
    main()
