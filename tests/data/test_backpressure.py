"""Training slower than data: reading waits, and what waits fits the recipe's share."""

import time
from typing import Any

import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

from vit_ray.data.batches import StreamSpec
from vit_ray.data.images import Augmentation
from vit_ray.data.manifest import Manifest
from vit_ray.data.stream import split_stream, training_stream


@ray.remote(num_cpus=0)
def consume_slowly(shard: Any, pause_s: float) -> tuple[list[int], float, int]:
    """Samples, the most that the object store grew by in MiB, and bytes spilled, while dawdling."""
    samples: list[int] = []
    most, before = 0.0, store_stats()
    for batch in shard.iter_batches(batch_size=20, prefetch_batches=1):
        samples += batch["sample"].tolist()
        time.sleep(pause_s)
        grown = store_stats().object_store_bytes_used - before.object_store_bytes_used
        most = max(most, grown / 2**20)
    return samples, most, store_stats().spilled_bytes_total - before.spilled_bytes_total


def store_stats() -> Any:
    """The node's object store, as `ray memory` shows it."""
    address = ray.get_runtime_context().gcs_address
    return get_memory_info_reply(get_state_from_address(address)).store_stats


def test_a_slow_consumer_holds_reading_back_and_gets_everything(dataset: Manifest) -> None:
    """1,500 rows of 144 KiB are 211 MiB; the stream may hold 48 MiB at a time."""
    spec = StreamSpec(
        dataset,
        Augmentation("inception_crop", 220),
        num_cpus=0.5,
        block_rows=20,
        task_rows=60,
        object_store_mib=48,
    )
    stream = training_stream(spec, world_size=1, micro_batch_size=20, start=0, stop=1500)
    (shard,) = split_stream(stream, 1)
    samples, most_mib, spilled = ray.get(consume_slowly.remote(shard, 0.05))
    assert sorted(samples) == sorted(list(range(300)) * 5)
    assert most_mib < 100
    assert spilled == 0
