"""What a stream server reads, and what it keeps of evaluations: images are decoded once."""

import uuid
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import ray
from ray.data._internal import stats

from vit_ray.data.format.manifest import Manifest
from vit_ray.data.images.crops import Augmentation
from vit_ray.data.order.shuffle import Order, ShuffleWindow
from vit_ray.data.stream import ray_datasets, stream_server
from vit_ray.data.stream.batches import LAG_SHARE, StreamSpec
from vit_ray.data.stream.ray_datasets import HostRanks, segments_of
from vit_ray.data.stream.shared_blocks import StreamLostError, blocks_of
from vit_ray.data.stream.stream_server import Pass, PassName, StreamServer, _own_resources

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.mark.parametrize(("ranks", "is_near"), [(range(1), True), (range(2), False)])
def test_tasks_of_a_server_of_several_run_on_its_own_host_first(
    dataset: Manifest, ranks: range, is_near: bool
) -> None:
    tiny = Augmentation("resize", size=8, flip=False)
    readers = HostRanks(uuid.uuid4().hex, ranks, 2)
    segment = next(
        segments_of(StreamSpec(dataset, tiny), readers, batch_size=12, start=0, stop=240)
    )
    strategy = segment.dataset._logical_plan.dag.ray_remote_args["scheduling_strategy"]
    node = ray.get_runtime_context().get_node_id()
    assert (getattr(strategy, "node_id", None) == node) == is_near
    assert is_near or strategy == "SPREAD"
    assert ray.data.DataContext.get_current().scheduling_strategy == "SPREAD"


def test_a_run_of_many_segments_is_one_run(
    dataset: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_datasets, "_SEGMENT_TASKS", 3)
    window = ShuffleWindow(24, 3)
    tiny = Augmentation("resize", size=8, flip=False)
    spec = StreamSpec(dataset, tiny, seed=11, window=window, num_cpus=0.5, task_rows=96)
    readers = HostRanks("many-segments", range(2), 2)
    segments = list(segments_of(spec, readers, batch_size=12, start=0, stop=20 * 24))
    assert len(segments) > 2
    found: list[list[int]] = [[], []]
    for one in blocks_of(iter(segments)):
        found[one.rank] += np.ravel(ray.get(one.block).to_pydict()["sample"]).tolist()
    got = np.array(found).reshape(2, 20, 12).transpose(1, 0, 2).reshape(20, 24)
    order = Order(dataset.rows, 11, window=window)
    expected = order.samples_at(0, 20 * 24).reshape(20, 24)
    np.testing.assert_array_equal(got, expected)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where each reading of a stream began."""
    starts: list[int] = []
    segments_of = stream_server.segments_of

    def noted(spec: StreamSpec, *options: Any) -> Any:
        starts.append(options[2])
        return segments_of(spec, *options)

    monkeypatch.setattr(stream_server, "segments_of", noted)
    return starts


def samples_of(server: StreamServer, spec: StreamSpec, group: str, number: int = 0) -> np.ndarray:
    """Sample numbers of an evaluation by one rank."""
    one = Pass(PassName(group, "eval", number), ray.put({"eval": spec}), range(1), 1, 50)
    blocks = []
    while found := server.next_block(one, 0, len(blocks)):
        blocks.append(ray.get(found[0]).to_pydict()["sample"])
    return np.concatenate([np.ravel(block) for block in blocks])


def test_what_is_kept_is_a_share_of_the_store_of_its_own_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (node,) = ray.nodes()
    own = node["Resources"]["object_store_memory"]
    larger = {"object_store_memory": 100 * own}
    nodes = [{**node, "NodeID": "another", "Resources": larger}, node]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert _own_resources()["object_store_memory"] == pytest.approx(own)


def test_where_nobody_sees_statistics_no_process_is_started_for_them(
    dataset: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = MagicMock()
    monkeypatch.setattr(stats, "get_or_create_stats_actor", asked)
    for name, method in vars(stats._StatsManager).items():
        if isinstance(method, staticmethod):
            monkeypatch.setattr(stats._StatsManager, name, method)  # and back after the test
    spec = StreamSpec(dataset, Augmentation("resize", size=8, flip=False), num_cpus=0.5)
    for keeps_statistics in (True, False):
        asked.reset_mock()
        server = StreamServer(keeps_statistics=keeps_statistics, warms_up=False)
        assert len(samples_of(server, spec, uuid.uuid4().hex)) == 300
        assert asked.called == keeps_statistics


def test_trainings_of_one_pool_share_the_decoded_images_of_an_evaluation(
    dataset: Manifest, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    crop = Augmentation("resize", size=16, flip=False)
    spec = StreamSpec(dataset, crop, num_cpus=0.5)
    workers, images = uuid.uuid4().hex, partial(samples_of, StreamServer())
    first = images(spec, f"{workers} 0")
    for group, number in ((f"{workers} 0", 1), (f"{workers} 1", 0)):
        np.testing.assert_array_equal(images(spec, group, number), first)
        assert len(read) == 1
    # With a node that has left or come, blocks may have gone.
    nodes = [*ray.nodes(), {**ray.nodes()[0], "NodeID": "another"}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    for number in (5, 6):
        np.testing.assert_array_equal(images(spec, f"{workers} {number}"), first)
        assert len(read) == 2
    nodes[1] = {**nodes[1], "Alive": False}
    np.testing.assert_array_equal(images(spec, f"{workers} 7"), first)
    assert len(read) == 2  # those of the first time are there
    changes = (
        (replace(spec, augmentation=replace(crop, size=8)), f"{workers} 2"),
        (spec, "workers-started-anew 0"),
        (replace(spec, object_store_mib=64), f"{workers} 3"),
        (replace(spec, object_store_mib=64), f"{workers} 4"),
    )
    for count, (changed, group) in enumerate(changes, 3):
        np.testing.assert_array_equal(images(changed, group), first)
        assert len(read) == count


def shared_pass(spec: StreamSpec, training: str, start: int = 0, **how: Any) -> Pass:
    """Of one rank, 240 images in batches of 12."""
    name = PassName(f"{training}-workers 0", "train", 0, training)
    specs = ray.put({"train": spec})
    return replace(Pass(name, specs, range(1), 1, 12, start, start + 240, num_sharing=2), **how)


def training_samples(server: StreamServer, one: Pass, most: int = 1000) -> list[int]:
    blocks: list[Any] = []
    while len(blocks) < most and (found := server.next_block(one, 0, len(blocks))):
        blocks.append(ray.get(found[0]).to_pydict()["sample"])
    return [int(sample) for one in blocks for sample in np.ravel(one)]


def test_trainings_whose_streams_are_equal_are_read_for_once_and_others_for_themselves(
    dataset: Manifest, read: list[int]
) -> None:
    tiny = Augmentation("resize", size=8, flip=False)
    spec = StreamSpec(dataset, tiny, seed=11, window=ShuffleWindow(24, 3), num_cpus=0.5)
    order, server = Order(dataset.rows, 11, window=ShuffleWindow(24, 3)), StreamServer()
    first, second = shared_pass(spec, "first"), shared_pass(spec, "second")
    expected = order.samples_at(0, 240).tolist()
    begun = training_samples(server, first, 2)
    assert training_samples(server, second) == expected
    rest = []
    while found := server.next_block(first.name, 0, 2 + len(rest)):
        rest.append(ray.get(found[0]).to_pydict()["sample"])
    assert begun + np.concatenate(rest, axis=None).tolist() == expected
    assert read == [0]
    # A group that died reads from its checkpoint on, and has left the first reading.
    restarted = first.name._replace(group="first-workers-again 1")
    again = shared_pass(spec, "first", 120, name=restarted, stop=360)
    assert training_samples(server, again) == order.samples_at(120, 360).tolist()
    assert read == [0, 120]
    with pytest.raises(StreamLostError, match="is not read here"):
        server.next_block(first.name, 0, 1)
    # What differs in anything reads by itself.
    others = (
        shared_pass(replace(spec, seed=12), "seed"),
        shared_pass(replace(spec, augmentation=replace(tiny, size=9)), "size"),
        shared_pass(replace(spec, window=None), "window"),
        shared_pass(spec, "batch", batch_size_per_rank=24),
        shared_pass(spec, "world", world_size=2),
        shared_pass(spec, "start", 24),
        shared_pass(spec, "length", stop=480),
        shared_pass(spec, "alone", num_sharing=0),
    )
    for number, one in enumerate(others, 3):
        assert training_samples(server, one)
        assert len(read) == number
    server.close()
    assert not any(one.can_be_joined for one in server._shared.values())


def test_nobody_reads_for_a_training_that_has_ended_or_a_group_that_has_failed(
    dataset: Manifest,
) -> None:
    spec = StreamSpec(dataset, Augmentation("resize", size=8, flip=False), num_cpus=0.5)
    server = StreamServer()
    trainings = [shared_pass(spec, name) for name in ("one", "two", "three")]
    for each in trainings:
        training_samples(server, each, 1)
    (reading,) = server._shared.values()
    server.close(trainings[0].name.group)
    server.close("two")
    assert len(reading._readers) == 1
    for name in (trainings[0].name, trainings[1].name, trainings[1]):
        with pytest.raises(StreamLostError, match="is not read here"):
            server.next_block(name, 0, 1)
    again = replace(trainings[0], name=trainings[0].name._replace(group="one-workers-again 1"))
    training_samples(server, again, 1)  # it may still be joined
    assert len(reading._readers) == 2
    for left in ("one", "three"):
        server.close(left)
    assert not reading._readers
    assert not reading.can_be_joined


def test_a_training_whose_group_failed_takes_none_of_the_blocks_that_may_be_lost(
    dataset: Manifest, read: list[int]
) -> None:
    spec = StreamSpec(dataset, Augmentation("resize", size=8, flip=False), num_cpus=0.5)
    specs, server = ray.put({"eval": spec}), StreamServer()

    def evaluate(training: str, group: str, number: int = 0) -> None:
        name = PassName(group, "eval", number, training)
        one = Pass(name, specs, range(1), 1, 50, num_sharing=2)
        assert len(training_samples(server, one)) == 300

    evaluate("one", "one-workers 0")
    evaluate("two", "two-workers 0")
    evaluate("one", "one-workers 0", 1)
    assert len(read) == 1
    server.close("one-workers 0", has_failed=True)
    evaluate("one", "one-workers-again 1")
    assert len(read) == 2
    evaluate("two", "two-workers 0", 1)
    assert len(read) == 2
    server.close("two-workers 0")  # its end
    evaluate("two", "two-workers 1")
    assert len(read) == 2


def test_all_that_trainings_are_behind_has_one_bound(dataset: Manifest) -> None:
    server, spec = StreamServer(), StreamSpec(dataset, Augmentation("resize", size=8, flip=False))
    bounds = []
    for seed in range(3):
        one = shared_pass(replace(spec, seed=seed, num_cpus=0.5), f"{seed}")
        training_samples(server, one, 1)
        bounds.append(server._open[one.name].reading._most_bytes())
    whole = LAG_SHARE * _own_resources()["object_store_memory"]
    assert bounds == pytest.approx([whole, whole / 2, whole / 3])
    training_samples(server, shared_pass(replace(spec, seed=0, num_cpus=0.5), "same"), 1)
    assert server._open[one.name].reading._most_bytes() == pytest.approx(whole / 3)
    small = shared_pass(replace(spec, seed=9, object_store_mib=1), "small")
    training_samples(server, small, 1)
    assert server._open[small.name].reading._most_bytes() == 1 << 20
    server.close()


def test_crops_of_a_function_that_has_no_name_can_be_shared(dataset: Manifest) -> None:
    def darker(by: int) -> Any:
        return lambda crop, random: crop // by

    def content(own: Any) -> str:
        cut = Augmentation("resize", size=8, flip=False, own=own)
        return shared_pass(StreamSpec(dataset, cut), "one").content(StreamSpec(dataset, cut))

    assert content(darker(2)) != content(darker(3))


def test_only_a_training_that_begins_waits_for_those_that_begin_with_it(
    dataset: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected: list[int] = []
    reading = stream_server.Reading

    def noted(*arguments: Any, **options: Any) -> Any:
        expected.append(options["expected"])
        return reading(*arguments, **{**options, "expected": 1})

    monkeypatch.setattr(stream_server, "Reading", noted)
    spec = StreamSpec(dataset, Augmentation("resize", size=8, flip=False), num_cpus=0.5)
    server = StreamServer()
    for number in range(2):
        name = PassName("one-workers 0", "train", number, "one")
        training_samples(server, shared_pass(spec, "one", 120 * number, name=name), 1)
    evaluation = PassName("two-workers 0", "eval", 0, "two")
    specs = ray.put({"train": spec, "eval": spec})
    server.next_block(Pass(evaluation, specs, range(1), 1, 50, num_sharing=2), 0, 0)
    server._most_behind = 0.0
    training_samples(server, shared_pass(replace(spec, seed=1), "two"), 1)
    late = shared_pass(replace(spec, seed=1), "three")
    training_samples(server, late, 1)  # of those that began with it, by itself already
    monkeypatch.setattr(stream_server, "GATHER_S", 0.0)
    server.close()
    training_samples(server, replace(late, name=late.name._replace(training="four")), 1)
    wide = shared_pass(
        replace(spec, seed=2), "wide", ranks=range(3), world_size=3, num_sharing=9, stop=360
    )
    server._cpus_per_rank = 0.5
    training_samples(server, wide, 1)
    assert expected == [2, 1, 1, 2, 1, 2, 2]  # of the 4 CPUs 3 times 0.5 twice
