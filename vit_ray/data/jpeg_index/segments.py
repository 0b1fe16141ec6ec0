"""Where the segments of a JPEG file with restart markers lie, and how long they are made."""

import re
from typing import Final

import numpy as np

from vit_ray.data.jpeg import END, START, JpegFrame, is_front, metadata_of, read_frame
from vit_ray.data.restart_index import FIRST_RESTART, MOST_SEGMENTS, RestartIndex

_MARKER: Final = re.compile(rb"\xff[^\x00\xff]")


def index_segments(image: bytes) -> RestartIndex | None:
    """The index of a file; None if its segments cannot be used separately.

    It must be baseline, of one scan, with a restart interval that divides its rows, its markers in
    place and numbered in sequence, and nothing after the image.
    """
    frame = read_frame(image)
    if frame is None or not frame.is_baseline or not frame.interval:
        return None
    if frame.units_across % frame.interval:
        return None
    if frame.front == len(START) and any(map(is_front, metadata_of(image))):
        return None  # a later segment gives its colour space
    columns = frame.units_across // frame.interval
    found = [match.start() for match in _MARKER.finditer(image, frame.scan_at)]
    codes = [image[at + 1] for at in found]
    rows = -(-frame.height // frame.unit_height)
    inner = [FIRST_RESTART + i % 8 for i in range(rows * columns - 1)]
    if codes != [*inner, END[1]] or found[-1] != len(image) - 2 or len(codes) > MOST_SEGMENTS:
        return None
    return RestartIndex(
        frame.front, frame.tables_at, frame.size_at, frame.unit_height, frame.unit_width, columns,
        np.array([frame.scan_at, *(at + 2 for at in found)], np.uint32),
    )  # fmt: skip


def interval_for(frame: JpegFrame, pixels: int) -> int:
    """MCUs in a segment, such that it divides a row and has about this many pixels.

    At least half as many, if a row has them: short segments cost bytes.
    """
    count, of_unit = frame.units_across, frame.unit_height * frame.unit_width
    whole = [k for k in range(1, count + 1) if count % k == 0]
    long = [k for k in whole if 2 * k * of_unit >= pixels] or [count]
    return min(long, key=lambda k: abs(np.log(k * of_unit / pixels)))
