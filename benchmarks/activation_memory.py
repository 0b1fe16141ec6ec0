"""Predicted against measured memory of forward and backward pass, with torch alone, on a GPU.

    python benchmarks/activation_memory.py [--models ViT-B/16 ViT-L/16 ViT-H/14] [--batch 64]

The prediction runs the model on tensors without memory (`vit_ray.measure.activation_memory`), as
`vit-ray plan` does; the measurement is the rise of torch's peak over what lies there before.
Weights are bf16; a weight's gradient counts in both until it is whole. The batch is halved while it
does not fit; a model that fails is a row that says why. Nothing is compiled: the prediction does
not know what the compiler would save.
Without a GPU only the prediction is shown.
"""

import argparse
import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.result import header, reason
from vit_ray.measure.activation_memory import drop_gradients, gpu_kernels, peak_bytes
from vit_ray.models import build_model
from vit_ray.training.out_of_memory import unless_out_of_memory

IMAGE_SIZE, NUM_CLASSES = 224, 1000
DEVICE = torch.device("cuda")
BAR = 0.10


def predicted_gib(name: str, batch: int) -> float:
    with torch.device("meta"), gpu_kernels():
        forward, weights = pass_of(name, batch)
        return peak_bytes(forward, weights) / 2**30


def measured_gib(name: str, batch: int) -> float:
    with DEVICE:
        forward, weights = pass_of(name, batch)
    drop_gradients(weights)
    forward().backward()  # libraries take their workspaces now
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    forward().backward()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def pass_of(name: str, batch: int) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """The loss of one batch, and the model's weights, on torch's default device."""
    model = build_model(name, NUM_CLASSES, IMAGE_SIZE).to(torch.bfloat16)
    images = torch.zeros(batch, 3, IMAGE_SIZE, IMAGE_SIZE, dtype=torch.bfloat16)
    labels = torch.zeros(batch, dtype=torch.int64)
    return lambda: F.cross_entropy(model(images).float(), labels), list(model.parameters())


def largest_measured(name: str, batch: int) -> tuple[int, float]:
    """The largest batch from this one down, by halves, that fits, and its memory in GiB."""
    while batch:
        gib = unless_out_of_memory(functools.partial(measured_gib, name, batch), DEVICE)
        if gib is not None:
            return batch, gib
        batch //= 2
    raise MemoryError("not even one image fits")


def row(name: str, batch: int) -> str:
    if not torch.cuda.is_available():
        return f"| {name} | {batch} | {predicted_gib(name, batch):.3f} | no GPU | |"
    batch, measured = largest_measured(name, batch)
    predicted = predicted_gib(name, batch)
    figures = f"{predicted:.3f} | {measured:.3f} | {predicted / measured:.3f}"
    return f"| {name} | {batch} | {figures} (bar {1 - BAR:.1f} to {1 + BAR:.1f}) |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["ViT-B/16", "ViT-L/16", "ViT-H/14"])
    parser.add_argument("--batch", type=int, default=64, help="at most")
    args = parser.parse_args()
    print(*header("model | batch | GiB predicted | measured | predicted / measured"), sep="\n")
    for name in args.models:
        try:
            print(row(name, args.batch), flush=True)
        except Exception as error:  # the others are worth having
            print(f"| {name} | {args.batch} | not run: `{reason(error)}` | | |", flush=True)


if __name__ == "__main__":
    main()
