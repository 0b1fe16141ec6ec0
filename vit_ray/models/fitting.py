"""Loads a state dict into a model of another head or resolution, and reports every tensor."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from vit_ray.models.catalog import Grid
from vit_ray.models.masked import MaskedPatchObjective
from vit_ray.models.positions import ResizeMode, resize_line, resize_table, square_grid
from vit_ray.models.vit import PatchEmbedding, VisionTransformer

Tensors = dict[str, Tensor]
NewHead = bool | Literal["auto"]
# The known properties of a model that the names and shapes of its weights do not determine: `grid`
# (rows, columns) of its tokens, `num_heads`, and some of `VitOptions`. `head_bias` is the constant
# that is not in the head's bias; if missing, it is that of the model to fill.
Origin = Mapping[str, Any]

# Mean and deviation of each channel, with pixels in [0, 1]: inputs are (pixel - mean) / std.
Statistics = tuple[list[float], list[float]]

# Tensors of a file that the model may lack: the head (fine-tuning drops both linear layers, paper
# 3.2), the class token, and timm's norm of the mean over tokens (ours is of the tokens).
SPARE_PREFIXES = ("head.", "representation.", "class_token.", "fc_norm.")
# Settings that must be equal for the same function, and settings that all our models have.
_FUNCTION: Final = ("num_heads", "positions_at", "positions", "activation", "norm_eps")
_FIXED: Final = {"norm_layer": "layernorm", "pooler_act": "tanh"}
# Epsilons of layer norms up to torch's default count as equal.
_MAX_EPS: Final = 1e-5


@dataclass
class LoadReport:
    """What happened to every tensor of a file and of a model; prints as a short table.

    Attributes:
        loaded: names of the model's tensors.
        resized: names with the grids of positions, or the shapes.
        new: names of the model's tensors that kept their initial values.
        ignored: names of the file's tensors that the model does not need.
    """

    source: str
    loaded: list[str] = field(default_factory=list)
    resized: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"weights from {self.source}", f"  loaded   {len(self.loaded)} tensors"]
        for title in ("resized", "new", "ignored"):
            lines.append(f"  {title:8} {', '.join(getattr(self, title)) or 'none'}")
        return "\n".join(lines)


def fit_state_dict(
    model: nn.Module,
    state_dict: Tensors,
    new_head: NewHead = "auto",
    *,
    resize: ResizeMode = "bilinear",
    origin: Origin | None = None,
    source: str = "a state dict",
) -> LoadReport:
    """Load a state dict of our own names into a model of another resolution or number of classes.

    An objective's state dict loads into a model and the reverse. Into an objective, the layers
    around its model are loaded too, if they are for the same target.

    Args:
        model: filled in place.
        state_dict: names and tensors of a model of the same encoder.
        new_head: True keeps the model's new head, as fine-tuning does; False requires the state
            dict's head, after the same layers; "auto" loads it if it fits and comes after the same
            layers. The representation layer and the class token are loaded if both have them. A
            model without them drops them. A representation layer that only the model has stays new,
            unless the head is required; so does the last norm if the file has timm's `fc_norm`.
        resize: how tables of positions are resampled, as in `resize_table`.
        origin: known properties of the state dict's model; without a grid, its positions are of a
            square image.
        source: name of the state dict in the report and in errors.

    Raises:
        ValueError: listing tensors that are missing, unexpected, of the wrong shape, or not finite;
            or the model would compute another function of the same tensors.
    """
    inner = model.model if isinstance(model, MaskedPatchObjective) else model
    origin = origin or {}
    source += _other_settings(inner, origin, source)
    wanted = {name.removeprefix("model."): t for name, t in model.state_dict().items()}
    state = {name.removeprefix("model."): t for name, t in state_dict.items()}
    is_objective = inner is not model or any(name.startswith("model.") for name in state_dict)
    # Layers of an objective around the model that it trains.
    outer = ("mask.", "prediction.") if is_objective else ()
    fresh = _fresh_names(wanted, state, new_head, outer)
    # A required head is wrong without the layers before it.
    prefixes = outer if new_head is False else (*outer, *SPARE_PREFIXES)
    spare = {name for name in state if name not in wanted and name.startswith(prefixes)}
    problems: dict[str, list[str]] = {
        "missing": [name for name in wanted if name not in state and name not in fresh],
        "unexpected": [name for name in state if name not in wanted and name not in spare],
        "of another shape": [],
    }
    report = LoadReport(source, new=sorted(fresh), ignored=sorted(spare | (fresh & set(state))))
    fitted = {name: state[name] for name in wanted if name in state and name not in fresh}
    if broken := [n for n, t in fitted.items() if not t.is_meta and not bool(t.isfinite().all())]:
        raise ValueError(
            f"{source} has values that are not finite: {', '.join(broken)}; its training diverged "
            "or the file is damaged: use an earlier checkpoint, or fetch the file again"
        )
    shift = origin.get("head_bias", constant_bias(inner)) - constant_bias(inner)
    if shift and "head.bias" in fitted and not fitted["head.bias"].is_meta:
        fitted["head.bias"] = fitted["head.bias"].float() + shift
    grid, has_token = getattr(inner, "grid", None), "class_token.token" in state
    for name, tensor in fitted.items():
        shape = wanted[name].shape
        change = f"{_sides(tensor.shape)} to {_sides(shape)}"
        if grid and tensor.dim() == 3 and name.startswith("positions."):
            recorded = origin.get("grid") or _trained_grid(name, tensor, shape, grid, has_token)
            trained_grid = (recorded[0], recorded[1])  # it may be a list
            fitted[name] = _fitted_table(tensor, wanted[name], trained_grid, grid, resize)
            change = f"{_sides(trained_grid)} to {_sides(grid)}"
        elif name.endswith(("rows", "columns", "table")) and tensor.dim() == 2:
            fitted[name] = tensor if len(tensor) == shape[0] else resize_line(tensor, shape[0])
        if fitted[name].shape != shape:
            sizes = f"{name} is {_sides(tensor.shape)}, the model has {_sides(shape)}"
            problems["of another shape"].append(sizes)
            if name == "head.weight" and tensor.dim() == len(shape) and len(tensor) != shape[0]:
                problems["of other classes"] = [f"{len(tensor)}, the model has {shape[0]}"]
        elif fitted[name] is tensor:
            report.loaded.append(name)
        else:
            report.resized.append(f"{name} {change}")
    check_fit(source, inner, problems)
    with torch.no_grad():
        for name, tensor in fitted.items():
            wanted[name].copy_(tensor)
    return report


def _sides(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "a single number"


def _fresh_names(
    wanted: Tensors, state: Tensors, new_head: NewHead, outer: tuple[str, ...]
) -> set[str]:
    """Names of the model's tensors that keep their initial values."""
    fresh = {name for name in wanted if name.startswith(outer)}
    if all(name in state and state[name].shape == wanted[name].shape for name in fresh):
        fresh = set()
    if new_head is False:
        return fresh
    before = ("representation.weight", "class_token.token", "fc_norm.weight")
    has_same_layers = all((name in wanted) == (name in state) for name in before)
    is_behind_mean = "fc_norm.weight" in state and "norm.weight" not in state
    may_lack = ("representation.", "norm.") if is_behind_mean else ("representation.",)
    fresh |= {n for n in wanted if n.startswith(may_lack) and n not in state}
    head = {name for name in wanted if name.startswith("head.")}
    saved = head & state.keys()
    fits = has_same_layers and all(state[name].shape == wanted[name].shape for name in saved)
    # A saved kernel without its bias, or the reverse, does not count: the other is missing.
    if new_head is True or not saved or (saved == head and not fits):
        fresh |= head
    return fresh


def _trained_grid(
    name: str, table: Tensor, wanted: Sequence[int], grid: Grid, has_token: bool
) -> Grid:
    """The grid of a table without a record of it: of a square image, or equal to the model's.

    Raises:
        ValueError: it is neither.
    """
    rows = table.shape[1]
    same_grid = grid if table.shape == wanted else None
    trained_grid = square_grid(rows - has_token) or same_grid or square_grid(rows)
    if trained_grid is None:
        raise ValueError(
            f"{name} has {rows - has_token} patches, which do not form a square; give the weights "
            "as a .safetensors file of ours, which records its grid, or in a folder with a "
            "config.json"
        )
    return trained_grid


def _fitted_table(
    table: Tensor, wanted: Tensor, trained_grid: Grid, grid: Grid, resize: ResizeMode
) -> Tensor:
    """Positions at the model's grid, with a row for the class token if the model's table has one.

    The tables of some models of timm have none.
    """
    token_rows = table.shape[1] - math.prod(trained_grid)
    wanted_token_rows = wanted.shape[1] - math.prod(grid)
    if (token_rows, wanted_token_rows) == (0, 1):
        table = torch.cat([torch.zeros_like(table[:, :1]), table], dim=1)
    elif (token_rows, wanted_token_rows) == (1, 0):
        table = table[:, 1:]
    return resize_table(table, trained_grid, grid, resize)


def origin_of(model: nn.Module) -> Origin:
    """The origin of a model's state dict."""
    bias = {"head_bias": constant_bias(model)}
    if not isinstance(model, VisionTransformer):
        return bias
    settings = {**vars(model.options), "num_heads": model.size.num_heads}
    return {"grid": model.grid, **bias, **{name: settings[name] for name in _FUNCTION}}


def constant_bias(model: nn.Module) -> float:
    """The constant that a model adds to its head's bias; published files have the sum of both."""
    return float(getattr(getattr(model, "head", None), "constant_bias", 0.0))


def _other_settings(model: nn.Module, origin: Origin, source: str) -> str:
    """Text on settings of the training that differ slightly: exact GELU by 5e-4 at most.

    Raises:
        ValueError: the model would compute another function of the same tensors.
    """
    settings, different = {**origin_of(model), **_FIXED}, list[str]()
    for name in [*_FUNCTION, *_FIXED] if isinstance(model, VisionTransformer) else []:
        trained, ours = origin.get(name), settings[name]
        if trained in (None, ours):
            continue
        is_small = isinstance(trained, float) and 0 <= trained <= _MAX_EPS and ours <= _MAX_EPS
        if not is_small and {trained, ours} != {"gelu", "gelu_tanh"}:
            raise ValueError(
                f"{source} is of a model with {name}={trained}, and this one has {name}={ours}; "
                f"build it with {name}={trained}"
            )
        different.append(f"{name}={trained}")
    return f", trained with {' and '.join(different)}" if different else ""


def check_fit(source: str, model: nn.Module, problems: dict[str, list[str]]) -> None:
    """Report everything that does not fit in one error.

    Args:
        problems: names of tensors, by what is wrong with them.

    Raises:
        ValueError: there are such names.
    """
    if lines := [f"  {title}: {', '.join(names)}" for title, names in problems.items() if names]:
        raise ValueError(
            f"{source} does not fit this {type(model).__name__}:\n" + "\n".join(lines) + "\n"
            "Build the model with the name and options that the weights were trained with"
        )


def with_our_inputs(
    state: Tensors, model: nn.Module, statistics: Statistics, source: str
) -> Tensors:
    """Weights of the same function for inputs in [-1, 1]: the first kernel and bias change.

    Args:
        state: tensors by our names.
        statistics: mean and deviation that normalise the inputs of `state`.

    Raises:
        ValueError: the first layer pads its inputs, so no kernel has the same function.
    """
    if not isinstance(getattr(model, "embedding", None), PatchEmbedding):
        raise ValueError(
            f"{source} takes inputs normalised by mean {statistics[0]} and deviation "
            f"{statistics[1]}; models here take pixels in [-1, 1] (0.5 and 0.5), and only a ViT on "
            "patches of the image can be converted to that"
        )
    names = ("embedding.projection.weight", "embedding.projection.bias")
    old_kernel, old_bias = (state[name] for name in names)
    if old_kernel.is_meta:  # it has no values to change
        return state
    mean, std = (torch.tensor(values).double().view(1, 3, 1, 1) for values in statistics)
    # Our input x is the pixel 0.5 x + 0.5.
    shift = (old_kernel.double() * (0.5 - mean) / std).sum(dim=(1, 2, 3))
    kernel, bias = old_kernel.double() * (0.5 / std), old_bias.double() + shift
    return {**state, names[0]: kernel.to(old_kernel.dtype), names[1]: bias.to(old_bias.dtype)}
