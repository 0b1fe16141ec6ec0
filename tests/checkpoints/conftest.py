"""Folders of runs."""

from pathlib import Path

import pytest

from vit_ray.storage import Location, locate


@pytest.fixture
def run(tmp_path: Path) -> Location:
    return locate(str(tmp_path / "run"))
