"""A cluster on hosts of its own, with S3 on one more, for runs that meet cuts and other faults.

The hosts are namespaces of this machine (`tests/hosts.py`): one has Ray's head and the drivers, one
serves S3 (rclone), and three have room for a worker each. The health checks of the head are those
of `cluster/rayjob.yaml`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import yaml

from tests import hosts
from tests.conftest import ROOT, Digits
from tests.data.converting import convert, in_this_process
from tests.data.s3_server import ACCESS_KEY, SECRET_KEY, rclone_binary, s3_environment
from tests.hosts import Network
from vit_ray.config import Recipe
from vit_ray.data.convert.digits import write_digits

WORKERS: Final = ("first", "second", "third")
S3_PORT: Final = 9000


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


class HostCluster:
    """Five hosts, and drivers on the head's."""

    def __init__(self, net: Network, folder: Path, **environment: str) -> None:
        """Start them all; the folder gets `buckets`, `home` of Ray and drivers, and logs."""
        self.net, self.folder = net, folder
        self.hosts = {name: net.join(name) for name in ("head", "storage", *WORKERS)}
        head, storage = self.hosts["head"], self.hosts["storage"]
        self.buckets = folder / "buckets"
        for bucket in ("runs", "data"):
            (self.buckets / bucket).mkdir(parents=True, exist_ok=True)
        (folder / "home").mkdir(exist_ok=True)
        self.environment = {
            **s3_environment(S3_PORT),
            "AWS_ENDPOINT_URL": f"http://{storage.address}:{S3_PORT}",
            "HOME": str(folder / "home"),
            "PYTHONPATH": str(ROOT),
            "RAY_ADDRESS": f"{head.address}:{hosts.PORT}",
            **environment,
        }
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
        self.wait_for_nodes()

    def start_raylet(self, name: str) -> None:
        """On a host that has none."""
        environment = self.environment | shipped_health_checks("workerGroupSpecs")
        hosts.start_raylet(self.hosts[name], self.hosts["head"], 2, **environment)

    def wait_for_nodes(self) -> None:
        """Until every host is one, those that were cut off, too."""
        hosts.wait_for_nodes(self.hosts["head"], 1 + len(WORKERS))

    def start_driver(self, recipe: Recipe) -> subprocess.Popen[bytes]:
        """A pre-training on the head's host; its output is added to `NAME.log` in the folder."""
        path = self.folder / f"{recipe.name}.json"
        path.write_text(recipe.model_dump_json())
        command = [sys.executable, str(ROOT / "jobs" / "pretrain.py"), str(path)]
        log = str(self.folder / f"{recipe.name}.log")
        return self.hosts["head"].serve(log, *command, environment=self.environment)
