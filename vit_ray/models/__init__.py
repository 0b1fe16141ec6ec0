"""The models of the paper by name."""

from typing import TYPE_CHECKING, Any

from vit_ray.models.catalog import model_names

if TYPE_CHECKING:
    from vit_ray.models.build import build_model

__all__ = ["build_model", "model_names"]


def __getattr__(name: str) -> Any:
    if name != "build_model":
        raise AttributeError(f"module 'vit_ray.models' has no attribute {name!r}")
    # Torch takes seconds; names and sizes do not need it.
    from vit_ray.models.build import build_model

    return build_model
