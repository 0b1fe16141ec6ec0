"""Files of data sets and runs: a folder of this machine, or an address such as `s3://`, by fsspec.

Requests to a store are repeated by its library, operations on a network disk by `with_retries`.
Errors of a store are OSErrors of one line with the address, the cause and the setting to change.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar, cast

import fsspec
import pyarrow as pa
from botocore.exceptions import ClientError, HTTPClientError
from botocore.exceptions import ConnectionError as NoConnection

from vit_ray.addresses import absolute_path, check_address

_LOG: Final = logging.getLogger(__name__)

# Pattern of what a local file's name ends in while it is written, and after a kill.
HALF_WRITTEN: Final = r"\.[0-9a-f]{8}\.tmp"
# fsspec's environment variable for the options of S3, as JSON.
_OPTIONS_VARIABLE: Final = "FSSPEC_S3"
# File that a start writes to test its access rights; one that is left over is replaced.
RIGHTS_PROBE: Final = "rights-probe"
# Attempts of s3fs, which waits 104 s between them in all. The AWS client makes only one attempt for
# each: its `standard` mode stops when many requests fail. With 503 as the answer to 40 % of
# requests, 294 of 2,000 PUTs were lost (2026-11-28).
RETRIES: Final = 15
# Limit for a request with all its attempts, until its answer begins; a request with content gets
# the time for it at this rate in addition.
_REQUEST_LIMIT_S: Final = 180.0
_MIN_BYTES_PER_S: Final = 100_000
_S3_CONFIG: Final = {
    "connect_timeout": 5,
    "read_timeout": 30,
    "retries": {"mode": "legacy", "total_max_attempts": 1},
}
# For the first request to a bucket, which has two attempts.
_FIRST_CONFIG: Final = {**_S3_CONFIG, "read_timeout": 6}
# Three minutes altogether: an NFS server needs minutes to restart.
_DISK_PAUSES_S: Final = (0.2, 0.4, 0.8, 1.6, 3.2, 6.4, *[12.0] * 14)
_DISK_AWAY: Final = {
    errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EIO, errno.ESTALE, errno.ETIMEDOUT,
    errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ENOTCONN,
}  # fmt: skip
# Parallel requests that delete files.
_THREADS: Final = 16
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
# Codes of S3 and names of its client's errors, with what to change. The first are refusals.
_REFUSALS: Final = {
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
_REMEDIES: Final = {
    **_REFUSALS,
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
    "ProfileNotFound": "check AWS_PROFILE and ~/.aws/config",
    "ProxyConnectionError": "check HTTPS_PROXY and NO_PROXY",
    "SSLError": "check AWS_CA_BUNDLE, and whether the endpoint is http:// or https://",
}
# Codes, with other statuses than 429 and 5xx, after which a request is repeated: the store is busy,
# or the content was damaged in transit.
_REPEATED_CODES: Final = {
    "BadDigest", "ConditionalRequestConflict", "IncompleteBody", "InternalError",
    "OperationAborted", "RequestThrottled", "RequestTimeout", "ServiceUnavailable", "SlowDown",
    "Throttling", "ThrottlingException",
}  # fmt: skip

# Connection errors after which a request is repeated. s3fs does not do so by itself; a wrong
# certificate (SSLError) stays wrong.
_REPEATED_ERRORS: Final = {"ConnectTimeoutError", "EndpointConnectionError", "ProxyConnectionError"}

# Operations whose access right has another name.
_RIGHTS: Final = {
    "HeadObject": "GetObject",
    "ListObjectsV2": "ListBucket",
    "HeadBucket": "ListBucket",
    "UploadPart": "PutObject",
    "CreateMultipartUpload": "PutObject",
    "CompleteMultipartUpload": "PutObject",
}

_CLIENT_ERRORS: Final = (ClientError, HTTPClientError, NoConnection)
# Libraries below s3fs. Their errors are about connections and answers.
_CLIENT_LIBRARIES = "botocore", "aiobotocore", "aiohttp"

Result = TypeVar("Result")
Method = TypeVar("Method", bound=Callable[..., Any])


class UnavailableError(OSError):
    """The store does not answer; nothing is known of what is stored."""


def is_of_the_store(error: BaseException) -> bool:
    """Whether a store or a network disk does not answer, or a store refuses access. The error then
    says nothing about what is stored.
    """
    error_types = UnavailableError, PermissionError, ConnectionError, TimeoutError
    library = type(error).__module__.partition(".")[0]
    if isinstance(error, error_types) or library in _CLIENT_LIBRARIES:
        return True
    return getattr(error, "errno", None) in (*_DISK_AWAY, errno.EREMOTEIO)


def with_retries(operation: Callable[[], Result], what: str) -> Result:
    """The result of an operation on a disk, repeated while its server is away."""
    pauses_s = iter(_DISK_PAUSES_S)
    while True:
        try:
            return operation()
        except OSError as error:
            if error.errno not in _DISK_AWAY or hasattr(error, "was_repeated"):
                raise
            pause_s = next(pauses_s, None)
            if pause_s is None:
                # A caller must not repeat it again.
                error.was_repeated = True  # type: ignore[attr-defined]
                raise
            _LOG.info("%s failed (%s); tried again in %g s", what, error, pause_s)
            time.sleep(pause_s)


def read_again(
    read: Callable[[], Result], *mismatches: type[Exception], pause_s: float = 0.0
) -> Result:
    """The result of a read, or of its second attempt: bytes may be changed in transit.

    Args:
        mismatches: errors that mean that the content is not as it was written.
        pause_s: before the second attempt; a network file system may show files late.
    """
    try:
        return read()
    except mismatches as error:
        if is_of_the_store(error):
            raise
        time.sleep(pause_s)
        return read()


@functools.lru_cache
def _filesystem(protocol: str, pid: int, options: str, *, is_first: bool = False) -> Any:
    """The file system of one process: connections and event loops do not survive a fork.

    Args:
        options: of S3, as JSON.
        is_first: for a request that must fail soon.
    """
    if protocol != "s3":
        try:
            return fsspec.filesystem(protocol, use_listings_cache=False)
        except ImportError as error:
            package = f"pip install 'vit-ray[{_EXTRAS[protocol]}]'"
            raise ValueError(f"{protocol}:// needs another package: {package}") from error
    s3fs = importlib.import_module("s3fs")  # takes a second, and many processes do not need it
    s3fs.core.set_custom_error_handler(_is_repeated)
    settings = json.loads(options)
    region = os.environ.get("AWS_REGION")  # the client by itself reads only AWS_DEFAULT_REGION
    settings.setdefault("client_kwargs", {"region_name": region} if region else {})
    config = _FIRST_CONFIG if is_first else _S3_CONFIG
    settings["config_kwargs"] = config | settings.get("config_kwargs", {})
    settings["fixed_upload_size"] = True  # Cloudflare's R2 takes parts of one size only
    # Cached listings do not show what other processes write.
    store = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True, **settings)
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
    """End each request of s3fs at `_REQUEST_LIMIT_S`, and do not repeat it then.

    s3fs repeats a read that failed, in addition to the attempts of each request, and has no public
    setting for that: with a store that accepts connections and never answers, a read took 100
    minutes.
    """
    call = store._call_s3

    async def limited(*args: Any, **kwargs: Any) -> Any:
        limit_s = _REQUEST_LIMIT_S + len(kwargs.get("Body") or b"") / _MIN_BYTES_PER_S
        try:
            return await asyncio.wait_for(call(*args, **kwargs), limit_s)
        except (TimeoutError, HTTPClientError, NoConnection) as error:
            raise UnavailableError(str(error) or f"no answer in {limit_s:.0f} s") from error

    store._call_s3 = limited
    store.call_s3 = functools.partial(fsspec.asyn.sync, store.loop, limited)


def _add_md5(params: dict[str, Any], **_: Any) -> None:
    # Every store checks content with this checksum; not all know newer ones.
    digest = hashlib.md5(params.get("Body", b""), usedforsecurity=False).digest()
    params["ContentMD5"] = base64.b64encode(digest).decode()


def _is_repeated(error: Any) -> bool:
    """Whether s3fs sends a request again: after 429, 5xx, and without a connection."""
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        is_later = status in (408, 429) or (status >= 500 and status != 501)  # not implemented
        return is_later or _code(error) in _REPEATED_CODES
    return type(error).__name__ in _REPEATED_ERRORS


def _answer(error: BaseException) -> Any:
    """The error of S3's client that caused an error; without one, the error itself."""
    causes = (error, error.__cause__, error.__context__)
    return next((cause for cause in causes if isinstance(cause, _CLIENT_ERRORS)), error)


def _code(error: BaseException) -> str:
    """S3's code, or the class name of its client's error."""
    answer = _answer(error)
    details = getattr(answer, "response", None) or {}
    return str(details.get("Error", {}).get("Code") or type(answer).__name__)


@contextlib.contextmanager
def naming(uri: str) -> Iterator[None]:
    """Turn the libraries' errors in the block into OSErrors of one line.

    Raises:
        FileNotFoundError, FileExistsError, PermissionError, UnavailableError, OSError
    """
    error_types = FileNotFoundError, FileExistsError, PermissionError
    try:
        yield
    except Exception as error:
        code, answer = _code(error), _answer(error)
        # pyarrow's errors about files are plain OSErrors.
        is_plain = type(error) is OSError and answer is error
        has_no_answer = not isinstance(answer, ClientError) and not isinstance(error, error_types)
        library = type(error).__module__.partition(".")[0]
        is_of_a_store = library not in ("builtins", "pyarrow", "vit_ray") or (
            isinstance(error, OSError) and not is_plain
        )
        if not is_of_a_store or "://" not in uri or "://" in str(error)[:6]:
            raise  # an error of the caller or of a disk, or it already begins with the address
        remedy = _REMEDIES.get(code)
        error_type = next((kind for kind in error_types if isinstance(error, kind)), OSError)
        if code in _REFUSALS:
            error_type = PermissionError
        elif error_type is PermissionError:
            right = getattr(answer, "operation_name", "")
            remedy = f"allow s3:{_RIGHTS.get(right, right)} to the role of the node or to its key"
        elif has_no_answer or _is_repeated(answer):
            error_type = UnavailableError
        text = f"{uri}: {' '.join(str(error).split())} ({code})"
        raise error_type(f"{text}; {remedy}" if remedy else text) from error


class Info(NamedTuple):
    """What is at a path."""

    path: str
    kind: Literal["file", "directory", "other", "nothing"]
    size: int = 0
    version: str = ""  # a file's size and the time of its last change; an object's etag

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


def _stored_info(entry: dict[str, Any]) -> Info:
    version = entry.get("ETag") or entry.get("etag") or entry.get("md5Hash") or ""
    return Info(entry["name"], entry["type"], int(entry["size"] or 0), str(version).strip('"'))


def _stored(method: Method) -> Method:
    """Decorator of a method of `Location`: a disk that is away is waited for, and errors of a store
    name the address.
    """

    @functools.wraps(method)
    def wrapper(location: "Location", *args: Any, **kwargs: Any) -> Any:
        if location.is_local:
            what = f"{method.__name__.lstrip('_')} of {location.path}"
            return with_retries(lambda: method(location, *args, **kwargs), what)
        with naming(location.uri):
            return method(location, *args, **kwargs)

    return cast("Method", wrapper)


@dataclass(frozen=True)
class Location:
    """A path on this machine (`file`) or in a store (`s3`, `gs`, `az`)."""

    protocol: str
    path: str

    @property
    def filesystem(self) -> Any:
        """fsspec's, of this process."""
        return _filesystem(self.protocol, os.getpid(), os.environ.get(_OPTIONS_VARIABLE, "{}"))

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
        """
        Raises:
            ValueError: this folder, or a folder above it, is a file. `key` is the recipe's key.
        """
        folders = self.path, *map(str, Path(self.path).parents)
        if self.is_local and (file := next(filter(os.path.isfile, folders), None)):
            raise ValueError(
                f"{key}={self.path!r} must be a folder, but {file!r} is a file; choose "
                "another folder, or move the file away"
            )

    def exists(self) -> bool:
        return self.info().kind != "nothing"

    @_stored
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
            return pa.PythonFile(self.filesystem.open(self.path, cache_type="none"), mode="r")

    def read(self) -> bytes:
        return self.read_range(0)

    @_stored
    def read_range(self, offset: int, length: int | None = None) -> bytes:
        """Bytes from `offset`, fewer at the file's end; from a store in one request."""
        end = None if length is None else offset + length
        if end == offset:  # stores have no empty range
            return b""
        try:
            return bytes(self.filesystem.cat_file(self.path, start=offset, end=end))
        except OSError as error:
            if _code(error) == "InvalidRange":  # `offset` is at the file's end
                return b""
            raise

    @_stored
    def write(self, content: bytes) -> None:
        """Write a file as a whole: no reader sees a part of it."""
        with self.output() as stream:
            stream.write(content)

    @_stored
    def create(self, content: bytes) -> bool:
        """Write a file unless it exists; of several processes that try, only one gets True.

        A store that ignores If-None-Match (rclone) replaces the file and returns True to all.
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
                    os.remove(self.path)  # a full disk must not leave an empty file
                    raise
        except FileExistsError:
            return False
        except OSError as error:
            if _code(error) not in ("PreconditionFailed", "412"):
                raise
            return False  # s3fs recognizes it by an element that not every store sends
        return True

    @contextlib.contextmanager
    def output(self) -> Iterator[Any]:
        """A stream whose content becomes this file when the block ends without an error.

        On a disk, a temporary file that is synced and then renamed. In a store, an upload that is
        published at the end, and aborted with all its parts if the block raises.
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
                upload.closed = True  # closing it would publish the content so far
                raise

    def _publish(self, upload: Any) -> None:
        try:
            upload.close()
        except FileNotFoundError as error:
            # If the answer to the request that completed it was lost, the upload no longer exists.
            if _code(error) != "NoSuchUpload" or self.info().version != _multipart_etag(upload):
                raise

    @_stored
    def list_files(self, *, recursive: bool = True) -> list[Info]:
        """All files below this folder, or directly in it, sorted by path."""
        entries = self._entries()
        folders = [info.path for info in entries if recursive and info.kind == "directory"]
        if self.is_local:
            for path in folders:
                entries += Location(self.protocol, path).list_files()
        elif folders:
            entries = [*map(_stored_info, self.filesystem.find(self.path, detail=True).values())]
        # In a store the name of a folder's marker ends in a slash.
        return sorted(i for i in entries if i.kind == "file" and not i.path.endswith("/"))

    def list_folders(self) -> list[str]:
        """Names of the folders directly below this one, sorted; empty if there is none."""
        return [info.base_name for info in self._entries() if info.kind == "directory"]

    @_stored
    def _entries(self) -> list[Info]:
        """Files and folders directly in this folder, sorted by path.

        Raises:
            ValueError: a name is not UTF-8, as on disks that were written long ago.
        """
        try:
            if not self.is_local:
                entries = map(_stored_info, self.filesystem.ls(self.path, detail=True))
                return sorted(info for info in entries if info.path.startswith(f"{self.path}/"))
            names = os.listdir(self.path)
            "".join(names).encode()  # raises for a name that is not UTF-8
            return sorted(local_info(self.child(name).path) for name in names)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{self.uri}: a name in it is not UTF-8 ({error.object!r}); rename it, for example "
                "with `convmv -f latin1 -t utf8 -r --notest FOLDER`"
            ) from None

    @_stored
    def delete(self) -> None:
        """Delete this file, or this folder with its content, if it exists."""
        with contextlib.suppress(FileNotFoundError):  # another process may delete it, too
            if not self.is_local:
                # A request for each: s3fs takes the names in a list as patterns, and hides which of
                # them a store refuses to delete.
                with ThreadPoolExecutor(_THREADS) as pool:
                    list(pool.map(self._delete_object, [i.path for i in self.list_files()]))
                self.filesystem.rm_file(self.path)
            elif os.path.isdir(self.path):
                shutil.rmtree(self.path)
            else:
                os.unlink(self.path)

    def _delete_object(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.filesystem.rm_file(path)


def _multipart_etag(upload: Any) -> str:
    """S3's etag of an object of these parts; empty for a store with other etags of parts."""
    try:
        parts = [bytes.fromhex(part["ETag"].strip('"')) for part in upload.parts or ()]
    except ValueError:
        return ""
    digest = hashlib.md5(b"".join(parts), usedforsecurity=False).hexdigest()
    return f"{digest}-{len(parts)}"


@contextlib.contextmanager
def _local_output(path: str) -> Iterator[Any]:
    """A stream to a temporary file, which is renamed to `path` when the block has ended."""
    folder, temporary = os.path.dirname(path), f"{path}.{uuid.uuid4().hex[:8]}.tmp"
    os.makedirs(folder, exist_ok=True)
    try:
        with pa.OSFile(temporary, "wb") as stream:
            yield stream
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        with contextlib.suppress(OSError):  # not every file system can sync a folder
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:  # pyarrow's
            raise OSError(error.errno, os.strerror(error.errno), path) from error
        raise
    finally:
        with contextlib.suppress(OSError):  # it was renamed, or another error is being raised
            os.remove(temporary)


def locate(path: str) -> Location:
    """The location that a user's path means.

    Args:
        path: a local path, `file://`, or `s3://bucket/folder` (also `gs://`, `az://`); credentials,
            region and endpoint of S3 are those of the AWS command line.

    Raises:
        ValueError: as `check_address`.
    """
    check_address(path)
    protocol, _, rest = absolute(path).rpartition("://")
    return Location(protocol or "file", rest.rstrip("/") if protocol else rest)


def absolute(path: str) -> str:
    """A local path made absolute; an address, such as `s3://bucket`, unchanged."""
    local = path.removeprefix("file://")
    return local if "://" in local else absolute_path(local)


def check_reachable(location: Location) -> None:
    """Send one request to a bucket, to report a wrong setting within 15 s, not after all attempts.

    Raises:
        OSError: no connection, or credentials, region or certificate were refused.
    """
    if location.protocol == "s3":
        bucket = location.path.partition("/")[0]
        try:
            with naming(f"s3://{bucket}"):
                options = os.environ.get(_OPTIONS_VARIABLE, "{}")
                store = _filesystem("s3", os.getpid(), options, is_first=True)
                store.call_s3("list_objects_v2", Bucket=bucket, MaxKeys=1)
        except OSError as error:
            if _code(error.__cause__ or error) in _REMEDIES:
                raise
