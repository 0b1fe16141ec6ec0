"""JPEG files rewritten losslessly with restart markers, so that single crops of them can be read.

The coefficients stay unchanged, and so do all pixels; comments, profiles and EXIF are kept.
libjpeg-turbo (Pillow's copy, or the system's) rewrites the file in a separate process, which reads
the result and compares all coefficients. Progressive files become baseline. Unusual files
(arithmetic coding, CMYK, baseline in several scans, several pictures in a file, 12 bits, damage)
are not rewritten.
"""

import ctypes.util
import functools
import logging
import re
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import PIL

from vit_ray.data.jpeg import END, START, is_front, metadata_of, read_frame
from vit_ray.data.libjpeg_process import ANSWER, KEEP_TABLES, OPTIMIZE, REQUEST
from vit_ray.data.restart_index import StoredImage, index_segments, interval_for

_LOG: Final = logging.getLogger(__name__)
# Approximate pixels of a segment: 4 MCUs of a usual photograph (4:2:0); markers then add 1 % to
# its bytes. With twice as many, crops take 10 % longer, because more is decoded around them.
_SEGMENT_PIXELS: Final = 64 * 16
# Larger images are not rewritten: coefficients take 2 to 6 bytes a pixel.
_MAX_PIXELS: Final = 1 << 26
# After the first scan's header: the end marker, or a comment's or application's segment (libjpeg
# drops these).
_END_OR_METADATA: Final = re.compile(rb"\xff[\xd9\xe0-\xef\xfe]")
# Length, with the marker, of a JFIF segment without a thumbnail, and of an Adobe segment.
_FRONT_BYTES: Final = {0xE0: 18, 0xEE: 16}
# Wall clock, generous: the helper itself limits the CPU time of a file.
_ANSWER_WITHIN_S: Final = 300.0
_HELPER: Final = Path(__file__).with_name("libjpeg_process.py")
_GREY_PIXEL: Final = bytes.fromhex(
    "ffd8ffdb004300" + "01" * 64 + "ffc0000b080001000101011100ffc4001400010000000000000000000000"
    "0000000000ffc40014100100000000000000000000000000000000ffda0008010100003f0037ffd9"
)
_ATTEMPTS: Final = 3
# Signals that a damaged file may cause; other signals come from outside.
_SIGNALS_OF_FILES: Final = (
    signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGPROF,
)  # fmt: skip


class Libjpeg:
    """libjpeg in a separate process, which is started again after it has ended."""

    def __init__(self, library: str) -> None:
        self._command = [sys.executable, "-I", "-S", str(_HELPER), library]
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, kind: int, image: bytes, interval: int = 0) -> bytes | None:
        """The answer to a request of `libjpeg_process`; None if the file made the process end.

        Raises:
            OSError: the process was killed or did not answer, in every attempt.
        """
        request = REQUEST.pack(kind, interval, len(image)) + image
        for _ in range(_ATTEMPTS):
            try:
                return self._answer(request)
            except (OSError, EOFError, struct.error):
                status = self.close()
                if status >= 0 or -status in _SIGNALS_OF_FILES:
                    return None
        raise OSError(
            f"the process that rewrites JPEG files was killed {_ATTEMPTS} times, or did not answer "
            f"in {_ANSWER_WITHIN_S:g} s; check the machine's memory"
        )

    def _answer(self, request: bytes) -> bytes:
        if self._process is None:
            self._socket, theirs = socket.socketpair()
            self._socket.settimeout(_ANSWER_WITHIN_S)
            self._answers = self._socket.makefile("rb")
            with theirs:
                pipe = theirs.fileno()
                self._process = subprocess.Popen(
                    self._command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
                )
        self._socket.sendall(request)
        (length,) = ANSWER.unpack(self._answers.read(ANSWER.size))
        content = self._answers.read(length)
        if len(content) < length:
            raise EOFError
        return content

    def close(self) -> int:
        """End the process; its exit status, 0 if there is none."""
        if self._process is None:
            return 0
        process, self._process = self._process, None
        self._answers.close()
        self._socket.close()
        process.kill()  # does not change the status of a process that has ended
        return process.wait()  # no limit: the process has been killed


@functools.cache
def restart_writer() -> Libjpeg | None:
    """The first usable libjpeg of this machine; None, with a warning, if there is none.

    Its process ends with the calling one, because its input is closed then.
    """
    for writer in _writers():
        if with_restart_markers(_GREY_PIXEL, writer) is not None:
            return writer
        writer.close()
    _LOG.warning(
        "no libjpeg 6.2 is found here, so JPEG files get no restart markers (convert.index_jpeg) "
        "and are read more slowly, and damage in them is not detected (convert.damaged); install "
        "Pillow from PyPI"
    )
    return None


def _writers() -> Iterator[Libjpeg]:
    pillow = Path(PIL.__file__).parent
    bundled = [*pillow.glob("../pillow.libs/libjpeg*"), *pillow.glob(".dylibs/libjpeg*")]
    yield from map(Libjpeg, map(str, bundled))
    if (library := ctypes.util.find_library("jpeg")) is not None:  # slow: starts a process
        yield Libjpeg(library)


def with_restart_markers(image: bytes, writer: Libjpeg) -> StoredImage | None:
    """The file rewritten and indexed; None if it is damaged, too large or of an unusual kind."""
    frame = read_frame(image)
    if frame is None or frame.height * frame.width > _MAX_PIXELS:
        return None
    # The first 0xff 0xd9 in coded data is the end of the picture; a second picture may follow.
    marker, metadata = _END_OR_METADATA.search(image, frame.scan_at), metadata_of(image)
    if marker is None or marker.start() != len(image) - len(END):
        return None
    # JFIF and Adobe segments with extras, such as a thumbnail, are unusual.
    if any(len(segment) != _FRONT_BYTES[segment[1]] for segment in metadata if is_front(segment)):
        return None
    interval = interval_for(frame, _SEGMENT_PIXELS)
    # Optimized tables if the file's own have no room for missing codes.
    for kind in (KEEP_TABLES, OPTIMIZE) if frame.is_baseline else (OPTIMIZE,):
        if rewritten := writer.ask(kind, image, interval):
            break
    else:
        return None
    # The original's segments, JFIF's and Adobe's first, replace those that libjpeg has written.
    tables_at = len(START) + sum(map(len, metadata_of(rewritten)))
    fronts = {segment[1]: segment for segment in metadata if is_front(segment)}
    segments = [fronts[kind] for kind in sorted(fronts)] + [s for s in metadata if not is_front(s)]
    rewritten = b"".join((START, *segments, rewritten[tables_at:]))
    index = index_segments(rewritten)
    size = frame.height, frame.width
    return None if index is None else StoredImage(rewritten, size, index)
