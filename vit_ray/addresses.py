"""Addresses of storage, MLflow and Ray: which of them can be used, and their texts without secrets.

An address such as `postgresql://user:password@host/mlflow` is needed to reach a tracking server.
Nothing that outlives the process may contain it: no recipe in a checkpoint, dry run, log or error.
"""

import contextlib
import os
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

# In shipped recipes, for the user's own folder of data and runs.
PLACEHOLDER: Final = "s3://BUCKET"
# Schemes of stores; the last two need an extra.
_STORES: Final = ("s3", "gs", "az")
_UNSUPPORTED: Final = {
    "hf": "the Hugging Face hub has weights only (init_from); for images run `hf download` first, "
    "and give the folder",
    "s3a": "it is Hadoop's name for s3://; write s3://",
    "gcs": "write gs://",
    "abfs": "write az://",
    "http": "download the files, and give their folder",
    "https": "download the files, and give their folder; a store's own address is AWS_ENDPOINT_URL",
}
# Pattern of the address of a Ray cluster.
HOST_PORT: Final = r"\[?([^/\]]+)\]?:(\d+)"
# Address of a SQLite file, with or without SQLAlchemy's driver; the groups are scheme and path.
_SQLITE: Final = re.compile(r"(sqlite(?:\+\w+)?:///)(.*)", re.DOTALL)
# Ray's folder for the copies of what `ray job submit --working-dir` uploads.
UPLOADED: Final = "working_dir_files"
# The table that MLflow creates first (3.17).
_FIRST_TABLE: Final = "experiments"
_GIVE_STORE: Final = (
    "give the MLflow database of the runs, such as sqlite:///mlflow.db, or the address of a server"
)
# User and password of a web address. The host ends at a slash; `host:5000/path@1` is a port and a
# path. A password may contain a quote, an @ or a slash: it ends at the last @ before the path, or
# else at the last @ after a slash.
_WEB: Final = re.compile(
    r"""(?<=://)(?!\[)(?:[^\s/:'"<>?#]*:(?!\d+(?:[/?#]|$))"""
    r"""(?:[^\s/]*|[^\s@'"<>]*(?:@[^\s/@'"<>]*)*)|[^\s/:'"<>?#]+)@"""
)
# For SQLAlchemy everything up to the @ is the password (`_parse_url`, 2.0): also slashes, question
# marks and blanks. Blanks belong to a password only if the whole text is an address.
_SCHEME: Final = r"(?<![\w+])(?!(?:https?|s3|gs|hf|file|ray)://)(?P<scheme>[\w+]+://)"
_DATABASE: Final = re.compile(_SCHEME + r"[^:/\s@]*:[^@\s]*@(?:[^\s/@'\"<>]*@)*")
_DATABASE_ALONE: Final = re.compile("^" + _SCHEME + r"[^:/@]*:[^@]*@")
# Values after `?` and `&`, except of these keys: drivers have many names for a password.
_QUERY: Final = re.compile(
    r"""(?<=[?&;])(?!(?:driver|charset|sslmode|mode|cache|uri|timeout|connect_timeout|versionId"""
    r"""|application_name|schema|page|region|endpoint_override)=)([\w.-]+)=[^\s&;'"<>]*"""
)
_WEB_ADDRESS: Final = re.compile(r"""(https?://[^\s'"<>]*)""")
# In a web link only values of such keys are secrets: the page needs the others.
_SECRET_NAME: Final = re.compile(
    r"""(?<=[?&;])([\w.-]*(?:pass|pwd|token|secret|key|sig|cred|auth)[\w.-]*)=[^\s&;'"<>]*""", re.I
)
# Characters that a terminal interprets, or that change the order in which it shows a text.
_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def with_home(path: str) -> Path:
    """The path with `~` as the home folder."""
    return Path(os.path.expanduser(path))


def absolute_path(path: str, folder: str = "") -> str:
    """The absolute form of a local path. `..` after a link is the folder above the link's target,
    as for the operating system; other links stay.

    Args:
        folder: what a relative path is relative to; by default the current folder.
    """
    joined = Path(folder or os.getcwd(), with_home(path))
    above, dots, below = f"{joined}/".rpartition("/../")
    return str(Path(os.path.realpath(above + dots), below) if dots else joined)


def is_placeholder(path: str) -> bool:
    """Whether the path is still the placeholder of a shipped recipe."""
    return f"{path}/".startswith(f"{PLACEHOLDER}/")


def check_address(path: str) -> None:
    """
    Raises:
        ValueError: the address is empty, has an unsupported scheme, has no bucket or the recipes'
            placeholder, or contains credentials, which the error does not show.
    """
    if not path.strip():
        raise ValueError("the path is empty; give a folder, a file or an s3:// address")
    scheme, has_scheme, rest = path.partition("://")
    if not has_scheme or scheme == "file":
        return
    if scheme not in _STORES:
        hint = _UNSUPPORTED.get(
            scheme, f"use a local path, or {', '.join(_STORES)}://BUCKET/FOLDER"
        )
        raise ValueError(f"the scheme {scheme!r} of an address is not supported: {hint}")
    bucket = rest.partition("/")[0]
    if not bucket:
        raise ValueError(f"{path!r} names no bucket; give {scheme}://bucket/folder")
    if is_placeholder(path):
        raise ValueError(
            f"{path!r} is a placeholder of a shipped recipe: set its key (`--dry-run` shows "
            "which) to your own folder, s3://my-bucket/folder or a local one"
        )
    without_credentials(path)


def without_credentials(path: str) -> str:
    """The path or address itself.

    Raises:
        ValueError: the address contains credentials, which the error does not show.
    """
    scheme, _, rest = path.partition("://")
    bucket = rest.partition("/")[0]
    if scheme in _STORES and set("@:") & set(bucket):  # a secret may have a slash before its @
        raise ValueError(
            f"the {scheme}:// address has an @ or a : in its bucket, as if it held credentials; "
            f"give {scheme}://bucket/folder, and set AWS_ACCESS_KEY_ID and its secret in the "
            "environment"
        )
    return path


def require_store(uri: str) -> None:
    """Check that a tracking store exists: for a mistyped path MLflow would create a database.

    Raises:
        ValueError: the address is of a SQLite file that does not exist, or that is not MLflow's.
    """
    path = sqlite_file(uri)
    if path is not None and not path.is_file():
        raise ValueError(f"tracking.uri={uri}: no such file; {_GIVE_STORE}")
    refuse_other_file(uri)


def refuse_other_file(uri: str) -> None:
    """Check that a SQLite file, if it exists, is MLflow's, which adds its tables to any database.

    Raises:
        ValueError: the file is not a database, or that of another program.
    """
    path = sqlite_file(uri)
    if path is None or not path.is_file():
        return
    address, tables = f"file:{quote(str(path.absolute()))}?mode=ro", ""
    try:
        with contextlib.closing(sqlite3.connect(address, timeout=0.0, uri=True)) as store:
            rows = store.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            tables = ", ".join(sorted(name for (name,) in rows))
    except sqlite3.Error as error:  # MLflow itself reports a database that is locked or damaged
        tables = str(error) if error.sqlite_errorcode == sqlite3.SQLITE_NOTADB else ""
    if tables and _FIRST_TABLE not in tables.split(", "):
        raise ValueError(
            f"tracking.uri={uri}: the file belongs to another program ({tables[:80]}); "
            f"{_GIVE_STORE}"
        )


def sqlite_file(uri: str) -> Path | None:
    """The SQLite file of a tracking store, without escapes such as `%20`; None for a server."""
    match = _SQLITE.fullmatch(uri)
    return Path(unquote(match[2].partition("?")[0])) if match else None


def absolute_uri(uri: str, folder: str | Path = "") -> str:
    """The address with a relative SQLite file made absolute, so that it is valid in any process.

    Args:
        uri: `TrackingConfig.uri`.
        folder: what a relative file is relative to; by default the current folder.
    """
    match = _SQLITE.fullmatch(uri)
    if match is None or match[2].startswith("/"):
        return uri
    # In an address `%` begins an escape, and `?` ends the path.
    above = str(folder or os.getcwd()).replace("%", "%25").replace("?", "%3F")
    return f"{match[1]}{above}/{match[2]}"


def local_folder(address: str) -> Path | None:
    """The folder of a path or a `file://` address; None for other addresses."""
    parts = urlsplit(address)
    if parts.scheme not in ("", "file"):
        return None
    return Path(unquote(parts.path) if parts.scheme else address)


def redact(text: str) -> str:
    """The text without users and passwords of addresses, and with control characters escaped."""
    text = _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)
    if "://" not in text:
        return text
    text = _DATABASE.sub(r"\g<scheme>", _DATABASE_ALONE.sub(r"\g<scheme>", text))
    parts = _WEB_ADDRESS.split(_WEB.sub("", text))  # every second part is a web link
    secrets = (_QUERY, _SECRET_NAME)
    return "".join(secrets[at % 2].sub(r"\1=***", part) for at, part in enumerate(parts))


def userinfo(uri: str) -> str:
    """`user:password` of an address; empty if it has none."""
    match = _DATABASE_ALONE.search(uri) or _WEB.search(uri)
    return re.sub(r"^[\w+]+://", "", match[0]).removesuffix("@") if match else ""


def redacted(tree: Any) -> Any:
    """Plain data with every text redacted, keys too."""
    return with_texts(tree, lambda _, text: redact(text))


def with_texts(tree: Any, change: Callable[[str, str], str], key: str = "") -> Any:
    """Plain data with every text, and every key, replaced by what `change` returns.

    Args:
        tree: the data below the dotted `key`; values of a list have the list's key.
        change: takes the dotted key of a text, which is empty for a key itself, and the text.
    """
    if isinstance(tree, dict):
        return {
            with_texts(name, change): with_texts(value, change, f"{key}.{name}".lstrip("."))
            for name, value in tree.items()
        }
    if isinstance(tree, (list, tuple)):
        return [with_texts(value, change, key) for value in tree]
    return change(key, tree) if isinstance(tree, str) else tree


def host_and_port(address: str) -> tuple[str, int] | None:
    """Host and port of `HOST:PORT`; None for `auto` and `local`, which Ray resolves itself.

    Raises:
        ValueError: the address is neither, such as `ray://` of Ray Client, whose driver runs
            outside of the cluster.
    """
    if match := re.fullmatch(HOST_PORT, address):
        return match[1], int(match[2])
    if address not in ("auto", "local"):
        raise ValueError(
            f"RAY_ADDRESS={address} is not an address; give HOST:PORT as `ray start --head` "
            "printed it, or auto for the Ray of this machine; from outside of a cluster use `ray "
            "job submit`; or unset RAY_ADDRESS"
        )
    return None
