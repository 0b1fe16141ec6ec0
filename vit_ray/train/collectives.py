"""Small collective operations on plain numbers and arrays, over torch's process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def all_sum(values: Sequence[float], device: torch.device) -> list[float]:
    """Element-wise sum over ranks, computed in float64."""
    return _reduced(values, device, dist.ReduceOp.SUM)


def all_max(values: Sequence[float], device: torch.device) -> list[float]:
    """Element-wise maximum over ranks."""
    return _reduced(values, device, dist.ReduceOp.MAX)


def all_rows(rows: np.ndarray, device: torch.device) -> np.ndarray:
    """Every rank's (n, ...) rows, concatenated in rank order; n and dtype equal on all ranks."""
    mine = torch.from_numpy(np.ascontiguousarray(rows)).to(device)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return torch.cat(parts).cpu().numpy()


def from_first(value: int, device: torch.device) -> int:
    """Rank 0's number, on every rank."""
    tensor = torch.tensor([value], dtype=torch.int64, device=device)
    dist.broadcast(tensor, src=0)
    return int(tensor)


def _reduced(values: Sequence[float], device: torch.device, how: Any) -> list[float]:
    tensor = torch.tensor([float(v) for v in values], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=how)
    return tensor.tolist()
