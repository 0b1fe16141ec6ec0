"""What the trainer costs: the whole step of a job against the same model in a bare torch loop.

    python benchmarks/train_step.py [--model ViT-S/16] [--batch 4] [--steps 12] [--rounds 2]
        [--precision fp32] [--compile] [--out FILE.md]

Rows, each in a process of its own, one after the other in every round, on one worker: a loop of
plain torch on a batch that lies ready; this project's loop and DeepSpeed engine on the same, under
ZeRO 0 (which one worker needs) and 1; and the job as `jobs/pretrain.py` runs it under ZeRO 0, with
Ray Train and the stream from JPEGs. The time of a step is the median after three steps to warm up
(the job's: after the first), the best of the rounds. In bf16 the bare loop is autocast over fp32
weights, the engine's weights are bf16 with an fp32 master. On a GPU where there is one; MFU is
against its dense peak. The first row needs torch alone; a row whose libraries are missing is listed
as such.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

SIZE, CLASSES, WARM_UP = 224, 1000, 3


def bare_loop(args: argparse.Namespace) -> list[float]:
    """Plain torch: fp32 weights, autocast for bf16, AdamW, clipping; nothing else."""
    from vit_ray.models import build_model

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(args.model, CLASSES, SIZE).to(device)
    call = torch.compile(model) if args.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    images = torch.randn(args.batch, 3, SIZE, SIZE, device=device)
    labels = torch.randint(CLASSES, (args.batch,), device=device)
    times = []
    for _ in range(WARM_UP + args.steps):
        start_s = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            loss = F.cross_entropy(call(images).float(), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        float(loss.detach())
        times.append(time.perf_counter() - start_s)
    return times[WARM_UP:]


def engine_loop(args: argparse.Namespace, zero_stage: int = 0) -> list[float]:
    """This project's loop and engine, without Ray, on batches that lie ready."""
    import numpy as np

    from vit_ray.measure.meters import Compute
    from vit_ray.models import build_model
    from vit_ray.train.engine import DeepSpeedEngine
    from vit_ray.train.loop import Length, Progress, run_training
    from vit_ray.train.objective import classification_loss, normalize

    recipe = recipe_of(args, "", "").with_changes(train={"zero_stage": zero_stage})
    use_gpu = torch.cuda.is_available()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517", "RANK": "0"}
    os.environ |= {"LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group("nccl" if use_gpu else "gloo")
    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32

    def loss(module: Any, images: Any, labels: Any, _: Any) -> Any:
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

    length = Length(WARM_UP + args.steps + 1, 0, 1, args.batch)
    run_training(engine, batches(), recipe, length, Alone(), Progress(), Compute(1))
    return times[WARM_UP:]


class Alone:
    """The loop's world where there is nobody else."""

    def sum(self, values: list[float]) -> list[float]:
        return [float(value) for value in values]

    max = sum

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def evaluate(self, step: int) -> dict[str, float]:
        return {}

    def save(self, progress: Any) -> None: ...

    def nonfinite(self, progress: Any, batch: Any) -> None:
        raise RuntimeError("the loss is not finite")

    def save_is_wanted(self) -> bool:
        return False

    def stop_reason(self) -> None:
        return None


def whole_job(args: argparse.Namespace) -> list[float]:
    """`train`, as `jobs/pretrain.py` calls it; the median of all steps but the first ones."""
    import cv2
    import numpy as np

    from vit_ray.data.convert import convert
    from vit_ray.launch.cluster import connect
    from vit_ray.launch.trainer import train

    with tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(0)
        for i in range(256):
            path = Path(folder) / "images" / f"class_{i % 2}" / f"{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            noise = rng.integers(0, 256, (12, 16, 3), np.uint8)
            cv2.imwrite(str(path), cv2.resize(noise, (500, 375), interpolation=cv2.INTER_CUBIC))
        recipe = recipe_of(args, f"{folder}/set", folder)
        connect(recipe)
        convert(f"{folder}/images", f"{folder}/set")
        result = train(recipe)
        return [result.metrics["perf/step_ms_median"] / 1e3]


def recipe_of(args: argparse.Namespace, data: str, folder: str) -> Any:
    from vit_ray.config import recipe_from_dict

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
    "bare torch loop": bare_loop,
    "loop + DeepSpeed (ZeRO 0), ready batches": engine_loop,
    "loop + DeepSpeed (ZeRO 1), ready batches": partial(engine_loop, zero_stage=1),
    "whole job: Ray Train + DeepSpeed + stream": whole_job,
}


def run_apart(name: str) -> float | str:
    """Median seconds of a step in a fresh process, or why there is none."""
    # What a worker with one CPU gets from Ray, for all rows.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *sys.argv, "--only", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return (done.stderr.strip().splitlines() or ["no output"])[-1][:160]
    return float(json.loads(lines[-1])["step_s"])


def table(best: dict[str, float | str], args: argparse.Namespace) -> str:
    bare = best["bare torch loop"]
    assert isinstance(bare, float), bare
    lines = ["| row | ms a step | images/s | it / bare loop | MFU |", "|---|---|---|---|---|"]
    for name, step_s in best.items():
        if isinstance(step_s, str):
            lines.append(f"| {name} | not run: `{step_s}` | | | |")
            continue
        rate, share = args.batch / step_s, step_s / bare
        figures = f"{step_s * 1e3:.1f} | {rate:.1f} | {share:.3f} | {mfu(args, rate)}"
        lines.append(f"| {name} | {figures} |")
    return "\n".join(lines)


def mfu(args: argparse.Namespace, images_per_s: float) -> str:
    from vit_ray.measure.devices import peak_flops
    from vit_ray.models.flops import forward_macs

    if not torch.cuda.is_available():
        return ""
    peak = peak_flops(torch.cuda.get_device_name(), args.precision)
    if peak is None:
        return ""
    return f"{6 * forward_macs(args.model, CLASSES, SIZE) * images_per_s / peak:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="ViT-S/16")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.only:
        times = ROWS[args.only](args)
        print(json.dumps({"step_s": statistics.median(times)}), flush=True)
        return
    best: dict[str, float | str] = {}
    for _ in range(args.rounds):
        for name in ROWS:
            found = run_apart(name)
            print(name, found, flush=True)
            known = best.get(name)
            if known is None or (
                isinstance(found, float) and (isinstance(known, str) or found < known)
            ):
                best[name] = found
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    chosen = f"{args.model}, batch {args.batch}, {args.precision}, {device}"
    report = f"# train_step: {time.strftime('%Y-%m-%d')}, {chosen}\n\n{table(best, args)}\n"
    print(report)
    if args.out:
        args.out.write_text(report)


if __name__ == "__main__":
    main()
