"""S3 operations that pyarrow lacks: a PUT that does not replace, an upload that can be aborted, and
a read without a request for the size before it.

Uses botocore's own client, which is imported late: it takes time, and many processes never need it.
Its retries are off; `with_retries` wraps each request instead. Errors are `OSError`, with
`FileNotFoundError` for missing objects.
"""

import base64
import contextlib
import hashlib
import io
import logging
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import lru_cache
from typing import Any, Final, NamedTuple

from vit_ray.retry import DeniedError, TransientError, with_retries

CONNECT_TIMEOUT_S: Final = 5.0
_REQUEST_TIMEOUT_S: Final = 30.0
_PART_BYTES: Final = 16 << 20
_PARTS_OF_A_SIZE: Final = 1000
"""After this many parts their size doubles: S3 accepts 10,000, of 5 GiB at most."""
_UPLOADS_AT_ONCE: Final = 4
_COPY_BYTES: Final = 1 << 30
"""A larger object is copied in parts; S3 copies 5 GiB at once at most."""
_DELETES_AT_ONCE: Final = 1000
"""Keys of one request; S3 accepts no more."""

logger = logging.getLogger(__name__)


def region() -> str | None:
    """botocore by itself only reads AWS_DEFAULT_REGION."""
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")


def request_timeout_s() -> float:
    """Time limit of one answer."""
    return float(os.environ.get("VIT_RAY_S3_TIMEOUT_S", _REQUEST_TIMEOUT_S))


def client() -> Any:
    """For this process's environment; threads may share it."""
    return client_of(os.getpid())


@lru_cache
def client_of(pid: int) -> Any:
    """For one process: a forked one that shared its connections would read answers of others."""
    import botocore.config
    import botocore.session

    config = botocore.config.Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=request_timeout_s(),
        retries={"mode": "standard", "total_max_attempts": 1},
        max_pool_connections=2 * _UPLOADS_AT_ONCE,
    )
    session = botocore.session.get_session()
    return session.create_client("s3", region_name=region(), config=config)


def has_credentials() -> bool:
    """Whether this process finds a key for the store; without one pyarrow signs no request."""
    import botocore.session
    from botocore.exceptions import PartialCredentialsError

    try:
        return botocore.session.get_session().get_credentials() is not None
    except PartialCredentialsError:
        return False


def put_if_none(path: str, content: bytes) -> bool:
    """Write `bucket/key` if nothing is there; False if something is.

    A store that ignores the condition writes it in any case, and answers True.
    """
    try:
        _request("put_object", path, Body=content, IfNoneMatch="*")
    except FileExistsError:
        return False
    return True


def delete(path: str, keys: list[str] | None = None) -> None:
    """Delete `bucket/key` and every key below it, or some keys; nothing if there is none."""
    if keys is None:
        keys = [path.partition("/")[2], *(found.key for found in list_objects(path))]
    for first in range(0, len(keys), _DELETES_AT_ONCE):
        objects = [{"Key": key} for key in keys[first : first + _DELETES_AT_ONCE]]
        answer = _request("delete_objects", path, Delete={"Objects": objects, "Quiet": True})
        if errors := answer.get("Errors"):
            code, key = errors[0]["Code"], errors[0]["Key"]
            raise _type_of(None, code)(f"{path}: {code} for {key} and perhaps others")


def move(path: str, target: str) -> None:
    """Copy every key below `path`, and delete the originals only when all are copied.

    Raises:
        OSError: what could not be copied is still in its old place.
    """
    sizes = {found.key: found.size for found in list_objects(path)}
    (bucket, _, root), new_root = path.partition("/"), target.partition("/")[2]
    for key, size in sizes.items():
        _copy(bucket, key, new_root + key.removeprefix(root), size)
    copied = {root + f.key.removeprefix(new_root): f.size for f in list_objects(target)}
    if not sizes.items() <= copied.items():
        raise OSError(f"{path} could not be copied to {target}; it is not changed")
    delete(path, list(sizes))  # and nothing that was added since


def _copy(bucket: str, key: str, new_key: str, size: int) -> None:
    source = {"Bucket": bucket, "Key": key}
    new = f"{bucket}/{new_key}"
    if size <= _COPY_BYTES:
        with_retries(lambda: _request("copy_object", new, CopySource=source), f"copying to {new}")
        return
    upload = Upload(new)
    try:
        for first in range(0, size, _COPY_BYTES):
            upload.copy_part(source, first, min(_COPY_BYTES, size - first))
        upload.publish()
    except BaseException:
        upload.abort()
        raise


class Object(NamedTuple):
    """What is stored under a key; `etag` differs for different content, here without its quotes."""

    key: str
    size: int
    etag: str


def etag_of(path: str) -> str:
    """The etag of `bucket/key`."""
    return str(_request("head_object", path)["ETag"]).strip('"')


def read(path: str, offset: int, length: int) -> bytes:
    """Some bytes of `bucket/key`, in one request."""
    return _read(path, offset, length)[0]


def read_at_most(path: str, most: int) -> bytes | int:
    """All of `bucket/key` by one request, or its size where that is more than `most` bytes."""
    with _as_os_errors(path):
        answer = _request("get_object", path)
        size = int(answer.get("ContentLength") or 0)
        if size > most:
            answer["Body"].close()
            return size
        # A gateway may leave the length out; where it is known, a shorter body is an error.
        content = bytes(answer["Body"].read(None if size else most + 1))
    if len(content) > most:
        raise OSError(f"{path} has more than {most:,} bytes, and the store does not give its size")
    return content


def read_if(path: str, etag: str, offset: int = 0, length: int | None = None) -> bytes:
    """Some bytes of `bucket/key`, or all.

    Raises:
        FileExistsError: it has another etag.
    """
    content, found = _read(path, offset, length, IfMatch=f'"{etag}"')
    if found not in ("", etag):  # from a store that ignores the condition
        raise FileExistsError(f"{path} has another etag")
    return content


def _read(path: str, offset: int, length: int | None, **condition: str) -> tuple[bytes, str]:
    """Content and etag; empty if no bytes are requested, for which S3 has no range."""
    if length == 0:
        return b"", ""
    part = {} if length is None else {"Range": f"bytes={offset}-{offset + length - 1}"}
    with _as_os_errors(path):
        answer = _request("get_object", path, **condition, **part)
        return bytes(answer["Body"].read()), str(answer["ETag"]).strip('"')


def list_objects(path: str) -> list[Object]:
    """Everything below `path/`."""
    found: list[Object] = []
    more: dict[str, Any] = {}
    bucket, _, prefix = path.partition("/")
    while True:
        answer = _request("list_objects_v2", bucket, Prefix=f"{prefix}/", **more)
        for entry in answer.get("Contents", []):  # some stores list etags without quotes
            found.append(Object(entry["Key"], entry["Size"], entry["ETag"].strip('"')))
        if not answer.get("IsTruncated"):
            return found
        more = {"ContinuationToken": answer["NextContinuationToken"]}


class Upload(io.RawIOBase):
    """A stream to one object that exists only when `publish` has been called.

    Small content is sent in one PUT; larger content in parts, some at a time, each retried
    separately. Closing the stream publishes nothing, so that an error between writing and closing
    leaves no object.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._buffer = bytearray()
        self._upload_id = ""
        self._parts: list[dict[str, Any]] = []
        self._pending: deque[Future[dict[str, Any]]] = deque()
        self._threads = ThreadPoolExecutor(_UPLOADS_AT_ONCE, "s3-upload")
        self._position = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, content: Any) -> int:
        """Take bytes; blocks while the maximum number of parts is in flight."""
        view = memoryview(content).cast("B")
        self._position += len(view)
        taken = 0
        while taken < len(view):
            count = len(self._parts) + len(self._pending)
            size = _PART_BYTES << (count // _PARTS_OF_A_SIZE)
            piece = view[taken : taken + size - len(self._buffer)]
            self._buffer += piece
            taken += len(piece)
            if len(self._buffer) == size:
                self._send_part()
        return len(view)

    def publish(self) -> None:
        """Create the object.

        Raises:
            OSError: some part could not be stored; nothing has been published.
        """
        what = f"writing {self._path}"
        if not self._upload_id:
            body = bytes(self._buffer)
            with_retries(lambda: _request("put_object", self._path, Body=body), what)
        else:
            if self._buffer:
                self._send_part()
            self._collect(0)
            with_retries(self._complete, what)
        self._threads.shutdown()

    def abort(self) -> None:
        """Abort the upload: no object, and no stored parts that would be billed."""
        self._threads.shutdown(cancel_futures=True)
        if not self._upload_id:
            return
        try:
            with_retries(
                lambda: self._multipart("abort_multipart_upload"), f"giving up {self._path}"
            )
        except OSError as error:
            logger.warning(
                "%s: parts of the unfinished upload %s stay in the bucket (%s); delete them with "
                "`aws s3api abort-multipart-upload` or a lifecycle rule",
                self._path,
                self._upload_id,
                error,
            )

    def copy_part(self, source: dict[str, str], first: int, byte_count: int) -> None:
        """The next part is these bytes of an object of this bucket."""
        self._start_upload()
        number, last = len(self._parts) + 1, first + byte_count - 1
        values = {"CopySource": source, "CopySourceRange": f"bytes={first}-{last}"}
        answer = with_retries(
            lambda: self._multipart("upload_part_copy", PartNumber=number, **values),
            f"copying {self._path}",
        )
        self._parts.append({"PartNumber": number, "ETag": answer["CopyPartResult"]["ETag"]})
        self._position += byte_count

    def _complete(self) -> None:
        try:
            self._multipart("complete_multipart_upload", MultipartUpload={"Parts": self._parts})
        except FileNotFoundError:  # done before, by a request whose answer was lost
            head = _request("head_object", self._path)
            if head["ContentLength"] != self._position:
                raise

    def _send_part(self) -> None:
        self._start_upload()
        self._collect(_UPLOADS_AT_ONCE - 1)
        number = len(self._parts) + len(self._pending) + 1
        body, self._buffer = bytes(self._buffer), bytearray()

        def put_part() -> dict[str, Any]:
            answer = with_retries(
                lambda: self._multipart("upload_part", PartNumber=number, Body=body),
                f"writing part {number} of {self._path}",
            )
            return {"PartNumber": number, "ETag": answer["ETag"]}

        self._pending.append(self._threads.submit(copy_context().run, put_part))

    def _collect(self, most_pending: int) -> None:
        while len(self._pending) > most_pending:
            # no limit: retry.py limits each part
            self._parts.append(self._pending.popleft().result())

    def _start_upload(self) -> None:
        if not self._upload_id:
            answer = with_retries(
                lambda: _request("create_multipart_upload", self._path), f"writing {self._path}"
            )
            self._upload_id = answer["UploadId"]

    def _multipart(self, operation: str, **values: Any) -> Any:
        return _request(operation, self._path, UploadId=self._upload_id, **values)


_WHOLE_BUCKET: Final = {"list_objects_v2", "delete_objects"}


def _request(operation: str, path: str, **values: Any) -> Any:
    bucket, _, key = path.partition("/")
    where = {"Bucket": bucket} if operation in _WHOLE_BUCKET else {"Bucket": bucket, "Key": key}
    if "Body" in values:
        # Every store checks content with this checksum; not all support newer ones.
        digest = hashlib.md5(values["Body"], usedforsecurity=False).digest()
        values["ContentMD5"] = base64.b64encode(digest).decode()
    with _as_os_errors(path):
        return getattr(client(), operation)(**where, **values)


@contextlib.contextmanager
def _as_os_errors(path: str) -> Iterator[None]:
    from botocore import exceptions

    try:
        yield
    except exceptions.ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        code = error.response.get("Error", {}).get("Code", "")
        raise _type_of(status, code)(f"{path}: {error} (HTTP status {status})") from error
    except (
        exceptions.HTTPClientError,  # no answer, or an incomplete one
        exceptions.IncompleteReadError,
        exceptions.ConnectTimeoutError,
        exceptions.EndpointConnectionError,
    ) as error:
        raise TransientError(f"{path}: {error}") from error
    except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError) as error:
        raise DeniedError(f"{path}: {error}") from error
    except exceptions.BotoCoreError as error:
        raise OSError(f"{path}: {error}") from error


_TYPES: Final[dict[int | None, type[OSError]]] = {
    403: DeniedError,
    404: FileNotFoundError,
    408: TransientError,
    412: FileExistsError,
    429: TransientError,
}
_TRANSIENT_CODES: Final = {
    "BadDigest", "ConditionalRequestConflict", "IncompleteBody", "InternalError",
    "OperationAborted", "RequestThrottled", "RequestTimeout", "ServiceUnavailable", "SlowDown",
    "Throttling", "ThrottlingException",
}  # fmt: skip
"""Error codes of S3 with HTTP statuses 400, 409 and 5xx, or for one of the keys of a request."""


def _type_of(status: int | None, code: str) -> type[OSError]:
    if code in _TRANSIENT_CODES or (status or 0) >= 500:
        return TransientError
    return DeniedError if code == "AccessDenied" else _TYPES.get(status, OSError)
