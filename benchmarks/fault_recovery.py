"""Seconds that a fault costs: until the run is further than before it, or the longest step.

    python benchmarks/fault_recovery.py [--rounds 2] [--faults "node lost" ...] [--out FILE.md]

A small ViT on scikit-learn's digits, 2 workers under ZeRO 2, a checkpoint every 40 steps, on two
Ray nodes of one machine; each fault meets a run of its own after its second checkpoint.

Faults that end a worker or the driver: a worker is killed with -9; a worker is frozen
(`train.step_timeout_s` 10, which is part of the time); the driver is killed with -9 and the job
started again; the driver gets SIGTERM and the job is started again; a node is taken away from an
elastic run of 1 or 2 workers. The time ends when a step is done that was not done before, so
repeating the steps since the checkpoint is part of it. What it is made of is told by the run's own
events and by Ray: when the failure was noticed, when the processes of the new workers began, when
they had restored the checkpoint, and when they had done a first step, all from the fault on.

Faults that training goes on through: the loss of one batch is not finite and
`train.nonfinite=skip`; a checkpoint finds a file where its folder should be, as a full disk
would refuse it (all four tries fail); MLflow's server does not answer, all the time. What counts is
the longest pause between two steps, beside the median, and beside a run that meets no fault.
"""

import argparse
import itertools
import json
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.result import finish, header, machine

# Before Ray is imported: the ports of a local cluster are open to the network.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
# Ray ends idle processes beyond a node's CPUs after a second. Nodes of one CPU each would pay for a
# new process at nearly every reading task, which the nodes that this stands for do not.
os.environ.setdefault("RAY_num_workers_soft_limit", "16")

import psutil
import ray
from ray.cluster_utils import Cluster
from ray.util.state import list_actors

from vit_ray.checkpoints.checkpoint import folder_name
from vit_ray.config import load_recipe
from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.convert.conversion import convert
from vit_ray.data.convert.digits import write_digits
from vit_ray.launch.run import train
from vit_ray.tracking.metrics_log import MetricsLog

ROOT = Path(__file__).parents[1]
BAD_PASS = 100
WARM_UP = 20  # steps that do not count as a pause
CLUSTER = Cluster()
DASHBOARD: list[str] = []
"""Of this process's cluster; there may be others on the machine."""


class Run:
    """A driver process, and what its recorder says."""

    def __init__(self, name: str, folder: Path, changes: dict[str, Any]) -> None:
        self.folder = folder / "runs" / name
        self._log_path = self.folder / "metrics.jsonl"
        recipe = load_recipe(ROOT / "jobs" / "recipes" / "digits.yaml").with_changes(
            name=name,
            output=str(folder / "runs"),
            data={"train": str(folder / "train"), "eval": None, "cpus_per_task": 0.25},
            optim={"epochs": None, "steps": 4000},
            checkpoint={"every_steps": 40},
            evaluate={"every_steps": None},
            train={"step_timeout_s": 10.0, "log_every_steps": 1},
            workers={"cpus_per_worker": 0.75},
            tracking={"uri": f"sqlite:///{folder}/mlflow.db", "system_metrics": False},
        )
        self._recipe = folder / f"{name}.yaml"
        self._recipe.write_text(recipe.with_changes(**changes).model_dump_json())

    def start(self, script: Path = ROOT / "jobs" / "pretrain.py", *options: str) -> "Run":
        self._command = [sys.executable, str(script), *options, str(self._recipe)]
        self.process = subprocess.Popen(
            self._command,
            env={**os.environ, "RAY_ADDRESS": CLUSTER.address},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return self

    def step(self) -> int:
        """The last step in the log; 0 while there is none."""
        records = MetricsLog(self._log_path).records("metrics")
        return max((record["step"] for record in records), default=0)

    def wait_for(self, step: int) -> None:
        deadline = time.monotonic() + 300
        while self.step() < step:
            assert self.process.poll() is None, f"the driver ended: {self._command}"
            assert time.monotonic() < deadline, f"step {step} is not reached in 300 s"
            time.sleep(0.1)

    def event_s(self, kind: str, since_s: float) -> float | None:
        """Unix time of the first event of a kind after another time."""
        lines = (json.loads(line) for line in self._log_path.read_text().splitlines())
        times = [line["time_ms"] / 1000 for line in lines if line.get("event") == kind]
        return min((time_s for time_s in times if time_s > since_s), default=None)

    def pauses_s(self) -> list[float]:
        """Seconds between the steps that were logged, those of warming up left out."""
        records = [json.loads(line) for line in self._log_path.read_text().splitlines()]
        times = [r["time_ms"] / 1e3 for r in records if "train/loss" in r.get("values", {})]
        return [b - a for a, b in itertools.pairwise(times[WARM_UP:])]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def workers() -> list[int]:
    filters: list[Any] = [("class_name", "=", "RayTrainWorker"), ("state", "=", "ALIVE")]
    return [int(actor.pid) for actor in list_actors(DASHBOARD[0], filters=filters, detail=True)]


def kill_a_worker(run: Run, pids: list[int]) -> None:
    os.kill(pids[-1], signal.SIGKILL)


def freeze_a_worker(run: Run, pids: list[int]) -> None:
    os.kill(pids[0], signal.SIGSTOP)


def kill_the_driver(run: Run, pids: list[int]) -> None:
    run.end()
    run.start()


def end_the_driver(run: Run, pids: list[int]) -> None:
    run.process.terminate()
    run.process.wait()
    run.start()


def lose_a_node(run: Run, pids: list[int]) -> None:
    (lost,) = CLUSTER.worker_nodes
    CLUSTER.remove_node(lost, allow_graceful=False)


ENDING: dict[str, tuple[Callable[[Run, list[int]], None], dict[str, Any]]] = {
    # First: Ray 2.60 keeps what a killed driver had asked for, for three minutes, and an elastic
    # group does not start on it.
    "node lost, goes on with one worker": (lose_a_node, {"workers": {"num_workers": [1, 2]}}),
    "worker killed with -9": (kill_a_worker, {}),
    "worker frozen (found after 10 s)": (freeze_a_worker, {}),
    "driver killed with -9, job started again": (kill_the_driver, {}),
    "SIGTERM, job started again": (end_the_driver, {}),
}


def recovery(name: str, run: Run) -> str:
    """Seconds until a step is done that was not done before the fault."""
    run.start().wait_for(90)
    pids = workers()  # before the clock starts: Ray takes a second to list them
    step, start_s = run.step(), time.time()
    ENDING[name][0](run, pids)
    run.wait_for(step + 2)  # the workers may have done one more by then
    whole_s = time.time() - start_s
    since = {
        "noticed": run.event_s("worker failed", start_s),
        # None: the run has ended, and its workers with it.
        "workers begun": max(
            (psutil.Process(pid).create_time() for pid in workers()), default=None
        ),
        "restored": run.event_s("resumed", start_s),
        "first step": run.event_s("first step", start_s),
    }
    parts = (f"{what} {at - start_s:.1f}" for what, at in since.items() if at is not None)
    return f"{whole_s:.1f} ({', '.join(parts)})"


def poison_one_batch() -> None:
    """Called by Ray in every process that it starts."""
    from vit_ray.training import objective

    plain, passes = objective.classification_loss, itertools.count(1)

    def loss(*arguments: Any) -> Any:
        return plain(*arguments) * (float("nan") if next(passes) == BAD_PASS else 1.0)

    objective.classification_loss = loss


def meet_a_bad_batch(run: Run) -> None:
    run.start(Path(__file__).resolve(), "--poisoned").wait_for(BAD_PASS + 20)


def refuse_a_checkpoint(run: Run) -> None:
    (run.folder / folder_name(200)).parent.mkdir(parents=True)
    (run.folder / folder_name(200)).write_text("a file where the folder should be")
    run.start().wait_for(390)


def go_on(run: Run) -> None:
    run.start().wait_for(200)


def away() -> str:
    with socket.socket() as free:  # nobody listens there
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


PASSING: dict[str, tuple[Callable[[Run], None], dict[str, Any]]] = {
    "nothing, to compare": (go_on, {"train": {"log_every_steps": 1}}),
    "loss of one batch not finite, skipped": (
        meet_a_bad_batch,
        {"train": {"log_every_steps": 1, "nonfinite": "skip"}},
    ),
    "checkpoint cannot be written": (
        refuse_a_checkpoint,
        # The next one would wait for the tries of this one, which take 7 s.
        {"train": {"log_every_steps": 1}, "checkpoint": {"every_steps": 200}},
    ),
    "MLflow away": (
        go_on,
        {"train": {"log_every_steps": 1}, "tracking": {"uri": away()}},
    ),
}


def longest_pause(name: str, run: Run) -> str:
    """Seconds between two steps, the longest and the median."""
    PASSING[name][0](run)
    pauses = run.pauses_s()
    return f"{max(pauses):.2f} (median {statistics.median(pauses):.3f})"


def measure(args: argparse.Namespace, folder: Path) -> dict[str, list[str]]:
    write_digits(folder / "images")
    convert(ConvertConfig(source=f"{folder}/images/train", destination=f"{folder}/train"))
    found: dict[str, list[str]] = {}
    for turn in range(args.rounds):
        for index, (name, (_, changes)) in enumerate({**ENDING, **PASSING}.items()):
            if args.faults and not any(wanted in name for wanted in args.faults):
                continue
            run = Run(f"run-{turn}-{index}", folder, changes)
            try:
                value = (recovery if name in ENDING else longest_pause)(name, run)
            except AssertionError as error:
                value = f"failed: {error}"
            finally:
                run.end()
                if not CLUSTER.worker_nodes:
                    CLUSTER.add_node(num_cpus=1)
            found.setdefault(name, []).append(value)
            print(name, value, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--faults", nargs="*", help="parts of their names; all of them by default")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--poisoned", type=Path, metavar="RECIPE", help="a driver with a bad batch")
    args = parser.parse_args()
    if args.poisoned:
        ray.init(runtime_env={"worker_process_setup_hook": poison_one_batch}, log_to_driver=False)
        train(load_recipe(args.poisoned))
        return
    for _ in range(2):  # a worker and data tasks fit on each
        CLUSTER.add_node(num_cpus=1)
    started = ray.init(CLUSTER.address, log_to_driver=False, logging_level="ERROR")
    DASHBOARD.append(f"http://{started.dashboard_url}")
    with tempfile.TemporaryDirectory() as temporary:
        found = measure(args, Path(temporary))
    rows = [
        f"| {name} | {'until further' if name in ENDING else 'longest step'} | {' '.join(values)} |"
        for name, values in found.items()
    ]
    head = f"# fault_recovery: {machine()}\n", *header("fault | what | seconds")
    finish("\n".join((*head, *rows)), args.out)
    ray.shutdown()
    CLUSTER.shutdown()


if __name__ == "__main__":
    main()
