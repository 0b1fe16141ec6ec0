"""What an offloaded optimizer's step costs the host: torch's AdamW against DeepSpeed's for CPUs.

    python benchmarks/offload_step.py [--elements N] [--rounds N] [--out FILE.md]

One flat fp32 tensor, as ZeRO keeps a worker's share; all kinds step it in turn, in this process.
`DeepSpeedCPUAdam` is compiled at its first use, which takes a C++ compiler, ninja and minutes. The
error is that of the weights after ten steps, against AdamW in fp64.
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from torch import nn

RATE, DECAY, BETAS, STEPS = 1e-3, 0.1, (0.9, 0.999), 10
Make = Callable[[list[nn.Parameter]], Any]


def torch_adamw(**how: bool) -> Make:
    return lambda weights: torch.optim.AdamW(
        weights, lr=RATE, betas=BETAS, eps=1e-8, weight_decay=DECAY, **how
    )


def deepspeed_adam(weights: list[nn.Parameter]) -> Any:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(weights, lr=RATE, betas=BETAS, eps=1e-8, weight_decay=DECAY)


KINDS: dict[str, Make] = {
    "torch AdamW, fused (this project)": torch_adamw(fused=True),
    "DeepSpeedCPUAdam": deepspeed_adam,
    "torch AdamW, each operation apart": torch_adamw(foreach=False, fused=False),
}


def stepped(make: Make, elements: int, dtype: torch.dtype, steps: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(elements, generator=generator).to(dtype))
    optimizer = make([weight])
    for _ in range(steps):
        weight.grad = torch.randn(elements, generator=generator).to(dtype)
        optimizer.step()
    return weight.detach()


def errors(elements: int) -> dict[str, float]:
    exact = stepped(torch_adamw(), elements, torch.float64, STEPS)
    return {
        name: float((stepped(make, elements, torch.float32, STEPS) - exact).norm() / exact.norm())
        for name, make in KINDS.items()
    }


def times(elements: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Median seconds of a step, and of CPU time."""
    optimizers, found = {}, {name: ([], []) for name in KINDS}  # type: ignore[var-annotated]
    for name, make in KINDS.items():
        weight = nn.Parameter(torch.randn(elements))
        weight.grad = torch.randn(elements)
        optimizers[name] = make([weight])
        optimizers[name].step()  # makes the state
    for _ in range(rounds):
        for name, optimizer in optimizers.items():
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            optimizer.step()
            found[name][0].append(time.perf_counter() - wall_s)
            found[name][1].append(time.process_time() - cpu_s)
    return {name: (statistics.median(a), statistics.median(b)) for name, (a, b) in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--elements", type=int, default=20_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    start_s = time.perf_counter()
    deepspeed_adam([nn.Parameter(torch.zeros(8))])
    start_s = time.perf_counter() - start_s
    date, machine = time.strftime("%Y-%m-%d"), platform.machine()
    lines = [
        f"# offload_step: {date}, {machine}, {os.cpu_count()} cores",
        "",
        f"{chosen.elements / 1e6:g}M weights, medians of {chosen.rounds} steps in turn; torch "
        f"{torch.__version__}. `DeepSpeedCPUAdam` was there after {start_s:.1f} s.",
        "",
        "| optimizer | threads | step ms | CPU ms | to torch's fused | error after 10 steps |",
        "|---|---|---|---|---|---|",
    ]
    wrong = errors(min(chosen.elements, 1_000_000))
    for threads in sorted({1, os.cpu_count() or 1}):
        torch.set_num_threads(threads)
        found = times(chosen.elements, chosen.rounds)
        first = found[next(iter(KINDS))][0]
        lines += [
            f"| {name} | {threads} | {wall_s * 1e3:.1f} | {cpu_s * 1e3:.1f} "
            f"| {wall_s / first:.2f} x | {wrong[name]:.1e} |"
            for name, (wall_s, cpu_s) in found.items()
        ]
    text = "\n".join(lines)
    print(text)
    if chosen.out:
        chosen.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
