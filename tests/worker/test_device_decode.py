"""Decoding in the training worker: Pillow is the oracle, on the device that there is."""

import importlib.util
import io
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from tests.data.pictures import encoded, jpeg, picture
from vit_ray.data.format.stored_image import StoredImage
from vit_ray.data.images.crop_boxes import draw_box
from vit_ray.data.images.crops import Augmentation, training_crop
from vit_ray.data.images.crops import decode as decode_image
from vit_ray.data.jpeg_index.restart_index import index_segments
from vit_ray.data.stream.encoded import DrawnCrop, EncodedColumns, packed, packed_table
from vit_ray.worker.decode import device_decode
from vit_ray.worker.decode.device_decode import (
    DeviceDecoder,
    NvImageCodec,
    RegionDecoder,
    decode_with_pillow,
    rebatched,
    region_decoder,
)

CPU = torch.device("cpu")
KINDS = ["inception_crop", "resize_crop", "center_crop", "resize"]


@pytest.fixture(params=["nvimagecodec", "pillow"])
def decode(request: pytest.FixtureRequest) -> RegionDecoder:
    if request.param == "pillow":
        return decode_with_pillow
    pytest.importorskip("nvidia.nvimgcodec")
    return NvImageCodec(CPU)


def block(files: list[bytes], augmentation: Augmentation, **more: Any) -> pa.Table:
    """The packed block of some images, whose labels and samples are their places.

    JPEG files with restart markers travel in part.
    """
    columns = EncodedColumns(augmentation, len(files))
    for i, file in enumerate(files):
        size = decode_image(file).shape[:2]
        box = draw_box(size, augmentation, (7, 0, i))
        image = StoredImage(file, size, index_segments(file))
        columns.set(i, DrawnCrop(image, box, (7, 0, i), f"image {i}".__str__))
    places = np.arange(len(files))
    return packed(
        columns.columns() | {"labels": places[:, None].astype(np.int32), "sample": places} | more
    )


def refused(bad: dict[int, str]) -> None:
    raise AssertionError(f"no image is bad, but {bad}")


def decoded(blocks: list[pa.Table], batch_size: int, size: int, **options: Any) -> list[Any]:
    options = {"note_bad": refused} | options
    decoder = DeviceDecoder(CPU, (size, size), batch_size, **options)
    return list(decoder.batches(blocks))


@pytest.mark.parametrize("kind", KINDS)
def test_the_crop_is_what_pillow_cuts_and_resizes(decode: RegionDecoder, kind: Any) -> None:
    augmentation = Augmentation(kind, size=24, resize=28)
    files = [jpeg(i, 100 + i, 130 - i) for i in range(20)]
    (batch,) = decoded([block(files, augmentation)], 20, 24, decode=decode)
    for i, file in enumerate(files):
        crop = draw_box((100 + i, 130 - i), augmentation, (7, 0, i))
        top, left, bottom, right = crop.bounds((100 + i, 130 - i))
        with Image.open(io.BytesIO(file)) as opened:
            expected = opened.crop((left, top, right, bottom)).resize(
                (24, 24), Image.Resampling.BILINEAR
            )
        if crop.is_flipped:
            expected = expected.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        difference = batch["image"][i].numpy().astype(int) - np.asarray(expected)
        assert abs(difference).max() <= 1  # Pillow rounds between its two passes


PLAIN = [jpeg(i, 100 + i, 130 - i) for i in range(20)]
MARKED = [
    encoded(picture(i, 100 + i, 128), quality=90, restart_marker_blocks=2, subsampling=i % 3)
    for i in range(20)
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("files", [PLAIN, MARKED], ids=["whole files", "segments"])
def test_the_crop_is_where_the_host_cuts_it(
    decode: RegionDecoder, kind: Any, files: list[bytes]
) -> None:
    """The output is larger than the crop, so that the host decodes at full scale as well."""
    augmentation = Augmentation(kind, size=160, resize=180)
    (batch,) = decoded([block(files, augmentation)], 20, 160, decode=decode)
    for i, file in enumerate(files):
        host = training_crop(file, augmentation, (7, 0, i))
        assert abs(batch["image"][i].numpy().astype(int) - host).max() <= 1


def test_only_segments_that_the_crop_touches_travel() -> None:
    augmentation = Augmentation(size=24, max_area=0.1)
    (table,) = rebatched([block(MARKED, augmentation)], len(MARKED))
    sizes = [len(file.as_py()) for file in table["encoded"]]
    assert all(index_segments(file) is not None for file in MARKED)
    assert sum(sizes) < 0.65 * sum(map(len, MARKED))


def test_images_that_are_no_plain_jpeg_come_as_the_host_cuts_them(decode: RegionDecoder) -> None:
    augmentation = Augmentation(size=24)
    cmyk = io.BytesIO()
    Image.fromarray(picture(3)).convert("CMYK").save(cmyk, "JPEG")
    files = [encoded(picture(1), "PNG"), jpeg(2), cmyk.getvalue()]
    (batch,) = decoded([block(files, augmentation)], 3, 24, decode=decode)
    for i in (0, 2):
        host = training_crop(files[i], augmentation, (7, 0, i))
        np.testing.assert_array_equal(batch["image"][i], host)


def test_images_with_a_border_come_as_the_host_cuts_them(decode: RegionDecoder) -> None:
    augmentation = Augmentation(size=24, border=2)
    (batch,) = decoded([block(MARKED, augmentation)], 20, 24, decode=decode)
    for i, file in enumerate(MARKED):
        host = training_crop(file, augmentation, (7, 0, i))
        np.testing.assert_array_equal(batch["image"][i], host)


def test_blocks_of_any_length_become_batches_in_order(decode: RegionDecoder) -> None:
    augmentation = Augmentation(size=8)
    samples = np.split(np.arange(12), [1, 3, 8])
    blocks = [block([jpeg(1)] * len(s), augmentation, sample=s) for s in samples]
    batches = decoded(blocks, 4, 8, decode=decode)
    assert [batch["sample"].tolist() for batch in batches] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    assert [batch["image"].shape for batch in batches] == [(4, 8, 8, 3)] * 3
    assert [batch["labels"].shape for batch in batches] == [(4, 1)] * 3


def broken_block(broken: list[int], count: int) -> pa.Table:
    """Images cut short after they were packed."""
    (table,) = rebatched([block([jpeg(i) for i in range(count)], Augmentation(size=8))], count)
    files = table["encoded"].to_pylist()
    files = [file[:300] if i in broken else file for i, file in enumerate(files)]
    table = table.set_column(0, "encoded", pa.array(files, pa.binary()))
    return packed_table(table)


def test_a_bad_image_is_told_of_and_replaced_by_the_next(decode: RegionDecoder) -> None:
    told: dict[int, str] = {}
    whole = decoded([broken_block([], 4)], 4, 8, decode=decode)[0]
    (batch,) = decoded([broken_block([1, 3], 4)], 4, 8, decode=decode, note_bad=told.update)
    assert told == {1: "image 1", 3: "image 3"}
    assert batch["sample"].tolist() == [0, 2, 2, 0]
    assert batch["labels"][:, 0].tolist() == [0, 2, 2, 0]
    np.testing.assert_array_equal(batch["image"], whole["image"][[0, 2, 2, 0]])


def test_too_many_bad_images_stop_the_stream(decode: RegionDecoder) -> None:
    def stop(bad: dict[int, str]) -> None:
        raise ValueError(f"above the limit: {bad}")

    with pytest.raises(ValueError, match=r"above the limit: {1: 'image 1'}"):
        decoded([broken_block([1], 4)], 4, 8, decode=decode, note_bad=stop)
    with pytest.raises(ValueError, match=r"none of 2 images can be decoded .* image 0; run"):
        decoded([broken_block([0, 1], 2)], 2, 8, decode=decode, note_bad=lambda bad: None)


def test_what_the_codec_refuses_goes_through_pillow() -> None:
    files = block([jpeg(i) for i in range(4)], Augmentation(size=8))
    (expected,) = decoded([files], 4, 8, decode=decode_with_pillow)
    (batch,) = decoded([files], 4, 8, decode=lambda files, boxes: [None] * len(files))
    np.testing.assert_array_equal(batch["image"], expected["image"])


@pytest.mark.parametrize(
    ("device", "backends"), [(CPU, ["CPU_ONLY"]), (torch.device("cuda", 3), None)]
)
def test_the_codec_has_the_threads_of_the_worker_and_its_device(
    device: torch.device, backends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as `workers.cpus_per_worker`, which Ray has torch take."""
    made: dict[str, Any] = {}
    codec = SimpleNamespace(
        Decoder=lambda **options: made.update(options),
        DecodeParams=lambda **_: None,
        Backend=lambda kind: kind,
        BackendKind=SimpleNamespace(CPU_ONLY="CPU_ONLY"),
        NVIMGCODEC_DEVICE_CURRENT=-1,
        NVIMGCODEC_DEVICE_CPU_ONLY=-99999,
    )
    monkeypatch.setitem(sys.modules, "nvidia", SimpleNamespace(nvimgcodec=codec))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    NvImageCodec(device)
    assert made["max_num_cpu_threads"] == 5
    assert made["device_id"] == (3 if device.type == "cuda" else -99999)
    assert made["backends"] == backends


def test_a_gpu_without_its_codec_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert region_decoder(CPU) is device_decode.decode_with_pillow
    with pytest.raises(ValueError, match=r"needs nvImageCodec .* 'vit-ray\[device-decode\]'"):
        region_decoder(torch.device("cuda"))
