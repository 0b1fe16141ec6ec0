"""Small collective operations on plain numbers and arrays, over torch's process group."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

# Bytes of one operation: enough for the links' full speed, and little compared with free memory.
GATHERED_BYTES: Final = 64 << 20


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


def all_rows(
    rows: np.ndarray, device: torch.device, *, most_bytes: int = GATHERED_BYTES
) -> np.ndarray:
    """Every rank's (n, ...) rows in one host array, in rank order, on every rank.

    n may differ between ranks; dtype and the other sizes may not.

    Args:
        most_bytes: limit for the rows of all ranks that a device holds at a time; at least a row of
            each rank is held.
    """
    num_rows = torch.tensor([len(rows)], dtype=torch.int64, device=device)
    counts = [int(count) for count in _gathered(num_rows)]
    all_ranks = np.empty((sum(counts), *rows.shape[1:]), rows.dtype)
    rows_by_rank = np.split(all_ranks, np.cumsum(counts)[:-1])  # views
    row_bytes = rows.dtype.itemsize * math.prod(rows.shape[1:])
    step = max(1, most_bytes // (row_bytes * len(counts)))
    for first in range(0, max(counts), step):
        # Every rank sends the same number of rows, with padding.
        piece = np.zeros((min(step, max(counts) - first), *rows.shape[1:]), rows.dtype)
        rows_to_send = rows[first : first + step]
        piece[: len(rows_to_send)] = rows_to_send
        parts = _gathered(torch.from_numpy(piece).to(device))
        for rows_of_rank, part in zip(rows_by_rank, parts, strict=True):
            target = rows_of_rank[first : first + step]
            target[:] = part[: len(target)].cpu().numpy()
    return all_ranks


def all_sum_array(array: NDArray[np.float64], device: torch.device) -> None:
    """Element-wise sum over ranks, in place; a device holds `GATHERED_BYTES` of it at a time."""
    flat = array.reshape(-1)
    for first in range(0, flat.size, GATHERED_BYTES // 8):
        part = flat[first : first + GATHERED_BYTES // 8]
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
