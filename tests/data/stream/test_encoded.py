"""Images that travel encoded: the same order, crops and limits as those that the host decodes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from numpy.typing import NDArray

from tests.data.format.test_manifest import broken_copy
from tests.data.stream.test_bad_rows import damage
from tests.data.stream.test_ray_datasets import consume
from vit_ray.data.format.manifest import Manifest
from vit_ray.data.images.crops import Augmentation
from vit_ray.data.stream.batches import StreamSpec
from vit_ray.data.stream.ray_datasets import evaluation_stream, split_stream, training_stream
from vit_ray.train.device_decode import DeviceDecoder

BATCH = 24
Batches = list[dict[str, NDArray[Any]]]


@pytest.fixture
def spec(dataset: Manifest) -> StreamSpec:
    crop = Augmentation("inception_crop", size=80)
    return StreamSpec(
        dataset, crop, seed=11, num_cpus=0.5, block_rows=24, task_rows=96, decode="device"
    )


def take_decoded(shard: Any, batch_size: int, size: int) -> Batches:
    """What a training worker does with its part of the stream."""
    torch.set_num_threads(1)
    decoder = DeviceDecoder(torch.device("cpu"), (size, size), batch_size, note_bad=print)
    blocks = shard.iter_batches(batch_size=None, batch_format="pyarrow")
    return [
        {name: np.array(column) for name, column in batch.items()}
        for batch in decoder.batches(blocks)
    ]


def on_device(spec: StreamSpec, world_size: int, batch_size: int, **span: int) -> list[Batches]:
    """What each rank gets, in order."""
    stream = training_stream(
        spec, world_size=world_size, batch_size_per_rank=BATCH // world_size, **span
    )
    take = ray.remote(num_cpus=0)(take_decoded)
    shards = split_stream(stream, world_size)
    return ray.get([take.remote(shard, batch_size, 80) for shard in shards])


@pytest.mark.parametrize(("world_size", "blocks_of_tasks"), [(1, 96), (2, 96), (4, 24)])
def test_it_is_the_stream_that_the_host_decodes(
    spec: StreamSpec, world_size: int, blocks_of_tasks: int
) -> None:
    share, span = 2 * BATCH // world_size, {"start": 2 * BATCH, "stop": 16 * BATCH}
    spec = StreamSpec(**{**vars(spec), "task_rows": blocks_of_tasks})
    host = training_stream(
        StreamSpec(**{**vars(spec), "decode": "host"}),
        world_size=world_size,
        batch_size_per_rank=BATCH // world_size,
        **span,
    )
    expected = consume(host, world_size, share)
    for rank, batches in enumerate(on_device(spec, world_size, share, **span)):
        assert len(batches) == 7
        for got, wanted in zip(batches, expected[rank], strict=True):
            np.testing.assert_array_equal(got["sample"], wanted["sample"])
            np.testing.assert_array_equal(got["labels"], wanted["labels"])
            # Both cut at full scale here; they round differently.
            assert abs(got["image"].astype(int) - wanted["image"]).max() <= 1


def test_a_row_that_goes_bad_in_storage_is_replaced_as_by_the_host(
    spec: StreamSpec, dataset: Manifest, tmp_path: Path
) -> None:
    manifest, _ = broken_copy(dataset, tmp_path)
    damage(manifest, group=2, rows=[5])
    tolerant = {**vars(spec), "manifest": manifest, "max_bad_fraction": 0.01}
    span = {"start": 0, "stop": 13 * BATCH}  # every row at least once
    host = training_stream(
        StreamSpec(**tolerant | {"decode": "host"}), world_size=1, batch_size_per_rank=BATCH, **span
    )
    (expected,) = consume(host, 1, BATCH)
    (batches,) = on_device(StreamSpec(**tolerant), 1, BATCH, **span)
    for got, wanted in zip(batches, expected, strict=True):
        np.testing.assert_array_equal(got["sample"], wanted["sample"])
    bad = int(manifest.first_samples[2]) + 5
    seen = {int(sample) for batch in batches for sample in batch["sample"]}
    assert seen == set(range(300)) - {bad}
    strict = StreamSpec(**tolerant | {"max_bad_fraction": 0.001})
    with pytest.raises(Exception, match=r"1 of 300 images cannot be decoded, above"):
        on_device(strict, 1, BATCH, **span)


def test_evaluation_images_are_decoded_by_the_host_all_the_same(spec: StreamSpec) -> None:
    (batches,) = consume(evaluation_stream(spec, world_size=1, batch_size=100), 1, 100)
    assert batches[0]["image"].shape == (100, 80, 80, 3)
