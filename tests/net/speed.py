"""How fast this tree is beside another revision: the same measurements in both, in turn.

    python -m tests.net speed REV [MEASURE ...]

A measurement is a command or two that users have, on data that its own tree has converted. The
ratio is of the figures of one round, this tree's by the other's: its median, least and greatest.
"""

import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.net import cluster
from tests.net.cluster import Command, Environment, wait_until
from tests.net.commands import words
from tests.net.sets import convert_digits, in_classes, photographs, write_files, write_recipe
from tests.net.store import points, runs_of, values
from tests.net.strikes import HOLD, kill_driver, kill_worker, strike
from tests.net.trees import HERE, ROOT, Tree, checkout

ROUNDS = 3
IMAGES = 2_000
S3 = {
    "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1",
    "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required", "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required", "RCLONE_CONFIG": "/dev/null",
}  # fmt: skip
Figures = dict[str, float]


def stream(folder: Path, own: Environment, data: str = "") -> Figures:
    """A training that only waits for its 224 px crops: its rate after the first 20 steps.

    Reading is ahead of it, by as much as fits into the object store, so only the whole counts.
    """
    data = data or f"{folder}/set"
    convert(folder, own, data)
    recipe = write_recipe(
        folder, "stream",
        model={"image_size": 224, "patch_size": 112, "representation": False},
        data={"train": data, "eval": None, "augment": {"kind": "inception_crop"}},
        train={
            "global_batch_size": 128, "micro_batch_size": 128, "averaging": 0.0,
            "log_every_steps": 20,
        },
        workers={"num_workers": 1}, checkpoint={"every_steps": None}, optim={"steps": 240},
    )  # fmt: skip
    Command(own, "pretrain", str(recipe)).must_end()
    rates = points(folder, *runs_of(folder, "stream"), "train/images_per_s")
    whole = [rate for step, rate in rates if step > 20 and step % 20 == 0]
    return {"images/s": statistics.harmonic_mean(whole)}


def stream_s3(folder: Path, own: Environment) -> Figures:
    """The same from an S3 server, whose buckets are folders."""
    (port,) = cluster.free_ports(1)
    own = {**own, **S3, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    (folder / "s3" / "net").mkdir(parents=True)
    command = [str(Path(sys.executable).with_name("rclone")), "serve", "s3", f"{folder}/s3", "-q"]
    command += [f"--addr=127.0.0.1:{port}", "--auth-key=key,secret"]
    server = subprocess.Popen(command, env=own, stderr=subprocess.DEVNULL)
    try:
        wait_until(functools.partial(cluster.is_open, port), server)
        return stream(folder, own, "s3://net/set")
    finally:
        server.terminate()
        server.wait()


def stream_scale(_: Path, own: Environment) -> Figures:
    """CPU time of the stream server for 128 images."""
    command = [sys.executable, "benchmarks/stream_scale.py", "--ranks", "8,64", "--seconds", "8"]
    output = subprocess.check_output(command, cwd=ROOT, env=own, text=True)
    rows = [line.strip("| ").split(" | ") for line in output.splitlines()]
    return {f"ms, {row[0]} ranks": float(row[2]) for row in rows if row[0] in ("8", "64")}


def checkpoint_stall(folder: Path, own: Environment) -> Figures:
    """What a checkpoint of 28 million parameters on two workers holds up."""
    convert_digits(folder, own)
    recipe = write_recipe(
        folder, "stall",
        model={"depth": 4, "width": 768, "mlp_dim": 3072, "num_heads": 12},
        checkpoint={"every_steps": 5, "keep_last": 2}, optim={"steps": 26},
    )  # fmt: skip
    Command(own, "pretrain", str(recipe)).must_end()
    return {"s": statistics.median(values(folder, "stall", "checkpoint/stall_s"))}


def fault_recovery(folder: Path, _: Environment) -> Figures:
    """From two seconds after a worker's or the driver's death to the end of the run."""
    found = {}
    with cluster.ray_head(NET_HOLD=str(folder)) as own:
        convert_digits(folder, own)
        for struck, kill in (("worker", kill_worker), ("driver", kill_driver)):
            recipe = write_recipe(folder, struck, train=HOLD)
            command = strike(own, folder, recipe, kill)
            start_s = time.monotonic()
            if struck == "driver":
                command = Command(own, "pretrain", str(recipe))
            command.must_end()
            found[f"{struck}, s"] = time.monotonic() - start_s
    return found


def start(folder: Path, own: Environment) -> Figures:
    """From command to prompt: 24 tiny steps on two workers, on a Ray of its own."""
    convert_digits(folder, own)
    return _timed(folder, own, "pretrain", str(write_recipe(folder, "start")))


def convert(folder: Path, own: Environment, target: str = "set") -> Figures:
    """Photographs from class folders, on a Ray of its own."""
    found = [*photographs().values()]
    images = {f"{number:05d}.jpg": found[number % len(found)] for number in range(IMAGES)}
    write_files(folder / "photographs", in_classes(images, 10))
    return _timed(folder, own, *words("convert", source="photographs", destination=target))


def quickstart(folder: Path, own: Environment) -> Figures:
    """The whole of it, with fewer epochs."""
    return _timed(folder, own, "quickstart", "digits", "optim.epochs=3")


def sweep(folder: Path, own: Environment) -> Figures:
    """Four rates of 30 steps from random weights, and a retraining."""
    convert_digits(folder, own)
    recipe = write_recipe(
        folder, "sweep", workers={"num_workers": 1}, optim={"steps": 30},
        sweep={"learning_rates": [0.001, 0.003, 0.01, 0.03], "dev_fraction": 0.2, "seeds": 1},
    )  # fmt: skip
    return _timed(folder, own, "sweep", str(recipe))


def _timed(folder: Path, own: Environment, *words: str) -> Figures:
    start_s = time.monotonic()
    Command(own, *words, cwd=folder).must_end()
    return {"s": time.monotonic() - start_s}


_ALL: tuple[Callable[[Path, Environment], Figures], ...] = (
    stream, stream_s3, stream_scale, checkpoint_stall, fault_recovery, start, convert,
    quickstart, sweep,
)  # fmt: skip
MEASURES = {one.__name__: one for one in _ALL}


def run(names: list[str]) -> int:
    """Print a row for each figure of each measurement."""
    revision, *measures = names
    other = checkout(revision)
    print(f"| figure | {revision} | here | ratio | least | greatest |", flush=True)
    print("|---|---|---|---|---|---|", flush=True)
    for name in measures or MEASURES:
        rounds: list[dict[Tree, Figures]] = []
        for turn in range(ROUNDS):
            rounds.append({})
            for tree in (other, HERE) if turn % 2 == 0 else (HERE, other):
                command = [tree.python, "-m", "tests.net.speed", name]
                output = subprocess.check_output(command, cwd=tree.folder, env=tree.environment())
                rounds[-1][tree] = json.loads(output.splitlines()[-1])
                print(f"{name} in {tree.folder}: {rounds[-1][tree]}", file=sys.stderr, flush=True)
        for figure in rounds[0][HERE]:
            there, here = ([one[tree][figure] for one in rounds] for tree in (other, HERE))
            ratios = [after / before for before, after in zip(there, here, strict=True)]
            row = [*map(statistics.median, (there, here, ratios)), min(ratios), max(ratios)]
            print(f"| {name}, {figure} |", " | ".join(f"{one:.3g}" for one in row), "|", flush=True)
    return 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="net-speed-") as scratch:
        print(json.dumps(MEASURES[sys.argv[1]](Path(scratch), cluster.environment())))
