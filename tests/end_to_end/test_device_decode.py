"""Training where the workers decode: what the host's decoding gives, by another way."""

from pathlib import Path

import pytest

from tests.conftest import Digits
from tests.data.converting import convert
from tests.data.pictures import write_class_folders
from tests.end_to_end.runs import curve
from tests.recipes import small_recipe
from vit_ray.launch.run import train


@pytest.mark.slow
@pytest.mark.usefixtures("worker_pool")
def test_jpeg_files_train_nearly_the_same(digits: Digits, tmp_path: Path) -> None:
    write_class_folders(tmp_path / "images", num_classes=3, per_class=60)
    convert(str(tmp_path / "images"), str(tmp_path / "set"), rows_per_row_group=16)
    losses = []
    for decode in ("host", "device"):
        recipe = small_recipe(
            decode, digits, tmp_path,
            data={"train": str(tmp_path / "set"), "eval": None, "decode": decode},
            optim={"steps": 4}, train={"log_every_steps": 1}, checkpoint={"every_steps": 4},
        )  # fmt: skip
        result = train(recipe)
        assert result.is_complete
        assert result.run_id is not None
        losses.append([value for _, value in curve(recipe, result.run_id)])
    assert len(losses[0]) == 4
    assert losses[0] != losses[1]  # the pixels are rounded otherwise
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
