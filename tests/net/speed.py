"""How fast this tree is beside another revision: the same measurements in both, in turn.

    python -m tests.net speed REV [MEASURE ...]

A measurement is a command or two that users have, on data that its own tree has converted. The
ratio is of the figures of one round, this tree's by the other's: its median, least and greatest.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import boto3

from tests.net import cluster
from tests.net.cluster import Command, Environment, convert_digits, wait_until, write_recipe
from tests.net.parts.runs import holding, kill_driver
from tests.net.sets import photographs
from tests.net.store import values
from tests.net.trees import HERE, Tree, checkout

ROUNDS = 3
IMAGES = 2_000
Figures = dict[str, float]


def stream(folder: Path, own: Environment, data: str = "") -> Figures:
    """A training that only waits for its 224 px crops."""
    data = data or f"{folder}/set"
    _convert_photographs(folder, own, data)
    recipe = write_recipe(
        folder, "stream",
        model={"image_size": 224, "patch_size": 112, "representation": False},
        data={"train": data, "eval": None, "augment": {"kind": "inception_crop"}},
        train={"global_batch_size": 128, "micro_batch_size": 128, "averaging": 0.0},
        workers={"num_workers": 1}, checkpoint={"every_steps": None}, optim={"steps": 120},
    )  # fmt: skip
    cluster.run(own, "pretrain", str(recipe), "train.log_every_steps=20")
    return {"images/s": statistics.median(values(folder, "stream", "train/images_per_s")[1:])}


def stream_s3(folder: Path, own: Environment) -> Figures:
    """The same from an S3 server."""
    (port,) = cluster.free_ports(1)
    place, region = f"http://127.0.0.1:{port}", "us-east-1"
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    where = {"AWS_ENDPOINT_URL": place, "AWS_REGION": region, "AWS_DEFAULT_REGION": region}
    os.environ.update({**keys, **where})
    command = [str(Path(sys.executable).parent / "moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(functools.partial(cluster.is_open, port), server)
        boto3.client("s3").create_bucket(Bucket="net")
        return stream(folder, {**own, **keys, **where}, "s3://net/set")
    finally:
        server.terminate()
        server.wait()


def stream_scale(_: Path, own: Environment) -> Figures:
    """CPU time of the stream server for 128 images."""
    command = [sys.executable, "benchmarks/stream_scale.py", "--ranks", "8,64", "--seconds", "8"]
    output = subprocess.check_output(command, cwd=cluster.ROOT, env=own, text=True)
    rows = [line.strip("| ").split(" | ") for line in output.splitlines()]
    return {f"ms, {row[0]} ranks": float(row[2]) for row in rows if row[0] in ("8", "64")}


def checkpoint_stall(folder: Path, own: Environment) -> Figures:
    """What a checkpoint of 28 million parameters on two workers holds up."""
    convert_digits(own, folder)
    recipe = write_recipe(
        folder, "stall",
        model={"depth": 4, "width": 768, "mlp_dim": 3072, "num_heads": 12},
        checkpoint={"every_steps": 5, "keep_last": 2}, optim={"steps": 26},
    )  # fmt: skip
    cluster.run(own, "pretrain", str(recipe))
    return {"s": statistics.median(values(folder, "stall", "checkpoint/stall_s"))}


def fault_recovery(folder: Path, _: Environment) -> Figures:
    """From a worker's or the driver's death to the end of the run."""
    found = {}
    with cluster.ray_head(NET_HOLD=str(folder)) as own:
        convert_digits(own, folder)
        for struck in ("worker", "driver"):
            hold = {"callbacks": ["tests.net.hooks.hold"]}
            recipe = str(write_recipe(folder, struck, train=hold))
            command = Command(own, "pretrain", recipe)
            with holding(folder):
                wait_until((folder / "held").exists, command.process)
                time.sleep(1)  # until the checkpoint of step 8 is whole
                start_s, worker = time.monotonic(), int((folder / "held").read_text())
                if struck == "worker":
                    os.kill(worker, signal.SIGKILL)
                else:
                    kill_driver(command, worker)
                    command = Command(own, "pretrain", recipe)
            assert command.wait()[0] == 0
            found[f"{struck}, s"] = time.monotonic() - start_s
    return found


def start(folder: Path, own: Environment) -> Figures:
    """From command to prompt: 24 tiny steps on two workers, on a Ray of its own."""
    convert_digits(own, folder)
    return _timed(own, "pretrain", str(write_recipe(folder, "start")))


def convert(folder: Path, own: Environment) -> Figures:
    """Photographs from class folders, on a Ray of its own."""
    return _convert_photographs(folder, own, f"{folder}/set")


def quickstart(folder: Path, own: Environment) -> Figures:
    """The whole of it, with fewer epochs."""
    return _timed(own, "quickstart", "digits", "optim.epochs=3", cwd=folder)


def sweep(folder: Path, own: Environment) -> Figures:
    """Four rates of 30 steps from random weights, and a retraining."""
    convert_digits(own, folder)
    recipe = write_recipe(
        folder, "sweep", workers={"num_workers": 1}, optim={"steps": 30},
        sweep={"learning_rates": [0.001, 0.003, 0.01, 0.03], "dev_fraction": 0.2, "seeds": 1},
    )  # fmt: skip
    return _timed(own, "sweep", str(recipe))


_ALL: tuple[Callable[[Path, Environment], Figures], ...] = (
    stream, stream_s3, stream_scale, checkpoint_stall, fault_recovery, start, convert,
    quickstart, sweep,
)  # fmt: skip
MEASURES = {one.__name__: one for one in _ALL}


def run(words: list[str]) -> int:
    """Print a row for each figure of each measurement."""
    other, names = checkout(words[0]), words[1:] or list(MEASURES)
    print(f"| figure | {words[0]} | here | ratio | least | greatest |\n|---|---|---|---|---|---|")
    for name in names:
        rounds = []
        for turn in range(ROUNDS):
            trees = [other, HERE] if turn % 2 == 0 else [HERE, other]
            figures = {tree.folder: _apart(tree, name) for tree in trees}
            rounds.append((figures[other.folder], figures[HERE.folder]))
        for figure in rounds[0][1]:
            there, here = ([one[side][figure] for one in rounds] for side in (0, 1))
            ratios = [after / before for before, after in zip(there, here, strict=True)]
            row = [*map(statistics.median, (there, here, ratios)), min(ratios), max(ratios)]
            print(f"| {name}, {figure} |", " | ".join(f"{one:.3g}" for one in row), "|", flush=True)
    return 0


def _apart(tree: Tree, name: str) -> Figures:
    """A measurement in a process of the tree, which prints it as its last line."""
    command = [tree.python, "-m", "tests.net.speed", name]
    output = subprocess.check_output(command, cwd=tree.folder, env=tree.environment())
    figures: Figures = json.loads(output.splitlines()[-1])
    return figures


def _timed(own: Environment, *words: str, cwd: Path = cluster.ROOT) -> Figures:
    start_s = time.monotonic()
    code, output = Command(own, *words, cwd=cwd).wait(900)
    assert code == 0, output[-4000:]
    return {"s": time.monotonic() - start_s}


def _convert_photographs(folder: Path, own: Environment, target: str) -> Figures:
    found = [*photographs().values()]
    for number in range(IMAGES):
        place = folder / "photographs" / str(number % 10)
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:05d}.jpg").write_bytes(found[number % len(found)])
    words = [f"convert.source={folder}/photographs", f"convert.destination={target}"]
    return _timed(own, "convert", str(write_recipe(folder, "convert")), *words)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="net-speed-") as scratch:
        print(json.dumps(MEASURES[sys.argv[1]](Path(scratch), cluster.environment())))
