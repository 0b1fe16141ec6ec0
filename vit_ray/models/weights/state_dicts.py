"""Fitting a state dict of our own names into a model: another head, another resolution."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from vit_ray.models.masked import MaskedPatchObjective
from vit_ray.models.positions import ResizeMode, resize_line, resize_table, square_grid
from vit_ray.models.sizes import Grid
from vit_ray.models.weights.files import Origin, origin_of
from vit_ray.models.weights.name_maps import SPARE_PREFIXES, Tensors, describe

NewHead = bool | Literal["auto"]

NOT_TOLD = Origin()

# Parts of the objective around the model that it trains.
_OBJECTIVE_PREFIXES = ("mask.", "prediction.")


@dataclass
class LoadReport:
    """What happened to every tensor of a file and of a model; prints as a short table.

    `loaded` are names of the model; `resized` adds the shapes; `new` kept their initial values;
    `ignored` are names of the file that the model does not need; `grids` are the (rows, columns) of
    tokens that the weights were trained at and that the model has; None if they are equal, or not
    known.
    """

    source: str
    loaded: list[str] = field(default_factory=list)
    resized: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    grids: tuple[Grid, Grid] | None = None

    def __str__(self) -> str:
        lines = [f"weights from {self.source}", f"  loaded   {len(self.loaded)} tensors"]
        for title in ("resized", "new", "ignored"):
            names: list[str] = getattr(self, title)
            lines.append(f"  {title:8} {', '.join(names) if names else 'none'}")
        return "\n".join(lines)


def fit_state_dict(
    model: nn.Module,
    state_dict: Tensors,
    new_head: NewHead = "auto",
    *,
    resize: ResizeMode = "bilinear",
    origin: Origin = NOT_TOLD,
    source: str = "a state dict",
) -> LoadReport:
    """Load a state dict of our own names into a model of another resolution or number of classes.

    The weights of an objective are those of the model inside it; as `model` it also gets the state
    dict's own layers of it, if these are for the same target.

    Args:
        model: filled in place.
        state_dict: names and tensors of a model of the same encoder.
        new_head: True keeps the model's new head, as fine-tuning does; False requires the state
            dict's head, after the same layers; "auto" loads it if it fits and comes after the same
            layers. The representation layer and the class token are loaded if both have them: a
            model built without them drops them, and the first stays new in a model that adds it,
            unless the head after it is required.
        resize: how positions are resampled to another grid.
        origin: what is known about the model of the state dict.
        source: name of the state dict in the report and in errors.

    Raises:
        ValueError: listing tensors that are missing, unexpected or of the wrong shape; or the model
            would compute another function of the same tensors.
    """
    if isinstance(model, MaskedPatchObjective):
        inner = model.model
        report = fit_state_dict(
            inner, state_dict, new_head, resize=resize, origin=origin, source=source
        )
        outer = {n: t for n, t in model.state_dict().items() if n.startswith(_OBJECTIVE_PREFIXES)}
        fits = all(n in state_dict and state_dict[n].shape == t.shape for n, t in outer.items())
        (report.loaded if fits else report.new).extend(outer)
        if fits:
            report.ignored = [name for name in report.ignored if name not in outer]
            _fill(outer, state_dict)
        return report
    own = origin_of(model)
    for name in ("num_heads", "positions_at", "positions", "activation", "norm_eps"):
        there, here = getattr(origin, name), getattr(own, name)
        if there is not None and here is not None and there != here:
            raise ValueError(
                f"{source} is of a model with {name}={there}, and this one has {name}={here}; "
                f"build it with {name}={there}"
            )
    is_objective = any(name.startswith("model.") for name in state_dict)
    of_objective = {n for n in state_dict if is_objective and n.startswith(_OBJECTIVE_PREFIXES)}
    state = {n.removeprefix("model."): t for n, t in state_dict.items() if n not in of_objective}
    wanted = model.state_dict()
    fresh = _fresh_names(wanted, state, new_head)
    # A required head means nothing without the layers that it was trained after.
    prefixes = () if new_head is False else SPARE_PREFIXES
    spare = {name for name in state if name not in wanted and name.startswith(prefixes)}
    # A kernel without its bias, or the reverse.
    head = {name for name in wanted if name.startswith("head.")}
    torn = head - set(state) if new_head is not True and head & set(state) else set()
    problems: dict[str, list[str]] = {
        "missing": [n for n in wanted if n not in state and (n not in fresh or n in torn)],
        "unexpected": [n for n in state if n not in wanted and n not in spare],
        "not finite": [],
        "of another shape": [],
    }
    report = LoadReport(source, new=sorted(fresh))
    report.ignored = sorted(spare | (fresh & set(state)) | of_objective)
    grid: Grid | None = getattr(model, "grid", None)
    has_class_row = "class_token.token" in state
    drops_class_row = has_class_row and getattr(model, "class_token", None) is None
    trained_at, fitted = origin.grid, dict[str, Tensor]()
    for name in [n for n in wanted if n not in fresh and n in state]:
        tensor, shape, leaf = state[name], wanted[name].shape, name.rpartition(".")[2]
        if not tensor.is_meta and not bool(tensor.isfinite().all()):
            problems["not finite"].append(name)
        if name.startswith("positions.") and leaf == "table" and tensor.dim() == 3:
            assert grid is not None
            tensor = tensor[:, 1:] if drops_class_row else tensor
            if origin.grid is not None or tensor.shape[1] != shape[1]:
                num_patches = tensor.shape[1] - (has_class_row and not drops_class_row)
                trained_at = origin.grid or square_grid(num_patches)
                if trained_at is None:
                    raise ValueError(
                        f"{name} has {num_patches} patches, which do not form a square; give "
                        "source_grid=(rows, columns) of the checkpoint, or its weights as a "
                        ".safetensors file of ours, which records its grid"
                    )
                tensor = resize_table(tensor, trained_at, grid, resize)
        elif leaf.endswith(("rows", "columns", "table")) and tensor.dim() == 2:
            tensor = tensor if len(tensor) == shape[0] else resize_line(tensor, shape[0])
        fitted[name] = tensor
        before, after = (
            "x".join(map(str, one)) or "a single number" for one in (state[name].shape, shape)
        )
        if tensor.shape != shape:
            problems["of another shape"].append(f"{name} is {before}, the model has {after}")
            if name == "head.weight" and tensor.dim() == len(shape) and len(tensor) != shape[0]:
                problems["of other classes"] = [f"{len(tensor)}, the model has {shape[0]}"]
        elif tensor is state[name]:
            report.loaded.append(name)
        else:
            report.resized.append(f"{name} {before} to {after}")
    check_fit(source, model, problems)
    if trained_at is not None and grid is not None and trained_at != grid:
        report.grids = (trained_at, grid)
    _fill(wanted, fitted)
    return report


def _fill(wanted: Tensors, given: Tensors) -> None:
    with torch.no_grad():
        for name, tensor in wanted.items():
            if name in given:
                tensor.copy_(given[name])


def _fresh_names(wanted: Tensors, state: Tensors, new_head: NewHead) -> set[str]:
    """Names of the head and the layers before it that keep the model's initial values."""
    if new_head is False:
        return set()
    layers = ("representation.weight", "class_token.token")
    has_same_layers = all((name in wanted) == (name in state) for name in layers)
    fresh = {n for n in wanted if n.startswith("representation.") and n not in state}
    head = state.get("head.weight")
    fits = head is not None and head.shape == wanted["head.weight"].shape
    if new_head is True or not fits or not has_same_layers:
        fresh |= {n for n in wanted if n.startswith("head.")}
    return fresh


def check_fit(source: str, model: nn.Module, problems: dict[str, list[str]]) -> None:
    """List all that does not fit in one error.

    Raises:
        ValueError: there are names under some title.
    """
    lines = [f"  {title}: {', '.join(names)}" for title, names in problems.items() if names]
    if lines:
        raise ValueError(
            f"{source} does not fit this {describe(model)}:\n" + "\n".join(lines) + "\n"
            "Build the model with the name and options that the weights were trained with"
        )
