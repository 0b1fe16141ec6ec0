"""Two jobs at once on one cluster."""

import pytest

from tests.end_to_end.runs import (
    Driver,
    constant_recipe,
    same_weights,
    weights_of,
    write_recipe,
)
from vit_ray import trust_modules


@pytest.mark.slow
def test_two_jobs_train_at_once_and_each_as_if_alone(ray_cluster, straight, digits, tmp_path):
    trust_modules("tests.parts")
    train = {"callbacks": ["tests.parts.wait_for_two_jobs"]}
    recipes = [constant_recipe(name, digits, tmp_path, train=train) for name in ("one", "other")]
    drivers = [Driver(ray_cluster, "pretrain", str(write_recipe(one, tmp_path))) for one in recipes]
    for driver in drivers:
        code, output = driver.wait()
        assert code == 0, output
    alone, _ = straight
    for recipe in recipes:
        assert same_weights(weights_of(recipe), weights_of(alone))
