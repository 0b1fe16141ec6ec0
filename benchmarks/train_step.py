"""What the trainer costs: the whole step of a job against the same model in a bare torch loop.

    python benchmarks/train_step.py [--model ViT-S/16] [--batch 4] [--steps 12] [--rounds 2]
        [--precision fp32] [--compile] [--rows bare zero0 ...] [--row-s 75] [--out FILE.md]

Rows, each in a process of its own, one after the other in every round, on one worker: a loop of
plain torch on a batch that lies ready; in bf16 another one under autocast; this project's loop and
DeepSpeed engine on the same, under ZeRO 0 (which one worker needs) and 1 (2 and 3 with `--rows`);
and the job as
`jobs/pretrain.py` runs it under ZeRO 0, with Ray Train and the stream from JPEGs. The time of a
step is the median after three steps to warm up (the job's: after the first), the best of the
rounds. In bf16 the bare loop and the engine both keep bf16 weights and gradients and an fp32 master
that AdamW steps; the loop under autocast, which keeps fp32 weights only, is there to compare. On a
GPU where there is one; the batch is halved while any row runs out of its memory, and its peak
stands beside what `vit_ray.training.memory.memory_estimate` predicts, which knows no --compile.
MFU is against the dense peak. The bare loops need torch alone; a row whose libraries are missing or
that has not ended after `--row-s`, is listed as such. The table is printed after every row.
"""

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.result import finish, header, machine
from vit_ray.training.memory.out_of_memory import unless_out_of_memory

SIZE, CLASSES, WARM_UP = 224, 1000, 3
GPU_BAR, CPU_BAR = 1.03, 1.05  # whole job over bare loop; on a CPU at steps of 0.5 s or more
MEMORY_BAR = 0.10
OUT_OF_MEMORY = "OutOfMemoryError"
# The first line of an error: torch's have several, and warnings of its libraries may follow.
ERROR = re.compile(r"^(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception)\b.*)", re.MULTILINE)


@dataclass
class Measured:
    """What a row's process found out."""

    step_s: float
    memory_gib: float | None = None
    """Most that torch held of the GPU."""
    predicted_gib: float | None = None
    data_wait: float | None = None
    """Share of the steps' time that waited for data."""


class MasterAdamW:
    """AdamW on fp32 masters of bf16 weights, as plain torch has it: fused, with foreach copies."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self.weights = weights
        self.masters = [weight.detach().float().requires_grad_() for weight in weights]
        is_fused = weights[0].device.type == "cuda"
        self._optimizer = torch.optim.AdamW(self.masters, lr=1e-4, fused=is_fused)

    @torch.no_grad()
    def step(self) -> None:
        """Clip and apply the gradients of the weights, and drop them."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        torch._foreach_copy_(self.weights, self.masters)


def bare_loop(args: argparse.Namespace, autocast: bool = False) -> Measured:
    """Plain torch: AdamW with clipping; nothing else."""
    from vit_ray.models import build_model
    from vit_ray.training.engine.compiling import compile_model

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    has_masters = args.precision == "bf16" and not autocast
    dtype = torch.bfloat16 if has_masters else torch.float32
    with device:
        model = build_model(args.model, CLASSES, SIZE).to(dtype)
    if args.compile:
        compile_model(model, "inductor", may_fail=False)
    step = MasterAdamW(list(model.parameters())).step if has_masters else plain_step(model)
    images = torch.randn(args.batch, 3, SIZE, SIZE, device=device, dtype=dtype)
    labels = torch.randint(CLASSES, (args.batch,), device=device)
    times = []
    for _ in range(WARM_UP + args.steps):
        start_s = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(images).float(), labels)
        loss.backward()
        step()
        float(loss.detach())
        times.append(time.perf_counter() - start_s)
    return Measured(statistics.median(times[WARM_UP:]), peak_gib())


def plain_step(model: nn.Module) -> Any:
    is_fused = torch.cuda.is_available()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=is_fused)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def peak_gib() -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None


def predicted_gib(recipe: Any, batch: int) -> float | None:
    from vit_ray.training.memory.memory_estimate import estimate_memory

    if not torch.cuda.is_available():
        return None
    return estimate_memory(recipe, CLASSES, batch, world_size=1).total


def engine_loop(args: argparse.Namespace, zero_stage: int = 0) -> Measured:
    """This project's loop and engine, without Ray, on batches that lie ready."""
    import numpy as np

    from vit_ray.checkpoints.checkpoint import Progress
    from vit_ray.measure.meters import Compute
    from vit_ray.models import build_model
    from vit_ray.training.engine.deepspeed_engine import DeepSpeedEngine
    from vit_ray.training.loop import RankContext, run_training
    from vit_ray.training.objective import classification_loss, normalize

    recipe = recipe_of(args, "", "").with_changes(train={"zero_stage": zero_stage})
    use_gpu = torch.cuda.is_available()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0"}
    os.environ |= {"LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group("nccl" if use_gpu else "gloo")
    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32

    def loss(module: Any, images: Any, labels: Any, *_: Any) -> Any:
        return classification_loss(module(normalize(images, dtype)), labels, recipe.train).mean()

    engine = DeepSpeedEngine(
        build_model(args.model, CLASSES, SIZE),
        recipe.train,
        recipe.optim,
        micro_batch_size=args.batch,
        accumulation_steps=1,
        loss_function=loss,
    )
    rng = np.random.default_rng(0)
    batch = {
        "image": rng.integers(0, 256, (args.batch, SIZE, SIZE, 3), np.uint8),
        "labels": rng.integers(0, CLASSES, (args.batch, 1)).astype(np.int32),
        "sample": np.arange(args.batch, dtype=np.int64),
    }
    times: list[float] = []

    def batches() -> Iterator[Any]:
        last_s = time.perf_counter()
        while True:
            yield batch
            now_s = time.perf_counter()
            times.append(now_s - last_s)
            last_s = now_s

    alone: Any = Alone()
    context = RankContext(WARM_UP + args.steps + 1, 0, 1, args.batch, alone.sum)
    run_training(engine, batches(), recipe, context, alone, Progress(), Compute(1))
    return Measured(
        statistics.median(times[WARM_UP:]), peak_gib(), predicted_gib(recipe, args.batch)
    )


def free_port() -> int:
    """Others on the machine may measure, too."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Alone:
    """Collectives and hooks of a loop on one rank, which records nothing."""

    def sum(self, values: Any) -> list[float]:
        return [float(value) for value in values]

    def note_step(self, step: int) -> None: ...

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def evaluate(self, step: int) -> dict[str, float]:
        return {}

    def save(self, progress: Any) -> None: ...

    def add_evaluation(self, progress: Any) -> bool:
        return True

    def on_bad_step(self, progress: Any, batch: Any) -> None:
        raise RuntimeError("the loss is not finite")

    def wishes(self, step: int) -> tuple[bool, bool]:
        return False, False


def whole_job(args: argparse.Namespace) -> Measured:
    """`train`, as `jobs/pretrain.py` calls it; the median of all steps but the first."""
    import cv2
    import numpy as np

    from vit_ray.config.command_sections import ConvertConfig
    from vit_ray.data.prepare.convert.conversion import convert
    from vit_ray.launch.cluster.connection import connect
    from vit_ray.launch.run import train

    with tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(0)
        for i in range(256):
            path = Path(folder) / "images" / f"class_{i % 2}" / f"{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            noise = rng.integers(0, 256, (12, 16, 3), np.uint8)
            cv2.imwrite(str(path), cv2.resize(noise, (500, 375), interpolation=cv2.INTER_CUBIC))
        recipe = recipe_of(args, f"{folder}/set", folder)
        connect(recipe)
        convert(ConvertConfig(source=f"{folder}/images", destination=f"{folder}/set"))
        metrics = train(recipe).metrics
    return Measured(
        metrics["perf/step_ms_median"] / 1e3,
        metrics["perf/memory_gib"] if torch.cuda.is_available() else None,
        predicted_gib(recipe, args.batch),
        metrics["data/wait_fraction"],
    )


def recipe_of(args: argparse.Namespace, data: str, folder: str) -> Any:
    from vit_ray.config.recipe import recipe_from_dict

    steps = args.steps + WARM_UP + 1
    tree = {
        "name": "step",
        "output": f"{folder}/runs",
        "model": {"name": args.model, "image_size": SIZE},
        "data": {"train": data or None},
        "optim": {"steps": steps, "learning_rate": 1e-4},
        "train": {
            "global_batch_size": args.batch,
            "micro_batch_size": args.batch,
            "zero_stage": 0,
            "precision": args.precision,
            "compile": args.compile,
            "log_every_steps": steps,  # the last line's window holds all but the first step
        },
        "checkpoint": {"every_minutes": None},
        "workers": {"num_workers": 1},
        "tracking": {"uri": f"sqlite:///{folder}/mlflow.db", "system_metrics": False},
    }
    return recipe_from_dict(tree, "benchmark")


ROWS = {
    "bare": ("bare torch loop", bare_loop),
    "autocast": ("bare torch loop, autocast over fp32 weights", partial(bare_loop, autocast=True)),
    "zero0": ("loop + DeepSpeed (ZeRO 0), ready batches", engine_loop),
    "zero1": ("loop + DeepSpeed (ZeRO 1), ready batches", partial(engine_loop, zero_stage=1)),
    "zero2": ("loop + DeepSpeed (ZeRO 2), ready batches", partial(engine_loop, zero_stage=2)),
    "zero3": ("loop + DeepSpeed (ZeRO 3), ready batches", partial(engine_loop, zero_stage=3)),
    "job": ("whole job: Ray Train + DeepSpeed + stream", whole_job),
}


def run_apart(name: str, args: argparse.Namespace) -> Measured | str:
    """A row in a fresh process, or why there is none."""
    # What a worker with one CPU gets from Ray, for all rows.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *sys.argv, "--batch", str(args.batch), "--only", name]
    # Files, and no pipes: those end only with the last process that a row started.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            done = subprocess.run(
                command, env=environment, stdout=out, stderr=err, timeout=args.row_s
            )
        except subprocess.TimeoutExpired:
            return f"has not ended after {args.row_s:.0f} s"
        printed, errors = (file.seek(0) or file.read() for file in (out, err))
    lines = [line for line in printed.splitlines() if line.startswith('{"step_s"')]
    if lines:
        return Measured(**json.loads(lines[-1]))
    if OUT_OF_MEMORY in errors:
        return OUT_OF_MEMORY
    code = f"exit code {done.returncode}"
    last = (ERROR.findall(errors) or errors.strip().splitlines() or [code])[-1]
    return str(last).replace("|", "/")[:160]


def measure(args: argparse.Namespace) -> dict[str, Measured | str]:
    """The best round of every row; `args.batch` ends as the largest that fits all of them."""
    best: dict[str, Measured | str] = {}
    for _ in range(args.rounds):
        for name in args.rows:
            found = run_apart(name, args)
            print(name, found, flush=True)
            if found == OUT_OF_MEMORY and args.batch > 1:
                args.batch //= 2
                return measure(args)
            known = best.get(name)
            if isinstance(known, Measured) and isinstance(found, Measured):
                found = min(known, found, key=lambda row: row.step_s)
            best[name] = known if isinstance(known, Measured) and isinstance(found, str) else found
            print(f"\n{table(best, args)}\n", flush=True)  # of one that is cut off, it is all
    return best


def table(best: dict[str, Measured | str], args: argparse.Namespace) -> str:
    """Markdown."""
    lines = header(
        "row | batch | ms a step | images/s | it / bare loop | MFU | waits for data "
        "| GiB at most | predicted | predicted / measured"
    )
    for name, row in best.items():
        if isinstance(row, str):
            lines.append(f"| {ROWS[name][0]} | {args.batch} | not run: `{row}` | | | | | | | |")
            continue
        rate = args.batch / row.step_s
        cells = [ROWS[name][0], str(args.batch), f"{row.step_s * 1e3:.1f}", f"{rate:.1f}"]
        cells += [share_of_bare(name, row, best.get("bare")), mfu(args, rate)]
        cells += [f"{row.data_wait:.1%}" if row.data_wait is not None else ""]
        lines.append(f"| {' | '.join(cells + memory_cells(row, has_bar=not args.compile))} |")
    return "\n".join(lines)


def share_of_bare(name: str, row: Measured, bare: Measured | str | None) -> str:
    if not isinstance(bare, Measured):
        return ""
    bar = GPU_BAR if torch.cuda.is_available() else CPU_BAR
    is_held = name == "job" and (torch.cuda.is_available() or bare.step_s >= 0.5)
    return f"{row.step_s / bare.step_s:.3f}" + (f" (bar {bar})" if is_held else "")


def memory_cells(row: Measured, has_bar: bool) -> list[str]:
    if row.memory_gib is None:
        return ["", "", ""]
    if row.predicted_gib is None:
        return [f"{row.memory_gib:.2f}", "", ""]
    ratio = row.predicted_gib / row.memory_gib
    bar = f" (bar {1 - MEMORY_BAR:.1f} to {1 + MEMORY_BAR:.1f})" if has_bar else ""
    return [f"{row.memory_gib:.2f}", f"{row.predicted_gib:.2f}", f"{ratio:.3f}{bar}"]


def mfu(args: argparse.Namespace, images_per_s: float) -> str:
    from vit_ray.measure.devices import peak_flops
    from vit_ray.training.memory.memory_estimate import step_macs

    if not torch.cuda.is_available():
        return ""
    peak = peak_flops(torch.cuda.get_device_name(), args.precision)
    if peak is None:
        return ""
    macs = step_macs(recipe_of(args, "", ""), CLASSES).model
    return f"{2 * macs * images_per_s / peak:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="ViT-S/16")
    parser.add_argument("--batch", type=int, default=4, help="at most")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS))
    parser.add_argument("--row-s", type=float, help="at most, of a row's process")
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.only:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        row = unless_out_of_memory(lambda: ROWS[args.only][1](args), device)
        if row is None:
            raise SystemExit(OUT_OF_MEMORY)
        print(json.dumps(asdict(row)), flush=True)
        return
    has_autocast = args.precision == "bf16"
    left_out = {"zero2", "zero3", *([] if has_autocast else ["autocast"])}
    args.rows = args.rows or [name for name in ROWS if name not in left_out]
    best = measure(args)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    chosen = f"{args.model}, batch {args.batch}, {args.precision}, {device}"
    chosen += ", compiled" if args.compile else ", eager"
    finish(f"# train_step: {machine()}; {chosen}\n\n{table(best, args)}", args.out)


if __name__ == "__main__":
    main()
