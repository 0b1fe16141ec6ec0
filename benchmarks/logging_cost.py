"""What recording a run in MLflow costs a training step: the same steps with and without it.

    python benchmarks/logging_cost.py [--steps 200] [--rounds 6] [--sizes digits ViT-S/16]
        [--batch 32] [--out FILE.md]

One worker in this process, the project's loop and DeepSpeed engine on batches that lie ready, in
fp32. In every round the steps are taken twice in a row, in an order that changes from round to
round: with the recorder of a job (an actor of a local Ray, MLflow in SQLite, system metrics, the
default cadence of `train.log_every_steps`), and with hooks that drop what they are given. The
recorder is opened before and ended after the steps, outside of the time, but works beside them on
the same cores. Compared are whole steps' means, as only some of them log.

A machine whose speed changes between rounds hides 1 % of a step. So its parts are measured too:
how long the loop waits in the calls that record, and the CPU time that all other processes
(recorder, MLflow, Ray) take beside the steps, more than without a recorder, of the time of all
cores. Held: the two together are under 1 %; a row that misses it says so, and the exit code is 1.
"""

import argparse
import os
import platform
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Before Ray is imported: the ports of a local cluster are open to the network.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

import numpy as np
import ray
import torch
from process_cpu import StartedProcesses
from train_step import Alone

from vit_ray.checkpoints.checkpoint import Progress
from vit_ray.config import Recipe
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.launch.cluster import connect
from vit_ray.launch.run_host import RunControl, RunRecord, start_run
from vit_ray.measure.meters import Compute
from vit_ray.tracking.metrics_log import RunOpening
from vit_ray.train.engine import DeepSpeedEngine
from vit_ray.train.loop import RankContext, run_training
from vit_ray.train.objective import build_objective, make_loss
from vit_ray.worker.run_link import RunLink

BAR, CLASSES, PORT = 0.01, 10, "29521"
SIZES = {
    "digits": {
        "name": "ViT", "image_size": 16, "patch_size": 4, "depth": 4, "width": 96, "mlp_dim": 192,
        "num_heads": 4,
    },
}  # fmt: skip


class Recording(Alone):
    """Hooks that send what the loop logs to the run's recorder, as a worker does."""

    def __init__(self, link: RunLink) -> None:
        self._link = link
        self.waited_s = 0.0

    def log(self, step: int, metrics: dict[str, float]) -> None:
        begun_s = time.perf_counter()
        self._link.log(step, metrics)
        self.waited_s += time.perf_counter() - begun_s


@dataclass(frozen=True)
class Cost:
    """Of a step, in milliseconds."""

    step_ms: float
    waited_ms: float
    others_cpu_ms: float
    """CPU time of all processes but the training's."""


def recipe_of(size: str, batch: int, folder: str) -> Recipe:
    model = SIZES.get(size, {"name": size, "image_size": 224})
    tree: dict[str, Any] = {
        "name": "logging",
        "output": f"{folder}/runs",
        "model": model,
        "optim": {"steps": 1_000_000, "learning_rate": 1e-4},
        "train": {"global_batch_size": batch, "micro_batch_size": batch, "precision": "fp32"},
        "checkpoint": {"every_minutes": None},
        "tracking": {"uri": f"sqlite:///{folder}/mlflow.db"},
    }
    return recipe_from_dict(tree, "benchmark")


@contextmanager
def recorded(recipe: Recipe, name: str) -> Iterator[Recording]:
    """A run of its own, open inside the block."""
    log = Path(recipe.run_folder) / name / "metrics.jsonl"
    log.parent.mkdir(parents=True)
    run = start_run(RunOpening(recipe.tracking, name, log))
    record = RunRecord(run)
    record.run_id()
    yield Recording(RunLink(record, RunControl(run), 0))
    record.finish("FINISHED")


class Steps:
    """Takes steps of one training, some at a time."""

    def __init__(self, recipe: Recipe, others: StartedProcesses) -> None:
        self._recipe, self._batch_size = recipe, recipe.train.global_batch_size
        self._others = others
        loss = make_loss(recipe)
        self._engine = DeepSpeedEngine(
            build_objective(recipe, CLASSES),
            recipe.train,
            recipe.optim,
            micro_batch_size=self._batch_size,
            accumulation_steps=1,
            loss_function=loss,
        )
        self._progress = Progress()

    def cost(self, count: int, hooks: Alone) -> Cost:
        """Take steps; what one of them took."""
        goal = self._progress.step + count
        context = RankContext(goal, 0, 1, self._batch_size, Alone().sum)
        before_s, start_s = self._others.cpu_s(), time.perf_counter()
        run_training(
            self._engine, self._batches(), self._recipe, context, hooks, self._progress, Compute(1)
        )
        took_s, others_s = time.perf_counter() - start_s, self._others.cpu_s() - before_s
        waited_s = hooks.waited_s if isinstance(hooks, Recording) else 0.0
        return Cost(*(seconds / count * 1e3 for seconds in (took_s, waited_s, others_s)))

    def _batches(self) -> Iterator[Any]:
        rng, size = np.random.default_rng(0), self._recipe.model.image_size
        batch = {
            "image": rng.integers(0, 256, (self._batch_size, size, size, 3), np.uint8),
            "labels": rng.integers(0, CLASSES, (self._batch_size, 1)).astype(np.int32),
            "sample": np.arange(self._batch_size, dtype=np.int64),
        }
        while True:
            yield batch


def rounds_of(size: str, args: argparse.Namespace, folder: str) -> list[tuple[Cost, Cost]]:
    """A step with the record and without, for each round."""
    recipe = recipe_of(size, args.batch, f"{folder}/{size.replace('/', '-')}")
    connect(recipe)
    with StartedProcesses() as others:
        steps, found = Steps(recipe, others), []
        steps.cost(10, Alone())
        for number in range(args.rounds):
            costs = {}
            for is_recorded in (True, False) if number % 2 else (False, True):
                if is_recorded:
                    with recorded(recipe, f"round-{number}") as hooks:
                        costs[True] = steps.cost(args.steps, hooks)
                else:
                    costs[False] = steps.cost(args.steps, Alone())
            found.append((costs[True], costs[False]))
            print(size, number, *found[-1], flush=True)
    return found


def row(size: str, rounds: list[tuple[Cost, Cost]]) -> tuple[str, bool]:
    """Markdown, of medians of the rounds, and whether the bar is held."""
    on, off = ([pair[i] for pair in rounds] for i in range(2))

    def middle(costs: list[Cost], name: str) -> float:
        return statistics.median(getattr(cost, name) for cost in costs)

    ratios = [one.step_ms / other.step_ms for one, other in rounds]
    waited, cpu = middle(on, "waited_ms"), middle(on, "others_cpu_ms")
    idle = middle(off, "others_cpu_ms")
    step_ms = middle(off, "step_ms")
    waits, beside = waited / step_ms, (cpu - idle) / step_ms / (os.cpu_count() or 1)
    cells = [size, f"{middle(on, 'step_ms'):.2f}", f"{middle(off, 'step_ms'):.2f}"]
    cells += [f"{statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}"]
    cells += [f"{ms * 1e3:.1f}" for ms in (waited, cpu, idle)]
    is_held = waits + beside < BAR
    verdict = "" if is_held else ", missed"
    cells += [f"{waits:.2%} + {beside:.2%} of the cores (bar {BAR:.0%}{verdict})"]
    return f"| {' | '.join(cells)} |", is_held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--sizes", nargs="+", default=["digits", "ViT-S/16"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT, "RANK": "0"}
    os.environ |= {"LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    lines = [
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
        f"{args.rounds} rounds of {args.steps} steps of {args.batch} images",
        "",
        "| model | ms a step, recorded | not recorded | ratio, least to most | waits, us | "
        "CPU of other processes, us | not recorded | cost in all |",
        "|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        rows = [row(size, rounds_of(size, args, folder)) for size in args.sizes]
        lines += [line for line, _ in rows]
        ray.shutdown()
    text = "\n".join(lines)
    print(f"\n{text}")
    if args.out:
        args.out.write_text(f"{text}\n")
    if not all(is_held for _, is_held in rows):
        sys.exit(f"recording costs more than {BAR:.0%}")


if __name__ == "__main__":
    main()
