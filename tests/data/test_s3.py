"""Everything that touches an object store, against a real server with injected faults."""

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

from tests.data.convert.archives import add
from tests.data.converting import convert, run_in_this_process, units
from tests.data.pictures import jpeg
from tests.data.s3_server import (
    SECRET_KEY,
    FaultProxy,
    forget_clients,
    s3_environment,
    serve_s3,
    this_process_uses,
    timeout,
)
from vit_ray.data import open_dataset
from vit_ray.data.boxes import Augmentation
from vit_ray.data.convert.sources import rows_of
from vit_ray.data.dataset import Manifest
from vit_ray.data.order import Partition
from vit_ray.data.shards import Cache, RowGroupReader
from vit_ray.data.stream.batches import BatchReader, StreamJob, StreamSpec
from vit_ray.launch.dataset import open_dataset as dataset_in_python
from vit_ray.storage import locate


@pytest.fixture(scope="module")
def buckets(tmp_path_factory: pytest.TempPathFactory, dataset: Manifest) -> Path:
    """Buckets as folders: `sets/small` holds the data set, `sets/holed` lacks a shard of it,
    `sources` holds images in every layout."""
    folder = tmp_path_factory.mktemp("buckets")
    for name in ("empty", "converted", "sets/small", "sets/holed"):
        (folder / name).mkdir(parents=True)
    write_sources(folder / "sources")
    for file in Path(dataset.root).iterdir():
        (folder / "sets" / "small" / file.name).write_bytes(file.read_bytes())
        if file.name != dataset.files[0].path:
            (folder / "sets" / "holed" / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="module")
def proxy(buckets: Path) -> Iterator[FaultProxy]:
    with serve_s3(buckets) as port, FaultProxy(port) as proxy:
        yield proxy


@pytest.fixture
def s3(proxy: FaultProxy) -> Iterator[FaultProxy]:
    proxy.faults.set("", 0)
    with this_process_uses(proxy.port):
        yield proxy


def batch_of(manifest: Manifest, cache: Cache | None = None) -> dict[str, Any]:
    """The first 100 rows of an epoch, read without Ray."""
    spec = StreamSpec(manifest, Augmentation(size=16), cache=cache)
    job = StreamJob(spec, Partition(1, 50), 0, is_training=True)
    return BatchReader(job).batch(0, 0, 100)[0]


def test_forked_workers_of_a_loader_have_connections_of_their_own(s3, dataset):
    remote = dataset_in_python("s3://sets/small")
    expected = list(remote.iter_batches(10, 16))  # the parent has connections when it forks
    loader = DataLoader(
        remote.torch_dataset(10, 16), batch_size=None, num_workers=3,
        multiprocessing_context="fork", timeout=60,
    )  # fmt: skip
    for batch, other in zip(loader, expected, strict=True):
        np.testing.assert_array_equal(batch["image"].numpy(), other["image"])


def test_a_later_epoch_asks_the_store_for_nothing_that_the_node_keeps(s3, dataset, tmp_path):
    remote = open_dataset("s3://sets/small")
    cache = Cache(str(tmp_path / "cache"), 0)
    first = batch_of(remote, cache)
    s3.faults.set("403", remaining=1000, path="part-")
    np.testing.assert_array_equal(batch_of(remote, cache)["image"], first["image"])
    assert s3.faults.injected == []


def test_a_row_group_takes_three_requests_and_the_next_ones_of_its_shard_one(s3, dataset):
    remote = open_dataset("s3://sets/small")
    assert (remote.file_index[:2] == 0).all()
    reader = RowGroupReader(remote)
    counts = []
    for group in (0, 1):
        s3.faults.set("none", 0, path="part-")
        reader.read(group)
        counts.append(len(s3.faults.requests))
    assert counts == [3, 1]


def test_what_is_truly_gone_is_named(s3):
    with pytest.raises(ValueError, match="no data set at 's3://empty/nothing'"):
        open_dataset("s3://empty/nothing")
    remote = open_dataset("s3://sets/holed")
    with pytest.raises(ValueError, match=rf"{remote.files[0].path}' is missing"):
        RowGroupReader(remote).read(0)


def test_a_store_that_stays_away_is_not_called_damaged_data(s3, monkeypatch):
    """So that a run is tried again, and does not end as it does for data that are no good."""
    remote = open_dataset("s3://sets/small")
    monkeypatch.setattr(locate("s3://sets").filesystem, "retries", 3)
    s3.faults.set("503", remaining=1000)
    with pytest.raises(OSError, match=rf"{remote.files[0].path}' .* storage does not answer"):
        RowGroupReader(remote).read(0)


def test_a_wrong_key_fails_soon_and_clearly(s3, monkeypatch):
    remote = open_dataset("s3://sets/small")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "aX9-not-the-secret")
    forget_clients()
    with pytest.raises(PermissionError, match=r"s3://sets: .*check AWS_ACCESS_KEY_ID") as caught:
        open_dataset("s3://sets/small")
    assert "aX9" not in str(caught.value)
    with pytest.raises(ValueError, match=r"part-.* cannot be read .*; check the credentials"):
        RowGroupReader(remote).read(0)


def write_sources(folder: Path) -> None:
    """Four images in a parquet file, and a tar shard of many small files."""
    structs = [{"bytes": jpeg(i), "path": f"{i}.jpg"} for i in range(4)]
    (folder / "hub").mkdir(parents=True)
    table = pa.table({"image": structs, "label": [0, 1, 0, 1]})
    pq.write_table(table, folder / "hub" / "train.parquet", row_group_size=3)
    with tarfile.open(folder / "many.tar", "w") as tar:
        for i in range(300):
            add(tar, f"{i}.jpg", b"image")
            add(tar, f"{i}.cls", b"1")


def test_parquet_is_read_in_place_on_s3_and_a_new_object_of_equal_length_is_seen(
    s3, buckets, tmp_path, monkeypatch
):
    run_in_this_process(monkeypatch)
    convert("s3://sources/hub", tmp_path / "set", in_place=True)
    manifest = open_dataset(str(tmp_path / "set"))
    s3.faults.set("503", remaining=3, path="train.parquet", every=2)
    reader = RowGroupReader(manifest)
    images = [reader.read(g).image(row) for g in (0, 1) for row in range(int(manifest.rows[g]))]
    assert images == [jpeg(i) for i in range(4)]
    assert s3.faults.injected
    file = buckets / "sources" / "hub" / "train.parquet"
    content = file.read_bytes()
    try:
        file.write_bytes(content.replace(jpeg(1)[:-20], jpeg(1)[:-21] + b"x"))
        with pytest.raises(
            ValueError, match=r"train.parquet has changed since the data set was made"
        ):
            RowGroupReader(manifest).read(0)
    finally:
        file.write_bytes(content)


def test_a_tar_shard_is_indexed_in_few_requests(s3, tmp_path):
    """600 files of a few bytes: 300 KiB of headers, which tarfile reads one by one."""
    s3.faults.set("none", remaining=1, path="many.tar", every=10**6)
    (unit,) = units("s3://sources/many.tar")
    assert len(list(rows_of(unit))) == 300
    assert s3.faults.seen < 15


SCRIPT = """
import json, sys
import ray
from vit_ray.data import open_dataset
from tests.data.converting import convert, run_in_this_process, units
from vit_ray.data.crops import Augmentation
from vit_ray.data.stream.batches import StreamSpec
from vit_ray.data.stream.stream_server import RankStreams, StreamServer

environment = {"env_vars": json.loads(sys.argv[2])}
ray.init(address=sys.argv[1], runtime_env=environment, log_to_driver=False)
report = convert(sys.argv[3], "s3://converted/set", rows_per_row_group=16, shard_mib=0.1, seed=3)
spec = StreamSpec(open_dataset("s3://converted/set"), Augmentation(size=16), seed=1, num_cpus=0.5)
server = ray.remote(StreamServer).options(num_cpus=0, max_concurrency=4)
server = server.remote("group", {"train": spec}, range(1), 1)
batches = RankStreams(server, 0).training_batches(50, 0, 300)
samples = [int(s) for batch in batches for s in batch["sample"]]
print(json.dumps({"fingerprint": report.fingerprint, "samples": sorted(samples)}))
"""


@pytest.mark.slow
def test_convert_to_s3_and_stream_from_it_under_faults(
    ray_cluster, proxy, buckets, image_folder, dataset
):
    """A driver of its own, whose workers get the credentials from their environment."""
    proxy.faults.set("503", remaining=12, every=7)
    variables = {**s3_environment(proxy.port), **timeout(20)}
    command = [sys.executable, "-c", SCRIPT, ray_cluster.address, json.dumps(variables)]
    done = subprocess.run(
        [*command, str(image_folder)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["samples"] == list(range(300))
    assert result["fingerprint"] == dataset.fingerprint
    assert proxy.faults.remaining == 0
    for file in (buckets / "converted").rglob("*"):
        assert not file.is_file() or SECRET_KEY.encode() not in file.read_bytes()
    assert not [file for file in (buckets / "converted").rglob("_staging/*") if file.is_file()]
