"""Device figures by data sheets and torch's own table, and rates from them."""

import pytest
import torch
from torch._inductor.analysis.device_info import lookup_device_info

from vit_ray.measure.devices import find_device, peak_flops
from vit_ray.measure.meters import Compute


@pytest.mark.parametrize("name", ["NVIDIA H100", "NVIDIA A100"])
def test_figures_agree_with_the_table_that_torch_keeps(name):
    theirs, ours = lookup_device_info(name), find_device(name)
    dense = theirs.tops[torch.bfloat16] / theirs.tops_sparsity_factor * 1e12
    assert ours.bf16_flops == pytest.approx(dense, rel=0.002)  # 312 and 312.5 are both printed
    assert ours.fp32_flops == theirs.tops[torch.float32] * 1e12
    assert ours.memory_gib == theirs.dram_gb


@pytest.mark.parametrize(
    ("name", "sparse_bf16_tflops", "memory_gb"),
    # NVIDIA data sheets: H200 (2024), H100 SXM and NVL (2023).
    # GH200 (2023), A10G (AWS, 2022; PCIe has no figure of both ways); PCIe 4.0 x16 else. RTX from
    # the white papers of Ada, Ampere and Blackwell: tensor cores that add up in fp32.
    [
        ("H200", 1979, 141), ("H100", 1979, 80), ("H100 NVL", 1671, 94), ("GH200 480GB", 1979, 96),
        ("A10G", 140, 24), ("GeForce RTX 5090", 419, 32), ("GeForce RTX 4090", 330.3, 24),
        ("GeForce RTX 3090", 142, 24), ("RTX 6000 Ada Generation", 728.5, 48),
        ("RTX A6000", 309.7, 48),
    ],
)  # fmt: skip
def test_figures_are_the_data_sheets(name, sparse_bf16_tflops, memory_gb):
    device = find_device(f"NVIDIA {name}")
    assert device.bf16_flops / 1e12 == pytest.approx(sparse_bf16_tflops / 2, abs=0.6)
    assert 0.93 <= device.memory_gib / memory_gb <= 1.0  # GB and GiB are both sold as GB


@pytest.mark.parametrize(
    ("reported", "entry"),
    [
        ("NVIDIA H200", "H200"), ("NVIDIA H100 80GB HBM3", "H100"), ("h100", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"), ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"), ("Tesla V100-SXM2-32GB", "V100"),
        ("NVIDIA L40S", "L40S"), ("NVIDIA L4", "L4"), ("Tesla T4", "T4"),
    ],
)  # fmt: skip
def test_names_as_drivers_report_them_find_their_entry(reported, entry):
    assert find_device(reported) is find_device(entry) is not None


def test_the_peak_is_that_of_the_precision_and_none_of_a_name_that_only_contains_a_known_one():
    assert peak_flops("NVIDIA H200", "bf16") == 989e12
    assert peak_flops("NVIDIA H200", "fp32") == 67e12
    for name in ("NVIDIA GB200", "NVIDIA RTX A1000", "NVIDIA A100X", "cpu"):
        assert find_device(name) is peak_flops(name, "bf16") is None


def test_rates_are_those_of_the_work_per_image():
    # 30 million multiply-adds, of two FLOPs, for each of 1,000 images per second, on 1 TFLOP/s.
    rates = {"perf/model_tflops_per_gpu": 0.06, "perf/mfu": 0.06}
    assert Compute(30_000_000, 1e12).rates(1000.0) == pytest.approx(rates)
    assert set(Compute(30_000_000).rates(10.0)) == {"perf/model_tflops_per_gpu"}
