"""What each fault leaves: exit code, steps, points of the loss, files; no wording."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

from tests.net.cluster import Command, ray_head
from tests.net.sets import convert_digits, write_recipe
from tests.net.store import curves, runs_of
from tests.net.strikes import HOLD, Strike, hang_worker, kill_driver, kill_worker, stop, strike

ALONE = {"workers": {"num_workers": 1}}


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with ray_head(NET_HOLD=str(folder)) as own:
        convert_digits(folder, own)

        def note(fault: str, recipe: Path, disturb: Strike | None = None) -> None:
            if disturb is None:
                command = Command(own, "pretrain", str(recipe))
            else:
                command = strike(own, folder, recipe, disturb)
            found[fault] = {"exit code": command.wait(), **_left(folder, recipe.stem)}

        held = write_recipe(folder, "SIGTERM", train=HOLD, **ALONE)
        note("SIGTERM", held, stop)
        note("same command after SIGTERM", held)
        note("same command after the end", held)
        held = write_recipe(folder, "driver-killed", train=HOLD, **ALONE)
        note("driver killed", held, kill_driver)
        note("same command after the driver was killed", held)
        note("worker killed", write_recipe(folder, "worker-killed", train=HOLD), kill_worker)
        note("worker hangs", write_recipe(folder, "worker-hangs", train=HOLD), hang_worker)

        for policy in ("stop", "skip"):
            loss = {"loss": "tests.net.strikes.not_finite_once", "nonfinite": policy}
            poisoned = write_recipe(folder, f"not-finite-{policy}", train=loss, **ALONE)
            note(f"not finite, {policy}", poisoned)

        held = write_recipe(folder, "damaged", train=HOLD, **ALONE)
        note("SIGTERM before the damage", held, stop)
        shard = max((folder / "runs" / "damaged").glob("step-*/*.safetensors"))  # the newest
        content = bytearray(shard.read_bytes())
        content[-8] ^= 1
        shard.write_bytes(content)
        note("newest checkpoint damaged", held)

        no_room = write_recipe(folder, "no-room", **ALONE)
        (folder / "runs" / "no-room").mkdir()
        (folder / "runs" / "no-room" / "step-00000008").write_text("in the folder's place")
        note("checkpoint cannot be written", no_room)
        away = {"uri": "http://127.0.0.1:9"}  # nothing listens there
        note("MLflow away", write_recipe(folder, "untracked", tracking=away, **ALONE))
        absent = {"train": f"{folder}/absent"}
        note("no data set", write_recipe(folder, "without-data", data=absent))
    return found


def _left(folder: Path, name: str) -> dict[str, Any]:
    """Of a run: its files by kind, and its points in MLflow."""
    place = folder / "runs" / name
    files = sorted(path.name for path in place.iterdir()) if place.exists() else []
    runs = runs_of(folder, name)
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
