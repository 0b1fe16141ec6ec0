"""The models of the paper by name."""

from vit_ray.models.catalog import build_model, model_names

__all__ = ["build_model", "model_names"]
