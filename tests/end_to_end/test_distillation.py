"""A run that learns from a teacher, which it reads at every start."""

from pathlib import Path

import pytest
import torch

from tests.conftest import Digits
from tests.end_to_end.runs import curve
from tests.recipes import small_recipe
from tests.trained_runs import write_run
from vit_ray.checkpoints.run_checkpoints import newest_checkpoint
from vit_ray.launch.pool.pool_training import RunFailedError
from vit_ray.launch.run import train
from vit_ray.models import build_model
from vit_ray.storage import locate

pytestmark = pytest.mark.usefixtures("worker_pool")
SIZE = {"depth": 1, "width": 24, "mlp_dim": 32, "num_heads": 2, "patch_size": 4}


@pytest.mark.slow
def test_a_distilled_run_resumes_with_the_same_teacher_alone(digits: Digits, folder: Path) -> None:
    model = build_model("ViT", 10, 16, **SIZE)
    torch.nn.init.normal_(model.head.weight)  # type: ignore[union-attr,arg-type]
    told = {"name": "ViT", "image_size": 16, **SIZE}
    write_run(folder / "teacher", model, **told)
    recipe = small_recipe(
        "distilled",
        digits,
        folder,
        optim={"steps": 8},
        distill={"teacher": str(folder / "teacher"), "model": told, "kind": "features"},
    )
    result = train(recipe)
    assert result.is_complete
    losses = [
        [value for _, value in curve(recipe, result.run_id or "", f"train/{part}loss")]
        for part in ("", "label_", "teacher_")
    ]
    for whole, of_labels, of_teacher in zip(*losses, strict=True):
        # The parts are means over the steps since the line before.
        assert min(of_labels, of_teacher) * 0.5 < whole < max(of_labels, of_teacher) * 2
    first = newest_checkpoint(locate(recipe.run_folder))
    assert first is not None
    assert len(first.position.teacher_digest) == 16
    longer = recipe.with_changes(optim={"steps": 12})
    assert train(longer).is_complete
    with torch.no_grad():
        model.head.weight.mul_(2.0)  # type: ignore[union-attr,operator]
    write_run(folder / "other", model, **told)
    (folder / "teacher").rename(folder / "teacher before")
    (folder / "other").rename(folder / "teacher")
    with pytest.raises(RunFailedError, match="than the run was trained with"):
        train(recipe.with_changes(optim={"steps": 16}))
