"""Loading and saving weights, in our own layout and in every published one.

Only formats that cannot run code are read: `.npz` without pickled objects, and safetensors. A file
may be read without its values, for names, types and shapes: its tensors are then on `meta`.
"""

import io
import json
import re
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from vit_ray.models.catalog import LAYER_NORM_EPS
from vit_ray.models.fitting import (
    SPARE_PREFIXES,
    LoadReport,
    NewHead,
    Origin,
    Statistics,
    Tensors,
    check_fit,
    constant_bias,
    fit_state_dict,
    origin_of,
    with_our_inputs,
)
from vit_ray.models.masked import MaskedPatchObjective
from vit_ray.models.positions import ResizeMode, square_grid
from vit_ray.models.published import (
    ENCODER,
    FOLDER_CONFIG,
    FOLDER_WEIGHTS,
    HEAD_BIASES,
    detect_layout,
    folder_config,
    model_options,
    rules_for,
    settings_beside,
    statistics_beside,
    weights_file,
)
from vit_ray.models.vit import VisionTransformer
from vit_ray.storage import is_of_the_store, locate

Opener = Callable[[Path], IO[bytes]]
# Key in the metadata of safetensors files for the layout and origin that we write.
METADATA: Final = "vit_ray"


@dataclass(frozen=True)
class WeightFile:
    """Tensors of a file, under the names of its layout.

    Attributes:
        num_classes: outputs of its head; None if it has no head.
        inputs: statistics that normalise the model's inputs; None for [-1, 1].
    """

    source: str
    layout: str
    tensors: Tensors
    origin: Origin
    num_classes: int | None
    inputs: Statistics | None

    def load_into(
        self, model: nn.Module, new_head: NewHead = "auto", resize: ResizeMode = "bilinear"
    ) -> LoadReport:
        """As `load_weights`."""
        inner = model.model if isinstance(model, MaskedPatchObjective) else model
        source, tensors = f"{self.source} (layout {self.layout})", self.tensors
        if self.layout != "vit_ray":
            tensors = _our_tensors(inner, self.layout, tensors, source)
        if self.inputs is not None:
            tensors = with_our_inputs(tensors, inner, self.inputs, source)
            mean, std = self.inputs
            source += f"; its inputs' mean {mean} and std {std} are folded into the first layer"
        return fit_state_dict(
            model, tensors, new_head, resize=resize, origin=self.origin, source=source
        )


def load_weights(
    model: nn.Module,
    path: str | Path,
    layout: str = "auto",
    *,
    new_head: NewHead = "auto",
    resize: ResizeMode = "bilinear",
) -> LoadReport:
    """Load a published checkpoint into a model, in place.

    Args:
        model: from `build_model`; its resolution and head may differ from the file's.
        path: as in `read_weights`.
        layout: as in `read_weights`.
        new_head: as in `fit_state_dict`.
        resize: "bilinear" as the reference code, or "bicubic" as transformers.

    Raises:
        ValueError: if the file is incomplete, has tensors of another model, or is of a format that
            could run code; the tensors are listed.
    """
    return read_weights(path, layout).load_into(model, new_head, resize)


def read_weights(
    path: str | Path,
    layout: str = "auto",
    source: str | None = None,
    opener: Opener | None = None,
) -> WeightFile:
    """Read a published checkpoint.

    Args:
        path: `.npz` of the JAX layout, `.safetensors` of any other, or a folder that Hugging Face
            transformers wrote.
        layout: "jax", "timm", "huggingface", "vit_ray", or "auto": the layout that the file
            records, otherwise by its names.
        source: name of the file in reports and errors; by default the path.
        opener: None reads values; otherwise only names and shapes are read, those of an `.npz` file
            from the stream that this opens.

    Raises:
        ValueError: if the file is damaged, of an unknown layout, or of a format that could run
            code; or listing tensors of integers or fp8, which need the scales in other tensors.
    """
    path, source = Path(path), source or str(path)
    config = model_options(settings_beside(path, FOLDER_CONFIG))
    inputs = statistics_beside(path)
    tensors, recorded = read_tensors(path, source, opener)
    layout = recorded.get("layout", "auto") if layout == "auto" else layout
    if layout != "vit_ray":
        tensors = {re.sub(ENCODER, "", name): tensor for name, tensor in tensors.items()}
        layout = detect_layout(tensors) if layout == "auto" else layout
    if quantized := [
        f"{name} ({tensor.dtype})"
        for name, tensor in tensors.items()
        if not tensor.is_floating_point() or tensor.element_size() == 1
    ]:
        raise ValueError(
            f"weights {source} have quantized tensors, or other integers: {', '.join(quantized)}; "
            "give the weights in fp32, fp16 or bf16, and nothing else"
        )
    # Kernels of queries are (D, H, K).
    queries = [t for name, t in tensors.items() if name.endswith("/query/kernel") and t.dim() == 3]
    by_shape = {"num_heads": queries[0].shape[1]} if queries else {}
    num_classes = next((tensors[name].numel() for name in HEAD_BIASES if name in tensors), None)
    origin = {**recorded, **config, **by_shape, "head_bias": 0.0}
    return WeightFile(source, layout, tensors, origin, num_classes, inputs)


def read_tensors(
    path: Path, source: str, opener: Opener | None = None
) -> tuple[Tensors, dict[str, Any]]:
    """Tensors of a file or folder, and the metadata of `save_weights`; see `read_weights`."""
    path = path / FOLDER_WEIGHTS if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"weights {source} do not exist; give a .npz or .safetensors file")
    if path.suffix not in (".npz", ".safetensors"):
        raise ValueError(
            f"weights {source} end in {path.suffix!r}; only .npz and .safetensors are read, "
            "because other formats can run code; convert the file first"
        )
    try:
        return _read_npz(path, opener) if path.suffix == ".npz" else _read_safetensors(path, opener)
    except Exception as error:  # from zip, numpy, JSON and others, since the file may hold anything
        if isinstance(error, MemoryError) or is_of_the_store(error):
            raise
        raise ValueError(f"weights {source} cannot be read: {error}") from error


def _read_npz(path: Path, opener: Opener | None) -> tuple[Tensors, dict[str, Any]]:
    tensors: Tensors = {}
    with zipfile.ZipFile(path if opener is None else opener(path)) as archive:
        for name in archive.namelist():
            with archive.open(name) as member:
                if opener is None:
                    array = np.lib.format.read_array(member, allow_pickle=False)
                else:
                    np.lib.format.read_magic(member)
                    shape, _, dtype = np.lib.format.read_array_header_1_0(member)
                    array = np.broadcast_to(np.empty((), dtype), shape)  # takes no memory
            if array.dtype.kind not in "fiub":
                raise ValueError(f"{name} is of the type {array.dtype.str}, not of numbers")
            tensor = torch.from_numpy(array)
            tensors[name.removesuffix(".npy")] = tensor if opener is None else tensor.to("meta")
    return tensors, {}


def _read_safetensors(path: Path, opener: Opener | None) -> tuple[Tensors, dict[str, Any]]:
    tensors: Tensors = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            part = file.get_slice(name)
            if opener is None or not part.get_shape():
                tensors[name] = file.get_tensor(name)
            else:
                tensors[name] = part[:0].new_empty(part.get_shape(), device="meta")
        return tensors, json.loads((file.metadata() or {}).get(METADATA, "{}"))


def _our_tensors(model: nn.Module, layout: str, tensors: Tensors, source: str) -> Tensors:
    """Published tensors under our names and in our shapes.

    Those of `SPARE_PREFIXES` may be missing, and the last norm if the file has timm's `fc_norm`:
    `fit_state_dict` decides whether they are needed.

    Raises:
        ValueError: listing published names without a use, and missing ones.
    """
    ours, missing, unused = dict[str, Tensor](), list[str](), set(tensors)
    spare = (*SPARE_PREFIXES, "norm.") if "fc_norm.weight" in tensors else SPARE_PREFIXES
    for rule in rules_for(model, layout):
        parts = {name: tensors[name] for name in rule.published if name in tensors}
        unused.difference_update(parts)
        if len(parts) == len(rule.published):
            ours[rule.name] = rule.to_ours(list(parts.values()))
        elif parts or not rule.name.startswith(spare):
            missing += [name for name in rule.published if name not in parts]
    check_fit(source, model, {"unexpected": sorted(unused), "missing": missing})
    return ours


def save_weights(
    model: nn.Module, path: str | Path, layout: str = "jax", classes: Sequence[str] = ()
) -> None:
    """Write a model's weights in a published layout; the file appears complete or not at all.

    Args:
        model: from `build_model`, on any device.
        path: a file: `.npz` for "jax", otherwise `.safetensors`. A path without a suffix is a
            folder of `model.npz` or `model.safetensors`, and `config.json`; with "huggingface"
            `from_pretrained` reads it.
        layout: "jax", "timm", "huggingface", or "vit_ray" for our own names.
        classes: class names in the order of the logits, for the folder's `config.json`.

    Raises:
        ValueError: if the layout cannot express the model, or the suffix does not fit it.
    """
    path = Path(path)
    rules = rules_for(model, layout)
    _check_expressible(model, layout)
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    if nameless := sorted(set(state) - {rule.name for rule in rules}):
        raise ValueError(
            f"layout={layout!r} has no names for {', '.join(nameless)}; use layout='vit_ray'"
        )
    if bias := constant_bias(model):
        state["head.bias"] = state["head.bias"].float() + bias
    num_heads = model.size.num_heads if isinstance(model, VisionTransformer) else 1
    published: Tensors = {}
    for rule in rules:
        if rule.name in state:
            published |= rule.to_published(state[rule.name], num_heads)
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
    """Check that a file has the suffix of its layout's format.

    Raises:
        ValueError: it has another suffix; none at all is allowed.
    """
    suffix = ".npz" if layout == "jax" else ".safetensors"
    if path.suffix not in (suffix, ""):
        raise ValueError(
            f"layout={layout!r} is written to {suffix} files, not to {path}; change the suffix or "
            "the layout"
        )


def _check_expressible(model: nn.Module, layout: str) -> None:
    """Check for options that the tensors do not show: a reader would build another model.

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
        # Files of other layouts record the grid.
        f"positions of {rows} x {columns} patches, which would be read as a square": is_jax
        and read_as not in (None, model.grid)
        and len(model.positions) > 0,
        "pool='gap'": is_hub and options.pool == "gap",
        f"activation={options.activation!r}": is_jax and options.activation != "gelu_tanh",
        f"norm_eps={options.norm_eps:g}": not is_hub and options.norm_eps != LAYER_NORM_EPS,
        # The classifier of transformers leaves out its tanh layer, the pooler.
        "representation=true (ViTForImageClassification would give other logits without an error; "
        "'jax' and 'timm' keep it)": is_hub and options.representation,
        "positions='none'": is_hub and options.positions == "none",
    }
    for option, is_lost in lost.items():
        if is_lost:
            raise ValueError(f"layout={layout!r} cannot express {option}; use layout='vit_ray'")


def _encoded(tensors: Tensors, layout: str, facts: dict[str, Any]) -> bytes:
    if layout != "jax":
        return save(tensors, {"format": "pt", METADATA: json.dumps(facts)})
    # numpy has no bfloat16; float32 represents every such number.
    arrays = {n: t.float() if t.dtype == torch.bfloat16 else t for n, t in tensors.items()}
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **{name: t.numpy() for name, t in arrays.items()})
    return file.getvalue()
