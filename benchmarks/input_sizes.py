"""Images per second of inference by input size, and the largest batch (the paper's Figure 12).

    python benchmarks/input_sizes.py [--models ViT-B/16 ViT-H/14 R50x1] [--sizes 64 128 224 384 512]
        [--most 4096]

As in appendix D.5: the batch doubles until it does not fit, or is `--most`, or its pass would take
more than 10 s by the speed of the one before. The speed is that of the fastest batch, with images
that are on the device, in bf16, eager. A side that patches do not fill is the nearest one that they
do.
"""

import argparse
import functools
import re
import statistics
import time

import torch

from benchmarks.result import header, machine
from vit_ray.measure.meters import unless_out_of_memory
from vit_ray.models import build_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MOST_PASS_S, TIMED_S, LEAST_PASSES = 10.0, 0.5, 3


def side_of(name: str, size: int) -> int:
    """The nearest side in whole patches, if the model has them."""
    patch = re.fullmatch(r"(?!R)[^/]*/(\d+)", name)
    side = int(patch[1]) if patch else 1
    return max(1, round(size / side)) * side


@torch.no_grad()
def pass_s(model: torch.nn.Module, side: int, batch: int) -> float:
    """The median of forward passes of one batch, after two of them."""
    images = torch.rand(batch, 3, side, side, dtype=torch.bfloat16, device=DEVICE)
    times: list[float] = []
    while len(times) < 2 + LEAST_PASSES or sum(times[2:]) < TIMED_S:
        start_s = time.perf_counter()
        model(images)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times[2:])


def row(name: str, size: int, most: int) -> str:
    """A line of the table."""
    side, batch, speeds, ended_by = side_of(name, size), 1, dict[int, float](), "memory"
    with DEVICE:
        model = build_model(name, 1000, side).to(torch.bfloat16).eval()
    while seconds := unless_out_of_memory(functools.partial(pass_s, model, side, batch), DEVICE):
        speeds[batch], batch = batch / seconds, 2 * batch
        if batch > most or 2 * seconds > MOST_PASS_S:
            ended_by = "--most" if batch > most else "pass time"
            break
    if not speeds:
        return f"| {name} | {side} | - | - | 0 (memory) |"
    fastest = max(speeds, key=lambda one: speeds[one])
    return f"| {name} | {side} | {speeds[fastest]:,.0f} | {fastest} | {max(speeds)} ({ended_by}) |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["ViT-B/16", "ViT-H/14", "R50x1"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128, 224, 384, 512])
    parser.add_argument("--most", type=int, default=4096)
    args = parser.parse_args()
    print(machine())
    rows = header("model | input px | images/s | at batch | largest batch (ended by)")
    for name in args.models:
        for size in args.sizes:
            rows.append(row(name, size, args.most))
    print("", *rows, sep="\n")


if __name__ == "__main__":
    main()
