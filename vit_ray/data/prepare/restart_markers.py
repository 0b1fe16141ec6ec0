"""JPEG files rewritten losslessly with restart markers, so that crops of them can be read alone.

The coefficients stay as they are, and so do all pixels; comments, profiles and EXIF stay too. What
rewrites is libjpeg-turbo: the copy that Pillow brings or the system's, in a process of its own, or
the command jpegtran. Progressive files become baseline. Everything else (arithmetic coding, CMYK,
several scans, several pictures in a file, 12 bits, damage) stays as it came.
"""

import contextlib
import ctypes.util
import functools
import logging
import re
import select
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import PIL

from vit_ray.data.format.stored_image import RestartIndex
from vit_ray.data.images.jpeg import decode_jpeg
from vit_ray.data.images.jpeg_headers import (
    END,
    JpegFrame,
    is_front,
    metadata_of,
    read_frame,
)
from vit_ray.data.images.restart_index import index_segments, interval_for

_LOG: Final = logging.getLogger(__name__)

_SEGMENT_PIXELS: Final = 64 * 16
"""About: 4 MCUs of a usual photograph (4:2:0); markers then add 1 % to its bytes. Crops of twice as
many take 10 % longer, as more is decoded beside them."""
_MOST_PIXELS: Final = 1 << 26
"""Of an image that is rewritten; its coefficients take 2 to 6 bytes a pixel."""
_LATER_METADATA: Final = re.compile(rb"\xff[\xe0-\xef\xfe]")
"""Comments and applications' segments behind the first scan's header, which libjpeg drops."""
_FRONT_BYTES: Final = {0xE0: 18, 0xEE: 16}
"""Of a segment of JFIF without a thumbnail, and of one of Adobe, with the marker."""
_ANSWER_WITHIN_S: Final = 60.0
_HELPER: Final = Path(__file__).with_name("libjpeg_process.py")
_GREY_PIXEL: Final = bytes.fromhex(
    "ffd8ffdb004300" + "01" * 64 + "ffc0000b080001000101011100ffc4001400010000000000000000000000"
    "0000000000ffc40014100100000000000000000000000000000000ffda0008010100003f0037ffd9"
)

_NOT_FOUND: Final = (
    "convert.index_jpeg: no libjpeg 6.2 and no jpegtran is found here, so JPEG files stay as "
    "they are and are read more slowly; install Pillow from PyPI, or libjpeg-turbo-progs, whose "
    "jpegtran makes a conversion several times slower"
)


class Writer(Protocol):
    """What rewrites coefficients; `name` tells one version's bytes from another's."""

    name: str

    def __call__(self, image: bytes, interval: int, keeps_tables: bool) -> bytes | None:
        """The file with restart markers and without metadata; None if it is damaged.

        Args:
            keeps_tables: keep the tables of AC coefficients, which is twice as fast.
        """

    def close(self) -> None:
        """End it."""


class Libjpeg:
    """libjpeg in a process of its own, which is started again where a file has ended it."""

    def __init__(self, library: str) -> None:
        self.name = Path(library).name
        self._command = [sys.executable, "-I", "-S", str(_HELPER), library]
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, image: bytes, interval: int, keeps_tables: bool) -> bytes | None:
        """As `Writer`."""
        try:
            return self._ask(image, interval, keeps_tables) or None
        except (OSError, struct.error):
            self.close()
            return None

    def _ask(self, image: bytes, interval: int, keeps_tables: bool) -> bytes:
        if self._process is None:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                self._command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
            )
        to, back = self._process.stdin, self._process.stdout
        assert to is not None
        assert back is not None
        to.write(struct.pack("<III", interval, keeps_tables, len(image)))
        to.write(image)
        to.flush()
        if not select.select([back], [], [], _ANSWER_WITHIN_S)[0]:
            raise TimeoutError
        (length,) = struct.unpack("<I", back.read(4))
        return back.read(length)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(BrokenPipeError):  # of a request that it has not read
                self._process.communicate()  # no limit: the process has been killed
            self._process = None


class Jpegtran:
    """The command of that name, once for each file."""

    name = "jpegtran"

    def __init__(self, command: str) -> None:
        self._command = command

    def __call__(self, image: bytes, interval: int, keeps_tables: bool) -> bytes | None:
        """As `Writer`; tables are always made anew."""
        command = [self._command, "-copy", "none", "-optimize", "-restart", f"{interval}B"]
        try:
            done = subprocess.run(
                command, input=image, capture_output=True, timeout=_ANSWER_WITHIN_S
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None

    def close(self) -> None:
        """Nothing stays behind."""


@functools.cache
def restart_writer() -> Writer | None:
    """The best way to rewrite that works here; None, with a warning, if there is none.

    A process keeps it: its helper ends with it, when nobody writes to the helper's input any more.
    """
    for writer in _writers():
        if with_restart_markers(_GREY_PIXEL, writer) is not None:
            return writer
        writer.close()
    _LOG.warning(_NOT_FOUND)
    return None


def _writers() -> Iterator[Writer]:
    packages = Path(PIL.__file__).parent
    bundled = [*packages.glob("../pillow.libs/libjpeg*"), *packages.glob(".dylibs/libjpeg*")]
    yield from map(Libjpeg, map(str, bundled))
    if (library := ctypes.util.find_library("jpeg")) is not None:  # which starts a process
        yield Libjpeg(library)
    if (jpegtran := shutil.which("jpegtran")) is not None:
        yield Jpegtran(jpegtran)


@dataclass(frozen=True, eq=False)
class RewrittenJpeg:
    """A JPEG with restart markers, its height and width, and where its parts lie."""

    image: bytes
    size: tuple[int, int]
    index: RestartIndex


def with_restart_markers(image: bytes, writer: Writer) -> RewrittenJpeg | None:
    """A JPEG rewritten; None if it is to stay as it is."""
    frame = read_frame(image)
    if frame is None or frame.height * frame.width > _MOST_PIXELS:
        return None
    # In coded data 0xff 0xd9 is nothing but the end; behind it may be a second picture.
    if image.find(END, frame.scan_at) != len(image) - len(END):
        return None
    if _LATER_METADATA.search(image, frame.scan_at) or not _has_usual_fronts(image):
        return None
    keeps_tables = frame.is_baseline and frame.is_usual_coding
    interval = interval_for(frame, _SEGMENT_PIXELS)
    bare = writer(image, interval, keeps_tables)
    if bare is None and keeps_tables:  # they may have no room for the codes that they lack
        bare = writer(image, interval, False)
    if bare is None or (written := read_frame(bare)) is None:
        return None
    rewritten = _with_metadata(bare, written, image)
    if not frame.is_baseline and not _have_equal_pixels(rewritten, image):
        return None
    index = index_segments(rewritten)
    size = written.height, written.width
    return None if index is None else RewrittenJpeg(rewritten, size, index)


def _has_usual_fronts(image: bytes) -> bool:
    """Whether JFIF's and Adobe's segments have no more than libjpeg writes, say no thumbnail."""
    return all(len(s) == _FRONT_BYTES[s[1]] for s in metadata_of(image) if is_front(s))


def _have_equal_pixels(one: bytes, other: bytes) -> bool:
    """Not so where a progressive file lacks its last scans: decoders smooth what it has."""
    ours, theirs = decode_jpeg(one), decode_jpeg(other)
    return ours is not None and theirs is not None and np.array_equal(ours, theirs)


def _with_metadata(bare: bytes, frame: JpegFrame, original: bytes) -> bytes:
    """The rewritten file with what the original has beside pixels, behind its own first marker."""
    own = bare[2 : frame.front]
    others = [s for s in metadata_of(original) if not (is_front(s) and s[1:2] == own[1:2])]
    return b"".join([bare[: frame.front], *others, bare[frame.front :]])
