"""What a small job takes to start and to end, beside a bare Ray job and torchrun.

    python benchmarks/start_up.py [--rounds 3] [--out FILE.md]

Twenty tiny steps on two workers from command to prompt, three ways in alternating rounds:
this project's `jobs/pretrain.py`; Ray Train with Ray Data and a linear layer, no tracking, no
checkpoint, no evaluation; and DeepSpeed under torchrun, which has no data stream either.

CPU seconds are of every process that the command starts, also of those that leave its process
group: they are found by a mark in their environment, and looked at ten times a second. Run it on a
quiet machine.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.result import finish, header, machine, measure_rounds

ROOT = Path(__file__).parents[1]
STEPS, BATCH, SIDE = 20, 128, 16
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
LIMIT_S = 300
"""Longer than any of the commands may take."""

BARE_RAY = f"""
import numpy as np, ray, ray.data, ray.train, torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

def images(rows):
    n = len(rows["id"])
    return {{"image": np.zeros((n, {SIDE}, {SIDE}, 3), np.uint8), "label": rows["id"] % 10}}

def train(config):
    model = prepare_model(torch.nn.Linear({SIDE} * {SIDE} * 3, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    shard = ray.train.get_dataset_shard("train")
    for batch in shard.iter_torch_batches(batch_size={BATCH // 2}):
        loss = torch.nn.functional.cross_entropy(
            model(batch["image"].flatten(1).float() / 255), batch["label"]
        )
        loss.backward(); optimizer.step(); optimizer.zero_grad()

ray.init(address="local", num_cpus=4, log_to_driver=False)
data = ray.data.range({STEPS * BATCH}).map_batches(images, batch_size={BATCH})
TorchTrainer(
    train, datasets={{"train": data}}, scaling_config=ScalingConfig(num_workers=2)
).fit()
"""

TORCHRUN = f"""
import os, torch, deepspeed
model = torch.nn.Linear({SIDE} * {SIDE} * 3, 10)
config = {{"train_micro_batch_size_per_gpu": {BATCH // 2}, "zero_optimization": {{"stage": 1}},
          "zero_allow_untested_optimizer": True}}
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config
)
for _ in range({STEPS}):
    loss = engine(torch.zeros({BATCH // 2}, {SIDE} * {SIDE} * 3)).square().mean()
    engine.backward(loss); engine.step()
torch.distributed.destroy_process_group()
"""


@dataclass
class Process:
    """What was seen of one process."""

    cpu_s: float = 0.0
    peak_mib: float = 0.0


@dataclass
class Measured:
    """One command, from its start to the prompt."""

    wall_s: float
    processes: list[Process] = field(default_factory=list)
    output: str = ""

    @property
    def cpu_s(self) -> float:
        return sum(process.cpu_s for process in self.processes)

    @property
    def peak_mib(self) -> float:
        """Of all processes, each at its own peak."""
        return sum(process.peak_mib for process in self.processes)


def measure(command: list[str], folder: Path) -> Measured:
    """Run a command in a folder and watch every process that carries its mark."""
    mark = uuid.uuid4().hex
    environment = {**os.environ, "START_UP_MARK": mark, "PYTHONPATH": str(ROOT)}
    environment.setdefault("DS_ACCELERATOR", "cpu")
    environment.pop("RAY_ADDRESS", None)
    log = folder / f"{mark}.log"
    start_s = time.perf_counter()
    found: dict[int, Process] = {}
    with open(log, "w") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        while process.poll() is None:
            if time.perf_counter() - start_s > LIMIT_S:
                process.terminate()
            look(mark.encode(), found)
            time.sleep(0.1)
    wall_s = time.perf_counter() - start_s
    if process.returncode:
        raise SystemExit(f"{command} failed:\n{log.read_text()[-3000:]}")
    return Measured(wall_s, list(found.values()), log.read_text())


def look(mark: bytes, found: dict[int, Process]) -> None:
    """Update what is known of the marked processes that are there now."""
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            if pid not in found and mark not in Path(f"/proc/{pid}/environ").read_bytes():
                continue
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        process = found.setdefault(pid, Process())
        process.cpu_s = (int(stat[11]) + int(stat[12])) / TICKS
        process.peak_mib = max(process.peak_mib, int(stat[21]) * PAGE / 2**20)


def run_ours(folder: Path) -> Measured:
    return measure(
        [
            sys.executable, str(ROOT / "jobs" / "pretrain.py"), str(folder / "tiny.yaml"),
            f"name=run-{uuid.uuid4().hex[:6]}",
        ],
        folder,
    )  # fmt: skip


def run_bare(folder: Path) -> Measured:
    return measure([sys.executable, "-c", BARE_RAY], folder)


def run_torchrun(folder: Path) -> Measured:
    script = folder / "bare_deepspeed.py"
    script.write_text(TORCHRUN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    return measure([*torchrun, "--standalone", str(script)], folder)


def prepare(folder: Path) -> None:
    """Digits, converted, and the recipe."""
    import ray
    import ray.data

    from vit_ray.config.command_sections import ConvertConfig
    from vit_ray.data.convert.conversion import convert
    from vit_ray.data.convert.digits import write_digits

    write_digits(folder / "images")
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    places = {"source": f"{folder}/images/train", "destination": f"{folder}/train"}
    convert(ConvertConfig(**places, rows_per_row_group=32))
    ray.shutdown()
    tree = {
        "name": "tiny", "output": str(folder / "runs"),
        "model": {
            "name": "ViT", "image_size": SIDE, "depth": 1, "width": 32, "mlp_dim": 64,
            "num_heads": 2, "patch_size": 4,
        },
        "data": {
            "train": str(folder / "train"), "augment": {"flip": False},
            "eval_augment": {"kind": "resize"},
        },
        "optim": {"steps": STEPS, "learning_rate": 1e-3},
        "train": {"global_batch_size": BATCH, "micro_batch_size": 64, "precision": "fp32"},
        "workers": {"num_workers": 2},
        "tracking": {"uri": f"sqlite:///{folder / 'mlflow.db'}"},
    }  # fmt: skip
    (folder / "tiny.yaml").write_text(json.dumps(tree))


def report_run(folder: Path, rounds: int) -> Iterator[str]:
    """The three ways in turn; medians."""
    ways = {
        "this project": run_ours,
        "bare Ray job": run_bare,
        "torchrun + DeepSpeed": run_torchrun,
    }
    prepare(folder)
    found = measure_rounds(ways, rounds, lambda name: ways[name](folder))
    yield from header("command | wall s | CPU s | processes | memory at peaks, MiB")
    for name, rows in found.items():
        walls, cpus = [r.wall_s for r in rows], [r.cpu_s for r in rows]
        yield (
            f"| {name} | {spread(walls)} | {spread(cpus)} "
            f"| {statistics.median(len(r.processes) for r in rows):.0f} "
            f"| {statistics.median(r.peak_mib for r in rows):.0f} |"
        )
    ours, bare = (
        [
            statistics.median(values)
            for values in zip(*((r.wall_s, r.cpu_s) for r in rows), strict=True)
        ]
        for rows in (found["this project"], found["bare Ray job"])
    )
    steps = statistics.median(training_s(one.output) for one in found["this project"])
    yield ""
    yield (
        f"Ours takes {ours[0] / bare[0]:.2f} of the bare job's wall time and "
        f"{ours[1] / bare[1]:.2f} of its CPU time; less {steps:.1f} s of training "
        f"(two CPU seconds each), {(ours[0] - steps) / bare[0]:.2f} and "
        f"{(ours[1] - 2 * steps) / bare[1]:.2f}."
    )


def training_s(output: str) -> float:
    """Steps at the median pace that the last line of progress tells; 0 where it tells none."""
    paces = [
        part.split()[1] for part in output.split(", ") if part.startswith("step ") and " ms" in part
    ]
    return STEPS * float(paces[-1]) / 1e3 if paces else 0.0


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="start-up-") as folder:
        lines = report_run(Path(folder), arguments.rounds)
        finish("\n".join([f"# start_up: {machine()}\n", *lines]), arguments.out)


if __name__ == "__main__":
    main()
