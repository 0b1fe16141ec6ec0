"""Memory of the training state by the ZeRO paper and by hand, and live bytes by torch's tracker."""

import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F

from vit_ray.measure import memory
from vit_ray.measure.memory import GIB, ActivationMemory, StateShape, peak_bytes, state_memory
from vit_ray.models import build_model
from vit_ray.models.build import recompute

# Rajbhandari et al., Figure 1: 7.5 billion parameters on 64 devices, mixed precision, Adam.
PAPER = StateShape(7_500_000_000, 0, 64, "bf16", moment_bytes=8, has_average=False, offload=False)


def state_gb(shape: StateShape) -> float:
    found = state_memory(shape)
    return (found.weights + found.gradients + found.optimizer) * GIB / 1e9


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_state_is_that_of_figure_1_of_the_zero_paper(stage, gigabytes):
    shape = dataclasses.replace(PAPER, stage=stage)
    # Passes are summed in fp32, the paper's in bf16.
    extra_gb = 2 * 7.5 / (64 if stage >= 2 else 1)
    assert state_gb(shape) - extra_gb == pytest.approx(gigabytes, abs=0.06)
    averaged = state_memory(dataclasses.replace(shape, has_average=True))
    assert averaged.averages * GIB == pytest.approx(4 * 7.5e9 / 64)  # sharded under every stage


def test_precision_momentum_offloading_and_frozen_weights_change_the_state():
    assert state_gb(dataclasses.replace(PAPER, precision="fp32")) == pytest.approx(
        7.5 * (4 + 4 + 8)  # no second copy of the weights
    )
    with_masters = state_memory(dataclasses.replace(PAPER, precision="fp32", stage=1, world_size=1))
    assert with_masters.optimizer * GIB == pytest.approx(7.5e9 * (4 + 8))
    adam, sgd = (state_memory(dataclasses.replace(PAPER, moment_bytes=n)) for n in (8, 4))
    assert sgd.optimizer == pytest.approx(adam.optimizer * 2 / 3)
    away = state_memory(dataclasses.replace(PAPER, stage=2, offload=True, has_average=True))
    assert away.optimizer == away.averages == 0.0
    assert away.weights * GIB == 2 * 7.5e9
    frozen = state_memory(dataclasses.replace(PAPER, num_frozen=10**9))
    assert (frozen.total - state_memory(PAPER).total) * GIB == pytest.approx(2e9)


def test_buffers_of_the_step_reuse_the_room_of_the_activations():
    small = StateShape(100_000_000, 2, 1, "bf16", moment_bytes=8, has_average=False, offload=False)
    # fp32 gradients for the step: 400 MB. They need room of their own only beyond the activations
    # and the 101 MB of the backward pass: a bucket of 50.4 MB, and its copy.
    bucket = 2 * math.sqrt(100e6 * 72.2e-6 * 352.5e9 / 4)
    assert state_memory(small).buffers * GIB == pytest.approx(400e6)
    assert state_memory(small, 1_030_000_000).buffers * GIB == pytest.approx(2 * bucket)
    assert state_memory(small, 60_000_000).total == pytest.approx(state_memory(small).total)


def test_a_bucket_takes_the_largest_parameter_and_no_more_than_the_model():
    for num_parameters, largest, buckets in (
        (86_567_656, 2_359_296, 4),  # B/16
        (632_045_800, 6_553_600, 10),  # H/14
        (64_000_000, 1536 * 21_843, 2),  # one block, and the head of ImageNet-21k
        (100_000, 30_000, 1),
    ):
        bucket = memory.reduce_bucket(num_parameters, largest)
        assert math.ceil(num_parameters / bucket) == buckets
        assert largest <= bucket <= num_parameters


def small_vit(recompute_every: int) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"depth": 4, "width": 64, "mlp_dim": 256, "num_heads": 4, "patch_size": 4}
    model = build_model("ViT", 10, 32, **sizes)
    recompute(model, recompute_every)
    return model


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("recompute_every", [0, 2])
def test_the_peak_is_the_one_that_torchs_tracker_finds_and_that_of_the_meta_device(
    recompute_every,
):
    model, images = small_vit(recompute_every), torch.randn(8, 3, 32, 32)
    theirs = MemTracker()
    theirs.track_external(model)
    with theirs:
        model(images).sum().backward()
    snapshot = theirs.get_tracker_snapshot("peak")[torch.device("cpu")]
    weight_bytes = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    model.zero_grad(set_to_none=True)
    with ActivationMemory(model.parameters()) as ours:
        model(images).sum().backward()
    assert ours.peak == snapshot["Total"] - weight_bytes

    def planned(device: str) -> int:
        model = small_vit(recompute_every).to(device)
        images = torch.zeros(8, 3, 32, 32, device=device)
        return peak_bytes(lambda: model(images).sum(), list(model.parameters()))

    with memory.gpu_kernels():
        peak = planned("meta")
    # The CPU's fused attention keeps the same tensors as a GPU's; its peak differs by temporaries.
    assert peak == pytest.approx(planned("cpu"), rel=0.03)


def test_gradients_of_weights_are_not_left_in_the_peak():
    wide = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
    images = torch.randn(1, 512)
    peak = peak_bytes(lambda: wide(images).sum(), list(wide.parameters()))
    one_gradient = 512 * 512 * 4
    assert one_gradient < peak < 2.5 * one_gradient
    assert all(p.grad is None for p in wide.parameters())


def test_dropout_keeps_one_byte_per_element_as_on_a_gpu():
    x = torch.empty(1000, device="meta", requires_grad=True)
    with memory.gpu_kernels(), ActivationMemory([x]) as kept:
        output = F.dropout(x, 0.1)
        assert kept.current - 4 * len(output) == 1000  # unfused: a float for each
