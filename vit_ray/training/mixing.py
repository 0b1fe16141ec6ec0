"""MixUp and CutMix of neighbours in the global batch, so that only the order decides the pairs.

Images 2i and 2i + 1 of a global batch are a pair. A worker has consecutive images and a pass has an
even number of them, so that the two are together on any number of workers. How they are mixed
depends only on the seed, the step and the first one's sample number. The order of samples is
shuffled again in each epoch, so that a partner is a random image.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vit_ray.config.training_sections import TrainConfig
from vit_ray.models.counter_random import random_words, sample_keys

# Among the words of a key: dropout has keys of (seed, step) without it.
_MIXING = 5


class Mixing(NamedTuple):
    """How the pairs of a pass are mixed.

    Attributes:
        weight: float32 (P, H, W): share of an image's own pixels; the rest is its partner's.
        own_share: float32 (2 P,): share of an image's own label.
    """

    weight: Tensor
    own_share: Tensor


def draw_mixing(
    samples: Tensor, size: tuple[int, int], config: TrainConfig, seed: int, step: int
) -> Mixing:
    """The mixing of each pair: MixUp (arXiv:1710.09412) or CutMix (arXiv:1905.04899).

    Both images of a pair have the same share of their own, from Beta(alpha, alpha); CutMix
    exchanges a box with the rest's area around a uniform pixel; its part outside the image is cut
    off and given back to the share, as in its authors' code.

    Args:
        samples: int64 (2 P,), in the order of the global batch.
        size: height and width of the images.
        config: `mixup` and `cutmix` are the alphas, 0 = off.
        seed: of the run.
        step: 0-based.
    """
    keys = sample_keys(samples[::2], seed, step, _MIXING)
    # Uniform numbers, above 0 and below 1; the first word is not used.
    uniform = ((random_words(keys, 7) >> 12 & (2**52 - 1)).double() + 0.5) / 2.0**52
    _, is_cut, *shape, row, column = uniform.unbind(1)
    cut_fraction = 0.5 if config.mixup and config.cutmix else float(config.cutmix > 0.0)
    cut = is_cut < cut_fraction
    alpha = torch.where(cut, config.cutmix, config.mixup).double()
    share = symmetric_beta(alpha, *shape)
    kept = []
    for length, centre in zip(size, (row, column), strict=True):
        half = (length * torch.sqrt(1.0 - share)).floor() // 2
        middle = (centre * length).floor()
        place = torch.arange(length, device=share.device)
        kept.append((place < (middle - half)[:, None]) | (place >= (middle + half)[:, None]))
    outside = kept[0][:, :, None] | kept[1][:, None, :]  # (P, H, W), false in the box
    weight = torch.where(cut[:, None, None], outside.double(), share[:, None, None])
    own_share = torch.where(cut, outside.double().mean((1, 2)), share)
    return Mixing(weight.float(), own_share.float().repeat_interleave(2))


def mix_images(images: Tensor, weight: Tensor) -> Tensor:
    """float32 (2 P, C, H, W), each mixed with its partner."""
    return torch.lerp(partners(images), images, weight.repeat_interleave(2, dim=0)[:, None])


def partners(items: Tensor) -> Tensor:
    """For (2 P, ...) the other one of each pair."""
    return items.view(-1, 2, *items.shape[1:]).flip(1).flatten(0, 1)


def symmetric_beta(alpha: Tensor, radius: Tensor, angle: Tensor, side: Tensor) -> Tensor:
    """Beta(alpha, alpha) from three uniform numbers above 0 and below 1, without rejection.

    Devroye, Random variate generation in one line of code (WSC 1996), section 4.
    """
    spread = (radius ** (-1.0 / alpha) - 1.0) * torch.cos(2.0 * math.pi * angle).square()
    return 0.5 + 0.5 * torch.sign(side - 0.5) / torch.sqrt(1.0 + 1.0 / spread)
