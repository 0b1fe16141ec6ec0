"""First labels, read without images, against the images' own rows."""

import numpy as np
import pyarrow.parquet as pq

from tests.data.small_sets import write_rows
from vit_ray.data import open_dataset
from vit_ray.data.dataset import Manifest
from vit_ray.data.shards import RowGroupReader, first_labels
from vit_ray.data.subset import subset


def stored(manifest: Manifest) -> list[int]:
    """First labels of all rows of the files, as pyarrow reads them."""
    files = [f"{manifest.root}/{file.path}" for file in manifest.files]
    return [labels[0] for file in files for labels in pq.read_table(file)["labels"].to_pylist()]


def test_every_image_has_its_first_label_in_the_order_of_the_rows(digits):
    manifest = open_dataset(digits.train)
    assert np.concatenate(list(first_labels(manifest))).tolist() == stored(manifest)


def test_rows_that_a_subset_leaves_out_are_left_out(digits, tmp_path):
    part = subset(digits.train, str(tmp_path / "part"), count=77)
    found = np.concatenate(list(first_labels(part)))
    assert len(found) == 77
    whole = stored(open_dataset(digits.train))
    kept = [
        whole[32 * int(part.row_group[group]) + row]
        for group in range(part.num_row_groups)
        for row in part.stored_rows(group).tolist()
    ]
    assert found.tolist() == kept


def test_an_image_without_labels_has_none(tmp_path):
    reader = RowGroupReader(write_rows(tmp_path, [(2, 1), (), (1,)]))
    assert reader.first_labels(0).tolist() == [2, -1, 1]
