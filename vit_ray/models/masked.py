"""Masked patch prediction (paper 4.6 and B.1.2): self-supervised pre-training of any ViT.

Half of the patch embeddings of each image are corrupted: 80 % of these become a learned mask
embedding, 10 % the embedding of another patch of the same image, 10 % stay unchanged. The encoder
predicts something simple about the pixels of the corrupted patches.

The corruption depends only on (seed, step, sample), as do the units that dropout drops: it is equal
on any number of workers, in any order of batches, after any restart.

The paper leaves details open. Here exactly half of the patches (rounded down, at least one) are
corrupted in each image, another patch is of the same image, losses are means over predictions, and
the mask embedding is initialised as BERT's, with standard deviation 0.02.
"""

# B images, N patches, D width, M corrupted patches of an image, C channels

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vit_ray.models.counter_random import random_words, sample_keys
from vit_ray.models.layers import Head, cut_patches
from vit_ray.models.positions import normal_table
from vit_ray.models.vit import VisionTransformer

Target = Literal["mean_color", "downsized", "full_patch"]

CORRUPTED_FRACTION, MASKED_FRACTION, SWAPPED_FRACTION = 0.5, 0.8, 0.1
BITS_PER_CHANNEL = 3
NUM_COLORS = 2 ** (3 * BITS_PER_CHANNEL)
DOWNSIZED_SIDE = 4
# Number of the random stream for dropout; streams 0 to 2 draw the corruption.
DROPOUT_STREAM = 3


class Corruption(NamedTuple):
    """The corruption of the patches of a batch.

    Attributes:
        corrupted: (B, M) patch numbers in ascending order.
        is_masked, is_swapped: (B, N), never both true, and true only for patches in `corrupted`.
        source: (B, N), another patch, whose embedding replaces that of a swapped patch.
    """

    corrupted: Tensor
    is_masked: Tensor
    is_swapped: Tensor
    source: Tensor


def draw_corruption(samples: Tensor, num_patches: int, seed: int, step: int = 0) -> Corruption:
    """The corruption of each sample, from (seed, step, sample) only.

    Args:
        samples: int64 (B,), global numbers of the images.
        num_patches: N, at least 2.
        seed: of the run.
        step: 0-based, of training: an image is corrupted differently each time.

    Raises:
        ValueError: if an image has fewer than two patches.
    """
    if num_patches < 2:
        raise ValueError(
            f"an image of {num_patches} patch has none to corrupt and none to keep; use a larger "
            "image_size or a smaller patch_size"
        )
    order, kind, distance = (
        # 63 bits: never negative.
        random_words(sample_keys(samples, seed, step, stream), num_patches) & (2**63 - 1)
        for stream in range(3)
    )
    count = max(1, int(num_patches * CORRUPTED_FRACTION))
    corrupted = order.topk(count, dim=1).indices.sort(dim=1).values
    is_corrupted = torch.zeros_like(order, dtype=torch.bool).scatter(1, corrupted, True)
    # The upper 53 of 63 bits, exact in float64.
    chance = (kind >> 10).double() / 2.0**53
    is_masked = is_corrupted & (chance < MASKED_FRACTION)
    is_swapped = is_corrupted & ~is_masked & (chance < MASKED_FRACTION + SWAPPED_FRACTION)
    patches = torch.arange(num_patches, device=samples.device)
    source = (patches + 1 + distance % (num_patches - 1)) % num_patches
    return Corruption(corrupted, is_masked, is_swapped, source)


class MaskToken(nn.Module):
    """The learned embedding of a masked patch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = normal_table(width)

    def forward(self, patches_BND: Tensor, is_masked_BN: Tensor) -> Tensor:
        return torch.where(is_masked_BN[..., None], self.token.to(patches_BND.dtype), patches_BND)


class MaskedPatchObjective(nn.Module):
    """A ViT with a mask token and a linear prediction of the pixels of its corrupted patches.

    The model's head and representation layer are not used, and are frozen; fine-tuning replaces
    them.

    Args:
        model: any ViT, hybrid or axial ViT.
        target: "mean_color" (512 colours of 3 bits a channel, the paper's choice), "downsized"
            (the same for each cell of a 4 x 4 reduction), "full_patch" (regression of all pixels).
        seed: of the corruption.

    Raises:
        ValueError: for a model that is not a ViT, or patches that cannot be reduced to 4 x 4.
    """

    def __init__(self, model: nn.Module, target: Target = "mean_color", seed: int = 0) -> None:
        super().__init__()
        if not isinstance(model, VisionTransformer):
            raise ValueError(
                f"masked patch prediction needs patches, and a {type(model).__name__} has none; "
                "use a ViT, a hybrid or an axial ViT"
            )
        side = model.embedding.patch_size
        if target == "downsized" and side < DOWNSIZED_SIDE:
            raise ValueError(
                f"target='downsized' reduces patches to 4x4, but patch_size={side} is smaller; use "
                "target='mean_color', or a model with another patch_size"
            )
        self.model = model
        model.keep_all_tokens()
        self.target = target
        self.seed = seed
        self.mask = MaskToken(model.size.width)
        outputs_of_a_patch = {
            "mean_color": NUM_COLORS,
            "downsized": DOWNSIZED_SIDE**2 * NUM_COLORS,
            "full_patch": 3 * side**2,
        }
        self.prediction = Head(model.size.width, outputs_of_a_patch[target])
        for unused in (model.head, model.representation):
            if unused is not None:
                unused.requires_grad_(False)

    @property
    def head(self) -> nn.Linear:
        """The model's head, whose inputs are the features that few-shot accuracy measures."""
        return self.model.head

    def forward(
        self,
        images: Tensor,
        samples: Tensor | None = None,
        step: int = 0,
    ) -> Tensor:
        """Mean loss over the corrupted patches, a float32 scalar.

        Args:
            images: float (B, 3, H, W) in [-1, 1]; in float32 even if the model is in bf16,
                otherwise the targets would be rounded.
            samples: int64 (B,), global numbers of the images. None returns the model's logits of
                the uncorrupted images, to evaluate its features in training.
            step: 0-based step of training.
        """
        if samples is None:
            return self.model(images)
        patches_BND = self.model.embed(images)
        corruption = draw_corruption(samples, patches_BND.shape[1], self.seed, step)
        keys = sample_keys(samples, self.seed, step, DROPOUT_STREAM)
        encoded_BND = self.model.encode(self.corrupt(patches_BND, corruption), keys)
        num_prefix = encoded_BND.shape[1] - patches_BND.shape[1]
        predictions = self.prediction(_pick(encoded_BND[:, num_prefix:], corruption.corrupted))
        pixels = _pick(self._pixels(images), corruption.corrupted)
        return _loss(self.target, predictions, pixels)

    def corrupt(self, patches_BND: Tensor, corruption: Corruption) -> Tensor:
        """(B, N, D) with mask tokens, swapped and unchanged patches."""
        source_BND = _pick(patches_BND, corruption.source)
        swapped_BND = torch.where(corruption.is_swapped[..., None], source_BND, patches_BND)
        return self.mask(swapped_BND, corruption.is_masked)

    def _pixels(self, images: Tensor) -> Tensor:
        """(B, N, 3, P, P) in float32."""
        side = self.model.embedding.patch_size
        patches = cut_patches(images.float(), side).flatten(1, 2)
        if patches.shape[1] != self.model.grid[0] * self.model.grid[1]:
            raise ValueError(
                f"images of {images.shape[-2]}x{images.shape[-1]} are not whole patches of "
                f"{side}x{side}, which this model rounds up; use an image_size that {side} divides"
            )
        return patches.reshape(*patches.shape[:2], 3, side, side)


def _pick(items: Tensor, indices: Tensor) -> Tensor:
    """(B, N, ...) indexed by (B, M) to (B, M, ...)."""
    rows = torch.arange(len(items), device=items.device)[:, None]
    return items[rows, indices]


def color_class(colors: Tensor) -> Tensor:
    """RGB in [-1, 1] along the last axis to one of 512 classes: 3 bits each of red, green, blue."""
    levels = 2**BITS_PER_CHANNEL
    bins = ((colors + 1) * (levels / 2)).floor().clamp(0, levels - 1).long()
    return (bins[..., 0] * levels + bins[..., 1]) * levels + bins[..., 2]


def _loss(target: Target, predictions: Tensor, pixels: Tensor) -> Tensor:
    """Loss of predictions (B, M, K) against pixels (B, M, 3, P, P).

    K is 512 ("mean_color"), 16 * 512, cell by cell in raster order ("downsized"), or 3 * P * P,
    channel by channel. If 4 does not divide P, as for H/14, cells share the pixels on their border.
    """
    if target == "full_patch":
        return F.mse_loss(predictions, pixels.flatten(2))
    if target == "mean_color":
        colors = pixels.mean(dim=(-2, -1))
    else:
        colors = F.adaptive_avg_pool2d(pixels.flatten(0, 1), DOWNSIZED_SIDE).permute(0, 2, 3, 1)
    return F.cross_entropy(predictions.reshape(-1, NUM_COLORS), color_class(colors).flatten())
