"""What is trained, and the loss: from uint8 images and padded label lists to one fp32 number.

Labels are int (B, L), padded with -1; L is 1 for single-label data sets.

MixUp and CutMix mix neighbours, images 2i and 2i + 1 of a global batch, so that only the order of
samples decides the pairs. A worker has consecutive images and a pass has an even number of them, so
both images of a pair are in the same pass on any number of workers. How they are mixed depends only
on the seed, the step and the first image's sample number. The order of samples is shuffled in each
epoch, so a partner is a random image.
"""

import math
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_ray.checkpoints.init_weights import open_weights
from vit_ray.config import Recipe
from vit_ray.config.schema import errors_of
from vit_ray.config.training_sections import TrainConfig
from vit_ray.models import build_model
from vit_ray.models.build import chains
from vit_ray.models.counter_random import random_words, sample_keys
from vit_ray.models.fitting import NewHead
from vit_ray.models.masked import MaskedPatchObjective
from vit_ray.own_parts import is_own, own_part

# (module, images uint8, labels, samples, 0-based step) -> mean loss of the micro-batch.
LossFunction = Callable[[nn.Module, Tensor, Tensor, Tensor, int], Tensor]

# A word of the key of mixing's random numbers; the keys of dropout, (seed, step), lack it.
_MIXING = 5


def build_objective(recipe: Recipe, num_classes: int) -> nn.Module:
    """The recipe's model, inside a `MaskedPatchObjective` for `train.loss=masked_patch`.

    Raises:
        ValueError: as `build_model`; a frozen part is unknown, or the model cannot recompute.
    """
    model: nn.Module = build_model(
        recipe.model.name, num_classes, recipe.model.image_size, **recipe.model.options()
    )
    if recipe.train.loss == "masked_patch":
        model = MaskedPatchObjective(model, recipe.train.masked_target, recipe.seed)
    with errors_of("optim.frozen"):
        freeze(model, recipe.optim.frozen)
    every = recipe.train.activation_checkpointing
    if every and not any(chains(model)):
        raise ValueError(
            f"train.activation_checkpointing={every}: model.name={recipe.model.name} has no list "
            "of blocks (nn.ModuleList or nn.Sequential of modules of one class, with layers "
            "inside); set the key to 0"
        )
    return model


def load_initial_weights(model: nn.Module, init_from: str, new_head: NewHead) -> str:
    """Load the weights that a recipe starts from into its objective; returns what was loaded.

    Args:
        new_head: as in `SavedWeights`.

    Raises:
        ValueError: they are not there, or do not fit the model.
    """
    with errors_of("init_from"):
        return str(open_weights(init_from).load_into(model, new_head))


def part_of(parameter: str) -> str:
    """The part of a model that a parameter belongs to.

    A part is a module of the model, or a block or unit of the chain: `embedding`, `blocks.3`.

    Args:
        parameter: name in the model or in an objective around it.
    """
    first, *rest = parameter.removeprefix("model.").split(".")
    return f"{first}.{rest[0]}" if first in ("blocks", "units") else first


def freeze(model: nn.Module, names: Iterable[str]) -> None:
    """Freeze parts of a model, or of the model in an objective.

    Args:
        names: of parts; `blocks` for all blocks, `blocks.0-5` for six.

    Raises:
        ValueError: a name does not belong to any part.
    """
    parts = list(dict.fromkeys(part_of(name) for name, _ in model.named_parameters()))
    frozen: set[str] = set()
    for name in names:
        chosen = {part for part in parts if name in (part, part.partition(".")[0])}
        match = re.fullmatch(r"(\w+)\.(\d{1,9})-(\d{1,9})", name)
        if match and f"{match[1]}.{int(match[3])}" in parts:
            chosen = {f"{match[1]}.{i}" for i in range(int(match[2]), int(match[3]) + 1)}
        if not chosen:
            last_of_each = {part.partition(".")[0]: part for part in parts}.values()
            ranges = (re.sub(r"\.([1-9]\d*)$", r".0-\1", part) for part in last_of_each)
            raise ValueError(f"{name!r} is not a part of this model; it has {', '.join(ranges)}")
        frozen |= chosen
    for name, parameter in model.named_parameters():
        if part_of(name) in frozen:
            parameter.requires_grad_(False)


def make_loss(recipe: Recipe) -> LossFunction:
    """The recipe's loss as the engine calls it.

    Random parts (dropout, mixing, the choice of patches) depend only on the seed, the step and the
    sample, not on how a batch is cut into workers and passes.
    """
    train = recipe.train
    if train.loss == "masked_patch":
        return _predict_patches
    dtype = torch.bfloat16 if train.precision == "bf16" else torch.float32

    def classify(
        module: nn.Module, images: Tensor, labels: Tensor, samples: Tensor, step: int
    ) -> Tensor:
        is_random = recipe.model.dropout or recipe.model.stochastic_depth
        keys: tuple[Tensor, ...] = (sample_keys(samples, recipe.seed, step),) if is_random else ()
        if train.mixes:
            height, width = images.shape[1:3]
            mixing = draw_mixing(samples, (height, width), train, recipe.seed, step)
            seen = mix_images(normalize(images, torch.float32), mixing.weight).to(dtype)
        else:
            seen = normalize(images, dtype)
        logits = module(seen, *keys)
        losses = classification_loss(logits, labels, train)
        if train.mixes:
            # Both losses are linear in the target, so this is the loss of mixed targets.
            others = classification_loss(logits, partners(labels), train)
            losses = torch.lerp(others, losses, mixing.own_share)
        return losses.mean()

    return classify


def _predict_patches(
    module: nn.Module, images: Tensor, _: Tensor, samples: Tensor, step: int
) -> Tensor:
    # Pixels are also the targets; the model rounds its own input.
    return module(normalize(images, torch.float32), samples, step)


def per_image(values: Tensor, labels: Tensor, what: str) -> Tensor:
    """Check the values (B,) that a custom component returns for a batch.

    Raises:
        ValueError: they are no tensor of this shape.
    """
    if isinstance(values, Tensor) and values.shape == labels.shape[:1]:
        return values
    shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
    raise ValueError(
        f"{what} returns {shape} for {len(labels)} images; return a tensor with a value for each"
    )


def normalize(images: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 (B, H, W, 3) in [0, 255] to `dtype` (B, 3, H, W) in [-1, 1], on the images' device."""
    scaled = images.to(torch.float32).mul_(2.0 / 255.0).sub_(1.0)
    return scaled.permute(0, 3, 1, 2).to(dtype)


def multi_hot(labels: Tensor, num_classes: int) -> Tensor:
    """Padded label lists (B, L) to float32 (B, K) of zeros and ones."""
    padded = torch.where(labels < 0, num_classes, labels)
    hot = torch.zeros(len(labels), num_classes + 1, device=labels.device)
    return hot.scatter_(1, padded, 1.0)[:, :num_classes]


def classification_loss(logits: Tensor, labels: Tensor, config: TrainConfig) -> Tensor:
    """Loss of each image, float32 (B,); 0 with softmax for an image without labels.

    Softmax: cross-entropy with label smoothing against targets in which labels share the
    probability evenly. Sigmoid: binary cross-entropies summed over classes (big_vision
    `sigmoid_xent`).

    Raises:
        ValueError: a custom loss does not exist, or returns another shape.
    """
    logits = logits.float()
    if is_own(config.loss):
        losses = own_part(config.loss, "train.loss")(logits, labels)
        return per_image(losses, labels, f"train.loss={config.loss}")
    if config.loss == "sigmoid":
        targets = multi_hot(labels, logits.shape[1])
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(dim=1)
    if labels.shape[1] == 1:
        return F.cross_entropy(
            logits,
            labels[:, 0],
            reduction="none",
            ignore_index=-1,
            label_smoothing=config.label_smoothing,
        )
    targets = multi_hot(labels, logits.shape[1])
    num_labels = targets.sum(dim=1)
    losses = F.cross_entropy(
        logits,
        targets / num_labels.clamp(min=1.0)[:, None],
        reduction="none",
        label_smoothing=config.label_smoothing,
    )
    # Label smoothing would give an image without labels an even target.
    return torch.where(num_labels > 0, losses, 0.0)


class Mixing(NamedTuple):
    """How the pairs of a pass are mixed.

    Attributes:
        weight: float32 (P, H, W): share of the image's pixels; the rest is the partner's.
        own_share: float32 (2 P,): share of the image's label; the rest is the partner's.
    """

    weight: Tensor
    own_share: Tensor


def draw_mixing(
    samples: Tensor, size: tuple[int, int], config: TrainConfig, seed: int, step: int
) -> Mixing:
    """The mixing of each pair: MixUp (arXiv:1710.09412) or CutMix (arXiv:1905.04899).

    Each image of a pair keeps the same share, from Beta(alpha, alpha). CutMix exchanges a box
    around a uniform pixel, which has the area of the rest; the part of the box outside the image is
    cut off and added to the share, as in the CutMix authors' code.

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
    outer = []
    for length, centre in zip(size, (row, column), strict=True):
        half = (length * torch.sqrt(1.0 - share)).floor() // 2
        middle = (centre * length).floor()
        pixel = torch.arange(length, device=share.device)
        outer.append((pixel < (middle - half)[:, None]) | (pixel >= (middle + half)[:, None]))
    outside = outer[0][:, :, None] | outer[1][:, None, :]  # (P, H, W), false in the box
    weight = torch.where(cut[:, None, None], outside.double(), share[:, None, None])
    own_share = torch.where(cut, outside.double().mean((1, 2)), share)
    return Mixing(weight.float(), own_share.float().repeat_interleave(2))


def mix_images(images: Tensor, weight: Tensor) -> Tensor:
    """float32 (2 P, C, H, W), each mixed with its partner."""
    return torch.lerp(partners(images), images, weight.repeat_interleave(2, dim=0)[:, None])


def partners(items: Tensor) -> Tensor:
    """(2 P, ...) with the two items of each pair exchanged."""
    return items.view(-1, 2, *items.shape[1:]).flip(1).flatten(0, 1)


def symmetric_beta(alpha: Tensor, radius: Tensor, angle: Tensor, side: Tensor) -> Tensor:
    """Beta(alpha, alpha) from three uniform numbers above 0 and below 1, without rejection.

    Devroye, Random variate generation in one line of code (WSC 1996), section 4.
    """
    spread = (radius ** (-1.0 / alpha) - 1.0) * torch.cos(2.0 * math.pi * angle).square()
    return 0.5 + 0.5 * torch.sign(side - 0.5) / torch.sqrt(1.0 + 1.0 / spread)
