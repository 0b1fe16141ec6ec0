"""torch.compile by region: the code of one block serves all blocks of a Transformer.

Compiling a model as one graph takes time that grows with its depth, for code that repeats. The
operations between the blocks are few and stay eager.
"""

import logging
import sys
from typing import Final

import torch
from torch import nn

from vit_ray.models.resnet import ResNetEmbedding
from vit_ray.models.vit import VisionTransformer

# Kinds of call of one block: train and evaluate, all tokens and only the first, two batch sizes.
_MOST_VARIANTS: Final = 32


def compile_model(model: nn.Module, backend: str, *, may_fail: bool) -> None:
    """Have a model's calls compiled, each kind at its first call.

    A ViT's blocks share their code; the ResNet of a hybrid, and a plain ResNet, are compiled whole,
    because hardly two of their units have the same shapes.

    Args:
        model: or an objective around it.
        backend: as for `torch.compile`.
        may_fail: fall back to eager, with a warning, if a part cannot be compiled.
    """
    import torch._dynamo

    # Once, however often it is called.
    logging.getLogger("torch._dynamo.convert_frame").addFilter(_note_failure)
    torch._dynamo.config.suppress_errors = may_fail
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_VARIANTS)
    inner = getattr(model, "model", model)
    if not isinstance(inner, VisionTransformer):
        model.compile(backend=backend)
        return
    if isinstance(inner.embedding, ResNetEmbedding):
        inner.embedding.compile(backend=backend)
    for block in inner.blocks:
        # Its forward alone, around which others may wrap, such as `recompute`.
        block.forward = torch.compile(block.forward, backend=backend)


_FAILURES: Final[list[str]] = []


def _note_failure(record: logging.LogRecord) -> bool:
    """Keep why a part runs eagerly; torch 2.13 reports it only in its log."""
    error = record.exc_info[1] if record.exc_info else None
    if error is not None:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # The backend is in the first line, and its error in the second.
        _FAILURES.append(f"{type(error).__name__}: {' '.join(lines[:2])}"[:300])
    return True


def compile_failures() -> list[str]:
    """Reasons of the parts of this process that could not be compiled so far, and run eagerly."""
    return list(_FAILURES)


def compile_s() -> float:
    """Seconds that this process has spent compiling, forward and backward code together."""
    if "torch._dynamo" not in sys.modules:
        return 0.0
    return float(torch._dynamo.utils.calculate_time_spent()["total_wall_time"])
