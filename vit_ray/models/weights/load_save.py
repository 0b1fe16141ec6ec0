"""Loading and saving weights: our own state dicts, and the published layouts of `name_maps.py`.

Only formats that cannot run code are read: `.npz` without pickled objects, and safetensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from vit_ray.models.masked import MaskedPatchObjective
from vit_ray.models.positions import ResizeMode, square_grid
from vit_ray.models.sizes import LAYER_NORM_EPS, Grid
from vit_ray.models.vit import VisionTransformer
from vit_ray.models.weights.aliases import (
    canonical_names,
    detect_layout,
    without_training_state,
    without_wrappers,
)
from vit_ray.models.weights.files import Opener, Origin, read_tensors, write_tensors
from vit_ray.models.weights.folder_config import config_beside
from vit_ray.models.weights.input_statistics import (
    OURS,
    InputStatistics,
    statistics_beside,
    with_our_inputs,
)
from vit_ray.models.weights.name_maps import (
    HEAD_BIASES,
    SPARE_PREFIXES,
    Tensors,
    check_layout,
    rules_for,
)
from vit_ray.models.weights.published_models import differences_of
from vit_ray.models.weights.state_dicts import LoadReport, NewHead, check_fit, fit_state_dict


@dataclass(frozen=True)
class WeightFile:
    """Tensors of a file in a published layout, under its names.

    Attributes:
        beside: what the file holds of the training that made it; it is ignored.
        inputs: the statistics by which its inputs were normalised.
        config: of the folder that it is in.
    """

    source: str
    layout: str
    tensors: Tensors
    origin: Origin
    beside: tuple[str, ...] = ()
    inputs: InputStatistics = OURS
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def num_classes(self) -> int | None:
        """Classes of its head; None if it has no head."""
        renamed = canonical_names(self.tensors, self.layout)
        biases = (renamed[name] for name in HEAD_BIASES if name in renamed)
        return next((bias.numel() for bias in biases), None)

    def load_into(
        self,
        model: nn.Module,
        new_head: NewHead = "auto",
        *,
        resize: ResizeMode = "bilinear",
        source_grid: Grid | None = None,
    ) -> LoadReport:
        """As `load_weights`."""
        if isinstance(model, MaskedPatchObjective):
            model = model.model
        source = self.source
        if isinstance(model, VisionTransformer):
            try:
                different = differences_of(self.config, model.options)
            except ValueError as error:
                raise ValueError(f"weights {source} compute another function: {error}") from None
            if different:
                source += f", trained with {' and '.join(different)}"
        source += f" (layout {self.layout})"
        origin = replace(self.origin, grid=source_grid or self.origin.grid)
        model_grid = getattr(model, "grid", None)
        own = canonical_names(self.tensors, self.layout, origin.grid, model_grid)
        # timm's norm after the mean over tokens: it comes before a head that is replaced, so it is
        # dropped, too.
        is_left_out = new_head is True and isinstance(model, VisionTransformer)
        behind = sorted(name for name in own if is_left_out and name.startswith("fc_norm."))
        for name in behind:
            fresh = name.removeprefix("fc_")
            own[fresh] = model.get_parameter(fresh).detach().clone()
            del own[name]
        if self.layout != "vit_ray":
            own = _own_names(model, self.layout, own, source)
            table = own.get("positions.0.table")
            if origin.grid is None and table is not None:
                # Published positions are of square images if the file does not say otherwise.
                num_patches = table.shape[1] - ("class_token.token" in own)
                origin = replace(origin, grid=square_grid(num_patches))
        own = with_our_inputs(own, model, self.inputs, source)
        if not self.inputs.is_ours:
            source += f"; its inputs' {self.inputs} are folded into the first layer"
        report = fit_state_dict(model, own, new_head, resize=resize, origin=origin, source=source)
        report.loaded = [n for n in report.loaded if f"fc_{n}" not in behind]
        report.new += [name.removeprefix("fc_") for name in behind]
        report.ignored += [*behind, *self.beside]
        return report


def read_weights(
    path: str | Path,
    layout: str = "auto",
    source: str | None = None,
    opener: Opener | None = None,
) -> WeightFile:
    """Read a whole published checkpoint.

    Args:
        path: `.npz` of the JAX layout, `.safetensors` of any other, or a folder of Hugging Face.
        layout: "jax", "timm", "huggingface", "vit_ray", or "auto": as the file records, or else by
            its names.
        source: its name in reports and errors; by default the path.

    Raises:
        ValueError: if the file is broken, of no known layout, or of a format that could run code.
    """
    source = source or str(path)
    tensors, origin = read_tensors(Path(path), source, opener)
    tensors, beside = without_training_state(without_wrappers(tensors))
    if layout == "auto":
        layout = origin.layout or detect_layout(list(tensors))
    check_layout(layout)
    inputs, config = statistics_beside(Path(path)) or OURS, config_beside(Path(path))
    return WeightFile(source, layout, tensors, origin, tuple(beside), inputs, config)


def load_weights(
    model: nn.Module,
    path: str | Path,
    layout: str = "auto",
    *,
    new_head: NewHead = "auto",
    resize: ResizeMode = "bilinear",
    source_grid: Grid | None = None,
) -> LoadReport:
    """Load a published checkpoint into a model, in place.

    Args:
        model: from `build_model`; its resolution and head may differ from the file's.
        path: as in `read_weights`.
        layout: as in `read_weights`.
        new_head: as in `fit_state_dict`.
        resize: "bilinear" as the reference code, or "bicubic".
        source_grid: (rows, columns) of the file's positions if they are not of a square image.

    Raises:
        ValueError: if the file is incomplete, has tensors of another model, or is of a format that
            could run code; the tensors are listed.
    """
    return read_weights(path, layout).load_into(
        model, new_head, resize=resize, source_grid=source_grid
    )


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
    nameless = sorted(set(state) - {rule.own for rule in rules})
    if nameless:
        raise ValueError(
            f"layout={layout!r} has no names for {', '.join(nameless)}; use layout='vit_ray'"
        )
    num_heads = model.size.num_heads if isinstance(model, VisionTransformer) else 1
    published: Tensors = {}
    for rule in rules:
        if rule.own in state:
            parts = rule.to_published(state[rule.own], num_heads)
            published.update(zip(rule.published, parts, strict=True))
    write_tensors(path, published, layout, model, classes)


def _check_expressible(model: nn.Module, layout: str) -> None:
    """Options that do not show in the tensors: a reader of the layout would run another model.

    Raises:
        ValueError: if the model has an option that the layout cannot express.
    """
    if layout == "vit_ray" or not isinstance(model, VisionTransformer):
        return
    options, (rows, columns) = model.options, model.grid
    is_not_square = square_grid(rows * columns) not in (None, model.grid)
    is_hub = layout == "huggingface"
    lost = {
        f"positions={options.positions!r}": options.positions == "sincos_2d",
        "positions_at='every_layer_shared'": options.positions_at == "every_layer_shared",
        # Other files record it.
        f"positions of {rows} x {columns} patches, whose number is that of a square": layout
        == "jax"
        and is_not_square
        and len(model.positions) > 0,
        "pool='gap'": is_hub and options.pool == "gap",
        f"activation={options.activation!r}": layout == "jax" and options.activation != "gelu_tanh",
        f"norm_eps={options.norm_eps:g}": not is_hub and options.norm_eps != LAYER_NORM_EPS,
        # Its tanh layer, the pooler, is left out by transformers' classifier.
        "representation=true (ViTForImageClassification would give other logits without an error; "
        "'jax' and 'timm' keep it)": is_hub and options.representation,
        "positions='none'": is_hub and options.positions == "none",
    }
    for what, is_lost in lost.items():
        if is_lost:
            raise ValueError(f"layout={layout!r} cannot express {what}; use layout='vit_ray'")


def _own_names(model: nn.Module, layout: str, tensors: Tensors, source: str) -> Tensors:
    """Tensors under our names.

    Head, representation layer and class token may be missing here: `fit_state_dict` decides
    whether they are needed.

    Raises:
        ValueError: listing published names without a use, and missing ones.
    """
    own: Tensors = {}
    missing: list[str] = []
    unused = set(tensors)
    for rule in rules_for(model, layout):
        absent = [name for name in rule.published if name not in tensors]
        unused.difference_update(rule.published)
        if not absent:
            own[rule.own] = rule.to_own([tensors[name] for name in rule.published])
        elif len(absent) < len(rule.published) or not rule.own.startswith(SPARE_PREFIXES):
            missing += absent
    check_fit(source, model, {"unexpected": sorted(unused), "missing": missing})
    return own
