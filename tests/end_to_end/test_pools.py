"""Trainings one after another in a pool that stays open."""

import os
import threading
from pathlib import Path

import pytest
import ray
from ray.train.v2.api.config import RunConfig, ScalingConfig

from tests.conftest import Digits, Head
from tests.end_to_end.runs import same_weights, weights_of
from tests.recipes import small_recipe
from vit_ray.launch.pool import pool_keeper
from vit_ray.launch.pool.group_callbacks import OwnEnvironment
from vit_ray.launch.pool.pool_keeper import keeper, kept_pools
from vit_ray.launch.pool.pool_training import RunFailedError
from vit_ray.launch.pool.ray_policies import PolicedTrainer
from vit_ray.launch.pool.worker_pool import WorkerPool
from vit_ray.launch.run import train


@pytest.mark.slow
def test_a_warm_pool_trains_bit_equal_to_a_cold_one_also_after_a_run_that_failed(
    ray_cluster: Head, digits: Digits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone: list[WorkerPool] = []

    class CountedPool(WorkerPool):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)  # type: ignore[arg-type]
            alone.append(self)

    monkeypatch.setattr(pool_keeper, "WorkerPool", CountedPool)
    short = {"optim": {"steps": 8}, "checkpoint": {"every_steps": 4}}
    cold = small_recipe("cold", digits, tmp_path, **short)
    train(cold)
    assert [one.is_open for one in alone] == [False]  # nobody keeps it
    with kept_pools():
        train(small_recipe("first", digits, tmp_path, seed=3, train={"zero_stage": 3}, **short))
        before = ray.get(keeper().num_started.remote(), timeout=60)
        bad = small_recipe("bad", digits, tmp_path, optim={"steps": 8, "learning_rate": 1e30})
        with pytest.raises(RunFailedError, match="not finite"):
            train(bad)
        warm = small_recipe("warm", digits, tmp_path, **short)
        train(warm)
        # A run that all workers end together does not even cost its pool.
        assert ray.get(keeper().num_started.remote(), timeout=60) == before == 1
    assert same_weights(weights_of(cold), weights_of(warm))
    assert len(alone) == 1


@pytest.mark.slow
def test_pools_that_start_at_once_have_time_outs_of_their_own(
    ray_cluster: Head, tmp_path: Path
) -> None:
    key = "RAY_TRAIN_COLLECTIVE_TIMEOUT_S"

    def fit(timeout_s: str) -> None:
        def work() -> None:
            (tmp_path / f"seen-{timeout_s}").write_text(os.environ[key])

        PolicedTrainer(
            {},
            replaces=False,
            train_loop_per_worker=work,
            scaling_config=ScalingConfig(num_workers=1, resources_per_worker={"CPU": 0.1}),
            run_config=RunConfig(
                name=f"of-{timeout_s}",
                storage_path=str(tmp_path / "ray"),
                callbacks=[OwnEnvironment({key: timeout_s})],
            ),
        ).fit()

    threads = [threading.Thread(target=fit, args=(timeout_s,)) for timeout_s in ("31", "32")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [(tmp_path / f"seen-{one}").read_text() for one in ("31", "32")] == ["31", "32"]
    assert key not in os.environ
