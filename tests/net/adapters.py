"""The few names that users have and that were renamed: the present one first, then earlier ones."""

try:
    from vit_ray.data.parts import dev_split
except ImportError:
    from vit_ray.data.prepare.dev_split import dev_split

try:
    from vit_ray.training.steps import lr_at
except ImportError:
    from vit_ray.train.optim.schedule import lr_at

__all__ = ["dev_split", "lr_at"]
