"""On a real S3 server with injected faults all is whole in the end, or what is wrong is told."""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

from tests.checkpoints.written import values, write_checkpoint
from tests.data.converting import convert, run_in_this_process, units
from tests.data.pictures import jpeg, write_class_folders
from tests.data.s3_server import (
    SECRET_KEY,
    FaultProxy,
    forget_clients,
    serve_s3,
    this_process_uses,
)
from tests.data.small_sets import SHARD, used_rows, write_rows
from vit_ray import lock
from vit_ray.checkpoints.run_checkpoints import checkpoint_to_resume
from vit_ray.data import open_dataset
from vit_ray.data.convert.shards import ConvertReport
from vit_ray.data.convert.sources import rows_of
from vit_ray.data.dataset import MANIFEST_FILE, Manifest
from vit_ray.data.shards import RowGroupReader
from vit_ray.launch.dataset import open_dataset as dataset_in_python
from vit_ray.storage import locate

QUICK = ["flip", "cut", "503", "500", "reset"]
STALLS = ["hang", "slow"]
"""Each costs the time-out of a request."""
LABELS = [(0,), (1, 2), (2,), (1,), (0,), (2, 0)]
of_each_kind = pytest.mark.parametrize("kind", QUICK + STALLS)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory, dataset: Manifest) -> Path:
    """The folder of the bucket `b`: a small set, one that lacks a shard, and images."""
    folder = tmp_path_factory.mktemp("buckets") / "b"
    write_rows(folder / "set", LABELS)
    shutil.copytree(dataset.root, folder / "photographs")
    (folder / "holed").mkdir()
    shutil.copy(folder / "set" / MANIFEST_FILE, folder / "holed")
    write_class_folders(folder / "images", num_classes=2, per_class=6)
    files = [file.relative_to(folder) for file in sorted((folder / "images").glob("*/*"))]
    rows = [f"{file},{file.parent.name}\n" for file in files]
    (folder / "list.csv").write_text("path,label\n" + "".join(rows))
    structs = [{"bytes": jpeg(i), "path": f"{i}.jpg"} for i in range(4)]
    table = pa.table({"image": structs, "label": [0, 1, 0, 1]})
    (folder / "hub").mkdir()
    pq.write_table(table, folder / "hub" / "train.parquet", row_group_size=3)
    return folder


@pytest.fixture(scope="module")
def proxy(bucket: Path) -> Iterator[FaultProxy]:
    with serve_s3(bucket.parent) as port, FaultProxy(port) as proxy:
        yield proxy


@pytest.fixture
def store(proxy: FaultProxy) -> Iterator[FaultProxy]:
    """The store of this process, which tries again without a pause."""
    proxy.faults.set("", 0)
    with this_process_uses(proxy.port, timeout_s=0.5):
        yield proxy


@pytest.fixture
def patient_store(proxy: FaultProxy) -> Iterator[FaultProxy]:
    """With the usual time-outs, so that no request is repeated where a machine is busy."""
    proxy.faults.set("", 0)
    with this_process_uses(proxy.port):
        yield proxy


def at_each_request(store: FaultProxy, path: str, kind: str, act: Callable[[], None]) -> None:
    """Act without a fault, and then with one at a request whose first line holds `path`.

    A flip is at each that has a body, what is no answer at every seventh, and what stalls, which
    takes a time-out, at the last. A slow machine may ask again where nothing is wrong, so that the
    requests are counted twice and the fewer count.
    """
    for wanted in (f"GET {path}", f"PUT {path}") if kind == "flip" else (path,):
        counts = []
        for _ in range(2):
            store.faults.set("", 0, path=wanted)
            act()
            counts.append(len(store.faults.requests))
        last = min(counts)
        step = {"flip": 1, "hang": last, "slow": last}.get(kind, 7)
        for number in range(last, 0, -step):
            store.faults.set(kind, 1, path=wanted, every=number)
            act()
            assert store.faults.remaining == 0


@pytest.mark.slow(after=2)
@of_each_kind
def test_rows_are_those_of_the_disk(store, bucket, kind):
    expected = used_rows(open_dataset(str(bucket / "set")))

    def read() -> None:
        assert used_rows(open_dataset("s3://b/set")) == expected

    at_each_request(store, "/b/set/", kind, read)


@pytest.mark.parametrize("pattern", ["*", "class_{0..1}", "class_[01]"])
def test_patterns_stand_for_keys_as_for_files(store, bucket, tmp_path, pattern):
    def entries(source: str) -> dict[str, tuple[tuple[str, ...], bytes]]:
        found = units(f"{source}/{pattern}")
        return {e.key: (e.labels, e.read()) for unit in found for e in rows_of(unit)}

    there = entries("s3://b/images")
    assert len(there) == 12
    assert there == entries(str(bucket / "images"))


FLIPPED = (".parquet", "/shard-", "/index-")


@pytest.mark.slow(after=2)
@of_each_kind
@pytest.mark.parametrize("source", ["list.csv", "images"])
def test_a_conversion_makes_the_same_data_set(store, bucket, tmp_path, source, kind, monkeypatch):
    run_in_this_process(monkeypatch)
    unslept = {**vars(time), "sleep": lambda _: None}  # for a store without exclusive writes
    monkeypatch.setattr(lock, "time", SimpleNamespace(**unslept))
    here = converted(str(bucket / source), str(tmp_path / "set"))
    # Sources have no checksums but those of the connection; and what the server refuses of a lock
    # it has written all the same.
    for path in FLIPPED if kind == "flip" else ("/b/",):
        # Of the few requests by which a list is indexed, all again where one fails, some must pass.
        every = 4 if kind == "flip" else 7
        store.faults.set(kind, 2 if kind in STALLS else 1000, path=path, every=every)
        there = converted(f"s3://b/{source}", f"s3://b/{kind}-set")
        assert store.faults.injected
        assert (there.fingerprint, there.num_rejected) == (here.fingerprint, 0)
        store.faults.set("", 0)
        for file in open_dataset(f"s3://b/{kind}-set").files:
            stored = (bucket / f"{kind}-set" / file.path).read_bytes()
            assert stored == (tmp_path / "set" / file.path).read_bytes()
        for told in (bucket / f"{kind}-set").glob("*.*"):
            assert SECRET_KEY.encode() not in told.read_bytes()
        locate(f"s3://b/{kind}-set").delete()


def converted(source: str, target: str) -> ConvertReport:
    return convert(source, target, rows_per_row_group=2, shard_mib=0.01, seed=3)


@pytest.mark.slow(after=2)
@of_each_kind
def test_a_checkpoint_is_written_and_read_whole_and_not_taken_for_a_damaged_one(store, kind):
    run = locate(f"s3://b/{kind}-run")

    def write_and_read() -> None:
        write_checkpoint(run, 7)
        check_newest(run.uri)
        requests, store.faults.path = store.faults.path, "none"
        run.delete()
        store.faults.path = requests

    at_each_request(store, f"/b/{kind}-run/step", kind, write_and_read)


def check_newest(run: str) -> None:
    told: list[str] = []
    checkpoint = checkpoint_to_resume(locate(run), told.append)
    assert told == []
    weights = checkpoint.weights()
    for name, expected in values(7).items():
        assert torch.equal(weights[name].flatten(), expected)


def test_a_row_group_takes_three_requests_and_the_next_ones_of_its_shard_one(patient_store):
    remote = open_dataset("s3://b/photographs")
    assert (remote.file_index[:2] == 0).all()
    reader, counts = RowGroupReader(remote), []
    for group in (0, 1):
        patient_store.faults.set("none", 0, path="part-")
        reader.read(group)
        counts.append(len(patient_store.faults.requests))
    assert counts == [3, 1]


def test_forked_workers_of_a_loader_have_connections_of_their_own(patient_store):
    remote = dataset_in_python("s3://b/photographs")
    expected = list(remote.iter_batches(10, 16))  # the parent has connections when it forks
    loader = DataLoader(
        remote.torch_dataset(10, 16), batch_size=None, num_workers=3,
        multiprocessing_context="fork", timeout=60,
    )  # fmt: skip
    for batch, other in zip(loader, expected, strict=True):
        np.testing.assert_array_equal(batch["image"].numpy(), other["image"])


def test_what_is_gone_what_is_away_and_a_wrong_key_are_told_apart(store, monkeypatch):
    """A run is tried again where the store is away, and ends where data are no good."""
    with pytest.raises(ValueError, match="no data set at 's3://b/nothing'"):
        open_dataset("s3://b/nothing")
    holed = open_dataset("s3://b/holed")
    with pytest.raises(ValueError, match=rf"{SHARD}' is missing"):
        RowGroupReader(holed).read(0)
    whole = open_dataset("s3://b/set")
    monkeypatch.setattr(locate("s3://b").filesystem, "retries", 3)
    store.faults.set("503", remaining=1000)
    with pytest.raises(OSError, match=rf"{SHARD}' .* storage does not answer"):
        RowGroupReader(whole).read(0)
    store.faults.set("", 0)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "aX9-not-the-secret")
    forget_clients()
    with pytest.raises(PermissionError, match=r"s3://b: .*check AWS_ACCESS_KEY_ID") as caught:
        open_dataset("s3://b/set")
    assert "aX9" not in str(caught.value)
    with pytest.raises(ValueError, match=rf"{SHARD}' cannot be read .*; check the credentials"):
        RowGroupReader(whole).read(0)


def test_parquet_is_read_in_place_on_s3_and_a_new_object_of_equal_length_is_seen(
    store, bucket, tmp_path, monkeypatch
):
    run_in_this_process(monkeypatch)
    convert("s3://b/hub", tmp_path / "set", in_place=True)
    manifest = open_dataset(str(tmp_path / "set"))
    store.faults.set("503", remaining=3, path="train.parquet", every=2)
    reader = RowGroupReader(manifest)
    images = [reader.read(g).image(row) for g in (0, 1) for row in range(int(manifest.rows[g]))]
    assert images == [jpeg(i) for i in range(4)]
    assert store.faults.injected
    file = bucket / "hub" / "train.parquet"
    content = file.read_bytes()
    try:
        file.write_bytes(content.replace(jpeg(1)[:-20], jpeg(1)[:-21] + b"x"))
        with pytest.raises(ValueError, match=r"train\.parquet has changed since"):
            RowGroupReader(manifest).read(0)
    finally:
        file.write_bytes(content)
