"""Seconds from a fault until the run is further than it was before it.

    python benchmarks/fault_recovery.py [--rounds 2] [--out FILE.md]

A small ViT on scikit-learn's digits, 2 workers under ZeRO 2, a checkpoint every 40 steps, on one
machine. After the second checkpoint, in a run of its own each: a worker is killed with -9; a worker
is frozen (`train.step_timeout_s` 10, which is part of the time); the driver is killed with -9 and
the job started again; the driver gets SIGTERM and the job is started again. The time ends when a
step is done that was not done before, so repeating the steps since the checkpoint is part of it.
"""

import argparse
import os
import platform
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before Ray is imported: the ports of a local cluster are open to the network.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

import ray
from ray.util.state import list_actors

from vit_ray.config import load_recipe
from vit_ray.data.convert import convert
from vit_ray.data.digits import write_digits
from vit_ray.launch.recorder import NAMESPACE

ROOT = Path(__file__).parents[1]
DASHBOARD: list[str] = []
"""Of this process's cluster; there may be others on the machine."""


class Run:
    """A driver process, and what its recorder says."""

    def __init__(self, name: str, folder: Path) -> None:
        self._spool = folder / "runs" / name / "metrics.jsonl"
        recipe = load_recipe(ROOT / "jobs" / "recipes" / "digits.yaml").with_changes(
            name=name,
            output=str(folder / "runs"),
            data={"train": str(folder / "train"), "eval": None},
            optim={"epochs": None, "steps": 4000},
            checkpoint={"every_steps": 40},
            evaluate={"every_steps": None},
            train={"step_timeout_s": 10.0},
            tracking={"uri": f"sqlite:///{folder}/mlflow.db", "system_metrics": False},
        )
        path = folder / f"{name}.yaml"
        path.write_text(recipe.model_dump_json())
        self._command = [sys.executable, str(ROOT / "jobs" / "pretrain.py"), str(path)]
        self.process = self.start()

    def start(self) -> "subprocess.Popen[bytes]":
        address = ray.get_runtime_context().gcs_address
        self.process = subprocess.Popen(
            self._command,
            env={**os.environ, "RAY_ADDRESS": address},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return self.process

    def step(self) -> int:
        """Steps done; 0 while there is no recorder."""
        try:
            recorder = ray.get_actor(str(self._spool), namespace=NAMESPACE)
            return int(ray.get(recorder.standing.remote(), timeout=5).step)
        except (ValueError, ray.exceptions.RayError):
            return 0

    def wait_for(self, step: int) -> None:
        deadline = time.monotonic() + 300
        while self.step() < step:
            assert self.process.poll() is None, f"the driver ended: {self._command}"
            assert time.monotonic() < deadline, f"step {step} is not reached in 300 s"
            time.sleep(0.1)


def workers() -> list[int]:
    filters: list[Any] = [("class_name", "=", "RayTrainWorker"), ("state", "=", "ALIVE")]
    return [int(actor.pid) for actor in list_actors(DASHBOARD[0], filters=filters, detail=True)]


def kill_a_worker(run: Run) -> None:
    os.kill(workers()[-1], signal.SIGKILL)


def freeze_a_worker(run: Run) -> None:
    os.kill(workers()[0], signal.SIGSTOP)


def kill_the_driver(run: Run) -> None:
    run.process.kill()
    run.process.wait()
    run.start()


def end_the_driver(run: Run) -> None:
    run.process.terminate()
    run.process.wait()
    run.start()


FAULTS: dict[str, Callable[[Run], None]] = {
    "worker killed with -9": kill_a_worker,
    "worker frozen (found after 10 s)": freeze_a_worker,
    "driver killed with -9, job started again": kill_the_driver,
    "SIGTERM, job started again": end_the_driver,
}


def recovery_s(fault: Callable[[Run], None], name: str, folder: Path) -> float:
    run = Run(name, folder)
    run.wait_for(90)
    step, start_s = run.step(), time.monotonic()
    fault(run)
    run.wait_for(step + 2)  # the workers may have done one more by then
    elapsed_s = time.monotonic() - start_s
    run.process.kill()
    run.process.wait()
    return elapsed_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    started = ray.init(num_cpus=4, log_to_driver=False, logging_level="ERROR")
    DASHBOARD.append(f"http://{started.dashboard_url}")
    found: dict[str, list[float]] = {name: [] for name in FAULTS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_digits(folder / "images")
        convert(str(folder / "images" / "train"), str(folder / "train"))
        for turn in range(args.rounds):
            for index, (name, fault) in enumerate(FAULTS.items()):
                found[name].append(recovery_s(fault, f"run-{turn}-{index}", folder))
                print(name, f"{found[name][-1]:.1f} s", flush=True)
    rows = [f"| {n} | {' '.join(f'{s:.1f}' for s in times)} |" for n, times in found.items()]
    head = f"# fault_recovery: {time.strftime('%Y-%m-%d')}, {platform.machine()}, "
    head += f"{os.cpu_count()} cores"
    report = "\n".join([head, "", "| fault | seconds, each round |", "|---|---|", *rows, ""])
    print(report)
    if args.out:
        args.out.write_text(report)
    ray.shutdown()


if __name__ == "__main__":
    main()
