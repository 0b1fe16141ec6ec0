"""Storage of data sets and runs: a local folder or an `s3://` address, as a pyarrow file system."""

import contextlib
import errno
import functools
import hashlib
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import numpy as np
import pyarrow
from numpy.typing import NDArray
from pyarrow import fs

from vit_ray import s3
from vit_ray.addresses import check_address, with_home
from vit_ray.retry import (
    DEFAULT_POLICY,
    ONE_ATTEMPT,
    has_no_credentials,
    has_wrong_credentials,
    is_denied,
    is_transient,
    retry_policy,
    with_retries,
)

_LOG: Final = logging.getLogger(__name__)

HALF_WRITTEN: Final = r"\.[0-9a-f]{8}\.tmp"
"""What is appended to a local file's name while it is being written, and stays after a kill."""
_HASHED_BYTES: Final = 1 << 20
"""Bytes that are hashed and then written: they fit into a core's cache."""
_ENDPOINTS: Final = "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"
"""Variables with the address of the store, of which the first that is set counts."""
RIGHTS_PROBE: Final = "rights-probe"
"""File by which a start tries its access rights; one that could not be deleted is replaced by the
next."""
_PROBE_POLICY: Final = replace(DEFAULT_POLICY, denied_attempts=6, tell=_LOG.warning)
"""A store that throttles may answer like one that refuses: 6 s more, before the job is ended. A
store that does not answer is told at once, since its address may be wrong."""
_RIGHTS: Final = {
    "list": "s3:ListBucket",
    "read": "s3:GetObject",
    "write": "s3:PutObject",
    "delete": "s3:DeleteObject",
}


Method = TypeVar("Method", bound=Callable[..., Any])


def _retried(doing: str) -> Callable[[Method], Method]:
    """A method of a location that is repeated as `with_retries` does; `doing` is for the log."""

    def decorated(once: Method) -> Method:
        @functools.wraps(once)
        def retried(place: "Location", *args: Any) -> Any:
            return with_retries(lambda: once(place, *args), f"{doing} {place.path}")

        return cast("Method", retried)

    return decorated


class Creation(Enum):
    """Result of `Location.create`."""

    CREATED = "created"
    EXISTS = "exists"
    NOT_EXCLUSIVE = "not exclusive"
    """Written, but this store would have replaced a file, and may have."""


@dataclass(frozen=True)
class Location:
    """A path together with the file system that serves it."""

    filesystem: fs.FileSystem
    path: str

    def child(self, name: str) -> "Location":
        """The location of `name` below this one."""
        return Location(self.filesystem, f"{self.path.rstrip('/')}/{name}")

    def exists(self) -> bool:
        return self.info().type != fs.FileType.NotFound

    def refuse_file_in_its_place(self, key: str) -> None:
        """Check whether a folder can be here.

        Raises:
            ValueError: a file is here, or in place of a parent folder; `key` names the recipe's
                key.
        """
        if not self.is_local:
            return
        path = Path(self.path)
        # os.path raises nothing: a path that cannot be checked raises an error when it is first
        # used.
        first = next((place for place in (path, *path.parents) if os.path.exists(place)), path)
        if os.path.isfile(first):
            raise ValueError(
                f"{key}={self.path!r} must be a folder, but {str(first)!r} is a file; choose "
                "another folder, or move the file away"
            )

    @_retried("looking at")
    def info(self) -> fs.FileInfo:
        """Type and size of what is at the path: a file, a folder or nothing."""
        return self.filesystem.get_file_info([self.path])[0]

    @_retried("reading")
    def read(self) -> bytes:
        with self.filesystem.open_input_stream(self.path) as stream:
            return bytes(stream.read())

    @_retried("reading")
    def read_twice(self) -> list[bytes]:
        """The whole file, read twice with one opening, which on S3 is also a request."""
        with self.filesystem.open_input_file(self.path) as file:
            return [bytes(file.read_at(file.size(), 0)) for _ in range(2)]

    @_retried("reading")
    def read_range(self, offset: int, length: int) -> bytes:
        with self.filesystem.open_input_file(self.path) as file:
            return bytes(file.read_at(length, offset))

    @_retried("reading")
    def read_into(self, offset: int, target: NDArray[np.uint8]) -> int:
        """Fill `target` (n,) from `offset`; returns the bytes read, fewer at the file's end."""
        with self.filesystem.open_input_file(self.path) as file:
            file.seek(offset)
            return int(file.readinto(target))

    @_retried("writing")
    def write(self, content: bytes) -> None:
        """Write a file so that no reader ever sees a part of it."""
        with self.output() as stream:
            stream.write(content)

    @_retried("writing")
    def write_hashed(self, content: memoryview) -> str:
        """As `write`; returns the SHA-256 of what was written.

        Each piece is hashed right before it is written, while it is in the processor's cache.
        """
        digest = hashlib.sha256()
        with self.output() as stream:
            for first in range(0, len(content), _HASHED_BYTES):
                piece = content[first : first + _HASHED_BYTES]
                digest.update(piece)
                stream.write(piece)
        return digest.hexdigest()

    @_retried("creating")
    def create(self, content: bytes) -> "Creation":
        """Write a small file if there is none of this name; of several that try, one succeeds.

        A reader on a disk may see it before its content is there.
        """
        if not self.is_local:
            # By a PUT that must not replace; sent twice, to see whether the store follows the
            # condition.
            if not s3.put_if_none(self.path, content):
                return Creation.EXISTS
            is_exclusive = not s3.put_if_none(self.path, content)
            return Creation.CREATED if is_exclusive else Creation.NOT_EXCLUSIVE
        folder = os.path.dirname(self.path)
        os.makedirs(folder, exist_ok=True)
        try:
            file = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return Creation.EXISTS
        with os.fdopen(file, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        _sync_folder(folder)
        return Creation.CREATED

    @contextlib.contextmanager
    def output(self) -> Iterator[Any]:
        """A stream to write to, whose content becomes this file when the block ends without an
        error.

        A file with another name, on the disk before it gets its own name; on S3 an upload that is
        published at the end, and aborted with all its parts if the block raises.
        """
        if not self.is_local:
            upload = s3.Upload(self.path)
            try:
                with closed_after(pyarrow.PythonFile(upload, mode="w")) as stream:
                    yield stream
                upload.publish()
            except BaseException:
                upload.abort()
                raise
            return
        folder = os.path.dirname(self.path)
        os.makedirs(folder, exist_ok=True)
        target = f"{self.path}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            with closed_after(self.filesystem.open_output_stream(target)) as stream:
                yield stream
            _sync_file(target)
            os.replace(target, self.path)
            _sync_folder(folder)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:
                raise OSError(error.errno, os.strerror(error.errno), self.path) from error
            raise
        finally:
            with contextlib.suppress(OSError):  # it was renamed, or another error is being raised
                os.remove(target)

    def list_files(self, *, recursive: bool = True) -> list[fs.FileInfo]:
        """All files below this folder, or directly in it, sorted by path."""
        selector = fs.FileSelector(self.path, recursive=recursive, allow_not_found=True)
        with self._names_as_text():
            found = self._list(selector)
            return sorted((i for i in found if i.type == fs.FileType.File), key=lambda i: i.path)

    def list_folders(self) -> list[str]:
        """Names of the folders directly below this one, sorted; empty if there is none."""
        selector = fs.FileSelector(self.path, allow_not_found=True)
        with self._names_as_text():
            found = self._list(selector)
            return sorted(i.base_name for i in found if i.type == fs.FileType.Directory)

    @contextlib.contextmanager
    def _names_as_text(self) -> Iterator[None]:
        """
        Raises:
            ValueError: a name is not UTF-8, as on disks that were written long ago.
        """
        try:
            yield
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.uri}: the name {bytes(error.object)!r} in it is not UTF-8; rename it, for "
                "example with `convmv -f latin1 -t utf8 -r --notest FOLDER`"
            ) from None

    @_retried("listing")
    def _list(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        try:
            return self.filesystem.get_file_info(selector)
        except FileNotFoundError:  # a folder that was added or removed meanwhile
            return self.filesystem.get_file_info(selector)

    @_retried("deleting")
    def delete(self) -> None:
        """Delete this file, or this folder and all below it; nothing if it does not exist.

        On S3 only keys are deleted: pyarrow also writes and deletes folder markers, which some
        servers take for files (rclone 1.75).
        """
        with contextlib.suppress(FileNotFoundError):  # another process is deleting it, too
            if not self.is_local:
                s3.delete(self.path)
            elif os.path.isdir(self.path):
                shutil.rmtree(self.path)
            else:
                os.unlink(self.path)

    def move_to(self, target: "Location") -> None:
        """Give this folder another name on the same file system.

        S3 cannot rename: everything is copied, and then deleted here.

        Raises:
            OSError: it could not be done; nothing is lost.
        """
        if self.is_local:
            with_retries(lambda: os.rename(self.path, target.path), f"renaming {self.path}")
            _sync_folder(os.path.dirname(target.path))
        else:
            with_retries(lambda: s3.move(self.path, target.path), f"moving {self.path}")

    @property
    def uri(self) -> str:
        """The address that `locate` turns back into this location."""
        return self.path if self.is_local else f"s3://{self.path}"

    @property
    def is_local(self) -> bool:
        """Whether the path is on this machine's file system."""
        return isinstance(self.filesystem, fs.LocalFileSystem)


Resource = TypeVar("Resource", bound=Any)


@contextlib.contextmanager
def closed_after(resource: Resource) -> Iterator[Resource]:
    """As `contextlib.closing`, but an error in the block is raised, not the one of closing.

    A writer whose storage failed fails again when it is closed, with another error.
    """
    try:
        yield resource
    except BaseException:
        with contextlib.suppress(Exception):
            resource.close()
        raise
    resource.close()


def _sync_file(path: str) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def _sync_folder(path: str) -> None:
    """Flush names to the disk, if the file system can."""
    with contextlib.suppress(OSError):
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def other_format(what: str, found: int, read: int) -> str:
    """Error for a checkpoint or a data set whose format this code does not read.

    Args:
        what: its kind and location.
        found: its format.
        read: the one format that is read.
    """
    return (
        f"{what} has format {found}; this code reads format {read} only; use the version of "
        "vit_ray that wrote it"
    )


def locate(path: str) -> Location:
    """The location that a user's path means.

    Args:
        path: a local path, `file://` or `s3://bucket/folder`; credentials, region and endpoint of
            S3 come from the environment (`AWS_*`) only.

    Raises:
        ValueError: the address is empty or has another scheme, names an unknown user, no bucket or
            the recipes' placeholder, or holds credentials, which are not repeated.
    """
    check_address(path)
    if path.startswith("s3://"):
        return Location(_s3(os.getpid()), path.removeprefix("s3://").rstrip("/"))
    return Location(fs.LocalFileSystem(), absolute(path))


def absolute(path: str) -> str:
    """A local path from the root on; an address, such as `s3://bucket`, as it is."""
    local = path.removeprefix("file://")
    return local if "://" in local else os.path.abspath(with_home(local))


@functools.lru_cache
def _s3(pid: int) -> fs.S3FileSystem:
    """The object store of this process's environment; `with_retries` does the retrying.

    For one process: a forked one that shared its connections would read answers of others.
    """
    endpoint = next(filter(None, map(os.environ.get, _ENDPOINTS)), "")
    scheme, _, host = endpoint.rpartition("://")
    return fs.S3FileSystem(
        endpoint_override=host or None,
        scheme=scheme or "https",
        region=s3.region(),
        connect_timeout=s3.CONNECT_TIMEOUT_S,
        request_timeout=s3.request_timeout_s(),
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),
        allow_delayed_open=True,
    )


@contextlib.contextmanager
def needing_right(right: str, uri: str) -> Iterator[None]:
    """Errors in the block say which access right is missing, and what to allow.

    Args:
        right: `list`, `read`, `write` or `delete`.

    Raises:
        ValueError: the location refuses it.
    """
    try:
        yield
    except OSError as error:
        if not (
            isinstance(error, PermissionError) or error.errno == errno.EROFS or is_denied(error)
        ):
            raise
        text, wrong = str(error).rstrip("."), f"no right to {right} there"
        if "://" not in uri:
            remedy = "change the rights of the folder, or choose another place"
        elif has_no_credentials(error) or not s3.has_credentials():
            wrong = "there are no credentials for the store here"
            remedy = (
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give this machine a role; in "
                "`ray job submit` by --runtime-env-json '{\"env_vars\": {...}}', which also sets "
                "them for the workers"
            )
        elif has_wrong_credentials(error):
            wrong = "the store does not accept these credentials"
            remedy = "check AWS_ACCESS_KEY_ID, its secret and the clock of this machine"
        else:
            remedy = (
                f"allow {_RIGHTS[right]} to the role of the node or to AWS_ACCESS_KEY_ID, or "
                "choose another place"
            )
            if right == "read":
                # The answer to a HEAD has no body, and so no code that distinguishes these.
                remedy += (
                    "; the store may give the same answer for a wrong secret, and, without "
                    "s3:ListBucket, for an object that does not exist"
                )
        raise ValueError(f"{uri}: {wrong}: {text}; {remedy}") from None


def check_rights(folder: Location) -> None:
    """Try what a run does in its folder, with a small file that is deleted again.

    Raises:
        ValueError: the store refuses it, or there is no such bucket.
        OSError: it does not answer.
    """
    name, probe = RIGHTS_PROBE, folder.child(RIGHTS_PROBE)
    uses: dict[str, Callable[[], object]] = {
        "write": lambda: probe.write(b"vit_ray"),
        "read": lambda: probe.read() == b"vit_ray",
        "list": lambda: name in [info.base_name for info in folder.list_files(recursive=False)],
        "delete": probe.delete,
    }
    try:
        for right, use in uses.items():
            with retry_policy(_PROBE_POLICY), needing_right(right, folder.uri):
                if use() is False:
                    raise OSError(
                        f"{folder.uri}: the attempt to {right} what was written failed there; "
                        "check the access rights"
                    )
    except FileNotFoundError as error:
        if folder.is_local or right != "write":
            raise
        bucket = folder.path.partition("/")[0]
        raise ValueError(
            f"{folder.uri}: there is no bucket {bucket} ({error}); create it, or choose another "
            "place"
        ) from None
    except BaseException as error:
        with contextlib.suppress(Exception), retry_policy(ONE_ATTEMPT):  # it has been reported
            probe.delete()
        if isinstance(error, OSError) and not folder.is_local and is_transient(error):
            endpoint = next((f"{n}={os.environ[n]}" for n in _ENDPOINTS if os.environ.get(n)), "")
            raise OSError(
                f"{folder.uri}: the store does not answer: {error}; check "
                f"{endpoint or f'{_ENDPOINTS[-1]} (not set: AWS)'} and the network, and run the "
                "same command again"
            ) from error
        raise


def file_version(location: Location) -> str:
    """Size and time of the last change of a file, or the etag of an object.

    Raises:
        OSError: it cannot be checked.
    """
    if not location.is_local:
        what = f"looking at {location.path}"
        return with_retries(lambda: s3.etag_of(location.path), what)
    return stat_version(os.stat(location.path))


def stat_version(status: os.stat_result) -> str:
    """The version of a file on a disk."""
    return f"{status.st_size}-{status.st_mtime_ns}"
