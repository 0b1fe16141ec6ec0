"""A recipe's `Augmentation`, from its model and data.augment or data.eval_augment sections."""

from dataclasses import replace

from vit_ray.config.training_sections import AugmentConfig, EvalAugmentConfig, ModelConfig
from vit_ray.data.boxes import Augmentation
from vit_ray.data.randaugment import RandAugment
from vit_ray.own_parts import own_part


def augmentation_of(model: ModelConfig, augment: AugmentConfig | EvalAugmentConfig) -> Augmentation:
    """How a model's images are cropped, for training or for evaluation.

    The default resize is 256 for a crop of 224, and in proportion for other sizes.
    """
    common = Augmentation(
        kind=augment.kind,
        size=model.image_size,
        flip=False,
        resize=augment.resize or round(max(model.sides) * 8 / 7),
        interpolation=augment.interpolation,
    )
    if isinstance(augment, EvalAugmentConfig):
        return replace(common, border=augment.border, is_exact=True)
    randaugment = None
    if augment.randaugment:
        randaugment = RandAugment(augment.randaugment_layers, augment.randaugment_magnitude)
    return replace(
        common,
        flip=augment.flip,
        min_area=augment.min_area,
        max_area=augment.max_area,
        randaugment=randaugment,
        own=own_part(augment.own, "data.augment.own") if augment.own else None,
    )
