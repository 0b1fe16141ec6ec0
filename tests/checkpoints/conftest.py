"""Folders of runs."""

from pathlib import Path

import pytest

from vit_ray.checkpoints import run_checkpoints
from vit_ray.storage import Location, locate


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that is not whole is read again at once."""
    monkeypatch.setattr(run_checkpoints, "READ_AGAIN_S", 0.0)


@pytest.fixture
def run(tmp_path: Path) -> Location:
    return locate(str(tmp_path / "run"))
