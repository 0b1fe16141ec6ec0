"""The paper's models, their names in timm and on the Hugging Face hub, and the paper's tables."""

import re
from dataclasses import dataclass
from typing import Final

SOURCE: Final = "Dosovitskiy et al., ICLR 2021, arXiv:2010.11929v2"

PRETRAINING: Final = {
    "imagenet": "ImageNet", "imagenet21k": "ImageNet-21k", "jft300m": "JFT-300M",
}  # fmt: skip
_MODELS: Final = ("ViT-B/16", "ViT-B/32", "ViT-L/16", "ViT-L/32", "ViT-H/14")

_SIZES: Final = {"tiny": "Ti", "small": "S", "base": "B", "large": "L", "huge": "H"}
# These name weights: the part after a full stop in timm, an owner or data set on the hub.
_OWNER, _TAG = r"(?:[\w.-]+/)?", r"(?:\.\w+|-in21k)?"
_VIT: Final = re.compile(
    rf"{_OWNER}(?:vit|deit)[_-]({'|'.join(_SIZES)})[_-]patch(\d+)[_-](\d+){_TAG}"
)
_HYBRID: Final = re.compile(rf"vit_({'|'.join(_SIZES)})_r50_s(\d+)_(\d+){_TAG}")
_BIT: Final = re.compile(rf"resnetv2_(\d+x\d)_bit{_TAG}|(?:google/)?bit-(\d+)")

_FAMILIES: Final = {"Axial": "Axial", "Hybrid": r".*\+", "ViT": "ViT", "ResNet": r"R\d|ResNet"}


def model_family(name: str) -> str:
    """`ViT`, `Hybrid`, `ResNet`, `Axial` or `Other`, by the catalog's name."""
    return next((family for family, start in _FAMILIES.items() if re.match(start, name)), "Other")


def canonical_model(name: str) -> tuple[str, int | None]:
    """The catalog's name of a model, and the image side in pixels that the given name contains.

    Args:
        name: such as `vit_base_patch16_224.augreg_in21k` in timm, `google/vit-base-patch16-224` on
            the hub; any other name is returned unchanged.
    """
    if match := _VIT.fullmatch(name):
        return f"ViT-{_SIZES[match[1]]}/{match[2]}", int(match[3])
    if match := _HYBRID.fullmatch(name):
        return f"R50x1+ViT-{_SIZES[match[1]]}/{match[2]}", int(match[3])
    if match := _BIT.fullmatch(name):
        return f"R{match[1] or f'{match[2]}x1'}", None
    return name, None


def resolved_model(name: str, image_size: object) -> tuple[str, object]:
    """The catalog's name of a model, and its image size: as given, or else as in the name.

    Args:
        image_size: None = not given.

    Raises:
        ValueError: the name is for another size than `image_size`.
    """
    catalog_name, side = canonical_model(name)
    if side is None or image_size in (side, (side, side), [side, side]):
        return catalog_name, image_size
    if image_size is not None:
        raise ValueError(
            f"name={name} is for {side} pixels, but image_size={image_size}; give "
            f"image_size={side}, or name={catalog_name}"
        )
    return catalog_name, side


@dataclass(frozen=True)
class TestSet:
    """A column of the tables."""

    title: str
    num_classes: int
    num_images: int


# Sizes as published: CIFAR's, Pets' and Flowers' test sets, ImageNet's validation set.
TEST_SETS: Final = {
    "cifar10": TestSet("CIFAR-10", 10, 10_000),
    "cifar100": TestSet("CIFAR-100", 100, 10_000),
    "imagenet": TestSet("ImageNet", 1000, 50_000),
    "imagenet_real": TestSet("ImageNet ReaL", 1000, 50_000),
    "flowers": TestSet("Oxford Flowers-102", 102, 6_149),
    "pets": TestSet("Oxford-IIIT Pets", 37, 3_669),
}

# Mean and deviation of three runs in percent, in the order of the tasks.
TABLE_2: Final = {
    ("ViT-H/14", "jft300m"): (
        (99.50, 0.06), (94.55, 0.04), (88.55, 0.04), (90.72, 0.05), (99.68, 0.02), (97.56, 0.03),
    ),
    ("ViT-L/16", "jft300m"): (
        (99.42, 0.03), (93.90, 0.05), (87.76, 0.03), (90.54, 0.03), (99.74, 0.00), (97.32, 0.11),
    ),
    ("ViT-L/16", "imagenet21k"): (
        (99.15, 0.03), (93.25, 0.05), (85.30, 0.02), (88.62, 0.05), (99.61, 0.02), (94.67, 0.15),
    ),
}  # fmt: skip
# Accuracies in percent: a row for each task, a column for each model.
TABLE_5: Final[dict[str, tuple[tuple[float | None, ...], ...]]] = {
    "imagenet": (
        (98.13, 97.77, 97.86, 97.94, None),
        (87.13, 86.31, 86.35, 87.07, None),
        (77.91, 73.38, 76.53, 71.16, None),
        (83.57, 79.56, 82.19, 77.83, None),
        (89.49, 85.43, 89.66, 86.36, None),
        (93.81, 92.04, 93.64, 91.35, None),
    ),
    "imagenet21k": (
        (98.95, 98.79, 99.16, 99.13, 99.27),
        (91.67, 91.97, 93.44, 93.04, 93.82),
        (83.97, 81.28, 85.15, 80.99, 85.13),
        (88.35, 86.63, 88.40, 85.65, 88.70),
        (99.38, 99.11, 99.61, 99.19, 99.51),
        (94.43, 93.02, 94.73, 93.09, 94.82),
    ),
    "jft300m": (
        (99.00, 98.61, 99.38, 99.19, 99.50),
        (91.87, 90.49, 94.04, 92.52, 94.55),
        (84.15, 80.73, 87.12, 84.37, 88.04),
        (88.85, 86.27, 89.99, 88.28, 90.33),
        (99.56, 99.27, 99.56, 99.45, 99.68),
        (95.80, 93.40, 97.11, 95.83, 97.56),
    ),
}


def table_2(model: str, pretraining: str, task: str) -> tuple[float, float] | None:
    """Mean and deviation as shares; None if the paper has none."""
    row = dict(zip(TEST_SETS, TABLE_2.get((model, pretraining), ()), strict=False))
    return (row[task][0] / 100, row[task][1] / 100) if task in row else None


def table_5(model: str, pretraining: str, task: str) -> float | None:
    """Accuracy as a share; None if the paper has none."""
    row = dict(zip(TEST_SETS, TABLE_5[pretraining], strict=True)).get(task, ())
    value = dict(zip(_MODELS, row, strict=False)).get(model)
    return None if value is None else value / 100


@dataclass(frozen=True)
class PaperRow:
    """One model pre-trained on JFT-300M and fine-tuned; accuracies in [0, 1]."""

    name: str
    epochs: int
    imagenet: float
    exaflops: float

    @property
    def family(self) -> str:
        return model_family(self.name)


# Columns: model, JFT epochs, ImageNet top-1 in percent, pre-training exaFLOPs. The 859 of
# R50x1+ViT-L/16 is as printed, although half of its 14-epoch row is 834.
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
