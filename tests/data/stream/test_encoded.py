"""Images that travel encoded: the same order, crops and limits as those that the host decodes."""

from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from tests.data.damage import broken_copy, damage
from tests.data.stream.reading import Batches, read_evaluation, read_training, streams_of
from vit_ray.data.format.manifest import Manifest
from vit_ray.data.images.crops import Augmentation
from vit_ray.data.stream.batches import StreamSpec
from vit_ray.data.stream.stream_server import RankStreams
from vit_ray.worker.decode.device_decode import DeviceDecoder

pytestmark = pytest.mark.usefixtures("ray_cluster")
BATCH = 24


@pytest.fixture
def spec(dataset: Manifest) -> StreamSpec:
    crop = Augmentation("inception_crop", size=80)
    return StreamSpec(
        dataset, crop, seed=11, num_cpus=0.5, block_rows=24, task_rows=96, decode="device"
    )


@ray.remote(num_cpus=0)
def take_decoded(streams: RankStreams, size: int, *span: int) -> Batches:
    """What a training worker does with its part of the stream."""
    torch.set_num_threads(1)
    decoder = DeviceDecoder(torch.device("cpu"), (size, size), span[0], note_bad=print)
    blocks = streams.training_blocks(*span)
    return [
        {name: np.array(column) for name, column in batch.items()}
        for batch in decoder.batches(blocks)
    ]


def on_device(
    spec: StreamSpec, world_size: int, share: int, start: int, stop: int
) -> list[Batches]:
    """What each rank gets, in order."""
    ranks = streams_of(spec, world_size)
    return ray.get([take_decoded.remote(streams, 80, share, start, stop) for streams in ranks])


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("world_size", "blocks_of_tasks"), [(1, 96), (2, 96), (4, 24)])
def test_it_is_the_stream_that_the_host_decodes(
    spec: StreamSpec, world_size: int, blocks_of_tasks: int
) -> None:
    share, span = 2 * BATCH // world_size, {"start": 2 * BATCH, "stop": 16 * BATCH}
    spec = StreamSpec(**{**vars(spec), "task_rows": blocks_of_tasks})
    host = StreamSpec(**{**vars(spec), "decode": "host"})
    expected = read_training(host, world_size, share, **span)
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
    (expected,) = read_training(StreamSpec(**tolerant | {"decode": "host"}), 1, BATCH, **span)
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
    (batches,) = read_evaluation(spec, 1, 100)
    assert batches[0]["image"].shape == (100, 80, 80, 3)
