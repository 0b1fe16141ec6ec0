"""A model whose features learn a teacher's, through a linear projection to their width."""

# B images, D width, T width of the teacher, K classes

from torch import Tensor, nn

from vit_ray.models.layers import Linear
from vit_ray.models.recompute import Recomputable


class ProjectedFeatures(Recomputable):
    """A model and the projection; only the model predicts.

    Args:
        model: with `features` and `head`.
        width: T.
    """

    def __init__(self, model: nn.Module, width: int) -> None:
        super().__init__()
        self.model = model
        self.projection = Linear(self.head.in_features, width)

    @property
    def head(self) -> nn.Linear:
        return self.model.head  # type: ignore[return-value]

    def forward(
        self, images: Tensor, *keys: Tensor, projects: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The model's logits (B, K); with `projects` also its projected features (B, T)."""
        features = self.model.features(images, *keys)  # type: ignore[operator]
        logits: Tensor = self.head(features)
        return (logits, self.projection(features)) if projects else logits
