"""Training steps per second of a ViT: this project's model and its peers.

    python benchmarks/model_step.py [--models ViT-S/16 ViT-B/16] [--batch 16] [--dtype float32]
        [--rounds 7] [--threads 1] [--modes eager compiled] [--out FILE.md]

A step is forward, softmax cross-entropy, backward and AdamW on one random batch that stays on the
device; all models have the same size, batch, dtype, activation (tanh GELU) and optimiser. In
bfloat16 everything is, weights and AdamW's moments too, for all of them; what is compiled is each
one's blocks, as `train.compile` does it. One process measures every
model in turn, round after round, so that a change of the machine's pace falls on all of them. The
ratio is the median over rounds of their time by our time in that round (above 1: ours is faster);
beside wall time stands the CPU time of the process, which other programs on the machine disturb
less. A peer that cannot be imported is listed as such, and the batch is halved while any of them
runs out of memory. On a GPU where there is one, else on the CPU.

MFU is against the dense peak of a GPU that `vit_ray.measure.devices` knows, by the products that a
step computes, as torch counts them (ours works out only the class token in its last block); beside
it stands the share by the count of the paper's Table 6, which takes every block whole.
"""

import argparse
import gc
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from vit_ray.measure.devices import peak_flops
from vit_ray.models import build_model
from vit_ray.models.catalog import PlainVit, find_spec
from vit_ray.models.flops import forward_macs

NUM_CLASSES = 1000
IMAGE_SIZE = 224
TIMM_NAMES = {
    "ViT-Ti/16": "vit_tiny_patch16_224",
    "ViT-S/16": "vit_small_patch16_224",
    "ViT-B/16": "vit_base_patch16_224",
    "ViT-L/16": "vit_large_patch16_224",
    "ViT-H/14": "vit_huge_patch14_224",
}
OURS = "vit_ray"
# What this project holds itself to on an H200 in bfloat16, compiled.
MFU_BARS = {"ViT-B/16": 0.45, "ViT-L/16": 0.50, "ViT-H/14": 0.55}
RATIO_BAR = 1.1

Logits = Callable[[Tensor], Tensor]


@dataclass
class Row:
    """A model's seconds a step, wall and CPU time, round by round; or why it was not run."""

    model: str
    mode: str
    peer: str
    batch: int
    dtype: torch.dtype
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    flops: int = 0
    """Of one image's forward and backward pass, as they are computed."""
    note: str = ""

    @property
    def images_per_s(self) -> float:
        return self.batch / statistics.median(self.wall_s)


def our_model(name: str) -> nn.Module:
    """This project's model."""
    return build_model(name, NUM_CLASSES, IMAGE_SIZE)


def transformers_model(name: str) -> nn.Module:
    """Hugging Face transformers' ViT with its fused attention."""
    from transformers import ViTConfig, ViTForImageClassification

    spec, _ = find_spec(name, {})
    assert isinstance(spec, PlainVit)
    config = ViTConfig(
        hidden_size=spec.size.width,
        intermediate_size=spec.size.mlp_dim,
        num_attention_heads=spec.size.num_heads,
        num_hidden_layers=spec.size.depth,
        patch_size=spec.patch_size,
        image_size=IMAGE_SIZE,
        num_labels=NUM_CLASSES,
        hidden_act="gelu_pytorch_tanh",
        layer_norm_eps=1e-6,
    )
    config._attn_implementation = "sdpa"

    class Logits(nn.Module):
        """Only the logits, so that all rows return the same."""

        def __init__(self) -> None:
            super().__init__()
            self.vit = ViTForImageClassification(config)

        def forward(self, images: Tensor) -> Tensor:
            logits: Tensor = self.vit(images).logits
            return logits

    return Logits()


def timm_model(name: str) -> nn.Module:
    """timm's ViT."""
    import timm

    return timm.create_model(TIMM_NAMES[name], num_classes=NUM_CLASSES, act_layer="gelu_tanh")


PEERS: dict[str, Callable[[str], nn.Module]] = {
    OURS: our_model,
    "transformers": transformers_model,
    "timm": timm_model,
}


class Trainee:
    """One model with its optimiser and batch, ready to take steps."""

    def __init__(self, model: nn.Module, is_compiled: bool, batch: int, dtype: torch.dtype) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        self.model = model.to(self.device, dtype).train()
        if is_compiled:
            compile_blocks(self.model)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator().manual_seed(0)
        shape = (batch, 3, IMAGE_SIZE, IMAGE_SIZE)
        self.images = (torch.rand(shape, generator=generator) * 2 - 1).to(self.device, dtype)
        labels = torch.randint(NUM_CLASSES, (batch,), generator=generator)
        self.labels = labels.to(self.device)

    def seconds(self, steps: int) -> tuple[float, float]:
        """Wall and CPU seconds a step, over some steps."""
        self._wait()
        start_s, cpu_start_s = time.perf_counter(), time.process_time()
        for _ in range(steps):
            loss = F.cross_entropy(self.model(self.images).float(), self.labels)
            loss.backward()
            self.optimiser.step()
            self.optimiser.zero_grad()
        self._wait()
        elapsed_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_start_s
        return elapsed_s / steps, cpu_s / steps

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def compile_blocks(model: nn.Module) -> None:
    """Compile the blocks of a Transformer, all by the code of one: in seconds, and not minutes."""
    chains = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    for block in max(chains, key=len):
        block.compile()


def measure(name: str, mode: str, batch: int, dtype: torch.dtype, rounds: int) -> list[Row]:
    """Every peer's seconds a step, at the largest batch from this one down that fits them all."""
    while True:
        try:
            return _measure(name, mode, batch, dtype, rounds)
        except torch.OutOfMemoryError:
            if batch == 1:
                raise
        gc.collect()  # what the failed attempt held
        torch.cuda.empty_cache()
        batch //= 2


def _measure(name: str, mode: str, batch: int, dtype: torch.dtype, rounds: int) -> list[Row]:
    """Rounds of all peers, interleaved."""
    torch._dynamo.reset()
    trainees: dict[str, Trainee] = {}
    rows = {peer: Row(name, mode, peer, batch, dtype) for peer in PEERS}
    for peer, build in PEERS.items():
        try:
            rows[peer].flops = step_flops(build, name)
            trainees[peer] = Trainee(build(name), mode == "compiled", batch, dtype)
        except ImportError as error:
            rows[peer].note = f"cannot be imported: {error}"
    steps = 20 if torch.cuda.is_available() else 1
    for trainee in trainees.values():
        trainee.seconds(3)
    for turn in range(rounds):
        # Each round begins with another model, so that none always follows the same one.
        order = list(trainees)
        for peer in order[turn % len(order) :] + order[: turn % len(order)]:
            wall_s, cpu_s = trainees[peer].seconds(steps)
            rows[peer].wall_s.append(wall_s)
            rows[peer].cpu_s.append(cpu_s)
    return list(rows.values())


def step_flops(build: Callable[[str], nn.Module], name: str) -> int:
    """Of one image's forward and backward pass, counted by torch on a model without memory."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        build(name)(torch.empty(1, 3, IMAGE_SIZE, IMAGE_SIZE)).sum().backward()
    return int(counter.get_total_flops())


def table(rows: list[Row]) -> str:
    """Markdown: images per second at the median, share of the peak, and theirs over ours."""
    lines = [
        "| model | mode | implementation | batch | images/s | MFU | by the paper's count "
        "| theirs / ours, wall | theirs / ours, CPU time | step, fastest to slowest |",
        "|" + "---|" * 10,
    ]
    for row in rows:
        head = f"| {row.model} | {row.mode} | {row.peer} | {row.batch}"
        if not row.wall_s:
            lines.append(f"{head} | - | - | - | - | - | {row.note} |")
            continue
        ours = next(r for r in rows if (r.model, r.mode, r.peer) == (row.model, row.mode, OURS))
        lines.append(
            f"{head} | {row.images_per_s:.2f} | {_mfu(row)} | {_ratio(row.wall_s, ours.wall_s):.3f}"
            f"{_bar(row, RATIO_BAR if row.peer != OURS else None, '.1f')}"
            f" | {_ratio(row.cpu_s, ours.cpu_s):.3f} "
            f"| {min(row.wall_s):.3f} to {max(row.wall_s):.3f} s |"
        )
    return "\n".join(lines)


def _mfu(row: Row) -> str:
    """Two cells: the share of the peak by what is computed, and by the paper's count."""
    precision = "bf16" if row.dtype == torch.bfloat16 else "fp32"
    peak = (
        peak_flops(torch.cuda.get_device_name(), precision) if torch.cuda.is_available() else None
    )
    if peak is None:
        return "- | -"
    paper = 6 * forward_macs(row.model, NUM_CLASSES, IMAGE_SIZE)
    shares = [flops * row.images_per_s / peak for flops in (row.flops, paper)]
    bar = _bar(row, MFU_BARS.get(row.model) if row.peer == OURS else None, ".0%")
    return f"{shares[0]:.1%}{bar} | {shares[1]:.1%}"


def _bar(row: Row, bar: float | None, style: str) -> str:
    """The bar, where one holds: on an H200, compiled, in bfloat16."""
    is_held = torch.cuda.is_available() and "H200" in torch.cuda.get_device_name()
    if bar is None or not is_held or row.mode != "compiled" or row.dtype != torch.bfloat16:
        return ""
    return f" (bar {bar:{style}})"


def _ratio(theirs: list[float], ours: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def machine() -> str:
    """Device, processor and versions."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        cpu = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout
        names = [line.split(":", 1)[1].strip() for line in cpu.splitlines() if "Model name" in line]
        device = f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} threads"
    return f"{device}; Python {platform.python_version()}, torch {torch.__version__}"


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", nargs="+", choices=list(TIMM_NAMES), default=["ViT-S/16", "ViT-B/16"]
    )
    parser.add_argument("--modes", nargs="+", choices=["eager", "compiled"])
    parser.add_argument("--batch", type=int, default=16, help="at most")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, help="of torch; CPU time is even only with one")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    rows: list[Row] = []
    for mode in arguments.modes or ["eager", "compiled"]:
        for name in arguments.models:
            dtype = getattr(torch, arguments.dtype)
            rows += measure(name, mode, arguments.batch, dtype, arguments.rounds)
            print(table(rows), flush=True)
    text = (
        f"{machine()}; {date.today().isoformat()}\n\n"
        f"{arguments.dtype}, {arguments.rounds} rounds\n\n{table(rows)}\n"
    )
    if arguments.out:
        arguments.out.write_text(text)
    print("\n" + text)


if __name__ == "__main__":
    main()
