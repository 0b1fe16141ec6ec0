"""Trials side by side, for which each image is decoded once: as exact as one after another."""

from pathlib import Path

import pytest
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list

from tests.conftest import Digits
from tests.end_to_end.runs import curve, same_weights, weights_of
from tests.recipes import small_recipe
from vit_ray import trust_modules
from vit_ray.experiments.sweep import SweepResult, run_sweep

STEPS = 16
BATCH = 64
RATES = [0.1, 0.05]
COUNTED = b"counted/"
WAIT = "tests.parts.wait_for_another"
"""Else the first would have ended before the workers of the second are there."""


def swept(
    name: str, digits: Digits, folder: Path, at_once: int, *callbacks: str
) -> tuple[SweepResult, int]:
    """A sweep of two rates with one retraining, and how many training crops were made for it."""
    recipe = small_recipe(
        name, digits, folder,
        optim={"name": "sgd", "steps": STEPS, "warmup_steps": 0, "weight_decay": 0.0},
        data={"augment": {"min_area": 0.5, "own": "tests.parts.counted"}},
        train={"averaging": 0.0, "log_every_steps": 4, "callbacks": callbacks},
        checkpoint={"every_steps": 4},
        workers={"num_workers": 1},
        sweep={"learning_rates": RATES, "dev_fraction": 0.1, "seeds": 1, "max_concurrent": at_once},
    )  # fmt: skip
    for key in (*_internal_kv_list(COUNTED), *_internal_kv_list(b"begun/")):
        _internal_kv_del(key)
    result = run_sweep(recipe)
    assert result is not None
    assert [row.state for row in result.rows] == ["finished"] * 2
    return result, len(_internal_kv_list(COUNTED))


@pytest.mark.slow
def test_trials_side_by_side_share_their_decoding_and_are_those_that_each_is_alone(
    worker_pool: None, digits: Digits, tmp_path: Path
) -> None:
    trust_modules("tests.parts")
    alone, made_alone = swept("alone", digits, tmp_path, 1)
    # A few more are made for the picture of a batch.
    assert made_alone == pytest.approx(3 * STEPS * BATCH, rel=0.01)
    together, made_together = swept("together", digits, tmp_path, 2, WAIT)
    assert made_together == pytest.approx(2 * STEPS * BATCH, rel=0.01)
    # A worker is killed halfway: its trial continues from the checkpoint with its own stream.
    _, made_killed = swept("killed", digits, tmp_path, 2, WAIT, "tests.parts.die_once")
    assert _internal_kv_get(b"died_once") is not None
    assert made_together + BATCH < made_killed < made_alone
    for rate in RATES:
        first = small_recipe(f"alone-lr{rate:g}", digits, tmp_path)
        for name in ("together", "killed"):
            other = small_recipe(f"{name}-lr{rate:g}", digits, tmp_path)
            assert same_weights(weights_of(other), weights_of(first))
    for row, other_row in zip(alone.rows, together.rows, strict=True):
        recipe = small_recipe("any", digits, tmp_path)
        losses = curve(recipe, row.run_id or "")
        assert len(losses) >= STEPS // 4
        assert losses == curve(recipe, other_row.run_id or "")
