"""The paper's own results, for showing beside ours, always labelled as the paper's."""

from __future__ import annotations

from dataclasses import dataclass

from vit_ray.config.model_family import model_family

SOURCE = "Dosovitskiy et al., ICLR 2021, arXiv:2010.11929v2, Table 6"


@dataclass(frozen=True)
class PaperRow:
    """One model pre-trained on JFT-300M and fine-tuned; accuracies in [0, 1]."""

    name: str
    epochs: int
    imagenet: float
    exaflops: float

    @property
    def family(self) -> str:
        """Model family, as in our figures."""
        return model_family(self.name)


# Columns: model, JFT epochs, ImageNet top-1 in percent, pre-training exaFLOPs. The 859 of
# R50x1+ViT-L/16 is printed so, though half of its own 14-epoch row is 834.
TABLE_6 = tuple(
    PaperRow(name, epochs, top1 / 100, exaflops)
    for name, epochs, top1, exaflops in (
        ("ViT-B/32", 7, 80.73, 55),
        ("ViT-B/16", 7, 84.15, 224),
        ("ViT-L/32", 7, 84.37, 196),
        ("ViT-L/16", 7, 86.30, 783),
        ("ViT-L/16", 14, 87.12, 1567),
        ("ViT-H/14", 14, 88.08, 4262),
        ("R50x1", 7, 77.54, 50),
        ("R50x2", 7, 82.12, 199),
        ("R101x1", 7, 80.67, 96),
        ("R152x1", 7, 81.88, 141),
        ("R152x2", 7, 84.97, 563),
        ("R152x2", 14, 85.56, 1126),
        ("R200x3", 14, 87.22, 3306),
        ("R50x1+ViT-B/32", 7, 84.90, 106),
        ("R50x1+ViT-B/16", 7, 85.58, 274),
        ("R50x1+ViT-L/32", 7, 85.68, 246),
        ("R50x1+ViT-L/16", 7, 86.60, 859),
        ("R50x1+ViT-L/16", 14, 87.12, 1668),
    )
)
