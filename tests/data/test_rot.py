"""Every bit of a data set: flipped, it is found by verify, and before a row is used."""

from pathlib import Path

import numpy as np
import pytest

from tests.data.small_sets import SHARD, flips, used_rows, write_rows
from vit_ray.data import open_dataset
from vit_ray.data.convert.finished_sets import check_file
from vit_ray.data.dataset import MANIFEST_FILE, Manifest
from vit_ray.data.shards import RowGroupReader


@pytest.fixture
def small(tmp_path: Path) -> Manifest:
    return write_rows(tmp_path / "small", [(0,), (1, 2), (2,), (1,), (0,), (2, 0)])


@pytest.mark.slow
def test_no_flipped_bit_of_a_shard_is_used(small):
    whole, is_refused = used_rows(small)
    assert (len(whole), is_refused) == (6, False)
    for flip in flips(Path(small.root) / SHARD, bits_per_byte=1):
        rows, is_refused = used_rows(small)
        assert rows.items() <= whole.items(), flip
        assert is_refused or rows == whole, flip  # some bits of parquet are read by no one


def test_verify_finds_every_flipped_bit_of_a_shard(small):
    assert check_file(0, small, 0.0).problems == []
    for flip in flips(Path(small.root) / SHARD, bits_per_byte=1):
        assert check_file(0, small, 0.0).problems, flip


@pytest.mark.slow
def test_a_manifest_with_a_flipped_bit_is_not_opened(small):
    """Unless it says the same of the data: bits of parquet that nobody reads, and the root."""
    for flip in flips(Path(small.root) / MANIFEST_FILE, bits_per_byte=2):
        try:
            opened = open_dataset(small.root)
        except ValueError:
            continue
        assert opened.fingerprint == small.fingerprint, flip
        assert list(opened.files) == list(small.files), flip
        for name in ("file_index", "row_group", "rows", "bytes"):
            np.testing.assert_array_equal(getattr(opened, name), getattr(small, name), flip)


def test_a_flipped_image_costs_no_other_row(small):
    whole, _ = used_rows(small)
    shard = Path(small.root) / SHARD
    content = bytearray(shard.read_bytes())
    content[bytes(content).index(whole[4][0]) + 9] ^= 4
    shard.write_bytes(content)
    assert used_rows(small)[0].keys() == whole.keys() - {4}
    (problem,) = check_file(0, small, 0.0).problems
    assert (problem.key, problem.row_group, "checksum" in problem.what) == ("key 4", 1, True)


@pytest.mark.parametrize(
    ("labels", "wrong"), [((3,), "3"), ((-1,), "-1"), ((0, 2_000_000_000), "2000000000")]
)
def test_a_label_out_of_range_names_shard_row_and_key(tmp_path, labels, wrong):
    manifest = write_rows(tmp_path, [(0,), (1,), (2,), (), labels, (1,)])
    named = rf"{SHARD}', row 1 of row group 1 \('key 4'\) has the label {wrong}, .* 3 classes"
    with pytest.raises(ValueError, match=named):
        RowGroupReader(manifest).read(1)
    with pytest.raises(ValueError, match=named):
        RowGroupReader(manifest).first_labels(1)
    (problem,) = check_file(0, manifest, 0.0).problems
    assert "key 4" in problem.what
