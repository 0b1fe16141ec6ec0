"""Names and shapes of the tensors in a file, without their values: reads megabytes of gigabytes.

They show whether weights fit a model before anything starts. Tensors are on the device `meta`.
"""

import json
import os
import struct
import zipfile
from collections.abc import Iterable
from typing import IO, Any, Final

import numpy as np
import torch
from torch import Tensor

from vit_ray.models.weights.name_maps import Tensors

_LENGTH: Final = struct.Struct("<Q")


def npz_headers(file: IO[bytes]) -> tuple[Tensors, dict[str, str]]:
    """Arrays of an `.npz` file; such files have no metadata.

    Raises:
        ValueError, zipfile.BadZipFile: it is not such a file, or has objects, which can run code.
    """
    tensors = {}
    with zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            with archive.open(name) as member:
                if np.lib.format.read_magic(member) == (1, 0):
                    shape, _, dtype = np.lib.format.read_array_header_1_0(member)
                else:
                    shape, _, dtype = np.lib.format.read_array_header_2_0(member)
            if dtype.hasobject:
                raise ValueError(f"{name} has objects, which can run code")
            tensors[name.removesuffix(".npy")] = _without_values(shape)
    return tensors, {}


def safetensors_headers(file: IO[bytes]) -> tuple[Tensors, dict[str, str]]:
    """Tensors and metadata of a safetensors file: its header is a length and JSON.

    Raises:
        ValueError: it is not such a file, or is truncated.
    """
    file.seek(0, os.SEEK_END)
    rest = file.tell() - _LENGTH.size
    file.seek(0)
    (length,) = _LENGTH.unpack(file.read(_LENGTH.size)) if rest > 0 else (0,)
    if not 0 < length <= rest:
        raise ValueError("it has no safetensors header")
    try:
        head = json.loads(file.read(length))
        metadata = head.pop("__metadata__", {})
        tensors = {name: _without_values(one["shape"]) for name, one in head.items()}
        promised = max((one["data_offsets"][1] for one in head.values()), default=0)
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"its header is not that of safetensors ({error!r})") from None
    if promised != rest - length:
        raise ValueError(
            f"its tensors have {rest - length:,} bytes of {promised:,}; fetch it again"
        )
    return tensors, metadata


def _without_values(shape: Iterable[Any]) -> Tensor:
    sides = tuple(shape)
    if not all(type(side) is int and side >= 0 for side in sides):
        raise ValueError(f"a tensor of the shape {sides}")
    return torch.empty(sides, device="meta")
