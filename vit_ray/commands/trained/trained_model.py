"""A trained model on the CPU of the driver, for jobs that read weights: no Ray, no DeepSpeed."""

from torch import nn

from vit_ray.checkpoints.checkpoint import Position
from vit_ray.checkpoints.init_weights import open_weights
from vit_ray.config import Recipe, require
from vit_ray.config.schema import errors_of
from vit_ray.models import build_model
from vit_ray.models.fitting import LoadReport


def load_trained_model(
    recipe: Recipe, averaged: bool | None = None
) -> tuple[nn.Module, LoadReport, Position | None]:
    """The recipe's model with the weights of `init_from` and their number of classes.

    Args:
        recipe: `model`, and `init_from`, which is anything that `open_weights` reads.
        averaged: take the averaged weights of a checkpoint; None = if it has any.

    Returns:
        The model, what was loaded, and the position of the checkpoint; None for a file.

    Raises:
        ValueError: no weights are given, or they are incomplete, or do not fit the model.
    """
    source = require(recipe.init_from, "init_from", "the run, checkpoint or weight file to read")
    config = recipe.model
    with errors_of("init_from"):
        weights = open_weights(source, averaged)
    # Pre-trained without labels, or published without a head: the new head has one class, and is 0.
    classes = weights.num_classes or 1
    model = build_model(config.name, classes, config.image_size, **config.options()).eval()
    with errors_of("init_from"):
        return model, weights.load_into(model, "auto"), weights.position
