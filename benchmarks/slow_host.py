"""What a host with half the CPU costs a training on two hosts, and which metrics show it.

    python -m benchmarks.slow_host FOLDER

Two hosts with a worker each (`tests/faults/host_cluster.py`; root), and one without; data and
results in S3. The other runs begin like the first; from their first step on, all processes of one
training host, rank 0's and then rank 1's, get half a CPU together, by the kernel's CPU controller
(cgroup v1). Medians from step 60 on; the last row is the share of these steps whose
`perf/slowest_rank` is 1.
"""

import argparse
import contextlib
import os
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import fmean, median

import psutil

from benchmarks.result import header
from tests.conftest import Digits
from tests.faults.cuts import PATIENCE_S, CutRun, cut_recipe, host_cluster
from tests.faults.host_cluster import HostCluster, converted_digits
from tests.hosts import Host
from vit_ray.metric_names import (
    DATA_WAIT_FRACTION,
    PERF_OWN_MS_MAX,
    PERF_OWN_MS_MEDIAN,
    PERF_SLOWEST_RANK,
    PERF_STEP_MS_MEDIAN,
    TRAIN_IMAGES_PER_S,
)

STEPS, FIRST, SHARE = 160, 60, 0.5

METRICS = (
    TRAIN_IMAGES_PER_S,
    PERF_STEP_MS_MEDIAN,
    PERF_OWN_MS_MEDIAN,
    PERF_OWN_MS_MAX,
    PERF_SLOWEST_RANK,
    DATA_WAIT_FRACTION,
)
CONTROLLER = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 20_000


@contextlib.contextmanager
def slowed(host: Host) -> Iterator[None]:
    """Give the host's processes, and those that they start, `SHARE` of a CPU together."""
    group = CONTROLLER / f"vit_ray_slow_{host.name}"
    group.mkdir(exist_ok=True)
    (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
    (group / "cpu.cfs_quota_us").write_text(str(int(PERIOD_US * SHARE)))
    namespace = os.readlink(f"/proc/{host._pid}/ns/pid")
    for pid in psutil.pids():
        with contextlib.suppress(OSError):  # it has ended
            if os.readlink(f"/proc/{pid}/ns/pid") == namespace:
                (group / "cgroup.procs").write_text(str(pid))
    try:
        yield
    finally:
        while pids := (group / "cgroup.procs").read_text().split():
            for pid in pids:
                with contextlib.suppress(OSError):
                    (CONTROLLER / "cgroup.procs").write_text(pid)
        group.rmdir()


def host_of(cluster: HostCluster, rank: int) -> Host:
    """Where the newest group of trainers has a rank, by Ray Train's log."""
    logs = [
        log
        for host in cluster.hosts.values()
        for log in host.folder.glob("tmp-ray/session_2*/logs/train/ray-train-app-controller-*")
    ]
    text = max(logs, key=lambda log: log.stat().st_mtime).read_text()
    addresses = re.findall(rf"\(ip=(\S+), pid=\d+\) world_rank={rank},", text)
    return next(host for host in cluster.hosts.values() if host.address == addresses[-1])


def _has_begun(run: CutRun) -> bool:
    return bool(run.steps())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    made = converted_digits(folder / "data")
    digits = Digits(made.images, "s3://data/train", "s3://data/test")
    found: dict[str, list[float]] = {}
    runs = {"even": None, "slow-0": 0, "slow-1": 1}
    with host_cluster(folder / f"hosts-{int(time.time())}", made) as cluster:
        for name, slow in runs.items():
            recipe = cut_recipe(
                name, digits, folder, output="s3://runs",
                tracking={"uri": f"sqlite:///{cluster.folder}/{name}.db"},
                model={"name": "ViT", "image_size": 16, "depth": 4, "width": 128, "mlp_dim": 256,
                       "num_heads": 4, "patch_size": 2},
                optim={"steps": STEPS}, checkpoint={"every_steps": STEPS},
            )  # fmt: skip
            run = CutRun.start(cluster, recipe)
            run.wait(partial(_has_begun, run))
            places = [host_of(cluster, rank) for rank in (0, 1)]
            print(name, {rank: host.name for rank, host in enumerate(places)}, flush=True)
            with contextlib.nullcontext() if slow is None else slowed(places[slow]):
                assert run.driver.wait(PATIENCE_S) == 0, run.output()[-3000:]
            values = [one["values"] for one in run.records() if one["kind"] == "metrics"]
            late = [one for one in values[FIRST:] if METRICS[0] in one]
            found[name] = [median(one[key] for one in late if key in one) for key in METRICS]
            found[name].append(fmean(one[PERF_SLOWEST_RANK] for one in late))
    print("\n".join(header("metric | even | rank 0's host slow | rank 1's host slow")))
    for key, *cells in zip(
        [*METRICS, "share of steps with slowest_rank 1"], *found.values(), strict=True
    ):
        print(f"| {key} | {' | '.join(f'{cell:.3g}' for cell in cells)} |")


if __name__ == "__main__":
    main()
