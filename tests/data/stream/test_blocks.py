"""Blocks through Ray Data's own output buffer, which joins and slices by size, and bad rows."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from ray.data._internal.output_buffer import BlockOutputBuffer, OutputBlockSizeOption

from vit_ray.data.stream import ray_datasets
from vit_ray.data.stream.ray_datasets import BadRowLimit, as_one_row, cut

Batch = dict[str, Any]


def batch(count: int, size: int, first: int = 0) -> Batch:
    rng = np.random.default_rng(first)
    return {
        "image": rng.integers(0, 256, (count, size, size, 3), np.uint8),
        "labels": rng.integers(0, 9, (count, 2), np.int32),
        "sample": np.arange(first, first + count),
    }


@pytest.mark.parametrize("size", [1, 224])
def test_ray_data_neither_joins_nor_slices_a_block(size):
    given = [batch(count, size, first) for count, first in [(64, 0), (64, 64), (8, 128)]]
    buffer = BlockOutputBuffer(OutputBlockSizeOption.of(target_max_block_size=1))
    blocks = []
    for one in given:
        buffer.add_block(as_one_row(one))
        blocks.extend(buffer.iter_ready_blocks())
    assert len(blocks) == 3
    for block, expected in zip(blocks, given, strict=True):
        found = list(cut([block], 8))
        for name, column in expected.items():
            np.testing.assert_array_equal(np.concatenate([one[name] for one in found]), column)
            assert found[0][name].dtype == column.dtype


@pytest.mark.parametrize(
    "block",
    [
        as_one_row(batch(20, 8)),
        pa.concat_tables([as_one_row(batch(8, 8)), as_one_row(batch(8, 8))]),
        as_one_row(batch(16, 8) | {"sample": np.arange(8)}),
    ],
    ids=["no whole batches", "two joined", "columns of unlike length"],
)
def test_a_block_of_another_size_is_refused(block):
    with pytest.raises(RuntimeError, match="multiple of 8 images"):
        list(cut([block], 8))


def test_the_limit_of_bad_rows_counts_distinct_ones_of_all_processes(monkeypatch):
    stored: set[bytes] = set()  # in the cluster's key-value store
    monkeypatch.setattr(ray_datasets, "_internal_kv_put", lambda key, _: stored.add(key))
    monkeypatch.setattr(
        ray_datasets,
        "_internal_kv_list",
        lambda prefix: [k for k in stored if k.startswith(prefix)],
    )
    one, other = (BadRowLimit("stream", 1000, 0.003) for _ in range(2))
    one.note({1: "one", 2: "two"})
    other.note({2: "two", 3: "three"})
    one.note({1: "one"})
    with pytest.raises(ValueError, match=r"4 of 1000 images .* one of them is four"):
        other.note({4: "four"})
