"""Addresses of MLflow's stores, and errors about them, without secrets; needs no MLflow."""

from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from vit_ray.addresses import redact, userinfo

_SHORTEST_PASSWORD: Final = 8
"""Shortest secret that is also removed from errors where it appears by itself."""
_REFUSALS: Final = ("UNAUTHENTICATED", "PERMISSION_DENIED", "CUSTOMER_UNAUTHORIZED")
"""How MLflow reports 401 and 403."""


def safe_uri(uri: str) -> str:
    """The address without user, password and query, for logs and tags."""
    safe = redact(uri)
    parts = _parts(safe)
    if parts is None or not parts.netloc:
        return safe.partition("?")[0]
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=""))


def redact_uri(text: str, uri: str) -> str:
    """The text of an error without the address's secrets, however they are quoted.

    A password is also removed where it appears by itself, unless it is short and could be part of
    any number.
    """
    text = redact(text.replace(uri, safe_uri(uri)))
    parts, user = _parts(uri), userinfo(uri)
    password = user.partition(":")[2]
    secrets = [f"{user}@" if user else "", f"?{parts.query}" if parts and parts.query else ""]
    secrets += [word for word in (password, unquote(password)) if len(word) >= _SHORTEST_PASSWORD]
    for secret in filter(None, secrets):
        text = text.replace(secret, "")
    return text


def _parts(uri: str) -> SplitResult | None:
    try:
        return urlsplit(uri)
    except ValueError:  # an odd number of brackets
        return None


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
