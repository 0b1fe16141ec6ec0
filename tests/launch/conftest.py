"""What tests of pools share."""

from collections.abc import Iterator

import pytest

from vit_ray.launch.pool import pool_keeper as pool


@pytest.fixture
def own_pools() -> Iterator[None]:
    """Tests under Ray may have left pools idle in this process; here are none."""
    token = pool._KEPT.set(None)
    yield
    pool._KEPT.reset(token)
