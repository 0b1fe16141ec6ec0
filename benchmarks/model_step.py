"""Training steps per second of a ViT: this project's model and its peers.

    python benchmarks/model_step.py [--models ViT-S/16 ViT-B/16] [--batch 16] [--dtype float32]
        [--rounds 7] [--threads 1] [--modes eager compiled] [--beside transformers timm]
        [--out FILE.md]

A step is forward, softmax cross-entropy, backward and AdamW on one random batch that stays on the
device; all models have the same size, dtype, activation (tanh GELU) and optimiser. In bfloat16
everything is, weights and AdamW's moments too, for all of them; what is compiled is each one's
blocks, as `train.compile` does it. One process measures every model in turn, round after round, so
that a change of the machine's pace falls on all of them; the first steps of a turn do not count.
The ratio is the median over rounds of their time for a step by ours in that round (above 1: ours is
faster); beside wall time stands the CPU time of the process, which other programs on the machine
disturb less. A peer that cannot be imported, or fails, is a row that says so; what cannot be
compiled is measured eager, and says so. The table is printed after every round. On a GPU where
there is one, else on the CPU.

MFU is against the dense peak of a GPU that `vit_ray.measure.devices` knows, by the products that a
step computes, as torch counts them (ours works out only the class token in its last block); beside
it stands the share by the count of the paper's Table 6, which takes every block whole.
"""

import argparse
import contextlib
import gc
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.result import finish, header, in_turn, machine, reason
from vit_ray.measure.devices import peak_flops
from vit_ray.models import build_model
from vit_ray.models.catalog import find_spec
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
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Steps that are counted, of one model in a round; at least one.
TURN_S, MOST_STEPS = 1.2, 20


@dataclass
class Row:
    """A model's seconds a step, round by round; or why it was not run."""

    model: str
    mode: str
    peer: str
    dtype: torch.dtype
    batch: int
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    flops: int = 0
    """Of one image's forward and backward pass, as they are computed."""
    notes: list[str] = field(default_factory=list)
    """Why it was not run, or not as it was to be."""


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
    "transformers": transformers_model,
    "timm": timm_model,
}
BUILDERS = {OURS: our_model, **PEERS}


class Trainee:
    """One model with its optimiser and a batch, ready to take steps."""

    def __init__(self, model: nn.Module, batch: int, dtype: torch.dtype) -> None:
        self.model = model.to(dtype).train()
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator(DEVICE).manual_seed(0)
        shape = (batch, 3, IMAGE_SIZE, IMAGE_SIZE)
        self.images = torch.rand(shape, generator=generator, device=DEVICE).to(dtype) * 2 - 1
        self.labels = torch.randint(NUM_CLASSES, (batch,), generator=generator, device=DEVICE)

    def compile(self) -> None:
        """The blocks, all by the code of one, in seconds and not minutes."""
        # Beyond the limit it would go on eager, and say nothing.
        torch._dynamo.config.recompile_limit = 64
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        for block in blocks_of(self.model):
            block.compile(dynamic=False)

    def stay_eager(self) -> None:
        """Undo `compile`."""
        for block in blocks_of(self.model):
            block._compiled_call_impl = None

    def _steps(self, count: int) -> tuple[float, float]:
        wait()
        start_s, cpu_start_s = time.perf_counter(), time.process_time()
        for _ in range(count):
            F.cross_entropy(self.model(self.images).float(), self.labels).backward()
            self.optimiser.step()
            self.optimiser.zero_grad()
        wait()
        elapsed_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_start_s
        return elapsed_s / count, cpu_s / count

    def turn(self) -> tuple[float, float]:
        """Wall and CPU seconds a step.

        The first step is not counted: it takes memory. What torch keeps for the tensors of one
        model has the wrong sizes for the next one, so it is given back after each turn.
        """
        self._steps(1)
        step = self._steps(1)
        count = min(MOST_STEPS, int(TURN_S / step[0]))
        step = self._steps(count) if count > 1 else step
        release()
        return step


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


def measure(
    name: str, mode: str, batch: int, dtype: torch.dtype, rounds: int, beside: list[str]
) -> Iterator[list[Row]]:
    """All rows after each round, in which they step in turn.

    Args:
        beside: of `PEERS`.
    """
    torch._dynamo.reset()
    trainees: dict[str, Trainee] = {}
    rows = {peer: Row(name, mode, peer, dtype, batch) for peer in (OURS, *beside)}

    def attempt(run: Callable[[str], None], peer: str) -> None:
        """If it fails, the model's row says why, and the others go on with all the memory."""
        try:
            run(peer)
        except Exception as error:  # of a peer's own code, or its absence
            rows[peer].notes.append(reason(error))
            trainees.pop(peer, None)
        with contextlib.suppress(RuntimeError):  # of a device that takes no calls any more
            release()

    def add(peer: str) -> None:
        with DEVICE:
            trainees[peer] = Trainee(BUILDERS[peer](name), batch, dtype)
        begin(trainees[peer], rows[peer])

    def take_turn(peer: str) -> None:
        wall_s, cpu_s = trainees[peer].turn()
        rows[peer].wall_s.append(wall_s)
        rows[peer].cpu_s.append(cpu_s)

    for peer in rows:
        attempt(add, peer)
    for turn in range(rounds):
        for peer in in_turn(list(trainees), turn):
            attempt(take_turn, peer)
        yield list(rows.values())


def begin(trainee: Trainee, row: Row) -> None:
    """The first turn, which does not count: compiled if it is to be and can be."""
    try:
        row.flops = step_flops(BUILDERS[row.peer], row.model)
    except Exception as error:  # of a peer's own code, which may not build without memory
        row.notes.append(f"no MFU: {reason(error)}")
    if row.mode == "compiled":
        try:
            trainee.compile()
            trainee.turn()
            return
        except Exception as error:  # as many kinds as there are parts of a compiler
            row.notes.append(f"not compiled: {reason(error)}")
            trainee.stay_eager()
    trainee.turn()


def step_flops(build: Callable[[str], nn.Module], name: str) -> int:
    """Of one image's forward and backward pass, counted by torch on a model without memory."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        build(name)(torch.empty(1, 3, IMAGE_SIZE, IMAGE_SIZE)).sum().backward()
    return int(counter.get_total_flops())


def table(rows: list[Row]) -> str:
    """Markdown: images per second at the median, share of the peak, and theirs over ours."""
    lines = header(
        "model | mode | implementation | batch | images/s | MFU | by the paper's count "
        "| theirs / ours, wall | theirs / ours, CPU time | step, fastest to slowest | note"
    )
    for row in rows:
        head, notes = f"| {row.model} | {row.mode} | {row.peer} | {row.batch}", "; ".join(row.notes)
        if not row.wall_s:
            lines.append(f"{head} | - | - | - | - | - | - | {notes} |")
            continue
        ours = next(r for r in rows if (r.model, r.mode, r.peer) == (row.model, row.mode, OURS))
        rate = row.batch / statistics.median(row.wall_s)
        lines.append(
            f"{head} | {rate:.2f} | {_mfu(row, rate)} | {_ratio(row.wall_s, ours.wall_s)} "
            f"| {_ratio(row.cpu_s, ours.cpu_s)} "
            f"| {min(row.wall_s):.3f} to {max(row.wall_s):.3f} s | {notes} |"
        )
    return "\n".join(lines)


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
    return f"{computed if row.flops else '-'} | {by_paper}"


def _ratio(theirs_s: list[float], ours_s: list[float]) -> str:
    """In the rounds that both took part in: one that failed takes part in no later one."""
    ratios = [theirs / ours for theirs, ours in zip(theirs_s, ours_s, strict=False)]
    return f"{statistics.median(ratios):.3f}" if ratios else "-"


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", nargs="+", choices=list(TIMM_NAMES), default=["ViT-S/16", "ViT-B/16"]
    )
    parser.add_argument("--modes", nargs="+", choices=["eager", "compiled"])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--beside", nargs="+", choices=list(PEERS), default=list(PEERS), metavar="NAME"
    )
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
            chosen = (arguments.batch, dtype, arguments.rounds, arguments.beside)
            for found in measure(name, mode, *chosen):
                print(f"\n{table(rows + found)}\n", flush=True)
            rows += found
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    threads = f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    chosen = f"{device}, {threads}; {arguments.dtype}, {arguments.rounds} rounds"
    finish(f"# model_step: {machine()}\n\n{chosen}\n\n{table(rows)}", arguments.out)


if __name__ == "__main__":
    main()
