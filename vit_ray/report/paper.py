"""The paper's own results, for showing beside ours, always labelled as the paper's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from vit_ray.config.model_family import model_family

SOURCE: Final = "Dosovitskiy et al., ICLR 2021, arXiv:2010.11929v2"


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


VTAB_TASKS = (
    "caltech101", "cifar100", "dtd", "flowers102", "pets", "sun397", "svhn",
    "camelyon", "eurosat", "resisc45", "retinopathy",
    "clevr-count", "clevr-dist", "dmlab", "dspr-loc", "dspr-ori", "kitti-dist", "snorb-azim",
    "snorb-elev",
)  # fmt: skip
# Top-1 in percent, in the order of the tasks: 7 natural, 4 specialized, 8 structured.
TABLE_9 = {
    "ViT-H/14 (JFT)": (
        95.3, 85.5, 75.2, 99.7, 97.2, 65.0, 88.9, 83.3, 96.7, 91.4, 76.6,
        91.7, 63.8, 53.1, 79.4, 63.3, 84.5, 33.2, 51.2,
    ),
    "ViT-L/16 (JFT)": (
        95.4, 81.9, 74.3, 99.7, 96.7, 63.5, 87.4, 83.6, 96.5, 89.7, 77.1,
        86.4, 63.1, 49.7, 74.5, 60.5, 82.2, 36.2, 51.1,
    ),
    "ViT-L/16 (I21k)": (
        90.8, 84.1, 74.1, 99.3, 92.7, 61.0, 80.9, 82.5, 95.6, 85.2, 75.3,
        70.3, 56.1, 41.9, 74.7, 64.9, 79.9, 30.5, 41.7,
    ),
}  # fmt: skip

# TPUv3-core-days of pre-training in Table 2, in the order of its models.
TABLE_2_CORE_DAYS = (2500, 680, 230)

# Mean of five tasks in percent after 7 epochs of JFT-300M: model, Adam, SGD.
TABLE_7 = (("R50x1", 89.33, 88.79), ("R152x2", 94.01, 93.72))

# 5-shot ImageNet of B/16 by kind of positions and where they are added: at the stem, learned at
# every layer, shared by every layer.
POSITION_PLACES = ("stem", "every_layer", "every_layer_shared")
TABLE_8: dict[str, tuple[float | None, float | None, float | None]] = {
    "none": (0.61382, None, None),
    "learned_1d": (0.64206, 0.63964, 0.64292),
    "learned_2d": (0.64001, 0.64046, 0.64022),
    "relative": (0.64032, None, None),
}
