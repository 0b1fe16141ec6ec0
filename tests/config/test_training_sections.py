"""When something is due."""

import pytest

from vit_ray.config.training_sections import is_due


@pytest.mark.parametrize(
    ("every", "also", "due"),
    [(None, (), []), (3, (), [3, 6, 9]), (1, (), list(range(1, 10))), (4, (5,), [4, 5, 8])],
)
def test_steps_at_which_it_is_due(every, also, due):
    assert [step for step in range(1, 10) if is_due(step, every, also)] == due
