"""Which addresses of storage and MLflow can be used, as far as that takes no library."""

from pathlib import Path
from typing import Final

PLACEHOLDER: Final = "s3://BUCKET"
"""In shipped recipes, which leave the place of data and runs to their user."""
_SQLITE: Final = b"SQLite format 3\0"
"""How its files begin (sqlite.org/fileformat.html); one without a table yet is empty."""


def is_placeholder(path: str) -> bool:
    """Whether a shipped recipe's user has not said yet where this is to be."""
    return f"{path}/".startswith(f"{PLACEHOLDER}/")


def check_address(path: str) -> None:
    """
    Raises:
        ValueError: the address has a scheme that is not served, names no bucket or the recipes'
            placeholder, or holds credentials, which are not repeated.
    """
    if path.startswith("s3://"):
        if not path.split("/")[2]:
            raise ValueError(f"{path!r} names no bucket; give s3://bucket/folder")
        if is_placeholder(path):
            raise ValueError(
                f"{path!r} is a placeholder of a shipped recipe: give the key that has it "
                "(`--dry-run` shows which) a folder of yours, s3://my-bucket/folder or a local one"
            )
        # A secret may itself have a slash in it, so that its @ comes later.
        if set("@:") & set(path.split("/")[2]):
            raise ValueError(
                "an s3:// address has an @ or a : in its bucket; credentials come from the "
                "environment only: give s3://bucket/folder, and set AWS_ACCESS_KEY_ID and its "
                "secret"
            )
    elif path.startswith(("gs://", "gcs://")):
        raise ValueError(
            "a gs:// address is not served; Google's storage answers to S3, too: give "
            "s3://bucket/folder, and set AWS_ENDPOINT_URL=https://storage.googleapis.com, "
            "AWS_REQUEST_CHECKSUM_CALCULATION=when_required, and an HMAC key as "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    elif "://" in path and not path.startswith("file://"):
        raise ValueError(
            f"an address with the scheme {path.partition('://')[0]!r} has a scheme that is not "
            "served; use a local path or s3://bucket/folder"
        )


def require_store(uri: str) -> None:
    """A report reads; it must not leave an empty database where a path was mistyped.

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
