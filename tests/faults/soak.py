"""One training on CPU that meets fault after fault, and ends with the weights of a quiet one.

    python -m tests.faults.soak FOLDER --faults 200 --seed 0

Given again with the same words, it goes on where it was. What each fault did is a line of
`FOLDER/faults.jsonl`; the exit code is 0 if the weights are equal, bit for bit. Where a file system
may be mounted, the runs are on a small one in memory, which one of the faults fills up.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.conftest import ROOT, Digits
from tests.end_to_end.runs import checkpoint_steps, same_weights, weights_of
from tests.recipes import small_recipe
from vit_ray.checkpoints.checkpoint import folder_name
from vit_ray.config import Recipe
from vit_ray.data.prepare.digits import write_digits

STEPS_PER_FAULT: Final = 120
EVERY: Final = 20
"""Steps between two checkpoints; a fault strikes when there is a new one."""
PATIENCE_S: Final = 600.0
"""A run that has written no checkpoint for so long hangs, and the soak has failed."""
STOPPED: Final = 3
"""Exit code of a driver that was stopped on request."""
BUSY: Final = "the machine is too busy"
"""Said at the end of a driver that could not start its Ray."""


class Soak:
    """The disturbed run: its driver, if one lives, and what the faults need to know."""

    def __init__(self, recipe: Recipe, folder: Path, rng: random.Random) -> None:
        self.recipe, self.folder, self.rng = recipe, folder, rng
        self.driver: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """A driver with a Ray of its own."""
        path = self.folder / f"{self.recipe.name}.json"
        path.write_text(self.recipe.model_dump_json())
        command = [sys.executable, str(ROOT / "jobs" / "pretrain.py"), str(path)]
        with open(self.folder / f"{self.recipe.name}.log", "ab") as log:
            return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def wait_for_checkpoint(self) -> bool:
        """Until there is a new one; drivers are started as needed. False if the run is complete."""
        newest, deadline_s = self.newest_step(), time.monotonic() + PATIENCE_S
        while self.newest_step() <= newest:
            self.driver = self.driver or self.start()
            code = self.driver.poll()
            if code == 0:
                return False
            if code is not None:
                ended = code in (STOPPED, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)
                if not ended and BUSY not in self.log_tail():
                    raise SystemExit(f"the driver ended with {code}: {self.log_tail()}")
                self.driver = None
            if time.monotonic() > deadline_s:
                raise SystemExit(f"no checkpoint in {PATIENCE_S:g} s: {self.log_tail()}")
            time.sleep(0.2)
        return True

    def newest_step(self) -> int:
        """Of the whole checkpoints; -1 before the first."""
        return max(checkpoint_steps(self.recipe), default=-1)

    def failed_saves(self) -> int:
        """Told in the run's history."""
        history = self.run_folder() / "metrics.jsonl"
        return history.read_text().count('"checkpoint failed"') if history.exists() else 0

    def run_folder(self) -> Path:
        return Path(self.recipe.run_folder)

    def end_driver(self, *signals: signal.Signals) -> None:
        """Send it signals, one right after the other, and wait for its end."""
        assert self.driver is not None
        for number in signals:
            self.driver.send_signal(number)
            time.sleep(self.rng.uniform(0.0, 0.5))
        self.driver.wait(PATIENCE_S)
        self.driver = None

    def worker_pids(self) -> list[int]:
        """Training processes below this run's driver."""
        assert self.driver is not None
        return [
            pid for pid in _descendants(self.driver.pid) if b"RayTrainWorker" in _command_line(pid)
        ]

    def log_tail(self) -> str:
        return (self.folder / f"{self.recipe.name}.log").read_text()[-1000:]


def kill_worker(soak: Soak) -> None:
    """A training process is gone."""
    if pids := soak.worker_pids():
        os.kill(soak.rng.choice(pids), signal.SIGKILL)


def freeze_worker(soak: Soak) -> None:
    """A training process hangs."""
    if pids := soak.worker_pids():
        os.kill(soak.rng.choice(pids), signal.SIGSTOP)


def kill_driver(soak: Soak) -> None:
    """Driver and Ray are gone, in the middle of a save or not."""
    time.sleep(soak.rng.uniform(0.0, 0.5))
    soak.end_driver(signal.SIGKILL)


def terminate(soak: Soak) -> None:
    """SIGTERM, perhaps during a save."""
    soak.end_driver(signal.SIGTERM)


def interrupt(soak: Soak) -> None:
    """Ctrl-C."""
    soak.end_driver(signal.SIGINT)


def terminate_twice(soak: Soak) -> None:
    """The second one does not wait for the checkpoint."""
    soak.end_driver(signal.SIGTERM, signal.SIGTERM)


def damage_newest(soak: Soak) -> None:
    """A bit of the newest checkpoint flips while no driver runs."""
    soak.end_driver(signal.SIGKILL)
    file = _a_tensor_file(soak)
    content = bytearray(file.read_bytes())
    content[soak.rng.randrange(len(content))] ^= 1
    file.write_bytes(content)


def delete_rank_file(soak: Soak) -> None:
    """A file of the newest checkpoint is gone."""
    soak.end_driver(signal.SIGKILL)
    _a_tensor_file(soak).unlink()


def delete_marker(soak: Soak) -> None:
    """As a driver leaves it that dies between the last part and the commit."""
    soak.end_driver(signal.SIGKILL)
    (soak.run_folder() / folder_name(soak.newest_step()) / "commit.json").unlink()


def start_second_driver(soak: Soak) -> None:
    """It is refused, and the first goes on."""
    code = soak.start().wait(PATIENCE_S)
    if code != 2 and soak.driver is not None and soak.driver.poll() is None:
        raise SystemExit(f"a second driver was not refused but ended with {code}")


def fill_disk(soak: Soak) -> None:
    """A checkpoint finds no room; the next one does."""
    filler, deadline_s = soak.folder / "runs" / "filler", time.monotonic() + PATIENCE_S
    failed = soak.failed_saves()
    try:
        while soak.failed_saves() == failed and soak.driver and soak.driver.poll() is None:
            _fill(filler)  # also what an older checkpoint leaves that goes meanwhile
            if time.monotonic() > deadline_s:
                raise SystemExit(f"no save failed on a full disk in {PATIENCE_S:g} s")
            time.sleep(0.1)
    finally:
        filler.unlink(missing_ok=True)


def lock_tracking(soak: Soak) -> None:
    """MLflow's store answers nobody for a while."""
    with sqlite3.connect(soak.folder / "mlflow.db", timeout=60.0) as store:
        store.execute("BEGIN EXCLUSIVE")
        time.sleep(soak.rng.uniform(1.0, 20.0))
        store.rollback()


FAULTS: Final[tuple[Callable[[Soak], None], ...]] = (
    kill_worker, freeze_worker, kill_driver, terminate, interrupt, terminate_twice, damage_newest,
    delete_rank_file, delete_marker, start_second_driver, lock_tracking,
)  # fmt: skip
SMALL_DISK_MIB: Final = 64


def soak_recipe(name: str, folder: Path, num_faults: int) -> Recipe:
    """Two workers and a tiny model; three checkpoints stay, so that one may be damaged."""
    data = folder / "data"
    digits = Digits(data / "images", str(data / "train"), str(data / "test"))
    steps = STEPS_PER_FAULT * num_faults
    return small_recipe(
        name,
        digits,
        folder,
        optim={"steps": steps, "schedule": "constant"},
        checkpoint={"every_steps": EVERY, "keep_last": 3},
        train={"log_every_steps": EVERY, "step_timeout_s": 20.0},
        workers={"max_failures": -1},
    )


def run_soak(folder: Path, num_faults: int, seed: int) -> bool:
    """Whether the weights after all faults are those without any."""
    _convert_digits(folder / "data")
    faults = (*FAULTS, fill_disk) if _has_small_disk(folder / "runs") else FAULTS
    quiet = Soak(soak_recipe("quiet", folder, num_faults), folder, random.Random(0))
    if quiet.start().wait() != 0:
        raise SystemExit(f"the run without faults failed: {quiet.log_tail()}")
    log = folder / "faults.jsonl"
    done = log.read_text().splitlines() if log.exists() else []
    disturbed = Soak(
        soak_recipe("disturbed", folder, num_faults), folder, random.Random(f"{seed} {len(done)}")
    )
    for number in range(len(done), num_faults):
        if not disturbed.wait_for_checkpoint():
            raise SystemExit(f"the run was complete after {number} of {num_faults} faults")
        # Of the first ones each kind once, in an order of the seed's.
        order = random.Random(f"{seed} {number // len(faults)}").sample(faults, len(faults))
        fault, step = order[number % len(faults)], disturbed.newest_step()
        fault(disturbed)
        entry = {"number": number, "fault": fault.__name__, "step": step, "time_s": time.time()}
        with log.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        print(entry, flush=True)
    while disturbed.wait_for_checkpoint():
        pass
    kinds = Counter(json.loads(line)["fault"] for line in log.read_text().splitlines())
    is_equal = same_weights(weights_of(disturbed.recipe), weights_of(quiet.recipe))
    print(f"{sum(kinds.values())} faults, {dict(kinds)}: weights equal: {is_equal}")
    return is_equal


def _convert_digits(folder: Path) -> None:
    if (folder / "done").exists():
        return
    write_digits(folder / "images")
    for split in ("train", "test"):
        part = {"source": str(folder / "images" / split), "destination": str(folder / split)}
        recipe = folder / f"{split}.json"
        recipe.write_text(json.dumps({"name": split, "convert": part}))
        command = [sys.executable, str(ROOT / "jobs" / "convert.py"), str(recipe)]
        subprocess.run(command, cwd=ROOT, check=True)
    (folder / "done").touch()


def _has_small_disk(folder: Path) -> bool:
    """Whether a file system of `SMALL_DISK_MIB` is mounted there, before now or now."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.path.ismount(folder) and not any(folder.iterdir()):
        size = f"size={SMALL_DISK_MIB}m"
        command = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)]
        subprocess.run(command, check=False, stderr=subprocess.DEVNULL)
    return os.path.ismount(folder)


def _fill(file: Path) -> None:
    """Until there is no room."""
    with open(file, "ab", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(2**16))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def _a_tensor_file(soak: Soak) -> Path:
    newest = soak.run_folder() / folder_name(soak.newest_step())
    return soak.rng.choice(sorted(newest.glob("*.safetensors")))


def _descendants(pid: int) -> list[int]:
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(n) for t in threads for n in (t / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return children + [below for child in children for below in _descendants(child)]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("folder", type=Path)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    sys.exit(0 if run_soak(given.folder.absolute(), given.faults, given.seed) else 1)
