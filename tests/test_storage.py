"""The file system through which Ray Train keeps its notes."""

import logging
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyarrow import fs
from ray.train.v2._internal.execution.storage import StorageContext

from vit_ray.storage import locate


def test_ray_train_writes_and_reads_through_it_as_through_pyarrows_own(tmp_path: Path) -> None:
    context = StorageContext(
        str(tmp_path), "run", storage_filesystem=locate(str(tmp_path)).for_ray()
    )
    context._check_validation_file()
    plain = fs.LocalFileSystem()
    path = f"{tmp_path}/run/note.json"
    with context.storage_filesystem.open_output_stream(path) as stream:
        stream.write(b"first")
        stream.write(b", second")
    with plain.open_input_stream(path) as stream:
        assert stream.read() == b"first, second"


def test_a_note_that_cannot_be_written_is_lost_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "note.json"
    path.mkdir()  # nothing can be written there
    store = locate(str(tmp_path)).for_ray()
    with caplog.at_level(logging.WARNING), store.open_output_stream(str(path)) as stream:
        stream.write(b"lost")
    assert f"{path} could not be written" in caplog.text


def test_it_is_the_same_on_every_worker_and_thread(tmp_path: Path) -> None:
    def make() -> fs.FileSystem:
        return locate(str(tmp_path)).for_ray()

    with ThreadPoolExecutor(1) as other:
        assert other.submit(make).result() == make()
    assert pickle.loads(pickle.dumps(make())) == make()
    assert make() != fs.LocalFileSystem()
