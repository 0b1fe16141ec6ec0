"""Files of a data set as arrays; no files."""

import pickle

import pytest

from vit_ray.data.dataset import ImageFile, ShardFile, ShardFiles

FILES = [
    ShardFile("part-0.parquet", 64, 5 << 40, (1 << 32) - 1),
    ShardFile("ü/part 1.parquet", 3, 7, 0, ImageFile("s3://b/of others", 9, "", "image.bytes")),
    ShardFile("part-22.parquet", 0, 0, 5, None),
]


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_files_are_those_of_the_list(count):
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
