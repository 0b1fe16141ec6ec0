"""Training steps per second of a ViT: this project's model and its peers.

    python benchmarks/model_step.py [--models ViT-S/16 ViT-B/16] [--batch 16] [--dtype float32]
        [--rounds 7] [--threads 1] [--modes eager compiled] [--out FILE.md]

A step is forward, softmax cross-entropy, backward and AdamW on one random batch that stays on the
device; all models have the same size, dtype, activation (tanh GELU) and optimiser. In
bfloat16 everything is, weights and AdamW's moments too, for all of them; what is compiled is each
one's blocks, as `train.compile` does it. One process measures every
model in turn, round after round, so that a change of the machine's pace falls on all of them; the
first steps of a turn do not count. The ratio is the median over rounds of their time for an image
by ours in that round (above 1: ours is faster); beside wall time stands the CPU time of the
process, which other programs on the machine disturb less.

Of several sizes of a batch (`--batch 64 128 256`) each model takes the fastest that was tried as it
is measured. Eager, that is all that fit. Compiled, where every size takes seconds to compile, it is
the three next to the size that is fastest eager, itself among them, or fewer where they take long;
the row has the rates of all that were tried. All models with their weights and AdamW's moments lie
on the device from the start, so a size that is found fits beside the others; a model that runs out
of memory in a round all the same goes on at the next smaller size, and says so. A peer that cannot
be imported, or fails, is a row that says so; what cannot be compiled is measured eager, and says
so. The table is printed after every round. On a GPU where there is one, else on the CPU.

MFU is against the dense peak of a GPU that `vit_ray.measure.devices` knows, by the products that a
step computes, as torch counts them (ours works out only the class token in its last block); beside
it stands the share by the count of the paper's Table 6, which takes every block whole.
"""

import argparse
import contextlib
import gc
import importlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.result import finish, header, in_turn, machine, reason
from vit_ray.measure.devices import find_device, peak_flops
from vit_ray.models import build_model
from vit_ray.models.catalog import find_spec
from vit_ray.models.flops import forward_macs
from vit_ray.training.memory.out_of_memory import unless_out_of_memory

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
# Steps that are counted, of one model in a round and of a size that is tried; at least one.
TURN_S, TRIAL_S, MOST_STEPS = 1.2, 0.4, 20
# Sizes that are compiled for each model, the last two only while they begin within the time. A
# block's forward and backward code takes some 4 s on a server, ours is two blocks (the last one
# works out the class token alone), and the first of a process twice that: a minute for all three
# models, of the section that `gpu.py` has for them.
COMPILED_SIZES, COMPILED_S = 3, 20.0

Rates = dict[int, float | None]
"""Images per second by size of the batch; None where it did not fit."""


@dataclass
class Row:
    """A model's seconds a step, wall and CPU time, round by round; or why it was not run."""

    model: str
    mode: str
    peer: str
    dtype: torch.dtype
    batch: int = 0
    """The size that was chosen; 0 = it is not run, or no longer."""
    wall_s: dict[int, float] = field(default_factory=dict)
    """By round, which a model may have missed."""
    cpu_s: dict[int, float] = field(default_factory=dict)
    flops: int = 0
    """Of one image's forward and backward pass, as they are computed."""
    tried: dict[str, Rates] = field(default_factory=lambda: {"eager": {}, "compiled": {}})
    """By mode."""
    is_compiled: bool = False
    notes: list[str] = field(default_factory=list)
    """Why it was not run, or not as it was to be."""

    @property
    def images_per_s(self) -> float | None:
        """By the rounds, or before the first by the trial that chose the batch."""
        if self.wall_s:
            return self.batch / statistics.median(self.wall_s.values())
        return self.tried["compiled" if self.is_compiled else "eager"].get(self.batch)


def our_model(name: str) -> nn.Module:
    """This project's model."""
    return build_model(name, NUM_CLASSES, IMAGE_SIZE)


def transformers_model(name: str) -> nn.Module:
    """Hugging Face transformers' ViT with its fused attention."""
    with without_broken("torchvision"):  # which it needs for nothing here
        from transformers import ViTConfig, ViTForImageClassification

    spec = find_spec(name, {})
    size = spec.encoder
    assert size is not None
    config = ViTConfig(
        hidden_size=size.width,
        intermediate_size=size.mlp_dim,
        num_attention_heads=size.num_heads,
        num_hidden_layers=size.depth,
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


@contextlib.contextmanager
def without_broken(library: str) -> Iterator[None]:
    """Inside, a library that is there and cannot be imported is as one that is not there."""
    try:
        importlib.import_module(library)
    except Exception:  # a build for another torch raises what it likes
        sys.modules[library] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if sys.modules[library] is None:
            del sys.modules[library]


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
    """One model with its optimiser, ready to take steps."""

    def __init__(self, build: Callable[[str], nn.Module], name: str, dtype: torch.dtype) -> None:
        with DEVICE:
            self.model = build(name).to(dtype).train()
        self.dtype = dtype
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        for weight in self.model.parameters():
            weight.grad = torch.zeros_like(weight)
        self.optimiser.step()  # makes the moments
        self.optimiser.zero_grad()
        self._take_batch(0)

    def _take_batch(self, size: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)
        shape = (size, 3, IMAGE_SIZE, IMAGE_SIZE)
        images = torch.rand(shape, generator=generator, device=DEVICE).to(self.dtype) * 2 - 1
        labels = torch.randint(NUM_CLASSES, (size,), generator=generator, device=DEVICE)
        self.images, self.labels = images, labels

    def _steps(self, count: int) -> tuple[float, float]:
        self.optimiser.zero_grad()  # of a step that did not fit
        wait()
        start_s, cpu_start_s = time.perf_counter(), time.process_time()
        for _ in range(count):
            loss = F.cross_entropy(self.model(self.images).float(), self.labels)
            loss.backward()
            self.optimiser.step()
            self.optimiser.zero_grad()
        wait()
        elapsed_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_start_s
        return elapsed_s / count, cpu_s / count

    def seconds(self, size: int, least_s: float) -> tuple[float, float] | None:
        """Wall and CPU seconds a step on so many images; None if it runs out of memory.

        A first step is not counted, in which code is compiled and memory taken anew: whatever
        torch kept for later is given back after each call. What it kept for one model's tensors is
        of the wrong sizes for the next one's, and would be missing there.
        """

        def taken() -> tuple[float, float]:
            if len(self.labels) != size:
                self._take_batch(size)
            self._steps(1)
            step = self._steps(1)
            count = min(MOST_STEPS, int(least_s / step[0]))
            return self._steps(count) if count > 1 else step

        return unless_out_of_memory(taken, DEVICE)


def wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def release() -> None:
    """Give back the memory of what nothing uses any more, in circles of references too."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """The blocks of a Transformer."""
    chains = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    yield from max(chains, key=len)


def compile_blocks(model: nn.Module) -> None:
    """Compile the blocks of a Transformer, all by the code of one: in seconds, and not minutes."""
    # Beyond the limit it would go on eager, and say nothing.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for block in blocks_of(model):
        block.compile(dynamic=False)


def choose(trainee: Trainee, sizes: list[int], row: Row) -> None:
    """Find a model's fastest batch, compiled if it is to be and can be; `row` has what was found.

    Args:
        sizes: ascending.

    Raises:
        MemoryError: none fits.
    """
    eager, compiled = row.tried["eager"], row.tried["compiled"]
    row.is_compiled = row.mode == "compiled"
    if row.is_compiled:
        if len(sizes) > 1:
            try_sizes(trainee, sizes, eager)
        start = sizes.index(fastest(eager) or sizes[0])
        nearest = sorted(sizes, key=lambda size: abs(sizes.index(size) - start))
        try:
            compile_blocks(trainee.model)
            try_sizes(trainee, nearest, compiled, COMPILED_SIZES, COMPILED_S)
        except Exception as error:  # as many kinds as there are parts of a compiler
            what = "not compiled" if fastest(compiled) is None else "no further size compiled"
            row.notes.append(f"{what}: {reason(error)}")
            row.is_compiled = fastest(compiled) is not None
    if not row.is_compiled:
        for block in blocks_of(trainee.model):
            block._compiled_call_impl = None
        if not eager:
            try_sizes(trainee, sizes, eager)
    row.batch = fastest(compiled if row.is_compiled else eager) or 0
    if not row.batch:
        raise MemoryError(f"{sizes[0]} images do not fit")


def try_sizes(
    trainee: Trainee,
    sizes: Iterable[int],
    rates: Rates,
    most: float = math.inf,
    limit_s: float = math.inf,
) -> None:
    """Add the rate at each size, but for those above one that did not fit.

    Args:
        most: sizes that fit.
        limit_s: after so long from the first that fitted on, no other is begun.
    """
    end_s, fitted = math.inf, 0
    for size in sizes:
        if fitted >= most or time.monotonic() > end_s:
            return
        if any(tried < size for tried, rate in rates.items() if rate is None):
            continue
        step = trainee.seconds(size, TRIAL_S)
        rates[size] = size / step[0] if step else None
        if step:
            end_s, fitted = min(end_s, time.monotonic() + limit_s), fitted + 1


def fastest(rates: Rates) -> int | None:
    """The size with the most images per second; None where none fits."""
    return max((size for size in rates if rates[size]), key=lambda n: rates[n] or 0.0, default=None)


def measure(
    name: str,
    mode: str,
    sizes: list[int],
    dtype: torch.dtype,
    rounds: int,
    peers: dict[str, Callable[[str], nn.Module]] | None = None,
) -> Iterator[list[Row]]:
    """All peers' rows after each choice of a batch and each round, in which they step in turn.

    Args:
        peers: ours among them; None for `PEERS`.
    """
    torch._dynamo.reset()
    release()
    trainees: dict[str, Trainee] = {}
    peers = PEERS if peers is None else peers
    rows = {peer: Row(name, mode, peer, dtype) for peer in peers}

    def attempt(run: Callable[[str], None], peer: str) -> None:
        """If it fails, the model's row says why, and the others go on with all the memory."""
        try:
            run(peer)
        except Exception as error:  # of a peer's own code, or its absence
            rows[peer].notes.append(reason(error))
            trainees.pop(peer, None)
        if peer not in trainees:
            with contextlib.suppress(RuntimeError):  # of a device that takes no calls any more
                release()

    def add(peer: str) -> None:
        trainees[peer] = Trainee(peers[peer], name, dtype)
        try:
            rows[peer].flops = step_flops(peers[peer], name)
        except Exception as error:  # of a peer's own code, which may not build without memory
            rows[peer].notes.append(f"no MFU: {reason(error)}")

    for peer in peers:
        attempt(add, peer)
    yield list(rows.values())
    for peer in list(trainees):
        attempt(lambda peer: choose(trainees[peer], sizes, rows[peer]), peer)
        yield list(rows.values())
    for turn in range(rounds):
        for peer in in_turn(list(trainees), turn):
            attempt(partial(take_turn, trainees, rows, sizes, turn), peer)
        yield list(rows.values())


def take_turn(
    trainees: dict[str, Trainee], rows: dict[str, Row], sizes: list[int], turn: int, peer: str
) -> None:
    """One round of one model, at a smaller batch if memory runs out.

    Raises:
        MemoryError: no smaller one is left.
    """
    row = rows[peer]
    while (taken := trainees[peer].seconds(row.batch, TURN_S)) is None:
        row.notes.append(f"out of memory at {row.batch} images in round {turn + 1}")
        row.batch = max((size for size in sizes if size < row.batch), default=0)
        # A row has one size of batch.
        row.wall_s.clear()
        row.cpu_s.clear()
        if not row.batch:
            raise MemoryError(f"{sizes[0]} images do not fit")
    row.wall_s[turn], row.cpu_s[turn] = taken


def step_flops(build: Callable[[str], nn.Module], name: str) -> int:
    """Of one image's forward and backward pass, counted by torch on a model without memory."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        build(name)(torch.empty(1, 3, IMAGE_SIZE, IMAGE_SIZE)).sum().backward()
    return int(counter.get_total_flops())


def table(rows: list[Row]) -> str:
    """Markdown: images per second at the median, share of the peak, and theirs over ours."""
    lines = header(
        "model | mode | implementation | batch | images/s | MFU | by the paper's count "
        "| theirs / ours, wall | theirs / ours, CPU time | step, fastest to slowest "
        "| images/s tried, eager | images/s tried, compiled | note"
    )
    for row in rows:
        head = f"| {row.model} | {row.mode} | {row.peer} | {row.batch or '-'}"
        tail = f"{_tried(row, 'eager')} | {_tried(row, 'compiled')} | {'; '.join(row.notes)} |"
        rate = row.images_per_s
        if rate is None:
            lines.append(f"{head} | - | - | - | - | - | - | {tail}")
            continue
        head += f" | {rate:.2f} | {_mfu(row, rate)}"
        if not row.wall_s:
            lines.append(f"{head} | - | - | by its trial, without a round | {tail}")
            continue
        ours = next(r for r in rows if (r.model, r.mode, r.peer) == (row.model, row.mode, OURS))
        is_peer = row.peer in PEERS and row.peer != OURS
        bar = _bar([row, ours], RATIO_BAR if is_peer else None, ".1f")
        wall_s = row.wall_s.values()
        lines.append(
            f"{head} | {_ratio(row.wall_s, ours.wall_s, row, ours)}{bar} "
            f"| {_ratio(row.cpu_s, ours.cpu_s, row, ours)} "
            f"| {min(wall_s):.3f} to {max(wall_s):.3f} s | {tail}"
        )
    return "\n".join(lines)


def _tried(row: Row, mode: str) -> str:
    rates = sorted(row.tried[mode].items())
    return ", ".join(f"{size}: {f'{rate:.1f}' if rate else 'no memory'}" for size, rate in rates)


def _mfu(row: Row, images_per_s: float) -> str:
    """Two cells: the share of the peak by what is computed, and by the paper's count."""
    precision = "bf16" if row.dtype == torch.bfloat16 else "fp32"
    peak = (
        peak_flops(torch.cuda.get_device_name(), precision) if torch.cuda.is_available() else None
    )
    if peak is None:
        return "- | -"
    paper = 6 * forward_macs(row.model, NUM_CLASSES, IMAGE_SIZE)
    computed, by_paper = (f"{n * images_per_s / peak:.1%}" for n in (row.flops, paper))
    bar = _bar([row], MFU_BARS.get(row.model) if row.peer == OURS else None, ".0%")
    return f"{computed if row.flops else '-'}{bar} | {by_paper}"


def _bar(rows: list[Row], bar: float | None, style: str) -> str:
    """The bar, where one holds: on an H200, with all rows compiled, in bfloat16."""
    is_held = torch.cuda.is_available() and (
        find_device(torch.cuda.get_device_name()) == find_device("H200")
    )
    is_fast = all(row.is_compiled and row.dtype == torch.bfloat16 for row in rows)
    return f" (bar {bar:{style}})" if bar is not None and is_held and is_fast else ""


def _ratio(theirs_s: dict[int, float], ours_s: dict[int, float], theirs: Row, ours: Row) -> str:
    """Of the time for an image, in the rounds that both took part in."""
    ratios = [
        (theirs_s[turn] / theirs.batch) / (ours_s[turn] / ours.batch)
        for turn in theirs_s
        if turn in ours_s
    ]
    return f"{statistics.median(ratios):.3f}" if ratios else "-"


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
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    threads = f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    chosen = f"{device}, {threads}; {arguments.dtype}, {arguments.rounds} rounds"
    finish(f"# model_step: {machine()}\n\n{chosen}\n\n{table(rows)}", arguments.out)


if __name__ == "__main__":
    main()
