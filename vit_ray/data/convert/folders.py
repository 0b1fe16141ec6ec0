"""Class folders: the files below each, at any depth."""

import os
from collections.abc import Iterator
from typing import Final

from vit_ray.data.convert.files import named_split
from vit_ray.data.convert.labels import checked_label
from vit_ray.data.convert.rows import Row, Unit, relative
from vit_ray.data.dataset import MANIFEST_FILE, STAGING_FOLDER
from vit_ray.data.file_names import is_hidden, is_image_name
from vit_ray.storage import Location, local_info, locate

_OURS: Final = {MANIFEST_FILE, STAGING_FOLDER}


def folder_rows(unit: Unit) -> Iterator[Row]:
    """Files below a class folder, sorted by path; hidden ones are skipped.

    Raises:
        ValueError: a folder cannot be looked into, or a conversion has written it.
    """
    location = locate(unit.path)
    label = checked_label(unit.path.rpartition("/")[2])
    found = _walk(location.path, unit.folder) if location.is_local else _listed(location)
    rows = sorted(found, key=lambda row: row.path)
    if not unit.may_be_deep:
        _check_depth(unit, rows)
    for row in rows:
        key = relative(row.path, unit.folder)
        if _OURS & set(relative(row.path, unit.path).split("/")):
            raise ValueError(
                f"convert.source: {unit.path!r} holds {row.path!r}, of a conversion; move that "
                "folder out of the source"
            )
        if not is_hidden(key):
            labels = (label,) if row.problem is None else ()
            yield Row(**vars(row) | {"key": key, "labels": labels, "kind": "name"})


def _check_depth(unit: Unit, rows: list[Row]) -> None:
    """Raises ValueError for a folder that holds class folders, and is probably no class."""
    names = [relative(row.path, unit.path) for row in rows if is_image_name(row.path)]
    deeper = [name for name in names if "/" in name and not is_hidden(name)]
    if deeper and (len(deeper) == len(names) or named_split(unit.name)):
        above, name = deeper[0].rpartition("/")[0], unit.path.rpartition("/")[2]
        raise ValueError(
            f"convert.source: {unit.path!r} holds no images itself, or is a split by its name; "
            f"they lie deeper, such as in '{unit.path}/{above}'. If that is a class, give a glob "
            f"of the class folders, such as {f'{unit.path}/{above}'.rpartition('/')[0]}/*; if "
            f"{name!r} is one, set convert.format=folder"
        )


def loose_rows(unit: Unit) -> Iterator[Row]:
    """Images next to the class folders, which have no class."""
    for path in loose_images(locate(unit.path)):
        yield Row(relative(path, unit.folder), problem="it is not in a class folder")


def loose_images(folder: Location) -> list[str]:
    """Addresses of the images directly in a folder."""
    files = [folder.child(info.base_name).uri for info in folder.list_files(recursive=False)]
    return [path for path in files if is_image_name(path)]


def _listed(folder: Location) -> Iterator[Row]:
    for info in folder.list_files():
        path = f"{folder.protocol}://{info.path}"
        yield Row("", path=path, length=info.size, version=info.version)


def _walk(folder: str, root: str) -> Iterator[Row]:
    """Everything that is not a folder, each real folder once, however many links lead to it."""
    seen = {_identity(root)}
    waiting = [folder]
    while waiting:
        path = waiting.pop()
        if _identity(path) in seen:
            problem = "it is a link to a folder that is read already"
            yield Row("", path=path, length=0, problem=problem)
            continue
        seen.add(_identity(path))
        try:
            with os.scandir(path) as scan:
                items = list(scan)
        except PermissionError as error:
            raise ValueError(  # how many images it holds is unknown
                f"convert.source: the folder {path!r} cannot be read ({error.strerror}); grant "
                "read access, or move it away"
            ) from error
        folders = [item for item in items if _is_folder(item)]
        # Links are followed last, so that a folder keeps its own name if it has one.
        waiting[:0] = sorted(item.path for item in folders if item.is_symlink())
        waiting += sorted((i.path for i in folders if not i.is_symlink()), reverse=True)
        yield from (_file(item.path) for item in items if not _is_folder(item))


def _is_folder(item: os.DirEntry[str]) -> bool:
    try:
        return item.is_dir()
    except OSError:  # a link to itself
        return False


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _file(path: str) -> Row:
    try:
        os.stat(path)
    except OSError as error:
        return Row("", path=path, length=0, problem=f"it cannot be read: {error.strerror}")
    info = local_info(path)
    if info.kind != "file":
        return Row("", path=path, length=0, problem="it is not a regular file")
    return Row("", path=path, length=info.size, version=info.version)
