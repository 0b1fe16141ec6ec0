"""Small collective operations on plain numbers and arrays, over torch's process group."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

# Large enough for the links' full speed, and small compared with the memory that training leaves
# free.
GATHERED_BYTES: Final = 64 << 20


def all_sum(
    values: Sequence[float | torch.Tensor], device: torch.device, how: Any = dist.ReduceOp.SUM
) -> list[float]:
    """Element-wise sum over ranks, computed in float64; numbers, or scalars on the device.

    Scalars on the device are combined there, so that the host synchronizes once.
    """
    known = [0.0 if isinstance(value, torch.Tensor) else float(value) for value in values]
    tensor = torch.tensor(known, dtype=torch.float64).to(device, non_blocking=True)
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
        most_bytes: most that a device holds of them at a time, from all ranks together; at least a
            row of each.
    """
    mine = torch.tensor([len(rows)], dtype=torch.int64, device=device)
    counts = [int(count) for count in _gathered(mine)]
    all_ranks = np.empty((sum(counts), *rows.shape[1:]), rows.dtype)
    rows_by_rank = np.split(all_ranks, np.cumsum(counts)[:-1])  # views
    row_bytes = rows.dtype.itemsize * math.prod(rows.shape[1:])
    step = max(1, most_bytes // (row_bytes * len(counts)))
    for first in range(0, max(counts), step):
        # All ranks take part in every turn with the same number of rows, the last turn padded.
        piece = np.zeros((min(step, max(counts) - first), *rows.shape[1:]), rows.dtype)
        own = rows[first : first + step]
        piece[: len(own)] = own
        parts = _gathered(torch.from_numpy(piece).to(device))
        for target, part in zip(rows_by_rank, parts, strict=True):
            now = target[first : first + step]
            now[:] = part[: len(now)].cpu().numpy()
    return all_ranks


def all_sum_array(array: NDArray[np.float64], device: torch.device) -> None:
    """Element-wise sum over ranks, in place; a device holds a part of it at a time."""
    flat = array.reshape(-1)
    for first in range(0, flat.size, GATHERED_BYTES // 8):
        part = flat[first : first + GATHERED_BYTES // 8]
        tensor = torch.from_numpy(part.copy()).to(device)
        dist.all_reduce(tensor)
        part[:] = tensor.cpu().numpy()


def read_by_first(read: Callable[[], Any], device: torch.device) -> Any:
    """What `read` returns on rank 0, sent to every rank.

    Raises:
        ValueError: on every rank, if `read` raises one, or storage does not answer.
    """
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            found[0] = read()
        except (ValueError, OSError) as error:
            found[1] = str(error)
    dist.broadcast_object_list(found, src=0, device=device)
    if found[1] is not None:
        raise ValueError(found[1])
    return found[0]


def _gathered(mine: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return parts
