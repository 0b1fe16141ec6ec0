"""Features in files of several ranks: every image once, whatever was interrupted."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from vit_ray.evaluate.feature_files import (
    FACTS_FILE,
    part_name,
    read_facts,
    read_features,
    whole_parts,
    write_facts,
)
from vit_ray.storage import locate
from vit_ray.worker import extraction
from vit_ray.worker.extraction import (
    Waits,
    begin_extraction,
    extraction_metrics,
    write_features,
)
from vit_ray.worker.job import Extraction

NUM_IMAGES, BATCH, WIDTH, CLASSES = 43, 4, 6, 3


def predictions(rank: int, world_size: int, start: int) -> Any:
    """This rank's batches of an evaluation stream from a position on; features tell the sample."""
    passes = -(-(NUM_IMAGES - start) // (BATCH * world_size))
    for turn in range(passes):
        first = start + (turn * world_size + rank) * BATCH
        samples = np.arange(first, first + BATCH)
        samples[samples >= NUM_IMAGES] = -1
        if 17 in samples:
            samples[samples == 17] = -1  # cannot be decoded
        keys = [f"n\u00e4me-{s}".encode().ljust(12, b"\0") for s in samples]
        batch = {
            "sample": samples,
            "weight": (samples >= 0).astype(np.float32),
            "labels": np.where(samples < 0, -1, samples % CLASSES)[:, None].astype(np.int32),
            "key": np.frombuffer(b"".join(keys), np.uint8).reshape(BATCH, 12),
        }
        features = torch.from_numpy(samples[:, None] + np.arange(WIDTH) / 8.0)
        yield batch, features, features[:, :CLASSES] * 2


def extract(folder: Path, world_size: int, ranks: Any = None, with_logits: bool = True) -> int:
    """All ranks (or only some, as if the others had died) from where the last attempt ended."""
    start = begin_extraction(str(folder))
    how = Extraction(str(folder), with_logits, rows_per_file=8)
    for rank in range(world_size) if ranks is None else ranks:
        write_features(
            predictions(rank, world_size, start),
            how,
            start=start,
            batch_size=BATCH,
            rank=rank,
            world_size=world_size,
            waits=Waits(),
        )
    return start


def found(folder: Path) -> dict[str, np.ndarray]:
    files, others, end = whole_parts(locate(str(folder)))
    assert end >= NUM_IMAGES
    assert others == []
    write_facts(locate(str(folder)), {"is_complete": True, "files": files})
    columns = ["key", "label", "sample", "feature", "logits"]
    parts = list(read_features(locate(str(folder)), columns))
    return {c: np.concatenate([part[c] for part in parts]) for c in columns}


def check(folder: Path) -> None:
    columns = found(folder)
    order = np.argsort(columns["sample"])
    samples = columns["sample"][order]
    assert samples.tolist() == [s for s in range(NUM_IMAGES) if s != 17]
    assert columns["key"][order].tolist() == [f"n\u00e4me-{s}" for s in samples]
    assert columns["label"][order].tolist() == (samples % CLASSES).tolist()
    expected = samples[:, None] + np.arange(WIDTH, dtype=np.float32) / 8
    assert np.array_equal(columns["feature"][order], expected)
    assert np.array_equal(columns["logits"][order], 2 * expected[:, :CLASSES])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_image_is_in_one_file_of_any_number_of_ranks(tmp_path: Path, world_size: int) -> None:
    assert extract(tmp_path, world_size) == 0
    check(tmp_path)


def test_an_extraction_goes_on_behind_what_all_ranks_have_with_another_number_of_them(
    tmp_path: Path,
) -> None:
    extract(tmp_path, 3)
    # Positions 0 to 23 are whole, and of the rest one rank's file is missing.
    os.remove(tmp_path / part_name(24, 48, 1, 3))
    assert extract(tmp_path, 2) == 24
    check(tmp_path)
    assert not (tmp_path / part_name(24, 48, 0, 3)).exists()
    assert extract(tmp_path, 2) >= NUM_IMAGES  # there is nothing left
    check(tmp_path)


def test_nothing_but_features_is_removed(tmp_path: Path) -> None:
    (tmp_path / "notes.parquet").write_bytes(b"mine")
    extract(tmp_path, 2, ranks=[1])
    assert extract(tmp_path, 1) == 0
    assert (tmp_path / "notes.parquet").read_bytes() == b"mine"
    check(tmp_path)


def test_files_are_plain_parquet(tmp_path: Path) -> None:
    extract(tmp_path, 1, with_logits=False)
    table = pq.read_table(tmp_path / part_name(0, 8, 0, 1))
    assert table.column_names == ["key", "label", "sample", "feature"]
    assert table["feature"].type.list_size == WIDTH
    assert len(table) == 8


def test_features_that_are_not_whole_are_not_read(tmp_path: Path) -> None:
    folder = locate(str(tmp_path))
    with pytest.raises(ValueError, match="holds no complete set of features"):
        list(read_features(folder, ["key"]))
    write_facts(folder, {"is_complete": True, "files": [part_name(0, 8, 0, 1)]})
    with pytest.raises(ValueError, match=r"features-0+-0+8-00000-of-00001\.parquet cannot be read"):
        list(read_features(folder, ["key"]))
    (tmp_path / FACTS_FILE).write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        read_facts(folder)


def batches_of(
    folder: Path, rows_per_file: int, waits: Waits, note: Any = lambda turn: None
) -> int:
    """Write all batches of one rank; `note` is called before each."""

    def noted() -> Any:
        for turn, one in enumerate(predictions(0, 1, 0)):
            note(turn)
            yield one

    how = Extraction(str(folder), False, rows_per_file)
    return write_features(
        noted(), how, start=0, batch_size=BATCH, rank=0, world_size=1, waits=waits
    )


def test_the_next_file_is_computed_while_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_part, is_computed = extraction.write_part, threading.Event()
    names: list[str] = []

    def write(folder: Any, name: str, parts: Any) -> None:
        assert is_computed.wait(20)
        write_part(folder, name, parts)
        names.append(name)

    def note(turn: int) -> None:
        if turn == 3:  # the last batch of the second file; the first is not written yet
            assert names == []
            is_computed.set()
        assert len(names) >= turn // 2 - 1  # one file waits, not more

    monkeypatch.setattr(extraction, "write_part", write)
    assert batches_of(tmp_path, 2 * BATCH, Waits(), note) == NUM_IMAGES - 1
    firsts = range(0, NUM_IMAGES, 2 * BATCH)
    assert names == [part_name(f, min(f + 8, 44), 0, 1) for f in firsts]
    assert whole_parts(locate(str(tmp_path))) == (names, [], 44)


def test_a_file_that_cannot_be_written_ends_the_extraction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[int] = []

    def refused(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(extraction, "write_part", refused)
    with pytest.raises(OSError, match="the disk is full"):
        batches_of(tmp_path, 2 * BATCH, Waits(), turns.append)
    assert turns[-1] == 3  # at the end of the next file
    with pytest.raises(OSError, match="the disk is full"):
        batches_of(tmp_path, 99 * BATCH, Waits())  # the only one


def test_a_stop_leaves_the_file_that_was_being_written(tmp_path: Path) -> None:
    def stop(turn: int) -> None:
        if turn == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        batches_of(tmp_path, 2 * BATCH, Waits(), stop)
    assert whole_parts(locate(str(tmp_path))) == ([part_name(0, 8, 0, 1)], [], 8)


def test_waits_are_counted_from_the_first_batch_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(extraction, "time", SimpleNamespace(monotonic=lambda: now.s))
    waits = Waits()
    assert waits.seconds() == [0.0, 0.0, 0.0]

    def stream() -> Any:
        for wait_s in (7.0, 2.0, 3.0):
            now.s += wait_s
            yield {}

    def written() -> None:
        now.s += 5.0

    for _ in waits.for_images(stream()):
        now.s += 10.0  # computing
    waits.for_file(SimpleNamespace(result=written))  # type: ignore[arg-type]
    assert waits.seconds() == [5.0, 5.0, 40.0]  # 2 + 3 of images; 3 x 10, 5 and 5 in all


def test_two_workers_of_ten_seconds_each_made_three_hundred_images() -> None:
    found = extraction_metrics(300.0, 1.0 + 2.0, 0.5, 10.0 + 10.0, world_size=2)
    assert found == {
        "extract/images": 300.0,
        "extract/images_per_s": 30.0,
        "extract/image_wait_fraction": 0.15,
        "extract/file_wait_fraction": 0.025,
    }
    assert extraction_metrics(0.0, 0.0, 0.0, 0.0, world_size=2) == {"extract/images": 0.0}
