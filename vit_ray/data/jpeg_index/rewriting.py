"""JPEG files rewritten losslessly with restart markers, so that single crops of them can be read.

The coefficients stay unchanged, and so do all pixels; comments, profiles and EXIF are kept.
libjpeg-turbo rewrites the file, the copy in Pillow or the system's, in a separate process that
reads the result and compares all coefficients. Progressive files become baseline. All other files
(arithmetic coding, CMYK, several scans, several pictures in a file, 12 bits, damage) stay
unchanged.
"""

import contextlib
import ctypes.util
import functools
import logging
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import cv2
import numpy as np
import PIL

from vit_ray.data.jpeg import is_front, metadata_of, read_frame
from vit_ray.data.libjpeg_process import ANSWER, KEEP_TABLES, OPTIMIZE, REQUEST
from vit_ray.data.restart_index import RestartIndex, index_segments, interval_for

_LOG: Final = logging.getLogger(__name__)

_SEGMENT_PIXELS: Final = 64 * 16
"""Approximate pixels of a segment: 4 MCUs of a usual photograph (4:2:0); markers then add 1 % to
its bytes. With twice as many, crops take 10 % longer, because more is decoded around them."""
_MOST_PIXELS: Final = 1 << 26
"""Most pixels of an image that is rewritten; its coefficients take 2 to 6 bytes a pixel."""
_END_OR_METADATA: Final = re.compile(rb"\xff[\xd9\xe0-\xef\xfe]")
"""The end, or comments and applications' segments after the first scan's header, which libjpeg
drops."""
_FRONT_BYTES: Final = {0xE0: 18, 0xEE: 16}
"""Length of a JFIF segment without a thumbnail, and of an Adobe segment, with the marker."""
_ANSWER_WITHIN_S: Final = 300.0
"""The limit for a file is in processor time, which other work does not use up."""
_ENDS_WITHIN_S: Final = 0.5
_HELPER: Final = Path(__file__).with_name("libjpeg_process.py")
_GREY_PIXEL: Final = bytes.fromhex(
    "ffd8ffdb004300" + "01" * 64 + "ffc0000b080001000101011100ffc4001400010000000000000000000000"
    "0000000000ffc40014100100000000000000000000000000000000ffda0008010100003f0037ffd9"
)

_NOT_FOUND: Final = (
    "no libjpeg 6.2 is found here, so JPEG files get no restart markers (convert.index_jpeg) and "
    "are read more slowly, and damage in them is not detected (convert.damaged); install Pillow "
    "from PyPI"
)
_ATTEMPTS: Final = 3
_BY_THE_FILE: Final = (
    signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGXCPU,
)  # fmt: skip
"""Signals that a file may cause; others come from outside, and do not depend on the file."""


class Libjpeg:
    """libjpeg in a separate process, which is restarted when it has ended.

    `name` differs between versions that write different bytes.
    """

    def __init__(self, library: str) -> None:
        self.name = Path(library).name
        self._command = [sys.executable, "-I", "-S", str(_HELPER), library]
        self._process: subprocess.Popen[bytes] | None = None

    def ask(
        self, wanted: int, image: bytes, interval: int = 0, metadata: bytes = b""
    ) -> bytes | None:
        """The answer to a request of `libjpeg_process`; None if the file ends the process.

        Raises:
            OSError: the process was killed or did not answer, in every attempt.
        """
        head = REQUEST.pack(wanted, interval, len(image), len(metadata))
        for _ in range(_ATTEMPTS):
            try:
                return self._answer(b"".join((head, image, metadata)))
            except OSError as error:
                is_silent = isinstance(error, TimeoutError)
                ended = self.close()
                if not is_silent and (ended >= 0 or -ended in _BY_THE_FILE):
                    return None
        raise OSError(
            f"the process that rewrites JPEG files was killed {_ATTEMPTS} times, or did not answer "
            f"in {_ANSWER_WITHIN_S:g} s; check the machine's memory"
        )

    def _answer(self, request: bytes) -> bytes:
        if self._process is None:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                self._command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0
            )
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)
        to, back = self._process.stdin, self._process.stdout
        assert to is not None
        assert back is not None
        waiting = memoryview(request)
        while waiting:
            if not select.select([], [to], [], _ANSWER_WITHIN_S)[1]:
                raise TimeoutError
            waiting = waiting[os.write(to.fileno(), waiting) :]
        content, length = bytearray(), ANSWER.size
        while len(content) < length:
            if not select.select([back], [], [], _ANSWER_WITHIN_S)[0]:
                raise TimeoutError
            if not (some := os.read(back.fileno(), length - len(content))):
                raise OSError("the process ended before it answered")
            content += some
            if len(content) == length == ANSWER.size:
                length += ANSWER.unpack(content)[0]
        return bytes(content[ANSWER.size :])

    def close(self) -> int:
        """End the process; its exit status, 0 if there is none."""
        if self._process is None:
            return 0
        process, self._process = self._process, None
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # of a request that it has not read
                pipe.close()
        try:
            return process.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()  # no limit: the process has been killed


@functools.cache
def restart_writer() -> Libjpeg | None:
    """The library found here; None, with a warning, if there is none.

    A process keeps it: its helper ends with it, when nothing can write to the helper's input any
    more.
    """
    for writer in _writers():
        if with_restart_markers(_GREY_PIXEL, writer) is not None:
            return writer
        writer.close()
    _LOG.warning(_NOT_FOUND)
    return None


def _writers() -> Iterator[Libjpeg]:
    packages = Path(PIL.__file__).parent
    bundled = [*packages.glob("../pillow.libs/libjpeg*"), *packages.glob(".dylibs/libjpeg*")]
    yield from map(Libjpeg, map(str, bundled))
    if (library := ctypes.util.find_library("jpeg")) is not None:  # which starts a process
        yield Libjpeg(library)


@dataclass(frozen=True, eq=False)
class RewrittenJpeg:
    """A JPEG with restart markers, its height and width, and where its parts lie."""

    image: bytes
    size: tuple[int, int]
    index: RestartIndex


def with_restart_markers(image: bytes, writer: Libjpeg) -> RewrittenJpeg | None:
    """A JPEG rewritten; None if it is kept unchanged."""
    frame = read_frame(image)
    if frame is None or frame.height * frame.width > _MOST_PIXELS:
        return None
    # In coded data 0xff 0xd9 is always the end; a second picture may follow it.
    found = _END_OR_METADATA.search(image, frame.scan_at)
    if found is None or found[0] != b"\xff\xd9" or found.end() != len(image):
        return None
    metadata = metadata_of(image)
    # JFIF's and Adobe's segments with more than libjpeg writes, such as a thumbnail, would lose it.
    if any(len(s) != _FRONT_BYTES[s[1]] for s in metadata if is_front(s)):
        return None
    interval = interval_for(frame, _SEGMENT_PIXELS)
    # The file's own tables may have no room for missing codes.
    for wanted in (KEEP_TABLES, OPTIMIZE) if frame.is_baseline else (OPTIMIZE,):
        if rewritten := writer.ask(wanted, image, interval, b"".join(metadata)):
            break
    else:
        return None
    if not frame.is_baseline and not _have_equal_pixels(rewritten, image):
        return None
    index = index_segments(rewritten)
    size = frame.height, frame.width
    return None if index is None else RewrittenJpeg(rewritten, size, index)


def _have_equal_pixels(one: bytes, other: bytes) -> bool:
    """Not if a progressive file lacks its last scans: decoders smooth what it has."""
    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    ours, theirs = (cv2.imdecode(np.frombuffer(file, np.uint8), flags) for file in (one, other))
    return ours is not None and theirs is not None and np.array_equal(ours, theirs)
