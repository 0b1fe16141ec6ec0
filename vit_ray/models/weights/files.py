"""Files of tensors: `.npz` without pickled objects, and safetensors.

Neither can run code when it is read. Written files appear whole or not at all.
"""

import contextlib
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from vit_ray.models.encoder import LAYER_NORM_EPS
from vit_ray.models.resnet import BitResNet
from vit_ray.models.sizes import Grid
from vit_ray.models.vit import PatchEmbedding, VisionTransformer
from vit_ray.models.weights.meta_headers import npz_headers, safetensors_headers
from vit_ray.models.weights.name_maps import Tensors
from vit_ray.retry import is_transient

Opener = Callable[[Path], IO[bytes]]
Content = tuple[Tensors, dict[str, str]]
"""Tensors, and the metadata beside them."""

# What a folder of Hugging Face transformers holds.
FOLDER_WEIGHTS, FOLDER_CONFIG = "model.safetensors", "config.json"
# In place of the weights where these are split over files: which file holds which tensor.
FOLDER_INDEX = "model.safetensors.index.json"

_GRID_KEY, _HEADS_KEY, _POSITIONS_KEY, _POSITIONS_AT_KEY, _LAYOUT_KEY = (
    f"vit_ray.{name}" for name in ("grid", "num_heads", "positions", "positions_at", "layout")
)
GELUS = ("gelu", "gelu_pytorch_tanh", "gelu_new", "gelu_tanh")
"""Exact, or by tanh as here; they differ by 5e-4 at most."""
MOST_EPS = 1e-5
"""torch's default epsilon of a layer norm."""
_JAX_QUERIES = re.compile(r"/MultiHeadDotProductAttention_\d/query/kernel$")


@dataclass(frozen=True)
class Origin:
    """Facts of a model that the names and shapes of its weights do not determine.

    Attributes:
        grid: (rows, columns) of the positions.
        num_heads: of each block.
        positions_at, positions: as in `VitOptions`.
        layout: of the file, where its names may be any (`vit_ray`).
    """

    grid: Grid | None = None
    num_heads: int | None = None
    positions_at: str | None = None
    positions: str | None = None
    layout: str | None = None


def origin_of(model: nn.Module) -> Origin:
    """The origin to save with a model's weights."""
    if not isinstance(model, VisionTransformer):
        return Origin()
    options = model.options
    return Origin(model.grid, model.size.num_heads, options.positions_at, options.positions)


def read_tensors(path: Path, source: str, opener: Opener | None = None) -> tuple[Tensors, Origin]:
    """Tensors of a file, and the origin that it records.

    Args:
        path: the file, or a folder that Hugging Face transformers wrote, in one file or several.
        source: what errors call it.
        opener: opens a file whose names and shapes alone are wanted: tensors are on the device
            `meta`; None = with their values.

    Raises:
        ValueError: if there is no such file, or it is broken, or of a format that could run code.
    """
    if path.is_dir():
        is_split = not (path / FOLDER_WEIGHTS).exists() and (path / FOLDER_INDEX).exists()
        path = path / (FOLDER_INDEX if is_split else FOLDER_WEIGHTS)
    if not path.is_file():
        raise ValueError(f"weights {source} do not exist; give a .npz or .safetensors file")
    if path.name == FOLDER_INDEX:
        tensors: Tensors = {}
        for name, promised in parts_of(path, source).items():
            found, _ = read_tensors(path.with_name(name), f"{source}, part {name},", opener)
            if missing := sorted(set(promised) - set(found)):
                raise ValueError(
                    f"weights {source} are not whole: {name} lacks {', '.join(missing)}; "
                    "fetch it again"
                )
            tensors.update(found)
        return tensors, _origin(path, tensors, {})
    if path.suffix not in _READERS:
        raise ValueError(
            f"weights {source} end in {path.suffix!r}; only {' and '.join(_READERS)} are read, "
            "because other formats can run code. Convert the file first"
        )
    read, read_headers = _READERS[path.suffix]
    try:
        if opener is None:
            tensors, metadata = read(path)
        else:
            with opener(path) as file:
                tensors, metadata = read_headers(file)
        return tensors, _origin(path, tensors, metadata)
    except MemoryError:
        raise
    except Exception as error:  # of zip, numpy, JSON and others, as junk may have it
        if isinstance(error, OSError) and is_transient(error):
            raise
        raise ValueError(f"weights {source} cannot be read: {error}") from error


def _origin(path: Path, tensors: Tensors, metadata: dict[str, str]) -> Origin:
    # Kernels of queries are (D, H, K), and (L, D, H, K) where blocks are stacked.
    by_shape = (
        t.shape[-2] for name, t in tensors.items() if _JAX_QUERIES.search(name) and t.dim() > 1
    )
    config = config_beside(path)
    heads = metadata.get(_HEADS_KEY) or config.get("num_attention_heads")
    grid: Grid | None = None
    sides, patch = config.get("image_size"), config.get("patch_size")
    sides = [sides, sides] if isinstance(sides, int) else sides
    if isinstance(sides, list) and isinstance(patch, int) and len(sides) == 2:
        grid = sides[0] // patch, sides[1] // patch
    if _GRID_KEY in metadata:
        rows, _, columns = metadata[_GRID_KEY].partition("x")
        grid = int(rows), int(columns)
    return Origin(
        grid,
        int(heads) if heads else next(by_shape, None),
        metadata.get(_POSITIONS_AT_KEY),
        metadata.get(_POSITIONS_KEY),
        metadata.get(_LAYOUT_KEY),
    )


def parts_of(index: Path, source: str) -> dict[str, list[str]]:
    """Files that an index of Hugging Face names, each in its folder, and the tensors of each.

    Raises:
        ValueError: it is no such index, or names files elsewhere.
    """
    try:
        files = json.loads(index.read_text())["weight_map"].items()
        parts: dict[str, list[str]] = {}
        for tensor, file in files:
            parts.setdefault(file, []).append(tensor)
        strange = sorted(name for name in parts if Path(name).name != name)
    except (ValueError, OSError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"weights {source}: {FOLDER_INDEX} is damaged: {error!r}") from None
    if strange:
        raise ValueError(f"weights {source}: {FOLDER_INDEX} names files elsewhere: {strange}")
    return parts


def _read_npz(path: Path) -> Content:
    with np.load(path, allow_pickle=False) as arrays:
        tensors = {}
        for name, array in arrays.items():
            if array.dtype.kind == "V" and array.dtype.itemsize == 2:
                # numpy has no bfloat16 and writes it as two nameless bytes.
                tensors[name] = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
            else:
                tensors[name] = torch.from_numpy(array)
        return tensors, {}


def _read_safetensors(path: Path) -> Content:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, file.metadata() or {}


_READERS: dict[str, tuple[Callable[[Path], Content], Callable[[IO[bytes]], Content]]] = {
    ".npz": (_read_npz, npz_headers),
    ".safetensors": (_read_safetensors, safetensors_headers),
}
"""By suffix: of tensors with their values, and without."""


def config_beside(path: Path) -> dict[str, Any]:
    """The `config.json` that transformers or timm would build the model of a folder with.

    Args:
        path: the folder, or the file of weights in it; a file of another name has no such folder.
    """
    if path.is_dir():
        return read_settings(path / FOLDER_CONFIG)
    is_in_folder = path.name in (FOLDER_WEIGHTS, FOLDER_INDEX)
    return read_settings(path.with_name(FOLDER_CONFIG)) if is_in_folder else {}


def differences_of(config: dict[str, Any]) -> list[str]:
    """Settings of the function that a file's tensors were trained in, which differ slightly here.

    Args:
        config: of transformers, or of timm with its `model_args`.

    Raises:
        ValueError: another activation or normalisation than our blocks have.
    """
    if config.get("model_type") == "bit":
        return []  # a ResNet has other activations and no layer norm
    options = config.get("model_args")
    settings = {**config, **(options if isinstance(options, dict) else {})}
    allowed: dict[str, tuple[str, ...]] = {
        "hidden_act": GELUS,
        "act_layer": GELUS,
        "pooler_act": ("tanh",),
        "norm_layer": ("layernorm",),
    }
    for name, values in allowed.items():
        if (value := settings.get(name)) is not None and value not in values:
            raise ValueError(f"{FOLDER_CONFIG} has {name}={value!r}; use {' or '.join(values)}")
    if "quickgelu" in str(config.get("architecture")):
        raise ValueError(f"{FOLDER_CONFIG} has architecture={config['architecture']!r}; use gelu")
    epsilon = settings.get("layer_norm_eps", LAYER_NORM_EPS)
    if epsilon > MOST_EPS:
        raise ValueError(
            f"{FOLDER_CONFIG} has layer_norm_eps={epsilon:g}; models here have {LAYER_NORM_EPS:g}, "
            f"and only values up to {MOST_EPS:g} are close to it"
        )
    found = [] if epsilon == LAYER_NORM_EPS else [f"layer_norm_eps={epsilon:g}"]
    return found + [f"{name}=gelu" for name in allowed if settings.get(name) == "gelu"]


def read_settings(file: Path) -> dict[str, Any]:
    """What a JSON file beside weights says; nothing where there is none.

    Raises:
        ValueError: it is not JSON.
    """
    return parse_settings(file.read_bytes(), str(file)) if file.is_file() else {}


def parse_settings(content: bytes, source: str) -> dict[str, Any]:
    """The content of such a file.

    Raises:
        ValueError: as `read_settings`.
    """
    try:
        settings = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{source} is not JSON ({error}); fetch it again") from None
    return settings if isinstance(settings, dict) else {}


def weights_file(layout: str) -> str:
    """Name of the weights in the folder of a model."""
    return "model.npz" if layout == "jax" else FOLDER_WEIGHTS


def write_tensors(
    path: Path, tensors: Tensors, layout: str, model: nn.Module, classes: Sequence[str]
) -> None:
    """Write named tensors where and as a layout asks; see `weights.save_weights`.

    Raises:
        ValueError: if the suffix does not fit the layout, or nothing can be written there.
    """
    check_suffix(path, layout)
    if not path.suffix:
        config = json.dumps(_config(model, layout, classes), indent=2)
        _replace(path / FOLDER_CONFIG, lambda partial: partial.write_text(config + "\n"))
        path = path / weights_file(layout)
    if layout == "jax":
        # numpy has no bfloat16; every such number is one of float32.
        arrays = {
            name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
            for name, tensor in tensors.items()
        }

        def save_npz(partial: Path) -> None:
            with partial.open("wb") as file:  # given a path, numpy would change its suffix
                np.savez(file, allow_pickle=False, **arrays)

        _replace(path, save_npz)
        return
    origin = origin_of(model)
    metadata: dict[str, Any] = {
        "format": "pt",
        _HEADS_KEY: origin.num_heads,
        _POSITIONS_KEY: origin.positions,
        _POSITIONS_AT_KEY: origin.positions_at,
        _GRID_KEY: origin.grid and f"{origin.grid[0]}x{origin.grid[1]}",
        _LAYOUT_KEY: layout if layout == "vit_ray" else None,
    }
    known = {key: str(value) for key, value in metadata.items() if value is not None}
    _replace(path, lambda partial: save_file(tensors, partial, known))


def check_suffix(path: Path, layout: str) -> None:
    """Refuse a file whose name promises another format than its layout's.

    Raises:
        ValueError: telling the layout's.
    """
    suffix = ".npz" if layout == "jax" else ".safetensors"
    if path.suffix not in (suffix, ""):
        raise ValueError(f"layout={layout!r} is written to {suffix} files, not to {path}")


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Write beside the path and move into place, so that no reader meets half a file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
        mode = partial.stat().st_mode
        write(partial)
        partial.chmod(
            mode
        )  # as of any new file: safetensors' own are readable by their owner alone
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"weights cannot be written to {path}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _config(model: nn.Module, layout: str, classes: Sequence[str]) -> dict[str, Any]:
    """`config.json`: the class names, and what a layout's own library builds the model with.

    transformers' defaults differ from our blocks in the activation and the epsilon, timm's in the
    activation and in the norm of a mean over tokens. timm 1.0.20 gives our logits, within 1e-6, by
    what is written here; a model that it does not have gets no `architecture`.
    """
    num_classes = model.get_parameter("head.bias").numel()
    if layout == "huggingface":
        labels = {i: classes[i] if classes else f"LABEL_{i}" for i in range(num_classes)}
        places = {name: index for index, name in labels.items()}
        return {**_huggingface_config(model), "id2label": labels, "label2id": places}
    config: dict[str, Any] = {"num_classes": num_classes}
    if classes:
        config["label_names"] = list(classes)
    if layout != "timm" or not isinstance(model, VisionTransformer):
        return config
    has_class_token, has_positions = model.class_token is not None, len(model.positions) > 0
    if (
        model.options.representation
        or not isinstance(model.embedding, PatchEmbedding)
        or (has_class_token and not has_positions)  # without positions timm leaves the token out
    ):
        return config
    size, patch = model.size, model.embedding.patch_size
    sides = [side * patch for side in model.grid]
    exact = int(size.width * (size.mlp_dim / size.width)) == size.mlp_dim
    return {
        "architecture": "vit_base_patch16_224",
        **config,
        "num_features": size.width,
        "model_args": {
            "global_pool": "token" if has_class_token else "avg",
            "img_size": sides,
            "patch_size": patch,
            "embed_dim": size.width,
            "depth": size.depth,
            "num_heads": size.num_heads,
            # It cuts the product of this and the width to a whole number.
            "mlp_ratio": (size.mlp_dim + (0 if exact else 0.5)) / size.width,
            "class_token": has_class_token,
            "fc_norm": False,
            "act_layer": "gelu_tanh",
            **({} if has_positions else {"pos_embed": "none"}),
        },
        "pretrained_cfg": {
            "num_classes": num_classes,
            "input_size": [3, *sides],
            "interpolation": "bilinear",
            "mean": [0.5, 0.5, 0.5],
            "std": [0.5, 0.5, 0.5],
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }


def _huggingface_config(model: nn.Module) -> dict[str, Any]:
    """What transformers needs to build the same model."""
    if isinstance(model, VisionTransformer):
        embedding = model.embedding
        assert isinstance(embedding, PatchEmbedding)
        size, patch_size = model.size, embedding.patch_size
        config: dict[str, Any] = {
            "architectures": ["ViTForImageClassification"],
            "model_type": "vit",
            "hidden_size": size.width,
            "intermediate_size": size.mlp_dim,
            "num_hidden_layers": size.depth,
            "num_attention_heads": size.num_heads,
            "patch_size": patch_size,
            "image_size": [side * patch_size for side in model.grid],
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": LAYER_NORM_EPS,
        }
    else:
        assert isinstance(model, BitResNet)
        config = {
            "architectures": ["BitForImageClassification"],
            "model_type": "bit",
            "depths": list(model.size.stages),
            "hidden_sizes": [4 * width for width in model.size.widths],
            "embedding_size": model.size.widths[0],
            "layer_type": "preactivation",
        }
    return config
