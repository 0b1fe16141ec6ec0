"""Faults of a run at a known step, where it waits, and the parts that its recipe names for them."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from tests.net.cluster import Command, Environment, wait_until

HOLD = {"callbacks": ["tests.net.strikes.hold"], "step_timeout_s": 8.0}
Strike = Callable[[Command, int], None]
"""Disturbs a command, or its worker with this process id."""
_passes = 0


def strike(own: Environment, folder: Path, recipe: Path, disturb: Strike) -> Command:
    """Start a run with `train` of `HOLD`, disturb it at its step 12, and let it go on."""
    held, hold = folder / "held", folder / "hold"
    held.unlink(missing_ok=True)
    hold.touch()
    try:
        command = Command(own, "pretrain", str(recipe))
        wait_until(held.exists, command.process)
        time.sleep(2.5)  # until the checkpoint of step 8 is whole
        disturb(command, int(held.read_text()))
        time.sleep(2)  # until a request to stop is at the workers
    finally:
        hold.unlink()
    return command


def stop(command: Command, worker: int) -> None:
    command.process.terminate()


def kill_driver(command: Command, worker: int) -> None:
    """And wait until its worker is gone, too."""
    command.process.kill()
    command.wait()
    deadline_s = time.monotonic() + 60
    while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline_s:
        time.sleep(0.1)


def kill_worker(command: Command, worker: int) -> None:
    os.kill(worker, signal.SIGKILL)


def hang_worker(command: Command, worker: int) -> None:
    os.kill(worker, signal.SIGSTOP)


def hold(step: int, metrics: Mapping[str, float]) -> None:
    """A callback: from step 12 on, wait while the file `hold` in `NET_HOLD` exists."""
    folder = Path(os.environ["NET_HOLD"])
    if step >= 12 and (folder / "hold").exists():
        (folder / "held").write_text(str(os.getpid()))
        while (folder / "hold").exists():
            time.sleep(0.02)


def not_finite_once(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss: cross-entropy, but for the 41st pass of a process in training."""
    global _passes
    losses = torch.nn.functional.cross_entropy(logits, labels[:, 0], reduction="none")
    if torch.is_grad_enabled():
        _passes += 1
    return losses * torch.nan if _passes == 41 and torch.is_grad_enabled() else losses
