"""Trainings one after another in a pool that stays open."""

from pathlib import Path

import pytest

from tests.conftest import Digits
from tests.end_to_end.runs import same_weights, weights_of
from tests.recipes import small_recipe
from vit_ray.launch import worker_pool as pool
from vit_ray.launch.pool_training import RunFailedError
from vit_ray.launch.run import train
from vit_ray.launch.worker_pool import WorkerPool, kept_pools


@pytest.mark.slow
def test_a_warm_pool_trains_bit_equal_to_a_cold_one_also_after_a_run_that_failed(
    digits: Digits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[WorkerPool] = []

    class CountedPool(WorkerPool):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)  # type: ignore[arg-type]
            started.append(self)

    monkeypatch.setattr(pool, "WorkerPool", CountedPool)
    short = {"optim": {"steps": 8}, "checkpoint": {"every_steps": 4}}
    cold = small_recipe("cold", digits, tmp_path, **short)
    train(cold)
    assert len(started) == 1
    assert not started[0].is_open  # nobody keeps it
    with kept_pools():
        train(small_recipe("first", digits, tmp_path, seed=3, train={"zero_stage": 3}, **short))
        bad = small_recipe("bad", digits, tmp_path, optim={"steps": 8, "learning_rate": 1e30})
        with pytest.raises(RunFailedError, match="not finite"):
            train(bad)
        warm = small_recipe("warm", digits, tmp_path, **short)
        train(warm)
        assert started[-1].is_open
    assert not started[-1].is_open
    assert same_weights(weights_of(cold), weights_of(warm))
    assert len(started) == 2  # a run that all workers end together does not even cost its pool
