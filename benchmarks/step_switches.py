"""What torch has to make a step of our model faster, each switch against the step as it is.

    python benchmarks/step_switches.py [--model ViT-H/14] [--batch 64] [--mode compiled]
        [--dtype bfloat16] [--rounds 3] [--out FILE.md]

Rows, rounds and ratios are those of `model_step.py`, with switches in the place of peers (above 1:
the step as it is is faster): attention by one kernel, where torch chooses by itself; a kernel of
patches whose inputs are filled up with zeros to a multiple of 16, as matrix units read them (588 to
592 for H/14); blocks compiled with all of inductor's products tried. None of them is a key of a
recipe: what wins here is worth one. What has no kernel on this device, or changes nothing of this
model, is a row that says so.
"""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.model_step import DEVICE, OURS, TIMM_NAMES, blocks_of, measure, our_model, table
from benchmarks.result import finish, machine
from vit_ray.models.encoder import Attention
from vit_ray.models.layers import PatchProjection, cut_patches

MULTIPLE = 16
"""Elements: 32 bytes in bf16, what a matrix unit's loads are aligned to."""


def attention_by(backend: SDPBackend, name: str) -> nn.Module:
    """Our model with attention by this kernel alone, whether or not its blocks are compiled.

    Torch chooses that of the last block, which asks for the class token alone: cuDNN's is refused
    for a single query (https://github.com/pytorch/pytorch/issues/138531).

    The choice is in the code that is compiled: torch compiles once for equal code, and keeps it.
    """
    if backend == SDPBackend.CUDNN_ATTENTION and DEVICE.type == "cpu":
        raise RuntimeError("cuDNN has no kernel for a CPU")
    model = our_model(name)

    class Chosen(Attention):  # a function for each of them would be compiled for each block
        def forward(self, x_BND: Tensor, num_queries: int | None = None) -> Tensor:
            with nullcontext() if num_queries else sdpa_kernel(backend):
                return super().forward(x_BND, num_queries)

    for module in model.modules():
        if isinstance(module, Attention):
            module.__class__ = Chosen
    return model


class PaddedProjection(PatchProjection):
    """The same product with zeros at the end of each patch and of each row of the kernel."""

    def forward(self, images: Tensor) -> Tensor:
        """As of `PatchProjection`."""
        patches = cut_patches(images.to(self.weight.dtype), self.kernel_size[0])
        filled = (0, -patches.shape[-1] % MULTIPLE)
        return F.linear(F.pad(patches, filled), F.pad(self.weight.flatten(1), filled), self.bias)


def padded_patches(name: str) -> nn.Module:
    """Our model with a kernel of patches that is filled up."""
    model: Any = our_model(name)
    projection = model.embedding.projection
    if (inputs := projection.weight[0].numel()) % MULTIPLE == 0:
        raise ValueError(f"{inputs} inputs of a patch are a multiple of {MULTIPLE} already")
    projection.__class__ = PaddedProjection
    return model  # type: ignore[no-any-return]


def all_products_tried(name: str) -> nn.Module:
    """Our model whose blocks, where they are compiled, have the fastest of inductor's products."""
    model = our_model(name)
    for block in blocks_of(model):
        compiled = partial(block.compile, mode="max-autotune-no-cudagraphs")
        block.compile = compiled  # type: ignore[method-assign]
    return model


SWITCHES: dict[str, Callable[[str], nn.Module]] = {
    OURS: our_model,
    "attention by cuDNN": partial(attention_by, SDPBackend.CUDNN_ATTENTION),
    "attention by FlashAttention": partial(attention_by, SDPBackend.FLASH_ATTENTION),
    "padded patches": padded_patches,
    "max-autotune-no-cudagraphs": all_products_tried,
}


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=list(TIMM_NAMES), default="ViT-H/14")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--mode", choices=["eager", "compiled"], default="compiled")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    dtype, shown = getattr(torch, args.dtype), ""
    for rows in measure(args.model, args.mode, [args.batch], dtype, args.rounds, SWITCHES):
        shown = table(rows)
        print(f"\n{shown}\n", flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    chosen = f"{device}, torch {torch.__version__}; {args.dtype}, {args.rounds} rounds"
    finish(f"# step_switches: {machine()}\n\n{chosen}\n\n{shown}", args.out)


if __name__ == "__main__":
    main()
