"""Training slower than data: reading waits, and what waits fits the recipe's share."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

from tests.data.stream.reading import read_training, streams_of
from tests.recipes import recipe_with
from vit_ray.data.dataset import Manifest
from vit_ray.data.stream.batches import StreamSpec
from vit_ray.data.stream.stream_server import RankStreams
from vit_ray.launch.resolved_run import resolve_run

SLOW_BATCHES = 24
PAUSE_S = 0.25


@ray.remote(num_cpus=0)
def consume_slowly(streams: RankStreams) -> tuple[list[int], float, int]:
    """Samples, the most that the object store grew by in MiB, and bytes spilled, while dawdling."""
    samples: list[int] = []
    most, before = 0.0, store_stats()
    for i, batch in enumerate(streams.training_batches(20, 0, 1500)):
        samples += batch["sample"].tolist()
        if i < SLOW_BATCHES:
            time.sleep(PAUSE_S)
            grown = store_stats().object_store_bytes_used - before.object_store_bytes_used
            most = max(most, grown / 2**20)
    return samples, most, store_stats().spilled_bytes_total - before.spilled_bytes_total


def store_stats() -> Any:
    """The node's object store, as `ray memory` shows it."""
    address = ray.get_runtime_context().gcs_address
    return get_memory_info_reply(get_state_from_address(address)).store_stats


def slow_stream(dataset: Manifest, object_store_mib: int, tmp_path: Path) -> StreamSpec:
    """1,500 rows of 147 KiB are 216 MiB, in blocks of 20."""
    recipe = recipe_with(
        "slow",
        output=str(tmp_path),
        model={"name": "ViT-Ti/16", "image_size": 224},
        data={"train": dataset.path, "object_store_mib": object_store_mib, "cpus_per_task": 0.5},
        train={"global_batch_size": 20},
        optim={"steps": 75},
    )
    return replace(resolve_run(recipe).streams["train"], block_rows=20, task_rows=60)


@pytest.mark.slow
def test_a_slow_consumer_holds_reading_back_and_gets_everything(ray_cluster, dataset, tmp_path):
    """The recipe lets 24 MiB wait; without that, 150 MiB did."""
    spec = slow_stream(dataset, 24, tmp_path)
    samples, most_mib, spilled = ray.get(consume_slowly.remote(*streams_of(spec, 1)))
    assert sorted(samples) == sorted(list(range(300)) * 5)
    # Beside what waits: three blocks that the consumer has, and what it used in the last second,
    # because Ray frees objects once a second.
    assert most_mib < 24 + (3 + 1 / PAUSE_S) * 2.9
    assert spilled == 0


def test_a_share_below_one_block_does_not_stop_the_stream(ray_cluster, dataset, tmp_path):
    spec = slow_stream(dataset, 1, tmp_path)
    ranks = read_training(spec, 4, 5, start=0, stop=100)
    samples = [int(s) for batches in ranks for batch in batches for s in batch["sample"]]
    assert len(samples) == len({*samples}) == 100
