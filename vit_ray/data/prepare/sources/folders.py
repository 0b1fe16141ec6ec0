"""Class folders: the files below each, at any depth."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

from vit_ray.data.prepare.sources.entries import (
    IMAGE_SUFFIXES,
    WHOLE_FILE,
    IndexEntry,
    SourceUnit,
    is_hidden,
    rejected,
    relative,
)
from vit_ray.storage import Location, local_info, locate

_FileFound = tuple[str, int, str, str | None]
"""Path, size in bytes, version, and why it cannot be read as an image."""


def index_folder(unit: SourceUnit, pack: Location) -> Iterator[IndexEntry]:
    """Files below a class folder, sorted by path; hidden ones are skipped."""
    location = locate(unit.path)
    label = unit.path.rsplit("/", 1)[-1]
    found = _walk(location.path, unit.folder) if location.is_local else _listed(location)
    for path, size, version, problem in sorted(found, key=lambda one: one[0]):
        key = relative(path, unit.folder)
        if is_hidden(key):
            continue
        entry = IndexEntry(
            path, WHOLE_FILE, size, key, (label,), label_kind="name", version=version
        )
        yield entry if problem is None else replace(entry, length=0, labels=(), problem=problem)


def class_of(unit: SourceUnit) -> str | None:
    """The class of a class folder; None for another unit."""
    return unit.path.rsplit("/", 1)[-1] if unit.format == "folder" else None


def empty_text(source: str, classes: Sequence[str]) -> str:
    """The line about classes without images."""
    shown = ", ".join(classes[:10]) + (" and others" if len(classes) > 10 else "")
    what = (
        "1 class has no images" if len(classes) == 1 else f"{len(classes)} classes have no images"
    )
    return f"warning: {source}: {what}: {shown}; add images, or remove them there"


def index_loose_files(unit: SourceUnit, pack: Location) -> Iterator[IndexEntry]:
    """Images next to the class folders, which have no class."""
    for path in loose_images(locate(unit.path)):
        yield rejected(path, relative(path, unit.folder), "it is not in a class folder")


def loose_images(folder: Location) -> list[str]:
    """Addresses of the images directly in a folder."""
    files = [folder.child(info.base_name).uri for info in folder.list_files(recursive=False)]
    return [path for path in files if is_image_name(path)]


def is_image_name(path: str) -> bool:
    """Whether a file is named as an image is, and not hidden."""
    name = path.rsplit("/", 1)[-1]
    return not is_hidden(name) and name.rsplit(".", 1)[-1].lower() in IMAGE_SUFFIXES


def _listed(folder: Location) -> Iterator[_FileFound]:
    for info in folder.list_files():
        yield f"{folder.protocol}://{info.path}", info.size, info.version, None


def _walk(folder: str, root: str) -> Iterator[_FileFound]:
    """Everything that is not a folder, each real folder once, however many links lead to it."""
    seen = {_identity(root)}
    waiting = [folder]
    while waiting:
        path = waiting.pop()
        if _identity(path) in seen:
            yield path, 0, "", "it is a link to a folder that is read already"
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


def _file(path: str) -> _FileFound:
    try:
        os.stat(path)
    except OSError as error:
        return path, 0, "", f"it cannot be read: {error.strerror}"
    info = local_info(path)
    if info.kind != "file":
        return path, 0, "", "it is not a regular file"
    return path, info.size, info.version, None
