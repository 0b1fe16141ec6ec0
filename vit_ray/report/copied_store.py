"""Where the files of runs are if their MLflow store is a copy: of another machine or folder."""

import os
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

from vit_ray.addresses import sqlite_file

_RUN_PARTS: Final = 4
"""`mlruns/EXPERIMENT/RUN/artifacts`, below the folder of a SQLite store."""


class OtherFiles(NamedTuple):
    """A run's files that belong to another place than its SQLite store, see `files_elsewhere`."""

    address: Path
    """Folder that the record names; never written."""
    folder: Path
    """Folder to read: the address or, if that does not exist, the same place next to the store."""


def files_elsewhere(uri: str, artifact_uri: str) -> OtherFiles | None:
    """Where a run's files are if its store is a copy: not below `mlruns` next to the SQLite file.

    MLflow records absolute addresses, so a copied store still names the files of its original.

    Args:
        artifact_uri: as MLflow has it with the run.

    Returns:
        None if the store is no SQLite file, or the files are its own or not on this machine.
    """
    store, folder = sqlite_file(uri), local_folder(artifact_uri)
    if store is None or folder is None or are_own_files(uri, artifact_uri):
        return None
    address = folder.resolve()
    near = store.resolve().parent.joinpath(*address.parts[-_RUN_PARTS:])
    is_near = near.is_dir() and not address.is_dir()
    return OtherFiles(address, near if is_near else address)


def are_own_files(uri: str, artifact_uri: str) -> bool:
    """Whether a run's files may be written: those of a server, or below `mlruns` next to the SQLite
    file. Others, also on S3, may be those of another store, of which this one is a copy.

    The store, its folder and `mlruns` may be symbolic links. A copy in the folder of its original
    shares the files.
    """
    store, folder = sqlite_file(uri), local_folder(artifact_uri)
    if store is None:
        return True
    if folder is None:
        return False
    typed = Path(os.path.abspath(store)).parent
    homes = {one / "mlruns" for one in (typed, typed.resolve(), store.resolve().parent)}
    addresses = Path(os.path.abspath(folder)), folder.resolve()
    return any(address.is_relative_to(home) for address in addresses for home in homes)


def local_folder(address: str) -> Path | None:
    """The folder of a path or a `file://` address; None for other addresses."""
    parts = urlsplit(address)
    if parts.scheme not in ("", "file"):
        return None
    return Path(unquote(parts.path) if parts.scheme else address)
