"""Counts, FLOPs, initial values and logits of models, and weights in each published layout."""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

import vit_ray

CLASSES, SIDE = 7, 32
BODY: dict[str, Any] = {"depth": 2, "width": 24, "mlp_dim": 40, "num_heads": 2}
VIT = {**BODY, "patch_size": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("ViT", VIT),
    "ViT, representation, head bias": ("ViT", {**VIT, "representation": True, "head_bias": -10.0}),
    "ViT, mean, exact GELU": ("ViT", {**VIT, "pool": "gap", "activation": "gelu"}),
    **{
        f"ViT, positions {kind}": ("ViT", {**VIT, "positions": kind})
        for kind in ("none", "learned_2d", "relative", "sincos_2d")
    },
    "ViT, positions in layers": ("ViT", {**VIT, "positions_at": "every_layer"}),
    "hybrid": ("R+ViT", {**BODY, "stages": [1, 1], "width_factor": 1}),
    "BiT": ("ResNet", {"stages": [1, 1], "width_factor": 1}),
    "axial ViT": ("Axial-ViT", VIT),
    "axial ResNet": ("AxialResNet", {"stages": [1, 1], "width_factor": 1}),
}
LAYOUTS = {"jax": ".npz", "timm": ".safetensors", "huggingface": ".safetensors"}


def record(folder: Path) -> dict[str, Any]:
    """Of the models of the catalog, of small ones, and of the files of small ones."""
    catalog = [name for name in vit_ray.model_names() if any(map(str.isdigit, name))]
    found: dict[str, Any] = {"catalog": {name: _counts(name) for name in catalog}}
    for title, (name, options) in MODELS.items():
        torch.manual_seed(3)
        model = vit_ray.build_model(name, CLASSES, SIDE, **options)
        found[title] = {"initial values": _values(model)}
        for number, parameter in enumerate(model.parameters()):
            parameter.data = torch.from_numpy(_random(str(number), tuple(parameter.shape)))
        found[title]["logits"] = _logits(model)
    for layout, suffix in LAYOUTS.items():
        for title in ("ViT", "hybrid", "BiT"):
            if (layout, title) != ("huggingface", "hybrid"):  # it has no names for one
                file = folder / f"{layout}-{title}{suffix}"
                found[f"{title} in layout {layout}"] = _file(file, layout, *MODELS[title])
    return found


def _counts(name: str) -> dict[str, Any]:
    with torch.device("meta"):
        model = vit_ray.build_model(name, 1000, 224)
    return {
        "parameters": sum(each.numel() for each in model.parameters()),
        "multiply-adds": vit_ray.forward_macs(name, 1000, 224),
    }


def _values(model: torch.nn.Module) -> list[str]:
    """Shape and a projection of each parameter, whatever its name.

    The projection has a rounding that hides the last bits, in which processors differ.
    """
    found = []
    for parameter in model.parameters():
        values = parameter.detach().double().numpy().ravel()
        weights = np.random.default_rng(values.size).normal(size=values.size)
        found.append(f"{list(parameter.shape)}: {float(values @ weights):.4g}")
    return sorted(found)


def _random(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """Values of the size of trained ones; vectors around 1, since some are scales of norms."""
    values = np.random.default_rng(zlib.crc32(key.encode())).normal(size=shape)
    return (0.1 * values + (len(shape) == 1)).astype(np.float32)


@torch.no_grad()
def _logits(model: torch.nn.Module, side: int = SIDE) -> list[str]:
    """Of two images in float64, so that their rounding is of no processor."""
    pixels = np.random.default_rng(1).uniform(-1, 1, (2, 3, side, side))
    logits = model.double().eval()(torch.from_numpy(pixels))
    return [f"{value:.5g}" for value in logits.double().ravel().tolist()]


def _file(file: Path, layout: str, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Names and shapes that are written, and the logits of values that are read by these names."""
    vit_ray.save_weights(vit_ray.build_model(name, CLASSES, SIDE, **options), file, layout)
    is_npz = file.suffix == ".npz"
    tensors = dict(np.load(file)) if is_npz else load_file(file)
    filled = {key: _random(key, tensor.shape) for key, tensor in tensors.items()}
    np.savez(file, **filled) if is_npz else save_file(filled, file)
    found = {"names": [f"{key} {list(tensors[key].shape)}" for key in sorted(tensors)]}
    for side in (SIDE, 48):
        model = vit_ray.build_model(name, CLASSES, side, **options)
        vit_ray.load_weights(model, file, layout)
        found[f"logits at {side} pixels"] = _logits(model, side)
    return found
