"""A run of a small model as its training would have left it: a recipe, and a sharded checkpoint."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tests.checkpoints.written import snapshot_of, write_snapshots
from tests.models.small import TINY_VIT
from tests.recipes import recipe_with
from vit_ray.checkpoints.checkpoint import Position, Progress, folder_name
from vit_ray.config import Recipe
from vit_ray.storage import locate


def tiny_recipe(folder: Path, **sections: Any) -> Recipe:
    """A recipe for the small ViT that keeps everything inside the folder."""
    model = {"name": "ViT", "image_size": 32, **TINY_VIT}
    tracking = {"uri": f"sqlite:///{folder}/mlflow.db"}
    defaults = {"output": str(folder / "runs"), "model": model, "tracking": tracking}
    return recipe_with("small", **{**defaults, **sections})


def write_run(
    folder: Path,
    model: nn.Module,
    average: nn.Module | None = None,
    facts: dict[str, Any] | None = None,
    **told: Any,
) -> str:
    """A run whose one checkpoint was sharded over two ranks, each with half of every tensor.

    Its recipe has a model only where its keys are `told`; `facts` are of its `Position`.
    """
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    known: dict[str, Any] = {
        "progress": Progress(step=7), "applied_steps": 7, "samples_seen": 14,
        "global_batch_size": 2, "data_fingerprint": "",
        "shapes": {name: list(tensor.shape) for name, tensor in trained.items()},
        "recipe": {"model": told} if told else {},
    }  # fmt: skip
    position = Position(**{**known, **(facts or {})})
    kinds = {"weight": trained}
    if average is not None:
        kinds["average"] = {n: p.detach() for n, p in average.named_parameters()}
    snapshots = []
    for rank in (0, 1):
        shards: dict[str, Tensor] = {}
        for kind, tensors in kinds.items():
            for name, tensor in tensors.items():
                flat, cut = tensor.flatten(), tensor.numel() // 2
                start, part = ((0, flat[:cut]), (cut, flat[cut:]))[rank]
                shards[f"{kind}|{name}|{start}"] = part.clone()
        snapshots.append(snapshot_of(rank, 2, shards, position))
    write_snapshots(locate(str(folder)).child(folder_name(7)), *snapshots)
    return str(folder)
