"""Trying again when an object store is slow, throttles, or drops a connection.

pyarrow's own retries give up within seconds, do not know all of the answers that mean "later", and
are lost when a file system is pickled; so they are switched off, and this stands around each whole
operation instead.
"""

import errno
import logging
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

Result = TypeVar("Result")

_LOG: Final = logging.getLogger(__name__)

_TRANSIENT: Final = re.compile(
    r"SLOW_DOWN|SlowDown|INTERNAL_FAILURE|InternalError|SERVICE_UNAVAILABLE|NETWORK_CONNECTION"
    r"|ConditionalRequestConflict|OperationAborted|BadDigest|IncompleteBody"
    r"|REQUEST_TIMEOUT|RequestTimeout|THROTTLING|Throttl|HTTP status (?:408|429|5\d\d)|curlCode"
    r"|timed? ?out|Connection (?:reset|was closed|refused|broken)|Could(?:n't| not) connect",
    re.IGNORECASE,
)
_TRANSIENT_ERRNO: Final = {
    errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EIO, errno.ESTALE, errno.ETIMEDOUT
}  # fmt: skip
"""What network file systems say while their server is away."""
_PERHAPS_THROTTLED: Final = re.compile(r"ACCESS_DENIED|HTTP status 403")
"""Some stores answer 403 when they throttle; a wrong key answers so too, and must fail soon."""


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


DEFAULT_POLICY: Final = RetryPolicy()
ONE_ATTEMPT: Final = RetryPolicy(attempts=1)


def with_retries(
    operation: Callable[[], Result],
    what: str,
    policy: RetryPolicy = DEFAULT_POLICY,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Result:
    """The result of an operation, repeated while its OSError looks transient.

    Args:
        what: names the operation in the log.

    Raises:
        OSError: that of the last attempt, with the number of attempts in its notes.
    """
    start_s = clock()
    for attempt in range(1, policy.attempts + 1):
        try:
            return operation()
        except OSError as error:
            delay_s = _delay_s(policy, attempt)
            is_last = attempt >= _allowed_attempts(error, policy)
            if is_last or clock() - start_s + delay_s > policy.budget_s:
                error.add_note(f"{what} failed after {attempt} attempts.")
                raise
            _LOG.info("%s: attempt %d failed (%s)", what, attempt, error)
            sleep(delay_s)
    raise AssertionError("unreachable: the last attempt returns or raises")


def second_look(read: Callable[[], Result], *differs: type[Exception]) -> Result:
    """What a read gives, or gives when it is made again: bytes may be changed on their way.

    Args:
        differs: what is raised where something is not as it was written.
    """
    try:
        return read()
    except differs as error:
        if isinstance(error, OSError) and is_transient(error):
            raise  # nothing has been seen
        return read()


def is_transient(error: OSError) -> bool:
    """Whether the store, and not what is stored, is at fault."""
    if isinstance(error, FileNotFoundError):
        return False
    is_kind = isinstance(error, ConnectionError | TimeoutError) or error.errno in _TRANSIENT_ERRNO
    return is_kind or bool(_TRANSIENT.search(str(error)))


def is_denied(error: Exception) -> bool:
    """Whether the store refuses these credentials."""
    return bool(_PERHAPS_THROTTLED.search(str(error)))


def _allowed_attempts(error: OSError, policy: RetryPolicy) -> int:
    if isinstance(error, FileNotFoundError):
        return 1
    if is_denied(error):
        return policy.denied_attempts
    return policy.attempts if is_transient(error) else 1


def _delay_s(policy: RetryPolicy, attempt: int) -> float:
    delay_s = min(policy.max_delay_s, policy.first_delay_s * 2.0 ** (attempt - 1))
    return delay_s * random.uniform(0.5, 1.5)
