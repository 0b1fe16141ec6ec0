"""Training steps per second of a ViT: this project's model and its peers.

    python benchmarks/model_step.py [--models ViT-S/16 ViT-B/16] [--batch 16] [--dtype float32]
        [--rounds 7] [--threads 1] [--modes eager compiled] [--out FILE.md]

A step is forward, softmax cross-entropy, backward and AdamW on one random batch that stays on the
device; all models have the same size, dtype, activation (tanh GELU) and optimiser. In
bfloat16 everything is, weights and AdamW's moments too, for all of them; what is compiled is each
one's blocks, as `train.compile` does it. One process measures every
model in turn, round after round, so that a change of the machine's pace falls on all of them. The
ratio is the median over rounds of their time for an image by ours in that round (above 1: ours is
faster); beside wall time stands the CPU time of the process, which other programs on the machine
disturb less.

Of several sizes of a batch (`--batch 64 128 256`) each model takes the fastest: tried eagerly from
the middle one on, up while it becomes faster and fits, and down while it runs out of memory, as
`train.micro_batch_size=auto` goes. A peer that cannot be imported, or fails, is a row that says so;
what cannot be compiled is measured eager, and says so. The table is printed after every round. On a
GPU where there is one, else on the CPU.

MFU is against the dense peak of a GPU that `vit_ray.measure.devices` knows, by the products that a
step computes, as torch counts them (ours works out only the class token in its last block); beside
it stands the share by the count of the paper's Table 6, which takes every block whole.
"""

import argparse
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
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
from vit_ray.train.out_of_memory import largest_that_fits, unless_out_of_memory

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
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Of one model in a round; on a CPU a step.
TURN_S = 1.5

Logits = Callable[[Tensor], Tensor]


@dataclass
class Row:
    """A model's seconds a step, wall and CPU time, round by round; or why it was not run."""

    model: str
    mode: str
    peer: str
    dtype: torch.dtype
    batch: int = 0
    """The size that was chosen."""
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    flops: int = 0
    """Of one image's forward and backward pass, as they are computed."""
    tried: dict[int, float | None] = field(default_factory=dict)
    """Images per second, eager, by size of the batch; None where it did not fit."""
    note: str = ""
    """Why it was not run, or not compiled."""

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

    def __init__(self, build: Callable[[str], nn.Module], name: str, dtype: torch.dtype) -> None:
        with DEVICE:
            self.model = build(name).to(dtype).train()
        self.dtype = dtype
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.take_batch(1)

    def take_batch(self, size: int) -> None:
        """Step on another batch from now on."""
        generator = torch.Generator(DEVICE).manual_seed(0)
        shape = (size, 3, IMAGE_SIZE, IMAGE_SIZE)
        self.images = torch.rand(shape, generator=generator, device=DEVICE).to(self.dtype) * 2 - 1
        self.labels = torch.randint(NUM_CLASSES, (size,), generator=generator, device=DEVICE)

    def seconds(self, steps: int) -> tuple[float, float]:
        """Wall and CPU seconds a step, over some steps."""
        self.optimiser.zero_grad()  # of a step that did not fit
        wait()
        start_s, cpu_start_s = time.perf_counter(), time.process_time()
        for _ in range(steps):
            loss = F.cross_entropy(self.model(self.images).float(), self.labels)
            loss.backward()
            self.optimiser.step()
            self.optimiser.zero_grad()
        wait()
        elapsed_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_start_s
        return elapsed_s / steps, cpu_s / steps

    def try_batch(self, size: int, steps: int = 2) -> float | None:
        """Seconds a step on a batch of this size, after a first one; None if it does not fit."""

        def taken() -> float:
            self.take_batch(size)
            self.seconds(1)
            return self.seconds(steps)[0]

        return unless_out_of_memory(taken, DEVICE)


def wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """The blocks of a Transformer."""
    chains = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    yield from max(chains, key=len)


def compile_blocks(model: nn.Module) -> None:
    """Compile the blocks of a Transformer, all by the code of one: in seconds, and not minutes."""
    torch._dynamo.config.recompile_limit = 32
    for block in blocks_of(model):
        block.compile(dynamic=False)


def prepared(build: Callable[[str], nn.Module], sizes: list[int], row: Row) -> Trainee | None:
    """A model at its best batch, compiled if it is to be and can be; what was found is in `row`."""
    row.flops = step_flops(build, row.model)
    trainee = Trainee(build, row.model, row.dtype)
    best = best_batch(trainee, sizes, row.tried) if len(sizes) > 1 else sizes[0]
    fitting = [size for size in sizes if size <= (best or 0)]

    def largest() -> int | None:
        """Compiled, a model may take more memory than it took eager."""
        if not fitting:
            return None
        return largest_that_fits(
            fitting, fitting[-1], lambda n: trainee.try_batch(n, 1) is not None
        )

    found = None
    if row.mode == "compiled":
        compile_blocks(trainee.model)
        try:
            found = largest()
        except Exception as error:  # as many kinds as there are parts of a compiler
            row.note = f"not compiled: {reason(error)}"
            for block in blocks_of(trainee.model):
                block._compiled_call_impl = None
    if row.mode == "eager" or row.note:
        found = largest()
    if not found:
        row.note = f"out of memory at {sizes[0]} images"
        return None
    row.batch = found
    return trainee


def best_batch(trainee: Trainee, sizes: list[int], tried: dict[int, float | None]) -> int | None:
    """The size with the most images per second; None where none fits."""

    def is_faster(size: int) -> bool:
        step_s = trainee.try_batch(size)
        fastest = max((rate for rate in tried.values() if rate), default=0.0)
        tried[size] = size / step_s if step_s else None
        return step_s is not None and size / step_s > fastest

    return largest_that_fits(sizes, sizes[len(sizes) // 2], is_faster)


def reason(error: BaseException) -> str:
    """In one line."""
    return " ".join(f"{type(error).__name__}: {error}".replace("|", "/").split())[:160]


def measure(
    name: str, mode: str, sizes: list[int], dtype: torch.dtype, rounds: int
) -> Iterator[list[Row]]:
    """All peers' rows after each round, in which they step in turn."""
    torch._dynamo.reset()
    trainees: dict[str, tuple[Trainee, int]] = {}
    rows = {peer: Row(name, mode, peer, dtype) for peer in PEERS}
    for peer, build in PEERS.items():
        try:
            trainee = prepared(build, sizes, rows[peer])
            if trainee is not None:
                step_s = trainee.seconds(2)[0]
                steps = max(1, min(20, int(TURN_S / step_s))) if DEVICE.type == "cuda" else 1
                trainees[peer] = trainee, steps
        except Exception as error:  # of a peer's own code, or its absence
            rows[peer].note = reason(error)
        yield list(rows.values())
    for turn in range(rounds):
        # Each round begins with another model, so that none always follows the same one.
        order = list(trainees)
        first = turn % max(1, len(order))
        for peer in order[first:] + order[:first]:
            wall_s, cpu_s = trainees[peer][0].seconds(trainees[peer][1])
            rows[peer].wall_s.append(wall_s)
            rows[peer].cpu_s.append(cpu_s)
        yield list(rows.values())


def step_flops(build: Callable[[str], nn.Module], name: str) -> int:
    """Of one image's forward and backward pass, counted by torch on a model without memory."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        build(name)(torch.empty(1, 3, IMAGE_SIZE, IMAGE_SIZE)).sum().backward()
    return int(counter.get_total_flops())


def table(rows: list[Row]) -> str:
    """Markdown: images per second at the median, share of the peak, and theirs over ours."""
    lines = [
        "| model | mode | implementation | batch | images/s | MFU | by the paper's count "
        "| theirs / ours, wall | theirs / ours, CPU time | step, fastest to slowest "
        "| images/s tried, eager | note |",
        "|" + "---|" * 12,
    ]
    for row in rows:
        head = f"| {row.model} | {row.mode} | {row.peer} | {row.batch or '-'}"
        tail = f"{_tried(row)} | {row.note} |"
        if not row.wall_s:
            lines.append(f"{head} | - | - | - | - | - | - | {tail}")
            continue
        ours = next(r for r in rows if (r.model, r.mode, r.peer) == (row.model, row.mode, OURS))
        bar = _bar(row, RATIO_BAR if row.peer != OURS else None, ".1f")
        lines.append(
            f"{head} | {row.images_per_s:.2f} | {_mfu(row)} | {_ratio(row, ours, 'wall_s')}{bar}"
            f" | {_ratio(row, ours, 'cpu_s')} "
            f"| {min(row.wall_s):.3f} to {max(row.wall_s):.3f} s | {tail}"
        )
    return "\n".join(lines)


def _tried(row: Row) -> str:
    rates = ((size, row.tried[size]) for size in sorted(row.tried))
    return ", ".join(f"{size}: {f'{rate:.1f}' if rate else 'no memory'}" for size, rate in rates)


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
    is_compiled = row.mode == "compiled" and not row.note
    if bar is None or not is_held or not is_compiled or row.dtype != torch.bfloat16:
        return ""
    return f" (bar {bar:{style}})"


def _ratio(theirs: Row, ours: Row, clock: str) -> str:
    """Of the time for an image."""
    pairs = zip(getattr(theirs, clock), getattr(ours, clock), strict=False)
    ratios = [(a / theirs.batch) / (b / ours.batch) for a, b in pairs]
    return f"{statistics.median(ratios):.3f}" if ratios else "-"


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
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[16], help="each model takes its fastest of these"
    )
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
            found: list[Row] = []
            sizes = sorted(set(arguments.batch))
            for found in measure(name, mode, sizes, dtype, arguments.rounds):
                print(f"\n{table(rows + found)}\n", flush=True)
            rows += found
    text = (
        f"{machine()}; {date.today().isoformat()}\n\n"
        f"{arguments.dtype}, {arguments.rounds} rounds\n\n{table(rows)}\n"
    )
    if arguments.out:
        arguments.out.write_text(text)
    print("\n" + text)


if __name__ == "__main__":
    main()
