"""Labels that tasks of VTAB compute from the features of TensorFlow Datasets (TFDS).

Zhai et al., "A Large-scale Study of Representation Learning with the Visual Task Adaptation
Benchmark" (arXiv:1910.04867); thresholds of google-research/task_adaptation, `data/clevr.py`,
`kitti.py`, `dsprites.py` and `smallnorb.py`. The other tasks have their class as `label`.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

Features = Mapping[str, Sequence[Any]]

_CLEVR_DISTANCES: Final = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0)
_KITTI_DISTANCES_M: Final = (-100.0, 8.0, 20.0, 999.0)
_NO_VEHICLE_M: Final = 1000.0
# Car, van and truck, by TFDS's names of the types.
_KITTI_VEHICLES: Final = (0, 1, 2)
# Fewest objects in an image of CLEVR.
_FEWEST_OBJECTS: Final = 3


@dataclass(frozen=True)
class VtabLabel:
    """How the label of a task is computed.

    Attributes:
        num_classes: of the task, named by their numbers.
        of: label of an image; raises KeyError if a feature is missing, ValueError if it has no
            label.
        is_binary: pixels are 0 and 1, not 0 to 255.
    """

    num_classes: int
    of: Callable[[Features], int]
    is_binary: bool = False


def _closest_object(features: Features) -> int:
    depths = features["objects/pixel_coords"][2::3]
    return bisect_left(_CLEVR_DISTANCES, min(depths, default=-1.0)) - 1


def _closest_vehicle(features: Features) -> int:
    depths_m = features["objects/location"][2::3]
    kinds = features["objects/type"]
    its = [depth for depth, kind in zip(depths_m, kinds, strict=True) if kind in _KITTI_VEHICLES]
    return bisect_left(_KITTI_DISTANCES_M, min([*its, _NO_VEHICLE_M])) - 1


def _grouped(name: str, count: int, num_classes: int, features: Features) -> int:
    """Every `count` consecutive values are one class."""
    (value,) = features[name]
    return int(value * num_classes // count)


# By the names of Table 9.
VTAB_LABELS: Final[dict[str, VtabLabel]] = {
    "clevr-count": VtabLabel(8, lambda its: len(its["objects/size"]) - _FEWEST_OBJECTS),
    "clevr-dist": VtabLabel(6, _closest_object),
    "dspr-loc": VtabLabel(16, partial(_grouped, "label_x_position", 32, 16), is_binary=True),
    "dspr-ori": VtabLabel(16, partial(_grouped, "label_orientation", 40, 16), is_binary=True),
    "kitti-dist": VtabLabel(4, _closest_vehicle),
    "snorb-azim": VtabLabel(18, partial(_grouped, "label_azimuth", 18, 18)),
    "snorb-elev": VtabLabel(9, partial(_grouped, "label_elevation", 9, 9)),
}


def vtab_label(task: str, features: Features) -> int:
    """The label of an image.

    Raises:
        ValueError: it has none.
    """
    rule = VTAB_LABELS[task]
    try:
        label = rule.of(features)
    except KeyError as error:
        found = ", ".join(sorted(features)[:20])
        raise ValueError(f"{task} needs the feature {error}, but it only has {found}") from None
    except TypeError:
        raise ValueError(f"a feature for {task} is not a list of numbers") from None
    if not 0 <= label < rule.num_classes:
        raise ValueError(f"its label of {task} is {label}, not one of 0 to {rule.num_classes - 1}")
    return label
