"""What each stage of the training stream costs on this machine, for the images of a step."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import cv2
import numpy as np

from vit_ray.data.format.row_groups import EncodedRows, RowGroupReader
from vit_ray.data.format.schema import checksum
from vit_ray.data.images.crop_boxes import Augmentation, draw_boxes
from vit_ray.data.images.crops import augmented, decoded, resized
from vit_ray.data.order.partition import Partition
from vit_ray.data.order.samples import Rows, rows_per_group
from vit_ray.data.stream.batches import BatchReader, StreamJob, StreamSpec
from vit_ray.launch.inputs.streams import ResolvedRun

STAGES: Final = ("read", "check", "draw", "decode", "crop", "augment", "copy")
"""Row groups from storage; their checksums; which images and boxes; pixels; the crop of them;
what is done to the crop, own parts too; the batch once from memory to memory."""

_GROUPS_HELD: Final = 65
"""Row groups of 64 images that a batch of 4,096 in turn has; one with a shuffle window has more."""


class _Stopwatch:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.spent_s = dict.fromkeys(STAGES, 0.0)
        self._clock, self._at_s = clock, clock()

    def lap(self, stage: str | None = None) -> None:
        """Count the time since the last lap for this stage, or for none."""
        now_s = self._clock()
        if stage is not None:
            self.spent_s[stage] += now_s - self._at_s
        self._at_s = now_s


def stream_cost(resolved: ResolvedRun, step: int) -> dict[str, float]:
    """Seconds of one thread per image, by stage, where the host decodes.

    The stream reads a row group once for all of its images, however few are in the step, so they
    share what reading and checking it costs. Opening files is not counted, and Ray is not there.

    Args:
        step: 0-based, whose images are measured.

    Raises:
        ValueError: the shards are not as the manifest says.
    """
    spec, size = resolved.streams["train"], resolved.recipe.train.global_batch_size
    spec = replace(spec, cache=None)
    counts = rows_per_group(spec.manifest, spec.rows)
    plan = BatchReader(StreamJob(spec, Partition(1, size), 0, True, counts)).plan
    start = step * size
    threads = cv2.getNumThreads()
    cv2.setNumThreads(0)  # as a reading task
    try:
        plan.rows_at(np.array([start]))  # the order of the epoch, once
        # Reading waits; the rest is work of this thread, whatever else the machine does.
        of_groups, of_images = _Stopwatch(time.perf_counter), _Stopwatch(time.thread_time)
        rows = plan.rows_at(np.arange(start, start + size, dtype=np.int64))
        of_images.lap("draw")
        groups = np.unique(rows.groups)
        for turn in np.array_split(groups, -(-len(groups) // _GROUPS_HELD)):
            places = np.flatnonzero(np.isin(rows.groups, turn))
            part = Rows(*(a[places] for a in (rows.epochs, rows.groups, rows.rows, rows.samples)))
            read = _read(spec, turn.tolist(), of_groups)
            _cut(spec, spec.augmentation, part, read, of_images)
    finally:
        cv2.setNumThreads(threads)
    shared = int(counts[groups].sum())
    return {
        stage: of_groups.spent_s[stage] / shared + of_images.spent_s[stage] / size
        for stage in STAGES
    }


def _read(spec: StreamSpec, groups: list[int], watch: _Stopwatch) -> dict[int, EncodedRows]:
    reader, read = RowGroupReader(spec.manifest), dict[int, EncodedRows]()
    for group in groups:
        reader.check_footer(group)
        watch.lap()
        rows = read[group] = reader.read(group)
        watch.lap("read")
        if rows.is_whole:  # its checksum was a part of that
            checksum(rows.images.buffers()[2])
            checked_s = watch.spent_s["check"]
            watch.lap("check")
            watch.spent_s["read"] -= watch.spent_s["check"] - checked_s
    return read


def _cut(
    spec: StreamSpec,
    augmentation: Augmentation,
    rows: Rows,
    read: Mapping[int, EncodedRows],
    watch: _Stopwatch,
) -> None:
    cut, size = augmentation, len(rows.samples)
    encoded = [read[group] for group in rows.groups.tolist()]
    places = zip(rows.groups.tolist(), rows.rows.tolist(), strict=True)
    stored = [spec.manifest.stored_row(*place) for place in places]
    watch.lap()
    sizes = np.array([one.size(row) for one, row in zip(encoded, stored, strict=True)])
    boxes = draw_boxes(sizes, cut, spec.seed, rows.epochs, rows.samples)
    watch.lap("draw")
    batch = np.zeros((size, *cut.shape), np.uint8)
    for i, (one, row, box) in enumerate(zip(encoded, stored, boxes, strict=True)):
        watch.lap()
        try:
            image = one.stored(row)
            watch.lap("check")
            pixels, scaled = decoded(image, box, cut)
            watch.lap("decode")
            crop = resized(pixels, scaled, cut, batch[i])
            watch.lap("crop")
            augmented(crop, cut, (spec.seed, int(rows.epochs[i]), int(rows.samples[i])))
            watch.lap("augment")
        except ValueError:  # a bad row, for which its neighbour is cut
            continue
    watch.lap()
    batch.copy()
    watch.lap("copy")
