"""The running average of weights against TensorFlow's formula, step by step."""

import pytest
import torch

from vit_ray.training.training_state import Fragment, WeightAverage


def average_of(
    values: list[float], factor: float, *, warms_up: bool, refused: tuple[int, ...] = ()
) -> float:
    """Of one weight that starts at 1 and has these values after its steps."""
    weight = torch.ones(1)
    fragment = Fragment("weight", 0, weight, weight, 0)
    average = WeightAverage([fragment], factor, warms_up=warms_up)
    applied = 0
    for step, value in enumerate(values):
        is_refused = step in refused
        applied += not is_refused
        fragment.weight.fill_(value)
        average.update(torch.tensor(float(is_refused)), torch.tensor(float(applied)))
    return average.values[0].item()


def tensorflow_average(values: list[float], factor: float) -> float:
    """`tf.train.ExponentialMovingAverage` with `num_updates`, as its documentation writes it."""
    average = 1.0
    for num_updates, value in enumerate(values, start=1):
        decay = min(factor, (1 + num_updates) / (10 + num_updates))
        average = decay * average + (1 - decay) * value
    return average


def test_a_warmed_up_average_is_tensorflows():
    values = [float(step % 7) for step in range(300)]
    for factor in (0.5, 0.9, 0.9999):
        expected = pytest.approx(tensorflow_average(values, factor), rel=1e-5)
        assert average_of(values, factor, warms_up=True) == expected


def test_the_papers_average_has_one_factor():
    # 0.9999^500 of the first weight, which is 1; all others are 0.
    assert average_of([0.0] * 500, 0.9999, warms_up=False) == pytest.approx(0.9512, abs=1e-4)
    assert average_of([0.0] * 500, 0.9999, warms_up=True) < 1e-9


def test_a_refused_step_moves_neither_the_average_nor_its_warm_up():
    with_refused = average_of([0.0, 5.0, 2.0], 0.9999, warms_up=True, refused=(1,))
    assert with_refused == average_of([0.0, 2.0], 0.9999, warms_up=True)
