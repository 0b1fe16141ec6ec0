"""Writing to S3: all or nothing, in parts that are tried again, and no part left behind."""

import errno
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    EndpointConnectionError,
)

from tests.data.s3_server import FaultProxy, serve_conditional_s3, this_process_uses
from vit_ray import retry, s3, storage
from vit_ray.retry import DeniedError, TransientError
from vit_ray.storage import Location, locate

MIB = 1 << 20


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultProxy]:
    with serve_conditional_s3() as port, FaultProxy(port) as proxy:
        yield proxy


@pytest.fixture
def bucket(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Location]:
    monkeypatch.setattr(s3, "_PART_BYTES", 5 * MIB)  # S3 takes no smaller ones
    monkeypatch.setattr(retry.time, "sleep", lambda _: None)
    proxy.faults.set("", 0)
    with this_process_uses(proxy.port, timeout_s=60):
        s3.client().create_bucket(Bucket="runs")
        yield locate("s3://runs/a")


def content(size: int) -> bytes:
    return bytes(range(251)) * (size // 251 + 1)


def write_and_raise(place: Location, data: bytes) -> None:
    with place.output() as stream:
        stream.write(data)
        raise RuntimeError("in the middle")


def unfinished() -> list[str]:
    found = s3.client().list_multipart_uploads(Bucket="runs").get("Uploads", [])
    return [upload["Key"] for upload in found]


@pytest.mark.slow
def test_a_large_upload_of_which_every_fourth_part_fails_is_whole(
    bucket: Location, proxy: FaultProxy
) -> None:
    whole = content(40 * MIB)
    proxy.faults.set("503", remaining=100, path="partNumber=", every=4)
    bucket.child("large").write(whole)
    assert len(proxy.faults.injected) >= 2
    proxy.faults.set("", 0)
    assert bucket.child("large").read() == whole
    assert unfinished() == []


def test_an_upload_that_cannot_be_finished_leaves_nothing(
    bucket: Location, proxy: FaultProxy
) -> None:
    proxy.faults.set("403", remaining=10**6, path="partNumber=3")
    with pytest.raises(OSError, match=r"\(HTTP status 403\)"):
        bucket.child("refused").write(content(30 * MIB))
    proxy.faults.set("", 0)
    assert not bucket.child("refused").exists()
    assert unfinished() == []


@pytest.mark.parametrize("size", [100, 12 * MIB])
def test_a_block_that_raises_publishes_nothing(bucket: Location, size: int) -> None:
    place = bucket.child("half")
    place.write(b"before")
    with pytest.raises(RuntimeError, match="in the middle"):
        write_and_raise(place, content(size))
    assert place.read() == b"before"
    assert unfinished() == []


def test_what_is_written_is_stored_as_it_is_whatever_its_name(bucket: Location) -> None:
    place = bucket.child("trace.json.gz")  # pyarrow's own streams compress for such a name
    place.write(b"packed already")
    assert place.info().size == len(b"packed already")
    assert place.read_range(0, 100) == b"packed already"


def test_an_answer_that_is_lost_after_the_object_was_made_is_no_error(
    bucket: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = s3._request, []

    def lose(operation: str, path: str, **values: object) -> object:
        answer = plain(operation, path, **values)
        if operation == "complete_multipart_upload":
            calls.append(operation)
            if len(calls) == 1:
                raise ConnectionError("connection reset by peer")
        return answer

    monkeypatch.setattr(s3, "_request", lose)
    bucket.child("made").write(content(12 * MIB))
    assert bucket.child("made").info().size == len(content(12 * MIB))


@pytest.mark.parametrize("copy_bytes", [1 << 30, 5 * MIB])
def test_a_folder_that_is_moved_is_whole_in_its_new_place(
    bucket: Location, monkeypatch: pytest.MonkeyPatch, copy_bytes: int
) -> None:
    monkeypatch.setattr(s3, "_COPY_BYTES", copy_bytes)
    files = {"one": content(11 * MIB), "two": b"", "below/three": b"3"}
    old, new = bucket.child("step-1"), bucket.child("step-1.damaged")
    for name, data in files.items():
        old.child(name).write(data)
    bucket.child("step-10").write(b"another")
    old.move_to(new)
    assert {name: new.child(name).read() for name in files} == files
    assert not old.exists()
    assert bucket.child("step-10").read() == b"another"
    new.delete()
    assert not new.exists()


def test_a_folder_that_cannot_be_copied_stays(bucket: Location, proxy: FaultProxy) -> None:
    old, new = bucket.child("step-2"), bucket.child("step-2.damaged")
    old.child("one").write(b"1")
    old.child("two").write(b"2")
    proxy.faults.set("403", remaining=10**6, path="PUT /runs/a/step-2.damaged/two")
    with pytest.raises(OSError, match="HTTP status 403"):
        old.move_to(new)
    proxy.faults.set("", 0)
    assert old.child("one").read() == b"1"
    assert old.child("two").read() == b"2"


@pytest.mark.parametrize("size", [0, 100, 2 * MIB, 3 * MIB + 5])
def test_the_hash_of_what_is_written_is_that_of_the_file(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a file system is away in the middle of the first attempt."""
    monkeypatch.setattr(retry.time, "sleep", lambda _: None)
    place, synced = locate(str(tmp_path)).child("file"), []
    plain = storage._sync_file

    def sync(path: str) -> None:
        synced.append(path)
        if len(synced) == 1:
            raise OSError(errno.ESTALE, "away")
        plain(path)

    monkeypatch.setattr(storage, "_sync_file", sync)
    assert place.write_hashed(memoryview(content(size))) == sha256(content(size)).hexdigest()
    assert place.read() == content(size)
    assert len(synced) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_is_read_into_memory_that_is_there(bucket: Location, tmp_path: Path) -> None:
    target = np.zeros(300, np.uint8)
    for folder in (bucket, locate(str(tmp_path))):
        folder.child("file").write(content(500)[:500])
        for offset, count in ((0, 300), (199, 300), (450, 50), (500, 0)):
            assert folder.child("file").read_into(offset, target) == count
            assert target[:count].tobytes() == content(500)[offset : offset + count]
        with pytest.raises(FileNotFoundError):
            folder.child("none").read_into(0, target)


def test_on_a_disk_a_block_that_raises_leaves_neither_file_nor_half(tmp_path: Path) -> None:
    place = locate(str(tmp_path / "note"))
    with pytest.raises(RuntimeError, match="in the middle"):
        write_and_raise(place, b"half")
    assert list(tmp_path.iterdir()) == []


def test_on_a_disk_file_and_folder_are_synced_before_and_after_the_name_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    plain_sync, plain_replace = storage.os.fsync, storage.os.replace

    def sync(file: int) -> None:
        done.append("file" if storage.os.path.isfile(f"/proc/self/fd/{file}") else "folder")
        plain_sync(file)

    def replace(source: str, target: str) -> None:
        if str(target).startswith(str(tmp_path)):  # and not of a thread that an earlier test left
            done.append("name")
        plain_replace(source, target)

    monkeypatch.setattr(storage.os, "fsync", sync)
    monkeypatch.setattr(storage.os, "replace", replace)
    locate(str(tmp_path / "note")).write(b"x")
    assert done == ["file", "name", "folder"]


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (400, "BadDigest", TransientError),
        (400, "InvalidArgument", OSError),
        (403, "AccessDenied", DeniedError),
        (404, "NoSuchKey", FileNotFoundError),
        (409, "ConditionalRequestConflict", TransientError),
        (412, "PreconditionFailed", FileExistsError),
        (429, "TooManyRequests", TransientError),
        (503, "", TransientError),
    ],
)
def test_what_a_store_answers_is_told_by_the_type_of_the_error(
    status: int, code: str, expected: type[OSError]
) -> None:
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    with pytest.raises(expected) as caught, s3._as_os_errors("bucket/key"):
        raise ClientError(answer, "PutObject")
    assert type(caught.value) is expected


def test_an_endpoint_that_does_not_answer_is_tried_again() -> None:
    for error in (
        EndpointConnectionError(endpoint_url="http://127.0.0.1:1"),
        ConnectTimeoutError(endpoint_url="http://127.0.0.1:1"),
        ConnectionClosedError(endpoint_url="http://127.0.0.1:1"),
    ):
        with pytest.raises(TransientError), s3._as_os_errors("bucket/key"):
            raise error
