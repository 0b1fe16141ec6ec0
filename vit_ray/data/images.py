"""Image files: their names, pixels and EXIF orientation.

Decoding ignores the orientation; `turned_pixels` applies it.
"""

import contextlib
import io
import re
import struct
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from vit_ray.data.jpeg import START, decode_jpeg, header_segments, size_of_jpeg

UInt8Array = NDArray[np.uint8]

FORMAT_SUFFIXES: Final = {
    "JPEG": ("jpg", "jpeg", "jpe", "jfif"),
    "PNG": ("png", "apng"),
    "WEBP": ("webp",),
    "BMP": ("bmp", "dib"),
    "GIF": ("gif",),
    "TIFF": ("tif", "tiff"),
    "PPM": ("ppm", "pgm", "pbm", "pnm"),
    "JPEG2000": ("jp2", "j2k", "jpf", "jpx"),
    "AVIF": ("avif",),
}
"""Formats that are read, and their suffixes. Pillow's other formats include PostScript, which runs
another program, and formats that are not for photographs."""
IMAGE_FORMATS: Final = tuple(FORMAT_SUFFIXES)
IMAGE_SUFFIXES: Final = frozenset(sum(FORMAT_SUFFIXES.values(), ("img", "image")))
# Names that Windows, macOS, ext4 and network disks add to folders, in lower case.
_SYSTEM_NAMES: Final = frozenset(
    {
        "thumbs.db", "desktop.ini", "__macosx", "lost+found", "@eadir", "#recycle",
        "$recycle.bin", "system volume information",
    }
)  # fmt: skip
# Suffixes of unfinished downloads and copies.
_UNFINISHED: Final = (".part", ".partial", ".crdownload", "~")
_ADDRESS: Final = re.compile(r" <_io.BytesIO object at 0x\w+>")
_EXIF_ORIENTATION: Final = 0x0112
# Files with an orientation contain one of these: segment names of JPEG, PNG and WebP, or TIFF's.
_EXIF_MARKS: Final[tuple[bytes, ...]] = (b"Exif", b"eXIf", b"EXIF", b"exif", b"II*\0", b"MM\0*")
TURNS: Final[dict[int, Callable[[NDArray[np.uint8]], NDArray[np.uint8]]]] = {
    1: lambda pixels: pixels,
    2: np.fliplr,
    3: lambda pixels: np.rot90(pixels, 2),
    4: np.flipud,
    5: lambda pixels: np.swapaxes(pixels, 0, 1),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: np.rot90(np.swapaxes(pixels, 0, 1), 2),
    8: np.rot90,
}
"""EXIF orientation (CIPA DC-008, 4.6.4) to a function from stored to upright pixels."""


def is_hidden(path: str) -> bool:
    """Whether a part of a relative path is hidden, of a system, or an unfinished download."""
    return any(
        part.startswith(".") or part in _SYSTEM_NAMES or part.endswith(_UNFINISHED)
        for part in path.lower().split("/")
    )


def is_image_name(path: str) -> bool:
    """Whether a file's name has the suffix of an image and is not hidden."""
    name = path.rsplit("/", 1)[-1]
    return not is_hidden(name) and name.rpartition(".")[2].lower() in IMAGE_SUFFIXES


class BadImageError(ValueError):
    """The bytes are not an image that can be decoded; the message says why."""


def decode(image: bytes | memoryview) -> UInt8Array:
    """All pixels of an encoded image as RGB: uint8 (height, width, 3).

    The result equals Pillow's `convert("RGB")`, except for 16-bit grey with a value above 255,
    which is scaled to 8 bits; Pillow clips it.

    Raises:
        BadImageError: the bytes cannot be decoded completely.
    """
    pixels = None if size_of_jpeg(image) is None else decode_jpeg(image)
    return decode_by_pillow(image) if pixels is None else pixels


def open_image(image: bytes | memoryview) -> Image.Image:
    """An encoded image of one of `IMAGE_FORMATS`, opened by Pillow; errors are Pillow's."""
    return Image.open(io.BytesIO(image), formats=IMAGE_FORMATS)


def pixels_of(image: Image.Image) -> UInt8Array:
    """The pixels of an opened image, as `decode` describes them.

    Raises:
        BadImageError: the pixels are floats.
        Exception: any error of Pillow.
    """
    if image.mode.startswith("I;16") or image.mode == "I":
        grey = np.asarray(image)
        # Values that all fit into 8 bits are taken as 8-bit values, as in Pillow.
        grey = (grey.astype(np.int64) >> (8 if grey.max() > 255 else 0)).clip(0, 255)
        return np.repeat(grey.astype(np.uint8)[:, :, None], 3, axis=2)
    if image.mode == "F":
        raise BadImageError("its pixels are floats of unknown range")
    return np.asarray(image.convert("RGB"))


def decode_by_pillow(image: bytes | memoryview) -> UInt8Array:
    """All pixels of an encoded image, by Pillow; result and errors as `decode`."""
    if not len(image):
        raise BadImageError("it has no bytes")
    try:
        with open_image(image) as opened:
            return pixels_of(opened)
    except BadImageError:
        raise
    except UnidentifiedImageError:
        raise BadImageError(f"not decodable: it is not one of {', '.join(IMAGE_FORMATS)}") from None
    except Exception as error:  # Pillow's plugins raise anything from SyntaxError to struct.error
        reason = _ADDRESS.sub("", str(error))
        raise BadImageError(f"not decodable: {type(error).__name__}: {reason}") from error


def orientation_of(image: bytes) -> int:
    """EXIF orientation of an encoded image, a key of `TURNS`; 1 if there is none."""
    marks, header = _EXIF_MARKS, image
    if image[:2] == START:
        marks = _EXIF_MARKS[:1]
        with contextlib.suppress(IndexError, struct.error):  # with a damaged header, all of it
            *_, (_, scan_at, _) = header_segments(image)
            header = image[:scan_at]
    if not any(mark in header for mark in marks):
        return 1
    with contextlib.suppress(Exception), open_image(image) as opened:  # Pillow raises anything
        orientation = opened.getexif().get(_EXIF_ORIENTATION)
        if orientation in TURNS:
            return orientation
    return 1


def turned_pixels(image: bytes) -> NDArray[np.uint8]:
    """The pixels of an encoded image, upright by its EXIF orientation; errors as `decode`."""
    return TURNS[orientation_of(image)](decode(image))
