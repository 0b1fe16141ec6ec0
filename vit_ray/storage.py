"""Files of data sets and runs: a folder of this machine, or an address such as `s3://`, by fsspec.

Requests to a store are repeated by its library, operations on a network disk by `with_retries`.
Errors of a store are OSErrors of one line that names the place, the cause and the setting.
"""

import asyncio
import base64
import contextlib
import errno
import functools
import hashlib
import importlib
import json
import logging
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar, cast

import fsspec
import pyarrow as pa
from botocore.exceptions import ClientError, HTTPClientError
from botocore.exceptions import ConnectionError as NoConnection

from vit_ray.addresses import absolute_path, check_address

_LOG: Final = logging.getLogger(__name__)

# What is appended to a local file's name while it is being written, and stays after a kill.
HALF_WRITTEN: Final = r"\.[0-9a-f]{8}\.tmp"
# fsspec's variable with the options of S3, as JSON.
_OPTIONS: Final = "FSSPEC_S3"
# File by which a start tries its access rights; one that could not be deleted is replaced.
RIGHTS_PROBE: Final = "rights-probe"
# Attempts of s3fs, with waits of 104 s. The AWS client itself makes one of each: its
# `standard` mode stops when many fail: 294 of 2,000 PUTs were lost at 40 % of 503 (2026-11-28).
RETRIES: Final = 15
# Of one request with all its attempts until its answer begins, and as much longer as its content
# takes at this rate.
_REQUEST_LIMIT_S: Final = 180.0
_LEAST_BYTES_PER_S: Final = 100_000
_S3_CONFIG: Final = {
    "connect_timeout": 5,
    "read_timeout": 30,
    "retries": {"mode": "legacy", "total_max_attempts": 1},
}
# For the first question to a bucket, which is asked twice.
_FIRST_CONFIG: Final = {**_S3_CONFIG, "read_timeout": 6}
# Three minutes: an NFS server takes some to restart.
_DISK_PAUSES_S: Final = (0.2, 0.4, 0.8, 1.6, 3.2, 6.4, *[12.0] * 14)
_DISK_AWAY: Final = {
    errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EIO, errno.ESTALE, errno.ETIMEDOUT,
    errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ENOTCONN,
}  # fmt: skip
_EXTRAS: Final = {"gs": "gcs", "az": "azure"}
_KEYS: Final = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the profile (AWS_PROFILE)"
_NO_KEYS: Final = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give this machine a role; in `ray job "
    "submit` by --runtime-env-json '{\"env_vars\": {...}}', which also sets them for the workers; "
    "for a public bucket set storage.anonymous=true"
)
_RENEW: Final = "the credentials have expired: renew AWS_SESSION_TOKEN, or log in again"
_REGION: Final = "set AWS_REGION, or region in ~/.aws/config, to the region of the bucket"
_ENDPOINT: Final = "check AWS_ENDPOINT_URL, or endpoint_url in ~/.aws/config, and the network"
# Codes of S3, and names of its client's errors, with what to change: refusals, and other causes.
_REFUSED: Final = {
    "InvalidAccessKeyId": _KEYS,
    "SignatureDoesNotMatch": _KEYS,
    "CredentialRetrievalError": _KEYS,
    "RequestTimeTooSkewed": "check the clock of this machine",
    "ExpiredToken": _RENEW,
    "InvalidToken": _RENEW,
    "TokenRefreshRequired": _RENEW,
    "TokenRetrievalError": _RENEW,
    "UnauthorizedSSOTokenError": _RENEW,
    "SSOTokenLoadError": _RENEW,
    "NoCredentialsError": _NO_KEYS,
    "PartialCredentialsError": _NO_KEYS,
}
_SETTINGS: Final = {
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "PermanentRedirect": _REGION,
    "301": _REGION,
    "400": "the credentials may have expired (AWS_SESSION_TOKEN), or AWS_REGION is another one",
    "ConnectTimeoutError": _ENDPOINT,
    "EndpointConnectionError": _ENDPOINT,
    "ReadTimeoutError": _ENDPOINT,
    "ConnectionClosedError": _ENDPOINT,
    "UnavailableError": _ENDPOINT,
    "ResponseParserError": f"what answers there is no S3 store; {_ENDPOINT}",
    "NoSuchBucket": "create the bucket, or choose another place",
    "501": f"what answers there is no S3 store; {_ENDPOINT}",
    "ProfileNotFound": "check AWS_PROFILE and ~/.aws/config",
    "ProxyConnectionError": "check HTTPS_PROXY and NO_PROXY",
    "SSLError": "check AWS_CA_BUNDLE, and whether the endpoint is http:// or https://",
}
# Codes that mean "later" with other statuses than 429 and 5xx, and content damaged on its way.
_LATER: Final = {
    "BadDigest", "ConditionalRequestConflict", "IncompleteBody", "InternalError",
    "OperationAborted", "RequestThrottled", "RequestTimeout", "ServiceUnavailable", "SlowDown",
    "Throttling", "ThrottlingException",
}  # fmt: skip

# Errors without an answer that s3fs by itself does not repeat; a wrong certificate stays wrong.
_NO_CONNECTION: Final = {"ConnectTimeoutError", "EndpointConnectionError", "ProxyConnectionError"}

# Rights that are not called like the operation that needs them.
_RIGHTS: Final = {
    "HeadObject": "GetObject",
    "ListObjectsV2": "ListBucket",
    "HeadBucket": "ListBucket",
    "DeleteObjects": "DeleteObject",
    "CopyObject": "PutObject",
    "UploadPart": "PutObject",
    "CreateMultipartUpload": "PutObject",
    "CompleteMultipartUpload": "PutObject",
}

_CLIENT_ERRORS: Final = (ClientError, HTTPClientError, NoConnection)
# Libraries below s3fs, whose own errors are of connections and of answers to requests.
_CLIENTS = "botocore", "aiobotocore", "aiohttp"

Result = TypeVar("Result")
Method = TypeVar("Method", bound=Callable[..., Any])


class UnavailableError(OSError):
    """The store does not answer; nothing is known of what is stored."""


def is_of_the_store(error: BaseException) -> bool:
    """Whether a store or a network disk does not answer, or a store refuses this process: nothing
    is known of what is stored.
    """
    kinds = UnavailableError, PermissionError, ConnectionError, TimeoutError
    if isinstance(error, kinds) or type(error).__module__.partition(".")[0] in _CLIENTS:
        return True
    return getattr(error, "errno", None) in (*_DISK_AWAY, errno.EREMOTEIO)


def with_retries(operation: Callable[[], Result], what: str) -> Result:
    """The result of an operation on a disk, repeated while its server is away."""
    for pause_s in (*_DISK_PAUSES_S, None):
        try:
            return operation()
        except OSError as error:
            if error.errno not in _DISK_AWAY or hasattr(error, "was_repeated"):
                raise
            if pause_s is None:
                error.was_repeated = True  # type: ignore[attr-defined]  # not by a caller again
                raise
            _LOG.info("%s failed (%s); tried again in %g s", what, error, pause_s)
            time.sleep(pause_s)
    raise AssertionError("the last attempt returns or raises")


def read_again(
    read: Callable[[], Result], *differs: type[Exception], pause_s: float = 0.0
) -> Result:
    """The result of a read, or of its second attempt: bytes may be changed in transit.

    Args:
        differs: the error that means that something is not as written.
        pause_s: before the second attempt; a network file system may show files late.
    """
    try:
        return read()
    except differs as error:
        if is_of_the_store(error):
            raise  # nothing has been read
        time.sleep(pause_s)
        return read()


@functools.lru_cache
def _filesystem(protocol: str, pid: int, options: str, *, is_first: bool = False) -> Any:
    """The file system of one process: connections and event loops do not survive a fork.

    Args:
        options: fsspec's variable with those of S3.
        is_first: for a question that must be answered at once.
    """
    if protocol != "s3":
        try:
            return fsspec.filesystem(protocol, use_listings_cache=False)
        except ImportError as error:
            package = f"pip install 'vit-ray[{_EXTRAS[protocol]}]'"
            raise ValueError(f"{protocol}:// needs another package: {package}") from error
    s3fs = importlib.import_module("s3fs")  # takes a second, and many processes do not need it
    s3fs.core.set_custom_error_handler(_is_repeated)
    given = json.loads(options)
    region = os.environ.get("AWS_REGION")  # the client by itself reads AWS_DEFAULT_REGION alone
    given.setdefault("client_kwargs", {"region_name": region} if region else {})
    config = _FIRST_CONFIG if is_first else _S3_CONFIG
    given["config_kwargs"] = config | given.get("config_kwargs", {})
    given["fixed_upload_size"] = True  # Cloudflare's R2 takes parts of one size only
    # Cached listings do not show what other processes write.
    store = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True, **given)
    store.retries = 2 if is_first else RETRIES
    try:
        store.connect()
    except ValueError as error:
        raise ValueError(f"{error}; {_ENDPOINT}; it begins with http:// or https://") from None
    for operation in ("PutObject", "UploadPart"):
        store.s3.meta.events.register(f"provide-client-params.s3.{operation}", _add_md5)
    _limit_requests(store)
    return store


def _limit_requests(store: Any) -> None:
    """Let no request of s3fs wait longer than that for an answer, nor be repeated then.

    s3fs reads in a loop of attempts around that of each request, without a public setting: a store
    that takes connections and never answers held a read for 100 minutes.
    """
    call = store._call_s3

    async def limited(*args: Any, **named: Any) -> Any:
        limit_s = _REQUEST_LIMIT_S + len(named.get("Body") or b"") / _LEAST_BYTES_PER_S
        try:
            return await asyncio.wait_for(call(*args, **named), limit_s)
        except (TimeoutError, HTTPClientError, NoConnection) as error:
            raise UnavailableError(str(error) or f"no answer in {limit_s:.0f} s") from error

    store._call_s3 = limited
    store.call_s3 = functools.partial(fsspec.asyn.sync, store.loop, limited)


def _add_md5(params: dict[str, Any], **_: Any) -> None:
    """Every store checks content with this checksum; not all know newer ones."""
    digest = hashlib.md5(params.get("Body", b""), usedforsecurity=False).digest()
    params["ContentMD5"] = base64.b64encode(digest).decode()


def _is_repeated(error: Any) -> bool:
    """Whether s3fs sends a request again: after 429, 5xx, and without a connection."""
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        is_later = status in (408, 429) or (status >= 500 and status != 501)  # not implemented
        return is_later or _code(error) in _LATER
    return type(error).__name__ in _NO_CONNECTION


def _answer(error: BaseException) -> Any:
    """The error of S3's client that an error was made from, or the error."""
    causes = (error, error.__cause__, error.__context__)
    return next((one for one in causes if isinstance(one, _CLIENT_ERRORS)), error)


def _code(error: BaseException) -> str:
    """S3's code, or the name of the error of its client."""
    answer = _answer(error)
    details = getattr(answer, "response", None) or {}
    return str(details.get("Error", {}).get("Code") or type(answer).__name__)


@contextlib.contextmanager
def naming(uri: str) -> Iterator[None]:
    """Errors of the libraries in the block become OSErrors of one line.

    Raises:
        FileNotFoundError, FileExistsError, PermissionError, UnavailableError, OSError
    """
    kinds = FileNotFoundError, FileExistsError, PermissionError
    try:
        yield
    except Exception as error:
        code, answer = _code(error), _answer(error)
        # pyarrow's errors of files are plain OSErrors.
        is_plain = type(error) is OSError and answer is error
        is_without_answer = not isinstance(answer, ClientError) and not isinstance(error, kinds)
        library, own = type(error).__module__.partition(".")[0], ("builtins", "pyarrow", "vit_ray")
        is_of_a_store = library not in own or (isinstance(error, OSError) and not is_plain)
        if not is_of_a_store or "://" not in uri or "://" in str(error)[:6]:
            raise  # of the caller or a disk, or named before
        change = {**_REFUSED, **_SETTINGS}.get(code)
        kind = next((one for one in kinds if isinstance(error, one)), OSError)
        if code in _REFUSED:
            kind = PermissionError
        elif kind is PermissionError:
            right = getattr(answer, "operation_name", "")
            change = f"allow s3:{_RIGHTS.get(right, right)} to the role of the node or to its key"
        elif is_without_answer or _is_repeated(answer):
            kind = UnavailableError
        text = f"{uri}: {' '.join(str(error).split())} ({code})"
        raise kind(f"{text}; {change}" if change else text) from error


class Info(NamedTuple):
    """What is at a path."""

    path: str
    kind: Literal["file", "directory", "other", "nothing"]
    size: int = 0
    version: str = ""  # of a file its size and the time of its last change, of an object its etag

    @property
    def base_name(self) -> str:
        return self.path.rsplit("/", 1)[-1]


def local_info(path: str) -> Info:
    """What is at a path of this machine."""
    try:
        status = os.stat(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return Info(path, "nothing")
    kinds: dict[int, Any] = {stat.S_IFREG: "file", stat.S_IFDIR: "directory"}
    kind = kinds.get(stat.S_IFMT(status.st_mode), "other")
    return Info(path, kind, status.st_size, f"{status.st_size}-{status.st_mtime_ns}")


def _stored_info(found: dict[str, Any]) -> Info:
    """From what fsspec says of a path in a store."""
    version = found.get("ETag") or found.get("etag") or found.get("md5Hash") or ""
    return Info(found["name"], found["type"], int(found["size"] or 0), str(version).strip('"'))


def _stored(doing: str) -> Callable[[Method], Method]:
    """A method that is repeated while its disk is away (`doing` is for the log), or whose errors
    name the place in a store.
    """

    def decorated(once: Method) -> Method:
        @functools.wraps(once)
        def method(place: "Location", *args: Any, **named: Any) -> Any:
            if place.is_local:
                return with_retries(lambda: once(place, *args, **named), f"{doing} {place.path}")
            with naming(place.uri):
                return once(place, *args, **named)

        return cast("Method", method)

    return decorated


@dataclass(frozen=True)
class Location:
    """A path on this machine (`file`) or in a store (`s3`, `gs`, `az`)."""

    protocol: str
    path: str

    @property
    def filesystem(self) -> Any:
        """fsspec's, of this process."""
        return _filesystem(self.protocol, os.getpid(), os.environ.get(_OPTIONS, "{}"))

    @property
    def uri(self) -> str:
        """The address that `locate` turns back into this location."""
        return self.path if self.is_local else f"{self.protocol}://{self.path}"

    @property
    def is_local(self) -> bool:
        return self.protocol == "file"

    def child(self, name: str) -> "Location":
        """The location of `name` below this one."""
        return Location(self.protocol, f"{self.path.rstrip('/')}/{name}")

    def refuse_file_in_its_place(self, key: str) -> None:
        """Check that no file is in the place of this folder, or of one above it.

        Raises:
            ValueError: a file is; `key` names the recipe's key.
        """
        above = self.path, *map(str, Path(self.path).parents)
        if self.is_local and (file := next(filter(os.path.isfile, above), None)):
            raise ValueError(
                f"{key}={self.path!r} must be a folder, but {file!r} is a file; choose "
                "another folder, or move the file away"
            )

    def exists(self) -> bool:
        return self.info().kind != "nothing"

    @_stored("looking at")
    def info(self) -> Info:
        if self.is_local:
            return local_info(self.path)
        try:
            return _stored_info(self.filesystem.info(self.path))
        except FileNotFoundError:
            return Info(self.path, "nothing")

    def open(self) -> Any:
        """A stream for pyarrow and `io.BufferedReader`; each read of a store is one request."""
        if self.is_local:
            return pa.OSFile(self.path)
        with naming(self.uri):
            file = self.filesystem.open(self.path, cache_type="none")
            return pa.PythonFile(file, mode="r")

    def read(self) -> bytes:
        return self.read_range(0)

    @_stored("reading")
    def read_range(self, offset: int, length: int | None = None) -> bytes:
        """Bytes from `offset`, fewer at the file's end; from a store in one request."""
        if self.is_local:
            with open(self.path, "rb") as file:
                file.seek(offset)
                return file.read(-1 if length is None else length)
        end = None if length is None else offset + length
        if end == offset:  # stores have no empty range
            return b""
        try:
            return bytes(self.filesystem.cat_file(self.path, start=offset, end=end))
        except OSError as error:
            if _code(error) == "InvalidRange":  # it begins where the file ends
                return b""
            raise

    @_stored("writing")
    def write(self, content: bytes) -> None:
        """Write a file so that no reader ever sees a part of it."""
        with self.output() as stream:
            stream.write(content)

    @_stored("creating")
    def create(self, content: bytes) -> bool:
        """Write a file if there is none of this name; of several that try, one succeeds.

        A store that ignores If-None-Match (rclone) replaces it and says True to all.
        """
        try:
            if not self.is_local:
                self.filesystem.pipe_file(self.path, content, mode="create")
                return True
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            with open(self.path, "xb") as file:
                try:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                except BaseException:
                    os.remove(self.path)  # a full disk leaves no empty one
                    raise
        except FileExistsError:
            return False
        except OSError as error:
            if _code(error) not in ("PreconditionFailed", "412"):
                raise
            return False  # s3fs knows it by an element that not every store sends
        return True

    @contextlib.contextmanager
    def output(self) -> Iterator[Any]:
        """A stream to write to, whose content becomes this file when the block ends without an
        error.

        A file with another name, on the disk before it gets its own name; in a store an upload that
        is published at the end, and aborted with all its parts if the block raises.
        """
        if self.is_local:
            with _local_output(self.path) as stream:
                yield stream
            return
        with naming(self.uri):
            upload = self.filesystem.open(self.path, "wb")
            try:
                yield pa.PythonFile(upload, mode="w")
                self._publish(upload)
            except BaseException:
                with contextlib.suppress(Exception):  # another error is being raised
                    upload.discard()
                upload.closed = True  # closing it would publish what is there
                raise

    def _publish(self, upload: Any) -> None:
        """Complete an upload; one that is gone was completed by a request whose answer was lost."""
        try:
            upload.close()
        except FileNotFoundError as error:
            if _code(error) != "NoSuchUpload" or self.info().version != _multipart_etag(upload):
                raise

    @_stored("listing")
    def list_files(self, *, recursive: bool = True) -> list[Info]:
        """All files below this folder, or directly in it, sorted by path."""
        found = self._entries()
        folders = [info.path for info in found if recursive and info.kind == "directory"]
        if self.is_local:
            for path in folders:
                found += Location(self.protocol, path).list_files()
        elif folders:
            found = [*map(_stored_info, self.filesystem.find(self.path, detail=True).values())]
        # In a store the name of a folder's marker ends in a slash.
        return sorted(i for i in found if i.kind == "file" and not i.path.endswith("/"))

    def list_folders(self) -> list[str]:
        """Names of the folders directly below this one, sorted; empty if there is none."""
        return [info.base_name for info in self._entries() if info.kind == "directory"]

    @_stored("listing")
    def _entries(self) -> list[Info]:
        """What is directly in this folder, sorted by path.

        Raises:
            ValueError: a name is not UTF-8, as on disks that were written long ago.
        """
        try:
            if not self.is_local:
                found = map(_stored_info, self.filesystem.ls(self.path, detail=True))
                return sorted(info for info in found if info.path.startswith(f"{self.path}/"))
            names = os.listdir(self.path)
            "".join(names).encode()
            return sorted(local_info(self.child(name).path) for name in names)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{self.uri}: a name in it is not UTF-8 ({error.object!r}); rename it, for example "
                "with `convmv -f latin1 -t utf8 -r --notest FOLDER`"
            ) from None

    @_stored("deleting")
    def delete(self) -> None:
        """Delete this file, or this folder and all below it; nothing if it does not exist."""
        with contextlib.suppress(FileNotFoundError):  # another process is deleting it, too
            if not self.is_local:
                if below := [info.path for info in self.list_files()]:
                    self._remove(below)  # by requests that hide what is refused
                for left in self.list_files() if below else ():
                    self.filesystem.rm_file(left.path)
                self.filesystem.rm_file(self.path)
            elif os.path.isdir(self.path):
                shutil.rmtree(self.path)
            else:
                os.unlink(self.path)

    @_stored("moving")
    def move_to(self, target: "Location") -> None:
        """Give this folder another name; a store copies everything, and then deletes it here.

        Raises:
            OSError: it could not be done; nothing is lost.
        """
        if self.is_local:
            os.rename(self.path, target.path)
            _sync_folder(os.path.dirname(target.path))
            return
        files = [info.path for info in self.list_files()] or [self.path]
        for path in files:
            self.filesystem.cp_file(path, target.path + path.removeprefix(self.path))
        self._remove(files)  # and nothing that another process has added since

    def _remove(self, paths: list[str]) -> None:
        """Delete objects; s3fs takes names with wildcards in a list for patterns."""
        literal = [path for path in paths if not set("*?[") & set(path)]
        if literal:
            self.filesystem.rm(literal)
        for path in set(paths) - set(literal):
            self.filesystem.rm_file(path)


def _multipart_etag(upload: Any) -> str:
    """What S3 calls an object of these parts; empty for a store whose parts have other names."""
    try:
        parts = [bytes.fromhex(part["ETag"].strip('"')) for part in upload.parts or ()]
    except ValueError:
        return ""
    whole = hashlib.md5(b"".join(parts), usedforsecurity=False).hexdigest()
    return f"{whole}-{len(parts)}"


@contextlib.contextmanager
def _local_output(path: str) -> Iterator[Any]:
    """A stream to a file that gets its name, with all its content, when the block has ended."""
    folder, half = os.path.dirname(path), f"{path}.{uuid.uuid4().hex[:8]}.tmp"
    os.makedirs(folder, exist_ok=True)
    try:
        with pa.OSFile(half, "wb") as stream:
            yield stream
        with open(half, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(half, path)
        _sync_folder(folder)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:
            raise OSError(error.errno, os.strerror(error.errno), path) from error
        raise
    finally:
        with contextlib.suppress(OSError):  # it was renamed, or another error is being raised
            os.remove(half)


def _sync_folder(path: str) -> None:
    """Flush names to the disk, if the file system can."""
    with contextlib.suppress(OSError):
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def locate(path: str) -> Location:
    """The location that a user's path means.

    Args:
        path: a local path, `file://`, or `s3://bucket/folder` (also `gs://`, `az://`); credentials,
            region and endpoint of S3 are those of the AWS command line.

    Raises:
        ValueError: as `check_address`, or it names an unknown user.
    """
    check_address(path)
    protocol, _, rest = absolute(path).rpartition("://")
    return Location(protocol or "file", rest.rstrip("/") if protocol else rest)


def absolute(path: str) -> str:
    """A local path from the root on; an address, such as `s3://bucket`, as it is."""
    local = path.removeprefix("file://")
    return local if "://" in local else absolute_path(local)


def check_reachable(place: Location) -> None:
    """Ask a bucket one thing: what will not pass is an error within 15 s, not after all attempts.

    Raises:
        OSError: no connection, or refused credentials, region or certificate.
    """
    if place.protocol == "s3":
        bucket = place.path.partition("/")[0]
        try:
            with naming(f"s3://{bucket}"):
                options = os.environ.get(_OPTIONS, "{}")
                store = _filesystem("s3", os.getpid(), options, is_first=True)
                store.call_s3("list_objects_v2", Bucket=bucket, MaxKeys=1)
        except OSError as error:
            if _code(error.__cause__ or error) in {**_REFUSED, **_SETTINGS}:
                raise
