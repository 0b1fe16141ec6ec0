"""How long training stands still for a checkpoint, beside torch's own ways to write one.

    python benchmarks/checkpoint_stall.py [--model ViT-B/16] [--checkpoints 4] [--every 12]
        [--apart] [--images 16] [--folder DIR] [--out FILE.md]

Two processes train on images that lie ready, without Ray: this project's engine under ZeRO 1 in
fp32 with Adam's moments and the Polyak average. In each round they save in each way, one after the
other in turn, and train on until all is written. The same tensors are saved by `CheckpointSaver` to
a local folder; by a copy in memory, the least that writing beside a training needs; by `torch.save`
to a file of each process, with fsync and without; and by `torch.distributed.checkpoint.async_save`:
as it is, with a stager that is kept, whose copies take the memory of those before, and of tensors
that are no views. The stall is the time until the call returns, of the slower process. The time
lost is what the steps until all is written took beyond the median step of the same round, with the
stall. CPU time lost is counted in the same way, as the mean of both processes; it depends less on
what else the machine does. The first round, which makes buffers, is left out.

Before that, unless `--apart`: a training by `vit_ray.launch.run.train` on scikit-learn's digits at
32 px, likewise with 2 workers, and a checkpoint every few steps. The stall is the job's own
`checkpoint/stall_s`, the time inside `save` until the next step may begin.
"""

import argparse
import itertools
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.result import finish, header, in_turn, machine

# Before Ray is imported: the ports of a local cluster are open to the network.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

import ray
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from vit_ray.checkpoints.checkpoint import Progress
from vit_ray.checkpoints.checkpoint_writer import CheckpointWriter
from vit_ray.checkpoints.run_checkpoints import list_checkpoints
from vit_ray.config import Recipe
from vit_ray.config.command_sections import ConvertConfig
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.data.convert.conversion import convert
from vit_ray.data.convert.digits import write_digits
from vit_ray.launch.run import train
from vit_ray.models import build_model
from vit_ray.storage import locate
from vit_ray.training.engine import DeepSpeedEngine
from vit_ray.training.objective import make_loss
from vit_ray.worker.job import TrainJob
from vit_ray.worker.run_link import RunLink
from vit_ray.worker.saving import CheckpointSaver, gather_by_own_group

WORKERS, IMAGE_SIZE, CLASSES = 2, 32, 10
KINDS = ["weight", "exp_avg", "exp_avg_sq", "average"]
CADENCE_S = 15 * 60  # `checkpoint.every_minutes` by default
BAR = 0.05
GIB = 2**30
PORT = 29519
OURS, ASYNC = "vit_ray", "torch.distributed.checkpoint.async_save"


def recipe_of(args: argparse.Namespace, folder: Path) -> Recipe:
    tree = {
        "name": "stall",
        "output": str(folder / "runs"),
        "model": {"name": args.model, "image_size": IMAGE_SIZE},
        "data": {"train": str(folder / "set"), "cpus_per_task": 0.5},
        "optim": {"steps": args.every * (args.checkpoints + 1), "learning_rate": 1e-4},
        "train": {
            "global_batch_size": 32,
            "micro_batch_size": 16,
            "zero_stage": 1,
            "precision": "fp32",
            "averaging": 0.9999,
            "log_every_steps": 1,
        },
        "checkpoint": {"every_steps": args.every, "every_minutes": None},
        "workers": {"num_workers": WORKERS},
        "tracking": {"uri": f"sqlite:///{folder}/mlflow.db", "system_metrics": False},
    }
    return recipe_from_dict(tree, "benchmark")


def train_with_checkpoints(args: argparse.Namespace, folder: Path) -> tuple[list[float], ...]:
    """Stalls, times lost around each checkpoint, and its bytes; and the median step, in s."""
    recipe = recipe_of(args, folder)
    write_digits(folder / "images")
    ray.init(address="local", num_cpus=4, log_to_driver=False, logging_level="ERROR")
    convert(ConvertConfig(source=f"{folder}/images/train", destination=f"{folder}/set"))
    train(recipe)
    ray.shutdown()
    run = Path(recipe.output) / recipe.name
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    records = [record for record in records if record["kind"] == "metrics"]
    stalls = {r["step"]: r["values"].get("checkpoint/stall_s") for r in records}
    done_s = {r["step"]: r["time_ms"] / 1e3 for r in records if "train/loss" in r["values"]}
    steps = {b: done_s[b] - done_s[a] for a, b in itertools.pairwise(sorted(done_s))}
    # The first steps warm up; the run's last checkpoint has no steps after it.
    due = [args.every * (number + 1) for number in range(args.checkpoints)]
    typical_s = statistics.median(steps[s] for s in steps if s > 3)
    windows = [[steps[s] for s in range(step + 1, step + args.every + 1)] for step in due]
    lost = [sum(window) - typical_s * len(window) for window in windows]
    newest = list_checkpoints(locate(str(run)))[0][1]
    num_bytes = float(sum(file.size for file in newest.list_files()))
    return [stalls[step] or 0.0 for step in due], lost, [num_bytes], [typical_s]


def parameter_counts(model: str) -> dict[str, int]:
    with torch.device("meta"):
        parameters = build_model(model, CLASSES, IMAGE_SIZE).named_parameters()
    return {name: parameter.numel() for name, parameter in parameters}


class Silence:
    """Record and control of a run that nobody asks for anything."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class Saves:
    """One process's training, and the ways to save it.

    Each returns whether all is written by now.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        recipe = recipe_of(args, args.folder)
        self.batch = args.images
        self.engine = DeepSpeedEngine(
            build_model(args.model, CLASSES, IMAGE_SIZE),
            recipe.train,
            recipe.optim,
            micro_batch_size=args.images,
            accumulation_steps=1,
            loss_function=make_loss(recipe),
        )
        size = (args.images, IMAGE_SIZE, IMAGE_SIZE, 3)
        self._images = torch.randint(0, 256, size, dtype=torch.uint8)
        self._labels = torch.randint(0, CLASSES, (args.images, 1))
        self.step()
        rank, silence = dist.get_rank(), Silence()
        entries = list(self.engine.state.owned_entries())
        self._state = {f"{kind}|{name}|{rank}": values for kind, name, _, values in entries}
        self._apart = {key: values.clone() for key, values in self._state.items()}
        self._kept = DefaultStager(StagingOptions(False, False, False, False))
        self._group = dist.new_group()  # of the thread that writes
        link: Any = RunLink(silence, rank, WORKERS)
        self._step = 0
        self._thread = threading.Thread()
        folder = str(args.folder / "run")
        job = TrainJob(
            recipe.with_changes(output=str(args.folder), name="run"), "train", CLASSES, 1000, "",
            "auto", 0, 0.0, silence, None,
        )  # fmt: skip
        writer = CheckpointWriter(
            locate(folder), recipe.checkpoint, self._refuse, None, gather_by_own_group()
        )
        self._saver = CheckpointSaver(job, self.engine, writer, link, self._run_beside)
        self.ways: dict[str, Callable[[Path], Callable[[], bool]]] = {
            OURS: self._save,
            "a copy in memory, nothing written": self._copy,
            "torch.save": lambda folder: self._save_plainly(folder, is_synced=False),
            "torch.save, fsync": lambda folder: self._save_plainly(folder, is_synced=True),
            ASYNC: lambda folder: self._save_async(self._state, folder),
            f"{ASYNC}, its stager kept": lambda folder: self._save_async(
                self._state, folder, async_stager=self._kept
            ),
            f"{ASYNC}, of tensors that are no views": lambda folder: self._save_async(
                self._apart, folder
            ),
        }

    def step(self) -> None:
        self.engine.backward(self._images, self._labels, torch.arange(self.batch))
        self.engine.step(1e-4)

    def _refuse(self, *event: Any) -> None:
        raise RuntimeError(f"a save that failed is not measured: {event}")

    def _run_beside(self, work: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=work)
        self._thread.start()

    def _save(self, folder: Path) -> Callable[[], bool]:
        self._step += 1
        self._saver.save(Progress(step=self._step))

        def is_written() -> bool:
            self._saver.check()
            return not self._thread.is_alive()

        return is_written

    def _copy(self, folder: Path) -> Callable[[], bool]:
        copied = {name: values.clone() for name, values in self._state.items()}
        return lambda: bool(copied)

    def _save_plainly(self, folder: Path, *, is_synced: bool) -> Callable[[], bool]:
        with open(folder / f"{dist.get_rank()}.pt", "wb") as file:
            torch.save(self._apart, file)
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        return lambda: True

    def _save_async(self, state: dict[str, Tensor], folder: Path, **how: Any) -> Callable[[], bool]:
        future: Any = dcp.async_save(
            state, checkpoint_id=str(folder), process_group=self._group, **how
        )
        return lambda: bool(future.done()) and future.result() is not None


def measure_save(saves: Saves, way: str | None, folder: Path, least: int) -> dict[str, float]:
    """One save, and steps until it is written; without a way, so many steps and no save."""
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    start_s, start_cpu_s, call_cpu_s = time.perf_counter(), time.process_time(), time.thread_time()
    is_written = saves.ways[way](folder) if way else lambda: True
    stall_s, call_cpu_s = time.perf_counter() - start_s, time.thread_time() - call_cpu_s
    num_steps, written_s, left = 0, 0.0, 1.0
    while left or num_steps < least:
        saves.step()
        num_steps += 1
        if is_written() and not written_s:
            written_s = time.perf_counter() - start_s
        flag = torch.tensor([0.0 if written_s else 1.0])
        dist.all_reduce(flag)
        left = float(flag)
    cpu_s = torch.tensor([call_cpu_s, time.process_time() - start_cpu_s]) / WORKERS
    dist.all_reduce(cpu_s)
    times = torch.tensor([stall_s, written_s, time.perf_counter() - start_s])
    dist.all_reduce(times, dist.ReduceOp.MAX)
    names = ["call_cpu", "cpu", "stall", "written", "whole", "steps"]
    return dict(zip(names, [*cpu_s.tolist(), *times.tolist(), num_steps], strict=True))


def run_rank(args: argparse.Namespace) -> None:
    """One of the two processes; the first prints what each way gave, round by round."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    saves = Saves(args)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in saves.ways}
    for turn in range(args.checkpoints + 1):
        plain = measure_save(saves, None, args.folder / "none", args.every)
        for number, way in enumerate(in_turn(list(found), turn)):
            place = args.folder / f"{turn}-{number}"
            one = measure_save(saves, way, place, 1)
            one["lost"] = one["whole"] - one["steps"] * plain["whole"] / plain["steps"]
            one["cpu_lost"] = one["cpu"] - one["steps"] * plain["cpu"] / plain["steps"]
            found[way].append(one | {"step": plain["whole"] / plain["steps"]})
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(place)
    if dist.get_rank() == 0:
        print(json.dumps({"found": found}), flush=True)
    dist.destroy_process_group()


def measure_ranks(args: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, float]]]:
    command = [sys.executable, __file__, "--rank", "--model", args.model]
    command += ["--checkpoints", str(args.checkpoints), "--folder", str(folder)]
    command += ["--images", str(args.images), "--every", str(args.every)]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT), "WORLD_SIZE": str(WORKERS)}
    environment = {**os.environ, **world, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    processes = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORKERS)
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert not any(process.returncode for process in processes), "a process failed"
    (line,) = [one for one in outputs[0].splitlines() if one.startswith('{"found"')]
    found: dict[str, list[dict[str, float]]] = json.loads(line)["found"]
    return found


def report_of_training(args: argparse.Namespace, folder: Path) -> list[str]:
    stalls, lost, (num_bytes,), (typical_s,) = train_with_checkpoints(args, folder)
    median, share = statistics.median(stalls), num_bytes / WORKERS / GIB
    return [
        f"In a training by Ray, {num_bytes / GIB:.2f} GiB per checkpoint, {share:.2f} GiB per "
        f"worker; median step {typical_s:.2f} s:",
        "",
        f"- stall: {median:.3f} s, the median of {' '.join(f'{s:.3f}' for s in stalls)}",
        f"- share of {CADENCE_S} s: {median / CADENCE_S:.3%}, the worst "
        f"{max(stalls) / CADENCE_S:.3%} (bar {BAR:.0%})",
        f"- time lost in all, steps slowed by the writing included: "
        f"{statistics.median(lost):.2f} s, the median of {' '.join(f'{s:.2f}' for s in lost)}; "
        f"{statistics.median(lost) / CADENCE_S:.3%} of {CADENCE_S} s",
        "",
    ]


def report_of_ranks(args: argparse.Namespace, folder: Path) -> list[str]:
    found = measure_ranks(args, folder)
    share = sum(parameter_counts(args.model).values()) * len(KINDS) * 4 / WORKERS / GIB
    huge = sum(parameter_counts("ViT-H/14").values()) * len(KINDS) * 4 / GIB
    medians = {
        way: {key: statistics.median(one[key] for one in rounds[1:]) for key in rounds[0]}
        for way, rounds in found.items()
    }
    ours, first = medians[OURS], found[OURS][0]
    lines = [
        f"Without Ray, in {len(found[OURS]) - 1} rounds, {share:.2f} GiB per worker; median step "
        f"{ours['step']:.2f} s:",
        "",
        *header(
            "how | training stands still, ms | CPU of it, ms | theirs / ours | time lost, s | CPU "
            "lost, s a worker | until written, s"
        ),
    ]
    for way, one in medians.items():
        lines.append(
            f"| {way} | {one['stall'] * 1e3:.0f} | {one['call_cpu'] * 1e3:.0f} | "
            f"{one['stall'] / ours['stall']:.2f} | {one['lost']:.2f} | {one['cpu_lost']:.2f} | "
            f"{one['written']:.2f} |"
        )
    stalls = {way: [f"{one['stall'] * 1e3:.0f}" for one in rounds] for way, rounds in found.items()}
    lines += ["", "Stalls of each round, ms, the first left out above:", ""]
    lines += [f"- {way}: {' '.join(ms)}" for way, ms in stalls.items()]
    lines += [
        "",
        f"- ours that makes its memory: {first['stall']:.3f} s, CPU {first['call_cpu']:.3f} s",
        f"- ours per GiB of a worker's part: {ours['stall'] / share:.3f} s",
        f"- by that, for ViT-H/14 on one worker, {huge:.2f} GiB: "
        f"{huge * ours['stall'] / share:.1f} s, {huge * ours['stall'] / share / CADENCE_S:.2%}",
        f"- time lost in all: {ours['lost'] / CADENCE_S:.3%} of {CADENCE_S} s, in CPU time "
        f"{ours['cpu_lost'] / CADENCE_S:.3%}",
    ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="ViT-B/16")
    parser.add_argument("--checkpoints", type=int, default=4)
    parser.add_argument("--every", type=int, default=12, help="steps")
    parser.add_argument("--folder", type=Path, help="on the disk to write to")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--apart", action="store_true", help="no training by Ray")
    parser.add_argument("--images", type=int, default=16, help="of a process and step, without Ray")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        run_rank(args)
        return
    lines = [
        f"# checkpoint_stall: {machine()}, torch {torch.__version__}",
        "",
        f"{args.model}, fp32, Adam and average, ZeRO 1 on {WORKERS} workers.",
        "",
    ]
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        if not args.apart:
            lines += report_of_training(args, Path(temporary))
        lines += report_of_ranks(args, Path(temporary) / "ranks")
    finish("\n".join(lines), args.out)


if __name__ == "__main__":
    main()
