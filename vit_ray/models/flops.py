"""Multiply-adds by torch's counter on tensors without values, and the training cost of Table 6.

Convention (it reproduces Table 6): a multiply-add is two operations, the backward pass costs twice
the forward, recomputation and the optimiser are not counted. The kernel of a convolution counts
only where it overlaps the image, as in XLA's cost analysis. Norms, activations, softmax and pooling
are not counted.

`forward_macs` and `count_exaflops` are the paper's count, for costs: all tokens of a ViT's last
block are counted. `training/memory_estimate.py` counts what a step computes, for MFU: if the head
only sees the class token, the last block computes only that token; images need no gradient; and
kernels are also computed on padding.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vit_ray.models.build import build_model
from vit_ray.models.catalog import ImageSize, as_grid, find_spec
from vit_ray.models.layers import StandardizedConv2d, same_padding
from vit_ray.models.vit import VisionTransformer


def forward_macs(name: str, num_classes: int, image_size: ImageSize = 224, **options: Any) -> int:
    """Multiply-adds of one image through a model, with the arguments of `build_model`.

    Raises:
        ValueError: as `build_model`; or a custom model does not run without values.
    """
    frozen = {key: tuple(v) if isinstance(v, list) else v for key, v in options.items()}
    return _forward_macs(name, num_classes, as_grid(image_size), tuple(frozen.items()))


@functools.lru_cache(maxsize=256)
def _forward_macs(
    name: str, num_classes: int, sides: tuple[int, int], options: tuple[tuple[str, Any], ...]
) -> int:
    with torch.device("meta"):
        model: Any = build_model(name, num_classes, sides, **dict(options)).eval()
        images = torch.zeros(1, 3, *sides)
    if isinstance(model, VisionTransformer):
        model.keep_all_tokens()
    on_padding: list[int] = []
    logits: list[Tensor] = []

    def count_padding(conv: StandardizedConv2d, args: tuple[Tensor, ...], output: Tensor) -> None:
        """Count the multiply-adds that torch counts outside the image."""
        kernel, stride, valid = conv.kernel_size[0], conv.stride[0], 1
        for side, count in zip(args[0].shape[-2:], output.shape[-2:], strict=True):
            before = same_padding(side, kernel, stride)[0] if conv.pads_same else kernel // 2
            starts = (index * stride - before for index in range(count))
            valid *= sum(min(start + kernel, side) - max(start, 0) for start in starts)
        dense = math.prod(output.shape[-2:]) * kernel**2
        on_padding.append((dense - valid) * conv.in_channels * conv.out_channels)

    for module in model.modules():
        if isinstance(module, StandardizedConv2d):
            module.register_forward_hook(count_padding)
    try:
        with torch.no_grad():
            macs = count_macs(lambda: logits.append(model(images)))
    except Exception as error:  # from a custom model
        raise ValueError(
            f"model.name={name}: its multiply-adds cannot be counted: with tensors on the device "
            "meta, which have shapes but no values, its forward pass fails "
            f"({type(error).__name__}: {error}); use no .item(), .numpy() or fixed device in it"
        ) from error
    if tuple(logits[0].shape) != (1, num_classes):
        raise ValueError(
            f"model.name={name}: for one image it returns {list(logits[0].shape)}; return logits "
            f"of the shape (images, classes), here [1, {num_classes}]"
        )
    return macs - sum(on_padding)


def count_macs(run: Callable[[], object]) -> int:
    """Multiply-adds of the matrix products, convolutions and attention in `run`."""
    # torch counts the attention weights of its fused kernel twice.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops()) // 2


def training_exaflops(
    name: str,
    num_images: int,
    epochs: float,
    num_classes: int = 18_291,
    image_size: ImageSize = 224,
    **options: Any,
) -> float:
    """10^18 operations of pre-training, as `count_exaflops`.

    The default number of classes is that of JFT-300M: "18k" in the paper, 18,291 in its predecessor
    (BiT, arXiv 1912.11370). The tanh representation layer of pre-training is counted if the model
    can have one, unless `options` sets `representation`.
    """
    if find_spec(name, options).encoder is not None:
        options = {"representation": True, **options}
    macs = forward_macs(name, num_classes, image_size, **options)
    return count_exaflops(macs, num_images * epochs)


def count_exaflops(macs: int, images_seen: float) -> float:
    """10^18 operations of training: 6 x multiply-adds x images (Table 6 of the paper).

    Two operations per multiply-add; the backward pass costs twice the forward.

    Args:
        macs: of one image, from `forward_macs`.
        images_seen: in all epochs of the run together.
    """
    return 6 * macs * images_seen / 1e18
