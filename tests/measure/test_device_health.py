"""A device that is off in one number, and what a driver of NVIDIA's may say."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from vit_ray.measure.device_health import SIDE, computes_exactly, driver_faults


class OneIsOff(TorchFunctionMode):
    """One number of a matrix product in fp32 has another last bit."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.matmul and result.dtype == torch.float32:
            result[SIDE // 3, SIDE // 2] += 1
        return result


def test_a_product_with_one_wrong_number_is_noticed() -> None:
    assert computes_exactly(torch.device("cpu"))
    with OneIsOff():
        assert not computes_exactly(torch.device("cpu"))


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a program of this name, which prints a line for each field or refuses it."""

    def write(ecc: str, recovery: str | None) -> None:
        unknown = 'echo "Field is not a valid field to query."; exit 2'
        script = f"""#!/bin/sh
case "$*" in
  "--id=GPU-7 --query-gpu=ecc"*" --format=csv,noheader") echo "{ecc}";;
  *gpu_recovery_action*) {f'echo "{recovery}"' if recovery else unknown};;
  *) exit 3;;
esac
"""
        program = tmp_path / "nvidia-smi"
        program.write_text(script)
        program.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return write


@pytest.mark.parametrize(
    ("ecc", "recovery", "expected"),
    [
        ("0", "None", []),
        ("[N/A]", None, []),  # without ECC, and an older driver
        ("3", "None", ["uncorrected memory errors (ECC): 3"]),
        ("0", "Reset", ["recovery action that the driver asks for: Reset"]),
    ],
)
def test_what_the_driver_reports_of_a_gpu_is_passed_on(
    nvidia_smi: Any, ecc: str, recovery: str | None, expected: list[str]
) -> None:
    nvidia_smi(ecc, recovery)
    assert driver_faults("GPU-7") == expected


def test_without_nvidia_smi_nothing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver_faults("GPU-7") == []
