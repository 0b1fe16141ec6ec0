"""Checks of a recipe's model, before any data set is opened; errors say what to change."""

from typing import Final, Literal

import numpy as np

from vit_ray.config import Recipe
from vit_ray.config.schema import errors_of
from vit_ray.config.training_sections import TrainConfig
from vit_ray.data.keyed_random import KeyedUniform
from vit_ray.models.catalog import as_grid, find_spec
from vit_ray.own_parts import is_own, own_part

Kind = Literal["pretrain", "finetune", "sweep_trial", "study_cell", "evaluate"]
NEW_HEADS: Final = ("finetune", "sweep_trial")
"""Kinds of run that give their initial weights a new head."""
MOST_OF_FIRST_WEIGHTS: Final = 0.2
"""Share of the initial weights in the averaged ones up to which there is no warning."""


def check_model(recipe: Recipe) -> None:
    """Check that the model exists, and that its frozen parts are its own.

    Raises:
        ValueError: as `build_model`; or all parts are frozen, or a frozen part does not exist.
    """
    model, optim = recipe.model, recipe.optim
    as_grid(model.image_size)
    if not is_own(model.name):
        find_spec(model.name, model.options())
    if is_own(model.name) or optim.frozen:  # it is built without values
        import torch  # for these models only: seconds

        from vit_ray.models.flops import forward_macs
        from vit_ray.training.objective import build_objective, freeze

        forward_macs(model.name, 2, model.image_size, **model.options())
        with torch.device("meta"):
            whole = build_objective(recipe.with_changes(optim={"frozen": []}), 2)
        with errors_of("optim.frozen"):
            freeze(whole, optim.frozen)
        if not any(parameter.requires_grad for parameter in whole.parameters()):
            raise ValueError(
                "optim.frozen names every part, so that nothing would be trained; remove one"
            )


def check_own_parts(recipe: Recipe, num_classes: int) -> None:
    """Look up the user's own parts other than the model, and call those that work without a run.

    Raises:
        ValueError: a part does not exist, or returns the wrong thing.
    """
    train, metrics = recipe.train, recipe.evaluate.metrics
    for name in train.callbacks:
        own_part(name, "train.callbacks")
    if recipe.data.augment.own is not None:
        augment = own_part(name := recipe.data.augment.own, "data.augment.own")
        crop = np.zeros((*recipe.model.sides, 3), np.uint8)
        found = augment(crop, KeyedUniform(0))
        if (shape := np.shape(found)) != crop.shape or found.dtype != np.uint8:
            raise ValueError(
                f"data.augment.own={name} returns {list(shape)} {getattr(found, 'dtype', '')} for "
                f"{list(crop.shape)} uint8; return a crop of the same shape and type"
            )
    if not (metrics or is_own(train.loss) or is_own(recipe.optim.name)):
        return
    import torch  # for these parts only: seconds

    from vit_ray.training.objective import classification_loss, per_image
    from vit_ray.training.optimizers import state_types

    state_types(recipe.optim)
    logits, labels = torch.zeros(2, num_classes), torch.zeros(2, 1, dtype=torch.int64)
    if is_own(train.loss):
        classification_loss(logits, labels, train)
    for name in metrics:
        values = own_part(name, "evaluate.metrics")(logits, labels)
        per_image(values, labels, f"evaluate.metrics: {name}")


def check_head_is_trained(recipe: Recipe, kind: Kind) -> None:
    """Check that a new head, whose kernel is zero, is not frozen.

    Raises:
        ValueError: it would give every image the same logits.
    """
    is_new = recipe.init_from is None or kind in NEW_HEADS
    has_head = recipe.train.loss != "masked_patch"
    if has_head and is_new and "head" in recipe.optim.frozen:
        raise ValueError(
            "optim.frozen has head, but this run starts with a new head of zeros, which would "
            "never learn; remove head from optim.frozen"
        )


def averaging_warning(train: TrainConfig, total_steps: int) -> str | None:
    """A warning if the averaged weights are still close to the initial ones; else None.

    Averaged weights decide a sweep's selection, early stopping, and the figures in tables.
    """
    left = train.averaging**total_steps
    if not train.averaging or train.averaging_warmup or left <= MOST_OF_FIRST_WEIGHTS:
        return None
    return (
        f"train.averaging={train.averaging:g}: after {total_steps} steps {left:.1%} of the "
        "averaged weights is still the initial weights; set train.averaging_warmup=true, or a "
        "smaller train.averaging"
    )
