"""Time against the paper's published costs."""

import pytest

from vit_ray.measure.devices import Pace
from vit_ray.models.flops import forward_macs

H200 = Pace(peak_flops=989e12, mfu=0.4)


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
def test_images_per_second_follow_from_the_work_per_image(name, images_per_s):
    macs = forward_macs(name, 18_291, representation=True)
    assert 1000 / H200.step_s(3 * macs, 1000) == pytest.approx(images_per_s, rel=0.005)


def test_device_hours_of_the_largest_run_cross_check_with_the_papers_tpu_time():
    # Table 2: ViT-H/14 took 2,500 TPUv3-core-days for Table 6's 4262 exaFLOPs; a core's peak is
    # 61.5 TFLOP/s, so the paper ran at 32 % of it.
    tpu_core = Pace(peak_flops=61.5e12, mfu=0.32)
    assert tpu_core.device_hours(4262) / 24 == pytest.approx(2500, rel=0.01)
