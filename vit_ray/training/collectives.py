"""Small collective operations on plain numbers and arrays, over torch's process group."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

# Bytes of one operation: enough for the links' full speed, and little compared with free memory.
_SUMMED_BYTES: Final = 64 << 20


def all_sum(
    values: Sequence[float | torch.Tensor], device: torch.device, how: Any = dist.ReduceOp.SUM
) -> list[float]:
    """Element-wise sum over ranks, in float64, of numbers, or scalars on the device.

    Scalars on the device are combined there, so that the host synchronizes once.
    """
    numbers = [0.0 if isinstance(value, torch.Tensor) else float(value) for value in values]
    tensor = torch.tensor(numbers, dtype=torch.float64).to(device, non_blocking=True)
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            tensor[index] += value
    dist.all_reduce(tensor, op=how)
    return tensor.tolist()


def all_max(values: Sequence[float], device: torch.device) -> list[float]:
    """Element-wise maximum over ranks."""
    return all_sum(values, device, dist.ReduceOp.MAX)


def all_rows(rows: np.ndarray, device: torch.device) -> np.ndarray:
    """Every rank's (n, ...) rows in one host array, in rank order, on every rank.

    n may differ between ranks; dtype and the other sizes may not. The device holds all of them,
    padded to the largest n.
    """
    counts = [int(count) for count in _gathered(torch.tensor([len(rows)], device=device))]
    padded = np.zeros((max(1, *counts), *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    parts = _gathered(torch.from_numpy(padded).to(device))
    pairs = zip(parts, counts, strict=True)
    return np.concatenate([part[:count].cpu().numpy() for part, count in pairs])


def all_sum_array(array: NDArray[np.float64], device: torch.device) -> None:
    """Element-wise sum over ranks, in place; a device holds `_SUMMED_BYTES` of it at a time."""
    flat = array.reshape(-1)
    for first in range(0, flat.size, _SUMMED_BYTES // 8):
        part = flat[first : first + _SUMMED_BYTES // 8]
        tensor = torch.from_numpy(part.copy()).to(device)
        dist.all_reduce(tensor)
        part[:] = tensor.cpu().numpy()


def read_by_first(read: Callable[[], Any], device: torch.device) -> Any:
    """What `read` returns on rank 0, sent to every rank.

    Raises:
        ValueError: on every rank, if `read` raises `ValueError` or `OSError`.
    """
    message: list[Any] = [None, None]  # the result, and the text of an error
    if dist.get_rank() == 0:
        try:
            message[0] = read()
        except (ValueError, OSError) as error:
            message[1] = str(error)
    dist.broadcast_object_list(message, src=0, device=device)
    result, error_text = message
    if error_text is not None:
        raise ValueError(error_text)
    return result


def _gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return parts
