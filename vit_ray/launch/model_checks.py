"""Checks of a recipe's model, before any data set is opened; errors say what to change."""

from __future__ import annotations

from typing import Final, Literal

import numpy as np

from vit_ray.config import Recipe
from vit_ray.config.training_sections import TrainConfig
from vit_ray.data.order.keyed_random import KeyedUniform
from vit_ray.models.catalog import ModelSpec, as_grid, find_spec
from vit_ray.models.parameter_groups import HEADS, chosen_parts, part_of, parts_of
from vit_ray.own_parts import Augments, Callback, Metric, is_own, own_part

Kind = Literal["pretrain", "finetune", "sweep_trial", "study_cell", "evaluate", "extract"]
"""Of a run."""
NEW_HEADS: Final = ("finetune", "sweep_trial")
"""Kinds of run that give the weights they start from a new head."""
MOST_OF_FIRST_WEIGHTS: Final = 0.2
"""Share of a run's first weights in its averaged ones up to which there is no warning."""


def check_model(recipe: Recipe) -> None:
    """Check that there is such a model, and that its frozen parts are its own.

    Raises:
        ValueError: as `build_model`; or all parts are frozen, or a part that it does not have.
    """
    model, optim = recipe.model, recipe.optim
    as_grid(model.image_size)
    has_own = is_own(model.name)
    spec = ModelSpec() if has_own else find_spec(model.name, model.options())
    if optim.layer_decay < 1.0 and spec.encoder is None:
        raise ValueError(
            f"optim.layer_decay={optim.layer_decay} goes by the blocks of a Transformer, "
            f"and model.name={model.name} has none; set it to 1"
        )
    parts = _parts_of_own(recipe) if has_own else parts_of(model.name, model.options())
    try:
        chosen = chosen_parts(optim.frozen, parts)
    except ValueError as error:
        raise ValueError(f"optim.frozen: {error}") from None
    if chosen == set(parts):
        raise ValueError("optim.frozen names every part, so nothing is trained; leave one out")


def _parts_of_own(recipe: Recipe) -> tuple[str, ...]:
    """Parts of a model of the user's own, which is built and run once, without values."""
    import torch  # for this model alone: seconds

    from vit_ray.models.flops import forward_macs
    from vit_ray.train.objective import build_objective

    model = recipe.model
    forward_macs(model.name, 2, model.image_size, **model.options())
    with torch.device("meta"):
        whole = build_objective(recipe.with_changes(optim={"frozen": []}), 2)
    return tuple(dict.fromkeys(part_of(name) for name, _ in whole.named_parameters()))


def check_own_parts(recipe: Recipe, num_classes: int) -> None:
    """Look up the parts of the user's own apart from the model, and call those that need no run.

    Raises:
        ValueError: one is not there, or does not return what it should.
    """
    train, metrics = recipe.train, recipe.evaluate.metrics
    for name in train.callbacks:
        own_part(name, "train.callbacks", Callback)
    if recipe.data.augment.own is not None:
        augment = own_part(name := recipe.data.augment.own, "data.augment.own", Augments)
        crop = np.zeros((*recipe.model.sides, 3), np.uint8)
        found = augment(crop, KeyedUniform(0))
        if (shape := np.shape(found)) != crop.shape or found.dtype != np.uint8:
            raise ValueError(
                f"data.augment.own={name} makes {list(shape)} {getattr(found, 'dtype', '')} of "
                f"{list(crop.shape)} uint8; return the crop in its shape and type"
            )
    if not (metrics or is_own(train.loss) or is_own(recipe.optim.name)):
        return
    import torch  # for these parts alone: seconds

    from vit_ray.train.objective import classification_loss, per_image
    from vit_ray.train.optim.optimizers import state_types

    state_types(recipe.optim)
    logits, labels = torch.zeros(2, num_classes), torch.zeros(2, 1, dtype=torch.int64)
    if is_own(train.loss):
        classification_loss(logits, labels, train)
    for name in metrics:
        values = own_part(name, "evaluate.metrics", Metric)(logits, labels)
        per_image(values, labels, f"evaluate.metrics: {name}")


def check_head_is_trained(recipe: Recipe, kind: Kind) -> None:
    """Check that a new head, whose kernel is zeros, is not frozen.

    Raises:
        ValueError: it would give every image the same logits.
    """
    is_new = recipe.init_from is None or kind in NEW_HEADS
    has_head = recipe.train.loss != "masked_patch"
    frozen = [head for head in HEADS if head in recipe.optim.frozen]
    if has_head and is_new and frozen:
        raise ValueError(
            f"optim.frozen has {frozen[0]}, and this run starts with a new one of zeros, which "
            f"would never learn; leave {frozen[0]} out of optim.frozen"
        )


def averaging_warning(train: TrainConfig, total_steps: int) -> str | None:
    """A warning of averaged weights that are still the first ones; None where they are not.

    They decide what a sweep chooses, when a run stops early, and what tables show.
    """
    left = train.averaging**total_steps
    if not train.averaging or train.averaging_warmup or left <= MOST_OF_FIRST_WEIGHTS:
        return None
    return (
        f"train.averaging={train.averaging:g}: after {total_steps} steps the averaged weights are "
        f"{left:.1%} the weights that the run began with; set train.averaging_warmup=true, or a "
        "smaller train.averaging"
    )
