"""What a stream server reads, and what it keeps of evaluations: images are decoded once."""

import uuid
from functools import partial
from typing import Any

import numpy as np
import pytest
import ray

from tests.data.small_sets import samples_at
from vit_ray.data.boxes import Augmentation
from vit_ray.data.order import Order, ShuffleWindow
from vit_ray.data.stream import ray_datasets, stream_server
from vit_ray.data.stream.batches import StreamSpec
from vit_ray.data.stream.ray_datasets import HostRanks, segments_of
from vit_ray.data.stream.stream_server import Pass, StreamServer, _own_resources, blocks_of

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.mark.parametrize(("ranks", "is_near"), [(range(1), True), (range(2), False)])
def test_tasks_of_a_server_of_several_run_on_its_own_host_first(
    dataset, ranks, is_near, monkeypatch
):
    tiny = Augmentation("resize", size=8, flip=False)
    context = ray.data.DataContext.get_current()
    monkeypatch.setattr(context, "scheduling_strategy", context.scheduling_strategy)
    given: list[tuple[float, float]] = []
    monkeypatch.setattr(stream_server, "give_datasets", lambda *share: given.append(share))
    name = uuid.uuid4().hex
    StreamServer(name, {}, ranks, 2, cpus_per_rank=1.5)
    assert given == [(len(ranks) / 2, 3.0)]
    readers = HostRanks(name, ranks, 2)
    segment = next(
        segments_of(StreamSpec(dataset, tiny), readers, batch_size=12, start=0, stop=240)
    )
    strategy = segment.dataset._logical_plan.dag.ray_remote_args["scheduling_strategy"]
    node = ray.get_runtime_context().get_node_id()
    assert (getattr(strategy, "node_id", None) == node) == is_near
    assert is_near or strategy == "SPREAD"


def test_a_run_of_many_segments_is_one_run_by_one_order_that_is_drawn_once(dataset, monkeypatch):
    """Of two epochs, as for a data set of many row groups."""
    monkeypatch.setattr(ray_datasets, "LEAST_SHARED", 0)
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
    expected = samples_at(order, 0, 20 * 24).reshape(20, 24)
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


def server_of(spec: StreamSpec, **options: bool) -> StreamServer:
    return StreamServer(uuid.uuid4().hex, {"eval": spec}, range(1), 1, **options)


def samples_of(server: StreamServer, number: int = 0, size: int = 50) -> np.ndarray:
    """Sample numbers of an evaluation by one rank."""
    one = Pass("eval", number, size)
    blocks = []
    while found := server.next_block(one, 0, len(blocks)):
        blocks.append(ray.get(found[0]).to_pydict()["sample"])
    return np.concatenate([np.ravel(block) for block in blocks])


def test_what_is_kept_is_a_share_of_the_store_of_its_own_node(monkeypatch):
    (node,) = ray.nodes()
    own = node["Resources"]["object_store_memory"]
    larger = {"object_store_memory": 100 * own}
    nodes = [{**node, "NodeID": "another", "Resources": larger}, node]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert _own_resources()["object_store_memory"] == pytest.approx(own)


def test_evaluations_of_one_start_of_the_workers_decode_their_images_once(
    dataset, read, monkeypatch
):
    crop = Augmentation("resize", size=16, flip=False)
    spec = StreamSpec(dataset, crop, num_cpus=0.5)
    images = partial(samples_of, server_of(spec))
    first = images()
    for number in (1, 2):
        np.testing.assert_array_equal(images(number), first)
        assert len(read) == 1
    # With a node that has left or come, blocks may have gone.
    nodes = [*ray.nodes(), {**ray.nodes()[0], "NodeID": "another"}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    for number in (5, 6):
        np.testing.assert_array_equal(images(number), first)
        assert len(read) == 2
    nodes[1] = {**nodes[1], "Alive": False}
    np.testing.assert_array_equal(images(7), first)
    assert len(read) == 2  # those of the first time are there
    np.testing.assert_array_equal(images(8, 25), first)
    assert len(read) == 3  # blocks of other batches


def test_evaluations_with_a_limit_of_the_object_store_keep_nothing(dataset, read):
    crop = Augmentation("resize", size=16, flip=False)
    server = server_of(StreamSpec(dataset, crop, num_cpus=0.5, object_store_mib=64))
    for number in range(2):
        assert len(samples_of(server, number)) == 300
    assert len(read) == 2
