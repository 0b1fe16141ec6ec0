"""Traffic and time against the ZeRO paper's totals and the paper's published costs."""

import dataclasses

import pytest

from vit_ray.measure.devices import find_device
from vit_ray.measure.memory import StateShape
from vit_ray.measure.step_time import Pace, Traffic, traffic_per_step
from vit_ray.models.flops import forward_macs

SHAPE = StateShape(100_000_000, 0, 4, "bf16", moment_bytes=8, has_average=False, offload=False)
H200 = Pace(peak_flops=989e12, mfu=0.4)


def test_data_parallel_and_stage_3_move_what_the_zero_paper_says() -> None:
    # Section 7, in elements per worker for many workers: 2 for data parallelism, and 3 for stage 3
    # (two gathers and a reduce-scatter), of which DeepSpeed saves a gather for weights it keeps.
    many = dataclasses.replace(SHAPE, world_size=10**6)
    elements = 2.0 * 100_000_000
    assert traffic_per_step(many, 1).total / elements == pytest.approx(2.0, rel=1e-5)
    stage3 = dataclasses.replace(many, stage=3)
    assert traffic_per_step(stage3, 1).total / elements == pytest.approx(2.0, rel=1e-5)
    huge = dataclasses.replace(stage3, num_parameters=10**12)
    assert traffic_per_step(huge, 1).total / 2e12 == pytest.approx(3.0, rel=1e-3)


def test_four_workers_by_hand() -> None:
    # A ring of 4 sends 3/4 of the 200 MB for each half of an all-reduce.
    assert traffic_per_step(SHAPE, 1) == Traffic(300e6, 0.0)
    stage1 = dataclasses.replace(SHAPE, stage=1)
    assert traffic_per_step(stage1, 1) == Traffic(300e6, 150e6)
    stage2 = dataclasses.replace(SHAPE, stage=2)
    assert traffic_per_step(stage2, 3) == Traffic(900e6, 150e6)
    stage3 = dataclasses.replace(SHAPE, stage=3)
    assert traffic_per_step(stage3, 3) == Traffic(450e6, 450e6)


def test_a_lone_worker_sends_nothing() -> None:
    for stage in range(4):
        alone = dataclasses.replace(SHAPE, world_size=1, stage=stage)
        assert traffic_per_step(alone, 4).total == 0.0


@pytest.mark.parametrize(
    ("name", "images_per_s"),
    # 0.4 x 989 TFLOP/s over 26.5, 105.5, 92.4, 369 and 1004 GFLOP of training per image.
    [
        ("ViT-B/32", 14_900),
        ("ViT-B/16", 3_750),
        ("ViT-L/32", 4_280),
        ("ViT-L/16", 1_070),
        ("ViT-H/14", 394),
    ],
)
def test_images_per_second_follow_from_the_work_per_image(name: str, images_per_s: float) -> None:
    macs = forward_macs(name, 18_291, representation=True)
    assert 1000 / H200.step_s(3 * macs, 1000) == pytest.approx(images_per_s, rel=0.005)


def test_device_hours_of_the_largest_run_cross_check_with_the_papers_tpu_time() -> None:
    # Table 2: ViT-H/14 took 2,500 TPUv3-core-days for Table 6's 4262 exaFLOPs; a core's peak is
    # 61.5 TFLOP/s, so the paper ran at 32 % of it.
    tpu_core = Pace(peak_flops=61.5e12, mfu=0.32)
    assert tpu_core.device_hours(4262) / 24 == pytest.approx(2500, rel=0.01)


def test_the_pace_of_the_default_device_is_its_data_sheets() -> None:
    device = find_device("H200")
    assert device is not None
    assert device.bf16_flops == H200.peak_flops
