"""Checks of a recipe's model, before any data set is opened; errors say what to change."""

from __future__ import annotations

from typing import Final, Literal

from vit_ray.config import Recipe
from vit_ray.models.catalog import as_grid, find_spec
from vit_ray.models.parameter_groups import chosen_parts, parts_of

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
    spec = find_spec(model.name, model.options())
    as_grid(model.image_size)
    if optim.layer_decay < 1.0 and spec.encoder is None:
        raise ValueError(
            f"optim.layer_decay={optim.layer_decay} goes by the blocks of a Transformer, "
            f"and model.name={model.name} has none; set it to 1"
        )
    parts = parts_of(model.name, model.options())
    try:
        chosen = chosen_parts(optim.frozen, parts)
    except ValueError as error:
        raise ValueError(f"optim.frozen: {error}") from None
    if chosen == set(parts):
        raise ValueError("optim.frozen names every part, so nothing is trained; leave one out")


def check_head_is_trained(recipe: Recipe, kind: Kind) -> None:
    """Check that a new head, whose kernel is zeros, is not frozen.

    Raises:
        ValueError: it would give every image the same logits.
    """
    is_new = recipe.init_from is None or kind in NEW_HEADS
    has_head = recipe.train.loss != "masked_patch"
    if has_head and is_new and "head" in recipe.optim.frozen:
        raise ValueError(
            "optim.frozen has head, and this run starts with a new one of zeros, which would never "
            "learn; leave head out of optim.frozen"
        )


def averaging_warning(recipe: Recipe, total_steps: int) -> str | None:
    """A warning of averaged weights that are still the first ones; None where they are not.

    They decide what a sweep chooses, when a run stops early, and what tables show.
    """
    train = recipe.train
    left = train.averaging**total_steps
    if not train.averaging or train.averaging_warmup or left <= MOST_OF_FIRST_WEIGHTS:
        return None
    return (
        f"train.averaging={train.averaging:g}: after {total_steps} steps the averaged weights are "
        f"{left:.1%} the weights that the run began with; set train.averaging_warmup=true, or a "
        "smaller train.averaging"
    )
