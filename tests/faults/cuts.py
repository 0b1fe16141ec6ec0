"""One training on hosts that are cut off from each other, and what each cut costs it.

    python -m tests.faults.cuts FOLDER [NAME ...] [--sysctl net.ipv4.tcp_rto_max_ms=4000]

prints a row for each cut of `CUTS`, or for each name that is given, which may be the same several
times: the two workers of a run are on two of the three hosts of `host_cluster.py`, data and
checkpoints in S3, head and driver on a host of their own. All times count from the cut.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests import hosts
from tests.conftest import ROOT, Digits
from tests.end_to_end.runs import checkpoint_steps, constant_recipe, same_weights, weights_of
from tests.faults.host_cluster import WORKERS, HostCluster, converted_digits
from vit_ray.config import Recipe
from vit_ray.outcomes import EventKind

STEPS: Final = 1600
"""More than a run takes that is stopped once it trains again."""
EVERY: Final = 20
"""Steps between two checkpoints."""
PATIENCE_S: Final = 300.0
STOPPED: Final = 3
"""Exit code of a driver that was stopped on request."""
NOTICED: Final = (EventKind.WORKER_FAILED, EventKind.HUNG)


def cut_recipe(name: str, digits: Digits, folder: Path, **sections: Any) -> Recipe:
    """Checkpoints are kept, to be compared with those of an undisturbed run."""
    changed = constant_recipe(
        name, digits, folder, optim={"steps": STEPS},
        checkpoint={"every_steps": EVERY, "keep_last": STEPS},
        train={"log_every_steps": 1}, workers={"num_workers": 2, "cpus_per_worker": 1.5},
    )  # fmt: skip
    return changed.with_changes(**sections)


@dataclass(frozen=True)
class Cost:
    """What a cut cost a run; times in seconds from the cut on, of records on the head's host."""

    noticed_s: float | None
    """A failure is in the run's history; None: none came."""
    gone_s: float | None
    """The processes that trained on the host have ended; None: they have not."""
    further_s: float | None
    """After a failure, a step is done that was not done before; None: there was no failure."""
    pause_s: float
    """Longest time without a step."""
    repeated: int
    """Steps that were done twice."""

    def row(self, name: str) -> str:
        """Of a Markdown table."""
        times = [self.noticed_s, self.gone_s, self.further_s, self.pause_s]
        shown = ["-" if one is None else f"{one:.1f}" for one in times]
        return f"| {name} | {' | '.join(shown)} | {self.repeated} |"


@dataclass
class CutRun:
    """A driver on the head's host, and what its run has recorded there."""

    cluster: HostCluster
    recipe: Recipe
    driver: subprocess.Popen[bytes]

    @classmethod
    def start(cls, cluster: HostCluster, recipe: Recipe) -> CutRun:
        """A run that has just begun."""
        return cls(cluster, recipe, cluster.start_driver(recipe))

    @property
    def on_disk(self) -> Recipe:
        """The run as the server of S3 has it."""
        return self.recipe.with_changes(output=str(self.cluster.buckets / "runs"))

    def output(self) -> str:
        """Of its driver."""
        return (self.cluster.folder / f"{self.recipe.name}.log").read_text()

    def records(self, since_s: float = 0.0) -> list[dict[str, Any]]:
        """What its recorder has on disk since a Unix time, oldest first."""
        found = []
        for path in (self.cluster.folder / "home").rglob(f"{self.recipe.name}/metrics.jsonl"):
            for line in path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # the last one may be half written
                    found.append(json.loads(line))
        recent = [one for one in found if one.get("time_ms", 0) / 1e3 >= since_s]
        return sorted(recent, key=lambda one: one["time_ms"])

    def steps(self, since_s: float = 0.0) -> list[tuple[float, int]]:
        """(Unix time, step) of the losses."""
        return [
            (one["time_ms"] / 1e3, one["step"])
            for one in self.records(since_s)
            if "train/loss" in one.get("values", {})
        ]

    def events(self, *kinds: EventKind, since_s: float = 0.0) -> list[dict[str, Any]]:
        """Events of these kinds."""
        return [one for one in self.records(since_s) if one.get("event") in kinds]

    def wait(self, condition: Callable[[], bool]) -> None:
        """Until it holds; fails if the driver ends first."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            ended = f"the driver ended, after {STEPS} steps or before: {self.output()[-3000:]}"
            assert self.driver.poll() is None, ended
            assert time.monotonic() < deadline_s, (
                f"not in {PATIENCE_S:g} s: {self.output()[-3000:]}"
            )
            time.sleep(0.5)

    def trainers(self, host: str) -> set[str]:
        """Pids of the processes that train on a host, as that host numbers them."""
        code, found = self.cluster.hosts[host].run("pgrep", "-f", "ray::RayTrainWorker")
        assert code in (0, 1), found  # 1: there are none
        return set(found.split())

    def training_host(self) -> str:
        """The last one that trains: rank 0 is on the first as a rule."""
        return next(name for name in reversed(WORKERS) if self.trainers(name))

    def cut(self, host: str, seconds: float | None) -> tuple[float, float | None]:
        """Cut a host off for some time, or until the run trains without it.

        Returns:
            When, and the seconds until the processes that trained there had ended, if they have.
        """
        watched = {"head": WORKERS, "storage": ()}.get(host, (host,))
        before = {name: self.trainers(name) for name in WORKERS}
        its, start_s, gone_s = self.cluster.hosts[host], time.time(), None
        last = self.steps()[-1][1]
        its.cut()
        healing = None if seconds is None else threading.Timer(seconds, its.heal)
        if healing is not None:
            healing.start()

        def is_further() -> bool:
            """Whether the cut is over, or a failure was noticed, and there are steps since."""
            nonlocal gone_s
            is_left = any(before[name] & self.trainers(name) for name in watched)
            if watched and gone_s is None and not is_left:
                gone_s = time.time() - start_s
            if seconds is None:
                if gone_s is None or not (known := self.events(*NOTICED, since_s=start_s)):
                    return False
                from_s = known[0]["time_ms"] / 1e3
            else:
                from_s = start_s + seconds
            return any(step > last for _, step in self.steps(from_s))

        self.wait(is_further)
        if healing is None:
            its.heal()
        return start_s, gone_s

    def cost(self, start_s: float, gone_s: float | None) -> Cost:
        """Of a cut at a time, by what was recorded since."""
        noticed = self.events(*NOTICED, since_s=start_s)
        noticed_s = further_s = None
        if noticed:
            at_s = noticed[0]["time_ms"] / 1e3
            done = max(step for at, step in self.steps() if at <= at_s)
            noticed_s = at_s - start_s
            further_s = next((at for at, s in self.steps(at_s) if s > done), math.inf) - start_s
        repeated, highest = 0, max(step for at, step in self.steps() if at < start_s)
        for one in self.records(start_s):
            if one.get("event") == EventKind.RESUMED:
                repeated += max(0, highest - one["step"])
                highest = one["step"]
            elif "train/loss" in one.get("values", {}):
                highest = max(highest, one["step"])
        times = [start_s, *(at for at, _ in self.steps(start_s))]
        pause_s = max(later - at for at, later in itertools.pairwise(times))
        return Cost(noticed_s, gone_s, further_s, pause_s, repeated)

    def end(self) -> int:
        """Stop it once it has a checkpoint of what it trained last; the step of that.

        The one that is written at the stop is of any step; an undisturbed run has none of it.
        """
        newest = max(checkpoint_steps(self.on_disk))
        self.wait(lambda: max(checkpoint_steps(self.on_disk)) > newest)
        self.cluster.hosts["head"].run(
            "pkill", "-TERM", "-f", f"jobs/pretrain.py.*{self.recipe.name}"
        )
        code = self.driver.wait(PATIENCE_S)
        assert code == STOPPED, self.output()[-3000:]
        return max(step for step in checkpoint_steps(self.on_disk) if step % EVERY == 0)


@dataclass(frozen=True)
class Cut:
    """Which host is cut off, and for how long."""

    host: str
    seconds: float | None


CUTS: Final = {
    "a trainer's host for 20 s": Cut("trainer", 20.0),
    "a trainer's host for 60 s": Cut("trainer", 60.0),
    "a trainer's host for good": Cut("trainer", None),
    "the head's host for 20 s": Cut("head", 20.0),
    "the head's host for 120 s": Cut("head", 120.0),
    "S3's host for 60 s": Cut("storage", 60.0),
}


def cut_run(cluster: HostCluster, name: str, number: int) -> tuple[Cost, CutRun, int]:
    """A new run that meets one of `CUTS`: what it cost, and the newest checkpoint after it."""
    cut, slug = CUTS[name], "".join(c if c.isalnum() else "-" for c in f"{name} {number}")
    digits = Digits(cluster.folder, "s3://data/train", "s3://data/test")
    recipe = cut_recipe(slug, digits, cluster.folder, output="s3://runs")
    run = CutRun.start(cluster, recipe)
    try:
        run.wait(lambda: len(checkpoint_steps(run.on_disk)) >= 2)
        host = run.training_host() if cut.host == "trainer" else cut.host
        start_s, gone_s = run.cut(host, cut.seconds)
        step = run.end()
        cost = run.cost(start_s, gone_s)
    finally:
        for host in cluster.hosts.values():
            host.heal()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if run.driver.poll() is None:
                cluster.hosts["head"].run("pkill", "-KILL", "-f", "jobs/pretrain.py")
                run.driver.wait(30)
    return cost, run, step


@contextlib.contextmanager
def host_cluster(
    folder: Path, digits: Digits, sysctls: Sequence[str] = ()
) -> Iterator[HostCluster]:
    """The hosts, with the data in S3; they end with the block."""
    folder.mkdir(parents=True, exist_ok=True)
    with hosts.network(sysctls) as net:
        cluster = HostCluster(net, folder)
        for name, place in (("train", digits.train), ("test", digits.test)):
            shutil.copytree(place, cluster.buckets / "data" / name)
        yield cluster


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=list(CUTS))
    parser.add_argument("--sysctl", action="append", default=[], help="NAME=VALUE on each host")
    given = parser.parse_args()
    folder = given.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    digits = converted_digits(folder / "data")
    undisturbed = cut_recipe(
        "undisturbed", digits, folder, tracking={"uri": f"sqlite:///{folder}/u.db"}
    )
    if STEPS not in checkpoint_steps(undisturbed):
        path = folder / "undisturbed.json"
        path.write_text(undisturbed.model_dump_json())
        command = [sys.executable, str(ROOT / "jobs" / "pretrain.py"), str(path)]
        subprocess.run(command, cwd=ROOT, check=True)
    print("| cut off | noticed | its trainers end | further | longest pause | repeated | equal |")
    print("|---|---|---|---|---|---|---|")
    place = folder / f"hosts-{int(time.time())}"
    with host_cluster(place, digits, given.sysctl) as cluster:
        for number, name in enumerate(given.names):
            cost, run, step = cut_run(cluster, name, number)
            is_equal = same_weights(weights_of(run.on_disk, step), weights_of(undisturbed, step))
            print(f"{cost.row(name)} {'yes' if is_equal else 'NO'} |", flush=True)
            cluster.wait_for_nodes()


if __name__ == "__main__":
    main()
