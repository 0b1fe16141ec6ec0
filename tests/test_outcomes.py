"""A branch's origin as a text: what writes it and what reads it agree."""

import pytest

from vit_ray.outcomes import origin_of, own_share


def test_a_branch_counts_what_follows_the_step_at_which_it_began():
    # 100 steps of 32 images, of which the last 20 are the branch's.
    for name in ("study-a-data1-steps400", "a at step 7", "b at step 9 at step 1"):
        assert own_share(origin_of(name, 80), 32, 3200) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("origin", "batch", "images", "share"),
    [
        ("", 32, 3200, 1.0), ("", None, None, 1.0),  # from its own start
        # Not known well, or cut short before its own first step: nothing is counted twice.
        ("long at step 80", None, 3200, 0.0), ("long at step 80", 32, None, 0.0),
        ("long", 32, 3200, 0.0), ("long at step 7 or so", 32, 3200, 0.0),
        ("long at step 80", 32, 1600, 0.0),
    ],
)  # fmt: skip
def test_what_is_a_trainings_own(origin, batch, images, share):
    assert own_share(origin, batch, images) == share
