"""What a host with half the CPU costs a training on two hosts, and which metrics show it.

    python -m benchmarks.slow_host FOLDER

Two hosts with a worker each (`tests/faults/host_cluster.py`; root), and one without; data and
results in S3. The second run begins like the first; from its first step on, all processes of one
training host get half a CPU together, by the kernel's CPU controller (cgroup v1). Medians from
step 60 on.
"""

import argparse
import os
import time
from functools import partial
from pathlib import Path
from statistics import median

import psutil

from benchmarks.result import header
from tests.conftest import Digits
from tests.faults.cuts import PATIENCE_S, CutRun, cut_recipe, host_cluster
from tests.faults.host_cluster import converted_digits
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
GROUP = Path("/sys/fs/cgroup/cpu/vit_ray_slow_host")
PERIOD_US = 20_000


def slow_down(host: Host) -> None:
    """Give the host's processes, and those that they start, `SHARE` of a CPU together."""
    GROUP.mkdir(exist_ok=True)
    (GROUP / "cpu.cfs_period_us").write_text(str(PERIOD_US))
    (GROUP / "cpu.cfs_quota_us").write_text(str(int(PERIOD_US * SHARE)))
    namespace = os.readlink(f"/proc/{host._pid}/ns/pid")
    for pid in psutil.pids():
        try:
            if os.readlink(f"/proc/{pid}/ns/pid") == namespace:
                (GROUP / "cgroup.procs").write_text(str(pid))
        except OSError:  # it has ended
            continue


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
    with host_cluster(folder / f"hosts-{int(time.time())}", made) as cluster:
        for name in ("even", "slow"):
            recipe = cut_recipe(
                name, digits, folder, output="s3://runs",
                tracking={"uri": f"sqlite:///{cluster.folder}/{name}.db"},
                model={"name": "ViT", "image_size": 16, "depth": 4, "width": 128, "mlp_dim": 256,
                       "num_heads": 4, "patch_size": 2},
                optim={"steps": STEPS}, checkpoint={"every_steps": STEPS},
            )  # fmt: skip
            run = CutRun.start(cluster, recipe)
            if name == "slow":
                run.wait(partial(_has_begun, run))
                slow_down(cluster.hosts[run.training_host()])
            assert run.driver.wait(PATIENCE_S) == 0, run.output()[-3000:]
            values = [one["values"] for one in run.records() if one["kind"] == "metrics"]
            late = [one for one in values[FIRST:] if METRICS[0] in one]
            found[name] = [median(one[key] for one in late if key in one) for key in METRICS]
    print("\n".join(header("metric | even | one host slow | ratio")))
    for key, even, slow in zip(METRICS, *found.values(), strict=True):
        print(f"| `{key}` | {even:.3g} | {slow:.3g} | {slow / even if even else 0:.2f} |")


if __name__ == "__main__":
    main()
