"""Final weights and curves of six real runs on the digits."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import vit_ray
from tests.net.cluster import Command, convert_digits, ray_head, run, wait_until, write_recipe
from tests.net.hosts import two_hosts
from tests.net.store import named


def record(folder: Path) -> dict[str, Any]:
    """Weights by tensor, and points by metric, of each run."""
    with ray_head(NET_HOLD=str(folder)) as own:
        convert_digits(own, folder)
        one = {"workers": {"num_workers": 1}, "train": {"zero_stage": 0}}
        run(own, "pretrain", str(write_recipe(folder, "one-worker", **one)))
        run(own, "pretrain", str(write_recipe(folder, "two-workers")))
        fits_once = {"num_workers": [1, 2], "cpus_per_worker": 3}
        run(own, "pretrain", str(write_recipe(folder, "elastic", workers=fits_once)))

        held = write_recipe(folder, "killed", train={"callbacks": ["tests.net.hooks.hold"]})
        with holding(folder):
            command = Command(own, "pretrain", str(held))
            wait_until((folder / "held").exists, command.process)
            kill_driver(command, int((folder / "held").read_text()))
        other = ["workers.num_workers=1", "train.zero_stage=1"]
        run(own, "pretrain", str(held), *other)

        tuned = write_recipe(
            folder, "fine-tuned", model={"image_size": 32, "representation": False},
            optim={"name": "sgd", "learning_rate": 0.03, "weight_decay": 0.0, "steps": 12},
            train={"averaging": 0.0, "zero_stage": 3},
        )  # fmt: skip
        run(own, "finetune", str(tuned), f"init_from={folder}/runs/two-workers")
    names = ["one-worker", "two-workers", "elastic", "killed", "fine-tuned"]
    with two_hosts() as found:
        if found is not None:
            own, prefix = found
            far = write_recipe(folder, "two-hosts", workers={"cpus_per_worker": 1.5})
            code, output = Command(own, "pretrain", str(far), prefix=prefix).wait()
            assert code == 0, output[-4000:]
            names.append("two-hosts")
    recorded = {name: _recorded(folder, name) for name in names}
    return {"two-hosts": "no namespaces", **recorded}


@contextlib.contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Within the block, a run with the callback `hold` waits at its step 12."""
    (folder / "held").unlink(missing_ok=True)
    (folder / "hold").touch()
    try:
        yield
    finally:
        (folder / "hold").unlink(missing_ok=True)


def kill_driver(command: Command, worker: int) -> None:
    """Kill a driver with -9, and wait until its worker that is held is gone, too."""
    command.process.kill()
    command.wait()
    deadline_s = time.monotonic() + 60
    while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline_s:
        time.sleep(0.1)


def _recorded(folder: Path, name: str) -> dict[str, Any]:
    weights = vit_ray.load(f"{folder}/runs/{name}").model.state_dict()
    digests = [
        f"{tuple(tensor.shape)} {hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:12]}"
        for tensor in weights.values()
    ]
    return {"weights": sorted(digests), "curves": named(folder, name)}
