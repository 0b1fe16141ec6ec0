"""Limits of MLflow's requests, by its environment variables; those that a user has set count."""

import os
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


def limit_requests() -> list[str]:
    """Set the limits in a process of our own; returns the variables that were not set before."""
    new = [name for name in _SETTINGS if name not in os.environ]
    os.environ.update({name: _SETTINGS[name] for name in new})
    return new


@contextmanager
def limited_requests() -> Iterator[None]:
    """Set the limits inside this block alone: the process may be a notebook."""
    new = limit_requests()
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)
