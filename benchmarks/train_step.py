"""What the trainer costs: the whole step of a job against the same model in a bare torch loop.

    python benchmarks/train_step.py [--model ViT-S/16] [--batch 4] [--steps 12] [--rounds 2]
        [--precision fp32] [--compile] [--rows bare zero0 ...] [--row-s 75] [--out FILE.md]

Rows, each in a process of its own, one after the other in every round, on one worker: a loop of
plain torch on a batch that lies ready; in bf16 another one under autocast; and the job as
`jobs/pretrain.py` runs it, with Ray Train, DeepSpeed, the stream from JPEGs and MLflow, under ZeRO
0 and 1 (2 and 3 with `--rows`). The time of a step is the median after three steps to warm up (a
job's: after the first), the best of the rounds. In bf16 the bare loop and the job both keep bf16
weights and gradients and an fp32 master that AdamW steps; the loop under autocast, which keeps fp32
weights only, is there to compare. On a GPU where there is one; the batch is halved while a bare
loop runs out of its memory. MFU is against the dense peak. A row whose libraries are missing, or
that has not ended after `--row-s`, is listed as such. The table is printed after every row.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.model_step import blocks_of, our_model, step_flops
from benchmarks.result import finish, header, last_error, machine
from vit_ray.training.out_of_memory import unless_out_of_memory

SIZE, CLASSES, WARM_UP = 224, 1000, 3
PHOTOGRAPHS = 256
OUT_OF_MEMORY = "OutOfMemoryError"


@dataclass
class Measured:
    """What a row's process found out."""

    step_s: float
    memory_gib: float | None = None
    """Most that torch held of the GPU."""
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
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    has_masters = args.precision == "bf16" and not autocast
    dtype = torch.bfloat16 if has_masters else torch.float32
    with device:
        model = our_model(args.model).to(dtype)
    for block in blocks_of(model) if args.compile else ():
        block.compile(dynamic=False)
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
    memory_gib = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    return Measured(statistics.median(times[WARM_UP:]), memory_gib)


def plain_step(model: nn.Module) -> Any:
    is_fused = torch.cuda.is_available()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=is_fused)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def prepare(folder: Path) -> None:
    """The data set of all jobs; a job without it says so in its row."""
    from benchmarks.data_stream import write_photographs
    from benchmarks.job import convert

    write_photographs(folder / "images", PHOTOGRAPHS)
    convert(folder / "images", str(folder / "set"))


def whole_job(args: argparse.Namespace, zero_stage: int) -> Measured:
    """`jobs/pretrain.py`; the median of all steps but the first."""
    from benchmarks.job import pretrain  # the bare loops need torch alone

    data = Path(args.folder, "set")
    steps = args.steps + WARM_UP + 1
    tree = {
        "name": "step",
        "model": {"name": args.model, "image_size": SIZE},
        "data": {"train": str(data)},
        "optim": {"steps": steps, "learning_rate": 1e-4},
        "train": {
            "global_batch_size": args.batch,
            "micro_batch_size": args.batch,
            "zero_stage": zero_stage,
            "precision": args.precision,
            "compile": args.compile,
            "log_every_steps": steps,  # the last line's window holds all but the first step
        },
        "checkpoint": {"every_minutes": None},
        "workers": {"num_workers": 1},
        "tracking": {"system_metrics": False},
    }
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder, "step.yaml")
        recipe.write_text(json.dumps(tree))
        found = pretrain(str(recipe), folder)
    last = {name: values[steps] for name, values in found.items() if steps in values}
    memory_gib = last["perf/memory_gib"] if torch.cuda.is_available() else None
    return Measured(last["perf/step_ms_median"] / 1e3, memory_gib, last["data/wait_fraction"])


ROWS = {
    "bare": ("bare torch loop", bare_loop),
    "autocast": ("bare torch loop, autocast over fp32 weights", partial(bare_loop, autocast=True)),
    **{
        f"zero{stage}": (f"whole job, ZeRO {stage}", partial(whole_job, zero_stage=stage))
        for stage in range(4)
    },
}


def run_apart(name: str, args: argparse.Namespace) -> Measured | str:
    """A row in a fresh process, or why there is none."""
    # What a worker with one CPU gets from Ray, for all rows.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *sys.argv, "--batch", str(args.batch), "--folder", args.folder]
    command += ["--only", name]
    # Files, and no pipes: those end only with the last process that a row started.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        done = subprocess.Popen(
            command, env=environment, stdout=out, stderr=err, start_new_session=True
        )
        try:
            done.wait(args.row_s)
        except subprocess.TimeoutExpired:
            os.killpg(done.pid, signal.SIGKILL)  # the job, too: the next row has the GPU alone
            return f"has not ended after {args.row_s:.0f} s"
        printed, errors = (file.seek(0) or file.read() for file in (out, err))
    lines = [line for line in printed.splitlines() if line.startswith('{"step_s"')]
    if lines:
        return Measured(**json.loads(lines[-1]))
    if OUT_OF_MEMORY in errors:
        return OUT_OF_MEMORY
    error = last_error(errors) or f"exit code {done.returncode}"
    return error.replace("|", "/")[:160]


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
        "row | batch | ms a step | images/s | it / bare loop | it / ZeRO 0 | MFU "
        "| waits for data | GiB at most"
    )
    for name, row in best.items():
        if isinstance(row, str):
            lines.append(f"| {ROWS[name][0]} | {args.batch} | not run: `{row}` | | | | | | |")
            continue
        rate = args.batch / row.step_s
        cells = [ROWS[name][0], str(args.batch), f"{row.step_s * 1e3:.1f}", f"{rate:.1f}"]
        cells += [share_of(row, best.get("bare"))]
        cells += [share_of(row, best.get("zero0")), mfu(args, rate)]
        cells += [f"{row.data_wait:.1%}" if row.data_wait is not None else ""]
        cells += [f"{row.memory_gib:.2f}" if row.memory_gib is not None else ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def share_of(row: Measured, other: Measured | str | None) -> str:
    return f"{row.step_s / other.step_s:.3f}" if isinstance(other, Measured) else ""


def mfu(args: argparse.Namespace, images_per_s: float) -> str:
    from vit_ray.measure.devices import peak_flops

    if not torch.cuda.is_available():
        return ""
    peak = peak_flops(torch.cuda.get_device_name(), args.precision)
    if peak is None:
        return ""
    return f"{step_flops(our_model, args.model) * images_per_s / peak:.1%}"


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
    parser.add_argument("--folder", help="of the images that all jobs read")
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
    with tempfile.TemporaryDirectory() as args.folder:
        if any(name.startswith("zero") for name in args.rows):
            with contextlib.suppress(subprocess.CalledProcessError, ImportError):
                prepare(Path(args.folder))
        best = measure(args)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    chosen = f"{args.model}, batch {args.batch}, {args.precision}, {device}"
    chosen += ", compiled" if args.compile else ", eager"
    finish(f"# train_step: {machine()}; {chosen}\n\n{table(best, args)}", args.out)


if __name__ == "__main__":
    main()
