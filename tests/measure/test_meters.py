"""Rates of FLOPs by hand: two for each multiply-add."""

import pytest

from vit_ray.measure.meters import Compute


def test_mfu_by_hand():
    # 30 million multiply-adds for each of 1,000 images per second, on a device of 1 TFLOP/s.
    rates = Compute(30_000_000, 1e12).rates(1000.0)
    assert rates["perf/model_tflops_per_gpu"] == pytest.approx(0.06)
    assert rates["perf/mfu"] == pytest.approx(0.06)


def test_without_a_known_peak_there_is_no_share_of_it():
    assert set(Compute(30_000_000).rates(10.0)) == {"perf/model_tflops_per_gpu"}
