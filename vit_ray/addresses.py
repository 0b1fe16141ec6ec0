"""Which addresses of storage and MLflow can be used, as far as no library is needed to check."""

from pathlib import Path
from typing import Final

PLACEHOLDER: Final = "s3://BUCKET"
"""Placeholder in shipped recipes for the user's own place of data and runs."""
_SQLITE: Final = b"SQLite format 3\0"
"""First bytes of its files (sqlite.org/fileformat.html); a database without tables is empty."""


def is_placeholder(path: str) -> bool:
    """Whether the path is still the placeholder of a shipped recipe."""
    return f"{path}/".startswith(f"{PLACEHOLDER}/")


def check_address(path: str) -> None:
    """
    Raises:
        ValueError: the address has an unsupported scheme, names no bucket or the recipes'
            placeholder, or holds credentials, which are not repeated.
    """
    if path.startswith("s3://"):
        if not path.split("/")[2]:
            raise ValueError(f"{path!r} names no bucket; give s3://bucket/folder")
        if is_placeholder(path):
            raise ValueError(
                f"{path!r} is a placeholder of a shipped recipe: set its key (`--dry-run` shows "
                "which) to your own folder, s3://my-bucket/folder or a local one"
            )
        # A secret may contain a slash, so that its @ comes later.
        if set("@:") & set(path.split("/")[2]):
            raise ValueError(
                "an s3:// address has an @ or a : in its bucket, as if it held credentials; give "
                "s3://bucket/folder, and set AWS_ACCESS_KEY_ID and its secret in the environment"
            )
    elif path.startswith(("gs://", "gcs://")):
        raise ValueError(
            "a gs:// address is not supported, but Google's storage also has an S3 interface: give "
            "s3://bucket/folder, and set AWS_ENDPOINT_URL=https://storage.googleapis.com, "
            "AWS_REQUEST_CHECKSUM_CALCULATION=when_required, and an HMAC key as AWS_ACCESS_KEY_ID "
            "and AWS_SECRET_ACCESS_KEY"
        )
    elif "://" in path and not path.startswith("file://"):
        raise ValueError(
            f"the scheme {path.partition('://')[0]!r} of an address is not supported; use a local "
            "path or s3://bucket/folder"
        )


def require_store(uri: str) -> None:
    """A report only reads; a mistyped path must not leave an empty database.

    Raises:
        ValueError: the address is of a SQLite file that does not exist, or of another file.
    """
    if not uri.startswith("sqlite:///"):
        return
    path, what = Path(uri.removeprefix("sqlite:///").partition("?")[0]), "no such file"
    if path.is_file():
        with path.open("rb") as file:
            begins = file.read(len(_SQLITE))
        if begins in (b"", _SQLITE):
            return
        what = "the file is not a database"
    raise ValueError(
        f"tracking.uri={uri}: {what}; give the MLflow database of the runs, such as "
        "sqlite:///mlflow.db, or the address of a server"
    )
