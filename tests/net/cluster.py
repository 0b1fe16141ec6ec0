"""A Ray head of its own as a process, commands on it as processes, and the digits as a data set."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

ROOT = Path(__file__).parents[2]
BASE_RECIPE = Path(__file__).with_name("recipe.json")
RAY = str(Path(sys.executable).parent / "ray")
Environment = dict[str, str]
_commands: list[subprocess.Popen[Any]] = []


def environment(**changes: str) -> Environment:
    """For commands: this tree, CPUs alone, one thread a process, a Ray with a token."""
    fixed = {
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "NO_PROXY": "127.0.0.1,localhost",
    }
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return {**kept, **fixed, **changes}


def free_ports(count: int) -> list[int]:
    """Different ports that were free just now, outside the ranges of Ray and of Linux."""
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        while len(ports) < count:
            probe, port = held.enter_context(socket.socket()), 20_000 + secrets.randbelow(12_000)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                ports.append(port)
        return ports


@contextlib.contextmanager
def ray_head(num_cpus: int = 4, **changes: str) -> Iterator[Environment]:
    """The environment of commands on a Ray head, which ends with the block.

    `changes`: of the head's environment, which its workers inherit.
    """
    folder = Path(tempfile.mkdtemp(prefix="vn", dir="/tmp"))  # names of sockets must be short
    names = [
        "port", "dashboard-port", "ray-client-server-port", "dashboard-agent-listen-port",
        "dashboard-agent-grpc-port", "metrics-export-port",
    ]  # fmt: skip
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    words = [f"--{name}={port}" for name, port in ports.items()]
    words += [f"--num-cpus={num_cpus}", "--num-gpus=0", "--object-store-memory=600000000"]
    words += [f"--temp-dir={folder}", "--disable-usage-stats"]
    own = environment(**changes)
    with open(folder / "head.log", "w") as log:
        process = subprocess.Popen(
            [RAY, "start", "--head", "--block", *words],
            cwd=ROOT, env=own, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        for name in ("port", "dashboard-port"):
            wait_until(lambda name=name: is_open(ports[name]), process)  # type: ignore[misc]
        yield {**own, "RAY_ADDRESS": f"127.0.0.1:{ports['port']}"}
    finally:
        for command in _commands:  # none is left, unless something failed
            command.kill()
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=4)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


def is_open(port: int) -> bool:
    """Whether something on this machine listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until(
    condition: Callable[[], bool], process: subprocess.Popen[Any], limit_s: float = 300
) -> None:
    """Poll until the condition holds; fails if the process ends first."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise TimeoutError(f"{process.args}: exit code {process.poll()}, in {limit_s} s")
        time.sleep(0.05)


class Command:
    """`vit-ray WORDS` as a process of this tree."""

    def __init__(
        self, own: Environment, *words: str, prefix: tuple[str, ...] = (), cwd: Path = ROOT
    ) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "vit_ray", *words],
            cwd=cwd, env=own, stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        _commands.append(self.process)

    def wait(self, limit_s: float = 300) -> tuple[int, str]:
        """Exit code and output."""
        code = self.process.wait(limit_s)
        self._log.seek(0)
        return code, self._log.read()


def run(own: Environment, *words: str, limit_s: float = 300) -> str:
    """The output of `vit-ray WORDS`, which must succeed."""
    code, output = Command(own, *words).wait(limit_s)
    if code != 0:
        raise RuntimeError(f"vit-ray {' '.join(words)}: exit code {code}\n{output[-4000:]}")
    return output


def write_digits(folder: Path) -> None:
    """1,797 images of scikit-learn as `SPLIT/CLASS/NUMBER.png`, each sixth in `test`."""
    found = load_digits()
    for number, (image, label) in enumerate(zip(found.images, found.target, strict=True)):
        place = folder / ("train" if number % 6 else "test") / str(label)
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.repeat(np.repeat(np.uint8(image * 255 / 16), 4, axis=0), 4, axis=1)
        Image.fromarray(pixels).save(place / f"{number:04d}.png")


def convert_digits(own: Environment, folder: Path) -> None:
    """The digits as the data sets `folder/train` and `folder/test`."""
    write_digits(folder / "images")
    for split in ("train", "test"):
        run(
            own, "convert", str(write_recipe(folder, f"convert-{split}")),
            f"convert.source={folder}/images/{split}", f"convert.destination={folder}/{split}",
            "convert.rows_per_row_group=32",
        )  # fmt: skip


def write_recipe(folder: Path, name: str, **sections: dict[str, Any]) -> Path:
    """Two workers, ZeRO 2, a tiny ViT, 24 steps (`recipe.json`), with changes by section.

    `folder` holds the data sets, the runs and MLflow's file.
    """
    text = BASE_RECIPE.read_text().replace("FOLDER", str(folder)).replace("NAME", name)
    recipe: dict[str, Any] = json.loads(text)
    for section, changes in sections.items():
        recipe[section] = {**recipe.get(section, {}), **changes}
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(recipe))  # JSON is YAML
    return path
