"""Encoded images, decoded and cropped on the device while the previous step computes.

The crop's position was drawn with the sample's own random numbers before the image was sent, so it
equals the host's crop; the resize is bilinear and antialiased, like Pillow's.

JPEG files go through nvImageCodec (`pip install 'vit-ray[device-decode]'`), in hardware if the GPU
has it, or by its CPU backend without a GPU. Pillow decodes if there is neither a GPU nor
nvImageCodec, and files that nvImageCodec refuses.
"""

from __future__ import annotations

import importlib.util
import io
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from vit_ray.train.engine.replicated import cut_by_size
from vit_ray.worker.decode.batched_resize import resize_regions
from vit_ray.worker.prefetch import Prefetched, SideStream

if TYPE_CHECKING:
    from vit_ray.train.loop import Batch

Box = tuple[int, int, int, int]
"""Top, left, bottom, right in pixels of the file; the last two exclusive."""

# Pixels of whole images that a GPU decodes together: 400 MB.
MOST_PIXELS: Final = 1 << 27

_LOG: Final = logging.getLogger(__name__)


class RegionDecoder(Protocol):
    """Decodes a region of each of many JPEG files."""

    def __call__(self, files: list[np.ndarray], boxes: list[Box]) -> list[Tensor | None]:
        """uint8 (height, width, 3) of each box; None if a file cannot be decoded."""


def region_decoder(device: torch.device) -> RegionDecoder:
    """The best decoder for a device.

    Raises:
        ValueError: on a GPU without nvImageCodec, because Pillow is too slow for a GPU.
    """
    if importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.nvimgcodec"):
        return NvImageCodec(device)
    if device.type == "cuda":
        raise ValueError(
            "data.decode=device needs nvImageCodec on every worker with a GPU; "
            "pip install 'vit-ray[device-decode]', or set data.decode=host"
        )
    return decode_with_pillow


class NvImageCodec:
    """nvImageCodec on a GPU, or its CPU backend.

    A GPU decodes whole images, and then cuts the regions out: its JPEG units cannot decode regions,
    and nvJPEG below 13.2 leaves regions with smooth chroma to the CPU. A CPU decodes only the
    regions.
    """

    def __init__(self, device: torch.device) -> None:
        # Imported here because the package is optional.
        from nvidia import nvimgcodec

        self._codec = nvimgcodec
        self._device = device
        on_cpu = device.type == "cpu"
        backends = [nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)] if on_cpu else None
        index = device.index if device.index is not None else nvimgcodec.NVIMGCODEC_DEVICE_CURRENT
        self._decoder = nvimgcodec.Decoder(
            device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY if on_cpu else index,
            max_num_cpu_threads=torch.get_num_threads(),  # the CPUs given to this worker
            backends=backends,
            options=":fancy_upsampling=1",  # smooth chroma, as libjpeg's
        )
        # EXIF rotation is not applied, as on the host.
        self._params = nvimgcodec.DecodeParams(apply_exif_orientation=False)

    def __call__(self, files: list[np.ndarray], boxes: list[Box]) -> list[Tensor | None]:
        """As `RegionDecoder`."""
        streams = [self._stream(file) for file in files]
        found: list[Tensor | None] = [None] * len(files)
        known = [i for i, stream in enumerate(streams) if stream is not None]
        if not known:
            return found
        if self._device.type == "cpu":
            regions = [
                streams[i].get_sub_code_stream(region=self._codec.Region(*boxes[i])) for i in known
            ]
            for i, image in zip(known, self._decoded(regions), strict=True):
                found[i] = None if image is None else torch.from_numpy(np.asarray(image.cpu()))
            return found
        pixels = [streams[i].height * streams[i].width for i in known]
        for some in cut_by_size(known, pixels, MOST_PIXELS):
            for i, image in zip(some, self._decoded([streams[i] for i in some]), strict=True):
                if image is not None:
                    top, left, bottom, right = boxes[i]
                    # A copy, so that the rest of the image is freed.
                    found[i] = from_dlpack(image)[top:bottom, left:right].clone()
        return found

    def _decoded(self, streams: list[Any]) -> list[Any]:
        is_gpu = self._device.type == "cuda"
        cuda_stream = torch.cuda.current_stream(self._device).cuda_stream if is_gpu else 0
        decoded = self._decoder.decode(streams, params=self._params, cuda_stream=cuda_stream)
        return list(decoded)

    def _stream(self, file: np.ndarray) -> Any:
        try:
            stream = self._codec.CodeStream(file)
            stream.height  # noqa: B018  # of a broken header it is not known
            return stream
        except RuntimeError:
            return None


def decode_with_pillow(files: list[np.ndarray], boxes: list[Box]) -> list[Tensor | None]:
    """As `RegionDecoder`, one whole file after another."""
    return [_pillow_region(file, box) for file, box in zip(files, boxes, strict=True)]


def _pillow_region(file: np.ndarray, box: Box) -> Tensor | None:
    top, left, bottom, right = box
    try:
        with Image.open(io.BytesIO(file.tobytes()), formats=["JPEG"]) as opened:
            region = opened.convert("RGB").crop((left, top, right, bottom))
    except Exception as error:  # Pillow's plugins raise anything from SyntaxError to struct.error
        _LOG.info("Pillow cannot decode an image: %s: %s", type(error).__name__, error)
        return None
    return torch.from_numpy(np.array(region))


class DeviceDecoder:
    """Packed blocks of a stream to batches on the device.

    Args:
        size: height and width of the model's input in pixels.
        batch_size: images per batch; blocks may have any number of images.
        note_bad: called with the images that cannot be decoded, sample number to description;
            raises if there are too many. Another image of the batch replaces each of them.
        decode: decodes regions; None for the best decoder.
    """

    def __init__(
        self,
        device: torch.device,
        size: tuple[int, int],
        batch_size: int,
        note_bad: Callable[[dict[int, str]], None],
        decode: RegionDecoder | None = None,
    ) -> None:
        self._device = device
        self._size = size
        self._batch_size = batch_size
        self._note_bad = note_bad
        self._decode = decode or region_decoder(device)

    def batches(self, blocks: Iterable[pa.Table]) -> Iterator[Batch]:
        """Batches of exactly `batch_size`, in order, each decoded while the previous one is used.

        Args:
            blocks: `iter_batches(batch_size=None, batch_format="pyarrow")` of the stream.
        """
        side = SideStream(self._device)
        tables = rebatched(blocks, self._batch_size)
        made = Prefetched(tables, lambda table: side.make(partial(self.decoded, table)))
        return map(side.hand_over, made)

    def decoded(self, table: pa.Table) -> Batch:
        """One batch.

        Raises:
            ValueError: none of its images can be decoded, or `note_bad` finds too many bad ones.
        """
        images, bad = self._images(table)
        batch = {
            "image": images,
            "labels": _matrix(table["labels"]),
            "sample": table["sample"].to_numpy(),
        }
        if not bad:
            return batch
        samples = batch["sample"]
        self._note_bad({int(samples[i]): table["where"][i].as_py() for i in bad})
        # The next good row replaces a bad one, labels included.
        rows = np.arange(len(samples))
        good = np.setdiff1d(rows, bad)
        if not len(good):
            raise ValueError(
                f"none of {len(samples)} images can be decoded on the device, the first is "
                f"{table['where'][0].as_py()}; run `vit-ray verify`, or set data.decode=host"
            )
        rows[bad] = good[np.searchsorted(good, bad) % len(good)]
        return {
            "image": images[torch.from_numpy(rows).to(self._device)],
            "labels": batch["labels"][rows],
            "sample": samples[rows],
        }

    def _images(self, table: pa.Table) -> tuple[Tensor, list[int]]:
        """Crops of all rows, uint8 (B, H, W, 3), and which of them failed."""
        # Without a copy: uint8 (length,).
        files = [np.frombuffer(value.as_buffer(), np.uint8) for value in table["encoded"]]
        boxes: list[Box] = [tuple(box) for box in _matrix(table["box"]).tolist()]
        flips = table["is_flipped"].to_pylist()
        images = torch.zeros((len(files), *self._size, 3), dtype=torch.uint8, device=self._device)
        are_jpeg = [i for i, box in enumerate(boxes) if any(box)]
        regions = self._decode([files[i] for i in are_jpeg], [boxes[i] for i in are_jpeg])
        pixels = {
            i: _pillow_region(files[i], boxes[i]) if region is None else region
            for i, region in zip(are_jpeg, regions, strict=True)
        }
        good = {i: found.to(self._device) for i, found in pixels.items() if found is not None}
        resize_regions(good, flips, images)
        for i in set(range(len(files))) - set(are_jpeg):
            finished = torch.from_numpy(files[i].copy()).view(*self._size, 3)
            images[i] = finished.to(self._device)
        return images, [i for i, found in pixels.items() if found is None]


def rebatched(blocks: Iterable[pa.Table], batch_size: int) -> Iterator[pa.Table]:
    """Rows of packed blocks, in order, `batch_size` at a time."""
    held: list[pa.Table] = []
    count = 0
    for block in blocks:
        for packed in block["packed"]:
            table = pa.ipc.open_stream(packed.as_buffer()).read_all()
            held.append(table)
            count += table.num_rows
        while count >= batch_size:
            joined = pa.concat_tables(held)
            yield joined.slice(0, batch_size)
            held, count = [joined.slice(batch_size)], count - batch_size


def _matrix(column: pa.ChunkedArray) -> np.ndarray:
    """A column of fixed-size lists as (rows, length)."""
    array = column.combine_chunks()
    return array.flatten().to_numpy().reshape(len(array), -1)
