"""Where the images of a conversion lie, one listing per layout."""

from collections.abc import Sequence
from dataclasses import dataclass

from pyarrow import fs

from vit_ray.data.storage import locate


@dataclass(frozen=True)
class ImageFile:
    """One image to convert; `key` names it in its source, and is unique there."""

    path: str
    key: str
    labels: tuple[int, ...]
    bytes: int


def list_class_folders(
    source: str, classes: Sequence[str] | None
) -> tuple[list[str], list[ImageFile]]:
    """Class names and files of a folder whose sub-folders are the classes.

    Raises:
        ValueError: if there is no such folder, it holds no class folders with files, or `classes`
            lacks one of its folders.
    """
    folder = locate(source)
    if folder.info().type != fs.FileType.Directory:
        raise ValueError(f"convert.source={source!r}: no such folder; check the path.")
    found = [(info, _relative(info.path, folder.path)) for info in folder.list_files()]
    found = [(info, key) for info, key in found if "/" in key and not _is_hidden(key)]
    names = (
        list(classes) if classes is not None else sorted({key.split("/")[0] for _, key in found})
    )
    if not found:
        raise ValueError(
            f"convert.source={source!r} holds no files in class folders; "
            f"expected {source.rstrip('/')}/CLASS/IMAGE."
        )
    label_of = {name: label for label, name in enumerate(names)}
    unknown = sorted({key.split("/")[0] for _, key in found} - set(label_of))
    if unknown:
        raise ValueError(
            f"convert.source={source!r}: folders {unknown[:5]} are not in classes={names}."
        )
    scheme = "s3://" if source.startswith("s3://") else ""
    files = [
        ImageFile(scheme + info.path, key, (label_of[key.split("/")[0]],), info.size)
        for info, key in found
    ]
    return names, files


def _relative(path: str, folder: str) -> str:
    return path[len(folder.rstrip("/")) + 1 :]


def _is_hidden(key: str) -> bool:
    return any(part.startswith(".") for part in key.split("/"))
