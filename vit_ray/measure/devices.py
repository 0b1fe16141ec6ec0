"""Dense peak rates and memory of GPUs, from their data sheets."""

import re
from dataclasses import dataclass

DAY_S = 86_400.0


@dataclass(frozen=True)
class Device:
    """One accelerator.

    Attributes:
        bf16_flops: dense bf16 FLOP/s, without sparsity.
        fp32_flops: fp32 FLOP/s as torch runs it by default (TF32 off).
        memory_gib: device memory.
    """

    bf16_flops: float
    fp32_flops: float
    memory_gib: float

    def peak_flops(self, precision: str) -> float:
        """Dense FLOP/s in "bf16" or "fp32"."""
        return self.bf16_flops if precision == "bf16" else self.fp32_flops


# Words in the name that the driver reports -> figures from NVIDIA's data sheets; of SXM variants
# where the words do not say. The first entry whose words occur in a name counts. B200: per GPU of
# the HGX B200.
_DEVICES = {
    "B200": Device(2250e12, 75e12, 180),
    "H200": Device(989e12, 67e12, 141e9 / 2**30),
    "H100 PCIe": Device(756e12, 51e12, 80),
    "H100 NVL": Device(835e12, 60e12, 94),
    # The GPU of a GH200 with 96 GB; the 480 GB in its name are the processor's memory.
    "GH200": Device(989e12, 67e12, 96),
    "H100": Device(989e12, 67e12, 80),
    "A100-SXM4-40GB": Device(312e12, 19.5e12, 40),
    "A100-PCIE-40GB": Device(312e12, 19.5e12, 40),
    "A100 80GB PCIe": Device(312e12, 19.5e12, 80),
    "A100": Device(312e12, 19.5e12, 80),
    "L40S": Device(362e12, 91.6e12, 48),
    "L4": Device(121e12, 30.3e12, 24),
    # Dense bf16 with sums in fp32.
    "RTX 5090": Device(209.5e12, 104.8e12, 32),
    "RTX 6000 Ada": Device(364.2e12, 91.1e12, 48),
    "RTX 4090": Device(165.2e12, 82.6e12, 24),
    "RTX A6000": Device(154.8e12, 38.7e12, 48),
    "RTX 3090": Device(71e12, 35.6e12, 24),
    "A10G": Device(70e12, 35e12, 24),
    "A10": Device(125e12, 31.2e12, 24),
    "V100-SXM2-16GB": Device(15.7e12, 15.7e12, 16),
    "V100": Device(15.7e12, 15.7e12, 32),
    "T4": Device(8.1e12, 8.1e12, 16),
}


def require_device(name: str, key: str) -> Device:
    """
    Raises:
        ValueError: the device that a recipe's key names is not listed.
    """
    if device := find_device(name):
        return device
    raise ValueError(f"{key}={name!r} is not known; use one of {', '.join(_DEVICES)}")


def find_device(name: str) -> Device | None:
    """Figures for a device name such as "NVIDIA H200" or "h200", or None if it is not listed.

    Only whole words count: a GH200 is no H200, and an A1000 no A100.
    """
    matches = (words for words in _DEVICES if re.search(rf"\b{words}\b", name, re.IGNORECASE))
    return _DEVICES.get(next(matches, ""))


def peak_flops(name: str, precision: str) -> float | None:
    """Dense peak in FLOP/s for "bf16" or "fp32", or None if the device is not listed."""
    device = find_device(name)
    return device.peak_flops(precision) if device else None
