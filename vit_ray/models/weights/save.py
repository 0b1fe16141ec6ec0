"""Saving weights: in our own names, and in every published layout that can express the model."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import nn

from vit_ray.models.catalog import LAYER_NORM_EPS
from vit_ray.models.fitting import Tensors, constant_bias, origin_of
from vit_ray.models.positions import square_grid
from vit_ray.models.published import FOLDER_CONFIG, folder_config, rules_for, weights_file
from vit_ray.models.vit import VisionTransformer
from vit_ray.models.weights import METADATA
from vit_ray.storage import locate


def save_weights(
    model: nn.Module, path: str | Path, layout: str = "jax", classes: Sequence[str] = ()
) -> None:
    """Write a model's weights in a published layout; the file appears complete or not at all.

    Args:
        model: from `build_model`, on any device.
        path: a file: `.npz` for "jax", else `.safetensors`. A path without a suffix is a folder of
            `model.npz` or `model.safetensors`, and `config.json`; with "huggingface"
            `from_pretrained` reads it.
        layout: "jax", "timm", "huggingface", or "vit_ray" for our own names.
        classes: names in the order of the logits, for the folder's `config.json`.

    Raises:
        ValueError: if the layout cannot express the model, or the suffix does not fit it.
    """
    path = Path(path)
    rules = rules_for(model, layout)
    _check_expressible(model, layout)
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    if nameless := sorted(set(state) - {rule.own for rule in rules}):
        raise ValueError(
            f"layout={layout!r} has no names for {', '.join(nameless)}; use layout='vit_ray'"
        )
    if bias := constant_bias(model):
        state["head.bias"] = state["head.bias"].float() + bias
    num_heads = model.size.num_heads if isinstance(model, VisionTransformer) else 1
    published: Tensors = {}
    for rule in rules:
        if rule.own in state:
            published |= rule.to_published(state[rule.own], num_heads)
    if layout == "huggingface":
        prefix = "vit" if isinstance(model, VisionTransformer) else "bit"
        published = {
            name if name.startswith("classifier.") else f"{prefix}.{name}": tensor
            for name, tensor in published.items()
        }
    check_suffix(path, layout)
    files = {path: _encoded(published, layout, {"layout": layout, **origin_of(model)})}
    if not path.suffix:
        config = json.dumps(folder_config(model, layout, classes), indent=2) + "\n"
        files = {path / weights_file(layout): files[path], path / FOLDER_CONFIG: config.encode()}
    try:
        for file, content in files.items():
            locate(str(file)).write(content)
    except OSError as error:
        raise ValueError(f"weights cannot be written to {path}: {error}") from error


def check_suffix(path: Path, layout: str) -> None:
    """Refuse a file whose suffix is for another format than its layout's.

    Raises:
        ValueError: with the layout's suffix.
    """
    suffix = ".npz" if layout == "jax" else ".safetensors"
    if path.suffix not in (suffix, ""):
        raise ValueError(
            f"layout={layout!r} is written to {suffix} files, not to {path}; change the suffix or "
            "the layout"
        )


def _check_expressible(model: nn.Module, layout: str) -> None:
    """Options that do not show in the tensors: a reader of the layout would run another model.

    Raises:
        ValueError: if the model has an option that the layout cannot express.
    """
    if layout == "vit_ray" or not isinstance(model, VisionTransformer):
        return
    options, (rows, columns) = model.options, model.grid
    read_as = square_grid(rows * columns) or square_grid(model.num_tokens)
    is_hub, is_jax = layout == "huggingface", layout == "jax"
    lost = {
        f"positions={options.positions!r}": options.positions == "sincos_2d",
        "positions_at='every_layer_shared'": options.positions_at == "every_layer_shared",
        # Other files record it.
        f"positions of {rows} x {columns} patches, which would be read as a square": is_jax
        and read_as not in (None, model.grid)
        and len(model.positions) > 0,
        "pool='gap'": is_hub and options.pool == "gap",
        f"activation={options.activation!r}": is_jax and options.activation != "gelu_tanh",
        f"norm_eps={options.norm_eps:g}": not is_hub and options.norm_eps != LAYER_NORM_EPS,
        # Its tanh layer, the pooler, is left out by transformers' classifier.
        "representation=true (ViTForImageClassification would give other logits without an error; "
        "'jax' and 'timm' keep it)": is_hub and options.representation,
        "positions='none'": is_hub and options.positions == "none",
    }
    for what, is_lost in lost.items():
        if is_lost:
            raise ValueError(f"layout={layout!r} cannot express {what}; use layout='vit_ray'")


def _encoded(tensors: Tensors, layout: str, facts: dict[str, Any]) -> bytes:
    if layout != "jax":
        return save(tensors, {"format": "pt", METADATA: json.dumps(facts)})
    # numpy has no bfloat16; float32 represents every such number.
    arrays = {n: t.float() if t.dtype == torch.bfloat16 else t for n, t in tensors.items()}
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **{name: t.numpy() for name, t in arrays.items()})
    return file.getvalue()
