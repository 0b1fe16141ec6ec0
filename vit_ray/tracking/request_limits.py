"""Limits of MLflow's requests, by its environment variables; those that a user has set count."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_SETTINGS: Final = {
    # MLflow's own defaults let one call block for minutes: 120 s timeout, 7 retries.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    # At the end of a run it prints the server's address with its password.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}


_lock: Final = threading.Lock()
"""Of what blocks in several threads share: those that are open, and what they have set."""
_open: Final[set[object]] = set()
_ours: Final[set[str]] = set()


def limit_requests() -> list[str]:
    """Set the limits in a process of our own; returns the variables that were not set before."""
    new = [name for name in _SETTINGS if name not in os.environ]
    os.environ.update({name: _SETTINGS[name] for name in new})
    return new


@contextmanager
def limited_requests() -> Iterator[None]:
    """Set the limits inside this block alone: the process may be a notebook."""
    block = object()
    with _lock:
        _open.add(block)
        _ours.update(limit_requests())
    try:
        yield
    finally:
        with _lock:
            _open.remove(block)
            while _ours and not _open:
                os.environ.pop(_ours.pop(), None)
