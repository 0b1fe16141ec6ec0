"""Whether a device computes what it should, before a training relies on it."""

import subprocess
from typing import Final

import torch

SIDE: Final = 2048
"""Large enough that every multiprocessor of a GPU has a part of the product."""
ASK_S: Final = 10.0
_NO_FAULT: Final = {
    # Since the driver was loaded or the GPU reset.
    "ecc.errors.uncorrected.volatile.total": ("0", "uncorrected memory errors (ECC)"),
    # What the driver asks for after an Xid error; R560 and later.
    "gpu_recovery_action": ("None", "recovery action that the driver asks for"),
}
"""What `nvidia-smi` shows of a sound GPU, and the meaning, by its name for it."""
_UNKNOWN: Final = ("", "N/A", "[N/A]", "[Not Supported]", "[Unknown Error]")


def computes_exactly(device: torch.device) -> bool:
    """Whether a product of small whole numbers is right, to the last bit.

    fp32, TF32 and bf16 hold the numbers, and fp32 the sums (below 2^17), without rounding. The host
    multiplies the product and the factors by the same vectors, which costs it little (Freivalds).
    """
    numbers = torch.arange(SIDE * SIDE, dtype=torch.int64).view(SIDE, SIDE)
    left, right = ((numbers * 7 % 13 - 6).float(), (numbers * 5 % 11 - 5).float())
    product = (left.to(device) @ right.to(device)).cpu().double()
    vectors = (numbers[:, :4] * 3 % 17 - 8).double()
    return torch.equal(product @ vectors, left.double() @ (right.double() @ vectors))


def driver_faults(gpu: str) -> list[str]:
    """What `nvidia-smi` reports of a GPU that may be damaged; none where it does not know.

    Args:
        gpu: UUID, as `nvidia-smi --id` takes it.
    """
    found = []
    for field, (sound, meaning) in _NO_FAULT.items():
        command = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={field}", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S)
        except (OSError, subprocess.TimeoutExpired):
            return []
        shown = done.stdout.strip()
        if done.returncode == 0 and shown not in (sound, *_UNKNOWN):
            found.append(f"{meaning}: {shown}")
    return found
