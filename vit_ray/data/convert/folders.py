"""Class folders: the files below each, at any depth."""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from vit_ray.data.convert.files import named_split
from vit_ray.data.convert.labels import checked_label
from vit_ray.data.convert.rows import Row, Unit, relative
from vit_ray.data.dataset import MANIFEST_FILE, STAGING_FOLDER
from vit_ray.data.images import is_hidden, is_image_name
from vit_ray.storage import Info, Location, local_info, locate

_OURS: Final = {MANIFEST_FILE, STAGING_FOLDER}


def folder_rows(unit: Unit) -> Iterator[Row]:
    """Files below a class folder, sorted by path; hidden ones are skipped.

    Raises:
        ValueError: a folder cannot be looked into, or a conversion has written it.
    """
    location = locate(unit.path)
    label = checked_label(unit.path.rpartition("/")[2])
    if location.is_local:
        rows = sorted(_walk(location.path, unit.folder), key=lambda row: row.path)
    else:
        rows = [_row(location, info) for info in location.list_files()]
    if unit.config.format != "folder":
        _check_depth(unit, rows)
    for row in rows:
        if _OURS & set(relative(row.path, unit.path).split("/")):
            raise ValueError(
                f"convert.source: {unit.path!r} holds {row.path!r}, of a conversion; move that "
                "folder out of the source"
            )
        key = relative(row.path, unit.folder)
        if not is_hidden(key):
            labels = (label,) if row.problem is None else ()
            yield replace(row, key=key, labels=labels, kind="name")


def _check_depth(unit: Unit, rows: list[Row]) -> None:
    """Raises ValueError for a folder that holds class folders, and is probably no class."""
    paths = (relative(row.path, unit.path) for row in rows)
    names = [path for path in paths if is_image_name(path) and not is_hidden(path)]
    deeper = [name for name in names if "/" in name]
    # A cover, or a sample of each class, may lie next to the class folders.
    if len(deeper) > len(names) / 2 or (deeper and named_split(unit.name)):
        above, name = deeper[0].rpartition("/")[0], unit.path.rpartition("/")[2]
        raise ValueError(
            f"convert.source: {unit.path!r} holds few images itself, or is a split by its name; "
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


def _row(folder: Location, info: Info) -> Row:
    path = replace(folder, path=info.path).uri
    return Row("", path=path, length=info.size, version=info.version)


def _walk(folder: str, root: str) -> Iterator[Row]:
    """Everything that is not a folder, each real folder once, however many links lead to it."""
    again = "it is a link to a folder that is read already"
    seen = {_identity(root), _identity(folder)}
    if len(seen) == 1:
        yield Row("", path=folder, length=0, problem=again)
        return
    for path, names, files in os.walk(folder, followlinks=True, onerror=_refuse):
        # Links last, so that a folder keeps its own name if it has one.
        names.sort(key=lambda name: (os.path.islink(f"{path}/{name}"), name))
        for name in [*names]:
            if _identity(f"{path}/{name}") in seen:
                names.remove(name)
                yield Row("", path=f"{path}/{name}", length=0, problem=again)
            seen.add(_identity(f"{path}/{name}"))
        yield from (_file(f"{path}/{name}") for name in files)


def _refuse(error: OSError) -> None:
    """How many images it holds is unknown."""
    raise ValueError(
        f"convert.source: the folder {error.filename!r} cannot be read ({error.strerror}); grant "
        "read access, or move it away"
    ) from error


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _file(path: str) -> Row:
    problem = "it is not a regular file"
    try:
        os.stat(path)
        info = local_info(path)
        if info.kind == "file":
            return _row(Location("file", path), info)
    except OSError as error:
        problem = f"it cannot be read: {error.strerror}"
    return Row("", path=path, length=0, problem=problem)
