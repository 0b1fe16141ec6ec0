"""Files of a data set as arrays; no files."""

import pickle

import numpy as np
import pytest

from vit_ray.data.dataset import ImageFile, Manifest, ShardFile, ShardFiles

FILES = [
    ShardFile("part-0.parquet", 64, 5 << 40, (1 << 32) - 1),
    ShardFile("ü/part 1.parquet", 3, 7, 0, ImageFile("s3://b/of others", 9, "", "image.bytes")),
    ShardFile("part-22.parquet", 0, 0, 5, None),
]


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_files_are_those_of_the_list(count: int) -> None:
    expected, found = FILES[:count], ShardFiles(FILES[:count])
    assert list(found) == expected
    assert len(found) == count
    assert [found[at] for at in range(-count, count)] == [*expected, *expected]
    assert (found[1:], found[::-1]) == (expected[1:], expected[::-1])
    assert list(pickle.loads(pickle.dumps(found))) == expected
    for file in found:
        assert [type(value) for value in (file.path, file.rows)] == [str, int]
    with pytest.raises(IndexError):
        found[count]


def pickled(manifest: Manifest) -> tuple[int, list[pickle.PickleBuffer], Manifest]:
    """Bytes that each process has of a manifest, the arrays that it shares, and what it reads."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(manifest, protocol=5, buffer_callback=buffers.append)
    shared = [buffer.raw().toreadonly() for buffer in buffers]
    return len(body), buffers, pickle.loads(body, buffers=shared)


def test_a_manifest_travels_as_arrays_that_processes_share(dataset: Manifest) -> None:
    """As Ray sends it: what is no array's content is unpickled by each process."""
    few, _, _ = pickled(dataset)
    many = pickle.loads(pickle.dumps(dataset))
    object.__setattr__(many, "files", ShardFiles([*dataset.files] * 1000))
    found, buffers, read = pickled(many)
    assert found < few + 100
    assert list(read.files) == [*dataset.files] * 1000
    arrays = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
    for name in ("file_index", "row_group", "rows", "bytes", "first_samples"):
        column = getattr(read, name)
        np.testing.assert_array_equal(column, getattr(dataset, name))
        assert any(np.shares_memory(column, array) for array in arrays), name
