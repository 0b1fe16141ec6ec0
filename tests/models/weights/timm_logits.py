"""Logits that timm's own code computes, kept as `timm_logits.json`.

timm imports torchvision, which a CPU build of torch cannot; its models use nothing of it, so that
empty modules stand in its place here. Made by
    pip install --no-deps --target FOLDER timm==1.0.31
    python -m tests.models.weights.timm_logits FOLDER
in fp64, from weights and images that are drawn by name.
"""

import importlib
import json
import math
import sys
import types
import zlib
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

FILE = Path(__file__).with_name("timm_logits.json")
CLASSES, SIDE, IMAGES = 10, 64, 2
SMALL = {
    "depth": 2, "embed_dim": 64, "num_heads": 2, "img_size": SIDE, "act_layer": "gelu_tanh",
}  # fmt: skip
# Models as timm has them published, but for the size of a ViT and of what stands on a ResNet, and
# its GELU, which timm computes by erf (0.01 % of the largest logit) and the paper's code by tanh.
MODELS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": SMALL,
    "vit_base_r50_s16_224": SMALL,
    "vit_large_r50_s32_224": SMALL,
    "resnetv2_50x1_bit": {},
}


def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
    """Numbers in fp32 that depend on the name alone, as large as weights of that shape are."""
    random = np.random.RandomState(zlib.crc32(name.encode()))  # whose numbers never change
    spread = random.uniform(-1.0, 1.0, shape)
    if len(shape) > 1:
        spread = spread * math.sqrt(3 / math.prod(shape[1:]))
    elif name.endswith("weight"):  # of a norm
        spread = 1 + 0.2 * spread
    return torch.from_numpy(spread.astype(np.float32))


def images() -> Tensor:
    """float64 (B, 3, H, W) in [-1, 1]."""
    return drawn("images", (IMAGES * 3 * SIDE * SIDE,)).double().view(IMAGES, 3, SIDE, SIDE)


class _Empty(type):
    """Classes to derive from or to look for in a model, and names of ways to resize."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def _empty(name: str) -> _Empty:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Empty(name, (), {})


def open_timm(folder: str) -> Any:
    """timm from a folder, with empty modules for torchvision."""
    for name in (
        "torchvision", "torchvision.datasets", "torchvision.models", "torchvision.ops",
        "torchvision.models.feature_extraction", "torchvision.ops.misc", "torchvision.transforms",
        "torchvision.transforms.functional",
    ):  # fmt: skip
        module: Any = types.ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None), []
        module.__getattr__ = _empty
        sys.modules[name] = module
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)
    sys.path.insert(0, folder)
    return importlib.import_module("timm")


def logits_of(model: torch.nn.Module) -> tuple[dict[str, list[int]], list[list[float]]]:
    """Shapes of the model's tensors by name, and logits with drawn ones."""
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    model.load_state_dict({name: drawn(name, tuple(shape)) for name, shape in shapes.items()})
    with torch.no_grad():
        return shapes, model.double().eval()(images()).tolist()


def main() -> None:
    timm = open_timm(sys.argv[1])
    kept: dict[str, Any] = {"timm": timm.__version__}
    for name, options in MODELS.items():
        shapes, logits = logits_of(timm.create_model(name, num_classes=CLASSES, **options))
        digest = zlib.crc32(json.dumps(sorted(shapes.items())).encode())
        kept[name] = {"tensors": len(shapes), "crc32_of_shapes": digest, "logits": logits}
    FILE.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
