"""Files on a disk and in S3: all or nothing, errors by their cause, and who repeats what."""

import errno
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import s3fs
from botocore.exceptions import ClientError
from s3fs.errors import translate_boto_error

from tests.data.s3_server import FaultProxy, create_bucket, serve_conditional_s3, this_process_uses
from vit_ray import storage
from vit_ray.storage import Location, UnavailableError, locate, naming

MIB = 1 << 20


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultProxy]:
    with serve_conditional_s3() as port, FaultProxy(port) as proxy:
        yield proxy


@pytest.fixture
def bucket(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Location]:
    monkeypatch.setattr(s3fs.S3FileSystem, "default_block_size", 5 * MIB)  # S3's least
    proxy.faults.set("", 0)
    with this_process_uses(proxy.port, timeout_s=60):
        create_bucket("runs")
        yield locate("s3://runs/a")


def content(size: int) -> bytes:
    return bytes(range(251)) * (size // 251 + 1)


def write_and_raise(place: Location, data: bytes) -> None:
    with place.output() as stream:
        stream.write(data)
        raise RuntimeError("in the middle")


def unfinished() -> list[str]:
    found = locate("s3://runs").filesystem.list_multipart_uploads("runs")
    return [upload["Key"] for upload in found]


@pytest.mark.slow
def test_a_large_upload_of_which_every_fourth_part_fails_is_whole(bucket, proxy):
    whole = content(40 * MIB)
    proxy.faults.set("503", remaining=100, path="partNumber=", every=4)
    bucket.child("large").write(whole)
    assert len(proxy.faults.injected) >= 2
    proxy.faults.set("", 0)
    assert bucket.child("large").read() == whole
    assert unfinished() == []


@pytest.mark.parametrize("size", [100, 12 * MIB])
def test_a_block_that_raises_publishes_nothing(bucket, size, tmp_path):
    place = bucket.child("half")
    place.write(b"before")
    for target in (place, locate(str(tmp_path / "note"))):
        with pytest.raises(RuntimeError, match="in the middle"):
            write_and_raise(target, content(size))
    assert place.read() == b"before"
    assert unfinished() == []
    assert list(tmp_path.iterdir()) == []


def test_an_upload_that_is_refused_leaves_nothing(bucket, proxy, monkeypatch):
    monkeypatch.setattr(bucket.filesystem, "retries", 3)
    proxy.faults.set("403", remaining=10**6, path="partNumber=3")
    with pytest.raises(OSError, match="s3://runs/a/refused: "):
        bucket.child("refused").write(content(30 * MIB))
    proxy.faults.set("", 0)
    assert not bucket.child("refused").exists()
    assert unfinished() == []


def test_a_folder_is_deleted_and_no_other_whose_name_it_would_match(bucket):
    old = bucket.child("exp[1]/step-1")
    others = ("exp[1]/step-10", "exp1/step-1")  # `[1]` is no pattern
    for name in ("one", "below/a?", "*"):
        old.child(name).write(b"1")
    for folder in others:
        bucket.child(folder).child("ab").write(b"other")
    old.delete()
    assert old.list_files() == []
    assert [bucket.child(folder).child("ab").read() for folder in others] == [b"other"] * 2


def test_a_folder_in_which_another_process_deletes_files_is_deleted_too(monkeypatch):
    folder = Location("memory", "/runs/a")
    for number in range(100):
        folder.child(str(number)).write(b"1")
    delete = folder.filesystem.rm_file

    def delete_late(path: str) -> None:
        delete(path)
        raise FileNotFoundError(path)

    monkeypatch.setattr(folder.filesystem, "rm_file", delete_late)
    folder.delete()
    assert folder.list_files() == []


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (400, "BadDigest", UnavailableError), (400, "InvalidArgument", OSError),
        (403, "AccessDenied", PermissionError), (400, "InvalidToken", PermissionError),
        (404, "NoSuchKey", FileNotFoundError), (429, "TooManyRequests", UnavailableError),
        (503, "SlowDown", UnavailableError),
    ],
)  # fmt: skip
def test_the_answer_of_a_store_decides_the_type_of_the_error(status, code, expected):
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    with pytest.raises(expected, match="s3://bucket/key: ") as caught, naming("s3://bucket/key"):
        raise translate_boto_error(ClientError(answer, "PutObject"))
    assert type(caught.value) is expected
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("uri", "error"), [("s3://b/k", RuntimeError("own")), ("/disk", OSError(28, "full"))]
)
def test_errors_of_the_block_itself_and_of_a_disk_stay_as_they_are(uri, error):
    with pytest.raises(type(error)) as caught, naming(uri):
        raise error
    assert caught.value is error


def away(*errors: OSError) -> Callable[[], str]:
    """Fails so many times, as a network disk whose server restarts."""
    left = list(errors)

    def operation() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return operation


@pytest.mark.parametrize(
    ("error", "is_waited_for"),
    [
        (OSError(errno.EIO, "server not responding"), True),
        (OSError(errno.ESTALE, "server not responding"), True),
        # No word of a message or a path decides.
        (OSError(errno.ENOSPC, "No space left on device", "/runs/throttle-study/step-1"), False),
        (PermissionError(errno.EACCES, "timed out"), False),
    ],
)
def test_a_network_disk_that_is_away_is_waited_for_longer_each_time(
    error, is_waited_for, monkeypatch
):
    waits: list[float] = []
    slow = itertools.count(step=200).__next__  # work does not count as waiting
    clock = SimpleNamespace(sleep=waits.append, monotonic=slow, time=slow)
    monkeypatch.setattr(storage, "time", clock)
    if is_waited_for:
        assert storage.with_retries(away(*[error] * 5), "reading") == "done"
        assert waits == [0.2, 0.4, 0.8, 1.6, 3.2]
        waits.clear()
    with pytest.raises(type(error)):
        storage.with_retries(away(*[error] * 99), "reading")
    assert (170 < sum(waits) < 200) if is_waited_for else waits == []  # three minutes


def test_on_a_disk_file_and_folder_are_synced_before_and_after_the_name_is_given(
    tmp_path, monkeypatch
):
    done: list[str] = []
    sync, replace = os.fsync, os.replace

    def noted_sync(file: int) -> None:
        done.append("file" if os.path.isfile(f"/proc/self/fd/{file}") else "folder")
        sync(file)

    def noted_replace(source: str, target: str) -> None:
        if str(target).startswith(str(tmp_path)):  # and not of a thread that an earlier test left
            done.append("name")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "replace", noted_replace)
    locate(str(tmp_path / "note")).write(b"x")
    assert done == ["file", "name", "folder"]


def test_an_exclusive_file_is_made_once_and_a_full_disk_leaves_no_empty_one(
    bucket, tmp_path, monkeypatch
):
    place = locate(str(tmp_path / "folder" / "lock"))
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(storage.os, "fsync", lambda _: away(full)())
        with pytest.raises(OSError, match="No space"):
            place.create(b"first")
    assert not place.exists()
    for file in (place, bucket.child("exclusive")):
        assert file.create(b"second")
        assert not file.create(b"third")
        assert file.read() == b"second"


def test_what_another_process_writes_is_seen(bucket):
    assert bucket.child("x").list_files() == []
    assert not bucket.child("x/new").exists()
    script = (
        f"from vit_ray.storage import locate; locate({bucket.uri!r}).child('x/new').write(b'1')"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert [info.base_name for info in bucket.child("x").list_files()] == ["new"]


def test_a_range_is_one_request_and_ends_with_the_object(bucket, proxy):
    place = bucket.child("ranged")
    place.write(content(500)[:500])
    proxy.faults.set("none", 0, path="/runs/a/ranged")
    assert place.read_range(100, 50) == content(500)[100:150]
    assert len(proxy.faults.requests) == 1
    assert [len(place.read_range(offset, 100)) for offset in (450, 500)] == [50, 0]


def test_a_listing_of_a_folder_is_that_of_the_disk(bucket, tmp_path):
    for folder in (bucket.child("tree"), locate(str(tmp_path / "tree"))):
        for name in ("b", "a/1", "a/c/2", "[x]"):
            folder.child(name).write(b"12")
        bare = [info.path.removeprefix(f"{folder.path}/") for info in folder.list_files()]
        assert bare == ["[x]", "a/1", "a/c/2", "b"]
        assert [i.base_name for i in folder.list_files(recursive=False)] == ["[x]", "b"]
        assert folder.list_folders() == ["a"]
        assert (folder.info().kind, folder.child("b").info().size) == ("directory", 2)
        assert folder.child("none").list_files() == folder.child("none").list_folders() == []
        folder.delete()
        folder.delete()
        assert not folder.exists()


@pytest.mark.parametrize(
    ("address", "named"),
    [
        ("hf://owner/name", "weights only"), ("s3a://bucket/x", "write s3://"),
        ("http://host/x", "download the files"), ("ftp://host/x", "s3, gs, az"),
        ("gs://", "names no bucket"), ("az://user:key@x/y", "held credentials"),
    ],
)  # fmt: skip
def test_what_is_no_store_says_what_is_possible(address, named):
    with pytest.raises(ValueError, match=named) as caught:
        locate(address)
    assert "key@" not in str(caught.value)
