import contextlib
import os
import signal
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

from tests.data.damage import broken_copy, damage
from tests.data.small_sets import samples_at
from tests.data.stream.reading import (
    Batches,
    read_evaluation,
    read_training,
    start_stream_server,
    streams_of,
)
from tests.recipes import recipe_with
from vit_ray.data.boxes import Augmentation
from vit_ray.data.dataset import Manifest
from vit_ray.data.order import Order, Partition, ShuffleWindow
from vit_ray.data.stream import ray_datasets, stream_server
from vit_ray.data.stream.batches import StreamSpec
from vit_ray.data.stream.ray_datasets import segments_of
from vit_ray.data.stream.stream_server import (
    Pass,
    RankStreams,
    StreamLostError,
    StreamServer,
    blocks_of,
)
from vit_ray.launch.resolved_run import resolve_run

pytestmark = pytest.mark.usefixtures("ray_cluster")
BATCH = 24
HOSTS = (range(2), range(2, 3), range(3, 4))
TINY = Augmentation("resize", size=8, flip=False)


@pytest.fixture(scope="module")
def spec(dataset: Manifest) -> StreamSpec:
    crop = Augmentation("inception_crop", size=16)
    window = ShuffleWindow(BATCH, 3)
    return StreamSpec(
        dataset, crop, seed=11, window=window, num_cpus=0.5, block_rows=12, task_rows=48
    )


def global_batches(
    spec: StreamSpec, world_size: int, start: int, stop: int, hosts: Sequence[range] = ()
) -> Batches:
    """Rows of each global batch, sorted by sample, joined over ranks."""
    micro = BATCH // world_size
    ranks = read_training(spec, world_size, micro, start, stop, hosts)
    steps = []
    for parts in zip(*ranks, strict=True):
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        ordered = np.argsort(joined["sample"], kind="stable")
        steps.append({name: column[ordered] for name, column in joined.items()})
    return steps


def assert_equal(left: Batches, right: Batches) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.fixture(scope="module")
def alone(spec: StreamSpec) -> Batches:
    """The first 15 global batches as one rank gets them."""
    return global_batches(spec, 1, 0, 15 * BATCH)


@pytest.mark.parametrize(
    ("world_size", "resumed_at", "hosts"), [(3, 0, ()), (4, 7, ()), (4, 2, HOSTS)]
)
def test_any_number_of_ranks_and_servers_gets_the_same_global_batches_from_any_step_on(
    spec, alone, world_size, resumed_at, hosts
):
    found = global_batches(spec, world_size, resumed_at * BATCH, 15 * BATCH, hosts)
    assert_equal(found, alone[resumed_at:])


class DeadlyAugmentation(Augmentation):
    """Delays some images by an amount that differs from run to run, and kills the first process
    that asks for it in the middle of a task, as a lost node would.
    """

    marker: Path

    @property
    def shape(self) -> tuple[int, int, int]:
        time.sleep(float(np.random.default_rng().choice([0, 0, 0, 0.3])))
        context = ray.get_runtime_context()
        if context.get_task_id() is not None and context.get_actor_id() is None:
            with contextlib.suppress(FileExistsError):
                self.marker.touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return super().shape


def test_delayed_tasks_and_a_killed_one_change_nothing(spec, alone, tmp_path):
    deadly = DeadlyAugmentation("inception_crop", 16)
    object.__setattr__(deadly, "marker", tmp_path / "killed")
    killing = StreamSpec(**{**vars(spec), "augmentation": deadly})
    assert_equal(global_batches(killing, 2, 0, 8 * BATCH), alone[:8])
    assert (tmp_path / "killed").exists()


def test_global_batches_are_those_of_the_order_and_keep_the_contract(spec, alone):
    assert [sorted(batch["sample"]) for batch in alone] == global_samples(spec, 0, 15)
    assert {name: (c.dtype, c.shape) for name, c in alone[0].items()} == {
        "image": (np.dtype(np.uint8), (BATCH, 16, 16, 3)),
        "labels": (np.dtype(np.int32), (BATCH, 1)),
        "sample": (np.dtype(np.int64), (BATCH,)),
    }


@pytest.mark.parametrize("hosts", [(), HOSTS], ids=["one server", "three"])
def test_evaluation_gives_every_image_once_with_its_label_and_pads_with_weight_zero(
    spec, alone, hosts
):
    """Three classes of pictures; the label of a sample is the same in both streams."""
    whole = StreamSpec(spec.manifest, Augmentation("center_crop", 16, resize=20, flip=False))
    ranks = read_evaluation(whole, 4, 32, hosts)
    assert [len(batches) for batches in ranks] == [3, 3, 3, 3]
    batches = [batch for rank in ranks for batch in rank]
    columns = ("sample", "weight", "labels")
    samples, weights, labels = (np.concatenate([b[name] for b in batches]) for name in columns)
    assert sorted(samples[weights == 1].tolist()) == list(range(300))
    assert len(samples) == 4 * 3 * 32
    assert set(samples[weights == 0].tolist()) == {-1}
    assert weights.dtype == np.float32
    label_of = dict(zip(samples.tolist(), labels[:, 0].tolist(), strict=True))
    assert np.bincount([label_of[sample] for sample in range(300)]).tolist() == [100] * 3
    for batch in alone:
        assert [label_of[s] for s in batch["sample"].tolist()] == batch["labels"][:, 0].tolist()


def global_samples(spec: StreamSpec, first: int, last: int) -> list[list[int]]:
    """Samples of global batches [first, last), each in ascending order."""
    order = Order(spec.manifest.rows, spec.seed, window=spec.window)
    return [sorted(samples_at(order, k * BATCH, (k + 1) * BATCH)) for k in range(first, last)]


def test_streams_are_read_anew_and_an_evaluation_in_mid_training_disturbs_neither(spec):
    (streams,) = streams_of(spec, 1)
    broken_off = streams.training_batches(BATCH, 0, 1000 * BATCH)
    next(broken_off)
    for _ in range(2):
        training = streams.training_batches(BATCH, 0, 6 * BATCH)
        samples = [sorted(next(training)["sample"])]
        evaluated = streams.evaluation_batches("eval", 100)
        assert [len(batch["sample"]) for batch in evaluated] == [100, 100, 100]
        samples += [sorted(batch["sample"]) for batch in training]
        assert samples == global_samples(spec, 0, 6)
    with pytest.raises(StreamLostError, match=r"closed before its end|is not read here"):
        list(broken_off)


def test_a_pass_that_its_rank_leaves_is_read_no_further_and_a_dead_server_is_an_error(spec):
    server = start_stream_server({"train": spec, "eval": spec}, range(1), 1)
    left = RankStreams(server, 0).evaluation_batches("eval", 12)
    next(left)
    left.close()  # type: ignore[attr-defined]
    with pytest.raises(StreamLostError):
        ray.get(server.next_block.remote(Pass("eval", 0, 12), 0, 2))
    training = RankStreams(server, 0).training_batches(BATCH, 0, 1000 * BATCH)
    next(training)
    ray.kill(server)
    with pytest.raises(ray.exceptions.RayActorError):
        list(training)


def test_segments_of_two_epochs_are_one_run_in_the_order_of_the_seed(dataset, monkeypatch):
    """Drawn once, as for a data set of many row groups."""
    monkeypatch.setattr(ray_datasets, "LEAST_SHARED", 0)
    monkeypatch.setattr(ray_datasets, "_SEGMENT_TASKS", 3)
    window = ShuffleWindow(BATCH, 3)
    spec = StreamSpec(dataset, TINY, seed=11, window=window, num_cpus=0.5, task_rows=48)
    blocks = segments_of("many-segments", spec, range(2), Partition(2, 12), 0, 20 * BATCH)
    segments = list(blocks)
    assert len(segments) > 2
    found: list[list[int]] = [[], []]
    for one in blocks_of(iter(segments)):
        found[one.rank] += np.ravel(ray.get(one.block).to_pydict()["sample"]).tolist()
    got = np.array(found).reshape(2, 20, 12).transpose(1, 0, 2).ravel()
    order = Order(dataset.rows, 11, window=window)
    np.testing.assert_array_equal(got, samples_at(order, 0, 20 * BATCH))


def test_training_goes_on_below_the_limit_of_bad_rows_and_stops_above_it(dataset, tmp_path):
    """Rows that are met again in the second epoch count once."""
    manifest, _ = broken_copy(dataset, tmp_path)
    damage(manifest, group=2, rows=[5])
    damage(manifest, group=13, rows=[9])  # read by another task, 200 positions before
    tolerant = StreamSpec(manifest, TINY, max_bad_fraction=0.01, num_cpus=0.5, task_rows=25)
    (batches,) = read_training(tolerant, 1, 50, start=0, stop=600)
    assert sum(len(batch["sample"]) for batch in batches) == 600
    strict = replace(tolerant, max_bad_fraction=0.004)
    with pytest.raises(Exception, match=r"2 of 300 images cannot be decoded, above"):
        read_training(strict, 1, 50, start=0, stop=300)


def samples_of(server: StreamServer, number: int, size: int) -> list[int]:
    """Sample numbers of an evaluation by one rank."""
    one, blocks = Pass("eval", number, size), []
    while found := server.next_block(one, 0, len(blocks)):
        blocks.append(np.ravel(ray.get(found[0]).to_pydict()["sample"]))
    return np.concatenate(blocks).tolist()


def test_evaluations_on_the_same_nodes_decode_their_images_once(dataset, monkeypatch):
    """Unless the object store has a limit, or the blocks are not small."""
    readings: list[int] = []

    def noted(*options: Any) -> Any:
        readings.append(1)
        return segments_of(*options)

    monkeypatch.setattr(stream_server, "segments_of", noted)
    spec = StreamSpec(dataset, TINY, num_cpus=0.5)
    limited, never_kept = replace(spec, object_store_mib=64), [1, 2, 3]
    # The images have 300 x 192 bytes.
    for one, limit, expected in (
        (limited, 1 << 20, never_kept),
        (spec, 10_000, never_kept),
        (spec, 1 << 20, [1, 1, 2]),
    ):
        monkeypatch.setattr(stream_server, "_KEPT_BYTES", limit)
        readings.clear()
        server = StreamServer(uuid.uuid4().hex, {"eval": one}, range(1), 1)
        for number, size in enumerate((50, 50, 25)):  # blocks of other batches are read anew
            assert samples_of(server, number, size) == list(range(300))
            assert len(readings) == expected[number]
    nodes = [*ray.nodes(), {**ray.nodes()[0], "NodeID": "another"}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)  # since one has come, blocks may have gone
    for number in (3, 4):
        assert samples_of(server, number, 25) == list(range(300))
        assert len(readings) == 3


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
def test_a_slow_consumer_holds_reading_back_and_gets_everything(dataset, tmp_path):
    """The recipe lets 24 MiB wait; without that, 150 MiB did."""
    spec = slow_stream(dataset, 24, tmp_path)
    samples, most_mib, spilled = ray.get(consume_slowly.remote(*streams_of(spec, 1)))
    assert sorted(samples) == sorted(list(range(300)) * 5)
    # Beside what waits: three blocks that the consumer has, and what it used in the last second,
    # because Ray frees objects once a second.
    assert most_mib < 24 + (3 + 1 / PAUSE_S) * 2.9
    assert spilled == 0


def test_a_share_below_one_block_does_not_stop_the_stream(dataset, tmp_path):
    spec = slow_stream(dataset, 1, tmp_path)
    ranks = read_training(spec, 4, 5, start=0, stop=100)
    samples = [int(s) for batches in ranks for batch in batches for s in batch["sample"]]
    assert len(samples) == len({*samples}) == 100
