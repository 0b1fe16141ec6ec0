"""Image files: their names, their pixels, and how EXIF turns them.

Decoders leave EXIF's orientation alone unless it is asked for.
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
"""Formats that Pillow opens for us, and their suffixes. Its others include PostScript, which it
passes to another program, and formats that are not for photographs."""
IMAGE_FORMATS: Final = tuple(FORMAT_SUFFIXES)
IMAGE_SUFFIXES: Final = frozenset(sum(FORMAT_SUFFIXES.values(), ("img", "image")))
# What Windows, macOS, ext4 and network disks add to folders, in lower case.
_OF_SYSTEMS: Final = frozenset(
    {
        "thumbs.db", "desktop.ini", "__macosx", "lost+found", "@eadir", "#recycle",
        "$recycle.bin", "system volume information",
    }
)  # fmt: skip
# Ends of the names of downloads and copies that are not finished.
_UNFINISHED: Final = (".part", ".partial", ".crdownload", "~")
_ADDRESS: Final = re.compile(r" <_io.BytesIO object at 0x\w+>")
_EXIF_ORIENTATION: Final = 0x0112
# What a file with an orientation contains: names of segments in JPEG, PNG and WebP; or TIFF's.
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
"""By EXIF's orientation (CIPA DC-008, 4.6.4): from the pixels that are stored to those shown."""


def is_hidden(path: str) -> bool:
    """Whether a component of a relative path begins with a dot, or no user has made it."""
    return any(
        part.startswith(".") or part in _OF_SYSTEMS or part.endswith(_UNFINISHED)
        for part in path.lower().split("/")
    )


def is_image_name(path: str) -> bool:
    """Whether a file is named as an image is, and not hidden."""
    name = path.rsplit("/", 1)[-1]
    return not is_hidden(name) and name.rpartition(".")[2].lower() in IMAGE_SUFFIXES


class BadImageError(ValueError):
    """The bytes are not an image that can be decoded; the message says why."""


def decode(image: bytes | memoryview) -> UInt8Array:
    """All pixels of an encoded image as RGB: uint8 (height, width, 3).

    Equals Pillow's `convert("RGB")`, but 16-bit grey is scaled to 8 bits where Pillow clips,
    if any value is above 255.

    Raises:
        BadImageError: the bytes cannot be decoded completely.
    """
    pixels = None if size_of_jpeg(image) is None else decode_jpeg(image)
    return decode_by_pillow(image) if pixels is None else pixels


def open_image(image: bytes | memoryview) -> Image.Image:
    """Pillow's image of a file of `IMAGE_FORMATS`; raises what Pillow raises."""
    return Image.open(io.BytesIO(image), formats=IMAGE_FORMATS)


def pixels_of(image: Image.Image) -> UInt8Array:
    """The pixels of Pillow's image as `decode` gives them; raises what Pillow raises, too.

    Raises:
        BadImageError: they are floats.
    """
    if image.mode.startswith("I;16") or image.mode == "I":
        grey = np.asarray(image)
        # Values that all fit into 8 bits are taken as 8-bit values, as in Pillow.
        eight = (grey.astype(np.int64) >> (8 if grey.max() > 255 else 0)).clip(0, 255)
        return np.repeat(eight.astype(np.uint8)[:, :, None], 3, axis=2)
    if image.mode == "F":
        raise BadImageError("its pixels are floats of unknown range")
    return np.asarray(image.convert("RGB"))


def decode_by_pillow(image: bytes | memoryview) -> UInt8Array:
    """All pixels of an image that is no plain JPEG; as `decode`."""
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
    """What EXIF says of how the pixels are to be turned: 1 to 8, where 1 is not at all."""
    marks, searched = _EXIF_MARKS, image
    if image[:2] == START:
        marks = _EXIF_MARKS[:1]
        with contextlib.suppress(IndexError, struct.error):  # a damaged header is searched whole
            *_, (_, scan_at, _) = header_segments(image)
            searched = image[:scan_at]
    if not any(mark in searched for mark in marks):
        return 1
    with contextlib.suppress(Exception), open_image(image) as opened:  # Pillow raises anything
        orientation = opened.getexif().get(_EXIF_ORIENTATION)
        if orientation in TURNS:
            return orientation
    return 1


def turned_pixels(image: bytes) -> NDArray[np.uint8]:
    """The pixels of an image as EXIF says they are shown; errors as `decode`."""
    return TURNS[orientation_of(image)](decode(image))
