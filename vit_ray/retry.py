"""Trying again when an object store is slow, throttles, or drops a connection.

pyarrow's own retries give up within seconds, do not know all of the answers that mean "later", and
are lost when a file system is pickled; so they are switched off, and each whole operation is
retried here instead.

An operation may contain others that are retried. Attempts and waits are not multiplied then: when
an inner operation has given up, the outer one does not try again; both follow the outer policy.
"""

import errno
import logging
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final, TypeVar

Result = TypeVar("Result")

_LOG: Final = logging.getLogger(__name__)

_TRANSIENT: Final = re.compile(
    r"SLOW_DOWN|SlowDown|INTERNAL_FAILURE|InternalError|SERVICE_UNAVAILABLE|NETWORK_CONNECTION"
    r"|REQUEST_TIMEOUT|RequestTimeout|THROTTLING|Throttl|HTTP status (?:408|429|5\d\d)|curlCode"
    r"|timed? ?out|Connection (?:reset|was closed|refused|broken)|Could(?:n't| not) connect",
    re.IGNORECASE,
)
"""In the errors of pyarrow 25's S3FileSystem, which have no other type than OSError."""
_TRANSIENT_ERRNO: Final = {
    errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EIO, errno.ESTALE, errno.ETIMEDOUT,
    errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ENOTCONN,
}  # fmt: skip
"""Errors of network file systems while their server is away."""
_PERHAPS_THROTTLED: Final = re.compile(r"ACCESS_DENIED|AccessDenied|HTTP status 403")
"""In those of pyarrow 25, in the same way."""
_WRONG_CREDENTIALS: Final = re.compile(
    r"Invalid_?Access_?Key_?Id|Signature_?Does_?Not_?Match|Request_?Time_?Too_?Skewed"
    r"|Expired_?Token|Invalid_?Token",
    re.IGNORECASE,
)
"""S3's codes, as written by botocore and pyarrow."""


_NO_CREDENTIALS: Final = re.compile(r"Unable to locate credentials|Partial credentials found")
"""botocore's words."""


class TransientError(OSError):
    """The store asks to try again later, or its answer was incomplete."""


class DeniedError(OSError):
    """The store refuses these credentials; some answer so when they throttle."""


@dataclass(frozen=True)
class RetryPolicy:
    """How often, and for how long, an operation is tried.

    The n-th wait is `first_delay_s` x 2^n, at most `max_delay_s`, times a random 0.5 to 1.5.
    """

    attempts: int = 10
    denied_attempts: int = 3
    first_delay_s: float = 0.2
    max_delay_s: float = 15.0
    budget_s: float = 180.0
    tries_every_error: bool = False
    """Also retry errors that do not look transient: for operations that an unknown error must not
    end."""
    tell: Callable[[str], object] = field(default=_LOG.info, compare=False)
    """Called for each attempt that fails and is followed by another."""


DEFAULT_POLICY: Final = RetryPolicy()
ONE_ATTEMPT: Final = RetryPolicy(attempts=1)

_policy: Final = ContextVar("retry_policy", default=DEFAULT_POLICY)
_GIVEN_UP: Final = "vit_ray_given_up"
"""Attribute of an error after the last attempt, so that no level tries again."""


@contextmanager
def retry_policy(policy: RetryPolicy) -> Iterator[None]:
    """The policy of all operations in this block, in this thread."""
    before = _policy.set(policy)
    try:
        yield
    finally:
        _policy.reset(before)


def with_retries(
    operation: Callable[[], Result],
    what: str,
    policy: RetryPolicy | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Result:
    """The result of an operation, repeated while the policy takes its OSError for transient.

    Args:
        what: names the operation in the log.
        policy: of this operation and those inside it; by default that of the surrounding block.

    Raises:
        OSError: from the last attempt, with the number of attempts in its notes.
    """
    policy = policy or _policy.get()
    start_s = clock()
    for attempt in range(1, policy.attempts + 1):
        try:
            with retry_policy(policy):
                return operation()
        except OSError as error:
            if hasattr(error, _GIVEN_UP):
                raise
            delay_s = min(policy.max_delay_s, policy.first_delay_s * 2.0 ** (attempt - 1))
            delay_s *= random.uniform(0.5, 1.5)
            is_last = attempt >= _allowed_attempts(error, policy)
            if is_last or clock() - start_s + delay_s > policy.budget_s:
                error.add_note(f"{what} failed after {attempt} attempts.")
                setattr(error, _GIVEN_UP, True)
                raise
            policy.tell(f"{what}: attempt {attempt} failed ({error})")
            sleep(delay_s)
    raise AssertionError("unreachable: the last attempt returns or raises")


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
        if isinstance(error, OSError) and is_transient(error):
            raise  # nothing has been read
        time.sleep(pause_s)
        return read()


def is_transient(error: OSError) -> bool:
    """Whether the store is the cause, not what is stored."""
    if isinstance(error, FileNotFoundError):
        return False
    if isinstance(error, ConnectionError | TimeoutError | TransientError):
        return True
    return error.errno in _TRANSIENT_ERRNO or bool(_TRANSIENT.search(str(error)))


def is_denied(error: Exception) -> bool:
    """Whether the store refuses these credentials."""
    is_refused = isinstance(error, DeniedError) or bool(_PERHAPS_THROTTLED.search(str(error)))
    return is_refused or has_wrong_credentials(error)


def is_of_the_store(error: BaseException) -> bool:
    """Whether the store does not answer or refuses, so that nothing is known of what is stored."""
    return isinstance(error, OSError) and (is_transient(error) or is_denied(error))


def has_no_credentials(error: Exception) -> bool:
    """Whether this process has no key for the store, or only a part of one."""
    return bool(_NO_CREDENTIALS.search(str(error)))


def has_wrong_credentials(error: Exception) -> bool:
    """Whether the store does not know the key, its secret or the time; else a right is missing."""
    return bool(_WRONG_CREDENTIALS.search(str(error)))


def _allowed_attempts(error: OSError, policy: RetryPolicy) -> int:
    if isinstance(error, FileNotFoundError):
        return 1
    if is_denied(error):
        return min(policy.denied_attempts, policy.attempts)
    is_tried = policy.tries_every_error or is_transient(error)
    return policy.attempts if is_tried else 1
