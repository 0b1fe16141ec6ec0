"""Secrets that stand in addresses, taken out of whatever is written or shown.

An address such as `postgresql://user:password@host/mlflow` is needed to reach a tracking server.
Nothing that outlives the process may hold it: no recipe in a checkpoint, no dry run, log or error.
"""

from __future__ import annotations

import logging
import re
from typing import Any, Final

# A password may have a quote, an @ or a slash in it: it ends at the last @ before the path, or
# where there is none, at one behind a slash. host:5000/path@1 is a port, a path and no password.
_USERINFO: Final = re.compile(
    r"""(?<=://)(?:[^\s/:'"<>?#]*:(?!\d+(?:[/?#]|$))"""
    r"""(?:[^\s/]*|[^\s@'"<>]*(?:@[^\s/@'"<>]*)*)|[^\s/:'"<>?#]+)@"""
)
_QUERY: Final = re.compile(
    r"(?<=[?&;])((?:[\w.-]*[_.-])?(?:password|passwd|pwd|secret|token|signature|credential|key)"
    r"[\w.-]*)=[^\s&;'\"<>]*",
    re.IGNORECASE,
)


def redact(text: str) -> str:
    """The text with users and passwords of addresses left out."""
    return _QUERY.sub(r"\1=***", _USERINFO.sub("", text)) if "://" in text else text


def userinfo(uri: str) -> str:
    """`user:password` of an address; empty when it has none."""
    found = _USERINFO.search(uri)
    return found[0].removesuffix("@") if found else ""


def redacted(tree: Any) -> Any:
    """Plain data with every text redacted, keys too."""
    if isinstance(tree, str):
        return redact(tree)
    if isinstance(tree, dict):
        return {redacted(key): redacted(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [redacted(value) for value in tree]
    return tree


class RedactingFormatter(logging.Formatter):
    """Log lines, tracebacks too, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        return redact(super().format(record))


def credentials_problem(tree: Any, key: str = "") -> str | None:
    """What is wrong where a value is an `s3://` address with credentials; it is not repeated."""
    if isinstance(tree, dict):
        found = (credentials_problem(v, f"{key}.{k}" if key else k) for k, v in tree.items())
        return next(filter(None, found), None)
    if isinstance(tree, (list, tuple)):
        return next(filter(None, (credentials_problem(v, key) for v in tree)), None)
    if isinstance(tree, str) and tree.startswith("s3://") and set("@:") & set(tree.split("/")[2]):
        return (
            f"{key} is an s3:// address with an @ or a : in its bucket; credentials come from the "
            "environment only: give s3://bucket/folder, and set AWS_ACCESS_KEY_ID and its secret"
        )
    return None
