"""What each fault leaves: exit code, steps, points of the loss, files; no wording."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.net.cluster import (
    Command,
    Environment,
    convert_digits,
    ray_head,
    wait_until,
    write_recipe,
)
from tests.net.parts.runs import holding, kill_driver
from tests.net.store import curves, runs_of

HOLD = {"train": {"callbacks": ["tests.net.hooks.hold"], "step_timeout_s": 8.0}}
ALONE = {"workers": {"num_workers": 1}}


def record(folder: Path) -> dict[str, Any]:
    """What is left, by fault."""
    found: dict[str, Any] = {}
    with ray_head(NET_HOLD=str(folder)) as own:
        convert_digits(own, folder)

        def note(fault: str, recipe: Path) -> None:
            code, _ = Command(own, "pretrain", str(recipe)).wait()
            found[fault] = {"exit code": code, **_left(folder, recipe.stem)}

        def struck(fault: str, strike: Callable[[Command, int], None], **changes: Any) -> Path:
            recipe = write_recipe(folder, fault.replace(" ", "-"), **HOLD, **changes)
            code = _strike(own, folder, recipe, strike)
            found[fault] = {"exit code": code, **_left(folder, recipe.stem)}
            return recipe

        stopped = struck("SIGTERM", lambda command, _: command.process.terminate(), **ALONE)
        note("same command after SIGTERM", stopped)
        note("same command after the end", stopped)
        cut = struck("driver killed", kill_driver, **ALONE)
        note("same command after the driver was killed", cut)
        struck("worker killed", lambda _, pid: os.kill(pid, signal.SIGKILL))
        struck("worker hangs", lambda _, pid: os.kill(pid, signal.SIGSTOP))

        for policy in ("stop", "skip"):
            loss = {"loss": "tests.net.hooks.not_finite_once", "nonfinite": policy}
            note(
                f"not finite, {policy}",
                write_recipe(folder, f"not-finite-{policy}", train=loss, **ALONE),
            )
        damaged = folder / "not-finite-skip.yaml"
        shards = (folder / "runs" / damaged.stem).glob("step-*/*.safetensors")
        shard = max(shards)  # of the newest checkpoint
        content = bytearray(shard.read_bytes())
        content[-8] ^= 1
        shard.write_bytes(content)
        note("newest checkpoint damaged", damaged)

        no_room = write_recipe(folder, "no-room", **ALONE)
        (folder / "runs" / "no-room").mkdir()
        (folder / "runs" / "no-room" / "step-00000008").write_text("in the folder's place")
        note("checkpoint cannot be written", no_room)
        away = {"uri": "http://127.0.0.1:9"}  # nothing listens there
        note("MLflow away", write_recipe(folder, "untracked", tracking=away, **ALONE))
        absent = {"train": f"{folder}/absent"}
        note("no data set", write_recipe(folder, "without-data", data=absent))
    return found


def _strike(
    own: Environment, folder: Path, recipe: Path, strike: Callable[[Command, int], None]
) -> int:
    """Disturb a run that waits at its step 12; its exit code."""
    command = Command(own, "pretrain", str(recipe))
    with holding(folder):
        wait_until((folder / "held").exists, command.process)
        time.sleep(1)  # until the checkpoint of step 8 is whole
        strike(command, int((folder / "held").read_text()))
        time.sleep(2)  # until the request to stop is at the workers
    return command.wait()[0]


def _left(folder: Path, name: str) -> dict[str, Any]:
    """Of a run: its files by kind, and its points in MLflow."""
    place = folder / "runs" / name
    files = sorted(path.name for path in place.iterdir()) if place.exists() else []
    runs = [run for run in runs_of(folder) if run.info.run_name == name]
    losses = [point for run in runs for point in curves(folder, run).get("train/loss", [])]
    steps = Counter(point.split()[0] for point in losses)
    return {
        "checkpoints": [path for path in files if re.fullmatch(r"step-\d+(\.\w+)?", path)],
        "other files": sorted(
            {re.sub(r"\d{4,}", "N", path) for path in files if not path.startswith("step-")}
        ),
        "MLflow runs": [run.info.status for run in runs],
        "losses": losses,
        "steps that are there twice": [step for step, count in steps.items() if count > 1],
    }
