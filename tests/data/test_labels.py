"""First labels, read without images, against the images' own rows."""

import numpy as np
import pyarrow.parquet as pq

from tests.data.small_sets import write_rows
from vit_ray.data import open_dataset
from vit_ray.data.dataset import Manifest
from vit_ray.data.parts import subset
from vit_ray.data.shards import RowGroupReader, first_labels


def stored(manifest: Manifest) -> list[int]:
    """First labels of all rows of the files, as pyarrow reads them."""
    files = [f"{manifest.root}/{file.path}" for file in manifest.files]
    return [labels[0] for file in files for labels in pq.read_table(file)["labels"].to_pylist()]


def test_every_image_has_its_first_label_in_the_order_of_the_rows(digits, tmp_path):
    manifest = open_dataset(digits.train)
    whole = stored(manifest)
    assert np.concatenate(list(first_labels(manifest))).tolist() == whole
    part = subset(digits.train, str(tmp_path / "part"), count=77)  # leaves rows out
    kept = [
        whole[32 * int(part.row_group[group]) + row]
        for group in range(part.num_row_groups)
        for row in part.stored_rows(group).tolist()
    ]
    assert len(kept) == 77
    assert np.concatenate(list(first_labels(part))).tolist() == kept
    reader = RowGroupReader(write_rows(tmp_path / "rows", [(2, 1), (), (1,)]))
    assert reader.first_labels(0).tolist() == [2, -1, 1]
