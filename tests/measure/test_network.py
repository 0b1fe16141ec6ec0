"""Collective operations against NCCL's published model and published runs of a larger ViT."""

import dataclasses

import pytest

from vit_ray.measure.memory import StateShape
from vit_ray.measure.network import ASSUMED, Network
from vit_ray.measure.step_time import Pace, traffic_per_step
from vit_ray.models.flops import forward_macs

GPUS = (8, 16, 32, 64, 128)


def test_two_servers_of_h100_lie_in_the_range_that_was_published() -> None:
    # nccl-tests of 2 x 8 H100 with 8 adapters of 400 Gbit/s each: 230 to 470 GB/s.
    assert 230 < ASSUMED.bus_gb_per_s(16) < 470


def test_the_adapters_of_a_server_carry_what_one_of_its_gpus_sends() -> None:
    # 100 Gbit/s for 8 GPUs are 12.5 GB/s for the ring, and not 1.6 for each GPU.
    slow = Network(link_gb_per_s=300.0, server_gb_per_s=12.5)
    assert slow.bus_gb_per_s(8) == pytest.approx(235)
    assert slow.bus_gb_per_s(16) == slow.bus_gb_per_s(512) == pytest.approx(12.5 * 120 / 128)
    assert slow.is_limited_by_adapters(16)
    assert not slow.is_limited_by_adapters(8)
    assert not ASSUMED.is_limited_by_adapters(16)
    single = Network(link_gb_per_s=32.0, server_gb_per_s=50.0, gpus_per_server=1)
    assert single.bus_gb_per_s(4) == pytest.approx(50 * 120 / 128)


@pytest.mark.parametrize(
    ("num_gpus", "sum_us", "ring_us"),
    # By NCCL's formulas. 16 in 2 servers: a tree of 2 (7 x 1.2 + 1 x 8.5) + 4.4, and a ring of
    # 14 x 1.9 + 1 x 4.0 + 10; 2 in one server: a tree of 2 x 1.2 + 4.4.
    [(2, 6.8, 11.9), (8, 21.2, 23.3), (16, 38.2, 40.6), (512, 123.2, 1113.2)],
)
def test_starts_grow_with_servers_as_nccl_says(
    num_gpus: int, sum_us: float, ring_us: float
) -> None:
    assert ASSUMED.start_s(num_gpus, is_sum=True) == pytest.approx(sum_us * 1e-6)
    assert ASSUMED.start_s(num_gpus, is_sum=False) == pytest.approx(ring_us * 1e-6)


def test_a_ring_of_two_servers_of_one_gpu_starts_sooner_than_a_tree() -> None:
    # 10 + 2 x 4.0 against 4.4 + 2 x 8.5.
    start_s = Network(32.0, 50.0, gpus_per_server=1).start_s(2, is_sum=True)
    assert start_s == pytest.approx(18e-6)


@pytest.mark.parametrize(
    ("images_per_s", "peak_flops", "network", "error"),
    [
        ((693, 1347, 2642, 5454, 10644), 312e12, Network(300.0, 200.0), 0.021),
        ((1428, 2846, 5737, 11222, 21561), 989e12, Network(450.0, 400.0), 0.051),
    ],
    ids=["A100", "H100"],
)
def test_two_points_of_nemo_predict_the_other_three(
    images_per_s: tuple[int, ...], peak_flops: float, network: Network, error: float
) -> None:
    # NVIDIA NeMo's ViT g/14, 64 images a GPU. The MFU and the share of communication that is not
    # hidden are fitted on one and two servers.
    model = {"depth": 40, "width": 1408, "mlp_dim": 6144, "num_heads": 16, "patch_size": 14}
    macs = 3 * forward_macs("ViT", 1000, 224, **model)
    shape = StateShape(1_011_000_000, 1, 8, "bf16", 8, has_average=False, offload=False)
    shape = dataclasses.replace(shape, largest_parameter=1408 * 6144)

    def sent_s(num_gpus: int) -> float:
        traffic = traffic_per_step(dataclasses.replace(shape, world_size=num_gpus), 1)
        pace = Pace(peak_flops, 0.4, network)
        return pace.step_time(macs, 64, traffic, num_gpus).communication_s

    step_s = [64 * n / rate for n, rate in zip(GPUS, images_per_s, strict=True)]
    unhidden = (step_s[1] - step_s[0]) / (sent_s(16) - sent_s(8))
    compute_s = step_s[0] - unhidden * sent_s(8)
    assert 0.3 < 2 * macs * 64 / peak_flops / compute_s < 0.5  # an MFU that is possible
    for num_gpus, rate in list(zip(GPUS, images_per_s, strict=True))[2:]:
        predicted = 64 * num_gpus / (compute_s + unhidden * sent_s(num_gpus))
        assert predicted == pytest.approx(rate, rel=error)
