"""Two hosts on one machine: namespaces of network and processes, with a cable between them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.net.cluster import RAY, ROOT, Environment, environment, wait_until

ADDRESSES = ("198.18.9.1", "198.18.9.2")  # RFC 2544 keeps 198.18.0.0/15 for tests of networks


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Environment, tuple[str, ...]] | None]:
    """What starts commands on the first of two hosts with Ray and 2 CPUs each; None without root.

    Yields:
        The environment, and the words before a command.
    """
    if os.geteuid() != 0:
        yield None
        return
    names = [f"vn{os.getpid()}{end}" for end in "ab"]
    own = environment(RAY_ADDRESS=f"{ADDRESSES[0]}:6379")
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="vn", dir="/tmp", ignore_cleanup_errors=True) as folder:
        try:
            for name in names:
                _ip("netns", "add", name)
            _ip("link", "add", "eth0", "netns", names[0], "type", "veth",
                "peer", "name", "eth0", "netns", names[1])  # fmt: skip
            for number, (name, address) in enumerate(zip(names, ADDRESSES, strict=True)):
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
                for device in ("lo", "eth0"):
                    _ip("-n", name, "link", "set", device, "up")
                role = ["--head", "--port=6379", f"--temp-dir={folder}"]
                words = role if number == 0 else [f"--address={own['RAY_ADDRESS']}"]
                processes.append(_start_ray(name, address, words, own, Path(folder)))
                if number == 0:
                    wait_until(lambda: _num_alive(names[0], own) == 1, processes[0])
            wait_until(lambda: _num_alive(names[0], own) == 2, processes[1])
            yield own, ("ip", "netns", "exec", names[0])
        finally:
            for process in processes:
                process.kill()  # and all processes of its host with it
                process.wait(timeout=60)
            for name in names:
                subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _start_ray(
    name: str, address: str, words: list[str], own: Environment, folder: Path
) -> subprocess.Popen[bytes]:
    host = ["ip", "netns", "exec", name, "unshare", "--pid", "--fork", "--kill-child"]
    ray = [RAY, "start", "--block", f"--node-ip-address={address}", "--num-cpus=2", "--num-gpus=0"]
    limits = ["--object-store-memory=300000000", "--disable-usage-stats"]
    with open(folder / f"{name}.log", "w") as log:
        return subprocess.Popen(
            [*host, "--mount-proc", *ray, *limits, *words],
            cwd=ROOT, env=own, stdout=log, stderr=log,
        )  # fmt: skip


def _num_alive(name: str, own: Environment) -> int:
    script = (
        "import ray; ray.init(log_to_driver=False); print(sum(n['Alive'] for n in ray.nodes()))"
    )
    done = subprocess.run(
        ["ip", "netns", "exec", name, sys.executable, "-c", script],
        cwd=ROOT, env=own, capture_output=True, text=True,
    )  # fmt: skip
    return int(done.stdout or 0)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
