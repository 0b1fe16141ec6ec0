"""Memory of the training state against the ZeRO paper's worked example and by hand."""

import dataclasses
import math

import pytest

from vit_ray.measure.memory import GIB, StateShape, state_memory

# Rajbhandari et al., Figure 1: 7.5 billion parameters on 64 devices, mixed precision, Adam.
PAPER = StateShape(7_500_000_000, 0, 64, "bf16", moment_bytes=8, has_average=False, offload=False)


def state_gb(shape: StateShape) -> float:
    memory = state_memory(shape)
    return (memory.weights + memory.gradients + memory.optimizer) * GIB / 1e9


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_state_is_that_of_figure_1_of_the_zero_paper(stage, gigabytes):
    shape = dataclasses.replace(PAPER, stage=stage)
    # Passes are summed in fp32, the paper's in bf16.
    extra_gb = 2 * 7.5 / (64 if stage >= 2 else 1)
    assert state_gb(shape) - extra_gb == pytest.approx(gigabytes, abs=0.06)


def test_fp32_without_zero_needs_no_second_copy_of_the_weights():
    shape = dataclasses.replace(PAPER, precision="fp32")
    assert state_gb(shape) == pytest.approx(7.5 * (4 + 4 + 8))


def test_momentum_alone_is_a_third_less_optimizer_state():
    adam = state_memory(PAPER).optimizer
    sgd = state_memory(dataclasses.replace(PAPER, moment_bytes=4)).optimizer
    assert sgd == pytest.approx(adam * 2 / 3)


def test_averages_are_sharded_under_every_stage():
    for stage in range(4):
        shape = dataclasses.replace(PAPER, stage=stage, has_average=True)
        assert state_memory(shape).averages * GIB == pytest.approx(4 * 7.5e9 / 64)


def test_offloading_leaves_only_weights_and_gradients_on_the_device():
    shape = dataclasses.replace(PAPER, stage=2, offload=True, has_average=True)
    memory = state_memory(shape)
    assert memory.optimizer == memory.averages == 0.0
    assert memory.weights * GIB == 2 * 7.5e9


def test_frozen_weights_cost_their_weights_only():
    frozen = state_memory(dataclasses.replace(PAPER, num_frozen=10**9))
    plain = state_memory(PAPER)
    assert (frozen.total - plain.total) * GIB == pytest.approx(2e9)


def test_buffers_of_the_step_reuse_the_room_of_the_activations():
    small = StateShape(100_000_000, 2, 1, "bf16", moment_bytes=8, has_average=False, offload=False)
    # fp32 gradients for the step: 400 MB. They need room of their own only beyond the activations
    # and the 101 MB of the backward pass: a bucket of 50.4 MB, and its copy.
    bucket = 2 * math.sqrt(100e6 * 72.2e-6 * 352.5e9 / 4)
    assert state_memory(small).buffers * GIB == pytest.approx(400e6)
    assert state_memory(small, 1_030_000_000).buffers * GIB == pytest.approx(2 * bucket)
    assert state_memory(small, 60_000_000).total * GIB == pytest.approx(
        state_memory(small).total * GIB
    )
