"""One training on three hosts, its checkpoints in S3, that meets fault after fault.

    python -m tests.faults.soak FOLDER --faults 200

It ends with the weights of a run without faults, bit for bit; then the exit code is 0. Given again
with the same words, it continues where it was. What each fault did is a line of
`FOLDER/faults.jsonl`.

The hosts are namespaces of this machine (`tests/hosts.py`): one has Ray's head and the drivers, one
serves S3 (rclone), and three have room for a worker each, of which the run takes two. The health
checks of the head are those of `cluster/rayjob.yaml`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import yaml

from tests import hosts
from tests.conftest import ROOT, Digits
from tests.data.converting import convert, in_this_process
from tests.data.s3_server import ACCESS_KEY, SECRET_KEY, rclone_binary, s3_environment, timeout
from tests.end_to_end.runs import checkpoint_steps, same_weights, weights_of
from tests.faults.runs import STOPPED
from tests.hosts import Network
from tests.recipes import small_recipe
from vit_ray.checkpoints.checkpoint import folder_name
from vit_ray.config import Recipe
from vit_ray.data.convert.digits import write_digits

WORKERS: Final = ("first", "second", "third")
S3_PORT: Final = 9000
STEPS_PER_FAULT: Final = 60
EVERY: Final = 10
"""Steps between two checkpoints; a fault strikes when there is a new one."""
PATIENCE_S: Final = 600.0
"""A run that has written no checkpoint for so long hangs, and the soak has failed."""
NOTICE_S: Final = 20.0
"""Between the notice that a node is taken back and its end."""
SLOW: Final = "endpoint URL"
"""Said at the end of a driver that could not start because S3 did not answer in time."""
_DRAIN: Final = """
import sys, time
from ray._raylet import GcsClient
from ray.core.generated import autoscaler_pb2
import ray
ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
alive = {n["NodeManagerAddress"]: n["NodeID"] for n in ray.nodes() if n["Alive"]}
node = alive.get(sys.argv[1])  # it may be gone at this moment
reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
client = GcsClient(address=ray.get_runtime_context().gcs_address)
if node:
    client.drain_node(node, reason, "taken back", int((time.time() + float(sys.argv[2])) * 1e3))
"""


def shipped_health_checks(group: str) -> dict[str, str]:
    """What `cluster/rayjob.yaml` sets for nodes that do not answer, on the head or on workers."""
    documents = yaml.safe_load_all((ROOT / "cluster" / "rayjob.yaml").read_text())
    (job,) = (one for one in documents if one["kind"] == "RayJob")
    its = job["spec"]["rayClusterSpec"][group]
    (container,) = (its if isinstance(its, dict) else its[0])["template"]["spec"]["containers"]
    names = re.compile("RAY_(health_check|grpc_keepalive)_")
    found = {e["name"]: e["value"] for e in container["env"] if names.match(e["name"])}
    assert "RAY_grpc_keepalive_timeout_ms" in found
    return found


def converted_digits(folder: Path) -> Digits:
    """The digits as files and converted, made once in this folder."""
    found = Digits(folder / "images", str(folder / "train"), str(folder / "test"))
    if not (folder / "done").exists():
        write_digits(found.images)
        with in_this_process():
            for split in ("train", "test"):
                convert(str(found.images / split), str(folder / split))
        (folder / "done").touch()
    return found


class Soak:
    """The disturbed run: its hosts, its driver if one lives, and what the faults need to know."""

    def __init__(self, recipe: Recipe, folder: Path, rng: random.Random, net: Network) -> None:
        """Start the hosts; `recipe` has its output in S3."""
        self.net, self.folder = net, folder
        self.hosts = {name: net.join(name) for name in ("head", "storage", *WORKERS)}
        head, storage = self.hosts["head"], self.hosts["storage"]
        self.buckets = folder / "buckets"
        for bucket in ("runs", "data"):
            (self.buckets / bucket).mkdir(parents=True, exist_ok=True)
        (folder / "home").mkdir(exist_ok=True)
        self.environment = {
            **s3_environment(S3_PORT), "AWS_ENDPOINT_URL": f"http://{storage.address}:{S3_PORT}",
            "HOME": str(folder / "home"), "PYTHONPATH": str(ROOT),
            "RAY_ADDRESS": f"{head.address}:{hosts.PORT}", **timeout(20.0),
        }  # fmt: skip
        command = [
            rclone_binary(), "serve", "s3", str(self.buckets), "--addr", f"0.0.0.0:{S3_PORT}", "-q",
            "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", "--vfs-cache-mode", "off",
            # Tests change files behind it. At 0 rclone 1.75 spins, which takes a core.
            "--dir-cache-time", "100ms",
        ]  # fmt: skip
        storage.serve("s3.log", *command, environment={"RCLONE_CONFIG": os.devnull})
        hosts.start_head(head, **self.environment, **shipped_health_checks("headGroupSpec"))
        for name in WORKERS:
            self.start_raylet(name)
        hosts.wait_for_nodes(head, 1 + len(WORKERS))
        self.recipe, self.rng = recipe, rng
        self.on_disk = recipe.with_changes(output=str(self.buckets / "runs"))
        """The same run as the server of S3 has it."""
        self.driver: subprocess.Popen[bytes] | None = None
        self.struck_s = 0.0

    def start_raylet(self, name: str) -> None:
        """On a host that has none."""
        environment = self.environment | shipped_health_checks("workerGroupSpecs")
        hosts.start_raylet(self.hosts[name], self.hosts["head"], 2, **environment)

    def start_driver(self, recipe: Recipe) -> subprocess.Popen[bytes]:
        """A pre-training on the head's host; its output is added to `NAME.log` in the folder."""
        path = self.folder / f"{recipe.name}.json"
        path.write_text(recipe.model_dump_json())
        command = [sys.executable, str(ROOT / "jobs" / "pretrain.py"), str(path)]
        log = str(self.folder / f"{recipe.name}.log")
        return self.hosts["head"].serve(log, *command, environment=self.environment)

    def wait_for_checkpoint(self) -> bool:
        """Whether a new one came, from drivers that are started as needed, before the end."""
        newest, deadline_s = self.newest_step(), time.monotonic() + PATIENCE_S
        while self.newest_step() <= newest:
            self.driver = self.driver or self.start_driver(self.recipe)
            code = self.driver.poll()
            if code == 0:
                return False
            if code is not None:
                killed = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)
                # nsenter gives the code that a shell would.
                ended = code in (STOPPED, *killed, *(128 - one for one in killed))
                if not ended and SLOW not in self.log_tail():
                    raise SystemExit(f"the driver ended with {code}: {self.log_tail()}")
                self.driver = None
            if time.monotonic() > deadline_s:
                raise SystemExit(f"no checkpoint in {PATIENCE_S:g} s: {self.log_tail()}")
            time.sleep(0.2)
        return True

    def newest_step(self) -> int:
        return max(checkpoint_steps(self.on_disk), default=-1)

    def end_driver(self, *signals: signal.Signals) -> None:
        """Send it signals, one right after the other, and wait for its end."""
        assert self.driver is not None
        self.struck_s = time.time()
        for number in signals:
            self.signal("head", number, "jobs/pretrain.py")
            time.sleep(self.rng.uniform(0.0, 0.5))
        self.driver.wait(PATIENCE_S)
        self.driver = None

    def signal(self, host: str, number: signal.Signals, words: str) -> bool:
        """Send a signal to the processes of a host whose command has these words, if any."""
        command = ("pkill", f"-{number.name[3:]}", "-f", words)
        self.struck_s = time.time()
        return self.hosts[host].run(*command)[0] == 0

    def replace_host(self, name: str, after_s: float = 0.0) -> None:
        """End a host as without power, and start it again."""
        self.hosts[name].lose()
        time.sleep(after_s)
        self.hosts[name] = self.net.join(name)
        self.start_raylet(name)

    def signal_one(self, number: signal.Signals, words: str) -> None:
        """On a host of a worker that has such a process."""
        for name in self.rng.sample(WORKERS, len(WORKERS)):
            if self.signal(name, number, words):
                return

    def newest(self) -> Path:
        return Path(self.on_disk.run_folder) / folder_name(self.newest_step())

    def log_tail(self) -> str:
        return (self.folder / f"{self.recipe.name}.log").read_text()[-1500:]


def drain_node(soak: Soak) -> None:
    """A node is taken back after a notice, and another host takes its place."""
    name = soak.rng.choice(WORKERS)
    soak.hosts["head"].run(sys.executable, "-c", _DRAIN, soak.hosts[name].address, str(NOTICE_S))
    soak.struck_s = time.time()
    # Ray ends a drained node when it is idle, and `ray start --block` does not.
    time.sleep(NOTICE_S)
    soak.replace_host(name)


def cut(soak: Soak, name: str) -> None:
    """A host cannot be reached for a while."""
    soak.hosts[name].cut()
    time.sleep(soak.rng.uniform(1.0, 60.0))
    soak.hosts[name].heal()


def kill_driver(soak: Soak) -> None:
    """In the middle of a save or not."""
    time.sleep(soak.rng.uniform(0.0, 0.5))
    soak.end_driver(signal.SIGKILL)


def damage_newest(soak: Soak) -> None:
    """A bit of the newest checkpoint flips while no driver runs."""
    soak.end_driver(signal.SIGKILL)
    file = soak.rng.choice(sorted(soak.newest().glob("*.safetensors")))
    content = bytearray(file.read_bytes())
    content[soak.rng.randrange(len(content))] ^= 1
    file.write_bytes(content)


def delete_newest(soak: Soak, files: str) -> None:
    """One of these; without the marker it is as a driver leaves it that dies before the commit."""
    soak.end_driver(signal.SIGKILL)
    soak.rng.choice(sorted(soak.newest().glob(files))).unlink()


def start_second_driver(soak: Soak) -> None:
    """It is refused, and the first continues."""
    code = soak.start_driver(soak.recipe).wait(PATIENCE_S)
    if code != 2 and soak.driver is not None and soak.driver.poll() is None:
        raise SystemExit(f"a second driver was not refused but ended with {code}")


def lock_tracking(soak: Soak) -> None:
    """MLflow's store answers nobody for a while."""
    with sqlite3.connect(soak.folder / "mlflow.db", timeout=60.0) as store:
        store.execute("BEGIN EXCLUSIVE")
        time.sleep(soak.rng.uniform(1.0, 20.0))
        store.rollback()


Fault = Callable[[Soak], object]
FAULTS: Final[dict[str, Fault]] = {
    "kill_worker": lambda soak: soak.signal_one(signal.SIGKILL, "RayTrainWorker"),
    "freeze_worker": lambda soak: soak.signal_one(signal.SIGSTOP, "RayTrainWorker"),
    "kill_recorder": lambda soak: soak.signal("head", signal.SIGKILL, "ray::RunRecords"),
    "kill_controller": lambda soak: soak.signal("head", signal.SIGKILL, "ray::TrainController"),
    "kill_stream_server": lambda s: s.signal_one(signal.SIGKILL, "ray::StreamServer"),
    # With all its workers; another one starts.
    "kill_raylet": lambda s: s.signal(s.rng.choice(WORKERS), signal.SIGKILL, "raylet/raylet"),
    "drain_node": drain_node,
    "lose_host": lambda s: s.replace_host(s.rng.choice(WORKERS), s.rng.uniform(1.0, 20.0)),
    "cut_host": lambda soak: cut(soak, soak.rng.choice(WORKERS)),
    "cut_storage": lambda soak: cut(soak, "storage"),
    "kill_driver": kill_driver,
    "terminate": lambda soak: soak.end_driver(signal.SIGTERM),
    "interrupt": lambda soak: soak.end_driver(signal.SIGINT),
    # The second one does not wait for the checkpoint.
    "terminate_twice": lambda soak: soak.end_driver(signal.SIGTERM, signal.SIGTERM),
    "damage_newest": damage_newest,
    "delete_rank_file": lambda soak: delete_newest(soak, "*.safetensors"),
    "delete_marker": lambda soak: delete_newest(soak, "commit.json"),
    "start_second_driver": start_second_driver,
    "lock_tracking": lock_tracking,
}


def soak_recipe(name: str, digits: Digits, folder: Path, num_faults: int) -> Recipe:
    """Two workers and a tiny model; three checkpoints stay, so that one may be damaged."""
    steps = STEPS_PER_FAULT * num_faults
    return small_recipe(
        name, digits, folder, optim={"steps": steps, "schedule": "constant"},
        checkpoint={"every_steps": EVERY, "keep_last": 3},
        train={"log_every_steps": EVERY, "step_timeout_s": 20.0}, workers={"max_failures": -1},
    )  # fmt: skip


def run_soak(folder: Path, num_faults: int) -> bool:
    """Whether the weights after all faults are those without any."""
    folder.mkdir(parents=True, exist_ok=True)
    digits = converted_digits(folder / "data")
    quiet = soak_recipe("quiet", digits, folder, num_faults)
    # On a Ray of its own, without faults.
    (folder / "quiet.json").write_text(quiet.model_dump_json())
    command = [sys.executable, str(ROOT / "jobs" / "pretrain.py"), str(folder / "quiet.json")]
    with open(folder / "quiet.log", "ab") as output:
        subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, check=True)
    log = folder / "faults.jsonl"
    done = log.read_text().splitlines() if log.exists() else []
    recipe = soak_recipe("disturbed", digits, folder, num_faults).with_changes(
        output="s3://runs", workers={"cpus_per_worker": 1.5}
    )
    with hosts.network() as net:
        soak, kinds = Soak(recipe, folder, random.Random(len(done)), net), list(FAULTS)
        for number in range(len(done), num_faults):
            if not soak.wait_for_checkpoint():
                raise SystemExit(f"the run was complete after {number} of {num_faults} faults")
            # Of the first ones each kind once.
            order = random.Random(number // len(kinds)).sample(kinds, len(kinds))
            fault, step = order[number % len(kinds)], soak.newest_step()
            soak.struck_s = time.time()
            FAULTS[fault](soak)
            entry = {
                "number": number, "fault": fault, "step": step,
                "struck_s": soak.struck_s, "time_s": time.time(),
            }  # fmt: skip
            with log.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            print(entry, flush=True)
        while soak.wait_for_checkpoint():
            pass
    met = Counter(json.loads(line)["fault"] for line in log.read_text().splitlines())
    is_equal = same_weights(weights_of(soak.on_disk), weights_of(quiet))
    print(f"{sum(met.values())} faults, {dict(met)}: weights equal: {is_equal}")
    return is_equal


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("folder", type=Path)
    parser.add_argument("--faults", type=int, default=200)
    given = parser.parse_args()
    sys.exit(0 if run_soak(given.folder.absolute(), given.faults) else 1)
