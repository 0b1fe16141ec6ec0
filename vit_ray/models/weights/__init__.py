"""Loading and saving weights, in our own names and in every published layout."""

from vit_ray.models.weights import load_weights, save_weights

__all__ = ["load_weights", "save_weights"]
