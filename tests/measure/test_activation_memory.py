"""Counting of live bytes against torch's own memory tracker, on real tensors."""

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F

from vit_ray.measure.memory import ActivationMemory, gpu_kernels, peak_bytes
from vit_ray.models import build_model
from vit_ray.models.build import recompute


def small_vit(recompute_every: int) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"depth": 4, "width": 64, "mlp_dim": 256, "num_heads": 4, "patch_size": 4}
    model = build_model("ViT", 10, 32, **sizes)
    recompute(model, recompute_every)
    return model


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("recompute_every", [0, 1, 2])
def test_the_peak_is_the_one_that_torchs_tracker_finds(recompute_every):
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


def test_gradients_of_weights_are_not_left_in_the_peak():
    wide = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
    images = torch.randn(1, 512)
    peak = peak_bytes(lambda: wide(images).sum(), list(wide.parameters()))
    one_gradient = 512 * 512 * 4
    assert one_gradient < peak < 2.5 * one_gradient
    assert all(p.grad is None for p in wide.parameters())
    wide(images).sum().backward()
    assert all(p.grad is not None for p in wide.parameters())


@pytest.mark.parametrize("recompute_every", [0, 2])
def test_sizes_on_the_meta_device_are_those_of_a_real_run(recompute_every):
    def measured(device: str) -> int:
        model = small_vit(recompute_every).to(device)
        images = torch.zeros(8, 3, 32, 32, device=device)
        return peak_bytes(lambda: model(images).sum(), list(model.parameters()))

    with gpu_kernels():
        peak = measured("meta")
    # The CPU's fused attention keeps the same tensors as a GPU's; its peak differs by temporaries.
    assert peak == pytest.approx(measured("cpu"), rel=0.03)


def test_dropout_keeps_one_byte_per_element_as_on_a_gpu():
    x = torch.empty(1000, device="meta", requires_grad=True)

    def added(p: float) -> int:
        with ActivationMemory([x]) as memory:
            output = F.dropout(x, p)
            return memory.current - 4 * len(output)

    assert added(0.1) >= 4000  # unfused: a float for each
    with gpu_kernels():
        assert added(0.1) == 1000
