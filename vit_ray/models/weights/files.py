"""Files of tensors: `.npz` without pickled objects, and safetensors.

Neither can run code when it is read. Written files appear complete or not at all.
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

from vit_ray.models.sizes import Grid
from vit_ray.models.vit import VisionTransformer
from vit_ray.models.weights.folder_config import (
    FOLDER_CONFIG,
    FOLDER_INDEX,
    FOLDER_WEIGHTS,
    config_beside,
    folder_config,
    weights_file,
)
from vit_ray.models.weights.meta_headers import npz_headers, safetensors_headers
from vit_ray.models.weights.name_maps import Tensors
from vit_ray.models.weights.published_models import vision_settings
from vit_ray.retry import is_transient

Opener = Callable[[Path], IO[bytes]]
Content = tuple[Tensors, dict[str, str]]
"""Tensors, and their metadata."""

_GRID_KEY, _LAYOUT_KEY = "vit_ray.grid", "vit_ray.layout"
_HEADS_KEY, _EPS_KEY = "vit_ray.num_heads", "vit_ray.norm_eps"
_NAMED_OPTIONS = ("positions_at", "positions", "activation")
_JAX_QUERIES = re.compile(r"/MultiHeadDotProductAttention_\d/query/kernel$")


@dataclass(frozen=True)
class Origin:
    """Properties of a model that the names and shapes of its weights do not determine.

    Attributes:
        grid: (rows, columns) of the positions.
        num_heads: of each block.
        positions_at, positions, activation, norm_eps: as in `VitOptions`.
        layout: of the file, if its names may be any (`vit_ray`).
    """

    grid: Grid | None = None
    num_heads: int | None = None
    positions_at: str | None = None
    positions: str | None = None
    activation: str | None = None
    norm_eps: float | None = None
    layout: str | None = None


def origin_of(model: nn.Module) -> Origin:
    """The origin to save with a model's weights."""
    if not isinstance(model, VisionTransformer):
        return Origin()
    options = model.options
    named = {name: getattr(options, name) for name in _NAMED_OPTIONS}
    return Origin(model.grid, model.size.num_heads, norm_eps=options.norm_eps, **named)


def read_tensors(path: Path, source: str, opener: Opener | None = None) -> tuple[Tensors, Origin]:
    """Tensors of a file, and the origin that it records.

    Args:
        path: the file, or a folder that Hugging Face transformers wrote, in one file or several.
        source: its name in errors.
        opener: opens a file for its names and shapes only: tensors are on the device `meta`; None =
            with their values.

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
                    f"weights {source} are incomplete: {name} lacks {', '.join(missing)}; fetch it "
                    "again"
                )
            tensors.update(found)
        return tensors, _origin(path, tensors, {})
    if path.suffix not in _READERS:
        raise ValueError(
            f"weights {source} end in {path.suffix!r}; only {' and '.join(_READERS)} are read, "
            "because other formats can run code; convert the file first"
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
    except Exception as error:  # from zip, numpy, JSON and others, since the file may hold anything
        if isinstance(error, OSError) and is_transient(error):
            raise
        raise ValueError(f"weights {source} cannot be read: {error}") from error


def _origin(path: Path, tensors: Tensors, metadata: dict[str, str]) -> Origin:
    # Kernels of queries are (D, H, K), or (L, D, H, K) if blocks are stacked.
    by_shape = (
        t.shape[-2] for name, t in tensors.items() if _JAX_QUERIES.search(name) and t.dim() > 1
    )
    config = vision_settings(config_beside(path))
    heads = metadata.get(_HEADS_KEY) or config.get("num_attention_heads") or config.get("num_heads")
    grid: Grid | None = None
    sides, patch = config.get("image_size"), config.get("patch_size")
    sides = [sides, sides] if isinstance(sides, int) else sides
    if isinstance(sides, list) and isinstance(patch, int) and len(sides) == 2:
        grid = sides[0] // patch, sides[1] // patch
    if _GRID_KEY in metadata:
        rows, _, columns = metadata[_GRID_KEY].partition("x")
        grid = int(rows), int(columns)
    named = {name: metadata.get(f"vit_ray.{name}") for name in _NAMED_OPTIONS}
    return Origin(
        grid,
        int(heads) if heads else next(by_shape, None),
        norm_eps=float(metadata[_EPS_KEY]) if _EPS_KEY in metadata else None,
        layout=metadata.get(_LAYOUT_KEY),
        **named,
    )


def parts_of(index: Path, source: str) -> dict[str, list[str]]:
    """Files that a Hugging Face index names, each in its folder, and the tensors of each.

    Raises:
        ValueError: it is not such an index, or names files elsewhere.
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
                # numpy has no bfloat16 and writes it as two unnamed bytes.
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
"""By suffix: reads tensors with their values, and without."""


def write_tensors(
    path: Path, tensors: Tensors, layout: str, model: nn.Module, classes: Sequence[str]
) -> None:
    """Write named tensors to a file in the form of a layout; see `weights.save_weights`.

    Raises:
        ValueError: if the suffix does not fit the layout, or the file cannot be written.
    """
    check_suffix(path, layout)
    if not path.suffix:
        config = json.dumps(folder_config(model, layout, classes), indent=2)
        _replace(path / FOLDER_CONFIG, lambda partial: partial.write_text(config + "\n"))
        path = path / weights_file(layout)
    if layout == "jax":
        # numpy has no bfloat16; float32 represents every such number.
        arrays = {
            name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
            for name, tensor in tensors.items()
        }

        def save_npz(partial: Path) -> None:
            with partial.open("wb") as file:  # numpy would change the suffix of a path
                np.savez(file, allow_pickle=False, **arrays)

        _replace(path, save_npz)
        return
    origin = origin_of(model)
    metadata: dict[str, Any] = {
        "format": "pt",
        _HEADS_KEY: origin.num_heads,
        **{f"vit_ray.{name}": getattr(origin, name) for name in _NAMED_OPTIONS},
        _EPS_KEY: origin.norm_eps,
        _GRID_KEY: origin.grid and f"{origin.grid[0]}x{origin.grid[1]}",
        _LAYOUT_KEY: layout if layout == "vit_ray" else None,
    }
    known = {key: str(value) for key, value in metadata.items() if value is not None}
    _replace(path, lambda partial: save_file(tensors, partial, known))


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


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Write next to the path and move into place, so that no reader sees an incomplete file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
        mode = partial.stat().st_mode
        write(partial)
        # Permissions of a new file: safetensors' own files are readable only by their owner.
        partial.chmod(mode)
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"weights cannot be written to {path}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
