"""What tests of lanes share."""

from collections.abc import Iterator

import pytest

from vit_ray.launch import lane


@pytest.fixture
def own_lanes() -> Iterator[None]:
    """Tests under Ray may have left lanes idle in this process; here are none."""
    token = lane._IDLE.set(None)
    yield
    lane._IDLE.reset(token)
