"""Requests to MLflow's stores: time limits, and addresses and errors without secrets.

Does not import MLflow.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from urllib.parse import unquote

from vit_ray.addresses import redact, userinfo

# Defaults of MLflow's environment variables; values that a user has set are kept.
_SETTINGS: Final = {
    # MLflow's own defaults let one call block for minutes: 120 s timeout, 7 retries.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    # At the end of a run it prints the server's address with its password.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
# A shorter password is not removed where it appears alone: it could be part of any number.
_MIN_PASSWORD_CHARS: Final = 8
# MLflow's codes for HTTP 401 and 403.
_REFUSALS: Final = ("UNAUTHENTICATED", "PERMISSION_DENIED", "CUSTOMER_UNAUTHORIZED")

# Variables that each open block has set. Blocks in several threads share them: the last block to
# end removes them.
_names: Final[list[list[str]]] = []
_lock: Final = threading.Lock()


def limit_requests() -> list[str]:
    """Set the limits for this process; returns the variables that were not set before."""
    new = [name for name in _SETTINGS if name not in os.environ]
    os.environ.update({name: _SETTINGS[name] for name in new})
    return new


@contextmanager
def limited_requests() -> Iterator[None]:
    """Set the limits only inside this block: the process may be a notebook."""
    with _lock:
        _names.append(limit_requests())
    try:
        yield
    finally:
        with _lock:
            names = _names.pop()
            if _names:
                _names[-1] += names
            else:
                for name in names:
                    os.environ.pop(name, None)


def safe_uri(uri: str) -> str:
    """The address without user, password and query, for logs and tags."""
    return redact(uri).partition("?")[0]


def redact_uri(text: str, uri: str) -> str:
    """The text of an error without the address's secrets, quoted or not."""
    text = redact(text.replace(uri, safe_uri(uri)))
    user, query = userinfo(uri), uri.partition("?")[2]
    password = user.partition(":")[2]
    secrets = [f"{user}@" if user else "", f"?{query}" if query else ""]
    secrets += [word for word in (password, unquote(password)) if len(word) >= _MIN_PASSWORD_CHARS]
    for secret in filter(None, secrets):
        text = text.replace(secret, "")
    return text


def unusable(uri: str, error: Exception) -> RuntimeError:
    """The error for a store that cannot be used, without the address's secrets."""
    reason = redact_uri(str(error).strip(), uri).partition("\n")[0].rstrip(".")
    if getattr(error, "error_code", "") in _REFUSALS:
        return RuntimeError(
            f"MLflow at {safe_uri(uri)} requires a log-in, or refuses the given one: set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, in "
            f"the environment of the command ({reason})"
        )
    return RuntimeError(
        f"MLflow at {safe_uri(uri)} cannot be used: {reason}; check the address, and give the file "
        "of its runs, such as sqlite:///mlflow.db, or the address of a running server"
    )
