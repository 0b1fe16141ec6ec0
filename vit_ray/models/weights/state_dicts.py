"""Fitting a state dict of our own names into a model: another head, another resolution."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from vit_ray.models.masked import MaskedPatchObjective
from vit_ray.models.positions import ResizeMode, resize_line, resize_table, square_grid
from vit_ray.models.sizes import Grid
from vit_ray.models.weights.files import Origin, origin_of
from vit_ray.models.weights.name_maps import Tensors, describe

NewHead = bool | Literal["auto"]

NOT_TOLD = Origin()

# Names that a fresh head replaces: fine-tuning drops both linear layers (paper 3.2).
_HEAD_PREFIXES = ("head.", "representation.")
_POOL_PREFIX = "attention_pool."
# What a file may hold beyond the model: its head, and what another way of pooling needs.
SPARE_PREFIXES = (*_HEAD_PREFIXES, "class_token.", _POOL_PREFIX)
# Parts of `MaskedPatchObjective` around the model that it trains.
_OBJECTIVE_PREFIXES = ("mask.", "prediction.")


@dataclass
class LoadReport:
    """What became of every tensor of a file and of a model; prints as a short table.

    `loaded` are names of the model; `resized` adds the shapes; `new` kept their fresh values;
    `ignored` are names of the file that the model has no use for; `grids` are those (rows,
    columns) of tokens that the weights were trained at and that the model has; None where they are
    the same, or not known.
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

    The weights of a `MaskedPatchObjective` are those of the model inside it; as `model` it gets
    the state dict's mask token and prediction too, where these are for the same target.

    Args:
        model: filled in place.
        state_dict: names and tensors of a model of the same encoder.
        new_head: True keeps the model's fresh head, as fine-tuning does; False demands the state
            dict's, behind the same layers; "auto" loads it where it fits and stands behind the
            same layers. The representation layer, the class token and the pooling by attention are
            loaded where both have them: a model built without drops them, and the first and the
            last stay fresh in a model that adds them, unless the head behind them is demanded.
            Registers that are added stay fresh under True alone: the encoder has to learn them.
        resize: how positions are resampled to another grid.
        origin: what is known of the model that the state dict is of.
        source: what the report and errors call the state dict.

    Raises:
        ValueError: listing tensors that are missing, unexpected or of the wrong shape; or the model
            would be another function of the same tensors.
    """
    if isinstance(model, MaskedPatchObjective):
        report = fit_state_dict(
            model.model, state_dict, new_head, resize=resize, origin=origin, source=source
        )
        _fill_objective(model, state_dict, report)
        return report
    _check_origin(origin, model, source)
    state = _inner_model(state_dict)
    wanted = model.state_dict()
    fresh = _fresh_names(wanted, state, new_head)
    # A head that is demanded means nothing without the layers that it was trained behind.
    prefixes = () if new_head is False else SPARE_PREFIXES
    spare = {name for name in state if name not in wanted and name.startswith(prefixes)}
    torn = _torn_head(wanted, state) if new_head is not True else set()
    problems = Problems(source, model)
    problems.add("missing", [n for n in wanted if n not in state and (n not in fresh or n in torn)])
    problems.add("unexpected", [n for n in state if n not in wanted and n not in spare])
    positions = _Positions(model, "class_token.token" in state, resize, origin.grid)
    report = LoadReport(source, new=sorted(fresh))
    report.ignored = sorted(spare | (fresh & set(state)) | _outer_names(state_dict))
    fitted: Tensors = {}
    for name in [n for n in wanted if n not in fresh and n in state]:
        if not state[name].is_meta and not bool(state[name].isfinite().all()):
            problems.add("not finite", [name])
        fitted[name] = positions.fit(name, state[name], wanted[name].shape)
        before, after = _shape(state[name]), _shape(wanted[name])
        if fitted[name].shape != wanted[name].shape:
            problems.add("of another shape", [f"{name} is {before}, the model has {after}"])
        elif fitted[name] is state[name]:
            report.loaded.append(name)
        else:
            report.resized.append(f"{name} {before} to {after}")
    problems.raise_if_any()
    report.grids = positions.grids
    with torch.no_grad():
        for name, tensor in fitted.items():
            wanted[name].copy_(tensor)
    return report


def _check_origin(origin: Origin, model: nn.Module, source: str) -> None:
    """Refuse what would make another function of tensors of the same names and shapes.

    Raises:
        ValueError: telling what to build the model with.
    """
    own = origin_of(model)
    for name in ("num_heads", "positions_at", "positions"):
        there, here = getattr(origin, name), getattr(own, name)
        if there is not None and here is not None and there != here:
            raise ValueError(
                f"{source} is of a model with {name}={there}, and this one has {name}={here}; "
                f"build it with {name}={there}."
            )


def _fill_objective(model: MaskedPatchObjective, state_dict: Tensors, report: LoadReport) -> None:
    """Mask token and prediction of an objective, where the state dict has those of this target."""
    outer = {n: t for n, t in model.state_dict().items() if n.startswith(_OBJECTIVE_PREFIXES)}
    fits = all(n in state_dict and state_dict[n].shape == t.shape for n, t in outer.items())
    (report.loaded if fits else report.new).extend(outer)
    if fits:
        report.ignored = [name for name in report.ignored if name not in outer]
        with torch.no_grad():
            for name, tensor in outer.items():
                tensor.copy_(state_dict[name])


def _inner_model(state_dict: Tensors) -> Tensors:
    """The tensors of the model, where they are those of a masked-patch objective around it."""
    if not any(name.startswith("model.") for name in state_dict):
        return dict(state_dict)
    return {
        name.removeprefix("model."): tensor
        for name, tensor in state_dict.items()
        if not name.startswith(_OBJECTIVE_PREFIXES)
    }


def _outer_names(state_dict: Tensors) -> set[str]:
    """Names of a masked-patch objective that are not the model's."""
    is_objective = any(name.startswith("model.") for name in state_dict)
    return {name for name in state_dict if is_objective and name.startswith(_OBJECTIVE_PREFIXES)}


def _fresh_names(wanted: Tensors, state: Tensors, new_head: NewHead) -> set[str]:
    """Names of the head and what stands before it that keep the model's fresh values."""
    if new_head is False:
        return set()
    layers = ("representation.weight", "class_token.token", f"{_POOL_PREFIX}probe")
    has_same_layers = all((name in wanted) == (name in state) for name in layers)
    fresh = {n for n in wanted if n.startswith("representation.") and n not in state}
    if not any(name.startswith(_POOL_PREFIX) for name in state):
        fresh |= {name for name in wanted if name.startswith(_POOL_PREFIX)}
    if new_head is True:
        fresh |= {n for n in wanted if n.startswith("registers.") and n not in state}
    head = state.get("head.weight")
    fits = head is not None and head.shape == wanted["head.weight"].shape
    if new_head is True or not fits or not has_same_layers:
        fresh |= {name for name in wanted if name.startswith("head.")}
    return fresh


def _torn_head(wanted: Tensors, state: Tensors) -> set[str]:
    """What a head lacks that is there only in part: kernel without bias, or the reverse."""
    head = {name for name in wanted if name.startswith("head.")}
    return head - set(state) if head & set(state) else set()


class _Positions:
    """Fits tensors that depend on the resolution to that of a model; leaves others alone."""

    def __init__(
        self, model: nn.Module, has_class_row: bool, resize: ResizeMode, source_grid: Grid | None
    ) -> None:
        self.grid: Grid | None = getattr(model, "grid", None)
        self.has_class_row = has_class_row
        self.drops_class_row = has_class_row and getattr(model, "class_token", None) is None
        self.resize = resize
        self.source_grid = source_grid
        self.grids: tuple[Grid, Grid] | None = None
        self._note(source_grid)

    def _note(self, trained: Grid | None) -> None:
        if trained is not None and self.grid is not None and trained != self.grid:
            self.grids = (trained, self.grid)

    def fit(self, name: str, tensor: Tensor, shape: torch.Size) -> Tensor:
        """The very tensor where nothing has to change."""
        leaf = name.rpartition(".")[2]
        if name.startswith("positions.") and leaf == "table" and tensor.dim() == 3:
            return self._fit_table(name, tensor, shape)
        is_line = leaf in ("rows", "columns") or leaf.endswith("table")
        if is_line and tensor.dim() == 2 and tensor.shape[0] != shape[0]:
            return resize_line(tensor, shape[0])
        return tensor

    def _fit_table(self, name: str, table: Tensor, shape: torch.Size) -> Tensor:
        assert self.grid is not None
        if self.drops_class_row:
            table = table[:, 1:]
        if self.source_grid is None and table.shape[1] == shape[1]:
            return table
        num_patches = table.shape[1] - (self.has_class_row and not self.drops_class_row)
        old_grid = self.source_grid or square_grid(num_patches)
        if old_grid is None:
            raise ValueError(
                f"{name} has {num_patches} patches, which are not a square; "
                "give source_grid=(rows, columns) of the checkpoint, or its weights as a "
                ".safetensors file of ours, which tells its grid."
            )
        self._note(old_grid)
        return resize_table(table, old_grid, self.grid, self.resize)


class Problems:
    """Collects what does not fit, so that one error names all of it."""

    def __init__(self, source: str, model: nn.Module) -> None:
        self.source = source
        self.kind = describe(model)
        self.found: dict[str, list[str]] = {}

    def add(self, title: str, names: list[str]) -> None:
        if names:
            self.found.setdefault(title, []).extend(names)

    def raise_if_any(self) -> None:
        if not self.found:
            return
        lines = [f"  {title}: {', '.join(names)}" for title, names in self.found.items()]
        raise ValueError(
            f"{self.source} does not fit this {self.kind}:\n" + "\n".join(lines) + "\n"
            "Build the model by the name and options that the weights were trained with."
        )


def _shape(tensor: Tensor) -> str:
    return "x".join(str(side) for side in tensor.shape)
