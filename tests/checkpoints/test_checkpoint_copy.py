"""A checkpoint that another run takes over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.checkpoints.written import SHAPES, flip, position, values, write_checkpoint
from vit_ray.checkpoints.checkpoint import Position, copy_checkpoint, folder_name
from vit_ray.checkpoints.checkpoint_format import DamagedCheckpointError, is_committed
from vit_ray.checkpoints.run_checkpoints import newest_verified_checkpoint
from vit_ray.storage import Location, locate


@pytest.fixture
def source(tmp_path: Path) -> Location:
    return write_checkpoint(locate(str(tmp_path / "long")), 3)


def renamed(it: Position) -> Position:
    return replace(it, recipe={"name": "short"}, tracking_run_id="2")


def test_the_copy_has_every_byte_of_the_tensors_and_the_position_that_it_is_given(
    source: Location, run: Location
) -> None:
    copy_checkpoint(source, run.child(folder_name(3)), renamed)
    found = newest_verified_checkpoint(run)
    assert found is not None
    assert found.position == renamed(position(3))
    weights = found.weights()
    assert all(torch.equal(weights[k], values(3)[k].view(SHAPES[k])) for k in SHAPES)


def test_what_is_damaged_is_not_copied(source: Location, run: Location) -> None:
    flip(source, "rank-00001-of-00002.safetensors")
    with pytest.raises(DamagedCheckpointError):
        copy_checkpoint(source, run.child(folder_name(3)), renamed)
    assert not is_committed(run.child(folder_name(3)))
