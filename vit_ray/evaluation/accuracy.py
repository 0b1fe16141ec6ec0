"""Top-1, top-5 and loss as sums that add up over batches and ranks.

An image may have several correct answers (ReaL, and images with many labels): a prediction is
correct if it is one of them. An image without any is skipped, as in ReaL; an image of weight 0
(padding of a short last batch) does not count.
"""

from dataclasses import astuple, dataclass

import torch


@dataclass(frozen=True)
class AccuracySums:
    """Weighted sums over images; `AccuracySums()` is the empty sum.

    Attributes:
        top1: weight of images whose best-scored class is correct.
        top5: weight of images with a correct class among the five best-scored.
        loss: sum of weight x loss.
        images: weight of the images that counted.
    """

    top1: float = 0.0
    top5: float = 0.0
    loss: float = 0.0
    images: float = 0.0

    @classmethod
    def of_batch(
        cls,
        logits: torch.Tensor,
        labels: torch.Tensor,
        losses: torch.Tensor,
        weights: torch.Tensor | None = None,
    ) -> "AccuracySums":
        """Sums of one batch.

        Args:
            logits: (B, K), any float type.
            labels: int (B,), or (B, L) padded with -1.
            losses: (B,), the loss of every image.
            weights: (B,); all 1 by default.
        """
        answers_bl = labels.reshape(len(logits), -1)
        counted = (answers_bl >= 0).any(dim=1).double()
        weights_b = counted if weights is None else counted * weights.double()
        best_bk = logits.float().topk(min(5, logits.shape[1]), dim=1).indices
        # Padding is -1, which equals no class index.
        right_bk = (best_bk[:, :, None] == answers_bl[:, None, :]).any(dim=2)
        # where, not a product: the loss of a skipped image may be nan, and 0 x nan is nan.
        losses_b = torch.where(weights_b > 0, losses.double(), 0.0)
        sums = (
            (right_bk[:, 0] * weights_b).sum(),
            (right_bk.any(dim=1) * weights_b).sum(),
            (losses_b * weights_b).sum(),
            weights_b.sum(),
        )
        return cls(*torch.stack(sums).tolist())

    def __add__(self, other: "AccuracySums") -> "AccuracySums":
        return AccuracySums(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def means(self) -> dict[str, float]:
        """`top1`, `top5` (both in [0, 1]) and `loss` per image.

        Raises:
            ValueError: no image counted.
        """
        if self.images == 0:
            raise ValueError(
                "no evaluation image has a label; set data.eval to a set with labelled images"
            )
        return {name: getattr(self, name) / self.images for name in ("top1", "top5", "loss")}
